"""The networks in settings that are customary today: rectified or pre-trained layers, Adam, dropout, softmax."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from studies.baselines.base import Descent, Layer, NetworkClassifier, adam, passes, train_rbm

__all__ = ["ConvolutionalNetwork", "DeepBeliefNetwork", "DropoutNetwork", "SparseAutoencoder"]


class DropoutNetwork(NetworkClassifier):
    """Fully connected rectified layers; a fifth of the inputs and half of the hidden units left out at random.

    After Srivastava, Hinton, Krizhevsky, Sutskever and Salakhutdinov, "Dropout", JMLR 15 (2014).

    Parameters
    ----------
    hidden : tuple of int
        Sizes of the hidden layers.
    input_dropout, dropout : float
        Shares of inputs and of hidden units that are left out.
    epochs : int, optional
        Passes over the data; if not given, held-out training samples decide.
    batch_size : int, optional
        Samples an update; if not given, a fortieth of all, between 16 and 128.
    learning_rate : float
        Of Adam.
    random_state : int, RandomState or None
        Seed.
    device : str
        ``"auto"`` is a GPU if there is one.
    """

    def __init__(
        self,
        hidden: Sequence[int] = (800, 800),
        *,
        input_dropout: float = 0.2,
        dropout: float = 0.5,
        epochs: int | None = None,
        batch_size: int | None = None,
        learning_rate: float = 1e-3,
        random_state: Any = None,
        device: str = "auto",
    ) -> None:
        self.hidden = hidden
        self.input_dropout = input_dropout
        self.dropout = dropout
        self.epochs = epochs
        self.batch_size = batch_size
        self.learning_rate = learning_rate
        self.random_state = random_state
        self.device = device

    def _network(self, images: Tensor, n_classes: int) -> nn.Module:
        layers: list[nn.Module] = [nn.Flatten(), nn.Dropout(self.input_dropout)]
        size = math.prod(images.shape[1:])
        for width in self.hidden:
            layers += [nn.Linear(size, width), nn.ReLU(), nn.Dropout(self.dropout)]
            size = width
        return nn.Sequential(*layers, nn.Linear(size, n_classes))


class ConvolutionalNetwork(NetworkClassifier):
    """Two 5x5 convolutions with 2x2 maximum pooling, one hidden layer with dropout: LeNet with rectified units.

    After LeCun, Kavukcuoglu and Farabet, "Convolutional networks and applications in vision", ISCAS (2010).

    Parameters
    ----------
    channels : (int, int)
        Maps of the two convolutions.
    hidden : int
        Size of the hidden layer.
    dropout : float
        Share of its units, and of what it sees, that is left out.
    epochs, batch_size, learning_rate, random_state, device
        As for :class:`DropoutNetwork`.
    """

    def __init__(
        self,
        channels: tuple[int, int] = (16, 32),
        hidden: int = 128,
        *,
        dropout: float = 0.5,
        epochs: int | None = None,
        batch_size: int | None = None,
        learning_rate: float = 1e-3,
        random_state: Any = None,
        device: str = "auto",
    ) -> None:
        self.channels = channels
        self.hidden = hidden
        self.dropout = dropout
        self.epochs = epochs
        self.batch_size = batch_size
        self.learning_rate = learning_rate
        self.random_state = random_state
        self.device = device

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


class _Pretrained(NetworkClassifier):
    """Sigmoid layers that start from unsupervised learning, one after another, with a softmax on top."""

    hidden: Sequence[int]
    dropout: float
    pretraining_updates: int

    def _network(self, images: Tensor, n_classes: int) -> nn.Module:
        layers: list[nn.Module] = [nn.Flatten()]
        size = math.prod(images.shape[1:])
        for width in self.hidden:
            layers += [nn.Linear(size, width), nn.Sigmoid(), nn.Dropout(self.dropout)]
            size = width
        top = nn.Linear(size, n_classes)
        nn.init.zeros_(top.weight)  # the layers below have learned: the top must not disturb them at random
        nn.init.zeros_(top.bias)
        return nn.Sequential(*layers, top)

    def _pretrain(self, images: Tensor) -> Sequence[Layer]:
        x, layers = images.flatten(1), []
        for width in self.hidden:
            weight, bias = self._pretrain_layer(x, width)
            layers.append((weight, bias))
            x = torch.sigmoid(nn.functional.linear(x, weight, bias))
        return layers

    def _pretrain_layer(self, x: Tensor, width: int) -> Layer:
        raise NotImplementedError


class DeepBeliefNetwork(_Pretrained):
    """RBMs trained one on top of the other, then fine-tuned by backpropagation.

    After Hinton, Osindero and Teh, "A fast learning algorithm for deep belief nets", Neural Computation 18
    (2006), with the sizes and the fine-tuning of Hinton and Salakhutdinov, Science 313 (2006). The RBMs are
    trained by CD-1 in our default recipe.

    Parameters
    ----------
    hidden : tuple of int
        Hidden units of the RBMs.
    dropout : float
        Share of hidden units that is left out in fine-tuning.
    pretraining_updates : int
        Updates of each RBM at least; ten passes at least.
    epochs, batch_size, learning_rate, random_state, device
        As for :class:`DropoutNetwork`; they concern fine-tuning.
    """

    def __init__(
        self,
        hidden: Sequence[int] = (500, 500, 2000),
        *,
        dropout: float = 0.5,
        pretraining_updates: int = 2000,
        epochs: int | None = None,
        batch_size: int | None = None,
        learning_rate: float = 3e-3,
        random_state: Any = None,
        device: str = "auto",
    ) -> None:
        self.hidden = hidden
        self.dropout = dropout
        self.pretraining_updates = pretraining_updates
        self.epochs = epochs
        self.batch_size = batch_size
        self.learning_rate = learning_rate
        self.random_state = random_state
        self.device = device

    def _pretrain_layer(self, x: Tensor, width: int) -> Layer:
        machine = train_rbm(x, width, updates=self.pretraining_updates)
        return machine.links["visible"].get_parameter("weight").detach(), machine.hidden.bias.detach()


class SparseAutoencoder(_Pretrained):
    r"""Autoencoders whose hidden units are seldom active, stacked and then fine-tuned by backpropagation.

    After Ng, "Sparse autoencoder", CS294A lecture notes (2011): a layer learns to minimise

    .. math::

        \tfrac{1}{2} \operatorname{mean} \|\hat{x} - x\|^2 + \tfrac{\lambda}{2} \|W\|^2
        + \beta \sum_j \mathrm{KL}(\rho \,\|\, \hat\rho_j),

    with :math:`\hat\rho_j` the mean activity of hidden unit j, taken over a batch. :math:`\rho` and
    :math:`\beta` are those of the notes' exercise on handwritten digits; its 200 units and :math:`\lambda = 0.003` did
    worse on held-out training digits than what is the default here.

    Parameters
    ----------
    hidden : tuple of int
        Sizes of the layers.
    sparsity, sparsity_weight, weight_decay : float
        Wanted mean activity :math:`\rho`, weight :math:`\beta` of what departs from it, and :math:`\lambda`.
    dropout : float
        Share of hidden units that is left out in fine-tuning.
    pretraining_updates : int
        Updates of each autoencoder at least; ten passes at least.
    epochs, batch_size, learning_rate, random_state, device
        As for :class:`DropoutNetwork`; the first two concern fine-tuning.
    """

    def __init__(
        self,
        hidden: Sequence[int] = (500, 500),
        *,
        sparsity: float = 0.1,
        sparsity_weight: float = 3.0,
        weight_decay: float = 1e-4,
        dropout: float = 0.2,
        pretraining_updates: int = 2000,
        epochs: int | None = None,
        batch_size: int | None = None,
        learning_rate: float = 3e-3,
        random_state: Any = None,
        device: str = "auto",
    ) -> None:
        self.hidden = hidden
        self.sparsity = sparsity
        self.sparsity_weight = sparsity_weight
        self.weight_decay = weight_decay
        self.dropout = dropout
        self.pretraining_updates = pretraining_updates
        self.epochs = epochs
        self.batch_size = batch_size
        self.learning_rate = learning_rate
        self.random_state = random_state
        self.device = device

    def _pretrain_layer(self, x: Tensor, width: int) -> Layer:
        up, down = nn.Linear(x.shape[1], width), nn.Linear(width, x.shape[1])
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
        descent.run(passes(len(x), batch_size, self.pretraining_updates), falling=True)
        return up.weight.detach(), up.bias.detach()


def _divergence(wanted: float, activity: Tensor) -> Tensor:
    """Kullback-Leibler divergence of Bernoulli variables with these means."""
    activity = activity.clamp(1e-6, 1 - 1e-6)
    return wanted * torch.log(wanted / activity) + (1 - wanted) * torch.log((1 - wanted) / (1 - activity))


def image_shape(shape: Sequence[int]) -> tuple[int, int]:
    """Return height and width of a sample: as it is, or those of a square if it is a row."""
    if len(shape) == 2:
        return shape[0], shape[1]
    side = math.isqrt(math.prod(shape))
    if len(shape) != 1 or side * side != shape[0]:
        raise ValueError(f"X must be images (n, height, width) or rows of square images, got samples of {tuple(shape)}")
    return side, side
