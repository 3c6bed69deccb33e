"""What was read from a checkpoint: checks that it is whole and of this training run, and how a run is set to it.

The files, and what they hold, are described in :mod:`mvrbm.training.checkpoint`.
"""

from __future__ import annotations

import dataclasses
import hashlib
import math
import warnings
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from mvrbm import saving
from mvrbm.data.sources import Source
from mvrbm.errors import StorageError
from mvrbm.updates.negative import TURN
from mvrbm.updates.recipe import Recipe
from mvrbm.updates.state import TrainState, is_factor
from mvrbm.validation import whole_number

COUNTER = "(counter)"
OWN_RULE = "recipe"  # instead of an optimizer's class

#: The :class:`~mvrbm.training.Trainer` that is restored: its module imports this one, so it is not named in the types.
Run = Any


# -- is it this training run? -------------------------------------------------------------------------


def fingerprint(run: Run, source: Source | None) -> dict[str, Any]:
    """Return what identifies a training run, as plain values: its settings, and a digest of its data."""
    found = {"seed": run.seed, "missing_steps": run.missing_steps, "steps": run.steps_config}
    if source is None:
        return found
    digest = source.digest if run.same_data else None
    if digest is not None and not source.common:  # every process has its own part
        parts = run.world.gather(torch.tensor(list(bytes.fromhex(digest)), dtype=torch.uint8))
        digest = hashlib.sha256(b"".join(bytes(part.tolist()) for part in parts)).hexdigest()
    return found | {"n_samples": source.n_samples, "data": digest}


def differences(there: Mapping[str, Any], here: Mapping[str, Any]) -> list[str]:
    """Describe the entries that differ; None stands for anything."""
    found = []
    for key in sorted({*there, *here}):
        one, other = there.get(key), here.get(key)
        if one is None or other is None or one == other:
            continue
        if key == "data":
            found.append("the data has other values")
        elif key == "steps":
            found += [f"{part} is {b}, was {a}" for part, a, b in zip(_STEPS, one, other, strict=False) if a != b]
        else:
            found.append(f"{key} is {other}, was {one}")
    return found


_STEPS = ("the optimizer", "the scheduler")


def same_run(found: list[str], path: Path, force: bool) -> None:
    """Raise StorageError for differences between this training run and the stored one; with `force`, warn."""
    if not found:
        return
    message = f"{path} is a checkpoint of another training run: {'; '.join(found)}"
    if not force:
        raise StorageError(f"{message} (--force, or force=True, resumes it anyway)")
    warnings.warn(f"{message}; it is resumed anyway", UserWarning, stacklevel=2)


# -- is it whole? -------------------------------------------------------------------------------------


def check_plain(plain: Mapping[str, Any]) -> dict[str, Any]:
    """Return the settings and counters of a checkpoint, or raise an error for values that no run has written.

    The requested recipe becomes a :class:`Recipe`.
    """
    for name in ("epoch", "batch", "update", "scheduled"):
        counter(plain[name], name)
    counter(plain["processes"], "processes", 1)
    per_epoch = plain.get("batches_per_epoch")
    if per_epoch is not None and plain["batch"] > counter(per_epoch, "batches_per_epoch", 1):
        raise ValueError(f"batch is {plain['batch']}, but an epoch has {per_epoch} batches")
    if plain["scheduled"] > plain["epoch"]:
        raise ValueError(f"scheduled is {plain['scheduled']}, but only {plain['epoch']} epochs are done")
    for row in _all_of_kind(plain["history"], dict, "history"):
        _all_of_kind(list(row.values()), (int, float), "a row of history")
    for entry in _all_of_kind(plain["callbacks"], dict, "callbacks"):
        of_kind(entry["state"], dict, "the state of a callback")
    optimizer = of_kind(plain["optimizer"], dict, "optimizer")
    of_kind(optimizer["scalars"], dict, "scalars")
    _all_of_kind(optimizer["groups"], dict, "groups")
    if plain["scheduler"] is not None:
        of_kind(plain["scheduler"], dict, "scheduler")
    settings = of_kind(plain.get("settings", {}), dict, "settings")  # version 0.1 has written none
    for name in ("seed", "missing_steps"):
        if settings.get(name) is not None:
            counter(settings[name], name)
    Recipe.from_config(plain["recipe"])
    return {**plain, "settings": settings, "recipe_asked": Recipe.from_config(plain["recipe_asked"])}


def counter(value: Any, name: str, least: int = 0) -> int:
    """Return a whole number of at least `least`, or raise ValueError for anything else, a text or a float included."""
    if type(value) is not int:
        raise ValueError(f"{name} must be a whole number, got {value!r:.50}")
    return whole_number(value, name, least)


def of_kind(value: Any, kind: type | tuple[type, ...], name: str) -> Any:
    """Return a value of some type, or raise ValueError if it is of another."""
    if not isinstance(value, kind):
        kinds = kind if isinstance(kind, tuple) else (kind,)
        raise ValueError(f"{name} must be {' or '.join(k.__name__ for k in kinds)}, got {value!r:.50}")
    return value


def _all_of_kind(values: Any, kind: type | tuple[type, ...], name: str) -> list[Any]:
    return [of_kind(value, kind, f"an entry of {name}") for value in of_kind(values, list, name)]


# Kinds of values that JSON does not distinguish, or that settings may have in turn.
_ALIKE: tuple[tuple[type, ...], ...] = ((int, float, Tensor, type(None)), (list, tuple))


def _like(stored: Mapping[str, Any], now: Mapping[str, Any], what: str) -> None:
    """Raise ValueError unless settings have the names of the present ones, and values of their kinds."""
    if set(stored) != set(now):
        raise ValueError(f"{what} has {sorted(stored)}, expected {sorted(now)}")
    for name, value in now.items():
        kinds = next((kinds for kinds in _ALIKE if isinstance(value, kinds)), (type(value),))
        found = of_kind(stored[name], kinds, f"{name} of {what}")
        if isinstance(found, float) and math.isnan(found):
            raise ValueError(f"{name} of {what} must be a number, got NaN")


def checked(
    tensors: Mapping[str, Tensor], shapes: Mapping[str, Iterable[int] | None], what: str, *, complete: bool = True
) -> dict[str, Tensor]:
    """Return tensors, or raise ValueError if one has another shape than it should (None: any), or is not finite."""
    if set(tensors) - set(shapes) or (complete and set(shapes) - set(tensors)):
        raise ValueError(f"{what} are of {sorted(tensors)}, expected {sorted(shapes)}")
    for name, tensor in tensors.items():
        wanted = shapes[name]
        if wanted is not None and tuple(tensor.shape) != tuple(wanted):
            raise ValueError(f"{what} of '{name}' have shape {tuple(tensor.shape)}, expected {tuple(wanted)}")
        if not bool(torch.isfinite(tensor).all()):
            raise ValueError(f"{what} of '{name}' are not finite")
    return dict(tensors)


@dataclass(frozen=True)
class Stored:
    """A checkpoint that was read, to be restored when the training run has been set up."""

    plain: dict[str, Any]
    tensors: dict[str, Tensor]
    path: Path
    force: bool = False  #: Whether to resume although it is of another training run.

    def check_same(self, found: list[str]) -> None:
        """Raise StorageError for differences between this training run and the stored one; with `force`, warn."""
        same_run(found, self.path, self.force)

    def recipe_differences(self, requested: Recipe) -> list[str]:
        """Describe what differs from the stored recipe, apart from the number of epochs."""
        there, here = self.plain["recipe_asked"].config(), requested.config()
        changed = sorted(key for key in {*there, *here} - {"n_epochs"} if there.get(key) != here.get(key))
        return [f"{key} is {here.get(key)}, was {there.get(key)}" for key in changed]

    def restore(self, run: Run, settings: Mapping[str, Any], common: bool) -> tuple[bool, bool]:
        """Set a training run to where the checkpoint was taken.

        Parameters
        ----------
        run : Trainer
            The training run.
        settings : mapping
            Its :func:`fingerprint`.
        common : bool
            Whether every process reads all of the data.

        Returns
        -------
        tuple of bool
            Whether the number of processes is the same, and whether it was taken after the last batch of an epoch.
        """
        plain, state, world = self.plain, run.state, run.world
        like, same_world = state.machine.like, bool(plain["processes"] == world.size)
        there = plain["settings"] if common or same_world else {**plain["settings"], "data": None}
        try:
            self.check_same(differences(there, settings))
            state.machine.load_state_dict(saving.read_machine(self.path).state_dict())
            state.epoch, state.batch, state.update = plain["epoch"], plain["batch"], plain["update"]
            run.scheduled_epochs = plain["scheduled"]
            run.history = list(plain["history"])
            if run.requested_recipe.learning_rate is None:
                run.recipe = dataclasses.replace(run.recipe, learning_rate=plain["recipe"]["learning_rate"])
            state.chains, axis = {}, run.negative.chain_axis
            for name, chain in self._chains(run).items():
                own = chain.movedim(axis, 0)[world.part_of(chain.shape[axis])].movedim(0, axis) if chain.ndim else chain
                state.chains[name] = own.to(like.device, copy=True, memory_format=torch.contiguous_format)
            exact = _under(self.tensors, "exact")
            state.exact = checked(exact, dict.fromkeys(exact), "exact numbers") if world.size == 1 else {}
            self._restore_steps(run)
            if state.centering is not None:
                shapes = {name: offset.shape for name, offset in state.centering.center.items()}
                center = checked(_under(self.tensors, "center"), shapes, "offsets")
                state.centering.center = {name: offset.to(like) for name, offset in center.items()}
                hidden = {key: tensor for key, tensor in self.tensors.items() if key == "hidden_offset"}
                checked(hidden, {"hidden_offset": (1, *state.machine.hidden.shape)}, "offsets", complete=False)
                state.centering.hidden = hidden["hidden_offset"].to(like) if hidden else None
            states = list(plain["callbacks"])
            for callback in run.callbacks:  # some may be new, some may be gone
                own_state = next((one for one in states if one["kind"] == type(callback).__name__), None)
                if own_state is not None:
                    states.remove(own_state)
                    callback.load_state_dict(own_state["state"])
        except (KeyError, TypeError, ValueError, AttributeError, RuntimeError, IndexError, OverflowError) as error:
            if isinstance(error, StorageError):
                raise
            raise StorageError(f"{self.path} does not fit this trainer: {error}") from error
        return same_world, plain["batch"] > 0 and plain["batch"] == plain.get("batches_per_epoch")

    def _chains(self, run: Run) -> dict[str, Tensor]:
        """Return the chains of all processes. There are none before the first update."""
        chains, ahead = _under(self.tensors, "chains"), run.recipe.negative.chain_shape
        turn = chains.pop(TURN, None)
        if turn is not None and not (turn.shape == () and int(turn) in (0, 1)):
            raise ValueError("the turn of exchanges must be 0 or 1")
        shapes = {name: (*ahead, *unit.shape) for name, unit in run.state.machine.layers.items()} if ahead else {}
        if chains or (self.plain["update"] and turn is not None):
            checked(chains, shapes, "chains")
        return chains if turn is None else {**chains, TURN: turn}

    def _restore_steps(self, run: Run) -> None:
        """Restore momenta, or the state of an optimizer and a scheduler."""
        plain, state = self.plain["optimizer"], run.state
        if run.optimizer is None:
            if plain["kind"] != OWN_RULE and "n_iter" not in self.plain["recipe"]:  # version 0.1 always wrote SGD
                raise ValueError(f"its optimizer is {plain['kind']}, but no optimizer was given")
            momenta = _under(self.tensors, "momenta") or self._momenta_of_version_0_1(state)
            shapes = {name: parameter.shape for name, parameter in state.learned.items()}
            momenta = checked(momenta, shapes, "momenta", complete=False)
            state.momenta = {name: momentum.to(state.machine.like) for name, momentum in momenta.items()}
            return
        _restore_optimizer(run.optimizer, plain, _under(self.tensors, "optimizer"))
        if run.scheduler is not None:
            content = _from_plain(self.plain["scheduler"])
            _like(content, run.scheduler.state_dict(), "the scheduler")
            run.optimizer._opt_called = self.plain["update"] > 0  # otherwise it warns
            run.scheduler.load_state_dict(content)

    def _momenta_of_version_0_1(self, state: TrainState) -> dict[str, Tensor]:
        """Return the momenta that version 0.1 saved as those of an optimizer, factors first."""
        learned = state.learned
        names = [name for name in learned if is_factor(name)] + [name for name in learned if not is_factor(name)]
        found = {name: self.tensors.get(f"optimizer.{index}.momentum_buffer") for index, name in enumerate(names)}
        return {name: momentum for name, momentum in found.items() if momentum is not None}


def _restore_optimizer(optimizer: Optimizer, plain: dict[str, Any], tensors: dict[str, Tensor]) -> None:
    if plain["kind"] != type(optimizer).__name__:
        raise ValueError(f"its optimizer is {plain['kind']}, not {type(optimizer).__name__}")
    state: dict[int, dict[str, Any]] = {int(index): dict(entries) for index, entries in plain["scalars"].items()}
    shapes = [tuple(p.shape) for group in optimizer.param_groups for p in group["params"]]
    for name, tensor in tensors.items():
        index, key = name.split(".", 1)
        if tensor.shape not in ((), shapes[int(index)]):
            raise ValueError(f"{key} of the optimizer has shape {tuple(tensor.shape)}, expected {shapes[int(index)]}")
        state.setdefault(int(index), {})[key] = tensor
    current = optimizer.state_dict()["param_groups"]
    groups = [{**stored, "params": now["params"]} for stored, now in zip(plain["groups"], current, strict=True)]
    for stored, now in zip(groups, current, strict=True):
        _like(stored, now, "the optimizer")
    optimizer.load_state_dict({"state": state, "param_groups": groups})


def _from_plain(value: Any) -> Any:
    """Undo :func:`mvrbm.training.checkpoint._to_plain`."""
    if isinstance(value, dict):
        if COUNTER in value:
            return Counter(dict(value[COUNTER]))
        return {key: _from_plain(entry) for key, entry in value.items()}
    return [_from_plain(entry) for entry in value] if isinstance(value, list) else value


def _under(tensors: dict[str, Tensor], prefix: str) -> dict[str, Tensor]:
    start = f"{prefix}."
    return {name.removeprefix(start): tensor for name, tensor in tensors.items() if name.startswith(start)}
