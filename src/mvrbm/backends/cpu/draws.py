"""Functions that sample units from their fields and from random numbers, without allocating arrays for the results."""

import torch
from torch import Tensor

from mvrbm.units.base import pick


def _draw_bernoulli(field: Tensor, numbers: Tensor, into: Tensor) -> None:
    torch.sigmoid(field, out=into)
    torch.lt(numbers, into, out=into)


def _draw_gaussian(field: Tensor, numbers: Tensor, into: Tensor) -> None:
    torch.add(field, numbers, out=into)


def _draw_categorical(field: Tensor, numbers: Tensor, into: Tensor) -> None:
    category = pick(torch.softmax(field, -1), numbers[..., None])
    into.zero_().scatter_(-1, category, 1.0)


#: Functions that sample units from fields (including the bias) and random numbers. They may overwrite the fields. The
#: sampling methods of the units cannot be used, because they allocate arrays and because Gaussian units have variance 1
#: in flat form. Units whose `sampled_as` is None are not supported.
DRAWS = {"bernoulli": _draw_bernoulli, "gaussian": _draw_gaussian, "categorical": _draw_categorical}
