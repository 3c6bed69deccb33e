"""Reverse annealed importance sampling and intervals of log Z, against exact log Z. Seeds are fixed."""

import math

import numpy as np
import pytest
import torch
from scipy import stats

from likelihood.annealed_machines import (
    FALSE_ALARM,
    HIGH,
    LOW,
    MACHINES,
    UNBIASED,
    base_not_faded,
    build,
    neutral,
    pull_forgotten,
    sample_without_bias,
    some_documents,
)
from mvrbm import MVRBM, Bernoulli, BoltzmannMachine, DeepMVRBM, Dense, Poisson, RandomSource
from mvrbm.likelihood import (
    AnnealedEstimate,
    LogPartitionInterval,
    log_likelihood,
    log_likelihood_interval,
    log_partition,
    log_partition_interval,
    reverse_annealed_importance_sampling,
)
from mvrbm.sampling import ParallelTempering, TemperedPath, sample

COUNTS = {"poisson": lambda: build(Poisson(5), Bernoulli(4), Dense(), std=0.25)}


def assert_holds(found, exact):
    """An interval holds the exact value, with a margin for chance.

    The ends are two standard errors from the estimates, and the exact value is outside once in 1000 runs. Here they are
    four or more standard errors away.
    """
    more = (found.upper - found.lower) / 2
    assert found.lower - more < exact < found.upper + more


def assert_agree(found, exact):
    """Both directions agree with each other and with the exact value, again with a margin."""
    errors = math.hypot(found.forward.standard_error, found.reverse.standard_error)
    difference = abs(found.forward.log_z - found.reverse.log_z)
    assert difference < 5 * errors
    assert found.consistent == (difference <= 3 * errors)
    assert_holds(found, exact)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["binary, large weights", "categorical hidden", "gaussian", "three layers"])
def test_reverse_estimates_are_within_three_of_their_standard_errors(name):
    machine = (MACHINES | COUNTS)[name]()
    exact = float(log_partition(machine))
    run = reverse_annealed_importance_sampling(
        machine, RandomSource(2), n_chains=30 * 200, n_steps=150, burn_in=100, n_temperatures=6
    )
    inverse = np.exp(exact - run.log_weights.numpy().reshape(30, 200))  # thirty estimates from 200 chains each
    errors = inverse.std(1, ddof=1) / math.sqrt(200) / inverse.mean(1)
    scores = np.log(inverse.mean(1)) / errors
    assert np.median(errors) < 0.1
    assert (np.abs(scores) > 3).sum() <= 2
    assert LOW < np.mean(scores**2) < HIGH


@pytest.mark.slow
@pytest.mark.parametrize("name", [*MACHINES, *COUNTS])
def test_both_directions_agree_and_hold_the_exact_value(name):
    machine = (MACHINES | COUNTS)[name]()
    exact = float(log_partition(machine))
    found = log_partition_interval(machine, RandomSource(0), n_chains=200, n_steps=150, n_temperatures=8)
    assert_agree(found, exact)
    low, high = found.bounds
    assert low < exact < high
    assert found.width == pytest.approx(found.upper - found.lower)
    assert found.width < 0.5
    assert abs(found.log_z - exact) < 5 * max(found.forward.standard_error, found.reverse.standard_error)


# -- the mean inverse weight is 1 / Z, however short the run ----------------------------------------


def mean_inverse_weight_p_value(machine, n_steps, center=None):
    exact = float(log_partition(machine))
    start = sample(machine, 20_000, 100, RandomSource(3)).visible  # these machines mix within a few steps
    run = reverse_annealed_importance_sampling(
        machine, RandomSource(4), n_steps=n_steps, init=start, burn_in=0, center=center
    )
    inverse = np.exp(exact - run.log_weights.numpy())
    score = (inverse.mean() - 1) / (inverse.std(ddof=1) / math.sqrt(len(inverse)))
    return 2 * stats.norm.sf(abs(score))


@pytest.mark.slow
@pytest.mark.parametrize("n_steps", [1, 8])
@pytest.mark.parametrize("name", UNBIASED)
def test_short_runs_are_unbiased(name, n_steps):
    assert mean_inverse_weight_p_value(UNBIASED[name](), n_steps) > FALSE_ALARM


@pytest.mark.parametrize(
    ("place", "name", "wrong"),
    [
        (Bernoulli, "sample", sample_without_bias),
        (TemperedPath, "between", base_not_faded),
        (TemperedPath, "energies", pull_forgotten),
    ],
)
def test_broken_annealing_is_found_out(monkeypatch, place, name, wrong):
    machine = UNBIASED["binary"]()
    monkeypatch.setattr(place, name, wrong)
    assert mean_inverse_weight_p_value(machine, 8, neutral(machine)) < FALSE_ALARM


def test_burning_in_reaches_equilibrium():
    machine = UNBIASED["binary"]()
    exact = float(log_partition(machine))
    start = torch.ones(5000, 6, dtype=torch.float64)  # all in one state
    errors = []
    for burn_in in (0, 50):
        run = reverse_annealed_importance_sampling(machine, RandomSource(1), n_steps=4, init=start, burn_in=burn_in)
        errors.append(abs(run.log_z - exact) / run.standard_error)
    assert errors[0] > 10
    assert errors[1] < 5


# -- a machine made to fool one direction -----------------------------------------------------------


def two_far_modes(share, size=24):
    """Nearly all zeros, or nearly all ones with the given share of the probability."""
    machine = BoltzmannMachine(Bernoulli(size), Bernoulli(1), Dense()).double()
    with torch.no_grad():
        machine.links["visible"].weight.fill_(8.0)
        machine.layers["visible"].bias.fill_(-4.0)
        machine.hidden.bias.fill_(-4.0 * size + math.log(share / (1 - share)))  # undoes what the weights give
        modes = torch.stack([torch.zeros(size), torch.ones(size)]).double()
        ratio = torch.sigmoid(machine.hidden.bias + size * (math.log1p(math.exp(4)) - math.log1p(math.exp(-4))))
    assert float(ratio) == pytest.approx(share)
    return machine, modes


def test_a_mode_that_forward_runs_miss_shows_in_the_interval():
    machine, modes = two_far_modes(0.95)
    exact = float(log_partition(machine))
    center = {"visible": modes[:1]}  # in the mode of zeros
    equilibrium = modes[(torch.arange(400) >= 20).long()]  # 5 % zeros
    found = log_partition_interval(
        machine, RandomSource(0), n_chains=400, n_steps=100, init=equilibrium, burn_in=5, center=center
    )
    assert found.forward.log_z == pytest.approx(exact + math.log(0.05), abs=0.05)
    assert found.forward.standard_error < 0.05  # it does not notice
    assert found.reverse.log_z == pytest.approx(exact, abs=5 * found.reverse.standard_error)
    assert not found.consistent
    assert found.lower < exact < found.upper
    assert found.width > 2
    assert found.bounds[0] < exact < found.bounds[1]


def test_a_start_out_of_equilibrium_shows_too():
    machine, modes = two_far_modes(0.5)
    exact = float(log_partition(machine))
    ones = modes[torch.ones(100, dtype=torch.int64)]
    found = log_partition_interval(
        machine, RandomSource(0), n_steps=100, init=ones, burn_in=5, center={"visible": modes[:1]}
    )
    assert found.reverse.log_z > exact + 3
    assert not found.consistent
    # In the middle of both modes, forward runs find both.
    fair = log_partition_interval(machine, RandomSource(0), n_steps=400, init=modes[torch.arange(100) % 2], burn_in=5)
    assert_agree(fair, exact)


# -- clamp, padding, layers -------------------------------------------------------------------------


@pytest.mark.parametrize("start", ["tempered", "given"])
@pytest.mark.parametrize("name", ["matrix", "categorical", "gaussian", "gaussian on both sides", "three layers"])
def test_clamped(name, start):
    machine = MACHINES[name]()
    state = sample(machine, 1, 5, RandomSource(8)).visible
    mask = {layer: torch.zeros(array.shape, dtype=torch.bool) for layer, array in state.items()}
    for held in mask.values():
        held[:, 0] = True
    init = None if start == "tempered" else sample(machine, 200, 1, RandomSource(1)).visible
    exact = float(log_partition(machine, clamp=state, mask=mask))
    found = log_partition_interval(
        machine, RandomSource(9), n_chains=200, n_steps=200, n_temperatures=5, init=init, clamp=state, mask=mask
    )
    assert_agree(found, exact)


def test_tempering_keeps_known_entries():
    machine = MACHINES["three layers"]()
    start = sample(machine, 40, 5, RandomSource(1)).visible
    mask = {"image": torch.tensor([[True, False], [False, True], [True, True]])}
    chains = ParallelTempering(machine, 40, 4, rng=RandomSource(2), init=start, mask=mask)
    cold = chains.step(10)
    assert torch.equal(cold["image"][:, mask["image"]], start["image"][:, mask["image"]])
    assert not torch.equal(cold["image"], start["image"])
    assert not torch.equal(cold["depth"], start["depth"])
    with pytest.raises(ValueError, match="mask requires init"):
        ParallelTempering(machine, 40, 4, rng=RandomSource(2), mask=mask)


# -- likelihood of data -----------------------------------------------------------------------------


def test_likelihood_interval_holds_the_exact_mean():
    machine = MACHINES["three layers"]()
    data = sample(machine, 50, 20, RandomSource(3)).visible
    exact = log_likelihood(machine, data)
    found = log_likelihood_interval(machine, data, RandomSource(1), n_chains=200, n_steps=200, n_temperatures=5)
    assert_holds(found, float(exact.mean()))
    assert found.bounds[0] < float(exact.mean()) < found.bounds[1]
    assert min(found.forward, found.reverse) < found.mean < max(found.forward, found.reverse)
    assert found.values.shape == (50,)
    assert float(found.values.mean()) == pytest.approx(found.mean)
    assert float((found.values - exact).std()) < 1e-10  # the error is that of log Z
    assert f"{found.mean:.2f} nats" in str(found)
    assert f"forward {found.forward:.2f}" in str(found)


def test_likelihood_interval_of_documents_of_several_lengths():
    machine, words = some_documents()
    exact = log_likelihood(machine, {"words": words})
    found = log_likelihood_interval(
        machine, {"words": words}, RandomSource(0), n_chains=300, n_steps=100, burn_in=30, n_temperatures=5
    )
    torch.testing.assert_close(found.values, exact, atol=0.05, rtol=0)
    assert_holds(found, float(exact.mean()))


@pytest.mark.parametrize("recipe", ["default", "generative"])  # without and with persistent chains
def test_likelihood_of_an_estimator(recipe):
    x = (np.random.default_rng(0).random((60, 4, 3)) < 0.4).astype(np.float32)
    model = MVRBM((2, 2), n_epochs=3, recipe=recipe, random_state=0, device="cpu").fit(x)
    assert bool(model.chains_) == (recipe == "generative")
    exact = log_likelihood(model.machine_, model.machine_.as_layers(x))
    found = model.log_likelihood(x, n_chains=200, n_steps=100)
    assert_holds(found, float(exact.mean()))
    torch.testing.assert_close(found.values, exact, atol=0.05, rtol=0)
    assert str(found) == str(model.log_likelihood(x, n_chains=200, n_steps=100))
    with pytest.raises(ValueError, match="the likelihood of a stack cannot be estimated"):
        DeepMVRBM([(3, 2), (2, 2)], n_epochs=1, device="cpu").fit(x).log_likelihood(x)


def test_a_source_of_log_z_for_each_sample():
    machine = MACHINES["matrix"]()
    data = sample(machine, 5, 5, RandomSource(0)).visible
    found = log_partition_interval(machine, RandomSource(2), n_chains=50, n_steps=50)
    by_interval = log_likelihood(
        machine, data, lambda m: log_partition_interval(m, RandomSource(2), n_chains=50, n_steps=50)
    )
    torch.testing.assert_close(by_interval, log_likelihood(machine, data, found.log_z))


# -- the numbers of an interval ---------------------------------------------------------------------


def made_up(n_forward, n_reverse, spread, seed=0):
    """Normal log-weights with log Z = 0: by Crooks' theorem, those of the reverse runs are then normal, too."""
    rng = np.random.default_rng(seed)
    means = -(spread**2) / 2, spread**2 / 2
    weights = [torch.tensor(rng.normal(m, spread, n)) for m, n in zip(means, (n_forward, n_reverse), strict=True)]
    estimates = [
        float(torch.logsumexp(sign * w, 0) - math.log(len(w))) * sign for sign, w in zip((1, -1), weights, strict=True)
    ]
    return LogPartitionInterval(*(AnnealedEstimate(e, 0.1, 1.0, w) for e, w in zip(estimates, weights, strict=True)))


@pytest.mark.parametrize(("n_forward", "n_reverse"), [(100, 100), (1000, 20), (20, 1000)])
def test_the_combined_estimate_is_better_than_either(n_forward, n_reverse):
    runs = [made_up(n_forward, n_reverse, 2.0, seed) for seed in range(300)]
    combined, forward, reverse = (
        np.array(values) for values in zip(*((r.log_z, r.forward.log_z, r.reverse.log_z) for r in runs), strict=True)
    )
    assert abs(combined.mean()) < 4 * combined.std() / math.sqrt(300) + 0.02
    assert np.mean(combined**2) < min(np.mean(forward**2), np.mean(reverse**2))


def test_bounds_are_mean_log_weights():
    found = made_up(400, 300, 1.5)
    for run, sign, end in ((found.forward, -1, found.bounds[0]), (found.reverse, 1, found.bounds[1])):
        weights = run.log_weights.numpy()
        assert run.bound == pytest.approx(weights.mean())
        assert end == pytest.approx(weights.mean() + sign * 2 * weights.std(ddof=1) / math.sqrt(len(weights)))
        assert sign * (run.bound - run.log_z) > 0  # Jensen


def test_more_steps_bring_the_bounds_together():
    machine = MACHINES["matrix, large weights"]()
    widths = []
    for n_steps in (10, 100, 1000):
        found = log_partition_interval(machine, RandomSource(1), n_chains=300, n_steps=n_steps, burn_in=100)
        widths.append(found.reverse.bound - found.forward.bound)
    assert widths[0] > 2 * widths[1] > 4 * widths[2]


def test_errors_say_what_was_given():
    machine = MACHINES["binary"]()
    wrong = {
        "n_chains must be a whole number of at least 2, got 1": {"n_chains": 1},
        "n_steps must be a whole number of at least 1, got 0": {"n_steps": 0},
        "burn_in must be a whole number of at least 0, got -1": {"burn_in": -1},
        "number of states in init must be a whole number of at least 2, got 1": {"init": torch.zeros(1, 8)},
    }
    for message, arguments in wrong.items():
        with pytest.raises(ValueError, match=message):
            reverse_annealed_importance_sampling(machine, RandomSource(0), **arguments)
