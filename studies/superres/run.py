"""How the runs of experiment 3 are computed: one function per kind of run, from settings to numbers."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from mvrbm import BoltzmannMachine, RandomSource
from mvrbm.errors import DivergenceError
from mvrbm.sampling import sample
from mvrbm.vision import SuperResolver, TrainingStep, enlarge_image, luminance, psnr_ssim, reduce_image
from mvrbm.vision.resampling import crop_to_multiple
from mvrbm.vision.stages import HIGH
from studies.data import test_image, training_images
from studies.runs import Outcome, Place

Array = NDArray[Any]
Settings = Mapping[str, Any]
Method = Callable[[Array], Array]

# Patches to store for the figure.
_SHOWN = 36
# Patches for the generative report.
_JUDGED = 2000
# Repetitions of fast methods, to time them.
_TIMES = 3


# -- shared -----------------------------------------------------------------------------------------


def _resolver(settings: Settings, place: Place, **changes: Any) -> SuperResolver:
    params = {**settings["model"], "hidden_shape": tuple(settings["model"]["hidden_shape"])}
    fixed = {"symmetric": False, "steps": (), "random_state": settings["seed"], "device": place.device}
    return SuperResolver(**{**params, **fixed, **changes})


def _stored(settings: Settings, place: Place, name: str, **changes: Any) -> SuperResolver:
    """Return a resolver with the machine of another run."""
    described = settings["models"][name]
    model = _resolver({"model": described["model"], "seed": settings["seed"]}, place, **changes)
    return model.use_machine(place.store.machine_of(described["cell"], place.device))


def _measure(truth: Array, image: Array, scale: int, protocol: str) -> dict[str, float]:
    quality = psnr_ssim(truth, image, protocol, scale)
    return {"psnr": quality.psnr, "ssim": quality.ssim, "rmse": 255 * 10 ** (-quality.psnr / 20)}


def _timed(place: Place, enlarge: Callable[[], Array], times: int = 1) -> tuple[Array, float]:
    """Return the result of a function, and its median time in seconds."""
    seconds = []
    for _ in range(times):
        began = time.perf_counter()
        image = enlarge()
        if torch.device(place.device).type == "cuda":
            torch.cuda.synchronize()
        seconds.append(time.perf_counter() - began)
    return image, statistics.median(seconds)


def _pair(settings: Settings, place: Place, scale: int) -> tuple[Array, Array]:
    """Return the true image and its reduced version in the paper's protocol."""
    truth = crop_to_multiple(test_image(settings["image"], place.data_dir), scale)
    return truth, reduce_image(truth, scale)


# -- learning ---------------------------------------------------------------------------------------


def learn(settings: Settings, place: Place) -> Outcome:
    """Train a machine by CD-1 alone, and measure its PSNR on one image with and without back-projection."""
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
    """Return the luminance of random patches with much contrast, bytes (n, p, p)."""
    random = np.random.default_rng(seed)
    found = []
    for _ in range(4 * _SHOWN):
        image = luminance(images[random.integers(len(images))])
        top, left = (random.integers(size - patch + 1) for size in image.shape)
        found.append(image[top : top + patch, left : left + patch])
    order = np.argsort([-one.std() for one in found], kind="stable")[:_SHOWN]
    return np.stack([found[number] for number in order])


def fine_tune(settings: Settings, place: Place) -> Outcome:
    """Train a machine by CD-1, fine-tune it, and report on it as a generative model before and after."""
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
    """Learn the dictionaries of sparse representation."""
    from studies.baselines import SparseRepresentation

    model = SparseRepresentation(**settings["sparse"], random_state=settings["seed"])
    model.fit(training_images(settings["train"], place.data_dir))
    return Outcome(
        {"parameters": model.n_parameters_, "training_seconds": round(model.fit_seconds_, 3)},
        {"high": torch.from_numpy(model.high_).contiguous(), "low": torch.from_numpy(model.low_).contiguous()},
    )


# -- comparing --------------------------------------------------------------------------------------


def _methods(settings: Settings, place: Place) -> dict[str, Method]:
    """Return all fast methods to enlarge an image by name."""
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
    # Use as many processes as the other methods use threads.
    model = SparseRepresentation(**described["sparse"], n_jobs=torch.get_num_threads())
    stored = place.store.arrays_of(described["cell"])
    model.high_ = stored["high"].numpy()
    model.low_ = stored["low"].numpy()
    return model.upscale


def compare(settings: Settings, place: Place) -> Outcome:
    """Measure the error and the time of every method on one image, in the paper's protocol."""
    scale = settings["models"]["cd"]["model"]["scale"]
    truth, low = _pair(settings, place, scale)
    methods = _methods(settings, place)
    methods["cd"](low[:32, :32])  # warm up
    images = {"truth": truth, "low": low}
    numbers = {}
    for name, method in {**methods, "sparse": _sparse(settings, place)}.items():
        images[name], seconds = _timed(place, lambda method=method: method(low), 1 if name == "sparse" else _TIMES)  # type: ignore[misc]
        numbers[name] = {**_measure(truth, images[name], scale, "paper"), "seconds": seconds}
    return Outcome(
        {"methods": numbers, "threads": torch.get_num_threads(), "size": list(truth.shape[:2])},
        {name: torch.from_numpy(np.ascontiguousarray(image)) for name, image in images.items()},
    )


def published_protocol(settings: Settings, place: Place) -> Outcome:
    """Measure PSNR and SSIM of all methods except sparse representation, in the literature's protocol."""
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


# -- the machine as a generative model --------------------------------------------------------------


@torch.no_grad()
def generative_report(
    machine: BoltzmannMachine,
    seen: Mapping[str, Tensor],
    unseen: Mapping[str, Tensor],
    *,
    steps: int = 200,
    n_chains: int = 500,
    seed: int = 0,
) -> dict[str, Any]:
    """Measure a machine as a generative model of patches.

    Parameters
    ----------
    machine : BoltzmannMachine
        The machine of a super-resolver.
    seen, unseen : mapping of str to Tensor (n, p, p)
        Training patches, and patches of other images, by layer.
    steps, n_chains : int
        Number of Gibbs steps and of chains. The chains start at unseen patches.
    seed : int
        Random seed of the chains.

    Returns
    -------
    dict
        `free_energy_gap`: mean free energy of unseen patches minus that of seen ones, in nats. `mismatch_gap`: mean
        increase of the free energy if X is taken from another patch. `matched`: share of patches for which it
        increases (0.5 by chance). `inferred_correlation`: correlation of X with its mean after one mean-field pass from
        zero. `layers`: the mean, the standard deviation and the correlation of horizontal neighbors in unseen patches
        and in the chains, by layer.
    """
    data, others = machine.as_layers(unseen), machine.as_layers(seen)
    energies = machine.free_energy(data)
    rng = RandomSource(seed)
    order = rng.permutation(len(energies)).to(machine.like.device)
    mismatched = machine.free_energy({**data, HIGH: data[HIGH][order.roll(1)[order.argsort()]]})
    begun = {name: layer[:n_chains] for name, layer in data.items()}
    chains = sample(machine, len(begun[HIGH]), steps, rng, init=begun).visible
    blind = {**data, HIGH: torch.zeros_like(data[HIGH])}
    inferred = machine.visible_mean(machine.hidden_mean(blind))[HIGH]
    return {
        "free_energy_gap": float(energies.mean() - machine.free_energy(others).mean()),
        "mismatch_gap": float((mismatched - energies).mean()),
        "matched": float((mismatched > energies).double().mean()),
        "inferred_correlation": _correlation(inferred, data[HIGH]),
        "layers": {name: {"data": _moments(data[name]), "chains": _moments(chains[name])} for name in data},
    }


def _moments(layer: Tensor) -> dict[str, float]:
    centered = layer - layer.mean()
    return {
        "mean": float(layer.mean()),
        "std": float(layer.std()),
        "neighbors": _correlation(centered[:, :, 1:], centered[:, :, :-1]),
    }


def _correlation(left: Tensor, right: Tensor) -> float:
    left, right = left - left.mean(), right - right.mean()
    return float((left * right).mean() / (left.square().mean() * right.square().mean()).sqrt())
