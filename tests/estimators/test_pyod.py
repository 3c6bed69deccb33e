"""The adapter for PyOD, compared with the detector that it wraps and with PyOD's interface."""

import pickle

import numpy as np
import pytest
from sklearn.base import clone

from mvrbm import MVRBMOutlierDetector

pytest.importorskip("pyod")


def test_the_adapter_has_the_contract_of_pyod():
    from pyod.models.base import BaseDetector

    from mvrbm.estimators.pyod import PyODDetector

    table = np.random.default_rng(0).normal(size=(60, 3))
    table[:6] += 20 * np.eye(3)[[0, 1, 2, 0, 1, 2]]
    inner = MVRBMOutlierDetector(n_epochs=20, random_state=0)
    adapter = clone(PyODDetector(contamination=0.1, detector=inner)).fit(table)
    assert isinstance(adapter, BaseDetector)
    np.testing.assert_array_equal(adapter.decision_scores_, -inner.fit(table).score_samples(table))
    assert adapter.labels_.tolist() == [1] * 6 + [0] * 54
    assert (adapter.decision_scores_ > adapter.threshold_).astype(int).tolist() == adapter.labels_.tolist()
    again = pickle.loads(pickle.dumps(adapter))
    assert again.predict(table).tolist() == adapter.labels_.tolist()
    assert again.predict_proba(table).shape == (60, 2)


def test_an_unknown_name_is_an_attribute_error():
    from mvrbm.estimators import pyod

    with pytest.raises(AttributeError, match="no attribute 'Detector'"):
        _ = pyod.Detector
