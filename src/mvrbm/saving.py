"""Models on disk: a folder with `config.json` and `model.safetensors`, and the registry of what can be loaded.

A folder is written next to its place and then renamed, so that it is there whole or not at all. Reading checks the
format, its version and every name, shape and dtype before anything is built. No pickle anywhere. What can be saved
registers its loader here (:func:`register`); this module imports none of it. Checkpoints of training runs are
written by :mod:`mvrbm.learning.checkpoint`, other formats by :mod:`mvrbm.export`.
"""

import json
import os
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any, TypeVar

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor, nn

from mvrbm.couplings import Coupling, make_coupling
from mvrbm.devices import resolve_device
from mvrbm.errors import StorageError
from mvrbm.io.atomic import replace_folder
from mvrbm.machine import BoltzmannMachine
from mvrbm.units import Unit, make_unit

__all__ = ["load", "register", "save"]

FORMAT = "mvrbm"
FORMAT_VERSION = 1
CONFIG = "config.json"
MODEL = "model.safetensors"
#: Persistent chains of training, from which samples start: only models that were trained with such chains have them.
CHAINS = "chains.safetensors"
#: Entry of the config that describes the estimator, with its ``class`` and ``params``. Plain machines have none.
ESTIMATOR = "estimator"
#: Name of the loader of training runs.
CHECKPOINT = "checkpoint"

#: Reads what a folder holds: (folder, its config, device) -> object.
Loader = Callable[[Path, dict[str, Any], str | torch.device], Any]
Registered = TypeVar("Registered", bound=Callable[..., Any])

_LOADERS: dict[str, Loader] = {}
_DTYPES = {"float32": torch.float32, "float64": torch.float64}
_LARGEST_CONFIG = 16 * 2**20
_STACKED = "machines."  # prefix of the tensors of a stack


def register(name: str) -> Callable[[Registered], Registered]:
    """Register the loader of a class name in `config.json`, or the loader of checkpoints (``"checkpoint"``).

    Decorates a function ``(folder, config, device) -> object``, or a class with a class method `from_folder` of that
    signature.
    """

    def decorate(target: Registered) -> Registered:
        _LOADERS[name] = getattr(target, "from_folder", target)
        return target

    return decorate


def load(folder: str | os.PathLike[str], device: str | torch.device = "auto") -> Any:
    """Load whatever was saved in a folder by a class that is registered by now; see :func:`mvrbm.load`."""
    folder = Path(folder)
    if _is_checkpoint(folder):
        return _loader_of(CHECKPOINT, folder)(folder, {}, device)
    config = read_config(folder)
    described = config.get(ESTIMATOR)
    if described is None:
        return read_machine(folder).to(resolve_device(device))
    if not isinstance(described, dict) or not isinstance(described.get("class"), str):
        raise StorageError(f"{folder / CONFIG} is damaged: it does not name the class of the estimator")
    loader = _loader_of(described["class"], folder)
    resolve_device(device)  # a device that does not exist is no damage
    try:
        return loader(folder, config, device)
    except StorageError:
        raise
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise StorageError(f"{folder}: the estimator's description is damaged: {error}") from error


def save(model: Any, folder: str | os.PathLike[str]) -> Path:
    """Save a machine or an estimator to a folder, which :func:`mvrbm.load` reads, and return the folder.

    Parameters
    ----------
    model : BoltzmannMachine or estimator
        A machine, or any object with a method ``save(folder)``.
    folder : path
        The folder to write. It may be missing, empty, or hold a model, which is replaced. Other files in it raise
        `StorageError`.
    """
    if isinstance(model, BoltzmannMachine):
        with replace_model(folder) as staging:
            write_machine(model, staging)
    elif callable(getattr(model, "save", None)):
        model.save(folder)
    else:
        raise StorageError(
            f"a {type(model).__name__} cannot be saved: neither is it a machine, nor has it a save method"
        )
    return Path(folder)


def _is_checkpoint(folder: Path) -> bool:
    return (folder / "trainer.json").is_file() or (
        folder.is_dir() and not (folder / CONFIG).exists() and any(folder.glob("update-*/trainer.json"))
    )


def _loader_of(name: str, folder: Path) -> Loader:
    if name not in _LOADERS:
        known = ", ".join(sorted(set(_LOADERS) - {CHECKPOINT}))
        raise StorageError(f"{folder} holds '{name:.100}', which this version cannot load: it loads {known}")
    return _LOADERS[name]


def replace_model(folder: str | os.PathLike[str]) -> AbstractContextManager[Path]:
    """Give a new folder to write a model into, which takes the place of `folder` if nothing failed."""
    return replace_folder(folder, is_replaceable)


def is_replaceable(folder: Path) -> bool:
    """Return whether a folder is empty, or holds a model and nothing else."""
    names = {entry.name for entry in folder.iterdir()}
    if not names:
        return True
    return names <= {CONFIG, MODEL, CHAINS} and CONFIG in names and read_json(folder / CONFIG).get("format") == FORMAT


def write_machine(machine: BoltzmannMachine, folder: Path, extra: Mapping[str, Any] | None = None) -> None:
    """Write the two files of a machine into an existing folder, with further entries of the config."""
    _write({**machine_config(machine), **(extra or {})}, machine.state_dict(), folder)


def read_machine(folder: Path) -> BoltzmannMachine:
    """Read a machine from its two files."""
    machine = build_machine(read_config(folder), folder)
    machine.load_state_dict(_read_checked(folder / MODEL, machine.state_dict()))
    return machine


def machine_config(machine: BoltzmannMachine) -> dict[str, Any]:
    """Return a description from which `build_machine` builds the machine, without its parameters."""
    return {
        "dtype": str(machine.like.dtype).removeprefix("torch."),
        "visible": {name: {"unit": unit.name, **unit.config()} for name, unit in machine.layers.items()},
        "hidden": {"unit": machine.hidden.name, **machine.hidden.config()},
        "couplings": {name: {"coupling": link.name, **link.config()} for name, link in machine.links.items()},
    }


def build_machine(config: Mapping[str, Any], folder: Path) -> BoltzmannMachine:
    """Build a machine from its config; `folder` appears in messages."""
    path = folder / CONFIG
    try:
        dtype = _DTYPES[config["dtype"]]
        with torch.device("meta"):  # shapes without memory
            _check_size(*_parts(config), dtype, folder / MODEL)
        # The parameters are read later. The small start only has to pass the check that the energy is bounded.
        return BoltzmannMachine(*_parts(config), std=1e-6).to(dtype)
    except StorageError as error:
        raise StorageError(f"{path}: {error}") from error
    except (KeyError, TypeError, ValueError, AttributeError, RuntimeError, OverflowError, MemoryError) as error:
        reason = f"'{error.args[0]}' is missing or unknown" if isinstance(error, KeyError) else str(error)
        raise StorageError(f"{path}: not a valid model description: {reason}") from error


def _parts(config: Mapping[str, Any]) -> tuple[dict[str, Unit], Unit, dict[str, Coupling]]:
    return (
        {name: _unit(entry) for name, entry in config["visible"].items()},
        _unit(config["hidden"]),
        {name: make_coupling(dict(entry)) for name, entry in config["couplings"].items()},
    )


def _unit(entry: Mapping[str, Any]) -> Unit:
    options = dict(entry)
    return make_unit(options.pop("unit"), **options)


def _check_size(
    visible: Mapping[str, Unit], hidden: Unit, links: Mapping[str, Coupling], dtype: torch.dtype, weights: Path
) -> None:
    """Compare the size that the config describes with the file of weights, before any memory is allocated."""
    if not weights.is_file():
        raise StorageError(f"{weights.name} is missing")
    for name, link in links.items():
        link.allocate(visible[name].shape, hidden.shape)
    modules = (*visible.values(), hidden, *links.values())
    described = sum(parameter.numel() for module in modules for parameter in module.parameters())
    stored = weights.stat().st_size
    if described * dtype.itemsize > stored:
        raise StorageError(f"describes {described:,} numbers, but {weights.name} has only {stored:,} bytes: truncated?")


def write_stack(
    machines: Sequence[BoltzmannMachine],
    folder: Path,
    extra: Mapping[str, Any],
    more: Mapping[str, Tensor] | None = None,
) -> None:
    """Write the two files of a stack into an existing folder, with further entries of the config and tensors."""
    own = {f"{_STACKED}{name}": tensor for name, tensor in nn.ModuleList(machines).state_dict().items()}
    _write({"stack": [machine_config(machine) for machine in machines], **extra}, {**own, **(more or {})}, folder)


def read_stack(
    folder: Path, more: Callable[[BoltzmannMachine], Mapping[str, tuple[int, ...]]] | None = None
) -> tuple[list[BoltzmannMachine], dict[str, Tensor]]:
    """Read the machines of a stack, and the tensors stored with them, from a folder that `write_stack` wrote.

    `more` maps the top machine to the names and shapes of the further tensors. Default: there are none.
    """
    parts = read_config(folder).get("stack")
    if not isinstance(parts, list) or not parts or not all(isinstance(part, dict) for part in parts):
        raise StorageError(f"{folder} does not hold a stack of machines")
    machines = [build_machine(part, folder) for part in parts]
    _check_joints(machines, folder)
    stack, dtype = nn.ModuleList(machines), machines[0].like.dtype
    expected = {f"{_STACKED}{name}": tensor for name, tensor in stack.state_dict().items()}
    for name, shape in ({} if more is None else more(machines[-1])).items():
        expected[name] = torch.empty(shape, dtype=dtype, device="meta")
    tensors = _read_checked(folder / MODEL, expected)
    own = {name.removeprefix(_STACKED): tensor for name, tensor in tensors.items() if name.startswith(_STACKED)}
    stack.load_state_dict(own)
    return machines, {name: tensor for name, tensor in tensors.items() if not name.startswith(_STACKED)}


def _check_joints(machines: Sequence[BoltzmannMachine], folder: Path) -> None:
    for number, machine in enumerate(machines):
        if len(machine.layers) != 1:
            raise StorageError(f"{folder}: a machine of a stack has one visible layer, got {list(machine.layers)}")
        (unit,) = machine.layers.values()
        if number and unit.shape != machines[number - 1].hidden.shape:
            raise StorageError(f"{folder}: machine {number} does not fit on the one below")


def _write(config: Mapping[str, Any], tensors: Mapping[str, Tensor], folder: Path) -> None:
    content = {"format": FORMAT, "format_version": FORMAT_VERSION, **config}
    (folder / CONFIG).write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
    write_tensors(tensors, folder / MODEL)


def read_config(folder: Path) -> dict[str, Any]:
    """Read the config of a folder and check its format and version."""
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
    # safetensors rejects views and shared memory: each tensor is stored by itself.
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


def _read_checked(path: Path, expected: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Read tensors that must have the names, shapes and dtypes of `expected`, and be finite."""
    tensors = read_tensors(path)
    missing, foreign = sorted(set(expected) - set(tensors)), sorted(set(tensors) - set(expected))
    if missing or foreign:
        parts = ([f"lacks {missing}"] if missing else []) + ([f"has unknown {foreign}"] if foreign else [])
        raise StorageError(f"{path} {' and '.join(parts)}")
    for name, tensor in tensors.items():
        want = expected[name]
        if tensor.shape != want.shape or tensor.dtype != want.dtype:
            raise StorageError(
                f"{path}: '{name}' should be {want.dtype} of shape {tuple(want.shape)}, "
                f"is {tensor.dtype} of shape {tuple(tensor.shape)}"
            )
        if not bool(torch.isfinite(tensor).all()):
            raise StorageError(f"{path}: '{name}' has entries that are not finite")
    return tensors
