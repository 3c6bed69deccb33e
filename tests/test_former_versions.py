"""Models and checkpoints that earlier versions wrote load, and compute what those versions computed.

`models_0.1.0` and `models_0.2.0` were written by those versions, with their inputs and outputs in `expected.npz`.
"""

import functools
import shutil
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch

import mvrbm
from mvrbm.estimators import ClassificationMVRBM, MVRBMClassifier
from mvrbm.models import mvrbm as machine_of
from mvrbm.training import CD, PCD, RECIPES, Checkpoint, Recipe, TemperedPCD, Trainer

pytestmark = pytest.mark.fixed_seed

HERE = Path(__file__).parent
OLDEST = HERE / "models_0.1.0"
FORMER = HERE / "models_0.2.0"


@pytest.fixture(autouse=True)
def _without_waiting_for_the_disk(monkeypatch):
    monkeypatch.setattr("mvrbm.io.atomic.os.fsync", lambda descriptor: None)


@functools.cache
def stored(version: Path) -> dict[str, np.ndarray]:
    with np.load(version / "expected.npz") as file:
        return dict(file)


def outputs_under(prefix: str) -> dict[str, np.ndarray]:
    """Return the arrays of version 0.2.0 whose names start with a prefix, without that prefix."""
    return {key.removeprefix(prefix): value for key, value in stored(FORMER).items() if key.startswith(prefix)}


# -- estimators -------------------------------------------------------------------------------------------


class Saved(NamedTuple):
    """The class of a saved estimator, and the name of its input in `expected.npz`."""

    class_name: str
    data: str = "images"


ESTIMATORS_0_1 = {
    "mvrbm": Saved("MVRBM"),
    "rbm": Saved("RBM"),
    "tvrbm": Saved("TVRBM", "tensors"),
    "mmvrbm": Saved("MMVRBM", "a and b"),
    "deep": Saved("DeepMVRBM"),
    "classifier": Saved("MVRBMClassifier"),
    "deep_classifier": Saved("DeepMVRBMClassifier"),
    "classification": Saved("ClassificationMVRBM"),
}

ESTIMATORS_0_2 = {
    "rbm": Saved("RBM", "rows"),
    "mvrbm": Saved("MVRBM"),
    "mvrbm-rows": Saved("MVRBM", "rows"),
    "mvrbm-generative": Saved("MVRBM"),
    "mvrbm-own-recipe": Saved("MVRBM"),
    "mvrbm-gaussian": Saved("MVRBM", "real"),
    "tvrbm": Saved("TVRBM", "tensors"),
    "mmvrbm": Saved("MMVRBM", "image and animal"),
    "mmvrbm-tuple": Saved("MMVRBM", "image and real"),
    "deep": Saved("DeepMVRBM"),
    "classification": Saved("ClassificationMVRBM"),
    "classification-generative": Saved("ClassificationMVRBM"),
    "classification-hybrid": Saved("ClassificationMVRBM"),
    "classifier": Saved("MVRBMClassifier"),
    "classifier-pretrained": Saved("MVRBMClassifier"),
    "deep-classifier": Saved("DeepMVRBMClassifier"),
    "imputer": Saved("MVRBMImputer", "holes"),
    "imputer-rectified": Saved("MVRBMImputer", "holes"),
    "imputer-bernoulli": Saved("MVRBMImputer", "holes"),
    "imputer-categories": Saved("MVRBMImputer", "table"),
    "imputer-arrays": Saved("MVRBMImputer", "arrays"),
    "outliers": Saved("MVRBMOutlierDetector", "real"),
    "outliers-images": Saved("MVRBMOutlierDetector"),
    "topics": Saved("ReplicatedSoftmax", "counts"),
    "super-resolver": Saved("SuperResolver", "picture"),
}


def input_0_1(name: str) -> Any:
    arrays = stored(OLDEST)
    data = ESTIMATORS_0_1[name].data
    if data == "a and b":
        return {"a": arrays["a"], "b": arrays["b"]}
    return arrays["images"].reshape(5, -1) if name == "rbm" else arrays[data]


def input_0_2(name: str) -> Any:
    arrays = outputs_under("data/")
    data = ESTIMATORS_0_2[name].data
    if data == "image and animal":
        return {"image": arrays["images"], "animal": arrays["labels"]}
    if data == "image and real":
        return arrays["images"], arrays["real"]
    return arrays[data]


def loaded_twice(folder: Path, tmp_path: Path, class_name: str) -> list[Any]:
    """Return an estimator from its folder, and the same estimator after saving and loading it once more."""
    estimator = mvrbm.load(folder, device="cpu")
    again = mvrbm.load(mvrbm.save(estimator, tmp_path / "again"), device="cpu")
    assert [type(model).__name__ for model in (estimator, again)] == [class_name, class_name]
    return [estimator, again]


@pytest.mark.parametrize("name", ESTIMATORS_0_1)
def test_estimators_of_version_0_1_0_load(name, tmp_path):
    for model in loaded_twice(OLDEST / name, tmp_path, ESTIMATORS_0_1[name].class_name):
        method = model.predict_proba if "class" in name else model.transform
        expected = stored(OLDEST)[f"of {name}"]
        np.testing.assert_allclose(method(input_0_1(name)), expected, rtol=1e-6, atol=1e-7)
        assert model.get_params().get("n_epochs") in (None, 2)


# Relative and absolute tolerance of outputs that other random numbers, or other borders of pictures, change.
CHANGED = {
    "score_samples": (0.03, 0.02),  # sites and masks are drawn at random
    "decision_function": (0.03, 0.02),
    "upscale": (0.0, 2.0),  # patches at the border see repeated edge pixels
}


@pytest.mark.parametrize("name", ESTIMATORS_0_2)
def test_estimators_of_version_0_2_0_load(name, tmp_path):
    expected = outputs_under(f"estimators/{name}/")
    assert expected
    for model in loaded_twice(FORMER / "estimators" / name, tmp_path, ESTIMATORS_0_2[name].class_name):
        for method, outputs in expected.items():
            found = np.asarray(getattr(model, method)(input_0_2(name)), dtype=outputs.dtype)
            exact = (1e-5, 1e-6) if outputs.dtype.kind == "f" else (0.0, 0.0)
            relative, absolute = CHANGED.get(method, exact)
            if outputs.dtype.kind in "fu":
                np.testing.assert_allclose(
                    found.astype(float), outputs.astype(float), rtol=relative, atol=absolute, err_msg=method
                )
            else:
                np.testing.assert_array_equal(found, outputs, err_msg=method)


def test_no_saved_estimator_is_left_out():
    assert {folder.name for folder in (FORMER / "estimators").iterdir()} == set(ESTIMATORS_0_2)


# -- machines ---------------------------------------------------------------------------------------------


def test_machines_of_version_0_1_0_load():
    words = torch.eye(3)[[0, 1, 2, 0]][None]
    expected = torch.from_numpy(stored(OLDEST)["of machine"])
    torch.testing.assert_close(mvrbm.load(OLDEST / "machine", device="cpu").hidden_mean(words), expected)


@pytest.mark.parametrize("name", sorted(folder.name for folder in (FORMER / "machines").iterdir()))
def test_machines_of_version_0_2_0_load(name, tmp_path):
    layers = {key: torch.from_numpy(x) for key, x in outputs_under(f"machines/{name}/data/").items()}
    expected = {key: x for key, x in outputs_under(f"machines/{name}/").items() if not key.startswith("data/")}
    machine = mvrbm.load(FORMER / "machines" / name, device="cpu")
    again = mvrbm.load(mvrbm.save(machine, tmp_path / "again"), device="cpu")
    for model in (machine, again):
        assert set(model.layers) == set(layers)
        for method, outputs in expected.items():
            torch.testing.assert_close(getattr(model, method)(layers).detach(), torch.from_numpy(outputs))


# -- checkpoints ------------------------------------------------------------------------------------------

TRAINERS = {
    "pcd-full": {"recipe": Recipe(n_epochs=2, batch_size=10, negative=PCD(5), centering="full")},
    "tempered": {"recipe": Recipe(n_epochs=2, batch_size=10, negative=TemperedPCD(4, 3))},
    "adam": {
        "recipe": Recipe(n_epochs=2, batch_size=10, negative=CD(2)),
        "optimizer": functools.partial(torch.optim.Adam, lr=0.01),
    },
    "scheduled": {
        "recipe": Recipe(n_epochs=2, batch_size=10),
        "scheduler": functools.partial(torch.optim.lr_scheduler.ExponentialLR, gamma=0.9),
    },
    "paper": {"recipe": RECIPES["paper"]},
}


def check_continued(trainer: Trainer, name: str) -> None:
    """Check that a trainer which resumes a checkpoint has its state, and goes on from there."""
    images = stored(FORMER)["data/training"]
    expected = outputs_under(f"checkpoints/{name}/")
    trainer.fit(images, 2)  # both epochs have been done
    assert trainer.update == expected.pop("update")
    hidden = trainer.machine.hidden_mean(torch.from_numpy(images[:5])).detach()
    torch.testing.assert_close(hidden, torch.from_numpy(expected.pop("hidden_mean")))
    state = {f"chains/{key}": chain for key, chain in trainer.state.chains.items()}
    state |= {f"momenta/{key}": momentum for key, momentum in trainer.state.momenta.items()}
    assert set(state) == set(expected)
    for key, tensor in state.items():
        torch.testing.assert_close(tensor, torch.from_numpy(expected[key]))
    trainer.fit(images, 3)
    assert (trainer.epoch, trainer.update) == (3, 6)
    moved = trainer.machine.hidden_mean(torch.from_numpy(images[:5])).detach()
    assert 0 < float((moved - hidden).abs().max()) < 0.3


def test_checkpoints_of_version_0_1_0_load():
    for folder in (OLDEST / "checkpoint", OLDEST / "checkpoint" / "update-000000002"):
        assert isinstance(mvrbm.load(folder, device="cpu"), Trainer)


@pytest.mark.parametrize("name", ["pcd-full", "tempered", "paper"])
def test_checkpoints_of_version_0_2_0_load(name):
    trainer = mvrbm.load(FORMER / "checkpoints" / name, device="cpu")
    assert isinstance(trainer, Trainer)
    if name != "paper":
        assert trainer.recipe.negative == TRAINERS[name]["recipe"].negative
        assert trainer.recipe.centering == TRAINERS[name]["recipe"].centering
    check_continued(trainer, name)


@pytest.mark.parametrize("name", TRAINERS)
def test_checkpoints_of_version_0_2_0_are_resumed(name, tmp_path):
    folder = shutil.copytree(FORMER / "checkpoints" / name, tmp_path / "checkpoints")
    options = dict(TRAINERS[name])
    if name == "paper":
        options["recipe"] = Recipe(**{**vars(options["recipe"]), "n_epochs": 2, "batch_size": 10})
    trainer = Trainer(machine_of((6, 5), (4, 3)), callbacks=[Checkpoint(folder)], seed=3, **options)
    assert trainer.resume(folder)
    check_continued(trainer, name)


BACKPROPAGATION = {
    "classifier": MVRBMClassifier(
        (4, 3), rank=2, n_epochs=3, batch_size=10, averaging=0.9, random_state=0, device="cpu"
    ),
    "classification": ClassificationMVRBM((4, 3), n_epochs=3, batch_size=10, random_state=0, device="cpu"),
}


@pytest.mark.parametrize("name", BACKPROPAGATION)
def test_backpropagation_of_version_0_2_0_is_resumed(name, tmp_path):
    folder = shutil.copytree(FORMER / "backpropagation" / name, tmp_path / "checkpoints")
    data = outputs_under("data/")
    model = BACKPROPAGATION[name].fit(data["training"], data["training-labels"], checkpoints=folder)
    expected = outputs_under(f"backpropagation/{name}/")
    losses = [row["loss"] for row in model.history_]
    # The epochs that version 0.2 has done are the same; those that follow have another order of the samples.
    np.testing.assert_allclose(losses, expected["loss"], rtol=1e-2)
    np.testing.assert_allclose(model.predict_proba(data["images"]), expected["predict_proba"], atol=0.01)
