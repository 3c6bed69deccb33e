"""Gradient descent by backpropagation: early stopping, averaging, learning rate, weight decay and random numbers."""

import numpy as np
import pytest
import torch

from mvrbm import RandomSource
from mvrbm.training.backprop import DescentSettings, Objective, descend


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


def settings(**changes):
    default = DescentSettings(
        n_epochs=6, batch_size=9, learning_rate=0.1, weight_decay=0.0, schedule="constant", averaging=0.0, patience=None
    )
    return default._replace(**changes)


def test_early_stopping_ends_with_the_best_epoch():
    module, loss, _ = quadratic()
    scores = iter([(0.5, 0.2), (0.3, 0.9), (0.3, 0.4), (0.3, 0.5), (0.4, 0.1), (0.1, 0.0)])
    weights = []

    def score():
        weights.append(float(module.weight.detach()))
        return next(scores)

    history = descend(module, Objective(loss, torch.ones(4)), settings(patience=2), RandomSource(0), score).history
    assert [row["validation_error"] for row in history] == [0.5, 0.3, 0.3, 0.3, 0.4]  # two epochs after the third
    assert float(module.weight.detach()) == weights[2] != weights[-1]


def test_averaging_is_a_running_mean_and_is_what_is_scored():
    module, loss, seen = quadratic()
    scored = []
    score = lambda: (scored.append(float(module.weight.detach())), (1 / len(scored), 0.0))[1]  # noqa: E731
    descend(module, Objective(loss, torch.ones(4)), settings(averaging=0.5), RandomSource(0), score)
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
            Objective(lambda rows, loss=loss: 100 * loss(rows), torch.ones(4)),
            settings(schedule=schedule),
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
    decaying = [module.weight]
    descend(
        module,
        Objective(flat, torch.ones(4)),
        settings(weight_decay=0.5, n_epochs=1),
        RandomSource(0),
        decaying=decaying,
    )
    assert float(module.weight.detach()) == pytest.approx(1 - 0.1 * 0.5)
    assert float(module.bias.detach()) == 1


def test_random_numbers_of_the_loss_depend_on_the_update_alone():
    """Sources of the loss advance by one step per update, however many numbers each update draws."""
    source, expected = RandomSource(4), RandomSource(4)
    module = torch.nn.Linear(1, 1, bias=False)
    seen = []

    def loss(rows):
        for _ in range(1 + len(seen) % 2):
            drawn = source.uniform((2,), torch.empty(0))
        seen.append(drawn)
        return module.weight.sum() * 0

    objective = Objective(loss, torch.ones(4), draws_from=(source,))
    descend(module, objective, settings(n_epochs=2, batch_size=2), RandomSource(0))
    assert len(seen) == 4
    for update, drawn in enumerate(seen):
        numbers = expected.at_step(update, draw=update % 2)
        assert torch.equal(drawn, numbers.uniform((2,), torch.empty(0)))
