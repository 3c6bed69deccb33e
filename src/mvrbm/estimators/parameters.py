"""Parameters of the estimators: shared parameters, each declared once, and how parameters are saved and loaded.

Estimators are data classes in this one respect: their `__init__`, which scikit-learn inspects, is made from the fields
of their bases and their own.
"""

import dataclasses
import os
import warnings
from abc import abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

import numpy as np
import torch
from sklearn.base import BaseEstimator
from sklearn.utils import check_random_state
from sklearn.utils.validation import check_is_fitted
from torch import Tensor, nn

from mvrbm.couplings import Coupling, Kronecker, make_coupling
from mvrbm.distributed import World
from mvrbm.errors import RecipeWarning, StorageError
from mvrbm.estimators.inputs import unit_named
from mvrbm.hub import ModelCard, push_to_hub, write_card
from mvrbm.machine import BoltzmannMachine
from mvrbm.random import RandomSource
from mvrbm.saving import ESTIMATOR, machine_config, replace_model
from mvrbm.training import Trainer
from mvrbm.training.backprop import DescentSettings
from mvrbm.training.checkpoints import DescentCheckpoint, digest_of
from mvrbm.units import Unit
from mvrbm.updates.negative import CD, PCD, TemperedPCD
from mvrbm.updates.recipe import Recipe, as_recipe
from mvrbm.updates.step import check_hidden_memory
from mvrbm.validation import choice, whole_number

NEGATIVE_PHASES = {"cd": CD, "pcd": PCD, "tempered": TemperedPCD}

_NOT_SAVED = ("device", "verbose")
_OLD_NAMES = {"n_iter": "n_epochs", "preset": "recipe"}  # in folders written by 0.1.0


@dataclass(eq=False, repr=False, kw_only=True)
class TrainingParameters:
    """Parameters of estimators that are trained by contrastive divergence; see :class:`~mvrbm.MVRBM`."""

    visible: Any = "bernoulli"
    hidden: str = "bernoulli"
    n_epochs: int | None = None
    batch_size: int | None = None
    learning_rate: float | None = None
    recipe: str | Recipe = "default"
    negative: str | None = None
    n_chains: int | None = None
    gibbs_steps: int | None = None
    warm_start: bool = False
    backend: str = "auto"
    random_state: Any = None
    device: str | torch.device = "auto"
    verbose: int = 0

    def _recipe(self) -> Recipe:
        """Return the recipe, with the values that parameters set."""
        recipe = as_recipe(self.recipe)
        phase = recipe.negative
        if self.negative is not None:
            phase = NEGATIVE_PHASES[choice(self.negative, "negative", NEGATIVE_PHASES)]()
        if self.n_chains is not None and not hasattr(phase, "n_chains"):
            raise ValueError("n_chains is the number of persistent chains: use it with negative='pcd' or 'tempered'")
        phase = dataclasses.replace(phase, **without_none({"n_chains": self.n_chains, "steps": self.gibbs_steps}))
        given = {name: getattr(self, name) for name in ("n_epochs", "batch_size", "learning_rate")}
        return dataclasses.replace(recipe, negative=phase, **without_none(given))

    def _new_hidden(self, shape: tuple[int, ...], n: int, like: Tensor) -> Unit:
        """Return the hidden units, or raise MemoryLimitError if n samples cannot train them, before they are made."""
        check_hidden_memory(shape, -(-min(n, self._recipe().batch_size) // World.here().size), like)
        return unit_named(self.hidden, shape, "hidden")


# A rate that decays after fewer updates leaves samples blurred.
_SHORTEST_DECAY = 1000


def unsuited_reason(name: str | Recipe, recipe: Recipe) -> str | None:
    """Return why samples of a model trained by a recipe, named or given so, are poor; None if they are not."""
    if not hasattr(recipe.negative, "n_chains"):
        return f"with {recipe.negative}"
    if name != "generative" and recipe.rate_decay is not None and recipe.rate_decay < _SHORTEST_DECAY:
        return f"with a learning rate that decays after {recipe.rate_decay} updates"
    return None


def without_none(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Return the settings that are not None."""
    return {name: value for name, value in settings.items() if value is not None}


def seed_of(random_state: Any) -> int:
    """Return a seed drawn from scikit-learn's `random_state`: an int, a RandomState or None."""
    return int(check_random_state(random_state).randint(2**31 - 1))


def new_trainers(
    machines: Sequence[BoltzmannMachine], recipe: Recipe, backend: str, random_state: Any
) -> list[Trainer]:
    """Return one trainer per machine, with seeds drawn from scikit-learn's `random_state`."""
    seeds = check_random_state(random_state).randint(2**31 - 1, size=len(machines)).tolist()
    pairs = zip(machines, seeds, strict=True)
    trainers = [Trainer(machine, recipe, backend=backend, seed=seed) for machine, seed in pairs]
    if not isinstance(random_state, int | np.integer):
        for trainer in trainers:
            trainer.seed = None  # nobody has chosen it
    return trainers


def stored_descent(
    folder: Any,
    estimator: Any,
    plan: DescentSettings,
    data: Sequence[Tensor],
    sources: Sequence[RandomSource],
    force: bool,
) -> DescentCheckpoint | None:
    """Return where the descent of an estimator on some data is stored, None for nowhere."""
    if folder is None:
        return None
    params: dict[str, Any] = {
        name: repr(value) for name, value in estimator.get_params(deep=False).items() if name not in _NOT_SAVED
    }
    if not isinstance(estimator.random_state, int | np.integer):
        params["random_state"] = None  # nobody has chosen it
    return DescentCheckpoint(Path(folder), {**params, "plan": plan.identity(), "data": digest_of(*data)}, force)


def unconnected(coupling: Any, what: str = "coupling") -> Coupling:
    """Return a new coupling without shapes: a copy of a coupling, or built from a text such as ``"kronecker:8"``."""
    if isinstance(coupling, str):
        return make_coupling(coupling)
    if not isinstance(coupling, Coupling):
        raise ValueError(f"{what} must be a coupling such as Dense() or Kronecker(8), or its name, got {coupling!r}")
    return coupling.copy_without_shapes()


@dataclass(frozen=True)
class Layer:
    """One hidden layer of a stack, and its coupling to the layer below.

    Parameters
    ----------
    shape : int or sequence of int, optional
        Shape of the layer. Default: the shape of the layer below.
    coupling : Coupling or str, optional
        A coupling without shapes, such as ``Dense()``, which is copied. Default: ``Kronecker`` with the stack's `rank`.
    hidden : str, optional
        Name of the units. Default: those of the stack.
    """

    shape: int | Sequence[int] | None = None
    coupling: Coupling | str | None = None
    hidden: str | None = None


class SavedEstimator(BaseEstimator):
    """Estimators that can be saved to a folder, parameters included, and are loaded by :func:`mvrbm.load`."""

    @property
    def n_parameters_(self) -> int:
        """Number of learned parameters."""
        check_is_fitted(self)
        learned = nn.ModuleList(part for part in vars(self).values() if isinstance(part, nn.Module))
        return sum(parameter.numel() for parameter in learned.parameters() if parameter.requires_grad)

    def save(self, folder: str | os.PathLike[str]) -> Path:
        """Save the fitted model to a folder, which :func:`mvrbm.load` reads. A model that is there is replaced."""
        return self._save(folder)

    def save_pretrained(self, folder: str | os.PathLike[str], **card: Any) -> Path:
        """Save the fitted model with a model card, to share it; see :func:`mvrbm.save_pretrained`."""
        return self._save(folder, ModelCard(**card))

    def push_to_hub(self, name: str, **options: Any) -> str:
        """Upload the fitted model with a model card to the Hugging Face hub; see :func:`mvrbm.push_to_hub`."""
        return push_to_hub(self, name, **options)

    def _save(self, folder: str | os.PathLike[str], card: ModelCard | None = None) -> Path:
        check_is_fitted(self)
        world = World.here()
        with world.raise_together(StorageError, OSError):
            if world.is_main:
                with replace_model(folder) as staging:
                    self._write(staging, {ESTIMATOR: self._description()})
                    if card is not None:
                        write_card(card, staging)
        return Path(folder)

    def _warn_once(self, reason: str | None, advice: str = "") -> None:
        """Warn, at the first call for this model, of samples from a model that was trained so."""
        if reason is not None and not getattr(self, "_warned", False):
            self._warned = True
            advice += "recipe='generative'"
            message = f"the model was trained {reason}: training with {advice} gives better samples"
            warnings.warn(message, RecipeWarning, stacklevel=4)

    @classmethod
    def from_folder(cls, folder: Path, config: Mapping[str, Any], device: str | torch.device) -> Self:
        """Load a model from a folder with this config. Called by :func:`mvrbm.load`."""
        described = config[ESTIMATOR]
        saved = {_OLD_NAMES.get(name, name): value for name, value in described["params"].items()}
        if "random_state" in saved:
            saved["random_state"] = whole_number(saved["random_state"], "random_state", 0, 2**32 - 1)
        estimator = cls(**{name: cls._rebuilt(name, value) for name, value in saved.items()}, device=device)
        estimator._restore(folder, described)
        return estimator

    @abstractmethod
    def _write(self, folder: Path, extra: Mapping[str, Any]) -> None:
        """Write the model into an existing folder, with further entries of the config."""

    @abstractmethod
    def _restore(self, folder: Path, described: Mapping[str, Any]) -> None:
        """Read the model from a folder, described by the estimator's entry of the config."""

    def _description(self) -> dict[str, Any]:
        """Return the class and the parameters as values that JSON can hold."""
        params = {name: value for name, value in self.get_params(deep=False).items() if name not in _NOT_SAVED}
        if not isinstance(params["random_state"], int | np.integer):
            del params["random_state"]  # the state of a generator is not a setting
        return {"class": type(self).__name__, "params": {name: _plain(value) for name, value in params.items()}}

    @classmethod
    def _rebuilt(cls, name: str, value: Any) -> Any:
        """Return the value of a parameter from its saved form."""
        if isinstance(value, Mapping):
            if name == "recipe":
                return Recipe.from_config(value)
            if isinstance(value.get("coupling"), str) and "hidden" not in value:
                return make_coupling(value)
            entries = {key: cls._rebuilt(name, entry) for key, entry in value.items()}
            return Layer(**entries) if name == "layers" else entries
        return tuple(cls._rebuilt(name, entry) for entry in value) if isinstance(value, list) else value


def _plain(value: Any) -> Any:
    """Return the value of a parameter in a form that JSON can hold."""
    if isinstance(value, Coupling):
        return {"coupling": value.name, **value.config()}
    if isinstance(value, Recipe):
        return value.config()
    if dataclasses.is_dataclass(value):
        return {field.name: _plain(getattr(value, field.name)) for field in dataclasses.fields(value)}
    if isinstance(value, Mapping):
        return {str(key): _plain(entry) for key, entry in value.items()}
    if isinstance(value, np.generic | np.ndarray):
        return value.tolist()
    if isinstance(value, Sequence) and not isinstance(value, str):
        return [_plain(entry) for entry in value]
    return value


def check_same(machines: Sequence[BoltzmannMachine], others: Sequence[BoltzmannMachine], message: str) -> None:
    """Raise ValueError if machines differ in more than their parameters and dtype."""
    one, other = ([{**machine_config(m), "dtype": None} for m in some] for some in (machines, others))
    if one != other:
        raise ValueError(message)


def check_axes(link: Coupling, unit: Unit, hidden_shape: tuple[int, ...]) -> None:
    """Raise ValueError if a Kronecker coupling is to connect layers of different numbers of axes."""
    if link.name == Kronecker.name and len(unit.shape) != len(hidden_shape):
        hint = ", or pass visible_shape if a row is an array" if len(unit.shape) == 1 else ""
        raise ValueError(
            f"hidden_shape {hidden_shape} has {len(hidden_shape)} {'axis' if len(hidden_shape) == 1 else 'axes'}, but "
            f"a sample has {len(unit.shape)}, {unit.shape}: both need the same number of axes{hint}"
        )
