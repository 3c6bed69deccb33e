"""The number of threads changes no bit of a training run, by the C code and by matrix products in blocks.

Machines that have only dense couplings are the exception: the reference computes them, BLAS divides their products
among its threads, and results agree up to rounding.
"""

import pytest
import torch

from backend_runs import DEFAULT, Case, assert_equal_states, everything_in, start, train, with_negative
from mvrbm import Bernoulli, Categorical, Dense, Gaussian, compiled
from mvrbm.backends.cpu import parallel_products
from mvrbm.backends.cpu.gemm import GemmBackend
from mvrbm.backends.cpu.native import NativeBackend
from mvrbm.backends.cpu.one_hot import OneHotBackend
from mvrbm.backends.reference import ReferenceBackend
from mvrbm.updates.negative import PCD

THREADS = (1, 2, 3, 4, 8)
B = Bernoulli
C = Categorical
G = Gaussian
PERSISTENT = with_negative(DEFAULT, PCD(100))
SIZES = (300, 300, 130)


def learning(shape):
    """Gaussian units that learn their variances."""
    return G(shape, learn_variance=True)


# All machines and batches are large enough for several threads.
NATIVE = {
    "bernoulli": Case({"x": lambda: B((28, 28))}, lambda: B((25, 25)), [1], DEFAULT, SIZES),
    "gaussian": Case({"x": lambda: G((28, 28))}, lambda: B((25, 25)), [1], DEFAULT, SIZES),
    "variances": Case({"x": lambda: learning((28, 28))}, lambda: B((25, 25)), [1], PERSISTENT, SIZES),
    "categorical": Case({"x": lambda: C((40, 30))}, lambda: B((20, 20)), [1], DEFAULT, SIZES),
    "gaussian hidden": Case({"x": lambda: B((28, 28))}, lambda: G((25, 25)), [1], DEFAULT, SIZES),
}
IN_BLOCKS = {
    "gaussian": Case({"x": lambda: G((3, 700))}, lambda: B((5, 250)), [2], DEFAULT, SIZES),
    "variances": Case({"x": lambda: learning((9, 12, 12))}, lambda: B((5, 17, 14)), [3], PERSISTENT, SIZES),
    "categorical": Case({"x": lambda: C((12, 9, 12))}, lambda: B((5, 17, 14)), [3], DEFAULT, SIZES),
    "gaussian hidden": Case({"x": lambda: B((4, 1000))}, lambda: G((3, 400)), [1], DEFAULT, SIZES),
}
OF_ROWS = {
    "matrices": Case({"x": lambda: C((60, 21))}, lambda: B((20, 20)), [3], DEFAULT, SIZES),
    "dense": Case({"x": lambda: C((60, 21))}, lambda: B(300), [Dense()], PERSISTENT, SIZES),
    "centered": Case(
        {"x": lambda: C((60, 21))},
        lambda: B(300),
        [Dense()],
        with_negative(PERSISTENT, PCD(100), centering="full"),
        SIZES,
    ),
}
DENSE = {
    "CD": Case({"x": lambda: B(784)}, lambda: B(625), [Dense()], DEFAULT, (100, 100)),
    "PCD": Case({"x": lambda: B(784), "y": lambda: C(10)}, lambda: B(300), [Dense()] * 2, PERSISTENT, (100, 100)),
}


@pytest.fixture(autouse=True)
def _threads():
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


def trained(case, backend, threads):
    torch.set_num_threads(1)  # as in the trainer, which initializes machines and runs the C code like this
    run = start(case)
    if backend is NativeBackend:
        return train(NativeBackend(run.settings, run.state, threads), run)
    torch.set_num_threads(threads)
    if backend is ReferenceBackend:
        return train(ReferenceBackend(run.settings), run)
    return train(backend(run.settings, run.state), run)


def assert_same_bits(states):
    first, *others = map(everything_in, states)
    for threads, other in zip(THREADS[1:], others, strict=True):
        for name, tensor in first.items():
            assert torch.equal(tensor, other[name]), (threads, name)


@pytest.mark.skipif(compiled.library() is None, reason="the C code was not built")
@pytest.mark.parametrize("name", NATIVE)
def test_compiled_code_gives_the_same_bits(name):
    assert_same_bits([trained(NATIVE[name], NativeBackend, threads) for threads in THREADS])


@pytest.mark.parametrize("name", IN_BLOCKS)
def test_products_in_blocks_give_the_same_bits(name):
    assert_same_bits([trained(IN_BLOCKS[name], GemmBackend, threads) for threads in THREADS])


@pytest.mark.parametrize("name", OF_ROWS)
def test_sums_of_rows_give_the_same_bits(name):
    assert_same_bits([trained(OF_ROWS[name], OneHotBackend, threads) for threads in THREADS])


@pytest.mark.parametrize("name", DENSE)
def test_dense_products_agree_up_to_rounding(name):
    first, *others = [trained(DENSE[name], ReferenceBackend, threads) for threads in THREADS]
    for other in others:
        assert_equal_states(other, first, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("add", [False, True])
@pytest.mark.parametrize(("m", "k", "n"), [(37, 5, 70_000), (70_000, 5, 37), (37, 70_000, 5), (3, 4, 5)])
def test_products_by_blocks_are_the_products(m, k, n, add):
    rng = torch.Generator().manual_seed(0)
    a = torch.randn(m, k, generator=rng)
    b = torch.randn(n, k, generator=rng).t()
    before = torch.randn(m, n, generator=rng)
    exact = a.double() @ b.double() + (before.double() if add else 0)
    found = []
    for threads in (1, 3):
        torch.set_num_threads(threads)
        into = before.clone()
        parallel_products.matmul_in_blocks(a, b, into, add=add)
        found.append(into)
        assert torch.get_num_threads() == threads
    torch.testing.assert_close(found[0].double(), exact, rtol=1e-4, atol=1e-5 + 3e-7 * k)  # rounding of k terms
    assert torch.equal(*found)


def test_errors_of_other_threads_are_raised(monkeypatch):
    monkeypatch.setattr(parallel_products, "_matmul", lambda *_, **__: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        parallel_products.matmul_in_blocks(torch.zeros(400, 400), torch.zeros(400, 400), torch.zeros(400, 400))
