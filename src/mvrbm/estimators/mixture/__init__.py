"""Mixture of whitened arrays, an exact density for real-valued arrays.

- `estimator`: the scikit-learn interface.
- `em`: expectation maximization.
- `conditional`: distributions of unknown entries given known entries.

The density itself is :class:`mvrbm.units.WhitenedMixture`.
"""

from mvrbm.estimators.mixture.estimator import MatrixMixture

__all__ = ["MatrixMixture"]
