"""The scikit-learn interface: estimators that take arrays and return arrays.

- `rbm`, `multimodal`, `deep`, `topics`: models of data.
- `classifiers`, `classification_rbm`: classifiers.
- `imputer`, `outliers`, `pyod`: missing entries and outliers.
- `sweep`: one estimator with many settings.
- `base`, `array_rbm`, `features`, `generation`, `scoring`: shared methods of the models.
- `classifier_base`, `fine_tuning`, `network`: shared methods of the classifiers.
- `inputs`, `batches`, `labels`: checks of the data, once per call.
- `parameters`, `persistence`, `chains`: parameters, files and persistent chains.

Machines are in :mod:`mvrbm.machine`, and training is in :mod:`mvrbm.training`.
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
