"""Image quality metrics: PSNR of arrays, and PSNR and SSIM of the luminance under two evaluation protocols."""

from typing import Any, NamedTuple

import numpy as np

from mvrbm.extras import require
from mvrbm.validation import choice
from mvrbm.vision.color import luminance
from mvrbm.vision.images import Array, check_image, white
from mvrbm.vision.resampling import SCALES

#: Evaluation protocols. In `literature`, only the luminance is reduced and enlarged, and a border of `scale` pixels is
#: ignored. In `paper`, the RGB image is reduced and enlarged, and its luminance is compared including the border.
PROTOCOLS = ("literature", "paper")


class Quality(NamedTuple):
    """Peak signal-to-noise ratio (PSNR) in dB, and structural similarity (SSIM)."""

    psnr: float
    ssim: float


def psnr(truth: Array, image: Array, peak: float = 1.0) -> float:
    r"""Return the peak signal-to-noise ratio in dB, :math:`10 \log_{10}(\text{peak}^2 / \text{mean squared error})`.

    Both arrays must have the same shape. `peak` is the white level. If the arrays are equal, the result is infinite.
    """
    error = np.mean((np.asarray(truth, np.float64) - np.asarray(image, np.float64)) ** 2)
    with np.errstate(divide="ignore"):
        return float(10 * np.log10(peak**2 / error))


def psnr_ssim(truth: Array, image: Array, protocol: str = "literature", scale: int = 2) -> Quality:
    """Compute the PSNR and SSIM between an image and the true image, based on luminance.

    The luminance of integer images is rounded.

    Parameters
    ----------
    truth, image : array of shape (H, W) or (H, W, 3)
        Luminance or RGB images of the same dtype. If `truth` is up to ``scale - 1`` pixels taller or wider than
        `image`, it is cropped.
    protocol : {"literature", "paper"}
        Whether to ignore a border of `scale` pixels (``"literature"``) or to compare the whole image (``"paper"``).
    scale : {2, 3, 4}
        Super-resolution scale factor.

    Returns
    -------
    Quality
        PSNR and SSIM. SSIM is computed by scikit-image with the standard Gaussian window (sigma = 1.5). It is NaN if
        the image is smaller than the window.
    """
    choice(protocol, "protocol", PROTOCOLS)
    choice(scale, "scale", SCALES)
    truth = check_image(truth)
    image = check_image(image)
    (height, width), (rows, columns) = truth.shape[:2], image.shape[:2]
    if not (0 <= height - rows < scale and 0 <= width - columns < scale):
        raise ValueError(f"truth must have the same size as the image {image.shape[:2]}, got {truth.shape[:2]}")
    if truth.dtype != image.dtype:
        raise ValueError(f"truth must have the same dtype as the image ({image.dtype}), got {truth.dtype}")
    border = scale if protocol == "literature" else 0
    if min(rows, columns) <= 2 * border:
        raise ValueError(f"image must be larger than twice the border ({border} pixels), got size {image.shape[:2]}")
    inner = (slice(border, rows - border), slice(border, columns - border))
    left = luminance(truth)[inner]
    right = luminance(image)[inner]
    top = white(image.dtype)
    found = psnr(left, right, top)
    if min(left.shape) < 11:  # size of the Gaussian window, which is truncated at 3.5 sigma
        return Quality(found, float("nan"))
    structural_similarity = require("skimage.metrics", "SSIM", "data").structural_similarity
    window: dict[str, Any] = {"gaussian_weights": True, "sigma": 1.5, "use_sample_covariance": False}
    return Quality(found, float(structural_similarity(left, right, data_range=top, **window)))
