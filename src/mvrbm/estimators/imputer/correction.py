"""Nonlinear correction to linear predictions, computed by two machines that are trained to predict masked entries.

The lower machine has the visible layers `value` (a sample with initial predictions for the unknown entries) and `known`
(a mask of the known entries). The upper machine has the visible layers `below` (the hidden layer of the lower machine)
and `filled`, whose means are the corrected predictions. Data passes from `value` and `known` up through both machines
and back down to `filled`. The machines are trained by backpropagating the squared error, as in the multi-prediction
training of Goodfellow et al., "Multi-prediction deep Boltzmann machines", NeurIPS (2013).
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor, nn

from mvrbm.couplings import Dense
from mvrbm.estimators.imputer.linear_model import Linear
from mvrbm.estimators.imputer.masking import Samples, masks_like_missing, missing_patterns
from mvrbm.estimators.imputer.scaling import Scaling
from mvrbm.estimators.imputer.selection import SURE, Report, squared_errors, surely_smaller
from mvrbm.machine import BoltzmannMachine
from mvrbm.random import RandomSource
from mvrbm.training.backprop import DescentSettings, Objective, descend
from mvrbm.units import Bernoulli, Gaussian, make_unit

# Standard deviation of the initial inputs to the hidden units from each layer below.
_FIELD_SPREAD = 0.5
# Standard deviation of the initial weights for the layer `filled`. It is small, so that corrections start near zero.
_INITIAL_CORRECTION = 0.003
# Minimum distance of bounded initial predictions from 0 and 1, where the logit is infinite.
_MARGIN = 0.01
#: Unit types for the layer `filled`: Gaussian for unbounded and Bernoulli for bounded predictions.
FILLED = ("gaussian", "bernoulli")
FILLED_UNBOUNDED = ("gaussian",)
# Number of standard errors by which an optional correction must reduce the errors of the samples that did not select
# the best epoch. Those of all samples must decrease by `SURE` standard errors.
_SURE_OF_HALF = 0.5
# Number of updates in a trial run. The unit type with the smaller error after the trial run is selected.
_TRIAL_UPDATES = 100
# If the number of epochs is not given, the number of updates is the number of samples times the first number, limited
# to the others. With many samples, it is at least a fifth of their number.
_UPDATES_PER_SAMPLE = 2
_FEWEST_UPDATES = 600
_ENOUGH_UPDATES = 3000
_MOST_UPDATES = 6000
# Number of masks per sample, and the maximum number of entries in all masked samples. Linear predictions for them are
# computed only once. If there are too many samples, masks are drawn for every update instead.
_MASKS = 64
_MOST_MASKED = 2**26


class Correction(nn.Module):
    """Nonlinear correction to initial predictions, computed by two machines.

    Parameters
    ----------
    lower : BoltzmannMachine
        Machine with the visible layers `value` and `known`.
    upper : BoltzmannMachine
        Machine with the visible layers `below` and `filled`.
    """

    def __init__(self, lower: BoltzmannMachine, upper: BoltzmannMachine) -> None:
        super().__init__()
        self.lower = lower
        self.upper = upper
        for unit in (*lower.layers.values(), upper.layers["below"]):
            unit.requires_grad_(False)

    @classmethod
    def new(cls, size: int, hidden: str, n_hidden: int, filled: str, rng: RandomSource, like: Tensor) -> Correction:
        """Create an untrained correction for samples of `size` standardized entries.

        An untrained correction leaves the predictions almost unchanged. `hidden` is the unit type of the hidden layers,
        and `filled` is the unit type of the layer `filled`.
        """
        below = {"value": Gaussian(size), "known": Bernoulli(size)}
        above = {"below": Gaussian(n_hidden), "filled": make_unit(filled, size)}
        lower, upper = (
            BoltzmannMachine(layers, make_unit(hidden, n_hidden), {name: Dense() for name in layers}).to(like)
            for layers in (below, above)
        )
        stds = [
            (lower.links["value"], _FIELD_SPREAD / math.sqrt(size)),
            (lower.links["known"], _FIELD_SPREAD / math.sqrt(size)),
            (upper.links["below"], 2 * _FIELD_SPREAD / math.sqrt(n_hidden)),
            (upper.links["filled"], _INITIAL_CORRECTION),
        ]
        with torch.no_grad():
            for link, std in stds:
                weight = link.get_parameter("weight")
                weight.copy_(std * rng.normal(weight.shape, weight))
        return cls(lower, upper)

    @property
    def bounded(self) -> bool:
        """Whether predictions are restricted to the range [0, 1]."""
        return self.upper.layers["filled"].data_range == (0, 1)

    def forward(self, value: Tensor, known: Tensor, first: Tensor) -> Tensor:
        """Return corrected predictions of shape (n, D) for all entries, on the scale of the layer `filled`.

        `value` contains standardized samples, in which initial predictions replace the unknown entries. `known` is a
        mask of the known entries, and `first` contains the initial predictions on the scale of the layer `filled`.
        """
        links = self.lower.links
        field = links["value"].to_hidden(value) + links["known"].to_hidden(known.to(value.dtype))
        field = self.upper.links["below"].to_hidden(self.lower.hidden.activation(field))
        field = self.upper.links["filled"].to_visible(self.upper.hidden.activation(field))
        first_field = torch.logit(first, _MARGIN) if self.bounded else first
        return self.upper.layers["filled"].mean(field + first_field)

    def correct(self, x: Tensor, known: Tensor, first: Tensor, scaling: Scaling) -> Tensor:
        """Return corrected predictions of shape (n, D) for all entries, on the scale of the data.

        `x` contains the samples, `known` is a mask of the known entries, and `first` contains the initial predictions.
        """
        center = scaling.center.to(x)
        scale = scaling.scale.to(x)
        value = (torch.where(known, x, first) - center) / scale
        start = center
        width = scale
        if self.bounded:
            start, end = (part.to(x) for part in scaling.own_range())
            width = torch.where(start < end, end - start, 1.0)
        found: Tensor = self(value, known, (first - start) / width)
        return start + width * found


@dataclass(frozen=True)
class CorrectionTrainer:
    """Trainer for corrections to a linear model.

    The trainer masks known entries at random and trains corrections to predict them.

    Parameters
    ----------
    linear : Linear
        The linear model.
    scaling : Scaling
        Range, location and scale of the entries.
    samples : Samples
        Training data. Held-out entries are used to measure the error.
    shape : tuple of int
        Shape of a sample.
    weights : Tensor
        Weights of the squared errors, either a scalar or one weight per entry.
    hidden : str
        Type of the hidden units.
    n_hidden : int
        Number of hidden units in each of the two machines.
    n_epochs : int, optional
        Number of epochs. Default: enough epochs for 600 to 6,000 updates, depending on the number of samples.
    batch_size : int
        Number of samples per update.
    learning_rate : float
        Initial learning rate.
    rng : RandomSource
        Random source for the initial parameters, the masks and the order of the samples.
    report : callable
        Function that is called after each training run with a description and the error on held-out entries.
    filled : sequence of str
        Unit types to try for the layer `filled`.
    optional : bool
        Whether to train a correction only if it reduces the error on held-out entries.
    note_time : callable
        Function that is called before the long training run with its estimated time in seconds.
    note_rejection : callable
        Function that is called with the reason if an optional correction is rejected.
    """

    linear: Linear
    scaling: Scaling
    samples: Samples
    shape: tuple[int, ...]
    weights: Tensor
    hidden: str
    n_hidden: int
    n_epochs: int | None
    batch_size: int
    learning_rate: float
    rng: RandomSource
    report: Report
    filled: Sequence[str] = FILLED
    optional: bool = False
    note_time: Callable[[float], None] = lambda seconds: None
    note_rejection: Callable[[str], None] = lambda reason: None

    def train(self) -> Correction | None:
        """Train a correction. If it is optional and does not reduce the error on held-out entries, return None.

        Short trial runs determine the unit type for the layer `filled`. If they do not reduce the error, an optional
        correction is not trained any further.
        """
        n = len(self.samples.x)
        n_batches = -(-n // min(self.batch_size, n))
        enough = min(max(_UPDATES_PER_SAMPLE * n, _FEWEST_UPDATES), _ENOUGH_UPDATES)
        updates = min(max(n // 5, enough), _MOST_UPDATES)
        n_epochs = self.n_epochs or -(-updates // n_batches)
        trial_epochs = min(n_epochs, -(-_TRIAL_UPDATES // n_batches))
        chosen = self.filled[0]
        if len(self.filled) > 1 or self.optional:
            began = time.perf_counter()
            trials = {filled: self._train_one(filled, trial_epochs) for filled in self.filled}
            chosen = min(self.filled, key=lambda filled: trials[filled][0])
            if self.optional and not self._reduces_error(trials[chosen][1], self._tested):
                self.note_rejection("a short trial did not reduce the error by more than chance")
                return None
            self.note_time(n_epochs * (time.perf_counter() - began) / (trial_epochs * len(self.filled)))
        _, correction = self._train_one(chosen, n_epochs)
        if self.optional and not self._reduces_error(correction, self._tested, both=True):
            self.note_rejection("it does not reduce the error by more than chance")
            return None
        if self.optional and not self._reduces_error(correction, self._accepting, both=True, sure=_SURE_OF_HALF):
            self.note_rejection("it reduces the error only on the samples that selected the best epoch")
            return None
        return correction

    @torch.no_grad()
    def _reduces_error(
        self, correction: Correction, held: tuple[Samples, Tensor], *, both: bool = False, sure: float = SURE
    ) -> bool:
        """Return whether the correction reduces the errors on held-out entries by more than chance."""
        tested, first = held
        corrected = correction.correct(tested.x, tested.shown, first, self.scaling)
        errors, linear = (squared_errors(each, tested, self.weights).sum(1) for each in (corrected, first))
        return surely_smaller(errors, linear, both=both, sure=sure)

    @cached_property
    def _tested(self) -> tuple[Samples, Tensor]:
        """Samples with held-out entries, and the linear model's predictions."""
        tested = self.samples.with_held_entries()
        return tested, self.linear.conditional_mean(tested.x, tested.shown) if len(tested.x) else tested.x

    @property
    def _scoring(self) -> tuple[Samples, Tensor]:
        """Every second sample with held-out entries, on which the best epoch is selected."""
        tested, first = self._tested
        return tested.every_second(0), first[::2]

    @property
    def _accepting(self) -> tuple[Samples, Tensor]:
        """The other samples with held-out entries, which did not select the best epoch."""
        tested, first = self._tested
        return tested.every_second(1), first[1::2]

    def _train_one(self, filled: str, n_epochs: int) -> tuple[float, Correction]:
        x = self.samples.x
        correction = Correction.new(x.shape[1], self.hidden, self.n_hidden, filled, self.rng, x)
        plan = DescentSettings(
            n_epochs=n_epochs,
            batch_size=self.batch_size,
            learning_rate=self.learning_rate,
            weight_decay=0.0,
            schedule="cosine",
            averaging=0.0,
            patience=None,
        )
        objective = Objective(self._loss(correction), torch.ones(len(x), dtype=x.dtype))
        found = descend(correction, objective, plan, self.rng, self._score(correction))
        found.raise_if_interrupted()
        error = min(row["validation_error"] for row in found.history)
        self.report(f"correction by {self.hidden} units, {filled} output, {n_epochs} epochs", error)
        return error, correction

    def _loss(self, correction: Correction) -> Callable[[Tensor], Tensor]:
        """Return a function that computes the squared error on randomly masked entries of the given samples."""

        def loss(rows: Tensor) -> Tensor:
            x = self.samples.x[rows]
            if self._masked is None:
                shown, first = self._mask(rows)
            else:
                which = torch.floor(_MASKS * self.rng.uniform((len(rows),), x)).long()
                shown, first = (part[which, rows] for part in self._masked)
            hidden = self.samples.shown[rows] & ~shown
            errors = correction.correct(x, shown, first, self.scaling) - x
            return (errors**2 * self.weights * hidden).sum() / hidden.sum().clamp(min=1) * len(rows)

        return loss

    def _mask(self, rows: Tensor) -> tuple[Tensor, Tensor]:
        """Return random masks of the entries to show of the given samples, and the linear predictions."""
        patterns = missing_patterns(self.samples.known)
        shown = self.samples.shown[rows] & masks_like_missing(patterns, rows.roll(1), self.shape, self.rng)
        return shown, self.linear.conditional_mean(self.samples.x[rows], shown)

    @cached_property
    def _masked(self) -> tuple[Tensor, Tensor] | None:
        """Masks and linear predictions of shape (number of masks, n, D), or None if there are too many samples."""
        n = len(self.samples.x)
        if _MASKS * self.samples.x.numel() > _MOST_MASKED:
            return None
        shown = self.samples.shown.new_empty(_MASKS, *self.samples.x.shape)
        first = self.samples.x.new_empty(shown.shape)
        for own_shown, own_first in zip(shown, first, strict=True):
            order = self.rng.permutation(n)
            own_shown[order], own_first[order] = self._mask(order)
        return shown, first

    def _score(self, correction: Correction) -> Callable[[], tuple[float, float]]:
        """Return a function that computes the error on held-out entries, for use as the score in `descend`."""
        tested, first = self._scoring

        @torch.no_grad()
        def score() -> tuple[float, float]:
            corrected = correction.correct(tested.x, tested.shown, first, self.scaling)
            squares = squared_errors(corrected, tested, self.weights)
            return math.sqrt(float(squares.sum() / tested.held.sum().clamp(min=1))), 0.0

        return score
