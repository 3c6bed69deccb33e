"""The kernel for arrays of order 3 and more against the reference, with the same random numbers.

It runs in Triton's interpreter, or on a GPU where there is one.
"""

import dataclasses
import importlib.util

import pytest
import torch

from mvrbm.couplings import Kronecker
from mvrbm.data.sources import as_source
from mvrbm.training import CD, TemperedPCD, Trainer
from mvrbm.units import Bernoulli, Categorical, Gaussian

if importlib.util.find_spec("triton") is None:
    pytest.skip("the kernels need triton", allow_module_level=True)
from backends.cuda.training_runs import (
    DEFAULT,
    DEVICE,
    FULL,
    PAPER,
    assert_same_result,
    by_kernels,
    by_reference,
    data_for,
    everything,
    machine_of,
    never,
    prepared,
    relative_distance,
    spread,
    with_chains,
)
from mvrbm.backends.choose import kernel_backend
from mvrbm.backends.cuda.tensor import TensorBackend, best_groups, unsupported_reason
from mvrbm.backends.layout import Layout


def cube():
    return Bernoulli((4, 6, 5))


def hidden():
    return Bernoulli((3, 2, 4))


def small(recipe, rate=0.0005):
    return dataclasses.replace(recipe, learning_rate=rate)


# Visible layers, hidden layer, couplings, recipe.
CASES = {
    "order 3": ([cube], hidden, [Kronecker(1)], DEFAULT),
    "order 3, rank 2, persistent chains, two steps": ([cube], hidden, [Kronecker(2)], with_chains(DEFAULT, 5, 2)),
    "more chains than samples": ([cube], hidden, [Kronecker(2)], with_chains(PAPER, 11)),
    "gaussian data of other variances": ([lambda: spread((4, 6, 5))], hidden, [Kronecker(1)], small(PAPER)),
    "gaussian hidden layer": ([cube], lambda: spread((3, 2, 4)), [Kronecker(1)], PAPER),
    "order 4": (
        [lambda: Bernoulli((4, 2, 3, 3))], lambda: Bernoulli((2, 3, 2, 4)), [Kronecker(1)],
        dataclasses.replace(DEFAULT, negative=CD(2)),
    ),
    "order 4, rank 2": (
        [lambda: Gaussian((2, 3, 2, 4))], lambda: Bernoulli((4, 2, 3, 1)), [Kronecker(2)], with_chains(DEFAULT, 9),
    ),
    "order 5": (
        [lambda: Bernoulli((2, 3, 2, 3, 2))], lambda: Bernoulli((2, 1, 3, 2, 2)), [Kronecker(1)],
        dataclasses.replace(PAPER, factor_std=0.7),
    ),
    "three products": (
        [lambda: Bernoulli((3, 9, 9))], lambda: Bernoulli((9, 9, 17)), [Kronecker(1)],
        dataclasses.replace(PAPER, learning_rate=0.2),
    ),
    "three products, rank 2": (
        [lambda: Gaussian((9, 3, 9))], lambda: Bernoulli((9, 9, 9)), [Kronecker(2)], with_chains(DEFAULT, 4),
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", CASES)
@pytest.mark.usefixtures("interpreted")
def test_arrays_train_as_the_reference_does(name):
    reference, start = by_reference(CASES[name])
    assert_same_result(reference, by_kernels(CASES[name], TensorBackend), start)
    expected = everything(reference)
    moved = [(expected[key] - value.float()).abs().max() for key, value in start.items() if "couplings" in key]
    assert min(moved) > 1e-3, "a factor has hardly learned: the comparison says nothing"


@pytest.mark.usefixtures("interpreted")
def test_operands_of_sixteen_bits_change_the_result_by_their_rounding():
    reference, start = by_reference(CASES["order 3"], torch.float32)
    # A rounded field may lie on the other side of its random number: then one state of hundreds differs.
    assert 1e-6 < relative_distance(reference, by_kernels(CASES["order 3"], TensorBackend, "fp16"), start) < 0.08


@pytest.mark.usefixtures("interpreted")
def test_machines_that_train_together_train_as_by_themselves():
    case = [*CASES["order 3"][:3], with_chains(DEFAULT, 3)]

    def trained(seeds):
        pairs = [prepared(case, seed, n=10) for seed in seeds]
        states, sources = [trainer.state for trainer, _ in pairs], [source for _, source in pairs]
        backend = TensorBackend([trainer.update_settings() for trainer, _ in pairs], states, sources)
        assert backend.epoch(states, torch.arange(10, device=DEVICE).expand(len(seeds), -1), never) == 2
        backend.balance(states)
        assert backend.store(states) == [False] * len(seeds)
        return [everything(trainer) for trainer, _ in pairs]

    for mine, alone in zip(trained([0, 1]), trained([0]) + trained([1]), strict=True):
        for key, value in alone.items():
            torch.testing.assert_close(mine[key], value, rtol=1e-4, atol=1e-5)


def reason(visible, layer, recipe=DEFAULT, link=None):
    trainer = Trainer(machine_of(visible, layer, [link or Kronecker(1)] * len(visible)), recipe)
    source = as_source(data_for(trainer.machine, 20), trainer.machine)
    trainer.prepare(source, initialize=True)
    assert (kernel_backend(trainer.update_settings(), trainer.state, source, 1) == "tensor") == (
        unsupported_reason(trainer.update_settings(), trainer.state, source) is None
    )
    return unsupported_reason(trainer.update_settings(), trainer.state, source)


@pytest.mark.usefixtures("interpreted")
def test_what_the_kernel_is_for():
    assert reason([cube], hidden) is None
    assert "order 3" in reason([lambda: Bernoulli((6, 5))], lambda: Bernoulli((4, 3)))
    assert "order 3" in reason([cube, cube], hidden)
    assert "TemperedPCD" in reason([cube], hidden, dataclasses.replace(DEFAULT, negative=TemperedPCD(4)))
    assert "centered" in reason([cube], hidden, FULL)
    assert "Gaussian" in reason([lambda: Categorical((4, 6, 5))], hidden)
    assert "Gaussian" in reason([lambda: Gaussian((4, 6, 5), learn_variance=True)], hidden)
    assert reason([lambda: Bernoulli((16, 16, 32))], hidden) is None
    assert "entries" in reason([lambda: Bernoulli((16, 17, 32))], hidden)
    assert "entries" in reason([lambda: Bernoulli((65, 2, 2))], hidden)
    assert "learned matrices" in reason([cube], hidden, link=Kronecker(1, summed_modes=[0]))


@pytest.mark.parametrize(
    ("visible", "hidden_shape", "sizes"),
    [
        ((16, 16, 16), (10, 10, 10), [(16, 16), (16, 16), (16, 16)]),
        ((8, 8, 8, 8), (5, 5, 5, 5), [(64, 64), (1, 1), (64, 64)]),  # three groups would be padded to 16 each
        ((2, 30, 30), (2, 20, 20), [(64, 64), (1, 1), (32, 32)]),
        ((2, 2, 2), (2, 2, 2), [(16, 16), (1, 1), (16, 16)]),
    ],
)
def test_groups_of_modes_take_the_fewest_operations(visible, hidden_shape, sizes):
    layout = Layout.of(machine_of([lambda: Bernoulli(visible)], lambda: Bernoulli(hidden_shape), [Kronecker(1)]))
    groups = best_groups(layout)
    assert [(group[4] * group[6], group[5] * group[7]) for group in groups] == sizes
