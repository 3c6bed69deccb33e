"""Quality of samples of digits: a network that judges them, and their adversarial accuracy."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import KW_ONLY, dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from studies.baselines import ConvolutionalNetwork

__all__ = ["CONFIDENT", "Judge", "adversarial_accuracy", "verdicts"]

Array = NDArray[Any]
#: A verdict is confident if the most probable class has a probability above this.
CONFIDENT = 0.9
_CLASSES = 10
# Rows of a block of distances, to limit memory: 80 MB for 20,000 columns.
_ROWS = 1024


# -- the judge --------------------------------------------------------------------------------------


class _Augment(nn.Module):
    """Augment training images: shift each by up to some pixels, and binarize half of them at random."""

    def __init__(self, shift: int) -> None:
        super().__init__()
        self.shift = shift

    def forward(self, images: Tensor) -> Tensor:  # (n, height, width)
        if not self.training:
            return images
        n, height, width = images.shape
        padded = nn.functional.pad(images, (self.shift,) * 4)
        down, right = (torch.randint(2 * self.shift + 1, (n, 1), device=images.device) for _ in range(2))
        rows = (down + torch.arange(height, device=images.device))[:, :, None]
        columns = (right + torch.arange(width, device=images.device))[:, None, :]
        moved = padded[torch.arange(n, device=images.device)[:, None, None], rows, columns]
        binary = (torch.rand_like(moved) < moved).to(moved.dtype)
        return torch.where(torch.rand(n, 1, 1, device=images.device) < 0.5, binary, moved)


@dataclass(eq=False, repr=False)
class Judge(ConvolutionalNetwork):
    """A convolutional network for gray and for binary digits, trained on shifted digits, half of them binarized.

    Parameters
    ----------
    channels, hidden, dropout, epochs, batch_size, learning_rate, random_state, device
        As for :class:`~studies.baselines.ConvolutionalNetwork`.
    shift : int
        Largest shift in training, in pixels.
    """

    channels: tuple[int, int] = (32, 64)
    hidden: int = 128
    _: KW_ONLY
    dropout: float = 0.5
    shift: int = 2

    def _network(self, images: Tensor, n_classes: int) -> nn.Module:
        return nn.Sequential(_Augment(self.shift), super()._network(images, n_classes))

    def arrays(self) -> dict[str, Tensor]:
        """Return the parameters in the form that :meth:`from_arrays` takes."""
        return {name: value.detach().cpu() for name, value in self.network_.state_dict().items()}

    @classmethod
    def from_arrays(cls, arrays: Mapping[str, Tensor], shape: tuple[int, int], device: str) -> Judge:
        """Return a judge with these parameters for digits of a shape."""
        judge = cls(device=device)
        judge.classes_ = np.arange(_CLASSES)
        judge.shape_ = shape
        judge.n_features_in_ = shape[0] * shape[1]
        judge.network_ = judge._network(torch.zeros(1, *shape), _CLASSES).to(device).eval()
        judge.network_.load_state_dict(dict(arrays))
        return judge


def verdicts(judge: Judge, images: Array, labels: Array | None = None) -> dict[str, Any]:
    """Return the judge's verdicts on images.

    Parameters
    ----------
    judge : Judge
        The judge.
    images : array (n, height, width)
        Bytes, or floats from 0 to 1.
    labels : array (n,), optional
        The class that each image should show.

    Returns
    -------
    dict
        `confidence`: mean probability of the most probable class. `confident`: share of images whose most probable
        class has a probability above :data:`CONFIDENT`. `classes`: share of each class among the most probable ones.
        With labels, `agreement`: share of images whose most probable class is the label, and `agreement_by_class`.
    """
    probabilities = judge.predict_proba(images)
    confidence = probabilities.max(1)
    chosen = probabilities.argmax(1)
    found: dict[str, Any] = {
        "n": len(images),
        "confidence": float(confidence.mean()),
        "confident": float((confidence > CONFIDENT).mean()),
        "classes": [float((chosen == digit).mean()) for digit in range(_CLASSES)],
    }
    if labels is not None:
        right = chosen == labels
        found["agreement"] = float(right.mean())
        digits = np.unique(labels).tolist()
        found["agreement_by_class"] = {str(digit): float(right[labels == digit].mean()) for digit in digits}
    return found


# -- nearest neighbors -----------------------------------------------------------------------------


@torch.no_grad()
def adversarial_accuracy(data: Any, samples: Any, device: str = "cpu") -> dict[str, float]:
    r"""Measure how well nearest neighbors tell samples from data; 0.5 means that they cannot.

    `truth` is the share of data points whose nearest other data point is nearer than the nearest sample, `samples` the
    same with the roles exchanged, and `mean` their mean. Equal distances count for the other set, as in the function
    `compute_aats` of the package `rbms`. If all are 1, samples are unlike data. If `truth` is near 0, samples are
    copies of data. If `samples` is near 1 and `truth` near 0.5, samples collapse to a part of the data.

    Parameters
    ----------
    data, samples : array (n, \*shape)
        Equally many of each. For whole numbers distances are exact.
    device : str
        Device to compute on.
    """
    a, b = (torch.as_tensor(x).reshape(len(x), -1).to(device, torch.float32) for x in (data, samples))
    if a.shape != b.shape:
        raise ValueError(f"data and samples must be of one shape, got {tuple(a.shape)} and {tuple(b.shape)}")
    truth = float((_nearest(a, a, itself=True) < _nearest(a, b)).double().mean())
    fake = float((_nearest(b, b, itself=True) < _nearest(b, a)).double().mean())
    return {"truth": truth, "samples": fake, "mean": (truth + fake) / 2}


def _nearest(points: Tensor, others: Tensor, *, itself: bool = False) -> Tensor:
    """Return the squared distance of each point to its nearest other; `itself`: others are the points, in order."""
    norms = (others * others).sum(1)
    found = []
    for first in range(0, len(points), _ROWS):
        block = points[first : first + _ROWS]
        distances = torch.addmm(norms, block, others.T, alpha=-2) + (block * block).sum(1, keepdim=True)
        if itself:
            rows = torch.arange(len(block), device=block.device)
            distances[rows, rows + first] = torch.inf
        found.append(distances.min(1).values)
    return torch.cat(found)
