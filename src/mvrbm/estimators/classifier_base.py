"""Parameters and methods shared by all classifiers."""

from abc import abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from sklearn.base import ClassifierMixin
from sklearn.utils.validation import check_is_fitted
from torch import Tensor

from mvrbm.errors import StorageError
from mvrbm.estimators.batches import Array, batches, has_nan, scaled_as_in_training
from mvrbm.estimators.inputs import VISIBLE, ArrayInput
from mvrbm.estimators.labels import classes_from, describe_classes
from mvrbm.estimators.persistence import SavedEstimator
from mvrbm.progress import report
from mvrbm.training.backprop import DescentSettings
from mvrbm.units import Unit
from mvrbm.updates.recipe import Recipe

# Minimum number of backpropagation epochs if `n_epochs` is None.
_FEWEST_EPOCHS = 30
# Minimum number of updates if `n_epochs` is None. Small datasets require more epochs.
_FEWEST_UPDATES = 1000
# Target number of batches per epoch, which determines the batch size if `batch_size` is None.
_BATCHES_PER_EPOCH = 40
# Minimum batch size if `batch_size` is None.
_SMALLEST_BATCH = 16
# Maximum batch size if `batch_size` is None.
_LARGEST_BATCH = 100


@dataclass(eq=False, repr=False, kw_only=True)
class ClassifierParameters:
    """Parameters shared by all classifiers. See :class:`~mvrbm.MVRBMClassifier`."""

    visible: str = "bernoulli"
    visible_shape: Sequence[int] | None = None
    recipe: str | Recipe = "default"
    n_epochs: int | None = None
    batch_size: int | None = None
    learning_rate: float | None = 3e-3
    schedule: str = "cosine"
    weight_decay: float = 0.0
    averaging: float = 0.0
    random_state: Any = None
    device: str | torch.device = "auto"

    def _plan(self, n: int, learning_rate: Any, patience: int | None = None) -> DescentSettings:
        """Validate the parameters and return the settings for backpropagation on `n` samples."""
        batch_size = self.batch_size
        if batch_size is None:
            batch_size = min(max(n // _BATCHES_PER_EPOCH, _SMALLEST_BATCH), _LARGEST_BATCH)
        plan = DescentSettings(
            n_epochs=_FEWEST_EPOCHS if self.n_epochs is None else self.n_epochs,
            batch_size=batch_size,
            learning_rate=learning_rate,
            weight_decay=self.weight_decay,
            schedule=self.schedule,
            averaging=self.averaging,
            patience=patience,
        )
        plan.check()
        if self.n_epochs is not None:
            return plan
        return plan._replace(n_epochs=max(_FEWEST_EPOCHS, -(-_FEWEST_UPDATES * batch_size // n)))


class ArrayClassifier(ClassifierParameters, ArrayInput, ClassifierMixin, SavedEstimator):
    """Base class for classifiers of arrays or feature rows."""

    classes_: Array
    history_: list[dict[str, float]]

    @property
    @abstractmethod
    def _unit(self) -> Unit:
        """The visible units, with the model's dtype and device."""

    @abstractmethod
    def _log_probabilities(self, x: Tensor) -> Tensor:
        """Return class log-probabilities of shape (n, n_classes), up to an additive constant per sample."""

    def predict_proba(self, X: Any) -> Array:
        """Return class probabilities of shape (n, n_classes), with columns in the order of `classes_`."""
        return np.concatenate([torch.softmax(part, 1).cpu().numpy() for part in self._predictions(X)])

    def predict(self, X: Any) -> Array:
        """Return the most probable label for each sample, as an array of shape (n,)."""
        codes = np.concatenate([part.argmax(1).cpu().numpy() for part in self._predictions(X)])
        labels: Array = self.classes_[codes]
        return labels

    @torch.no_grad()
    def _predictions(self, X: Any) -> list[Tensor]:
        return [self._log_probabilities(batch) for batch in self._batches(X)]

    def _batches(self, X: Any) -> Iterator[Tensor]:
        """Validate the data and yield it in batches of shape (m, *visible_shape)."""
        check_is_fitted(self)
        for batch in batches({VISIBLE: self._read_more(X)}, {VISIBLE: self._unit}):
            yield batch[VISIBLE]
            report("samples", len(batch[VISIBLE]))

    def _read_more(self, X: Any) -> Any:
        """Validate data other than the training data."""
        samples = self._read(X, reset=False)
        if has_nan(samples):
            raise ValueError("X contains NaN, but a classifier requires complete samples; fill in X first")
        return scaled_as_in_training(samples, self._unit)

    def _description(self) -> dict[str, Any]:
        return {**super()._description(), "classes": describe_classes(self.classes_), **self._describe_input()}

    def _restore_classes(self, described: Mapping[str, Any]) -> int:
        """Restore the classes from a saved description and return the number of classes."""
        self.classes_ = classes_from(described["classes"])
        self.history_ = []
        if len(self.classes_) < 2:
            raise StorageError(f"a classifier must have at least two classes, got {self.classes_!r:.100}")
        return len(self.classes_)
