"""Checkpoints: all that a training needs to go on as if it had never stopped.

Under the folder there is one folder a checkpoint, `update-000001000`, each with `config.json` and
`model.safetensors`, which `from_pretrained` reads, and `trainer.json` and `trainer.safetensors`. A
checkpoint is written beside its place and renamed into it: what has its name is whole.
"""

from __future__ import annotations

import dataclasses
import json
import os
import re
import shutil
import tempfile
from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from mvrbm.saving import (
    StorageError,
    finish_folder,
    machine_config,
    read_config,
    read_json,
    read_machine,
    read_tensors,
    write_machine,
    write_tensors,
)

if TYPE_CHECKING:
    from mvrbm.learning.trainer import Trainer

_NAME = re.compile(r"update-(\d{9,})")
_STAGING = ".writing-"
_COUNTER = "(counter)"


def save(trainer: Trainer, folder: str | os.PathLike[str], keep: int) -> Path:
    """Write a checkpoint; see :meth:`Trainer.save`. Of several processes all take part, and the main one writes."""
    target = Path(folder) / f"update-{trainer.update:09d}"
    state = _state(trainer)
    with trainer.world.together(StorageError):
        if trainer.world.is_main:
            _write(trainer, target, state, keep)
    return target


def _write(trainer: Trainer, target: Path, state: tuple[dict[str, Tensor], dict[str, Any]], keep: int) -> None:
    home = target.parent
    try:
        home.mkdir(parents=True, exist_ok=True)
        for leftover in home.glob(f"{_STAGING}*"):  # of a run that was killed while it wrote
            shutil.rmtree(leftover, ignore_errors=True)
        if target.exists():
            return
        staging = Path(tempfile.mkdtemp(prefix=_STAGING, dir=home))
        try:
            tensors, plain = state
            write_machine(trainer.machine, staging)
            write_tensors(tensors, staging / "trainer.safetensors")
            (staging / "trainer.json").write_text(json.dumps(plain, indent=1) + "\n", encoding="utf-8")
            finish_folder(staging)
            staging.rename(target)
        finally:
            shutil.rmtree(staging, ignore_errors=True)
        for old in _all(home)[:-keep]:
            doomed = old.rename(home / f"{_STAGING}{old.name}")  # what has a checkpoint's name is whole, to its end
            shutil.rmtree(doomed, ignore_errors=True)
    except OSError as error:
        raise StorageError(f"checkpoint {target} cannot be written: {error.strerror or error}") from error


def newest(folder: str | os.PathLike[str]) -> Path | None:
    """Return the newest checkpoint under a folder, None if there is none."""
    found = _all(Path(folder))
    return found[-1] if found else None


def _all(home: Path) -> list[Path]:
    if not home.is_dir():
        return []
    found = [path for path in home.iterdir() if path.is_dir() and _NAME.fullmatch(path.name)]
    return sorted(found, key=lambda path: int(path.name.removeprefix("update-")))


def load(trainer: Trainer, path: Path) -> dict[str, Any]:
    """Read a checkpoint and put its machine's parameters in place; return the rest for :func:`restore`."""
    plain = read_json(path / "trainer.json", largest=None)  # it holds the history
    if not isinstance(plain.get("recipe_asked"), dict):
        raise StorageError(f"{path / 'trainer.json'} is damaged: it does not name a recipe")
    tensors = read_tensors(path / "trainer.safetensors")
    config = read_config(path)
    now = machine_config(trainer.machine)
    different = [key for key, value in now.items() if config.get(key) != json.loads(json.dumps(value))]
    if different:
        raise StorageError(f"{path} is a checkpoint of another machine: its {', '.join(different)} differ")
    asked, stored = _without_n_iter(trainer.recipe_asked.config()), _without_n_iter(plain["recipe_asked"])
    if asked != stored:
        keys = sorted(key for key in asked if asked[key] != stored.get(key))
        raise StorageError(f"{path} was made with another recipe: {', '.join(keys)} differ")
    trainer.machine.load_state_dict(read_machine(path).state_dict())
    return {"plain": plain, "tensors": tensors, "path": path}


def restore(trainer: Trainer, stored: dict[str, Any]) -> tuple[bool, bool]:
    """Bring a trainer whose optimiser has been made to where the checkpoint was taken.

    Returns
    -------
    tuple of bool
        Whether as many processes share the training as did then, and whether a pass had just been made whole.
    """
    plain, tensors, path = stored["plain"], stored["tensors"], stored["path"]
    try:
        trainer.machine.load_state_dict(read_machine(path).state_dict())
        trainer.epoch, trainer.batch, trainer.update = plain["epoch"], plain["batch"], plain["update"]
        trainer.scheduled = plain["scheduled"]
        trainer.history = list(plain["history"])
        trainer.recipe = dataclasses.replace(trainer.recipe, learning_rate=plain["recipe"]["learning_rate"])
        world = trainer.world
        same_world = bool(plain["processes"] == world.size)
        trainer.chains = {name: _own(trainer, chain) for name, chain in _under(tensors, "chains").items()}
        if same_world:
            trainer.rng.load_state_dict(_under(tensors, f"noise.{world.rank}"))
        else:
            trainer.rng = trainer.rng_of(trainer.update)
        trainer.order_rng.load_state_dict(_under(tensors, "order"))
        assert trainer.optimizer is not None
        _restore_optimizer(trainer.optimizer, plain["optimizer"], _under(tensors, "optimizer"))
        if trainer.scheduler is not None:
            trainer.optimizer._opt_called = plain["update"] > 0  # type: ignore[attr-defined]  # or it warns
            trainer.scheduler.load_state_dict(_from_plain(plain["scheduler"]))
        if trainer.centring is not None:
            like = trainer.machine.like
            trainer.centring.centre = {n: t.to(like) for n, t in _under(tensors, "centre").items()}
            offset = tensors.get("hidden_offset")
            trainer.centring.hidden = None if offset is None else offset.to(like)
        states = list(plain["callbacks"])
        for callback in trainer.callbacks:  # some may be new, some gone
            mine = next((state for state in states if state["kind"] == type(callback).__name__), None)
            if mine is not None:
                states.remove(mine)
                callback.load_state_dict(mine["state"])
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise StorageError(f"{path} does not fit this trainer: {error}") from error
    device = trainer.machine.like.device
    trainer.chains = {name: t.to(device) for name, t in trainer.chains.items()}
    return same_world, plain["batch"] > 0 and plain["batch"] == plain.get("batches_per_epoch")


def _state(trainer: Trainer) -> tuple[dict[str, Tensor], dict[str, Any]]:
    assert trainer.optimizer is not None
    # Between passes, and at a pass's end, the order's stream stands where the next pass begins.
    world = trainer.world
    tensors = _prefixed("order", trainer._order_at_start)
    own = {name: world.gather(part.reshape(-1)) for name, part in trainer.rng.state_dict().items()}
    shapes = {name: part.shape for name, part in trainer.rng.state_dict().items()}
    for rank in range(world.size):
        tensors |= {f"noise.{rank}.{name}": parts[rank].reshape(shapes[name]) for name, parts in own.items()}
    tensors |= _prefixed("chains", {name: _everybodys(trainer, chain) for name, chain in trainer.chains.items()})
    if trainer.centring is not None:
        tensors |= _prefixed("centre", trainer.centring.centre)
        if trainer.centring.hidden is not None:
            tensors["hidden_offset"] = trainer.centring.hidden
    optimizer = trainer.optimizer.state_dict()
    scalars: dict[str, dict[str, Any]] = {}
    for index, entries in optimizer["state"].items():
        for key, value in entries.items():
            if isinstance(value, Tensor):
                tensors[f"optimizer.{index}.{key}"] = value
            else:
                scalars.setdefault(str(index), {})[key] = value
    groups = [{key: value for key, value in group.items() if key != "params"} for group in optimizer["param_groups"]]
    plain = {
        "epoch": trainer.epoch,
        "batch": trainer.batch,
        "update": trainer.update,
        "processes": world.size,
        "batches_per_epoch": trainer.batches_per_epoch,
        "scheduled": trainer.scheduled,
        "recipe_asked": trainer.recipe_asked.config(),
        "recipe": trainer.recipe.config(),
        "history": trainer.history,
        "optimizer": {"kind": type(trainer.optimizer).__name__, "scalars": scalars, "groups": groups},
        "scheduler": None if trainer.scheduler is None else _to_plain(trainer.scheduler.state_dict()),
        "callbacks": [{"kind": type(call).__name__, "state": call.state_dict()} for call in trainer.callbacks],
    }
    return tensors, plain


def _everybodys(trainer: Trainer, chain: Tensor) -> Tensor:
    """Put the chains of all processes together."""
    if chain.ndim == 0 or trainer.world.size == 1:
        return chain
    axis = trainer.negative.chain_axis
    return torch.cat(trainer.world.gather(chain.movedim(axis, 0))).movedim(0, axis).contiguous()


def _own(trainer: Trainer, chain: Tensor) -> Tensor:
    """Take this process's chains out of all."""
    if chain.ndim == 0 or trainer.world.size == 1:
        return chain
    axis = trainer.negative.chain_axis
    part = trainer.world.part_of(chain.shape[axis])
    return chain.narrow(axis, part.start, part.stop - part.start).clone()


def _restore_optimizer(optimizer: torch.optim.Optimizer, plain: dict[str, Any], tensors: dict[str, Tensor]) -> None:
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
    """Write counters (of milestones, in schedulers), whose keys JSON would turn into text, as pairs."""
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


def _prefixed(prefix: str, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    return {f"{prefix}.{name}": tensor for name, tensor in tensors.items()}


def _under(tensors: dict[str, Tensor], prefix: str) -> dict[str, Tensor]:
    start = f"{prefix}."
    return {name.removeprefix(start): tensor for name, tensor in tensors.items() if name.startswith(start)}


def _without_n_iter(config: dict[str, Any]) -> dict[str, Any]:
    return json.loads(json.dumps({key: value for key, value in config.items() if key != "n_epochs"}))  # type: ignore[no-any-return]
