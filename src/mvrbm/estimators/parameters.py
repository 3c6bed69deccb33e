"""Parameters that estimators share, and the objects that their values stand for: recipes, units, couplings, seeds.

Estimators are data classes in one respect only: their `__init__`, which scikit-learn inspects, is generated from the
fields of the class and its bases. Saving and loading of parameters is in :mod:`mvrbm.estimators.persistence`.
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
from mvrbm.units import Unit, make_unit, unit_names
from mvrbm.updates.negative import CD, PCD, TemperedPCD
from mvrbm.updates.recipe import Recipe, as_recipe
from mvrbm.updates.step import check_hidden_memory
from mvrbm.validation import choice

#: Negative phases by the value of the parameter `negative`.
NEGATIVE_PHASES = {"cd": CD, "pcd": PCD, "tempered": TemperedPCD}

# Samples stay blurred if the learning rate decays over fewer updates than this.
_SHORTEST_DECAY = 1000


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
        """Return the recipe, with the settings that have their own parameter replaced."""
        recipe = as_recipe(self.recipe)
        phase = recipe.negative
        if self.negative is not None:
            phase = NEGATIVE_PHASES[choice(self.negative, "negative", NEGATIVE_PHASES)]()
        if self.n_chains is not None and not hasattr(phase, "n_chains"):
            raise ValueError("n_chains sets the number of persistent chains: use negative='pcd' or 'tempered' with it")
        phase = dataclasses.replace(phase, **without_none({"n_chains": self.n_chains, "steps": self.gibbs_steps}))
        given = {name: getattr(self, name) for name in ("n_epochs", "batch_size", "learning_rate")}
        return dataclasses.replace(recipe, negative=phase, **without_none(given))

    def _new_hidden(self, shape: tuple[int, ...], batch_size: int, like: Tensor) -> Unit:
        """Return new hidden units.

        Raises
        ------
        MemoryLimitError
            Before the units are created, if there is not enough memory to train them with batches of this size.
        """
        samples_per_process = -(-batch_size // World.here().size)
        check_hidden_memory(shape, samples_per_process, like)
        return unit_named(self.hidden, shape, "hidden")


@dataclass(frozen=True)
class Layer:
    """One hidden layer of a stack, and its coupling to the layer below.

    Parameters
    ----------
    shape : int or sequence of int, optional
        Shape of the layer. Default: the shape of the layer below.
    coupling : Coupling or str, optional
        A coupling without shapes, such as ``Dense()``. The stack uses a copy. Default: ``Kronecker`` with the `rank` of
        the stack.
    hidden : str, optional
        Name of the units. Default: the value of the parameter `hidden` of the stack.
    """

    shape: int | Sequence[int] | None = None
    coupling: Coupling | str | None = None
    hidden: str | None = None


def without_none(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Return the settings that are not None."""
    return {name: value for name, value in settings.items() if value is not None}


def seed_of(random_state: Any) -> int:
    """Draw a seed from scikit-learn's `random_state`: an int, a RandomState or None."""
    return int(check_random_state(random_state).randint(2**31 - 1))


def unit_named(kind: Any, shape: tuple[int, ...], parameter: str = "visible") -> Unit:
    """Return new units of the kind that the value of a parameter names.

    Raises
    ------
    ValueError
        If there are no such units. The message names the parameter.
    """
    return make_unit(choice(kind, parameter, unit_names()), shape)


def is_named(unit: Unit, kind: Any) -> bool:
    """Return whether a unit is of the kind with this name."""
    other = unit_named(kind, unit.shape)
    return (unit.name, unit.config()) == (other.name, other.config() | {"bias_shape": list(unit.bias_shape)})


def unconnected(coupling: Any, what: str = "coupling") -> Coupling:
    """Return a new coupling without shapes: a copy of a coupling, or one from a string such as ``"kronecker:8"``."""
    if isinstance(coupling, str):
        return make_coupling(coupling)
    if not isinstance(coupling, Coupling):
        raise ValueError(f"{what} must be a coupling such as Dense() or Kronecker(8), or its name, got {coupling!r}")
    return coupling.copy_without_shapes()


def check_axes(link: Coupling, unit: Unit, hidden_shape: tuple[int, ...]) -> None:
    """Raise ValueError if a Kronecker coupling would connect layers with different numbers of axes."""
    if link.name != Kronecker.name or len(unit.shape) == len(hidden_shape):
        return
    axes = "1 axis" if len(hidden_shape) == 1 else f"{len(hidden_shape)} axes"
    hint = ", or pass visible_shape if a row is an array" if len(unit.shape) == 1 else ""
    raise ValueError(
        f"hidden_shape {hidden_shape} has {axes}, but a sample has {len(unit.shape)}, {unit.shape}: both need the same "
        f"number of axes{hint}"
    )


def unsuited_reason(name: str | Recipe, recipe: Recipe) -> str | None:
    """Return why a model that was trained with a recipe generates poor samples, or None if it does not.

    `name` is the value of the parameter `recipe`, and `recipe` are the settings that training used.
    """
    if not hasattr(recipe.negative, "n_chains"):
        return f"with {recipe.negative}"
    if name != "generative" and recipe.rate_decay is not None and recipe.rate_decay < _SHORTEST_DECAY:
        return f"with a learning rate that decays after {recipe.rate_decay} updates"
    return None
