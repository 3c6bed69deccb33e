"""`mvrbm.load` of a checkpoint returns a trainer that resumes bit for bit."""

import numpy as np
import pytest
import torch
from torch.optim import lr_scheduler

from mvrbm import MVRBM, load
from mvrbm.errors import StorageError
from mvrbm.models import mvrbm
from mvrbm.training import CD, PCD, Callback, Checkpoint, Monitor, Recipe, TemperedPCD, Trainer

N_EPOCHS = 3


def bits():
    return (np.random.default_rng(0).random((35, 3, 3)) < 0.4).astype(np.float32)


def build(negative=CD(1), callbacks=(), **how):  # noqa: B008
    recipe = Recipe(batch_size=10, negative=negative, centering="full", momentum=0.7)
    return Trainer(mvrbm((3, 3), (2, 2)), recipe, seed=3, callbacks=callbacks, **how)


@pytest.fixture
def checkpoints(tmp_path, request):
    """A run with a checkpoint after every update, four per epoch."""
    negative = getattr(request, "param", CD(1))
    whole = build(negative, [Checkpoint(tmp_path, every=1, keep=99)]).fit(bits(), N_EPOCHS, initialize=True)
    assert len(list(tmp_path.iterdir())) == whole.update == 12
    return negative, whole, tmp_path


class EveryBatch(Callback):
    """Reads the state after every update, as the checkpoints did, because that rounds centered parameters."""

    every_batch = True


def continued(path, **how):
    trainer = load(path, device="cpu")
    trainer.callbacks = [EveryBatch()]
    return trainer.fit(bits(), N_EPOCHS, **how)


def assert_same(left, right):
    assert (left.state.rng.key, left.order_rng.key) == (right.state.rng.key, right.order_rng.key)
    assert (left.epoch, left.state.batch, left.update) == (right.epoch, right.state.batch, right.update)
    for one, other in (
        (left.machine.state_dict(), right.machine.state_dict()),
        (left.state.momenta, right.state.momenta),
        (left.state.chains, right.state.chains),
    ):
        assert one.keys() == other.keys()
        assert all(torch.equal(one[key], value) for key, value in other.items())


@pytest.mark.parametrize(
    "checkpoints", [CD(1), PCD(6), TemperedPCD(4, 3)], indirect=True, ids=["CD", "PCD", "tempered"]
)
def test_a_loaded_trainer_continues_bit_for_bit_from_every_update(checkpoints):
    negative, whole, folder = checkpoints
    for path in sorted(folder.iterdir()):
        trainer = load(path, device="cpu")
        assert isinstance(trainer, Trainer)
        assert trainer.recipe == build(negative).recipe  # the learning rate is restored by fit
        trainer = continued(path)
        assert_same(trainer, whole)
        assert trainer.recipe == whole.recipe


@pytest.mark.parametrize("checkpoints", [PCD(6)], indirect=True)
def test_a_folder_of_checkpoints_continues_from_the_newest_as_resume_does(checkpoints):
    negative, whole, folder = checkpoints
    resumed = build(negative)
    assert resumed.resume(folder)
    loaded = load(folder, device="cpu")
    for key, value in resumed.machine.state_dict().items():
        assert torch.equal(loaded.machine.state_dict()[key], value)
    assert_same(loaded.fit(bits(), N_EPOCHS + 2), resumed.fit(bits(), N_EPOCHS + 2))
    assert loaded.update == 20
    with pytest.raises(AssertionError):
        assert_same(loaded, whole)


def test_initialize_does_not_undo_what_was_loaded(checkpoints):
    _, whole, folder = checkpoints
    assert_same(continued(folder, initialize=True), whole)
    assert_same(continued(folder / "update-000000006", initialize=True), whole)


WITH_OPTIMIZER = "was saved with an optimizer or a scheduler; create the same Trainer and call its resume method"


def test_a_checkpoint_with_a_scheduler_needs_the_trainer_that_made_it(tmp_path):
    trainer = build(scheduler=lambda optimizer: lr_scheduler.StepLR(optimizer, 1, 0.5))
    trainer.fit(bits(), 1, initialize=True).save(tmp_path)
    with pytest.raises(StorageError, match=WITH_OPTIMIZER):
        load(tmp_path)


def test_a_checkpoint_with_an_optimizer_needs_the_trainer_that_made_it(tmp_path):
    trainer = build(optimizer=lambda groups: torch.optim.Adam(groups, lr=0.01))
    trainer.fit(bits(), 1, initialize=True).save(tmp_path)
    with pytest.raises(StorageError, match=WITH_OPTIMIZER):
        load(tmp_path)


def test_a_loaded_estimator_has_what_the_documentation_says(tmp_path):
    model = MVRBM((2, 2), batch_size=10, recipe="generative", n_epochs=2, random_state=np.random.RandomState(0))
    model.set_params(device="cpu", verbose=1).fit(bits(), callbacks=[Monitor(bits())])
    again = load(model.save(tmp_path / "model"), device="cpu")
    assert (again.n_epochs_, again.n_updates_, again.rank) == (2, 8, model.rank)
    assert again.chains_.keys() == model.chains_.keys() != set()
    assert all(torch.equal(again.chains_[name], chain) for name, chain in model.chains_.items())
    assert (again.trainer_, again.history_, again.verbose, again.random_state) == (None, [], 0, None)
    assert len(model.history_) == 2
