r"""Linear prediction of hidden blocks by a normal distribution with a shrunk covariance.

A machine with Gaussian visible and hidden units has this distribution. Its parameters, and the conditional mean and
covariance of any block given all other entries, have closed forms, so no training or sampling is required.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Self

import numpy as np
import torch
from numpy.typing import NDArray

from mvrbm.couplings import Dense
from mvrbm.machine import BoltzmannMachine
from mvrbm.units import Gaussian

Array = NDArray[Any]
#: Indices of the entries of each block, for samples that are flattened to rows.
Blocks = Sequence[Array]

# Minimum variance in any direction. Entries vary by about 1.
_LEAST_VARIANCE = 1e-6


@dataclass(frozen=True)
class LinearPrediction:
    r"""Normal distribution with the precision matrix :math:`P = (I - W^\top W) / s^2`.

    Parameters
    ----------
    mean : array of shape (D,)
        Mean.
    weights : array of shape (k, D)
        Weights :math:`W` of a machine with `k` Gaussian hidden units.
    variance : float
        Variance :math:`s^2` of an entry given all hidden units.
    """

    mean: Array
    weights: Array
    variance: float

    @classmethod
    def fit(cls, x: Array) -> Self:
        """Fit the distribution to rows. The covariance is shrunk toward a multiple of the identity (Ledoit-Wolf)."""
        n, size = x.shape
        mean = x.mean(0)
        z = x - mean
        if n < size:
            values, vectors = np.linalg.eigh(z @ z.T / n)
            values, vectors = values[1:], vectors[:, 1:]  # centered rows are linearly dependent
            directions = z.T @ vectors / np.sqrt(n * values.clip(_LEAST_VARIANCE**2))
        else:
            values, directions = np.linalg.eigh(z.T @ z / n)
        amount = _shrinkage(z, values)
        average = values.sum() / size
        variance = math.exp(math.log(max(amount * average, _LEAST_VARIANCE)))  # files contain the logarithm
        values = (1 - amount) * values.clip(0) + variance
        weights = np.sqrt(1 - variance / values)[:, None] * directions.T
        return cls(mean, weights, variance)

    def residuals(self, x: Array) -> Array:
        """Return the product of the precision matrix with the deviations from the mean: (n, D) -> (n, D)."""
        z = x - self.mean
        residuals: Array = (z - (z @ self.weights.T) @ self.weights) / self.variance
        return residuals

    def covariance_times(self, block: Array, r: Array) -> Array:
        """Return the product of the covariance of a block, given all other entries, with each row of `r`."""
        weights = self.weights[:, block]
        if len(block) <= len(weights):
            solved: Array = np.linalg.solve(np.eye(len(block)) - weights.T @ weights, self.variance * r.T).T
            return solved
        inner = np.eye(len(weights)) - weights @ weights.T  # Woodbury's identity
        product: Array = self.variance * (r + np.linalg.solve(inner, weights @ r.T).T @ weights)
        return product

    def block_errors(self, x: Array, blocks: Blocks) -> Array:
        r"""Return the squared prediction errors of hidden blocks, in units of their covariance, (n, n_blocks).

        The error of a block is :math:`e_B = P_{BB}^{-1} (P (x - \mu))_B`, and its covariance is :math:`P_{BB}^{-1}`.
        """
        r = self.residuals(x)
        if all(len(block) == 1 for block in blocks):
            entries = np.concatenate(blocks)
            squares: Array = r[:, entries] ** 2 * self.variance / (1 - (self.weights[:, entries] ** 2).sum(0))
            return squares
        return np.stack([(r[:, b] * self.covariance_times(b, r[:, b])).sum(1) for b in blocks], axis=1)

    def excess(self, x: Array, blocks: Blocks) -> Array:
        """Return the squared prediction error of each entry minus its variance when its block is hidden, (n, D).

        Both are divided by the mean variance.
        """
        r = self.residuals(x)
        found = np.zeros_like(x)
        variances = np.zeros(x.shape[1])
        for block in blocks:
            covariance = self.covariance_times(block, np.eye(len(block)))
            variances[block] = np.diag(covariance)
            found[:, block] = (r[:, block] @ covariance) ** 2 - variances[block]
        found /= variances.mean()
        return found

    def fill(self, x: Array, observed: Array) -> Array:
        """Replace entries that are not observed with their conditional means given the other entries."""
        filled = np.where(observed, x, self.mean)
        r = self.residuals(filled)
        for row in np.flatnonzero(~observed.all(1)):
            missing = np.flatnonzero(~observed[row])
            filled[row, missing] -= self.covariance_times(missing, r[row : row + 1, missing])[0]
        return filled

    def machine(self, shape: tuple[int, ...]) -> BoltzmannMachine:
        """Return the machine with Gaussian units that defines this distribution."""
        made = BoltzmannMachine(Gaussian(shape), Gaussian(len(self.weights)), Dense()).double()
        with torch.no_grad():
            unit = made.layers["visible"]
            unit.bias.copy_(torch.from_numpy(self.mean).reshape(shape))
            unit.get_parameter("log_variance").fill_(math.log(self.variance))
            made.links["visible"].get_parameter("weight").copy_(torch.from_numpy(self.weights))
            made.hidden.bias.copy_(torch.from_numpy(-self.weights @ self.mean / math.sqrt(self.variance)))
        return made

    @classmethod
    def of(cls, machine: BoltzmannMachine) -> Self:
        """Return the distribution of a machine that :meth:`machine` created."""
        unit = machine.layers["visible"]
        mean, weights, log_variance = (
            part.detach().cpu().numpy().astype(np.float64)
            for part in (
                unit.bias,
                machine.links["visible"].get_parameter("weight"),
                unit.get_parameter("log_variance"),
            )
        )
        size = mean.size
        return cls(mean.reshape(size), weights.reshape(-1, size), math.exp(log_variance.flat[0]))


def _shrinkage(z: Array, eigenvalues: Array) -> float:
    """Return Ledoit and Wolf's shrinkage of the covariance of centered rows, given its nonzero eigenvalues."""
    n, size = z.shape
    squares = (eigenvalues**2).sum()
    distance = squares - eigenvalues.sum() ** 2 / size
    error = (((z**2).sum(1) ** 2).sum() / n - squares) / n
    return float(np.clip(error / distance, 0, 1)) if distance > 0 else 1.0


def slabs(shape: tuple[int, ...]) -> list[list[Array]]:
    """Return, for each axis of an array, the blocks of entries with the same index along the axis."""
    numbers = np.arange(np.prod(shape)).reshape(shape)
    return [[np.take(numbers, i, axis).ravel() for i in range(size)] for axis, size in enumerate(shape)]


def divide(shape: tuple[int, ...], block: tuple[int, ...], shifted: Sequence[bool]) -> list[Array]:
    """Divide an array into blocks, shifted by half a block along some axes."""
    numbers = np.arange(np.prod(shape)).reshape(shape)
    cuts = []
    for size, step, shift in zip(shape, block, shifted, strict=True):
        first = step // 2 if shift else 0
        cuts.append([part for part in np.split(np.arange(size), range(first or step, size, step)) if len(part)])
    return [numbers[np.ix_(*parts)].ravel() for parts in itertools.product(*cuts)]
