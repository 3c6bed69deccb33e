"""Expectation maximization for whitened mixtures.

One step computes the posterior of components, contrasts and gates (E-step), sums its statistics, and updates all
parameters in closed form (M-step). The rows of the whitening matrices are updated one after another, as in auxiliary-
function independent vector analysis (Ono, 2011). There is no learning rate.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from dataclasses import dataclass, fields

import torch
from torch import Tensor

from mvrbm.random import RandomSource
from mvrbm.units.whitened import SMALLEST_VARIANCE, WhitenedMixture, mode_products

# Maximum number of intermediate values in one chunk of samples. On the CPU, a chunk has to fit into the cache.
_CHUNK = {"cpu": 2**20, "cuda": 2**27}
#: Number of components per sample whose gates are evaluated during training. The others have low Gaussian densities.
MOST_CANDIDATES = 8
# Minimum posterior probability of a component that contributes to the statistics of a sample.
_SMALLEST_SHARE = 1e-3
# Bounds on the log-variances of contrasts and gates, relative to their means over the samples.
_LARGEST_REACH = 8.0
# Number of rounds in which contrasts, widths and precisions are updated in turn.
_ROUNDS = 3
# Minimum number of samples of a component that is updated, relative to the pseudo-samples.
_SMALLEST_COUNT = 1e-3
# A component is dead if its share of the samples is smaller than this fraction of the average.
_DEAD = 0.02
# Number of times that each row of a whitening is updated in one step, and the ridge that keeps its curvature regular.
_SWEEPS = 2
_RIDGE = 1e-6
# Variance in each direction that is added to the covariances of pseudo-samples, relative to the mean variance.
_PRIOR_RIDGE = 1e-3
# Parameters that all components share.
_SHARED_PARAMETERS = {"bias", "center", "log_scale", "level_log_variance"}
# Standard deviation of the log-precisions among the initial components, and between a dead component that is revived
# and the component that it copies.
_START_NOISE = 0.5
_SPLIT_NOISE = 0.3
# Minimum energy per coefficient when its logarithm determines the initial contrasts.
_SMALLEST_ENERGY = 1e-6
# Number of rounds of clustering for the initial means.
_LLOYD_ROUNDS = 20
# Decay rates of Adam, and the size below which gradients are not enlarged.
_BETAS = (0.9, 0.99)
_SMALLEST_GRADIENT = 1e-8
# Maximum Frobenius norm of the relative change in a whitening in one step of Adam. Steps of large matrices would
# otherwise diverge, because their norm grows with the number of rows.
_LARGEST_CHANGE = 0.25


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


@torch.no_grad()
def expectation(unit: WhitenedMixture, rotated: Tensor, weights: Tensor, *, exact: bool = True) -> Statistics:
    """Compute the statistics of samples, given their cosine coefficients (n, N) and weights (n,) with sum 1.

    If `exact` is False, only the likely components of each sample are considered.
    """
    K, C = unit.n_components, unit.n_contrasts
    state_log_variances = unit.state_log_variances()  # (K, C, G)
    G, J = state_log_variances.shape[2], unit.n_coefficients
    candidates = K if exact or not unit.gate else min(K, MOST_CANDIDATES)
    smallest = 0.0 if exact else _SMALLEST_SHARE
    size = max(1, _CHUNK[rotated.device.type] // (K * J + candidates * C * G * J))
    law = _Law(unit)
    like = rotated.new_zeros(())
    found = Statistics(
        like.clone(),
        rotated.new_zeros(K, C),
        rotated.new_zeros(K, C, G),
        rotated.new_zeros(K, C, G, J),
        rotated.new_zeros(K, J),
        rotated.new_zeros(K, J),
        [],
    )
    kept = []
    for u, weight in zip(rotated.split(size), weights.split(size), strict=True):
        kept.append(law.add(found, u, weight, candidates, smallest))
    k, z, q = (torch.cat(parts) for parts in zip(*kept, strict=True))
    if unit.whiten:
        found.curvature = _curvatures(unit, k, z, q)
    return found


class _Law:
    """Parameters of a mixture in the form that the E-step uses."""

    def __init__(self, unit: WhitenedMixture) -> None:
        self.unit = unit
        logs = unit.state_log_variances()
        self.precisions = torch.exp(unit.log_precision)  # (K, coefficients)
        self.inverses = torch.exp(-logs)  # (K, C, G)
        constants = unit.log_gates()[:, None] - 0.5 * logs  # (K, C, G)
        # The log-density of a coefficient is that of its first Gaussian, which is the widest, plus log(1 + sum of the
        # ratios of the others to it). Ratios never overflow, because narrow Gaussians decay faster.
        self.widest = constants[:, :, 0]  # (K, C)
        self.log_ratios = (constants[:, :, 1:] - constants[:, :, :1])[..., None]  # (K, C, G - 1, 1)
        self.rates = -0.5 * (self.inverses[:, :, 1:] - self.inverses[:, :, :1])[..., None]  # (K, C, G - 1, 1)
        own = unit.log_weights() + (0.5 * unit.log_precision.sum(1) + unit.log_determinant())[:, None]
        self.own = own  # (K, C)
        mean = torch.logsumexp(unit.log_gates()[:, None] + logs, 2)  # (K, C): log of the mean variance
        self.rough_inverses = torch.exp(-mean)
        self.rough = own - 0.5 * unit.n_coefficients * mean

    def add(
        self, found: Statistics, u: Tensor, weight: Tensor, candidates: int, smallest: float
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Add the statistics of one chunk, and return component, coefficients and precisions of the likely pairs.

        A pair is a sample and one of its components, with a probability above `smallest`.
        """
        unit = self.unit
        every = unit.coefficients(u)[..., int(unit.level) :]  # (K, n, coefficients)
        n, J = every.shape[1:]
        rows = torch.arange(n, device=u.device)[:, None]
        energies = torch.einsum("knj,kj->nk", every**2, self.precisions)
        if candidates < unit.n_components:
            rough = self.rough - 0.5 * energies[:, :, None] * self.rough_inverses  # (n, K, C)
            k = rough.amax(2).topk(candidates, 1, sorted=False).indices  # (n, L)
        else:
            k = torch.arange(candidates, device=u.device).expand(n, -1)
        z = every[k, rows]  # (n, L, coefficients)
        squares = z**2 * self.precisions[k]
        ratios = torch.addcmul(self.log_ratios[k], squares[:, :, None, None], self.rates[k]).exp_()
        sums = ratios.sum(3).add_(1)  # (n, L, C, coefficients)
        joint = sums.log().sum(3) - 0.5 * energies.gather(1, k)[:, :, None] * self.inverses[k][..., 0]
        joint += self.own[k] + J * self.widest[k]
        total = torch.logsumexp(joint.flatten(1), 1)
        found.log_likelihood += weight @ (total + unit.outer_log_density(u))
        share = torch.exp(joint - total[:, None, None])  # (n, L, C)
        # From here on, only pairs with a noticeable share count.
        at, which = torch.nonzero(share.sum(2) > smallest, as_tuple=True)
        share, k, z = share[at, which] * weight[at, None], k[at, which], z[at, which]
        first = (share[..., None] / sums[at, which])[:, :, None]  # (P, C, 1, coefficients)
        gates = torch.cat([first, ratios[at, which] * first], 2)  # (P, C, G, coefficients)
        q = torch.einsum("pcgj,pcg->pj", gates, self.inverses[k]) * self.precisions[k]
        of_k = torch.nn.functional.one_hot(k, unit.n_components).to(z).T  # (K, P)
        found.share += of_k @ share
        found.gates += (of_k @ gates.sum(3).flatten(1)).reshape(found.gates.shape)
        found.squares += (of_k @ (gates * z[:, None, None] ** 2).flatten(1)).reshape(found.squares.shape)
        found.pull += of_k @ (q * z)
        found.precision += of_k @ q
        return k, z, q


def _curvatures(unit: WhitenedMixture, k: Tensor, z: Tensor, q: Tensor) -> list[Tensor]:
    """Sum precision times z z' for each row of each whitening: (K, J, J, J) per mode.

    `k` has shape (P,), and the coefficients `z` and their precisions `q` have shape (P, coefficients).
    """
    first, shape, K = int(unit.level), unit.shape, unit.n_components
    z, q = (torch.nn.functional.pad(part, (first, 0)) for part in (z, q))  # (P, N)
    rows, owner = _segments(k, K)  # (S, width), (S,)
    padding = (rows >= 0)[:, :, None]
    found = [z.new_zeros(K, *[size - first] * 3) for size in shape]
    largest = max(size - first for size in shape)
    step = max(1, _CHUNK[z.device.type] // (rows.shape[1] * z.shape[1] * max(1, largest)))
    for some, of_some, present in zip(rows.split(step), owner.split(step), padding.split(step), strict=True):
        of_z = z[some].reshape(*some.shape, *shape)
        of_q = (q[some] * present).reshape(of_z.shape)
        for d, total in enumerate(found):
            a = of_z.movedim(d + 2, 1)[:, first:].flatten(2)  # (S, J, m): a row for each index of the mode
            weight = of_q.movedim(d + 2, 1)[:, first:].flatten(2)
            outer = (a[:, :, None] * a[:, None]).flatten(1, 2)  # (S, J J, m)
            total.index_add_(0, of_some, (weight @ outer.mT).reshape(-1, *total.shape[1:]))
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


@dataclass(frozen=True)
class Prior:
    r"""Pseudo-samples that each component has in addition to the data.

    Their distribution is a Gaussian with a separable covariance: that of the data along each mode, at the scale of the
    component. The log-prior of a component is

    .. math:: \nu \Bigl\{\log|\det A| + \tfrac12 \sum_j \log d_j
              - \tfrac J2 \log\Bigl(\tfrac1J \sum_j d_j c_j\Bigr)
              - \tfrac J2 \sum_c l_c - \tfrac{JC}2 \log\Bigl(\tfrac1C \sum_c e^{-l_c}\Bigr)\Bigr\},

    where `d` are the precisions, `c` the variances of the coefficients in the data, and `l` the log-contrasts. It does
    not depend on the scale of the component.
    """

    weight: float  # number of pseudo-samples per component, as a share of the total weight of the samples
    covariances: list[Tensor]  # (I_d, I_d) per mode, of cosine coefficients

    @classmethod
    def of(cls, unit: WhitenedMixture, rotated: Tensor, weights: Tensor, weight: float) -> Prior:
        """Build the prior from cosine coefficients (n, N), with the level removed, and their weights (n,)."""
        first = int(unit.level)
        centered = rotated - weights @ rotated
        centered[:, :first] = 0
        arrays = centered.reshape(-1, *unit.shape) * weights.reshape(-1, *[1] * len(unit.shape)).sqrt()
        covariances = []
        for d, size in enumerate(unit.shape):
            rows = arrays.movedim(d + 1, 0).flatten(1)  # (I_d, m)
            covariance = rows @ rows.T / (rows.shape[1] // len(rotated))
            covariance = covariance / covariance.diagonal().mean().clamp(min=torch.finfo(rows.dtype).tiny)
            covariances.append(covariance + _PRIOR_RIDGE * torch.eye(size).to(rows))
        return cls(weight, covariances)

    def moments(self, unit: WhitenedMixture) -> tuple[Tensor, list[Tensor]]:
        """Return the variances of the pseudo-samples' coefficients, and their covariances along each mode.

        The variances have shape (K, coefficients), and the covariances (K, I_d, I_d) are in whitened coordinates.
        """
        inner = [a @ c @ a.mT for a, c in zip(unit.whitenings(), self.covariances, strict=True)]
        inner = [each.expand(unit.n_components, -1, -1) for each in inner]
        variances = unit.logits.new_ones(unit.n_components, 1)
        for each in inner:
            variances = (variances[:, :, None] * each.diagonal(dim1=1, dim2=2)[:, None]).flatten(1)
        return variances[:, int(unit.level) :], inner

    def log_density(self, unit: WhitenedMixture) -> float:
        """Return the log-prior of a mixture."""
        if not self.weight:
            return 0.0
        J = unit.n_coefficients
        scale = (self.moments(unit)[0] * torch.exp(unit.log_precision)).mean(1).log()
        widest = torch.exp(-unit.log_contrast).mean(1).log()
        logs = unit.log_determinant() + 0.5 * unit.log_precision.sum(1) - 0.5 * J * scale
        logs -= 0.5 * J * (unit.log_contrast.sum(1) + unit.n_contrasts * widest)
        return self.weight * float(logs.sum())


@torch.no_grad()
def maximization(unit: WhitenedMixture, found: Statistics, prior: Prior, block: int | None = None) -> None:
    """Update the parameters from the statistics, and transform the statistics to the new coordinates.

    If `block` is given, only one block of parameters is updated, which never lowers the likelihood: contrasts, gates
    and precisions (0), the whitening of mode ``block - 1``, or the means (the last block). Otherwise, all blocks are
    updated at once from the same statistics. This is faster, but the likelihood can decrease.
    """
    order = len(unit.shape)
    if block in (None, 0):
        _update_variances(unit, found, prior)
    if block in (None, order + 1) and unit.means == "own":
        step = found.pull / found.precision.clamp(min=torch.finfo(found.pull.dtype).tiny)  # (K, coefficients)
        unit.offset.add_(unit.synthesize(step[:, None])[:, 0, int(unit.level) :])
        found.pull.zero_()
    for d in range(order):
        if block in (None, d + 1) and getattr(unit, f"whitening_{d}", None) is not None:
            _update_whitening(unit, found, prior, d, keep_scale=block is None)


def n_blocks(unit: WhitenedMixture) -> int:
    """Return the number of blocks that :func:`maximization` can update separately."""
    return len(unit.shape) + 2


def _update_variances(unit: WhitenedMixture, found: Statistics, prior: Prior) -> None:
    """Update weights, contrasts, gates and precisions.

    The variance of a coefficient is a product of three factors. Each of them is updated in turn given the others.
    """
    tiny = torch.finfo(found.share.dtype).tiny
    share = found.share.sum(1)
    unit.logits.copy_(found.share.clamp(min=tiny).log())
    if unit.gate:
        unit.gate_logits.copy_(found.gates.sum(1).clamp(min=tiny).log())
    log_contrast, log_precision = unit.log_contrast.clone(), unit.log_precision.clone()
    log_width = unit.log_width.clone() if unit.gate else log_contrast.new_zeros(unit.n_components, 1)
    floor = SMALLEST_VARIANCE * _squared_norms(unit)  # (K, coefficients)
    variances_before, _ = prior.moments(unit)  # (K, coefficients)
    J, extra = unit.n_coefficients, prior.weight

    def ratio(squares: Tensor, counts: Tensor, before: Tensor) -> Tensor:
        """Return the logarithm of a variance, or its previous value where nothing was counted."""
        seen = (counts > tiny) & (squares > 0)
        return torch.where(seen, (squares / counts.clamp(min=tiny)).clamp(min=tiny).log(), before)

    for _ in range(_ROUNDS):
        weighted = torch.einsum("kcgj,kj->kcg", found.squares, torch.exp(log_precision))
        squares = (weighted * torch.exp(-log_width)[:, None]).sum(2)  # (K, C)
        squares = squares + extra * J / torch.exp(-log_contrast).mean(1, keepdim=True)
        log_contrast = ratio(squares, found.gates.sum(2) + extra * J, log_contrast)
        log_contrast = _centered(log_contrast, found.share)
        if unit.gate:
            log_width = ratio((weighted * torch.exp(-log_contrast)[:, :, None]).sum(1), found.gates.sum(1), log_width)
            log_width = _centered(log_width, found.gates.sum(1))
        scales = torch.exp(-log_contrast[:, :, None] - log_width[:, None])
        squares = torch.einsum("kcgj,kcg->kj", found.squares, scales)
        scale = (variances_before * torch.exp(log_precision)).mean(1, keepdim=True)
        squares = squares + extra * variances_before / scale
        counts = share[:, None] + extra
        log_precision = -ratio(torch.maximum(squares, counts * floor), counts, -log_precision)
    widest_first = log_width.argsort(stable=True, dim=1, descending=True)
    alive = (share > _SMALLEST_COUNT * extra)[:, None]  # the scale of other components is arbitrary
    unit.log_contrast.copy_(torch.where(alive, log_contrast, unit.log_contrast))
    unit.log_precision.copy_(torch.where(alive, log_precision, unit.log_precision))
    if unit.gate:
        unit.log_width.copy_(torch.where(alive, log_width, unit.log_width).gather(1, widest_first))
        unit.gate_logits.copy_(unit.gate_logits.gather(1, widest_first))


def _centered(logs: Tensor, counts: Tensor) -> Tensor:
    """Subtract the mean over the samples, and limit the distance to it: (K, m), (K, m) -> (K, m)."""
    total = counts.sum(1, keepdim=True).clamp(min=torch.finfo(counts.dtype).tiny)
    return (logs - (logs * counts).sum(1, keepdim=True) / total).clamp(-_LARGEST_REACH, _LARGEST_REACH)


def _squared_norms(unit: WhitenedMixture) -> Tensor:
    """Return the squared norm of the map from standardized arrays to each coefficient: (K, coefficients)."""
    total = unit.logits.new_ones(1, 1)
    for matrix in unit.whitenings():
        rows = (matrix**2).sum(2)  # (K or 1, I_d)
        total = (total[:, :, None] * rows[:, None]).flatten(1)
    return total[:, int(unit.level) :].expand(unit.n_components, -1)


def _update_whitening(unit: WhitenedMixture, found: Statistics, prior: Prior, d: int, *, keep_scale: bool) -> None:
    """Update the rows of one mode's whitening in turn: each maximizes the likelihood given the others.

    In the coordinates of the current coefficients, row e_i of the change E maximizes
    m log|det E| - e_i' H_i e_i / 2, where m is the weighted number of coefficients per row. If `keep_scale` is True,
    the rows keep their lengths, so that the update does not duplicate that of the precisions.
    """
    own = getattr(unit, f"whitening_{d}")  # (K, J, J)
    curvature, J = found.curvature[d], own.shape[1]
    m = (found.share.sum(1) + prior.weight) * (math.prod(unit.shape) // unit.shape[d])  # (K,)
    if prior.weight:
        curvature = curvature + prior.weight * _pseudo_curvature(unit, prior, d)
    trace = curvature.diagonal(dim1=2, dim2=3).mean(2)[:, :, None, None]
    eye = torch.eye(J, dtype=own.dtype, device=own.device)
    curvature = curvature + _RIDGE * trace * eye
    change = eye.repeat(unit.n_components, 1, 1)
    usable = (m > 0) & (trace.flatten(1) > 0).all(1)
    curvature[~usable] = eye
    for _ in range(_SWEEPS):
        for i in range(J):
            row = torch.linalg.solve_ex(change @ curvature[:, i], eye[i].expand(len(change), J))[0]  # (K, J)
            length = torch.einsum("ka,kab,kb->k", row, curvature[:, i], row)
            wanted = curvature[:, i, i, i] if keep_scale else m
            change[:, i] = row * (wanted / length).sqrt()[:, None]
    change[~usable] = eye
    own.copy_(change @ own)
    found.curvature[d] = torch.einsum("kab,kibc,kdc->kiad", change, found.curvature[d], change)


def _normalize(unit: WhitenedMixture) -> None:
    """Scale the rows of each whitening to unit length, and the precisions so that the density stays the same."""
    norms = _squared_norms(unit)
    unit.log_precision.add_(norms.log())
    for d in range(len(unit.shape)):
        if (own := getattr(unit, f"whitening_{d}", None)) is not None:
            own.div_(torch.linalg.vector_norm(own, dim=2, keepdim=True))


def _pseudo_curvature(unit: WhitenedMixture, prior: Prior, d: int) -> Tensor:
    """Return the sums of precision times z z' over the coefficients of each row, of one pseudo-sample: (K, J, J, J)."""
    first = int(unit.level)
    variances, inner = prior.moments(unit)
    each = torch.exp(unit.log_precision) * variances
    each = each / each.mean(1, keepdim=True)
    arrays = torch.nn.functional.pad(each, (first, 0)).reshape(-1, *unit.shape)
    of_rows = arrays.movedim(d + 1, 1).reshape(len(arrays), unit.shape[d], -1).sum(2)[:, first:]  # (K, J)
    along = inner[d][:, first:, first:]
    of_rows = of_rows / along.diagonal(dim1=1, dim2=2)
    return of_rows[:, :, None, None] * along[:, None]


def revive(unit: WhitenedMixture, found: Statistics, rng: RandomSource) -> int:
    """Replace components that explain almost no samples with noisy copies of those that explain the most samples.

    Return the number of components that were replaced.
    """
    share = found.share.sum(1)
    dead = torch.nonzero(share < _DEAD * share.mean())[:, 0]
    if not len(dead):
        return 0
    rounded = (share / share.mean()).mul_(1e4).round()  # so that rounding errors do not decide between equal shares
    source = rounded.argsort(stable=True, descending=True)[: len(dead)]
    with torch.no_grad():
        for name, parameter in unit.named_parameters():
            if name not in _SHARED_PARAMETERS:
                parameter[dead] = parameter[source]
        noise = rng.normal((len(dead), unit.n_coefficients), unit.log_precision)
        unit.log_precision[dead] += _SPLIT_NOISE * noise
        for chosen in (source, dead):
            unit.logits[chosen] -= math.log(2)
    for field in fields(found):
        value = getattr(found, field.name)
        for part in value if isinstance(value, list) else [value]:
            if part.ndim:
                part[source] /= 2
                part[dead] = part[source]
    return len(dead)


@torch.no_grad()
def start(unit: WhitenedMixture, rotated: Tensor, weights: Tensor, rng: RandomSource) -> None:
    """Initialize the components from weighted samples, given their cosine coefficients (n, N).

    The whitening of each mode starts from the principal axes of the mode, and the precisions from the variances along
    these axes, with noise. Own means start from clusters. The result depends only on the weighted moments of the
    samples, so a sample with weight 2 counts as two samples.
    """
    first = int(unit.level)
    if unit.level:
        unit.level_log_variance.copy_((weights @ rotated[:, :1] ** 2).clamp(min=SMALLEST_VARIANCE).log())
    mean = weights @ rotated
    deviation = rotated - mean
    deviation[:, :first] = 0
    arrays = deviation.reshape(-1, *unit.shape)
    for d in range(len(unit.shape)):
        if (own := getattr(unit, f"whitening_{d}", None)) is not None:
            rows = (arrays * weights.reshape(-1, *[1] * len(unit.shape)).sqrt()).movedim(d + 1, 0).flatten(1)[first:]
            own.copy_(_principal_axes(rows @ rows.T).expand(own.shape))
    if unit.means == "own":
        centers, rotated_centers = _clusters(deviation, weights, unit.n_components, rng)
        unit.offset.copy_((mean + rotated_centers)[:, first:])
        deviation = deviation - rotated_centers[centers]
    z = _axes(unit, deviation)[:, first:]
    variances = (weights @ z**2).clamp(min=SMALLEST_VARIANCE)
    noise = rng.normal(unit.log_precision.shape, variances)
    unit.log_precision.copy_(_START_NOISE * noise - variances.log())
    energy = (z**2 / variances).mean(1).clamp(min=_SMALLEST_ENERGY).log()
    middle = weights @ energy
    spread = (weights @ (energy - middle) ** 2).sqrt()
    quantiles = (torch.arange(unit.n_contrasts, device=z.device) + 0.5) / unit.n_contrasts
    unit.log_contrast.copy_(middle + spread * torch.special.ndtri(quantiles).to(spread))


def _principal_axes(covariance: Tensor) -> Tensor:
    """Return the eigenvectors of a covariance as rows: (J, J) -> (J, J).

    Directions without variance are ordered by a small ridge, and the largest entry of each row is positive. The result
    is thus the same for covariances that are equal except for rounding.
    """
    size = len(covariance)
    ridge = _PRIOR_RIDGE * covariance.diagonal().mean() * torch.linspace(1, 2, size).to(covariance)
    axes = torch.linalg.eigh(covariance + torch.diag(ridge)).eigenvectors.T
    largest = axes.gather(1, axes.abs().argmax(1, keepdim=True))
    signed: Tensor = axes * torch.sign(largest)
    return signed


def _axes(unit: WhitenedMixture, rotated: Tensor) -> Tensor:
    """Whiten cosine coefficients with the first component: (n, N) -> (n, N)."""
    return mode_products(rotated.reshape(1, -1, *unit.shape), [matrix[:1] for matrix in unit.whitenings()])[0]


def _clusters(samples: Tensor, weights: Tensor, count: int, rng: RandomSource) -> tuple[Tensor, Tensor]:
    """Cluster weighted samples (n, N) around `count` centers, and return the cluster of each sample and the centers.

    The centers start as random points with the covariance of the samples, which depends only on the samples' moments.
    """
    covariance = (samples * weights[:, None]).T @ samples
    values, vectors = torch.linalg.eigh(covariance)
    normal = rng.normal((count, samples.shape[1]), samples)
    centers = (normal * values.clamp(min=0).sqrt()) @ vectors.T
    for _ in range(_LLOYD_ROUNDS):
        nearest = _nearest(samples, centers)
        of_cluster = torch.nn.functional.one_hot(nearest, count).to(samples) * weights[:, None]
        total = of_cluster.sum(0)[:, None]
        centers = torch.where(total > 0, (of_cluster.T @ samples) / total.clamp(min=1e-30), centers)
    return _nearest(samples, centers), centers


def _nearest(samples: Tensor, centers: Tensor) -> Tensor:
    return ((centers**2).sum(1) - 2 * samples @ centers.T).argmin(1)


@torch.no_grad()
def gradient(unit: WhitenedMixture, found: Statistics, prior: Prior) -> dict[str, Tensor]:
    """Return the gradient of the mean log-likelihood plus the log-prior with respect to the parameters of components.

    By Fisher's identity, the expected gradient under the posterior is the gradient of the likelihood, so the
    statistics of the E-step suffice. The gradients for the whitenings are with respect to E in (I + E) A. The gradients
    for the means are with respect to t, where t / sqrt(d) are the whitened coefficients of the means.
    """
    share, J, extra = found.share.sum(1), unit.n_coefficients, prior.weight
    inverses = torch.exp(-unit.state_log_variances())  # (K, C, G)
    precisions = torch.exp(unit.log_precision)  # (K, coefficients)
    excess = 0.5 * (torch.einsum("kcgj,kj->kcg", found.squares, precisions) * inverses - found.gates)
    squares = torch.einsum("kcgj,kcg->kj", found.squares, inverses) * precisions
    pseudo = prior.moments(unit)[0] * precisions
    pseudo = pseudo / pseudo.mean(1, keepdim=True)
    contrasts = torch.exp(-unit.log_contrast)
    contrasts = contrasts / contrasts.mean(1, keepdim=True)
    found_gradients = {
        "logits": found.share - found.share.sum() * unit.log_weights().exp(),
        "log_contrast": excess.sum(2) + 0.5 * J * extra * (contrasts - 1),
        "log_precision": 0.5 * (share[:, None] - squares + extra * (1 - pseudo)),
    }
    if unit.gate:
        gates = found.gates.sum(1)
        found_gradients["log_width"] = excess.sum(1)
        found_gradients["gate_logits"] = gates - gates.sum(1, keepdim=True) * unit.log_gates().exp()
    if unit.means == "own":
        found_gradients["offset"] = found.pull * torch.exp(-0.5 * unit.log_precision)
    for d, size in enumerate(unit.shape):
        if getattr(unit, f"whitening_{d}", None) is not None:
            curvature = found.curvature[d]
            if extra:
                curvature = curvature + extra * _pseudo_curvature(unit, prior, d)
            m = (share + extra) * (math.prod(unit.shape) // size)
            own = curvature.diagonal(dim1=1, dim2=2).mT  # (K, J, J): precision times z, times z'
            eye = torch.eye(own.shape[1], dtype=own.dtype, device=own.device)
            found_gradients[f"whitening_{d}"] = m[:, None, None] * eye - own
    return found_gradients


class Fitting:
    """Expectation maximization on weighted samples in memory.

    Parameters
    ----------
    unit : WhitenedMixture
        Mixture to train.
    weights : Tensor
        Weights of the samples, of shape (n,), with sum 1.
    batch_size : int
        Number of samples per update, except in the last two epochs.
    prior : Prior
        Pseudo-samples.
    rng : RandomSource
        Source of random numbers.
    exact : bool
        Whether full epochs consider all components of each sample, or only the likely ones.
    """

    def __init__(
        self, unit: WhitenedMixture, weights: Tensor, batch_size: int, prior: Prior, rng: RandomSource, *, exact: bool
    ) -> None:
        self.unit, self.weights, self.prior, self.rng = unit, weights, prior, rng
        self.batch_size, self.exact = batch_size, exact
        self.history: list[float] = []  # mean log-likelihood per epoch, of the parameters before each update
        self.n_updates = 0
        self._moments: dict[str, tuple[Tensor, Tensor]] = {}  # running means of gradients and their squares
        self._former: tuple[float, dict[str, Tensor], Statistics] | None = None
        self._careful = 0  # number of single blocks to update before all blocks are updated at once again
        self._block = 0

    def epoch_of_batches(
        self, rotated: Tensor, rate: float, last_rate: float, should_stop: Callable[[], bool] = lambda: False
    ) -> None:
        """Update the parameters after each batch by a gradient step of Adam.

        The learning rate changes linearly from `rate` to `last_rate`.
        """
        n, total = len(rotated), 0.0
        for number, rows in enumerate(self.rng.permutation(n, rotated.device).split(self.batch_size)):
            part = self.weights[rows].sum()
            if should_stop() or not part > 0:
                continue
            found = expectation(self.unit, rotated[rows], self.weights[rows] / part, exact=False)
            total += float(part * found.log_likelihood)
            self.n_updates += 1
            self._ascend(
                gradient(self.unit, found, self.prior), rate + (last_rate - rate) * number * self.batch_size / n
            )
        self.history.append(total)

    def _ascend(self, gradients: dict[str, Tensor], rate: float) -> None:
        """Perform one step of Adam uphill. See :func:`gradient` for the coordinates of whitenings and means."""
        for name, value in gradients.items():
            first, second = self._moments.setdefault(name, (torch.zeros_like(value), torch.zeros_like(value)))
            first.lerp_(value, 1 - _BETAS[0])
            second.lerp_(value**2, 1 - _BETAS[1])
            mean = first / (1 - _BETAS[0] ** self.n_updates)
            size = (second / (1 - _BETAS[1] ** self.n_updates)).sqrt() + _SMALLEST_GRADIENT
            own = self.unit.get_parameter(name)
            step = rate * mean / size
            if name.startswith("whitening"):
                norm = torch.linalg.matrix_norm(step, keepdim=True)
                step = (step * (_LARGEST_CHANGE / norm.clamp(min=_LARGEST_CHANGE))) @ own
            elif name == "offset":
                step = step * torch.exp(-0.5 * self.unit.log_precision)
                step = self.unit.synthesize(step[:, None])[:, 0, int(self.unit.level) :]
            own.add_(step)

    def full_epoch(self, rotated: Tensor, *, update: bool = True, may_revive: bool = False) -> None:
        """Update the parameters once, from all samples. The objective never decreases, except to revive components.

        The objective is the mean log-likelihood plus the log-prior.

        All blocks of parameters are updated at once. If this lowered the objective in the previous epoch, the update is
        undone, and for a while, only one block is updated per epoch. If `update` is False, the parameters are only
        compared with those before the previous update.
        """
        _normalize(self.unit)
        found = expectation(self.unit, rotated, self.weights, exact=self.exact)
        reached = float(found.log_likelihood) + self.prior.log_density(self.unit)
        if self._former is not None and reached < self._former[0]:
            reached, values, found = self._former
            self.unit.load_state_dict(values)
            self._careful = n_blocks(self.unit)
        self.history.append(float(found.log_likelihood))
        if not update:
            return
        values = {name: value.clone() for name, value in self.unit.state_dict().items()}
        self._former = reached, values, copy.deepcopy(found)
        if self._careful:
            self._careful -= 1
            maximization(self.unit, found, self.prior, self._block)
            self._block = (self._block + 1) % n_blocks(self.unit)
        else:
            maximization(self.unit, found, self.prior)
        if may_revive and revive(self.unit, found, self.rng):
            self._former = None

    def forget(self) -> None:
        """Forget the previous objective, because the samples have changed."""
        self._former = None
