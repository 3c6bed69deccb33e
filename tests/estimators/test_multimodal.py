"""The multimodal MVRBM: predictions against enumeration, labels, unknown labels, files."""

import itertools

import numpy as np
import pandas as pd
import pytest
import torch
from sklearn.datasets import load_digits

import mvrbm
from environment import fixed_seeds
from mvrbm import CP, MMVRBM, Dense
from tables import generator


@pytest.fixture(scope="module")
def digits():
    return (load_digits().images / 16).astype(np.float32)  # (1797, 8, 8)


@pytest.fixture(scope="module")
def halves(digits):
    return {"left": digits[:, :, :4], "right": digits[:, :, 4:] * 10 - 3}


def test_a_whole_modality_is_found_from_the_other(halves):
    kinds = {"left": "bernoulli", "right": "gaussian"}
    fitted = MMVRBM((8, 8), rank=4, visible=kinds, random_state=0).fit(halves)
    right = np.ones_like(halves["right"], dtype=bool)
    nothing = {"left": halves["left"], "right": np.zeros_like(halves["right"])}
    found = fitted.inpaint(nothing, {"right": ~right})
    truth = halves["right"]
    # Linear regression from the left half gets to 0.68.
    assert ((found["right"] - truth) ** 2).sum() < 0.93 * ((truth.mean(0) - truth) ** 2).sum()
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
    with pytest.raises(ValueError, match="coupling has modalities"):
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


def enumerated(machine, names):
    """Return every state of 2x2 bits ("image") and of two labels ("animal", "place"), and its probability."""
    parts = {
        "image": torch.cartesian_prod(*[torch.arange(2.0)] * 4).reshape(-1, 2, 2).double(),
        "animal": torch.eye(3).double(),
        "place": torch.eye(2).double(),
    }
    numbers = torch.cartesian_prod(*[torch.arange(len(parts[name])) for name in names])
    states = {name: parts[name][numbers[:, k]] for k, name in enumerate(names)}
    return states, torch.softmax(-machine.free_energy(states).detach(), 0)


@pytest.fixture(scope="module")
@fixed_seeds()  # how clear the best label is depends on the weights
def zoo():
    """Return a model of images and two labels, with large random weights."""
    rng = np.random.default_rng(0)
    data = {"image": (rng.random((30, 2, 2)) < 0.5) * 1.0, "animal": rng.choice(["ant", "bee", "cow"], 30)}
    data["place"] = np.eye(2)[rng.integers(0, 2, 30)]  # one-hot rows are labels, too
    model = MMVRBM((2, 1), n_epochs=0, recipe="generative", random_state=0).fit(data)
    with torch.no_grad():
        for parameter in model.machine_.parameters():
            parameter.copy_(torch.from_numpy(rng.normal(size=parameter.shape)))
    return model


@pytest.mark.parametrize("absent", [("animal",), ("place",), ("image",), ("animal", "image"), ("animal", "place")])
def test_what_is_left_out_is_predicted_from_the_rest(zoo, absent):
    names = list(zoo.machine_.layers)
    states, p = enumerated(zoo.machine_, names)
    given = {name: states[name][[5]] for name in names if name not in absent}
    same = torch.stack([(states[name] == part).flatten(1).all(1) for name, part in given.items()]).all(0)
    inputs = {name: np.repeat(part.numpy(), 100, 0) for name, part in given.items()}
    if "animal" in inputs:
        inputs["animal"] = zoo.classes_["animal"][inputs["animal"].argmax(1)]
    means = {name: torch.tensordot(p[same] / p[same].sum(), states[name][same], 1).numpy() for name in absent}
    found = zoo.predict(inputs) if len(absent) > 1 else {absent[0]: zoo.predict(inputs)}
    labels = [name for name in absent if name != "image"]
    if labels:
        shares = zoo.predict_proba(inputs) if len(labels) > 1 else {labels[0]: zoo.predict_proba(inputs)}
        for name in labels:
            exact = len(absent) == 1
            np.testing.assert_allclose(shares[name].mean(0), means[name], atol=1e-12 if exact else 0.03)
    if "image" in absent:
        np.testing.assert_allclose(found["image"].mean(0), means["image"], atol=0.03)
    if "animal" in absent:
        best = zoo.classes_["animal"][means["animal"].argmax()]
        assert (found["animal"] == best).mean() > 0.9


def test_prediction_needs_something_given_and_something_left_out(zoo):
    with pytest.raises(ValueError, match=r"but not all, of the modalities .*, got \[\]"):
        zoo.predict({})
    with pytest.raises(ValueError, match="must omit at least one of the label modalities"):
        zoo.predict_proba({"animal": ["ant"], "place": [1]})


def test_unknown_labels_are_none_or_nan():
    rng = np.random.default_rng(1)
    image = (rng.random((40, 2, 2)) < 0.5).astype(float)
    animal = np.array([None, "ant", "cow", "bee", float("nan")] * 8, dtype=object)
    known = np.array([False, True, True, True, False] * 8)
    fitted = MMVRBM((2, 2), n_epochs=2, random_state=0).fit({"image": image, "animal": animal})
    assert fitted.classes_["animal"].tolist() == ["ant", "bee", "cow"]
    filled = np.where(known, animal, "ant")
    mask = {"animal": np.repeat(known[:, None], 3, 1)}
    masked = MMVRBM((2, 2), n_epochs=2, random_state=0).fit({"image": image, "animal": filled}, mask=mask)
    np.testing.assert_array_equal(fitted.components_["image"], masked.components_["image"])
    assert np.isfinite(fitted.transform({"image": image, "animal": animal})).all()
    with pytest.raises(ValueError, match="modality 'animal' must have at least one known label"):
        MMVRBM((2, 2), n_epochs=1).fit({"image": image, "animal": np.full(40, None)})


def test_a_vector_next_to_a_matrix_has_a_dense_coupling():
    rng = np.random.default_rng(0)
    data = {"image": rng.random((20, 6, 5)), "vector": rng.random((20, 4))}
    model = MMVRBM((3, 2), n_epochs=1, random_state=0).fit(data)
    assert {name: link.name for name, link in model.machine_.links.items()} == {"image": "kronecker", "vector": "dense"}
    assert model.predict({"image": data["image"]}, steps=2, burn_in=0).shape == (20, 4)
    with pytest.raises(ValueError, match=r"samples of modality 'vector' have shape \(4,\); use coupling=Dense"):
        MMVRBM((3, 2), coupling="kronecker:2").fit(data)


def test_an_unknown_modality_is_named():
    data = {name: np.random.default_rng(0).random((20, 3, 3)) for name in "ab"}
    model = MMVRBM((2, 2), n_epochs=1).fit(data)
    for call in (model.predict, model.transform):
        with pytest.raises(
            ValueError, match=r"^'c' is not one of the modalities of the model, which are \['a', 'b'\]$"
        ):
            call({"c": data["a"]})
    with pytest.raises(ValueError, match="but 'b' is missing"):
        model.transform({"a": data["a"]})


@pytest.mark.parametrize(
    ("part", "message"),
    [
        (np.array([["a", "b"]] * 3), "modality 'a' must contain numbers, got an array of dtype <U1"),
        (np.ones((3, 2)) * 1j, "modality 'a' must contain numbers, got an array of dtype complex128"),
        ([[1.0], [2.0, 3.0]], "all samples of modality 'a' must have the same shape"),
        (np.ones((3, 0)), "samples of modality 'a' must not be empty"),
    ],
)
def test_modalities_that_are_no_numbers_are_named(part, message):
    with pytest.raises(ValueError, match=message):
        MMVRBM().fit({"a": part})


NAN = float("nan")
UNKNOWN = {
    "strings": (["cat", NAN, "dog", None], ["cat", "dog"]),
    "objects": (np.array(["cat", NAN, "dog", None], dtype=object), ["cat", "dog"]),
    "floats": ([0, NAN, 1, NAN], [0, 1]),
    "float array": (np.array([0, NAN, 1, NAN]), [0, 1]),
    "float series": (pd.Series([0, None, 1, None]), [0, 1]),
    "integer series": (pd.Series([0, None, 1, None], dtype="Int64"), [0, 1]),
    "string series": (pd.Series(["cat", None, "dog", None], dtype="string"), ["cat", "dog"]),
    "categories": (pd.Series(["cat", None, "dog", None], dtype="category"), ["cat", "dog"]),
}


@pytest.mark.parametrize("name", UNKNOWN)
def test_unknown_labels_of_all_types_are_not_a_class(name, digits, tmp_path):
    labels, classes = UNKNOWN[name]
    rows = digits[:4]
    masked = {"y": np.repeat([[True], [False], [True], [False]], 2, 1)}
    one_hot = np.array([[1, 0], [0, 1], [0, 1], [0, 1]], dtype=np.uint8)  # the second and the last row are masked
    model, same = (MMVRBM((3, 3), n_epochs=2, random_state=0) for _ in range(2))
    model.fit({"x": rows, "y": labels})
    assert model.classes_["y"].tolist() == classes
    same.fit({"x": rows, "y": one_hot}, mask=masked)
    np.testing.assert_array_equal(model.predict_proba({"x": rows}), same.predict_proba({"x": rows}))
    np.testing.assert_array_equal(model.class_count_["y"], [1, 1])
    loaded = mvrbm.load(model.save(tmp_path / "model"))
    np.testing.assert_array_equal(loaded.transform({"x": rows, "y": labels}), model.transform({"x": rows, "y": labels}))
    assert set(loaded.sample(20, steps=1)["y"].tolist()) == set(classes)


def test_floats_are_no_labels_unless_they_are_whole(digits):
    with pytest.raises(ValueError, match="modality 'y' must have at least 2 axes"):
        MMVRBM((3, 3), n_epochs=1).fit({"x": digits[:4], "y": [0.5, NAN, 1, 2]})


def test_the_label_prior_is_weighted():
    """The images are independent of the labels, so the posterior is the prior."""
    rng = generator("weighted prior")
    images = (rng.random((400, 4, 4)) < 0.5).astype(np.float32)
    labels = np.array(["a", "b"] * 200)
    weights = np.where(labels == "a", 9.0, 1.0)
    model = MMVRBM((2, 2), n_epochs=20, random_state=0).fit({"x": images, "y": labels}, sample_weight=weights)
    np.testing.assert_allclose(model.class_count_["y"], [1800, 200])
    assert model.predict_proba({"x": images})[:, 1].mean() == pytest.approx(0.1, abs=0.01)
    # 90 % of 500 labels, with a standard error of 1.3 %
    assert (model.sample(500, steps=1)["y"] == "a").mean() == pytest.approx(0.9, abs=0.07)


def test_a_class_of_weight_zero_is_never_sampled(digits):
    labels = np.arange(60) % 3
    model = MMVRBM((3, 3), n_epochs=1, random_state=0)
    model.fit({"x": digits[:60], "y": labels}, sample_weight=(labels != 2).astype(float))
    assert set(model.sample(200, steps=1)["y"].tolist()) == {0, 1}


def test_free_energies_sum_over_unknown_labels():
    """The sum over all labels and hidden states is written out."""
    rng = generator("unknown labels")
    images = (rng.random((6, 2, 2)) < 0.5).astype(np.float64)
    data = {"x": images, "a": np.arange(6) % 3, "b": np.arange(6) % 2}
    model = MMVRBM((2, 2), n_epochs=30, random_state=0, device="cpu").fit(data)
    machine = model.machine_
    hidden = torch.tensor(list(itertools.product([0.0, 1.0], repeat=4))).double().reshape(16, 2, 2)

    def free_energy(image, a, b):
        total = 0.0
        for i, j in itertools.product([a] if a is not None else range(3), [b] if b is not None else range(2)):
            state = {"x": torch.from_numpy(image), "a": torch.eye(3).double()[i], "b": torch.eye(2).double()[j]}
            repeated = {name: part[None].expand(16, *part.shape) for name, part in state.items()}
            total += float(torch.exp(-machine.energy(repeated, hidden).detach()).sum())
        return -np.log(total)

    a, b = [0, None, 2, None, 1, 0], [0, 1, None, None, 0, 1]
    found = model.free_energy({"x": images, "a": np.array(a, dtype=object), "b": np.array(b, dtype=object)})
    np.testing.assert_allclose(found, [free_energy(*one) for one in zip(images, a, b, strict=True)], rtol=1e-6)
    images[0, 0, 0] = NAN
    with pytest.raises(ValueError, match="X contains NaN, but free_energy requires complete samples"):
        model.free_energy({**data, "x": images})
