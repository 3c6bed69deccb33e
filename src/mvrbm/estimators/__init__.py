"""The scikit-learn interface: estimators that take arrays and return arrays. Models and training are elsewhere."""

from mvrbm.estimators.classification_rbm import ClassificationMVRBM
from mvrbm.estimators.classifiers import DeepMVRBMClassifier, MVRBMClassifier
from mvrbm.estimators.deep import DeepMVRBM
from mvrbm.estimators.imputer import MVRBMImputer
from mvrbm.estimators.multimodal import MMVRBM
from mvrbm.estimators.outliers import MVRBMOutlierDetector
from mvrbm.estimators.parameters import Layer
from mvrbm.estimators.rbm import MVRBM, RBM, TVRBM
from mvrbm.estimators.sweep import Candidate, Sweep
from mvrbm.estimators.topics import ReplicatedSoftmax

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
    "MVRBMImputer",
    "MVRBMOutlierDetector",
    "ReplicatedSoftmax",
    "Sweep",
]
