"""Mixtures for real-valued arrays, with the interface of :class:`sklearn.mixture.GaussianMixture`."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Mapping
from dataclasses import KW_ONLY, dataclass, replace
from pathlib import Path
from typing import Any, Self

import numpy as np
import torch
from sklearn.base import ClassNamePrefixFeaturesOutMixin, DensityMixin, TransformerMixin
from sklearn.utils.validation import _check_sample_weight, check_is_fitted
from torch import Tensor

from mvrbm.couplings import Dense
from mvrbm.devices import one_thread, resolve_device
from mvrbm.errors import StorageError
from mvrbm.estimators.base import check_finite, to_array
from mvrbm.estimators.batches import Array, masks, model_dtype
from mvrbm.estimators.inputs import VISIBLE, ArrayInput
from mvrbm.estimators.mixture.conditional import Conditional, in_chunks
from mvrbm.estimators.mixture.em import start
from mvrbm.estimators.mixture.incomplete import EqualRows, Incomplete
from mvrbm.estimators.mixture.selection import FEWEST_SAMPLES, choose
from mvrbm.estimators.mixture.training import Samples, Stop, Training
from mvrbm.estimators.parameters import seed_of
from mvrbm.estimators.persistence import SavedEstimator, restore_names
from mvrbm.estimators.undo_on_error import undo_on_error
from mvrbm.machine import BoltzmannMachine
from mvrbm.random import RandomSource
from mvrbm.saving import read_machine, register, write_machine
from mvrbm.units import Bernoulli, WhitenedMixture
from mvrbm.units.base import LARGEST_PARAMETER, pick
from mvrbm.validation import choice, number, truth_value, whole_number


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
    n_components : int or "auto", default="auto"
        Number of components. Each component requires at least 10 samples. ``"auto"`` tries 1, 2 and 4 components, and
        doubles the number further for as long as this improves the likelihood of held-out samples. It then fits the
        model to all samples. With fewer than 1000 samples, it uses cross-validation.
    n_contrasts : int, default=4
        Number of contrasts per component.
    gate : bool or "auto", default="auto"
        Whether each coefficient is a mixture of three Gaussians given component and contrast. If False, conditional
        distributions are exact without sampling. ``"auto"`` decides by the likelihood of held-out samples.
    level : bool, default=False
        Whether the mean over the entries of a sample has its own Gaussian, which is independent of everything else.
        This suits pictures and signals whose brightness or offset says little about their pattern.
    means : {"own", "shared", "one"}, default="own"
        Whether each component has its own mean, all components have the mean of the data, or all entries have the same
        mean.
    whiten : bool, default=True
        Whether to learn the matrices. If False, they are orthonormal cosine transforms.
    visible_shape : sequence of int, optional
        Shape of a sample, if samples are rows of features. Default: the shape of the samples.
    n_epochs : int, optional
        Maximum number of passes over the data. Default: 5 to 200, with fewer passes for more samples. If samples are
        held out to choose other settings, training without batches ends where their likelihood was highest.
    batch_size : int, optional
        Number of samples per update. With batches, Adam follows the gradient of the likelihood, and the last two epochs
        are expectation maximization. If all samples are in one batch, all epochs are expectation maximization with
        updates in closed form, and the likelihood of the training data plus the log-density of the parameters under
        pseudo-samples (see `shrinkage`) never decreases. With more than 12 components, this likelihood includes only
        the likely components of each sample. Default: all samples if there are at most 4000, and 500 otherwise.
    shrinkage : float, default=1.0
        Number of pseudo-samples per component. They have the covariances of the data along each axis, at the scale of
        the component, and regularize components with few samples. In addition, noise is added to the moments of each
        component, with a variance chosen by cross-validation, and axes with too few samples keep their principal axes.
        If 0, there is no regularization, and `fit` maximizes the likelihood.
    tol : float, default=0.001
        Without batches, training stops if an epoch improves the mean log-likelihood by less than this. With missing
        entries, which are redrawn in each epoch, this is the mean improvement over 10 epochs.
    warm_start : bool, default=False
        Whether `fit` continues from the parameters of the fitted or loaded model.
    random_state : int, RandomState or None, default=None
        Seed or generator for random numbers. Pass an int for reproducible results.
    device : str or torch.device, default="auto"
        Device to run on, such as ``"cpu"`` or ``"cuda"``. ``"auto"`` selects a GPU if one is available.
    verbose : int, default=0
        If nonzero, show a progress bar, and before it one line per candidate if settings are chosen by validation.

    Attributes
    ----------
    unit_ : WhitenedMixture
        The fitted density.
    history_ : list of float
        Mean log-likelihood of the training samples before the update of each epoch, or during the epoch if it has
        several updates.
    converged_ : bool
        Whether training stopped before `n_epochs` because the likelihood no longer improved.
    n_components_ : int
        Number of components.
    validation_scores_ : dict of (int, bool) to float
        Mean log-likelihood of held-out samples by number of components and gates. Set only if `fit` chose one of them,
        and not saved with the model.
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

    n_components: int | str = "auto"
    _: KW_ONLY
    n_contrasts: int = 4
    gate: bool | str = "auto"
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
        if (n_components := self.n_components) != "auto":
            n_components = whole_number(n_components, "n_components")
        if self.gate != "auto":
            truth_value(self.gate, "gate")
        for name in ("level", "whiten"):
            truth_value(getattr(self, name), name)
        choice(self.means, "means", ("own", "shared", "one"))
        training = Training(
            None if self.n_epochs is None else whole_number(self.n_epochs, "n_epochs"),
            None if self.batch_size is None else whole_number(self.batch_size, "batch_size"),
            number(self.shrinkage, "shrinkage"),
            number(self.tol, "tol"),
            bool(self.verbose),
        )
        data = self._read_values(X, reset=not continues)
        weights = _check_sample_weight(sample_weight, data, dtype=np.float64, ensure_non_negative=True)
        data, weights = data[weights > 0], weights[weights > 0]
        if len(data) < 2:
            raise ValueError(f"fit requires at least 2 samples with positive weights, got n_samples={len(data)}")
        if continues:
            center = self._fitted().center
            device, dtype = center.device, center.dtype
        else:
            device, dtype = resolve_device(self.device), model_dtype({VISIBLE: data})
        samples = Samples(
            torch.from_numpy(np.ascontiguousarray(data)).to(device=device, dtype=dtype),
            torch.from_numpy(weights / weights.sum()).to(device=device, dtype=dtype),
            max(float(weights.sum()), float(len(weights))),  # weights below 1 on average do not mean fewer samples
        )
        rng = RandomSource(seed_of(self.random_state))
        stop = Stop()
        with stop.on_interrupt():
            if continues:
                self._check_unit(samples)
            else:
                if hasattr(self, "validation_scores_"):
                    del self.validation_scores_
                n_components, gate, training = self._choose(samples, training, rng.split(1)[0], stop)
                self.unit_ = self._new_unit(samples, n_components, gate, rng.split(1)[0])
                self.history_: list[float] = []
            self.n_components_ = self.unit_.n_components
            course = training.run(self.unit_, samples, rng.split(1)[0], stop)
        self.history_ = [*self.history_, *course.history]
        self.converged_ = course.converged
        self.interrupted_ = stop.error is not None
        self.unit_.check_parameters(VISIBLE)
        return stop.error

    def _choose(
        self, samples: Samples, training: Training, rng: RandomSource, stop: Stop
    ) -> tuple[int, bool, Training]:
        """Return the number of components, whether there are gates, and the training settings."""
        n_components = self._n_components_for(samples)
        gates = [False, True] if self.gate == "auto" else [bool(self.gate)]
        if n_components is not None and len(gates) == 1:
            return n_components, gates[0], training
        found = choose(self._new_unit, training, samples, n_components, gates, rng, stop)
        self.validation_scores_ = found.scores
        return found.n_components, found.gate, replace(training, n_epochs=found.n_epochs or training.n_epochs)

    def _n_components_for(self, samples: Samples) -> int | None:
        """Return the number of components to fit to the samples, or None if it is chosen by validation."""
        if self.n_components == "auto":
            return None
        most = max(1, int(samples.total) // FEWEST_SAMPLES)
        if int(self.n_components) > most:
            warnings.warn(
                f"the mixture has {most} components instead of {self.n_components}, because each component requires "
                f"{FEWEST_SAMPLES} samples",
                stacklevel=5,
            )
        return min(int(self.n_components), most)

    def _check_unit(self, samples: Samples) -> None:
        """Raise ValueError if the parameters of the estimator no longer describe the fitted mixture."""
        names = ["n_contrasts", "level", "means", "whiten"]
        wanted = {name: getattr(self, name) for name in (names if self.gate == "auto" else [*names, "gate"])}
        config = self.unit_.config()
        n_components = self._n_components_for(samples)
        if n_components not in (None, config["n_components"]):
            wanted["n_components"] = self.n_components
        for name, value in wanted.items():
            if config[name] != value:
                raise ValueError(
                    f"training cannot continue because {name} is {value!r}, but the model has {name}={config[name]!r}; "
                    "use warm_start=False to train a new model"
                )

    def _new_unit(self, samples: Samples, n_components: int, gate: bool, rng: RandomSource) -> WhitenedMixture:
        """Create a mixture and initialize it from weighted samples, which may contain NaN."""
        x, w = samples.values, samples.weights
        unit = WhitenedMixture(
            tuple(x.shape[1:]),
            n_components=n_components,
            n_contrasts=self.n_contrasts,
            gate=gate,
            level=self.level,
            means=self.means,
            whiten=self.whiten,
        ).to(x)
        unit.requires_grad_(False)
        missing = torch.isnan(x)
        seen = ~missing * w.reshape(-1, *[1] * (x.ndim - 1))
        total = seen.sum(0).clamp(min=torch.finfo(x.dtype).tiny)
        mean = (seen * x.nan_to_num()).sum(0) / total
        variance = (seen * (x.nan_to_num() - mean) ** 2).sum(0) / total
        highest = torch.where(missing, -math.inf, x).amax(0)
        lowest = torch.where(missing, math.inf, x).amin(0)
        unit.initialize_from(mean, torch.where(highest > lowest, variance, 0.0), len(x))  # exact for constants
        start(unit, unit.rotate(torch.where(missing, mean, x)), w, rng)
        return unit

    # -- densities --------------------------------------------------------------------------------

    def score_samples(self, X: Any) -> Array:
        """Return the exact log-density of each sample in nats, as an array of shape (n,)."""
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

        For samples with missing entries (NaN), these are the probabilities given the known entries. Without gates,
        they are exact. With gates, each gate is replaced with its mean variance.
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
            mean = unit.mean_log_variances()  # (K, C)
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

    def _incomplete(
        self, data: Array, known: Array | None = None, source: type[RandomSource] = EqualRows
    ) -> Incomplete:
        """Return validated samples whose unknown entries are drawn. By default, all entries except NaN are known."""
        x = torch.from_numpy(np.array(data)).to(self._fitted().center)
        known = ~np.isnan(data) if known is None else known
        rng = source(seed_of(self.random_state))
        return Incomplete(self.unit_, x, torch.from_numpy(known).to(x.device), rng)

    # -- samples ----------------------------------------------------------------------------------

    @torch.no_grad()
    def sample(self, n_samples: int = 1) -> tuple[Array, Array]:
        r"""Draw samples, and return an array of shape (n_samples, \*visible_shape) and the component of each sample.

        The draws are exact and independent. They have the format of the training data. The result is a pair, as in
        scikit-learn's `GaussianMixture`. Estimators that are not mixtures return the samples alone, or with labels if
        they are trained with labels.
        """
        unit = self._fitted()
        n = whole_number(n_samples, "n_samples")
        rng = RandomSource(seed_of(self.random_state))
        with one_thread():
            drawn = [unit.sample(unit.bias.expand(part, *unit.shape), rng) for part in _parts(unit, n)]
        x = torch.cat(drawn)
        joint = in_chunks(unit, unit.joint_log_density, unit.rotate(x)).flatten(1)
        state = pick(torch.softmax(joint, 1), rng.uniform((n, 1), x))[:, 0]
        return self._outward(x), to_array(state // unit.n_contrasts)

    # -- unknown entries --------------------------------------------------------------------------

    def inpaint(self, X: Any, mask: Any = None, *, steps: int = 200, burn_in: int = 20) -> Array:
        """Replace unknown entries with their means given the known entries.

        If missing values are all that you need, use :class:`~mvrbm.MVRBMImputer`. It chooses between this model and
        others by their errors on entries that it hides, and reports standard deviations.

        Without gates, the means are exact. With gates, they are averages over Gibbs samples of components, contrasts
        and gates. The chains start from the exact conditional distribution of a model whose gates are replaced with
        their mean variances. All samples use the same random numbers, so the result for a sample does not depend on the
        other samples.

        Parameters
        ----------
        X : array
            Samples. NaN entries are unknown.
        mask : boolean array with the shape of X or of one sample, optional
            Mask that is True for known entries. If None, all entries that are not NaN are known.
        steps : int, default=200
            Number of Gibbs steps to average over. Used only with gates.
        burn_in : int, default=20
            Number of Gibbs steps before averaging starts. Used only with gates.

        Returns
        -------
        array
            Copy of the samples with the unknown entries filled in.
        """
        whole_number(steps, "steps")
        whole_number(burn_in, "burn_in", 0)
        return self._fill(X, mask, lambda incomplete: incomplete.mean(steps, burn_in), EqualRows)

    def sample_given(self, X: Any, mask: Any = None, *, burn_in: int = 100) -> Array:
        """Replace unknown entries with a draw given the known entries. See :meth:`inpaint`.

        Without gates, the draws are exact. With gates, they are the states of Gibbs sampling after `burn_in` steps.
        """
        whole_number(burn_in, "burn_in", 0)
        return self._fill(X, mask, lambda incomplete: incomplete.draw(burn_in), RandomSource)

    @torch.no_grad()
    def _fill(self, X: Any, mask: Any, compute: Callable[[Incomplete], Tensor], source: type[RandomSource]) -> Array:
        self._fitted()
        data = self._read_values(X, reset=False)
        known = masks({} if mask is None else {VISIBLE: mask}, {VISIBLE: data}, every_layer=None)[VISIBLE].numpy()
        return self._outward(compute(self._incomplete(data, known, source)), like=X)

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


def _parts(unit: WhitenedMixture, n: int) -> list[int]:
    """Split a number of samples into parts whose intermediate values fit into memory."""
    states = unit.n_components * unit.n_contrasts * unit.state_log_variances().shape[2]
    size = max(1, 2**24 // (states * unit.n_coefficients))
    return [min(size, n - first) for first in range(0, n, size)]
