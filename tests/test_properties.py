"""What holds for machines of every order, size and rank."""

import functools
import operator

import numpy as np
import pytest
import torch
from hypothesis import assume, given
from hypothesis import strategies as st

from mvrbm import CP, MPO, BoltzmannMachine, Dense, Gaussian, Kronecker, RandomSource
from mvrbm.couplings import Tucker
from mvrbm.likelihood import log_partition, pseudo_log_likelihood
from mvrbm.sampling import gibbs, independent_sample, mean_field
from tables import MACHINES, MULTIMODAL, VARIANTS, full_matrix, generator, machine_named, random_states, randomize

TOLERANCE = {"rtol": 1e-10, "atol": 1e-10}
sizes = st.integers(1, 4)
seeds = st.integers(0, 2**32 - 1)


@st.composite
def couplings(draw):
    """A coupling, a visible shape and a hidden shape that it fits."""
    order = draw(st.integers(1, 4))
    visible = draw(st.tuples(*[sizes] * order))
    kind = draw(st.sampled_from(["dense", "kronecker", "cp", "mpo", "tucker"]))
    rank = draw(st.integers(1, 3))
    if kind in ("dense", "tucker"):
        any_shape = tuple(draw(st.lists(sizes, min_size=1, max_size=3)))
        return Dense() if kind == "dense" else Tucker(rank), visible, any_shape
    if kind == "cp":
        return CP(rank), visible, (draw(sizes),)
    hidden = draw(st.tuples(*[sizes] * order))
    if kind == "kronecker":
        return Kronecker(rank), visible, hidden
    return MPO(draw(st.tuples(*[st.integers(1, 3)] * (order - 1)))), visible, hidden


@st.composite
def machines(draw, dtype=torch.float64):
    coupling, visible, hidden = draw(couplings())
    kinds = [draw(st.sampled_from([name for name in VARIANTS if "padded" not in name])) for _ in range(2)]
    units = VARIANTS[kinds[0]](visible), VARIANTS[kinds[1]](hidden)
    assume(not any(a.unsupported_reason(b) for a, b in (units, units[::-1])))
    machine = BoltzmannMachine(*units, coupling, std=1e-4)
    return randomize(machine, np.random.default_rng(draw(seeds))).to(dtype)


# -- maps -------------------------------------------------------------------------------------------------


@given(couplings(), seeds)
def test_maps_have_the_right_shapes_and_are_adjoint(made, seed):
    coupling, visible, hidden = made
    coupling.connect(visible, hidden, RandomSource(seed), std=1.0).double()
    rng = np.random.default_rng(seed)
    x, y = (torch.from_numpy(rng.standard_normal((3, *shape))) for shape in (visible, hidden))
    there, back = coupling.to_hidden(x), coupling.to_visible(y)
    assert (there.shape, back.shape) == (y.shape, x.shape)
    torch.testing.assert_close((there * y).sum(), (back * x).sum(), **TOLERANCE)
    W = coupling.dense()
    assert W.shape == (*hidden, *visible)
    product = x.flatten(1) @ W.reshape(y[0].numel(), -1).T
    torch.testing.assert_close(there.flatten(1), product, **TOLERANCE)
    found = coupling.statistics(x, y)
    for key, parameter in coupling.named_parameters():
        assert found[key].shape == parameter.shape
        # W is linear in each factor, so a factor times its gradient is minus the mean of <y, W x>.
        torch.testing.assert_close((found[key] * parameter).sum(), -(there * y).sum() / 3, **TOLERANCE)


@given(couplings(), seeds, st.lists(st.floats(0.01, 100), min_size=1, max_size=4))
def test_only_the_product_of_factors_matters(made, seed, scales):
    coupling, visible, hidden = made
    coupling.connect(visible, hidden, RandomSource(seed), std=1.0).double()
    before = full_matrix(coupling).clone()
    parts = list(coupling.parameters())
    scales = (scales * 5)[: len(parts) - 1]
    with torch.no_grad():
        for part, scale in zip(parts[1:], scales, strict=True):
            part.mul_(scale)
        parts[0].div_(functools.reduce(operator.mul, scales, 1.0))
    torch.testing.assert_close(coupling.dense().reshape(before.shape), before, **TOLERANCE)
    coupling.balance()
    torch.testing.assert_close(coupling.dense().reshape(before.shape), before, **TOLERANCE)


# -- machines ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@given(data=st.data(), n=st.integers(1, 5), seed=seeds)
def test_shapes_and_dtypes(dtype, data, n, seed):
    machine = data.draw(machines(dtype))
    visible, hidden = machine.layers["visible"].shape, machine.hidden.shape
    x = independent_sample(machine, n, RandomSource(seed))
    state = gibbs(machine, x, 2, RandomSource(seed))
    found = {
        "visible": (state.visible["visible"], (n, *visible)),
        "hidden": (state.hidden, (n, *hidden)),
        "hidden mean": (machine.hidden_mean(x), (n, *hidden)),
        "visible mean": (machine.visible_mean(state.hidden)["visible"], (n, *visible)),
        "mean field": (mean_field(machine, x, 1)["visible"], (n, *visible)),
        "free energy": (machine.free_energy(x), (n,)),
        "energy": (machine.energy(x, state.hidden), (n,)),
        "pseudo-likelihood": (pseudo_log_likelihood(machine, x, n_sites=2).values, (n,)),
    }
    found |= {key: (g, machine.get_parameter(key).shape) for key, g in machine.free_energy_gradient(x).items()}
    for what, (array, shape) in found.items():
        assert (what, tuple(array.shape), array.dtype) == (what, tuple(shape), dtype)
        assert bool(torch.isfinite(array).all()), what


@given(machines(), seeds)
def test_state_dict_round_trip(machine, seed):
    x = independent_sample(machine, 3, RandomSource(seed))
    parts = [type(unit)(**unit.config()) for unit in (machine.layers["visible"], machine.hidden)]
    link = machine.links["visible"]
    again = BoltzmannMachine(*parts, type(link)(**link.config()), seed=1).double()
    again.load_state_dict(machine.state_dict())
    assert torch.equal(again.free_energy(x), machine.free_energy(x))
    assert torch.equal(again.hidden_mean(x), machine.hidden_mean(x))


@given(machines(), seeds, st.permutations(range(5)))
def test_permuting_samples_permutes_results(machine, seed, order):
    x = independent_sample(machine, 5, RandomSource(seed))
    shuffled = {name: array[order] for name, array in x.items()}
    torch.testing.assert_close(machine.free_energy(shuffled), machine.free_energy(x)[order], **TOLERANCE)
    torch.testing.assert_close(machine.hidden_mean(shuffled), machine.hidden_mean(x)[order], **TOLERANCE)
    for key, gradient in machine.free_energy_gradient(shuffled).items():
        torch.testing.assert_close(gradient, machine.free_energy_gradient(x)[key], **TOLERANCE)


@given(machines(), seeds)
def test_a_batch_is_its_samples_one_by_one(machine, seed):
    x = independent_sample(machine, 4, RandomSource(seed))
    rows = [{name: array[i : i + 1] for name, array in x.items()} for i in range(4)]
    torch.testing.assert_close(
        machine.free_energy(x), torch.cat([machine.free_energy(row) for row in rows]), **TOLERANCE
    )
    gradients = [machine.free_energy_gradient(row) for row in rows]
    for key, gradient in machine.free_energy_gradient(x).items():
        torch.testing.assert_close(gradient, torch.stack([g[key] for g in gradients]).mean(0), **TOLERANCE)


@given(machines(), seeds)
def test_same_seed_same_draws(machine, seed):
    noises = RandomSource(seed), RandomSource(seed)
    first, again = (gibbs(machine, independent_sample(machine, 3, rng), 2, rng) for rng in noises)
    assert torch.equal(first.hidden, again.hidden)
    assert torch.equal(first.visible["visible"], again.visible["visible"])


@given(machines(), seeds)
def test_energy_and_free_energy_agree_on_the_conditional(machine, seed):
    """E(x, y) - F(x) = -log p(y | x): for two hidden states its difference is a difference of energies alone."""
    rng = RandomSource(seed)
    x = independent_sample(machine, 3, rng)
    y, other = machine.sample_hidden(x, rng), machine.sample_hidden(x, rng)
    field = machine.hidden_field(x)

    def log_conditional(states):
        pull = (machine.hidden.statistic(states) * field).flatten(1).sum(1)
        return pull - machine.hidden.energy(states)

    difference = machine.energy(x, y) - machine.energy(x, other)
    torch.testing.assert_close(difference, log_conditional(other) - log_conditional(y), **TOLERANCE)


# -- precision and place ----------------------------------------------------------------------------------


@pytest.mark.parametrize("name", MACHINES[::7] + MULTIMODAL)
@torch.no_grad()
def test_single_precision_is_double_precision_rounded(name):
    machine = machine_named(name)
    x = random_states(machine, 4, generator("x"))
    exact = machine.free_energy(x), machine.hidden_mean(x), log_partition(machine)
    gradient = machine.free_energy_gradient(x)
    machine.float()
    assert all(parameter.dtype == torch.float32 for parameter in machine.parameters())
    rough = machine.free_energy(x), machine.hidden_mean(x), log_partition(machine)
    for left, right in zip(rough, exact, strict=True):
        torch.testing.assert_close(left.double(), right, rtol=1e-4, atol=1e-4)
    single = {key: array.float() for key, array in x.items()}
    for key, value in machine.free_energy_gradient(single).items():
        assert value.dtype == torch.float32
        torch.testing.assert_close(value.double(), gradient[key], rtol=1e-4, atol=1e-4)


def test_moving_to_double_and_back_keeps_single_values():
    machine = randomize(BoltzmannMachine(Gaussian(3), Gaussian(2), Dense()), generator("move")).float()
    before = {key: value.clone() for key, value in machine.state_dict().items()}
    machine.double().float()
    assert all(torch.equal(value, before[key]) for key, value in machine.state_dict().items())


def test_data_follows_the_machine_to_its_device():
    machine = machine_named("image and label").to("meta")
    layers = machine.as_layers({"image": torch.zeros(2, 2, 2), "label": torch.zeros(2, 3)}, check=False)
    assert {array.device.type for array in layers.values()} == {"meta"}
