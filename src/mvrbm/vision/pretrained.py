"""Read and write symmetric stages with 16-bit weights, and load the pretrained stages.

The constructor arguments of the stages are stored as JSON in the metadata of a safetensors file.
"""

import functools
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from mvrbm.errors import StorageError
from mvrbm.validation import number, whole_number
from mvrbm.vision.stages import StageSequence, SymmetricStage

#: Folder of the pretrained weights, which are part of the package.
WEIGHTS = Path(__file__).parent / "weights"

# Maximum patch size in a file. The derivative matrix grows with the fourth power of the patch size.
_LARGEST_PATCH = 64
# Maximum absolute value of a parameter in a file.
_LARGEST_PARAMETER = 1e6


@functools.lru_cache(maxsize=16)
def shipped_stages(name: str, device: torch.device) -> StageSequence:
    """Load pretrained stages by name.

    Available names are ``"x2"``, ``"x3"``, ``"x4"``, ``"gray"``, ``"color"``, ``"salt"`` and ``"jpeg"``. The result is
    cached, so callers must not modify it.
    """
    return read_stages(WEIGHTS / f"{name}.safetensors").to(device)


def read_stages(path: Path) -> StageSequence:
    """Read stages from a safetensors file, or raise StorageError if the file is invalid."""
    try:
        with safe_open(path, "pt") as file:
            described = json.loads((file.metadata() or {})["stages"])
            tensors = {name: file.get_tensor(name).float() for name in file.keys()}  # noqa: SIM118
        return build_stages(described, tensors)
    except (OSError, SafetensorError, KeyError, RuntimeError, TypeError, ValueError) as error:
        raise StorageError(f"{path} does not contain valid stages: {error}") from error


def write_stages(stages: Sequence[SymmetricStage], path: Path) -> None:
    """Write stages to a safetensors file with 16-bit weights."""
    tensors = {name: value.half() for name, value in stage_tensors(stages).items()}
    save_file(tensors, path, {"stages": json.dumps([stage.arguments for stage in stages])})


def stage_tensors(stages: Sequence[SymmetricStage]) -> dict[str, Tensor]:
    """Return the parameters of all stages by name, prefixed with the index of the stage."""
    return {
        f"{index}.{name}": value.contiguous()
        for index, stage in enumerate(stages)
        for name, value in stage.state_dict().items()
    }


def build_stages(described: Sequence[Mapping[str, Any]], tensors: Mapping[str, Tensor]) -> StageSequence:
    """Build stages from constructor arguments and parameters, or raise ValueError if they do not match."""
    stages = []
    used = set()
    for index, arguments in enumerate(described):
        _check(arguments, tensors, index)
        stage = SymmetricStage(**{**arguments, "hidden": tuple(arguments["hidden"])})
        names = {name: f"{index}.{name}" for name in stage.state_dict()}
        stage.load_state_dict({name: tensors[stored] for name, stored in names.items()})
        used |= set(names.values())
        stages.append(stage)
    if not stages:
        raise ValueError("at least one stage is required")
    unknown = sorted(set(tensors) - used)
    if unknown:
        raise ValueError(f"the parameters {unknown} do not belong to any stage")
    for name, tensor in tensors.items():
        if not bool((tensor.abs() <= _LARGEST_PARAMETER).all()):
            raise ValueError(f"'{name}' has entries that are too large or not finite")
    return StageSequence(stages)


def _check(arguments: Mapping[str, Any], tensors: Mapping[str, Tensor], index: int) -> None:
    """Raise ValueError if the constructor arguments of a stage do not match its stored parameters.

    This function is called before the stage allocates memory.
    """
    patch = whole_number(arguments["patch"], "patch", 1, _LARGEST_PATCH)
    whole_number(arguments["stride"], "stride", 1, patch)
    channels = whole_number(arguments["channels"], "channels", 1, 3)
    number(arguments["floor"], "floor", 0, 1, exclude_low=True)
    rows, columns = arguments["hidden"]
    layers = 5 * channels + bool(arguments["mask"])
    for name, size in (("left", rows), ("right", columns)):
        expected = (layers, arguments["rank"], size, patch)
        found = tuple(tensors[f"{index}.{name}"].shape)
        if found != expected:
            raise ValueError(f"'{index}.{name}' has shape {found}, expected {expected}")
