"""Weighted samples are drawn as often as their weights demand, in every source and on every backend."""

from fractions import Fraction

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader, TensorDataset

from mvrbm import (
    MMVRBM,
    MVRBM,
    RBM,
    TVRBM,
    Bernoulli,
    BoltzmannMachine,
    Categorical,
    ClassificationMVRBM,
    DeepMVRBM,
    Dense,
    Gaussian,
    RandomSource,
    Sweep,
)
from mvrbm.data.sample_weights import SampleWeights
from mvrbm.data.sources import as_source
from mvrbm.errors import StorageError
from mvrbm.models import mvrbm
from mvrbm.training import Callback, Checkpoint, Recipe, Trainer
from mvrbm.training.epochs import EpochOrders

N = 40


class Shift:
    """A random source whose draw is given."""

    def __init__(self, value):
        self.value = value

    def uniform(self, shape, like):
        return torch.full(shape, self.value, dtype=torch.float64)


class Seen(Callback):
    """The samples of each epoch, identified by their first entry."""

    every_batch = True

    def __init__(self):
        self.epochs = []

    def on_epoch_begin(self, trainer):
        self.epochs.append([])

    def on_batch_begin(self, trainer, batch):
        self.epochs[-1] += batch.visible["visible"].flatten(1)[:, 0].tolist()


def weights(seed=0, n=N):
    values = np.random.default_rng(seed).random(n) ** 3
    values[::7] = 0
    return values


def counted(shift, values):
    identity = torch.arange(len(values))[None]
    return np.bincount(SampleWeights(values).draw(identity, [Shift(shift)])[0], minlength=len(values))


@pytest.mark.parametrize("seed", range(5))
def test_a_sample_is_drawn_floor_or_ceil_times(seed):
    values = weights(seed)
    exact = N * values / values.sum()
    for shift in (1e-7, 0.25, 0.5, 1 - 1e-7):
        counts = counted(shift, values)
        assert counts.sum() == N
        assert ((counts == np.floor(exact)) | (counts == np.ceil(exact))).all()


def test_the_mean_over_all_shifts_is_proportional_to_the_weights():
    values = weights()
    steps = 400
    mean = np.mean([counted((step + 0.5) / steps, values) for step in range(steps)], axis=0)
    np.testing.assert_allclose(mean, N * values / values.sum(), atol=1 / steps)


@pytest.mark.parametrize("value", [1, 3, 0.1, 1 / 3, 1e-300, 1e300])
def test_equal_weights_draw_every_sample_once(value):
    for shift in (1e-7, 0.5, 1 - 1e-7):
        np.testing.assert_array_equal(counted(shift, np.full(1000, value)), 1)


@pytest.mark.parametrize(("values", "shift"), [([3, 0, 1, 1, 0, 2, 0], (3, 8)), ([3, 0, 1, 1, 0, 2, 1], (5, 8))])
def test_rows_are_the_plain_definition(values, shift):
    """Row i is drawn for every place k + shift that lies between the shares of the rows before it and its own."""
    n, total, shift = len(values), sum(values), Fraction(*shift)
    ends = [Fraction(n * sum(values[: i + 1]), total) for i in range(n)]
    expected = [next(i for i, end in enumerate(ends) if k + shift < end) for k in range(n)]
    assert SampleWeights(values).draw(torch.arange(n)[None], [Shift(float(shift))])[0].tolist() == expected


def test_whole_numbers_give_the_epochs_of_repeated_samples():
    values = [4, 0, 2, 0, 1, 1, 0, 0]
    source = as_source(np.arange(8.0).reshape(8, 1), BoltzmannMachine(Gaussian(1), Bernoulli(2), Dense()))
    source.weigh(values)
    orders = [
        torch.cat([batch.visible["visible"].flatten() for batch in source.batches(3, RandomSource(0).at_step(epoch))])
        for epoch in range(5)
    ]
    assert len({tuple(order.tolist()) for order in orders}) > 1
    for order in orders:
        assert sorted(order.tolist()) == np.repeat(np.arange(8), values).tolist()


@pytest.mark.parametrize("masked", [False, True])
def test_moments_are_those_of_repeated_samples(masked):
    rng = np.random.default_rng(0)
    x = 40 + 3 * rng.standard_normal((400, 5))
    known = rng.random(x.shape) < 0.5 if masked else None
    values = rng.integers(0, 4, 400)

    def moments(x, known, values):
        source = as_source(x, BoltzmannMachine(Gaussian(5), Bernoulli(3), Dense()).double(), mask=known)
        source.weigh(values)
        return source.moments()["visible"]

    weighted = moments(x, known, values)
    repeated = moments(np.repeat(x, values, 0), None if known is None else np.repeat(known, values, 0), None)
    torch.testing.assert_close(weighted.mean, repeated.mean, rtol=1e-12, atol=0)
    torch.testing.assert_close(weighted.variance, repeated.variance, rtol=1e-9, atol=0)


def test_moments_of_many_samples_use_those_with_weight():
    """Moments of more samples than they read do not depend on which rows have a weight."""
    x = np.random.default_rng(0).standard_normal((50_000, 1))
    values = np.zeros(len(x))
    values[[3, 17, 31_111]] = [1, 2, 1]
    source = as_source(x, BoltzmannMachine(Gaussian(1), Bernoulli(3), Dense()).double())
    source.weigh(values)
    mean = np.average(x, axis=0, weights=values)
    np.testing.assert_allclose(source.moments()["visible"].mean, mean, rtol=1e-9)


def test_gpu_epochs_have_the_order_of_batches():
    source = as_source(np.arange(N).reshape(N, 1), BoltzmannMachine(Gaussian(1), Bernoulli(2), Dense()))
    source.weigh(weights())
    rng = RandomSource(5)
    orders = EpochOrders(rng, N, torch.device("cpu"), source.weights)
    for epoch in (0, 1, 30, 3):
        rows = [batch.visible["visible"].flatten() for batch in source.batches(16, rng.at_step(epoch))]
        assert orders.of_epoch(epoch).tolist() == torch.cat(rows).tolist()


def test_backends_train_alike():
    x = (np.random.default_rng(0).random((N, 3, 4)) < 0.3).astype(np.float32)
    machines = {}
    for backend in ("reference", "gemm", "auto"):
        trainer = Trainer(mvrbm((3, 4), (2, 3)), Recipe(batch_size=16), backend=backend)
        trainer.sample_weight = weights()
        machines[backend] = trainer.fit(x, 3, initialize=True).machine
    for machine in machines.values():
        for one, other in zip(machine.parameters(), machines["reference"].parameters(), strict=True):
            torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-5)


def test_equal_weights_train_as_no_weights():
    x = (np.random.default_rng(0).random((N, 3, 4)) < 0.3).astype(np.float32)
    plain, weighted = (MVRBM((2, 3), n_epochs=3, random_state=0).fit(x, sample_weight=w) for w in (None, np.full(N, 2)))
    np.testing.assert_array_equal(plain.components_, weighted.components_)


def labeled(estimator):
    return lambda x, weight: estimator.fit(x, np.arange(len(x)) % 2, sample_weight=weight).machine_


def unlabeled(estimator, convert=lambda x: x):
    return lambda x, weight: estimator.fit(convert(x), sample_weight=weight).machine_


SETTINGS = {"n_epochs": 2, "batch_size": 16, "random_state": 0}
ESTIMATORS = {
    "RBM": unlabeled(RBM(3, **SETTINGS), lambda x: x.reshape(len(x), -1)),
    "MVRBM": unlabeled(MVRBM((2, 3), **SETTINGS)),
    "PCD": unlabeled(MVRBM((2, 3), recipe="generative", **SETTINGS)),
    "TVRBM": unlabeled(TVRBM((2, 3), rank=2, **SETTINGS)),
    "MMVRBM": unlabeled(MMVRBM((2, 3), **SETTINGS), lambda x: {"one": x, "two": x}),
    "DeepMVRBM": unlabeled(DeepMVRBM(((2, 3), (2, 2)), **SETTINGS)),
    "DeepMVRBM with samples": unlabeled(DeepMVRBM(((2, 3), (2, 2)), feed="sample", **SETTINGS)),
    "ClassificationMVRBM": labeled(ClassificationMVRBM((2, 3), mode="generative", **SETTINGS)),
    "Sweep": lambda x, weight: (
        Sweep(MVRBM((2, 3), **SETTINGS), {"rank": [1]}, scoring=lambda *_: 0.0)
        .fit(x, sample_weight=weight)
        .best_estimator_.machine_
    ),
}


@pytest.mark.parametrize("name", ESTIMATORS)
def test_samples_without_weight_change_nothing(name):
    rng = np.random.default_rng(0)
    x = (rng.random((N, 3, 4)) < 0.3).astype(np.float32)
    values = weights()
    other = np.where((values == 0)[:, None, None], 1 - x, x)
    one, same, plain = (ESTIMATORS[name](data, w) for data, w in [(x, values), (other, values), (other, None)])
    for first, second in zip(one.parameters(), same.parameters(), strict=True):
        assert torch.equal(first, second)
    assert not torch.equal(next(iter(one.links.values())).dense(), next(iter(plain.links.values())).dense())


def test_partial_fit_draws_by_the_weights_of_its_call():
    x = np.eye(6, dtype=np.float32)
    values = np.array([0, 0, 3, 0, 0, 3])
    model = RBM(3, random_state=0, batch_size=6).fit(x)
    other = RBM(3, random_state=0, batch_size=6).fit(x)
    changed = x.copy()
    changed[0] = 1
    model.partial_fit(x, sample_weight=values)
    other.partial_fit(changed, sample_weight=values)
    np.testing.assert_array_equal(model.components_, other.components_)


def test_a_run_resumes_with_its_weights_only(tmp_path):
    x = (np.random.default_rng(0).random((N, 3, 4)) < 0.3).astype(np.float32)

    def fit(n_epochs, weight, **arguments):
        return MVRBM((2, 3), random_state=0, n_epochs=n_epochs, batch_size=16).fit(x, sample_weight=weight, **arguments)

    whole = fit(4, weights())
    fit(2, weights(), callbacks=[Checkpoint(tmp_path)])
    np.testing.assert_array_equal(fit(4, weights(), resume=tmp_path).components_, whole.components_)
    for weight in (None, weights(1)):
        with pytest.raises(StorageError, match="sample_weight has different values"):
            fit(4, weight, resume=tmp_path)


def test_datasets_and_shards_are_weighted(tmp_path):
    x = np.arange(float(N), dtype=np.float32).reshape(N, 1)
    np.save(tmp_path / "part.npy", x)
    for data in (x, TensorDataset(torch.from_numpy(x)), tmp_path):
        seen = Seen()
        trainer = Trainer(BoltzmannMachine(Gaussian(1), Bernoulli(2), Dense()), Recipe(batch_size=16), callbacks=[seen])
        trainer.sample_weight = weights()
        trainer.fit(data, 3, initialize=True)
        exact = N * weights() / weights().sum()
        for epoch in seen.epochs:
            counts = np.bincount(np.array(epoch, dtype=int), minlength=N)
            assert ((counts == np.floor(exact)) | (counts == np.ceil(exact))).all()


BAD = [
    ([1, 2], "one weight for each of the 40 samples, got 2"),
    (np.zeros(N), "at least one positive number"),
    (-np.ones(N), "nonnegative"),
    (np.full(N, np.nan), "finite"),
    (np.ones((N, 1)), "one finite, nonnegative number per sample"),
]


@pytest.mark.parametrize(("values", "message"), BAD)
def test_bad_weights_are_named(values, message):
    trainer = Trainer(BoltzmannMachine(Categorical(2), Bernoulli(2), Dense()))
    trainer.sample_weight = values
    with pytest.raises(ValueError, match=message):
        trainer.fit(np.eye(2)[np.arange(N) % 2])


def test_a_loader_has_no_weights():
    trainer = Trainer(BoltzmannMachine(Bernoulli(2), Bernoulli(2), Dense()))
    trainer.sample_weight = np.ones(4)
    with pytest.raises(ValueError, match="sample_weight is not supported for data loaders"):
        trainer.fit(DataLoader(TensorDataset(torch.zeros(4, 2))))
