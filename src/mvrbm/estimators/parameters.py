"""Parameters shared by estimators, and their conversion to recipes, units, couplings and seeds.

Estimators are dataclasses, so that `__init__`, which scikit-learn inspects, is generated from the fields of the class
and its base classes. :mod:`mvrbm.estimators.persistence` saves and loads the parameters.
"""

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from sklearn.utils import check_random_state
from torch import Tensor

from mvrbm.couplings import Coupling, Kronecker, make_coupling
from mvrbm.distributed import World
from mvrbm.units import Unit
from mvrbm.units.base import unit_class
from mvrbm.updates.negative import CD, PCD, TemperedPCD
from mvrbm.updates.recipe import Recipe, as_recipe
from mvrbm.updates.step import check_hidden_memory
from mvrbm.validation import choice, whole_number

#: Negative phase for each value of the parameter `negative`.
NEGATIVE_PHASES = {"cd": CD, "pcd": PCD, "tempered": TemperedPCD}

# Shortest time scale of the learning rate decay, in updates, that is suitable for sampling. With faster decay, samples
# remain blurry.
_SHORTEST_DECAY = 1000


@dataclass(eq=False, repr=False, kw_only=True)
class TrainingParameters:
    """Parameters for estimators trained by contrastive divergence. See :class:`~mvrbm.MVRBM`."""

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
        """Return the recipe. Training parameters that are not None, such as `n_epochs`, override its settings."""
        recipe = as_recipe(self.recipe)
        phase = recipe.negative
        if self.negative is not None:
            phase = NEGATIVE_PHASES[choice(self.negative, "negative", NEGATIVE_PHASES)]()
        if self.n_chains is not None and not phase.chain_shape:
            raise ValueError("n_chains requires persistent chains; use negative='pcd' or negative='tempered'")
        if self.gibbs_steps is not None:
            whole_number(self.gibbs_steps, "gibbs_steps")
        phase = dataclasses.replace(phase, **without_none({"n_chains": self.n_chains, "steps": self.gibbs_steps}))
        given = {name: getattr(self, name) for name in ("n_epochs", "batch_size", "learning_rate")}
        return dataclasses.replace(recipe, negative=phase, **without_none(given))

    def _new_hidden(self, shape: tuple[int, ...], batch_size: int, like: Tensor) -> Unit:
        """Create the hidden units.

        Raises
        ------
        MemoryLimitError
            If there is not enough memory to train the units with batches of size `batch_size`. The error is raised
            before the units are created.
        """
        samples_per_process = -(-batch_size // World.here().size)
        check_hidden_memory(shape, samples_per_process, like)
        return unit_named(self.hidden, shape, "hidden")


@dataclass(frozen=True)
class Layer:
    """Hidden layer in a stack, with its coupling to the layer below.

    Parameters
    ----------
    shape : int or sequence of int, optional
        Shape of the layer. Default: the shape of the layer below.
    coupling : Coupling or str, optional
        Coupling, such as ``Dense()``, or its name. The stack uses a copy of the coupling. Default: ``Kronecker(rank)``
        with the stack's `rank`.
    hidden : str, optional
        Unit type. Default: the stack's parameter `hidden`.
    """

    shape: int | Sequence[int] | None = None
    coupling: Coupling | str | None = None
    hidden: str | None = None


def without_none(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Return a dict of the settings whose values are not None."""
    return {name: value for name, value in settings.items() if value is not None}


def seed_of(random_state: Any) -> int:
    """Draw a seed from a scikit-learn `random_state` (an int, a RandomState or None)."""
    return int(check_random_state(random_state).randint(2**31 - 1))


def unit_named(kind: Any, shape: tuple[int, ...], parameter: str = "visible") -> Unit:
    """Create units of type `kind` for a layer of the given shape.

    Raises
    ------
    ValueError
        If the unit type is unknown. The message refers to the estimator parameter `parameter`.
    """
    return unit_class(kind, parameter)(shape)


def is_named(unit: Unit, kind: Any) -> bool:
    """Return whether `unit` has the same type and settings as units created from the name `kind`."""
    other = unit_named(kind, unit.shape)
    return (unit.name, unit.config()) == (other.name, other.config() | {"bias_shape": list(unit.bias_shape)})


def unconnected(coupling: Any, what: str = "coupling") -> Coupling:
    """Return a new coupling without layer shapes, given another coupling or a string such as ``"kronecker:8"``.

    `what` describes the parameter in error messages.
    """
    if isinstance(coupling, str):
        return make_coupling(coupling)
    if not isinstance(coupling, Coupling):
        raise ValueError(
            f"{what} must be a coupling such as Dense() or a string such as 'kronecker:8', got {coupling!r}"
        )
    return coupling.copy_without_shapes()


def check_axes(link: Coupling, unit: Unit, hidden_shape: tuple[int, ...], modality: str | None = None) -> None:
    """Raise ValueError if a Kronecker coupling connects layers with different numbers of axes."""
    if link.name != Kronecker.name or len(unit.shape) == len(hidden_shape):
        return
    axes = "1 axis" if len(hidden_shape) == 1 else f"{len(hidden_shape)} axes"
    hint = ", or pass visible_shape if each row is a flattened array" if len(unit.shape) == 1 else ""
    if modality is not None:
        raise ValueError(
            f"hidden_shape {hidden_shape} has {axes}, but samples of modality {modality!r} have shape {unit.shape}; "
            f"use coupling=Dense() for this modality"
        )
    raise ValueError(
        f"hidden_shape {hidden_shape} has {axes}, but samples of shape {unit.shape} have {len(unit.shape)}; use the "
        f"same number of axes{hint}"
    )


def unsuited_reason(name: str | Recipe, recipe: Recipe) -> str | None:
    """Return the reason why a recipe leads to poor samples, or None if the recipe is suitable for sampling.

    The reason completes the sentence "The model was trained ...". `name` is the value of the estimator parameter
    `recipe`, and `recipe` contains the settings used in training.
    """
    if not recipe.negative.chain_shape:
        return f"with {recipe.negative}"
    if name != "generative" and recipe.rate_decay is not None and recipe.rate_decay < _SHORTEST_DECAY:
        return f"with a learning rate that decays after {recipe.rate_decay} updates"
    return None
