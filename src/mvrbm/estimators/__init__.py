"""Estimators with the scikit-learn interface. They take and return arrays.

- `rbm`, `multimodal`, `deep`, `topics`: generative models.
- `classifiers`, `classification_rbm`: classifiers.
- `imputer`, `outliers`, `pyod`: imputation and outlier detection.
- `sweep`: training of one estimator with many settings.
- `base`, `array_rbm`, `features`, `generation`, `scoring`: methods shared by the generative models.
- `classifier_base`, `fine_tuning`, `network`: methods shared by the classifiers.
- `inputs`, `batches`, `labels`: validation of the data, once per call.
- `parameters`, `persistence`, `chains`: parameters, model files and persistent chains.

Machines are defined in :mod:`mvrbm.machine`. The training loop is in :mod:`mvrbm.training`.
"""

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
