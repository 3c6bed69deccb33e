"""How near an image is to the truth: PSNR and SSIM on luminance, in the two protocols that numbers are published in."""

from __future__ import annotations

import importlib
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from mvrbm.vision.colour import luminance, white
from mvrbm.vision.resampling import check_image, check_scale

__all__ = ["PROTOCOLS", "Quality", "psnr_ssim"]

Array = NDArray[Any]

#: `paper`: RGB is reduced, enlarged and compared by its luminance, up to the border. `literature`: luminance alone
#: is reduced and enlarged, and as many pixels as the scale are shaved off each side.
PROTOCOLS = ("literature", "paper")


class Quality(NamedTuple):
    """Peak signal to noise in dB, and structural similarity."""

    psnr: float
    ssim: float


def psnr_ssim(truth: Array, image: Array, protocol: str = "literature", scale: int = 2) -> Quality:
    """Compare an image with the truth by luminance, rounded for whole numbers.

    Parameters
    ----------
    truth, image : array (H, W) or (H, W, 3)
        Luminance, or RGB, both of one type. A truth larger than the image by less than `scale` pixels is cropped.
    protocol : {"literature", "paper"}
        Whether `scale` pixels are shaved off each side, or none; see `PROTOCOLS`.
    scale : {2, 3, 4}
        The scale of super-resolution.

    Returns
    -------
    Quality
        From scikit-image. SSIM has a Gaussian window of 1.5 pixels, as in its definition; it is nan for images
        that are smaller than this window.
    """
    if protocol not in PROTOCOLS:
        raise ValueError(f"protocol must be one of {', '.join(map(repr, PROTOCOLS))}, got {protocol!r}")
    check_scale(scale)
    truth, image = check_image(truth), check_image(image)
    (height, width), (rows, columns) = truth.shape[:2], image.shape[:2]
    if not (0 <= height - rows < scale and 0 <= width - columns < scale):
        raise ValueError(f"truth must have the size of the image, {image.shape[:2]}, got {truth.shape[:2]}")
    if truth.dtype != image.dtype:
        raise ValueError(f"truth must be of the image's type, {image.dtype}, got {truth.dtype}")
    shave = scale if protocol == "literature" else 0
    if min(rows, columns) <= 2 * shave:
        raise ValueError(f"image must be larger than the border of {shave} pixels, got {image.shape[:2]}")
    inner = (slice(shave, rows - shave), slice(shave, columns - shave))
    left, right = luminance(truth)[inner], luminance(image)[inner]
    metrics = _metrics()
    top = white(image.dtype)
    with np.errstate(divide="ignore"):
        psnr = float(metrics.peak_signal_noise_ratio(left, right, data_range=top))
    if min(left.shape) < 11:  # the window of sigma 1.5, cut at 3.5 sigma
        return Quality(psnr, float("nan"))
    ssim = metrics.structural_similarity(
        left, right, data_range=top, gaussian_weights=True, sigma=1.5, use_sample_covariance=False
    )
    return Quality(psnr, float(ssim))


def _metrics() -> Any:
    try:
        return importlib.import_module("skimage.metrics")
    except ImportError as error:
        raise ImportError("PSNR and SSIM need scikit-image: pip install 'mvrbm[data]'") from error
