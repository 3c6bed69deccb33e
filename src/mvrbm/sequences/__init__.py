"""Analyze models of aligned sequences.

Predict contacts and the effects of mutations, and compare generated with natural sequences.

The functions take a fitted :class:`mvrbm.SequenceRBM`, or a machine with one categorical layer of shape (sites,
letters), and return arrays. The plotting functions draw these arrays. Training and sampling are in
`estimators.sequences`, and reading and writing files is in `io.alignments`.
"""

from mvrbm.sequences.contacts import contact_map, contact_precision, effective_couplings, ranked_pairs
from mvrbm.sequences.examples import load_lattice_proteins
from mvrbm.sequences.mutations import mutation_scan
from mvrbm.sequences.plots import plot_contact_map, plot_correlations, plot_logo, plot_mutations, plot_projection
from mvrbm.sequences.site_model import hidden_weights
from mvrbm.sequences.statistics import Accuracy, adversarial_accuracy, correlations, nearest_distances, project

__all__ = [
    "Accuracy",
    "adversarial_accuracy",
    "contact_map",
    "contact_precision",
    "correlations",
    "effective_couplings",
    "hidden_weights",
    "load_lattice_proteins",
    "mutation_scan",
    "nearest_distances",
    "plot_contact_map",
    "plot_correlations",
    "plot_logo",
    "plot_mutations",
    "plot_projection",
    "project",
    "ranked_pairs",
]
