"""Choose the number of components, and whether to use gates, by the likelihood of held-out samples."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from mvrbm.estimators.mixture.training import Samples, Stop, Training
from mvrbm.random import RandomSource
from mvrbm.units import WhitenedMixture

# Number of samples below which there is cross-validation, and the number of folds. Otherwise, one part is held out.
_FEW = 1000
_FOLDS = 4
# Number of entries of all samples above which only this number of folds is used, because training takes long.
_MANY_ENTRIES = 200_000
_FEWER_FOLDS = 2
# Fraction and maximum number of samples in that part.
_HELD_OUT = 0.2
_MOST_HELD_OUT = 20_000
# Minimum number of different complete samples required to choose anything, and to choose the number of components.
_FEWEST_TO_CHOOSE, _FEWEST_FOR_COMPONENTS = 3, 20
# Number of components up to which all candidates are tried. Two components can be no better than one where four are,
# such as for samples along a circle.
_ALWAYS_TRIED = 4
# Maximum number of components to try, and minimum number of samples per component.
_MOST_COMPONENTS = 256
FEWEST_SAMPLES = 10

#: Function that creates and initializes a mixture of a number of components, with or without gates.
Make = Callable[[Samples, int, bool, RandomSource], WhitenedMixture]


@dataclass(frozen=True)
class Choice:
    """Chosen settings, and the likelihoods of held-out samples by number of components and gates."""

    n_components: int
    gate: bool
    n_epochs: int | None  # None: the number without held-out samples
    scores: dict[tuple[int, bool], float]


@dataclass(frozen=True)
class _Trial:
    score: float
    n_epochs: int | None


def choose(
    make: Make,
    training: Training,
    samples: Samples,
    n_components: int | None,
    gates: Sequence[bool],
    rng: RandomSource,
    stop: Stop,
) -> Choice:
    """Choose whether to use gates, the number of components if it is None, and the number of epochs.

    The gates are chosen for one component, or for the given number. Then the number of components is doubled, up to 4
    in any case, and further for as long as this improves the likelihood of held-out samples. With fewer than 20
    different complete samples, the number of components is 1 if it is None. With fewer than 3, nothing is compared, and
    gates are used only if `gates` leaves no choice.
    """
    most = max(1, int(samples.total) // FEWEST_SAMPLES)
    count = 1 if n_components is None else min(n_components, most)
    complete = samples.complete()
    # A sample that is repeated counts once, as does a sample with a large weight.
    different, number = torch.unique(samples.values[complete[:_FEW]].flatten(1), dim=0, return_inverse=True)
    if len(different) < _FEWEST_TO_CHOOSE:
        return Choice(count, gates[0], None, {})
    unit = make(samples, 1, False, rng.split(1)[0])
    samples = samples.standardized(unit)  # single precision is precise enough for a choice, and fast
    jacobian = -float(unit.log_scale.sum())
    if len(different) < _FEWEST_FOR_COMPONENTS:
        n_components = count
        groups = number % _FOLDS  # equal samples are in the same fold
        folds = [_held_out(len(samples), complete[: len(groups)][groups == fold]) for fold in groups.unique()]
    else:
        folds = _folds(samples.values, complete[rng.permutation(len(complete), complete.device)])
    trials: dict[tuple[int, bool], _Trial] = {}

    def attempt(count: int, gate: bool) -> None:
        trial = _trial(make, training, samples, folds, count, gate, rng.split(1)[0], stop)
        if stop.error is None:
            trials[count, gate] = trial
            if training.verbose:
                print(_description(count, gate, trial.score + jacobian), file=sys.stderr, flush=True)

    for gate in gates:
        attempt(count, gate)
    best = max(trials, key=lambda key: trials[key].score, default=(count, gates[0]))
    while n_components is None and stop.error is None and 2 * count <= min(_MOST_COMPONENTS, most):
        count *= 2
        attempt(count, best[1])
        if (count, best[1]) in trials and trials[count, best[1]].score > trials[best].score:
            best = count, best[1]
        elif count >= _ALWAYS_TRIED:
            break
    n_epochs = trials[best].n_epochs if best in trials else None
    return Choice(*best, n_epochs, {key: trial.score + jacobian for key, trial in trials.items()})


def _description(count: int, gate: bool, score: float) -> str:
    components = "1 component" if count == 1 else f"{count} components"
    gates = "with gates" if gate else "without gates"
    return f"{components} {gates}: mean log-likelihood of held-out samples is {score:.4f} nats"


def _folds(x: Tensor, complete: Tensor) -> list[tuple[Tensor, Tensor]]:
    """Return pairs of indices of training samples and of held-out samples, which are complete."""
    n = len(x)
    if n < _FEW:
        parts = complete.tensor_split(_FOLDS)[: _FOLDS if x.numel() <= _MANY_ENTRIES else _FEWER_FOLDS]
    else:
        parts = (complete[: min(int(_HELD_OUT * len(complete)), _MOST_HELD_OUT)],)
    return [_held_out(n, held) for held in parts]


def _held_out(n: int, held: Tensor) -> tuple[Tensor, Tensor]:
    """Return the indices of the other samples, and of those held out."""
    rest = torch.ones(n, dtype=torch.bool, device=held.device)
    rest[held] = False
    return torch.nonzero(rest)[:, 0], held


def _trial(
    make: Make,
    training: Training,
    samples: Samples,
    folds: Sequence[tuple[Tensor, Tensor]],
    n_components: int,
    gate: bool,
    rng: RandomSource,
    stop: Stop,
) -> _Trial:
    """Train on each fold, and return the best mean likelihood of held-out samples over the epochs."""
    scores = []
    for rest, held in folds:
        part = samples.part(rest)
        unit = make(part, n_components, gate, rng.split(1)[0])
        course = training.run(unit, part, rng.split(1)[0], stop, samples.part(held))
        if stop.error is not None:
            return _Trial(0.0, None)
        scores.append(course.held_out)
    # A run that ended early keeps its last score.
    longest = max(map(len, scores))
    means = [sum(run[min(epoch, len(run) - 1)] for run in scores) / len(scores) for epoch in range(longest)]
    best = max(range(longest), key=means.__getitem__)
    # The last epoch of training does not change the parameters: two epochs are one update.
    return _Trial(means[best], best + 2 if best < longest - 1 else None)
