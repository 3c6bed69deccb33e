r"""Stages: tied multimodal MVRBMs whose mean-field pass maps an image to a better one of the same size.

A patch of p x p pixels has the visible layers X (the correction) and Z1 to Z4 (its derivatives along x, y, xx
and yy) for every channel, all divided by the root mean square of the derivatives, r. Optional layers are M, a mask of
corrupted pixels, and T, a code of the size of the noise against r. All share one hidden layer: every orientation g of a
base machine of K x L units, of which there are eight, sees the patch flipped and turned by g,

.. math:: E = \sum_m \frac{\lVert V_m\rVert^2}{2} - \sum_g \langle Y_g, C + \sum_m W_m (g V_m)\rangle,

each W a sum of Kronecker products. The pass starts with X = 0, updates Y and then X, and averages the X of overlapping
patches. So a flipped image gives the flipped result. Hidden units count from a half, which is a visible bias.
"""

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

#: Bumps along the logarithm of the size of noise, and the sizes, as shares of r, where the first and the last lie.
CODES, SMALLEST, LARGEST = 10, 0.02, 10.0

_DERIVATIVES = 4
_MARGIN = 2  # pixels beyond a patch that its second differences depend on
_ROWS_AT_ONCE = 128  # rows of patches whose scales are computed together
_ENTRIES_AT_ONCE = (2**20, 2**27)  # hidden units of patches that are inferred together, on a CPU and on a GPU

Progress = Callable[[int, int], None]


def code(size: Tensor) -> Tensor:
    """Return the code (..., CODES) of positive numbers by bumps along their logarithm; that of 0 is 0."""
    low, high = math.log(SMALLEST), math.log(LARGEST)
    centers, width = torch.linspace(low, high, CODES, device=size.device), (high - low) / (CODES - 1)
    bumps = torch.exp(-0.5 * ((size.clamp(SMALLEST, LARGEST).log()[..., None] - centers) / width) ** 2)
    return bumps * (size > 0)[..., None]


def _derivatives(patch: int) -> Tensor:
    """Return the matrix (4 p p, w w) from windows to the derivatives of patches along x, y, xx and yy."""
    line = torch.eye(patch + 2 * _MARGIN)
    plain = line[_MARGIN:-_MARGIN]
    slope, bend = line[3:-1] - line[1:-3], line[4:] - 2 * plain + line[:-4]
    pairs = ((plain, slope), (slope, plain), (plain, bend), (bend, plain))
    return torch.cat([torch.kron(rows, columns) for rows, columns in pairs])


class Stage(nn.Module):
    """One stage; `coded` says whether it has a layer T, `mask` whether it has a layer M.

    :meth:`forward` is differentiable and for batches; :class:`Pass` is faster, for one image of any size.
    """

    product = torch.float32  # dtype of the two large products of `forward`

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
        super().__init__()
        if patch % stride:
            raise ValueError(f"patch must be a multiple of the stride, {stride}, got {patch}")
        self.channels, self.patch, self.stride, self.mask, self.floor = channels, patch, stride, mask, floor
        layers, base = (1 + _DERIVATIVES) * channels + mask, hidden[0] * hidden[1]
        deviation = 0.7 * (0.05 / (rank * patch)) ** 0.25
        self.left = nn.Parameter(torch.randn(layers, rank, hidden[0], patch) * deviation)
        self.right = nn.Parameter(torch.randn(layers, rank, hidden[1], patch) * deviation)
        with torch.no_grad():
            self.left[:channels] = 0  # a new stage changes nothing
        self.bias = nn.Parameter(torch.zeros(base))
        self.visible_bias = nn.Parameter(torch.zeros(channels))
        self.codes = nn.Parameter(torch.randn(base, CODES)) if coded else None  # each unit for some sizes of noise
        self.features: Tensor
        self.register_buffer("features", _derivatives(patch), persistent=False)  # (4 p p, w w)

    @property
    def window(self) -> int:
        """Side of what a patch depends on."""
        return self.patch + 2 * _MARGIN

    @property
    def padding(self) -> int:
        """By how many pixels an image continues beyond its edges."""
        return self.patch - self.stride + _MARGIN

    def weights(self) -> Tensor:
        """Return the weights of the base machine to each layer, (layers, K L, p p): X, then Z, then M."""
        product = torch.einsum("mrki,mrlj->mklij", self.left, self.right)
        return product.flatten(3).flatten(1, 2)

    def filters(self) -> tuple[Tensor, Tensor]:
        """Return those from windows to hidden units, (K L, inputs, w, w), and to X, (K L, channels, p, p)."""
        c, full = self.channels, self.weights()
        derivatives = full[c : (1 + _DERIVATIVES) * c].reshape(c, _DERIVATIVES, full.shape[1], -1)
        up = (derivatives.transpose(1, 2).flatten(2) @ self.features).unflatten(2, (self.window, self.window))
        if self.mask:
            up = torch.cat([up, F.pad(full[-1:].unflatten(2, (self.patch, self.patch)), (_MARGIN,) * 4)])
        return up.transpose(0, 1), full[:c].transpose(0, 1).unflatten(2, (self.patch, self.patch))

    def scales(self, padded: Tensor) -> Tensor:
        """Return r of every patch: padded images (n, c, h, w) -> (n, rows, columns)."""
        b, inner = padded, slice(_MARGIN, -_MARGIN)
        squares = (b[..., inner, 3:-1] - b[..., inner, 1:-3]).square()
        squares = squares + (b[..., 3:-1, inner] - b[..., 1:-3, inner]).square()
        squares = squares + (b[..., inner, 4:] - 2 * b[..., inner, inner] + b[..., inner, :-4]).square()
        squares = squares + (b[..., 4:, inner] - 2 * b[..., inner, inner] + b[..., :-4, inner]).square()
        means = F.avg_pool2d(squares.mean(1, keepdim=True), self.patch, self.stride)[:, 0] / _DERIVATIVES
        return means.clamp_min(1e-8).sqrt() + self.floor  # the root of 0 has no gradient

    def unit(self, r: Tensor, level: Tensor | None) -> Tensor:
        """Return the unit of X in patches (n, ...): r, and no more than the noise where its size (n,) is known."""
        if level is None:
            return r
        share = (level.reshape(-1, *[1] * (r.ndim - 1)) / r).square() + 1e-8
        return r * (share / (share + 0.25)).sqrt()

    def windows(self, image: Tensor) -> tuple[Tensor, Tensor]:
        """Return windows (n, c, w w, patches) of images (n, c, h, w), and the r of the patches (n, patches)."""
        padded = F.pad(image, (self.padding,) * 4, mode="replicate")
        cut = F.unfold(padded, self.window, stride=self.stride).unflatten(1, (-1, self.window**2))
        return cut, self.scales(padded).flatten(1)

    def forward(self, image: Tensor, level: Tensor | None = None, mask: Tensor | None = None) -> Tensor:
        """Return the correction of images (n, c, h, w) whose sides the stride divides.

        `level` (n,) is the size of the noise, `mask` (n, 1, h, w) is 1 where pixels are corrupted.
        """
        p, s, (n, c, h, w) = self.patch, self.stride, image.shape
        windows, r = self.windows(image)
        up, down = (all_turns(each) for each in self.filters())
        columns, others = [up], []
        if mask is not None:
            others.append(F.unfold(F.pad(mask, (self.padding,) * 4), self.window, stride=s).transpose(0, 1))
        if self.codes is not None and level is not None:
            others.append(code(level[:, None] / r).permute(2, 0, 1))
            columns.append(self.codes.repeat(8, 1))
        others.append(torch.ones_like(r)[None])
        columns.append(self.bias.repeat(8)[:, None])
        seen = _Seen.apply(windows, r, torch.cat(others), self.product)  # (rows, n, patches)
        weights = F.pad(torch.cat(columns, 1), (0, len(seen) - sum(each.shape[1] for each in columns)))
        # The logistic function less a half is tanh(a / 2) / 2, which is more precise in 16 bits.
        hidden = torch.tanh((0.5 * weights).to(self.product) @ seen.flatten(1))
        x = ((0.5 * down).to(self.product).mT @ hidden).reshape(c, p * p, n, -1).to(image)
        x = (x + self.visible_bias[:, None, None, None]) * self.unit(r, None if self.codes is None else level)
        size = (h + 2 * (p - s), w + 2 * (p - s))
        out = F.fold(x.permute(2, 0, 1, 3).flatten(1, 2), size, p, stride=s) * (s / p) ** 2
        return out[..., p - s : p - s + h, p - s : p - s + w]


class _Seen(torch.autograd.Function):
    """Windows (n, c, w w, patches) less their middle pixel, divided by r, and other rows, as one matrix.

    Its rows are as many as tensor cores like, a multiple of 8, and its columns all patches, so that one product of
    16-bit numbers is all that there is to do.
    """

    @staticmethod
    def forward(ctx: Any, windows: Tensor, r: Tensor, others: Tensor, kind: torch.dtype) -> Tensor:
        """Return (rows, n, patches)."""
        n, c, size, patches = windows.shape
        used, rows = c * size, c * size + len(others)
        out = torch.empty(rows + -rows % 8, n, patches, dtype=kind, device=windows.device)
        middle = windows[:, :, _middle(size), None]
        out[:used] = ((windows - middle) / r[:, None, None]).flatten(1, 2).transpose(0, 1)
        out[used:rows] = others
        out[rows:] = 0
        ctx.save_for_backward(out, r)
        ctx.shape, ctx.rows = windows.shape, rows
        return out

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        """Return the gradients of windows, r and the other rows."""
        if not ctx.needs_input_grad[1]:
            return None, None, None, None
        (n, c, size, patches), (out, r) = ctx.shape, ctx.saved_tensors
        grad = grads[0][: c * size].to(r)
        of_r = -(grad * out[: c * size]).sum(0) / r
        of_windows = (grad / r).transpose(0, 1).reshape(n, c, size, patches)
        of_windows[:, :, _middle(size)] -= of_windows.sum(2)
        return of_windows, of_r, grads[0][c * size : ctx.rows].to(r), None


def _middle(size: int) -> int:
    """Return the number of the middle pixel of a square window of `size` pixels."""
    side = math.isqrt(size)
    return side // 2 * side + side // 2


def all_turns(filters: Tensor) -> Tensor:
    """Return all eight orientations of filters: (n, c, w, w) -> (8 n, c w w)."""
    both = torch.cat([filters, filters.flip(-1)])
    return torch.cat([both.rot90(k, (-2, -1)) for k in range(4)]).flatten(1)


def _even_and_odd(filters: Tensor) -> Tensor:
    """Return the parts (4, ..., q, q), of one quarter, of filters (..., w, w) that are even or odd along both sides.

    With all patterns of signs, they add up to the four quarters, each flipped to the place of the first.
    """
    w = filters.shape[-1]
    q = (w + 1) // 2
    near, far, parts = filters[..., :q, :], filters[..., w - q :, :].flip(-2), []
    for rows in (near + far, near - far):
        parts += [rows[..., :q] + rows[..., w - q :].flip(-1), rows[..., :q] - rows[..., w - q :].flip(-1)]
    return torch.stack(parts) / 4


def _mix(parts: Tensor) -> Tensor:
    """Replace parts (4, ...) by their sums with all patterns of signs, which belong to the four flips."""
    plain, flipped = parts[::2] + parts[1::2], parts[::2] - parts[1::2]
    for which, (even, odd) in enumerate((plain, flipped)):
        torch.add(even, odd, out=parts[which])
        torch.sub(even, odd, out=parts[2 + which])
    return parts


class Pass:
    r"""The pass of a stage over one image, with the products that flips share made once.

    A window is split into parts that are even or odd along rows and columns. The fields of the four flips of a filter
    are the sums of the products of the parts with four patterns of signs: a quarter of the products. So it is on the
    way down.
    """

    @torch.no_grad()
    def __init__(self, stage: Stage) -> None:
        self.stage = stage
        up, down = stage.filters()
        parts = _even_and_odd(torch.cat([up, up.mT]))
        if stage.window % 2:  # what is in the middle is counted twice by the sums of mirrored pixels
            parts[..., -1, :] /= 2
            parts[..., -1] /= 2
        self._up = parts.flatten(2).contiguous()  # (4, 2 K L, inputs q q)
        self._down = _even_and_odd(torch.cat([down, down.mT])).flatten(2).mT.contiguous()  # (4, c q q, 2 K L)
        self._bias = stage.bias.detach().repeat(2)[:, None]
        self._codes = None if stage.codes is None else stage.codes.detach().repeat(2, 1)
        visible = stage.visible_bias.detach().repeat_interleave(self._down.shape[1] // stage.channels)
        self._visible_bias = (visible - 2 * self._down[0].sum(1))[:, None]  # four flips, each from a half

    @torch.no_grad()
    def __call__(
        self, image: Tensor, level: float | None = None, mask: Tensor | None = None, progress: Progress | None = None
    ) -> Tensor:
        """Return the correction of an image (c, h, w) of any size; the rest is as for :meth:`Stage.forward`."""
        stage, p, s = self.stage, self.stage.patch, self.stage.stride
        c, h, w = image.shape
        beyond = (0, -w % s, 0, -h % s)  # to multiples of the stride
        padded = F.pad(F.pad(image[None], beyond, mode="replicate"), (stage.padding,) * 4, mode="replicate")
        r = self._scales(padded)
        shares = None if level is None or self._codes is None else level / r
        unit = r if shares is None else stage.unit(r[None], r.new_tensor([level]))[0]
        # Derivatives do not depend on the mean; without it, rounding is less.
        sources, scales = [_Columns(padded[0].sub_(0.5), s)], [r]
        if mask is not None:
            sources.append(_Columns(F.pad(F.pad(mask, beyond), (stage.padding,) * 4), s))
            scales.append(torch.ones_like(r))
        rows, columns = r.shape
        at_once = max(1, _ENTRIES_AT_ONCE[image.is_cuda] // (4 * columns * self._up.shape[1]))
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
        """Return r of every patch of one image, some rows at a time, which bounds the memory."""
        s, beyond = self.stage.stride, self.stage.window - self.stage.stride
        rows = (padded.shape[2] - beyond) // s
        starts = range(0, rows, _ROWS_AT_ONCE)
        parts = [padded[:, :, s * a : s * min(a + _ROWS_AT_ONCE, rows) + beyond] for a in starts]
        return torch.cat([self.stage.scales(part)[0] for part in parts])

    def _patches(self, quarters: Tensor) -> Tensor:
        """Return patches (c p p, n) given their quarters (4, c q q, n), flipped to the place of the first."""
        p, q, c = self.stage.patch, (self.stage.patch + 1) // 2, self.stage.channels
        first, across, down, both = quarters.unflatten(1, (c, q, q))
        found = quarters.new_empty(c, p, p, quarters.shape[-1])
        found[:, :q, :q], found[:, :q, p - q :] = first, across.flip(2)
        found[:, p - q :, :q], found[:, p - q :, p - q :] = down.flip(1), both.flip(1, 2)
        return found.flatten(0, 2)


class _Columns:
    """A padded image (c, h, w), its columns sorted by the phase in which patches see them, for fast access."""

    def __init__(self, padded: Tensor, stride: int) -> None:
        self._phases = [padded[..., first::stride].contiguous() for first in range(stride)]
        self._stride = stride

    def parts(self, rows: slice, window: int, columns: int) -> Tensor:
        """Return sums and differences of mirrored pixels of windows, (4, c q q, patches), for some rows of patches."""
        s, q, count = self._stride, (window + 1) // 2, rows.stop - rows.start
        channels = len(self._phases[0])
        found = self._phases[0].new_empty(2, 2, channels, q, q, count, columns)
        lines = slice(rows.start * s, (rows.stop - 1) * s + window)
        for odd in (0, 1):
            halves = []
            for phase in self._phases:
                view = phase[:, lines].unfold(1, (count - 1) * s + 1, 1)[..., ::s]  # (c, w, columns, rows)
                top, bottom = view[:, :q], view[:, window - q :].flip(1)
                halves.append((top - bottom if odd else top + bottom).transpose(2, 3))  # (c, q, rows, columns)
            for one in range(q):
                other = window - 1 - one
                near = halves[one % s][..., one // s : one // s + columns]
                far = halves[other % s][..., other // s : other // s + columns]
                torch.add(near, far, out=found[odd, 0, :, :, one])
                torch.sub(near, far, out=found[odd, 1, :, :, one])
        return found.flatten(5).flatten(2, 4).flatten(0, 1)
