"""Images: noise and its removal, resampling, color, quality measures and super-resolution.

Files are read by :mod:`mvrbm.io.pictures`; figures are drawn in :mod:`mvrbm.pages`.
"""

from typing import TYPE_CHECKING, Any

from mvrbm.vision.color import luminance
from mvrbm.vision.denoising import NOISES, add_noise, denoise, estimate_level
from mvrbm.vision.photographs import (
    Degradation,
    clean_photograph,
    denoise_photograph,
    estimate_degradation,
    estimate_noise,
    estimate_salt,
    restore_photograph,
)
from mvrbm.vision.quality import psnr, psnr_ssim
from mvrbm.vision.resampling import enlarge_image, reduce_image

__all__ = ["NOISES", "Degradation", "SuperResolver", "add_noise", "clean_photograph", "denoise"]
__all__ += ["denoise_photograph", "enlarge_image", "estimate_degradation", "estimate_level", "estimate_noise"]
__all__ += ["estimate_salt", "luminance", "psnr", "psnr_ssim", "reduce_image", "restore_photograph"]


if TYPE_CHECKING:
    from mvrbm.vision.superres import SuperResolver


def __getattr__(name: str) -> Any:
    if name == "SuperResolver":  # see there
        from mvrbm.vision import superres

        return superres.SuperResolver
    raise AttributeError(f"module '{__name__}' has no attribute '{name}'")
