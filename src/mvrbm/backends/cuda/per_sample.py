"""GPU backend for small matrices, with one program per sample and one or two launches per update.

It supports a single visible layer of matrices with at most 64 rows and columns. The rank of the coupling can be 1 to 8.
A label layer is optional. Several machines with the same shapes can be trained together. The kernels are in
`per_sample_kernels`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from mvrbm.backends.base import UpdateSettings
from mvrbm.backends.cuda import kernel_backend
from mvrbm.backends.cuda.kernel_backend import power_of_two
from mvrbm.backends.cuda.program_per_sample import FlatBuffers, FlatSignature, PerProgramBackend, tile_of
from mvrbm.backends.layout import LayerLayout, Layout, not_flat_reason, not_only_matrices_reason
from mvrbm.data.sources import Source
from mvrbm.devices import n_processors
from mvrbm.updates.state import TrainState

# Maximum matrix width, because each product is a single tile.
_LARGEST_TILE = 64
# Number of programs per multiprocessor that saturates the GPU. Beyond it, many small programs beat fewer wide ones.
_FULL = 2
# Number of two-warp programs for which a multiprocessor has enough registers.
_PROGRAMS_PER_PROCESSOR = 4
# Fraction of these programs that a launch can use. The next launch already occupies the others.
_FREE = 0.95
# Maximum rank. Products for higher ranks do not fit into the registers of a program.
_MOST_RANKS = 8
# Number of higher-rank programs for which a multiprocessor has enough registers.
_PROGRAMS_OF_RANKS = 2
# Shared memory per program, as a multiple of the size of a factor of all ranks: 4.1 to 6.5 when compiled for Hopper.
_KEPT = 7
# Maximum number of label categories. A program keeps their weights in registers while it samples the label.
_MOST_CLASSES = 16
# Maximum matrix width if there is a label, because the label weights require registers.
_LARGEST_TILE_WITH_LABEL = 32


@dataclass(frozen=True)
class PerSampleLaunch:
    """Launch settings for the kernels."""

    matrix: LayerLayout
    label: LayerLayout | None
    #: Tile sizes for the visible rows and columns, and for the hidden rows and columns.
    tiles: tuple[int, int, int, int]
    #: Number of ranks that a program stores side by side (a power of two).
    ranks: int
    #: Whether `stacked_step` computes the gradient instead of `small_step`.
    stacked: bool
    #: Number of samples that a program processes sequentially.
    samples: int
    warps: int
    #: Whether every program performs the previous step itself, which saves one launch per update.
    late_steps: bool

    @classmethod
    def of(cls, signature: FlatSignature, device: torch.device) -> PerSampleLaunch:
        """Return the fastest launch settings for a training run."""
        run = signature.run
        layout = signature.layout
        matrix, label = matrix_and_label(layout)
        tiles = tuple(tile_of(size) for size in (matrix.rows, matrix.columns, *_hidden_sizes(layout)))
        stacked = matrix.rank > 1 or label is not None
        processors = n_processors(device) if device.type == "cuda" else 10**9
        full = run.rows * run.models > _FULL * processors
        # Small tiles, and products that require no additional registers, fit into the registers of two warps.
        light = max(tiles) <= 32 and signature.dot_precision == "tf32"
        samples = 1
        if light and full:
            at_a_time = int(_FREE * _PROGRAMS_PER_PROCESSOR * processors)
            samples = fewest_waves(run.rows, run.models, _PROGRAMS_OF_RANKS * processors if stacked else at_a_time)
        return cls(
            matrix=matrix,
            label=label,
            tiles=(tiles[0], tiles[1], tiles[2], tiles[3]),
            ranks=power_of_two(matrix.rank),
            stacked=stacked,
            samples=samples,
            warps=2 if light and full and not stacked else 4,
            late_steps=light and not stacked and not full,
        )


class PerSampleBackend(PerProgramBackend):
    """Backend for small matrices. The default precision is "tf32" if any units are Gaussian, and "fp16" otherwise."""

    _launch: PerSampleLaunch

    def allocate(self) -> FlatBuffers:
        signature = self.signature
        self._launch = PerSampleLaunch.of(signature, self._device)
        return FlatBuffers.allocate(
            signature,
            self.rates(),
            terms=self._launch.ranks,
            by_blocks=self._launch.stacked and signature.halves,
            # Storing binary chains as 16-bit values halves the memory traffic.
            chain_dtype=torch.float16 if signature.halves else torch.float32,
        )

    def launch_series(self, first: int, count: int) -> None:
        launch = self._launch
        if launch.late_steps:
            self.clear_gradients()
        if self._buffers.sizes.numel():
            self.find_sizes(launch.matrix)
        for number in range(count):
            batch = first + number
            if launch.stacked:
                self._launch_stacked(batch)
            else:
                self._launch_small(number, batch)
            if not launch.late_steps:
                self.launch_step(0, batch)
        if launch.late_steps:
            self.launch_step(count, first + count - 1)

    def _launch_small(self, number: int, batch: int) -> None:
        """Launch update `number` of a series. If steps are delayed, the kernel also performs the previous step."""
        from mvrbm.backends.cuda.per_sample_kernels import small_step

        launch = self._launch
        buffers = self._buffers
        data = self._data
        # Number of programs that write the late step: two if there is room. On a full GPU, the second would run last.
        keepers = 2 if launch.late_steps else int(self.run.normalized)
        turn = number if launch.late_steps else 0
        old = max(turn - 1, 0) % 2  # index of the current set of parameters
        new = 1 - old
        programs = -(-self.run.rows // launch.samples) + keepers
        small_step[(programs, self.run.models)](
            data.arrays[0], self._order, buffers.params[old], buffers.momenta[old], buffers.gradients[(turn - 1) % 3],
            buffers.gradients[turn % 3], buffers.params[new], buffers.momenta[new], buffers.gradients[(turn + 1) % 3],
            buffers.gains[(turn - 1) % 2], buffers.gains[turn % 2], buffers.multiplier, buffers.rates, buffers.clock,
            self._keys, buffers.chains, data.scale, data.shift, batch, self.run.n_valid(batch), self.n_samples,
            self.data_stride(launch.matrix), PENDING=turn > 0, KEEPERS=keepers, **self._constants(),
        )  # fmt: skip

    def _launch_stacked(self, batch: int) -> None:
        """Launch the gradient kernel for a coupling of rank 2 or higher, or for a machine with a label."""
        from mvrbm.backends.cuda.per_sample_kernels import stacked_step

        launch = self._launch
        layout = self.layout
        buffers = self._buffers
        data = self._data
        matrix = launch.matrix
        label: tuple[int, ...] = ()  # see the constants in `per_sample_kernels`
        if launch.label is not None:
            area = launch.label.area
            positions = launch.label.parameters_at, launch.label.states_at, layout.hidden_area
            label = area, power_of_two(area), *positions, int(launch.label.states_at < matrix.states_at)
        programs = -(-self.run.rows // launch.samples) + (2 * launch.ranks if self.run.normalized else 0)
        stacked_step[(programs, self.run.models)](
            data.arrays[layout.layers.index(matrix)], data.labels, self._order, self.params, buffers.gradients[0],
            buffers.gains[0], buffers.sizes, buffers.clock, self._keys, buffers.chains, data.scale, data.shift, batch,
            self.run.n_valid(batch), self.n_samples, self.data_stride(matrix),
            0 if self.run.shared_data else self.n_samples, RANK=matrix.rank, R=launch.ranks, STATES=layout.states,
            AT_U=matrix.parameters_at, AT_C=layout.size - layout.hidden_area, AT_X=matrix.states_at,
            BLOCKS=max(1, buffers.sizes.shape[2]), LABEL=label, EDGE=max(launch.tiles), **self._constants(),
        )  # fmt: skip

    def _constants(self) -> dict[str, Any]:
        """Return the compile-time arguments common to `small_step` and `stacked_step`."""
        launch = self._launch
        layout = self.layout
        matrix = launch.matrix
        BI, BJ, BK, BL = launch.tiles
        K, L = _hidden_sizes(layout)
        return {
            "N": self.run.batch_size, "CHAINS": self.run.n_chains, "SAMPLES": launch.samples,
            "STRIDE": self._buffers.stride, "I": matrix.rows, "J": matrix.columns, "K": K, "L": L, "BI": BI, "BJ": BJ,
            "BK": BK, "BL": BL, "STEPS": self.run.steps, "PERSISTENT": self.run.persistent,
            "VISIBLE_GAUSSIAN": matrix.gaussian, "HIDDEN_GAUSSIAN": layout.hidden_gaussian,
            "BYTE_SCALE": self.signature.formats[layout.layers.index(matrix)][1], "NORMALIZED": self.run.normalized,
            "PRECISION": self.signature.dot_precision, "HALVES": self.signature.halves, "PDL": self._overlapping,
            "num_warps": launch.warps, **self.launch_options(),
        }  # fmt: skip


def _hidden_sizes(layout: Layout) -> tuple[int, int]:
    return layout.hidden_rows, layout.hidden_columns


def matrix_and_label(layout: Layout) -> tuple[LayerLayout, LayerLayout | None]:
    """Return the first matrix layer, and the first label layer or None if there is no label."""
    labels = [layer for layer in layout.layers if layer.is_label]
    return next(layer for layer in layout.layers if not layer.is_label), labels[0] if labels else None


def too_large_reason(layout: Layout, halves: bool, device: torch.device) -> str | None:
    """Return the reason why samples or factors are too large for one program per sample, or None if they fit.

    Each program processes one matrix and at most one label. If `halves` is True, the operands are 16-bit.
    """
    if all(layer.is_label for layer in layout.layers):
        return "its only layer is a label"
    matrix, label = matrix_and_label(layout)
    if len(layout.layers) > (1 if label is None else 2):
        return "it has more visible layers than one matrix and one label"
    tile = max(tile_of(size) for size in (matrix.rows, matrix.columns, *_hidden_sizes(layout)))
    if tile > _LARGEST_TILE:
        return f"it has matrices wider than {_LARGEST_TILE}"
    if matrix.rank > _MOST_RANKS:
        return f"its coupling has more than {_MOST_RANKS} ranks"
    if label is not None and label.area > _MOST_CLASSES:
        return f"its label has more than {_MOST_CLASSES} categories"
    if label is not None and tile > _LARGEST_TILE_WITH_LABEL:
        return f"it has a label and matrices wider than {_LARGEST_TILE_WITH_LABEL}"
    factor_bytes = power_of_two(matrix.rank) * tile**2 * (2 if halves else 4)
    stacked = matrix.rank > 1 or label is not None
    if stacked and _KEPT * factor_bytes > _shared_memory(device):
        return "its factors do not fit into the shared memory of a program"
    return None


def _shared_memory(device: torch.device) -> int:
    """Return the size of a program's shared memory in bytes. Without a GPU (in tests), return the size for an H200."""
    if device.type != "cuda":
        return 227 * 2**10
    from triton.runtime import driver

    number = torch.cuda.current_device() if device.index is None else device.index
    return int(driver.active.utils.get_device_properties(number)["max_shared_mem"])


def fewest_waves(rows: int, models: int, at_a_time: int) -> int:
    """Return the number of samples per program that minimizes the runtime.

    Each model has `rows` samples, and the GPU runs `at_a_time` programs concurrently.
    """

    def time(samples: int) -> float:
        programs = -(-rows // samples) * models
        return -(-programs // at_a_time) * (samples + 0.5)  # program overhead is about half a sample

    return min(range(1, rows + 1), key=time)


def unsupported_reason(settings: UpdateSettings, state: TrainState, source: Source) -> str | None:
    """Return the reason why the kernels do not support a training run, or None if they do."""
    reason = (
        kernel_backend.unsupported_reason(settings, state, source)
        or not_flat_reason(settings, state)
        or not_only_matrices_reason(state)
    )
    if reason is not None:
        return reason
    halves = kernel_backend.default_precision(state.machine) == "fp16"
    return too_large_reason(Layout.of(state.machine), halves, state.machine.like.device)


def slower_reason(layout: Layout, rows: int, models: int, processors: int) -> str | None:
    """Return the reason why products with full matrices are faster, or None if they are not.

    Each of the `models` machines has `rows` samples or chains per update. The comparison is based on times measured on
    an H200, in microseconds. With one program per sample, the time increases with the rank and with the number of
    programs that each multiprocessor runs sequentially. With full matrices, the time increases only slightly.
    """
    matrix, _ = matrix_and_label(layout)
    if max(matrix.rows, matrix.columns, *_hidden_sizes(layout)) > 32:
        K, L = _hidden_sizes(layout)
        products = sum(layer.rank * (K * layer.area + K * L * layer.columns) for layer in layout.layers)
        entries = layout.hidden_area * layout.states
        return "full-matrix products take at most four times as many operations" if entries <= 4 * products else None
    waves = -(-rows * models // (_PROGRAMS_OF_RANKS * processors))
    by_sample = 5 + 1.6 * matrix.rank * waves
    full = 18 + 0.025 * rows * models
    return "it requires many programs per multiprocessor" if matrix.rank > 1 and by_sample > full else None
