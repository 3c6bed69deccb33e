"""Outlier and novelty detector for rows, matrices and tensors."""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import KW_ONLY, dataclass
from pathlib import Path
from typing import Any, Self

import numpy as np
import torch
from scipy.ndimage import uniform_filter
from sklearn.base import OutlierMixin, clone
from sklearn.model_selection import KFold
from sklearn.utils.validation import check_is_fitted, validate_data

from mvrbm.couplings import Dense, Kronecker
from mvrbm.errors import StorageError
from mvrbm.estimators.base import check_finite
from mvrbm.estimators.batches import Array, is_binary, match_bytes
from mvrbm.estimators.inputs import VISIBLE, as_array, dtype_for, without_wrapper
from mvrbm.estimators.outliers.ensemble import Ensemble, Range, Spread
from mvrbm.estimators.outliers.linear_prediction import Blocks, LinearPrediction, divide, slabs
from mvrbm.estimators.outliers.masked_prediction import MaskedPrediction
from mvrbm.estimators.outliers.neighbors import N_DISTANCES, Neighbors
from mvrbm.estimators.outliers.threshold import threshold
from mvrbm.estimators.parameters import unit_named
from mvrbm.estimators.persistence import SavedEstimator, forget_names, restore_names, saved_names
from mvrbm.estimators.rbm import TVRBM
from mvrbm.estimators.table_encoding import TableEncoding
from mvrbm.estimators.undo_on_error import undo_on_error
from mvrbm.io.shards import Rows
from mvrbm.machine import BoltzmannMachine
from mvrbm.saving import ESTIMATOR, read_machines, register, write_machines
from mvrbm.updates.recipe import Recipe, as_recipe
from mvrbm.validation import as_shape, number, truth_value, whole_number

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
# Maximum number of training samples for everything except a machine, and the maximum for samples with many entries.
_MOST_SAMPLES = 5000
_MOST_LARGE_SAMPLES = 1000
# Number of entries above which a sample is large.
_LARGE = 2048
# Number of samples that are scored at once.
_SAMPLES_AT_ONCE = 2000
# Parameters that have no effect without a machine, with their defaults.
_MACHINE_SETTINGS = {
    "rank": 8,
    "visible": "auto",
    "n_masks": 10,
    "batch_size": None,
    "learning_rate": None,
    "recipe": "generative",
}


@register("MVRBMOutlierDetector")
@dataclass(eq=False, repr=False)
class MVRBMOutlierDetector(OutlierMixin, SavedEstimator):
    r"""Outlier and novelty detection for rows, matrices and arrays of any order.

    The score combines two kinds of evidence. First, the detector hides each row, each column (each index along any
    axis) and each block of a sample in turn, and predicts it from the rest. The predictions are linear and have closed
    forms, and only the blocks with the largest errors count. Second, it measures the distances to the nearest training
    samples. Each of these numbers is standardized with its values for samples that the detector was not fitted to, and
    the result is the root mean square of the deviations, in standard deviations.

    Missing entries (NaN) are ignored. Values outside the range of the training data are scored like all others.
    Non-numeric columns of a data frame are treated as categorical. Each category becomes a column of zeros and ones,
    and all columns for the same feature are hidden together. For a category that is not in the training data, all of
    these columns are 0.

    If `hidden_shape` or `n_epochs` is given, the detector also trains a Boltzmann machine. Its errors in masked
    prediction are one more part of the score. This takes 10 to 100 times as long.

    Parameters
    ----------
    hidden_shape : tuple of int, optional
        Shape of the hidden layer of a machine, with as many axes as a sample. Default: no machine, or if `n_epochs` is
        given, the shape of a sample, limited to 32 units per axis, or to 256 units if samples are rows. If rows have
        more than 1,024 columns, the number of units is also limited to the number of samples, or to 16 if there are
        fewer samples.
    rank : int, default=8
        Rank of the machine's Kronecker coupling for matrices and tensors. Rows and arrays with at most 256 entries use
        a ``Dense`` coupling instead.
    visible : str, default="auto"
        Type of the machine's visible units. See :func:`mvrbm.units.unit_names` for all types. ``"auto"`` selects
        ``"bernoulli"`` for uint8 data and for values from 0 to 1, and ``"gaussian"`` otherwise.
    visible_shape : tuple of int, optional
        Shape of a sample if the input has shape (n, n_features). If None, each row is a vector.
    contamination : "auto" or float, default="auto"
        Fraction of outliers in the training data, in the range (0, 0.5], which determines the threshold `offset_`.
        ``"auto"`` sets the threshold according to `false_alarms`.
    false_alarms : float, default=0.02
        Fraction of new normal samples that are reported as outliers, on average over training sets, in the range
        (0, 0.5]. Not used if `contamination` is a number.
    block_shape : tuple of int, optional
        Shape of the blocks to hide. Default: one seventh of each axis, or single entries if samples are rows.
    n_masks : int, default=10
        Number of masks for the machine. Must be even, because masks come in pairs: the second mask of a pair hides the
        blocks that the first mask shows.
    n_epochs : int, optional
        Number of epochs of training a machine. Default: no machine, or if `hidden_shape` is given, enough epochs for
        3,000 updates, or fewer (at least 100) if rows have more than 1,024 columns.
    batch_size, learning_rate
        Settings for training the machine. See :class:`MVRBM`.
    recipe : str or Recipe, default="generative"
        Settings for training the machine. See :class:`MVRBM`.
    dayfirst : bool, optional
        Whether dates such as 05/03/2021 start with the day (True) or the month (False), if both are possible for all
        dates in a column. By default, they are read month first, with a warning.
    random_state : int, RandomState or None, default=None
        Seed or generator for training a machine. Everything else is deterministic.
    device : str or torch.device, default="auto"
        Device for the machine, such as ``"cpu"`` or ``"cuda"``. ``"auto"`` selects a GPU if one is available.
    verbose : int, default=0
        If nonzero, show a progress bar while a machine is trained.

    Attributes
    ----------
    offset_ : float
        Score threshold. Samples with lower scores are outliers.
    model_ : TVRBM
        The machine, if `hidden_shape` or `n_epochs` was given.
    dispersion_ : float
        Ratio of the squared errors to the machine's predicted variances, on samples that it was not trained on. Scores
        multiply the predicted variances by this factor. The ratio is less than 1 for grayscale data, because Bernoulli
        units predict the variances of binary values.
    n_features_in_, feature_names_in_
        Number of features and, for data frames, their names.

    Notes
    -----
    Except for training a machine, at most 5,000 evenly spaced training samples are used, or 1,000 if samples have more
    than 2,048 entries. They are saved with the detector. The score of a training sample is its score from
    cross-validation.

    Ranges, linear predictions and standard deviations are learned without extreme values, so that a few wrong values in
    the training data, such as -9999 in up to 3% of the entries of a column, have little influence.

    Examples
    --------
    >>> import numpy as np
    >>> from mvrbm import MVRBMOutlierDetector
    >>> rng = np.random.default_rng(0)
    >>> first = rng.normal(size=(200, 1))
    >>> table = first + 0.1 * rng.normal(size=(200, 4))  # four columns that agree
    >>> detector = MVRBMOutlierDetector().fit(table)
    >>> detector.predict([[1.0, 1.1, 0.9, 1.0], [1.0, 1.1, -1.0, 1.0]])
    array([ 1, -1])
    """

    hidden_shape: Any = None
    _: KW_ONLY
    rank: int = 8
    visible: Any = "auto"
    visible_shape: Sequence[int] | None = None
    contamination: Any = "auto"
    false_alarms: float = 0.02
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
        self._check_no_machine_settings()
        data = self._read(X, reset=True)
        if len(data) < 2:
            raise ValueError(f"fit requires at least 2 samples, got n_samples={len(data)}")
        self.visible_shape_ = self._sample_shape(tuple(data.shape[1:]))
        if not self._encoding.is_mixed:
            self.n_features_in_ = math.prod(self.visible_shape_)
        most = _MOST_LARGE_SAMPLES if math.prod(self.visible_shape_) > _LARGE else _MOST_SAMPLES
        sample = data[np.unique(np.linspace(0, len(data) - 1, most).astype(int))]
        self._binary = is_binary(sample)
        gray = sample.dtype != np.uint8 and not self._binary and _within_unit_interval(sample)
        self._byte_scale = 255 if gray else 1
        others = np.zeros((len(sample), 0))
        self._masked: MaskedPrediction | None = None
        for name in {"model_", "dispersion_"} & vars(self).keys():
            delattr(self, name)
        if self._has_machine:
            others = self._fit_machine(data, sample)
        self._ensemble: Ensemble | None
        self._ensemble, self._held_out = Ensemble.fit(self._rows(sample), *self._partitions(), others)
        check_finite(self._held_out[:, None])
        if self.contamination == "auto":
            self.offset_ = -threshold(self._held_out, self.false_alarms)
        else:
            self.offset_ = float(np.percentile(-self._held_out, 100 * self.contamination))

    @property
    def _has_machine(self) -> bool:
        return self.hidden_shape is not None or self.n_epochs is not None

    def _sample_shape(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        """Return the shape of a sample, given the shape of the data without the first axis."""
        wanted = shape if self.visible_shape is None else as_shape(self.visible_shape, "visible_shape")
        if math.prod(wanted) != math.prod(shape):
            entries, features = math.prod(wanted), math.prod(shape)
            raise ValueError(f"visible_shape {wanted} has {entries} entries, but samples have {features} features")
        if len(shape) > 1 and wanted != shape:
            raise ValueError(f"visible_shape is {wanted}, but samples have shape {shape}")
        self._block(wanted)
        return wanted

    def _fit_machine(self, data: Any, sample: Array) -> Array:
        """Train a machine on all data, and return out-of-sample scores of the samples as an array of shape (n, 1)."""
        model = self._new_model(data if isinstance(data, np.ndarray) else sample, len(data))
        self.model_ = _train(clone(model), data)
        self._masked = self._masked_prediction(self.model_.machine_)
        means = np.zeros((2, len(sample)))
        for rest, held in KFold(2, shuffle=True, random_state=0).split(sample):
            fold = _train(clone(model), sample[rest])
            means[:, held] = self._masked_prediction(fold.machine_).means(sample[held])
        error, variance = means
        self.dispersion_ = float(error.mean() / max(variance.mean(), np.finfo(np.float32).tiny))
        return (error - self.dispersion_ * variance)[:, None]

    def _masked_prediction(self, machine: BoltzmannMachine) -> MaskedPrediction:
        widths = self._encoding.widths if self._encoding.is_mixed else None
        shape = machine.layers[VISIBLE].site_shape if widths is None else (len(widths),)
        return MaskedPrediction(machine, self._block(shape), self.n_masks, widths)

    def _check_parameters(self) -> None:
        if self.contamination != "auto":
            number(self.contamination, "contamination", 0, 0.5, exclude_low=True)
        number(self.false_alarms, "false_alarms", 0, 0.5, exclude_low=True)
        if whole_number(self.n_masks, "n_masks", 2, 1000) % 2:
            raise ValueError(f"n_masks must be even because masks come in pairs, got {self.n_masks}")

    def _check_no_machine_settings(self) -> None:
        """Raise ValueError if there are settings for a machine, but no machine."""
        if not self._has_machine:
            for name, default in _MACHINE_SETTINGS.items():
                if getattr(self, name) != default:
                    raise ValueError(
                        f"{name}={getattr(self, name)!r} has no effect without a machine: pass hidden_shape or "
                        "n_epochs to train one"
                    )

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
        if not self._encoding.is_mixed:
            self._block(
                unit_named(kind, shape).site_shape
            )  # raises an error before training if `block_shape` is invalid
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

        Samples with higher scores are more normal. The score is minus the root mean square of the deviations of all
        parts, in standard deviations. The largest possible score is 0.
        """
        check_is_fitted(self)
        data = self._read_more(X)
        parts = [self._scores(data[i : i + _SAMPLES_AT_ONCE]) for i in range(0, len(data), _SAMPLES_AT_ONCE)]
        scores = np.concatenate(parts)
        check_finite(scores[:, None])
        return scores

    def _scores(self, data: Array) -> Array:
        """Return the scores of a batch of samples."""
        others = np.zeros((len(data), 0))
        if self._masked is not None:
            error, variance = self._masked.means(self._in_machine_units(data))
            check_finite(np.stack([error, variance], 1))
            others = (error - self.dispersion_ * variance)[:, None]
        if self._ensemble is None:
            return -others[:, 0]
        values = self._rows(data)
        known = self._ensemble.neighbors.find(*self._ensemble.read(values))
        scores: Array = np.where(known >= 0, -self._held_out[known], -self._ensemble.scores(values, others))
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
        minus its variance if its block is hidden, as a multiple of the mean variance, where entries are in units of
        their ranges. For arrays, it is the mean over blocks that are shifted by half a block, smoothed with a moving
        average whose window is about half a block wide. Missing entries (NaN) count as 0. Values far above 0 are
        anomalous. The value of a categorical column is the sum over its categories. Columns that are not part of the
        model have the value 0.
        """
        check_is_fitted(self)
        data = self._read_more(X)
        parts = [self._maps(data[i : i + _SAMPLES_AT_ONCE]) for i in range(0, len(data), _SAMPLES_AT_ONCE)]
        maps = np.concatenate(parts)
        if self._encoding.is_mixed:
            starts = np.cumsum([0, *self._encoding.widths[:-1]])
            of_columns = np.zeros((len(maps), len(self._encoding.kept)))
            of_columns[:, self._encoding.kept] = np.add.reduceat(maps, starts, axis=1)
            maps = of_columns
        shape = X.shape if hasattr(X, "shape") else np.shape(X)
        return np.asarray(maps.reshape(shape))

    def _maps(self, data: Array) -> Array:
        r"""Return the anomaly maps of a batch of samples: (n, \*shape) or (n, n_features) -> (n, \*shape)."""
        shape, sites = self._sites
        block = self._block(shape)
        if self._ensemble is None:
            assert self._masked is not None
            excess = self._masked.excess(data, self.dispersion_)
        else:
            x, observed = self._ensemble.read(self._rows(data))
            shifts = list(itertools.product(*([False, True] if size > 1 else [False] for size in block)))
            total = sum(self._ensemble.linear.excess(x, _of_entries(divide(shape, block, s), sites)) for s in shifts)
            excess = np.where(observed, total / len(shifts), 0).reshape(-1, *self.visible_shape_)
        width = [2 * (size // 4) + 1 for size in block]
        width += [1] * (excess.ndim - 1 - len(width))
        return np.asarray(uniform_filter(excess, [1, *width], mode="nearest"))

    @property
    def _sites(self) -> tuple[tuple[int, ...], list[Array]]:
        """Shape of the array of sites, and the indices of the entries of each site.

        A site is hidden as a whole. It is a single entry, a one-hot vector of a machine with categorical units, or a
        column of a table.
        """
        entries = np.arange(math.prod(self.visible_shape_))
        if self._encoding.is_mixed:
            widths = self._encoding.widths
            return (len(widths),), np.split(entries, np.cumsum(widths)[:-1])
        shape = self.visible_shape_ if self._masked is None else self._masked.machine.layers[VISIBLE].site_shape
        return shape, list(entries.reshape(math.prod(shape), -1))

    def _partitions(self) -> tuple[Sequence[Blocks], Sequence[Blocks]]:
        """Return the slabs of each axis, and further partitions of a sample into blocks."""
        shape, sites = self._sites
        block = self._block(shape)
        more = [divide(shape, block, [False] * len(shape))] if len(shape) > 1 or block != (1,) else []
        axes, others = ([_of_entries(blocks, sites) for blocks in partitions] for partitions in (slabs(shape), more))
        return axes, others

    def _rows(self, data: Array) -> Array:
        """Return samples as rows in double precision. Bytes are divided by 255 if the training data was gray floats."""
        rows = np.asarray(data).reshape(len(data), -1)
        rows = rows / self._byte_scale if rows.dtype == np.uint8 else rows.astype(np.float64)
        if np.isinf(rows).any():
            raise ValueError("X contains infinity, but entries must be finite or NaN")
        return rows

    def _in_machine_units(self, data: Array) -> Array:
        """Divide floats by 255 if the training data was bytes, which the machine's units divide."""
        assert self._masked is not None
        scale = self._masked.machine.layers[VISIBLE].byte_scale
        divide = self._ensemble is not None and self._byte_scale == 1 and scale != 1 and data.dtype != np.uint8
        return data * scale if divide else data

    def _read_more(self, X: Any) -> Any:
        """Validate data other than the training data, and scale bytes as if they were training data."""
        data = self._read(X, reset=False)
        if self._ensemble is None or not (self._binary or self._byte_scale == 255):
            return data
        return match_bytes(data, np.float64, trained_on_binary=self._binary)

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

    def _block(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        """Return the shape of the blocks to hide, given the shape of the sites."""
        if self.block_shape is None:
            return tuple(max(1, round(size / _BLOCKS_PER_AXIS)) if len(shape) > 1 else 1 for size in shape)
        block = as_shape(self.block_shape, "block_shape")
        if len(block) != len(shape):
            axes = "1 axis" if len(shape) == 1 else f"{len(shape)} axes"
            raise ValueError(f"block_shape must have {axes} to match samples of shape {shape}, got {block}")
        if any(step > size for step, size in zip(block, shape, strict=True)):
            raise ValueError(f"block_shape must not exceed the sample shape {shape}, got {block}")
        return block

    @property
    def encoding_(self) -> TableEncoding:
        """Encoding of table columns, which specifies categories, dates, and columns that are excluded."""
        return self._encoding

    @property
    def n_parameters_(self) -> int:
        """Number of learned parameters of the linear model and the machine."""
        check_is_fitted(self)
        count = 0 if self._masked is None else self._masked.machine.n_parameters
        if self._ensemble is not None:
            count += self._ensemble.linear.mean.size + self._ensemble.linear.weights.size + 1
        return count

    # -- files ------------------------------------------------------------------------------------

    def _write(self, folder: Path, extra: Mapping[str, Any]) -> None:
        if self._ensemble is None:
            self.model_._write(folder, extra)
            return
        machines = [self._ensemble.linear.machine(self.visible_shape_)]
        machines += [] if self._masked is None else [self._masked.machine]
        arrays = {**_arrays_of(self._ensemble), "held_out": self._held_out}
        tensors = {name: torch.from_numpy(np.ascontiguousarray(array)) for name, array in arrays.items()}
        write_machines(machines, folder, extra, tensors)

    def _description(self) -> dict[str, Any]:
        learned: dict[str, Any] = {"offset": self.offset_, "feature_names": saved_names(self)}
        if self._masked is not None:
            learned |= {"dispersion": self.dispersion_, "model": self.model_._description()}
        if self._encoding.is_mixed:
            learned["columns"] = self._encoding.describe()
        if self._ensemble is not None:
            n_samples = len(self._ensemble.neighbors.samples)
            learned["ensemble"] = {
                "shape": list(self.visible_shape_),
                "n_samples": n_samples,
                "byte_scale": self._byte_scale,
                "binary": self._binary,
            }
        return {**super()._description(), **learned}

    def _restore(self, folder: Path, described: Mapping[str, Any]) -> None:
        self._check_parameters()
        self._ensemble = self._masked = None
        saved = described.get("ensemble")
        if saved is None:  # Up to version 0.2, a detector consisted only of a machine.
            self.model_ = TVRBM.from_folder(folder, {ESTIMATOR: described["model"]}, self.device)
        self.visible_shape_ = self.model_.visible_shape_ if saved is None else as_shape(saved["shape"], "shape")
        self._encoding, self.n_features_in_ = self._saved_encoding(described)
        if saved is None:
            self._masked = self._masked_prediction(self.model_.machine_)
        else:
            self._restore_ensemble(folder, described)
        if self._masked is not None:
            self.dispersion_ = number(described["dispersion"], "dispersion", -math.inf)
        self.offset_ = number(described["offset"], "offset", -math.inf)
        restore_names(self, described["feature_names"])

    def _restore_ensemble(self, folder: Path, described: Mapping[str, Any]) -> None:
        saved = described["ensemble"]
        self._byte_scale = whole_number(saved["byte_scale"], "byte_scale", 1, 255)
        self._binary = truth_value(saved.get("binary", False), "binary")
        n_samples = whole_number(saved["n_samples"], "n_samples", 2)

        def shapes(machines: Sequence[BoltzmannMachine]) -> dict[str, tuple[int, ...]]:
            self._check_machines(machines, has_model="model" in described)
            self._masked = self._masked_prediction(machines[1]) if len(machines) > 1 else None
            size = math.prod(self.visible_shape_)
            found: dict[str, tuple[int, ...]] = {"low": (size,), "width": (size,), "samples": (n_samples, size)}
            found["held_out"] = (n_samples,)
            counts = {f"errors.{i}": len(blocks) for i, blocks in enumerate(itertools.chain(*self._partitions()))}
            counts["parts"] = len(counts) + N_DISTANCES + len(machines) - 1
            found |= {f"{name}.center": (count,) for name, count in counts.items()}
            return found | {f"{name}.scale": (count,) for name, count in counts.items()}

        machines, tensors = read_machines(folder, shapes)
        arrays = {name: tensor.numpy() for name, tensor in tensors.items()}
        for name, array in arrays.items():
            if name.endswith(("width", "scale")) and not (array > 0).all():
                raise StorageError(f"'{name}' in {folder} must be positive")
        if len(machines) > 1:
            self.model_ = _model_of(machines[1], folder, described["model"], self.device)
            self._masked = self._masked_prediction(self.model_.machine_)
        partitions = [*itertools.chain(*self._partitions())]
        *errors, parts = (
            Spread(arrays[f"{name}.center"], arrays[f"{name}.scale"])
            for name in (*(f"errors.{i}" for i in range(len(partitions))), "parts")
        )
        self._held_out = arrays["held_out"]
        self._ensemble = Ensemble(
            Range(arrays["low"], arrays["width"]),
            LinearPrediction.of(machines[0]),
            partitions,
            Neighbors(arrays["samples"]),
            errors,
            parts,
        )

    def _check_machines(self, machines: Sequence[BoltzmannMachine], *, has_model: bool) -> None:
        """Raise StorageError unless the machines are a linear model and, if the detector has one, a trained machine."""
        linear, *others = machines
        if len(others) != has_model:
            raise StorageError(f"the detector requires {1 + has_model} machines, got {len(machines)}")
        if [unit.gaussian for unit in (linear.hidden, *linear.layers.values())] != [True, True]:
            raise StorageError(f"a detector requires a machine with two Gaussian layers, got {linear}")
        for machine in machines:
            if machine.layers.keys() != {VISIBLE} or machine.layers[VISIBLE].shape != self.visible_shape_:
                raise StorageError(f"the layers {machine.layers} do not match samples of shape {self.visible_shape_}")

    def _saved_encoding(self, described: Mapping[str, Any]) -> tuple[TableEncoding, int]:
        """Return the saved encoding of a table and the number of its columns."""
        if "columns" not in described:
            return TableEncoding(), math.prod(self.visible_shape_)
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


def _train(model: TVRBM, data: Any) -> TVRBM:
    """Train a model on data with missing entries (NaN)."""
    has_missing = isinstance(data, np.ndarray) and bool(np.isnan(data).any())
    return model.fit(data, mask=~np.isnan(data) if has_missing else None)


def _model_of(machine: BoltzmannMachine, folder: Path, described: Mapping[str, Any], device: Any) -> TVRBM:
    """Restore a model whose machine has already been read from a folder of several machines."""

    class Model(TVRBM):
        def _read_machines(self, folder: Path) -> list[BoltzmannMachine]:
            return [machine]

    restored = Model.from_folder(folder, {ESTIMATOR: described}, device)
    restored.__class__ = TVRBM
    return restored


def _of_entries(blocks: Blocks, sites: Sequence[Array]) -> list[Array]:
    """Convert blocks of sites to blocks of entries."""
    return [np.concatenate([sites[number] for number in block]) for block in blocks]


def _arrays_of(ensemble: Ensemble) -> dict[str, Array]:
    """Return a dict of the learned arrays of an ensemble, except those of the linear model, keyed by the names used in
    saved files.
    """
    arrays = {"low": ensemble.range.low, "width": ensemble.range.width, "samples": ensemble.neighbors.samples}
    spreads = {f"errors.{i}": spread for i, spread in enumerate(ensemble.errors)} | {"parts": ensemble.parts}
    for name, spread in spreads.items():
        arrays |= {f"{name}.center": spread.center, f"{name}.scale": spread.scale}
    return arrays
