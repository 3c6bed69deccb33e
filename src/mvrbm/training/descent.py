"""Checkpoints of backpropagation: the state of a descent after its latest epoch, from which it continues bit for bit.

A folder holds the files `descent.json` and `descent.safetensors`, which are replaced together. Checkpoints of
contrastive divergence are in :mod:`mvrbm.training.checkpoint`.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor

from mvrbm.errors import StorageError
from mvrbm.io.atomic import replace_folder
from mvrbm.random import RandomSource
from mvrbm.saving import read_json, read_tensors, write_tensors
from mvrbm.training.restoring import checked, counter, differences, of_kind, same_run

__all__ = ["Descent", "digest_of"]

_PLAIN, _TENSORS = "descent.json", "descent.safetensors"


@dataclass(frozen=True)
class Descent:
    """Where a descent is stored, and which one it is.

    Parameters
    ----------
    folder : Path
        The folder.
    identity : mapping
        Plain values that tell this descent from others: settings, and a digest of the data.
    sources : sequence of RandomSource
        Sources of random numbers of the loss.
    force : bool
        Whether to continue a descent of another identity.
    """

    folder: Path
    identity: Mapping[str, Any]
    sources: Sequence[RandomSource]
    force: bool = False

    def save(self, plain: Mapping[str, Any], tensors: Mapping[str, Tensor], order: RandomSource) -> None:
        """Store plain values and tensors, and the state of all random sources."""
        with replace_folder(self.folder, _is_descent) as staging:
            content = json.dumps({**plain, "identity": self.identity}) + "\n"
            (staging / _PLAIN).write_text(content, encoding="utf-8")
            write_tensors(dict(tensors), staging / _TENSORS)

    def load(self, shapes: Mapping[str, Any], order: RandomSource) -> tuple[dict[str, Any], dict[str, Tensor]] | None:
        """Return what was stored, and restore the random sources; None if nothing was stored.

        `shapes` has the shape of each tensor that may be there.
        """
        if not (self.folder / _PLAIN).exists():
            return None
        plain, tensors = read_json(self.folder / _PLAIN, largest=None), read_tensors(self.folder / _TENSORS)
        with self.reading():
            _check(plain)
            same_run(differences(plain["identity"], self.identity), self.folder, self.force)
            tensors = {name: part for name, part in tensors.items() if not name.startswith("source.")}  # of 0.2
            return plain, checked(tensors, shapes, "tensors", complete=False)

    @contextlib.contextmanager
    def reading(self) -> Iterator[None]:
        """Raise StorageError for any error of values that are missing or of another kind."""
        try:
            yield
        except StorageError:
            raise
        except (KeyError, TypeError, ValueError, AttributeError, RuntimeError, OverflowError) as error:
            raise StorageError(f"{self.folder} does not hold this descent: {error}") from error


def _check(plain: Mapping[str, Any]) -> None:
    """Raise an error for plain values that no descent has stored."""
    for name in ("epoch", "update", "best_epoch"):
        counter(plain[name], name)
    of_kind(plain["identity"], dict, "identity")
    for part in of_kind(plain["best"], list, "best")[:2]:
        of_kind(part, (int, float), "best")
    for row in of_kind(plain["history"], list, "history"):
        of_kind(row, dict, "an entry of history")


def digest_of(*tensors: Tensor) -> str:
    """Return a digest of tensors."""
    found = hashlib.sha256()
    for tensor in tensors:
        found.update(tensor.detach().cpu().contiguous().numpy().data)
    return found.hexdigest()


def _is_descent(folder: Path) -> bool:
    return {entry.name for entry in folder.iterdir()} <= {_PLAIN, _TENSORS}
