"""scikit-learn's own checks, none of them expected to fail.

Gaussian units take any real data, as the checks use. Bernoulli units raise ValueError for data outside [0, 1], which
`test_inputs.py` tests.
"""

import pytest
from sklearn.utils.estimator_checks import parametrize_with_checks

from mvrbm import MVRBM, RBM, TVRBM


@pytest.mark.filterwarnings("ignore::sklearn.exceptions.SkipTestWarning")
@parametrize_with_checks(
    [
        RBM(hidden_shape=8, visible="gaussian", n_epochs=2),
        MVRBM(visible="gaussian", n_epochs=2),
        TVRBM(visible="gaussian", n_epochs=2),
    ]
)
def test_scikit_learn_check(estimator, check):
    check(estimator)
