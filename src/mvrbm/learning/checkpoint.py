"""Checkpoints: everything that a training run needs to continue as if it had never stopped.

A folder of checkpoints holds one folder per checkpoint, `update-000001000`, each with `config.json` and
`model.safetensors`, a model folder, and `trainer.json` and `trainer.safetensors`. A checkpoint is written under another
name and then renamed: a folder of that name is complete.
"""

from __future__ import annotations

import dataclasses
import json
import os
import re
import shutil
import tempfile
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from torch import Tensor
from torch.optim import Optimizer

from mvrbm import saving
from mvrbm.errors import StorageError
from mvrbm.io.atomic import finish_folder
from mvrbm.learning.recipe import Recipe
from mvrbm.learning.state import TrainState, is_factor

_NAME = re.compile(r"update-(\d{9,})")
_STAGING = ".writing-"
_COUNTER = "(counter)"
_OWN_RULE = "recipe"  # instead of an optimiser's class

#: The :class:`~mvrbm.learning.Trainer` that is saved: its module imports this one, so it is not named in the types.
Run = Any


def save(run: Run, folder: str | os.PathLike[str], keep: int) -> Path:
    """Write a checkpoint; see :meth:`Trainer.save`. All processes take part, and the main one writes."""
    target = Path(folder) / f"update-{run.state.update:09d}"
    tensors, plain = _tensors_of(run), _plain_of(run)
    with run.world.raise_together(StorageError):
        if run.world.is_main:
            _write(run, target, tensors, plain, keep)
    return target


def _write(run: Run, target: Path, tensors: dict[str, Tensor], plain: dict[str, Any], keep: int) -> None:
    home = target.parent
    try:
        home.mkdir(parents=True, exist_ok=True)
        for leftover in home.glob(f"{_STAGING}*"):  # of a run that was killed while it wrote
            shutil.rmtree(leftover, ignore_errors=True)
        if target.exists():
            return
        staging = Path(tempfile.mkdtemp(prefix=_STAGING, dir=home))
        try:
            saving.write_machine(run.state.machine, staging)
            saving.write_tensors(tensors, staging / "trainer.safetensors")
            (staging / "trainer.json").write_text(json.dumps(plain, indent=1) + "\n", encoding="utf-8")
            finish_folder(staging)
            staging.rename(target)
        finally:
            shutil.rmtree(staging, ignore_errors=True)
        for old in _all(home)[:-keep]:
            doomed = old.rename(home / f"{_STAGING}{old.name}")  # a folder with a checkpoint's name stays complete
            shutil.rmtree(doomed, ignore_errors=True)
    except (OSError, SafetensorError) as error:
        reason = getattr(error, "strerror", None) or error
        raise StorageError(f"checkpoint {target} cannot be written: {reason}") from error


def _tensors_of(run: Run) -> dict[str, Tensor]:
    state, axis = run.state, run.negative.chain_axis
    chains = {name: chain for name, chain in state.chains.items() if chain.ndim}  # the others are counters
    gathered = {name: torch.cat(run.world.gather(chain.movedim(axis, 0))) for name, chain in chains.items()}
    groups = {
        # Between epochs, and at an epoch's end, the stream of the order stands where the next epoch begins.
        "order": run.epoch_order,
        "chains": state.chains | {name: chain.movedim(0, axis).contiguous() for name, chain in gathered.items()},
        "momenta": state.momenta,
    }
    for name, part in state.rng.state_dict().items():
        for rank, own in enumerate(run.world.gather(part.reshape(-1))):
            groups.setdefault(f"noise.{rank}", {})[name] = own.reshape(part.shape)
    if run.optimizer is not None:
        for index, entries in run.optimizer.state_dict()["state"].items():
            groups[f"optimizer.{index}"] = {key: value for key, value in entries.items() if isinstance(value, Tensor)}
    tensors = {}
    if state.centring is not None:
        groups["centre"] = state.centring.centre
        if state.centring.hidden is not None:
            tensors["hidden_offset"] = state.centring.hidden
    for prefix, group in groups.items():
        tensors |= {f"{prefix}.{name}": tensor for name, tensor in group.items()}
    return tensors


def _plain_of(run: Run) -> dict[str, Any]:
    state, optimizer = run.state, run.optimizer
    stored: dict[str, Any] = {"kind": _OWN_RULE, "scalars": {}, "groups": []}
    if optimizer is not None:
        content = optimizer.state_dict()
        stored["kind"] = type(optimizer).__name__
        for index, entries in content["state"].items():
            scalars = {key: value for key, value in entries.items() if not isinstance(value, Tensor)}
            stored["scalars"][str(index)] = scalars
        for group in content["param_groups"]:
            stored["groups"].append({key: value for key, value in group.items() if key != "params"})
    return {
        "epoch": state.epoch,
        "batch": state.batch,
        "update": state.update,
        "processes": run.world.size,
        "batches_per_epoch": run.batches_per_epoch,
        "scheduled": run.scheduled_epochs,
        "recipe_asked": run.requested_recipe.config(),
        "recipe": run.recipe.config(),
        "history": run.history,
        "optimizer": stored,
        "scheduler": None if run.scheduler is None else _to_plain(run.scheduler.state_dict()),
        "callbacks": [{"kind": type(call).__name__, "state": call.state_dict()} for call in run.callbacks],
    }


def newest(folder: str | os.PathLike[str]) -> Path | None:
    """Return the newest checkpoint under a folder, None if there is none."""
    return next(reversed(_all(Path(folder))), None)


def _all(home: Path) -> list[Path]:
    if not home.is_dir():
        return []
    found = [path for path in home.iterdir() if path.is_dir() and _NAME.fullmatch(path.name)]
    return sorted(found, key=lambda path: int(path.name.removeprefix("update-")))


def read_plain(path: Path) -> dict[str, Any]:
    """Read the settings and counters of a checkpoint, and the requested recipe as a :class:`Recipe`."""
    plain = saving.read_json(path / "trainer.json", largest=None)  # it holds the history
    try:
        return {**plain, "recipe_asked": Recipe.from_config(plain["recipe_asked"])}
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise StorageError(f"{path / 'trainer.json'} is damaged: it does not describe a recipe ({error})") from error


def read(run: Run, path: Path) -> Stored:
    """Read a checkpoint of the same machine and recipe, and set the machine's parameters."""
    plain = read_plain(path)
    tensors = saving.read_tensors(path / "trainer.safetensors")
    config, now = saving.read_config(path), saving.machine_config(run.state.machine)
    if different := [key for key, value in now.items() if config.get(key) != json.loads(json.dumps(value))]:
        raise StorageError(f"{path} is a checkpoint of another machine: its {', '.join(different)} differ")
    requested, stored = run.requested_recipe.config(), plain["recipe_asked"].config()
    if keys := sorted(key for key in requested if key != "n_epochs" and requested[key] != stored[key]):
        raise StorageError(f"{path} was made with another recipe: {', '.join(keys)} differ")
    run.state.machine.load_state_dict(saving.read_machine(path).state_dict())
    return Stored(plain, tensors, path)


@dataclass(frozen=True)
class Stored:
    """A checkpoint that was read, to be restored when the training run has been set up."""

    plain: dict[str, Any]
    tensors: dict[str, Tensor]
    path: Path

    def restore(self, run: Run) -> tuple[bool, bool]:
        """Set a training run to where the checkpoint was taken.

        Return whether the number of processes is the same, and whether it was taken after the last batch of an epoch.
        """
        plain, state, world = self.plain, run.state, run.world
        like = state.machine.like
        try:
            state.machine.load_state_dict(saving.read_machine(self.path).state_dict())
            state.epoch, state.batch, state.update = plain["epoch"], plain["batch"], plain["update"]
            run.scheduled_epochs = plain["scheduled"]
            run.history = list(plain["history"])
            run.recipe = dataclasses.replace(run.recipe, learning_rate=plain["recipe"]["learning_rate"])
            same_world = bool(plain["processes"] == world.size)
            state.chains, axis = {}, run.negative.chain_axis
            for name, chain in _under(self.tensors, "chains").items():
                own = chain.movedim(axis, 0)[world.part_of(chain.shape[axis])].movedim(0, axis) if chain.ndim else chain
                state.chains[name] = own.to(like.device, copy=True, memory_format=torch.contiguous_format)
            if same_world:
                state.rng.load_state_dict(_under(self.tensors, f"noise.{world.rank}"))
            else:
                state.rng = run.rng_from(state.update)
            run.order_rng.load_state_dict(_under(self.tensors, "order"))
            self._restore_steps(run)
            if state.centring is not None:
                state.centring.centre = {n: t.to(like) for n, t in _under(self.tensors, "centre").items()}
                offset = self.tensors.get("hidden_offset")
                state.centring.hidden = None if offset is None else offset.to(like)
            states = list(plain["callbacks"])
            for callback in run.callbacks:  # some may be new, some may be gone
                own_state = next((one for one in states if one["kind"] == type(callback).__name__), None)
                if own_state is not None:
                    states.remove(own_state)
                    callback.load_state_dict(own_state["state"])
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise StorageError(f"{self.path} does not fit this trainer: {error}") from error
        return same_world, plain["batch"] > 0 and plain["batch"] == plain.get("batches_per_epoch")

    def _restore_steps(self, run: Run) -> None:
        """Restore momenta, or the state of an optimiser and a scheduler."""
        plain, state = self.plain["optimizer"], run.state
        if run.optimizer is None:
            if plain["kind"] != _OWN_RULE and "n_iter" not in self.plain["recipe"]:  # version 0.1 always wrote SGD
                raise ValueError(f"its optimiser is {plain['kind']}, but no optimiser was given")
            momenta = _under(self.tensors, "momenta") or self._momenta_of_version_0_1(state)
            state.momenta = {name: momentum.to(state.machine.like) for name, momentum in momenta.items()}
            return
        _restore_optimizer(run.optimizer, plain, _under(self.tensors, "optimizer"))
        if run.scheduler is not None:
            run.optimizer._opt_called = self.plain["update"] > 0  # otherwise it warns
            run.scheduler.load_state_dict(_from_plain(self.plain["scheduler"]))

    def _momenta_of_version_0_1(self, state: TrainState) -> dict[str, Tensor]:
        """Return the momenta that version 0.1 saved as those of an optimiser, factors first."""
        learned = state.learned
        names = [name for name in learned if is_factor(name)] + [name for name in learned if not is_factor(name)]
        found = {name: self.tensors.get(f"optimizer.{index}.momentum_buffer") for index, name in enumerate(names)}
        return {name: momentum for name, momentum in found.items() if momentum is not None}


def _restore_optimizer(optimizer: Optimizer, plain: dict[str, Any], tensors: dict[str, Tensor]) -> None:
    if plain["kind"] != type(optimizer).__name__:
        raise ValueError(f"its optimiser is {plain['kind']}, not {type(optimizer).__name__}")
    state: dict[int, dict[str, Any]] = {int(index): dict(entries) for index, entries in plain["scalars"].items()}
    for name, tensor in tensors.items():
        index, key = name.split(".", 1)
        state.setdefault(int(index), {})[key] = tensor
    current = optimizer.state_dict()["param_groups"]
    groups = [{**stored, "params": now["params"]} for stored, now in zip(plain["groups"], current, strict=True)]
    optimizer.load_state_dict({"state": state, "param_groups": groups})


def _to_plain(value: Any) -> Any:
    """Return a value for JSON, with counters (of milestones, in schedulers) as pairs, since JSON keys are text."""
    if isinstance(value, Counter):
        return {_COUNTER: list(value.items())}
    if isinstance(value, dict):
        return {key: _to_plain(entry) for key, entry in value.items()}
    return [_to_plain(entry) for entry in value] if isinstance(value, list | tuple) else value


def _from_plain(value: Any) -> Any:
    """Undo :func:`_to_plain`."""
    if isinstance(value, dict):
        if _COUNTER in value:
            return Counter(dict(value[_COUNTER]))
        return {key: _from_plain(entry) for key, entry in value.items()}
    return [_from_plain(entry) for entry in value] if isinstance(value, list) else value


def _under(tensors: dict[str, Tensor], prefix: str) -> dict[str, Tensor]:
    start = f"{prefix}."
    return {name.removeprefix(start): tensor for name, tensor in tensors.items() if name.startswith(start)}
