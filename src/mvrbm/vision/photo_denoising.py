"""`PhotoDenoiser`, an estimator that removes noise from photographs, and functions that use its pretrained weights.

Gaussian noise is removed from grayscale images, or from all three channels of color images at once in an opponent color
space. JPEG artifacts are removed from the luminance. For salt-and-pepper noise, corrupted pixels are first replaced
with the median of their uncorrupted neighbors and then refined by the stages.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import KW_ONLY, dataclass, field
from typing import Any, NamedTuple, Self

import numpy as np
import torch
from sklearn.utils.validation import check_is_fitted
from torch import Tensor
from torch.nn import functional as F

from mvrbm.devices import resolve_device
from mvrbm.estimators.undo_on_error import undo_on_error
from mvrbm.extras import require
from mvrbm.saving import register
from mvrbm.validation import choice, number, whole_number
from mvrbm.vision.color import LUMINANCE_GAIN, OPPONENT, luminance
from mvrbm.vision.degradation import (
    Degradation,
    SimulatedJpeg,
    SimulatedNoise,
    SimulatedSalt,
    Simulation,
    as_channels,
    estimate_noise,
    estimate_salt,
    jpeg_steps,
    median_of_uncorrupted,
)
from mvrbm.vision.denoising import NOISES
from mvrbm.vision.images import Array, check_image, to_dtype, white
from mvrbm.vision.pretrained import shipped_stages
from mvrbm.vision.stage_estimator import StageEstimator
from mvrbm.vision.stage_training import TrainingStep, training_images
from mvrbm.vision.stages import Progress, StageSequence

# Maximum amplitude of alternating patterns to remove, as a fraction of the noise level.
_MOST_ALTERNATION = 0.1
# Side length of the squares over which alternating patterns are averaged.
_ALTERNATION_WINDOW = 25
# Maximum amount by which noisy floats may lie below black or above white. With a noise level of 75/255, this is about
# seven standard deviations.
_FARTHEST = 2.0
# Maximum fraction of gray pixels in an image that marks damage.
_MOST_GRAY = 0.25


class _Kind(NamedTuple):
    """Default architecture of the stages for one type of noise."""

    patch: tuple[int, ...]
    stride: tuple[int, ...]
    hidden_shape: tuple[int, int]
    rank: int
    simulation: type[Simulation]
    channels: int = 1
    coded: bool = True
    mask: bool = False
    crop: int = 72  # side length of training crops


_KINDS = {
    "gray": _Kind((16, 12, 12, 8), (4, 3, 3, 2), (8, 16), 14, SimulatedNoise),
    "color": _Kind((12, 12, 8), (3, 3, 2), (8, 16), 9, SimulatedNoise, channels=3),
    "jpeg": _Kind((12, 8), (3, 2), (8, 16), 16, SimulatedJpeg),
    "salt": _Kind((8, 8), (2, 2), (8, 16), 12, SimulatedSalt, coded=False, mask=True, crop=64),
}
#: Types of noise that a :class:`PhotoDenoiser` can remove.
KINDS = tuple(_KINDS)

_STEPS = (
    TrainingStep("divergence", n_samples=160, n_epochs=1, batch_size=8, learning_rate=2e-3),
    TrainingStep("images", n_samples=2000, n_epochs=6, batch_size=8, learning_rate=2e-3, averaging=0.99),
)


def jpeg_level(quality: int) -> float:
    """Return the level of JPEG artifacts for a given JPEG quality.

    The level is one quarter of the mean quantization step, as a fraction of the white level.
    """
    return 0.25 * float(jpeg_steps(quality).mean()) / 255


@register("PhotoDenoiser")
@dataclass(eq=False, repr=False)
class PhotoDenoiser(StageEstimator):
    """Photo denoiser for one type of noise, built from symmetric stages (see `mvrbm.vision.stages`).

    By default, the architecture is the same as in the pretrained models.

    Parameters
    ----------
    kind : {"color", "gray", "salt", "jpeg"}
        Type of noise: Gaussian noise on RGB or grayscale images, salt-and-pepper noise, or JPEG artifacts.
    patch : sequence of int, optional
        Side length of a patch in each stage. Default: as in the pretrained model.
    stride : sequence of int, optional
        Distance between patches in each stage, in pixels. Must divide the side length of a patch. Default: as in the
        pretrained model.
    hidden_shape : (int, int), optional
        Shape of the hidden layer in each stage. Each stage has eight such layers, one for each flip and rotation.
        Default: as in the pretrained model.
    rank : int, optional
        Number of Kronecker products in each coupling. Default: as in the pretrained model.
    floor : float
        Value added to the scale of each patch, as a fraction of the white level, so that noise in flat patches is not
        amplified.
    steps : sequence of TrainingStep, optional
        Training steps. Default: contrastive divergence, followed by backpropagation on image crops.
    random_state : int, RandomState or None, default=0
        Random seed. By default, training on the same images gives the same model.
    device : str
        Device to use. ``"auto"`` selects a GPU if available.

    Attributes
    ----------
    stages_ : StageSequence
        The trained stages.
    history_ : list of dict
        Metrics for each epoch.

    Examples
    --------
    >>> import numpy as np
    >>> from mvrbm.vision import PhotoDenoiser
    >>> noisy = np.random.default_rng(0).normal(128, 10, (40, 40)).astype(np.uint8)
    >>> model = PhotoDenoiser.pretrained("gray", device="cpu")
    >>> bool(model.denoise(noisy).std() < 0.5 * noisy.std())
    True
    """

    kind: str = "color"
    _: KW_ONLY
    patch: Sequence[int] | None = None
    stride: Sequence[int] | None = None
    hidden_shape: tuple[int, int] | None = None
    rank: int | None = None
    floor: float = 0.005
    steps: Sequence[TrainingStep] | None = None
    random_state: Any = 0
    device: str | torch.device = "auto"

    stages_: StageSequence = field(init=False)
    history_: list[dict[str, float]] = field(init=False)

    @property
    def _color(self) -> bool:  # type: ignore[override]
        return self.kind == "color"

    def check(self) -> None:
        """Raise ValueError if a parameter is invalid."""
        choice(self.kind, "kind", KINDS)
        patches, strides = self._sides()
        if len(patches) != len(strides):
            raise ValueError(f"patch and stride must have one entry per stage, got {len(patches)} and {len(strides)}")
        for patch, stride in zip(patches, strides, strict=True):
            whole_number(patch, "patch")
            whole_number(stride, "stride", 1, patch)
        if self.rank is not None:
            whole_number(self.rank, "rank")
        number(self.floor, "floor", 0, 1, exclude_low=True)
        for step in self.training_steps:
            step.check()

    def _sides(self) -> tuple[Sequence[int], Sequence[int]]:
        kind = _KINDS[self.kind]
        return self.patch or kind.patch, self.stride or kind.stride

    @property
    def training_steps(self) -> tuple[TrainingStep, ...]:
        """Value of the parameter `steps`, or the default training steps if it is None."""
        return _STEPS if self.steps is None else tuple(self.steps)

    def _shapes(self) -> list[dict[str, Any]]:
        kind = _KINDS[choice(self.kind, "kind", KINDS)]
        same: dict[str, Any] = {
            "channels": kind.channels,
            "mask": kind.mask,
            "floor": float(self.floor),
            "hidden": tuple(self.hidden_shape or kind.hidden_shape),
            "rank": int(kind.rank if self.rank is None else self.rank),
            "coded": kind.coded,
        }
        return [
            {**same, "patch": int(patch), "stride": int(stride)} for patch, stride in zip(*self._sides(), strict=True)
        ]

    def fit(self, images: Any, y: Any = None, *, checkpoints: Any = None, ignore_mismatch: bool = False) -> Self:
        """Train the denoiser on clean images with simulated noise.

        Parameters
        ----------
        images : sequence of arrays of shape (H, W), (H, W, 3) or (H, W, 4), or path
            Clean images of dtype uint8, uint16 or float, or the path to a folder of image files. Floats must be between
            0 and 1. Images may differ in size. Alpha channels are ignored.
        y : None
            Ignored.
        checkpoints : path, optional
            Folder in which to save a checkpoint after each epoch, and from which to resume training.
        ignore_mismatch : bool
            Whether to resume from checkpoints created with different images or settings. If False, an error is
            raised for such checkpoints.

        Notes
        -----
        Ctrl-C and SIGTERM stop training after the current update and raise KeyboardInterrupt and SystemExit,
        respectively. The partially trained model remains usable. If an error occurs, the model is left unchanged.
        """
        self.check()
        arrays = training_images(images)
        with undo_on_error(self):
            self.stages_ = self._new_symmetric(self._shapes(), self._seeds(1)[0])
            self.history_ = []
            crop = _KINDS[self.kind].crop
            interrupt = self._train(arrays, self.training_steps, self.simulation(), crop, checkpoints, ignore_mismatch)
        if interrupt is not None:
            raise interrupt
        return self

    def simulation(self) -> Simulation:
        """Return the degradation that the stages learn to undo."""
        return _KINDS[self.kind].simulation()

    @classmethod
    def pretrained(cls, kind: str = "color", *, device: Any = "auto") -> Self:
        """Load the pretrained denoiser for one type of noise.

        See :class:`PhotoDenoiser` for a description of `kind` and `device`.
        """
        model = cls(choice(kind, "kind", KINDS), device=device)
        model.stages_ = copy.deepcopy(shipped_stages(kind, resolve_device(device)))
        model.history_ = []
        return model

    def denoise(self, image: Any, *, level: float | None = None, progress: Progress | None = None) -> Array:
        """Remove noise from a photograph.

        Parameters
        ----------
        image : array of shape (H, W), (H, W, 3) or (H, W, 4)
            Grayscale, RGB or RGBA image of dtype uint8, uint16 or float. Floats must be between 0 and 1. The alpha
            channel is returned unchanged. If `kind` is ``"gray"``, the channels of a color image are processed
            separately. If `kind` is ``"color"``, a color image is required.
        level : float, optional
            Standard deviation of Gaussian noise as a fraction of the white level. If None, :func:`estimate_noise` is
            used. For JPEG artifacts, `level` is required; use :func:`jpeg_level` to compute it. For salt-and-pepper
            noise, `level` must be None.
        progress : callable, optional
            Function called with the number of finished parts and the total number of parts.

        Returns
        -------
        array of the same shape and dtype as `image`
            The denoised image.
        """
        check_is_fitted(self)
        array = check_photograph(image, _FARTHEST if self.kind in ("gray", "color") else 0.0)
        if level is not None:
            if self.kind == "salt":
                raise ValueError(f"level must be None for salt-and-pepper noise on photographs, got {level}")
            number(level, "level, as a fraction of the white level (0.098 for 25/255),", 0, 1, exclude_low=True)
        if self.kind == "jpeg":
            if level is None:
                raise ValueError("level is required for JPEG artifacts; use jpeg_level to compute it")
            return self._remove_jpeg(array, level, progress)
        pixels = as_channels(array).to(self.stages_.device)
        if self.kind == "salt":
            clean = torch.cat([self._remove_salt(channel[None], progress) for channel in pixels])
        else:
            sigma = estimate_noise(array) if level is None else level
            clean = self._remove_noise(pixels, sigma, progress) if sigma > 0 else pixels
        found = to_dtype(clean.cpu().numpy().transpose(1, 2, 0), array.dtype)
        return found[..., 0] if array.ndim == 2 else np.concatenate([found, array[..., 3:]], 2)

    def _remove_noise(self, pixels: Tensor, sigma: float, progress: Progress | None) -> Tensor:
        """Remove Gaussian noise from channels of shape (c, h, w)."""
        if self.kind == "gray":
            channels = [self.stages_.run_mirrored(channel[None], level=sigma, progress=progress) for channel in pixels]
            return _without_alternation(torch.cat(channels), sigma)
        if len(pixels) != 3:
            raise ValueError("image must be RGB or RGBA for a denoiser of kind 'color', got a grayscale image")
        opponent = torch.from_numpy(OPPONENT).to(pixels)
        mixed = torch.einsum("dc,chw->dhw", opponent, pixels)
        found = self.stages_.run_mirrored(mixed, level=sigma, progress=progress)
        return torch.einsum("dc,dhw->chw", opponent, _without_alternation(found, sigma))

    def _remove_salt(self, channel: Tensor, progress: Progress | None) -> Tensor:
        """Replace all pixels that are exactly black or white in a channel of shape (1, h, w)."""
        mask = ((channel <= 0) | (channel >= 1)).float()
        if not mask.any():
            return channel
        start = median_of_uncorrupted(channel[None], mask[None])[0]
        return self.stages_.run_mirrored(start, mask=mask, progress=progress)

    def _remove_jpeg(self, image: Array, level: float, progress: Progress | None) -> Array:
        colors = image if image.ndim == 2 else image[..., :3]
        pixels = colors.astype(np.float32) / np.float32(white(image.dtype))
        before = luminance(pixels)
        start = torch.from_numpy(np.ascontiguousarray(before))[None].to(self.stages_.device)
        after = self.stages_.run_mirrored(start, level=level, progress=progress)[0].cpu().numpy()
        if image.ndim == 2:
            return to_dtype(after, image.dtype)
        pixels += np.float32(LUMINANCE_GAIN) * (after - before)[..., None]
        return np.concatenate([to_dtype(pixels, image.dtype), image[..., 3:]], 2)


def check_photograph(image: Any, noise: float = 0.0) -> Array:
    """Convert an image to an array, or raise ValueError if it is not grayscale, RGB or RGBA.

    Floats must be between ``-noise`` and ``1 + noise``, where `noise` is the tolerance for noisy images.
    """
    array = check_image(image, unit_range=True, noise=noise)
    if array.ndim == 3 and array.shape[2] not in (3, 4):
        raise ValueError(f"image must be grayscale, RGB or RGBA, got {array.shape[2]} channels")
    return array


def _without_alternation(pixels: Tensor, sigma: float) -> Tensor:
    """Remove weak patterns that alternate from pixel to pixel in an image of shape (c, h, w).

    Stages cannot detect such patterns, because their derivatives are differences between pixels two apart. Only
    patterns that are weak enough to be caused by noise are removed.
    """
    down, across = (1 - 2 * (torch.arange(size, device=pixels.device) % 2) for size in pixels.shape[1:])
    weights = pixels.new_tensor([0.25, 0.5, 0.25])  # smoothing filter that removes alternating patterns
    around = F.pad(pixels[:, None], (1, 1, 1, 1), mode="replicate")
    fine = pixels - F.conv2d(around, torch.outer(weights, weights)[None, None])[:, 0]
    limit = _MOST_ALTERNATION * sigma
    side = _ALTERNATION_WINDOW
    for signs in (down[:, None], across[None], torch.outer(down, across)):
        size = F.avg_pool2d((fine * signs).clamp(-limit, limit), side, 1, side // 2, count_include_pad=False)
        pixels = pixels - size * signs
    return pixels


def denoise_photograph(
    image: Any,
    *,
    noise: str | None = None,
    level: float | None = None,
    device: Any = "auto",
    progress: Progress | None = None,
) -> Array:
    """Remove noise from a photograph, using the pretrained weights.

    Parameters
    ----------
    image : array of shape (H, W), (H, W, 3) or (H, W, 4)
        Grayscale, RGB or RGBA image of dtype uint8, uint16 or float. Floats must be between 0 and 1. The alpha channel
        is returned unchanged.
    noise : {"gaussian", "salt-and-pepper"}, optional
        Type of noise. For ``"salt-and-pepper"``, all pixels that are exactly black or white in a channel are considered
        corrupted. By default, ``"salt-and-pepper"`` is used if `level` is None and :func:`estimate_salt` detects such
        noise, and ``"gaussian"`` is used otherwise.
    level : float, optional
        Standard deviation of Gaussian noise as a fraction of the white level. If None, the level is estimated. Must be
        None for salt-and-pepper noise.
    device : str
        Device to use. ``"auto"`` selects a GPU if available.
    progress : callable, optional
        Function called with the number of finished parts and the total number of parts.

    Returns
    -------
    array of the same shape and dtype as `image`
        The denoised image.

    Examples
    --------
    >>> import numpy as np
    >>> from mvrbm.vision import denoise_photograph
    >>> noisy = np.random.default_rng(0).normal(128, 10, (40, 40)).astype(np.uint8)
    >>> bool(denoise_photograph(noisy, device="cpu").std() < 0.5 * noisy.std())
    True
    """
    array = check_photograph(image, _FARTHEST)
    if noise is None:
        noise = "salt-and-pepper" if level is None and estimate_salt(array) else "gaussian"
    if choice(noise, "noise", NOISES) == "salt-and-pepper":
        # Noisy floats may be below black or above white.
        array = np.clip(array, 0, white(array.dtype)) if array.dtype.kind == "f" else array
        return PhotoDenoiser.pretrained("salt", device=device).denoise(array, level=level, progress=progress)
    kind = "gray" if array.ndim == 2 else "color"
    return PhotoDenoiser.pretrained(kind, device=device).denoise(array, level=level, progress=progress)


def repair_photograph(image: Any, damage: Any, *, device: Any = "auto", progress: Progress | None = None) -> Array:
    """Remove scratches or text from a photograph.

    Biharmonic interpolation fills in the damaged pixels, and the pretrained stages refine them.

    Parameters
    ----------
    image : array of shape (H, W), (H, W, 3) or (H, W, 4)
        Grayscale, RGB or RGBA image of dtype uint8, uint16 or float. Floats must be between 0 and 1. The alpha channel
        is returned unchanged.
    damage : array of shape (H, W)
        Mask that is True, or brighter than half the white level, for each pixel to fill in. All other pixels should be
        black. At most a quarter of the pixels may be gray.
    device : str
        Device to use. ``"auto"`` selects a GPU if available.
    progress : callable, optional
        Function called with the number of finished parts and the total number of parts.

    Returns
    -------
    array of the same shape and dtype as `image`
        The repaired image. Undamaged pixels are unchanged.
    """
    array = check_image(image, unit_range=True)
    given = np.asarray(damage)
    if given.shape != array.shape[:2]:
        raise ValueError(f"damage must have the same size as the image {array.shape[:2]}, got shape {given.shape}")
    missing = given if given.dtype == bool else given > white(given.dtype) / 2
    if given.dtype != bool:
        # Masks with soft edges have some gray pixels, but photographs have many more.
        level = given / white(given.dtype)
        gray = float(((level > 0.25) & (level < 0.75)).mean())
        if gray > _MOST_GRAY:
            raise ValueError(f"damage must be black and white, but {gray:.0%} of its pixels are gray")
    if missing.all():
        raise ValueError("damage must not cover the whole image")
    colors = array[..., None] if array.ndim == 2 else array[..., :3]
    inpaint = require("skimage.restoration", "repairing a photograph", "data").inpaint_biharmonic
    pixels = colors.astype(np.float32) / np.float32(white(array.dtype))
    start = inpaint(pixels, missing, split_into_regions=True, channel_axis=-1).astype(np.float32)
    where = resolve_device(device)
    stages = shipped_stages("salt", where)
    holes = torch.from_numpy(missing.astype(np.float32))[None].to(where)
    channels = torch.from_numpy(np.ascontiguousarray(start.transpose(2, 0, 1))).to(where)
    filled = torch.cat([stages.run_mirrored(each[None], mask=holes, progress=progress) for each in channels])
    found = np.where(missing[..., None], to_dtype(filled.cpu().numpy().transpose(1, 2, 0), array.dtype), colors)
    return found[..., 0] if array.ndim == 2 else np.concatenate([found, array[..., 3:]], 2)


def clean_photograph(
    image: Any,
    degradation: Degradation,
    *,
    strength: float = 1.0,
    device: Any = "auto",
    progress: Progress | None = None,
) -> Array:
    """Remove first JPEG artifacts and then noise from a photograph, using the pretrained weights.

    `degradation` is the result of :func:`estimate_degradation`. The estimated levels are multiplied by `strength`, a
    number from 0 to 4. If `strength` is 0, the image is returned unchanged.
    """
    array = check_image(image, unit_range=True)
    number(strength, "strength", 0, 4)
    if degradation.quality is not None and strength > 0:
        level = min(1.0, strength * jpeg_level(degradation.quality))
        array = PhotoDenoiser.pretrained("jpeg", device=device).denoise(array, level=level, progress=progress)
    if degradation.noise * strength > 0:
        level = min(1.0, strength * degradation.noise)
        array = denoise_photograph(array, level=level, device=device, progress=progress)
    return array
