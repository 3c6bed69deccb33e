"""Images: what a machine with a matrix as its visible layer is good for.

Here live noise and its removal, and the patches that carry a small machine over a large image. Training,
files and figures do not.
"""

from mvrbm.vision.denoising import denoise, estimate_level
from mvrbm.vision.noise_models import NOISES, add_noise

__all__ = ["NOISES", "add_noise", "denoise", "estimate_level"]
