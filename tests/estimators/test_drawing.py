"""Samples of fitted models: conditional distributions against enumeration, initial states, saved chains, warnings."""

import json
import warnings

import numpy as np
import pytest
import torch
from scipy import stats

import mvrbm
from enumeration import Written, every_visible_state
from mvrbm import MMVRBM, MVRBM, RBM, TVRBM, ClassificationMVRBM, DeepMVRBM, RandomSource
from mvrbm.errors import RecipeWarning, StorageError
from mvrbm.estimators import classification_rbm, multimodal
from mvrbm.estimators.initial_states import MOST_CHAINS, initial_states_with_labels
from mvrbm.estimators.labels import label_codes
from mvrbm.sampling import match_label_shares
from mvrbm.training import PCD, Recipe
from tables import generator, randomize

CLASSES = ["ant", "bee", "cow"]


def tiny(kind):
    """Return a model of 2x2 bits and a label, with large random weights, its two layers, and its images of a label."""
    rng = generator("tiny")
    bits, y = (rng.random((12, 2, 2)) < 0.5).astype(float), np.array(CLASSES * 4)
    if kind is ClassificationMVRBM:
        model = ClassificationMVRBM((2, 1), mode="generative", n_epochs=1, random_state=0).fit(bits, y)
        names, draw = ("visible", "label"), lambda **how: model.sample(4000, **how)
    else:
        model = MMVRBM((2, 1), recipe="generative", n_epochs=1, random_state=0).fit({"image": bits, "animal": y})
        names, draw = ("image", "animal"), lambda **how: tuple(model.sample(4000, **how).values())
    randomize(model.machine_, rng)
    return model, names, draw


def conditional(model, names, code):
    """Return all images, and p(image | label), summed state by state."""
    states = every_visible_state(model.machine_)
    rows = states[names[1]].argmax(1) == code
    states = {name: array[rows] for name, array in states.items()}
    with torch.no_grad():
        p = torch.softmax(-Written(model.machine_).free_energy(states), 0)
    return states[names[0]].flatten(1).numpy(), p.numpy()


@pytest.mark.parametrize("kind", [ClassificationMVRBM, MMVRBM])
@pytest.mark.parametrize("init", ["chains", "noise"])
def test_samples_of_a_label_follow_the_conditional_distribution(kind, init):
    model, names, draw = tiny(kind)
    for code, label in enumerate(CLASSES):
        images, p = conditional(model, names, code)
        drawn, labels = draw(label=label, steps=30, init=init)
        assert set(labels) == {label}
        codes = 2 ** np.arange(4)
        order = np.argsort(images @ codes)
        counts = np.bincount((drawn.reshape(-1, 4) @ codes).astype(int), minlength=16)
        assert stats.chisquare(counts, 4000 * p[order]).pvalue > 1e-5
        means, _ = draw(label=label, steps=30, init=init, mean=True)
        assert len(np.unique(means)) > 2
        np.testing.assert_allclose(means.reshape(-1, 4).mean(0), p @ images, atol=0.03)


@pytest.mark.parametrize("kind", [ClassificationMVRBM, MMVRBM])
def test_labels_can_differ_from_sample_to_sample(kind):
    model, _, _ = tiny(kind)
    found = model.sample(label=["cow", "ant", "cow"], steps=2)
    labels = found[1] if isinstance(found, tuple) else found["animal"]
    assert labels.tolist() == ["cow", "ant", "cow"]
    with pytest.raises(ValueError, match=r"label must be one of \['ant', 'bee', 'cow'\], got 'dog'"):
        model.sample(2, label="dog")
    with pytest.raises(ValueError, match="n = 3 labels, got an array of shape"):
        model.sample(3, label=["cow", "ant"])


def test_labels_are_numbers_texts_or_one_hot_rows(digits, labels):
    settings = {"mode": "generative", "n_epochs": 1, "random_state": 0}
    one = ClassificationMVRBM((4, 4), **settings).fit(digits, labels)
    other = ClassificationMVRBM((4, 4), **settings).fit(digits, np.eye(10)[labels])
    text = ClassificationMVRBM((4, 4), **settings).fit(digits, labels.astype(str))
    np.testing.assert_array_equal(
        one.machine_.links["visible"].dense().detach(), other.machine_.links["visible"].dense().detach()
    )
    assert other.classes_.tolist() == list(range(10))
    assert text.sample(2, label="7", steps=1)[1].tolist() == ["7", "7"]
    assert one.sample(2, label="7", steps=1)[1].tolist() == [7, 7]  # a text stands for the class written so
    with pytest.raises(ValueError, match="label must be one of"):
        label_codes(7, np.array(["6", "7"]), 1)


@pytest.mark.parametrize("how", ["vector", "one-hot rows"])
def test_a_modality_can_be_a_label(how, digits, labels, tmp_path):
    given = labels if how == "vector" else np.eye(10, dtype=np.float32)[labels]
    visible = "bernoulli" if how == "vector" else {"image": "bernoulli", "digit": "categorical"}
    data = {"image": digits, "digit": given}
    model = MMVRBM((5, 5), rank=2, visible=visible, recipe="generative", n_epochs=2, random_state=0).fit(data)
    assert {name: link.name for name, link in model.machine_.links.items()} == {"image": "kronecker", "digit": "dense"}
    loaded = mvrbm.load(model.save(tmp_path / "model"))
    assert loaded.transform(data).shape == (600, 25)
    drawn = loaded.sample(4, label=7, steps=3, mean=True)
    assert drawn["image"].shape == (4, 8, 8)
    np.testing.assert_array_equal(drawn["digit"], [7] * 4 if how == "vector" else np.eye(10)[[7] * 4])
    assert len(loaded.sample(3, steps=2)["digit"]) == 3
    np.testing.assert_array_equal(loaded.sample(2, steps=3)["image"], model.sample(2, steps=3)["image"])
    found = loaded.inpaint(data, {"digit": np.False_}, steps=2, burn_in=1)["digit"]
    np.testing.assert_allclose(found.sum(1), 1, rtol=1e-5)  # a probability of each class
    np.testing.assert_array_equal(loaded.transform({"image": digits, "digit": labels}), model.transform(data))
    with pytest.raises(ValueError, match="label must be one of"):
        loaded.transform({"image": digits[:1], "digit": np.array([11])})


def test_several_labels_are_given_by_name(digits, labels):
    data = {"image": digits, "digit": labels, "odd": np.where(labels % 2, "odd", "even")}
    settings = {"coupling": {"image": "kronecker:2"}, "visible": {"image": "bernoulli"}, "recipe": "generative"}
    model = MMVRBM((4, 4), n_epochs=1, random_state=0, **settings).fit(data)
    drawn = model.sample(2, label={"odd": "even", "digit": [2, 4]}, steps=2)
    assert (drawn["odd"].tolist(), drawn["digit"].tolist()) == (["even", "even"], [2, 4])
    assert set(model.sample(5, label={"odd": "odd"}, steps=2)["odd"]) == {"odd"}
    with pytest.raises(ValueError, match="label must be a dict whose keys are one or more of"):
        model.sample(2, label=7)
    with pytest.raises(ValueError, match="cannot be combined"):
        model.sample(2, label={"odd": "odd"}, init=data)
    with pytest.raises(ValueError, match="label must be a dict whose keys are one or more of"):
        MMVRBM((4, 4), n_epochs=1).fit({"image": digits}).sample(label=7)


def test_chains_with_the_label_are_preferred():
    model, _, _ = tiny(ClassificationMVRBM)
    eye, images = torch.eye(3, dtype=torch.float64), torch.zeros(4, 2, 2, dtype=torch.float64)
    images[1, 0, 0], images[3, 1, 1] = 1, 1
    chains = {"visible": images, "label": eye[[0, 1, 0, 1]]}
    codes = torch.tensor([1, 1, 1, 2])
    start, known = initial_states_with_labels(model.machine_, {"label": codes}, None, chains, RandomSource(0))
    torch.testing.assert_close(start["visible"][:3], images[[1, 3, 1]])
    torch.testing.assert_close(start["visible"][3], images[3])  # no chain has this label: any
    torch.testing.assert_close(start["label"], eye[codes])
    assert known["label"].all()
    assert "visible" not in known


@pytest.mark.parametrize("visible", ["bernoulli", "gaussian", "poisson"])
@pytest.mark.parametrize("negative", ["pcd", "tempered"])
def test_chains_are_saved_with_the_model(visible, negative, digits, tmp_path):
    settings = {"recipe": "generative", "negative": negative, "n_chains": 120, "n_epochs": 1, "random_state": 0}
    data = np.rint(4 * digits) if visible == "poisson" else digits
    model = MVRBM((4, 4), visible=visible, **settings).fit(data)
    chains = model.chains_["visible"]
    every = model.trainer_.state.chains["visible"]
    torch.testing.assert_close(chains, (every[-1] if negative == "tempered" else every)[:MOST_CHAINS])
    loaded = mvrbm.load(model.save(tmp_path / "model"))
    torch.testing.assert_close(loaded.chains_["visible"], chains)
    np.testing.assert_array_equal(loaded.sample(130, steps=2), model.sample(130, steps=2, init="chains"))
    if visible == "bernoulli":
        assert (tmp_path / "model" / "chains.safetensors").stat().st_size < 1000
    loaded.save(tmp_path / "model", overwrite=True)  # chains included, it may be replaced
    again = mvrbm.load(tmp_path / "model")
    torch.testing.assert_close(again.chains_["visible"], chains)


def test_a_model_without_chains_starts_from_noise(digits, tmp_path):
    model = MVRBM((4, 4), n_epochs=1, random_state=0).fit(digits)
    assert model.chains_ == {}
    folder = model.save(tmp_path / "model")
    assert not (folder / "chains.safetensors").exists()
    np.testing.assert_array_equal(model.sample(3, steps=2), model.sample(3, steps=2, init="noise"))
    with pytest.raises(ValueError, match="has no chains"):
        model.sample(3, init="chains")
    with pytest.raises(ValueError, match="init must be one of"):
        model.sample(3, init="data")


def test_damaged_chains_are_found_out(digits, tmp_path):
    model = MVRBM((4, 4), recipe="generative", n_epochs=1, random_state=0).fit(digits)
    small = MVRBM((4, 4), recipe="generative", n_epochs=1, random_state=0).fit(digits[:, :4])
    folder, other = model.save(tmp_path / "model"), small.save(tmp_path / "other")
    for content in (b"nonsense", (other / "chains.safetensors").read_bytes()):
        (folder / "chains.safetensors").write_bytes(content)
        with pytest.raises(StorageError, match=r"chains\.safetensors"):
            mvrbm.load(folder)


def test_means_are_those_given_the_hidden_draw(digits):
    model = MVRBM((4, 4), recipe="generative", n_epochs=2, random_state=0).fit(digits)
    known = np.zeros((8, 8), bool)
    known[:3] = True
    means = model.sample(5, steps=3, init=digits[:5], mask=known, mean=True)
    np.testing.assert_array_equal(means[:, :3], digits[:5, :3])
    assert len(np.unique(means[:, 3:])) > 20
    many = model.sample(20_000, steps=2, init="noise").mean(0)
    np.testing.assert_allclose(model.sample(20_000, steps=2, init="noise", mean=True).mean(0), many, atol=0.02)


def test_stacks_draw_means_of_the_lowest_layer(digits):
    stack = DeepMVRBM(((5, 5), (4, 4)), recipe="generative", n_epochs=1, random_state=0).fit(digits)
    assert stack.chains_["visible"].shape == (100, 5, 5)
    draws, means = stack.sample(4, steps=2), stack.sample(4, steps=2, mean=True)
    assert set(np.unique(draws)) <= {0, 1}
    assert draws.shape == means.shape == (4, 8, 8)
    assert ((means > 0) & (means < 1)).all()
    single = DeepMVRBM(((4, 4),), recipe="generative", n_epochs=1, random_state=0).fit(digits)
    assert len(np.unique(single.sample(3, steps=2, mean=True))) > 20


SUITED = [
    {"recipe": "generative"},
    {"recipe": "generative", "negative": "tempered"},
    {"recipe": Recipe(negative=PCD(20), rate_decay=None)},
]
UNSUITED = [
    ({}, r"CD\(steps=1\)"),
    ({"recipe": "paper"}, r"CD\(steps=1\)"),
    ({"negative": "pcd"}, "decays after 30 updates"),
    ({"recipe": "generative", "negative": "cd"}, r"CD\(steps=1\)"),
]


@pytest.mark.parametrize("settings", SUITED)
def test_generative_recipes_do_not_warn(settings, digits):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        model = MVRBM((3, 3), n_epochs=1, random_state=0, **settings).fit(digits)
        model.sample(1, steps=1)
        model.inpaint(digits[:2], np.arange(64).reshape(8, 8) < 9, steps=1, burn_in=0)


@pytest.mark.parametrize(("settings", "reason"), UNSUITED)
def test_other_recipes_warn_once(settings, reason, digits, tmp_path):
    folder = MVRBM((3, 3), n_epochs=1, random_state=0, **settings).fit(digits).save(tmp_path / "model")
    uses = [lambda m: m.sample(1, steps=1), lambda m: m.inpaint(digits[:2], np.ones((8, 8), bool), steps=1)]
    for order in (uses, uses[::-1]):
        model = mvrbm.load(folder)
        with pytest.warns(RecipeWarning, match=reason) as caught:
            [use(model) for use in order]
        assert len(caught) == 1
        assert "recipe='generative'" in str(caught[0].message)
        assert caught[0].filename == __file__


def test_classifiers_warn_of_their_mode(digits, labels):
    model = ClassificationMVRBM((3, 3), n_epochs=1, random_state=0).fit(digits, labels)
    with pytest.warns(RecipeWarning, match="mode='discriminative'; training with mode='generative' and recipe="):
        model.sample(1, steps=1)
    model = ClassificationMVRBM((3, 3), n_epochs=1, random_state=0, mode="generative", recipe="default")
    with pytest.warns(RecipeWarning, match="CD"):
        model.fit(digits, labels).sample(1, steps=1)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        ClassificationMVRBM((3, 3), n_epochs=1, mode="generative").fit(digits, labels).sample(1, steps=1)


@pytest.mark.parametrize("start", CLASSES)
def test_labels_change_although_they_rule_the_hidden_layer(start):
    """A label that is sampled given the hidden layer alone would keep its initial value for thousands of steps."""
    model, names, _ = tiny(MMVRBM)
    link = model.machine_.links[names[1]]
    with torch.no_grad():
        link.weight.mul_(8)
        link.weight.sub_(link.weight.mean(1, keepdim=True))
    states = every_visible_state(model.machine_)
    p = torch.softmax(-Written(model.machine_).free_energy(states), 0).detach()
    expected = (p @ states[names[1]]).numpy()
    init = {names[0]: np.zeros((4000, 2, 2)), names[1]: np.full(4000, start)}
    drawn = model.sample(4000, init=init, steps=20)[names[1]]
    counts = [int((drawn == name).sum()) for name in CLASSES]
    assert stats.chisquare(counts, 4000 * expected).pvalue > 1e-5


def test_labels_are_drawn_as_often_as_given():
    model, names, _ = tiny(MMVRBM)
    machine, shares = model.machine_, torch.tensor([0.2, 0.3, 0.5], dtype=torch.float64)
    wanted = np.repeat(CLASSES, [4000, 6000, 10_000])
    drawn = model.sample(label=wanted, steps=30, init="noise")[names[0]]
    match_label_shares(machine, {names[0]: torch.from_numpy(drawn)}, names[1], shares)
    states = every_visible_state(machine)
    with torch.no_grad():
        p = torch.softmax(-Written(machine).free_energy(states), 0) @ states[names[1]]  # enumerated
    np.testing.assert_allclose(p, shares, atol=0.02)


@pytest.mark.parametrize("kind", [ClassificationMVRBM, MMVRBM])
def test_labels_are_matched_to_their_frequencies_in_the_data(kind, monkeypatch):
    matched = []
    for module in (classification_rbm, multimodal):
        monkeypatch.setattr(module, "match_labels", lambda _, label, shares, __: matched.append((label, shares)))
    y, bits = np.repeat(["a", "b", "c"], [12, 6, 2]), generator("matched").integers(2, size=(20, 2, 2)).astype(float)
    settings = {"recipe": "generative", "n_epochs": 1, "batch_size": 20, "random_state": 0}
    if kind is MMVRBM:
        MMVRBM((2, 1), **settings).fit({"visible": bits, "label": y})
    else:
        ClassificationMVRBM((2, 1), mode="generative", **settings).fit(bits, y)
    ((label, shares),) = matched
    assert label == "label"
    np.testing.assert_allclose(shares, [0.6, 0.3, 0.1])


@pytest.mark.parametrize("kind", [ClassificationMVRBM, MMVRBM])
def test_a_trained_model_draws_labels_as_often_as_its_data(kind):
    rng = generator("shares")
    y = np.repeat([0, 1], [150, 50])
    bits = (rng.random((200, 2, 2)) < np.where(y, 0.7, 0.4)[:, None, None]).astype(np.float32)
    settings = {"recipe": "generative", "n_epochs": 20, "batch_size": 20, "random_state": 0}
    if kind is MMVRBM:
        model, names = MMVRBM((2, 1), **settings).fit({"visible": bits, "label": y}), ("visible", "label")
    else:
        model, names = ClassificationMVRBM((2, 1), mode="generative", **settings).fit(bits, y), ("visible", "label")
    states = every_visible_state(model.machine_.double())
    with torch.no_grad():
        p = torch.softmax(-Written(model.machine_).free_energy(states), 0) @ states[names[1]]
    np.testing.assert_allclose(p, [0.75, 0.25], atol=0.06)


@pytest.mark.parametrize("kind", [ClassificationMVRBM, MMVRBM])
def test_classes_of_samples_are_as_frequent_as_in_the_data(kind, tmp_path):
    """The labels of chains hardly ever change: 100 chains would repeat the frequencies of 100 labels."""
    rng = generator("frequencies")
    y = np.array(CLASSES)[rng.permutation(np.repeat([0, 1, 2], [200, 80, 20]))]
    bits = (rng.random((300, 3, 3)) < np.where(y == "bee", 0.8, 0.3)[:, None, None]).astype(np.float32)
    if kind is ClassificationMVRBM:
        model = ClassificationMVRBM((2, 2), mode="generative", n_epochs=1, random_state=0).fit(bits, y)
        counts = model.class_count_
    else:
        model = MMVRBM((2, 2), n_epochs=1, random_state=0).fit({"image": bits, "animal": y})
        counts = model.class_count_["animal"]
    np.testing.assert_array_equal(counts, [200, 80, 20])
    loaded = mvrbm.load(model.save(tmp_path / "model"))
    for each in (model, loaded):
        drawn = each.sample(2000, steps=2)
        labels = drawn[1] if kind is ClassificationMVRBM else drawn["animal"]
        found = [int((labels == name).sum()) for name in CLASSES]
        assert stats.chisquare(found, 2000 * counts / 300).pvalue > 1e-4
    config = tmp_path / "model" / "config.json"
    described = json.loads(config.read_text())
    key = next(key for key, value in described.items() if isinstance(value, dict) and "class_count" in value)
    del described[key]["class_count"]  # as in version 0.2
    config.write_text(json.dumps(described))
    former = mvrbm.load(tmp_path / "model").sample(5, steps=2)
    assert len(former[1] if kind is ClassificationMVRBM else former["animal"]) == 5
    described[key]["class_count"] = [1, -1] if kind is ClassificationMVRBM else {"animal": [1, -1]}
    config.write_text(json.dumps(described))
    with pytest.raises(StorageError, match="class_count must contain 3 nonnegative numbers"):
        mvrbm.load(tmp_path / "model")


def test_only_known_labels_are_counted():
    rng = generator("counted")
    data = {"image": rng.random((6, 2, 2)), "animal": np.array(["ant", None, "bee", "ant", "cow", "cow"], dtype=object)}
    mask = {"animal": np.repeat([[True], [True], [True], [True], [True], [False]], 3, 1)}
    model = MMVRBM((2, 2), n_epochs=1, random_state=0).fit(data, mask=mask)
    np.testing.assert_array_equal(model.class_count_["animal"], [2, 1, 1])
    model.partial_fit(data, mask=mask)
    np.testing.assert_array_equal(model.class_count_["animal"], [4, 2, 2])


def test_other_labels_are_sampled_given_the_first(digits, labels):
    data = {"image": digits, "digit": labels, "odd": np.where(labels % 2, "odd", "even")}
    model = MMVRBM((4, 4), n_epochs=1, random_state=0).fit(data)
    drawn = model.sample(50, steps=3)
    same = model.sample(label={"digit": drawn["digit"]}, steps=3)
    for name, part in drawn.items():
        np.testing.assert_array_equal(part, same[name])


def test_samples_have_the_format_of_training_data(digits, labels):
    """`sample` returns what `fit` takes."""
    quick = {"n_epochs": 1, "recipe": "generative", "random_state": 0}
    for kind in (RBM, MVRBM, TVRBM, DeepMVRBM):
        shape = {"layers": ((3, 3), (2, 2))} if kind is DeepMVRBM else {"hidden_shape": 9 if kind is RBM else (3, 3)}
        for given in (digits, digits.reshape(len(digits), -1)):
            reads_rows = kind is not RBM and given.ndim == 2
            if kind is RBM and given.ndim == 3:
                continue
            settings = {**quick, **shape, **({"visible_shape": (8, 8)} if reads_rows else {})}
            assert kind(**settings).fit(given).sample(2, steps=1).shape == (2, *given.shape[1:])
    samples, drawn = ClassificationMVRBM((3, 3), mode="generative", **quick).fit(digits, labels).sample(2, steps=1)
    assert (samples.shape, drawn.shape) == ((2, 8, 8), (2,))
    data = {"image": digits, "digit": labels}
    found = MMVRBM((3, 3), **quick).fit(data).sample(2, steps=1)
    assert {name: part.shape for name, part in found.items()} == {"image": (2, 8, 8), "digit": (2,)}


def test_a_sample_without_known_entries_gets_the_means_of_the_model():
    images = np.zeros((200, 4, 4))
    images[::4] = 1.0  # a quarter of all images is white
    model = MVRBM((2, 2), n_epochs=0, random_state=0).fit(images)
    unknown = np.full((300, 4, 4), np.nan)
    filled = model.inpaint(unknown)
    np.testing.assert_allclose(filled.mean(), 0.25, atol=0.03)
    mixed = np.concatenate([unknown[:1], images[:1]])
    np.testing.assert_array_equal(model.inpaint(mixed)[1], images[0])
