"""Scores of data under a fitted model: `score_samples`, `score`, `log_likelihood`, `free_energy`."""

from typing import Any

import numpy as np
from sklearn.utils.validation import check_is_fitted

from mvrbm.estimators.base import BaseRBM
from mvrbm.estimators.batches import Array, batches, joined, n_samples
from mvrbm.likelihood import LikelihoodInterval, log_likelihood_interval, pseudo_log_likelihood

# Number of entries whose conditional probability `score_samples` computes exactly by default.
_SCORED_SITES = 16


class ScoringMixin(BaseRBM):
    """Pseudo-log-likelihood, log-likelihood and free energy of samples."""

    def score_samples(self, X: Any, *, exact: bool = False) -> Array:
        """Return the pseudo-log-likelihood of each sample, (n,). The result is deterministic.

        By default, samples with more than 16 entries get an unbiased estimate, which computes the exact conditional
        probability of 16 entries and approximates the others; see :func:`mvrbm.likelihood.pseudo_log_likelihood`. It
        takes less time than one epoch of training.

        Parameters
        ----------
        X : array
            Data, as for :meth:`fit`.
        exact : bool
            Whether to compute the conditional probability of every entry exactly.
        """
        check_is_fitted(self)
        n_sites = None if exact else _SCORED_SITES
        return self._map_batches(
            X, lambda batch: pseudo_log_likelihood(self.machine_, batch, n_sites=n_sites, check=False).values
        )

    def score(self, X: Any, y: Any = None, *, exact: bool = False) -> float:
        """Return the mean of :meth:`score_samples`. `y` is ignored."""
        return float(np.mean(self.score_samples(X, exact=exact)))

    def log_likelihood(
        self, X: Any, *, n_chains: int = 100, n_steps: int = 1000, burn_in: int | None = None
    ) -> LikelihoodInterval:
        """Estimate the mean log-likelihood of data in nats per sample, with an interval.

        See :func:`mvrbm.likelihood.log_likelihood_interval`. Stacks have no likelihood that can be estimated.

        Parameters
        ----------
        X : array
            Complete data.
        n_chains : int
            Number of annealing chains in each direction.
        n_steps : int
            Number of annealing steps.
        burn_in : int, optional
            Number of Gibbs steps before reverse annealing, which start from the persistent chains of training, or from
            samples of X if there are none. Default: `n_steps`.
        """
        check_is_fitted(self)
        if len(self._machines) > 1:
            raise ValueError("the likelihood of a stack of machines cannot be estimated: use score_samples")
        layers = self._read_layers(X, reset=False)
        data = joined(batches(layers, self.machine_.layers, check=False))  # the estimate checks the values
        rows = np.linspace(0, n_samples(data) - 1, n_chains).astype(int)
        start = self.chains_ or {name: array[rows] for name, array in data.items()}
        return log_likelihood_interval(
            self.machine_, data, self._rng(), init=start, n_chains=n_chains, n_steps=n_steps, burn_in=burn_in
        )

    def free_energy(self, X: Any) -> Array:
        """Return the free energy of each sample in nats, (n,): minus the log-likelihood, minus log Z.

        Differences between samples are differences of their log-likelihoods. For stacks, the free energy is that of the
        lowest machine.
        """
        check_is_fitted(self)
        return self._map_batches(X, lambda batch: self.machine_.free_energy(batch, check=False))
