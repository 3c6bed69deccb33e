"""Fixtures shared by the tests of the estimators."""

import numpy as np
import pytest
import torch
from sklearn.datasets import load_digits


@pytest.fixture(scope="session")
def by_finite_differences():
    def gradient(value, parameter, step=1e-6):
        """Gradient of value() with respect to every entry of a parameter."""
        found = torch.zeros_like(parameter)
        flat, out = parameter.data.reshape(-1), found.reshape(-1)
        for entry in range(len(flat)):
            kept = float(flat[entry])
            ends = []
            for side in (step, -step):
                flat[entry] = kept + side
                ends.append(float(value().detach()))
            flat[entry] = kept
            out[entry] = (ends[0] - ends[1]) / (2 * step)
        return found

    return gradient


@pytest.fixture(scope="module")
def digits():
    return (load_digits().images[:600] / 16).astype(np.float32)  # (600, 8, 8)


@pytest.fixture(scope="module")
def labels():
    return load_digits().target[:600]
