"""Random numbers that depend on where they are used, not on what was drawn before.

Every number is a function of a key, a step, a draw, a row and an entry. There is no generator state to save, split or
replay. :class:`RandomSource`, in `source`, is the interface for the rest of the package. `philox` defines the numbers
in PyTorch, and `kernels` computes the same numbers in Triton. The C code in :mod:`mvrbm.compiled` computes them too.
"""

from mvrbm.random.source import RandomSource

__all__ = ["RandomSource"]
