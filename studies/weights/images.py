"""Photographs to train and test super-resolution with, and the measures of quality on them."""

from __future__ import annotations

import importlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from mvrbm.vision import enlarge_image, luminance, psnr_ssim, reduce_image
from mvrbm.vision.resampling import crop_to_multiple
from studies.superres.data import named_training_images, test_image

__all__ = [
    "Bicubic",
    "collect",
    "lena",
    "literature",
    "mean_in_paper_protocol",
    "open_images",
    "paper_protocol",
    "set5",
    "split_t91",
]

Array = NDArray[Any]

#: The open images, with their sources and licenses.
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
HELD_OUT_T91 = ("t5", "t17", "t33", "t48", "t60", "tt3", "tt12", "tt22")
SET5 = ("baby", "bird", "butterfly", "head", "woman")


# -- images -----------------------------------------------------------------------------------------


def collect(work: Path) -> list[str]:
    """Write the open images as PNG files under a folder, and return one line per image."""
    from sklearn.datasets import load_sample_image

    samples = importlib.import_module("skimage.data")
    folder = work / "open"
    folder.mkdir(parents=True, exist_ok=True)
    lines = []
    for name, license in LICENSES.items():
        packaged = license.startswith("scikit-image")
        image = np.asarray(getattr(samples, name)() if packaged else load_sample_image(f"{name}.jpg"))
        Image.fromarray(image).save(folder / f"{name}.png")
        lines.append(f"{name} {image.shape} {license}")
    return lines


def open_images(work: Path) -> dict[str, Array]:
    """Return the open images by name."""
    found = {}
    for name in LICENSES:
        path = work / "open" / f"{name}.png"
        if not path.is_file():
            raise FileNotFoundError(f"{path} is missing: run the part 'collect' first")
        with Image.open(path) as image:
            found[name] = np.asarray(image.convert("L" if image.mode == "L" else "RGB"))
    return found


def split_t91(data_dir: str | None) -> tuple[list[Array], list[Array]]:
    """Return the images of T91 to train on, and eight that are held out."""
    images = named_training_images("t91", data_dir)
    held_out = [images.pop(name) for name in HELD_OUT_T91]
    return list(images.values()), held_out


def lena(data_dir: str | None) -> Array:
    """Return the paper's Lena."""
    return test_image("lena", data_dir)


def set5(data_dir: str | None) -> list[Array]:
    """Return the five images of Set5."""
    return [test_image(name, data_dir) for name in SET5]


# -- measures ---------------------------------------------------------------------------------------


class Upscaler(Protocol):
    """Anything that enlarges images."""

    scale: int

    def upscale(self, image: Any) -> Array:
        """Enlarge an image."""
        ...


class Bicubic:
    """Bicubic interpolation, with the interface of a model."""

    def __init__(self, scale: int) -> None:
        self.scale = scale

    def upscale(self, image: Any) -> Array:
        """Enlarge an image."""
        return enlarge_image(image, self.scale)


def literature(model: Any, images: Sequence[Array], **options: Any) -> list[float]:
    """Return mean PSNR and SSIM in the literature's protocol: luminance alone is reduced and enlarged."""
    rows = []
    for image in images:
        truth = crop_to_multiple(luminance(image), model.scale)
        low = reduce_image(truth, model.scale)
        rows.append(psnr_ssim(truth, model.upscale(low, **options), "literature", model.scale))
    return [round(float(value), 4) for value in np.mean(rows, 0)]


def paper_protocol(model: Upscaler, image: Array) -> list[float]:
    """Return PSNR and SSIM in the paper's protocol: RGB is reduced and enlarged."""
    truth = crop_to_multiple(image, model.scale)
    quality = psnr_ssim(truth, model.upscale(reduce_image(truth, model.scale)), "paper", model.scale)
    return [round(float(value), 4) for value in quality]


def mean_in_paper_protocol(model: Upscaler, images: Sequence[Array]) -> list[float]:
    """Return mean PSNR and SSIM in the paper's protocol."""
    return [round(float(value), 4) for value in np.mean([paper_protocol(model, image) for image in images], 0)]
