"""The networks of the toolbox that the paper used "with their default parameter settings".

The toolbox is R. B. Palm's DeepLearnToolbox for MATLAB (https://github.com/rasmusbergpalm/DeepLearnToolbox). Its
defaults are those of `nnsetup.m` and of the examples in its tests, one epoch each. Differences from today's custom:
logistic outputs with squared error, plain gradient descent at rates of 1 and 2, initial weights four times as large,
small networks, and a fixed number of epochs. Its autoencoder is a denoising one: the penalty for activity is off by
default. The toolbox requires whole batches; here the remaining samples of an epoch are left out, and fewer samples than
a batch make one batch.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor, nn
from torch.optim import SGD, Optimizer

from studies.baselines.base import Descent, Layer, NetworkClassifier
from studies.baselines.networks import image_shape

__all__ = ["ToolboxAutoencoder", "ToolboxConvolutionalNetwork", "ToolboxDeepBeliefNetwork", "ToolboxDropoutNetwork"]

_HIDDEN = 100
_BATCH = 100
_MOMENTUM = 0.5
# MATLAB's `eps`.
_EPS = 2.0**-52


@dataclass(eq=False, repr=False, kw_only=True)
class _Toolbox(NetworkClassifier):
    """Logistic outputs, half the squared error, gradient descent at a constant rate."""

    _falling_rate: ClassVar[bool] = False
    _momentum: ClassVar[float] = _MOMENTUM
    epochs: int | None = 1
    batch_size: int | None = _BATCH
    learning_rate: float = 2.0

    def _loss(self, logits: Tensor, codes: Tensor) -> Tensor:
        target = nn.functional.one_hot(codes, len(self.classes_)).to(logits.dtype)
        return half_squares(torch.sigmoid(logits), target)

    def _optimizer(self, parameters: Iterable[nn.Parameter], device: torch.device) -> Optimizer:
        return SGD(parameters, lr=self.learning_rate, momentum=self._momentum)

    def _probabilities(self, images: Tensor) -> Tensor:
        outputs = torch.sigmoid(self.network_(images).double())
        return outputs / outputs.sum(1, keepdim=True)


@dataclass(eq=False, repr=False, kw_only=True)
class ToolboxDropoutNetwork(_Toolbox):
    """One hidden layer of 100 scaled hyperbolic tangents, half of them dropped; pixels standardized.

    The third example of `test_example_NN.m`. A pixel that is constant over the training images is divided by
    2.2e-16, as there: where it differs in another image, it dominates.

    Parameters
    ----------
    epochs, batch_size, learning_rate, random_state, device
        As for :class:`~studies.baselines.NetworkClassifier`, with the toolbox's defaults.
    """

    def _network(self, images: Tensor, n_classes: int) -> nn.Module:
        rows = images.flatten(1)
        first = linear(rows.shape[1], _HIDDEN)
        last = linear(_HIDDEN, n_classes)
        return nn.Sequential(nn.Flatten(), _Standardize(rows), first, _Tanh(), _Dropout(0.5), last)


@dataclass(eq=False, repr=False, kw_only=True)
class ToolboxDeepBeliefNetwork(_Toolbox):
    """Two RBMs of 100 units, one epoch of CD-1 at rate 1 each from zero weights, then backpropagation.

    The second example of `test_example_DBN.m`.

    Parameters
    ----------
    epochs, batch_size, learning_rate, random_state, device
        As for :class:`ToolboxDropoutNetwork`; pre-training is always one epoch.
    """

    def _network(self, images: Tensor, n_classes: int) -> nn.Module:
        layers: list[nn.Module] = [nn.Flatten()]
        for size in (math.prod(images.shape[1:]), _HIDDEN):
            layers += [linear(size, _HIDDEN), nn.Sigmoid()]
        return nn.Sequential(*layers, linear(_HIDDEN, n_classes))

    def _pretrain(self, images: Tensor) -> Sequence[Layer]:
        x = images.flatten(1)
        layers = []
        for _ in range(2):
            weight, bias = _one_epoch_of_contrastive_divergence(x, _HIDDEN, self._batch(len(x)))
            layers.append((weight, bias))
            x = torch.sigmoid(x @ weight.T + bias)
        return layers


@dataclass(eq=False, repr=False, kw_only=True)
class ToolboxAutoencoder(_Toolbox):
    """An autoencoder of 100 units with half of the pixels dropped, one epoch at rate 1, then backpropagation.

    The first example of `test_example_SAE.m`.

    Parameters
    ----------
    epochs, batch_size, learning_rate, random_state, device
        As for :class:`ToolboxDropoutNetwork`; pre-training is always one epoch.
    """

    learning_rate: float = 1.0

    def _network(self, images: Tensor, n_classes: int) -> nn.Module:
        size = math.prod(images.shape[1:])
        return nn.Sequential(nn.Flatten(), linear(size, _HIDDEN), nn.Sigmoid(), linear(_HIDDEN, n_classes))

    def _pretrain(self, images: Tensor) -> Sequence[Layer]:
        x = images.flatten(1)
        up = linear(x.shape[1], _HIDDEN)
        down = linear(_HIDDEN, x.shape[1])
        network = nn.Sequential(up, nn.Sigmoid(), down, nn.Sigmoid()).to(x.device)

        def loss(rows: Tensor) -> Tensor:
            target = x[rows]
            return half_squares(network(target * (torch.rand_like(target) > 0.5)), target)

        optimizer = SGD(network.parameters(), lr=1.0, momentum=_MOMENTUM)
        Descent(loss, optimizer, len(x), self._batch(len(x)), x.device).run(1)
        return [(up.weight.detach(), up.bias.detach())]


@dataclass(eq=False, repr=False, kw_only=True)
class ToolboxConvolutionalNetwork(_Toolbox):
    """5x5 convolutions to 6 and to 12 maps, each halved by averages; logistic units throughout.

    The example of `test_example_CNN.m`: batches of 50, rate 1, no momentum.

    Parameters
    ----------
    epochs, batch_size, learning_rate, random_state, device
        As for :class:`ToolboxDropoutNetwork`.
    """

    _momentum: ClassVar[float] = 0.0

    batch_size: int | None = 50
    learning_rate: float = 1.0

    def _network(self, images: Tensor, n_classes: int) -> nn.Module:
        height, width = image_shape(images.shape[1:])
        if any(side % 4 or side < 16 for side in (height, width)):
            raise ValueError(
                f"X must have images of a multiple of 4 and at least 16 pixels per side, got {height}x{width}"
            )
        size = 12 * (height // 4 - 3) * (width // 4 - 3)
        last = nn.Linear(size, n_classes)
        network = nn.Sequential(
            nn.Unflatten(1, (1, height, width)) if images.ndim == 2 else nn.Unflatten(1, (1, height)),
            *(nn.Conv2d(1, 6, 5), nn.Sigmoid(), nn.AvgPool2d(2)),
            *(nn.Conv2d(6, 12, 5), nn.Sigmoid(), nn.AvgPool2d(2)),
            *(nn.Flatten(), last),
        )
        for module in network:
            if isinstance(module, nn.Conv2d | nn.Linear):
                nn.init.xavier_uniform_(module.weight)
                nn.init.zeros_(module.bias)  # type: ignore[arg-type]
        return network


# -- the toolbox's pieces ---------------------------------------------------------------------------


def half_squares(outputs: Tensor, target: Tensor) -> Tensor:
    """Return half the squared error per sample, averaged over samples."""
    return (outputs - target).square().sum(1).mean() / 2


def linear(n_in: int, n_out: int) -> nn.Linear:
    """Return a layer whose weights and biases start uniformly within 4 sqrt(6 / (n_in + n_out))."""
    layer = nn.Linear(n_in, n_out)
    bound = 4 * math.sqrt(6 / (n_in + n_out))
    nn.init.uniform_(layer.weight, -bound, bound)
    nn.init.uniform_(layer.bias, -bound, bound)
    return layer


class _Tanh(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return 1.7159 * torch.tanh(2 / 3 * x)


class _Dropout(nn.Module):
    """Drop units in training, and scale all units down in prediction."""

    def __init__(self, share: float) -> None:
        super().__init__()
        self.share = share

    def forward(self, x: Tensor) -> Tensor:
        return x * (torch.rand_like(x) > self.share) if self.training else x * (1 - self.share)


class _Standardize(nn.Module):
    """Subtract the mean of some rows, and divide by their standard deviation."""

    def __init__(self, rows: Tensor) -> None:
        super().__init__()
        double = rows.double()
        correction = 1 if len(rows) > 1 else 0
        self.register_buffer("mean", double.mean(0).float())
        self.register_buffer("deviation", double.std(0, correction=correction).clamp(min=_EPS).float())

    def forward(self, x: Tensor) -> Tensor:
        return (x - self.mean) / self.deviation  # type: ignore[operator]


@torch.no_grad()
def _one_epoch_of_contrastive_divergence(x: Tensor, n_hidden: int, batch_size: int, rate: float = 1.0) -> Layer:
    """Train by CD-1 from zero weights. Sampling the hidden states of the data breaks the symmetry of the units."""
    weight = x.new_zeros(n_hidden, x.shape[1])
    visible_bias = x.new_zeros(x.shape[1])
    bias = x.new_zeros(n_hidden)
    order = torch.randperm(len(x), device=x.device)
    for rows in order[: len(x) // batch_size * batch_size].split(batch_size):
        data = x[rows]
        hidden = torch.bernoulli(torch.sigmoid(data @ weight.T + bias))
        chain = torch.bernoulli(torch.sigmoid(hidden @ weight + visible_bias))
        after = torch.sigmoid(chain @ weight.T + bias)
        weight += rate * (hidden.T @ data - after.T @ chain) / batch_size
        visible_bias += rate * (data - chain).mean(0)
        bias += rate * (hidden - after).mean(0)
    return weight, bias
