"""Sweeps: one estimator trained with many settings (seeds, learning rates, penalties, ranks) on the same data.

On a GPU, machines of the same shapes are trained together by the same kernels, which keeps the GPU busy where a
single small machine would use a fraction of it; :func:`mvrbm.learning.fit_together` does that. Of several processes
(``torchrun``), each trains its own candidates.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from sklearn.base import clone
from sklearn.model_selection import ParameterGrid

from mvrbm.errors import DivergenceError
from mvrbm.estimators.rbm import SingleLayerRBM
from mvrbm.io.shards import Shards
from mvrbm.learning import fit_together
from mvrbm.learning.distributed import World, single_process
from mvrbm.validation import number

__all__ = ["Candidate", "Sweep"]

Grid = Mapping[str, Sequence[Any]] | Sequence[Mapping[str, Sequence[Any]]]


@dataclass
class Candidate:
    """One training run of a sweep.

    Attributes
    ----------
    params : dict
        Its parameters, those of the grid only.
    estimator : estimator or None
        The fitted model. None if training diverged, or if another process has it.
    score : float
        Score on held-out samples, the larger the better. Minus infinity if training diverged.
    diverged : bool
        Whether training diverged.
    seconds : float
        Training time. The time of candidates that were trained together is divided evenly among them.
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
        The estimator. It is cloned.
    grid : mapping of str to sequence, or sequence of these
        Values to try by parameter, as for scikit-learn's `ParameterGrid`. `random_state` can be one of them.
    scoring : callable, optional
        Takes a fitted estimator, held-out samples and their labels (or None), and returns a score, the larger the
        better. Default: the `score` method of the estimator.
    validation : float
        Share of the samples that is held out for scoring.
    random_state : int
        Random seed of the choice of held-out samples.

    Attributes
    ----------
    candidates_ : list of Candidate
        All candidates, in the order of the grid.
    best_estimator_, best_params_, best_score_
        The candidate with the largest score.

    Examples
    --------
    >>> import numpy as np
    >>> from mvrbm import MVRBM, Sweep
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
        estimator: SingleLayerRBM,
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
            Labels, only for `scoring`.
        """
        number(self.validation, "validation", 0, 1, exclude_low=True)
        X = X[:] if isinstance(X, Shards) else np.asarray(X)
        order = np.random.default_rng(self.random_state).permutation(len(X))
        n_held = max(1, round(self.validation * len(X)))
        if n_held >= len(X):
            raise ValueError(f"{len(X)} samples are too few to hold {n_held} out")
        held, kept = np.sort(order[:n_held]), np.sort(order[n_held:])
        self.candidates_ = [Candidate(dict(params)) for params in ParameterGrid(self.grid)]
        world = World.here()
        mine = self.candidates_[world.rank :: world.size]
        self._train(mine, X[kept])
        for candidate in mine:
            if not candidate.diverged:
                labels = None if y is None else np.asarray(y)[held]
                candidate.score = self._score(candidate.estimator, X[held], labels)
        self._share_scores(world)
        best = max(range(len(self.candidates_)), key=lambda index: self.candidates_[index].score)
        self.best_params_, self.best_score_ = self.candidates_[best].params, self.candidates_[best].score
        if self.best_score_ == float("-inf"):
            raise DivergenceError(f"all {len(self.candidates_)} training runs diverged: lower the learning rates")
        self.best_estimator_ = self._best(best, world, X[kept])
        return self

    def _score(self, estimator: Any, X: Any, y: Any) -> float:
        return float(estimator.score(X) if self.scoring is None else self.scoring(estimator, X, y))

    def _train(self, candidates: Sequence[Candidate], X: Any) -> None:
        trainers, data = [], list[dict[str, Any]]()
        for candidate in candidates:
            candidate.estimator, trainer, layers = self._prepared(candidate.params, X)
            trainers.append(trainer)
            data.append(data[0] if data else layers)  # one copy for candidates that are trained together
        outcomes = fit_together(trainers, data, initialise=True)
        for candidate, trainer, (diverged, seconds) in zip(candidates, trainers, outcomes, strict=True):
            estimator, candidate.diverged, candidate.seconds = candidate.estimator, diverged, seconds
            estimator.history_, estimator.n_epochs_ = trainer.history, trainer.epoch
            estimator.n_updates_ = trainer.update
            if diverged:
                candidate.estimator = None

    def _prepared(self, params: Mapping[str, Any], X: Any) -> tuple[Any, Any, dict[str, Any]]:
        """Return an estimator with its trainer, not yet trained, and the data in the form that the trainer takes."""
        estimator = clone(self.estimator).set_params(**params)
        with single_process():
            trainer, layers, _ = estimator.prepare(X)
        return estimator, trainer, layers

    def _share_scores(self, world: World) -> None:
        """Send the outcome of each candidate to all processes."""
        if world.size == 1:
            return
        table = torch.zeros(len(self.candidates_), 3, dtype=torch.float64)
        for index, candidate in enumerate(self.candidates_):
            if index % world.size == world.rank:
                score = max(candidate.score, -1e300)
                table[index] = torch.tensor([score, float(candidate.diverged), candidate.seconds])
        world.all_reduce(table)
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
            estimator, _, _ = self._prepared(candidate.params, X)
        for parameter in estimator.machine_.parameters():
            mine = parameter.data if owner == world.rank else torch.zeros_like(parameter.data)
            world.all_reduce(mine)
            parameter.data.copy_(mine)
        # The trainer belongs to one process. Further training starts anew, on all processes together.
        estimator.trainers_, estimator.history_ = None, []
        return estimator
