"""A second call of `fit` trains a new model: nothing is left of the first one."""

import numpy as np
import pytest
from sklearn.base import clone

from mvrbm import (
    MMVRBM,
    MVRBM,
    ClassificationMVRBM,
    DeepMVRBM,
    MVRBMClassifier,
    MVRBMImputer,
    MVRBMOutlierDetector,
    ReplicatedSoftmax,
)

SHORT = {"n_epochs": 2, "random_state": 0, "device": "cpu"}
ESTIMATORS = [
    MVRBM((2, 2), negative="pcd", **SHORT),
    DeepMVRBM(((3, 3), (2, 2)), **SHORT),
    MMVRBM((2, 2), recipe="generative", **SHORT),
    ClassificationMVRBM((2, 2), mode="generative", **SHORT),
    ClassificationMVRBM((2, 2), mode="hybrid", **SHORT),
    MVRBMClassifier((2, 2), early_stopping=True, **SHORT),
    MVRBMImputer(**SHORT),
    MVRBMOutlierDetector((2, 2), **SHORT),
    ReplicatedSoftmax(2, **SHORT),
]


def data(estimator, shape, n_classes, seed):
    """Arguments of `fit`, with samples of this shape and with this number of classes."""
    rng = np.random.default_rng(seed)
    x, y = rng.integers(0, 2, (60, *shape)).astype(float), np.arange(60) % n_classes
    if isinstance(estimator, MMVRBM):
        return ({"image": x, "label": y},)
    if isinstance(estimator, ReplicatedSoftmax):
        return (x.reshape(60, -1),)
    return (x, y)


def plain(value):
    """Numbers, texts and arrays inside a value, in order. Other objects are left out."""
    if isinstance(value, dict):
        return [(key, plain(part)) for key, part in value.items()]
    if isinstance(value, list | tuple):
        return [plain(part) for part in value]
    if isinstance(value, int | float | str | np.generic):
        return str(value)
    return np.asarray(value).tolist() if hasattr(value, "__array__") else None


@pytest.mark.parametrize("estimator", ESTIMATORS, ids=lambda estimator: f"{estimator!r:.50}")
def test_nothing_is_left_of_a_former_fit(estimator):
    new = data(estimator, (2, 2), 2, 1)
    once = clone(estimator).fit(*new)
    again = clone(estimator).fit(*data(estimator, (7, 6), 3, 0)).fit(*new)
    names = [name for name in dir(once) if name.endswith("_") and not name.startswith("_")]
    assert names == [name for name in dir(again) if name.endswith("_") and not name.startswith("_")]
    for name in names:
        assert plain(getattr(again, name)) == plain(getattr(once, name)), name


def test_chains_and_counters_of_generative_training_are_forgotten():
    x, y = data(None, (3, 4), 2, 0)
    model = ClassificationMVRBM((2, 2), mode="generative", **SHORT).fit(x, y)
    assert model.n_epochs_ == 2
    assert len(model.chains_["visible"]) > 0
    model.set_params(mode="discriminative").fit(x, y)
    assert (model.chains_, model.n_epochs_, model.n_updates_) == ({}, 0, 0)
