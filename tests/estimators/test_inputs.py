"""Input checks: arrays, rows, bytes, masks and data frames give the same results, and invalid input raises errors."""

import json
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
import torch
from sklearn.base import clone
from sklearn.datasets import load_digits
from torch.utils.data import DataLoader, Dataset, IterableDataset, TensorDataset

import mvrbm
from mvrbm import (
    MMVRBM,
    MVRBM,
    RBM,
    TVRBM,
    Bernoulli,
    ClassificationMVRBM,
    DeepMVRBM,
    MVRBMClassifier,
    MVRBMImputer,
    MVRBMOutlierDetector,
    ReplicatedSoftmax,
)
from mvrbm.estimators.inputs import as_array
from mvrbm.io.shards import Shards
from mvrbm.training import Checkpoint, Trainer


@pytest.fixture(scope="module")
def digits():
    return (load_digits().images / 16).astype(np.float32)  # (1797, 8, 8)


@pytest.fixture(scope="module")
def model(digits):
    return MVRBM((6, 5), n_epochs=30, random_state=0).fit(digits)


def test_rows_and_arrays_are_the_same_data(model, digits):
    rows = digits.reshape(len(digits), -1)
    flat = MVRBM((6, 5), visible_shape=(8, 8), n_epochs=30, random_state=0).fit(rows)
    np.testing.assert_array_equal(flat.transform(rows), model.transform(digits))
    assert flat.reconstruct(rows[:3]).shape == (3, 64)
    assert flat.sample(3, steps=2).shape == (3, 64)
    assert model.sample(3, steps=2).shape == (3, 8, 8)


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_data_may_be_backwards_or_read_only_and_stays_as_it_is(model, digits, dtype):
    data = digits[:50].astype(dtype)
    features, before = model.transform(data), data.copy()
    np.testing.assert_allclose(model.transform(data[::-1]), features[::-1], atol=1e-6)
    model.reconstruct(data)
    model.score_samples(data)
    np.testing.assert_array_equal(data, before)
    packed = np.zeros(len(data), dtype=[("tag", "i1"), ("digit", dtype, data.shape[1:])])
    packed["digit"] = data
    np.testing.assert_array_equal(model.transform(packed["digit"]), features)
    data.flags.writeable = False
    np.testing.assert_array_equal(model.transform(data), features)


def test_bytes_are_scaled(digits):
    as_bytes = np.round(digits * 255).astype(np.uint8)
    from_bytes = MVRBM((4, 4), n_epochs=2, random_state=0).fit(as_bytes)
    from_floats = MVRBM((4, 4), n_epochs=2, random_state=0).fit(as_bytes / np.float32(255))
    np.testing.assert_allclose(
        from_bytes.transform(as_bytes), from_floats.transform(as_bytes / np.float32(255)), atol=1e-4
    )


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_dtype_is_kept(digits, dtype):
    fitted = TVRBM((4, 4), n_epochs=1).fit(digits.astype(dtype))
    assert fitted.transform(digits.astype(dtype)).dtype == dtype


def test_missing_entries_are_drawn(digits):
    mask = np.random.default_rng(0).random(digits.shape) < 0.7
    broken = np.where(mask, digits, 0.0).astype(np.float32)
    fitted = MVRBM((6, 6), n_epochs=15, random_state=0).fit(broken, mask=mask)
    zeros = MVRBM((6, 6), n_epochs=15, random_state=0).fit(broken)
    truth = digits.mean(0)

    def bias_of(estimator):
        return np.abs(estimator.reconstruct(digits).mean(0) - truth).mean()

    assert bias_of(fitted) < 0.5 * bias_of(zeros)


def test_what_is_unknown_may_be_anything(digits):
    mask = np.random.default_rng(1).random((8, 8)) < 0.6
    broken = np.where(mask, digits[:300], np.nan).astype(np.float32)
    zeros = np.where(mask, digits[:300], 0).astype(np.float32)
    for wrong in (broken, np.where(mask, zeros, -7).astype(np.float32)):
        one = MVRBM((4, 4), n_epochs=2, random_state=0).fit(wrong, mask=mask)
        other = MVRBM((4, 4), n_epochs=2, random_state=0).fit(zeros, mask=mask)
        np.testing.assert_array_equal(one.components(), other.components())
        np.testing.assert_array_equal(one.inpaint(wrong, mask), other.inpaint(zeros, mask))
    halves = {"left": digits[:, :, :4], "right": digits[:, :, 4:] * 10 - 3}
    gone = {"left": halves["left"], "right": np.full_like(halves["right"], np.nan)}
    kinds = {"left": "bernoulli", "right": "gaussian"}
    fitted = MMVRBM((4, 4), visible=kinds, n_epochs=1, random_state=0).fit(halves)
    assert np.isfinite(fitted.inpaint(gone, {"right": np.zeros((8, 4), bool)})["right"]).all()


def test_nan_is_unknown(digits, tmp_path):
    known = np.random.default_rng(2).random((60, 8, 8)) < 0.8
    known[:9], known[9] = True, False  # complete samples, and one of which nothing is known
    broken = np.where(known, digits[:60], np.nan).astype(np.float32)
    model = MVRBM((3, 3), n_epochs=2, random_state=0).fit(broken)
    masked = MVRBM((3, 3), n_epochs=2, random_state=0).fit(broken, mask=known)
    np.testing.assert_array_equal(model.components_, masked.components_)
    filled = model.inpaint(broken)
    np.testing.assert_array_equal(filled, masked.inpaint(digits[:60], mask=known))
    np.testing.assert_array_equal(filled[known], digits[:60][known])
    assert filled[~known].min() > 0  # means, not placeholders
    drawn = model.sample(9, init=broken[30:39], steps=2)
    np.testing.assert_array_equal(drawn[known[30:39]], digits[30:39][known[30:39]])
    for method in ("transform", "reconstruct"):
        np.testing.assert_array_equal(getattr(model, method)(broken), getattr(model, method)(filled), err_msg=method)
        # Products of other numbers of samples are rounded differently on some processors.
        np.testing.assert_allclose(getattr(model, method)(broken)[:9], getattr(model, method)(digits[:9]), rtol=2e-6)
    for number, part in enumerate(np.split(broken, 3)):
        np.save(tmp_path / f"{number}.npy", part)
    sharded = MVRBM((3, 3), n_epochs=2, random_state=0).fit(Shards(tmp_path))
    assert np.isfinite(sharded.components_).all()
    np.testing.assert_array_equal(model.transform(Shards(tmp_path)), model.transform(broken))
    for method in ("score_samples", "free_energy"):  # see test_missing_entries for all methods
        with pytest.raises(ValueError, match=f"X contains NaN, but {method} requires complete samples"):
            getattr(model, method)(Shards(tmp_path))


IMAGES = np.full((10, 6, 4), 0.5)


class Stream(IterableDataset):
    def __iter__(self):
        return iter(IMAGES)


class Items(Dataset):
    def __init__(self, X):
        self.X = X

    def __len__(self):
        return len(self.X)

    def __getitem__(self, number):
        return self.X[number]


def on_disk(X):
    """Save an array as shards in the current folder."""
    folder = Path(f"shards{len(list(Path().iterdir()))}")
    folder.mkdir()
    np.save(folder / "0.npy", X[:10])
    np.save(folder / "1.npy", X[10:])
    return Shards(folder)


@pytest.mark.parametrize("wrap", [np.asarray, torch.from_numpy, Items, lambda X: on_disk(X)])
def test_bytes_that_are_bits_are_not_scaled(wrap, digits, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    bits = (digits > 0.5).astype(np.uint8)
    model = MVRBM((3, 3), n_epochs=2, random_state=0).fit(wrap(bits))
    np.testing.assert_array_equal(model.transform(wrap(bits)), model.transform(bits.astype(np.float32)))
    np.testing.assert_allclose(model.reconstruct(bits).mean(), bits.mean(), atol=0.05)
    again = mvrbm.load(model.save(tmp_path / "model"), device="cpu")
    np.testing.assert_array_equal(again.transform(bits), model.transform(bits))
    np.testing.assert_array_equal(again.transform(255 * bits), model.transform(bits))
    again.partial_fit(bits)
    again.partial_fit(np.round(255 * digits).astype(np.uint8))
    with pytest.raises(ValueError, match="the training data contained only 0 and 1; divide them by 255"):
        again.transform(on_disk(255 * bits))


@pytest.mark.parametrize("dtype", ["bool", "uint8", "float32", "float64"])
def test_binary_data_of_all_types_is_the_same(dtype, digits):
    """The model must not depend on the type of the training data, nor on the type of later data."""
    bits = digits > 0.5
    model = MVRBM((3, 3), n_epochs=2, random_state=0).fit(bits.astype(dtype))
    features = model.transform(bits)
    for later in ("bool", "uint8", "float32"):
        np.testing.assert_allclose(model.transform(bits.astype(later)), features, atol=1e-6)
    np.testing.assert_allclose(model.transform(255 * bits.astype(np.uint8)), features, atol=1e-6)
    parts = {"x": bits.astype(dtype), "y": np.arange(len(bits)) % 2}
    several = MMVRBM((3, 3), n_epochs=1, random_state=0).fit(parts)
    np.testing.assert_allclose(
        several.predict_proba({"x": bits.astype(np.uint8)}), several.predict_proba({"x": bits}), atol=1e-6
    )


@pytest.mark.parametrize("trained_on_bytes", [True, False])
def test_bits_are_divided_if_the_training_data_has_gray_values(digits, trained_on_bytes):
    """All rows of a batch, and each row alone, must be scaled alike."""
    pixels = (255 * digits).astype(np.uint8)
    model = MVRBM((3, 3), n_epochs=1, random_state=0).fit(pixels if trained_on_bytes else digits)
    bits = (pixels > 127).astype(np.uint8)
    expected = model.transform(bits.astype(np.float32) / 255)
    with pytest.warns(UserWarning, match="only 0 and 1, and is divided by 255 because the training data had other"):
        np.testing.assert_allclose(model.transform(bits), expected, atol=1e-6)
    mixed = np.concatenate([pixels[:5], bits[:5]])
    np.testing.assert_allclose(model.transform(mixed)[5:], expected[:5], atol=1e-6)
    with pytest.warns(UserWarning, match="only 0 and 1"):
        model.partial_fit(bits)


def test_a_checkpoint_of_binary_floats_without_a_scale_of_bytes_resumes(digits, tmp_path):
    """Version 0.2 saved no scale for floats."""
    bits = (digits > 0.5).astype(np.float32)
    MVRBM((3, 3), n_epochs=1, random_state=0).fit(bits, callbacks=[Checkpoint(tmp_path)])
    (config,) = tmp_path.rglob("config.json")
    described = json.loads(config.read_text())
    assert described["visible"]["visible"].pop("byte_scale") == 1
    config.write_text(json.dumps(described))
    resumed = MVRBM((3, 3), n_epochs=2, random_state=0).fit(bits, resume=tmp_path)
    whole = MVRBM((3, 3), n_epochs=2, random_state=0).fit(bits)
    np.testing.assert_array_equal(resumed.transform(bits), whole.transform(bits))


@pytest.mark.parametrize("classifier", [MVRBMClassifier, ClassificationMVRBM])
def test_classifiers_do_not_scale_bytes_that_are_bits(classifier, digits):
    bits = (digits[:100] > 0.5).astype(np.uint8)
    labels = np.arange(100) % 2
    one, other = (classifier((3, 3), n_epochs=1, random_state=0).fit(X, labels) for X in (bits, bits.astype("f")))
    np.testing.assert_allclose(one.predict_proba(bits), other.predict_proba(bits.astype("f")), atol=1e-4)
    np.testing.assert_allclose(other.predict_proba(bits), other.predict_proba(bits.astype("f")), atol=1e-6)
    np.testing.assert_allclose(other.predict_proba(255 * bits), other.predict_proba(bits.astype("f")), atol=1e-6)


@pytest.mark.parametrize("dtype", ["bool", "int8", "uint8", "int16", "uint16", "float16", "float32"])
def test_small_types_give_models_in_single_precision(dtype, digits):
    model = MVRBM((3, 3), n_epochs=1).fit((digits > 0.5).astype(dtype))
    assert model.machine_.like.dtype == torch.float32
    assert MMVRBM((3, 3), n_epochs=1).fit({"a": (digits > 0.5).astype(dtype)}).machine_.like.dtype == torch.float32


ESTIMATORS = [
    RBM(3, n_epochs=1, random_state=0),
    MVRBMOutlierDetector(n_epochs=1, random_state=0),
    MVRBMImputer("none", random_state=0),
    ReplicatedSoftmax(3, n_epochs=1, random_state=0),
]


@pytest.mark.parametrize("estimator", ESTIMATORS, ids=lambda estimator: type(estimator).__name__)
def test_a_loader_stands_for_its_dataset(estimator, digits):
    rows = digits[:40].reshape(40, -1).astype(np.float32)
    dataset = TensorDataset(torch.from_numpy(rows))
    method = "score_samples" if hasattr(estimator, "score_samples") else "transform"
    one = getattr(clone(estimator).fit(dataset), method)(rows)
    other = getattr(clone(estimator).fit(DataLoader(dataset, batch_size=7, shuffle=True)), method)(DataLoader(dataset))
    np.testing.assert_allclose(one, other, rtol=1e-5)
    for loader in (DataLoader(Stream()), DataLoader(dataset, collate_fn=lambda items: items)):
        with pytest.raises(ValueError, match=r"X must not be a DataLoader with a custom sampler.*Trainer"):
            clone(estimator).fit(loader)


@pytest.mark.parametrize("estimator", ESTIMATORS, ids=lambda estimator: type(estimator).__name__)
@pytest.mark.parametrize(
    ("data", "message"),
    [
        ({"a": np.ones((3, 2))}, "X must be an array of samples, got a dict"),
        ("data.npy", "X must be an array of samples, got a str; read the file first"),
        (None, "X must be an array of samples, got None"),
        (({1, 2}), "X must be an array of samples, got a set"),
        ([[1.0, 2.0], [3.0]], "all samples in X must have the same shape"),
        (np.array(["2020-01-01"], dtype="M8[D]")[:, None], "X must contain numbers, got an array of dtype datetime64"),
        (np.array([["a", "b"]]), "X must contain numbers, got an array of dtype <U1"),
    ],
    ids=lambda value: type(value).__name__,
)
def test_what_is_no_array_is_named(estimator, data, message):
    with pytest.raises(ValueError, match=message):
        clone(estimator).fit(data)


@pytest.mark.parametrize("unit", ["gaussian", "gaussian-learned", "rectified", "poisson"])
@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_data_that_is_too_large_is_refused_in_fit_and_later(unit, dtype):
    X = np.random.default_rng(0).poisson(3.0, (20, 5)).astype(dtype)
    model = RBM(3, visible=unit, n_epochs=1, random_state=0).fit(X)
    for call in (clone(model).fit, model.transform, model.score_samples):
        with pytest.raises(ValueError, match=r"data for layer 'visible' contains the value .*e\+3.*rescale the data"):
            call(X * dtype(1e30))


def test_data_that_hardly_varies_is_refused():
    X = np.random.default_rng(0).normal(size=(20, 5))
    for dtype in (np.float32, np.float64):
        with pytest.raises(ValueError, match=r"inverse standard deviation .* is too large.*rescale the data"):
            RBM(3, visible="gaussian").fit((1e-30 * X).astype(dtype))
    # Rounding errors of a large mean are no variation.
    RBM(3, visible="gaussian", n_epochs=1).fit(1e9 + 1e-6 * X)


def test_scores_that_are_not_finite_are_errors():
    X = 1e-10 * np.random.default_rng(0).normal(size=(20, 5)).astype(np.float32)
    for model in (RBM(3, visible="gaussian", n_epochs=1).fit(X), MVRBMOutlierDetector(n_epochs=1).fit(X)):
        far = X.copy()
        far[3] = 1e12
        with pytest.raises(ValueError, match="the result for sample 3 is not finite"):
            model.score_samples(far)


class Ragged(Dataset):
    def __len__(self):
        return 4

    def __getitem__(self, number):
        return np.zeros((2 + number, 2))


REFUSED = [
    ("beyond [0, 1]", lambda: MVRBM().fit(IMAGES * 3), "from 0 to 1, got 1.5 to 1.5.*Gaussian units"),
    ("unknown unit", lambda: MVRBM(visible="logistic").fit(IMAGES), "visible must be one of"),
    ("unknown recipe", lambda: MVRBM(recipe="fast").fit(IMAGES), "recipe must be one of"),
    ("unknown backend", lambda: MVRBM(backend="gpu").fit(IMAGES), "backend must be"),
    ("order 3 for matrices", lambda: MVRBM().fit(np.zeros((5, 2, 2, 2))), "use TVRBM"),
    ("shape that does not fit", lambda: MVRBM(visible_shape=(5, 5)).fit(np.zeros((9, 24))), "25 entries.*24 features"),
    ("shape that contradicts", lambda: MVRBM(visible_shape=(4, 6)).fit(IMAGES), r"\(4, 6\), but samples"),
    (
        "vectors for a matrix",
        lambda: MVRBM((3, 3)).fit(np.zeros((9, 24))),
        "2 axes, but samples of shape .* have 1.*pass visible_shape if each row is a flattened array",
    ),
    ("rank 0", lambda: MVRBM(rank=0).fit(IMAGES), "rank must be a whole number"),
    ("batch size 0", lambda: MVRBM(batch_size=0).fit(IMAGES), "batch_size must be a whole number of at least 1"),
    (
        "other shape later",
        lambda: MVRBM(n_epochs=1).fit(IMAGES).transform(np.zeros((3, 4, 6))),
        r"must have shape \(6, 4\)",
    ),
    ("mask of numbers", lambda: MVRBM(n_epochs=1).fit(IMAGES).inpaint(IMAGES, np.ones((6, 4))), "mask must be boolean"),
    ("mask of another size", lambda: MVRBM(n_epochs=1).fit(IMAGES).inpaint(IMAGES, np.ones(3, bool)), "mask must have"),
    (
        "mask turned round",
        lambda: MVRBM(n_epochs=1).fit(IMAGES).inpaint(IMAGES, np.ones((4, 6), bool)),
        "mask must have",
    ),
    (
        "mask of an unknown modality",
        lambda: MMVRBM(n_epochs=1).fit({"a": IMAGES}, mask={"b": IMAGES > 0}),
        "mask has modalities",
    ),
    (
        "hidden rows of another size",
        lambda: MVRBM(n_epochs=1).fit(IMAGES).inverse_transform(np.ones((2, 12))),
        "hidden values must have shape",
    ),
    ("mask in which nothing is known", lambda: MVRBM(n_epochs=1).fit(IMAGES, mask=IMAGES > 9), "no entries are known"),
    (
        "mask in which nothing is known of a modality",
        lambda: MMVRBM(n_epochs=1).fit({"a": IMAGES, "b": IMAGES}, mask={"a": IMAGES > 9}),
        "no entries are known",
    ),
    (
        "nothing known to fill in from",
        lambda: MVRBM(n_epochs=1).fit(IMAGES).inpaint(IMAGES, np.zeros((6, 4), bool)),
        "no entries are known",
    ),
    (
        "infinite",
        lambda: MVRBM().fit(np.where(np.eye(6, 4) > 0, np.inf, IMAGES)),
        r"infinite values \(40 of 240 entries\); replace them with finite values$",
    ),
    ("only NaN", lambda: MVRBM().fit(IMAGES * np.nan), "no entries are known"),
    ("NaN for a classifier", lambda: MVRBMClassifier().fit(IMAGES * np.nan, np.arange(10) % 2), "X contains NaN"),
    ("a stream", lambda: MVRBM().fit(Stream()), "must be a map-style dataset.*got an IterableDataset"),
    ("items of several shapes", lambda: MVRBM().fit(Ragged()), r"dataset item 1 has shape \(3, 2\), but item 0"),
    ("no items", lambda: MVRBM().fit(TensorDataset(torch.zeros(0, 2, 2))), "the data is empty"),
    ("not one-hot", lambda: MVRBM(visible="categorical").fit(IMAGES), "layer 'visible' .*one-hot"),
    ("no samples", lambda: MVRBM().fit(IMAGES[:0]), "the data is empty"),
    ("text", lambda: RBM().fit(np.array([["a", "b"]] * 3)), "must contain numbers"),
    ("later beyond [0, 1]", lambda: MVRBM(n_epochs=1).fit(IMAGES).transform(IMAGES * 3), "from 0 to 1, got 1.5 to 1.5"),
    ("classes beyond [0, 1]", lambda: MVRBMClassifier().fit(IMAGES * 3, np.arange(10) % 2), "from 0 to 1"),
    ("unknown hidden unit", lambda: MVRBM(hidden="logistic").fit(IMAGES), "hidden must be one of"),
    ("unknown coupling", lambda: MVRBM(coupling="svd:3").fit(IMAGES), "coupling must be one of"),
    ("a number as coupling", lambda: MVRBM(coupling=3).fit(IMAGES), "coupling must be a coupling such as Dense"),
    ("no Gibbs steps", lambda: MVRBM(gibbs_steps=0).fit(IMAGES), "^gibbs_steps must be a whole number of at least 1"),
    ("text as rank", lambda: MVRBM(rank="a").fit(IMAGES), "^rank must be a whole number of at least 1, got 'a'"),
    (
        "an enormous rank",
        lambda: MVRBM((2, 3), rank=100_000).fit(IMAGES),
        r"^rank must be at most 120 for a Kronecker coupling from \(6, 4\) to \(2, 3\), got 100,000",
    ),
    (
        "text as shape",
        lambda: MVRBM("4x4").fit(IMAGES),
        r"^hidden_shape must contain only integers, such as \(4, 4\), got '4x4'$",
    ),
    ("chains without persistence", lambda: MVRBM(n_chains=5).fit(IMAGES), "n_chains requires persistent chains"),
    ("unknown negative phase", lambda: MVRBM(negative="gibbs").fit(IMAGES), "negative must be one of"),
    ("no Gibbs steps", lambda: MVRBM(gibbs_steps=0).fit(IMAGES), "steps"),
    ("unknown device", lambda: MVRBM(device="gpu").fit(IMAGES), "device must be 'auto', 'cpu', 'cuda'"),
    ("a list for MMVRBM", lambda: MMVRBM().fit([IMAGES]), "a dict or tuple"),
    ("modality beyond [0, 1]", lambda: MMVRBM().fit({"a": IMAGES, "b": IMAGES + 1}), "layer 'b'.*Gaussian units"),
    ("unequal modalities", lambda: MMVRBM().fit({"a": IMAGES, "b": IMAGES[:3]}), "same nonzero number of samples"),
]


@pytest.mark.filterwarnings("ignore::mvrbm.errors.ConstantDataWarning")
@pytest.mark.parametrize(("name", "call", "message"), REFUSED, ids=[row[0] for row in REFUSED])
def test_refusals_say_what_is_wrong(name, call, message):
    with pytest.raises(ValueError, match=message):
        call()


@pytest.mark.filterwarnings("ignore::mvrbm.errors.ConstantDataWarning")
def test_private_names_never_appear_in_messages():
    for _, call, _ in REFUSED:
        with pytest.raises(ValueError) as caught:  # noqa: PT011
            call()
        assert not any(word.startswith("_") for word in str(caught.value).replace("'", " ").split())


SAME = {
    "a tensor": lambda X: torch.from_numpy(X),
    "Fortran order": lambda X: np.asfortranarray(X),
    "big-endian": lambda X: X.astype(">f8"),
    "a list": lambda X: X.tolist(),
    "rows": lambda X: X.reshape(len(X), -1),
    "a frame": lambda X: pd.DataFrame(X.reshape(len(X), -1)),
}


@pytest.mark.parametrize("form", SAME)
def test_every_form_of_the_data_gives_the_same_model(form, digits):
    X = digits[:60].astype(np.float64)
    one, other = (MVRBM((3, 3), visible_shape=(8, 8), n_epochs=1, random_state=0) for _ in range(2))
    one.fit(X)
    other.fit(SAME[form](X))
    np.testing.assert_array_equal(one.components_, other.components_)
    np.testing.assert_array_equal(one.transform(X), other.transform(SAME[form](X)))


def as_shards(X, folder):
    for number, part in enumerate(np.array_split(X, 3)):
        np.save(folder / f"{number}.npy", part)
    return Shards(folder)


ON_DEMAND = {
    "a dataset of arrays": lambda X, folder: TensorDataset(torch.from_numpy(X)),
    "a dataset of pairs": lambda X, folder: TensorDataset(torch.from_numpy(X), torch.zeros(len(X))),
    "shards": as_shards,
}


@pytest.mark.parametrize("form", ON_DEMAND)
def test_samples_that_are_read_when_they_are_needed(form, digits, tmp_path):
    X, y = digits[:60], np.arange(60) % 3
    data = ON_DEMAND[form](X, tmp_path)
    fitted = MVRBM((3, 3), n_epochs=1, random_state=0).fit(data)
    np.testing.assert_array_equal(fitted.transform(data), fitted.transform(X))
    classifiers = [MVRBMClassifier((3, 3), n_epochs=1, random_state=0).fit(form, y) for form in (X, data)]
    np.testing.assert_array_equal(classifiers[0].predict_proba(X), classifiers[1].predict_proba(data))
    with pytest.raises(ValueError, match="inconsistent numbers of samples"):
        classifiers[0].fit(data, y[:10])


def test_a_polars_frame_is_a_table(digits):
    polars = pytest.importorskip("polars")
    rows = np.where(np.arange(64) == 5, np.nan, digits[:60].reshape(60, -1)).astype(np.float64)
    frame = polars.DataFrame({f"p{k}": [None if np.isnan(v) else v for v in rows[:, k]] for k in range(64)})
    one, other = (RBM(4, n_epochs=1, random_state=0).fit(data) for data in (rows, frame))
    np.testing.assert_array_equal(one.components_, other.components_)
    assert other.feature_names_in_[0] == "p0"


def test_bytes_of_a_tensor_are_scaled_too(digits):
    data = torch.from_numpy(np.round(digits[:60] * 255).astype(np.uint8))
    fitted = MVRBM((3, 3), n_epochs=1, random_state=0).fit(data)
    np.testing.assert_array_equal(
        fitted.components_, MVRBM((3, 3), n_epochs=1, random_state=0).fit(data.numpy()).components_
    )


def test_batches_are_put_together(model, digits):
    pieces = [model.transform(digits[first : first + 700]) for first in range(0, len(digits), 700)]
    np.testing.assert_allclose(model.transform(digits), np.concatenate(pieces), rtol=1e-5)
    mask = np.ones((8, 8), bool)
    mask[3:5] = False
    filled = model.inpaint(digits, mask, steps=2, burn_in=0)
    np.testing.assert_array_equal(filled[:, mask], digits[:, mask])
    np.testing.assert_array_equal(filled[:1024], model.inpaint(digits[:1024], mask, steps=2, burn_in=0))


def test_masked_frames_may_hold_anything(digits):
    rows = digits[:200].reshape(200, -1)
    known = np.random.default_rng(0).random(rows.shape) < 0.8
    broken = pd.DataFrame(np.where(known, rows, np.nan), columns=[f"p{k}" for k in range(64)])
    fitted = MVRBM((3, 3), visible_shape=(8, 8), n_epochs=1, random_state=0).fit(broken, mask=known)
    filled = fitted.inpaint(broken, known, steps=2, burn_in=1)
    np.testing.assert_array_equal(filled[known], np.where(known, rows, 0)[known])
    drawn = fitted.sample(5, init=broken[:5], mask=known[:5], steps=2)
    assert np.isfinite(drawn).all()


CALLS = {
    "transform": lambda model, X: model.transform(X),
    "reconstruct": lambda model, X: model.reconstruct(X),
    "inpaint": lambda model, X: model.inpaint(X, X > 0.5, steps=2, burn_in=1),
    "sample": lambda model, X: model.sample(len(X), steps=2, init=X),
    "score_samples": lambda model, X: model.score_samples(X),
    "free_energy": lambda model, X: model.free_energy(X),
}


@pytest.mark.filterwarnings("ignore::mvrbm.errors.RecipeWarning")
@pytest.mark.parametrize("call", CALLS.values(), ids=CALLS)
def test_every_method_checks_its_values_once(call, model, digits, monkeypatch):
    checked = []
    check = Bernoulli.check
    monkeypatch.setattr(Bernoulli, "check", lambda unit, x, layer: (checked.append(len(x)), check(unit, x, layer)))
    call(model, digits[:50])
    assert checked == [50]
    with pytest.raises(ValueError, match="require values from 0 to 1"):
        call(model, digits[:50] + 1)


@pytest.mark.parametrize("estimator", [MVRBM((3, 3), n_epochs=1), DeepMVRBM(((3, 3), (2, 2)), n_epochs=1)])
def test_fit_checks_its_values_once_before_training(estimator, digits, monkeypatch):
    checked = []
    check = Bernoulli.check
    monkeypatch.setattr(Bernoulli, "check", lambda unit, x, layer: (checked.append(len(x)), check(unit, x, layer)))
    monkeypatch.setattr(Trainer, "fit", lambda *args, **kwargs: None)  # the trainer has its own checks
    estimator.fit(digits[:50])
    assert checked == [50]


def test_columns_of_numbers_are_not_selected_one_by_one(monkeypatch):
    """This took most of the time for tables with 100,000 columns."""
    frame = pd.DataFrame(np.random.default_rng(0).normal(size=(5, 40)))
    frame[40] = ["1", "2", "3", "4", "5"]
    selected = []
    select = pd.DataFrame.__getitem__
    monkeypatch.setattr(pd.DataFrame, "__getitem__", lambda self, key: selected.append(key) or select(self, key))
    assert as_array(frame) is frame
    assert set(selected) == {40}
    with pytest.raises(ValueError, match="column 'word' of X is not numeric; drop it or replace it with numbers"):
        as_array(frame.assign(word="text"))
