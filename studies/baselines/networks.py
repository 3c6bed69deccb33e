"""The networks with today's customary settings: rectified or pre-trained layers, Adam, dropout, softmax."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import KW_ONLY, dataclass

import torch
from torch import Tensor, nn

from studies.baselines.base import Descent, Layer, NetworkClassifier, adam, epochs_for, train_rbm

__all__ = ["ConvolutionalNetwork", "DeepBeliefNetwork", "DropoutNetwork", "SparseAutoencoder"]


@dataclass(eq=False, repr=False)
class DropoutNetwork(NetworkClassifier):
    """Fully connected rectified layers with dropout of a fifth of the inputs and half of the hidden units.

    After Srivastava, Hinton, Krizhevsky, Sutskever and Salakhutdinov, "Dropout", JMLR 15 (2014).

    Parameters
    ----------
    hidden : tuple of int
        Sizes of the hidden layers.
    input_dropout, dropout : float
        Shares of inputs and of hidden units that are left out.
    epochs, batch_size, learning_rate, random_state, device
        As for :class:`~studies.baselines.NetworkClassifier`; the learning rate is Adam's.
    """

    hidden: Sequence[int] = (800, 800)
    _: KW_ONLY
    input_dropout: float = 0.2
    dropout: float = 0.5

    def _network(self, images: Tensor, n_classes: int) -> nn.Module:
        layers: list[nn.Module] = [nn.Flatten(), nn.Dropout(self.input_dropout)]
        size = math.prod(images.shape[1:])
        for width in self.hidden:
            layers += [nn.Linear(size, width), nn.ReLU(), nn.Dropout(self.dropout)]
            size = width
        return nn.Sequential(*layers, nn.Linear(size, n_classes))


@dataclass(eq=False, repr=False)
class ConvolutionalNetwork(NetworkClassifier):
    """LeNet with rectified units: two 5x5 convolutions with 2x2 max pooling, and one hidden layer with dropout.

    After LeCun, Kavukcuoglu and Farabet, "Convolutional networks and applications in vision", ISCAS (2010).

    Parameters
    ----------
    channels : (int, int)
        Maps of the two convolutions.
    hidden : int
        Size of the hidden layer.
    dropout : float
        Share of its units and of its inputs that is left out.
    epochs, batch_size, learning_rate, random_state, device
        As for :class:`~studies.baselines.NetworkClassifier`.
    """

    channels: tuple[int, int] = (16, 32)
    hidden: int = 128
    _: KW_ONLY
    dropout: float = 0.5

    def _network(self, images: Tensor, n_classes: int) -> nn.Module:
        height, width = image_shape(images.shape[1:])
        if min(height, width) < 4:
            raise ValueError(f"X must have images of at least 4x4 pixels, got {height}x{width}")
        first, second = self.channels
        return nn.Sequential(
            nn.Unflatten(1, (1, height, width)) if images.ndim == 2 else nn.Unflatten(1, (1, height)),
            *(nn.Conv2d(1, first, 5, padding=2), nn.ReLU(), nn.MaxPool2d(2)),
            *(nn.Conv2d(first, second, 5, padding=2), nn.ReLU(), nn.MaxPool2d(2)),
            *(nn.Flatten(), nn.Dropout(self.dropout)),
            *(nn.Linear(second * (height // 4) * (width // 4), self.hidden), nn.ReLU(), nn.Dropout(self.dropout)),
            nn.Linear(self.hidden, n_classes),
        )


@dataclass(eq=False, repr=False)
class _Pretrained(NetworkClassifier):
    """Sigmoid layers, pre-trained greedily without labels, with a softmax on top."""

    hidden: Sequence[int] = ()
    _: KW_ONLY
    dropout: float = 0.5
    pretraining_updates: int = 2000
    learning_rate: float = 3e-3

    def _network(self, images: Tensor, n_classes: int) -> nn.Module:
        layers: list[nn.Module] = [nn.Flatten()]
        size = math.prod(images.shape[1:])
        for width in self.hidden:
            layers += [nn.Linear(size, width), nn.Sigmoid(), nn.Dropout(self.dropout)]
            size = width
        top = nn.Linear(size, n_classes)
        nn.init.zeros_(top.weight)  # the layers below are trained: a random top would disturb them
        nn.init.zeros_(top.bias)
        return nn.Sequential(*layers, top)

    def _pretrain(self, images: Tensor) -> Sequence[Layer]:
        x = images.flatten(1)
        layers = []
        for width in self.hidden:
            weight, bias = self._pretrain_layer(x, width)
            layers.append((weight, bias))
            x = torch.sigmoid(nn.functional.linear(x, weight, bias))
        return layers

    def _pretrain_layer(self, x: Tensor, width: int) -> Layer:
        raise NotImplementedError


@dataclass(eq=False, repr=False)
class DeepBeliefNetwork(_Pretrained):
    """A stack of RBMs, trained greedily and then fine-tuned by backpropagation.

    After Hinton, Osindero and Teh, "A fast learning algorithm for deep belief nets", Neural Computation 18
    (2006), with the sizes and the fine-tuning of Hinton and Salakhutdinov, Science 313 (2006). The RBMs are
    trained by CD-1 with our default recipe.

    Parameters
    ----------
    hidden : tuple of int
        Hidden units of the RBMs.
    dropout : float
        Share of hidden units that is left out in fine-tuning.
    pretraining_updates : int
        Smallest number of updates of each RBM; there are at least ten epochs.
    epochs, batch_size, learning_rate, random_state, device
        As for :class:`~studies.baselines.NetworkClassifier`; they concern fine-tuning.
    """

    hidden: Sequence[int] = (500, 500, 2000)
    _: KW_ONLY
    dropout: float = 0.5
    pretraining_updates: int = 2000
    learning_rate: float = 3e-3

    def _pretrain_layer(self, x: Tensor, width: int) -> Layer:
        machine = train_rbm(x, width, updates=self.pretraining_updates)
        return machine.links["visible"].get_parameter("weight").detach(), machine.hidden.bias.detach()


@dataclass(eq=False, repr=False)
class SparseAutoencoder(_Pretrained):
    r"""A stack of sparse autoencoders, trained greedily and then fine-tuned by backpropagation.

    After Ng, "Sparse autoencoder", CS294A lecture notes (2011): a layer learns to minimize

    .. math::

        \tfrac{1}{2} \operatorname{mean} \|\hat{x} - x\|^2 + \tfrac{\lambda}{2} \|W\|^2
        + \beta \sum_j \mathrm{KL}(\rho \,\|\, \hat\rho_j),

    with :math:`\hat\rho_j` the mean activity of hidden unit j, taken over a batch. :math:`\rho` and
    :math:`\beta` are those of the notes' exercise on handwritten digits; its 200 units and :math:`\lambda = 0.003` did
    worse on held-out training digits than the defaults here.

    Parameters
    ----------
    hidden : tuple of int
        Sizes of the layers.
    sparsity, sparsity_weight, weight_decay : float
        Target mean activity :math:`\rho`, weight :math:`\beta` of deviations from it, and :math:`\lambda`.
    dropout : float
        Share of hidden units that is left out in fine-tuning.
    pretraining_updates : int
        Smallest number of updates of each autoencoder; there are at least ten epochs.
    epochs, batch_size, learning_rate, random_state, device
        As for :class:`~studies.baselines.NetworkClassifier`; the first two concern fine-tuning.
    """

    hidden: Sequence[int] = (500, 500)
    _: KW_ONLY
    sparsity: float = 0.1
    sparsity_weight: float = 3.0
    weight_decay: float = 1e-4
    dropout: float = 0.2
    pretraining_updates: int = 2000
    learning_rate: float = 3e-3

    def _pretrain_layer(self, x: Tensor, width: int) -> Layer:
        up = nn.Linear(x.shape[1], width)
        down = nn.Linear(width, x.shape[1])
        both = nn.ModuleList([up, down]).to(x.device)

        def loss(rows: Tensor) -> Tensor:
            target = x[rows]
            hidden = torch.sigmoid(up(target))
            error = (torch.sigmoid(down(hidden)) - target).square().sum(1).mean()
            decay = up.weight.square().sum() + down.weight.square().sum()
            activity = _divergence(self.sparsity, hidden.mean(0)).sum()
            return (error + self.weight_decay * decay) / 2 + self.sparsity_weight * activity

        batch_size = min(100, len(x))
        descent = Descent(loss, adam(both.parameters(), self.learning_rate, x.device), len(x), batch_size, x.device)
        descent.run(epochs_for(len(x), batch_size, self.pretraining_updates), falling=True)
        return up.weight.detach(), up.bias.detach()


def _divergence(wanted: float, activity: Tensor) -> Tensor:
    """Return the Kullback-Leibler divergence of Bernoulli variables with these means."""
    activity = activity.clamp(1e-6, 1 - 1e-6)
    return wanted * torch.log(wanted / activity) + (1 - wanted) * torch.log((1 - wanted) / (1 - activity))


def image_shape(shape: Sequence[int]) -> tuple[int, int]:
    """Return the height and width of a sample. A row is a square image."""
    if len(shape) == 2:
        return shape[0], shape[1]
    side = math.isqrt(math.prod(shape))
    if len(shape) != 1 or side * side != shape[0]:
        raise ValueError(f"X must be images (n, height, width) or rows of square images, got samples of {tuple(shape)}")
    return side, side
