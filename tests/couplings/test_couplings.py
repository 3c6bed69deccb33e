"""Each coupling is a linear map, and agrees with its full matrix."""

import itertools
import math

import numpy as np
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import FlopCounterMode

from mvrbm import MPO, Bernoulli, BoltzmannMachine, Dense, Kronecker, RandomSource, couplings, load, save
from mvrbm.couplings.base import COUPLINGS as REGISTERED
from tables import CONNECTED, COUPLINGS, full_matrix, generator

TOLERANCE = {"rtol": 1e-10, "atol": 1e-10}


def connected(name):
    make, visible, hidden = CONNECTED[name]
    coupling, rng = make().connect(visible, hidden).double(), generator(name)
    with torch.no_grad():
        for parameter in coupling.parameters():
            if parameter.requires_grad:
                parameter.copy_(torch.from_numpy(rng.standard_normal(parameter.shape)))
    return coupling


def arrays(coupling, n=5):
    rng = generator("arrays")
    x = torch.from_numpy(rng.standard_normal((n, *coupling.visible_shape)))
    return x, torch.from_numpy(rng.standard_normal((n, *coupling.hidden_shape)))


# -- the definitions, entry by entry --------------------------------------------------------------------


@torch.no_grad()
def by_definition(coupling):
    """W entry by entry: (*hidden shape, *visible shape)."""
    W = np.zeros((*coupling.hidden_shape, *coupling.visible_shape))
    order = len(coupling.hidden_shape)
    for at in np.ndindex(*W.shape):
        W[at] = COUPLINGS[coupling.name].entry(coupling, at[:order], at[order:])
    return W


@pytest.mark.parametrize("name", CONNECTED)
def test_dense_is_the_definition(name):
    coupling = connected(name)
    expected = by_definition(coupling)
    np.testing.assert_allclose(coupling.dense().detach(), expected, rtol=1e-12, atol=1e-12)
    np.testing.assert_allclose(
        full_matrix(coupling).detach(), expected.reshape(full_matrix(coupling).shape), atol=1e-12
    )


@pytest.mark.parametrize("name", CONNECTED)
def test_contractions_are_the_map_and_its_adjoint(name):
    coupling = connected(name)
    x, y = arrays(coupling)
    up, down = x[0], y[0]
    for equation, factor in coupling.contractions():
        up = torch.einsum(equation, up, factor)
    for equation, factor in coupling.contractions()[::-1]:
        before, own, after = equation.replace("->", ",").split(",")
        down = torch.einsum(f"{after},{own}->{before}", down, factor)
    torch.testing.assert_close(up, coupling.to_hidden(x)[0], **TOLERANCE)
    torch.testing.assert_close(down, coupling.to_visible(y)[0], **TOLERANCE)


def test_every_coupling_has_a_definition():
    assert {name: row.coupling for name, row in COUPLINGS.items()} == couplings.COUPLINGS


@pytest.mark.parametrize("name", CONNECTED)
@torch.no_grad()
def test_factored_is_dense(name):
    coupling = connected(name)
    x, y = arrays(coupling)
    W = torch.from_numpy(by_definition(coupling)).reshape(math.prod(coupling.hidden_shape), -1)
    torch.testing.assert_close(coupling.to_hidden(x).flatten(1), x.flatten(1) @ W.T, **TOLERANCE)
    torch.testing.assert_close(coupling.to_visible(y).flatten(1), y.flatten(1) @ W, **TOLERANCE)
    assert coupling.to_hidden(x).shape == y.shape
    assert coupling.to_visible(y).shape == x.shape


@pytest.mark.parametrize("name", CONNECTED)
@torch.no_grad()
def test_to_visible_is_the_adjoint(name):
    coupling = connected(name)
    x, y = arrays(coupling)
    there, back = (coupling.to_hidden(x) * y).sum(), (coupling.to_visible(y) * x).sum()
    torch.testing.assert_close(there, back, **TOLERANCE)


@pytest.mark.parametrize("n", [1, 4])
@pytest.mark.parametrize("name", CONNECTED)
def test_statistics_are_the_gradient(name, n):
    coupling = connected(name)
    x, y = arrays(coupling, n)
    W = full_matrix(coupling)
    value = -((x.flatten(1) @ W.T) * y.flatten(1)).sum(1).mean()
    learned = {key: p for key, p in coupling.named_parameters() if p.requires_grad}
    expected = torch.autograd.grad(value, list(learned.values()))
    with torch.no_grad():
        found = coupling.statistics(x, y)
    assert set(found) == set(learned)
    for key, gradient in zip(learned, expected, strict=True):
        assert found[key].shape == learned[key].shape
        torch.testing.assert_close(found[key], gradient, **TOLERANCE)


@pytest.mark.parametrize("name", CONNECTED)
@torch.no_grad()
def test_gradient_of_the_full_matrix_gives_that_of_the_parameters(name):
    coupling = connected(name)
    x, y = arrays(coupling)
    of_matrix = torch.tensordot(y, -x / len(x), dims=([0], [0]))
    found, expected = coupling.from_dense_gradient(of_matrix), coupling.statistics(x, y)
    assert set(found) == set(expected)
    for key, gradient in expected.items():
        torch.testing.assert_close(found[key], gradient, **TOLERANCE)
        assert not found[key].requires_grad


@pytest.mark.parametrize("name", CONNECTED)
@torch.no_grad()
def test_balance_leaves_the_map_and_evens_the_norms(name):
    coupling = connected(name)
    first = next(p for p in coupling.parameters() if p.requires_grad)
    first.mul_(100)
    frozen = [p.clone() for p in coupling.parameters() if not p.requires_grad]
    before = coupling.dense().clone()
    coupling.balance()
    torch.testing.assert_close(coupling.dense(), before, rtol=1e-12, atol=1e-10)
    for kept, now in zip(frozen, (p for p in coupling.parameters() if not p.requires_grad), strict=True):
        assert torch.equal(kept, now)
    for term in COUPLINGS[coupling.name].balanced(coupling):
        norms = [float(part.norm()) for part in term]
        np.testing.assert_allclose(norms, norms[0], rtol=1e-10)


@pytest.mark.parametrize("name", CONNECTED)
@torch.no_grad()
def test_balance_of_zeros_stays_finite(name):
    coupling = connected(name)
    next(p for p in coupling.parameters() if p.requires_grad).zero_()
    coupling.balance()
    assert all(bool(torch.isfinite(p).all()) for p in coupling.parameters())
    assert float(coupling.dense().abs().max()) == 0


@torch.no_grad()
def test_balance_keeps_the_terms_beside_one_of_zeros():
    coupling = Kronecker(rank=2).connect((2, 3), (3, 2), RandomSource(1), std=1.0).double()
    coupling.factors[0][1] = 0
    coupling.factors[1][0] *= 50
    before = coupling.dense().clone()
    coupling.balance()
    torch.testing.assert_close(coupling.dense(), before)


@pytest.mark.parametrize("name", CONNECTED)
@torch.no_grad()
def test_centering_subtracts_the_mean_over_the_last_mode(name):
    coupling = connected(name)
    before = coupling.dense().clone()
    coupling.center_categories()
    torch.testing.assert_close(coupling.dense(), before - before.mean(-1, keepdim=True), **TOLERANCE)


def test_couplings_that_cannot_be_centered_say_so():
    class Plain(couplings.Dense):
        name = "plain"
        center_categories = couplings.Coupling.center_categories

    try:
        with pytest.raises(ValueError, match="the plain coupling has no zero-sum gauge"):
            Plain().connect((2, 3), (2,)).center_categories()
    finally:
        couplings.COUPLINGS.pop("plain")


# -- size, cost, start ------------------------------------------------------------------------------------

SIZES = [(row.coupling, *size) for row in COUPLINGS.values() for size in row.sizes]


@pytest.mark.parametrize(("kind", "arguments", "visible", "hidden", "count"), SIZES)
def test_number_of_parameters(kind, arguments, visible, hidden, count):
    assert kind(**arguments).connect(visible, hidden).n_parameters == count


def multiplications(function, *arguments):
    with FlopCounterMode(display=False) as counter:
        function(*arguments)
    return counter.get_total_flops() // 2


@pytest.mark.parametrize("shapes", [(28, 28, 25, 25), (12, 40, 30, 8), (40, 12, 8, 30), (8, 8, 20, 20)])
@torch.no_grad()
def test_matrix_map_costs_what_the_paper_says(shapes):
    i, j, k, l = shapes  # noqa: E741
    coupling = Kronecker().connect((i, j), (k, l))
    n = 3
    x, y = torch.rand(n, i, j), torch.rand(n, k, l)
    by_columns, by_rows = i * j * l + i * k * l, i * j * k + j * k * l
    assert multiplications(coupling.to_hidden, x) == n * min(by_columns, by_rows)
    assert multiplications(coupling.to_visible, y) == n * min(by_columns, by_rows)
    assert multiplications(coupling.statistics, x, y) <= 2 * n * (by_columns + by_rows)


@pytest.mark.parametrize("shapes", [((2, 9, 4), (7, 3, 5)), ((6, 2, 8), (3, 9, 4)), ((3, 3, 3), (5, 5, 5))])
@torch.no_grad()
def test_order_of_modes_is_the_cheapest(shapes):
    visible, hidden = shapes

    def cost(order):
        sizes, total = list(visible), 0
        for mode in order:
            total += math.prod(sizes) * hidden[mode]
            sizes[mode] = hidden[mode]
        return total

    coupling = Kronecker().connect(visible, hidden)
    best = min(cost(order) for order in itertools.permutations(range(3)))
    assert multiplications(coupling.to_hidden, torch.rand(1, *visible)) == best
    assert multiplications(coupling.to_visible, torch.rand(1, *hidden)) == best


@pytest.mark.parametrize("name", CONNECTED)
@torch.no_grad()
def test_operations_are_those_that_run(name):
    coupling = connected(name)
    x, y = arrays(coupling, 1)
    # A step with a mode of one entry may run as a plain product, which the counter leaves out.
    assert multiplications(coupling.to_hidden, x) <= coupling.operations
    assert multiplications(coupling.to_visible, y) <= coupling.operations


@pytest.mark.parametrize("name", CONNECTED)
@torch.no_grad()
def test_gains_bound_what_a_step_does_to_the_map(name):
    coupling, rng = connected(name), generator("steps")
    gains = coupling.gains()
    learned = {key: p for key, p in coupling.named_parameters() if p.requires_grad}
    assert set(gains) == set(learned)
    before = full_matrix(coupling).clone()
    for key, parameter in learned.items():
        for _ in range(10):
            step = torch.from_numpy(rng.standard_normal(parameter.shape))
            parameter.add_(step)
            effect = torch.linalg.matrix_norm(full_matrix(coupling) - before, 2)
            parameter.sub_(step)
            assert float(effect**2) <= float(gains[key] * (step**2).sum()) * (1 + 1e-9)


@pytest.mark.parametrize("name", CONNECTED)
@torch.no_grad()
def test_gains_grow_with_the_square_of_the_other_factors(name):
    coupling = connected(name)
    before = coupling.gains()
    first, *others = [key for key, p in coupling.named_parameters() if p.requires_grad]
    coupling.get_parameter(first).mul_(3)
    after = coupling.gains()
    torch.testing.assert_close(after[first], before[first])
    for key in others:
        torch.testing.assert_close(after[key], 9 * before[key])


OPERATORS = [((9, 2, 3), (2, 2, 8), (2, 3)), ((3, 2, 9), (8, 2, 2), (3, 2))]


@pytest.mark.parametrize(("visible", "hidden", "bond"), OPERATORS)
@torch.no_grad()
def test_product_operator_takes_the_cheaper_direction(visible, hidden, bond):
    widths = (1, *bond, 1)

    def cost(order):
        sizes, total = list(visible), 0
        for mode in order:
            total += math.prod(sizes) * hidden[mode] * widths[mode] * widths[mode + 1]
            sizes[mode] = hidden[mode]
        return total

    coupling = MPO(bond=bond).connect(visible, hidden)
    assert cost((0, 1, 2)) != cost((2, 1, 0))
    cheaper = min(cost((0, 1, 2)), cost((2, 1, 0)))
    assert multiplications(coupling.to_hidden, torch.rand(1, *visible)) == cheaper


def test_both_directions_are_in_the_table():
    for kind in ("kronecker", "mpo"):
        orders = {tuple(connected(name)._order) for name in CONNECTED if name.startswith(kind)}
        assert {(0, 1), (1, 0)} <= orders


STARTS = [(row.coupling, *start) for row in COUPLINGS.values() for start in row.starts]


@pytest.mark.fixed_seed  # the mean of 20 draws has a spread of its own
@pytest.mark.parametrize(("kind", "arguments", "visible", "hidden"), STARTS)
@torch.no_grad()
def test_entries_start_with_the_spread_asked_for(kind, arguments, visible, hidden):
    couplings = [kind(**arguments).connect(visible, hidden, RandomSource(seed), 0.05) for seed in range(20)]
    squares = [float((coupling.dense() ** 2).mean()) for coupling in couplings]
    np.testing.assert_allclose(np.sqrt(np.mean(squares)), 0.05, rtol=0.05 if len(visible) == 2 else 0.1)


def test_factors_of_a_product_start_alike():
    for order in (2, 3):
        coupling = Kronecker(rank=4).connect((30,) * order, (30,) * order, RandomSource(0), std=0.01)
        expected = (0.01 / math.sqrt(4)) ** (1 / order)
        for factor in coupling.factors:
            np.testing.assert_allclose(float(factor.detach().std()), expected, rtol=0.1)


@pytest.mark.parametrize(
    ("visible", "hidden", "full"), [((2, 3), (4, 2), 6), ((5, 2), (2, 1), 2), ((2, 2, 3), (1, 2, 2), 8)]
)
def test_a_rank_far_above_the_full_rank_is_an_error(visible, hidden, full):
    coupling = Kronecker(rank=full).connect(visible, hidden, RandomSource(0), std=1.0).double()
    terms = coupling.dense().reshape(math.prod(hidden), math.prod(visible))
    assert torch.linalg.matrix_rank(terms) == min(terms.shape)
    Kronecker(rank=10 * full).connect(visible, hidden)
    with pytest.raises(ValueError, match=f"rank must be at most {10 * full} .* got {10 * full + 1}; with rank {full},"):
        Kronecker(rank=10 * full + 1).connect(visible, hidden)


def test_models_with_a_rank_far_above_the_full_rank_load(tmp_path):
    link = Kronecker(rank=61)
    link.allocate((2, 3), (4, 2))
    link.initialize(RandomSource(0))
    machine = BoltzmannMachine(Bernoulli((2, 3)), Bernoulli((4, 2)), link)
    save(machine, tmp_path / "machine")
    assert load(tmp_path / "machine").links["visible"].rank == 61


def test_summed_modes_are_ones_and_frozen():
    coupling = Kronecker(rank=2, summed_modes=(0,)).connect((4, 3), (1, 2), RandomSource(1), std=1.0)
    assert not coupling.factors[0].requires_grad
    assert bool((coupling.factors[0] == 1).all())
    x = torch.rand(3, 4, 3)
    torch.testing.assert_close(coupling.to_hidden(x)[:, 0], x.sum(1) @ coupling.factors[1].sum(0).T)
    assert set(coupling.statistics(x, torch.rand(3, 1, 2))) == {"factors.1"}


@pytest.mark.parametrize("name", CONNECTED)
def test_config_builds_the_coupling_again(name):
    coupling = connected(name)
    again = type(coupling)(**coupling.config()).connect(coupling.visible_shape, coupling.hidden_shape).double()
    again.load_state_dict(coupling.state_dict())
    assert torch.equal(again.dense(), coupling.dense())
    assert repr(again) == repr(coupling)
    assert f"{coupling.n_parameters:,} parameters" in repr(coupling)


def test_a_name_belongs_to_one_class():
    for _ in range(2):  # as if a cell of a notebook was run twice

        class Own(Dense):
            name = "own of this test"

    assert REGISTERED["own of this test"] is Own
    with pytest.raises(ValueError, match=r"name of .*Other belongs to mvrbm\.couplings\.dense\.Dense; choose another"):

        class Other(Dense):
            name = "dense"

    assert REGISTERED["dense"] is Dense
    del REGISTERED["own of this test"]


def test_full_map_is_never_formed():
    coupling = Kronecker().connect((64, 64), (64, 64))
    largest = 0

    class Largest(TorchDispatchMode):
        def __torch_dispatch__(self, function, types, args=(), kwargs=None):
            nonlocal largest
            out = function(*args, **(kwargs or {}))
            tensors = [leaf for leaf in tree_leaves(out) if isinstance(leaf, torch.Tensor)]
            largest = max(largest, *(tensor.numel() for tensor in tensors))
            return out

    x, y = torch.rand(2, 64, 64), torch.rand(2, 64, 64)
    with Largest(), torch.no_grad():
        coupling.to_hidden(x)
        coupling.to_visible(y)
        coupling.statistics(x, y)
    assert largest <= 2 * 64 * 64
