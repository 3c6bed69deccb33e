"""Mixtures for real-valued arrays, with the interface of :class:`sklearn.mixture.GaussianMixture`."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import KW_ONLY, dataclass
from pathlib import Path
from typing import Any, Self

import numpy as np
import torch
from sklearn.base import ClassNamePrefixFeaturesOutMixin, DensityMixin, TransformerMixin
from sklearn.utils.validation import _check_sample_weight, check_is_fitted
from torch import Tensor

from mvrbm.couplings import Dense
from mvrbm.devices import resolve_device
from mvrbm.errors import StorageError
from mvrbm.estimators.base import check_finite, to_array
from mvrbm.estimators.batches import Array, model_dtype
from mvrbm.estimators.inputs import VISIBLE, ArrayInput
from mvrbm.estimators.mixture.conditional import Conditional, in_chunks, pick
from mvrbm.estimators.mixture.em import Fitting, Prior, start
from mvrbm.estimators.parameters import seed_of
from mvrbm.estimators.persistence import SavedEstimator, restore_names
from mvrbm.estimators.undo import undo_on_error
from mvrbm.interrupt import finish_on_interrupt
from mvrbm.machine import BoltzmannMachine
from mvrbm.random import RandomSource
from mvrbm.saving import read_machine, register, write_machine
from mvrbm.units import Bernoulli, WhitenedMixture
from mvrbm.units.base import LARGEST_PARAMETER
from mvrbm.validation import choice, number, truth_value, whole_number

# Number of samples that the default number of epochs visits, and the limits of that number.
_VISITS = 3_000_000
_FEWEST_EPOCHS, _MOST_EPOCHS = 15, 200
# Number of epochs of expectation maximization after epochs of batches.
_FULL_EPOCHS = 2
# Number of epochs of expectation maximization that may revive components.
_SETTLED_EPOCHS = 5
# Largest number of samples to train on without batches, and the batch size for more samples.
_MOST_AT_ONCE = 4000
_BATCH_SIZE = 500
# Initial learning rate of Adam, which falls to zero linearly.
_LEARNING_RATE = 0.03
# Largest share and number of samples that n_components="auto" holds out, and the largest number of components it tries.
_HELD_OUT = 0.2
_MOST_HELD_OUT = 20_000
_MOST_COMPONENTS = 256
# Smallest number of samples per component.
_FEWEST_SAMPLES = 10


@register("MatrixMixture")
@dataclass(eq=False, repr=False)
class MatrixMixture(ClassNamePrefixFeaturesOutMixin, ArrayInput, TransformerMixin, DensityMixin, SavedEstimator):
    r"""Mixture of separable whitenings with contrasts, an exact density for real-valued arrays.

    .. math:: p(V) = \sum_{kc} \pi_{kc}\, p(V \mid k, c), \qquad
              Z = (V - M_k) \times_1 A_k^{(1)} \dots \times_D A_k^{(D)}

    Each component `k` whitens the rows, the columns and any further axes of an array with one matrix per axis. Given
    the component and one of its contrasts `c`, the coefficients `Z` are independent, and their scales are products of a
    factor of the contrast and a factor per coefficient. With gates, each coefficient is a mixture of three Gaussians.
    See :class:`mvrbm.WhitenedMixture` for the formulas. A component has far fewer parameters than a full covariance.

    The parameters are fitted by expectation maximization with updates in closed form, and before that by stochastic
    gradient ascent if there are many samples.

    Parameters
    ----------
    n_components : int or "auto", default=8
        Number of components, but at most one per 10 samples. ``"auto"`` doubles the number for as long as this improves
        the likelihood of samples that are held out, and then fits all samples.
    n_contrasts : int, default=4
        Number of contrasts per component.
    gate : bool, default=True
        Whether each coefficient is a mixture of three Gaussians given component and contrast. If False, conditional
        distributions are exact without sampling.
    level : bool, default=False
        Whether the mean over the entries of a sample is independent of everything else, with a Gaussian of its own.
        This suits pictures and signals whose brightness or offset says little about their pattern.
    means : {"own", "shared", "one"}, default="own"
        Whether each component has its own mean, all components have the mean of the data, or all entries have the same
        mean.
    whiten : bool, default=True
        Whether to learn the matrices. If False, they are orthonormal cosine transforms.
    visible_shape : sequence of int, optional
        Shape of a sample, if samples are rows of features. Default: the shape of the samples.
    n_epochs : int, optional
        Largest number of passes over the data. Default: 15 to 200, fewer for more samples.
    batch_size : int, optional
        Number of samples per update. With batches, Adam follows the exact gradient of the likelihood, and the last two
        epochs are expectation maximization. If all samples are in one batch, all epochs are expectation maximization
        with updates in closed form, and the likelihood of the training data plus the log-density of the parameters
        under pseudo-samples (see `shrinkage`) never decreases. Default: all samples if there are at most 4000, and 500
        otherwise.
    shrinkage : float, default=1.0
        Number of pseudo-samples per component. They have the covariances of the data along each axis, in the scale of
        the component, and keep components of few samples regular. If it is 0, `fit` maximizes the likelihood.
    tol : float, default=0.001
        Without batches, training stops if an epoch improves the mean log-likelihood by less than this.
    warm_start : bool, default=False
        Whether `fit` continues from the parameters of the fitted or loaded model.
    random_state : int, RandomState or None, default=None
        Seed or generator for random numbers. Pass an int for reproducible results.
    device : str or torch.device, default="auto"
        Device to run on, such as ``"cpu"`` or ``"cuda"``. ``"auto"`` selects a GPU if one is available.
    verbose : int, default=0
        If nonzero, show a progress bar.

    Attributes
    ----------
    unit_ : WhitenedMixture
        The fitted density.
    history_ : list of float
        Mean log-likelihood of the training samples before the update of each epoch, or during the epoch if it has
        several updates.
    converged_ : bool
        Whether training stopped before `n_epochs`, because the likelihood no longer improved.
    n_components_ : int
        Number of components.
    validation_scores_ : dict of int to float
        Mean log-likelihood of the samples held out for each number of components. Only with ``n_components="auto"``.
    interrupted_ : bool
        Whether Ctrl-C or SIGTERM stopped training.

    Examples
    --------
    >>> from sklearn.datasets import load_digits
    >>> from mvrbm import MatrixMixture
    >>> images = load_digits().images[:300]
    >>> model = MatrixMixture(2, n_epochs=3, random_state=0).fit(images)
    >>> model.predict_proba(images).shape, model.sample(5)[0].shape
    ((300, 2), (5, 8, 8))
    """

    n_components: int | str = 8
    _: KW_ONLY
    n_contrasts: int = 4
    gate: bool = True
    level: bool = False
    means: str = "own"
    whiten: bool = True
    visible_shape: Any = None
    n_epochs: int | None = None
    batch_size: int | None = None
    shrinkage: float = 1.0
    tol: float = 1e-3
    warm_start: bool = False
    random_state: Any = None
    device: str | torch.device = "auto"
    verbose: int = 0

    # -- training ---------------------------------------------------------------------------------

    def fit(self, X: Any, y: Any = None, sample_weight: Any = None) -> Self:
        r"""Fit the mixture to samples.

        Parameters
        ----------
        X : array of shape (n, \*visible_shape) or (n, n_features)
            Training data. NaN entries are unknown. They are drawn from the model before each epoch.
        y : None
            Not used, present here for API consistency by convention.
        sample_weight : array of shape (n,), optional
            Weights of the samples. Default: 1.

        Returns
        -------
        self : object
            Fitted estimator.

        Notes
        -----
        Ctrl-C and SIGTERM stop training after the current update and raise KeyboardInterrupt and SystemExit,
        respectively. The partially trained model remains usable, and ``warm_start=True`` continues its training. After
        an error or a second Ctrl-C, the model is restored to its state before `fit`.
        """
        continues = self.warm_start and hasattr(self, "unit_")
        with undo_on_error(self, [self.unit_] if continues else []):
            error = self._fit(X, sample_weight, continues=continues)
        if error is not None:
            raise error
        return self

    def _fit(self, X: Any, sample_weight: Any, *, continues: bool) -> BaseException | None:
        """Fit the mixture, and return the exception to raise if training was interrupted."""
        n_components = self.n_components
        if n_components != "auto":
            n_components = whole_number(n_components, "n_components")
        for name in ("gate", "level", "whiten"):
            truth_value(getattr(self, name), name)
        choice(self.means, "means", ("own", "shared", "one"))
        data = self._read_values(X, reset=not continues)
        weights = _check_sample_weight(sample_weight, data, dtype=np.float64, ensure_non_negative=True)
        data, weights = data[weights > 0], weights[weights > 0]
        if len(data) < 2:
            raise ValueError(f"fit requires at least 2 samples with positive weights, got n_samples={len(data)}")
        device, dtype = resolve_device(self.device), model_dtype({VISIBLE: data})
        x = torch.from_numpy(np.ascontiguousarray(data)).to(device=device, dtype=dtype)
        w = torch.from_numpy(weights / weights.sum()).to(device=device, dtype=dtype)
        total = max(float(weights.sum()), float(len(weights)))  # weights below 1 on average do not mean fewer samples
        rng = RandomSource(seed_of(self.random_state))
        stop = _Stop()
        with stop.on_interrupt():
            if continues:
                self._check_unit(data.shape[1:])
            elif n_components == "auto":
                n_components = self._choose(x, w, total, rng.split(1)[0], stop)
            if not continues:
                most = max(1, int(total) // _FEWEST_SAMPLES)
                self.unit_ = self._new_unit(x, w, min(int(n_components), most), rng.split(1)[0])
                self.history_: list[float] = []
            self.n_components_ = self.unit_.n_components
            self._train(self.unit_, x, w, total, rng.split(1)[0], stop)
        self.interrupted_ = stop.error is not None
        return stop.error

    def _check_unit(self, shape: tuple[int, ...]) -> None:
        """Raise ValueError if the parameters of the estimator no longer describe the fitted mixture."""
        wanted = {name: getattr(self, name) for name in ("n_contrasts", "gate", "level", "means", "whiten")}
        config = self.unit_.config()
        for name, value in wanted.items():
            if config[name] != value:
                raise ValueError(
                    f"training cannot continue because {name} is {value!r}, but the model has {name}={config[name]!r}; "
                    "use warm_start=False to train a new model"
                )

    def _new_unit(self, x: Tensor, w: Tensor, n_components: int, rng: RandomSource) -> WhitenedMixture:
        """Create a mixture and initialize it from weighted samples, which may contain NaN."""
        unit = WhitenedMixture(
            tuple(x.shape[1:]),
            n_components=n_components,
            n_contrasts=self.n_contrasts,
            gate=self.gate,
            level=self.level,
            means=self.means,
            whiten=self.whiten,
        ).to(x)
        unit.requires_grad_(False)
        seen = torch.isfinite(x) * w.reshape(-1, *[1] * (x.ndim - 1))
        total = seen.sum(0).clamp(min=torch.finfo(x.dtype).tiny)
        mean = (seen * x.nan_to_num()).sum(0) / total
        variance = (seen * (x.nan_to_num() - mean) ** 2).sum(0) / total
        missing = torch.isnan(x)
        highest = torch.where(missing, -math.inf, x).amax(0)
        lowest = torch.where(missing, math.inf, x).amin(0)
        unit.initialize_from(mean, torch.where(highest > lowest, variance, 0.0), len(x))  # constants without rounding
        start(unit, unit.rotate(torch.where(torch.isnan(x), mean, x)), w, rng)
        return unit

    def _train(self, unit: WhitenedMixture, x: Tensor, w: Tensor, total: float, rng: RandomSource, stop: _Stop) -> None:
        """Train a mixture on samples, which may contain NaN, with weights `w` of sum 1 that had the sum `total`."""
        from tqdm import tqdm

        n = len(x)
        epochs = min(max(_VISITS // n, _FEWEST_EPOCHS), _MOST_EPOCHS)
        epochs = epochs if self.n_epochs is None else whole_number(self.n_epochs, "n_epochs")
        batch_size = n if n <= _MOST_AT_ONCE else _BATCH_SIZE
        batch_size = batch_size if self.batch_size is None else whole_number(self.batch_size, "batch_size")
        tol = number(self.tol, "tol")
        missing = _Missing(unit, x, rng) if bool(torch.isnan(x).any()) else None
        rotated = unit.rotate(x) if missing is None else missing.rotated()
        prior = Prior.of(unit, rotated, w, number(self.shrinkage, "shrinkage") / total)
        fitting = Fitting(unit, w, batch_size, prior, rng)
        self.converged_ = False
        bar = tqdm(total=epochs, unit="epoch", disable=not self.verbose)
        last = epochs - 1
        for epoch in range(epochs):
            if stop.error is not None:
                break
            if missing is not None and epoch:
                rotated = missing.redraw()
                fitting.forget()  # the likelihoods of different draws cannot be compared
            if n > batch_size and epoch < (batches := epochs - min(_FULL_EPOCHS, epochs - 1)):
                rate, step = _LEARNING_RATE * (1 - epoch / batches), _LEARNING_RATE / batches
                fitting.epoch_of_batches(rotated, rate, rate - step, lambda: stop.error is not None)
            else:
                fitting.full_epoch(
                    rotated, update=epoch < last or missing is not None, may_revive=epoch < _SETTLED_EPOCHS
                )
            bar.update()
            bar.set_postfix(score=f"{fitting.history[-1]:.4f}")
            recent = fitting.history[-2:]
            complete = n <= batch_size and missing is None and epoch >= _SETTLED_EPOCHS
            if complete and recent[-1] - recent[0] < tol and epoch < last:
                self.converged_ = True
                break
        bar.close()
        self.history_ = [*self.history_, *fitting.history]
        unit.check_parameters(VISIBLE)

    def _choose(self, x: Tensor, w: Tensor, total: float, rng: RandomSource, stop: _Stop) -> int:
        """Return the number of components with the highest likelihood of samples that are held out."""
        order = rng.permutation(len(x), x.device)
        complete = order[~torch.isnan(x[order]).flatten(1).any(1)]
        held = complete[: min(int(_HELD_OUT * len(x)), _MOST_HELD_OUT)]
        if not len(held):
            raise ValueError("n_components='auto' requires at least 5 samples without missing entries")
        rest = torch.ones(len(x), dtype=torch.bool, device=x.device)
        rest[held] = False
        self.validation_scores_: dict[int, float] = {}
        count, best = 1, -math.inf
        while count <= min(_MOST_COMPONENTS, int(rest.sum()) // 2) and stop.error is None:
            part = w[rest] / w[rest].sum()
            unit = self._new_unit(x[rest], part, count, rng)
            self.history_ = []
            self._train(unit, x[rest], part, total * float(w[rest].sum()), rng, stop)
            logs = torch.logsumexp(in_chunks(unit, unit.joint_log_density, unit.rotate(x[held])).flatten(1), 1)
            self.validation_scores_[count] = float((w[held] / w[held].sum()) @ logs)
            if not self.validation_scores_[count] > best:
                break
            best = self.validation_scores_[count]
            count *= 2
        return max(self.validation_scores_, key=self.validation_scores_.__getitem__, default=1)

    # -- densities --------------------------------------------------------------------------------

    def score_samples(self, X: Any) -> Array:
        """Return the log-density of each sample in nats, as an array of shape (n,). It is exact."""
        unit = self._fitted()
        data = self._read_values(X, reset=False)
        if np.isnan(data).any():
            raise ValueError("X contains NaN, but score_samples requires complete samples; fill them in with inpaint")
        return self._apply(data, lambda u: torch.logsumexp(unit.joint_log_density(u).flatten(1), 1))

    def score(self, X: Any, y: Any = None) -> float:
        """Return the mean log-density of the samples in nats. `y` is ignored."""
        return float(np.mean(self.score_samples(X), dtype=np.float64))

    def bic(self, X: Any) -> float:
        """Return the Bayesian information criterion of the model on the samples. Lower is better."""
        n = len(scores := self.score_samples(X))
        return float(-2 * np.sum(scores, dtype=np.float64) + self.n_parameters_ * math.log(n))

    def aic(self, X: Any) -> float:
        """Return the Akaike information criterion of the model on the samples. Lower is better."""
        return float(-2 * np.sum(self.score_samples(X), dtype=np.float64) + 2 * self.n_parameters_)

    @torch.no_grad()
    def predict_proba(self, X: Any) -> Array:
        """Return the probability of each component given each sample, as an array of shape (n, n_components).

        For samples with missing entries (NaN), these are the probabilities given the known entries. They are exact
        without gates. With gates, each coefficient has the mean variance of its gate.
        """
        unit = self._fitted()
        incomplete = self._incomplete(self._read_values(X, reset=False))
        rotated = unit.rotate(incomplete.filled(incomplete.means))
        joint = in_chunks(unit, unit.joint_log_density, rotated)
        states = torch.softmax(joint.flatten(1), 1)
        states[incomplete.rows] = incomplete.probabilities.to(states)
        return to_array(states.reshape(joint.shape).sum(2))

    def predict(self, X: Any) -> Array:
        """Return the most probable component of each sample, as an array of shape (n,)."""
        labels: Array = np.argmax(self.predict_proba(X), axis=1)
        return labels

    def fit_predict(self, X: Any, y: Any = None, sample_weight: Any = None) -> Array:
        """Fit the mixture, and return the most probable component of each sample. See :meth:`fit`."""
        return self.fit(X, sample_weight=sample_weight).predict(X)

    def transform(self, X: Any) -> Array:
        """Return the probabilities of the components and the whitened coefficients.

        The coefficients are divided by the scale of component and contrast, so that they have about unit variance, and
        averaged over both. The first coefficient is the level if there is one. The array has the shape
        (n, n_components + n_features). Missing entries (NaN) are replaced with their means given the known entries.
        """
        unit = self._fitted()
        first = int(unit.level)

        def features(u: Tensor) -> Tensor:  # (n, N) -> (n, K + N)
            joint = unit.joint_log_density(u)
            share = torch.softmax(joint.flatten(1), 1).reshape(joint.shape)  # (n, K, C)
            mean = torch.logsumexp(unit.log_gates()[:, None] + unit.state_log_variances(), 2)  # (K, C)
            scaled = torch.einsum("nkc,kc->kn", share, torch.exp(-0.5 * mean))
            z = unit.coefficients(u)[..., first:] * torch.exp(0.5 * unit.log_precision)[:, None]  # (K, n, coefficients)
            parts = [share.sum(2), (z * scaled[:, :, None]).sum(0)]
            if unit.level:
                parts.insert(1, u[:, :1] * torch.exp(-0.5 * unit.level_log_variance))
            return torch.cat(parts, 1)

        return self._apply(self._read_values(X, reset=False), features)

    def _fitted(self) -> WhitenedMixture:
        check_is_fitted(self, "unit_")
        return self.unit_

    @torch.no_grad()
    def _apply(self, data: Array, compute: Callable[[Tensor], Tensor]) -> Array:
        """Apply a function to the cosine coefficients of validated samples, in chunks."""
        incomplete = self._incomplete(data)
        rotated = self.unit_.rotate(incomplete.filled(incomplete.means))
        result = to_array(in_chunks(self.unit_, compute, rotated))
        check_finite(result)
        return result

    def _incomplete(self, data: Array, known: Array | None = None) -> _Incomplete:
        """Return validated samples whose unknown entries are drawn. By default, all entries except NaN are known."""
        x = torch.from_numpy(np.array(data)).to(self._fitted().center)
        known = ~np.isnan(data) if known is None else known
        rng = RandomSource(seed_of(self.random_state))
        return _Incomplete(self.unit_, x, torch.from_numpy(known).to(x.device), rng)

    # -- samples ----------------------------------------------------------------------------------

    @torch.no_grad()
    def sample(self, n_samples: int = 1) -> tuple[Array, Array]:
        r"""Draw samples, and return an array of shape (n_samples, \*visible_shape) and the component of each sample.

        The draws are exact and independent. They have the format of the training data.
        """
        unit = self._fitted()
        n = whole_number(n_samples, "n_samples")
        rng = RandomSource(seed_of(self.random_state))
        drawn = [unit.sample(unit.bias.expand(part, *unit.shape), rng) for part in _parts(unit, n)]
        x = torch.cat(drawn)
        joint = in_chunks(unit, unit.joint_log_density, unit.rotate(x)).flatten(1)
        state = pick(torch.softmax(joint, 1), rng.uniform((n, 1), x))[:, 0]
        return self._outward(x), to_array(state // unit.n_contrasts)

    # -- unknown entries --------------------------------------------------------------------------

    def inpaint(self, X: Any, mask: Any = None, *, steps: int = 100, burn_in: int = 20) -> Array:
        """Replace unknown entries with their means given the known entries.

        Without gates, the means are exact. With gates, they are averages over Gibbs sampling of components, contrasts
        and gates. The chains start from the exact conditional distribution for gates replaced with their mean variance.

        Parameters
        ----------
        X : array
            Samples. NaN entries are unknown.
        mask : boolean array with the shape of X or of one sample, optional
            Mask that is True for known entries. If None, all entries that are not NaN are known.
        steps : int, default=100
            Number of Gibbs steps to average over. Only with gates.
        burn_in : int, default=20
            Number of Gibbs steps before averaging starts. Only with gates.

        Returns
        -------
        array
            Copy of the samples with the unknown entries filled in.
        """
        whole_number(steps, "steps")
        whole_number(burn_in, "burn_in", 0)
        return self._fill(X, mask, lambda incomplete: incomplete.mean(steps, burn_in))

    def sample_given(self, X: Any, mask: Any = None, *, burn_in: int = 100) -> Array:
        """Replace unknown entries with a draw given the known entries. See :meth:`inpaint`.

        Without gates, the draws are exact. With gates, they are the states of Gibbs sampling after `burn_in` steps.
        """
        whole_number(burn_in, "burn_in", 0)
        return self._fill(X, mask, lambda incomplete: incomplete.draw(burn_in))

    @torch.no_grad()
    def _fill(self, X: Any, mask: Any, compute: Callable[[_Incomplete], Tensor]) -> Array:
        self._fitted()
        data = self._read_values(X, reset=False)
        known = ~np.isnan(data)
        if mask is not None:
            known = known & self._read_mask(mask, data)
        return self._outward(compute(self._incomplete(data, known)), like=X)

    def _read_mask(self, mask: Any, data: Array) -> Array:
        mask = np.asarray(mask)
        if mask.dtype != bool:
            raise ValueError(f"mask must be boolean (True where the value is known), got {mask.dtype}")
        if mask.size not in (data.size, data[0].size):
            raise ValueError(f"mask must have the shape of X or of one sample {data.shape[1:]}, got {mask.shape}")
        return np.broadcast_to(mask.reshape(-1, *data.shape[1:]), data.shape)

    # -- data and files ---------------------------------------------------------------------------

    def _read_values(self, X: Any, *, reset: bool) -> Array:
        r"""Validate samples and return a real array of shape (n, \*visible_shape), which may contain NaN."""
        data = np.asarray(self._read(X, reset=reset))
        data = data.astype(np.float32) if data.dtype == np.uint8 else data
        largest = np.nanmax(np.abs(data), initial=0.0)
        if np.isinf(largest):
            raise ValueError("Input X contains infinity or a value too large for its dtype")
        if largest > LARGEST_PARAMETER:
            raise ValueError(
                f"X contains the value {largest:.3g}, but the largest supported magnitude is {LARGEST_PARAMETER:g}"
            )
        return data

    @property
    def n_parameters_(self) -> int:
        """Number of fitted parameters."""
        unit = self._fitted()
        unused = {"bias", "log_scale"} | ({"center"} if unit.means == "own" else set())
        return sum(values.numel() for name, values in unit.named_parameters() if name not in unused)

    @property
    def weights_(self) -> Array:
        """Probabilities of the components, as an array of shape (n_components,)."""
        return to_array(self._fitted().log_weights().exp().sum(1))

    @property
    def means_(self) -> Array:
        r"""Means of the components, as an array of shape (n_components, \*visible_shape)."""
        unit = self._fitted()
        own = Conditional(unit).means.to(unit.center).reshape(-1, *unit.shape)
        return to_array(unit.center + own * torch.exp(unit.log_scale))

    @property
    def machine_(self) -> BoltzmannMachine:
        """Machine with the fitted density as its visible layer, and a hidden unit that is not connected to it."""
        hidden = Bernoulli(1).to(self._fitted().center)
        return BoltzmannMachine(self.unit_, hidden, Dense(), std=0.0).to(self.unit_.center)

    @property
    def _n_features_out(self) -> int:
        return self._fitted().n_components + self.n_features_in_

    def _write(self, folder: Path, extra: Mapping[str, Any]) -> None:
        write_machine(self.machine_, folder, extra)

    def _description(self) -> dict[str, Any]:
        learned = {"history": self.history_, "converged": self.converged_}
        return {**super()._description(), **self._describe_input(), **learned}

    def _restore(self, folder: Path, described: Mapping[str, Any]) -> None:
        machine = read_machine(folder)
        unit = machine.layers.get(VISIBLE)
        if not isinstance(unit, WhitenedMixture):
            raise StorageError(f"a mixture requires one layer '{VISIBLE}' of whitened units, got {machine.layers}")
        self.unit_ = unit.to(resolve_device(self.device))
        self.unit_.requires_grad_(False)
        self.n_components_ = unit.n_components
        self.history_ = [number(value, "history", -math.inf) for value in described["history"]]
        self.converged_ = bool(described["converged"])
        self.interrupted_ = False
        self.visible_shape_ = unit.shape
        self.n_features_in_ = math.prod(unit.shape)
        self._takes_arrays = bool(described["as_arrays"])
        restore_names(self, described["feature_names"])

    def __sklearn_tags__(self) -> Any:
        """Return the scikit-learn tags, which declare that `fit` accepts NaN and that float32 is preserved."""
        tags = super().__sklearn_tags__()
        tags.input_tags.allow_nan = True
        tags.transformer_tags.preserves_dtype = ["float64", "float32"]
        return tags


class _Stop:
    """Exception that a signal asks to raise when training has stopped."""

    error: BaseException | None = None

    @contextlib.contextmanager
    def on_interrupt(self) -> Iterator[None]:
        """Context manager that records the first Ctrl-C or SIGTERM instead of ending the program."""

        def notify(kind: type[BaseException]) -> None:
            self.error = kind()

        with finish_on_interrupt(notify):
            yield


class _Incomplete:
    r"""Samples of shape (n, \*shape) with unknown entries, and chains that draw these entries."""

    def __init__(self, unit: WhitenedMixture, x: Tensor, known: Tensor, rng: RandomSource) -> None:
        self.unit, self.rng = unit, rng
        self.x = x
        self.rows = torch.nonzero(~known.flatten(1).all(1))[:, 0]  # incomplete samples
        self.known = known.flatten(1)[self.rows]
        v = (x[self.rows] - unit.center) * torch.exp(-unit.log_scale)
        self.state = v.flatten(1).double().nan_to_num()  # (m, N): standardized, with unknown entries drawn below
        self.law = Conditional(unit)
        self.means = self._start()

    def _start(self) -> Tensor:
        """Draw the unknown entries without gates, and return their means."""
        means = self.state.clone()
        states = self.unit.n_components * self.unit.n_contrasts
        self.probabilities = means.new_zeros(len(means), states)  # of components and contrasts
        patterns, which = torch.unique(self.known, dim=0, return_inverse=True)
        for number_, known in enumerate(patterns):
            rows = torch.nonzero(which == number_)[:, 0]
            found = self.law.given(self.state[rows], known)
            unknown = torch.nonzero(~known)[:, 0]
            probabilities = self.probabilities[rows] = found.log_weights.exp()
            means[rows[:, None], unknown] = torch.einsum("nm,nmu->nu", probabilities, found.means)
            state = pick(probabilities, self.rng.uniform((len(rows), 1), means))[:, 0]
            normal = self.rng.normal((len(rows), len(unknown), 1), means)
            noise = torch.linalg.solve_triangular(found.factors[state].mT, normal, upper=True)[:, :, 0]
            drawn = found.means[torch.arange(len(rows), device=state.device), state] + noise
            self.state[rows[:, None], unknown] = drawn
        return means

    def step(self) -> Tensor:
        """Make one Gibbs step, and return the means from which the unknown entries were drawn."""
        self.state, means = self.law.gibbs_step(self.state, self.known, self.rng)
        return means

    def mean(self, steps: int, burn_in: int) -> Tensor:
        """Return the samples with the unknown entries replaced with their conditional means."""
        if not self.unit.gate or not len(self.rows):
            return self.filled(self.means)
        for _ in range(burn_in):
            self.step()
        total = torch.zeros_like(self.state)
        for _ in range(steps):
            total += self.step()
        return self.filled(total / steps)

    def draw(self, burn_in: int) -> Tensor:
        """Return the samples with the unknown entries drawn."""
        for _ in range(burn_in if self.unit.gate and len(self.rows) else 0):
            self.step()
        return self.filled(self.state)

    def filled(self, standardized: Tensor) -> Tensor:
        """Return a copy of the samples in which unknown entries have the given standardized values, (m, N)."""
        values = standardized.to(self.x).reshape(-1, *self.unit.shape)
        values = self.unit.center + values * torch.exp(self.unit.log_scale)
        known = self.known.reshape(values.shape)
        x = self.x.clone()
        x[self.rows] = torch.where(known, x[self.rows], values)
        return x


class _Missing:
    """Training samples with missing entries, which are drawn from the model again and again."""

    def __init__(self, unit: WhitenedMixture, x: Tensor, rng: RandomSource) -> None:
        self.unit, self.x = unit, x
        self.chains = _Incomplete(unit, x, ~torch.isnan(x), rng)

    def rotated(self) -> Tensor:
        """Return the cosine coefficients of the samples with the present draws."""
        return self.unit.rotate(self.chains.filled(self.chains.state))

    def redraw(self) -> Tensor:
        """Draw the missing entries from the present model, and return the cosine coefficients of the samples."""
        self.chains.law = Conditional(self.unit)
        self.chains.step()
        return self.rotated()


def _parts(unit: WhitenedMixture, n: int) -> list[int]:
    """Split a number of samples into parts whose intermediate values fit into the memory."""
    states = unit.n_components * unit.n_contrasts * unit.state_log_variances().shape[2]
    size = max(1, 2**24 // (states * unit.n_coefficients))
    return [min(size, n - first) for first in range(0, n, size)]
