"""Draw samples from a fitted model (`sample`) and fill in unknown entries (`inpaint`)."""

from typing import Any

from sklearn.utils.validation import check_is_fitted
from torch import Tensor

from mvrbm.devices import sensible_threads
from mvrbm.estimators.base import BaseRBM
from mvrbm.estimators.batches import batches, joined, known_entries, masks
from mvrbm.estimators.initial_states import initial_states
from mvrbm.random import RandomSource
from mvrbm.sampling import Layers, sample
from mvrbm.validation import whole_number


class GenerationMixin(BaseRBM):
    """Mixin that uses Gibbs sampling to draw samples and to fill in unknown entries."""

    def sample(self, n: int = 1, *, steps: int = 1000, init: Any = None, mask: Any = None, mean: bool = False) -> Any:
        """Draw samples from the model by Gibbs sampling.

        Parameters
        ----------
        n : int, default=1
            Number of samples.
        steps : int, default=1000
            Number of Gibbs steps per chain.
        init : array or {"chains", "noise"}, optional
            Initial states: an array of `n` samples, the persistent chains from training (repeated as needed), or random
            states. Default: the persistent chains if the model was trained with them, otherwise random states.
        mask : boolean array, optional
            Mask that is True for the entries of `init` that are known and must not change. If None and `init` contains
            NaN, all non-NaN entries stay fixed. If None and `init` contains no NaN, no entries stay fixed.
        mean : bool, default=False
            Whether to return the means of the visible units given the last hidden sample, instead of samples. Means
            give smoother images.

        Returns
        -------
        array, or dict of str to array if there are several modalities
            Samples, in the format of `init` if it is an array, or in the format of the training data otherwise.
        """
        check_is_fitted(self)
        whole_number(n, "n")
        rng = self._rng()
        known = None
        like = None
        if init is None or isinstance(init, str):
            if mask is not None:
                raise ValueError(
                    "init is required when mask is given because the mask marks which entries of init are known"
                )
            start = initial_states(self._machines[-1], n, init, self.chains_, rng)
        else:
            like = init
            layers = self._read_layers(init, reset=False)
            known = known_entries(None if mask is None else self._masks_by_layer(mask), layers)
            start = self._states_from(joined(batches(layers, self.machine_.layers, known, copy=True)))
        self._warn_of_recipe()
        with sensible_threads(self._machines[-1], n):
            return self._to_user(self._run_chains(n, steps, rng, start, known, mean), like=like)

    def _states_from(self, layers: dict[str, Tensor]) -> dict[str, Tensor]:
        """Convert data to initial states for the sampling chains."""
        return layers

    def _run_chains(
        self, n: int, steps: int, rng: RandomSource, start: Layers, known: Any, mean: bool
    ) -> dict[str, Tensor]:
        """Run `n` Gibbs chains from validated initial states and return samples or means of the visible layers."""
        return sample(self.machine_, n, steps, rng, init=start, mask=known, mean=mean, check=False).visible

    def inpaint(self, X: Any, mask: Any = None, *, steps: int = 100, burn_in: int = 50) -> Any:
        """Replace unknown entries with their means given the known entries.

        To fill in missing values with small errors, use :class:`~mvrbm.MVRBMImputer` instead. It is trained to predict
        missing entries, and reports standard deviations. This method completes samples in the style of the model. Its
        errors can be larger than those of the mean of the data, in particular after training with a recipe that is not
        generative.

        If a sample has no known entries, the result contains the unconditional means under the model.

        Parameters
        ----------
        X : array
            Data. NaN entries are unknown.
        mask : boolean array with the shape of X or of one sample, optional
            Mask that is True for known entries. If None, all entries that are not NaN are known.
        steps : int, default=100
            Number of Gibbs steps to average over.
        burn_in : int, default=50
            Number of Gibbs steps before averaging starts.

        Returns
        -------
        array, or dict of str to array if there are several modalities
            Copy of the data with the unknown entries filled in.
        """
        check_is_fitted(self)
        whole_number(steps, "steps")
        whole_number(burn_in, "burn_in", 0)
        self._warn_of_recipe()
        layers = self._read_layers(X, reset=False)
        known = None if mask is None else masks(self._masks_by_layer(mask), layers)
        if known is None and not self.learns_from_incomplete:
            known = known_entries(None, layers, every_layer=None)
        return self._to_user(joined(self._filled_batches(layers, known, steps, burn_in)), like=X)
