"""Machines on top of each other: the matrix-variate deep belief network."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

import numpy as np
import torch
from numpy.typing import ArrayLike, NDArray
from sklearn.utils import check_random_state
from sklearn.utils.validation import check_is_fitted
from torch import Tensor, nn

from mvrbm.couplings import COUPLINGS, Coupling, Kronecker
from mvrbm.devices import sensible_threads
from mvrbm.estimators.rbm import _ROWS_AT_ONCE, _SINGLE, _device, _joined, _out, _SingleLayer
from mvrbm.learning.callbacks import Callback
from mvrbm.learning.recipe import Recipe
from mvrbm.learning.trainer import Trainer
from mvrbm.machine import BoltzmannMachine
from mvrbm.random import RandomSource
from mvrbm.sampling import keep_known, sample
from mvrbm.saving import (
    CONFIG,
    FORMAT,
    FORMAT_VERSION,
    MODEL,
    StorageError,
    build_machine,
    machine_config,
    read_config,
    read_tensors,
    replace_folder,
    write_tensors,
)
from mvrbm.units import UNITS, Unit
from mvrbm.validation import as_shape

__all__ = ["DeepMVRBM", "Layer"]

Array = NDArray[Any]
_FEEDS = ("mean", "sample")
# Units of a hidden layer, and what the machine above takes them for. Rectified units that face rectified ones
# have nothing to keep them bounded; Gaussian ones take location and scale from the data.
_SEEN_AS = {"bernoulli": "bernoulli", "rectified": "gaussian"}


@dataclass(frozen=True)
class Layer:
    """One hidden layer of a stack, and how it is coupled to what lies below it.

    Parameters
    ----------
    shape : int or sequence of int, optional
        Shape of the layer; that of the layer below if not given.
    coupling : Coupling, optional
        A coupling without shapes, such as ``Dense()`` or ``Kronecker(rank=4)``, of which a copy is used. If not
        given, ``Kronecker`` with the stack's `rank`.
    hidden : str, optional
        Name of the units, ``"bernoulli"`` or ``"rectified"``; the stack's if not given.
    """

    shape: int | Sequence[int] | None = None
    coupling: Coupling | None = None
    hidden: str | None = None


class DeepMVRBM(_SingleLayer):
    r"""Matrix-variate deep belief network: Boltzmann machines, each trained on the hidden layer of the one below.

    With hidden layers :math:`Y_1, \dots, Y_L` over :math:`X = Y_0`, the top machine is a prior over
    :math:`Y_{L-1}`, and the machines below it are read downwards,

    .. math:: p(X, Y_1, \dots, Y_{L-1}) = p_L(Y_{L-1}) \prod_{l < L} p_l(Y_{l-1} \mid Y_l),

    while features are passed upwards through the means, :math:`\hat Y_l = \mathrm{E}_l[Y_l \mid \hat Y_{l-1}]`. With
    ``Dense`` couplings it is the classic deep belief network of Hinton, Osindero and Teh (2006).

    Parameters
    ----------
    layers : sequence
        The hidden layers, lowest first, each a shape, None for the shape of the layer below, or a :class:`Layer`,
        which has a coupling and units of its own.
    rank : int
        Rank of the Kronecker couplings of layers that name no coupling.
    hidden : {"bernoulli", "rectified"}
        Units of the layers that name none.
    feed : {"mean", "sample"}
        What a machine is trained on: the hidden means of the one below, or draws, which are new in every pass.
    visible : {"bernoulli", "gaussian"}
        What entries of the data are: from 0 to 1, or real.
    visible_shape : tuple of int, optional
        What array a row of 2-D input is. Without it a row is a vector.
    n_epochs, batch_size, learning_rate, recipe
        As for :class:`~mvrbm.MVRBM`, for every machine.
    backend, random_state, device, verbose
        As for :class:`~mvrbm.MVRBM`.

    Attributes
    ----------
    machines_ : list of BoltzmannMachine
        The stack, lowest first. The visible layer of each has the shape of the hidden layer below, and its units;
        Gaussian units in the place of rectified ones.
    machine_ : BoltzmannMachine
        The lowest of them.
    history_ : list of dict
        What callbacks logged, with the number of the ``layer``.
    visible_shape_ : tuple of int
        Shape of a sample.

    Examples
    --------
    >>> import numpy as np
    >>> from mvrbm import DeepMVRBM
    >>> images = np.random.default_rng(0).random((20, 8, 8), dtype=np.float32)
    >>> stack = DeepMVRBM(((6, 6), (4, 4)), n_epochs=1, random_state=0).fit(images)
    >>> stack.transform(images).shape, stack.transform(images, layer=0).shape
    ((20, 16), (20, 36))
    """

    machines_: list[BoltzmannMachine]
    _trainers: list[Trainer] | None

    def __init__(
        self,
        layers: Sequence[Any] = (None, None),
        *,
        rank: int = 1,
        hidden: str = "bernoulli",
        feed: str = "mean",
        visible: str = "bernoulli",
        visible_shape: Sequence[int] | None = None,
        n_epochs: int | None = None,
        batch_size: int | None = None,
        learning_rate: float | None = None,
        recipe: str | Recipe = "default",
        backend: str = "auto",
        random_state: Any = None,
        device: str = "auto",
        verbose: int = 0,
    ) -> None:
        self.layers = layers
        self.rank = rank
        self.hidden = hidden
        self.feed = feed
        self.visible = visible
        self.visible_shape = visible_shape
        self.n_epochs = n_epochs
        self.batch_size = batch_size
        self.learning_rate = learning_rate
        self.recipe = recipe
        self.backend = backend
        self.random_state = random_state
        self.device = device
        self.verbose = verbose

    # -- learning ---------------------------------------------------------------------------------

    def fit(
        self,
        X: Any,
        y: Any = None,
        *,
        mask: Any = None,
        callbacks: Sequence[Callback] = (),
        resume: str | os.PathLike[str] | None = None,
    ) -> Self:
        r"""Train one machine after another, each on what the one below makes of the data.

        Parameters
        ----------
        X : array of shape (n, \*visible_shape) or (n, n_features)
            The data. Bytes are taken as they are, scaled to [0, 1] batch by batch for Bernoulli units.
        y : None
            Ignored, there for pipelines.
        mask, resume : None
            Not for stacks: a stack learns from data without gaps, and in one go.
        callbacks : sequence of Callback
            See :mod:`mvrbm.learning`. They watch one machine after another.
        """
        if mask is not None:
            raise ValueError("mask must be None: a stack learns from data without gaps, so fill it in before")
        if resume is not None:
            raise ValueError("resume must be None: a stack is not trained from checkpoints")
        layers = self._layers(X, reset=True)
        self._start(layers)
        return self._train_all(layers, self._recipe().n_epochs, callbacks)

    def partial_fit(self, X: Any, y: Any = None, *, mask: Any = None) -> Self:
        """Make one more pass over these data with every machine, lowest first."""
        if mask is not None:
            raise ValueError("mask must be None: a stack learns from data without gaps, so fill it in before")
        fresh = not hasattr(self, "machines_")
        layers = self._layers(X, reset=fresh)
        if fresh:
            self._start(layers)
        return self._train_all(layers, 1, ())

    def _start(self, layers: Mapping[str, Array]) -> None:
        if self.backend not in ("auto", "reference"):
            raise ValueError(f"backend must be 'auto' or 'reference', got {self.backend!r}")
        if self.feed not in _FEEDS:
            raise ValueError(f"feed must be one of {list(_FEEDS)}, got {self.feed!r}")
        units = self._units(layers)
        dtype = torch.float64 if layers[_SINGLE].dtype == np.float64 else torch.float32
        self._take(build_stack(units[_SINGLE], self.layers, rank=self.rank, hidden=self.hidden), dtype)
        self._trainers = self._new_trainers(initialise=True)

    def _take(self, machines: list[BoltzmannMachine], dtype: torch.dtype) -> None:
        self.machines_ = [machine.to(device=_device(self.device), dtype=dtype) for machine in machines]
        self.machine_ = self.machines_[0]

    def _new_trainers(self, *, initialise: bool) -> list[Trainer]:
        random = check_random_state(self.random_state)
        gradient = "autograd" if self.backend == "reference" else "analytic"
        return [
            Trainer(machine, self._recipe(), gradient=gradient, seed=int(seed), initialise=initialise)
            for machine, seed in zip(self.machines_, random.randint(2**31 - 1, size=len(self.machines_)), strict=True)
        ]

    def _train_all(self, layers: Mapping[str, Array], passes: int, callbacks: Sequence[Callback]) -> Self:
        if self._trainers is None:
            self._trainers = self._new_trainers(initialise=False)
        drawing = self._rng().split(len(self.machines_))
        history: list[dict[str, float]] = []
        try:
            for number, trainer in enumerate(self._trainers):
                trainer.batch = 0  # a pass that was broken off was over other data
                self._trainer, last = trainer, trainer.epoch + passes
                # Draws are new in every pass; data and means are the same in all of them.
                steps = range(trainer.epoch + 1, last + 1) if number and self.feed == "sample" else [last]
                for stop in steps:
                    data = self._feed(layers, number, drawing[number])
                    self._train({_SINGLE: data}, stop, None, callbacks)
                history += [{"layer": number, **row} for row in trainer.history]
        finally:
            self._trainer = None
        self.history_ = history
        return self

    @torch.no_grad()
    def _feed(self, layers: Mapping[str, Array], number: int, rng: RandomSource) -> Array:
        """Return what machine `number` is trained on, (n, *its visible shape)."""
        if number == 0:
            return layers[_SINGLE]
        below, pieces = self.machines_[number - 1], []
        for first in range(0, len(layers[_SINGLE]), _ROWS_AT_ONCE):
            rows = {_SINGLE: layers[_SINGLE][first : first + _ROWS_AT_ONCE]}
            x = self._up(self._tensors(rows)[_SINGLE], number - 1)
            if self.feed == "sample":
                pieces.append(_out(below.sample_hidden(x, rng, check=False)))
            else:
                pieces.append(_out(below.hidden_mean(x, check=False)))
        return np.concatenate(pieces)

    # -- features ---------------------------------------------------------------------------------

    @property
    def _n_features_out(self) -> int:
        return math.prod(self.machines_[-1].hidden.shape)

    @property
    def n_parameters_(self) -> int:
        """Number of parameters of all machines together."""
        return sum(machine.n_parameters for machine in self.machines_)

    def _count(self, layer: int) -> int:
        """Return how many machines are below a hidden layer, that is, one more than its number."""
        check_is_fitted(self)
        size = len(self.machines_)
        if not -size <= layer < size:
            raise ValueError(f"layer must lie in {-size}..{size - 1}, got {layer}")
        return layer % size + 1

    def hidden_maps(self, X: Any, layer: int = -1) -> Array:
        r"""Means of a hidden layer as arrays, (n, \*shape of the layer).

        Parameters
        ----------
        X : array
            Data.
        layer : int
            Which hidden layer: 0 is the lowest, -1 the top.
        """
        count = self._count(layer)
        return self._of_each(X, lambda batch: self._up(batch[_SINGLE], count))

    def transform(self, X: Any, layer: int = -1) -> Array:
        """Means of a hidden layer as rows, (n, n_hidden)."""
        maps = self.hidden_maps(X, layer)
        return maps.reshape(len(maps), -1)

    def inverse_transform(self, X: ArrayLike, layer: int = -1) -> Any:
        """Visible means given a hidden layer's means, as rows or as arrays, passed down through the means."""
        count = self._count(layer)
        rows, shape = np.array(X), self.machines_[count - 1].hidden.shape
        if rows.shape[1:] not in (shape, (math.prod(shape),)):
            raise ValueError(f"expected (n, {math.prod(shape)}) or {('n', *shape)} hidden values, got {rows.shape}")
        with torch.no_grad():
            hidden = torch.from_numpy(rows).reshape(-1, *shape).to(self.machine_.like)
            return self._outward({_SINGLE: self._down(hidden, count)})

    def reconstruct(self, X: Any, *, steps: int = 1, layer: int = -1) -> Any:
        """Pass data up to a hidden layer and down again through the means, `steps` times."""
        count = self._count(layer)
        if steps < 1:
            raise ValueError(f"steps must be at least 1, got {steps}")
        pieces = []
        for batch in self._batches(X):
            x = batch[_SINGLE]
            for _ in range(steps):
                x = self._down(self._up(x, count), count)
            pieces.append({_SINGLE: x})
        return self._outward(_joined(pieces), like=X)

    def components(self, which: ArrayLike | None = None, layer: int = -1) -> Array:
        r"""Filters of a hidden layer: its weights, passed down to the data by the couplings below.

        Parameters
        ----------
        which : array of int, optional
            Numbers of hidden units, counted row by row; all of them if not given.
        layer : int
            Which hidden layer: 0 is the lowest, -1 the top.

        Returns
        -------
        array (n, \*visible_shape)
            :math:`W_1^\top \cdots W_l^\top e_k`, the units in between taken as linear.
        """
        count = self._count(layer)
        size = math.prod(self.machines_[count - 1].hidden.shape)
        numbers = torch.arange(size) if which is None else torch.as_tensor(np.asarray(which)).reshape(-1)
        if len(numbers) and (int(numbers.min()) < 0 or int(numbers.max()) >= size):
            raise ValueError(f"which must lie in 0..{size - 1}, got {int(numbers.min())} to {int(numbers.max())}")
        chosen = nn.functional.one_hot(numbers, size).to(self.machine_.like)
        filters = chosen.reshape(-1, *self.machines_[count - 1].hidden.shape)
        with torch.no_grad():
            for machine in reversed(self.machines_[:count]):
                filters = machine.links[_SINGLE].to_visible(filters)
        return _out(filters)

    def _up(self, x: Tensor, count: int) -> Tensor:
        for machine in self.machines_[:count]:
            x = machine.hidden_mean(x, check=False)
        return x

    def _down(self, hidden: Tensor, count: int) -> Tensor:
        for number in reversed(range(count)):
            hidden = self._as_hidden(self.machines_[number].visible_mean(hidden, check=False)[_SINGLE], number)
        return hidden

    def _as_hidden(self, values: Tensor, number: int) -> Tensor:
        """Return what machine `number` sent down as values of the layer below, which may have narrower bounds."""
        return values.clamp(*self.machines_[number - 1].hidden.statistic_bounds()) if number else values

    def _draw_down(self, hidden: Tensor, numbers: range, rng: RandomSource) -> Tensor:
        for number in reversed(numbers):
            drawn = self.machines_[number].sample_visible(hidden, rng, check=False)[_SINGLE]
            hidden = self._as_hidden(drawn, number)
        return hidden

    # -- the generative side ----------------------------------------------------------------------

    def sample(self, n: int = 1, *, steps: int = 1000, init: Any = None, mask: Any = None) -> Array:
        """Draw from the model: Gibbs sampling in the top machine, then one draw down through each of the others.

        Parameters
        ----------
        n : int
            Number of samples.
        steps : int
            Gibbs steps of each chain.
        init : array, optional
            n data that the chains start from, passed up to the top machine; noise if not given.
        mask : None
            Not for stacks: see `inpaint`.
        """
        check_is_fitted(self)
        if mask is not None:
            raise ValueError("mask must be None: chains of a stack run at its top, use inpaint to fill in data")
        top, rng = self.machines_[-1], self._rng()
        start = None
        if init is not None:
            pieces = [self._up(batch[_SINGLE], len(self.machines_) - 1) for batch in self._batches(init)]
            start = {_SINGLE: torch.cat(pieces)}
        with torch.no_grad(), sensible_threads(top, n):
            size = len(self.machines_)
            state = self._as_hidden(sample(top, n, steps, rng, init=start).visible[_SINGLE], size - 1)
            state = self._draw_down(state, range(size - 1), rng)
        return self._outward({_SINGLE: state}, like=init)

    def inpaint(self, X: Any, mask: Any, *, steps: int = 100, burn_in: int = 50) -> Any:
        """Fill in what is unknown by drawing up and down through the stack, what is known held fixed.

        The way up is the approximation of deep belief networks, so what comes out is no exact conditional mean.

        Parameters
        ----------
        X : array
            Data. Unknown entries may hold anything, NaN too.
        mask : boolean array of X's shape or of one sample's
            True where the value is known.
        steps, burn_in : int
            Passes to average over, and before these.
        """
        check_is_fitted(self)
        if steps < 1 or burn_in < 0:
            raise ValueError(f"steps must be at least 1 and burn_in at least 0, got {steps} and {burn_in}")
        layers = self._layers(self._blank_unknown(X, mask), reset=False)
        data, known, rng = self._tensors(layers), self._masks(mask, layers), self._rng()
        bottom = self.machines_[0]
        with torch.no_grad(), sensible_threads(bottom, len(data[_SINGLE])):
            unit = bottom.layers[_SINGLE]
            x = keep_known(data, {_SINGLE: unit.sample(torch.zeros_like(data[_SINGLE]), rng)}, known)[_SINGLE]
            total = torch.zeros_like(x)
            for step in range(burn_in + steps):
                for machine in self.machines_:
                    x = machine.sample_hidden(x, rng, check=False)
                x = self._draw_down(x, range(1, len(self.machines_)), rng)
                field = bottom.visible_fields(x)[_SINGLE]
                if step >= burn_in:
                    total += unit.mean(field)
                x = keep_known(data, {_SINGLE: unit.sample(field, rng)}, known)[_SINGLE]
            return self._outward(keep_known(data, {_SINGLE: total / steps}, known), like=X)

    def score_samples(self, X: Any) -> Array:
        r"""Log-probability of each sample given what one pass up and down makes of it, (n,). Deterministic.

        It is :math:`\log p_1(X \mid \hat Y_1)`, with :math:`\hat Y_1` the means that the layers above send back: a
        measure of reconstruction, not a likelihood of the model.
        """
        check_is_fitted(self)
        unit, bottom, size = self.machine_.layers[_SINGLE], self.machine_, len(self.machines_)

        def score(batch: Mapping[str, Tensor]) -> Tensor:
            x = batch[_SINGLE]
            hidden = self._up(x, size)
            for number in reversed(range(1, size)):
                hidden = self._as_hidden(self.machines_[number].visible_mean(hidden, check=False)[_SINGLE], number)
            field = bottom.visible_fields(hidden)[_SINGLE]
            pull = (unit.statistic(x) * field).flatten(1).sum(1)
            return pull - unit.energy(x) - unit.log_normaliser(field)

        return self._of_each(X, score)

    # -- files ------------------------------------------------------------------------------------

    def save_pretrained(self, folder: str | os.PathLike[str]) -> Path:
        """Write the fitted stack to a folder, which `from_pretrained` reads."""
        check_is_fitted(self)
        with replace_folder(folder) as staging:
            write_stack(self.machines_, staging, {"estimator": self._description()})
        return Path(folder)

    def _description(self) -> dict[str, Any]:
        names = getattr(self, "feature_names_in_", None)
        shape = self.visible_shape
        return {
            "class": type(self).__name__,
            "params": {
                "layers": describe_layers(self.layers),
                "rank": self.rank,
                "hidden": self.hidden,
                "feed": self.feed,
                "visible": self.visible,
                "visible_shape": None if shape is None else list(as_shape(shape, "visible_shape")),
            },
            "as_arrays": self._as_arrays,
            "feature_names": None if names is None else list(map(str, names)),
        }

    @classmethod
    def from_pretrained(cls, folder: str | os.PathLike[str], *, device: str = "auto") -> Self:
        """Read a stack that `save_pretrained` wrote."""
        described = read_description(Path(folder), cls.__name__)
        machines, _ = read_stack(Path(folder))
        try:
            params = dict(described["params"])
            params["layers"] = rebuild_layers(params["layers"])
            estimator = cls(**params, device=device)
            estimator._take(machines, machines[0].like.dtype)
            estimator._trainers = None
            estimator._restore(estimator.machines_[0], described)
        except StorageError:
            raise
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise StorageError(f"{folder}: the estimator's description is damaged: {error}") from error
        return estimator


# -- stacks -------------------------------------------------------------------------------------------


def as_layers(layers: Any) -> list[Layer]:
    """Return hidden layers as :class:`Layer`, from shapes, None, or as they are."""
    if isinstance(layers, str) or not isinstance(layers, Sequence) or len(layers) == 0:
        raise ValueError(f"layers must be a sequence of at least one layer, lowest first, got {layers!r}")
    return [layer if isinstance(layer, Layer) else Layer(layer) for layer in layers]


def build_stack(visible: Unit, layers: Any, *, rank: int, hidden: str) -> list[BoltzmannMachine]:
    """Build the machines of a stack over a visible layer, each over the hidden layer of the one below."""
    machines: list[BoltzmannMachine] = []
    below = visible
    for number, layer in enumerate(as_layers(layers)):
        kind = layer.hidden or hidden
        if kind not in _SEEN_AS:
            raise ValueError(f"hidden units of layer {number} must be one of {sorted(_SEEN_AS)}, got {kind!r}")
        shape = below.shape if layer.shape is None else as_shape(layer.shape, f"shape of layer {number}")
        link = Kronecker(rank) if layer.coupling is None else copy_coupling(layer.coupling, number)
        try:
            machines.append(BoltzmannMachine({_SINGLE: below}, UNITS[kind](shape), {_SINGLE: link}))
        except ValueError as error:
            raise ValueError(f"layer {number}: {error}") from error
        below = UNITS[_SEEN_AS[kind]](shape)
    return machines


def copy_coupling(coupling: Any, number: int) -> Coupling:
    """Return a new coupling of the same kind and settings, without shapes."""
    if not isinstance(coupling, Coupling):
        raise ValueError(f"coupling of layer {number} must be a coupling such as Dense(), got {coupling!r}")
    return type(coupling)(**coupling.config())


def describe_layers(layers: Any) -> list[dict[str, Any]]:
    """Return the layers of a stack as plain values."""
    described = []
    for layer in as_layers(layers):
        shape, link = layer.shape, layer.coupling
        described.append(
            {
                "shape": None if shape is None else list(as_shape(shape, "shape of a layer")),
                "coupling": None if link is None else {"coupling": link.name, **link.config()},
                "hidden": layer.hidden,
            }
        )
    return described


def rebuild_layers(described: Sequence[Mapping[str, Any]]) -> tuple[Layer, ...]:
    """Return the layers that `describe_layers` described."""
    layers = []
    for entry in described:
        shape, link = entry["shape"], entry["coupling"]
        if link is not None:
            options = dict(link)
            link = COUPLINGS[options.pop("coupling")](**options)
        layers.append(Layer(None if shape is None else tuple(shape), link, entry["hidden"]))
    return tuple(layers)


# -- stacks on disk -----------------------------------------------------------------------------------


def write_stack(
    machines: Sequence[BoltzmannMachine],
    folder: Path,
    extra: Mapping[str, Any],
    tensors: Mapping[str, Tensor] | None = None,
) -> None:
    """Write machines' two files into a folder that is there, with more entries for the config and more tensors."""
    config = {
        "format": FORMAT,
        "format_version": FORMAT_VERSION,
        "stack": [machine_config(machine) for machine in machines],
        **extra,
    }
    (folder / CONFIG).write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
    named = {f"machines.{name}": tensor for name, tensor in nn.ModuleList(machines).state_dict().items()}
    write_tensors({**named, **(tensors or {})}, folder / MODEL)


def read_stack(
    folder: Path, more: Callable[[BoltzmannMachine], Mapping[str, tuple[int, ...]]] | None = None
) -> tuple[list[BoltzmannMachine], dict[str, Tensor]]:
    """Read machines, and the tensors stored beside them, from a folder that `write_stack` wrote.

    Parameters
    ----------
    folder : Path
        Where they are.
    more : callable, optional
        From the top machine to the names and shapes of the tensors that are beside the machines.
    """
    parts = read_config(folder).get("stack")
    if not isinstance(parts, list) or not parts or not all(isinstance(part, dict) for part in parts):
        raise StorageError(f"{folder} does not hold a stack of machines")
    machines = [build_machine(part, folder) for part in parts]
    stack = nn.ModuleList(machines)
    expected = {f"machines.{name}": tuple(tensor.shape) for name, tensor in stack.state_dict().items()}
    if more is not None:
        expected |= {name: tuple(shape) for name, shape in more(machines[-1]).items()}
    path, dtype = folder / MODEL, machines[0].like.dtype
    tensors = read_tensors(path)
    if set(tensors) != set(expected):
        lacks, foreign = sorted(set(expected) - set(tensors)), sorted(set(tensors) - set(expected))
        raise StorageError(f"{path} lacks {lacks} and has unknown {foreign}")
    for name, tensor in tensors.items():
        if tuple(tensor.shape) != expected[name] or tensor.dtype != dtype:
            raise StorageError(
                f"{path}: '{name}' should be {dtype} of shape {expected[name]}, is {tensor.dtype} of shape "
                f"{tuple(tensor.shape)}"
            )
        if not bool(torch.isfinite(tensor).all()):
            raise StorageError(f"{path}: '{name}' has entries that are not finite")
    prefix = "machines."
    stack.load_state_dict({name.removeprefix(prefix): t for name, t in tensors.items() if name.startswith(prefix)})
    _check_joints(machines, folder)
    return machines, {name: tensor for name, tensor in tensors.items() if not name.startswith(prefix)}


def _check_joints(machines: Sequence[BoltzmannMachine], folder: Path) -> None:
    for number, machine in enumerate(machines):
        if list(machine.layers) != [_SINGLE]:
            raise StorageError(f"{folder}: a machine of a stack has one visible layer, got {list(machine.layers)}")
        if number and machine.layers[_SINGLE].shape != machines[number - 1].hidden.shape:
            raise StorageError(f"{folder}: machine {number} does not fit on the one below")


def read_description(folder: Path, kind: str) -> dict[str, Any]:
    """Return what a folder says of the estimator it holds, which must be of a kind."""
    described = read_config(folder).get("estimator")
    if not isinstance(described, dict) or described.get("class") != kind:
        found = f" but a {described.get('class')}" if isinstance(described, dict) else ""
        raise StorageError(f"{folder} does not hold a {kind}{found}")
    return described
