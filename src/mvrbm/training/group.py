"""Several training runs at once: machines of the same shapes share the kernels of one GPU. For sweeps."""

import time
from collections.abc import Sequence
from typing import Any

from mvrbm.backends.choose import kernel_backend
from mvrbm.data.sources import as_source
from mvrbm.errors import DivergenceError
from mvrbm.training.trainer import Trainer
from mvrbm.updates.step import check_size


def fit_together(
    trainers: Sequence[Trainer], data: Sequence[Any], *, initialize: bool = True
) -> list[tuple[bool, float]]:
    """Train several machines, those of the same shapes together where a GPU allows it.

    Parameters
    ----------
    trainers : sequence of Trainer
        One trainer per machine. Those with callbacks are trained alone.
    data : sequence
        The data of each; the same object where it is shared.
    initialize : bool
        Whether training starts from parameters set from the data; see :meth:`Trainer.fit`.

    Returns
    -------
    list of (bool, float)
        For each machine, whether training diverged, and its share of the time in seconds.
    """
    groups: dict[Any, list[int]] = {}
    for number, (trainer, samples) in enumerate(zip(trainers, data, strict=True)):
        groups.setdefault(_group_key(trainer, samples, number), []).append(number)
    outcome = [(False, 0.0)] * len(trainers)
    for numbers in groups.values():
        began = time.perf_counter()
        _fit_group([trainers[number] for number in numbers], [data[number] for number in numbers], initialize)
        seconds = (time.perf_counter() - began) / len(numbers)
        for number in numbers:
            outcome[number] = trainers[number].diverged, seconds
    return outcome


def _group_key(trainer: Trainer, samples: Any, number: int) -> Any:
    """Return what training runs must have in common to be made together; the number of one that must be made alone."""
    source = as_source(samples, trainer.machine)
    kernels = kernel_backend(trainer.task(), trainer.state, source, 1)
    if kernels is None or trainer.callbacks:
        return number
    machine, recipe = trainer.machine, trainer.recipe
    layers = tuple(
        (name, unit.name, unit.learns_statistic, unit.shape, machine.links[name].name)
        for name, unit in machine.layers.items()
    )
    steps = (recipe.n_epochs, recipe.batch_size, recipe.negative, recipe.normalized, recipe.balance, recipe.centering)
    return kernels, layers, machine.hidden.name, machine.hidden.shape, steps, trainer.missing_steps, source.n_samples


def _fit_group(trainers: Sequence[Trainer], data: Sequence[Any], initialize: bool) -> None:
    """Train a group, and set `diverged` of each of its trainers."""
    first = trainers[0]
    source = first.prepare(data[0], initialize=initialize)
    shared = all(samples is data[0] for samples in data)
    for trainer, samples in zip(trainers[1:], data[1:], strict=True):
        trainer.prepare(source if shared else samples, initialize=initialize)
    first.group = list(trainers)
    try:
        first.fit(source)
    except DivergenceError:
        first.diverged = True
    finally:
        first.group = [first]
    first.raise_if_interrupted()
    for trainer in trainers:
        try:
            check_size(trainer.machine, trainer.recipe, trainer.update)
        except DivergenceError:
            trainer.diverged = True
