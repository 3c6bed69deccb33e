"""Triton kernels for tempered binary layers: sampling, and free energies at several temperatures.

At inverse temperature beta, the field on a layer is base + beta (field - base). Each kernel replaces several PyTorch
kernels, whose launch overhead would exceed the computation time.
"""

# mypy: ignore-errors
import torch
import triton
import triton.language as tl
from torch import Tensor

# Number of entries per program.
_BLOCK = 1024


# Do not specialize on the number of samples. A new number would compile a new kernel, which CUDA graphs cannot capture.
@triton.jit(do_not_specialize=["total"])
def _draw(field, base, bias, beta, numbers, out, total, WIDTH: tl.constexpr, PER_SAMPLE: tl.constexpr,
          BLOCK: tl.constexpr):  # fmt: skip
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = at < total
    column = at % WIDTH
    here = tl.load(base + column, inside, 0.0)
    strength = tl.load(beta + at // WIDTH, inside, 0.0) if PER_SAMPLE else tl.load(beta)
    field_here = tl.load(bias + column, inside, 0.0) + here + strength * (tl.load(field + at, inside, 0.0) - here)
    mean = 1.0 / (1.0 + tl.exp(-field_here))
    tl.store(out + at, tl.where(tl.load(numbers + at, inside, 1.0) < mean, 1.0, 0.0), inside)


@triton.jit
def softplus(x):
    """Return log(1 + exp(x)), computed without overflow."""
    return tl.maximum(x, 0.0) + tl.log(1.0 + tl.exp(-tl.abs(x)))


@triton.jit(do_not_specialize=["n"])
def _energies(field, base, bias, betas, pull, out, n, WIDTH: tl.constexpr, PER_SAMPLE: tl.constexpr,
              BLOCK: tl.constexpr):  # fmt: skip
    row = tl.program_id(0)  # index of a (temperature, sample) pair
    sample = row % n
    beta = tl.load(betas + row) if PER_SAMPLE else tl.load(betas + row // n)
    total = tl.zeros([BLOCK], tl.float32)
    for start in range(0, WIDTH, BLOCK):
        column = start + tl.arange(0, BLOCK)
        inside = column < WIDTH
        here = tl.load(base + column, inside, 0.0)
        there = tl.load(field + sample * WIDTH + column, inside, 0.0)
        field_here = tl.load(bias + column, inside, 0.0) + here + beta * (there - here)
        total += tl.where(inside, softplus(field_here), 0.0)
    tl.store(out + row, (beta - 1.0) * tl.load(pull + sample) - tl.sum(total, 0))


def draw(field: Tensor, base: Tensor, bias: Tensor, beta: Tensor, numbers: Tensor) -> Tensor:
    r"""Sample binary entries at one or several temperatures, using the uniform random numbers in `numbers`.

    `field`, `numbers` and the result have shape (n, \*shape). `base` has shape (1, \*shape), and `bias` broadcasts to
    that shape. `beta` has shape (n,) or (1,).
    """
    field, out = field.contiguous(), torch.empty_like(field, memory_format=torch.contiguous_format)
    grid = (-(-out.numel() // _BLOCK),)
    _draw[grid](
        field, base.contiguous(), bias.expand(base.shape).contiguous(), beta.contiguous(), numbers.contiguous(), out,
        out.numel(), WIDTH=base.numel(), PER_SAMPLE=len(beta) > 1, BLOCK=_BLOCK,
    )  # fmt: skip
    return out


def energies(field: Tensor, base: Tensor, bias: Tensor, betas: Tensor, pull: Tensor) -> Tensor:
    r"""Compute free energies at several temperatures. See :meth:`mvrbm.sampling.TemperedPath.energies`.

    The result is ``(beta - 1) * pull`` minus the log-normalizer of the binary entries, and has shape (k, n). `betas`
    has shape (k, n) or (k, 1), and `pull` has shape (n,). For the other arguments, see :func:`draw`.
    """
    out = torch.empty(len(betas), len(field), dtype=field.dtype, device=field.device)
    _energies[(out.numel(),)](
        field.contiguous(), base.contiguous(), bias.expand(base.shape).contiguous(), betas.contiguous(), pull, out,
        len(field), WIDTH=base.numel(), PER_SAMPLE=betas.shape[1] > 1, BLOCK=_BLOCK,
    )  # fmt: skip
    return out
