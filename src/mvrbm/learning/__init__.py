"""Training: the trainer, its recipes, negative phases, data sources, callbacks and checkpoints.

The model does not depend on this package. A recipe holds settings, a :class:`TrainState` holds what updates change,
paths compute updates, and :class:`Trainer` is the loop. Fine-tuning by backpropagation is in
:mod:`mvrbm.learning.backprop`.
"""

from mvrbm.errors import DivergenceError
from mvrbm.learning.callbacks import (
    Callback,
    Checkpoint,
    CSVLog,
    EarlyStopping,
    EpochLines,
    Monitor,
    ProgressBar,
    TensorBoard,
)
from mvrbm.learning.group import fit_together
from mvrbm.learning.loading import load_checkpoint
from mvrbm.learning.recipe import RECIPES, Recipe
from mvrbm.learning.samplers import CD, PCD, NegativePhase, TemperedPCD
from mvrbm.learning.state import TrainState
from mvrbm.learning.trainer import Trainer

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
