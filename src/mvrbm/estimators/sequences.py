"""Boltzmann machine for aligned sequences of proteins, RNA or DNA."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import KW_ONLY, dataclass, field
from pathlib import Path
from typing import Any

from torch import Tensor

from mvrbm.errors import StorageError
from mvrbm.estimators.array_rbm import ArrayRBM
from mvrbm.estimators.base import to_array
from mvrbm.estimators.batches import Array, model_dtype, unit_for
from mvrbm.estimators.inputs import VISIBLE
from mvrbm.io.alignments import Alignment, as_alignment
from mvrbm.io.alphabets import Alphabet
from mvrbm.likelihood import pseudo_log_likelihood
from mvrbm.saving import register
from mvrbm.units import Unit
from mvrbm.updates.recipe import Recipe


class AlignedRBM(ArrayRBM):
    """Base class for models with one visible layer of aligned sequences, one-hot encoded by letters."""

    alphabet: str | Alphabet | None
    alphabet_: Alphabet
    n_sites_: int

    def _read_layers(self, X: Any, *, reset: bool) -> dict[str, Any]:
        return {VISIBLE: (self._learn_alphabet(X) if reset else self.align(X)).one_hot()}

    def _learn_alphabet(self, X: Any) -> Alignment:
        """Read training sequences, and set the alphabet and the number of sites."""
        alignment = as_alignment(X, self.alphabet, unknown=True)
        self.alphabet_ = alignment.alphabet
        self.n_sites_ = alignment.codes.shape[1]
        return alignment

    def align(self, X: Any) -> Alignment:
        """Read sequences with the alphabet and the number of sites of the model.

        Parameters
        ----------
        X : path, sequence of str, array or Biopython alignment
            Sequences in a format that :meth:`fit` accepts. A question mark is an unknown letter.
        """
        alignment = as_alignment(X, self.alphabet_, unknown=True)
        if alignment.codes.shape[1] != self.n_sites_:
            raise ValueError(
                f"the sequences have {alignment.codes.shape[1]:,} sites, but the model has {self.n_sites_:,}; align "
                "them to the training sequences"
            )
        return alignment

    def _new_units(self, layers: Mapping[str, Any]) -> dict[str, Unit]:
        return {VISIBLE: unit_for(self.visible, layers[VISIBLE]).to(model_dtype(layers))}

    def _masks_by_layer(self, mask: Any) -> Mapping[str, Any]:
        return {VISIBLE: mask}

    def _to_user(self, layers: Mapping[str, Tensor], like: Any = None) -> Array:
        return to_array(layers[VISIBLE])

    # -- scores -----------------------------------------------------------------------------------

    def score_samples(self, X: Any, *, exact: bool = False) -> Array:
        """Return the log-likelihood of each sequence up to the constant log Z, as an array of shape (n,)."""
        return -self.free_energy(X)

    def pseudo_likelihood(self, X: Any) -> Array:
        """Return the exact pseudo-log-likelihood of each sequence in nats, as an array of shape (n,)."""
        return self._map_batches(
            X, lambda batch: pseudo_log_likelihood(self.machine_, batch, n_sites=None, check=False).values
        )

    # -- files ------------------------------------------------------------------------------------

    def _description(self) -> dict[str, Any]:
        return {**super()._description(), "letters": self.alphabet_.letters, "alphabet": self.alphabet_.name}

    @classmethod
    def _from_json(cls, name: str, value: Any) -> Any:
        if name == "alphabet" and isinstance(value, Mapping):
            return Alphabet(**value)
        return super()._from_json(name, value)

    def _restore(self, folder: Path, described: Mapping[str, Any]) -> None:
        super()._restore(folder, described)
        if list(self.machine_.layers) != [VISIBLE] or len(self.machine_.layers[VISIBLE].shape) != 2:
            raise StorageError("a sequence model requires one visible layer of shape (sites, letters)")
        self.n_sites_, letters = self.machine_.layers[VISIBLE].shape
        self.alphabet_ = Alphabet(described["letters"], described["alphabet"])
        if len(self.alphabet_) != letters:
            raise StorageError(f"the alphabet has {len(self.alphabet_)} letters, but the model has {letters}")


@register("SequenceRBM")
@dataclass(eq=False, repr=False)
class SequenceRBM(AlignedRBM):
    """Restricted Boltzmann machine for aligned sequences, which are matrices of sites by letters.

    Parameters
    ----------
    hidden_shape : tuple of int, default=(40, 10)
        Shape of the hidden layer. The first axis meets the sites, and the second axis meets the letters.
    alphabet : str or Alphabet, optional
        ``"protein"``, ``"rna"``, ``"dna"``, or the letters themselves. Default: detected from the sequences.
    rank : int, default=8
        Number of Kronecker products in the weights.
    coupling : Coupling or str, optional
        Coupling to use instead of ``Kronecker(rank)``. See :class:`~mvrbm.MVRBM`.
    hidden : str, default="bernoulli"
        Unit type of the hidden layer. See :class:`~mvrbm.MVRBM`.
    recipe : str or Recipe, default="generative"
        Training settings. See :class:`~mvrbm.MVRBM`.
    n_epochs, batch_size, learning_rate, negative, n_chains, gibbs_steps, warm_start
        See :class:`~mvrbm.MVRBM`.
    backend, random_state, device, verbose
        See :class:`~mvrbm.MVRBM`.

    Attributes
    ----------
    alphabet_ : Alphabet
        The letters.
    n_sites_ : int
        Number of sites of a sequence.
    machine_ : BoltzmannMachine
        The fitted machine, whose visible layer has shape (n_sites_, letters).

    Examples
    --------
    >>> from mvrbm import SequenceRBM
    >>> family = ["ACDE-", "ACDEF", "GCDKF", "GCD-F"] * 10
    >>> model = SequenceRBM((3, 2), rank=1, n_epochs=2, random_state=0).fit(family)
    >>> model.transform(family).shape
    (40, 6)
    """

    visible: Any = field(default="categorical", init=False)
    hidden_shape: Any = (40, 10)
    _: KW_ONLY
    alphabet: str | Alphabet | None = None
    rank: int = 8
    coupling: Any = None
    recipe: str | Recipe = "generative"
