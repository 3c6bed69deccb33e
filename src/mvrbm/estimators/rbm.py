"""The scikit-learn face: one base class, and a thin class for each named model."""

from __future__ import annotations

import dataclasses
import math
import os
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar, Self

import numpy as np
import torch
from numpy.typing import ArrayLike, NDArray
from sklearn.base import BaseEstimator, ClassNamePrefixFeaturesOutMixin, TransformerMixin
from sklearn.utils import check_random_state
from sklearn.utils.validation import check_is_fitted, validate_data
from torch import Tensor

from mvrbm.couplings import Coupling, Dense, Kronecker
from mvrbm.devices import sensible_threads
from mvrbm.io.shards import Shards
from mvrbm.learning.callbacks import Callback, ProgressBar
from mvrbm.learning.distributed import World
from mvrbm.learning.recipe import Recipe, as_recipe
from mvrbm.learning.trainer import Trainer
from mvrbm.likelihood import pseudo_log_likelihood
from mvrbm.machine import BoltzmannMachine
from mvrbm.random import RandomSource
from mvrbm.sampling import conditional_mean, mean_field, sample
from mvrbm.saving import StorageError, read_config, read_machine, replace_folder, write_machine
from mvrbm.units import UNITS, Bernoulli, Gaussian, Unit
from mvrbm.validation import as_shape

__all__ = ["MMVRBM", "MVRBM", "RBM", "TVRBM"]

Array = NDArray[Any]
_SINGLE = "visible"  # name of the one layer of the single-layer estimators
_ROWS_AT_ONCE = 1024


class _ArrayRBM(ClassNamePrefixFeaturesOutMixin, TransformerMixin, BaseEstimator):
    """What all estimators share. Subclasses say what layers the data makes and how they are coupled."""

    machine_: BoltzmannMachine
    _trainer: Trainer | None
    history_: list[dict[str, float]]
    hidden_shape: Any
    visible: Any

    def __init__(
        self,
        hidden_shape: Any = None,
        *,
        rank: int = 1,
        visible: Any = "bernoulli",
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
        self.hidden_shape = hidden_shape
        self.rank = rank
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

    # -- what subclasses decide -------------------------------------------------------------------

    def _coupling(self) -> Coupling:
        return Kronecker(self.rank)

    def _hidden_shape(self, visible: Mapping[str, Unit]) -> tuple[int, ...]:
        """Shape of the hidden layer, from the parameter or from the visible layers."""
        if self.hidden_shape is None:
            return next(iter(visible.values())).shape
        return _as_shape(self.hidden_shape)

    def _layers(self, X: Any, *, reset: bool) -> dict[str, Array]:
        """Return the data by layer, each (n, *layer shape), checked."""
        raise NotImplementedError

    def _units(self, layers: Mapping[str, Array]) -> dict[str, Unit]:
        raise NotImplementedError

    def _outward(self, layers: Mapping[str, Tensor], like: Any = None) -> Any:
        """Return layers in the form in which data is given to this estimator."""
        raise NotImplementedError

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
        r"""Learn from data.

        Parameters
        ----------
        X : array of shape (n, \*visible_shape) or (n, n_features), or Shards
            The data, or a folder of it. Bytes are taken as they are, scaled to [0, 1] batch by batch for
            Bernoulli units.
        y : None
            Ignored, there for pipelines.
        mask : boolean array like X, optional
            True where an entry is known; the others are drawn from the model as it learns.
        callbacks : sequence of Callback
            See :mod:`mvrbm.learning`.
        resume : path, optional
            Folder of checkpoints, of which the newest is gone on from if there is one.
        """
        layers = self._layers(self._blank_unknown(X, mask), reset=True)
        self._start(layers)
        if resume is not None and self._trainer is not None:
            self._trainer.resume(resume)
        return self._train(layers, self._recipe().n_epochs, mask, callbacks)

    def partial_fit(self, X: Any, y: Any = None, *, mask: Any = None) -> Self:
        """Make one more pass, over these data."""
        fresh = not hasattr(self, "machine_")
        layers = self._layers(self._blank_unknown(X, mask), reset=fresh)
        if fresh:
            self._start(layers)
        elif self._trainer is None:
            self._trainer = self._new_trainer(self.machine_, initialise=False)
        passes = 0
        if self._trainer is not None:
            self._trainer.batch = 0  # a pass that was broken off was over other data
            passes = self._trainer.epoch
        return self._train(layers, passes + 1, mask, ())

    def _start(self, layers: Mapping[str, Array]) -> None:
        if self.backend not in ("auto", "reference"):
            raise ValueError(f"backend must be 'auto' or 'reference', got {self.backend!r}")
        units = self._units(layers)
        hidden = Bernoulli(self._hidden_shape(units))
        for name, unit in units.items():
            self._check_orders(name, unit.shape, hidden.shape)
        dtype = torch.float64 if any(array.dtype == np.float64 for array in layers.values()) else torch.float32
        links = {name: self._coupling() for name in units}
        machine = BoltzmannMachine(units, hidden, links).to(device=_device(self.device), dtype=dtype)
        self._trainer = self._new_trainer(machine, initialise=True)
        self.machine_ = machine

    def _check_orders(self, name: str, visible_shape: tuple[int, ...], hidden_shape: tuple[int, ...]) -> None:
        if len(visible_shape) != len(hidden_shape):
            raise ValueError(
                f"hidden_shape {hidden_shape} has {len(hidden_shape)} modes, but a sample has {len(visible_shape)}, "
                f"{visible_shape}: give both as many modes"
                + (", or say what array a row is with visible_shape" if len(visible_shape) == 1 else "")
            )

    def _recipe(self) -> Recipe:
        given: dict[str, Any] = {
            "n_epochs": self.n_epochs,
            "batch_size": self.batch_size,
            "learning_rate": self.learning_rate,
        }
        changes = {key: value for key, value in given.items() if value is not None}
        return dataclasses.replace(as_recipe(self.recipe), **changes)

    def _new_trainer(self, machine: BoltzmannMachine, *, initialise: bool) -> Trainer:
        seed = int(check_random_state(self.random_state).randint(2**31 - 1))
        gradient = "autograd" if self.backend == "reference" else "analytic"
        return Trainer(machine, self._recipe(), gradient=gradient, seed=seed, initialise=initialise)

    def _train(self, layers: Mapping[str, Array], n_epochs: int, mask: Any, callbacks: Sequence[Callback]) -> Self:
        trainer = self._trainer
        assert trainer is not None
        watching = [*callbacks, *([ProgressBar()] if self.verbose else [])]
        trainer.callbacks = sorted(watching, key=lambda callback: callback.comes_last)
        known = None if mask is None else self._masks(mask, layers)
        try:
            trainer.fit(dict(layers), n_epochs, mask=known)
        finally:
            trainer.callbacks = []
            self.history_ = trainer.history
        if trainer.interrupted:
            # Training has ended in good order; whatever called it, a search or a script, is to end as well.
            raise KeyboardInterrupt
        return self

    # -- features ---------------------------------------------------------------------------------

    @property
    def _n_features_out(self) -> int:
        return math.prod(self.machine_.hidden.shape)

    def hidden_maps(self, X: Any) -> Array:
        r"""Hidden probabilities as arrays, (n, \*hidden_shape)."""
        check_is_fitted(self)
        return self._of_each(X, self.machine_.hidden_mean)

    def transform(self, X: Any) -> Array:
        """Hidden probabilities as rows, (n, n_hidden)."""
        maps = self.hidden_maps(X)
        return maps.reshape(len(maps), -1)

    def inverse_transform(self, X: ArrayLike) -> Any:
        """Visible means given hidden probabilities, as rows or as arrays."""
        check_is_fitted(self)
        rows, shape = np.array(X), self.machine_.hidden.shape
        if rows.shape[1:] not in (shape, (math.prod(shape),)):
            raise ValueError(f"expected (n, {math.prod(shape)}) or {('n', *shape)} hidden values, got {rows.shape}")
        hidden = torch.from_numpy(rows).reshape(-1, *shape)
        with torch.no_grad():
            return self._outward(self.machine_.visible_mean(hidden))

    def reconstruct(self, X: Any, *, steps: int = 1) -> Any:
        """Pass data up and down through the means, `steps` times."""
        check_is_fitted(self)
        pieces = [mean_field(self.machine_, batch, steps) for batch in self._batches(X)]
        return self._outward(_joined(pieces), like=X)

    def components(self, which: ArrayLike | None = None) -> Any:
        r"""Weights that feed each hidden unit, as visible arrays: the filters.

        Parameters
        ----------
        which : array of int, optional
            Numbers of hidden units, counted row by row; all of them if not given.

        Returns
        -------
        array (n, \*visible_shape)
            For the MVRBM, filter (k, l) is the outer product of row k of U and row l of V. A dict of
            such arrays for several modalities.
        """
        check_is_fitted(self)
        machine = self.machine_
        size = math.prod(machine.hidden.shape)
        numbers = torch.arange(size) if which is None else torch.as_tensor(np.asarray(which)).reshape(-1)
        if len(numbers) and (int(numbers.min()) < 0 or int(numbers.max()) >= size):
            raise ValueError(f"which must lie in 0..{size - 1}, got {int(numbers.min())} to {int(numbers.max())}")
        chosen = torch.nn.functional.one_hot(numbers, size).reshape(-1, *machine.hidden.shape).to(machine.like)
        with torch.no_grad():
            filters = {name: _out(link.to_visible(chosen)) for name, link in machine.links.items()}
        return filters if len(filters) > 1 else filters[next(iter(filters))]

    # -- the generative side ----------------------------------------------------------------------

    def sample(self, n: int = 1, *, steps: int = 1000, init: Any = None, mask: Any = None) -> Any:
        """Draw from the model by Gibbs sampling.

        Parameters
        ----------
        n : int
            Number of samples.
        steps : int
            Gibbs steps of each chain.
        init : array, optional
            n states to start from; noise if not given.
        mask : boolean array, optional
            True where `init` is known and stays.
        """
        check_is_fitted(self)
        start = None if init is None else self._tensors(self._layers(init, reset=False))
        known = None if mask is None or start is None else self._masks(mask, start)
        if mask is not None and init is None:
            raise ValueError("a mask needs init: it marks which of its entries are known")
        with sensible_threads(self.machine_, n):
            state = sample(self.machine_, n, steps, self._rng(), init=start, mask=known)
        return self._outward(state.visible, like=init)

    def inpaint(self, X: Any, mask: Any, *, steps: int = 100, burn_in: int = 50) -> Any:
        """Fill in what is unknown with its mean given what is known.

        Parameters
        ----------
        X : array
            Data. Unknown entries may hold anything, NaN too.
        mask : boolean array of X's shape or of one sample's
            True where the value is known.
        steps, burn_in : int
            Gibbs steps to average over, and before these.
        """
        check_is_fitted(self)
        layers = self._layers(self._blank_unknown(X, mask), reset=False)
        known = self._masks(mask, layers)
        tensors = self._tensors(layers)
        with sensible_threads(self.machine_, len(next(iter(tensors.values())))):
            filled = conditional_mean(self.machine_, tensors, known, self._rng(), steps=steps, burn_in=burn_in)
        return self._outward(filled, like=X)

    def score_samples(self, X: Any) -> Array:
        """Pseudo-log-likelihood of each sample. Deterministic.

        It is exact for small models, and otherwise taken over a fixed subset of entries and scaled up;
        :func:`mvrbm.likelihood.pseudo_log_likelihood` tells which.
        """
        check_is_fitted(self)
        return self._of_each(X, lambda batch: pseudo_log_likelihood(self.machine_, batch).values)

    def score(self, X: Any, y: Any = None) -> float:
        """Mean of `score_samples`."""
        return float(np.mean(self.score_samples(X)))

    # -- files ------------------------------------------------------------------------------------

    def save_pretrained(self, folder: str | os.PathLike[str]) -> Path:
        """Write the fitted model to a folder, which `from_pretrained` and :func:`mvrbm.from_pretrained` read."""
        check_is_fitted(self)
        world = World.here()
        with world.together(StorageError, OSError):
            if world.is_main:
                with replace_folder(folder) as staging:
                    write_machine(self.machine_, staging, {"estimator": self._description()})
        return Path(folder)

    def _description(self) -> dict[str, Any]:
        shape = self.hidden_shape if self.hidden_shape is None else list(_as_shape(self.hidden_shape))
        return {
            "class": type(self).__name__,
            "params": {"hidden_shape": shape, "rank": self.rank, "visible": self.visible},
        }

    @classmethod
    def from_pretrained(cls, folder: str | os.PathLike[str], *, device: str = "auto") -> Self:
        """Read a model that `save_pretrained` wrote."""
        described = read_config(Path(folder)).get("estimator")
        if not isinstance(described, dict) or described.get("class") != cls.__name__:
            raise StorageError(
                f"{folder} does not hold a {cls.__name__}"
                + (f" but a {described.get('class')}" if isinstance(described, dict) else "")
            )
        try:
            params = dict(described["params"])
            shape = params.get("hidden_shape")
            params["hidden_shape"] = tuple(shape) if isinstance(shape, list) else shape
            estimator = cls(**params, device=device)
            machine = read_machine(Path(folder)).to(_device(device))
            estimator._restore(machine, described)
        except StorageError:
            raise
        except (KeyError, TypeError, ValueError) as error:
            raise StorageError(f"{folder}: the estimator's description is damaged: {error}") from error
        return estimator

    def _restore(self, machine: BoltzmannMachine, described: Mapping[str, Any]) -> None:
        self.machine_, self.history_ = machine, []
        self._trainer = None

    # -- helpers ----------------------------------------------------------------------------------

    def _rng(self) -> RandomSource:
        seed = int(check_random_state(self.random_state).randint(2**31 - 1))
        return RandomSource(seed, device=self.machine_.like.device)

    def _batches(self, X: Any) -> Iterator[dict[str, Tensor]]:
        return self._cut(self._layers(X, reset=False))

    def _cut(self, layers: Mapping[str, Array]) -> Iterator[dict[str, Tensor]]:
        """Batches to read from: they may share the memory of the arrays."""
        n = len(next(iter(layers.values())))
        with torch.no_grad():
            for first in range(0, n, _ROWS_AT_ONCE):
                some = {name: array[first : first + _ROWS_AT_ONCE] for name, array in layers.items()}
                yield self._tensors(some, copy=False)

    def _of_each(self, X: Any, compute: Callable[[dict[str, Tensor]], Tensor]) -> Array:
        """Compute something of every sample, batch by batch, into one array."""
        layers = self._layers(X, reset=False)
        found, first = np.empty(0), 0
        for batch in self._cut(layers):
            some = _out(compute(batch))
            if first == 0:  # only now are its shape and dtype known
                found = np.empty((len(next(iter(layers.values()))), *some.shape[1:]), dtype=some.dtype)
            found[first : first + len(some)] = some
            first += len(some)
        return found

    def _tensors(self, layers: Mapping[str, Array], *, copy: bool = True) -> dict[str, Tensor]:
        tensors = {}
        for name, unit in self.machine_.layers.items():
            array = layers[name]
            # PyTorch has no tensors that cannot be written to, go backwards, or lie across other things.
            plain = array.flags.writeable and all(step >= 0 and step % array.itemsize == 0 for step in array.strides)
            if copy or not plain:
                array = np.array(array)
            tensor = torch.from_numpy(array).to(self.machine_.like)
            tensors[name] = tensor * unit.byte_scale if array.dtype == np.uint8 else tensor
        return tensors

    def _masks(self, mask: Any, layers: Mapping[str, Any]) -> dict[str, Tensor]:
        """Return which entries are known, by layer. A layer without a mask is known throughout."""
        parts = self._masks_by_name(mask)
        if not set(parts) <= set(layers):
            raise ValueError(f"mask names {sorted(parts)}, but the data has {sorted(layers)}")
        known = {}
        for name, layer in layers.items():
            shape = tuple(layer.shape)
            array = np.asarray(parts.get(name, np.True_))
            if array.dtype != bool:
                raise ValueError(f"mask must be boolean, True where the value is known, got {array.dtype}")
            features = math.prod(shape[1:])
            if array.shape not in ((), shape, shape[1:], (shape[0], features), (features,)):
                raise ValueError(f"mask must have the data's shape {shape} or one sample's, got {array.shape}")
            arranged = array if array.ndim == 0 else array.reshape(-1, *shape[1:])
            known[name] = torch.from_numpy(np.broadcast_to(arranged, shape).copy())
        return known

    def _masks_by_name(self, mask: Any) -> Mapping[str, Any]:
        raise NotImplementedError

    def _blank_unknown(self, X: Any, mask: Any) -> Any:
        """Return the data with something valid where it is not known, so that the checks see only what is."""
        raise NotImplementedError

    def __sklearn_tags__(self) -> Any:
        """Tell scikit-learn that float32 stays float32."""
        tags = super().__sklearn_tags__()
        tags.transformer_tags.preserves_dtype = ["float64", "float32"]
        return tags


class _SingleLayer(_ArrayRBM):
    """An estimator of one visible layer: arrays in, arrays out."""

    largest_order: ClassVar[int | None] = None
    visible_shape_: tuple[int, ...]
    _as_arrays: bool

    def _layers(self, X: Any, *, reset: bool) -> dict[str, Array]:
        shape = None if reset else self.visible_shape_
        if isinstance(X, Shards):
            return self._sharded_layers(X, shape, reset=reset)
        given = X if hasattr(X, "ndim") else np.asarray(X)
        if given.ndim > 2 and len(given) == 0:
            raise ValueError("the data is empty: at least one sample is needed")
        if given.ndim > 2:
            array_shape = tuple(given.shape[1:])
            if shape is not None and array_shape != shape:
                raise ValueError(f"samples must have shape {shape}, got {array_shape}")
            X = np.asarray(given).reshape(len(given), -1)
        else:
            array_shape = None
        dtype = None if getattr(given, "dtype", None) == np.uint8 else [np.float64, np.float32]
        try:
            rows = validate_data(self, X, reset=reset, dtype=dtype)
        except ValueError as error:
            reason = str(error).splitlines()[0]
            if "NaN" not in reason:
                raise
            raise ValueError(
                f"{reason} To learn or fill in with missing entries, say which are known with mask="
            ) from None
        if shape is None:
            shape = self._shape_of_samples(rows.shape[1], array_shape)
        self._refuse_beyond_unit_interval(rows)
        if reset and self.visible == "bernoulli" and rows.dtype == np.uint8 and rows.max() <= 1:
            warnings.warn("bytes are divided by 255, but these are all 0 or 1: give them as floats", stacklevel=3)
        if reset:
            self.visible_shape_, self._as_arrays = shape, array_shape is not None
        return {_SINGLE: rows.reshape(len(rows), *shape)}

    def _sharded_layers(self, X: Shards, shape: tuple[int, ...] | None, *, reset: bool) -> dict[str, Any]:
        """Take over what is too large to be looked at: the trainer checks it batch by batch."""
        _check_visible(self.visible)
        n_features, array_shape = math.prod(X.shape[1:]), X.shape[1:] if X.ndim > 2 else None
        if shape is None:
            shape = self._shape_of_samples(n_features, array_shape)
        if math.prod(shape) != n_features:
            raise ValueError(f"samples must have shape {shape}, got {X.shape[1:]}")
        if reset:
            self.n_features_in_ = n_features
            self.visible_shape_, self._as_arrays = shape, array_shape is not None
        return {_SINGLE: X.reshape(len(X), *shape)}

    def _shape_of_samples(self, n_features: int, array_shape: tuple[int, ...] | None) -> tuple[int, ...]:
        asked = None if self.visible_shape is None else _as_shape(self.visible_shape, "visible_shape")
        if array_shape is not None and asked is not None and array_shape != asked:
            raise ValueError(f"visible_shape is {asked}, but samples have shape {array_shape}")
        shape = array_shape or asked or (n_features,)
        if math.prod(shape) != n_features:
            raise ValueError(
                f"visible_shape {shape} has {math.prod(shape)} entries, but the data has {n_features} features"
            )
        if self.largest_order is not None and len(shape) > self.largest_order:
            raise ValueError(f"{type(self).__name__} takes matrices, got samples of shape {shape}: use TVRBM")
        return shape

    def _refuse_beyond_unit_interval(self, rows: Array) -> None:
        _check_visible(self.visible)
        if self.visible == "bernoulli" and rows.dtype != np.uint8 and (rows.min() < 0 or rows.max() > 1):
            raise ValueError(
                f"visible='bernoulli' takes data from 0 to 1, got {rows.min():g} to {rows.max():g}: "
                "rescale it, or use visible='gaussian'"
            )

    def _masks_by_name(self, mask: Any) -> Mapping[str, Any]:
        return {_SINGLE: mask}

    def _blank_unknown(self, X: Any, mask: Any) -> Any:
        return X if mask is None else _blanked(X, mask)

    def _units(self, layers: Mapping[str, Array]) -> dict[str, Unit]:
        return {_SINGLE: UNITS[self.visible](layers[_SINGLE].shape[1:])}

    def _outward(self, layers: Mapping[str, Tensor], like: Any = None) -> Array:
        array = _out(layers[_SINGLE])
        as_arrays = self._as_arrays if like is None else np.ndim(like) > 2
        return array if as_arrays else array.reshape(len(array), -1)

    def _description(self) -> dict[str, Any]:
        names = getattr(self, "feature_names_in_", None)
        described = super()._description()
        described["params"]["visible_shape"] = (
            None if self.visible_shape is None else list(_as_shape(self.visible_shape, "visible_shape"))
        )
        described["as_arrays"] = self._as_arrays
        described["feature_names"] = None if names is None else list(map(str, names))
        return described

    def _restore(self, machine: BoltzmannMachine, described: Mapping[str, Any]) -> None:
        super()._restore(machine, described)
        if list(machine.layers) != [_SINGLE]:
            raise StorageError(f"a {type(self).__name__} has one visible layer, got {list(machine.layers)}")
        if machine.layers[_SINGLE].name != self.visible:
            raise ValueError(f"visible is {self.visible!r:.100}, but its units are {machine.layers[_SINGLE].name}")
        self.visible_shape_ = machine.layers[_SINGLE].shape
        self.n_features_in_ = math.prod(self.visible_shape_)
        self._as_arrays = bool(described["as_arrays"])
        names = described["feature_names"]
        if names is not None:
            if len(names) != self.n_features_in_ or not all(isinstance(name, str) for name in names):
                raise StorageError(f"feature_names must be {self.n_features_in_} texts, got {names!r:.100}")
            self.feature_names_in_ = np.asarray(names, dtype=object)


class MVRBM(_SingleLayer):
    r"""Matrix-variate restricted Boltzmann machine.

    :math:`E(X, Y) = -\langle Y, U X V^\top\rangle - \langle B, X\rangle - \langle C, Y\rangle`, with sums of
    `rank` such bilinear maps.

    Parameters
    ----------
    hidden_shape : tuple of int, optional
        Shape of the hidden layer, with as many modes as a sample; the sample's own if not given.
    rank : int
        Number of bilinear maps that are added up.
    visible : {"bernoulli", "gaussian"}
        What entries are: from 0 to 1, or real.
    visible_shape : tuple of int, optional
        What array a row of 2-D input is. Without it a row is a vector. Not needed for input of shape (n, I, J).
    n_epochs : int, optional
        Passes over the data; the recipe's if not given (default: 10).
    batch_size : int, optional
        Samples an update; the recipe's if not given (default: 100).
    learning_rate : float, optional
        Step size; the recipe's if not given (default: from the size of the layers).
    recipe : str or Recipe
        ``"default"``, ``"paper"`` (Algorithm 1), or a :class:`~mvrbm.learning.Recipe`.
    backend : {"auto", "reference"}
        Fastest path, or gradients by autograd.
    random_state : int, RandomState or None
        Seed.
    device : str
        ``"auto"`` is a GPU if there is one.
    verbose : int
        Whether to show progress.

    Attributes
    ----------
    machine_ : BoltzmannMachine
        The model.
    history_ : list of dict
        What callbacks logged.
    visible_shape_ : tuple of int
        Shape of a sample.
    """

    largest_order = 2


class TVRBM(_SingleLayer):
    r"""Tensor-variate restricted Boltzmann machine, for samples of any order.

    :math:`E(X, Y) = -\langle Y, X \times_1 U_1 \cdots \times_D U_D\rangle - \langle B, X\rangle - \langle C, Y\rangle`.
    See :class:`MVRBM` for the parameters.
    """


class RBM(_SingleLayer):
    r"""Classic restricted Boltzmann machine, :math:`E(x, y) = -y^\top W x - b^\top x - c^\top y`.

    See :class:`MVRBM` for the other parameters.

    Parameters
    ----------
    hidden_shape : int
        Number of hidden units.
    """

    def __init__(
        self,
        hidden_shape: Any = 256,
        *,
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
        super().__init__(
            hidden_shape,
            visible=visible,
            visible_shape=visible_shape,
            n_epochs=n_epochs,
            batch_size=batch_size,
            learning_rate=learning_rate,
            recipe=recipe,
            backend=backend,
            random_state=random_state,
            device=device,
            verbose=verbose,
        )

    def _coupling(self) -> Coupling:
        return Dense()

    def _check_orders(self, name: str, visible_shape: tuple[int, ...], hidden_shape: tuple[int, ...]) -> None:
        """Accept any: a full matrix connects every shape to every other."""

    def _description(self) -> dict[str, Any]:
        described = super()._description()
        del described["params"]["rank"]
        return described

    @classmethod
    def from_sklearn(cls, fitted: Any, *, device: str = "auto") -> RBM:
        """Take over a fitted scikit-learn `BernoulliRBM`."""
        check_is_fitted(fitted, ["components_", "intercept_hidden_", "intercept_visible_"])
        weights = np.asarray(fitted.components_)
        estimator = cls(
            weights.shape[0],
            n_epochs=fitted.n_iter,
            batch_size=fitted.batch_size,
            learning_rate=fitted.learning_rate,
            random_state=fitted.random_state,
            device=device,
        )
        machine = BoltzmannMachine({_SINGLE: Bernoulli(weights.shape[1])}, Bernoulli(weights.shape[0]), Dense())
        machine = machine.to(dtype=torch.float64 if weights.dtype == np.float64 else torch.float32)
        with torch.no_grad():
            machine.links[_SINGLE].get_parameter("weight").copy_(torch.from_numpy(weights))
            machine.layers[_SINGLE].bias.copy_(torch.from_numpy(np.asarray(fitted.intercept_visible_)))
            machine.hidden.bias.copy_(torch.from_numpy(np.asarray(fitted.intercept_hidden_)))
        names = getattr(fitted, "feature_names_in_", None)
        estimator._restore(machine.to(_device(device)), {"as_arrays": False, "feature_names": names})
        return estimator


class MMVRBM(_ArrayRBM):
    r"""Multimodal MVRBM: several arrays a sample, one hidden layer.

    :math:`E = \sum_m [\varepsilon_m(X_m) - \langle Y, U_m X_m V_m^\top\rangle] - \langle C, Y\rangle`.

    Data is a dict of arrays by modality, or a tuple of arrays, whose modalities are then called "0", "1",
    and so on. What is unknown of a modality, or a whole one, is found by `inpaint`.
    See :class:`MVRBM` for the other parameters.

    Parameters
    ----------
    hidden_shape : tuple of int, optional
        Shape of the hidden layer; that of the first modality if not given.
    rank : int
        Rank of every coupling.
    visible : str or dict of str to str
        ``"bernoulli"`` or ``"gaussian"``, for all modalities or for each.
    """

    modalities_: list[str]

    def __init__(
        self,
        hidden_shape: Any = None,
        *,
        rank: int = 1,
        visible: Any = "bernoulli",
        n_epochs: int | None = None,
        batch_size: int | None = None,
        learning_rate: float | None = None,
        recipe: str | Recipe = "default",
        backend: str = "auto",
        random_state: Any = None,
        device: str = "auto",
        verbose: int = 0,
    ) -> None:
        super().__init__(
            hidden_shape,
            rank=rank,
            visible=visible,
            n_epochs=n_epochs,
            batch_size=batch_size,
            learning_rate=learning_rate,
            recipe=recipe,
            backend=backend,
            random_state=random_state,
            device=device,
            verbose=verbose,
        )

    def _layers(self, X: Any, *, reset: bool) -> dict[str, Array]:
        parts = self._by_name(X)
        if not reset and set(parts) != set(self.modalities_):
            raise ValueError(f"expected modalities {self.modalities_}, got {list(parts)}")
        kinds = self._kinds(list(parts))
        layers = {}
        for name in parts if reset else self.modalities_:
            array = np.asarray(parts[name])
            if array.ndim < 2:
                raise ValueError(f"modality '{name}' must have one sample along its first axis, got {array.shape}")
            if array.dtype not in (np.uint8, np.float32, np.float64):
                array = array.astype(np.float64)
            if array.dtype != np.uint8 and not np.isfinite(array).all():
                raise ValueError(f"modality '{name}' contains NaN or infinity")
            if kinds[name] == "bernoulli" and array.dtype != np.uint8 and (array.min() < 0 or array.max() > 1):
                raise ValueError(
                    f"modality '{name}' with visible='bernoulli' takes data from 0 to 1, got {array.min():g} to "
                    f"{array.max():g}: rescale it, or use visible={{'{name}': 'gaussian'}}"
                )
            layers[name] = array
        lengths = {name: len(array) for name, array in layers.items()}
        if len(set(lengths.values())) != 1 or 0 in lengths.values():
            raise ValueError(f"modalities need the same number of samples, at least one, got {lengths}")
        if reset:
            self.modalities_ = list(layers)
        return layers

    @staticmethod
    def _by_name(X: Any) -> dict[str, Any]:
        if isinstance(X, Mapping):
            return dict(X)
        if isinstance(X, tuple):
            return {str(number): part for number, part in enumerate(X)}
        raise ValueError(f"MMVRBM takes a dict or a tuple of arrays, got {type(X).__name__}")

    def _masks_by_name(self, mask: Any) -> Mapping[str, Any]:
        return self._by_name(mask)

    def _blank_unknown(self, X: Any, mask: Any) -> Any:
        if mask is None:
            return X
        masks = self._by_name(mask)
        return {name: _blanked(part, masks.get(name, np.True_)) for name, part in self._by_name(X).items()}

    def _kinds(self, names: Sequence[str]) -> dict[str, str]:
        kinds = dict(self.visible) if isinstance(self.visible, Mapping) else dict.fromkeys(names, self.visible)
        if set(kinds) != set(names):
            raise ValueError(f"visible names modalities {sorted(kinds)}, but the data has {sorted(names)}")
        for kind in kinds.values():
            _check_visible(kind)
        return kinds

    def _units(self, layers: Mapping[str, Array]) -> dict[str, Unit]:
        kinds = self._kinds(list(layers))
        return {name: UNITS[kinds[name]](array.shape[1:]) for name, array in layers.items()}

    def _outward(self, layers: Mapping[str, Tensor], like: Any = None) -> dict[str, Array]:
        return {name: _out(array) for name, array in layers.items()}

    def _restore(self, machine: BoltzmannMachine, described: Mapping[str, Any]) -> None:
        super()._restore(machine, described)
        units = {name: unit.name for name, unit in machine.layers.items()}
        if self._kinds(list(units)) != units:
            raise ValueError(f"visible is {self.visible!r:.100}, but its units are {units}")
        self.modalities_ = list(units)


def _blanked(X: Any, mask: Any) -> Any:
    """Return an array with zeros where a mask says that it is not known. What does not fit is refused later."""
    known = np.asarray(mask)
    if not isinstance(X, np.ndarray) or X.dtype.kind != "f" or known.dtype != bool or known.ndim == 0 or len(X) == 0:
        return X
    if known.size not in (X.size, X.size // len(X)):
        return X
    return np.where(known.reshape(-1, *X.shape[1:]), X, np.zeros((), X.dtype))


def _check_visible(kind: Any) -> None:
    allowed = (Bernoulli.name, Gaussian.name)
    if kind not in allowed:
        raise ValueError(f"visible must be one of {list(allowed)}, got {kind!r}")


def _as_shape(shape: Any, what: str = "hidden_shape") -> tuple[int, ...]:
    return as_shape(shape, what)


def _device(device: str) -> torch.device:
    if device in ("auto", "cuda") and torch.cuda.is_available():
        World.here()  # each of several processes has a GPU of its own
        return torch.device("cuda", torch.cuda.current_device())
    if device == "auto":
        return torch.device("cpu")
    return torch.device(device)


def _out(tensor: Tensor) -> Array:
    return tensor.detach().cpu().numpy()


def _joined(pieces: Sequence[Mapping[str, Tensor]]) -> dict[str, Tensor]:
    return {name: torch.cat([piece[name] for piece in pieces]) for name in pieces[0]}
