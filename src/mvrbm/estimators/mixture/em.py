"""Expectation maximization for whitened mixtures.

One step computes sums over the posterior of components, contrasts and gates (E-step, in `posterior`), and updates all
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

from mvrbm.devices import one_thread
from mvrbm.estimators.mixture.posterior import Moments, Statistics, expectation, moments
from mvrbm.random import RandomSource
from mvrbm.units.whitened import SMALLEST_VARIANCE, WhitenedMixture, mode_products

# Bounds on the log-variances of contrasts and gates, relative to their means over the samples.
_LARGEST_REACH = 8.0
# Number of rounds in which contrasts, widths and precisions are updated in turn.
_ROUNDS = 3
# Minimum fraction of the coefficients that a state explains if its variance is updated.
_SMALLEST_FRACTION = 1e-6
# Minimum number of samples of a component that is updated, relative to the pseudo-samples.
_SMALLEST_COUNT = 1e-3
# A component is dead if its share of the samples is smaller than this fraction of the average.
_DEAD = 0.02
# Number of times that each row of a whitening is updated in one step, and the ridge that keeps its curvature regular.
_SWEEPS = 2
_RIDGE = 1e-6
# Variance in each direction that is added to the covariances of pseudo-samples, relative to the mean variance.
_PRIOR_RIDGE = 1e-3
# Number of samples, of folds, and of values between SMALLEST_VARIANCE and 1 when the variance of noise is chosen.
_NOISE_SAMPLES, _NOISE_FOLDS, _N_NOISES = 2000, 4, 13
# Difference of the sums of standardized samples below which they count as equal.
_SAME = 1e-4
# Degrees of freedom of the distribution of Student in this choice, and the loss that counts as none, in nats per entry.
_FREEDOM, _TOLERABLE = 5.0, 1e-3
# Minimum number of vectors along a mode, per entry of the mode, for which its whitening is updated.
_FEWEST_ROWS = 2
# Parameters that all components share.
_SHARED_PARAMETERS = {"bias", "center", "log_scale", "level_log_variance"}
# Standard deviation of the log-precisions among the initial components, and between a dead component that is revived
# and the component that it copies.
_START_NOISE = 0.5
_SPLIT_NOISE = 0.3
# Minimum energy per coefficient when its logarithm determines the initial contrasts.
_SMALLEST_ENERGY = 1e-6
# Number of runs of k-means for the initial means, number of rounds in each, and relative decrease of the mean squared
# distance for which a later run replaces an earlier one. Rounding errors do not decide between equal clusters.
_STARTS, _LLOYD_ROUNDS, _BETTER = 5, 20, 1e-4
# Decay rates of Adam, and the size below which gradients are not enlarged.
_BETAS = (0.9, 0.99)
_SMALLEST_GRADIENT = 1e-8
# Maximum Frobenius norm of the relative change in a whitening in one step of Adam. Steps of large matrices would
# otherwise diverge, because their norm grows with the number of rows.
_LARGEST_CHANGE = 0.25


@dataclass(frozen=True)
class Prior:
    r"""Pseudo-samples that each component has in addition to the data.

    Their distribution is a Gaussian with a separable covariance: that of the data along each mode, at the scale of the
    component. In addition, noise is added to the moments of each component. The log-prior of a component is

    .. math:: \nu \Bigl\{\log|\det A| + \tfrac12 \sum_j \log d_j
              - \tfrac J2 \log\Bigl(\tfrac1J \sum_j d_j c_j\Bigr)
              - \tfrac J2 \sum_c l_c - \tfrac{JC}2 \log\Bigl(\tfrac1C \sum_c e^{-l_c}\Bigr)\Bigr\},

    where `d` are the precisions, `c` the variances of the coefficients in the data, and `l` the log-contrasts, minus
    half of the noise's energy. The first part does not depend on the scale of the component.
    """

    weight: float  # number of pseudo-samples per component, as a share of the total weight of the samples
    covariances: list[Tensor]  # (I_d, I_d) per mode, of cosine coefficients
    noise: float  # variance in every direction of noise that is added to the moments of each component
    modes: list[int]  # modes whose whitenings are updated; there are too few samples for the others

    @classmethod
    def of(
        cls, unit: WhitenedMixture, rotated: Tensor, weights: Tensor, weight: float, total: float | None = None
    ) -> Prior:
        """Build the prior from cosine coefficients (n, N), with the level removed, and their weights (n,).

        `total` is the number of samples that the weights stand for. Default: n.
        """
        total = len(rotated) if total is None else total
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
        # Without pseudo-samples, there is only as much noise as keeps variances from vanishing.
        noise = _noise_variance(unit, rotated, weights) if weight else SMALLEST_VARIANCE
        modes = [
            d
            for d, size in enumerate(unit.shape)
            if getattr(unit, f"whitening_{d}", None) is not None
            and (not weight or total * rotated.shape[1] >= _FEWEST_ROWS * size**2)
        ]
        return cls(weight, covariances, noise / unit.n_components, modes)

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

    def noise_energies(self, unit: WhitenedMixture) -> Tensor:
        """Return the expected squares of the coefficients of the noise, divided by their variances: (K, coefficients).

        The inverse variances are averaged over the contrasts. The gates are in their first state, which is the widest.
        """
        inverse = torch.exp(-unit.state_log_variances())[:, :, 0].mean(1)
        return self.noise * _squared_norms(unit) * torch.exp(unit.log_precision) * inverse[:, None]

    def log_density(self, unit: WhitenedMixture) -> float:
        """Return the log-prior of a mixture."""
        noise = -0.5 * float(self.noise_energies(unit).sum())
        if not self.weight:
            return noise
        J = unit.n_coefficients
        scale = (self.moments(unit)[0] * torch.exp(unit.log_precision)).mean(1).log()
        widest = torch.exp(-unit.log_contrast).mean(1).log()
        logs = unit.log_determinant() + 0.5 * unit.log_precision.sum(1) - 0.5 * J * scale
        logs -= 0.5 * J * (unit.log_contrast.sum(1) + unit.n_contrasts * widest)
        return float(self.weight * logs.sum()) + noise


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
    for d in prior.modes:
        if block in (None, d + 1):
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
    norms = _squared_norms(unit)  # (K, coefficients)
    floor = SMALLEST_VARIANCE * norms
    found_squares = found.squares.clone()
    found_squares[:, :, 0] += prior.noise / unit.n_contrasts * norms[:, None]
    variances_before, _ = prior.moments(unit)  # (K, coefficients)
    J, extra = unit.n_coefficients, prior.weight

    def ratio(squares: Tensor, counts: Tensor, before: Tensor) -> Tensor:
        """Return the logarithm of a variance, or its previous value where nothing was counted."""
        seen = (counts > _SMALLEST_FRACTION * counts.sum(1, keepdim=True)) & (counts > tiny) & (squares > 0)
        return torch.where(seen, (squares / counts.clamp(min=tiny)).clamp(min=tiny).log(), before)

    for _ in range(_ROUNDS):
        weighted = torch.einsum("kcgj,kj->kcg", found_squares, torch.exp(log_precision))
        squares = (weighted * torch.exp(-log_width)[:, None]).sum(2)  # (K, C)
        squares = squares + extra * J / torch.exp(-log_contrast).mean(1, keepdim=True)
        log_contrast = ratio(squares, found.gates.sum(2) + extra * J, log_contrast)
        log_contrast = _centered(log_contrast, found.share)
        if unit.gate:
            log_width = ratio((weighted * torch.exp(-log_contrast)[:, :, None]).sum(1), found.gates.sum(1), log_width)
            log_width = _centered(log_width, found.gates.sum(1))
        scales = torch.exp(-log_contrast[:, :, None] - log_width[:, None])
        squares = torch.einsum("kcgj,kcg->kj", found_squares, scales)
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
        of_rows, along = _pseudo_samples(unit, prior.moments(unit), d)
        curvature = curvature + prior.weight * of_rows[:, :, None, None] * along[:, None]
    of_rows, along = _noise(unit, prior, d)
    curvature = curvature + of_rows[:, :, None, None] * along[:, None]
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


def _pseudo_samples(unit: WhitenedMixture, moments: tuple[Tensor, list[Tensor]], d: int) -> tuple[Tensor, Tensor]:
    """Return two arrays whose product gives, for each row of mode `d`, the precision-weighted sum of z z' over one
    pseudo-sample.

    The arrays are `rows`, of shape (K, J), and a matrix for each component, of shape (K, J, J). The sum for row `i` is
    ``rows[:, i]`` times the matrices. `moments` is the result of :meth:`Prior.moments`.
    """
    first = int(unit.level)
    variances, inner = moments
    each = torch.exp(unit.log_precision) * variances
    each = each / each.mean(1, keepdim=True)
    arrays = torch.nn.functional.pad(each, (first, 0)).reshape(-1, *unit.shape)
    of_rows = arrays.movedim(d + 1, 1).reshape(len(arrays), unit.shape[d], -1).sum(2)[:, first:]  # (K, J)
    along = inner[d][:, first:, first:]
    return of_rows / along.diagonal(dim1=1, dim2=2), along


def _noise(unit: WhitenedMixture, prior: Prior, d: int) -> tuple[Tensor, Tensor]:
    """Return the factors of the sums of precision times z z' for each row of mode `d`, of the noise: (K, J), (K, J, J).

    The sum for row `i` is the number ``rows[:, i]`` times the second result.
    """
    first = int(unit.level)
    arrays = torch.nn.functional.pad(prior.noise_energies(unit), (first, 0)).reshape(-1, *unit.shape)
    of_rows = arrays.movedim(d + 1, 1).reshape(len(arrays), unit.shape[d], -1).sum(2)[:, first:]  # (K, J)
    own = unit.get_parameter(f"whitening_{d}")
    along = own @ own.mT
    return of_rows / along.diagonal(dim1=1, dim2=2), along


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


def _noise_variance(unit: WhitenedMixture, rotated: Tensor, weights: Tensor) -> float:
    """Choose the variance of the noise by cross-validation.

    Without noise, the variance would vanish in directions in which few samples vary by chance. Each fold is scored by a
    distribution of Student with the principal axes of the modes of the other folds. The result is the smallest variance
    whose score is about as good as the best.
    """
    part = torch.arange(len(rotated), device=rotated.device)[:: max(1, len(rotated) // _NOISE_SAMPLES)]
    first = int(unit.level)
    # Equal samples are in the same fold, so that a sample with weight 2 counts as two samples.
    position = rotated[part].sum(1) / rotated.square().mean().sqrt().clamp(min=torch.finfo(rotated.dtype).tiny)
    different, rank = torch.unique((position / _SAME).round(), return_inverse=True)
    folds = min(_NOISE_FOLDS, len(different))
    if folds < 2:
        return SMALLEST_VARIANCE
    fold = rank % folds
    found = torch.logspace(math.log10(SMALLEST_VARIANCE), 0, _N_NOISES).to(rotated)
    total = torch.zeros_like(found)
    for held in range(folds):
        rest, others = part[fold != held], part[fold == held]
        w = weights[rest] / weights[rest].sum()
        center = w @ rotated[rest]
        axes = _mode_axes(unit, rotated[rest] - center, w)
        matrices = [matrix[None] for matrix in axes]
        z = mode_products((rotated - center)[part].reshape(1, -1, *unit.shape), matrices)[0, :, first:]
        variances, squares = z[fold != held] ** 2, z[fold == held] ** 2
        variances = w @ variances
        for i, noise in enumerate(found):
            noisy = variances + noise
            energy = (1 + _FREEDOM / unit.n_coefficients) * ((squares / noisy).sum(1) / _FREEDOM).log1p()
            total[i] -= 0.5 * weights[others] @ (energy + noisy.log().mean())
    total = total / weights[part].sum()  # in nats per entry
    return float(found[total >= total.max() - _TOLERABLE][0])


def _mode_axes(unit: WhitenedMixture, deviation: Tensor, weights: Tensor) -> list[Tensor]:
    """Return the principal axes of each mode that is whitened, and the identity for others: (I_d, I_d) each."""
    first = int(unit.level)
    arrays = deviation.reshape(-1, *unit.shape).clone()
    arrays.flatten(1)[:, :first] = 0
    found = []
    for d, size in enumerate(unit.shape):
        axes = torch.eye(size).to(deviation)
        if getattr(unit, f"whitening_{d}", None) is not None:
            rows = (arrays * weights.reshape(-1, *[1] * len(unit.shape)).sqrt()).movedim(d + 1, 0).flatten(1)[first:]
            axes[first:, first:] = _principal_axes(rows @ rows.T)
        found.append(axes)
    return found


@torch.no_grad()
@one_thread()
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
    for d, axes in enumerate(_mode_axes(unit, deviation, weights)):
        if (own := getattr(unit, f"whitening_{d}", None)) is not None:
            own.copy_(axes[first:, first:].expand(own.shape))
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

    This is the best of several runs of k-means by the mean squared distance from the centers. Distances larger than
    that of a typical sample from the mean are clipped, because a few outliers would otherwise get clusters of their
    own.
    """
    least, best = math.inf, None
    far = float(weights @ ((samples - weights @ samples) ** 2).sum(1))
    for _ in range(_STARTS if count > 1 else 1):
        centers = _distant_samples(samples, weights, count, far, rng)
        for _ in range(_LLOYD_ROUNDS):
            nearest = _nearest(samples, centers)
            of_cluster = torch.nn.functional.one_hot(nearest, count).to(samples) * weights[:, None]
            total = of_cluster.sum(0)[:, None]
            before = centers
            centers = torch.where(total > 0, (of_cluster.T @ samples) / total.clamp(min=1e-30), centers)
            if torch.equal(centers, before):
                break
        nearest = _nearest(samples, centers)
        distance = float(weights @ ((samples - centers[nearest]) ** 2).sum(1).clamp(max=far))
        if distance < (1 - _BETTER) * least:
            least, best = distance, (nearest, centers)
    assert best is not None
    return best


def _distant_samples(samples: Tensor, weights: Tensor, count: int, far: float, rng: RandomSource) -> Tensor:
    """Choose `count` samples by greedy k-means++ (Arthur and Vassilvitskii, 2007): (n, N) -> (count, N).

    Each is drawn with a probability proportional to its weight times its squared distance from the nearest sample
    chosen before, which is clipped at `far`. Of several draws, the one that reduces these distances the most is kept.
    The samples are sorted along a random direction, so that the cumulative sums from which the numbers are drawn do not
    depend on the order of the samples, and a sample with weight 2 counts as two samples.
    """
    order = (samples @ rng.normal((1, samples.shape[1]), samples)[0]).argsort()
    samples, weights = samples[order], weights[order]
    squares = (samples**2).sum(1)
    n_candidates = 2 + int(math.log(count))
    nearest = torch.full_like(weights, math.inf)  # squared distance of each sample from the nearest chosen sample
    chosen: list[Tensor] = []
    for _ in range(count):
        sums = (weights * nearest if chosen else weights).double().cumsum(0)
        numbers = rng.uniform((1, n_candidates), sums)[0] * sums[-1]
        candidates = samples[torch.searchsorted(sums, numbers).clamp(max=len(samples) - 1)]
        distances = squares - 2 * candidates @ samples.T + (candidates**2).sum(1, keepdim=True)
        distances = torch.minimum(distances.clamp(min=0, max=far), nearest)  # (n_candidates, n)
        best = (distances @ weights).argmin()
        nearest = distances[best]
        chosen.append(candidates[best])
    return torch.stack(chosen)


def _nearest(samples: Tensor, centers: Tensor) -> Tensor:
    return ((centers**2).sum(1) - 2 * samples @ centers.T).argmin(1)


@torch.no_grad()
def gradient(unit: WhitenedMixture, found: Moments, prior: Prior) -> dict[str, Tensor]:
    """Return the gradient of the mean log-likelihood plus the log-prior with respect to the parameters of components.

    By Fisher's identity, the expected gradient under the posterior is the gradient of the likelihood, so the
    sums of the E-step suffice. The gradients for the whitenings are with respect to E in (I + E) A. The gradients
    for the means are with respect to t, where t / sqrt(d) are the whitened coefficients of the means.
    """
    share, J, extra = found.share.sum(1), unit.n_coefficients, prior.weight
    inverses = torch.exp(-unit.state_log_variances())  # (K, C, G)
    noise = prior.noise_energies(unit)
    excess = 0.5 * (found.energies * inverses - found.gates)
    excess[:, :, 0] += 0.5 * noise.sum(1, keepdim=True) * inverses[:, :, 0] / inverses[:, :, 0].sum(1, keepdim=True)
    of_prior = prior.moments(unit)
    pseudo = of_prior[0] * torch.exp(unit.log_precision)
    pseudo = pseudo / pseudo.mean(1, keepdim=True)
    contrasts = torch.exp(-unit.log_contrast)
    contrasts = contrasts / contrasts.mean(1, keepdim=True)
    found_gradients = {
        "logits": found.share - found.share.sum() * unit.log_weights().exp(),
        "log_contrast": excess.sum(2) + 0.5 * J * extra * (contrasts - 1),
        "log_precision": 0.5 * (share[:, None] - found.squares - noise + extra * (1 - pseudo)),
    }
    if unit.gate:
        gates = found.gates.sum(1)
        found_gradients["log_width"] = excess.sum(1)
        found_gradients["gate_logits"] = gates - gates.sum(1, keepdim=True) * unit.log_gates().exp()
    if unit.means == "own":
        found_gradients["offset"] = found.pull
    for d in prior.modes:
        own = found.outer[d]
        if extra:
            of_rows, along = _pseudo_samples(unit, of_prior, d)
            own = own + extra * of_rows[:, :, None] * along
        of_rows, along = _noise(unit, prior, d)
        own = own + of_rows[:, :, None] * along
        m = (share + extra) * (math.prod(unit.shape) // unit.shape[d])
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
        #: Increase of the objective by the last joint update, or by the last update of all blocks in turn. It is
        #: infinite after an update that was undone and between the blocks.
        self.gain = math.inf
        self.n_updates = 0
        self._moments: tuple[Tensor, Tensor] | None = None  # running means of all gradients and their squares
        self._former: tuple[float, dict[str, Tensor], Statistics] | None = None
        self._reached = -math.inf  # objective from which the gain is computed
        self._block: int | None = None  # block that was updated last, or None for all blocks
        self._blocks: list[int] = []  # blocks to update one at a time before all blocks are updated at once again

    @one_thread()
    def epoch_of_batches(
        self, rotated: Tensor, rate: float, last_rate: float, should_stop: Callable[[], bool] = lambda: False
    ) -> None:
        """Update the parameters after each batch by a gradient step of Adam.

        The learning rate changes linearly from `rate` to `last_rate`.
        """
        n, total = len(rotated), rotated.new_zeros(())
        for number, rows in enumerate(self.rng.permutation(n, rotated.device).split(self.batch_size)):
            if should_stop():
                break
            part = self.weights[rows].sum().clamp(min=torch.finfo(rotated.dtype).tiny)
            found = moments(self.unit, rotated[rows], self.weights[rows] / part, exact=False)
            total += part * found.log_likelihood
            self.n_updates += 1
            self._ascend(
                gradient(self.unit, found, self.prior), rate + (last_rate - rate) * number * self.batch_size / n
            )
        self.history.append(float(total))

    def _ascend(self, gradients: dict[str, Tensor], rate: float) -> None:
        """Perform one step of Adam uphill. See :func:`gradient` for the coordinates of whitenings and means."""
        value = torch.cat([part.flatten() for part in gradients.values()])
        if self._moments is None:
            self._moments = torch.zeros_like(value), torch.zeros_like(value)
        first, second = self._moments
        first.lerp_(value, 1 - _BETAS[0])
        second.lerp_(value * value, 1 - _BETAS[1])
        size = (second / (1 - _BETAS[1] ** self.n_updates)).sqrt_().add_(_SMALLEST_GRADIENT)
        steps = first * (rate / (1 - _BETAS[0] ** self.n_updates)) / size
        parts = steps.split([part.numel() for part in gradients.values()])
        for (name, part), flat in zip(gradients.items(), parts, strict=True):
            own, step = self.unit.get_parameter(name), flat.reshape(part.shape)
            if name.startswith("whitening"):
                norm = torch.linalg.matrix_norm(step, keepdim=True)
                step = (step * (_LARGEST_CHANGE / norm.clamp(min=_LARGEST_CHANGE))) @ own
            elif name == "offset":
                step = step * torch.exp(-0.5 * self.unit.log_precision)
                step = self.unit.synthesize(step[:, None])[:, 0, int(self.unit.level) :]
            own.add_(step)

    @one_thread()
    def full_epoch(self, rotated: Tensor, *, update: bool = True, may_revive: bool = False) -> None:
        """Update the parameters once, from all samples. The objective never decreases, except to revive components.

        The objective is the mean log-likelihood plus the log-prior.

        All blocks of parameters are updated at once. If this lowered the objective in the previous epoch, the update is
        undone, and for a while, only one block is updated per epoch. If `update` is False, the parameters are only
        compared with those before the previous update. An epoch that revives components updates nothing else.
        """
        _normalize(self.unit)
        found = expectation(self.unit, rotated, self.weights, exact=self.exact, modes=self.prior.modes)
        reached = float(found.log_likelihood) + self.prior.log_density(self.unit)
        former = self._former
        undone = former is not None and reached < former[0]
        if former is not None and undone:
            reached, values, found = former
            self.unit.load_state_dict(values)
        self.history.append(float(found.log_likelihood))
        self.gain = math.inf
        if undone and self._block is None:
            self._blocks = list(range(n_blocks(self.unit)))
        elif former is not None and not self._blocks:
            self.gain = reached - self._reached
        if former is None or not self._blocks:
            self._reached = reached
        if not update:
            self._former = None
            return
        values = {name: value.clone() for name, value in self.unit.state_dict().items()}
        if may_revive and former is not None and revive(self.unit, found, self.rng):
            self._former = None
            return
        self._former = reached, values, copy.deepcopy(found)
        self._block = self._blocks.pop() if self._blocks else None
        maximization(self.unit, found, self.prior, self._block)

    def undo_last_update(self) -> None:
        """Return to the parameters before the last update, whose objective has not been computed."""
        if self._former is not None:
            self.unit.load_state_dict(self._former[1])
            self._former = None

    def forget(self) -> None:
        """Forget the previous objective, because the samples have changed."""
        self._former = None
