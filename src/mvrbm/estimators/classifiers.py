"""Classifiers trained by backpropagation: MVRBMClassifier (one layer) and DeepMVRBMClassifier (a stack).

Training is implemented in :mod:`mvrbm.estimators.fine_tuning`. For the classifier that models the label as a visible
layer, see :mod:`mvrbm.estimators.classification_rbm`.
"""

import math
from collections.abc import Sequence
from dataclasses import KW_ONLY, dataclass
from typing import Any

from mvrbm.estimators.fine_tuning import FineTunedClassifier
from mvrbm.estimators.parameters import Layer
from mvrbm.saving import register

# Minimum number of hidden units if `hidden_shape` is None.
_FEWEST_UNITS = 256


@register("MVRBMClassifier")
@dataclass(eq=False, repr=False)
class MVRBMClassifier(FineTunedClassifier):
    r"""MVRBM with a softmax layer on top, trained by backpropagation.

    .. math:: p(\text{class} \mid X) = \mathrm{softmax}(A \,\mathrm{vec}\, a(\textstyle\sum_r U_r X V_r^\top + C) + d)

    Here, :math:`a` is the activation function of the hidden units, such as the sigmoid or :math:`\max(0, \cdot)`. The
    hidden layer has weights :math:`U_r` and :math:`V_r` and biases :math:`C`, and the softmax layer has weights
    :math:`A` and biases :math:`d`.

    Parameters
    ----------
    hidden_shape : tuple of int, optional
        Shape of the hidden layer. Default: the shape of a sample, enlarged to at least 256 units if necessary.
    rank : int, optional
        Rank of the Kronecker coupling. Default: 16, or a lower rank if a full weight matrix would have fewer
        parameters.
    coupling : Coupling or str, optional
        Coupling to use instead of ``Kronecker(rank)``, such as ``Dense()``.
    hidden : str, default="rectified"
        Type of the hidden units, such as ``"rectified"`` or ``"bernoulli"``.
    visible, visible_shape, random_state, device
        See :class:`~mvrbm.MVRBM`.
    pretraining : int, default=0
        Number of epochs of contrastive divergence per layer before fine-tuning. If 0, fine-tuning starts from random
        weights.
    recipe : str or Recipe, default="default"
        Recipe for pretraining.
    n_epochs : int, optional
        Number of fine-tuning epochs. Default: 30, or more if 30 epochs would amount to fewer than 1,000 updates.
    batch_size : int, optional
        Number of samples per update. Default: one fortieth of the number of samples, but at least 16 and at most 100.
    learning_rate : float, default=0.003
        Initial learning rate for AdamW.
    schedule : {"cosine", "constant"}, default="cosine"
        Learning rate schedule: ``"cosine"`` anneals the learning rate to zero, and ``"constant"`` keeps it fixed.
    dropout : float or sequence of float, default=0.2
        Fraction of the hidden units to drop in each update. Pass a sequence to use a different fraction in each layer.
    input_dropout : float, default=0.0
        Fraction of the entries of each sample to drop in each update.
    weight_decay : float, default=0.0
        Weight decay coefficient for AdamW. Weight decay is not applied to biases.
    averaging : float, default=0.0
        Decay rate for an exponential moving average of the parameters, such as 0.999. Predictions use the averaged
        parameters. If 0, averaging is disabled.
    perturbation : float or "auto", default="auto"
        Perturbation distance for virtual adversarial training. The loss includes the change in the predictions (KL
        divergence) when a sample moves by this distance in the direction in which the predictions change most.
        Distances between Gaussian entries are measured in standard deviations. If 0, virtual adversarial training is
        disabled. ``"auto"`` uses 0.17 times the median distance from a sample to the nearest sample of another class
        (1.2 for 28x28 digit images).
    certainty : float, default=0.0
        Coefficient of an entropy term in the loss, which is computed from the predictions for perturbed unlabeled
        samples. Positive values push class boundaries away from the samples.
    unlabeled_batch_size : int, default=256
        Number of unlabeled samples per update. Used only if `fit` receives unlabeled samples and `perturbation` is
        positive.
    early_stopping : bool, default=False
        Whether to hold out samples for validation, stop training when the validation error no longer improves, and keep
        the best parameters.
    validation_fraction : float, default=0.1
        Fraction of the samples to hold out for validation. Used only for early stopping.
    patience : int, default=10
        Number of epochs without improvement after which training stops. Used only for early stopping.
    verbose : int, default=0
        If nonzero, show progress bars for pretraining and fine-tuning.

    Attributes
    ----------
    classes_ : array of shape (n_classes,)
        The class labels, sorted.
    network_ : StructuredNetwork
        The fitted network.
    stack_ : DeepMVRBM or None
        The pretrained stack, which fine-tuning does not modify, or None if there was no pretraining or the model was
        loaded from a folder.
    history_ : list of dict
        One dict per epoch, with the training loss and, if early stopping is enabled, the error on the held-out samples.
    visible_shape_ : tuple of int
        Shape of a sample.
    n_parameters_ : int
        Number of learned parameters.

    See Also
    --------
    DeepMVRBMClassifier : A classifier with several hidden layers.
    ClassificationMVRBM : A classifier that also draws samples of a class.
    MVRBM : Features without labels.

    Examples
    --------
    >>> from sklearn.datasets import load_digits
    >>> from mvrbm import MVRBMClassifier
    >>> X, y = load_digits().images[:300] / 16, load_digits().target[:300]
    >>> model = MVRBMClassifier(n_epochs=20, random_state=0)
    >>> model.fit(X[:200], y[:200]).predict(X[200:]).shape
    (100,)
    """

    hidden_shape: Any = None
    _: KW_ONLY
    coupling: Any = None
    rank: int | None = None

    feed = "mean"

    @property
    def layers(self) -> tuple[Layer]:
        """Tuple that contains the single hidden layer."""
        if self.hidden_shape is not None:
            return (Layer(self.hidden_shape, self.coupling),)
        shape = self.visible_shape_
        smallest_axis = math.ceil(round(_FEWEST_UNITS ** (1 / len(shape)), 6))
        return (Layer(tuple(max(size, smallest_axis) for size in shape), self.coupling),)


@register("DeepMVRBMClassifier")
@dataclass(eq=False, repr=False)
class DeepMVRBMClassifier(FineTunedClassifier):
    r"""Stack of machines with a softmax layer on top, trained by backpropagation.

    .. math:: Z_l = a(W_l Z_{l-1} + C_l), \qquad p(\text{class} \mid X) = \mathrm{softmax}(A \,\mathrm{vec}\, Z_L + d)

    Here, :math:`Z_0 = X`, and :math:`a` is the activation function of the hidden units. Layer :math:`l` has weights
    :math:`W_l` and biases :math:`C_l`, and the softmax layer has weights :math:`A` and biases :math:`d`. With ``Dense``
    couplings and ``hidden="bernoulli"``, this model is the classic fine-tuned deep belief network.

    Parameters
    ----------
    layers : sequence, default=(None, None)
        Hidden layers, from the lowest to the highest. Each layer is a shape, None, or a
        :class:`~mvrbm.estimators.Layer`. See :class:`~mvrbm.DeepMVRBM`.
    rank : int, default=1
        Rank of the Kronecker couplings in layers that do not define a coupling.
    feed : {"mean", "sample"}, default="mean"
        Training data for the machines above the first during pretraining. See :class:`~mvrbm.DeepMVRBM`.
    hidden, visible, visible_shape, recipe, n_epochs, batch_size, learning_rate, schedule, dropout, input_dropout
        See :class:`~mvrbm.MVRBMClassifier`.
    weight_decay, averaging, perturbation, certainty, unlabeled_batch_size
        See :class:`~mvrbm.MVRBMClassifier`.
    early_stopping, validation_fraction, patience, pretraining, random_state, device, verbose
        See :class:`~mvrbm.MVRBMClassifier`.

    See Also
    --------
    MVRBMClassifier : Documents all parameters and attributes.

    Examples
    --------
    >>> import numpy as np
    >>> from mvrbm import DeepMVRBMClassifier
    >>> X, y = np.random.default_rng(0).random((40, 8, 8)), np.arange(40) % 2
    >>> model = DeepMVRBMClassifier(((4, 4), (3, 3)), n_epochs=1)
    >>> model.fit(X, y).predict_proba(X).shape
    (40, 2)
    """

    layers: Sequence[Any] = (None, None)
    _: KW_ONLY
    feed: str = "mean"
