"""A comparison of denoising methods: the paper's pass up and down, our denoiser, and filters of scikit-image.

The functions take a machine and clean images. Nothing here trains, reads files or draws figures.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from mvrbm import BoltzmannMachine
from mvrbm.vision import add_noise, denoise, estimate_level
from mvrbm.vision.quality import psnr

__all__ = ["FILTER_SETTINGS", "choose_filters", "compare", "filters", "one_pass", "summary"]

Array = NDArray[Any]

#: Settings of the filters, chosen by :func:`choose_filters` on 300 training nines with 10% salt and pepper.
FILTER_SETTINGS: dict[str, dict[str, float]] = {
    "total-variation": {"weight": 0.2},
    "non-local-means": {"h": 0.2, "patch_size": 5, "patch_distance": 9},
}
_CHOICES: dict[str, list[dict[str, float]]] = {
    "total-variation": [{"weight": weight} for weight in (0.05, 0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.8, 1.0)],
    "non-local-means": [
        {"h": h, "patch_size": size, "patch_distance": distance}
        for h in (0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.8)
        for size in (3, 5)
        for distance in (5, 9)
    ],
}
_ROWS_AT_ONCE = 1024


def summary(images: Array, clean: Array) -> dict[str, float]:
    """Return the mean PSNR of images and its standard error, in dB."""
    return _mean(_decibels(images, clean))


def _decibels(images: Array, clean: Array) -> Array:
    """Return the PSNR of each image, (n,)."""
    return np.array([psnr(truth, image) for truth, image in zip(clean, images, strict=True)])


def _mean(values: Array) -> dict[str, float]:
    spread = float(values.std(ddof=1)) if len(values) > 1 else math.nan
    return {"psnr": float(values.mean()), "standard_error": spread / math.sqrt(len(values))}


@torch.no_grad()
def one_pass(machine: BoltzmannMachine, noisy: Array) -> Array:
    """Denoise images (n, I, J) as the paper does, by one pass up and down through the means."""
    (name,) = machine.layers
    pieces = []
    for first in range(0, len(noisy), _ROWS_AT_ONCE):
        batch = torch.from_numpy(np.ascontiguousarray(noisy[first : first + _ROWS_AT_ONCE]))
        pieces.append(machine.visible_mean(machine.hidden_mean(batch))[name].double().cpu().numpy())
    return np.concatenate(pieces)


def filters(settings: Mapping[str, Mapping[str, float]] = FILTER_SETTINGS) -> dict[str, Callable[[Array], Array]]:
    """Return the filters of scikit-image by name. Each takes a noisy image from 0 to 1 and returns a clean one."""
    from skimage.filters import median
    from skimage.restoration import denoise_nl_means, denoise_tv_chambolle

    def by_median(image: Array) -> Array:
        return np.asarray(median(image, np.ones((3, 3)), mode="nearest"))

    def by_switching_median(image: Array) -> Array:
        # Like our denoiser, it keeps gray pixels, which are neither salt nor pepper.
        return np.where((image <= 0) | (image >= 1), by_median(image), image)

    def by_total_variation(image: Array) -> Array:
        return np.asarray(denoise_tv_chambolle(image, **settings["total-variation"]))

    def by_non_local_means(image: Array) -> Array:
        return np.asarray(denoise_nl_means(image, fast_mode=True, **settings["non-local-means"]))

    return {
        "median": by_median,
        "switching-median": by_switching_median,
        "total-variation": by_total_variation,
        "non-local-means": by_non_local_means,
    }


def choose_filters(
    clean: Array, *, noise: str = "salt-and-pepper", level: float = 0.1, seed: int = 0
) -> dict[str, dict[str, float]]:
    """Choose the settings of the filters with the highest mean PSNR on some images.

    Parameters
    ----------
    clean : array (n, rows, columns)
        Training images from 0 to 1, other images than those for the comparison.
    noise, level, seed
        Kind, level and random seed of the noise.

    Returns
    -------
    dict
        Settings by filter, for `filters` and `compare`.
    """
    noisy = add_noise(clean, noise, level, seed)
    chosen: dict[str, dict[str, float]] = {name: dict(settings) for name, settings in FILTER_SETTINGS.items()}
    for name, choices in _CHOICES.items():
        scores = []
        for settings in choices:
            apply = filters({**FILTER_SETTINGS, name: settings})[name]
            scores.append(summary(np.stack([apply(image) for image in noisy]), clean)["psnr"])
        chosen[name] = dict(choices[int(np.argmax(scores))])
    return chosen


def compare(
    machine: BoltzmannMachine,
    clean: Array,
    *,
    level: float = 0.1,
    seed: int = 0,
    noise: str = "salt-and-pepper",
    filter_settings: Mapping[str, Mapping[str, float]] = FILTER_SETTINGS,
    shown: int = 10,
) -> dict[str, Any]:
    r"""Add noise to images, remove it with every method, and measure the results.

    Parameters
    ----------
    machine : BoltzmannMachine
        A machine whose visible layer has the shape of the images, on any device.
    clean : array (n, I, J)
        Test images, as bytes or floats from 0 to 1.
    level : float
        Level of the noise.
    seed : int
        Random seed of the noise and of the Gibbs draws.
    noise : {"salt-and-pepper", "gaussian"}
        Kind of noise.
    filter_settings : mapping
        Settings of the filters, from :func:`choose_filters`.
    shown : int
        Number of images to return.

    Returns
    -------
    dict
        ``"psnr"``: the mean PSNR of each method and its standard error, in dB. The methods are ``noisy``,
        ``one-pass``, ``mean-field``, ``mean-field-estimated`` (with estimated noise level), ``gibbs``,
        ``gibbs-estimated``, ``median``, ``switching-median`` (which filters only black and white pixels),
        ``total-variation`` and ``non-local-means``. ``"above_median"``: the gain of ``mean-field`` over the median
        filter in dB, and its standard error. ``"level"`` and ``"estimated_level"`` of the noise. ``"n"``: the number
        of images. ``"images"``: the first `shown` images by method, and the ``clean`` ones, as float32 arrays
        (shown, I, J).
    """
    truth = np.asarray(clean)
    truth = (truth / np.float32(255) if truth.dtype == np.uint8 else truth).astype(np.float32)
    noisy = add_noise(truth, noise, level, seed)

    def ours(method: str, told: bool) -> Array:
        return denoise(machine, noisy, noise=noise, level=level if told else None, method=method, seed=seed)

    results: dict[str, Array] = {
        "noisy": noisy,
        "one-pass": one_pass(machine, np.clip(noisy, 0, 1)),
        "mean-field": ours("mean-field", told=True),
        "mean-field-estimated": ours("mean-field", told=False),
        "gibbs": ours("gibbs", told=True),
        "gibbs-estimated": ours("gibbs", told=False),
    }
    for name, apply in filters(filter_settings).items():
        results[name] = np.stack([apply(image) for image in noisy])
    gain = _decibels(results["mean-field"], truth) - _decibels(results["median"], truth)
    return {
        "n": len(truth),
        "level": level,
        "estimated_level": estimate_level(machine, noisy, noise=noise),
        "psnr": {name: summary(images, truth) for name, images in results.items()},
        "above_median": _mean(gain),
        "images": {
            name: np.asarray(images[:shown], np.float32) for name, images in {"clean": truth, **results}.items()
        },
    }
