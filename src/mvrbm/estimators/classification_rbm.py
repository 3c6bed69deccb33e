"""Classification RBM, in which the label is a visible layer, so that p(label | data) can be computed exactly."""

import dataclasses
import math
from collections.abc import Mapping, Sequence
from dataclasses import KW_ONLY, dataclass
from pathlib import Path
from typing import Any, Self

import numpy as np
import torch
from sklearn.utils.validation import check_is_fitted
from torch import Tensor
from torch.nn.functional import one_hot

from mvrbm.couplings import Dense, Kronecker
from mvrbm.devices import resolve_device, sensible_threads
from mvrbm.errors import StorageError
from mvrbm.estimators.base import to_array
from mvrbm.estimators.batches import Array, unit_for
from mvrbm.estimators.classifier_base import ArrayClassifier
from mvrbm.estimators.initial_states import (
    Chains,
    initial_states,
    initial_states_with_labels,
    kept_chains,
    match_labels,
    read_chains,
    write_chains,
)
from mvrbm.estimators.inputs import LABEL, VISIBLE
from mvrbm.estimators.labels import Labeled, class_counts_from, draw_codes, label_codes
from mvrbm.estimators.parameters import seed_of, unconnected, unit_named, unsuited_reason, without_none
from mvrbm.estimators.persistence import stored_descent
from mvrbm.estimators.undo_on_error import undo_on_error
from mvrbm.machine import BoltzmannMachine
from mvrbm.random import RandomSource
from mvrbm.sampling import label_log_posterior, label_scores, sample
from mvrbm.saving import read_machine, register, write_machine
from mvrbm.training.backprop import DescentSettings, Objective, descend
from mvrbm.training.callbacks import Callback, Checkpoint
from mvrbm.training.trainer import Trainer
from mvrbm.units import Categorical, Unit
from mvrbm.updates.recipe import Recipe, as_recipe
from mvrbm.validation import as_shape, choice, number, whole_number

# Valid values for the parameter `mode`.
_MODES = ("discriminative", "generative", "hybrid")
# Initial learning rate for AdamW if `learning_rate` is None.
_LEARNING_RATE = 3e-3
# Number of samples per batch when scoring labels. Memory use is proportional to this number times the number of labels.
_ROWS_AT_ONCE = 256


@register("ClassificationMVRBM")
@dataclass(eq=False, repr=False)
class ClassificationMVRBM(ArrayClassifier):
    r"""Matrix-variate classification RBM, in which the label is a second visible layer.

    .. math::

        E(X, k, Y) = \varepsilon(X) - b_k - \langle C, Y\rangle - \langle Y, \textstyle\sum_r U_r T(X) V_r^\top\rangle
                     - \langle Y, D_k\rangle

    Here, :math:`k` is the class, :math:`\varepsilon(X)` is the energy of the visible units, :math:`T(X)` is their
    sufficient statistic, :math:`b` and :math:`C` are biases, and :math:`U_r`, :math:`V_r` and :math:`D_k` are weights.
    The probabilities :math:`p(k \mid X)` are computed exactly. See :func:`mvrbm.sampling.label_log_posterior`.

    Parameters
    ----------
    hidden_shape : tuple of int, optional
        Shape of the hidden layer. Default: the shape of a sample.
    rank : int, default=1
        Rank of the Kronecker coupling between the data and the hidden layer.
    coupling : Coupling or str, optional
        Coupling to use for the data instead of ``Kronecker(rank)``, such as ``Dense()``. The label always uses
        ``Dense()``.
    mode : {"discriminative", "generative", "hybrid"}, default="discriminative"
        Training objective. ``"discriminative"`` minimizes :math:`-\log p(k \mid X)` by backpropagation.
        ``"generative"`` minimizes :math:`-\log p(X, k)` by contrastive divergence. ``"hybrid"`` minimizes the
        discriminative loss plus `blend` times the generative loss.
    blend : float, default=0.01
        Coefficient of the generative loss in hybrid mode.
    recipe : str or Recipe, default="generative"
        Recipe for generative training.
    n_epochs, batch_size : int, optional
        See :class:`MVRBMClassifier`. For generative training, the default is the recipe's value.
    learning_rate : float, optional
        Initial learning rate. Default: 0.003 for AdamW, or the recipe's value for generative training.
    schedule, weight_decay, averaging
        See :class:`MVRBMClassifier`. Generative training does not use these parameters.
    visible, visible_shape, random_state, device
        See :class:`MVRBMClassifier`.

    Attributes
    ----------
    machine_ : BoltzmannMachine
        The fitted machine, with the layers ``"visible"`` and ``"label"``.
    classes_, visible_shape_, n_parameters_
        See :class:`MVRBMClassifier`.
    class_count_ : array of shape (n_classes,) or None
        Sum of the weights of the training samples in each class. Without sample weights, this is the number of samples.
        None if the model was saved by version 0.2.
    history_ : list of dict
        See :class:`MVRBMClassifier`. After generative training, this list contains the metrics logged by callbacks.
    n_epochs_, n_updates_ : int
        See :class:`MVRBM`. Both are 0 unless ``mode="generative"``.
    interrupted_ : bool
        See :class:`MVRBM`.
    chains_ : dict of str to Tensor
        Up to 100 persistent chains from generative training, keyed by layer name. `sample` starts from these chains.

    See Also
    --------
    MVRBMClassifier : A more accurate classifier, which draws no samples.
    MMVRBM : Several arrays and labels.

    Examples
    --------
    >>> import numpy as np
    >>> from mvrbm import ClassificationMVRBM
    >>> random = np.random.default_rng(0).random((40, 8, 8))
    >>> images = (random < 0.5).astype(np.float32)
    >>> labels = np.array(["cat", "dog"] * 20)
    >>> model = ClassificationMVRBM(
    ...     (6, 6), mode="generative", n_epochs=1, random_state=0
    ... ).fit(images, labels)
    >>> drawn, drawn_labels = model.sample(3, label="dog", steps=10, mean=True)
    >>> drawn.shape, drawn_labels.tolist()
    ((3, 8, 8), ['dog', 'dog', 'dog'])

    References
    ----------
    Larochelle and Bengio, "Classification using discriminative restricted Boltzmann machines", ICML (2008).
    """

    hidden_shape: Any = None
    _: KW_ONLY
    rank: int = 1
    coupling: Any = None
    mode: str = "discriminative"
    blend: float = 0.01
    recipe: str | Recipe = "generative"
    n_epochs: int | None = None
    learning_rate: float | None = None

    # -- training ---------------------------------------------------------------------------------

    def fit(
        self,
        X: Any,
        y: Any,
        sample_weight: Any = None,
        *,
        callbacks: Sequence[Callback] = (),
        checkpoints: Any = None,
        ignore_mismatch: bool = False,
    ) -> Self:
        r"""Train the classifier on labeled data.

        Parameters
        ----------
        X : array of shape (n, \*visible_shape) or (n, n_features)
            Training data.
        y : array of shape (n,) or (n, n_classes)
            Class labels, as numbers, strings or one-hot rows.
        sample_weight : array of shape (n,), optional
            Weight of each sample.
        callbacks : sequence of Callback, default=()
            Callbacks for contrastive divergence. Requires ``mode="generative"``.
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
        respectively. The partially trained classifier remains usable, and `interrupted_` is True. After an error, the
        classifier is restored to its state before `fit`.
        """
        with undo_on_error(self):
            interrupt = self._fit(X, y, sample_weight, callbacks, checkpoints, ignore_mismatch)
        if interrupt is not None:
            raise interrupt
        return self

    def _fit(
        self, X: Any, y: Any, sample_weight: Any, callbacks: Sequence[Callback], checkpoints: Any, ignore_mismatch: bool
    ) -> type[BaseException] | None:
        """Train the classifier and return the exception to raise if a signal stopped training."""
        choice(self.mode, "mode", _MODES)
        number(self.blend, "blend")
        if callbacks and self.mode != "generative":
            raise ValueError(f"callbacks require mode='generative', got mode={self.mode!r}")
        data = self._read_labeled(X, y, sample_weight, resolve_device(self.device))
        plan = self._plan(len(data.codes), _LEARNING_RATE if self.learning_rate is None else self.learning_rate)
        seed = seed_of(self.random_state)
        self.class_count_: Array | None = np.bincount(to_array(data.codes), weights=to_array(data.weights))
        self.machine_ = self._new_machine(data).to(data.weights)
        self.chains_: Chains = {}
        self.n_epochs_ = 0
        self.n_updates_ = 0
        if self.mode == "generative":
            interrupt = self._fit_generative(data, seed, callbacks, checkpoints, ignore_mismatch)
        else:
            interrupt = self._fit_posterior(data, plan, seed, checkpoints, ignore_mismatch)
        self.interrupted_ = interrupt is not None
        return interrupt

    def _new_machine(self, data: Labeled) -> BoltzmannMachine:
        visible = unit_for(self.visible, data.samples)
        shape = visible.shape if self.hidden_shape is None else as_shape(self.hidden_shape, "hidden_shape")
        hidden = unit_named("bernoulli", shape)
        link = Kronecker(self.rank) if self.coupling is None else unconnected(self.coupling)
        layers = {VISIBLE: visible, LABEL: Categorical(len(self.classes_))}
        return BoltzmannMachine(layers, hidden, {VISIBLE: link, LABEL: Dense()})

    def _fit_generative(
        self, data: Labeled, seed: int, callbacks: Sequence[Callback], checkpoints: Any, ignore_mismatch: bool
    ) -> type[BaseException] | None:
        """Train the machine by contrastive divergence."""
        trainer = Trainer(self.machine_, self._recipe(), seed=seed, callbacks=callbacks)
        if not isinstance(self.random_state, int | np.integer):
            trainer.seed = None  # the user did not choose the seed, so checkpoints with any seed can be resumed
        if checkpoints is not None:
            trainer.callbacks = [*callbacks, Checkpoint(checkpoints)]
            trainer.resume(checkpoints, ignore_mismatch=ignore_mismatch)
        labels = self._one_hot(data.codes)
        trainer.sample_weight = to_array(data.weights)
        trainer.fit({VISIBLE: data.samples, LABEL: labels}, initialize=True)
        self.history_ = trainer.history
        self.chains_ = kept_chains(trainer)
        self.n_epochs_ = trainer.epoch
        self.n_updates_ = trainer.update
        if not trainer.interrupted:
            shares = data.weights @ labels / data.weights.sum()
            match_labels(trainer, LABEL, shares, RandomSource(seed))
        return trainer.interrupt

    def _recipe(self) -> Recipe:
        """Return the recipe for generative training. Training parameters that are not None override its settings."""
        given = {name: getattr(self, name) for name in ("n_epochs", "batch_size", "learning_rate")}
        return dataclasses.replace(as_recipe(self.recipe), **without_none(given))

    def _fit_posterior(
        self, data: Labeled, plan: DescentSettings, seed: int, checkpoints: Any, ignore_mismatch: bool
    ) -> type[BaseException] | None:
        """Train the machine by backpropagation, with the discriminative or the hybrid loss."""
        machine = self.machine_
        start_rng, order_rng, chain_rng = RandomSource(seed).split(3)
        self._initialize(data, start_rng)
        decaying = [p for link in machine.links.values() for p in link.parameters() if p.requires_grad]
        # p(k | X) does not depend on the parameters of the visible units, so discriminative training freezes them.
        frozen = [p for p in self._unit.parameters() if p.requires_grad] if self.mode == "discriminative" else []
        try:
            for parameter in frozen:
                parameter.requires_grad_(False)
            with sensible_threads(machine, plan.batch_size):
                found = descend(
                    machine,
                    Objective(lambda rows: self._loss(data, rows, chain_rng), data.weights, (chain_rng,)),
                    plan,
                    order_rng,
                    decaying=decaying,
                    checkpoint=stored_descent(checkpoints, self, plan, data, ignore_mismatch),
                )
        finally:
            for parameter in frozen:
                parameter.requires_grad_(True)
        self.history_ = found.history
        return found.interrupt

    def _loss(self, data: Labeled, rows: Tensor, rng: RandomSource) -> Tensor:
        """Return the weighted sum of the losses for the samples at the given indices."""
        machine = self.machine_
        x = self._unit.from_data(data.samples[rows])
        codes = data.codes[rows]
        weights = data.weights[rows]
        posterior = label_log_posterior(machine, {VISIBLE: x}).gather(1, codes[:, None])[:, 0]
        value = -(weights * posterior).sum()
        if self.mode != "hybrid":
            return value
        batch = {VISIBLE: x, LABEL: self._one_hot(codes)}
        with torch.no_grad():
            hidden = machine.sample_hidden(batch, rng, check=False)
            chain = machine.sample_visible(hidden, rng, check=False)
        contrast = machine.free_energy(batch, check=False) - machine.free_energy(chain, check=False)
        return value + self.blend * (weights * contrast).sum()

    @torch.no_grad()
    def _initialize(self, data: Labeled, rng: RandomSource) -> None:
        """Initialize the visible units from the data, draw random weights, and set the hidden biases.

        The weight scale and the hidden biases are chosen so that the inputs to the hidden units have a mean of about 0
        and a standard deviation of about 1.
        """
        machine = self.machine_
        share = data.weights / data.weights.sum()
        count = max(1, round(float(data.weights.sum())))
        x = self._unit.from_data(data.samples)
        power = 0.0
        for name, array in ((VISIBLE, x), (LABEL, self._one_hot(data.codes))):
            mean = torch.tensordot(share, array, 1)
            variance = torch.tensordot(share, (array - mean) ** 2, 1)
            unit = machine.layers[name]
            unit.initialize_from(mean, variance, count)
            power += float((unit.statistic(variance.sqrt()) ** 2).sum())
        for link in machine.links.values():
            link.initialize(rng, 1 / math.sqrt(max(power, 1e-6)))
        machine.hidden.bias.zero_()
        field = machine.links[VISIBLE].to_hidden(self._unit.statistic(x))
        machine.hidden.absorb(-torch.tensordot(share, field, 1))

    # -- predictions ------------------------------------------------------------------------------

    @property
    def _unit(self) -> Unit:
        return self.machine_.layers[VISIBLE]

    def _one_hot(self, codes: Tensor) -> Tensor:
        return one_hot(codes, len(self.classes_)).to(self.machine_.like.dtype)

    def _log_probabilities(self, x: Tensor) -> Tensor:
        return torch.cat([label_log_posterior(self.machine_, {VISIBLE: part}) for part in x.split(_ROWS_AT_ONCE)])

    @torch.no_grad()
    def free_energy(self, X: Any) -> Array:
        """Return the free energy of each sample in nats, with the label marginalized out, as an array of shape (n,).

        The free energy equals the negative log-likelihood minus log Z.
        """
        check_is_fitted(self)
        pieces = []
        for batch in self._batches(X):
            for part in batch.split(_ROWS_AT_ONCE):
                scores = label_scores(self.machine_, {VISIBLE: part})
                pieces.append(self._unit.energy(part) - torch.logsumexp(scores, 1))
        return torch.cat(pieces).cpu().numpy()

    # -- samples ----------------------------------------------------------------------------------

    def sample(
        self, n: int | None = None, *, label: Any = None, steps: int = 1000, init: str | None = None, mean: bool = False
    ) -> tuple[Array, Array]:
        r"""Draw samples from the model by Gibbs sampling.

        Parameters
        ----------
        n : int, optional
            Number of samples. Default: one per label, or 1 if `label` is None.
        label : label or array of labels, optional
            One label from `classes_` for all samples, or one label per sample. If None, labels are drawn with their
            frequencies in the training data, which are also the frequencies in the model after generative training.
            Labels stay fixed, because those of Gibbs chains hardly ever change. For models saved by version 0.2, labels
            are sampled too if `label` is None.
        steps : int, default=1000
            Number of Gibbs steps per chain.
        init : {"chains", "noise"}, optional
            Initial states: the persistent chains from training (chains with the same label, if there are any), or
            random states. Default: the persistent chains if the model was trained with them, otherwise random states.
        mean : bool, default=False
            Whether to return the means of the visible units given the last hidden sample, instead of samples.

        Returns
        -------
        X : array of shape (n, \*visible_shape) or (n, n_features)
            Samples.
        y : array of shape (n,)
            Labels of the samples.
        """
        check_is_fitted(self)
        machine = self.machine_
        rng = RandomSource(seed_of(self.random_state))
        known = None
        if label is None:
            n = 1 if n is None else whole_number(n, "n")
            codes = None if self.class_count_ is None else draw_codes(self.class_count_, n, rng)
        else:
            codes = label_codes(label, self.classes_, n)
            n = len(codes)
        if codes is None:
            start = initial_states(machine, n, init, self.chains_, rng)
        else:
            start, known = initial_states_with_labels(machine, {LABEL: codes}, init, self.chains_, rng)
        self._warn_of_recipe()
        with sensible_threads(machine, n):
            state = sample(machine, n, steps, rng, init=start, mask=known, mean=mean, check=False).visible
        labels: Array = self.classes_[state[LABEL].argmax(1).cpu().numpy()]
        return self._outward(state[VISIBLE]), labels

    def _warn_of_recipe(self) -> None:
        reason = f"with mode='{self.mode}'" if self.mode != "generative" else None
        self._warn_once(reason or unsuited_reason(self.recipe, self._recipe()), "mode='generative' and ")

    # -- files ------------------------------------------------------------------------------------

    def _write(self, folder: Path, extra: Mapping[str, Any]) -> None:
        write_machine(self.machine_, folder, extra)
        write_chains(self.chains_, folder)

    def _description(self) -> dict[str, Any]:
        counts = None if self.class_count_ is None else self.class_count_.tolist()
        trained = {"n_epochs": self.n_epochs_, "n_updates": self.n_updates_, "class_count": counts}
        return {**super()._description(), **trained}

    def _restore(self, folder: Path, described: Mapping[str, Any]) -> None:
        n_classes = self._restore_classes(described)
        machine = read_machine(folder)
        if list(machine.layers) != [VISIBLE, LABEL]:
            raise StorageError(f"{folder} must contain the layers {[VISIBLE, LABEL]}, got {list(machine.layers)}")
        if machine.layers[LABEL].shape != (n_classes,) or machine.layers[LABEL].name != Categorical.name:
            raise StorageError(f"the label layer in {folder} does not match {n_classes} classes")
        if not machine.hidden.has_energy:
            raise StorageError(
                f"class probabilities cannot be computed for the hidden units {machine.hidden} in {folder}"
            )
        self.machine_ = machine.to(resolve_device(self.device))
        self.chains_ = read_chains(folder, self.machine_)
        self.class_count_ = class_counts_from(described.get("class_count"), n_classes)
        self.interrupted_ = False
        self.n_epochs_ = int(described.get("n_epochs", 0))
        self.n_updates_ = int(described.get("n_updates", 0))
        self._restore_input(self._unit, described)
