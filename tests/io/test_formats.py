"""Tests of idx files. The tests of `read_array` in test_arrays.py cover .npy and .npz files."""

import gzip

import numpy as np
import pytest

from mvrbm.errors import InputError
from mvrbm.io.formats import read_idx


def idx(array, code=0x08):
    sizes = b"".join(size.to_bytes(4, "big") for size in array.shape)
    return bytes([0, 0, code, array.ndim]) + sizes + array.tobytes()


TYPES = [(0x08, np.uint8), (0x09, np.int8), (0x0B, ">i2"), (0x0C, ">i4"), (0x0D, ">f4"), (0x0E, ">f8")]


@pytest.mark.parametrize(("code", "dtype"), TYPES)
@pytest.mark.parametrize("pack", [bytes, gzip.compress], ids=["plain", "gzip"])
def test_idx_round_trip(tmp_path, code, dtype, pack):
    array = np.arange(24).reshape(2, 3, 4).astype(dtype)
    path = tmp_path / "array"
    path.write_bytes(pack(idx(array, code)))
    read = read_idx(path)
    assert read.dtype == np.dtype(dtype).newbyteorder("=")
    assert read.dtype.isnative
    np.testing.assert_array_equal(read, array)


GOOD = idx(np.arange(24, dtype=np.uint8).reshape(2, 3, 4))
BAD_IDX = [
    ("empty", b"", "is empty"),
    ("wrong magic", b"\x00\x01\x08\x01" + GOOD[4:], "not an idx file"),
    ("unknown type", b"\x00\x00\x0a\x03" + GOOD[4:], "not an idx file"),
    ("no dimensions", b"\x00\x00\x08\x00", "0 dimensions"),
    ("too many dimensions", b"\x00\x00\x08\xff" + bytes(4 * 255), "255 dimensions"),
    ("half a header", GOOD[:9], "the header is incomplete"),
    ("no entries", b"\x00\x00\x08\x02" + bytes(8), "no entries"),
    ("truncated", GOOD[:-1], "truncated"),
    ("trailing bytes", GOOD + b"\x00", "extra bytes after the last entry"),
    ("claims 2^64 entries", b"\x00\x00\x08\x02" + b"\xff" * 8, "declares"),
    ("claims more than it holds", b"\x00\x00\x08\x02" + b"\x00\x00\xff\xff" * 2 + b"abc", "truncated"),
    ("gzip: truncated stream", gzip.compress(GOOD)[:-9], "truncated"),
    ("gzip: truncated array", gzip.compress(GOOD[:-1]), "truncated"),
    ("gzip: damaged stream", gzip.compress(GOOD)[:10] + b"\xff" * 20, "corrupted"),
    ("gzip: wrong checksum", gzip.compress(GOOD)[:-8] + bytes(8), "corrupted"),
    ("gzip: claims more than its size can unpack to", gzip.compress(b"\x00\x00\x08\x01\x7f\xff\xff\xff"), "truncated"),
]


@pytest.mark.parametrize(("content", "message"), [row[1:] for row in BAD_IDX], ids=[row[0] for row in BAD_IDX])
def test_bad_idx_raises(tmp_path, content, message):
    path = tmp_path / "array-idx"
    path.write_bytes(content)
    with pytest.raises(InputError, match=message) as caught:
        read_idx(path)
    assert str(path) in str(caught.value)


def test_a_missing_idx_file_raises(tmp_path):
    with pytest.raises(InputError, match="no such file"):
        read_idx(tmp_path / "missing")
    with pytest.raises(InputError, match="is a folder"):
        read_idx(tmp_path)


def test_a_gzip_bomb_raises_before_it_is_unpacked(tmp_path):
    path = tmp_path / "bomb.gz"
    path.write_bytes(gzip.compress(b"\x00\x00\x08\x01\x04\x00\x00\x00" + bytes(2**22)))
    with pytest.raises(InputError, match="declares 67,108,864 bytes"):
        read_idx(path, largest=2**20)
