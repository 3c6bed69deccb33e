"""Counter-based random numbers.

Every number is a function of a key and of the indices of the step, draw, row and entry. It does not depend on earlier
draws. There is no generator state to save, split or replay. The rest of the package uses :class:`RandomSource`, defined
in `source`. `philox` is the reference implementation in PyTorch. The Triton kernels in `kernels` and the C code in
:mod:`mvrbm.compiled` compute the same numbers.
"""

from mvrbm.random.source import RandomSource

__all__ = ["RandomSource"]
