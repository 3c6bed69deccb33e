"""The source of random numbers: seeded, saved, split and replayed. Statistical checks state their false-alarm rate."""

import itertools

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from scipy import stats

from mvrbm import (
    Bernoulli,
    BoltzmannMachine,
    Categorical,
    Dense,
    Gaussian,
    Kronecker,
    RandomSource,
    Recorder,
    Replay,
    random,
)
from mvrbm.random import Permutations
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


class OfGPU(RandomSource):
    """Draws permutations on a CPU as on a GPU: several at once, by one sort."""

    capturable = True

    def permutation(self, n):
        return random._sorted(random._keys([self._generator], n, 1)[1])[0, 0]


@pytest.mark.parametrize("kind", [RandomSource, OfGPU])
@pytest.mark.parametrize("n", [0, 1, 5, random._SORTED // 4, random._SORTED])  # many at once, two, and one
def test_permutations_of_several_sources_are_those_of_each(kind, n):
    sources, alone = ([kind(seed) for seed in range(2)] for _ in range(2))
    permutations = Permutations()
    for number in range(5):
        expected = torch.stack([source.permutation(n) for source in alone])
        assert torch.equal(permutations.draw(sources, n, 5 - number), expected)
        for source, other in zip(sources, alone, strict=True):  # a checkpoint between two draws has the same state
            assert torch.equal(source.state_dict()["generator"], other.state_dict()["generator"])
        if number == 2:  # another user of a source
            assert torch.equal(sources[1].normal((3,), LIKE), alone[1].normal((3,), LIKE))


def test_no_more_permutations_are_drawn_than_needed():
    permutations = Permutations()
    permutations.draw([OfGPU(0)], 5, 3)
    assert len(permutations._orders) == 3
    permutations.draw([OfGPU(1)], 5, 10**6)
    assert len(permutations._orders) == random._MOST_AHEAD


def test_permutations_of_a_gpu_are_uniform():
    sources, permutations = [OfGPU(seed) for seed in range(4)], Permutations()
    drawn = torch.stack([permutations.draw(sources, 3, 1500) for _ in range(1500)])
    orders = list(itertools.permutations(range(3)))
    seen = [orders.index(tuple(order)) for order in drawn.flatten(0, 1).tolist()]
    assert stats.chisquare(np.bincount(seen, minlength=6)).pvalue > FALSE_ALARM


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_draws_follow_the_tensor_they_are_for(dtype):
    like = torch.empty(0, dtype=dtype)
    for draw in (RandomSource(0).uniform, RandomSource(0).normal):
        assert draw((2, 3), like).dtype == dtype
        assert draw((2, 3), like).shape == (2, 3)
    uniform = RandomSource(0).uniform((100_000,), like)
    assert float(uniform.min()) >= 0
    assert float(uniform.max()) < 1


@pytest.mark.parametrize("seed", [-1, 2**63])
def test_refuses_seeds_out_of_range(seed):
    with pytest.raises(ValueError, match="seed must be"):
        RandomSource(seed)


# -- saving -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("family", ["root", "child", "grandchild"])
def test_state_survives_a_file(tmp_path, family):
    rng = RandomSource(2)
    for _ in range({"root": 0, "child": 1, "grandchild": 2}[family]):
        rng = rng.split(2)[1]
    draws(rng)
    rng.split(3)
    save_file(rng.state_dict(), tmp_path / "random.safetensors")
    again = RandomSource(99)
    again.load_state_dict(load_file(tmp_path / "random.safetensors"))
    assert repr(again) == repr(rng)
    for one, other in zip([rng, *rng.split(2)], [again, *again.split(2)], strict=True):
        assert torch.equal(draws(one), draws(other))


def test_saving_draws_nothing():
    rng = RandomSource(4)
    rng.state_dict()
    assert torch.equal(draws(rng), draws(RandomSource(4)))


def test_state_must_be_whole_and_fit():
    state = RandomSource(0).state_dict()
    with pytest.raises(ValueError, match="lacks"):
        RandomSource(0).load_state_dict({key: value for key, value in state.items() if key != "children"})
    with pytest.raises(ValueError, match="does not fit"):
        RandomSource(0).load_state_dict({**state, "generator": state["generator"][:-16]})  # 8 less: an old format


def test_a_run_continues_where_it_was_saved():
    machine = three_kinds()
    rng = RandomSource(8)
    halfway = sample(machine, 4, 3, rng).visible
    saved = rng.state_dict()
    straight = gibbs(machine, halfway, 3, rng).visible
    resumed = RandomSource(0)
    resumed.load_state_dict(saved)
    assert_same(straight, gibbs(machine, halfway, 3, resumed).visible)


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


def test_cannot_be_split_into_nothing():
    with pytest.raises(ValueError, match="count must be a whole number of at least 1, got 0"):
        RandomSource(0).split(0)


# -- recording --------------------------------------------------------------------------------------


def assert_same(left, right):
    assert left.keys() == right.keys()
    for name, array in left.items():
        assert torch.equal(array, right[name]), name


def test_replay_repeats_a_gibbs_run_exactly():
    machine = three_kinds()
    start = sample(machine, 5, 2, RandomSource(1)).visible
    recorder = Recorder(RandomSource(9))
    recorded = gibbs(machine, start, 4, recorder)
    plain = gibbs(machine, start, 4, RandomSource(9))
    replayed = gibbs(machine, start, 4, Replay(recorder.draws))
    for run in (plain, replayed):
        assert_same(recorded.visible, run.visible)
        assert torch.equal(recorded.hidden, run.hidden)
    assert len(recorder.draws) == 4 * 5  # hidden, three layers, and the label given the others, four steps


def test_replay_stands_for_every_kind_of_draw():
    recorder = Recorder(RandomSource(3))
    recorded = draws(recorder)
    assert torch.equal(recorded, draws(Replay(recorder.draws)))


def test_what_was_recorded_is_not_changed_by_its_user():
    recorder = Recorder(RandomSource(3))
    recorder.uniform((4,), LIKE).zero_()
    replay = Replay(recorder.draws)
    replay.uniform((4,), LIKE).zero_()
    assert torch.equal(recorder.draws[0], RandomSource(3).uniform((4,), LIKE))


def test_replay_says_where_two_programs_come_apart():
    replay = Replay([torch.zeros(3), torch.zeros(2, 2)])
    replay.uniform((3,), LIKE)
    with pytest.raises(ValueError, match=r"recorded draw 1 has shape \(2, 2\), expected \(4,\)"):
        replay.normal((4,), LIKE)
    replay.normal((2, 2), LIKE)
    with pytest.raises(ValueError, match="no more than 2 draws"):
        replay.permutation(2)


def test_replay_and_recorder_continue_from_their_state():
    recorder = Recorder(RandomSource(3))
    draws(recorder)
    state, ahead = recorder.state_dict(), draws(recorder)
    other = Recorder(RandomSource(0))
    other.load_state_dict(state)
    assert torch.equal(draws(other), ahead)

    replay = Replay(recorder.draws)
    draws(replay)
    again = Replay(recorder.draws)
    again.load_state_dict(replay.state_dict())
    assert torch.equal(draws(again), ahead)


@pytest.mark.parametrize("rng", [Recorder(RandomSource(0)), Replay([])])
def test_a_recording_is_one_stream(rng):
    with pytest.raises(ValueError, match="cannot be split"):
        rng.split(2)


# -- nothing else is random -------------------------------------------------------------------------


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
