import io

import numpy as np
import pytest

from mvrbm.errors import ShardError
from mvrbm.io.shards import Shards, is_folder_of_shards


def test_shards_are_the_rows_of_all_files(tmp_path):
    parts = [np.random.default_rng(k).random((k, 2, 3)).astype(np.float32) for k in (3, 0, 5)]
    assert not is_folder_of_shards(tmp_path)
    for number, part in enumerate(parts):
        np.save(tmp_path / f"{number}.npy", part)
    assert is_folder_of_shards(tmp_path)
    shards, whole = Shards(tmp_path), np.concatenate(parts)
    assert shards.shape == (8, 2, 3)
    rows = np.array([7, 0, 3, 3, 2])
    np.testing.assert_array_equal(shards[rows], whole[rows])
    np.testing.assert_array_equal(shards[2:6], whole[2:6])
    np.testing.assert_array_equal(shards.reshape(8, 6)[rows], whole[rows].reshape(-1, 6))


def header(shape):
    """Return the header of an .npy file of this shape, without entries."""
    file = io.BytesIO()
    np.lib.format.write_array_header_1_0(file, {"descr": "<f8", "fortran_order": False, "shape": shape})
    return file.getvalue()


BAD = {
    "no .npy files": {},
    "an invalid shape": {"0.npy": header((0, 2**62))},
    "is corrupted": {"0.npy": b"\x93NUMPY\x01\x00"},
    "contains samples of shape": {"0.npy": np.zeros((2, 3)), "1.npy": np.zeros((2, 4))},
    "are empty": {"0.npy": np.zeros((0, 3))},
    "uint8, float32 or float64 is required": {"0.npy": np.zeros((2, 3), dtype=np.int64)},
    "samples along the first axis": {"0.npy": np.zeros(4)},
}


@pytest.mark.parametrize("message", BAD)
def test_shards_that_do_not_match_raise(tmp_path, message):
    for name, content in BAD[message].items():
        if isinstance(content, bytes):
            (tmp_path / name).write_bytes(content)
        else:
            np.save(tmp_path / name, content)
    with pytest.raises(ShardError, match=message):
        Shards(tmp_path)
