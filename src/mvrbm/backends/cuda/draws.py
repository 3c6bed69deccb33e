"""Means and samples of layers in Triton kernels, using the random numbers defined in :mod:`mvrbm.random`."""

# mypy: ignore-errors
import triton
import triton.language as tl

from mvrbm.random.kernels import normal_matrix, place_of, uniform_matrix, uniform_places


@triton.jit
def _odds(field):
    """Return the reciprocal of the logistic function, evaluated at a field."""
    return 1.0 + tl.exp2(-1.4426950408889634 * field)


@triton.jit
def mean(field, GAUSSIAN: tl.constexpr):
    """Return the mean of a layer given its field, which includes the bias."""
    if not GAUSSIAN:
        root = tl.rsqrt(_odds(field))  # one instruction instead of eight for a division
        field = root * root
    return field


@triton.jit
def draw_layer(field, numbers, GAUSSIAN: tl.constexpr):
    """Sample a layer given its field, which includes the bias, using normal or uniform random numbers."""
    if GAUSSIAN:
        return field + numbers
    # The entry is 1 if the uniform number is below the logistic function. Use the sign bit instead of a comparison,
    # because the compiler would infer 8-bit operands for the following products from a 1-bit result, and choose their
    # layout accordingly.
    short = numbers * _odds(field) - 1.0
    return ((short.to(tl.int32, bitcast=True) >> 31) & 0x3F800000).to(tl.float32, bitcast=True)


@triton.jit
def matrix_numbers(key, update, sample, draw, DRAWN: tl.constexpr, LINES: tl.constexpr, COLUMNS: tl.constexpr,
                   GAUSSIAN: tl.constexpr, HEIGHT: tl.constexpr, WIDTH: tl.constexpr):  # fmt: skip
    """Return a tile of random numbers of shape (HEIGHT, WIDTH) for one sample's matrix of shape (LINES, COLUMNS).

    Only programs that process the first `DRAWN` samples generate random numbers. Other programs skip this work.
    """
    if sample < DRAWN:
        if GAUSSIAN:
            found = normal_matrix(key, sample, update, draw, LINES, COLUMNS, HEIGHT, WIDTH)
        else:
            found = uniform_matrix(key, sample, update, draw, LINES, COLUMNS, HEIGHT, WIDTH)
    else:
        found = tl.zeros([HEIGHT, WIDTH], tl.float32)
    return found


@triton.jit
def draw_categories(field, numbers, exists, CATEGORIES: tl.constexpr):
    """Sample one-hot vectors of shape (n, sites, categories), using uniform random numbers of shape (n, sites)."""
    high = tl.max(tl.where(exists, field, float("-inf")), axis=2)[:, :, None]
    mass = tl.where(exists, tl.exp(field - high), 0.0)
    level = (numbers * tl.sum(mass, axis=2))[:, :, None]
    below = (tl.cumsum(mass, axis=2) <= level) & exists
    # The last cumulative sum can be slightly below the total because of rounding.
    category = tl.minimum(tl.sum(below.to(tl.int32), axis=2), CATEGORIES - 1)[:, :, None]
    chosen = tl.arange(0, field.shape[2])[None, None, :] == category
    return tl.where(chosen & exists, 1.0, 0.0)


@triton.jit
def site_numbers(key, update, rows, sites, draw, SITES: tl.constexpr, COLUMNS: tl.constexpr):
    """Return uniform random numbers of shape (n, w), given rows of shape (n, 1) and sites of shape (1, w).

    There are `SITES` sites per sample, in lines of `COLUMNS` sites.
    """
    place = place_of(sites // COLUMNS, sites % COLUMNS, SITES // COLUMNS, COLUMNS)
    return uniform_places(key, rows, place, update, draw)
