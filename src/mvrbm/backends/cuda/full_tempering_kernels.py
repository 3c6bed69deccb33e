r"""Triton kernels for parallel tempering, which complement `full_kernels`.

As in :mod:`mvrbm.sampling.tempering`, the field on a layer at inverse temperature :math:`\beta` is :math:`f_0 + \beta
(f - f_0)`, where :math:`f_0` (`base`) is the field induced by the center of all states. Each chain is a row. The
hottest chains come first, and all temperatures have the same number of chains. After a Gibbs step, states at
neighboring temperatures are exchanged with a probability that depends on `differences`, which contains the change in
each chain's free energy. `downwards` and `upwards` compute these changes. The coldest chains represent the model and
are copied to separate rows.
"""

# mypy: ignore-errors
import triton
import triton.language as tl

from mvrbm.backends.cuda.draws import mean
from mvrbm.backends.cuda.overlap import after_previous, fresh
from mvrbm.random.kernels import place_of, uniform_places


@triton.jit
def beta_of(chains, CHAINS: tl.constexpr, TEMPERATURES: tl.constexpr):
    """Return the inverse temperatures of the chains with the given indices."""
    return (chains // (CHAINS // TEMPERATURES)).to(tl.float32) / (TEMPERATURES - 1)


@triton.jit
def other_beta(chains, turn, CHAINS: tl.constexpr, TEMPERATURES: tl.constexpr):
    """Return the inverse temperatures of the chains' exchange partners, and whether each chain has a partner."""
    number = chains // (CHAINS // TEMPERATURES)
    other = tl.where((number + turn) % 2 == 0, number + 1, number - 1)
    return other.to(tl.float32) / (TEMPERATURES - 1), (other >= 0) & (other < TEMPERATURES)


@triton.jit
def turn_of(turns, clock, batch, gibbs_step, STEPS: tl.constexpr):
    """Return the index (0 or 1) of the first temperature in the first pair that a Gibbs step exchanges."""
    return (tl.load(turns) + (tl.load(clock) + batch) * STEPS + gibbs_step) % 2


@triton.jit
def exchanges_before(gibbs_step, turn, TEMPERATURES: tl.constexpr):
    """Return the number of exchanges before a given Gibbs step of an update. Each exchange uses one draw.

    With two temperatures, there is a pair to exchange only in every other step.
    """
    if TEMPERATURES > 2:  # noqa: SIM108  (a compile-time branch)
        count = gibbs_step
    else:
        count = ((gibbs_step + 1 - (turn + gibbs_step) % 2) // 2).to(tl.int32)
    return count


@triton.jit
def hidden_base(weight, middle, base, HIDDEN: tl.constexpr, VISIBLE: tl.constexpr, BM: tl.constexpr, BK: tl.constexpr,
                PDL: tl.constexpr):  # fmt: skip
    """Compute the field that the center of all visible states induces on the hidden layer."""
    model = tl.program_id(1).to(tl.int64)
    units = tl.program_id(0) * BM + tl.arange(0, BM)
    field = tl.zeros([BM], tl.float32)
    after_previous(PDL)
    for k in range(0, VISIBLE, BK):
        columns = k + tl.arange(0, BK)
        inside = columns < VISIBLE
        W = fresh(weight + (model * HIDDEN + units[:, None]) * VISIBLE + columns[None, :], inside[None, :])
        field += tl.sum(W.to(tl.float32) * tl.load(middle + columns, mask=inside, other=0.0)[None, :], 1)
    tl.store(base + model * HIDDEN + units, field)


@triton.jit
def visible_base(weight, bias, hidden, base, HIDDEN: tl.constexpr, VISIBLE: tl.constexpr, STRIDE: tl.constexpr,
                 BN: tl.constexpr, BK: tl.constexpr, PDL: tl.constexpr):  # fmt: skip
    """Compute the field that the hidden means at beta = 0 induce on the visible layers, given the hidden field."""
    model = tl.program_id(1).to(tl.int64)
    columns = tl.program_id(0) * BN + tl.arange(0, BN)
    field = tl.zeros([BN], tl.float32)
    after_previous(PDL)
    for k in range(0, HIDDEN, BK):
        units = k + tl.arange(0, BK)
        inside = units < HIDDEN
        W = fresh(weight + (model * HIDDEN + units[:, None]) * VISIBLE + columns[None, :], inside[:, None])
        here = fresh(hidden + model * HIDDEN + units, inside) + fresh(bias + model * STRIDE + units, inside)
        field += tl.sum(W.to(tl.float32) * mean(here, False)[:, None], 0)
    tl.store(base + model * VISIBLE + columns, field)


@triton.jit(do_not_specialize=["batch", "draw", "gibbs_step"])
def exchange(
    states, differences, sums, turns, keys, clock, batch, draw, gibbs_step, CHAINS: tl.constexpr,
    TEMPERATURES: tl.constexpr, STEPS: tl.constexpr, ALL_ROWS: tl.constexpr, CHAINS_AT: tl.constexpr,
    COLDEST_AT: tl.constexpr, VISIBLE: tl.constexpr, LAST: tl.constexpr, SUMMED: tl.constexpr,
    BLOCK: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Exchange the states of pairs of temperatures according to the Metropolis rule.

    If `LAST` is set, the kernel also copies the coldest chains to their separate rows. If `SUMMED` is set, it also sums
    the coldest chains.

    Each program has a single warp, so that all threads have read the differences before any thread resets them to zero.
    """
    chain, pair, model = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    EACH: tl.constexpr = CHAINS // TEMPERATURES
    states += model.to(tl.int64) * (ALL_ROWS * VISIBLE)
    turn = turn_of(turns + model, clock, batch, gibbs_step, STEPS)
    number = 2 * pair + turn  # index of the hotter temperature in the pair
    at = number * EACH + chain
    hot, cold = states + (CHAINS_AT + at) * VISIBLE, states + (CHAINS_AT + EACH + at) * VISIBLE
    paired = number + 1 < TEMPERATURES
    update = tl.load(clock) + batch
    draw += exchanges_before(gibbs_step, turn, TEMPERATURES)
    uniform = uniform_places(tl.load(keys + model), pair, place_of(0, chain, 1, EACH), update, draw)
    after_previous(PDL)
    differences += model * CHAINS + at
    change = fresh(differences, paired) + fresh(differences + EACH, paired)
    accepted = paired & (tl.log(uniform) < -change)
    tl.store(differences, 0.0, mask=paired)
    tl.store(differences + EACH, 0.0, mask=paired)
    coldest = number == tl.where(paired, TEMPERATURES - 2, TEMPERATURES - 1)
    for start in range(0, VISIBLE, BLOCK):
        columns = start + tl.arange(0, BLOCK)
        inside = columns < VISIBLE
        hotter, colder = fresh(hot + columns, inside & (number < TEMPERATURES)), fresh(cold + columns, inside & paired)
        tl.store(hot + columns, colder, mask=inside & accepted)
        tl.store(cold + columns, hotter, mask=inside & accepted)
        if LAST:
            state, mine = tl.where(paired & (accepted == 0), colder, hotter), inside & coldest
            tl.store(states + (COLDEST_AT + chain).to(tl.int64) * VISIBLE + columns, state, mask=mine)
            if SUMMED:
                total = sums + model * (2 * VISIBLE) + VISIBLE + columns
                tl.atomic_add(total, state.to(tl.float32), mask=mine & (columns < VISIBLE - 1), sem="relaxed")
