"""Parts of the Triton kernels by themselves: random numbers, means, draws; interpreted, or on a GPU."""

import os

import numpy as np
import pytest
import torch
from scipy import stats

triton = pytest.importorskip("triton")
import triton.language as tl  # noqa: E402

from mvrbm.backends.cuda.draws import draw_layer, mean, normal, uniform  # noqa: E402

ON_GPU = torch.cuda.is_available()
DEVICE = "cuda" if ON_GPU else "cpu"
if not ON_GPU:  # as conftest.py does it for the kernels themselves
    os.environ["TRITON_INTERPRET"] = "1"


@triton.jit(do_not_specialize=["update", "sample", "draw", "base"])
def write_numbers(out, key, update, sample, draw, base, NORMAL: tl.constexpr, ROWS: tl.constexpr, COLS: tl.constexpr):
    at = tl.arange(0, ROWS)[:, None] * COLS + tl.arange(0, COLS)[None, :]
    where = tl.full([], draw, tl.uint32)
    if NORMAL:
        tl.store(out + at, normal(tl.load(key), update, sample, where, base, ROWS, COLS))
    else:
        tl.store(out + at, uniform(tl.load(key), update, sample, where, base, ROWS, COLS))


@triton.jit
def write_states(fields, numbers, means, draws, SIZE: tl.constexpr):
    at = tl.arange(0, SIZE)
    field = tl.load(fields + at)
    tl.store(means + at, mean(field, False))
    tl.store(draws + at, draw_layer(field, tl.load(numbers + at), False))


if not ON_GPU:
    del os.environ["TRITON_INTERPRET"]
pytestmark = pytest.mark.usefixtures("interpreted")


def numbers(key=3, update=5, sample=7, draw=1, base=0, rows=32, columns=32, normal=False):
    out = torch.empty(rows, columns, device=DEVICE)
    keys = torch.tensor([key], device=DEVICE)
    write_numbers[(1,)](out, keys, update, sample, draw, base, NORMAL=normal, ROWS=rows, COLS=columns)
    return out.cpu().numpy()


def philox(counter, key):
    """Philox 4x32-10 as Salmon et al. (2011) define it, on Python's integers."""
    a, b, c, d = counter
    low, high = key & 0xFFFFFFFF, key >> 32
    for _ in range(10):
        left, right = a * 0xD2511F53, c * 0xCD9E8D57
        a, b, c, d = (right >> 32) ^ b ^ low, right & 0xFFFFFFFF, (left >> 32) ^ d ^ high, left & 0xFFFFFFFF
        low, high = (low + 0x9E3779B9) & 0xFFFFFFFF, (high + 0xBB67AE85) & 0xFFFFFFFF
    return a, b, c, d


def test_the_transcription_of_philox_gives_the_authors_numbers():
    assert philox((0, 0, 0, 0), 0) == (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)
    ones = 0xFFFFFFFF
    assert philox((ones,) * 4, (ones << 32) + ones) == (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD)


@pytest.mark.parametrize(("rows", "columns", "base"), [(32, 32, 0), (16, 64, 0), (64, 16, 0), (2, 512, 768)])
def test_uniform_numbers_are_those_of_philox(rows, columns, base):
    key = (9 << 32) + 12345
    found = numbers(key=key, base=base, rows=rows, columns=columns)
    deep = 8 if rows >= 16 else 1
    for row in range(0, rows, 3):
        for column in range(0, columns, 5):
            block, below, inner = row // (2 * deep), row // deep % 2, row % deep
            entry = base + (block * deep + inner) * (columns // 2) + column // 2
            word = philox((entry, 7, 5, 1), key)[2 * (column % 2) + below]
            assert found[row, column] == ((word >> 9) + 0.5) / 2**23, (row, column)


@pytest.mark.parametrize("normal", [False, True])
def test_numbers_have_their_distribution(normal):
    drawn = np.concatenate([numbers(sample=sample, normal=normal).ravel() for sample in range(20)])
    assert stats.kstest(drawn, "norm" if normal else "uniform").pvalue > 1e-3
    assert not normal or np.isfinite(drawn).all()
    assert normal or 0 < drawn.min() < drawn.max() < 1


def test_numbers_are_others_for_every_model_update_sample_and_draw():
    calls = [{}, {"key": 4}, {"update": 6}, {"sample": 8}, {"draw": 2}]
    drawn = np.stack([numbers(**call).ravel() for call in calls])
    assert np.abs(np.corrcoef(drawn) - np.eye(len(calls))).max() < 0.15
    np.testing.assert_array_equal(drawn[0], numbers().ravel())


def test_means_and_draws():
    fields = torch.tensor([0.0, 0.0, 2.0, 2.0, -3.0, -3.0, 30.0, -30.0, 200.0, -200.0, 0.5, 0.5, 1.0, 1.0, 1.0, 1.0])
    means = torch.sigmoid(fields.double()).float()
    rng = means.clone()
    rng[::2] -= 1e-4  # below: a one
    rng[1::2] += 1e-4
    rng = rng.clamp(2**-24, 1 - 2**-24)
    found, drawn = torch.empty(16, device=DEVICE), torch.empty(16, device=DEVICE)
    write_states[(1,)](fields.to(DEVICE), rng.to(DEVICE), found, drawn, SIZE=16)
    torch.testing.assert_close(found.cpu(), means, rtol=2e-6, atol=1e-37)
    wanted = (rng < means).float()
    assert wanted.tolist() == [1, 0] * 3 + [1, 0, 1, 0] + [1, 0] * 3
    assert drawn.cpu().tolist() == wanted.tolist()
