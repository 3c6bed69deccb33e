"""The methods that the paper compares the MVRBM with, so that we can measure them instead of quoting the paper.

Most are classifiers of images with scikit-learn's `fit`, `predict` and `predict_proba`: a dropout network, a deep
belief network, a convolutional network, a sparse autoencoder and nearest neighbors. The networks come in two versions,
with today's customary settings (`networks`) and with those of the toolbox that the paper used (`toolbox`).
:data:`BASELINES` lists them all. `base` has the training loop, `neighbors` the search for nearest neighbors and the
1-NN error, `sparse_representation` the baseline of super-resolution, and `judge` measures of the quality of samples.
The experiments that use them are elsewhere.
"""

from studies.baselines.base import ImageClassifier, NetworkClassifier
from studies.baselines.neighbors import NearestNeighbor, RBMNearestNeighbor, nearest, nearest_neighbor_error
from studies.baselines.networks import ConvolutionalNetwork, DeepBeliefNetwork, DropoutNetwork, SparseAutoencoder
from studies.baselines.sparse_representation import SparseRepresentation
from studies.baselines.table import BASELINES, Baseline
from studies.baselines.toolbox import (
    ToolboxAutoencoder,
    ToolboxConvolutionalNetwork,
    ToolboxDeepBeliefNetwork,
    ToolboxDropoutNetwork,
)

__all__ = [
    "BASELINES",
    "Baseline",
    "ConvolutionalNetwork",
    "DeepBeliefNetwork",
    "DropoutNetwork",
    "ImageClassifier",
    "NearestNeighbor",
    "NetworkClassifier",
    "RBMNearestNeighbor",
    "SparseAutoencoder",
    "SparseRepresentation",
    "ToolboxAutoencoder",
    "ToolboxConvolutionalNetwork",
    "ToolboxDeepBeliefNetwork",
    "ToolboxDropoutNetwork",
    "nearest",
    "nearest_neighbor_error",
]
