"""scikit-learn's own checks, of which one is expected to fail.

Weights are the expected numbers of draws of a sample. Training with a weight of 2 therefore has the distribution of
training with a sample that occurs twice, which `tests/data/test_weights.py` tests, but not the same random numbers.

Gaussian units take any real data, as the checks use. Bernoulli units raise ValueError for data outside [0, 1], which
`test_inputs.py` tests.
"""

import pytest
from sklearn.utils.estimator_checks import parametrize_with_checks

from mvrbm import MVRBM, RBM, TVRBM, DeepMVRBM


@pytest.mark.filterwarnings("ignore::sklearn.exceptions.SkipTestWarning")
@parametrize_with_checks(
    [
        RBM(hidden_shape=8, visible="gaussian", n_epochs=2),
        MVRBM(visible="gaussian", n_epochs=2),
        TVRBM(visible="gaussian", n_epochs=2),
        DeepMVRBM(visible="gaussian", n_epochs=2),
    ],
    expected_failed_checks=lambda _: {
        "check_sample_weight_equivalence_on_dense_data": "weights and repeated samples use other random numbers"
    },
)
def test_scikit_learn_check(estimator, check):
    check(estimator)
