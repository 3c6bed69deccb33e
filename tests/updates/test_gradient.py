"""The analytic gradient is that of mean F(data) - mean F(chain); centering and gains do what they say."""

import dataclasses
import itertools

import numpy as np
import pytest
import torch
from torch.func import functional_call

from mvrbm import CP, MPO, Bernoulli, BoltzmannMachine, Dense, Gaussian, Kronecker
from mvrbm.models import mvrbm
from mvrbm.training import Recipe, Trainer
from mvrbm.updates import step as rule
from mvrbm.updates.gradient import Centering, Share, contrast, contrast_by_autograd
from mvrbm.updates.update import gradient_of
from tables import CONNECTED, MACHINES, full_matrix, generator, machine_named, random_states

# With a tied bias the offsets' fields cannot be made up for exactly, unless they are tied in the same way.
UNTIED = [name for name in MACHINES if "tied" not in name]


def batches(machine, name):
    rng = generator(f"{name} data")
    return random_states(machine, 6, rng, padding=True), random_states(machine, 4, rng, padding=True)


def analytic(machine, data, chain):
    return contrast(machine, data, chain, machine.hidden_field(data), machine.hidden_field(chain))


def assert_same(left, right, tolerance=1e-10):
    assert set(left) == set(right)
    for name, value in left.items():
        torch.testing.assert_close(
            value, right[name], rtol=tolerance, atol=tolerance, msg=lambda m, n=name: f"{n}: {m}"
        )


@pytest.mark.parametrize("name", MACHINES)
def test_analytic_gradient_is_that_of_autograd(name):
    machine = machine_named(name)
    data, chain = batches(machine, name)
    with torch.no_grad():
        gradient = analytic(machine, data, chain)
    assert set(gradient) == {n for n, p in machine.named_parameters() if p.requires_grad}
    assert_same(gradient, contrast_by_autograd(machine, data, chain))


# -- centering ---------------------------------------------------------------------------------------------


def scale_of(unit):
    return unit.scale.detach() if isinstance(unit, Gaussian) else torch.ones((), dtype=torch.float64)


def field_bias(unit):
    """The bias as a field: what it adds to the exponent per unit of T(x)."""
    return (unit.bias / scale_of(unit)).detach().expand(unit.shape)


def centered_gradient(machine, data, chain, mu, lam):
    """Slopes for the factors of mean F(data) - mean F(chain), where the biases depend on W and b_hat, c_hat do not.

    In units of the field b = b_hat - W' lambda and c = c_hat - sum W mu, with W the full matrix.
    """
    matrices = {name: full_matrix(link) for name, link in machine.links.items()}

    def to_hidden(matrices):
        return sum(matrices[name] @ mu[name].reshape(-1) for name in matrices).reshape(machine.hidden.shape)

    def to_visible(matrices):
        return {
            name: (matrix.T @ lam.reshape(-1)).reshape(machine.layers[name].shape) for name, matrix in matrices.items()
        }

    with torch.no_grad():
        c_hat = field_bias(machine.hidden) + to_hidden(matrices)
        b_hat = {name: field_bias(machine.layers[name]) + field for name, field in to_visible(matrices).items()}
    c = scale_of(machine.hidden) * (c_hat - to_hidden(matrices))
    parameters = {"hidden.bias": c}
    for name, field in to_visible(matrices).items():
        unit = machine.layers[name]
        b = scale_of(unit) * (b_hat[name] - field)
        # All rows of a tied bias are equal here: the mean is any one of them.
        parameters[f"visible.{name}.bias"] = b.mean(0, keepdim=True) if unit.bias_shape != unit.shape else b

    def mean_free_energy(states):
        return functional_call(Mean(machine), {f"machine.{k}": v for k, v in parameters.items()}, (states,))

    factors = {n: p for n, p in machine.named_parameters() if n.startswith("couplings.") and p.requires_grad}
    slopes = torch.autograd.grad(mean_free_energy(data) - mean_free_energy(chain), list(factors.values()))
    return dict(zip(factors, slopes, strict=True))


class Mean(torch.nn.Module):
    def __init__(self, machine):
        super().__init__()
        self.machine = machine

    def forward(self, states):
        return self.machine.free_energy(states, check=False).mean()


@pytest.mark.parametrize("name", UNTIED)
def test_centered_gradient_is_that_of_the_centered_energy(name):
    machine = machine_named(name)
    data, chain = batches(machine, name)
    mu = {
        layer: array.mean(0, keepdim=True) + 0.3 for layer, array in random_states(machine, 5, generator("mu")).items()
    }
    if name == "replicated softmax":
        mu = {"words": mu["words"].mean(1, keepdim=True).expand(mu["words"].shape)}
    centering = Centering(machine, mu)
    lam = torch.from_numpy(generator(f"{name} offsets").random((1, *machine.hidden.shape)))
    centering.hidden = lam.clone()
    with torch.no_grad():
        gradient = analytic(machine, data, chain)
        plain = {key: value.clone() for key, value in gradient.items()}
        fields = machine.hidden_field(data), machine.hidden_field(chain)
        centering.apply(gradient, data, chain, *fields)
    # The running mean takes in a hundredth of this batch before it is used.
    on_data = (machine.hidden.mean(fields[0]) / scale_of(machine.hidden)).mean(0, keepdim=True)
    torch.testing.assert_close(centering.hidden, 0.99 * lam + 0.01 * on_data.detach())
    statistics = {layer: mu[layer] / scale_of(unit) for layer, unit in machine.layers.items()}
    expected = centered_gradient(machine, data, chain, statistics, centering.hidden)
    assert_same({key: gradient[key] for key in expected}, expected)
    # Variances of visible layers follow: see the next but one test.
    followed = {key for key in gradient if key.startswith("visible.") and "log_variance" in key}
    for key in set(gradient) - set(expected) - followed:
        assert torch.equal(gradient[key], plain[key])


@pytest.mark.parametrize("name", UNTIED)
def test_centered_biases_stay_when_factors_change(name):
    machine = machine_named(name)
    mu = {layer: array.mean(0, keepdim=True) for layer, array in random_states(machine, 5, generator("mu")).items()}
    centering = Centering(machine, mu)
    centering.hidden = torch.from_numpy(generator(name).random((1, *machine.hidden.shape)))

    def centered():
        up = sum(
            full_matrix(machine.links[layer]) @ (mu[layer] / scale_of(unit)).reshape(-1)
            for layer, unit in machine.layers.items()
        )
        biases = {"hidden": field_bias(machine.hidden) + up.reshape(machine.hidden.shape)}
        for layer, unit in machine.layers.items():
            down = full_matrix(machine.links[layer]).T @ centering.hidden.reshape(-1)
            biases[layer] = field_bias(unit) + down.reshape(unit.shape)
        return biases

    with torch.no_grad():
        before, fields = centered(), centering.fields()
        moved = {layer: unit.bias.clone() for layer, unit in machine.layers.items()}
        for factor in machine.couplings.parameters():
            if factor.requires_grad:
                factor.add_(0.3 * torch.from_numpy(generator("step").standard_normal(factor.shape)))
        centering.follow(fields)
        assert_same(centered(), before)
        assert any(not torch.equal(unit.bias, moved[layer]) for layer, unit in machine.layers.items())


@pytest.mark.parametrize(("tied", "learn"), [((3, 2), True), ((1, 2), True), ((3, 2), "axes"), ((3, 2), "one")])
def test_gradient_of_a_variance_counts_what_the_hidden_bias_does_when_it_follows(tied, learn):
    """Along a change of the log-variances the hidden bias makes up for the field of the center, W mu / s."""
    unit = Gaussian((3, 2), bias_shape=tied, learn_variance=learn)
    machine = BoltzmannMachine(unit, Bernoulli((2, 2)), Kronecker(2), std=0.5).double()
    rng = np.random.default_rng(0)
    with torch.no_grad():
        for parameter in unit.parameters():
            parameter.copy_(torch.from_numpy(rng.normal(size=parameter.shape)))
        unit.bias.add_(5)
    data, chain = ({"visible": torch.from_numpy(5 + rng.normal(size=(n, 3, 2)))} for n in (6, 4))
    center = {"visible": data["visible"].mean(0, keepdim=True)}
    gradient = analytic(machine, data, chain)
    Centering(machine, center, follow_hidden=False).apply(
        gradient, data, chain, machine.hidden_field(data), machine.hidden_field(chain)
    )
    before = machine.hidden_field(center)[0].detach()

    variances = {f"visible.visible.{name}": p for name, p in unit.named_parameters() if name != "bias"}

    def contrast():
        parameters = dict(machine.named_parameters())
        scale = torch.exp(0.5 * sum(variances.values()))
        field = machine.links["visible"].to_hidden(center["visible"] / scale)[0]
        parameters["hidden.bias"] = machine.hidden.bias + before - field
        named = {f"machine.{key}": value for key, value in parameters.items()}
        return functional_call(Mean(machine), named, (data,)) - functional_call(Mean(machine), named, (chain,))

    expected = torch.autograd.grad(contrast(), list(variances.values()))
    torch.testing.assert_close([gradient[name] for name in variances], list(expected))


def test_centered_learning_is_the_same_for_flipped_bits():
    """With all bits of data and chain turned round, centered slopes change their sign alone; plain ones do not."""
    machine = BoltzmannMachine(Bernoulli(4), Bernoulli(3), Dense()).double()
    flipped = BoltzmannMachine(Bernoulli(4), Bernoulli(3), Dense()).double()
    rng = np.random.default_rng(2)
    with torch.no_grad():
        for parameter in machine.parameters():
            parameter.copy_(torch.from_numpy(rng.standard_normal(parameter.shape)))
        weight, b, c = machine.links["visible"].weight, machine.layers["visible"].bias, machine.hidden.bias
        flipped.links["visible"].weight.copy_(-weight)  # x -> 1 - x
        flipped.layers["visible"].bias.copy_(-b)
        flipped.hidden.bias.copy_(c + weight.sum(1))
    data, chain = ({"visible": torch.from_numpy((rng.random((n, 4)) < 0.7) * 1.0)} for n in (8, 6))

    def slopes(machine, data, chain):
        centering = Centering(machine, {"visible": data["visible"].mean(0, keepdim=True)})
        with torch.no_grad():
            gradient = analytic(machine, data, chain)
            plain = gradient["couplings.visible.weight"].clone()
            centering.apply(gradient, data, chain, machine.hidden_field(data), machine.hidden_field(chain))
        return gradient["couplings.visible.weight"], plain

    turned = [{"visible": 1 - batch["visible"]} for batch in (data, chain)]
    centered, plain = slopes(machine, data, chain)
    centered_turned, plain_turned = slopes(flipped, *turned)
    torch.testing.assert_close(centered_turned, -centered)
    assert not torch.allclose(plain_turned, -plain, atol=1e-3)


# -- gains ------------------------------------------------------------------------------------------------


def connected(name, seed=0, size=1.0):
    build, visible, hidden = CONNECTED[name]
    coupling = build().connect(visible, hidden).double()
    rng = np.random.default_rng(seed)
    with torch.no_grad():
        for parameter in coupling.parameters():
            if parameter.requires_grad:
                parameter.copy_(torch.from_numpy(size * rng.standard_normal(parameter.shape)))
    return coupling


def gains_of(coupling):
    with torch.no_grad():
        return coupling.gains()


def change_of_matrix(coupling, name, step):
    """dW to first order in a step of one parameter: (hidden size, visible size)."""
    parameter = dict(coupling.named_parameters())[name]
    kept = parameter.detach().clone()
    with torch.no_grad():
        parameter.copy_(step)  # W is linear in each parameter
        changed = full_matrix(coupling).detach().clone()
        parameter.copy_(kept)
    return changed


@pytest.mark.parametrize("name", CONNECTED)
def test_no_step_is_amplified_beyond_its_gain(name):
    rng = np.random.default_rng(1)
    for seed in range(10):
        coupling = connected(name, seed)
        gains = gains_of(coupling)
        parameters = dict(coupling.named_parameters())
        assert set(gains) == {key for key, parameter in parameters.items() if parameter.requires_grad}
        for key, single in itertools.product(gains, [False, True] * 10):
            step = torch.from_numpy(rng.standard_normal(parameters[key].shape))
            if single:  # one entry alone: the most concentrated step there is
                step = torch.where(step.abs() == step.abs().max(), step, 0.0)
            amplified = torch.linalg.matrix_norm(change_of_matrix(coupling, key, step), 2) ** 2
            allowed = float(gains[key]) * float((step**2).sum())
            assert float(amplified) <= allowed * (1 + 1e-9)


@pytest.mark.parametrize("shape", [((4, 4), (4, 4)), ((28, 28), (25, 25)), ((64, 8), (16, 32)), ((5, 6, 7), (4, 3, 8))])
def test_gain_of_one_kronecker_product_is_near_the_largest_amplification(shape):
    coupling = Kronecker().connect(*shape).double()
    rng = np.random.default_rng(4)
    with torch.no_grad():
        for factor in coupling.factors:
            factor.copy_(torch.from_numpy(rng.standard_normal(factor.shape)))
    norms = [np.linalg.norm(factor[0].detach().numpy(), 2) ** 2 for factor in coupling.factors]
    for mode, gain in enumerate(gains_of(coupling).values()):
        exact = np.prod(norms) / norms[mode]
        allowed = 2.0 ** (len(norms) - 1)  # a factor of two for each of the other modes
        assert exact * (1 - 1e-12) <= float(gain) <= allowed * exact


def test_largest_amplification_is_reached_within_a_factor_of_two():
    coupling = connected("kronecker(rank=1) (2, 3)->(3, 2)", 5)
    for mode, gain in enumerate(gains_of(coupling).values()):
        shape = coupling.factors[mode].shape
        columns = [
            change_of_matrix(
                coupling, f"factors.{mode}", torch.eye(shape.numel(), dtype=torch.float64)[i].reshape(shape)
            )
            for i in range(shape.numel())
        ]
        largest = max(float(torch.linalg.matrix_norm(column, 2)) ** 2 for column in columns)
        assert largest <= float(gain) <= 2 * largest


@pytest.mark.parametrize("s", [1e-3, 0.2, 30.0])
@pytest.mark.parametrize("coupling", [Kronecker, lambda: Kronecker(3), lambda: MPO(2), lambda: CP(2)])
def test_normalized_step_of_the_matrix_does_not_depend_on_who_carries_the_scale(coupling, s):
    hidden = 4 if isinstance(coupling(), CP) else (3, 2)
    machine = BoltzmannMachine(Bernoulli((4, 3)), Bernoulli(hidden), coupling()).double()
    rng = np.random.default_rng(8)
    link = machine.links["visible"]
    with torch.no_grad():
        for parameter in machine.parameters():
            parameter.copy_(torch.from_numpy(rng.standard_normal(parameter.shape)))
    data, chain = random_states(machine, 7, rng), random_states(machine, 5, rng)

    def step():
        with torch.no_grad():
            gradient = analytic(machine, data, chain)
            rule.normalize(rule.gains_of(machine, gradient))
        return sum(change_of_matrix(link, key, gradient[f"couplings.visible.{key}"]) for key in gains_of(link))

    before = step()
    with torch.no_grad():
        first, second, *_ = list(link.parameters())
        first.mul_(s)
        second.div_(s)
    torch.testing.assert_close(step(), before, rtol=1e-8, atol=1e-10)


@pytest.mark.parametrize("coupling", [Dense, Kronecker, lambda: MPO(3)])
def test_gain_of_order_one_is_one(coupling):
    link = coupling().connect((5,), (4,)).double()
    assert [float(gain) for gain in gains_of(link).values()] == [1.0]


@pytest.mark.parametrize("bond", [1, 2, 5])
def test_matrix_product_operator_has_the_gains_of_a_sum_of_kronecker_products(bond):
    operator = MPO(bond).connect((4, 3), (2, 5)).double()
    products = Kronecker(bond).connect((4, 3), (2, 5)).double()
    rng = np.random.default_rng(bond)
    with torch.no_grad():
        for factor in operator.factors:
            factor.copy_(torch.from_numpy(rng.standard_normal(factor.shape)))
        products.factors[0].copy_(operator.factors[0][0].permute(2, 0, 1))
        products.factors[1].copy_(operator.factors[1][..., 0])
    torch.testing.assert_close(full_matrix(operator), full_matrix(products))
    for mine, other in zip(gains_of(operator).values(), gains_of(products).values(), strict=True):
        torch.testing.assert_close(mine, other)


@pytest.mark.parametrize("name", CONNECTED)
def test_factors_of_zero_give_finite_gains_and_steps(name):
    coupling = connected(name, size=0.0)
    for key, gain in gains_of(coupling).items():
        assert bool(torch.isfinite(gain)), key
        assert float(gain) >= 0
    machine = BoltzmannMachine(Bernoulli(coupling.visible_shape), Bernoulli(coupling.hidden_shape), coupling).double()
    rng = np.random.default_rng(0)
    with torch.no_grad():
        gradient = analytic(machine, random_states(machine, 5, rng), random_states(machine, 5, rng))
        rule.normalize(rule.gains_of(machine, gradient))
    assert all(bool(torch.isfinite(slope).all()) for slope in gradient.values())


def test_gaussian_bias_moves_in_standard_deviations():
    """The same data in other units, 1000 times as large: the normalized step of the bias is 1000 times as large."""
    steps = []
    for unit in (1.0, 1000.0):
        machine = BoltzmannMachine(Gaussian(3), Bernoulli(2), Dense()).double()
        with torch.no_grad():
            machine.layers["visible"].log_variance.fill_(2 * np.log(unit))
        rng = np.random.default_rng(1)
        data, chain = ({"visible": unit * torch.from_numpy(rng.standard_normal((n, 3)))} for n in (6, 4))
        with torch.no_grad():
            gradient = analytic(machine, data, chain)
            rule.normalize(rule.gains_of(machine, gradient))
        steps.append(gradient["visible.visible.bias"] / unit)
    torch.testing.assert_close(*steps)


def test_normalizing_leaves_the_biases_of_bits_alone():
    machine = mvrbm((3, 3), (2, 2)).double()
    rng = np.random.default_rng(1)
    with torch.no_grad():
        gradient = analytic(machine, random_states(machine, 5, rng), random_states(machine, 5, rng))
        plain = {key: value.clone() for key, value in gradient.items()}
        rule.normalize(rule.gains_of(machine, gradient))
    for key, value in plain.items():
        assert torch.equal(gradient[key], value) != key.startswith("couplings.")


@pytest.mark.parametrize("learn", [False, True])
def test_gradients_of_several_processes_have_the_order_of_the_parameters(learn):
    """They are added up as one array: also those of a process that has no samples."""
    machine = BoltzmannMachine(Gaussian(3, learn_variance=learn), Bernoulli(2), Dense())
    trainer = Trainer(machine, Recipe(learning_rate=0.1))
    source = trainer.prepare(torch.randn(5, 3), initialize=True)
    batch = next(iter(source.batches(5, trainer.order_rng))).visible
    settings = dataclasses.replace(trainer.update_settings(), n_processes=2, all_reduce=lambda flat: None)
    for part in (batch, {name: array[:0] for name, array in batch.items()}):
        with torch.no_grad():
            found = gradient_of(trainer.state, settings, part, Share())
        assert list(found) == list(trainer.state.learned)
