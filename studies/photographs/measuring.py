"""Measurements of the shipped weights: enlarging, degraded input, denoising, time and memory.

Set5 and the photographs in `UNSEEN` were not used for training or for any choice. The list was made before measuring.
"""

from __future__ import annotations

import importlib
import io
import json
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from PIL import Image, ImageDraw

from mvrbm.vision import (
    SuperResolver,
    add_noise,
    clean_photograph,
    denoise_photograph,
    enlarge_image,
    estimate_degradation,
    luminance,
    psnr,
    psnr_ssim,
    reduce_image,
    repair_photograph,
)
from mvrbm.vision.degradation import median_of_uncorrupted
from mvrbm.vision.images import to_dtype
from mvrbm.vision.resampling import SCALES, crop_to_multiple
from studies.photographs.images import SET5, set5, split_t91
from studies.runs import Outcome, Place, Run

__all__ = ["GROUPS", "UNSEEN", "cells"]

Array = NDArray[Any]
Settings = Mapping[str, Any]

#: Groups of cells, and the results folder of each.
GROUPS = {"enlarging": "superres", "degraded": "superres", "time": "superres", "denoising": "denoising"}
GROUPS |= {"restoring": "denoising"}
#: The photographs in scikit-image that were not trained on.
UNSEEN = (
    "cell",
    "clock",
    "immunohistochemistry",
    "microaneurysms",
    "moon",
    "page",
    "rocket",
    "stereo_motorcycle",
    "text",
)
JPEG, NOISE = (30, 50, 75, 95), (5, 10)


def unseen(name: str) -> Array:
    """Load a photograph from scikit-image."""
    found = getattr(importlib.import_module("skimage.data"), name)()
    return np.asarray(found[0] if isinstance(found, tuple) else found)  # the left picture of a stereo pair


def _rounded(values: Mapping[str, float]) -> dict[str, float]:
    return {name: round(float(value), 4) for name, value in values.items()}


# -- enlarging --------------------------------------------------------------------------------------


def _reduced(truth: Array, scale: int, protocol: str) -> Array:
    """Reduce luminance: in floats, rounded to bytes, or with mirrored borders. White is 1 in the result."""
    high = truth.astype(np.float32) / 255
    if protocol == "bytes":
        return reduce_image(truth, scale).astype(np.float32) / 255
    if protocol == "mirrored":
        margin = 4
        small = reduce_image(np.pad(high, margin * scale, mode="symmetric"), scale)
        return small[margin:-margin, margin:-margin]
    return reduce_image(high, scale)


def enlarging(settings: Settings, place: Place) -> Outcome:
    """Measure PSNR and SSIM on the luminance of Set5, rounded to bytes, without a border of `scale` pixels."""
    scale = settings["scale"]
    rows = {}
    model = SuperResolver.pretrained(scale, device="cpu")
    methods: dict[str, Callable[[Array], Array]] = {
        "bicubic": lambda low: enlarge_image(low, scale),
        "stages": model.upscale_luminance,
    }
    for name, image in zip(SET5, set5(place.data_dir), strict=True):
        truth = crop_to_multiple(luminance(image), scale)
        low = _reduced(truth, scale, settings["protocol"])
        for method, enlarge in methods.items():
            rows[method, name] = psnr_ssim(truth, to_dtype(enlarge(low), np.uint8), "literature", scale)
    found: dict[str, Any] = {}
    for method in methods:
        each = {name: rows[method, name] for name in SET5}
        found[method] = {"psnr": round(float(np.mean([q.psnr for q in each.values()])), 4)}
        found[method] |= {"ssim": round(float(np.mean([q.ssim for q in each.values()])), 4)}
        found[method] |= {"images": _rounded({name: q.psnr for name, q in each.items()})}
    return Outcome(found)


# -- real input -------------------------------------------------------------------------------------


def degraded_picture(low: Array, kind: str, level: int) -> tuple[Array, list[int] | None]:
    """Compress a picture as JPEG or add noise; return bytes and the luminance quantization table of the file."""
    if kind == "noise":
        noise = np.random.default_rng(0).normal(0, level, low.shape)
        return np.clip(np.rint(low + noise), 0, 255).astype(np.uint8), None
    file = io.BytesIO()
    Image.fromarray(low).save(file, "JPEG", quality=level)
    with Image.open(file) as image:
        return np.asarray(image), list(image.quantization[0])  # type: ignore[attr-defined]


def degraded(settings: Settings, place: Place) -> Outcome:
    """Compare `mvrbm superres` with bicubic interpolation on color pictures that are compressed or noisy."""
    scale = settings["scale"]
    model = SuperResolver.pretrained(scale, device="cpu")
    images = set5(place.data_dir) if settings["images"] == "Set5" else split_t91(place.data_dir)[1]
    rows = []
    for image in images:
        truth = crop_to_multiple(image, scale)
        low, table = degraded_picture(reduce_image(truth, scale), settings["kind"], settings["level"])
        ours = model.upscale(clean_photograph(low, estimate_degradation(low, table), device="cpu"))
        each = {"bicubic": enlarge_image(low, scale), "not cleaned": model.upscale(low), "stages": ours}
        rows.append({name: psnr_ssim(truth, found, "literature", scale).psnr for name, found in each.items()})
    means = {name: float(np.mean([row[name] for row in rows])) for name in rows[0]}
    better = sum(row["stages"] > row["bicubic"] for row in rows)
    return Outcome({**_rounded(means), "better": better, "images": len(rows)})


# -- denoising --------------------------------------------------------------------------------------


def _truth(name: str, color: bool, place: Place) -> Array:
    image = dict(zip(SET5, set5(place.data_dir), strict=True))[name] if name in SET5 else unseen(name)
    if color or image.ndim == 2:
        return image
    return np.asarray(Image.fromarray(image).convert("L"))


def gaussian(settings: Settings, place: Place) -> Outcome:
    """Compare BM3D and the stages on a photograph with unrounded Gaussian noise of known or unknown level."""
    bm3d = importlib.import_module("bm3d")

    truth = _truth(settings["image"], settings["color"], place)
    sigma = settings["sigma"] / 255
    clean = truth.astype(np.float32) / 255
    noisy = clean + np.float32(sigma) * np.random.default_rng(0).standard_normal(clean.shape).astype(np.float32)
    reference = (bm3d.bm3d_rgb if settings["color"] else bm3d.bm3d)(noisy.astype(np.float64), sigma)
    found = {
        "noisy": noisy,
        "bm3d": np.clip(np.asarray(reference).reshape(clean.shape), 0, 1).astype(np.float32),
        "stages": denoise_photograph(noisy, level=sigma, device="cpu"),
        "stages, estimated": denoise_photograph(noisy, device="cpu"),
    }
    return Outcome(_rounded({name: psnr(clean, image) for name, image in found.items()}))


def salt(settings: Settings, place: Place) -> Outcome:
    """Compare the median of uncorrupted neighbors and the stages on a gray photograph with salt and pepper."""
    truth = _truth(settings["image"], False, place)
    noisy = add_noise(truth, "salt-and-pepper", settings["share"], seed=0)
    pixels = torch.from_numpy(noisy / np.float32(255))[None, None]
    median = median_of_uncorrupted(pixels, ((pixels <= 0) | (pixels >= 1)).float())[0, 0].numpy()
    ours = denoise_photograph(noisy, noise="salt-and-pepper", device="cpu")
    found = {"noisy": noisy, "median": to_dtype(median, np.uint8), "stages": ours}
    return Outcome(_rounded({name: psnr(truth, image, 255) for name, image in found.items()}))


def restoring(settings: Settings, place: Place) -> Outcome:
    """Compare OpenCV's Telea, biharmonic interpolation and the stages on a gray photograph with scratches."""
    opencv = importlib.import_module("cv2")
    restoration = importlib.import_module("skimage.restoration")
    truth = _truth(settings["image"], False, place)
    drawn = Image.new("L", truth.shape[::-1])
    rng = np.random.default_rng(0)
    for _ in range(max(6, truth.size // 4000)):
        begin, end = rng.integers(0, truth.shape[::-1], (2, 2))
        end = begin + np.clip(end - begin, -80, 80)
        ImageDraw.Draw(drawn).line([*begin.tolist(), *end.tolist()], 255, settings["width"])
    mask = np.asarray(drawn) > 0
    broken = np.where(mask, 255, truth).astype(np.uint8)
    biharmonic = restoration.inpaint_biharmonic(broken / 255, mask, split_into_regions=True)
    found = {
        "telea": opencv.inpaint(broken, mask.astype(np.uint8), 3, opencv.INPAINT_TELEA),
        "biharmonic": np.rint(255 * np.clip(biharmonic, 0, 1)),
        "stages": repair_photograph(broken, mask, device="cpu"),
    }
    numbers = _rounded({name: psnr(truth, image, 255) for name, image in found.items()})
    return Outcome({**numbers, "missing": round(float(mask.mean()), 4)})


# -- time and memory --------------------------------------------------------------------------------


def timed(settings: Settings, place: Place) -> Outcome:
    """Measure time and memory of enlarging random RGB pixels by 2 on one thread, in a separate process."""
    command = [sys.executable, "-m", "studies.photographs.timing"]
    root = Path(__file__).parents[2]
    done = subprocess.run(
        command, input=json.dumps(dict(settings)), capture_output=True, text=True, check=False, cwd=root
    )
    if done.returncode:
        raise RuntimeError(f"the process that enlarges failed: {done.stderr.strip()[-300:]}")
    return Outcome(json.loads(done.stdout))


# -- cells ------------------------------------------------------------------------------------------


def cells() -> Iterator[Run]:
    """Return all cells."""
    for scale in SCALES:
        for protocol in ("floats", "bytes", "mirrored"):
            settings: dict[str, Any] = {"scale": scale, "protocol": protocol}
            yield Run(f"x{scale}, {protocol}", "enlarging", enlarging, settings)
    for images in ("Set5", "T91"):
        for kind, levels in (("jpeg", JPEG), ("noise", NOISE)):
            for level in levels:
                settings = {"scale": 2, "images": images, "kind": kind, "level": level}
                yield Run(f"{images}, x2, {kind} {level}", "degraded", degraded, settings)
    for method, size in (("stages", (1000, 1000)), ("FSRCNN", (1000, 1000)), ("stages", (1, 1))):
        settings = {"method": method, "size": size}
        yield Run(f"{method}, {size[0]}x{size[1]}", "time", timed, settings, alone=True)
    for name in (*SET5, *UNSEEN):
        for sigma in (15, 25, 50):
            settings = {"image": name, "sigma": sigma, "color": False}
            yield Run(f"{name}, gray, {sigma}", "denoising", gaussian, settings, needs=("bm3d",))
        if name in (*SET5, "rocket", "immunohistochemistry", "stereo_motorcycle"):
            settings = {"image": name, "sigma": 25, "color": True}
            yield Run(f"{name}, color, 25", "denoising", gaussian, settings, needs=("bm3d",))
        for share in (0.05, 0.1, 0.3):
            yield Run(f"{name}, salt {share}", "denoising", salt, {"image": name, "share": share})
    for name in UNSEEN:
        for width in (1, 3):
            settings = {"image": name, "width": width}
            yield Run(f"{name}, scratches of {width}", "restoring", restoring, settings, needs=("cv2", "skimage"))
