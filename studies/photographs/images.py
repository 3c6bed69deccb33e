"""The photographs with free licenses that come with Python packages, and the test sets of the literature."""

from __future__ import annotations

import importlib
from typing import Any

import numpy as np
from numpy.typing import NDArray

from studies.data import named_training_images, test_image

__all__ = ["HELD_OUT_T91", "LICENSES", "SET5", "open_images", "set5", "split_t91"]

Array = NDArray[Any]

#: Source and license of each photograph in :func:`open_images`.
LICENSES = {
    "astronaut": "scikit-image; NASA, public domain",
    "brick": "scikit-image; CC0, CC0Textures",
    "camera": "scikit-image; CC0, Lav Varshney",
    "chelsea": "scikit-image; CC0, Stefan van der Walt",
    "coffee": "scikit-image; CC0, Rachel Michetti",
    "coins": "scikit-image; Brooklyn Museum, no known copyright restrictions",
    "grass": "scikit-image; CC0, linolafett",
    "gravel": "scikit-image; CC0, CC0Textures",
    "hubble_deep_field": "scikit-image; NASA, public domain",
    "retina": "scikit-image; CC0, Mikael Haggstrom",
    "china": "scikit-learn; CC BY 2.0, danielbuechele",
    "flower": "scikit-learn; CC BY 2.0, vultilion",
}
#: Images of T91 that are held out for testing.
HELD_OUT_T91 = ("t5", "t17", "t33", "t48", "t60", "tt3", "tt12", "tt22")
#: Names of the images of Set5.
SET5 = ("baby", "bird", "butterfly", "head", "woman")


def open_images() -> dict[str, Array]:
    """Return the photographs that come with scikit-image and scikit-learn, by name."""
    from sklearn.datasets import load_sample_image

    samples = importlib.import_module("skimage.data")
    found = {}
    for name, license in LICENSES.items():
        in_skimage = license.startswith("scikit-image")
        found[name] = np.asarray(getattr(samples, name)() if in_skimage else load_sample_image(f"{name}.jpg"))
    return found


def split_t91(data_dir: str | None) -> tuple[list[Array], list[Array]]:
    """Return the training images of T91, and the eight images that are held out."""
    images = named_training_images("t91", data_dir)
    held_out = [images.pop(name) for name in HELD_OUT_T91]
    return list(images.values()), held_out


def set5(data_dir: str | None) -> list[Array]:
    """Return the five images of Set5."""
    return [test_image(name, data_dir) for name in SET5]
