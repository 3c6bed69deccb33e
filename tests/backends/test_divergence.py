"""One rule for all backends if an update makes a parameter infinite or NaN; see `mvrbm.backends.base`."""

import dataclasses
import importlib.util
import re

import pytest
import torch

from backend_runs import Case, Run, start
from mvrbm import Bernoulli, Gaussian, compiled
from mvrbm.backends.base import EpochBackend
from mvrbm.backends.choose import BACKENDS
from mvrbm.data.sources import as_source
from mvrbm.errors import DivergenceError
from mvrbm.updates.gradient import WHOLE
from mvrbm.updates.negative import PCD
from mvrbm.updates.recipe import Recipe

# Plain gradient descent without any change between updates, so that parameters can be compared exactly.
RECIPE = Recipe(
    batch_size=8, learning_rate=10.0, bias_learning_rate=10.0, centering="none", normalized=False, balance=False
)
# A momentum with which one step makes a float32 overflow.
TOO_LARGE = 1e38

# Backends by name, and whether Triton kernels compute the update.
COMPUTED = {
    "reference": ("reference", False),
    "gemm": ("gemm", False),
    "native": ("native", False),
    "graph": ("graph", False),
    "graph, fused step": ("graph", True),
    "per_sample": ("per_sample", True),
    "full_matrix": ("full_matrix", True),
    "tensor": ("tensor", True),
}


@pytest.fixture(params=COMPUTED)
def name(request):
    """Name of a backend that can compute updates here."""
    name, by_triton = COMPUTED[request.param]
    if name == "native" and compiled.library() is None:
        pytest.skip("there is no compiled code")
    if by_triton:
        if importlib.util.find_spec("triton") is None:
            pytest.skip("Triton is not installed")
        request.getfixturevalue("interpreted")
    return name


def run_for(name: str, visible: type, recipe: Recipe = RECIPE) -> Run:
    order = 3 if name == "tensor" else 2
    layers = {"x": lambda: visible((3, 4, 2)[:order])}
    run = start(Case(layers, lambda: Bernoulli((2, 3, 2)[:order]), [1], recipe, [8]))
    if name not in ("gemm", "native") and torch.cuda.is_available():
        run.state.machine.to("cuda")
        if run.state.centering is not None:
            run.state.centering.center = {key: array.cuda() for key, array in run.state.centering.center.items()}
        run = run._replace(batches=[{key: array.cuda() for key, array in batch.items()} for batch in run.batches])
    return run


def first_update(name: str, run: Run) -> str:
    """Make one update that has to fail, and return the message."""
    (batch,) = run.batches
    order = torch.arange(8, device=run.state.machine.like.device)[None]
    source = as_source(batch, run.state.machine)
    backend = BACKENDS[name].build([run.settings], [run.state], [source], 1)

    def update() -> None:
        if isinstance(backend, EpochBackend):
            backend.epoch([run.state], order, lambda: False)
            backend.store([run.state])
        else:
            backend.update(run.state, batch, 1.0, WHOLE)

    with pytest.raises(DivergenceError) as caught:
        update()
    return str(caught.value)


def assert_restored(run: Run, before: dict[str, torch.Tensor]) -> None:
    assert run.state.update == 0
    for name, parameter in run.state.machine.named_parameters():
        torch.testing.assert_close(parameter.detach(), before[name], rtol=1e-6, atol=1e-6)
    for momentum in run.state.momenta.values():
        assert not bool(momentum.any())
    assert not run.state.chains
    assert run.state.centering is None or run.state.centering.hidden is None


@pytest.mark.parametrize(
    "filled", [("couplings.x.factors.1", "hidden.bias"), ("couplings.x.factors.0", "visible.x.bias")]
)
def test_divergence_restores_parameters_and_names_the_first_that_is_not_finite(name, filled):
    run = run_for(name, Bernoulli)
    for key, parameter in run.state.learned.items():
        run.state.momenta[key] = torch.full_like(parameter, TOO_LARGE if key in filled else 0.0).detach()
    before = {key: parameter.detach().clone() for key, parameter in run.state.machine.named_parameters()}
    message = first_update(name, run)
    first = next(key for key in run.state.learned if key in filled)
    assert re.match(rf"update 1: the parameter of '{re.escape(first)}' is not finite", message)
    assert_restored(run, before)


def test_divergence_clears_chains_and_the_hidden_offset(name):
    centering = "none" if name in ("per_sample", "tensor") else "full"  # these kernels do not center the hidden layer
    run = run_for(name, Bernoulli, dataclasses.replace(RECIPE, negative=PCD(4), centering=centering))
    for key, parameter in run.state.learned.items():
        run.state.momenta[key] = torch.full_like(parameter, TOO_LARGE).detach()
    before = {key: parameter.detach().clone() for key, parameter in run.state.machine.named_parameters()}
    first_update(name, run)
    assert_restored(run, before)


def test_gradients_that_are_not_finite_leave_parameters_and_momenta_finite(name):
    run = run_for(name, Gaussian)
    run.batches[0]["x"].fill_(torch.finfo(torch.float32).max)
    before = {key: parameter.detach().clone() for key, parameter in run.state.machine.named_parameters()}
    message = first_update(name, run)
    assert re.match(r"update 1: the (gradient|parameter) of '[\w.]+' is not finite", message)
    assert_restored(run, before)


def test_optimizers_forget_moments_that_are_not_finite():
    run = run_for("reference", Gaussian)
    run.batches[0]["x"].fill_(torch.finfo(torch.float32).max)
    run.state.optimizer = torch.optim.Adam(run.state.learned.values())
    run = run._replace(settings=dataclasses.replace(run.settings, optimizer=run.state.optimizer))
    before = {key: parameter.detach().clone() for key, parameter in run.state.machine.named_parameters()}
    first_update("reference", run)
    assert_restored(run, before)
    assert not run.state.optimizer.state
