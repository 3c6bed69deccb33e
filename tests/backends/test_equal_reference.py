"""The backends on the CPU against the reference, with the same random numbers."""

import dataclasses

import pytest
import torch

from backends.matrix_cases import CASES
from backends.training_runs import BATCH_SIZE, DEFAULT, PAPER, data_for, learning, machine_of
from mvrbm.backends.cpu import gemm
from mvrbm.couplings import Dense
from mvrbm.training import PCD, Callback, Trainer
from mvrbm.units import Bernoulli, Categorical, Gaussian

B = Bernoulli
C = Categorical
G = Gaussian

FULL = dataclasses.replace(DEFAULT, centering="full", negative=PCD(9, 2))
PERSISTENT = dataclasses.replace(DEFAULT, negative=PCD(9, 2))


#: Further machines that the paths on the CPU can compute.
ON_CPU = {
    "dense": ({"x": lambda: B((6, 5))}, lambda: B((4, 7)), [Dense()], DEFAULT),
    "dense, paper": ({"x": lambda: B(11)}, lambda: B(7), [Dense()], PAPER),
    "dense of other orders": ({"x": lambda: G((3, 2, 4))}, lambda: B((5, 2)), [Dense()], PERSISTENT),
    "categories": ({"x": lambda: C((6, 5))}, lambda: B((4, 7)), [2], DEFAULT),
    "labels": ({"x": lambda: B((6, 5)), "label": lambda: C(3)}, lambda: B((4, 7)), [2, Dense()], PERSISTENT),
    "labels, paper": ({"label": lambda: C(3), "x": lambda: B((6, 5))}, lambda: G((4, 7)), [Dense(), 1], PAPER),
    "order 3": ({"x": lambda: B((3, 4, 5))}, lambda: B((4, 2, 3)), [1], DEFAULT),
    "order 3, rank 2": ({"x": lambda: G((3, 4, 5))}, lambda: B((2, 4, 3)), [2], PERSISTENT),
    "order 4": ({"x": lambda: B((3, 2, 1, 3))}, lambda: B((2, 3, 2, 1)), [3], PAPER),
    "order 1": ({"x": lambda: B(6)}, lambda: B(4), [3], PAPER),
    "orders": (
        {"x": lambda: B((3, 4, 5)), "y": lambda: C((2, 3)), "z": lambda: B(4)}, lambda: B((4, 2, 3)),
        [2, Dense(), Dense()], PERSISTENT,
    ),
    "variances": ({"x": lambda: learning((6, 5))}, lambda: B((4, 7)), [2], DEFAULT),
    "variances, PCD": ({"x": lambda: learning((6, 5))}, lambda: B((4, 7)), [1], PERSISTENT),
    "variances, paper": (
        {"x": lambda: learning((6, 5))}, lambda: B((4, 7)), [1], dataclasses.replace(PAPER, learning_rate=0.0005),
    ),
    "centered": ({"x": lambda: B((6, 5))}, lambda: B((4, 7)), [2], FULL),
    "centered, CD": ({"x": lambda: B((6, 5))}, lambda: B((4, 7)), [1], dataclasses.replace(PAPER, centering="full")),
    "everything": (
        {"x": lambda: learning((6, 5)), "y": lambda: C((2, 3)), "z": lambda: B((3, 8)), "w": lambda: learning(4)},
        lambda: B((4, 7)), [2, Dense(), 1, Dense()], FULL,
    ),
}  # fmt: skip


def trained(case, *, watched=False, **how):
    layers, hidden, ranks, recipe = case
    machine = machine_of(layers, hidden, ranks).to("cpu").double()
    data = data_for(machine, 20)
    callbacks = [Callback() if not watched else Watcher()]
    trainer = Trainer(machine, dataclasses.replace(recipe, batch_size=BATCH_SIZE), seed=5, callbacks=callbacks, **how)
    return trainer.fit(data, 3, initialize=True)


class Watcher(Callback):
    """Asks for every batch, and requires the machine to be up to date."""

    def on_batch_end(self, trainer, batch):
        now = torch.cat([p.detach().flatten().clone() for p in trainer.machine.parameters()])
        if trainer.update > 1:
            assert not torch.equal(now, self.before)
        self.before = now


@pytest.mark.parametrize("watched", [False, True])
@pytest.mark.parametrize("name", [*CASES, *ON_CPU])
def test_plain_products_train_as_the_reference_does(name, watched):
    case = {**CASES, **ON_CPU}[name]
    reference, fast = trained(case, backend="reference"), trained(case, watched=watched)
    assert gemm.unsupported_reason(fast.task(), fast.state) is None
    assert gemm.unsupported_reason(reference.task(), reference.state) == "the reference backend was requested"
    for key, value in reference.machine.state_dict().items():
        torch.testing.assert_close(fast.machine.state_dict()[key], value, rtol=1e-9, atol=1e-11)
    assert set(fast.state.momenta) == set(reference.state.momenta) == set(reference.state.learned)
    for key, momentum in reference.state.momenta.items():
        torch.testing.assert_close(fast.state.momenta[key], momentum, rtol=1e-9, atol=1e-11)
    assert set(fast.state.chains) == set(reference.state.chains)
    for key, chain in reference.state.chains.items():
        torch.testing.assert_close(fast.state.chains[key], chain, rtol=1e-9, atol=1e-9)
