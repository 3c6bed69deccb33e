"""Checkpoints: everything that a training run needs to continue as if it had never stopped.

A folder of checkpoints holds one folder per checkpoint, `update-000001000`, each with `config.json` and
`model.safetensors`, a model folder, and `trainer.json` and `trainer.safetensors`. A checkpoint is written under another
name and then renamed: a folder of that name is complete.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import tempfile
from collections import Counter
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from torch import Tensor

from mvrbm import saving
from mvrbm.errors import StorageError
from mvrbm.io.atomic import finish_folder, lock, remove_leftovers
from mvrbm.training.restoring import COUNTER, OWN_RULE, Stored, check_plain, fingerprint

_NAME = re.compile(r"update-(\d{9,})")
_STAGING = ".writing-"

#: The :class:`~mvrbm.training.Trainer` that is saved: its module imports this one, so it is not named in the types.
Run = Any


def save(run: Run, folder: str | os.PathLike[str], keep: int) -> Path:
    """Write a checkpoint; see :meth:`Trainer.save`. All processes take part, and the main one writes."""
    target = Path(folder) / f"update-{run.state.update:09d}"
    tensors, plain = _tensors_of(run), {**_plain_of(run), "settings": fingerprint(run, run.source)}
    with run.world.raise_together(StorageError):
        if run.world.is_main:
            _write(run, target, tensors, plain, keep)
    return target


def _write(run: Run, target: Path, tensors: dict[str, Tensor], plain: dict[str, Any], keep: int) -> None:
    home = target.parent
    try:
        home.mkdir(parents=True, exist_ok=True)
        remove_leftovers(home, _STAGING)  # of a run that was killed while it wrote
        if target.exists():
            return
        staging = Path(tempfile.mkdtemp(prefix=_STAGING, dir=home))
        try:
            with lock(staging):
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
        "chains": state.chains | {name: chain.movedim(0, axis).contiguous() for name, chain in gathered.items()},
        "momenta": state.momenta,
    }
    if run.world.size == 1:  # chains in it are those of one process
        groups["exact"] = state.exact
    if run.optimizer is not None:
        for index, entries in run.optimizer.state_dict()["state"].items():
            groups[f"optimizer.{index}"] = {key: value for key, value in entries.items() if isinstance(value, Tensor)}
    tensors = {}
    if state.centering is not None:
        groups["center"] = state.centering.center
        if state.centering.hidden is not None:
            tensors["hidden_offset"] = state.centering.hidden
    for prefix, group in groups.items():
        tensors |= {f"{prefix}.{name}": tensor for name, tensor in group.items()}
    return tensors


def _plain_of(run: Run) -> dict[str, Any]:
    state, optimizer = run.state, run.optimizer
    stored: dict[str, Any] = {"kind": OWN_RULE, "scalars": {}, "groups": []}
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
    """Read and check the settings and counters of a checkpoint; the requested recipe becomes a :class:`Recipe`."""
    plain = saving.read_json(path / "trainer.json", largest=None)  # it holds the history
    try:
        return check_plain(plain)
    except (KeyError, TypeError, ValueError, AttributeError, OverflowError) as error:
        reason = f"{error} is missing" if isinstance(error, KeyError) else str(error)
        raise StorageError(f"{path / 'trainer.json'} is damaged: {reason}") from error


def read(run: Run, path: Path, force: bool = False) -> Stored:
    """Read a checkpoint of the same machine, and set the machine's parameters."""
    plain = read_plain(path)
    tensors = saving.read_tensors(path / "trainer.safetensors")
    config, now = saving.read_config(path), saving.machine_config(run.state.machine)
    if different := [key for key, value in now.items() if config.get(key) != json.loads(json.dumps(value))]:
        raise StorageError(f"{path} is a checkpoint of another machine: its {', '.join(different)} differ")
    stored = Stored(plain, tensors, path, force)
    stored.check_same(stored.recipe_differences(run.requested_recipe))
    run.state.machine.load_state_dict(saving.read_machine(path).state_dict())
    return stored


def _to_plain(value: Any) -> Any:
    """Return a value for JSON, with counters (of milestones, in schedulers) as pairs, since JSON keys are text."""
    if isinstance(value, Counter):
        return {COUNTER: list(value.items())}
    if isinstance(value, dict):
        return {key: _to_plain(entry) for key, entry in value.items()}
    return [_to_plain(entry) for entry in value] if isinstance(value, list | tuple) else value
