"""What watches a training: when it is told, what it measures, and what it writes."""

import csv
import io
import itertools
import re

import numpy as np
import pandas as pd
import pytest
import torch

from mvrbm import MVRBM, Bernoulli, BoltzmannMachine, Categorical, Counts, DeepMVRBM, Dense, Gaussian, Rectified
from mvrbm.errors import InputError
from mvrbm.likelihood import log_likelihood
from mvrbm.models import mvrbm
from mvrbm.progress import remaining_time
from mvrbm.training import (
    Callback,
    Checkpoint,
    CSVLog,
    EarlyStopping,
    EpochLines,
    Monitor,
    ProgressBar,
    Recipe,
    TensorBoard,
    Trainer,
)


@pytest.fixture(autouse=True)
def _without_waiting_for_the_disk(monkeypatch):
    monkeypatch.setattr("mvrbm.saving.os.fsync", lambda descriptor: None)


RECIPE = Recipe(batch_size=10)


def bits(n=25, shape=(3, 3), seed=0):
    return (np.random.default_rng(seed).random((n, *shape)) < 0.4).astype(np.float32)


class Diary(Callback):
    """Writes down what it is told."""

    def __init__(self, name="", diary=None):
        self.name, self.diary = name, [] if diary is None else diary

    def __getattribute__(self, hook):
        if not hook.startswith("on_"):
            return super().__getattribute__(hook)
        return lambda trainer, **details: self.diary.append((self.name, hook, trainer.epoch, trainer.update, *details))


def test_hooks_come_in_order():
    diary = Diary()
    trainer = Trainer(mvrbm((3, 3), (2, 2)), RECIPE, callbacks=[diary])
    trainer.fit(bits(), 2, initialize=True)
    batch = [("on_batch_begin", "batch"), ("on_batch_end", "batch")]
    one_pass = [("on_epoch_begin",), *batch * 3, ("on_epoch_end",)]
    assert [(hook, *rest) for _, hook, _, _, *rest in diary.diary] == [
        ("on_train_begin",),
        *one_pass * 2,
        ("on_train_end",),
    ]
    ends = [(epoch, update) for _, hook, epoch, update, *_ in diary.diary if hook == "on_batch_end"]
    assert ends == [(0, 1), (0, 2), (0, 3), (1, 4), (1, 5), (1, 6)]
    passes = [(epoch, update) for _, hook, epoch, update, *_ in diary.diary if hook == "on_epoch_end"]
    assert passes == [(1, 3), (2, 6)]


def test_callbacks_are_told_in_the_order_given_checkpoints_last(tmp_path):
    told = []

    class Saved(Checkpoint):
        def on_epoch_end(self, trainer):
            told.append("checkpoint")

    callbacks = [Saved(tmp_path), Diary("first", told), Diary("second", told)]
    Trainer(mvrbm((3, 3), (2, 2)), Recipe(batch_size=25), callbacks=callbacks).fit(bits(), 1, initialize=True)
    ends = [
        entry if isinstance(entry, str) else entry[0]
        for entry in told
        if "on_epoch_end" in entry or entry == "checkpoint"
    ]
    assert ends == ["first", "second", "checkpoint"]


def test_end_is_told_when_training_breaks():
    diary = Diary()

    class Breaks(Callback):
        def on_batch_end(self, trainer, batch):
            raise RuntimeError("broken")

    with pytest.raises(RuntimeError, match="broken"):
        Trainer(mvrbm((3, 3), (2, 2)), callbacks=[diary, Breaks()]).fit(bits(), 1, initialize=True)
    assert diary.diary[-1][1] == "on_train_end"


def test_logged_rows_reach_the_history_and_the_callbacks():
    seen = []

    class Reader(Callback):
        def on_log(self, trainer, row):
            seen.append(row)

    class Writer(Callback):
        def on_epoch_end(self, trainer):
            trainer.log({"answer": 42.0})

    trainer = Trainer(mvrbm((3, 3), (2, 2)), RECIPE, callbacks=[Writer(), Reader()]).fit(bits(), 2, initialize=True)
    assert (
        trainer.history
        == seen
        == [{"epoch": 1, "update": 3, "answer": 42.0}, {"epoch": 2, "update": 6, "answer": 42.0}]
    )


def test_nothing_is_measured_without_callbacks(monkeypatch):
    """The same parameters with every measurement broken: nothing of them is touched."""

    def broken(*args, **kwargs):
        raise AssertionError("measured")

    expected = Trainer(mvrbm((3, 3), (2, 2)), RECIPE).fit(bits(), 2, initialize=True).machine.state_dict()
    monkeypatch.setattr("mvrbm.training.callbacks.mean_pseudo_log_likelihood", broken)
    monkeypatch.setattr("mvrbm.training.callbacks.mean_field", broken)
    monkeypatch.setattr(BoltzmannMachine, "free_energy", broken)
    machine = mvrbm((3, 3), (2, 2))
    trainer = Trainer(machine, RECIPE).fit(bits(), 2, initialize=True)
    assert trainer.history == []
    assert all(torch.equal(machine.state_dict()[name], value) for name, value in expected.items())


# -- Monitor ----------------------------------------------------------------------------------------------


def sigmoid(m):
    return 1 / (1 + np.exp(-m))


def test_monitor_measures_what_it_says():
    """All metrics of a small MVRBM by plain NumPy, the pseudo-likelihood by flipping one pixel at a time."""
    x, held_out = bits(30), bits(20, seed=1)
    machine = mvrbm((3, 3), (4, 4)).double()
    monitor = Monitor(x, held_out, pseudo_sites=9)
    trainer = Trainer(machine, RECIPE, callbacks=[monitor]).fit(x, 2, initialize=True)
    with torch.no_grad():
        machine.hidden.bias[0, 0], machine.hidden.bias[1, :2] = -50, 50
    row = monitor.measure(trainer)
    U, V = (factor[0].detach().numpy() for factor in machine.links["visible"].factors)
    B, C = machine.layers["visible"].bias.detach().numpy(), machine.hidden.bias.detach().numpy()

    def free_energy(X):
        return -(X * B).sum((1, 2)) - np.log1p(np.exp(U @ X @ V.T + C)).sum((1, 2))

    def reconstruction(X):
        return ((sigmoid(U.T @ sigmoid(U @ X @ V.T + C) @ V + B) - X) ** 2).sum((1, 2)).mean()

    x, held_out = x.astype(float), held_out.astype(float)
    pseudo = np.zeros(len(x))
    for i, j in itertools.product(range(3), range(3)):
        flipped = x.copy()
        flipped[:, i, j] = 1 - flipped[:, i, j]
        pseudo += np.log(sigmoid(free_energy(flipped) - free_energy(x)))
    assert row["reconstruction_error"] == pytest.approx(reconstruction(x), rel=1e-9)
    assert row["validation_error"] == pytest.approx(reconstruction(held_out), rel=1e-9)
    assert row["pseudo_log_likelihood"] == pytest.approx(pseudo.mean(), rel=1e-9)
    assert row["free_energy_gap"] == pytest.approx(free_energy(held_out).mean() - free_energy(x).mean(), abs=1e-9)
    assert row["dead"] == 1 / 16
    assert row["saturated"] == 2 / 16
    assert row["seconds"] >= 0


def test_monitor_measures_the_likelihood_from_both_sides():
    x = bits(200)
    monitor = Monitor(x, pseudo_sites=0, annealing_steps=200)
    trainer = Trainer(mvrbm((3, 3), (2, 2)), RECIPE, callbacks=[monitor]).fit(x, 2, initialize=True)
    row, exact = trainer.history[-1], float(log_likelihood(trainer.machine, torch.from_numpy(x)).mean())
    more = (row["log_likelihood_upper"] - row["log_likelihood_lower"]) / 2  # twice the errors: a margin for chance
    assert row["log_likelihood_lower"] - more < exact < row["log_likelihood_upper"] + more
    assert row["log_likelihood_lower"] < row["log_likelihood"] < row["log_likelihood_upper"]
    assert row["log_likelihood"] == pytest.approx(exact, abs=0.05)


def test_monitor_measures_when_it_is_told_to():
    x = bits()
    after_passes = Trainer(mvrbm((3, 3), (2, 2)), RECIPE, callbacks=[Monitor(x)]).fit(x, 3, initialize=True)
    assert [(row["epoch"], row["update"]) for row in after_passes.history] == [(1, 3), (2, 6), (3, 9)]
    every_two = Trainer(mvrbm((3, 3), (2, 2)), RECIPE, callbacks=[Monitor(x, every=2, pseudo_sites=0)]).fit(
        x, 2, initialize=True
    )
    assert [row["update"] for row in every_two.history] == [2, 4, 6]
    assert "pseudo_log_likelihood" not in every_two.history[0]
    assert "validation_error" not in every_two.history[0]
    with pytest.raises(ValueError, match="every must be a whole number of at least 1"):
        Monitor(x, every=0)


def test_monitoring_does_not_change_the_training():
    x = bits()
    plain, watched = mvrbm((3, 3), (2, 2)), mvrbm((3, 3), (2, 2))
    Trainer(plain, RECIPE).fit(x, 3, initialize=True)
    Trainer(watched, RECIPE, callbacks=[Monitor(x, bits(9, seed=2), every=1)]).fit(x, 3, initialize=True)
    assert all(torch.equal(watched.state_dict()[name], value) for name, value in plain.state_dict().items())


def test_monitor_takes_other_layers_and_bytes():
    rng = np.random.default_rng(0)
    data = {"gray": rng.integers(0, 256, (20, 4), dtype=np.uint8), "word": np.eye(3)[rng.integers(3, size=20)]}
    layers = {"gray": Gaussian(4), "word": Categorical(3)}
    machine = BoltzmannMachine(layers, Gaussian(2), {"gray": Dense(), "word": Dense()})
    trainer = Trainer(machine, RECIPE, callbacks=[Monitor(data, data)]).fit(data, 2, initialize=True)
    row = trainer.history[-1]
    assert all(np.isfinite(value) for value in row.values())
    assert "dead" not in row  # real hidden units have no ends
    assert row["free_energy_gap"] == pytest.approx(0, abs=1e-3)


@pytest.mark.parametrize("units", ["rectified", "counts"])
def test_monitor_omits_metrics_that_the_units_do_not_define(units):
    x = bits(30)
    visible, hidden = (Bernoulli((3, 3)), Rectified(2)) if units == "rectified" else (Counts((3, 3)), Bernoulli(2))
    machine = BoltzmannMachine(visible, hidden, Dense())
    row = Trainer(machine, RECIPE, callbacks=[Monitor(x, x)]).fit(x, 1, initialize=True).history[-1]
    assert "validation_error" in row
    assert "pseudo_log_likelihood" not in row
    assert ("free_energy_gap" in row) == (units == "counts")
    for requested in ({"pseudo_sites": 5}, {"pseudo_sites": 0, "annealing_steps": 10}):
        trainer = Trainer(machine, RECIPE, callbacks=[Monitor(x, **requested)])
        with pytest.raises(ValueError, match=r"have no exact distribution|would sum over|have no common distribution"):
            trainer.fit(x, 1)
        assert trainer.update == 0  # it is found out before the training


# -- EarlyStopping ----------------------------------------------------------------------------------------


class Scripted(Callback):
    """Logs the next of some values after every pass."""

    def __init__(self, values, name="validation_error"):
        self.values, self.name = values, name

    def on_epoch_end(self, trainer):
        trainer.log({self.name: self.values[trainer.epoch - 1]})


@pytest.mark.parametrize(
    ("values", "patience", "larger", "stops_after"),
    [
        ([5, 4, 3, 2, 1, 0], 1, False, 6),
        ([5, 4, 4, 3, 3, 3], 1, False, 3),
        ([5, 4, 4, 3, 3, 3], 2, False, 6),
        ([5, 6, 7, 1, 1, 1], 3, False, 6),
        ([5, 6, 7, 8, 1, 1], 3, False, 4),
        ([1, 2, 3, 2, 2, 9], 2, True, 5),
    ],
)
def test_early_stopping_waits_as_long_as_it_should(values, patience, larger, stops_after):
    stopping = EarlyStopping(patience=patience, larger_is_better=larger)
    trainer = Trainer(mvrbm((3, 3), (2, 2)), RECIPE, callbacks=[Scripted(values), stopping]).fit(
        bits(), 6, initialize=True
    )
    assert trainer.epoch == stops_after
    assert not trainer.interrupted
    trainer.fit(bits(), 6, initialize=True)
    assert trainer.epoch == stops_after  # it stays ended


class Parameters(Callback):
    """Keeps the parameters after every epoch."""

    def __init__(self):
        self.after = []

    def on_epoch_end(self, trainer):
        self.after.append([p.detach().clone() for p in trainer.machine.parameters()])


@pytest.mark.parametrize("backend", ["auto", "reference", "autograd"])
@pytest.mark.parametrize(
    ("values", "best", "stops_after"),
    [
        ([5, 3, 4, 4, 4, 4], 2, 4),  # stops early
        ([5, 6, 4, 3, 9, 9], 4, 6),  # reaches the last epoch
        ([5, 4, 3, 2, 1, 0], 6, 6),  # the last epoch is the best
    ],
)
def test_early_stopping_restores_the_best_parameters(backend, values, best, stops_after):
    seen = Parameters()
    stopping = EarlyStopping(patience=2, restore_best=True)
    trainer = Trainer(mvrbm((3, 3), (2, 2)), RECIPE, callbacks=[seen, stopping, Scripted(values)], backend=backend)
    trainer.fit(bits(), 6, initialize=True)
    assert trainer.epoch == stops_after
    for p, expected in zip(trainer.machine.parameters(), seen.after[best - 1], strict=True):
        assert torch.equal(p, expected)


def test_the_last_parameters_are_kept_for_resuming_when_the_best_are_restored(tmp_path):
    """A run that is resumed after its last epoch must continue as a run without a pause."""
    values = [5, 3, 4, 2, 3, 3]

    def run(folder, *epochs):
        for n_epochs in epochs:
            stopping = EarlyStopping(patience=5, restore_best=True)
            callbacks = [Scripted(values), stopping, Checkpoint(folder)]
            trainer = Trainer(mvrbm((3, 3), (2, 2)), RECIPE, callbacks=callbacks)
            trainer.resume(folder)
            trainer.fit(bits(), n_epochs, initialize=True)
        return trainer.machine

    for one, other in zip(
        run(tmp_path / "paused", 3, 6).parameters(), run(tmp_path / "whole", 6).parameters(), strict=True
    ):
        assert torch.equal(one, other)


def test_each_machine_of_a_stack_stops_separately():
    stack = DeepMVRBM(((2, 2), (2, 2)), n_epochs=6, random_state=0, device="cpu")
    stack.fit(bits(), callbacks=[Scripted([5, 4, 4, 3, 3, 3]), EarlyStopping(patience=1, restore_best=True)])
    assert [trainer.epoch for trainer in stack.trainers_] == [3, 3]


def test_early_stopping_names_what_is_logged():
    callbacks = [Monitor(bits(), pseudo_sites=0), EarlyStopping("loss")]
    with pytest.warns(UserWarning, match=r"monitors 'loss', but only \[.*'reconstruction_error'") as warned:
        Trainer(mvrbm((3, 3), (2, 2)), callbacks=callbacks).fit(bits(), 3, initialize=True)
    assert len(warned) == 1
    with pytest.raises(ValueError, match="patience"):
        EarlyStopping(patience=0)


def test_early_stopping_ignores_rows_without_its_metric():
    class Other(Callback):
        def on_epoch_end(self, trainer):
            trainer.log({"other": 0.0})

    scripted = Scripted([5, 4, 4, 4, 3, 3])
    trainer = Trainer(mvrbm((3, 3), (2, 2)), callbacks=[scripted, Other(), EarlyStopping(patience=2)])
    trainer.fit(bits(), 6)
    assert trainer.epoch == 4


# -- what a failing callback leaves behind ------------------------------------------------------------------


class Recorded(Callback):
    """Records its calls, and raises an error in one of its hooks."""

    def __init__(self, calls, name, fails=None):
        self.calls, self.name, self.fails = calls, name, fails

    def called(self, hook):
        self.calls.append(f"{self.name} {hook}")
        if hook == self.fails:
            raise RuntimeError(f"{self.name} {hook}")

    def on_train_begin(self, trainer):
        self.called("begins")

    def on_epoch_end(self, trainer):
        self.called("trains")

    def on_train_end(self, trainer):
        self.called("ends")


ALL = [f"{name} {hook}" for hook in ("begins", "trains", "ends") for name in "abc"]
LIFECYCLES = [
    ({"b": "begins"}, ["a begins", "b begins", "a ends"], "b begins"),
    ({"b": "trains"}, [call for call in ALL if call != "c trains"], "b trains"),
    ({"a": "ends"}, ALL, "a ends"),
    ({"b": "trains", "a": "ends"}, [call for call in ALL if call != "c trains"], "b trains"),
    ({"c": "ends", "b": "ends"}, ALL, "b ends"),
]


@pytest.mark.parametrize(("fails", "expected", "error"), LIFECYCLES)
def test_callbacks_that_began_end_even_if_others_fail(fails, expected, error):
    calls = []
    trainer = Trainer(mvrbm((3, 3), (2, 2)), callbacks=[Recorded(calls, name, fails.get(name)) for name in "abc"])
    with pytest.raises(RuntimeError, match=error):
        trainer.fit(bits(), 1)
    assert calls == expected
    assert trainer.failed


def test_a_checkpoint_folder_is_free_after_another_callback_failed_to_begin(tmp_path):
    trainer = Trainer(mvrbm((3, 3), (2, 2)), callbacks=[Checkpoint(tmp_path), EarlyStopping()])
    with pytest.raises(ValueError, match="add a Monitor"):
        trainer.fit(bits(), 1)
    again = Trainer(mvrbm((3, 3), (2, 2)), callbacks=[Checkpoint(tmp_path)]).fit(bits(), 1)
    assert again.epoch == 1


def test_the_last_checkpoint_is_saved_although_another_callback_fails_to_end(tmp_path):
    callbacks = [Recorded([], "a", "ends"), Checkpoint(tmp_path, every=1000)]
    trainer = Trainer(mvrbm((3, 3), (2, 2)), callbacks=callbacks)
    with pytest.raises(RuntimeError, match="a ends"):
        trainer.fit(bits(), 2)
    again = Trainer(mvrbm((3, 3), (2, 2)))
    assert again.resume(tmp_path)
    assert again.next_epoch == 2


# -- what is written --------------------------------------------------------------------------------------


def rows_of(path):
    with path.open(newline="", encoding="utf-8") as file:
        return list(csv.DictReader(file))


def as_text(history):
    return [{key: str(value) for key, value in row.items()} for row in history]


def test_csv_log_holds_the_history(tmp_path):
    path = tmp_path / "logs" / "run.csv"
    x = bits()
    trainer = Trainer(mvrbm((3, 3), (2, 2)), RECIPE, callbacks=[Monitor(x), CSVLog(path)]).fit(x, 3, initialize=True)
    assert rows_of(path) == as_text(trainer.history)
    assert list(rows_of(path)[0])[:2] == ["epoch", "update"]
    trainer.fit(x, 5, initialize=True)
    assert rows_of(path) == as_text(trainer.history)
    assert len(trainer.history) == 5


def test_csv_log_has_a_column_for_every_metric(tmp_path):
    class Sometimes(Callback):
        def on_epoch_end(self, trainer):
            trainer.log({"rare": 1.0} if trainer.epoch == 2 else {"usual": 0.5})

    path = tmp_path / "run.csv"
    trainer = Trainer(mvrbm((3, 3), (2, 2)), RECIPE, callbacks=[Sometimes(), CSVLog(path)]).fit(bits(), 3)
    rows = rows_of(path)
    assert [(row["usual"], row["rare"]) for row in rows] == [("0.5", ""), ("", "1.0"), ("0.5", "")]
    trainer.fit(bits(), 4)
    assert rows_of(path) == [*rows, {"epoch": "4", "update": str(trainer.update), "usual": "0.5", "rare": ""}]


@pytest.mark.parametrize("n_epochs", [0, 2])
def test_csv_log_replaces_the_file_of_another_run_only_on_request(tmp_path, n_epochs):
    """Neither a new run nor one that has logged metrics before."""
    path = tmp_path / "run.csv"
    x = bits()
    Trainer(mvrbm((3, 3), (2, 2)), RECIPE, callbacks=[Monitor(x), CSVLog(path)]).fit(x, 3, initialize=True)
    for content in (path.read_text(), "notes\n"):
        path.write_text(content)
        other = Trainer(mvrbm((3, 3), (2, 2)), RECIPE, callbacks=[Monitor(x)]).fit(x, n_epochs, initialize=True)
        other.callbacks = [Monitor(x), CSVLog(path)]
        with pytest.raises(InputError, match=r"run.csv already exists and is not the log of this training run"):
            other.fit(x, 4)
        assert path.read_text() == content
        other.callbacks = [Monitor(x), CSVLog(path, overwrite=True)]
        other.fit(x, 4)
        assert rows_of(path) == as_text(other.history)


def test_csv_log_of_a_stack_has_one_file_per_machine(tmp_path):
    class Half(Callback):
        def on_epoch_end(self, trainer):
            trainer.log({"half": trainer.update / 2})

    model = DeepMVRBM(((3, 2), (2, 2)), n_epochs=2, random_state=0, device="cpu", warm_start=True)
    for n_epochs in (2, 4):
        model.fit(bits(), callbacks=[Half(), CSVLog(tmp_path / "run.csv")])
        for number in range(2):
            assert rows_of(tmp_path / f"run-layer-{number}.csv") == as_text(model.trainers_[number].history)
            assert len(model.trainers_[number].history) == n_epochs


class KilledError(Exception):
    pass


class Killer(Callback):
    def __init__(self, at):
        self.at = at

    def on_batch_begin(self, trainer, batch):
        if trainer.update == self.at:
            raise KilledError


@pytest.mark.parametrize("monitor", [{}, {"every": 1}, {"every": 2}])
@pytest.mark.parametrize("every", [None, 2, 3])
def test_resumed_csv_log_has_every_row_once(tmp_path, every, monitor):
    """Checkpoint first, monitor after it: rows logged at the update of the checkpoint are neither lost nor doubled."""
    x = bits()

    def callbacks(folder, *more):
        watching = [Monitor(x, pseudo_sites=0, **monitor), CSVLog(folder / "run.csv")]
        return [Checkpoint(folder / "checkpoints", every=every), *watching, *more]

    whole = Trainer(mvrbm((3, 3), (2, 2)), RECIPE, callbacks=callbacks(tmp_path / "whole")).fit(x, 4, initialize=True)
    for at in (4, 6, 8):
        folder = tmp_path / f"{at}"
        with pytest.raises(KilledError):
            Trainer(mvrbm((3, 3), (2, 2)), RECIPE, callbacks=callbacks(folder, Killer(at))).fit(x, 4, initialize=True)
        again = Trainer(mvrbm((3, 3), (2, 2)), RECIPE, callbacks=callbacks(folder))
        assert again.resume(folder / "checkpoints")
        again.fit(x, 4, initialize=True)
        for rows, expected in [(rows_of(folder / "run.csv"), as_text(whole.history)), (again.history, whole.history)]:
            for row in (*rows, *expected):
                row.pop("seconds", None)
            assert rows == expected


def test_tensorboard_writes_the_scalars(tmp_path):
    accumulator = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    x = bits()
    trainer = Trainer(mvrbm((3, 3), (2, 2)), RECIPE, callbacks=[Monitor(x), TensorBoard(tmp_path)]).fit(
        x, 3, initialize=True
    )
    events = accumulator.EventAccumulator(str(tmp_path)).Reload()
    found = events.Scalars("reconstruction_error")
    assert [event.step for event in found] == [3, 6, 9]
    np.testing.assert_allclose(
        [event.value for event in found], [row["reconstruction_error"] for row in trainer.history], rtol=1e-6
    )


def test_progress_bar_writes_to_standard_error_alone(capfd):
    x = bits()
    trainer = Trainer(mvrbm((3, 3), (2, 2)), RECIPE, callbacks=[ProgressBar(), Monitor(x, pseudo_sites=0)])
    trainer.fit(x, 4, initialize=True)
    out, err = capfd.readouterr()
    assert out == ""
    assert "12/12" in err
    assert "100%" in err
    assert "reconstruction_error=" in err
    trainer.fit(x, 6, initialize=True)
    _, err = capfd.readouterr()
    assert re.search(r"12/18.*18/18", err, re.DOTALL)


def test_progress_bar_of_a_stream_has_no_total():
    class Stream(torch.utils.data.IterableDataset):
        def __iter__(self):
            return iter(torch.from_numpy(bits()))

    file = io.StringIO()
    Trainer(mvrbm((3, 3), (2, 2)), RECIPE, callbacks=[ProgressBar(file)]).fit(Stream(), 2, initialize=True)
    assert "6update" in file.getvalue()
    assert "%" not in file.getvalue()


def test_the_first_line_estimates_the_remaining_time(capfd, monkeypatch):
    clock = itertools.count(step=20)  # 20 seconds per epoch
    monkeypatch.setattr("mvrbm.training.callbacks.time.perf_counter", lambda: next(clock))
    trainer = Trainer(mvrbm((3, 3), (2, 2)), RECIPE, callbacks=[EpochLines()])
    trainer.fit(bits(), 3, initialize=True)
    assert capfd.readouterr().err == "epoch 1 of 3, about 40 s left\nepoch 2 of 3\nepoch 3 of 3\n"
    trainer.fit(bits(), 4)
    assert capfd.readouterr().err == "epoch 4 of 4\n"
    phrases = ["", ", about 10 s left", ", about 119 s left", ", about 2 min left", ", about 2 h left"]
    assert [remaining_time(seconds) for seconds in (9.9, 10, 119, 121, 7201)] == phrases


def test_no_callback_prints(capfd, tmp_path):
    x = bits()
    callbacks = [
        Monitor(x),
        CSVLog(tmp_path / "a.csv"),
        EarlyStopping("reconstruction_error"),
        Checkpoint(tmp_path / "c"),
    ]
    Trainer(mvrbm((3, 3), (2, 2)), RECIPE, callbacks=callbacks).fit(x, 2, initialize=True)
    assert capfd.readouterr() == ("", "")


def test_a_monitor_of_an_estimator_accepts_what_fit_accepts():
    rows = np.random.default_rng(0).random((30, 6))
    histories = []
    for data in (rows, rows.reshape(30, 3, 2), pd.DataFrame(rows), rows.tolist(), torch.from_numpy(rows)):
        model = MVRBM((2, 2), visible_shape=(3, 2), n_epochs=1, random_state=0)
        model.fit(rows, callbacks=[Monitor(data, validation=data)])
        histories.append({name: value for name, value in model.history_[0].items() if name != "seconds"})
    assert all(history == histories[0] for history in histories)
