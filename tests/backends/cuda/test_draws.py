"""Random numbers, means and draws in Triton, interpreted or on a GPU, against their definition in PyTorch."""

import os

import numpy as np
import pytest
import torch
from scipy import stats

from mvrbm.random import philox

triton = pytest.importorskip("triton")
import triton.language as tl  # noqa: E402

ON_GPU = torch.cuda.is_available()
DEVICE = "cuda" if ON_GPU else "cpu"
if not ON_GPU:  # as conftest.py does it for the kernels themselves
    os.environ["TRITON_INTERPRET"] = "1"
from mvrbm.backends.cuda.draws import draw_categories, draw_layer, matrix_numbers, mean  # noqa: E402
from mvrbm.random.kernels import normal_lines, place_of, uniform_lines, uniform_places  # noqa: E402


@triton.jit(do_not_specialize=["step", "row", "draw"])
def write_matrix(out, key, step, row, draw, NORMAL: tl.constexpr, COLUMNS: tl.constexpr, HEIGHT: tl.constexpr,
                 WIDTH: tl.constexpr):  # fmt: skip
    at = tl.arange(0, HEIGHT)[:, None] * WIDTH + tl.arange(0, WIDTH)[None, :]
    row = tl.program_id(0) + row
    tl.store(out + at, matrix_numbers(tl.load(key), step, row, draw, 1000, HEIGHT, COLUMNS, NORMAL, HEIGHT, WIDTH))


@triton.jit(do_not_specialize=["step", "row", "draw"])
def write_lines(out, key, step, row, draw, NORMAL: tl.constexpr, COLUMNS: tl.constexpr, HEIGHT: tl.constexpr,
                WIDTH: tl.constexpr):  # fmt: skip
    line = tl.arange(0, HEIGHT)
    at = line[:, None] * WIDTH + tl.arange(0, WIDTH)[None, :]
    if NORMAL:
        tl.store(out + at, normal_lines(tl.load(key), row, line, step, draw, HEIGHT, COLUMNS, WIDTH))
    else:
        tl.store(out + at, uniform_lines(tl.load(key), row, line, step, draw, HEIGHT, COLUMNS, WIDTH))


@triton.jit(do_not_specialize=["step", "row", "draw"])
def write_entries(out, key, step, row, draw, NORMAL: tl.constexpr, COLUMNS: tl.constexpr, HEIGHT: tl.constexpr,
                  WIDTH: tl.constexpr):  # fmt: skip
    line, column = tl.arange(0, HEIGHT)[:, None], tl.arange(0, WIDTH)[None, :]
    place = place_of(line, column, HEIGHT, COLUMNS)
    tl.store(out + line * WIDTH + column, uniform_places(tl.load(key), row, place, step, draw))


@triton.jit
def write_states(fields, numbers, means, draws, SIZE: tl.constexpr):
    at = tl.arange(0, SIZE)
    field = tl.load(fields + at)
    tl.store(means + at, mean(field, False))
    tl.store(draws + at, draw_layer(field, tl.load(numbers + at), False))


@triton.jit
def write_categories(fields, numbers, draws, ROWS: tl.constexpr, CATEGORIES: tl.constexpr, WIDE: tl.constexpr):
    row, category = tl.arange(0, ROWS)[:, None, None], tl.arange(0, WIDE)[None, None, :]
    exists = (category < CATEGORIES) & (row >= 0)
    at = row * CATEGORIES + category
    level = tl.load(numbers + tl.arange(0, ROWS))[:, None]
    drawn = draw_categories(tl.load(fields + at, mask=exists, other=0.0), level, exists, CATEGORIES)
    tl.store(draws + at, drawn, mask=exists)


if not ON_GPU:
    del os.environ["TRITON_INTERPRET"]
pytestmark = pytest.mark.usefixtures("interpreted")

KEY = (9 << 32) + 12345


def numbers(kernel=write_matrix, key=KEY, step=5, row=7, draw=1, columns=32, height=32, width=32, normal=False):
    out = torch.empty(height, width, device=DEVICE)
    keys = torch.tensor([key], device=DEVICE)
    kernel[(1,)](out, keys, step, row, draw, NORMAL=normal, COLUMNS=columns, HEIGHT=height, WIDTH=width)
    return out.cpu()[:, :columns]


@pytest.mark.parametrize("kernel", [write_matrix, write_lines, write_entries], ids=["pairs", "lines", "entries"])
@pytest.mark.parametrize(
    ("height", "width", "columns"), [(32, 32, 32), (16, 64, 50), (64, 16, 5), (16, 32, 31), (32, 32, 25), (16, 16, 1)]
)
def test_uniform_numbers_are_those_of_the_definition(kernel, height, width, columns):
    found = numbers(kernel, height=height, width=width, columns=columns)
    expected = philox.uniform(KEY, (1, height, columns), 5, 1, 7, torch.float32, torch.device("cpu"))[0]
    assert torch.equal(found, expected)


@pytest.mark.parametrize(("width", "columns"), [(1, 1), (2, 2), (4, 3)])
def test_short_lines_have_the_numbers_of_the_definition(width, columns):
    found = numbers(write_lines, height=16, width=width, columns=columns)
    expected = philox.uniform(KEY, (1, 16, columns), 5, 1, 7, torch.float32, torch.device("cpu"))[0]
    assert torch.equal(found, expected)


@pytest.mark.parametrize("kernel", [write_matrix, write_lines], ids=["pairs", "lines"])
def test_normal_numbers_are_those_of_the_definition(kernel):
    found = numbers(kernel, columns=27, normal=True)
    where = torch.float64, torch.device("cpu")
    radius = philox.uniform(KEY, (1, 32, 27), 5, 1, 7, *where)[0]
    angle = philox.uniform(KEY, (1, 32, 27), 5, 1 + philox.ANGLES, 7, *where)[0]
    expected = torch.sqrt(-2 * torch.log(radius)) * torch.cos(2 * torch.pi * angle)
    torch.testing.assert_close(found.double(), expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("normal", [False, True])
def test_numbers_have_their_distribution(normal):
    drawn = np.concatenate([numbers(row=row, normal=normal).numpy().ravel() for row in range(20)])
    assert stats.kstest(drawn, "norm" if normal else "uniform").pvalue > 1e-3
    assert not normal or np.isfinite(drawn).all()
    assert normal or 0 < drawn.min() < drawn.max() < 1


def test_numbers_are_others_for_every_model_update_sample_and_draw():
    calls = [{}, {"key": KEY + 1}, {"step": 6}, {"row": 8}, {"draw": 2}]
    drawn = np.stack([numbers(**call).numpy().ravel() for call in calls])
    assert np.abs(np.corrcoef(drawn) - np.eye(len(calls))).max() < 0.15
    np.testing.assert_array_equal(drawn[0], numbers().numpy().ravel())


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


def test_categories_are_drawn_by_inverting_the_distribution_function():
    fields = torch.tensor([[0.0, 1.0, -1.0], [2.0, 2.0, 2.0], [-50.0, 0.0, 50.0], [0.0, 0.0, 0.0]])
    level = torch.tensor([0.3, 0.7, 1e-7, 1 - 2**-24])
    drawn = torch.zeros(4, 3, device=DEVICE)
    write_categories[(1,)](fields.to(DEVICE), level.to(DEVICE), drawn, ROWS=4, CATEGORIES=3, WIDE=4)
    sums = torch.softmax(fields.double(), -1).cumsum(-1)
    wanted = (level[:, None] >= sums).sum(-1).clamp(max=2)
    assert torch.equal(drawn.cpu().argmax(1), wanted)
    assert torch.equal(drawn.cpu().sum(1), torch.ones(4))
