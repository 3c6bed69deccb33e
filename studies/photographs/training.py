"""Training of the stages, on a GPU in some minutes: contrastive divergence, then their pass by backpropagation.

The schedule follows the clock: a training run ends when its time is over. On a GPU an update is recorded once and
replayed, with products in 16 bits. Every task is a process of its own; several share a GPU well.
"""

from __future__ import annotations

import functools
import io
import json
import math
import time
import zipfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple, cast

import numpy as np
import torch
from numpy.typing import NDArray
from PIL import Image
from torch import Tensor, nn
from torch.nn import functional as F

from mvrbm.vision import luminance
from mvrbm.vision.shipped import write_stages
from mvrbm.vision.stages import Stage
from mvrbm.vision.superres.back_projection import error_projection
from studies.arguments import say
from studies.photographs.degrading import Resampling, degrade, opponent

__all__ = ["TASKS", "Model", "Task", "contrastive_divergence", "divergence_patches", "train"]

Array = NDArray[Any]


class Task(NamedTuple):
    """What a model is for, and its size."""

    patches: tuple[int, ...]  # of the stages
    strides: tuple[int, ...]
    hidden: tuple[int, int]
    rank: int
    crop: int = 72  # side of the crops to learn from
    scale: int = 0  # of super-resolution
    channels: int = 1
    coded: bool = False
    mask: bool = False
    share: float = 1.0  # of the time
    levels: tuple[float | None, ...] = (None,)  # that validation measures


_SIGMAS = (5, 15, 25, 50, 75)
TASKS = {
    "x2": Task((10, 8, 8), (2, 2, 2), (7, 8), 40, 64, 2),
    "x3": Task((15, 12, 12), (3, 3, 3), (8, 8), 32, 96, 3),
    "x4": Task((20, 16, 16), (4, 4, 4), (8, 8), 25, 128, 4),
    "gray": Task((16, 12, 12, 8), (4, 3, 3, 2), (8, 16), 14, coded=True, levels=_SIGMAS),
    "color": Task((12, 12, 8), (3, 3, 2), (8, 16), 9, channels=3, coded=True, levels=_SIGMAS),
    "jpeg": Task((12, 8), (3, 2), (8, 16), 16, coded=True, share=0.7, levels=(30, 50, 75, 95)),
    "salt": Task((8, 8), (2, 2), (8, 16), 12, 64, mask=True, share=0.35, levels=(0.05, 0.1, 0.3)),
}
_BATCH, _RATE, _WARM_UP, _AVERAGING, _ROUNDS = 32, 2e-3, 300, 0.999, 20
_DIVERGENCE = 0.02  # share of the time for contrastive divergence
_VALID = {0: 144, 2: 96, 3: 144, 4: 192}  # side of the crops for validation, by scale


class Model(nn.Module):
    """The stages of a task."""

    def __init__(self, name: str) -> None:
        super().__init__()
        self.name, self.task = name, TASKS[name]
        task = self.task
        self.stages = nn.ModuleList(
            Stage(task.channels, p, s, task.hidden, task.rank, coded=task.coded, mask=task.mask)
            for p, s in zip(task.patches, task.strides, strict=True)
        )

    def errors(
        self, truth: Tensor, rng: torch.Generator | None = None, level: float | None = None
    ) -> tuple[list[Tensor], Tensor, Tensor]:
        """Return mean squared errors (n,) after each stage, those of the input, and by how much it is degraded."""
        if self.task.scale:
            resampling, project = _helpers(self.task.scale, truth.shape[-1], str(truth.device))
            image, goal, amount, mask = resampling.bicubic(truth), truth, truth.new_full((1,), 0.1), None
        else:
            (image, amount, mask), project = degrade(self.name, truth, rng, level), None
            goal = opponent(truth) if self.name == "color" else truth
        border = 4 * self.task.scale or 8
        inner = (..., slice(border, -border), slice(border, -border))
        found, start = [], image
        for stage in self.stages:
            missing = stage(image, None if self.task.scale else amount, mask)
            image = image + (missing if mask is None else missing * mask)
            if project is not None:  # the truth is consistent with the low resolution: only the error changes
                image = truth + project((image - truth)[:, 0])[:, None]
            found.append((image - goal)[inner].square().mean((1, 2, 3)))
        return found, (start - goal)[inner].square().mean((1, 2, 3)), amount

    def loss(self, truth: Tensor) -> Tensor:
        """Return the loss of crops: errors grow about in proportion to what is wrong with the input."""
        found, _, amount = self.errors(truth)
        parts = [100 * (each / (amount + 0.004)).mean() for each in found]
        return parts[-1] + 0.2 * sum(parts[:-1], truth.new_zeros(()))

    def divergence(self, truth: Tensor) -> Tensor:
        """Return contrastive divergence of all stages on degraded images."""
        if self.task.scale:
            image, goal, amount = (
                _helpers(self.task.scale, truth.shape[-1], str(truth.device))[0].bicubic(truth),
                truth,
                None,
            )
        else:
            image, amount, _ = degrade(self.name, truth)
            goal = opponent(truth) if self.name == "color" else truth
        stages = cast("Sequence[Stage]", self.stages)
        parts = [contrastive_divergence(each, divergence_patches(each, image, goal, 2048, amount)) for each in stages]
        return torch.stack(parts).sum() / 1000

    @torch.no_grad()
    def validate(self, truth: Tensor) -> dict[str, list[float]]:
        """Return the mean PSNR of crops, of the input and after each stage, for each level."""
        rng, rows = torch.Generator(truth.device).manual_seed(1), {}
        for level in self.task.levels:
            found, start, _ = self.errors(truth, rng, level)
            rows[str(level)] = [round(float(-10 * each.log10().mean()), 3) for each in (start, *found)]
        return rows


@functools.cache
def _helpers(scale: int, side: int, device: str) -> tuple[Resampling, Callable[[Tensor], Tensor]]:
    like = torch.zeros((), device=device)
    return Resampling(side, scale, device), error_projection(side // scale, scale, _ROUNDS, like)


# -- contrastive divergence -------------------------------------------------------------------------


def _all_weights(stage: Stage) -> Tensor:
    """Return the weights of all orientations to X and Z, (8 K L, 5 c p p): derivatives turn as images do."""
    c, p = stage.channels, stage.patch
    full = stage.weights()[: 5 * c].transpose(0, 1).reshape(-1, 5 * c, p, p)
    x, z = full[:, :c], full[:, c:].reshape(-1, c, 4, p, p)
    flipped, turned = z.new_tensor([-1.0, 1, 1, 1])[:, None, None], z.new_tensor([1.0, -1, 1, 1])[:, None, None]
    x, z = torch.cat([x, x.flip(-1)]), torch.cat([z, z.flip(-1) * flipped])
    found = []
    for _ in range(4):
        found.append(torch.cat([x, z.flatten(1, 2)], 1))
        # Turned by 90 degrees, the slope along columns is that along rows, and the other way round with a minus.
        x, z = x.rot90(1, (-2, -1)), z.rot90(1, (-2, -1))[:, :, [1, 0, 3, 2]] * turned
    return torch.cat(found).flatten(1)


def contrastive_divergence(stage: Stage, v: Tensor) -> Tensor:
    """Return CD-1 as a loss: the free energy of data (n, 5 c, p p) less that after a Gibbs step."""
    w, bias, v = _all_weights(stage), stage.bias.repeat(8), v.flatten(1)
    with torch.no_grad():
        y = torch.bernoulli(torch.sigmoid(v @ w.mT + bias))
        other = (y - 0.5) @ w + torch.randn_like(v)

    def free_energy(each: Tensor) -> Tensor:
        # Hidden units count from a half, which is a visible bias of -W'1/2.
        return 0.5 * (each + 0.5 * w.sum(0)).square().sum(1) - F.softplus(each @ w.mT + bias).sum(1)

    return (free_energy(v) - free_energy(other)).mean()


def divergence_patches(stage: Stage, image: Tensor, truth: Tensor, number: int, amount: Tensor | None) -> Tensor:
    """Return random patches of X and Z, (number, 5 c, p p)."""
    c, p, s = stage.channels, stage.patch, stage.stride
    windows, r = stage.windows(image)
    unit = stage.unit(r, None if stage.codes is None else amount)
    missing = F.unfold(F.pad(truth - image, (p - s,) * 4), p, stride=s).unflatten(1, (c, p * p)) / unit[:, None, None]
    which = torch.randint(unit.numel(), (number,), device=image.device)
    x, z = (each.permute(0, 3, 1, 2).flatten(0, 1)[which] for each in (missing, windows / r[:, None, None]))
    return torch.cat([x, (z @ stage.features.mT).reshape(number, -1, p * p)], 1)


# -- data -------------------------------------------------------------------------------------------


def _crops(archive: Path, kind: str, color: bool) -> list[Array]:
    """Return crops of the archive that `studies.photographs.collecting` writes: luminance, or RGB."""
    with zipfile.ZipFile(archive) as file:
        names = sorted(name for name in file.namelist() if name.startswith(f"{kind}/"))
        opened = [Image.open(io.BytesIO(file.read(name))) for name in names]
    if kind == "gray":
        return [np.asarray(image.convert("L"))[..., None] for image in opened]
    pixels = [np.asarray(image.convert("RGB")) for image in opened]
    return pixels if color else [luminance(each)[..., None] for each in pixels]


def _tensor(crops: Sequence[Array], device: str) -> Tensor:
    return torch.from_numpy(np.stack(crops)).permute(0, 3, 1, 2).contiguous().to(device)


def _batch(data: Tensor, n: int, side: int) -> Tensor:
    """Return random crops as floats; tied machines need no flips and turns of them."""
    device = data.device
    which = torch.randint(len(data), (n,), device=device)[:, None, None]
    y, x = (
        torch.randint(data.shape[-1] - side + 1, (n, 1), device=device) + torch.arange(side, device=device)
        for _ in range(2)
    )
    return data[which, :, y[:, :, None], x[:, None, :]].permute(0, 3, 1, 2).float() / 255


# -- training ---------------------------------------------------------------------------------------


class _Updates:
    """Adam's updates, and an average of the parameters; on a GPU an update is recorded once and replayed."""

    def __init__(self, model: Model, loss: Callable[[], Tensor], device: str) -> None:
        self.parameters, self._loss, self._on = list(model.parameters()), loss, device == "cuda"
        self._rate, self._keep = torch.tensor(_RATE, device=device), torch.zeros((), device=device)
        self._adam = torch.optim.Adam(
            self.parameters, lr=self._rate, betas=(0.9, 0.99), fused=self._on, capturable=self._on
        )
        self.average = [p.detach().clone() for p in self.parameters]
        self._graph: torch.cuda.CUDAGraph | None = None
        self._done = 0

    def update(self, loss: Callable[[], Tensor]) -> None:
        """Make one update without a recording."""
        self._adam.zero_grad(set_to_none=True)
        loss().backward()
        nn.utils.clip_grad_norm_(self.parameters, 1.0, foreach=True)
        self._adam.step()
        with torch.no_grad():
            for mean, value in zip(self.average, self.parameters, strict=True):
                mean.mul_(self._keep).add_(value * (1 - self._keep))

    def __call__(self, rate: float) -> None:
        """Make one update with a learning rate."""
        self._done += 1
        self._rate.fill_(rate)
        self._keep.fill_(min(_AVERAGING, self._done / (self._done + 20)))  # a young average forgets the beginning
        if self._on and self._graph is None:
            self._record()
        if self._graph is not None:
            self._graph.replay()
        else:
            self.update(self._loss)

    def _record(self) -> None:
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            for _ in range(4):
                self.update(self._loss)
        torch.cuda.current_stream().wait_stream(stream)
        self._adam.zero_grad(set_to_none=True)
        self._graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self._graph):
            self.update(self._loss)


def train(
    name: str, archive: Path, seconds: float, out: Path, device: str, start: Path | None = None
) -> dict[str, Any]:
    """Train the stages of a task for some time, write them to a folder, and return what validation says."""
    torch.manual_seed(0)
    model, task = Model(name).to(device), TASKS[name]
    Stage.product = torch.bfloat16 if device == "cuda" else torch.float32
    if start is not None:
        model.load_state_dict(torch.load(start, map_location=device, weights_only=True))
    color = task.channels == 3
    kinds = ("color",) if color else ("gray", "color")
    data = _tensor([crop for kind in kinds for crop in _crops(archive, kind, color)], device)
    middle = (192 - _VALID[task.scale]) // 2
    valid = _tensor(_crops(archive, "valid", color), device)[..., middle : 192 - middle, middle : 192 - middle] / 255
    updates = _Updates(model, lambda: model.loss(_batch(data, _BATCH, task.crop)), device)
    began, count, divergence = time.monotonic(), 0, _DIVERGENCE if start is None else 0.0
    while (share := (time.monotonic() - began) / (seconds * task.share)) < 1:
        if share < divergence:
            updates.update(lambda: model.divergence(_batch(data, _BATCH, task.crop)))
            continue
        count += 1
        updates(_RATE * min(1, count / _WARM_UP) * 0.5 * (1 + math.cos(math.pi * share)))
        if device == "cuda" and count % 20 == 0:
            torch.cuda.synchronize()  # the clock must not run ahead of the device
    with torch.no_grad():
        for parameter, mean in zip(model.parameters(), updates.average, strict=True):
            parameter.copy_(mean)
    Stage.product = torch.float32
    row = {"updates": count, "parameters": sum(p.numel() for p in model.parameters()), "valid": model.validate(valid)}
    out.mkdir(parents=True, exist_ok=True)
    torch.save({key: value.cpu() for key, value in model.state_dict().items()}, out / f"{name}.pt")
    write_stages([cast("Stage", stage).cpu() for stage in model.stages], out / f"{name}.safetensors")
    say(f"{name}: {json.dumps(row)}")
    return row
