"""Boltzmann machine for aligned sequences of proteins, RNA or DNA."""

from __future__ import annotations

import math
import os
import warnings
from collections.abc import Callable, Mapping
from dataclasses import KW_ONLY, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from sklearn.utils.validation import check_is_fitted
from torch import Tensor

from mvrbm.couplings import Coupling, Dense
from mvrbm.data.sequence_weights import identity_weights
from mvrbm.devices import sensible_threads
from mvrbm.errors import MixingWarning, StorageError
from mvrbm.estimators.array_rbm import ArrayRBM
from mvrbm.estimators.base import to_array
from mvrbm.estimators.batches import Array, batches, joined, model_dtype, unit_for
from mvrbm.estimators.initial_states import initial_states
from mvrbm.estimators.inputs import VISIBLE
from mvrbm.io.alignments import Alignment, as_alignment, write_fasta
from mvrbm.io.alphabets import UNKNOWN, UNKNOWN_LETTER, Alphabet
from mvrbm.likelihood import (
    LogPartitionInterval,
    annealed_importance_sampling,
    log_partition,
    log_partition_interval,
    pseudo_log_likelihood,
)
from mvrbm.random import RandomSource
from mvrbm.sampling import Layers, Mixing, ParallelTempering, chain_memory, check_mixing, sample
from mvrbm.saving import register
from mvrbm.units import Unit
from mvrbm.updates.recipe import Recipe
from mvrbm.validation import whole_number

# Base-2 logarithm of the largest number of ways to complete a sequence over which `score_samples` sums.
_MOST_BITS = 13
# Memory above which chains count as not mixed. With fewer chains than this number, the estimate is too uncertain for a
# warning.
_MEMORABLE, _ENOUGH_CHAINS = 0.1, 50


class AlignedRBM(ArrayRBM):
    """Base class for models with one visible layer of aligned sequences, one-hot encoded by letters."""

    alphabet: str | Alphabet | None
    identity: float | None
    alphabet_: Alphabet
    n_sites_: int
    n_effective_: float

    # -- sequences --------------------------------------------------------------------------------

    def align(self, X: Any) -> Alignment:
        """Convert sequences to an alignment with the alphabet and the number of sites of the model.

        Parameters
        ----------
        X : path, sequence of str, array or Biopython alignment
            Sequences in a format that :meth:`fit` accepts. A question mark is an unknown letter.
        """
        check_is_fitted(self)
        alignment = as_alignment(X, self.alphabet_, unknown=True)
        if alignment.n_sites != self.n_sites_:
            raise ValueError(
                f"the sequences have {alignment.n_sites:,} sites, but the model has {self.n_sites_:,}; align them to "
                "the training sequences"
            )
        return alignment

    def _read_layers(self, X: Any, *, reset: bool) -> dict[str, Any]:
        if not reset:
            return {VISIBLE: self.align(X).one_hot()}
        alignment = as_alignment(X, self.alphabet, unknown=True)
        self.alphabet_ = alignment.alphabet
        self.n_sites_ = alignment.n_sites
        return {VISIBLE: alignment.one_hot()}

    def _new_units(self, layers: Mapping[str, Any]) -> dict[str, Unit]:
        return {VISIBLE: unit_for(self.visible, layers[VISIBLE]).to(model_dtype(layers))}

    def _masks_by_layer(self, mask: Any) -> Mapping[str, Any]:
        return {VISIBLE: mask}

    def _to_user(self, layers: Mapping[str, Tensor], like: Any = None) -> Array:
        return to_array(layers[VISIBLE])

    def _weights_of(self, layers: Mapping[str, Any], sample_weight: Any) -> Array | None:
        weights = super()._weights_of(layers, sample_weight)
        letters = layers[VISIBLE]
        if weights is None and self.identity is not None:
            weights = identity_weights(np.where(np.isnan(letters[..., 0]), UNKNOWN, letters.argmax(2)), self.identity)
        self.n_effective_ = float(len(letters)) if weights is None else float(weights.sum())
        return weights

    # -- scores -----------------------------------------------------------------------------------

    def score_samples(self, X: Any, *, exact: bool = False, normalized: bool = False) -> Array:
        r"""Return the log-likelihood of each sequence, up to the constant log Z, as an array of shape (n,).

        Unknown letters are summed over: the score of an incomplete sequence is the logarithm of the probability of its
        known letters. The sum is exact if there are at most 8192 ways to complete the sequence. Otherwise, it is
        estimated by annealed importance sampling, which takes about a second per sequence.

        Parameters
        ----------
        X : path, sequence of str, array or Biopython alignment
            Sequences. A question mark is an unknown letter.
        exact : bool, default=False
            Has no effect. The scores of complete sequences are always exact.
        normalized : bool, default=False
            Whether to subtract an estimate of log Z. See :meth:`log_partition`.
        """
        alignment = self.align(X)
        known = alignment.codes != UNKNOWN
        complete = known.all(1)
        scores = np.empty(len(alignment))
        if complete.any():
            scores[complete] = -self.free_energy(alignment[complete])
        if not complete.all():
            with sensible_threads(self.machine_, 100):
                scores[~complete] = [self._log_sum(alignment.codes[row]) for row in np.flatnonzero(~complete)]
        return scores - self.log_partition().log_z if normalized else scores

    def _log_sum(self, codes: Array) -> float:
        """Return the logarithm of the summed weights of all states that have the known letters of a sequence."""
        state, known = self._clamp(codes)
        if not bool(known.any()):
            return self.log_partition().log_z
        if (codes == UNKNOWN).sum() * math.log2(len(self.alphabet_)) <= _MOST_BITS:
            return float(log_partition(self.machine_, clamp=state, mask=known))
        return annealed_importance_sampling(self.machine_, self._rng(), clamp=state, mask=known).log_z

    def _clamp(self, codes: Array) -> tuple[Tensor, Tensor]:
        """Return a state with the known letters of a sequence, and its mask, both of shape (1, sites, letters)."""
        letters = torch.from_numpy(np.where(codes == UNKNOWN, 0, codes).astype(np.int64))
        unit = self.machine_.layers[VISIBLE]
        state = unit.decode(letters[None].to(unit.bias.device))
        known = torch.from_numpy(codes != UNKNOWN).to(state.device)
        return state, known[None, :, None].expand(state.shape)

    def score(self, X: Any, y: Any = None, *, exact: bool = False) -> float:
        """Return the mean pseudo-log-likelihood of complete sequences in nats. `y` and `exact` are ignored.

        The pseudo-log-likelihood is normalized, so the scores of different models of the same sequences can be
        compared. Those of :meth:`score_samples` cannot, because they omit log Z.
        """
        return float(np.mean(self.pseudo_likelihood(X)))

    def log_partition(self, *, n_chains: int = 100, n_steps: int = 1000) -> LogPartitionInterval:
        """Estimate log Z by annealed importance sampling in both directions.

        Parameters
        ----------
        n_chains : int, default=100
            Number of annealing chains. The reverse direction uses the persistent chains from training, at most 100, if
            there are any: copies of a chain can stay in its mode, so they would not add information.
        n_steps : int, default=1000
            Number of annealing steps.
        """
        check_is_fitted(self)
        start = self.chains_ or None
        with sensible_threads(self.machine_, n_chains):
            return log_partition_interval(
                self.machine_, self._rng(), init=start, n_chains=n_chains, n_steps=n_steps, burn_in=n_steps
            )

    def pseudo_likelihood(self, X: Any) -> Array:
        """Return the exact pseudo-log-likelihood of each complete sequence in nats, as an array of shape (n,)."""
        alignment = self.align(X)
        if not alignment.complete:
            raise ValueError("the pseudo-likelihood requires complete sequences, but X has unknown letters ('?')")
        return self._map_batches(
            alignment, lambda batch: pseudo_log_likelihood(self.machine_, batch, n_sites=None, check=False).values
        )

    # -- new sequences ----------------------------------------------------------------------------

    def sample(
        self,
        n: int = 1,
        *,
        steps: int = 1000,
        init: Any = None,
        mask: Any = None,
        mean: bool = False,
        fixed: str | None = None,
        temperatures: int | None = None,
        as_array: bool = False,
    ) -> Any:
        """Draw new sequences from the model by Gibbs sampling.

        A `MixingWarning` is issued if the chains still remember their states from halfway through the run. See
        `memory_` and :meth:`check_mixing`.

        Parameters
        ----------
        n : int, default=1
            Number of sequences.
        steps : int, default=1000
            Number of Gibbs steps per chain.
        init : sequences or {"chains", "noise"}, optional
            Initial states: `n` sequences, the persistent chains from training (repeated as needed), or random states.
            Unknown letters of sequences are sampled, and if there are any, all other letters stay fixed. Default: the
            persistent chains if the model was trained with them, otherwise random states.
        mask : boolean array of shape (n, sites, letters) or (sites, letters), optional
            Mask that is True at sites of `init` that must not change.
        mean : bool, default=False
            Whether to return the probabilities of the letters given the last hidden sample, as an array of shape
            (n, sites, letters).
        fixed : str, optional
            Letters that every sequence must have, and question marks at all other sites, such as ``"MK??A"``.
        temperatures : int, optional
            Number of temperatures of parallel tempering. The chains exchange states with chains at higher temperatures,
            which move between modes more easily, but a step takes `temperatures` times as long. Default: no tempering.
        as_array : bool, default=False
            Whether to return integer codes of shape (n, sites) instead of strings.

        Returns
        -------
        list of str, or array
            The sequences.
        """
        check_is_fitted(self)
        if mask is not None or mean or not (init is None or isinstance(init, str)):
            if fixed is not None or temperatures is not None:
                raise ValueError(
                    f"{'fixed' if fixed is not None else 'temperatures'} cannot be combined with mask, mean or initial "
                    "sequences" + ("; use '?' in init" if fixed is not None else "")
                )
            found = super().sample(n, steps=steps, init=init, mask=mask, mean=mean)
            return found if mean else self._as_letters(torch.from_numpy(found), as_array)
        rng = self._rng()
        start = dict(initial_states(self.machine_, whole_number(n, "n"), init, self.chains_, rng))
        known = None
        if fixed is not None:
            if len(fixed) != self.n_sites_:
                raise ValueError(
                    f"fixed must have one character for each of the {self.n_sites_:,} sites, got {len(fixed):,}; use "
                    "'?' for free sites"
                )
            state, known = self._clamp(self._fixed_codes(fixed))
            start[VISIBLE] = torch.where(known, state, start[VISIBLE])
            known = known.expand(start[VISIBLE].shape) if bool(known.any()) else None
        self._warn_of_recipe()
        with sensible_threads(self.machine_, n):
            end = self._sampled(start, known, whole_number(steps, "steps"), temperatures, rng)
        return self._as_letters(end, as_array)

    def _run_chains(
        self, n: int, steps: int, rng: RandomSource, start: Layers, known: Any, mean: bool
    ) -> dict[str, Tensor]:
        if not (mean or known):
            return {VISIBLE: self._sampled(start, None, whole_number(steps, "steps"), None, rng)}
        # Chains whose known letters differ never forget them, so their memory cannot be measured.
        self.memory_ = math.nan
        return super()._run_chains(n, steps, rng, start, known, mean)

    def _fixed_codes(self, fixed: str) -> Array:
        """Return the codes of the letters that every sequence must have, and of question marks at all other sites."""
        letters = self.alphabet_.letters
        pattern = fixed if any(letter.islower() for letter in letters) else fixed.upper()
        for site, letter in enumerate(pattern):
            if letter not in letters + UNKNOWN_LETTER:
                raise ValueError(
                    f"fixed contains {fixed[site]!r} at site {site}; use letters of the alphabet {letters}, or '?' for "
                    "free sites"
                )
        return np.asarray(self.alphabet_.encode([pattern])[0])

    def _sampled(
        self, start: Layers, known: Tensor | None, steps: int, temperatures: int | None, rng: RandomSource
    ) -> Tensor:
        """Run the chains, compare their states halfway through and at the end, and return the final states."""
        n = len(start[VISIBLE])
        masks = None if known is None else {VISIBLE: known}
        run: Callable[[Layers, int], Layers]
        if temperatures is None:

            def run(layers: Layers, count: int) -> Layers:
                return sample(self.machine_, n, count, rng, init=layers, mask=masks, check=False).visible

        else:
            whole_number(temperatures, "temperatures", 2)
            center = {VISIBLE: start[VISIBLE].mean(0, keepdim=True)}
            chains = ParallelTempering(
                self.machine_, n, temperatures, rng=rng, init=start, mask=masks, center=center, check=False
            )

            def run(layers: Layers, count: int) -> Layers:
                return chains.step(count)

        middle = run(start, steps // 2) if steps > 1 else start
        end = run(middle, steps - steps // 2)
        self.memory_ = chain_memory(self.machine_, middle, end) if n > 1 else math.nan
        if n >= _ENOUGH_CHAINS and self.memory_ > _MEMORABLE:
            warnings.warn(
                f"the chains remember {self.memory_:.0%} of their states after {steps - steps // 2:,} Gibbs steps, so "
                "the sequences depend on the initial states; increase steps or set temperatures",
                MixingWarning,
                stacklevel=3,
            )
        return end[VISIBLE]

    def _as_letters(self, states: Tensor, as_array: bool) -> Any:
        codes = to_array(states.argmax(-1)).astype(np.uint8)
        return codes if as_array else self.alphabet_.decode(codes)

    def to_fasta(
        self,
        path: str | os.PathLike[str],
        n: int = 1000,
        *,
        steps: int = 1000,
        fixed: str | None = None,
        temperatures: int | None = None,
        force: bool = False,
    ) -> Path:
        """Draw `n` new sequences and write them to a FASTA file. Return the path of the file.

        Parameters
        ----------
        path : path
            The file. If the name ends in ``.gz``, the file is compressed.
        n, steps, fixed, temperatures
            See :meth:`sample`.
        force : bool, default=False
            Whether to replace an existing file.
        """
        sequences = self.sample(n, steps=steps, fixed=fixed, temperatures=temperatures)
        return write_fasta(path, sequences, force=force)

    def complete(self, X: Any, *, steps: int = 100, burn_in: int = 50) -> list[str]:
        """Replace each unknown letter with the most probable letter given the known letters of the sequence.

        Parameters
        ----------
        X : path, sequence of str, array or Biopython alignment
            Sequences, in which question marks are unknown letters.
        steps, burn_in : int
            Number of Gibbs steps to average over, and number of Gibbs steps before averaging starts. See
            :meth:`inpaint`, which returns the probabilities.
        """
        return self.alphabet_.decode(self.inpaint(X, steps=steps, burn_in=burn_in).argmax(2).astype(np.uint8))

    def check_mixing(self, X: Any = None, *, n_chains: int = 200, steps: int = 1024) -> Mixing:
        """Measure how fast Gibbs chains forget their states. See :func:`mvrbm.sampling.check_mixing`.

        Parameters
        ----------
        X : path, sequence of str, array or Biopython alignment, optional
            Complete sequences from which chains start, in addition to random states.
        n_chains, steps : int
            Number of chains for each kind of initial state, and maximum number of Gibbs steps.
        """
        check_is_fitted(self)
        data = None
        if X is not None:
            layers = self._read_layers(self.align(X)[:n_chains], reset=False)
            data = joined(batches(layers, self.machine_.layers))
        with sensible_threads(self.machine_, n_chains):
            return check_mixing(self.machine_, data, n_chains=n_chains, steps=steps, rng=self._rng())

    # -- files ------------------------------------------------------------------------------------

    def _description(self) -> dict[str, Any]:
        found = {"letters": self.alphabet_.letters, "alphabet": self.alphabet_.name}
        return {**super()._description(), **found, "n_effective": self.n_effective_}

    @classmethod
    def _from_json(cls, name: str, value: Any) -> Any:
        if name == "alphabet" and isinstance(value, Mapping):
            return Alphabet(**value)
        return super()._from_json(name, value)

    def _restore(self, folder: Path, described: Mapping[str, Any]) -> None:
        super()._restore(folder, described)
        if list(self.machine_.layers) != [VISIBLE] or len(self.machine_.layers[VISIBLE].shape) != 2:
            raise StorageError("a sequence model requires one visible layer of shape (sites, letters)")
        self.n_sites_, n_letters = self.machine_.layers[VISIBLE].shape
        self.alphabet_ = Alphabet(described["letters"], described["alphabet"])
        self.n_effective_ = float(described["n_effective"])
        if len(self.alphabet_) != n_letters:
            raise StorageError(f"the alphabet has {len(self.alphabet_)} letters, but the model has {n_letters}")


@register("SequenceRBM")
@dataclass(eq=False, repr=False)
class SequenceRBM(AlignedRBM):
    """Restricted Boltzmann machine for aligned sequences, which are matrices of sites by letters.

    Sequences can be strings, a FASTA or Stockholm file, a Biopython alignment, or arrays of letters, of integer codes
    of shape (n, sites), or in one-hot encoding of shape (n, sites, letters). Gaps are letters like any other.

    The default recipe has a Gaussian prior on the weights, with a standard deviation of 0.3, because the model usually
    has many more parameters than there are sequences. The prior is the only protection against overfitting: the more
    sequences there are, the less it restricts the weights, and more epochs do no harm. To change its strength, pass
    ``dataclasses.replace(RECIPES["sequences"], prior_precision=...)`` as `recipe`.

    Parameters
    ----------
    hidden_shape : int or tuple of int, default=200
        Number of hidden units, or shape of a hidden matrix. If `rank` is given, its first axis is coupled to the sites
        and its second axis to the letters.
    alphabet : str or Alphabet, optional
        ``"protein"``, ``"rna"``, ``"dna"``, or the letters themselves. Default: detected from the sequences. It has no
        gap if no training sequence has one.
    identity : float, default=0.8
        Each sequence has the weight 1 / m, where m is the number of sequences, itself included, that agree with it at
        this fraction of the sites or more. This corrects for uneven sampling of species. If None, all sequences have
        the same weight. `fit` ignores this parameter if sample weights are given. `partial_fit` compares only the
        sequences of the same call.
    rank : int, optional
        Number of Kronecker products in the weights, to reduce the number of parameters. If `hidden_shape` is a number,
        every hidden unit has separate weights for each site, and all units share `rank` embeddings of the letters.
        Default: a full weight matrix.
    coupling : Coupling or str, optional
        Coupling to use instead of a full matrix or ``Kronecker(rank)``. See :class:`~mvrbm.MVRBM`.
    hidden : str, default="bernoulli"
        Unit type of the hidden layer, such as ``"drelu"``. See :class:`~mvrbm.DoubleRectified` and
        :class:`~mvrbm.MVRBM`.
    recipe : str or Recipe, default="sequences"
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
        Number of sites per sequence.
    n_effective_ : float
        Sum of the sequence weights. With weights by identity, this is the effective number of sequences.
    memory_ : float
        Fraction of their states halfway through the run that the chains still remember at the end of the last call of
        `sample`. It is close to 0 if the chains have mixed. Set by `sample`. NaN for a single chain, for probabilities,
        and if initial sequences have known letters that stay fixed.
    machine_ : BoltzmannMachine
        The fitted machine, whose visible layer has shape (n_sites_, letters).

    See Also
    --------
    mvrbm.sequences : Contacts, effects of mutations, and comparisons of natural and generated sequences.

    Examples
    --------
    >>> from mvrbm import SequenceRBM
    >>> family = ["ACDE-", "ACDEF", "GCDKF", "GCD-F"] * 10
    >>> model = SequenceRBM((3, 2), rank=1, n_epochs=2, random_state=0).fit(family)
    >>> model.transform(family).shape
    (40, 6)
    >>> [len(sequence) for sequence in model.sample(3, fixed="AC???", steps=10)]
    [5, 5, 5]
    """

    visible: Any = field(default="categorical", init=False)
    hidden_shape: Any = 200
    _: KW_ONLY
    alphabet: str | Alphabet | None = None
    identity: float | None = 0.8
    rank: int | None = None  # type: ignore[assignment]
    coupling: Any = None
    recipe: str | Recipe = "sequences"

    def _new_hidden_shape(self, units: Mapping[str, Unit]) -> tuple[int, ...]:
        shape = super()._new_hidden_shape(units)
        factored = self.coupling is None and self.rank is not None
        return (*shape, 1) if factored and len(shape) == 1 else shape

    def _new_coupling(self, layer: str, units: Mapping[str, Unit]) -> Coupling:
        return Dense() if self.coupling is None and self.rank is None else super()._new_coupling(layer, units)
