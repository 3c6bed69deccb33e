"""What the CPU paths on flat parameters share: chains, random numbers and the step. They differ in the gradient."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping

import torch
from torch import Tensor

from mvrbm.couplings.base import squared_norms
from mvrbm.learning.paths.base import Task, UpdatePath
from mvrbm.learning.paths.flat import LayerPlan, Packing, Plan, factor_names
from mvrbm.learning.samplers import PCD
from mvrbm.learning.state import TrainState
from mvrbm.learning.step import Move, fail, first_not_finite, learning_rates, normalise, safe_gain, step
from mvrbm.validation import all_finite


class FlatUpdates(UpdatePath):
    """Computes updates on flat parameters.

    Parameters
    ----------
    task : Task
        How updates are made.
    state : TrainState
        The state to start from.
    """

    def __init__(self, task: Task, state: TrainState) -> None:
        self.task, self.plan = task, Plan.of(state.machine)
        self._packing = Packing(state, self.plan, normalised=task.recipe.normalised)
        like, negative = state.machine.like, task.negative
        self._persistent, self._steps = isinstance(negative, PCD), int(negative.steps)
        self._n_chains = int(getattr(negative, "n_chains", 0))
        size = self.plan.size
        self._params, self._momenta = like.new_zeros(size), like.new_zeros(size)
        self._kept, self._gradient = like.new_zeros(size), like.new_zeros(size)
        self._affine = self._affines()
        self._multiplier = self._packing.multiplier
        self._even = bool((self._multiplier == 1).all())
        self._split_params, self._split_gradient = self.plan.split(self._params), self.plan.split(self._gradient)
        self._split_momenta, _ = self.plan.split(self._momenta)
        self._chains_started = False
        self._rng = state.rng

    def _affines(self) -> list[tuple[Tensor, Tensor] | None]:
        """Return what turns data into states, (I, J) each: a factor and an offset to subtract; None for nothing."""
        scale, shift = self._packing.load_scale, self._packing.load_shift
        affine: list[tuple[Tensor, Tensor] | None] = []
        for p in self.plan.layers:
            part = slice(p.states_at, p.states_at + p.area)
            factor, offset = (array[part].view(p.rows, p.columns).to(self._params) for array in (scale, shift))
            affine.append((factor, offset) if p.gaussian else None)
        return affine

    # -- from and to the state --------------------------------------------------------------------

    def load(self, state: TrainState) -> None:
        """Take over parameters, momenta and chains from the state."""
        self._rng = state.rng
        self._packing.pack(state, self._params, self._momenta)
        if self._persistent and state.chains:
            self._set_chains([state.chains[p.name] for p in self.plan.layers])

    def store(self, state: TrainState) -> TrainState:
        """Write parameters, momenta and chains to the state."""
        self._packing.unpack(state, self._params, self._momenta)
        if self._persistent and self._chains_started:
            for p, states, pair in zip(self.plan.layers, self._chain_states(), self._affine, strict=True):
                data = states.transpose(0, 1)
                data = data if pair is None else (data + pair[1]) / pair[0]
                state.chains[p.name] = data.clone(memory_format=torch.contiguous_format)
        return state

    @abstractmethod
    def _chain_states(self) -> list[Tensor]:
        """Return views of the persistent chains of every layer, (I, n, J) each."""

    def _set_chains(self, data: list[Tensor]) -> None:
        """Continue from chains (n, I, J), in the units of the data."""
        for states, some, pair in zip(self._chain_states(), data, self._affine, strict=True):
            states.copy_((some if pair is None else some * pair[0] - pair[1]).transpose(0, 1))
        self._chains_started = True

    def _start_chains(self, batch: Mapping[str, Tensor]) -> None:
        """Start persistent chains at the samples of a batch, as often as needed."""
        if len(next(iter(batch.values()))):
            rows = torch.arange(self._n_chains) % len(next(iter(batch.values())))
            self._set_chains([batch[p.name][rows] for p in self.plan.layers])
            return
        # Another process has the whole batch: draw from the biases.
        for p, states, (_, _, bias) in zip(self.plan.layers, self._chain_states(), self._split_params[0], strict=True):
            shape = self._n_chains, p.rows, p.columns
            rng, field = self._rng, bias.expand(shape)
            drawn = field + rng.normal(shape, bias) if p.gaussian else rng.uniform(shape, bias) < torch.sigmoid(field)
            states.copy_(drawn.transpose(0, 1))
        self._chains_started = True

    # -- an update --------------------------------------------------------------------------------

    @torch.no_grad()
    def update(
        self, state: TrainState, batch: Mapping[str, Tensor], weight: float, shares: tuple[float, float]
    ) -> TrainState:
        """Make one update; see :class:`UpdatePath`. The state's tensors follow when it is stored."""
        if self._persistent and not self._chains_started:
            self._start_chains(batch)
        self._contrast(batch, weight * shares[0], weight * shares[1])
        self.task.all_reduce(self._gradient)
        self._check("gradient", self._gradient, state)
        self._step(state.update)
        self._check("parameter", self._params, state)
        state.update += 1
        return state

    @abstractmethod
    def _contrast(self, batch: Mapping[str, Tensor], of_data: float, of_chain: float) -> None:
        """Advance the chains, and compute the gradient of of_data * mean F(data) - of_chain * mean F(chain)."""

    def _numbers(self, n: int, p: LayerPlan | None) -> Tensor:
        """Return random numbers to draw n samples of a layer, None for the hidden one: (n, rows, columns).

        They are drawn in the order of the units, so that all paths follow the same random numbers.
        """
        plan = self.plan
        shape = (n, plan.hidden_rows, plan.hidden_columns) if p is None else (n, p.rows, p.columns)
        gaussian = plan.hidden_gaussian if p is None else p.gaussian
        return (self._rng.normal if gaussian else self._rng.uniform)(shape, self._params)

    def _step(self, update: int) -> None:
        recipe = self.task.recipe
        pairs = list(zip(self._split_params[0], self._split_gradient[0], strict=True))
        if recipe.normalised:
            for (U, V, _), (to_u, to_v, _) in pairs:
                normalise([(to_u, safe_gain(squared_norms(V).sum())), (to_v, safe_gain(squared_norms(U).sum()))])
        if not self._even:
            self._gradient.mul_(self._multiplier)
        self._kept.copy_(self._params)
        rate, bias_rate = learning_rates(recipe, update)
        moves: list[Move] = [(self._params, self._momenta, bias_rate)]
        if bias_rate != rate:
            for (U, V, _), (of_u, of_v, _) in zip(self._split_params[0], self._split_momenta, strict=True):
                moves += [(U, of_u, rate - bias_rate), (V, of_v, rate - bias_rate)]
        factors = [both for own, to in pairs for both in zip(own[:2], to[:2], strict=True)]
        step([self._gradient], [self._momenta], factors, moves, recipe)

    def _check(self, what: str, flat: Tensor, state: TrainState) -> None:
        """Raise DivergenceError for numbers that are not finite; the state is then as it was before this update."""
        if all_finite([flat]):
            return
        layers, hidden = self.plan.split(flat)
        named = {"hidden.bias": hidden}
        for p, (U, V, bias) in zip(self.plan.layers, layers, strict=True):
            first, second = factor_names(state.machine, p.name)
            named |= {first: U, second: V, f"visible.{p.name}.bias": bias}
        name = first_not_finite(named)
        if what == "parameter":
            self._params.copy_(self._kept)
        self.store(state)
        fail(self.task.recipe, state.update + 1, f"the {what} of '{name}'")
