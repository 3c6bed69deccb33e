"""The TF32 switch: matrix products of float32 values on tensor cores."""

import contextlib
from collections.abc import Iterator

import torch


@contextlib.contextmanager
def tensor_cores() -> Iterator[None]:
    """Context manager that enables TF32 tensor cores for float32 matrix products on GPUs.

    TF32 rounds operands to 11 significant bits and accumulates in float32.
    """
    matmul = torch.backends.cuda.matmul
    try:
        former = matmul.allow_tf32
    except RuntimeError:  # the user has set another TF32 option in PyTorch, which cannot be combined with this one
        yield
        return
    matmul.allow_tf32 = True
    try:
        yield
    finally:
        matmul.allow_tf32 = former
