"""Networks of structured layers: against finite differences, networks by hand, and definitions."""

import math

import numpy as np
import pytest
import torch

from mvrbm import DeepMVRBM, DeepMVRBMClassifier, Dense, MVRBMClassifier, RandomSource
from mvrbm.estimators import Layer
from mvrbm.estimators.adversarial_loss import virtual_adversarial_loss
from mvrbm.estimators.network import StructuredNetwork, field_of
from tables import CONNECTED, generator, randomize


@pytest.mark.parametrize("hidden", ["bernoulli", "rectified"])
def test_gradient_of_fine_tuning_is_that_of_finite_differences(hidden, by_finite_differences):
    rng = generator(f"fine-tuning {hidden}")
    stack = DeepMVRBM(((3, 2), (2, 2)), rank=2, hidden=hidden, n_epochs=0, random_state=0).fit(rng.random((5, 3, 4)))
    network = StructuredNetwork(stack.machines_, 3).double()
    for machine in stack.machines_:
        randomize(machine, rng)
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


@pytest.mark.parametrize("connected", CONNECTED)
def test_the_fast_layout_gives_the_same_fields(connected):
    coupling, visible, hidden = CONNECTED[connected]
    link = coupling().connect(visible, hidden, RandomSource(0), 1.0).double()
    x = torch.from_numpy(generator("x").standard_normal((4, *visible)))
    torch.testing.assert_close(field_of(link, x), link.to_hidden(x), rtol=1e-12, atol=1e-12)


def test_a_dense_network_is_a_multilayer_perceptron(digits, labels):
    model = DeepMVRBMClassifier((Layer(9, Dense()), Layer(7, Dense(), "bernoulli")), n_epochs=2, random_state=0)
    model.fit(digits.astype(float), labels)
    first, second = model.network_.stack
    W1, c1 = first.links["visible"].weight.detach().numpy(), first.hidden.bias.detach().numpy()
    W2, c2 = second.links["visible"].weight.detach().numpy(), second.hidden.bias.detach().numpy()
    s = second.layers["visible"].scale.detach().numpy()  # data of rectified layers is in units of their spread
    o = second.layers["visible"].bias.detach().numpy()
    z = np.maximum(0, digits.reshape(len(digits), -1) @ W1.T + c1)
    z = 1 / (1 + np.exp(-((z - o) / s @ W2.T + c2)))
    np.testing.assert_allclose(model.hidden_maps(digits.astype(float)), z, rtol=1e-6)
    logits = z @ model.network_.weight.detach().numpy().T + model.network_.bias.detach().numpy()
    expected = np.exp(logits) / np.exp(logits).sum(1, keepdims=True)
    np.testing.assert_allclose(model.predict_proba(digits.astype(float)), expected, rtol=1e-6)
    assert model.n_parameters_ == 9 * 64 + 9 + 7 * 9 + 7 + 10 * 7 + 10


def test_a_random_start_has_fields_of_the_wanted_spread(digits, labels):
    model = DeepMVRBMClassifier(((20, 20), (20, 20)), rank=4, n_epochs=0, random_state=0).fit(digits, labels)
    x = torch.from_numpy(digits)
    network = model.network_
    with torch.no_grad():
        for number, machine in enumerate(network.stack):
            field = machine.links["visible"].to_hidden(network.inputs(x, number))
            assert float(field.square().mean().sqrt()) == pytest.approx(math.sqrt(2), rel=0.25)
            x = torch.relu(field + machine.hidden.bias)


def test_visible_biases_are_log_odds_with_one_pseudo_count_per_value():
    x = torch.tensor([[1.0, 1, 0], [1, 0, 0], [1, 1, 0], [1, 0, 0]])[:, None]  # (4, 1, 3)
    weights = torch.tensor([1.0, 2, 3, 4])
    stack = DeepMVRBM(((1, 2),), n_epochs=0, random_state=0).fit(np.eye(3, dtype=np.float32)[:, None])
    StructuredNetwork(stack.machines_, 2).initialize(x, weights, RandomSource(0))
    bias = stack.machines_[0].layers["visible"].bias.detach()
    ones, zeros = torch.tensor([[10.0, 4, 0]]), torch.tensor([[0.0, 6, 10]])
    torch.testing.assert_close(bias, ((ones + 1) / (zeros + 1)).log())


@pytest.fixture(scope="module")
def fitted(digits, labels):
    return MVRBMClassifier(
        (6, 6), rank=2, dropout=0, perturbation=0, n_epochs=8, batch_size=20, learning_rate=0.02, random_state=0
    ).fit(digits.astype(float), labels)


def divergence(network, x, y):
    """KL(p(. | x) || p(. | y)), written out."""
    p, q = torch.softmax(network(x), 1), torch.softmax(network(y), 1)
    return (p * (p / q).log()).sum(1)


def change_at(network, x, **settings):
    with torch.enable_grad():
        return virtual_adversarial_loss(network, x, 0.5, RandomSource(0), **settings).detach()


def test_sway_is_a_divergence_to_a_point_at_the_distance_and_more_than_at_random(digits, fitted):
    network, x, seen = fitted.network_, torch.from_numpy(digits[:50].astype(float)), []
    remember = network.register_forward_pre_hook(lambda _, inputs: seen.append(inputs[0].detach()))
    sway = change_at(network, x)
    remember.remove()
    probe, moved = seen[-2], seen[-1]
    for point in (probe, moved):
        np.testing.assert_allclose((point - x).flatten(1).norm(dim=1), 0.5, rtol=1e-6)
    with torch.no_grad():
        torch.testing.assert_close(sway, divergence(network, x, moved), rtol=1e-6, atol=1e-12)
        assert float(sway.mean()) > 3 * float(divergence(network, x, probe).mean())
        q = torch.softmax(network(moved), 1)
        more = change_at(network, x, certainty=0.5) - sway
        torch.testing.assert_close(more, -0.5 * (q * q.log()).sum(1), rtol=1e-6, atol=1e-12)


def test_only_where_the_prediction_is_moved_to_has_a_gradient(digits, fitted):
    network, x = fitted.network_, torch.from_numpy(digits[:20].astype(float))
    seen = []
    remember = network.register_forward_pre_hook(lambda _, inputs: seen.append(inputs[0].detach()))
    (slope,) = torch.autograd.grad(virtual_adversarial_loss(network, x, 0.5, RandomSource(0)).sum(), network.bias)
    remember.remove()
    with torch.no_grad():
        p, q = torch.softmax(network(x), 1), torch.softmax(network(seen[-1]), 1)
    torch.testing.assert_close(slope, (q - p).sum(0))  # that of KL(p || softmax(logits)) with p fixed
