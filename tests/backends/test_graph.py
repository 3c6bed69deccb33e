"""Updates as CUDA graphs against updates launch by launch; without a GPU their computation alone is compared."""

import copy
import dataclasses
import importlib.util
import pickle

import pytest
import torch

from mvrbm import BoltzmannMachine
from mvrbm.backends import expanded
from mvrbm.backends import graph as graphs
from mvrbm.backends.choose import BACKENDS, BackendChoice, choose_backend
from mvrbm.backends.cuda import per_sample
from mvrbm.backends.device_memory import too_large_reason
from mvrbm.backends.reference import ReferenceBackend
from mvrbm.couplings import CP, MPO, Dense, Kronecker
from mvrbm.data.sources import as_source
from mvrbm.training import CD, PCD, Callback, DivergenceError, Recipe, TemperedPCD, Trainer
from mvrbm.units import Bernoulli, Categorical, Gaussian, Rectified

ON_GPU = torch.cuda.is_available()
DEVICE = "cuda" if ON_GPU else "cpu"
DEFAULT = Recipe(batch_size=8)
MOVING = dataclasses.replace(DEFAULT, momentum=0.5, weight_decay=0.01)


def classic(hidden=Bernoulli):
    return BoltzmannMachine(Bernoulli((5, 6)), hidden(7), Dense())


def with_label():
    layers = {"x": Gaussian((4, 5), learn_variance=True), "label": Categorical(3)}
    return BoltzmannMachine(layers, Bernoulli((3, 2)), {"x": Kronecker(2), "label": Dense()})


def adam(groups):
    return torch.optim.Adam(groups, lr=0.01)


# What is trained, how, and by which optimizer.
CASES = {
    "dense": (classic, DEFAULT, None),
    "dense, momentum and decay": (classic, MOVING, None),
    "dense, CD-3": (classic, dataclasses.replace(DEFAULT, negative=CD(3)), None),
    "dense, PCD": (classic, dataclasses.replace(MOVING, negative=PCD(11, 2)), None),
    "dense, tempered": (classic, dataclasses.replace(MOVING, negative=TemperedPCD(5, 4)), None),
    "tempered, 3 steps and Adam": (with_label, dataclasses.replace(DEFAULT, negative=TemperedPCD(5, 3, 3)), adam),
    "dense, hidden layer centered": (classic, dataclasses.replace(DEFAULT, centering="full"), None),
    "rectified": (lambda: classic(Rectified), DEFAULT, None),
    "two layers, a variance learned": (with_label, MOVING, None),
    "order 3": (lambda: BoltzmannMachine(Bernoulli((3, 4, 2)), Bernoulli((2, 3, 2)), Kronecker(2)), DEFAULT, None),
    "CP": (lambda: BoltzmannMachine(Bernoulli((3, 4)), Bernoulli(5), CP(3)), DEFAULT, None),
    "MPO": (lambda: BoltzmannMachine(Bernoulli((3, 4)), Bernoulli((2, 3)), MPO(2)), DEFAULT, None),
    "shared bias": (
        lambda: BoltzmannMachine(Bernoulli((3, 4), bias_shape=(1, 4)), Bernoulli((2, 3)), Kronecker(1)), DEFAULT, None,
    ),
    "Adam": (classic, DEFAULT, adam),
}  # fmt: skip


def data_for(machine, n):
    generator = torch.Generator().manual_seed(3)
    data = {}
    for name, unit in machine.layers.items():
        gray = torch.rand((n, *unit.shape), generator=generator)
        if isinstance(unit, Categorical):
            data[name] = torch.nn.functional.one_hot(gray.argmax(-1), unit.shape[-1])
        else:
            data[name] = 5 + 3 * gray if unit.gaussian else (gray * 255).to(torch.uint8)
    return data


def build_plain(settings, states, sources, threads):
    return ReferenceBackend(settings[0])


def build_exact(settings, states, sources, threads):
    return graphs.GraphBackend(settings[0], states[0], sources[0], exact=True)


@pytest.fixture(autouse=True)
def backends(monkeypatch):
    """Let trainers use graphs on a CPU, graphs without tensor cores, and updates without graphs, by name."""
    supported = graphs.not_capturable_reason
    monkeypatch.setitem(BACKENDS, "graph", dataclasses.replace(BACKENDS["graph"], unsupported_reason=supported))
    monkeypatch.setitem(BACKENDS, "exact graph", BackendChoice("without tensor cores", supported, build_exact))
    monkeypatch.setitem(BACKENDS, "plain", BackendChoice("without graphs", lambda *run: None, build_plain))


def change_graphs(monkeypatch, change):
    """Call a function with every new graph backend and its state."""
    build = BACKENDS["graph"].build

    def changed(settings, states, sources, threads):
        backend = build(settings, states, sources, threads)
        change(backend, states[0])
        return backend

    monkeypatch.setitem(BACKENDS, "graph", dataclasses.replace(BACKENDS["graph"], build=changed))


def train(backend, case, n_epochs=3, prepare=lambda data: {}, dtype=torch.float64):
    make, recipe, optimizer = case
    machine = make().to(DEVICE, dtype)
    trainer = Trainer(machine, recipe, backend=backend, optimizer=optimizer, seed=5, missing_steps=2)
    data = data_for(machine, 36)  # batches of 8, 8, 8, 8 and 4
    return trainer.fit(data, n_epochs, initialize=True, **prepare(data))


def assert_same(left, right, **tolerance):
    tolerance = tolerance or {"rtol": 1e-9, "atol": 1e-11}
    assert (left.epoch, left.update, left.state.batch) == (right.epoch, right.update, right.state.batch)
    for key, value in right.machine.state_dict().items():
        torch.testing.assert_close(left.machine.state_dict()[key], value, **tolerance)
    for kept in ("chains", "momenta"):
        mine, other = getattr(left.state, kept), getattr(right.state, kept)
        assert set(mine) == set(other)
        for key, value in other.items():
            torch.testing.assert_close(mine[key], value, **tolerance)
    assert set(right.state.momenta) == (set(right.state.learned) if right.optimizer is None else set())


@pytest.mark.parametrize("name", CASES)
def test_graphs_train_as_updates_launch_by_launch_do(name):
    graphed, plain = train("graph", CASES[name]), train("plain", CASES[name])
    assert_same(graphed, plain)
    start = CASES[name][0]().to(DEVICE, torch.float64).state_dict()
    moved = [float((value - start[key]).abs().max()) for key, value in graphed.machine.state_dict().items()]
    assert max(moved) > 1e-3


@pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="Triton is not installed")
@pytest.mark.parametrize(
    "name", ["dense, momentum and decay", "dense, PCD", "order 3", "two layers, a variance learned"]
)
@pytest.mark.usefixtures("interpreted")
def test_steps_in_two_launches_are_those_of_the_rule(name):
    make, recipe, _ = CASES[name]
    recipe = dataclasses.replace(recipe, linear_decay=True, rate_decay=7, centering="none")
    plain, graphed = (train(backend, (make, recipe, None), dtype=torch.float32) for backend in ("plain", "exact graph"))
    assert graphed.kept_backend._fused is not None
    assert_same(graphed, plain, rtol=2e-3, atol=1e-5)


@pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="Triton is not installed")
@pytest.mark.usefixtures("interpreted")
def test_steps_in_two_launches_stop_at_the_first_number_that_is_not_finite():
    machine = classic().to(DEVICE)
    steep = dataclasses.replace(DEFAULT, learning_rate=1e15, weight_decay=1.0, normalized=False, balance=False)
    trainer = Trainer(machine, steep, backend="graph", seed=5)
    with pytest.raises(DivergenceError):
        trainer.fit(data_for(machine, 36), 3, initialize=True)
    assert 0 < trainer.update < 15
    assert all(bool(torch.isfinite(p).all()) for p in machine.parameters())


class Replayed:
    """Stands for a graph without a GPU: it computes everything, but what Python counts stays as it was."""

    def __init__(self, work, state):
        self.work, self.state = work, state

    def replay(self):
        before = dict(self.state.chains)
        self.work()
        self.state.chains.update(before)


@pytest.mark.skipif(ON_GPU, reason="a GPU has graphs of its own")
@pytest.mark.parametrize("name", ["dense, tempered", "tempered, 3 steps and Adam", "dense, PCD"])
def test_replays_take_turns_as_updates_do(name, monkeypatch):
    captured = []

    def replay(backend, state):
        monkeypatch.setattr(backend, "_capturing", True)
        monkeypatch.setattr(graphs, "capture", lambda work, what: Replayed(work, state))
        captured.append(backend)

    change_graphs(monkeypatch, replay)
    assert_same(train("graph", CASES[name]), train("plain", CASES[name]))
    (backend,) = captured
    # A short batch comes only once at one of the swap parities.
    assert backend.n_captured == (3 if "tempered" in name else 2)


@pytest.mark.parametrize("name", ["two layers, a variance learned", "order 3", "CP", "MPO", "shared bias"])
def test_large_couplings_are_not_formed_and_train_alike(name, monkeypatch):
    monkeypatch.setattr(expanded, "worth_expanding", lambda link, n: False)
    assert_same(train("graph", CASES[name]), train("plain", CASES[name]))


def masked(data):
    """Some entries of the images, and all labels, are known."""
    known = {"x": torch.rand(data["x"].shape, generator=torch.Generator().manual_seed(1)) < 0.7}
    data["x"][~known["x"]] = torch.nan
    return {"mask": known}


def with_nan(data):
    del masked(data)["mask"]
    return {"nan_is_missing": True}


def labels_masked(data):
    return {"mask": {"label": (torch.arange(36) % 3 > 0)[:, None].expand(36, 3)}}


@pytest.mark.parametrize("prepare", [masked, with_nan, labels_masked])
def test_missing_entries_are_drawn_as_launch_by_launch(prepare):
    recipe = dataclasses.replace(DEFAULT, negative=PCD(11), centering="full")
    graphed, plain = (train(backend, (with_label, recipe, None), prepare=prepare) for backend in ("graph", "plain"))
    assert_same(graphed, plain)
    assert all(bool(torch.isfinite(p).all()) for p in graphed.machine.parameters())


def test_mask_that_divides_a_one_hot_row_is_an_error():
    def divided(data):
        return {"mask": {"label": torch.tensor([True, False, True]).expand(36, 3)}}

    with pytest.raises(ValueError, match="one-hot row"):
        train("graph", (with_label, DEFAULT, None), prepare=divided)


# -- the rule for full matrices ---------------------------------------------------------------------------


def test_small_couplings_are_formed_and_large_ones_where_it_saves_products():
    def worth(n, visible, hidden, coupling):
        return expanded.worth_expanding(coupling.connect(visible, hidden), n)

    assert worth(512, (32, 32), (32, 32), Kronecker(1))  # 2**20 entries, 2**29 products
    assert not worth(513, (32, 32), (32, 32), Kronecker(1))
    assert not worth(1, (32, 33), (32, 32), Kronecker(1))
    # 32 * 33 * 32 * R products twice, for 32 * 32 * 32 * 33 entries
    assert worth(10**6, (32, 33), (32, 32), Kronecker(17))
    assert not worth(10**6, (32, 33), (32, 32), Kronecker(15))
    assert not worth(1, (4, 4), (4, 4), Dense())


def test_memory_bounds_what_is_expanded():
    coupling = Kronecker(200).connect((64, 64), (64, 128))  # 2**25 entries
    assert expanded.worth_expanding(coupling, 1)
    assert not expanded.worth_expanding(Kronecker(400).connect((96, 96), (96, 96)), 1)  # more than 2**26


# -- tensor cores, and graphs that are used again -----------------------------------------------------------


def test_epochs_allow_tensor_cores_unless_they_have_to_be_exact():
    seen = []

    class Looking(CD):
        def draw(self, *arguments):
            seen.append(torch.backends.cuda.matmul.allow_tf32)
            return super().draw(*arguments)

    recipe = dataclasses.replace(DEFAULT, negative=Looking())
    for exact in (False, True):
        machine = classic().to(DEVICE)
        trainer = Trainer(machine, recipe)
        source = trainer.prepare(data_for(machine, 8), initialize=True)
        backend = graphs.GraphBackend(trainer.update_settings(), trainer.state, source, exact=exact)
        backend.epoch([trainer.state], torch.arange(8)[None], lambda: False)
    assert seen == [True, False]


@pytest.fixture
def n_built(monkeypatch):
    """Return a function that counts the graph backends of a trainer so far."""
    built = []
    change_graphs(monkeypatch, lambda backend, state: built.append(state))
    return lambda trainer: sum(state is trainer.state for state in built)


@pytest.mark.parametrize(
    "name", ["dense, PCD", "dense, hidden layer centered", "Adam", "two layers, a variance learned"]
)
def test_another_fit_uses_the_backend_again(name, n_built):
    make, recipe, optimizer = CASES[name]
    trainers = []
    for backend in ("graph", "plain"):
        machine = make().to(DEVICE, torch.float64)
        trainer = Trainer(machine, recipe, backend=backend, optimizer=optimizer, seed=5)
        first, second = data_for(machine, 36), {key: array.flip(0) for key, array in data_for(machine, 36).items()}
        trainer.fit(first, 2, initialize=True)
        with torch.no_grad():
            machine.hidden.bias.add_(0.1)
        trainer.state.update += 100  # the learning rate decays with it
        trainers.append(trainer.fit(second, 4))
    assert_same(*trainers)
    assert n_built(trainers[0]) == 1


def test_the_backend_of_one_trainer_is_kept_at_a_time(n_built):
    def trained():
        machine = classic().to(DEVICE)
        return Trainer(machine, DEFAULT, backend="graph", seed=5).fit(data_for(machine, 36), 1, initialize=True)

    first, second = trained(), trained()
    assert first.kept_backend is None
    assert second.kept_backend is not None
    second.fit(data_for(second.machine, 36), 2)
    first.fit(data_for(first.machine, 36), 2)
    assert (n_built(first), n_built(second)) == (2, 1)
    assert second.kept_backend is None


def test_a_new_backend_is_built_where_the_old_one_does_not_fit(n_built):
    make, recipe, _ = CASES["dense, PCD"]
    machine = make().to(DEVICE)
    data = data_for(machine, 36)
    trainer = Trainer(machine, recipe, backend="graph", seed=5).fit(data, 1, initialize=True)
    trainer.fit({"visible": data["visible"][:30]}, 2)
    assert n_built(trainer) == 2
    trainer.fit({"visible": data["visible"][:30].float() / 255}, 3)
    assert n_built(trainer) == 3
    machine.hidden.bias.data = machine.hidden.bias.data.clone()
    trainer.fit({"visible": data["visible"][:30].float() / 255}, 4)
    assert n_built(trainer) == 4
    trainer.fit({"visible": data["visible"][:30].float() / 255}, 5, mask=torch.ones(30, 5, 6, dtype=torch.bool))
    assert n_built(trainer) == 5
    again = pickle.loads(pickle.dumps(trainer))  # graphs cannot be copied
    again.fit({"visible": data["visible"][:30].float() / 255}, 6)
    assert n_built(again) == 1


def test_training_is_taken_up_where_it_was_left(tmp_path):
    case = CASES["dense, PCD"]
    whole = train("graph", case)
    make, recipe, _ = case
    machine = make().to(DEVICE, torch.float64)
    Trainer(machine, recipe, backend="graph", seed=5).fit(data_for(machine, 36), 2, initialize=True).save(tmp_path)
    machine = make().to(DEVICE, torch.float64)
    rest = Trainer(machine, recipe, backend="graph", seed=5)
    assert rest.resume(tmp_path)
    rest.fit(data_for(machine, 36), 3, initialize=True)
    assert_same(rest, whole)


def test_divergence_leaves_the_machine_as_it_was_before():
    def fails(backend):
        machine = classic().to(DEVICE, torch.float64)
        steep = dataclasses.replace(DEFAULT, learning_rate=1e100, weight_decay=1.0, normalized=False, balance=False)
        trainer = Trainer(machine, steep, backend=backend, seed=5)
        with pytest.raises(DivergenceError) as error:
            trainer.fit(data_for(machine, 36), 3, initialize=True)
        return trainer, error.value

    (graphed, message), (plain, _) = fails("graph"), fails("plain")
    assert f"update {plain.update + 1}:" in str(message)
    assert graphed.update == plain.update
    for p, q in zip(graphed.machine.parameters(), plain.machine.parameters(), strict=True):
        torch.testing.assert_close(p, q, rtol=1e-9, atol=0)


def test_stop_is_heard_between_updates():
    class Stop(Callback):
        def on_epoch_begin(self, trainer):
            trainer.stop = trainer.epoch == 1

    machine = classic().to(DEVICE)
    trainer = Trainer(machine, DEFAULT, backend="graph", callbacks=[Stop()], seed=5).fit(
        data_for(machine, 36), 3, initialize=True
    )
    assert (trainer.epoch, trainer.state.batch, trainer.update) == (1, 1, 6)


class Reading(CD):
    """Chains that read numbers back."""

    capturable = False


class EveryBatch(Callback):
    every_batch = True


UNSUPPORTED = {
    "gradient": (DEFAULT, {"backend": "autograd"}, {}, "by autograd"),
    "chains": (dataclasses.replace(DEFAULT, negative=Reading()), {}, {}, "its chains are Reading"),
    "callback": (DEFAULT, {"callbacks": [EveryBatch()]}, {}, "a callback needs every batch"),
}


@pytest.mark.parametrize("name", UNSUPPORTED)
def test_graphs_report_what_they_cannot_do(name):
    recipe, how, with_data, reason = UNSUPPORTED[name]
    machine = classic().to(DEVICE)
    trainer = Trainer(machine, recipe, **how)
    source = as_source(data_for(machine, 36), machine, **with_data)
    assert reason in graphs.not_capturable_reason(trainer.update_settings(), trainer.state, source)


def test_data_that_would_fill_the_device_stays_where_it_is(monkeypatch):
    machine = classic().to(DEVICE)
    source = as_source(data_for(machine, 36), machine)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (10**9, 36 * 30 * 2 - 1))
    assert "more than half" in too_large_reason(source, torch.device("cuda"))
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (10**9, 36 * 30 * 2))
    assert too_large_reason(source, torch.device("cuda")) is None


@pytest.mark.skipif(not ON_GPU, reason="needs a GPU")
def test_a_gpu_takes_graphs_where_there_are_no_kernels_and_captures_them():
    machine = BoltzmannMachine({"x": Bernoulli((5, 6))}, Bernoulli(7), {"x": CP(3)}).to(DEVICE)
    source = as_source(data_for(machine, 36), machine)
    trainer = Trainer(machine, DEFAULT)
    settings, state = trainer.update_settings(), trainer.state
    assert per_sample.unsupported_reason(settings, state, source) is not None
    assert graphs.unsupported_reason(settings, state, source) is None
    trainer.prepare(source, initialize=True)
    backend = choose_backend([trainer.update_settings()], [state], [source], 1)
    assert isinstance(backend, graphs.GraphBackend)
    for _ in range(2):
        assert backend.epoch([state], trainer.order_rng.permutation(36, DEVICE)[None], lambda: False) == 5
    assert backend.store([state]) == [False]
    assert trainer.update == 10
    assert backend.n_captured == 2  # full and short batches


@pytest.mark.skipif(not ON_GPU, reason="needs a GPU")
def test_what_cannot_be_captured_is_made_launch_by_launch():
    class Looking(CD):
        def draw(self, machine, batch, *others):
            float(machine.hidden.bias.sum())  # waits for the GPU, which a capture forbids
            return super().draw(machine, batch, *others)

    make, recipe, _ = CASES["dense"]
    with pytest.warns(RuntimeWarning, match="without CUDA graphs"):
        graphed = train("graph", (make, dataclasses.replace(recipe, negative=Looking()), None))
    assert_same(graphed, train("plain", copy.copy(CASES["dense"])))
