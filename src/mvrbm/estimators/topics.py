"""The topic model: a replicated softmax of word counts, sparse ones in, topics and predicted words out."""

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
from mvrbm.estimators.batches import ROWS_AT_ONCE, Array
from mvrbm.estimators.parameters import seed_of
from mvrbm.estimators.persistence import SavedEstimator, restore_names, saved_names
from mvrbm.machine import BoltzmannMachine
from mvrbm.saving import read_machine, register, write_machine
from mvrbm.training.callbacks import Callback, ProgressBar
from mvrbm.training.trainer import Trainer
from mvrbm.units import Bernoulli, Counts
from mvrbm.updates.negative import CD
from mvrbm.updates.recipe import Recipe
from mvrbm.validation import number, whole_number

#: Name of the visible layer.
WORDS = "words"
# Numbers in memory at once when the probabilities of the next word are computed.
_ENTRIES_AT_ONCE = 2**22


class DenseBatches:
    """A sparse matrix whose rows are made dense as they are read: what the trainer needs of an array."""

    def __init__(self, matrix: Any) -> None:
        self.matrix, self.shape, self.dtype = matrix, matrix.shape, matrix.dtype

    def __len__(self) -> int:
        return int(self.shape[0])

    def __getitem__(self, rows: Any) -> Array:
        return np.asarray(self.matrix[rows].toarray())


@register("ReplicatedSoftmax")
@dataclass(eq=False, repr=False)
class ReplicatedSoftmax(ClassNamePrefixFeaturesOutMixin, TransformerMixin, SavedEstimator):
    r"""Topic model of documents given as word counts.

    .. math:: E(x, y) = -\sum_k x_k (b_k + \langle w_k, y\rangle) - \langle c, y\rangle

    with counts :math:`x_k` of the words of the vocabulary and binary topics `y`. Given the topics, all words of a
    document are drawn from one distribution, :math:`\mathrm{softmax}(b + W y)`: topics multiply the probabilities of
    words, where those of latent Dirichlet allocation add them up. After Salakhutdinov and Hinton, "Replicated softmax:
    an undirected topic model", NeurIPS (2009); their hidden bias that grows with the length of the document is a
    constant added to the weights of all words of a topic, so that it needs no parameter.

    Training is contrastive divergence with the steps of Adam, whose size does not depend on how frequent a word is.

    Parameters
    ----------
    n_components : int
        Number of topics.
    n_epochs : int
        Number of epochs.
    batch_size : int
        Documents per update.
    learning_rate : float
        Step size of Adam at the beginning; it falls linearly to zero over `n_epochs`.
    gibbs_steps : int
        Gibbs steps of contrastive divergence.
    warm_start : bool
        Whether `fit` continues to train a fitted or loaded model, instead of starting anew.
    random_state : int, RandomState or None
        Random seed.
    device : str
        ``"auto"`` is a GPU if there is one.
    verbose : int
        Whether to show a progress bar.

    Attributes
    ----------
    machine_, trainer_ : BoltzmannMachine, and Trainer or None
        The model and its last trainer, None after loading.
    components_ : array (n_components, n_features)
        Weights: how much each topic raises the log-probability of each word.
    intercept_visible_, intercept_hidden_ : array (n_features,), array (n_components,)
        Biases of the words and of the topics.
    n_epochs_ : int
        Number of epochs that the model was trained for.

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

    def _adopt(self, machine: BoltzmannMachine) -> None:
        """Take a machine as the model, not yet trained."""
        self.machine_ = machine.to(resolve_device(self.device))
        self.trainer_: Trainer | None = None
        self.n_epochs_ = 0

    def fit(
        self, X: Any, y: Any = None, *, callbacks: Sequence[Callback] = (), resume: str | os.PathLike[str] | None = None
    ) -> Self:
        """Learn topics from documents.

        Parameters
        ----------
        X : sparse matrix or array (n, n_features)
            Number of occurrences of each word in each document, such as the output of `CountVectorizer`. Sparse
            matrices stay sparse: batches of them are made dense one by one.
        y : None
            Ignored, there for pipelines.
        callbacks : sequence of Callback
            See :mod:`mvrbm.training`.
        resume : path, optional
            Folder of checkpoints. Training continues from the newest one, if there is one.

        Notes
        -----
        Ctrl-C stops training after an update and raises KeyboardInterrupt; the model so far can be used.
        """
        continues = self.warm_start and hasattr(self, "machine_")
        counts = self._start(X, continues=continues)
        n_epochs = whole_number(self.n_epochs, "n_epochs")
        self.trainer_ = self._trainer(functools.partial(LinearLR, start_factor=1, end_factor=0, total_iters=n_epochs))
        resumed = resume is not None and self.trainer_.resume(resume)
        return self._train(counts, n_epochs, callbacks, initialize=not (continues or resumed))

    def partial_fit(self, X: Any, y: Any = None) -> Self:
        """Train for one more epoch, on these documents, at a constant learning rate."""
        continues = hasattr(self, "machine_")
        counts = self._start(X, continues=continues)
        if self.trainer_ is None or self.trainer_.scheduler is not None:
            self.trainer_ = self._trainer(None)
        self.trainer_.restart_epoch()  # an epoch that was interrupted was of other documents
        return self._train(counts, self.trainer_.epoch + 1, (), initialize=not continues)

    def _start(self, X: Any, *, continues: bool) -> Any:
        """Check documents, make a new machine unless training continues, and return the counts."""
        counts = self._counts(X, reset=not continues)
        if not continues:
            topics = Bernoulli(whole_number(self.n_components, "n_components"))
            machine = BoltzmannMachine({WORDS: Counts(counts.shape[1])}, topics, {WORDS: Dense()})
            self._adopt(machine)
        elif self.machine_.hidden.shape != (self.n_components,):
            raise ValueError(
                f"training cannot continue: the model has {self.machine_.hidden.shape[0]} topics, but n_components is "
                f"{self.n_components} (use warm_start=False to train a new model)"
            )
        return counts

    def _trainer(self, scheduler: Any) -> Trainer:
        rate = number(self.learning_rate, "learning_rate", exclude_low=True)
        recipe = Recipe(
            n_epochs=self.n_epochs, batch_size=self.batch_size, learning_rate=rate, negative=CD(self.gibbs_steps)
        )
        # A mean over fewer gradients than Adam's 1 / (1 - 0.9): those of contrastive divergence change fast.
        optimizer = functools.partial(Adam, lr=rate, betas=(0.5, 0.999))
        seed = seed_of(self.random_state)
        return Trainer(self.machine_, recipe, optimizer=optimizer, scheduler=scheduler, seed=seed)

    def _train(self, counts: Any, n_epochs: int, callbacks: Sequence[Callback], *, initialize: bool) -> Self:
        trainer = self.trainer_
        assert trainer is not None  # for mypy
        epochs = trainer.epoch
        trainer.callbacks = [*callbacks, *([ProgressBar()] if self.verbose else [])]
        try:
            trainer.fit({WORDS: DenseBatches(counts)}, n_epochs, initialize=initialize)
        finally:
            trainer.callbacks = []
            self.n_epochs_ += trainer.epoch - epochs
        if trainer.interrupted:
            raise KeyboardInterrupt
        return self

    # -- topics -----------------------------------------------------------------------------------

    @property
    def components_(self) -> Array:
        """Weights of the topics, (n_components, n_features)."""
        check_is_fitted(self)
        return _out(self.machine_.links[WORDS].dense())

    @property
    def intercept_visible_(self) -> Array:
        """Biases of the words, (n_features,)."""
        check_is_fitted(self)
        return _out(self.machine_.layers[WORDS].bias)

    @property
    def intercept_hidden_(self) -> Array:
        """Biases of the topics, (n_components,)."""
        check_is_fitted(self)
        return _out(self.machine_.hidden.bias)

    @property
    def _n_features_out(self) -> int:
        check_is_fitted(self)
        return int(self.machine_.hidden.shape[0])

    def top_words(self, feature_names: Sequence[str] | None = None, n: int = 10) -> list[list[str]]:
        """Return the words that each topic makes more probable, the strongest first.

        They are ordered by their weight times the square root of their frequency, which is the spread of their counts:
        so neither rare words with large weights nor frequent words with small ones come first.

        Parameters
        ----------
        feature_names : sequence of str, optional
            The words, such as ``vectorizer.get_feature_names_out()``. Default: the names of the columns of the training
            data, or the numbers of the words.
        n : int
            Number of words per topic.
        """
        check_is_fitted(self)
        n_words = self.n_features_in_
        names = getattr(self, "feature_names_in_", np.arange(n_words)) if feature_names is None else feature_names
        if len(names) != n_words:
            raise ValueError(f"feature_names must have {n_words} names, one per column of the data, got {len(names)}")
        strength = self.components_ * np.exp(self.intercept_visible_ / 2)
        order = np.argsort(-strength, axis=1)[:, : whole_number(n, "n")]
        return [[str(names[word]) for word in row] for row in order]

    def transform(self, X: Any) -> Array:
        """Return the probability of every topic in every document, (n, n_components)."""
        return self._of_each(X, lambda batch: self.machine_.hidden_mean({WORDS: batch}))

    # -- prediction of words ----------------------------------------------------------------------

    def predict_words(self, X: Any) -> Array:
        r"""Return the probability of every word to be the next one of each document, (n, n_features).

        It is exact: with one more word `k`, the free energy of a document changes by
        :math:`-b_k - \sum_j [\mathrm{softplus}(f_j + w_{jk}) - \mathrm{softplus}(f_j)]`.
        """
        return self._of_each(X, lambda batch: torch.exp(self._log_next_word(batch)))

    def perplexity(self, X: Any, observed: Any = None) -> float:
        r"""Perplexity of words given other words of the same documents: document completion.

        It is :math:`\exp(-\sum \log p / n)` over all `n` words of X; without any knowledge it is the size of the
        vocabulary.

        Parameters
        ----------
        X : sparse matrix or array (n, n_features)
            Documents.
        observed : sparse matrix or array (n, n_features), optional
            The words of the same documents that are known, in addition to those of X. Default: a random half of the
            words of each document, the same at every call, and the other half is scored.
        """
        check_is_fitted(self)
        words = self._counts(X, reset=False)
        known, scored = halves(words) if observed is None else (self._counts(observed, reset=False), words)
        if known.shape != scored.shape:
            raise ValueError(f"observed must have the shape of X, {scored.shape}, got {known.shape}")
        total = 0.0
        for rows, batch in self._batches(known):
            some = scored[rows].tocoo()
            with torch.no_grad():
                found = self._log_next_word(batch)[torch.from_numpy(some.row).long(), torch.from_numpy(some.col).long()]
            total += float(some.data.astype(np.float64) @ _out(found))
        n_words = float(scored.sum(dtype=np.float64))
        if not n_words:
            raise ValueError("X has no words to be scored")
        return float(np.exp(-total / n_words))

    def score(self, X: Any, y: Any = None) -> float:
        """Return the mean log-probability of a word given half of its document: minus the log of `perplexity`."""
        return -float(np.log(self.perplexity(X)))

    def _log_next_word(self, batch: Tensor) -> Tensor:
        """Return the log-probability of the next word: (n, n_features) -> (n, n_features)."""
        machine, n_words = self.machine_, batch.shape[1]
        columns = machine.links[WORDS].to_hidden(torch.eye(n_words).to(machine.like))  # (n_features, n_components)
        size = max(1, _ENTRIES_AT_ONCE // columns.numel())
        pieces = []
        for field in machine.hidden_field({WORDS: batch}).split(size):
            joint = (field[:, None] + columns).flatten(0, 1)
            pieces.append(machine.hidden.log_normalizer(joint).reshape(-1, n_words))
        return torch.log_softmax(machine.layers[WORDS].bias + torch.cat(pieces), 1)

    # -- data and files ---------------------------------------------------------------------------

    def _counts(self, X: Any, *, reset: bool) -> Any:
        """Return checked documents as a sparse matrix of rows, (n, n_features), in float32."""
        checked = validate_data(self, X, reset=reset, accept_sparse="csr", dtype=np.float32)
        counts = sparse.csr_matrix(checked)
        if counts.nnz and counts.data.min() < 0:
            raise ValueError(f"Negative values in data passed to X: counts start at 0, got {counts.data.min():g}")
        return counts

    def _batches(self, counts: Any) -> Iterator[tuple[slice, Tensor]]:
        for first in range(0, counts.shape[0], ROWS_AT_ONCE):
            rows = slice(first, first + ROWS_AT_ONCE)
            yield rows, torch.from_numpy(counts[rows].toarray()).to(self.machine_.like)

    @torch.no_grad()
    def _of_each(self, X: Any, compute: Callable[[Tensor], Tensor]) -> Array:
        check_is_fitted(self)
        return np.concatenate([_out(compute(batch)) for _, batch in self._batches(self._counts(X, reset=False))])

    def _write(self, folder: Path, extra: Mapping[str, Any]) -> None:
        write_machine(self.machine_, folder, extra)

    def _description(self) -> dict[str, Any]:
        return {**super()._description(), "n_epochs": self.n_epochs_, "feature_names": saved_names(self)}

    def _restore(self, folder: Path, described: Mapping[str, Any]) -> None:
        machine = read_machine(folder)
        if list(machine.layers) != [WORDS] or not machine.layers[WORDS].own_lengths:
            raise StorageError(f"documents of any length need one layer '{WORDS}' of counts, got {machine.layers}")
        if machine.hidden.name != Bernoulli.name or len(machine.hidden.shape) != 1:
            raise StorageError(f"topics must be one axis of Bernoulli units, got {machine.hidden}")
        self._adopt(machine)
        self.n_epochs_, self.n_features_in_ = int(described["n_epochs"]), machine.layers[WORDS].shape[0]
        restore_names(self, described["feature_names"])

    def __sklearn_tags__(self) -> Any:
        """Tell scikit-learn that X may be sparse, must not be negative, and that features are float32."""
        tags = super().__sklearn_tags__()
        tags.input_tags.sparse = tags.input_tags.positive_only = True
        tags.transformer_tags.preserves_dtype = ["float32"]
        return tags


def halves(counts: Any, seed: int = 0) -> tuple[Any, Any]:
    """Divide the words of every document into two random halves; the first has the odd word: two matrices.

    Counts are rounded to whole numbers.
    """
    counts = sparse.csr_matrix(counts)
    n_words = np.rint(counts.data).astype(np.int64)
    entry = np.repeat(np.arange(counts.nnz), n_words)  # of every word
    document = np.repeat(np.arange(counts.shape[0]), np.diff(counts.indptr))[entry]
    order = np.lexsort((np.random.default_rng(seed).random(len(entry)), document))
    lengths = np.bincount(document, minlength=counts.shape[0])
    place = np.arange(len(entry)) - np.repeat(np.cumsum(lengths) - lengths, lengths)  # of each word in its document
    first = entry[order[place < (np.repeat(lengths, lengths) + 1) // 2]]
    known = np.bincount(first, minlength=counts.nnz)
    parts = (
        sparse.csr_matrix((part.astype(counts.dtype), counts.indices, counts.indptr), shape=counts.shape, copy=True)
        for part in (known, n_words - known)
    )
    one, other = parts
    for part in (one, other):
        part.eliminate_zeros()
    return one, other


def _out(tensor: Tensor) -> Array:
    return tensor.detach().cpu().numpy()
