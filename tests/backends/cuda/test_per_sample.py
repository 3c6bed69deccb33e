"""The kernels with one program per sample against the reference, with the same random numbers.

They run in Triton's interpreter, or on a GPU where there is one.
"""

import dataclasses
import importlib.util

import pytest
import torch
from torch.utils.data import DataLoader

from mvrbm.couplings import Dense
from mvrbm.data.sources import as_source
from mvrbm.training import PCD, Callback, Trainer
from mvrbm.units import Bernoulli, Categorical, Gaussian

if importlib.util.find_spec("triton") is None:
    pytest.skip("the kernels need triton", allow_module_level=True)
from backends.cuda.matrix_cases import CASES
from backends.cuda.training_runs import (
    DEFAULT,
    DEVICE,
    ON_GPU,
    PAPER,
    PRECISE,
    assert_same_result,
    by_kernels,
    by_reference,
    data_for,
    machine_of,
    never,
    relative_distance,
)
from mvrbm.backends.cuda.per_sample import PerSampleBackend, fewest_waves, unsupported_reason

B = Bernoulli
C = Categorical
G = Gaussian

#: Cases with several visible matrices or wide ones, which are for other backends.
NOT_SMALL = ("two layers", "two layers, PCD", "more than a tile")
SMALL = [name for name in CASES if name not in NOT_SMALL]
#: With steps in the next launch, gradients have three buffers: five updates use all of them, and two epochs show that
#: the next series starts from the right ones.
ALL_BUFFERS = ("bernoulli, paper", "bernoulli, default")


def length(name):
    return {"n": 36, "n_epochs": 2} if name in ALL_BUFFERS else {}


def launched(samples, late):
    """Return a function that sets the number of samples per program, and whether steps are made by the next launch."""

    def adjust(backend):
        late_steps = late and not backend._launch.stacked
        backend._launch = dataclasses.replace(backend._launch, samples=samples, late_steps=late_steps)

    return adjust


def multiplied(scale):
    """Return a function that multiplies the factors of a machine."""

    def change(machine):
        with torch.no_grad():
            for link in machine.links.values():
                for factor in link.parameters():
                    factor.mul_(scale)

    return change


def prepared(layers, hidden, ranks, recipe=DEFAULT, n=20):
    trainer = Trainer(machine_of(layers, hidden, ranks), recipe, seed=5)
    source = as_source(data_for(trainer.machine, n), trainer.machine)
    trainer.prepare(source, initialize=True)
    return trainer, source


def kernels(trainers, sources, precision=None):
    """Return the backend of the kernels for prepared trainers, and the states that it works on."""
    states = [trainer.state for trainer in trainers]
    return PerSampleBackend(
        [trainer.update_settings() for trainer in trainers], states, sources, precision=precision
    ), states


def small():
    return {"x": lambda: B((6, 5))}


def hidden():
    return B((4, 7))


@pytest.mark.parametrize(
    ("name", "samples", "late"),
    [
        *[(name, 1, True) for name in SMALL],
        *[
            (name, 3, False)
            for name in ("bernoulli, default", "gaussian data, default", "rank 3", "PCD", "label", "label first, paper")
        ],
    ],
)
@pytest.mark.usefixtures("interpreted")
def test_the_kernels_train_as_the_reference_does(name, samples, late):
    reference, start = by_reference(CASES[name], **length(name))
    mine = by_kernels(CASES[name], PerSampleBackend, adjust=launched(samples, late), **length(name))
    assert_same_result(reference, mine, start, atol=2e-5, chain_atol=1e-4, momentum_rtol=2e-3)


@pytest.mark.parametrize(
    ("name", "scale"),
    [("bernoulli, paper", 1e-6), ("bernoulli, default", 1.0), ("rank 3", 1e-6), ("PCD", 1.0), ("label", 1.0)],
)
@pytest.mark.usefixtures("interpreted")
def test_operands_of_sixteen_bits_change_the_result_by_their_rounding(name, scale):
    change = multiplied(scale)
    reference, start = by_reference(CASES[name], torch.float32, change=change)
    mine = by_kernels(CASES[name], PerSampleBackend, "fp16", change=change, adjust=launched(3, True))
    # A rounded field may lie on the other side of its random number: then one state of hundreds differs.
    assert 1e-6 < relative_distance(reference, mine, start) < 0.08


@pytest.mark.usefixtures("interpreted")
@pytest.mark.parametrize(
    ("unit", "recipe", "mixed"), [(B, PAPER, False), (B, DEFAULT, True), (G, DEFAULT, False)], ids=["B", "mixed", "G"]
)
def test_machines_with_data_of_their_own_train_as_by_themselves(unit, recipe, mixed):
    recipe = dataclasses.replace(recipe, learning_rate=0.01, batch_size=8)

    def trained_together(seeds):
        trainers = [Trainer(machine_of({"x": lambda: unit((6, 5))}, hidden, [1]), recipe, seed=seed) for seed in seeds]
        sources = []
        for trainer, seed in zip(trainers, seeds, strict=True):
            x = data_for(trainer.machine, 12, seed)["x"]
            x = (100 * seed + 10 * x) if unit is G else x.float() / 255 if mixed and seed else x
            sources.append(as_source(x, trainer.machine))
            trainer.prepare(sources[-1], initialize=True)
        backend, states = kernels(trainers, sources, PRECISE)
        made = backend.epoch(states, torch.arange(12, device=DEVICE).expand(len(seeds), -1), never)
        assert [state.update for state in states] == [made] * len(seeds) == [2] * len(seeds)
        assert backend.store(states) == [False] * len(seeds)
        return [trainer.machine.state_dict() for trainer in trainers]

    for mine, alone in zip(trained_together([0, 1]), trained_together([0]) + trained_together([1]), strict=True):
        for key, value in alone.items():
            torch.testing.assert_close(mine[key], value, rtol=1e-4, atol=1e-5)


@pytest.mark.usefixtures("interpreted")
def test_machines_with_labels_of_their_own_train_as_by_themselves():
    recipe = dataclasses.replace(DEFAULT, batch_size=8, negative=PCD(9))

    def trained_together(seeds):
        layers = {"label": lambda: C(3), "x": lambda: B((6, 5))}
        trainers, sources = [], []
        for seed in seeds:
            machine = machine_of(layers, hidden, [Dense(), 2])
            trainers.append(Trainer(machine, recipe, seed=seed))
            sources.append(as_source(data_for(machine, 12, seed), machine))
            trainers[-1].prepare(sources[-1], initialize=True)
        backend, states = kernels(trainers, sources, PRECISE)
        assert backend.epoch(states, torch.arange(12, device=DEVICE).expand(len(seeds), -1), never) == 2
        assert backend.store(states) == [False] * len(seeds)
        return [{**trainer.machine.state_dict(), **trainer.state.chains} for trainer in trainers]

    for mine, alone in zip(trained_together([0, 1]), trained_together([0]) + trained_together([1]), strict=True):
        for key, value in alone.items():
            torch.testing.assert_close(mine[key], value, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("rank", [1, 2])
@pytest.mark.parametrize("scale", [1e6, 1e20])  # the product of two factors beyond 16 bits, and beyond 32
@pytest.mark.usefixtures("interpreted")
def test_factors_beyond_the_range_of_sixteen_bits_stay_finite(scale, rank):
    trainer, source = prepared(small(), hidden, [rank], PAPER)
    multiplied(scale)(trainer.machine)
    backend, states = kernels([trainer], [source], "fp16")
    backend.epoch(states, torch.arange(20, device=DEVICE)[None], never)
    assert backend.params.abs().max() > 65504
    assert torch.isfinite(backend.params).all()


@pytest.mark.usefixtures("interpreted")
def test_operands_have_sixteen_bits_where_states_are_at_most_one():
    for unit, halves in ((B, True), (G, False)):
        trainer, source = prepared({"x": lambda unit=unit: unit((6, 5))}, hidden, [1])
        assert kernels([trainer], [source])[0].signature.halves is halves


@pytest.mark.parametrize(
    ("rows", "models", "samples"),
    [
        (100, 5, 1),  # 500 programs: all at a time
        (100, 32, 7),  # one wave of 15 x 32
        (100, 64, 7),  # two of them; 13 a program would be one of 8 x 64, and a bit
        (8, 10_000, 8),
    ],
)
def test_programs_share_samples_so_that_no_wave_is_nearly_empty(rows, models, samples):
    assert fewest_waves(rows, models, at_a_time=501) == samples


@pytest.mark.usefixtures("interpreted")
def test_wide_matrices_are_left_to_products_of_whole_batches():
    for width, reason in ((64, None), (65, "it has matrices wider than 64")):
        trainer, source = prepared({"x": lambda width=width: B((width, 3))}, lambda: B((4, 4)), [1])
        assert unsupported_reason(trainer.update_settings(), trainer.state, source) == reason


@pytest.mark.parametrize(
    ("shape", "rank", "unit", "reason"),
    [
        ((64, 64), 1, G, None),
        ((64, 64), 2, G, None),
        ((64, 64), 3, G, "shared memory"),  # 400 kB
        ((64, 64), 4, B, None),
        ((64, 64), 6, B, "shared memory"),  # 328 kB, where a program of an H200 has 227
        ((32, 32), 8, G, None),
        ((32, 32), 9, B, "more than 8 ranks"),
    ],
)
@pytest.mark.usefixtures("interpreted")
def test_small_kernels_are_for_what_fits_shared_memory(shape, rank, unit, reason):
    trainer, source = prepared({"x": lambda: unit(shape)}, lambda: B((25, 25)), [rank])
    found = unsupported_reason(trainer.update_settings(), trainer.state, source)
    assert found is None if reason is None else reason in found


@pytest.mark.parametrize(
    ("layers", "hidden", "ranks", "supported"),
    [
        ({"x": lambda: B((6, 5)), "label": lambda: C(16)}, (4, 7), [8, Dense()], True),
        ({"x": lambda: B((6, 5)), "label": lambda: C(17)}, (4, 7), [8, Dense()], False),
        ({"x": lambda: B((6, 5)), "label": lambda: C(3)}, (4, 7), [9, Dense()], False),
        ({"x": lambda: B((33, 5)), "label": lambda: C(3)}, (4, 7), [1, Dense()], False),
        ({"x": lambda: B((6, 5)), "label": lambda: C(3)}, (4, 33), [1, Dense()], False),
        ({"x": lambda: B((6, 5)), "label": lambda: C((2, 3))}, (4, 7), [1, Dense()], False),
        ({"x": lambda: B((6, 5)), "label": lambda: C(3), "other": lambda: C(3)}, (4, 7), [1, Dense(), Dense()], False),
        ({"x": lambda: B((6, 5)), "label": lambda: C(3), "z": lambda: B((3, 8))}, (4, 7), [1, Dense(), 1], False),
        ({"label": lambda: C(3)}, (4, 7), [Dense()], False),
    ],
)
@pytest.mark.usefixtures("interpreted")
def test_small_kernels_take_one_label_next_to_one_small_matrix(layers, hidden, ranks, supported):
    trainer, source = prepared(layers, lambda: B(hidden), ranks)
    assert (unsupported_reason(trainer.update_settings(), trainer.state, source) is None) is supported


@pytest.mark.usefixtures("interpreted")
def test_a_backend_does_not_continue_with_data_that_it_cannot_read():
    trainer, source = prepared(small(), hidden, [2], n=12)
    machine = trainer.machine
    x = data_for(machine, 12)["x"]
    backend, states = kernels([trainer], [source])
    assert backend.continues_with([trainer.update_settings()], states, [as_source(x.flip(0), machine)])
    masked = as_source(x, machine, mask=torch.ones(12, 6, 5, dtype=torch.bool))
    for other in (masked, as_source(x / 255, machine, nan_is_missing=True), as_source(DataLoader(x), machine)):
        assert not backend.continues_with([trainer.update_settings()], states, [other])


@pytest.mark.parametrize("name", ["paper", "default"])
@pytest.mark.parametrize(("models", "samples"), [(1, 1), (1, 3), (6, 7)])
@pytest.mark.skipif(not ON_GPU, reason="launches overlap on a GPU only")
def test_steps_made_by_the_next_launch_are_those_of_a_launch_of_their_own(name, models, samples):
    # Same random numbers; sums of atomic additions differ by rounding. At usual rates that would grow beyond all
    # comparison within 20 updates, at these rates to some 1e-4 of what is learned, of which a step is a twentieth.
    rate, recipe = {"paper": (1e-4, PAPER), "default": (0.02, DEFAULT)}[name]
    recipe = dataclasses.replace(recipe, learning_rate=rate, batch_size=100)

    def epoch(late):
        trainers = []
        for seed in range(models):
            machine = machine_of({"x": lambda: B((28, 28))}, lambda: B((25, 25)), [1])
            trainers.append(Trainer(machine, recipe, seed=seed))
            source = as_source(data_for(machine, 2000), machine)
            trainers[-1].prepare(source, initialize=True)
        backend, states = kernels(trainers, [source] * models, "fp16")
        launched(samples, late)(backend)
        start = backend.params.clone()
        backend.epoch(states, torch.arange(2000, device=DEVICE).expand(models, -1), never)
        return start, backend.params

    (start, late), (other, prompt) = epoch(True), epoch(False)
    torch.testing.assert_close(start, other, rtol=0, atol=0)
    moved = torch.linalg.vector_norm(prompt - start)
    assert torch.linalg.vector_norm(late - prompt) < 5e-3 * moved


@pytest.mark.usefixtures("interpreted")
def test_balance_is_the_same_whether_the_machine_is_looked_at_or_not():
    def trained_by_kernels(callbacks):
        machine = machine_of(small(), hidden, [3])
        recipe = dataclasses.replace(DEFAULT, batch_size=6, balance=True)
        trainer = Trainer(machine, recipe, seed=5, callbacks=callbacks)
        return trainer.fit(data_for(machine, 12), 2, initialize=True).machine

    looked_at, alone = trained_by_kernels([Callback()]), trained_by_kernels([])
    for key, value in looked_at.state_dict().items():
        torch.testing.assert_close(alone.state_dict()[key], value, rtol=1e-3, atol=1e-5)
    U, V = (factor.detach() for factor in alone.couplings["x"].factors)
    torch.testing.assert_close(torch.linalg.vector_norm(U, dim=(1, 2)), torch.linalg.vector_norm(V, dim=(1, 2)))
