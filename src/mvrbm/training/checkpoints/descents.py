"""Checkpoints for gradient descent with backpropagation.

A checkpoint folder contains `descent.json` and `descent.safetensors`. Both files are replaced after every epoch.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor

from mvrbm.errors import StorageError
from mvrbm.io.atomic import recover_folder, replace_folder
from mvrbm.saving import read_json, read_tensors, write_tensors
from mvrbm.training.checkpoints.checks import (
    VALUE_ERRORS,
    check_tensors,
    counter,
    differences,
    instance,
    instances,
    require_same_run,
)

_PLAIN = "descent.json"
_TENSORS = "descent.safetensors"
# Name prefix for the random generator states stored by version 0.2.
_FORMER_GENERATORS = "source."


@dataclass(frozen=True)
class DescentCheckpoint:
    """Checkpoint for gradient descent, stored in one folder.

    Parameters
    ----------
    folder : Path
        Folder that contains the checkpoint.
    identity : mapping
        JSON-serializable values that identify the training run (its settings and a hash of the data).
    ignore_mismatch : bool
        Whether to issue a warning instead of raising StorageError if the checkpoint has a different identity.
    """

    folder: Path
    identity: Mapping[str, Any]
    ignore_mismatch: bool = False

    def save(self, plain: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> None:
        """Save the JSON-serializable values `plain` and the tensors. An existing checkpoint is replaced."""
        with replace_folder(self.folder, is_descent) as staging:
            content = json.dumps({**plain, "identity": self.identity}) + "\n"
            (staging / _PLAIN).write_text(content, encoding="utf-8")
            write_tensors(dict(tensors), staging / _TENSORS)

    def load(self, shapes: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, Tensor]] | None:
        """Load the JSON values and the tensors, or return None if there is no checkpoint.

        `shapes` maps tensor names to expected shapes. None matches any shape. Other names are not allowed.
        """
        if not (recover_folder(self.folder) / _PLAIN).exists():
            return None
        plain = read_json(self.folder / _PLAIN, largest=None)
        stored = read_tensors(self.folder / _TENSORS)
        with self.damage_as_storage_error():
            _check(plain)
            found = differences(plain["identity"], self.identity)
            require_same_run(found, self.folder, ignore_mismatch=self.ignore_mismatch)
            tensors = {name: tensor for name, tensor in stored.items() if not name.startswith(_FORMER_GENERATORS)}
            return plain, check_tensors(tensors, shapes, "tensors", complete=False)

    @contextlib.contextmanager
    def damage_as_storage_error(self) -> Iterator[None]:
        """Context manager that converts errors caused by corrupted values to StorageError."""
        try:
            yield
        except StorageError:
            raise
        except VALUE_ERRORS as error:
            raise StorageError(f"{self.folder} does not contain a checkpoint for this training run: {error}") from error


def _check(plain: Mapping[str, Any]) -> None:
    """Raise an error if the JSON values cannot have been written by :meth:`DescentCheckpoint.save`."""
    for name in ("epoch", "update", "best_epoch"):
        counter(plain[name], name)
    instance(plain["identity"], dict, "identity")
    instances(plain["best"], (int, float), "best")
    instances(plain["history"], dict, "history")


def digest_of(*tensors: Tensor) -> str:
    """Return a hash of the values of the tensors."""
    found = hashlib.sha256()
    for tensor in tensors:
        found.update(tensor.detach().cpu().contiguous().numpy().data)
    return found.hexdigest()


def is_descent(folder: Path) -> bool:
    """Return whether a folder contains only the files of a checkpoint."""
    names = {entry.name for entry in folder.iterdir()}
    return _PLAIN in names and names <= {_PLAIN, _TENSORS}
