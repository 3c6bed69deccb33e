"""Masks of entries to show: random entries and boxes, or the entries that are known in other samples."""

import numpy as np
import pytest
import torch

from mvrbm import RandomSource
from mvrbm.estimators.imputer.masking import hold_out, masks_like_missing, random_masks


def test_masks_show_random_entries_and_boxes():
    masks = random_masks(2000, (8, 8), RandomSource(0), torch.empty(0))
    assert 0.35 < float(masks.float().mean()) < 0.65
    halves = masks.all(1) | ~masks.any(1)  # columns shown or hidden as a whole
    assert float(halves.all(1).float().mean()) > 0.02
    assert random_masks(10, (7,), RandomSource(0), torch.empty(0)).shape == (10, 7)


def test_masks_show_what_is_known_in_other_rows_and_more_of_every_second_row():
    known = torch.rand(2000, 50, generator=torch.Generator().manual_seed(0)) < 0.3
    shown = masks_like_missing(known, torch.arange(2000).roll(1), (50,), RandomSource(0))
    assert bool(shown[known.roll(1, 0)].all())
    more = (shown & ~known.roll(1, 0)).sum(1) / (~known.roll(1, 0)).sum(1)
    assert 0.45 < (more == 0).double().mean() < 0.57
    # In the other rows, the share of additional entries is uniform between 0 and 1.
    np.testing.assert_allclose(np.quantile(more[more > 0], (0.1, 0.5, 0.9)), (0.1, 0.5, 0.9), atol=0.07)


def test_complete_samples_share_random_masks_in_groups_of_twenty():
    shown = masks_like_missing(None, torch.arange(45), (4, 3), RandomSource(0))
    masks = random_masks(3, (4, 3), RandomSource(0), torch.empty(0)).flatten(1)
    assert torch.equal(shown, torch.stack([masks[sample // 20] for sample in range(45)]))


def test_held_out_entries_are_known_ones_of_some_samples():
    known = torch.rand(1000, 6, generator=torch.Generator().manual_seed(0)) < 0.7
    samples = hold_out(torch.zeros(1000, 6), known, (6,), RandomSource(0))
    assert torch.equal(samples.known, known)
    assert not bool((samples.shown & samples.held).any())
    assert 100 < len(samples.with_held_entries().x) <= 200  # of a fifth of the samples, some have no hidden entry


def test_at_most_400_samples_have_held_out_entries():
    known = torch.rand(5000, 60, generator=torch.Generator().manual_seed(0)) < 0.5
    samples = hold_out(torch.zeros(5000, 60), known, (60,), RandomSource(0))
    assert 350 < len(samples.with_held_entries().x) <= 400  # about 385, as few samples have no hidden entry


def test_rows_of_a_few_arrays_hide_shifted_gaps():
    known = torch.ones(2, 3 * 100, dtype=torch.bool)
    known[:, 10:18] = False  # a gap in the first row of both arrays
    samples = hold_out(torch.zeros(2, 300), known, (3, 100), RandomSource(0))
    assert torch.equal(samples.known, known)
    assert 0.05 < float(samples.held.double().mean()) < 0.4
    hidden = samples.held.reshape(6, 100)
    starts = (hidden[:, 1:] & ~hidden[:, :-1]).sum()
    assert float(hidden.sum() / starts.clamp(min=1)) > 4  # mean length of the gaps


@pytest.mark.parametrize("seed", range(5))
def test_entries_are_held_out_even_if_all_samples_lack_the_same_entries(seed):
    for known in (torch.arange(6).expand(4, 6) > 1, torch.arange(40).expand(1, 40) % 7 > 0, torch.ones(1, 40) > 0):
        shape = (6,) if len(known) == 4 else (2, 20)
        samples = hold_out(torch.zeros(known.shape), known, shape, RandomSource(seed))
        assert bool(samples.held.any())
        assert torch.equal(samples.known, known)


def test_masks_of_two_samples_are_those_of_the_other_one():
    known = torch.rand(2, 40, generator=torch.Generator().manual_seed(0)) < 0.7
    count = 0
    for seed in range(20):
        samples = hold_out(torch.zeros(2, 40), known, (40,), RandomSource(seed))
        count += not bool((samples.held & known.flip(0)).any())
    # One mask in about 25 shows everything, and is replaced by a random one.
    assert count >= 14


def test_entries_of_columns_with_few_missing_entries_are_held_out_too():
    """About 38 per column. Masks of other rows alone would hide none to two of them."""
    rng = np.random.default_rng(0)
    known = torch.ones(2000, 3, dtype=torch.bool)
    known[rng.integers(2000), 0] = known[rng.integers(2000), 1] = False
    known[:, 2] = torch.from_numpy(rng.random(2000) > 0.3)
    held = hold_out(torch.zeros(2000, 3), known, (3,), RandomSource(0)).held
    assert (held.sum(0)[:2] >= 10).all()
    complete = hold_out(torch.zeros(2000, 3), known | (torch.arange(3) == 1), (3,), RandomSource(0)).held
    assert not complete[:, 1].any()
