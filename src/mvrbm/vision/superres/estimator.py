"""`SuperResolver`, the estimator: it learns from images and enlarges others."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import KW_ONLY, dataclass, field
from pathlib import Path
from typing import Any, Self

import numpy as np
import torch
from numpy.typing import NDArray
from sklearn.utils import check_random_state
from sklearn.utils.validation import check_is_fitted

from mvrbm.devices import resolve_device
from mvrbm.errors import StorageError
from mvrbm.estimators.parameters import SavedEstimator, stored_descent
from mvrbm.machine import BoltzmannMachine
from mvrbm.models import multimodal_mvrbm
from mvrbm.random import RandomSource
from mvrbm.saving import load, read_machine, register, write_machine
from mvrbm.training.backprop import DescentSettings, descend
from mvrbm.training.callbacks import Callback, Checkpoint, ProgressBar
from mvrbm.training.trainer import Trainer
from mvrbm.units import Gaussian
from mvrbm.updates.recipe import Recipe, as_recipe
from mvrbm.validation import choice, number, whole_number
from mvrbm.vision.images import Array, check_image
from mvrbm.vision.resampling import SCALES
from mvrbm.vision.stages import Progress
from mvrbm.vision.superres.back_projection import back_project
from mvrbm.vision.superres.enlarging import Enlarger, StagedEnlarger
from mvrbm.vision.superres.features import DERIVATIVES, HIGH, Geometry
from mvrbm.vision.superres.inference import Tile, all_maps, feature_matrices, image_loss, patch_loss
from mvrbm.vision.superres.training_data import CROP_SIDE, TrainingPatches, cut_crops, cut_patches

_MOST_ROUNDS = 1000  # of mean field and of back-projection, which converge after a few
_TILE = 512  # side of the tiles of an enlarged image, in pixels


@register("SuperResolver")
@dataclass(eq=False, repr=False)
class SuperResolver(SavedEstimator, Enlarger):
    r"""Enlarges images by a multimodal MVRBM.

    A patch is five Gaussian matrices: X, the true patch minus the bicubic one, and the derivatives Z1 to Z4 of the
    bicubic one along x, y, xx and yy, all divided by the root mean square of the derivatives. They share a hidden layer
    Y,

    .. math:: E = \sum_m \Big[\frac{\lVert X_m - B_m\rVert^2}{2 s_m^2} - \langle Y, U_m X_m V_m^\top\rangle\Big]
              - \langle C, Y\rangle .

    To enlarge an image, X starts at zero, which is the bicubic image; one cycle of mean field updates Y and then X, the
    X of overlapping patches are averaged, and back-projection makes the result consistent with the image.

    Parameters
    ----------
    scale : {2, 3, 4}
        Side length, in pixels, of the square that one pixel becomes.
    patch : int
        Side of a patch of the enlarged image, in pixels.
    hidden_shape : (int, int)
        Shape of the hidden layer.
    rank : int
        Number of Kronecker products in each coupling.
    stride : int, optional
        Pixels from one patch to the next; default: the scale. Multiples of the scale are fastest.
    n_patches : int
        Number of patches to learn from.
    back_projection : int
        Rounds of back-projection; 0 for none.
    cycles : int
        Cycles of mean field.
    floor : float
        Added to the scale of each patch, as a share of white, so that noise in flat patches is not amplified.
    n_epochs, batch_size, learning_rate : int, int, float, optional
        Number of epochs, patches per update, and learning rate; default: the recipe's values.
    recipe : str or Recipe
        ``"default"``, ``"paper"``, or a :class:`~mvrbm.training.Recipe`.
    random_state : int, RandomState or None
        Random seed.
    device, verbose : str, int
        Device, where ``"auto"`` is a GPU if there is one, and whether to show progress.

    Attributes
    ----------
    machine_ : BoltzmannMachine
        The model.
    history_ : list of dict
        Metrics logged in fitting and fine-tuning.

    Examples
    --------
    >>> import numpy as np
    >>> from mvrbm.vision import SuperResolver
    >>> image = np.random.default_rng(0).integers(0, 256, (40, 40), dtype=np.uint8)
    >>> model = SuperResolver(patch=6, hidden_shape=(4, 4), n_patches=100, n_epochs=1, device="cpu")
    >>> model.fit([image]).upscale(image).shape
    (80, 80)
    """

    scale: int = 2
    patch: int = 15
    hidden_shape: tuple[int, int] = (20, 20)
    rank: int = 1
    _: KW_ONLY
    stride: int | None = None
    n_patches: int = 10_000
    back_projection: int = 20
    cycles: int = 1
    floor: float = 0.005
    n_epochs: int | None = None
    batch_size: int | None = None
    learning_rate: float | None = None
    recipe: str | Recipe = "default"
    random_state: Any = 0
    device: str | torch.device = "auto"
    verbose: int = 0

    machine_: BoltzmannMachine = field(init=False)
    history_: list[dict[str, float]] = field(init=False)

    def fit(
        self,
        images: Sequence[Any],
        y: Any = None,
        *,
        callbacks: Sequence[Callback] = (),
        checkpoints: Any = None,
        force: bool = False,
    ) -> Self:
        """Learn from high-resolution images by contrastive divergence.

        Parameters
        ----------
        images : sequence of arrays (H, W) or (H, W, 3)
            Bytes, 16-bit numbers or floats from 0 to 1, each of any size. The low-resolution images are computed from
            them.
        y : None
            Ignored.
        callbacks : sequence of Callback
            See :mod:`mvrbm.training`.
        checkpoints, force : path, bool, optional
            Folder to save in after every epoch, and to resume from. Unless `force` is True, checkpoints of other images
            or settings are an error.
        """
        geometry = self._geometry()
        cut_seed, seed = self._seeds(2)
        layers = [each.layers() for each in self._patches(images, geometry, self.n_patches, cut_seed)]
        data = {name: torch.cat([layer[name] for layer in layers]).numpy() for name in layers[0]}
        visible = {name: Gaussian((self.patch, self.patch)) for name in (HIGH, *DERIVATIVES)}
        machine = multimodal_mvrbm(visible, self.hidden_shape, self.rank).to(resolve_device(self.device))
        given = {name: getattr(self, name) for name in ("n_epochs", "batch_size", "learning_rate")}
        changes = {name: value for name, value in given.items() if value is not None}
        recipe = dataclasses.replace(as_recipe(self.recipe), **changes)
        callbacks = [*callbacks, ProgressBar()] if self.verbose else callbacks
        trainer = Trainer(machine, recipe, callbacks=callbacks, seed=seed)
        if checkpoints is not None:
            trainer.callbacks = [*callbacks, Checkpoint(checkpoints)]
            trainer.resume(checkpoints, force=force)
        trainer.fit(data, initialize=True)
        self.machine_, self.history_ = machine, list(trainer.history)
        trainer.raise_if_interrupted()
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
        checkpoints: Any = None,
        force: bool = False,
    ) -> Self:
        """Train mean-field inference by backpropagation, starting from the machine as it is.

        Parameters
        ----------
        images : sequence of arrays (H, W) or (H, W, 3)
            High-resolution images, as for `fit`.
        objective : {"patches", "images"}
            Whether to minimize the error of each patch, or that of the image that the patches make together.
        n_samples : int
            Number of patches, or of crops of images, to learn from.
        n_epochs, batch_size, learning_rate : int, int, float
            Number of epochs, samples per update, and Adam's learning rate, which falls to zero along half a cosine.
        averaging, augment : float, bool
            Decay of a running average of the parameters, which replaces them at the end (0 for no average), and
            whether to flip and turn the images.
        checkpoints, force : path, bool, optional
            As for `fit`.
        """
        check_is_fitted(self)
        geometry, machine, n = self._geometry(), self.machine_, whole_number(n_samples, "n_samples")
        cut_seed, seed = self._seeds(4)[2:]
        if choice(objective, "objective", ("patches", "images")) == "patches":
            patches = self._patches(images, geometry, n, cut_seed, augment=augment)
            loss, weights = patch_loss(machine, patches, geometry, self.cycles)
        else:
            crops = cut_crops(images, geometry, n, augment=augment, seed=cut_seed)
            loss, weights = image_loss(machine, crops, geometry, self.cycles, self.back_projection)
        plan = DescentSettings(n_epochs, batch_size, learning_rate, 0.0, "cosine", averaging, None)
        plan.check()
        rng = RandomSource(seed, device=machine.like.device)
        start = (*machine.parameters(), *(torch.as_tensor(np.asarray(image, np.float32)) for image in images))
        kept = stored_descent(checkpoints, self, plan, start, (), force)
        rows = descend(machine, [], loss, weights, plan, rng, capturable=True, checkpoint=kept)
        self.history_ = [*self.history_, *rows]
        return self

    def fit_and_tune(
        self,
        images: Sequence[Any],
        *,
        tuning_patches: int = 100_000,
        tuning_epochs: int = 15,
        tuning_crops: int = 0,
        checkpoints: Any = None,
        force: bool = False,
    ) -> Self:
        """Fit, and then fine-tune on patches and on crops, with settings that suit photographs.

        Parameters
        ----------
        images : sequence of arrays (H, W), (H, W, 3) or (H, W, 4)
            High-resolution images, as for `fit`. Alpha is ignored.
        tuning_patches, tuning_epochs, tuning_crops : int
            Number of patches (0 for none) and of epochs to fine-tune with, and number of crops, for example 20,000, for
            which a GPU is advisable.
        checkpoints, force : path, bool, optional
            As for `fit`; each step has a folder of its own there.
        """
        choice(self.scale, "scale", SCALES)
        images = [image[..., :3] if image.ndim == 3 else image for image in map(check_image, images)]
        side = CROP_SIDE * self.scale
        if tuning_crops and not any(min(image.shape[:2]) >= side for image in images):
            none = f"none of {len(images)} has"
            raise ValueError(f"tuning_crops: images must have at least {side} pixels per side, {none}")
        kept = {} if checkpoints is None else {n: Path(checkpoints) / n for n in ("fit", "patches", "crops")}
        self.fit(images, checkpoints=kept.get("fit"), force=force)
        if tuning_patches:
            size: dict[str, Any] = {"n_samples": tuning_patches, "n_epochs": tuning_epochs}
            self.fine_tune(images, **size, checkpoints=kept.get("patches"), force=force)
        if tuning_crops:
            settings: dict[str, Any] = {"n_epochs": 12, "batch_size": 16, "learning_rate": 1e-3, "averaging": 0.999}
            settings |= {"n_samples": tuning_crops, "checkpoints": kept.get("crops"), "force": force}
            self.fine_tune(images, objective="images", **settings)
        return self

    def _patches(
        self, images: Sequence[Any], geometry: Geometry, n: int, seed: int, augment: bool = False
    ) -> list[TrainingPatches]:
        """Return the same number of patches of every phase, n in all."""
        if len(images) == 0:
            raise ValueError("images must hold at least one image, got none")
        share = -(-n // len(geometry.offsets))
        how: dict[str, Any] = {"floor": self.floor, "flat": 2 * self.floor, "augment": augment, "seed": seed}
        cuts = [cut_patches(images, self.scale, self.patch, share, offsets=o, **how) for o in geometry.offsets]
        return [cut.first(min(len(cut.scales) for cut in cuts)) for cut in cuts]

    def _geometry(self) -> Geometry:
        """Check the parameters, and return how images are cut into patches."""
        choice(self.scale, "scale", SCALES)
        for name in ("patch", "rank", "n_patches"):
            whole_number(getattr(self, name), name)
        whole_number(self.cycles, "cycles", 1, _MOST_ROUNDS)
        whole_number(self.back_projection, "back_projection", 0, _MOST_ROUNDS)
        stride = whole_number(self.scale if self.stride is None else self.stride, "stride")
        if stride > self.patch:
            raise ValueError(f"stride must be at most the patch's side, {self.patch}, got {stride}")
        return Geometry(self.scale, self.patch, stride, number(self.floor, "floor", 0, 1, exclude_low=True))

    def _seeds(self, n: int) -> list[int]:
        return [int(seed) for seed in check_random_state(self.random_state).randint(2**31 - 1, size=n)]

    def upscale_luminance(
        self, low: Array, *, self_ensemble: bool = False, progress: Progress | None = None
    ) -> NDArray[np.float32]:
        """Enlarge luminance (h, w), with white at 1, without rounding or clipping."""
        check_is_fitted(self)
        return super().upscale_luminance(low, self_ensemble=self_ensemble, progress=progress)

    @torch.no_grad()
    def _enlarged(self, low: NDArray[np.float32], progress: Progress) -> NDArray[np.float32]:
        geometry, like = self._geometry(), self.machine_.like
        maps = all_maps(self.machine_, feature_matrices(geometry, like))
        small = torch.from_numpy(low).to(like)
        size = (small.shape[0], small.shape[1])
        large = torch.empty(size[0] * self.scale, size[1] * self.scale, dtype=like.dtype, device=like.device)
        rows, columns = ([(first, min(first + _TILE, n)) for first in range(0, n, _TILE)] for n in large.shape)
        regions = [(down, across) for down in rows for across in columns]
        for done, (down, across) in enumerate(regions, start=1):
            tile = Tile(geometry, size, (down, across), like)
            view = tile.view(small[None])
            found = tile.difference(maps, view.around, view.scales, self.cycles)
            large[slice(*down), slice(*across)] = (view.bicubic + found)[0]
            progress(done, len(regions))
        return back_project(small, large, self.scale, self.back_projection).float().cpu().numpy()

    @classmethod
    def pretrained(cls, scale: int | None = None, folder: Any = None, *, device: Any = "auto") -> Enlarger:
        """Load a trained model, from the package or from a folder.

        Parameters
        ----------
        scale, folder, device : int, path, str
            Required scale, default: 2 without a folder, that of the saved model with one; folder of a saved model,
            default: :class:`StagedEnlarger`, the model in the package; device to compute on.
        """
        if folder is None:
            return StagedEnlarger(choice(2 if scale is None else scale, "scale", SCALES), device)
        model = load(folder, device)
        if not isinstance(model, SuperResolver):
            raise StorageError(f"{folder} does not hold a {cls.__name__}")
        if scale is not None and model.scale != scale:
            raise StorageError(f"{folder} is a model for scale {model.scale}, not for {scale}")
        return model

    def _write(self, folder: Path, extra: Mapping[str, Any]) -> None:
        write_machine(self.machine_, folder, extra)

    def _restore(self, folder: Path, described: Mapping[str, Any]) -> None:
        geometry, machine = self._geometry(), read_machine(folder).to(resolve_device(self.device))
        found = {name: (unit.name, unit.shape) for name, unit in machine.layers.items()}
        wanted = dict.fromkeys((HIGH, *DERIVATIVES), (Gaussian.name, (geometry.patch, geometry.patch)))
        if found != wanted or machine.hidden.shape != self.hidden_shape:
            raise ValueError(f"its layers are {found} and {machine.hidden.shape}")
        if any(link.matrix_factors() is None for link in machine.links.values()):
            raise ValueError("its couplings are not Kronecker products of two matrices")
        self.machine_, self.history_ = machine, []
