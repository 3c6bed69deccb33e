"""Philox in PyTorch, C and Triton against published values and a transcription in plain Python."""

import pytest
import torch

from mvrbm.compiled import random as compiled
from mvrbm.random import philox

# Published with Random123 (kat_vectors, philox4x32 with 10 rounds): counter, key, words.
PUBLISHED = [
    ((0, 0, 0, 0), (0, 0), (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)),
    ((0xFFFFFFFF,) * 4, (0xFFFFFFFF,) * 2, (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD)),
    (
        (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344),
        (0xA4093822, 0x299F31D0),
        (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1),
    ),
]
SHAPES = [
    (3, 28, 28),
    (4, 25, 25),
    (7, 3),
    (5,),
    (4, 1),
    (2, 2, 3, 5),
    (2, 9, 7),
    (3, 5, 1),
    (2, 4, 2),
    (1, 40),
    (0, 4),
    (3, 0),
    (),
]
KEY = 0x299F31D0A4093822 >> 1
CPU = torch.device("cpu")


def plain_philox(counter, key):
    """Ten rounds of Philox 4x32, as the paper prints them."""
    (c0, c1, c2, c3), (k0, k1) = counter, key
    for _ in range(10):
        one, other = c0 * 0xD2511F53, c2 * 0xCD9E8D57
        c0, c1, c2, c3 = other >> 32 ^ c1 ^ k0, other % 2**32, one >> 32 ^ c3 ^ k1, one % 2**32
        k0, k1 = (k0 + 0x9E3779B9) % 2**32, (k1 + 0xBB67AE85) % 2**32
    return c0, c1, c2, c3


def plain_uniform(shape, step, draw, first_row):
    """The definition of the module docstring, entry by entry."""
    rows, lines, columns = philox.layout(shape)
    pitch = max(columns - columns % 2, 1)
    found = []
    for row in range(rows):
        for line in range(lines):
            for column in range(columns):
                place = line * pitch + column if column < pitch else lines * pitch + line
                counter = place // 4, first_row + row, step, draw
                word = plain_philox(counter, (KEY % 2**32, KEY >> 32))[place % 4]
                found.append(((word >> 9) + 0.5) / 2**23)
    return torch.tensor(found, dtype=torch.float64).reshape(shape)


@pytest.mark.parametrize(("counter", "key", "words"), PUBLISHED)
def test_published_values(counter, key, words):
    assert plain_philox(counter, key) == words
    found = philox.words(
        key[0] | key[1] << 32, torch.tensor(counter[0]), torch.tensor(counter[1]), counter[2], counter[3]
    )
    assert tuple(int(word) for word in found) == words


@pytest.mark.parametrize("shape", SHAPES)
def test_numbers_are_those_of_the_definition(shape):
    found = philox.uniform(KEY, shape, 9, 4, 11, torch.float64, CPU)
    assert torch.equal(found, plain_uniform(shape, 9, 4, 11))


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize(("step", "draw", "first_row"), [(0, 0, 0), (9, 4, 11), (2**31 + 5, philox.ANGLES + 3, 2**31)])
def test_compiled_code_draws_the_same_numbers(shape, step, draw, first_row):
    found = compiled.uniform(KEY, philox.layout(shape), step, draw, first_row)
    if found is None:
        pytest.skip("there is no compiled code")
    expected = philox.uniform(KEY, shape, step, draw, first_row, torch.float32, CPU)
    assert torch.equal(found.view(shape), expected)


ON_GPU = torch.cuda.is_available()


@pytest.mark.usefixtures("interpreted")
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("clock", [False, True])
def test_kernels_draw_the_same_numbers(shape, clock):
    kernels = _kernels()
    device = torch.device("cuda" if ON_GPU else "cpu")
    for dtype in (torch.float32, torch.float64):
        step = torch.tensor(9, device=device) if clock else 9
        found = kernels.uniform(KEY, shape, philox.layout(shape), step, 4, 11, dtype, device)
        assert torch.equal(found.cpu(), philox.uniform(KEY, shape, 9, 4, 11, dtype, CPU))


@pytest.mark.usefixtures("interpreted")
def test_kernels_sort_by_the_same_keys():
    device = torch.device("cuda" if ON_GPU else "cpu")
    steps = torch.arange(5, 8, device=device)
    found = _kernels().sort_keys(KEY, 300, steps, 2)
    assert torch.equal(found.cpu(), philox.sort_keys(KEY, 300, steps.cpu(), 2))


def _kernels():
    pytest.importorskip("triton")
    from mvrbm.random import kernels

    return kernels
