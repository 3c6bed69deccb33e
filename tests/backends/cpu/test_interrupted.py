"""A training run that is stopped within an epoch resumes bit for bit, although CPU backends keep rounded-off values."""

import copy
import dataclasses

import numpy as np
import pytest
import torch

from backend_runs import DEFAULT, PAPER, Case, everything_in, start, train, with_negative
from mvrbm import Bernoulli, BoltzmannMachine, Categorical, Dense, Gaussian, Kronecker, compiled
from mvrbm.backends.cpu.gemm import GemmBackend
from mvrbm.backends.cpu.native import NativeBackend
from mvrbm.backends.cpu.one_hot import OneHotBackend
from mvrbm.training import PCD, RECIPES, Callback, Checkpoint, Trainer

G = Gaussian
B = Bernoulli
C = Categorical
PERSISTENT = with_negative(DEFAULT, PCD(20))
SIZES = (30, 30, 10, 30)


def learning(shape):
    """Gaussian units that learn their variances."""
    return G(shape, learn_variance=True)


def native(run):
    return NativeBackend(run.settings, run.state, 2)


def gemm(run):
    return GemmBackend(run.settings, run.state)


def one_hot(run):
    return OneHotBackend(run.settings, run.state)


CASES = [
    (native, Case({"x": lambda: G((4, 3))}, lambda: B((3, 3)), [2], DEFAULT, SIZES)),
    (native, Case({"x": lambda: learning((4, 3))}, lambda: B((3, 3)), [1], PERSISTENT, SIZES)),
    (native, Case({"x": lambda: G((4, 3), learn_variance="axes")}, lambda: B((3, 3)), [1], PERSISTENT, SIZES)),
    (gemm, Case({"x": lambda: G((2, 3, 4), learn_variance="one")}, lambda: B((3, 2, 2)), [2], PERSISTENT, SIZES)),
    (native, Case({"x": lambda: B((4, 3))}, lambda: B((3, 3)), [2], PERSISTENT, SIZES)),
    (gemm, Case({"x": lambda: G((2, 3, 4))}, lambda: B((3, 2, 2)), [2], DEFAULT, SIZES)),
    (one_hot, Case({"x": lambda: C((4, 3))}, lambda: B((3, 3)), [2], PERSISTENT, SIZES)),
    (
        gemm,
        Case(
            {"x": lambda: learning((2, 3, 4)), "y": lambda: learning(5)},
            lambda: B((3, 2, 2)),
            [1, Dense()],
            with_negative(PAPER, PCD(20), learning_rate=0.0005),
            SIZES,
        ),
    ),
]


def assert_same_bits(one, other):
    assert one.keys() == other.keys()
    for name, tensor in one.items():
        assert torch.equal(tensor, other[name]), name


@pytest.mark.parametrize("stop_at", [1, 2, 3])
@pytest.mark.parametrize(("make", "case"), CASES)
def test_a_backend_continues_from_a_stored_state_with_the_same_bits(make, case, stop_at):
    if make is native and compiled.library() is None:
        pytest.skip("the C code was not built")
    whole = start(case)
    expected = train(make(whole), whole)
    first = start(case)
    first = first._replace(batches=first.batches[:stop_at])
    backend = make(first)
    stored = train(backend, first)
    assert stored.update == stop_at
    stored.exact = backend.exact()
    rest = start(case)
    rest = rest._replace(state=copy.deepcopy(stored), batches=rest.batches[stop_at:])
    found = resume(make(rest), rest, full=max(SIZES))
    assert_same_bits(everything_in(found), everything_in(expected))


def resume(backend, run, full):
    """Make the updates of the other batches, with the weights that they have in the whole run."""
    state = run.state
    for batch in run.batches:
        state = train(backend, run._replace(state=state, batches=[batch]), full=full)
    return state


@pytest.mark.parametrize("change", ["parameter", "momentum", "chains"])
def test_a_state_that_a_callback_changes_is_not_overwritten(change):
    make, case = CASES[1] if compiled.library() is not None else CASES[-1]
    run = start(case)
    backend = make(run)
    state = train(backend, run)
    state.exact = backend.exact()
    changed = {
        "parameter": state.machine.hidden.bias.data,
        "momentum": state.momenta["hidden.bias"],
        "chains": state.chains["x"],
    }[change]
    changed.fill_(7.0)
    make(run).store(state)
    torch.testing.assert_close(changed, torch.full_like(changed, 7.0))


class StopAt(Callback):
    """Stops training after an update, within an epoch."""

    def __init__(self, update):
        self.update = update

    def on_batch_end(self, trainer, batch):
        if trainer.update == self.update:
            trainer.stop = True


@pytest.mark.parametrize("stop_at", [2, 4, 6])
@pytest.mark.parametrize("persistent", [False, True])
def test_a_run_that_was_stopped_resumes_from_its_checkpoint_with_the_same_bits(
    persistent, stop_at, tmp_path, monkeypatch
):
    monkeypatch.setattr("mvrbm.io.atomic.os.fsync", lambda descriptor: None)
    # 70 samples in batches of 30: three updates per epoch, the last with a short batch.
    data = 5 + np.random.default_rng(0).normal(size=(70, 4, 3)).astype(np.float32).cumsum(1)
    recipe = dataclasses.replace(RECIPES["generative"] if persistent else RECIPES["default"], batch_size=30)

    def trained(checkpoints, *callbacks):
        machine = BoltzmannMachine(G((4, 3), learn_variance=persistent), B((3, 3)), Kronecker(2))
        trainer = Trainer(machine, recipe, callbacks=[Checkpoint(checkpoints), *callbacks], seed=0)
        trainer.resume(checkpoints)
        return trainer.fit(data, 3, initialize=True)

    whole = trained(tmp_path / "whole")
    assert trained(tmp_path / "parts", StopAt(stop_at)).update == stop_at
    parts = trained(tmp_path / "parts")
    assert parts.update == whole.update == 9
    assert_same_bits(everything_in(parts.state), everything_in(whole.state))
