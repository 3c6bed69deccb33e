"""What plots draw: letters as high as their weights, and predicted contacts in the right places and colors."""

import numpy as np
import pytest

from mvrbm.errors import AlignmentWarning, InputError
from mvrbm.io.alphabets import ALPHABETS
from mvrbm.sequences import (
    plot_contact_map,
    plot_correlations,
    plot_logo,
    plot_mutations,
    plot_projection,
    ranked_pairs,
)
from tables import generator

matplotlib = pytest.importorskip("matplotlib")
figures = pytest.importorskip("matplotlib.figure")


@pytest.fixture
def ax():
    return figures.Figure().subplots()


def test_letters_are_as_high_as_their_weights(ax):
    weights = np.array([[0.5, -0.25, 0.0, 1.0], [-1.5, 0.25, 0.75, -0.125]])
    plot_logo(weights, "-ACI", ax=ax)
    boxes = [patch.get_path().get_extents() for patch in ax.patches]
    found = sorted((round((box.x0 + box.x1) / 2), box.y0, box.y1) for box in boxes)
    first = [(1, -0.25, 0.0), (1, 0.0, 0.5), (1, 0.5, 1.5)]
    second = [(2, -1.625, -0.125), (2, -0.125, 0.0), (2, 0.0, 0.25), (2, 0.25, 1.0)]
    np.testing.assert_allclose(found, first + second, atol=1e-6)
    assert max(box.width for box in boxes) <= 0.9 + 1e-6
    low, high = ax.get_ylim()
    assert low < -1.625
    assert high > 1.5


def test_letters_have_the_colors_of_their_group(ax):
    plot_logo(np.ones((1, 3)), "ADK", ax=ax)
    assert len({patch.get_facecolor() for patch in ax.patches}) == 3


def offsets(ax, label):
    (found,) = [points for points in ax.collections if points.get_label() == label]
    return {tuple(int(value) for value in point) for point in found.get_offsets()}


def test_contacts_are_drawn_above_the_diagonal(ax):
    rng = generator("map")
    scores, distances = rng.random((12, 12)), rng.uniform(0, 10, (12, 12))
    scores, distances = scores + scores.T, (distances + distances.T) / 2
    distances[0, 11] = distances[11, 0] = np.nan
    plot_contact_map(scores, distances, n_pairs=7, threshold=5, ax=ax)
    first, second = ranked_pairs(scores)
    top = [(i, j) for i, j in zip(first.tolist(), second.tolist(), strict=True) if (i, j) != (0, 11)][:7]
    assert offsets(ax, "true") == {(j + 1, i + 1) for i, j in top if distances[i, j] < 5}
    assert offsets(ax, "false") == {(j + 1, i + 1) for i, j in top if not distances[i, j] < 5}
    assert offsets(ax, "structure") == {
        (j + 1, i + 1) for i in range(12) for j in range(i + 1, 12) if distances[i, j] < 5
    }
    shown = ax.images[0].get_array()
    np.testing.assert_array_equal(shown.mask, np.tri(12, k=-1) == 0)
    np.testing.assert_allclose(shown[5, 2], scores[5, 2])


def test_contacts_without_a_structure(ax):
    scores = np.arange(81.0).reshape(9, 9)
    plot_contact_map(scores + scores.T, ax=ax)
    assert len(offsets(ax, "predicted")) == 9


def test_reference_letters_are_marked(ax):
    scan = generator("scan").standard_normal((4, 3))
    plot_mutations(scan, "CAGA", "ACG", ax=ax)
    np.testing.assert_allclose(ax.images[0].get_array(), scan.T)
    assert offsets_of_last(ax) == {(0, 1), (1, 0), (2, 2), (3, 0)}
    assert [label.get_text() for label in ax.get_yticklabels()] == list("ACG")
    with pytest.raises(ValueError, match=r"scan must have shape \(3, 3\)"):
        plot_mutations(scan, "CAG", "ACG", ax=ax)


def test_a_reference_may_have_the_letters_that_a_scan_accepts(ax):
    letters = ALPHABETS["protein"].letters
    with pytest.warns(AlignmentWarning, match="1 X"):
        plot_mutations(np.eye(5, len(letters)), "AC.XF", letters, ax=ax)
    assert offsets_of_last(ax) == {(0, 1), (1, 2), (2, 0), (3, 0), (4, 5)}
    with pytest.raises(InputError, match="'G' at site 2 is not a letter"):
        plot_mutations(np.eye(3), "ACG", "ACU", ax=ax)


def offsets_of_last(ax):
    return {tuple(int(value) for value in point) for point in ax.collections[-1].get_offsets()}


def test_projection_and_correlations(ax):
    rng = generator("points")
    natural, generated = rng.standard_normal((20, 2)), rng.standard_normal((30, 2))
    plot_projection(natural, generated, ax=ax)
    np.testing.assert_allclose(ax.collections[1].get_offsets(), generated)
    other = figures.Figure().subplots()
    plot_correlations(natural[:, 0], natural[:, 0], ax=other)
    assert other.get_title() == "Pearson 1.000"


def test_a_new_figure_is_made():
    from matplotlib import pyplot

    pyplot.switch_backend("agg")
    axes = plot_logo(np.ones((30, 2)), "AC")
    assert axes.figure.get_size_inches()[0] > 6
    pyplot.close(axes.figure)
    with pytest.raises(ValueError, match=r"weights must have shape \(sites, 3\)"):
        plot_logo(np.ones((30, 2)), "ACG")
