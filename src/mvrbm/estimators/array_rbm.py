"""Training of estimators by contrastive divergence: `fit`, `partial_fit`.

An estimator checks the data, builds its machines and hands both to a :class:`~mvrbm.training.Trainer`.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Self

import numpy as np
from sklearn.utils import check_random_state

from mvrbm.couplings import Coupling, Kronecker
from mvrbm.devices import resolve_device
from mvrbm.estimators.base import check_same
from mvrbm.estimators.batches import check_values, known_entries, n_samples
from mvrbm.estimators.features import FeaturesMixin
from mvrbm.estimators.generation import GenerationMixin
from mvrbm.estimators.parameters import check_axes, unconnected
from mvrbm.estimators.scoring import ScoringMixin
from mvrbm.io.shards import Rows
from mvrbm.machine import BoltzmannMachine
from mvrbm.training.callbacks import Callback, ProgressBar
from mvrbm.training.trainer import Trainer
from mvrbm.units import Unit
from mvrbm.updates.recipe import Recipe
from mvrbm.validation import as_shape


@dataclass(frozen=True)
class PreparedRun:
    """Trainers and checked data: everything that a training run needs."""

    trainers: list[Trainer]  # one per machine
    layers: dict[str, Any]  # data by layer, (n, *layer shape)
    known: Mapping[str, Any] | None  # masks by layer; None if all entries are known
    continues: bool  # whether the machines have been trained before


class ArrayRBM(FeaturesMixin, GenerationMixin, ScoringMixin):
    """Base class of the estimators of arrays; :class:`~mvrbm.MVRBM` documents its parameters and attributes."""

    hidden_shape: Any
    coupling: Any
    rank: int

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
        r"""Train the model.

        Parameters
        ----------
        X : array of shape (n, \*visible_shape) or (n, n_features), Shards or Dataset
            Training data. For Bernoulli units, bytes are scaled to [0, 1] batch by batch.
        y : None
            Ignored. Present for compatibility with pipelines.
        mask : boolean array of the shape of X or of one sample, optional
            True where an entry is known. Unknown entries, and entries that are NaN, are sampled from the model during
            training.
        callbacks : sequence of Callback
            Callbacks of the trainer; see :mod:`mvrbm.training`.
        resume : path, optional
            Folder of checkpoints. Training continues from the newest checkpoint, if there is one.
        force : bool
            Whether to resume from a checkpoint that was saved with other data or settings, which otherwise raises an
            error.

        Notes
        -----
        With ``warm_start=True``, a fitted or loaded model is trained for `n_epochs` more epochs. Otherwise `fit` trains
        a new model. Ctrl-C and SIGTERM stop training after the current update and raise KeyboardInterrupt or
        SystemExit.
        """
        recipe = self._recipe()
        continues = self.warm_start and hasattr(self, "machine_")
        run = self._prepare_run(X, mask, recipe, continues=continues)
        self._train_all(run, recipe.n_epochs, callbacks, resume, force=force)
        return self

    def partial_fit(self, X: Any, y: Any = None, *, mask: Any = None) -> Self:
        """Train for one more epoch on these data. See :meth:`fit` for the parameters."""
        run = self._prepare_run(X, mask, self._recipe(), continues=hasattr(self, "machine_"))
        self._train_all(run, 1, open_ended=True)
        return self

    def prepare(self, X: Any, mask: Any = None) -> tuple[Trainer, dict[str, Any], Any]:
        """Check data and build a new machine with its trainer, without training it.

        Returns the trainer, and data and mask by layer in the form that
        :meth:`Trainer.fit <mvrbm.training.Trainer.fit>` takes.
        """
        run = self._prepare_run(X, mask, self._recipe(), continues=False)
        return run.trainers[0], run.layers, run.known

    # -- machines ---------------------------------------------------------------------------------

    def _new_coupling(self, layer: str, units: Mapping[str, Unit]) -> Coupling:
        """Return a new coupling of one of the layers, without shapes."""
        return Kronecker(self.rank) if self.coupling is None else unconnected(self.coupling)

    def _new_machines(self, units: dict[str, Unit], batch_size: int) -> list[BoltzmannMachine]:
        """Return new machines over visible units, to be trained with batches of this size."""
        first = next(iter(units.values()))
        shape = first.shape if self.hidden_shape is None else as_shape(self.hidden_shape, "hidden_shape")
        links = {name: self._new_coupling(name, units) for name in units}
        for name, unit in units.items():
            check_axes(links[name], unit, shape)
        hidden = self._new_hidden(shape, batch_size, first.bias)
        return [BoltzmannMachine(units, hidden, links).to(first.bias.dtype)]

    # -- training ---------------------------------------------------------------------------------

    def _prepare_run(self, X: Any, mask: Any, recipe: Recipe, *, continues: bool) -> PreparedRun:
        """Check data and parameters, and set up the machines and their trainers.

        The fitted model stays unchanged if the data or a parameter is invalid.
        """
        layers = self._read_layers(X, reset=not continues)
        known = known_entries(None if mask is None else self._masks_by_layer(mask), layers, every_layer=True)
        if known is not None and not self.learns_from_incomplete:
            raise ValueError(
                "X must have no unknown entries (NaN, or False in a mask): fill them in first, for example with "
                "MVRBM.inpaint"
            )
        units = self._new_units(layers)
        check_values(layers, units, known)
        machines = self._new_machines(units, min(n_samples(layers), recipe.batch_size))
        if continues:
            message = "training cannot continue: the parameters describe another model (warm_start=False trains it)"
            check_same(machines, self.machines_, message)
            trainers = self._trainers_to_continue(recipe) or self._new_trainers(self.machines_, recipe)
        else:
            machines = [machine.to(resolve_device(self.device)) for machine in machines]
            trainers = self._new_trainers(machines, recipe)
            self._set_machines(machines)
        self.trainers_ = trainers
        return PreparedRun(trainers, layers, known, continues)

    def _trainers_to_continue(self, recipe: Recipe) -> list[Trainer] | None:
        """Return the trainers of the model if they have the same settings except for the number of epochs."""
        for trainer in self.trainers_ or []:
            same_recipe = replace(trainer.requested_recipe, n_epochs=recipe.n_epochs) == recipe
            if trainer.backend != self.backend or not same_recipe:
                return None
            trainer.restart_epoch()  # an interrupted epoch belongs to other data
        return self.trainers_

    def _new_trainers(self, machines: Sequence[BoltzmannMachine], recipe: Recipe) -> list[Trainer]:
        """Return one trainer per machine, with seeds drawn from `random_state`."""
        seeds = check_random_state(self.random_state).randint(2**31 - 1, size=len(machines)).tolist()
        trainers = [
            Trainer(machine, recipe, backend=self.backend, seed=seed)
            for machine, seed in zip(machines, seeds, strict=True)
        ]
        if not isinstance(self.random_state, int | np.integer):
            for trainer in trainers:
                trainer.seed = None  # drawn, not chosen: checkpoints of any seed may be resumed
        return trainers

    def _train_all(
        self,
        run: PreparedRun,
        n_epochs: int,
        callbacks: Sequence[Callback] = (),
        resume: Any = None,
        *,
        force: bool = False,
        open_ended: bool = False,
    ) -> None:
        """Train the machines for `n_epochs` epochs, or until `n_epochs` epochs if a checkpoint is resumed.

        With `open_ended`, more calls may follow, so that the learning rate does not decay linearly to zero.
        """
        (trainer,) = run.trainers
        trainer.planned_epochs = 0 if open_ended else None
        resumed = resume is not None and trainer.resume(resume, force=force)
        last = n_epochs if resumed else trainer.epoch + n_epochs
        self._train(trainer, run.layers, last, run.known, callbacks, initialize=not (run.continues or resumed))

    def _train(
        self, trainer: Trainer, data: Any, n_epochs: int, known: Any, callbacks: Sequence[Callback], *, initialize: bool
    ) -> None:
        """Train a machine until `n_epochs` epochs are done, and copy the counters and the history of its trainer."""
        epochs_before = trainer.epoch
        updates_before = trainer.update
        trainer.callbacks = [*callbacks, *([ProgressBar()] if self.verbose else [])]
        # Samples on disk have no mask: it would be as large as they are.
        on_disk = any(isinstance(part, Rows) for part in data.values())
        try:
            trainer.fit(data, n_epochs, mask=known, nan_is_missing=on_disk, initialize=initialize)
        finally:
            trainer.callbacks = []
            self.history_ = trainer.history
            self.interrupted_ = trainer.interrupted
            self.n_epochs_ += trainer.epoch - epochs_before
            self.n_updates_ += trainer.update - updates_before
        trainer.raise_if_interrupted()
