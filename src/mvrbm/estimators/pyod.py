"""Outlier detector with the PyOD interface. To install PyOD, run ``pip install 'mvrbm[pyod]'``.

The class is created on first use, so that this module can be imported without PyOD.
"""

import functools
from typing import Any, Self

import numpy as np
from numpy.typing import NDArray
from sklearn.base import clone

from mvrbm.estimators.outliers import MVRBMOutlierDetector
from mvrbm.estimators.undo_on_error import undo_on_error
from mvrbm.extras import require


@functools.cache
def _make_class() -> type:
    base: Any = require("pyod.models.base", "PyODDetector", "pyod").BaseDetector

    class PyODDetector(base):
        """Outlier detector with the PyOD interface, based on masked prediction. Outliers have label 1 and high scores.

        Parameters
        ----------
        contamination : float, default=0.1
            Fraction of outliers in the training data, in the range (0, 0.5].
        detector : MVRBMOutlierDetector, optional
            The detector to clone and train. Its `contamination` parameter is ignored. Default:
            ``MVRBMOutlierDetector()``.

        Attributes
        ----------
        decision_scores_ : array of shape (n,)
            Outlier scores of the training data.
        labels_ : array of shape (n,)
            Labels of the training data: 1 for outliers and 0 for inliers.
        threshold_ : float
            Score threshold. Samples with higher scores are outliers.
        detector_ : MVRBMOutlierDetector
            The fitted detector.
        """

        def __init__(self, contamination: float = 0.1, detector: MVRBMOutlierDetector | None = None) -> None:
            super().__init__(contamination=contamination)
            self.detector = detector

        def fit(self, X: Any, y: Any = None) -> Self:
            """Train the detector and return the estimator. `y` is ignored."""
            with undo_on_error(self):
                self._set_n_classes(y)
                self.detector_ = (MVRBMOutlierDetector() if self.detector is None else clone(self.detector)).fit(X)
                self.decision_scores_ = self.decision_function(X)
                self._process_decision_scores()
            return self

        def decision_function(self, X: Any) -> NDArray[np.floating[Any]]:
            """Return the outlier score of each sample, as an array of shape (n,). Outliers have higher scores."""
            return -self.detector_.score_samples(X)

    # Pickle looks up the class by these names.
    PyODDetector.__module__ = __name__
    PyODDetector.__qualname__ = PyODDetector.__name__
    return PyODDetector


def __getattr__(name: str) -> Any:
    if name == "PyODDetector":
        return _make_class()
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
