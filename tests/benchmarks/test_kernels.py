"""The benchmark of the GPU kernels: its cells run in Triton's interpreter, on tiny problems."""

import importlib.util

import numpy as np
import pytest

from benchmarks import kernels
from studies.data import Digits
from studies.runs import Place, Store

pytestmark = pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="Triton is not installed")


@pytest.fixture
def place(tmp_path, monkeypatch):
    random = np.random.default_rng(0)
    images, labels = random.integers(0, 256, (6, 6, 5), dtype=np.uint8), np.arange(6)
    monkeypatch.setattr(kernels, "digits", lambda *about: Digits(images, labels, images[:4], labels[:4]))
    monkeypatch.setattr(kernels, "VISIBLE", (6, 5))
    monkeypatch.setattr(kernels, "HIDDEN", (4, 3))
    monkeypatch.setattr(kernels, "REPETITIONS", 1)
    monkeypatch.setitem(kernels.CASES, "tiny", (2, "paper recipe", 1, "tf32", {}))
    return Place(Store(tmp_path), "cpu")


@pytest.mark.usefixtures("interpreted")
def test_a_case_is_timed(place):
    assert kernels.microseconds({"case": "tiny"}, place).numbers["microseconds"] > 0


@pytest.mark.usefixtures("interpreted")
def test_divergence_is_counted(place):
    numbers = kernels.divergence({"precision": "tf32", "models": 2, "epochs": 1}, place).numbers
    assert 0 <= numbers["diverged"] <= 2


@pytest.mark.usefixtures("interpreted")
@pytest.mark.parametrize("precision", ["tf32", None])
def test_errors_are_those_of_the_trained_machine(precision, place):
    numbers = kernels.error({"precision": precision, "seed": 0, "epochs": 1, "n": 6}, place).numbers
    assert 0 <= numbers["error"] < 0.9  # the test digits are among the training digits
    assert numbers["lost"] == []


def test_names_of_cases_say_what_they_are():
    for name, (n_models, recipe, rank, precision, sizes) in kernels.CASES.items():
        assert recipe in name
        assert name.endswith(precision)
        assert (f"{n_models} models" in name) == (n_models > 1)
        assert (f"rank {rank}" in name) == (rank > 1)
        assert ("64x64" in name) == bool(sizes)
