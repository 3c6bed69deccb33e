"""The stages that come with the package: one file of 16-bit weights for each task, and how they are run."""

import functools
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

import numpy as np
import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from mvrbm.errors import StorageError
from mvrbm.vision.stages import Pass, Progress, Stage

_MARGIN = 16  # pixels of a mirrored border
_PARTS = 100  # that progress counts for each stage
WEIGHTS = Path(__file__).parent / "weights"


class ShippedStages:
    """The stages of a task, one after another; `name` is that of a file, or a task of the package."""

    def __init__(self, name: str | Path, device: torch.device) -> None:
        self.device = device
        self._passes = _passes(WEIGHTS / f"{name}.safetensors" if isinstance(name, str) else name, device)

    @property
    def stages(self) -> list[Stage]:
        """The stages, in the order in which they are run."""
        return [each.stage for each in self._passes]

    @property
    def n_parameters(self) -> int:
        """Number of parameters of all stages."""
        return sum(p.numel() for each in self._passes for p in each.stage.parameters())

    def run(
        self,
        image: Tensor,
        after: Callable[[Tensor], Tensor] | None = None,
        *,
        level: float | None = None,
        mask: Tensor | None = None,
        progress: Progress | None = None,
    ) -> Tensor:
        """Return a better image (c, h, w); `after` is applied to what each stage gives, the rest as for `Pass`."""
        count = len(self._passes)
        for which, each in enumerate(self._passes):

            def in_all(done: int, total: int, which: int = which) -> None:
                if progress is not None:
                    progress(_PARTS * which + _PARTS * done // total, _PARTS * count)

            missing = each(image, level, mask, in_all)
            image = image + (missing if mask is None else missing * mask)
            image = image if after is None else after(image)
        return image

    def run_mirrored(self, image: Tensor, *, mask: Tensor | None = None, **how: Any) -> Tensor:
        """Return a better image, which is mirrored beyond its edges; for noise, of which edge pixels make lines."""
        high, wide = image.shape[1:]
        rows, columns = (
            torch.from_numpy(np.pad(np.arange(size), _MARGIN, mode="reflect")).to(image.device) for size in (high, wide)
        )
        large, holes = (None if each is None else each[:, rows][:, :, columns] for each in (image, mask))
        found = self.run(cast("Tensor", large), mask=holes, **how)
        return found[:, _MARGIN : _MARGIN + high, _MARGIN : _MARGIN + wide]


@functools.lru_cache(maxsize=16)
def _passes(path: Path, device: torch.device) -> list[Pass]:
    try:
        with safe_open(path, "pt") as file:
            described = json.loads((file.metadata() or {})["stages"])
            tensors = {name: file.get_tensor(name).float() for name in file.keys()}  # noqa: SIM118
        stages = [Stage(**arguments) for arguments in described]
        for number, stage in enumerate(stages):
            stage.load_state_dict({name: tensors[f"{number}.{name}"] for name in stage.state_dict()})
    except (OSError, SafetensorError, KeyError, RuntimeError, TypeError, ValueError) as error:
        raise StorageError(f"{path} does not hold stages: {error}") from error
    return [Pass(stage.to(device)) for stage in stages]


def write_stages(stages: list[Stage], path: Path) -> None:
    """Write stages with weights of 16 bits."""
    described: list[dict[str, Any]] = []
    tensors: dict[str, Tensor] = {}
    for number, stage in enumerate(stages):
        _, rank, rows, _ = stage.left.shape
        same = {name: getattr(stage, name) for name in ("channels", "patch", "stride", "mask", "floor")}
        described.append(
            {**same, "hidden": (rows, stage.right.shape[2]), "rank": rank, "coded": stage.codes is not None}
        )
        tensors |= {f"{number}.{name}": value.half().contiguous() for name, value in stage.state_dict().items()}
    save_file(tensors, path, {"stages": json.dumps(described)})
