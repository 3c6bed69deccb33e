"""Training loop, callbacks and checkpoints.

:class:`Trainer` runs the training loop. A :class:`Recipe` contains the training settings, and a :class:`TrainState`
contains everything that changes during training. Both are defined in :mod:`mvrbm.updates`, along with the update rule
and the negative phases. Backends (:mod:`mvrbm.backends`) compute the updates. Fine-tuning with backpropagation is in
:mod:`mvrbm.training.backprop`.
"""

from mvrbm.errors import DivergenceError
from mvrbm.training.callbacks import (
    Callback,
    CallOrder,
    Checkpoint,
    CSVLog,
    EarlyStopping,
    EpochLines,
    Monitor,
    ProgressBar,
    TensorBoard,
    TrainingRun,
)
from mvrbm.training.same_shape_machines import fit_together
from mvrbm.training.trainer import Trainer, load_checkpoint
from mvrbm.updates.negative import CD, PCD, NegativePhase, TemperedPCD
from mvrbm.updates.recipe import RECIPES, Recipe
from mvrbm.updates.state import TrainState

__all__ = [
    "CD",
    "PCD",
    "RECIPES",
    "CSVLog",
    "CallOrder",
    "Callback",
    "Checkpoint",
    "DivergenceError",
    "EarlyStopping",
    "EpochLines",
    "Monitor",
    "NegativePhase",
    "ProgressBar",
    "Recipe",
    "TemperedPCD",
    "TensorBoard",
    "TrainState",
    "Trainer",
    "TrainingRun",
    "fit_together",
    "load_checkpoint",
]
