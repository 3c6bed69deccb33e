"""The Boltzmann machine: visible layers, one hidden layer, and the couplings between them.

It adds up energies and fields and checks data. Distributions are in `units`, weights in `couplings`, chains in
`sampling`.
"""

import functools
import math
import operator
from collections.abc import Callable, Mapping
from typing import Any, cast

import numpy as np
import torch
from torch import Tensor, nn

from mvrbm.couplings.base import DEFAULT_STD, Coupling
from mvrbm.random import RandomSource
from mvrbm.units.base import LARGEST_PARAMETER, Unit

#: A batch of every visible layer: by name, or the array itself if there is only one layer.
Visible = Tensor | Mapping[str, Tensor]

# Largest number of hidden entries, and of intermediate numbers, for which the norm of the coupling between two Gaussian
# layers is computed from its Gram matrix. Larger ones take Lanczos iterations.
_LARGEST_GRAM = 1024
_MOST_NUMBERS = 2**22
# Largest number of Lanczos iterations, and the relative change at which they stop.
_LANCZOS_STEPS = 200
_LANCZOS_TOLERANCE = 1e-7
# Relative difference between sums of parameters that rounding on another device can explain.
_SAME_SIZE = 1e-9


class BoltzmannMachine(nn.Module):
    r"""One energy over named visible arrays :math:`X_m` and a hidden array :math:`Y`.

    .. math::

        E(X, Y) = \sum_m \varepsilon_m(X_m) + \varepsilon_h(Y)
                  - \sum_m \langle T_h(Y), W_m\, T_m(X_m) \rangle

    The units define :math:`\varepsilon` and :math:`T`, the couplings define :math:`W`. Given the visible layers, the
    hidden sites are independent, in the field that the couplings compute, and vice versa.

    Parameters
    ----------
    visible : Unit or mapping of str to Unit
        The visible layers by name. A single unit becomes a layer named ``"visible"``.
    hidden : Unit
        The hidden layer.
    couplings : Coupling or mapping of str to Coupling
        One coupling per visible layer, under the layer's name.
    seed : int or RandomSource
        Source of the initial weights.
    std : float
        Standard deviation of the entries of each `W` initially.

    Examples
    --------
    >>> from mvrbm import Bernoulli, BoltzmannMachine, Kronecker
    >>> machine = BoltzmannMachine(Bernoulli((28, 28)), Bernoulli((25, 25)), Kronecker(rank=1))
    >>> machine.n_parameters
    2809

    Notes
    -----
    Every method that takes data takes arrays of shape (n, \*layer shape), by layer name or, for a machine with one
    visible layer, as they are. Data is checked unless ``check=False``: use that for data that has been checked
    before, and for means, which need not be valid states.
    """

    def __init__(
        self,
        visible: Unit | Mapping[str, Unit],
        hidden: Unit,
        couplings: Coupling | Mapping[str, Coupling],
        *,
        seed: int | RandomSource = 0,
        std: float = DEFAULT_STD,
    ) -> None:
        super().__init__()
        layers = {"visible": visible} if isinstance(visible, Unit) else dict(visible)
        if not layers:
            raise ValueError("visible must name at least one layer, got none")
        links = {next(iter(layers)): couplings} if isinstance(couplings, Coupling) else dict(couplings)
        if set(links) != set(layers):
            raise ValueError(
                f"couplings must have the names of the visible layers {sorted(layers)}, got {sorted(links)}"
            )
        rng = seed if isinstance(seed, RandomSource) else RandomSource(seed)
        for name, layer in layers.items():
            if reason := layer.unsupported_reason(hidden) or hidden.unsupported_reason(layer):
                raise ValueError(f"layer '{name}' cannot be coupled with the hidden layer: {reason}")
            if not links[name].connected:
                links[name].connect(layer.shape, hidden.shape, rng, std)
            shapes = links[name].visible_shape, links[name].hidden_shape
            if shapes != (layer.shape, hidden.shape):
                raise ValueError(
                    f"the coupling of layer '{name}' connects {shapes[0]} to {shapes[1]}, "
                    f"but the layers have shapes {layer.shape} and {hidden.shape}"
                )
        self.visible = nn.ModuleDict(layers)
        self.hidden = hidden
        self.couplings = nn.ModuleDict({name: links[name] for name in layers})
        self._initial_size = self._parameter_size()
        self.check_bounded()

    # -- parts ------------------------------------------------------------------------------------

    @functools.cached_property
    def layers(self) -> dict[str, Unit]:
        """The visible units by name."""
        return {name: cast(Unit, unit) for name, unit in self.visible.items()}

    @functools.cached_property
    def links(self) -> dict[str, Coupling]:
        """The couplings by the name of their visible layer."""
        return {name: cast(Coupling, coupling) for name, coupling in self.couplings.items()}

    @property
    def n_parameters(self) -> int:
        """Number of learned parameters: biases, variances and factors."""
        return sum(p.numel() for p in self.parameters() if p.requires_grad)

    @property
    def is_new(self) -> bool:
        """Whether the parameters are still those of the constructor: not trained, loaded, or set by the user."""
        return math.isclose(self._initial_size, self._parameter_size(), rel_tol=_SAME_SIZE)

    @torch.no_grad()
    def _parameter_size(self) -> float:
        """Return the sum of the absolute values of all parameters, NaN for parameters without values (meta tensors)."""
        if self.like.is_meta:
            return math.nan
        return sum(float(p.abs().sum(dtype=torch.float64)) for p in self.parameters())

    @property
    def like(self) -> Tensor:
        """A tensor with the dtype and device of the machine."""
        return self.hidden.bias

    # -- fields of one side on the other, without checks ------------------------------------------

    def hidden_field(self, visible: Mapping[str, Tensor]) -> Tensor:
        r"""Field on the hidden layer, :math:`\sum_m W_m T_m(X_m)`: (n, \*hidden shape)."""
        units = self.layers
        fields = [coupling.to_hidden(units[name].statistic(visible[name])) for name, coupling in self.links.items()]
        return functools.reduce(operator.add, fields)

    def visible_fields(self, hidden: Tensor) -> dict[str, Tensor]:
        r"""Field on each visible layer, :math:`W_m^\top T_h(Y)`: (n, \*layer shape)."""
        statistic = self.hidden.statistic(hidden)
        return {name: coupling.to_visible(statistic) for name, coupling in self.links.items()}

    # -- energies ---------------------------------------------------------------------------------

    def energy(self, visible: Visible, hidden: Tensor, *, check: bool = True) -> Tensor:
        r"""Energy :math:`E(X, Y)` of joint states, the hidden ones (n, \*hidden shape): (n,)."""
        layers = self.as_layers(visible, check=check)
        y = self._as_layer(hidden, "hidden", self.hidden, check)
        interaction = (self.hidden.statistic(y) * self.hidden_field(layers)).flatten(1).sum(1)
        return self.own_energy(layers) + self.hidden.energy(y) - interaction

    def free_energy(self, visible: Visible, *, check: bool = True) -> Tensor:
        r"""Free energy :math:`F(X) = -\log \sum_Y e^{-E(X, Y)}` of visible states, shape (n,)."""
        layers = self.as_layers(visible, check=check)
        return self.own_energy(layers) - self.hidden.log_normalizer(self.hidden_field(layers))

    def own_energy(self, visible: Mapping[str, Tensor]) -> Tensor:
        r"""Energy of the visible layers alone, :math:`\sum_m \varepsilon_m(X_m)`, without checks: (n,)."""
        return functools.reduce(operator.add, [unit.energy(visible[name]) for name, unit in self.layers.items()])

    # -- conditionals -----------------------------------------------------------------------------

    def hidden_mean(self, visible: Visible, *, check: bool = True) -> Tensor:
        r"""Mean of the hidden layer given visible states: (n, \*hidden shape)."""
        return self.hidden.mean(self.hidden_field(self.as_layers(visible, check=check)))

    def sample_hidden(self, visible: Visible, rng: RandomSource, *, check: bool = True) -> Tensor:
        r"""Sample the hidden layer given visible states: (n, \*hidden shape)."""
        return self.hidden.sample(self.hidden_field(self.as_layers(visible, check=check)), rng)

    def visible_mean(self, hidden: Tensor, *, check: bool = True) -> dict[str, Tensor]:
        """Mean of each visible layer given hidden states, or given hidden means, by name."""
        fields = self.visible_fields(self._as_layer(hidden, "hidden", self.hidden, check, values=False))
        return {name: unit.mean(fields[name]) for name, unit in self.layers.items()}

    def sample_visible(self, hidden: Tensor, rng: RandomSource, *, check: bool = True) -> dict[str, Tensor]:
        """Sample each visible layer given hidden states, by name."""
        fields = self.visible_fields(self._as_layer(hidden, "hidden", self.hidden, check, values=False))
        return {name: unit.sample(fields[name], rng) for name, unit in self.layers.items()}

    # -- learning ---------------------------------------------------------------------------------

    def free_energy_gradient(self, visible: Mapping[str, Tensor], field: Tensor | None = None) -> dict[str, Tensor]:
        """Return the gradient of the mean free energy for every learned parameter, without autograd and checks.

        `field` is the hidden field of the visible states, if it has been computed already. The keys of the result are
        names as in `named_parameters`.
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
        """Return the gradient of the mean free energy for the parameters of the units alone, without checks.

        It takes the hidden field of the visible states and the hidden mean in that field. With weights (n,) it is the
        gradient of the weighted sum of the free energies.
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
        """Set the parameters of the visible units to those of independent entries with the moments of the data."""
        layers = self.as_layers(visible)
        for name, unit in self.layers.items():
            unit.initialize_from(layers[name].mean(0), layers[name].var(0, correction=0), len(layers[name]))

    # -- checks -----------------------------------------------------------------------------------

    def as_layers(self, visible: Visible, *, check: bool = True, values: bool = True) -> dict[str, Tensor]:
        """Return a batch by layer name, with the dtype and on the device of the machine.

        With `check` it raises ValueError for wrong shapes and, with `values`, for values that a layer cannot have:
        means of one-hot rows, for example, are not one-hot.
        """
        if isinstance(visible, Mapping):
            batch: Mapping[str, Any] = visible
        elif len(self.visible) == 1:
            batch = {next(iter(self.visible)): visible}
        else:
            raise ValueError(
                f"this machine has visible layers {list(self.visible)}: pass a mapping from these names to arrays"
            )
        if set(batch) != set(self.visible):
            raise ValueError(f"expected visible layers {sorted(self.visible)}, got {sorted(batch)}")
        layers = {
            name: self._as_layer(batch[name], name, unit, check, values=values) for name, unit in self.layers.items()
        }
        counts = {name: len(array) for name, array in layers.items()}
        if check and len(set(counts.values())) > 1:
            raise ValueError(f"all visible layers need the same number of samples, got {counts}")
        return layers

    def _as_layer(self, array: Any, name: str, unit: Unit, check: bool, *, values: bool = True) -> Tensor:
        tensor = torch.as_tensor(array).to(dtype=self.like.dtype, device=self.like.device)
        if check:
            _check_shape(tensor, name, unit.shape)
            if values:
                unit.check(tensor, name)
        return tensor

    def as_masks(self, mask: Visible | None, visible: Mapping[str, Tensor]) -> dict[str, Tensor | None]:
        """Return a mask of the known entries of each layer, by name: (n, *layer shape), or None if none is known.

        A mask is True where the value is known; without the axis of samples it holds for every sample. Layers that a
        mapping leaves out are unknown. Padding in `visible` counts as known.
        """
        if mask is not None and not isinstance(mask, Mapping):
            if len(self.visible) > 1:
                raise ValueError(f"the mask must be a mapping from layers of {list(self.visible)} to arrays")
            mask = {next(iter(self.visible)): mask}
        given = dict(mask or {})
        if not set(given) <= set(self.visible):
            raise ValueError(f"mask names layers {sorted(given)}, but there are only {sorted(self.visible)}")
        return {name: _mask_of(given.get(name), name, unit, visible[name]) for name, unit in self.layers.items()}

    @torch.no_grad()
    def check_parameters(self) -> None:
        """Raise ValueError if parameters are too large to compute with, or if the energy is unbounded."""
        for name, unit in {**self.layers, "hidden": self.hidden}.items():
            unit.check_parameters(name)
        for name, link in self.links.items():
            # W is linear in each of its factors, so that its norm is at most the product of theirs.
            norms = [float(torch.linalg.vector_norm(factor, dtype=torch.float64)) for factor in link.parameters()]
            if math.prod(norms) > LARGEST_PARAMETER:
                raise ValueError(f"the coupling of layer '{name}' is too large: its factors have norms {norms}")
        self.check_bounded()

    def check_bounded(self) -> None:
        """Raise ValueError if the energy of coupled Gaussian layers has no lower bound.

        Measured in standard deviations, the energy is bounded exactly if the joint `W` of the Gaussian visible layers
        has a spectral norm below 1.
        """
        if self.like.is_meta:  # there are no values to check yet
            return
        norm = self.gaussian_norm()
        if norm >= 1:
            raise ValueError(
                "the energy is unbounded: Gaussian visible and hidden layers are coupled with spectral norm "
                f"{norm:.4g}, which must stay below 1: start with a smaller std, or use Bernoulli hidden units"
            )

    @torch.no_grad()
    def gaussian_norm(self) -> float:
        """Spectral norm of the coupling between Gaussian layers, 0 if there is no such coupling."""
        names = [name for name, unit in self.layers.items() if unit.gaussian and self.hidden.gaussian]
        if not names:
            return 0.0
        links = [self.links[name] for name in names]
        size = int(np.prod(self.hidden.shape))

        def gram(columns: Tensor) -> Tensor:  # rows of (n, hidden size) times the sum of W W'
            y = columns.reshape(-1, *self.hidden.shape)
            return functools.reduce(operator.add, [link.to_hidden(link.to_visible(y)) for link in links]).flatten(1)

        if self._norm_rows() > 1:
            identity = torch.eye(size, dtype=self.like.dtype, device=self.like.device)
            largest = float(torch.linalg.eigvalsh(gram(identity))[-1])
        else:
            # A vector of ones is orthogonal to the leading eigenvector if the columns of factors have mean zero.
            largest = _largest_eigenvalue(gram, RandomSource(0).normal((1, size), self.like))
        return float(np.sqrt(max(largest, 0.0)))

    @property
    def bytes_to_check(self) -> int:
        """Upper bound of the memory that :meth:`check_bounded` needs, in bytes, from the shapes alone."""
        rows = self._norm_rows()
        entries = math.prod(self.hidden.shape) + sum(math.prod(unit.shape) for unit in self.layers.values())
        return 6 * rows * entries * self.like.element_size()

    def _norm_rows(self) -> int:
        """Return the number of vectors per product when the norm of Gaussian couplings is computed; 0 without them."""
        visible = sum(math.prod(unit.shape) for unit in self.layers.values() if unit.gaussian)
        size = math.prod(self.hidden.shape)
        if not visible or not self.hidden.gaussian:
            return 0
        return size if size <= _LARGEST_GRAM and size * (size + visible) <= _MOST_NUMBERS else 1


def _largest_eigenvalue(product: Callable[[Tensor], Tensor], start: Tensor) -> float:
    """Return the largest eigenvalue of a symmetric map of (1, n) by Lanczos iteration, which keeps three vectors.

    Without orthogonalization some eigenvalues are found several times, which does not change the largest one.
    """
    from scipy.linalg import eigvalsh_tridiagonal

    before, now = start, start / torch.linalg.vector_norm(start)
    diagonal, beside, found = list[float](), list[float](), [0.0]
    for _ in range(_LANCZOS_STEPS):
        after = product(now)
        if beside:
            after.sub_(before, alpha=beside[-1])
        diagonal.append(float((after * now).sum()))
        after.sub_(now, alpha=diagonal[-1])
        if not math.isfinite(diagonal[-1]):
            return math.inf
        found.append(float(eigvalsh_tridiagonal(diagonal, beside)[-1]))
        length, tolerance = float(torch.linalg.vector_norm(after)), _LANCZOS_TOLERANCE * abs(found[-1])
        if length <= tolerance or abs(found[-1] - found[max(-4, -len(found))]) <= tolerance:
            break
        beside.append(length)
        before, now = now, after.div_(length)
    return found[-1]


def _check_shape(tensor: Tensor, name: str, shape: tuple[int, ...]) -> None:
    given = tuple(tensor.shape[1:])
    if tensor.ndim != len(shape) + 1:
        raise ValueError(
            f"layer '{name}' expects arrays of shape (n, {', '.join(map(str, shape))}), with samples along the "
            f"first axis, got {tuple(tensor.shape)}"
        )
    for mode, (got, wanted) in enumerate(zip(given, shape, strict=True), start=1):
        if got != wanted:
            raise ValueError(
                f"layer '{name}' expects arrays of shape {shape}, got {given}: "
                f"mode {mode} has {got} entries instead of {wanted}"
            )
    if len(tensor) == 0:
        raise ValueError(f"layer '{name}' got an empty batch: at least one sample is needed")


def _mask_of(mask: Any, name: str, unit: Unit, x: Tensor) -> Tensor | None:
    absent = unit.absent(x)
    if mask is None:
        return absent
    known = torch.as_tensor(mask, device=x.device)
    if known.dtype != torch.bool:
        raise ValueError(
            f"the mask of layer '{name}' must be boolean, True where the value is known, got {known.dtype}"
        )
    if known.shape not in (x.shape, x.shape[1:], (1, *x.shape[1:])):
        raise ValueError(
            f"the mask of layer '{name}' must have shape {tuple(x.shape)} or {tuple(x.shape[1:])}, "
            f"got {tuple(known.shape)}"
        )
    known = known.expand(x.shape)
    if unit.entry_modes and not bool((known == known[..., :1]).all()):
        raise ValueError(f"the mask of layer '{name}' must be the same for all entries of a one-hot row")
    return known if absent is None else known | absent
