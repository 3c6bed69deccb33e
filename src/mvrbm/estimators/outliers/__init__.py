"""Outlier detection: the estimator and its parts.

- `estimator`: :class:`MVRBMOutlierDetector`.
- `ensemble`: scores of several parts, standardized on samples that the parts were not fitted to.
- `threshold`: the score above which a sample is an outlier.
- `linear`: linear prediction of hidden blocks.
- `neighbors`: distances to the nearest training samples.
- `masked`: masked prediction by a trained machine.
"""

from mvrbm.estimators.outliers.estimator import MVRBMOutlierDetector

__all__ = ["MVRBMOutlierDetector"]
