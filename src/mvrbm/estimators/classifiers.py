"""Fine-tuned classifiers: stacks of machines with a softmax on top, trained by backpropagation.

Here is also what all classifiers share (:class:`ArrayClassifier`). The network itself is in
:mod:`mvrbm.estimators.network`, the loop over batches in :mod:`mvrbm.training.backprop`, and the machine with the label
as a layer in :mod:`mvrbm.estimators.classification_rbm`.
"""

import contextlib
import copy
import math
from abc import abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass
from pathlib import Path
from typing import Any, Self

import numpy as np
import torch
from sklearn.base import ClassifierMixin
from sklearn.utils.validation import check_is_fitted
from torch import Tensor
from torch.nn.functional import cross_entropy

from mvrbm.devices import resolve_device, sensible_threads
from mvrbm.errors import StorageError
from mvrbm.estimators.deep import DeepMVRBM, build_stack
from mvrbm.estimators.inputs import (
    ROWS_AT_ONCE,
    VISIBLE,
    Array,
    ArrayInput,
    Labeled,
    batches,
    check_values,
    classes_from,
    describe_classes,
    unit_named,
)
from mvrbm.estimators.network import StructuredNetwork, class_distance, virtual_adversarial_loss
from mvrbm.estimators.parameters import Layer, SavedEstimator, check_same, seed_of, stored_descent
from mvrbm.machine import BoltzmannMachine
from mvrbm.progress import listening, report
from mvrbm.random import RandomSource
from mvrbm.saving import read_stack, register, write_machines
from mvrbm.training.backprop import DescentSettings, assign, descend
from mvrbm.training.callbacks import Checkpoint
from mvrbm.units import Unit
from mvrbm.updates.recipe import Recipe
from mvrbm.validation import number, whole_number

# Automatic settings: the fewest epochs and updates, and the most samples per update.
_EPOCHS, _UPDATES, _BATCH = 30, 1000, 100
# The fewest hidden units and the highest rank, and the perturbation over the typical distance between classes.
_UNITS, _RANK, _PERTURBATION = 256, 16, 0.17

_TOP = {"top.weight": "weight", "top.bias": "bias"}  # names of the tensors of the softmax in files and in the network


@dataclass(eq=False, repr=False, kw_only=True)
class ClassifierParameters:
    """Parameters that all classifiers share; see :class:`~mvrbm.MVRBMClassifier`."""

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
        """Return the checked settings of backpropagation: few samples make small batches and more epochs."""
        size = min(max(n // 40, 16), _BATCH) if self.batch_size is None else self.batch_size
        settings = (size, learning_rate, self.weight_decay, self.schedule, self.averaging, patience)
        plan = DescentSettings(_EPOCHS if self.n_epochs is None else self.n_epochs, *settings)
        plan.check()
        epochs = max(_EPOCHS, -(-_UPDATES * size // n)) if self.n_epochs is None else self.n_epochs
        return plan._replace(n_epochs=epochs)


class ArrayClassifier(ClassifierParameters, ArrayInput, ClassifierMixin, SavedEstimator):
    """Base class of the classifiers: arrays or rows in, labels out."""

    classes_: Array
    history_: list[dict[str, float]]

    @property
    @abstractmethod
    def _unit(self) -> Unit:
        """The units of the data, in the dtype and on the device of the model."""

    @abstractmethod
    def _log_probabilities(self, x: Tensor) -> Tensor:
        """Log-probabilities of the classes, up to a constant per sample: (n, *shape) -> (n, n_classes)."""

    def predict_proba(self, X: Any) -> Array:
        """Probability of each class, (n, n_classes), in the order of `classes_`."""
        return np.concatenate([torch.softmax(part, 1).cpu().numpy() for part in self._predictions(X)])

    def predict(self, X: Any) -> Array:
        """Most probable label of each sample, (n,)."""
        codes = np.concatenate([part.argmax(1).cpu().numpy() for part in self._predictions(X)])
        labels: Array = self.classes_[codes]
        return labels

    @torch.no_grad()
    def _predictions(self, X: Any) -> list[Tensor]:
        return [self._log_probabilities(batch) for batch in self._batches(X)]

    def _batches(self, X: Any) -> Iterator[Tensor]:
        check_is_fitted(self)
        for batch in batches({VISIBLE: self._read(X, reset=False)}, {VISIBLE: self._unit}):
            yield batch[VISIBLE]
            report("samples", len(batch[VISIBLE]))

    def _description(self) -> dict[str, Any]:
        return {**super()._description(), "classes": describe_classes(self.classes_), **self._describe_input()}

    def _restore_classes(self, described: Mapping[str, Any]) -> int:
        """Set the classes from a saved description, and return how many there are."""
        self.classes_, self.history_ = classes_from(described["classes"]), []
        if len(self.classes_) < 2:
            raise StorageError(f"there must be at least two classes, got {self.classes_!r:.100}")
        return len(self.classes_)


@dataclass(eq=False, repr=False, kw_only=True)
class FineTunedClassifier(ArrayClassifier):
    """Base class of stacks with a softmax on top. Subclasses say which layers the stack has."""

    hidden: str = "rectified"
    rank: int | None = 1
    pretraining: int = 0
    dropout: float | Sequence[float] = 0.2
    input_dropout: float = 0.0
    perturbation: float | str = "auto"
    certainty: float = 0.0
    unlabeled_batch_size: int = 256
    early_stopping: bool = False
    validation_fraction: float = 0.1
    patience: int = 10
    verbose: int = 0

    def _new_stack(self) -> DeepMVRBM:
        """Return the stack to be pre-trained, not yet fitted. Subclasses have `layers` and `feed`."""
        same = ("hidden", "visible", "visible_shape", "recipe", "random_state", "device", "verbose")
        settings = {name: getattr(self, name) for name in ("layers", "feed", *same)}
        return DeepMVRBM(n_epochs=self.pretraining, rank=self._rank(), **settings)

    def _rank(self) -> Any:
        """Return the rank of Kronecker couplings. Automatic: as long as the full matrix has more parameters."""
        sizes = [size**2 for size in self.visible_shape_]
        return max(1, min(_RANK, math.prod(sizes) // sum(sizes))) if self.rank is None else self.rank

    @property
    def _unit(self) -> Unit:
        return self.network_.stack[0].layers[VISIBLE]

    def fit(
        self,
        X: Any,
        y: Any,
        sample_weight: Any = None,
        *,
        unlabeled: Any = None,
        stack: DeepMVRBM | None = None,
        checkpoints: Any = None,
        force: bool = False,
    ) -> Self:
        r"""Learn from labeled data.

        Parameters
        ----------
        X : array of shape (n, \*visible_shape) or (n, n_features)
            The data. Bytes are scaled to [0, 1] batch by batch for Bernoulli units.
        y : array (n,)
            Labels of any kind that can be sorted.
        sample_weight : array (n,), optional
            Weight of each sample in fine-tuning. Pre-training does not use weights.
        unlabeled : array like X, optional
            Samples for pre-training, instead of `X`; with `perturbation`, also samples at which predictions are to
            change slowly.
        stack : DeepMVRBM, optional
            A fitted stack of the same layers to start from, instead of pre-training. It is not changed.
        checkpoints, force : path, bool, optional
            Folder to save in after every epoch, and to resume from. Unless `force` is True, checkpoints of other data
            or settings are an error.
        """
        data = self._read_labeled(X, y, sample_weight, resolve_device(self.device))
        plan = self._plan(len(data.codes), self.learning_rate, self.patience if self.early_stopping else None)
        whole_number(self.pretraining, "pretraining", 0)
        unit, new = unit_named(self.visible, self.visible_shape_).to(data.weights.dtype), self._new_stack()
        machines = build_stack(unit, new.layers, rank=new.rank, hidden=self.hidden)
        shares = self._dropped_shares(len(machines))
        rng = RandomSource(seed_of(self.random_state), device=data.weights.device)
        start, split, order, dropping, moving = rng.split(5)
        learns, held_out = self._split(data, split)
        network = self.network_ = self._network(machines, learns, unlabeled, stack, start, checkpoints, force)
        distance = self._distance(learns)
        unit, others = self._unit, self._others(unlabeled, learns) if distance else None
        weight_of_a_batch = float(learns.weights.mean()) * min(plan.batch_size, len(learns.codes))

        def drop(z: Tensor, layer: int) -> Tensor:
            share = shares[layer + 1]
            if not share:
                return z
            return z * ((dropping.uniform(z.shape, z) >= share).to(z.dtype) / (1 - share))

        def loss(rows: Tensor) -> Tensor:
            x, weights = unit.from_data(learns.samples[rows]), learns.weights[rows]
            value = (cross_entropy(network(x, drop), learns.codes[rows], reduction="none") * weights).sum()
            if not distance:
                return value
            if others is None:
                return value + (weights * virtual_adversarial_loss(network, x, distance, moving)).sum()
            drawn = (moving.uniform((self.unlabeled_batch_size,), weights) * len(others)).long()
            x = unit.from_data(others[drawn])
            change = virtual_adversarial_loss(network, x, distance, moving, self.certainty)
            return value + weight_of_a_batch * change.mean()

        score = None if held_out is None else lambda: self._error_and_loss(held_out)
        decaying = [p for link in network.links for p in link.parameters() if p.requires_grad] + [network.weight]
        bar = _bar(plan.n_epochs) if self.verbose else contextlib.nullcontext()
        with sensible_threads(network.stack[0], plan.batch_size), bar:
            draws = (dropping, moving)
            place = None if checkpoints is None else Path(checkpoints) / "tuning"
            kept = stored_descent(place, self, plan, data, draws, force)
            self.history_ = descend(
                network,
                decaying,
                loss,
                learns.weights,
                plan,
                order,
                score,
                draws_from=draws,
                capturable=True,
                checkpoint=kept,
            )
        return self

    @torch.no_grad()
    def _distance(self, data: Labeled) -> float:
        """Return the distance by which samples are perturbed."""
        if self.perturbation != "auto":
            return float(self.perturbation)
        return _PERTURBATION * class_distance(self.network_.inputs(self._unit.from_data(data.samples)), data.codes)

    def _others(self, unlabeled: Any, data: Labeled) -> Tensor | None:
        """Return the unlabeled samples at which predictions are to change slowly. None: those of the data."""
        if unlabeled is None:
            return None
        samples = self._read(unlabeled, reset=False)
        check_values({VISIBLE: samples}, {VISIBLE: self._unit})
        return torch.from_numpy(np.array(samples)).to(data.samples.device)

    def _dropped_shares(self, count: int) -> list[float]:
        """Share of the data, and of each of `count` layers, that is dropped. Checks the other settings of noise too."""
        layers = list(self.dropout) if isinstance(self.dropout, Sequence) else [self.dropout] * count
        if len(layers) != count:
            raise ValueError(f"dropout must be one number, or one per layer ({count} in all), got {self.dropout!r}")
        if self.perturbation != "auto":
            number(self.perturbation, "perturbation")
        number(self.certainty, "certainty")
        whole_number(self.unlabeled_batch_size, "unlabeled_batch_size")
        return [number(self.input_dropout, "input_dropout", high=1), *(number(p, "dropout", high=1) for p in layers)]

    def _split(self, data: Labeled, rng: RandomSource) -> tuple[Labeled, Labeled | None]:
        """Hold out some samples of each class, in proportion, for early stopping."""
        if not self.early_stopping:
            return data, None
        number(self.validation_fraction, "validation_fraction", 0, 1, exclude_low=True)
        n = len(data.codes)
        shuffled = rng.permutation(n).to(data.codes.device)
        by_class = shuffled[data.codes[shuffled].argsort(stable=True)]
        # Evenly spaced through the classes one after the other: a share of each.
        count = max(1, round(self.validation_fraction * n))
        places = ((torch.arange(count, device=by_class.device) + 0.5) * n / count).long()
        held = torch.zeros(n, dtype=torch.bool, device=by_class.device)
        held[by_class[places]] = True
        parts = [Labeled(*(array[chosen] for array in data)) for chosen in (~held, held)]
        if not all(float(part.weights.sum()) > 0 for part in parts):
            raise ValueError(f"early_stopping needs samples on both sides of the split, got {n} in all")
        return parts[0], parts[1]

    def _network(
        self,
        machines: list[BoltzmannMachine],
        data: Labeled,
        unlabeled: Any,
        fitted: Any,
        rng: RandomSource,
        checkpoints: Any = None,
        force: bool = False,
    ) -> StructuredNetwork:
        """Return the network that fine-tuning starts from, given the machines with parameters not yet set."""
        if unlabeled is not None and not self.perturbation and (not self.pretraining or fitted is not None):
            raise ValueError(
                "unlabeled is for pre-training or perturbation, so pretraining must be at least 1 and stack None, "
                "or perturbation positive"
            )
        n_classes = len(self.classes_)
        self.stack_ = None
        if fitted is None and not self.pretraining:
            network = StructuredNetwork([machine.to(data.weights) for machine in machines], n_classes)
            network.initialize(network.stack[0].layers[VISIBLE].from_data(data.samples), data.weights, rng)
            return network
        if fitted is None:
            samples = data.samples.cpu().numpy() if unlabeled is None else unlabeled
            kept: dict[str, Any] = {}
            if checkpoints is not None:
                folder = Path(checkpoints) / "pretraining"
                kept = {"callbacks": [Checkpoint(folder)], "resume": folder, "force": force}
            fitted = self._new_stack().fit(samples, **kept)
            check_same(machines, fitted.machines_, "unlabeled must have samples of X's shape")
        else:
            check_is_fitted(fitted)
            check_same(machines, fitted.machines_, "stack must have the same layers, units and couplings")
        self.stack_ = fitted
        copies = [copy.deepcopy(machine).to(data.weights) for machine in fitted.machines_]
        network = StructuredNetwork(copies, n_classes)
        network.center()
        return network

    @torch.no_grad()
    def _error_and_loss(self, data: Labeled) -> tuple[float, float]:
        """Weighted error rate and cross-entropy."""
        parts = [self._log_probabilities(self._unit.from_data(part)) for part in data.samples.split(ROWS_AT_ONCE)]
        logits, share = torch.cat(parts), data.weights / data.weights.sum()
        wrong = float((share * (logits.argmax(1) != data.codes)).sum())
        return wrong, float((share * cross_entropy(logits, data.codes, reduction="none")).sum())

    def _log_probabilities(self, x: Tensor) -> Tensor:
        logits: Tensor = self.network_(x)
        return logits

    def hidden_maps(self, X: Any) -> Array:
        r"""Activations of the top hidden layer after fine-tuning, (n, \*shape of the layer)."""
        with torch.no_grad():
            return np.concatenate([self.network_.features(batch).cpu().numpy() for batch in self._batches(X)])

    def _write(self, folder: Path, extra: Mapping[str, Any]) -> None:
        top = {name: self.network_.get_parameter(own) for name, own in _TOP.items()}
        write_machines(self.network_.stack, folder, extra, top)

    def _restore(self, folder: Path, described: Mapping[str, Any]) -> None:
        n_classes = self._restore_classes(described)

        def top_shapes(machines: Sequence[BoltzmannMachine]) -> dict[str, tuple[int, ...]]:
            return {"top.weight": (n_classes, math.prod(machines[-1].hidden.shape)), "top.bias": (n_classes,)}

        machines, top = read_stack(folder, top_shapes)
        network = StructuredNetwork(machines, n_classes)
        assign([network.get_parameter(own) for own in _TOP.values()], [top[name] for name in _TOP])
        self.network_, self.stack_ = network.to(resolve_device(self.device)), None
        self._restore_input(self._unit, described)


@contextlib.contextmanager
def _bar(n_epochs: int) -> Iterator[None]:
    """Show the epochs of backpropagation in a progress bar."""
    from tqdm import tqdm

    with tqdm(total=n_epochs, unit="epoch") as bar:

        def move(unit: str, count: int) -> None:
            bar.update(count if unit == "epochs" else 0)

        with listening(move):
            yield


@register("MVRBMClassifier")
@dataclass(eq=False, repr=False)
class MVRBMClassifier(FineTunedClassifier):
    r"""An MVRBM with a softmax on top, fine-tuned by backpropagation.

    .. math:: p(\text{class} \mid X) = \mathrm{softmax}(A \,\mathrm{vec}\, a(\textstyle\sum_r U_r X V_r^\top + C) + d),

    with :math:`a` the activation of the hidden units, such as the sigmoid or :math:`\max(0, \cdot)`.

    Parameters
    ----------
    hidden_shape : tuple of int, optional
        Shape of the hidden layer. Default: the shape of a sample, or a larger one with 256 units.
    rank : int, optional
        Rank of the Kronecker coupling. Default: 16, or less where the full matrix would have fewer parameters.
    coupling : Coupling or str, optional
        Another coupling instead, such as ``Dense()``.
    hidden : str
        Name of the hidden units: ``"rectified"``, ``"bernoulli"``, ...
    visible, visible_shape, random_state, device
        As for :class:`~mvrbm.MVRBM`.
    pretraining : int
        Number of epochs of contrastive divergence for each layer before fine-tuning; 0 for a random start.
    recipe : str or Recipe
        Recipe of the pre-training.
    n_epochs, batch_size, learning_rate
        Number of epochs of fine-tuning, number of samples per update, and initial learning rate of Adam. Default:
        batches of 100, smaller for fewer than 4,000 samples, and 30 epochs, more if these are fewer than 1,000 updates.
    schedule : {"cosine", "constant"}
        Whether the learning rate falls to zero along half a cosine.
    dropout, input_dropout : float
        Share of hidden units, and of entries of the data, that an update leaves out; `dropout` also as one per layer.
    weight_decay : float
        Decoupled weight decay of the weights; biases do not decay.
    averaging : float
        Decay of a moving average of the parameters, such as 0.999, which predictions use. 0 for none.
    perturbation : float or "auto"
        Strength of virtual adversarial training: the loss includes the change of the predictions (KL divergence) when
        a sample moves by this distance in the direction in which they change most; Gaussian entries are measured in
        their standard deviations. 0 for none. ``"auto"`` is 0.17 times the median distance from a sample to the nearest
        one of another class: 1.2 for digits of 28x28 pixels.
    certainty : float
        Weight of the entropy of the predictions at perturbed unlabeled samples: class boundaries should lie where
        samples are rare.
    unlabeled_batch_size : int
        Number of unlabeled samples per update, where `fit` is given some and `perturbation` is positive.
    early_stopping, validation_fraction, patience : bool, float, int
        Whether to hold out a share of the samples and keep the parameters of the epoch with the best result on them,
        that share, and the number of epochs without improvement after which fine-tuning stops.
    verbose : int
        Whether to show progress bars of pre-training and fine-tuning.

    Attributes
    ----------
    classes_ : array (n_classes,)
        The labels, sorted.
    network_ : StructuredNetwork
        The model.
    stack_ : DeepMVRBM or None
        The pre-trained stack, as it was before fine-tuning.
    history_ : list of dict
        Loss, and error on held-out samples, after every epoch.
    visible_shape_ : tuple of int
        Shape of a sample.
    n_parameters_ : int
        Number of parameters that were fine-tuned.

    Examples
    --------
    >>> from sklearn.datasets import load_digits
    >>> from mvrbm import MVRBMClassifier
    >>> X, y = load_digits().images[:300] / 16, load_digits().target[:300]
    >>> MVRBMClassifier(n_epochs=20, random_state=0).fit(X[:200], y[:200]).predict(X[200:]).shape
    (100,)
    """

    hidden_shape: Any = None
    _: KW_ONLY
    coupling: Any = None
    rank: int | None = None

    feed = "mean"

    @property
    def layers(self) -> tuple[Layer]:
        """The only hidden layer."""
        shape = self.visible_shape_
        least = math.ceil(round(_UNITS ** (1 / len(shape)), 6))
        automatic = tuple(max(size, least) for size in shape)
        return (Layer(automatic if self.hidden_shape is None else self.hidden_shape, self.coupling),)


@register("DeepMVRBMClassifier")
@dataclass(eq=False, repr=False)
class DeepMVRBMClassifier(FineTunedClassifier):
    r"""A stack of machines with a softmax on top, fine-tuned by backpropagation.

    :math:`Z_l = a(W_l Z_{l-1} + C_l)`, :math:`p(\text{class} \mid X) = \mathrm{softmax}(A \,\mathrm{vec}\, Z_L + d)`.
    With ``Dense`` couplings and ``hidden="bernoulli"`` it is the classic fine-tuned deep belief network. Its attributes
    are those of :class:`MVRBMClassifier`.

    Parameters
    ----------
    layers : sequence
        Hidden layers, lowest first: shapes, None, or :class:`~mvrbm.estimators.Layer`; see :class:`~mvrbm.DeepMVRBM`.
    rank : int
        Rank of the Kronecker couplings of layers without a coupling of their own.
    feed : {"mean", "sample"}
        The data that the machines above the first are pre-trained on.
    hidden, visible, visible_shape, recipe, n_epochs, batch_size, learning_rate, schedule, dropout, input_dropout
        See :class:`~mvrbm.MVRBMClassifier`.
    weight_decay, averaging, perturbation, certainty, unlabeled_batch_size
        See :class:`~mvrbm.MVRBMClassifier`.
    early_stopping, validation_fraction, patience, pretraining, random_state, device, verbose
        See :class:`~mvrbm.MVRBMClassifier`.

    Examples
    --------
    >>> import numpy as np
    >>> from mvrbm import DeepMVRBMClassifier
    >>> X, y = np.random.default_rng(0).random((40, 8, 8)), np.arange(40) % 2
    >>> DeepMVRBMClassifier(((4, 4), (3, 3)), n_epochs=1, random_state=0).fit(X, y).predict_proba(X).shape
    (40, 2)
    """

    layers: Sequence[Any] = (None, None)
    _: KW_ONLY
    feed: str = "mean"
