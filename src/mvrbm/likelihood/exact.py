"""Exact computation of log Z by enumeration of either the hidden or the visible states.

Gaussian layers are integrated out in closed form.
"""

import itertools
import math
from collections.abc import Iterator

import torch
from torch import Tensor

from mvrbm.machine import BoltzmannMachine, Visible
from mvrbm.sampling import Layers, Masks
from mvrbm.units.base import Unit, sum_sites

#: Maximum number of states to enumerate.
MOST_STATES = 2**25
# Maximum number of entries in memory at once during enumeration (32 MB in float64).
_CHUNK_ENTRIES = 2**22
# Maximum number of entries in a Gaussian hidden layer that is integrated out with one matrix factorization.
_LARGEST_SOLVE = 4096


@torch.no_grad()
def log_partition(machine: BoltzmannMachine, *, clamp: Visible | None = None, mask: Visible | None = None) -> Tensor:
    r"""Compute :math:`\log Z` exactly.

    The function enumerates the states of the hidden layer or of the visible layers, whichever are fewer, and sums over
    the remaining layers in closed form.

    Parameters
    ----------
    machine : BoltzmannMachine
        Model whose log Z is computed.
    clamp : Tensor or mapping of str to Tensor, optional
        One visible state, with each layer of shape (1, *layer shape). The known entries of this state are fixed.
    mask : Tensor or mapping of str to Tensor, optional
        True where an entry of `clamp` is known. Padding is always treated as known.

    Returns
    -------
    Tensor
        Scalar tensor of dtype float64.

    Raises
    ------
    ValueError
        If both the hidden layer and the visible layers have more than 2^25 states.
    """
    machine.check_bounded()
    fixed, known = as_clamp(machine, clamp, mask)
    free = {name: _free_sites(unit, known[name]) for name, unit in machine.layers.items()}
    reals = [name for name, unit in machine.layers.items() if unit.gaussian and len(free[name])]
    if machine.hidden.gaussian and reals:
        return _sum_over_discrete_layers(machine, fixed, known, free, reals)
    bits_visible = sum(_bits(unit, len(free[name])) for name, unit in machine.layers.items())
    bits_hidden = _bits(machine.hidden, machine.hidden.n_sites)
    _check_reach(min(bits_visible, bits_hidden))
    total = _LogSum()
    if bits_hidden <= bits_visible:
        zeros = machine.like.new_zeros((1, *machine.hidden.shape))
        for y in _states(machine, machine.hidden, torch.arange(machine.hidden.n_sites), zeros):
            summed = clamped_log_normalizer(machine, machine.visible_fields(y), fixed, known)
            total.add(summed - machine.hidden.energy(y))
        return total.value
    for layers in _visible_states(machine, fixed, free, skip=[]):
        total.add(-machine.free_energy(layers, check=False))
    return total.value


def as_clamp(
    machine: BoltzmannMachine, clamp: Visible | None, mask: Visible | None
) -> tuple[dict[str, Tensor], dict[str, Tensor | None]]:
    """Return the clamped visible state and the masks of its fixed entries, both keyed by layer name."""
    if clamp is None:
        if mask is not None:
            raise ValueError("mask requires clamp, because the mask marks which entries of clamp are known")
        zeros = {name: machine.like.new_zeros((1, *unit.shape)) for name, unit in machine.layers.items()}
        return zeros, dict.fromkeys(zeros)
    fixed = machine.as_layers(clamp)
    if any(len(array) != 1 for array in fixed.values()):
        raise ValueError("clamp must be one visible state, with each layer of shape (1, *layer shape)")
    return fixed, machine.as_masks(mask, fixed)


def site_mask(unit: Unit, mask: Tensor) -> Tensor:
    r"""Convert a mask over entries to a mask over sites: (n, \*shape) -> (n, \*site_shape)."""
    return mask.reshape(len(mask), *unit.site_shape, -1)[..., 0]


def _free_sites(unit: Unit, mask: Tensor | None) -> Tensor:
    """Return the flat indices of the sites that are not fixed."""
    if mask is None:
        return torch.arange(unit.n_sites)
    return torch.nonzero(~site_mask(unit, mask)[0].reshape(-1).cpu()).reshape(-1)


def _bits(unit: Unit, n_sites: int) -> float:
    """Return the base-2 logarithm of the number of joint states of `n_sites` sites."""
    return n_sites * math.log2(unit.levels) if n_sites else 0.0


def _check_reach(bits: float) -> None:
    """Raise ValueError if ``2**bits`` exceeds the maximum number of states to enumerate."""
    if bits > math.log2(MOST_STATES):
        raise ValueError(
            f"exact log Z would require a sum over 2^{bits:.0f} states, but the maximum is "
            f"2^{math.log2(MOST_STATES):.0f}; use annealed_importance_sampling instead"
        )


class _LogSum:
    """Log-sum-exp accumulated in float64 over successive calls to `add`."""

    def __init__(self) -> None:
        self.value = torch.tensor(-math.inf, dtype=torch.float64)

    def add(self, logs: Tensor) -> None:
        self.value = torch.logaddexp(self.value, torch.logsumexp(logs.double().cpu(), 0))


def _states(machine: BoltzmannMachine, unit: Unit, sites: Tensor, base: Tensor) -> Iterator[Tensor]:
    """Yield all states of the given sites of a layer, in chunks of shape (m, *shape).

    All other sites keep their values from `base`, which has shape (1, *shape).
    """
    if len(sites) == 0:
        yield base
        return
    entries = sum(math.prod(each.shape) for each in (*machine.layers.values(), machine.hidden))
    levels, piece = int(unit.levels), max(1, _CHUNK_ENTRIES // entries)
    powers = torch.tensor([levels**site for site in range(len(sites))], dtype=torch.int64)
    count = levels ** len(sites)
    for start in range(0, count, piece):
        numbers = torch.arange(start, min(start + piece, count))
        digits = torch.div(numbers[:, None], powers, rounding_mode="floor") % levels
        flat = base.reshape(1, unit.n_sites, *unit.entry_shape).repeat(len(digits), 1, *(1 for _ in unit.entry_shape))
        flat[:, sites] = unit.decode(digits.to(base.device)).to(base.dtype)
        yield flat.reshape(-1, *unit.shape)


def _visible_states(
    machine: BoltzmannMachine, fixed: Layers, free: dict[str, Tensor], skip: list[str]
) -> Iterator[dict[str, Tensor]]:
    """Yield all joint states of the visible layers in chunks. The layers in `skip` keep their values from `fixed`."""
    # Enumerate the layer with the most states in chunks, and the other layers one state at a time.
    names = [name for name in machine.layers if name not in skip]
    names.sort(key=lambda name: _bits(machine.layers[name], len(free[name])))
    *others, last = names or [skip[0]]
    rows = [torch.cat(list(_states(machine, machine.layers[name], free[name], fixed[name]))) for name in others]
    for states in itertools.product(*rows):
        chosen = {name: row[None] for name, row in zip(others, states, strict=True)}
        pieces = _states(machine, machine.layers[last], free[last], fixed[last]) if names else [fixed[last]]
        for piece in pieces:
            layers = {**fixed, **chosen, last: piece}
            yield {name: layers[name].expand(len(piece), *layers[name].shape[1:]) for name in machine.layers}


def clamped_log_normalizer(machine: BoltzmannMachine, fields: Layers, fixed: Layers, known: Masks) -> Tensor:
    """Sum the log-normalizers of the visible layers, with the known sites fixed at their values in `fixed`.

    The fields have shape (m, *layer shape), and the result has shape (m,).
    """
    total = machine.like.new_zeros(())
    for name, unit in machine.layers.items():
        sites = unit.site_log_normalizer(fields[name])
        mask = known[name]
        if mask is not None:
            pull = unit.statistic(fixed[name]) * fields[name]
            held = pull.reshape(len(pull), *unit.site_shape, -1).sum(-1) - unit.site_energy(fixed[name])
            sites = torch.where(site_mask(unit, mask), held, sites)
        total = total + sum_sites(sites)
    return total


def _sum_over_discrete_layers(
    machine: BoltzmannMachine, fixed: Layers, known: Masks, free: dict[str, Tensor], reals: list[str]
) -> Tensor:
    r"""Compute log Z for a machine with Gaussian visible and hidden layers.

    The states of all other visible layers are enumerated. For each state, the integral over the Gaussian layers is
    computed in closed form.

    In units of standard deviations, the free Gaussian entries :math:`t = x / s` and the hidden entries
    :math:`u = y / s_h` have the energy :math:`|t - b|^2 / 2 + |u - c|^2 / 2 - u^\top (W t + g)`, where `g` is the field
    from all other entries. Integrating over `t` gives a Gaussian over `u` with precision :math:`A = I - W W^\top`.
    """
    hidden = machine.hidden
    others = {name: sites for name, sites in free.items() if name not in reals}
    _check_reach(sum(_bits(machine.layers[name], len(sites)) for name, sites in others.items()))
    n_hidden = math.prod(hidden.shape)
    if n_hidden > _LARGEST_SOLVE:
        raise ValueError(
            f"exact log Z for Gaussian layers would require factorizing a {n_hidden} x {n_hidden} matrix, but the "
            f"maximum size is {_LARGEST_SOLVE}; use annealed_importance_sampling instead"
        )
    like = machine.like.double()
    columns, location, log_widths, at_zero = [], [], [], dict(fixed)
    for name in reals:
        unit, sites = machine.layers[name], free[name]
        ones = torch.zeros(len(sites), math.prod(unit.shape)).to(machine.like)
        ones[torch.arange(len(sites)), sites] = 1
        columns.append(machine.links[name].to_hidden(ones.reshape(-1, *unit.shape)).flatten(1).T)
        scale = 1 / unit.inverse_scale
        location.append((unit.bias / scale).reshape(-1)[sites])
        log_widths.append(torch.log(scale).reshape(-1)[sites].sum())
        zeroed = fixed[name].clone().reshape(1, -1)
        zeroed[:, sites] = 0
        at_zero[name] = zeroed.reshape(1, *unit.shape)
    w, b = torch.cat(columns, 1).to(like), torch.cat(location).to(like)
    hidden_scale = (1 / hidden.inverse_scale).reshape(-1).to(like)
    c = (hidden.bias.expand(hidden.shape).reshape(-1) / hidden_scale).to(like)
    precision = torch.eye(n_hidden, dtype=like.dtype, device=like.device) - w @ w.T
    chol = torch.linalg.cholesky(precision)
    constant = (
        0.5 * (n_hidden + len(b)) * math.log(2 * math.pi)
        - torch.log(chol.diagonal()).sum()
        + torch.log(hidden_scale).sum()
        + torch.stack(log_widths).to(like).sum()
        - 0.5 * (c @ c)
    )
    total = _LogSum()
    for layers in _visible_states(machine, at_zero, free, skip=reals):
        other = machine.hidden_field(layers).flatten(1).to(like)
        pull = c + other + w @ b
        solved = torch.cholesky_solve(pull.T, chol).T
        # `own_energy` includes b^2 / 2 for the integrated entries, which are zero here. The integral cancels this term.
        own = machine.own_energy(layers).to(like) - 0.5 * (b @ b)
        total.add(constant + 0.5 * (pull * solved).sum(1) - own)
    return total.value
