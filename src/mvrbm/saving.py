"""Models on disk: a folder with `config.json` and `model.safetensors`. No pickle anywhere.

A folder is written beside its place and renamed into it, so that it is there whole or not at all.
Reading checks the format, its version and every name, shape and dtype before it builds anything.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from mvrbm.couplings import COUPLINGS, Coupling
from mvrbm.errors import StorageError
from mvrbm.io.atomic import usual_mode
from mvrbm.machine import BoltzmannMachine
from mvrbm.units import UNITS, Unit

__all__ = ["StorageError", "from_pretrained", "save_pretrained"]

FORMAT = "mvrbm"
FORMAT_VERSION = 1
CONFIG = "config.json"
MODEL = "model.safetensors"

_DTYPES = {"float32": torch.float32, "float64": torch.float64}
_LARGEST_CONFIG = 16 * 2**20


# -- models -----------------------------------------------------------------------------------------


def save_pretrained(machine: BoltzmannMachine, folder: str | os.PathLike[str]) -> Path:
    """Write a machine to a folder, replacing a model that is there.

    Parameters
    ----------
    machine : BoltzmannMachine
        What to write.
    folder : path
        Where to. It may be missing, empty, or hold a model; anything else in it is not touched, and
        refused.

    Returns
    -------
    Path
        The folder.
    """
    with replace_folder(folder) as staging:
        write_machine(machine, staging)
    return Path(folder)


def from_pretrained(folder: str | os.PathLike[str], *, device: str | torch.device = "cpu") -> BoltzmannMachine:
    """Read a machine from a folder.

    Parameters
    ----------
    folder : path
        A folder that `save_pretrained` wrote.
    device : str or torch.device
        Where the machine is to live.

    Raises
    ------
    StorageError
        If the folder does not hold a model that this version can read. The message says why.
    """
    return read_machine(Path(folder)).to(device)


def write_machine(machine: BoltzmannMachine, folder: Path, extra: Mapping[str, Any] | None = None) -> None:
    """Write a machine's two files into a folder that is there, with more entries for the config."""
    config = {"format": FORMAT, "format_version": FORMAT_VERSION, **machine_config(machine), **(extra or {})}
    (folder / CONFIG).write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
    write_tensors(machine.state_dict(), folder / MODEL)


def read_machine(folder: Path) -> BoltzmannMachine:
    """Read a machine from its two files."""
    machine = build_machine(read_config(folder), folder)
    tensors = read_tensors(folder / MODEL)
    expected = machine.state_dict()
    _check_names(set(tensors), set(expected), folder / MODEL)
    for name, tensor in tensors.items():
        want = expected[name]
        if tensor.shape != want.shape or tensor.dtype != want.dtype:
            raise StorageError(
                f"{folder / MODEL}: '{name}' should be {want.dtype} of shape {tuple(want.shape)}, "
                f"is {tensor.dtype} of shape {tuple(tensor.shape)}"
            )
        if not bool(torch.isfinite(tensor).all()):
            raise StorageError(f"{folder / MODEL}: '{name}' has entries that are not finite")
    machine.load_state_dict(tensors)
    return machine


def machine_config(machine: BoltzmannMachine) -> dict[str, Any]:
    """Return what `build_machine` needs to build the machine again, parameters aside."""
    return {
        "dtype": str(machine.like.dtype).removeprefix("torch."),
        "visible": {name: {"unit": unit.name, **unit.config()} for name, unit in machine.layers.items()},
        "hidden": {"unit": machine.hidden.name, **machine.hidden.config()},
        "couplings": {name: {"coupling": link.name, **link.config()} for name, link in machine.links.items()},
    }


def build_machine(config: Mapping[str, Any], folder: Path) -> BoltzmannMachine:
    """Build a machine from its config; `folder` is named in errors."""
    path = folder / CONFIG
    try:
        dtype = _DTYPES[config["dtype"]]
        with torch.device("meta"):  # shapes without memory
            _refuse_huge(*_parts(config), dtype, folder / MODEL)
        # The parameters are read in a moment; what is drawn now is only to pass for a bounded machine.
        return BoltzmannMachine(*_parts(config), std=1e-6).to(dtype)
    except StorageError as error:
        raise StorageError(f"{path}: {error}") from error
    except (KeyError, TypeError, ValueError, AttributeError, RuntimeError, OverflowError, MemoryError) as error:
        reason = f"'{error.args[0]}' is missing or unknown" if isinstance(error, KeyError) else str(error)
        raise StorageError(f"{path}: not a valid model description: {reason}") from error


def _parts(config: Mapping[str, Any]) -> tuple[dict[str, Unit], Unit, dict[str, Coupling]]:
    return (
        {name: _build(UNITS, "unit", dict(entry)) for name, entry in config["visible"].items()},
        _build(UNITS, "unit", dict(config["hidden"])),
        {name: _build(COUPLINGS, "coupling", dict(entry)) for name, entry in config["couplings"].items()},
    )


def _build(kinds: Mapping[str, Any], what: str, entry: dict[str, Any]) -> Any:
    kind = entry.pop(what)
    if kind not in kinds:
        raise StorageError(f"unknown {what} '{kind}': this version knows {sorted(kinds)}")
    return kinds[kind](**entry)


def _refuse_huge(
    visible: Mapping[str, Unit], hidden: Unit, links: Mapping[str, Coupling], dtype: torch.dtype, weights: Path
) -> None:
    """Compare what the config asks for with the weights' file, before anything of that size is made."""
    if not weights.is_file():
        raise StorageError(f"{weights.name} is missing")
    for name, link in links.items():
        link._allocate(visible[name].shape, hidden.shape)
    modules = (*visible.values(), hidden, *links.values())
    described = sum(parameter.numel() for module in modules for parameter in module.parameters())
    stored = weights.stat().st_size
    if described * dtype.itemsize > stored:
        raise StorageError(f"describes {described:,} numbers, but {weights.name} has only {stored:,} bytes: truncated?")


# -- files ------------------------------------------------------------------------------------------


def read_config(folder: Path) -> dict[str, Any]:
    """Read a folder's config and check its format and version."""
    path = folder / CONFIG
    if not folder.is_dir():
        raise StorageError(f"{folder} is not a model folder: {'a file' if folder.exists() else 'nothing'} is there")
    config = read_json(path)
    if config.get("format") != FORMAT:
        raise StorageError(f"{path} is not the description of an mvrbm model")
    if config.get("format_version") != FORMAT_VERSION:
        raise StorageError(
            f"{path} has format version {config.get('format_version')!r}, this version of mvrbm reads "
            f"{FORMAT_VERSION}: install the version that wrote it"
        )
    return config


def read_json(path: Path, largest: int | None = _LARGEST_CONFIG) -> dict[str, Any]:
    """Read a JSON object from a file of up to `largest` bytes."""
    try:
        if largest is not None and path.stat().st_size > largest:
            raise StorageError(f"{path} is too large for a description: {path.stat().st_size:,} bytes")
        content = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise StorageError(f"{path} cannot be read: {error.strerror or error}") from error
    except StorageError:
        raise
    except (ValueError, RecursionError) as error:
        raise StorageError(f"{path} is damaged: not valid JSON ({error})") from error
    if not isinstance(content, dict):
        raise StorageError(f"{path} is damaged: a JSON object is expected")
    return content


def write_tensors(tensors: Mapping[str, Tensor], path: Path) -> None:
    """Write tensors to a safetensors file."""
    # safetensors refuses views and shared memory: each tensor is stored by itself.
    save_file({name: tensor.detach().cpu().clone().contiguous() for name, tensor in tensors.items()}, path)


def read_tensors(path: Path) -> dict[str, Tensor]:
    """Read a safetensors file."""
    if not path.is_file():
        raise StorageError(f"{path} is missing")
    try:
        with safe_open(path, framework="pt") as file:
            return {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    except (SafetensorError, OSError, ValueError, TypeError, RuntimeError, KeyError, AttributeError) as error:
        raise StorageError(f"{path} is damaged or not a safetensors file: {error}") from error


@contextlib.contextmanager
def replace_folder(folder: str | os.PathLike[str]) -> Iterator[Path]:
    """Give a new folder to write into, which takes the place of `folder` once all went well."""
    target = Path(folder)
    if target.exists() and not target.is_dir():
        raise StorageError(f"{target} is a file: a folder is needed to save a model")
    if target.is_dir() and not _replaceable(target):
        raise StorageError(f"{target} holds other files than a model: choose another folder")
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        staging = Path(tempfile.mkdtemp(prefix=f".{target.name}-", dir=target.parent))
    except OSError as error:
        raise StorageError(f"{target} cannot be written: {error.strerror or error}") from error
    try:
        yield staging
        finish_folder(staging)
        if target.exists():
            former = Path(tempfile.mkdtemp(prefix=f".{target.name}-old-", dir=target.parent))
            try:
                target.rename(former / target.name)
                staging.rename(target)
            except OSError:
                if (former / target.name).exists():
                    (former / target.name).rename(target)
                raise
            finally:
                shutil.rmtree(former, ignore_errors=True)
        else:
            staging.rename(target)
    except (OSError, SafetensorError) as error:
        raise StorageError(f"{target} cannot be written: {error}") from error
    finally:
        shutil.rmtree(staging, ignore_errors=True)


def _replaceable(folder: Path) -> bool:
    """Whether a folder is empty, or holds a model and nothing else."""
    there = {entry.name for entry in folder.iterdir()}
    if not there:
        return True
    return there <= {CONFIG, MODEL} and CONFIG in there and read_json(folder / CONFIG).get("format") == FORMAT


def finish_folder(folder: Path) -> None:
    """Make sure that what was written to a folder has reached the disk, and give it the usual permissions."""
    folder.chmod(usual_mode(0o777))
    for file in folder.iterdir():
        file.chmod(usual_mode(0o666))
    for file in [*folder.iterdir(), folder]:
        descriptor = os.open(file, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)


def _check_names(given: set[str], expected: set[str], path: Path) -> None:
    missing, foreign = sorted(expected - given), sorted(given - expected)
    if missing or foreign:
        parts = ([f"lacks {missing}"] if missing else []) + ([f"has unknown {foreign}"] if foreign else [])
        raise StorageError(f"{path} {' and '.join(parts)}")
