"""Markov chains: block Gibbs sampling with clamped entries, mean-field inference, parallel tempering, and mixing.

Masks are True where a value is known. Known entries never change. The chains used in training are in
:mod:`mvrbm.updates.negative`.
"""

from mvrbm.sampling.chains import (
    Fields,
    Layers,
    Masks,
    State,
    conditional_mean,
    copies,
    draw_visible,
    gibbs,
    gibbs_step,
    independent_sample,
    keep_known,
    mean_field,
    multiplied_out,
    sample,
    start_chains,
    write,
)
from mvrbm.sampling.labels import label_log_posterior, label_scores, match_label_shares
from mvrbm.sampling.mixing import Mixing, chain_memory, check_mixing
from mvrbm.sampling.tempering import ParallelTempering, Tempered, TemperedPath

__all__ = [
    "Fields",
    "Layers",
    "Masks",
    "Mixing",
    "ParallelTempering",
    "State",
    "Tempered",
    "TemperedPath",
    "chain_memory",
    "check_mixing",
    "conditional_mean",
    "copies",
    "draw_visible",
    "gibbs",
    "gibbs_step",
    "independent_sample",
    "keep_known",
    "label_log_posterior",
    "label_scores",
    "match_label_shares",
    "mean_field",
    "multiplied_out",
    "sample",
    "start_chains",
    "write",
]
