"""A training run resumes bit for bit from any update, with every combination of its parts."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import optim
from torch.optim import lr_scheduler
from torch.utils.data import DataLoader, TensorDataset

from mvrbm import MVRBM, Bernoulli, BoltzmannMachine, Categorical, Dense, Gaussian, Kronecker
from mvrbm.models import mvrbm, replicated_softmax
from mvrbm.saving import StorageError, read_machine
from mvrbm.training import (
    CD,
    PCD,
    Callback,
    CallOrder,
    Checkpoint,
    EarlyStopping,
    Monitor,
    Recipe,
    TemperedPCD,
    Trainer,
    checkpoints,
)
from mvrbm.training.checkpoints import runs
from mvrbm.training.part_folders import part_folder


@pytest.fixture(autouse=True)
def _without_waiting_for_the_disk(monkeypatch):
    monkeypatch.setattr("mvrbm.saving.os.fsync", lambda descriptor: None)


N, BATCH, N_EPOCHS = 35, 10, 3  # four batches per epoch, the last one short
ALL_UPDATES = range(1, 4 * N_EPOCHS + 1)


def bits(n=N, shape=(3, 3), seed=0):
    return (np.random.default_rng(seed).random((n, *shape)) < 0.4).astype(np.float32)


NEGATIVE = {"CD": CD(1), "PCD": PCD(6), "TemperedPCD": TemperedPCD(4, 3)}
OPTIMIZED = {
    "SGD": {},
    "Adam and StepLR": {
        "optimizer": lambda groups: optim.Adam(groups, lr=0.02),
        "scheduler": lambda optimizer: lr_scheduler.StepLR(optimizer, 1, 0.5),
    },
}
WATCHED = {
    "alone": lambda x: [],
    "watched": lambda x: [Monitor(x, x, every=3), EarlyStopping("reconstruction_error", patience=50)],
    "stopped early": lambda x: [
        Monitor(x, x, every=2, pseudo_sites=0),
        EarlyStopping("free_energy_gap", patience=1),  # of data to itself: never better than at first
    ],
    "best restored": lambda x: [
        Monitor(x, x, every=2, pseudo_sites=0),
        EarlyStopping("free_energy_gap", patience=2, restore_best=True),
    ],
    "watched after epochs": lambda x: [Monitor(x, x), EarlyStopping("validation_error", patience=50)],
}


def parameters(machine):
    return {name: p.detach().clone() for name, p in machine.named_parameters()}


def without_time(history):
    return [{key: value for key, value in row.items() if key != "seconds"} for row in history]


def resumed_from(path, folder, build, data, n_epochs=N_EPOCHS, **how):
    """Resume one checkpoint with a new trainer, and train to the end."""
    shutil.copytree(path, folder / path.name)
    trainer = build(folder)
    assert trainer.resume(folder)
    # Writing checkpoints takes most of the time, and the first run has written them already.
    trainer.callbacks = [callback for callback in trainer.callbacks if not isinstance(callback, Checkpoint)]
    return trainer.fit(data, n_epochs, **how, initialize=True)


def assert_resumes_everywhere(tmp_path, build, data, updates, **how):
    whole = build(tmp_path / "whole").fit(data, N_EPOCHS, **how, initialize=True)
    paths = sorted((tmp_path / "whole").iterdir())
    assert [int(path.name.removeprefix("update-")) for path in paths] == list(updates)
    end = parameters(whole.machine)
    for path in paths:
        trainer = resumed_from(path, tmp_path / f"from {path.name}", build, data, **how)
        different = [name for name, value in parameters(trainer.machine).items() if not torch.equal(value, end[name])]
        assert not different, path.name
        assert (trainer.epoch, trainer.state.batch, trainer.update) == (whole.epoch, whole.state.batch, whole.update)
        assert without_time(trainer.history) == without_time(whole.history)


@pytest.mark.slow
@pytest.mark.parametrize("watched", WATCHED)
@pytest.mark.parametrize("optimized", OPTIMIZED)
@pytest.mark.parametrize("negative", NEGATIVE)
def test_resumes_bit_for_bit_at_every_update(tmp_path, negative, optimized, watched):
    x = bits()

    def build(folder):
        return Trainer(
            mvrbm((3, 3), (2, 2)),
            Recipe(batch_size=BATCH, negative=NEGATIVE[negative], centering="full"),
            # The checkpoint is first in the list, but saves after the other callbacks.
            callbacks=[Checkpoint(folder, every=1, keep=99), *WATCHED[watched](x)],
            seed=3,
            **OPTIMIZED[optimized],
        )

    updates = ALL_UPDATES
    if watched in ("stopped early", "best restored"):
        updates = range(1, build(tmp_path / "trial").fit(x, N_EPOCHS, initialize=True).update + 1)
        assert len(updates) < len(ALL_UPDATES)
    assert_resumes_everywhere(tmp_path, build, x, updates)


def mixed():
    layers = {
        "turn": Bernoulli((2, 2)),  # a name that could be confused with the swap parity of tempered chains
        "signal": Gaussian(3, learn_variance=True),
        "word": Categorical(3),
    }
    return BoltzmannMachine(layers, Bernoulli((2, 2)), {"turn": Kronecker(2), "signal": Dense(), "word": Dense()})


def mixed_data():
    rng = np.random.default_rng(4)
    signal = (50 + 20 * rng.standard_normal((N, 3))).astype(np.float32)
    signal[rng.random(signal.shape) < 0.3] = np.nan
    return {"turn": bits(shape=(2, 2)), "signal": signal, "word": np.eye(3, dtype=np.float32)[rng.integers(3, size=N)]}


@pytest.mark.parametrize("negative", NEGATIVE)
def test_resumes_several_layers_with_missing_entries(tmp_path, negative):
    def build(folder):
        recipe = Recipe(batch_size=BATCH, negative=NEGATIVE[negative])
        return Trainer(mixed(), recipe, callbacks=[Checkpoint(folder, every=1, keep=99)], seed=3)

    assert_resumes_everywhere(tmp_path, build, mixed_data(), ALL_UPDATES, nan_is_missing=True)


def test_resumes_documents(tmp_path):
    rng = np.random.default_rng(0)
    words = np.eye(4, dtype=np.float32)[rng.integers(4, size=(N, 3))]
    words[::2, 2] = 0

    def build(folder):
        recipe = Recipe(batch_size=BATCH)
        return Trainer(replicated_softmax(3, 4, 2), recipe, callbacks=[Checkpoint(folder, every=1, keep=99)])

    assert_resumes_everywhere(tmp_path, build, words, ALL_UPDATES)


def test_resumes_a_dataset(tmp_path):
    def build(folder):
        return Trainer(
            mvrbm((3, 3), (2, 2)), Recipe(batch_size=BATCH), callbacks=[Checkpoint(folder, every=1, keep=99)]
        )

    assert_resumes_everywhere(tmp_path, build, TensorDataset(torch.from_numpy(bits())), ALL_UPDATES)


EVERY_OPTIMIZER = {
    "SGD": lambda g: optim.SGD(g, lr=0.05, momentum=0.9, nesterov=True),
    "Adam": lambda g: optim.Adam(g, lr=0.01, amsgrad=True),
    "Adam with tensors": lambda g: optim.Adam(g, lr=torch.tensor(0.01)),
    "AdamW": lambda g: optim.AdamW(g, lr=0.01),
    "Adamax": lambda g: optim.Adamax(g, lr=0.01),
    "NAdam": lambda g: optim.NAdam(g, lr=0.01),
    "RAdam": lambda g: optim.RAdam(g, lr=0.01),
    "Adagrad": lambda g: optim.Adagrad(g, lr=0.01),
    "Adadelta": lambda g: optim.Adadelta(g, lr=0.5),
    "RMSprop": lambda g: optim.RMSprop(g, lr=0.01, centered=True, momentum=0.5),
    "Rprop": lambda g: optim.Rprop(g, lr=0.01),
    "ASGD": lambda g: optim.ASGD(g, lr=0.05, t0=3),
}
EVERY_SCHEDULER = {
    "ExponentialLR": lambda o: lr_scheduler.ExponentialLR(o, 0.7),
    "MultiStepLR": lambda o: lr_scheduler.MultiStepLR(o, [1, 2], 0.3),
    "CosineAnnealingLR": lambda o: lr_scheduler.CosineAnnealingLR(o, 3),
    "CosineAnnealingWarmRestarts": lambda o: lr_scheduler.CosineAnnealingWarmRestarts(o, 2),
    "LambdaLR": lambda o: lr_scheduler.LambdaLR(o, lambda t: 1 / (1 + t)),
    "OneCycleLR": lambda o: lr_scheduler.OneCycleLR(o, 0.1, total_steps=5),
    "SequentialLR": lambda o: lr_scheduler.SequentialLR(
        o, [lr_scheduler.ConstantLR(o, 0.5, 1), lr_scheduler.MultiStepLR(o, [1], 0.1)], [1]
    ),
    "ReduceLROnPlateau": lambda o: lr_scheduler.ReduceLROnPlateau(o, mode="max", factor=0.3, patience=0),
}


@pytest.mark.parametrize(
    ("optimizer", "scheduler"),
    [*((name, None) for name in EVERY_OPTIMIZER), *(("SGD", name) for name in EVERY_SCHEDULER)],
)
def test_resumes_every_optimizer_and_scheduler(tmp_path, optimizer, scheduler):
    x = bits()

    def build(folder):
        return Trainer(
            mvrbm((3, 3), (2, 2)),
            Recipe(batch_size=BATCH),
            optimizer=EVERY_OPTIMIZER[optimizer],
            scheduler=None if scheduler is None else EVERY_SCHEDULER[scheduler],
            callbacks=[Checkpoint(folder, every=2, keep=99), Monitor(x, pseudo_sites=0)],
        )

    assert_resumes_everywhere(tmp_path, build, x, range(2, 13, 2))


class Stop(Callback):
    def __init__(self, at):
        self.at = at

    def on_batch_end(self, trainer, batch):
        if trainer.update == self.at:
            trainer.stop = True


class Batches(Callback):
    def __init__(self):
        self.seen = []

    def on_batch_end(self, trainer, batch):
        self.seen.append(
            (trainer.epoch, batch.visible["visible"][0, 0, 0].item(), trainer.optimizer.param_groups[0]["lr"])
        )


@pytest.mark.parametrize("anew", [False, True])
@pytest.mark.parametrize(("at", "then"), [(6, [1, 1, 1, 1, 2, 2, 2, 2]), (8, [2, 2, 2, 2])])
def test_a_loader_resumes_at_the_beginning_of_an_epoch(tmp_path, anew, at, then):
    """A loader decides on its order, so the interrupted epoch starts again, with the learning rate of that epoch."""
    loader = DataLoader(torch.from_numpy(bits()), batch_size=BATCH)

    def build(folder, *more):
        return Trainer(
            mvrbm((3, 3), (2, 2)),
            Recipe(learning_rate=0.1),
            scheduler=lambda o: lr_scheduler.StepLR(o, 1, 0.5),
            callbacks=[Checkpoint(folder, every=1), *more],
        )

    batches = Batches()
    trainer = build(tmp_path, Stop(at), batches).fit(loader, N_EPOCHS, initialize=True)
    assert trainer.update == at
    batches.seen.clear()
    if anew:
        trainer = build(tmp_path, batches)
        assert trainer.resume(tmp_path)
    trainer.fit(loader, N_EPOCHS, initialize=True)
    assert [epoch for epoch, _, _ in batches.seen] == then
    assert [value for _, value, _ in batches.seen][:4] == bits()[::BATCH, 0, 0].tolist()
    assert [rate for _, _, rate in batches.seen] == [0.1 * 0.5**epoch for epoch in then]
    assert trainer.epoch == N_EPOCHS


def test_a_trainer_that_has_trained_can_resume_an_earlier_checkpoint(tmp_path):
    x = bits()
    first = Trainer(mvrbm((3, 3), (2, 2)), Recipe(batch_size=BATCH), callbacks=[Checkpoint(tmp_path)]).fit(
        x, 2, initialize=True
    )
    other = Trainer(mvrbm((3, 3), (2, 2)), Recipe(batch_size=BATCH)).fit(x, 3, initialize=True)
    assert other.resume(tmp_path)
    other.fit(x, 2, initialize=True)
    assert other.update == first.update == 8
    assert all(torch.equal(parameters(other.machine)[n], value) for n, value in parameters(first.machine).items())


def test_resume_returns_false_without_a_checkpoint(tmp_path):
    trainer = Trainer(mvrbm((3, 3), (2, 2)), callbacks=[Checkpoint(tmp_path / "new")])
    assert not trainer.resume(tmp_path / "new")
    assert trainer.fit(bits(), 1, initialize=True).update == 1
    assert trainer.resume(tmp_path / "new")


def test_callbacks_may_differ_after_resuming(tmp_path):
    x = bits()
    recipe = Recipe(batch_size=BATCH)
    watching = [EarlyStopping("reconstruction_error", patience=7), Monitor(x, pseudo_sites=0), Checkpoint(tmp_path)]
    first = Trainer(mvrbm((3, 3), (2, 2)), recipe, callbacks=watching).fit(x, 2, initialize=True)
    for callbacks in ([], [Batches(), Monitor(x, pseudo_sites=0), EarlyStopping("reconstruction_error", patience=7)]):
        trainer = Trainer(mvrbm((3, 3), (2, 2)), recipe, callbacks=callbacks)
        trainer.resume(tmp_path)
        trainer.fit(x, 2, initialize=True)
        assert trainer.update == first.update
        if callbacks:
            assert callbacks[-1].state_dict() == watching[0].state_dict()
            assert callbacks[-1].best is not None


# -- folders ----------------------------------------------------------------------------------------------


def trained(folder, machine=None, recipe=None, n_epochs=2, **kwargs):
    machine = machine or mvrbm((3, 3), (2, 2))
    recipe = recipe or Recipe(batch_size=BATCH)
    shape = machine.layers["visible"].shape
    return Trainer(machine, recipe, callbacks=[Checkpoint(folder, **kwargs)]).fit(
        bits(shape=shape), n_epochs, initialize=True
    )


@pytest.mark.parametrize(
    ("every", "keep", "expected"), [(1, 3, [6, 7, 8]), (3, 2, [6, 8]), (None, 1, [8]), (5, 9, [5, 8])]
)
def test_only_the_last_checkpoints_are_kept(tmp_path, every, keep, expected):
    trained(tmp_path, every=every, keep=keep)
    assert sorted(path.name for path in tmp_path.iterdir()) == [f"update-{update:09d}" for update in expected]
    for path in tmp_path.iterdir():
        assert {file.name for file in path.iterdir()} == {
            "config.json",
            "model.safetensors",
            "trainer.json",
            "trainer.safetensors",
        }


def test_every_checkpoint_is_a_model(tmp_path):
    seen = {}

    class Keeper(Callback):
        def on_batch_end(self, trainer, batch):
            seen[trainer.update] = parameters(trainer.machine)

    trainer = Trainer(
        mvrbm((3, 3), (2, 2)), Recipe(batch_size=BATCH), callbacks=[Keeper(), Checkpoint(tmp_path, every=1, keep=99)]
    )
    trainer.fit(bits(), 2, initialize=True)
    for update, expected in seen.items():
        machine = read_machine(tmp_path / f"update-{update:09d}")
        assert all(torch.equal(parameters(machine)[name], value) for name, value in expected.items())


def test_the_newest_checkpoint_has_the_largest_number(tmp_path):
    for name in (
        "update-999999999",
        "update-1000000000",
        "update-7",
        "update-000000003",
        "update-000000004.bak",
        "notes",
    ):
        (tmp_path / name).mkdir()
    (tmp_path / "update-2000000000").write_text("a file")
    assert checkpoints.newest(tmp_path).name == "update-1000000000"
    assert checkpoints.newest(tmp_path / "notes") is None
    assert checkpoints.newest(tmp_path / "nowhere") is None


def test_a_new_run_does_not_write_into_the_folder_of_another(tmp_path):
    trained(tmp_path)
    before = sorted(path.name for path in tmp_path.iterdir())
    with pytest.raises(
        ValueError, match="contains checkpoints from an earlier training run; resume that run or choose another"
    ):
        trained(tmp_path)
    assert sorted(path.name for path in tmp_path.iterdir()) == before


def contents(folder):
    return {path.relative_to(folder): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def test_save_does_not_write_into_the_folder_of_another_run(tmp_path):
    """Also if the other run has a checkpoint after the same update, or fewer updates."""
    trained(tmp_path)
    before = contents(tmp_path)
    for n_epochs in (2, 3):
        other = Trainer(mvrbm((3, 3), (2, 2)), Recipe(batch_size=BATCH), seed=1)
        other.fit(bits(), n_epochs, initialize=True)
        with pytest.raises(StorageError, match="contains checkpoints from an earlier training run"):
            other.save(tmp_path)
        assert contents(tmp_path) == before


def test_a_warm_start_does_not_write_into_the_folder_of_another_run(tmp_path):
    trained(tmp_path)
    before = contents(tmp_path)
    model = MVRBM((2, 2), batch_size=BATCH, n_epochs=3, warm_start=True, random_state=0, device="cpu").fit(bits())
    with pytest.raises(StorageError, match="contains checkpoints from an earlier training run"):
        model.fit(bits(), callbacks=[Checkpoint(tmp_path)])
    assert contents(tmp_path) == before
    own = [Checkpoint(tmp_path / "own")]
    model.fit(bits(), callbacks=own)
    model.fit(bits(), callbacks=own)  # the same run continues
    assert checkpoints.newest(tmp_path / "own").name == "update-000000036"


def test_save_replaces_the_checkpoint_of_its_own_run_after_the_same_update(tmp_path):
    trainer = trained(tmp_path)
    with torch.no_grad():
        trainer.machine.hidden.bias.fill_(0.25)
    path = trainer.save(tmp_path)
    assert (read_machine(path).hidden.bias == 0.25).all()
    assert sorted(place.name for place in tmp_path.iterdir()) == ["update-000000004", "update-000000008"]


@pytest.mark.parametrize(
    ("part", "details", "name"),
    [("layer", [2], "layer-2"), ("step", [0, "images"], "step-0-images"), ("fit", [], "fit")],
)
def test_checkpoints_of_parts_are_found(tmp_path, part, details, name):
    folder = part_folder(tmp_path, part, *details)
    assert folder == tmp_path / name
    for place in (folder / "update-000000001", tmp_path / f"{name}-mine" / "update-000000001"):
        place.mkdir(parents=True)
    assert checkpoints.stored_checkpoints(tmp_path) == [folder / "update-000000001"]
    for wrong in (("other",), (part, *details, "mine!")):
        with pytest.raises(ValueError, match="is not the name of a part of a training run"):
            part_folder(tmp_path, *wrong)


@pytest.mark.skipif(not hasattr(os, "fork"), reason="requires fork")
@pytest.mark.parametrize("saves", [False, True])
def test_a_kill_at_any_time_keeps_the_earlier_or_the_new_checkpoints(tmp_path, saves):
    """The child process ends at its n-th change of a file or folder, without any cleanup."""

    def replace(folder, n):
        remaining = iter(range(n))

        def end_after_n(change):
            def changed(*args, **kwargs):
                if next(remaining, None) is None:
                    os._exit(1)
                return change(*args, **kwargs)

            return changed

        for name in ("mkdir", "rename", "replace"):
            setattr(Path, name, end_after_n(getattr(Path, name)))
        shutil.rmtree = end_after_n(shutil.rmtree)
        with checkpoints.replace_checkpoints(folder):
            if saves:
                (folder / "layer-0" / "update-000000003").mkdir()
        os._exit(0)

    codes = []
    for n in range(20):
        folder = tmp_path / str(n)
        names = ["layer-0/update-000000001", "layer-0/update-000000002", "layer-1/update-000000001"]
        for name in names:
            (folder / name).mkdir(parents=True)
            (folder / name / "trainer.json").write_text(name)
        (folder / "mine").mkdir()
        child = os.fork()
        if child == 0:
            replace(folder, n)
        codes.append(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
        found = {str(path.relative_to(folder)) for path in checkpoints.stored_checkpoints(folder)}
        new = {"layer-0/update-000000003"}
        assert found in ([new] if codes[-1] == 0 and saves else [set(names), new] if saves else [set(names)])
        assert {path.name for path in folder.iterdir()} == {"layer-0", "layer-1", "mine"}
        assert all((folder / name / "trainer.json").read_text() == name for name in found & set(names))
    assert codes[0] == 1
    assert codes[-1] == 0


def test_leftovers_of_killed_runs_are_ignored_and_removed(tmp_path):
    trained(tmp_path)
    newest = checkpoints.newest(tmp_path)
    leftover = tmp_path / ".writing-killed"
    shutil.copytree(newest, leftover)
    (leftover / "model.safetensors").write_bytes(b"half a fi")
    assert checkpoints.newest(tmp_path) == newest
    trainer = Trainer(mvrbm((3, 3), (2, 2)), Recipe(batch_size=BATCH), callbacks=[Checkpoint(tmp_path)])
    assert trainer.resume(tmp_path)
    trainer.fit(bits(), 3, initialize=True)
    assert not leftover.exists()
    assert checkpoints.newest(tmp_path).name == "update-000000012"


@pytest.mark.parametrize("broken", ["write_machine", "write_tensors", "finish_folder"])
def test_a_failed_write_leaves_only_the_former_checkpoints(tmp_path, monkeypatch, broken):
    trainer = trained(tmp_path)
    before = sorted(path.name for path in tmp_path.iterdir())

    def full(*args, **kwargs):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(runs if broken == "finish_folder" else runs.saving, broken, full)
    with pytest.raises(StorageError, match="cannot be written: No space left on device"):
        trainer.fit(bits(), 3, initialize=True)
    assert sorted(path.name for path in tmp_path.iterdir()) == before


OTHERS = [
    ("another hidden layer", lambda: mvrbm((3, 3), (2, 3)), {}, "another machine, with different settings for hidden"),
    ("another rank", lambda: mvrbm((3, 3), (2, 2), 2), {}, "another machine, with different settings for couplings"),
    ("another dtype", lambda: mvrbm((3, 3), (2, 2)).double(), {}, "another machine, with different settings for dtype"),
    (
        "other units",
        lambda: BoltzmannMachine(Gaussian((3, 3)), Bernoulli((2, 2)), Kronecker()),
        {},
        "another machine, with different settings for visible",
    ),
    ("another batch", None, {"recipe": Recipe(batch_size=7)}, "another training run: batch_size is 7, was 10"),
    (
        "another phase",
        None,
        {"recipe": Recipe(batch_size=BATCH, negative=PCD(3))},
        "another training run: negative is .*PCD.*, was .*CD",
    ),
    (
        "another optimizer",
        None,
        {"optimizer": EVERY_OPTIMIZER["Adam"]},
        "does not match this trainer: the stored optimizer is recipe",
    ),
]


@pytest.mark.parametrize(("_", "machine", "how", "message"), OTHERS, ids=[row[0] for row in OTHERS])
def test_a_checkpoint_of_another_machine_or_recipe_is_an_error(tmp_path, _, machine, how, message):
    trained(tmp_path)
    machine = machine() if machine else mvrbm((3, 3), (2, 2))
    trainer = Trainer(machine, **{"recipe": Recipe(batch_size=BATCH), **how})
    with pytest.raises(StorageError, match=message):
        trainer.resume(tmp_path) and trainer.fit(bits(), 3, initialize=True)


def other_bits():
    x = bits()
    x[7, 1, 1] = 1 - x[7, 1, 1]
    return x


def adam(rate):
    return {"optimizer": lambda groups: optim.Adam(groups, lr=rate)}


ANOTHER_RUN = [
    ("another seed", {}, {"seed": 1}, bits(), "seed is 1, was 0"),
    ("another entry", {}, {}, other_bits(), "the data has different values"),
    ("fewer samples", {}, {}, bits()[:30], "n_samples is 30, was 35; .*|the data has different values; n_samples"),
    ("another rate", adam(0.02), adam(0.03), bits(), "the optimizer is .*0.03.*, was .*0.02"),
    (
        "another schedule",
        {"scheduler": lambda o: lr_scheduler.StepLR(o, 1, 0.5)},
        {"scheduler": lambda o: lr_scheduler.StepLR(o, 1, 0.1)},
        bits(),
        "the scheduler is .*0.1.*, was .*0.5",
    ),
    ("another momentum", {}, {"recipe": Recipe(batch_size=BATCH, momentum=0.1)}, bits(), "momentum is 0.1, was 0.5"),
]


@pytest.mark.parametrize(("_", "how", "then", "x", "message"), ANOTHER_RUN, ids=[row[0] for row in ANOTHER_RUN])
def test_a_checkpoint_of_another_run_is_resumed_only_with_ignore_mismatch(tmp_path, _, how, then, x, message):
    Trainer(mvrbm((3, 3), (2, 2)), Recipe(batch_size=BATCH), callbacks=[Checkpoint(tmp_path)], **how).fit(bits(), 2)

    def resumed(**settings):
        trainer = Trainer(mvrbm((3, 3), (2, 2)), **{"recipe": Recipe(batch_size=BATCH), **how, **then})
        return trainer.resume(tmp_path, **settings) and trainer.fit(x, 3, initialize=True)

    with pytest.raises(StorageError, match=f"another training run: ({message}).*ignore_mismatch=True"):
        resumed()
    with pytest.warns(UserWarning, match=message):
        assert resumed(ignore_mismatch=True).epoch == 3


def test_a_checkpoint_without_an_identity_is_resumed(tmp_path):
    """Version 0.1 did not write one."""
    trained(tmp_path)
    damage_json(checkpoints.newest(tmp_path) / "trainer.json", lambda content: content.pop("settings"))
    trainer = Trainer(mvrbm((3, 3), (2, 2)), Recipe(batch_size=BATCH), seed=3)
    assert trainer.resume(tmp_path)
    assert trainer.fit(other_bits(), 3, initialize=True).epoch == 3


def test_two_processes_do_not_write_to_one_folder(tmp_path):
    class Second(Callback):
        def on_train_begin(self, trainer):
            child = os.fork()
            if child == 0:
                again = Trainer(mvrbm((3, 3), (2, 2)), Recipe(batch_size=BATCH), callbacks=[Checkpoint(tmp_path)])
                try:
                    again.fit(bits(), 1, initialize=True)
                except StorageError as error:
                    os._exit(7 if "another process is writing checkpoints" in str(error) else 8)
                os._exit(9)
            self.code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])

    second = Second()
    second.call_order = CallOrder.AFTER_CHECKPOINT
    callbacks = [Checkpoint(tmp_path), second]
    Trainer(mvrbm((3, 3), (2, 2)), Recipe(batch_size=BATCH), callbacks=callbacks).fit(bits(), 1, initialize=True)
    assert second.code == 7
    assert trained(tmp_path / "other").epoch == 2


def test_the_number_of_epochs_may_differ(tmp_path):
    trained(tmp_path, recipe=Recipe(batch_size=BATCH, n_epochs=2))
    trainer = Trainer(mvrbm((3, 3), (2, 2)), Recipe(batch_size=BATCH, n_epochs=5))
    assert trainer.resume(tmp_path)
    assert trainer.fit(bits(), initialize=True).epoch == 5


def damage_json(path, change):
    content = json.loads(path.read_text())
    change(content)
    path.write_text(json.dumps(content))


DAMAGE = [
    ("no trainer.json", lambda p: (p / "trainer.json").unlink(), "trainer.json: no such file"),
    ("no tensors", lambda p: (p / "trainer.safetensors").unlink(), "trainer.safetensors: no such file"),
    ("not JSON", lambda p: (p / "trainer.json").write_text("{"), "not valid JSON"),
    ("empty JSON", lambda p: (p / "trainer.json").write_text("{}"), "trainer.json.* is corrupted"),
    ("cut tensors", lambda p: os.truncate(p / "trainer.safetensors", 40), "corrupted or is not a safetensors file"),
    ("cut model", lambda p: os.truncate(p / "model.safetensors", 40), "model.safetensors"),
    ("no config", lambda p: (p / "config.json").unlink(), "config.json is missing"),
    (
        "no position",
        lambda p: damage_json(p / "trainer.json", lambda c: c.pop("batch")),
        "corrupted: 'batch' is missing",
    ),
    (
        "no optimizer",
        lambda p: damage_json(p / "trainer.json", lambda c: c.pop("optimizer")),
        "corrupted: 'optimizer' is missing",
    ),
    (
        "optimizer of another kind",
        lambda p: damage_json(p / "trainer.json", lambda c: c.update(optimizer=[])),
        "corrupted: optimizer must be dict",
    ),
]


def counter(name, value):
    return (
        f"{name} {value!r:.20}",
        lambda p: damage_json(p / "trainer.json", lambda c: c.update({name: value})),
        f"trainer.json is corrupted: .*{name}",
    )


def tensor(name, change):
    def damage(path):
        tensors = load_file(path / "trainer.safetensors")
        save_file({key: change(t) if key == name else t for key, t in tensors.items()}, path / "trainer.safetensors")

    return damage


DAMAGE += [
    *(counter(name, value) for name in ("epoch", "update", "batch") for value in ("2", None, -1, float("nan"), 1.5)),
    counter("processes", 0),
    counter("batch", 100),
    counter("history", [{"loss": "small"}]),
    counter("callbacks", ["Monitor"]),
    (
        "rate",
        lambda p: damage_json(p / "trainer.json", lambda c: c["recipe"].update(learning_rate=-1)),
        "learning_rate",
    ),
    ("half the chains", tensor("chains.visible", lambda t: t[:3]), "chains for 'visible' have shape"),
    ("chains of NaN", tensor("chains.visible", lambda t: t * float("nan")), "chains for 'visible' are not finite"),
    ("momenta", tensor("momenta.hidden.bias", lambda t: t[:1]), "momenta for 'hidden.bias' have shape"),
]


@pytest.mark.parametrize(("_", "damage", "message"), DAMAGE, ids=[row[0] for row in DAMAGE])
def test_a_damaged_checkpoint_is_an_error(tmp_path, _, damage, message):
    recipe = Recipe(batch_size=BATCH, negative=PCD(6))
    trained(tmp_path, recipe=recipe)
    damage(checkpoints.newest(tmp_path))
    trainer = Trainer(mvrbm((3, 3), (2, 2)), recipe)
    with pytest.raises(StorageError, match=message):
        trainer.resume(tmp_path) and trainer.fit(bits(), 3, initialize=True)


def test_long_history_can_be_read_again(tmp_path):
    trainer = Trainer(mvrbm((3, 3), (2, 2)), Recipe(batch_size=BATCH)).fit(bits(), 1, initialize=True)
    trainer.state.history = [{"epoch": 1, "update": 4, "some_metric_with_a_long_name": i / 7} for i in range(250_000)]
    path = trainer.save(tmp_path)
    assert (path / "trainer.json").stat().st_size > 20e6
    again = Trainer(mvrbm((3, 3), (2, 2)), Recipe(batch_size=BATCH))
    assert again.resume(tmp_path)
    again.fit(bits(), 1, initialize=True)
    assert again.history == trainer.history


def test_checkpoint_settings_are_checked(tmp_path):
    for wrong in ({"every": 0}, {"keep": 0}):
        with pytest.raises(ValueError, match=r"(every|keep) must be a whole number of at least 1"):
            Checkpoint(tmp_path, **wrong)


KILL_TEST = Path(__file__).parents[2] / "tools" / "kills.py"


@pytest.mark.slow
@pytest.mark.skipif(not KILL_TEST.exists(), reason="the tool is not part of the source distribution")
def test_a_killed_run_ends_like_an_uninterrupted_one():
    """Three SIGKILLs, a SIGTERM, a Ctrl-C and a full disk. The tool itself covers all kinds of training."""
    command = [sys.executable, str(KILL_TEST), "--kills", "3", "--others", "1", "--kinds", "estimator"]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "0 failures" in done.stdout
