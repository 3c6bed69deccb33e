"""Mixture of whitened arrays, an exact density for real-valued arrays.

- `estimator`: the scikit-learn interface.
- `posterior`, `em`: expectation maximization.
- `training`, `selection`: training runs, and the choice of settings by held-out samples.
- `conditional`: distributions of unknown entries given known entries.

The density itself is :class:`mvrbm.units.WhitenedMixture`.
"""

from mvrbm.estimators.mixture.estimator import MatrixMixture

__all__ = ["MatrixMixture"]
