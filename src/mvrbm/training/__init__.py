"""Training: the trainer, its recipes, negative phases, data sources, callbacks and checkpoints.

The model does not depend on this package. A recipe holds settings, a :class:`TrainState` holds what updates change,
paths compute updates, and :class:`Trainer` is the loop. Fine-tuning by backpropagation is in
:mod:`mvrbm.training.backprop`.
"""

from mvrbm.errors import DivergenceError
from mvrbm.training.callbacks import (
    Callback,
    Checkpoint,
    CSVLog,
    EarlyStopping,
    EpochLines,
    Monitor,
    ProgressBar,
    TensorBoard,
)
from mvrbm.training.group import fit_together
from mvrbm.training.loading import load_checkpoint
from mvrbm.training.trainer import Trainer
from mvrbm.updates.negative import CD, PCD, NegativePhase, TemperedPCD
from mvrbm.updates.recipe import RECIPES, Recipe
from mvrbm.updates.state import TrainState

__all__ = [
    "CD",
    "PCD",
    "RECIPES",
    "CSVLog",
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
    "fit_together",
    "load_checkpoint",
]
