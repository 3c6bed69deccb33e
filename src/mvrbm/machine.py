"""The Boltzmann machine: visible layers, one hidden layer, and the couplings between them.

The machine adds up energies and fields, and validates data. The distributions are defined in `units`, the weights in
`couplings`, and Markov chains in `sampling`.
"""

import functools
import hashlib
import math
import operator
from collections.abc import Mapping
from typing import Any, cast

import numpy as np
import torch
from torch import Tensor, nn

from mvrbm.couplings.base import DEFAULT_STD, Coupling, center
from mvrbm.random import RandomSource
from mvrbm.spectral_norm import spectral_norm
from mvrbm.units.base import LARGEST_PARAMETER, Unit

#: A batch of visible data: a mapping from layer names to arrays, or a single array if there is only one layer.
Visible = Tensor | Mapping[str, Tensor]

# Maximum number of hidden entries and of intermediate values for computing the norm of a coupling between two Gaussian
# layers from its Gram matrix. Above these limits, Lanczos iteration is used.
_LARGEST_GRAM = 1024
_MOST_NUMBERS = 2**22
#: Largest initial spectral norm of the coupling between Gaussian layers, unless the user chooses the initial weights.
INITIAL_NORM = 0.5


class BoltzmannMachine(nn.Module):
    r"""Energy-based model of named visible arrays :math:`X_m` and one hidden array :math:`Y`.

    .. math::

        E(X, Y) = \sum_m \varepsilon_m(X_m) + \varepsilon_h(Y)
                  - \sum_m \langle T_h(Y), W_m\, T_m(X_m) \rangle

    The units define :math:`\varepsilon` and :math:`T`, and the couplings define :math:`W`. Given the visible layers,
    the hidden sites are independent of each other, and given the hidden layer, the visible sites are independent. The
    couplings compute the field that determines the distribution of each site.

    Parameters
    ----------
    visible : Unit or mapping of str to Unit
        Visible layers by name. A single unit becomes a layer named ``"visible"``.
    hidden : Unit
        Hidden layer.
    couplings : Coupling or mapping of str to Coupling
        One coupling per visible layer, keyed by the name of the layer.
    seed : int or RandomSource
        Seed or random source for the initial weights.
    std : float, optional
        Standard deviation of the initial entries of each `W`. Default: 0.01, or a smaller value if 0.01 would make the
        energy of coupled Gaussian layers unbounded.

    Examples
    --------
    >>> from mvrbm import Bernoulli, BoltzmannMachine, Kronecker
    >>> machine = BoltzmannMachine(
    ...     Bernoulli((28, 28)), Bernoulli((25, 25)), Kronecker(rank=1)
    ... )
    >>> machine.n_parameters
    2809

    Notes
    -----
    Methods that accept data expect a mapping from layer names to arrays of shape (n, \*layer shape). A machine with one
    visible layer also accepts the array itself. Data is validated unless ``check=False``. Disable validation for data
    that has already been validated and for means, which are not always valid states.

    Calling the machine, as in ``machine(x)``, computes the means of the hidden layer.
    """

    def __init__(
        self,
        visible: Unit | Mapping[str, Unit],
        hidden: Unit,
        couplings: Coupling | Mapping[str, Coupling],
        *,
        seed: int | RandomSource = 0,
        std: float | None = None,
    ) -> None:
        super().__init__()
        layers = {"visible": visible} if isinstance(visible, Unit) else dict(visible)
        if not layers:
            raise ValueError("visible must contain at least one layer, got none")
        links = {next(iter(layers)): couplings} if isinstance(couplings, Coupling) else dict(couplings)
        if set(links) != set(layers):
            raise ValueError(
                f"couplings must have the same names as the visible layers {sorted(layers)}, got {sorted(links)}"
            )
        rng = seed if isinstance(seed, RandomSource) else RandomSource(seed)
        new = {name for name, link in links.items() if not link.connected}
        for name, layer in layers.items():
            if reason := layer.unsupported_reason(hidden) or hidden.unsupported_reason(layer):
                raise ValueError(f"layer '{name}' cannot be coupled with the hidden layer: {reason}")
            if name in new:
                links[name].connect(layer.shape, hidden.shape, rng, DEFAULT_STD if std is None else std)
            shapes = links[name].visible_shape, links[name].hidden_shape
            if shapes != (layer.shape, hidden.shape):
                raise ValueError(
                    f"the coupling for layer '{name}' connects shapes {shapes[0]} and {shapes[1]}, "
                    f"but the layers have shapes {layer.shape} and {hidden.shape}"
                )
        self.visible = nn.ModuleDict(layers)
        self.hidden = hidden
        self.couplings = nn.ModuleDict({name: links[name] for name in layers})
        if std is None and new == set(layers):
            self._scale_to_norm(INITIAL_NORM)
        # Hash of the initial parameters, or None if the couplings already had parameters.
        self._initial_digest = self._digest() if new == set(layers) else None
        self.check_bounded()

    # -- parts ------------------------------------------------------------------------------------

    @functools.cached_property
    def layers(self) -> dict[str, Unit]:
        """Visible units, keyed by layer name."""
        return {name: cast(Unit, unit) for name, unit in self.visible.items()}

    @functools.cached_property
    def links(self) -> dict[str, Coupling]:
        """Couplings, keyed by the name of the visible layer that they connect to the hidden layer."""
        return {name: cast(Coupling, coupling) for name, coupling in self.couplings.items()}

    @property
    def n_parameters(self) -> int:
        """Number of learned parameters: biases, variances and factors."""
        return sum(p.numel() for p in self.parameters() if p.requires_grad)

    @property
    def is_new(self) -> bool:
        """Whether the constructor initialized all couplings, and all parameters still have their initial values.

        False after the parameters were trained, loaded or assigned, and if a coupling was connected before it was
        passed to the constructor, for example because it comes from another machine.
        """
        return self._initial_digest is not None and self._initial_digest == self._digest()

    def _digest(self) -> str | None:
        """Return a hash of all parameters in single precision, or None for meta tensors, which have no values."""
        if self.like.is_meta:
            return None
        found = hashlib.sha256()
        for parameter in self.parameters():
            found.update(parameter.detach().to("cpu", torch.float32).contiguous().numpy().data)
        return found.hexdigest()

    @property
    def like(self) -> Tensor:
        """One of the machine's parameters, used to look up the machine's dtype and device."""
        return self.hidden.bias

    # -- fields between the layers, without validation --------------------------------------------

    def hidden_field(self, visible: Mapping[str, Tensor]) -> Tensor:
        r"""Compute the field on the hidden layer, :math:`\sum_m W_m T_m(X_m)`.

        The result has shape (n, \*hidden shape).
        """
        units = self.layers
        fields = [coupling.to_hidden(units[name].statistic(visible[name])) for name, coupling in self.links.items()]
        return functools.reduce(operator.add, fields)

    def visible_fields(self, hidden: Tensor) -> dict[str, Tensor]:
        r"""Compute the field on each visible layer, :math:`W_m^\top T_h(Y)`.

        The result is keyed by layer name. Each field has shape (n, \*layer shape).
        """
        statistic = self.hidden.statistic(hidden)
        return {name: coupling.to_visible(statistic) for name, coupling in self.links.items()}

    # -- energies ---------------------------------------------------------------------------------

    def energy(self, visible: Visible, hidden: Tensor, *, check: bool = True) -> Tensor:
        r"""Compute the energy :math:`E(X, Y)` of each joint state.

        `hidden` has shape (n, \*hidden shape), and the result has shape (n,).
        """
        layers = self.as_layers(visible, check=check)
        y = self._as_layer(hidden, "hidden", self.hidden, check)
        interaction = (self.hidden.statistic(y) * self.hidden_field(layers)).flatten(1).sum(1)
        return self.own_energy(layers) + self.hidden.energy(y) - interaction

    def free_energy(self, visible: Visible, *, check: bool = True) -> Tensor:
        r"""Compute the free energy :math:`F(X) = -\log \sum_Y e^{-E(X, Y)}` of each visible state.

        The result has shape (n,).
        """
        layers = self.as_layers(visible, check=check)
        return self.own_energy(layers) - self.hidden.log_normalizer(self.hidden_field(layers))

    def own_energy(self, visible: Mapping[str, Tensor]) -> Tensor:
        r"""Compute the energy of the visible units alone, :math:`\sum_m \varepsilon_m(X_m)`.

        The result has shape (n,). The data is not validated.
        """
        return functools.reduce(operator.add, [unit.energy(visible[name]) for name, unit in self.layers.items()])

    # -- conditional distributions ----------------------------------------------------------------

    def forward(self, visible: Visible) -> Tensor:
        r"""Compute the mean of the hidden layer given visible states or means.

        Unlike :meth:`hidden_mean`, this method does not validate values, so a machine can follow another module in
        `torch.nn.Sequential` and can be transformed by `torch.func`. Shapes are still validated. The result has shape
        (n, \*hidden shape).
        """
        return self.hidden.mean(self.hidden_field(self.as_layers(visible, values=False)))

    def hidden_mean(self, visible: Visible, *, check: bool = True) -> Tensor:
        r"""Compute the mean of the hidden layer given visible states. The result has shape (n, \*hidden shape)."""
        return self.hidden.mean(self.hidden_field(self.as_layers(visible, check=check)))

    def sample_hidden(self, visible: Visible, rng: RandomSource, *, check: bool = True) -> Tensor:
        r"""Sample the hidden layer given visible states. The result has shape (n, \*hidden shape)."""
        return self.hidden.sample(self.hidden_field(self.as_layers(visible, check=check)), rng)

    def visible_mean(self, hidden: Tensor, *, check: bool = True) -> dict[str, Tensor]:
        r"""Compute the mean of each visible layer given hidden states or hidden means.

        The result is keyed by layer name. Each array has shape (n, \*layer shape).
        """
        fields = self.visible_fields(self._as_layer(hidden, "hidden", self.hidden, check, values=False))
        return {name: unit.mean(fields[name]) for name, unit in self.layers.items()}

    def sample_visible(self, hidden: Tensor, rng: RandomSource, *, check: bool = True) -> dict[str, Tensor]:
        r"""Sample each visible layer given hidden states.

        The result is keyed by layer name. Each array has shape (n, \*layer shape).
        """
        fields = self.visible_fields(self._as_layer(hidden, "hidden", self.hidden, check, values=False))
        return {name: unit.sample(fields[name], rng) for name, unit in self.layers.items()}

    # -- learning ---------------------------------------------------------------------------------

    def free_energy_gradient(self, visible: Mapping[str, Tensor], field: Tensor | None = None) -> dict[str, Tensor]:
        """Compute the gradient of the mean free energy with respect to each learned parameter.

        The gradient is computed without autograd, and the data is not validated. If the hidden field given the visible
        states is already available, pass it as `field` to avoid recomputing it. The keys of the result are the names
        in `named_parameters`.
        """
        field = self.hidden_field(visible) if field is None else field
        mean = self.hidden.mean(field)
        gradient, hidden = self.unit_gradient(visible, field, mean), self.hidden.statistic(mean)
        for name, unit in self.layers.items():
            for key, value in self.links[name].statistics(unit.statistic(visible[name]), hidden).items():
                gradient[f"couplings.{name}.{key}"] = value
        return gradient

    def unit_gradient(
        self, visible: Mapping[str, Tensor], field: Tensor, mean: Tensor, weights: Tensor | None = None
    ) -> dict[str, Tensor]:
        """Compute the gradient of the mean free energy with respect to the parameters of the units.

        `field` is the hidden field given the visible states, and `mean` is the hidden mean given that field. If
        `weights`, of shape (n,), is given, compute the gradient of the weighted sum of the free energies. The data is
        not validated.
        """
        of_hidden = self.hidden.normalizer_gradient(field, weights, mean)
        gradient = {f"hidden.{key}": -value for key, value in of_hidden.items()}
        for name, unit in self.layers.items():
            back = self.links[name].to_visible(self.hidden.statistic(mean)) if unit.learns_statistic else None
            for key, value in unit.energy_gradient(visible[name], back, weights).items():
                gradient[f"visible.{name}.{key}"] = value
        return gradient

    @torch.no_grad()
    def initialize_from(self, visible: Visible) -> None:
        """Fit the parameters of the visible units to the moments of the data, treating all entries as independent."""
        layers = self.as_layers(visible)
        for name, unit in self.layers.items():
            unit.initialize_from(layers[name].mean(0), layers[name].var(0, correction=0), len(layers[name]))

    @torch.no_grad()
    def zero_sum_gauge(self) -> None:
        r"""Center the weights and biases of one-hot visible layers over the categories, in place.

        Each row of a one-hot layer contains exactly one 1. Adding a constant to the weights or the biases of all
        categories of a row therefore only adds a constant to the hidden field or to the energy. Of all equivalent
        machines, this method selects the one with :math:`\sum_a W_{k, i a} = 0` and :math:`\sum_a b_{i a} = 0`, where
        :math:`a` is the category. The hidden bias absorbs the change of the hidden field, so all conditional
        distributions and all differences between energies stay the same. Layers that are not one-hot do not change.
        """
        if self.hidden.n_sharing > 1:
            raise ValueError("the zero-sum gauge requires one hidden bias per entry, but hidden entries share biases")
        for name, unit in self.layers.items():
            if unit.one_hot:
                link = self.links[name]
                shift = link.to_hidden(unit.middle[None])[0]  # mean of W over categories, summed over rows
                link.center_categories()
                self.hidden.absorb(shift)
                center(unit.bias, -1)

    # -- checks -----------------------------------------------------------------------------------

    def as_layers(self, visible: Visible, *, check: bool = True, values: bool = True) -> dict[str, Tensor]:
        """Convert a batch to a dict that maps layer names to tensors with the dtype and device of the machine.

        If `check` is True, wrong shapes raise ValueError. If `values` is also True, invalid values raise ValueError.
        Set `values` to False for means, because the mean of one-hot rows, for example, is not one-hot.
        """
        if isinstance(visible, Mapping):
            batch: Mapping[str, Any] = visible
        elif len(self.visible) == 1:
            batch = {next(iter(self.visible)): visible}
        else:
            raise ValueError(
                f"this machine has several visible layers; pass a mapping from {list(self.visible)} to arrays"
            )
        if set(batch) != set(self.visible):
            raise ValueError(f"expected visible layers {sorted(self.visible)}, got {sorted(batch)}")
        layers = {
            name: self._as_layer(batch[name], name, unit, check, values=values) for name, unit in self.layers.items()
        }
        counts = {name: len(array) for name, array in layers.items()}
        if check and len(set(counts.values())) > 1:
            raise ValueError(f"all visible layers must have the same number of samples, got {counts}")
        return layers

    def _as_layer(self, array: Any, name: str, unit: Unit, check: bool, *, values: bool = True) -> Tensor:
        tensor = torch.as_tensor(array).to(dtype=self.like.dtype, device=self.like.device)
        if check:
            _check_shape(tensor, name, unit.shape)
            if values:
                unit.check(tensor, name)
        return tensor

    def as_masks(self, mask: Visible | None, visible: Mapping[str, Tensor]) -> dict[str, Tensor | None]:
        """Return a mask of known entries for each layer, or None for a layer without a mask and without padding.

        None means that all entries of the layer are unknown. Each mask has shape (n, *layer shape) and is True where
        the value is known. An array in `mask` without a sample axis applies to all samples. Layers that are not in
        `mask` are treated as unknown, and padding in `visible` is treated as known.
        """
        if mask is not None and not isinstance(mask, Mapping):
            if len(self.visible) > 1:
                raise ValueError(f"mask must be a mapping from the layer names {list(self.visible)} to arrays")
            mask = {next(iter(self.visible)): mask}
        given = dict(mask or {})
        if not set(given) <= set(self.visible):
            raise ValueError(f"mask contains layers {sorted(given)}, but the machine has layers {sorted(self.visible)}")
        return {name: _mask_of(given.get(name), name, unit, visible[name]) for name, unit in self.layers.items()}

    @torch.no_grad()
    def check_parameters(self) -> None:
        """Raise ValueError if any parameter is too large for stable computation or if the energy is unbounded below."""
        for name, unit in {**self.layers, "hidden": self.hidden}.items():
            unit.check_parameters(name)
        for name, link in self.links.items():
            # W is linear in each factor, so the norm of W is at most the product of the norms of the factors.
            norms = [float(torch.linalg.vector_norm(factor, dtype=torch.float64)) for factor in link.parameters()]
            if math.prod(norms) > LARGEST_PARAMETER:
                raise ValueError(f"the coupling for layer '{name}' is too large because its factors have norms {norms}")
        self.check_bounded()

    @property
    def may_be_unbounded(self) -> bool:
        """Whether weights exist for which the energy has no lower bound, as between Gaussian visible and hidden layers.

        See :attr:`mvrbm.Unit.largest_spread`.
        """
        return self.hidden.largest_spread > 0 and any(unit.largest_spread > 0 for unit in self.layers.values())

    def check_bounded(self) -> None:
        """Raise ValueError if the energy of coupled Gaussian layers has no lower bound.

        With entries measured in standard deviations, the energy is bounded below if and only if the joint `W` of the
        Gaussian visible layers has a spectral norm below 1. For mixtures of Gaussians, the condition is sufficient.
        """
        if self.like.is_meta:  # meta tensors have no values to check
            return
        norm = self.gaussian_norm()
        if norm >= 1:
            raise ValueError(
                "the energy is unbounded below because the coupling between Gaussian visible and hidden layers has "
                f"spectral norm {norm:.4g}, which must be below 1; use a smaller initial std or Bernoulli hidden units"
            )

    @torch.no_grad()
    def limit_norm(self, largest: float) -> None:
        """Scale down the couplings between Gaussian layers if their joint spectral norm exceeds `largest`.

        The hidden bias is adjusted so that the total hidden field at the means of the visible units does not change.
        """
        if not self.may_be_unbounded:
            return
        means = {name: unit.mean(self.like.new_zeros(1, *unit.shape)) for name, unit in self.layers.items()}
        field = self.hidden_field(means)
        if self._scale_to_norm(largest):
            self.hidden.absorb((field - self.hidden_field(means))[0])

    @torch.no_grad()
    def _scale_to_norm(self, largest: float) -> bool:
        """Scale down the learned couplings between Gaussian layers if necessary, and return whether any was scaled."""
        norm = 0.0 if self.like.is_meta else self.gaussian_norm()
        if not largest < norm < math.inf:
            return False
        # W is linear in each factor, so scaling one of them is enough. Frozen factors keep their values.
        learned = [
            next((factor for factor in link.parameters() if factor.requires_grad), None)
            for name, link in self.links.items()
            if self.layers[name].largest_spread
        ]
        for factor in learned:
            if factor is not None:
                factor.mul_(largest / norm)
        return any(factor is not None for factor in learned)

    @torch.no_grad()
    def gaussian_norm(self) -> float:
        """Compute the spectral norm of the joint coupling between Gaussian layers, or 0 if none are coupled."""
        spreads = {name: unit.largest_spread * self.hidden.largest_spread for name, unit in self.layers.items()}
        names = [name for name, spread in spreads.items() if spread]
        if not names:
            return 0.0
        size = int(np.prod(self.hidden.shape))

        def gram(columns: Tensor) -> Tensor:
            """Multiply vectors of shape (n, hidden size) by the sum of W W' over all Gaussian layers."""
            y = columns.reshape(-1, *self.hidden.shape)
            products = [
                self.links[name].to_hidden(self.links[name].to_visible(y)) * spreads[name] ** 2 for name in names
            ]
            return functools.reduce(operator.add, products).flatten(1)

        return spectral_norm(gram, size, self.like, at_once=self._norm_rows() > 1)

    @property
    def bytes_to_check(self) -> int:
        """Upper bound on the number of bytes that :meth:`check_bounded` requires, computed from the shapes alone."""
        rows = self._norm_rows()
        entries = math.prod(self.hidden.shape) + sum(math.prod(unit.shape) for unit in self.layers.values())
        return 6 * rows * entries * self.like.element_size()

    def _norm_rows(self) -> int:
        """Return how many vectors :meth:`gaussian_norm` processes at a time, or 0 if no Gaussian layers are coupled."""
        if not self.may_be_unbounded:
            return 0
        visible = sum(math.prod(unit.shape) for unit in self.layers.values() if unit.largest_spread)
        size = math.prod(self.hidden.shape)
        return size if size <= _LARGEST_GRAM and size * (size + visible) <= _MOST_NUMBERS else 1


def _check_shape(tensor: Tensor, name: str, shape: tuple[int, ...]) -> None:
    given = tuple(tensor.shape[1:])
    if tensor.ndim != len(shape) + 1:
        raise ValueError(
            f"layer '{name}' expects arrays of shape (n, {', '.join(map(str, shape))}), with samples along the "
            f"first axis, but got shape {tuple(tensor.shape)}"
        )
    for mode, (got, wanted) in enumerate(zip(given, shape, strict=True), start=1):
        if got != wanted:
            raise ValueError(
                f"layer '{name}' expects arrays of shape {shape}, but got {given}: "
                f"mode {mode} has {got} entries instead of {wanted}"
            )
    if len(tensor) == 0:
        raise ValueError(f"layer '{name}' got an empty batch, but at least one sample is required")


def _mask_of(mask: Any, name: str, unit: Unit, x: Tensor) -> Tensor | None:
    absent = unit.absent(x)
    if mask is None:
        return absent
    known = torch.as_tensor(mask, device=x.device)
    if known.dtype != torch.bool:
        raise ValueError(
            f"the mask for layer '{name}' must be boolean (True where the value is known), got {known.dtype}"
        )
    if known.shape not in (x.shape, x.shape[1:], (1, *x.shape[1:])):
        raise ValueError(
            f"the mask for layer '{name}' must have shape {tuple(x.shape)} or {tuple(x.shape[1:])}, "
            f"got {tuple(known.shape)}"
        )
    known = known.expand(x.shape)
    if unit.entry_modes:
        of_sites = known.flatten(-unit.entry_modes)
        if not bool((of_sites == of_sites[..., :1]).all()):
            site = "in a one-hot row" if unit.entry_modes == 1 else "of a site"
            raise ValueError(f"the mask for layer '{name}' must be the same for all entries {site}")
    return known if absent is None else known | absent
