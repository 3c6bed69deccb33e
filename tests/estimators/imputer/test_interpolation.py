"""Interpolation of residuals: compared with NumPy, and the differences that are drawn are those of Markov chains."""

import numpy as np
import pytest
import torch

from mvrbm import RandomSource
from mvrbm.estimators.imputer.factor_analysis import Factors
from mvrbm.estimators.imputer.interpolation import Interpolation
from mvrbm.estimators.imputer.linear_model import Linear


def some_interpolation(shape, axis, step=0.2):
    size = int(np.prod(shape))
    return Interpolation(shape, axis, step, torch.linspace(1, 2, size).double())


@pytest.mark.parametrize(("shape", "axis"), [((20,), 0), ((3, 12), 1), ((12, 3), 0), ((2, 9, 3), 1)])
def test_values_are_those_of_numpy(shape, axis):
    rng = np.random.default_rng(0)
    found = some_interpolation(shape, axis)
    x = rng.normal(size=(6, *shape))
    known = rng.random(x.shape) < 0.4
    known[0] = False
    arguments = (torch.from_numpy(part.reshape(6, -1)) for part in (np.where(known, x, 99.0), known))
    scale = found.scale.numpy().reshape(shape)
    expected = np.zeros_like(x)
    for values, mask, out in zip(
        *(np.moveaxis(part, axis + 1, -1).reshape(-1, shape[axis]) for part in (x / scale, known)),
        np.ndindex(expected.size // shape[axis]),
        strict=True,
    ):
        if mask.any():
            row = np.interp(np.arange(shape[axis]), np.flatnonzero(mask), values[mask])
            np.moveaxis(expected, axis + 1, -1)[np.unravel_index(out[0], np.moveaxis(x, axis + 1, -1).shape[:-1])] = row
    np.testing.assert_allclose(found.conditional_mean(*arguments), (expected * scale).reshape(6, -1), atol=1e-12)


def test_the_unexplained_variance_is_that_of_a_bridge():
    known = torch.tensor([[False, True, False, False, True, False, False], [False] * 7])
    found = some_interpolation((7,), 0, step=0.1).unexplained(known)
    bridge = 0.1 * 2 / 3  # between known entries at distances of 1 and 2
    np.testing.assert_allclose(found[0], [0.1, 1e-6, bridge, bridge, 1e-6, 0.1, 0.2])
    np.testing.assert_array_equal(found[1], 1)


def test_the_step_is_the_mean_squared_difference_of_known_neighbors():
    x = torch.tensor([[0.0, 3, 99, 5, 6], [1, 1, 2, 99, 4]]).double()
    known = x < 99
    factors = Factors(torch.ones(5).double(), torch.zeros(5, 1).double(), torch.full((5,), 16.0).double())
    found = Interpolation.fit(factors, x, known, (5,), 0)
    assert found.step == pytest.approx((9 + 1 + 0 + 1) / 4 / 16)
    np.testing.assert_array_equal(found.scale, 4)


def test_drawn_errors_are_correlated_within_gaps():
    found = some_interpolation((40,), 0, step=0.05)
    factors = Factors(torch.ones(40).double(), torch.zeros(40, 1).double(), found.scale**2)
    known = (torch.arange(40) % 10 == 0).expand(4000, 40)
    linear = Linear(factors, found)
    drawn = linear.draw_errors(torch.ones(4000, 40).double(), known, RandomSource(0))
    # The deviation of 16,000 gaps is within 5 % of that of a bridge, which is 5 standard errors or more.
    np.testing.assert_allclose(drawn[:, 1:30][:, ~known[0, 1:30]].std(0), 1, rtol=0.06)
    assert float(torch.corrcoef(drawn[:, [4, 5]].T)[0, 1]) > 0.75  # a bridge of length 10 has 0.816
    assert abs(float(torch.corrcoef(drawn[:, [5, 15]].T)[0, 1])) < 0.1
