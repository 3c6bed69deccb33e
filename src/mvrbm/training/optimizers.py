"""Support for `torch.optim` optimizers and schedulers, which can replace the recipe's update rule."""

from collections import Counter
from collections.abc import Callable
from typing import Any

from torch import Tensor
from torch.optim import SGD, Optimizer
from torch.optim.lr_scheduler import LRScheduler, ReduceLROnPlateau

from mvrbm.updates.recipe import Recipe
from mvrbm.updates.state import TrainState, is_factor

#: Function that builds an optimizer from parameter groups.
OptimizerFactory = Callable[[list[dict[str, Any]]], Optimizer]
#: Function that builds a scheduler from an optimizer.
SchedulerFactory = Callable[[Optimizer], LRScheduler]


class OptimizerSettings:
    """User-specified optimizer and scheduler.

    Parameters
    ----------
    optimizer : callable, optional
        Function that takes a list of two parameter groups, the factors and the biases, and returns an optimizer.
    scheduler : callable, optional
        Function that takes the optimizer and returns a scheduler. If `optimizer` is None, the scheduler is applied to
        SGD with the recipe's settings.
    plateau_metric : str
        Name of the logged metric that `ReduceLROnPlateau` monitors.

    Attributes
    ----------
    description : list of str or None
        Initial settings of the optimizer and the scheduler, used to identify them in checkpoints.
    """

    def __init__(
        self,
        optimizer: OptimizerFactory | None = None,
        scheduler: SchedulerFactory | None = None,
        plateau_metric: str = "reconstruction_error",
    ) -> None:
        self._optimizer = optimizer
        self._scheduler = scheduler
        self._plateau_metric = plateau_metric
        self.description: list[str] | None = None

    def build(self, state: TrainState, recipe: Recipe) -> None:
        """Build the optimizer and the scheduler for the parameters in a training state."""
        factors: dict[str, Any] = {"params": [p for name, p in state.learned.items() if is_factor(name)]}
        others = {"params": [p for name, p in state.learned.items() if not is_factor(name)], "weight_decay": 0.0}
        # The recipe's weight decay takes precedence over the optimizer's own. Weight decay never applies to biases.
        if recipe.weight_decay:
            factors["weight_decay"] = recipe.weight_decay
        if self._optimizer is None:
            rate = recipe.learning_rate
            groups = [{**factors, "lr": rate}, {**others, "lr": recipe.bias_learning_rate or rate}]
            state.optimizer = SGD(groups, momentum=recipe.momentum)
        else:
            state.optimizer = self._optimizer([factors, others])
        if self._scheduler is not None:
            state.scheduler = self._scheduler(state.optimizer)
        self.description = _describe(state.optimizer, state.scheduler)

    def step_scheduler(self, state: TrainState) -> None:
        """Advance the scheduler, if there is one, to set the learning rates for the current epoch."""
        if isinstance(state.scheduler, ReduceLROnPlateau):
            metric = self._plateau_metric
            values = [row[metric] for row in state.history if metric in row]
            if not values:
                raise ValueError(f"ReduceLROnPlateau requires the metric '{metric}'; add a Monitor callback to log it")
            state.scheduler.step(values[-1])
        elif state.scheduler is not None:
            state.scheduler.step()


def _describe(optimizer: Optimizer, scheduler: LRScheduler | None) -> list[str]:
    groups = [
        {key: _plain(value) for key, value in group.items() if key != "params"} for group in optimizer.param_groups
    ]
    settings = {} if scheduler is None else {key: _plain(value) for key, value in scheduler.state_dict().items()}
    return [f"{type(optimizer).__name__} {groups}", f"{type(scheduler).__name__} {settings}"]


def _plain(value: Any) -> Any:
    """Convert tensors to lists and objects to their type names. Numbers, strings and sequences are unchanged."""
    if isinstance(value, Tensor):
        return value.tolist()
    plain = value is None or isinstance(value, bool | int | float | str | list | tuple | Counter)
    return value if plain else type(value).__name__
