"""Methods that score data under a fitted model: `score_samples`, `score`, `log_likelihood`, `free_energy`."""

from typing import Any

import numpy as np
from sklearn.utils.validation import check_is_fitted

from mvrbm.estimators.base import BaseRBM, no_closed_form
from mvrbm.estimators.batches import Array, joined, n_samples
from mvrbm.likelihood import LikelihoodInterval, log_likelihood_interval, pseudo_log_likelihood

# Number of entries per sample for which `score_samples` computes exact conditional probabilities by default.
_SCORED_SITES = 16


class ScoringMixin(BaseRBM):
    """Mixin that computes the pseudo-log-likelihood, log-likelihood and free energy of samples."""

    def score_samples(self, X: Any, *, exact: bool = False) -> Array:
        """Return the pseudo-log-likelihood of each sample, as an array of shape (n,).

        By default, the result for samples with more than 16 entries is an unbiased estimate that combines the exact
        conditional probabilities of 16 randomly selected entries with approximations for all other entries. The
        selection uses a fixed seed, so the estimate is reproducible. It takes less time than one training epoch. See
        :func:`mvrbm.likelihood.pseudo_log_likelihood`.

        Parameters
        ----------
        X : array
            Complete samples in a format that :meth:`fit` accepts. NaN raises ValueError, because the sum over unknown
            entries has no closed form.
        exact : bool, default=False
            Whether to compute the conditional probability of every entry exactly.
        """
        check_is_fitted(self)
        n_sites = None if exact else _SCORED_SITES
        return self._map_batches(
            X,
            lambda batch: pseudo_log_likelihood(self.machine_, batch, n_sites=n_sites, check=False).values,
            complete="score_samples",
        )

    def score(self, X: Any, y: Any = None, *, exact: bool = False) -> float:
        """Return the mean of :meth:`score_samples` over all samples. `y` is ignored.

        The pseudo-log-likelihood is normalized, so the scores of different models of the same data can be compared.
        """
        return float(np.mean(self.score_samples(X, exact=exact)))

    def log_likelihood(
        self, X: Any, *, n_chains: int = 100, n_steps: int = 1000, burn_in: int | None = None
    ) -> LikelihoodInterval:
        """Return an interval estimate of the mean log-likelihood of the data, in nats per sample.

        The interval reflects the uncertainty in log Z. See :func:`mvrbm.likelihood.log_likelihood_interval`. The
        likelihood of a stack cannot be estimated.

        Parameters
        ----------
        X : array
            Complete samples. NaN raises ValueError.
        n_chains : int, default=100
            Number of annealing chains. The reverse direction uses the persistent chains from training, at most 100, if
            there are any: copies of a chain can stay in its mode, so they would not add information.
        n_steps : int, default=1000
            Number of annealing steps.
        burn_in : int, optional
            Number of Gibbs steps before reverse annealing. These steps start from the persistent chains from training,
            or from samples in X if the model has no persistent chains. Default: `n_steps`.
        """
        check_is_fitted(self)
        if len(self._machines) > 1:
            raise ValueError("the likelihood of a stack cannot be estimated; use score_samples instead")
        layers = self._read_layers(X, reset=False)
        data = joined(self._complete_batches(layers, no_closed_form("log_likelihood")))
        rows = np.linspace(0, n_samples(data) - 1, n_chains).astype(int)
        start = self.chains_ or {name: array[rows] for name, array in data.items()}
        return log_likelihood_interval(
            self.machine_, data, self._rng(), init=start, n_chains=n_chains, n_steps=n_steps, burn_in=burn_in
        )

    def free_energy(self, X: Any) -> Array:
        """Return the free energy of each sample in nats, as an array of shape (n,).

        The free energy is the negative log-likelihood minus log Z, so differences in free energy between samples equal
        negative differences in log-likelihood. For stacks, the result is the free energy under the lowest machine.
        Samples must be complete: NaN raises ValueError, because the sum over unknown entries has no closed form.
        """
        check_is_fitted(self)
        return self._map_batches(X, lambda batch: self.machine_.free_energy(batch, check=False), complete="free_energy")
