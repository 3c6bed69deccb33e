"""Signature, buffers and launch settings of the `full_matrix` backend."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from mvrbm.backends.base import UpdateSettings
from mvrbm.backends.cuda.full_layout import TILE, FullLayout, FullPacking, factor_rank, padded
from mvrbm.backends.cuda.kernel_backend import RunShape, default_precision, power_of_two
from mvrbm.data.sources import Source, masks_of
from mvrbm.devices import n_processors
from mvrbm.updates.state import TrainState

# Row counts of states are padded to a multiple of this value, which is divisible by all row tile sizes.
_ROWS = 128
# Minimum fraction of the multiprocessors that must have a tile of a product.
_BUSY = 0.6
# Number of samples to convert at a time.
_PIECE = 4096
# Maximum number of rows that `gather` copies at a time.
_MOST_GATHERED = 256


@dataclass(frozen=True)
class FullSignature:
    """The signature of the `full_matrix` backend (see `KernelBackend`)."""

    run: RunShape
    layout: FullLayout
    precision: str
    hidden_gaussian: bool
    #: Whether the data has missing entries, and the number of Gibbs steps used to sample them.
    masked: bool
    missing_steps: int
    #: Whether layers are centered, and whether the hidden offset is a running mean over the data.
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
        """Return the signature for a training run with one or more models."""
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
        """Data type of the operands of matrix products."""
        return torch.float16 if self.precision == "fp16" else torch.float32

    @property
    def dot_precision(self) -> str:
        """Triton input precision for matrix products with batches."""
        return "tf32" if self.precision == "fp16" else self.precision

    @property
    def exact_precision(self) -> str:
        """Precision of the products that form full matrices. If results are rounded to 16 bits, tf32 is sufficient."""
        return {"ieee": "ieee", "fp16": "tf32"}.get(self.precision, "tf32x3")

    @property
    def terms(self) -> int:
        """Number of norms that are summed to compute the gain for a factor (a power of two)."""
        return power_of_two(max(1, *(layer.rank for layer in self.layout.layers)))


@dataclass(frozen=True)
class Operands:
    """Training data on the device, as operands of matrix products. Data shared by all models is stored only once."""

    samples: Tensor  # (copies, n_samples, visible)
    known: Tensor  # bytes of the same shape, 0 for missing entries, or of shape (1,) if none are missing

    @classmethod
    def allocate(cls, signature: FullSignature, device: torch.device) -> Operands:
        """Allocate data filled with zeros, except for the column of ones."""
        run = signature.run
        shape = 1 if run.shared_data else run.models, run.n_samples, signature.layout.visible
        samples = torch.zeros(shape, dtype=signature.dtype, device=device)
        samples[..., -1] = 1
        return cls(samples, torch.ones(shape if signature.masked else 1, dtype=torch.uint8, device=device))

    def load(self, layout: FullLayout, sources: Sequence[Source], packings: Sequence[FullPacking]) -> None:
        """Convert the data from each source and copy it to the device."""
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
    """Buffers for the parameters and the update step. Consecutive models are `stride` elements apart.

    An update reads one set of parameters and writes the other. Between series of updates, the first set contains the
    current parameters.
    """

    stride: int
    params: Tensor  # (2, models, size)
    momenta: Tensor  # (2, models, size)
    gradients: Tensor  # (2, models, stride), including scratch memory
    gains: Tensor  # (2, models, factors, terms); a factor's gain is the sum over terms
    multiplier: Tensor  # (models, size) (see FullPacking.multiplier)
    rates: Tensor
    clock: Tensor  # (2,); update number and batch number at the start of a series
    #: Full matrices, each of shape (models, hidden, visible). With centering, there are two, so that old and new values
    #: can be compared.
    weights: list[Tensor]

    @classmethod
    def allocate(cls, signature: FullSignature, rates: Tensor) -> FullParameters:
        """Allocate parameters filled with zeros."""
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
    """States, hidden means and hidden samples of the data and the chains, with one row per sample or chain.

    Rows for the data come first, followed by rows for all chains. If there are several temperatures, separate rows for
    the coldest chains come last.
    """

    chains_at: int
    coldest_at: int
    visible: Tensor  # (models, rows, visible)
    means: Tensor  # (models, rows, hidden)
    draws: Tensor  # (models, rows of chains or data, hidden)
    visible_sums: Tensor  # (models, 2, visible); sums over data and over chains
    hidden_sums: Tensor  # (models, 2, hidden)

    @classmethod
    def allocate(cls, signature: FullSignature, device: torch.device) -> FullStates:
        """Allocate states filled with zeros, except for the column of ones."""
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
    """Centering offsets for the visible layers, and a running mean of the hidden layer."""

    center: Tensor  # (models, visible)
    # (2, models * hidden + models); running means, and a value per model that is positive once the mean is initialized.
    hidden: Tensor

    @classmethod
    def allocate(cls, signature: FullSignature, device: torch.device) -> FullOffsets:
        """Allocate offsets filled with zeros."""
        models = signature.run.models
        layout = signature.layout
        center = torch.zeros(models, layout.visible, device=device)
        return cls(center, torch.zeros(2, models * (layout.hidden + 1), device=device))

    def current(self, layout: FullLayout) -> tuple[Tensor, Tensor]:
        """Return views of the running means and of the values that mark them as initialized.

        The views have shapes (models, hidden) and (models,). A positive value marks a mean as initialized.
        """
        models = len(self.center)
        means, begun = self.hidden[0].split([models * layout.hidden, models])
        return means.view(models, layout.hidden), begun


@dataclass(frozen=True)
class FullVariances:
    """Buffers for learned variances (see `full_variances`), each of shape (models, visible)."""

    start: Tensor  # initial log-variances
    ratios: Tensor  # s_0 / s
    squares: Tensor  # contribution of each column to the power of its layer

    @classmethod
    def allocate(cls, signature: FullSignature, device: torch.device) -> FullVariances:
        """Allocate buffers with initial values that represent unchanged variances."""
        shape = signature.run.models, signature.layout.visible
        return cls(*(make(shape, device=device) for make in (torch.zeros, torch.ones, torch.zeros)))


@dataclass(frozen=True)
class FullLaunch:
    """Launch settings for the kernels."""

    #: One row per layer (see the constants in `full_kernels`).
    layers: tuple[tuple[int, ...], ...]
    #: Number of `build` programs that form full matrices or copy the next batch.
    n_tiles: int
    #: Number of rows that `gather` copies at a time.
    gathered: int
    #: Width of a tile that is large enough for any factor.
    edge: int
    #: Tile sizes for the upward products, the downward products and the gradient.
    tile_up: tuple[int, int]
    tile_down: tuple[int, int]
    tile_gradient: tuple[int, int]
    overlapping: bool

    @classmethod
    def of(cls, signature: FullSignature, device: torch.device, *, overlapping: bool) -> FullLaunch:
        """Return the launch settings for a training run."""
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
            tile_down = TILE, TILE  # a tile must contain all categories of a site
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
        """Launch options for kernels without large products.

        These kernels start before the previous launch has finished. Kernels with large products would compete with the
        previous launch for multiprocessors, so they do not start until the programs of that launch only have to write
        their results.
        """
        return {"PDL": True, "launch_pdl": True} if self.overlapping else {"PDL": False}

    @property
    def product_options(self) -> dict[str, Any]:
        """Launch options for kernels that compute products with batches."""
        return {"BK": TILE, "num_warps": 4, "num_stages": 4, **self.options}


def tile_of(rows: int, columns: int, models: int, processors: int) -> tuple[int, int]:
    """Return the largest tile size that keeps all multiprocessors busy, or the smallest tile size if none does."""
    for tile in ((64, 64), (64, 32)):
        if -(-rows // tile[0]) * -(-columns // tile[1]) * models >= _BUSY * processors:
            return tile
    return 32, 32
