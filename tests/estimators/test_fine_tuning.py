"""The loss of fine-tuning, written out: dropout, sample weights, and perturbed samples with and without labels."""

import numpy as np
import pytest
import torch

from mvrbm import DeepMVRBM, Dense, RandomSource
from mvrbm.estimators import Layer
from mvrbm.estimators.adversarial_loss import virtual_adversarial_loss
from mvrbm.estimators.fine_tuning import FineTuningLoss
from mvrbm.estimators.labels import Labeled
from mvrbm.estimators.network import StructuredNetwork
from tables import generator, randomize

DROPPED = (0.1, 0.6, 0.3)  # of the data and of two layers


def new_loss(**settings):
    rng = generator("loss of fine-tuning")
    layers = (Layer((5,), Dense()), Layer((4,), Dense()))
    stack = DeepMVRBM(layers, hidden="rectified", n_epochs=0, random_state=0).fit(rng.random((5, 6)))
    network = StructuredNetwork(stack.machines_, 3).double()
    for machine in stack.machines_:
        randomize(machine, rng)
    with torch.no_grad():
        network.weight.copy_(torch.from_numpy(rng.standard_normal(network.weight.shape)))
    data = Labeled(*map(torch.from_numpy, (rng.random((9, 6)), rng.integers(3, size=9), rng.random(9))))
    usual = {
        "dropped": (0.0, 0.0, 0.0),
        "distance": 0.0,
        "unlabeled": None,
        "unlabeled_batch_size": 4,
        "certainty": 0.0,
        "weight_of_batch": 2.5,
        "dropout_rng": RandomSource(1),
        "perturbation_rng": RandomSource(2),
    }
    return FineTuningLoss(network, data, **{**usual, **settings})


ROWS = torch.tensor([8, 0, 5, 2])


def cross_entropies(loss, shares):
    """Weighted sum of -log p(class), with dropout rates for the data and for each layer."""
    network, numbers = loss.network, RandomSource(1)
    z, codes, weights = (part[ROWS].numpy() for part in loss.data)

    def drop(z, share):
        kept = numbers.uniform(z.shape, torch.empty(0).double()).numpy() >= share if share else np.ones(z.shape)
        return z * kept / (1 - share)

    z = drop(z, shares[0])
    for machine, share in zip(network.stack, shares[1:], strict=True):
        weight, bias = (p.detach().numpy() for p in (machine.links["visible"].weight, machine.hidden.bias))
        unit = machine.layers["visible"]
        if unit.gaussian:  # the layer above rectified units
            z = (z - unit.bias.detach().numpy()) / unit.scale.detach().numpy()
        z = drop(np.maximum(z @ weight.T + bias, 0), share)
    logits = z @ network.weight.detach().numpy().T + network.bias.detach().numpy()
    log_probabilities = logits - np.log(np.exp(logits).sum(1, keepdims=True))
    return -(weights * log_probabilities[range(4), codes]).sum()


@pytest.mark.parametrize("shares", [(0.0, 0.0, 0.0), DROPPED])
def test_each_layer_drops_its_share_and_keeps_its_mean(shares):
    loss = new_loss(dropped=shares)
    assert float(loss(ROWS).detach()) == pytest.approx(cross_entropies(loss, shares), rel=1e-10)


def test_perturbed_samples_count_by_weight_and_unlabeled_ones_as_a_batch():
    loss = new_loss(distance=0.5)
    alone = virtual_adversarial_loss(loss.network, loss.data.samples[ROWS], 0.5, RandomSource(2)).detach()
    expected = cross_entropies(loss, (0.0, 0.0, 0.0)) + float((loss.data.weights[ROWS] * alone).sum())
    assert float(loss(ROWS).detach()) == pytest.approx(expected, rel=1e-10)

    unlabeled = torch.from_numpy(generator("unlabeled").random((50, 6)))
    loss = new_loss(distance=0.5, unlabeled=unlabeled, certainty=0.7)
    numbers = RandomSource(2)
    chosen = (50 * numbers.uniform((4,), unlabeled)).long()
    moved = virtual_adversarial_loss(loss.network, unlabeled[chosen], 0.5, numbers, 0.7).detach()
    expected = cross_entropies(loss, (0.0, 0.0, 0.0)) + 2.5 * float(moved.mean())
    assert float(loss(ROWS).detach()) == pytest.approx(expected, rel=1e-10)
