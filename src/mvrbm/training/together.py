"""Train several machines of the same shapes together, which share the kernels of one GPU."""

import time
from collections.abc import Hashable, Sequence
from typing import Any, NamedTuple

from mvrbm.backends.base import EpochBackend
from mvrbm.backends.choose import choose_backend, kernel_backend
from mvrbm.data.sources import as_source
from mvrbm.errors import DivergenceError
from mvrbm.interrupt import finish_on_interrupt
from mvrbm.training.epochs import EpochLoop
from mvrbm.training.trainer import Trainer
from mvrbm.updates.step import check_size


class Outcome(NamedTuple):
    """How the training of one of several machines ended."""

    #: Whether training diverged.
    diverged: bool
    #: This machine's share of the time.
    seconds: float


def fit_together(trainers: Sequence[Trainer], data: Sequence[Any], *, initialize: bool | None = None) -> list[Outcome]:
    """Train several machines. Machines of the same shapes are trained together if a GPU backend supports it.

    Parameters
    ----------
    trainers : sequence of Trainer
        One trainer per machine. Trainers with callbacks train alone.
    data : sequence
        The data of each trainer. Pass the same object for trainers that share their data.
    initialize : bool, optional
        Whether training starts from new parameters; see :meth:`Trainer.fit`.

    Returns
    -------
    list of Outcome
        For each machine, whether training diverged, and its share of the time in seconds.
    """
    groups: dict[Hashable, list[int]] = {}
    for index, (trainer, samples) in enumerate(zip(trainers, data, strict=True)):
        groups.setdefault(_group_key(trainer, samples, index), []).append(index)
    outcomes: dict[int, Outcome] = {}
    for indices in groups.values():
        members = [trainers[index] for index in indices]
        samples = [data[index] for index in indices]
        began = time.perf_counter()
        if len(members) > 1:
            diverged = _fit_group(members, samples, initialize)
        else:
            diverged = [_fit_alone(members[0], samples[0], initialize)]
        seconds = (time.perf_counter() - began) / len(members)
        outcomes |= {index: Outcome(failed, seconds) for index, failed in zip(indices, diverged, strict=True)}
    return [outcomes[index] for index in range(len(trainers))]


def _group_key(trainer: Trainer, samples: Any, index: int) -> Hashable:
    """Return what training runs must have in common to train together. A run that must train alone has its index."""
    source = as_source(samples, trainer.machine)
    kernels = kernel_backend(trainer.update_settings(), trainer.state, source, 1, name=trainer.backend)
    if kernels is None or trainer.callbacks:
        return index
    machine = trainer.machine
    recipe = trainer.recipe
    layers = tuple(
        (name, unit.name, unit.learns_statistic, unit.shape, machine.links[name].name)
        for name, unit in machine.layers.items()
    )
    hidden = machine.hidden.name, machine.hidden.shape
    schedule = recipe.n_epochs, recipe.batch_size, source.n_samples, trainer.missing_steps
    rule = recipe.negative, recipe.normalized, recipe.balance, recipe.centering
    return trainer.backend, kernels, layers, hidden, schedule, rule


def _fit_alone(trainer: Trainer, samples: Any, initialize: bool | None) -> bool:
    """Train one machine, and return whether training diverged."""
    try:
        trainer.fit(samples, initialize=initialize)
    except DivergenceError:
        return True
    trainer.raise_if_interrupted()
    return False


def _fit_group(trainers: Sequence[Trainer], data: Sequence[Any], initialize: bool | None) -> list[bool]:
    """Train machines of the same shapes together, and return which of them diverged."""
    sources = [trainers[0].prepare(data[0], initialize=initialize)]
    for trainer, samples in zip(trainers[1:], data[1:], strict=True):
        same = samples is data[0]
        sources.append(trainer.prepare(sources[0] if same else samples, initialize=initialize))
    recipe = trainers[0].recipe
    settings = [trainer.update_settings() for trainer in trainers]
    states = [trainer.state for trainer in trainers]
    backend = choose_backend(settings, states, sources, threads=1, name=trainers[0].backend)
    assert isinstance(backend, EpochBackend)  # the kernels of the group's key
    loop = EpochLoop(backend, states, sources, [trainer.order_rng for trainer in trainers])
    diverged = [False] * len(trainers)
    interrupts: list[type[BaseException]] = []
    with finish_on_interrupt(interrupts.append):
        while states[0].epoch < recipe.n_epochs and not interrupts:
            loop.run(lambda: bool(interrupts))
            last = bool(interrupts) or states[0].epoch + 1 >= recipe.n_epochs
            if last or states[0].machine.hidden.gaussian:
                diverged = loop.store()
            loop.balance(recipe)
            for state in states:
                state.epoch += 1
                state.batch = 0
            if not last:
                loop.load()
    if interrupts:
        raise interrupts[0]
    return [failed or _is_too_large(trainer) for failed, trainer in zip(diverged, trainers, strict=True)]


def _is_too_large(trainer: Trainer) -> bool:
    """Return whether training ended with an energy that is unbounded, or with factors that saturate every unit."""
    try:
        trainer.machine.check_bounded()
        check_size(trainer.machine, trainer.recipe, trainer.update)
    except (DivergenceError, ValueError):
        return True
    return False
