"""The contestants: each class trains as its own package does, through that package's interface.

All get the same float32 samples, already on the device, and the same batch size. Learning rates are lowered for larger
layers so that training does not diverge in a long run: the time of an update does not depend on them.
"""

from __future__ import annotations

import dataclasses
import functools
import importlib
import importlib.util
import operator
import warnings
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator
from typing import ClassVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from benchmarks.problems import Problem
from mvrbm.machine import BoltzmannMachine
from mvrbm.models import mvrbm, rbm
from mvrbm.training import CD, PCD, RECIPES, Trainer

_FLOAT = 4  # bytes


class Contestant(ABC):
    """A model that is trained on a problem.

    Parameters
    ----------
    problem : Problem
        The problem.
    phase : {"cd", "pcd"}
        CD-1 or PCD-1.
    data : Tensor (n, *visible)
        Samples, on the device to train on.
    recipe : str
        Recipe, for mvrbm's own machines.
    seed : int
        Random seed.
    n_chains : int
        Chains of PCD-1; 0 is as many as a batch has samples.
    """

    key: ClassVar[str]
    title: ClassVar[str]
    phases: ClassVar[tuple[str, ...]] = ("cd", "pcd")
    package: ClassVar[str | None] = None  # required package
    note: ClassVar[str] = ""
    dense: ClassVar[bool] = True
    copies: ClassVar[int] = 4  # arrays of the size of the weights in an update
    models: ClassVar[int] = 1  # trained at once: times are per model
    on_gpu: ClassVar[bool] = True

    def __init__(
        self, problem: Problem, phase: str, data: Tensor, *, recipe: str = "paper", seed: int = 0, n_chains: int = 0
    ) -> None:
        self.problem, self.phase, self.data, self.recipe, self.seed = problem, phase, data, recipe, seed
        self.n_chains = n_chains or problem.batch_size
        self.device = data.device
        self._build()

    @classmethod
    def unsupported_reason(cls, problem: Problem, memory_limit: float = float("inf")) -> str | None:
        """Return why this contestant cannot take a problem, or None. Nothing is allocated."""
        if cls.package is not None and importlib.util.find_spec(cls.package) is None:
            return f"{cls.package} is not installed: pip install {cls.package}"
        if cls.dense and problem.rank > 1:
            return "full weights have no rank"
        need = cls.bytes_needed(problem)
        if need > memory_limit:
            return f"needs about {need / 2**30:,.1f} GiB, the limit is {memory_limit / 2**30:,.1f} GiB"
        return None

    @classmethod
    def bytes_needed(cls, problem: Problem) -> int:
        """Smallest memory of an update, from the shapes alone: weights, their copies, states."""
        n, between = problem.batch_size, _between(problem)
        weights = problem.n_visible * problem.n_hidden if cls.dense else _factor_entries(problem)
        states = 4 * n * (problem.n_visible + problem.n_hidden) + (0 if cls.dense else 4 * n * between)
        return _FLOAT * (cls.copies * weights + states)

    @abstractmethod
    def _build(self) -> None: ...

    @abstractmethod
    def run(self, epochs: int) -> None:
        """Train for some epochs. The device may still be at work on return."""

    @property
    @abstractmethod
    def n_parameters(self) -> int:
        """Number of parameters."""

    @abstractmethod
    def reconstruct(self, data: Tensor) -> Tensor:
        """Pass data up and down through the means, to check that training works."""

    def _batches(self, rows: Tensor) -> Iterator[Tensor]:
        """Yield the batches of rows in a new order, for packages without a loop over the data."""
        order = torch.randperm(len(rows), device=self.device)
        return (rows[order[first : first + self.problem.batch_size]] for first in self._firsts())

    def _firsts(self) -> range:
        return range(0, self.problem.n_samples, self.problem.batch_size)


# -- ours -------------------------------------------------------------------------------------------


class _Ours(Contestant):
    """A machine and a trainer, as the estimators put them together."""

    def _machine(self) -> BoltzmannMachine:
        raise NotImplementedError

    def _build(self) -> None:
        problem, negative = self.problem, CD(1) if self.phase == "cd" else PCD(self.n_chains, 1)
        recipe = dataclasses.replace(RECIPES[self.recipe], batch_size=problem.batch_size, negative=negative)
        if recipe.learning_rate is not None:
            recipe = dataclasses.replace(recipe, learning_rate=recipe.learning_rate * _gentler(problem))
        self.machine = self._machine().to(self.device)
        self.trainer = Trainer(self.machine, recipe, seed=self.seed)
        self.samples = self.data.reshape(-1, *self.machine.layers["visible"].shape)

    def run(self, epochs: int) -> None:
        self.trainer.fit(self.samples, self.trainer.epoch + epochs, initialize=self.trainer.epoch == 0)

    @property
    def n_parameters(self) -> int:
        return self.machine.n_parameters

    @torch.no_grad()
    def reconstruct(self, data: Tensor) -> Tensor:
        hidden = self.machine.hidden_mean(data.reshape(-1, *self.machine.layers["visible"].shape))
        return self.machine.visible_mean(hidden)["visible"].reshape(data.shape)


class OurMVRBM(_Ours):
    """A sum of Kronecker products, of the problem's rank and order."""

    key, title, dense, copies = "mvrbm", "mvrbm MVRBM", False, 8

    def _machine(self) -> BoltzmannMachine:
        return mvrbm(self.problem.visible, self.problem.hidden, self.problem.rank, seed=self.seed)


class OurRBM(_Ours):
    """Full weights."""

    key, title, copies = "rbm", "mvrbm RBM (dense)", 5

    def _machine(self) -> BoltzmannMachine:
        return rbm(self.problem.n_visible, self.problem.n_hidden, seed=self.seed)


# -- others -----------------------------------------------------------------------------------------


class ScikitLearn(Contestant):
    """`BernoulliRBM`: the loop over batches in its `fit`, after the setup; `partial_fit` would compute in float64."""

    key, title, phases, copies = "sklearn", "scikit-learn BernoulliRBM", ("pcd",), 5
    note = "PCD-1 is what it does; float32, since its input is; on the CPU always; batches in the data's order"
    on_gpu = False

    def _build(self) -> None:
        from sklearn.neural_network import BernoulliRBM

        self.rows: NDArray[np.float32] = self.data.cpu().numpy().reshape(len(self.data), -1)
        size, rate = self.problem.batch_size, 0.05
        self.model = BernoulliRBM(self.problem.n_hidden, learning_rate=rate, batch_size=size, n_iter=0, random_state=0)
        self.model.fit(self.rows)
        self.random = np.random.RandomState(self.seed)

    def run(self, epochs: int) -> None:
        for _ in range(epochs):
            for first in self._firsts():
                self.model._fit(self.rows[first : first + self.problem.batch_size], self.random)

    @property
    def n_parameters(self) -> int:
        parts = self.model.components_, self.model.intercept_hidden_, self.model.intercept_visible_
        return sum(int(part.size) for part in parts)

    def reconstruct(self, data: Tensor) -> Tensor:
        hidden = torch.from_numpy(self.model.transform(data.cpu().numpy().reshape(len(data), -1)))
        weights, bias = (torch.from_numpy(part) for part in (self.model.components_, self.model.intercept_visible_))
        return torch.sigmoid(hidden @ weights + bias).reshape(data.shape).to(data)


class Rbms(Contestant):
    """The package `rbms`: the body of its training loop, without the archive that it writes at every update."""

    key, title, package = "rbms", "rbms BBRBM", "rbms"
    note = "the body of its training loop (centered, gradient normalized), without its archive on disk"

    def _build(self) -> None:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # it is compiled with torch.jit, which is deprecated
            self.step = importlib.import_module("rbms.training.pcd").fit_batch_pcd
            model = importlib.import_module("rbms.bernoulli_bernoulli.classes").BBRBM
            dataset = importlib.import_module("rbms.dataset.dataset_class").RBMDataset
        n = len(self.data)
        rows = self.data.cpu().numpy().reshape(n, -1)
        ones, names = np.ones(n, np.float32), np.arange(n).astype(str)
        kept = dataset(rows, np.zeros(n, np.int32), ones, names, "digits", True, str(self.device), torch.float32)
        self.rows, self.weights = kept.data, kept.weights
        self.params = model.init_parameters(self.problem.n_hidden, kept, self.device, torch.float32, var_init=0.01)
        self.params.init_grad()
        self.chains = self.params.init_chains(self.n_chains)
        self.optimizer = torch.optim.SGD(self.params.parameters(), lr=0.05, maximize=True)

    @torch.no_grad()
    def run(self, epochs: int) -> None:
        size = self.problem.batch_size
        for _ in range(epochs):
            order = torch.randperm(len(self.rows), device=self.device)
            for first in self._firsts():
                chosen = order[first : first + size]
                batch = self.rows[chosen], self.weights[chosen]
                if self.phase == "cd":
                    self.chains = self.params.init_chains(size, weights=batch[1], start_v=batch[0])
                self.optimizer.zero_grad(set_to_none=False)
                with warnings.catch_warnings():
                    warnings.simplefilter("ignore")
                    self.chains, _ = self.step(batch, self.chains, self.params, gibbs_steps=1, beta=1.0)
                self.optimizer.step()

    @property
    def n_parameters(self) -> int:
        return sum(part.numel() for part in self.params.parameters())

    def reconstruct(self, data: Tensor) -> Tensor:
        return _up_down(data, self.params.weight_matrix, self.params.vbias, self.params.hbias)


class Learnergy(Contestant):
    """The package `learnergy`: its `fit`, which also estimates the pseudo-likelihood at every update."""

    key, title, package, phases = "learnergy", "learnergy RBM", "learnergy", ("cd",)
    note = "its fit, with its loader and the pseudo-likelihood that it estimates at every update; CD only"

    def _build(self) -> None:
        model = importlib.import_module("learnergy.models.bernoulli.rbm").RBM
        rows = self.data.reshape(len(self.data), -1)
        self.dataset = torch.utils.data.TensorDataset(rows, torch.zeros(len(rows), device=self.device))
        visible, hidden = self.problem.n_visible, self.problem.n_hidden
        self.model = model(visible, hidden, learning_rate=0.05, use_gpu=self.device.type == "cuda")

    def run(self, epochs: int) -> None:
        self.model.fit(self.dataset, batch_size=self.problem.batch_size, epochs=epochs)

    @property
    def n_parameters(self) -> int:
        return sum(part.numel() for part in self.model.parameters())

    def reconstruct(self, data: Tensor) -> Tensor:
        return _up_down(data, self.model.W.detach(), self.model.a.detach(), self.model.b.detach())


class PlainTorch(Contestant):
    """The MVRBM as a reader of the paper would write it: Algorithm 1 in batched products of PyTorch."""

    key, title, dense, copies = "torch", "plain PyTorch MVRBM", False, 8
    note = "Algorithm 1 in batched products and torch.bernoulli, gradients by hand"

    momentum, decay, std = 0.5, 0.01, 0.1

    @classmethod
    def unsupported_reason(cls, problem: Problem, memory_limit: float = float("inf")) -> str | None:
        """Return a reason for any order but 2."""
        if problem.order != 2:
            return "it is written for matrices"
        return super().unsupported_reason(problem, memory_limit)

    def _build(self) -> None:
        problem = self.problem
        generator = torch.Generator().manual_seed(self.seed)
        sizes = zip(problem.hidden, problem.visible, strict=True)
        U, V = (self.std * torch.randn(problem.rank, *size, generator=generator) for size in sizes)
        B, C = torch.zeros(problem.visible), torch.zeros(problem.hidden)
        self.parameters = [part.to(self.device) for part in (U, V, B, C)]
        self.steps = [torch.zeros_like(part) for part in self.parameters]
        self.rate = 0.05 * _gentler(problem)
        self.chain = torch.bernoulli(self.data[torch.arange(self.n_chains) % len(self.data)])

    def _up(self, X: Tensor) -> Tensor:
        U, V, _, C = self.parameters
        return torch.sigmoid(_sum(u @ X @ v.T for u, v in zip(U, V, strict=True)) + C)

    def _down(self, Y: Tensor) -> Tensor:
        U, V, B, _ = self.parameters
        return torch.sigmoid(_sum(u.T @ Y @ v for u, v in zip(U, V, strict=True)) + B)

    def _moments(self, X: Tensor, Y: Tensor) -> list[Tensor]:
        U, V, _, _ = self.parameters
        n = len(X)
        of_u = torch.stack([torch.einsum("nkl,nil->ki", Y, X @ v.T) / n for v in V])
        of_v = torch.stack([torch.einsum("nil,nij->lj", u.T @ Y, X) / n for u in U])
        return [of_u, of_v, X.mean(0), Y.mean(0)]

    def _update(self, X: Tensor) -> None:
        hidden = self._up(X)
        start = hidden if self.phase == "cd" else self._up(self.chain)
        chain = torch.bernoulli(self._down(torch.bernoulli(start)))
        if self.phase == "pcd":
            self.chain = chain
        learned = zip(self._moments(X, hidden), self._moments(chain, self._up(chain)), strict=True)
        for parameter, step, (data, model) in zip(self.parameters, self.steps, learned, strict=True):
            decay = self.decay if parameter.ndim == 3 else 0.0
            step.mul_(self.momentum).add_(data - model - decay * parameter)
            parameter.add_(step, alpha=self.rate)

    @torch.no_grad()
    def run(self, epochs: int) -> None:
        for _ in range(epochs):
            for X in self._batches(self.data):
                self._update(X)

    @property
    def n_parameters(self) -> int:
        return sum(part.numel() for part in self.parameters)

    @torch.no_grad()
    def reconstruct(self, data: Tensor) -> Tensor:
        return self._down(self._up(data))


#: All contestants by key.
CONTESTANTS: dict[str, type[Contestant]] = {
    kind.key: kind for kind in (OurMVRBM, OurRBM, ScikitLearn, Rbms, Learnergy, PlainTorch)
}


# -- helpers ----------------------------------------------------------------------------------------


def _up_down(data: Tensor, weights: Tensor, visible_bias: Tensor, hidden_bias: Tensor) -> Tensor:
    hidden = torch.sigmoid(data.reshape(len(data), -1) @ weights + hidden_bias)
    return torch.sigmoid(hidden @ weights.T + visible_bias).reshape(data.shape)


def _sum(terms: Iterable[Tensor]) -> Tensor:
    return functools.reduce(operator.add, terms)


def _gentler(problem: Problem) -> float:
    """Return the factor by which the learning rate is lowered.

    Turns on a GPU may have 100,000 updates, within which the paper's rate can diverge. Time does not depend on it.
    """
    return 0.1 * min(1.0, 784 * 625 / (problem.n_visible * problem.n_hidden)) / problem.rank


def _factor_entries(problem: Problem) -> int:
    return problem.rank * sum(k * i for k, i in zip(problem.hidden, problem.visible, strict=True))


def _between(problem: Problem) -> int:
    """Entries per sample of the largest array between the layers: some axes visible, the others hidden."""
    sizes, largest = list(problem.visible), 0
    for mode, size in enumerate(problem.hidden):
        sizes[mode] = size
        largest = max(largest, int(np.prod(sizes)))
    return problem.rank * largest
