"""Estimators whose training fails or is interrupted are unfitted, unchanged or usable, and never half-built."""

import signal
import time
from typing import NamedTuple

import numpy as np
import pandas as pd
import pytest
import torch
from sklearn.exceptions import NotFittedError

import mvrbm
from mvrbm import (
    MMVRBM,
    MVRBM,
    RBM,
    ClassificationMVRBM,
    DeepMVRBM,
    DeepMVRBMClassifier,
    MVRBMClassifier,
    MVRBMImputer,
    MVRBMOutlierDetector,
    ReplicatedSoftmax,
    Sweep,
)
from mvrbm.errors import DivergenceError
from mvrbm.interrupt import Terminated, terminate_in_order
from mvrbm.io.shards import Shards
from mvrbm.training import Callback
from mvrbm.vision import PhotoDenoiser, SuperResolver, TrainingStep

RNG = np.random.default_rng(0)
BITS = (RNG.random((120, 5, 4)) < 0.4).astype(np.float32)
CLASSES = RNG.integers(0, 3, 120)
HOLES = np.where(RNG.random(BITS.shape) < 0.2, np.nan, RNG.standard_normal(BITS.shape))
COUNTS = RNG.poisson(1.0, (60, 12))
PHOTOS = [RNG.integers(0, 256, (48, 48), dtype=np.uint8)]
SAME = {"random_state": 0, "device": "cpu"}
STEPS = [TrainingStep("images", n_samples=20, n_epochs=3, batch_size=10, learning_rate=1e-3)]
SMALL_STAGE = {"hidden_shape": (3, 3), "rank": 1, "steps": STEPS, **SAME}


class Kind(NamedTuple):
    make: object  # creates an estimator
    data: tuple  # arguments of fit
    bad: tuple  # arguments of fit that raise ValueError, of another shape if possible
    use: tuple  # public methods, as functions of the estimator
    keeps: bool  # whether an interrupted estimator can be used


def on_bits(*names, **how):
    return tuple(lambda model, name=name: getattr(model, name)(BITS[:7]) for name in names)


KINDS = {
    "RBM": Kind(
        lambda: MVRBM((3, 3), n_epochs=60, batch_size=10, **SAME),
        (BITS,),
        (5 * np.ones((9, 6, 6)),),
        (*on_bits("transform", "reconstruct", "score_samples", "free_energy"), lambda m: m.sample(3, steps=5)),
        True,
    ),
    "stack": Kind(
        lambda: DeepMVRBM(((3, 3), (2, 2)), n_epochs=25, batch_size=10, **SAME),
        (BITS,),
        (5 * np.ones((9, 6, 6)),),
        on_bits("transform", "reconstruct"),
        True,
    ),
    "modalities": Kind(
        lambda: MMVRBM((3, 3), n_epochs=40, batch_size=10, **SAME),
        ({"image": BITS, "label": CLASSES},),
        ({"image": 5 * BITS, "label": CLASSES % 2},),
        (
            lambda m: m.predict({"image": BITS[:7]}),
            lambda m: m.sample(label=1, n=2, steps=5),
            lambda m: m.transform({"image": BITS[:7], "label": CLASSES[:7]}),
        ),
        True,
    ),
    "classifier": Kind(
        lambda: MVRBMClassifier((3, 3), pretraining=10, n_epochs=8, batch_size=10, **SAME),
        (BITS, CLASSES),
        (5 * BITS[:, :4], CLASSES),
        on_bits("predict", "predict_proba", "hidden_maps"),
        True,
    ),
    "deep classifier": Kind(
        lambda: DeepMVRBMClassifier(((3, 3), (2, 2)), n_epochs=8, batch_size=10, early_stopping=True, **SAME),
        (BITS, CLASSES),
        (5 * BITS[:, :4], CLASSES),
        on_bits("predict", "predict_proba", "hidden_maps"),
        True,
    ),
    **{
        f"{mode} classification": Kind(
            lambda mode=mode: ClassificationMVRBM((3, 3), mode=mode, n_epochs=10, batch_size=10, **SAME),
            (BITS, CLASSES),
            (5 * BITS[:, :4], CLASSES % 2),
            (*on_bits("predict", "predict_proba", "free_energy"), lambda m: m.sample(label=1, n=2, steps=5)),
            True,
        )
        for mode in ("generative", "discriminative", "hybrid")
    },
    "topics": Kind(
        lambda: ReplicatedSoftmax(4, n_epochs=60, batch_size=10, **SAME),
        (COUNTS,),
        (-COUNTS[:, :5],),
        (lambda m: m.transform(COUNTS[:7]), lambda m: m.top_words(), lambda m: m.perplexity(COUNTS[:7])),
        True,
    ),
    "detector": Kind(
        lambda: MVRBMOutlierDetector((3, 3), n_epochs=40, batch_size=10, **SAME),
        (BITS,),
        (np.ones((1, 6, 6)),),
        on_bits("predict", "score_samples", "decision_function", "explain"),
        False,
    ),
    "imputer": Kind(
        lambda: MVRBMImputer("rectified", n_factors=2, n_hidden=5, n_epochs=15, **SAME),
        (HOLES,),
        (np.full((9, 3), np.nan),),
        tuple(lambda m, name=name: getattr(m, name)(HOLES[:7]) for name in ("transform", "standard_deviation", "draw")),
        False,
    ),
    "super-resolver": Kind(
        lambda: SuperResolver(2, 4, **SMALL_STAGE),
        (PHOTOS,),
        ([np.zeros((2, 2), np.uint8)],),
        (lambda m: m.upscale(PHOTOS[0][:12, :12]),),
        True,
    ),
    "denoiser": Kind(
        lambda: PhotoDenoiser("gray", patch=(4,), stride=(2,), **SMALL_STAGE),
        (PHOTOS,),
        ([np.zeros((2, 2), np.uint8)],),
        (lambda m: m.denoise(PHOTOS[0][:20, :20], level=0.1),),
        True,
    ),
    "sweep": Kind(
        lambda: Sweep(RBM(5, n_epochs=30, batch_size=10, **SAME), {"learning_rate": [0.01, 0.1]}),
        (BITS.reshape(120, -1),),
        (5 * BITS.reshape(120, -1),),
        (lambda m: m.best_estimator_.transform(BITS.reshape(120, -1)[:7]),),
        False,
    ),
}
PARAMETERS = pytest.mark.parametrize("kind", KINDS)


def is_unfitted(kind, model, tmp_path):
    """Check that no method of the model works, and return True, or return False if all methods work."""
    attributes = [name for name in vars(model) if name.endswith("_")]
    if attributes:
        for use in KINDS[kind].use:
            use(model)
        fitted = getattr(model, "best_estimator_", model)
        mvrbm.load(fitted.save(tmp_path / f"model-{time.monotonic_ns()}"), "cpu")
        return False
    for use in KINDS[kind].use:
        with pytest.raises((NotFittedError, AttributeError) if kind == "sweep" else NotFittedError):
            use(model)
    if kind != "sweep":
        with pytest.raises(NotFittedError):
            model.save(tmp_path / "none")
    return True


@pytest.fixture(scope="module")
def fitted():
    """One fitted estimator of each kind, and the seconds that `fit` takes."""
    found = {}

    def get(kind):
        if kind not in found:
            model = KINDS[kind].make()
            began = time.perf_counter()
            model.fit(*KINDS[kind].data)
            found[kind] = model, time.perf_counter() - began
        return found[kind]

    return get


@PARAMETERS
def test_a_failed_fit_leaves_a_new_estimator_unfitted(kind, tmp_path):
    model = KINDS[kind].make()
    before = dict(vars(model))
    with pytest.raises(ValueError, match=r".+"):
        model.fit(*KINDS[kind].bad)
    assert vars(model) == before
    assert is_unfitted(kind, model, tmp_path)


@PARAMETERS
def test_a_failed_fit_leaves_a_fitted_estimator_unchanged(kind, fitted):
    model, _ = fitted(kind)
    before = dict(vars(model))
    with pytest.raises(ValueError, match=r".+"):
        model.fit(*KINDS[kind].bad)
    assert list(vars(model)) == list(before)
    assert all(vars(model)[name] is value for name, value in before.items())
    for use in KINDS[kind].use:
        use(model)


def interrupted_with_gradients_disabled(function):
    """Do what Ctrl-C does if it arrives while ``torch.no_grad`` is entered: disable gradients, and interrupt."""

    def called(*args, **kwargs):
        function(*args, **kwargs)
        torch.set_grad_enabled(False)
        raise KeyboardInterrupt

    return called


@PARAMETERS
def test_an_interrupt_restores_the_grad_mode(kind, monkeypatch):
    model = KINDS[kind].make()
    monkeypatch.setattr(torch.Tensor, "float", interrupted_with_gradients_disabled(torch.Tensor.float))
    monkeypatch.setattr(torch, "as_tensor", interrupted_with_gradients_disabled(torch.as_tensor))
    try:
        with pytest.raises(KeyboardInterrupt):
            model.fit(*KINDS[kind].data)
        assert torch.is_grad_enabled()
    finally:
        torch.set_grad_enabled(True)


@PARAMETERS
def test_estimators_train_where_gradients_are_disabled(kind):
    """Ctrl-C during another computation can leave gradients disabled."""
    with torch.no_grad():
        model = KINDS[kind].make().fit(*KINDS[kind].data)
    for use in KINDS[kind].use:
        use(model)


class at_time:  # noqa: N801
    """Context manager that raises a signal after some seconds, and again after a hundredth of the time."""

    def __init__(self, seconds, number, again=False):
        self.seconds, self.number, self.again = seconds, number, again

    def __enter__(self):
        signal.signal(signal.SIGALRM, self._raise_signal)
        signal.setitimer(signal.ITIMER_REAL, self.seconds)

    def _raise_signal(self, *_):
        if self.again:
            self.again = False
            signal.setitimer(signal.ITIMER_REAL, self.seconds / 100)
        signal.raise_signal(self.number)

    def __exit__(self, *_):
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, signal.SIG_DFL)


@pytest.mark.slow
@pytest.mark.parametrize("share", [0.02, 0.1, 0.3, 0.5, 0.7, 0.9])
@PARAMETERS
def test_an_interrupted_estimator_is_unfitted_or_usable(kind, share, fitted, tmp_path):
    """Whenever the signal arrives. A signal that arrives after training has no effect."""
    seconds = fitted(kind)[1]
    for number, error in ((signal.SIGINT, KeyboardInterrupt), (signal.SIGTERM, Terminated)):
        model = KINDS[kind].make()
        try:
            with terminate_in_order(), at_time(share * seconds, number):
                model.fit(*KINDS[kind].data)
        except error:
            assert is_unfitted(kind, model, tmp_path) or KINDS[kind].keeps


@pytest.mark.slow
@PARAMETERS
def test_a_second_ctrl_c_leaves_the_estimator_as_it_was(kind, fitted, tmp_path):
    _, seconds = fitted(kind)
    model = KINDS[kind].make().fit(*KINDS[kind].data)
    before = dict(vars(model))
    finished = False
    try:
        with at_time(seconds / 2, signal.SIGINT, again=True):
            model.fit(*KINDS[kind].data)
            finished = True
    except KeyboardInterrupt:
        unchanged = all(vars(model).get(name) is value for name, value in before.items())
        # Training may have ended before the first signal, or between the two signals.
        assert unchanged or finished or KINDS[kind].keeps
    assert not is_unfitted(kind, model, tmp_path)


class Failing(Callback):
    """Raises an error after some updates."""

    def __init__(self, updates):
        self.updates = updates

    def on_batch_end(self, trainer, batch):
        self.updates -= 1
        if self.updates == 0:
            raise DivergenceError("on purpose")


@pytest.mark.parametrize("recipe", ["default", "generative"])
def test_training_on_that_fails_restores_the_parameters(recipe):
    model = MVRBM((3, 3), n_epochs=2, batch_size=10, recipe=recipe, warm_start=True, **SAME).fit(BITS)
    before = model.transform(BITS), model.n_epochs_, {name: chain.clone() for name, chain in model.chains_.items()}
    with pytest.raises(DivergenceError):
        model.fit(BITS, callbacks=[Failing(3)])
    np.testing.assert_array_equal(model.transform(BITS), before[0])
    assert model.n_epochs_ == before[1]
    assert model.chains_.keys() == before[2].keys()
    assert all(torch.equal(chain, before[2][name]) for name, chain in model.chains_.items())
    assert model.fit(BITS).n_epochs_ == 4


def test_a_bad_batch_does_not_disturb_training_in_parts():
    """The trainers stay, so that later calls give the same result as without the bad batch."""
    one, other = (MVRBM((3, 3), batch_size=10, **SAME).partial_fit(BITS) for _ in range(2))
    with pytest.raises(ValueError, match="from 0 to 1"):
        other.partial_fit(5 * BITS)
    np.testing.assert_array_equal(one.partial_fit(BITS).transform(BITS), other.partial_fit(BITS).transform(BITS))


def test_topics_that_fail_in_parts_restore_the_parameters(monkeypatch):
    model = ReplicatedSoftmax(4, batch_size=10, **SAME).partial_fit(COUNTS)
    before = model.transform(COUNTS)
    monkeypatch.setattr(model.trainer_, "train_on", failing_after(model.trainer_.train_on, 3))
    with pytest.raises(DivergenceError):
        model.partial_fit(COUNTS)
    np.testing.assert_array_equal(model.transform(COUNTS), before)
    assert model.partial_fit(COUNTS).n_epochs_ == 2


def failing_after(function, calls):
    left = iter(range(calls))

    def called(*args, **kwargs):
        if next(left, None) is None:
            raise DivergenceError("on purpose")
        return function(*args, **kwargs)

    return called


@pytest.mark.parametrize("make", [lambda: RBM(3, n_epochs=1, **SAME), lambda: MVRBMOutlierDetector(n_epochs=1, **SAME)])
def test_column_names_of_earlier_data_are_forgotten(make, tmp_path):
    table = pd.DataFrame(BITS[:, 0], columns=list("abcd"))
    np.save(tmp_path / "part.npy", BITS[:, 1, :3])
    model = make().fit(table)
    assert list(model.feature_names_in_) == list("abcd")
    model.fit(Shards(tmp_path))
    assert not hasattr(model, "feature_names_in_")
    assert mvrbm.load(model.save(tmp_path / "model"), "cpu").n_features_in_ == 3
