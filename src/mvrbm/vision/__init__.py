"""Images: noise and its removal, resampling, colour, quality measures and super-resolution.

Files are read by :mod:`mvrbm.io.pictures`; figures are drawn in :mod:`mvrbm.report`.
"""

from mvrbm.vision.colour import luminance
from mvrbm.vision.denoising import NOISES, add_noise, denoise, estimate_level
from mvrbm.vision.quality import psnr, psnr_ssim
from mvrbm.vision.resampling import enlarge_image, reduce_image
from mvrbm.vision.superres import SuperResolver

__all__ = ["NOISES", "SuperResolver", "add_noise", "denoise", "enlarge_image", "estimate_level"]
__all__ += ["luminance", "psnr", "psnr_ssim", "reduce_image"]
