"""Every form of distances gives the same matrix, and bad files give one line."""

import numpy as np
import pytest

from mvrbm.errors import InputError
from mvrbm.io.distances import read_distances
from tables import generator


def matrix():
    distances = generator("distances").random((4, 4)).round(3)
    distances = distances + distances.T
    np.fill_diagonal(distances, 0)
    return distances


@pytest.mark.parametrize("kind", ["npy", "spaces", "commas", "pairs"])
def test_every_form_gives_the_same_matrix(tmp_path, kind):
    distances = matrix()
    path = tmp_path / ("distances.npy" if kind == "npy" else "distances.txt")
    if kind == "npy":
        np.save(path, distances)
    elif kind == "pairs":
        pairs = [(i, j) for i in range(4) for j in range(i, 4)]
        path.write_text("# site site distance\n" + "".join(f"{i + 1} {j + 1} {distances[i, j]}\n" for i, j in pairs))
    else:
        np.savetxt(path, distances, delimiter=" " if kind == "spaces" else ",")
    np.testing.assert_allclose(read_distances(path, 4), distances)


def test_a_byte_order_mark_is_skipped(tmp_path):
    (tmp_path / "one.txt").write_text("1 2 7.5\n", encoding="utf-8-sig")
    assert read_distances(tmp_path / "one.txt", 2)[0, 1] == 7.5


def test_unknown_pairs_are_nan(tmp_path):
    (tmp_path / "one.txt").write_text("3\t1\t7.5\n")
    found = read_distances(tmp_path / "one.txt", 3)
    assert found[0, 2] == found[2, 0] == 7.5
    assert np.isnan(found).sum() == 7


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("1 2 x\n", "line 1: expected numbers, got '1 2 x'"),
        ("1 2 3\n1 2\n", "line 2: expected 3 numbers, got 2"),
        ("0 2 3\n", "sites must be whole numbers from 1 to 4, got 0 to 2"),
        ("1.5 2 3\n", "sites must be whole numbers"),
        ("1 5 3\n", "got 1 to 5"),
        ("# nothing\n", "contains no distances"),
        ("1 2\n3 4\n", r"array of shape \(2, 2\); expected a matrix of 4 x 4"),
    ],
)
def test_bad_files_give_one_line(tmp_path, text, message):
    (tmp_path / "bad.txt").write_text(text)
    with pytest.raises(InputError, match=message):
        read_distances(tmp_path / "bad.txt", 4)


def test_files_that_are_too_large_are_not_read(tmp_path):
    (tmp_path / "large.txt").write_bytes(b"#" * 2 * 2**20)
    with pytest.raises(InputError, match="distances between 4 sites have at most 1,052,672"):
        read_distances(tmp_path / "large.txt", 4)
