"""Training settings, and the named recipes `default`, `generative` and `paper`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from typing import Any

from mvrbm.updates.negative import CD, PCD, NegativePhase, TemperedPCD
from mvrbm.validation import choice, number, truth_value, whole_number

# Settings whose names differ in versions 0.1 and 0.2, mapped to their current names.
_FORMER_NAMES = {"n_iter": "n_epochs", "centring": "centering", "normalised": "normalized"}


@dataclass(frozen=True)
class Recipe:
    """Training settings.

    Parameters
    ----------
    n_epochs : int
        Number of epochs (passes over the data).
    batch_size : int
        Number of samples per update. If the last batch in an epoch is smaller, its gradient is scaled down in
        proportion to its size.
    learning_rate : float, optional
        Learning rate for the coupling matrix `W`, or for its factors if `normalized` is False. If None, the learning
        rate is computed from the sizes of the layers and the variance of the data. See
        :func:`mvrbm.updates.learning_rate.safe_rates`.
    rate_factor : float
        Factor by which the computed learning rate is multiplied if all units have bounded statistics (Bernoulli,
        Categorical, etc.).
    largest_rate : float
        Upper limit on the computed learning rate. Only small models reach it.
    bias_learning_rate : float, optional
        Learning rate for biases and variances. If None, `learning_rate` is used.
    momentum : float
        Momentum coefficient.
    weight_decay : float
        L2 penalty on the factors. Biases are not penalized.
    prior_precision : float
        Precision (inverse variance) of a Gaussian prior on the factors: `prior_precision` divided by the number of
        training samples is added to `weight_decay`, so the penalty matters less the more data there is. With sample
        weights, the number of samples is the effective number (sum of weights) ** 2 / (sum of squared weights). For
        data of unknown length,
        no prior is applied.
    negative : NegativePhase
        Sampling method for the negative phase: `CD`, `PCD` or `TemperedPCD`.
    std : float, optional
        Initial standard deviation of the entries of `W`. If None, `std` is chosen so that hidden fields initially have
        a standard deviation of 0.3.
    factor_std : float, optional
        Initial standard deviation of the entries of the factors. Cannot be combined with `std`.
    bias_from_data : bool
        Whether to initialize the parameters of the visible units (log-odds, or location and scale) from the mean and
        variance of the data.
    centering : {"location", "full", "none"}
        Layers to center. In the gradient for the factors, the mean of a centered layer is subtracted from its values.
        ``"location"`` centers layers with an arbitrary origin (Gaussian layers). ``"full"`` centers all layers,
        including the hidden layer. ``"none"`` disables centering.
    rate_decay : int, optional
        Time scale, in updates, of the learning rate decay 1 / sqrt(1 + update / rate_decay). If None, this decay is
        disabled. Ignored if the trainer has an optimizer or a scheduler.
    linear_decay : bool
        Whether to also decrease the learning rate linearly to zero over `planned_updates` updates.
    planned_updates : int, optional
        Number of updates after which the learning rate reaches zero. If None, the total number of updates in
        :meth:`Trainer.fit` is used, and there is no linear decay in `partial_fit` or for data of unknown length.
    normalized : bool
        Whether to divide the gradient for each factor by the factor's gain. The gain is an upper bound on the squared
        change in `W` per unit step in the factor.
    balance : bool
        Whether to rescale the factors to have equal norms after every epoch. Rescaling does not change `W`.
    """

    n_epochs: int = 10
    batch_size: int = 100
    learning_rate: float | None = None
    rate_factor: float = 1.0
    largest_rate: float = 0.5
    bias_learning_rate: float | None = 0.05
    momentum: float = 0.5
    weight_decay: float = 0.0
    prior_precision: float = 0.0
    negative: NegativePhase = CD(1)  # noqa: RUF009  (immutable settings)
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
        # Convert NumPy numbers, which JSON cannot store, to Python numbers.
        checked: dict[str, Any] = {
            "n_epochs": whole_number(self.n_epochs, "n_epochs", 0),
            "batch_size": whole_number(self.batch_size, "batch_size"),
            "momentum": number(self.momentum, "momentum", 0, 1),
            "weight_decay": number(self.weight_decay, "weight_decay"),
            "prior_precision": number(self.prior_precision, "prior_precision"),
            "rate_factor": number(self.rate_factor, "rate_factor", exclude_low=True),
            "largest_rate": number(self.largest_rate, "largest_rate", exclude_low=True),
        }
        for name in ("learning_rate", "bias_learning_rate", "std", "factor_std"):
            if getattr(self, name) is not None:
                checked[name] = number(getattr(self, name), name, exclude_low=True)
        if not isinstance(self.negative, NegativePhase):
            raise ValueError(f"negative must be CD(...), PCD(...) or TemperedPCD(...), got {self.negative!r}")
        if self.std is not None and self.factor_std is not None:
            raise ValueError("std and factor_std cannot both be set")
        choice(self.centering, "centering", ("location", "full", "none"))
        for name in ("rate_decay", "planned_updates"):
            if getattr(self, name) is not None:
                checked[name] = whole_number(getattr(self, name), name)
        for name in ("bias_from_data", "linear_decay", "normalized", "balance"):
            checked[name] = truth_value(getattr(self, name), name)
        for name, value in checked.items():
            object.__setattr__(self, name, value)

    def config(self) -> dict[str, Any]:
        """Return the settings as JSON-serializable values that can be passed to :meth:`from_config`.

        Settings that were added after version 0.1 are omitted if they have their default values. The names of stored
        study runs depend on the result, and must not change when a setting is added.
        """
        found = {**asdict(self), "negative": {"kind": type(self.negative).__name__, **asdict(self.negative)}}
        added = {
            "rate_factor": 1.0,
            "largest_rate": 0.5,
            "linear_decay": False,
            "planned_updates": None,
            "prior_precision": 0.0,
        }
        return {key: value for key, value in found.items() if key not in added or value != added[key]}

    @classmethod
    def from_config(cls, config: Mapping[str, Any]) -> Recipe:
        """Create a recipe from the result of :meth:`config`. Results from versions 0.1 and 0.2 are also supported."""
        plain = {_FORMER_NAMES.get(key, key): value for key, value in config.items()}
        negative = dict(plain.pop("negative"))
        kinds = {kind.__name__: kind for kind in (CD, PCD, TemperedPCD)}
        return cls(**plain, negative=kinds[negative.pop("kind")](**negative))


_GENERATIVE = Recipe(n_epochs=100, negative=PCD(100), rate_factor=8.0, momentum=0.0, rate_decay=None, linear_decay=True)

#: Named recipes. `default` learns features and is stable for all units, orders, ranks and sizes. `generative` maximizes
#: the likelihood with persistent chains and a large learning rate that decreases to zero over the planned updates.
#: `sequences` is the same for one-hot data: all layers are centered, and the learning rate is larger, because rare
#: categories vary less than the bound on their variance. A prior on the weights, with a standard deviation of 0.3,
#: prevents overfitting, which is otherwise severe with a few thousand samples. `paper` is Algorithm 1 as published,
#: with one epoch per iteration. The paper does not specify how the factors are initialized, so they are drawn from
#: N(0, 0.01^2).
RECIPES: dict[str, Recipe] = {
    "default": Recipe(),
    "generative": _GENERATIVE,
    "sequences": replace(_GENERATIVE, rate_factor=16.0, largest_rate=1.0, centering="full", prior_precision=10.0),
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
    """Return the recipe with the given name. If a Recipe is passed, return it unchanged."""
    if isinstance(recipe, Recipe):
        return recipe
    if recipe not in RECIPES:
        raise ValueError(f"recipe must be one of {sorted(RECIPES)} or a Recipe, got {recipe!r}")
    return RECIPES[recipe]
