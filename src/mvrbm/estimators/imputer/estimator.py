"""Imputer for missing entries, :class:`MVRBMImputer`. The other modules in this package define its models."""

from __future__ import annotations

import math
import sys
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

import numpy as np
import torch
from sklearn.base import OneToOneFeatureMixin, TransformerMixin
from sklearn.utils.validation import check_is_fitted, validate_data
from torch import Tensor

from mvrbm.devices import resolve_device
from mvrbm.errors import StorageError
from mvrbm.estimators.batches import Array
from mvrbm.estimators.imputer.calibration import Calibration
from mvrbm.estimators.imputer.correction import FILLED, FILLED_UNBOUNDED, Correction, CorrectionTrainer
from mvrbm.estimators.imputer.factor_analysis import Factors
from mvrbm.estimators.imputer.interpolation import Interpolation
from mvrbm.estimators.imputer.linear_model import Linear
from mvrbm.estimators.imputer.masking import Samples, hold_out
from mvrbm.estimators.imputer.predictor import Predictor
from mvrbm.estimators.imputer.residual_covariance import Residuals
from mvrbm.estimators.imputer.scaling import Scaling, axis_units, data_range
from mvrbm.estimators.imputer.selection import choose_linear, entry_weights
from mvrbm.estimators.inputs import dtype_for, without_wrapper
from mvrbm.estimators.parameters import seed_of
from mvrbm.estimators.persistence import SavedEstimator, restore_names, saved_names
from mvrbm.estimators.table_encoding import TableEncoding
from mvrbm.estimators.undo_on_error import undo_on_error
from mvrbm.io.shards import Rows
from mvrbm.machine import BoltzmannMachine
from mvrbm.progress import remaining_time
from mvrbm.random import RandomSource
from mvrbm.saving import read_machines, register, write_machines
from mvrbm.units.base import LARGEST_PARAMETER
from mvrbm.validation import all_finite, as_shape, choice, number, whole_number

# Valid values for the parameter `correction`.
_CORRECTIONS = ("auto", "none", "rectified", "bernoulli")
# Unit type used by `correction="auto"`.
_AUTOMATIC_UNITS = "rectified"
# Minimum number of samples for which `correction="auto"` tries a correction.
_FEWEST_SAMPLES = 200
# Maximum number of entries in a sample for which `correction="auto"` tries a correction.
_MOST_CORRECTED = 10_000
# Number of hidden units per entry in each layer of the correction if `n_hidden` is None.
_HIDDEN_PER_ENTRY = 3
# Maximum number of hidden units in each layer of the correction if `n_hidden` is None.
_MOST_HIDDEN = 1000
# Maximum number of entries in a batch of samples, and in the factor covariance matrices of a batch.
_BATCH_ENTRIES = 2**24
# Number of samples with held-out entries that is enough for the calibration. With fewer samples, other entries are held
# out too, this many times at most.
_ENOUGH_CALIBRATED = 200
_MOST_CALIBRATIONS = 3
# Calibration before errors on held-out entries are known.
_NOTHING = Calibration([1.0], [1.0])
# Names of the tensors in `Scaling`, which are saved with the machines.
_TENSORS = ("low", "high", "center", "scale", "units")
# Maps tensor names to names in model files, which keep the spelling of version 0.2.
_SAVED_TENSORS = {"center": "centre"}
# Names of the tensors in `Residuals` in model files.
_RESIDUAL_SCALE = "residual_scale"
_COVARIANCE = "covariance_{}"


@register("MVRBMImputer")
@dataclass(eq=False, repr=False)
class MVRBMImputer(OneToOneFeatureMixin, TransformerMixin, SavedEstimator):
    r"""Imputer that replaces missing entries (NaN) in rows, matrices or tensors with their conditional means.

    .. math:: x = \mu + L t + r + \sqrt{\psi}\,\varepsilon, \qquad t, \varepsilon \sim \mathcal N(0, 1), \qquad
              r \sim \mathcal N(0, C_1 \otimes \dots \otimes C_d)

    Here, :math:`\mu` is the mean, :math:`L` contains the factor loadings, :math:`r` contains residuals that are
    correlated along the axes of a sample, and :math:`\psi` contains the noise variances. This model predicts missing
    entries linearly from the known entries. A correction, which consists of two machines with rectified or binary
    hidden units, learns to improve these predictions. The imputer holds out some of the known entries, in the same
    patterns as the missing entries. Correlated residuals and the correction are used only if they predict these entries
    better by more than chance. The same holds for full covariance matrices, which are shrunk to separable ones.

    Parameters
    ----------
    correction : {"auto", "none", "rectified", "bernoulli"}, default="auto"
        Type of the hidden units in the correction. ``"none"`` uses only the linear model. ``"auto"`` uses rectified
        units if the correction reduces the error on held-out entries, both after a short trial and at the end, and no
        correction otherwise. With fewer than 200 samples, or with more than 10,000 entries per sample, ``"auto"`` uses
        no correction.
    n_factors : int, optional
        Number of factors (hidden units in the linear model). Default: the power of two with the smallest error on
        held-out entries, or one less than the number of entries if a full covariance matrix has a smaller error.
    n_hidden : int, optional
        Number of hidden units in each of the two layers of the correction. Default: three per entry, up to 1,000.
    sample_axes : int or "auto", default="auto"
        Number of leading axes that index the samples. If 2, data of shape (n, a, b) is treated as `n * a` samples of
        `b` entries. ``"auto"`` uses 1 unless there are fewer samples than entries per sample. In that case, it selects
        the number that predicts held-out entries best.
    categorical_features : "from_dtype", array of int, str or bool, or None, default="from_dtype"
        Categorical columns in 2-D data, given as indices, names or a mask. ``"from_dtype"`` selects the non-numeric
        columns of a data frame. Missing entries in categorical columns are replaced with the most probable category.
        Date columns are treated as numeric and filled in with dates in the same format. Text columns are excluded from
        the model and returned unchanged if they have more than 20 distinct values and more than half of their known
        values are distinct. Convert such columns to dtype ``"category"`` to treat them as categorical.
    n_epochs : int, optional
        Number of epochs for training the correction. Default: enough epochs for 600 to 6,000 updates, depending on the
        number of samples.
    batch_size : int, default=200
        Number of samples per update when training the correction.
    learning_rate : float, default=0.001
        Initial learning rate for training the correction.
    clip : bool, default=True
        Whether to limit filled-in values and draws to the range of the training data: the range of each column for 2-D
        data, or the range of all entries for data with more axes. This reduces the error on data with natural limits,
        such as images and counts, and has almost no effect on means in most other tables. Use False for unbounded
        columns if new samples may lie outside the range, or if the tails of draws matter.
    keep_empty_features : bool, default=False
        Whether to keep columns of 2-D data that have no known entries and fill them with 0. If False, `transform` drops
        these columns. For data with more than two axes, all entries are kept.
    dayfirst : bool, optional
        Whether dates such as 05/03/2021 start with the day (True) or the month (False), if both are possible for all
        dates in a column. By default, they are read month first, with a warning.
    random_state : int, RandomState or None, default=None
        Seed or generator for random numbers. Pass an int for reproducible results.
    device : str or torch.device, default="auto"
        Device to run on, such as ``"cpu"`` or ``"cuda"``. ``"auto"`` selects a GPU if one is available.
    verbose : int, default=0
        If nonzero, print the error of each model to standard error.

    Attributes
    ----------
    machine_ : BoltzmannMachine
        The factors of the linear model, for data divided by `units_`.
    correction_ : Correction or None
        The correction, or None if the imputer does not use a correction.
    n_factors_ : int
        Number of factors.
    sample_axes_ : int
        Number of leading axes that index the samples.
    units_ : array
        Units of the entries, of the shape of the encoded data without the first axis. They are products of one factor
        per index of each axis, so the results do not depend on the units of columns, channels or other indices.
    errors_ : dict of str to float
        Root mean squared error on held-out entries, in standard deviations, for each model that was tried.
    n_features_in_ : int
        Product of the sizes of all axes except the first.

    Examples
    --------
    >>> import numpy as np
    >>> from mvrbm import MVRBMImputer
    >>> x = np.outer(np.arange(1.0, 9.0), [1.0, 2.0, 3.0])
    >>> x[2, 1] = np.nan
    >>> MVRBMImputer(random_state=0).fit_transform(x)[2].round()
    array([3., 6., 9.])
    """

    correction: str = "auto"
    n_factors: int | None = None
    n_hidden: int | None = None
    sample_axes: int | str = "auto"
    categorical_features: Any = "from_dtype"
    n_epochs: int | None = None
    batch_size: int = 200
    learning_rate: float = 0.001
    clip: bool = True
    keep_empty_features: bool = False
    dayfirst: bool | None = None
    random_state: Any = None
    device: str | torch.device = "auto"
    verbose: int = 0

    # -- training ---------------------------------------------------------------------------------

    def fit(self, X: Any, y: Any = None) -> Self:
        r"""Train the models on data with missing entries.

        Parameters
        ----------
        X : array of shape (n, \*sample shape), or data frame
            Training data. NaN marks missing entries.
        y : None
            Not used, present here for API consistency by convention.

        Returns
        -------
        self : object
            Fitted estimator.

        Notes
        -----
        If `fit` raises an exception, including KeyboardInterrupt, the imputer is restored to its previous state.
        """
        with undo_on_error(self):
            self._fit(X)
        return self

    def _fit(self, X: Any) -> None:
        self._check_parameters()
        rng = RandomSource(seed_of(self.random_state))
        rows = self._read(X, reset=True)
        known = ~torch.isnan(rows)
        x = torch.where(known, rows, 0.0)
        is_table = len(self._shape_in) == 1
        low, high = data_range(rows, known, per_column=is_table)
        units = axis_units(x, known, self._shape_out).to(x)
        x = x / units
        data = hold_out(x, known, self._shape_out, rng)
        weights = entry_weights(x, known, per_entry=is_table)
        self.errors_: dict[str, float] = {}
        chosen = choose_linear(data, weights, self._shape_out, self.sample_axes, self.n_factors, self._report)
        self.sample_axes_ = chosen.sample_axes
        center = chosen.linear.factors.mean
        scale = torch.where(weights > 0, 1 / torch.sqrt(weights), 1.0).expand_as(center).clone()
        scaling = Scaling(low, high, center, scale, units)
        samples = data.reshape(math.prod(self._sample_shape()))
        correction = None
        if self._tries_correction(len(samples.x)):
            correction = self._train_correction(chosen.linear, scaling, samples, weights, rng)
        errors = [Predictor(chosen.linear, correction, scaling, _NOTHING).errors(samples)]
        if correction is None:
            for more in self._more_held_out(data, known, rng):
                linear = chosen.refit(more.x, more.shown)
                errors.append(Predictor(linear, None, scaling, _NOTHING).errors(more))
        calibration = Calibration.of(*(torch.cat(parts) for parts in zip(*errors, strict=True)))
        linear = chosen.refit(samples.x, samples.known)
        self._set_models(
            linear.factors.machine(self._sample_shape()), linear.residuals, correction, scaling, calibration
        )
        used = "no correction" if correction is None else "a correction"
        self._print(f"selected: sample_axes={self.sample_axes_}, n_factors={self.n_factors_}, {used}")

    def _more_held_out(self, data: Samples, known: Tensor, rng: RandomSource) -> Iterator[Samples]:
        """Yield the data with other held-out entries, if too few samples have held-out entries to calibrate with."""
        n_held = max(len(data.with_held_entries().x), 1)
        for _ in range(min(-(-_ENOUGH_CALIBRATED // n_held) - 1, _MOST_CALIBRATIONS)):
            yield hold_out(data.x, known, self._shape_out, rng).reshape(math.prod(self._sample_shape()))

    def _check_parameters(self) -> None:
        choice(self.correction, "correction", _CORRECTIONS)
        for name in ("n_factors", "n_hidden", "n_epochs"):
            if getattr(self, name) is not None:
                whole_number(getattr(self, name), name)
        whole_number(self.batch_size, "batch_size")
        number(self.learning_rate, "learning_rate", exclude_low=True)

    def _tries_correction(self, n_samples: int) -> bool:
        if self.correction == "auto":
            return n_samples >= _FEWEST_SAMPLES and math.prod(self._sample_shape()) <= _MOST_CORRECTED
        return self.correction != "none"

    def _train_correction(
        self, linear: Linear, scaling: Scaling, samples: Samples, weights: Tensor, rng: RandomSource
    ) -> Correction | None:
        """Train and return a correction. With ``correction="auto"``, return None if it does not reduce the error."""
        return CorrectionTrainer(
            linear=linear,
            scaling=scaling,
            samples=samples,
            shape=self._sample_shape(),
            weights=weights,
            hidden=_AUTOMATIC_UNITS if self.correction == "auto" else self.correction,
            n_hidden=self.n_hidden or min(_MOST_HIDDEN, _HIDDEN_PER_ENTRY * samples.x.shape[1]),
            n_epochs=self.n_epochs,
            batch_size=self.batch_size,
            learning_rate=self.learning_rate,
            rng=rng,
            report=self._report,
            filled=FILLED if self.clip else FILLED_UNBOUNDED,
            optional=self.correction == "auto",
            note_time=self._note_time,
            note_rejection=lambda reason: self._print(f"correction rejected: {reason}"),
        ).train()

    def _set_models(
        self,
        machine: BoltzmannMachine,
        residuals: Residuals | Interpolation | None,
        correction: Correction | None,
        scaling: Scaling,
        calibration: Calibration,
    ) -> None:
        device = resolve_device(self.device)
        self.machine_ = machine.to(device)
        self.correction_ = None if correction is None else correction.to(device)
        linear = Linear(Factors.of(self.machine_), None if residuals is None else residuals.to(device))
        self._predictor = Predictor(linear, self.correction_, scaling, calibration)

    def _report(self, tried: str, error: float) -> None:
        """Record the error of a model in `errors_` and print it if `verbose` is nonzero."""
        self.errors_[tried] = error
        self._print(f"{tried}: error on held-out entries is {error:.4g} standard deviations")

    def _note_time(self, seconds: float) -> None:
        """Print the estimated time for training the correction if it is long."""
        if left := remaining_time(seconds):
            self._print(f"training the correction{left}")

    def _print(self, text: str) -> None:
        if self.verbose:
            print(text, file=sys.stderr, flush=True)

    # -- predictions ------------------------------------------------------------------------------

    def transform(self, X: Any) -> Any:
        """Replace each missing entry with its mean given the known entries in the same sample.

        Parameters
        ----------
        X : array or data frame
            Data with the same sample shape as the training data. NaN marks missing entries.

        Returns
        -------
        array or data frame
            Complete data, as an array, or as a data frame if `X` is a data frame with non-numeric or categorical
            columns. Columns without known entries in the training data are dropped unless `keep_empty_features` is
            True.
        """
        check_is_fitted(self)
        return self._filled(X, self._predictor.mean)

    def draw(self, X: Any, n: int = 5) -> list[Any]:
        """Return a list of `n` completed copies of the data for multiple imputation.

        In each copy, missing entries are sampled from their conditional distribution given the known entries. The
        copies have the same format as the result of :meth:`transform`.
        """
        check_is_fitted(self)
        whole_number(n, "n")
        self._warn_if_not_calibrated()
        rng = RandomSource(seed_of(self.random_state))

        def drawn(x: Tensor, known: Tensor) -> Tensor:
            return self._predictor.draw(x, known, rng)

        return [self._filled(X, drawn) for _ in range(n)]

    def standard_deviation(self, X: Any) -> Array:
        """Return the standard deviation of each missing entry given the known entries. For known entries, return 0.

        Two standard deviations cover 95% of the errors on entries that were held out during training.

        The result has the shape of the output of :meth:`transform`, except that each categorical column is replaced
        with one column per category. Missing entries of columns that are not part of the model are NaN.
        """
        check_is_fitted(self)
        self._warn_if_not_calibrated()
        rows = self._read(X, reset=False)
        deviations = self._map_samples(rows, self._predictor.deviation)
        found = torch.where(torch.isnan(rows), deviations, 0.0).numpy().reshape(len(rows), *self._shape_out)
        return self._encoding.with_copied(found, X)

    def _warn_if_not_calibrated(self) -> None:
        if not self._predictor.calibration.is_measured:
            advice = "no known entries could be held out to compare the errors with; fit the imputer to more samples"
            warnings.warn(f"standard deviations are not calibrated: {advice}", stacklevel=3)

    def get_feature_names_out(self, input_features: Any = None) -> Array:
        """Return the column names of the output of :meth:`transform`."""
        check_is_fitted(self)
        names: Array = super().get_feature_names_out(input_features)
        return names[self._encoding.returned]

    @property
    def n_factors_(self) -> int:
        """Number of factors."""
        return math.prod(self.machine_.hidden.shape)

    @property
    def units_(self) -> Array:
        """Units of the entries, in which the models are fitted."""
        found: Array = self._predictor.scaling.units.numpy().reshape(self._shape_out)
        return found

    @property
    def encoding_(self) -> TableEncoding:
        """Encoding of table columns, which specifies categories, dates, and columns that are copied or dropped."""
        return self._encoding

    @property
    def visible_shape_(self) -> tuple[int, ...]:
        """Shape of the data along all axes except the first."""
        return self._shape_in

    def _filled(self, X: Any, fill: Callable[[Tensor, Tensor], Tensor]) -> Any:
        """Replace missing entries with the predictions of `fill`, a function of samples and masks of known entries."""
        rows = self._read(X, reset=False)
        values = self._map_samples(rows, fill)
        if self.clip:
            values = self._predictor.scaling.clamp(values)
        return self._encoding.decode(torch.where(torch.isnan(rows), values, rows).numpy(), X, self._shape_out)

    @torch.no_grad()
    def _map_samples(self, rows: Tensor, compute: Callable[[Tensor, Tensor], Tensor]) -> Tensor:
        """Apply a function to samples and their masks of known entries. Return the results as rows."""
        units = self._predictor.scaling.units.to(rows)
        samples = (rows / units).reshape(-1, math.prod(self._sample_shape())).to(self.machine_.like)
        size = max(1, _BATCH_ENTRIES // max(samples.shape[1], self.n_factors_**2))
        pieces = []
        for batch in samples.split(size):
            known = ~torch.isnan(batch)
            pieces.append(compute(torch.where(known, batch, 0.0), known).cpu())
        return torch.cat(pieces).reshape(rows.shape).to(rows.dtype) * units

    # -- data -------------------------------------------------------------------------------------

    def _read(self, X: Any, *, reset: bool) -> Tensor:
        """Validate the data and return it as encoded rows of shape (n, entries), with NaN for missing entries."""
        X = without_wrapper(X)
        X = np.asarray(X) if isinstance(X, Rows) else X
        if reset:
            self._encoding = TableEncoding.of(X, self.categorical_features, self.dayfirst)
        elif self._encoding.is_mixed:
            validate_data(self, X, reset=False, skip_check_array=True)  # validates the order of the columns
        X, shape = self._encoding.to_numbers(X)
        dtype = dtype_for(X) or np.float32
        checked = validate_data(self, X, reset=reset, dtype=dtype, ensure_all_finite="allow-nan")
        largest = np.nanmax(np.abs(checked)) if checked.size and not np.isnan(checked).all() else 0.0
        if largest > LARGEST_PARAMETER:
            raise ValueError(
                f"X contains values of magnitude {largest:.3g}, but the limit is {LARGEST_PARAMETER:g}; rescale X"
            )
        if reset and 0 < (spread := np.nanmax(checked) - np.nanmin(checked) if largest else 0) < 1 / LARGEST_PARAMETER:
            raise ValueError(f"the values in X differ by at most {spread:.3g}, which is too little; rescale X")
        if reset:
            self._shape_in = shape
            self._encoding.learn_kept(checked, keep_all=self.keep_empty_features or len(shape) > 1)
            if bool(np.isnan(checked).all()):
                raise ValueError("all entries are missing, but at least one known entry is required")
            if dropped := np.flatnonzero(~self._encoding.returned).tolist():
                names = getattr(self, "feature_names_in_", np.arange(len(self._encoding.kept)))[dropped].tolist()
                advice = "use keep_empty_features=True to keep them"
                warnings.warn(f"columns {names} are dropped because they have no known entries; {advice}", stacklevel=3)
        elif shape != self._shape_in:
            raise ValueError(f"samples must have shape {self._shape_in}, got {shape}")
        return torch.tensor(self._encoding.encode(checked))

    @property
    def _shape_out(self) -> tuple[int, ...]:
        """Shape of the encoded data along all axes except the first."""
        return self._shape_in if len(self._shape_in) > 1 else (sum(self._encoding.widths),)

    def _sample_shape(self) -> tuple[int, ...]:
        """Return the shape of the encoded data along the axes that do not index samples."""
        return self._shape_out[self.sample_axes_ - 1 :]

    def __sklearn_tags__(self) -> Any:
        """Return the scikit-learn tags, which allow NaN and declare that float32 and float64 are preserved."""
        tags = super().__sklearn_tags__()
        tags.input_tags.allow_nan = True
        tags.transformer_tags.preserves_dtype = ["float64", "float32"]
        return tags

    # -- files ------------------------------------------------------------------------------------

    def _description(self) -> dict[str, Any]:
        residuals = self._predictor.linear.residuals
        fitted = {
            "columns": self._encoding.describe(),
            "shape": list(self._shape_in),
            "sample_axes": self.sample_axes_,
            "errors": self.errors_,
            "has_units": True,
            "calibration": self._predictor.calibration.describe(),
            "residual_noise": residuals.noise if isinstance(residuals, Residuals) else None,
            "interpolation": [residuals.axis, residuals.step] if isinstance(residuals, Interpolation) else None,
            "feature_names": saved_names(self),
        }
        return {**super()._description(), "fitted": fitted}

    def _write(self, folder: Path, extra: Mapping[str, Any]) -> None:
        machines = [self.machine_, *(() if self.correction_ is None else self.correction_.children())]
        scaling = self._predictor.scaling
        tensors = {_SAVED_TENSORS.get(name, name): getattr(scaling, name) for name in _TENSORS}
        if (residuals := self._predictor.linear.residuals) is not None:
            tensors |= {_RESIDUAL_SCALE: residuals.scale}
        if isinstance(residuals, Residuals):
            tensors |= {_COVARIANCE.format(axis): matrix for axis, matrix in enumerate(residuals.covariances)}
        write_machines(machines, folder, extra, tensors)

    @torch.no_grad()
    def _restore(self, folder: Path, described: Mapping[str, Any]) -> None:
        fitted = described["fitted"]
        self._shape_in = as_shape(fitted["shape"], "shape")
        self.n_features_in_ = math.prod(self._shape_in)
        self._encoding = TableEncoding.from_description(fitted["columns"], self._shape_in)
        self.sample_axes_ = whole_number(fitted["sample_axes"], "sample_axes", 1, len(self._shape_in))
        shape = self._sample_shape()
        size = (math.prod(shape),)
        range_shape = self._shape_out if len(self._shape_in) == 1 else ()
        all_sizes = (math.prod(self._shape_out),)
        has_units = fitted.get("has_units", False)  # absent before version 0.3
        noise = fitted.get("residual_noise")  # absent before version 0.3
        interpolation = fitted.get("interpolation")
        of_residuals: dict[str, tuple[int, ...]] = {}
        if noise is not None:
            of_residuals = {_COVARIANCE.format(axis): (length, length) for axis, length in enumerate(shape)}
        if noise is not None or interpolation is not None:
            of_residuals[_RESIDUAL_SCALE] = size

        def tensor_shapes(machines: Sequence[BoltzmannMachine]) -> dict[str, tuple[int, ...]]:
            _check_machines(machines, shape)
            of_scaling = {"low": range_shape, "high": range_shape, _SAVED_TENSORS["center"]: size, "scale": size}
            of_units = {"units": all_sizes} if has_units else {}
            return {**of_scaling, **of_units, **of_residuals}

        (machine, *correction), tensors = read_machines(folder, tensor_shapes)
        self.errors_ = {str(name): float(error) for name, error in fitted["errors"].items()}
        restore_names(self, fitted["feature_names"])
        if not has_units:
            tensors = {**tensors, "units": torch.ones_like(tensors["low"]).expand(all_sizes).clone()}
        scaling = Scaling(**{name: tensors[_SAVED_TENSORS.get(name, name)] for name in _TENSORS})
        residuals: Residuals | Interpolation | None = None
        if interpolation is not None:
            axis = whole_number(interpolation[0], "interpolation", 0, len(shape) - 1)
            step = number(interpolation[1], "interpolation", exclude_low=True)
            residuals = Interpolation(shape, axis, step, tensors[_RESIDUAL_SCALE])
        if noise is not None:
            matrices = tuple(tensors[_COVARIANCE.format(axis)] for axis in range(len(shape)))
            noise = number(noise, "residual_noise", exclude_low=True)
            residuals = Residuals(matrices, noise, tensors[_RESIDUAL_SCALE])
        calibration = Calibration.from_description(fitted["calibration"])
        self._set_models(machine, residuals, Correction(*correction) if correction else None, scaling, calibration)
        self._check_finite(folder)

    def _check_finite(self, folder: Path) -> None:
        """Raise StorageError if the saved parameters lead to predictions that are not finite."""
        mean = self._predictor.linear.factors.mean
        every_second = torch.arange(len(mean), device=mean.device) % 2 == 1
        scaling = self._predictor.scaling
        standardized = (mean.cpu() + 1 - scaling.center) / scaling.scale
        results = [self._predictor.mean(mean[None], every_second[None]).cpu(), standardized]
        wrong = bool((scaling.scale <= 0).any()) or not bool((scaling.units > 0).all())
        if wrong or not all_finite(results):
            raise StorageError(
                f"predictions are not finite because 'center' and 'scale' in {folder} do not match the correction"
            )


def _check_machines(machines: Sequence[BoltzmannMachine], shape: tuple[int, ...]) -> None:
    """Raise StorageError unless the machines form a linear model, with or without a correction, for the given shape."""
    linear, *others = machines
    if [unit.gaussian for unit in (linear.hidden, *linear.layers.values())] != [True, True]:
        raise StorageError(f"an imputer requires a machine with two Gaussian layers, got {linear}")
    if linear.layers.keys() != {"visible"} or linear.layers["visible"].shape != shape:
        raise StorageError(f"the layers {linear.layers} do not match an imputer for samples of shape {shape}")
    if not others:
        return
    size = (math.prod(shape),)
    expected = [{"value": size, "known": size}, {"below": others[0].hidden.shape, "filled": size}]
    if [{name: unit.shape for name, unit in machine.layers.items()} for machine in others] != expected:
        raise StorageError(f"the machines {others} do not match a correction for samples of shape {shape}")
