"""Whitened mixtures: the whole array is one site, with structure along each axis and a contrast that varies."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from typing import ClassVar, NamedTuple

import numpy as np
import torch
from scipy.fft import dct
from torch import Tensor, nn
from torch.nn.functional import log_softmax

from mvrbm.memory import check_memory
from mvrbm.random import RandomSource
from mvrbm.units.base import Alternatives, Unit, average, pick
from mvrbm.validation import choice, whole_number

#: Number of Gaussians that the gate of a coefficient mixes.
N_GATES = 3
#: Smallest variance of a coefficient of standardized data. It keeps constant directions from having infinite density.
SMALLEST_VARIANCE = 1e-6
# Standard deviation below which an entry counts as constant, in rounding errors of its mean.
_ROUNDING_ERRORS = 4
# Initial standard deviation of the logarithms of a component's precisions. Equal components would stay equal.
_START_NOISE = 0.3
# Initial log-variances of the contrasts and of the Gaussians of a gate lie between minus and plus this number.
_START_REACH = 1.5
#: Samples with at most this many entries are multiplied by one dense matrix per component, which is faster than one
#: product per mode.
MOST_DENSE = 128
#: Powers of 2 are several times as fast as powers of e on a CPU, especially where they underflow.
LOG2_E = 1 / math.log(2)


class WhitenedMixture(Unit):
    r"""Real arrays from a mixture of components, each with a separable whitening and a contrast.

    Let :math:`v = (x - \mu) / s` be the standardized array, for a fixed scale :math:`s`. In component `k` with contrast
    `c`, the coefficients

    .. math:: Z = (v - M_k) \times_1 A_k^{(1)} \dots \times_D A_k^{(D)}

    are independent with mean zero. Coefficient `j` has the variance :math:`\sigma_{kcg}^2 / d_{kj}`, where the contrast
    `c` is shared by all coefficients of the array, and the state `g` of the gate is drawn separately for each
    coefficient. The energy is :math:`-\log p(x) - \langle b, x / s\rangle`, where

    .. math:: p(x) \propto \sum_{kc} \pi_{kc} |\det A_k| \prod_j \sum_g w_{kg} N(z_j; 0, \sigma_{kcg}^2 / d_{kj})

    and :math:`A_k` is the Kronecker product of the matrices. The coefficients are also independent in a field, given
    `k` and `c`. Log-normalizers, means and samples are therefore exact. Couplings act on :math:`T(x) = x / s`.

    Parameters
    ----------
    shape : int or sequence of int
        Shape of the layer, which has any number of modes.
    n_components : int
        Number of components.
    n_contrasts : int
        Number of contrasts per component.
    gate : bool
        Whether each coefficient is a mixture of three Gaussians of different widths, given component and contrast. The
        widths and weights are shared by all coefficients of a component. If False, the coefficient is Gaussian.
    level : bool
        Whether the mean over the entries is independent of all other coefficients, and Gaussian with its own variance.
        It then has neither contrast nor gate.
    means : "own", "shared" or "one"
        Whether each component has its own mean :math:`M_k`, all components share the mean :math:`\mu`, or all entries
        share one mean.
    whiten : bool
        Whether to learn the matrices :math:`A_k`. If False, they are orthonormal cosine transforms.

    Examples
    --------
    >>> import torch
    >>> from mvrbm import WhitenedMixture
    >>> unit = WhitenedMixture((8, 8), n_components=2)
    >>> unit.mean(torch.zeros(1, 8, 8)).shape, unit.n_sites
    (torch.Size([1, 8, 8]), 1)
    """

    name = "whitened"
    arbitrary_zero = True
    levels = math.inf
    stacked_as: ClassVar[str | None] = None

    def __init__(
        self,
        shape: int | Sequence[int],
        *,
        n_components: int = 8,
        n_contrasts: int = 4,
        gate: bool = True,
        level: bool = False,
        means: str = "own",
        whiten: bool = True,
    ) -> None:
        super().__init__(shape)
        self.n_components = whole_number(n_components, "n_components")
        self.n_contrasts = whole_number(n_contrasts, "n_contrasts")
        self.gate, self.level, self.whiten = bool(gate), bool(level), bool(whiten)
        self.means = choice(means, "means", ("own", "shared", "one"))
        self.entry_modes = len(self.shape)
        self._first = int(self.level)  # index of the first coefficient that is whitened
        self.n_coefficients = math.prod(self.shape) - self._first
        if not self.n_coefficients:
            raise ValueError(f"level=True requires layers with at least 2 entries, got shape {self.shape}")
        K, sizes = self.n_components, [size - self._first for size in self.shape]
        numbers = K * (self.n_coefficients + sum(size**2 for size in sizes))
        check_memory(numbers, f"a mixture of {K} components of shape {self.shape}")
        self.center = nn.Parameter(torch.zeros([1] * len(self.shape) if means == "one" else self.shape))
        self.log_scale = nn.Parameter(torch.zeros(self.shape), requires_grad=False)
        if self.level:
            self.level_log_variance = nn.Parameter(torch.zeros(1))
        if self.means == "own":
            self.center.requires_grad_(False)
            self.offset = nn.Parameter(torch.zeros(K, self.n_coefficients))
        self.logits = nn.Parameter(torch.zeros(K, self.n_contrasts))
        self.log_contrast = nn.Parameter(torch.zeros(K, self.n_contrasts))
        self.log_precision = nn.Parameter(torch.zeros(K, self.n_coefficients))
        if self.gate:
            self.gate_logits = nn.Parameter(torch.zeros(K, N_GATES))
            self.log_width = nn.Parameter(torch.zeros(K, N_GATES))
        for d, size in enumerate(sizes):
            if self.whiten and size:
                self.register_parameter(f"whitening_{d}", nn.Parameter(torch.eye(size).repeat(K, 1, 1)))
        self._start()

    # -- parameters as tensors ------------------------------------------------------------------------

    @property
    def inverse_scale(self) -> Tensor:
        """Inverse scale of each entry. The tensor has the shape of the layer."""
        return torch.exp(-self.log_scale.detach())

    def statistic(self, x: Tensor) -> Tensor:
        """Return the statistic x / s."""
        return x * torch.exp(-self.log_scale)

    def bases(self) -> list[Tensor]:
        """Return the orthonormal cosine basis of each mode. The first vector is constant: (I_d, I_d) each."""
        return [_cosines(size, self.center.dtype, self.center.device) for size in self.shape]

    def whitenings(self) -> list[Tensor]:
        r"""Return the matrices that whiten cosine coefficients, one per mode: (K or 1, I_d, I_d).

        With a level, the first coefficient of each mode is left unchanged, so that the level stays separate.
        """
        found = []
        for d, size in enumerate(self.shape):
            own = getattr(self, f"whitening_{d}", None)
            if own is None:
                found.append(torch.eye(size).to(self.center)[None])
            else:
                padded = nn.functional.pad(own, (self._first, 0, self._first, 0))
                padded[:, : self._first, : self._first] = 1
                found.append(padded)
        return found

    def state_log_variances(self) -> Tensor:
        """Return the log-variances without the precisions of the coefficients, one per state: (K, C, G)."""
        widths = self.log_width if self.gate else self.log_contrast.new_zeros(self.n_components, 1)
        return self.log_contrast[:, :, None] + widths[:, None, :]

    def mean_log_variances(self) -> Tensor:
        """Return the logarithms of the variances, averaged over the gates, of each component and contrast: (K, C)."""
        return torch.logsumexp(self.log_gates()[:, None] + self.state_log_variances(), 2)

    def log_gates(self) -> Tensor:
        """Return the log-probabilities of the gate: (K, G)."""
        return log_softmax(self.gate_logits, 1) if self.gate else self.logits.new_zeros(self.n_components, 1)

    def sorted_gates(self) -> tuple[Tensor, Tensor, Tensor]:
        """Return the order of the Gaussians of the gates, and their constants and inverse variances in this order.

        The order is descending by variance. All have shape (K, C, G). The log-density of a coefficient is that of its
        widest Gaussian plus log(1 + sum of the ratios of the others to it). Ratios never overflow, because narrow
        Gaussians decay faster.
        """
        logs = self.state_log_variances()
        order = logs.argsort(dim=2, descending=True, stable=True)
        constants = (self.log_gates()[:, None] - 0.5 * logs).gather(2, order)
        return order, constants, torch.exp(-logs).gather(2, order)

    def log_weights(self) -> Tensor:
        """Return the log-probabilities of components and contrasts: (K, C)."""
        return log_softmax(self.logits.flatten(), 0).reshape(self.logits.shape)

    def log_determinant(self) -> Tensor:
        """Return the log-determinant of each component's whitening: (K,)."""
        total = self.logits.new_zeros(self.n_components)
        for size, matrix in zip(self.shape, self.whitenings(), strict=True):
            total = total + math.prod(self.shape) // size * torch.linalg.slogdet(matrix).logabsdet
        return total

    # -- the density -----------------------------------------------------------------------------------

    def rotate(self, x: Tensor) -> Tensor:
        r"""Compute the cosine coefficients of standardized arrays: (n, \*shape) -> (n, N).

        The first coefficient is the level, the mean of the entries times the square root of their number.
        """
        v = (x - self.center) * torch.exp(-self.log_scale)
        return mode_products(v[None], [basis[None] for basis in self.bases()])[0]

    def coefficients(self, rotated: Tensor) -> Tensor:
        r"""Compute the whitened coefficients of each component from cosine coefficients: (n, N) -> (K, n, N)."""
        z = mode_products(rotated.reshape(1, -1, *self.shape), self.whitenings())
        z = z - self._offset_coefficients()[:, None] if self.means == "own" else z
        return z.expand(self.n_components, -1, -1)

    def _offset_coefficients(self) -> Tensor:
        """Return the whitened coefficients of the means M_k: (K, N)."""
        offset = nn.functional.pad(self.offset, (self._first, 0)).reshape(-1, 1, *self.shape)
        return mode_products(offset, self.whitenings())[:, 0]

    def joint_log_density(self, rotated: Tensor) -> Tensor:
        r"""Compute :math:`\log p(x, k, c)` from cosine coefficients: (n, N) -> (n, K, C)."""
        z = self.coefficients(rotated)[..., self._first :]
        squares = z**2 * torch.exp(self.log_precision)[:, None]  # (K, n, coefficients)
        _, constants, inverses = self.sorted_gates()  # (K, C, G)
        rates = -0.5 * LOG2_E * (inverses - inverses[:, :, :1])
        energies = squares.sum(2)[:, :, None]  # (K, n, 1)
        summed = self.n_coefficients * constants[:, None, :, 0] - 0.5 * energies * inverses[:, None, :, 0]
        if self.gate:
            ratios = torch.zeros_like(summed)[..., None]
            for g in range(1, N_GATES):
                factor = torch.exp(constants[:, :, g] - constants[:, :, 0])[:, None, :, None]
                ratios = ratios + factor * torch.exp2(squares[:, :, None] * rates[:, None, :, g, None])
            summed = summed + torch.log1p(ratios).sum(3)  # (K, n, C)
        constant = 0.5 * self.log_precision.sum(1) + self.log_determinant()
        joint = (summed + constant[:, None, None]).transpose(0, 1) + self.log_weights()
        return joint + self.outer_log_density(rotated)[:, None, None]

    def outer_log_density(self, rotated: Tensor) -> Tensor:
        """Compute the terms of the log-density that do not depend on component and contrast: (n, N) -> (n,)."""
        total = -self.log_scale.sum() - 0.5 * self.n_coefficients * math.log(2 * math.pi)
        return (total + self.level_log_density(rotated)) if self.level else total.expand(len(rotated))

    def level_log_density(self, rotated: Tensor) -> Tensor:
        """Compute the log-density of the level of standardized arrays: (n, N) -> (n,)."""
        log_variance = self.level_log_variance
        return -0.5 * (rotated[:, 0] ** 2 * torch.exp(-log_variance) + log_variance + math.log(2 * math.pi))

    def site_energy(self, x: Tensor) -> Tensor:
        """Return the energy of the array, the negative log-density minus the bias term."""
        log_density = torch.logsumexp(self.joint_log_density(self.rotate(x)).flatten(1), 1)
        return -log_density - (self.bias * self.statistic(x)).flatten(1).sum(1)

    # -- the distribution in a field ---------------------------------------------------------------------

    def _in_field(self, field: Tensor) -> _InField:
        r"""Return the distribution of components, contrasts and coefficients in a field of shape (n, \*shape).

        The pull on the coefficients is the field, multiplied by the inverse transposed whitening. A Gaussian with
        variance s^2 in the field f is a Gaussian with mean s^2 f, and its log-normalizer is (s f)^2 / 2.
        """
        pull = mode_products((self.bias + field)[None], [basis[None] for basis in self.bases()])[0]  # (n, N)
        inverses = [torch.linalg.inv(matrix).mT for matrix in self.whitenings()]
        inner = mode_products(pull.reshape(1, -1, *self.shape), inverses)[..., self._first :]
        inner = inner.expand(self.n_components, -1, -1)  # (K, n, coefficients)
        logs = self.state_log_variances()[:, None, :, :, None] - self.log_precision[:, None, None, None]
        variances = torch.exp(logs)  # (K, 1, C, G, coefficients)
        each = self.log_gates()[:, None, None, :, None] + 0.5 * variances * inner[:, :, None, None] ** 2
        summed = (torch.logsumexp(each, 3) if self.gate else each[:, :, :, 0]).sum(-1)  # (K, n, C)
        logs = summed.transpose(0, 1) + self.log_weights()  # (n, K, C)
        if self.means == "own":
            logs = logs + (pull[:, self._first :] @ self.offset.T)[:, :, None]
        return _InField(pull, inner, variances, torch.softmax(each, 3), logs)

    def site_log_normalizer(self, field: Tensor) -> Tensor:
        """Return the log-normalizer of the array."""
        found = self._in_field(field)
        total = torch.logsumexp(found.logs.flatten(1), 1)
        if self.level:
            total = total + 0.5 * torch.exp(self.level_log_variance) * found.pull[:, 0] ** 2
        return total + ((self.bias + field) * self.statistic(self.center)).flatten(1).sum(1)

    def mean(self, field: Tensor) -> Tensor:
        """Return the mean of each entry."""
        found = self._in_field(field)
        share = found.probabilities()  # (n, K, C)
        gain = torch.einsum("nkc,kncj->knj", share, found.gain())
        u = self.synthesize(gain * found.inner).sum(0)  # (n, N)
        if self.means == "own":
            u = u + nn.functional.pad(share.sum(2) @ self.offset, (self._first, 0))
        if self.level:
            u = u + self._with_level(torch.exp(self.level_log_variance) * found.pull[:, 0])
        return self._outward(u)

    def sample(self, field: Tensor, rng: RandomSource) -> Tensor:
        """Sample component and contrast, then the gates, then the coefficients."""
        found = self._in_field(field)
        n, rows = len(field), torch.arange(len(field), device=field.device)
        state = pick(found.probabilities().flatten(1), rng.uniform((n, 1), field))[:, 0]
        k, c = state // self.n_contrasts, state % self.n_contrasts
        gate = pick(found.gates[k, rows, c].transpose(1, 2), rng.uniform((n, self.n_coefficients, 1), field))
        variance = found.variances[k, 0, c].gather(1, gate.transpose(1, 2))[:, 0]  # (n, coefficients)
        normal = rng.normal((n, math.prod(self.shape)), field)
        z = variance * found.inner[k, rows] + variance.sqrt() * normal[:, self._first :]
        u = self.synthesize(z[:, None], k)[:, 0]
        if self.means == "own":
            u = u + nn.functional.pad(self.offset[k], (self._first, 0))
        if self.level:
            spread = torch.exp(0.5 * self.level_log_variance)
            u = u + self._with_level(spread**2 * found.pull[:, 0] + spread * normal[:, 0])
        return self._outward(u)

    def statistic_variance(self, field: Tensor) -> Tensor:
        """Return the variance of each entry, within and between components and contrasts."""
        found = self._in_field(field)
        n, share = len(field), found.probabilities()
        means = (found.gain() * found.inner[:, :, None]).flatten(1, 2)  # (K, n C, coefficients)
        u = self.synthesize(means).reshape(self.n_components, n, self.n_contrasts, -1)
        if self.means == "own":
            u = u + nn.functional.pad(self.offset, (self._first, 0))[:, None, None]
        bases = [basis.T for basis in self.bases()]
        means = mode_products(u.reshape(1, -1, *self.shape), [basis[None] for basis in bases])[0]
        means = means.reshape(self.n_components, n, self.n_contrasts, -1).permute(1, 0, 2, 3)  # (n, K, C, N)
        center = (share[..., None] * means).sum((1, 2), keepdim=True)
        between = (share[..., None] * (means - center) ** 2).sum((1, 2))
        squares = [(basis @ inverse) ** 2 for basis, inverse in zip(bases, self._inverses(), strict=True)]
        within = torch.einsum("nkc,kncj->knj", share, found.variance())
        padded = nn.functional.pad(within, (self._first, 0)).reshape(-1, n, *self.shape)
        total = between + mode_products(padded, squares).sum(0)
        if self.level:
            total = total + torch.exp(self.level_log_variance) / math.prod(self.shape)
        return total.reshape(field.shape)

    def _inverses(self) -> list[Tensor]:
        """Return the inverses of the whitening matrices, one per mode: (K, I_d, I_d)."""
        return [torch.linalg.inv(matrix).expand(self.n_components, -1, -1) for matrix in self.whitenings()]

    def synthesize(self, z: Tensor, k: Tensor | None = None) -> Tensor:
        """Map coefficients without the level to cosine coefficients with level 0: (K, n, coefficients) -> (K, n, N).

        Component `i` is component ``k[i]`` of the unit if `k` is given.
        """
        inverses = self._inverses() if k is None else [inverse[k] for inverse in self._inverses()]
        padded = nn.functional.pad(z, (self._first, 0))
        return mode_products(padded.reshape(*z.shape[:2], *self.shape), inverses)

    def _with_level(self, level: Tensor) -> Tensor:
        """Return cosine coefficients that are zero except for the level: (n,) -> (n, N)."""
        return nn.functional.pad(level[:, None], (0, self.n_coefficients))

    def _outward(self, rotated: Tensor) -> Tensor:
        r"""Map cosine coefficients to arrays: (n, N) -> (n, \*shape)."""
        v = mode_products(rotated.reshape(1, -1, *self.shape), [basis.T[None] for basis in self.bases()])
        return self.center + v.reshape(-1, *self.shape) * torch.exp(self.log_scale)

    # -- learning --------------------------------------------------------------------------------------

    def energy_gradient(self, x: Tensor, field: Tensor | None, weights: Tensor | None = None) -> dict[str, Tensor]:
        return self._gradient(lambda: self.energy(x), weights)

    def normalizer_gradient(
        self, field: Tensor, weights: Tensor | None = None, mean: Tensor | None = None
    ) -> dict[str, Tensor]:
        return self._gradient(lambda: self.log_normalizer(field), weights)

    def _gradient(self, compute: Callable[[], Tensor], weights: Tensor | None) -> dict[str, Tensor]:
        """Compute the gradient of a mean or a weighted sum over samples by automatic differentiation."""
        learned = {name: parameter for name, parameter in self.named_parameters() if parameter.requires_grad}
        with torch.enable_grad():
            gradients = torch.autograd.grad(average(compute(), weights), list(learned.values()))
        return dict(zip(learned, gradients, strict=True))

    @torch.no_grad()
    def initialize_from(self, mean: Tensor, variance: Tensor, count: int) -> None:
        """Initialize the center and the scale from the data, and all components from its variances, with noise."""
        self.bias.zero_()
        center = mean.mean().reshape(self.center.shape) if self.means == "one" else mean
        self.center.copy_(center)
        spread = variance + (mean - center) ** 2
        least = _ROUNDING_ERRORS * torch.finfo(mean.dtype).eps * mean.abs()
        scale = _separable_scale(spread, together=self.level, least=least)
        self.log_scale.copy_(scale.log())
        squares = [(_cosines(size, spread.dtype, spread.device) ** 2)[None] for size in self.shape]
        variances = mode_products((spread / scale**2)[None, None], squares)[0, 0].clamp(min=SMALLEST_VARIANCE)
        self._start(variances)

    @torch.no_grad()
    def _start(self, variances: Tensor | None = None) -> None:
        """Reset components, contrasts and gates.

        `variances` contains the variances of the cosine coefficients, of shape (N,). Default: ones. The components
        differ by noise, because equal components would stay equal.
        """
        variances = torch.ones(math.prod(self.shape)) if variances is None else variances
        log_contrast, log_width = _spread(self.n_contrasts), _spread(N_GATES if self.gate else 1)
        mean = torch.exp(log_contrast).mean() * torch.exp(log_width).mean()
        noise = RandomSource(0).normal(self.log_precision.shape, torch.empty(0)).to(variances)
        self.log_precision.copy_(_START_NOISE * noise - variances[self._first :].log() + mean.log())
        self.log_contrast.copy_(log_contrast)
        self.logits.zero_()
        if self.gate:
            self.log_width.copy_(log_width)
            self.gate_logits.zero_()
        if self.means == "own":
            self.offset.zero_()
        if self.level:
            self.level_log_variance.copy_(variances[:1].log())
        for d in range(len(self.shape)):
            if (own := getattr(self, f"whitening_{d}", None)) is not None:
                own.copy_(torch.eye(own.shape[1]).expand(own.shape))

    @property
    @torch.no_grad()
    def largest_spread(self) -> float:
        """Upper bound on the standard deviation of T(x) along any direction, given component, contrast and gates."""
        if self.center.is_meta:  # meta tensors have no values
            return 1.0
        inverses = [torch.linalg.matrix_norm(inverse, 2) for inverse in self._inverses()]
        norms = functools.reduce(torch.mul, inverses)  # (K,)
        logs = self.state_log_variances().flatten(1).amax(1) - self.log_precision.amin(1)
        largest = float((norms * torch.exp(0.5 * logs)).max())
        return max(largest, float(torch.exp(0.5 * self.level_log_variance))) if self.level else largest

    @property
    def fluctuation(self) -> float:
        return self.largest_spread**2

    # -- checks ----------------------------------------------------------------------------------------

    def check_parameters(self, layer: str) -> None:
        super().check_parameters(layer)
        self._check_size(self.center / torch.exp(self.log_scale), layer, "center in units of the scale")
        for name, parameter in self.named_parameters():
            if name.startswith(("log_", "level_")):
                for sign, what in ((1, ""), (-1, "inverse ")):
                    self._check_size(torch.exp(0.5 * sign * parameter), layer, f"{what}square root of exp({name})")
            else:
                self._check_size(parameter, layer, name)
        self._check_size(self.log_determinant(), layer, "log-determinant of the whitening")

    def alternatives(self, value: Tensor, site: int, reach: tuple[Tensor, Tensor]) -> Alternatives:
        raise ValueError("whitened units have no pseudo-likelihood, because the whole array is one site")


class _InField(NamedTuple):
    """Distribution of components, contrasts and coefficients in a field."""

    pull: Tensor  # (n, N): field on the cosine coefficients
    inner: Tensor  # (K, n, coefficients): field on the whitened coefficients
    variances: Tensor  # (K, 1, C, G, coefficients)
    gates: Tensor  # (K, n, C, G, coefficients): probabilities of the gates
    logs: Tensor  # (n, K, C): log-weights of components and contrasts, not normalized

    def probabilities(self) -> Tensor:
        """Return the probabilities of components and contrasts: (n, K, C)."""
        return torch.softmax(self.logs.flatten(1), 1).reshape(self.logs.shape)

    def gain(self) -> Tensor:
        """Return the mean variance over the states of the gate: (K, n, C, coefficients).

        A coefficient with variance s^2 has the mean s^2 f in the field f. Its mean is thus this gain times the field.
        """
        return (self.gates * self.variances).sum(3)

    def variance(self) -> Tensor:
        """Return the variance of the coefficients within and between states of the gate: (K, n, C, coefficients)."""
        gain = self.gain()
        between = (self.gates * (self.variances - gain[:, :, :, None]) ** 2).sum(3)
        return gain + between * self.inner[:, :, None] ** 2


def mode_products(x: Tensor, matrices: Sequence[Tensor]) -> Tensor:
    r"""Multiply every mode of arrays by a matrix of each component: (K or 1, n, \*shape) -> (K, n, N).

    Each matrix has shape (K or 1, I_d, I_d). Small arrays that the components share are multiplied by one dense matrix
    per component.
    """
    shape = tuple(x.shape[2:])
    size = math.prod(shape)
    if x.shape[0] == 1 and size <= MOST_DENSE:
        dense = functools.reduce(_kronecker, matrices)  # (K, N, N)
        product = x.reshape(-1, size) @ dense.reshape(-1, size).T
        return product.reshape(-1, len(dense), size).transpose(0, 1)
    for matrix in reversed(matrices):  # multiply the last axis, and move it in front of the others
        product = x.reshape(len(x), -1, x.shape[-1]) @ matrix.mT
        x = product.reshape(len(product), *x.shape[1:]).movedim(-1, 2)
    return x.reshape(len(x), -1, size)


def _kronecker(a: Tensor, b: Tensor) -> Tensor:
    """Compute the Kronecker product of two matrices per component: (K or 1, I, I), (K or 1, J, J) -> (K, I J, I J)."""
    product = a[:, :, None, :, None] * b[:, None, :, None, :]  # (K, I, J, I, J)
    return product.reshape(len(product), a.shape[1] * b.shape[1], -1)


@functools.cache
def _cosines(size: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Return the orthonormal cosine basis (DCT-II), one vector per row. The first vector is constant."""
    return torch.from_numpy(dct(np.eye(size), axis=0, norm="ortho")).to(dtype=dtype, device=device)


def _spread(count: int) -> Tensor:
    """Return initial log-variances in descending order, or zero if there is only one."""
    return torch.linspace(_START_REACH, -_START_REACH, count) if count > 1 else torch.zeros(1)


def _separable_scale(spread: Tensor, *, together: bool, least: Tensor) -> Tensor:
    """Return a positive scale for each entry, a product of one factor per axis, given mean squares.

    A separable scale changes the unit of each row and column, but not the family of densities. If `together` is True,
    all entries have one scale. Rows and columns of an axis in which no spread is larger than its entry in `least` are
    constant except for rounding errors, and get the median scale.
    """
    spread = torch.where(spread > least**2, spread, 0.0)
    scale = torch.ones_like(spread)
    for d in range(1 if together else spread.ndim):
        others = tuple(e for e in range(spread.ndim) if together or e != d)
        part = (spread / scale**2).mean(others, keepdim=True) if others else spread / scale**2
        varying = part[part > 0]
        middle = varying.median() if len(varying) else part.new_tensor(1.0)
        scale = scale * torch.where(part > 0, part, middle).sqrt()
    return scale
