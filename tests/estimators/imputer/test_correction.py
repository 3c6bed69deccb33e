"""The correction: one pass up two machines and back down, added to a first prediction, and its training loss."""

import numpy as np
import pytest
import torch

from mvrbm import RandomSource
from mvrbm.estimators.imputer import correction as correction_module
from mvrbm.estimators.imputer.correction import Correction, CorrectionTrainer
from mvrbm.estimators.imputer.factor_analysis import Factors
from mvrbm.estimators.imputer.linear_model import Linear
from mvrbm.estimators.imputer.masking import Samples, masks_like_missing
from mvrbm.estimators.imputer.scaling import Scaling

# Range, location and scale of five entries, all different, and their units, which are all 1.
SCALING = Scaling(
    *torch.tensor(
        [[-1.0, 0, 1, 2, 3], [2, 4, 6, 8, 10], [0.5, 1, 2, 4, 5], [2, 0.5, 3, 1, 4], [1, 1, 1, 1, 1]]
    ).double()
)


def random_correction(filled):
    """A correction that changes predictions a lot."""
    correction = Correction.new(5, "rectified", 20, filled, RandomSource(0), torch.empty(0).double())
    with torch.no_grad():
        correction.upper.links["filled"].weight.mul_(100)
    return correction


def random_samples(n):
    generator = torch.Generator().manual_seed(0)
    x = SCALING.low + (SCALING.high - SCALING.low) * torch.rand(n, 5, generator=generator).double()
    known, held = torch.rand(2, n, 5, generator=generator) < torch.tensor([0.8, 0.3])[:, None, None]
    return Samples(torch.where(known, x, 0.0), known & ~held, known & held)


@pytest.mark.parametrize("filled", ["gaussian", "bernoulli"])
def test_a_correction_is_the_pass_up_two_machines_and_down_to_what_is_filled_in(filled):
    correction = Correction.new(5, "rectified", 20, filled, RandomSource(0), torch.empty(0))
    value, first = 0.1 + 0.8 * torch.rand(2, 3, 5, generator=torch.Generator().manual_seed(0))
    known = torch.rand(3, 5, generator=torch.Generator().manual_seed(1)) < 0.5
    found = correction(value, known, first)
    assert bool(((found - first).abs() < 0.1).all())  # almost nothing yet
    lower, upper = correction.children()
    weights = {name: link.weight for machine in (lower, upper) for name, link in machine.links.items()}
    below = torch.relu(value @ weights["value"].T + known.float() @ weights["known"].T)
    back = torch.relu(below @ weights["below"].T) @ weights["filled"]
    expected = first + back if filled == "gaussian" else torch.sigmoid(torch.logit(first) + back)
    torch.testing.assert_close(found, expected)
    assert correction.bounded == (filled == "bernoulli")


@pytest.mark.parametrize("filled", ["gaussian", "bernoulli"])
@torch.no_grad()
def test_corrections_of_data_are_standardized_or_bounded_by_its_range(filled):
    correction, samples = random_correction(filled), random_samples(8)
    low, high, center, scale = (part.numpy() for part in (SCALING.low, SCALING.high, SCALING.center, SCALING.scale))
    first = np.tile(center + 0.1, (8, 1))
    start, width = (low, high - low) if filled == "bernoulli" else (center, scale)
    value = (np.where(samples.shown, samples.x, first) - center) / scale
    passed = correction(*(torch.from_numpy(part) for part in (value, samples.shown.numpy(), (first - start) / width)))
    found = correction.correct(samples.x, samples.shown, torch.from_numpy(first), SCALING).numpy()
    np.testing.assert_allclose(found, start + width * passed.numpy(), rtol=1e-12)
    assert np.abs(found - first).max() > 0.1
    if filled == "bernoulli":
        assert ((found >= low) & (found <= high)).all()


@pytest.mark.parametrize("complete", [False, True])
@torch.no_grad()
def test_the_loss_is_the_weighted_error_on_shown_entries_that_are_hidden(complete, monkeypatch):
    monkeypatch.setattr(correction_module, "_MOST_MASKED", 0)  # draws masks for every update
    samples, correction = random_samples(30), random_correction("gaussian")
    if complete:
        samples = Samples(samples.x + ~samples.known, samples.shown | ~samples.known, samples.held)
    generator = torch.Generator().manual_seed(1)
    loadings = torch.randn(5, 2, generator=generator).double()
    factors = Factors(SCALING.center, loadings, torch.full((5,), 0.5).double())
    weights = torch.arange(1.0, 6).double()
    trainer = CorrectionTrainer(
        Linear(factors), SCALING, samples, (5,), weights, "rectified", 20, 1, 8, 0.1, RandomSource(2), lambda *_: None
    )
    rows = torch.randperm(30, generator=generator)[:25]
    mask = masks_like_missing(None if complete else samples.known, rows.roll(1), (5,), RandomSource(2))
    shown = samples.shown[rows] & mask
    covariance = (loadings @ loadings.T).numpy() + 0.5 * np.eye(5)
    squares, count = 0.0, 0
    for row, seen in zip(rows.tolist(), shown, strict=True):
        x, mean = samples.x[row].numpy(), SCALING.center.numpy()
        pull = np.linalg.solve(covariance[np.ix_(seen, seen)], (x - mean)[seen])
        first = mean + (loadings @ loadings.T).numpy()[:, seen] @ pull  # of the factors, without noise
        found = correction.correct(*(torch.as_tensor(part)[None] for part in (x, seen, first)), SCALING)[0].numpy()
        for entry in range(5):
            if samples.shown[row, entry] and not seen[entry]:
                squares += float(weights[entry]) * (found[entry] - x[entry]) ** 2
                count += 1
    assert count >= 10
    assert float(trainer._loss(correction)(rows)) == pytest.approx(squares / count * len(rows), rel=1e-9)


@torch.no_grad()
def test_predictions_for_masks_are_computed_once():
    samples = random_samples(30)
    linear = Linear(Factors(SCALING.center, torch.eye(5, 2).double(), torch.ones(5).double()))
    trainer = CorrectionTrainer(
        linear, SCALING, samples, (5,), torch.ones(5), "rectified", 20, 1, 8, 0.1, RandomSource(2), lambda *_: None
    )
    shown, first = trainer._masked
    for own_shown, own_first in zip(shown, first, strict=True):
        torch.testing.assert_close(own_first, linear.conditional_mean(samples.x, own_shown))
        assert not bool((own_shown & ~samples.shown).any())  # held-out entries stay hidden
    assert len(torch.unique(shown, dim=0)) == len(shown)
    assert 0.02 < float((samples.shown & ~shown).sum() / (len(shown) * samples.shown.sum())) < 0.8
    # The loss of a sample is that of one of its masks.
    correction = random_correction("gaussian")
    row = samples.shown.sum(1).argmax()
    losses = []
    for mask, mean in zip(shown, first, strict=True):
        errors = (correction.correct(samples.x, mask, mean, SCALING) - samples.x)[row][samples.shown[row] & ~mask[row]]
        losses.append(float((errors**2).mean()) if len(errors) else 0.0)
    found = {float(trainer._loss(correction)(row[None])) for _ in range(40)}
    assert len(found) > 2
    assert all(min(abs(loss - other) for other in losses) < 1e-9 for loss in found)


@torch.no_grad()
def test_errors_are_measured_on_held_out_entries():
    samples, correction = random_samples(30), random_correction("gaussian")
    weights = torch.arange(1.0, 6).double()
    factors = Factors(SCALING.center, torch.eye(5, 2).double(), torch.ones(5).double())
    trainer = CorrectionTrainer(
        Linear(factors), SCALING, samples, (5,), weights, "rectified", 20, 1, 8, 0.1, RandomSource(2), lambda *_: None
    )
    # Every second sample with held-out entries counts.
    # Each of the first two entries is half signal and half noise, and tells nothing about the others.
    signal = np.array([0.5, 0.5, 0, 0, 0]) * samples.shown.numpy()
    first = SCALING.center.numpy() + signal * (samples.x - SCALING.center).numpy()
    corrected = correction.correct(samples.x, samples.shown, torch.from_numpy(first), SCALING).numpy()
    held = samples.held.numpy()
    tested = held.any(1)
    squares = (np.arange(1, 6) * (corrected - samples.x.numpy()) ** 2)[tested][::2][held[tested][::2]]
    assert trainer._score(correction)()[0] == pytest.approx(np.sqrt(squares.mean()), rel=1e-9)


@pytest.mark.parametrize(
    ("gains", "reasons"),
    [
        ((0.0,), ["a short trial did not reduce the error by more than chance"]),
        ((0.1, 0.0), ["it does not reduce the error by more than chance"]),
        ((0.1, 0.1), []),
    ],
)
def test_an_optional_correction_is_used_only_if_two_looks_show_smaller_errors(gains, reasons, monkeypatch):
    """The first look follows a short training run. The second one uses samples that did not select the epoch."""
    samples = random_samples(200)
    factors = Factors(SCALING.center, torch.eye(5, 2).double(), torch.ones(5).double())
    looks = iter(gains)
    trained = []
    noted: list[str] = []

    class Better:
        def __init__(self):
            self.gain = next(looks)

        def correct(self, x, known, first, scaling):
            return first + self.gain * (x - first)  # towards the truth

    def train_one(self, filled, n_epochs):
        trained.append(n_epochs)
        return 0.5, Better()

    monkeypatch.setattr(CorrectionTrainer, "_train_one", train_one)
    ones = torch.ones(5).double()
    trainer = CorrectionTrainer(
        linear=Linear(factors),
        scaling=SCALING,
        samples=samples,
        shape=(5,),
        weights=ones,
        hidden="rectified",
        n_hidden=20,
        n_epochs=1000,
        batch_size=100,
        learning_rate=0.1,
        rng=RandomSource(2),
        report=print,
        filled=("gaussian",),
        optional=True,
        note_rejection=noted.append,
    )
    assert (trainer.train() is not None) == (not reasons)
    assert noted == reasons
    assert trained == [50, 1000][: len(gains)]


@pytest.mark.parametrize("best", ["gaussian", "bernoulli"])
def test_short_trials_choose_the_units_with_the_smaller_error(best, monkeypatch):
    trained = []

    def train_one(self, filled, n_epochs):
        trained.append((filled, n_epochs))
        return 0.1 if filled == best else 0.2, filled

    monkeypatch.setattr(CorrectionTrainer, "_train_one", train_one)
    factors = Factors(SCALING.center, torch.eye(5, 2).double(), torch.ones(5).double())
    trainer = CorrectionTrainer(
        Linear(factors),
        SCALING,
        random_samples(1000),
        (5,),
        torch.ones(5),
        "rectified",
        20,
        None,
        100,
        0.1,
        RandomSource(2),
        print,
    )
    assert trainer.train() == best
    # Ten updates per epoch: 100 updates per trial, and 2,000 updates with the chosen units, which is two per sample.
    assert trained == [("gaussian", 10), ("bernoulli", 10), (best, 200)]
