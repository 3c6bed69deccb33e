"""The compiled code against PyTorch in float64, given the same numbers, for every kind of processor that is here."""

import dataclasses
import subprocess
import sys
import threading

import numpy as np
import pytest
import torch

from mvrbm import BoltzmannMachine, Noise
from mvrbm.couplings import Kronecker
from mvrbm.kernels import compiled, gemm, native
from mvrbm.learning import CD, PCD, Recipe, Trainer
from mvrbm.learning.data import as_source
from mvrbm.noise import Recorder, Replay
from mvrbm.units import Bernoulli, Gaussian

CODE = compiled.library()
PROCESSORS = [] if CODE is None else CODE.processors()
if CODE is None:
    pytest.skip(
        "there is no compiled code: it needs a C compiler when the package is installed", allow_module_level=True
    )

B, G = Bernoulli, Gaussian


@pytest.fixture(params=PROCESSORS)
def processor(request):
    CODE.use(request.param)
    yield request.param
    CODE.use(PROCESSORS[-1])


def trainer_of(layers, hidden, ranks, recipe, *, std=0.3, seed=3):
    links = {name: Kronecker(rank) for name, rank in zip(layers, ranks, strict=True)}
    machine = BoltzmannMachine({n: unit() for n, unit in layers.items()}, hidden(), links, std=std, seed=seed)
    rng = np.random.default_rng(seed)
    for unit in (machine.hidden, *machine.layers.values()):
        unit.bias.data.copy_(torch.from_numpy(rng.normal(0, 0.5, unit.shape)))
    return Trainer(machine, recipe, seed=5, initialise=False)


def data_for(machine, n, seed=3):
    rng = np.random.default_rng(seed)
    return {
        name: (3 + 2 * rng.standard_normal((n, *unit.shape))) if unit.gaussian else rng.random((n, *unit.shape))
        for name, unit in machine.layers.items()
    }


SMALL, DEEP = Recipe(learning_rate=0.01), Recipe(learning_rate=0.01, negative=CD(3))
CHAINS = Recipe(learning_rate=0.01, negative=PCD(7, 2))
CASES = {
    "one entry": ({"x": lambda: B((1, 1))}, lambda: B((1, 1)), [1], SMALL, 3),
    "one sample": ({"x": lambda: B((6, 5))}, lambda: B((4, 7)), [1], SMALL, 1),
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
    "more than one group": ({"x": lambda: B((40, 40))}, lambda: B((30, 30)), [6], SMALL, 60),
}  # fmt: skip


def contrasts(case, threads=1):
    """Return gradients and chains after three updates by the compiled code, and by plain products in float64."""
    layers, hidden, ranks, recipe, n = case
    exact = trainer_of(layers, hidden, ranks, recipe)
    exact.machine.double()
    data = {name: torch.from_numpy(array).float().double() for name, array in data_for(exact.machine, n).items()}
    fast = trainer_of(layers, hidden, ranks, recipe)
    for trainer in (exact, fast):
        trainer._prepare(as_source({name: array.numpy() for name, array in data.items()}, trainer.machine))
    noise = Noise(7)
    slow, quick = gemm.GemmUpdates(exact), native.NativeUpdates(fast, threads)
    assert native.refuses(fast) is None
    assert "float64" in native.refuses(exact)
    found = []
    for number in range(3):
        exact.noise = recorder = Recorder(noise)
        with torch.no_grad():
            quick._params.copy_(slow._params)
            slow.update(data, 0.7, (0.5, 0.8))
            fast.noise = Replay([draw.float() for draw in recorder.draws])
            # What is drawn in float64 near its limit could fall on the other side in float32: none of these do.
            quick.update({name: array.float() for name, array in data.items()}, 0.7, (0.5, 0.8))
        found.append((quick._gradient.clone(), slow._gradient.clone()))
        exact.update = fast.update = number + 1
    slow.push()
    quick.push()
    return found, fast, exact


@pytest.mark.parametrize("name", CASES)
@pytest.mark.usefixtures("processor")
def test_gradients_and_chains_are_those_of_plain_products(name):
    found, fast, exact = contrasts(CASES[name])
    for mine, true in found:
        assert true.abs().max() > 1e-3, "nothing to compare"
        torch.testing.assert_close(mine.double(), true, rtol=1e-4, atol=2e-6 * float(true.abs().max()))
    assert set(fast.chains) == set(exact.chains)
    for key, chain in exact.chains.items():
        torch.testing.assert_close(fast.chains[key].double(), chain, rtol=1e-4, atol=1e-4)
        assert fast.chains[key].is_contiguous()


def trained(threads, monkeypatch, *, seed=1, n=400):
    monkeypatch.setattr(native, "_WORTH_THREADS", 0)
    monkeypatch.setattr(torch, "get_num_threads", lambda: threads)
    monkeypatch.setattr(torch, "set_num_threads", lambda _: None)
    trainer = trainer_of({"x": lambda: B((20, 20))}, lambda: B((18, 18)), [2], Recipe(batch_size=150), seed=seed)
    trainer.fit(data_for(trainer.machine, n, seed)["x"], 3)
    return torch.cat([p.detach().flatten() for p in trainer.machine.parameters()])


def test_the_number_of_threads_changes_nothing(monkeypatch):
    alone = trained(1, monkeypatch)
    assert all(torch.equal(trained(threads, monkeypatch), alone) for threads in (2, 3, 8))


def test_trainings_at_the_same_time_do_not_disturb_each_other(monkeypatch):
    alone = {seed: trained(2, monkeypatch, seed=seed) for seed in range(4)}
    together = {}
    jobs = [
        threading.Thread(target=lambda s=seed: together.update({s: trained(2, monkeypatch, seed=s)}))
        for seed in range(4)
    ]
    for job in jobs:
        job.start()
    for job in jobs:
        job.join()
    assert all(torch.equal(together[seed], alone[seed]) for seed in alone)


FORKED = """
import os, sys, numpy as np, torch
from mvrbm.kernels import native
from mvrbm.learning import Trainer
from mvrbm.models import mvrbm

torch.set_num_threads(1)  # PyTorch's own threads do not outlive a fork
native._WORTH_THREADS, Updates = 0, native.NativeUpdates
native.NativeUpdates = lambda trainer, threads: Updates(trainer, 2)

def run():
    return Trainer(mvrbm((20, 20), (18, 18))).fit(np.random.default_rng(0).random((300, 20, 20)), 2).update

assert run() == 6
child = os.fork()
if child == 0:
    os._exit(0 if run() == 6 else 1)
sys.exit(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) or run() != 6)
"""


@pytest.mark.skipif(sys.platform == "win32", reason="no fork")
def test_a_forked_process_has_threads_of_its_own():
    subprocess.run([sys.executable, "-W", "ignore", "-c", FORKED], check=True, timeout=100)


@pytest.mark.parametrize("count", [0, 1, 2, 7, 1000])
def test_uniform_numbers_are_those_of_numpys_words(monkeypatch, count):
    like, fast, slow = torch.empty(0), Noise(3), Noise(3)
    mine = [fast.uniform((count, 3), like) for _ in range(3)]
    monkeypatch.setattr(compiled, "library", lambda: None)
    for drawn in mine:
        assert torch.equal(drawn, slow.uniform((count, 3), like))
    assert torch.equal(fast.state_dict()["bits"], slow.state_dict()["bits"])


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
    trainer._prepare(as_source(np.zeros((1, 2, 2)), trainer.machine))
    updates = native.NativeUpdates(trainer, 1)
    updates._contrast({"x": torch.zeros(1, 2, 2)}, 1.0, 0.0)  # of the data alone: minus the hidden mean
    exact = torch.sigmoid(trainer.machine.hidden.bias.detach().double())
    torch.testing.assert_close(-updates._split_gradient[1].double(), exact, rtol=3e-7, atol=0)


@pytest.mark.usefixtures("processor")
def test_large_fields_neither_overflow_nor_hang():
    trainer = trainer_of({"x": lambda: B((6, 5))}, lambda: B((4, 7)), [1], dataclasses.replace(SMALL, balance=False))
    for factor in trainer.machine.links["x"].factors:
        factor.data.mul_(1e6)
    trainer.fit(data_for(trainer.machine, 20)["x"], 1)
    assert all(bool(torch.isfinite(p).all()) for p in trainer.machine.parameters())
