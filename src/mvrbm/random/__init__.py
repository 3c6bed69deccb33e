"""Counter-based random numbers.

Every number is a function of a key, a step, a draw, a row and an entry, and does not depend on earlier draws. There is
no generator state to save, split or replay. The rest of the package uses :class:`RandomSource`, defined in `source`.
`philox` is the reference implementation in PyTorch. `kernels` (Triton) and the C code in :mod:`mvrbm.compiled` compute
the same numbers.
"""

from mvrbm.random.source import RandomSource

__all__ = ["RandomSource"]
