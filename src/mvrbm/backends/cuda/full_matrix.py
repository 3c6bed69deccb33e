"""GPU backend that uses batched products with couplings expanded to full matrices, in six to eight launches per update.

It supports dense and higher-rank matrix couplings, several visible layers (including categorical layers), centering of
all layers, learned variances, missing entries, and chains at several temperatures. Each Gibbs step for missing entries
requires two additional launches. The kernels are in `full_kernels`, `full_step`, `full_variances` and
`full_tempering_kernels`.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from mvrbm.backends.base import UpdateSettings
from mvrbm.backends.cuda import kernel_backend
from mvrbm.backends.cuda.full_buffers import (
    FullLaunch,
    FullOffsets,
    FullParameters,
    FullSignature,
    FullStates,
    FullVariances,
    Operands,
)
from mvrbm.backends.cuda.full_layout import TILE, FullLayer, FullLayout, FullPacking, factor_rank
from mvrbm.backends.cuda.full_tempering import Tempering
from mvrbm.backends.cuda.kernel_backend import KernelBackend, launches_overlap, power_of_two
from mvrbm.backends.layout import not_flat_reason
from mvrbm.couplings.base import equalize_norms
from mvrbm.cuda_graphs import WORTH_A_GRAPH
from mvrbm.data.sources import Source
from mvrbm.updates.negative import CD, PCD, TemperedPCD
from mvrbm.updates.state import DRAWS_OF_MISSING, TrainState

# Maximum number of entries in W. Larger matrices do not fit into the L2 cache.
_LARGEST = 2**24
# Maximum width of a factor, because its norm is computed in one tile.
_WIDEST_FACTOR = 64
_MOST_CATEGORIES = 64
# Maximum number of variances per layer, because every program sums the squares over all columns.
_MOST_VARIANCES = 8192
# Minimum compute capability (Ampere), for enough shared memory for the pipeline stages of a product.
_OLDEST = (8, 0)
# Maximum fraction of the device memory that the data may occupy as operands.
_SHARE_OF_MEMORY = 0.25
# Number of biases per program.
_BLOCK = 512
# Number of full-matrix multiplications for all tempered chains that takes about as long as a CUDA graph of products
# with factors. Estimated from measurements on an H200: 2**29 multiplications take 10 us, and such a graph takes 360 us.
_MOST_TEMPERED_PRODUCTS = 2**32


class FullMatrixBackend(KernelBackend):
    """Backend that computes epochs with batched full-matrix products.

    The precision of matrix products is "fp16", "tf32", "tf32x3" or "ieee", as in `PerProgramBackend`. The default is
    "tf32" if any layer is Gaussian. Otherwise, it is "fp16", because all states are at most 1.
    """

    updates_per_graph = 50
    draws_missing = True
    signature: FullSignature
    packings: list[FullPacking]

    def __init__(
        self,
        settings: Sequence[UpdateSettings],
        states: Sequence[TrainState],
        sources: Sequence[Source],
        *,
        precision: str | None = None,
    ) -> None:
        super().__init__(settings, states, sources)
        self.signature = FullSignature.of(settings, states, sources, precision)
        self.run = self.signature.run
        self.layout = self.signature.layout
        self.packings = []
        self._data = Operands.allocate(self.signature, self._device)
        self._parameters = FullParameters.allocate(self.signature, self.rates())
        self._states = FullStates.allocate(self.signature, self._device)
        self._offsets = FullOffsets.allocate(self.signature, self._device)
        self._variances = FullVariances.allocate(self.signature, self._device)
        self._launch = FullLaunch.of(self.signature, self._device, overlapping=launches_overlap(self._device))
        self._tempering = Tempering(self.signature, self._launch, self._device)
        self.begin(states, sources)

    def signature_of(
        self, settings: Sequence[UpdateSettings], states: Sequence[TrainState], sources: Sequence[Source]
    ) -> FullSignature:
        return FullSignature.of(settings, states, sources, self.signature.precision)

    @property
    def params(self) -> Tensor:
        return self._parameters.params[0]

    @property
    def momenta(self) -> Tensor:
        return self._parameters.momenta[0]

    @property
    def _tempered(self) -> bool:
        return self.run.temperatures > 1

    @property
    def _chains(self) -> Tensor:
        """States of all chains, as a tensor of shape (models, chains, visible)."""
        return self._states.visible[:, self._states.chains_at :][:, : self.run.n_chains]

    def changing(self) -> tuple[Tensor, ...]:
        parameters = self._parameters
        return (
            self.params,
            self.momenta,
            self._chains,
            parameters.weights[0],
            parameters.gains[0],
            self._offsets.hidden[0],
            self._variances.ratios,
        )

    def clear_gradients(self) -> None:
        self._parameters.gradients[0, :, : self.layout.size].zero_()

    # -- from and to the states -------------------------------------------------------------------

    def load_run(self, states: Sequence[TrainState], sources: Sequence[Source]) -> None:
        self.packings = [FullPacking(state, self.layout) for state in states]
        self._data.load(self.layout, sources, self.packings)
        self._parameters.gradients.zero_()
        for number, packing in enumerate(self.packings):
            self._parameters.multiplier[number] = packing.multiplier(self.params[number], self.run.normalized)
            for name, columns in packing.columns.items():
                self._variances.start[number, columns] = -2 * torch.log(packing.scale(name))
        if self._tempered:
            self._tempering.load_middle(states[0], self.packings[0])

    def load(self, states: Sequence[TrainState]) -> None:
        super().load(states)
        means, begun = self._offsets.current(self.layout)
        for number, (state, packing) in enumerate(zip(states, self.packings, strict=True)):
            if state.centering is None:
                continue
            for layer in self.layout.layers:
                center = state.centering.center[layer.name].flatten() * packing.scale(layer.name)
                self._offsets.center[number, packing.columns[layer.name]] = center
            offset = state.centering.hidden
            begun[number] = 0.0 if offset is None else 1.0
            if offset is not None:
                means[number, self.layout.hidden_places().to(self._device)] = offset.flatten()
        for layer in self.layout.layers:
            if layer.learns_variance:
                columns = slice(layer.first, layer.first + layer.width)
                log_variance = self.params[:, self.layout.variances :][:, columns]
                change = log_variance - self._variances.start[:, columns]
                self._variances.ratios[:, columns] = torch.exp(-0.5 * change)
        if self._tempered:
            self._tempering.load(self._recipes, states)
        self._launch_build()

    def store(self, states: Sequence[TrainState]) -> list[bool]:
        diverged = super().store(states)
        means, begun = self._offsets.current(self.layout)
        places = self.layout.hidden_places().to(self._device)
        for number, state in enumerate(states):
            if state.centering is not None and self.signature.follows and bool(begun[number]):
                state.centering.hidden = means[number, places].reshape(1, *self.layout.hidden_shape)
        if self._tempered:
            self._tempering.store(states)
        return diverged

    @torch.no_grad()
    def balance(self, states: Sequence[TrainState]) -> None:
        for layer in self.layout.layers:
            if layer.rank:
                sizes = [layer.rank * size for size in self._factor_sizes(layer)]
                for params in self.params:
                    U, V = params[layer.parameters_at :][: sum(sizes)].split(sizes)
                    equalize_norms([U.view(layer.rank, -1), V.view(layer.rank, -1)], keep=0)
        self._launch_build()

    def _factor_sizes(self, layer: FullLayer) -> tuple[int, int]:
        """Return the numbers of entries in the two factors of one Kronecker product, K * I and L * J."""
        return self.layout.hidden_rows * layer.rows, self.layout.hidden_columns * layer.columns

    def chain_data(self, number: int) -> dict[str, Tensor]:
        packing = self.packings[number]
        shape = (self.run.temperatures, self.run.n_coldest) if self._tempered else (self.run.n_chains,)
        found = {}
        for layer in self.layout.layers:
            values = self._chains[number][:, packing.columns[layer.name]].float() / packing.scale(layer.name)
            found[layer.name] = values.reshape(*shape, *layer.shape)
        return found

    def set_chains(self, number: int, data: Mapping[str, Tensor]) -> None:
        packing = self.packings[number]
        for layer in self.layout.layers:
            values = data[layer.name].reshape(self.run.n_chains, -1) * packing.scale(layer.name)
            self._chains[number][:, packing.columns[layer.name]] = values.to(self.signature.dtype)

    def start_chains(self, number: int, batch: int, update: int) -> None:
        rows = self.rows_of(number, batch)
        samples = self._data.samples[0 if self.run.shared_data else number][rows]
        if self.signature.masked:  # initialize chains from the data as sampled in this update
            self._parameters.clock.copy_(torch.tensor([update, batch]))
            self._launch_gather(len(rows))
            self._launch_missing(0, len(rows))
            samples = self._states.visible[number, : len(rows)].clone()
        self._chains[number] = samples[self.run.batch_of_chains(torch.arange(len(rows), device=self._device))]

    # -- updates ----------------------------------------------------------------------------------

    def compute_updates(self, first: int, count: int, update: int) -> None:
        parameters = self._parameters
        parameters.clock.copy_(torch.tensor([update, first]), non_blocking=True)
        sizes = [self.run.n_valid(first + number) for number in range(count)]

        def launch(n: int) -> None:
            self._launch_gather(sizes[0])
            for batch in range(n):
                self._launch_update(batch, sizes[batch], 0 if batch == n - 1 else sizes[batch + 1])
            if n % 2:  # the results are in the second set of buffers
                pairs: list[Sequence[Tensor]] = [
                    (parameters.params[0], parameters.params[1]),
                    (parameters.momenta[0], parameters.momenta[1]),
                    (parameters.gains[0], parameters.gains[1]),
                ]
                if self.signature.centered:
                    pairs += [(self._offsets.hidden[0], self._offsets.hidden[1]), parameters.weights]
                for current, other in pairs:
                    current.copy_(other)
                self.clear_gradients()

        self.replay((count, sizes[-1]), launch, count)

    def _launch_gather(self, n_valid: int) -> None:
        """Launch the kernel that copies the first batch of a series."""
        from mvrbm.backends.cuda.full_kernels import GATHERED, gather

        gather[(self.layout.visible // GATHERED.value, self.run.models)](
            self._data.samples, self._order, self._states.visible, self._states.visible_sums, self._parameters.clock, 0,
            n_valid, *self._strides, N=self.run.batch_size, ALL_ROWS=self._states.visible.shape[1],
            VISIBLE=self.layout.visible, BG=self._launch.gathered, CENTERED=self.signature.centered,
        )  # fmt: skip

    @property
    def _strides(self) -> tuple[int, int]:
        """Strides, in samples, between consecutive models in the sample orders and in the data."""
        return self.n_samples, 0 if self.run.shared_data else self.n_samples

    def _launch_update(self, batch: int, n_valid: int, n_next: int) -> None:
        """Launch update number `batch` of a series. The next batch has `n_next` samples."""
        if self.signature.masked:
            self._launch_missing(batch, n_valid)
        self._launch_chains(batch, n_valid)
        self._launch_gradients(batch, n_valid)
        self._launch_build(batch + 1, n_next, step=True)
        if self.signature.centered:
            self._launch_compensation(batch)

    def _weight_of(self, batch: int) -> Tensor:
        """Return the full coupling matrices for update number `batch` of a series."""
        weights = self._parameters.weights
        return weights[batch % len(weights)]

    def _launch_missing(self, batch: int, n_valid: int) -> None:
        """Launch the Gibbs steps that sample the missing entries of a batch."""
        n_layers = len(self.layout.layers)
        draw = DRAWS_OF_MISSING
        self._launch_down(batch, n_valid, draw, missing=True, start=True)
        draw += n_layers
        for step in range(1, self.signature.missing_steps + 1):
            self._launch_up(batch, n_valid, draw, data=True, chains=False, summed=False)
            last = step == self.signature.missing_steps
            self._launch_down(batch, n_valid, draw + 1, missing=True, summed=last)
            draw += 1 + n_layers

    def _launch_chains(self, batch: int, n_valid: int) -> None:
        """Launch the kernels that compute the hidden means of the data and advance the chains.

        The hidden means of the new chain states are computed too.
        """
        run = self.run
        n_layers = len(self.layout.layers)
        if self._tempered:
            params = self._parameters.params[batch % 2]
            self._tempering.launch_bases(self._parameters, params, self._weight_of(batch))
        for step in range(run.steps):
            last = step == run.steps - 1
            draw = step * (1 + n_layers)
            has_chains = run.persistent or step > 0  # the first CD step starts from the data
            self._launch_up(batch, n_valid, draw, step, data=step == 0, chains=has_chains, summed=step == 0)
            self._launch_down(batch, n_valid, draw + 1, step, summed=last and not self._tempered)
            if self._tempered:
                self._launch_up(batch, n_valid, 0, step, data=False, chains=True, drawn=False, compare=True)
                self._tempering.launch_exchange(
                    self._states, self._parameters, self._keys, batch, step, draw + 1 + n_layers
                )
        self._launch_up(batch, n_valid, 0, data=False, chains=True, drawn=False)

    def _rows(self, *, coldest: bool = True) -> dict[str, Any]:
        """Return the size arguments common to all product kernels.

        The sizes are those of the coldest chains if `coldest` is True, and of the chains at all temperatures otherwise.
        """
        return {
            "CHAINS": self.run.n_coldest if coldest else self.run.n_chains,
            "PERSISTENT": self.run.persistent,
            "CHAINS_AT": self._states.coldest_at if coldest else self._states.chains_at,
            "ALL_ROWS": self._states.visible.shape[1],
            "HIDDEN": self.layout.hidden,
            "VISIBLE": self.layout.visible,
            "STRIDE": self._parameters.stride,
        }

    def _hidden_sizes(self) -> dict[str, int]:
        layout = self.layout
        return {
            "UNITS": layout.n_hidden,
            "K": layout.hidden_rows,
            "L": layout.hidden_columns,
            "HIDDEN_PITCH": layout.hidden_pitch,
        }

    def _launch_up(
        self,
        batch: int,
        n_valid: int,
        draw: int,
        step: int = 0,
        *,
        data: bool,
        chains: bool,
        drawn: bool = True,
        summed: bool = True,
        compare: bool = False,
    ) -> None:
        """Launch the kernel that computes hidden means or samples for the data, the chains, or both.

        If `drawn` is True, the hidden layer of the chains is sampled at Gibbs step `step`. If there are no chains, the
        hidden layer of the data is sampled instead. If `compare` is True, the kernel only computes the changes in free
        energy that exchanges between temperatures would cause.
        """
        from mvrbm.backends.cuda.full_kernels import upwards

        BM, BN = self._launch.tile_up
        buffers = self._tempering.buffers
        states = self._states
        coldest = not drawn and not compare
        sizes = self._rows(coldest=coldest)
        first = 0 if data else sizes["CHAINS_AT"] // BM
        end = (sizes["CHAINS_AT"] + sizes["CHAINS"] + BM - 1 if chains else states.chains_at) // BM
        upwards[(end - first, self.layout.hidden // BN, self.run.models)](
            states.visible, self._weight_of(batch), self._parameters.params[batch % 2][:, self.layout.hidden_bias :],
            states.means, states.draws, states.hidden_sums, buffers.hidden_base, buffers.differences, buffers.turns,
            self._keys, self._parameters.clock, batch, n_valid, draw, step, FIRST_TILE=first,
            DRAW_DATA=not chains and drawn, DRAW_CHAINS=drawn, SUMMED=self.signature.centered and summed,
            COMPARE=compare, TEMPERATURES=self.run.temperatures if chains and not coldest else 1, STEPS=self.run.steps,
            GAUSSIAN=self.signature.hidden_gaussian, SAMPLE_ROWS=states.draws.shape[1],
            PRECISION=self.signature.dot_precision, UNITS=self.layout.n_hidden, BM=BM, BN=BN, **sizes,
            **self._launch.product_options,
        )  # fmt: skip

    def _launch_down(
        self,
        batch: int,
        n_valid: int,
        draw: int,
        step: int = 0,
        *,
        missing: bool = False,
        start: bool = False,
        summed: bool = False,
    ) -> None:
        """Launch the kernel that samples the visible layers of the chains, or missing entries in the data.

        `draw` is the draw number of the first layer. If `start` is True, missing entries are sampled from the biases
        alone.
        """
        from mvrbm.backends.cuda.full_kernels import downwards

        BM, BN = self._launch.tile_down
        buffers = self._tempering.buffers
        states = self._states
        rows = self.run.batch_size if missing else self.run.n_chains
        downwards[(-(-rows // BM), self.layout.visible // BN, self.run.models)](
            states.draws, self._weight_of(batch), self._parameters.params[batch % 2][:, self.layout.visible_bias :],
            states.visible, states.visible_sums, buffers.visible_base, buffers.differences, buffers.turns, self._keys,
            self._parameters.clock, self._variances.ratios, self._data.known, self._order, batch, n_valid, draw, step,
            *self._strides, N=self.run.batch_size, LAYERS=self._launch.layers,
            SUMMED=self.signature.centered and summed, VARIES=self.layout.varies, FILL=missing, START=start,
            TEMPERATURES=1 if missing else self.run.temperatures, STEPS=self.run.steps,
            SAMPLE_ROWS=states.draws.shape[1], PRECISION=self.signature.dot_precision, BM=BM, BN=BN,
            **self._rows(coldest=False), **self._launch.product_options,
        )  # fmt: skip

    def _launch_gradients(self, batch: int, n_valid: int) -> None:
        """Launch the kernels that compute the gradients for full matrices, learned variances and factors."""
        from mvrbm.backends.cuda.full_kernels import gradients

        layout = self.layout
        states = self._states
        BM, BN = self._launch.tile_gradient
        offsets = self._offsets.hidden
        gradients[(layout.hidden // BM, layout.visible // BN, self.run.models)](
            states.visible, states.means, states.visible_sums, states.hidden_sums,
            self._parameters.gradients[batch % 2], offsets[batch % 2], offsets[(batch + 1) % 2], self._offsets.center,
            self._variances.ratios, n_valid, N=self.run.batch_size, VISIBLE_BIAS=layout.visible_bias,
            LAYERS=self._launch.layers, CENTERED=self.signature.centered, FOLLOWS=self.signature.follows,
            VARIES=layout.varies, BM=BM, BN=BN, PRECISION=self.signature.dot_precision, **self._hidden_sizes(),
            **self._rows(), **self._launch.product_options,
        )  # fmt: skip
        if layout.varies:
            self._launch_variances(batch, n_valid)
        for layer in layout.layers:
            if layer.rank:
                self._launch_contraction(batch, layer)

    def _launch_variances(self, batch: int, n_valid: int) -> None:
        """Launch the kernel that computes the gradients for learned variances and updates the variances."""
        from mvrbm.backends.cuda.full_kernels import GATHERED
        from mvrbm.backends.cuda.full_variances import vary

        layout = self.layout
        parameters = self._parameters
        now = batch % 2
        new = (batch + 1) % 2
        # `vary` reads the batch, and `build` copies the next batch before it waits for the previous launch. If `build`
        # directly follows this launch, without a `contract` in between, this launch has to finish first.
        options = self._launch.options if any(layer.rank for layer in layout.layers) else {"PDL": False}
        vary[(layout.visible // GATHERED.value, self.run.models)](
            parameters.params[now], parameters.momenta[now], parameters.gradients[now], parameters.params[new],
            parameters.momenta[new], parameters.gradients[new], self._weight_of(batch), self._states.visible,
            self._offsets.center, self._variances.start, self._variances.ratios, self._variances.squares,
            parameters.rates, parameters.clock, batch, n_valid, N=self.run.batch_size,
            VISIBLE_BIAS=layout.visible_bias, VARIANCES=layout.variances, LAYERS=self._launch.layers, BLOCK=TILE,
            **self._hidden_sizes(), **self._rows(), **options,
        )  # fmt: skip

    def _launch_contraction(self, batch: int, layer: FullLayer) -> None:
        """Launch the kernel that computes the gradients for a layer's factors."""
        from mvrbm.backends.cuda.full_step import contract

        KI, LJ = self._factor_sizes(layer)
        contract[(-(-KI // TILE), -(-LJ // TILE), self.run.models)](
            self._parameters.params[batch % 2], self._parameters.gradients[batch % 2], STRIDE=self._parameters.stride,
            FACTORS_AT=layer.parameters_at, FULL_AT=self.layout.full_at(layer), KI=KI, LJ=LJ, R=layer.rank,
            RANKS=max(16, power_of_two(layer.rank)), PRECISION=self.signature.dot_precision, BM=TILE, BN=TILE,
            **self._launch.options,
        )  # fmt: skip

    def _launch_build(self, batch: int = 0, n_next: int = 0, *, step: bool = False) -> None:
        """Launch the kernel that forms the full matrices and copies the next batch.

        If `step` is True, the kernel first performs a step.
        """
        from mvrbm.backends.cuda.full_step import build

        layout = self.layout
        parameters = self._parameters
        states = self._states
        terms = self.signature.terms
        norms = layout.n_factors * terms if self.run.normalized else 0
        biases = -(-(layout.variances - layout.visible_bias) // _BLOCK) if step else 0
        now = (batch - step) % 2
        new = batch % 2
        build[(self._launch.n_tiles + norms + biases, self.run.models)](
            parameters.params[now], parameters.momenta[now], parameters.gradients[now], parameters.gains[now],
            parameters.params[new], parameters.momenta[new], parameters.gradients[new], parameters.gains[new],
            parameters.multiplier, parameters.rates, self._weight_of(batch), self._data.samples, self._order,
            states.visible, states.visible_sums, states.hidden_sums, parameters.clock, self._variances.ratios,
            self._variances.squares, batch, n_next, *self._strides, N=self.run.batch_size,
            ALL_ROWS=states.visible.shape[1], HIDDEN=layout.hidden, VISIBLE=layout.visible, K=layout.hidden_rows,
            L=layout.hidden_columns, HIDDEN_PITCH=layout.hidden_pitch, SIZE=layout.variances,
            STRIDE=parameters.stride, VISIBLE_BIAS=layout.visible_bias, N_GAINS=layout.n_factors * terms,
            LAYERS=self._launch.layers, STEP=step, NORMALIZED=self.run.normalized, CENTERED=self.signature.centered,
            TERMS=terms, PRECISION=self.signature.exact_precision, BG=self._launch.gathered, BM=TILE, BN=TILE,
            EDGE=self._launch.edge, BLOCK=_BLOCK, **self._launch.options,
        )  # fmt: skip

    def _launch_compensation(self, batch: int) -> None:
        """Launch the kernel that corrects the biases for the change in the full matrices during an update."""
        from mvrbm.backends.cuda.full_step import compensate

        layout = self.layout
        new = (batch + 1) % 2
        compensate[(layout.hidden // TILE, layout.visible // TILE, self.run.models)](
            self._parameters.params[new], self._weight_of(batch), self._weight_of(batch + 1),
            self._offsets.hidden[new], self._offsets.center, HIDDEN=layout.hidden, VISIBLE=layout.visible,
            UNITS=layout.n_hidden, STRIDE=self._parameters.stride, VISIBLE_BIAS=layout.visible_bias,
            FOLLOWS=self.signature.follows, BM=TILE, BN=TILE, **self._launch.options,
        )  # fmt: skip


def unsupported_reason(settings: UpdateSettings, state: TrainState, source: Source) -> str | None:
    """Return the reason why the kernels do not support a training run, or None if they do."""
    reason = kernel_backend.unsupported_reason(
        settings, state, source, masked=FullMatrixBackend.draws_missing
    ) or not_flat_reason(settings, state, (CD, PCD, TemperedPCD))
    if reason is not None:
        return reason
    machine = state.machine
    if machine.like.is_cuda and torch.cuda.get_device_capability(machine.like.device) < _OLDEST:
        return "the GPU has too little shared memory"
    for unit in machine.layers.values():
        if unit.learns_statistic and not settings.recipe.normalized:
            return "it learns variances, and its gradients are not normalized"
        if unit.learns_statistic and settings.recipe.centering == "full":
            return "it learns variances, and its hidden layer is centered"
        if unit.learns_statistic and math.prod(unit.shape) > _MOST_VARIANCES:
            return f"it learns more than {_MOST_VARIANCES} variances"
        if unit.sampled_as == "categorical" and unit.shape[-1] > _MOST_CATEGORIES:
            return f"it has more than {_MOST_CATEGORIES} categories"
    for link in machine.links.values():
        factors = link.matrix_factors()
        if factors is None and not link.is_full:
            return "not all of its couplings are dense or sums of Kronecker products of two learned matrices"
        if factors is not None and max(max(factor.shape[1:]) for factor in factors) > _WIDEST_FACTOR:
            return f"it has factors wider than {_WIDEST_FACTOR}"
    layout = FullLayout.of(machine, {name: factor_rank(link) for name, link in machine.links.items()})
    if layout.hidden * layout.visible > _LARGEST:
        return f"its couplings would have more than {_LARGEST} entries as full matrices"
    if isinstance(settings.negative, TemperedPCD) and (reason := _tempering_unsupported_reason(settings, state)):
        return reason
    return too_large_reason(layout, source, machine.like.device)


def _tempering_unsupported_reason(settings: UpdateSettings, state: TrainState) -> str | None:
    """Return the reason why this backend is unsuitable for tempered chains, or None if it is suitable."""
    machine = state.machine
    if machine.hidden.gaussian or any(unit.gaussian for unit in machine.layers.values()):
        return "its chains are tempered, and a layer is Gaussian"
    if settings.negative.steps >= WORTH_A_GRAPH:
        return f"its tempered chains take {WORTH_A_GRAPH} or more steps per update"
    n_chains = math.prod(settings.negative.chain_shape)
    for link in machine.links.values():
        products = math.prod(link.hidden_shape) * math.prod(link.visible_shape)
        if products > 4 * link.operations and n_chains * products > _MOST_TEMPERED_PRODUCTS:
            return "its chains take many more products with full matrices than with factors"
    return None


def too_large_reason(layout: FullLayout, source: Source, device: torch.device) -> str | None:
    """Return the reason why the data is too large to be stored as operands of matrix products, or None if it fits."""
    masked = bool(source.with_masks[1]) or source.nan_is_missing  # masks take one byte per entry
    size = (4 + masked) * layout.visible * int(source.n_samples or 0)
    if device.type == "cuda" and size > _SHARE_OF_MEMORY * torch.cuda.mem_get_info(device)[1]:
        return f"its data, {size / 1e9:.1f} GB as operands, would take more than a quarter of the device's memory"
    return None
