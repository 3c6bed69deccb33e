"""Estimators that are trained by backpropagation, or in several stages, resume bit for bit."""

import json

import numpy as np
import pytest
import torch

from mvrbm import ClassificationMVRBM, DeepMVRBMClassifier, MVRBMClassifier
from mvrbm.errors import StorageError
from mvrbm.training import Trainer
from mvrbm.vision import SuperResolver, TrainingStep

X = (np.random.default_rng(0).random((40, 4, 4)) < 0.3).astype(np.float32)
Y = np.arange(40) % 2
IMAGE = np.random.default_rng(0).integers(0, 256, (40, 40), dtype=np.uint8)
SETTINGS = {"n_epochs": 3, "batch_size": 10, "random_state": 0}


def shallow(X=X, settings=SETTINGS, **how):
    early = {"averaging": 0.9, "early_stopping": True, "patience": 5}
    return MVRBMClassifier((2, 2), **settings, **early).fit(X, Y, **how).network_


def deep(X=X, settings=SETTINGS, **how):
    return DeepMVRBMClassifier(((3, 3), (2, 2)), pretraining=2, **settings).fit(X, Y, **how).network_


def hybrid(X=X, settings=SETTINGS, **how):
    return ClassificationMVRBM((2, 2), mode="hybrid", **settings).fit(X, Y, **how).machine_


def generative(X=X, settings=SETTINGS, **how):
    return ClassificationMVRBM((2, 2), mode="generative", **settings).fit(X, Y, **how).machine_


def super_resolver(X=X, settings=SETTINGS, **how):
    small = {**settings, "n_epochs": 1, "batch_size": 50}
    steps = [TrainingStep("patches", n_samples=600, n_epochs=3, batch_size=512, learning_rate=3e-3)]
    small |= {"symmetric": False, "steps": steps, "device": "cpu"}
    return SuperResolver(patch=6, hidden_shape=(2, 2), n_patches=200, **small).fit([IMAGE], **how).machine_


class Killed(BaseException):
    pass


@pytest.mark.parametrize("at", [2, 3, 7])
@pytest.mark.parametrize("fit", [shallow, deep, hybrid, generative, super_resolver])
def test_resumes_bit_for_bit(tmp_path, monkeypatch, fit, at):
    at = min(at, 3) if fit is generative else at  # it has one checkpoint per epoch
    whole, updates = fit(), []

    def killing(method):
        def update(*args, **settings):
            updates.append(1)
            method(*args, **settings)
            if len(updates) == at:
                raise Killed

        return update

    with monkeypatch.context() as patched:
        patched.setattr(torch.optim.AdamW, "step", killing(torch.optim.AdamW.step))
        patched.setattr(Trainer, "save", killing(Trainer.save))
        with pytest.raises(Killed):
            fit(checkpoints=tmp_path)
    resumed = fit(checkpoints=tmp_path)
    for one, other in zip(resumed.parameters(), whole.parameters(), strict=True):
        assert torch.equal(one, other)


def test_another_descent_is_resumed_only_with_ignore_mismatch(tmp_path):
    shallow(checkpoints=tmp_path)
    with pytest.raises(StorageError, match=r"the data has different values.*ignore_mismatch=True"):
        shallow(1 - X, checkpoints=tmp_path)
    with pytest.raises(StorageError, match=r"random_state is 1, was 0"):
        shallow(settings={**SETTINGS, "random_state": 1}, checkpoints=tmp_path)
    with pytest.warns(UserWarning, match="resumes anyway"):
        shallow(1 - X, checkpoints=tmp_path, ignore_mismatch=True)


def test_damaged_files_are_errors(tmp_path):
    shallow(checkpoints=tmp_path)
    path = tmp_path / "tuning" / "descent.json"
    content = json.loads(path.read_text())
    for change in ({"epoch": "2"}, {"epoch": -1}, {"update": None}, {"best": 3}, {"history": 7}, {"best_epoch": []}):
        path.write_text(json.dumps({**content, **change}))
        with pytest.raises(StorageError, match="tuning"):
            shallow(checkpoints=tmp_path)
