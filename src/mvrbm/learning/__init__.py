"""Learning: the trainer, what it draws its chains from, how it reads data, and what watches it.

The model knows nothing of this. Recipes hold numbers, negative phases hold chains, sources hold data,
callbacks watch, checkpoints remember; :class:`Trainer` puts them together.
"""

from mvrbm.learning.callbacks import Callback, Checkpoint, CSVLog, EarlyStopping, Monitor, ProgressBar, TensorBoard
from mvrbm.learning.recipe import RECIPES, Recipe
from mvrbm.learning.samplers import CD, PCD, NegativePhase, TemperedPCD
from mvrbm.learning.trainer import DivergenceError, Trainer

__all__ = [
    "CD",
    "PCD",
    "RECIPES",
    "CSVLog",
    "Callback",
    "Checkpoint",
    "DivergenceError",
    "EarlyStopping",
    "Monitor",
    "NegativePhase",
    "ProgressBar",
    "Recipe",
    "TemperedPCD",
    "TensorBoard",
    "Trainer",
]
