"""Likelihoods: exact log Z for small machines, annealed importance sampling, log-likelihood and pseudo-likelihood.

A *clamp* fixes some visible entries. With a clamp, log Z is the logarithm of the sum over all states that agree with
the fixed entries. For example, clamping the padding gives log Z for documents of one length.
"""

from mvrbm.likelihood.annealing import (
    AnnealedEstimate,
    annealed_importance_sampling,
    reverse_annealed_importance_sampling,
)
from mvrbm.likelihood.data_likelihood import LikelihoodInterval, log_likelihood, log_likelihood_interval
from mvrbm.likelihood.exact import log_partition
from mvrbm.likelihood.interval import LogPartitionInterval, log_partition_interval
from mvrbm.likelihood.pseudo import PseudoLikelihood, pseudo_log_likelihood

__all__ = [
    "AnnealedEstimate",
    "LikelihoodInterval",
    "LogPartitionInterval",
    "PseudoLikelihood",
    "annealed_importance_sampling",
    "log_likelihood",
    "log_likelihood_interval",
    "log_partition",
    "log_partition_interval",
    "pseudo_log_likelihood",
    "reverse_annealed_importance_sampling",
]
