"""Arguments that raise ValueError, with messages that say where and what."""

import math

import pytest
import torch

from mvrbm import CP, MPO, Bernoulli, BoltzmannMachine, Categorical, Dense, Gaussian, Kronecker, RandomSource
from mvrbm.likelihood import annealed_importance_sampling, log_likelihood, log_partition, pseudo_log_likelihood
from mvrbm.models import documents, replicated_softmax
from mvrbm.sampling import ParallelTempering, conditional_mean, gibbs, independent_sample, mean_field, sample


def image():
    """Binary 4 x 3 images."""
    return BoltzmannMachine({"image": Bernoulli((4, 3))}, Bernoulli((2, 2)), {"image": Kronecker()})


def labeled(padded=False):
    """Images and their labels."""
    units = {"image": Bernoulli((2, 2)), "words": Categorical((2, 3), padded=padded)}
    return BoltzmannMachine(units, Bernoulli(3), {"image": Dense(), "words": Dense()})


def signal():
    return BoltzmannMachine({"signal": Gaussian(3)}, Bernoulli(2), {"signal": Dense()})


def gaussian_pair(size):
    machine = BoltzmannMachine({"signal": Gaussian(2)}, Gaussian(2), {"signal": Dense()})
    with torch.no_grad():
        machine.couplings.signal.weight.copy_(size * torch.eye(2))
    return machine


def words(*rows):
    return torch.tensor([rows], dtype=torch.float32)


def labels(x):
    return {"image": torch.zeros(len(x), 2, 2), "words": x}


ONE_HOT = words([1, 0, 0], [0, 1, 0])
NAN, INF = math.nan, math.inf

REFUSED = [  # (what, the call, what the message has to say)
    # shapes of data
    (
        "a mode too short",
        lambda: image().free_energy(torch.zeros(2, 4, 2)),
        ["'image'", "(4, 3)", "(4, 2)", "mode 2 has 2 entries instead of 3"],
    ),
    (
        "modes exchanged",
        lambda: image().hidden_mean({"image": torch.zeros(2, 3, 4)}),
        ["'image'", "mode 1 has 3 entries instead of 4"],
    ),
    (
        "no axis of samples",
        lambda: image().free_energy(torch.zeros(4, 3)),
        ["'image'", "(n, 4, 3)", "first axis", "(4, 3)"],
    ),
    ("too many axes", lambda: image().free_energy(torch.zeros(2, 1, 4, 3)), ["'image'", "(n, 4, 3)", "(2, 1, 4, 3)"]),
    ("no samples", lambda: image().free_energy(torch.zeros(0, 4, 3)), ["'image'", "empty batch"]),
    (
        "a hidden array of another shape",
        lambda: image().visible_mean(torch.zeros(2, 2, 5)),
        ["'hidden'", "mode 2 has 5 entries instead of 2"],
    ),
    (
        "a hidden vector",
        lambda: image().energy(torch.zeros(1, 4, 3), torch.zeros(1, 4)),
        ["'hidden'", "(n, 2, 2)", "(1, 4)"],
    ),
    # values of data
    ("NaN", lambda: signal().free_energy([[0.0, NAN, 1.0]]), ["'signal'", "1 of 3", "NaN", "fill in missing entries"]),
    ("infinity", lambda: signal().free_energy([[INF, -INF, 1.0]]), ["'signal'", "2 of 3", "infinite"]),
    ("NaN among bits", lambda: image().free_energy(torch.full((1, 4, 3), NAN)), ["'image'", "12 of 12", "NaN"]),
    ("bytes for bits", lambda: image().free_energy(torch.full((1, 4, 3), 255.0)), ["'image'", "0 to 1", "255"]),
    (
        "negative bits",
        lambda: image().free_energy(torch.full((1, 4, 3), -0.5)),
        ["'image'", "Bernoulli", "-0.5", "Gaussian"],
    ),
    (
        "hidden states that are no bits",
        lambda: image().energy(torch.zeros(1, 4, 3), torch.full((1, 2, 2), 2.0)),
        ["'hidden'", "0 to 1"],
    ),
    (
        "two ones in a row",
        lambda: labeled().free_energy(labels(words([1, 0, 0], [1, 1, 0]))),
        ["'words'", "one-hot", "3 categories", "row (1,)", "sample 0", "sum 2"],
    ),
    (
        "probabilities for categories",
        lambda: labeled().free_energy(labels(words([1, 0, 0], [0.5, 0.5, 0]))),
        ["'words'", "one-hot", "row (1,)"],
    ),
    (
        "a row of padding",
        lambda: labeled().free_energy(labels(words([0, 0, 0], [1, 0, 0]))),
        ["'words'", "row (0,)", "only zeros", "padded=True"],
    ),
    (
        "a padded row of halves",
        lambda: labeled(padded=True).free_energy(labels(words([0, 0, 0], [0.5, 0, 0]))),
        ["'words'", "row (1,)", "sum 0.5"],
    ),
    # names of layers
    ("a layer missing", lambda: labeled().free_energy({"image": torch.zeros(1, 2, 2)}), ["image", "words"]),
    ("a layer unknown", lambda: image().free_energy({"picture": torch.zeros(1, 4, 3)}), ["image", "picture"]),
    ("one array for two layers", lambda: labeled().free_energy(torch.zeros(1, 2, 2)), ["image", "words", "mapping"]),
    (
        "unequal numbers of samples",
        lambda: labeled().free_energy({"image": torch.zeros(3, 2, 2), "words": ONE_HOT}),
        ["same number of samples", "'image': 3", "'words': 1"],
    ),
    # construction
    ("no layer", lambda: BoltzmannMachine({}, Bernoulli(2), {}), ["at least one layer"]),
    (
        "a coupling of another name",
        lambda: BoltzmannMachine({"a": Bernoulli(2)}, Bernoulli(2), {"b": Dense()}),
        ["couplings", "['a']", "['b']"],
    ),
    (
        "one coupling for two layers",
        lambda: BoltzmannMachine({"a": Bernoulli(2), "b": Bernoulli(2)}, Bernoulli(2), Dense()),
        ["couplings", "'a', 'b'", "['a']"],
    ),
    (
        "a coupling of other shapes",
        lambda: BoltzmannMachine({"a": Bernoulli(3)}, Bernoulli(2), {"a": Dense().connect((4,), (2,))}),
        ["'a'", "(4,)", "(3,)"],
    ),
    (
        "a coupling connected twice",
        lambda: Dense().connect((2,), (2,)).connect((2,), (2,)),
        ["already connected", "2 -> 2"],
    ),
    ("rank 0", lambda: Kronecker(rank=0), ["rank must be", "at least 1", "0"]),
    ("rank below 0", lambda: CP(rank=-2), ["CP rank", "at least 1", "-2"]),
    ("half a rank", lambda: Kronecker(rank=1.5), ["rank must be", "whole number", "1.5"]),
    ("bond 0", lambda: MPO(bond=0), ["MPO bond", "at least 1", "0"]),
    ("a bond of 0 among others", lambda: MPO(bond=(2, 0)), ["MPO bond", "at least 1", "0"]),
    ("too few bonds", lambda: MPO(bond=(2,)).connect((2, 2, 2), (2, 2, 2)), ["order 3", "2 bond sizes", "[2]"]),
    (
        "orders that do not match",
        lambda: BoltzmannMachine(Bernoulli((2, 3)), Bernoulli(4), Kronecker()),
        ["Kronecker", "(2, 3)", "(4,)", "size 1", "Dense"],
    ),
    ("orders that do not match an operator", lambda: MPO().connect((2,), (2, 2)), ["MPO", "(2,)", "(2, 2)"]),
    ("a hidden matrix for CP", lambda: CP().connect((2, 3), (4, 5)), ["hidden vector", "(4, 5)", "(20,)"]),
    (
        "every mode summed",
        lambda: Kronecker(summed_modes=(0, 1)).connect((2, 2), (1, 1)),
        ["summed_modes", "between 0 and 1"],
    ),
    ("a mode that is not there", lambda: Kronecker(summed_modes=(2,)).connect((2, 2), (1, 2)), ["summed_modes", "[2]"]),
    ("a size of 0", lambda: Bernoulli((3, 0)), ["Bernoulli shape", "at least 1", "(3, 0)"]),
    ("no size", lambda: Gaussian(()), ["Gaussian shape", "()"]),
    ("a bias that does not broadcast", lambda: Bernoulli((2, 3), bias_shape=(2, 2)), ["bias_shape (2, 2)", "(2, 3)"]),
    ("a bias with too few modes", lambda: Bernoulli((2, 3), bias_shape=(3,)), ["bias_shape (3,)", "(2, 3)"]),
    # unbounded energy
    ("an unbounded pair", lambda: gaussian_pair(1.5).check_bounded(), ["unbounded", "1.5", "below 1", "Bernoulli"]),
    ("exactly at the bound", lambda: gaussian_pair(1.0).check_bounded(), ["unbounded", "below 1"]),
    (
        "an unbounded start",
        lambda: BoltzmannMachine(Gaussian(9), Gaussian(9), Dense(), std=5.0),
        ["unbounded", "spectral norm"],
    ),
    ("log Z of an unbounded pair", lambda: log_partition(gaussian_pair(2.0)), ["unbounded"]),
    ("draws of an unbounded pair", lambda: sample(gaussian_pair(2.0), 1, 1, RandomSource(0)), ["unbounded"]),
    # masks
    (
        "a mask of numbers",
        lambda: gibbs(image(), torch.zeros(1, 4, 3), 1, RandomSource(0), mask=torch.ones(4, 3)),
        ["'image'", "boolean", "True where the value is known", "float32"],
    ),
    (
        "a mask of another shape",
        lambda: gibbs(image(), torch.zeros(1, 4, 3), 1, RandomSource(0), mask=torch.ones(3, 4, dtype=torch.bool)),
        ["'image'", "(4, 3)", "(3, 4)"],
    ),
    (
        "half a row known",
        lambda: gibbs(labeled(), labels(ONE_HOT), 1, RandomSource(0), mask={"words": ONE_HOT.bool()}),
        ["'words'", "same for all entries in a one-hot row"],
    ),
    (
        "one mask for two layers",
        lambda: gibbs(labeled(), labels(ONE_HOT), 1, RandomSource(0), mask=torch.ones(2, 2, dtype=torch.bool)),
        ["mask", "image", "words"],
    ),
    (
        "a mask of an unknown layer",
        lambda: gibbs(
            image(), torch.zeros(1, 4, 3), 1, RandomSource(0), mask={"sound": torch.ones(4, 3, dtype=torch.bool)}
        ),
        ["mask", "sound", "image"],
    ),
    (
        "a mask without init",
        lambda: sample(image(), 1, 1, RandomSource(0), mask=torch.ones(4, 3, dtype=torch.bool)),
        ["mask", "init"],
    ),
    (
        "a mask without clamp",
        lambda: log_partition(image(), mask=torch.ones(4, 3, dtype=torch.bool)),
        ["mask", "clamp"],
    ),
    # likelihood
    (
        "too many states",
        lambda: log_partition(BoltzmannMachine(Bernoulli(40), Bernoulli(30), Dense())),
        ["2^30 states", "2^25", "annealed_importance_sampling"],
    ),
    (
        "too many categories",
        lambda: log_partition(BoltzmannMachine(Gaussian(4), Categorical((20, 4)), Dense())),
        ["2^40 states", "2^25"],
    ),
    (
        "too many states next to real entries",
        lambda: log_partition(
            BoltzmannMachine({"a": Gaussian(2), "b": Bernoulli(30)}, Gaussian(2), {"a": Dense(), "b": Dense()})
        ),
        ["2^30 states", "2^25"],
    ),
    (
        "too many states next to clamped real entries",
        lambda: log_partition(
            BoltzmannMachine({"a": Gaussian(2), "b": Bernoulli(30)}, Bernoulli(30), {"a": Dense(), "b": Dense()}),
            clamp={"a": torch.zeros(1, 2), "b": torch.zeros(1, 30)},
            mask={"a": torch.ones(2, dtype=torch.bool)},
        ),
        ["2^30 states", "2^25"],
    ),
    ("two states to clamp", lambda: log_partition(image(), clamp=torch.zeros(2, 4, 3)), ["clamp", "one visible state"]),
    (
        "one log Z for documents of two lengths",
        lambda: log_likelihood(replicated_softmax(3, 2, 2), documents(torch.tensor([[3, 0], [1, 0]])), 0.0),
        ["unequal length", "log_z"],
    ),
    (
        "no site to visit",
        lambda: pseudo_log_likelihood(image(), torch.zeros(1, 4, 3), n_sites=0),
        ["n_sites", "at least 1"],
    ),
    (
        "weights too large to integrate over",
        lambda: pseudo_log_likelihood(
            BoltzmannMachine(Gaussian(2), Bernoulli(2), Dense(), std=1e5), torch.zeros(1, 2), n_sites=1
        ),
        ["standard deviations", "4096", "weights are too large"],
    ),
    (
        "one chain",
        lambda: annealed_importance_sampling(image(), RandomSource(0), n_chains=1),
        ["n_chains", "at least 2", "1"],
    ),
    (
        "no temperature",
        lambda: annealed_importance_sampling(image(), RandomSource(0), n_steps=0),
        ["n_steps", "at least 1", "0"],
    ),
    (
        "states of real entries",
        lambda: Gaussian(2).decode(torch.zeros(1, 2)),
        ["Gaussian", "infinitely many", "enumerated"],
    ),
    # sampling
    ("no Gibbs step", lambda: gibbs(image(), torch.zeros(1, 4, 3), 0, RandomSource(0)), ["steps", "at least 1", "0"]),
    ("no mean-field step", lambda: mean_field(image(), torch.zeros(1, 4, 3), 0), ["steps", "at least 1", "0"]),
    ("no chain", lambda: independent_sample(image(), 0, RandomSource(0)), ["n must be", "at least 1", "0"]),
    (
        "too few states to start from",
        lambda: sample(image(), 3, 1, RandomSource(0), init=torch.zeros(2, 4, 3)),
        ["n = 3", "2"],
    ),
    (
        "a negative burn-in",
        lambda: conditional_mean(
            image(), torch.zeros(1, 4, 3), torch.ones(4, 3, dtype=torch.bool), RandomSource(0), burn_in=-1
        ),
        ["burn_in", "-1"],
    ),
    (
        "falling temperatures",
        lambda: ParallelTempering(image(), 2, [1.0, 0.5], rng=RandomSource(0)),
        ["betas", "increasing"],
    ),
    ("one temperature", lambda: ParallelTempering(image(), 2, [1.0], rng=RandomSource(0)), ["betas", "at least two"]),
    (
        "tempering without chains",
        lambda: ParallelTempering(image(), 0, rng=RandomSource(0)),
        ["n_chains", "at least 1"],
    ),
    # noise
    ("a negative seed", lambda: RandomSource(-1), ["seed", f"0 to {2**63 - 1:,}", "-1"]),
    ("a seed too large", lambda: RandomSource(2**63), ["seed", f"0 to {2**63 - 1:,}"]),
    ("no stream", lambda: RandomSource(0).split(0), ["count", "at least 1", "0"]),
    # documents
    ("half a word", lambda: documents(torch.tensor([[0.5, 1.0]])), ["nonnegative integers", "(1, 2)"]),
    ("fewer words than none", lambda: documents(torch.tensor([[-1, 1]])), ["nonnegative integers"]),
    ("counts of one document", lambda: documents(torch.tensor([1, 2])), ["(n, n_words)", "(2,)"]),
    ("a document too long", lambda: documents(torch.tensor([[4, 1]]), n_rows=3), ["5 words", "n_rows = 3"]),
]


@pytest.mark.parametrize(("_", "call", "says"), REFUSED, ids=[row[0] for row in REFUSED])
def test_refusals_say_what_is_wrong(_, call, says):
    with pytest.raises(ValueError) as refused:  # noqa: PT011
        call()
    message = str(refused.value)
    assert [part for part in says if part not in message] == [], message


ALLOWED = [
    ("gray values", lambda: image().free_energy(torch.full((1, 4, 3), 0.5))),
    ("padding where units are padded", lambda: labeled(padded=True).free_energy(labels(words([1, 0, 0], [0, 0, 0])))),
    ("means for hidden states", lambda: image().visible_mean(torch.full((1, 2, 2), 0.3))),
    ("a large fixed pair below the bound", lambda: gaussian_pair(0.999).check_bounded()),
    ("a rank that is a whole float", lambda: Kronecker(rank=2.0).connect((2, 2), (2, 2))),
    ("no check where it was done before", lambda: image().free_energy(torch.full((1, 4, 3), 7.0), check=False)),
]


@pytest.mark.parametrize(("_", "call"), ALLOWED, ids=[row[0] for row in ALLOWED])
def test_what_is_right_is_not_refused(_, call):
    call()
