"""What every method of every estimator does with NaN: it uses the known entries, fills in the others, or raises."""

import numpy as np
import pytest

from mvrbm import (
    MMVRBM,
    MVRBM,
    RBM,
    TVRBM,
    ClassificationMVRBM,
    DeepMVRBM,
    DeepMVRBMClassifier,
    MatrixMixture,
    MVRBMClassifier,
    MVRBMImputer,
    MVRBMOutlierDetector,
    ReplicatedSoftmax,
    SequenceRBM,
)

RNG = np.random.default_rng(0)
X = (RNG.random((60, 4, 5)) < 0.4).astype(np.float32)
HOLES = np.where(RNG.random(X.shape) < 0.3, np.nan, X)
LABELS = np.arange(60) % 2
QUICK = {"n_epochs": 1, "random_state": 0, "device": "cpu"}

# The result is that for data whose unknown entries were filled in with `inpaint`.
FILLS = "fills"
# The result is finite, and that of a sample does not depend on the other samples.
USES_KNOWN = "uses known entries"
# ValueError that says that complete samples are required.
RAISES = "raises"

_MACHINE = {
    "fit": USES_KNOWN,
    "transform": FILLS,
    "hidden_maps": FILLS,
    "reconstruct": FILLS,
    "inpaint": FILLS,
    "score_samples": RAISES,
    "score": RAISES,
    "free_energy": RAISES,
}
_CLASSIFIER = {"fit": RAISES, "predict": RAISES, "predict_proba": RAISES, "score": RAISES}
BEHAVIOR = {
    RBM(4, **QUICK): {**_MACHINE, "log_likelihood": RAISES},
    MVRBM((3, 3), **QUICK): _MACHINE,
    TVRBM((3, 3), **QUICK): _MACHINE,
    MMVRBM((3, 3), **QUICK): _MACHINE,
    DeepMVRBM(((3, 3), (2, 2)), **QUICK): {**dict.fromkeys(_MACHINE, RAISES), "inpaint": FILLS},
    MVRBMClassifier((3, 3), **QUICK): _CLASSIFIER,
    DeepMVRBMClassifier(((3, 3), (2, 2)), **QUICK): _CLASSIFIER,
    ClassificationMVRBM((3, 3), **QUICK): {**_CLASSIFIER, "free_energy": RAISES},
    MatrixMixture(2, gate=False, **QUICK): {
        "fit": USES_KNOWN,
        "predict": USES_KNOWN,
        "predict_proba": USES_KNOWN,
        "transform": FILLS,
        "inpaint": FILLS,
        "score_samples": RAISES,
        "score": RAISES,
        "bic": RAISES,
    },
    MVRBMImputer("none", random_state=0): {
        "fit": USES_KNOWN,
        "transform": USES_KNOWN,
        "standard_deviation": USES_KNOWN,
    },
    MVRBMOutlierDetector(): {
        "fit": USES_KNOWN,
        "score_samples": USES_KNOWN,
        "explain": USES_KNOWN,
        "predict": USES_KNOWN,
    },
    ReplicatedSoftmax(3, n_epochs=1, random_state=0): {"fit": RAISES, "transform": RAISES, "score": RAISES},
    SequenceRBM(3, alphabet="ACD", identity=None, **QUICK): {
        "fit": USES_KNOWN,
        "score_samples": USES_KNOWN,
        "score": RAISES,
        "pseudo_likelihood": RAISES,
        "free_energy": RAISES,
    },
}
CASES = [(estimator, method) for estimator, methods in BEHAVIOR.items() for method in methods]


def as_input(estimator, array):
    """Return data in the form that an estimator takes."""
    if isinstance(estimator, SequenceRBM):
        letters = np.where(np.isnan(array), "?", np.array(list("ACD"))[np.nan_to_num(array).astype(int)])
        return ["".join(row) for row in letters.reshape(len(array), -1)]
    if isinstance(estimator, MMVRBM):
        return {"image": array, "rows": array[:, :2]}
    return array.reshape(len(array), -1) if isinstance(estimator, RBM | ReplicatedSoftmax) else array


@pytest.fixture(scope="module")
def fitted():
    found = {}
    for estimator, methods in BEHAVIOR.items():
        start = HOLES if methods["fit"] is USES_KNOWN else X
        given = (as_input(estimator, start),) + ((LABELS,) if hasattr(estimator, "predict_proba") else ())
        found[estimator] = estimator.fit(*(given[:1] if isinstance(estimator, MMVRBM | MatrixMixture) else given))
    return found


def first(model, data):
    """Return the result of the first of these methods that a model has."""
    name = next(name for name in ("transform", "score_samples") if hasattr(model, name))
    return getattr(model, name)(data)


def parts(result):
    return list(result.values()) if isinstance(result, dict) else [result]


@pytest.mark.parametrize(
    ("estimator", "method"), CASES, ids=lambda value: value if isinstance(value, str) else type(value).__name__
)
def test_nan(estimator, method, fitted):
    model = fitted[estimator]
    behavior = BEHAVIOR[estimator][method]
    holes = as_input(estimator, HOLES)
    takes_labels = method in ("fit", "score") and isinstance(
        estimator, MVRBMClassifier | DeepMVRBMClassifier | ClassificationMVRBM
    )
    labels = (LABELS,) if takes_labels else ()
    call = getattr(model, method)
    if behavior is RAISES:
        with pytest.raises(ValueError, match=r"contain.* NaN|NaN, or|complete sequences|NaN\."):
            call(holes, *labels)
    elif method == "fit":
        assert np.isfinite(parts(first(model, holes))[0]).all()
    elif behavior is FILLS:
        filled = model.inpaint(holes)
        for one, other in zip(parts(call(holes)), parts(call(filled)), strict=True):
            if one.dtype.kind == "f":
                assert np.isfinite(one).all()
                np.testing.assert_allclose(one, other, rtol=1e-4, atol=1e-5)
            else:
                assert one.tolist() == other.tolist()
    else:
        found, alone = np.asarray(call(holes)), np.asarray(call(holes[:1]))
        assert np.isfinite(found).all()
        np.testing.assert_allclose(alone, found[:1], rtol=1e-3, atol=1e-4)
