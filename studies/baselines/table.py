"""The table of all baselines by name."""

from __future__ import annotations

from dataclasses import dataclass

from studies.baselines.base import ImageClassifier
from studies.baselines.neighbors import NearestNeighbor, RBMNearestNeighbor
from studies.baselines.networks import ConvolutionalNetwork, DeepBeliefNetwork, DropoutNetwork, SparseAutoencoder
from studies.baselines.toolbox import (
    ToolboxAutoencoder,
    ToolboxConvolutionalNetwork,
    ToolboxDeepBeliefNetwork,
    ToolboxDropoutNetwork,
)

__all__ = ["BASELINES", "Baseline"]


@dataclass(frozen=True)
class Baseline:
    """One row of the comparison.

    Parameters
    ----------
    title : str
        Title in figures and tables.
    settings : {"modern", "toolbox"}
        Today's customary settings, or the defaults of the toolbox that the paper used.
    reference : str
        Source.
    description : str
        One line.
    kind : type
        Its class.
    """

    title: str
    settings: str
    reference: str
    description: str
    kind: type[ImageClassifier]

    def __call__(self, seed: int, device: str = "auto") -> ImageClassifier:
        """Return a new classifier.

        Parameters
        ----------
        seed : int
            Its `random_state`.
        device : str
            Device to compute on.
        """
        return self.kind(random_state=seed, device=device)


_TOOLBOX = "Palm, Prediction as a candidate for learning deep hierarchical models of data (2012); DeepLearnToolbox, "

#: All baselines by name. Calling one with a seed and a device returns a new classifier.
BASELINES: dict[str, Baseline] = {
    "raw-1nn": Baseline(
        "raw pixels + 1-NN",
        "modern",
        "Cover and Hart, IEEE Trans. Information Theory 13 (1967)",
        "Euclidean distance of pixels",
        NearestNeighbor,
    ),
    "rbm-1nn": Baseline(
        "RBM + 1-NN",
        "modern",
        "Hinton, Neural Computation 14 (2002)",
        "classic RBM with 625 hidden units, CD-1, 1-NN on hidden probabilities",
        RBMNearestNeighbor,
    ),
    "dropout": Baseline(
        "dropout network",
        "modern",
        "Srivastava et al., JMLR 15 (2014)",
        "800-800 rectified units, dropout 0.2 and 0.5, Adam",
        DropoutNetwork,
    ),
    "dbn": Baseline(
        "deep belief network",
        "modern",
        "Hinton, Osindero and Teh, Neural Computation 18 (2006); Hinton and Salakhutdinov, Science 313 (2006)",
        "RBMs of 500-500-2000 units, fine-tuned by Adam with dropout 0.5",
        DeepBeliefNetwork,
    ),
    "cnn": Baseline(
        "convolutional network",
        "modern",
        "LeCun, Kavukcuoglu and Farabet, ISCAS (2010)",
        "5x5 convolutions to 16 and 32 maps, 128 rectified units, dropout 0.5, Adam",
        ConvolutionalNetwork,
    ),
    "sae": Baseline(
        "sparse autoencoder",
        "modern",
        "Ng, Sparse autoencoder, CS294A lecture notes (2011)",
        "500-500 units of mean activity 0.1, fine-tuned by Adam with dropout 0.2",
        SparseAutoencoder,
    ),
    "dropout-toolbox": Baseline(
        "dropout network (toolbox)",
        "toolbox",
        _TOOLBOX + "test_example_NN.m, example 3",
        "100 tanh units, dropout 0.5, rate 2, one epoch",
        ToolboxDropoutNetwork,
    ),
    "dbn-toolbox": Baseline(
        "deep belief network (toolbox)",
        "toolbox",
        _TOOLBOX + "test_example_DBN.m, example 2",
        "RBMs of 100-100 units, one epoch each, backpropagation at rate 2, one epoch",
        ToolboxDeepBeliefNetwork,
    ),
    "cnn-toolbox": Baseline(
        "convolutional network (toolbox)",
        "toolbox",
        _TOOLBOX + "test_example_CNN.m",
        "5x5 convolutions to 6 and 12 maps, logistic units, rate 1, one epoch",
        ToolboxConvolutionalNetwork,
    ),
    "sae-toolbox": Baseline(
        "autoencoder (toolbox)",
        "toolbox",
        _TOOLBOX + "test_example_SAE.m, example 1",
        "100 units, half of the pixels dropped, one epoch, backpropagation at rate 1, one epoch",
        ToolboxAutoencoder,
    ),
}
