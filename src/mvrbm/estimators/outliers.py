"""Detection of outliers by masked prediction: samples whose entries do not fit each other."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass
from pathlib import Path
from typing import Any, Self

import numpy as np
import torch
from scipy.ndimage import uniform_filter
from sklearn.base import OutlierMixin
from sklearn.utils.validation import check_is_fitted, validate_data

from mvrbm.couplings import Dense, Kronecker
from mvrbm.estimators.batches import ROWS_AT_ONCE, Array, batches
from mvrbm.estimators.inputs import VISIBLE
from mvrbm.estimators.parameters import unit_named
from mvrbm.estimators.persistence import SavedEstimator, restore_names, saved_names
from mvrbm.estimators.rbm import TVRBM
from mvrbm.io.shards import Shards
from mvrbm.likelihood.masked import block_masks, masked_errors
from mvrbm.random import RandomSource
from mvrbm.saving import ESTIMATOR, register
from mvrbm.units import Unit
from mvrbm.updates.recipe import Recipe, as_recipe
from mvrbm.validation import as_shape, number, whole_number

# Automatic settings: the number of updates, the largest hidden layer of arrays (per axis) and of rows.
_UPDATES, _LARGEST_AXIS, _LARGEST_ROW = 3000, 32, 256
# Samples with at most so many entries are coupled by a full matrix: structure saves little there.
_SMALL = 256
# Blocks are this part of an axis: 4 x 4 entries of a 28 x 28 picture.
_BLOCKS_PER_AXIS = 7
# A map hides one of so many parts of the blocks at a time, so often: entries next to a defect are then predicted well.
_MAP_PARTS, _MAP_ROUNDS = 8, 4
# Training samples that the threshold is computed from.
_MOST_REFERENCES = 1000


@register("MVRBMOutlierDetector")
@dataclass(eq=False, repr=False)
class MVRBMOutlierDetector(OutlierMixin, SavedEstimator):
    r"""Outlier and novelty detection by masked prediction with a Boltzmann machine.

    The machine learns the training data. Then half of the entries of a sample are hidden, in blocks, and predicted from
    the other half; the score is minus the mean excess of the squared errors over the variances that it expects.
    Samples may be rows, matrices or arrays of any order. NaN is missing: such entries are neither used nor scored.

    Parameters
    ----------
    hidden_shape : tuple of int, optional
        Shape of the hidden layer, with as many axes as a sample. Default: the shape of a sample, at most 32 along each
        axis, or at most 256 for rows.
    rank : int
        Number of Kronecker products whose sum is the coupling of matrices and tensors. Rows, and arrays of at most 256
        entries, have a full matrix instead.
    visible : str
        Units of the data, one of :func:`mvrbm.units.unit_names`. ``"auto"`` is ``"bernoulli"`` for bytes and for values
        from 0 to 1, otherwise ``"gaussian"``.
    visible_shape : tuple of int, optional
        Shape of the array that a row of 2-D input stands for. Default: a row is a vector.
    contamination : "auto" or float
        Share of outliers in the training data, above 0 and at most 0.5, which sets the threshold `offset_`. ``"auto"``
        is Tukey's fence: 1.5 interquartile ranges below the first quartile of the training scores.
    block_shape : tuple of int, optional
        Shape of the blocks that are hidden. Default: a seventh of each axis; single entries for rows.
    n_masks : int
        Number of masks, an even number: each hides half of the blocks, its partner the other half.
    n_epochs, batch_size, learning_rate, recipe : optional
        See :class:`MVRBM`. Default: as many epochs as give 3,000 updates, by the recipe ``"generative"``.
    random_state : int, RandomState or None
        Random seed of training. The masks are always the same.
    device : str
        ``"auto"`` is a GPU if there is one.
    verbose : int
        Whether to show a progress bar of training.

    Attributes
    ----------
    model_ : TVRBM
        The trained model of the data.
    dispersion_ : float
        How much larger the errors in the training data are than the variances that the machine expects: below 1 for
        gray values, since Bernoulli units expect zeros and ones. Expected variances are multiplied by it.
    offset_ : float
        Samples whose score is below it are outliers.
    n_features_in_, feature_names_in_
        As of scikit-learn's estimators.

    Examples
    --------
    >>> import numpy as np
    >>> from mvrbm import MVRBMOutlierDetector
    >>> rng = np.random.default_rng(0)
    >>> first = rng.normal(size=(200, 1))
    >>> table = first + 0.1 * rng.normal(size=(200, 4))  # four columns that agree
    >>> detector = MVRBMOutlierDetector(n_epochs=50, random_state=0).fit(table)
    >>> detector.predict([[1.0, 1.1, 0.9, 1.0], [1.0, 1.1, -1.0, 1.0]])
    array([ 1, -1])
    """

    hidden_shape: Any = None
    _: KW_ONLY
    rank: int = 8
    visible: Any = "auto"
    visible_shape: Sequence[int] | None = None
    contamination: Any = "auto"
    block_shape: Sequence[int] | None = None
    n_masks: int = 10
    n_epochs: int | None = None
    batch_size: int | None = None
    learning_rate: float | None = None
    recipe: str | Recipe = "generative"
    random_state: Any = None
    device: Any = "auto"
    verbose: int = 0

    def fit(self, X: Any, y: Any = None) -> Self:
        r"""Learn normal data, (n, \*shape) or (n, n_features) or Shards, which may contain some outliers.

        `y` is ignored; it is there for pipelines.
        """
        self._check_parameters()
        data = self._checked(X, reset=True)
        if len(data) < 2:
            raise ValueError(f"what is normal is learned from many samples, at least 2, got n_samples={len(data)}")
        references = data[np.unique(np.linspace(0, len(data) - 1, _MOST_REFERENCES).astype(int))]
        some = data if isinstance(data, np.ndarray) else references
        model = self._model(some, len(data))
        missing = isinstance(data, np.ndarray) and bool(np.isnan(data).any())
        self.model_ = model.fit(data, mask=~np.isnan(data) if missing else None)
        self.n_features_in_ = model.n_features_in_
        error, variance = self._means(references)
        self.dispersion_ = float(error.mean() / max(variance.mean(), np.finfo(variance.dtype).tiny))
        scores = self.dispersion_ * variance - error
        if self.contamination == "auto":
            low, high = np.percentile(scores, (25, 75))
            self.offset_ = float(low - 1.5 * (high - low))
        else:
            self.offset_ = float(np.percentile(scores, 100 * self.contamination))
        return self

    def _check_parameters(self) -> None:
        if self.contamination != "auto":
            number(self.contamination, "contamination", 0, 0.5, exclude_low=True)
        if whole_number(self.n_masks, "n_masks", 2, 1000) % 2:
            raise ValueError(f"n_masks must be even: each mask has a partner, got {self.n_masks}")

    def score_samples(self, X: Any) -> Array:
        """Score of each sample, (n,): the higher, the more normal; about 0 on average for training data."""
        check_is_fitted(self)
        error, variance = self._means(self._checked(X, reset=False))
        scores: Array = self.dispersion_ * variance - error
        return scores

    def decision_function(self, X: Any) -> Array:
        """Score of each sample minus `offset_`, (n,): negative for outliers."""
        scores: Array = self.score_samples(X) - self.offset_
        return scores

    def predict(self, X: Any) -> Array:
        """Return -1 for outliers and 1 for other samples, (n,)."""
        return np.where(self.decision_function(X) < 0, -1, 1)

    def explain(self, X: Any) -> Array:
        """Return how unlikely each entry is given the rest, in the shape of X.

        The map is the excess of the squared error, in squared standard deviations for Gaussian units, when blocks
        around the entry are hidden, an eighth of all blocks at a time; it is averaged over neighboring entries, half
        a block wide. Values far above 0 are surprising. Missing entries (NaN) have the value 0 before averaging.
        """
        check_is_fitted(self)
        unit = self.model_.machine_.layers[VISIBLE]
        width = [2 * (size // 4) + 1 for size in self._block(unit)] + [1] * unit.entry_modes
        parts = self._errors(self._checked(X, reset=False), parts=_MAP_PARTS, rounds=_MAP_ROUNDS)
        excess = np.concatenate([errors - self.dispersion_ * variances for errors, variances, _ in parts])
        maps = uniform_filter(excess, [1, *width], mode="nearest")
        shape = X.shape if hasattr(X, "shape") else np.shape(X)
        return np.asarray(maps.reshape(shape))

    def _model(self, data: Array, n: int) -> TVRBM:
        """Return the model for n samples like these, with the automatic settings filled in; not trained."""
        shape = data.shape[1:] if self.visible_shape is None else as_shape(self.visible_shape, "visible_shape")
        recipe = as_recipe(self.recipe)
        batch = whole_number(recipe.batch_size if self.batch_size is None else self.batch_size, "batch_size")
        epochs = math.ceil(_UPDATES / math.ceil(n / batch)) if self.n_epochs is None else self.n_epochs
        hidden = self.hidden_shape
        if hidden is None:
            largest = _LARGEST_ROW if len(shape) == 1 else _LARGEST_AXIS
            hidden = tuple(min(size, largest) for size in shape)
        kind = self.visible
        if kind == "auto":
            kind = "bernoulli" if data.dtype == np.uint8 or _within_unit_interval(data) else "gaussian"
        self._block(unit_named(kind, shape))  # raises an error before training
        return TVRBM(
            hidden,
            coupling=Dense() if len(shape) == 1 or math.prod(shape) <= _SMALL else Kronecker(self.rank),
            visible=kind,
            visible_shape=self.visible_shape,
            n_epochs=epochs,
            batch_size=batch,
            learning_rate=self.learning_rate,
            recipe=recipe,
            random_state=self.random_state,
            device=self.device,
            verbose=self.verbose,
        )

    def _checked(self, X: Any, *, reset: bool) -> Any:
        r"""Return data with checked shape and dtype, (n, \*shape) or (n, n_features). The model checks its values."""
        X = X.detach().cpu().numpy() if isinstance(X, torch.Tensor) else X
        given = X if hasattr(X, "ndim") else np.asarray(X)
        if given.ndim > 2 and not reset and tuple(given.shape[1:]) != self.visible_shape_:
            raise ValueError(f"samples must have shape {self.visible_shape_}, got {tuple(given.shape[1:])}")
        if isinstance(X, Shards):
            return X
        rows = given.reshape(len(given), math.prod(given.shape[1:])) if given.ndim > 2 else X
        dtype = None if getattr(given, "dtype", None) == np.uint8 else [np.float64, np.float32]
        checked = validate_data(self, rows, reset=reset, dtype=dtype, ensure_all_finite=False)
        return checked.reshape(given.shape) if given.ndim > 2 else checked

    def _block(self, unit: Unit) -> tuple[int, ...]:
        """Return the shape of the blocks of sites that are hidden."""
        shape = unit.site_shape
        if self.block_shape is None:
            return tuple(max(1, round(size / _BLOCKS_PER_AXIS)) if len(shape) > 1 else 1 for size in shape)
        block = as_shape(self.block_shape, "block_shape")
        if len(block) != len(shape):
            axes = "1 axis" if len(shape) == 1 else f"{len(shape)} axes"
            raise ValueError(f"block_shape must have {axes}, as a sample of shape {shape} has, got {block}")
        if any(step > size for step, size in zip(block, shape, strict=True)):
            raise ValueError(f"block_shape must be at most the shape of a sample, {shape}, got {block}")
        return block

    def _means(self, data: Any) -> Array:
        """Return the mean error and the mean expected variance of the observed entries of each sample: (2, n)."""
        found = []
        for *sums, observed in self._errors(data, parts=2, rounds=self.n_masks // 2):
            counts = observed.reshape(len(observed), -1).sum(1).clip(1)
            found.append([values.reshape(len(values), -1).sum(1) / counts for values in sums])
        return np.concatenate(found, 1)

    def _errors(self, data: Any, *, parts: int, rounds: int) -> Iterator[tuple[Array, Array, Array]]:
        """Yield the errors of all entries, the variances to expect, and which entries were observed, batch by batch."""
        machine = self.model_.machine_
        unit = machine.layers[VISIBLE]
        masks = block_masks(unit.site_shape, self._block(unit), RandomSource(0), parts=parts, rounds=rounds)
        for first in range(0, len(data), ROWS_AT_ONCE):
            values = np.asarray(data[first : first + ROWS_AT_ONCE]).reshape(-1, *self.visible_shape_)
            observed = torch.from_numpy(~np.isnan(values)).to(machine.like.device)
            (batch,) = batches({VISIBLE: values}, {VISIBLE: unit}, {VISIBLE: observed})
            errors, variances = masked_errors(machine, batch[VISIBLE], masks, observed=observed)
            yield errors.cpu().numpy(), variances.cpu().numpy(), observed.cpu().numpy()

    @property
    def visible_shape_(self) -> tuple[int, ...]:
        """Shape of a sample."""
        return self.model_.visible_shape_

    @property
    def n_parameters_(self) -> int:
        """Number of learned parameters."""
        check_is_fitted(self)
        return self.model_.n_parameters_

    def _write(self, folder: Path, extra: Mapping[str, Any]) -> None:
        self.model_._write(folder, extra)

    def _description(self) -> dict[str, Any]:
        learned = {"offset": self.offset_, "dispersion": self.dispersion_, "feature_names": saved_names(self)}
        return {**super()._description(), **learned, "model": self.model_._description()}

    def _restore(self, folder: Path, described: Mapping[str, Any]) -> None:
        self._check_parameters()
        self.model_ = TVRBM.from_folder(folder, {ESTIMATOR: described["model"]}, self.device)
        self._block(self.model_.machine_.layers[VISIBLE])
        self.offset_, self.dispersion_ = (number(described[name], name, -math.inf) for name in ("offset", "dispersion"))
        self.n_features_in_ = self.model_.n_features_in_
        restore_names(self, described["feature_names"])

    def __sklearn_tags__(self) -> Any:
        """Tell scikit-learn that NaN is missing."""
        tags = super().__sklearn_tags__()
        tags.input_tags.allow_nan = True
        return tags


def _within_unit_interval(data: Array) -> bool:
    known = data[~np.isnan(data)]
    return bool(known.size == 0 or (known.min() >= 0 and known.max() <= 1))
