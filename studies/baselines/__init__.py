"""What the paper compares the MVRBM with, so that the table is made and not quoted.

Classifiers with scikit-learn's `fit`, `predict` and `predict_proba`, for images as arrays or rows: a dropout
network, a deep belief network, a convolutional network, a sparse autoencoder and nearest neighbours. The
networks come twice, in settings that are customary today (`networks`) and in those of the toolbox that the
paper used (`toolbox`). :data:`BASELINES` lists them all. `base` holds the one training loop, `neighbours`
the search for nearest neighbours. For super-resolution there is `sparse_representation`. The machines
themselves, and what is drawn from these numbers, are elsewhere.
"""

from studies.baselines.base import ImageClassifier, NetworkClassifier
from studies.baselines.neighbours import NearestNeighbour, RBMNearestNeighbour, nearest, nearest_neighbour_error
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
    "NearestNeighbour",
    "NetworkClassifier",
    "RBMNearestNeighbour",
    "SparseAutoencoder",
    "SparseRepresentation",
    "ToolboxAutoencoder",
    "ToolboxConvolutionalNetwork",
    "ToolboxDeepBeliefNetwork",
    "ToolboxDropoutNetwork",
    "nearest",
    "nearest_neighbour_error",
]
