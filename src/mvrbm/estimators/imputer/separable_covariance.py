"""Normal distribution of small arrays whose covariance is diagonal in a separable basis, as a factor model.

It is a :class:`mvrbm.MatrixMixture` with one component. Its contrasts give samples of low contrast the same weight as
samples of high contrast. They change the scale of the covariance of a sample, which does not affect conditional means.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from mvrbm.estimators.imputer.factor_analysis import Factors
from mvrbm.estimators.mixture import MatrixMixture
from mvrbm.estimators.mixture.conditional import Conditional

# Maximum number of entries in a sample, because the model has as many factors, and minimum and maximum number of
# samples to fit it to.
_MOST_ENTRIES = 150
_FEWEST_SAMPLES = 50
_MOST_SAMPLES = 500
_EPOCHS = 15


def is_applicable(n: int, shape: Sequence[int]) -> bool:
    """Return whether there are enough samples, and whether they are small enough arrays with at least two axes."""
    size = math.prod(shape)
    return min(shape) > 1 and len(shape) > 1 and size <= _MOST_ENTRIES and n >= _FEWEST_SAMPLES


def fit_separable(x: Tensor, known: Tensor, shape: Sequence[int]) -> Factors:
    """Fit the distribution to the known entries of samples of shape (n, D), and return it as a factor model."""
    step = -(-len(x) // _MOST_SAMPLES)
    data = torch.where(known, x, math.nan)[::step].reshape(-1, *shape).cpu().numpy()
    data = data[~np.isnan(data).all(axis=tuple(range(1, data.ndim)))]
    mixture = MatrixMixture(1, gate=False, n_epochs=_EPOCHS, random_state=0, device="cpu").fit(data)
    unit = mixture.unit_
    with torch.no_grad():
        law = Conditional(unit)
        log_variances = unit.state_log_variances()[0, :, 0].double()
        scales = unit.log_weights()[0].double().exp() @ log_variances.exp()  # mean variance of the contrasts
        precisions = law.precisions(torch.zeros(1, dtype=torch.long), scales.log().expand(1, unit.n_coefficients))[0]
        own_scale = unit.log_scale.double().exp().expand(unit.shape).flatten()
        # The analysis matrix maps arrays to independent coefficients.
        synthesis = torch.linalg.inv(law.analysis[0]) * own_scale[:, None]
        covariance = (synthesis / precisions) @ synthesis.T
        mean = unit.center.double().expand(unit.shape).flatten() + law.means[0] * own_scale
        found = Factors.of_covariance(mean, covariance)
        return Factors(*(part.to(x) for part in (found.mean, found.loadings, found.noise)))
