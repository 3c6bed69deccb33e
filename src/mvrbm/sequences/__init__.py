"""Analyze models of aligned sequences: contacts, effects of mutations, and generated against natural sequences.

The functions take a fitted :class:`mvrbm.SequenceRBM`, or a machine with one categorical layer of shape (sites,
letters), and return arrays. The plots draw these arrays. Training, sampling and files are elsewhere, in
`estimators.sequences` and `io.alignments`.
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
