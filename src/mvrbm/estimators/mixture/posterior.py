"""The posterior of components, contrasts and gates of samples, and the sums over it that updates require (E-step)."""

from __future__ import annotations

import functools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor, nn

from mvrbm.units.whitened import LOG2_E, MOST_DENSE, WhitenedMixture

# Maximum number of intermediate values in one chunk of samples. On the CPU, a chunk has to fit into the cache.
_CHUNK = {"cpu": 2**19, "cuda": 2**27}
# Maximum number of coefficients that are kept until their curvatures are computed.
_MOST_KEPT = 2**24
#: Number of components per sample, and number of states (pairs of component and contrast), whose gates are evaluated
#: during training. The others have low Gaussian densities.
MOST_CANDIDATES, MOST_STATES = 12, 16
# Minimum posterior probability of a state that contributes to the sums over a sample.
_SMALLEST_SHARE = 1e-3


@dataclass
class Statistics:
    """Sums over samples, divided by the total weight of the samples. All moments are of the whitened coefficients."""

    log_likelihood: Tensor  # ()
    share: Tensor  # (K, C)
    gates: Tensor  # (K, C, G): expected number of coefficients
    squares: Tensor  # (K, C, G, coefficients)
    pull: Tensor  # (K, coefficients): precision times coefficient
    precision: Tensor  # (K, coefficients)
    curvature: list[Tensor]  # (K, J, J, J) per mode: sums of precision times z z', one per row of the whitening


@dataclass
class Moments:
    """The sums of :class:`Statistics` from which the gradient follows. They are much smaller."""

    log_likelihood: Tensor  # ()
    share: Tensor  # (K, C)
    gates: Tensor  # (K, C, G): expected number of coefficients
    energies: Tensor  # (K, C, G): squares of coefficients, times their `precisions` d
    squares: Tensor  # (K, coefficients): precision times squared coefficient
    pull: Tensor  # (K, coefficients): precision times coefficient, divided by the square root of d
    outer: list[Tensor]  # (K, J, J) per mode: sums of precision times z z'


class Likely(NamedTuple):
    """Posterior of the likely states of some samples. A state is a component and a contrast."""

    state: Tensor  # (P,): component times number of contrasts, plus contrast
    y: Tensor  # (P, coefficients): whitened coefficients, times the square root of d
    share: Tensor  # (P,): probability of the state, times the weight of the sample
    gates: Tensor  # (P, G, coefficients): probabilities of the gates, times share


class _States(NamedTuple):
    """Densities of some states of each sample."""

    y: Tensor  # (n K, coefficients): whitened coefficients of all components, times the square root of d
    state: Tensor  # (n, S)
    at: Tensor  # (n, S): row of `y`
    joint: Tensor  # (n, S): log-density of the coefficients and the state
    sums: Tensor | None  # (n S, coefficients): density divided by that of the widest Gaussian; with gates
    ratios: Tensor | None  # (n S, G - 1, coefficients): terms of `sums` after the first, which is 1; with gates


@torch.no_grad()
def likely_log_density(unit: WhitenedMixture, rotated: Tensor) -> Tensor:
    """Return the log-density of samples under their likely states, given their cosine coefficients: (n, N) -> (n,)."""
    return torch.cat([logs for _, _, logs, _ in _Law(unit).chunks(rotated, rotated[:, 0], exact=False)])


@torch.no_grad()
def expectation(
    unit: WhitenedMixture, rotated: Tensor, weights: Tensor, *, exact: bool = True, modes: Sequence[int] | None = None
) -> Statistics:
    """Compute the statistics of samples, given their cosine coefficients (n, N) and weights (n,) with sum 1.

    If `exact` is False, only the likely states of each sample are considered. Otherwise, only states whose probability
    is a rounding error are left out. Curvatures are computed for the given modes only, by default for all.
    """
    law = _Law(unit)
    K, C, G, J = *law.inverses.shape, unit.n_coefficients
    found = Statistics(
        rotated.new_zeros(()),
        rotated.new_zeros(K * C),
        rotated.new_zeros(K * C, G),
        rotated.new_zeros(K * C, G * J),
        rotated.new_zeros(K, J),
        rotated.new_zeros(K, J),
        [],
    )
    modes = range(len(unit.shape)) if modes is None else modes
    kept: list[tuple[Tensor, Tensor, Tensor]] = []
    for log_likelihood, likely in law.posteriors(rotated, weights, exact=exact):
        found.log_likelihood += log_likelihood
        k = likely.state // C
        root = law.roots.index_select(0, k)
        z, q = likely.y / root, law.mean_inverses(likely) * root**2
        found.share += _sums(likely.state, likely.share, K * C)
        found.gates += _sums(likely.state, likely.gates.sum(2), K * C)
        found.squares += _sums(likely.state, (likely.gates * z[:, None] ** 2).flatten(1), K * C)
        found.pull += _sums(k, q * z, K)
        found.precision += _sums(k, q, K)
        if unit.whiten:
            kept.append((k, z, q))
            if sum(len(part) for part, _, _ in kept) * J > _MOST_KEPT:
                _add_curvatures(found, unit, kept, modes)
    if kept:
        _add_curvatures(found, unit, kept, modes)
    found.share = found.share.reshape(K, C)
    found.gates = law.unsorted(found.gates.reshape(K, C, G))
    found.squares = law.unsorted(found.squares.reshape(K, C, G, J))
    return found


def _add_curvatures(
    found: Statistics, unit: WhitenedMixture, kept: list[tuple[Tensor, Tensor, Tensor]], modes: Sequence[int]
) -> None:
    """Add the curvatures of chunks of component, coefficients and precisions, and clear the list of chunks."""
    k, z, q = (torch.cat(parts) for parts in zip(*kept, strict=True))
    kept.clear()
    added = _curvatures(unit, k, z, q, modes)
    before = found.curvature or [torch.zeros_like(part) for part in added]
    found.curvature = [left + right for left, right in zip(before, added, strict=True)]


@torch.no_grad()
def moments(unit: WhitenedMixture, rotated: Tensor, weights: Tensor, *, exact: bool = True) -> Moments:
    """Compute the sums from which the gradient follows. See :func:`expectation` for the arguments."""
    law = _Law(unit)
    K, C, G, J = *law.inverses.shape, unit.n_coefficients
    log_likelihood = rotated.new_zeros(())
    of_states, of_components = rotated.new_zeros(K * C, 1 + 2 * G), rotated.new_zeros(K, 2 * J)
    kept = []
    for part, likely in law.posteriors(rotated, weights, exact=exact):
        log_likelihood += part
        k, y = likely.state // C, likely.y
        squares = y * y
        energies = (likely.gates * squares[:, None]).sum(2)
        columns = torch.cat([likely.share[:, None], likely.gates.sum(2), energies], 1)
        of_states += _sums(likely.state, columns, K * C)
        q = law.mean_inverses(likely)
        of_components += _sums(k, torch.cat([q * squares, q * y], 1), K)
        if unit.whiten:
            root = law.roots.index_select(0, k)
            kept.append((k, q * y * root, y / root))
    share, gates, energies = of_states.reshape(K, C, -1).split([1, G, G], 2)
    squares, pull = of_components.split(J, 1)
    found = Moments(
        log_likelihood, share[:, :, 0], law.unsorted(gates), law.unsorted(energies), squares.clone(), pull.clone(), []
    )
    if unit.whiten:
        k, left, right = (torch.cat(parts) for parts in zip(*kept, strict=True))
        found.outer = _outer(unit, k, left, right)
    return found


class _Law:
    """Parameters of a mixture in the form that the E-step uses."""

    def __init__(self, unit: WhitenedMixture) -> None:
        self.unit = unit
        logs = unit.state_log_variances()
        self.inverses = torch.exp(-logs)  # (K, C, G)
        self.order, constants, inverses = unit.sorted_gates()
        constants, self.sorted_inverses = constants.flatten(0, 1), inverses.flatten(0, 1)  # (K C, G)
        self.ratios = torch.exp(constants[:, 1:] - constants[:, :1])  # (K C, G - 1)
        self.rates = -0.5 * LOG2_E * (self.sorted_inverses[:, 1:] - self.sorted_inverses[:, :1])
        own = unit.log_weights() + (0.5 * unit.log_precision.sum(1) + unit.log_determinant())[:, None]  # (K, C)
        self.widest = own.flatten() + unit.n_coefficients * constants[:, 0]  # (K C)
        # The same with Gaussians of the gates' mean variances, which is exact without gates.
        mean = unit.mean_log_variances()  # (K, C)
        self.rough_inverses = torch.exp(-mean)
        self.rough = own - 0.5 * unit.n_coefficients * mean
        self.roots = torch.exp(0.5 * unit.log_precision)  # (K, coefficients)

    def unsorted(self, values: Tensor) -> Tensor:
        r"""Return sums of sorted gates in the order of the gates in the unit: (K, C, G, \*) -> (K, C, G, \*)."""
        order = self.order.reshape(self.order.shape + (1,) * (values.ndim - 3)).expand(values.shape)
        return torch.zeros_like(values).scatter_(2, order, values)

    def mean_inverses(self, likely: Likely) -> Tensor:
        """Return the mean inverse variances of the gates, times share and without d: (P, coefficients)."""
        return (likely.gates * self.sorted_inverses.index_select(0, likely.state)[:, :, None]).sum(1)

    @functools.cached_property
    def _dense(self) -> Tensor:
        """Matrix that maps cosine coefficients and a one to those of all components: (N + 1, K coefficients)."""
        unit, first = self.unit, int(self.unit.level)
        size = unit.n_coefficients + first
        eye = torch.eye(size, dtype=unit.center.dtype, device=unit.center.device)
        zero = eye.new_zeros(1, size)
        found = unit.coefficients(torch.cat([eye, zero]))[..., first:] * self.roots[:, None]  # (K, N + 1, coefficients)
        found[:, :-1] -= found[:, -1:]
        return found.transpose(0, 1).flatten(1)

    def _whiten(self, u: Tensor) -> Tensor:
        """Return the scaled coefficients in all components: (n, N) -> (n, K, coefficients)."""
        if u.shape[1] <= MOST_DENSE:
            return (nn.functional.pad(u, (0, 1), value=1.0) @ self._dense).reshape(len(u), *self.roots.shape)
        z = self.unit.coefficients(u)[..., int(self.unit.level) :]
        return (z * self.roots[:, None]).transpose(0, 1).contiguous()

    def chunks(
        self, rotated: Tensor, weights: Tensor, *, exact: bool
    ) -> Iterator[tuple[Tensor, Tensor, Tensor, _States]]:
        """Yield cosine coefficients, weights, log-densities and states of one chunk of samples after another.

        If `exact` is False, only the likely states of each sample are considered.
        """
        K, C, G = self.inverses.shape
        states = K * C if exact or G == 1 else min(K * C, MOST_STATES)
        size = max(1, _CHUNK[rotated.device.type] // (self.unit.n_coefficients * (K + (G + 1) * states)))
        for u, weight in zip(rotated.split(size), weights.split(size), strict=True):
            found = self._states(u, states)
            yield u, weight, torch.logsumexp(found.joint, 1) + self.unit.outer_log_density(u), found

    def _states(self, u: Tensor, states: int) -> _States:
        """Return the densities of a number of likely states, up to the density of the level and the scale."""
        y = self._whiten(u)
        energies = (y * y).sum(2)  # (n, K)
        rough = self.rough - 0.5 * energies[:, :, None] * self.rough_inverses  # (n, K, C)
        (n, K, C), G = rough.shape, self.inverses.shape[2]
        state = self._candidates(rough, states)  # (n, S)
        at = torch.arange(n, device=u.device)[:, None] * K + state // C
        if G == 1:
            return _States(y.flatten(0, 1), state, at, rough.flatten(1), None, None)
        flat, rows = state.flatten(), at.flatten()
        squares = y.flatten(0, 1).index_select(0, rows)
        squares *= squares  # (n S, coefficients)
        ratios = squares[:, None] * self.rates.index_select(0, flat)[:, :, None]  # (n S, G - 1, coefficients)
        ratios.exp2_().mul_(self.ratios.index_select(0, flat)[:, :, None])
        sums = ratios.sum(1).add_(1)
        joint = sums.log().sum(1) + self.widest.index_select(0, flat)
        joint -= (
            0.5 * energies.flatten().index_select(0, at.flatten()) * self.sorted_inverses[:, 0].index_select(0, flat)
        )
        return _States(y.flatten(0, 1), state, at, joint.reshape(state.shape), sums, ratios)

    def posteriors(self, rotated: Tensor, weights: Tensor, *, exact: bool) -> Iterator[tuple[Tensor, Likely]]:
        """Yield the log-likelihood and the posterior of one chunk of samples after another.

        If `exact` is False, only the likely states of each sample are considered.
        """
        smallest = torch.finfo(rotated.dtype).eps if exact else _SMALLEST_SHARE
        for _, weight, logs, (y, state, at, joint, sums, ratios) in self.chunks(rotated, weights, exact=exact):
            share = torch.softmax(joint, 1)
            chosen = torch.nonzero((share > smallest).flatten())[:, 0]
            share = (share * weight[:, None]).flatten().index_select(0, chosen)
            gates = share[:, None, None].expand(-1, 1, y.shape[1])
            if sums is not None and ratios is not None:
                first = (share[:, None] / sums.index_select(0, chosen))[:, None]
                gates = torch.cat([first, ratios.index_select(0, chosen) * first], 1)
            of_pairs = y.index_select(0, at.flatten().index_select(0, chosen))
            yield weight @ logs, Likely(state.flatten().index_select(0, chosen), of_pairs, share, gates)

    @staticmethod
    def _candidates(rough: Tensor, states: int) -> Tensor:
        """Return the states with the highest densities in (n, K, C), from the components with the highest: (n, S)."""
        n, K, C = rough.shape
        if states == K * C:
            return torch.arange(states, device=rough.device).expand(n, -1)
        k = rough.amax(2).topk(min(K, MOST_CANDIDATES), 1, sorted=False).indices  # (n, L)
        of_candidates = rough.gather(1, k[:, :, None].expand(-1, -1, C)).flatten(1)
        best = of_candidates.topk(min(states, of_candidates.shape[1]), 1, sorted=False).indices
        return k.gather(1, best // C) * C + best % C


def _sums(index: Tensor, values: Tensor, count: int) -> Tensor:
    r"""Sum the values with equal indices: (P,), (P, \*) -> (count, \*)."""
    if values.device.type == "cpu":
        return values.new_zeros(count, *values.shape[1:]).index_add_(0, index, values)
    # Additions by several threads have no order. A product gives the same result in each run.
    return nn.functional.one_hot(index, count).to(values).T @ values


def _outer(unit: WhitenedMixture, k: Tensor, left: Tensor, right: Tensor) -> list[Tensor]:
    """Sum the products of coefficients along each mode over the pairs of each component: (K, J, J) per mode.

    `k` has shape (P,), and `left` and `right` have shape (P, coefficients).
    """
    first, shape, K = int(unit.level), unit.shape, unit.n_components
    rows, owner = _segments(k, K)  # (S, width), (S,)
    left, right = (nn.functional.pad(part, (first, 0)) for part in (left, right))  # (P, N)
    left = nn.functional.pad(left, (0, 0, 0, 1))  # row -1 is zero, for segments that are not full
    found = [left.new_zeros(K, *[size - first] * 2) for size in shape]
    step = max(1, _CHUNK[left.device.type] // (rows.shape[1] * left.shape[1]))
    for some, of_some in zip(rows.split(step), owner.split(step), strict=True):
        a, b = (part[some].reshape(*some.shape, *shape) for part in (left, right))
        for d, total in enumerate(found):
            of_a, of_b = (part.movedim(d + 2, 1)[:, first:].flatten(2) for part in (a, b))  # (S, J, m)
            total += _sums(of_some, (of_a @ of_b.mT).flatten(1), K).reshape(total.shape)
    return found


def _curvatures(unit: WhitenedMixture, k: Tensor, z: Tensor, q: Tensor, modes: Sequence[int]) -> list[Tensor]:
    """Sum precision times z z' for each row of the whitenings of some modes: (K, J, J, J) per mode, or empty.

    `k` has shape (P,), and the coefficients `z` and their precisions `q` have shape (P, coefficients).
    """
    first, shape, K = int(unit.level), unit.shape, unit.n_components
    z, q = (nn.functional.pad(part, (first, 0)) for part in (z, q))  # (P, N)
    rows, owner = _segments(k, K)  # (S, width), (S,)
    padding = (rows >= 0)[:, :, None]
    found = [z.new_zeros(K, *[size - first if d in modes else 0] * 3) for d, size in enumerate(shape)]
    step = max(1, _CHUNK[z.device.type] // (rows.shape[1] * z.shape[1]))
    for some, of_some, present in zip(rows.split(step), owner.split(step), padding.split(step), strict=True):
        of_z = z[some].reshape(*some.shape, *shape)
        of_q = (q[some] * present).reshape(of_z.shape)
        for d in modes:
            total = found[d]
            a = of_z.movedim(d + 2, 1)[:, first:].flatten(2)  # (S, J, m): a row for each index of the mode
            weight = of_q.movedim(d + 2, 1)[:, first:].flatten(2)
            for i in range(a.shape[1]):  # the matrices are symmetric
                part = weight @ (a[:, i:] * a[:, i : i + 1]).mT  # (S, J, J - i)
                total[:, :, i, i:] += _sums(of_some, part.flatten(1), K).reshape(K, a.shape[1], -1)
    for total in found:
        total += total.triu(1).mT
    return found


def _segments(k: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """Group the indices of equal values of `k` into segments of equal width.

    Return the indices as a tensor of shape (segments, width), padded with -1, and the value of each segment.
    """
    order = torch.argsort(k, stable=True)
    counts = torch.bincount(k, minlength=count)
    width = max(1, -(-2 * len(k) // (3 * max(1, int((counts > 0).sum())))))  # most values need one or two segments
    n_segments = -(-counts // width)  # (K,)
    owner = torch.repeat_interleave(torch.arange(count, device=k.device), n_segments)
    number = torch.arange(len(owner), device=k.device) - (n_segments.cumsum(0) - n_segments)[owner]
    place = number[:, None] * width + torch.arange(width, device=k.device)  # within the indices of the value
    at = ((counts.cumsum(0) - counts)[owner][:, None] + place).clamp(max=max(0, len(k) - 1))
    return torch.where(place < counts[owner][:, None], order[at], -1), owner
