"""Base class that defines `fit` and `partial_fit` for models of arrays.

An estimator validates the data, builds its machines and passes both to a :class:`~mvrbm.training.Trainer`.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Self

import numpy as np
from sklearn.utils import check_random_state

from mvrbm.couplings import Coupling, Kronecker
from mvrbm.devices import resolve_device
from mvrbm.estimators.base import check_same
from mvrbm.estimators.batches import Array, check_values, known_entries, n_samples, sample_weights
from mvrbm.estimators.features import FeaturesMixin
from mvrbm.estimators.generation import GenerationMixin
from mvrbm.estimators.parameters import check_axes, unconnected
from mvrbm.estimators.persistence import with_checkpoints
from mvrbm.estimators.scoring import ScoringMixin
from mvrbm.estimators.undo_on_error import undo_on_error
from mvrbm.io.shards import Rows
from mvrbm.machine import BoltzmannMachine
from mvrbm.training.callbacks import Callback, ProgressBar
from mvrbm.training.trainer import Trainer
from mvrbm.units import Unit
from mvrbm.updates.recipe import Recipe
from mvrbm.validation import as_shape


@dataclass(frozen=True)
class PreparedRun:
    """Trainers and validated data for a training run."""

    trainers: list[Trainer]  # one per machine
    layers: dict[str, Any]  # one array per layer, of shape (n, *layer shape)
    known: Mapping[str, Any] | None  # one mask per layer, or None if all entries are known
    continues: bool  # whether the run continues to train existing machines


class ArrayRBM(FeaturesMixin, GenerationMixin, ScoringMixin):
    """Base class for models of arrays. See :class:`~mvrbm.MVRBM` for the parameters and attributes."""

    hidden_shape: Any
    coupling: Any
    rank: int

    def fit(
        self,
        X: Any,
        y: Any = None,
        sample_weight: Any = None,
        *,
        mask: Any = None,
        callbacks: Sequence[Callback] = (),
        checkpoints: Any = None,
        resume: Any = None,
        ignore_mismatch: bool = False,
    ) -> Self:
        r"""Train the model.

        Parameters
        ----------
        X : array of shape (n, \*visible_shape) or (n, n_features), Shards or Dataset
            Training data. For Bernoulli units, uint8 data is divided by 255 unless it contains only 0 and 1.
        y : None
            Not used, present here for API consistency by convention.
        sample_weight : array of shape (n,), optional
            Weight of each sample. An epoch draws as many samples as the data has, each in proportion to its weight, so
            only the ratios of the weights matter. Default: an epoch contains each sample once.
        mask : boolean array with the shape of X or of one sample, optional
            Mask that is True for known entries. During training, unknown entries and NaN entries are sampled from the
            model.
        callbacks : sequence of Callback, default=()
            Callbacks to pass to the trainer. See :mod:`mvrbm.training`.
        checkpoints : path, optional
            Checkpoint folder. The state is saved after each epoch. If the folder contains checkpoints, training resumes
            from them.
        resume : path, optional
            Checkpoint folder to resume from, for use with a :class:`~mvrbm.training.Checkpoint` callback that has
            settings of its own.
        ignore_mismatch : bool, default=False
            Whether to resume from a checkpoint even if it was saved with different data or settings. If False, such a
            checkpoint raises an error.

        Returns
        -------
        self : object
            Fitted estimator.

        Notes
        -----
        With ``warm_start=True``, `fit` trains a fitted or loaded model for `n_epochs` more epochs. Otherwise, `fit`
        trains a new model. Ctrl-C and SIGTERM stop training after the current update and raise KeyboardInterrupt and
        SystemExit, respectively. The partially trained model remains usable, and `interrupted_` is True. After an error
        or a second Ctrl-C, the model is restored to its state before `fit`.
        """
        callbacks, resume = with_checkpoints(callbacks, resume, checkpoints)
        recipe = self._recipe()
        continues = self.warm_start and hasattr(self, "machine_")
        with undo_on_error(self, self.machines_ if continues else []):
            run = self._prepare_run(X, mask, sample_weight, recipe, continues=continues)
            for callback in callbacks:
                callback.read_with(lambda data: self._read_layers(data, reset=False))
            self._train_all(run, recipe.n_epochs, callbacks, resume, ignore_mismatch=ignore_mismatch)
        self._raise_if_interrupted()
        return self

    def partial_fit(self, X: Any, y: Any = None, sample_weight: Any = None, *, mask: Any = None) -> Self:
        """Train for one more epoch on the given data and return the estimator. See :meth:`fit` for the parameters.

        The data can be a part of a larger data set. If the recipe has a prior, its strength depends on the number of
        samples in all parts so far, including the data of `fit`. Parts that occur several times count once.
        """
        continues = hasattr(self, "machine_")
        with undo_on_error(self, self.machines_ if continues else []):
            run = self._prepare_run(X, mask, sample_weight, self._recipe(), continues=continues)
            self._train_all(run, 1, open_ended=True)
        self._raise_if_interrupted()
        return self

    def prepare(self, X: Any, mask: Any = None, sample_weight: Any = None) -> tuple[Trainer, dict[str, Any], Any]:
        """Validate the data and create a new machine and its trainer, without training the machine.

        See :meth:`fit` for the parameters.

        Returns
        -------
        trainer : Trainer
            Trainer for the new machine. Pass the data and the masks to
            :meth:`Trainer.fit <mvrbm.training.Trainer.fit>`.
        layers : dict of str to array
            Validated data, keyed by layer name.
        masks : dict of str to Tensor, or None
            Masks of known entries, keyed by layer name, or None if all entries are known.
        """
        with undo_on_error(self):
            run = self._prepare_run(X, mask, sample_weight, self._recipe(), continues=False)
        return run.trainers[0], run.layers, run.known

    # -- machines ---------------------------------------------------------------------------------

    def _new_coupling(self, layer: str, units: Mapping[str, Unit]) -> Coupling:
        """Create the coupling for a visible layer. The machine sets the shapes of the coupling later."""
        return Kronecker(self.rank) if self.coupling is None else unconnected(self.coupling)

    def _new_hidden_shape(self, units: Mapping[str, Unit]) -> tuple[int, ...]:
        """Return the shape of the hidden layer, which defaults to the shape of the first visible layer."""
        first = next(iter(units.values()))
        return first.shape if self.hidden_shape is None else as_shape(self.hidden_shape, "hidden_shape")

    def _new_machines(self, units: dict[str, Unit], batch_size: int) -> list[BoltzmannMachine]:
        """Create machines with the given visible units. `batch_size` is used only to check for sufficient memory."""
        first = next(iter(units.values()))
        shape = self._new_hidden_shape(units)
        links = {name: self._new_coupling(name, units) for name in units}
        for name, unit in units.items():
            check_axes(links[name], unit, shape, modality=name if len(units) > 1 else None)
        hidden = self._new_hidden(shape, batch_size, first.bias)
        return [BoltzmannMachine(units, hidden, links).to(first.bias.dtype)]

    # -- training ---------------------------------------------------------------------------------

    def _weights_of(self, layers: Mapping[str, Any], sample_weight: Any) -> Array | None:
        """Return validated sample weights, or None if all samples have the same weight."""
        return None if sample_weight is None else sample_weights(sample_weight, n_samples(layers))

    def _prepare_run(self, X: Any, mask: Any, sample_weight: Any, recipe: Recipe, *, continues: bool) -> PreparedRun:
        """Validate the data and the parameters, and create the machines and their trainers."""
        layers = self._read_layers(X, reset=not continues)
        known = known_entries(None if mask is None else self._masks_by_layer(mask), layers, every_layer=True)
        if known is not None and not self.learns_from_incomplete:
            raise ValueError(
                "X must not contain unknown entries (NaN, or False in the mask); fill them in first, for example with "
                "MVRBM.inpaint"
            )
        units = self._new_units(layers)
        if continues:
            for name, unit in units.items():
                unit.byte_scale = self.machine_.layers[name].byte_scale
        check_values(layers, units, known)
        weights = self._weights_of(layers, sample_weight)
        machines = self._new_machines(units, min(n_samples(layers), recipe.batch_size))
        if continues:
            message = (
                "training cannot continue because the parameters describe a different model; use warm_start=False to "
                "train a new model"
            )
            check_same(machines, self.machines_, message)
            trainers = self._trainers_to_continue(recipe) or self._new_trainers(self.machines_, recipe)
        else:
            machines = [machine.to(resolve_device(self.device)) for machine in machines]
            trainers = self._new_trainers(machines, recipe)
            self._set_machines(machines)
        for trainer in trainers:
            trainer.sample_weight = weights
        self.trainers_ = trainers
        return PreparedRun(trainers, layers, known, continues)

    def _trainers_to_continue(self, recipe: Recipe) -> list[Trainer] | None:
        """Return the existing trainers, or None if any setting other than the number of epochs has changed."""
        for trainer in self.trainers_ or []:
            same_recipe = replace(trainer.requested_recipe, n_epochs=recipe.n_epochs) == recipe
            if trainer.backend != self.backend or not same_recipe:
                return None
            trainer.restart_epoch()  # an interrupted epoch may have used different data
        return self.trainers_

    def _new_trainers(self, machines: Sequence[BoltzmannMachine], recipe: Recipe) -> list[Trainer]:
        """Create one trainer per machine, with seeds drawn from `random_state`."""
        seeds = check_random_state(self.random_state).randint(2**31 - 1, size=len(machines)).tolist()
        trainers = [
            Trainer(machine, recipe, backend=self.backend, seed=seed)
            for machine, seed in zip(machines, seeds, strict=True)
        ]
        if not isinstance(self.random_state, int | np.integer):
            for trainer in trainers:
                trainer.seed = None  # the user did not choose the seed, so checkpoints with any seed can be resumed
        return trainers

    def _raise_if_interrupted(self) -> None:
        for trainer in self.trainers_ or []:
            trainer.raise_if_interrupted()

    def _train_all(
        self,
        run: PreparedRun,
        n_epochs: int,
        callbacks: Sequence[Callback] = (),
        resume: Any = None,
        *,
        ignore_mismatch: bool = False,
        open_ended: bool = False,
    ) -> None:
        """Train the machines for `n_epochs` more epochs, or up to epoch `n_epochs` when resuming from a checkpoint.

        If `open_ended` is True, more calls may follow, so the learning rate does not decay linearly to zero.
        """
        (trainer,) = run.trainers
        trainer.planned_epochs = 0 if open_ended else None
        resumed = resume is not None and trainer.resume(resume, ignore_mismatch=ignore_mismatch)
        last = n_epochs if resumed else trainer.epoch + n_epochs
        self._train(trainer, run.layers, last, run.known, callbacks, initialize=not (run.continues or resumed))

    def _train(
        self, trainer: Trainer, data: Any, n_epochs: int, known: Any, callbacks: Sequence[Callback], *, initialize: bool
    ) -> None:
        """Train a machine up to epoch `n_epochs` and copy the counters and the history from its trainer."""
        epochs_before = trainer.epoch
        updates_before = trainer.update
        trainer.callbacks = [*callbacks, *([ProgressBar()] if self.verbose else [])]
        # Do not create a mask for samples on disk, because it could take as much memory as the samples.
        on_disk = any(isinstance(part, Rows) for part in data.values())
        try:
            trainer.fit(data, n_epochs, mask=known, nan_is_missing=on_disk, initialize=initialize)
        finally:
            trainer.callbacks = []
        self.history_ = list(trainer.history)
        self.interrupted_ = trainer.interrupted
        self.n_epochs_ += trainer.epoch - epochs_before
        self.n_updates_ += trainer.update - updates_before
