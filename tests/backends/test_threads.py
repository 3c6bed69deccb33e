"""The number of threads changes no bit of a training run, on the compiled path and on the one of matrix products.

Machines whose couplings are full matrices alone are the exception: BLAS divides their products among its threads.
"""

import dataclasses

import numpy as np
import pytest
import torch

from mvrbm.backends.cpu import products
from mvrbm.backends.cpu.gemm import GemmBackend
from mvrbm.backends.cpu.native import NativeBackend
from mvrbm.couplings import Kronecker
from mvrbm.machine import BoltzmannMachine
from mvrbm.training import RECIPES, Trainer
from mvrbm.units import make_unit

THREADS = (1, 2, 3, 4, 8)

# (path, visible units, hidden units, shapes, coupling, recipe): all large enough for several threads.
RUNS = [
    (NativeBackend, "bernoulli", "bernoulli", (28, 28), (25, 25), Kronecker, "default"),
    (NativeBackend, "gaussian", "bernoulli", (28, 28), (25, 25), Kronecker, "default"),
    (NativeBackend, "gaussian-learned", "bernoulli", (28, 28), (25, 25), Kronecker, "generative"),
    (NativeBackend, "categorical", "bernoulli", (40, 30), (20, 20), Kronecker, "default"),
    (NativeBackend, "bernoulli", "gaussian", (28, 28), (25, 25), Kronecker, "default"),
    (GemmBackend, "gaussian", "bernoulli", (3, 700), (5, 250), lambda: Kronecker(2), "default"),
    (GemmBackend, "gaussian-learned", "bernoulli", (9, 12, 12), (5, 17, 14), lambda: Kronecker(3), "generative"),
    (GemmBackend, "categorical", "bernoulli", (12, 9, 12), (5, 17, 14), lambda: Kronecker(3), "default"),
    (GemmBackend, "bernoulli", "gaussian", (4, 1000), (3, 400), Kronecker, "default"),
]  # fmt: skip


@pytest.fixture
def _threads():
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


@pytest.mark.slow
@pytest.mark.usefixtures("_threads")
@pytest.mark.parametrize(("path", "visible", "hidden", "shape", "hidden_shape", "coupling", "recipe"), RUNS)
def test_a_training_run_has_the_same_bits(path, visible, hidden, shape, hidden_shape, coupling, recipe, monkeypatch):
    chosen = []
    for kind in (NativeBackend, GemmBackend):
        monkeypatch.setattr(kind, "update", _noted(kind, chosen))
    data = np.random.default_rng(0).random((330, *shape)).astype(np.float32)
    if visible == "categorical":
        data = np.eye(shape[-1], dtype=np.float32)[data.argmax(-1)]
    found = []
    for threads in THREADS:
        torch.set_num_threads(threads)
        machine = BoltzmannMachine(make_unit(visible, shape), make_unit(hidden, hidden_shape), coupling())
        settings = dataclasses.replace(RECIPES[recipe], batch_size=300)
        Trainer(machine, settings, seed=0).fit(data, n_epochs=1, initialize=True)
        found.append({name: tensor.clone() for name, tensor in machine.state_dict().items()})
    assert set(chosen) == {path}
    for threads, other in zip(THREADS, found, strict=True):
        for name, tensor in other.items():
            assert torch.equal(tensor, found[0][name]), (threads, name)


def _noted(kind, chosen):
    update = kind.update

    def noted(self, *args):
        chosen.append(kind)
        return update(self, *args)

    return noted


@pytest.mark.usefixtures("_threads")
@pytest.mark.parametrize("add", [False, True])
@pytest.mark.parametrize(("m", "k", "n"), [(37, 5, 70_000), (70_000, 5, 37), (37, 70_000, 5), (3, 4, 5)])
def test_products_by_blocks_are_the_products(m, k, n, add):
    rng = torch.Generator().manual_seed(0)
    a, b = torch.randn(m, k, generator=rng), torch.randn(n, k, generator=rng).t()
    start = torch.randn(m, n, generator=rng)
    exact = a.double() @ b.double() + (start.double() if add else 0)
    found = []
    for threads in (1, 3):
        torch.set_num_threads(threads)
        into = start.clone()
        products.times(a, b, into, add=add)
        found.append(into)
        assert torch.get_num_threads() == threads
    torch.testing.assert_close(found[0].double(), exact, rtol=1e-4, atol=1e-3)
    assert torch.equal(*found)


def test_errors_of_other_threads_are_raised(monkeypatch):
    monkeypatch.setattr(products, "plain_times", lambda *_, **__: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        products.times(torch.zeros(400, 400), torch.zeros(400, 400), torch.zeros(400, 400))
