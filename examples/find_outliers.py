"""Find the digits that are not threes, and where a broken three is broken. Data: scikit-learn's digits.

It takes about half a minute: python examples/find_outliers.py
"""

import numpy as np
from sklearn.datasets import load_digits
from sklearn.ensemble import IsolationForest
from sklearn.metrics import roc_auc_score
from sklearn.neighbors import LocalOutlierFactor

from mvrbm import MVRBMOutlierDetector

NORMAL = 3


def main() -> None:
    """Train on half of the threes, score all other digits and rows, and show the map of a defect."""
    digits = load_digits()
    pictures = digits.images / 16
    own, others = pictures[digits.target == NORMAL], pictures[digits.target != NORMAL]
    train, test = own[::2], np.concatenate([own[1::2], others])
    is_outlier = np.arange(len(test)) >= len(own[1::2])

    detector = MVRBMOutlierDetector(random_state=0, verbose=1).fit(train)
    print(f"digits other than {NORMAL}, area under the ROC curve:")
    print(f"  masked prediction  {roc_auc_score(is_outlier, -detector.score_samples(test)):.3f}")
    for tool in (IsolationForest(random_state=0), LocalOutlierFactor(novelty=True)):
        scores = -tool.fit(train.reshape(len(train), -1)).score_samples(test.reshape(len(test), -1))
        print(f"  {type(tool).__name__:<18} {roc_auc_score(is_outlier, scores):.3f}")

    broken = own[1].copy()
    broken[3:5, 3:5] = 1 - broken[3:5, 3:5]
    explained = detector.explain(broken[None])[0]
    verdict = {1: "normal", -1: "an outlier"}[int(detector.predict(broken[None])[0])]
    print(f"\na {NORMAL} with a defect in rows 3 and 4, columns 3 and 4, which is {verdict}; where it is unusual:")
    for picture, row in zip(broken, explained, strict=True):
        print("".join(" .:*#"[int(4.99 * value)] for value in picture), "  ", " ".join(f"{v:5.2f}" for v in row))


if __name__ == "__main__":
    main()
