"""Machines with known log Z, and deliberate errors, that the tests of annealing share."""

import torch
from scipy import stats

from environment import fixed_seeds
from mvrbm import CP, MPO, Bernoulli, BoltzmannMachine, Categorical, Dense, Gaussian, Kronecker, RandomSource
from mvrbm.models import documents, replicated_softmax
from mvrbm.sampling import TemperedPath

FALSE_ALARM = 1e-4


@fixed_seeds()  # how well annealing works depends on the machine
def randomized(machine, seed, std, bias=0.7):
    rng = RandomSource(seed)
    machine = machine.double()
    with torch.no_grad():
        for unit in (*machine.layers.values(), machine.hidden):
            for parameter in unit.parameters():
                parameter.copy_(bias * rng.normal(parameter.shape, parameter))
        for link in machine.links.values():
            link.initialize(rng, std)
    return machine


def build(visible, hidden, coupling, *, seed=1, std=1.0):
    return randomized(BoltzmannMachine(visible, hidden, coupling), seed, std)


def two_gaussian_sides(seed=1):
    machine = build(Gaussian((2, 3)), Gaussian((2, 2)), Kronecker(), seed=seed)
    with torch.no_grad():
        machine.links["visible"].factors[0].mul_(0.8 / machine.gaussian_norm())
    return machine


def three_layers(seed=1):
    layers = {"image": Bernoulli((3, 2)), "depth": Gaussian((2, 2)), "label": Categorical((1, 3))}
    couplings = {"image": Kronecker(), "depth": Kronecker(), "label": Dense()}
    return build(layers, Bernoulli((2, 2)), couplings, seed=seed)


MACHINES = {
    "binary": lambda: build(Bernoulli(8), Bernoulli(6), Dense()),
    "binary, other weights": lambda: build(Bernoulli(8), Bernoulli(6), Dense(), seed=2),
    "binary, large weights": lambda: build(Bernoulli(8), Bernoulli(6), Dense(), std=2.5),
    "matrix": lambda: build(Bernoulli((4, 3)), Bernoulli((3, 2)), Kronecker(2)),
    "matrix, large weights": lambda: build(Bernoulli((4, 3)), Bernoulli((3, 2)), Kronecker(2), std=2.0),
    "tensor": lambda: build(Bernoulli((2, 3, 2)), Bernoulli((2, 2, 2)), Kronecker()),
    "mpo": lambda: build(Bernoulli((2, 3, 2)), Bernoulli((2, 2, 2)), MPO(2)),
    "cp": lambda: build(Bernoulli((3, 3)), Bernoulli(6), CP(3)),
    "categorical": lambda: build(Categorical((4, 3)), Bernoulli((3, 2)), Kronecker(2)),
    "categorical hidden": lambda: build(Bernoulli(8), Categorical((3, 3)), Dense()),
    "gaussian": lambda: build(Gaussian((3, 3)), Bernoulli((3, 2)), Kronecker()),
    "gaussian, large weights": lambda: build(Gaussian(6), Bernoulli(5), Dense(), std=1.5),
    "gaussian hidden": lambda: build(Bernoulli(8), Gaussian(4), Dense(), std=0.6),
    "gaussian on both sides": two_gaussian_sides,
    "three layers": three_layers,
}


def neutral(machine):
    """The middle of what every unit can be: half, equal shares, or the bias."""
    center = {}
    for name, unit in machine.layers.items():
        middle = unit.bias.detach() if unit.gaussian else torch.tensor(1 / unit.levels, dtype=torch.float64)
        center[name] = middle.expand(1, *unit.shape)
    return center


# Limits of a mean square of thirty standard normal numbers. Weights are skewed, so that in truth the
# upper one is passed more often.
LOW, HIGH = stats.chi2.ppf([FALSE_ALARM / 2, 1 - FALSE_ALARM / 2], 30) / 30


UNBIASED = {
    "binary": lambda: build(Bernoulli(6), Bernoulli(4), Dense()),
    "categorical": lambda: build(Categorical((3, 3)), Bernoulli((2, 2)), Kronecker(2)),
    "gaussian": lambda: build(Gaussian(4), Bernoulli(3), Dense(), std=0.7),
    "gaussian hidden": lambda: build(Bernoulli(6), Gaussian(3), Dense(), std=0.4),
}


def sample_without_bias(self, field, rng):
    return (rng.uniform(field.shape, field) < torch.sigmoid(field)).to(field.dtype)


between = TemperedPath.between
energies = TemperedPath.energies


def base_not_faded(self, base, field, beta):
    return base + between(self, torch.zeros_like(base), field, beta)


def pull_forgotten(self, betas, field, pull):
    return energies(self, betas, field, torch.zeros_like(pull))


def some_documents():
    machine = randomized(replicated_softmax(5, 4, 3), 2, 0.7)
    counts = torch.tensor([[1, 0, 2, 0], [0, 1, 0, 0], [2, 2, 1, 0], [0, 3, 0, 0]])
    return machine, documents(counts).double()
