"""Training of couplings in which some parameters are frozen, with every backend that supports it."""

import pytest
import torch

from mvrbm import CP, MPO, Bernoulli, BoltzmannMachine, Dense, Gaussian, Kronecker, Tucker
from mvrbm.backends.choose import BACKENDS
from mvrbm.training import Recipe, Trainer

COUPLINGS = {
    "dense": (Dense, (6,)),
    "kronecker of order 1": (Kronecker, (6,)),
    "kronecker": (lambda: Kronecker(2), (3, 2)),
    "cp": (lambda: CP(2), (6,)),
    "mpo": (lambda: MPO(2), (3, 2)),
    "tucker": (lambda: Tucker((2, 3)), (6,)),
}
FACTORS = [
    (name, factor)
    for name, (kind, hidden) in COUPLINGS.items()
    for factor, _ in kind().connect((5,) if name.endswith("1") else (4, 5), hidden).named_parameters()
]


def trained(name, factor, centering, backend):
    """A machine of a layer of bits and a Gaussian layer with learned variances, before and after three epochs."""
    kind, hidden = COUPLINGS[name]
    shape = (5,) if name.endswith("1") else (4, 5)
    layers = {"bits": Bernoulli(shape), "real": Gaussian(shape, learn_variance=True)}
    machine = BoltzmannMachine(layers, Bernoulli(hidden), {"bits": kind(), "real": kind()}, std=0.3).double()
    machine.links["bits"].get_parameter(factor).requires_grad_(False)
    generator = torch.Generator().manual_seed(1)
    data = {layer: (torch.rand(24, *shape, generator=generator) < 0.4).double() for layer in layers}
    before = {key: value.clone() for key, value in machine.state_dict().items()}
    recipe = Recipe(n_epochs=3, batch_size=12, centering=centering, weight_decay=0.1)
    Trainer(machine, recipe, seed=2, backend=backend).fit(data, initialize=False)
    return before, machine.state_dict()


@pytest.mark.parametrize("centering", ["location", "full"])
@pytest.mark.parametrize(("name", "factor"), FACTORS)
def test_frozen_factors_stay_and_the_others_learn_alike_with_every_backend(name, factor, centering):
    before, expected = trained(name, factor, centering, "autograd")
    for key, value in expected.items():
        frozen = key == f"couplings.bits.{factor}"
        assert torch.equal(before[key], value) == frozen, key
    for backend in ("auto", *BACKENDS):
        try:
            _, found = trained(name, factor, centering, backend)
        except ValueError as error:
            if "does not support this training run" not in str(error) or backend in ("auto", "reference"):
                raise
            continue
        torch.testing.assert_close(found, expected, rtol=1e-9, atol=1e-12)
