"""Optimizers and schedulers of `torch.optim` that a user gives to the trainer, instead of the recipe's own steps."""

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from torch import Tensor
from torch.optim import SGD, Optimizer
from torch.optim.lr_scheduler import LRScheduler, ReduceLROnPlateau

from mvrbm.updates.recipe import Recipe
from mvrbm.updates.state import TrainState, is_factor

#: Makes an optimizer from parameter groups.
OptimizerFactory = Callable[[list[dict[str, Any]]], Optimizer]
#: Makes a scheduler from an optimizer.
SchedulerFactory = Callable[[Optimizer], LRScheduler]


#: What makes the optimizer and the scheduler of a training run, if the user gave them.
Factories = tuple[OptimizerFactory | None, SchedulerFactory | None]


def build_optimizer(
    state: TrainState, recipe: Recipe, factories: Factories
) -> tuple[Optimizer | None, LRScheduler | None]:
    """Build the optimizer and the scheduler that were given; None where steps follow the recipe.

    A scheduler without an optimizer schedules SGD with the recipe's learning rates, momentum and weight decay.
    """
    make_optimizer, make_scheduler = factories
    if make_optimizer is None and make_scheduler is None:
        return None, None
    factors: dict[str, Any] = {"params": [p for name, p in state.learned.items() if is_factor(name)]}
    others = {"params": [p for name, p in state.learned.items() if not is_factor(name)], "weight_decay": 0.0}
    # A factory decides on the learning rate, and on a weight decay unless the recipe has one. Biases never decay.
    if recipe.weight_decay:
        factors["weight_decay"] = recipe.weight_decay
    if make_optimizer is None:
        rate = recipe.learning_rate
        groups = [{**factors, "lr": rate}, {**others, "lr": recipe.bias_learning_rate or rate}]
        optimizer: Optimizer = SGD(groups, momentum=recipe.momentum)
    else:
        optimizer = make_optimizer([factors, others])
    return optimizer, None if make_scheduler is None else make_scheduler(optimizer)


def step_scheduler(scheduler: LRScheduler | None, history: Sequence[Mapping[str, float]], metric: str) -> None:
    """Let a scheduler, if there is one, change the learning rates; `ReduceLROnPlateau` follows a metric."""
    if isinstance(scheduler, ReduceLROnPlateau):
        values = [row[metric] for row in history if metric in row]
        if not values:
            raise ValueError(f"no callback logs '{metric}': add a Monitor callback for ReduceLROnPlateau to follow")
        scheduler.step(values[-1])
    elif scheduler is not None:
        scheduler.step()


def describe_steps(optimizer: Optimizer | None, scheduler: LRScheduler | None) -> list[str] | None:
    """Describe an optimizer and a scheduler that have just been built, with their settings."""
    if optimizer is None:
        return None
    groups = [
        {key: _plain(value) for key, value in group.items() if key != "params"} for group in optimizer.param_groups
    ]
    state = {} if scheduler is None else {key: _plain(value) for key, value in scheduler.state_dict().items()}
    return [f"{type(optimizer).__name__} {groups}", f"{type(scheduler).__name__} {state}"]


def _plain(value: Any) -> Any:
    """Return a number, a text or a sequence as it is, the kind of anything else, such as a function."""
    if isinstance(value, Tensor):
        return value.tolist()
    return (
        value if isinstance(value, bool | int | float | str | list | tuple | Counter | None) else type(value).__name__
    )
