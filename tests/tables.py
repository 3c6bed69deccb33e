"""What there is to test: every unit, every coupling, and small random machines made of all their pairs.

A new unit or coupling is one row in `UNITS` or `COUPLINGS`. Each row holds the definition, written out a
second time and as plainly as possible, for the tests to compare with; the tests of units, couplings, machines,
samplers, likelihoods, gradients, saved files and ONNX files run over all rows.
"""

import functools
import itertools
import math
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
    couplings,
    units,
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
    probability: Callable[[Tensor, Tensor], Tensor] | None  # of a site's values (m, entries), given its mean (entries,)
    variants: dict[str, Callable[[tuple[int, ...]], dict[str, Any]]]  # arguments for a shape; the first meets all
    base: Callable[[Tensor], Tensor] = torch.zeros_like  # energy of each entry beyond that of `Own`
    weights: float = 0.7  # size of the random weights around such a layer
    invalid: tuple[float, ...] = ()  # finite numbers that no entry can be


def _linear_energy(unit: Unit) -> Own:
    bias = unit.bias.expand(unit.shape).reshape(-1)
    return Own(bias, torch.zeros_like(bias), torch.zeros_like(bias).sum(), torch.ones_like(bias))


def log_variance(unit: Gaussian) -> Tensor:
    """Return the log-variances, the sum of their parameters: one, or one per axis."""
    return torch.stack(torch.broadcast_tensors(*[p for name, p in unit.named_parameters() if name != "bias"])).sum(0)


def _quadratic_energy(unit: Gaussian) -> Own:
    bias = unit.bias.expand(unit.shape).reshape(-1)
    variance = log_variance(unit).exp().expand(unit.shape).reshape(-1)
    return Own(bias / variance, 1 / variance, (bias**2 / variance).sum() / 2, variance.sqrt())


UNITS = {
    "bernoulli": UnitRow(
        units.Bernoulli,
        _linear_energy,
        lambda width: torch.tensor([[0.0], [1.0]], dtype=torch.float64),
        lambda values, mean: torch.where(values == 1, mean, 1 - mean)[:, 0],
        {"bernoulli": lambda shape: {}, "bernoulli-tied": lambda shape: {"bias_shape": (1, *shape[1:])}},
        invalid=(-0.5, 1.5),
    ),
    "gaussian": UnitRow(
        units.Gaussian,
        _quadratic_energy,
        lambda width: None,
        None,
        {
            "gaussian-learned": lambda shape: {"learn_variance": True},
            "gaussian-axes": lambda shape: {"learn_variance": "axes"},
            "gaussian": lambda shape: {},
            "gaussian-tied": lambda shape: {"learn_variance": True, "bias_shape": (1, *shape[1:])},
        },
    ),
    "categorical": UnitRow(
        units.Categorical,
        _linear_energy,
        lambda width: torch.eye(width, dtype=torch.float64),
        lambda values, mean: values @ mean,
        {
            "categorical": lambda shape: {},
            "categorical-tied": lambda shape: {"bias_shape": (*(1 for _ in shape[1:]), shape[-1])},
            "categorical-padded": lambda shape: {"padded": True},
        },
        invalid=(-1, 0.5, 2),
    ),
    "counts": UnitRow(
        units.Counts,
        _linear_energy,
        lambda width: torch.tensor(
            [x for x in itertools.product((2, 1, 0), repeat=width) if sum(x) == 2], dtype=torch.float64
        ),
        lambda values, mean: 2 * torch.prod((mean / 2) ** values / torch.exp(torch.lgamma(values + 1)), 1),
        {"counts-of-2": lambda shape: {"length": 2}},
        base=lambda x: torch.lgamma(x + 1) - x * math.log(2) / 2,  # all orders of the 2 words are one state
        invalid=(-1,),
    ),
    "poisson": UnitRow(
        units.Poisson,
        _linear_energy,
        lambda width: torch.arange(48, dtype=torch.float64)[:, None],  # beyond lies less than 1e-13 in these tests
        lambda values, mean: torch.exp(torch.xlogy(values, mean) - mean - torch.lgamma(values + 1))[:, 0],
        {"poisson": lambda shape: {}, "poisson-tied": lambda shape: {"bias_shape": (1, *shape[1:])}},
        base=lambda x: torch.lgamma(x + 1),
        weights=0.25,
        invalid=(-1, 0.5),
    ),
}

# Units whose draws follow no energy, so that only draws, means and files can be tested: what one normal number
# makes of one entry in the total field t.
DRAWN_UNITS: dict[str, tuple[type[Unit], Callable[[Any, Any], Any]]] = {
    "rectified": (Rectified, lambda t, normal: np.maximum(0, t + normal / np.sqrt(1 + np.exp(-t))))
}

# Units whose energy is not quadratic: `units/test_whitened.py` and `units/test_double_rectified.py` compare them with
# their definitions, and all other tests of single units run on them.
OTHER_UNITS: dict[str, Callable[[tuple[int, ...]], Unit]] = {
    "drelu": units.DoubleRectified,
    "drelu-tied": lambda shape: units.DoubleRectified(shape, bias_shape=(1, *shape[1:])),
    "whitened": lambda shape: units.WhitenedMixture(shape, n_components=2, n_contrasts=2),
    "whitened-level": lambda shape: units.WhitenedMixture(
        shape, n_components=3, n_contrasts=1, gate=False, level=True, means="shared"
    ),
}

VARIANTS = {
    variant: functools.partial(lambda row, arguments, shape: row.unit(shape, **arguments(shape)), row, arguments)
    for row in UNITS.values()
    for variant, arguments in row.variants.items()
}

# -- couplings ------------------------------------------------------------------------------------------


Example = tuple[dict[str, Any], tuple[int, ...], tuple[int, ...]]  # arguments, visible shape, hidden shape


class CouplingRow(NamedTuple):
    coupling: type[Coupling]
    full: Callable[[Any], Tensor]  # (*hidden shape, *visible shape), by einsum
    entry: Callable[..., float]  # one entry of W, given both indices
    balanced: Callable[[Any], list[list[Tensor]]]  # lists of arrays that have equal norms after balance()
    examples: list[Example]
    sizes: list[tuple[*Example, int]]  # with the number of parameters
    starts: list[Example]  # large enough for the spread of the entries of W to be seen


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


def _mpo_entry(c: Any, k: tuple[int, ...], i: tuple[int, ...]) -> float:
    return functools.reduce(torch.matmul, [core[:, a, b, :] for core, a, b in zip(c.factors, k, i, strict=True)]).item()


COUPLINGS = {
    "dense": CouplingRow(
        couplings.Dense,
        _dense,
        lambda c, k, i: c.weight.reshape(*c.hidden_shape, *c.visible_shape)[*k, *i],
        lambda c: [[c.weight]],
        [({}, (2, 2), (3,)), ({}, (3,), (3, 2))],
        [({}, (3, 4), (5, 2), 12 * 10)],
        [({}, (20, 20), (20, 20))],
    ),
    "kronecker": CouplingRow(
        couplings.Kronecker,
        _kronecker,
        lambda c, k, i: sum(
            math.prod(factor[r, a, b] for factor, a, b in zip(c.factors, k, i, strict=True)) for r in range(c.rank)
        ),
        lambda c: [[f[r] for f in c.factors if f.requires_grad] for r in range(c.rank)],
        [
            ({"rank": 1}, (3,), (2,)),
            ({"rank": 1}, (2,), (3,)),
            ({"rank": 1}, (2, 3), (3, 2)),
            ({"rank": 1}, (3, 2), (2, 2)),
            ({"rank": 3}, (2, 3), (2, 2)),
            ({"rank": 1}, (2, 1, 3), (1, 2, 2)),
            ({"rank": 3}, (2, 2, 1), (1, 2, 2)),
            ({"rank": 2, "summed_modes": (0,)}, (2, 2), (1, 3)),
        ],
        [
            ({}, (28, 28), (25, 25), 28 * 25 * 2),
            ({"rank": 4}, (5, 6, 7), (4, 3, 2), 4 * (20 + 18 + 14)),
            ({"rank": 2, "summed_modes": (0,)}, (5, 6), (1, 3), 2 * 18),
        ],
        [
            ({"rank": 1}, (20, 20), (20, 20)),
            ({"rank": 5}, (20, 20), (20, 20)),
            ({"rank": 3, "summed_modes": (1,)}, (20, 20), (20, 20)),
        ],
    ),
    "cp": CouplingRow(
        couplings.CP,
        _cp,
        lambda c, k, i: sum(
            c.hidden_factor[k[0], r] * math.prod(f[a, r] for f, a in zip(c.visible_factors, i, strict=True))
            for r in range(c.rank)
        ),
        lambda c: [[f[:, r] for f in (c.hidden_factor, *c.visible_factors)] for r in range(c.rank)],
        [({"rank": 2}, (3,), (2,)), ({"rank": 1}, (2, 3), (3,)), ({"rank": 2}, (2, 1, 3), (3,))],
        [({"rank": 3}, (5, 6, 7), (9,), 3 * (5 + 6 + 7 + 9))],
        [({"rank": 4}, (15, 12, 9), (30,))],
    ),
    "mpo": CouplingRow(
        couplings.MPO,
        _mpo,
        _mpo_entry,
        lambda c: [list(c.factors)],
        [
            ({"bond": 3}, (3,), (2,)),
            ({"bond": 1}, (3, 2), (2, 2)),
            ({"bond": 3}, (2, 3), (2, 2)),
            ({"bond": (2, 3)}, (2, 1, 3), (1, 2, 2)),
            ({"bond": (3, 2)}, (3, 1, 2), (2, 2, 1)),
        ],
        [({"bond": (2, 3)}, (5, 6, 7), (4, 3, 2), 20 * 2 + 18 * 6 + 14 * 3)],
        [({"bond": 4}, (20, 20), (20, 20)), ({"bond": (2, 3)}, (9, 9, 9), (9, 9, 9))],
    ),
    "tucker": CouplingRow(
        couplings.Tucker,
        lambda c: functools.reduce(
            lambda W, factor: torch.tensordot(W, factor[0], dims=([1], [0])),
            c.compression.factors,
            c.core.weight.reshape(-1, *c.core.visible_shape),
        ),
        lambda c, k, i: sum(
            c.core.dense()[*k, *r] * math.prod(f[0, a, b] for f, a, b in zip(c.compression.factors, r, i, strict=True))
            for r in np.ndindex(*c.core.visible_shape)
        ),
        lambda c: [[c.core.weight, *c.compression.factors]],
        [({"rank": 2}, (3,), (2,)), ({"rank": (2, 1)}, (2, 3), (2, 2)), ({"rank": 2}, (2, 1, 3), (3,))],
        [({"rank": (2, 3, 4)}, (5, 6, 7), (4, 2), 8 * 24 + 10 + 18 + 28)],
        [({"rank": 6}, (20, 20), (20, 20)), ({"rank": 4}, (9, 8, 7), (30,))],
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
def randomize(machine: BoltzmannMachine, rng: np.random.Generator, size: float | None = None) -> BoltzmannMachine:
    """Draw all parameters, frozen variances too, in float64; Gaussian layers are kept bounded."""
    machine.double()
    layers = (*machine.layers.values(), machine.hidden)
    if size is None:
        size = min(UNITS[unit.name].weights if unit.name in UNITS else 0.7 for unit in layers)
    for unit in layers:
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


def _can_be_listed(visible: str, hidden: str, connected: str) -> bool:
    """Whether two kinds of units may face each other, and neither side has too many states to list."""
    sides = [VARIANTS[kind](shape) for kind, shape in zip((visible, hidden), CONNECTED[connected][1:], strict=True)]
    values = [UNITS[unit.name].site_values(unit.shape[-1]) for unit in sides]
    states = [1 if each is None else len(each) ** unit.n_sites for unit, each in zip(sides, values, strict=True)]
    return max(states) <= 4096 and not any(a.unsupported_reason(b) for a, b in (sides, sides[::-1]))


# Counts meet couplings as categorical units do: like the other variants, they change the units alone.
_EVERY_KIND = [next(iter(row.variants)) for name, row in UNITS.items() if name != "counts"]
_MACHINES: dict[str, Callable[[], BoltzmannMachine]] = {
    f"{visible} | {hidden} | {connected}": functools.partial(_pair, visible, hidden, connected)
    for connected in CONNECTED
    for visible, hidden in itertools.product(_EVERY_KIND, _EVERY_KIND)
    if _can_be_listed(visible, hidden, connected)
}
# The other variants change the units alone, so one structured coupling is enough for each pair.
_MACHINES |= {
    f"{visible} | {hidden} | {connected}": functools.partial(_pair, visible, hidden, connected)
    for connected in ["kronecker(rank=3) (2, 3)->(2, 2)"]
    for visible, hidden in itertools.product(VARIANTS, VARIANTS)
    if hidden not in ("categorical-padded", "counts-of-2") and not {visible, hidden} <= set(_EVERY_KIND)
    if _can_be_listed(visible, hidden, connected)
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
    return randomize(_MACHINES[name](), generator(name))


def random_layer(unit: Unit, n: int, rng: np.random.Generator, padding: bool = False) -> Tensor:
    """n states of one layer; with padding, every other sample of a padded layer ends in a row of zeros."""
    width = unit.shape[-1] if unit.entry_modes else 1
    values = UNITS[unit.name].site_values(width) if unit.name in UNITS else None
    if values is None:
        return torch.from_numpy(1.5 * rng.standard_normal((n, *unit.shape)))
    values = values[:6]  # unlikely values say little
    chosen = values[torch.from_numpy(rng.integers(len(values), size=(n, int(np.prod(unit.shape)) // width)))]
    if padding and getattr(unit, "padded", False):
        chosen[::2, -1] = 0
    return chosen.reshape(n, *unit.shape)


def random_states(
    machine: BoltzmannMachine, n: int, rng: np.random.Generator, padding: bool = False
) -> dict[str, Tensor]:
    """n states of every visible layer."""
    return {name: random_layer(unit, n, rng, padding) for name, unit in machine.layers.items()}
