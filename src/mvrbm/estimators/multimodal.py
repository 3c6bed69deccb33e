"""Multimodal MVRBM, in which several arrays per sample share one hidden layer. A modality can be a label."""

from collections.abc import Mapping, Sequence
from dataclasses import KW_ONLY, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from sklearn.utils.validation import check_is_fitted
from torch import Tensor

from mvrbm.couplings import Coupling, Dense, Kronecker
from mvrbm.devices import sensible_threads
from mvrbm.estimators.array_rbm import ArrayRBM
from mvrbm.estimators.base import check_finite, no_closed_form, to_array
from mvrbm.estimators.batches import (
    Array,
    batches,
    joined,
    known_entries,
    model_dtype,
    n_samples,
    scaled_as_in_training,
    unit_for,
)
from mvrbm.estimators.initial_states import initial_states_with_labels, match_labels
from mvrbm.estimators.inputs import by_modality, check_modalities, read_modalities
from mvrbm.estimators.labels import (
    PartialLabels,
    class_counts_from,
    classes_from,
    describe_classes,
    draw_codes,
    label_codes,
    label_vector,
)
from mvrbm.estimators.parameters import is_named, unconnected
from mvrbm.machine import BoltzmannMachine
from mvrbm.sampling import label_log_posterior
from mvrbm.saving import register
from mvrbm.training.callbacks import Callback
from mvrbm.training.trainer import Trainer
from mvrbm.units import Unit
from mvrbm.updates.recipe import Recipe
from mvrbm.validation import whole_number


@register("MMVRBM")
@dataclass(eq=False, repr=False)
class MMVRBM(ArrayRBM):
    r"""Multimodal MVRBM, in which several arrays per sample share one hidden layer.

    .. math:: E = \sum_m [\varepsilon_m(X_m) - \langle Y, U_m X_m V_m^\top\rangle] - \langle C, Y\rangle

    Here, :math:`X_m` is modality :math:`m`, :math:`\varepsilon_m(X_m)` is the energy of its units, :math:`Y` is the
    hidden layer, :math:`C` is its bias, and :math:`U_m` and :math:`V_m` are weights.

    The data is a dict of arrays keyed by modality, or a tuple of arrays. The modalities in a tuple are named "0", "1",
    and so on. A modality can also be an array of one-hot rows or a vector of labels: integers or strings, with None,
    NaN or NA for unknown labels. Such a modality becomes a categorical layer with a ``Dense`` coupling, and `sample`
    can then generate samples with a given label.

    `predict` predicts missing modalities from the given modalities, and `inpaint` fills in unknown entries. The model
    learns the joint distribution of all modalities. If you only need to predict one label, a discriminative classifier
    such as :class:`~mvrbm.MVRBMClassifier` is more accurate.

    `components_`, `intercept_visible_` and the result of `components` are dicts keyed by modality.

    Parameters
    ----------
    hidden_shape : tuple of int, optional
        Shape of the hidden layer. Default: the shape of the first modality.
    rank : int, default=1
        Rank of the Kronecker couplings.
    coupling : Coupling, str, or dict of str to Coupling or str, optional
        Coupling for all modalities, or a dict with one coupling per modality. The dict can omit labels. Default:
        ``Dense()`` for labels and for modalities whose samples have a different number of axes than the hidden layer,
        and ``Kronecker(rank)`` for all other modalities.
    visible : str or dict of str to str, default="bernoulli"
        Unit type for all modalities, or a dict with one unit type per modality. The dict can omit labels.
    recipe : str or Recipe, default="generative"
        Training settings. See :class:`~mvrbm.MVRBM`.
    hidden, n_epochs, batch_size, learning_rate, negative, n_chains, gibbs_steps, warm_start
        See :class:`~mvrbm.MVRBM`.
    backend, random_state, device, verbose
        See :class:`~mvrbm.MVRBM`.

    Attributes
    ----------
    modalities_ : list of str
        Names of the modalities.
    classes_ : dict of str to array
        Sorted classes of each modality that is a vector of labels.
    class_count_ : dict of str to array
        Sum of the weights of the training samples in each class, for each modality that is a label. Without sample
        weights, this is the number of samples. Empty if the model was saved by version 0.2.

    See Also
    --------
    MVRBM : The same model with one modality. Documents all other parameters and attributes.

    Examples
    --------
    >>> import numpy as np
    >>> from mvrbm import MMVRBM
    >>> images = (np.random.default_rng(0).random((40, 8, 8)) < 0.5).astype(np.float32)
    >>> animals = np.array(["cat", "dog"] * 20)
    >>> model = MMVRBM((6, 6), recipe="generative", n_epochs=1, random_state=0)
    >>> drawn = model.fit({"image": images, "animal": animals}).sample(3, label="dog", steps=10, mean=True)
    >>> drawn["image"].shape, drawn["animal"].tolist()
    ((3, 8, 8), ['dog', 'dog', 'dog'])
    >>> model.predict({"image": images}).shape, model.predict({"animal": ["cat", "dog"]}).shape
    ((40,), (2, 8, 8))

    References
    ----------
    Qi, Sun, Gao, Hu and Li, "Matrix Variate RBM and Its Applications", 2016, equation (18).
    """

    hidden_shape: Any = None
    _: KW_ONLY
    rank: int = 1
    coupling: Any = None
    recipe: str | Recipe = "generative"

    # -- data and layers --------------------------------------------------------------------------

    def _read_layers(self, X: Any, *, reset: bool) -> dict[str, Array]:
        parts = by_modality(X)
        found = {name: PartialLabels.of(part) for name, part in parts.items() if part is not None}
        vectors = {name: labels for name, labels in found.items() if labels is not None}
        if reset:
            for name, labels in vectors.items():
                if not labels.known.any():
                    raise ValueError(f"modality '{name}' must have at least one known label")
            self.classes_: dict[str, Array] = {name: np.unique(labels.values) for name, labels in vectors.items()}
            one_hot = {name for name, part in parts.items() if np.ndim(label_vector(part)) == 1 < np.ndim(part)}
            self._label_names = set(vectors) | one_hot
        shapes = None if reset else {name: unit.shape for name, unit in self.machine_.layers.items()}
        for name, labels in vectors.items():
            if reset or name in self._labels:
                parts[name] = labels.one_hot(self._classes(name))
        layers = read_modalities(parts, shapes)
        if not reset:
            layers = {name: scaled_as_in_training(x, self.machine_.layers[name]) for name, x in layers.items()}
        self.modalities_: list[str] = list(layers)
        return layers

    @property
    def _labels(self) -> list[str]:
        """Names of the modalities that are labels."""
        return [name for name, unit in self.machine_.layers.items() if _is_label(unit)]

    def _classes(self, name: str) -> Array:
        """Return the classes of a modality. For one-hot rows, the classes are 0, 1, and so on."""
        if name in self.classes_:
            return self.classes_[name]
        return np.arange(*self.machine_.layers[name].shape)

    def _new_units(self, layers: Mapping[str, Any]) -> dict[str, Unit]:
        kinds = self._kinds(list(layers))
        dtype = model_dtype(layers)
        return {name: unit_for(kinds[name], array).to(dtype) for name, array in layers.items()}

    def _kinds(self, names: Sequence[str]) -> dict[str, Any]:
        """Return the unit type of each modality."""
        return _by_modality(self.visible, names, "visible", dict.fromkeys(self._label_names, "categorical"))

    def _new_coupling(self, layer: str, units: Mapping[str, Unit]) -> Coupling:
        defaults = {name: Dense() for name, unit in units.items() if _is_label(unit)}
        if self.coupling is None:
            order = len(self._new_hidden_shape(units))
            defaults |= {name: Dense() for name, unit in units.items() if len(unit.shape) != order}
        value = Kronecker(self.rank) if self.coupling is None else self.coupling
        return unconnected(_by_modality(value, list(units), "coupling", defaults)[layer])

    def _masks_by_layer(self, mask: Any) -> Mapping[str, Any]:
        return by_modality(mask)

    def _to_user(self, layers: Mapping[str, Tensor], like: Any = None) -> dict[str, Array]:
        return {name: array.detach().cpu().numpy() for name, array in layers.items()}

    # -- training ---------------------------------------------------------------------------------

    def _set_machines(self, machines: Sequence[BoltzmannMachine]) -> None:
        super()._set_machines(machines)
        self.class_count_: dict[str, Array] = {}

    def _train(
        self, trainer: Trainer, data: Any, n_epochs: int, known: Any, callbacks: Sequence[Callback], *, initialize: bool
    ) -> None:
        super()._train(trainer, data, n_epochs, known, callbacks, initialize=initialize)
        counts = dict(self.class_count_)
        weights = np.ones(n_samples(data)) if trainer.sample_weight is None else np.asarray(trainer.sample_weight)
        for name in self._labels:
            one_hot = data[name] if known is None else np.where(known[name], data[name], 0)
            found = counts.get(name, 0) + weights @ np.asarray(one_hot, dtype=np.float64)
            if found.sum() > 0:
                counts[name] = found
        self.class_count_ = counts
        if counts and known is None and not trainer.interrupted:
            first, count = next(iter(counts.items()))
            match_labels(trainer, first, torch.from_numpy(count / count.sum()), self._rng())

    # -- prediction -------------------------------------------------------------------------------

    def predict(self, X: Any, *, steps: int = 100, burn_in: int = 50) -> Any:
        """Predict the modalities that are missing from `X`, given the other modalities.

        The model describes all modalities, not only the label. If a label is all that you need, use
        :class:`~mvrbm.MVRBMClassifier` or another classifier, which is more accurate.

        Parameters
        ----------
        X : dict or tuple of arrays
            One or more of the modalities, but not all. The other modalities must be None or omitted from the dict.
        steps, burn_in : int
            See :meth:`MVRBM.inpaint`. Ignored when predicting a single label from complete modalities, because the
            class probabilities are then computed exactly.

        Returns
        -------
        array, or dict of str to array if several modalities are predicted
            For labels, an array of shape (n,) that contains the most probable classes. For other modalities, an array
            of shape (n, *shape) that contains the means.
        """
        means = self._predicted_means(X, steps, burn_in)
        found = {
            name: self._classes(name)[array.argmax(1)] if name in self._labels else array
            for name, array in means.items()
        }
        return found if len(found) > 1 else next(iter(found.values()))

    def predict_proba(self, X: Any, *, steps: int = 100, burn_in: int = 50) -> Any:
        """Return class probabilities for the labels that are missing from `X`.

        The result is an array of shape (n, n_classes), or a dict of arrays keyed by modality if several labels are
        missing. See :meth:`predict` for the parameters.
        """
        means = self._predicted_means(X, steps, burn_in)
        found = {name: array for name, array in means.items() if name in self._labels}
        if not found:
            raise ValueError(f"X must omit at least one of the label modalities {self._labels}")
        return found if len(found) > 1 else next(iter(found.values()))

    @torch.no_grad()
    def _predicted_means(self, X: Any, steps: int, burn_in: int) -> dict[str, Array]:
        """Return the means of the modalities that are missing from `X`, keyed by modality."""
        check_is_fitted(self)
        machine = self.machine_
        given = {name: part for name, part in by_modality(X).items() if part is not None}
        check_modalities(given, list(machine.layers))
        absent = [name for name in machine.layers if name not in given]
        if not given or not absent:
            raise ValueError(
                f"X must contain at least one, but not all, of the modalities {self.modalities_}, got {list(given)}"
            )
        n = len(next(iter(given.values())))
        unknown = {name: np.broadcast_to(np.float32(np.nan), (n, *machine.layers[name].shape)) for name in absent}
        self._warn_of_recipe()
        layers = self._read_layers({**given, **unknown}, reset=False)
        others = {name: array for name, array in layers.items() if name in given}
        has_exact_posterior = len(absent) == 1 and absent[0] in self._labels and machine.hidden.has_energy
        if has_exact_posterior and known_entries(None, others) is None:
            units = {name: machine.layers[name] for name in others}
            posteriors = [label_log_posterior(machine, batch, absent[0]).exp() for batch in batches(others, units)]
            return {absent[0]: torch.cat(posteriors).cpu().numpy()}
        filled = joined(self._filled_batches(layers, None, steps, burn_in))
        return {name: filled[name].cpu().numpy() for name in absent}

    # -- scores -----------------------------------------------------------------------------------

    @torch.no_grad()
    def free_energy(self, X: Any) -> Array:
        """Return the free energy of each sample in nats, as an array of shape (n,).

        The free energy is the negative log-likelihood minus log Z. Unknown labels are summed over exactly. Other
        unknown entries raise ValueError, because the sum over them has no closed form.
        """
        check_is_fitted(self)
        energies = self._sum_over_labels(self._read_layers(X, reset=False))
        check_finite(energies)
        return energies

    def _sum_over_labels(self, layers: Mapping[str, Any]) -> Array:
        """Return the free energies of samples whose labels can be unknown."""
        for name in self._labels:
            unknown = np.isnan(layers[name]).all(1)
            if not unknown.any():
                continue
            energies = np.empty(len(unknown), dtype=to_array(self.machine_.like).dtype)
            rows = {other: array[unknown] for other, array in layers.items()}
            each = [{**rows, name: np.broadcast_to(row, rows[name].shape)} for row in np.eye(rows[name].shape[1])]
            energies[unknown] = -np.logaddexp.reduce([-self._sum_over_labels(one) for one in each])
            if not unknown.all():
                energies[~unknown] = self._sum_over_labels({other: x[~unknown] for other, x in layers.items()})
            return energies
        complete = self._complete_batches(layers, no_closed_form("free_energy"))
        return np.concatenate([to_array(self.machine_.free_energy(batch, check=False)) for batch in complete])

    # -- samples ----------------------------------------------------------------------------------

    def sample(
        self,
        n: int | None = None,
        *,
        label: Any = None,
        steps: int = 1000,
        init: Any = None,
        mask: Any = None,
        mean: bool = False,
    ) -> dict[str, Array]:
        """Draw samples from the model by Gibbs sampling, optionally with fixed labels.

        Parameters
        ----------
        n : int, optional
            Number of samples. Default: one per label, or 1 if `label` is None.
        label : label, array of labels, or dict of str to label or array of labels, optional
            One label for all samples, or one label per sample. If several modalities are labels, pass a dict keyed
            by modality. Given labels stay fixed. If None, the labels of the first modality that is a label are drawn
            with their frequencies in the training data and stay fixed, because those of Gibbs chains hardly ever
            change. Labels of other modalities are sampled. If `init` contains data, all labels are sampled.
        steps, init, mask, mean
            See :meth:`MVRBM.sample`. If `label` is given, `init` must be ``"chains"``, ``"noise"`` or None, and
            sampling starts from persistent chains with the same label if there are any.

        Returns
        -------
        dict of str to array
            Samples, keyed by modality. Labels that were vectors in the training data are returned as vectors. If `mean`
            is True, labels that are not fixed are set to the most probable class.
        """
        check_is_fitted(self)
        if label is None and self.class_count_ and mask is None and (init is None or isinstance(init, str)):
            name, counts = next(iter(self.class_count_.items()))
            codes = draw_codes(counts, whole_number(1 if n is None else n, "n"), self._rng().split(1)[0])
            label = {name: self._classes(name)[codes.numpy()]}
        if label is None:
            drawn = super().sample(1 if n is None else n, steps=steps, init=init, mask=mask, mean=mean)
        else:
            drawn = self._to_user(self._sample_with_labels(label, n, steps, init, mask, mean))
        for name in self.classes_:
            drawn[name] = self.classes_[name][drawn[name].argmax(1)]
        found: dict[str, Array] = drawn
        return found

    def _sample_with_labels(
        self, label: Any, n: int | None, steps: int, init: Any, mask: Any, mean: bool
    ) -> dict[str, Tensor]:
        if mask is not None or not (init is None or isinstance(init, str)):
            raise ValueError(
                "label cannot be combined with mask or with data passed as init; include the labels in init instead"
            )
        given = dict(label) if isinstance(label, Mapping) else dict.fromkeys(self._labels, label)
        if not given or not set(given) <= set(self._labels) or (len(given) > 1 and not isinstance(label, Mapping)):
            raise ValueError(f"label must be a dict whose keys are one or more of {self._labels}")
        codes = {name: label_codes(value, self._classes(name), n) for name, value in given.items()}
        n = max(map(len, codes.values()))
        codes = {name: part.expand(n) for name, part in codes.items()}
        rng = self._rng()
        start, known = initial_states_with_labels(self.machine_, codes, init, self.chains_, rng)
        self._warn_of_recipe()
        with sensible_threads(self.machine_, n):
            return self._run_chains(n, steps, rng, start, known, mean)

    # -- files ------------------------------------------------------------------------------------

    def _description(self) -> dict[str, Any]:
        classes = {name: describe_classes(values) for name, values in self.classes_.items()}
        counts = {name: found.tolist() for name, found in self.class_count_.items()}
        return {**super()._description(), "classes": classes, "class_count": counts}

    def _restore(self, folder: Path, described: Mapping[str, Any]) -> None:
        super()._restore(folder, described)
        layers = self.machine_.layers
        self._label_names = set(self._labels)
        self.classes_ = {name: classes_from(entry) for name, entry in described.get("classes", {}).items()}
        for name, classes in self.classes_.items():
            if layers[name].shape != classes.shape:
                raise ValueError(f"layer '{name}' of shape {layers[name].shape} does not match {len(classes)} classes")
        counts = {name: described.get("class_count", {}).get(name) for name in self._labels}
        found = {name: class_counts_from(entry, *layers[name].shape) for name, entry in counts.items()}
        self.class_count_ = {name: entry for name, entry in found.items() if entry is not None}
        kinds = self._kinds(list(layers))
        if not all(is_named(unit, kinds[name]) for name, unit in layers.items()):
            units = {name: unit.name for name, unit in layers.items()}
            raise ValueError(f"visible is {self.visible!r:.100}, but the saved model has units {units}")
        self.modalities_ = list(layers)


def _is_label(unit: Unit) -> bool:
    """Return whether a layer is a label (a single one-hot row per sample)."""
    return unit.entry_modes == 1 == len(unit.shape)


def _by_modality(value: Any, names: Sequence[str], parameter: str, defaults: Mapping[str, Any]) -> dict[str, Any]:
    """Return a dict with the value of a parameter for each modality.

    If `value` is a dict, it can omit modalities that have a default. Otherwise, `value` applies to all modalities
    without a default.
    """
    by_name = isinstance(value, Mapping)
    values = {**defaults, **value} if by_name else {**dict.fromkeys(names, value), **defaults}
    if set(values) != set(names):
        raise ValueError(f"{parameter} has modalities {sorted(values)}, but the data has {sorted(names)}")
    return values
