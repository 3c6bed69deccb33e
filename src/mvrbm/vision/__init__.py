"""Images: noise and its removal, resampling, colour, quality measures and super-resolution.

Files are read by :mod:`mvrbm.io.pictures`; figures are drawn in :mod:`mvrbm.report`.
"""

from mvrbm.vision.colour import luminance
from mvrbm.vision.denoising import NOISES, add_noise, denoise, estimate_level
from mvrbm.vision.photographs import (
    Degradation,
    clean_photograph,
    denoise_photograph,
    estimate_degradation,
    estimate_noise,
)
from mvrbm.vision.quality import psnr, psnr_ssim
from mvrbm.vision.resampling import enlarge_image, reduce_image
from mvrbm.vision.superres import SuperResolver

__all__ = ["NOISES", "Degradation", "SuperResolver", "add_noise", "clean_photograph", "denoise"]
__all__ += ["denoise_photograph", "enlarge_image", "estimate_degradation", "estimate_level", "estimate_noise"]
__all__ += ["luminance", "psnr", "psnr_ssim", "reduce_image"]
