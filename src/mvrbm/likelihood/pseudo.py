"""Pseudo-likelihood: the product, over all sites, of the probability of a site given all other sites."""

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import softplus

from mvrbm.compiled.pseudo import log_odds as compiled_log_odds
from mvrbm.likelihood.exact import site_mask
from mvrbm.machine import BoltzmannMachine, Visible
from mvrbm.random import RandomSource
from mvrbm.sampling import Layers
from mvrbm.units.base import Unit
from mvrbm.validation import whole_number

# Maximum number of weights in memory at once.
_MOST_WEIGHTS = 2**22
# Maximum number of hidden field entries in memory at once.
_MOST_FIELDS = 2**22
# Maximum number of entries in memory at once for the alternatives of a site, which should fit into the cache.
_MOST_ALTERNATIVES = 2**18
# Maximum number of entries, of visible and hidden layers, that `mean_pseudo_log_likelihood` evaluates. They take about
# 0.1 s.
_MOST_ENTRIES = 2**25
# Typical number of values over which the distribution of a site with infinitely many values is normalized.
_TYPICAL_VALUES = 100


@dataclass(frozen=True)
class PseudoLikelihood:
    """Pseudo-log-likelihood of each sample: the sum of log p(site | all other sites) over all sites.

    Attributes
    ----------
    values : Tensor (n,)
        Pseudo-log-likelihood of each sample. The values are estimates unless every site was visited.
    sites, total_sites : int
        Number of visited sites and total number of sites.
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
    """Compute the pseudo-log-likelihood of each sample. The result is deterministic for a given seed.

    Parameters
    ----------
    machine : BoltzmannMachine
        Model to evaluate.
    visible : Tensor or mapping of str to Tensor
        Data. Each layer has shape (n, *layer shape). A Bernoulli entry between 0 and 1 is treated as an average over
        ones and zeros.
    n_sites : int, optional
        Number of sites to visit. If None, all sites are visited and the result is exact. With fewer sites, the result
        is an unbiased estimate (see Notes).
    seed : int
        Seed for the choice of sites. The choice depends only on the seed and the shapes of the visible layers.
    check : bool
        Whether to validate the data.

    Returns
    -------
    PseudoLikelihood

    Notes
    -----
    The estimate starts from the log-probability of every site given the means of the hidden layer, which requires one
    reconstruction. The sites are then divided into `n_sites` equal parts, and one site is drawn from each part. For
    these sites, the difference between the exact conditional log-probability and the approximation is computed. The sum
    of the differences, scaled up to the total number of sites, is added to the approximation. The expectation of the
    estimate over seeds is the exact value.
    """
    layers = machine.as_layers(visible, check=check)
    all_sites = sum(unit.n_sites for unit in machine.layers.values())
    if n_sites is None or whole_number(n_sites, "n_sites") >= all_sites:
        field = machine.hidden_field(layers)
        every = {name: torch.arange(unit.n_sites) for name, unit in machine.layers.items()}
        each = [_log_conditionals(machine, layers, field, name, sites) for name, sites in every.items()]
        return PseudoLikelihood(torch.stack(each).sum(0), all_sites, all_sites)
    return PseudoLikelihood(_estimate(machine, layers, _draw_sites(n_sites, all_sites, seed)), n_sites, all_sites)


@torch.no_grad()
def mean_pseudo_log_likelihood(
    machine: BoltzmannMachine, visible: Visible, *, n_sites: int, seed: int = 0, check: bool = True
) -> float:
    """Estimate the mean pseudo-log-likelihood of all samples in bounded time, for use during training.

    The parameters are the same as for :func:`pseudo_log_likelihood`. If visiting `n_sites` sites of every sample would
    take too long, each site is visited for only some of the samples. The estimate remains unbiased.
    """
    layers = machine.as_layers(visible, check=check)
    units = machine.layers.values()
    n, all_sites = len(next(iter(layers.values()))), sum(unit.n_sites for unit in units)
    entries = math.prod(machine.hidden.shape) + sum(math.prod(unit.shape) for unit in units)
    n_rows = max(1, int(_MOST_ENTRIES / (min(n_sites, all_sites) * entries * max(map(_n_values, units)))))
    if n_rows >= n:
        return float(pseudo_log_likelihood(machine, layers, n_sites=n_sites, seed=seed, check=False).values.mean())
    places = _draw_sites(min(n_sites, all_sites), all_sites, seed)
    rows = torch.arange(len(places) * n_rows).remainder(n).split(n_rows)
    return _mean_estimate(machine, layers, places, rows)


def _n_values(unit: Unit) -> float:
    """Return the approximate number of evaluations required to normalize the distribution of one site."""
    if unit.sampled_as == "bernoulli":
        return 1  # both values are evaluated at once
    return unit.levels if math.isfinite(unit.levels) else _TYPICAL_VALUES


def _draw_sites(n_sites: int, all_sites: int, seed: int) -> Tensor:
    """Divide all sites into `n_sites` equal parts, and draw one site from each part."""
    within = RandomSource(seed).uniform((n_sites,), torch.empty(0, dtype=torch.float64))
    return ((torch.arange(n_sites) + within) * (all_sites / n_sites)).long().clamp(max=all_sites - 1)


def _estimate(machine: BoltzmannMachine, layers: Layers, places: Tensor) -> Tensor:
    """Estimate the pseudo-log-likelihood of each sample from a subset of the sites. The result has shape (n,).

    `places` contains the indices of these sites, numbered across all visible layers.
    """
    field = machine.hidden_field(layers)
    means = machine.visible_fields(machine.hidden.mean(field))
    ends = list(itertools.accumulate((unit.n_sites for unit in machine.layers.values()), initial=0))
    total = machine.like.new_zeros(len(field))
    for (name, unit), first, end in zip(machine.layers.items(), ends, ends[1:], strict=False):
        near = _log_probabilities(unit, layers[name], means[name])
        total += near.sum(1)
        sites = places[(places >= first) & (places < end)] - first
        if len(sites):
            exact = _log_conditionals(machine, layers, field, name, sites)
            total += ends[-1] / len(places) * (exact - near[:, sites.to(near.device)].sum(1))
    return total


def _mean_estimate(machine: BoltzmannMachine, layers: Layers, places: Tensor, rows: Sequence[Tensor]) -> float:
    """Estimate the mean pseudo-log-likelihood of all samples.

    `places` contains the sites to visit, and `rows` contains the sample indices for each of these sites.
    """
    approximate = _estimate(machine, layers, places[:0]).mean()
    differences = []
    for place, some in zip(places, rows, strict=True):
        part = {name: x[some.to(x.device)] for name, x in layers.items()}
        differences.append(_estimate(machine, part, place[None]) - _estimate(machine, part, places[:0]))
    return float(approximate + torch.cat(differences).mean())


def _log_probabilities(unit: Unit, x: Tensor, field: Tensor) -> Tensor:
    """Return the log-probability of each site given the field, or 0 for padding: (n, *shape) -> (n, sites)."""
    found = unit.statistic(x) * field
    if unit.entry_modes:
        found = found.sum(-1)
    found.sub_(unit.site_energy(x)).sub_(unit.site_log_normalizer(field))  # in place, to avoid allocations
    absent = unit.absent(x)
    return (found if absent is None else found.masked_fill(site_mask(unit, absent), 0)).reshape(len(x), -1)


def _log_conditionals(machine: BoltzmannMachine, layers: Layers, field: Tensor, name: str, sites: Tensor) -> Tensor:
    """Sum log p(site | all other sites) over the given sites, for each sample. The result has shape (n,)."""
    if machine.layers[name].sampled_as == "bernoulli":
        return _binary_log_conditionals(machine, layers, field, name, sites)
    each = [_site_log_conditional(machine, layers, field, name, site) for site in sites.tolist()]
    return torch.stack(each).sum(0)


def _binary_log_conditionals(
    machine: BoltzmannMachine, layers: Layers, field: Tensor, name: str, sites: Tensor
) -> Tensor:
    """Sum log p(site | all other sites) over the given binary sites, for each sample. The result has shape (n,)."""
    unit, hidden, n = machine.layers[name], machine.hidden, len(field)
    n_hidden = math.prod(hidden.shape)
    total, sites = field.new_zeros(n), sites.to(field.device)
    for some in sites.split(max(1, _MOST_WEIGHTS // n_hidden)):
        one = torch.nn.functional.one_hot(some, unit.n_sites).to(field.dtype)
        columns = machine.links[name].to_hidden(one.reshape(-1, *unit.shape)).flatten(1)  # (sites, hidden)
        x = layers[name].reshape(n, -1)[:, some]
        odds = None
        if hidden.sampled_as == "bernoulli":
            bias = hidden.bias.expand(hidden.shape).flatten()
            odds = compiled_log_odds(field.flatten(1), bias, columns, x)
        if odds is None:
            parts = [part.split(max(1, _MOST_FIELDS // field.numel())) for part in (columns, x.T)]
            odds = torch.cat([_log_odds(hidden, field, *pair) for pair in zip(*parts, strict=True)], 1)
        odds = odds + unit.bias.expand(unit.shape).reshape(-1)[some]
        total += (x * odds - softplus(odds)).sum(1)
    return total


def _log_odds(hidden: Unit, field: Tensor, columns: Tensor, x: Tensor) -> Tensor:
    """Return the contribution of the hidden layer to the log-odds of binary sites.

    `columns` contains the weights of each site and has shape (sites, hidden). `x` contains the values of the sites and
    has shape (sites, n). The result has shape (n, sites).
    """
    values = x.T[..., None]  # (n, sites, 1)
    shape = (-1, *hidden.shape)
    ends = [field.flatten(1)[:, None] + (value - values) * columns for value in (1, 0)]  # (n, sites, hidden)
    with_one, with_zero = (hidden.log_normalizer(end.reshape(shape)).reshape(len(field), -1) for end in ends)
    return with_one - with_zero


def _site_log_conditional(machine: BoltzmannMachine, layers: Layers, field: Tensor, name: str, site: int) -> Tensor:
    """Return log p(site | all other sites) for each sample, or 0 for padding. The result has shape (n,)."""
    unit = machine.layers[name]
    x = layers[name].reshape(-1, unit.n_sites, *unit.entry_shape)
    n = len(x)
    options = unit.alternatives(x[:, site], site, _reach(machine, layers, field, name, site))
    columns, scale = _site_columns(machine, name, site)
    scores = []
    for values in options.values.split(max(1, _MOST_ALTERNATIVES // max(x.numel(), field.numel()))):
        a = len(values)
        changed = x.repeat(a, *[1] * (x.ndim - 1))
        changed[:, site] = values.flatten(0, 1)
        steps = ((values - x[:, site]).reshape(a * n, -1) * scale) @ columns.flatten(1)  # the statistic is linear
        fields = field + steps.reshape(a, *field.shape)
        energy = unit.energy(changed.reshape(-1, *unit.shape))
        scores.append((machine.hidden.log_normalizer(fields.flatten(0, 1)) - energy).reshape(a, n))
    score = torch.cat(scores)  # (a, n)
    conditional = (options.shares * score).sum(0) - torch.logsumexp(score + options.log_weights, 0)
    absent = unit.absent(layers[name])
    if absent is None:
        return conditional
    return conditional.masked_fill(site_mask(unit, absent).reshape(n, -1)[:, site], 0)


def _site_columns(machine: BoltzmannMachine, name: str, site: int) -> tuple[Tensor, Tensor]:
    r"""Return the weights from each entry of a site to the hidden layer, and the inverse scale of each entry.

    The shapes are (entries, \*hidden shape) and (entries,).
    """
    unit = machine.layers[name]
    size = math.prod(unit.entry_shape)
    one = machine.like.new_zeros((size, unit.n_sites, size))
    one[torch.arange(size), site, torch.arange(size)] = 1
    columns = machine.links[name].to_hidden(one.reshape(size, *unit.shape))  # (entries, *hidden shape)
    return columns, unit.inverse_scale.reshape(unit.n_sites, size)[site]


def _reach(machine: BoltzmannMachine, layers: Layers, field: Tensor, name: str, site: int) -> tuple[Tensor, Tensor]:
    """Return lower and upper limits on the likely field at a site, each of shape (n,).

    Both limits are zero if the site has finitely many possible values.
    """
    unit, n = machine.layers[name], len(field)
    if math.isfinite(unit.levels):
        return field.new_zeros(n), field.new_zeros(n)
    column, _ = _site_columns(machine, name, site)  # (1, *hidden shape)
    low, high = machine.hidden.statistic_bounds
    if math.isfinite(low) and math.isfinite(high):
        ends = torch.stack([column * low, column * high]).flatten(1)
        return ends.amin(0).sum().expand(n), ends.amax(0).sum().expand(n)
    # An unbounded hidden layer is Gaussian, so the conditional distribution of the entry is Gaussian too. The field on
    # the entry is normal, and its mean and variance include the effect of the entry on itself.
    statistic = unit.statistic(layers[name]).reshape(n, -1)[:, site].reshape(-1, *([1] * (field.ndim - 1)))
    without = machine.hidden.statistic(machine.hidden.mean(field - column * statistic))
    pull = (without * column).flatten(1).sum(1)
    own = float((column**2).sum())
    bias = unit.statistic(unit.bias.expand(unit.shape)).reshape(-1)[site]
    center = (bias + pull) / (1 - own) - bias
    spread = 10 * (1 / math.sqrt(1 - own) - 1)
    return center - spread, center + spread
