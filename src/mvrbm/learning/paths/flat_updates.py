"""What the CPU paths on flat parameters share: chains, random numbers and the step. They differ in the gradient."""

from abc import abstractmethod
from collections.abc import Mapping

import torch
from torch import Tensor

from mvrbm.learning.gradients import Shares
from mvrbm.learning.paths.base import Task, UpdatePath
from mvrbm.learning.paths.flat import LayerPlan, Packing, Plan, factor_gains
from mvrbm.learning.samplers import PCD
from mvrbm.learning.state import TrainState
from mvrbm.learning.step import Move, fail, first_not_finite, learning_rates, normalise, safe_gain, step
from mvrbm.sampling import Layers
from mvrbm.validation import all_finite


class FlatUpdates(UpdatePath):
    """Computes updates on flat parameters."""

    def __init__(self, task: Task, state: TrainState) -> None:
        self.task, self.plan, self._rng = task, Plan.of(state.machine), state.rng
        self._packing = Packing(state, self.plan, normalised=task.recipe.normalised)
        self._persistent = task.negative if isinstance(task.negative, PCD) else None
        self._steps, self._n_chains = int(task.negative.steps), int(getattr(task.negative, "n_chains", 0))
        self._chains_started = False
        self._params, self._momenta, self._kept, self._gradient = (
            state.machine.like.new_zeros(self.plan.size) for _ in range(4)
        )
        self._split_params, self._split_gradient = self.plan.split(self._params), self.plan.split(self._gradient)
        self._factors, self._factor_momenta, self._factor_gradients = (
            self.plan.factors(flat) for flat in (self._params, self._momenta, self._gradient)
        )
        self._multiplier = self._packing.multiplier
        self._even = bool((self._multiplier == 1).all())
        # What turns data into states, (I, J) each: a factor and an offset to subtract; None for nothing.
        both = [array.to(self._params) for array in self._packing.affine]
        self._affine: list[list[Tensor] | None] = [
            [p.states_of(array).view(p.rows, p.columns) for array in both] if p.gaussian else None
            for p in self.plan.layers
        ]

    def load(self, state: TrainState) -> None:
        self._rng = state.rng
        self._packing.pack(state, self._params, self._momenta)
        if self._persistent and state.chains:
            self._set_chains(state.chains)

    def store(self, state: TrainState) -> TrainState:
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

    def _set_chains(self, chains: Mapping[str, Tensor]) -> None:
        """Continue from chains of every layer, (n, I, J), in the units of the data."""
        for p, states, pair in zip(self.plan.layers, self._chain_states(), self._affine, strict=True):
            data = chains[p.name]
            states.copy_((data if pair is None else data * pair[0] - pair[1]).transpose(0, 1))
        self._chains_started = True

    @torch.no_grad()
    def update(self, state: TrainState, batch: Layers, weight: float, shares: Shares) -> TrainState:
        if self._persistent and not self._chains_started:  # the machine is still as it was loaded
            self._set_chains(self._persistent.start(state.machine, batch, self._rng))
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
        recipe, factors, gradients = self.task.recipe, self._factors, self._factor_gradients
        if recipe.normalised:
            normalise(zip(gradients, map(safe_gain, factor_gains(factors)), strict=True))
        if not self._even:
            self._gradient.mul_(self._multiplier)
        self._kept.copy_(self._params)
        rate, bias_rate = learning_rates(recipe, update)
        moves: list[Move] = [(self._params, self._momenta, bias_rate)]
        if bias_rate != rate:
            moves += [(*both, rate - bias_rate) for both in zip(factors, self._factor_momenta, strict=True)]
        step([self._gradient], [self._momenta], zip(factors, gradients, strict=True), moves, recipe)

    def _check(self, what: str, flat: Tensor, state: TrainState) -> None:
        """Raise DivergenceError for numbers that are not finite; the state is then as it was before this update."""
        if all_finite([flat]):
            return
        name = first_not_finite(dict(reversed(self._packing.named(flat).items())))
        if what == "parameter":
            self._params.copy_(self._kept)
        self.store(state)
        fail(self.task.recipe, state.update + 1, f"the {what} of '{name}'")
