r"""Stages: models of image patches that correct an image by mean-field inference, without changing its size.

For each channel, a patch of p x p pixels has five visible layers: the correction X, which is inferred, and the
derivatives Z1 to Z4 of the given patch along x, y, xx and yy. All layers are divided by the root mean square r of the
derivatives. The mean-field pass starts at X = 0, updates the hidden layer and then X, and averages the corrections of
overlapping patches.

:class:`MachineStage` is a multimodal MVRBM with these five layers. :class:`SymmetricStage` ties the hidden units in
groups of eight: each orientation g of a base machine with K x L hidden units sees the patch flipped and rotated by g,

.. math:: E = \sum_m \frac{\lVert V_m\rVert^2}{2} - \sum_g \langle Y_g, C + \sum_m W_m (g V_m)\rangle,

where each W is a sum of Kronecker products. As a consequence, flipping the image flips the result. Hidden units take
the values -1/2 and 1/2, which is equivalent to binary hidden units with an additional visible bias. Two more layers are
optional: a mask M of corrupted pixels, and an encoding T of the noise level relative to r.

This module computes the mean-field passes. :mod:`mvrbm.vision.pretrained` reads and writes stages, and
:mod:`mvrbm.vision.stage_training` trains them.
"""

import functools
import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from typing import Any, ClassVar, NamedTuple, cast

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from mvrbm.couplings import Coupling
from mvrbm.machine import BoltzmannMachine
from mvrbm.random import RandomSource
from mvrbm.saving import machine_config
from mvrbm.units import Gaussian

#: Name of the visible layer to infer: the true patch minus the given patch.
HIGH = "X"
#: Names of the observed visible layers: derivatives of the patch along x, y, xx and yy.
DERIVATIVES = ("Z1", "Z2", "Z3", "Z4")

#: Number of basis functions for encoding the noise level on a logarithmic scale.
CODES = 10
#: Noise level, relative to r, at the center of the first basis function.
SMALLEST = 0.02
#: Noise level, relative to r, at the center of the last basis function.
LARGEST = 10.0

#: Number of pixels beyond each side of a patch that are required for second differences.
MARGIN = 2
#: Number of flips and rotations of a square.
ORIENTATIONS = 8

# Number of rows of patches whose scales are computed at once.
_ROWS_AT_ONCE = 128
# Maximum number of hidden units to infer at once on a CPU, so that they fit in the cache.
_CPU_ENTRIES = 2**20
# Maximum number of hidden units to infer at once on a GPU.
_GPU_ENTRIES = 2**27
# Number of pixels by which `run_mirrored` extends an image on each side.
_MIRRORED = 16
# Number of progress reports per stage.
_PARTS = 100

Progress = Callable[[int, int], None]
#: Function that computes the correction for one image of shape (c, h, w), given the noise level, the mask and a
#: progress callback.
Correction = Callable[[Tensor, float | None, Tensor | None, Progress | None], Tensor]


def code(size: Tensor) -> Tensor:
    """Encode noise levels, on a logarithmic scale, with Gaussian basis functions.

    For noise levels of shape (...), the result has shape (..., CODES). A level of zero is encoded as all zeros.
    """
    low = math.log(SMALLEST)
    high = math.log(LARGEST)
    centers = torch.linspace(low, high, CODES, device=size.device)
    width = (high - low) / (CODES - 1)
    bumps = torch.exp(-0.5 * ((size.clamp(SMALLEST, LARGEST).log()[..., None] - centers) / width) ** 2)
    return bumps * (size > 0)[..., None]


def derivative_matrix(patch: int) -> Tensor:
    """Return the matrix that maps a window to the derivatives of its patch along x, y, xx and yy.

    The matrix has shape (4 * p * p, w * w).
    """
    line = torch.eye(patch + 2 * MARGIN)
    plain = line[MARGIN:-MARGIN]
    slope = line[3:-1] - line[1:-3]
    bend = line[4:] - 2 * plain + line[:-4]
    pairs = ((plain, slope), (slope, plain), (plain, bend), (bend, plain))
    return torch.cat([torch.kron(rows, columns) for rows, columns in pairs])


class Stage(nn.Module, ABC):
    """Base class for stages, which extracts overlapping patches and averages their corrections.

    :meth:`forward` is differentiable and works on batches. :meth:`prepare` returns a faster function for a single
    image.
    """

    channels: int
    patch: int
    stride: int
    floor: float  # value added to r, so that noise in flat patches is not amplified
    product: torch.dtype
    # Lower bound for r squared, because the square root is not differentiable at 0.
    least_square: ClassVar[float] = 1e-8
    features: Tensor  # (4 * p * p, w * w)

    def __init__(self, channels: int, patch: int, stride: int, floor: float) -> None:
        super().__init__()
        self.channels = channels
        self.patch = patch
        self.stride = stride
        self.floor = floor
        self.product = torch.float32  # dtype for large matrix products during training
        self.register_buffer("features", derivative_matrix(patch), persistent=False)

    @property
    def window(self) -> int:
        """Side length of the window of pixels that a patch depends on."""
        return self.patch + 2 * MARGIN

    @property
    def lead(self) -> int:
        """Number of pixels by which the first patch extends beyond the edge of the image."""
        return (self.patch - 1) // self.stride * self.stride

    def pad(self, image: Tensor, mode: str = "replicate") -> Tensor:
        """Pad images of shape (n, c, h, w) to include all pixels that the patches depend on."""
        before = self.lead + MARGIN
        after = self.patch - self.stride + MARGIN
        return F.pad(image, (before, after, before, after), mode=mode)

    def scales(self, padded: Tensor) -> Tensor:
        """Return the scale r of each patch in padded images: (n, c, h, w) -> (n, rows, columns)."""
        b = padded
        inner = slice(MARGIN, -MARGIN)
        squares = (b[..., inner, 3:-1] - b[..., inner, 1:-3]).square()
        squares = squares + (b[..., 3:-1, inner] - b[..., 1:-3, inner]).square()
        squares = squares + (b[..., inner, 4:] - 2 * b[..., inner, inner] + b[..., inner, :-4]).square()
        squares = squares + (b[..., 4:, inner] - 2 * b[..., inner, inner] + b[..., :-4, inner]).square()
        means = F.avg_pool2d(squares.mean(1, keepdim=True), self.patch, self.stride)[:, 0] / len(DERIVATIVES)
        return means.clamp_min(self.least_square).sqrt() + self.floor

    def windows(self, image: Tensor) -> tuple[Tensor, Tensor]:
        """Return the windows and scales of all patches in images of shape (n, c, h, w).

        The windows have shape (n, c, w * w, patches), and the scales r have shape (n, patches).
        """
        padded = self.pad(image)
        cut = F.unfold(padded, self.window, stride=self.stride).unflatten(1, (-1, self.window**2))
        return cut, self.scales(padded).flatten(1)

    @abstractmethod
    def correct_patches(
        self, windows: Tensor, r: Tensor, level: Tensor | None = None, mask: Tensor | None = None
    ) -> Tensor:
        """Return the corrections for all patches. The result has shape (c, p * p, n, patches).

        `windows` has shape (n, c, w * w, patches), and the scales `r` have shape (n, patches). `level` contains the
        noise levels and has shape (n,). `mask` has shape (n, w * w, patches) and is 1 for corrupted pixels.
        """

    @abstractmethod
    def prepare(self) -> Correction:
        """Return a function that computes the correction for an image without tracking gradients.

        The image has shape (c, h, w) and can be any size.
        """

    @abstractmethod
    def layers(self) -> dict[str, Any]:
        """Return a description of the layers and couplings in the configuration format of saved machines."""

    def forward(self, image: Tensor, level: Tensor | None = None, mask: Tensor | None = None) -> Tensor:
        """Return the correction for images of shape (n, c, h, w).

        The height and width must be multiples of the stride. `level` contains the noise levels and has shape (n,).
        `mask` has shape (n, 1, h, w) and is 1 for corrupted pixels.
        """
        height, width = image.shape[2:]
        windows, r = self.windows(image)
        holes = None if mask is None else F.unfold(self.pad(mask, "constant"), self.window, stride=self.stride)
        x = self.correct_patches(windows, r, level, holes).permute(2, 0, 1, 3).flatten(1, 2)
        out = self._average(self._fold(x, height, width))
        return out[..., self.lead : self.lead + height, self.lead : self.lead + width]

    def _fold(self, x: Tensor, height: int, width: int) -> Tensor:
        """Add up overlapping patches of shape (n, c * p * p, patches) that cover an image of the given size."""
        beyond = self.lead + self.patch - self.stride
        return F.fold(x, (height + beyond, width + beyond), self.patch, stride=self.stride)

    def _average(self, total: Tensor) -> Tensor:
        """Divide the sums of overlapping patches by the number of patches that cover each pixel.

        The sums have shape (..., rows, columns).
        """
        if self.patch % self.stride == 0:
            return total * (self.stride / self.patch) ** 2
        rows, columns = (
            _coverage(size, self.patch, self.stride, total.dtype, total.device) for size in total.shape[-2:]
        )
        return total / torch.outer(rows, columns)


@functools.lru_cache(maxsize=16)
def _coverage(size: int, patch: int, stride: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Return the number of patches that cover each of `size` pixels along one axis.

    The result is cached because it cannot be copied to the device during CUDA graph capture.
    """
    counts = torch.zeros(size, dtype=dtype)
    for start in range(0, size - patch + 1, stride):
        counts[start : start + patch] += 1
    return counts.to(device)


class _Matrices(NamedTuple):
    """Dense matrices of the couplings in a stage's machine."""

    up: Tensor  # (K * L, w * w): from windows divided by r to the hidden field
    hidden_bias: Tensor  # (K * L, 1)
    again: Tensor  # (K * L, p * p): from an estimate of X to the hidden field
    down: Tensor  # (p * p, K * L): from hidden means to X
    visible_bias: Tensor  # (p * p, 1)

    def infer(self, windows: Tensor, cycles: int) -> Tensor:
        """Return X after `cycles` mean-field cycles. The result has shape (..., p * p, patches).

        The windows have shape (..., w * w, patches). Both the windows and X are divided by r.
        """
        field = self.up @ windows + self.hidden_bias
        x = self.down @ torch.sigmoid(field) + self.visible_bias
        for _ in range(cycles - 1):
            x = self.down @ torch.sigmoid(field + self.again @ x) + self.visible_bias
        return x


def full_weights(link: Coupling) -> Tensor:
    """Return the dense weights of a Kronecker coupling between matrices.

    The result has shape (K * L, I * J). The sum over the rank is computed as a single matrix product.
    """
    left, right = cast("tuple[Tensor, Tensor]", link.matrix_factors())  # (R, K, I), (R, L, J)
    rows, inputs = left.shape[1:]
    columns, others = right.shape[1:]
    product = left.flatten(1).mT @ right.flatten(1)  # (K I, L J)
    return product.reshape(rows, inputs, columns, others).transpose(1, 2).reshape(rows * columns, inputs * others)


class MachineStage(Stage):
    """Stage for grayscale images that uses a multimodal MVRBM.

    Parameters
    ----------
    machine : BoltzmannMachine
        Machine with Gaussian layers X and Z1 to Z4, all of shape (p, p), and Kronecker couplings.
    stride : int
        Distance between patches in pixels.
    floor : float
        Value added to the scale r of each patch.
    cycles : int
        Number of mean-field cycles.
    """

    # A machine stage is always the only stage, so no gradient with respect to its input is required.
    least_square = 0.0

    def __init__(self, machine: BoltzmannMachine, stride: int, floor: float = 0.005, cycles: int = 1) -> None:
        super().__init__(1, machine.layers[HIGH].shape[0], stride, floor)
        self.machine = machine
        self.cycles = cycles

    def matrices(self) -> _Matrices:
        """Return the couplings as matrices that are differentiable with respect to the machine's parameters."""
        layers = cast("dict[str, Gaussian]", self.machine.layers)
        links = self.machine.links

        def entries(parameter: Tensor) -> Tensor:
            return parameter.expand(self.patch, self.patch).flatten()

        derivatives = torch.cat([full_weights(links[name]) / entries(layers[name].scale) for name in DERIVATIVES], 1)
        high = full_weights(links[HIGH])
        deviation = entries(layers[HIGH].scale)
        return _Matrices(
            up=derivatives @ self.features.to(derivatives),
            hidden_bias=self.machine.hidden.bias.flatten()[:, None],
            again=high / deviation,
            down=(high * deviation).mT,
            visible_bias=entries(layers[HIGH].bias)[:, None],
        )

    def correct_patches(
        self, windows: Tensor, r: Tensor, level: Tensor | None = None, mask: Tensor | None = None
    ) -> Tensor:
        return self._infer(self.matrices(), windows[:, 0], r).transpose(0, 1)[None]

    def _infer(self, matrices: _Matrices, windows: Tensor, r: Tensor) -> Tensor:
        """Compute corrections from windows: (n, w * w, patches) -> (n, p * p, patches)."""
        scales = r[:, None]
        centered = (windows - windows[:, _middle(windows.shape[1]), None]) / scales
        return matrices.infer(centered, self.cycles) * scales

    @torch.no_grad()
    def prepare(self) -> Correction:
        matrices = self.matrices()

        @torch.no_grad()
        def correct(image: Tensor, level: float | None, mask: Tensor | None, progress: Progress | None) -> Tensor:
            s = self.stride
            height, width = image.shape[1:]
            padded = self.pad(F.pad(image[None], (0, -width % s, 0, -height % s), mode="replicate"))
            rows = (padded.shape[2] - self.window) // s + 1
            columns = (padded.shape[3] - self.window) // s + 1
            total = image.new_zeros(1, (rows - 1) * s + self.patch, (columns - 1) * s + self.patch)
            at_once = max(1, _entries_at_once(image) // (columns * max(len(matrices.up), self.window**2)))
            for first in range(0, rows, at_once):
                last = min(first + at_once, rows)
                part = padded[:, :, first * s : (last - 1) * s + self.window]
                windows = F.unfold(part, self.window, stride=s)
                x = self._infer(matrices, windows, self.scales(part).flatten(1))
                size = ((last - first - 1) * s + self.patch, total.shape[2])
                total[:, first * s : first * s + size[0]] += F.fold(x, size, self.patch, stride=s)[0]
                if progress is not None:
                    progress(last, rows)
            return self._average(total)[:, self.lead : self.lead + height, self.lead : self.lead + width]

        return correct

    def layers(self) -> dict[str, Any]:
        return machine_config(self.machine)


def _entries_at_once(image: Tensor) -> int:
    return _GPU_ENTRIES if image.is_cuda else _CPU_ENTRIES


class SymmetricStage(Stage):
    """Stage whose hidden units share weights across the eight flips and rotations of a patch.

    Parameters
    ----------
    channels : int
        Number of image channels.
    patch : int
        Side length of a patch. Must be a multiple of `stride`.
    stride : int
        Distance between patches in pixels.
    hidden : (int, int)
        Shape of the hidden layer of the base machine.
    rank : int
        Number of Kronecker products in each coupling.
    coded : bool
        Whether the stage has a layer T that encodes the noise level.
    mask : bool
        Whether the stage has a layer M that marks corrupted pixels.
    floor : float
        Value added to the scale r of each patch.
    """

    def __init__(
        self,
        channels: int,
        patch: int,
        stride: int,
        hidden: tuple[int, int],
        rank: int,
        *,
        coded: bool = False,
        mask: bool = False,
        floor: float = 0.005,
    ) -> None:
        if patch % stride:
            raise ValueError(f"patch must be a multiple of the stride ({stride}), got {patch}")
        super().__init__(channels, patch, stride, floor)
        self.mask = mask
        layers = (1 + len(DERIVATIVES)) * channels + mask
        base = hidden[0] * hidden[1]
        self.left = nn.Parameter(torch.zeros(layers, rank, hidden[0], patch))
        self.right = nn.Parameter(torch.zeros(layers, rank, hidden[1], patch))
        self.bias = nn.Parameter(torch.zeros(base))
        self.visible_bias = nn.Parameter(torch.zeros(channels))
        self.codes = nn.Parameter(torch.zeros(base, CODES)) if coded else None

    @torch.no_grad()
    def initialize(self, rng: RandomSource) -> None:
        """Initialize the parameters randomly. The weights for X are zero, so a new stage leaves images unchanged."""
        deviation = 0.7 * (0.05 / (self.left.shape[1] * self.patch)) ** 0.25
        for factor in (self.left, self.right):
            factor.copy_(rng.normal(factor.shape, factor) * deviation)
        self.left[: self.channels] = 0
        self.bias.zero_()
        self.visible_bias.zero_()
        if self.codes is not None:  # with random codes, each hidden unit initially responds to some noise levels only
            self.codes.copy_(rng.normal(self.codes.shape, self.codes))

    @property
    def arguments(self) -> dict[str, Any]:
        """Constructor arguments of the stage, which can be stored as JSON."""
        _, rank, rows, _ = self.left.shape
        return {
            "channels": self.channels,
            "patch": self.patch,
            "stride": self.stride,
            "mask": self.mask,
            "floor": self.floor,
            "hidden": (rows, self.right.shape[2]),
            "rank": rank,
            "coded": self.codes is not None,
        }

    def weights(self) -> Tensor:
        """Return the base machine's weights for each layer.

        The result has shape (layers, K * L, p * p), with the layers in the order X, Z, M.
        """
        product = torch.einsum("mrki,mrlj->mklij", self.left, self.right)
        return product.flatten(3).flatten(1, 2)

    def filters(self) -> tuple[Tensor, Tensor]:
        """Return the filters from windows to hidden units and from hidden units to X.

        The filters have shapes (K * L, inputs, w, w) and (K * L, channels, p, p).
        """
        c = self.channels
        full = self.weights()
        count = len(DERIVATIVES)
        derivatives = full[c : (1 + count) * c].reshape(c, count, full.shape[1], -1)
        up = (derivatives.transpose(1, 2).flatten(2) @ self.features).unflatten(2, (self.window, self.window))
        if self.mask:
            up = torch.cat([up, F.pad(full[-1:].unflatten(2, (self.patch, self.patch)), (MARGIN,) * 4)])
        return up.transpose(0, 1), full[:c].transpose(0, 1).unflatten(2, (self.patch, self.patch))

    def all_weights(self) -> Tensor:
        """Return the weights for X and Z in all orientations. The result has shape (8 * K * L, 5 * c * p * p)."""
        c = self.channels
        p = self.patch
        full = self.weights()[: 5 * c].transpose(0, 1).reshape(-1, 5 * c, p, p)
        x = full[:, :c]
        z = full[:, c:].reshape(-1, c, 4, p, p)
        # A flip changes the sign of the slope along the flipped axis. A rotation also swaps rows and columns.
        flip_signs = z.new_tensor([-1.0, 1, 1, 1])[:, None, None]
        turn_signs = z.new_tensor([1.0, -1, 1, 1])[:, None, None]
        x = torch.cat([x, x.flip(-1)])
        z = torch.cat([z, z.flip(-1) * flip_signs])
        found = []
        for _ in range(4):
            found.append(torch.cat([x, z.flatten(1, 2)], 1))
            x = x.rot90(1, (-2, -1))
            z = z.rot90(1, (-2, -1))[:, :, [1, 0, 3, 2]] * turn_signs
        return torch.cat(found).flatten(1)

    def unit(self, r: Tensor, level: Tensor | None) -> Tensor:
        """Return the scale of X in each patch. Both `r` and the result have shape (n, ...).

        If `level` is None, the scale is r. Otherwise, the noise levels in `level`, of shape (n,), limit the scale.
        """
        if level is None:
            return r
        share = (level.reshape(-1, *[1] * (r.ndim - 1)) / r).square() + 1e-8
        return r * (share / (share + 0.25)).sqrt()

    def correct_patches(
        self, windows: Tensor, r: Tensor, level: Tensor | None = None, mask: Tensor | None = None
    ) -> Tensor:
        up, down = (all_turns(each) for each in self.filters())
        columns = [up]
        others = []
        if mask is not None:
            others.append(mask.transpose(0, 1))
        if self.codes is not None and level is not None:
            others.append(code(level[:, None] / r).permute(2, 0, 1))
            columns.append(self.codes.repeat(ORIENTATIONS, 1))
        others.append(torch.ones_like(r)[None])
        columns.append(self.bias.repeat(ORIENTATIONS)[:, None])
        seen = _Seen.apply(windows, r, torch.cat(others), self.product)  # (rows, n, patches)
        weights = F.pad(torch.cat(columns, 1), (0, len(seen) - sum(each.shape[1] for each in columns)))
        # The logistic function minus 1/2 equals tanh(a / 2) / 2, which is more accurate with 16 bits.
        hidden = torch.tanh((0.5 * weights).to(self.product) @ seen.flatten(1))
        x = ((0.5 * down).to(self.product).mT @ hidden).to(windows)
        x = x.reshape(self.channels, self.patch**2, len(windows), -1)
        return (x + self.visible_bias[:, None, None, None]) * self.unit(r, None if self.codes is None else level)

    def prepare(self) -> Correction:
        return Pass(self)

    def layers(self) -> dict[str, Any]:
        c = self.channels
        side = [c, self.patch, self.patch] if c > 1 else [self.patch, self.patch]
        shapes: dict[str, list[int]] = dict.fromkeys((HIGH, *DERIVATIVES), side)
        if self.mask:
            shapes["M"] = [self.patch, self.patch]
        _, rank, rows, _ = self.left.shape
        return {
            "visible": {name: {"unit": Gaussian.name, "shape": shape} for name, shape in shapes.items()},
            "hidden": {"unit": "bernoulli", "shape": [ORIENTATIONS, rows, self.right.shape[2]]},
            "couplings": {name: {"coupling": "kronecker", "rank": rank} for name in shapes},
            "dtype": str(self.left.dtype).removeprefix("torch."),
        }


class _Seen(torch.autograd.Function):
    """Autograd function that centers windows, divides them by r, and stacks them with additional rows into one matrix.

    Windows are centered by subtracting the middle pixel. Rows are padded to a multiple of 8, which is
    faster on tensor cores. Each column is one patch, so a single 16-bit matrix product computes all hidden fields.
    """

    @staticmethod
    def forward(ctx: Any, windows: Tensor, r: Tensor, others: Tensor, kind: torch.dtype) -> Tensor:
        """Return the stacked matrix of shape (rows, n, patches).

        `windows` has shape (n, c, w * w, patches), and the additional rows in `others` have shape (k, n, patches).
        """
        n, c, size, patches = windows.shape
        used = c * size
        rows = used + len(others)
        out = torch.empty(rows + -rows % 8, n, patches, dtype=kind, device=windows.device)
        middle = windows[:, :, _middle(size), None]
        out[:used] = ((windows - middle) / r[:, None, None]).flatten(1, 2).transpose(0, 1)
        out[used:rows] = others
        out[rows:] = 0
        ctx.save_for_backward(out, r)
        ctx.shape = windows.shape
        ctx.rows = rows
        return out

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        """Return the gradients with respect to the windows, the scales r and the additional rows."""
        if not ctx.needs_input_grad[1]:
            return None, None, None, None
        n, c, size, patches = ctx.shape
        out, r = ctx.saved_tensors
        grad = grads[0][: c * size].to(r)
        of_r = -(grad * out[: c * size]).sum(0) / r
        of_windows = (grad / r).transpose(0, 1).reshape(n, c, size, patches)
        of_windows[:, :, _middle(size)] -= of_windows.sum(2)
        return of_windows, of_r, grads[0][c * size : ctx.rows].to(r), None


def _middle(size: int) -> int:
    """Return the index of the middle pixel in a flattened square window with `size` pixels in total."""
    side = math.isqrt(size)
    return side // 2 * side + side // 2


def all_turns(filters: Tensor) -> Tensor:
    """Return all eight orientations of filters of shape (n, c, w, w).

    The result has shape (8 * n, c * w * w).
    """
    both = torch.cat([filters, filters.flip(-1)])
    return torch.cat([both.rot90(k, (-2, -1)) for k in range(4)]).flatten(1)


def _even_and_odd(filters: Tensor) -> Tensor:
    """Split filters of shape (..., w, w) into four parts, each even or odd along each axis.

    Only one quarter of each part is returned, so the result has shape (4, ..., q, q). Adding the parts with all sign
    patterns gives the four quarters of a filter, each flipped to the position of the first quarter.
    """
    w = filters.shape[-1]
    q = (w + 1) // 2
    near = filters[..., :q, :]
    far = filters[..., w - q :, :].flip(-2)
    parts = []
    for rows in (near + far, near - far):
        parts += [rows[..., :q] + rows[..., w - q :].flip(-1), rows[..., :q] - rows[..., w - q :].flip(-1)]
    return torch.stack(parts) / 4


def _mix(parts: Tensor) -> Tensor:
    """Replace even and odd parts of shape (4, ...) in place with the four flips, which are their signed sums."""
    plain = parts[::2] + parts[1::2]
    flipped = parts[::2] - parts[1::2]
    for which, (even, odd) in enumerate((plain, flipped)):
        torch.add(even, odd, out=parts[which])
        torch.sub(even, odd, out=parts[2 + which])
    return parts


class Pass:
    r"""Mean-field pass of a symmetric stage over one image, with matrix products shared between flips.

    A window is split into parts that are even or odd along rows and columns. The fields for the four flips of a filter
    are sums of the same products of these parts, with four different sign patterns, so only a quarter of the products
    must be computed. The pass from the hidden layer to X uses the same method.
    """

    @torch.no_grad()
    def __init__(self, stage: SymmetricStage) -> None:
        self.stage = stage
        up, down = stage.filters()
        parts = _even_and_odd(torch.cat([up, up.mT]))
        if stage.window % 2:  # sums of mirrored pixels count the middle row and column twice
            parts[..., -1, :] /= 2
            parts[..., -1] /= 2
        self._up = parts.flatten(2).contiguous()  # (4, 2 * K * L, inputs * q * q)
        self._down = _even_and_odd(torch.cat([down, down.mT])).flatten(2).mT.contiguous()  # (4, c * q * q, 2 * K * L)
        self._bias = stage.bias.detach().repeat(2)[:, None]
        self._codes = None if stage.codes is None else stage.codes.detach().repeat(2, 1)
        visible = stage.visible_bias.detach().repeat_interleave(self._down.shape[1] // stage.channels)
        # Hidden units are centered at 1/2, which adds up to 2 for four flips.
        self._visible_bias = (visible - 2 * self._down[0].sum(1))[:, None]

    @torch.no_grad()
    def __call__(
        self, image: Tensor, level: float | None = None, mask: Tensor | None = None, progress: Progress | None = None
    ) -> Tensor:
        """Return the correction for an image of shape (c, h, w), which can be any size. See :meth:`Stage.forward`."""
        stage = self.stage
        p = stage.patch
        s = stage.stride
        c, h, w = image.shape
        to_multiple = (0, -w % s, 0, -h % s)
        padded = stage.pad(F.pad(image[None], to_multiple, mode="replicate"))
        r = self._scales(padded)
        shares = None if level is None or self._codes is None else level / r
        unit = r if shares is None else stage.unit(r[None], r.new_tensor([level]))[0]
        # Derivatives do not depend on the mean. Subtracting a typical mean reduces rounding errors.
        sources = [_Phases(padded[0].sub_(0.5), s)]
        scales = [r]
        if mask is not None:
            sources.append(_Phases(stage.pad(F.pad(mask, to_multiple), "constant"), s))
            scales.append(torch.ones_like(r))
        rows, columns = r.shape
        at_once = max(1, _entries_at_once(image) // (4 * columns * self._up.shape[1]))
        total = image.new_zeros(c, (rows - 1) * s + p, (columns - 1) * s + p)
        for first in range(0, rows, at_once):
            some = slice(first, min(first + at_once, rows))
            seen = zip(sources, scales, strict=True)
            parts = [each.parts(some, stage.window, columns).div_(own[some].flatten()) for each, own in seen]
            fields = torch.bmm(self._up, parts[0] if len(parts) == 1 else torch.cat(parts, 1))  # (4, 2 K L, patches)
            fields[0] += self._bias
            if self._codes is not None and shares is not None:
                fields[0].addmm_(self._codes, code(shares[some].flatten()).mT)
            x = torch.bmm(self._down, _mix(torch.sigmoid_(_mix(fields))))
            x[0] += self._visible_bias
            x = self._patches(_mix(x)) * unit[some].flatten()
            size = ((some.stop - first - 1) * s + p, (columns - 1) * s + p)
            total[:, first * s : first * s + size[0]] += F.fold(x[None], size, p, stride=s)[0]
            if progress is not None:
                progress(some.stop, rows)
        return total[:, p - s : p - s + h, p - s : p - s + w] * (s / p) ** 2

    def _scales(self, padded: Tensor) -> Tensor:
        """Return the scale r of each patch in an image. Rows are processed in blocks to limit memory usage."""
        s = self.stage.stride
        beyond = self.stage.window - s
        rows = (padded.shape[2] - beyond) // s
        starts = range(0, rows, _ROWS_AT_ONCE)
        parts = [padded[:, :, s * a : s * min(a + _ROWS_AT_ONCE, rows) + beyond] for a in starts]
        return torch.cat([self.stage.scales(part)[0] for part in parts])

    def _patches(self, quarters: Tensor) -> Tensor:
        """Assemble patches of shape (c * p * p, n) from quarters of shape (4, c * q * q, n).

        Each quarter is flipped to the position of the first quarter.
        """
        p = self.stage.patch
        q = (p + 1) // 2
        c = self.stage.channels
        first, across, down, both = quarters.unflatten(1, (c, q, q))
        found = quarters.new_empty(c, p, p, quarters.shape[-1])
        found[:, :q, :q] = first
        found[:, :q, p - q :] = across.flip(2)
        found[:, p - q :, :q] = down.flip(1)
        found[:, p - q :, p - q :] = both.flip(1, 2)
        return found.flatten(0, 2)


class _Phases:
    """Padded image of shape (c, h, w) whose columns are grouped by their position modulo the stride.

    The grouping makes memory access contiguous.
    """

    def __init__(self, padded: Tensor, stride: int) -> None:
        self._phases = [padded[..., first::stride].contiguous() for first in range(stride)]
        self._stride = stride

    def parts(self, rows: slice, window: int, columns: int) -> Tensor:
        """Return the sums and differences of mirrored pixels in each window, for selected rows of patches.

        The result has shape (4, c * q * q, patches).
        """
        s = self._stride
        q = (window + 1) // 2
        count = rows.stop - rows.start
        channels = len(self._phases[0])
        found = self._phases[0].new_empty(2, 2, channels, q, q, count, columns)
        lines = slice(rows.start * s, (rows.stop - 1) * s + window)
        for odd in (0, 1):
            halves = []
            for phase in self._phases:
                view = phase[:, lines].unfold(1, (count - 1) * s + 1, 1)[..., ::s]  # (c, w, columns, rows)
                top = view[:, :q]
                bottom = view[:, window - q :].flip(1)
                halves.append((top - bottom if odd else top + bottom).transpose(2, 3))  # (c, q, rows, columns)
            for one in range(q):
                other = window - 1 - one
                near = halves[one % s][..., one // s : one // s + columns]
                far = halves[other % s][..., other // s : other // s + columns]
                torch.add(near, far, out=found[odd, 0, :, :, one])
                torch.sub(near, far, out=found[odd, 1, :, :, one])
        return found.flatten(5).flatten(2, 4).flatten(0, 1)


class StageSequence(nn.Module):
    """Sequence of stages, each applied to the output of the previous stage."""

    def __init__(self, stages: Sequence[Stage]) -> None:
        super().__init__()
        self.stages = nn.ModuleList(stages)

    def __iter__(self) -> Iterator[Stage]:
        return iter(cast("Sequence[Stage]", self.stages))

    def __len__(self) -> int:
        return len(self.stages)

    @property
    def symmetric(self) -> list[SymmetricStage]:
        """List of all stages. Raises TypeError if a stage is not symmetric."""
        if not all(isinstance(stage, SymmetricStage) for stage in self.stages):
            raise TypeError("all stages must be symmetric, got a MachineStage")
        return cast("list[SymmetricStage]", list(self.stages))

    @property
    def device(self) -> torch.device:
        """Device on which the parameters are stored."""
        return next(self.parameters()).device

    @property
    def n_parameters(self) -> int:
        """Total number of parameters in all stages."""
        return sum(parameter.numel() for parameter in self.parameters())

    @torch.no_grad()
    def run(
        self,
        image: Tensor,
        after: Callable[[Tensor], Tensor] | None = None,
        *,
        level: float | None = None,
        mask: Tensor | None = None,
        progress: Progress | None = None,
    ) -> Tensor:
        """Apply all stages to an image of shape (c, h, w) and return the corrected image.

        The image can be any size. `after` is applied to the image after each stage. `level` is the noise level. `mask`
        has shape (1, h, w) and is 1 for corrupted pixels. If `mask` is given, only corrupted pixels change.
        """
        for which, stage in enumerate(self):

            def report(done: int, total: int, which: int = which) -> None:
                if progress is not None:
                    progress(_PARTS * which + _PARTS * done // total, _PARTS * len(self))

            missing = stage.prepare()(image, level, mask, report)
            image = image + (missing if mask is None else missing * mask)
            image = image if after is None else after(image)
        return image

    def run_mirrored(
        self, image: Tensor, *, level: float | None = None, mask: Tensor | None = None, progress: Progress | None = None
    ) -> Tensor:
        """Extend an image by mirroring it at the edges, and apply all stages as in :meth:`run`.

        By default, stages repeat the edge pixels, which causes streaks if these pixels are noisy. The result has the
        size of the original image.
        """
        height, width = image.shape[1:]
        rows, columns = (
            torch.from_numpy(np.pad(np.arange(size), _MIRRORED, mode="reflect")).to(image.device)
            for size in (height, width)
        )
        holes = None if mask is None else mask[:, rows][:, :, columns]
        found = self.run(image[:, rows][:, :, columns], level=level, mask=holes, progress=progress)
        return found[:, _MIRRORED : _MIRRORED + height, _MIRRORED : _MIRRORED + width]
