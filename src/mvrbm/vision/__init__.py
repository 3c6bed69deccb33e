"""Image processing: denoising, super-resolution, resampling, color spaces and quality metrics.

The two estimators, :class:`SuperResolver` and :class:`PhotoDenoiser`, are both built from the stages in
:mod:`mvrbm.vision.stages`. :mod:`mvrbm.vision.denoising` uses a trained Boltzmann machine as a prior for clean images.
:mod:`mvrbm.io.pictures` reads and writes image files, and :mod:`mvrbm.pages` draws figures.
"""

import importlib
from typing import TYPE_CHECKING, Any

from mvrbm.vision.color import luminance
from mvrbm.vision.degradation import Degradation, estimate_degradation, estimate_noise, estimate_salt
from mvrbm.vision.denoising import NOISES, add_noise, denoise, estimate_level
from mvrbm.vision.quality import psnr, psnr_ssim
from mvrbm.vision.resampling import enlarge_image, reduce_image

if TYPE_CHECKING:
    from mvrbm.vision.photo_denoising import (
        PhotoDenoiser,
        clean_photograph,
        denoise_photograph,
        jpeg_level,
        repair_photograph,
    )
    from mvrbm.vision.stage_training import TrainingStep
    from mvrbm.vision.super_resolution import SuperResolver

__all__ = [
    "NOISES",
    "Degradation",
    "PhotoDenoiser",
    "SuperResolver",
    "TrainingStep",
    "add_noise",
    "clean_photograph",
    "denoise",
    "denoise_photograph",
    "enlarge_image",
    "estimate_degradation",
    "estimate_level",
    "estimate_noise",
    "estimate_salt",
    "jpeg_level",
    "luminance",
    "psnr",
    "psnr_ssim",
    "reduce_image",
    "repair_photograph",
]

# Public names that are imported on first use, with their modules. These modules require scikit-learn.
_HOMES = {
    "SuperResolver": "super_resolution",
    "TrainingStep": "stage_training",
    **dict.fromkeys(
        ("PhotoDenoiser", "clean_photograph", "denoise_photograph", "jpeg_level", "repair_photograph"),
        "photo_denoising",
    ),
}


def __getattr__(name: str) -> Any:
    if name in _HOMES:
        return getattr(importlib.import_module(f"mvrbm.vision.{_HOMES[name]}"), name)
    raise AttributeError(f"module '{__name__}' has no attribute '{name}'")
