"""Imputation of missing entries: the estimator and its models.

- `estimator`: :class:`MVRBMImputer`.
- `table`: encoding of tables with categorical columns as numeric rows, and decoding.
- `masking`: masks that hide known entries, for model selection and for training the correction.
- `factors`: the linear model (factor analysis, trained by EM).
- `selection`: selection of the number of factors and of the sample axes on held-out entries.
- `scaling`: range, location and scale of the entries.
- `correction`: the nonlinear correction to the linear predictions.
- `predictor`: predictions of the linear model with its correction.
"""

from mvrbm.estimators.imputer.estimator import MVRBMImputer

__all__ = ["MVRBMImputer"]
