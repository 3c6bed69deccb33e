"""Small training runs of the reference and of other backends with the same random numbers, for tests to compare."""

import dataclasses
import math

import torch

from mvrbm import BoltzmannMachine
from mvrbm.couplings import Kronecker
from mvrbm.data.sources import as_source
from mvrbm.training import PCD, Recipe, Trainer
from mvrbm.units import Gaussian

ON_GPU = torch.cuda.is_available()
DEVICE = "cuda" if ON_GPU else "cpu"
#: Precision of products that is comparable to float32.
PRECISE = "tf32x3" if ON_GPU else "ieee"

#: Samples per batch. Two batches, one of them short, are enough; the interpreter is slow.
BATCH_SIZE = 8
N = 12
MISSING_STEPS = 2

PAPER = Recipe(
    learning_rate=0.05, bias_learning_rate=None, weight_decay=0.01, bias_from_data=False, factor_std=0.3,
    centering="none", rate_decay=None, normalized=False, balance=False, batch_size=BATCH_SIZE,
)  # fmt: skip
DEFAULT = Recipe(learning_rate=0.2, balance=False, batch_size=BATCH_SIZE)
FULL = dataclasses.replace(DEFAULT, centering="full")


def with_chains(recipe, *arguments, kind=PCD):
    return dataclasses.replace(recipe, negative=kind(*arguments))


def never():
    return False


def unchanged(machine):
    pass


def spread(shape):
    """Gaussian units whose variances are not 1, and differ."""
    unit = Gaussian(shape)
    unit.log_variance.data.copy_(torch.linspace(-0.5, 0.9, unit.log_variance.numel()).view(unit.log_variance.shape))
    return unit


def learning(shape):
    """Gaussian units that learn their variances."""
    unit = Gaussian(shape, learn_variance=True)
    unit.log_variance.data.copy_(spread(shape).log_variance.data)
    return unit


def machine_of(visible, hidden, links):
    """Build a machine from functions that make layers, by name or in order, and couplings or their ranks."""
    if not isinstance(visible, dict):
        visible = {f"x{number}": make for number, make in enumerate(visible)}
    layers = {name: make() for name, make in visible.items()}
    couplings = {
        name: Kronecker(link) if isinstance(link, int) else link.copy_without_shapes()
        for name, link in zip(layers, links, strict=True)
    }
    return BoltzmannMachine(layers, hidden(), couplings, std=0.3).to(DEVICE)


def data_for(machine, n, seed=3):
    generator = torch.Generator().manual_seed(seed)
    data = {}
    for name, unit in machine.layers.items():
        gray = torch.rand((n, *unit.shape), generator=generator)
        if unit.entry_modes:
            data[name] = torch.nn.functional.one_hot(gray.argmax(-1), unit.shape[-1]).float()
        else:
            data[name] = (5 + 3 * gray) if unit.gaussian else (gray * 255).to(torch.uint8)
    return data


def masks_for(machine, n):
    """Mark two of three entries of the last layer as known, or two of three sites if it is categorical."""
    name, unit = list(machine.layers.items())[-1]
    sites = unit.shape[:-1] if unit.entry_modes else unit.shape
    known = (torch.arange(n * math.prod(sites)) * 7 % 3 > 0).view(n, *sites)
    return {name: known[..., None].expand(n, *unit.shape) if unit.entry_modes else known}


def prepared(case, seed=5, recipe=None, n=N, *, masked=False):
    """Return a trainer that is ready to train, and its data."""
    trainer = Trainer(machine_of(*case[:3]), recipe or case[3], seed=seed)
    mask = {name: known.roll(seed, 0) for name, known in masks_for(trainer.machine, n).items()} if masked else None
    source = as_source(data_for(trainer.machine, n), trainer.machine, mask=mask)
    trainer.prepare(source, initialize=True)
    return trainer, source


def orders(trainers, epoch=0, n=N):
    return torch.stack([trainer.order_rng.at_step(epoch).permutation(n, DEVICE) for trainer in trainers])


def trainer_for(case, change, masked, n, **how):
    machine = machine_of(*case[:3])
    data = data_for(machine, n)
    mask = masks_for(machine, n) if masked else None
    Trainer(machine, case[3], seed=5, backend="autograd").prepare(data, mask=mask, initialize=True)
    change(machine)
    start = {key: value.clone() for key, value in machine.state_dict().items()}
    trainer = Trainer(machine.to(how.pop("dtype", torch.float32)), case[3], seed=5, missing_steps=MISSING_STEPS, **how)
    source = trainer.prepare(as_source(data, machine, mask=mask))
    trainer.state.relative_rates = dict.fromkeys(list(machine.layers)[1:], 0.5)
    return trainer, source, start


def by_reference(case, dtype=torch.float64, *, change=unchanged, masked=False, n=N, n_epochs=1):
    """Train by the reference, and return the trainer and the parameters before the first update."""
    trainer, source, start = trainer_for(case, change, masked, n, dtype=dtype, backend="autograd")
    for epoch in range(n_epochs):
        for batch in source.batches(BATCH_SIZE, trainer.order_rng.at_step(epoch)):
            trainer.train_on(batch, weight=len(batch) / BATCH_SIZE)
    return trainer, start


def by_kernels(
    case, kind, precision=PRECISE, *, change=unchanged, masked=False, n=N, n_epochs=1, series=None,
    adjust=unchanged,
):  # fmt: skip
    """Train by a class of kernel backends, and return the trainer. `series` is the number of updates per graph."""
    trainer, source, _ = trainer_for(case, unchanged, masked, n)
    backend = kind([trainer.update_settings()], [trainer.state], [source], precision=precision)
    backend.updates_per_graph = series or backend.updates_per_graph
    adjust(backend)
    change(trainer.machine)
    backend.load([trainer.state])
    for epoch in range(n_epochs):
        made = backend.epoch([trainer.state], orders([trainer], epoch, n), never)
        assert made == -(-n // BATCH_SIZE)
    assert backend.store([trainer.state]) == [False]
    return trainer


def everything(trainer):
    """Return parameters, momenta, chains and offsets by name, as float32."""
    state = trainer.state
    found = dict(trainer.machine.state_dict())
    assert set(state.momenta) == set(state.learned)
    found.update({f"momentum of {name}": momentum for name, momentum in state.momenta.items()})
    found.update({f"chains of {name}": chain for name, chain in state.chains.items()})
    if state.centering is not None and state.centering.hidden is not None:
        found["offset"] = state.centering.hidden
    return {name: value.float() for name, value in found.items()}


def assert_same_result(reference, trainer, start, *, atol=5e-5, chain_atol=5e-5, momentum_rtol=None):
    """Compare two training runs, the first of which must have changed the parameters noticeably."""
    rtol = 2e-3 if ON_GPU else 2e-4
    assert trainer.update == reference.update > 0
    expected = everything(reference)
    found = everything(trainer)
    assert found.keys() == expected.keys()
    for key, value in expected.items():
        tolerance = {
            "rtol": momentum_rtol or rtol if key.startswith("momentum") else rtol,
            "atol": chain_atol if key.startswith("chains") else atol,
        }
        torch.testing.assert_close(found[key], value, **tolerance, msg=lambda m, k=key: f"{k}: {m}")
    changes = [float((expected[key] - value.float()).abs().max()) for key, value in start.items()]
    assert max(changes) > 5e-3, "the reference has hardly learned: the comparison says nothing"


def relative_distance(reference, trainer, start):
    """Return the distance of the couplings of two training runs, relative to how far the reference has moved."""
    expected = everything(reference)
    found = everything(trainer)
    keys = [key for key in start if key.startswith("couplings")]
    moved = torch.cat([(expected[key] - start[key].float()).flatten() for key in keys])
    apart = torch.cat([(expected[key] - found[key]).flatten() for key in keys])
    return float(torch.linalg.vector_norm(apart) / torch.linalg.vector_norm(moved))
