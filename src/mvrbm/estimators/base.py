"""Base class for estimators trained by contrastive divergence.

The base class manages the fitted machines, data batches and model files. Mixins in separate modules define the public
methods: :mod:`~mvrbm.estimators.features` (`transform` and related methods), :mod:`~mvrbm.estimators.generation`
(`sample`, `inpaint`) and :mod:`~mvrbm.estimators.scoring` (`score_samples` and related methods).
:mod:`mvrbm.estimators.array_rbm` adds `fit` and `partial_fit`.
"""

from abc import abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import torch
from sklearn.utils.validation import check_is_fitted
from torch import Tensor

from mvrbm.devices import resolve_device, sensible_threads
from mvrbm.estimators.batches import ROWS_AT_ONCE, Array, Known, batches, filled_batches, has_nan, n_samples
from mvrbm.estimators.initial_states import Chains, kept_chains, read_chains, write_chains
from mvrbm.estimators.parameters import TrainingParameters, seed_of, unsuited_reason
from mvrbm.estimators.persistence import SavedEstimator
from mvrbm.machine import BoltzmannMachine
from mvrbm.progress import report
from mvrbm.random import RandomSource
from mvrbm.sampling import Layers, conditional_mean
from mvrbm.saving import machine_structure, read_machine, write_machine
from mvrbm.training.trainer import Trainer
from mvrbm.units import Unit

# Number of Gibbs steps to average over when methods other than `inpaint` fill in missing entries (NaN).
_FILL_STEPS = 100
# Number of Gibbs steps to discard before averaging.
_FILL_BURN_IN = 50


class BaseRBM(TrainingParameters, SavedEstimator):
    """Base class for estimators trained by contrastive divergence.

    Subclasses define the visible layers by overriding four hooks: `_read_layers`, `_new_units`, `_masks_by_layer` and
    `_to_user`.
    """

    #: Whether `fit` accepts data with unknown entries.
    learns_from_incomplete: ClassVar[bool] = True

    machines_: list[BoltzmannMachine]  # a single machine, except for stacks
    trainers_: list[Trainer] | None  # None if the model was loaded from a folder
    history_: list[dict[str, float]]
    n_epochs_: int
    n_updates_: int
    interrupted_: bool
    _saved_chains: Chains  # persistent chains of a loaded model

    # -- hooks ------------------------------------------------------------------------------------

    @abstractmethod
    def _read_layers(self, X: Any, *, reset: bool) -> dict[str, Any]:
        """Validate the shapes and dtypes of the data and return one array of shape (n, *layer shape) per layer.

        If `reset` is True, the shapes are learned from the data. Otherwise, the data must have the learned shapes.
        """

    @abstractmethod
    def _new_units(self, layers: Mapping[str, Any]) -> dict[str, Unit]:
        """Create visible units with the model's dtype and return them in a dict keyed by layer name."""

    @abstractmethod
    def _masks_by_layer(self, mask: Any) -> Mapping[str, Any]:
        """Convert the user's masks to a mapping from layer names to masks, without validating them."""

    @abstractmethod
    def _to_user(self, layers: Mapping[str, Tensor], like: Any = None) -> Any:
        """Convert layers to arrays in the format of the training data, or in the format of `like` if given."""

    def _fill_in(self, batch: Layers, known: Layers, rng: RandomSource, steps: int, burn_in: int) -> dict[str, Tensor]:
        """Return a copy of a batch in which unknown entries are replaced with their means given the known entries."""
        # Without known entries, chains that clamp nothing give the means of the model.
        mask = known if any(bool(part.any()) for part in known.values()) else None
        return conditional_mean(self.machine_, batch, mask, rng, steps=steps, burn_in=burn_in, check=False)

    # -- fitted machines --------------------------------------------------------------------------

    @property
    def machine_(self) -> BoltzmannMachine:
        """The fitted machine. For stacks, this is the lowest machine."""
        return self._machines[0]

    @property
    def trainer_(self) -> Trainer | None:
        """The trainer of :attr:`machine_`, or None if the model was loaded from a folder."""
        return None if self.trainers_ is None else self.trainers_[0]

    @property
    def n_parameters_(self) -> int:
        """Number of learned parameters."""
        return sum(machine.n_parameters for machine in self._machines)

    @property
    def chains_(self) -> Chains:
        """Up to 100 persistent chains from training, keyed by layer name. `sample` starts from these chains.

        The dict is empty if the model has no persistent chains.
        """
        check_is_fitted(self)
        return self._saved_chains if self.trainers_ is None else kept_chains(self.trainers_[-1])

    @property
    def _machines(self) -> list[BoltzmannMachine]:
        """The fitted machines. Raises NotFittedError if the model is not fitted."""
        check_is_fitted(self)
        return self.machines_

    def _set_machines(self, machines: Sequence[BoltzmannMachine]) -> None:
        """Replace the machines of the model and reset its training state."""
        self.machines_ = [machine.to(resolve_device(self.device)) for machine in machines]
        self.trainers_ = None
        self.history_ = []
        self.interrupted_ = False
        self.n_epochs_ = 0
        self.n_updates_ = 0
        self._saved_chains = {}

    def _rng(self) -> RandomSource:
        return RandomSource(seed_of(self.random_state))

    def _warn_of_recipe(self) -> None:
        """Issue a warning, at most once, if the model was trained with a recipe that leads to poor samples."""
        if self.n_updates_:  # a model without updates was not trained with this recipe
            self._warn_once(unsuited_reason(self.recipe, self._recipe()))

    # -- data, batch by batch ---------------------------------------------------------------------

    def _batches(self, X: Any) -> Iterator[dict[str, Tensor]]:
        """Validate the data and yield it in batches, with missing entries filled in."""
        return self._filled_batches(self._read_layers(X, reset=False))

    def _filled_batches(
        self,
        layers: Mapping[str, Any],
        known: Known | None = None,
        steps: int = _FILL_STEPS,
        burn_in: int = _FILL_BURN_IN,
    ) -> Iterator[dict[str, Tensor]]:
        """Yield batches in which unknown entries, including NaN, are replaced with their conditional means."""
        if known is None and not self.learns_from_incomplete:
            name = type(self).__name__
            return self._complete_batches(layers, f"{name} requires complete samples; fill in X first, with inpaint")
        rng = self._rng()

        def fill(batch: dict[str, Tensor], masks: dict[str, Tensor]) -> dict[str, Tensor]:
            with sensible_threads(self._machines[0], n_samples(batch)):
                return self._fill_in(batch, masks, rng, steps, burn_in)

        return filled_batches(layers, self.machine_.layers, known, fill)

    def _complete_batches(self, layers: Mapping[str, Any], reason: str) -> Iterator[dict[str, Tensor]]:
        """Yield the data in batches. Raise ValueError if it contains NaN. `reason` completes the error message."""
        for first in range(0, n_samples(layers), ROWS_AT_ONCE):
            part = {name: array[first : first + ROWS_AT_ONCE] for name, array in layers.items()}
            if any(map(has_nan, part.values())):
                raise ValueError(f"X contains NaN, but {reason}")
            yield from batches(part, self.machine_.layers)
            report("samples", n_samples(part))

    @torch.no_grad()
    def _map_batches(
        self, X: Any, compute: Callable[[dict[str, Tensor]], Tensor], *, complete: str | None = None
    ) -> Array:
        """Validate the data, apply a function to each batch, and return the concatenated results.

        Missing entries are filled in. If `complete` is the name of a method, they raise ValueError instead, because
        that method has no closed form for incomplete samples.
        """
        layers = self._read_layers(X, reset=False)
        results = np.empty(0)
        first = 0
        parts = self._filled_batches(layers)
        if complete is not None:
            parts = self._complete_batches(layers, no_closed_form(complete))
        for batch in parts:
            result = to_array(compute(batch))
            check_finite(result, first)
            if first == 0:  # the first batch determines shape and dtype
                results = np.empty((n_samples(layers), *result.shape[1:]), dtype=result.dtype)
            results[first : first + len(result)] = result
            first += len(result)
        return results

    # -- files ------------------------------------------------------------------------------------

    def _write(self, folder: Path, extra: Mapping[str, Any]) -> None:
        self._write_machines(folder, extra)
        write_chains(self.chains_, folder)

    def _write_machines(self, folder: Path, extra: Mapping[str, Any]) -> None:
        write_machine(self.machine_, folder, extra)

    def _read_machines(self, folder: Path) -> list[BoltzmannMachine]:
        return [read_machine(folder)]

    def _description(self) -> dict[str, Any]:
        return {**super()._description(), "n_epochs": self.n_epochs_, "n_updates": self.n_updates_}

    def _restore(self, folder: Path, described: Mapping[str, Any]) -> None:
        self._set_machines(self._read_machines(folder))
        self._saved_chains = read_chains(folder, self.machines_[-1])
        self.n_epochs_ = int(described.get("n_epochs", 0))
        self.n_updates_ = int(described.get("n_updates", 0))


def no_closed_form(method: str) -> str:
    """Return the reason why a method requires complete samples."""
    return f"{method} requires complete samples, because the sum over unknown entries has no closed form"


def check_same(machines: Sequence[BoltzmannMachine], others: Sequence[BoltzmannMachine], message: str) -> None:
    """Raise ValueError with the given message unless the machines are equal up to parameter values and dtype."""
    configs = [{**machine_structure(machine), "dtype": None} for machine in machines]
    other_configs = [{**machine_structure(machine), "dtype": None} for machine in others]
    if configs != other_configs:
        raise ValueError(message)


def check_finite(results: Array, first: int = 0) -> None:
    """Raise ValueError if any result is not finite.

    The message names the sample. `first` is the index of the first sample in `results`.
    """
    finite = np.isfinite(results).reshape(len(results), -1).all(1)
    if not finite.all():
        raise ValueError(
            f"the result for sample {first + int(np.argmin(finite))} is not finite because its values are too far "
            "from the training data; rescale the sample or pass float64 data to fit"
        )


def to_array(tensor: Tensor) -> Array:
    """Convert a tensor to a NumPy array."""
    return tensor.detach().cpu().numpy()


def as_rows(array: Array) -> Array:
    """Flatten all axes except the first and return an array of shape (n, n_features)."""
    return array.reshape(len(array), -1)
