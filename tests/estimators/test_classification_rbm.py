"""The classification RBM: against enumeration, finite differences and the trainer."""

import dataclasses

import numpy as np
import pytest
import torch

import mvrbm
from enumeration import Written
from mvrbm import (
    Bernoulli,
    BoltzmannMachine,
    Categorical,
    ClassificationMVRBM,
    Dense,
    Kronecker,
    RandomSource,
    Rectified,
)
from mvrbm.estimators.classification_rbm import label_log_posterior
from mvrbm.estimators.labels import Labeled
from mvrbm.training import Callback, Trainer
from mvrbm.updates.recipe import RECIPES
from tables import generator, machine_named, random_states, randomize


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
    randomize(model.machine_, rng)
    written, eye = Written(model.machine_), torch.eye(3, dtype=torch.float64)
    with torch.no_grad():
        pairs = [{"visible": torch.from_numpy(X), "label": eye[k].expand(12, 3)} for k in range(3)]
        energies = torch.stack([written.free_energy(pair) for pair in pairs], 1)
    np.testing.assert_allclose(model.predict_proba(X), torch.softmax(-energies, 1), rtol=1e-10)
    np.testing.assert_allclose(model.free_energy(X), -torch.logsumexp(-energies, 1), rtol=1e-10)
    assert model.classes_.tolist() == ["a", "b", "c"]
    np.testing.assert_array_equal(model.predict(X), model.classes_[(-energies).argmax(1)])


def test_rectified_hidden_units_have_no_exact_posterior():
    machine = BoltzmannMachine(
        {"x": Bernoulli(3), "label": Categorical(2)}, Rectified(2), {"x": Dense(), "label": Dense()}
    )
    with pytest.raises(ValueError, match="no exact distribution"):
        label_log_posterior(machine, {"x": torch.ones(1, 3)})


def test_discriminative_gradient_is_that_of_finite_differences(by_finite_differences):
    machine = machine_named("image and label")
    x = random_states(machine, 5, generator("x"))["image"]
    codes = torch.tensor([0, 1, 2, 1, 0])

    def loss():
        return -label_log_posterior(machine, {"image": x}).gather(1, codes[:, None]).mean()

    for name in ("couplings.image.factors.0", "couplings.label.weight", "hidden.bias", "visible.label.bias"):
        parameter = machine.get_parameter(name)
        (slope,) = torch.autograd.grad(loss(), parameter)
        torch.testing.assert_close(slope, by_finite_differences(loss, parameter), rtol=1e-5, atol=1e-8, msg=name)


@pytest.mark.parametrize("mode", ["discriminative", "hybrid"])
def test_the_loss_is_that_of_enumerated_free_energies(mode, by_finite_differences):
    rng = generator("loss of a classifier")
    X, y = (rng.random((6, 2, 2)) < 0.5).astype(float), np.array([0, 1, 2] * 2)
    model = ClassificationMVRBM((2, 1), mode=mode, blend=0.3, n_epochs=0, random_state=0).fit(X, y)
    machine = model.machine_
    randomize(machine, rng)
    data = Labeled(torch.from_numpy(X), torch.from_numpy(y), torch.from_numpy(rng.random(6)))
    rows = torch.tensor([5, 0, 3, 1])

    def loss():
        return model._loss(data, rows, RandomSource(1))

    x, codes, weights = (part[rows] for part in data)
    eye, numbers = torch.eye(3, dtype=torch.float64), RandomSource(1)
    with torch.no_grad():
        written = Written(machine)
        free = torch.stack([written.free_energy({"visible": x, "label": eye[k].expand(4, 3)}) for k in range(3)], 1)
        own = free[range(4), codes]
        expected = (weights * (own + torch.logsumexp(-free, 1))).sum()  # -log p(label | data)
        if mode == "hybrid":
            hidden = machine.sample_hidden({"visible": x, "label": eye[codes]}, numbers)
            chain = machine.sample_visible(hidden, numbers)
            expected += 0.3 * (weights * (own - written.free_energy(chain))).sum()
    torch.testing.assert_close(loss().detach(), expected, rtol=1e-10, atol=1e-10)
    for name in ("couplings.visible.factors.0", "couplings.label.weight", "hidden.bias", "visible.label.bias"):
        parameter = machine.get_parameter(name)
        (slope,) = torch.autograd.grad(loss(), parameter)
        # A step this small changes no sample of the chain.
        torch.testing.assert_close(slope, by_finite_differences(loss, parameter), rtol=1e-5, atol=1e-7, msg=name)


@pytest.mark.parametrize("visible", ["bernoulli", "gaussian"])
def test_training_starts_with_hidden_fields_of_mean_zero(visible):
    rng = np.random.default_rng(0)
    X, weights = rng.random((50, 3, 4)) ** 3, rng.random(50)
    y = np.arange(50) % 7 % 3  # classes of unequal size
    model = ClassificationMVRBM((2, 5), visible=visible, n_epochs=0, random_state=0).fit(X, y, weights)
    machine, share = model.machine_, weights / weights.sum()
    mean = np.tensordot(share, X, 1)
    deviation = np.sqrt(np.tensordot(share, (X - mean) ** 2, 1))
    U, V = (factor[0].detach().numpy() for factor in machine.links["visible"].factors)
    statistic = X / deviation if visible == "gaussian" else X
    fields = np.einsum("ki,nij,lj->nkl", U, statistic, V)
    np.testing.assert_allclose(np.tensordot(share, fields, 1), -machine.hidden.bias.detach(), atol=1e-9)
    assert np.abs(machine.hidden.bias.detach().numpy()).max() > 0.1
    frequency = np.array([share[y == label].sum() for label in range(3)])
    bias = machine.layers["label"].bias.detach()
    np.testing.assert_allclose(torch.softmax(bias, 0), frequency, atol=0.02)  # smoothed by pseudo-counts


def test_the_classification_machine_is_a_machine(digits, labels, tmp_path):
    model = ClassificationMVRBM((6, 6), mode="generative", n_epochs=2, random_state=0).fit(digits, labels)
    again = mvrbm.load(model.save(tmp_path / "model"))
    assert list(again.machine_.layers) == list(model.machine_.layers) == ["visible", "label"]
    X, y = model.sample(6, steps=5)
    assert X.shape == (6, 8, 8)
    assert set(y) <= set(range(10))
    assert model.sample(3, label=7, steps=2)[1].tolist() == [7, 7, 7]
    with pytest.raises(ValueError, match="label must be one of"):
        model.sample(label=11)


def test_generative_learning_is_the_trainers(digits, labels):
    model = ClassificationMVRBM((5, 5), mode="generative", n_epochs=2, random_state=6).fit(digits, labels)
    machine = BoltzmannMachine(
        {"visible": Bernoulli((8, 8)), "label": Categorical(10)},
        Bernoulli((5, 5)),
        {"visible": Kronecker(), "label": Dense()},
    )
    seed = int(np.random.RandomState(6).randint(2**31 - 1))
    one_hot = torch.nn.functional.one_hot(torch.from_numpy(labels), 10).float()
    recipe = dataclasses.replace(RECIPES["generative"], n_epochs=2)
    Trainer(machine, recipe, seed=seed).fit({"visible": digits, "label": one_hot}, initialize=True)
    for name, parameter in machine.named_parameters():
        if name != "visible.label.bias":  # it is matched to the labels afterwards
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
    def two_models(**settings):
        models = [ClassificationMVRBM((8, 8), rank=4, n_epochs=20, random_state=seed, **settings) for seed in range(2)]
        return [model.fit(digits[:400], labels[:400]) for model in models]

    told, joint = two_models(learning_rate=0.02), two_models(mode="generative")

    def reconstruction(model):
        x = {"visible": torch.from_numpy(digits), "label": model._one_hot(torch.from_numpy(labels))}
        back = model.machine_.visible_mean(model.machine_.hidden_mean(x))["visible"].detach().numpy()
        return ((back - digits) ** 2).sum()

    for one, other in zip(told, joint, strict=True):
        assert one.score(digits[:400], labels[:400]) > other.score(digits[:400], labels[:400])
    assert sum(map(reconstruction, joint)) < sum(map(reconstruction, told))


def test_mistakes_of_the_classification_machine_are_named(digits, labels):
    for settings, message in [({"mode": "both"}, "mode must be one of"), ({"blend": -1.0}, "blend must be at least 0")]:
        with pytest.raises(ValueError, match=message):
            ClassificationMVRBM((3, 3), **settings).fit(digits, labels)


@pytest.mark.parametrize("mode", ["discriminative", "hybrid"])
def test_callbacks_that_would_not_be_called_raise(mode, digits, labels):
    with pytest.raises(ValueError, match=f"callbacks require mode='generative', got mode='{mode}'"):
        ClassificationMVRBM((3, 3), mode=mode, n_epochs=1).fit(digits, labels, callbacks=[Callback()])
