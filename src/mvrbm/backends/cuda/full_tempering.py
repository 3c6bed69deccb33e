"""Buffers and kernel launches for parallel tempering in the `full_matrix` backend.

Tempering adds two launches per update and two launches per Gibbs step of the chains. The kernels are in
`full_tempering_kernels`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from mvrbm.backends.cuda.full_buffers import FullLaunch, FullParameters, FullSignature, FullStates
from mvrbm.backends.cuda.full_layout import FullPacking
from mvrbm.updates.negative import TURN
from mvrbm.updates.recipe import Recipe
from mvrbm.updates.state import TrainState

# Number of units per program, small so that many programs share a matrix.
_UNITS = 16
# Number of entries in a row or column to sum at a time.
_SUMMED = 256
# Number of columns to exchange at a time.
_BLOCK = 512


@dataclass(frozen=True)
class TemperingBuffers:
    """Buffers for tempered chains. If there is only one temperature, each buffer has a single element."""

    hidden_base: Tensor  # (models, hidden); fields at beta = 0
    visible_base: Tensor  # (models, visible)
    differences: Tensor  # (models, chains); free energy change due to an exchange
    turns: Tensor  # (models,); turn that corresponds to update 0
    middle: Tensor  # (visible,); the center of all states

    @classmethod
    def allocate(cls, signature: FullSignature, device: torch.device) -> TemperingBuffers:
        """Allocate buffers filled with zeros."""
        run = signature.run
        if run.temperatures == 1:
            nothing = torch.zeros(1, device=device)
            return cls(nothing, nothing, nothing, torch.zeros(1, dtype=torch.int64, device=device), nothing)
        layout = signature.layout
        return cls(
            hidden_base=torch.zeros(run.models, layout.hidden, device=device),
            visible_base=torch.zeros(run.models, layout.visible, device=device),
            differences=torch.zeros(run.models, run.n_chains, device=device),
            turns=torch.zeros(run.models, dtype=torch.int64, device=device),
            middle=torch.zeros(layout.visible, device=device),
        )


class Tempering:
    """Buffers for chains at several temperatures, and the launches that exchange states between them."""

    def __init__(self, signature: FullSignature, launch: FullLaunch, device: torch.device) -> None:
        self.buffers = TemperingBuffers.allocate(signature, device)
        self._signature = signature
        self._launch = launch

    def load_middle(self, state: TrainState, packing: FullPacking) -> None:
        """Copy the center of each visible layer's states into the buffers."""
        for name, columns in packing.columns.items():
            self.buffers.middle[columns] = state.machine.layers[name].middle.flatten()

    def load(self, recipes: Sequence[Recipe], states: Sequence[TrainState]) -> None:
        """Load the swap parities from the states. Later parities follow from the number of updates."""
        turns = [recipe.negative.turn(state.chains) for recipe, state in zip(recipes, states, strict=True)]
        self.buffers.turns.copy_((torch.tensor(turns) - states[0].update * self._signature.run.steps) % 2)

    def store(self, states: Sequence[TrainState]) -> None:
        """Write the current swap parities to the states."""
        for state, turn in zip(states, self.buffers.turns.tolist(), strict=True):
            if state.chains:
                state.chains[TURN] = torch.tensor((turn + states[0].update * self._signature.run.steps) % 2)

    def launch_bases(self, parameters: FullParameters, params: Tensor, weight: Tensor) -> None:
        """Launch the kernels that compute the fields at beta = 0 from the given parameters and full matrices."""
        from mvrbm.backends.cuda.full_tempering_kernels import hidden_base, visible_base

        layout = self._signature.layout
        models = self._signature.run.models
        buffers = self.buffers
        constants = {"HIDDEN": layout.hidden, "VISIBLE": layout.visible, "BK": _SUMMED, **self._launch.options}
        hidden_base[(layout.hidden // _UNITS, models)](
            weight, buffers.middle, buffers.hidden_base, BM=_UNITS, **constants
        )
        visible_base[(layout.visible // _UNITS, models)](
            weight, params[:, layout.hidden_bias :], buffers.hidden_base, buffers.visible_base,
            STRIDE=parameters.stride, BN=_UNITS, **constants,
        )  # fmt: skip

    def launch_exchange(
        self, states: FullStates, parameters: FullParameters, keys: Tensor, batch: int, step: int, draw: int
    ) -> None:
        """Launch the exchange after a Gibbs step.

        `draw` is the draw number of the exchange, not counting earlier exchanges in the same update. The kernel adds
        the number of these exchanges.
        """
        from mvrbm.backends.cuda.full_tempering_kernels import exchange

        run = self._signature.run
        last = step == run.steps - 1
        exchange[(run.n_coldest, (run.temperatures + 1) // 2, run.models)](
            states.visible, self.buffers.differences, states.visible_sums, self.buffers.turns, keys, parameters.clock,
            batch, draw, step, CHAINS=run.n_chains, TEMPERATURES=run.temperatures, STEPS=run.steps,
            ALL_ROWS=states.visible.shape[1], CHAINS_AT=states.chains_at, COLDEST_AT=states.coldest_at,
            VISIBLE=self._signature.layout.visible, LAST=last, SUMMED=self._signature.centered and last, BLOCK=_BLOCK,
            num_warps=1, **self._launch.options,
        )  # fmt: skip
