"""Random numbers and draws of a layer in Triton kernels: Philox, a function of key, update, sample, draw and entry."""

# mypy: ignore-errors
import triton
import triton.language as tl


@triton.jit
def uniform(key, update, sample, draw, base, ROWS: tl.constexpr, COLS: tl.constexpr):
    """Return uniform numbers between 0 and 1, both excluded, (ROWS, COLS): one call of Philox gives four of them."""
    # Numbers of one call go to four corners, 8 rows apart and side by side: where a thread holds the tensor cores'
    # results.
    DEEP: tl.constexpr = 8 if ROWS >= 16 else ROWS // 2
    rows = tl.arange(0, ROWS // 2)[:, None]
    columns = tl.arange(0, COLS // 2)[None, :]
    entry = (base + rows * (COLS // 2) + columns).to(tl.uint32)
    nothing = entry * 0
    a, b, c, d = tl.philox(key, entry, nothing + sample.to(tl.uint32), nothing + update.to(tl.uint32), nothing + draw)
    words = tl.reshape(tl.join(tl.join(a, b), tl.join(c, d)), [ROWS // 2 // DEEP, DEEP, COLS // 2, 2, 2])
    words = tl.reshape(tl.permute(words, [0, 3, 1, 2, 4]), [ROWS, COLS])
    return _unit(words)


@triton.jit
def one_uniform(key, update, sample, draw):
    """Return a uniform number of a sample, other than those of its layers of the same draw."""
    nothing = sample.to(tl.uint32) * 0
    a, _, _, _ = tl.philox(key, nothing, nothing + sample.to(tl.uint32), nothing + update.to(tl.uint32),
                           nothing + draw + 0x20000000)  # fmt: skip
    return _unit(a)


@triton.jit
def _unit(words):
    """Return numbers between 0 and 1, both excluded, of words of 32 bits."""
    return (words >> 9).to(tl.int32).to(tl.float32) * (1.0 / 8388608.0) + (1.0 / 16777216.0)


@triton.jit
def normal(key, update, sample, draw, base, ROWS: tl.constexpr, COLS: tl.constexpr):
    """Return standard normal numbers, (ROWS, COLS), by Box and Muller."""
    radius = uniform(key, update, sample, draw, base, ROWS, COLS)
    angle = uniform(key, update, sample, draw + 0x40000000, base, ROWS, COLS)
    return tl.sqrt(-2.0 * tl.log(radius)) * tl.cos(6.283185307179586 * angle)


@triton.jit
def _odds(field):
    """Return one over the logistic function."""
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
    """Draw a layer in a field that includes its bias."""
    if GAUSSIAN:
        return field + numbers
    # One where the random number is below the logistic function. By the sign bit: from a comparison, whose result has
    # one bit, the compiler concludes that products of what follows have operands of eight, and lays them out for that.
    short = numbers * _odds(field) - 1.0
    return ((short.to(tl.int32, bitcast=True) >> 31) & 0x3F800000).to(tl.float32, bitcast=True)


@triton.jit
def numbers_of(key, update, sample, draw, recorded, at, inside, DRAWN: tl.constexpr, AREA: tl.constexpr,
           GAUSSIAN: tl.constexpr, RECORDED: tl.constexpr, ROWS: tl.constexpr, COLS: tl.constexpr):  # fmt: skip
    """Return the numbers for one draw of a layer, for the first `DRAWN` samples: recorded or new."""
    if RECORDED:
        return tl.load(recorded + sample * AREA + at, mask=inside & (sample < DRAWN), other=0.5)
    if sample < DRAWN:
        if GAUSSIAN:
            found = normal(key, update, sample, draw, 0, ROWS, COLS)
        else:
            found = uniform(key, update, sample, draw, 0, ROWS, COLS)
    else:
        found = tl.zeros([ROWS, COLS], tl.float32)
    return found


@triton.jit
def draw_categories(field, key, update, draw, tile, recorded, exists, SITES: tl.constexpr, RECORDED: tl.constexpr,
                    BM: tl.constexpr):  # fmt: skip
    """Draw one-hot rows, by inverting the distribution function at one uniform number per site."""
    high = tl.max(tl.where(exists, field, float("-inf")), axis=2)[:, :, None]
    mass = tl.where(exists, tl.exp(field - high), 0.0)
    sums = tl.cumsum(mass, axis=2)
    total = tl.sum(mass, axis=2)
    if RECORDED:
        numbers = tl.load(recorded, mask=tl.max(exists.to(tl.int32), axis=2) > 0, other=0.5)
    else:
        # Numbers come in fours.
        numbers = tl.reshape(uniform(key, update, tile, draw, 0, BM, 2 * SITES), [BM, SITES, 2])
        numbers = tl.max(numbers * (tl.arange(0, 2) == 0).to(tl.float32)[None, None, :], axis=2)
    level = (numbers * total)[:, :, None]
    first = (sums > level) & (sums - mass <= level)
    return tl.where(first & exists, 1.0, 0.0)
