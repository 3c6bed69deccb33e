"""Save estimators to folders and load them, including models saved by earlier versions.

This module defines the base class for all estimators that can be saved, the conversion of parameters to and from JSON,
and checkpoints for backpropagation. :mod:`mvrbm.saving` reads and writes the files.
"""

import dataclasses
import os
import warnings
from abc import abstractmethod
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Self

import numpy as np
import torch
from sklearn.base import BaseEstimator
from sklearn.utils.validation import check_is_fitted
from torch import Tensor, nn

from mvrbm.couplings import Coupling, make_coupling
from mvrbm.distributed import World
from mvrbm.errors import RecipeWarning, StorageError
from mvrbm.estimators.parameters import Layer
from mvrbm.hub import push_to_hub
from mvrbm.model_card import ModelCard, write_card
from mvrbm.saving import ESTIMATOR, replace_model
from mvrbm.training.backprop import DescentSettings
from mvrbm.training.callbacks import Callback, Checkpoint
from mvrbm.training.checkpoints import DescentCheckpoint, digest_of
from mvrbm.updates.recipe import Recipe
from mvrbm.validation import whole_number

# Parameters that control how an estimator runs. They are not part of the model.
_NOT_SAVED = ("device", "verbose")

# Maps former parameter names to current names. Version 0.1 used `n_iter` and `preset`, and versions 0.1 and 0.2 used
# `unlabelled_batch_size`.
_FORMER_NAMES = {"n_iter": "n_epochs", "preset": "recipe", "unlabelled_batch_size": "unlabeled_batch_size"}
# Maps former parameter names to current names, for names that changed in a single class. Up to version 0.2, the
# imputer's parameter `correction` was called `hidden`.
_FORMER_NAMES_OF: dict[str, dict[str, str]] = {"MVRBMImputer": {"hidden": "correction"}}
# Maps former parameter values to current values, for each class and current parameter name.
_FORMER_VALUES: dict[tuple[str, str], dict[str, str]] = {("MVRBMImputer", "correction"): {"gaussian": "none"}}


class SavedEstimator(BaseEstimator):
    """Base class for estimators that can be saved to a folder and loaded with :func:`mvrbm.load`."""

    @property
    def n_parameters_(self) -> int:
        """Number of learned parameters."""
        check_is_fitted(self)
        learned = nn.ModuleList(part for part in vars(self).values() if isinstance(part, nn.Module))
        return sum(parameter.numel() for parameter in learned.parameters() if parameter.requires_grad)

    def save(self, folder: str | os.PathLike[str], *, overwrite: bool = False) -> Path:
        """Save the fitted model to a folder and return the path of the folder.

        Use :func:`mvrbm.load` to load the model. If the folder already contains a model, `save` replaces that model if
        `overwrite` is True and raises StorageError otherwise. A folder that contains other files is never replaced.
        """
        return self._save(folder, overwrite)

    def save_pretrained(self, folder: str | os.PathLike[str], *, overwrite: bool = False, **card: Any) -> Path:
        """Save the fitted model with a model card and return the path. See :func:`mvrbm.save_pretrained`."""
        return self._save(folder, overwrite, ModelCard(**card))

    def push_to_hub(self, name: str, **options: Any) -> str:
        """Upload the fitted model and a model card to the Hugging Face Hub. Return the URL of the commit.

        See :func:`mvrbm.push_to_hub` for the options.
        """
        return push_to_hub(self, name, **options)

    def _save(self, folder: str | os.PathLike[str], overwrite: bool, card: ModelCard | None = None) -> Path:
        check_is_fitted(self)
        world = World.here()
        with world.raise_together(StorageError, OSError):
            if world.is_main:
                with replace_model(folder, overwrite=overwrite) as staging:
                    self._write(staging, {ESTIMATOR: self._description()})
                    if card is not None:
                        write_card(card, staging)
        return Path(folder)

    @classmethod
    def from_folder(cls, folder: Path, config: Mapping[str, Any], device: str | torch.device) -> Self:
        """Load a model from a folder, given its parsed `config.json`. :func:`mvrbm.load` calls this method."""
        described = config[ESTIMATOR]
        params = _with_present_names(cls.__name__, described["params"])
        if "random_state" in params:
            params["random_state"] = whole_number(params["random_state"], "random_state", 0, 2**32 - 1)
        estimator = cls(**{name: cls._from_json(name, value) for name, value in params.items()}, device=device)
        estimator._restore(folder, described)
        return estimator

    @abstractmethod
    def _write(self, folder: Path, extra: Mapping[str, Any]) -> None:
        """Write the model to an existing folder. `extra` contains additional entries for `config.json`."""

    @abstractmethod
    def _restore(self, folder: Path, described: Mapping[str, Any]) -> None:
        """Restore the model from a folder. `described` is the estimator's entry in `config.json`."""

    @classmethod
    def _from_json(cls, name: str, value: Any) -> Any:
        """Convert the value of the parameter `name` from its JSON representation."""
        return _from_json(name, value)

    def _description(self) -> dict[str, Any]:
        """Return the class name and the parameters as JSON-serializable values."""
        params = {name: value for name, value in self.get_params(deep=False).items() if name not in _NOT_SAVED}
        if not isinstance(params["random_state"], int | np.integer):
            del params["random_state"]  # the state of a random number generator is not saved
        return {"class": type(self).__name__, "params": {name: _to_json(value) for name, value in params.items()}}

    def _warn_once(self, reason: str | None, advice: str = "") -> None:
        """Issue a warning, at most once, that the model was trained in a way that leads to poor samples.

        `reason` describes the training, such as "with mode='hybrid'". If `reason` is None, no warning is issued.
        `advice` lists settings to recommend in addition to ``recipe='generative'``.
        """
        if reason is None or getattr(self, "_warned", False):
            return
        self._warned = True
        advice += "recipe='generative'"
        message = f"the model was trained {reason}; training with {advice} gives better samples"
        warnings.warn(message, RecipeWarning, stacklevel=4)


def _with_present_names(class_name: str, saved: Mapping[str, Any]) -> dict[str, Any]:
    """Convert saved parameter names and values from earlier versions to the current version."""
    names = {**_FORMER_NAMES, **_FORMER_NAMES_OF.get(class_name, {})}
    params = {}
    for former, value in saved.items():
        name = names.get(former, former)
        values = _FORMER_VALUES.get((class_name, name), {})
        params[name] = values.get(value, value) if isinstance(value, str) else value
    return params


def _from_json(name: str, value: Any) -> Any:
    """Convert the value of the parameter `name` from its JSON representation."""
    if isinstance(value, Mapping):
        if name == "recipe":
            return Recipe.from_config(value)
        if isinstance(value.get("coupling"), str) and "hidden" not in value:
            return make_coupling(value)
        entries = {key: _from_json(name, entry) for key, entry in value.items()}
        return Layer(**entries) if name == "layers" else entries
    return tuple(_from_json(name, entry) for entry in value) if isinstance(value, list) else value


def _to_json(value: Any) -> Any:
    """Convert a parameter value to a JSON-serializable value."""
    if isinstance(value, Coupling):
        return {"coupling": value.name, **value.config()}
    if isinstance(value, Recipe):
        return value.config()
    if dataclasses.is_dataclass(value):
        return {field.name: _to_json(getattr(value, field.name)) for field in dataclasses.fields(value)}
    if isinstance(value, Mapping):
        return {str(key): _to_json(entry) for key, entry in value.items()}
    if isinstance(value, np.generic | np.ndarray):
        return value.tolist()
    if isinstance(value, Sequence) and not isinstance(value, str):
        return [_to_json(entry) for entry in value]
    return value


def with_checkpoints(callbacks: Sequence[Callback], resume: Any, checkpoints: Any) -> tuple[Sequence[Callback], Any]:
    """Return the callbacks and the folder to resume from if `checkpoints` is the folder for both, or None."""
    if checkpoints is None:
        return callbacks, resume
    if resume is not None:
        raise ValueError("resume has no effect together with checkpoints, which resumes from its own folder")
    return [*callbacks, Checkpoint(checkpoints)], checkpoints


def saved_names(estimator: Any) -> list[str] | None:
    """Return the column names of the training data as strings, or None if the data had no column names."""
    names = getattr(estimator, "feature_names_in_", None)
    return None if names is None else list(map(str, names))


def forget_names(estimator: Any) -> None:
    """Discard the column names of earlier training data. Call this function if the new data has no column names."""
    vars(estimator).pop("feature_names_in_", None)


def restore_names(estimator: Any, names: Any) -> None:
    """Restore the column names of the training data, as returned by :func:`saved_names`."""
    if names is None:
        return
    if len(names) != estimator.n_features_in_ or not all(isinstance(name, str) for name in names):
        raise StorageError(f"feature_names must be a list of {estimator.n_features_in_} strings, got {names!r:.100}")
    estimator.feature_names_in_ = np.asarray(names, dtype=object)


def stored_descent(
    folder: Any, estimator: Any, plan: DescentSettings, data: Sequence[Tensor], ignore_mismatch: bool
) -> DescentCheckpoint | None:
    """Return a checkpoint for an estimator trained by backpropagation, or None if `folder` is None.

    The checkpoint identifies the training run by the estimator's parameters, the training settings and a digest of the
    data. If `ignore_mismatch` is True, training can resume even if these have changed.
    """
    if folder is None:
        return None
    params: dict[str, Any] = {
        name: repr(value) for name, value in estimator.get_params(deep=False).items() if name not in _NOT_SAVED
    }
    if not isinstance(estimator.random_state, int | np.integer):
        params["random_state"] = None  # the user did not choose the seed, so the run can be resumed with any seed
    identity = {**params, "plan": plan.identity(), "data": digest_of(*data)}
    return DescentCheckpoint(Path(folder), identity, ignore_mismatch)
