"""The base class of all estimators that are trained by contrastive divergence: `fit`, features, samples, scores.

Subclasses say which layers the data makes and how these are coupled. Input checks are in
:mod:`mvrbm.estimators.inputs`, shared parameters and saving in :mod:`mvrbm.estimators.parameters`.
"""

import math
from abc import abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar, Self

import numpy as np
import torch
from numpy.typing import ArrayLike
from sklearn.base import ClassNamePrefixFeaturesOutMixin, TransformerMixin
from sklearn.utils.validation import check_is_fitted
from torch import Tensor

from mvrbm.couplings import Coupling, Kronecker
from mvrbm.devices import resolve_device, sensible_threads
from mvrbm.estimators.chains import Chains, kept_chains, read_chains, start_of, write_chains
from mvrbm.estimators.inputs import Array, batches, check_values, filled_batches, known_entries, masks
from mvrbm.estimators.parameters import (
    SavedEstimator,
    TrainingParameters,
    check_axes,
    check_same,
    new_trainers,
    seed_of,
    unconnected,
    unsuited_reason,
)
from mvrbm.io.shards import Rows
from mvrbm.likelihood import LikelihoodInterval, log_likelihood_interval, pseudo_log_likelihood
from mvrbm.machine import BoltzmannMachine
from mvrbm.random import RandomSource
from mvrbm.sampling import Layers, conditional_mean, mean_field, sample
from mvrbm.saving import read_machine, write_machine
from mvrbm.training.callbacks import Callback, ProgressBar
from mvrbm.training.trainer import Trainer
from mvrbm.units import Unit
from mvrbm.validation import as_shape, whole_number

# Entries of the dense weights beyond which `components_` is not offered.
_LARGEST_DENSE = 2**26
# Sites whose conditional probability is computed exactly by the default score.
_SCORED_SITES = 16


class ArrayRBM(TrainingParameters, ClassNamePrefixFeaturesOutMixin, TransformerMixin, SavedEstimator):
    """Base class of the estimators. Its fitted attributes are described in :class:`~mvrbm.MVRBM`."""

    #: Whether `fit` learns from data with unknown entries.
    learns_from_incomplete: ClassVar[bool] = True

    machines_: list[BoltzmannMachine]  # several for stacks, one for all other estimators
    trainers_: list[Trainer] | None
    history_: list[dict[str, float]]
    n_epochs_: int
    n_updates_: int
    interrupted_: bool
    _saved_chains: Chains

    hidden_shape: Any
    coupling: Any
    rank: int

    def _coupling(self, layer: str, units: Mapping[str, Unit]) -> Coupling:
        """Return a new coupling of one of the layers, without shapes."""
        return Kronecker(self.rank) if self.coupling is None else unconnected(self.coupling)

    def _build(self, units: dict[str, Unit], n: int) -> list[BoltzmannMachine]:
        """Return new machines over visible units, to be trained on n samples."""
        first = next(iter(units.values()))
        shape = first.shape if self.hidden_shape is None else as_shape(self.hidden_shape, "hidden_shape")
        links = {name: self._coupling(name, units) for name in units}
        for name, unit in units.items():
            check_axes(links[name], unit, shape)
        return [BoltzmannMachine(units, self._new_hidden(shape, n, first.bias), links).to(first.bias.dtype)]

    @abstractmethod
    def _layers(self, X: Any, *, reset: bool) -> dict[str, Any]:
        """Return data by layer, each (n, *layer shape), with checked shapes and dtypes."""

    @abstractmethod
    def _units(self, layers: Mapping[str, Any]) -> dict[str, Unit]:
        """Return new units for the layers of data, in the dtype of the model."""

    @abstractmethod
    def _masks_by_layer(self, mask: Any) -> Mapping[str, Any]:
        """Return a mask by layer, as it was given."""

    @abstractmethod
    def _to_user(self, layers: Mapping[str, Tensor], like: Any = None) -> Any:
        """Return layers in the form in which data is given to this estimator, or in that of `like`."""

    def fit(
        self,
        X: Any,
        y: Any = None,
        *,
        mask: Any = None,
        callbacks: Sequence[Callback] = (),
        resume: Any = None,
        force: bool = False,
    ) -> Self:
        r"""Learn from data.

        Parameters
        ----------
        X : array of shape (n, \*visible_shape) or (n, n_features), or Shards or Dataset
            The data, or a folder of it. Bytes are scaled to [0, 1] batch by batch for Bernoulli units.
        y : None
            Ignored, there for pipelines.
        mask : boolean array of the shape of X or of one sample, optional
            True where an entry is known; the others, and entries that are NaN, are drawn from the model as it learns.
        callbacks : sequence of Callback
            See :mod:`mvrbm.training`.
        resume, force : path, bool, optional
            Folder of checkpoints. Training continues from the newest one, if there is one. Unless `force` is True, a
            checkpoint of other data or settings is an error.

        Notes
        -----
        With ``warm_start=True``, a fitted or loaded model is trained for `n_epochs` more epochs; otherwise a new model
        is trained. Ctrl-C or SIGTERM stops training after an update: KeyboardInterrupt or SystemExit is raised.
        """
        continues = self.warm_start and hasattr(self, "machine_")
        return self._learn(X, mask, self._recipe().n_epochs, callbacks, resume, continues=continues, force=force)

    def partial_fit(self, X: Any, y: Any = None, *, mask: Any = None) -> Self:
        """Train for one more epoch, on these data."""
        return self._learn(X, mask, 1, (), None, continues=hasattr(self, "machine_"), planned=False)

    def _learn(
        self,
        X: Any,
        mask: Any,
        n_epochs: int,
        callbacks: Sequence[Callback],
        resume: Any,
        *,
        continues: bool,
        planned: bool = True,
        force: bool = False,
    ) -> Self:
        (trainer,), layers, known = self._start(X, mask, continues=continues)
        trainer.planned_epochs = None if planned else 0
        resumed = resume is not None and trainer.resume(resume, force=force)
        last = n_epochs if resumed else trainer.epoch + n_epochs
        self._train(trainer, layers, last, known, callbacks, initialize=not (continues or resumed))
        return self

    def prepare(self, X: Any, mask: Any = None) -> tuple[Trainer, dict[str, Any], Any]:
        """Check data, and build a new machine and its trainer, without training them.

        Returns the trainer, and data and mask by layer, as :meth:`Trainer.fit <mvrbm.training.Trainer.fit>` takes them.
        """
        (trainer,), layers, known = self._start(X, mask, continues=False)
        return trainer, layers, known

    def _start(self, X: Any, mask: Any, *, continues: bool) -> tuple[list[Trainer], dict[str, Any], Any]:
        """Check data and mask and return them by layer, with trainers of new machines or of the fitted ones."""
        layers = self._layers(X, reset=not continues)
        known = known_entries(mask if mask is None else self._masks_by_layer(mask), layers, every_layer=True)
        if known is not None and not self.learns_from_incomplete:
            raise ValueError(
                "X must have no unknown entries (NaN, or by a mask): fill them in first, as by MVRBM.inpaint"
            )
        units, n = self._units(layers), len(next(iter(layers.values())))
        check_values(layers, units, known)
        machines, recipe, trainers = self._build(units, n), self._recipe(), self.trainers_ if continues else None
        if continues:
            same = "training cannot continue: the parameters describe another model (use warm_start=False to train it)"
            check_same(machines, self.machines_, same)
        for trainer in trainers or []:
            if (trainer.backend, replace(trainer.requested_recipe, n_epochs=recipe.n_epochs)) != (self.backend, recipe):
                trainers = None
                break
            trainer.restart_epoch()  # an epoch that was interrupted was of other data
        if trainers is None:
            machines = self.machines_ if continues else [m.to(resolve_device(self.device)) for m in machines]
            trainers = new_trainers(machines, recipe, self.backend, self.random_state)
        if not continues:  # no parameter was wrong
            self._adopt(machines)
        self.trainers_ = trainers
        return trainers, layers, known

    def _train(
        self, trainer: Trainer, data: Any, n_epochs: int, known: Any, callbacks: Sequence[Callback], *, initialize: bool
    ) -> None:
        """Train until `n_epochs` epochs are done, and keep what the trainer counted and logged."""
        epochs, updates = trainer.epoch, trainer.update
        trainer.callbacks = [*callbacks, *([ProgressBar()] if self.verbose else [])]
        try:
            sharded = any(isinstance(part, Rows) for part in data.values())  # a mask would be as large as these
            trainer.fit(data, n_epochs, mask=known, nan_is_missing=sharded, initialize=initialize)
        finally:
            trainer.callbacks = []
            self.history_, self.interrupted_ = trainer.history, trainer.interrupted
            self.n_epochs_ += trainer.epoch - epochs
            self.n_updates_ += trainer.update - updates
        trainer.raise_if_interrupted()

    @property
    def machine_(self) -> BoltzmannMachine:
        """The model; for stacks, the lowest machine."""
        return self.machines_[0]

    @property
    def trainer_(self) -> Trainer | None:
        """The trainer of the model. None after loading."""
        return None if self.trainers_ is None else self.trainers_[0]

    @property
    def _machines(self) -> list[BoltzmannMachine]:
        check_is_fitted(self)
        return self.machines_

    @property
    def _n_features_out(self) -> int:
        return math.prod(self._machines[-1].hidden.shape)

    @property
    def n_parameters_(self) -> int:
        """Number of learned parameters."""
        return sum(machine.n_parameters for machine in self._machines)

    @property
    def components_(self) -> Any:
        """Weights as a matrix, (n_hidden, n_visible_features). Not available beyond 67 million entries."""
        n_visible = sum(math.prod(unit.shape) for unit in self._machines[0].layers.values())
        if self._n_features_out * n_visible > _LARGEST_DENSE:
            size = f"{self._n_features_out:,} x {n_visible:,}"
            raise AttributeError(f"components_ would be a matrix of {size} entries: use components(which) instead")
        filters = self.components()
        return {name: _rows(part) for name, part in filters.items()} if isinstance(filters, dict) else _rows(filters)

    @property
    def intercept_visible_(self) -> Any:
        """Biases of the visible layer, (n_visible_features,). For Gaussian units, their location."""
        layers = self._machines[0].layers
        return _one_or_all({name: _out(unit.bias.expand(unit.shape).flatten()) for name, unit in layers.items()})

    @property
    def intercept_hidden_(self) -> Array:
        """Biases of the hidden layer, (n_hidden,)."""
        hidden = self._machines[-1].hidden
        return _out(hidden.bias.expand(hidden.shape).flatten())

    def components(self, which: ArrayLike | None = None) -> Any:
        r"""Filters: weights of hidden units, as visible arrays (n, \*visible_shape), by modality if there are several.

        `which` are the numbers of the hidden units, counted row by row, default: all. For the MVRBM, filter (k, l) is
        the outer product of row k of U and row l of V.
        """
        return _one_or_all({name: _out(rows) for name, rows in self._weights(self._machines[-1], which).items()})

    @torch.no_grad()
    def _weights(self, machine: BoltzmannMachine, which: ArrayLike | None) -> dict[str, Tensor]:
        """Return the weights of some hidden units of a machine, by layer, each (n, *layer shape)."""
        size = math.prod(machine.hidden.shape)
        if which is None:
            return {name: link.dense().reshape(size, *link.visible_shape) for name, link in machine.links.items()}
        numbers = torch.as_tensor(np.asarray(which)).reshape(-1)
        if len(numbers) and (int(numbers.min()) < 0 or int(numbers.max()) >= size):
            raise ValueError(f"which must lie in 0..{size - 1}, got {int(numbers.min())} to {int(numbers.max())}")
        chosen = torch.nn.functional.one_hot(numbers, size).reshape(-1, *machine.hidden.shape).to(machine.like)
        return {name: link.to_visible(chosen) for name, link in machine.links.items()}

    def hidden_maps(self, X: Any) -> Array:
        r"""Means of the hidden units as arrays, (n, \*hidden_shape); for Bernoulli units, their probabilities."""
        check_is_fitted(self)
        return self._of_each(X, lambda batch: self.machine_.hidden_mean(batch, check=False))

    def transform(self, X: Any) -> Array:
        """Means of the hidden units as rows, (n, n_hidden)."""
        return _rows(self.hidden_maps(X))

    def inverse_transform(self, X: ArrayLike) -> Any:
        """Means of the visible units given hidden values, as rows or as arrays."""
        with torch.no_grad():
            return self._to_user(self.machine_.visible_mean(self._hidden_values(X, self._machines[-1])))

    def _hidden_values(self, X: ArrayLike, machine: BoltzmannMachine) -> Tensor:
        rows, shape = np.array(X), machine.hidden.shape
        if rows.shape[1:] not in (shape, (math.prod(shape),)):
            raise ValueError(f"expected (n, {math.prod(shape)}) or {('n', *shape)} hidden values, got {rows.shape}")
        return torch.from_numpy(rows).reshape(-1, *shape).to(machine.like)

    def reconstruct(self, X: Any, *, steps: int = 1) -> Any:
        """Pass data up and down through the means, `steps` times."""
        check_is_fitted(self)
        with torch.no_grad():
            pieces = [mean_field(self.machine_, batch, steps, check=False) for batch in self._batches(X)]
        return self._to_user(_joined(pieces), like=X)

    def sample(self, n: int = 1, *, steps: int = 1000, init: Any = None, mask: Any = None, mean: bool = False) -> Any:
        """Draw from the model by Gibbs sampling.

        Parameters
        ----------
        n : int
            Number of samples.
        steps : int
            Gibbs steps of each chain.
        init : array, or {"chains", "noise"}, optional
            n states to start from, or the persistent chains of training, each as often as needed, or random states.
            Default: the persistent chains if the model was trained with such chains, otherwise random states.
        mask : boolean array, optional
            True where `init` is known and stays. Default: if `init` has entries that are NaN, all others stay.
        mean : bool
            Whether to return the means of the visible units given the last hidden draw, which make smoother pictures,
            instead of draws.
        """
        check_is_fitted(self)
        whole_number(n, "n")
        rng, known, like = self._rng(), None, None
        if init is None or isinstance(init, str):
            if mask is not None:
                raise ValueError("a mask needs init: it marks which of its entries are known")
            start = start_of(self._machines[-1], n, init, self.chains_, rng)
        else:
            layers, like = self._layers(init, reset=False), init
            known = known_entries(mask if mask is None else self._masks_by_layer(mask), layers)
            start = self._as_start(_joined(list(batches(layers, self.machine_.layers, known, copy=True))))
        self._warn_of_recipe()
        with sensible_threads(self._machines[-1], n):
            return self._to_user(self._draw(n, steps, rng, start, known, mean), like=like)

    def _as_start(self, layers: dict[str, Tensor]) -> dict[str, Tensor]:
        """Return the states of the machine that `sample` runs chains of, from data."""
        return layers

    def _draw(self, n: int, steps: int, rng: RandomSource, start: Layers, known: Any, mean: bool) -> dict[str, Tensor]:
        return sample(self.machine_, n, steps, rng, init=start, mask=known, mean=mean).visible

    def inpaint(self, X: Any, mask: Any = None, *, steps: int = 100, burn_in: int = 50) -> Any:
        """Fill in unknown entries with their mean given the known entries.

        Parameters
        ----------
        X : array
            Data. Entries that are NaN are unknown.
        mask : boolean array of the shape of X or of one sample, optional
            True where the value is known. Default: where it is not NaN.
        steps, burn_in : int
            Number of Gibbs steps to average over, and number of steps before these.
        """
        check_is_fitted(self)
        whole_number(steps, "steps")
        whole_number(burn_in, "burn_in", 0)
        self._warn_of_recipe()
        layers = self._layers(X, reset=False)
        known = None if mask is None else masks(self._masks_by_layer(mask), layers)
        return self._to_user(_joined(list(self._filled(layers, known, steps, burn_in))), like=X)

    def _filled(
        self, layers: Mapping[str, Any], known: Layers | None = None, steps: int = 100, burn_in: int = 50
    ) -> Iterator[dict[str, Tensor]]:
        """Return batches of data whose unknown entries, NaN included, are replaced by their mean given the others."""
        if known is None and not self.learns_from_incomplete:
            return batches(layers, self.machine_.layers)
        rng = self._rng()

        def fill(batch: dict[str, Tensor], masks: dict[str, Tensor]) -> dict[str, Tensor]:
            with sensible_threads(self._machines[0], len(next(iter(batch.values())))):
                return self._fill_in(batch, masks, rng, steps, burn_in)

        return filled_batches(layers, self.machine_.layers, known, fill)

    def _fill_in(self, batch: Layers, known: Layers, rng: RandomSource, steps: int, burn_in: int) -> dict[str, Tensor]:
        return conditional_mean(self.machine_, batch, known, rng, steps=steps, burn_in=burn_in)

    def score_samples(self, X: Any, *, exact: bool = False) -> Array:
        """Pseudo-log-likelihood of each sample, (n,). Deterministic.

        By default, models with more than 16 entries are scored by an unbiased estimate, which computes the exact
        conditional probability of 16 entries and approximates the others; see
        :func:`mvrbm.likelihood.pseudo_log_likelihood`. It takes less time than an epoch of training.

        Parameters
        ----------
        X : array
            Data, as for :meth:`fit`.
        exact : bool
            Whether to compute the conditional probability of every entry.
        """
        check_is_fitted(self)
        n_sites = None if exact else _SCORED_SITES
        return self._of_each(
            X, lambda batch: pseudo_log_likelihood(self.machine_, batch, n_sites=n_sites, check=False).values
        )

    def score(self, X: Any, y: Any = None, *, exact: bool = False) -> float:
        """Mean of `score_samples`."""
        return float(np.mean(self.score_samples(X, exact=exact)))

    def log_likelihood(
        self, X: Any, *, n_chains: int = 100, n_steps: int = 1000, burn_in: int | None = None
    ) -> LikelihoodInterval:
        """Mean log-likelihood of data in nats per sample, with an interval; not for stacks.

        See :func:`mvrbm.likelihood.log_likelihood_interval`. Reverse annealing starts from the persistent chains of
        training, or else from samples of X, after `burn_in` Gibbs steps (default: `n_steps`).
        """
        check_is_fitted(self)
        if len(self._machines) > 1:
            raise ValueError("a stack of machines has no likelihood that can be estimated: use score_samples")
        data = _joined(list(batches(self._layers(X, reset=False), self.machine_.layers)))
        rows = np.linspace(0, len(next(iter(data.values()))) - 1, n_chains).astype(int)
        start = self.chains_ or {name: array[rows] for name, array in data.items()}
        options: dict[str, Any] = {"n_chains": n_chains, "n_steps": n_steps, "burn_in": burn_in}
        return log_likelihood_interval(self.machine_, data, self._rng(), init=start, **options)

    def free_energy(self, X: Any) -> Array:
        """Free energy of each sample, (n,): the negative log-likelihood minus log Z, in nats.

        Differences between samples are differences of log-likelihood. For stacks it is that of the lowest machine.
        """
        check_is_fitted(self)
        return self._of_each(X, lambda batch: self.machine_.free_energy(batch, check=False))

    @property
    def chains_(self) -> Chains:
        """Up to 100 persistent chains of training, by layer, from which `sample` starts; empty if there are none."""
        return self._saved_chains if self.trainers_ is None else kept_chains(self.trainers_[-1])

    def _warn_of_recipe(self) -> None:
        if self.n_updates_:  # otherwise it was trained elsewhere
            self._warn_once(unsuited_reason(self.recipe, self._recipe()))

    def _write(self, folder: Path, extra: Mapping[str, Any]) -> None:
        self._write_machines(folder, extra)
        write_chains(self.chains_, folder)

    def _write_machines(self, folder: Path, extra: Mapping[str, Any]) -> None:
        write_machine(self.machine_, folder, extra)

    def _read_machines(self, folder: Path) -> list[BoltzmannMachine]:
        return [read_machine(folder)]

    def _description(self) -> dict[str, Any]:
        return {**super()._description(), "n_epochs": self.n_epochs_, "n_updates": self.n_updates_}

    def _restore(self, folder: Path, described: Mapping[str, Any]) -> None:
        self._adopt(self._read_machines(folder))
        self._saved_chains = read_chains(folder, self.machines_[-1])
        self.n_epochs_, self.n_updates_ = int(described.get("n_epochs", 0)), int(described.get("n_updates", 0))

    def _adopt(self, machines: Sequence[BoltzmannMachine]) -> None:
        """Take machines as the model, not yet trained."""
        self.machines_, self.trainers_ = [machine.to(resolve_device(self.device)) for machine in machines], None
        self.history_, self.interrupted_, self.n_epochs_, self.n_updates_ = [], False, 0, 0
        self._saved_chains = {}

    def _rng(self) -> RandomSource:
        return RandomSource(seed_of(self.random_state), device=self.machine_.like.device)

    def _batches(self, X: Any) -> Iterator[dict[str, Tensor]]:
        return self._filled(self._layers(X, reset=False))

    @torch.no_grad()
    def _of_each(self, X: Any, compute: Callable[[dict[str, Tensor]], Tensor]) -> Array:
        """Compute an array for every sample, batch by batch."""
        layers = self._layers(X, reset=False)
        found, first = np.empty(0), 0
        for batch in self._filled(layers):
            some = _out(compute(batch))
            if first == 0:  # only now are its shape and dtype known
                found = np.empty((len(next(iter(layers.values()))), *some.shape[1:]), dtype=some.dtype)
            found[first : first + len(some)] = some
            first += len(some)
        return found

    def __sklearn_tags__(self) -> Any:
        """Tell scikit-learn that float32 stays float32, and that NaN is allowed."""
        tags = super().__sklearn_tags__()
        tags.input_tags.allow_nan = self.learns_from_incomplete
        tags.transformer_tags.preserves_dtype = ["float64", "float32"]
        return tags


def _one_or_all(layers: Mapping[str, Any]) -> Any:
    """Return the value of the only layer, or a dict by layer if there are several."""
    return dict(layers) if len(layers) > 1 else next(iter(layers.values()))


def _rows(array: Array) -> Array:
    return array.reshape(len(array), -1)


def _out(tensor: Tensor) -> Array:
    return tensor.detach().cpu().numpy()


def _joined(pieces: Sequence[Mapping[str, Tensor]]) -> dict[str, Tensor]:
    return {name: torch.cat([piece[name] for piece in pieces]) for name in pieces[0]}
