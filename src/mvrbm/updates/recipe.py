"""Recipes: the settings of a training run, and the named ones: `default`, `generative` and `paper`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from mvrbm.updates.negative import CD, PCD, NegativePhase, TemperedPCD
from mvrbm.validation import choice, number, whole_number

# Names of settings in versions 0.1 and 0.2.
_FORMER_NAMES = {"n_iter": "n_epochs", "centring": "centering", "normalised": "normalized"}


@dataclass(frozen=True)
class Recipe:
    """Settings of a training run.

    Parameters
    ----------
    n_epochs : int
        Number of epochs: how often training goes through the data.
    batch_size : int
        Samples per update. The last batch of an epoch may be shorter; its gradient is weighted in proportion.
    learning_rate : float, optional
        Step size of `W`, or of the factors themselves if not `normalized`. Default: computed from the layers' sizes and
        the data's variance; see :func:`mvrbm.updates.initialization.safe_rate`.
    rate_factor : float
        Multiplies a learning rate that is computed, if all units have bounded statistics (Bernoulli, categorical).
    bias_learning_rate : float, optional
        Step size of biases and variances. None: `learning_rate`.
    momentum : float
        Fraction of the last step that is kept.
    weight_decay : float
        L2 penalty of the factors only.
    negative : NegativePhase
        What the chains do.
    std : float, optional
        Standard deviation of the entries of the initial `W`. Default: hidden fields start with a spread of 0.3.
    factor_std : float, optional
        Standard deviation of the initial factors themselves, instead of `std`.
    bias_from_data : bool
        Whether the visible units start at the data's moments (log-odds, or location and scale).
    centering : {"location", "full", "none"}
        Which layers' factors learn from deviations from the mean, with the biases adjusted: those whose zero has no
        meaning (Gaussian layers), all layers including the hidden one, or none.
    rate_decay : int, optional
        Number of updates after which the learning rate has decayed to 1 / sqrt(2) of its initial value; it decays as
        1 / sqrt(1 + update / rate_decay). None: constant. Not used if the trainer has an optimizer or a scheduler.
    linear_decay : bool
        Whether the learning rate also falls linearly, to zero after `planned_updates`.
    planned_updates : int, optional
        Number of updates at which a linear decay ends. Default: all updates that :meth:`Trainer.fit` has to make,
        earlier calls included; data of unknown length does not make the rate fall linearly, nor does `partial_fit`.
    normalized : bool
        Whether each factor's gradient is divided by how much the other factors amplify it.
    balance : bool
        Whether the factors are rescaled to equal norms after every epoch, which leaves `W` unchanged.
    """

    n_epochs: int = 10
    batch_size: int = 100
    learning_rate: float | None = None
    rate_factor: float = 1.0
    bias_learning_rate: float | None = 0.05
    momentum: float = 0.5
    weight_decay: float = 0.0
    negative: NegativePhase = CD(1)  # noqa: RUF009  (frozen settings; chains are in the state)
    std: float | None = None
    factor_std: float | None = None
    bias_from_data: bool = True
    centering: str = "location"
    rate_decay: int | None = 30
    linear_decay: bool = False
    planned_updates: int | None = None
    normalized: bool = True
    balance: bool = True

    def __post_init__(self) -> None:
        checked: dict[str, Any] = {
            "n_epochs": whole_number(self.n_epochs, "n_epochs", 0),  # NumPy's numbers are not JSON's
            "batch_size": whole_number(self.batch_size, "batch_size"),
            "momentum": number(self.momentum, "momentum", 0, 1),
            "weight_decay": number(self.weight_decay, "weight_decay"),
            "rate_factor": number(self.rate_factor, "rate_factor", exclude_low=True),
        }
        for name in ("learning_rate", "bias_learning_rate", "std", "factor_std"):
            if getattr(self, name) is not None:
                checked[name] = number(getattr(self, name), name, exclude_low=True)
        if not isinstance(self.negative, NegativePhase):
            raise ValueError(f"negative must be CD(...), PCD(...) or TemperedPCD(...), got {self.negative!r}")
        if self.std is not None and self.factor_std is not None:
            raise ValueError("give std or factor_std, not both")
        choice(self.centering, "centering", ("location", "full", "none"))
        if self.rate_decay is not None and self.rate_decay < 1:
            raise ValueError(f"rate_decay must be at least 1, got {self.rate_decay}")
        if self.planned_updates is not None:
            checked["planned_updates"] = whole_number(self.planned_updates, "planned_updates")
        for name, value in checked.items():
            object.__setattr__(self, name, value)

    def config(self) -> dict[str, Any]:
        """Return the settings as plain values, which :meth:`from_config` takes.

        Settings that version 0.1 did not have are left out where they have their defaults: it can read the rest.
        """
        found = {**asdict(self), "negative": {"kind": type(self.negative).__name__, **asdict(self.negative)}}
        added = {"rate_factor": 1.0, "linear_decay": False, "planned_updates": None}
        return {key: value for key, value in found.items() if key not in added or value != added[key]}

    @classmethod
    def from_config(cls, config: Mapping[str, Any]) -> Recipe:
        """Return the recipe of some plain values. Values written by versions 0.1 and 0.2 are accepted."""
        plain = {_FORMER_NAMES.get(key, key): value for key, value in config.items()}
        negative = dict(plain.pop("negative"))
        kinds = {kind.__name__: kind for kind in (CD, PCD, TemperedPCD)}
        return cls(**plain, negative=kinds[negative.pop("kind")](**negative))


#: `default`: safe for every unit, order, rank and size; for features. `generative`: for likelihood and samples, by
#: persistent chains and a large rate that falls to zero over the planned updates. `paper`: Algorithm 1 as printed;
#: factors start from N(0, 0.01^2), which the paper does not specify, and one of its iterations is one epoch.
RECIPES: dict[str, Recipe] = {
    "default": Recipe(),
    "generative": Recipe(
        n_epochs=100, negative=PCD(100), rate_factor=8.0, momentum=0.0, rate_decay=None, linear_decay=True
    ),
    "paper": Recipe(
        n_epochs=10_000,
        batch_size=100,
        learning_rate=0.05,
        bias_learning_rate=None,
        momentum=0.5,
        weight_decay=0.01,
        negative=CD(1),
        factor_std=0.01,
        bias_from_data=False,
        centering="none",
        rate_decay=None,
        normalized=False,
        balance=False,
    ),
}


def as_recipe(recipe: str | Recipe) -> Recipe:
    """Return a recipe from its name, or the recipe itself."""
    if isinstance(recipe, Recipe):
        return recipe
    if recipe not in RECIPES:
        raise ValueError(f"recipe must be one of {sorted(RECIPES)} or a Recipe, got {recipe!r}")
    return RECIPES[recipe]
