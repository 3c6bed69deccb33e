"""A training run that is stopped within an epoch resumes bit for bit on the CPU paths, which keep other numbers."""

import dataclasses

import numpy as np
import pytest
import torch

from mvrbm import Bernoulli, BoltzmannMachine, Dense, Gaussian, Kronecker
from mvrbm.backends.cpu.gemm import GemmBackend
from mvrbm.backends.cpu.native import NativeBackend
from mvrbm.training import CD, PCD, RECIPES, Checkpoint, Trainer

BATCH, EPOCHS = 30, 3  # of 70 samples: three updates per epoch, the last one of a short batch
RUNS = [
    (NativeBackend, lambda: Gaussian((4, 3)), lambda: Kronecker(2), "default", CD(1)),
    (NativeBackend, lambda: Gaussian((4, 3), learn_variance=True), Kronecker, "generative", PCD(20)),
    (NativeBackend, lambda: Bernoulli((4, 3)), lambda: Kronecker(2), "generative", PCD(20)),
    (GemmBackend, lambda: Gaussian(12), Dense, "default", CD(1)),
    (GemmBackend, lambda: Gaussian(12, learn_variance=True), Dense, "paper", PCD(20)),
]


def trained(run, checkpoints, monkeypatch, stop_at=None):
    path, visible, coupling, recipe, negative = run
    unit, train_on, used = visible(), Trainer.train_on, []
    data = 5 + np.random.default_rng(0).normal(size=(70, *unit.shape)).astype(np.float32).cumsum(1)
    data = data if unit.gaussian else (data > 5).astype(np.float32)

    def stopped(self, *args, **settings):
        train_on(self, *args, **settings)
        self.stop = self.stop or self.update == stop_at
        used.append(type(self._path))

    settings = dataclasses.replace(RECIPES[recipe], batch_size=BATCH, negative=negative)
    hidden = Bernoulli((3, 3) if len(unit.shape) == 2 else 9)
    trainer = Trainer(BoltzmannMachine(unit, hidden, coupling()), settings, callbacks=[Checkpoint(checkpoints)], seed=0)
    trainer.resume(checkpoints)
    with monkeypatch.context() as patched:
        patched.setattr(Trainer, "train_on", stopped)
        trainer.fit(data, EPOCHS, initialize=True)
    assert set(used) == {path}
    return trainer


@pytest.mark.parametrize("stop_at", [2, 4, 6])
@pytest.mark.parametrize("run", RUNS)
def test_a_run_that_was_stopped_resumes_with_the_same_bits(run, stop_at, tmp_path, monkeypatch):
    monkeypatch.setattr("mvrbm.io.atomic.os.fsync", lambda descriptor: None)
    whole = trained(run, tmp_path / "whole", monkeypatch)
    assert trained(run, tmp_path / "parts", monkeypatch, stop_at).update == stop_at
    parts = trained(run, tmp_path / "parts", monkeypatch)
    assert parts.update == whole.update == 3 * EPOCHS
    for one, other in (
        (whole.machine.state_dict(), parts.machine.state_dict()),
        (whole.state.momenta, parts.state.momenta),
        (whole.state.chains, parts.state.chains),
    ):
        assert one.keys() == other.keys()
        assert all(torch.equal(one[name], other[name]) for name in one)


def test_a_state_that_a_callback_changes_is_not_overwritten(tmp_path, monkeypatch):
    trainer = trained(RUNS[0], tmp_path, monkeypatch, stop_at=2)
    assert trainer.state.exact
    with torch.no_grad():
        trainer.machine.hidden.bias.fill_(7.0)
    path = NativeBackend(trainer.task(), trainer.state, 1)
    path.store(trainer.state)
    torch.testing.assert_close(trainer.machine.hidden.bias.detach(), torch.full((3, 3), 7.0))
