"""The numbers of a training, and the two sets of them that have a name."""

from __future__ import annotations

from dataclasses import asdict, dataclass, fields
from typing import Any

from mvrbm.learning.samplers import CD, NegativePhase


@dataclass(frozen=True)
class Recipe:
    """How to train.

    Parameters
    ----------
    n_epochs : int
        Passes over the data.
    batch_size : int
        Samples an update. The last batch of a pass may be shorter; its gradient counts in proportion.
    learning_rate : float, optional
        Size of a step of `W`, of the factors as they are if not `normalised`. If not given, it follows
        from the size of the layers and the data's variance; see :func:`mvrbm.learning.initialisation.safe_rate`.
    bias_learning_rate : float, optional
        Size of a step of biases and variances; `learning_rate` if not given.
    momentum : float
        Share of the last step that is kept.
    weight_decay : float
        Pull of the factors, and of them alone, towards zero.
    negative : NegativePhase
        What the chains do.
    std : float, optional
        Standard deviation of the entries of `W` at the start. If not given, hidden fields start with a
        spread of 0.3.
    factor_std : float, optional
        Standard deviation of the factors themselves at the start, instead of `std`.
    bias_from_data : bool
        Whether the visible units start at the data's moments (log-odds, or location and scale).
    centring : {"location", "full", "none"}
        Which layers' factors learn from deviations from the mean, the biases following: those whose zero
        means nothing (Gaussian ones), all layers and the hidden one, or none.
    rate_decay : int, optional
        Updates after which the rate has fallen to 1 / sqrt(2) of its start; it falls as
        1 / sqrt(1 + update / rate_decay). It stays as it is if not given, or where an optimiser or a
        scheduler is given to the trainer.
    normalised : bool
        Whether each factor's gradient is divided by how much the other factors amplify it.
    balance : bool
        Whether the factors are brought to equal norms after every pass, which leaves `W` as it is.
    """

    n_epochs: int = 10
    batch_size: int = 100
    learning_rate: float | None = None
    bias_learning_rate: float | None = 0.05
    momentum: float = 0.5
    weight_decay: float = 0.0
    negative: NegativePhase = CD(1)  # noqa: RUF009  (frozen settings; chains live in the trainer)
    std: float | None = None
    factor_std: float | None = None
    bias_from_data: bool = True
    centring: str = "location"
    rate_decay: int | None = 30
    normalised: bool = True
    balance: bool = True

    def __post_init__(self) -> None:
        for name, least in [("n_epochs", 0), ("batch_size", 1)]:
            value = getattr(self, name)
            if value != int(value) or value < least:
                raise ValueError(f"{name} must be a whole number of at least {least}, got {value}")
            object.__setattr__(self, name, int(value))  # NumPy's numbers are not JSON's
        if not isinstance(self.negative, NegativePhase):
            raise ValueError(f"negative must be CD(...), PCD(...) or TemperedPCD(...), got {self.negative!r}")
        if self.std is not None and self.factor_std is not None:
            raise ValueError("give std or factor_std, not both")
        for name in ("learning_rate", "bias_learning_rate", "std", "factor_std", "momentum", "weight_decay"):
            if getattr(self, name) is not None:
                object.__setattr__(self, name, float(getattr(self, name)))
        for name in ("learning_rate", "bias_learning_rate", "std", "factor_std"):
            value = getattr(self, name)
            if value is not None and not 0 < value < float("inf"):
                raise ValueError(f"{name} must be positive, got {value}")
        if not 0 <= self.momentum < 1:
            raise ValueError(f"momentum must be at least 0 and below 1, got {self.momentum}")
        if self.centring not in ("location", "full", "none"):
            raise ValueError(f"centring must be 'location', 'full' or 'none', got {self.centring!r}")
        if self.rate_decay is not None and self.rate_decay < 1:
            raise ValueError(f"rate_decay must be at least 1, got {self.rate_decay}")
        if not 0 <= self.weight_decay < float("inf"):
            raise ValueError(f"weight_decay must be at least 0, got {self.weight_decay}")

    def config(self) -> dict[str, Any]:
        """Return the settings as plain values."""
        plain = {field.name: getattr(self, field.name) for field in fields(self) if field.name != "negative"}
        return {**plain, "negative": {"kind": type(self.negative).__name__, **asdict(self.negative)}}


#: `default`: safe for every unit, order, rank and size. `paper`: Algorithm 1 as printed; factors start
#: from N(0, 0.01^2), which the paper leaves open, and an iteration is one pass over the data.
RECIPES: dict[str, Recipe] = {
    "default": Recipe(),
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
        centring="none",
        rate_decay=None,
        normalised=False,
        balance=False,
    ),
}


def as_recipe(recipe: str | Recipe) -> Recipe:
    """Return a recipe, by name or as it is."""
    if isinstance(recipe, Recipe):
        return recipe
    if recipe not in RECIPES:
        raise ValueError(f"unknown recipe '{recipe}': choose one of {sorted(RECIPES)}, or give a Recipe")
    return RECIPES[recipe]
