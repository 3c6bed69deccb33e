"""Save models to folders with `config.json` and `model.safetensors`, and load them.

Folders are written atomically, and nothing is ever pickled. Loading checks the format and its version, and the names,
shapes and dtypes of all tensors, before it builds a model. Classes that can be saved register their loaders with
:func:`register`, so that this module does not import them. :mod:`mvrbm.training.checkpoints` writes checkpoints of
training runs, and :mod:`mvrbm.export` writes other formats.
"""

import contextlib
import json
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
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
from mvrbm.io.atomic import recover_folder, replace_folder
from mvrbm.io.untrusted import Budget, check_regular_file
from mvrbm.machine import BoltzmannMachine
from mvrbm.random import RandomSource
from mvrbm.units import Unit, make_unit
from mvrbm.units.base import LARGEST_PARAMETER

__all__ = ["load", "register", "save"]

FORMAT = "mvrbm"
FORMAT_VERSION = 1
CONFIG = "config.json"
MODEL = "model.safetensors"
#: Persistent chains, from which sampling starts. Only models that were trained with persistent chains have this file.
CHAINS = "chains.safetensors"
#: The model card, which :mod:`mvrbm.hub` writes.
CARD = "README.md"
#: First entry of our model cards, which distinguishes them from other README files.
CARD_MARK = "library_name: mvrbm"
#: Entry of the config that describes an estimator by its ``class`` and ``params``. Plain machines do not have it.
ESTIMATOR = "estimator"
#: Entry of the config that describes several machines, such as a stack from bottom to top.
STACK = "stack"
#: Name under which the loader of checkpoints is registered.
CHECKPOINT = "checkpoint"

#: Loads an object from a folder: (folder, config, device) -> object.
Loader = Callable[[Path, dict[str, Any], str | torch.device], Any]
Tensors = dict[str, Tensor]
Registered = TypeVar("Registered", bound=Callable[..., Any])

_LOADERS: dict[str, Loader] = {}
_DTYPES = {"float32": torch.float32, "float64": torch.float64}
# Largest size, in bytes, of a config.
_LARGEST_CONFIG = 16 * 2**20
# Prefix of the names of tensors if there are several machines.
_STACKED = "machines."
# Number of samples that are passed through a stack when it is loaded, to check that its numbers stay finite.
_EXAMPLES = 4


def register(name: str) -> Callable[[Registered], Registered]:
    """Register a loader for a class name in `config.json`, or for checkpoints (``"checkpoint"``).

    Decorates a function ``(folder, config, device) -> object``, or a class that has a class method `from_folder` with
    that signature.
    """

    def decorate(target: Registered) -> Registered:
        _LOADERS[name] = getattr(target, "from_folder", target)
        return target

    return decorate


def load(folder: str | os.PathLike[str], device: str | torch.device = "auto") -> Any:
    """Load an object from a folder. Its class must be registered already; see :func:`mvrbm.load`."""
    folder = recover_folder(Path(folder))
    if _is_checkpoint(folder):
        return _loader_of(CHECKPOINT, folder)(folder, {}, device)
    config = read_config(folder)
    described = config.get(ESTIMATOR)
    if described is None:
        return read_machine(folder).to(resolve_device(device))
    if not isinstance(described, dict) or not isinstance(described.get("class"), str):
        raise StorageError(f"{folder / CONFIG} is damaged: it does not name the class of the estimator")
    loader = _loader_of(described["class"], folder)
    resolve_device(device)  # If the device does not exist, raise its error here: the folder is not damaged.
    try:
        return loader(folder, config, device)
    except StorageError:
        raise
    except (ArithmeticError, LookupError, TypeError, ValueError, AttributeError) as error:
        raise StorageError(f"{folder}: the estimator's description is damaged: {error}") from error


def save(model: Any, folder: str | os.PathLike[str]) -> Path:
    """Save a machine or an estimator to a folder, from which :func:`mvrbm.load` loads it.

    Parameters
    ----------
    model : BoltzmannMachine or estimator
        A machine, or any object with a method ``save(folder)``.
    folder : path
        The folder to write. If it holds a model, the model is replaced. If it holds other files, `StorageError` is
        raised.

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
        with replace_model(folder) as staging:
            write_machine(model, staging)
    elif callable(getattr(model, "save", None)):
        model.save(folder)
    else:
        raise StorageError(f"a {type(model).__name__} cannot be saved: it is not a machine and has no save method")
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
    """Create a temporary folder that replaces the model in `folder` when the context ends without an error."""
    return replace_folder(folder, is_replaceable)


def is_replaceable(folder: Path) -> bool:
    """Return whether a folder is empty, or holds only a model."""
    names = {entry.name for entry in folder.iterdir()}
    if not names:
        return True
    if CARD in names and not _is_card(folder / CARD):
        return False
    known = {CONFIG, MODEL, CHAINS, CARD}
    return names <= known and CONFIG in names and read_json(folder / CONFIG).get("format") == FORMAT


def _is_card(path: Path) -> bool:
    check_regular_file(path, StorageError)
    with path.open("rb") as file:
        return file.read(100).startswith(f"---\n{CARD_MARK}\n".encode())


def write_machine(machine: BoltzmannMachine, folder: Path, extra: Mapping[str, Any] | None = None) -> None:
    """Write the two files of a machine into an existing folder. `extra` has additional entries of the config."""
    _write({**machine_config(machine), **(extra or {})}, machine.state_dict(), folder)


def read_machine(folder: Path) -> BoltzmannMachine:
    """Read a machine from a folder."""
    (machine,) = _shapes_of([read_config(folder)], folder)
    _fill(machine, folder)
    return machine


def machine_config(machine: BoltzmannMachine) -> dict[str, Any]:
    """Return a description of a machine without its parameters, from which loading builds it."""
    return {
        "dtype": str(machine.like.dtype).removeprefix("torch."),
        "visible": {name: {"unit": unit.name, **unit.config()} for name, unit in machine.layers.items()},
        "hidden": {"unit": machine.hidden.name, **machine.hidden.config()},
        "couplings": {name: {"coupling": link.name, **link.config()} for name, link in machine.links.items()},
    }


def _shapes_of(configs: Sequence[Mapping[str, Any]], folder: Path) -> list[BoltzmannMachine]:
    """Build machines on the meta device, for :func:`_fill`, after checking that the file can hold their parameters."""
    path, weights = folder / CONFIG, folder / MODEL
    try:
        stored, described = check_regular_file(weights, StorageError), 0
        budget, machines = Budget(path, weights, error=StorageError), []
        for config in configs:
            with torch.device("meta"):
                machine = _machine_of(*_parts(config)).to(_DTYPES[config["dtype"]])
            machines.append(machine)
            n_numbers = sum(parameter.numel() for parameter in machine.parameters())
            described += n_numbers * machine.like.element_size()
            if described > stored:
                raise StorageError(
                    f"describes {n_numbers:,} numbers, {described:,} bytes, but {weights.name} has only {stored:,}: "
                    "truncated?"
                )
            budget.spend(machine.bytes_to_check, "to check that the energy of coupled Gaussian layers is bounded")
        return machines
    except StorageError as error:
        raise StorageError(f"{path}: {error}") from error
    except (KeyError, TypeError, ValueError, AttributeError, RuntimeError, OverflowError, MemoryError) as error:
        reason = f"'{error.args[0]}' is missing or unknown" if isinstance(error, KeyError) else str(error)
        raise StorageError(f"{path}: not a valid model description: {reason}") from error


def _machine_of(visible: dict[str, Unit], hidden: Unit, links: dict[str, Coupling]) -> BoltzmannMachine:
    for name, link in links.items():
        link.allocate(visible[name].shape, hidden.shape)  # The machine would initialize its factors at random.
    return BoltzmannMachine(visible, hidden, links)


def _parts(config: Mapping[str, Any]) -> tuple[dict[str, Unit], Unit, dict[str, Coupling]]:
    return (
        {name: _unit(entry) for name, entry in config["visible"].items()},
        _unit(config["hidden"]),
        {name: make_coupling(dict(entry)) for name, entry in config["couplings"].items()},
    )


def _unit(entry: Mapping[str, Any]) -> Unit:
    options = dict(entry)
    return make_unit(options.pop("unit"), **options)


def _fill(module: nn.Module, folder: Path, prefix: str = "", more: Mapping[str, Tensor] | None = None) -> Tensors:
    """Read the parameters of machines that :func:`_shapes_of` returned, and return the additional tensors `more`.

    `prefix` precedes the names of the parameters in the file. Raises StorageError for values that are finite but too
    large to compute with.
    """
    expected = {f"{prefix}{name}": tensor for name, tensor in module.state_dict().items()}
    tensors = _read_checked(folder / MODEL, {**expected, **(more or {})})
    module.load_state_dict({name.removeprefix(prefix): tensors.pop(name) for name in expected}, assign=True)
    try:
        for name, tensor in tensors.items():
            if tensor.numel() and not float(tensor.abs().max()) <= LARGEST_PARAMETER:
                raise ValueError(f"'{name}' is too large: up to {float(tensor.abs().max()):.3g}")
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
    """Write the two files of several machines into an existing folder.

    `extra` has additional entries of the config, and `more` additional tensors of the dtype of the first machine.
    """
    own = {f"{_STACKED}{name}": tensor for name, tensor in nn.ModuleList(machines).state_dict().items()}
    _write({STACK: [machine_config(machine) for machine in machines], **extra}, {**own, **(more or {})}, folder)


def read_machines(
    folder: Path, more: Callable[[Sequence[BoltzmannMachine]], Mapping[str, tuple[int, ...]]] | None = None
) -> tuple[list[BoltzmannMachine], Tensors]:
    """Read machines and additional tensors from a folder that :func:`write_machines` wrote.

    `more` returns the names and shapes of the additional tensors, given the machines, whose parameters are not read
    yet. Default: there are no additional tensors.
    """
    parts = read_config(folder).get(STACK)
    if not isinstance(parts, list) or not parts or not all(isinstance(part, dict) for part in parts):
        raise StorageError(f"{folder} does not hold several machines")
    machines = _shapes_of(parts, folder)
    shapes = {} if more is None else more(machines)
    others = {name: torch.empty(shape, dtype=machines[0].like.dtype, device="meta") for name, shape in shapes.items()}
    return machines, _fill(nn.ModuleList(machines), folder, _STACKED, others)


def read_stack(
    folder: Path, more: Callable[[Sequence[BoltzmannMachine]], Mapping[str, tuple[int, ...]]] | None = None
) -> tuple[list[BoltzmannMachine], Tensors]:
    """Read the machines of a stack, from bottom to top, whose visible layer is the hidden layer of the one below."""
    machines, others = read_machines(folder, more)
    _check_joints(machines, folder)
    _check_growth(machines, folder)
    return machines, others


def _check_joints(machines: Sequence[BoltzmannMachine], folder: Path) -> None:
    for number, machine in enumerate(machines):
        if len(machine.layers) != 1:
            raise StorageError(f"{folder}: a machine of a stack has one visible layer, got {list(machine.layers)}")
        (unit,) = machine.layers.values()
        if number and unit.shape != machines[number - 1].hidden.shape:
            raise StorageError(f"{folder}: machine {number} does not fit on the one below")


@torch.no_grad()
def _check_growth(machines: Sequence[BoltzmannMachine], folder: Path) -> None:
    """Raise StorageError if values get too large on their way up a stack, although no machine has large parameters."""
    (unit,) = machines[0].layers.values()
    try:
        state = unit.example(_EXAMPLES, RandomSource(0))
        for machine in machines:
            state = machine.hidden_mean(state, check=False)
            if not float(state.abs().max()) <= LARGEST_PARAMETER:
                raise ValueError("they get too large to compute with")
    except (ValueError, RuntimeError) as error:
        raise StorageError(f"{folder}: numbers of hidden layers cannot be computed: {error}") from error


def _write(config: Mapping[str, Any], tensors: Mapping[str, Tensor], folder: Path) -> None:
    content = {"format": FORMAT, "format_version": FORMAT_VERSION, **config}
    (folder / CONFIG).write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
    write_tensors(tensors, folder / MODEL)


def read_config(folder: Path) -> dict[str, Any]:
    """Read the config of a model folder, and check its format and version."""
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
    size, budget = check_regular_file(path, StorageError), Budget(path, error=StorageError)
    if largest is not None and size > largest:
        raise StorageError(f"{path} is too large for a description: {size:,} bytes")
    try:
        content = path.read_bytes()
        # Upper bounds on the memory of Python's objects: dicts, lists, numbers or strings, and the text itself.
        budget.spend(240 * content.count(b"{") + 90 * content.count(b"[") + 40 * content.count(b","), f"{path}: JSON")
        budget.spend(2 * len(content), f"{path}: JSON")
        found = json.loads(content)
    except OSError as error:
        raise StorageError(f"{path} cannot be read: {error.strerror or error}") from error
    except StorageError:
        raise
    except (ValueError, RecursionError) as error:
        raise StorageError(f"{path} is damaged: not valid JSON ({error})") from error
    if not isinstance(found, dict):
        raise StorageError(f"{path} is damaged: a JSON object is expected")
    return found


def write_tensors(tensors: Mapping[str, Tensor], path: Path) -> None:
    """Write tensors to a safetensors file."""
    # safetensors rejects views and shared memory, so each tensor is copied.
    save_file({name: tensor.detach().cpu().clone().contiguous() for name, tensor in tensors.items()}, path)


def read_tensors(path: Path) -> Tensors:
    """Read a safetensors file."""
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
        raise StorageError(f"{path} is damaged or not a safetensors file: {error}") from error


def _read_checked(path: Path, expected: Mapping[str, Tensor]) -> Tensors:
    """Read tensors, and check that they are finite and have the names, shapes and dtypes of `expected`."""
    with _opened(path) as file:
        names = set(file.keys())
        missing, foreign = sorted(set(expected) - names), sorted(names - set(expected))
        if missing or foreign:
            parts = ([f"lacks {missing}"] if missing else []) + ([f"has unknown {foreign}"] if foreign else [])
            raise StorageError(f"{path} {' and '.join(parts)}")
        tensors = {}
        for name, want in expected.items():
            shape = tuple(file.get_slice(name).get_shape())
            if shape != want.shape:  # Check this before the tensor is read.
                raise StorageError(f"{path}: '{name}' should be of shape {tuple(want.shape)}, is of shape {shape}")
            tensor = file.get_tensor(name)
            if tensor.dtype != want.dtype:
                raise StorageError(f"{path}: '{name}' should be {want.dtype}, is {tensor.dtype}")
            if not bool(torch.isfinite(tensor).all()):
                raise StorageError(f"{path}: '{name}' has entries that are not finite")
            tensors[name] = tensor.clone()  # The tensor is a view of the file, which may change.
    return tensors
