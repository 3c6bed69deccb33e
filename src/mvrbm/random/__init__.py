"""Random numbers that depend on where they are used, not on what was drawn before.

Every number is a function of a key, a step, a draw, a row and an entry: there is no generator state to save, split or
replay. `source` has :class:`RandomSource`, which the package draws from; `philox` defines the numbers in PyTorch; and
`kernels` computes the same numbers in Triton. The C code has them too, in `mvrbm.compiled`.
"""

from mvrbm.random.source import RandomSource

__all__ = ["RandomSource"]
