"""Imputation of missing entries: the estimator and its models.

- `estimator`: :class:`MVRBMImputer`, its parameters, and how it is saved.
- `table`: tables with categorical columns as rows of numbers, and back.
- `masking`: entries that are hidden, to compare models and to train the correction.
- `factors`: the linear model, factor analysis, trained by EM.
- `selection`: the number of factors and the axes that count samples, chosen on hidden entries.
- `scaling`: range, location and scale of the entries.
- `correction`: the nonlinear correction of the linear predictions, and its training.
- `predictor`: predictions of the linear model with its correction.
"""

from mvrbm.estimators.imputer.estimator import MVRBMImputer

__all__ = ["MVRBMImputer"]
