"""Save and restore the state of a training run.

A checkpoint folder contains one subfolder per checkpoint, such as `update-000001000`. Each subfolder contains a saved
model (`config.json` and `model.safetensors`) as well as `trainer.json` and `trainer.safetensors`. Checkpoints are
written under a temporary name and then renamed, so every subfolder named `update-*` is complete.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import os
import re
import shutil
import tempfile
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from torch import Tensor
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from mvrbm import saving
from mvrbm.data.sources import Source
from mvrbm.distributed import World
from mvrbm.errors import StorageError
from mvrbm.io.atomic import finish_folder, lock, remove_leftovers
from mvrbm.machine import BoltzmannMachine
from mvrbm.training.callbacks import Callback
from mvrbm.training.checkpoints.checks import (
    VALUE_ERRORS,
    check_settings,
    check_tensors,
    counter,
    differences,
    instance,
    instances,
    require_same_run,
    tensors_under,
)
from mvrbm.updates.negative import TURN, NegativePhase
from mvrbm.updates.recipe import Recipe
from mvrbm.updates.state import TrainState, is_factor
from mvrbm.validation import number

_NAME = re.compile(r"update-(\d{9,})")
# Prefix for temporary names of checkpoints that are being written or removed.
_STAGING = ".writing-"
_PLAIN = "trainer.json"
_TENSORS = "trainer.safetensors"
# Key that marks a stored Counter. Counters are stored as lists because keys in JSON objects must be strings.
_COUNTER = "(counter)"
# Name stored instead of an optimizer class if updates follow the recipe.
_RECIPE_RULE = "recipe"
# Name prefix for centering offsets in versions 0.1 and 0.2.
_FORMER_CENTER = "centre"


@dataclass(frozen=True)
class RunDescription:
    """Description of a training run, used to save checkpoints and to compare checkpoints with the current run.

    Parameters
    ----------
    recipe : Recipe
        Recipe as passed by the user. Its learning rate may be None.
    seed : int, optional
        Random seed, or None if the user did not specify a seed.
    missing_steps : int
        Number of Gibbs steps used to sample missing entries.
    optimization : list of str, optional
        Descriptions of the optimizer and the scheduler. If None, updates follow the recipe.
    source : Source, optional
        Data source, or None before the first `fit`.
    same_data : bool
        Whether every epoch uses the same data. If False, the hash of the data is not compared.
    batches_per_epoch : int, optional
        Number of batches per epoch, or None if unknown.
    callbacks : sequence of Callback
        Callbacks whose states are saved and restored.
    world : World
        Processes that share the training run.
    """

    recipe: Recipe
    seed: int | None
    missing_steps: int
    optimization: list[str] | None
    source: Source | None
    same_data: bool
    batches_per_epoch: int | None
    callbacks: Sequence[Callback]
    world: World

    def identity(self) -> dict[str, Any]:
        """Return JSON-serializable values that identify this run. All processes must call this method together."""
        found = {"seed": self.seed, "missing_steps": self.missing_steps, "steps": self.optimization}
        if self.source is None:
            return found
        digest = self.source.digest if self.same_data else None
        if digest is not None and not self.source.common:
            # Each process has hashed only its own part of the data.
            parts = self.world.gather(torch.tensor(list(bytes.fromhex(digest)), dtype=torch.uint8))
            digest = hashlib.sha256(b"".join(bytes(part.tolist()) for part in parts)).hexdigest()
        weights = "equal" if self.source.weights is None else self.source.weights.digest
        return found | {"n_samples": self.source.n_samples, "data": digest, "sample_weight": weights}


# -- folders ------------------------------------------------------------------------------------------


def newest(folder: str | os.PathLike[str]) -> Path | None:
    """Return the path to the most recent checkpoint in a checkpoint folder, or None if there are no checkpoints."""
    return next(reversed(all_in(Path(folder))), None)


def all_in(home: Path) -> list[Path]:
    """Return the paths to all checkpoints in a folder, oldest first."""
    if not home.is_dir():
        return []
    found = [path for path in home.iterdir() if path.is_dir() and _NAME.fullmatch(path.name)]
    return sorted(found, key=lambda path: int(path.name.removeprefix("update-")))


# -- saving -------------------------------------------------------------------------------------------


def save(state: TrainState, run: RunDescription, folder: str | os.PathLike[str], keep: int) -> Path:
    """Write a checkpoint to a checkpoint folder and return its path. A checkpoint after the same update is replaced.

    All but the `keep` most recent checkpoints are deleted. All processes must call this function together, but only the
    main process writes files.
    """
    target = Path(folder) / f"update-{state.update:09d}"
    tensors = _tensors_of(state, run)
    plain = {**_plain_of(state, run), "settings": run.identity()}
    with run.world.raise_together(StorageError):
        if run.world.is_main:
            _write(state.machine, target, tensors, plain, keep)
    return target


def _write(
    machine: BoltzmannMachine, target: Path, tensors: Mapping[str, Tensor], plain: Mapping[str, Any], keep: int
) -> None:
    home = target.parent
    try:
        home.mkdir(parents=True, exist_ok=True)
        remove_leftovers(home, _STAGING)
        staging = Path(tempfile.mkdtemp(prefix=_STAGING, dir=home))
        try:
            with lock(staging):
                saving.write_machine(machine, staging)
                saving.write_tensors(tensors, staging / _TENSORS)
                (staging / _PLAIN).write_text(json.dumps(plain, indent=1) + "\n", encoding="utf-8")
                finish_folder(staging)
                if target.exists():
                    _remove(target)
                staging.rename(target)
        finally:
            shutil.rmtree(staging, ignore_errors=True)
        for old in all_in(home)[:-keep]:
            _remove(old)
    except (OSError, SafetensorError) as error:
        reason = getattr(error, "strerror", None) or error
        raise StorageError(f"checkpoint {target} cannot be written: {reason}") from error


def _remove(checkpoint: Path) -> None:
    """Remove a checkpoint. It is renamed first, so that every folder named `update-*` is complete at all times."""
    doomed = checkpoint.rename(checkpoint.parent / f"{_STAGING}{checkpoint.name}")
    shutil.rmtree(doomed, ignore_errors=True)


def _tensors_of(state: TrainState, run: RunDescription) -> dict[str, Tensor]:
    groups: dict[str, Mapping[str, Tensor]] = {
        "chains": _chains_of_all(state, run.recipe.negative, run.world),
        "momenta": state.momenta,
        "best": state.best,
    }
    if run.world.size == 1:
        # With several processes, the exact tensors contain the chains for only one process.
        groups["exact"] = state.exact
    if state.optimizer is not None:
        for index, entries in state.optimizer.state_dict()["state"].items():
            groups[f"optimizer.{index}"] = {key: value for key, value in entries.items() if isinstance(value, Tensor)}
    tensors = {}
    if state.centering is not None:
        groups["center"] = state.centering.center
        if state.centering.hidden is not None:
            tensors["hidden_offset"] = state.centering.hidden
    for prefix, group in groups.items():
        tensors |= {f"{prefix}.{name}": tensor for name, tensor in group.items()}
    return tensors


def _chains_of_all(state: TrainState, negative: NegativePhase, world: World) -> dict[str, Tensor]:
    """Gather the chains from all processes. All processes must call this function together."""
    found = dict(state.chains)
    axis = negative.chain_axis
    for name, chain in state.chains.items():
        if chain.ndim:
            gathered = torch.cat(world.gather(chain.movedim(axis, 0)))
            found[name] = gathered.movedim(0, axis).contiguous()
    return found


def _plain_of(state: TrainState, run: RunDescription) -> dict[str, Any]:
    with_rate = dataclasses.replace(run.recipe, learning_rate=state.learning_rate)
    return {
        "epoch": state.epoch,
        "batch": state.batch,
        "update": state.update,
        "processes": run.world.size,
        "batches_per_epoch": run.batches_per_epoch,
        "scheduled": state.scheduled_epochs,
        "recipe_asked": run.recipe.config(),
        "recipe": with_rate.config(),
        "relative_rates": state.relative_rates,
        "history": state.history,
        "optimizer": _plain_optimizer(state.optimizer),
        "scheduler": None if state.scheduler is None else _to_json(state.scheduler.state_dict()),
        "callbacks": [{"kind": type(call).__name__, "state": call.state_dict()} for call in run.callbacks],
    }


def _plain_optimizer(optimizer: Optimizer | None) -> dict[str, Any]:
    """Return all values in the optimizer state that are not tensors."""
    if optimizer is None:
        return {"kind": _RECIPE_RULE, "scalars": {}, "groups": []}
    content = optimizer.state_dict()
    scalars = {
        str(index): {key: value for key, value in entries.items() if not isinstance(value, Tensor)}
        for index, entries in content["state"].items()
    }
    groups = [
        {key: _to_json(value) for key, value in group.items() if key != "params"} for group in content["param_groups"]
    ]
    return {"kind": type(optimizer).__name__, "scalars": scalars, "groups": groups}


def _to_json(value: Any) -> Any:
    """Convert optimizer settings or a scheduler state, which can contain tensors and Counters, to JSON values."""
    if isinstance(value, Tensor):
        return value.tolist()
    if isinstance(value, Counter):
        return {_COUNTER: list(value.items())}
    if isinstance(value, dict):
        return {key: _to_json(entry) for key, entry in value.items()}
    return [_to_json(entry) for entry in value] if isinstance(value, list | tuple) else value


def _from_json(value: Any) -> Any:
    """Convert the result of :func:`_to_json` back to a scheduler state."""
    if isinstance(value, dict):
        if _COUNTER in value:
            return Counter(dict(value[_COUNTER]))
        return {key: _from_json(entry) for key, entry in value.items()}
    return [_from_json(entry) for entry in value] if isinstance(value, list) else value


# -- reading ------------------------------------------------------------------------------------------


def read_settings(path: Path) -> dict[str, Any]:
    """Read and validate `trainer.json`. The entry `recipe_asked` is converted to a :class:`Recipe`."""
    plain = saving.read_json(path / _PLAIN, largest=None)  # the history has no size limit
    try:
        return _checked(plain)
    except VALUE_ERRORS as error:
        reason = f"{error} is missing" if isinstance(error, KeyError) else str(error)
        raise StorageError(f"{path / _PLAIN} is corrupted: {reason}") from error


def _checked(plain: Mapping[str, Any]) -> dict[str, Any]:
    """Return the validated contents of `trainer.json`, or raise an error for invalid values."""
    for name in ("epoch", "batch", "update", "scheduled"):
        counter(plain[name], name)
    counter(plain["processes"], "processes", 1)
    per_epoch = plain.get("batches_per_epoch")
    if per_epoch is not None and plain["batch"] > counter(per_epoch, "batches_per_epoch", 1):
        raise ValueError(f"'batch' is {plain['batch']}, but an epoch has {per_epoch} batches")
    if plain["scheduled"] > plain["epoch"]:
        raise ValueError(f"'scheduled' is {plain['scheduled']}, but only {plain['epoch']} epochs are complete")
    for row in instances(plain["history"], dict, "history"):
        instances(list(row.values()), (int, float), "a row in history")
    for entry in instances(plain["callbacks"], dict, "callbacks"):
        instance(entry["state"], dict, "a callback state")
    optimizer = instance(plain["optimizer"], dict, "optimizer")
    instance(optimizer["scalars"], dict, "scalars")
    instances(optimizer["groups"], dict, "groups")
    if plain["scheduler"] is not None:
        instance(plain["scheduler"], dict, "scheduler")
    settings = instance(plain.get("settings", {}), dict, "settings")  # version 0.1 did not write them
    for name in ("seed", "missing_steps"):
        if settings.get(name) is not None:
            counter(settings[name], name)
    Recipe.from_config(plain["recipe"])
    return {**plain, "settings": settings, "recipe_asked": Recipe.from_config(plain["recipe_asked"])}


def read(path: Path, machine: BoltzmannMachine, recipe: Recipe, *, ignore_mismatch: bool = False) -> StoredRun:
    """Read a checkpoint and load the stored parameters into the machine.

    Parameters
    ----------
    path : Path
        Path to the checkpoint.
    machine : BoltzmannMachine
        Machine to load the parameters into. If its layers or couplings differ from those of the stored machine,
        StorageError is raised.
    recipe : Recipe
        Recipe as passed by the user. If it differs from the stored recipe in any setting except `n_epochs`,
        StorageError is raised.
    ignore_mismatch : bool
        Whether to issue a warning instead of raising StorageError if the checkpoint is from another training run.
    """
    plain = read_settings(path)
    tensors = saving.read_tensors(path / _TENSORS)
    config = saving.read_config(path)
    current = saving.machine_structure(machine)
    before = {**config, "visible": {name: saving.without_byte_scale(unit) for name, unit in config["visible"].items()}}
    if different := [key for key, value in current.items() if before.get(key) != json.loads(json.dumps(value))]:
        raise StorageError(
            f"{path} is a checkpoint for another machine, with different settings for {', '.join(different)}"
        )
    stored = StoredRun(plain, tensors, path, ignore_mismatch)
    stored.require_same_recipe(recipe)
    machine.load_state_dict(saving.read_machine(path).state_dict())
    return stored


@dataclass(frozen=True)
class StoredRun:
    """Contents of a checkpoint, which are restored when `fit` receives the training data."""

    plain: dict[str, Any]
    tensors: dict[str, Tensor]
    path: Path
    ignore_mismatch: bool = False

    @property
    def epoch(self) -> int:
        """Number of completed epochs when the checkpoint was saved."""
        return int(self.plain["epoch"])

    def require_same_recipe(self, recipe: Recipe) -> None:
        """Raise StorageError if `recipe` differs from the stored recipe in any setting except the number of epochs.

        If `ignore_mismatch` is True, issue a warning instead.
        """
        before = self.plain["recipe_asked"].config()
        now = recipe.config()
        changed = sorted(key for key in {*before, *now} - {"n_epochs"} if before.get(key) != now.get(key))
        found = [f"{key} is {now.get(key)}, was {before.get(key)}" for key in changed]
        require_same_run(found, self.path, ignore_mismatch=self.ignore_mismatch)

    def restore(self, state: TrainState, run: RunDescription) -> None:
        """Restore the training state and the callback states.

        All processes must call this method together. If the checkpoint is from another training run, StorageError is
        raised, or a warning is issued if `ignore_mismatch` is True. If the data source cannot resume within an epoch,
        training resumes at the beginning of the epoch.
        """
        same_processes = bool(self.plain["processes"] == run.world.size)
        common = run.source is None or run.source.common
        before = self.plain["settings"]
        if not (common or same_processes):
            before = {**before, "data": None}
        found = differences(before, run.identity())
        with run.world.raise_together(StorageError):
            require_same_run(found, self.path, ignore_mismatch=self.ignore_mismatch)
            try:
                self._restore(state, run)
            except VALUE_ERRORS as error:
                if isinstance(error, StorageError):
                    raise
                raise StorageError(f"{self.path} does not match this trainer: {error}") from error
        epoch_is_done = self.plain["batch"] > 0 and self.plain["batch"] == self.plain.get("batches_per_epoch")
        if epoch_is_done and run.batches_per_epoch is not None:
            state.batch = run.batches_per_epoch
        elif run.source is not None and not (run.source.resumable and (common or same_processes)):
            state.batch = 0

    def _restore(self, state: TrainState, run: RunDescription) -> None:
        state.machine.load_state_dict(saving.read_machine(self.path).state_dict())
        self._restore_counters(state, run)
        self._restore_chains(state, run)
        self._restore_steps(state)
        self._restore_centering(state)
        shapes = {name: p.shape for name, p in state.machine.named_parameters()}
        best = check_tensors(tensors_under("best", self.tensors), shapes, "best parameters", complete=False)
        state.best = {name: value.to(state.machine.like) for name, value in best.items()}
        exact = tensors_under("exact", self.tensors) if run.world.size == 1 else {}
        state.exact = check_tensors(exact, dict.fromkeys(exact), "exact tensors")
        self._restore_callbacks(run.callbacks)

    def _restore_counters(self, state: TrainState, run: RunDescription) -> None:
        plain = self.plain
        state.epoch = plain["epoch"]
        state.batch = plain["batch"]
        state.update = plain["update"]
        state.scheduled_epochs = plain["scheduled"]
        state.history = list(plain["history"])
        if run.recipe.learning_rate is None:
            state.learning_rate = plain["recipe"]["learning_rate"]
            # Earlier versions trained all couplings with the same learning rate.
            rates = dict(plain.get("relative_rates", {}))
            state.relative_rates = {name: number(rates[name], "relative rate", 0, 1) for name in rates}

    def _restore_chains(self, state: TrainState, run: RunDescription) -> None:
        """Restore this process's share of the chains. Checkpoints saved before the first update contain no chains."""
        negative = run.recipe.negative
        chains = tensors_under("chains", self.tensors)
        turn = chains.pop(TURN, None)
        if turn is not None and not (turn.shape == () and int(turn) in (0, 1)):
            raise ValueError("the swap parity must be 0 or 1")
        shapes = {}
        if negative.chain_shape:
            layers = state.machine.layers.items()
            shapes = {name: (*negative.chain_shape, *unit.shape) for name, unit in layers}
        if chains or (self.plain["update"] and turn is not None):
            check_tensors(chains, shapes, "chains")
        device = state.machine.like.device
        own = negative.share_of_chains(chains, run.world.part_of(negative.n_chains))
        state.chains = {name: chain.to(device) for name, chain in own.items()}
        if turn is not None:
            state.chains[TURN] = turn.clone()

    def _restore_steps(self, state: TrainState) -> None:
        """Restore the optimizer and the scheduler, or the momenta if no optimizer is used."""
        plain = self.plain["optimizer"]
        if state.optimizer is None:
            # Version 0.1, which wrote `n_iter`, stored its own update rule as an SGD optimizer.
            if plain["kind"] != _RECIPE_RULE and "n_iter" not in self.plain["recipe"]:
                raise ValueError(f"the stored optimizer is {plain['kind']}, but no optimizer was given")
            stored = tensors_under("momenta", self.tensors) or self._momenta_of_version_0_1(state)
            shapes = {name: parameter.shape for name, parameter in state.learned.items()}
            momenta = check_tensors(stored, shapes, "momenta", complete=False)
            state.momenta = {name: momentum.to(state.machine.like) for name, momentum in momenta.items()}
            return
        _restore_optimizer(state.optimizer, plain, tensors_under("optimizer", self.tensors))
        if state.scheduler is not None:
            _restore_scheduler(state.scheduler, _from_json(self.plain["scheduler"]))
            # Otherwise PyTorch warns that the scheduler steps before the optimizer.
            state.optimizer._opt_called = state.update > 0  # type: ignore[attr-defined]

    def _momenta_of_version_0_1(self, state: TrainState) -> dict[str, Tensor]:
        """Return the momenta from a checkpoint of version 0.1, where they are part of an optimizer state."""
        learned = state.learned
        names = [name for name in learned if is_factor(name)] + [name for name in learned if not is_factor(name)]
        found = {name: self.tensors.get(f"optimizer.{index}.momentum_buffer") for index, name in enumerate(names)}
        return {name: momentum for name, momentum in found.items() if momentum is not None}

    def _restore_centering(self, state: TrainState) -> None:
        if state.centering is None:
            return
        like = state.machine.like
        shapes = {name: offset.shape for name, offset in state.centering.center.items()}
        stored = tensors_under("center", self.tensors) or tensors_under(_FORMER_CENTER, self.tensors)
        center = check_tensors(stored, shapes, "offsets")
        state.centering.center = {name: offset.to(like) for name, offset in center.items()}
        hidden = {key: tensor for key, tensor in self.tensors.items() if key == "hidden_offset"}
        check_tensors(hidden, {"hidden_offset": (1, *state.machine.hidden.shape)}, "offsets", complete=False)
        state.centering.hidden = hidden["hidden_offset"].to(like) if hidden else None

    def _restore_callbacks(self, callbacks: Sequence[Callback]) -> None:
        """Restore callback states. Callbacks without a stored state keep their initial state."""
        remaining = list(self.plain["callbacks"])
        for callback in callbacks:
            stored = next((entry for entry in remaining if entry["kind"] == type(callback).__name__), None)
            if stored is not None:
                remaining.remove(stored)
                callback.load_state_dict(stored["state"])


def _restore_optimizer(optimizer: Optimizer, plain: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> None:
    if plain["kind"] != type(optimizer).__name__:
        raise ValueError(
            f"the stored optimizer is {plain['kind']}, but the given optimizer is {type(optimizer).__name__}"
        )
    state: dict[int, dict[str, Any]] = {int(index): dict(entries) for index, entries in plain["scalars"].items()}
    shapes = [tuple(p.shape) for group in optimizer.param_groups for p in group["params"]]
    for name, tensor in tensors.items():
        index, key = name.split(".", 1)
        if tensor.shape not in ((), shapes[int(index)]):
            raise ValueError(
                f"{key} in the optimizer has shape {tuple(tensor.shape)}, but expected {shapes[int(index)]}"
            )
        state.setdefault(int(index), {})[key] = tensor
    current = optimizer.state_dict()["param_groups"]
    groups = [{**stored, "params": now["params"]} for stored, now in zip(plain["groups"], current, strict=True)]
    for stored, now in zip(groups, current, strict=True):
        check_settings(stored, {name: _to_json(value) for name, value in now.items()}, "the optimizer")
        tensor_names = [name for name, value in now.items() if isinstance(value, Tensor)]
        stored |= {name: torch.as_tensor(stored[name]).to(now[name]) for name in tensor_names}
    optimizer.load_state_dict({"state": state, "param_groups": groups})


def _restore_scheduler(scheduler: LRScheduler, content: dict[str, Any]) -> None:
    check_settings(content, scheduler.state_dict(), "the scheduler")
    scheduler.load_state_dict(content)
