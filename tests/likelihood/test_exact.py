"""log Z, likelihood, its gradient and pseudo-likelihood against sums over every state."""

import math

import numpy as np
import pytest
import torch
from scipy import integrate

from enumeration import Written, every_visible_state
from mvrbm import Bernoulli, BoltzmannMachine, Categorical, Dense, Gaussian, Kronecker, RandomSource, likelihood
from mvrbm.compiled import library
from mvrbm.compiled.pseudo import log_odds
from mvrbm.likelihood import log_likelihood, log_partition, pseudo, pseudo_log_likelihood
from mvrbm.likelihood.pseudo import mean_pseudo_log_likelihood
from tables import MACHINES, MULTIMODAL, generator, machine_named, random_layer, random_states, randomize

TOLERANCE = {"rtol": 1e-10, "atol": 1e-10}
DISCRETE = [
    name for name in MACHINES if not any(word in name.split("|")[0] for word in ("gaussian", "kinds", "signals"))
]


# -- log Z ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", MACHINES)
@torch.no_grad()
def test_log_partition_sums_every_state(name):
    machine = machine_named(name)
    torch.testing.assert_close(log_partition(machine), Written(machine).log_partition(), **TOLERANCE)


def site_mask(unit, rng, share):
    """Know some of the sites."""
    sites = torch.from_numpy(np.asarray(rng.random(unit.site_shape) < share))
    return (sites[..., None] if unit.entry_modes else sites).expand(unit.shape)


@pytest.mark.parametrize("share", [0.3, 0.7])
@pytest.mark.parametrize("name", MACHINES)
@torch.no_grad()
def test_clamped_log_partition_sums_what_agrees(name, share):
    machine = machine_named(name)
    rng = generator(f"clamp {share}")
    state = random_states(machine, 1, rng, padding=True)
    mask = {key: site_mask(unit, rng, share) for key, unit in machine.layers.items()}
    written = Written(machine)
    known = written.join({key: (value | absent(machine, state)[key])[None] for key, value in mask.items()}).bool()[0]
    expected = written.log_sum(written.join(state)[0], known)
    torch.testing.assert_close(log_partition(machine, clamp=state, mask=mask), expected, **TOLERANCE)


def absent(machine, state):
    """Rows of zeros of padded layers."""
    return {
        key: (x[0] == 0).all(-1, keepdim=True).expand(x[0].shape)
        if getattr(machine.layers[key], "padded", False)
        else torch.zeros(x.shape[1:], dtype=torch.bool)
        for key, x in state.items()
    }


@pytest.mark.parametrize("name", MULTIMODAL)
@torch.no_grad()
def test_clamping_a_whole_modality(name):
    machine = machine_named(name)
    state = random_states(machine, 1, generator("modality"))
    written = Written(machine)
    for key, unit in machine.layers.items():
        known = written.known()
        known[written.span[key]] = True
        value = log_partition(machine, clamp=state, mask={key: torch.ones(unit.shape, dtype=torch.bool)})
        torch.testing.assert_close(value, written.log_sum(written.join(state)[0], known), **TOLERANCE)


@torch.no_grad()
def test_clamping_everything_leaves_the_free_energy():
    machine = machine_named("three kinds over reals")
    state = random_states(machine, 1, generator("all"))
    mask = {key: torch.ones(unit.shape, dtype=torch.bool) for key, unit in machine.layers.items()}
    expected = Written(machine).free_energy(state)[0]
    torch.testing.assert_close(log_partition(machine, clamp=state, mask=mask), -expected, **TOLERANCE)


SIDES = [
    ("fewer visible states", Bernoulli(3), Bernoulli(7)),
    ("fewer hidden states", Bernoulli(7), Bernoulli(3)),
    ("real visible", Gaussian(3), Bernoulli(7)),
    ("real hidden", Categorical((3, 3)), Gaussian(2)),
]


@pytest.mark.parametrize(("_", "visible", "hidden"), SIDES)
@torch.no_grad()
def test_states_in_small_pieces(_, visible, hidden, monkeypatch):
    machine = randomize(BoltzmannMachine(visible, hidden, Dense()), generator("pieces"))
    monkeypatch.setattr(likelihood.exact, "_CHUNK_ENTRIES", 11)
    torch.testing.assert_close(log_partition(machine), Written(machine).log_partition(), **TOLERANCE)


@torch.no_grad()
def test_log_partition_by_quadrature():
    machine = randomize(BoltzmannMachine(Gaussian(1), Gaussian(1), Dense()), generator("quadrature"))
    nodes = torch.linspace(-20, 20, 401, dtype=torch.float64)
    z = torch.cartesian_prod(nodes, nodes)
    total = torch.exp(-machine.energy(z[:, :1], z[:, 1:])).sum() * (nodes[1] - nodes[0]) ** 2
    torch.testing.assert_close(log_partition(machine), total.log(), **TOLERANCE)


@torch.no_grad()
def test_single_precision_sums_in_double():
    machine = machine_named("three kinds over bits")
    exact = log_partition(machine)
    rough = log_partition(machine.float())
    assert rough.dtype == torch.float64
    torch.testing.assert_close(rough, exact, rtol=1e-5, atol=1e-5)


# -- likelihood of data ---------------------------------------------------------------------------------


@pytest.mark.parametrize("name", DISCRETE)
@torch.no_grad()
def test_probabilities_sum_to_one(name):
    machine = machine_named(name)
    total = torch.logsumexp(log_likelihood(machine, every_visible_state(machine)), 0)
    torch.testing.assert_close(total, torch.zeros_like(total), **TOLERANCE)


@torch.no_grad()
def test_density_integrates_to_one():
    units = {"x": Gaussian(1, learn_variance=True), "bits": Bernoulli(2)}
    machine = randomize(BoltzmannMachine(units, Bernoulli(3), {"x": Dense(), "bits": Dense()}), generator("density"))
    bits = torch.tensor([[0.0, 0], [0, 1], [1, 0], [1, 1]], dtype=torch.float64)

    def density(x):
        visible = {"x": torch.full((4, 1), x, dtype=torch.float64), "bits": bits}
        return torch.exp(log_likelihood(machine, visible)).sum().item()

    total, _ = integrate.quad(density, -25, 25, epsabs=1e-12, epsrel=1e-12, limit=200, points=[-3, 0, 3])
    np.testing.assert_allclose(total, 1, rtol=1e-10)


@pytest.mark.parametrize("name", [name for name in MACHINES if "padded" in name] + [*MULTIMODAL, "replicated softmax"])
@torch.no_grad()
def test_log_likelihood_of_each_length(name):
    machine = machine_named(name)
    data = random_states(machine, 5, generator("lengths"), padding=True)
    written = Written(machine)
    expected = []
    for row, z in enumerate(written.join(data)):
        state = {key: x[row : row + 1] for key, x in data.items()}
        gone = written.join({key: mask[None] for key, mask in absent(machine, state).items()}).bool()[0]
        expected.append(written.log_sum(z, written.known(visible=True)) - written.log_sum(z, gone))
    torch.testing.assert_close(log_likelihood(machine, data), torch.stack(expected), **TOLERANCE)


@torch.no_grad()
def test_log_likelihood_with_a_log_z_of_ones_own():
    machine = machine_named("image and label")
    data = random_states(machine, 4, generator("given"))
    log_z = Written(machine).log_partition()
    torch.testing.assert_close(log_likelihood(machine, data, float(log_z)), log_likelihood(machine, data))


# -- the exact gradient ---------------------------------------------------------------------------------


def energy_gradients(machine, visible, hidden):
    """Gradient of the energy of each joint state, out of the package's parts."""

    def one(x, y):
        x = {key: array[None] for key, array in x.items()}
        seen = {key: unit.statistic(x[key]) for key, unit in machine.layers.items()}
        shown = machine.hidden.statistic(y[None])
        parts = {"hidden.": machine.hidden.energy_gradient(y[None], machine.hidden_field(x))}
        for key, unit in machine.layers.items():
            parts[f"visible.{key}."] = unit.energy_gradient(x[key], machine.visible_fields(y[None])[key])
            parts[f"couplings.{key}."] = machine.links[key].statistics(seen[key], shown)
        return {place + key: value for place, part in parts.items() for key, value in part.items()}

    return torch.func.vmap(one)(visible, hidden)


def enumerated_gradient(machine, data):
    """Derivative of the mean log-likelihood, summed out in full, for every learned parameter."""
    written = Written(machine)
    value = -written.free_energy(data).mean() - written.log_partition()
    learned = {key: p for key, p in machine.named_parameters() if p.requires_grad}
    return dict(zip(learned, torch.autograd.grad(value, list(learned.values())), strict=True))


@pytest.mark.parametrize("name", MACHINES)
def test_likelihood_gradient_is_model_minus_data(name):
    machine = machine_named(name)
    data = random_states(machine, 3, generator("gradient"))
    expected = enumerated_gradient(machine, data)
    with torch.no_grad():
        written = Written(machine)
        states, weights = written.representatives()
        model = energy_gradients(machine, *written.split(states))
        positive = machine.free_energy_gradient(data)
    for key, gradient in expected.items():
        ours = torch.tensordot(weights, model[key], dims=1) - positive[key]
        torch.testing.assert_close(ours, gradient, **TOLERANCE, msg=lambda text, key=key: f"{key}: {text}")


@pytest.mark.parametrize("name", DISCRETE)
def test_likelihood_gradient_by_free_energies_alone(name):
    machine = machine_named(name)
    data = random_states(machine, 3, generator("gradient"))
    expected = enumerated_gradient(machine, data)
    with torch.no_grad():
        states = every_visible_state(machine)
        p = torch.softmax(-Written(machine).free_energy(states), 0)
        one = torch.func.vmap(lambda x: machine.free_energy_gradient({key: row[None] for key, row in x.items()}))
        model, positive = one(states), machine.free_energy_gradient(data)
    for key, gradient in expected.items():
        torch.testing.assert_close(torch.tensordot(p, model[key], dims=1) - positive[key], gradient, **TOLERANCE)


@pytest.mark.parametrize("name", ["image and label", "three kinds over reals", "replicated softmax"])
def test_likelihood_gradient_is_a_slope(name):
    machine = machine_named(name)
    data = random_states(machine, 3, generator("gradient"))
    gradient = enumerated_gradient(machine, data)
    rng = generator("directions")
    moves = {key: torch.from_numpy(rng.standard_normal(g.shape)) for key, g in gradient.items()}
    step, values = 1e-5, []
    with torch.no_grad():
        for sign in (1, -2):
            for key, parameter in machine.named_parameters():
                if key in moves:
                    parameter.add_(sign * step * moves[key])
            values.append(log_likelihood(machine, data).mean())
    slope = sum((gradient[key] * move).sum() for key, move in moves.items())
    torch.testing.assert_close((values[0] - values[1]) / (2 * step), slope, rtol=1e-7, atol=1e-7)


# -- pseudo-likelihood ----------------------------------------------------------------------------------


def enumerated_pseudo(machine, data):
    """Sum over visible sites that exist of log p(site | all other sites)."""
    written = Written(machine)
    totals = []
    for z in written.join(data):
        total = torch.zeros((), dtype=torch.float64)
        for entries, values, _ in written.sites:
            padding = values is not None and len(entries) > 1 and not bool(z[entries].any())
            if entries[0] < written.n_visible and not padding:
                known = written.known(visible=True)
                known[entries] = False
                total += written.log_sum(z, written.known(visible=True)) - written.log_sum(z, known)
        totals.append(total)
    return torch.stack(totals)


@pytest.mark.parametrize("name", MACHINES)
@torch.no_grad()
def test_pseudo_log_likelihood_of_every_site(name):
    machine = machine_named(name)
    data = random_states(machine, 3, generator("pseudo"), padding=True)
    found = pseudo_log_likelihood(machine, data)
    assert found.exact
    assert found.sites == found.total_sites == sum(unit.n_sites for unit in machine.layers.values())
    torch.testing.assert_close(found.values, enumerated_pseudo(machine, data), **TOLERANCE)


@pytest.mark.parametrize("hidden", [Bernoulli(3), Gaussian(2, learn_variance=True), Categorical(4)], ids=repr)
@torch.no_grad()
def test_gaussian_pseudo_likelihood_by_scipy_quadrature(hidden):
    machine = randomize(BoltzmannMachine(Gaussian(2, learn_variance=True), hidden, Dense()), generator("entries"))
    x = torch.tensor([[0.3, -2.0]], dtype=torch.float64)
    total = 0.0
    for entry in range(2):

        def log_weight(value, entry=entry):
            other = x.clone()
            other[0, entry] = value
            return -machine.free_energy(other).item()

        top = max(log_weight(value) for value in np.linspace(-6, 6, 61))
        area, _ = integrate.quad(
            lambda value, top=top: math.exp(log_weight(value) - top),
            -40,
            40,
            epsabs=1e-13,
            limit=300,
            points=[-4, 0, 4],
        )
        total += log_weight(x[0, entry].item()) - top - math.log(area)
    np.testing.assert_allclose(pseudo_log_likelihood(machine, x).values.item(), total, rtol=1e-9)


@pytest.mark.parametrize("size", [3.0, 8.0])
@pytest.mark.parametrize("hidden", [Bernoulli((2, 2)), Categorical((2, 3))], ids=repr)
@torch.no_grad()
def test_gaussian_pseudo_likelihood_with_modes_far_apart(hidden, size):
    visible = Gaussian((2, 2) if hidden.name == "bernoulli" else (2, 3))
    machine = randomize(BoltzmannMachine(visible, hidden, Kronecker(rank=2)), generator("far"), size=size**0.5)
    data = {"visible": 10 * random_layer(visible, 3, generator("far data"))}
    expected = enumerated_pseudo(machine, data)
    torch.testing.assert_close(pseudo_log_likelihood(machine, data).values, expected, **TOLERANCE)


@torch.no_grad()
def test_nearly_unbounded_gaussian_pseudo_likelihood():
    machine = randomize(BoltzmannMachine(Gaussian(2), Gaussian(2), Dense()), generator("nearly"))
    machine.couplings.visible.weight.mul_(0.99 / 0.6)
    data = {"visible": torch.tensor([[0.5, 40.0], [-30.0, 2.0]], dtype=torch.float64)}
    expected = enumerated_pseudo(machine, data)
    torch.testing.assert_close(pseudo_log_likelihood(machine, data).values, expected, **TOLERANCE)


@torch.no_grad()
def test_a_gray_entry_counts_as_its_share_of_ones():
    machine = machine_named("bernoulli | bernoulli | kronecker(rank=1) (3, 2)->(2, 2)")
    gray = torch.from_numpy(generator("gray").random((2, 3, 2)))
    written, flat = Written(machine), gray.flatten(1)
    expected = torch.zeros(2, dtype=torch.float64)
    for entry in range(6):
        scores = []
        for value in (0.0, 1.0):
            other = flat.clone()
            other[:, entry] = value
            scores.append(-written.free_energy({"visible": other.reshape(2, 3, 2)}))
        log_p = torch.log_softmax(torch.stack(scores), 0)
        expected += (1 - flat[:, entry]) * log_p[0] + flat[:, entry] * log_p[1]
    torch.testing.assert_close(pseudo_log_likelihood(machine, gray).values, expected, **TOLERANCE)


@torch.no_grad()
def test_a_subset_of_sites_is_fixed_by_its_seed():
    machine = machine_named("image and label")
    data = random_states(machine, 6, generator("subset"))
    first, again, other = (pseudo_log_likelihood(machine, data, n_sites=2, seed=seed) for seed in (1, 1, 3))
    assert not first.exact
    assert (first.sites, first.total_sites) == (2, 5)
    assert torch.equal(first.values, again.values)
    assert not torch.equal(first.values, other.values)


@torch.no_grad()
def test_subsets_average_to_the_whole():
    machine = machine_named("image and label")
    data = random_states(machine, 2, generator("subset"))
    single = {}
    for seed in range(60):
        values = pseudo_log_likelihood(machine, data, n_sites=1, seed=seed).values
        single[tuple(values.tolist())] = values
    assert len(single) == 5
    torch.testing.assert_close(torch.stack(list(single.values())).mean(0), pseudo_log_likelihood(machine, data).values)


@torch.no_grad()
def test_the_estimate_visits_every_part_of_the_image():
    machine = machine_named("image and label")
    data = random_states(machine, 3, generator("subset"))
    found = pseudo_log_likelihood(machine, data, n_sites=2)
    # It depends on no other sample.
    assert torch.equal(
        found.values[:1], pseudo_log_likelihood(machine, {k: x[:1] for k, x in data.items()}, n_sites=2).values
    )
    for n_sites in (5, 100):
        assert pseudo_log_likelihood(machine, data, n_sites=n_sites).exact


@pytest.mark.parametrize("hidden_size", [1, 31, 32, 700])
@pytest.mark.parametrize("size", [0.01, 1.0, 18.0])
@pytest.mark.parametrize("gray", [False, True])
@pytest.mark.skipif(library("_pseudo") is None, reason="no compiled code")
@torch.no_grad()
def test_compiled_log_odds_are_differences_of_free_energies(hidden_size, size, gray):
    rng = generator(f"odds {hidden_size} {size}")
    machine = BoltzmannMachine(Bernoulli(9), Bernoulli(hidden_size), Dense())
    randomize(machine, rng)
    machine.couplings.visible.weight.mul_(size)
    x = torch.from_numpy(rng.random((21, 9)))
    x = torch.where(x < 0.3, 0.0, torch.where(x > 0.6, 1.0, x if gray else 1.0))
    expected = pseudo_log_likelihood(machine, x).values  # float64: without the compiled code
    machine.float()
    parts = machine.hidden_field({"visible": x.float()}), machine.hidden.bias, machine.couplings.visible.weight.T
    assert log_odds(*parts, x.float()) is not None
    torch.testing.assert_close(pseudo_log_likelihood(machine, x).values.double(), expected, rtol=1e-5, atol=1e-4 * size)


@pytest.mark.skipif(library("_pseudo") is None, reason="no compiled code")
def test_compiled_log_odds_do_not_depend_on_threads_and_leave_some_cases_to_others(monkeypatch):
    rng = RandomSource(0)
    like = torch.empty(0)
    field, weights, bias = 300 * rng.normal((40, 33), like), rng.normal((5, 33), like), torch.zeros(33)
    x = rng.uniform((40, 5), like).round()
    alone = log_odds(field, bias, weights, x)
    monkeypatch.setattr("mvrbm.compiled.pseudo._WORTH_A_THREAD", 1)
    monkeypatch.setattr(torch, "get_num_threads", lambda: 3)
    assert torch.equal(log_odds(field, bias, weights, x), alone)
    assert log_odds(field.double(), bias, weights, x) is None
    assert log_odds(field, bias, 61 * torch.ones_like(weights), x) is None
    assert log_odds(field.index_fill(0, torch.tensor(3), math.nan), bias, weights, x) is None
    assert log_odds(field, bias, weights * math.inf, x) is None


@pytest.mark.parametrize("name", ["image and label", "bernoulli | gaussian-learned | dense() (2, 2)->(3,)"])
@torch.no_grad()
def test_pseudo_likelihood_piece_by_piece(monkeypatch, name):
    machine = machine_named(name)
    data = random_states(machine, 3, generator("pieces"))
    whole = pseudo_log_likelihood(machine, data).values
    monkeypatch.setattr(likelihood.pseudo, "_MOST_WEIGHTS", 9)
    monkeypatch.setattr(likelihood.pseudo, "_MOST_FIELDS", 1)
    torch.testing.assert_close(pseudo_log_likelihood(machine, data).values, whole, **TOLERANCE)


@pytest.mark.parametrize("name", ["three kinds over bits", "image and label"])
def test_the_mean_estimate_visits_each_site_for_some_samples(name, monkeypatch):
    """Each of the n sites is visited for one sample of n, in all n^2 combinations, so the average is the exact mean."""
    machine = machine_named(name)
    n = sum(unit.n_sites for unit in machine.layers.values())
    data = random_states(machine, n, generator("mean"))
    exact = pseudo_log_likelihood(machine, data).values.mean().item()
    assert mean_pseudo_log_likelihood(machine, data, n_sites=n) == pytest.approx(exact, rel=1e-9)
    monkeypatch.setattr(pseudo, "_MOST_ENTRIES", 0)
    shifted = [{layer: x.roll(shift, 0) for layer, x in data.items()} for shift in range(n)]
    estimates = [mean_pseudo_log_likelihood(machine, each, n_sites=n) for each in shifted]
    assert max(estimates) - min(estimates) > 1e-6
    assert np.mean(estimates) == pytest.approx(exact, rel=1e-9)


def test_the_mean_estimate_of_gaussian_digits_visits_few_values():
    machine = BoltzmannMachine(Gaussian((28, 28)), Bernoulli((25, 25)), Kronecker(), std=0.01)
    visited = []
    log_normalizer = machine.hidden.log_normalizer
    machine.hidden.log_normalizer = lambda field: visited.append(field.numel()) or log_normalizer(field)
    mean_pseudo_log_likelihood(
        machine, torch.randn(500, 28, 28, generator=torch.Generator().manual_seed(0)), n_sites=32
    )
    assert sum(visited) < 2**25
