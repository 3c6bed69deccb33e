"""The multimodal MVRBM: several arrays per sample, one hidden layer."""

from collections.abc import Mapping, Sequence
from dataclasses import KW_ONLY, dataclass
from pathlib import Path
from typing import Any

from torch import Tensor

from mvrbm.couplings import Coupling, Kronecker
from mvrbm.estimators.base import ArrayRBM
from mvrbm.estimators.inputs import Array, by_modality, is_named, model_dtype, read_modalities, unit_named
from mvrbm.estimators.parameters import unconnected
from mvrbm.saving import register
from mvrbm.units import Unit


@register("MMVRBM")
@dataclass(eq=False, repr=False)
class MMVRBM(ArrayRBM):
    r"""Multimodal MVRBM: several arrays per sample, one hidden layer.

    :math:`E = \sum_m [\varepsilon_m(X_m) - \langle Y, U_m X_m V_m^\top\rangle] - \langle C, Y\rangle`.

    Data is a dict of arrays by modality, or a tuple of arrays, whose modalities are then called "0", "1", and so on.
    Use `inpaint` to fill in unknown entries of a modality, or a whole modality. `components_`, `intercept_visible_`
    and `components` are dicts by modality. See :class:`MVRBM` for the other parameters and the attributes.

    Parameters
    ----------
    hidden_shape : tuple of int, optional
        Shape of the hidden layer. Default: the shape of the first modality.
    rank : int
        Rank of every coupling.
    coupling : Coupling, str, or dict of these, optional
        Couplings, the same kind for all modalities or one for each. Default: ``Kronecker(rank)``.
    visible : str or dict of str to str
        Name of the units of the data, for all modalities or for each.

    Attributes
    ----------
    modalities_ : list of str
        Names of the modalities.
    """

    hidden_shape: Any = None
    _: KW_ONLY
    rank: int = 1
    coupling: Any = None

    def _layers(self, X: Any, *, reset: bool) -> dict[str, Array]:
        shapes = None if reset else {name: unit.shape for name, unit in self.machine_.layers.items()}
        layers = read_modalities(X, shapes)
        self.modalities_: list[str] = list(layers)
        return layers

    def _units(self, layers: Mapping[str, Any]) -> dict[str, Unit]:
        kinds, dtype = _for_each(self.visible, list(layers), "visible"), model_dtype(layers)
        return {name: unit_named(kinds[name], array.shape[1:]).to(dtype) for name, array in layers.items()}

    def _coupling(self, layer: str) -> Coupling:
        if self.coupling is None:
            return Kronecker(self.rank)
        return unconnected(_for_each(self.coupling, self.modalities_, "coupling")[layer])

    def _masks_by_layer(self, mask: Any) -> Mapping[str, Any]:
        return by_modality(mask)

    def _to_user(self, layers: Mapping[str, Tensor], like: Any = None) -> dict[str, Array]:
        return {name: array.detach().cpu().numpy() for name, array in layers.items()}

    def _restore(self, folder: Path, described: Mapping[str, Any]) -> None:
        super()._restore(folder, described)
        layers = self.machine_.layers
        kinds = _for_each(self.visible, list(layers), "visible")
        if not all(is_named(unit, kinds[name]) for name, unit in layers.items()):
            units = {name: unit.name for name, unit in layers.items()}
            raise ValueError(f"visible is {self.visible!r:.100}, but its units are {units}")
        self.modalities_ = list(layers)


def _for_each(value: Any, names: Sequence[str], parameter: str) -> dict[str, Any]:
    """Return the value of a parameter by modality, from a dict or from one value for all."""
    values = dict(value) if isinstance(value, Mapping) else dict.fromkeys(names, value)
    if set(values) != set(names):
        raise ValueError(f"{parameter} names modalities {sorted(values)}, but the data has {sorted(names)}")
    return values
