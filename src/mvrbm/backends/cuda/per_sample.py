"""The path for matrices on a GPU by fused Triton kernels: one or two launches per update, an epoch in a CUDA graph.

Several machines of the same shapes can be trained together. The kernels are in `triton_kernels`, `stacked_kernel` and
`triton_tiled`.
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from mvrbm.backends import layout as flat
from mvrbm.backends.base import UpdateSettings
from mvrbm.backends.cuda import epochs as kernels
from mvrbm.backends.cuda.epochs import KernelBackend
from mvrbm.backends.cuda.full_layout import power_of_two
from mvrbm.backends.layout import LayerLayout, Layout, factor_gains
from mvrbm.backends.packing import Packing
from mvrbm.couplings.base import equalize_norms
from mvrbm.data.sources import Source
from mvrbm.devices import n_processors
from mvrbm.updates.state import TrainState

# Matrices up to this size are one tile per product; larger ones are cut into tiles of this size.
_LARGEST_TILE = 64
# With more programs per multiprocessor than this the GPU is full: many small programs are faster than fewer wide ones.
_FULL = 2
# Programs of two warps that a multiprocessor has registers for; the next launch already holds a few of them.
_PROGRAMS_PER_PROCESSOR, _FREE = 4, 0.95
# At 256, products of one sample by one program are slower than PyTorch's of whole batches; at 128, much faster.
_WIDEST = 128
_APPLY_BLOCK = 256
# Products of a coupling that a program takes side by side; more of them do not fit the registers.
_MOST_RANKS = 8
# Programs with several products that a multiprocessor has registers for.
_PROGRAMS_OF_TERMS = 2
# Arrays as large as a factor of all ranks that a program has in shared memory: 4.1 to 6.5, as compiled for Hopper.
_KEPT = 7
# Categories of a label, whose weights a program holds in registers while it draws one, and tiles that leave room.
_MOST_CLASSES, _LARGEST_TILE_WITH_LABEL = 16, 32
# Every model's parameters begin at a multiple of this: numbers are read four at a time.
_ALIGNMENT = 16


class _TransposedPacking(Packing):
    """As a packing, with the weights of labels transposed: (classes, hidden units), a category's side by side."""

    @torch.no_grad()
    def pack(self, state: TrainState, params: Tensor, momenta: Tensor) -> None:
        super().pack(state, params, momenta)
        for weights, classes in self._of_labels(params, momenta):
            weights.copy_(weights.view(-1, classes).t().flatten())

    @torch.no_grad()
    def unpack(self, state: TrainState, params: Tensor, momenta: Tensor) -> None:
        params, momenta = params.clone(), momenta.clone()
        for weights, classes in self._of_labels(params, momenta):
            weights.copy_(weights.view(classes, -1).t().flatten())
        super().unpack(state, params, momenta)

    def _of_labels(self, *arrays: Tensor) -> Iterator[tuple[Tensor, int]]:
        """Yield the weights of each label in flat arrays, and its number of classes."""
        for p in self.layout.layers:
            if p.is_label:
                for array in arrays:
                    yield array[p.parameters_at :][: self.layout.hidden_area * p.area], p.area


class PerSampleBackend(KernelBackend):
    """Computes epochs by fused kernels, of one state or of several with machines of the same shapes, units and chains.

    The precision of the products is "fp16", "tf32", "tf32x3" or "ieee". The first two have operands of 11 bits and sums
    in float32, on tensor cores; states above 65,504 do not fit fp16. The last is plain float32. The default is fp16
    where no units are Gaussian, so that states are at most 1, and tf32 otherwise. Layers that are cut into tiles use
    tf32 instead of fp16.
    """

    updates_per_graph = 1000
    _packings: list[Packing]
    _chain_dtype = torch.float32
    _by_terms = False

    def __init__(
        self,
        tasks: Sequence[UpdateSettings],
        states: Sequence[TrainState],
        sources: Sequence[Source],
        *,
        precision: str | None = None,
    ) -> None:
        from mvrbm.backends.cuda import per_sample_kernels as triton_kernels
        from mvrbm.backends.cuda import stacked_kernel
        from mvrbm.backends.cuda import tiled as triton_tiled

        super().__init__(tasks, states, sources)
        self._kernels, self._tiled, self._stacked_kernel = triton_kernels, triton_tiled, stacked_kernel
        first = states[0]
        precision = precision or kernels.default_precision(first.machine)
        self._halves, self._precision = precision == "fp16", "tf32" if precision == "fp16" else precision
        rank = max(layer.rank for state in states for layer in Layout.of(state.machine).layers)
        plan = self.plan = Layout.of(first.machine, rank if self._models > 1 else None)
        self._packings = [_TransposedPacking(state, plan, normalized=self._normalized) for state in states]
        self._load_data(states, sources)
        self._choose()
        self._allocate(states)
        self.load(states)
        self._check(states)

    def _load_data(self, states: Sequence[TrainState], sources: Sequence[Source]) -> None:
        """Copy the data to the device, bytes as bytes; once, if all models share it."""
        self._data, self._byte_scales = [], []
        self._labels = torch.zeros(1, dtype=torch.int32, device=self._device)  # the category of every sample
        for layer in self.plan.layers:
            scale = float(states[0].machine.layers[layer.name].byte_scale)
            parts = [source.whole[layer.name] for source in (sources[:1] if self._shared else sources)]
            tensors = [torch.as_tensor(part) for part in parts]
            is_bytes = all(tensor.dtype == torch.uint8 for tensor in tensors)
            if not is_bytes:
                tensors = [some.float() * scale if some.dtype == torch.uint8 else some.float() for some in tensors]
            stacked = [tensor.to(self._device).reshape(-1) for tensor in tensors]
            self._data.append(stacked[0].contiguous() if self._shared else torch.cat(stacked))
            self._byte_scales.append(scale if is_bytes else 1.0)
            if layer.is_label:
                self._labels = self._data[-1].view(-1, layer.area).float().argmax(1).to(torch.int32)

    def _allocate(self, states: Sequence[TrainState]) -> None:
        models, size, like = self._models, self.plan.size, states[0].machine.like
        self._stride = -(-size // _ALIGNMENT) * _ALIGNMENT
        # Two of each and three gradients: launches read one and write another. The first is current between launches.
        self._all_params, self._all_momenta = like.new_zeros(2, 2, models, self._stride)[..., :size]
        self._all_gradients = like.new_zeros(3, models, self._stride)[..., :size]
        self._params, self._momenta, self._gradients = self._all_params[0], self._all_momenta[0], self._all_gradients[0]
        self._n_gains = sum(len(layer.factors) for layer in self.plan.layers if not layer.is_label)
        room = -(-models * self._n_gains * self._stacked // _ALIGNMENT) * _ALIGNMENT
        gains = like.new_zeros(2, room)[:, : models * self._n_gains * self._stacked]
        self._all_gains = gains.unflatten(1, (models, self._n_gains, self._stacked))
        # The largest entries of each factor, by which operands of 16 bits are divided: one from each program of a step.
        blocks = power_of_two(self._kernels.n_programs(size, _APPLY_BLOCK)) if self._by_terms and self._halves else 0
        self._sizes = like.new_zeros(models, self._n_gains, blocks)
        self._rates = self.rates()
        self._clock = torch.zeros((), dtype=torch.int64, device=self._device)
        self._multiplier = like.new_zeros(models, self._stride)[:, :size]
        self._multiplier.copy_(torch.stack([packing.multiplier for packing in self._packings]))
        # Number of the factor. Biases have -1; weights of a label, which have no gain, the number after all factors.
        self._gain_of = torch.full((size,), -1, dtype=torch.int32, device=self._device)
        numbers = iter(range(self._n_gains))
        for layer, (*factors, _) in zip(self.plan.layers, self.plan.split(self._gain_of)[0], strict=True):
            for factor in factors:
                factor.fill_(self._n_gains if layer.is_label else next(numbers))
        self._load_scale = torch.stack([packing.affine[0] for packing in self._packings])
        self._load_shift = torch.stack([packing.affine[1] for packing in self._packings])
        self._chains = like.new_zeros(models, self._n_chains, self.plan.states, dtype=self._chain_dtype)

    def _choose(self) -> None:
        """Choose the kernel and its tiles."""
        plan = self.plan
        self._small = fits_a_program(plan, self._halves, self._device)
        image, label = self._image, self._label = image_and_label(plan)
        if label is not None and not self._small:
            raise ValueError("the products of a machine with a label do not fit one program")
        sizes = (image.rows, image.columns, plan.hidden_rows, plan.hidden_columns)
        self._tiles = tuple(_tile_of(size) for size in sizes)
        # Terms that a program takes side by side, a power of two, and whether it is a kernel that does.
        self._stacked = power_of_two(image.rank) if self._small else 1
        self._by_terms = self._small and (image.rank > 1 or label is not None)
        if self._small and self._halves:
            self._chain_dtype = torch.float16  # zeros and ones: half the traffic
        self._rows = max(self.batch_size, self._n_chains if self._persistent else 0)
        processors = n_processors(self._device) if self._graphed else 10**9
        full = self._rows * self._models > _FULL * processors
        # Fits the registers of two warps: small tiles, and products that take no further registers.
        light = self._small and max(self._tiles) <= 32 and self._precision == "tf32"
        self._warps = 2 if light and full and not self._by_terms else 4
        self._samples = 1
        if light and full:
            at_a_time = (
                _PROGRAMS_OF_TERMS * processors if self._by_terms else int(_FREE * _PROGRAMS_PER_PROCESSOR * processors)
            )
            self._samples = fewest_waves(self._rows, self._models, at_a_time)
        # On a GPU that is not full, every program makes the step for itself: one launch less per update.
        self._late_steps = light and not self._by_terms and not full
        self._options = {"launch_pdl": True} if self._overlapping and self._small else {}
        if not self._small:
            self._half = max(layer.rows for layer in plan.layers) * plan.hidden_columns
            room = 2 * plan.states + 3 * plan.hidden_area + self._half
            self._scratch = torch.zeros(self._models * self._rows * room, device=self._device)
            self._tile = min(_LARGEST_TILE, max(_tile_of(max(layer.rows, layer.columns)) for layer in plan.layers))

    @torch.no_grad()
    def balance(self, states: Sequence[TrainState]) -> None:
        for params in self._params:
            for *factors, _ in self.plan.split(params)[0]:
                equalize_norms(factors, keep=0)

    def _chain_data(self, number: int) -> dict[str, Tensor]:
        found = {}
        for layer in self.plan.layers:
            scale, shift = self._affine(number, layer)
            data = (layer.states_of(self._chains[number]) + shift) / scale
            found[layer.name] = data.reshape(-1, *layer.shape)
        return found

    def _set_chains(self, number: int, data: Mapping[str, Tensor]) -> None:
        for layer in self.plan.layers:
            scale, shift = self._affine(number, layer)
            states = data[layer.name].reshape(self._n_chains, -1) * scale - shift
            layer.states_of(self._chains[number]).copy_(states)

    def _affine(self, number: int, layer: LayerLayout) -> tuple[Tensor, Tensor]:
        return layer.states_of(self._load_scale[number]), layer.states_of(self._load_shift[number])

    # -- updates ----------------------------------------------------------------------------------

    def _start_chains(self, number: int, rows: Tensor) -> None:
        samples = {}
        for layer, data, scale in zip(self.plan.layers, self._data, self._byte_scales, strict=True):
            block = data.view(-1, self.n_samples, layer.area)[0 if self._shared else number]
            samples[layer.name] = block[self._cycle(rows)].float() * scale
        self._set_chains(number, samples)

    def _make_updates(self, first: int, count: int, update: int) -> None:
        self._clock.fill_(update - first)
        self._replay((first, count), lambda n: self._launch_all(first, n), count)

    def _launch_all(self, first: int, count: int) -> None:
        """Launch `count` updates, batch `first` the first of them."""
        if self._late_steps:
            self._all_gradients.zero_()
        if self._sizes.numel():
            self._find_sizes()
        for number in range(count):
            batch = first + number
            n_valid = min(self.batch_size, self.n_samples - batch * self.batch_size)
            if self._by_terms:
                self._launch_stacked(batch, n_valid)
            elif self._small:
                self._launch_small(number, batch, n_valid)
            else:
                if self._normalized:
                    self._compute_gains()
                self._launch_tiled(batch, n_valid)
            if not self._late_steps:
                self._launch_apply(0, batch)
        if self._late_steps:
            self._launch_apply(count, first + count - 1)

    def _find_sizes(self) -> None:
        """Find the largest entry of each factor of the matrix, as the steps that follow will do."""
        self._sizes.zero_()
        start = self._image.parameters_at
        for number, shape in enumerate(self._image.factors):
            end = start + math.prod(shape)
            self._sizes[:, number, 0] = self._params[:, start:end].abs().amax(1)
            start = end

    def _launch_small(self, number: int, batch: int, n_valid: int) -> None:
        """Launch update `number` of a series, in which each update makes the step of the one before."""
        # Two at a time where there is room; on a full GPU one more would come after all others.
        keepers = 2 if self._late_steps else 1 if self._normalized else 0
        turn = number if self._late_steps else 0
        params, momenta, gradients, gains = self._all_params, self._all_momenta, self._all_gradients, self._all_gains
        old = max(turn - 1, 0) % 2  # the set of parameters that is current
        programs = -(-self._rows // self._samples) + keepers
        self._kernels.small_step[(programs, self._models)](
            self._data[0], self._order, params[old], momenta[old], gradients[(turn - 1) % 3], gradients[turn % 3],
            params[1 - old], momenta[1 - old], gradients[(turn + 1) % 3], gains[(turn - 1) % 2], gains[turn % 2],
            self._multiplier, self._rates, self._clock, self._seeds, self._chains, self._recorded,
            self._load_scale, self._load_shift, batch, n_valid, self.n_samples,
            0 if self._shared else self.n_samples * self._image.area, PENDING=turn > 0, KEEPERS=keepers,
            PDL=self._overlapping, **self._how(),
        )  # fmt: skip

    def _how(self) -> dict[str, Any]:
        """Return what both kernels for small matrices are compiled for."""
        plan, layer, (BI, BJ, BK, BL) = self.plan, self._image, self._tiles
        return {
            "N": self.batch_size, "CHAINS": self._n_chains, "SAMPLES": self._samples, "STRIDE": self._stride,
            "I": layer.rows, "J": layer.columns, "K": plan.hidden_rows, "L": plan.hidden_columns, "BI": BI, "BJ": BJ,
            "BK": BK, "BL": BL, "STEPS": self._steps, "PERSISTENT": self._persistent,
            "VISIBLE_GAUSSIAN": layer.gaussian, "HIDDEN_GAUSSIAN": plan.hidden_gaussian,
            "BYTE_SCALE": self._byte_scales[plan.layers.index(layer)], "NORMALIZED": self._normalized,
            "RECORDED": self._recorded_size, "PRECISION": self._precision, "HALVES": self._halves,
            "num_warps": self._warps, **self._options,
        }  # fmt: skip

    def _launch_stacked(self, batch: int, n_valid: int) -> None:
        """Launch the gradient of an update of a coupling of several products, or of a machine with a label."""
        plan, layer, label = self.plan, self._image, self._label
        described: tuple[int, ...] = ()
        if label is not None:
            places = label.parameters_at, label.states_at, plan.hidden_area, int(label.states_at < layer.states_at)
            described = label.area, power_of_two(label.area), *places
        programs = -(-self._rows // self._samples) + (2 * self._stacked if self._normalized else 0)
        self._stacked_kernel.stacked_step[(programs, self._models)](
            self._data[plan.layers.index(layer)], self._labels, self._order, self._params, self._gradients,
            self._all_gains[0], self._sizes, self._clock, self._seeds, self._chains, self._recorded, self._load_scale,
            self._load_shift, batch, n_valid, self.n_samples, 0 if self._shared else self.n_samples * layer.area,
            0 if self._shared else self.n_samples, RANK=layer.rank, R=self._stacked, STATES=plan.states,
            AT_U=layer.parameters_at, AT_C=plan.size - plan.hidden_area, AT_X=layer.states_at,
            BLOCKS=max(1, self._sizes.shape[2]), LABEL=described, EDGE=max(self._tiles), PDL=bool(self._options),
            **self._how(),
        )  # fmt: skip

    def _launch_tiled(self, batch: int, n_valid: int) -> None:
        plan = self.plan
        layers = tuple(
            (p.rows, p.columns, p.rank, p.gaussian, p.parameters_at, p.states_at, scale)
            for p, scale in zip(plan.layers, self._byte_scales, strict=True)
        )
        self._tiled.tiled_step[(self._rows, self._models)](
            tuple(self._data), self._order, self._params, self._gradients, self._clock, self._seeds, self._chains,
            self._recorded, self._scratch, self._load_scale, self._load_shift, batch, n_valid, self.n_samples,
            N=self.batch_size, CHAINS=self._n_chains, SIZE=plan.size, STRIDE=self._stride, STATES=plan.states,
            HALF=self._half, K=plan.hidden_rows, L=plan.hidden_columns, LAYERS=layers,
            HIDDEN_GAUSSIAN=plan.hidden_gaussian, STEPS=self._steps, PERSISTENT=self._persistent,
            SHARED_DATA=self._shared, RECORDED=self._recorded_size, BLOCK=self._tile,
            PRECISION=self._precision, num_warps=8,
        )  # fmt: skip

    def _launch_apply(self, turn: int, batch: int) -> None:
        """Launch the step of batch `batch`, as update `turn` of a series would; parameters go to the first set."""
        size, last = self.plan.size, max(turn - 1, 0)
        self._kernels.apply[(self._kernels.n_programs(size, _APPLY_BLOCK), self._models)](
            self._all_params[last % 2], self._all_momenta[last % 2], self._all_gradients[last % 3], self._params,
            self._momenta, self._all_gains[last % 2], self._sizes, self._gain_of, self._multiplier, self._rates,
            self._clock, batch, SIZE=size, STRIDE=self._stride, N_GAINS=self._n_gains, TERMS=self._stacked,
            NORMALIZED=self._normalized, BLOCKS=self._sizes.shape[2], BLOCK=_APPLY_BLOCK, PDL=bool(self._options),
            num_warps=2, **self._options,
        )  # fmt: skip

    def _compute_gains(self) -> None:
        """Compute the gains of all factors, as `Kronecker.gains` does."""
        for gains, params in zip(self._all_gains[0], self._params, strict=True):
            found = factor_gains([factors for *factors, _ in self.plan.split(params)[0]])
            gains[:, 0] = torch.stack(found)


def image_and_label(plan: Layout) -> tuple[LayerLayout, LayerLayout | None]:
    """Return the first layer that is a matrix, and the first that is a label, if there is one."""
    labels = [layer for layer in plan.layers if layer.is_label]
    return next(layer for layer in plan.layers if not layer.is_label), labels[0] if labels else None


def fits_a_program(plan: Layout, halves: bool, device: torch.device) -> bool:
    """Return whether a program has room for a sample of one matrix, and at most one label, and for all its products."""
    image, label = image_and_label(plan)
    if len(plan.layers) > (1 if label is None else 2) or (label is not None and label.area > _MOST_CLASSES):
        return False
    tile = max(map(_tile_of, (image.rows, image.columns, plan.hidden_rows, plan.hidden_columns)))
    if label is not None and tile > _LARGEST_TILE_WITH_LABEL:
        return False
    factor = power_of_two(image.rank) * tile**2 * (2 if halves else 4)  # bytes
    fits = image.rank <= _MOST_RANKS and _KEPT * factor <= _shared_memory(device)
    return tile <= _LARGEST_TILE and (fits or (image.rank == 1 and label is None))


def _tile_of(size: int) -> int:
    """Return the smallest power of two that a product accepts and that an axis of this size fits into."""
    return max(16, power_of_two(size))


def _shared_memory(device: torch.device) -> int:
    """Return the bytes of shared memory of a program; without a GPU, in tests, those of an H200."""
    if device.type != "cuda":
        return 227 * 2**10
    from triton.runtime import driver

    number = torch.cuda.current_device() if device.index is None else device.index
    return int(driver.active.utils.get_device_properties(number)["max_shared_mem"])


def fewest_waves(rows: int, models: int, at_a_time: int) -> int:
    """Return the number of samples per program with which the GPU finishes soonest.

    Each model has `rows` samples, and `at_a_time` programs run on the GPU at a time.
    """

    def time(samples: int) -> float:
        programs = -(-rows // samples) * models
        return -(-programs // at_a_time) * (samples + 0.5)  # starting and ending a program costs half a sample's work

    return min(range(1, rows + 1), key=time)


def unsupported_reason(task: UpdateSettings, state: TrainState, source: Source) -> str | None:
    """Return why the kernels cannot compute a training run's updates, None if they can."""
    reason = kernels.unsupported_reason(task, state, source) or flat.unsupported_reason(task, state)
    reason = reason or flat.not_only_matrices_reason(state)
    if reason is not None:
        return reason
    plan, units = Layout.of(state.machine), [state.machine.hidden, *state.machine.layers.values()]
    if any(layer.is_label for layer in plan.layers):
        halves = kernels.default_precision(state.machine) == "fp16"
        if all(layer.is_label for layer in plan.layers) or not fits_a_program(plan, halves, state.machine.like.device):
            return "it has labels, but is not one label of few categories next to one small matrix"
        return None
    too_wide = max(max(unit.shape) for unit in units) > _WIDEST
    return f"it has matrices wider than {_WIDEST}" if too_wide else None


def slower_reason(plan: Layout, rows: int, models: int, processors: int) -> str | None:
    """Return why products with full matrices are faster, None if they are not.

    Each of `models` machines has `rows` samples or chains per update. Times are in microseconds, as measured on an
    H200: those of one program per sample grow with the rank and the number of programs that a processor has to run one
    after another, those of full matrices hardly.
    """
    first, label = image_and_label(plan)
    alone = len(plan.layers) == (1 if label is None else 2)
    small = alone and max(first.rows, first.columns, plan.hidden_rows, plan.hidden_columns) <= 32
    if not small or first.rank > _MOST_RANKS:
        K, L = plan.hidden_rows, plan.hidden_columns
        products = sum(p.rank * (K * p.area + K * L * p.columns) for p in plan.layers)
        entries = plan.hidden_area * plan.states
        return "the full matrices have few more entries than products take" if entries <= 4 * products else None
    waves = -(-rows * models // (_PROGRAMS_OF_TERMS * processors))
    by_sample, full = 5 + 1.6 * first.rank * waves, 18 + 0.025 * rows * models
    return "it takes many programs per processor" if first.rank > 1 and by_sample > full else None
