"""The C code: threads, forks, its functions one by one, and which machines it is used for.

`test_equal_reference` compares its updates with the reference.
"""

import dataclasses
import os
import shutil
import subprocess
import sys
import sysconfig
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader

from backend_runs import DEFAULT, Case, assert_equal_states, everything_in, start, train, with_negative
from mvrbm import BoltzmannMachine, RandomSource, compiled
from mvrbm.backends.choose import fastest_backend
from mvrbm.backends.cpu import flat_backend, gemm, native, native_job
from mvrbm.couplings import Dense, Kronecker
from mvrbm.data.sources import as_source
from mvrbm.errors import DivergenceError
from mvrbm.models import mvrbm
from mvrbm.training import PCD, Callback, Recipe, Trainer
from mvrbm.units import Bernoulli, Categorical, Gaussian
from mvrbm.updates.gradient import WHOLE
from mvrbm.updates.step import step

CODE = compiled.library()
if os.environ.get("MVRBM_TEST_PROCESSOR") == "none":
    pytest.skip("MVRBM_TEST_PROCESSOR turns the C code off", allow_module_level=True)
if CODE is None:
    # A missing compiler is no error, but an error in the code is.
    headers = Path(sysconfig.get_paths()["include"], "Python.h")
    can_be_built = sys.platform in ("linux", "darwin") and shutil.which("cc") is not None and headers.exists()
    can_be_built = can_be_built and not sysconfig.get_config_var("Py_GIL_DISABLED")
    assert not can_be_built, "there is a C compiler, but no compiled code: pip install -v -e . says why"
    pytest.skip("the C code was not built", allow_module_level=True)

B = Bernoulli
C = Categorical
G = Gaussian
PERSISTENT = with_negative(DEFAULT, PCD(7, 2))

# -- threads ------------------------------------------------------------------------------------------


@pytest.fixture
def _many_chunks(monkeypatch):
    """Divide even small batches into as many chunks as possible."""
    monkeypatch.setattr(native, "_WORTH_THREADS", 0)
    monkeypatch.setattr(native_job, "_GROUP_BYTES", 1)


def trained(threads, seed=5, updates=60):
    """Return parameters and momenta after many updates with some number of threads."""
    case = Case({"x": lambda: B((20, 20))}, lambda: B((18, 18)), [2], DEFAULT, (40,) * updates)
    run = start(case, seed=seed)
    return everything_in(train(native.NativeBackend(run.settings, run.state, threads), run))


def same_bits(one, other):
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


@pytest.mark.usefixtures("_many_chunks")
def test_the_number_of_threads_changes_no_bit():
    alone = trained(1)
    for threads in (2, 3, 4, 8, 40):
        assert same_bits(trained(threads), alone)
    assert CODE.workers() == native_job.MOST_CHUNKS - 1


@pytest.mark.usefixtures("_many_chunks")
def test_trainings_at_the_same_time_do_not_disturb_each_other():
    alone = [trained(1, seed) for seed in range(4)]
    assert not same_bits(alone[0], alone[1])
    with ThreadPoolExecutor(4) as pool:
        together = list(pool.map(lambda seed: trained(3, seed), range(4)))
    assert all(map(same_bits, together, alone))


FORKED = """
import os, sys, numpy as np, torch
from mvrbm import compiled
from mvrbm.backends.cpu import native
from mvrbm.training import Trainer
from mvrbm.models import mvrbm

torch.set_num_threads(1)  # only the C code has several threads
native._WORTH_THREADS = 0
NativeBackend = native.NativeBackend
native.NativeBackend = lambda settings, state, threads: NativeBackend(settings, state, 3)
code = compiled.library()

def run():
    data = np.random.default_rng(0).random((300, 20, 20))
    trainer = Trainer(mvrbm((20, 20), (18, 18))).fit(data, 2, initialize=True)
    assert trainer.update == 6 and code.workers() == 2

def n_threads():
    return len(os.listdir("/proc/self/task"))

run()
child = os.fork()
if child == 0:
    status = 1
    try:
        before = n_threads()  # PyTorch may have started some after the fork
        assert code.workers() == 0
        run()
        assert n_threads() == before + 2
        status = 0
    finally:
        os._exit(status)
run()
sys.exit(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
"""


@pytest.mark.skipif(sys.platform != "linux", reason="counts threads in /proc")
def test_a_forked_process_starts_new_threads():
    subprocess.run([sys.executable, "-W", "ignore", "-c", FORKED], check=True, timeout=100)


# -- which machines the C code is used for ----------------------------------------------------------------

CHOICES = {
    "the paper's": ((28, 28), (25, 25), None),
    "small": ((3, 4), (2, 5), None),
    "one column": ((300, 1), (200, 1), "its matrices are too narrow"),
    "one row": ((1, 300), (1, 200), "its matrices are too narrow"),
    "few hidden columns": ((28, 28), (100, 2), "its matrices are too narrow"),
}


@pytest.mark.parametrize("name", CHOICES)
def test_narrow_matrices_are_left_to_matrix_products(name):
    visible, hidden, reason = CHOICES[name]
    run = start(Case({"x": lambda: B(visible)}, lambda: B(hidden), [1], Recipe(learning_rate=0.01)))
    assert native.unsupported_reason(run.settings, run.state) is None
    assert native.slower_reason(run.settings, run.state) == reason
    assert chosen(run) == ("native" if reason is None else "gemm")


def chosen(run):
    """Return the name of the backend that a trainer chooses."""
    return fastest_backend(run.settings, run.state, as_source(run.batches[0], run.state.machine))


def test_dense_layers_are_computed_next_to_matrices_only_if_they_are_small():
    layers = {"x": lambda: B((28, 28)), "y": lambda: C(10)}
    run = start(Case(layers, lambda: B((25, 25)), [1, Dense()]))
    assert chosen(run) == "native"
    run = start(Case({**layers, "y": lambda: C(100)}, lambda: B((25, 25)), [1, Dense()]))
    assert native.unsupported_reason(run.settings, run.state) is None
    assert "too many dense weights" in native.slower_reason(run.settings, run.state)
    assert chosen(run) == "gemm"
    run = start(Case({"x": lambda: B(28), "z": lambda: B((2, 3, 4))}, lambda: B((5, 5, 5)), [Dense(), 1]))
    assert "at least one matrix layer" in native.unsupported_reason(run.settings, run.state)


def test_machines_of_dense_layers_are_left_to_the_reference():
    run = start(Case({"x": lambda: B(28), "y": lambda: C(3)}, lambda: B(25), [Dense(), Dense()]))
    assert flat_backend.unsupported_reason(run.settings, run.state) is None
    assert "all of its couplings are dense" in gemm.slower_reason(run.state)
    assert "at least one matrix layer" in native.unsupported_reason(run.settings, run.state)
    assert chosen(run) == "reference"


def test_samples_of_another_shape_are_refused_whenever_they_come():
    batches = [torch.rand(9, 6, 5)]

    class Change(Callback):
        def on_epoch_end(self, trainer):  # all samples have been checked now
            batches[0] = torch.rand(9, 2, 5)

    trainer = Trainer(mvrbm((6, 5), (4, 7)), callbacks=[Change()])
    with pytest.raises(ValueError, match=r"layer 'visible' expects arrays of shape \(6, 5\), but got \(2, 5\)"):
        trainer.fit(DataLoader(batches, batch_size=None), 2)
    assert trainer.update == 1


@pytest.mark.parametrize("shapes", [[(9, 2, 5), (9, 3)], [(9, 6, 5), (8, 3)]])
def test_batches_of_another_shape_are_errors(shapes):
    run = start(Case({"x": lambda: B((6, 5)), "y": lambda: B(3)}, lambda: B((4, 7)), [1, Dense()]))
    backend = native.NativeBackend(run.settings, run.state, 1)
    batch = dict(zip("xy", map(torch.rand, shapes), strict=True))
    with pytest.raises(
        ValueError, match=r"layer '[xy]' expects 9 samples of shape \((6, 5|3,)\), but got an array of shape"
    ):
        backend.update(run.state, batch, 1.0, WHOLE)


# -- numbers that are large, or not finite -----------------------------------------------------------------


def test_numbers_that_are_not_finite_are_noticed():
    data = np.random.default_rng(0).random((20, 6, 5))
    trainer = Trainer(mvrbm((6, 5), (4, 7)), Recipe(learning_rate=0.01)).fit(data, 1, initialize=True)
    trainer.machine.links["visible"].factors[0].data[0, 0, 0] = float("nan")
    with pytest.raises(ArithmeticError, match=r"update 2: the gradient of 'hidden.bias' is not finite"):
        trainer.fit(data, 2)


@pytest.mark.parametrize("backend", ["native", "gemm"])
def test_a_step_that_diverges_leaves_the_state_before_it(backend):
    case = Case({"x": lambda: B((6, 5))}, lambda: B((4, 7)), [1])
    run = start(case._replace(recipe=dataclasses.replace(DEFAULT, learning_rate=1e38, bias_learning_rate=1e38)))
    before = {name: parameter.detach().clone() for name, parameter in run.state.machine.named_parameters()}
    made = (
        native.NativeBackend(run.settings, run.state, 1)
        if backend == "native"
        else gemm.GemmBackend(run.settings, run.state)
    )
    with torch.no_grad():
        for momentum in (made.arrays.momenta,):
            momentum.fill_(1e38)
    with pytest.raises(DivergenceError, match=r"update 1: the parameter of '.*' is not finite"):
        made.update(run.state, run.batches[0], 1.0, WHOLE)
    for name, parameter in run.state.machine.named_parameters():
        torch.testing.assert_close(parameter.detach(), before[name], rtol=1e-6, atol=1e-6)


@pytest.mark.usefixtures("processor")
def test_the_sigmoid_is_right_to_the_last_digits():
    run = start(Case({"x": lambda: B((2, 2))}, lambda: B((50, 50)), [1]))
    machine = run.state.machine
    machine.hidden.bias.data.copy_(torch.linspace(-30, 30, 2500, dtype=torch.float64).view(50, 50))
    for factor in machine.links["x"].factors:
        factor.data.zero_()
    backend = native.NativeBackend(run.settings, run.state, 1)
    # The gradient of the data's side alone is minus the hidden mean.
    backend._contrast({"x": torch.zeros(1, 2, 2)}, RandomSource(0), 1.0, 0.0)
    exact = torch.sigmoid(machine.hidden.bias.detach().double())
    torch.testing.assert_close(-backend.arrays.hidden_bias_gradient.double(), exact, rtol=3e-7, atol=0)


@pytest.mark.usefixtures("processor")
def test_large_fields_neither_overflow_nor_hang():
    machine = BoltzmannMachine(B((6, 5)), B((4, 7)), Kronecker(), std=0.3, seed=3)
    for factor in machine.links["visible"].factors:
        factor.data.mul_(1e6)
    trainer = Trainer(machine, Recipe(learning_rate=0.01, balance=False))
    with pytest.raises(
        DivergenceError, match=r"update 1: the coupling for layer 'visible' has factors of up to .*e\+06"
    ):
        trainer.fit(np.random.default_rng(0).random((20, 6, 5)), 1)
    assert trainer.update == 1
    assert all(bool(torch.isfinite(p).all()) for p in machine.parameters())


# -- functions of the C code ---------------------------------------------------------------------------------


@pytest.mark.usefixtures("processor")
@pytest.mark.parametrize("count", [2, 1000, 5 * 65536 + 7])
@pytest.mark.parametrize("threads", [1, 3])
def test_steps_are_those_of_the_rule(count, threads):
    generator = torch.Generator().manual_seed(0)
    before = [torch.randn(count, generator=generator) for _ in range(3)]
    params, momenta, gradient = before
    factors = count // 2  # the biases, which follow, have another rate and no weight decay
    segments = ((factors, 0.2, 0.1), (count - factors, 0.3, 0.0))

    def stepped(arrays, threads=threads):
        return CODE.step(*(array.data_ptr() for array in arrays), segments, 0.7, threads)

    places = [array.clone() for array in before]
    alone = [array.clone() for array in before]
    assert stepped(places) == 0
    assert stepped(alone, threads=1) == 0
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


@pytest.mark.parametrize("dtype", [torch.float64, torch.float16])
def test_uniform_numbers_do_not_depend_on_defaults(dtype):
    like = torch.empty(0)
    plain = RandomSource(3).uniform((9,), like)
    before = torch.get_default_dtype()
    try:
        torch.set_default_dtype(dtype)
        with torch.device("meta"):
            assert torch.equal(RandomSource(3).uniform((9,), like), plain)
    finally:
        torch.set_default_dtype(before)


# -- without the C code ------------------------------------------------------------------------------------------

FULL = dataclasses.replace(PERSISTENT, centering="full")
WITHOUT_CODE = {
    "matrix and label": Case({"x": lambda: B((6, 5)), "y": lambda: C(10)}, lambda: B((4, 7)), [2, Dense()], PERSISTENT),
    "dense": Case({"x": lambda: B((6, 7))}, lambda: B((4, 7)), [Dense()]),
    "dense, chains": Case({"x": lambda: B(37), "y": lambda: C(10)}, lambda: B(17), [Dense(), Dense()], PERSISTENT),
    "dense, no sample": Case({"x": lambda: B(37)}, lambda: B(17), [Dense()], PERSISTENT, (0, 0)),
    "dense, gaussian hidden layer": Case({"x": lambda: B(37)}, lambda: G(17), [Dense()]),
    "dense, variances": Case({"x": lambda: G(37, learn_variance=True)}, lambda: B(17), [Dense()], PERSISTENT),
    "dense, centered": Case({"x": lambda: B(37), "y": lambda: G(3)}, lambda: B(17), [Dense(), Dense()], FULL),
    "dense, large": Case({"x": lambda: B(401)}, lambda: B(199), [Dense()], PERSISTENT, (90, 90)),
}


@pytest.mark.parametrize("name", WITHOUT_CODE)
def test_without_compiled_code_updates_are_the_same(monkeypatch, name):
    def trained_by_products():
        run = start(WITHOUT_CODE[name])
        return train(gemm.GemmBackend(run.settings, run.state), run)

    with_code = trained_by_products()
    monkeypatch.setattr(compiled, "library", lambda name="_native": None)
    without = trained_by_products()
    assert_equal_states(with_code, without, rtol=1e-5, atol=1e-5)


def test_swapped_fields_of_a_structure_are_detected(monkeypatch):
    assert native_job.has_fields_of(CODE)
    (first, first_at), (second, second_at), *others = CODE.job_fields
    swapped = ModuleType("swapped")
    vars(swapped).update(vars(CODE), job_fields=((first, second_at), (second, first_at), *others))
    assert not native_job.has_fields_of(swapped)
    monkeypatch.setattr(compiled, "library", lambda name="_native": swapped)
    run = start(WITHOUT_CODE["matrix and label"])
    assert "another version" in native.unsupported_reason(run.settings, run.state)


def test_code_of_another_interface_is_not_used(monkeypatch):
    monkeypatch.setattr(compiled, "_NATIVE_INTERFACE", -1)
    compiled.library.cache_clear()
    try:
        assert compiled.library() is None
        run = start(WITHOUT_CODE["matrix and label"])
        assert native.unsupported_reason(run.settings, run.state) == "the compiled code is missing"
    finally:
        monkeypatch.undo()
        compiled.library.cache_clear()
    assert compiled.library() is CODE
