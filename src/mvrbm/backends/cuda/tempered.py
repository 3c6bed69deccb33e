"""The path for a GPU that forms couplings as full matrices, with persistent chains at several temperatures.

It adds two launches per update, and two per step of the chains, to those of `full`. The kernels are in `full_exchange`.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from mvrbm.backends.base import UpdateSettings
from mvrbm.backends.cuda import full_matrix as full
from mvrbm.backends.cuda.full_matrix import FullMatrixBackend
from mvrbm.data.sources import Source
from mvrbm.updates.negative import TURN, TemperedPCD
from mvrbm.updates.state import TrainState

_UNITS = 16  # of one program: few, so that many programs share a matrix
_SUMMED = 256  # entries of a row or column that are added up at a time
_BLOCK = 512  # columns that are exchanged at a time
# Multiplications of a product of all chains with full matrices that take about as long as CUDA graphs of products with
# factors: an estimate from 2**29, which take 10 us on an H200, where such a graph takes 360.
_MOST_PRODUCTS = 2**32


class TemperedBackend(FullMatrixBackend):
    """Computes epochs with `TemperedPCD`, for binary and categorical layers."""

    def _allocate(self, states: Sequence[TrainState]) -> None:
        from mvrbm.backends.cuda import full_exchange

        super()._allocate(states)
        self._exchange_kernels = full_exchange
        self._middle = torch.zeros(self.plan.visible, device=self._device)
        for layer in self.plan.layers:
            middle = states[0].machine.layers[layer.name].middle()
            self._middle[self._packings[0].columns[layer.name]] = middle.flatten()

    def load(self, states: Sequence[TrainState]) -> None:
        super().load(states)
        # The turns of exchanges follow from the number of updates, from a first one on.
        turns = [recipe.negative.turn(state.chains) for recipe, state in zip(self._recipes, states, strict=True)]
        self._turns.copy_((torch.tensor(turns) - states[0].update * self._steps) % 2)

    def store(self, states: Sequence[TrainState]) -> list[bool]:
        diverged = super().store(states)
        for state, turn in zip(states, self._turns.tolist(), strict=True):
            if state.update > 0:
                state.chains[TURN] = torch.tensor((turn + states[0].update * self._steps) % 2)
        return diverged

    def _chain_data(self, number: int) -> dict[str, Tensor]:
        shape = self._temperatures, self._n_coldest
        return {name: array.unflatten(0, shape) for name, array in super()._chain_data(number).items()}

    def _set_chains(self, number: int, data: Mapping[str, Tensor]) -> None:
        super()._set_chains(number, {layer.name: data[layer.name].flatten(0, 1) for layer in self.plan.layers})

    def _launch_products(self, batch: int, n_valid: int, numbers: int) -> None:
        plan, weight, bias = self.plan, self._weight_of(batch), self._all_params[batch % 2][:, self.plan.hidden_bias :]
        sizes = {"HIDDEN": plan.hidden, "VISIBLE": plan.visible, "BK": _SUMMED, **self._options}
        self._exchange_kernels.hidden_base[(plan.hidden // _UNITS, self._models)](
            weight, self._middle, self._hidden_base, BM=_UNITS, **sizes
        )
        self._exchange_kernels.visible_base[(plan.visible // _UNITS, self._models)](
            weight, bias, self._hidden_base, self._visible_base, STRIDE=self._stride, BN=_UNITS, **sizes
        )
        super()._launch_products(batch, n_valid, numbers)

    def _end_step(self, batch: int, n_valid: int, step: int, numbers: int) -> int:
        self._up(batch, n_valid, 2 * step, 0, data=False, chains=True, draw=False, compare=True)
        last, pairs = step == self._steps - 1, (self._temperatures + 1) // 2
        self._exchange_kernels.exchange[(self._n_coldest, pairs, self._models)](
            self._states, self._differences, self._visible_sums, self._turns, self._recorded, self._seeds, self._clock,
            batch, 2 * step, numbers, CHAINS=self._n_chains, TEMPERATURES=self._temperatures, STEPS=self._steps,
            ALL_ROWS=self._all_rows, CHAINS_AT=self._chains_at, COLDEST_AT=self._coldest_at, VISIBLE=self.plan.visible,
            LAST=last, SUMMED=self._centered and last, RECORDED=self._recorded_size, BLOCK=_BLOCK, num_warps=1,
            **self._options,
        )  # fmt: skip
        return self._temperatures // 2 * self._n_coldest


def unsupported_reason(task: UpdateSettings, state: TrainState, source: Source) -> str | None:
    """Return why the kernels cannot compute a training run's updates, or would be slower, None if they can."""
    machine, negative = state.machine, task.negative
    if (reason := full.unsupported_reason(task, state, source, (TemperedPCD,))) is not None:
        return reason
    if machine.hidden.gaussian or any(unit.gaussian for unit in machine.layers.values()):
        return "its chains are tempered, and a layer is Gaussian"
    for link in machine.links.values():
        products = math.prod(link.hidden_shape) * math.prod(link.visible_shape)
        if products > 4 * link.operations and math.prod(negative.chain_shape) * products > _MOST_PRODUCTS:
            return "its chains take many more products with full matrices than with factors"
    return None
