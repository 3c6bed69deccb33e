"""Train several machines with the same shapes together on one GPU, using kernels that update all machines at once."""

import time
from collections.abc import Hashable, Sequence
from typing import Any, NamedTuple, cast

from mvrbm.backends.base import EpochBackend
from mvrbm.backends.choose import choose_backend, kernel_backend
from mvrbm.data.sources import Source
from mvrbm.errors import DivergenceError
from mvrbm.interrupt import finish_on_interrupt
from mvrbm.training.epochs import EpochLoop
from mvrbm.training.trainer import Trainer
from mvrbm.updates.step import check_size


class Outcome(NamedTuple):
    """Training outcome for one of the machines passed to :func:`fit_together`."""

    #: Whether training diverged.
    diverged: bool
    #: This machine's share of the training time, in seconds.
    seconds: float


def fit_together(
    trainers: Sequence[Trainer],
    data: Sequence[Any],
    *,
    masks: Sequence[Any] | None = None,
    initialize: bool | None = None,
) -> list[Outcome]:
    """Train several machines. Machines with the same shapes are trained together if a GPU backend supports it.

    Parameters
    ----------
    trainers : sequence of Trainer
        One trainer per machine. Trainers with callbacks are run separately.
    data : sequence
        Data for each trainer. Pass the same object to trainers that share data.
    masks : sequence, optional
        Mask of the known entries for each trainer, or None. See :meth:`Trainer.fit`. Trainers that share data must also
        share the mask.
    initialize : bool, optional
        Whether to start training from newly initialized parameters. See :meth:`Trainer.fit`.

    Returns
    -------
    list of Outcome
        Outcome for each machine: whether training diverged, and the machine's share of the training time.
    """
    # Prepare all runs first, because the prepared states decide which runs can be trained together.
    sources = [
        trainer.prepare(samples, mask=mask, initialize=initialize)
        for trainer, samples, mask in zip(trainers, data, masks or [None] * len(data), strict=True)
    ]
    outcomes: dict[int, Outcome] = {}
    for kernels, indices in _groups(trainers, sources):
        began = time.perf_counter()
        if kernels is None:
            diverged = [_fit_alone(trainers[index], sources[index]) for index in indices]
        else:
            members = [trainers[index] for index in indices]
            same_data = {id(data[index]): sources[index] for index in indices}
            shared = [same_data[id(data[index])] for index in indices]
            diverged = _fit_group(members, shared, [sources[index] for index in indices], kernels)
        seconds = (time.perf_counter() - began) / len(indices)
        outcomes |= {index: Outcome(failed, seconds) for index, failed in zip(indices, diverged, strict=True)}
    return [outcomes[index] for index in range(len(trainers))]


def _groups(trainers: Sequence[Trainer], sources: Sequence[Source]) -> list[tuple[str | None, list[int]]]:
    """Divide prepared runs into groups that can be trained together.

    Returns the backend for each group and the indices of its runs. The backend is None if a group has only one run.
    """
    similar: dict[Hashable, list[int]] = {}
    for index, (trainer, source) in enumerate(zip(trainers, sources, strict=True)):
        key = index if trainer.callbacks else _group_key(trainer, source)
        similar.setdefault(key, []).append(index)
    groups: list[tuple[str | None, list[int]]] = []
    for indices in similar.values():
        # Similar machines may differ in their ranks, and therefore in the backends that support them.
        by_backend: dict[str | None, list[int]] = {}
        for index in indices:
            trainer = trainers[index]
            run = trainer.update_settings(), trainer.state, sources[index], len(indices)
            by_backend.setdefault(kernel_backend(*run, name=trainer.backend), []).append(index)
        for kernels, members in by_backend.items():
            if kernels is None or len(members) == 1:
                groups += [(None, [index]) for index in members]
            else:
                groups.append((kernels, members))
    return groups


def _group_key(trainer: Trainer, source: Source) -> Hashable:
    """Return a key for grouping. Runs with equal keys can be trained together if a backend supports them."""
    machine = trainer.machine
    recipe = trainer.recipe
    state = trainer.state
    layers = tuple(
        (name, unit.name, unit.learns_statistic, unit.shape, machine.links[name].name)
        for name, unit in machine.layers.items()
    )
    hidden = machine.hidden.name, machine.hidden.shape
    place = machine.like.dtype, machine.like.device
    schedule = recipe.n_epochs, recipe.batch_size, source.n_samples, trainer.missing_steps
    rule = recipe.negative, recipe.normalized, recipe.balance, recipe.centering
    centering = None if state.centering is None else state.centering.follow_hidden
    position = state.epoch, state.batch, state.update, bool(state.chains)
    return trainer.backend, layers, hidden, place, schedule, rule, centering, position


def _fit_alone(trainer: Trainer, source: Source) -> bool:
    """Train one prepared machine and return whether training diverged."""
    try:
        trainer.fit(source)
    except DivergenceError:
        return True
    trainer.raise_if_interrupted()
    return False


def _fit_group(
    trainers: Sequence[Trainer], shared: Sequence[Source], sources: Sequence[Source], kernels: str
) -> list[bool]:
    """Train prepared machines with the same shapes together and return whether each one diverged.

    `sources` contains the source of each run, with its sample weights. Equal entries of `shared` have equal data.
    """
    for trainer in trainers:
        trainer.start_fit()
    settings = [trainer.update_settings() for trainer in trainers]
    states = [trainer.state for trainer in trainers]
    # All backends that train groups compute whole epochs.
    backend = cast(EpochBackend, choose_backend(settings, states, shared, threads=1, name=kernels))
    loop = EpochLoop(backend, trainers, sources)

    def stop(interrupt: type[BaseException]) -> None:
        for trainer in trainers:
            trainer.request_stop(interrupt)

    try:
        with finish_on_interrupt(stop):
            loop.fit()
    except BaseException:
        for trainer in trainers:
            trainer.failed = True
        raise
    trainers[0].raise_if_interrupted()
    for trainer, diverged in zip(trainers, loop.diverged, strict=True):
        trainer.failed = diverged or _is_too_large(trainer)
    return [trainer.failed for trainer in trainers]


def _is_too_large(trainer: Trainer) -> bool:
    """Return whether training ended with an unbounded energy, or with factors so large that all units saturate."""
    try:
        trainer.machine.check_bounded()
        check_size(trainer.machine, trainer.recipe, trainer.update)
    except (DivergenceError, ValueError):
        return True
    return False
