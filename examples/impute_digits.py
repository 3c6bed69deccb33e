"""Fill in a fifth of the pixels of digits, and columns of a table of wines. Data: scikit-learn's digits and wines.

It takes about a minute: python examples/impute_digits.py
"""

import numpy as np
from sklearn.datasets import load_digits, load_wine
from sklearn.impute import KNNImputer, SimpleImputer

from mvrbm import MVRBMImputer


def main() -> None:
    """Compare the errors of missing entries with those of scikit-learn's imputers."""
    for name, data in {"digits": load_digits().images / 16, "wines": load_wine().data}.items():
        missing = np.random.default_rng(0).random(data.shape) < 0.2
        holes = np.where(missing, np.nan, data)
        rows = holes.reshape(len(holes), -1)
        scale = np.nanstd(rows, axis=0).reshape(data.shape[1:]) if data.ndim == 2 else 1.0
        imputer = MVRBMImputer(random_state=0, verbose=1)
        found = {"MVRBMImputer": imputer.fit_transform(holes)}
        for tool in (SimpleImputer(), KNNImputer()):
            found[type(tool).__name__] = tool.fit_transform(rows).reshape(data.shape)
        print(f"{name}, root mean squared error of {missing.sum():,} missing entries:")
        for tool_name, filled in found.items():
            error = np.sqrt((((filled - data) / scale)[missing] ** 2).mean())
            print(f"  {tool_name:<14} {error:.4f}")
        expected = np.sqrt(((imputer.standard_deviation(holes) / scale)[missing] ** 2).mean())
        print(f"  expected by MVRBMImputer itself: {expected:.4f}\n")


if __name__ == "__main__":
    main()
