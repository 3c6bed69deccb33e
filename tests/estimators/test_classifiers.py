"""Classifiers: against enumeration, finite differences, networks by hand, and scikit-learn's own checks."""

import math

import numpy as np
import pandas as pd
import pytest
import torch
from sklearn.base import clone
from sklearn.datasets import load_digits
from sklearn.model_selection import cross_val_score
from sklearn.utils.estimator_checks import parametrize_with_checks

from enumeration import Written
from mvrbm import (
    MVRBM,
    Bernoulli,
    BoltzmannMachine,
    Categorical,
    ClassificationMVRBM,
    DeepMVRBM,
    DeepMVRBMClassifier,
    Dense,
    Kronecker,
    MVRBMClassifier,
    RandomSource,
    Rectified,
)
from mvrbm.estimators.classifiers import StructuredNetwork, _field, _sway, label_log_posterior
from mvrbm.estimators.deep import Layer
from mvrbm.learning import DivergenceError, Recipe, Trainer
from mvrbm.learning.backprop import Plan, Replayed, descend
from mvrbm.saving import StorageError, from_pretrained
from tables import CONNECTED, generator, machine_named, random_states, randomise


@pytest.fixture(scope="module")
def digits():
    return (load_digits().images[:600] / 16).astype(np.float32)  # (600, 8, 8)


@pytest.fixture(scope="module")
def labels():
    return load_digits().target[:600]


FAST = {"n_epochs": 8, "batch_size": 20, "learning_rate": 0.02, "random_state": 0}
EVERY_KIND = {
    "one layer": lambda: MVRBMClassifier((6, 6), rank=2, dropout=0.1, **FAST),
    "another coupling": lambda: MVRBMClassifier((12,), coupling=Dense(), hidden="bernoulli", **FAST),
    "pre-trained stack": lambda: DeepMVRBMClassifier(
        ((7, 7), Layer(20, Dense())), rank=2, pretraining=2, dropout=(0.1, 0.0), **FAST
    ),
    "averaged, stopped early": lambda: DeepMVRBMClassifier(
        ((6, 6),), hidden="bernoulli", early_stopping=True, averaging=0.9, **FAST
    ),
    "discriminative": lambda: ClassificationMVRBM((6, 6), rank=2, **FAST),
    "generative": lambda: ClassificationMVRBM((6, 6), rank=2, mode="generative", **{**FAST, "learning_rate": None}),
    "hybrid": lambda: ClassificationMVRBM((12,), coupling=Dense(), mode="hybrid", blend=0.1, **FAST),
}


# -- exact p(label | X) -----------------------------------------------------------------------------------


@pytest.mark.parametrize(("name", "label"), [("image and label", "label"), ("three kinds over bits", "word")])
@torch.no_grad()
def test_label_probabilities_are_those_of_enumeration(name, label):
    machine = machine_named(name)
    states = random_states(machine, 4, generator("states"))
    n_labels = machine.layers[label].shape[-1]
    written, energies = Written(machine), []
    for k in range(n_labels):
        here = torch.zeros_like(states[label])
        here[..., k] = 1
        energies.append(written.free_energy({**states, label: here}))
    expected = torch.log_softmax(-torch.stack(energies, 1), 1)
    others = {layer: array for layer, array in states.items() if layer != label}
    torch.testing.assert_close(label_log_posterior(machine, others, label), expected, rtol=1e-10, atol=1e-10)


def test_classification_machine_predicts_what_enumeration_says():
    rng = generator("tiny classifier")
    X, y = (rng.random((12, 2, 2)) < 0.5).astype(float), np.array(["b", "a", "c"] * 4)
    model = ClassificationMVRBM((2, 1), n_epochs=1, random_state=0).fit(X, y)
    randomise(model.machine_, rng)
    written, eye = Written(model.machine_), torch.eye(3, dtype=torch.float64)
    with torch.no_grad():
        pairs = [{"visible": torch.from_numpy(X), "label": eye[k].expand(12, 3)} for k in range(3)]
        energies = torch.stack([written.free_energy(pair) for pair in pairs], 1)
    np.testing.assert_allclose(model.predict_proba(X), torch.softmax(-energies, 1), rtol=1e-10)
    assert model.classes_.tolist() == ["a", "b", "c"]
    np.testing.assert_array_equal(model.predict(X), model.classes_[(-energies).argmax(1)])


def test_rectified_hidden_units_have_no_exact_posterior():
    machine = BoltzmannMachine(
        {"x": Bernoulli(3), "label": Categorical(2)}, Rectified(2), {"x": Dense(), "label": Dense()}
    )
    with pytest.raises(ValueError, match="no exact distribution"):
        label_log_posterior(machine, {"x": torch.ones(1, 3)})


# -- gradients --------------------------------------------------------------------------------------------


def by_finite_differences(value, parameter, step=1e-6):
    """Slope of value() along every entry of a parameter."""
    slopes = torch.zeros_like(parameter)
    flat, out = parameter.data.reshape(-1), slopes.reshape(-1)
    for entry in range(len(flat)):
        kept = float(flat[entry])
        ends = []
        for side in (step, -step):
            flat[entry] = kept + side
            ends.append(float(value().detach()))
        flat[entry] = kept
        out[entry] = (ends[0] - ends[1]) / (2 * step)
    return slopes


@pytest.mark.parametrize("hidden", ["bernoulli", "rectified"])
def test_gradient_of_fine_tuning_is_that_of_finite_differences(hidden):
    rng = generator(f"fine-tuning {hidden}")
    stack = DeepMVRBM(((3, 2), (2, 2)), rank=2, hidden=hidden, n_epochs=0, random_state=0).fit(rng.random((5, 3, 4)))
    network = StructuredNetwork(stack.machines_, 3).double()
    for machine in stack.machines_:
        randomise(machine, rng)
    with torch.no_grad():
        network.weight.copy_(torch.from_numpy(rng.standard_normal(network.weight.shape)))
    x, codes = torch.from_numpy(rng.random((5, 3, 4))), torch.tensor([0, 1, 2, 1, 0])

    def loss():
        return torch.nn.functional.cross_entropy(network(x), codes)

    learned = {name: p for name, p in network.named_parameters() if p.requires_grad}
    assert not any("visible.visible" in name and "bias" in name for name in learned if ".couplings." not in name)
    slopes = torch.autograd.grad(loss(), list(learned.values()))
    for (name, parameter), slope in zip(learned.items(), slopes, strict=True):
        torch.testing.assert_close(slope, by_finite_differences(loss, parameter), rtol=1e-5, atol=1e-8, msg=name)


def test_discriminative_gradient_is_that_of_finite_differences():
    machine = machine_named("image and label")
    x = random_states(machine, 5, generator("x"))["image"]
    codes = torch.tensor([0, 1, 2, 1, 0])

    def loss():
        return -label_log_posterior(machine, {"image": x}).gather(1, codes[:, None]).mean()

    for name in ("couplings.image.factors.0", "couplings.label.weight", "hidden.bias", "visible.label.bias"):
        parameter = machine.get_parameter(name)
        (slope,) = torch.autograd.grad(loss(), parameter)
        torch.testing.assert_close(slope, by_finite_differences(loss, parameter), rtol=1e-5, atol=1e-8, msg=name)


@pytest.mark.parametrize("connected", CONNECTED)
def test_the_fast_layout_gives_the_same_fields(connected):
    coupling, visible, hidden = CONNECTED[connected]
    link = coupling().connect(visible, hidden, RandomSource(0), 1.0).double()
    x = torch.from_numpy(generator("x").standard_normal((4, *visible)))
    torch.testing.assert_close(_field(link, x), link.to_hidden(x), rtol=1e-12, atol=1e-12)


# -- the network ------------------------------------------------------------------------------------------


def test_a_dense_network_is_a_multilayer_perceptron(digits, labels):
    model = DeepMVRBMClassifier((Layer(9, Dense()), Layer(7, Dense(), "bernoulli")), n_epochs=2, random_state=0)
    model.fit(digits.astype(float), labels)
    first, second = model.network_.stack
    W1, c1 = first.links["visible"].weight.detach().numpy(), first.hidden.bias.detach().numpy()
    W2, c2 = second.links["visible"].weight.detach().numpy(), second.hidden.bias.detach().numpy()
    s = second.layers["visible"].scale.detach().numpy()  # rectified layers are seen in units of their spread
    o = second.layers["visible"].bias.detach().numpy()
    z = np.maximum(0, digits.reshape(len(digits), -1) @ W1.T + c1)
    z = 1 / (1 + np.exp(-((z - o) / s @ W2.T + c2)))
    np.testing.assert_allclose(model.hidden_maps(digits.astype(float)), z, rtol=1e-6)
    logits = z @ model.network_.weight.detach().numpy().T + model.network_.bias.detach().numpy()
    expected = np.exp(logits) / np.exp(logits).sum(1, keepdims=True)
    np.testing.assert_allclose(model.predict_proba(digits.astype(float)), expected, rtol=1e-6)
    assert model.n_parameters_ == 9 * 64 + 9 + 7 * 9 + 7 + 10 * 7 + 10


@pytest.mark.parametrize("visible", ["bernoulli", "gaussian"])
def test_before_fine_tuning_features_are_those_of_the_stack(digits, labels, visible):
    X = 3 + 20 * digits if visible == "gaussian" else digits
    settings = {"rank": 2, "hidden": "bernoulli", "visible": visible, "random_state": 4}
    model = DeepMVRBMClassifier(((6, 6), (5, 5)), pretraining=2, n_epochs=0, **settings).fit(X, labels)
    stack = DeepMVRBM(((6, 6), (5, 5)), n_epochs=2, **settings).fit(X)
    np.testing.assert_array_equal(model.stack_.transform(X), stack.transform(X))
    np.testing.assert_allclose(model.hidden_maps(X), stack.hidden_maps(X), atol=1e-5)
    np.testing.assert_allclose(model.predict_proba(X), 0.1)


def test_unlabelled_data_and_a_fitted_stack_are_where_it_starts(digits, labels):
    settings = {"rank": 2, "hidden": "bernoulli", "random_state": 4}
    make = lambda: MVRBMClassifier((6, 6), pretraining=2, n_epochs=3, **settings)  # noqa: E731
    by_data = make().fit(digits[:90], labels[:90], unlabelled=digits)
    stack = DeepMVRBM(((6, 6),), n_epochs=2, **settings).fit(digits)
    before = stack.transform(digits)
    by_stack = make().fit(digits[:90], labels[:90], stack=stack)
    np.testing.assert_array_equal(by_data.predict_proba(digits), by_stack.predict_proba(digits))
    np.testing.assert_array_equal(stack.transform(digits), before)
    without = make().fit(digits[:90], labels[:90])
    assert not np.array_equal(by_data.predict_proba(digits), without.predict_proba(digits))
    with pytest.raises(ValueError, match="stack must have the same layers"):
        MVRBMClassifier((6, 5), **settings).fit(digits, labels, stack=stack)
    with pytest.raises(ValueError, match="unlabelled must have samples of X's shape"):
        make().fit(digits[:90], labels[:90], unlabelled=digits[:, :7])
    with pytest.raises(ValueError, match="unlabelled is for pre-training"):
        MVRBMClassifier((6, 6)).fit(digits, labels, unlabelled=digits)


def test_a_random_start_has_fields_of_the_wanted_spread(digits, labels):
    model = DeepMVRBMClassifier(((20, 20), (20, 20)), rank=4, n_epochs=0, random_state=0).fit(digits, labels)
    x = torch.from_numpy(digits)
    network = model.network_
    with torch.no_grad():
        for number, machine in enumerate(network.stack):
            field = machine.links["visible"].to_hidden(network.inputs(x, number))
            assert float(field.square().mean().sqrt()) == pytest.approx(math.sqrt(2), rel=0.25)
            x = torch.relu(field + machine.hidden.bias)


# -- the descent ------------------------------------------------------------------------------------------


def quadratic(n=4):
    """A module of one parameter, and losses (w - i)^2 / 2 of samples i."""
    module = torch.nn.Linear(1, 1, bias=False)
    with torch.no_grad():
        module.weight.zero_()
    seen = []

    def loss(rows):
        seen.append(float(module.weight.detach()))
        return ((module.weight.reshape(()) - rows) ** 2).sum() / 2

    return module, loss, seen


def plan(**changes):
    return Plan(n_epochs=6, batch_size=9, learning_rate=0.1, weight_decay=0.0, schedule="constant", averaging=0.0,
                patience=None)._replace(**changes)  # fmt: skip


def test_early_stopping_restores_the_best_pass():
    module, loss, _ = quadratic()
    scores = iter([(0.5, 0.2), (0.3, 0.9), (0.3, 0.4), (0.3, 0.5), (0.4, 0.1), (0.1, 0.0)])
    weights = []

    def score():
        weights.append(float(module.weight.detach()))
        return next(scores)

    history = descend(module, [], loss, torch.ones(4), plan(patience=2), RandomSource(0), score)
    assert [row["validation_error"] for row in history] == [0.5, 0.3, 0.3, 0.3, 0.4]  # two passes after the third
    assert float(module.weight.detach()) == weights[2] != weights[-1]


def test_averaging_is_a_running_mean_and_is_what_is_scored():
    module, loss, seen = quadratic()
    scored = []
    score = lambda: (scored.append(float(module.weight.detach())), (1 / len(scored), 0.0))[1]  # noqa: E731
    descend(module, [], loss, torch.ones(4), plan(averaging=0.5), RandomSource(0), score)
    visited = [*seen[1:]]  # after updates 1 to 5; the sixth is not seen
    mean, means = 0.0, []
    for number, weight in enumerate(visited, start=1):
        share = max(0.5, 1 / (1 + number / 10))
        mean += share * (weight - mean)
        means.append(mean)
    np.testing.assert_allclose(scored[:5], means, rtol=1e-6)
    assert float(module.weight.detach()) == scored[-1]


def test_the_rate_falls_along_a_cosine_and_decay_pulls_weights_alone():
    for schedule in ("cosine", "constant"):
        module, loss, seen = quadratic()
        descend(
            module,
            [],
            lambda rows, loss=loss: 100 * loss(rows),
            torch.ones(4),
            plan(schedule=schedule),
            RandomSource(0),
        )
        steps = np.diff([*seen, float(module.weight.detach())])
        expected = 0.1 * (1 + np.cos(np.pi * np.arange(6) / 6)) / 2 if schedule == "cosine" else np.full(6, 0.1)
        np.testing.assert_allclose(steps[0], expected[0], rtol=1e-4)  # Adam's first steps are as long as the rate
        assert (steps[-1] < 0.2 * steps[0]) == (schedule == "cosine")
    module = torch.nn.Linear(1, 1)
    with torch.no_grad():
        module.weight.fill_(1), module.bias.fill_(1)
    flat = lambda rows: 0 * (module.weight.sum() + module.bias.sum())  # noqa: E731
    descend(module, [module.weight], flat, torch.ones(4), plan(weight_decay=0.5, n_epochs=1), RandomSource(0))
    assert float(module.weight.detach()) == pytest.approx(1 - 0.1 * 0.5)
    assert float(module.bias.detach()) == 1


def test_a_loss_that_is_not_finite_ends_training(digits, labels):
    with pytest.raises(DivergenceError, match="Lower learning_rate"):
        MVRBMClassifier((6, 6), learning_rate=1e30, n_epochs=5, random_state=0).fit(digits, labels)


# -- predictions that change slowly -----------------------------------------------------------------------


@pytest.fixture(scope="module")
def fitted(digits, labels):
    return MVRBMClassifier((6, 6), rank=2, dropout=0, **FAST).fit(digits.astype(float), labels)


def divergence(network, x, y):
    """KL(p(. | x) || p(. | y)), written out."""
    p, q = torch.softmax(network(x), 1), torch.softmax(network(y), 1)
    return (p * (p / q).log()).sum(1)


def _sway_at(network, x, **settings):
    with torch.enable_grad():
        return _sway(network, x, 0.5, RandomSource(0), **settings).detach()


def test_sway_is_a_divergence_to_a_point_at_the_distance_and_more_than_at_random(digits, fitted):
    network, x, seen = fitted.network_, torch.from_numpy(digits[:50].astype(float)), []
    remember = network.register_forward_pre_hook(lambda _, inputs: seen.append(inputs[0].detach()))
    sway = _sway_at(network, x)
    remember.remove()
    probe, moved = seen[-2], seen[-1]
    for point in (probe, moved):
        np.testing.assert_allclose((point - x).flatten(1).norm(dim=1), 0.5, rtol=1e-6)
    with torch.no_grad():
        torch.testing.assert_close(sway, divergence(network, x, moved), rtol=1e-6, atol=1e-12)
        assert float(sway.mean()) > 3 * float(divergence(network, x, probe).mean())
        q = torch.softmax(network(moved), 1)
        more = _sway_at(network, x, certainty=0.5) - sway
        torch.testing.assert_close(more, -0.5 * (q * q.log()).sum(1), rtol=1e-6, atol=1e-12)


def test_only_where_the_prediction_is_moved_to_has_a_gradient(digits, fitted):
    network, x = fitted.network_, torch.from_numpy(digits[:20].astype(float))
    seen = []
    remember = network.register_forward_pre_hook(lambda _, inputs: seen.append(inputs[0].detach()))
    (slope,) = torch.autograd.grad(_sway(network, x, 0.5, RandomSource(0)).sum(), network.bias)
    remember.remove()
    with torch.no_grad():
        p, q = torch.softmax(network(x), 1), torch.softmax(network(seen[-1]), 1)
    torch.testing.assert_close(slope, (q - p).sum(0))  # that of KL(p || softmax(logits)) with p fixed


def test_perturbation_makes_predictions_change_slowly_at_the_unlabelled_samples(digits, labels):
    settings = {"hidden_shape": (8, 8), "rank": 4, "dropout": 0, **FAST, "n_epochs": 30, "learning_rate": 0.01}

    def sway(model):
        return float(_sway(model.network_, torch.from_numpy(digits[300:]), 0.5, RandomSource(0)).detach().mean())

    plain = MVRBMClassifier(**settings).fit(digits[:100], labels[:100])
    smooth = MVRBMClassifier(perturbation=0.5, **settings).fit(digits[:100], labels[:100])
    smoother = MVRBMClassifier(perturbation=0.5, unlabelled_batch_size=100, **settings)
    smoother.fit(digits[:100], labels[:100], unlabelled=digits)
    assert sway(smooth) < 0.8 * sway(plain)
    assert sway(smoother) < 0.6 * sway(smooth)
    assert smoother.score(digits[300:], labels[300:]) > 0.7


@pytest.mark.parametrize(("name", "value"), [("perturbation", -1.0), ("certainty", -1.0), ("unlabelled_batch_size", 0)])
def test_senseless_perturbations_are_refused(name, value, digits, labels):
    with pytest.raises(ValueError, match=name):
        MVRBMClassifier((4, 4), **{name: value}).fit(digits, labels)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_replayed_updates_are_the_updates(digits, labels, monkeypatch):
    make = lambda: DeepMVRBMClassifier(  # noqa: E731
        ((8, 8), (6, 6)), rank=2, n_epochs=5, batch_size=64, dropout=0.2, perturbation=0.5, averaging=0.9, random_state=0,
        device="cuda",
    )  # fmt: skip
    replayed = make().fit(digits, labels)
    monkeypatch.setattr(Replayed, "_EAGER_UPDATES", math.inf)
    launched = make().fit(digits, labels)
    np.testing.assert_allclose(replayed.predict_proba(digits), launched.predict_proba(digits), atol=1e-3)
    assert replayed.history_[-1]["loss"] == pytest.approx(launched.history_[-1]["loss"], rel=1e-3)


# -- weights, labels, files -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "make",
    [
        lambda: MVRBMClassifier((4, 4), rank=2, dropout=0, batch_size=1000, n_epochs=10, random_state=0),
        lambda: ClassificationMVRBM((4, 4), rank=2, batch_size=1000, n_epochs=10, random_state=0),
    ],
)
def test_weight_two_is_a_sample_twice_and_weight_zero_none(make, digits, labels):
    X, y = digits[:60].astype(float), labels[:60]
    weights = np.array([2, 1, 0] * 20)
    rows = np.repeat(np.arange(60), weights)
    by_weight, by_rows = make().fit(X, y, sample_weight=weights), make().fit(X[rows], y[rows])
    np.testing.assert_allclose(by_weight.predict_proba(X), by_rows.predict_proba(X), rtol=1e-6)
    assert not np.allclose(by_weight.predict_proba(X), make().fit(X, y).predict_proba(X), rtol=1e-3)


@pytest.mark.parametrize("kind", EVERY_KIND)
def test_saved_and_loaded_it_predicts_the_same(kind, digits, labels, tmp_path):
    names = np.array(["zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine"])[labels]
    model = EVERY_KIND[kind]().fit(digits, names)
    assert model.score(digits, names) > 0.5
    again = type(model).from_pretrained(model.save_pretrained(tmp_path / "model"))
    np.testing.assert_array_equal(again.predict_proba(digits), model.predict_proba(digits))
    np.testing.assert_array_equal(again.predict(digits[:9]), model.predict(digits[:9]))
    assert again.classes_.tolist() == sorted(set(names.tolist()))
    apart = ("random_state", "coupling", "layers", "device", "dropout")
    mine = {k: v for k, v in model.get_params().items() if k not in apart}
    assert {k: again.get_params()[k] for k in mine} == mine
    np.testing.assert_allclose(model.predict_proba(digits).sum(1), 1, rtol=1e-5)
    clone(again).set_params(n_epochs=1).fit(digits[:50], labels[:50])


@pytest.mark.parametrize("classes", [[3, 7], [1.0, 2.0], [True, False], np.array(["x", "yy"], dtype=object)])
def test_labels_of_every_kind_come_back(classes, digits, tmp_path):
    y = np.asarray(classes)[np.arange(30) % 2]
    model = MVRBMClassifier((3, 3), n_epochs=1, random_state=0).fit(digits[:30], y)
    again = MVRBMClassifier.from_pretrained(model.save_pretrained(tmp_path / "model"))
    assert again.predict(digits[:5]).dtype == model.predict(digits[:5]).dtype == y.dtype
    assert again.classes_.tolist() == sorted(classes)


def test_damaged_files_are_refused(digits, labels, tmp_path):
    folder = tmp_path / "model"
    model = MVRBMClassifier((3, 3), n_epochs=1, random_state=0).fit(digits, labels)
    model.save_pretrained(folder)
    with pytest.raises(StorageError, match="does not hold a DeepMVRBMClassifier but a MVRBMClassifier"):
        DeepMVRBMClassifier.from_pretrained(folder)
    config = (folder / "config.json").read_text()
    for old, new in [('"values": [', '"values": [11, '), ('"classes"', '"class"'), ('"dtype": "<i8"', '"dtype": "M8"'),
                     ('"visible": "bernoulli"', '"visible": "gaussian"')]:  # fmt: skip
        assert old in config
        (folder / "config.json").write_text(config.replace(old, new))
        with pytest.raises(StorageError):
            MVRBMClassifier.from_pretrained(folder)


def test_the_classification_machine_is_a_machine(digits, labels, tmp_path):
    model = EVERY_KIND["generative"]().fit(digits, labels)
    machine = from_pretrained(model.save_pretrained(tmp_path / "model"))
    assert list(machine.layers) == ["visible", "label"]
    X, y = model.sample(6, steps=5)
    assert X.shape == (6, 8, 8)
    assert set(y) <= set(range(10))
    assert model.sample(3, label=7, steps=2)[1].tolist() == [7, 7, 7]
    with pytest.raises(ValueError, match="label must be one of"):
        model.sample(label=11)


# -- three ways to learn ----------------------------------------------------------------------------------


def test_generative_learning_is_the_trainers(digits, labels):
    model = ClassificationMVRBM((5, 5), mode="generative", n_epochs=2, random_state=6).fit(digits, labels)
    machine = BoltzmannMachine(
        {"visible": Bernoulli((8, 8)), "label": Categorical(10)},
        Bernoulli((5, 5)),
        {"visible": Kronecker(), "label": Dense()},
    )
    seed = int(np.random.RandomState(6).randint(2**31 - 1))
    one_hot = torch.nn.functional.one_hot(torch.from_numpy(labels), 10).float()
    Trainer(machine, Recipe(n_epochs=2), seed=seed).fit({"visible": digits, "label": one_hot})
    for name, parameter in machine.named_parameters():
        torch.testing.assert_close(parameter, model.machine_.get_parameter(name), msg=name)


def test_a_hybrid_without_its_generative_part_is_discriminative(digits, labels):
    settings = {"hidden_shape": (5, 5), "n_epochs": 2, "random_state": 0}
    told = ClassificationMVRBM(**settings).fit(digits, labels)
    blend = ClassificationMVRBM(mode="hybrid", blend=0.0, **settings).fit(digits, labels)
    np.testing.assert_allclose(blend.predict_proba(digits), told.predict_proba(digits), atol=1e-6)
    more = ClassificationMVRBM(mode="hybrid", blend=1.0, **settings).fit(digits, labels)
    assert not np.allclose(more.predict_proba(digits), told.predict_proba(digits), atol=1e-3)
    assert all(p.requires_grad for name, p in more.machine_.named_parameters() if "log_variance" not in name)


def test_discriminative_learning_tells_better_generative_learning_models_better(digits, labels):
    told = ClassificationMVRBM((8, 8), rank=4, n_epochs=20, learning_rate=0.02, random_state=0)
    told.fit(digits[:400], labels[:400])
    joint = ClassificationMVRBM((8, 8), rank=4, n_epochs=20, mode="generative", random_state=0)
    joint.fit(digits[:400], labels[:400])

    def reconstruction(model):
        x = {"visible": torch.from_numpy(digits), "label": model._one_hot(torch.from_numpy(labels))}
        back = model.machine_.visible_mean(model.machine_.hidden_mean(x))["visible"].detach().numpy()
        return ((back - digits) ** 2).sum()

    assert told.score(digits[:400], labels[:400]) > joint.score(digits[:400], labels[:400])
    assert reconstruction(joint) < reconstruction(told)


# -- manners ----------------------------------------------------------------------------------------------


def test_early_stopping_holds_out_a_share_of_every_class(digits, labels):
    model = MVRBMClassifier((6, 6), early_stopping=True, validation_fraction=0.2, n_epochs=3, random_state=0)
    data = model._labelled(digits, labels, None)
    learns, held = model._split(data, RandomSource(0))
    assert len(learns.codes) + len(held.codes) == 600
    whole, part = np.bincount(labels), np.bincount(held.codes, minlength=10)
    assert np.abs(part - 0.2 * whole).max() <= 1
    model.fit(digits, labels)
    assert set(model.history_[0]) == {"epoch", "loss", "validation_error", "validation_loss"}
    best = min((row["validation_error"], row["validation_loss"]) for row in model.history_)
    seed = int(np.random.RandomState(0).randint(2**31 - 1))
    _, held = model._split(data, RandomSource(seed).split(4)[1])
    assert model._error_and_loss(held) == pytest.approx(best, rel=1e-6)


def test_bytes_rows_frames_and_arrays_are_the_same_data(digits, labels):
    grey = np.round(digits * 255).astype(np.uint8)
    make = lambda: MVRBMClassifier((5, 5), visible_shape=(8, 8), n_epochs=2, random_state=0)  # noqa: E731
    by_bytes, by_floats = make().fit(grey, labels), make().fit((grey / 255).astype(np.float32), labels)
    np.testing.assert_allclose(by_bytes.predict_proba(grey), by_floats.predict_proba(grey / 255), atol=1e-4)
    rows = digits.reshape(600, -1)
    by_rows, by_arrays = make().fit(rows, labels), make().fit(digits, labels)
    np.testing.assert_array_equal(by_rows.predict_proba(digits), by_arrays.predict_proba(rows))
    frame = pd.DataFrame(rows, columns=[f"p{k}" for k in range(64)])
    assert make().fit(frame, labels).feature_names_in_[3] == "p3"
    assert cross_val_score(make().set_params(**FAST), rows, labels, cv=2).mean() > 0.5


MISTAKES = [
    ({"n_epochs": -1}, "n_epochs must be a whole number of at least 0, got -1"),
    ({"batch_size": 0}, "batch_size must be a whole number of at least 1, got 0"),
    ({"learning_rate": 0.0}, "learning_rate must be positive"),
    ({"schedule": "linear"}, "schedule must be 'cosine' or 'constant', got 'linear'"),
    ({"dropout": 1.0}, "dropout must be at least 0 and below 1"),
    ({"dropout": (0.1, 0.2)}, "dropout must be one number, or one for each of 1 layers"),
    ({"input_dropout": -0.1}, "input_dropout must be at least 0"),
    ({"averaging": 1.0}, "averaging must be at least 0 and below 1"),
    ({"weight_decay": -1.0}, "weight_decay must be at least 0"),
    ({"pretraining": -1}, "pretraining must be a number of passes"),
    ({"early_stopping": True, "validation_fraction": 1.5}, "validation_fraction must lie between 0 and 1"),
    ({"early_stopping": True, "patience": 0}, "patience must be at least 1"),
    ({"hidden": "gaussian"}, "hidden units of layer 0 must be one of"),
]


@pytest.mark.parametrize(("settings", "message"), MISTAKES)
def test_mistakes_are_named(settings, message, digits, labels):
    with pytest.raises(ValueError, match=message):
        MVRBMClassifier((3, 3), **{"n_epochs": 1, **settings}).fit(digits[:40], labels[:40])


def test_mistakes_of_the_classification_machine_are_named(digits, labels):
    for settings, message in [({"mode": "both"}, "mode must be one of"), ({"blend": -1.0}, "blend must be at least 0")]:
        with pytest.raises(ValueError, match=message):
            ClassificationMVRBM((3, 3), **settings).fit(digits, labels)
    with pytest.raises(ValueError, match="sample_weight must be equal"):
        ClassificationMVRBM((3, 3), mode="generative").fit(digits, labels, sample_weight=np.arange(600.0))
    with pytest.raises(ValueError, match="at least two classes, got one class"):
        MVRBMClassifier((3, 3)).fit(digits, np.ones(600))
    model = MVRBMClassifier((3, 3), n_epochs=1).fit(digits, labels)
    with pytest.raises(ValueError, match=r"samples must have shape \(8, 8\), got \(7, 8\)"):
        model.predict(digits[:, :7])
    assert isinstance(MVRBM((3, 3), n_epochs=1).fit(digits).transform(digits), np.ndarray)


@pytest.mark.filterwarnings("ignore::sklearn.exceptions.SkipTestWarning")
@parametrize_with_checks(
    [
        MVRBMClassifier(16, visible="gaussian", dropout=0.0, batch_size=1000, n_epochs=40, learning_rate=0.03),
        DeepMVRBMClassifier(
            (16, 16), visible="gaussian", dropout=0.0, batch_size=1000, n_epochs=40, learning_rate=0.03
        ),
        ClassificationMVRBM(16, visible="gaussian", batch_size=1000, n_epochs=40, learning_rate=0.03),
    ]
)
def test_scikit_learn_check(estimator, check):
    check(estimator)
