"""An update step in two kernel launches, for use in the CUDA graphs of :mod:`mvrbm.backends.graph`.

PyTorch requires about thirty launches for the same step, which computes the learning rates, applies momentum and weight
decay, checks that all parameters are finite, and restores the parameters if they are not. The update rule is in
`step_kernels`.
"""

# mypy: ignore-errors
from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

from mvrbm.backends.cuda.step_kernels import rates_of, step_rule
from mvrbm.updates.state import TrainState, is_factor

# Number of parameters per program.
_BLOCK = 1024


@triton.jit(do_not_specialize=["weight"])
def _propose(
    parameters, momenta, gradients, proposed, n_not_finite, failed, rates, clock, weight, SIZES: tl.constexpr,
    FIRST_BLOCKS: tl.constexpr, FACTORS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Update the momenta, write the new parameters to `proposed`, and count non-finite entries.

    For each parameter, `SIZES` contains the number of entries, `FIRST_BLOCKS` contains the index of the first program,
    and `FACTORS` indicates whether weight decay and the learning rate for factors apply. If an earlier step has failed,
    the kernel does nothing.
    """
    program = tl.program_id(0)
    factor_rate, bias_rate, keep, decay = rates_of(rates, 0, clock, 0)
    within = tl.arange(0, BLOCK)
    if tl.load(failed) == 0:
        for m in tl.static_range(len(SIZES)):
            if (program >= FIRST_BLOCKS[m]) & (program < FIRST_BLOCKS[m + 1]):
                at = (program - FIRST_BLOCKS[m]) * BLOCK + within
                inside = at < SIZES[m]
                value = tl.load(parameters[m] + at, mask=inside, other=0.0)
                momentum = tl.load(momenta[m] + at, mask=inside, other=0.0)
                gradient = tl.load(gradients[m] + at, mask=inside, other=0.0) * weight
                if FACTORS[m]:
                    value, momentum = step_rule(value, momentum, gradient, factor_rate, keep, decay)
                else:
                    value, momentum = step_rule(value, momentum, gradient, bias_rate, keep, 0.0)
                tl.store(momenta[m] + at, momentum, mask=inside)
                tl.store(proposed + program * BLOCK + within, value, mask=inside)
                finite = tl.abs(value) < float("inf")  # False for NaN too
                count = tl.sum(tl.where(inside & (finite == 0), 1, 0))
                tl.atomic_add(n_not_finite + m, count, sem="relaxed")


@triton.jit
def _accept(
    parameters,
    proposed,
    n_not_finite,
    failed,
    clock,
    SIZES: tl.constexpr,
    FIRST_BLOCKS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Accept the proposed parameters and increment the update number, or set `failed` if any entry is not finite."""
    program = tl.program_id(0)
    within = tl.arange(0, BLOCK)
    n_all = 0
    for m in tl.static_range(len(SIZES)):
        n_all += tl.load(n_not_finite + m)
    if n_all == 0:
        for m in tl.static_range(len(SIZES)):
            if (program >= FIRST_BLOCKS[m]) & (program < FIRST_BLOCKS[m + 1]):
                at = (program - FIRST_BLOCKS[m]) * BLOCK + within
                value = tl.load(proposed + program * BLOCK + within)
                tl.store(parameters[m] + at, value, mask=at < SIZES[m])
        if program == 0:
            tl.store(clock, tl.load(clock) + 1)
    elif program == 0:
        tl.store(failed, 1)


class FusedStep:
    """An update step that modifies a state's parameters and momenta in place."""

    def __init__(self, state: TrainState, rates: Sequence[float], clock: Tensor) -> None:
        learned = state.learned
        device = clock.device
        self._names = list(learned)
        self._params = tuple(learned.values())
        self._momenta = tuple(state.momentum_of(name, parameter) for name, parameter in learned.items())
        self._sizes = tuple(parameter.numel() for parameter in self._params)
        self._factors = tuple(is_factor(name) for name in learned)
        first_blocks = [0]
        for size in self._sizes:
            first_blocks.append(first_blocks[-1] + -(-size // _BLOCK))
        self._first_blocks = tuple(first_blocks)
        self._proposed = torch.zeros(first_blocks[-1] * _BLOCK, device=device)
        self._rates = torch.tensor(rates, dtype=torch.float32, device=device)
        self._clock = clock
        #: Number of non-finite entries in each parameter. Once a step has produced such entries, further steps have no
        #: effect.
        self.n_not_finite = torch.zeros(len(learned), dtype=torch.int32, device=device)
        self._failed = torch.zeros((), dtype=torch.int32, device=device)

    def reset(self) -> None:
        """Clear the failure flags so that steps take effect again."""
        self.n_not_finite.zero_()
        self._failed.zero_()

    def make(self, gradient: Mapping[str, Tensor], weight: float) -> None:
        """Multiply a normalized gradient by `weight`, perform a step with it, and increment the update number."""
        gradients = tuple(gradient[name].contiguous() for name in self._names)
        grid = (self._first_blocks[-1],)
        constants = {"SIZES": self._sizes, "FIRST_BLOCKS": self._first_blocks, "BLOCK": _BLOCK}
        _propose[grid](
            self._params, self._momenta, gradients, self._proposed, self.n_not_finite, self._failed, self._rates,
            self._clock, weight, FACTORS=self._factors, **constants,
        )  # fmt: skip
        _accept[grid](self._params, self._proposed, self.n_not_finite, self._failed, self._clock, **constants)


def usable(tensors: Sequence[Tensor]) -> bool:
    """Return whether the kernels support the given tensors (contiguous float32 tensors only)."""
    return all(tensor.dtype == torch.float32 and tensor.is_contiguous() for tensor in tensors)
