"""Feature extraction and access to learned filters: `transform`, `hidden_maps`, `reconstruct`, `components`."""

import math
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from numpy.typing import ArrayLike
from sklearn.base import ClassNamePrefixFeaturesOutMixin, TransformerMixin
from sklearn.utils.validation import check_is_fitted
from torch import Tensor

from mvrbm.estimators.base import BaseRBM, as_rows, to_array
from mvrbm.estimators.batches import Array, joined
from mvrbm.machine import BoltzmannMachine
from mvrbm.sampling import mean_field

# Maximum number of entries in the weight matrix returned by `components_`.
_LARGEST_DENSE = 2**26


class FeaturesMixin(ClassNamePrefixFeaturesOutMixin, TransformerMixin, BaseRBM):
    """Mixin that extracts features and returns the learned parameters as arrays."""

    def hidden_maps(self, X: Any) -> Array:
        r"""Return the means of the hidden units as an array of shape (n, \*hidden_shape).

        For Bernoulli units, the means are probabilities.
        """
        check_is_fitted(self)
        return self._map_batches(X, lambda batch: self.machine_.hidden_mean(batch, check=False))

    def transform(self, X: Any) -> Array:
        """Return the means of the hidden units as an array of shape (n, n_hidden)."""
        return as_rows(self.hidden_maps(X))

    def inverse_transform(self, X: ArrayLike) -> Any:
        r"""Return the means of the visible units given values of the hidden units.

        Parameters
        ----------
        X : array of shape (n, n_hidden) or (n, \*hidden_shape)
            Values of the hidden units, such as the output of :meth:`transform` or :meth:`hidden_maps`.

        Returns
        -------
        array, or dict of str to array if there are several modalities
            Means in the format of the training data.
        """
        with torch.no_grad():
            return self._to_user(self.machine_.visible_mean(self._hidden_values(X, self._machines[-1])))

    def _hidden_values(self, X: ArrayLike, machine: BoltzmannMachine) -> Tensor:
        values = np.array(X)
        shape = machine.hidden.shape
        if values.shape[1:] not in (shape, (math.prod(shape),)):
            raise ValueError(
                f"hidden values must have shape (n, {math.prod(shape)}) or (n, {', '.join(map(str, shape))}), "
                f"got {values.shape}"
            )
        return torch.from_numpy(values).reshape(-1, *shape).to(machine.like)

    @torch.no_grad()
    def reconstruct(self, X: Any, *, steps: int = 1) -> Any:
        """Reconstruct the data from the means of the hidden units.

        Parameters
        ----------
        X : array
            Data in a format that :meth:`fit` accepts.
        steps : int, default=1
            Number of passes. Each pass computes the hidden means and then the visible means.

        Returns
        -------
        array, or dict of str to array if there are several modalities
            Reconstructed data.
        """
        check_is_fitted(self)
        reconstructed = (mean_field(self.machine_, batch, steps, check=False) for batch in self._batches(X))
        return self._to_user(joined(reconstructed), like=X)

    def components(self, which: ArrayLike | None = None) -> Any:
        r"""Return the weights of the given hidden units as filters of shape (n, \*visible_shape).

        With several modalities, the result is a dict of arrays keyed by modality. For an MVRBM of rank 1, filter (k, l)
        is the outer product of row k of U and row l of V.

        Parameters
        ----------
        which : array of int, optional
            Indices of the hidden units, in row-major order. Default: all hidden units.
        """
        weights = self._weights(self._machines[-1], which)
        return _one_or_all({name: to_array(filters) for name, filters in weights.items()})

    @torch.no_grad()
    def _weights(self, machine: BoltzmannMachine, which: ArrayLike | None) -> dict[str, Tensor]:
        """Return the weights of hidden units as one tensor of shape (n, *layer shape) per layer."""
        size = math.prod(machine.hidden.shape)
        if which is None:
            return {name: link.dense().reshape(size, *link.visible_shape) for name, link in machine.links.items()}
        indices = torch.as_tensor(np.asarray(which)).reshape(-1)
        if len(indices) and (int(indices.min()) < 0 or int(indices.max()) >= size):
            raise ValueError(
                f"indices in 'which' must be from 0 to {size - 1}, got {int(indices.min())} to {int(indices.max())}"
            )
        chosen = torch.nn.functional.one_hot(indices, size).reshape(-1, *machine.hidden.shape).to(machine.like)
        return {name: link.to_visible(chosen) for name, link in machine.links.items()}

    @property
    def components_(self) -> Any:
        """Weight matrix of shape (n_hidden, n_visible_features), or a dict of matrices if there are several modalities.

        Raises AttributeError if there are more than 67 million weights.
        """
        n_visible = sum(math.prod(unit.shape) for unit in self._machines[0].layers.values())
        if self._n_features_out * n_visible > _LARGEST_DENSE:
            size = f"{self._n_features_out:,} x {n_visible:,}"
            raise AttributeError(f"components_ is too large (a matrix of size {size}); use components(which) instead")
        filters = self.components()
        if isinstance(filters, dict):
            return {name: as_rows(part) for name, part in filters.items()}
        return as_rows(filters)

    @property
    def intercept_visible_(self) -> Any:
        """Visible biases of shape (n_visible_features,), or a dict of arrays if there are several modalities.

        The biases of Gaussian units are their means when all hidden units are zero.
        """
        layers = self._machines[0].layers
        return _one_or_all({name: to_array(unit.bias.expand(unit.shape).flatten()) for name, unit in layers.items()})

    @property
    def intercept_hidden_(self) -> Array:
        """Hidden biases of shape (n_hidden,)."""
        hidden = self._machines[-1].hidden
        return to_array(hidden.bias.expand(hidden.shape).flatten())

    @property
    def _n_features_out(self) -> int:
        return math.prod(self._machines[-1].hidden.shape)

    def __sklearn_tags__(self) -> Any:
        """Return the scikit-learn tags, which allow NaN and declare that float32 and float64 are preserved."""
        tags = super().__sklearn_tags__()
        tags.input_tags.allow_nan = self.learns_from_incomplete
        tags.transformer_tags.preserves_dtype = ["float64", "float32"]
        return tags


def _one_or_all(layers: Mapping[str, Any]) -> Any:
    """Return a single value if there is only one layer, or a dict keyed by layer name otherwise."""
    return dict(layers) if len(layers) > 1 else next(iter(layers.values()))
