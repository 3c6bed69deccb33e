"""The machine of a sequence model, its weights, and the conversion of sequences to visible states."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from mvrbm.errors import InputError
from mvrbm.io.alignments import as_alignment
from mvrbm.io.alphabets import Alphabet
from mvrbm.machine import BoltzmannMachine
from mvrbm.random import RandomSource
from mvrbm.sampling import sample

__all__ = ["SiteModel", "hidden_weights"]

Array = NDArray[Any]

# Number of sequences that are drawn from a model, and number of Gibbs steps, if the user passes no sequences.
_DRAWN, _STEPS = 1000, 300
# Maximum number of entries of one-hot arrays and hidden fields that are computed at a time.
_CHUNK_ENTRIES = 2**24


@dataclass(frozen=True)
class SiteModel:
    """Machine with one layer of one-hot rows, one row per site, and the alphabet of its letters if there is one."""

    machine: BoltzmannMachine
    name: str
    alphabet: Alphabet | None

    @classmethod
    def of(cls, model: Any) -> SiteModel:
        """Create a `SiteModel` from a fitted estimator or from a machine."""
        machine = getattr(model, "machine_", model)
        if not isinstance(machine, BoltzmannMachine):
            raise ValueError(f"model must be a fitted SequenceRBM or a BoltzmannMachine, got {type(model).__name__}")
        (name, unit), *others = machine.layers.items()
        if others or not unit.one_hot or len(unit.shape) != 2:
            shapes = {name: unit.shape for name, unit in machine.layers.items()}
            raise ValueError(
                f"model must have one categorical visible layer of shape (sites, letters), got layers {shapes}"
            )
        return cls(machine, name, getattr(model, "alphabet_", None))

    @property
    def sites(self) -> int:
        """Number of sites."""
        return self.machine.layers[self.name].shape[0]

    @property
    def letters(self) -> int:
        """Number of letters."""
        return self.machine.layers[self.name].shape[1]

    @property
    def solid(self) -> list[int]:
        """Codes of all letters except the gap."""
        gap = -1 if self.alphabet is None else self.alphabet.letters.find("-")
        return [code for code in range(self.letters) if code != gap]

    def encode(self, sequences: Any) -> Array:
        """Convert sequences to codes of shape (n, sites). Without an alphabet, sequences must be an array of codes."""
        if self.alphabet is None:
            codes = np.asarray(sequences)
            if codes.dtype.kind not in "iu" or codes.ndim != 2:
                raise InputError(
                    "sequences for a machine without an alphabet must be an array of integer codes of shape (n, sites)"
                )
            if codes.size and not 0 <= codes.min() <= codes.max() < self.letters:
                raise InputError(
                    f"codes must be from 0 to {self.letters - 1}, got values from {codes.min()} to {codes.max()}"
                )
        else:
            codes = as_alignment(sequences, self.alphabet).codes
        if codes.shape[1] != self.sites:
            raise InputError(f"the sequences have {codes.shape[1]:,} sites, but the model has {self.sites:,}")
        return codes

    def one_hot(self, codes: Array) -> Tensor:
        """Convert codes of shape (n, sites) to states of the machine."""
        like = self.machine.like
        digits = torch.from_numpy(np.asarray(codes, np.int64)).to(like.device)
        return torch.nn.functional.one_hot(digits, self.letters).to(like.dtype)

    def draw(self) -> Array:
        """Draw sequences by Gibbs sampling from random initial states with a fixed seed, and return their codes."""
        state = sample(self.machine, _DRAWN, _STEPS, RandomSource(0), check=False)
        codes: Array = state.visible[self.name].argmax(-1).cpu().numpy()
        return codes

    def chunks(self, codes: Array) -> list[Array]:
        """Split codes so that the states of one chunk and their hidden fields fit into memory."""
        size = self.sites * self.letters + self.machine.hidden.bias.numel()
        rows = max(1, _CHUNK_ENTRIES // size)
        return [codes[start : start + rows] for start in range(0, len(codes), rows)]

    @torch.no_grad()
    def weights(self) -> Tensor:
        r"""Return `W` in the zero-sum gauge, in double precision: (\*hidden shape, sites, letters)."""
        weights = self.machine.links[self.name].dense().double()
        return weights - weights.mean(-1, keepdim=True)


def hidden_weights(model: Any) -> Array:
    r"""Return the weights of each hidden unit in the zero-sum gauge.

    Parameters
    ----------
    model : SequenceRBM or BoltzmannMachine
        Fitted model.

    Returns
    -------
    array of shape (\*hidden shape, sites, letters)
        Weights. For each site, they sum to zero over the letters.
    """
    weights: Array = SiteModel.of(model).weights().cpu().numpy()
    return weights
