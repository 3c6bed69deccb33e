"""Training of the shipped weights with the crops that `studies.photographs.collecting` writes.

Each model is a :class:`~mvrbm.vision.SuperResolver` or a :class:`~mvrbm.vision.PhotoDenoiser` with its default
architecture. `UPDATES` makes the training longer than the defaults of the library, which are for a CPU.
"""

from __future__ import annotations

import io
import json
import zipfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from PIL import Image
from torch import Tensor

from mvrbm.random import RandomSource
from mvrbm.vision import PhotoDenoiser, SuperResolver, TrainingStep, luminance
from mvrbm.vision.pretrained import write_stages
from mvrbm.vision.stage_training import errors_after_stages
from studies.arguments import say

__all__ = ["LEVELS", "MODELS", "UPDATES", "new_model", "train"]

Array = NDArray[Any]

#: Names of the weights.
MODELS = ("x2", "x3", "x4", "gray", "color", "jpeg", "salt")
#: Updates of backpropagation, each with 32 crops.
UPDATES = 25_000

_SIGMAS = (5, 15, 25, 50, 75)
#: Levels of degradation for which validation measures the error: sigma of 255, JPEG quality, or fraction of pixels.
LEVELS: dict[str, tuple[float | None, ...]] = {
    "gray": _SIGMAS,
    "color": _SIGMAS,
    "jpeg": (30, 50, 75, 95),
    "salt": (0.05, 0.1, 0.3),
}

# Crops per update.
_BATCH = 32
# Crops that are cut from the archive; every epoch uses all of them.
_CROPS = 16_000
# Fraction of the updates that are contrastive divergence.
_DIVERGENCE = 0.02
# Side of the crops for validation, by scale.
_VALIDATION_SIDE = {1: 144, 2: 96, 3: 144, 4: 192}


def new_model(name: str, updates: int = UPDATES, device: str = "cpu", **changes: Any) -> SuperResolver | PhotoDenoiser:
    """Return an untrained model with the architecture of the shipped weights."""
    epochs = max(1, updates * _BATCH // _CROPS)
    crops = min(_CROPS, updates * _BATCH)
    first = max(_BATCH, int(_DIVERGENCE * updates) * _BATCH)
    steps = (
        TrainingStep("divergence", first, 1, _BATCH, 2e-3),
        TrainingStep("images", crops, epochs, _BATCH, 2e-3, averaging=0.999),
    )
    settings: dict[str, Any] = {"steps": steps, "device": device, **changes}
    return SuperResolver(int(name[1]), **settings) if name[0] == "x" else PhotoDenoiser(name, **settings)


def _crops(archive: Path, kind: str) -> list[Array]:
    """Return crops of one kind from the archive: luminance or RGB."""
    with zipfile.ZipFile(archive) as file:
        names = sorted(name for name in file.namelist() if name.startswith(f"{kind}/"))
        opened = [Image.open(io.BytesIO(file.read(name))) for name in names]
    return [np.asarray(image.convert("L" if kind == "gray" else "RGB")) for image in opened]


@torch.no_grad()
def _validate(model: SuperResolver | PhotoDenoiser, name: str, crops: Sequence[Array]) -> dict[str, list[float]]:
    """Return the mean PSNR of crops, of the input and after each stage, for each level."""
    arrays = crops if name == "color" else [luminance(crop)[..., None] for crop in crops]
    side = _VALIDATION_SIDE[int(name[1]) if name[0] == "x" else 1]
    first = (arrays[0].shape[0] - side) // 2
    inner = slice(first, first + side)
    truth: Tensor = torch.from_numpy(np.stack(arrays)[:, inner, inner]).permute(0, 3, 1, 2) / 255
    truth = truth.to(model.stages_.device)
    rng = RandomSource(1)
    rows = {}
    for level in LEVELS.get(name, (None,)):
        found, start, _ = errors_after_stages(model.stages_, model.simulation(), truth, rng, level)
        rows[str(level)] = [round(float(-10 * each.log10().mean()), 3) for each in (start, *found)]
    return rows


def train(name: str, archive: Path, updates: int, out: Path, device: str, **changes: Any) -> dict[str, Any]:
    """Train one model, write its weights to a folder, and return the result of validation.

    `changes` are other parameters of the model.
    """
    model = new_model(name, updates, device, **changes)
    kinds = ("color",) if name == "color" else ("gray", "color")
    model.fit([crop for kind in kinds for crop in _crops(archive, kind)])
    row = {"parameters": model.n_parameters_, "valid": _validate(model, name, _crops(archive, "valid"))}
    out.mkdir(parents=True, exist_ok=True)
    write_stages(model.stages_.cpu().symmetric, out / f"{name}.safetensors")
    say(f"{name}: {json.dumps(row)}")
    return row
