"""What there is to test: every unit, every coupling, and small random machines made of all their pairs.

A new unit or coupling is one row in `UNITS` or `COUPLINGS`. Each row holds the definition, written out a
second time and as plainly as possible, for the tests to compare with.
"""

import functools
import itertools
import zlib
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from mvrbm import (
    CP,
    MPO,
    Bernoulli,
    BoltzmannMachine,
    Categorical,
    Coupling,
    Dense,
    Gaussian,
    Kronecker,
    Rectified,
    Unit,
)
from mvrbm.models import replicated_softmax

# -- units ----------------------------------------------------------------------------------------------


class Own(NamedTuple):
    """A layer's own energy, sum of (curvature x^2 / 2 - linear x) + constant, and T(x) = x / scale."""

    linear: Tensor
    curvature: Tensor
    constant: Tensor
    scale: Tensor


class UnitRow(NamedTuple):
    unit: type[Unit]
    own: Callable[[Any], Own]
    site_values: Callable[[int], Tensor | None]  # what one site of so many entries can be; None: any real number
    variants: dict[str, Callable[[tuple[int, ...]], dict[str, Any]]]  # arguments for a shape


def _linear_energy(unit: Unit) -> Own:
    bias = unit.bias.expand(unit.shape).reshape(-1)
    return Own(bias, torch.zeros_like(bias), torch.zeros_like(bias).sum(), torch.ones_like(bias))


def _quadratic_energy(unit: Gaussian) -> Own:
    bias = unit.bias.expand(unit.shape).reshape(-1)
    variance = unit.log_variance.exp().expand(unit.shape).reshape(-1)
    return Own(bias / variance, 1 / variance, (bias**2 / variance).sum() / 2, variance.sqrt())


UNITS = {
    "bernoulli": UnitRow(
        Bernoulli,
        _linear_energy,
        lambda width: torch.tensor([[0.0], [1.0]], dtype=torch.float64),
        {"bernoulli": lambda shape: {}, "bernoulli-tied": lambda shape: {"bias_shape": (1, *shape[1:])}},
    ),
    "gaussian": UnitRow(
        Gaussian,
        _quadratic_energy,
        lambda width: None,
        {
            "gaussian": lambda shape: {},
            "gaussian-learned": lambda shape: {"learn_variance": True},
            "gaussian-tied": lambda shape: {"learn_variance": True, "bias_shape": (1, *shape[1:])},
        },
    ),
    "categorical": UnitRow(
        Categorical,
        _linear_energy,
        lambda width: torch.eye(width, dtype=torch.float64),
        {
            "categorical": lambda shape: {},
            "categorical-tied": lambda shape: {"bias_shape": (*(1 for _ in shape[1:]), shape[-1])},
            "categorical-padded": lambda shape: {"padded": True},
        },
    ),
}

# Units whose draws follow no energy, so that only draws, means and files can be tested: what one normal number
# makes of one entry in the total field t.
DRAWN_UNITS: dict[str, tuple[type[Unit], Callable[[Any, Any], Any]]] = {
    "rectified": (Rectified, lambda t, normal: np.maximum(0, t + normal / np.sqrt(1 + np.exp(-t)))),
}

VARIANTS = {
    variant: functools.partial(lambda row, arguments, shape: row.unit(shape, **arguments(shape)), row, arguments)
    for row in UNITS.values()
    for variant, arguments in row.variants.items()
}

# -- couplings ------------------------------------------------------------------------------------------


class CouplingRow(NamedTuple):
    coupling: type[Coupling]
    full: Callable[[Any], Tensor]  # (*hidden shape, *visible shape)
    examples: list[tuple[dict[str, Any], tuple[int, ...], tuple[int, ...]]]  # arguments, visible, hidden


def _dense(coupling: Dense) -> Tensor:
    return coupling.weight.reshape(*coupling.hidden_shape, *coupling.visible_shape)


def _kronecker(coupling: Kronecker) -> Tensor:
    order = len(coupling.visible_shape)
    terms = ",".join(f"r{'abcd'[d]}{'ijkl'[d]}" for d in range(order))
    return torch.einsum(f"{terms}->{'abcd'[:order]}{'ijkl'[:order]}", *coupling.factors)


def _cp(coupling: CP) -> Tensor:
    modes = "ijkl"[: len(coupling.visible_shape)]
    terms = ",".join(f"{mode}r" for mode in modes)
    return torch.einsum(f"ar,{terms}->a{modes}", coupling.hidden_factor, *coupling.visible_factors)


def _mpo(coupling: MPO) -> Tensor:
    order = len(coupling.visible_shape)
    terms = ",".join(f"{'vwxyz'[d]}{'abcd'[d]}{'ijkl'[d]}{'vwxyz'[d + 1]}" for d in range(order))
    return torch.einsum(f"{terms}->{'abcd'[:order]}{'ijkl'[:order]}", *coupling.factors)


COUPLINGS = {
    "dense": CouplingRow(Dense, _dense, [({}, (2, 2), (3,)), ({}, (3,), (3, 2))]),
    "kronecker": CouplingRow(
        Kronecker,
        _kronecker,
        [
            ({"rank": 1}, (3,), (2,)),
            ({"rank": 3}, (2,), (3,)),
            ({"rank": 1}, (2, 3), (3, 2)),
            ({"rank": 1}, (3, 2), (2, 2)),
            ({"rank": 3}, (2, 3), (2, 2)),
            ({"rank": 1}, (2, 1, 3), (1, 2, 2)),
            ({"rank": 3}, (2, 2, 1), (1, 2, 2)),
            ({"rank": 2, "summed_modes": (0,)}, (2, 2), (1, 3)),
        ],
    ),
    "cp": CouplingRow(
        CP,
        _cp,
        [({"rank": 2}, (3,), (2,)), ({"rank": 1}, (2, 3), (3,)), ({"rank": 2}, (2, 1, 3), (3,))],
    ),
    "mpo": CouplingRow(
        MPO,
        _mpo,
        [
            ({"bond": 3}, (3,), (2,)),
            ({"bond": 1}, (3, 2), (2, 2)),
            ({"bond": 3}, (2, 3), (2, 2)),
            ({"bond": (2, 3)}, (2, 1, 3), (1, 2, 2)),
            ({"bond": (3, 2)}, (3, 1, 2), (2, 2, 1)),
        ],
    ),
}

CONNECTED = {
    f"{name}({', '.join(f'{k}={v}' for k, v in arguments.items())}) {visible}->{hidden}": (
        functools.partial(lambda row, arguments: row.coupling(**arguments), row, arguments),
        visible,
        hidden,
    )
    for name, row in COUPLINGS.items()
    for arguments, visible, hidden in row.examples
}


def full_matrix(coupling: Coupling) -> Tensor:
    """W by its definition: (hidden size, visible size)."""
    full = COUPLINGS[coupling.name].full(coupling)
    return full.reshape(int(np.prod(coupling.hidden_shape)), -1)


# -- machines -------------------------------------------------------------------------------------------


def generator(name: str) -> np.random.Generator:
    """Random numbers that depend on a name alone."""
    return np.random.default_rng(zlib.crc32(name.encode()))


@torch.no_grad()
def randomise(machine: BoltzmannMachine, rng: np.random.Generator, size: float = 0.7) -> BoltzmannMachine:
    """Draw all parameters, frozen variances too, in float64; Gaussian layers are kept bounded."""
    machine.double()
    for unit in (*machine.layers.values(), machine.hidden):
        for parameter in unit.parameters():
            parameter.copy_(torch.from_numpy(0.6 * rng.standard_normal(parameter.shape)))
    for coupling in machine.links.values():
        for parameter in coupling.parameters():
            if parameter.requires_grad:
                parameter.copy_(torch.from_numpy(size * rng.standard_normal(parameter.shape)))
    facing = [machine.links[name] for name, unit in machine.layers.items() if isinstance(unit, Gaussian)]
    if facing and isinstance(machine.hidden, Gaussian):
        norm = np.linalg.norm(np.concatenate([full_matrix(link).numpy() for link in facing], 1), 2)
        for link in facing:
            next(p for p in link.parameters() if p.requires_grad).mul_(0.6 / norm)
    return machine


def _pair(visible: str, hidden: str, connected: str) -> BoltzmannMachine:
    coupling, visible_shape, hidden_shape = CONNECTED[connected]
    return BoltzmannMachine(VARIANTS[visible](visible_shape), VARIANTS[hidden](hidden_shape), coupling())


_EVERY_KIND = ["bernoulli", "gaussian-learned", "categorical"]
_MACHINES: dict[str, Callable[[], BoltzmannMachine]] = {
    f"{visible} | {hidden} | {connected}": functools.partial(_pair, visible, hidden, connected)
    for connected in CONNECTED
    for visible, hidden in itertools.product(_EVERY_KIND, _EVERY_KIND)
}
# The other variants change the units alone, so one structured coupling is enough for each pair.
_MACHINES |= {
    f"{visible} | {hidden} | {connected}": functools.partial(_pair, visible, hidden, connected)
    for connected in ["kronecker(rank=3) (2, 3)->(2, 2)"]
    for visible, hidden in itertools.product(VARIANTS, VARIANTS)
    if hidden != "categorical-padded" and not {visible, hidden} <= set(_EVERY_KIND)
}
_MACHINES |= {
    "image and label": lambda: BoltzmannMachine(
        {"image": Bernoulli((2, 2)), "label": Categorical(3)},
        Bernoulli((2, 2)),
        {"image": Kronecker(), "label": Dense()},
    ),
    "three kinds over bits": lambda: BoltzmannMachine(
        {"signal": Gaussian((2, 2), learn_variance=True), "bits": Bernoulli((2, 1)), "word": Categorical((1, 3))},
        Bernoulli((2, 2)),
        {"signal": Kronecker(rank=3), "bits": MPO(bond=2), "word": Dense()},
    ),
    "three kinds over reals": lambda: BoltzmannMachine(
        {"signal": Gaussian(2, learn_variance=True), "bits": Bernoulli(3), "word": Categorical(3)},
        Gaussian(3, learn_variance=True),
        {"signal": CP(rank=2), "bits": Kronecker(), "word": Dense()},
    ),
    "three kinds over a category": lambda: BoltzmannMachine(
        {"signal": Gaussian((1, 2)), "bits": Bernoulli((2, 2)), "words": Categorical((2, 2), padded=True)},
        Categorical((2, 3)),
        {"signal": Kronecker(rank=2), "bits": MPO(bond=3), "words": Kronecker()},
    ),
    "two signals over reals": lambda: BoltzmannMachine(
        {"left": Gaussian((2, 2)), "right": Gaussian((1, 2), learn_variance=True)},
        Gaussian((2, 2)),
        {"left": Kronecker(), "right": MPO(bond=2)},
    ),
    "replicated softmax": lambda: replicated_softmax(3, 3, 4),
}

MACHINES = list(_MACHINES)
MULTIMODAL = [name for name in MACHINES if "|" not in name and name != "replicated softmax"]


def machine_named(name: str) -> BoltzmannMachine:
    """A machine with parameters that depend on its name alone."""
    return randomise(_MACHINES[name](), generator(name))


def random_layer(unit: Unit, n: int, rng: np.random.Generator, padding: bool = False) -> Tensor:
    """n states of one layer; with padding, every other sample of a padded layer ends in a row of zeros."""
    width = unit.shape[-1] if unit.entry_modes else 1
    values = UNITS[unit.name].site_values(width)
    if values is None:
        return torch.from_numpy(1.5 * rng.standard_normal((n, *unit.shape)))
    chosen = values[torch.from_numpy(rng.integers(len(values), size=(n, int(np.prod(unit.shape)) // width)))]
    if padding and getattr(unit, "padded", False):
        chosen[::2, -1] = 0
    return chosen.reshape(n, *unit.shape)


def random_states(
    machine: BoltzmannMachine, n: int, rng: np.random.Generator, padding: bool = False
) -> dict[str, Tensor]:
    """n states of every visible layer."""
    return {name: random_layer(unit, n, rng, padding) for name, unit in machine.layers.items()}
