"""Checkpoints: saving training runs, and resuming them bit for bit.

`runs` saves and restores the state of a :class:`~mvrbm.training.Trainer`, `descents` that of a gradient descent by
backpropagation (:mod:`mvrbm.training.backprop`), and `checks` validates what was read from either.
"""

from mvrbm.training.checkpoints.descents import DescentCheckpoint, digest_of
from mvrbm.training.checkpoints.runs import RunDescription, StoredRun, newest, read, read_settings, save

__all__ = ["DescentCheckpoint", "RunDescription", "StoredRun", "digest_of", "newest", "read", "read_settings", "save"]
