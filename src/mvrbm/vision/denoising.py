r"""Denoising: the machine is the prior, the noise is the likelihood, the clean image is inferred.

With observed pixels y, clean pixels X and hidden Y,

.. math:: p(X, Y \mid y) \propto e^{-E(X, Y)} \prod_{ij} p(y_{ij} \mid x_{ij}).

Given Y the pixels are independent, and :class:`~mvrbm.vision.noise_models.Observation` knows them; given X the
hidden units are independent, and do not see y. That is all that mean field and Gibbs need.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from mvrbm.devices import sensible_threads
from mvrbm.machine import BoltzmannMachine
from mvrbm.random import RandomSource
from mvrbm.units import Unit
from mvrbm.vision.noise_models import KINDS, Observation, as_images, check_noise, robust_sigma
from mvrbm.vision.patches import PatchGrid

__all__ = ["denoise", "estimate_level", "gibbs_mean", "mean_field"]

Array = NDArray[Any]

METHODS = ("mean-field", "gibbs")
VALUES = ("auto", "binary", "grey")

_PIXELS_AT_ONCE = 2**20  # of patches that are inferred together, or that the noise is estimated from
_PIXELS_A_GROUP = 2**22  # of images that are put together from patches at a time
_LEAST_ROUNDS_OF_FIT = 5
_START = {"salt-and-pepper": 0.05, "gaussian": 0.02}


# -- inference --------------------------------------------------------------------------------------


@torch.no_grad()
def mean_field(
    machine: BoltzmannMachine, observation: Observation, y: Tensor, rounds: int, *, fit: bool = False
) -> Tensor:
    r"""Infer clean images by mean field.

    The posterior is approximated by :math:`q(X) q(Y)`; each round takes the two in turn,

    .. math:: q(Y) = p\big(Y \mid \bar X\big), \qquad
              q(x_{ij}) \propto p(x_{ij} \mid f_{ij})\, p(y_{ij} \mid x_{ij}), \quad f = W^\top \bar Y,

    with bars for means. For binary pixels and for Gaussian units these are the coordinate steps of the variational
    bound :math:`E_q[-E(X, Y) + \log p(y \mid X)] + H(q)`, which no step lowers. For grey values in Bernoulli
    units, the distribution of pixels given their mean is the observation's own, as the machine has none.

    Parameters
    ----------
    machine : BoltzmannMachine
        A machine with one visible layer.
    observation : Observation
        The noise, and what pixels are.
    y : Tensor (n, I, J)
        Observed images, black being 0.
    rounds : int
        Number of rounds.
    fit : bool
        Whether the observation is to estimate in every round what it does not know.

    Returns
    -------
    Tensor (n, I, J)
        Means of the clean images.
    """
    (name,) = machine.layers
    x = observation.first_guess(y)
    for _ in range(rounds):
        hidden = machine.hidden.mean(machine.hidden_field({name: x}))
        field = machine.visible_fields(hidden)[name]
        if fit:
            observation.fit(field, y)
        x = observation.mean(field, y)
    return x


@torch.no_grad()
def gibbs_mean(
    machine: BoltzmannMachine,
    observation: Observation,
    y: Tensor,
    steps: int,
    burn_in: int,
    noise: RandomSource,
    *,
    fit: bool = False,
) -> Tensor:
    r"""Infer clean images by block Gibbs, and return the average.

    A step draws :math:`Y \sim p(Y \mid X)` and :math:`x_{ij} \sim p(x_{ij} \mid y_{ij}, f_{ij})`. What is averaged
    are the means :math:`E[x_{ij} \mid y_{ij}, f_{ij}]`, which vary less than the draws.

    Parameters
    ----------
    machine : BoltzmannMachine
        A machine with one visible layer.
    observation : Observation
        The noise, and what pixels are.
    y : Tensor (n, I, J)
        Observed images, black being 0.
    steps, burn_in : int
        Steps to average over, and before these.
    noise : RandomSource
        Source of the draws.
    fit : bool
        Whether the observation is to estimate in every step what it does not know.

    Returns
    -------
    Tensor (n, I, J)
        Estimated posterior means of the clean images.
    """
    (name,) = machine.layers
    x, total = observation.first_guess(y), torch.zeros_like(y)
    for step in range(burn_in + steps):
        hidden = machine.hidden.sample(machine.hidden_field({name: x}), noise)
        field = machine.visible_fields(hidden)[name]
        if fit:
            observation.fit(field, y)
        if step >= burn_in:
            total += observation.mean(field, y)
        x = observation.sample(field, y, noise)
    return total / steps


# -- images -----------------------------------------------------------------------------------------


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
    r"""Infer clean images from noisy ones.

    Parameters
    ----------
    model : BoltzmannMachine or fitted estimator
        The prior: one visible layer of matrices, Bernoulli or Gaussian.
    images : array (n, rows, columns) or (rows, columns)
        Grey images, bytes or floats from 0 (black) to 1 (white). Bytes are scaled as in training: to [0, 1] for
        Bernoulli units, not at all for Gaussian ones. Images larger than the model's are denoised by overlapping
        patches, which are averaged.
    noise : {"salt-and-pepper", "gaussian"}
        What kind of noise it is; see :func:`add_noise`.
    level : float, optional
        How much: the share of pixels hit, or the standard deviation, from black to white being 1. If not given,
        it is estimated, one level for all images.
    method : {"mean-field", "gibbs"}
        How the clean images are inferred: see :func:`mean_field` and :func:`gibbs_mean`.
    rounds : int
        Rounds of mean field.
    steps, burn_in : int
        Gibbs steps to average over, and before these.
    stride : int, optional
        Pixels from one patch to the next; a quarter of the model's smaller side if not given. A smaller one gives
        better images, more slowly.
    values : {"auto", "binary", "grey"}
        What clean pixels of Bernoulli units are: only black and white, or grey values that stand for means.
        `auto` is binary if images with salt and pepper have no grey pixel, and grey otherwise.
    seed : int
        Of the Gibbs draws.

    Returns
    -------
    array like `images`
        Means of the clean images, of the same shape and type.

    Notes
    -----
    With salt and pepper, pixels that are neither black nor white are returned as they are. How often clean grey
    pixels are exactly black or white, which decides whom to believe, is estimated from the images, over at most
    about a million pixels. The model's means are what is returned elsewhere: it must have seen such images.

    Examples
    --------
    >>> import numpy as np
    >>> from mvrbm import Bernoulli, BoltzmannMachine, Kronecker
    >>> from mvrbm.vision import add_noise, denoise
    >>> machine = BoltzmannMachine(Bernoulli((4, 4)), Bernoulli((3, 3)), Kronecker())
    >>> noisy = add_noise(np.full((2, 8, 8), 128, np.uint8), "salt-and-pepper", 0.2, seed=0)
    >>> denoise(machine, noisy, level=0.2).shape
    (2, 8, 8)
    """
    if method not in METHODS:
        raise ValueError(f"method must be one of {', '.join(map(repr, METHODS))}, got {method!r}")
    for name, count, least in (("rounds", rounds, 1), ("steps", steps, 1), ("burn_in", burn_in, 0)):
        if count != int(count) or count < least:
            raise ValueError(f"{name} must be a whole number of at least {least}, got {count}")
    task = _task(model, images, noise, level, stride, values)
    draws = RandomSource(seed, device=task.machine.like.device)
    gibbs = method == "gibbs"

    def infer(y: Tensor, fit: bool) -> Tensor:
        if fit or not gibbs:
            x = mean_field(task.machine, task.observation, y, max(rounds, _LEAST_ROUNDS_OF_FIT * fit), fit=fit)
        if gibbs:
            few = _LEAST_ROUNDS_OF_FIT
            x = gibbs_mean(task.machine, task.observation, y, *((few, 0) if fit else (steps, burn_in)), draws, fit=fit)
        return x

    with sensible_threads(task.machine, task.patches_at_once):
        if not task.observation.settled:
            infer(task.tensor(task.some_patches()), True)
        out = np.empty(task.batch.shape, task.batch.dtype)
        for group in task.groups():
            grid = task.grid(len(task.batch[group]))
            pieces = (
                infer(task.tensor(grid.cut(task.batch[group], which)), False).cpu().numpy()
                for which in task.numbers(len(grid))
            )
            out[group] = task.outward(grid.average(pieces), task.batch[group])
    return out.reshape(np.shape(images))


def estimate_level(
    model: Any, images: Any, *, noise: str = "salt-and-pepper", stride: int | None = None, values: str = "auto"
) -> float:
    """Estimate how much noise images have, as :func:`denoise` does where it is not told.

    Parameters
    ----------
    model : BoltzmannMachine or fitted estimator
        The prior.
    images : array (n, rows, columns) or (rows, columns)
        Noisy images.
    noise : {"salt-and-pepper", "gaussian"}
        What kind of noise it is.
    stride : int, optional
        As for :func:`denoise`.
    values : {"auto", "binary", "grey"}
        As for :func:`denoise`.

    Returns
    -------
    float
        The share of pixels hit by salt and pepper: what is black or white beyond what the prior explains. Or the
        standard deviation of Gaussian noise, from black to white being 1.
    """
    task = _task(model, images, noise, None, stride, values)
    with sensible_threads(task.machine, task.patches_at_once):
        if not task.observation.settled:
            y = task.tensor(task.some_patches())
            mean_field(task.machine, task.observation, y, _LEAST_ROUNDS_OF_FIT, fit=True)
    return task.observation.level


class _Task(NamedTuple):
    """Checked arguments, and how images become tensors and back."""

    machine: BoltzmannMachine
    observation: Observation
    batch: Array  # (n, rows, columns), as given
    patch: tuple[int, int]
    stride: int
    bounded: bool  # whether clean images lie between black and white
    keep_grey: bool

    @property
    def patches_at_once(self) -> int:
        return max(1, _PIXELS_AT_ONCE // math.prod(self.patch))

    def grid(self, n: int) -> PatchGrid:
        return PatchGrid(n, (self.batch.shape[1], self.batch.shape[2]), self.patch, self.stride)

    def groups(self) -> Iterator[slice]:
        n = max(1, _PIXELS_A_GROUP // math.prod(self.batch.shape[1:]))
        return (slice(first, first + n) for first in range(0, len(self.batch), n))

    def numbers(self, n: int) -> Iterator[Array]:
        return (np.arange(first, min(first + self.patches_at_once, n)) for first in range(0, n, self.patches_at_once))

    def some_patches(self) -> Array:
        """Patches from all over the images, not more than are inferred at once."""
        grid = self.grid(len(self.batch))
        return grid.cut(self.batch, np.unique(np.linspace(0, len(grid) - 1, self.patches_at_once).astype(np.int64)))

    @property
    def byte_step(self) -> float:
        return 255 / self.observation.white if self.batch.dtype == np.uint8 else 1.0

    def tensor(self, patches: Array) -> Tensor:
        # Divided, not multiplied by a rounded 1/255: white has to be white exactly.
        return torch.from_numpy(np.ascontiguousarray(patches)).to(self.machine.like) / self.byte_step

    def outward(self, clean: Array, noisy: Array) -> Array:
        clean = clean * self.byte_step
        white = self.observation.white * self.byte_step
        if self.bounded or noisy.dtype == np.uint8:
            clean = np.clip(clean, 0, white)
        if noisy.dtype == np.uint8:
            clean = np.rint(clean)
        if self.keep_grey:
            clean = np.where((noisy > 0) & (noisy < white), noisy, clean)
        return clean.astype(noisy.dtype)


def _task(model: Any, images: Any, noise: str, level: float | None, stride: int | None, values: str) -> _Task:
    machine, unit = _prior(model)
    array = as_images(images, "images")
    batch = array[None] if array.ndim == 2 else array
    check_noise(noise)
    patch = (unit.shape[0], unit.shape[1])
    if any(size < side for size, side in zip(batch.shape[1:], patch, strict=True)):
        raise ValueError(f"images must be at least as large as the model's, {patch}, got {batch.shape[1:]}")
    if stride is not None and (stride != int(stride) or not 1 <= stride <= min(patch)):
        raise ValueError(f"stride must be a whole number from 1 to {min(patch)}, got {stride}")
    if values not in VALUES:
        raise ValueError(f"values must be one of {', '.join(map(repr, VALUES))}, got {values!r}")
    salty = noise == "salt-and-pepper"
    if level is not None and not 0 < level < (1 if salty else math.inf):
        raise ValueError(
            f"level must be above 0 and {'below 1, a share of the pixels' if salty else 'finite'}, got {level}"
        )
    if salty and batch.dtype != np.uint8 and (batch.min() < 0 or batch.max() > 1):
        raise ValueError(
            f"images with salt and pepper must be from 0 (black) to 1 (white), got {batch.min():g} to {batch.max():g}"
        )
    white = 255 * unit.byte_scale if batch.dtype == np.uint8 else 1.0
    observation = KINDS[noise][_kind(unit, batch, salty, values)](unit, level, white, _start(noise, batch))
    step = max(1, min(patch) // 4) if stride is None else int(stride)
    bounded = salty or not unit.gaussian
    return _Task(machine, observation, batch, patch, step, bounded, keep_grey=salty)


def _prior(model: Any) -> tuple[BoltzmannMachine, Unit]:
    machine = getattr(model, "machine_", model)
    if not isinstance(machine, BoltzmannMachine):
        raise ValueError(f"model must be a BoltzmannMachine or a fitted estimator, got {type(model).__name__}")
    if len(machine.layers) != 1:
        raise ValueError(f"model must have one visible layer, got {list(machine.layers)}")
    (unit,) = machine.layers.values()
    if len(unit.shape) != 2 or unit.name not in ("bernoulli", "gaussian"):
        raise ValueError(
            f"model must have a Bernoulli or Gaussian visible layer of matrices, got {unit.name} of shape {unit.shape}"
        )
    machine.check_bounded()
    return machine, unit


def _kind(unit: Unit, batch: Array, salty: bool, values: str) -> str:
    if unit.gaussian:
        return "real"
    if values != "auto":
        return values
    white = 255 if batch.dtype == np.uint8 else 1
    return "binary" if salty and not bool(((batch > 0) & (batch < white)).any()) else "grey"


def _start(noise: str, batch: Array) -> float:
    """Return where the estimate of the level starts."""
    if noise == "salt-and-pepper":
        return _START[noise]
    n = max(1, _PIXELS_A_GROUP // math.prod(batch.shape[1:]))
    some = batch[np.unique(np.linspace(0, len(batch) - 1, min(n, len(batch))).astype(np.int64))]
    return max(robust_sigma(some) / (255 if batch.dtype == np.uint8 else 1), _START[noise])
