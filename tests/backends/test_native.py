"""The compiled code against PyTorch in float64, given the same numbers, for every kind of processor that is here."""

import copy
import dataclasses
import shutil
import subprocess
import sys
import sysconfig
import threading
from pathlib import Path

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader

from mvrbm import BoltzmannMachine, RandomSource, compiled
from mvrbm.backends.cpu import gemm, native
from mvrbm.backends.cpu import updates as flat_updates
from mvrbm.couplings import Dense, Kronecker
from mvrbm.data.sources import Batch
from mvrbm.random import Recorder, Replay
from mvrbm.training import CD, PCD, Callback, DivergenceError, Recipe, Trainer
from mvrbm.units import Bernoulli, Categorical, Gaussian
from mvrbm.updates.missing import draw_missing
from mvrbm.updates.step import step

CODE = compiled.library()
PROCESSORS = [] if CODE is None else CODE.processors()
if CODE is None:
    # Not to be built is no error; not to be built for an error in the code is.
    headers = Path(sysconfig.get_paths()["include"], "Python.h")
    can_be_built = sys.platform in ("linux", "darwin") and shutil.which("cc") is not None and headers.exists()
    can_be_built = can_be_built and not sysconfig.get_config_var("Py_GIL_DISABLED")
    assert not can_be_built, "there is a C compiler, and yet no compiled code: pip install -v -e . says why"
    pytest.skip(
        "there is no compiled code: it needs a C compiler when the package is installed", allow_module_level=True
    )

B, C, G = Bernoulli, Categorical, Gaussian


@pytest.fixture(params=PROCESSORS)
def processor(request):
    CODE.use(request.param)
    yield request.param
    CODE.use(PROCESSORS[-1])


def trainer_of(layers, hidden, ranks, recipe, *, std=0.3, seed=3):
    links = {
        name: Kronecker(rank) if isinstance(rank, int) else copy.deepcopy(rank)
        for name, rank in zip(layers, ranks, strict=True)
    }
    machine = BoltzmannMachine({n: unit() for n, unit in layers.items()}, hidden(), links, std=std, seed=seed)
    rng = np.random.default_rng(seed)
    for unit in (machine.hidden, *machine.layers.values()):
        unit.bias.data.copy_(torch.from_numpy(rng.normal(0, 0.5, unit.shape)))
    return Trainer(machine, recipe, seed=5)


def data_for(machine, n, seed=3):
    rng = np.random.default_rng(seed)

    def samples(unit):
        if unit.entry_modes:
            return np.eye(unit.shape[-1])[rng.integers(0, unit.shape[-1], (n, *unit.shape[:-1]))]
        return (3 + 2 * rng.standard_normal((n, *unit.shape))) if unit.gaussian else rng.random((n, *unit.shape))

    return {name: samples(unit) for name, unit in machine.layers.items()}


def learning(shape):
    """Gaussian units that learn their variances."""
    return G(shape, learn_variance=True)


SMALL, DEEP = Recipe(learning_rate=0.01), Recipe(learning_rate=0.01, negative=CD(3))
CHAINS = Recipe(learning_rate=0.01, negative=PCD(7, 2))
FULL = dataclasses.replace(CHAINS, centering="full")
CASES = {
    "one entry": ({"x": lambda: B((1, 1))}, lambda: B((1, 1)), [1], SMALL, 3),
    "one sample": ({"x": lambda: B((6, 5))}, lambda: B((4, 7)), [1], SMALL, 1),
    "no sample": ({"x": lambda: B((6, 5)), "y": lambda: C(3)}, lambda: B((4, 7)), [1, Dense()], CHAINS, 0),
    "a row and a column": ({"x": lambda: B((1, 40))}, lambda: B((40, 1)), [2], SMALL, 9),
    "the paper's": ({"x": lambda: B((28, 28))}, lambda: B((25, 25)), [1], SMALL, 30),
    "whole vectors": ({"x": lambda: B((16, 32))}, lambda: B((32, 16)), [1], SMALL, 70),
    "one more than whole vectors": ({"x": lambda: B((17, 33))}, lambda: B((33, 17)), [3], SMALL, 20),
    "one less than whole vectors": ({"x": lambda: B((15, 31))}, lambda: B((31, 47)), [1], DEEP, 20),
    "gaussian data": ({"x": lambda: G((6, 19))}, lambda: B((4, 7)), [2], DEEP, 20),
    "gaussian hidden layer": ({"x": lambda: B((6, 5))}, lambda: G((9, 18)), [1], SMALL, 20),
    "chains": ({"x": lambda: G((6, 5))}, lambda: B((4, 7)), [2], CHAINS, 20),
    "more chains than samples": ({"x": lambda: B((6, 5))}, lambda: B((4, 7)), [1], CHAINS, 3),
    "layers": (
        {"x": lambda: B((6, 5)), "z": lambda: G((3, 18)), "y": lambda: G((21, 2))}, lambda: B((4, 17)), [1, 2, 3],
        CHAINS, 20,
    ),
    "layers, CD": ({"x": lambda: G((11, 5)), "z": lambda: B((3, 18))}, lambda: B((9, 4)), [3, 1], DEEP, 40),
    "labels": ({"x": lambda: B((6, 5)), "y": lambda: C(10)}, lambda: B((4, 7)), [2, Dense()], CHAINS, 20),
    "one label": ({"y": lambda: C(1), "x": lambda: B((1, 1))}, lambda: B((1, 1)), [Dense(), 1], CHAINS, 3),
    "categories": ({"x": lambda: C((6, 19))}, lambda: B((4, 7)), [2], DEEP, 20),
    "dense layers": (
        {"u": lambda: C((5, 7)), "x": lambda: B((9, 8)), "v": lambda: G((2, 3, 3)), "w": lambda: B(17)},
        lambda: B((9, 18)), [Dense(), 1, Dense(), Dense()], DEEP, 20,
    ),
    "variances": ({"x": lambda: learning((6, 19))}, lambda: B((9, 7)), [2], DEEP, 20),
    "variances, chains": (
        {"x": lambda: learning((6, 5)), "y": lambda: learning(4)}, lambda: B((4, 7)), [2, Dense()], CHAINS, 20,
    ),
    "centered": ({"x": lambda: B((6, 5)), "y": lambda: C((2, 10))}, lambda: B((4, 7)), [2, Dense()], FULL, 20),
    "centered, variances": ({"x": lambda: learning((16, 16))}, lambda: B((4, 7)), [2], FULL, 20),
    "more than one group": ({"x": lambda: B((40, 40))}, lambda: B((30, 30)), [6], SMALL, 60),
}  # fmt: skip


def before_step(path):
    """Return a list to which the gradients of a path will be added, which steps overwrite."""
    seen, step = [], path._step

    def watched(update):
        seen.append(path._gradient.clone())
        return step(update)

    path._step = watched
    return seen


def contrasts(case, threads=1):
    """Return gradients and chains after three updates by the compiled code, and by plain products in float64."""
    layers, hidden, ranks, recipe, n = case
    exact = trainer_of(layers, hidden, ranks, recipe)
    exact.machine.double()
    data = {name: torch.from_numpy(array).float().double() for name, array in data_for(exact.machine, n).items()}
    fast = trainer_of(layers, hidden, ranks, recipe)
    for trainer in (exact, fast):
        trainer.prepare(data_for(trainer.machine, 1) if n == 0 else {key: array.numpy() for key, array in data.items()})
    rng = RandomSource(7)
    slow, quick = gemm.GemmBackend(exact.task(), exact.state), native.NativeBackend(fast.task(), fast.state, threads)
    assert "float64" in native.unsupported_reason(exact.task(), exact.state)
    found = []
    seen = {path: before_step(path) for path in (slow, quick)}
    for _ in range(3):
        slow._rng = recorder = Recorder(rng)
        with torch.no_grad():
            quick._params.copy_(slow._params)
            slow.update(exact.state, data, 0.7, (0.5, 0.8))
            quick._rng = replay = Replay([draw.float() for draw in recorder.draws])
            # What is drawn in float64 near its limit could fall on the other side in float32: none of these do.
            quick.update(fast.state, {name: array.float() for name, array in data.items()}, 0.7, (0.5, 0.8))
        assert replay._position == len(recorder.draws)
        found.append((seen[quick].pop(), seen[slow].pop()))
        torch.testing.assert_close(quick._params.double(), slow._params, rtol=1e-4, atol=1e-5)
    assert exact.update == fast.update == 3
    slow.store(exact.state)
    quick.store(fast.state)
    return found, fast, exact


@pytest.mark.parametrize("name", CASES)
@pytest.mark.usefixtures("processor")
def test_gradients_and_chains_are_those_of_plain_products(name):
    found, fast, exact = contrasts(CASES[name])
    for mine, true in found:
        assert true.abs().max() > 1e-3, "nothing to compare"
        torch.testing.assert_close(mine.double(), true, rtol=1e-4, atol=2e-6 * float(true.abs().max()))
    assert set(fast.state.chains) == set(exact.state.chains)
    for key, chain in exact.state.chains.items():
        torch.testing.assert_close(fast.state.chains[key].double(), chain, rtol=1e-4, atol=1e-4)
        assert fast.state.chains[key].is_contiguous()


class Same:
    """Gives the same numbers again and again."""

    def __init__(self, seed):
        self.rng, self.kept = RandomSource(seed), {}

    def uniform(self, shape, like):
        return self.kept.setdefault(shape, self.rng.uniform(shape, like))


def many_tasks(seed, threads, monkeypatch):
    """Updates that are shared out in as many parts as there can be, and a batch for them."""
    monkeypatch.setattr(native, "_WORTH_THREADS", 0)
    monkeypatch.setattr(native, "_GROUP_BYTES", 1)
    trainer = trainer_of({"x": lambda: B((20, 20))}, lambda: B((18, 18)), [2], SMALL, seed=seed)
    data = torch.from_numpy(data_for(trainer.machine, 40, seed)["x"]).float()
    trainer.prepare(data)
    trainer.state.rng = Same(seed)
    return native.NativeBackend(trainer.task(), trainer.state, threads), {"x": data}


def gradients(updates, batch, count=1):
    for _ in range(count):
        updates._contrast(batch, 1.0, 1.0)
        yield updates._gradient.clone()


def test_the_number_of_threads_changes_nothing(monkeypatch):
    (alone,) = gradients(*many_tasks(0, 1, monkeypatch))
    for threads in (2, 3, 8, 40):
        updates, batch = many_tasks(0, threads, monkeypatch)
        assert updates._job.threads == min(threads, 16)
        assert all(torch.equal(gradient, alone) for gradient in gradients(updates, batch, 200))
        assert updates._job.tasks == 16
    assert CODE.workers() == 15


def test_trainings_at_the_same_time_do_not_disturb_each_other(monkeypatch):
    alone = {seed: next(gradients(*many_tasks(seed, 1, monkeypatch))) for seed in range(4)}
    makers = {seed: many_tasks(seed, 3, monkeypatch) for seed in alone}
    wrong, together = dict.fromkeys(alone, -1), threading.Barrier(len(alone))

    def work(seed):
        together.wait()
        wrong[seed] = sum(not torch.equal(gradient, alone[seed]) for gradient in gradients(*makers[seed], 300))

    jobs = [threading.Thread(target=work, args=(seed,)) for seed in alone]
    for job in jobs:
        job.start()
    for job in jobs:
        job.join()
    assert wrong == dict.fromkeys(alone, 0)


FORKED = """
import os, sys, numpy as np, torch
from mvrbm import compiled
from mvrbm.backends.cpu import native
from mvrbm.training import Trainer
from mvrbm.models import mvrbm

torch.set_num_threads(1)  # PyTorch's own threads do not outlive a fork
native._WORTH_THREADS, Updates = 0, native.NativeBackend
native.NativeBackend = lambda task, state, threads: Updates(task, state, 3)

def run():
    trainer = Trainer(mvrbm((20, 20), (18, 18))).fit(np.random.default_rng(0).random((300, 20, 20)), 2, initialize=True)
    assert trainer.update == 6 and compiled.library().workers() == 2

run()
child = os.fork()
if child == 0:
    code = 1
    try:
        assert compiled.library().workers() == 0 and len(os.listdir("/proc/self/task")) == 1
        run()
        assert len(os.listdir("/proc/self/task")) == 3
        code = 0
    finally:
        os._exit(code)
run()
sys.exit(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
"""


@pytest.mark.skipif(sys.platform != "linux", reason="counts threads in /proc")
def test_a_forked_process_has_threads_of_its_own():
    subprocess.run([sys.executable, "-W", "ignore", "-c", FORKED], check=True, timeout=100)


class Taken(Callback):
    def on_epoch_end(self, trainer):
        self.taken = type(trainer._path)


WIDE, NARROW = Recipe(batch_size=100), Recipe(batch_size=100, negative=PCD(5000, 30))
CHOICES = {
    "the paper's": ((28, 28), (25, 25), WIDE, native.NativeBackend),
    "small": ((3, 4), (2, 5), WIDE, native.NativeBackend),
    "one column": ((300, 1), (200, 1), WIDE, gemm.GemmBackend),
    "one row": ((1, 300), (1, 200), WIDE, gemm.GemmBackend),
    "few hidden columns": ((28, 28), (100, 2), WIDE, gemm.GemmBackend),
    "many numbers": ((28, 28), (25, 25), NARROW, gemm.GemmBackend),
}


@pytest.mark.parametrize("name", CHOICES)
def test_the_trainer_takes_what_is_faster(name):
    visible, hidden, recipe, wanted = CHOICES[name]
    trainer = trainer_of({"x": lambda: B(visible)}, lambda: B(hidden), [1], recipe)
    if recipe is NARROW:  # to choose is enough: to do it takes a while
        trainer.prepare(np.zeros((1, *visible)))
        assert "random numbers" in native.unsupported_reason(trainer.task(), trainer.state)
        assert gemm.unsupported_reason(trainer.task(), trainer.state) is None
        return
    trainer.callbacks = [Taken()]
    trainer.fit(data_for(trainer.machine, 5)["x"], 1)
    assert trainer.callbacks[0].taken is wanted


def test_samples_of_another_shape_are_refused_whenever_they_come():
    trainer = trainer_of({"x": lambda: B((6, 5))}, lambda: B((4, 7)), [1], SMALL)
    batches = [torch.rand(9, 6, 5)]
    loader = DataLoader(batches, batch_size=None)

    class Change(Callback):
        def on_epoch_end(self, trainer):  # all samples have been checked now
            batches[0] = torch.rand(9, 2, 5)

    trainer.callbacks = [Change()]
    with pytest.raises(ValueError, match=r"layer 'x' expects arrays of shape \(6, 5\), got \(2, 5\)"):
        trainer.fit(loader, 2)
    assert trainer.update == 1
    trainer.prepare(np.zeros((1, 6, 5)))
    with pytest.raises(ValueError, match=r"layer 'x' needs samples of shape \(6, 5\)"):
        native.NativeBackend(trainer.task(), trainer.state, 1).update(
            trainer.state, {"x": torch.rand(9, 2, 5)}, 1.0, (1.0, 1.0)
        )


@pytest.mark.parametrize("count", [0, 1, 2, 7, 1000])
def test_uniform_numbers_are_those_of_numpys_words(monkeypatch, count):
    like, fast, slow = torch.empty(0), RandomSource(3), RandomSource(3)
    mine = [fast.uniform((count, 3), like) for _ in range(3)]
    monkeypatch.setattr(compiled, "library", lambda: None)
    for drawn in mine:
        assert torch.equal(drawn, slow.uniform((count, 3), like))
    assert torch.equal(fast.state_dict()["bits"], slow.state_dict()["bits"])


@pytest.mark.parametrize("dtype", [torch.float64, torch.float16])
def test_uniform_numbers_do_not_depend_on_defaults(dtype):
    like, plain = torch.empty(0), RandomSource(3).uniform((9,), torch.empty(0))
    before = torch.get_default_dtype()
    try:
        torch.set_default_dtype(dtype)
        with torch.device("meta"):
            assert torch.equal(RandomSource(3).uniform((9,), like), plain)
    finally:
        torch.set_default_dtype(before)


def test_numbers_that_are_not_finite_are_noticed():
    trainer = trainer_of({"x": lambda: B((6, 5))}, lambda: B((4, 7)), [1], SMALL)
    trainer.fit(data_for(trainer.machine, 20)["x"], 1)
    trainer.machine.links["x"].factors[0].data[0, 0, 0] = float("nan")
    with pytest.raises(ArithmeticError, match=r"update 2: the gradient of 'hidden.bias' is not finite"):
        trainer.fit(data_for(trainer.machine, 20)["x"], 2)


@pytest.mark.usefixtures("processor")
def test_the_sigmoid_is_right_to_the_last_places():
    trainer = trainer_of({"x": lambda: B((2, 2))}, lambda: B((50, 50)), [1], SMALL)
    fields = torch.linspace(-30, 30, 2500, dtype=torch.float64).view(50, 50)
    trainer.machine.hidden.bias.data.copy_(fields)
    for factor in trainer.machine.links["x"].factors:
        factor.data.zero_()
    trainer.prepare(np.zeros((1, 2, 2)))
    updates = native.NativeBackend(trainer.task(), trainer.state, 1)
    updates._contrast({"x": torch.zeros(1, 2, 2)}, 1.0, 0.0)  # of the data alone: minus the hidden mean
    exact = torch.sigmoid(trainer.machine.hidden.bias.detach().double())
    torch.testing.assert_close(-updates._split_gradient[1].double(), exact, rtol=3e-7, atol=0)


@pytest.mark.usefixtures("processor")
def test_large_fields_neither_overflow_nor_hang():
    trainer = trainer_of({"x": lambda: B((6, 5))}, lambda: B((4, 7)), [1], dataclasses.replace(SMALL, balance=False))
    for factor in trainer.machine.links["x"].factors:
        factor.data.mul_(1e6)
    with pytest.raises(DivergenceError, match=r"update 1: the coupling of layer 'x' has factors of up to .*e\+06"):
        trainer.fit(data_for(trainer.machine, 20)["x"], 1)
    assert trainer.update == 1
    assert all(bool(torch.isfinite(p).all()) for p in trainer.machine.parameters())


@pytest.mark.usefixtures("processor")
@pytest.mark.parametrize("count", [2, 1000, 5 * 65536 + 7])
@pytest.mark.parametrize("threads", [1, 3])
def test_steps_are_those_of_the_rule(count, threads):
    generator = torch.Generator().manual_seed(0)
    params, momenta, gradient = before = [torch.randn(count, generator=generator) for _ in range(3)]
    factors = count // 2  # the rest are biases, with a rate of their own and without weight decay
    runs = ((factors, 0.2, 0.1), (count - factors, 0.3, 0.0))

    def stepped(arrays, threads=threads):
        return CODE.step(*(array.data_ptr() for array in arrays), runs, 0.7, threads)

    places, alone = ([array.clone() for array in before] for _ in range(2))
    assert stepped(places) == stepped(alone, threads=1) == 0
    assert torch.equal(places[2], params)
    assert all(map(torch.equal, places, alone)), "bits do not depend on threads"
    for bad in (float("nan"), float("inf")):
        broken = [array.clone() for array in before]
        broken[2][-1] = bad
        assert stepped(broken) == 1
        assert torch.equal(broken[0], params)
        assert torch.equal(broken[1], momenta)
        broken = [array.clone() for array in before]
        broken[1][factors - 1] = bad
        assert stepped(broken) == 2
        assert torch.equal(broken[2], params)
    moves = [(params[:factors], momenta[:factors], 0.2), (params[factors:], momenta[factors:], 0.3)]
    recipe = Recipe(momentum=0.7, weight_decay=0.1)
    step([gradient], [momenta], [(params[:factors], gradient[:factors])], moves, recipe)
    for place, exact in zip(places[:2], (params, momenta), strict=True):
        torch.testing.assert_close(place, exact, rtol=1e-5, atol=1e-6)


@pytest.mark.usefixtures("processor")
@pytest.mark.parametrize("shape", [(0, 3), (1, 1), (7, 16), (5, 37), (300, 129)])
@pytest.mark.parametrize("threads", [1, 3])
def test_binary_units_have_their_means_and_draws(shape, threads):
    generator = torch.Generator().manual_seed(0)
    field, bias = 10 * torch.randn(*shape, generator=generator), torch.randn(shape[1], generator=generator)
    numbers, whole = torch.rand(*shape, generator=generator), torch.full((shape[0] + 1, shape[1]), 7.0)
    into, given = whole[:-1], field.clone()
    mean = torch.sigmoid(field.double() + bias)
    CODE.binary(given.data_ptr(), bias.data_ptr(), 0, into.data_ptr(), *shape, -0.5, threads)
    torch.testing.assert_close(into.double(), -0.5 * mean, rtol=1e-5, atol=1e-30)
    assert torch.equal(given, field)
    assert bool((whole[-1] == 7).all())
    CODE.binary(given.data_ptr(), bias.data_ptr(), numbers.data_ptr(), given.data_ptr(), *shape, 1.0, threads)
    sure = (numbers - mean).abs() > 1e-6
    assert torch.equal(given[sure], (numbers < mean).float()[sure])
    assert bool(((given == 0) | (given == 1)).all())


@pytest.mark.usefixtures("processor")
def test_binary_units_with_infinite_and_undefined_fields():
    field = torch.tensor([float("inf"), -float("inf"), float("nan"), -float("nan"), 1e30]).repeat(5)[None]  # and more
    bias, into = torch.zeros(field.shape[1]), torch.empty_like(field)
    CODE.binary(field.data_ptr(), bias.data_ptr(), 0, into.data_ptr(), *field.shape, 1.0, 1)
    torch.testing.assert_close(into, torch.sigmoid(field), rtol=0, atol=1e-30, equal_nan=True)


@pytest.mark.usefixtures("processor")
@pytest.mark.parametrize("rows", [(0, 0), (1, 0), (0, 3), (70, 200)])
@pytest.mark.parametrize("threads", [1, 3])
def test_sums_of_both_sides(rows, threads):
    x = torch.randn(sum(rows), 129, generator=torch.Generator().manual_seed(0))
    total, minus_first = torch.full((2, 129), 7.0)
    CODE.sums(x.data_ptr(), total.data_ptr(), minus_first.data_ptr(), *rows, 129, -0.5, 2.0, threads)
    first = -0.5 * x[: rows[0]].double().sum(0)
    torch.testing.assert_close(minus_first.double(), -first, rtol=1e-5, atol=1e-4)
    exact = first + 2 * x[rows[0] :].double().sum(0)
    torch.testing.assert_close(total.double(), exact, rtol=1e-5, atol=1e-4)
    CODE.sums(x.data_ptr(), total.data_ptr(), 0, *rows, 129, 1.0, 1.0, threads)
    torch.testing.assert_close(total.double(), x.double().sum(0), rtol=1e-5, atol=1e-4)


FULL_WEIGHTS = {
    "binary": ({"x": lambda: B((6, 7))}, lambda: B((4, 7)), [Dense()], SMALL, 20),
    "chains": ({"x": lambda: B(37), "y": lambda: C(10)}, lambda: B(17), [Dense(), Dense()], CHAINS, 20),
    "no sample": ({"x": lambda: B(37)}, lambda: B(17), [Dense()], CHAINS, 0),
    "gaussian hidden layer": ({"x": lambda: B(37)}, lambda: G(17), [Dense()], DEEP, 20),
    "variances": ({"x": lambda: learning(37)}, lambda: B(17), [Dense()], CHAINS, 20),
    "centered": ({"x": lambda: B(37), "y": lambda: G(3)}, lambda: B(17), [Dense(), Dense()], FULL, 20),
    "larger than a part": ({"x": lambda: B(401)}, lambda: B(199), [Dense()], CHAINS, 90),
}


@pytest.mark.parametrize("case", [CASES["labels"], *FULL_WEIGHTS.values()], ids=["labels", *FULL_WEIGHTS])
def test_without_compiled_code_updates_are_the_same(monkeypatch, case):
    *machine, recipe, n = case

    def trained():
        trainer = trainer_of(*machine, recipe)
        trainer.prepare(data_for(trainer.machine, max(1, n)))
        trainer.state.rng = RandomSource(4)
        path = gemm.GemmBackend(trainer.task(), trainer.state)
        batch = {name: torch.from_numpy(array).float() for name, array in data_for(trainer.machine, n).items()}
        for _ in range(2):
            path.update(trainer.state, batch, 1.0, (1.0, 1.0))
        return path

    fast = trained()
    monkeypatch.setattr(flat_updates, "compiled_code", lambda: None)
    slow = trained()
    assert fast._code is CODE
    assert slow._code is None
    for mine, true in ((fast._params, slow._params), (fast._momenta, slow._momenta)):
        torch.testing.assert_close(mine, true, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(
    "name", ["the paper's", "labels", "layers", "categories", "dense layers", "centered", "variances"]
)
@pytest.mark.usefixtures("processor")
def test_missing_entries_are_drawn_as_the_machine_does(name):
    layers, hidden, ranks, recipe, n = CASES[name]
    trainer = trainer_of(layers, hidden, ranks, recipe)
    trainer.prepare(data_for(trainer.machine, n))
    generator = torch.Generator().manual_seed(2)
    data = {key: torch.from_numpy(array).float() for key, array in data_for(trainer.machine, n).items()}
    complete = list(data)[-1] if len(data) > 1 else None
    known = {}
    for key, unit in trainer.machine.layers.items():
        if key != complete:
            sites = torch.rand((n, *unit.shape[: len(unit.shape) - unit.entry_modes]), generator=generator) < 0.5
            known[key] = (sites[..., None] if unit.entry_modes else sites).expand(n, *unit.shape)
            data[key][~known[key]] = float("nan")
    batch = Batch(data, known, n)
    recorder = Recorder(RandomSource(1))
    exact = draw_missing(trainer.machine, batch, recorder, 3)
    for make in (native.NativeBackend, gemm.GemmBackend):
        path = make(trainer.task(), trainer.state, *([2] if make is native.NativeBackend else []))
        path._rng = replay = Replay(recorder.draws)
        drawn = path.draw_missing(trainer.state, batch, 3)
        assert replay._position == len(recorder.draws)
        for key, array in exact.items():
            torch.testing.assert_close(drawn[key], array, rtol=1e-4, atol=1e-4)
            if key in known:
                assert torch.equal(drawn[key][known[key]], data[key][known[key]])
                assert data[key].isnan().any(), "the batch itself must not change"
