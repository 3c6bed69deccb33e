"""The settings of the comparison on Indian Pines, and the names of the scene's classes."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["CLASSES", "Candidate", "Settings"]

#: The scene's classes by label; 0 is no label.
CLASSES = (
    "no label",
    "alfalfa",
    "corn, no till",
    "corn, min till",
    "corn",
    "grass, pasture",
    "grass, trees",
    "grass, mown",
    "hay, windrowed",
    "oats",
    "soybean, no till",
    "soybean, min till",
    "soybean, clean",
    "wheat",
    "woods",
    "buildings, trees",
    "stone, steel",
)


@dataclass(frozen=True)
class Candidate:
    """A `TVRBM` to choose from.

    Parameters
    ----------
    data : {"raw", "whitened"}
        Its data: patches as they are, or with decorrelated bands.
    hidden_shape : tuple of int
        Shape of its hidden layer, with three axes.
    rank : int
        Rank of its coupling.
    """

    data: str
    hidden_shape: tuple[int, int, int]
    rank: int


@dataclass(frozen=True)
class Settings:
    """The settings of the comparison.

    Parameters
    ----------
    patch : int
        Rows, and columns, of a patch; odd.
    block : int
        Rows, and columns, of a block of training pixels.
    share : float
        Share of the labels for training.
    classes : int
        Smallest number of classes of a draw.
    least : int
        Smallest number of training pixels and of test pixels of a class that counts in a draw.
    folds : int
        Number of groups of training blocks, held out in turn to choose settings.
    unlabeled : int
        Number of patches without labels that features are learned from; none of them overlaps a test patch.
    candidates : tuple of Candidate
        The machines to choose from.
    passes : tuple of int
        Numbers of epochs to choose from.
    batch_size : int
        Patches per update.
    floor : float
        Added by whitening to the variances of the bands, which are 1.
    """

    patch: int = 9
    block: int = 7
    share: float = 0.1
    classes: int = 11
    least: int = 5
    folds: int = 3
    unlabeled: int = 1200
    candidates: tuple[Candidate, ...] = (
        Candidate("whitened", (1, 1, 100), 1),
        Candidate("whitened", (2, 2, 40), 1),
        Candidate("whitened", (2, 2, 40), 3),
        Candidate("raw", (2, 2, 40), 1),
    )
    passes: tuple[int, ...] = (3, 10)
    batch_size: int = 20
    floor: float = 0.1
