"""Optimisers and schedulers of `torch.optim` that a user gives to the trainer, instead of the recipe's own steps."""

from collections.abc import Callable
from typing import Any

from torch.optim import SGD, Optimizer
from torch.optim.lr_scheduler import LRScheduler

from mvrbm.learning.recipe import Recipe
from mvrbm.learning.state import TrainState, is_factor

#: Makes an optimiser from parameter groups.
OptimizerFactory = Callable[[list[dict[str, Any]]], Optimizer]
#: Makes a scheduler from an optimiser.
SchedulerFactory = Callable[[Optimizer], LRScheduler]


#: What makes the optimiser and the scheduler of a training run, if the user gave them.
Factories = tuple[OptimizerFactory | None, SchedulerFactory | None]


def build_optimizer(
    state: TrainState, recipe: Recipe, factories: Factories
) -> tuple[Optimizer | None, LRScheduler | None]:
    """Build the optimiser and the scheduler that were given; None where steps follow the recipe.

    A scheduler without an optimiser schedules SGD with the recipe's learning rates, momentum and weight decay.
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
