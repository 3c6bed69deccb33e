"""Sweeps: one estimator trained with many settings (seeds, learning rates, penalties, ranks) on the same data.

On a GPU, machines of the same shapes are trained together by the same kernels, which keeps the GPU busy where a
single small machine would use a fraction of it; :func:`mvrbm.training.fit_together` does that. Of several processes
(``torchrun``), each trains its own candidates.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from sklearn.base import clone
from sklearn.model_selection import ParameterGrid

from mvrbm.distributed import World, single_process
from mvrbm.errors import DivergenceError
from mvrbm.estimators.array_rbm import ArrayRBM
from mvrbm.training import Checkpoint, fit_together
from mvrbm.validation import number

Grid = Mapping[str, Sequence[Any]] | Sequence[Mapping[str, Sequence[Any]]]


@dataclass
class Candidate:
    """One training run of a sweep."""

    params: dict[str, Any]  #: Its values of the parameters in the grid.
    estimator: Any = field(repr=False, default=None)  #: None if training diverged, or if another process has it.
    score: float = float("-inf")  #: On held-out samples, the larger the better.
    diverged: bool = False
    seconds: float = float("nan")  #: Training time, divided evenly among candidates that were trained together.


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
        self, estimator: ArrayRBM, grid: Grid, *, scoring: Any = None, validation: float = 0.1, random_state: int = 0
    ) -> None:
        self.estimator, self.grid, self.scoring = estimator, grid, scoring
        self.validation, self.random_state = validation, random_state

    def fit(self, X: Any, y: Any = None, *, checkpoints: Any = None, force: bool = False) -> Sweep:
        r"""Train all candidates, and score them.

        Parameters
        ----------
        X : array of shape (n, \*visible_shape) or (n, n_features)
            The data.
        y : array (n,), optional
            Labels, which are passed on to `scoring`.
        checkpoints, force : path, bool, optional
            Folder to save in after every epoch of every candidate, and to resume from. Unless `force` is True,
            checkpoints of other data or settings are an error. Candidates with checkpoints are trained one by one.
        """
        number(self.validation, "validation", 0, 1, exclude_low=True)
        X = np.asarray(X)
        order = np.random.default_rng(self.random_state).permutation(len(X))
        n_held = max(1, round(self.validation * len(X)))
        if n_held >= len(X):
            raise ValueError(f"{len(X)} samples are too few to hold {n_held} out")
        held, kept = np.sort(order[:n_held]), np.sort(order[n_held:])
        self.candidates_ = [Candidate(dict(params)) for params in ParameterGrid(self.grid)]
        world = World.here()
        mine = self.candidates_[world.rank :: world.size]
        folders = [
            None if checkpoints is None else Path(checkpoints) / f"candidate-{i}" for i in range(len(self.candidates_))
        ]
        self._train(mine, X[kept], folders[world.rank :: world.size], force)
        for candidate in mine:
            if not candidate.diverged:
                fitted, labels = candidate.estimator, None if y is None else np.asarray(y)[held]
                scored = fitted.score(X[held]) if self.scoring is None else self.scoring(fitted, X[held], labels)
                candidate.score = float(scored)
        self._share_scores(world)
        best = max(range(len(self.candidates_)), key=lambda index: self.candidates_[index].score)
        self.best_params_, self.best_score_ = self.candidates_[best].params, self.candidates_[best].score
        if self.best_score_ == float("-inf"):
            raise DivergenceError(f"all {len(self.candidates_)} training runs diverged: lower the learning rates")
        self.best_estimator_ = self._best(best, world, X[kept])
        return self

    def _train(self, candidates: Sequence[Candidate], X: Any, folders: Sequence[Path | None], force: bool) -> None:
        trainers, data = [], list[dict[str, Any]]()
        for candidate, folder in zip(candidates, folders, strict=True):
            candidate.estimator, trainer, layers = self._prepared(candidate.params, X)
            if folder is not None:
                trainer.callbacks = [Checkpoint(folder)]
                trainer.resume(folder, force=force)
            trainers.append(trainer)
            data.append(data[0] if data else layers)  # one copy for candidates that are trained together
        outcomes = fit_together(trainers, data, initialize=True)
        for candidate, trainer, (diverged, seconds) in zip(candidates, trainers, outcomes, strict=True):
            estimator, candidate.diverged, candidate.seconds = candidate.estimator, diverged, seconds
            estimator.history_, estimator.n_epochs_ = trainer.history, trainer.epoch
            estimator.n_updates_, trainer.callbacks = trainer.update, []
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
        mine = self.candidates_[world.rank :: world.size]
        table = torch.tensor([(c.score, c.diverged, c.seconds) for c in mine], dtype=torch.float64).reshape(-1, 3)
        for rank, part in enumerate(world.gather(table)):
            for candidate, (score, diverged, seconds) in zip(
                self.candidates_[rank :: world.size], part.tolist(), strict=True
            ):
                candidate.score, candidate.diverged, candidate.seconds = score, diverged > 0, seconds

    def _best(self, best: int, world: World, X: Any) -> Any:
        """Return the best estimator, on every process."""
        owner, candidate = best % world.size, self.candidates_[best]
        estimator = candidate.estimator
        if world.size == 1:
            return estimator
        if owner != world.rank:
            estimator, _, _ = self._prepared(candidate.params, X)
        for parameter in estimator.machine_.parameters():
            mine = parameter.data if owner == world.rank else torch.zeros_like(parameter.data)
            world.all_reduce(mine)
            parameter.data.copy_(mine)
        # The trainer belongs to one process. Further training starts anew, on all processes together.
        estimator.trainers_, estimator.history_ = None, []
        return estimator
