"""Machines with small couplings expanded to full matrices, for backends where kernel launches dominate the runtime."""

import math

import torch

from mvrbm.couplings import Coupling, Dense
from mvrbm.machine import BoltzmannMachine
from mvrbm.updates.gradient import Gradient

# Number of multiplications that tensor cores complete in the time of a few kernel launches.
_FREE_PRODUCTS = 2**29
# Maximum number of entries in W for which reading and writing W takes less time than a kernel launch.
_SMALL = 2**20
# Maximum number of entries in W for which W fits into the memory of any GPU.
_LARGEST = 2**26


class ExpandedMachine:
    """Copy of a machine that shares the original units and expands couplings to full matrices where that is faster.

    Parameters
    ----------
    original : BoltzmannMachine
        The machine to be trained.
    n : int
        Typical number of samples per matrix product.
    """

    def __init__(self, original: BoltzmannMachine, n: int) -> None:
        self._expanded: dict[str, tuple[Coupling, Dense]] = {}
        for name, link in original.links.items():
            if worth_expanding(link, n):
                matrix = Dense()
                matrix.allocate(link.visible_shape, link.hidden_shape)
                self._expanded[name] = link, matrix.to(original.like)
        self.refresh()
        links = {
            name: self._expanded[name][1] if name in self._expanded else link for name, link in original.links.items()
        }
        self.machine = BoltzmannMachine(original.layers, original.hidden, links)

    @torch.no_grad()
    def refresh(self) -> None:
        """Recompute the full matrices from the current factors."""
        for link, matrix in self._expanded.values():
            matrix.dense().copy_(link.dense())

    def pull_back(self, gradient: Gradient) -> Gradient:
        """Convert the gradient for this machine's parameters to the gradient for the original machine's parameters."""
        found = dict(gradient)
        for name, (link, matrix) in self._expanded.items():
            of_matrix = found.pop(f"couplings.{name}.weight").view_as(matrix.dense())
            parts = link.from_dense_gradient(of_matrix)
            found |= {f"couplings.{name}.{key}": part for key, part in parts.items()}
        return found


def worth_expanding(link: Coupling, n: int) -> bool:
    """Return whether applying a coupling to `n` samples is faster with its full matrix."""
    if link.is_full:
        return False
    entries = math.prod(link.hidden_shape) * math.prod(link.visible_shape)
    fewer_products = entries <= min(link.operations, _LARGEST)
    return fewer_products or (entries <= _SMALL and n * entries <= _FREE_PRODUCTS)
