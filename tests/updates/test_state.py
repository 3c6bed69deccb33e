"""The state of a training run: what learns, and momenta that begin at zero."""

import torch

from mvrbm import Bernoulli, BoltzmannMachine, Gaussian, Kronecker
from mvrbm.random import RandomSource
from mvrbm.updates.state import TrainState, is_factor


def test_what_learns_is_named_and_belongs_to_the_machine():
    machine = BoltzmannMachine(Gaussian((3, 4)), Bernoulli((2, 5)), Kronecker(1))
    machine.hidden.bias.requires_grad_(False)
    state = TrainState(machine, RandomSource(0))
    assert set(state.learned) == {"visible.visible.bias", "couplings.visible.factors.0", "couplings.visible.factors.1"}
    assert all(parameter is dict(machine.named_parameters())[name] for name, parameter in state.learned.items())
    assert [name for name in state.learned if is_factor(name)] == [
        "couplings.visible.factors.0",
        "couplings.visible.factors.1",
    ]
    assert (state.epoch, state.batch, state.update, state.momenta, state.chains) == (0, 0, 0, {}, {})


def test_a_momentum_begins_at_zero_and_is_kept():
    machine = BoltzmannMachine(Bernoulli((3, 4)), Bernoulli((2, 5)), Kronecker(1)).double()
    state, other = TrainState(machine, RandomSource(0)), TrainState(machine, RandomSource(0))
    for name, parameter in state.learned.items():
        momentum = state.momentum_of(name, parameter)
        assert torch.equal(momentum, torch.zeros_like(parameter))
        assert not momentum.requires_grad
        momentum.fill_(2.0)
        assert state.momentum_of(name, parameter) is momentum
        assert momentum is state.momenta[name]
    assert not other.momenta
