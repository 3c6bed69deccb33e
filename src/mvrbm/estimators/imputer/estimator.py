"""The imputer: missing entries of rows, matrices and tensors, filled in by machines chosen on hidden entries."""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Mapping, Sequence
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
from mvrbm.estimators.columns import Columns
from mvrbm.estimators.imputer.factors import Factors, fit_factors
from mvrbm.estimators.imputer.prediction import Correction, random_masks
from mvrbm.estimators.inputs import Array, restore_names, saved_names
from mvrbm.estimators.parameters import SavedEstimator, seed_of
from mvrbm.machine import BoltzmannMachine
from mvrbm.random import RandomSource
from mvrbm.saving import read_machines, register, write_machines
from mvrbm.training.backprop import DescentSettings, descend
from mvrbm.validation import all_finite, as_shape, choice, number, whole_number

_HIDDEN = ("auto", "gaussian", "rectified", "bernoulli")
# Fewest and most samples of which some known entries are hidden to compare machines; most samples that factors are
# fitted to where entries are missing; most factors, with missing entries, which cost a linear system per sample, and
# without.
_FEWEST_HELD, _MOST_HELD, _MOST_FITTED, _MOST_FACTORS, _MOST_FACTORS_COMPLETE = 50, 400, 10_000, 128, 256
# Share of complete samples from which on factors are fitted to these alone, which is much faster.
_MOSTLY = 0.8
# Samples per mask where nothing is missing: masks of their own would cost a linear system each.
_SHARED_MASK = 20
# Steps of EM at every number of factors, starting from the factors of the last, until doubling it twice helps little;
# more factors, or larger samples, must be this much better.
_STEPS, _BETTER = 15, 0.995
# Multiples of the learned noise that are tried: with few samples, factors fit their own noise, too.
_NOISES = (1.0, 2.0, 4.0)
# A correction is learned from at least so many samples, in so many updates.
_FEWEST_SAMPLES, _FEWEST_UPDATES, _MOST_UPDATES = 200, 3000, 6000
_MOST_HIDDEN = 1000
# Units of what a correction fills in; the ones with smaller errors after a short training of so many updates are used.
_FILLED, _TRIAL_UPDATES = ("gaussian", "bernoulli"), 300
# Numbers of one batch of samples, or of covariances of their factors.
_BATCH = 2**24


@register("MVRBMImputer")
@dataclass(eq=False, repr=False)
class MVRBMImputer(OneToOneFeatureMixin, TransformerMixin, SavedEstimator):
    r"""Fill in missing entries (NaN) of rows, matrices or tensors with their means given the known entries.

    A machine with a Gaussian hidden layer, which is factor analysis, predicts them linearly. Two further machines, with
    rectified or binary hidden units, learn to correct these predictions. How many factors there are, whether the
    correction helps, and whether its results are bounded by the range of the data, is decided on known entries that are
    hidden, in the way in which entries are missing in the data.

    Parameters
    ----------
    hidden : {"auto", "gaussian", "rectified", "bernoulli"}
        Hidden units of the correction; ``"gaussian"`` is no correction. ``"auto"``: rectified units, if they help.
    n_factors : int, optional
        Number of hidden Gaussian units. Default: chosen among powers of two.
    n_hidden : int, optional
        Number of hidden units in each of the two layers of the correction. Default: three per entry, up to 1,000.
    sample_axes : int or "auto"
        How many leading axes of the data count samples. With 2, data of shape (n, a, b) is `n a` samples of `b`
        entries. ``"auto"``: 1, or what is best on hidden entries if there are fewer samples than entries.
    categorical_features : {"from_dtype"}, array of int, str or bool, or None
        Columns of categories, also binary ones, of 2-D data: those of data frames that are not numbers, or columns by
        number, name or mask. Their missing entries become the most probable category.
    n_epochs, batch_size, learning_rate : optional
        Training of the correction. Default: 3,000 to 6,000 updates of 200 samples, more for more data.
    keep_empty_features : bool
        Whether columns without any known entry are kept, filled with 0; for 2-D data. Other arrays keep them.
    random_state : int, RandomState or None
        Random seed.
    device : str
        ``"auto"`` is a GPU if there is one.
    verbose : int
        Whether to report progress.

    Attributes
    ----------
    machine_, correction_ : BoltzmannMachine, and Correction or None
        The linear machine, and its correction, which consists of two machines, if there is one.
    sample_axes_, n_factors_ : int
        What was chosen.
    errors_ : dict of str to float
        Root mean squared errors of the machines on hidden entries, in standard deviations, by what was tried.
    n_features_in_ : int
        Number of entries per sample along all axes but the first.

    Examples
    --------
    >>> import numpy as np
    >>> from mvrbm import MVRBMImputer
    >>> x = np.outer(np.arange(1.0, 9.0), [1.0, 2.0, 3.0])
    >>> x[2, 1] = np.nan
    >>> MVRBMImputer(random_state=0).fit_transform(x)[2].round()
    array([3., 6., 9.])
    """

    hidden: str = "auto"
    n_factors: int | None = None
    n_hidden: int | None = None
    sample_axes: int | str = "auto"
    categorical_features: Any = "from_dtype"
    n_epochs: int | None = None
    batch_size: int = 200
    learning_rate: float = 0.001
    keep_empty_features: bool = False
    random_state: Any = None
    device: str | torch.device = "auto"
    verbose: int = 0

    def fit(self, X: Any, y: Any = None) -> Self:
        r"""Learn from data with missing entries.

        Parameters
        ----------
        X : array of shape (n, \*sample shape), or data frame
            The data; NaN is missing.
        y : None
            Ignored, there for pipelines.
        """
        choice(self.hidden, "hidden", _HIDDEN)
        for name in ("n_factors", "n_hidden", "n_epochs"):
            if getattr(self, name) is not None:
                whole_number(getattr(self, name), name)
        whole_number(self.batch_size, "batch_size")
        number(self.learning_rate, "learning_rate", exclude_low=True)
        rng = RandomSource(seed_of(self.random_state))
        rows = self._read(X, reset=True)
        known = ~torch.isnan(rows)
        # Predictions stay within the range of the data: that of each column of tables, of all entries of arrays.
        axes = 0 if len(self._shape_in) == 1 else (0, 1)
        # A column without known values has no range: that from 1 to 0.
        some = known.any(axes)
        self._low = torch.where(some, torch.where(known, rows, math.inf).amin(axes), 1.0)
        self._high = torch.where(some, torch.where(known, rows, -math.inf).amax(axes), 0.0)
        x = torch.where(known, rows, 0.0)
        held = self._hide(known, rng)
        weights = _weights(x, known, each=len(self._shape_in) == 1)
        self.errors_: dict[str, float] = {}
        factors, self.sample_axes_, noise = self._choose_factors(x, known, held, weights)
        self.n_factors_ = factors.loadings.shape[1]
        self._center = factors.mean
        self._scale = torch.where(weights > 0, 1 / torch.sqrt(weights), 1.0).expand_as(self._center).clone()
        shape = self._shape_of_samples(self.sample_axes_)
        samples, seen, asked = (part.reshape(-1, math.prod(shape)) for part in (x, known, held))
        correction = None
        if self.hidden not in ("auto", "gaussian") or (self.hidden == "auto" and len(samples) >= _FEWEST_SAMPLES):
            noisier = factors.with_noise(noise)
            correction = self._learn_correction(noisier, samples, seen & ~asked, asked, weights, rng)
        self._adopt(_fit(samples, seen, self.n_factors_, factors).with_noise(noise).machine(shape), correction)
        self._calibration = self._calibrated(samples, seen & ~asked, asked)
        corrected = "no correction" if correction is None else "a correction"
        self._say(f"chosen: sample_axes={self.sample_axes_}, n_factors={self.n_factors_}, {corrected}")
        return self

    def transform(self, X: Any) -> Any:
        """Return data with every missing entry replaced by its mean given the known entries of its sample."""
        return self._filled(X, self._means)

    def draw(self, X: Any, n: int = 5) -> list[Any]:
        """Return `n` copies of data whose missing entries are drawn given the known ones, for multiple imputation."""
        check_is_fitted(self)
        whole_number(n, "n")
        rng = RandomSource(seed_of(self.random_state), device=self.machine_.like.device)

        def drawn(x: Tensor, known: Tensor) -> Tensor:
            center = self._factors.conditional_mean(x, known)
            return self._means(x, known) + self._calibration * (self._factors.draw(x, known, rng) - center)

        return [self._filled(X, drawn) for _ in range(n)]

    def standard_deviation(self, X: Any) -> Array:
        """Return the standard deviation of every missing entry given the known ones, 0 for known entries.

        Columns of categories have one column per category, and columns that :meth:`transform` leaves out are left out.
        """

        def deviation(x: Tensor, known: Tensor) -> Tensor:
            return self._calibration * self._factors.deviation(x, known)

        check_is_fitted(self)
        rows = self._read(X, reset=False)
        found = torch.where(torch.isnan(rows), self._of_each(rows, deviation), 0.0)
        return found.numpy().reshape(len(rows), *self._shape_out)

    def get_feature_names_out(self, input_features: Any = None) -> Array:
        """Return the names of the columns that :meth:`transform` returns."""
        check_is_fitted(self)
        names: Array = super().get_feature_names_out(input_features)
        return names[self._columns.kept]

    # -- data ------------------------------------------------------------------------------------------

    def _read(self, X: Any, *, reset: bool) -> Tensor:
        """Return data as rows of numbers with NaN, (n, entries)."""
        if reset:
            self._columns = Columns.of(X, self.categorical_features)
        elif self._columns.categories:
            validate_data(self, X, reset=False, skip_check_array=True)  # columns in another order
        X, shape = self._columns.to_numbers(X)
        checked = validate_data(self, X, reset=reset, dtype=[np.float64, np.float32], ensure_all_finite="allow-nan")
        if reset:
            self._shape_in = shape
            self._columns.learn(checked, self.keep_empty_features or len(shape) > 1)
            if bool(np.isnan(checked).all()):
                raise ValueError("every entry of the data is missing: there is nothing to learn from")
        elif shape != self._shape_in:
            raise ValueError(f"samples must have shape {self._shape_in}, got {shape}")
        return torch.tensor(self._columns.expand(checked))

    @property
    def _shape_out(self) -> tuple[int, ...]:
        """Shape of a sample as the machines have it, with one axis counting samples."""
        return self._shape_in if len(self._shape_in) > 1 else (sum(self._columns.widths),)

    @property
    def visible_shape_(self) -> tuple[int, ...]:
        """Shape of the data along all axes but the first."""
        return self._shape_in

    def _shape_of_samples(self, axes: int) -> tuple[int, ...]:
        """Return the shape of a sample if so many axes count samples."""
        return self._shape_out[axes - 1 :]

    def _filled(self, X: Any, fill: Callable[[Tensor, Tensor], Tensor]) -> Any:
        check_is_fitted(self)
        rows = self._read(X, reset=False)
        means = self._of_each(rows, fill)
        means = torch.where(self._low <= self._high, torch.clamp(means, self._low, self._high), means)
        return self._columns.restore(torch.where(torch.isnan(rows), means, rows).numpy(), X, self._shape_out)

    @torch.no_grad()
    def _of_each(self, rows: Tensor, compute: Callable[[Tensor, Tensor], Tensor]) -> Tensor:
        """Return what is computed from samples and the masks of their known entries, in the shape of rows."""
        samples = rows.reshape(-1, math.prod(self._shape_of_samples(self.sample_axes_))).to(self.machine_.like)
        size = max(1, _BATCH // max(samples.shape[1], self.n_factors_**2))
        pieces = []
        for some in samples.split(size):
            known = ~torch.isnan(some)
            pieces.append(compute(torch.where(known, some, 0.0), known).cpu())
        return torch.cat(pieces).reshape(rows.shape).to(rows.dtype)

    # -- learning --------------------------------------------------------------------------------------

    def _hide(self, known: Tensor, rng: RandomSource) -> Tensor:
        """Return which known entries to hide to compare machines: as they are missing in other rows, if they are."""
        n = len(known)
        chosen = torch.zeros(n, dtype=torch.bool)
        chosen[rng.permutation(n)[: min(max(n // 5, min(n // 2, _FEWEST_HELD), 1), _MOST_HELD)]] = True
        return known & chosen[:, None] & ~_masks(_patterns(known), rng.permutation(n), self._shape_out, rng)

    def _choose_factors(self, x: Tensor, known: Tensor, held: Tensor, weights: Tensor) -> tuple[Factors, int, float]:
        """Return factors of what is not held out, how many axes count samples, and the multiple of the noise."""
        order, choices = len(self._shape_in), [1]
        if self.sample_axes != "auto":
            choices = [whole_number(self.sample_axes, "sample_axes")]
            if choices[0] > order:
                raise ValueError(f"sample_axes must be at most {order} for such data, got {choices[0]}")
        elif order > 1 and len(x) < x.shape[1]:
            choices = list(range(order, 0, -1))  # the smallest samples, of which there are most, first
        best: tuple[float, Factors, int, float] | None = None
        for axes in choices:
            size = math.prod(self._shape_of_samples(axes))
            samples, seen, asked = (part.reshape(-1, size) for part in (x, known & ~held, held))
            rows = asked.any(1)
            found, errors = None, [math.inf, math.inf]
            for rank in self._ranks(*samples.shape, complete=bool(known.all())):
                found = _fit(samples, seen, rank, found)
                error, noise = _score(found, samples[rows], seen[rows], asked[rows], weights)
                self._note(f"sample_axes={axes}, n_factors={rank}", error)
                if best is None or error < _BETTER * best[0]:
                    best = error, found, axes, noise
                if error > _BETTER * errors[-2]:
                    break
                errors.append(error)
        assert best is not None
        return best[1:]

    def _ranks(self, n: int, size: int, *, complete: bool) -> list[int]:
        if self.n_factors is not None:
            return [self.n_factors]
        most = max(1, min(n - 1, size - 1, _MOST_FACTORS_COMPLETE if complete else _MOST_FACTORS))
        return [2**power for power in range(most.bit_length())]

    def _learn_correction(
        self, factors: Factors, x: Tensor, known: Tensor, held: Tensor, weights: Tensor, rng: RandomSource
    ) -> Correction | None:
        """Return a correction of the linear machine; None if it does not help."""
        n, size = x.shape
        unit = "rectified" if self.hidden == "auto" else self.hidden
        n_hidden = min(_MOST_HIDDEN, 3 * size) if self.n_hidden is None else self.n_hidden
        patterns, shape = _patterns(known | held), self._shape_of_samples(self.sample_axes_)
        rows_held = held.any(1)
        tested, shown_of_tested, asked_of_tested = x[rows_held], known[rows_held], held[rows_held]
        first = factors.conditional_mean(tested, shown_of_tested) if bool(rows_held.any()) else tested
        linear = _error(first, tested, asked_of_tested, weights)

        def learned(filled: str, n_epochs: int) -> tuple[float, Correction]:
            correction = Correction.new(size, unit, n_hidden, filled, rng, x)

            def loss(rows: Tensor) -> Tensor:
                some = x[rows]
                shown = known[rows] & _masks(patterns, rows.roll(1), shape, rng)
                asked = known[rows] & ~shown
                wrong = self._correct(correction, some, shown, factors.conditional_mean(some, shown)) - some
                return (wrong**2 * weights * asked).sum() / asked.sum().clamp(min=1) * len(rows)

            @torch.no_grad()
            def score() -> tuple[float, float]:
                better = self._correct(correction, tested, shown_of_tested, first)
                return _error(better, tested, asked_of_tested, weights), 0.0

            plan = DescentSettings(n_epochs, self.batch_size, self.learning_rate, 0.0, "cosine", 0.0, None)
            history = descend(correction, (), loss, torch.ones(n, dtype=x.dtype), plan, rng, score)
            error = min(row["validation_error"] for row in history)
            self._note(f"correction by {unit} units, {filled} output, {n_epochs} epochs", error)
            return error, correction

        n_batches = -(-n // min(self.batch_size, n))
        epochs = self.n_epochs or -(-min(max(n // 5, _FEWEST_UPDATES), _MOST_UPDATES) // n_batches)
        tried = {filled: learned(filled, min(epochs, -(-_TRIAL_UPDATES // n_batches)))[0] for filled in _FILLED}
        error, correction = learned(min(_FILLED, key=tried.__getitem__), epochs)
        return correction if error < linear or self.hidden != "auto" else None

    def _note(self, tried: str, error: float) -> None:
        self.errors_[tried] = error
        self._say(f"{tried}: hidden entries are wrong by {error:.4g} standard deviations")

    def _say(self, text: str) -> None:
        if self.verbose:
            print(text, file=sys.stderr, flush=True)

    @torch.no_grad()
    def _calibrated(self, x: Tensor, known: Tensor, held: Tensor) -> float:
        """Return the root mean squared error of hidden entries in standard deviations of the linear machine."""
        rows = held.any(1)
        if not bool(rows.any()):
            return 1.0
        x, known, held = (part[rows].to(self.machine_.like.device) for part in (x, known, held))
        wrong = (self._means(x, known) - x) / self._factors.deviation(x, known)
        return float(torch.sqrt((wrong[held] ** 2).mean()))

    # -- machines --------------------------------------------------------------------------------------

    def _adopt(self, machine: BoltzmannMachine, correction: Correction | None) -> None:
        device = resolve_device(self.device)
        self.machine_ = machine.to(device)
        self.correction_ = None if correction is None else correction.to(device)
        self._factors = Factors.of(self.machine_)
        self._center, self._scale = self._center.to(device), self._scale.to(device)

    def _means(self, x: Tensor, known: Tensor) -> Tensor:
        first = self._factors.conditional_mean(x, known)
        return first if self.correction_ is None else self._correct(self.correction_, x, known, first)

    def _correct(self, correction: Correction, x: Tensor, known: Tensor, first: Tensor) -> Tensor:
        value = (torch.where(known, x, first) - self._center) / self._scale
        start, width = self._center, self._scale
        if correction.bounded:
            start, end = self._low.to(x), self._high.to(x)
            width = torch.where(start < end, end - start, 1.0)
        found: Tensor = correction(value, known, (first - start) / width)
        return start + width * found

    def __sklearn_tags__(self) -> Any:
        """Tell scikit-learn that data may have NaN, and that float32 stays float32."""
        tags = super().__sklearn_tags__()
        tags.input_tags.allow_nan = True
        tags.transformer_tags.preserves_dtype = ["float64", "float32"]
        return tags

    # -- saving ----------------------------------------------------------------------------------------

    def _description(self) -> dict[str, Any]:
        fitted = {
            "columns": self._columns.describe(),
            "shape": list(self._shape_in),
            "sample_axes": self.sample_axes_,
            "errors": self.errors_,
            "calibration": self._calibration,
            "feature_names": saved_names(self),
        }
        return {**super()._description(), "fitted": fitted}

    def _write(self, folder: Path, extra: Mapping[str, Any]) -> None:
        machines = [self.machine_, *(() if self.correction_ is None else self.correction_.children())]
        tensors = dict(zip(_TENSORS, (self._low, self._high, self._center, self._scale), strict=True))
        write_machines(machines, folder, extra, tensors)

    @torch.no_grad()
    def _restore(self, folder: Path, described: Mapping[str, Any]) -> None:
        fitted = described["fitted"]
        self._shape_in = as_shape(fitted["shape"], "shape")
        self.n_features_in_ = math.prod(self._shape_in)
        self._columns = Columns.from_description(fitted["columns"], self._shape_in)
        self.sample_axes_ = whole_number(fitted["sample_axes"], "sample_axes", 1, len(self._shape_in))
        shape = self._shape_of_samples(self.sample_axes_)
        n_columns = self._shape_out if len(self._shape_in) == 1 else ()

        def shapes(machines: Sequence[BoltzmannMachine]) -> dict[str, tuple[int, ...]]:
            _check_machines(machines, shape)
            return dict(zip(_TENSORS, (n_columns, n_columns, (math.prod(shape),), (math.prod(shape),)), strict=True))

        (machine, *correction), tensors = read_machines(folder, shapes)
        self._low, self._high, self._center, self._scale = (tensors[name] for name in _TENSORS)
        self.errors_ = {str(name): float(error) for name, error in fitted["errors"].items()}
        self._calibration = number(fitted["calibration"], "calibration")
        restore_names(self, fitted["feature_names"])
        self.n_factors_ = math.prod(machine.hidden.shape)
        self._adopt(machine, Correction(*correction) if correction else None)
        known = torch.arange(math.prod(shape), device=self._scale.device) % 2 == 1
        some = self._factors.mean
        results = [self._means(some[None], known[None]), (some + 1 - self._center) / self._scale]
        if bool((self._scale <= 0).any()) or not all_finite(results):
            raise StorageError(f"{folder}: 'center' and 'scale' do not fit the correction: results are not finite")


# Names of the tensors that are saved with the machines.
_TENSORS = ("low", "high", "center", "scale")


def _check_machines(machines: Sequence[BoltzmannMachine], shape: tuple[int, ...]) -> None:
    """Raise StorageError unless machines are a linear one for samples of this shape, and a correction or nothing."""
    linear, *others = machines
    if [unit.gaussian for unit in (linear.hidden, *linear.layers.values())] != [True, True]:
        raise StorageError(f"an imputer needs a machine of two Gaussian layers, got {linear}")
    if linear.layers.keys() != {"visible"} or linear.layers["visible"].shape != shape:
        raise StorageError(f"an imputer of samples of shape {shape} cannot have the layers {linear.layers}")
    size = (math.prod(shape),)
    wanted = [{"value": size, "known": size}, {"below": others[0].hidden.shape, "filled": size}] if others else []
    if [{name: unit.shape for name, unit in one.layers.items()} for one in others] != wanted:
        raise StorageError(f"a correction of samples of shape {shape} cannot have the machines {others}")


def _patterns(known: Tensor) -> Tensor | None:
    """Return the known entries, as masks to show other rows with; None if all entries are known."""
    return None if bool(known.all()) else known


def _masks(known: Tensor | None, others: Tensor, shape: tuple[int, ...], rng: RandomSource) -> Tensor:
    """Return what to show of as many rows as there are `others`: the known entries of these, or else random masks.

    Of rows with missing entries, only entries that are known in both rows are shown, fewer than there are later. So, of
    every second row on average, a random share of the other entries is shown, too.
    """
    n, like = len(others), torch.empty(0)
    if known is not None:
        share = rng.uniform((n, 1), like) * (rng.uniform((n, 1), like) < 0.5)
        return known[others] | (rng.uniform((n, known.shape[1]), like) < share)
    masks = random_masks(-(-n // _SHARED_MASK), shape, rng, like).flatten(1)
    return masks.repeat_interleave(_SHARED_MASK, 0)[:n]


def _fit(x: Tensor, known: Tensor, rank: int, start: Factors | None) -> Factors:
    """Return factors fitted to data, to a part of it if there is much and entries are missing."""
    complete = known.all(1)
    # Few or no entries are missing but held ones.
    if len(x) > int(complete.sum()) >= min(_MOST_FITTED, _MOSTLY * len(x)):
        x, known = x[complete], known[complete]
    elif len(x) > _MOST_FITTED and not bool(complete.all()):
        rows = torch.linspace(0, len(x) - 1, _MOST_FITTED).long()
        x, known = x[rows], known[rows]
    return fit_factors(x, known, rank, _STEPS, start)


def _score(found: Factors, x: Tensor, known: Tensor, asked: Tensor, weights: Tensor) -> tuple[float, float]:
    """Return the smallest error of the entries that are asked for, and the multiple of the noise that has it."""
    if not len(x):
        return 0.0, 1.0
    means = (found.with_noise(multiple).conditional_mean(x, known) for multiple in _NOISES)
    return min((_error(mean, x, asked, weights), multiple) for mean, multiple in zip(means, _NOISES, strict=True))


def _weights(x: Tensor, known: Tensor, *, each: bool) -> Tensor:
    """Return weights of squared errors: the inverse variance of every entry, or of all if they have the same unit."""
    count = known.sum(0).clamp(min=1)
    mean = (x * known).sum(0) / count
    variance = ((x - mean) ** 2 * known).sum(0) / count
    if not each:
        variance = variance.mean()
    return torch.where(variance > 0, 1 / variance, 0.0)


def _error(found: Tensor, x: Tensor, asked: Tensor, weights: Tensor) -> float:
    """Return the root of the mean weighted squared error of the entries that are asked for."""
    return math.sqrt(float(((found - x) ** 2 * weights * asked).sum() / asked.sum().clamp(min=1)))
