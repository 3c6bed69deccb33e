"""Masked prediction, compared with masks counted by hand, enumerated conditionals and exact Gaussian predictions."""

import math

import pytest
import torch

from mvrbm import Bernoulli, BoltzmannMachine, Categorical, Dense, Gaussian, Poisson, RandomSource
from mvrbm.likelihood.masked_prediction import block_masks, masked_errors


def excess_errors(*arguments, **settings):
    errors, variances = masked_errors(*arguments, **settings)
    return errors - variances


@pytest.mark.parametrize(
    ("shape", "block", "parts"), [((28, 28), (4, 4), 2), ((5,), (1,), 2), ((6, 4, 3), (2, 3, 1), 4)]
)
def test_masks_hide_every_entry_once_per_round_in_blocks(shape, block, parts):
    masks = block_masks(shape, block, RandomSource(0), parts=parts, rounds=3)
    assert masks.shape == (3 * parts, *shape)
    for hidden in (~masks).reshape(3, parts, *shape):
        assert (hidden.sum(0) == 1).all()
        for axis, size in enumerate(block):  # borders between parts lie on one grid: at the same place modulo the block
            border = (hidden.int().diff(dim=axis + 1) != 0).movedim(axis + 1, 0).flatten(1).any(1)
            assert len({place % size for place in border.nonzero().flatten().tolist()}) <= 1


def test_masks_hide_equal_shares_of_blocks():
    masks = block_masks((40, 40), (1, 1), RandomSource(0), parts=4, rounds=1)
    torch.testing.assert_close((~masks).float().mean((1, 2)), torch.full((4,), 0.25), atol=0.03, rtol=0)


UNITS = [Bernoulli(3), Gaussian(3), Categorical((2, 3)), Poisson(3)]


@pytest.mark.parametrize("unit", UNITS, ids=lambda unit: unit.name)
def test_the_variance_of_the_statistic_is_that_of_draws(unit):
    with torch.no_grad():
        unit.bias.copy_(torch.linspace(-1, 1, unit.bias.numel()).reshape(unit.bias.shape))
        if unit.gaussian:
            unit.log_variance.copy_(torch.tensor([-1.0, 0.0, 2.0]))
    field = torch.full((50_000, *unit.shape), 0.4)
    drawn = unit.statistic(unit.sample(field, RandomSource(0)))
    torch.testing.assert_close(drawn.var(0), unit.statistic_variance(field)[0], rtol=0.05, atol=0.01)


def test_independent_entries_have_the_error_of_their_own_distribution():
    machine = BoltzmannMachine(Bernoulli(3), Bernoulli(2), Dense(), std=1e-9)
    with torch.no_grad():
        machine.layers["visible"].bias.copy_(torch.tensor([-1.0, 0.0, 2.0]))
    x = torch.tensor([[1.0, 0.0, 1.0]])
    p = torch.sigmoid(torch.tensor([-1.0, 0.0, 2.0]))
    found = excess_errors(machine, x, block_masks((3,), (1,), RandomSource(0)))
    torch.testing.assert_close(found, (x - p) ** 2 - p * (1 - p))


def test_gaussian_entries_are_predicted_by_their_exact_conditional_mean():
    # x and y Gaussian: x has precision I - W'W in standard deviations, from which the conditional mean follows.
    machine = BoltzmannMachine(Gaussian(4), Gaussian(3), Dense(), std=0.2, seed=1).double()
    weight = machine.links["visible"].weight.detach()
    precision = torch.eye(4, dtype=weight.dtype) - weight.T @ weight
    x = torch.randn(5, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    mask = torch.tensor([True, False, True, False])
    found = excess_errors(machine, x, mask[None], steps=200)
    solved = torch.linalg.solve(precision[~mask][:, ~mask], precision[~mask][:, mask] @ x[:, mask].T)
    torch.testing.assert_close(found[:, ~mask], (x[:, ~mask] + solved.T) ** 2 - 1)
    assert not any(part[:, mask].any() for part in masked_errors(machine, x, mask[None]))


def test_missing_entries_are_neither_used_nor_scored():
    machine = BoltzmannMachine(Bernoulli(6), Bernoulli(4), Dense(), std=1.0)
    x = RandomSource(1).uniform((3, 6), machine.like).round()
    observed = torch.ones_like(x, dtype=torch.bool)
    observed[:, 2] = False
    other = x.clone()
    other[:, 2] = 1 - other[:, 2]
    masks = block_masks((6,), (1,), RandomSource(0))
    left, right = (excess_errors(machine, values, masks, observed=observed) for values in (x, other))
    torch.testing.assert_close(left, right, rtol=0, atol=0)
    assert (left[:, 2] == 0).all()
    assert not torch.equal(left, excess_errors(machine, x, masks))


def test_one_hot_rows_are_hidden_whole():
    machine = BoltzmannMachine(Categorical((4, 3)), Bernoulli(5), Dense(), std=1e-9)
    x = torch.nn.functional.one_hot(torch.tensor([[0, 1, 2, 0]]), 3).float()
    found = excess_errors(machine, x, block_masks((4,), (1,), RandomSource(0)))
    torch.testing.assert_close(found, (x - 1 / 3) ** 2 - 2 / 9)
    assert math.isclose(float(found.sum()), 4 * (4 / 9 + 2 / 9 - 6 / 9), abs_tol=1e-5)


def test_samples_of_the_model_have_the_expected_error():
    # A mean-field prediction is exact for one hidden unit whose state the known entries determine.
    machine = BoltzmannMachine(Bernoulli(40), Bernoulli(1), Dense())
    with torch.no_grad():
        machine.links["visible"].weight.fill_(4.0)
        machine.layers["visible"].bias.fill_(-2.0)
        machine.hidden.bias.fill_(-60.0)
    rng = RandomSource(0)
    hidden = (rng.uniform((4000, 1), machine.like) < 0.5).float()
    x = machine.sample_visible(hidden, rng)["visible"]
    errors = excess_errors(machine, x, block_masks((40,), (1,), rng)).mean(1)
    assert abs(float(errors.mean())) < 4 * float(errors.std()) / math.sqrt(len(errors))
    mixed = torch.cat([x[hidden[:, 0] == 0][:100, :20], x[hidden[:, 0] == 1][:100, 20:]], 1)  # halves that disagree
    assert float(excess_errors(machine, mixed, block_masks((40,), (1,), rng)).mean()) > 0.2
