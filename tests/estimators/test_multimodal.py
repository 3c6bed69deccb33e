"""Several modalities with one hidden layer."""

import numpy as np
import pytest
from sklearn.datasets import load_digits

import mvrbm
from mvrbm import CP, MMVRBM, Dense


@pytest.fixture(scope="module")
def digits():
    return (load_digits().images / 16).astype(np.float32)  # (1797, 8, 8)


@pytest.fixture(scope="module")
def halves(digits):
    return {"left": digits[:, :, :4], "right": digits[:, :, 4:] * 10 - 3}


def test_a_whole_modality_is_found_from_the_other(halves):
    kinds = {"left": "bernoulli", "right": "gaussian"}
    fitted = MMVRBM((8, 8), rank=4, visible=kinds, n_epochs=40, random_state=0).fit(halves)
    right = np.ones_like(halves["right"], dtype=bool)
    nothing = {"left": halves["left"], "right": np.zeros_like(halves["right"])}
    found = fitted.inpaint(nothing, {"right": ~right})
    truth = halves["right"]
    # Linear regression from the left half gets to 0.68.
    assert ((found["right"] - truth) ** 2).sum() < 0.9 * ((truth.mean(0) - truth) ** 2).sum()
    assert fitted.transform(halves).shape == (len(truth), 64)
    assert set(fitted.components()) == set(halves)
    assert fitted.sample(2, steps=2)["right"].shape == (2, 8, 4)


def test_a_tuple_is_a_dict_of_numbers(halves):
    pair = (halves["left"], np.clip(halves["left"], 0, 1))
    fitted = MMVRBM((4, 4), n_epochs=1, random_state=0).fit(pair)
    assert fitted.modalities_ == ["0", "1"]
    np.testing.assert_array_equal(fitted.transform(pair), fitted.transform({"0": pair[0], "1": pair[1]}))


def test_a_saved_multimodal_model(halves, tmp_path):
    fitted = MMVRBM((3, 3), visible={"left": "bernoulli", "right": "gaussian"}, n_epochs=1).fit(halves)
    fitted.save(tmp_path / "model")
    np.testing.assert_array_equal(mvrbm.load(tmp_path / "model").transform(halves), fitted.transform(halves))


def test_couplings_may_differ(halves):
    kinds = {"left": "bernoulli", "right": "gaussian-learned"}
    fitted = MMVRBM(9, coupling={"left": CP(2), "right": Dense()}, visible=kinds, n_epochs=1, random_state=0).fit(
        halves
    )
    assert {name: link.name for name, link in fitted.machine_.links.items()} == {"left": "cp", "right": "dense"}
    assert {name: part.shape for name, part in fitted.components_.items()} == {"left": (9, 32), "right": (9, 32)}
    assert fitted.intercept_visible_["left"].shape == (32,)
    assert fitted.intercept_hidden_.shape == (9,)
    with pytest.raises(ValueError, match="coupling names modalities"):
        MMVRBM(9, coupling={"left": CP(2)}, visible=kinds).fit(halves)


def test_training_continues_after_loading(halves, tmp_path):
    kinds = {"left": "bernoulli", "right": "gaussian"}
    folder = (
        MMVRBM((3, 3), coupling="mpo:2", visible=kinds, n_epochs=1, random_state=0).fit(halves).save(tmp_path / "m")
    )
    loaded = mvrbm.load(folder).set_params(warm_start=True, n_epochs=2)
    before = loaded.transform(halves)
    assert loaded.fit(halves).n_epochs_ == 3
    assert 0 < np.abs(loaded.transform(halves) - before).mean() < 0.2
