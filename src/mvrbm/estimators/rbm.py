"""Models with one visible layer: RBM for vectors, MVRBM for matrices and TVRBM for arrays of any order."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import KW_ONLY, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from sklearn.utils.validation import check_is_fitted
from torch import Tensor

from mvrbm.couplings import Coupling, Dense
from mvrbm.errors import StorageError
from mvrbm.estimators.array_rbm import ArrayRBM
from mvrbm.estimators.batches import Array, model_dtype, scaled_as_in_training, unit_for
from mvrbm.estimators.inputs import VISIBLE, ArrayInput
from mvrbm.estimators.parameters import unconnected
from mvrbm.saving import register
from mvrbm.units import Bernoulli, Unit


class SingleLayerRBM(ArrayInput, ArrayRBM):
    """Base class for models with one visible layer. Samples are arrays or rows of features."""

    def _read_layers(self, X: Any, *, reset: bool) -> dict[str, Any]:
        samples = self._read(X, reset=reset)
        return {VISIBLE: samples if reset else scaled_as_in_training(samples, self.machine_.layers[VISIBLE])}

    def _new_units(self, layers: Mapping[str, Any]) -> dict[str, Unit]:
        return {VISIBLE: unit_for(self.visible, layers[VISIBLE]).to(model_dtype(layers))}

    def _masks_by_layer(self, mask: Any) -> Mapping[str, Any]:
        return {VISIBLE: mask}

    def _to_user(self, layers: Mapping[str, Tensor], like: Any = None) -> Array:
        return self._outward(layers[VISIBLE], like)

    def _description(self) -> dict[str, Any]:
        return {**super()._description(), **self._describe_input()}

    def _restore(self, folder: Path, described: Mapping[str, Any]) -> None:
        super()._restore(folder, described)
        if list(self.machine_.layers) != [VISIBLE]:
            raise StorageError(f"{type(self).__name__} requires one visible layer, got {list(self.machine_.layers)}")
        self._restore_input(self.machine_.layers[VISIBLE], described)


@register("TVRBM")
@dataclass(eq=False, repr=False)
class TVRBM(SingleLayerRBM):
    r"""Tensor-variate restricted Boltzmann machine for samples with any number of axes.

    .. math::

        E(X, Y) = -\langle Y, X \times_1 U_1 \cdots \times_D U_D\rangle - \langle B, X\rangle - \langle C, Y\rangle

    This is the energy for Bernoulli units. Here, :math:`X` and :math:`Y` are the visible and hidden layers, :math:`B`
    and :math:`C` are their biases, and :math:`\times_d U_d` multiplies axis :math:`d` by the matrix :math:`U_d`. If
    `rank` is greater than 1, the first term is a sum of `rank` such products.

    Parameters
    ----------
    hidden_shape, rank, coupling, visible, hidden, visible_shape
        See :class:`~mvrbm.MVRBM`. The hidden layer must have as many axes as a sample.
    n_epochs, batch_size, learning_rate, recipe, negative, n_chains, gibbs_steps, warm_start
        See :class:`~mvrbm.MVRBM`.
    backend, random_state, device, verbose
        See :class:`~mvrbm.MVRBM`.

    See Also
    --------
    MVRBM : The same model for matrices. Documents all parameters and attributes.

    Examples
    --------
    >>> import numpy as np
    >>> from mvrbm import TVRBM
    >>> X = np.random.default_rng(0).random((50, 4, 4, 3)).round()
    >>> model = TVRBM((3, 3, 2), n_epochs=2, random_state=0).fit(X)
    >>> model.hidden_maps(X).shape
    (50, 3, 3, 2)

    References
    ----------
    Qi, Sun, Gao, Hu and Li, "Matrix Variate RBM and Its Applications", 2016, Remark 3.
    """

    hidden_shape: Any = None
    _: KW_ONLY
    rank: int = 1
    coupling: Any = None
    visible_shape: Sequence[int] | None = None


@register("MVRBM")
@dataclass(eq=False, repr=False)
class MVRBM(TVRBM):
    r"""Matrix-variate restricted Boltzmann machine.

    .. math:: E(X, Y) = -\langle Y, \textstyle\sum_r U_r X V_r^\top\rangle - \langle B, X\rangle - \langle C, Y\rangle

    This is the energy for Bernoulli units. Here, :math:`X` and :math:`Y` are the visible and hidden layers, :math:`B`
    and :math:`C` are their biases, and :math:`U_r` and :math:`V_r` are the weights.

    Parameters
    ----------
    hidden_shape : tuple of int, optional
        Shape of the hidden layer, with as many axes as a sample. Default: the shape of a sample.
    rank : int, default=1
        Number of bilinear maps :math:`U_r X V_r^\top` in the sum.
    coupling : Coupling or str, optional
        Coupling to use instead of ``Kronecker(rank)``, such as ``Dense()``, ``CP(8)`` or ``"mpo:3"``.
    visible, hidden : str, default="bernoulli"
        Unit types of the visible and hidden layers: ``"bernoulli"`` (values from 0 to 1), ``"gaussian"`` (real
        values), ``"gaussian-learned"`` (real values with learned variances), ``"categorical"`` (one-hot along the last
        axis), or another name listed by :func:`mvrbm.units.unit_names`.
    visible_shape : tuple of int, optional
        Shape of a sample if the input has shape (n, n_features). If None, each row is a vector. Not needed for input
        of shape (n, I, J).
    n_epochs : int, optional
        Number of epochs. Default: the recipe's value (10 in the default recipe).
    batch_size : int, optional
        Number of samples per update. Default: the recipe's value (100 in the default recipe).
    learning_rate : float, optional
        Initial learning rate. Default: the recipe's value. The default recipe computes it from the layer sizes.
    recipe : str or Recipe, default="default"
        Training settings: ``"default"`` (for feature extraction), ``"generative"`` (for sampling and for filling in
        missing entries), ``"paper"`` (Algorithm 1 in the paper), or a :class:`~mvrbm.training.Recipe`.
    negative : {"cd", "pcd", "tempered"}, optional
        Negative phase: contrastive divergence, persistent contrastive divergence, or persistent contrastive divergence
        with parallel tempering. Default: the recipe's negative phase (``"cd"`` in the default recipe).
    n_chains : int, optional
        Number of persistent chains. Supported only for ``"pcd"`` and ``"tempered"``. Default: the recipe's value, or
        100 if `negative` is given.
    gibbs_steps : int, optional
        Number of Gibbs steps per update. Default: the recipe's value (1 in the default recipe).
    warm_start : bool, default=False
        Whether `fit` continues training a fitted or loaded model for `n_epochs` more epochs instead of training a new
        model.
    backend : str, default="auto"
        Implementation of the updates. ``"auto"`` selects the fastest implementation for the model and the device.
        ``"autograd"`` computes gradients with autograd. See :class:`mvrbm.training.Trainer` for the other
        implementations.
    random_state : int, RandomState or None, default=None
        Seed or generator for random numbers. Pass an int for reproducible results.
    device : str or torch.device, default="auto"
        Device to run on, such as ``"cpu"`` or ``"cuda"``. ``"auto"`` selects a GPU if one is available.
    verbose : int, default=0
        If nonzero, show a progress bar.

    Attributes
    ----------
    machine_ : BoltzmannMachine
        The fitted machine.
    trainer_ : Trainer or None
        The model's trainer, or None if the model was loaded from a folder.
    history_ : list of dict
        Metrics logged by callbacks.
    visible_shape_ : tuple of int
        Shape of a sample.
    n_epochs_, n_updates_ : int
        Number of epochs and number of updates for which the model has been trained.
    interrupted_ : bool
        Whether Ctrl-C or SIGTERM stopped the last call to `fit`.
    components_ : array of shape (n_hidden, n_visible_features)
        Weights, as in scikit-learn's `BernoulliRBM`. Not available if the matrix would exceed 67 million entries.
    intercept_visible_, intercept_hidden_ : array
        Biases of the visible and hidden units, as in scikit-learn's `BernoulliRBM`.
    n_parameters_ : int
        Number of learned parameters.
    chains_ : dict of str to Tensor
        Up to 100 persistent chains from training, keyed by layer name. `sample` starts from these chains. The dict is
        empty if the model has no persistent chains.

    See Also
    --------
    RBM : Samples that are rows of numbers.
    TVRBM : Samples with three or more axes.
    MatrixMixture : Real-valued arrays, with exact likelihoods.
    MVRBMClassifier : A classifier trained with labels.
    MVRBMImputer : Imputation of missing values in arrays and tables.

    Examples
    --------
    >>> import numpy as np
    >>> from mvrbm import MVRBM
    >>> images = np.random.default_rng(0).random((20, 8, 8), dtype=np.float32)
    >>> model = MVRBM((6, 6), rank=2, n_epochs=1, random_state=0).fit(images)
    >>> model.transform(images).shape, model.components_.shape
    ((20, 36), (36, 64))

    References
    ----------
    Qi, Sun, Gao, Hu and Li, "Matrix Variate RBM and Its Applications", 2016, equations (3), (8) and (9), Algorithm 1.
    """

    largest_order = 2


@register("RBM")
@dataclass(eq=False, repr=False)
class RBM(SingleLayerRBM):
    r"""Classic restricted Boltzmann machine.

    .. math:: E(x, y) = -y^\top W x - b^\top x - c^\top y

    This is the energy for Bernoulli units. Here, :math:`x` and :math:`y` are the visible and hidden layers, :math:`b`
    and :math:`c` are their biases, and :math:`W` is the weight matrix.

    Parameters
    ----------
    hidden_shape : int, default=256
        Number of hidden units.
    coupling : Coupling or str, optional
        Coupling to use instead of a full weight matrix (``Dense()``).
    visible, hidden, visible_shape
        See :class:`~mvrbm.MVRBM`.
    n_epochs, batch_size, learning_rate, recipe, negative, n_chains, gibbs_steps, warm_start
        See :class:`~mvrbm.MVRBM`.
    backend, random_state, device, verbose
        See :class:`~mvrbm.MVRBM`.

    See Also
    --------
    MVRBM : Documents all parameters and attributes.

    Examples
    --------
    >>> import numpy as np
    >>> from mvrbm import RBM
    >>> X = np.random.default_rng(0).random((50, 6)).round()
    >>> RBM(3, n_epochs=2, random_state=0).fit(X).transform(X).shape
    (50, 3)

    References
    ----------
    Qi, Sun, Gao, Hu and Li, "Matrix Variate RBM and Its Applications", 2016, equation (1).
    """

    hidden_shape: Any = 256
    _: KW_ONLY
    coupling: Any = None
    visible_shape: Sequence[int] | None = None

    def _new_coupling(self, layer: str, units: Mapping[str, Unit]) -> Coupling:
        return Dense() if self.coupling is None else unconnected(self.coupling)

    @classmethod
    def from_sklearn(cls, fitted: Any, *, device: str | torch.device = "auto") -> RBM:
        """Create a fitted RBM with the weights, biases and training parameters of a scikit-learn `BernoulliRBM`."""
        check_is_fitted(fitted, ["components_", "intercept_hidden_", "intercept_visible_"])
        weights = np.asarray(fitted.components_)
        settings = {name: getattr(fitted, name) for name in ("batch_size", "learning_rate", "random_state")}
        estimator = cls(weights.shape[0], n_epochs=fitted.n_iter, device=device, **settings)
        unit = Bernoulli(weights.shape[1]).to(model_dtype({VISIBLE: weights}))
        estimator._set_machines(estimator._new_machines({VISIBLE: unit}, batch_size=1))
        machine = estimator.machine_
        with torch.no_grad():
            machine.links[VISIBLE].get_parameter("weight").copy_(torch.from_numpy(weights))
            machine.layers[VISIBLE].bias.copy_(torch.from_numpy(np.asarray(fitted.intercept_visible_)))
            machine.hidden.bias.copy_(torch.from_numpy(np.asarray(fitted.intercept_hidden_)))
        names = getattr(fitted, "feature_names_in_", None)
        estimator._restore_input(machine.layers[VISIBLE], {"as_arrays": False, "feature_names": names})
        return estimator
