"""Classifiers: stacks with a softmax on top, fine-tuned by backpropagation, and the classification RBM.

All of them see data through the estimators of :mod:`mvrbm.estimators.rbm` and :mod:`mvrbm.estimators.deep`, and learn by
:func:`mvrbm.learning.backprop.descend`.
"""

from __future__ import annotations

import copy
import dataclasses
import math
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar, NamedTuple, Self

import numpy as np
import torch
from numpy.typing import NDArray
from sklearn.base import BaseEstimator, ClassifierMixin
from sklearn.utils import check_random_state
from sklearn.utils.multiclass import check_classification_targets
from sklearn.utils.validation import _check_sample_weight, check_is_fitted, validate_data
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, kl_div, log_softmax, normalize, one_hot

from mvrbm.couplings import Coupling, Dense, Kronecker
from mvrbm.devices import sensible_threads
from mvrbm.estimators.deep import (
    DeepMVRBM,
    Layer,
    as_layers,
    copy_coupling,
    describe_layers,
    read_description,
    read_stack,
    rebuild_layers,
    write_stack,
)
from mvrbm.estimators.rbm import _SINGLE, _device, _out
from mvrbm.learning.backprop import Plan, assign, descend
from mvrbm.learning.recipe import Recipe, as_recipe
from mvrbm.learning.trainer import Trainer
from mvrbm.machine import BoltzmannMachine
from mvrbm.random import RandomSource
from mvrbm.sampling import sample
from mvrbm.saving import StorageError, read_machine, replace_folder, write_machine
from mvrbm.units import UNITS, Bernoulli, Categorical
from mvrbm.validation import as_shape

__all__ = ["ClassificationMVRBM", "DeepMVRBMClassifier", "MVRBMClassifier"]

Array = NDArray[Any]
_LABEL = "label"
_ROWS_AT_ONCE = 1024
_LABEL_ROWS_AT_ONCE = 256  # times the number of labels
_ROWS_OF_A_START = 4096  # that tell how large the fields of a random start are
_ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {"bernoulli": torch.sigmoid, "rectified": torch.relu}
# Spread of the fields of a layer that starts at random: what keeps the size of rectified layers from one to the next.
_FIELD_SPREAD = {"bernoulli": 1.0, "rectified": math.sqrt(2)}


# -- labelled arrays ----------------------------------------------------------------------------------


class _Labelled(NamedTuple):
    """Samples as the layers want them, (n, *shape), which class each is of, and what each counts."""

    samples: Tensor  # bytes or floats
    codes: Tensor  # (n,)
    weights: Tensor  # (n,)


class _ArrayClassifier(ClassifierMixin, BaseEstimator):
    """What all classifiers here share: arrays or rows in, labels out, and files."""

    classes_: Array
    history_: list[dict[str, float]]
    n_features_in_: int
    visible: str
    visible_shape: Any
    random_state: Any
    device: str
    _front: DeepMVRBM  # checks and arranges data
    _saved: ClassVar[tuple[str, ...]]

    # -- what subclasses decide -------------------------------------------------------------------

    def _log_probabilities(self, x: Tensor) -> Tensor:
        """Log-probabilities of the classes, up to a constant a sample: (n, *shape) -> (n, n_classes)."""
        raise NotImplementedError

    @property
    def _like(self) -> Tensor:
        raise NotImplementedError

    # -- data -------------------------------------------------------------------------------------

    def _rows(self, X: Any, y: Any = "no_validation", *, reset: bool) -> Any:
        """Check data as rows of features, and return what `validate_data` does."""
        given = X if hasattr(X, "ndim") else np.asarray(X)
        if given.ndim > 2 and len(given):
            shape = tuple(given.shape[1:])
            if not reset and shape != self._front.visible_shape_:
                raise ValueError(f"samples must have shape {self._front.visible_shape_}, got {shape}")
            X = np.asarray(given).reshape(len(given), -1)
        dtype = None if getattr(given, "dtype", None) == np.uint8 else [np.float64, np.float32]
        if isinstance(y, str):
            return validate_data(self, X, reset=reset, dtype=dtype)
        return validate_data(self, X, y, reset=reset, dtype=dtype)

    def _labelled(self, X: Any, y: Any, sample_weight: Any) -> _Labelled:
        """Check training data, and set what is known from them alone."""
        rows, labels = self._rows(X, y, reset=True)
        check_classification_targets(labels)
        classes, codes = np.unique(labels, return_inverse=True)
        if len(classes) < 2:
            raise ValueError(f"y must have at least two classes, got one class: {classes.tolist()}")
        weights = _check_sample_weight(sample_weight, rows, dtype=np.float64, ensure_non_negative=True)
        if not weights.sum() > 0:
            raise ValueError("sample_weight must be positive for some sample, got zeros only")
        shape = tuple(getattr(X, "shape", ()))
        self._front = DeepMVRBM((None,), visible=self.visible, visible_shape=self.visible_shape)
        arranged = rows.reshape(len(rows), *shape[1:]) if len(shape) > 2 else rows
        samples = self._front._layers(arranged, reset=True)[_SINGLE]
        self.classes_ = classes
        device = _device(self.device)
        dtype = torch.float64 if samples.dtype == np.float64 else torch.float32
        return _Labelled(
            torch.from_numpy(np.array(samples)).to(device),
            torch.from_numpy(codes.astype(np.int64)).to(device),
            torch.from_numpy(weights).to(dtype=dtype, device=device),
        )

    @property
    def _byte_scale(self) -> float:
        return UNITS[self.visible].byte_scale

    def _float(self, samples: Tensor) -> Tensor:
        """Samples in the model's dtype, bytes scaled."""
        scaled = samples.to(self._like.dtype)
        return scaled * self._byte_scale if samples.dtype == torch.uint8 else scaled

    # -- predictions ------------------------------------------------------------------------------

    def predict_proba(self, X: Any) -> Array:
        """Probability of each class, (n, n_classes), in the order of `classes_`."""
        return np.concatenate([_out(torch.softmax(part, 1)) for part in self._predictions(X)])

    def predict(self, X: Any) -> Array:
        """Most probable label of each sample, (n,)."""
        codes = np.concatenate([_out(part.argmax(1)) for part in self._predictions(X)])
        labels: Array = self.classes_[codes]
        return labels

    def _predictions(self, X: Any) -> Iterator[Tensor]:
        check_is_fitted(self)
        rows = self._rows(X, reset=False)
        samples = self._front._layers(rows, reset=False)[_SINGLE]
        with torch.no_grad():
            for first in range(0, len(samples), _ROWS_AT_ONCE):
                part = torch.from_numpy(np.array(samples[first : first + _ROWS_AT_ONCE])).to(self._like.device)
                yield self._log_probabilities(self._float(part))

    # -- files ------------------------------------------------------------------------------------

    def _description(self) -> dict[str, Any]:
        names = getattr(self, "feature_names_in_", None)
        shape = self.visible_shape
        params = {name: getattr(self, name) for name in self._saved}
        return {
            "class": type(self).__name__,
            "params": {**params, "visible_shape": None if shape is None else list(as_shape(shape, "visible_shape"))},
            "classes": _plain_classes(self.classes_),
            "as_arrays": self._front._as_arrays,
            "feature_names": None if names is None else list(map(str, names)),
        }

    def _restore_front(self, machine: BoltzmannMachine, described: Mapping[str, Any]) -> None:
        unit, names = machine.layers[_SINGLE], described["feature_names"]
        if unit.name != self.visible:
            raise ValueError(f"visible is {self.visible!r:.100}, but its units are {unit.name}")
        self.classes_, self.history_ = _classes_of(described["classes"]), []
        self.n_features_in_ = math.prod(unit.shape)
        self._front = DeepMVRBM((None,), visible=self.visible, visible_shape=self.visible_shape)
        self._front.visible_shape_, self._front._as_arrays = unit.shape, bool(described["as_arrays"])
        self._front.n_features_in_ = self.n_features_in_
        if names is not None:
            if len(names) != self.n_features_in_ or not all(isinstance(name, str) for name in names):
                raise StorageError(f"feature_names must be {self.n_features_in_} texts, got {names!r:.100}")
            self.feature_names_in_ = np.asarray(names, dtype=object)


def _plain_classes(classes: Array) -> dict[str, Any]:
    """Return labels as plain values. Numbers, texts and truth values can be stored."""
    plain = classes.tolist()
    kinds = {type(value) for value in plain}
    if not kinds <= {bool, int, float, str}:
        raise StorageError(
            f"labels must be numbers or texts to be saved, got {sorted(kind.__name__ for kind in kinds)}"
        )
    return {"dtype": classes.dtype.str, "values": plain}


def _classes_of(described: Mapping[str, Any]) -> Array:
    dtype = np.dtype(str(described["dtype"]))
    if dtype.kind not in "biufUO":
        raise StorageError(f"labels cannot be of dtype {dtype}")
    values = list(described["values"])
    if len(values) < 2:
        raise StorageError(f"there must be at least two classes, got {values!r:.100}")
    return np.asarray(values, dtype=dtype)


# -- networks -----------------------------------------------------------------------------------------


class StructuredNetwork(nn.Module):
    r"""Fully connected network whose weights are couplings: the way up through a stack, and a softmax.

    :math:`z_0 = T(x - o)`, :math:`z_l = a(W_l z_{l-1} + c_l)`, logits :math:`A z_L + d`. Gaussian data is centred at
    :math:`o`, its mean; :math:`o` is zero otherwise. :math:`a` is the sigmoid for Bernoulli layers and
    :math:`\max(0, \cdot)` for rectified ones.

    Parameters
    ----------
    machines : sequence of BoltzmannMachine
        The stack. Couplings and hidden biases learn; the rest of the machines stays as it is.
    n_classes : int
        Number of logits.
    """

    def __init__(self, machines: Sequence[BoltzmannMachine], n_classes: int) -> None:
        super().__init__()
        self.machines = nn.ModuleList(machines)
        like = machines[-1].like
        size = math.prod(machines[-1].hidden.shape)
        self.weight = nn.Parameter(like.new_zeros(n_classes, size))
        self.bias = nn.Parameter(like.new_zeros(n_classes))
        for machine in machines:
            for unit in machine.layers.values():
                unit.requires_grad_(False)

    @property
    def stack(self) -> list[BoltzmannMachine]:
        """The machines."""
        return list(self.machines)  # type: ignore[arg-type]

    @property
    def links(self) -> list[Coupling]:
        """Their couplings."""
        return [machine.links[_SINGLE] for machine in self.stack]

    @property
    def n_parameters(self) -> int:
        """Number of parameters that learn."""
        return sum(p.numel() for p in self.parameters() if p.requires_grad)

    def inputs(self, x: Tensor, number: int = 0) -> Tensor:
        """What the coupling of machine `number` is given: the statistic, around the mean for Gaussian data."""
        unit = self.stack[number].layers[_SINGLE]
        return unit.statistic(x - unit.bias if unit.arbitrary_zero else x)

    def features(self, x: Tensor, drop: Callable[[Tensor, int], Tensor] | None = None) -> Tensor:
        """Activations of the top layer, (n, *hidden shape); `drop` is applied to data (-1) and layers (0, 1, ...)."""
        z = x
        for number, machine in enumerate(self.stack):
            z = self.inputs(z, number)
            if number == 0 and drop is not None:
                z = drop(z, -1)
            z = _ACTIVATIONS[machine.hidden.name](_field(machine.links[_SINGLE], z) + machine.hidden.bias)
            z = z if drop is None else drop(z, number)
        return z

    def forward(self, x: Tensor, drop: Callable[[Tensor, int], Tensor] | None = None) -> Tensor:
        """Logits, (n, n_classes)."""
        return self.features(x, drop).flatten(1) @ self.weight.T + self.bias

    @torch.no_grad()
    def centre(self) -> None:
        """Let the hidden biases make up for the centring of Gaussian layers, after machines were trained without."""
        for number, machine in enumerate(self.stack):
            zero = machine.like.new_zeros((1, *machine.layers[_SINGLE].shape))
            machine.hidden.absorb(-machine.links[_SINGLE].to_hidden(self.inputs(zero, number))[0])

    @torch.no_grad()
    def initialise(self, x: Tensor, weights: Tensor, rng: RandomSource) -> None:
        """Start at random: fields of every layer have a spread that neither saturates nor dies out.

        Parameters
        ----------
        x : Tensor (n, *visible shape)
            Some data.
        weights : Tensor (n,)
            What each sample counts.
        rng : RandomSource
            Source of the draws.
        """
        share = weights / weights.sum()
        for number, machine in enumerate(self.stack):
            link = machine.links[_SINGLE]
            if number == 0:  # the others see layers as they are: their units start at location 0 and scale 1
                mean = torch.tensordot(share, x, 1)
                variance = torch.tensordot(share, (x - mean) ** 2, 1)
                count = max(1, round(float(weights.sum())))
                machine.layers[_SINGLE].initialise_from(mean, variance, count)
                every = -(-len(x) // _ROWS_OF_A_START)
                x, share = x[::every], share[::every] / share[::every].sum().clamp_min(1e-12)
            z = self.inputs(x, number)
            power = float((share * z.flatten(1).square().sum(1)).sum())
            link.initialise(rng, _FIELD_SPREAD[machine.hidden.name] / math.sqrt(max(power, 1e-6)))
            machine.hidden.bias.zero_()
            x = _ACTIVATIONS[machine.hidden.name](_field(link, z) + machine.hidden.bias)


def _field(link: Coupling, x: Tensor) -> Tensor:
    """The coupling's `to_hidden`, for matrices laid out so that every product is one plain matrix product.

    Arrays lie as (I, n, J) on the way: the batch is part of one side of each product. A third faster than
    `to_hidden` where autograd goes through it, and equal to it by test.
    """
    if link.name != Kronecker.name or x.ndim != 3:
        return link.to_hidden(x)
    U, V = link.get_parameter("factors.0"), link.get_parameter("factors.1")  # (R, K, I), (R, L, J)
    n, rows, columns = x.shape
    halfway = torch.matmul(x.transpose(0, 1).reshape(rows * n, columns), V.mT)  # X V_r': (R, I n, L)
    flat = U.transpose(0, 1).reshape(U.shape[1], -1) @ halfway.reshape(len(U) * rows, n * V.shape[1])
    return flat.reshape(U.shape[1], n, V.shape[1]).transpose(0, 1)


def _sway(network: StructuredNetwork, x: Tensor, distance: float, rng: RandomSource, certainty: float = 0.0) -> Tensor:
    r"""How far predictions move when each sample is moved some distance where they move most, (n,).

    :math:`\mathrm{KL}(p(\cdot \mid x) \,\|\, p(\cdot \mid x + r))`, with the first taken as fixed and :math:`r` along
    the gradient of the divergence at a random point of the sphere: one step of power iteration. After Miyato,
    Maeda, Koyama and Ishii, "Virtual adversarial training", IEEE TPAMI 41 (2019). To it is added `certainty` times the
    entropy of the predictions there.
    """
    with torch.no_grad():
        here = log_softmax(network(x), 1)

    def moved(direction: Tensor) -> tuple[Tensor, Tensor]:
        there = log_softmax(network(x + distance * normalize(direction.flatten(1)).reshape(x.shape)), 1)
        return kl_div(there, here, reduction="none", log_target=True).sum(1), there

    probe = rng.normal(x.shape, x).requires_grad_()
    (slope,) = torch.autograd.grad(moved(probe)[0].sum(), probe)
    divergence, there = moved(slope)
    return divergence - certainty * (there.exp() * there).sum(1) if certainty else divergence


def _outline(machine: BoltzmannMachine) -> str:
    """Return units, shapes and coupling of a machine of a stack, in a word."""
    unit, link = machine.layers[_SINGLE], machine.links[_SINGLE]
    return f"{unit.name} {unit.shape} -> {machine.hidden.name} {machine.hidden.shape} by {link.name} {link.config()}"


class _FineTuned(_ArrayClassifier):
    """A stack with a softmax on top. Subclasses say what layers it has."""

    network_: StructuredNetwork
    stack_: DeepMVRBM | None
    hidden: str
    pretraining: int
    recipe: str | Recipe
    n_epochs: int
    batch_size: int
    learning_rate: float
    schedule: str
    dropout: Any
    input_dropout: float
    weight_decay: float
    averaging: float
    perturbation: float
    certainty: float
    unlabelled_batch_size: int
    early_stopping: bool
    validation_fraction: float
    patience: int
    verbose: int

    def _stack(self) -> DeepMVRBM:
        """Return the stack to be trained."""
        raise NotImplementedError

    def _new_stack(self, layers: Any, rank: int, *, feed: str = "mean") -> DeepMVRBM:
        return DeepMVRBM(
            layers,
            rank=rank,
            hidden=self.hidden,
            feed=feed,
            visible=self.visible,
            visible_shape=self.visible_shape,
            n_epochs=self.pretraining,
            recipe=self.recipe,
            random_state=self.random_state,
            device=self.device,
            verbose=self.verbose,
        )

    @property
    def _like(self) -> Tensor:
        return self.network_.weight

    @property
    def n_parameters_(self) -> int:
        """Number of parameters that were fine-tuned."""
        return self.network_.n_parameters

    def fit(
        self,
        X: Any,
        y: Any,
        sample_weight: Any = None,
        *,
        unlabelled: Any = None,
        stack: DeepMVRBM | None = None,
    ) -> Self:
        r"""Learn from labelled data.

        Parameters
        ----------
        X : array of shape (n, \*visible_shape) or (n, n_features)
            The data. Bytes are scaled to [0, 1] batch by batch for Bernoulli units.
        y : array (n,)
            Labels of any kind that can be sorted.
        sample_weight : array (n,), optional
            What each sample counts in fine-tuning. Pre-training sees no weights.
        unlabelled : array like X, optional
            What is pre-trained on, instead of `X`; and with `perturbation`, where predictions are to change slowly.
        stack : DeepMVRBM, optional
            A fitted stack of the same layers to start from, instead of pre-training. It stays as it is.
        """
        data = self._labelled(X, y, sample_weight)
        plan = self._plan()
        plan.check()
        self._check_noise()
        seed = int(check_random_state(self.random_state).randint(2**31 - 1))
        start, split, order, dropping, moving = RandomSource(seed, device=data.weights.device).split(5)
        learns, held_out = self._split(data, split)
        self.network_ = self._network(learns, unlabelled, stack, start)
        network = self.network_
        shares = self._shares()
        others = self._others(unlabelled, learns)
        weight_of_a_batch = float(learns.weights.mean()) * min(self.batch_size, len(learns.codes))

        def drop(z: Tensor, layer: int) -> Tensor:
            share = shares[layer + 1]
            if not share:
                return z
            return z * ((dropping.uniform(z.shape, z) >= share).to(z.dtype) / (1 - share))

        def loss(rows: Tensor) -> Tensor:
            x, weights = self._float(learns.samples[rows]), learns.weights[rows]
            value = (cross_entropy(network(x, drop), learns.codes[rows], reduction="none") * weights).sum()
            if not self.perturbation:
                return value
            if others is None:
                return value + (weights * _sway(network, x, self.perturbation, moving)).sum()
            drawn = (moving.uniform((self.unlabelled_batch_size,), weights) * len(others)).long()
            sway = _sway(network, self._float(others[drawn]), self.perturbation, moving, self.certainty)
            return value + weight_of_a_batch * sway.mean()

        score = None if held_out is None else lambda: self._error_and_loss(held_out)
        decaying = [p for link in network.links for p in link.parameters() if p.requires_grad] + [network.weight]
        with sensible_threads(network.stack[0], self.batch_size):
            self.history_ = descend(
                network, decaying, loss, learns.weights, plan, order, score, draws_from=(dropping, moving)
            )
        return self

    def _others(self, unlabelled: Any, data: _Labelled) -> Tensor | None:
        """Return the unlabelled samples that predictions are to change slowly at, if they are not those of the data."""
        if unlabelled is None or not self.perturbation:
            return None
        samples = self._front._layers(np.asarray(unlabelled), reset=False)[_SINGLE]
        return torch.from_numpy(np.array(samples)).to(data.samples.device)

    def _plan(self) -> Plan:
        return Plan(
            self.n_epochs,
            self.batch_size,
            self.learning_rate,
            self.weight_decay,
            self.schedule,
            self.averaging,
            self.patience if self.early_stopping else None,
        )

    def _shares(self) -> list[float]:
        """Share that is left out of the data, and of each layer."""
        count = len(self.network_.stack)
        layers = list(self.dropout) if isinstance(self.dropout, Sequence) else [self.dropout] * count
        if len(layers) != count:
            raise ValueError(f"dropout must be one number, or one for each of {count} layers, got {self.dropout!r}")
        return [self.input_dropout, *layers]

    def _check_noise(self) -> None:
        layers = self.dropout if isinstance(self.dropout, Sequence) else [self.dropout]
        for name, share in [("input_dropout", self.input_dropout), *(("dropout", layer) for layer in layers)]:
            if not 0 <= share < 1:
                raise ValueError(f"{name} must be at least 0 and below 1, got {share!r}")
        for name in ("perturbation", "certainty"):
            if not 0 <= getattr(self, name) < math.inf:
                raise ValueError(f"{name} must be at least 0, got {getattr(self, name)!r}")
        if self.unlabelled_batch_size != int(self.unlabelled_batch_size) or self.unlabelled_batch_size < 1:
            raise ValueError(
                f"unlabelled_batch_size must be a whole number of at least 1, got {self.unlabelled_batch_size!r}"
            )

    def _split(self, data: _Labelled, rng: RandomSource) -> tuple[_Labelled, _Labelled | None]:
        """Hold some samples out, as many of each class in proportion, if they are to decide when to stop."""
        if not self.early_stopping:
            return data, None
        if not 0 < self.validation_fraction < 1:
            raise ValueError(f"validation_fraction must lie between 0 and 1, got {self.validation_fraction!r}")
        n = len(data.codes)
        shuffled = rng.permutation(n).to(data.codes.device)
        by_class = shuffled[data.codes[shuffled].argsort(stable=True)]
        # Evenly spaced through the classes one after the other: a share of each.
        count = max(1, round(self.validation_fraction * n))
        places = ((torch.arange(count, device=by_class.device) + 0.5) * n / count).long()
        held = torch.zeros(n, dtype=torch.bool, device=by_class.device)
        held[by_class[places]] = True
        parts = [_Labelled(*(array[chosen] for array in data)) for chosen in (~held, held)]
        if not all(float(part.weights.sum()) > 0 for part in parts):
            raise ValueError(f"early_stopping needs samples on both sides of the split, got {n} in all")
        return parts[0], parts[1]

    def _network(
        self, data: _Labelled, unlabelled: Any, fitted: DeepMVRBM | None, rng: RandomSource
    ) -> StructuredNetwork:
        """Return the network that fine-tuning starts from."""
        if self.pretraining != int(self.pretraining) or self.pretraining < 0:
            raise ValueError(f"pretraining must be a number of passes, 0 for none, got {self.pretraining!r}")
        if unlabelled is not None and not self.perturbation and (not self.pretraining or fitted is not None):
            raise ValueError(
                "unlabelled is for pre-training or perturbation, so pretraining must be at least 1 and stack None, "
                "or perturbation positive"
            )
        self.stack_, samples, dtype = None, data.samples.cpu().numpy(), data.weights.dtype
        stack = self._stack()
        stack._start(stack._layers(samples, reset=True))
        if fitted is None and not self.pretraining:
            network = self._on_top(stack, dtype)
            network.initialise(self._float_as(data.samples, dtype), data.weights, rng)
            return network
        wanted = [_outline(machine) for machine in stack.machines_]
        if fitted is not None:
            check_is_fitted(fitted)
            stack = fitted
        else:
            stack.fit(samples if unlabelled is None else np.asarray(unlabelled))
        if [_outline(machine) for machine in stack.machines_] != wanted:
            what = "unlabelled must have samples of X's shape" if fitted is None else "stack must have the same layers"
            raise ValueError(f"{what}: {wanted} are wanted, got {[_outline(machine) for machine in stack.machines_]}")
        self.stack_ = stack
        network = self._on_top(stack, dtype)
        network.centre()
        return network

    def _on_top(self, stack: DeepMVRBM, dtype: torch.dtype) -> StructuredNetwork:
        machines = [copy.deepcopy(machine).to(dtype) for machine in stack.machines_]
        return StructuredNetwork(machines, len(self.classes_))

    def _float_as(self, samples: Tensor, dtype: torch.dtype) -> Tensor:
        return samples.to(dtype) * (self._byte_scale if samples.dtype == torch.uint8 else 1.0)

    @torch.no_grad()
    def _error_and_loss(self, data: _Labelled) -> tuple[float, float]:
        """Weighted error rate and cross-entropy."""
        rows = torch.arange(len(data.codes), device=data.codes.device).split(_ROWS_AT_ONCE)
        logits = torch.cat([self._log_probabilities(self._float(data.samples[part])) for part in rows])
        share = data.weights / data.weights.sum()
        wrong = float((share * (logits.argmax(1) != data.codes)).sum())
        return wrong, float((share * cross_entropy(logits, data.codes, reduction="none")).sum())

    def _log_probabilities(self, x: Tensor) -> Tensor:
        logits: Tensor = self.network_(x)
        return logits

    def hidden_maps(self, X: Any) -> Array:
        r"""Activations of the top hidden layer after fine-tuning, (n, \*shape of the layer)."""
        check_is_fitted(self)
        samples = self._front._layers(self._rows(X, reset=False), reset=False)[_SINGLE]
        with torch.no_grad():
            parts = torch.from_numpy(np.array(samples)).to(self._like.device).split(_ROWS_AT_ONCE)
            return np.concatenate([_out(self.network_.features(self._float(part))) for part in parts])

    # -- files ------------------------------------------------------------------------------------

    def save_pretrained(self, folder: str | os.PathLike[str]) -> Path:
        """Write the fitted classifier to a folder, which `from_pretrained` reads."""
        check_is_fitted(self)
        top = {"top.weight": self.network_.weight, "top.bias": self.network_.bias}
        with replace_folder(folder) as staging:
            write_stack(self.network_.stack, staging, {"estimator": self._description()}, top)
        return Path(folder)

    @classmethod
    def from_pretrained(cls, folder: str | os.PathLike[str], *, device: str = "auto") -> Self:
        """Read a classifier that `save_pretrained` wrote."""
        described = read_description(Path(folder), cls.__name__)
        try:
            n_classes = len(_classes_of(described["classes"]))
            machines, top = read_stack(
                Path(folder),
                lambda machine: {
                    "top.weight": (n_classes, math.prod(machine.hidden.shape)),
                    "top.bias": (n_classes,),
                },
            )
            estimator = cls(**cls._rebuild(dict(described["params"])), device=device)
            network = StructuredNetwork(machines, n_classes)
            assign([network.weight, network.bias], [top["top.weight"], top["top.bias"]])
            if any(machine.hidden.name not in _ACTIVATIONS for machine in machines):
                raise StorageError(f"hidden units must be one of {sorted(_ACTIVATIONS)}")
            estimator.network_, estimator.stack_ = network.to(_device(device)), None
            estimator._restore_front(machines[0], described)
        except StorageError:
            raise
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise StorageError(f"{folder}: the estimator's description is damaged: {error}") from error
        return estimator

    @classmethod
    def _rebuild(cls, params: dict[str, Any]) -> dict[str, Any]:
        return params


class MVRBMClassifier(_FineTuned):
    r"""An MVRBM with a softmax on top, fine-tuned by backpropagation.

    .. math:: p(\text{class} \mid X) = \mathrm{softmax}(A \,\mathrm{vec}\, a(\textstyle\sum_r U_r X V_r^\top + C) + d),

    with :math:`a` the sigmoid, or :math:`\max(0, \cdot)` for rectified units.

    Parameters
    ----------
    hidden_shape : tuple of int, optional
        Shape of the hidden layer; the sample's own if not given.
    rank : int
        Rank of the Kronecker coupling.
    coupling : Coupling, optional
        Another coupling instead, such as ``Dense()``.
    hidden : {"rectified", "bernoulli"}
        Hidden units.
    visible : {"bernoulli", "gaussian"}
        What entries of the data are: from 0 to 1, or real.
    visible_shape : tuple of int, optional
        What array a row of 2-D input is. Without it a row is a vector.
    pretraining : int
        Passes of contrastive divergence for each layer before fine-tuning; 0 for a random start.
    recipe : str or Recipe
        How pre-training is done.
    n_epochs : int
        Passes of fine-tuning.
    batch_size : int
        Samples an update.
    learning_rate : float
        Of Adam, at the start.
    schedule : {"cosine", "constant"}
        Whether the rate falls to zero along half a cosine.
    dropout : float or sequence of float
        Share of hidden units that is left out of an update, for all layers or for each.
    input_dropout : float
        The same for entries of the data.
    weight_decay : float
        Pull of the weights, and of them alone, towards zero (decoupled).
    averaging : float
        Share of the running mean of the parameters that an update keeps, such as 0.999; predictions are made with
        that mean. 0 for none.
    perturbation : float
        Distance within which predictions should stay what they are: the loss also counts by how much (KL divergence)
        they change when a sample is moved this far where they change most, which is virtual adversarial training.
        For digits of 28x28 pixels 1 to 2. 0 for none.
    certainty : float
        How much the entropy of the predictions counts at unlabelled samples that are moved: classes should meet where
        samples are rare.
    unlabelled_batch_size : int
        Unlabelled samples an update, where `fit` is given some and they are moved.
    early_stopping : bool
        Whether some training samples are held out, and the parameters of the pass that does best on them are kept.
    validation_fraction : float
        Share of the samples that is held out.
    patience : int
        Passes without improvement after which fine-tuning stops.
    random_state : int, RandomState or None
        Seed.
    device : str
        ``"auto"`` is a GPU if there is one.
    verbose : int
        Whether to show the progress of pre-training.

    Attributes
    ----------
    classes_ : array (n_classes,)
        The labels, sorted.
    network_ : StructuredNetwork
        What was learned.
    stack_ : DeepMVRBM or None
        The pre-trained stack, as it was before fine-tuning.
    history_ : list of dict
        Loss, and error on what was held out, after every pass.
    n_parameters_ : int
        Number of parameters that were fine-tuned.
    """

    _saved = (
        "hidden_shape", "rank", "hidden", "visible", "pretraining", "n_epochs", "batch_size", "learning_rate",
        "schedule", "dropout", "input_dropout", "weight_decay", "averaging", "perturbation", "certainty",
        "unlabelled_batch_size", "early_stopping", "validation_fraction", "patience",
    )  # fmt: skip

    def __init__(
        self,
        hidden_shape: Any = None,
        *,
        rank: int = 1,
        coupling: Coupling | None = None,
        hidden: str = "rectified",
        visible: str = "bernoulli",
        visible_shape: Sequence[int] | None = None,
        pretraining: int = 0,
        recipe: str | Recipe = "default",
        n_epochs: int = 30,
        batch_size: int = 100,
        learning_rate: float = 3e-3,
        schedule: str = "cosine",
        dropout: float | Sequence[float] = 0.3,
        input_dropout: float = 0.0,
        weight_decay: float = 0.0,
        averaging: float = 0.0,
        perturbation: float = 0.0,
        certainty: float = 0.0,
        unlabelled_batch_size: int = 256,
        early_stopping: bool = False,
        validation_fraction: float = 0.1,
        patience: int = 10,
        random_state: Any = None,
        device: str = "auto",
        verbose: int = 0,
    ) -> None:
        self.hidden_shape = hidden_shape
        self.rank = rank
        self.coupling = coupling
        self.hidden = hidden
        self.visible = visible
        self.visible_shape = visible_shape
        self.pretraining = pretraining
        self.recipe = recipe
        self.n_epochs = n_epochs
        self.batch_size = batch_size
        self.learning_rate = learning_rate
        self.schedule = schedule
        self.dropout = dropout
        self.input_dropout = input_dropout
        self.weight_decay = weight_decay
        self.averaging = averaging
        self.perturbation = perturbation
        self.certainty = certainty
        self.unlabelled_batch_size = unlabelled_batch_size
        self.early_stopping = early_stopping
        self.validation_fraction = validation_fraction
        self.patience = patience
        self.random_state = random_state
        self.device = device
        self.verbose = verbose

    def _layer(self) -> Layer:
        return Layer(self.hidden_shape, self.coupling)

    def _stack(self) -> DeepMVRBM:
        return self._new_stack((self._layer(),), self.rank)

    def _description(self) -> dict[str, Any]:
        described = super()._description()
        (layer,) = describe_layers((self._layer(),))
        described["params"] |= {"hidden_shape": layer["shape"], "coupling": layer["coupling"]}
        return described

    @classmethod
    def _rebuild(cls, params: dict[str, Any]) -> dict[str, Any]:
        entry = {"shape": params["hidden_shape"], "coupling": params["coupling"], "hidden": None}
        (layer,) = rebuild_layers([entry])
        return {**params, "hidden_shape": layer.shape, "coupling": layer.coupling}


class DeepMVRBMClassifier(_FineTuned):
    r"""A stack of machines with a softmax on top, fine-tuned by backpropagation.

    :math:`Z_l = a(W_l Z_{l-1} + C_l)`, :math:`p(\text{class} \mid X) = \mathrm{softmax}(A \,\mathrm{vec}\, Z_L + d)`.
    With ``Dense`` couplings and ``hidden="bernoulli"`` it is the classic fine-tuned deep belief network.
    See :class:`MVRBMClassifier` for the other parameters and the attributes.

    Parameters
    ----------
    layers : sequence
        The hidden layers, lowest first, each a shape, None, or a :class:`~mvrbm.estimators.deep.Layer`; see
        :class:`~mvrbm.DeepMVRBM`.
    rank : int
        Rank of the Kronecker couplings of layers that name no coupling.
    feed : {"mean", "sample"}
        What the machines above the first are pre-trained on.
    """

    _saved = (
        "rank", "hidden", "feed", "visible", "pretraining", "n_epochs", "batch_size", "learning_rate", "schedule",
        "dropout", "input_dropout", "weight_decay", "averaging", "perturbation", "certainty",
        "unlabelled_batch_size", "early_stopping", "validation_fraction", "patience",
    )  # fmt: skip

    def __init__(
        self,
        layers: Sequence[Any] = (None, None),
        *,
        rank: int = 1,
        hidden: str = "rectified",
        feed: str = "mean",
        visible: str = "bernoulli",
        visible_shape: Sequence[int] | None = None,
        pretraining: int = 0,
        recipe: str | Recipe = "default",
        n_epochs: int = 30,
        batch_size: int = 100,
        learning_rate: float = 3e-3,
        schedule: str = "cosine",
        dropout: float | Sequence[float] = 0.3,
        input_dropout: float = 0.0,
        weight_decay: float = 0.0,
        averaging: float = 0.0,
        perturbation: float = 0.0,
        certainty: float = 0.0,
        unlabelled_batch_size: int = 256,
        early_stopping: bool = False,
        validation_fraction: float = 0.1,
        patience: int = 10,
        random_state: Any = None,
        device: str = "auto",
        verbose: int = 0,
    ) -> None:
        self.layers = layers
        self.rank = rank
        self.hidden = hidden
        self.feed = feed
        self.visible = visible
        self.visible_shape = visible_shape
        self.pretraining = pretraining
        self.recipe = recipe
        self.n_epochs = n_epochs
        self.batch_size = batch_size
        self.learning_rate = learning_rate
        self.schedule = schedule
        self.dropout = dropout
        self.input_dropout = input_dropout
        self.weight_decay = weight_decay
        self.averaging = averaging
        self.perturbation = perturbation
        self.certainty = certainty
        self.unlabelled_batch_size = unlabelled_batch_size
        self.early_stopping = early_stopping
        self.validation_fraction = validation_fraction
        self.patience = patience
        self.random_state = random_state
        self.device = device
        self.verbose = verbose

    def _stack(self) -> DeepMVRBM:
        return self._new_stack(self.layers, self.rank, feed=self.feed)

    def _description(self) -> dict[str, Any]:
        described = super()._description()
        described["params"]["layers"] = describe_layers(as_layers(self.layers))
        return described

    @classmethod
    def _rebuild(cls, params: dict[str, Any]) -> dict[str, Any]:
        return {**params, "layers": rebuild_layers(params["layers"])}


# -- the label as a layer -----------------------------------------------------------------------------


def label_log_posterior(machine: BoltzmannMachine, visible: Mapping[str, Tensor], label: str = _LABEL) -> Tensor:
    r"""Exact :math:`\log p(\text{label} = k \mid X)` of a machine that has the label as a layer: (n, n_labels).

    Given `X`, the free energy of each label differs only in its bias and in what it adds to the hidden field,

    .. math:: \log p(k \mid X) = b_k + A_h\Big(\sum_m W_m T_m(X_m) + D_k\Big) - \log \sum_{k'} \exp(\dots),

    so the field of the other layers is computed once, and :math:`D_k`, the column of label `k`, is added to it.

    Parameters
    ----------
    machine : BoltzmannMachine
        A machine with a Categorical layer of one row, and any others.
    visible : mapping of str to Tensor
        The other layers, each (n, \*layer shape). They are not checked.
    label : str
        Name of the label's layer.
    """
    unit, hidden = machine.layers[label], machine.hidden
    n_labels = unit.shape[-1]
    parts = [
        link.to_hidden(machine.layers[name].statistic(visible[name]))
        for name, link in machine.links.items()
        if name != label
    ]
    field = torch.stack(parts).sum(0) if len(parts) > 1 else parts[0]  # (n, *hidden shape)
    every = torch.eye(n_labels, dtype=field.dtype, device=field.device).reshape(n_labels, *unit.shape)
    columns = machine.links[label].to_hidden(every)  # (labels, *hidden shape)
    joint = (field[:, None] + columns).reshape(-1, *hidden.shape)
    scores = hidden.log_normaliser(joint).reshape(len(field), n_labels) - unit.energy(every)
    return torch.log_softmax(scores, 1)


class ClassificationMVRBM(_ArrayClassifier):
    r"""Classification RBM, matrix-variate: the label is one more visible layer of the machine.

    .. math::

        E(X, k, Y) = \varepsilon(X) - b_k - \langle C, Y\rangle - \langle Y, \textstyle\sum_r U_r T(X) V_r^\top\rangle
                     - \langle Y, D_k\rangle,

    with exact :math:`p(k \mid X)`; see :func:`label_log_posterior`. After Larochelle and Bengio, "Classification using
    discriminative restricted Boltzmann machines", ICML (2008).

    Parameters
    ----------
    hidden_shape : tuple of int, optional
        Shape of the hidden layer; the sample's own if not given.
    rank : int
        Rank of the Kronecker coupling of the data.
    coupling : Coupling, optional
        Another coupling instead, such as ``Dense()``. The label is always coupled by ``Dense()``.
    mode : {"discriminative", "generative", "hybrid"}
        What is minimised: :math:`-\log p(k \mid X)`; :math:`-\log p(X, k)`, by contrastive divergence and the
        :class:`~mvrbm.learning.Trainer`; or the first plus `blend` times the second.
    blend : float
        Weight of the generative part in a hybrid.
    visible : {"bernoulli", "gaussian"}
        What entries of the data are: from 0 to 1, or real.
    visible_shape : tuple of int, optional
        What array a row of 2-D input is. Without it a row is a vector.
    recipe : str or Recipe
        How generative learning is done.
    n_epochs : int
        Passes over the data.
    batch_size : int
        Samples an update.
    learning_rate : float, optional
        Of Adam at the start, 0.003 if not given; for generative learning, the recipe's if not given.
    schedule, weight_decay, averaging, random_state, device
        As for :class:`MVRBMClassifier`; the first three do not concern generative learning.

    Attributes
    ----------
    machine_ : BoltzmannMachine
        The model, with the layers ``"visible"`` and ``"label"``.
    classes_ : array (n_classes,)
        The labels, sorted.
    history_ : list of dict
        Loss after every pass; empty for generative learning.
    """

    machine_: BoltzmannMachine
    _saved = (
        "rank", "mode", "blend", "visible", "n_epochs", "batch_size", "learning_rate", "schedule", "weight_decay",
        "averaging",
    )  # fmt: skip
    _MODES: ClassVar[tuple[str, ...]] = ("discriminative", "generative", "hybrid")

    def __init__(
        self,
        hidden_shape: Any = None,
        *,
        rank: int = 1,
        coupling: Coupling | None = None,
        mode: str = "discriminative",
        blend: float = 0.01,
        visible: str = "bernoulli",
        visible_shape: Sequence[int] | None = None,
        recipe: str | Recipe = "default",
        n_epochs: int = 30,
        batch_size: int = 100,
        learning_rate: float | None = None,
        schedule: str = "cosine",
        weight_decay: float = 0.0,
        averaging: float = 0.0,
        random_state: Any = None,
        device: str = "auto",
    ) -> None:
        self.hidden_shape = hidden_shape
        self.rank = rank
        self.coupling = coupling
        self.mode = mode
        self.blend = blend
        self.visible = visible
        self.visible_shape = visible_shape
        self.recipe = recipe
        self.n_epochs = n_epochs
        self.batch_size = batch_size
        self.learning_rate = learning_rate
        self.schedule = schedule
        self.weight_decay = weight_decay
        self.averaging = averaging
        self.random_state = random_state
        self.device = device

    @property
    def _like(self) -> Tensor:
        return self.machine_.like

    @property
    def n_parameters_(self) -> int:
        """Number of parameters of the machine."""
        return self.machine_.n_parameters

    def fit(self, X: Any, y: Any, sample_weight: Any = None) -> Self:
        r"""Learn from labelled data.

        Parameters
        ----------
        X : array of shape (n, \*visible_shape) or (n, n_features)
            The data. Bytes are scaled to [0, 1] batch by batch for Bernoulli units.
        y : array (n,)
            Labels of any kind that can be sorted.
        sample_weight : array (n,), optional
            What each sample counts. Generative learning takes equal weights only.
        """
        if self.mode not in self._MODES:
            raise ValueError(f"mode must be one of {list(self._MODES)}, got {self.mode!r}")
        if not 0 <= self.blend < math.inf:
            raise ValueError(f"blend must be at least 0, got {self.blend!r}")
        data = self._labelled(X, y, sample_weight)
        plan = Plan(
            self.n_epochs,
            self.batch_size,
            3e-3 if self.learning_rate is None else self.learning_rate,
            self.weight_decay,
            self.schedule,
            self.averaging,
            None,
        )
        plan.check()
        seed = int(check_random_state(self.random_state).randint(2**31 - 1))
        self.machine_ = self._machine().to(data.weights)
        self.history_ = []
        if self.mode == "generative":
            self._learn_jointly(data, seed)
        else:
            self._learn_to_tell(data, plan, seed)
        return self

    def _machine(self) -> BoltzmannMachine:
        shape = self._front.visible_shape_
        hidden = Bernoulli(shape if self.hidden_shape is None else as_shape(self.hidden_shape, "hidden_shape"))
        link = Kronecker(self.rank) if self.coupling is None else copy_coupling(self.coupling, 0)
        layers = {_SINGLE: UNITS[self.visible](shape), _LABEL: Categorical(len(self.classes_))}
        return BoltzmannMachine(layers, hidden, {_SINGLE: link, _LABEL: Dense()})

    def _one_hot(self, codes: Tensor) -> Tensor:
        return one_hot(codes, len(self.classes_)).to(self._like.dtype)

    def _learn_jointly(self, data: _Labelled, seed: int) -> None:
        if bool((data.weights != data.weights[0]).any()):
            raise ValueError("sample_weight must be equal for all samples in mode='generative', use another mode")
        given: dict[str, Any] = {"n_epochs": self.n_epochs, "batch_size": self.batch_size}
        if self.learning_rate is not None:
            given["learning_rate"] = self.learning_rate
        recipe = dataclasses.replace(as_recipe(self.recipe), **given)
        trainer = Trainer(self.machine_, recipe, seed=seed)
        trainer.fit({_SINGLE: data.samples, _LABEL: self._one_hot(data.codes)})
        self.history_ = trainer.history
        if trainer.interrupted:
            raise KeyboardInterrupt

    def _learn_to_tell(self, data: _Labelled, plan: Plan, seed: int) -> None:
        machine = self.machine_
        start, order, chains = RandomSource(seed, device=data.weights.device).split(3)
        self._start(data, start)

        def loss(rows: Tensor) -> Tensor:
            x, codes, weights = self._float(data.samples[rows]), data.codes[rows], data.weights[rows]
            told = label_log_posterior(machine, {_SINGLE: x}).gather(1, codes[:, None])[:, 0]
            value = -(weights * told).sum()
            if self.mode == "hybrid":
                batch = {_SINGLE: x, _LABEL: self._one_hot(codes)}
                with torch.no_grad():
                    hidden = machine.sample_hidden(batch, chains, check=False)
                    chain = machine.sample_visible(hidden, chains, check=False)
                contrast = machine.free_energy(batch, check=False) - machine.free_energy(chain, check=False)
                value = value + self.blend * (weights * contrast).sum()
            return value

        decaying = [p for link in machine.links.values() for p in link.parameters() if p.requires_grad]
        for unit in machine.layers.values():  # p(k | X) does not depend on what is frozen here
            unit.requires_grad_(self.mode == "hybrid" or unit.name == Categorical.name)
        try:
            with sensible_threads(machine, plan.batch_size):
                self.history_ = descend(machine, decaying, loss, data.weights, plan, order)
        finally:
            fresh = self._machine()
            for name, unit in machine.layers.items():
                for key, parameter in unit.named_parameters():
                    parameter.requires_grad_(fresh.layers[name].get_parameter(key).requires_grad)

    @torch.no_grad()
    def _start(self, data: _Labelled, rng: RandomSource) -> None:
        """Visible units at the data's moments, fields of a spread of one, hidden fields around zero."""
        machine, weights = self.machine_, data.weights
        share, count = weights / weights.sum(), max(1, round(float(weights.sum())))
        power = 0.0
        x = self._float(data.samples)
        for name, array in ((_SINGLE, x), (_LABEL, self._one_hot(data.codes))):
            mean = torch.tensordot(share, array, 1)
            variance = torch.tensordot(share, (array - mean) ** 2, 1)
            unit = machine.layers[name]
            unit.initialise_from(mean, variance, count)
            power += float((unit.statistic(variance.sqrt()) ** 2).sum())
        for link in machine.links.values():
            link.initialise(rng, 1 / math.sqrt(max(power, 1e-6)))
        machine.hidden.bias.zero_()
        field = machine.links[_SINGLE].to_hidden(machine.layers[_SINGLE].statistic(x))
        machine.hidden.absorb(-torch.tensordot(share, field, 1))

    def _log_probabilities(self, x: Tensor) -> Tensor:
        parts = x.split(_LABEL_ROWS_AT_ONCE)
        return torch.cat([label_log_posterior(self.machine_, {_SINGLE: part}) for part in parts])

    def sample(self, n: int = 1, *, label: Any = None, steps: int = 1000) -> tuple[Array, Array]:
        r"""Draw data and labels by Gibbs sampling.

        Parameters
        ----------
        n : int
            Number of samples.
        label : optional
            One of `classes_` that is held fixed; drawn with the data if not given.
        steps : int
            Gibbs steps of each chain.

        Returns
        -------
        X : array (n, \*visible_shape), or rows if the data was given as rows
        y : array (n,)
        """
        check_is_fitted(self)
        machine = self.machine_
        rng = RandomSource(int(check_random_state(self.random_state).randint(2**31 - 1)), device=machine.like.device)
        init = mask = None
        if label is not None:
            found = np.flatnonzero(self.classes_ == label)
            if len(found) != 1:
                raise ValueError(f"label must be one of {self.classes_.tolist()}, got {label!r}")
            held = self._one_hot(torch.full((n,), int(found[0]), device=machine.like.device))
            unit = machine.layers[_SINGLE]
            drawn = unit.sample(machine.like.new_zeros((n, *unit.shape)), rng)
            init = {_SINGLE: drawn, _LABEL: held}
            mask = {_LABEL: torch.ones_like(held, dtype=torch.bool)}
        with sensible_threads(machine, n):
            state = sample(machine, n, steps, rng, init=init, mask=mask).visible
        images = self._front._outward({_SINGLE: state[_SINGLE]})
        labels: Array = self.classes_[_out(state[_LABEL].argmax(1))]
        return images, labels

    # -- files ------------------------------------------------------------------------------------

    def _description(self) -> dict[str, Any]:
        described = super()._description()
        shape, link = self.hidden_shape, self.coupling
        described["params"] |= {
            "hidden_shape": None if shape is None else list(as_shape(shape, "hidden_shape")),
            "coupling": None if link is None else {"coupling": link.name, **link.config()},
        }
        return described

    def save_pretrained(self, folder: str | os.PathLike[str]) -> Path:
        """Write the fitted classifier to a folder, which `from_pretrained` and :func:`mvrbm.from_pretrained` read."""
        check_is_fitted(self)
        with replace_folder(folder) as staging:
            write_machine(self.machine_, staging, {"estimator": self._description()})
        return Path(folder)

    @classmethod
    def from_pretrained(cls, folder: str | os.PathLike[str], *, device: str = "auto") -> Self:
        """Read a classifier that `save_pretrained` wrote."""
        described = read_description(Path(folder), cls.__name__)
        machine = read_machine(Path(folder))
        try:
            params = MVRBMClassifier._rebuild(dict(described["params"]))
            estimator = cls(**params, device=device)
            if list(machine.layers) != [_SINGLE, _LABEL]:
                raise StorageError(f"{folder}: the layers must be {[_SINGLE, _LABEL]}, got {list(machine.layers)}")
            estimator.machine_ = machine.to(_device(device))
            estimator._restore_front(machine, described)
            if machine.layers[_LABEL].shape != (len(estimator.classes_),):
                raise StorageError(f"{folder}: the label layer does not fit {len(estimator.classes_)} classes")
        except StorageError:
            raise
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise StorageError(f"{folder}: the estimator's description is damaged: {error}") from error
        return estimator
