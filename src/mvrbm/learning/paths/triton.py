"""Contrastive divergence on a GPU, a whole update in one or two launches, an epoch in a CUDA graph.

Many machines of one shape can be trained at once: they differ in their numbers alone.
"""

from __future__ import annotations

import importlib.util
import math
import os
from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from mvrbm.couplings.base import equalise_norms, squared_norms
from mvrbm.learning.paths.flat import Packing, Plan, why_not
from mvrbm.learning.paths.graphs import no_whole_passes, too_large
from mvrbm.learning.samplers import PCD

if TYPE_CHECKING:
    from mvrbm.learning.data import Source
    from mvrbm.learning.trainer import Trainer

# Sizes up to this go into one tile a product; larger ones are cut into tiles of it.
_LARGEST_TILE = 64
# With more programs than this a multiprocessor, the card is full, and many small ones beat fewer wide ones.
_FULL = 2
# Programs of two warps that a multiprocessor has registers for; of all, a few are held by the launch that comes next.
_PROGRAMS_AT_A_TIME, _FREE = 4, 0.95
# At 256 products of one sample by one program are slower than plain PyTorch's of whole batches, at 128 much faster.
_WIDEST = 128
# Launches a graph: enough for its own launch not to count, few enough to be captured quickly.
_MOST_LAUNCHES = 1000
_APPLY_BLOCK = 256
# Every model's parameters begin at a multiple of so many: numbers are read four at a time.
_ALIGNMENT = 16
# To look at the parameters is to wait for the card.
_UPDATES_UNCHECKED = 5000


class FusedPasses:
    """Makes passes over data by the kernels of :mod:`mvrbm.learning.paths.triton_kernels`.

    Parameters
    ----------
    trainers : sequence of Trainer
        One, or several whose machines have the same shapes, units and kind of chains.
    sources : sequence of Source
        The data of each. They may be one and the same.
    precision : {"fp16", "tf32", "tf32x3", "ieee"}, optional
        Of the products. The first two have operands of 11 bits and sums in float32, on tensor cores; states above
        65,504 do not fit fp16. The last is plain float32. By default fp16 where all units are Bernoulli, whose
        states are at most 1, and tf32 otherwise. Layers that are cut into tiles have tf32 for fp16.

    Attributes
    ----------
    diverged : list of bool
        Which of several machines have left the finite numbers, as far as was looked.
    n_samples : int
        Samples of a pass.
    """

    diverged: list[bool]

    def __init__(self, trainers: Sequence[Trainer], sources: Sequence[Source], *, precision: str | None = None) -> None:
        from mvrbm.learning.paths import triton_kernels as triton_cd

        self._kernels = triton_cd
        self.trainers = list(trainers)
        first = self.trainers[0]
        units = [first.machine.hidden, *first.machine.layers.values()]
        precision = precision or ("tf32" if any(unit.gaussian for unit in units) else "fp16")
        self._halves, self._precision = precision == "fp16", "tf32" if precision == "fp16" else precision
        rank = max(int(link.rank) for t in self.trainers for link in t.machine.links.values())  # type: ignore[arg-type]
        plan = self.plan = Plan.of(first.machine, rank if len(self.trainers) > 1 else None)
        self._kept: tuple[tuple[Tensor, ...], int] = ((), 0)
        self._packings = [Packing(trainer, plan) for trainer in self.trainers]
        self._device = first.machine.like.device
        self._graphed = self._device.type == "cuda"
        # Launches overlap on Hopper and later.
        self._overlapping = (
            self._graphed and torch.version.hip is None and torch.cuda.get_device_capability(self._device) >= (9, 0)
        )
        self._graphs: dict[tuple[int, int], torch.cuda.CUDAGraph] = {}
        negative = first.recipe.negative
        self._persistent, self._steps = isinstance(negative, PCD), int(negative.steps)  # type: ignore[attr-defined]
        self.n_samples = int(sources[0].n_samples or 0)
        self.batch_size = min(first.recipe.batch_size, self.n_samples)
        self._normalised = first.recipe.normalised
        self._n_chains = negative.n_chains if isinstance(negative, PCD) else self.batch_size
        self._load_data(sources)
        self._allocate()
        self._choose()
        self.pull()
        self._check()

    # -- memory -----------------------------------------------------------------------------------

    def _load_data(self, sources: Sequence[Source]) -> None:
        """Bring the data to the device, bytes as bytes; once, if all models share it."""
        self._shared = all(source is sources[0] for source in sources)
        self._data, self._byte_scales = [], []
        for layer in self.plan.layers:
            unit = self.trainers[0].machine.layers[layer.name]
            parts = [source.whole[layer.name] for source in (sources[:1] if self._shared else sources)]
            tensors = [torch.as_tensor(part) for part in parts]
            is_bytes = all(tensor.dtype == torch.uint8 for tensor in tensors)
            if not is_bytes:
                tensors = [
                    tensor.float() * unit.byte_scale if tensor.dtype == torch.uint8 else tensor for tensor in tensors
                ]
            kind = torch.uint8 if is_bytes else torch.float32
            stacked = [tensor.to(device=self._device, dtype=kind).reshape(-1) for tensor in tensors]
            self._data.append(stacked[0].contiguous() if self._shared else torch.cat(stacked))
            self._byte_scales.append(float(unit.byte_scale) if is_bytes else 1.0)

    def _allocate(self) -> None:
        models, size, like = len(self.trainers), self.plan.size, self.trainers[0].machine.like
        self._stride = -(-size // _ALIGNMENT) * _ALIGNMENT
        # Two of each and three gradients, for launches that read one and write another; the first is what counts.
        self._all_params, self._all_momenta = like.new_zeros(2, 2, models, self._stride)[..., :size]
        self._all_gradients = like.new_zeros(3, models, self._stride)[..., :size]
        self._params, self._momenta, self._gradients = (
            several[0] for several in (self._all_params, self._all_momenta, self._all_gradients)
        )
        self._n_gains = 2 * len(self.plan.layers)
        room = -(-models * self._n_gains // _ALIGNMENT) * _ALIGNMENT
        self._all_gains = like.new_ones(2, room)[:, : models * self._n_gains].unflatten(1, (models, self._n_gains))
        self._rates = like.new_zeros(models, self._kernels.N_RATES.value)
        self._clock = torch.zeros((), dtype=torch.int64, device=self._device)
        self._seeds = torch.tensor([trainer.rng.key for trainer in self.trainers], device=self._device)
        self._order = torch.zeros(models, self.n_samples, dtype=torch.int32, device=self._device)
        self._multiplier = like.new_zeros(models, self._stride)[:, :size]
        self._multiplier.copy_(torch.stack([packing.multiplier for packing in self._packings]))
        self._gain_of = self._packings[0].gain_of
        self._load_scale = torch.stack([packing.load_scale for packing in self._packings])
        self._load_shift = torch.stack([packing.load_shift for packing in self._packings])
        self._chains = like.new_zeros(models, self._n_chains, self.plan.states)
        self._recorded, self._recorded_size = like.new_zeros(1), 0  # tests put numbers here, so many an update

    def _choose(self) -> None:
        """Decide which kernel, and which tiles."""
        plan, tile_of = self.plan, self._kernels.tile_of
        first = plan.layers[0]
        sizes = (first.rows, first.columns, plan.hidden_rows, plan.hidden_columns)
        self._tiles = tuple(tile_of(size) for size in sizes)
        self._small = len(plan.layers) == 1 and max(self._tiles) <= _LARGEST_TILE
        self._rows = max(self.batch_size, self._n_chains if self._persistent else 0)
        processors = math.inf
        if self._graphed:
            processors = torch.cuda.get_device_properties(self._device).multi_processor_count
        full = self._rows * len(self.trainers) > _FULL * processors
        # What fits the registers of two warps: small tiles, and products that take no further registers.
        light = self._small and max(self._tiles) <= 32 and self._precision == "tf32"
        self._warps = 2 if light and full else 4
        self._samples = 1
        if light and full and first.rank == 1:
            at_a_time = int(_FREE * _PROGRAMS_AT_A_TIME * processors)
            self._samples = fewest_waves(self._rows, len(self.trainers), at_a_time)
        # On a card that is not full, every program makes the step for itself: one launch less an update.
        self._late_steps = light and first.rank == 1 and not full
        if not self._small:
            half = max(layer.rows for layer in plan.layers) * plan.hidden_columns
            self._half = half
            room = 2 * plan.states + 3 * plan.hidden_area + half
            self._scratch = self._params.new_zeros(len(self.trainers) * self._rows * room)
            self._tile = min(_LARGEST_TILE, max(tile_of(max(layer.rows, layer.columns)) for layer in plan.layers))

    # -- to and from the trainers -----------------------------------------------------------------

    def pull(self) -> None:
        """Take over parameters, momenta, rates and chains from the trainers."""
        for number, (trainer, packing) in enumerate(zip(self.trainers, self._packings, strict=True)):
            packing.pack(self._params[number], self._momenta[number])
            recipe = trainer.recipe
            decay = 0.0 if recipe.rate_decay is None else 1 / recipe.rate_decay
            rate = float(recipe.learning_rate or 0.0)
            row = [rate, recipe.bias_learning_rate or rate, recipe.momentum, recipe.weight_decay, decay]
            self._rates[number] = self._rates.new_tensor(row)
            if self._persistent and trainer.chains:
                for layer in self.plan.layers:
                    states = self._inward(trainer.chains[layer.name], number, layer.name)
                    self._chain_of(number, layer.name).copy_(states)

    def push(self) -> None:
        """Give parameters, momenta and chains back to the trainers."""
        self._check()
        for number, (trainer, packing) in enumerate(zip(self.trainers, self._packings, strict=True)):
            packing.unpack(self._params[number], self._momenta[number])
            if self._persistent and self._started:
                trainer.chains = {
                    layer.name: self._outward(self._chain_of(number, layer.name), number, layer.name)
                    for layer in self.plan.layers
                }

    @torch.no_grad()
    def balance(self) -> None:
        """Give the factors of each product equal norms, as the couplings do it for themselves."""
        for params in self._params:
            for U, V, _ in self.plan.split(params)[0]:
                equalise_norms([U, V], keep=0)

    def _check(self, made: int = 0) -> None:
        """Look for parameters that are not finite.

        A machine by itself goes back to where it was at the last check, and its training fails. One of many
        is left as it is, and marked: the others go on. `made` updates are not in the trainers' count yet.
        """
        self._unchecked = 0
        finite = torch.isfinite(self._params.sum(1)).tolist()
        if len(self.trainers) == 1 and not finite[0]:
            kept, update = self._kept
            self._go_back(kept)
            self._packings[0].unpack(self._params[0], self._momenta[0])
            self.trainers[0].update = update
            self.trainers[0].fail(update + 1)
        self.diverged = [not one for one in finite]
        self._kept = self._snapshot(), self.trainers[0].update + made

    def _snapshot(self) -> tuple[Tensor, ...]:
        return self._params.clone(), self._momenta.clone(), self._chains.clone()

    def _go_back(self, kept: tuple[Tensor, ...]) -> None:
        for place, tensor in zip((self._params, self._momenta, self._chains), kept, strict=True):
            place.copy_(tensor)

    @property
    def _started(self) -> bool:
        return not self._persistent or self.trainers[0].update > 0

    def _chain_of(self, number: int, name: str) -> Tensor:
        layer = next(layer for layer in self.plan.layers if layer.name == name)
        return self._chains[number, :, layer.states_at : layer.states_at + layer.area]

    def _inward(self, states: Tensor, number: int, name: str) -> Tensor:
        scale, shift = self._affine(number, name)
        return states.reshape(len(states), -1) * scale - shift

    def _outward(self, states: Tensor, number: int, name: str) -> Tensor:
        scale, shift = self._affine(number, name)
        unit = self.trainers[number].machine.layers[name]
        return ((states + shift) / scale).reshape(-1, *unit.shape)

    def _affine(self, number: int, name: str) -> tuple[Tensor, Tensor]:
        layer = next(layer for layer in self.plan.layers if layer.name == name)
        part = slice(layer.states_at, layer.states_at + layer.area)
        return self._load_scale[number, part], self._load_shift[number, part]

    # -- a pass -----------------------------------------------------------------------------------

    @torch.no_grad()
    def one_pass(self, orders: Sequence[Tensor], start: int = 0) -> int:
        """Go once through the data from batch `start` on, and return the number of updates.

        Parameters
        ----------
        orders : sequence of Tensor (n_samples,)
            The order in which each model sees its samples.
        start : int
            Batches to leave out.
        """
        n_batches = -(-self.n_samples // self.batch_size)
        done = start
        for number, order in enumerate(orders):
            self._order[number].copy_(order, non_blocking=True)
        if self._persistent and self.trainers[0].update == 0 and start == 0 and not self.trainers[0].chains:
            self._start_chains()
        self._clock.fill_(self.trainers[0].update - start)
        while done < n_batches:
            count = min(_MOST_LAUNCHES, n_batches - done)
            if self._graphed:
                self._replay(done, count)
            else:
                self._launch_all(done, count)
            done += count
        self._unchecked += n_batches - start
        if self._unchecked >= _UPDATES_UNCHECKED:
            self._check(n_batches - start)
        return n_batches - start

    def _start_chains(self) -> None:
        """Start persistent chains at the first batch, going round it."""
        for number in range(len(self.trainers)):
            rows = self._order[number, : self.batch_size].long()
            rows = rows[torch.arange(self._n_chains, device=self._device) % self.batch_size]
            for layer, data, scale in zip(self.plan.layers, self._data, self._byte_scales, strict=True):
                block = data.view(-1, self.n_samples, layer.area)[0 if self._shared else number]
                states = self._inward(block[rows].float() * scale, number, layer.name)
                self._chain_of(number, layer.name).copy_(states)

    def _replay(self, first: int, count: int) -> None:
        key = (first, count)
        if key not in self._graphs:
            self._warm_up(first, count)
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                self._launch_all(first, count)
            self._graphs[key] = graph
        self._graphs[key].replay()

    def _warm_up(self, first: int, count: int) -> None:
        """Compile outside the capture, and leave nothing behind."""
        kept = self._snapshot()
        self._launch_all(first, min(count, 2))
        torch.cuda.synchronize(self._device)
        self._go_back(kept)
        self._gradients.zero_()

    def _launch_all(self, first: int, count: int) -> None:
        """Launch `count` updates, batch `first` the first of them."""
        if self._late_steps:
            self._all_gradients.zero_()
        for number in range(count):
            batch = first + number
            n_valid = min(self.batch_size, self.n_samples - batch * self.batch_size)
            if self._small:
                self._launch_small(number, batch, n_valid)
            else:
                if self._normalised:
                    self._compute_gains()
                self._launch_tiled(batch, n_valid)
            if not self._late_steps:
                self._launch_apply(0, batch)
        if self._late_steps:
            self._launch_apply(count, first + count - 1)

    def _launch_small(self, number: int, batch: int, n_valid: int) -> None:
        """Launch update `number` of a series of them, in which each makes the step of the one before."""
        plan, layer = self.plan, self.plan.layers[0]
        keeper = self._normalised or self._late_steps
        turn = number if self._late_steps else 0
        params, momenta, gradients, gains = (
            self._all_params, self._all_momenta, self._all_gradients, self._all_gains,
        )  # fmt: skip
        old = self._kept_by(turn - 1)
        programs = -(-self._rows // self._samples) + keeper
        self._kernels.small_step[(programs, len(self.trainers))](
            self._data[0], self._order, params[old], momenta[old], gradients[(turn - 1) % 3], gradients[turn % 3],
            params[1 - old], momenta[1 - old], gradients[(turn + 1) % 3], gains[(turn - 1) % 2], gains[turn % 2],
            self._multiplier, self._rates, self._clock, self._seeds, self._chains, self._recorded,
            self._load_scale, self._load_shift, batch, n_valid, self.n_samples,
            0 if self._shared else self.n_samples * layer.area,
            N=self.batch_size, CHAINS=self._n_chains, RANK=layer.rank,
            SAMPLES=self._samples, STRIDE=self._stride,
            I=layer.rows, J=layer.columns, K=plan.hidden_rows, L=plan.hidden_columns,
            BI=self._tiles[0], BJ=self._tiles[1], BK=self._tiles[2], BL=self._tiles[3],
            STEPS=self._steps, PERSISTENT=self._persistent, VISIBLE_GAUSSIAN=layer.gaussian,
            HIDDEN_GAUSSIAN=plan.hidden_gaussian, BYTE_SCALE=self._byte_scales[0], NORMALISED=self._normalised,
            RECORDED=self._recorded_size, PRECISION=self._precision, HALVES=self._halves, PENDING=turn > 0,
            KEEPER=keeper, PDL=self._overlapping, num_warps=self._warps, **self._launch_options(),
        )  # fmt: skip

    @staticmethod
    def _kept_by(turn: int) -> int:
        """Which of the two sets of parameters update `turn` of a series leaves: its step is that of the one before."""
        return max(turn, 0) % 2

    def _launch_tiled(self, batch: int, n_valid: int) -> None:
        plan = self.plan
        layers = tuple(
            (p.rows, p.columns, p.rank, p.gaussian, p.parameters_at, p.states_at, scale)
            for p, scale in zip(plan.layers, self._byte_scales, strict=True)
        )
        self._kernels.tiled_step[(self._rows, len(self.trainers))](
            tuple(self._data), self._order, self._params, self._gradients, self._clock, self._seeds, self._chains,
            self._recorded, self._scratch, self._load_scale, self._load_shift, batch, n_valid, self.n_samples,
            N=self.batch_size, CHAINS=self._n_chains, SIZE=plan.size, STRIDE=self._stride, STATES=plan.states,
            HALF=self._half, K=plan.hidden_rows, L=plan.hidden_columns, LAYERS=layers,
            HIDDEN_GAUSSIAN=plan.hidden_gaussian, STEPS=self._steps, PERSISTENT=self._persistent,
            SHARED_DATA=self._shared, RECORDED=self._recorded_size, BLOCK=self._tile,
            PRECISION=self._precision, num_warps=8,
        )  # fmt: skip

    def _launch_apply(self, turn: int, batch: int) -> None:
        """Make the step of batch `batch`, as update `turn` of a series would; parameters go to the first set."""
        size, old = self.plan.size, self._kept_by(turn - 1)
        self._kernels.apply[(self._kernels.n_programs(size, _APPLY_BLOCK), len(self.trainers))](
            self._all_params[old], self._all_momenta[old], self._all_gradients[max(turn - 1, 0) % 3], self._params,
            self._momenta, self._all_gains[max(turn - 1, 0) % 2], self._gain_of, self._multiplier, self._rates,
            self._clock, batch, SIZE=size, STRIDE=self._stride, N_GAINS=self._n_gains, NORMALISED=self._normalised,
            BLOCK=_APPLY_BLOCK, PDL=self._overlapping and self._small, num_warps=2, **self._launch_options(),
        )  # fmt: skip

    def _launch_options(self) -> dict[str, bool]:
        return {"launch_pdl": True} if self._overlapping and self._small else {}

    def _compute_gains(self) -> None:
        """By how much the other factor amplifies a step of each, as `Kronecker.gains` has it."""
        for number in range(len(self.trainers)):
            layers, _ = self.plan.split(self._params[number])
            for m, (U, V, _) in enumerate(layers):
                self._all_gains[0, number, 2 * m].copy_(squared_norms(V).sum())
                self._all_gains[0, number, 2 * m + 1].copy_(squared_norms(U).sum())


def fewest_waves(rows: int, models: int, at_a_time: int) -> int:
    """Samples a program, such that a card that holds so many programs at a time is soonest done with all.

    Parameters
    ----------
    rows : int
        Samples of a model.
    models : int
        Models.
    at_a_time : int
        Programs that the card holds.
    """

    def time(samples: int) -> float:
        programs = -(-rows // samples) * models
        return -(-programs // at_a_time) * (samples + 0.5)  # a program begins and ends with half a sample's work

    return min(range(1, rows + 1), key=time)


def available(device: torch.device) -> bool:
    """Whether these kernels can run there: on a GPU, or anywhere in Triton's interpreter."""
    wanted = device.type == "cuda" or os.environ.get("TRITON_INTERPRET") == "1"
    return wanted and importlib.util.find_spec("triton") is not None


def refuses(trainer: Trainer, source: Source) -> str | None:
    """Return why these kernels cannot do a training, None if they can."""
    like = trainer.machine.like
    if like.dtype != torch.float32:
        return f"its parameters are {like.dtype}"
    if not available(like.device):
        return f"there is no Triton for {like.device.type}"
    reason = no_whole_passes(trainer, source) or why_not(trainer) or too_large(source, like.device)
    units = [trainer.machine.hidden, *trainer.machine.layers.values()]
    if reason is None and max(max(unit.shape) for unit in units) > _WIDEST:
        reason = f"it has matrices wider than {_WIDEST}"
    return reason
