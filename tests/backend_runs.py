"""Training runs without a trainer: a machine, its data, its settings and its state, for tests of backends.

Random numbers are a function of the seed and the update, so two runs that start alike can be compared after any number
of updates, whatever backend computes them.
"""

import copy
import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from mvrbm import BoltzmannMachine, Coupling, Kronecker, RandomSource, Unit
from mvrbm.backends.base import UpdateBackend
from mvrbm.data.sources import as_source
from mvrbm.updates import initialization
from mvrbm.updates.gradient import WHOLE, Centering, Share
from mvrbm.updates.recipe import Recipe
from mvrbm.updates.state import TrainState
from mvrbm.updates.update import UpdateSettings

#: Recipes whose learning rates make a difference within a few updates.
DEFAULT = Recipe(learning_rate=0.05, batch_size=8)
PAPER = Recipe(
    batch_size=8,
    learning_rate=0.01,
    bias_learning_rate=None,
    weight_decay=0.01,
    bias_from_data=False,
    factor_std=0.3,
    centering="none",
    rate_decay=None,
    normalized=False,
)


class Case(NamedTuple):
    """A machine, given by functions that make its units, and how it is trained. An integer stands for Kronecker."""

    layers: Mapping[str, Callable[[], Unit]]
    hidden: Callable[[], Unit]
    couplings: Sequence[int | Coupling]
    recipe: Recipe = DEFAULT
    sizes: Sequence[int] = (8, 8, 5)  # numbers of samples of each batch


class Run(NamedTuple):
    """A training run at its start."""

    settings: UpdateSettings
    state: TrainState
    batches: list[dict[str, Tensor]]


def start(case: Case, *, dtype: torch.dtype = torch.float32, by_autograd: bool = False, seed: int = 5) -> Run:
    """Initialize a run. Runs of the same case start at the same parameters, rounded to float32."""
    couplings = {
        name: Kronecker(coupling) if isinstance(coupling, int) else copy.deepcopy(coupling)
        for name, coupling in zip(case.layers, case.couplings, strict=True)
    }
    machine = BoltzmannMachine({name: unit() for name, unit in case.layers.items()}, case.hidden(), couplings)
    everything = samples(machine, max(1, sum(case.sizes)))
    moments = as_source(everything, machine).moments()
    initialization.initialize(machine, case.recipe, moments, RandomSource(3))
    center = initialization.offsets(machine, case.recipe, moments)
    machine.to(dtype)
    state = TrainState(machine, RandomSource(seed))
    state.relative_rates = dict.fromkeys(list(case.layers)[1:], 0.5)
    follow_hidden = case.recipe.centering == "full"
    if follow_hidden or any(bool(offset.any()) for offset in center.values()):
        state.centering = Centering(machine, center, follow_hidden=follow_hidden)
    settings = UpdateSettings(
        recipe=case.recipe,
        negative=case.recipe.negative,
        by_autograd=by_autograd,
        optimizer=None,
        all_reduce=lambda gradient: None,
        n_processes=1,
        every_batch=False,
    )
    parts = {name: array[: sum(case.sizes)].to(dtype).split(list(case.sizes)) for name, array in everything.items()}
    batches = [{name: parts[name][number] for name in parts} for number in range(len(case.sizes))]
    return Run(settings, state, batches)


def samples(machine: BoltzmannMachine, n: int, seed: int = 3) -> dict[str, Tensor]:
    """Return random data for every layer of a machine, as float32."""
    generator = torch.Generator().manual_seed(seed)
    data = {}
    for name, unit in machine.layers.items():
        gray = torch.rand((n, *unit.shape), generator=generator)
        if unit.entry_modes:
            data[name] = torch.nn.functional.one_hot(gray.argmax(-1), unit.shape[-1]).float()
        else:
            data[name] = 5 + 3 * gray if unit.gaussian else gray
    return data


def train(backend: UpdateBackend, run: Run, *, share: Share = WHOLE, full: int | None = None) -> TrainState:
    """Make one update per batch, and return the state after them.

    Batches shorter than `full`, by default the longest batch, have a smaller weight.
    """
    state = run.state
    if full is None:
        full = max(1, *(len(next(iter(batch.values()))) for batch in run.batches), 1)
    for batch in run.batches:
        weight = max(1, len(next(iter(batch.values())))) / full
        backend.update(state, batch, weight, share)
    return backend.store(state)


def everything_in(state: TrainState) -> dict[str, Tensor]:
    """Return parameters, momenta, chains and the hidden offset of a state by name."""
    found = {f"parameter {name}": parameter.detach() for name, parameter in state.machine.named_parameters()}
    found |= {f"momentum {name}": momentum for name, momentum in state.momenta.items()}
    found |= {f"chains {name}": chains for name, chains in state.chains.items()}
    if state.centering is not None and state.centering.hidden is not None:
        found["offset"] = state.centering.hidden
    return found


def assert_equal_states(found: TrainState, expected: TrainState, *, rtol: float, atol: float) -> None:
    """Check parameters, momenta, chains and the number of updates. `atol` is relative to the largest entry."""
    assert found.update == expected.update
    mine = everything_in(found)
    exact = everything_in(expected)
    assert mine.keys() == exact.keys()
    for name, value in exact.items():
        scale = max(1.0, float(value.abs().max())) if value.numel() else 1.0
        torch.testing.assert_close(
            mine[name].double(), value.double(), rtol=rtol, atol=atol * scale, msg=lambda text, n=name: f"{n}: {text}"
        )
        assert mine[name].is_contiguous()


def with_negative(recipe: Recipe, negative: object, **changes: object) -> Recipe:
    """Return a recipe with another negative phase and other settings."""
    return dataclasses.replace(recipe, negative=negative, **changes)
