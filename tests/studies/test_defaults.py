"""The study of default settings: its data, its marks, and one run of each part on small samples."""

import numpy as np

from mvrbm import MMVRBM
from studies import __main__, defaults
from studies.runs import Place, Store


def test_letters_can_be_told_apart():
    images, labels = defaults.letters(600, 0)
    assert images.shape == (600, 16, 16)
    assert len(np.unique(labels)) == 26
    means = np.stack([images[labels == k].mean(0).ravel() for k in range(26)])
    nearest = ((images.reshape(600, 1, -1) - means) ** 2).sum(2).argmin(1)
    assert (nearest == labels).mean() > 0.5
    np.testing.assert_array_equal(images, defaults.letters(600, 0)[0])


def test_scores_that_fall_by_more_than_their_deviation_are_marked():
    def rows(scores):
        return [
            {"model": "RBM, default", "times": times, "seed": seed, "score": score + 0.1 * seed}
            for times, score in zip(defaults.TIMES, scores, strict=True)
            for seed in range(3)
        ]

    tables = defaults._tables({"epochs": rows([1.0, 0.95, 0.5, 2.0]), "layers": [], "classes": []})
    (row,) = (row for row in tables["epochs"]["rows"] if row[0] == "RBM, default")
    assert row[3:] == ["1.100 ± 0.100", "1.050 ± 0.100", "0.600 ± 0.100 (worse)", "2.100 ± 0.100"]


def test_a_run_of_each_part(tmp_path, monkeypatch):
    place = Place(Store(tmp_path), "cpu")
    monkeypatch.setitem(defaults.MODELS, "MMVRBM", (MMVRBM, 1, "accuracy"))
    numbers = defaults._measure_epochs({"model": "MMVRBM", "times": 2, "seed": 0}, place).numbers
    assert 0 <= numbers["score"] <= 1
    monkeypatch.setattr(defaults, "MMVRBM", lambda *args, **how: MMVRBM(*args, **how, n_epochs=1))
    layers = defaults._measure_layers({"layers": "left and right halves of digits", "seed": 0}, place).numbers
    assert layers["both, logistic regression"] > layers["one, logistic regression"] > 0.7
    assert "defaults" in __main__.commands("defaults")
