"""Tables of models that are the same model, written otherwise."""

import itertools

import numpy as np
import pytest
import torch
from sklearn.neural_network import BernoulliRBM

from enumeration import every_visible_state
from mvrbm import MPO, Bernoulli, BoltzmannMachine, Categorical, Dense, Gaussian, Kronecker
from mvrbm.likelihood import log_likelihood, log_partition, pseudo_log_likelihood
from mvrbm.models import cp_rbm, documents, multimodal_mvrbm, mvrbm, rbm, replicated_softmax
from tables import CONNECTED, generator, machine_named, random_states, randomize

TOLERANCE = {"rtol": 1e-10, "atol": 1e-10}


def filled(machine, name="machine"):
    return randomize(machine, generator(name))


@torch.no_grad()
def with_values(machine, values):
    """Set parameters by name, reshaped where only the shape differs."""
    machine.double()
    for key, value in values.items():
        parameter = machine.get_parameter(key)
        parameter.copy_(torch.as_tensor(value).reshape(parameter.shape))
    return machine


def biases(machine, names=("visible",)):
    values = {"hidden.bias": machine.hidden.bias}
    return values | {f"visible.{name}.bias": machine.visible[name].bias for name in names}


def factors(machine, name="visible"):
    return [factor.detach().numpy() for factor in machine.links[name].factors]


def log_probabilities(machine):
    """log p of every visible state, in one order for all shapes."""
    return log_likelihood(machine, every_visible_state(machine))


# -- the same model, written otherwise --------------------------------------------------------------------


def matrix_machine(rank=1, visible=(2, 3), hidden=(3, 2)):
    return filled(mvrbm(visible, hidden, rank), f"matrix {rank}")


def full_rbm(machine, W):
    n_hidden, n_visible = W.shape
    return with_values(rbm(n_visible, n_hidden), {**biases(machine), "couplings.visible.weight": W})


def rbm_with_kron(rank=1):
    machine = matrix_machine(rank)
    U, V = factors(machine)
    return full_rbm(machine, sum(np.kron(U[r], V[r]) for r in range(rank)))


def tensor_machine():
    return filled(mvrbm((2, 1, 3), (1, 2, 2)), "tensor")


def rbm_of_tensor_machine():
    machine = tensor_machine()
    U, V, T = (factor[0] for factor in factors(machine))
    return full_rbm(machine, np.kron(np.kron(U, V), T))


def matrix_machine_with_a_mode_of_one():
    machine = matrix_machine()
    U, V = factors(machine)
    values = {f"couplings.visible.factors.{d}": f for d, f in enumerate([U, V, np.ones((1, 1, 1))])}
    return with_values(mvrbm((2, 3, 1), (3, 2, 1)), {**biases(machine), **values})


def vector_machine():
    return filled(mvrbm((4,), (3,)), "vector")


def rbm_of_vector_machine():
    machine = vector_machine()
    return full_rbm(machine, factors(machine)[0][0])


def multimodal_of_one():
    machine = matrix_machine()
    U, V = factors(machine)
    values = {"couplings.image.factors.0": U, "couplings.image.factors.1": V}
    values |= {"hidden.bias": machine.hidden.bias, "visible.image.bias": machine.visible.visible.bias}
    return with_values(multimodal_mvrbm({"image": Bernoulli((2, 3))}, (3, 2)), values)


def two_halves():
    units = {"top": Bernoulli(2), "bottom": Bernoulli(3)}
    return filled(BoltzmannMachine(units, Bernoulli(3), {"top": Dense(), "bottom": Dense()}), "halves")


def whole_of_two_halves():
    machine = two_halves()
    weights = torch.cat([machine.couplings[name].weight for name in ("top", "bottom")], 1)
    b = torch.cat([machine.visible[name].bias for name in ("top", "bottom")])
    values = {"hidden.bias": machine.hidden.bias, "visible.visible.bias": b, "couplings.visible.weight": weights}
    return with_values(rbm(5, 3), values)


def operator_of_matrix_machine(rank):
    machine = matrix_machine(rank)
    U, V = factors(machine)  # (R, K, I)
    values = {
        "couplings.visible.factors.0": np.ascontiguousarray(np.moveaxis(U, 0, -1)),
        "couplings.visible.factors.1": V,
    }
    operator = BoltzmannMachine(Bernoulli((2, 3)), Bernoulli((3, 2)), MPO(bond=rank))
    return with_values(operator, {**biases(machine), **values})


def operator_of_tensor_machine():
    machine = tensor_machine()
    values = {f"couplings.visible.factors.{d}": factor for d, factor in enumerate(factors(machine))}
    operator = BoltzmannMachine(Bernoulli((2, 1, 3)), Bernoulli((1, 2, 2)), MPO(bond=1))
    return with_values(operator, {**biases(machine), **values})


def matrix_machine_rescaled(size):
    machine = matrix_machine(rank=3)
    with torch.no_grad():
        sizes = torch.tensor([size, -2.0, 1 / size], dtype=torch.float64).reshape(3, 1, 1)
        machine.couplings.visible.factors[0].mul_(sizes)
        machine.couplings.visible.factors[1].div_(sizes)
    return machine


def cp_machine(rank=2):
    return filled(cp_rbm((2, 3), 3, rank), f"cp {rank}")


def rbm_of_cp_machine(rank=2):
    machine = cp_machine(rank)
    link = machine.couplings.visible
    a, left, right = (p.detach().numpy() for p in (link.hidden_factor, *link.visible_factors))
    W = sum(np.outer(a[:, r], np.outer(left[:, r], right[:, r])) for r in range(rank))
    return full_rbm(machine, W)


def arbitrary_rbm():
    return filled(rbm(6, 6), "arbitrary")


def full_rank_matrix_machine():
    """Any W as a sum of Kronecker products: the terms are the singular vectors of the rearranged matrix."""
    machine = arbitrary_rbm()
    W = machine.couplings.visible.weight.detach().numpy().reshape(3, 2, 2, 3)  # (k, l, i, j)
    left, sizes, right = np.linalg.svd(W.transpose(0, 2, 1, 3).reshape(6, 6))  # (k i, l j)
    U, V = (left * sizes).T.reshape(6, 3, 2), right.reshape(6, 2, 3)
    values = {"couplings.visible.factors.0": U.copy(), "couplings.visible.factors.1": V.copy()}
    return with_values(mvrbm((2, 3), (3, 2), rank=6), {**biases(machine), **values})


def bits():
    return filled(BoltzmannMachine(Bernoulli(3), Bernoulli(4), Dense()), "bits")


def bits_as_pairs_of_hidden_categories():
    """A hidden bit is a hidden category out of two, the first one doing nothing."""
    machine = bits()
    W = np.zeros((4, 2, 3))
    W[:, 1] = machine.couplings.visible.weight.detach().numpy()
    c = np.zeros((4, 2))
    c[:, 1] = machine.hidden.bias.detach().numpy()
    values = {"hidden.bias": c, "visible.visible.bias": machine.visible.visible.bias}
    values["couplings.visible.weight"] = W
    return with_values(BoltzmannMachine(Bernoulli(3), Categorical((4, 2)), Dense()), values)


SAME_MODEL = [  # (a machine, the same machine written otherwise)
    ("MVRBM is an RBM with W = kron(U, V)", matrix_machine, rbm_with_kron),
    ("rank 3 is an RBM with a sum of three", lambda: matrix_machine(3), lambda: rbm_with_kron(3)),
    ("TV-RBM is an RBM with W = kron of all modes", tensor_machine, rbm_of_tensor_machine),
    ("TV-RBM with a mode of one entry is an MVRBM", matrix_machine_with_a_mode_of_one, matrix_machine),
    ("TV-RBM of order 1 is an RBM", vector_machine, rbm_of_vector_machine),
    ("one modality is no modality", multimodal_of_one, matrix_machine),
    ("two modalities are the blocks of one W", two_halves, whole_of_two_halves),
    ("MPO of bond 1 is an MVRBM", lambda: operator_of_matrix_machine(1), matrix_machine),
    ("MPO of bond 3 is three products", lambda: operator_of_matrix_machine(3), lambda: matrix_machine(3)),
    ("MPO of bond 1 is a TV-RBM", operator_of_tensor_machine, tensor_machine),
    ("only the product of U and V matters", lambda: matrix_machine(3), lambda: matrix_machine_rescaled(7.0)),
    ("CP is an RBM with W of rank 1", lambda: cp_machine(1), lambda: rbm_of_cp_machine(1)),
    ("CP is an RBM with W of rank 2", cp_machine, rbm_of_cp_machine),
    ("any RBM is a sum of products", arbitrary_rbm, full_rank_matrix_machine),
    ("a hidden bit is a category out of two", bits, bits_as_pairs_of_hidden_categories),
]


@pytest.mark.parametrize(("_", "left", "right"), SAME_MODEL, ids=lambda value: value if isinstance(value, str) else "")
def test_assign_the_same_probability_to_every_state(_, left, right):
    left, right = log_probabilities(left()), log_probabilities(right())
    assert float(left.std()) > 0.1  # not a table of equal numbers
    torch.testing.assert_close(left, right, **TOLERANCE)


@pytest.mark.parametrize("name", CONNECTED)
@torch.no_grad()
def test_balancing_changes_no_probability(name):
    machine = machine_named(f"bernoulli | bernoulli | {name}")
    next(p for p in machine.couplings.parameters() if p.requires_grad).mul_(3)
    before = log_probabilities(machine)
    for coupling in machine.links.values():
        coupling.balance()
    torch.testing.assert_close(log_probabilities(machine), before, **TOLERANCE)


# -- the paper's formulas, by plain loops -----------------------------------------------------------------


@torch.no_grad()
def test_mvrbm_is_the_paper_s_energy():
    machine = matrix_machine()
    U, V = (factor[0] for factor in factors(machine))
    B, C = machine.visible.visible.bias.numpy(), machine.hidden.bias.numpy()
    states = [np.array(z).reshape(2, 3) for z in itertools.product((0, 1), repeat=6)]
    hidden = [np.array(z).reshape(3, 2) for z in itertools.product((0, 1), repeat=6)]
    weights = np.array(
        [
            sum(np.exp(np.trace(U.T @ Y @ V @ X.T) + np.trace(X.T @ B) + np.trace(Y.T @ C)) for Y in hidden)
            for X in states
        ]
    )
    np.testing.assert_allclose(log_probabilities(machine), np.log(weights / weights.sum()), rtol=1e-10)
    for X in states[::7]:
        mean = machine.hidden_mean(torch.from_numpy(X)[None])[0]
        np.testing.assert_allclose(mean, 1 / (1 + np.exp(-(U @ X @ V.T + C))), rtol=1e-10)
    for Y in hidden[::7]:
        mean = machine.visible_mean(torch.from_numpy(Y)[None])["visible"][0]
        np.testing.assert_allclose(mean, 1 / (1 + np.exp(-(U.T @ Y @ V + B))), rtol=1e-10)


# -- scikit-learn -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("rank", [1, 3])
@torch.no_grad()
def test_scikit_learn_agrees(rank):
    machine = matrix_machine(rank)
    U, V = factors(machine)
    theirs = BernoulliRBM(n_components=6)
    theirs.components_ = sum(np.kron(U[r], V[r]) for r in range(rank))
    theirs.intercept_hidden_ = machine.hidden.bias.numpy().reshape(-1)
    theirs.intercept_visible_ = machine.visible.visible.bias.numpy().reshape(-1)
    flat = np.array(list(itertools.product((0.0, 1.0), repeat=6)))
    x = torch.from_numpy(flat).reshape(-1, 2, 3)
    np.testing.assert_allclose(machine.hidden_mean(x).reshape(-1, 6), theirs.transform(flat), rtol=1e-10)
    np.testing.assert_allclose(machine.free_energy(x), theirs._free_energy(flat), rtol=1e-10)
    pseudo = np.zeros(len(flat))  # score_samples flips one random entry; here, each in turn
    for entry in range(6):
        flipped = flat.copy()
        flipped[:, entry] = 1 - flipped[:, entry]
        pseudo -= np.logaddexp(0, theirs._free_energy(flat) - theirs._free_energy(flipped))
    np.testing.assert_allclose(pseudo_log_likelihood(machine, x).values, pseudo, rtol=1e-10)


# -- units of measurement ---------------------------------------------------------------------------------


@pytest.mark.parametrize("hidden", [Bernoulli((2, 2)), Gaussian((2, 2)), Categorical((2, 2))], ids=repr)
@torch.no_grad()
def test_other_units_of_measurement_change_the_density_by_their_ratio(hidden):
    machine = filled(BoltzmannMachine(Gaussian((2, 3)), hidden, Kronecker(rank=2)), "measured")
    x = random_states(machine, 5, generator("x"))["visible"]
    before = log_likelihood(machine, x)
    mean, log_z = machine.hidden_mean(x), log_partition(machine)
    ratio = torch.from_numpy(np.exp(generator("ratio").standard_normal((2, 3)) * 3))
    machine.visible.visible.bias.mul_(ratio)
    machine.visible.visible.log_variance.add_(2 * ratio.log())
    torch.testing.assert_close(log_likelihood(machine, x * ratio), before - ratio.log().sum(), **TOLERANCE)
    torch.testing.assert_close(log_partition(machine), log_z + ratio.log().sum(), **TOLERANCE)
    torch.testing.assert_close(machine.hidden_mean(x * ratio), mean, **TOLERANCE)


@torch.no_grad()
def test_a_gaussian_pair_is_one_joint_gaussian():
    from scipy.stats import multivariate_normal

    machine = filled(BoltzmannMachine(Gaussian(3), Gaussian(2), Dense()), "joint")
    (b, log_s2), (c, log_t2) = ([p.numpy() for p in u.parameters()] for u in (machine.visible.visible, machine.hidden))
    s, t = np.exp(log_s2 / 2), np.exp(log_t2 / 2)
    W = machine.couplings.visible.weight.numpy()
    precision = np.block([[np.diag(1 / s**2), -(W / t[:, None] / s).T], [-(W / t[:, None] / s), np.diag(1 / t**2)]])
    covariance = np.linalg.inv(precision)
    mean = covariance @ np.concatenate([b / s**2, c / t**2])
    x = random_states(machine, 4, generator("x"))["visible"]
    expected = multivariate_normal.logpdf(x.numpy(), mean[:3], covariance[:3, :3])
    np.testing.assert_allclose(log_likelihood(machine, x), expected, rtol=1e-10)


# -- replicated softmax -----------------------------------------------------------------------------------


@torch.no_grad()
def test_replicated_softmax_is_an_rbm_on_counts():
    machine = filled(replicated_softmax(5, 4, 3), "documents")
    counts = np.array([[2, 0, 1, 0], [0, 0, 0, 5], [1, 1, 1, 1], [0, 1, 0, 0]])
    b = machine.visible.words.bias.numpy()[0]
    c = machine.hidden.bias.numpy()[0]
    V = factors(machine, "words")[1][0]  # (topics, words)
    fields = counts @ V.T + c
    x = documents(torch.from_numpy(counts), n_rows=5)
    np.testing.assert_allclose(machine.hidden_mean(x)[:, 0], 1 / (1 + np.exp(-fields)), rtol=1e-6)
    expected = -(counts @ b) - np.logaddexp(0, fields).sum(1)
    np.testing.assert_allclose(machine.free_energy(x.double()), expected, rtol=1e-10)


@torch.no_grad()
def test_a_hidden_bias_that_scales_with_length_is_part_of_the_words():
    machine = filled(replicated_softmax(4, 3, 2), "scaled")
    counts = np.array([[2, 1, 0], [0, 0, 1], [1, 1, 2]])
    a = generator("a").standard_normal(2)
    V, c = factors(machine, "words")[1][0].copy(), machine.hidden.bias.numpy()[0]
    machine.couplings.words.factors[1].add_(torch.from_numpy(a)[:, None])
    fields = counts @ V.T + counts.sum(1)[:, None] * a + c
    mean = machine.hidden_mean(documents(torch.from_numpy(counts), n_rows=4).double())[:, 0]
    np.testing.assert_allclose(mean, 1 / (1 + np.exp(-fields)), rtol=1e-10)


@pytest.mark.parametrize("length", [1, 2, 3, 4])
@torch.no_grad()
def test_log_partition_of_a_length_is_that_of_a_machine_of_that_length(length):
    machine = filled(replicated_softmax(4, 3, 2), "lengths")
    values = {"hidden.bias": machine.hidden.bias, "visible.words.bias": machine.visible.words.bias}
    values["couplings.words.factors.1"] = machine.couplings.words.factors[1]
    short = with_values(replicated_softmax(length, 3, 2), values)
    x = documents(torch.tensor([[length, 0, 0]]), n_rows=4).double()
    torch.testing.assert_close(log_partition(machine, clamp=x), log_partition(short), **TOLERANCE)
    # By hand: topics summed, every word independent given them.
    c, b, V = (value.detach().numpy()[0] for value in values.values())
    topics = np.array(list(itertools.product((0, 1), repeat=2)))
    total = (np.exp(topics @ c) * np.exp(topics @ V + b).sum(1) ** length).sum()
    np.testing.assert_allclose(log_partition(short).item(), np.log(total), rtol=1e-10)


@torch.no_grad()
def test_the_order_of_words_means_nothing():
    machine = filled(replicated_softmax(4, 3, 2), "order")
    x = documents(torch.tensor([[2, 1, 0]]), n_rows=4).double()
    for order in itertools.permutations(range(4)):
        torch.testing.assert_close(machine.free_energy(x[:, list(order)]), machine.free_energy(x), **TOLERANCE)
        torch.testing.assert_close(log_likelihood(machine, x[:, list(order)]), log_likelihood(machine, x), **TOLERANCE)


@torch.no_grad()
def test_padding_rows_add_nothing_to_the_pseudo_likelihood():
    machine = filled(replicated_softmax(4, 3, 2), "lengths")
    values = {"hidden.bias": machine.hidden.bias, "visible.words.bias": machine.visible.words.bias}
    values["couplings.words.factors.1"] = machine.couplings.words.factors[1]
    short = with_values(replicated_softmax(2, 3, 2), values)
    x = documents(torch.tensor([[1, 1, 0], [0, 0, 2]]), n_rows=4).double()
    expected = pseudo_log_likelihood(short, x[:, :2]).values
    torch.testing.assert_close(pseudo_log_likelihood(machine, x).values, expected, **TOLERANCE)


@pytest.mark.parametrize("key", ["couplings.visible.factors.0", "visible.visible.bias", "hidden.bias"])
def test_the_table_can_tell_models_apart(key):
    machine, other = matrix_machine(), matrix_machine()
    with torch.no_grad():
        other.get_parameter(key).view(-1)[0] += 1e-6
    with pytest.raises(AssertionError):
        torch.testing.assert_close(log_probabilities(machine), log_probabilities(other), **TOLERANCE)
