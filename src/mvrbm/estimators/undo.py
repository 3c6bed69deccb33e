"""Undo the changes that a failed training run made to an estimator."""

import contextlib
from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import nn


@contextlib.contextmanager
def undo_on_error(estimator: Any, trained_in_place: Iterable[nn.Module] = ()) -> Iterator[None]:
    """Context manager that restores all attributes of an estimator if an exception occurs, including KeyboardInterrupt.

    A new estimator then remains unfitted, and a fitted estimator returns to its previous state. If the context trains
    existing modules in place, pass them as `trained_in_place`, so that their parameters are restored too.
    """
    attributes = dict(vars(estimator))
    tensors = [tensor for module in trained_in_place for tensor in (*module.parameters(), *module.buffers())]
    values = [tensor.detach().clone() for tensor in tensors]
    try:
        yield
    except BaseException:
        vars(estimator).clear()
        vars(estimator).update(attributes)
        with torch.no_grad():
            for tensor, value in zip(tensors, values, strict=True):
                tensor.copy_(value)
        raise
