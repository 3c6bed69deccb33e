"""Count units: bag-of-words documents of variable length."""

import itertools
import math
from collections.abc import Sequence

import torch
from torch import Tensor

from mvrbm.random import RandomSource
from mvrbm.units.base import Alternatives, Unit
from mvrbm.validation import whole_number

# Maximum number of possible documents to sum over in a conditional distribution.
_MOST_VALUES = 4096
# Maximum number of random numbers to draw at a time, unless a single sample has more words.
_MOST_NUMBERS = 2**22


class Counts(Unit):
    r"""Word counts along the last mode, for documents of :math:`D` words drawn from one distribution.

    The energy is :math:`-\langle b, x\rangle - \log (D! / \prod_k x_k!)`, so that :math:`x \mid f` is multinomial: `D`
    independent draws from :math:`\mathrm{softmax}(b + f)`. With Bernoulli hidden units, this is the replicated softmax
    of Salakhutdinov and Hinton, "Replicated softmax: an undirected topic model", NeurIPS (2009).

    Each document length defines a separate model with its own :math:`\log Z`. All lengths share the same parameters.
    Gibbs steps preserve the length of each document, so Gibbs sampling, conditional distributions and contrastive
    divergence do not require `length`. Computations that do not start from a document do require it:
    :meth:`~mvrbm.Unit.sample`, :meth:`~mvrbm.Unit.log_normalizer`, likelihoods and annealing.

    Parameters
    ----------
    shape : int or sequence of int
        Shape of the layer. The size of the last mode is the number of words in the vocabulary.
    bias_shape : sequence of int, optional
        Shape of the bias, which must broadcast to `shape`. Default: `shape`.
    length : int, optional
        Number of words in every document. If None, documents can have different lengths, including 0.

    Examples
    --------
    >>> import torch
    >>> from mvrbm import Counts
    >>> unit = Counts(4, length=8)
    >>> unit.mean(torch.zeros(1, *unit.shape)).tolist()
    [[2.0, 2.0, 2.0, 2.0]]
    """

    name = "counts"
    entry_modes = 1
    data_range = (0.0, math.inf)

    def __init__(
        self, shape: int | Sequence[int], *, bias_shape: Sequence[int] | None = None, length: int | None = None
    ) -> None:
        super().__init__(shape, bias_shape=bias_shape)
        self.length = None if length is None else whole_number(length, "length")

    @property
    def own_lengths(self) -> bool:
        """Whether documents may have different lengths."""
        return self.length is None

    @property
    def levels(self) -> float:
        """Number of distinct documents of length `length`, or infinity if `length` is None."""
        return math.inf if self.length is None else math.comb(self.length + self.shape[-1] - 1, self.length)

    @property
    def fluctuation(self) -> float:
        """Largest possible variance of a count, assuming one-word documents if `length` is None."""
        return (self.length or 1) / 4

    @property
    def statistic_bounds(self) -> tuple[float, float]:
        """Lowest and highest possible counts of a word."""
        return 0.0, math.inf if self.length is None else float(self.length)

    def site_energy(self, x: Tensor) -> Tensor:
        """Return the energy of each document, -<b, x> - log (D! / prod x!)."""
        return (torch.lgamma(x + 1) - self.bias * x).sum(-1) - torch.lgamma(x.sum(-1) + 1)

    def site_log_normalizer(self, field: Tensor) -> Tensor:
        """Return the log-normalizer of each document, D log sum exp(b + f)."""
        return self._given_length() * torch.logsumexp(self.bias + field, dim=-1)

    def mean(self, field: Tensor) -> Tensor:
        """Return the expected counts, or the probability of each word if `length` is None."""
        return (self.length or 1) * torch.softmax(self.bias + field, dim=-1)

    def mean_like(self, x: Tensor, field: Tensor) -> Tensor:
        """Return the expected counts of documents with the same lengths as the documents in `x`."""
        return x.sum(-1, keepdim=True) * torch.softmax(self.bias + field, dim=-1)

    def sample(self, field: Tensor, rng: RandomSource) -> Tensor:
        """Sample documents of length `length`. Raise ValueError if `length` is None."""
        return self._draw(field, torch.full(field.shape[:-1], self._given_length(), device=field.device), rng)

    def redraw(self, x: Tensor, field: Tensor, rng: RandomSource) -> Tensor:
        """Sample documents with the same lengths as the documents in `x`.

        Counts need not be integers. For a document of 7.4 words, 7 words are sampled, and each of them adds 7.4 / 7 to
        its count.
        """
        lengths = x.sum(-1)
        n_words = torch.where(lengths > 0, lengths.round().clamp(min=1), 0.0)
        return self._draw(field, n_words, rng) * (lengths / n_words.clamp(min=1))[..., None]

    def _draw(self, field: Tensor, lengths: Tensor, rng: RandomSource) -> Tensor:
        """Sample documents of the given lengths by inverse transform sampling, with one random number per word."""
        ends = torch.softmax((self.bias + field).flatten(0, -2).double(), dim=-1).cumsum(-1)
        documents = torch.arange(len(ends), device=field.device)
        lengths = lengths.long()
        of_word = torch.repeat_interleave(documents, lengths.flatten())
        # Offset the cumulative distribution of each document by its index, so that one search handles all words.
        ladder = ends / ends[:, -1:] + documents[:, None]
        n_words = lengths.reshape(len(lengths), math.prod(lengths.shape[1:])).sum(1)
        level = of_word + _one_per_word(n_words, field, rng).double()
        found = torch.searchsorted(ladder.flatten(), level, right=True)
        return torch.bincount(found, minlength=ladder.numel()).reshape(field.shape).to(field.dtype)

    @torch.no_grad()
    def initialize_from(self, mean: Tensor, variance: Tensor, count: int) -> None:
        """Set the bias to the log-frequencies of the words, with one pseudo-count per word."""
        self.bias.copy_(torch.log_softmax(torch.log(self._pool(mean) * count * self.n_sharing + 1), -1))

    def check(self, x: Tensor, layer: str) -> None:
        """Raise ValueError for negative values and, if `length` is set, for fractional values and wrong lengths."""
        super().check(x, layer)
        bad = x < 0 if self.length is None else (x < 0) | (x != x.round())
        if bool(bad.any()):
            what = "numbers" if self.length is None else "integers"
            raise ValueError(
                f"layer '{layer}' has Counts units, which require nonnegative {what}, got {float(x.detach()[bad][0]):g}"
            )
        if self.length is not None and bool((lengths := x.sum(-1)).ne(self.length).any()):
            other = int(lengths[lengths != self.length][0])
            raise ValueError(
                f"layer '{layer}' requires documents of length {self.length}, got a document of length {other}"
            )

    def example(self, n: int, rng: RandomSource) -> Tensor:
        """Return n random documents of length `length`, or of length 10 if `length` is None."""
        field = self.bias.new_zeros((n, *self.shape))
        lengths = torch.full(field.shape[:-1], self.length or 10, device=field.device)
        return self._draw(field, lengths, rng).detach()

    @property
    def some_state(self) -> Tensor:
        """Valid state: documents that contain only the first word, or empty documents if `length` is None."""
        state = super().some_state
        state[..., 0] = self.length or 0
        return state

    @property
    def middle(self) -> Tensor:
        """Counts of documents in which all words are equally frequent."""
        return torch.full_like(super().some_state, (self.length or 0) / self.shape[-1])

    def decode(self, digits: Tensor) -> Tensor:
        """Return the documents with the given indices in the list of all documents of length `length`."""
        return self._every()[digits.cpu()].to(self.bias)

    def alternatives(self, value: Tensor, site: int, reach: tuple[Tensor, Tensor]) -> Alternatives:
        """Return all documents of length `length`."""
        if self.levels > _MOST_VALUES:
            raise ValueError(
                f"the conditional distribution of a document would sum over {self.levels:g} documents, but the maximum "
                f"is {_MOST_VALUES}; use ReplicatedSoftmax.perplexity, which predicts one word at a time"
            )
        every = self._every().to(value)
        shares = (every[:, None] == value).all(-1).to(value.dtype)  # (a, n)
        return Alternatives(every[:, None].expand(-1, *value.shape), torch.zeros_like(shares), shares)

    def _every(self) -> Tensor:
        """Return all documents of length `length`, as a tensor of shape (levels, vocabulary size)."""
        words = torch.tensor(
            list(itertools.combinations_with_replacement(range(self.shape[-1]), self._given_length())),
            dtype=torch.int64,
        )
        return torch.nn.functional.one_hot(words, self.shape[-1]).sum(1)

    def _given_length(self) -> int:
        if self.length is None:
            raise ValueError(
                "documents of unequal length have no common distribution; pass length to Counts "
                "or start the chains from documents, whose lengths are preserved"
            )
        return self.length


def _one_per_word(n_words: Tensor, like: Tensor, rng: RandomSource) -> Tensor:
    """Return uniform random numbers for the words of all samples, where sample i takes the first n_words[i] of row i.

    The numbers of a sample depend only on its row, so they do not depend on the batch or process that it is part of.
    """
    longest = max(1, int(n_words.max())) if len(n_words) else 1
    parts = n_words.split(max(1, _MOST_NUMBERS // longest))
    first_row = rng.position.first_row
    sources = [rng]  # drawing from `rng` itself advances it by one draw, whatever the number of parts
    for part in parts[:-1]:
        first_row += len(part)
        sources.append(rng.from_row(first_row))
    place = torch.arange(longest, device=n_words.device)
    return torch.cat(
        [
            source.uniform((len(part), longest), like)[place < part[:, None]]
            for source, part in zip(sources, parts, strict=True)
        ]
    )
