r"""Add noise to images, and remove noise with a trained Boltzmann machine as the prior for clean images.

The machine defines the prior, the noise model defines the likelihood, and the clean image is inferred. With observed
pixels y, clean pixels X and hidden units Y,

.. math:: p(X, Y \mid y) \propto e^{-E(X, Y)} \prod_{ij} p(y_{ij} \mid x_{ij}).

Given Y, the pixels are independent, and an :class:`~mvrbm.vision.observations.Observation` defines their distribution.
Given X, the hidden units are independent of each other and of y. Mean-field inference and Gibbs sampling use these two
conditional distributions.
"""

import functools
import math
from typing import Any

import numpy as np
import torch
from torch import Tensor

from mvrbm.devices import sensible_threads
from mvrbm.machine import BoltzmannMachine
from mvrbm.random import RandomSource
from mvrbm.units import Unit
from mvrbm.validation import choice, number, whole_number
from mvrbm.vision.images import Array, check_gray_images, white
from mvrbm.vision.observations import OBSERVATIONS, Observation
from mvrbm.vision.patches import PatchGrid

#: Types of noise. The level of salt-and-pepper noise is the fraction of pixels that it replaces, half of them with
#: black and half with white. The level of Gaussian noise is its standard deviation as a fraction of the white level.
NOISES = ("salt-and-pepper", "gaussian")

# Maximum number of pixels per batch of patches. The noise level is estimated from one such batch.
_PIXELS_AT_ONCE = 2**20
# Maximum number of pixels per group of images that are assembled from patches at once.
_PIXELS_PER_GROUP = 2**22
# Number of mean-field iterations for estimating the noise level.
_FIT_ROUNDS = 5
# Initial value of the estimated noise level. For Gaussian noise, it is the lower bound of the initial value.
_START = {"salt-and-pepper": 0.05, "gaussian": 0.02}


def add_noise(images: Any, noise: str = "salt-and-pepper", level: float = 0.1, seed: int = 0) -> Array:
    r"""Add noise to images.

    Parameters
    ----------
    images : array of shape (n, rows, columns) or (rows, columns)
        Grayscale images of dtype uint8 or float. Floats range from 0 (black) to 1 (white).
    noise : {"salt-and-pepper", "gaussian"}
        Type of noise. Salt-and-pepper noise replaces a pixel with black or white, each with probability `level` / 2.
        Gaussian noise is additive: :math:`y = x + \text{level} \cdot \varepsilon`, :math:`\varepsilon \sim N(0, 1)`.
    level : float
        Probability of replacing a pixel, from 0 to 1, or standard deviation of Gaussian noise as a fraction of the
        white level. For uint8 images, a level of 0.1 corresponds to a standard deviation of 25.5.
    seed : int
        Random seed.

    Returns
    -------
    array of the same shape and dtype as `images`
        Noisy images. Values of dtype uint8 are rounded and clipped. Floats are not clipped.
    """
    array = check_gray_images(images)
    random = np.random.default_rng(seed)
    top = int(white(array.dtype))
    if choice(noise, "noise", NOISES) == "gaussian":
        noisy = array + number(level, "level") * top * random.standard_normal(array.shape)
        return (np.clip(np.rint(noisy), 0, 255) if top == 255 else noisy).astype(array.dtype)
    number(level, "level", 0, 1, exclude_high=False)
    draws = random.random(array.shape)
    return np.where(draws < level / 2, 0, np.where(draws < level, top, array)).astype(array.dtype)


def robust_sigma(images: Array) -> float:
    r"""Estimate the standard deviation of Gaussian noise in images of shape (n, rows, columns).

    For each 2x2 block of pixels a, b, c and e, :math:`d = (a - b - c + e) / 2` has the same standard deviation as the
    noise, and hardly depends on the image in smooth regions. The estimate :math:`\operatorname{median} |d| / 0.6745` is
    robust to a few edges (Donoho and Johnstone, 1994). It is 0 for images smaller than 2x2 pixels.
    """
    rows = images.shape[1] // 2 * 2
    columns = images.shape[2] // 2 * 2
    if not rows * columns:
        return 0.0
    even = np.asarray(images[:, :rows, :columns], np.float64)
    detail = (even[:, ::2, ::2] - even[:, 1::2, ::2] - even[:, ::2, 1::2] + even[:, 1::2, 1::2]) / 2
    return float(np.median(np.abs(detail)) / 0.67448975)


@torch.no_grad()
def posterior_mean(
    machine: BoltzmannMachine,
    observation: Observation,
    y: Tensor,
    rounds: int,
    *,
    burn_in: int = 0,
    rng: RandomSource | None = None,
    fit: bool = False,
) -> Tensor:
    r"""Infer clean images by mean-field inference or, if `rng` is given, by block Gibbs sampling.

    The observed images `y` and the result have shape (n, I, J).

    Mean-field inference approximates the posterior by :math:`q(X) q(Y)`. Each round updates both factors,

    .. math:: q(Y) = p\big(Y \mid \bar X\big), \qquad
              q(x_{ij}) \propto p(x_{ij} \mid f_{ij})\, p(y_{ij} \mid x_{ij}), \quad f = W^\top \bar Y,

    where bars denote means. For binary pixels and for Gaussian units, this is coordinate ascent on the variational
    bound :math:`E_q[-E(X, Y) + \log p(y \mid X)] + H(q)`. For gray values in Bernoulli units, the machine does not
    define the distribution of a pixel around its mean, so the observation provides one.

    Gibbs sampling draws :math:`Y \sim p(Y \mid X)` and :math:`x_{ij} \sim p(x_{ij} \mid y_{ij}, f_{ij})`. The result
    is the average of :math:`E[x_{ij} \mid y_{ij}, f_{ij}]` over `rounds` steps after `burn_in` steps. These conditional
    means vary less than the samples. If `fit` is True, the observation estimates its unknown parameters in each round.
    """
    (name,) = machine.layers
    x = observation.first_guess(y)
    total = torch.zeros_like(y)
    for step in range(burn_in + rounds):
        field = machine.hidden_field({name: x})
        hidden = machine.hidden.mean(field) if rng is None else machine.hidden.sample(field, rng)
        field = machine.visible_fields(hidden)[name]
        if fit:
            observation.fit(field, y)
        if rng is None:
            x = observation.mean(field, y)
            continue
        if step >= burn_in:
            total += observation.mean(field, y)
        x = observation.sample(field, y, rng)
    return x if rng is None else total / rounds


def denoise(
    model: Any,
    images: Any,
    *,
    noise: str = "salt-and-pepper",
    level: float | None = None,
    method: str = "mean-field",
    rounds: int = 5,
    steps: int = 100,
    burn_in: int = 20,
    stride: int | None = None,
    values: str = "auto",
    seed: int = 0,
) -> Array:
    r"""Infer clean images from noisy images with a trained Boltzmann machine.

    Parameters
    ----------
    model : BoltzmannMachine or fitted estimator
        Prior for clean images, with one two-dimensional visible layer of Bernoulli or Gaussian units.
    images : array of shape (n, rows, columns) or (rows, columns)
        Grayscale images of dtype uint8 or float. Floats range from 0 (black) to 1 (white). As in training, uint8 values
        are scaled to [0, 1] for Bernoulli units and left unchanged for Gaussian units. Images larger than the visible
        layer are denoised in overlapping patches, which are averaged.
    noise : {"salt-and-pepper", "gaussian"}
        Type of noise. See :func:`add_noise`.
    level : float, optional
        Fraction of pixels replaced by salt-and-pepper noise, or standard deviation of Gaussian noise as a fraction of
        the white level. If None, a single level is estimated for all images.
    method : {"mean-field", "gibbs"}
        Inference method. See :func:`posterior_mean`.
    rounds : int
        Number of mean-field iterations.
    steps, burn_in : int
        Number of Gibbs steps to average over, and number of Gibbs steps to discard before averaging.
    stride : int, optional
        Distance between patches in pixels. A smaller stride gives better results but takes longer. Default: a quarter
        of the shorter side of the visible layer.
    values : {"auto", "binary", "gray"}
        Whether clean pixels in Bernoulli units are either black or white (``"binary"``) or take gray values
        (``"gray"``). ``"auto"`` selects ``"binary"`` if the noise is salt-and-pepper and the images have no gray
        pixels, and ``"gray"`` otherwise.
    seed : int
        Random seed for Gibbs sampling.

    Returns
    -------
    array of the same shape and dtype as `images`
        Posterior means of the clean images.

    Notes
    -----
    For salt-and-pepper noise, pixels that are neither black nor white are returned unchanged. The result depends on the
    fraction of pixels in clean grayscale images that are exactly black or white. This fraction is estimated from about
    a million pixels. The model must have been trained on similar images.

    Examples
    --------
    >>> import numpy as np
    >>> from mvrbm import Bernoulli, BoltzmannMachine, Kronecker
    >>> from mvrbm.vision import add_noise, denoise
    >>> machine = BoltzmannMachine(
    ...     Bernoulli((4, 4)), Bernoulli((3, 3)), Kronecker()
    ... )
    >>> noisy = add_noise(
    ...     np.full((2, 8, 8), 128, np.uint8), "salt-and-pepper", 0.2, seed=0
    ... )
    >>> denoise(machine, noisy, level=0.2).shape
    (2, 8, 8)
    """
    gibbs = choice(method, "method", ("mean-field", "gibbs")) == "gibbs"
    rounds = whole_number(rounds, "rounds")
    steps = whole_number(steps, "steps")
    burn_in = whole_number(burn_in, "burn_in", 0)
    request = _Request(model, images, noise, level, stride, values)
    rng = RandomSource(seed)
    how: dict[str, Any] = {"rounds": steps, "burn_in": burn_in, "rng": rng} if gibbs else {"rounds": rounds}
    infer = functools.partial(posterior_mean, request.machine, request.observation)
    with sensible_threads(request.machine, request.patches_at_once):
        if request.observation.needs_fit:
            y = request.fit(max(rounds, _FIT_ROUNDS))
            if gibbs:
                infer(y, _FIT_ROUNDS, rng=rng, fit=True)
        out = np.empty(request.batch.shape, request.batch.dtype)
        for first in range(0, len(out), request.images_at_once):
            noisy = request.batch[first : first + request.images_at_once]
            grid = request.grid(len(noisy))
            starts = range(0, len(grid), request.patches_at_once)
            numbers = (np.arange(start, min(start + request.patches_at_once, len(grid))) for start in starts)
            pieces = (infer(request.tensor(grid.cut(noisy, which)), **how).cpu().numpy() for which in numbers)
            out[first : first + request.images_at_once] = request.as_given(grid.average(pieces), noisy)
    return out.reshape(np.shape(images))


def estimate_level(
    model: Any, images: Any, *, noise: str = "salt-and-pepper", stride: int | None = None, values: str = "auto"
) -> float:
    """Estimate the noise level of images in the same way as :func:`denoise` with ``level=None``.

    Parameters
    ----------
    model, images, noise, stride, values
        See :func:`denoise`.

    Returns
    -------
    float
        Fraction of pixels replaced by salt-and-pepper noise, or standard deviation of Gaussian noise as a fraction of
        the white level. For salt-and-pepper noise, the estimate is based on the black and white pixels that the prior
        cannot explain.
    """
    request = _Request(model, images, noise, None, stride, values)
    with sensible_threads(request.machine, request.patches_at_once):
        if request.observation.needs_fit:
            request.fit(_FIT_ROUNDS)
    return request.observation.level


class _Request:
    """Validated arguments of :func:`denoise`, with conversions between images and tensors."""

    def __init__(self, model: Any, images: Any, noise: str, level: float | None, stride: Any, values: str) -> None:
        self.machine, unit = _prior(model)
        array = check_gray_images(images)
        self.batch = batch = array[None] if array.ndim == 2 else array  # (n, rows, columns)
        self.salty = choice(noise, "noise", NOISES) == "salt-and-pepper"
        choice(values, "values", ("auto", "binary", "gray"))
        self.patch = (unit.shape[0], unit.shape[1])
        if any(size < side for size, side in zip(batch.shape[1:], self.patch, strict=True)):
            raise ValueError(
                f"images must be at least as large as the visible layer {self.patch}, got {batch.shape[1:]}"
            )
        self.stride = max(1, min(self.patch) // 4) if stride is None else whole_number(stride, "stride")
        if self.stride > min(self.patch):
            raise ValueError(f"stride must be at most {min(self.patch)} (the shorter side of a patch), got {stride}")
        if level is not None:
            number(level, "level", 0, 1 if self.salty else math.inf, exclude_low=True)
        self.white = white(batch.dtype)
        if self.salty and (batch.min() < 0 or batch.max() > self.white):
            found = f"{batch.min():g} to {batch.max():g}"
            raise ValueError(f"images with salt-and-pepper noise must have values from 0 to 1, got {found}")
        # Whether to clip clean images to the range from black to white.
        self.bounded = self.salty or not unit.gaussian or batch.dtype == np.uint8
        top = 255 * type(unit).byte_scale if batch.dtype == np.uint8 else 1.0
        self.patches_at_once = max(1, _PIXELS_AT_ONCE // math.prod(self.patch))
        self.images_at_once = max(1, _PIXELS_PER_GROUP // math.prod(batch.shape[1:]))
        if unit.gaussian:
            values = "real"
        elif values == "auto":
            values = "binary" if self.salty and not bool(self._gray(batch).any()) else "gray"
        self.observation = OBSERVATIONS[noise][values](unit, level, top, self._start(noise))
        self.unit_of_model = self.white / top  # image value that corresponds to 1 in the model

    def _start(self, noise: str) -> float:
        """Return the initial estimate of the noise level."""
        if self.salty:
            return _START[noise]
        n = min(self.images_at_once, len(self.batch))
        some = self.batch[np.unique(np.linspace(0, len(self.batch) - 1, n).astype(np.int64))]
        return max(robust_sigma(some) / self.white, _START[noise])

    def _gray(self, images: Array) -> Array:
        return np.asarray((images > 0) & (images < self.white))

    def grid(self, n: int) -> PatchGrid:
        return PatchGrid(n, (self.batch.shape[1], self.batch.shape[2]), self.patch, self.stride)

    def fit(self, rounds: int) -> Tensor:
        """Fit the observation model to patches from all images by mean-field inference, and return the patches."""
        grid = self.grid(len(self.batch))
        which = np.unique(np.linspace(0, len(grid) - 1, self.patches_at_once).astype(np.int64))
        y = self.tensor(grid.cut(self.batch, which))
        posterior_mean(self.machine, self.observation, y, rounds, fit=True)
        return y

    def tensor(self, patches: Array) -> Tensor:
        # Divide instead of multiplying by a rounded 1/255, so that white is exactly 1.
        return torch.from_numpy(np.ascontiguousarray(patches)).to(self.machine.like) / self.unit_of_model

    def as_given(self, clean: Array, noisy: Array) -> Array:
        """Convert clean images to the value range and dtype of the noisy images."""
        clean = clean * self.unit_of_model
        if self.bounded:
            clean = np.clip(clean, 0, self.white)
        if noisy.dtype == np.uint8:
            clean = np.rint(clean)
        if self.salty:
            clean = np.where(self._gray(noisy), noisy, clean)
        return clean.astype(noisy.dtype)


def _prior(model: Any) -> tuple[BoltzmannMachine, Unit]:
    machine = getattr(model, "machine_", model)
    if not isinstance(machine, BoltzmannMachine):
        raise ValueError(f"model must be a BoltzmannMachine or a fitted estimator, got {type(model).__name__}")
    if len(machine.layers) != 1:
        raise ValueError(f"model must have one visible layer, got {list(machine.layers)}")
    (unit,) = machine.layers.values()
    binary = unit.levels == 2 and unit.entry_modes == 0
    if len(unit.shape) != 2 or not (unit.gaussian or binary):
        found = f"{unit.name} of shape {unit.shape}"
        raise ValueError(f"model must have a two-dimensional visible layer of Bernoulli or Gaussian units, got {found}")
    machine.check_bounded()
    return machine, unit
