"""Imputation of missing entries: the estimator and its models.

- `estimator`: :class:`MVRBMImputer`.
- `masking`: masks that hide known entries, for model selection and for training the correction.
- `factor_analysis`: the linear model (factor analysis, trained by EM).
- `residual_covariance`: the covariance of the residuals along the axes of a sample.
- `interpolation`: linear interpolation of the residuals along one axis.
- `separable_covariance`: a separable covariance for small arrays.
- `shrunk_covariance`: a full covariance that is shrunk to a separable one.
- `conditional_normal`: conditional means and deviations of a normal distribution with a full covariance.
- `linear_model`: the linear model, which combines factors and residuals.
- `selection`: model selection for the linear model, based on held-out entries.
- `scaling`: range, units, location and scale of the entries.
- `correction`: the nonlinear correction to the linear predictions.
- `predictor`: predictions that combine the linear model and the correction.
- `calibration`: standard deviations that cover the errors on held-out entries.
"""

from mvrbm.estimators.imputer.estimator import MVRBMImputer

__all__ = ["MVRBMImputer"]
