"""Persistent chains of kernel backends start when a state has none, as in the reference, and epochs can be interrupted.

The Triton kernels run in the interpreter, or on a GPU where there is one.
"""

import importlib.util

import pytest
import torch

from mvrbm.couplings import Kronecker
from mvrbm.training import Callback, TemperedPCD, Trainer
from mvrbm.units import Bernoulli

if importlib.util.find_spec("triton") is None:
    pytest.skip("the kernels need triton", allow_module_level=True)
from backends.cuda.training_runs import (
    BATCH_SIZE,
    DEFAULT,
    FULL,
    PRECISE,
    N,
    assert_same_result,
    data_for,
    everything,
    machine_of,
    never,
    orders,
    trainer_for,
    unchanged,
    with_chains,
)
from mvrbm.backends.cuda.full_matrix import FullMatrixBackend
from mvrbm.backends.cuda.per_sample import PerSampleBackend
from mvrbm.backends.cuda.tensor import TensorBackend


def case(recipe, shape=(6, 5), hidden=(4, 7)):
    return [lambda: Bernoulli(shape)], lambda: Bernoulli(hidden), [Kronecker(2)], recipe


# The backend, the training run, and whether its data has missing entries.
RUNS = {
    "per_sample": (PerSampleBackend, case(with_chains(DEFAULT, 9)), False),
    "tensor": (TensorBackend, case(with_chains(DEFAULT, 3), (3, 2, 4), (2, 3, 2)), False),
    "full_matrix": (FullMatrixBackend, case(with_chains(FULL, 3)), False),
    "full_matrix, missing entries": (FullMatrixBackend, case(with_chains(DEFAULT, 9)), True),
    "full_matrix, tempered": (FullMatrixBackend, case(with_chains(DEFAULT, 5, 3, kind=TemperedPCD)), False),
}


@pytest.mark.parametrize("name", RUNS)
@pytest.mark.usefixtures("interpreted")
def test_chains_start_when_a_state_has_none(name):
    kind, run, masked = RUNS[name]
    reference, source, start = trainer_for(run, unchanged, masked, N, dtype=torch.float64, backend="autograd")
    trainer, data, _ = trainer_for(run, unchanged, masked, N)
    for state in (reference.state, trainer.state):
        state.update = 3  # as after updates without persistent chains
        state.batch = 1  # the first batch is the last one of an epoch, and shorter than the others
    backend = kind([trainer.update_settings()], [trainer.state], [data], precision=PRECISE)
    for epoch, first in enumerate((1, 0)):
        for batch in source.batches(BATCH_SIZE, reference.order_rng.at_step(epoch), start=first):
            reference.train_on(batch, weight=len(batch) / BATCH_SIZE)
        assert backend.epoch([trainer.state], orders([trainer], epoch), never) == 2 - first
        backend.store([trainer.state])
        assert_same_result(reference, trainer, start)
        for state in (reference.state, trainer.state):  # as a callback may do
            state.chains.clear()
            state.batch = 0
        backend.load([trainer.state])


class Stop(Callback):
    """Stops the first `fit` in its first epoch, as Ctrl-C does."""

    def on_epoch_begin(self, trainer):
        trainer.stop = trainer.update == 0


@pytest.mark.parametrize("name", ["per_sample", "tensor", "full_matrix, tempered"])
@pytest.mark.usefixtures("interpreted")
def test_training_stops_between_two_graphs_and_continues(name, monkeypatch):
    kind, run, _ = RUNS[name]
    monkeypatch.setattr(kind, "updates_per_graph", 1)
    trainers = []
    for callbacks in ([], [Stop()]):
        machine = machine_of(*run[:3])
        trainers.append(Trainer(machine, run[3], seed=5, backend=name.split(",")[0], callbacks=callbacks))
    data = data_for(trainers[0].machine, N)
    whole, stopped = trainers
    whole.fit(data, 2)
    stopped.fit(data, 2)
    assert (stopped.update, stopped.epoch, stopped.state.batch) == (1, 0, 1)
    stopped.fit(data, 2)
    assert (stopped.update, stopped.epoch, stopped.state.batch) == (whole.update, 2, 0)
    expected = everything(whole)
    found = everything(stopped)
    assert found.keys() == expected.keys()
    for key, value in expected.items():
        torch.testing.assert_close(found[key], value, rtol=1e-5, atol=1e-5)
