"""The work of the cells of experiment 3. Each function is one kind of cell, from settings to numbers."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from mvrbm.errors import DivergenceError
from mvrbm.vision import SuperResolver, TrainingStep, enlarge_image, luminance, psnr_ssim, reduce_image
from mvrbm.vision.resampling import crop_to_multiple
from studies.cells import Outcome, Place
from studies.superres.data import test_image, training_images
from studies.superres.generative import generative_report

Array = NDArray[Any]
Settings = Mapping[str, Any]
Method = Callable[[Array], Array]

_SHOWN = 36  # patches
_JUDGED = 2000  # patches for the generative report
_TIMES = 3  # repetitions of fast methods


# -- shared -----------------------------------------------------------------------------------------


def _resolver(settings: Settings, place: Place, **changes: Any) -> SuperResolver:
    params = {**settings["model"], "hidden_shape": tuple(settings["model"]["hidden_shape"])}
    fixed = {"symmetric": False, "steps": (), "random_state": settings["seed"], "device": place.device}
    return SuperResolver(**{**params, **fixed, **changes})


def _stored(settings: Settings, place: Place, name: str, **changes: Any) -> SuperResolver:
    """A resolver with the machine of another cell."""
    described = settings["models"][name]
    model = _resolver({"model": described["model"], "seed": settings["seed"]}, place, **changes)
    return model.use_machine(place.store.machine_of(described["cell"], place.device))


def _measure(truth: Array, image: Array, scale: int, protocol: str) -> dict[str, float]:
    quality = psnr_ssim(truth, image, protocol, scale)
    return {"psnr": quality.psnr, "ssim": quality.ssim, "rmse": 255 * 10 ** (-quality.psnr / 20)}


def _timed(place: Place, enlarge: Callable[[], Array], times: int = 1) -> tuple[Array, float]:
    """Return the image that a function makes, and the median of its seconds."""
    seconds = []
    for _ in range(times):
        began = time.perf_counter()
        image = enlarge()
        if torch.device(place.device).type == "cuda":
            torch.cuda.synchronize()
        seconds.append(time.perf_counter() - began)
    return image, statistics.median(seconds)


def _pair(settings: Settings, place: Place, scale: int) -> tuple[Array, Array]:
    """Return the true image, and the small image of it, in the paper's protocol."""
    truth = crop_to_multiple(test_image(settings["image"], place.data_dir), scale)
    return truth, reduce_image(truth, scale)


# -- learning ---------------------------------------------------------------------------------------


def learn(settings: Settings, place: Place) -> Outcome:
    """A machine trained by CD-1 alone, and its PSNR on one image, with and without back-projection."""
    images = training_images(settings["train"], place.data_dir)
    model = _resolver(settings, place)
    began = time.perf_counter()
    try:
        model.fit(images)
    except DivergenceError as error:
        return Outcome({"diverged": str(error)})
    seconds = time.perf_counter() - began
    truth, low = _pair(settings, place, model.scale)
    large, enlarging = _timed(place, lambda: model.upscale(low))
    plain = model.set_params(back_projection=0).upscale(low)
    return Outcome(
        {
            "parameters": model.machine_.n_parameters,
            "training_seconds": round(seconds, 3),
            "seconds": round(enlarging, 4),
            "with": _measure(truth, large, model.scale, "paper"),
            "without": _measure(truth, plain, model.scale, "paper"),
            "bicubic": _measure(truth, enlarge_image(low, model.scale), model.scale, "paper"),
        },
        {"patches": torch.from_numpy(_some_patches(images, settings["model"]["patch"], settings["seed"]))},
        model.machine_,
    )


def _some_patches(images: tuple[Array, ...], patch: int, seed: int) -> Array:
    """Luminance of random patches, bytes (n, p, p), those with the most contrast of four times as many."""
    random = np.random.default_rng(seed)
    found = []
    for _ in range(4 * _SHOWN):
        image = luminance(images[random.integers(len(images))])
        top, left = (random.integers(size - patch + 1) for size in image.shape)
        found.append(image[top : top + patch, left : left + patch])
    order = np.argsort([-one.std() for one in found], kind="stable")[:_SHOWN]
    return np.stack([found[number] for number in order])


def fine_tune(settings: Settings, place: Place) -> Outcome:
    """A machine trained by CD-1 and then fine-tuned; the generative report before and after."""
    images = training_images(settings["train"], place.data_dir)
    others = [test_image(name, place.data_dir) for name in settings["others"]]
    began = time.perf_counter()
    model = _resolver(settings, place).fit(images)
    learning = time.perf_counter() - began
    before = _as_a_model(model, images, others, settings["seed"])
    began = time.perf_counter()
    for step in settings["tuning"]:
        model.fine_tune(images, TrainingStep(**step))
    tuning = time.perf_counter() - began
    numbers = {
        "parameters": model.machine_.n_parameters,
        "cd_seconds": round(learning, 3),
        "tuning_seconds": round(tuning, 3),
        "before": before,
        "after": _as_a_model(model, images, others, settings["seed"]),
    }
    return Outcome(numbers, machine=model.machine_)


def _as_a_model(model: SuperResolver, seen: Sequence[Array], unseen: Sequence[Array], seed: int) -> dict[str, Any]:
    """Return the generative report of a machine."""
    layers = [model.patch_layers(images, _JUDGED, seed) for images in (seen, unseen)]
    return generative_report(model.machine_, layers[0], layers[1], seed=seed)


def learn_dictionaries(settings: Settings, place: Place) -> Outcome:
    """The dictionaries of sparse representation."""
    from studies.baselines import SparseRepresentation

    model = SparseRepresentation(**settings["sparse"], random_state=settings["seed"])
    model.fit(training_images(settings["train"], place.data_dir))
    return Outcome(
        {"parameters": model.n_parameters_, "training_seconds": round(model.fit_seconds_, 3)},
        {"high": torch.from_numpy(model.high_).contiguous(), "low": torch.from_numpy(model.low_).contiguous()},
    )


# -- comparing --------------------------------------------------------------------------------------


def _methods(settings: Settings, place: Place) -> dict[str, Method]:
    """Return all fast methods to enlarge an image, by name."""
    cd, tuned = _stored(settings, place, "cd"), _stored(settings, place, "tuned")
    bare = _stored(settings, place, "cd", back_projection=0)
    shipped = SuperResolver.pretrained(cd.scale, device=place.device)
    return {
        "bicubic": lambda low: enlarge_image(low, cd.scale),
        "cd-plain": bare.upscale,
        "cd": cd.upscale,
        "tuned": tuned.upscale,
        "tuned-ensemble": lambda low: tuned.upscale(low, self_ensemble=True),
        "shipped": shipped.upscale,
        "shipped-ensemble": lambda low: shipped.upscale(low, self_ensemble=True),
    }


def _sparse(settings: Settings, place: Place) -> Method:
    from studies.baselines import SparseRepresentation

    described = settings["models"]["sparse"]
    # As many processes as the other methods have threads.
    model = SparseRepresentation(**described["sparse"], n_jobs=torch.get_num_threads())
    stored = place.store.arrays_of(described["cell"])
    model.high_, model.low_ = stored["high"].numpy(), stored["low"].numpy()
    return model.upscale


def compare(settings: Settings, place: Place) -> Outcome:
    """Error and seconds of every method on one image, in the paper's protocol, one after the other."""
    scale = settings["models"]["cd"]["model"]["scale"]
    truth, low = _pair(settings, place, scale)
    methods = _methods(settings, place)
    methods["cd"](low[:32, :32])  # not timed: builds what is built at first use
    images, numbers = {"truth": truth, "low": low}, {}
    for name, method in {**methods, "sparse": _sparse(settings, place)}.items():
        images[name], seconds = _timed(place, lambda method=method: method(low), 1 if name == "sparse" else _TIMES)  # type: ignore[misc]
        numbers[name] = {**_measure(truth, images[name], scale, "paper"), "seconds": seconds}
    return Outcome(
        {"methods": numbers, "threads": torch.get_num_threads(), "size": list(truth.shape[:2])},
        {name: torch.from_numpy(np.ascontiguousarray(image)) for name, image in images.items()},
    )


def published_protocol(settings: Settings, place: Place) -> Outcome:
    """PSNR and SSIM of every method but sparse representation on several images, in the literature's protocol."""
    scale = settings["models"]["cd"]["model"]["scale"]
    numbers: dict[str, dict[str, Any]] = {}
    for name, method in _methods(settings, place).items():
        each = {}
        for image in settings["images"]:
            truth = crop_to_multiple(luminance(test_image(image, place.data_dir)), scale)
            each[image] = _measure(truth, method(reduce_image(truth, scale)), scale, "literature")
        means = {key: float(np.mean([one[key] for one in each.values()])) for key in ("psnr", "ssim")}
        numbers[name] = {**means, "images": each}
    return Outcome({"methods": numbers})
