"""The multimodal MVRBM: several arrays per sample, one hidden layer. Labels can be one of them."""

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
from mvrbm.estimators.base import ArrayRBM
from mvrbm.estimators.chains import label_codes, match_labels, start_with_labels
from mvrbm.estimators.inputs import (
    Array,
    by_modality,
    classes_from,
    describe_classes,
    is_named,
    model_dtype,
    read_modalities,
    unit_named,
)
from mvrbm.estimators.parameters import unconnected
from mvrbm.learning.callbacks import Callback
from mvrbm.learning.trainer import Trainer
from mvrbm.saving import register
from mvrbm.units import Unit


@register("MMVRBM")
@dataclass(eq=False, repr=False)
class MMVRBM(ArrayRBM):
    r"""Multimodal MVRBM: several arrays per sample, one hidden layer.

    :math:`E = \sum_m [\varepsilon_m(X_m) - \langle Y, U_m X_m V_m^\top\rangle] - \langle C, Y\rangle`.

    Data is a dict of arrays by modality, or a tuple of arrays, whose modalities are then called "0", "1", and so on.
    A modality can be a vector of labels (integers or texts), which becomes a categorical layer with a Dense coupling,
    as do one-hot rows with units ``"categorical"``; `sample` then draws samples of a given label.
    Use `inpaint` to fill in unknown entries of a modality, or a whole modality. `components_`, `intercept_visible_`
    and `components` are dicts by modality. See :class:`MVRBM` for the other parameters and the attributes.

    Parameters
    ----------
    hidden_shape : tuple of int, optional
        Shape of the hidden layer. Default: the shape of the first modality.
    rank : int
        Rank of every coupling.
    coupling : Coupling, str, or dict of these, optional
        Couplings, the same kind for all modalities or one for each; labels can be left out. Default:
        ``Kronecker(rank)``, and ``Dense()`` for labels.
    visible : str or dict of str to str
        Name of the units of the data, for all modalities or for each. Vectors of labels can be left out.

    Attributes
    ----------
    modalities_ : list of str
        Names of the modalities.
    classes_ : dict of str to array
        Labels, by modality, of the modalities that are vectors of labels.

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
    """

    hidden_shape: Any = None
    _: KW_ONLY
    rank: int = 1
    coupling: Any = None

    def _layers(self, X: Any, *, reset: bool) -> dict[str, Array]:
        parts = by_modality(X)
        vectors = {name: array for name, part in parts.items() if (array := np.asarray(part)).ndim == 1}
        vectors = {name: array for name, array in vectors.items() if array.dtype.kind in "biuUO"}
        if reset:
            self.classes_: dict[str, Array] = {name: np.unique(array) for name, array in vectors.items()}
        shapes = None if reset else {name: unit.shape for name, unit in self.machine_.layers.items()}
        for name, array in vectors.items():
            if reset or name in self._labels:
                classes = self._classes(name)
                parts[name] = np.eye(len(classes), dtype=np.uint8)[label_codes(array, classes, len(array)).numpy()]
        layers = read_modalities(parts, shapes)
        self.modalities_: list[str] = list(layers)
        return layers

    @property
    def _labels(self) -> list[str]:
        """Names of the modalities that are labels: one one-hot row per sample."""
        return [name for name, unit in self.machine_.layers.items() if _is_label(unit)]

    def _classes(self, name: str) -> Array:
        """Return the labels of a modality; those of one-hot rows are numbers."""
        found: Array = self.classes_[name] if name in self.classes_ else np.arange(*self.machine_.layers[name].shape)
        return found

    def _units(self, layers: Mapping[str, Any]) -> dict[str, Unit]:
        kinds, dtype = self._kinds(list(layers)), model_dtype(layers)
        return {name: unit_named(kinds[name], array.shape[1:]).to(dtype) for name, array in layers.items()}

    def _kinds(self, names: Sequence[str]) -> dict[str, Any]:
        return _for_each(self.visible, names, "visible", dict.fromkeys(self.classes_, "categorical"))

    def _coupling(self, layer: str, units: Mapping[str, Unit]) -> Coupling:
        value = Kronecker(self.rank) if self.coupling is None else self.coupling
        labels = {name: Dense() for name, unit in units.items() if _is_label(unit)}
        return unconnected(_for_each(value, list(units), "coupling", labels)[layer])

    def _train(
        self, trainer: Trainer, data: Any, n_epochs: int, known: Any, callbacks: Sequence[Callback], *, initialise: bool
    ) -> None:
        super()._train(trainer, data, n_epochs, known, callbacks, initialise=initialise)
        if len(self._labels) == 1 and known is None:
            (name,) = self._labels
            match_labels(trainer, name, torch.from_numpy(np.asarray(data[name]).mean(0)), self._rng())

    def _masks_by_layer(self, mask: Any) -> Mapping[str, Any]:
        return by_modality(mask)

    def _to_user(self, layers: Mapping[str, Tensor], like: Any = None) -> dict[str, Array]:
        return {name: array.detach().cpu().numpy() for name, array in layers.items()}

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
        """Draw from the model by Gibbs sampling, with labels held fixed if they are given.

        Parameters
        ----------
        n : int, optional
            Number of samples. Default: 1, or one for each label.
        label : label, array of labels, or dict of these, optional
            The label of all samples, or one for each sample; by modality if several modalities are labels. Default:
            labels are drawn, too.
        steps, init, mask, mean
            As for :meth:`MVRBM.sample`. With labels, `init` is ``"chains"``, ``"noise"`` or None, and chains start at
            persistent chains that have the label, if there are any.

        Returns
        -------
        dict of str to array
            Samples by modality. Labels that were given as a vector are returned as a vector; with `mean`, labels that
            are not fixed are the most probable ones.
        """
        check_is_fitted(self)
        if label is None:
            drawn = super().sample(1 if n is None else n, steps=steps, init=init, mask=mask, mean=mean)
        else:
            drawn = self._to_user(self._of_labels(label, n, steps, init, mask, mean))
        for name in self.classes_:
            drawn[name] = self.classes_[name][drawn[name].argmax(1)]
        found: dict[str, Array] = drawn
        return found

    def _of_labels(self, label: Any, n: int | None, steps: int, init: Any, mask: Any, mean: bool) -> dict[str, Tensor]:
        if mask is not None or not (init is None or isinstance(init, str)):
            raise ValueError("label cannot be combined with states in init or a mask: put the labels into init instead")
        given = dict(label) if isinstance(label, Mapping) else dict.fromkeys(self._labels, label)
        if not given or not set(given) <= set(self._labels) or (len(given) > 1 and not isinstance(label, Mapping)):
            raise ValueError(f"label must be given by modality, for modalities that are labels: {self._labels}")
        codes = {name: label_codes(value, self._classes(name), n) for name, value in given.items()}
        n = max(map(len, codes.values()))
        codes = {name: part.expand(n) for name, part in codes.items()}
        rng = self._rng()
        start, known = start_with_labels(self.machine_, codes, init, self.chains_, rng)
        self._warn_of_recipe()
        with sensible_threads(self.machine_, n):
            return self._draw(n, steps, rng, start, known, mean)

    def _description(self) -> dict[str, Any]:
        classes = {name: describe_classes(values) for name, values in self.classes_.items()}
        return {**super()._description(), "classes": classes}

    def _restore(self, folder: Path, described: Mapping[str, Any]) -> None:
        super()._restore(folder, described)
        layers = self.machine_.layers
        self.classes_ = {name: classes_from(entry) for name, entry in described.get("classes", {}).items()}
        for name, classes in self.classes_.items():
            if layers[name].shape != classes.shape:
                raise ValueError(f"layer '{name}' of shape {layers[name].shape} does not fit {len(classes)} classes")
        kinds = self._kinds(list(layers))
        if not all(is_named(unit, kinds[name]) for name, unit in layers.items()):
            units = {name: unit.name for name, unit in layers.items()}
            raise ValueError(f"visible is {self.visible!r:.100}, but its units are {units}")
        self.modalities_ = list(layers)


def _is_label(unit: Unit) -> bool:
    return unit.entry_modes == 1 == len(unit.shape)


def _for_each(
    value: Any, names: Sequence[str], parameter: str, defaults: Mapping[str, Any] | None = None
) -> dict[str, Any]:
    """Return the value of a parameter by modality: from a dict, which can leave out defaults, or from one value.

    Defaults come before one value for all.
    """
    values = dict(value) if isinstance(value, Mapping) else dict.fromkeys(names, value)
    values = {**(defaults or {}), **values} if isinstance(value, Mapping) else {**values, **(defaults or {})}
    if set(values) != set(names):
        raise ValueError(f"{parameter} names modalities {sorted(values)}, but the data has {sorted(names)}")
    return values
