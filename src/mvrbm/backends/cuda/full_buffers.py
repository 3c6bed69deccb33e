"""Signature, buffers and launch settings of the backend that forms full matrices."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from mvrbm.backends.base import UpdateSettings
from mvrbm.backends.cuda.epochs import RunShape, default_precision, power_of_two
from mvrbm.backends.cuda.full_layout import TILE, FullLayout, FullPacking, factor_rank, padded
from mvrbm.data.sources import Source, masks_of
from mvrbm.devices import n_processors
from mvrbm.updates.state import TrainState

# Rows of states are padded to a multiple of this number, which all tiles of rows divide.
_ROWS = 128
# Fraction of the processors that must have a tile of a product.
_BUSY = 0.6
# Number of samples to convert at a time.
_PIECE = 4096
# Largest number of rows that `gather` copies at a time.
_MOST_GATHERED = 256


@dataclass(frozen=True)
class FullSignature:
    """The signature of the backend that forms full matrices; see `KernelBackend`."""

    run: RunShape
    layout: FullLayout
    precision: str
    hidden_gaussian: bool
    #: Whether entries of the data are missing, and the number of Gibbs steps that draw them.
    masked: bool
    missing_steps: int
    #: Whether layers are centered, and whether the offset of the hidden layer follows the data.
    centered: bool
    follows: bool

    @classmethod
    def of(
        cls,
        settings: Sequence[UpdateSettings],
        states: Sequence[TrainState],
        sources: Sequence[Source],
        precision: str | None,
    ) -> FullSignature:
        """Return the signature of a training run of several models."""
        machines = [state.machine for state in states]
        first = machines[0]
        ranks = {name: max(factor_rank(machine.links[name]) for machine in machines) for name in first.layers}
        run = RunShape.of(settings, sources)
        scales = [[machine.layers[name].inverse_scale for name in first.layers] for machine in machines]
        same_scales = all(torch.equal(one, other) for own in scales for one, other in zip(own, scales[0], strict=True))
        centering = states[0].centering
        return cls(
            run=dataclasses.replace(run, shared_data=run.shared_data and same_scales),
            layout=FullLayout.of(first, ranks),
            precision=precision or default_precision(first),
            hidden_gaussian=first.hidden.gaussian,
            masked=any(masks_of(source) for source in sources),
            missing_steps=settings[0].missing_steps,
            centered=centering is not None,
            follows=centering is not None and centering.follow_hidden,
        )

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of operands."""
        return torch.float16 if self.precision == "fp16" else torch.float32

    @property
    def dot_precision(self) -> str:
        """The precision that products of batches have in Triton."""
        return "tf32" if self.precision == "fp16" else self.precision

    @property
    def exact_precision(self) -> str:
        """The precision of the products that form full matrices. Entries that are rounded to 16 bits need only tf32."""
        return {"ieee": "ieee", "fp16": "tf32"}.get(self.precision, "tf32x3")

    @property
    def terms(self) -> int:
        """Number of norms that the gain of a factor sums, a power of two."""
        return power_of_two(max(1, *(layer.rank for layer in self.layout.layers)))


@dataclass(frozen=True)
class Operands:
    """The data of all models as operands of products, on the device; once if all models share it."""

    samples: Tensor  # (copies, n_samples, visible)
    known: Tensor  # bytes of the same shape, 0 where an entry is missing; (1,) without missing entries

    @classmethod
    def allocate(cls, signature: FullSignature, device: torch.device) -> Operands:
        """Return data of zeros, except for the column of ones."""
        run = signature.run
        shape = 1 if run.shared_data else run.models, run.n_samples, signature.layout.visible
        samples = torch.zeros(shape, dtype=signature.dtype, device=device)
        samples[..., -1] = 1
        return cls(samples, torch.ones(shape if signature.masked else 1, dtype=torch.uint8, device=device))

    def load(self, layout: FullLayout, sources: Sequence[Source], packings: Sequence[FullPacking]) -> None:
        """Convert the data of each source."""
        for number in range(len(self.samples)):
            source = sources[number]
            packing = packings[number]
            known = masks_of(source)
            for layer in layout.layers:
                unit = source.machine.layers[layer.name]
                raw = torch.as_tensor(source.with_masks[0][layer.name])
                columns = packing.columns[layer.name]
                for start in range(0, len(raw), _PIECE):
                    piece = slice(start, start + _PIECE)
                    values = unit.from_data(raw[piece]).flatten(1) * packing.scale(layer.name)
                    if layer.name in known:
                        there = known[layer.name][piece].flatten(1).to(self.known.device)
                        self.known[number, piece][:, columns] = there.to(torch.uint8)
                        values = torch.where(there, values, 0.0)
                    self.samples[number, piece][:, columns] = values.to(self.samples.dtype)


@dataclass(frozen=True)
class FullParameters:
    """Parameters and everything that steps need. Models are `stride` numbers apart.

    An update reads the parameters of one index and writes those of the other. The first are current between series.
    """

    stride: int
    params: Tensor  # (2, models, size)
    momenta: Tensor  # (2, models, size)
    gradients: Tensor  # (2, models, stride), with the scratch memory
    gains: Tensor  # (2, models, factors, terms): a factor's gain is the sum over its terms
    multiplier: Tensor  # (models, size); see FullPacking.multiplier
    rates: Tensor
    clock: Tensor  # (2,): number of the update and of the batch that a series starts with
    #: Full matrices (models, hidden, visible), two if layers are centered, which compares old and new ones.
    weights: list[Tensor]

    @classmethod
    def allocate(cls, signature: FullSignature, rates: Tensor) -> FullParameters:
        """Return parameters of zeros."""
        layout = signature.layout
        models = signature.run.models
        device = rates.device
        stride = padded(layout.size + layout.scratch)
        shape = models, layout.hidden, layout.visible
        return cls(
            stride=stride,
            params=torch.zeros(2, models, stride, device=device)[..., : layout.size],
            momenta=torch.zeros(2, models, stride, device=device)[..., : layout.size],
            gradients=torch.zeros(2, models, stride, device=device),
            gains=torch.zeros(2, models, layout.n_factors, signature.terms, device=device),
            multiplier=torch.zeros(models, stride, device=device)[:, : layout.size],
            rates=rates,
            clock=torch.zeros(2, dtype=torch.int64, device=device),
            weights=[
                torch.zeros(shape, dtype=signature.dtype, device=device) for _ in range(2 if signature.centered else 1)
            ],
        )


@dataclass(frozen=True)
class FullStates:
    """States, means and draws of samples and chains, as rows: data first, then all chains, then the coldest chains.

    Only chains at several temperatures have separate rows for the coldest ones.
    """

    chains_at: int
    coldest_at: int
    visible: Tensor  # (models, rows, visible)
    means: Tensor  # (models, rows, hidden)
    draws: Tensor  # (models, rows of chains or data, hidden)
    visible_sums: Tensor  # (models, 2, visible): over data, and over chains
    hidden_sums: Tensor  # (models, 2, hidden)

    @classmethod
    def allocate(cls, signature: FullSignature, device: torch.device) -> FullStates:
        """Return states of zeros, except for the column of ones."""
        run = signature.run
        layout = signature.layout
        chains_at = padded(run.batch_size, _ROWS)
        coldest_at = chains_at + (padded(run.n_chains, _ROWS) if run.temperatures > 1 else 0)
        rows = coldest_at + padded(run.n_coldest, _ROWS)
        rows_drawn = padded(max(run.n_chains, run.batch_size), _ROWS)
        visible = torch.zeros(run.models, rows, layout.visible, dtype=signature.dtype, device=device)
        visible[..., -1] = 1
        return cls(
            chains_at=chains_at,
            coldest_at=coldest_at,
            visible=visible,
            means=torch.zeros(run.models, rows, layout.hidden, dtype=signature.dtype, device=device),
            draws=torch.zeros(run.models, rows_drawn, layout.hidden, dtype=signature.dtype, device=device),
            visible_sums=torch.zeros(run.models, 2, layout.visible, device=device),
            hidden_sums=torch.zeros(run.models, 2, layout.hidden, device=device),
        )


@dataclass(frozen=True)
class FullOffsets:
    """Offsets of centering: of the visible layers, and a running mean of the hidden layer."""

    center: Tensor  # (models, visible)
    # (2, models * hidden + models): the running means, and for each model a positive number once it has one.
    hidden: Tensor

    @classmethod
    def allocate(cls, signature: FullSignature, device: torch.device) -> FullOffsets:
        """Return offsets of zeros."""
        models = signature.run.models
        layout = signature.layout
        center = torch.zeros(models, layout.visible, device=device)
        return cls(center, torch.zeros(2, models * (layout.hidden + 1), device=device))

    def current(self, layout: FullLayout) -> tuple[Tensor, Tensor]:
        """Return views of the running means, (models, hidden), and of the numbers that tell whether there is one."""
        models = len(self.center)
        means, begun = self.hidden[0].split([models * layout.hidden, models])
        return means.view(models, layout.hidden), begun


@dataclass(frozen=True)
class FullVariances:
    """What layers that learn their variances need; see `full_variances`. All are (models, visible)."""

    start: Tensor  # log-variances at the start
    ratios: Tensor  # s_0 / s
    squares: Tensor  # each column's share of its layer's power

    @classmethod
    def allocate(cls, signature: FullSignature, device: torch.device) -> FullVariances:
        """Return variances that have not changed."""
        shape = signature.run.models, signature.layout.visible
        return cls(*(make(shape, device=device) for make in (torch.zeros, torch.ones, torch.zeros)))


@dataclass(frozen=True)
class FullLaunch:
    """How the kernels are launched."""

    #: A row for each layer; see the constants of `full_kernels`.
    layers: tuple[tuple[int, ...], ...]
    #: Programs of `build` that form full matrices or copy the next batch.
    n_tiles: int
    #: Rows that `gather` copies at a time.
    gathered: int
    #: Width of a tile that holds any factor.
    edge: int
    #: Tiles of the products upwards, downwards and of the gradient.
    tile_up: tuple[int, int]
    tile_down: tuple[int, int]
    tile_gradient: tuple[int, int]
    overlapping: bool

    @classmethod
    def of(cls, signature: FullSignature, device: torch.device, *, overlapping: bool) -> FullLaunch:
        """Return the launch settings of a training run."""
        from mvrbm.backends.cuda.full_kernels import GATHERED, KINDS

        run = signature.run
        layout = signature.layout
        rows: list[tuple[int, ...]] = []
        first = layout.visible // GATHERED.value
        for layer in layout.layers:
            sizes = layout.n_hidden, layer.rows * layer.columns
            if layer.rank:
                sizes = layout.hidden_rows * layer.rows, layout.hidden_columns * layer.columns
            end = first + math.prod(-(-size // TILE) for size in sizes)
            rows.append((
                KINDS.index(layer.kind), layer.first, layer.width, layer.rows, layer.columns, layer.pitch, layer.rank,
                layer.parameters_at, layout.full_at(layer), layer.site_columns, layer.factor * signature.terms, first,
                end, power_of_two(layer.width) if layer.learns_variance else 0,
            ))  # fmt: skip
            first = end
        edges = [
            max(layout.hidden_rows, layout.hidden_columns, layer.rows, layer.columns)
            for layer in layout.layers
            if layer.rank
        ]
        processors = n_processors(device)
        # Data and persistent chains share a launch.
        rows_up = run.n_chains + (run.batch_size if run.persistent else 0)
        tile_down = tile_of(run.n_chains, layout.visible, run.models, processors)
        if any(layer.kind == "categorical" and layer.pitch > tile_down[1] for layer in layout.layers):
            tile_down = TILE, TILE  # a tile must hold all categories of a site
        return cls(
            layers=tuple(rows),
            n_tiles=first,
            gathered=min(_MOST_GATHERED, power_of_two(run.batch_size)),
            edge=max(16, power_of_two(max(edges, default=1))),
            tile_up=tile_of(rows_up, layout.hidden, run.models, processors),
            tile_down=tile_down,
            tile_gradient=tile_of(layout.hidden, layout.visible, run.models, processors),
            overlapping=overlapping,
        )

    @property
    def options(self) -> dict[str, Any]:
        """Options of launches without large products, which start before the previous launch has ended.

        Large products would take processors from the previous launch. They start when its programs have only results to
        write.
        """
        return {"PDL": True, "launch_pdl": True} if self.overlapping else {"PDL": False}

    @property
    def product_options(self) -> dict[str, Any]:
        """Options of products of batches."""
        return {"BK": TILE, "num_warps": 4, "num_stages": 4, **self.options}


def tile_of(rows: int, columns: int, models: int, processors: int) -> tuple[int, int]:
    """Return the largest tile of a product of which there are enough to keep the processors busy, or the smallest."""
    for tile in ((64, 64), (64, 32)):
        if -(-rows // tile[0]) * -(-columns // tile[1]) * models >= _BUSY * processors:
            return tile
    return 32, 32
