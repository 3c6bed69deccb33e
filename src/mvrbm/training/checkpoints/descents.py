"""Checkpoints of gradient descent by backpropagation.

A folder holds `descent.json` and `descent.safetensors`, which are replaced together after every epoch.
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
from mvrbm.io.atomic import replace_folder
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
# Prefix of the states of random generators, which version 0.2 stored.
_FORMER_GENERATORS = "source."


@dataclass(frozen=True)
class DescentCheckpoint:
    """The folder that stores a descent, and what identifies the descent.

    Parameters
    ----------
    folder : Path
        The folder.
    identity : mapping
        JSON values that distinguish this descent from others: its settings, and a hash of the data.
    force : bool
        Whether to resume a descent with another identity, with a warning.
    """

    folder: Path
    identity: Mapping[str, Any]
    force: bool = False

    def save(self, plain: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> None:
        """Replace the stored descent by these JSON values and tensors."""
        with replace_folder(self.folder, _is_descent) as staging:
            content = json.dumps({**plain, "identity": self.identity}) + "\n"
            (staging / _PLAIN).write_text(content, encoding="utf-8")
            write_tensors(dict(tensors), staging / _TENSORS)

    def load(self, shapes: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, Tensor]] | None:
        """Return the stored JSON values and tensors, None if nothing is stored.

        `shapes` maps the name of every possible tensor to its shape, or to None for any shape.
        """
        if not (self.folder / _PLAIN).exists():
            return None
        plain = read_json(self.folder / _PLAIN, largest=None)
        stored = read_tensors(self.folder / _TENSORS)
        with self.damage_as_storage_error():
            _check(plain)
            require_same_run(differences(plain["identity"], self.identity), self.folder, force=self.force)
            tensors = {name: tensor for name, tensor in stored.items() if not name.startswith(_FORMER_GENERATORS)}
            return plain, check_tensors(tensors, shapes, "tensors", complete=False)

    @contextlib.contextmanager
    def damage_as_storage_error(self) -> Iterator[None]:
        """Convert the errors that damaged values raise to StorageError."""
        try:
            yield
        except StorageError:
            raise
        except VALUE_ERRORS as error:
            raise StorageError(f"{self.folder} does not hold this descent: {error}") from error


def _check(plain: Mapping[str, Any]) -> None:
    """Raise an error for JSON values that no descent has written."""
    for name in ("epoch", "update", "best_epoch"):
        counter(plain[name], name)
    instance(plain["identity"], dict, "identity")
    instances(plain["best"], (int, float), "best")
    instances(plain["history"], dict, "history")


def digest_of(*tensors: Tensor) -> str:
    """Return a hash of the values of tensors."""
    found = hashlib.sha256()
    for tensor in tensors:
        found.update(tensor.detach().cpu().contiguous().numpy().data)
    return found.hexdigest()


def _is_descent(folder: Path) -> bool:
    return {entry.name for entry in folder.iterdir()} <= {_PLAIN, _TENSORS}
