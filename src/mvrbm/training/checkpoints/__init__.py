"""Save training runs in checkpoints and resume them.

On a CPU, a resumed run gives bit-identical results to an uninterrupted run. On a GPU, the results agree up to rounding,
because the order of atomic additions varies.

`runs` saves and restores training with a :class:`~mvrbm.training.Trainer`. `descents` saves and restores gradient
descent with backpropagation (:mod:`mvrbm.training.backprop`). `checks` validates the contents of both kinds of
checkpoints. `folders` finds and replaces the checkpoints of earlier training runs.
"""

from mvrbm.training.checkpoints.descents import DescentCheckpoint, digest_of
from mvrbm.training.checkpoints.folders import replace_checkpoints, stored_checkpoints
from mvrbm.training.checkpoints.runs import RunDescription, StoredRun, newest, read, read_settings, save

__all__ = [
    "DescentCheckpoint",
    "RunDescription",
    "StoredRun",
    "digest_of",
    "newest",
    "read",
    "read_settings",
    "replace_checkpoints",
    "save",
    "stored_checkpoints",
]
