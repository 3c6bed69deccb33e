"""Save models to folders that contain `config.json` and `model.safetensors`, and load models from such folders.

Folders are written atomically, and nothing is pickled. Before a model is built, the format, its version, and the names,
shapes and dtypes of all tensors are validated. Classes that can be saved register their loaders with :func:`register`,
so this module does not have to import them. :mod:`mvrbm.training.checkpoints` writes training checkpoints, and
:mod:`mvrbm.export` writes other formats.
"""

import contextlib
import json
import os
import shutil
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor, nn

from mvrbm import validation
from mvrbm.card_signature import is_unedited_card
from mvrbm.couplings import COUPLINGS, Coupling, make_coupling
from mvrbm.devices import resolve_device
from mvrbm.errors import StorageError
from mvrbm.io.atomic import recover_folder, replace_folder
from mvrbm.io.untrusted import Budget, check_regular_file
from mvrbm.machine import BoltzmannMachine
from mvrbm.random import RandomSource
from mvrbm.units import Unit, make_unit, unit_names
from mvrbm.units.base import LARGEST_PARAMETER

__all__ = ["load", "register", "save"]

FORMAT = "mvrbm"
FORMAT_VERSION = 1
CONFIG = "config.json"
MODEL = "model.safetensors"
#: Persistent chains used to start sampling. Only models trained with persistent chains have this file.
CHAINS = "chains.safetensors"
#: Model card written by :mod:`mvrbm.model_card`.
CARD = "README.md"
#: Config entry that describes an estimator by its ``class`` and ``params``. Absent for plain machines.
ESTIMATOR = "estimator"
#: Config entry that describes several machines, such as a stack from bottom to top.
STACK = "stack"
#: Name under which the checkpoint loader is registered.
CHECKPOINT = "checkpoint"

#: Function that loads an object from a folder: (folder, config, device) -> object.
Loader = Callable[[Path, dict[str, Any], str | torch.device], Any]
Tensors = dict[str, Tensor]
Registered = TypeVar("Registered", bound=Callable[..., Any])

_LOADERS: dict[str, Loader] = {}
_DTYPES = {"float32": torch.float32, "float64": torch.float64}
# Config entry of a unit or a coupling that is not part of this package: the module that defines its class.
_MODULE = "module"
# Maximum size of a config file in bytes.
_LARGEST_CONFIG = 16 * 2**20
# Prefix for tensor names if a folder contains several machines.
_STACKED = "machines."
# Number of samples to propagate through a loaded stack, to check that the activations do not become too large.
_EXAMPLES = 4


def register(name: str) -> Callable[[Registered], Registered]:
    """Register a loader for a class name in `config.json`, or for checkpoints (``"checkpoint"``).

    This is a decorator for a function ``(folder, config, device) -> object``, or for a class that has a class method
    `from_folder` with that signature.
    """

    def decorate(target: Registered) -> Registered:
        _LOADERS[name] = getattr(target, "from_folder", target)
        return target

    return decorate


def load(folder: str | os.PathLike[str], device: str | torch.device = "auto") -> Any:
    """Load a model from a folder.

    The loader for its class must already be registered. :func:`mvrbm.load` ensures this.
    """
    folder = recover_folder(Path(folder))
    if _is_checkpoint(folder):
        return _loader_of(CHECKPOINT, folder)(folder, {}, device)
    config = read_config(folder)
    described = config.get(ESTIMATOR)
    if described is None:
        return read_machine(folder).to(resolve_device(device))
    if not isinstance(described, dict) or not isinstance(described.get("class"), str):
        raise StorageError(f"{folder / CONFIG} is corrupted because it does not contain the estimator's class name")
    loader = _loader_of(described["class"], folder)
    resolve_device(device)  # Check the device here, so that an invalid device is not reported as a corrupted folder.
    try:
        return loader(folder, config, device)
    except StorageError:
        raise
    except (ArithmeticError, LookupError, TypeError, ValueError, AttributeError) as error:
        raise StorageError(f"the estimator's description in {folder} is corrupted: {error}") from error


def save(model: Any, folder: str | os.PathLike[str], *, overwrite: bool = False) -> Path:
    """Save a machine or an estimator to a folder that :func:`mvrbm.load` can read.

    Parameters
    ----------
    model : BoltzmannMachine or estimator
        A machine, or any object with a ``save(folder)`` method.
    folder : path
        Output folder. If it contains files that are not part of a model, `StorageError` is raised.
    overwrite : bool
        Whether to replace an existing model in the folder. If False, an existing model raises `StorageError`.

    Returns
    -------
    pathlib.Path
        The folder.

    Examples
    --------
    >>> import tempfile
    >>> import mvrbm
    >>> machine = mvrbm.models.mvrbm((8, 8), (5, 5))
    >>> with tempfile.TemporaryDirectory() as place:
    ...     folder = mvrbm.save(machine, f"{place}/model")
    ...     again = mvrbm.load(folder, device="cpu")
    >>> again.n_parameters
    169
    """
    if isinstance(model, BoltzmannMachine):
        with replace_model(folder, overwrite=overwrite) as staging:
            write_machine(model, staging)
    elif callable(getattr(model, "save", None)):
        model.save(folder, **({"overwrite": True} if overwrite else {}))
    else:
        raise StorageError(
            f"{type(model).__name__} objects cannot be saved because they are not machines and have no save method"
        )
    return Path(folder)


def _is_checkpoint(folder: Path) -> bool:
    return (folder / "trainer.json").is_file() or (
        folder.is_dir() and not (folder / CONFIG).exists() and any(folder.glob("update-*/trainer.json"))
    )


def _loader_of(name: str, folder: Path) -> Loader:
    if name not in _LOADERS:
        known = ", ".join(sorted(set(_LOADERS) - {CHECKPOINT}))
        raise StorageError(
            f"{folder} contains '{name:.100}', which this version cannot load. Supported classes: {known}"
        )
    return _LOADERS[name]


@contextlib.contextmanager
def replace_model(folder: str | os.PathLike[str], *, overwrite: bool = False) -> Iterator[Path]:
    """Context manager that creates a temporary folder and, on success, replaces `folder` with it.

    A model card in `folder` that was edited is kept, with a warning. Raises StorageError if the folder contains a model
    and `overwrite` is False.
    """

    def replaceable(target: Path) -> bool:
        if is_replaceable(target) and not overwrite:
            raise StorageError(f"{folder} already contains a model; pass overwrite=True to replace it")
        return is_replaceable(target)

    with replace_folder(folder, replaceable) as staging:
        yield staging
        card = Path(folder, CARD)
        if card.exists() and not _is_unedited(card):
            shutil.copyfile(card, staging / CARD)
            warnings.warn(f"{card} was edited, so it is kept; remove it to have it replaced", stacklevel=3)


def is_replaceable(folder: Path) -> bool:
    """Return whether a folder is empty or contains only a model."""
    names = {entry.name for entry in folder.iterdir()}
    if not names:
        return True
    known = {CONFIG, MODEL, CHAINS, CARD}
    return names <= known and CONFIG in names and read_json(folder / CONFIG).get("format") == FORMAT


def _is_unedited(card: Path) -> bool:
    check_regular_file(card, StorageError)
    return is_unedited_card(card.read_text(encoding="utf-8", errors="replace"))


def write_machine(machine: BoltzmannMachine, folder: Path, extra: Mapping[str, Any] | None = None) -> None:
    """Write a machine's config and parameters to an existing folder. `extra` contains additional config entries."""
    _write({**machine_config(machine), **(extra or {})}, machine.state_dict(), folder)


def read_machine(folder: Path) -> BoltzmannMachine:
    """Read a machine from a folder written by :func:`write_machine`."""
    (machine,) = _shapes_of([read_config(folder)], folder)
    _fill(machine, folder)
    return machine


def machine_config(machine: BoltzmannMachine) -> dict[str, Any]:
    """Return the config from which a machine can be rebuilt. Parameter values are not included."""
    return {
        "dtype": str(machine.like.dtype).removeprefix("torch."),
        "visible": {name: _unit_config(unit) for name, unit in machine.layers.items()},
        "hidden": _unit_config(machine.hidden),
        "couplings": {
            name: {"coupling": link.name, **link.config(), **_module_of(link)} for name, link in machine.links.items()
        },
    }


def machine_structure(machine: BoltzmannMachine) -> dict[str, Any]:
    """Return the config of a machine without the scale of bytes, which depends on the data only."""
    config = machine_config(machine)
    return {**config, "visible": {name: without_byte_scale(unit) for name, unit in config["visible"].items()}}


def without_byte_scale(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return the config of a unit without the scale of bytes."""
    return {key: value for key, value in config.items() if key != "byte_scale"}


def _shapes_of(configs: Sequence[Mapping[str, Any]], folder: Path) -> list[BoltzmannMachine]:
    """Build machines on the meta device and check that the parameter file is large enough for their parameters.

    To load the parameters, pass the machines to :func:`_fill`.
    """
    path, weights = folder / CONFIG, folder / MODEL
    stored, described = check_regular_file(weights, StorageError), 0
    try:
        budget, machines = Budget(path, weights, error=StorageError), []
        for config in configs:
            with torch.device("meta"):
                machine = _machine_of(*_parts(config)).to(_DTYPES[config["dtype"]])
            machines.append(machine)
            n_numbers = sum(parameter.numel() for parameter in machine.parameters())
            described += n_numbers * machine.like.element_size()
            if described > stored:
                raise StorageError(
                    f"the config describes {n_numbers:,} parameters ({described:,} bytes), but {weights.name} has only "
                    f"{stored:,} bytes and may be truncated"
                )
            budget.spend(machine.bytes_to_check, "to check that the energy of coupled Gaussian layers is bounded")
        return machines
    except StorageError as error:
        raise StorageError(f"{path}: {error}") from error
    except (KeyError, TypeError, ValueError, AttributeError, RuntimeError, OverflowError, MemoryError) as error:
        reason = f"'{error.args[0]}' is missing or unknown" if isinstance(error, KeyError) else str(error)
        raise StorageError(f"{path} is not a valid model description: {reason}") from error


def _machine_of(visible: dict[str, Unit], hidden: Unit, links: dict[str, Coupling]) -> BoltzmannMachine:
    for name, link in links.items():
        # Allocate the factors here, because the machine would initialize them randomly.
        link.allocate(visible[name].shape, hidden.shape)
    return BoltzmannMachine(visible, hidden, links)


def _parts(config: Mapping[str, Any]) -> tuple[dict[str, Unit], Unit, dict[str, Coupling]]:
    return (
        {name: _unit(entry) for name, entry in config["visible"].items()},
        _unit(config["hidden"]),
        {name: make_coupling(_without_module(entry)) for name, entry in config["couplings"].items()},
    )


def _module_of(part: Unit | Coupling) -> dict[str, str]:
    """Return a config entry that names the module of a unit or coupling, or an empty dict for built-in classes."""
    module = type(part).__module__
    return {} if module.startswith(f"{__package__}.") else {_MODULE: module}


def _unit_config(unit: Unit) -> dict[str, Any]:
    config = {"unit": unit.name, **unit.config(), **_module_of(unit)}
    return config if unit.byte_scale == type(unit).byte_scale else {**config, "byte_scale": unit.byte_scale}


def _without_module(entry: Mapping[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in entry.items() if key != _MODULE}


def _check_modules(config: Mapping[str, Any], path: Path) -> None:
    """Raise StorageError if a model uses a unit or coupling from an external module that has not been imported."""
    parts = config.get(STACK)
    entries: list[Any] = []
    for machine in [config, *(parts if isinstance(parts, list) else [])]:
        for value in map(machine.get, ("visible", "hidden", "couplings")) if isinstance(machine, Mapping) else ():
            entries += [value, *value.values()] if isinstance(value, Mapping) else []
    for entry in entries:
        if not isinstance(entry, Mapping) or not isinstance(module := entry.get(_MODULE), str):
            continue
        for kind, names in (("unit", unit_names()), ("coupling", list(COUPLINGS))):
            if kind in entry and entry[kind] not in names:
                advice = f"import it before loading, or pass --import {module} on the command line"
                if module == "__main__":
                    advice = "define it in a module, import that module, and save the model again"
                raise StorageError(f"{path} uses the {kind} {entry[kind]!r} from the module {module!r}; {advice}")


def _unit(entry: Mapping[str, Any]) -> Unit:
    options = _without_module(entry)
    scale = options.pop("byte_scale", None)
    unit = make_unit(options.pop("unit"), **options)
    if scale is not None:
        unit.byte_scale = validation.number(scale, "byte_scale", exclude_low=True)
    return unit


def _fill(module: nn.Module, folder: Path, prefix: str = "", more: Mapping[str, Tensor] | None = None) -> Tensors:
    """Load the parameters of machines built by :func:`_shapes_of` and return the additional tensors named in `more`.

    In the file, the parameter names start with `prefix`. Raises StorageError if a value is too large for stable
    computation.
    """
    expected = {f"{prefix}{name}": tensor for name, tensor in module.state_dict().items()}
    tensors = _read_checked(folder / MODEL, {**expected, **(more or {})})
    module.load_state_dict({name.removeprefix(prefix): tensors.pop(name) for name in expected}, assign=True)
    try:
        for name, tensor in tensors.items():
            if tensor.numel() and not float(tensor.abs().max()) <= LARGEST_PARAMETER:
                raise ValueError(
                    f"'{name}' contains a value of magnitude {float(tensor.abs().max()):.3g}, which is too large"
                )
        for machine in module.modules():
            if isinstance(machine, BoltzmannMachine):
                machine.check_parameters()
    except (ValueError, RuntimeError) as error:  # PyTorch raises RuntimeError if an eigenvalue does not converge.
        raise StorageError(f"{folder / MODEL}: {error}") from error
    return tensors


def write_machines(
    machines: Sequence[BoltzmannMachine],
    folder: Path,
    extra: Mapping[str, Any],
    more: Mapping[str, Tensor] | None = None,
) -> None:
    """Write the config and parameters of several machines to an existing folder.

    `extra` contains additional config entries. `more` contains additional tensors with the dtype of the first machine.
    """
    own = {f"{_STACKED}{name}": tensor for name, tensor in nn.ModuleList(machines).state_dict().items()}
    _write({STACK: [machine_config(machine) for machine in machines], **extra}, {**own, **(more or {})}, folder)


def read_machines(
    folder: Path, more: Callable[[Sequence[BoltzmannMachine]], Mapping[str, tuple[int, ...]]] | None = None
) -> tuple[list[BoltzmannMachine], Tensors]:
    """Read machines and additional tensors from a folder written by :func:`write_machines`.

    `more` is called with the machines before their parameters are loaded, and returns the names and shapes of the
    additional tensors. If `more` is None, there are no additional tensors.
    """
    parts = read_config(folder).get(STACK)
    if not isinstance(parts, list) or not parts or not all(isinstance(part, dict) for part in parts):
        raise StorageError(f"{folder} does not contain a list of machines")
    machines = _shapes_of(parts, folder)
    shapes = {} if more is None else more(machines)
    others = {name: torch.empty(shape, dtype=machines[0].like.dtype, device="meta") for name, shape in shapes.items()}
    return machines, _fill(nn.ModuleList(machines), folder, _STACKED, others)


def read_stack(
    folder: Path, more: Callable[[Sequence[BoltzmannMachine]], Mapping[str, tuple[int, ...]]] | None = None
) -> tuple[list[BoltzmannMachine], Tensors]:
    """Read a stack of machines, ordered from bottom to top. See :func:`read_machines`.

    Raise StorageError if the visible layer of a machine does not match the hidden layer of the machine below it.
    """
    machines, others = read_machines(folder, more)
    _check_joints(machines, folder)
    _check_growth(machines, folder)
    return machines, others


def _check_joints(machines: Sequence[BoltzmannMachine], folder: Path) -> None:
    for number, machine in enumerate(machines):
        if len(machine.layers) != 1:
            raise StorageError(
                f"machines in the stack in {folder} must have one visible layer, got {list(machine.layers)}"
            )
        (unit,) = machine.layers.values()
        if number and unit.shape != machines[number - 1].hidden.shape:
            raise StorageError(
                f"the visible layer of machine {number} in {folder} does not match the hidden layer below it"
            )


@torch.no_grad()
def _check_growth(machines: Sequence[BoltzmannMachine], folder: Path) -> None:
    """Raise StorageError if activations become too large when they are propagated up a stack of machines.

    This can happen even if no single machine has large parameters.
    """
    (unit,) = machines[0].layers.values()
    try:
        state = unit.example(_EXAMPLES, RandomSource(0))
        for machine in machines:
            state = machine.hidden_mean(state, check=False)
            if not float(state.abs().max()) <= LARGEST_PARAMETER:
                raise ValueError("the activations become too large")
    except (ValueError, RuntimeError) as error:
        raise StorageError(f"hidden activations of the model in {folder} cannot be computed: {error}") from error


def _write(config: Mapping[str, Any], tensors: Mapping[str, Tensor], folder: Path) -> None:
    content = {"format": FORMAT, "format_version": FORMAT_VERSION, **config}
    (folder / CONFIG).write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
    write_tensors(tensors, folder / MODEL)


def read_config(folder: Path) -> dict[str, Any]:
    """Read the config from a model folder and validate its format and version."""
    path = folder / CONFIG
    if not folder.is_dir():
        raise StorageError(
            f"{folder} is not a model folder because it {'is a file' if folder.exists() else 'does not exist'}"
        )
    if not path.exists():
        raise StorageError(f"{folder} is not a model folder: {CONFIG} is missing")
    config = read_json(path)
    if config.get("format") != FORMAT:
        raise StorageError(f"{path} does not describe an mvrbm model")
    if config.get("format_version") != FORMAT_VERSION:
        raise StorageError(
            f"{path} has format version {config.get('format_version')!r}, but this version of mvrbm reads version "
            f"{FORMAT_VERSION}; install the version of mvrbm that wrote the model"
        )
    _check_modules(config, path)
    return config


def read_json(path: Path, largest: int | None = _LARGEST_CONFIG) -> dict[str, Any]:
    """Read a JSON object from a file. Raise StorageError if the file is larger than `largest` bytes."""
    size, budget = check_regular_file(path, StorageError), Budget(path, error=StorageError)
    if largest is not None and size > largest:
        raise StorageError(f"{path} is too large for a config file ({size:,} bytes)")
    try:
        content = path.read_bytes()
        # Upper bounds on the memory used by Python objects (dicts, lists, numbers and strings) and by the text itself.
        budget.spend(240 * content.count(b"{") + 90 * content.count(b"[") + 40 * content.count(b","), f"{path}: JSON")
        budget.spend(2 * len(content), f"{path}: JSON")
        found = json.loads(content)
    except OSError as error:
        raise StorageError(f"{path} cannot be read: {error.strerror or error}") from error
    except StorageError:
        raise
    except (ValueError, RecursionError) as error:
        raise StorageError(f"{path} is not valid JSON ({error})") from error
    if not isinstance(found, dict):
        raise StorageError(f"{path} is corrupted because it does not contain a JSON object")
    return found


def write_tensors(tensors: Mapping[str, Tensor], path: Path) -> None:
    """Write tensors to a safetensors file."""
    # Copy each tensor, because safetensors rejects views and shared memory.
    save_file({name: tensor.detach().cpu().clone().contiguous() for name, tensor in tensors.items()}, path)


def read_tensors(path: Path) -> Tensors:
    """Read all tensors from a safetensors file."""
    with _opened(path) as file:
        return {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118


@contextlib.contextmanager
def _opened(path: Path) -> Iterator[Any]:
    check_regular_file(path, StorageError)
    try:
        with safe_open(path, framework="pt") as file:
            yield file
    except StorageError:
        raise
    except (SafetensorError, OSError, ValueError, TypeError, RuntimeError, KeyError, AttributeError) as error:
        raise StorageError(f"{path} is corrupted or is not a safetensors file: {error}") from error


def _read_checked(path: Path, expected: Mapping[str, Tensor]) -> Tensors:
    """Read tensors and check that they are finite and match the names, shapes and dtypes in `expected`."""
    with _opened(path) as file:
        names = set(file.keys())
        missing, foreign = sorted(set(expected) - names), sorted(names - set(expected))
        if missing or foreign:
            parts = [f"lacks tensors {missing}"] if missing else []
            parts += [f"contains unknown tensors {foreign}"] if foreign else []
            raise StorageError(f"{path} {' and '.join(parts)}")
        tensors = {}
        for name, want in expected.items():
            shape = tuple(file.get_slice(name).get_shape())
            if shape != want.shape:  # Check the shape before reading the tensor.
                raise StorageError(f"'{name}' in {path} should have shape {tuple(want.shape)}, but has shape {shape}")
            tensor = file.get_tensor(name)
            if tensor.dtype != want.dtype:
                raise StorageError(f"'{name}' in {path} should have dtype {want.dtype}, but has dtype {tensor.dtype}")
            if not bool(torch.isfinite(tensor).all()):
                raise StorageError(f"'{name}' in {path} contains values that are not finite")
            tensors[name] = tensor.clone()  # The tensor is a view into the file, which may change.
    return tensors
