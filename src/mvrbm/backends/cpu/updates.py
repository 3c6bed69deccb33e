"""What the CPU paths on flat parameters share: chains, random numbers and the step. They differ in the gradient."""

import math
from abc import abstractmethod
from collections.abc import Iterator, Mapping
from types import ModuleType
from typing import NoReturn

import torch
from torch import Tensor

from mvrbm import compiled
from mvrbm.backends.base import UpdateBackend, UpdateSettings
from mvrbm.backends.cpu.modes import ModeFields, ModeProducts
from mvrbm.backends.cpu.products import compute
from mvrbm.backends.layout import LayerLayout, Layout, Packing, factor_gains
from mvrbm.data.sources import Batch
from mvrbm.devices import one_thread
from mvrbm.sampling import Layers
from mvrbm.updates.gradient import WHOLE, Share
from mvrbm.updates.missing import draw_missing
from mvrbm.updates.negative import PCD
from mvrbm.updates.state import TrainState
from mvrbm.updates.step import Move, fail, first_not_finite, learning_rates, normalize, safe_gain, step
from mvrbm.validation import all_finite

_INTERFACE = 6  # version of the compiled code that the paths require


def compiled_code() -> ModuleType | None:
    """Return the compiled code, None where there is none of this version."""
    code = compiled.library()
    return None if code is None or code.INTERFACE != _INTERFACE else code


def _copy(tensor: Tensor) -> Tensor:
    return tensor.clone(memory_format=torch.contiguous_format)


class FlatBackend(UpdateBackend):
    """Computes updates on flat parameters."""

    def __init__(self, task: UpdateSettings, state: TrainState) -> None:
        self.task, self.plan, self._rng = task, Layout.of(state.machine), state.chain_numbers()
        self._packing = Packing(state, self.plan, normalized=task.recipe.normalized)
        self._persistent = task.negative if isinstance(task.negative, PCD) else None
        self._steps, self._n_chains = int(task.negative.steps), int(getattr(task.negative, "n_chains", 0))
        self._chains_started = False
        like = state.machine.like
        self._params, self._momenta, self._gradient = (like.new_zeros(self.plan.size) for _ in range(3))
        self._split_params, self._split_gradient = self.plan.split(self._params), self.plan.split(self._gradient)
        self._factors = [list(factors) for *factors, _ in self._split_params[0]]  # of each layer
        self._factor_moves, self._factor_gradients = (
            list(zip(self.plan.factors(self._params), self.plan.factors(other), strict=True))
            for other in (self._momenta, self._gradient)
        )
        # Parameters with one rate, one after another: their number, and whether they are factors.
        counts = [*((sum(map(math.prod, p.factors)), p.size) for p in self.plan.layers), (0, self.plan.hidden_area)]
        self._runs = [run for own, size in counts for run in ((own, True), (size - own, False))]
        self._addresses = [flat.data_ptr() for flat in (self._params, self._momenta, self._gradient)]
        self._code = compiled_code() if like.dtype == torch.float32 and like.device.type == "cpu" else None
        self._multiplier = self._packing.multiplier
        self._even = bool((self._multiplier == 1).all()) and not self._variances
        self._powers = like.new_ones(len(self.plan.layers))  # of layers that learn their variances
        self._data_mean = like.new_zeros(self.plan.hidden_shape)  # of the hidden layer, over the last batch
        # What turns data into states, (area,) each: a factor and an offset to subtract; None for nothing.
        pairs = [[p.states_of(array) for array in self._packing.affine] for p in self.plan.layers]
        self._affine = [
            pair if p.gaussian or bool(pair[1].any()) else None for p, pair in zip(self.plan.layers, pairs, strict=True)
        ]
        self._single = [ModeProducts(p.factors, 1, like) for p in self.plan.layers]  # products with one sample

    @property
    def _variances(self) -> list[int]:
        """The numbers of the layers that learn their variances."""
        return [m for m, p in enumerate(self.plan.layers) if p.learns_variance]

    def load(self, state: TrainState) -> None:
        if not self._load_exact(state):
            self._packing.pack(state, self._params, self._momenta)
            if self._persistent and state.chains:
                self._set_chains(state.chains)
        if self._variances:
            self._multiplier.copy_(self._packing.multiplier)

    def draw_missing(self, state: TrainState, batch: Batch, steps: int, share: Share = WHOLE) -> Layers:
        machine = state.machine
        self._packing.unpack(state, self._params, self._momenta)
        return draw_missing(
            machine, batch, state.missing_numbers(share), steps, ModeFields(machine, self.plan, len(batch))
        )

    def store(self, state: TrainState) -> TrainState:
        self._packing.unpack(state, self._params, self._momenta)
        if self._persistent and self._chains_started:
            state.chains |= {name: _copy(chain) for name, chain in self._chains()}
        return state

    def exact(self) -> dict[str, Tensor]:
        return {name: _copy(part) for name, part in self._own(self._chains_started).items()}

    def _chains(self) -> Iterator[tuple[str, Tensor]]:
        """Yield the persistent chains of every layer, (n, *layer shape), in the units of the data."""
        for p, states, pair in zip(self.plan.layers, self._chain_states(), self._affine, strict=True):
            yield p.name, states if pair is None else (states + pair[1].view(p.shape)) / pair[0].view(p.shape)

    def _own(self, with_chains: bool) -> dict[str, Tensor]:
        """Return everything that may be rounded when it is written to a state, by name."""
        own = {"params": self._params, "momenta": self._momenta, "scale": self._packing.affine[0]}
        if self._persistent and with_chains:
            own |= {f"chains.{p.name}": part for p, part in zip(self.plan.layers, self._chain_states(), strict=True)}
        return own

    def _load_exact(self, state: TrainState) -> bool:
        """Continue from the exact form of the state, and return True; False if it has none, or has changed since."""
        own = self._own(bool(state.chains))
        if {name: part.shape for name, part in state.exact.items()} != {name: part.shape for name, part in own.items()}:
            return False
        for name, part in own.items():
            part.copy_(state.exact[name])
        self._packing.measure({})
        if not self._packing.is_of(state, self._params, self._momenta):
            return False
        if self._persistent and state.chains:
            self._chains_started = True
            return all(torch.equal(state.chains[name], chain) for name, chain in self._chains())
        return True

    @abstractmethod
    def _chain_states(self) -> list[Tensor]:
        """Return views of the persistent chains of every layer, (n, *layer shape) each."""

    def _set_chains(self, chains: Mapping[str, Tensor]) -> None:
        """Continue from chains of every layer, (n, *layer shape), in the units of the data."""
        for p, states, pair in zip(self.plan.layers, self._chain_states(), self._affine, strict=True):
            data = chains[p.name]
            states.copy_(data if pair is None else data * pair[0].view(p.shape) - pair[1].view(p.shape))
        self._chains_started = True

    @torch.no_grad()
    def update(self, state: TrainState, batch: Layers, weight: float, share: Share) -> TrainState:
        self._rng = state.chain_numbers(share)
        if self._persistent and not self._chains_started:  # the machine is still as it was loaded
            self._set_chains(self._persistent.start(state.machine, batch, state.start_numbers(share)))
        self._contrast(batch, weight * share.data, weight * share.chains)
        offset = None  # of the hidden layer
        if state.centering is not None and state.centering.follow_hidden:
            offset = state.centering.advance(self._data_mean.view(1, *self.plan.hidden_shape) / weight)
        self._reduce(self._own_powers(batch, share.data))
        self._finish_variances()
        before = [] if offset is None else self._center(offset)
        if diverged := self._step(state.update):
            self._fail(diverged, state)
        self._rescale()
        if offset is not None:
            self._follow(offset, before)
        state.update += 1
        return state

    @abstractmethod
    def _contrast(self, batch: Mapping[str, Tensor], of_data: float, of_chain: float) -> None:
        """Advance the chains, and compute the gradient of of_data * mean F(data) - of_chain * mean F(chain).

        In the place of the gradient of a log-variance it leaves a sum over all samples, with the weights w that the
        gradients of the biases have, of w t (f - t), where t are states and f the fields of hidden means, without bias.
        It also leaves of_data times the mean of the hidden layer over the data.
        """

    def _numbers(self, n: int, p: LayerLayout | None) -> Tensor:
        """Return random numbers to draw n samples of a layer, None for the hidden one.

        They are drawn in the order of the units, so that all paths follow the same random numbers.
        """
        plan = self.plan
        shape, gaussian = (plan.hidden_shape, plan.hidden_gaussian) if p is None else (p.numbers_shape, p.gaussian)
        return (self._rng.normal if gaussian else self._rng.uniform)((n, *shape), self._params)

    # -- learned variances ------------------------------------------------------------------------

    def _finish_variances(self) -> None:
        r"""Compute the gradients of log-variances from what `_contrast` left of them.

        They are :math:`-\tfrac12 \sum w \{t f - (t - b)^2\}`, and all weights together are zero.
        """
        layers = self._split_gradient[0]
        for m in self._variances:
            bias, total = self._split_params[0][m][-1], layers[m][-1]
            self.plan.log_variance(self._gradient, self.plan.layers[m]).add_(2 * bias * total).mul_(-0.5)

    def _own_powers(self, batch: Mapping[str, Tensor], share: float) -> Tensor:
        """Return this process's share of the mean squares of states, one for each layer that learns its variances."""
        found = self._params.new_zeros(len(self._variances))
        for number, m in enumerate(self._variances):
            p, (scale, shift) = self.plan.layers[m], self._packing.affine
            states = batch[p.name] * p.states_of(scale).view(p.shape) - p.states_of(shift).view(p.shape)
            found[number] = share * states.square().sum() / max(1, states.numel())
        return found

    def _reduce(self, powers: Tensor) -> None:
        """Add up the gradients, and the powers of layers that learn their variances, of all processes."""
        if not self._variances:
            self.task.all_reduce(self._gradient)
            return
        if self.task.n_processes > 1:
            everything = torch.cat([self._gradient, powers])
            self.task.all_reduce(everything)
            gradient, powers = everything.split([len(self._gradient), len(powers)])
            self._gradient.copy_(gradient)
        self._powers[self._variances] = powers.clamp(min=1)

    def _rescale(self) -> None:
        """Measure biases, their momenta and chains of layers whose variances have changed in their new units."""
        for m in self._variances:
            p = self.plan.layers[m]
            scale = p.states_of(self._packing.affine[0]).view(p.shape)
            ratio = torch.exp(-0.5 * self.plan.log_variance(self._params, p)) / scale
            self._packing.measure({p.name: scale * ratio})
            measured = [self.plan.split(flat)[0][m][-1] for flat in (self._params, self._momenta)]
            if self._persistent:
                measured.append(self._chain_states()[m])
            for array in measured:
                array.mul_(ratio)
        if self._variances:
            self._multiplier.copy_(self._packing.multiplier)

    # -- a centered hidden layer -------------------------------------------------------------------

    def _center(self, offset: Tensor) -> list[Tensor]:
        """Let the factors learn from deviations of the hidden layer, and return minus the fields of its offset."""
        fields = self._fields(-offset)  # the products that are left are those of the gradient
        unused = torch.empty_like(offset).view(-1, 1)
        for m, (*to_factors, to_b) in enumerate(self._split_gradient[0]):
            compute(self._single[m].up(self._factors[m], to_b.view(1, -1), unused, add=False))
            compute(self._single[m].gradients(to_factors, add=True))
        return fields

    def _fields(self, hidden: Tensor) -> list[Tensor]:
        """Return the field of one hidden state on every visible layer."""
        fields = [torch.empty_like(bias) for *_, bias in self._split_params[0]]
        for products, factors, field in zip(self._single, self._factors, fields, strict=True):
            compute(products.down(factors, hidden.reshape(-1, 1), field))
        return fields

    def _follow(self, offset: Tensor, before: list[Tensor]) -> None:
        """Let biases compensate for what the step did to the fields of the offset."""
        for (*_, bias), old, new in zip(self._split_params[0], before, self._fields(-offset), strict=True):
            bias.add_(new - old)

    # -- the step ---------------------------------------------------------------------------------

    def _step(self, update: int) -> int:
        """Make the recipe's step, and return 0; 1 if the gradient is not finite, 2 if the parameters are not then.

        The gradient is overwritten by the parameters as they were. One that is not finite changes nothing.
        """
        recipe, gradients = self.task.recipe, self._factor_gradients
        if recipe.normalized:
            with one_thread():
                gains = [safe_gain(gain) for gain in factor_gains(self._factors)]
                if self._variances:  # see `gains_of`
                    of_layers = [power for power, own in zip(self._powers, self._factors, strict=True) for _ in own]
                    gains = [gain * power for gain, power in zip(gains, of_layers, strict=True)]
            normalize((gradient, gain) for (_, gradient), gain in zip(gradients, gains, strict=True))
        if not self._even:
            self._gradient.mul_(self._multiplier)
        rate, bias_rate = learning_rates(recipe, update)
        if self._code is not None:
            of_factors, others = (rate, recipe.weight_decay), (bias_rate, 0.0)
            runs = tuple((count, *(of_factors if decays else others)) for count, decays in self._runs)
            return int(self._code.step(*self._addresses, runs, recipe.momentum, torch.get_num_threads()))
        if not all_finite([self._gradient]):
            return 1
        before = self._params.clone()
        moves: list[Move] = [(self._params, self._momenta, bias_rate)]
        if bias_rate != rate:
            moves += [(*both, rate - bias_rate) for both in self._factor_moves]
        step([self._gradient], [self._momenta], gradients, moves, recipe)
        self._gradient.copy_(before)
        return 0 if all_finite([self._params]) else 2

    def _fail(self, diverged: int, state: TrainState) -> NoReturn:
        """Raise DivergenceError for numbers that are not finite; the state is then as it was before this update."""
        what, flat = ("gradient", self._gradient) if diverged == 1 else ("parameter", self._params)
        name = first_not_finite(dict(reversed(self._packing.named(flat).items())))
        if what == "parameter":
            self._params.copy_(self._gradient)
        self.store(state)
        fail(self.task.recipe, state.update + 1, f"the {what} of '{name}'")
