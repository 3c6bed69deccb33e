"""Estimators that follow the scikit-learn API. They accept and return arrays.

- `rbm`, `multimodal`, `deep`, `topics`: generative models.
- `sequences`: generative models of aligned sequences.
- `classifiers`, `classification_rbm`: classifiers.
- `mixture`: exact densities for real-valued arrays.
- `imputer`, `outliers`, `pyod`: imputation and outlier detection.
- `sweep`: parameter sweeps.
- `base`, `array_rbm`, `features`, `generation`, `scoring`: base classes and mixins for the generative models.
- `classifier_base`, `fine_tuning`, `network`: base classes and the network for the classifiers.
- `inputs`, `batches`, `labels`: input validation, batches and class labels.
- `table_encoding`, `dates`: the numeric encoding of tables with categorical columns and of date columns.
- `parameters`, `persistence`, `chains`, `undo`: shared parameters, saving and loading, persistent chains, and recovery
  from errors.

Machines are defined in :mod:`mvrbm.machine`. The training loop is in :mod:`mvrbm.training`.
"""

from mvrbm.estimators.classification_rbm import ClassificationMVRBM
from mvrbm.estimators.classifiers import DeepMVRBMClassifier, MVRBMClassifier
from mvrbm.estimators.deep import DeepMVRBM
from mvrbm.estimators.imputer import MVRBMImputer
from mvrbm.estimators.mixture import MatrixMixture
from mvrbm.estimators.multimodal import MMVRBM
from mvrbm.estimators.outliers import MVRBMOutlierDetector
from mvrbm.estimators.parameters import Layer
from mvrbm.estimators.rbm import MVRBM, RBM, TVRBM
from mvrbm.estimators.sequences import SequenceRBM
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
    "MatrixMixture",
    "ReplicatedSoftmax",
    "SequenceRBM",
    "Sweep",
]
