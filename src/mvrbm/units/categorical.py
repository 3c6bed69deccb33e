"""Categorical units: one-hot rows, each representing one of several categories."""

from collections.abc import Sequence

import torch
from torch import Tensor

from mvrbm.random import RandomSource
from mvrbm.units.base import Alternatives, Unit, pick


class Categorical(Unit):
    r"""Categorical variables, one-hot encoded along the last mode.

    The energy is :math:`-\langle b, x\rangle`, so the probabilities of the categories are
    :math:`\mathrm{softmax}(b + f)`.

    Parameters
    ----------
    shape : int or sequence of int
        Shape of the layer. The size of the last mode is the number of categories.
    bias_shape : sequence of int, optional
        Shape of the bias, which must broadcast to `shape`. Default: `shape`.
    padded : bool
        Whether to treat rows of zeros as padding, for example at the end of a short document. If False, such rows raise
        ValueError.

    Examples
    --------
    >>> import torch
    >>> from mvrbm import Categorical
    >>> unit = Categorical(4)
    >>> unit.mean(torch.zeros(1, *unit.shape)).tolist()
    [[0.25, 0.25, 0.25, 0.25]]
    """

    name = "categorical"
    entry_modes = 1
    data_range = (0.0, 1.0)
    sampled_as = "categorical"
    fluctuation = 0.25

    def __init__(
        self, shape: int | Sequence[int], *, bias_shape: Sequence[int] | None = None, padded: bool = False
    ) -> None:
        super().__init__(shape, bias_shape=bias_shape)
        self.padded = padded

    @property
    def one_hot(self) -> bool:
        """Whether each row has exactly one 1, which is not the case for padding."""
        return not self.padded

    @property
    def levels(self) -> float:
        """Number of categories."""
        return self.shape[-1]

    def site_energy(self, x: Tensor) -> Tensor:
        """Return the energy -<b, x> of each row."""
        return -(self.bias * x).sum(-1)

    def site_log_normalizer(self, field: Tensor) -> Tensor:
        """Return the log-normalizer of each row, log sum exp(b + f)."""
        return torch.logsumexp(self.bias + field, dim=-1)

    def mean(self, field: Tensor) -> Tensor:
        """Return the probability of each category."""
        return torch.softmax(self.bias + field, dim=-1)

    def statistic_variance(self, field: Tensor) -> Tensor:
        """Return the variance p (1 - p) of each entry, where p is its mean."""
        mean = self.mean(field)
        return mean * (1 - mean)

    def sample(self, field: Tensor, rng: RandomSource) -> Tensor:
        """Sample one-hot rows by inverse transform sampling, with one uniform random number per row."""
        mean = self.mean(field)
        category = pick(mean, rng.uniform(mean.shape[:-1], mean)[..., None])[..., 0]
        return torch.nn.functional.one_hot(category, self.shape[-1]).to(mean.dtype)

    @torch.no_grad()
    def initialize_from(self, mean: Tensor, variance: Tensor, count: int) -> None:
        """Set the bias to the log-frequencies of the categories, with one pseudo-count per category."""
        self.bias.copy_(torch.log(self._pool(mean) * count * self.n_sharing + 1))

    def check(self, x: Tensor, layer: str) -> None:
        """Raise ValueError if any row is neither one-hot nor padding."""
        super().check(x, layer)
        one_hot = ((x == 0) | (x == 1)).all(-1) & (x.sum(-1) == 1)
        empty = (x == 0).all(-1)
        bad = ~(one_hot | empty) if self.padded else ~one_hot
        if bool(bad.any()):
            first = tuple(int(i) for i in torch.nonzero(bad)[0])
            row = x[first]
            what = "only zeros" if bool((row == 0).all()) else f"sum {float(row.sum()):g}"
            raise ValueError(
                f"layer '{layer}' expects one-hot rows of {self.shape[-1]} categories, but row {first[1:]} of sample "
                f"{first[0]} has {what}; each row must contain exactly one 1"
                + ("" if self.padded else " (to allow rows of zeros as padding, build the units with padded=True)")
            )

    @property
    def some_state(self) -> Tensor:
        """Valid state with the first category in every row."""
        state = super().some_state
        state[..., 0] = 1
        return state

    def absent(self, x: Tensor) -> Tensor | None:
        """Return a mask with the same shape as `x` that is True in rows of zeros, or None if `padded` is False."""
        return (x == 0).all(-1, keepdim=True).expand(x.shape) if self.padded else None

    def decode(self, digits: Tensor) -> Tensor:
        """Convert category indices to one-hot rows."""
        return torch.nn.functional.one_hot(digits, self.shape[-1]).to(self.bias.dtype)

    def alternatives(self, value: Tensor, site: int, reach: tuple[Tensor, Tensor]) -> Alternatives:
        """Return all categories as one-hot rows."""
        categories = torch.eye(self.shape[-1], dtype=value.dtype, device=value.device)
        shares = value.T  # (k, n)
        values = categories[:, None].expand(-1, len(value), -1)
        return Alternatives(values, torch.zeros_like(shares), shares)
