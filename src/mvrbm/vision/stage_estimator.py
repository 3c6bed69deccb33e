"""`StageEstimator`, a base class that implements training and saving for `SuperResolver` and `PhotoDenoiser`."""

import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import torch
from sklearn.utils import check_random_state

from mvrbm.devices import resolve_device
from mvrbm.estimators.persistence import SavedEstimator, stored_descent
from mvrbm.random import RandomSource
from mvrbm.saving import CONFIG, FORMAT, FORMAT_VERSION, MODEL, STACK, read_config, read_tensors, write_tensors
from mvrbm.training.backprop import DescentResult, Objective, descend
from mvrbm.training.part_folders import part_folder
from mvrbm.vision.degradation import Simulation
from mvrbm.vision.images import Array
from mvrbm.vision.pretrained import build_stages, stage_tensors
from mvrbm.vision.stage_training import (
    Patches,
    TrainingStep,
    crop_side,
    cut_crops,
    divergence_loss,
    image_loss,
    patch_loss,
)
from mvrbm.vision.stages import Stage, StageSequence, SymmetricStage

# Config key for the constructor arguments of the stages.
_STAGES = "stages"


class StageEstimator(SavedEstimator):
    """Base class for estimators that process images in stages.

    Attributes
    ----------
    stages_ : StageSequence
        The trained stages.
    history_ : list of dict
        Metrics for each epoch.
    """

    random_state: Any
    device: Any
    stages_: StageSequence
    history_: list[dict[str, float]]

    _color: ClassVar[bool] = False  # whether stages process RGB instead of luminance
    _augment: ClassVar[bool] = False  # whether training flips and rotates the images

    def _seeds(self, n: int) -> list[int]:
        return [int(seed) for seed in check_random_state(self.random_state).randint(2**31 - 1, size=n)]

    def _train(
        self,
        images: Sequence[Array],
        steps: Sequence[TrainingStep],
        simulation: Simulation,
        crop: int,
        checkpoints: Any,
        ignore_mismatch: bool,
    ) -> type[BaseException] | None:
        """Run the training steps in order. Each step has its own subfolder of `checkpoints`.

        If a signal stopped training, return the exception to raise.
        """
        for number, step in enumerate(steps, 1):
            folder = None if checkpoints is None else part_folder(checkpoints, "step", number, step.objective)
            seeds = self._seeds(4 + 3 * number)[-3:]
            found = self._run_step(images, step, simulation, crop, seeds, folder, ignore_mismatch)
            self.history_ = [*self.history_, *found.history]
            if found.interrupt is not None:
                return found.interrupt
        return None

    def _run_step(
        self,
        images: Sequence[Array],
        step: TrainingStep,
        simulation: Simulation,
        crop: int,
        seeds: Sequence[int],
        folder: Path | None,
        ignore_mismatch: bool,
    ) -> DescentResult:
        plan = step.check()
        cut_seed, order_seed, noise_seed = seeds
        device = self.stages_.device
        noise = RandomSource(noise_seed)
        if step.objective == "patches":
            patches = self._cut_patches(images, step.n_samples, cut_seed, self._augment)
            loss, weights = patch_loss(self._first(), patches, next(self.stages_.parameters()).detach())
        else:
            multiple = math.lcm(simulation.multiple, *(stage.stride for stage in self.stages_))
            side = crop_side(images, crop, 2 * simulation.border + multiple, multiple)
            how: dict[str, Any] = {"color": self._color, "augment": self._augment, "seed": cut_seed}
            crops = cut_crops(images, side, step.n_samples, **how).to(device)
            objective = divergence_loss if step.objective == "divergence" else image_loss
            loss, weights = objective(self.stages_, simulation, crops, noise)
        data = (*self.stages_.parameters(), *(torch.as_tensor(np.asarray(image, np.float32)) for image in images))
        kept = stored_descent(folder, self, plan, data, ignore_mismatch)
        order = RandomSource(order_seed)
        product = torch.bfloat16 if device.type == "cuda" else torch.float32
        try:
            for stage in self.stages_:
                stage.product = product
            minimized = Objective(loss, weights, draws_from=(noise,), capturable=True)
            return descend(self.stages_, minimized, plan, order, checkpoint=kept)
        finally:
            for stage in self.stages_:
                stage.product = torch.float32

    def _first(self) -> Stage:
        return next(iter(self.stages_))

    def _cut_patches(self, images: Sequence[Array], n: int, seed: int, augment: bool) -> Patches:
        raise ValueError("objective must be 'divergence' or 'images' for this estimator, got 'patches'")

    def _new_symmetric(self, shapes: Sequence[Mapping[str, Any]], seed: int) -> StageSequence:
        """Create symmetric stages from constructor arguments and initialize them randomly."""
        rng = RandomSource(seed)
        stages = [SymmetricStage(**shape) for shape in shapes]
        for stage in stages:
            stage.initialize(rng)
        return StageSequence(stages).to(resolve_device(self.device))

    def _write(self, folder: Path, extra: Mapping[str, Any]) -> None:
        stages = self.stages_.symmetric
        config = {
            "format": FORMAT,
            "format_version": FORMAT_VERSION,
            STACK: [stage.layers() for stage in stages],
            _STAGES: [stage.arguments for stage in stages],
            **extra,
        }
        (folder / CONFIG).write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
        write_tensors(stage_tensors(stages), folder / MODEL)

    def _restore(self, folder: Path, described: Mapping[str, Any]) -> None:
        stages = build_stages(read_config(folder)[_STAGES], read_tensors(folder / MODEL))
        found = [stage.arguments for stage in stages.symmetric]
        if found != [dict(shape) for shape in self._shapes()]:
            raise ValueError(f"the saved stages do not match the parameters of the estimator, got {found}")
        self.stages_ = stages.to(resolve_device(self.device))
        self.history_ = []

    def _shapes(self) -> list[dict[str, Any]]:
        """Return the constructor arguments of the symmetric stages, derived from the estimator's parameters."""
        raise NotImplementedError

    @classmethod
    def _from_json(cls, name: str, value: Any) -> Any:
        """Convert a parameter from its JSON representation."""
        if name == "steps" and value is not None:
            return tuple(TrainingStep(**step) for step in value)
        return super()._from_json(name, value)
