"""Super-resolution by the multimodal MVRBM: an estimator that learns from images and enlarges others."""

from __future__ import annotations

import dataclasses
import functools
import math
import os
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, Self

import numpy as np
import torch
from numpy.typing import NDArray
from sklearn.base import BaseEstimator
from sklearn.utils import check_random_state
from sklearn.utils.validation import check_is_fitted

from mvrbm.couplings import Kronecker
from mvrbm.learning.callbacks import Callback, ProgressBar
from mvrbm.learning.recipe import Recipe, as_recipe
from mvrbm.learning.trainer import Trainer
from mvrbm.machine import BoltzmannMachine
from mvrbm.models import multimodal_mvrbm
from mvrbm.random import RandomSource
from mvrbm.saving import StorageError, read_config, read_machine, replace_folder, write_machine
from mvrbm.units import Gaussian
from mvrbm.vision.back_projection import back_project
from mvrbm.vision.colour import LUMINANCE_GAIN, luminance, to_dtype, white
from mvrbm.vision.fine_tuning import Descent, cut_crops, image_loss, patch_loss, tune
from mvrbm.vision.inference import Geometry, Maps, Tile, all_maps
from mvrbm.vision.resampling import check_image, check_scale, enlarge_rows
from mvrbm.vision.windows import DERIVATIVES, HIGH, Windows, cut_windows, turned

__all__ = ["SuperResolver"]

Array = NDArray[Any]
Progress = Callable[[int, int], None]

_SHIPPED = Path(__file__).parent / "weights"
_TILE = 512  # pixels of an enlarged image that are inferred together, a side
_ROWS_AT_ONCE = 256  # of an enlarged image whose colours are put together


class SuperResolver(BaseEstimator):
    r"""Enlarges images by a multimodal MVRBM.

    A patch is five Gaussian matrices: X, what is missing from the bicubic patch, and its derivatives Z1 to Z4
    along x, y, xx and yy, all divided by the root mean square of the derivatives. They share a hidden layer Y,

    .. math:: E = \sum_m \Big[\frac{\lVert X_m - B_m\rVert^2}{2 s_m^2} - \langle Y, U_m X_m V_m^\top\rangle\Big]
              - \langle C, Y\rangle .

    To enlarge an image, X starts at zero, which is the bicubic image; one pass of mean field goes up and down, the
    overlapping patches' X are averaged, and back-projection makes the result consistent with the image.

    Parameters
    ----------
    scale : {2, 3, 4}
        How many pixels are made of one, a side.
    patch : int
        Pixels of a patch of the enlarged image, a side.
    hidden_shape : (int, int)
        Shape of the hidden layer.
    rank : int
        Number of bilinear maps that are added up in each coupling.
    stride : int, optional
        Pixels from one patch to the next; the scale if not given. A multiple of the scale is fastest.
    n_patches : int
        Patches to learn from.
    back_projection : int
        Rounds of back-projection; 0 for none.
    cycles : int
        Passes of mean field.
    floor : float
        Added to the scale of each patch, white being 1, so that noise in flat ones is not made large.
    n_epochs : int, optional
        Passes over the patches; the recipe's if not given.
    batch_size : int, optional
        Patches an update; the recipe's if not given.
    learning_rate : float, optional
        Step size; the recipe's if not given.
    recipe : str or Recipe
        ``"default"``, ``"paper"``, or a :class:`~mvrbm.learning.Recipe`.
    random_state : int, RandomState or None
        Seed.
    device : str
        ``"auto"`` is a GPU if there is one.
    verbose : int
        Whether to show progress.

    Attributes
    ----------
    machine_ : BoltzmannMachine
        The model.
    history_ : list of dict
        What was logged, in fitting and in fine-tuning.

    Examples
    --------
    >>> import numpy as np
    >>> from mvrbm.vision import SuperResolver
    >>> image = np.random.default_rng(0).integers(0, 256, (40, 40), dtype=np.uint8)
    >>> model = SuperResolver(patch=6, hidden_shape=(4, 4), n_patches=100, n_epochs=1, device="cpu")
    >>> model.fit([image]).upscale(image).shape
    (80, 80)
    """

    machine_: BoltzmannMachine
    history_: list[dict[str, float]]

    def __init__(
        self,
        scale: int = 2,
        patch: int = 15,
        hidden_shape: tuple[int, int] = (20, 20),
        rank: int = 1,
        *,
        stride: int | None = None,
        n_patches: int = 10_000,
        back_projection: int = 20,
        cycles: int = 1,
        floor: float = 0.005,
        n_epochs: int | None = None,
        batch_size: int | None = None,
        learning_rate: float | None = None,
        recipe: str | Recipe = "default",
        random_state: Any = 0,
        device: str = "auto",
        verbose: int = 0,
    ) -> None:
        self.scale = scale
        self.patch = patch
        self.hidden_shape = hidden_shape
        self.rank = rank
        self.stride = stride
        self.n_patches = n_patches
        self.back_projection = back_projection
        self.cycles = cycles
        self.floor = floor
        self.n_epochs = n_epochs
        self.batch_size = batch_size
        self.learning_rate = learning_rate
        self.recipe = recipe
        self.random_state = random_state
        self.device = device
        self.verbose = verbose

    # -- learning ---------------------------------------------------------------------------------

    def fit(self, images: Sequence[Any], y: Any = None, *, callbacks: Sequence[Callback] = ()) -> Self:
        """Learn from high-resolution images by contrastive divergence.

        Parameters
        ----------
        images : sequence of arrays (H, W) or (H, W, 3)
            Bytes, 16-bit numbers or floats from 0 to 1, each of any size. The low-resolution images are made of
            them.
        y : None
            Ignored.
        callbacks : sequence of Callback
            See :mod:`mvrbm.learning`.
        """
        geometry = self._geometry()
        cut_seed, seed = self._seeds(2)
        data = self._windows(images, geometry, self.n_patches, cut_seed)
        layers = [each.layers() for each in data]
        joined = {name: torch.cat([layer[name] for layer in layers]).numpy() for name in layers[0]}
        shape = (self.patch, self.patch)
        visible = {name: Gaussian(shape) for name in (HIGH, *DERIVATIVES)}
        machine = multimodal_mvrbm(visible, self.hidden_shape, self.rank).to(_device(self.device))
        given = {"n_epochs": self.n_epochs, "batch_size": self.batch_size, "learning_rate": self.learning_rate}
        changes: dict[str, Any] = {name: value for name, value in given.items() if value is not None}
        recipe = dataclasses.replace(as_recipe(self.recipe), **changes)
        watching = [*callbacks, *([ProgressBar()] if self.verbose else [])]
        trainer = Trainer(machine, recipe, callbacks=watching, seed=seed)
        trainer.fit(joined)
        self.machine_, self.history_ = machine, list(trainer.history)
        if trainer.interrupted:
            # Training has ended in good order; whatever called it is to end as well.
            raise KeyboardInterrupt
        return self

    def fine_tune(
        self,
        images: Sequence[Any],
        *,
        objective: str = "patches",
        n_samples: int = 100_000,
        n_epochs: int = 25,
        batch_size: int = 512,
        learning_rate: float = 3e-3,
        averaging: float = 0.0,
        augment: bool = True,
    ) -> Self:
        """Train mean-field inference by backpropagation, from the machine as it is.

        Parameters
        ----------
        images : sequence of arrays (H, W) or (H, W, 3)
            High-resolution images, as for `fit`.
        objective : {"patches", "images"}
            Whether to count the error of each patch, or that of the image that they make together.
        n_samples : int
            Patches, or crops of images, to learn from.
        n_epochs, batch_size, learning_rate : int, int, float
            Passes over them, how many an update, and Adam's rate, which falls to zero along half a cosine.
        averaging : float
            Share that a running average of the parameters keeps of itself in an update; 0 for the parameters
            themselves.
        augment : bool
            Whether to flip and turn the images.
        """
        check_is_fitted(self)
        geometry, machine = self._geometry(), self.machine_
        if n_samples != int(n_samples) or n_samples < 1:
            raise ValueError(f"n_samples must be a whole number of at least 1, got {n_samples!r}")
        cut_seed, seed = self._seeds(4)[2:]
        if objective == "patches":
            data = self._windows(images, geometry, n_samples, cut_seed, augment=augment)
            loss, weights = patch_loss(machine, data, geometry, self.cycles)
        elif objective == "images":
            crops = cut_crops(images, geometry, n_samples, augment=augment, seed=cut_seed)
            loss, weights = image_loss(machine, crops, geometry, self.cycles, self.back_projection)
        else:
            raise ValueError(f"objective must be 'patches' or 'images', got {objective!r}")
        rng = RandomSource(seed, device=machine.like.device)
        history = tune(machine, loss, weights, Descent(n_epochs, batch_size, learning_rate, averaging), rng)
        self.history_ = [*self.history_, *history]
        return self

    def _windows(
        self, images: Sequence[Any], geometry: Geometry, n: int, seed: int, augment: bool = False
    ) -> list[Windows]:
        """Patches of every phase that occurs, as many of each."""
        if len(images) == 0:
            raise ValueError("images must hold at least one image, got none")
        share = -(-n // len(geometry.offsets))
        cuts = [
            cut_windows(
                images,
                self.scale,
                self.patch,
                share,
                offsets=offsets,
                floor=self.floor,
                flat=2 * self.floor,
                augment=augment,
                seed=seed,
            )
            for offsets in geometry.offsets
        ]
        least = min(len(cut.scales) for cut in cuts)
        return [Windows(cut.rows, cut.columns, *(part[:least] for part in cut[2:])) for cut in cuts]

    def _geometry(self) -> Geometry:
        check_scale(self.scale)
        stride = self.scale if self.stride is None else self.stride
        for name, value, least in (
            ("patch", self.patch, 1),
            ("rank", self.rank, 1),
            ("n_patches", self.n_patches, 1),
            ("back_projection", self.back_projection, 0),
            ("cycles", self.cycles, 1),
            ("stride", stride, 1),
        ):
            if value != int(value) or value < least:
                raise ValueError(f"{name} must be a whole number of at least {least}, got {value!r}")
        if stride > self.patch:
            raise ValueError(f"stride must be at most the patch's side, {self.patch}, got {stride}")
        if not 0 < self.floor < math.inf:
            raise ValueError(f"floor must be positive, got {self.floor!r}")
        return Geometry(self.scale, self.patch, stride, float(self.floor))

    def _seeds(self, n: int) -> list[int]:
        random = check_random_state(self.random_state)
        return [int(seed) for seed in random.randint(2**31 - 1, size=n)]

    # -- images -----------------------------------------------------------------------------------

    def upscale(self, image: Any, *, self_ensemble: bool = False, progress: Progress | None = None) -> Array:
        """Enlarge an image.

        Parameters
        ----------
        image : array (H, W), (H, W, 3) or (H, W, 4)
            Grey, RGB or RGBA, in bytes, 16-bit numbers or floats from 0 to 1. Luminance is enlarged by the model,
            chroma and alpha by bicubic interpolation.
        self_ensemble : bool
            Whether to average over the eight flips and turns of the image, which takes eight times as long.
        progress : callable, optional
            Called with the number of tiles done and their total after each tile.

        Returns
        -------
        array (H * scale, W * scale, ...)
            Of the same type.
        """
        image = _checked(image)
        low = _luminance(image)
        high = self.upscale_luminance(low, self_ensemble=self_ensemble, progress=progress)
        if image.ndim == 2:
            return to_dtype(high, image.dtype)
        out = np.empty((*high.shape, image.shape[2]), image.dtype)
        top = np.float32(white(image.dtype))
        for first in range(0, len(out), _ROWS_AT_ONCE):
            rows = slice(first, min(first + _ROWS_AT_ONCE, len(out)))
            block = enlarge_rows(image, self.scale, rows) / top
            # Luminance goes into R, G and B alike: to replace that of the bicubic colours is to keep their chroma.
            block[..., :3] += np.float32(LUMINANCE_GAIN) * (high[rows] - luminance(block[..., :3]))[..., None]
            out[rows] = to_dtype(block, image.dtype)
        return out

    def upscale_luminance(
        self, low: Array, *, self_ensemble: bool = False, progress: Progress | None = None
    ) -> NDArray[np.float32]:
        """Enlarge luminance (h, w), white being 1, without rounding or clipping."""
        check_is_fitted(self)
        geometry = self._geometry()
        maps = all_maps(self.machine_, geometry)
        turns = range(8) if self_ensemble else range(1)
        tiles = len(list(_regions((low.shape[0] * self.scale, low.shape[1] * self.scale))))

        def step(turn: int, done: int) -> None:
            if progress is not None:
                progress(turn * tiles + done, len(turns) * tiles)

        def once(turn: int) -> NDArray[np.float32]:
            small = np.ascontiguousarray(turned(low, turn), np.float32)
            return _turned_back(self._once(small, geometry, maps, functools.partial(step, turn)), turn)

        total = once(0)
        for turn in turns[1:]:
            total += once(turn)
        if self_ensemble:
            total /= np.float32(len(turns))
        return total

    @torch.no_grad()
    def _once(
        self, low: Array, geometry: Geometry, maps: dict[tuple[int, int], Maps], step: Callable[[int], None]
    ) -> NDArray[np.float32]:
        like = self.machine_.like
        small = torch.from_numpy(low).to(like)
        size = (low.shape[0], low.shape[1])
        large = torch.empty(size[0] * self.scale, size[1] * self.scale, dtype=like.dtype, device=like.device)
        for number, (rows, columns) in enumerate(_regions((large.shape[0], large.shape[1]))):
            tile = Tile(geometry, size, (rows, columns), like)
            sight = tile.look(small[None])
            missing = tile.missing(maps, sight.around, sight.scales, self.cycles)
            large[slice(*rows), slice(*columns)] = (sight.bicubic + missing)[0]
            step(number + 1)
        high: Array = back_project(small, large, self.scale, self.back_projection).cpu().numpy()
        return high.astype(np.float32, copy=False)

    # -- files ------------------------------------------------------------------------------------

    def save_pretrained(self, folder: str | os.PathLike[str]) -> Path:
        """Write the fitted model to a folder."""
        check_is_fitted(self)
        names = ("scale", "patch", "rank", "stride", "back_projection", "cycles")
        given = {name: getattr(self, name) for name in names}
        params: dict[str, Any] = {name: None if value is None else int(value) for name, value in given.items()}
        params |= {"floor": float(self.floor), "hidden_shape": [int(size) for size in self.hidden_shape]}
        with replace_folder(folder) as staging:
            write_machine(self.machine_, staging, {"estimator": {"class": type(self).__name__, "params": params}})
        return Path(folder)

    @classmethod
    def from_pretrained(
        cls, folder: str | os.PathLike[str] | None = None, *, scale: int | None = None, device: str = "auto"
    ) -> Self:
        """Read a model that `save_pretrained` wrote, or one of those that come with the package.

        Parameters
        ----------
        folder : path, optional
            Where it is; if not given, the model for `scale` that comes with the package.
        scale : {2, 3, 4}, optional
            What the model is to be for: 2 without a folder, that of the model with one.
        device : str
            Where it is to run.
        """
        if folder is None:
            scale = 2 if scale is None else scale
            check_scale(scale)
            folder = _SHIPPED / f"x{scale}"
        described = read_config(Path(folder)).get("estimator")
        if not isinstance(described, dict) or described.get("class") != cls.__name__:
            raise StorageError(f"{folder} does not hold a {cls.__name__}")
        machine = read_machine(Path(folder)).to(_device(device))
        try:
            params = dict(described["params"])
            params["hidden_shape"] = tuple(params["hidden_shape"])
            model = cls(**params, device=device)
            model._geometry()
            _check_machine(machine, model)
        except StorageError:
            raise
        except (KeyError, TypeError, ValueError) as error:
            raise StorageError(f"{folder}: the estimator's description is damaged: {error}") from error
        if scale is not None and model.scale != scale:
            raise StorageError(f"{folder} is a model for scale {model.scale}, not for {scale}")
        model.machine_, model.history_ = machine, []
        return model


def _check_machine(machine: BoltzmannMachine, model: SuperResolver) -> None:
    """Refuse a machine that does not fit its description."""
    found = {name: (unit.name, unit.shape) for name, unit in machine.layers.items()}
    wanted = dict.fromkeys((HIGH, *DERIVATIVES), (Gaussian.name, (model.patch, model.patch)))
    if found != wanted or machine.hidden.shape != model.hidden_shape:
        raise ValueError(f"its layers are {found} and {machine.hidden.shape}")
    if {link.name for link in machine.links.values()} != {Kronecker.name}:
        raise ValueError("its couplings are not Kronecker products")


def _regions(size: tuple[int, int]) -> Iterator[tuple[tuple[int, int], tuple[int, int]]]:
    for top in range(0, size[0], _TILE):
        for left in range(0, size[1], _TILE):
            yield (top, min(top + _TILE, size[0])), (left, min(left + _TILE, size[1]))


def _checked(image: Any) -> Array:
    array = check_image(image)
    if array.ndim == 3 and array.shape[2] not in (3, 4):
        raise ValueError(f"image must be grey, RGB or RGBA, got {array.shape[2]} channels")
    if array.dtype.kind == "f" and not (array.min() >= 0 and array.max() <= 1):
        raise ValueError(f"image of floats must be from 0 to 1, got {array.min():g} to {array.max():g}")
    return array


def _luminance(image: Array) -> NDArray[np.float32]:
    """Luminance of a small image, white being 1, without rounding."""
    top = np.float32(white(image.dtype))
    if image.ndim == 2:
        return np.asarray(image.astype(np.float32) / top, np.float32)
    out = np.empty(image.shape[:2], np.float32)
    for first in range(0, len(out), _ROWS_AT_ONCE):
        rows = slice(first, first + _ROWS_AT_ONCE)
        out[rows] = luminance(image[rows, :, :3].astype(np.float32) / top)
    return out


def _turned_back(image: Array, turn: int) -> Array:
    return np.rot90(image[:, ::-1] if turn >= 4 else image, -(turn % 4))


def _device(device: str) -> torch.device:
    if device == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    return torch.device(device)
