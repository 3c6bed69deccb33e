"""The path for a GPU that forms couplings as full matrices: six to eight launches per update, many updates in a graph.

It is for couplings of matrices of higher rank and for dense ones, for several visible layers, categories among them,
for centering of all layers and for missing entries, each step of whose draws takes two more launches. Kernels are in
`full_kernels`, and those of learned variances in `full_variances`.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from mvrbm.backends import layout as flat
from mvrbm.backends.base import UpdateSettings
from mvrbm.backends.cuda import epochs as kernels
from mvrbm.backends.cuda.epochs import KernelBackend
from mvrbm.backends.cuda.full_layout import TILE, FullLayout, FullPacking, factor_rank, padded, power_of_two
from mvrbm.couplings.base import equalize_norms
from mvrbm.data.sources import Source, masks_of
from mvrbm.devices import n_processors
from mvrbm.updates.negative import CD, PCD, NegativePhase
from mvrbm.updates.state import TrainState

_ROWS = 128  # all tiles of rows divide this
# Entries of W: more than this leave the second-level cache.
_LARGEST = 2**24
# Factors up to this size have a kernel for their norms.
_WIDEST_FACTOR = 64
_MOST_CATEGORIES = 64
# Columns whose squares every program adds up.
_MOST_VARIANCES = 8192
# Compute capability of the first GPUs (Ampere) with shared memory for the stages of a product.
_OLDEST = (8, 0)
# Fraction of the device's memory for the data, each entry as an operand.
_SHARE_OF_MEMORY = 0.25
_BLOCK = 512  # biases of a program
_BUSY = 0.6  # fraction of the processors that have to have a tile
_PIECE = 4096  # samples that are converted at a time


class FullMatrixBackend(KernelBackend):
    """Computes epochs by products of whole batches with full matrices.

    The precision of the products is "fp16", "tf32", "tf32x3" or "ieee", as in `PerSampleBackend`. The default is fp16 where
    all states are at most 1, and tf32 where a layer is Gaussian.
    """

    updates_per_graph = 50
    draws_missing = True
    _packings: list[FullPacking]

    def __init__(
        self,
        tasks: Sequence[UpdateSettings],
        states: Sequence[TrainState],
        sources: Sequence[Source],
        *,
        precision: str | None = None,
    ) -> None:
        from mvrbm.backends.cuda import full_kernels, full_step, full_variances

        super().__init__(tasks, states, sources)
        self._kernels, self._step_kernels, self._vary = full_kernels, full_step, full_variances.vary
        machines = [state.machine for state in states]
        first = machines[0]
        ranks = {name: max(factor_rank(machine.links[name]) for machine in machines) for name in first.layers}
        plan = self.plan = FullLayout(first, ranks)
        self._packings = [FullPacking(state, plan) for state in states]
        precision = precision or kernels.default_precision(first)
        self._dtype = torch.float16 if precision == "fp16" else torch.float32
        self._precision = "tf32" if precision == "fp16" else precision
        # Of the products that form full matrices: entries that are rounded to 16 bits need no more than tf32.
        self._exact = {"ieee": "ieee", "fp16": "tf32"}.get(precision, "tf32x3")
        self._hidden_gaussian, self._missing_steps = first.hidden.gaussian, tasks[0].missing_steps
        self._shapes = {name: unit.shape for name, unit in first.layers.items()}
        self._load_data(sources)
        self._allocate(states)
        self._choose()
        self.load(states)
        self._check(states)

    def _load_data(self, sources: Sequence[Source]) -> None:
        """Copy the data to the device as operands, once if all models share it."""
        first = self._packings[0]
        for packing in self._packings[1:]:
            for layer in self.plan.layers:
                self._shared &= bool(torch.equal(packing.scale(layer.name), first.scale(layer.name)))
        models = 1 if self._shared else self._models
        size = models, self.n_samples, self.plan.visible
        self._data = torch.zeros(size, dtype=self._dtype, device=self._device)
        self._data[..., -1] = 1
        entries = [masks_of(source) for source in sources[:models]]
        self._masked = any(entries)
        # Where the data is known; zeros are drawn.
        self._known = torch.ones(size if self._masked else 1, dtype=torch.uint8, device=self._device)
        for number, (source, known, packing) in enumerate(zip(sources, entries, self._packings, strict=False)):
            for layer in self.plan.layers:
                unit, raw = source.machine.layers[layer.name], torch.as_tensor(source.with_masks[0][layer.name])
                for start in range(0, self.n_samples, _PIECE):
                    values = unit.from_data(raw[start : start + _PIECE]).flatten(1) * packing.scale(layer.name)
                    columns = packing.columns[layer.name]
                    if layer.name in known:
                        there = known[layer.name][start : start + _PIECE].flatten(1).to(self._device)
                        self._known[number, start : start + _PIECE][:, columns] = there.to(torch.uint8)
                        values = torch.where(there, values, 0.0)
                    self._data[number, start : start + _PIECE][:, columns] = values.to(self._dtype)

    def _allocate(self, states: Sequence[TrainState]) -> None:
        plan, models, like = self.plan, self._models, states[0].machine.like
        self._stride = padded(plan.size + plan.room)
        # Two of each: an update reads one and writes the other. The first is current before and after a series.
        self._all_params, self._all_momenta = like.new_zeros(2, 2, models, self._stride)[..., : plan.size]
        self._all_gradients = like.new_zeros(2, models, self._stride)
        self._params, self._momenta = self._all_params[0], self._all_momenta[0]
        self._gradients = self._all_gradients[0, :, : plan.size]
        self._rates = self.rates()
        self._clock = torch.zeros(2, dtype=torch.int64, device=self._device)  # number of an update, and of its batch
        # Norms of the factors, each one's gain their sum.
        self._terms = power_of_two(max(1, *(layer.rank for layer in plan.layers)))
        self._all_gains = like.new_zeros(2, models, plan.n_factors, self._terms)
        self._gains = self._all_gains[0]
        multipliers = like.new_zeros(models, self._stride)
        self._multiplier = multipliers[:, : plan.size]
        for number, packing in enumerate(self._packings):
            self._multiplier[number] = packing.multiplier(self._params[number], self._normalized)
        # Rows of data, of chains and, where chains have temperatures, of the coldest, each padded with zeros.
        self._chains_at = self._coldest_at = padded(self.batch_size, _ROWS)
        if self._temperatures > 1:
            self._coldest_at += padded(self._n_chains, _ROWS)
        self._all_rows = self._coldest_at + padded(self._n_coldest, _ROWS)

        def operands(*shape: int) -> Tensor:
            return torch.zeros(models, *shape, dtype=self._dtype, device=self._device)

        self._states, self._means = operands(self._all_rows, plan.visible), operands(self._all_rows, plan.hidden)
        self._states[..., -1] = 1
        self._samples = operands(padded(max(self._n_chains, self.batch_size), _ROWS), plan.hidden)
        self._chains = self._states[:, self._chains_at : self._chains_at + self._n_chains]
        # Sums over the rows of data, and over those of chains.
        self._visible_sums, self._hidden_sums = (
            like.new_zeros(models, 2, plan.visible),
            like.new_zeros(models, 2, plan.hidden),
        )
        # Offsets of centering: of the visible layers, and a running mean of the hidden one, with a row that is positive
        # once there is one.
        self._center = like.new_zeros(models, plan.visible)
        self._all_offsets = like.new_zeros(2, models * (plan.hidden + 1))
        self._offset = self._all_offsets[0]
        # What chains at several temperatures need: see `full_exchange`.
        self._hidden_base = like.new_zeros(models, plan.hidden)
        self._visible_base = like.new_zeros(models, plan.visible)
        self._differences = like.new_zeros(models, self._n_chains if self._temperatures > 1 else 0)
        self._turns = torch.zeros(models, dtype=torch.int64, device=self._device)
        # What layers that learn their variances need: see `full_variances`.
        self._start, self._squares = like.new_zeros(models, plan.visible), like.new_zeros(models, plan.visible)
        self._ratios = like.new_ones(models, plan.visible)
        for number, packing in enumerate(self._packings):
            for name, columns in packing.columns.items():
                self._start[number, columns] = -2 * torch.log(packing.scale(name))
        self._centered = states[0].centering is not None
        # Centering compares the old matrices with the new ones.
        self._all_weights = [operands(plan.hidden, plan.visible) for _ in range(2 if self._centered else 1)]
        self._weight = self._all_weights[0]
        self._follows = bool(states[0].centering and states[0].centering.follow_hidden)

    def _choose(self) -> None:
        """Choose tiles, and describe the layers to the kernels."""
        plan = self.plan
        first, rows = plan.visible // self._kernels.GATHERED.value, list[tuple[object, ...]]()
        for layer in plan.layers:
            sizes = plan.n_hidden, layer.rows * layer.columns
            if layer.rank:
                sizes = plan.hidden_rows * layer.rows, plan.hidden_columns * layer.columns
            last = first + math.prod(-(-size // TILE) for size in sizes)
            rows.append((
                self._kernels.KINDS.index(layer.kind), layer.first, layer.width, layer.rows, layer.columns,
                layer.pitch, layer.rank, layer.parameters_at, plan.full_at(layer), layer.numbers_at,
                layer.factor * self._terms, first, last, power_of_two(layer.width) if layer.learns else 0,
            ))  # fmt: skip
            first = last
        self._layers = tuple(rows)
        self._n_tiles = first
        self._gathered = min(256, power_of_two(self.batch_size))
        edges = [max(plan.hidden_rows, plan.hidden_columns, p.rows, p.columns) for p in plan.layers if p.rank]
        self._edge = max(16, power_of_two(max(edges, default=1)))
        processors = n_processors(self._device)
        upwards = self._n_chains + (self.batch_size if self._persistent else 0)  # data and chains in one launch
        self._tile_up = tile_of(upwards, plan.hidden, self._models, processors)
        self._tile_down = tile_of(self._n_chains, plan.visible, self._models, processors)
        if any(layer.kind == "categorical" and layer.pitch > self._tile_down[1] for layer in plan.layers):
            self._tile_down = TILE, TILE  # a row of categories is part of one tile
        self._tile_gradient = tile_of(plan.hidden, plan.visible, self._models, processors)
        # Launches without large products begin before the former ends. Products, which would take its processors, begin
        # when all its programs have ended, or have no more than their results to write.
        self._options = {"PDL": True, "launch_pdl": True} if self._overlapping else {"PDL": False}
        self._product = {"BK": TILE, "num_warps": 4, "num_stages": 4, **self._options}
        # Samples between the orders of two models, and between their data.
        self._strides = self.n_samples, 0 if self._shared else self.n_samples

    # -- from and to the states -------------------------------------------------------------------

    def load(self, states: Sequence[TrainState]) -> None:
        super().load(states)
        for number, state in enumerate(states):
            if state.centering is None:
                continue
            packing = self._packings[number]
            for layer in self.plan.layers:
                center = state.centering.center[layer.name].flatten() * packing.scale(layer.name)
                self._center[number, packing.columns[layer.name]] = center
            offset = state.centering.hidden
            self._offset[self._models * self.plan.hidden + number] = 0.0 if offset is None else 1.0
            if offset is not None:
                self._offsets(self._offset)[number] = offset.flatten()
        for layer in self.plan.layers:
            if layer.learns:
                columns = slice(layer.first, layer.first + layer.width)
                log_variance = self._params[:, self.plan.variances :][:, columns]
                self._ratios[:, columns] = torch.exp(-0.5 * (log_variance - self._start[:, columns]))
        self._build(self._weight)

    def store(self, states: Sequence[TrainState]) -> list[bool]:
        diverged = super().store(states)
        for number, state in enumerate(states):
            if state.centering is not None and self._follows and state.update > 0:
                offset = self._offsets(self._offset)[number]
                state.centering.hidden = offset.reshape(1, *state.machine.hidden.shape).clone()
        return diverged

    def _offsets(self, flat: Tensor) -> Tensor:
        """Return the hidden offsets of all models, (models, hidden units)."""
        return flat[: self._models * self.plan.hidden].view(self._models, -1)[:, : self.plan.n_hidden]

    @torch.no_grad()
    def balance(self, states: Sequence[TrainState]) -> None:
        plan = self.plan
        for layer in plan.layers:
            if layer.rank:
                sizes = layer.rank * plan.hidden_rows * layer.rows, layer.rank * plan.hidden_columns * layer.columns
                for params in self._params:
                    U, V = params[layer.parameters_at : layer.parameters_at + sum(sizes)].split(sizes)
                    equalize_norms([U.view(layer.rank, -1), V.view(layer.rank, -1)], keep=0)
        self._build(self._weight)

    def _changing(self) -> tuple[Tensor, ...]:
        return *super()._changing(), self._weight, self._gains, self._offset, self._ratios

    def _chain_data(self, number: int) -> dict[str, Tensor]:
        packing, found = self._packings[number], {}
        for layer in self.plan.layers:
            values = self._chains[number][:, packing.columns[layer.name]].to(self._params) / packing.scale(layer.name)
            found[layer.name] = values.reshape(-1, *self._shapes[layer.name])
        return found

    def _set_chains(self, number: int, data: Mapping[str, Tensor]) -> None:
        packing = self._packings[number]
        for layer in self.plan.layers:
            values = data[layer.name].flatten(1) * packing.scale(layer.name)
            self._chains[number][:, packing.columns[layer.name]] = values.to(self._dtype)

    def _start_chains(self, number: int, rows: Tensor) -> None:
        samples = self._data[0 if self._shared else number][rows]
        if self._masked:  # they start at the data as the first update will draw it
            self._clock.zero_()
            self._gather(len(rows))
            self._fill(0, len(rows))
            samples = self._states[number, : len(rows)].clone()
        self._chains[number] = samples[self._cycle(torch.arange(len(rows), device=self._device))]

    # -- updates ----------------------------------------------------------------------------------

    def _make_updates(self, first: int, count: int, update: int) -> None:
        self._clock.copy_(torch.tensor([update, first]), non_blocking=True)
        sizes = [self.batch_size] * (count - 1)
        sizes.append(min(self.batch_size, self.n_samples - (first + count - 1) * self.batch_size))

        def launch(n: int) -> None:
            self._gather(sizes[0])
            for batch in range(n):
                self._launch(batch, sizes[batch], 0 if batch == n - 1 else sizes[batch + 1])
            if n % 2:
                pairs = [self._all_params, self._all_momenta, self._all_gains]
                for first, second in [*pairs, self._all_offsets, self._all_weights] if self._centered else pairs:
                    first.copy_(second)
                self._gradients.zero_()

        self._replay((count, sizes[-1]), launch, count)

    def _gather(self, n_valid: int) -> None:
        """Launch the copy of the first batch of a series."""
        self._kernels.gather[(self.plan.visible // self._kernels.GATHERED.value, self._models)](
            self._data, self._order, self._states, self._visible_sums, self._clock, 0, n_valid, *self._strides,
            N=self.batch_size, ALL_ROWS=self._all_rows, VISIBLE=self.plan.visible, BG=self._gathered,
            CENTERED=self._centered,
        )  # fmt: skip

    def _launch(self, batch: int, n_valid: int, n_next: int) -> None:
        """Launch one update, number `batch` of a series, the next of which has `n_next` samples."""
        plan = self.plan
        numbers = self._fill(batch, n_valid) if self._masked else 0
        self._launch_products(batch, n_valid, numbers)
        self._launch_gradients(batch, n_valid)
        self._build(self._weight_of(batch + 1), batch + 1, n_next, step=True)
        if self._centered:
            BM, BN = 64, 64
            self._step_kernels.compensate[(plan.hidden // BM, plan.visible // BN, self._models)](
                self._all_params[(batch + 1) % 2], self._weight_of(batch), self._weight_of(batch + 1),
                self._all_offsets[(batch + 1) % 2], self._center, HIDDEN=plan.hidden, VISIBLE=plan.visible,
                UNITS=plan.n_hidden, STRIDE=self._stride, VISIBLE_BIAS=plan.visible_bias, FOLLOWS=self._follows, BM=BM,
                BN=BN, **self._options,
            )  # fmt: skip

    def _weight_of(self, batch: int) -> Tensor:
        """Return the full matrices that update number `batch` of a series has."""
        return self._all_weights[batch % len(self._all_weights)]

    def _dimensions(self, *, coldest: bool = True) -> dict[str, Any]:
        """Sizes that all products share, of the chains that stand for the model or of those of all temperatures."""
        return {
            "CHAINS": self._n_coldest if coldest else self._n_chains, "PERSISTENT": self._persistent,
            "CHAINS_AT": self._coldest_at if coldest else self._chains_at, "ALL_ROWS": self._all_rows,
            "HIDDEN": self.plan.hidden, "VISIBLE": self.plan.visible, "STRIDE": self._stride,
        }  # fmt: skip

    def _fill(self, batch: int, n_valid: int) -> int:
        """Launch the steps that draw the missing entries of a batch, and return how many random numbers they take."""
        first = 2 * self._steps + 2  # the draws of the chains have lower numbers
        self._down(batch, n_valid, first, 0, fill=True, start=True)
        numbers = self.batch_size * self.plan.numbers
        for step in range(1, self._missing_steps + 1):
            self._up(batch, n_valid, first + 2 * step, numbers, data=True, chains=False, draw=True, summed=False)
            numbers += self.batch_size * self.plan.n_hidden
            self._down(batch, n_valid, first + 2 * step + 1, numbers, fill=True, summed=step == self._missing_steps)
            numbers += self.batch_size * self.plan.numbers
        return numbers

    def _launch_products(self, batch: int, n_valid: int, numbers: int) -> None:
        """Launch the hidden means of the data and the chains' steps by products, after so many random numbers."""
        plan = self.plan
        for step in range(self._steps):
            chains, last = self._persistent or step > 0, step == self._steps - 1
            self._up(batch, n_valid, 2 * step, numbers, data=step == 0, chains=chains, draw=True, summed=step == 0)
            numbers += self._n_chains * plan.n_hidden
            self._down(batch, n_valid, 2 * step + 1, numbers, summed=last and self._temperatures == 1)
            numbers += self._n_chains * plan.numbers
            numbers += self._end_step(batch, n_valid, step, numbers)
        self._up(batch, n_valid, 0, 0, data=False, chains=True, draw=False)

    def _end_step(self, batch: int, n_valid: int, step: int, numbers: int) -> int:
        """Launch what follows a step of the chains, and return how many random numbers it takes."""
        return 0

    def _up(
        self, batch: int, n_valid: int, number: int, numbers: int, *, data: bool, chains: bool, draw: bool,
        summed: bool = True, compare: bool = False,
    ) -> None:  # fmt: skip
        """Launch hidden means, or draws with the given number, of the data, of the chains, or of both."""
        plan, (BM, BN), coldest = self.plan, self._tile_up, not draw and not compare
        sizes = self._dimensions(coldest=coldest)
        first = 0 if data else sizes["CHAINS_AT"] // BM
        last = (self._chains_at if not chains else sizes["CHAINS_AT"] + sizes["CHAINS"] + BM - 1) // BM
        temperatures = self._temperatures if chains and not coldest else 1
        self._kernels.upwards[(last - first, plan.hidden // BN, self._models)](
            self._states, self._weight_of(batch), self._all_params[batch % 2][:, plan.hidden_bias :], self._means,
            self._samples, self._hidden_sums, self._hidden_base, self._differences, self._turns, self._recorded,
            self._seeds, self._clock, batch, n_valid, number, numbers, FIRST_TILE=first,
            DRAW_DATA=not chains and draw, DRAW_CHAINS=draw, SUMMED=self._centered and summed, COMPARE=compare,
            TEMPERATURES=temperatures, STEPS=self._steps, UNITS=plan.n_hidden, GAUSSIAN=self._hidden_gaussian,
            SAMPLE_ROWS=self._samples.shape[1], RECORDED=self._recorded_size, PRECISION=self._precision, BM=BM, BN=BN,
            **sizes, **self._product,
        )  # fmt: skip

    def _down(
        self, batch: int, n_valid: int, number: int, numbers: int, *, fill: bool = False, start: bool = False,
        summed: bool = False,
    ) -> None:  # fmt: skip
        """Launch draws of the visible layers of the chains, or of missing entries of the data."""
        plan, (BM, BN) = self.plan, self._tile_down
        rows = self.batch_size if fill else self._n_chains
        self._kernels.downwards[(-(-rows // BM), plan.visible // BN, self._models)](
            self._samples, self._weight_of(batch), self._all_params[batch % 2][:, plan.visible_bias :], self._states,
            self._visible_sums, self._visible_base, self._differences, self._turns, self._recorded, self._seeds,
            self._clock, self._ratios, self._known, self._order, batch, n_valid, number, numbers, *self._strides,
            N=self.batch_size, LAYERS=self._layers, SUMMED=self._centered and summed, VARIES=plan.varies, FILL=fill,
            START=start, TEMPERATURES=1 if fill else self._temperatures, STEPS=self._steps,
            SAMPLE_ROWS=self._samples.shape[1], RECORDED=self._recorded_size, PRECISION=self._precision, BM=BM, BN=BN,
            **self._dimensions(coldest=False), **self._product,
        )  # fmt: skip

    def _launch_gradients(self, batch: int, n_valid: int) -> None:
        """Launch the gradients of full matrices, and those of factors."""
        plan, gradients = self.plan, self._all_gradients[batch % 2]
        BM, BN = self._tile_gradient
        self._kernels.gradients[(plan.hidden // BM, plan.visible // BN, self._models)](
            self._states, self._means, self._visible_sums, self._hidden_sums, gradients,
            self._all_offsets[batch % 2], self._all_offsets[(batch + 1) % 2], self._center, self._ratios, n_valid,
            N=self.batch_size, UNITS=plan.n_hidden, L=plan.hidden_columns, VISIBLE_BIAS=plan.visible_bias,
            LAYERS=self._layers, CENTERED=self._centered, FOLLOWS=self._follows, VARIES=plan.varies, BM=BM, BN=BN,
            PRECISION=self._precision, **self._dimensions(), **self._product,
        )  # fmt: skip
        if plan.varies:
            now, new = batch % 2, (batch + 1) % 2
            params, momenta = self._all_params, self._all_momenta
            # It reads the batch, and `build` fetches the next one before it waits for the launch before it. Where that
            # is this launch, not a `contract`, it must be over by then.
            options = self._options if any(layer.rank for layer in plan.layers) else {"PDL": False}
            self._vary[(plan.visible // self._kernels.GATHERED.value, self._models)](
                params[now], momenta[now], gradients, params[new], momenta[new], self._all_gradients[new],
                self._weight_of(batch), self._states, self._center, self._start, self._ratios, self._squares,
                self._rates, self._clock, batch, n_valid, N=self.batch_size, UNITS=plan.n_hidden,
                L=plan.hidden_columns, VISIBLE_BIAS=plan.visible_bias, VARIANCES=plan.variances, LAYERS=self._layers,
                BLOCK=TILE, **self._dimensions(), **options,
            )  # fmt: skip
        for layer in plan.layers:
            if layer.rank:
                KI, LJ = plan.hidden_rows * layer.rows, plan.hidden_columns * layer.columns
                self._step_kernels.contract[(-(-KI // TILE), -(-LJ // TILE), self._models)](
                    self._all_params[batch % 2], gradients, STRIDE=self._stride, FACTORS_AT=layer.parameters_at,
                    FULL_AT=plan.full_at(layer), KI=KI, LJ=LJ, R=layer.rank,
                    RANKS=max(16, power_of_two(layer.rank)), PRECISION=self._precision, BM=TILE, BN=TILE,
                    **self._options,
                )  # fmt: skip

    def _build(self, weight: Tensor, batch: int = 0, n_next: int = 0, *, step: bool = False) -> None:
        """Launch the full matrices of the factors, after a step if there is one, and the copy of the next batch."""
        plan = self.plan
        norms = plan.n_factors * self._terms if self._normalized else 0
        biases = -(-(plan.variances - plan.visible_bias) // _BLOCK) if step else 0
        pairs = self._all_params, self._all_momenta, self._all_gradients, self._all_gains
        now, new = (batch - step) % 2, batch % 2
        self._step_kernels.build[(self._n_tiles + norms + biases, self._models)](
            *(pair[now] for pair in pairs), *(pair[new] for pair in pairs), self._multiplier, self._rates, weight,
            self._data, self._order, self._states, self._visible_sums, self._hidden_sums, self._clock, self._ratios,
            self._squares, batch, n_next, *self._strides, N=self.batch_size, ALL_ROWS=self._all_rows,
            HIDDEN=plan.hidden, VISIBLE=plan.visible,
            UNITS=plan.n_hidden, K=plan.hidden_rows, L=plan.hidden_columns, SIZE=plan.variances, STRIDE=self._stride,
            VISIBLE_BIAS=plan.visible_bias, N_GAINS=plan.n_factors * self._terms, LAYERS=self._layers, STEP=step,
            NORMALIZED=self._normalized, CENTERED=self._centered, TERMS=self._terms, PRECISION=self._exact,
            BG=self._gathered, BM=TILE, BN=TILE, EDGE=self._edge, BLOCK=_BLOCK, **self._options,
        )  # fmt: skip


def tile_of(rows: int, columns: int, models: int, processors: int) -> tuple[int, int]:
    """Return the largest tile of a product of which there are at least as many as processors, or the smallest."""
    for tile in ((64, 64), (64, 32)):
        if -(-rows // tile[0]) * -(-columns // tile[1]) * models >= _BUSY * processors:
            return tile
    return 32, 32


def unsupported_reason(
    task: UpdateSettings, state: TrainState, source: Source, negatives: tuple[type[NegativePhase], ...] = (CD, PCD)
) -> str | None:
    """Return why the kernels cannot compute a training run's updates, None if they can."""
    reason = kernels.unsupported_reason(
        task, state, source, masked=FullMatrixBackend.draws_missing
    ) or flat.unsupported_reason(task, state, negatives)
    if reason is not None:
        return reason
    machine = state.machine
    if machine.like.is_cuda and torch.cuda.get_device_capability(machine.like.device) < _OLDEST:
        return "the GPU has too little shared memory"
    for unit in machine.layers.values():
        if unit.learns_statistic and not task.recipe.normalized:
            return "it learns variances, and its gradients are not normalized"
        if unit.learns_statistic and task.recipe.centering == "full":
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
    plan = FullLayout(machine, {name: factor_rank(link) for name, link in machine.links.items()})
    if plan.hidden * plan.visible > _LARGEST:
        return f"its couplings would have more than {_LARGEST} entries as full matrices"
    return too_large_reason(plan, source, machine.like.device)


def too_large_reason(plan: FullLayout, source: Source, device: torch.device) -> str | None:
    """Return that the data is too large to be kept as operands, None if it is not."""
    masked = bool(source.with_masks[1]) or source.nan_is_missing  # a byte per entry
    size = (4 + masked) * plan.visible * int(source.n_samples or 0)
    if device.type == "cuda" and size > _SHARE_OF_MEMORY * torch.cuda.mem_get_info(device)[1]:
        return f"its data, {size / 1e9:.1f} GB as operands, would take a quarter of the device's memory"
    return None
