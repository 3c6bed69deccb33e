"""Programmatic dependent launch: a kernel starts while the previous one ends, and waits before it reads its results.

All kernels of this folder take `PDL`, whether launches overlap (GPUs from Hopper on). Before the wait, a kernel may
compute only what does not depend on the previous launch: positions, random numbers, data and learning rates.
"""

# mypy: ignore-errors
import triton
import triton.language as tl
from triton.language.extra import cuda


@triton.jit
def wait(PDL: tl.constexpr):
    """Wait for the previous launch."""
    if PDL:
        cuda.gdc_wait()


@triton.jit
def begin_next(PDL: tl.constexpr):
    """Allow the next launch to start once all programs have reached this point. It still waits for their results."""
    if PDL:
        cuda.gdc_launch_dependents()


@triton.jit
def after_previous(PDL: tl.constexpr):
    """Wait for the previous launch, and allow the next one to start."""
    wait(PDL)
    begin_next(PDL)


@triton.jit
def fresh(at, inside):
    """Load values that the previous launch wrote, zero outside."""
    # Bypass the L1 cache: it may hold outdated values that the previous launch has read.
    return tl.load(at, mask=inside, other=0.0, cache_modifier=".cg")
