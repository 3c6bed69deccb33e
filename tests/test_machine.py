"""Every machine against the definition of its energy: conditionals, free energy, gradients."""

import numpy as np
import pytest
import torch

from enumeration import Written
from given_numbers import GivenNumbers
from mvrbm import CP, Bernoulli, BoltzmannMachine, Categorical, Dense, Gaussian, Kronecker, RandomSource
from tables import MACHINES, MULTIMODAL, full_matrix, generator, machine_named, random_layer, random_states, randomize

TOLERANCE = {"rtol": 1e-10, "atol": 1e-10}


def random_joint(machine, n, padding=False):
    rng = generator("states")
    return random_states(machine, n, rng, padding), random_layer(machine.hidden, n, rng)


@pytest.mark.parametrize("name", MACHINES)
def test_energy_is_its_formula(name):
    machine = machine_named(name)
    visible, hidden = random_joint(machine, 4, padding=True)
    written = Written(machine)
    expected = written.energy(written.join(visible, hidden))
    torch.testing.assert_close(machine.energy(visible, hidden), expected, **TOLERANCE)


def test_energy_entry_by_entry():
    machine = randomize(BoltzmannMachine(Gaussian((2, 3)), Bernoulli((2, 2)), Kronecker(rank=2)), generator("loops"))
    (x,), y = (array.numpy() for array in random_joint(machine, 1)[0].values()), random_joint(machine, 1)[1].numpy()
    b, log_variance = (p.detach().numpy() for p in machine.visible.visible.parameters())
    c = machine.hidden.bias.detach().numpy()
    U, V = (factor.detach().numpy() for factor in machine.couplings.visible.factors)
    energy = 0.0
    for i in range(2):
        for j in range(3):
            s = np.exp(0.5 * log_variance[i, j])
            energy += (x[0, i, j] - b[i, j]) ** 2 / (2 * s**2)
            for k in range(2):
                for m in range(2):
                    for r in range(2):
                        energy -= y[0, k, m] * U[r, k, i] * V[r, m, j] * x[0, i, j] / s
    for k in range(2):
        for m in range(2):
            energy -= c[k, m] * y[0, k, m]
    np.testing.assert_allclose(machine.energy(torch.from_numpy(x), torch.from_numpy(y)).item(), energy, rtol=1e-12)


# -- Lemma 1: given one side, the other side's sites are independent, each with the mean the package says -----


def check_conditional(sites, terms, means, scales):
    """Compare an enumerated distribution with a product over `sites`, by the means and scales of all entries."""
    torch.testing.assert_close(terms.mean(), means, **TOLERANCE)
    product = torch.ones_like(terms.logs)
    for entries, _, probability in sites:
        if probability is not None:
            product *= probability(terms.states[:, entries], means[entries])
    torch.testing.assert_close(torch.softmax(terms.logs, 0), product, **TOLERANCE)
    torch.testing.assert_close(terms.covariance, torch.diag(scales[terms.reals] ** 2), **TOLERANCE)


def scale_of(unit, field):
    """Standard deviation, as its draws show it."""
    if not isinstance(unit, Gaussian):
        return torch.zeros_like(field)
    up, down = (unit.sample(field, GivenNumbers([sign * torch.ones_like(field)])) for sign in (1, -1))
    return (up - down) / 2


@pytest.mark.parametrize("name", MACHINES)
@torch.no_grad()
def test_hidden_sites_are_independent_given_visible(name):
    machine = machine_named(name)
    visible, _ = random_joint(machine, 2, padding=True)
    written = Written(machine)
    mean = machine.hidden_mean(visible)
    scale = scale_of(machine.hidden, machine.hidden_field(visible))
    for row, z in enumerate(written.join(visible)):
        terms = written.terms(z, written.known(visible=True))
        means = torch.cat([z[: written.n_visible], mean[row].flatten()])
        scales = torch.cat([torch.zeros(written.n_visible, dtype=z.dtype), scale[row].flatten()])
        sites = [site for site in written.sites if site[0][0] >= written.n_visible]
        check_conditional(sites, terms, means, scales)


@pytest.mark.parametrize("name", MACHINES)
@torch.no_grad()
def test_visible_sites_are_independent_given_hidden(name):
    machine = machine_named(name)
    visible, hidden = random_joint(machine, 2)
    written = Written(machine)
    means = written.join(machine.visible_mean(hidden), hidden)
    fields = machine.visible_fields(hidden)
    scales = written.join({key: scale_of(unit, fields[key]) for key, unit in machine.layers.items()})
    for row, z in enumerate(written.join(visible, hidden)):
        terms = written.terms(z, written.known(hidden=True))
        sites = [site for site in written.sites if site[0][0] < written.n_visible]
        check_conditional(sites, terms, means[row], scales[row])


# -- free energy ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", MACHINES)
@torch.no_grad()
def test_free_energy_sums_out_the_hidden_layer(name):
    machine = machine_named(name)
    visible, _ = random_joint(machine, 4, padding=True)
    torch.testing.assert_close(machine.free_energy(visible), Written(machine).free_energy(visible), **TOLERANCE)


@torch.no_grad()
def test_free_energy_of_gaussian_hidden_by_quadrature():
    units = Bernoulli(3), Gaussian(2, learn_variance=True)
    machine = randomize(BoltzmannMachine(*units, Dense()), generator("quadrature"), size=0.4)
    x = torch.tensor([[1.0, 0.0, 1.0]], dtype=torch.float64)

    nodes = torch.linspace(-15, 15, 301, dtype=torch.float64)  # the trapezoidal rule is exact for such smooth bells
    y = torch.cartesian_prod(nodes, nodes)
    total = torch.exp(-machine.energy(x.expand(len(y), 3), y)).sum() * (nodes[1] - nodes[0]) ** 2
    torch.testing.assert_close(-total.log(), machine.free_energy(x)[0], **TOLERANCE)


# -- gradient of the free energy ------------------------------------------------------------------------


@pytest.mark.parametrize("name", MACHINES)
def test_free_energy_gradient_is_that_of_autograd(name):
    machine = machine_named(name)
    visible, _ = random_joint(machine, 5, padding=True)
    learned = {key: p for key, p in machine.named_parameters() if p.requires_grad}
    expected = torch.autograd.grad(Written(machine).free_energy(visible).mean(), list(learned.values()))
    with torch.no_grad():
        analytic = machine.free_energy_gradient(visible)
        reusing = machine.free_energy_gradient(visible, machine.hidden_field(visible))
    assert set(analytic) == set(learned)
    assert all(torch.equal(reusing[key], analytic[key]) for key in learned)
    for key, gradient in zip(learned, expected, strict=True):
        torch.testing.assert_close(analytic[key], gradient, **TOLERANCE, msg=lambda text, key=key: f"{key}: {text}")
    through_package = torch.autograd.grad(machine.free_energy(visible).mean(), list(learned.values()))
    for ours, theirs in zip(through_package, expected, strict=True):
        torch.testing.assert_close(ours, theirs, **TOLERANCE)


@pytest.mark.parametrize("name", MULTIMODAL)
def test_free_energy_gradient_is_a_slope(name):
    machine = machine_named(name)
    visible, _ = random_joint(machine, 3)
    gradient = machine.free_energy_gradient(visible)
    rng = generator("directions")
    with torch.no_grad():
        moves = {key: torch.from_numpy(rng.standard_normal(g.shape)) for key, g in gradient.items()}
        step, values = 1e-5, []
        for sign in (1, -2):
            for key, parameter in machine.named_parameters():
                if key in moves:
                    parameter.add_(sign * step * moves[key])
            values.append(machine.free_energy(visible).mean())
    slope = sum((gradient[key] * move).sum() for key, move in moves.items())
    torch.testing.assert_close((values[0] - values[1]) / (2 * step), slope.detach(), rtol=1e-7, atol=1e-7)


# -- bounded energy -------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", [name for name in MACHINES if "gaussian" in name.split(" | ")[0]] + MULTIMODAL)
@torch.no_grad()
def test_gaussian_norm_is_the_spectral_norm(name):
    machine = machine_named(name)
    reals = [key for key, unit in machine.layers.items() if isinstance(unit, Gaussian)]
    if not isinstance(machine.hidden, Gaussian):
        assert machine.gaussian_norm() == 0
        return
    joint = np.concatenate([full_matrix(machine.links[key]).numpy() for key in reals], 1)
    np.testing.assert_allclose(machine.gaussian_norm(), np.linalg.norm(joint, 2), rtol=1e-9)


@pytest.mark.parametrize("size", [0.5, 0.97, 1.03, 2.0])
@torch.no_grad()
def test_bounded_exactly_if_the_precision_matrix_is_positive(size):
    units = {"a": Gaussian(2, learn_variance=True), "b": Gaussian(3)}
    machine = BoltzmannMachine(units, Gaussian(2, learn_variance=True), {"a": Dense(), "b": Dense()})
    randomize(machine, generator("bound"))
    for link in machine.links.values():
        link.weight.mul_(size / 0.6)
    lowest = np.linalg.eigvalsh(Written(machine).precision.numpy())[0]
    assert (lowest > 0) == (size < 1)
    if size < 1:
        machine.check_bounded()
    else:
        with pytest.raises(ValueError, match="unbounded"):
            machine.check_bounded()


@torch.no_grad()
def test_gaussian_norm_of_a_layer_too_large_for_a_matrix():
    machine = BoltzmannMachine(Gaussian((9, 8)), Gaussian((40, 35)), Kronecker()).double()
    U, V = (factor[0].numpy() for factor in machine.couplings.visible.factors)
    expected = np.linalg.norm(U, 2) * np.linalg.norm(V, 2)
    np.testing.assert_allclose(machine.gaussian_norm(), expected, rtol=1e-6)


# -- what else a machine promises -----------------------------------------------------------------------


def test_draws_invert_the_distribution_at_the_noise_given():
    machine = machine_named("three kinds over bits")
    visible, hidden = random_joint(machine, 6)
    rng = RandomSource(3)
    uniform = rng.uniform((6, 2, 2), machine.like)
    drawn = machine.sample_hidden(visible, GivenNumbers([uniform]))
    torch.testing.assert_close(drawn, (uniform < machine.hidden_mean(visible)).double())
    draws = [rng.normal((6, 2, 2), machine.like), rng.uniform((6, 2, 1), machine.like)]
    draws.append(rng.uniform((6, 1), machine.like))
    mean = machine.visible_mean(hidden)
    drawn = machine.sample_visible(hidden, GivenNumbers(draws))
    scale = machine.visible.signal.log_variance.exp().sqrt()
    torch.testing.assert_close(drawn["signal"], mean["signal"] + scale * draws[0])
    torch.testing.assert_close(drawn["bits"], (draws[1] < mean["bits"]).double())
    for row in range(6):
        at, category = draws[2][row, 0], 0
        while at >= mean["word"][row, 0, : category + 1].sum():
            category += 1
        assert drawn["word"][row, 0].tolist() == [float(k == category) for k in range(3)]


def test_initialize_from_data_gives_back_its_moments():
    machine = BoltzmannMachine(
        {"bits": Bernoulli((2, 2)), "signal": Gaussian(3), "word": Categorical((2, 3))},
        Bernoulli(2),
        {"bits": CP(), "signal": Dense(), "word": CP()},
    ).double()
    rng = generator("data")
    data = random_states(machine, 50, rng)
    data["signal"] = 200 + 30 * data["signal"]
    machine.initialize_from(data)
    alone = {name: unit.mean(torch.zeros(1, *unit.shape).double())[0] for name, unit in machine.layers.items()}
    torch.testing.assert_close(alone["bits"], (data["bits"].sum(0) + 1) / 52)
    torch.testing.assert_close(alone["signal"], data["signal"].mean(0))
    variance = machine.visible.signal.log_variance.exp()
    np.testing.assert_allclose(variance.detach(), np.var(data["signal"].numpy(), axis=0))
    torch.testing.assert_close(alone["word"], (data["word"].sum(0) + 1) / 53)


@pytest.mark.parametrize("name", MACHINES)
def test_calling_a_machine_gives_the_hidden_means(name):
    machine = machine_named(name)
    visible, _ = random_joint(machine, 4)
    expected = machine.hidden_mean(visible)
    assert torch.equal(machine(visible), expected)
    if len(visible) == 1:
        assert torch.equal(machine(*visible.values()), expected)
    with pytest.raises(ValueError, match="expects arrays of shape"):
        machine({layer: values[:, :-1] for layer, values in visible.items()})


def test_machines_follow_each_other_in_a_sequence():
    """The means of Gaussian hidden units are no valid states of the Bernoulli units of the next machine."""
    first = BoltzmannMachine(Bernoulli((2, 3)), Gaussian(4), Dense(), std=0.5)
    second = BoltzmannMachine(Bernoulli(4), Bernoulli(2), Dense(), std=0.5, seed=1)
    with torch.no_grad():
        first.hidden.bias.fill_(3.0)
    x = torch.ones(5, 2, 3)
    weights = [first.couplings.visible.weight.flatten(1), second.couplings.visible.weight]
    means = x.flatten(1) @ weights[0].T + 3.0
    torch.testing.assert_close(torch.nn.Sequential(first, second)(x), torch.sigmoid(means @ weights[1].T))


def test_machines_can_be_transformed_by_torch_func():
    machine = BoltzmannMachine(Bernoulli((2, 3)), Bernoulli(4), Dense(), std=0.5).double()
    x = random_layer(machine.layers["visible"], 5, generator("func"))
    parameters = {name: value.detach() for name, value in machine.named_parameters()}

    def mean_of_one(values, sample):
        return torch.func.functional_call(machine, values, (sample[None],))[0].sum()

    each = torch.func.vmap(torch.func.grad(mean_of_one), in_dims=(None, 0))(parameters, x)
    slope = machine.hidden_mean(x) * (1 - machine.hidden_mean(x))  # derivative of the sigmoid
    torch.testing.assert_close(each["hidden.bias"], slope.detach())
    weights = slope[:, :, None] * x.flatten(1)[:, None]
    torch.testing.assert_close(each["couplings.visible.weight"].flatten(2), weights.detach())


def test_state_dict_moves_a_machine():
    source = machine_named("three kinds over bits")
    target = randomize(machine_named("three kinds over bits"), generator("other"))
    visible, _ = random_joint(source, 4)
    assert not torch.allclose(source.free_energy(visible), target.free_energy(visible))
    target.load_state_dict(source.state_dict())
    assert torch.equal(source.free_energy(visible), target.free_energy(visible))


def test_same_seed_same_start():
    first, again, other = (BoltzmannMachine(Bernoulli(4), Bernoulli(3), Dense(), seed=seed) for seed in (5, 5, 6))
    assert torch.equal(first.couplings.visible.weight, again.couplings.visible.weight)
    assert not torch.equal(first.couplings.visible.weight, other.couplings.visible.weight)


def test_a_connected_coupling_keeps_its_weights():
    link = Kronecker(rank=2).connect((2, 3), (3, 2), RandomSource(9), std=1.0)
    before = link.dense().clone()
    machine = BoltzmannMachine(Bernoulli((2, 3)), Bernoulli((3, 2)), link)
    assert torch.equal(machine.couplings.visible.dense(), before)


def test_arrays_of_other_kinds_are_taken():
    machine = machine_named("bernoulli | bernoulli | dense() (2, 2)->(3,)")
    bits = np.array([[[0, 1], [1, 1]]])
    as_floats = torch.from_numpy(bits).double()
    for given in (bits, bits.astype(bool), bits.tolist(), {"visible": bits.astype(np.float32)}):
        assert torch.equal(machine.free_energy(given), machine.free_energy(as_floats))


@pytest.mark.parametrize("batched", [True, False])
def test_masks_hold_for_every_sample(batched):
    machine = machine_named("image and label")
    visible, _ = random_joint(machine, 3)
    mask = torch.tensor([[True, False], [False, True]])
    masks = machine.as_masks({"image": mask.expand(3, 2, 2) if batched else mask}, visible)
    assert torch.equal(masks["image"], mask.expand(3, 2, 2))
    assert masks["label"] is None


def test_padding_counts_as_known():
    machine = machine_named("categorical-padded | bernoulli | kronecker(rank=3) (2, 3)->(2, 2)")
    x = torch.tensor([[[1.0, 0, 0], [0, 0, 0]], [[0, 1.0, 0], [0, 0, 1.0]]])
    absent = torch.tensor([[[False] * 3, [True] * 3], [[False] * 3, [False] * 3]])
    assert torch.equal(machine.as_masks(None, {"visible": x})["visible"], absent)
    first = torch.tensor([[True] * 3, [False] * 3])
    assert torch.equal(machine.as_masks(first, {"visible": x})["visible"], absent | first)


def test_repr_names_the_parts():
    text = repr(machine_named("three kinds over a category"))
    for part in ("Gaussian", "Bernoulli", "Categorical", "padded=True", "2x2 -> 2x3", "bond=3", "rank=2"):
        assert part in text


def test_layers_keep_their_order():
    assert list(machine_named("three kinds over bits").layers) == ["signal", "bits", "word"]


def test_limiting_the_norm_keeps_the_hidden_field_at_the_visible_means():
    machine = BoltzmannMachine(
        {"a": Gaussian((5, 4)), "b": Bernoulli(3)}, Gaussian((3, 2)), {"a": Kronecker(2), "b": Dense()}
    )
    with torch.no_grad():
        machine.layers["a"].bias.fill_(7.0)
        machine.links["a"].initialize(RandomSource(1), 0.5)
        machine.hidden.bias.uniform_(-1, 1)
    means = {name: unit.mean(torch.zeros(1, *unit.shape)) for name, unit in machine.layers.items()}
    before = machine.hidden_mean(means, check=False)
    other = machine.links["b"].dense().clone()
    weights = machine.links["a"].dense().reshape(6, 20).detach().numpy()
    norm = np.linalg.norm(weights, 2)
    assert norm > 1
    machine.limit_norm(0.9)
    np.testing.assert_allclose(
        machine.links["a"].dense().reshape(6, 20).detach().numpy(), weights * 0.9 / norm, rtol=1e-5
    )
    torch.testing.assert_close(machine.hidden_mean(means, check=False), before)
    torch.testing.assert_close(machine.links["b"].dense(), other)


def test_large_gaussian_layers_start_with_a_bounded_energy():
    machine = BoltzmannMachine(Gaussian(20_000), Gaussian(4), Dense())
    assert np.linalg.norm(machine.links["visible"].dense().detach().numpy(), 2) == pytest.approx(0.5, rel=1e-4)
    with pytest.raises(ValueError, match="the energy is unbounded"):
        BoltzmannMachine(Gaussian(20_000), Gaussian(4), Dense(), std=0.01)


def test_frozen_factors_keep_their_values_when_the_norm_is_limited():
    machine = BoltzmannMachine(Gaussian((3, 4)), Gaussian((1, 2)), Kronecker(2, summed_modes=(0,)), std=0.2)
    link = machine.links["visible"]
    with torch.no_grad():
        link.factors[1].mul_(3)
    machine.limit_norm(0.5)
    assert machine.gaussian_norm() == pytest.approx(0.5, rel=1e-4)
    assert bool((link.factors[0] == 1).all())


def test_couplings_without_learned_factors_keep_their_norm():
    machine = BoltzmannMachine(Gaussian((3, 4)), Gaussian((2, 2)), Kronecker(1), std=0.2)
    machine.requires_grad_(False)
    norm = machine.gaussian_norm()
    machine.limit_norm(norm / 2)
    assert machine.gaussian_norm() == norm
