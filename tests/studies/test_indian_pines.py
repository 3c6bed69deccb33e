"""The order-3 example: its blocks share no pixel, its choices see no test pixel, and it runs from end to end."""

import json

import numpy as np
import pytest

from studies.indian_pines import page, run
from studies.indian_pines.page import run_study, summary
from studies.indian_pines.run import (
    Candidate,
    Features,
    Settings,
    best_outcome,
    divide,
    explain,
    held_out,
    patches,
    scores,
    whitened,
)

SMALL = Settings(
    patch=3,
    block=4,
    classes=3,
    least=3,
    folds=2,
    unlabeled=60,
    candidates=(Candidate("raw", (2, 2, 3), 1), Candidate("whitened", (1, 1, 4), 2)),
    passes=(1, 2),
)


def scene(rows=36, columns=33, bands=6, seed=0):
    """Fields of four crops, some pixels without a label, and a spectrum for each crop."""
    random = np.random.default_rng(seed)
    fields = random.integers(1, 5, (rows // 6 + 1, columns // 5 + 1))
    labels = np.kron(fields, np.ones((6, 5), int))[:rows, :columns]
    spectra = random.normal(1000, 200, (5, bands))
    cube = spectra[labels] + random.normal(0, 80, (rows, columns, bands))
    return cube.astype(np.float32), np.where(random.random(labels.shape) < 0.2, 0, labels)


def pixels_read(places, shape, size):
    """Which pixels the patches of these places are made of, asked of the patches themselves."""
    numbers = np.arange(np.prod(shape)).reshape(*shape, 1)
    return set(patches(numbers, places, size).ravel().tolist())


@pytest.mark.parametrize("patch", [1, 3, 5])
def test_training_and_test_patches_share_no_pixel_in_many_draws(patch):
    settings = Settings(patch=patch, block=4, classes=2, least=3, folds=3)
    for seed in range(4):
        _, labels = scene(40, 37, seed=seed)
        for draw in range(25):
            split = divide(labels, draw, settings)
            tested = pixels_read(split.test, labels.shape, patch)
            assert not tested & pixels_read(split.train, labels.shape, patch)
            assert not tested & pixels_read(split.unlabeled, labels.shape, patch)
            for use, tried in held_out(split, patch):
                used = pixels_read(split.train[use], labels.shape, patch)
                assert not used & pixels_read(split.train[tried], labels.shape, patch)


def test_a_smaller_margin_would_share_pixels():
    """The test above can fail: with a margin one pixel smaller than a patch needs, draws do overlap."""
    _, labels = scene(40, 37)
    narrow = Settings(patch=3, block=4, classes=2, least=3)
    overlaps = []
    for draw in range(10):
        split = divide(labels, draw, narrow)
        overlaps.append(pixels_read(split.test, labels.shape, 5) & pixels_read(split.train, labels.shape, 5))
    assert all(overlaps)


def test_draws_hold_the_share_of_labels_and_only_counted_classes():
    _, labels = scene(60, 60)
    settings = Settings(patch=3, block=4, share=0.1, classes=4, least=5)
    for draw in range(20):
        split = divide(labels, draw, settings)
        assert 0.1 <= len(split.train) / (labels > 0).sum() < 0.1 + 16 / (labels > 0).sum()
        for part in (split.train, split.test):
            found, counts = np.unique(labels[tuple(part.T)], return_counts=True)
            assert np.array_equal(found, split.classes)
            assert counts.min() >= 5
        assert set(map(tuple, split.train)) <= set(map(tuple, split.unlabeled))
        assert all(len(np.unique(split.fold[split.block == block])) == 1 for block in np.unique(split.block))


def test_a_draw_is_repeatable_and_draws_differ():
    _, labels = scene()
    first, again, other = (divide(labels, draw, SMALL) for draw in (0, 0, 1))
    assert np.array_equal(first.train, again.train)
    assert not np.array_equal(first.train, other.train)


def test_draws_that_cannot_be_raise():
    _, labels = scene()
    with pytest.raises(ValueError, match="no draw of 20 has 9 classes with 5 pixels on both sides"):
        divide(labels, 0, Settings(patch=3, block=4, classes=9), tries=20)
    with pytest.raises(ValueError, match="patch must be odd, so that a pixel is its center, got 4"):
        divide(labels, 0, Settings(patch=4))


def test_patches_have_their_pixel_in_the_middle():
    cube, _ = scene()
    places = np.array([[0, 0], [35, 32], [10, 7]])
    cut = patches(cube, places, 5)
    assert cut.shape == (3, 5, 5, 6)
    assert np.array_equal(cut[:, 2, 2], cube[places[:, 0], places[:, 1]])
    assert np.array_equal(cut[2], cube[8:13, 5:10])
    assert np.array_equal(cut[0, 0, 0], cube[2, 2])  # mirrored


def test_whitened_bands_are_uncorrelated_where_they_were_measured():
    cube, _ = scene()
    places = np.argwhere(np.ones(cube.shape[:2], bool))
    white = whitened(cube, places, 0.0).reshape(-1, 6)
    np.testing.assert_allclose(np.cov(white.T), np.eye(6), atol=1e-3)


def test_scores_by_hand():
    labels, predicted = np.array([1, 1, 1, 2]), np.array([1, 1, 2, 2])
    assert scores(labels, predicted) == pytest.approx({"overall": 3 / 4, "average": 5 / 6, "kappa": 0.5})


@pytest.mark.parametrize("classifier", ["svm", "1-nn"])
def test_features_are_chosen_on_held_out_blocks_alone(classifier):
    random = np.random.default_rng(0)
    labels = np.tile([1, 2], 20)
    told = labels[:, None] + random.normal(0, 0.1, (40, 3))
    noise = random.normal(size=(40, 3))
    # What is good in training is useless in test, and the other way round: the choice must not know.
    good = Features(told, lambda: noise, {"name": "good"})
    bad = Features(noise, lambda: told, {"name": "bad"})
    folds = [(np.arange(40) < 20, np.arange(40) >= 20), (np.arange(40) >= 20, np.arange(40) < 20)]
    outcome = best_outcome([bad, good], labels, folds, classifier)
    assert outcome.settings["name"] == "good"
    assert outcome.validation == 1.0
    with pytest.raises(ValueError, match="at least one set of features"):
        best_outcome([], labels, folds, classifier)


def test_from_end_to_end(tmp_path, monkeypatch):
    for module in (page, run):
        monkeypatch.setattr(module, "scene", lambda data_dir: scene())
    report = run_study(tmp_path / "new", tmp_path / "work", draws=2, settings=SMALL)
    assert json.loads((tmp_path / "new" / "results.json").read_text()) == json.loads(json.dumps(report))
    assert (tmp_path / "new" / "label-map.png").read_bytes().startswith(b"\x89PNG")
    for classifier in ("svm", "1-nn"):
        methods = report["summary"][classifier]
        assert set(methods) == {"TVRBM", "PCA", "spectrum", "spectrum, whitened", "patch", "patch, whitened"}
        assert methods["patch"]["overall"]["mean"] > 0.8  # four spectra, little noise
        for draw in report["draws"]:
            chosen = draw["scores"][classifier]
            assert chosen["PCA"]["chosen"]["size"] == np.prod(chosen["TVRBM"]["chosen"]["hidden_shape"])
    values = [draw["scores"]["svm"]["PCA"]["kappa"] for draw in report["draws"]]
    assert summary(report["draws"])["svm"]["PCA"]["kappa"]["deviation"] == pytest.approx(np.std(values, ddof=1))


def test_reasons_are_looked_for():
    cube, labels = scene()
    found = explain(cube, labels, SMALL, draws=1)
    assert 0.5 < found["random_pixels"] <= 1
    (row,) = found["machines"]
    accuracies = [value for name, value in row.items() if "," in name]
    assert len(accuracies) == 4
    assert all(0 <= value <= 1 for value in [*accuracies, row["saturated"], row["brightness"]])
    assert row["errors"]["between corn and soybean"] == 0  # labels 1 to 4 hold no soybean


def test_no_draws_raise(tmp_path):
    with pytest.raises(ValueError, match="draws must be at least 1, got 0"):
        run_study(tmp_path, tmp_path, draws=0)


def test_draws_are_computed_once(tmp_path, monkeypatch):
    for module in (page, run):
        monkeypatch.setattr(module, "scene", lambda data_dir: scene())
    first = run_study(tmp_path / "out", tmp_path / "work", draws=1, settings=SMALL)
    before = (tmp_path / "work" / "runs" / "draw-1.json").stat().st_mtime_ns
    both = run_study(tmp_path / "out", tmp_path / "work", draws=2, settings=SMALL)
    assert (tmp_path / "work" / "runs" / "draw-1.json").stat().st_mtime_ns == before
    assert both["draws"][0] == first["draws"][0]
