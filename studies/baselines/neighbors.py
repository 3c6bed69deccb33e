"""Exact nearest neighbors in bounded memory: the 1-NN error of all studies, and two 1-NN classifiers."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor

from mvrbm import BoltzmannMachine
from mvrbm.devices import resolve_device
from studies.baselines.base import ImageClassifier, train_rbm

__all__ = ["NearestNeighbor", "RBMNearestNeighbor", "nearest", "nearest_neighbor_error"]

# Rows and columns of a block of distances, which takes 64 MB.
_TEST_ROWS = 1024
_TRAIN_ROWS = 8192
_ROWS_AT_ONCE = 2000


@torch.no_grad()
def nearest(
    train: Any, test: Any, *, device: str = "auto", block: tuple[int, int] = (_TEST_ROWS, _TRAIN_ROWS)
) -> Tensor:
    r"""Return the index of the nearest training sample of each test sample.

    Squared distances :math:`\|b\|^2 - 2\langle a, b\rangle` (the part that depends on the training sample b)
    are computed block by block and in double precision: single precision confuses neighbors whose distances
    differ by a millionth of the samples' norms. For whole numbers, such as bytes, they are exact. Of equally near
    samples the first one counts.

    Parameters
    ----------
    train : array (n_train, \*shape)
        Training samples.
    test : array (n_test, \*shape)
        Test samples.
    device : str
        Device to compute on.
    block : (int, int)
        Test and training samples per block.

    Returns
    -------
    Tensor (n_test,)
        Row numbers, on the CPU.
    """
    place = resolve_device(device)
    a, b = _rows(test, "test"), _rows(train, "train")
    if a.shape[1] != b.shape[1]:
        raise ValueError(f"train and test must have samples of one size, got {b.shape[1]} and {a.shape[1]} numbers")
    if len(b) == 0:
        raise ValueError("train must have at least one sample, got none")
    for name, array in [("train", b), ("test", a)]:
        if array.is_floating_point() and not bool(array.isfinite().all()):
            raise ValueError(f"{name} must be finite, got NaN or infinity")
    found = torch.zeros(len(a), dtype=torch.long)
    for i in range(0, len(a), block[0]):
        part = a[i : i + block[0]].to(place).double()
        least = torch.full((len(part),), torch.inf, dtype=torch.float64, device=place)
        where = torch.zeros(len(part), dtype=torch.long, device=place)
        for j in range(0, len(b), block[1]):
            others = b[j : j + block[1]].to(place).double()
            distances = torch.addmm((others * others).sum(1), part, others.T, alpha=-2)
            values, columns = distances.min(1)
            nearer = values < least
            least = torch.where(nearer, values, least)
            where = torch.where(nearer, columns + j, where)
        found[i : i + block[0]] = where.cpu()
    return found


def nearest_neighbor_error(
    train_features: Any, train_labels: Any, test_features: Any, test_labels: Any, device: str = "auto"
) -> float:
    r"""Return the share of test samples whose nearest training sample (Euclidean distance) has another label.

    Parameters
    ----------
    train_features : array (n_train, \*shape)
        Array or tensor, of any number type.
    train_labels : array (n_train,)
        Labels of any type.
    test_features : array (n_test, \*shape)
        Array or tensor, of any number type.
    test_labels : array (n_test,)
        Labels.
    device : str
        Device to compute on.

    Returns
    -------
    float
        From 0 to 1.

    Examples
    --------
    >>> nearest_neighbor_error([[0.0], [1.0]], ["a", "b"], [[0.1], [0.2], [0.9], [0.8]], ["a", "a", "b", "a"])
    0.25
    """
    there, here = np.asarray(train_labels), np.asarray(test_labels)
    for name, features, labels in [("train", train_features, there), ("test", test_features, here)]:
        if labels.shape != (len(features),):
            raise ValueError(f"{name}_labels must have shape ({len(features)},), got {labels.shape}")
    if len(here) == 0:
        raise ValueError("test_features must have at least one sample, got none")
    return float(np.mean(there[nearest(train_features, test_features, device=device).numpy()] != here))


def _rows(array: Any, name: str) -> Tensor:
    tensor = torch.as_tensor(array)
    if tensor.ndim < 2:
        raise ValueError(f"{name} must have one sample per row, got shape {tuple(tensor.shape)}")
    return tensor.flatten(1)


class NearestNeighbor(ImageClassifier):
    """1-NN classifier on pixels, with the Euclidean distance.

    Parameters
    ----------
    random_state : int, RandomState or None
        Not used.
    device : str
        Device to compute on.
    """

    def __init__(self, *, random_state: Any = None, device: str = "auto") -> None:
        self.random_state = random_state
        self.device = device

    def _learn_features(self, images: Tensor) -> int:
        """Learn from images, and return the number of parameters."""
        return 0

    def _features(self, images: Tensor) -> Tensor:
        return images.flatten(1)

    def _fit(self, images: Tensor, codes: Tensor) -> int:
        n_parameters = self._learn_features(images)
        self._kept = self._features(images)
        self._codes = codes
        return n_parameters

    def _probabilities(self, images: Tensor) -> Tensor:
        which = nearest(self._kept, self._features(images), device=str(images.device)).to(images.device)
        return torch.nn.functional.one_hot(self._codes[which], len(self.classes_)).double()


class RBMNearestNeighbor(NearestNeighbor):
    """1-NN classifier on the hidden probabilities of a classic RBM, with the Euclidean distance.

    The RBM is trained on the images by CD-1 with our default recipe.

    Parameters
    ----------
    hidden : int
        Number of hidden units. The paper's MVRBM has 625.
    updates : int
        Smallest number of updates of the RBM; there are at least ten epochs.
    random_state : int, RandomState or None
        Random seed.
    device : str
        Device to compute on.

    Attributes
    ----------
    machine_ : BoltzmannMachine
        The RBM.
    """

    machine_: BoltzmannMachine

    def __init__(
        self, hidden: int = 625, *, updates: int = 2000, random_state: Any = None, device: str = "auto"
    ) -> None:
        super().__init__(random_state=random_state, device=device)
        self.hidden = hidden
        self.updates = updates

    def _learn_features(self, images: Tensor) -> int:
        self.machine_ = train_rbm(images.flatten(1), self.hidden, updates=self.updates)
        return self.machine_.n_parameters

    @torch.no_grad()
    def _features(self, images: Tensor) -> Tensor:
        return torch.cat([self.machine_.hidden_mean(part) for part in images.flatten(1).split(_ROWS_AT_ONCE)])
