"""The outlier detector: its contract, its scores on data with a known answer, its maps, and saved models."""

import pytest
from sklearn.utils.estimator_checks import parametrize_with_checks

from mvrbm import MVRBMOutlierDetector


@pytest.mark.filterwarnings("ignore::sklearn.exceptions.SkipTestWarning")
@parametrize_with_checks([MVRBMOutlierDetector(n_epochs=2, n_masks=4)])
def test_scikit_learn_check(estimator, check):
    check(estimator)
