"""Pretrain and fine-tune stacks that have a softmax layer on top, with optional early stopping.

The network is defined in :mod:`mvrbm.estimators.network`, the training loop in :mod:`mvrbm.training.backprop`, and the
public estimators in :mod:`mvrbm.estimators.classifiers`.
"""

import contextlib
import copy
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

import numpy as np
import torch
from sklearn.utils.validation import check_is_fitted
from torch import Tensor
from torch.nn.functional import cross_entropy

from mvrbm.devices import resolve_device, sensible_threads
from mvrbm.estimators.adversarial_loss import class_distance, virtual_adversarial_loss
from mvrbm.estimators.base import check_same
from mvrbm.estimators.batches import ROWS_AT_ONCE, Array, check_values, unit_for
from mvrbm.estimators.classifier_base import ArrayClassifier
from mvrbm.estimators.deep import DeepMVRBM, build_stack
from mvrbm.estimators.inputs import VISIBLE
from mvrbm.estimators.labels import Labeled
from mvrbm.estimators.network import StructuredNetwork
from mvrbm.estimators.parameters import seed_of
from mvrbm.estimators.persistence import stored_descent
from mvrbm.estimators.undo_on_error import undo_on_error
from mvrbm.machine import BoltzmannMachine
from mvrbm.progress import listening
from mvrbm.random import RandomSource
from mvrbm.saving import read_stack, write_machines
from mvrbm.training.backprop import DescentResult, Objective, assign, descend
from mvrbm.training.callbacks import Checkpoint
from mvrbm.training.part_folders import part_folder
from mvrbm.units import Unit
from mvrbm.validation import number, whole_number

# Maximum rank if `rank` is None.
_LARGEST_RANK = 16
# Ratio of the automatic perturbation to the median distance from a sample to the nearest sample in another class.
_RELATIVE_PERTURBATION = 0.17

# Maps names of the softmax layer's tensors in model files to names in the network.
_TOP = {"top.weight": "weight", "top.bias": "bias"}


@dataclass(frozen=True)
class FineTuningLoss:
    """Cross-entropy loss with dropout, plus the virtual adversarial loss if `distance` is positive.

    Calling the loss with sample indices returns the weighted sum of the losses for these samples.
    """

    network: StructuredNetwork
    data: Labeled
    dropped: Sequence[float]  # dropout rates for the data and for each layer
    distance: float  # length of the adversarial perturbation, or 0 for no perturbation
    unlabeled: Tensor | None  # unlabeled samples to perturb instead of the labeled samples
    unlabeled_batch_size: int
    certainty: float  # weight of the entropy of the predictions for perturbed unlabeled samples
    weight_of_batch: float  # expected total weight of a full batch of labeled samples
    dropout_rng: RandomSource
    perturbation_rng: RandomSource

    def __call__(self, rows: Tensor) -> Tensor:
        unit = self.network.stack[0].layers[VISIBLE]
        x = unit.from_data(self.data.samples[rows])
        weights = self.data.weights[rows]
        losses = cross_entropy(self.network(x, self._drop), self.data.codes[rows], reduction="none")
        value = (losses * weights).sum()
        if not self.distance:
            return value
        rng = self.perturbation_rng
        if self.unlabeled is None:
            return value + (weights * virtual_adversarial_loss(self.network, x, self.distance, rng)).sum()
        chosen = (rng.uniform((self.unlabeled_batch_size,), weights) * len(self.unlabeled)).long()
        x = unit.from_data(self.unlabeled[chosen])
        change = virtual_adversarial_loss(self.network, x, self.distance, rng, self.certainty)
        return value + self.weight_of_batch * change.mean()

    def _drop(self, z: Tensor, layer: int) -> Tensor:
        """Apply dropout to the activations in a layer, or to the data if the layer index is -1."""
        share = self.dropped[layer + 1]
        if not share:
            return z
        return z * ((self.dropout_rng.uniform(z.shape, z) >= share).to(z.dtype) / (1 - share))


@dataclass(eq=False, repr=False, kw_only=True)
class FineTunedClassifier(ArrayClassifier):
    """Base class for stacks with a softmax layer on top. Subclasses define the parameters `layers` and `feed`."""

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

    def fit(
        self,
        X: Any,
        y: Any,
        sample_weight: Any = None,
        *,
        unlabeled: Any = None,
        stack: DeepMVRBM | None = None,
        checkpoints: Any = None,
        ignore_mismatch: bool = False,
    ) -> Self:
        r"""Train the classifier on labeled data.

        Parameters
        ----------
        X : array of shape (n, \*visible_shape) or (n, n_features)
            Training data. For Bernoulli units, uint8 data is divided by 255 unless it contains only 0 and 1.
        y : array of shape (n,) or (n, n_classes)
            Class labels, as numbers, strings or one-hot rows.
        sample_weight : array of shape (n,), optional
            Weight of each sample in fine-tuning. Pretraining ignores the weights.
        unlabeled : array of shape (m, \*visible_shape) or (m, n_features), optional
            Unlabeled samples. Pretraining uses these samples instead of `X`. If `perturbation` is positive, virtual
            adversarial training perturbs these samples instead of `X`.
        stack : DeepMVRBM, optional
            Fitted stack with the same layers as the classifier. If given, pretraining is skipped. `fit` does not modify
            the stack.
        checkpoints : path, optional
            Checkpoint folder. The state is saved after each epoch. If the folder contains checkpoints, training resumes
            from them.
        ignore_mismatch : bool, default=False
            Whether to resume from checkpoints even if they were saved with different data or settings. If False, such
            checkpoints raise an error.

        Returns
        -------
        self : object
            Fitted estimator.

        Notes
        -----
        Ctrl-C and SIGTERM stop training after the current update and raise KeyboardInterrupt and SystemExit,
        respectively. If this happens during fine-tuning, the partially trained classifier remains usable. If it happens
        during pretraining, or if an error occurs, the classifier is restored to its state before `fit`.
        """
        with undo_on_error(self):
            found = self._fit(X, y, sample_weight, unlabeled, stack, checkpoints, ignore_mismatch)
        found.raise_if_interrupted()
        return self

    def _fit(
        self,
        X: Any,
        y: Any,
        sample_weight: Any,
        unlabeled: Any,
        stack: DeepMVRBM | None,
        checkpoints: Any,
        ignore_mismatch: bool,
    ) -> DescentResult:
        data = self._read_labeled(X, y, sample_weight, resolve_device(self.device))
        plan = self._plan(len(data.codes), self.learning_rate, self.patience if self.early_stopping else None)
        whole_number(self.pretraining, "pretraining", 0)
        machines = self._new_machines(data)
        dropped = self._dropped_shares(len(machines))
        rng = RandomSource(seed_of(self.random_state))
        start_rng, split_rng, order_rng, dropout_rng, perturbation_rng = rng.split(5)
        train, held_out = self._split(data, split_rng)
        self.network_ = self._initial_network(
            machines, train, unlabeled, stack, start_rng, checkpoints, ignore_mismatch
        )
        loss = self._new_loss(train, unlabeled, plan.batch_size, dropped, dropout_rng, perturbation_rng)
        folder = None if checkpoints is None else part_folder(checkpoints, "tuning")
        bar = _progress_bar(plan.n_epochs) if self.verbose else contextlib.nullcontext()
        with sensible_threads(self.network_.stack[0], plan.batch_size), bar:
            found = descend(
                self.network_,
                Objective(loss, train.weights, (dropout_rng, perturbation_rng), capturable=True),
                plan,
                order_rng,
                None if held_out is None else lambda: self._error_and_loss(held_out),
                decaying=self._decaying_parameters(),
                checkpoint=stored_descent(folder, self, plan, data, ignore_mismatch),
            )
        self.history_ = found.history
        return found

    # -- the network before fine-tuning -----------------------------------------------------------

    def _new_machines(self, data: Labeled) -> list[BoltzmannMachine]:
        """Create the machines of the stack, with uninitialized parameters."""
        unit = unit_for(self.visible, data.samples).to(data.weights.dtype)
        stack = self._new_stack()
        return build_stack(unit, stack.layers, rank=stack.rank, hidden=self.hidden)

    def _new_stack(self) -> DeepMVRBM:
        """Create an unfitted stack for pretraining."""
        shared = ("layers", "feed", "hidden", "visible", "visible_shape", "recipe", "random_state", "device", "verbose")
        settings = {name: getattr(self, name) for name in shared}
        return DeepMVRBM(n_epochs=self.pretraining, rank=self._rank(), **settings)

    def _rank(self) -> int:
        """Return the rank of the Kronecker couplings.

        The default rank is limited so that a coupling has no more parameters than a full weight matrix.
        """
        if self.rank is not None:
            return self.rank
        sizes = [size**2 for size in self.visible_shape_]
        return max(1, min(_LARGEST_RANK, math.prod(sizes) // sum(sizes)))

    def _initial_network(
        self,
        machines: list[BoltzmannMachine],
        data: Labeled,
        unlabeled: Any,
        fitted: DeepMVRBM | None,
        rng: RandomSource,
        checkpoints: Any,
        ignore_mismatch: bool,
    ) -> StructuredNetwork:
        """Return the network to fine-tune, initialized randomly, from a newly pretrained stack, or from a given one."""
        if unlabeled is not None and not self.perturbation and (not self.pretraining or fitted is not None):
            raise ValueError(
                "unlabeled has no effect without pretraining (pretraining >= 1 and no stack) or a positive perturbation"
            )
        n_classes = len(self.classes_)
        self.stack_ = None
        if fitted is None and not self.pretraining:
            network = StructuredNetwork([machine.to(data.weights) for machine in machines], n_classes)
            network.initialize(network.stack[0].layers[VISIBLE].from_data(data.samples), data.weights, rng)
            return network
        if fitted is None:
            samples = data.samples.cpu().numpy() if unlabeled is None else unlabeled
            fitted = self._pretrained_stack(samples, checkpoints, ignore_mismatch)
            check_same(machines, fitted.machines_, "samples in unlabeled must have the same shape as samples in X")
        else:
            check_is_fitted(fitted)
            check_same(
                machines, fitted.machines_, "stack must have the same layers, units and couplings as the classifier"
            )
        self.stack_ = fitted
        copies = [copy.deepcopy(machine).to(data.weights) for machine in fitted.machines_]
        copies[0].layers[VISIBLE].byte_scale = machines[0].layers[VISIBLE].byte_scale
        network = StructuredNetwork(copies, n_classes)
        network.center()
        return network

    def _pretrained_stack(self, samples: Any, checkpoints: Any, ignore_mismatch: bool) -> DeepMVRBM:
        if checkpoints is None:
            return self._new_stack().fit(samples)
        folder = part_folder(checkpoints, "pretraining")
        callbacks = [Checkpoint(folder)]
        return self._new_stack().fit(samples, callbacks=callbacks, resume=folder, ignore_mismatch=ignore_mismatch)

    # -- the loss ---------------------------------------------------------------------------------

    def _new_loss(
        self,
        data: Labeled,
        unlabeled: Any,
        batch_size: int,
        dropped: Sequence[float],
        dropout_rng: RandomSource,
        perturbation_rng: RandomSource,
    ) -> FineTuningLoss:
        distance = self._distance(data)
        return FineTuningLoss(
            network=self.network_,
            data=data,
            dropped=dropped,
            distance=distance,
            unlabeled=self._unlabeled_samples(unlabeled, data.samples.device) if distance else None,
            unlabeled_batch_size=self.unlabeled_batch_size,
            certainty=self.certainty,
            weight_of_batch=float(data.weights.mean()) * min(batch_size, len(data.codes)),
            dropout_rng=dropout_rng,
            perturbation_rng=perturbation_rng,
        )

    def _dropped_shares(self, count: int) -> list[float]:
        """Validate the regularization settings and return the dropout rates for the data and for each layer."""
        layers = list(self.dropout) if isinstance(self.dropout, Sequence) else [self.dropout] * count
        if len(layers) != count:
            raise ValueError(
                f"dropout must be a single number or a sequence with one number per layer (length {count}), got "
                f"{self.dropout!r}"
            )
        if self.perturbation != "auto":
            number(self.perturbation, "perturbation")
        number(self.certainty, "certainty")
        whole_number(self.unlabeled_batch_size, "unlabeled_batch_size")
        of_data = number(self.input_dropout, "input_dropout", high=1)
        return [of_data, *(number(share, "dropout", high=1) for share in layers)]

    @torch.no_grad()
    def _distance(self, data: Labeled) -> float:
        """Return the length of the adversarial perturbation, computed from the data if ``perturbation="auto"``."""
        if self.perturbation != "auto":
            return float(self.perturbation)
        inputs = self.network_.inputs(self._unit.from_data(data.samples))
        return _RELATIVE_PERTURBATION * class_distance(inputs, data.codes)

    def _unlabeled_samples(self, unlabeled: Any, device: torch.device) -> Tensor | None:
        """Validate the unlabeled samples and return them as a tensor, or return None if there are none."""
        if unlabeled is None:
            return None
        samples = self._read_more(unlabeled)
        check_values({VISIBLE: samples}, {VISIBLE: self._unit})
        return torch.from_numpy(np.array(samples)).to(device)

    def _decaying_parameters(self) -> list[torch.nn.Parameter]:
        """Return the parameters to which weight decay applies: the weights, but not the biases."""
        couplings = [p for link in self.network_.links for p in link.parameters() if p.requires_grad]
        return [*couplings, self.network_.weight]

    # -- early stopping ---------------------------------------------------------------------------

    def _split(self, data: Labeled, rng: RandomSource) -> tuple[Labeled, Labeled | None]:
        """Split the data into training samples and held-out samples, stratified by class.

        If early stopping is disabled, the second result is None.
        """
        if not self.early_stopping:
            return data, None
        number(self.validation_fraction, "validation_fraction", 0, 1, exclude_low=True)
        n = len(data.codes)
        shuffled = rng.permutation(n).to(data.codes.device)
        by_class = shuffled[data.codes[shuffled].argsort(stable=True)]
        # The samples are sorted by class, so evenly spaced positions select the same fraction of each class.
        count = max(1, round(self.validation_fraction * n))
        places = ((torch.arange(count, device=by_class.device) + 0.5) * n / count).long()
        held = torch.zeros(n, dtype=torch.bool, device=by_class.device)
        held[by_class[places]] = True
        train, held_out = (Labeled(*(array[chosen] for array in data)) for chosen in (~held, held))
        if not (float(train.weights.sum()) > 0 and float(held_out.weights.sum()) > 0):
            raise ValueError(
                "early_stopping requires samples with positive weights for both training and validation, got "
                f"n_samples={n}"
            )
        return train, held_out

    @torch.no_grad()
    def _error_and_loss(self, data: Labeled) -> tuple[float, float]:
        """Return the error rate and the cross-entropy on the given data, both weighted by the sample weights."""
        parts = [self._log_probabilities(self._unit.from_data(part)) for part in data.samples.split(ROWS_AT_ONCE)]
        logits = torch.cat(parts)
        share = data.weights / data.weights.sum()
        error_rate = float((share * (logits.argmax(1) != data.codes)).sum())
        return error_rate, float((share * cross_entropy(logits, data.codes, reduction="none")).sum())

    # -- predictions ------------------------------------------------------------------------------

    @property
    def _unit(self) -> Unit:
        return self.network_.stack[0].layers[VISIBLE]

    def _log_probabilities(self, x: Tensor) -> Tensor:
        logits: Tensor = self.network_(x)
        return logits

    def hidden_maps(self, X: Any) -> Array:
        r"""Return the activations of the top hidden layer as an array of shape (n, \*hidden_shape)."""
        with torch.no_grad():
            return np.concatenate([self.network_.features(batch).cpu().numpy() for batch in self._batches(X)])

    # -- files ------------------------------------------------------------------------------------

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
        self.network_ = network.to(resolve_device(self.device))
        self.stack_ = None
        self._restore_input(self._unit, described)


@contextlib.contextmanager
def _progress_bar(n_epochs: int) -> Iterator[None]:
    """Show a progress bar that advances after each epoch of backpropagation."""
    from tqdm import tqdm

    with tqdm(total=n_epochs, unit="epoch") as bar:

        def advance(unit: str, count: int) -> None:
            bar.update(count if unit == "epochs" else 0)

        with listening(advance):
            yield
