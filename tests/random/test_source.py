"""The source of random numbers: seeded and split. Statistical checks state their false-alarm rate."""

import itertools

import numpy as np
import pytest
import torch
from scipy import stats

from mvrbm import Bernoulli, BoltzmannMachine, Categorical, Dense, Gaussian, Kronecker, RandomSource
from mvrbm.sampling import gibbs, sample

# With fresh seeds each statistical test here would fail once in ten thousand runs; the seeds are fixed.
FALSE_ALARM = 1e-4

LIKE = torch.empty(0, dtype=torch.float64)


def three_kinds():
    """A machine that draws both uniform and normal numbers."""
    layers = {"image": Bernoulli((3, 2)), "label": Categorical(3), "depth": Gaussian((2, 2))}
    couplings = {"image": Kronecker(2), "label": Dense(), "depth": Kronecker()}
    return BoltzmannMachine(layers, Bernoulli((2, 2)), couplings, seed=3, std=1.0).double()


def draws(rng):
    return torch.cat([rng.uniform((5,), LIKE), rng.normal((2, 3), LIKE).flatten(), rng.permutation(7).double()])


def test_same_seed_gives_the_same_numbers():
    assert torch.equal(draws(RandomSource(11)), draws(RandomSource(11)))
    assert not torch.equal(draws(RandomSource(11)), draws(RandomSource(12)))


def test_neighboring_seeds_are_unrelated():
    first = [float(RandomSource(seed).uniform((1,), LIKE)) for seed in range(2000)]
    assert stats.kstest(first, "uniform").pvalue > FALSE_ALARM


def test_numbers_have_the_distribution_they_are_named_after():
    rng, n = RandomSource(5), 50_000
    assert stats.kstest(rng.uniform((n,), LIKE).numpy(), "uniform").pvalue > FALSE_ALARM
    assert stats.kstest(rng.normal((n,), LIKE).numpy(), "norm").pvalue > FALSE_ALARM
    orders = list(itertools.permutations(range(3)))
    seen = [orders.index(tuple(rng.permutation(3).tolist())) for _ in range(3000)]
    assert stats.chisquare(np.bincount(seen, minlength=6)).pvalue > FALSE_ALARM


@pytest.mark.parametrize("n", [0, 1, 5, 1000])
def test_permutations_of_several_steps_are_those_of_each(n):
    rng = RandomSource(3)
    expected = torch.stack([rng.at_step(step).permutation(n) for step in range(4, 9)])
    assert torch.equal(rng.permutations(n, first_step=4, count=5), expected)
    assert torch.equal(expected.sort(1).values, torch.arange(n).expand(5, n))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_draws_follow_the_tensor_they_are_for(dtype):
    like = torch.empty(0, dtype=dtype)
    for draw in (RandomSource(0).uniform, RandomSource(0).normal):
        assert draw((2, 3), like).dtype == dtype
        assert draw((2, 3), like).shape == (2, 3)
    uniform = RandomSource(0).uniform((100_000,), like)
    assert float(uniform.min()) >= 0
    assert float(uniform.max()) < 1


@pytest.mark.parametrize("seed", [-1, 2**63, 1.5, "1", None])
def test_seeds_are_whole_numbers(seed):
    with pytest.raises(ValueError, match="seed must be a whole number"):
        RandomSource(seed)
    assert RandomSource(2**63 - 1).key != RandomSource(1.0).key == RandomSource(1).key


# -- where in the sequence --------------------------------------------------------------------------


def test_numbers_do_not_depend_on_how_many_rows_are_drawn():
    for draw in ("uniform", "normal"):
        few, many = (getattr(RandomSource(1), draw)((n, 3, 5), LIKE) for n in (2, 7))
        assert torch.equal(few, many[:2])


def test_rows_are_those_of_a_larger_draw():
    rng = RandomSource(1)
    whole = rng.at_step(4).uniform((10, 6), LIKE)
    parts = [rng.at_step(4, first_row=first).uniform((5, 6), LIKE) for first in (0, 5)]
    assert torch.equal(torch.cat(parts), whole)


def test_numbers_of_a_step_do_not_depend_on_earlier_draws():
    rng = RandomSource(1)
    expected = draws(rng.at_step(7))
    draws(rng)
    rng.split(2)
    assert torch.equal(draws(rng.at_step(7)), expected)
    assert not torch.equal(draws(rng.at_step(8)), expected)


def test_draws_of_a_step_continue_from_a_number():
    rng = RandomSource(1).at_step(3)
    first, second = rng.uniform((4,), LIKE), rng.uniform((4,), LIKE)
    assert not torch.equal(first, second)
    assert torch.equal(RandomSource(1).at_step(3, draw=1).uniform((4,), LIKE), second)


def test_next_step_is_the_step_that_follows():
    rng = RandomSource(1).at_step(3)
    draws(rng)
    rng.next_step()
    assert torch.equal(draws(rng), draws(RandomSource(1).at_step(4)))


def test_a_step_in_a_tensor_gives_the_same_numbers():
    rng = RandomSource(1).at_step(3)
    rng.step_on(torch.device("cpu"))
    rng.next_step()
    assert torch.equal(draws(rng), draws(RandomSource(1).at_step(4)))


def test_float64_holds_the_numbers_of_float32():
    single, double = (RandomSource(1).uniform((5, 7), LIKE.to(dtype)) for dtype in (torch.float32, torch.float64))
    assert torch.equal(single.double(), double)


def test_neighboring_rows_steps_and_draws_are_uncorrelated():
    rng, n = RandomSource(1), 20_000
    base = rng.at_step(0).normal((n, 2), LIKE)
    others = [
        rng.at_step(1).normal((n, 2), LIKE),
        rng.at_step(0, draw=1).normal((n, 2), LIKE),
        rng.at_step(0, first_row=1).normal((n, 2), LIKE),
        base.flip(1),
    ]
    scores = [float((base * other).sum() / (2 * n) ** 0.5) for other in others]
    scores[-1] /= 2**0.5  # every product stands there twice
    assert 2 * stats.norm.sf(np.abs(scores).max()) * len(scores) > FALSE_ALARM


# -- splitting --------------------------------------------------------------------------------------


def test_splitting_is_reproducible_and_draws_nothing_from_the_parent():
    left, right = RandomSource(6), RandomSource(6)
    for one, other in zip(left.split(3), [*right.split(1), *right.split(2)], strict=True):
        assert torch.equal(draws(one), draws(other))
    assert torch.equal(draws(left), draws(RandomSource(6)))


def test_splits_do_not_depend_on_what_the_parent_drew():
    used = RandomSource(6)
    draws(used)
    assert torch.equal(draws(used.split(1)[0]), draws(RandomSource(6).split(1)[0]))


def test_split_streams_are_uncorrelated():
    parent, n, lags = RandomSource(1), 20_000, 3
    children = parent.split(3)
    later = parent.split(1)
    grandchildren = children[0].split(2)
    family = [parent, *children, *later, *grandchildren, RandomSource(2), RandomSource(2).split(1)[0]]
    numbers = [rng.normal((n,), LIKE).numpy() for rng in family]
    scores = []  # correlation times sqrt(n) is standard normal for independent streams
    for one, other in itertools.permutations(numbers, 2):
        scores += [np.dot(one[lag:], other[: n - lag]) / np.sqrt(n - lag) for lag in range(lags)]
    smallest = 2 * stats.norm.sf(np.abs(scores).max())
    assert smallest * len(scores) > FALSE_ALARM


DERIVATIONS = {"split": lambda rng: rng.split(2)[1], "stream": lambda rng: rng.stream(3, 1)}


@pytest.mark.parametrize("derive", DERIVATIONS.values(), ids=DERIVATIONS)
def test_sources_derived_at_different_steps_are_different(derive):
    sources = [derive(RandomSource(6).at_step(step)) for step in range(5)]
    grandchildren = [derive(derive(RandomSource(6)).at_step(step)) for step in range(1, 5)]
    assert len({tuple(draws(rng).tolist()) for rng in sources + grandchildren}) == 9
    assert torch.equal(draws(derive(RandomSource(6).at_step(3))), draws(derive(RandomSource(6).at_step(3))))


@pytest.mark.parametrize("derive", DERIVATIONS.values(), ids=DERIVATIONS)
def test_derived_sources_start_at_the_same_row(derive):
    rng = RandomSource(6).at_step(4)
    whole = derive(rng).uniform((10, 6), LIKE)
    parts = [derive(rng.at_step(4, first_row=first)).uniform((5, 6), LIKE) for first in (0, 5)]
    assert torch.equal(torch.cat(parts), whole)


@pytest.mark.parametrize("derive", DERIVATIONS.values(), ids=DERIVATIONS)
def test_no_source_is_derived_from_a_step_on_a_device(derive):
    rng = RandomSource(6).at_step(4)
    rng.step_on(torch.device("cpu"))
    with pytest.raises(ValueError, match="the step of this source is a tensor"):
        derive(rng)


def test_cannot_be_split_into_nothing():
    with pytest.raises(ValueError, match="count must be a whole number of at least 1, got 0"):
        RandomSource(0).split(0)


# -- nothing else is random -------------------------------------------------------------------------


def assert_same(left, right):
    assert left.keys() == right.keys()
    for name, array in left.items():
        assert torch.equal(array, right[name]), name


def test_chains_do_not_depend_on_their_number():
    machine = three_kinds()
    start = sample(machine, 5, 2, RandomSource(1)).visible
    whole = gibbs(machine, start, 4, RandomSource(9)).visible
    some = gibbs(machine, {name: array[:2] for name, array in start.items()}, 4, RandomSource(9)).visible
    assert_same(some, {name: array[:2] for name, array in whole.items()})


def test_global_generators_are_left_alone():
    before, numpy_before = torch.get_rng_state(), np.random.get_state()[1].copy()  # noqa: NPY002
    machine = three_kinds()
    sample(machine, 3, 2, RandomSource(0))
    assert torch.equal(before, torch.get_rng_state())
    np.testing.assert_array_equal(numpy_before, np.random.get_state()[1])  # noqa: NPY002


def test_global_generators_have_no_say():
    machine = three_kinds()
    torch.manual_seed(1)
    left = sample(machine, 3, 2, RandomSource(0)).visible
    torch.manual_seed(2)
    assert_same(left, sample(machine, 3, 2, RandomSource(0)).visible)
