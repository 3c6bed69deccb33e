"""The scikit-learn interface: estimators that take arrays and return arrays."""

from mvrbm.estimators.classifiers import ClassificationMVRBM, DeepMVRBMClassifier, MVRBMClassifier
from mvrbm.estimators.deep import DeepMVRBM, Layer
from mvrbm.estimators.rbm import MMVRBM, MVRBM, RBM, TVRBM
from mvrbm.estimators.sweep import Candidate, Sweep

__all__ = [
    "MMVRBM",
    "MVRBM",
    "RBM",
    "TVRBM",
    "Candidate",
    "ClassificationMVRBM",
    "DeepMVRBM",
    "DeepMVRBMClassifier",
    "Layer",
    "MVRBMClassifier",
    "Sweep",
]
