"""Pseudo-likelihood: the probability of each site given all other sites."""

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from mvrbm.likelihood.exact import site_mask
from mvrbm.machine import BoltzmannMachine, Visible
from mvrbm.random import RandomSource
from mvrbm.sampling import Layers
from mvrbm.validation import whole_number

_PSEUDO_BUDGET = 2048  # values of sites, over all sites, that the default pseudo-likelihood of one sample sums over


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
    return conditional.masked_fill(site_mask(unit, absent).reshape(n, -1)[:, site], 0)


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
