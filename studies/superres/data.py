"""The data of experiment 3: photographs for training and testing, the paper's or those of scikit-image."""

from __future__ import annotations

import functools
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from mvrbm.errors import DatasetError
from mvrbm.io.datasets import load

__all__ = ["PACKAGED", "check_there", "has_files", "named_training_images", "test_image", "training_images"]

Array = NDArray[Any]

#: The set that needs no files.
PACKAGED = "packaged"

_FILES = {
    "lena": "Lena/lena_scsr_512.bmp",
    **{name: f"Set5/{name}_GT.bmp" for name in ("baby", "bird", "butterfly", "head", "woman")},
}
_LIST = "ScSR69.txt"
_TRAINING = "T91"

# Crops of the packaged photographs: number in the set, top and left. No test photograph is used for training.
_SIDE = 160
_TESTED = {"astronaut": (0, 0, 150), "chelsea": (3, 40, 120)}
_LEARNED = ((2, 120, 180), (4, 60, 200), (5, 40, 100), (12, 150, 250), (13, 100, 100), (14, 150, 250))


def check_there(name: str, data_dir: str | None) -> None:
    """Raise `DatasetError` if a set of images is not on this machine."""
    if name == PACKAGED:
        load("natural-images")
    else:
        _folder(data_dir)


@functools.lru_cache(maxsize=2)
def training_images(name: str, data_dir: str | None) -> tuple[Array, ...]:
    """Return the training images of a set.

    Parameters
    ----------
    name : {"scsr69", "t91", "packaged"}
        The paper's 69 images, the 91 of the literature, or crops of photographs that come with scikit-image.
    data_dir : str, optional
        Folder to search for files.

    Returns
    -------
    tuple of arrays (H, W, 3) or (H, W)
        Bytes.
    """
    if name == PACKAGED:
        return tuple(_crop(*where) for where in _LEARNED)
    return tuple(named_training_images(name, data_dir).values())


def named_training_images(name: str, data_dir: str | None) -> dict[str, Array]:
    """Return the training images of ``"scsr69"`` or ``"t91"`` by the names of their files, without suffix."""
    folder = _folder(data_dir)
    lists: dict[str, Callable[[], list[str]]] = {
        "scsr69": lambda: (folder / _LIST).read_text(encoding="utf-8").split(),
        "t91": lambda: sorted(path.name for path in (folder / _TRAINING).glob("*.bmp")),
    }
    return {Path(file).stem: _read(folder / _TRAINING / file) for file in lists[name]()}


def has_files(data_dir: str | None) -> bool:
    """Whether the images of the paper and of the literature are on this machine."""
    try:
        _folder(data_dir)
    except DatasetError:
        return False
    return True


def test_image(name: str, data_dir: str | None) -> Array:
    """Return an image to test with, bytes (H, W, 3) or (H, W)."""
    return _crop(*_TESTED[name]) if name in _TESTED else _read(_folder(data_dir) / _FILES[name])


def _folder(data_dir: str | None) -> Path:
    roots = [Path(root) for root in (data_dir, os.environ.get("MVRBM_DATA")) if root]
    for folder in (place for root in roots for place in (root / "superres", root)):
        if all((folder / part).exists() for part in (_LIST, _TRAINING, *_FILES.values())):
            return folder
    raise DatasetError(
        f"the images of experiment 3 are not on this machine: point MVRBM_DATA or --data-dir at a folder with "
        f"{_TRAINING}, {_LIST}, Set5 and Lena, or use --scale quick, which needs none of them"
    )


def _read(path: Path) -> Array:
    from mvrbm.io.pictures import read_picture

    return read_picture(path).pixels


@functools.lru_cache(maxsize=1)
def _packaged() -> tuple[Array, ...]:
    return tuple(load("natural-images").arrays)


def _crop(number: int, top: int, left: int) -> Array:
    image = _packaged()[number]
    return np.ascontiguousarray(image[top : top + _SIDE, left : left + _SIDE])
