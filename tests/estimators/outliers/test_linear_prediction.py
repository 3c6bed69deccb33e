"""The linear prediction of hidden blocks, compared with dense covariance matrices."""

import numpy as np
import pytest
from sklearn.covariance import ledoit_wolf

from mvrbm.estimators.imputer.factor_analysis import Factors
from mvrbm.estimators.outliers.linear_prediction import LinearPrediction, divide, slabs


def samples(n, size):
    rng = np.random.default_rng(0)
    return rng.normal(size=(n, 3)) @ rng.normal(size=(3, size)) + rng.normal(size=(n, size)) + np.arange(size)


@pytest.fixture(params=[(40, 6), (8, 12)], ids=["many samples", "few samples"])
def fitted(request):
    x = samples(*request.param)
    return x, LinearPrediction.fit(x), ledoit_wolf(x)[0]


def test_the_precision_is_that_of_scikit_learn(fitted):
    x, linear, covariance = fitted
    np.testing.assert_allclose(linear.residuals(x), np.linalg.solve(covariance, (x - x.mean(0)).T).T, atol=1e-8)


def conditional(covariance, mean, x, block):
    """Conditional mean and covariance of a block of one sample, from the textbook."""
    rest = np.setdiff1d(np.arange(len(mean)), block)
    gain = covariance[np.ix_(block, rest)] @ np.linalg.inv(covariance[np.ix_(rest, rest)])
    return mean[block] + gain @ (x[rest] - mean[rest]), covariance[np.ix_(block, block)] - gain @ covariance[
        np.ix_(rest, block)
    ]


@pytest.mark.parametrize("blocks", [[[0, 1], [4, 2, 3]], [[1], [0], [3]], [[0, 1, 2, 3, 4]]])
def test_errors_of_blocks_are_squared_distances_in_units_of_their_covariance(fitted, blocks):
    x, linear, covariance = fitted
    blocks = [np.array(block) for block in blocks]
    errors, excess = linear.block_errors(x, blocks), linear.excess(x, blocks)
    variances, squares = np.zeros(x.shape[1]), np.zeros_like(x)
    for j, block in enumerate(blocks):
        for i, row in enumerate(x):
            mean, inner = conditional(covariance, x.mean(0), row, block)
            deviation = row[block] - mean
            assert errors[i, j] == pytest.approx(deviation @ np.linalg.solve(inner, deviation))
            squares[i, block] = deviation**2
            variances[block] = np.diag(inner)
    np.testing.assert_allclose(excess, (squares - variances) / variances.mean(), atol=1e-8)


def test_missing_entries_are_filled_with_conditional_means(fitted):
    x, linear, covariance = fitted
    observed = np.ones(x.shape, dtype=bool)
    observed[0, [1, 4]] = observed[2, 3] = False
    filled = linear.fill(np.where(observed, x, 1e9), observed)
    np.testing.assert_array_equal(filled[observed], x[observed])
    for row, missing in ((0, [1, 4]), (2, [3])):
        mean, _ = conditional(covariance, x.mean(0), x[row], np.array(missing))
        np.testing.assert_allclose(filled[row, missing], mean)


def test_the_machine_has_the_same_distribution(fitted):
    x, linear, covariance = fitted
    machine = linear.machine((2, x.shape[1] // 2))
    factors = Factors.of(machine)  # another way from a machine to a covariance
    loadings = factors.loadings.numpy()
    np.testing.assert_allclose(loadings @ loadings.T + np.diag(factors.noise.numpy()), covariance, atol=1e-8)
    np.testing.assert_allclose(factors.mean.numpy(), x.mean(0), atol=1e-8)
    again = LinearPrediction.of(machine)
    np.testing.assert_array_equal(again.residuals(x), linear.residuals(x))


@pytest.mark.parametrize("x", [np.zeros((4, 3)), np.ones((2, 5)), np.eye(2)[[0, 0, 1]]])
def test_constant_data_has_finite_errors(x):
    linear = LinearPrediction.fit(x)
    assert np.isfinite(linear.block_errors(x + 1, [np.array([0]), np.array([1])])).all()


def test_arrays_are_divided_into_slabs_and_blocks():
    numbers = np.arange(24).reshape(2, 3, 4)
    assert [block.tolist() for block in slabs((2, 3, 4))[1]] == [numbers[:, i].ravel().tolist() for i in range(3)]
    found = [block.tolist() for block in divide((3, 5), (2, 2), [False, True])]
    assert found == [[0, 5], [1, 2, 6, 7], [3, 4, 8, 9], [10], [11, 12], [13, 14]]
