"""Imputation of missing entries: the estimator, and the linear models that it is built from."""

from mvrbm.estimators.imputer.estimator import MVRBMImputer

__all__ = ["MVRBMImputer"]
