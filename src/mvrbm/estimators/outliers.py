"""Outlier detection by masked prediction. Outliers are samples whose entries are inconsistent with one another."""

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
from mvrbm.errors import StorageError
from mvrbm.estimators.base import as_rows, check_finite
from mvrbm.estimators.batches import ROWS_AT_ONCE, Array, batches
from mvrbm.estimators.inputs import VISIBLE, as_array, dtype_for, without_wrapper
from mvrbm.estimators.parameters import unit_named
from mvrbm.estimators.persistence import SavedEstimator, forget_names, restore_names, saved_names
from mvrbm.estimators.rbm import TVRBM
from mvrbm.estimators.table_encoding import TableEncoding
from mvrbm.estimators.undo import undo_on_error
from mvrbm.io.shards import Rows
from mvrbm.likelihood.masked import block_masks, masked_errors
from mvrbm.random import RandomSource
from mvrbm.saving import ESTIMATOR, register
from mvrbm.units import Unit
from mvrbm.updates.recipe import Recipe, as_recipe
from mvrbm.validation import as_shape, number, whole_number

# Number of updates if `n_epochs` is None.
_UPDATES = 3000
# Number of columns above which training with the default settings has proportionally fewer updates and chains, and at
# most one hidden unit per sample.
_MANY_COLUMNS = 1024
# Minimum numbers of updates, chains and hidden units for many columns.
_FEWEST_UPDATES = 100
_FEWEST_CHAINS = 10
_FEWEST_HIDDEN = 16
# Maximum size of a hidden axis if `hidden_shape` is None and samples are arrays.
_LARGEST_AXIS = 32
# Maximum number of hidden units if `hidden_shape` is None and samples are rows.
_LARGEST_ROW = 256
# Maximum number of entries in a sample for which a full weight matrix is used. Structured couplings save little for
# such small samples.
_SMALL = 256
# Number of blocks per axis if `block_shape` is None. In a 28 x 28 image, each block has 4 x 4 entries.
_BLOCKS_PER_AXIS = 7
# Number of parts that `explain` divides the blocks into. It masks one part at a time, so that most of the entries
# around a defect remain visible.
_MAP_PARTS = 8
# Number of random partitions of the blocks that `explain` averages over.
_MAP_ROUNDS = 4
# Maximum number of training samples used to compute the threshold and the dispersion.
_MOST_REFERENCES = 1000
# Distance of the automatic threshold below the median training score, as a multiple of the distance between the median
# and the 10th percentile. Scores have a long lower tail, so a threshold based on quartiles would flag normal samples.
_FENCE = 2.5


@register("MVRBMOutlierDetector")
@dataclass(eq=False, repr=False)
class MVRBMOutlierDetector(OutlierMixin, SavedEstimator):
    r"""Outlier and novelty detection by masked prediction with a Boltzmann machine.

    The detector trains a machine on the data. To score a sample, it masks half of the entries, in blocks, and predicts
    them from the other half. The score is the mean over all entries of the predicted variance minus the squared error.
    Samples can be rows, matrices or arrays of any order. Missing entries (NaN) are ignored.

    Non-numeric columns of a data frame are treated as categorical. Each category becomes a column of zeros and ones,
    and all columns for the same feature are masked together. For a category that is not in the training data, all of
    these columns are 0.

    Parameters
    ----------
    hidden_shape : tuple of int, optional
        Shape of the hidden layer, with as many axes as a sample. Default: the shape of a sample, limited to 32 units
        per axis, or to 256 units if samples are rows. If rows have more than 1,024 columns, the number of units is also
        limited to the number of samples, or to 16 if there are fewer samples.
    rank : int, default=8
        Rank of the Kronecker coupling for matrices and tensors. Rows and arrays with at most 256 entries use a
        ``Dense`` coupling instead.
    visible : str, default="auto"
        Unit type for the data. See :func:`mvrbm.units.unit_names` for all types. ``"auto"`` selects ``"bernoulli"`` for
        uint8 data and for values from 0 to 1, and ``"gaussian"`` otherwise.
    visible_shape : tuple of int, optional
        Shape of a sample if the input has shape (n, n_features). If None, each row is a vector.
    contamination : "auto" or float, default="auto"
        Fraction of outliers in the training data, in the range (0, 0.5], which determines the threshold `offset_`.
        ``"auto"`` sets the threshold to ``median - 2.5 * (median - p10)``, where ``p10`` is the 10th percentile of the
        training scores.
    block_shape : tuple of int, optional
        Shape of the blocks to mask. Default: one seventh of each axis, or single entries if samples are rows.
    n_masks : int, default=10
        Number of masks. Must be even, because masks come in pairs: the second mask of a pair hides the blocks that the
        first mask shows.
    n_epochs : int, optional
        Number of epochs. Default: enough epochs for 3,000 updates, or fewer (at least 100) if rows have more than
        1,024 columns.
    batch_size, learning_rate
        See :class:`MVRBM`.
    recipe : str or Recipe, default="generative"
        Training settings. See :class:`MVRBM`.
    dayfirst : bool, optional
        Whether dates such as 05/03/2021 start with the day (True) or the month (False), if both are possible for all
        dates in a column. By default, they are read month first, with a warning.
    random_state : int, RandomState or None, default=None
        Seed or generator for training. Pass an int for reproducible results. The masks do not depend on it.
    device : str or torch.device, default="auto"
        Device to run on, such as ``"cpu"`` or ``"cuda"``. ``"auto"`` selects a GPU if one is available.
    verbose : int, default=0
        If nonzero, show a progress bar during training.

    Attributes
    ----------
    model_ : TVRBM
        The model trained on the data.
    dispersion_ : float
        Ratio of the squared errors to the machine's predicted variances on the training data. Scores multiply the
        predicted variances by this factor. The ratio is less than 1 for grayscale data, because Bernoulli units predict
        the variances of binary values.
    offset_ : float
        Score threshold. Samples with lower scores are outliers.
    n_features_in_, feature_names_in_
        Number of features and, for data frames, their names.

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
    dayfirst: bool | None = None
    random_state: Any = None
    device: Any = "auto"
    verbose: int = 0

    # -- training ---------------------------------------------------------------------------------

    def fit(self, X: Any, y: Any = None) -> Self:
        r"""Train the detector on data that may contain outliers.

        Parameters
        ----------
        X : array of shape (n, \*visible_shape) or (n, n_features), Shards or Dataset
            Training data.
        y : None
            Not used, present here for API consistency by convention.

        Returns
        -------
        self : object
            Fitted estimator.

        Notes
        -----
        If `fit` raises an exception, including KeyboardInterrupt, the detector is restored to its previous state.
        """
        with undo_on_error(self):
            self._fit(X)
        return self

    def _fit(self, X: Any) -> None:
        self._check_parameters()
        data = self._read(X, reset=True)
        if len(data) < 2:
            raise ValueError(f"fit requires at least 2 samples, got n_samples={len(data)}")
        references = data[np.unique(np.linspace(0, len(data) - 1, _MOST_REFERENCES).astype(int))]
        in_memory = isinstance(data, np.ndarray)
        model = self._new_model(data if in_memory else references, len(data))
        has_missing = in_memory and bool(np.isnan(data).any())
        self.model_ = model.fit(data, mask=~np.isnan(data) if has_missing else None)
        if not self._encoding.is_mixed:
            self.n_features_in_ = model.n_features_in_
        error, variance = self._means(references, check=False)
        self.dispersion_ = float(error.mean() / max(variance.mean(), np.finfo(variance.dtype).tiny))
        self.offset_ = self._threshold(self.dispersion_ * variance - error)

    def _threshold(self, scores: Array) -> float:
        """Return the score threshold, given the scores of the training samples."""
        if self.contamination != "auto":
            return float(np.percentile(scores, 100 * self.contamination))
        low, median = np.percentile(scores, (10, 50))
        return float(median - _FENCE * (median - low))

    def _check_parameters(self) -> None:
        if self.contamination != "auto":
            number(self.contamination, "contamination", 0, 0.5, exclude_low=True)
        if whole_number(self.n_masks, "n_masks", 2, 1000) % 2:
            raise ValueError(f"n_masks must be even because masks come in pairs, got {self.n_masks}")

    def _new_model(self, data: Array, n: int) -> TVRBM:
        """Create an untrained model for `n` samples like those in `data`, with all automatic settings resolved."""
        shape = data.shape[1:] if self.visible_shape is None else as_shape(self.visible_shape, "visible_shape")
        recipe = as_recipe(self.recipe)
        batch_size = whole_number(recipe.batch_size if self.batch_size is None else self.batch_size, "batch_size")
        is_small = len(shape) == 1 or math.prod(shape) <= _SMALL
        excess = max(1.0, shape[0] / _MANY_COLUMNS) if len(shape) == 1 else 1.0
        hidden_shape = self.hidden_shape
        if hidden_shape is None:
            largest = _LARGEST_ROW if len(shape) == 1 else _LARGEST_AXIS
            if excess > 1:
                largest = min(largest, max(n, _FEWEST_HIDDEN))
            hidden_shape = tuple(min(size, largest) for size in shape)
        n_epochs = self.n_epochs
        if n_epochs is None:
            n_epochs = math.ceil(max(_FEWEST_UPDATES, _UPDATES / excess) / math.ceil(n / batch_size))
        n_chains = None
        if isinstance(self.recipe, str) and recipe.negative.chain_shape and excess > 1:
            n_chains = max(_FEWEST_CHAINS, math.ceil(recipe.negative.n_chains / excess))
        kind = self.visible
        if kind == "auto":
            kind = "bernoulli" if data.dtype == np.uint8 or _within_unit_interval(data) else "gaussian"
        self._block(unit_named(kind, shape))  # raises an error before training if `block_shape` is invalid
        return TVRBM(
            hidden_shape,
            coupling=Dense() if is_small else Kronecker(self.rank),
            visible=kind,
            visible_shape=self.visible_shape,
            n_epochs=n_epochs,
            batch_size=batch_size,
            learning_rate=self.learning_rate,
            recipe=recipe,
            n_chains=n_chains,
            random_state=self.random_state,
            device=self.device,
            verbose=self.verbose,
        )

    # -- scores -----------------------------------------------------------------------------------

    def score_samples(self, X: Any) -> Array:
        """Return the score of each sample, as an array of shape (n,).

        Samples with higher scores are more normal. The mean score of the training data is about 0.
        """
        check_is_fitted(self)
        error, variance = self._means(self._read(X, reset=False))
        scores: Array = self.dispersion_ * variance - error
        return scores

    def decision_function(self, X: Any) -> Array:
        """Return the score of each sample minus `offset_`, as an array of shape (n,). Outliers have negative values."""
        scores: Array = self.score_samples(X) - self.offset_
        return scores

    def predict(self, X: Any) -> Array:
        """Return -1 for outliers and 1 for inliers, as an array of shape (n,)."""
        return np.where(self.decision_function(X) < 0, -1, 1)

    def explain(self, X: Any) -> Array:
        """Return an anomaly map for each sample, as an array with the shape of X.

        The map shows how unlikely each entry is given the other entries. The value of an entry is its squared error
        minus its predicted variance when its block is masked. One eighth of the blocks are masked at a time. Missing
        entries (NaN) count as 0. The map is smoothed with a moving average whose window is about half a block wide.
        Values far above 0 are anomalous. For Gaussian units, errors are measured in standard deviations. The value of a
        categorical column is the sum over its categories. Columns that are not part of the model have the value 0.
        """
        check_is_fitted(self)
        unit = self.model_.machine_.layers[VISIBLE]
        width = [2 * (size // 4) + 1 for size in self._block(unit)] + [1] * unit.entry_modes
        parts = self._errors(self._read(X, reset=False), parts=_MAP_PARTS, rounds=_MAP_ROUNDS)
        excess = np.concatenate([errors - self.dispersion_ * variances for errors, variances, _ in parts])
        maps = uniform_filter(excess, [1, *width], mode="nearest")
        if self._encoding.is_mixed:
            starts = np.cumsum([0, *self._encoding.widths[:-1]])
            of_columns = np.zeros((len(maps), len(self._encoding.kept)))
            of_columns[:, self._encoding.kept] = np.add.reduceat(maps, starts, axis=1)
            maps = of_columns
        shape = X.shape if hasattr(X, "shape") else np.shape(X)
        return np.asarray(maps.reshape(shape))

    def _read(self, X: Any, *, reset: bool) -> Any:
        r"""Validate the shape and dtype of the data and return an array of shape (n, \*shape) or (n, n_features).

        The values are validated later, when the model is trained or when batches are scored.
        """
        X = without_wrapper(X)
        if reset:
            self._encoding = TableEncoding.of(X, "from_dtype", self.dayfirst)
        if self._encoding.is_mixed:
            return self._read_table(X, reset=reset)
        given = as_array(X)
        if given.ndim > 2 and not reset and tuple(given.shape[1:]) != self.visible_shape_:
            raise ValueError(f"samples must have shape {self.visible_shape_}, got {tuple(given.shape[1:])}")
        if isinstance(X, Rows):
            if reset:
                forget_names(self)
            elif math.prod(X.shape[1:]) != self.n_features_in_:
                raise ValueError(f"samples must have shape {self.visible_shape_}, got {X.shape[1:]}")
            return X
        rows = given.reshape(len(given), math.prod(given.shape[1:])) if given.ndim > 2 else X
        checked = validate_data(self, rows, reset=reset, dtype=dtype_for(given), ensure_all_finite=False)
        return checked.reshape(given.shape) if given.ndim > 2 else checked

    def _read_table(self, X: Any, *, reset: bool) -> Array:
        """Validate a table with categorical columns and return an array with one column per category."""
        if self.visible_shape is not None:
            raise ValueError(f"visible_shape must be None for tables with text columns, got {self.visible_shape}")
        if not reset:
            validate_data(self, X, reset=False, skip_check_array=True)  # validates the order of the columns
        numbers, _ = self._encoding.to_numbers(X, allow_new=not reset)
        checked = validate_data(self, numbers, reset=reset, dtype=np.float64, ensure_all_finite=False)
        if reset:
            self._encoding.learn_kept(checked, keep_all=False)
            if not self._encoding.kept.any():
                raise ValueError("X has no columns that the model can use: all are empty or have too many categories")
        return self._encoding.encode(checked)

    def _mask_shape(self, unit: Unit) -> tuple[int, ...]:
        """Return the shape of a mask.

        For tables with non-numeric columns, a mask has one entry per column. Otherwise, it has one entry per site of
        the visible layer, where a site is a single entry or a one-hot vector.
        """
        return (len(self._encoding.widths),) if self._encoding.is_mixed else unit.site_shape

    def _block(self, unit: Unit) -> tuple[int, ...]:
        """Return the shape of the blocks to mask."""
        shape = self._mask_shape(unit)
        if self.block_shape is None:
            return tuple(max(1, round(size / _BLOCKS_PER_AXIS)) if len(shape) > 1 else 1 for size in shape)
        block = as_shape(self.block_shape, "block_shape")
        if len(block) != len(shape):
            axes = "1 axis" if len(shape) == 1 else f"{len(shape)} axes"
            raise ValueError(f"block_shape must have {axes} to match samples of shape {shape}, got {block}")
        if any(step > size for step, size in zip(block, shape, strict=True)):
            raise ValueError(f"block_shape must not exceed the sample shape {shape}, got {block}")
        return block

    def _means(self, data: Any, *, check: bool = True) -> Array:
        """Return the mean squared error and the mean predicted variance of each sample, as an array of shape (2, n).

        The means are taken over the observed entries.
        """
        means = []
        for errors, variances, observed in self._errors(data, parts=2, rounds=self.n_masks // 2, check=check):
            counts = as_rows(observed).sum(1).clip(1)
            means.append([as_rows(values).sum(1) / counts for values in (errors, variances)])
        found = np.concatenate(means, 1)
        check_finite(found.T)
        return found

    def _errors(
        self, data: Any, *, parts: int, rounds: int, check: bool = True
    ) -> Iterator[tuple[Array, Array, Array]]:
        """For each batch, yield the squared errors, the predicted variances and a mask of the observed entries.

        The blocks are partitioned at random into `parts` groups, and one group is masked at a time. The results are
        averaged over `rounds` partitions.
        """
        machine = self.model_.machine_
        unit = machine.layers[VISIBLE]
        masks = block_masks(self._mask_shape(unit), self._block(unit), RandomSource(0), parts=parts, rounds=rounds)
        if self._encoding.is_mixed:
            masks = masks.repeat_interleave(torch.tensor(self._encoding.widths), 1)
        for first in range(0, len(data), ROWS_AT_ONCE):
            values = np.asarray(data[first : first + ROWS_AT_ONCE]).reshape(-1, *self.visible_shape_)
            observed = torch.from_numpy(~np.isnan(values)).to(machine.like.device)
            (batch,) = batches({VISIBLE: values}, {VISIBLE: unit}, {VISIBLE: observed}, check=check)
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

    # -- files ------------------------------------------------------------------------------------

    def _write(self, folder: Path, extra: Mapping[str, Any]) -> None:
        self.model_._write(folder, extra)

    def _description(self) -> dict[str, Any]:
        learned: dict[str, Any] = {
            "offset": self.offset_,
            "dispersion": self.dispersion_,
            "feature_names": saved_names(self),
        }
        if self._encoding.is_mixed:
            learned["columns"] = self._encoding.describe()
        return {**super()._description(), **learned, "model": self.model_._description()}

    def _restore(self, folder: Path, described: Mapping[str, Any]) -> None:
        self._check_parameters()
        self.model_ = TVRBM.from_folder(folder, {ESTIMATOR: described["model"]}, self.device)
        self._encoding, self.n_features_in_ = self._saved_encoding(described)
        self._block(self.model_.machine_.layers[VISIBLE])
        self.offset_ = number(described["offset"], "offset", -math.inf)
        self.dispersion_ = number(described["dispersion"], "dispersion", -math.inf)
        restore_names(self, described["feature_names"])

    def _saved_encoding(self, described: Mapping[str, Any]) -> tuple[TableEncoding, int]:
        """Return the saved encoding of a table and the number of its columns."""
        if "columns" not in described:
            return TableEncoding(), self.model_.n_features_in_
        n_columns = len(described["columns"]["kept"])
        encoding = TableEncoding.from_description(described["columns"], (n_columns,))
        if (sum(encoding.widths),) != self.visible_shape_:
            raise StorageError(
                f"the encoded columns have {sum(encoding.widths)} entries, but the model requires {self.visible_shape_}"
            )
        return encoding, n_columns

    def __sklearn_tags__(self) -> Any:
        """Return the scikit-learn tags, which declare that NaN is supported."""
        tags = super().__sklearn_tags__()
        tags.input_tags.allow_nan = True
        return tags


def _within_unit_interval(data: Array) -> bool:
    known = data[~np.isnan(data)]
    return bool(known.size == 0 or (known.min() >= 0 and known.max() <= 1))
