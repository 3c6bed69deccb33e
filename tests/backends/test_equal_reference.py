"""The fast paths against the reference, given the same random numbers.

The Triton kernels run in the interpreter, or on a GPU where there is one.
"""

import copy
import dataclasses
import importlib.util

import pytest
import torch
from torch.utils.data import DataLoader

from mvrbm import BoltzmannMachine
from mvrbm.couplings import Dense, Kronecker
from mvrbm.data.sources import as_source
from mvrbm.random import RandomSource, Recorder
from mvrbm.training import CD, PCD, Callback, Recipe, Trainer
from mvrbm.units import Bernoulli, Categorical, Gaussian

ON_GPU = torch.cuda.is_available()
DEVICE = "cuda" if ON_GPU else "cpu"
if importlib.util.find_spec("triton") is None:
    pytest.skip("the kernels need triton", allow_module_level=True)
from mvrbm.backends.cpu import gemm  # noqa: E402
from mvrbm.backends.cuda.per_sample import PerSampleBackend, fewest_waves, unsupported_reason  # noqa: E402

PAPER = Recipe(
    learning_rate=0.05, bias_learning_rate=None, weight_decay=0.01, bias_from_data=False, factor_std=0.3,
    centering="none", rate_decay=None, normalized=False, balance=False,
)  # fmt: skip
DEFAULT = Recipe(learning_rate=0.2, balance=False)

B = Bernoulli
G = Gaussian


def machine_of(layers, hidden, ranks):
    links = {
        name: Kronecker(rank) if isinstance(rank, int) else copy.deepcopy(rank)
        for name, rank in zip(layers, ranks, strict=True)
    }
    return BoltzmannMachine(layers, hidden, links, std=0.3).to(DEVICE)


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


def spread(shape):
    """Gaussian units whose variance is not 1, and which differ in it."""
    unit = G(shape)
    unit.log_variance.data.copy_(torch.linspace(-0.5, 0.9, unit.log_variance.numel()).view(unit.log_variance.shape))
    return unit


CASES = {
    "bernoulli, paper": ({"x": lambda: B((6, 5))}, lambda: B((4, 7)), [1], PAPER),
    "bernoulli, default": ({"x": lambda: B((6, 5))}, lambda: B((4, 7)), [1], DEFAULT),
    "a rate that falls": (
        {"x": lambda: B((6, 5))}, lambda: B((4, 7)), [1],
        dataclasses.replace(DEFAULT, rate_decay=3, linear_decay=True, planned_updates=9),
    ),
    "gaussian data, default": ({"x": lambda: G((6, 5))}, lambda: B((4, 7)), [1], DEFAULT),
    "gaussian data, as in the paper": (
        {"x": lambda: G((6, 5))}, lambda: B((4, 7)), [1],
        dataclasses.replace(PAPER, bias_from_data=True, learning_rate=0.002),
    ),
    "gaussian hidden layer": ({"x": lambda: B((6, 5))}, lambda: G((4, 7)), [1], dataclasses.replace(DEFAULT, std=0.02)),
    "gaussian data of other variances": (
        {"x": lambda: spread((6, 5))}, lambda: B((4, 7)), [1], dataclasses.replace(PAPER, learning_rate=0.0005),
    ),
    "gaussian hidden layer of other variances": (
        {"x": lambda: B((6, 5))}, lambda: spread((4, 7)), [1], dataclasses.replace(PAPER, factor_std=0.1),
    ),
    "rank 3": ({"x": lambda: B((6, 5))}, lambda: B((4, 7)), [3], DEFAULT),
    "rank 6": ({"x": lambda: B((6, 5))}, lambda: B((4, 7)), [6], DEFAULT),
    "rank 6, PCD": (
        {"x": lambda: B((6, 5))}, lambda: B((4, 7)), [6], dataclasses.replace(DEFAULT, negative=PCD(5, 2)),
    ),
    "rank 2, gaussian data of other variances": (
        {"x": lambda: spread((6, 5))}, lambda: B((4, 7)), [2], dataclasses.replace(PAPER, learning_rate=0.0002),
    ),
    "rank 2, gaussian hidden layer of other variances": (
        {"x": lambda: B((6, 5))}, lambda: spread((4, 7)), [2], dataclasses.replace(PAPER, factor_std=0.1),
    ),
    "rank 3, tiles of two sizes": ({"x": lambda: B((5, 20))}, lambda: B((4, 18)), [3], DEFAULT),
    "rank 2, more chains than samples": (
        {"x": lambda: B((6, 5))}, lambda: B((4, 7)), [2], dataclasses.replace(DEFAULT, negative=PCD(11)),
    ),
    "CD-3": ({"x": lambda: B((6, 5))}, lambda: B((4, 7)), [1], dataclasses.replace(PAPER, negative=CD(3))),
    "PCD": ({"x": lambda: B((6, 5))}, lambda: B((4, 7)), [2], dataclasses.replace(DEFAULT, negative=PCD(5, 2))),
    "more chains than samples": (
        {"x": lambda: G((6, 5))}, lambda: B((4, 7)), [1], dataclasses.replace(DEFAULT, negative=PCD(11)),
    ),
    "label": (
        {"x": lambda: B((6, 5)), "label": lambda: Categorical(3)}, lambda: B((4, 7)), [2, Dense()],
        dataclasses.replace(DEFAULT, negative=PCD(11)),
    ),
    "label first, paper": (
        {"label": lambda: Categorical(3), "x": lambda: G((6, 5))}, lambda: B((4, 7)), [Dense(), 1],
        dataclasses.replace(PAPER, bias_from_data=True, learning_rate=0.002, negative=CD(2)),
    ),
    "label first, PCD": (
        {"label": lambda: Categorical(3), "x": lambda: B((6, 5))}, lambda: G((4, 7)), [Dense(), 1],
        dataclasses.replace(DEFAULT, negative=PCD(5, 2), std=0.02),
    ),
    "two layers": (
        {"x": lambda: B((6, 5)), "z": lambda: G((3, 8))}, lambda: B((4, 7)), [1, 2], DEFAULT,
    ),
    "two layers, PCD": (
        {"x": lambda: B((6, 5)), "z": lambda: G((3, 8))}, lambda: B((4, 7)), [2, 1],
        dataclasses.replace(DEFAULT, negative=PCD(9)),
    ),
    "more than a tile": (
        {"x": lambda: B((66, 3))}, lambda: B((4, 66)), [2], dataclasses.replace(PAPER, factor_std=0.1),
    ),
}  # fmt: skip

GO_ROUND_BUFFERS = ("bernoulli, paper", "bernoulli, default")

FULL = dataclasses.replace(DEFAULT, centering="full", negative=PCD(9, 2))
PERSISTENT = dataclasses.replace(DEFAULT, negative=PCD(9, 2))
C = Categorical


def learning(shape):
    """Gaussian units that learn their variances."""
    unit = G(shape, learn_variance=True)
    unit.log_variance.data.copy_(spread(shape).log_variance.data)
    return unit


#: Further machines that the paths on the CPU can compute.
ON_CPU = {
    "dense": ({"x": lambda: B((6, 5))}, lambda: B((4, 7)), [Dense()], DEFAULT),
    "dense, paper": ({"x": lambda: B(11)}, lambda: B(7), [Dense()], PAPER),
    "dense of other orders": ({"x": lambda: G((3, 2, 4))}, lambda: B((5, 2)), [Dense()], PERSISTENT),
    "categories": ({"x": lambda: C((6, 5))}, lambda: B((4, 7)), [2], DEFAULT),
    "labels": ({"x": lambda: B((6, 5)), "label": lambda: C(3)}, lambda: B((4, 7)), [2, Dense()], PERSISTENT),
    "labels, paper": ({"label": lambda: C(3), "x": lambda: B((6, 5))}, lambda: G((4, 7)), [Dense(), 1], PAPER),
    "order 3": ({"x": lambda: B((3, 4, 5))}, lambda: B((4, 2, 3)), [1], DEFAULT),
    "order 3, rank 2": ({"x": lambda: G((3, 4, 5))}, lambda: B((2, 4, 3)), [2], PERSISTENT),
    "order 4": ({"x": lambda: B((3, 2, 1, 3))}, lambda: B((2, 3, 2, 1)), [3], PAPER),
    "order 1": ({"x": lambda: B(6)}, lambda: B(4), [3], PAPER),
    "orders": (
        {"x": lambda: B((3, 4, 5)), "y": lambda: C((2, 3)), "z": lambda: B(4)}, lambda: B((4, 2, 3)),
        [2, Dense(), Dense()], PERSISTENT,
    ),
    "variances": ({"x": lambda: learning((6, 5))}, lambda: B((4, 7)), [2], DEFAULT),
    "variances, PCD": ({"x": lambda: learning((6, 5))}, lambda: B((4, 7)), [1], PERSISTENT),
    "variances, paper": (
        {"x": lambda: learning((6, 5))}, lambda: B((4, 7)), [1], dataclasses.replace(PAPER, learning_rate=0.0005),
    ),
    "centered": ({"x": lambda: B((6, 5))}, lambda: B((4, 7)), [2], FULL),
    "centered, CD": ({"x": lambda: B((6, 5))}, lambda: B((4, 7)), [1], dataclasses.replace(PAPER, centering="full")),
    "everything": (
        {"x": lambda: learning((6, 5)), "y": lambda: C((2, 3)), "z": lambda: B((3, 8)), "w": lambda: learning(4)},
        lambda: B((4, 7)), [2, Dense(), 1, Dense()], FULL,
    ),
}  # fmt: skip


def kernels(trainers, sources, precision=None):
    """The path of the kernels for prepared trainers, and the states that it works on."""
    states = [trainer.state for trainer in trainers]
    return PerSampleBackend([trainer.task() for trainer in trainers], states, sources, precision=precision), states


def never():
    return False


class Single(RandomSource):
    """Numbers that float32 can represent, whatever they are asked for, so that the kernels can have the same."""

    def uniform(self, shape, like):
        return super().uniform(shape, like.float()).to(like.dtype)

    def normal(self, shape, like):
        return super().normal(shape, like.float()).to(like.dtype)


def references(case, n, n_epochs, scale, dtype):
    """Train by the reference, and return the trainer and every draw of every update, (updates, numbers)."""
    layers, hidden, ranks, recipe = case
    recipe = dataclasses.replace(recipe, batch_size=8)
    machine = machine_of({name: make() for name, make in layers.items()}, hidden(), ranks)
    data = data_for(machine, n)
    Trainer(machine, recipe, seed=5, backend="reference").prepare(data, initialize=True)
    multiply(machine, scale)
    start = {key: value.clone() for key, value in machine.state_dict().items()}
    trainer = Trainer(machine.to(dtype), recipe, seed=5, backend="reference")
    trainer.state.rng = recorder = Recorder(Single(11, device=DEVICE))
    source = trainer.prepare(data)
    draws, orders = [], []
    for _ in range(n_epochs):
        state = trainer.order_rng.state_dict()
        orders.append(trainer.order_rng.permutation(n))
        trainer.order_rng.load_state_dict(state)
        for batch in source.batches(8, trainer.order_rng):
            recorder.draws.clear()
            trainer.train_on(batch, weight=len(batch) / 8)
            rows = recipe.negative.n_chains if isinstance(recipe.negative, PCD) else 8
            padded = []
            for draw in recorder.draws:
                full = draw.new_zeros(rows, *draw.shape[1:], dtype=torch.float32)
                full[: len(draw)] = draw
                padded.append(full.reshape(-1))
            draws.append(torch.cat(padded))
    return trainer, recipe, start, data, orders, torch.stack(draws)


def trained(case, *, watched=False, **how):
    layers, hidden, ranks, recipe = case
    machine = machine_of({name: make() for name, make in layers.items()}, hidden(), ranks).to("cpu").double()
    data = data_for(machine, 20)
    callbacks = [Callback() if not watched else Watcher()]
    trainer = Trainer(machine, dataclasses.replace(recipe, batch_size=8), seed=5, callbacks=callbacks, **how)
    return trainer.fit(data, 3, initialize=True)


class Watcher(Callback):
    """Asks for every batch, and requires the machine to be up to date."""

    def on_batch_end(self, trainer, batch):
        now = torch.cat([p.detach().flatten().clone() for p in trainer.machine.parameters()])
        if trainer.update > 1:
            assert not torch.equal(now, self.before)
        self.before = now


@pytest.mark.parametrize("watched", [False, True])
@pytest.mark.parametrize("name", [*CASES, *ON_CPU])
def test_plain_products_train_as_the_reference_does(name, watched):
    case = {**CASES, **ON_CPU}[name]
    reference, fast = trained(case, backend="reference"), trained(case, watched=watched)
    assert gemm.unsupported_reason(fast.task(), fast.state) is None
    assert gemm.unsupported_reason(reference.task(), reference.state) == "the reference backend was requested"
    for key, value in reference.machine.state_dict().items():
        torch.testing.assert_close(fast.machine.state_dict()[key], value, rtol=1e-9, atol=1e-11)
    assert set(fast.state.momenta) == set(reference.state.momenta) == set(reference.state.learned)
    for key, momentum in reference.state.momenta.items():
        torch.testing.assert_close(fast.state.momenta[key], momentum, rtol=1e-9, atol=1e-11)
    assert set(fast.state.chains) == set(reference.state.chains)
    for key, chain in reference.state.chains.items():
        torch.testing.assert_close(fast.state.chains[key], chain, rtol=1e-9, atol=1e-9)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "samples", "late"),
    [
        *[(name, 1, True) for name in CASES],
        *[
            (name, 3, False)
            for name in ("bernoulli, default", "gaussian data, default", "rank 3", "PCD", "label", "label first, paper")
        ],
    ],
)
@pytest.mark.usefixtures("interpreted")
def test_the_kernels_train_as_the_reference_does(name, samples, late):
    start, reference, mine = trained_by_both(CASES[name], samples, late, "tf32x3" if ON_GPU else "ieee")
    assert mine.keys() == reference.keys()
    for key, value in reference.items():
        rtol = 2e-3 if ON_GPU or key.startswith("momentum") else 2e-4
        torch.testing.assert_close(
            mine[key], value, rtol=rtol, atol=1e-4 if "chains" in key else 2e-5, msg=lambda m, k=key: f"{k}: {m}"
        )
    moved = max(float((value - start[key]).abs().max()) for key, value in reference.items() if "chains" not in key)
    assert moved > 5e-3, "the reference has hardly learned: the comparison says nothing"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "scale"),
    [("bernoulli, paper", 1e-6), ("bernoulli, default", 1.0), ("rank 3", 1e-6), ("PCD", 1.0), ("label", 1.0)],
)
@pytest.mark.usefixtures("interpreted")
def test_operands_of_sixteen_bits_change_the_result_by_their_rounding(name, scale):
    # A field that is rounded may lie on the other side of its random number: one state of hundreds is another then.
    start, reference, mine = (
        torch.cat([value.flatten() for key, value in values.items() if key.startswith("couplings")])
        for values in trained_by_both(CASES[name], 3, True, "fp16", scale)
    )
    apart = torch.linalg.vector_norm(mine - reference) / torch.linalg.vector_norm(reference - start)
    assert 1e-6 < apart < 0.08


@pytest.mark.slow
@pytest.mark.usefixtures("interpreted")
@pytest.mark.parametrize(
    ("unit", "recipe", "mixed"), [(B, PAPER, False), (B, DEFAULT, True), (G, DEFAULT, False)], ids=["B", "mixed", "G"]
)
def test_machines_with_data_of_their_own_train_as_by_themselves(unit, recipe, mixed):
    recipe = dataclasses.replace(recipe, learning_rate=0.01, batch_size=8)

    def trained_together(seeds):
        trainers = [Trainer(machine_of({"x": unit((6, 5))}, B((4, 7)), [1]), recipe, seed=seed) for seed in seeds]
        sources = []
        for trainer, seed in zip(trainers, seeds, strict=True):
            x = data_for(trainer.machine, 12, seed)["x"]
            x = (100 * seed + 10 * x) if unit is G else x.float() / 255 if mixed and seed else x
            sources.append(as_source(x, trainer.machine))
            trainer.prepare(sources[-1], initialize=True)
        path, states = kernels(trainers, sources, "tf32x3" if ON_GPU else "ieee")
        made = path.epoch(states, torch.arange(12, device=DEVICE).expand(len(seeds), -1), never)
        assert [state.update for state in states] == [made] * len(seeds) == [2] * len(seeds)
        assert path.store(states) == [False] * len(seeds)
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
            machine = machine_of({name: make() for name, make in layers.items()}, B((4, 7)), [Dense(), 2])
            trainers.append(Trainer(machine, recipe, seed=seed))
            sources.append(as_source(data_for(machine, 12, seed), machine))
            trainers[-1].prepare(sources[-1], initialize=True)
        path, states = kernels(trainers, sources, "tf32x3" if ON_GPU else "ieee")
        assert path.epoch(states, torch.arange(12, device=DEVICE).expand(len(seeds), -1), never) == 2
        assert path.store(states) == [False] * len(seeds)
        return [{**trainer.machine.state_dict(), **trainer.state.chains} for trainer in trainers]

    for mine, alone in zip(trained_together([0, 1]), trained_together([0]) + trained_together([1]), strict=True):
        for key, value in alone.items():
            torch.testing.assert_close(mine[key], value, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("rank", [1, 2])
@pytest.mark.parametrize("scale", [1e6, 1e20])  # the product of two factors beyond 16 bits, and beyond 32
@pytest.mark.usefixtures("interpreted")
def test_factors_beyond_the_range_of_sixteen_bits_stay_finite(scale, rank):
    trainer = Trainer(machine_of({"x": B((6, 5))}, B((4, 7)), [rank]), dataclasses.replace(PAPER, batch_size=8), seed=5)
    source = as_source(data_for(trainer.machine, 20), trainer.machine)
    trainer.prepare(source, initialize=True)
    multiply(trainer.machine, scale)
    path, states = kernels([trainer], [source], "fp16")
    path.epoch(states, torch.arange(20, device=DEVICE)[None], never)
    assert path._params.abs().max() > 65504
    assert torch.isfinite(path._params).all()


@pytest.mark.usefixtures("interpreted")
def test_operands_have_sixteen_bits_where_states_are_at_most_one():
    for unit, halves in ((B, True), (G, False)):
        trainer = Trainer(machine_of({"x": unit((6, 5))}, B((4, 7)), [1]), DEFAULT, seed=5)
        source = as_source(data_for(trainer.machine, 20), trainer.machine)
        trainer.prepare(source, initialize=True)
        assert kernels([trainer], [source])[0]._halves is halves


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
    for width, reason in ((128, None), (129, "it has matrices wider than 128")):
        trainer = Trainer(machine_of({"x": B((width, 3))}, B((4, 4)), [1]), DEFAULT, seed=5)
        source = as_source(data_for(trainer.machine, 20), trainer.machine)
        trainer.prepare(source, initialize=True)
        assert unsupported_reason(trainer.task(), trainer.state, source) == reason


@pytest.mark.parametrize(
    ("shape", "rank", "precision", "small"),
    [
        ((64, 64), 1, "tf32", True),
        ((64, 64), 2, "tf32", True),
        ((64, 64), 3, "tf32", False),  # 400 kB
        ((64, 64), 4, "fp16", True),
        ((64, 64), 6, "fp16", False),  # 328 kB, where a program of an H200 has 227
        ((32, 32), 8, "tf32", True),
        ((32, 32), 9, "fp16", False),
    ],
)
@pytest.mark.usefixtures("interpreted")
def test_small_kernels_are_for_what_fits_shared_memory(shape, rank, precision, small):
    trainer = Trainer(machine_of({"x": B(shape)}, B((25, 25)), [rank]), DEFAULT, seed=5)
    source = as_source(data_for(trainer.machine, 20), trainer.machine)
    trainer.prepare(source, initialize=True)
    assert kernels([trainer], [source], precision)[0]._small is small


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
    machine = machine_of({name: make() for name, make in layers.items()}, B(hidden), ranks)
    trainer = Trainer(machine, DEFAULT, seed=5)
    source = as_source(data_for(machine, 20), machine)
    trainer.prepare(source, initialize=True)
    assert (unsupported_reason(trainer.task(), trainer.state, source) is None) is supported


@pytest.mark.usefixtures("interpreted")
def test_a_path_does_not_continue_with_data_that_it_cannot_read():
    machine = machine_of({"x": B((6, 5))}, B((4, 7)), [2])
    trainer, x = Trainer(machine, DEFAULT, seed=5), data_for(machine, 12)["x"]
    source = as_source(x, machine)
    trainer.prepare(source, initialize=True)
    path, states = kernels([trainer], [source])
    assert path.continues_with([trainer.task()], states, [as_source(x.flip(0), machine)])
    masked = as_source(x, machine, mask=torch.ones(12, 6, 5, dtype=torch.bool))
    for other in (masked, as_source(x / 255, machine, nan_is_missing=True), as_source(DataLoader(x), machine)):
        assert not path.continues_with([trainer.task()], states, [other])


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
            machine = machine_of({"x": B((28, 28))}, B((25, 25)), [1])
            trainers.append(Trainer(machine, recipe, seed=seed))
            source = as_source(data_for(machine, 2000), machine)
            trainers[-1].prepare(source, initialize=True)
        path, states = kernels(trainers, [source] * models, "fp16")
        path._samples, path._late_steps = samples, late
        start = path._params.clone()
        path.epoch(states, torch.arange(2000, device=DEVICE).expand(models, -1), never)
        return start, path._params

    (start, late), (other, prompt) = epoch(True), epoch(False)
    torch.testing.assert_close(start, other, rtol=0, atol=0)
    moved = torch.linalg.vector_norm(prompt - start)
    assert torch.linalg.vector_norm(late - prompt) < 5e-3 * moved


def trained_by_both(case, samples, late, precision, scale=1.0):
    """State dicts at the start, after the reference's training, and after the kernels' with the same random numbers.

    `samples` is how many a program of the kernels takes, `late` whether each update makes the step of the one before,
    if it can; `scale` multiplies the factors at the start.
    """
    # Batches of 8 and one of 4: few, because the interpreter is slow. Gradients have three buffers: five updates go
    # round them, and the next epoch finds the first in use.
    n, n_epochs = (36, 2) if any(case is CASES[name] for name in GO_ROUND_BUFFERS) else (12, 1)
    n_batches = -(-n // 8)
    # Rounding of the reference itself would be ten times that of the kernels for centered data.
    dtype = torch.float32 if precision == "fp16" else torch.float64
    reference, recipe, start, data, orders, draws = references(case, n, n_epochs, scale, dtype)
    layers, hidden, ranks, _ = case
    machine = machine_of({key: make() for key, make in layers.items()}, hidden(), ranks)
    trainer = Trainer(machine, recipe, seed=5)
    source = as_source(data, machine)
    trainer.prepare(source, initialize=True)
    multiply(machine, scale)
    for key, value in machine.state_dict().items():
        torch.testing.assert_close(value, start[key], rtol=0, atol=0)
    path, states = kernels([trainer], [source], precision)
    if samples > 1 and not path._small:
        pytest.skip("a layer cut into tiles has a program of its own for every sample")
    path._samples, path._late_steps = samples, late and path._small and ranks == [1]
    path._recorded_size = draws.shape[1]
    for number, order in enumerate(orders):
        path._recorded = draws[n_batches * number :].contiguous().reshape(-1)
        path._graphs.clear()
        assert path.epoch(states, order[None], never) == n_batches
    assert path.store(states) == [False]
    assert trainer.update == reference.update == n_batches * n_epochs
    results = start, reference.machine.state_dict(), machine.state_dict()
    for trained_one, results_of in ((reference, 1), (trainer, 2)):
        state = trained_one.state
        assert set(state.momenta) == set(state.learned)
        results[results_of].update({f"momentum of {name}": momentum for name, momentum in state.momenta.items()})
        results[results_of].update({f"chains of {name}": chain for name, chain in state.chains.items()})
    start.update({key: torch.zeros_like(value) for key, value in results[2].items() if key not in start})
    return start, {key: value.float() for key, value in results[1].items()}, results[2]


def multiply(machine, scale):
    with torch.no_grad():
        for link in machine.links.values():
            for factor in link.parameters():
                factor.mul_(scale)


@pytest.mark.usefixtures("interpreted")
def test_balance_is_the_same_whether_the_machine_is_looked_at_or_not():
    def trained_by_kernels(callbacks):
        machine = machine_of({"x": B((6, 5))}, B((4, 7)), [3])
        recipe = dataclasses.replace(DEFAULT, batch_size=6, balance=True)
        trainer = Trainer(machine, recipe, seed=5, callbacks=callbacks)
        return trainer.fit(data_for(machine, 12), 2, initialize=True).machine

    looked_at, alone = trained_by_kernels([Callback()]), trained_by_kernels([])
    for key, value in looked_at.state_dict().items():
        torch.testing.assert_close(alone.state_dict()[key], value, rtol=1e-3, atol=1e-5)
    U, V = (factor.detach() for factor in alone.couplings["x"].factors)
    torch.testing.assert_close(torch.linalg.vector_norm(U, dim=(1, 2)), torch.linalg.vector_norm(V, dim=(1, 2)))
