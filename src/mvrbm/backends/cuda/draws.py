"""Means and draws of layers in Triton kernels, with the random numbers that :mod:`mvrbm.random` defines."""

# mypy: ignore-errors
import triton
import triton.language as tl

from mvrbm.random.kernels import normal_pairs, uniform_entries, uniform_pairs


@triton.jit
def _odds(field):
    """Return the inverse of the logistic function of a field."""
    return 1.0 + tl.exp2(-1.4426950408889634 * field)


@triton.jit
def mean(field, GAUSSIAN: tl.constexpr):
    """Return the mean of a layer in a field that includes its bias."""
    if not GAUSSIAN:
        root = tl.rsqrt(_odds(field))  # one instruction, where a division takes eight
        field = root * root
    return field


@triton.jit
def draw_layer(field, numbers, GAUSSIAN: tl.constexpr):
    """Draw a layer in a field that includes its bias, with normal or uniform numbers."""
    if GAUSSIAN:
        return field + numbers
    # The entry is 1 where the uniform number is below the logistic function. Use the sign bit: from the 1-bit result of
    # a comparison the compiler would infer 8-bit operands for the products that follow, and choose their layout.
    short = numbers * _odds(field) - 1.0
    return ((short.to(tl.int32, bitcast=True) >> 31) & 0x3F800000).to(tl.float32, bitcast=True)


@triton.jit
def matrix_numbers(key, update, sample, draw, DRAWN: tl.constexpr, COLUMNS: tl.constexpr, GAUSSIAN: tl.constexpr,
                   HEIGHT: tl.constexpr, WIDTH: tl.constexpr):  # fmt: skip
    """Return the random numbers of one sample's matrix with `COLUMNS` columns, in a tile (HEIGHT, WIDTH).

    Only the first `DRAWN` samples are drawn; other programs skip the work.
    """
    if sample < DRAWN:
        line, pair = tl.arange(0, HEIGHT)[:, None], tl.arange(0, WIDTH // 2)[None, :]
        if GAUSSIAN:
            found = normal_pairs(key, sample, line, pair, update, draw, COLUMNS)
        else:
            found = uniform_pairs(key, sample, line, pair, update, draw, COLUMNS)
    else:
        found = tl.zeros([HEIGHT, WIDTH], tl.float32)
    return found


@triton.jit
def draw_categories(field, numbers, exists, CATEGORIES: tl.constexpr):
    """Draw one-hot rows along the last axis, (n, sites, categories), with one uniform number per site, (n, sites)."""
    high = tl.max(tl.where(exists, field, float("-inf")), axis=2)[:, :, None]
    mass = tl.where(exists, tl.exp(field - high), 0.0)
    level = (numbers * tl.sum(mass, axis=2))[:, :, None]
    below = (tl.cumsum(mass, axis=2) <= level) & exists
    # The last sum can be slightly below the total because of rounding.
    category = tl.minimum(tl.sum(below.to(tl.int32), axis=2), CATEGORIES - 1)[:, :, None]
    chosen = tl.arange(0, field.shape[2])[None, None, :] == category
    return tl.where(chosen & exists, 1.0, 0.0)


@triton.jit
def site_numbers(key, update, rows, sites, draw, COLUMNS: tl.constexpr):
    """Return one uniform number for each site of each row, (n, 1) and (1, w) -> (n, w); lines have `COLUMNS` sites."""
    return uniform_entries(key, rows, sites // COLUMNS, sites % COLUMNS, update, draw, COLUMNS)
