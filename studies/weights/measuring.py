"""The cells that measure finished models: quality, speed, memory, and the effect of fine-tuning on the model."""

from __future__ import annotations

import json
import resource
import subprocess
import sys
import time
import timeit
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

import mvrbm
from mvrbm.vision import SuperResolver, enlarge_image, reduce_image
from mvrbm.vision.stage_training import image_pair
from studies.cells import Cell, Outcome, Place
from studies.superres.generative import generative_report
from studies.weights.images import (
    Bicubic,
    lena,
    literature,
    mean_in_paper_protocol,
    open_images,
    paper_protocol,
    set5,
    split_t91,
)
from studies.weights.training import load_start, rows_of, tested

__all__ = ["cells"]

Array = NDArray[Any]
Settings = Mapping[str, Any]


def _finished(settings: Settings, place: Place) -> Any:
    """Return a finished model on the CPU: the shipped one of a scale, or the one trained on T91."""
    scale = settings["scale"]
    if settings["model"] == "shipped":
        return SuperResolver.pretrained(scale, device="cpu")
    return mvrbm.load(rows_of(place).model_folder("t91", f"x{scale}"), device="cpu")


# -- quality ----------------------------------------------------------------------------------------


def cpu(settings: Settings, place: Place) -> Outcome:
    """Quality in single precision."""
    images, first = set5(place.data_dir), lena(place.data_dir)
    model = Bicubic(settings["scale"]) if settings["model"] == "bicubic" else _finished(settings, place)
    if settings["model"] in ("bicubic", "shipped"):
        row = {"set5": literature(model, images), "set5_paper": mean_in_paper_protocol(model, images)}
        row |= {"lena_paper": paper_protocol(model, first), "lena_literature": literature(model, [first])}
        return Outcome(row)
    return Outcome({**tested(model, place.data_dir), "set5_paper": mean_in_paper_protocol(model, images)})


# -- speed ------------------------------------------------------------------------------------------


def speed(settings: Settings, place: Place) -> Outcome:
    """Seconds for Lena, 256 to 512 pixels, and seconds and memory for a photograph of 4000 x 3000 pixels."""
    # In a process of its own, whose peak memory is that of nothing else.
    asked = {"settings": dict(settings), "work": str(place.work), "models": str(rows_of(place).models)}
    command = [sys.executable, "-m", "studies.weights.measuring"]
    root = Path(__file__).parents[2]
    done = subprocess.run(command, input=json.dumps(asked), capture_output=True, text=True, check=False, cwd=root)
    if done.returncode:
        raise RuntimeError(f"the process that enlarges a large photograph failed: {done.stderr.strip()[-300:]}")
    row = json.loads(done.stdout)
    model, low = _finished(settings, place), reduce_image(lena(place.data_dir), 2)
    model.upscale(low)
    seconds = timeit.repeat(lambda: model.upscale(low), number=1, repeat=5)
    row |= {"threads": torch.get_num_threads(), "lena_seconds": [round(each, 3) for each in sorted(seconds)]}
    return Outcome({**row, "lena_median": round(float(np.median(seconds)), 3)})


def _large(model: Any, work: Path) -> dict[str, Any]:
    """Enlarge a photograph of 4000 x 3000 pixels by 2, and return seconds and memory."""

    def mebibytes() -> float:
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024

    image = np.tile(open_images(work)["astronaut"], (6, 8, 1))[:3000, :4000]
    before, began = mebibytes(), time.perf_counter()
    found = model.upscale(image)
    row = {"large": list(found.shape), "large_seconds": round(time.perf_counter() - began, 1)}
    return row | {"large_peak_mib": round(mebibytes()), "large_growth_mib": round(mebibytes() - before)}


# -- the generative model ---------------------------------------------------------------------------


def generative(settings: Settings, place: Place) -> Outcome:
    """The model of patches before or after fine-tuning; eight images of T91 are unseen."""
    train, held_out = split_t91(place.data_dir)
    setting = settings["setting"]
    if settings["tuned"]:
        model = mvrbm.load(rows_of(place).model_folder("choose", setting), device=place.device)
    else:
        model = load_start(setting, place)
        if model is None:
            raise FileNotFoundError(f"the start '{setting}' is missing: run the part 'starts' first")
    seen, unseen = (model.patch_layers(images, 5000, seed=1) for images in (train, held_out))
    row = generative_report(model.machine_, seen, unseen) | _image_correlation(model, held_out)
    norms = {key: float(link.dense().detach().norm()) for key, link in model.machine_.links.items()}
    return Outcome(_rounded({**row, "norms": norms}))


def _image_correlation(model: Any, images: Sequence[Array]) -> dict[str, float]:
    """Return the correlation of the error of bicubic images with the correction by the averaged patches."""
    row, kept = {}, model.back_projection
    for name, rounds in (("image_correlation_no_back_projection", 0), ("image_correlation", kept)):
        model.back_projection, found, missing = rounds, [], []
        for image in images:
            low, high = image_pair(image, model.scale)
            bicubic = enlarge_image(low, model.scale)
            found.append((model.upscale_luminance(low) - bicubic).ravel())
            missing.append((high - bicubic).ravel())
        row[name] = float(np.corrcoef(np.concatenate(found), np.concatenate(missing))[0, 1])
    return row


def _rounded(row: Mapping[str, Any]) -> dict[str, Any]:
    return {key: _rounded(value) if isinstance(value, dict) else round(value, 4) for key, value in row.items()}


# -- cells ------------------------------------------------------------------------------------------


def cells(place: Place) -> Iterator[Cell]:
    """Return all cells that measure; those of T91 only if these models are stored."""
    models = [("shipped", scale) for scale in (2, 3, 4)]
    models += [("T91", scale) for scale in (2, 3, 4) if rows_of(place).model_folder("t91", f"x{scale}").is_dir()]
    for model, scale in [("bicubic", scale) for scale in (2, 3, 4)] + models:
        yield Cell(f"{model} x{scale}", "cpu", cpu, {"model": model, "scale": scale})
    for model, scale in models:
        if scale == 2:
            yield Cell(f"{model} x2", "speed", speed, {"model": model, "scale": 2}, alone=True)
    for setting in ("p10 h24 R16", "p10 h32 R16", "p12 h32 R16"):
        for kind, tuned in (("CD", False), ("fine-tuned", True)):
            yield Cell(f"{setting}, {kind}", "generative", generative, {"setting": setting, "tuned": tuned})


if __name__ == "__main__":
    from studies.cells import Rows

    given = json.load(sys.stdin)
    there = Place(Rows(Path("."), Path(given["models"])), "cpu", work=Path(given["work"]))
    print(json.dumps(_large(_finished(given["settings"], there), there.work)))
