"""Sweeps: train one estimator with many settings (seeds, learning rates, penalties, ranks) on the same data.

On a GPU, machines of the same shapes are trained together by the same kernels, because one small machine cannot keep
the GPU busy; see :func:`mvrbm.training.fit_together`. With several processes (``torchrun``), each process trains some
of the candidates.
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
from mvrbm.training.trainer import Trainer
from mvrbm.validation import number

#: Values to try by parameter, or a list of such mappings, as for scikit-learn's `ParameterGrid`.
Grid = Mapping[str, Sequence[Any]] | Sequence[Mapping[str, Sequence[Any]]]


@dataclass
class Candidate:
    """One training run of a sweep."""

    #: Values of the parameters in the grid.
    params: dict[str, Any]
    #: The fitted estimator. None if training diverged, or if another process trained it.
    estimator: Any = field(repr=False, default=None)
    #: Score on held-out samples. Higher is better.
    score: float = float("-inf")
    #: Whether training diverged.
    diverged: bool = False
    #: Training time. Candidates that were trained together share it equally.
    seconds: float = float("nan")


class Sweep:
    """Train one estimator with many settings at once, and keep the best.

    Parameters
    ----------
    estimator : RBM, MVRBM or TVRBM
        The estimator. It is cloned.
    grid : mapping of str to sequence, or sequence of these
        Values to try by parameter, as for scikit-learn's `ParameterGrid`. `random_state` can be one of the parameters.
    scoring : callable, optional
        Function of a fitted estimator, held-out samples and their labels (or None) that returns a score. Higher is
        better. Default: the `score` method of the estimator.
    validation_fraction : float
        Fraction of the samples that is held out for scoring.
    random_state : int
        Random seed that selects the held-out samples.

    Attributes
    ----------
    candidates_ : list of Candidate
        All candidates, in the order of the grid.
    best_estimator_, best_params_, best_score_
        Estimator, parameters and score of the candidate with the highest score.

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
        estimator: ArrayRBM,
        grid: Grid,
        *,
        scoring: Any = None,
        validation_fraction: float = 0.1,
        random_state: int = 0,
    ) -> None:
        self.estimator = estimator
        self.grid = grid
        self.scoring = scoring
        self.validation_fraction = validation_fraction
        self.random_state = random_state

    def fit(self, X: Any, y: Any = None, *, checkpoints: Any = None, force: bool = False) -> Sweep:
        r"""Train all candidates and score them.

        Parameters
        ----------
        X : array of shape (n, \*visible_shape) or (n, n_features)
            The data.
        y : array (n,), optional
            Labels, which are passed to `scoring`.
        checkpoints : path, optional
            Folder in which to save every candidate after every epoch, and from which to resume. Candidates with
            checkpoints are trained one after another.
        force : bool
            Whether to resume from checkpoints that were saved with other data or settings, which otherwise raise an
            error.
        """
        X = np.asarray(X)
        kept, held = self._split(len(X))
        self.candidates_ = [Candidate(dict(params)) for params in ParameterGrid(self.grid)]
        world = World.here()
        own = slice(world.rank, None, world.size)
        folders = [
            None if checkpoints is None else Path(checkpoints) / f"candidate-{index}"
            for index in range(len(self.candidates_))
        ]
        self._train(self.candidates_[own], X[kept], folders[own], force)
        labels = None if y is None else np.asarray(y)[held]
        for candidate in self.candidates_[own]:
            if not candidate.diverged:
                candidate.score = self._score(candidate.estimator, X[held], labels)
        self._share_scores(world)
        best = max(range(len(self.candidates_)), key=lambda index: self.candidates_[index].score)
        self.best_params_ = self.candidates_[best].params
        self.best_score_ = self.candidates_[best].score
        if self.best_score_ == float("-inf"):
            raise DivergenceError(f"all {len(self.candidates_)} training runs diverged: lower the learning rates")
        self.best_estimator_ = self._share_estimator(best, world, X[kept])
        return self

    def _split(self, n: int) -> tuple[Any, Any]:
        """Return the indices of samples for training and of held-out samples."""
        number(self.validation_fraction, "validation_fraction", 0, 1, exclude_low=True)
        n_held = max(1, round(self.validation_fraction * n))
        if n_held >= n:
            raise ValueError(f"{n} samples are too few to hold {n_held} out")
        order = np.random.default_rng(self.random_state).permutation(n)
        return np.sort(order[n_held:]), np.sort(order[:n_held])

    def _score(self, fitted: Any, X: Any, y: Any) -> float:
        return float(fitted.score(X) if self.scoring is None else self.scoring(fitted, X, y))

    def _train(self, candidates: Sequence[Candidate], X: Any, folders: Sequence[Path | None], force: bool) -> None:
        trainers: list[Trainer] = []
        data: list[dict[str, Any]] = []
        for candidate, folder in zip(candidates, folders, strict=True):
            candidate.estimator, trainer, layers = self._prepared(candidate.params, X)
            if folder is not None:
                trainer.callbacks = [Checkpoint(folder)]
                trainer.resume(folder, force=force)
            trainers.append(trainer)
            data.append(data[0] if data else layers)  # candidates that are trained together share one copy
        outcomes = fit_together(trainers, data, initialize=True)
        for candidate, trainer, (diverged, seconds) in zip(candidates, trainers, outcomes, strict=True):
            candidate.diverged = diverged
            candidate.seconds = seconds
            candidate.estimator.history_ = trainer.history
            candidate.estimator.n_epochs_ = trainer.epoch
            candidate.estimator.n_updates_ = trainer.update
            trainer.callbacks = []
            if diverged:
                candidate.estimator = None

    def _prepared(self, params: Mapping[str, Any], X: Any) -> tuple[Any, Trainer, dict[str, Any]]:
        """Return an untrained estimator, its trainer, and the data in the form that the trainer takes."""
        estimator = clone(self.estimator).set_params(**params)
        with single_process():
            trainer, layers, _ = estimator.prepare(X)
        return estimator, trainer, layers

    def _share_scores(self, world: World) -> None:
        """Send the outcome of each candidate to all processes."""
        own = self.candidates_[world.rank :: world.size]
        outcomes = [(candidate.score, candidate.diverged, candidate.seconds) for candidate in own]
        table = torch.tensor(outcomes, dtype=torch.float64).reshape(-1, 3)
        for rank, part in enumerate(world.gather(table)):
            candidates = self.candidates_[rank :: world.size]
            for candidate, (score, diverged, seconds) in zip(candidates, part.tolist(), strict=True):
                candidate.score = score
                candidate.diverged = diverged > 0
                candidate.seconds = seconds

    def _share_estimator(self, best: int, world: World, X: Any) -> Any:
        """Return the best estimator on every process."""
        candidate = self.candidates_[best]
        if world.size == 1:
            return candidate.estimator
        is_owner = best % world.size == world.rank
        estimator = candidate.estimator if is_owner else self._prepared(candidate.params, X)[0]
        for parameter in estimator.machine_.parameters():
            values = parameter.data if is_owner else torch.zeros_like(parameter.data)
            world.all_reduce(values)
            parameter.data.copy_(values)
        # The trainer belongs to one process. Further training starts with new trainers on all processes.
        estimator.trainers_ = None
        estimator.history_ = []
        return estimator
