"""Many trainings in one go: machines that differ in seeds, rates, penalties or ranks, on the same data.

On a GPU, machines of one shape are trained together by the same kernels, which keeps the card busy where a
single small machine leaves most of it idle. Of several processes (``torchrun``), each trains its own candidates.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from sklearn.base import clone
from sklearn.model_selection import ParameterGrid

from mvrbm.estimators.rbm import _SingleLayer
from mvrbm.io.shards import Shards
from mvrbm.learning.data import Source, as_source
from mvrbm.learning.distributed import World, by_itself
from mvrbm.learning.paths import triton as fused
from mvrbm.learning.trainer import DivergenceError, Trainer

__all__ = ["Candidate", "Sweep", "train_together"]

Grid = Mapping[str, Sequence[Any]] | Sequence[Mapping[str, Sequence[Any]]]


@dataclass
class Candidate:
    """One of the trainings of a sweep.

    Attributes
    ----------
    params : dict
        What sets it apart.
    estimator : estimator or None
        The fitted model; None if it diverged, or if another process has it.
    score : float
        On held-out samples, the larger the better; minus infinity if it diverged.
    diverged : bool
        Whether its parameters left the finite numbers.
    seconds : float
        Of training, shared evenly among those that were trained together.
    """

    params: dict[str, Any]
    estimator: Any = field(repr=False, default=None)
    score: float = float("-inf")
    diverged: bool = False
    seconds: float = float("nan")


class Sweep:
    """Trains one estimator with many settings at once, and keeps the best.

    Parameters
    ----------
    estimator : RBM, MVRBM or TVRBM
        What is trained; it is cloned.
    grid : mapping of str to sequence, or sequence of these
        Values to try by parameter, as scikit-learn's `ParameterGrid` takes them. `random_state` is one of them.
    scoring : callable, optional
        Takes a fitted estimator, held-out samples and their labels (or None), and returns what is to be
        large; the estimator's own `score` if not given.
    validation : float
        Share of the samples that is held out for scoring.
    random_state : int
        Which samples these are.

    Attributes
    ----------
    candidates_ : list of Candidate
        All of them, in the order of the grid.
    best_estimator_, best_params_, best_score_
        The one with the largest score.

    Examples
    --------
    >>> import numpy as np
    >>> from mvrbm import MVRBM
    >>> from mvrbm.estimators.sweep import Sweep
    >>> X = (np.random.default_rng(0).random((200, 6, 6)) < 0.3).astype(np.float32)
    >>> sweep = Sweep(MVRBM((4, 4), n_epochs=2), {"rank": [1, 2], "random_state": [0, 1]}).fit(X)
    >>> len(sweep.candidates_)
    4
    """

    candidates_: list[Candidate]
    best_estimator_: Any
    best_params_: dict[str, Any]
    best_score_: float

    def __init__(
        self,
        estimator: _SingleLayer,
        grid: Grid,
        *,
        scoring: Any = None,
        validation: float = 0.1,
        random_state: int = 0,
    ) -> None:
        self.estimator, self.grid, self.scoring = estimator, grid, scoring
        self.validation, self.random_state = validation, random_state

    def fit(self, X: Any, y: Any = None) -> Sweep:
        """Train all candidates and score them.

        Parameters
        ----------
        X : array (n, *visible_shape) or (n, n_features)
            Samples.
        y : array (n,), optional
            Labels, for `scoring` alone.
        """
        if not 0 < self.validation < 1:
            raise ValueError(f"validation must lie between 0 and 1, got {self.validation}")
        X = X[:] if isinstance(X, Shards) else np.asarray(X)
        order = np.random.default_rng(self.random_state).permutation(len(X))
        n_held = max(1, round(self.validation * len(X)))
        if n_held >= len(X):
            raise ValueError(f"{len(X)} samples are too few to hold {n_held} out")
        held, kept = np.sort(order[:n_held]), np.sort(order[n_held:])
        settings = list(ParameterGrid(self.grid))
        self.candidates_ = [Candidate(dict(params)) for params in settings]
        world = World.here()
        mine = self.candidates_[world.rank :: world.size]
        self._train(mine, X[kept])
        for candidate in mine:
            if not candidate.diverged:
                labels = None if y is None else np.asarray(y)[held]
                candidate.score = self._score(candidate.estimator, X[held], labels)
        self._tell(world)
        best = max(range(len(settings)), key=lambda number: self.candidates_[number].score)
        self.best_params_, self.best_score_ = self.candidates_[best].params, self.candidates_[best].score
        if self.best_score_ == float("-inf"):
            raise DivergenceError(f"all {len(settings)} trainings diverged: lower the learning rates")
        self.best_estimator_ = self._best(best, world, X[kept])
        return self

    def _score(self, estimator: Any, X: Any, y: Any) -> float:
        return float(estimator.score(X) if self.scoring is None else self.scoring(estimator, X, y))

    def _train(self, candidates: Sequence[Candidate], X: Any) -> None:
        trainers: list[Trainer] = []
        data: list[dict[str, Any]] = []
        for candidate in candidates:
            candidate.estimator, layers = self._started(candidate.params, X)
            trainers.append(candidate.estimator._trainer)
            data.append(data[0] if data else layers)  # one copy for all, where they are trained at once
        done = train_together(trainers, data)
        for candidate, (diverged, seconds) in zip(candidates, done, strict=True):
            candidate.diverged, candidate.seconds = diverged, seconds
            candidate.estimator.history_ = candidate.estimator._trainer.history
            if diverged:
                candidate.estimator = None

    def _started(self, params: Mapping[str, Any], X: Any) -> tuple[Any, dict[str, Any]]:
        """Return an estimator that is about to learn, and the data as it takes it."""
        estimator = clone(self.estimator).set_params(**params)
        layers = estimator._layers(X, reset=True)
        with by_itself():
            estimator._start(layers)
        return estimator, dict(layers)

    def _tell(self, world: World) -> None:
        """Let every process know all scores."""
        if world.size == 1:
            return
        table = torch.zeros(len(self.candidates_), 3, dtype=torch.float64)
        for number, candidate in enumerate(self.candidates_):
            if number % world.size == world.rank:
                score = max(candidate.score, -1e300)
                table[number] = torch.tensor([score, float(candidate.diverged), candidate.seconds])
        world.add_up(table)
        for candidate, (score, diverged, seconds) in zip(self.candidates_, table.tolist(), strict=True):
            candidate.score, candidate.diverged, candidate.seconds = score, diverged > 0, seconds
            candidate.score = float("-inf") if candidate.diverged else candidate.score

    def _best(self, best: int, world: World, X: Any) -> Any:
        """Return the best estimator, on every process."""
        owner, candidate = best % world.size, self.candidates_[best]
        if world.size == 1:
            return candidate.estimator
        estimator = candidate.estimator
        if owner != world.rank:
            estimator, _ = self._started(candidate.params, X)
        for parameter in estimator.machine_.parameters():
            mine = parameter.data if owner == world.rank else torch.zeros_like(parameter.data)
            world.add_up(mine)
            parameter.data.copy_(mine)
        estimator._trainer, estimator.history_ = None, []  # one process's: to learn more is to begin anew, together
        return estimator


def train_together(trainers: Sequence[Trainer], data: Sequence[Any]) -> list[tuple[bool, float]]:
    """Train machines, on a GPU those of one shape at once.

    Parameters
    ----------
    trainers : sequence of Trainer
        Each with its machine, recipe and seed.
    data : sequence
        The data of each; one and the same object where it is shared.

    Returns
    -------
    list of (bool, float)
        Whether each diverged, and its share of the seconds.
    """
    outcome: dict[int, tuple[bool, float]] = {}
    groups: dict[Any, list[int]] = {}
    for number, (trainer, samples) in enumerate(zip(trainers, data, strict=True)):
        groups.setdefault(_kind(trainer, samples, number), []).append(number)
    for numbers in groups.values():
        began = time.perf_counter()
        if len(numbers) > 1:
            diverged = _train_fused([trainers[number] for number in numbers], [data[number] for number in numbers])
        else:
            diverged = [_train_alone(trainers[numbers[0]], data[numbers[0]])]
        seconds = (time.perf_counter() - began) / len(numbers)
        outcome |= {number: (one, seconds) for number, one in zip(numbers, diverged, strict=True)}
    return [outcome[number] for number in range(len(trainers))]


def _kind(trainer: Trainer, samples: Any, number: int) -> Any:
    """What trainings have to have in common to be made together; a thing of its own if it cannot be."""
    source = as_source(samples, trainer.machine)
    if fused.refuses(trainer, source) is not None:
        return number
    machine, recipe = trainer.machine, trainer.recipe
    layers = tuple((name, unit.name, unit.shape) for name, unit in machine.layers.items())
    steps = (recipe.n_epochs, recipe.batch_size, recipe.negative, recipe.normalised, recipe.balance, recipe.centring)
    return layers, machine.hidden.name, machine.hidden.shape, steps, source.n_samples


def _train_alone(trainer: Trainer, samples: Any) -> bool:
    try:
        trainer.fit(samples)
    except DivergenceError:
        return True
    return False


def _train_fused(trainers: Sequence[Trainer], data: Sequence[Any]) -> list[bool]:
    shared = all(samples is data[0] for samples in data)
    sources: list[Source] = []
    for trainer, samples in zip(trainers, data, strict=True):
        source = sources[0] if shared and sources else as_source(samples, trainer.machine)
        trainer._prepare(source)
        source.check_all()
        sources.append(source)
    passes = fused.FusedPasses(trainers, sources)
    n_epochs, balance = trainers[0].recipe.n_epochs, trainers[0].recipe.balance
    for _ in range(n_epochs):
        orders = [trainer.order_rng.permutation(passes.n_samples) for trainer in trainers]
        made = passes.one_pass(orders)
        for trainer in trainers:
            trainer.update, trainer.epoch = trainer.update + made, trainer.epoch + 1
        if balance:
            passes.balance()
    passes.push()
    return passes.diverged
