"""Imputation of missing entries: the estimator and its models.

- `estimator`: :class:`MVRBMImputer`.
- `masking`: masks that hide known entries, for model selection and for training the correction.
- `factors`: the linear model (factor analysis, trained by EM).
- `selection`: model selection for the linear model, based on held-out entries.
- `scaling`: range, location and scale of the entries.
- `correction`: the nonlinear correction to the linear predictions.
- `predictor`: predictions that combine the linear model and the correction.
"""

from mvrbm.estimators.imputer.estimator import MVRBMImputer

__all__ = ["MVRBMImputer"]
