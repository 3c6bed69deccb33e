"""Joint training of several machines with the same shapes, using shared kernels on one GPU."""

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
from mvrbm.updates.step import check_size, limit_overshoot


class Outcome(NamedTuple):
    """Training outcome for one of several machines."""

    #: Whether training diverged.
    diverged: bool
    #: This machine's share of the training time, in seconds.
    seconds: float


def fit_together(trainers: Sequence[Trainer], data: Sequence[Any], *, initialize: bool | None = None) -> list[Outcome]:
    """Train several machines. Machines with the same shapes are trained together if a GPU backend supports it.

    Parameters
    ----------
    trainers : sequence of Trainer
        One trainer per machine. Trainers with callbacks are run separately.
    data : sequence
        Data for each trainer. Pass the same object to trainers that share data.
    initialize : bool, optional
        Whether to start training from newly initialized parameters. See :meth:`Trainer.fit`.

    Returns
    -------
    list of Outcome
        For each machine, whether training diverged, and the machine's share of the training time in seconds.
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
    """Return a key that is equal for runs that can be trained together. The key of other runs is their index."""
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
    """Train one machine and return whether training diverged."""
    try:
        trainer.fit(samples, initialize=initialize)
    except DivergenceError:
        return True
    trainer.raise_if_interrupted()
    return False


def _fit_group(trainers: Sequence[Trainer], data: Sequence[Any], initialize: bool | None) -> list[bool]:
    """Train machines with the same shapes together and return, for each machine, whether training diverged."""
    sources = [trainers[0].prepare(data[0], initialize=initialize)]
    for trainer, samples in zip(trainers[1:], data[1:], strict=True):
        same = samples is data[0]
        sources.append(trainer.prepare(sources[0] if same else samples, initialize=initialize))
    recipe = trainers[0].recipe
    settings = [trainer.update_settings() for trainer in trainers]
    states = [trainer.state for trainer in trainers]
    backend = choose_backend(settings, states, sources, threads=1, name=trainers[0].backend)
    assert isinstance(backend, EpochBackend)  # guaranteed by `_group_key`
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
                limit_overshoot(state.machine)
                state.epoch += 1
                state.batch = 0
            if not last:
                loop.load()
    if interrupts:
        raise interrupts[0]
    return [failed or _is_too_large(trainer) for failed, trainer in zip(diverged, trainers, strict=True)]


def _is_too_large(trainer: Trainer) -> bool:
    """Return whether training ended with an unbounded energy, or with factors so large that all units saturate."""
    try:
        trainer.machine.check_bounded()
        check_size(trainer.machine, trainer.recipe, trainer.update)
    except (DivergenceError, ValueError):
        return True
    return False
