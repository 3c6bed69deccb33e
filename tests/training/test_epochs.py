"""Epochs that a backend computes as a whole: orders of the samples, and what the loop stores and loads."""

import signal

import numpy as np
import pytest
import torch

from mvrbm import Bernoulli, BoltzmannMachine, Gaussian, Kronecker, RandomSource
from mvrbm.backends import choose
from mvrbm.backends.base import EpochBackend
from mvrbm.backends.choose import BackendChoice
from mvrbm.data.sources import as_source
from mvrbm.models import mvrbm
from mvrbm.training import Callback, Recipe, Trainer, fit_together
from mvrbm.training.epochs import EpochLoop, EpochOrders

CPU = torch.device("cpu")


def bits(n=35, seed=0):
    return (np.random.default_rng(seed).random((n, 3, 3)) < 0.4).astype(np.float32)


# -- orders -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("n", [1, 7, 1000, 2**16, 2**17 + 1])
def test_orders_are_those_of_single_epochs(n):
    rng = RandomSource(3)
    orders = EpochOrders(rng, n, CPU)
    for epoch in (0, 1, 2, 17, 5, 6):
        assert torch.equal(orders.of_epoch(epoch), rng.at_step(epoch).permutation(n))


def test_one_sort_serves_several_short_epochs(monkeypatch):
    sorts = []
    permutations = RandomSource.permutations

    def counted(self, n, first_step, count, device="cpu"):
        sorts.append((first_step, count))
        return permutations(self, n, first_step, count, device)

    monkeypatch.setattr(RandomSource, "permutations", counted)
    short, long = EpochOrders(RandomSource(0), 100, CPU), EpochOrders(RandomSource(0), 2**16, CPU)
    for epoch in range(20):
        short.of_epoch(epoch)
    assert sorts == [(0, 16), (16, 16)]
    sorts.clear()
    for epoch in range(3):
        long.of_epoch(epoch)
    assert sorts == [(0, 2), (2, 2)]


# -- the loop ---------------------------------------------------------------------------------------------


class Recorder(EpochBackend):
    """A backend that records its calls, and adds 1 to the hidden bias at every update once it stores."""

    def __init__(self, n_samples=35, batch_size=10, stops=False):
        self.n_samples = n_samples
        self.batch_size = batch_size
        self.stops = stops
        self.calls = []
        self.orders = []

    def epoch(self, states, orders, stopped):
        self.calls.append("epoch")
        self.orders.append(orders.clone())
        n_batches = -(-self.n_samples // self.batch_size)
        made = 1 if self.stops and stopped() else n_batches - states[0].batch
        for state in states:
            state.update += made
        return made

    def store(self, states):
        self.calls.append("store")
        for state in states:
            with torch.no_grad():
                state.machine.hidden.bias.fill_(state.update)
        return [False] * len(states)

    def load(self, states):
        self.calls.append("load")

    def balance(self, states):
        self.calls.append("balance")


def chosen(monkeypatch, backend):
    """Let trainers use a backend for every training run."""
    recorder = BackendChoice("records its calls", lambda *run: None, lambda *run: backend)
    monkeypatch.setattr(choose, "BACKENDS", {"recorder": recorder})
    return backend


def test_parameters_are_stored_at_the_end_only_if_nobody_reads_them(monkeypatch):
    backend = chosen(monkeypatch, Recorder())
    run = Trainer(mvrbm((3, 3), (2, 2)), Recipe(batch_size=10)).fit(bits(), 3)
    assert backend.calls == ["epoch", "balance", "epoch", "balance", "epoch", "store"]
    assert (run.epoch, run.state.batch, run.update) == (3, 0, 12)
    assert bool((run.machine.hidden.bias == 12).all())
    expected = [run.order_rng.at_step(epoch).permutation(35) for epoch in range(3)]
    assert all(torch.equal(found[0], order) for found, order in zip(backend.orders, expected, strict=True))


def test_callbacks_read_stored_parameters_and_may_change_them(monkeypatch):
    class Reader(Callback):
        def __init__(self):
            self.seen = []

        def on_epoch_end(self, trainer):
            self.seen.append(float(trainer.machine.hidden.bias.detach().max()))

    backend, reader = chosen(monkeypatch, Recorder()), Reader()
    Trainer(mvrbm((3, 3), (2, 2)), Recipe(batch_size=10, balance=False), callbacks=[reader]).fit(bits(), 2)
    assert backend.calls == ["epoch", "store", "load", "epoch", "store"]
    assert reader.seen == [4, 8]


def test_a_stop_within_an_epoch_stores_and_continues_there(monkeypatch):
    class Stop(Callback):
        def on_epoch_begin(self, trainer):
            trainer.stop = trainer.epoch == 1 and trainer.state.batch == 0

    backend = chosen(monkeypatch, Recorder(stops=True))
    run = Trainer(mvrbm((3, 3), (2, 2)), Recipe(batch_size=10), callbacks=[Stop()]).fit(bits(), 3)
    assert (run.epoch, run.state.batch, run.update) == (1, 1, 5)
    assert bool((run.machine.hidden.bias == 5).all())
    run.fit(bits(), 3)
    assert (run.epoch, run.state.batch, run.update) == (3, 0, 12)
    assert backend.calls.count("epoch") == 4


def test_a_loop_runs_several_states_with_their_orders():
    runs = [Trainer(mvrbm((3, 3), (2, 2)), Recipe(batch_size=10), seed=seed) for seed in (5, 6)]
    states = [run.state for run in runs]
    rngs = [run.order_rng for run in runs]
    backend = Recorder()
    loop = EpochLoop(backend, runs, [as_source(bits(), run.machine) for run in runs])
    loop.load()
    loop.run_epoch()
    assert not loop.stored
    loop.load()  # does nothing, because the backend is ahead of the states
    assert backend.calls == ["load", "epoch"]
    assert [state.batch for state in states] == [4, 4]
    assert torch.equal(backend.orders[0], torch.stack([rng.at_step(0).permutation(35) for rng in rngs]))
    loop.store()
    assert loop.stored
    assert loop.diverged == [False, False]


def runs_of_a_recorder(monkeypatch, backend, machines, n_epochs=3):
    """Return trainers whose machines `fit_together` trains with a recorder."""
    choice = BackendChoice("records its calls", lambda *run: None, lambda *run: backend, trains_groups=True)
    monkeypatch.setattr(choose, "BACKENDS", {"recorder": choice})
    return [Trainer(machine, Recipe(batch_size=10, n_epochs=n_epochs)) for machine in machines]


def test_several_runs_stop_together_within_an_epoch(monkeypatch):
    class Interrupted(Recorder):
        def epoch(self, states, orders, stopped):
            if "epoch" in self.calls:
                signal.raise_signal(signal.SIGINT)
            return super().epoch(states, orders, stopped)

    machines = [mvrbm((3, 3), (2, 2)) for _ in range(2)]
    trainers = runs_of_a_recorder(monkeypatch, Interrupted(stops=True), machines)
    with pytest.raises(KeyboardInterrupt):
        fit_together(trainers, [bits()] * 2)
    for trainer in trainers:
        assert (trainer.epoch, trainer.state.batch, trainer.update) == (1, 1, 5)
        assert (trainer.stop, trainer.interrupted, trainer.failed) == (True, True, False)
        assert bool((trainer.machine.hidden.bias == 5).all())


def test_several_runs_record_that_they_failed(monkeypatch):
    class Failing(Recorder):
        def epoch(self, states, orders, stopped):
            raise RuntimeError

    trainers = runs_of_a_recorder(monkeypatch, Failing(), [mvrbm((3, 3), (2, 2)) for _ in range(2)])
    with pytest.raises(RuntimeError):
        fit_together(trainers, [bits()] * 2)
    assert all(trainer.failed for trainer in trainers)


def test_a_run_whose_energy_becomes_unbounded_does_not_disturb_the_others(monkeypatch):
    class Growing(Recorder):
        """Makes the coupling of the first machine too large once, as training that diverges does."""

        def store(self, states):
            with torch.no_grad():
                states[0].machine.links["visible"].factors[0].fill_(0.01 if "store" in self.calls else 100.0)
            return super().store(states)

    machines = [BoltzmannMachine(Gaussian((3, 3)), Gaussian((2, 2)), Kronecker(), seed=seed) for seed in (0, 1)]
    trainers = runs_of_a_recorder(monkeypatch, Growing(), machines, n_epochs=2)
    outcomes = fit_together(trainers, [bits()] * 2)
    assert [outcome.diverged for outcome in outcomes] == [trainer.failed for trainer in trainers] == [True, False]
    assert [trainer.epoch for trainer in trainers] == [2, 2]


# -- several trainers -------------------------------------------------------------------------------------


def test_trainers_without_common_kernels_train_alone():
    """Each ends like a trainer that trains by itself, and one that diverges does not disturb the others."""
    x = bits()
    seeds = (0, 1)
    trainers = [Trainer(mvrbm((3, 3), (2, 2)), Recipe(batch_size=10, n_epochs=3), seed=seed) for seed in seeds]
    hopeless = Recipe(batch_size=10, n_epochs=3, learning_rate=1e9)
    trainers.insert(1, Trainer(mvrbm((3, 3), (2, 2)), hopeless))
    outcomes = fit_together(trainers, [x] * 3)
    assert [outcome.diverged for outcome in outcomes] == [False, True, False]
    assert all(outcome.seconds > 0 for outcome in outcomes)
    for seed, together in zip(seeds, trainers[::2], strict=True):
        alone = Trainer(mvrbm((3, 3), (2, 2)), Recipe(batch_size=10, n_epochs=3), seed=seed).fit(x)
        for name, value in alone.machine.state_dict().items():
            assert torch.equal(together.machine.state_dict()[name], value)


@pytest.fixture
def kernels(request):
    """Let kernels train machines together, in Triton's interpreter if there is no GPU."""
    pytest.importorskip("triton")
    request.getfixturevalue("interpreted")


def assert_trained(trainer, update, epoch):
    assert (trainer.update, trainer.epoch, trainer.state.batch) == (update, epoch, 0)


@pytest.mark.slow
@pytest.mark.usefixtures("kernels")
def test_trainers_at_different_epochs_each_finish_their_run():
    x = bits(12)
    recipe = Recipe(batch_size=6, n_epochs=2)
    trainers = [Trainer(mvrbm((3, 3), (2, 2)), recipe, seed=seed) for seed in range(3)]
    trainers[0].fit(x)
    finished = {name: value.clone() for name, value in trainers[0].machine.state_dict().items()}
    trainers[1].fit(x, 1)
    outcomes = fit_together(trainers, [x] * 3)
    assert [outcome.diverged for outcome in outcomes] == [False] * 3
    for trainer in trainers:
        assert_trained(trainer, update=4, epoch=2)
    for name, value in trainers[0].machine.state_dict().items():
        assert torch.equal(value, finished[name])
    for seed in (1, 2):
        alone = Trainer(mvrbm((3, 3), (2, 2)), recipe, seed=seed).fit(x)
        for name, value in alone.machine.state_dict().items():
            torch.testing.assert_close(trainers[seed].machine.state_dict()[name], value, rtol=2e-3, atol=2e-4)


@pytest.mark.usefixtures("kernels")
def test_runs_whose_prepared_state_the_kernels_do_not_support_train_alone():
    x = np.random.default_rng(0).random((12, 3, 2, 2)).round().astype(np.float32)
    recipe = Recipe(batch_size=6, n_epochs=2, centering="full")

    def trainers():
        machines = [BoltzmannMachine(Bernoulli((3, 2, 2)), Bernoulli((2, 2, 2)), Kronecker()) for _ in range(2)]
        return [Trainer(machine, recipe, seed=seed) for seed, machine in enumerate(machines)]

    together = trainers()
    assert [outcome.diverged for outcome in fit_together(together, [x] * 2)] == [False] * 2
    for mine, alone in zip(together, trainers(), strict=True):
        alone.fit(x)
        assert_trained(mine, update=4, epoch=2)
        for name, value in alone.machine.state_dict().items():
            assert torch.equal(mine.machine.state_dict()[name], value)


@pytest.mark.slow
@pytest.mark.usefixtures("kernels")
def test_linear_decay_ends_with_the_epochs_of_the_recipe():
    """An earlier call with another number of epochs does not change the plan."""
    x = bits(12)
    recipe = Recipe(batch_size=6, n_epochs=2, linear_decay=True, rate_decay=None)

    def trainers():
        runs = [Trainer(mvrbm((3, 3), (2, 2)), recipe, seed=seed) for seed in range(2)]
        for run in runs:
            run.fit(x, 1)
        return runs

    together = trainers()
    fit_together(together, [x] * 2)
    for mine, alone in zip(together, trainers(), strict=True):
        alone.fit(x)
        for name, value in alone.machine.state_dict().items():
            torch.testing.assert_close(mine.machine.state_dict()[name], value, rtol=2e-3, atol=2e-4)
