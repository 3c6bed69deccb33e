"""Likelihoods: exact log Z of small machines, annealed importance sampling, log-likelihood and pseudo-likelihood.

A *clamp* fixes some visible entries: log Z is then the logarithm of the sum over all states that agree with them. A
clamp of padding gives the log Z of documents of one length.
"""

import itertools
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

import torch
from torch import Tensor

from mvrbm.machine import BoltzmannMachine, Visible
from mvrbm.random import RandomSource
from mvrbm.sampling import Layers, Masks, TemperedPath, gibbs_step, keep_known
from mvrbm.units.base import Unit, sum_sites
from mvrbm.validation import whole_number

__all__ = [
    "AnnealedEstimate",
    "PseudoLikelihood",
    "annealed_importance_sampling",
    "log_likelihood",
    "log_partition",
    "pseudo_log_likelihood",
]

MOST_STATES = 2**25
_CHUNK_ENTRIES = 2**22  # numbers in memory at once during enumeration: 32 MB in float64
_LARGEST_SOLVE = 4096  # entries of a Gaussian hidden layer that is integrated out by one matrix
_PSEUDO_BUDGET = 2048  # values of sites, over all sites, that the default pseudo-likelihood of one sample sums over


# -- exact ------------------------------------------------------------------------------------------


@torch.no_grad()
def log_partition(machine: BoltzmannMachine, *, clamp: Visible | None = None, mask: Visible | None = None) -> Tensor:
    r"""Compute :math:`\log Z` exactly: enumerate the side with fewer states and sum the other side in closed form.

    Parameters
    ----------
    machine : BoltzmannMachine
        The model.
    clamp : Tensor or mapping of str to Tensor, optional
        One visible state, each layer (1, *layer shape), whose known entries are fixed.
    mask : Tensor or mapping of str to Tensor, optional
        True where an entry of `clamp` is known; padding always is.

    Returns
    -------
    Tensor
        A scalar, in float64.

    Raises
    ------
    ValueError
        If the smaller side has more than 2^25 states.
    """
    machine.check_bounded()
    fixed, known = _clamped(machine, clamp, mask)
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
            summed = _clamped_log_normaliser(machine, machine.visible_fields(y), fixed, known)
            total.add(summed - machine.hidden.energy(y))
        return total.value
    for layers in _visible_states(machine, fixed, free, skip=[]):
        total.add(-machine.free_energy(layers, check=False))
    return total.value


def _clamped(
    machine: BoltzmannMachine, clamp: Visible | None, mask: Visible | None
) -> tuple[dict[str, Tensor], dict[str, Tensor | None]]:
    """Return one visible state and which of its entries are fixed, both by layer."""
    if clamp is None:
        if mask is not None:
            raise ValueError("a mask needs clamp: it marks which of its entries are known")
        zeros = {name: machine.like.new_zeros((1, *unit.shape)) for name, unit in machine.layers.items()}
        return zeros, dict.fromkeys(zeros)
    fixed = machine.as_layers(clamp)
    if any(len(array) != 1 for array in fixed.values()):
        raise ValueError("clamp must be one visible state: each layer of shape (1, *layer shape)")
    return fixed, machine.as_masks(mask, fixed)


def _site_mask(unit: Unit, mask: Tensor) -> Tensor:
    return mask[..., 0] if unit.entry_modes else mask


def _free_sites(unit: Unit, mask: Tensor | None) -> Tensor:
    """Return the numbers of the sites that are not fixed."""
    if mask is None:
        return torch.arange(unit.n_sites)
    return torch.nonzero(~_site_mask(unit, mask)[0].reshape(-1).cpu()).reshape(-1)


def _bits(unit: Unit, n_sites: int) -> float:
    """Return the binary logarithm of the number of states of some sites."""
    return n_sites * math.log2(unit.levels) if n_sites else 0.0


def _check_reach(bits: float) -> None:
    """Raise ValueError if there are more than 2**bits states and these are too many."""
    if bits > math.log2(MOST_STATES):
        raise ValueError(
            f"exact log Z would sum 2^{bits:.0f} states, more than the 2^{math.log2(MOST_STATES):.0f} allowed: "
            "use annealed_importance_sampling instead"
        )


class _LogSum:
    """Logarithm of a sum of exponentials, computed in pieces."""

    def __init__(self) -> None:
        self.value = torch.tensor(-math.inf, dtype=torch.float64)

    def add(self, logs: Tensor) -> None:
        self.value = torch.logaddexp(self.value, torch.logsumexp(logs.double().cpu(), 0))


def _states(machine: BoltzmannMachine, unit: Unit, sites: Tensor, base: Tensor) -> Iterator[Tensor]:
    """Yield all states of some sites of a layer, with the others as in `base` (1, *shape), in pieces (m, *shape)."""
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
    """Yield all joint states of the visible layers in pieces; skipped layers stay at `fixed`."""
    # The layer with the most states is enumerated in pieces, the others one state at a time.
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


def _clamped_log_normaliser(machine: BoltzmannMachine, fields: Layers, fixed: Layers, known: Masks) -> Tensor:
    """Return the sum of the log-normalisers of the visible layers, where fixed sites have one value: (m,)."""
    total = machine.like.new_zeros(())
    for name, unit in machine.layers.items():
        sites = unit.site_log_normaliser(fields[name])
        mask = known[name]
        if mask is not None:
            pull = unit.statistic(fixed[name]) * fields[name]
            held = (pull.sum(-1) if unit.entry_modes else pull) - unit.site_energy(fixed[name])
            sites = torch.where(_site_mask(unit, mask), held, sites)
        total = total + sum_sites(sites)
    return total


def _sum_over_discrete_layers(
    machine: BoltzmannMachine, fixed: Layers, known: Masks, free: dict[str, Tensor], reals: list[str]
) -> Tensor:
    r"""Return log Z of machines with Gaussian visible and hidden layers, whose joint integral has a closed form.

    Measured in standard deviations, the free Gaussian entries :math:`t = x / s` and the hidden :math:`u = y / s_h` have
    energy :math:`|t - b|^2 / 2 + |u - c|^2 / 2 - u^\top (W t + g)`, where `g` is the field of all other entries. The
    integral over `t` leaves a Gaussian over `u` with precision :math:`A = I - W W^\top`.
    """
    hidden = machine.hidden
    others = {name: sites for name, sites in free.items() if name not in reals}
    _check_reach(sum(_bits(machine.layers[name], len(sites)) for name, sites in others.items()))
    n_hidden = math.prod(hidden.shape)
    if n_hidden > _LARGEST_SOLVE:
        raise ValueError(
            f"exact log Z of Gaussian layers would solve with a {n_hidden} x {n_hidden} matrix, more than "
            f"{_LARGEST_SOLVE} allowed: use annealed_importance_sampling instead"
        )
    like = machine.like.double()
    columns, location, log_widths, at_zero = [], [], [], dict(fixed)
    for name in reals:
        unit, sites = machine.layers[name], free[name]
        ones = torch.zeros(len(sites), math.prod(unit.shape)).to(machine.like)
        ones[torch.arange(len(sites)), sites] = 1
        columns.append(machine.links[name].to_hidden(ones.reshape(-1, *unit.shape)).flatten(1).T)
        scale = 1 / unit.inverse_scale()
        location.append((unit.bias / scale).reshape(-1)[sites])
        log_widths.append(torch.log(scale).reshape(-1)[sites].sum())
        zeroed = fixed[name].clone().reshape(1, -1)
        zeroed[:, sites] = 0
        at_zero[name] = zeroed.reshape(1, *unit.shape)
    w, b = torch.cat(columns, 1).to(like), torch.cat(location).to(like)
    hidden_scale = (1 / hidden.inverse_scale()).reshape(-1).to(like)
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
        # The own energy of the integrated entries, here at zero, is b^2 / 2, which their integral cancels.
        own = machine.own_energy(layers).to(like) - 0.5 * (b @ b)
        total.add(constant + 0.5 * (pull * solved).sum(1) - own)
    return total.value


# -- annealed importance sampling -------------------------------------------------------------------


@dataclass(frozen=True)
class AnnealedEstimate:
    """An estimate of log Z.

    Attributes
    ----------
    log_z : float
        The estimate: the logarithm of the mean importance weight, whose expectation is exactly Z.
    standard_error : float
        Standard error, from the variance of the weights.
    effective_samples : float
        Effective number of equal weights; if it is near 1, the standard error itself is unreliable.
    log_weights : Tensor (n_chains,)
        Logarithms of the weights.
    """

    log_z: float
    standard_error: float
    effective_samples: float
    log_weights: Tensor = field(repr=False)


@torch.no_grad()
def annealed_importance_sampling(
    machine: BoltzmannMachine,
    rng: RandomSource,
    *,
    n_chains: int = 100,
    n_steps: int = 1000,
    centre: Layers | None = None,
    clamp: Visible | None = None,
    mask: Visible | None = None,
) -> AnnealedEstimate:
    """Estimate log Z by annealing chains from independent units to the machine.

    Parameters
    ----------
    machine : BoltzmannMachine
        The model.
    rng : RandomSource
        Source of the draws.
    n_chains : int
        Number of chains; the standard error is inversely proportional to its square root.
    n_steps : int
        Number of temperatures; more of them reduce the variance of the weights.
    centre : mapping of str to Tensor, optional
        See :class:`~mvrbm.sampling.TemperedPath`. With a centre in one of several modes, chains that end in another
        mode are rare and have large weights, and the standard error is too small.
    clamp, mask : optional
        See :func:`log_partition`.

    Returns
    -------
    AnnealedEstimate
    """
    whole_number(n_chains, "n_chains", 2)
    whole_number(n_steps, "n_steps")
    machine.check_bounded()
    fixed, known = _clamped(machine, clamp, mask)
    path = TemperedPath(machine, centre)
    # At beta = 0 the layers are independent, so log Z is a sum over layers.
    log_z_base = _clamped_log_normaliser(machine, path.visible_base, fixed, known)
    log_z_base = log_z_base + machine.hidden.log_normaliser(path.hidden_base)
    masks = {name: None if held is None else held.expand(n_chains, *held.shape[1:]) for name, held in known.items()}
    start = {name: array.expand(n_chains, *array.shape[1:]) for name, array in fixed.items()}
    layers = keep_known(start, path.base_sample(n_chains, rng), masks)
    log_weights = log_z_base.double().expand(n_chains).clone()
    betas = torch.linspace(0, 1, n_steps + 1, dtype=torch.float64).tolist()
    for before, after in itertools.pairwise(betas):
        here, there = path.at(before).free_energy(layers), path.at(after).free_energy(layers)
        log_weights += (here - there).double()
        if after < 1:
            layers = gibbs_step(path.at(after), layers, rng, masks).visible
    log_z = torch.logsumexp(log_weights, 0) - math.log(n_chains)
    weights = torch.exp(log_weights - log_z)  # mean 1
    error, effective = weights.std() / math.sqrt(n_chains), weights.sum() ** 2 / (weights**2).sum()
    return AnnealedEstimate(float(log_z), float(error), float(effective), log_weights.cpu())


# -- pseudo-likelihood ------------------------------------------------------------------------------


@dataclass(frozen=True)
class PseudoLikelihood:
    """Sum over sites of log p(site | all other sites), for each sample.

    Attributes
    ----------
    values : Tensor (n,)
        The sums, scaled to all sites if only some were visited.
    sites, total_sites : int
        Number of visited sites and number of all sites.
    """

    values: Tensor
    sites: int
    total_sites: int

    @property
    def exact(self) -> bool:
        """Whether every site was visited."""
        return self.sites == self.total_sites


@torch.no_grad()
def pseudo_log_likelihood(
    machine: BoltzmannMachine, visible: Visible, *, n_sites: int | None = None, seed: int = 0, check: bool = True
) -> PseudoLikelihood:
    """Compute the pseudo-log-likelihood of each sample. The result is deterministic.

    Parameters
    ----------
    machine : BoltzmannMachine
        The model.
    visible : Tensor or mapping of str to Tensor
        Data, each layer (n, *layer shape). A grey Bernoulli entry is an average over ones and zeros.
    n_sites : int, optional
        Number of sites to visit. Default: all, or a subset with about two thousand values in all, such as a thousand
        binary entries. The subset depends only on the visible layers and `seed`, so that machines can be compared.
    seed : int
        Seed of the subset.
    check : bool
        Whether to check the data.
    """
    layers = machine.as_layers(visible, check=check)
    n = len(next(iter(layers.values())))
    places = [(name, site) for name, unit in machine.layers.items() for site in range(unit.n_sites)]
    if n_sites is None:
        # A site has two values, as many as there are categories, or a few dozen nodes or counts.
        n_sites = max(1, _PSEUDO_BUDGET // max(int(min(unit.levels, 64)) for unit in machine.layers.values()))
    visited = places
    if whole_number(n_sites, "n_sites") < len(places):
        chosen = RandomSource(seed).permutation(len(places))[:n_sites].tolist()
        visited = [places[i] for i in sorted(chosen)]
    towards = machine.hidden_field(layers)
    total = machine.like.new_zeros(n)
    for name, site in visited:
        total += _site_log_conditional(machine, layers, towards, name, site)
    return PseudoLikelihood(total * (len(places) / len(visited)), len(visited), len(places))


def _site_log_conditional(machine: BoltzmannMachine, layers: Layers, field: Tensor, name: str, site: int) -> Tensor:
    """Return log p(site | all other sites) of each sample, 0 for padding: (n,)."""
    unit = machine.layers[name]
    x = layers[name].reshape(-1, unit.n_sites, *unit.entry_shape)
    n = len(x)
    options = unit.alternatives(x[:, site], site, _reach(machine, layers, field, name, site))
    columns, scale = _site_columns(machine, name, site)
    scores = []
    for value in options.values:
        changed = x.clone()
        changed[:, site] = value
        step = ((value - x[:, site]).reshape(n, -1) * scale) @ columns.flatten(1)  # the statistic is linear
        energy = unit.energy(changed.reshape(n, *unit.shape))
        scores.append(machine.hidden.log_normaliser(field + step.reshape(field.shape)) - energy)
    score = torch.stack(scores)  # (a, n)
    conditional = (options.shares * score).sum(0) - torch.logsumexp(score + options.log_weights, 0)
    absent = unit.absent(layers[name])
    if absent is None:
        return conditional
    return conditional.masked_fill(_site_mask(unit, absent).reshape(n, -1)[:, site], 0)


def _site_columns(machine: BoltzmannMachine, name: str, site: int) -> tuple[Tensor, Tensor]:
    """Return the hidden field of a unit statistic of each entry of a site, and the statistic of a unit value."""
    unit = machine.layers[name]
    size = math.prod(unit.entry_shape)
    one = machine.like.new_zeros((size, unit.n_sites, size))
    one[torch.arange(size), site, torch.arange(size)] = 1
    columns = machine.links[name].to_hidden(one.reshape(size, *unit.shape))  # (entries, *hidden shape)
    return columns, unit.inverse_scale().reshape(unit.n_sites, size)[site]


def _reach(machine: BoltzmannMachine, layers: Layers, field: Tensor, name: str, site: int) -> tuple[Tensor, Tensor]:
    """Return the lowest and highest likely field on a site with infinitely many values: (n,) each."""
    unit, n = machine.layers[name], len(field)
    if math.isfinite(unit.levels):
        return field.new_zeros(n), field.new_zeros(n)
    column, _ = _site_columns(machine, name, site)  # (1, *hidden shape)
    low, high = machine.hidden.statistic_bounds()
    if math.isfinite(low) and math.isfinite(high):
        ends = torch.stack([column * low, column * high]).flatten(1)
        return ends.amin(0).sum().expand(n), ends.amax(0).sum().expand(n)
    # An unbounded hidden layer is Gaussian, and then the entry given all others is Gaussian as well: its field is
    # normal, with a mean and a variance that include the effect of the entry on itself.
    statistic = unit.statistic(layers[name]).reshape(n, -1)[:, site].reshape(-1, *([1] * (field.ndim - 1)))
    without = machine.hidden.statistic(machine.hidden.mean(field - column * statistic))
    pull = (without * column).flatten(1).sum(1)
    own = float((column**2).sum())
    bias = unit.statistic(unit.bias.expand(unit.shape)).reshape(-1)[site]
    centre = (bias + pull) / (1 - own) - bias
    spread = 10 * (1 / math.sqrt(1 - own) - 1)
    return centre - spread, centre + spread


# -- likelihood of data -----------------------------------------------------------------------------


@torch.no_grad()
def log_likelihood(
    machine: BoltzmannMachine,
    visible: Visible,
    log_z: float | Tensor | Callable[..., Tensor | AnnealedEstimate] = log_partition,
) -> Tensor:
    """Compute the log-likelihood of each sample, -F(x) - log Z.

    Parameters
    ----------
    machine : BoltzmannMachine
        The model.
    visible : Tensor or mapping of str to Tensor
        Data, each layer (n, *layer shape).
    log_z : float, or function
        log Z itself, or a function that computes it: :func:`log_partition`, or for instance
        ``functools.partial(annealed_importance_sampling, rng=RandomSource(0))``. It is called once, or once for each
        pattern of padding, because each has its own log Z.

    Returns
    -------
    Tensor (n,)
    """
    layers = machine.as_layers(visible)
    score = -machine.free_energy(layers, check=False)
    absent = [unit.absent(layers[name]) for name, unit in machine.layers.items()]
    padding = [mask.flatten(1) for mask in absent if mask is not None]
    if not callable(log_z):
        if any(bool((mask != mask[:1]).any()) for mask in padding):
            raise ValueError("samples of unequal length have no common log_z: pass a function that computes it")
        return score - log_z

    def constant(**clamp: Layers) -> Tensor:
        found = log_z(machine, **clamp)
        return score.new_tensor(found.log_z) if isinstance(found, AnnealedEstimate) else found.to(score)

    if not padding:
        return score - constant()
    patterns, which = torch.unique(torch.cat(padding, 1), dim=0, return_inverse=True)
    examples = [{name: x[which == pattern][:1] for name, x in layers.items()} for pattern in range(len(patterns))]
    return score - torch.stack([constant(clamp=example) for example in examples])[which]
