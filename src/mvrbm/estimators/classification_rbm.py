"""The classification RBM: the label is one more visible layer, and p(label | data) is exact."""

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
from mvrbm.estimators.chains import (
    Chains,
    kept_chains,
    label_codes,
    match_labels,
    read_chains,
    start_of,
    start_with_labels,
    write_chains,
)
from mvrbm.estimators.classifiers import ArrayClassifier
from mvrbm.estimators.inputs import LABEL, VISIBLE, Array, Labeled, unit_named
from mvrbm.estimators.parameters import seed_of, stored_descent, unconnected, unsuited_reason, without_none
from mvrbm.machine import BoltzmannMachine
from mvrbm.random import RandomSource
from mvrbm.sampling import label_log_posterior, label_scores, sample
from mvrbm.saving import read_machine, register, write_machine
from mvrbm.training.backprop import DescentSettings, descend
from mvrbm.training.callbacks import Callback, Checkpoint
from mvrbm.training.trainer import Trainer
from mvrbm.units import Categorical, Unit
from mvrbm.updates.recipe import Recipe, as_recipe
from mvrbm.validation import as_shape, choice, number, whole_number

_MODES = ("discriminative", "generative", "hybrid")
_ROWS_AT_ONCE = 256  # times the number of labels


@register("ClassificationMVRBM")
@dataclass(eq=False, repr=False)
class ClassificationMVRBM(ArrayClassifier):
    r"""Classification RBM, matrix-variate: the label is one more visible layer of the machine.

    .. math::

        E(X, k, Y) = \varepsilon(X) - b_k - \langle C, Y\rangle - \langle Y, \textstyle\sum_r U_r T(X) V_r^\top\rangle
                     - \langle Y, D_k\rangle,

    with exact :math:`p(k \mid X)`; see :func:`mvrbm.sampling.label_log_posterior`. After Larochelle and Bengio,
    "Classification using discriminative restricted Boltzmann machines", ICML (2008).

    Parameters
    ----------
    hidden_shape : tuple of int, optional
        Shape of the hidden layer. Default: the shape of a sample.
    rank : int
        Rank of the Kronecker coupling of the data.
    coupling : Coupling or str, optional
        Another coupling instead, such as ``Dense()``. The label is always coupled by ``Dense()``.
    mode : {"discriminative", "generative", "hybrid"}
        The loss: :math:`-\log p(k \mid X)`; :math:`-\log p(X, k)`, by contrastive divergence and the
        :class:`~mvrbm.training.Trainer`; or the first plus `blend` times the second.
    blend : float
        Weight of the generative part in a hybrid.
    recipe : str or Recipe
        Recipe of generative learning.
    n_epochs, batch_size : int, optional
        As for :class:`MVRBMClassifier`; for generative learning, the recipe's by default.
    learning_rate : float, optional
        Initial learning rate. Default: 0.003, of Adam; for generative learning, the recipe's.
    schedule, weight_decay, averaging
        As for :class:`MVRBMClassifier`. Generative learning does not use them.
    visible, visible_shape, random_state, device
        As for :class:`MVRBMClassifier`.

    Attributes
    ----------
    machine_ : BoltzmannMachine
        The model, with the layers ``"visible"`` and ``"label"``.
    classes_, history_, visible_shape_, n_parameters_
        As for :class:`MVRBMClassifier`; the history of generative learning has the metrics that callbacks logged.
    n_epochs_, n_updates_, interrupted_
        As for :class:`MVRBM`, of generative learning.
    chains_ : dict of str to Tensor
        Up to 100 persistent chains of generative learning, by layer, from which `sample` starts.

    Examples
    --------
    >>> import numpy as np
    >>> from mvrbm import ClassificationMVRBM
    >>> images = (np.random.default_rng(0).random((40, 8, 8)) < 0.5).astype(np.float32)
    >>> labels = np.array(["cat", "dog"] * 20)
    >>> model = ClassificationMVRBM((6, 6), mode="generative", n_epochs=1, random_state=0).fit(images, labels)
    >>> drawn, drawn_labels = model.sample(3, label="dog", steps=10, mean=True)
    >>> drawn.shape, drawn_labels.tolist()
    ((3, 8, 8), ['dog', 'dog', 'dog'])
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

    @property
    def _unit(self) -> Unit:
        return self.machine_.layers[VISIBLE]

    def fit(
        self,
        X: Any,
        y: Any,
        sample_weight: Any = None,
        *,
        callbacks: Sequence[Callback] = (),
        checkpoints: Any = None,
        force: bool = False,
    ) -> Self:
        """Learn from data with labels and, optionally, weights; see :meth:`MVRBMClassifier.fit`.

        Labels are numbers, texts or one-hot rows. Generative learning requires equal weights; `callbacks` follow it.
        """
        choice(self.mode, "mode", _MODES)
        number(self.blend, "blend")
        data = self._read_labeled(X, y, sample_weight, resolve_device(self.device))
        plan = self._plan(len(data.codes), 3e-3 if self.learning_rate is None else self.learning_rate)
        seed = seed_of(self.random_state)
        self.machine_ = self._machine().to(data.weights)
        self.chains_: Chains = {}
        self.n_epochs_, self.n_updates_, self.interrupted_ = 0, 0, False
        if self.mode == "generative":
            self._learn_jointly(data, seed, callbacks, checkpoints, force)
        else:
            self._learn_posterior(data, plan, seed, checkpoints, force)
        return self

    def _machine(self) -> BoltzmannMachine:
        visible = unit_named(self.visible, self.visible_shape_)
        shape = visible.shape if self.hidden_shape is None else as_shape(self.hidden_shape, "hidden_shape")
        hidden = unit_named("bernoulli", shape)
        link = Kronecker(self.rank) if self.coupling is None else unconnected(self.coupling)
        layers = {VISIBLE: visible, LABEL: Categorical(len(self.classes_))}
        return BoltzmannMachine(layers, hidden, {VISIBLE: link, LABEL: Dense()})

    def _one_hot(self, codes: Tensor) -> Tensor:
        return one_hot(codes, len(self.classes_)).to(self.machine_.like.dtype)

    def _learn_jointly(
        self, data: Labeled, seed: int, callbacks: Sequence[Callback], checkpoints: Any, force: bool
    ) -> None:
        if bool((data.weights != data.weights[0]).any()):
            raise ValueError("sample_weight must be equal for all samples in mode='generative', use another mode")
        trainer = Trainer(self.machine_, self._recipe(), seed=seed, callbacks=callbacks)
        if not isinstance(self.random_state, int | np.integer):
            trainer.seed = None  # nobody has chosen it
        if checkpoints is not None:
            trainer.callbacks = [*callbacks, Checkpoint(checkpoints)]
            trainer.resume(checkpoints, force=force)
        trainer.fit({VISIBLE: data.samples, LABEL: self._one_hot(data.codes)}, initialize=True)
        self.history_, self.chains_, self.interrupted_ = trainer.history, kept_chains(trainer), trainer.interrupted
        self.n_epochs_, self.n_updates_ = trainer.epoch, trainer.update
        trainer.raise_if_interrupted()
        rng = RandomSource(seed, device=data.weights.device)
        match_labels(trainer, LABEL, self._one_hot(data.codes).mean(0), rng)

    def _recipe(self) -> Recipe:
        """Return the recipe of generative learning, with the values that parameters set."""
        names = ("n_epochs", "batch_size", "learning_rate")
        return dataclasses.replace(
            as_recipe(self.recipe), **without_none({name: getattr(self, name) for name in names})
        )

    def _learn_posterior(self, data: Labeled, plan: DescentSettings, seed: int, checkpoints: Any, force: bool) -> None:
        machine, unit = self.machine_, self._unit
        start, order, chains = RandomSource(seed, device=data.weights.device).split(3)
        self._initialize(data, start)

        def loss(rows: Tensor) -> Tensor:
            x, codes, weights = unit.from_data(data.samples[rows]), data.codes[rows], data.weights[rows]
            posterior = label_log_posterior(machine, {VISIBLE: x}).gather(1, codes[:, None])[:, 0]
            value = -(weights * posterior).sum()
            if self.mode == "hybrid":
                batch = {VISIBLE: x, LABEL: self._one_hot(codes)}
                with torch.no_grad():
                    hidden = machine.sample_hidden(batch, chains, check=False)
                    chain = machine.sample_visible(hidden, chains, check=False)
                contrast = machine.free_energy(batch, check=False) - machine.free_energy(chain, check=False)
                value = value + self.blend * (weights * contrast).sum()
            return value

        decaying = [p for link in machine.links.values() for p in link.parameters() if p.requires_grad]
        # p(k | X) does not depend on the parameters of the data's units.
        frozen = [p for p in unit.parameters() if p.requires_grad] if self.mode == "discriminative" else []
        try:
            for parameter in frozen:
                parameter.requires_grad_(False)
            with sensible_threads(machine, plan.batch_size):
                kept = stored_descent(checkpoints, self, plan, data, (chains,), force)
                self.history_ = descend(
                    machine, decaying, loss, data.weights, plan, order, draws_from=(chains,), checkpoint=kept
                )
        finally:
            for parameter in frozen:
                parameter.requires_grad_(True)

    @torch.no_grad()
    def _initialize(self, data: Labeled, rng: RandomSource) -> None:
        """Set visible units to the data's moments, and hidden fields to a spread of one around zero."""
        machine, weights = self.machine_, data.weights
        share, count = weights / weights.sum(), max(1, round(float(weights.sum())))
        power = 0.0
        x = self._unit.from_data(data.samples)
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

    def _log_probabilities(self, x: Tensor) -> Tensor:
        return torch.cat([label_log_posterior(self.machine_, {VISIBLE: part}) for part in x.split(_ROWS_AT_ONCE)])

    @torch.no_grad()
    def free_energy(self, X: Any) -> Array:
        """Free energy of each sample, (n,), with the label summed out: the negative log-likelihood minus log Z."""
        check_is_fitted(self)
        parts = [part for batch in self._batches(X) for part in batch.split(_ROWS_AT_ONCE)]
        sums = [torch.logsumexp(label_scores(self.machine_, {VISIBLE: part}), 1) for part in parts]
        found = [self._unit.energy(part) - each for part, each in zip(parts, sums, strict=True)]
        return torch.cat(found).cpu().numpy()

    def sample(
        self, n: int | None = None, *, label: Any = None, steps: int = 1000, init: str | None = None, mean: bool = False
    ) -> tuple[Array, Array]:
        r"""Draw samples X, (n, \*visible_shape) or rows, and labels y, (n,), by Gibbs sampling.

        Parameters
        ----------
        n : int, optional
            Number of samples. Default: 1, or one for each label.
        label : label or array of labels, optional
            One of `classes_`, or one for each sample. It is held fixed. Default: labels are drawn, too.
        steps : int
            Gibbs steps of each chain.
        init : {"chains", "noise"}, optional
            Where chains start: at the persistent chains of training (at those with the label, if there are any), or at
            random states. Default: the persistent chains if the model was trained with such chains.
        mean : bool
            Whether X are the means of the visible units given the last hidden draw, instead of draws. Labels that are
            not fixed are then the most probable ones.
        """
        check_is_fitted(self)
        machine = self.machine_
        rng = RandomSource(seed_of(self.random_state), device=machine.like.device)
        if label is None:
            n = 1 if n is None else whole_number(n, "n")
            start, known = start_of(machine, n, init, self.chains_, rng), None
        else:
            codes = label_codes(label, self.classes_, n)
            start, known = start_with_labels(machine, {LABEL: codes}, init, self.chains_, rng)
            n = len(codes)
        self._warn_of_recipe()
        with sensible_threads(machine, n):
            state = sample(machine, n, steps, rng, init=start, mask=known, mean=mean).visible
        labels: Array = self.classes_[state[LABEL].argmax(1).cpu().numpy()]
        return self._outward(state[VISIBLE]), labels

    def _warn_of_recipe(self) -> None:
        reason = f"with mode='{self.mode}'" if self.mode != "generative" else None
        self._warn_once(reason or unsuited_reason(self.recipe, self._recipe()), "mode='generative' and ")

    def _write(self, folder: Path, extra: Mapping[str, Any]) -> None:
        write_machine(self.machine_, folder, extra)
        write_chains(self.chains_, folder)

    def _description(self) -> dict[str, Any]:
        return {**super()._description(), "n_epochs": self.n_epochs_, "n_updates": self.n_updates_}

    def _restore(self, folder: Path, described: Mapping[str, Any]) -> None:
        n_classes, machine = self._restore_classes(described), read_machine(folder)
        if list(machine.layers) != [VISIBLE, LABEL]:
            raise StorageError(f"{folder}: the layers must be {[VISIBLE, LABEL]}, got {list(machine.layers)}")
        if machine.layers[LABEL].shape != (n_classes,) or machine.layers[LABEL].name != Categorical.name:
            raise StorageError(f"{folder}: the label layer does not fit {n_classes} classes")
        if not machine.hidden.has_energy:
            raise StorageError(f"{folder}: there are no probabilities of classes with {machine.hidden}")
        self.machine_ = machine.to(resolve_device(self.device))
        self.chains_, self.interrupted_ = read_chains(folder, self.machine_), False
        self.n_epochs_, self.n_updates_ = int(described.get("n_epochs", 0)), int(described.get("n_updates", 0))
        self._restore_input(self._unit, described)
