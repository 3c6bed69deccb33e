"""Replicated softmax, a topic model for word counts in dense or sparse matrices."""

from __future__ import annotations

import functools
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass
from pathlib import Path
from typing import Any, Self

import numpy as np
import torch
from scipy import sparse
from sklearn.base import ClassNamePrefixFeaturesOutMixin, TransformerMixin
from sklearn.utils.validation import check_is_fitted, validate_data
from torch import Tensor
from torch.optim import Adam
from torch.optim.lr_scheduler import LinearLR

from mvrbm.couplings import Dense
from mvrbm.devices import resolve_device
from mvrbm.errors import StorageError
from mvrbm.estimators.base import to_array
from mvrbm.estimators.batches import ROWS_AT_ONCE, Array
from mvrbm.estimators.inputs import as_array, without_wrapper
from mvrbm.estimators.parameters import seed_of
from mvrbm.estimators.persistence import SavedEstimator, restore_names, saved_names, with_checkpoints
from mvrbm.estimators.undo_on_error import undo_on_error
from mvrbm.io.shards import Rows
from mvrbm.machine import BoltzmannMachine
from mvrbm.saving import read_machine, register, write_machine
from mvrbm.training.callbacks import Callback, ProgressBar
from mvrbm.training.optimizers import SchedulerFactory
from mvrbm.training.trainer import Trainer
from mvrbm.units import Bernoulli, Counts
from mvrbm.updates.negative import CD
from mvrbm.updates.recipe import Recipe
from mvrbm.validation import number, whole_number

#: Name of the visible layer.
WORDS = "words"
# Maximum number of words in a training document. Training draws each word separately.
_LONGEST = 1_000_000
# Maximum number of entries in an intermediate array when computing next-word probabilities.
_ENTRIES_AT_ONCE = 2**22
# Beta coefficients for Adam. The first coefficient is lower than the default, because the gradients of contrastive
# divergence change quickly.
_ADAM_BETAS = (0.5, 0.999)
# Precision (inverse variance) of the Gaussian prior on the weights. Chosen on validation documents of 20 Newsgroups,
# for 300 to 10,000 training documents.
_PRECISION = 5.0


class DenseBatches:
    """Array-like wrapper around a sparse matrix. Selecting rows returns a dense array."""

    def __init__(self, matrix: Any) -> None:
        self.matrix = matrix
        self.shape = matrix.shape
        self.dtype = matrix.dtype

    def __len__(self) -> int:
        return int(self.shape[0])

    def __getitem__(self, rows: Any) -> Array:
        return np.asarray(self.matrix[rows].toarray())


@register("ReplicatedSoftmax")
@dataclass(eq=False, repr=False)
class ReplicatedSoftmax(ClassNamePrefixFeaturesOutMixin, TransformerMixin, SavedEstimator):
    r"""Replicated softmax, a topic model for word counts.

    .. math:: E(x, y) = -\sum_k x_k (b_k + \langle w_k, y\rangle) - \langle c, y\rangle

    Here, :math:`x_k` is the number of occurrences of word `k` in a document, `y` is a vector of binary topics, `b` and
    `c` are biases, and :math:`w_k`, which is row `k` of `W`, contains the weights of word `k`. Given the topics, all
    words in a document are drawn from the same distribution, :math:`\mathrm{softmax}(b + W y)`. Topics combine by
    multiplying their word probabilities, whereas latent Dirichlet allocation mixes (adds) them.

    The model is trained by contrastive divergence with Adam, because Adam's step size does not depend on the frequency
    of a word. The weights have a Gaussian prior with variance 0.2, so that more epochs do not overfit small
    collections.

    Parameters
    ----------
    n_components : int, default=50
        Number of topics.
    n_epochs : int, default=50
        Number of epochs.
    batch_size : int, default=100
        Number of documents per update.
    learning_rate : float, default=0.01
        Initial learning rate for Adam. It decays linearly to zero over `n_epochs`.
    gibbs_steps : int, default=1
        Number of Gibbs steps per update.
    warm_start : bool, default=False
        Whether `fit` continues training a fitted or loaded model instead of training a new model.
    random_state : int, RandomState or None, default=None
        Seed or generator for random numbers. Pass an int for reproducible results.
    device : str or torch.device, default="auto"
        Device to run on, such as ``"cpu"`` or ``"cuda"``. ``"auto"`` selects a GPU if one is available.
    verbose : int, default=0
        If nonzero, show a progress bar.

    Attributes
    ----------
    machine_ : BoltzmannMachine
        The fitted machine.
    trainer_ : Trainer or None
        The trainer used in the most recent training run, or None if the model was loaded from a folder.
    components_ : array of shape (n_components, n_features)
        Weights. Entry (j, k) is the amount that topic j adds to the unnormalized log-probability of word k.
    intercept_visible_ : array of shape (n_features,)
        Biases of the words.
    intercept_hidden_ : array of shape (n_components,)
        Biases of the topics.
    n_epochs_ : int
        Number of epochs that the model has been trained for.
    interrupted_ : bool
        Whether Ctrl-C or SIGTERM stopped training.

    Notes
    -----
    Salakhutdinov and Hinton multiply the hidden bias by the document length. This is equivalent to adding a constant to
    the weights of all words in a topic, so it does not require a separate parameter.

    References
    ----------
    Salakhutdinov and Hinton, "Replicated softmax: an undirected topic model", NeurIPS (2009).

    Examples
    --------
    >>> import numpy as np
    >>> from mvrbm import ReplicatedSoftmax
    >>> counts = np.random.default_rng(0).poisson(1.0, (50, 20))
    >>> model = ReplicatedSoftmax(3, n_epochs=2, random_state=0).fit(counts)
    >>> model.transform(counts).shape, len(model.top_words(n=5))
    ((50, 3), 3)
    """

    n_components: int = 50
    _: KW_ONLY
    n_epochs: int = 50
    batch_size: int = 100
    learning_rate: float = 0.01
    gibbs_steps: int = 1
    warm_start: bool = False
    random_state: Any = None
    device: str | torch.device = "auto"
    verbose: int = 0

    def _set_machine(self, machine: BoltzmannMachine) -> None:
        """Replace the machine of the model and reset its training state."""
        self.machine_ = machine.to(resolve_device(self.device))
        self.trainer_: Trainer | None = None
        self.n_epochs_ = 0
        self.interrupted_ = False

    def fit(
        self,
        X: Any,
        y: Any = None,
        *,
        callbacks: Sequence[Callback] = (),
        checkpoints: str | os.PathLike[str] | None = None,
        resume: str | os.PathLike[str] | None = None,
        ignore_mismatch: bool = False,
    ) -> Self:
        """Train the model on documents.

        Parameters
        ----------
        X : sparse matrix or array of shape (n, n_features)
            Number of occurrences of each word in each document, such as the output of `CountVectorizer`. Sparse
            matrices are converted to dense arrays one batch at a time.
        y : None
            Not used, present here for API consistency by convention.
        callbacks : sequence of Callback, default=()
            Callbacks to pass to the trainer. See :mod:`mvrbm.training`.
        checkpoints : path, optional
            Checkpoint folder. The state is saved after each epoch. If the folder contains checkpoints, training resumes
            from them.
        resume : path, optional
            Checkpoint folder to resume from, for use with a :class:`~mvrbm.training.Checkpoint` callback that has
            settings of its own.
        ignore_mismatch : bool, default=False
            Whether to resume from a checkpoint even if it was saved with different data or settings. If False, such a
            checkpoint raises an error.

        Returns
        -------
        self : object
            Fitted estimator.

        Notes
        -----
        Ctrl-C and SIGTERM stop training after the current update and raise KeyboardInterrupt and SystemExit,
        respectively. The partially trained model remains usable, and `interrupted_` is True. After an error or a second
        Ctrl-C, the model is restored to its state before `fit`.
        """
        callbacks, resume = with_checkpoints(callbacks, resume, checkpoints)
        continues = self.warm_start and hasattr(self, "machine_")
        with undo_on_error(self, [self.machine_] if continues else []):
            counts = self._prepare(X, continues=continues)
            n_epochs = whole_number(self.n_epochs, "n_epochs")
            decay = functools.partial(LinearLR, start_factor=1, end_factor=0, total_iters=n_epochs)
            trainer = self._new_trainer(decay)
            resumed = resume is not None and trainer.resume(resume, ignore_mismatch=ignore_mismatch)
            self._train(trainer, counts, n_epochs, callbacks, initialize=not (continues or resumed))
        trainer.raise_if_interrupted()
        return self

    def partial_fit(self, X: Any, y: Any = None) -> Self:
        """Train for one more epoch on the given documents, with a constant learning rate, and return the estimator.

        The documents can be a part of a collection. The strength of the prior depends on the number of documents in all
        parts so far, including the data of `fit`. Parts that occur several times count once.
        """
        continues = hasattr(self, "machine_")
        with undo_on_error(self, [self.machine_] if continues else []):
            former = self.trainer_ if continues else None
            counts = self._prepare(X, continues=continues)
            trainer = former
            if trainer is None or trainer.scheduler is not None:
                trainer = self._new_trainer(None)
                trainer.seen = {} if former is None else former.seen
            trainer.planned_epochs = 0  # open-ended: more documents may follow
            trainer.restart_epoch()  # an interrupted epoch may have used different documents
            self._train(trainer, counts, trainer.epoch + 1, (), initialize=not continues)
        trainer.raise_if_interrupted()
        return self

    def _prepare(self, X: Any, *, continues: bool) -> Any:
        """Validate documents and return the word counts. Create a new machine unless training an existing one."""
        counts = self._counts(X, reset=not continues)
        if (longest := float(counts.sum(1).max())) > _LONGEST:
            raise ValueError(
                f"a document in X has {longest:.3g} words, but the maximum is {_LONGEST:,}; scale down the counts"
            )
        if not continues:
            topics = Bernoulli(whole_number(self.n_components, "n_components"))
            machine = BoltzmannMachine({WORDS: Counts(counts.shape[1])}, topics, {WORDS: Dense()})
            self._set_machine(machine)
        elif self.machine_.hidden.shape != (self.n_components,):
            raise ValueError(
                f"training cannot continue because the model has {self.machine_.hidden.shape[0]} topics, but "
                f"n_components is {self.n_components}; use warm_start=False to train a new model"
            )
        return counts

    def _new_trainer(self, scheduler: SchedulerFactory | None) -> Trainer:
        rate = number(self.learning_rate, "learning_rate", exclude_low=True)
        recipe = Recipe(
            n_epochs=self.n_epochs,
            batch_size=self.batch_size,
            learning_rate=rate,
            prior_precision=_PRECISION,
            negative=CD(whole_number(self.gibbs_steps, "gibbs_steps")),
        )
        optimizer = functools.partial(Adam, lr=rate, betas=_ADAM_BETAS)
        seed = seed_of(self.random_state)
        trainer = Trainer(self.machine_, recipe, optimizer=optimizer, scheduler=scheduler, seed=seed)
        if not isinstance(self.random_state, int | np.integer):
            trainer.seed = None  # the user did not choose the seed, so checkpoints with any seed can be resumed
        return trainer

    def _train(
        self, trainer: Trainer, counts: Any, n_epochs: int, callbacks: Sequence[Callback], *, initialize: bool
    ) -> None:
        epochs_before = trainer.epoch
        trainer.callbacks = [*callbacks, *([ProgressBar()] if self.verbose else [])]
        try:
            trainer.fit({WORDS: DenseBatches(counts)}, n_epochs, initialize=initialize)
        finally:
            trainer.callbacks = []
        self.trainer_ = trainer
        self.n_epochs_ += trainer.epoch - epochs_before
        self.interrupted_ = trainer.interrupted

    # -- topics -----------------------------------------------------------------------------------

    @property
    def components_(self) -> Array:
        """Topic weights of shape (n_components, n_features)."""
        check_is_fitted(self)
        return to_array(self.machine_.links[WORDS].dense())

    @property
    def intercept_visible_(self) -> Array:
        """Word biases of shape (n_features,)."""
        check_is_fitted(self)
        return to_array(self.machine_.layers[WORDS].bias)

    @property
    def intercept_hidden_(self) -> Array:
        """Topic biases of shape (n_components,)."""
        check_is_fitted(self)
        return to_array(self.machine_.hidden.bias)

    @property
    def _n_features_out(self) -> int:
        check_is_fitted(self)
        return int(self.machine_.hidden.shape[0])

    def top_words(self, feature_names: Sequence[str] | None = None, n: int = 10) -> list[list[str]]:
        """Return the most characteristic words of each topic, in descending order.

        Words are sorted by weight times the square root of their frequency, which is the standard deviation of their
        counts. This keeps rare words with large weights and frequent words with small weights from ranking too high.

        Parameters
        ----------
        feature_names : sequence of str, optional
            The words, such as ``vectorizer.get_feature_names_out()``. Default: the column names of the training data,
            or the word indices if there are no column names.
        n : int, default=10
            Number of words per topic.

        Returns
        -------
        list of list of str
            For each topic, a list of `n` words.
        """
        check_is_fitted(self)
        n_words = self.n_features_in_
        names = getattr(self, "feature_names_in_", np.arange(n_words)) if feature_names is None else feature_names
        if len(names) != n_words:
            raise ValueError(f"feature_names must contain {n_words} names (one for each column of X), got {len(names)}")
        strength = self.components_ * np.exp(self.intercept_visible_ / 2)
        order = np.argsort(-strength, axis=1)[:, : whole_number(n, "n")]
        return [[str(names[word]) for word in row] for row in order]

    def transform(self, X: Any) -> Array:
        """Return the probability of each topic in each document, as an array of shape (n, n_components)."""
        return self._map_batches(X, lambda batch: self.machine_.hidden_mean({WORDS: batch}))

    # -- prediction of words ----------------------------------------------------------------------

    def predict_words(self, X: Any) -> Array:
        r"""Return next-word probabilities for each document, as an array of shape (n, n_features).

        The probabilities are exact. Adding word `k` to a document changes the free energy of the document by
        :math:`-b_k - \sum_j [\mathrm{softplus}(f_j + w_{jk}) - \mathrm{softplus}(f_j)]`, where :math:`f_j` is the
        log-odds of topic `j` given the document.
        """
        return self._map_batches(X, lambda batch: torch.exp(self._log_next_word(batch)))

    def perplexity(self, X: Any, observed: Any = None) -> float:
        r"""Return the perplexity of words given other words from the same documents (document completion).

        The perplexity is :math:`\exp(-\frac{1}{N} \sum \log p)`, where the sum is over all :math:`N` scored words. A
        uniform distribution over words has a perplexity equal to the vocabulary size.

        Parameters
        ----------
        X : sparse matrix or array of shape (n, n_features)
            The words to score, without the observed words. If `observed` is None, whole documents: a random half of the
            words in each document is observed, and the other half is scored. The split is the same in every call.
        observed : sparse matrix or array of shape (n, n_features), optional
            Other words from the same documents, from which the words in X are predicted.
        """
        check_is_fitted(self)
        words = self._counts(X, reset=False)
        known, scored = halves(words) if observed is None else (self._counts(observed, reset=False), words)
        if known.shape != scored.shape:
            raise ValueError(f"observed must have the same shape as X {scored.shape}, got {known.shape}")
        total = 0.0
        for rows, batch in self._batches(known):
            some = scored[rows].tocoo()
            with torch.no_grad():
                found = self._log_next_word(batch)[torch.from_numpy(some.row).long(), torch.from_numpy(some.col).long()]
            total += float(some.data.astype(np.float64) @ to_array(found))
        n_words = float(scored.sum(dtype=np.float64))
        if not n_words:
            raise ValueError("X contains no words to score")
        return float(np.exp(-total / n_words))

    def score(self, X: Any, y: Any = None) -> float:
        """Return the mean log-probability per scored word, which is ``-log(perplexity)``. See :meth:`perplexity`."""
        return -float(np.log(self.perplexity(X)))

    def _log_next_word(self, batch: Tensor) -> Tensor:
        """Return next-word log-probabilities for each document, as a tensor of shape (n, n_features)."""
        machine = self.machine_
        n_words = batch.shape[1]
        columns = machine.links[WORDS].dense().T  # (n_features, n_components)
        size = max(1, _ENTRIES_AT_ONCE // columns.numel())
        pieces = []
        for field in machine.hidden_field({WORDS: batch}).split(size):
            joint = (field[:, None] + columns).flatten(0, 1)
            pieces.append(machine.hidden.log_normalizer(joint).reshape(-1, n_words))
        return torch.log_softmax(machine.layers[WORDS].bias + torch.cat(pieces), 1)

    # -- data and files ---------------------------------------------------------------------------

    def _counts(self, X: Any, *, reset: bool) -> Any:
        """Validate documents and return them as a sparse float32 matrix of shape (n, n_features)."""
        X = without_wrapper(X)
        X = X if sparse.issparse(X) else as_array(np.asarray(X) if isinstance(X, Rows) else X)
        checked = validate_data(self, X, reset=reset, accept_sparse="csr", dtype=np.float32)
        counts = sparse.csr_matrix(checked)
        if counts.nnz and counts.data.min() < 0:
            raise ValueError(
                f"Negative values in data passed to X; counts must be at least 0, got {counts.data.min():g}"
            )
        return counts

    def _batches(self, counts: Any) -> Iterator[tuple[slice, Tensor]]:
        for first in range(0, counts.shape[0], ROWS_AT_ONCE):
            rows = slice(first, first + ROWS_AT_ONCE)
            yield rows, torch.from_numpy(counts[rows].toarray()).to(self.machine_.like)

    @torch.no_grad()
    def _map_batches(self, X: Any, compute: Callable[[Tensor], Tensor]) -> Array:
        check_is_fitted(self)
        return np.concatenate([to_array(compute(batch)) for _, batch in self._batches(self._counts(X, reset=False))])

    def _write(self, folder: Path, extra: Mapping[str, Any]) -> None:
        write_machine(self.machine_, folder, extra)

    def _description(self) -> dict[str, Any]:
        return {**super()._description(), "n_epochs": self.n_epochs_, "feature_names": saved_names(self)}

    def _restore(self, folder: Path, described: Mapping[str, Any]) -> None:
        machine = read_machine(folder)
        if list(machine.layers) != [WORDS] or not machine.layers[WORDS].own_lengths:
            raise StorageError(
                f"a topic model requires a single variable-length count layer named '{WORDS}', got {machine.layers}"
            )
        if machine.hidden.name != Bernoulli.name or len(machine.hidden.shape) != 1:
            raise StorageError(f"topics must be a vector of Bernoulli units, got {machine.hidden}")
        self._set_machine(machine)
        self.n_epochs_ = int(described["n_epochs"])
        self.n_features_in_ = machine.layers[WORDS].shape[0]
        restore_names(self, described["feature_names"])

    def __sklearn_tags__(self) -> Any:
        """Return the scikit-learn tags, which declare support for sparse, nonnegative input and float32 output."""
        tags = super().__sklearn_tags__()
        tags.input_tags.sparse = True
        tags.input_tags.positive_only = True
        tags.transformer_tags.preserves_dtype = ["float32"]
        return tags


def halves(counts: Any, seed: int = 0) -> tuple[Any, Any]:
    """Split the words in each document into two random halves and return the halves as sparse matrices.

    In documents of odd length, the first half gets the extra word. Counts are rounded to integers.
    """
    counts = sparse.csr_matrix(counts)
    n_words = np.rint(counts.data).astype(np.int64)
    # For each word occurrence, the index of its entry in `counts.data` and the index of its document.
    entry = np.repeat(np.arange(counts.nnz), n_words)
    document = np.repeat(np.arange(counts.shape[0]), np.diff(counts.indptr))[entry]
    # Shuffle the words within each document.
    order = np.lexsort((np.random.default_rng(seed).random(len(entry)), document))
    lengths = np.bincount(document, minlength=counts.shape[0])
    place_in_document = np.arange(len(entry)) - np.repeat(np.cumsum(lengths) - lengths, lengths)
    in_first_half = place_in_document < (np.repeat(lengths, lengths) + 1) // 2
    first = np.bincount(entry[order[in_first_half]], minlength=counts.nnz)
    return _with_counts(counts, first), _with_counts(counts, n_words - first)


def _with_counts(matrix: Any, counts: Array) -> Any:
    """Return a sparse matrix with the sparsity structure of `matrix` and the given counts."""
    data = counts.astype(matrix.dtype)
    result = sparse.csr_matrix((data, matrix.indices, matrix.indptr), shape=matrix.shape, copy=True)
    result.eliminate_zeros()
    return result
