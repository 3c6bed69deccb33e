"""Imputation of missing entries: the estimator and its models.

- `estimator`: :class:`MVRBMImputer`.
- `masking`: masks that hide known entries, for model selection and for training the correction.
- `factors`: the linear model (factor analysis, trained by EM).
- `residuals`: the covariance of the residuals along the axes of a sample.
- `separable`: a separable covariance for small arrays.
- `linear`: the linear model, which combines factors and residuals.
- `selection`: model selection for the linear model, based on held-out entries.
- `scaling`: range, location and scale of the entries.
- `correction`: the nonlinear correction to the linear predictions.
- `predictor`: predictions that combine the linear model and the correction, and calibrated standard deviations.
"""

from mvrbm.estimators.imputer.estimator import MVRBMImputer

__all__ = ["MVRBMImputer"]
