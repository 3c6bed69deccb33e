"""The outlier detector with the contract of PyOD, for ``pip install 'mvrbm[pyod]'``: :class:`PyODDetector`.

The class is made when it is first used, so that the package can be imported without PyOD.
"""

import functools
from typing import Any, Self

import numpy as np
from numpy.typing import NDArray
from sklearn.base import clone

from mvrbm.estimators.outliers import MVRBMOutlierDetector
from mvrbm.extras import require


@functools.cache
def _make_class() -> type:
    base: Any = require("pyod.models.base", "PyODDetector", "pyod").BaseDetector

    class PyODDetector(base):
        """Masked prediction with a Boltzmann machine, as a detector of PyOD: 1 is an outlier, high scores are unusual.

        Parameters
        ----------
        contamination : float
            Share of outliers in the training data, above 0 and at most 0.5.
        detector : MVRBMOutlierDetector, optional
            The detector, whose own `contamination` is not used. Default: one with default settings.

        Attributes
        ----------
        decision_scores_, labels_, threshold_
            Scores of the training data, 1 for outliers among them, and the score above which samples are outliers.
        detector_ : MVRBMOutlierDetector
            The fitted detector.
        """

        def __init__(self, contamination: float = 0.1, detector: MVRBMOutlierDetector | None = None) -> None:
            super().__init__(contamination=contamination)
            self.detector = detector

        def fit(self, X: Any, y: Any = None) -> Self:
            """Learn from data; `y` is ignored."""
            self._set_n_classes(y)
            self.detector_ = (MVRBMOutlierDetector() if self.detector is None else clone(self.detector)).fit(X)
            self.decision_scores_ = self.decision_function(X)
            self._process_decision_scores()
            return self

        def decision_function(self, X: Any) -> NDArray[np.floating[Any]]:
            """Return the score of each sample, (n,): the higher, the more unusual."""
            return -self.detector_.score_samples(X)

    PyODDetector.__module__, PyODDetector.__qualname__ = __name__, PyODDetector.__name__  # so that it can be pickled
    return PyODDetector


def __getattr__(name: str) -> Any:
    if name == "PyODDetector":
        return _make_class()
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
