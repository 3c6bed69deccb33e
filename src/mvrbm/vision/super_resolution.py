"""`SuperResolver`, an estimator that enlarges photographs.

Stages (:mod:`mvrbm.vision.stages`) enlarge the luminance and alpha channels. Chroma is enlarged by bicubic
interpolation.
"""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import KW_ONLY, dataclass, field
from pathlib import Path
from typing import Any, Self, cast

import numpy as np
import torch
from numpy.typing import NDArray
from sklearn.utils.validation import check_is_fitted

from mvrbm.devices import resolve_device
from mvrbm.errors import StorageError
from mvrbm.estimators.undo_on_error import undo_on_error
from mvrbm.machine import BoltzmannMachine
from mvrbm.models import multimodal_mvrbm
from mvrbm.saving import ESTIMATOR, load, read_machine, register, write_machine
from mvrbm.training.callbacks import Callback, Checkpoint, ProgressBar
from mvrbm.training.part_folders import part_folder
from mvrbm.training.trainer import Trainer
from mvrbm.units import Gaussian
from mvrbm.updates.recipe import Recipe, as_recipe
from mvrbm.validation import choice, number, whole_number
from mvrbm.vision.back_projection import back_project
from mvrbm.vision.color import LUMINANCE_GAIN, luminance
from mvrbm.vision.degradation import SimulatedReduction
from mvrbm.vision.images import Array, check_image, to_dtype, turned, turned_back, white
from mvrbm.vision.pretrained import shipped_stages
from mvrbm.vision.resampling import SCALES, enlarge_rows
from mvrbm.vision.stage_estimator import StageEstimator
from mvrbm.vision.stage_training import Patches, TrainingStep, cut_patches, training_images
from mvrbm.vision.stages import DERIVATIVES, HIGH, ORIENTATIONS, MachineStage, Progress, Stage, StageSequence

# Number of rows of an enlarged image whose colors are computed at once.
_ROWS_AT_ONCE = 256
# Maximum number of mean-field cycles and of back-projection rounds. Both converge after a few iterations.
_MOST_ROUNDS = 1000
# Side length of training crops, in low-resolution pixels.
_CROP = 32
# Side length of the patches in each pretrained stage, in low-resolution pixels.
_PATCHES = (5, 4, 4)
# Hidden shape and rank of the pretrained stages for each scale.
_SIZES = {2: ((7, 8), 40), 3: ((8, 8), 32), 4: ((8, 8), 25)}
# Patch side length, hidden shape and rank of the paper's machine.
_PAPER = (15, (20, 20), 1)

_PATCH_STEP = TrainingStep("patches", n_samples=100_000, n_epochs=15, batch_size=512, learning_rate=3e-3)
#: Training steps in the default configuration.
DEFAULT_STEPS = (
    TrainingStep("divergence", n_samples=160, n_epochs=1, batch_size=8, learning_rate=2e-3),
    _PATCH_STEP,
    TrainingStep("images", n_samples=2000, n_epochs=6, batch_size=8, learning_rate=2e-3, averaging=0.99),
)

#: Named configurations of :class:`SuperResolver`. ``"stages"``, the default, has the same architecture as the
#: pretrained models. ``"paper"`` is the machine in the paper, trained only by contrastive divergence.
#: ``"fine-tuned"`` is a machine with more hidden units and a higher rank, trained by contrastive divergence and then by
#: backpropagation.
CONFIGURATIONS: dict[str, dict[str, Any]] = {
    "stages": {},
    "paper": {"symmetric": False},
    "fine-tuned": {"patch": 10, "hidden_shape": (24, 24), "rank": 16, "symmetric": False, "steps": (_PATCH_STEP,)},
}


@register("SuperResolver")
@dataclass(eq=False, repr=False)
class SuperResolver(StageEstimator):
    r"""Super-resolution model that uses Boltzmann machines on image patches.

    The image is enlarged by bicubic interpolation and then corrected by a sequence of stages. A stage models each patch
    of the image with five Gaussian matrices: X, the true patch minus the given patch, and the derivatives Z1 to Z4 of
    the given patch along x, y, xx and yy. All five are divided by the root mean square of the derivatives. The five
    layers share a hidden layer Y,

    .. math:: E = \sum_m \Big[\frac{\lVert X_m - B_m\rVert^2}{2 s_m^2} - \langle Y, U_m X_m V_m^\top\rangle\Big]
              - \langle C, Y\rangle .

    X starts at zero. One mean-field cycle updates Y and then X, and the corrections X of overlapping patches are
    averaged. After each stage, back-projection makes the result consistent with the low-resolution image.

    By default, there are three stages whose hidden units share weights across flips and rotations, as in the pretrained
    models. With ``symmetric=False``, there is a single stage with a plain multimodal MVRBM, and the defaults are the
    paper's settings. `mvrbm.vision.super_resolution.CONFIGURATIONS` contains further predefined settings.

    Parameters
    ----------
    scale : {2, 3, 4}
        Factor by which to enlarge each side.
    patch : int or sequence of int, optional
        Side length of a patch in each stage, in pixels of the enlarged image. If `symmetric` is True, each side length
        must be a multiple of the stride. Default: ``(5 * scale, 4 * scale, 4 * scale)``, or 15 if `symmetric` is False.
    hidden_shape : (int, int), optional
        Shape of the hidden layer in each stage. If `symmetric` is True, each stage has eight such layers, one for each
        flip and rotation. Default: as in the pretrained model, or (20, 20) if `symmetric` is False.
    rank : int, optional
        Number of Kronecker products in each coupling. Default: as in the pretrained model, or 1 if `symmetric` is
        False.
    symmetric : bool
        Whether the hidden units share weights across the eight flips and rotations of a patch.
    stride : int, optional
        Distance between patches in pixels. Default: `scale`.
    back_projection : int
        Number of back-projection rounds after each stage.
    cycles : int
        Number of mean-field cycles. Must be 1 if `symmetric` is True.
    floor : float
        Value added to the scale of each patch, as a fraction of the white level, so that noise in flat patches is not
        amplified.
    n_patches : int
        Number of patches for contrastive divergence. Only used if `symmetric` is False.
    n_epochs : int, optional
        Number of epochs of contrastive divergence. Only used if `symmetric` is False. Default: set by `recipe`.
    batch_size : int, optional
        Number of patches per update. Only used if `symmetric` is False. Default: set by `recipe`.
    learning_rate : float, optional
        Learning rate for contrastive divergence. Only used if `symmetric` is False. Default: set by `recipe`.
    recipe : str or Recipe
        Training recipe for contrastive divergence: ``"default"``, ``"paper"``, or a :class:`~mvrbm.training.Recipe`.
        Only used if `symmetric` is False.
    steps : sequence of TrainingStep, optional
        Training steps. If `symmetric` is False, they follow contrastive divergence with `recipe`. Default: contrastive
        divergence, then backpropagation on patches and on image crops, or no steps if `symmetric` is False.
    random_state : int, RandomState or None, default=0
        Random seed. By default, training on the same images gives the same model.
    device : str
        Device to use. ``"auto"`` selects a GPU if available.
    verbose : int
        If nonzero, progress is shown.

    Attributes
    ----------
    stages_ : StageSequence
        The trained stages.
    history_ : list of dict
        Metrics for each epoch.

    Examples
    --------
    >>> import numpy as np
    >>> from mvrbm.vision import SuperResolver, TrainingStep
    >>> image = np.random.default_rng(0).integers(0, 256, (40, 40), dtype=np.uint8)
    >>> model = SuperResolver(
    ...     patch=4,
    ...     hidden_shape=(2, 2),
    ...     rank=1,
    ...     steps=[TrainingStep(n_samples=8)],
    ...     device="cpu",
    ... )
    >>> model.fit([image]).upscale(image).shape
    (80, 80)
    """

    scale: int = 2
    patch: int | Sequence[int] | None = None
    hidden_shape: tuple[int, int] | None = None
    rank: int | None = None
    _: KW_ONLY
    symmetric: bool = True
    stride: int | None = None
    back_projection: int = 20
    cycles: int = 1
    floor: float = 0.005
    n_patches: int = 10_000
    n_epochs: int | None = None
    batch_size: int | None = None
    learning_rate: float | None = None
    recipe: str | Recipe = "default"
    steps: Sequence[TrainingStep] | None = None
    random_state: Any = 0
    device: str | torch.device = "auto"
    verbose: int = 0

    stages_: StageSequence = field(init=False)
    history_: list[dict[str, float]] = field(init=False)

    # -- parameters ---------------------------------------------------------------------------------

    @property
    def machine_(self) -> BoltzmannMachine:
        """Boltzmann machine in the single stage of a model with ``symmetric=False``."""
        check_is_fitted(self)
        if self.symmetric:
            raise AttributeError("machine_ is not available if symmetric is True; use stages_ instead")
        return cast("MachineStage", self._first()).machine

    @property
    def _augment(self) -> bool:  # type: ignore[override]
        return not self.symmetric  # symmetric stages already cover all flips and rotations

    def check(self) -> None:
        """Raise ValueError if a parameter is invalid."""
        choice(self.scale, "scale", SCALES)
        for patch in self._sides():
            whole_number(patch, "patch")
            if self._stride() > patch:
                raise ValueError(f"stride must be at most {patch} (the side length of a patch), got {self._stride()}")
        whole_number(self._size()[1], "rank")
        whole_number(self.n_patches, "n_patches")
        whole_number(self.cycles, "cycles", 1, 1 if self.symmetric else _MOST_ROUNDS)
        whole_number(self.back_projection, "back_projection", 0, _MOST_ROUNDS)
        number(self.floor, "floor", 0, 1, exclude_low=True)
        if not self.symmetric and len(self._sides()) != 1:
            raise ValueError(f"patch must be a single integer if symmetric is False, got {self.patch}")
        for step in self.training_steps:
            step.check()
            if step.objective == "divergence" and not self.symmetric:
                raise ValueError("objective must be 'patches' or 'images' if symmetric is False, got 'divergence'")

    def _check_no_effect(self, callbacks: Sequence[Callback]) -> None:
        """Raise ValueError if there are settings for contrastive divergence, but no contrastive divergence."""
        if not self.symmetric:
            return
        for name in ("n_patches", "n_epochs", "batch_size", "learning_rate", "recipe"):
            if getattr(self, name) != (default := type(self).__dataclass_fields__[name].default):
                raise ValueError(
                    f"{name}={getattr(self, name)!r} has no effect if symmetric is True: pass it to a TrainingStep in "
                    f"steps, or keep the default {default!r}"
                )
        if callbacks:
            raise ValueError("callbacks have no effect if symmetric is True")

    def _sides(self) -> tuple[int, ...]:
        if self.patch is None:
            return tuple(side * self.scale for side in _PATCHES) if self.symmetric else (_PAPER[0],)
        return tuple(self.patch) if isinstance(self.patch, Sequence) else (self.patch,)

    def _size(self) -> tuple[tuple[int, int], int]:
        """Return the shape of the hidden layer and the rank of the couplings."""
        hidden, rank = _SIZES[self.scale] if self.symmetric else _PAPER[1:]
        return self.hidden_shape or hidden, rank if self.rank is None else self.rank

    def _stride(self) -> int:
        return whole_number(self.scale if self.stride is None else self.stride, "stride")

    @property
    def training_steps(self) -> tuple[TrainingStep, ...]:
        """Value of the parameter `steps`, or the default training steps if it is None."""
        if self.steps is not None:
            return tuple(self.steps)
        return DEFAULT_STEPS if self.symmetric else ()

    def _shapes(self) -> list[dict[str, Any]]:
        hidden, rank = self._size()
        same: dict[str, Any] = {"channels": 1, "stride": self._stride(), "mask": False, "floor": float(self.floor)}
        same |= {"hidden": tuple(hidden), "rank": int(rank), "coded": False}
        return [{**same, "patch": int(side)} for side in self._sides()]

    def _new_machine(self) -> BoltzmannMachine:
        (side,) = self._sides()
        hidden, rank = self._size()
        visible = {name: Gaussian((side, side)) for name in (HIGH, *DERIVATIVES)}
        return multimodal_mvrbm(visible, hidden, rank).to(resolve_device(self.device))

    def use_machine(self, machine: BoltzmannMachine) -> Self:
        """Use a trained machine instead of training a new one, and return self. Requires ``symmetric=False``."""
        self.check()
        self.stages_ = StageSequence([MachineStage(machine, self._stride(), float(self.floor), self.cycles)])
        self.stages_.to(machine.like.device)
        self.history_ = []
        return self

    # -- training -----------------------------------------------------------------------------------

    def fit(
        self,
        images: Any,
        y: Any = None,
        *,
        callbacks: Sequence[Callback] = (),
        checkpoints: Any = None,
        ignore_mismatch: bool = False,
    ) -> Self:
        """Train the model on high-resolution images.

        Parameters
        ----------
        images : sequence of arrays of shape (H, W), (H, W, 3) or (H, W, 4), or path
            High-resolution images of dtype uint8, uint16 or float, or the path to a folder of image files. Floats must
            be between 0 and 1. Images may differ in size. The low-resolution images are computed from them. Alpha
            channels are ignored.
        y : None
            Ignored.
        callbacks : sequence of Callback
            Callbacks for contrastive divergence with `recipe`. Only used if `symmetric` is False. See
            :mod:`mvrbm.training`.
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
        self._check_no_effect(callbacks)
        arrays = training_images(images)
        with undo_on_error(self):
            interrupt = self._fit(arrays, callbacks, checkpoints, ignore_mismatch)
        if interrupt is not None:
            raise interrupt
        return self

    def _fit(
        self, images: Sequence[Array], callbacks: Sequence[Callback], checkpoints: Any, ignore_mismatch: bool
    ) -> type[BaseException] | None:
        """Train new stages. If a signal stopped training, return the exception to raise."""
        if self.symmetric:
            self.stages_ = self._new_symmetric(self._shapes(), self._seeds(1)[0])
            self.history_ = []
        else:
            folder = None if checkpoints is None else part_folder(checkpoints, "fit")
            interrupt = self._fit_machine(images, callbacks, folder, ignore_mismatch)
            if interrupt is not None:
                return interrupt
        crop = _CROP * self.scale
        return self._train(images, self.training_steps, self.simulation(), crop, checkpoints, ignore_mismatch)

    def fine_tune(
        self, images: Any, step: TrainingStep, *, checkpoints: Any = None, ignore_mismatch: bool = False
    ) -> Self:
        """Continue training a fitted model with an additional training step.

        Parameters
        ----------
        images : sequence of arrays or path
            High-resolution images. See `fit`.
        step : TrainingStep
            Settings for the additional training step.
        checkpoints, ignore_mismatch
            See `fit`.

        Notes
        -----
        Ctrl-C and SIGTERM stop training after the current update and raise KeyboardInterrupt and SystemExit,
        respectively. The partially trained model remains usable. If an error occurs, the model is left unchanged.
        """
        check_is_fitted(self)
        self.check()
        arrays = training_images(images)
        with undo_on_error(self, [self.stages_]):
            crop = _CROP * self.scale
            interrupt = self._train(arrays, [step], self.simulation(), crop, checkpoints, ignore_mismatch)
        if interrupt is not None:
            raise interrupt
        return self

    def simulation(self) -> SimulatedReduction:
        """Return the degradation that the stages learn to undo."""
        return SimulatedReduction(self.scale, self.back_projection)

    def _fit_machine(
        self, images: Sequence[Array], callbacks: Sequence[Callback], folder: Path | None, ignore_mismatch: bool
    ) -> type[BaseException] | None:
        """Train a plain machine by contrastive divergence."""
        cut_seed, seed = self._seeds(2)
        machine = self._new_machine()
        stage = MachineStage(machine, self._stride(), float(self.floor), self.cycles)
        patches = self._cut(images, stage, self.n_patches, cut_seed, False)
        data = {name: layer.numpy() for name, layer in patches.layers(stage.cpu()).items()}
        machine.to(resolve_device(self.device))
        given = {name: getattr(self, name) for name in ("n_epochs", "batch_size", "learning_rate")}
        changes = {name: value for name, value in given.items() if value is not None}
        recipe = dataclasses.replace(as_recipe(self.recipe), **changes)
        shown = [*callbacks, ProgressBar()] if self.verbose else list(callbacks)
        trainer = Trainer(machine, recipe, callbacks=shown, seed=seed)
        if folder is not None:
            trainer.callbacks = [*shown, Checkpoint(folder)]
            trainer.resume(folder, ignore_mismatch=ignore_mismatch)
        trainer.fit(data, initialize=True)
        self.use_machine(machine)
        self.history_ = list(trainer.history)
        return trainer.interrupt

    def patch_layers(self, images: Any, n: int, seed: int = 0) -> dict[str, torch.Tensor]:
        """Extract up to `n` random patches from images and return the five visible layers of the first stage.

        Each layer is a tensor of shape (n, p, p). The model must be fitted.
        """
        check_is_fitted(self)
        stage = copy.deepcopy(self._first()).cpu()
        return self._cut(training_images(images), stage, n, seed, False).layers(stage)

    def _cut_patches(self, images: Sequence[Array], n: int, seed: int, augment: bool) -> Patches:
        return self._cut(images, self._first(), n, seed, augment)

    def _cut(self, images: Sequence[Array], stage: Stage, n: int, seed: int, augment: bool) -> Patches:
        # Skip patches with little detail, because the model cannot learn detail from them.
        return cut_patches(images, self.scale, stage, n, flat=2 * float(self.floor), augment=augment, seed=seed)

    # -- enlarging ----------------------------------------------------------------------------------

    def upscale(self, image: Any, *, self_ensemble: bool = False, progress: Progress | None = None) -> Array:
        """Enlarge an image.

        Parameters
        ----------
        image : array of shape (H, W), (H, W, 3) or (H, W, 4)
            Grayscale, RGB or RGBA image of dtype uint8, uint16 or float. Floats must be between 0 and 1. The model
            enlarges luminance and alpha, whereas chroma is enlarged by bicubic interpolation. The colors of fully
            transparent pixels are ignored.
        self_ensemble : bool
            Whether to average the results over the eight flips and rotations of the image, which takes eight times as
            long. Has no effect if `symmetric` is True.
        progress : callable, optional
            Function called with the number of finished parts and the total number of parts.

        Returns
        -------
        array of shape (H * scale, W * scale, ...)
            The enlarged image, with the same dtype as `image`.
        """
        check_is_fitted(self)
        image = check_image(image, unit_range=True)
        if image.ndim == 3 and image.shape[2] not in (3, 4):
            raise ValueError(f"image must be grayscale, RGB or RGBA, got {image.shape[2]} channels")
        top = np.float32(white(image.dtype))
        if image.ndim == 3 and image.shape[2] == 4:
            return self._upscale_transparent(image, self_ensemble, progress)
        blocks = (image[first : first + _ROWS_AT_ONCE] for first in range(0, len(image), _ROWS_AT_ONCE))
        low = np.concatenate([luminance(block.astype(np.float32) / top) for block in blocks])
        high = self.upscale_luminance(low, self_ensemble=self_ensemble, progress=progress)
        if image.ndim == 2:
            return to_dtype(high, image.dtype)
        out = np.empty((*high.shape, 3), image.dtype)
        for first in range(0, len(out), _ROWS_AT_ONCE):
            rows = slice(first, min(first + _ROWS_AT_ONCE, len(out)))
            block = enlarge_rows(image, self.scale, rows) / top
            # Adding the same value to R, G and B changes the luminance but not the chroma.
            block += np.float32(LUMINANCE_GAIN) * (high[rows] - luminance(block))[..., None]
            out[rows] = to_dtype(block, image.dtype)
        return out

    def _upscale_transparent(self, image: Array, self_ensemble: bool, progress: Progress | None) -> Array:
        """Enlarge an RGBA image so that it looks correct on a white background.

        Compositing the result onto white gives the same image as enlarging the original image composited onto white.
        """
        top = np.float32(white(image.dtype))
        alpha = image[..., 3].astype(np.float32) / top
        on_white = 1 - alpha[..., None] * (1 - image[..., :3].astype(np.float32) / top)
        parts = [on_white] if alpha.min() == 1 else [on_white, alpha]
        large = []
        for which, part in enumerate(parts):

            def report(done: int, total: int, which: int = which) -> None:
                if progress is not None:
                    progress(which * total + done, len(parts) * total)

            large.append(self.upscale(part, self_ensemble=self_ensemble, progress=report))
        colors = large[0]
        # Smallest alpha for which a valid color produces the composite on white.
        least = 1 - colors.min(2, keepdims=True)
        shown = np.ones_like(colors[..., :1]) if len(parts) == 1 else np.maximum(large[1][..., None], least)
        colors -= 1
        np.divide(colors, shown, out=colors, where=shown > 0)
        return to_dtype(np.concatenate([colors + 1, shown], 2), image.dtype)

    def upscale_luminance(
        self, low: Array, *, self_ensemble: bool = False, progress: Progress | None = None
    ) -> NDArray[np.float32]:
        """Enlarge a luminance image of shape (h, w), with white at 1, without rounding or clipping the result."""
        check_is_fitted(self)
        turns = ORIENTATIONS if self_ensemble and not self.symmetric else 1
        height, width = low.shape
        total = np.zeros((height * self.scale, width * self.scale), np.float32)
        for turn in range(turns):

            def report(done: int, parts: int, turn: int = turn) -> None:
                if progress is not None:
                    progress(turn * parts + done, turns * parts)

            total += turned_back(self._enlarge(np.ascontiguousarray(turned(low, turn), np.float32), report), turn)
        total /= np.float32(turns)
        return total

    def _enlarge(self, low: NDArray[np.float32], progress: Progress) -> NDArray[np.float32]:
        """Enlarge a luminance image of shape (h, w), with white at 1, in a single orientation."""
        small = torch.from_numpy(low).to(next(self.stages_.parameters()))
        bicubic = small.new_empty(len(low) * self.scale, low.shape[1] * self.scale)
        for first in range(0, len(bicubic), _ROWS_AT_ONCE):
            rows = slice(first, min(first + _ROWS_AT_ONCE, len(bicubic)))
            bicubic[rows] = torch.from_numpy(np.ascontiguousarray(enlarge_rows(low, self.scale, rows))).to(bicubic)

        def consistent(image: torch.Tensor) -> torch.Tensor:
            return back_project(small, image[0], self.scale, self.back_projection)[None]

        found = self.stages_.run(bicubic[None], consistent, progress=progress)[0]
        result: NDArray[np.float32] = found.float().cpu().numpy()
        return result

    # -- files --------------------------------------------------------------------------------------

    @classmethod
    def pretrained(cls, scale: int | None = None, folder: Any = None, *, device: Any = "auto") -> SuperResolver:
        """Load a pretrained or saved model.

        Parameters
        ----------
        scale : {2, 3, 4}, optional
            Expected scale. If None, the scale of the saved model is used, or 2 if `folder` is None.
        folder : path, optional
            Folder of a saved model. If None, the pretrained weights are used.
        device : str
            Device to use. ``"auto"`` selects a GPU if available.
        """
        if folder is None:
            model = cls(choice(2 if scale is None else scale, "scale", SCALES), device=device)
            model.stages_ = copy.deepcopy(shipped_stages(f"x{model.scale}", resolve_device(device)))
            model.history_ = []
            return model
        loaded = load(folder, device)
        if not isinstance(loaded, SuperResolver):
            raise StorageError(f"{folder} does not contain a {cls.__name__}")
        if scale is not None and loaded.scale != scale:
            raise StorageError(f"{folder} contains a model for scale {loaded.scale}, but scale {scale} was requested")
        return loaded

    @classmethod
    def from_folder(cls, folder: Path, config: Mapping[str, Any], device: str | torch.device) -> Self:
        """Load a model with the given configuration from a folder. Called by :func:`mvrbm.load`."""
        described = config[ESTIMATOR]
        if "symmetric" not in described["params"]:  # models saved by versions 0.1 and 0.2 are plain machines
            params = {**described["params"], "symmetric": False}
            config = {**config, ESTIMATOR: {**described, "params": params}}
        return super().from_folder(folder, config, device)

    def _write(self, folder: Path, extra: Mapping[str, Any]) -> None:
        if self.symmetric:
            super()._write(folder, extra)
        else:
            write_machine(self.machine_, folder, extra)

    def _restore(self, folder: Path, described: Mapping[str, Any]) -> None:
        self.check()
        if self.symmetric:
            super()._restore(folder, described)
            return
        machine = read_machine(folder).to(resolve_device(self.device))
        (side,) = self._sides()
        found = {name: (unit.name, unit.shape) for name, unit in machine.layers.items()}
        wanted = dict.fromkeys((HIGH, *DERIVATIVES), (Gaussian.name, (side, side)))
        if found != wanted or machine.hidden.shape != self._size()[0]:
            raise ValueError(
                f"the saved layers do not match the parameters of the estimator, got {found} and {machine.hidden.shape}"
            )
        if any(link.matrix_factors() is None for link in machine.links.values()):
            raise ValueError("the saved couplings are not Kronecker products of two matrices")
        self.use_machine(machine)
