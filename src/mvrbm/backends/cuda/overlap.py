"""Programmatic dependent launch: a kernel starts before the previous kernel has finished, and waits for its results.

All kernels in this package except those in `graph_step` take an argument `PDL`, which enables overlapping launches (on
Hopper and later GPUs). Before the wait, a kernel may only load or compute values that do not depend on the previous
launch (positions, random numbers, data, learning rates, etc.).
"""

# mypy: ignore-errors
import triton
import triton.language as tl
from triton.language.extra import cuda


@triton.jit
def wait(PDL: tl.constexpr):
    """Wait for the previous launch to finish."""
    if PDL:
        cuda.gdc_wait()


@triton.jit
def begin_next(PDL: tl.constexpr):
    """Allow the next kernel to start once all programs reach this point. That kernel still waits for their results."""
    if PDL:
        cuda.gdc_launch_dependents()


@triton.jit
def after_previous(PDL: tl.constexpr):
    """Wait for the previous launch to finish, and then allow the next launch to start."""
    wait(PDL)
    begin_next(PDL)


@triton.jit
def fresh(at, inside):
    """Load values written by the previous launch. Entries where the mask is False are zero."""
    # Bypass the L1 cache, which may contain stale values read by the previous launch.
    return tl.load(at, mask=inside, other=0.0, cache_modifier=".cg")
