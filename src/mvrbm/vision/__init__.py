"""Images: what a machine with a matrix as its visible layer is good for.

Here live noise and its removal, resampling, colour and super-resolution, and the patches that carry a small machine
over a large image. Files and figures do not.
"""

from mvrbm.vision.colour import from_ycbcr, luminance, to_ycbcr
from mvrbm.vision.denoising import denoise, estimate_level
from mvrbm.vision.noise_models import NOISES, add_noise
from mvrbm.vision.quality import psnr_ssim
from mvrbm.vision.resampling import enlarge_image, reduce_image
from mvrbm.vision.superres import SuperResolver

__all__ = [
    "NOISES",
    "SuperResolver",
    "add_noise",
    "denoise",
    "enlarge_image",
    "estimate_level",
    "from_ycbcr",
    "luminance",
    "psnr_ssim",
    "reduce_image",
    "to_ycbcr",
]
