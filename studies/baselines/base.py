"""The common parts of all baselines: the checks of images, the training loop, and the choice of its length."""

from __future__ import annotations

import contextlib
import math
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar, Self

import numpy as np
import torch
from numpy.typing import NDArray
from sklearn.base import BaseEstimator, ClassifierMixin
from sklearn.utils import check_random_state
from sklearn.utils.multiclass import check_classification_targets
from sklearn.utils.validation import check_is_fitted, column_or_1d, validate_data
from torch import Tensor, nn
from torch.optim import Optimizer

from mvrbm import BoltzmannMachine, models
from mvrbm.devices import resolve_device
from mvrbm.training import Recipe, Trainer

__all__ = ["Descent", "ImageClassifier", "NetworkClassifier", "epochs_for", "train_rbm"]

Array = NDArray[Any]
#: Weight (n_out, n_in) and bias (n_out,) of one layer.
Layer = tuple[Tensor, Tensor]

# Samples to predict at once, to limit memory.
_ROWS_AT_ONCE = 2000
# One training sample in six is held out to choose the number of epochs.
_HELD_OUT_EVERY = 6
# Updates between two evaluations on the held-out samples, rounded up to whole epochs.
_UPDATES_PER_ROUND = 100
_FEWEST_ROUNDS = 10
_MOST_ROUNDS = 60
# Rounds without improvement after which training stops.
_PATIENCE = 15
# Updates before an update is captured as a CUDA graph, which create the optimizer's state.
_EAGER_UPDATES = 3


# -- classifiers of images --------------------------------------------------------------------------


class ImageClassifier(ClassifierMixin, BaseEstimator):
    """Base class of all classifiers. Subclasses get images as tensors on the device, and labels as 0, 1, ...

    Attributes
    ----------
    classes_ : array (n_classes,)
        The labels, sorted. The columns of `predict_proba` have this order.
    shape_ : tuple of int
        Shape of the samples passed to `fit`.
    n_parameters_ : int
        Number of learned parameters. Zero for nearest neighbors, which store the samples.
    fit_seconds_ : float
        Seconds that `fit` took, including the choice of the number of epochs.
    """

    classes_: Array
    shape_: tuple[int, ...]
    n_parameters_: int
    fit_seconds_: float
    random_state: Any
    device: str

    def fit(self, X: Any, y: Any) -> Self:
        """Learn from labeled images.

        Parameters
        ----------
        X : array (n, height, width) or (n, n_pixels)
            Floats from 0 to 1, or bytes (0 to 255).
        y : array (n,)
            Labels of any sortable type.
        """
        began = time.perf_counter()
        device = resolve_device(self.device)
        images = self._images(X, reset=True).to(device)
        labels = column_or_1d(y)
        check_classification_targets(labels)
        if len(labels) != len(images):
            raise ValueError(f"X and y must be of equal length, got {len(images)} images and {len(labels)} labels")
        self.classes_, codes = np.unique(labels, return_inverse=True)
        if len(self.classes_) < 2:
            raise ValueError(f"y must have at least two classes, got {len(self.classes_)}: {self.classes_.tolist()}")
        seed = int(check_random_state(self.random_state).randint(2**31 - 1))
        with _seeded(seed, device):
            self.n_parameters_ = self._fit(images, torch.from_numpy(codes).to(device))
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        self.fit_seconds_ = time.perf_counter() - began
        return self

    def predict_proba(self, X: Any) -> Array:
        """Return the probability of each class, (n, n_classes), in the order of `classes_`."""
        check_is_fitted(self)
        images = self._images(X, reset=False)
        device = resolve_device(self.device)
        with torch.no_grad():
            return torch.cat(
                [self._probabilities(part.to(device)).cpu() for part in images.split(_ROWS_AT_ONCE)]
            ).numpy()

    def predict(self, X: Any) -> Array:
        """Return the most probable label of each image, (n,)."""
        probabilities = self.predict_proba(X)
        labels: Array = self.classes_[probabilities.argmax(1)]
        return labels

    def _fit(self, images: Tensor, codes: Tensor) -> int:
        """Learn from images, and return the number of parameters."""
        raise NotImplementedError

    def _probabilities(self, images: Tensor) -> Tensor:
        """Return the probabilities of the classes, (n, n_classes)."""
        raise NotImplementedError

    def _images(self, X: Any, *, reset: bool) -> Tensor:
        """Check images and return them as float32, (n, *shape)."""
        given = np.asarray(X)
        if given.ndim > 2 and given.size:
            rows = given.reshape(len(given), -1)
            shape = given.shape[1:]
        else:
            rows = given
            shape = given.shape[1:]
        rows = validate_data(self, rows, reset=reset, dtype=None if given.dtype == np.uint8 else np.float32)
        if rows.dtype != np.uint8 and (rows.min() < 0 or rows.max() > 1):
            raise ValueError(f"X must be floats from 0 to 1, or bytes, got {rows.min():g} to {rows.max():g}")
        if reset:
            self.shape_ = tuple(shape)
        elif len(shape) > 1 and len(self.shape_) > 1 and tuple(shape) != self.shape_:
            raise ValueError(f"X must have samples of shape {self.shape_}, got {tuple(shape)}")
        tensor = torch.from_numpy(np.array(rows)).float()
        tensor = tensor / 255 if rows.dtype == np.uint8 else tensor
        return tensor.reshape(len(rows), *self.shape_)


@dataclass(eq=False, repr=False, kw_only=True)
class NetworkClassifier(ImageClassifier):
    r"""A network trained by backpropagation, with the number of epochs chosen on held-out training samples.

    One training sample in six, balanced over the classes, is held out. The network learns from the others
    at a constant rate, in rounds of whole epochs and at least 100 updates; after each round its errors on
    the held-out samples are counted, ties broken by the cross-entropy. It stops 15 rounds after the best one, after
    10 rounds at the earliest and 60 at the latest. Then a new network learns from all samples for the best number of
    epochs (and at least 10 rounds), its rate falling to zero along half a cosine.

    Pre-training, which uses no labels, is done once and on all samples.

    Parameters
    ----------
    epochs : int, optional
        Number of epochs. Default: chosen on held-out training samples.
    batch_size : int, optional
        Samples per update. Default: a fortieth of all samples, between 16 and 128.
    learning_rate : float
        Learning rate.
    random_state : int, RandomState or None
        Random seed.
    device : str
        Device to compute on.

    Attributes
    ----------
    network_ : torch.nn.Module
        The network: images (n, \*shape) to logits (n, n_classes).
    epochs_ : int
        Number of epochs of training.
    """

    epochs: int | None = None
    batch_size: int | None = None
    learning_rate: float = 1e-3
    random_state: Any = None
    device: str = "auto"
    network_: nn.Module = field(init=False)
    epochs_: int = field(init=False)

    _falling_rate: ClassVar[bool] = True

    # -- for subclasses ---------------------------------------------------------------------------

    def _network(self, images: Tensor, n_classes: int) -> nn.Module:
        """Return a new network from images (n, *shape) to logits (n, n_classes)."""
        raise NotImplementedError

    def _pretrain(self, images: Tensor) -> Sequence[Layer]:
        """Return initial values of the first fully connected layers. The others start at random."""
        return ()

    def _loss(self, logits: Tensor, codes: Tensor) -> Tensor:
        return nn.functional.cross_entropy(logits, codes)

    def _optimizer(self, parameters: Iterable[nn.Parameter], device: torch.device) -> Optimizer:
        return adam(parameters, self.learning_rate, device)

    def _batch(self, n: int) -> int:
        """Return the batch size."""
        return min(n, self.batch_size or min(128, max(16, n // 40)))

    # -- learning ---------------------------------------------------------------------------------

    def _fit(self, images: Tensor, codes: Tensor) -> int:
        for name in ("epochs", "batch_size"):
            value = getattr(self, name)
            if value is not None and (value != int(value) or value < 1):
                raise ValueError(f"{name} must be None or a whole number of at least 1, got {value!r}")
        if not 0 < self.learning_rate < math.inf:
            raise ValueError(f"learning_rate must be positive, got {self.learning_rate!r}")
        start = self._pretrain(images)
        self.epochs_ = int(self.epochs or self._best_epochs(images, codes, start))
        network, descent = self._start(images, codes, start)
        descent.run(self.epochs_, falling=self._falling_rate)
        self.network_ = network.eval()
        return sum(parameter.numel() for parameter in network.parameters())

    def _start(self, images: Tensor, codes: Tensor, start: Sequence[Layer]) -> tuple[nn.Module, Descent]:
        """Return a new network, and the loop that trains it on these samples."""
        network = self._network(images, len(self.classes_)).to(images.device)
        linear = [module for module in network.modules() if isinstance(module, nn.Linear)]
        with torch.no_grad():
            for module, (weight, bias) in zip(linear, start, strict=False):
                module.weight.copy_(weight)
                module.bias.copy_(bias)

        def loss(rows: Tensor) -> Tensor:
            return self._loss(network(images[rows]), codes[rows])

        optimizer = self._optimizer(network.parameters(), images.device)
        return network, Descent(loss, optimizer, len(images), self._batch(len(images)), images.device)

    def _best_epochs(self, images: Tensor, codes: Tensor, start: Sequence[Layer]) -> int:
        n = len(images)
        shuffled = torch.randperm(n).to(codes.device)
        by_class = shuffled[codes[shuffled].argsort(stable=True)]  # every sixth of these has the classes in proportion
        held_out = by_class[::_HELD_OUT_EVERY]
        kept = torch.ones(n, dtype=torch.bool, device=codes.device)
        kept[held_out] = False
        if not bool(kept.any()):
            raise ValueError(f"X must have at least two images, got {n}")
        network, descent = self._start(images[kept], codes[kept], start)
        epochs_per_round = math.ceil(_UPDATES_PER_ROUND / descent.updates_per_epoch)
        best = (math.inf, math.inf)
        best_round = 0
        for number in range(1, _MOST_ROUNDS + 1):
            network.train()
            descent.run(epochs_per_round)
            score = _errors_and_loss(network.eval(), images[held_out], codes[held_out])
            if score < best:
                best, best_round = score, number
            if number >= max(_FEWEST_ROUNDS, best_round + _PATIENCE):
                break
        return epochs_per_round * max(best_round, _FEWEST_ROUNDS)

    def _probabilities(self, images: Tensor) -> Tensor:
        return torch.softmax(self.network_(images).double(), dim=1)


@torch.no_grad()
def _errors_and_loss(network: nn.Module, images: Tensor, codes: Tensor) -> tuple[float, float]:
    logits = torch.cat([network(part) for part in images.split(_ROWS_AT_ONCE)])
    wrong = (logits.argmax(1) != codes).double().mean()
    both = torch.stack([wrong, nn.functional.cross_entropy(logits, codes).double()]).tolist()
    return both[0], both[1]


# -- the training loop ------------------------------------------------------------------------------


class Descent:
    """Stochastic gradient descent on a loss over samples on the device.

    The order of samples is drawn on the device, so nothing waits for the host within an epoch. On a GPU an update is
    captured once as a CUDA graph and replayed. Samples that do not fill the last batch of an epoch are skipped in that
    epoch.

    Parameters
    ----------
    loss : callable
        Takes row numbers (batch_size,), and returns a scalar.
    optimizer : Optimizer
        The optimizer. Its learning rate can fall only if it is a tensor, as in :func:`adam`.
    n_samples, batch_size : int
        Number of samples, and of samples per update.
    device : torch.device
        Device of the data.
    """

    def __init__(
        self,
        loss: Callable[[Tensor], Tensor],
        optimizer: Optimizer,
        n_samples: int,
        batch_size: int,
        device: torch.device,
    ) -> None:
        self._loss = loss
        self._optimizer = optimizer
        self._n_samples = n_samples
        self._batch_size = batch_size
        self._rows = torch.zeros(batch_size, dtype=torch.long, device=device)
        self._graph: torch.cuda.CUDAGraph | None = None
        self._eager = _EAGER_UPDATES if device.type == "cuda" else math.inf

    @property
    def updates_per_epoch(self) -> int:
        """Number of full batches per epoch."""
        return self._n_samples // self._batch_size

    def run(self, epochs: int, *, falling: bool = False) -> None:
        """Train for some epochs. With `falling`, the learning rate falls to zero along half a cosine."""
        rates = [group["lr"] for group in self._optimizer.param_groups]
        starts = [float(rate) for rate in rates]
        total = epochs * self.updates_per_epoch
        update = 0
        for _ in range(epochs):
            order = torch.randperm(self._n_samples, device=self._rows.device)
            for first in range(0, self.updates_per_epoch * self._batch_size, self._batch_size):
                if falling:
                    for rate, start in zip(rates, starts, strict=True):
                        rate.fill_(start * (1 + math.cos(math.pi * update / total)) / 2)
                self._rows.copy_(order[first : first + self._batch_size])
                self._update()
                update += 1

    def _update(self) -> None:
        if self._graph is not None:
            self._graph.replay()
        elif self._eager > 0:
            self._eager -= 1
            self._step()
        else:
            self._graph = torch.cuda.CUDAGraph()
            torch.cuda.synchronize()
            with torch.cuda.graph(self._graph):
                self._step()
            self._graph.replay()  # capturing an update does not execute it

    def _step(self) -> None:
        self._optimizer.zero_grad(set_to_none=True)
        self._loss(self._rows).backward()
        self._optimizer.step()


def adam(parameters: Iterable[nn.Parameter], rate: float, device: torch.device) -> torch.optim.Adam:
    """Return Adam with a learning rate that can be changed inside a CUDA graph."""
    return torch.optim.Adam(
        parameters, lr=torch.tensor(rate, device=device), fused=True, capturable=device.type == "cuda"
    )


def epochs_for(n_samples: int, batch_size: int, updates: int, *, at_least: int = 10) -> int:
    """Return the smallest number of epochs, at least `at_least`, that has the given number of updates."""
    return max(at_least, math.ceil(updates / max(1, n_samples // batch_size)))


def train_rbm(x: Tensor, n_hidden: int, *, updates: int) -> BoltzmannMachine:
    """Train a classic RBM on rows with our default recipe.

    Parameters
    ----------
    x : Tensor (n, n_visible)
        Values from 0 to 1.
    n_hidden : int
        Number of hidden units.
    updates : int
        Smallest number of updates. There are at least ten epochs.

    Returns
    -------
    BoltzmannMachine
        The RBM. Its visible layer is called ``"visible"``.
    """
    batch_size = min(100, len(x))
    recipe = Recipe(n_epochs=epochs_for(len(x), batch_size, updates), batch_size=batch_size)
    machine = models.rbm(x.shape[1], n_hidden).to(device=x.device, dtype=x.dtype)
    Trainer(machine, recipe, seed=int(torch.randint(2**31, ()))).fit(x, initialize=True)
    return machine


# -- random numbers ---------------------------------------------------------------------------------


@contextlib.contextmanager
def _seeded(seed: int, device: torch.device) -> Iterator[None]:
    """Seed the global generators, which layers draw from, and restore them afterwards."""
    gpus = [device] if device.type == "cuda" else []
    with torch.random.fork_rng(devices=gpus), torch.backends.cudnn.flags(enabled=True, deterministic=True):
        torch.default_generator.manual_seed(seed)
        for gpu in gpus:
            with torch.cuda.device(gpu):
                torch.cuda.manual_seed(seed)
        yield
