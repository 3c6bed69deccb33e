"""Parameter sweeps, which train one estimator on the same data with many seeds, learning rates or ranks.

On a GPU, machines with the same shapes are trained together in the same kernels, because a single small machine cannot
keep the GPU busy. See :func:`mvrbm.training.fit_together`. With several processes (``torchrun``), each process trains a
share of the candidates.
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
from mvrbm.estimators.batches import has_nan, sample_weights
from mvrbm.estimators.deep import DeepMVRBM
from mvrbm.estimators.multimodal import MMVRBM
from mvrbm.estimators.sequences import AlignedRBM
from mvrbm.estimators.undo_on_error import undo_on_error
from mvrbm.io.alignments import Alignment, as_alignment
from mvrbm.io.alphabets import UNKNOWN
from mvrbm.training import Checkpoint, fit_together
from mvrbm.training.part_folders import part_folder
from mvrbm.training.trainer import Trainer
from mvrbm.validation import number

# Estimators that a sweep does not support: stacks, and models with several modalities.
_UNSUPPORTED = (DeepMVRBM, MMVRBM)
#: Mapping from parameter names to values to try, or a list of such mappings, as in scikit-learn's `ParameterGrid`.
Grid = Mapping[str, Sequence[Any]] | Sequence[Mapping[str, Sequence[Any]]]


@dataclass
class Candidate:
    """One training run in a sweep."""

    #: Values of the parameters in the grid.
    params: dict[str, Any]
    #: The fitted estimator, or None if training diverged or another process trained this candidate.
    estimator: Any = field(repr=False, default=None)
    #: Score on the held-out samples, or -inf if training diverged. Higher scores are better.
    score: float = float("-inf")
    #: Whether training diverged.
    diverged: bool = False
    #: Training time in seconds. If candidates were trained together, the time is divided equally among them.
    seconds: float = float("nan")


class Sweep:
    """Parameter sweep that trains one estimator with many settings and selects the best result.

    Parameters
    ----------
    estimator : RBM, MVRBM, TVRBM or SequenceRBM
        The estimator to train. The sweep trains clones and does not modify the estimator itself.
    grid : mapping of str to sequence, or sequence of such mappings
        Mapping from parameter names to values to try, as in scikit-learn's `ParameterGrid`. The names can include
        `random_state`.
    scoring : callable, optional
        Function with the signature ``scoring(estimator, X, y)`` that returns the score of a fitted estimator on
        held-out samples. Higher scores are better. `y` is None if there are no labels. Default: the estimator's `score`
        method. A candidate whose score is NaN is never the best.
    validation_fraction : float, default=0.1
        Fraction of the samples to hold out for scoring.
    random_state : int, default=0
        Random seed for selecting the held-out samples, which by default are the same in each call.

    Attributes
    ----------
    candidates_ : list of Candidate
        All candidates, in grid order.
    best_estimator_, best_params_, best_score_
        Fitted estimator, parameters and score of the candidate with the highest score.

    See Also
    --------
    MVRBM : An estimator to train with several settings.

    Examples
    --------
    >>> import numpy as np
    >>> from mvrbm import MVRBM, Sweep
    >>> X = (np.random.default_rng(0).random((200, 6, 6)) < 0.3).astype(np.float32)
    >>> settings = {"rank": [1, 2], "random_state": [0, 1]}
    >>> sweep = Sweep(MVRBM((4, 4), n_epochs=2), settings).fit(X)
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

    def fit(
        self,
        X: Any,
        y: Any = None,
        sample_weight: Any = None,
        *,
        checkpoints: Any = None,
        ignore_mismatch: bool = False,
    ) -> Sweep:
        r"""Train all candidates and score them.

        Parameters
        ----------
        X : array of shape (n, \*visible_shape) or (n, n_features)
            Data to split into training samples and held-out samples. NaN entries are unknown, and require `scoring`.
            For `SequenceRBM`, sequences in any format that its `fit` accepts. `scoring` receives them as an
            :class:`~mvrbm.io.alignments.Alignment`.
        y : array of shape (n,), optional
            Labels to pass to `scoring`.
        sample_weight : array of shape (n,), optional
            Weight of each sample in training. Scores do not depend on the weights.
        checkpoints : path, optional
            Checkpoint folder. The state of each candidate is saved after each epoch, and training resumes from existing
            checkpoints. With checkpoints, candidates are trained one after another.
        ignore_mismatch : bool, default=False
            Whether to resume from checkpoints even if they were saved with different data or settings. If False, such
            checkpoints raise an error.

        Returns
        -------
        self : object
            Fitted sweep.

        Notes
        -----
        If `fit` raises an exception, including KeyboardInterrupt, the sweep is restored to its previous state. If
        `checkpoints` was given, calling `fit` again resumes the training runs.
        """
        with undo_on_error(self):
            if not isinstance(self.estimator, ArrayRBM) or isinstance(self.estimator, _UNSUPPORTED):
                raise ValueError(
                    "estimator must be RBM, MVRBM, TVRBM or SequenceRBM, got "
                    f"{type(self.estimator).__name__}; use scikit-learn's GridSearchCV for classifiers"
                )
            if isinstance(self.estimator, AlignedRBM):
                # All candidates need the alphabet of all sequences, because only a held-out sequence may have a gap.
                X = as_alignment(X, self.estimator.alphabet, unknown=True)
            else:
                X = np.asarray(X)
            weights = None if sample_weight is None else sample_weights(sample_weight, len(X))
            self._fit(X, y, weights, checkpoints, ignore_mismatch)
        return self

    def _fit(self, X: Any, y: Any, weights: Any, checkpoints: Any, ignore_mismatch: bool) -> None:
        kept, held = self._split(len(X))
        if self.scoring is None and (n_incomplete := _n_incomplete(X[held])):
            raise ValueError(
                f"{n_incomplete} of {len(held)} held-out samples contain "
                f"{'unknown letters' if isinstance(X, Alignment) else 'NaN'}, but score requires complete samples; "
                "pass a function as scoring"
            )
        self.candidates_ = [Candidate(dict(params)) for params in ParameterGrid(self.grid)]
        world = World.here()
        own = slice(world.rank, None, world.size)
        folders = [
            None if checkpoints is None else part_folder(checkpoints, "candidate", index)
            for index in range(len(self.candidates_))
        ]
        kept_weights = None if weights is None else weights[kept]
        self._train(self.candidates_[own], X[kept], kept_weights, folders[own], ignore_mismatch)
        labels = None if y is None else np.asarray(y)[held]
        for candidate in self.candidates_[own]:
            if not candidate.diverged:
                candidate.score = self._score(candidate.estimator, X[held], labels)
        self._share_scores(world)
        scores = np.array([candidate.score for candidate in self.candidates_])
        if all(candidate.diverged for candidate in self.candidates_):
            raise DivergenceError(f"all {len(self.candidates_)} training runs diverged; use lower learning rates")
        if not (scores > -np.inf).any():  # also if all scores are NaN
            raise ValueError(f"all {len(self.candidates_)} scores are NaN or minus infinity")
        best = int(np.nanargmax(scores))
        self.best_params_ = self.candidates_[best].params
        self.best_score_ = self.candidates_[best].score
        self.best_estimator_ = self._share_estimator(best, world, X[kept])

    def _split(self, n: int) -> tuple[Any, Any]:
        """Return the indices of the training samples and of the held-out samples."""
        number(self.validation_fraction, "validation_fraction", 0, 1, exclude_low=True)
        n_held = max(1, round(self.validation_fraction * n))
        if n_held >= n:
            raise ValueError(f"cannot hold out {n_held} of {n} samples for scoring")
        order = np.random.default_rng(self.random_state).permutation(n)
        return np.sort(order[n_held:]), np.sort(order[:n_held])

    def _score(self, fitted: Any, X: Any, y: Any) -> float:
        return float(fitted.score(X) if self.scoring is None else self.scoring(fitted, X, y))

    def _train(
        self,
        candidates: Sequence[Candidate],
        X: Any,
        weights: Any,
        folders: Sequence[Path | None],
        ignore_mismatch: bool,
    ) -> None:
        trainers: list[Trainer] = []
        data: list[dict[str, Any]] = []
        masks: list[Any] = []
        for candidate, folder in zip(candidates, folders, strict=True):
            candidate.estimator, trainer, layers, mask = self._prepared(candidate.params, X, weights)
            if folder is not None:
                trainer.callbacks = [Checkpoint(folder)]
                trainer.resume(folder, ignore_mismatch=ignore_mismatch)
            trainers.append(trainer)
            # Candidates share one copy of the data, unless they have different shapes of the visible layer.
            same = [index for index, other in enumerate(data) if _shapes(other) == _shapes(layers)]
            data.append(data[same[0]] if same else layers)
            masks.append(masks[same[0]] if same else mask)
        outcomes = fit_together(trainers, data, masks=masks, initialize=True)
        for candidate, trainer, (diverged, seconds) in zip(candidates, trainers, outcomes, strict=True):
            candidate.diverged = diverged
            candidate.seconds = seconds
            candidate.estimator.history_ = trainer.history
            candidate.estimator.n_epochs_ = trainer.epoch
            candidate.estimator.n_updates_ = trainer.update
            trainer.callbacks = []
            if diverged:
                candidate.estimator = None

    def _prepared(self, params: Mapping[str, Any], X: Any, weights: Any = None) -> tuple[Any, ...]:
        """Return an untrained estimator, its trainer, the training data and its mask, both keyed by layer name."""
        alphabet = {"alphabet": X.alphabet} if isinstance(X, Alignment) else {}
        estimator = clone(self.estimator).set_params(**alphabet | dict(params))
        with single_process():
            return estimator, *estimator.prepare(X, sample_weight=weights)

    def _share_scores(self, world: World) -> None:
        """Exchange the scores and training times of all candidates between processes."""
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
        """Copy the best estimator to all processes and return it."""
        candidate = self.candidates_[best]
        if world.size == 1:
            return candidate.estimator
        is_owner = best % world.size == world.rank
        estimator = candidate.estimator if is_owner else self._prepared(candidate.params, X)[0]
        for parameter in estimator.machine_.parameters():
            values = parameter.data if is_owner else torch.zeros_like(parameter.data)
            world.all_reduce(values)
            parameter.data.copy_(values)
        # Only one process has the trainer. Discard it, so that further training creates new trainers in all processes.
        estimator.trainers_ = None
        estimator.history_ = []
        return estimator


def _n_incomplete(X: Any) -> int:
    """Return the number of samples with unknown entries."""
    if isinstance(X, Alignment):
        return int((X.codes == UNKNOWN).any(1).sum())
    return int(np.isnan(X).reshape(len(X), -1).any(1).sum()) if has_nan(X) else 0


def _shapes(layers: Mapping[str, Any]) -> dict[str, tuple[int, ...]]:
    return {name: tuple(array.shape) for name, array in layers.items()}
