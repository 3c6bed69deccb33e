"""Base class for CPU backends that store parameters in a flat vector. Subclasses compute the gradient."""

from abc import abstractmethod
from collections.abc import Iterator, Mapping
from typing import NoReturn

import torch
from torch import Tensor

from mvrbm import compiled
from mvrbm.backends.base import UpdateBackend, UpdateSettings
from mvrbm.backends.cpu.flat_arrays import FlatArrays
from mvrbm.backends.cpu.flat_centering import FlatCentering
from mvrbm.backends.cpu.flat_step import FlatStep, StepResult
from mvrbm.backends.cpu.flat_variances import FlatVariances
from mvrbm.backends.cpu.mode_products import ModeFields
from mvrbm.backends.layout import not_flat_reason
from mvrbm.data.sources import Batch
from mvrbm.random import RandomSource
from mvrbm.sampling import Layers
from mvrbm.updates.gradient import WHOLE, Share
from mvrbm.updates.missing_entries import draw_missing
from mvrbm.updates.negative import PCD
from mvrbm.updates.state import TrainState
from mvrbm.updates.step import fail, first_not_finite


class FlatCpuBackend(UpdateBackend):
    """Base class for CPU backends that store parameters in a flat vector."""

    def __init__(self, settings: UpdateSettings, state: TrainState) -> None:
        like = state.machine.like
        super().__init__(settings)
        self.arrays = FlatArrays(state, normalized=settings.recipe.normalized)
        self.layout = self.arrays.layout
        code = compiled.library() if like.dtype == torch.float32 else None  # supports float32 only
        self._step = FlatStep(self.arrays, settings.recipe, code)
        learns_variances = any(layer.learns_variance for layer in self.layout.layers)
        self._variances = FlatVariances(self.arrays) if learns_variances else None
        centered = state.centering is not None and state.centering.follow_hidden
        self._centering = FlatCentering(self.arrays) if centered else None
        self._data_mean = like.new_zeros(self.layout.hidden_shape)  # written by `_contrast`
        self._persistent = settings.negative if isinstance(settings.negative, PCD) else None
        self._n_chains = 0 if self._persistent is None else self._persistent.n_chains
        self._gibbs_steps = int(settings.negative.steps)
        self._chains_started = False

    def _update(self, state: TrainState, batch: Layers, weight: float, share: Share) -> None:
        self._contrast(batch, state.chain_numbers(share), weight * share.data, weight * share.chains)
        centering = self._centering
        if centering is not None and state.centering is not None:
            centering.offset = state.centering.advance(self._data_mean[None] / weight)
        variances = self._variances
        powers = {} if variances is None else variances.powers(batch, share.data)
        sums = [] if variances is None else variances.separate_sums
        self.settings.sum_over_processes([self.arrays.gradient, *sums, *powers.values()])
        if variances is not None:
            variances.finish_gradients()
        if centering is not None:
            centering.apply()
        result = self._step.make(state.update, powers)
        if result != StepResult.FINITE:
            self._fail(result, state)
        if variances is not None:
            variances.rescale(None if self._persistent is None else self._chain_states())
            self._step.update_scales()
        if centering is not None:
            centering.follow()
        state.update += 1

    @abstractmethod
    def _contrast(self, batch: Mapping[str, Tensor], rng: RandomSource, of_data: float, of_chain: float) -> None:
        """Advance the chains and compute the gradient of `of_data` * mean F(data) - `of_chain` * mean F(chain).

        Here, F is the free energy.

        Instead of the gradients for log-variances, this method writes the sums described in
        :meth:`FlatVariances.finish_gradients`. It also computes the mean hidden state for the data, multiplies it by
        `of_data`, and writes the result to `_data_mean`.
        """

    @abstractmethod
    def _chain_states(self) -> list[Tensor]:
        """Return the persistent chain states of each layer as a view of shape (n, *layer shape)."""

    def _fail(self, result: StepResult, state: TrainState) -> NoReturn:
        """Restore the previous parameters, reset the rest of the state, and raise DivergenceError."""
        arrays = self.arrays
        if result == StepResult.GRADIENT_NOT_FINITE:
            culprit = first_not_finite(state, arrays.packing.named(arrays.gradient))
        else:
            arrays.store(state)
            culprit = first_not_finite(state)
            arrays.params.copy_(arrays.gradient)  # the step saved the previous parameters here
        arrays.store(state)
        state.reset_after_divergence()
        self._chains_started = False
        self.load(state)
        fail(self.settings.recipe, state.update + 1, culprit)

    def draw_missing(self, state: TrainState, batch: Batch, steps: int, share: Share = WHOLE) -> Layers:
        self.arrays.store(state)
        fields = ModeFields(state.machine, self.layout, len(batch))
        return draw_missing(state.machine, batch, state.missing_numbers(share), steps, fields)

    # -- storing and loading --------------------------------------------------------------------------

    def store(self, state: TrainState) -> TrainState:
        self.arrays.store(state)
        if self._persistent is not None and self._chains_started:
            state.chains |= {name: _copy(chains) for name, chains in self._chains()}
        return state

    def exact(self) -> dict[str, Tensor]:
        return {name: _copy(part) for name, part in self._exact_views(self._chains_started).items()}

    def load(self, state: TrainState) -> None:
        if not self._load_exact(state):
            self.arrays.load(state)
            if self._persistent is not None and state.chains:
                self._set_chains(state.chains)
        if self._variances is not None:
            self._step.update_scales()

    def _load_exact(self, state: TrainState) -> bool:
        """Load a state's exact arrays if they match its rounded values, and return whether they were loaded."""
        views = self._exact_views(bool(state.chains))
        shapes = {name: part.shape for name, part in views.items()}
        if {name: part.shape for name, part in state.exact.items()} != shapes:
            return False
        for name, part in views.items():
            part.copy_(state.exact[name])
        self.arrays.packing.set_inverse_scales({})  # recompute the shifts
        if not self.arrays.match(state):
            return False
        if self._persistent is not None and state.chains:
            self._chains_started = True
            return all(torch.equal(state.chains[name], chains) for name, chains in self._chains())
        return True

    def _exact_views(self, with_chains: bool) -> dict[str, Tensor]:
        """Return views of all arrays that `store` rounds, as a dictionary keyed by name."""
        arrays = self.arrays
        views = {"params": arrays.params, "momenta": arrays.momenta, "scale": arrays.packing.affine[0]}
        if self._persistent is not None and with_chains:
            names = [f"chains.{layer.name}" for layer in self.layout.layers]
            views |= dict(zip(names, self._chain_states(), strict=True))
        return views

    def _chains(self) -> Iterator[tuple[str, Tensor]]:
        """Yield each layer's name and its persistent chains in data units, as a tensor of shape (n, *layer shape)."""
        for layer, states in zip(self.arrays.layers, self._chain_states(), strict=True):
            yield layer.layout.name, layer.data_of(states)

    def _set_chains(self, chains: Mapping[str, Tensor]) -> None:
        """Set the persistent chains from one tensor of shape (n, *layer shape) per layer, in data units."""
        for layer, states in zip(self.arrays.layers, self._chain_states(), strict=True):
            layer.write_states(chains[layer.layout.name], states)
        self._chains_started = True


def unsupported_reason(settings: UpdateSettings, state: TrainState) -> str | None:
    """Return the reason why no CPU backend with flat parameters supports a training run, or None if one does."""
    device = state.machine.like.device
    if device.type != "cpu":
        return f"the machine is on {device}"
    return not_flat_reason(settings, state, shared_variances=True)


def _copy(tensor: Tensor) -> Tensor:
    return tensor.clone(memory_format=torch.contiguous_format)
