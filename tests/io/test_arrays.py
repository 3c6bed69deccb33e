import gzip
import io
import os
import re
import struct
import zipfile
import zlib

import numpy as np
import pytest
from PIL import Image

from mvrbm.errors import InputError
from mvrbm.io import arrays as files
from mvrbm.io.arrays import (
    contact_sheet,
    half_mask,
    known_entries,
    read_array,
    read_labels,
    read_mask,
    read_samples,
    write_output,
)
from mvrbm.io.shards import Shards

ARRAY = np.arange(24, dtype=np.float32).reshape(2, 3, 4)


def image(path, size=(4, 3), mode="L", value=7):
    Image.new(mode, size, value).save(path)
    return path


def huge_png(width, height):
    """Return a PNG that claims a size, but has few pixels."""

    def chunk(kind, content):
        return struct.pack(">I", len(content)) + kind + content + struct.pack(">I", zlib.crc32(kind + content))

    head = struct.pack(">IIBBBBB", width, height, 8, 0, 0, 0, 0)
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", head) + chunk(b"IDAT", zlib.compress(bytes(100))) + chunk(b"IEND", b"")


# -- reading ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("order", ["C", "F"])
@pytest.mark.parametrize("dtype", [bool, np.uint8, np.int64, np.float16, np.float32, np.float64, ">f4"])
def test_npy_and_npz(tmp_path, dtype, order):
    array = np.asarray(ARRAY % 2, dtype=dtype, order=order)
    np.save(tmp_path / "a.npy", array)
    np.savez(tmp_path / "a.npz", array)
    np.savez_compressed(tmp_path / "two.npz", left=array, right=array + array)
    for source in ("a.npy", "a.npz", "two.npz:left"):
        read = read_array(str(tmp_path / source))
        assert read.dtype == array.dtype
        np.testing.assert_array_equal(read, array)


def test_npy_is_memory_mapped(tmp_path):
    np.save(tmp_path / "a.npy", ARRAY)
    assert isinstance(read_array(tmp_path / "a.npy"), np.memmap)


def test_idx(tmp_path):
    content = bytes([0, 0, 8, 2, 0, 0, 0, 1, 0, 0, 0, 2, 5, 6])
    for name, packed in [("x-idx2-ubyte", content), ("x.gz", gzip.compress(content))]:
        (tmp_path / name).write_bytes(packed)
        assert read_array(tmp_path / name).tolist() == [[5, 6]]


def test_images_are_read_as_gray_bytes_sorted_by_name(tmp_path):
    image(tmp_path / "b.png", value=9)
    image(tmp_path / "a.bmp", mode="RGB", value=(255, 255, 255))
    image(tmp_path / "c.PNG", mode="I;16", value=0x9292)
    image(tmp_path / "d.png", mode="RGBA", value=(3, 3, 3, 0))
    (tmp_path / "notes.txt").write_text("not an image")
    (tmp_path / ".hidden.png").write_text("not an image either")
    read = read_array(tmp_path)
    assert read.shape == (4, 3, 4)
    assert read.dtype == np.uint8
    assert read[:, 0, 0].tolist() == [255, 9, 0x92, 255]
    assert read_array(tmp_path / "b.png").shape == (1, 3, 4)


def test_transparent_images_are_shown_on_white(tmp_path):
    ink = np.zeros((2, 3, 4), np.uint8)  # black
    ink[..., 3] = [[0, 255, 128], [51, 0, 0]]
    Image.fromarray(ink).save(tmp_path / "ink.png")
    assert read_array(tmp_path / "ink.png").tolist() == [[[255, 0, 127], [204, 255, 255]]]


def test_16_bits_are_rounded_to_8(tmp_path):
    values = np.array([[0, 128, 129, 0x7FFF, 65535]], np.uint16)
    Image.fromarray(values).save(tmp_path / "a.png")
    assert read_array(tmp_path / "a.png").tolist() == [[[0, 0, 1, 127, 255]]]
    Image.fromarray(values >> 4).save(tmp_path / "b.png")
    read_array(tmp_path)  # a bright image is next to the dark one
    with pytest.warns(UserWarning, match=r"b\.png: .* at most 4,095 of 65,535, so at most 16 gray levels remain"):
        read_array(tmp_path / "b.png")


def test_an_image_may_have_idx_in_its_name(tmp_path):
    assert read_array(image(tmp_path / "mask_idx.png")).shape == (1, 3, 4)


def test_named_sets(tmp_path, monkeypatch):
    assert read_array("digits").shape == (1797, 8, 8)
    monkeypatch.chdir(tmp_path)
    np.save(tmp_path / "digits", ARRAY)
    (tmp_path / "digits.npy").rename(tmp_path / "digits")
    assert read_array("./digits").shape == ARRAY.shape
    assert read_array("digits").shape == (1797, 8, 8)


def test_data_sets_of_large_arrays_are_cut_into_samples():
    pytest.importorskip("skimage")
    pytest.importorskip("tensorly")
    small = read_array("natural-images")
    assert small.shape == (10_000, 16, 16)
    assert 0 <= small.min() <= small.max() <= 1 + 1e-6
    windows = read_array("indian-pines")
    assert windows.shape == (841, 5, 5, 200)
    assert windows.max() < 1


def test_tiles_are_windows_of_the_cube():
    cube = np.arange(7 * 6 * 2).reshape(7, 6, 2)
    tiles = files._tiles(cube, 3)
    assert tiles.shape == (4, 3, 3, 2)
    np.testing.assert_array_equal(tiles[3], cube[3:6, 3:6])


def test_samples_are_bytes_or_floats_with_at_least_two_axes(tmp_path):
    for given, expected in [
        ("bool", "f4"),
        ("u1", "u1"),
        ("i8", "f8"),
        ("i2", "f4"),
        ("f2", "f4"),
        ("f8", "f8"),
        (">f8", "f8"),
    ]:
        np.save(tmp_path / "a.npy", (ARRAY % 2).astype(given))
        read = read_samples(tmp_path / "a.npy")
        assert read.dtype == expected
        np.testing.assert_array_equal(read, ARRAY % 2)
    np.save(tmp_path / "a.npy", ARRAY)
    assert isinstance(read_samples(tmp_path), Shards)
    np.save(tmp_path / "a.npy", np.ones(5))
    with pytest.raises(InputError, match=r"shape \(5,\)"):
        read_samples(tmp_path / "a.npy")


# -- masks ------------------------------------------------------------------------------------------


def test_nan_marks_missing_entries():
    samples = np.array([[0.0, np.nan], [1.0, 2.0]])
    assert known_entries(samples, "x.npy").tolist() == [[True, False], [True, True]]
    assert known_entries(samples[1:], "x.npy") is None
    assert known_entries(np.ones((2, 2), np.uint8), "x.npy") is None
    advice = "; replace it with a number, or with NaN if the entry is missing"
    for infinite, message in (
        (1, "an infinite entry at index (0, 1)"),
        (2, "2 infinite entries, the first one at index (0, 1)"),
    ):
        with pytest.raises(InputError, match=re.escape(f"x.npy contains {message}{advice}")):
            known_entries(np.array([[np.nan] + [-np.inf] * infinite]), "x.npy")


@pytest.mark.parametrize(
    ("half", "rows", "columns"),
    [("top", slice(2), slice(None)), ("bottom", slice(2, 5), slice(None)), ("left", slice(None), slice(1)),
     ("right", slice(None), slice(1, 3))],
)  # fmt: skip
def test_half_mask(half, rows, columns):
    expected = np.ones((5, 3), bool)
    expected[rows, columns] = False
    np.testing.assert_array_equal(half_mask((5, 3), half), expected)
    with pytest.raises(InputError, match=f"no {half} half"):
        half_mask((5,), half)


def test_masks_are_booleans_for_one_sample_or_for_all(tmp_path):
    known = ARRAY % 3 > 0  # (2, 3, 4)
    for values in (known, known.astype(np.int64), np.uint8(255) * known):
        np.save(tmp_path / "mask.npy", values)
        np.testing.assert_array_equal(read_mask(tmp_path / "mask.npy", (2, 3, 4)), known)
        np.save(tmp_path / "mask.npy", values[1].ravel())
        np.testing.assert_array_equal(read_mask(tmp_path / "mask.npy", (2, 3, 4)), known[1])
    for values, message in [
        (ARRAY, "not a mask"),
        (ARRAY[:, 1:] > 0, "a mask must have the shape"),
        (known.swapaxes(1, 2), "a mask must have the shape"),
        (known[0].T, r"but .* has shape \(4, 3\)"),
    ]:
        np.save(tmp_path / "mask.npy", values)
        with pytest.raises(InputError, match=message):
            read_mask(tmp_path / "mask.npy", (2, 3, 4))


def test_labels_may_start_with_a_byte_order_mark(tmp_path):
    (tmp_path / "labels.txt").write_text("cat\ndog\ncat\n", encoding="utf-8-sig")
    assert read_labels(tmp_path / "labels.txt").tolist() == ["cat", "dog", "cat"]


# -- what raises ------------------------------------------------------------------------------------


def saved(array, **kwargs):
    buffer = io.BytesIO()
    np.save(buffer, array, **kwargs)
    return buffer.getvalue()


def zipped(members, how=zipfile.ZIP_STORED):
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w", how) as archive:
        for name, content in members.items():
            archive.writestr(name, content)
    return buffer.getvalue()


def claiming(shape, dtype="<f8", content=b"abc"):
    text = repr({"descr": dtype, "fortran_order": False, "shape": shape}).encode().ljust(117) + b"\n"
    return b"\x93NUMPY\x01\x00" + struct.pack("<H", len(text)) + text + content


BAD_FILES = [
    ("empty", "a.npy", b"", "is empty"),
    ("text", "a.npy", b"1,2,3\n4,5,6\n", "is not a .npy"),
    ("objects", "a.npy", saved(np.array([{}, None]), allow_pickle=True), "Python objects"),
    ("complex", "a.npy", saved(np.ones(2, complex)), "complex128"),
    ("strings", "a.npy", saved(np.array(["a", "b"])), "booleans, integers or floats"),
    ("fields", "a.npy", saved(np.zeros(2, [("x", "f4")])), "booleans, integers or floats"),
    ("dates", "a.npy", saved(np.zeros(2, "M8[s]")), "booleans, integers or floats"),
    ("long doubles", "a.npy", saved(np.zeros(2, np.longdouble)), "booleans, integers or floats"),
    ("no entries", "a.npy", saved(np.zeros((0, 3))), "no entries"),
    ("truncated", "a.npy", saved(ARRAY)[:-1], "truncated: it has 95 of 96 bytes"),
    ("truncated header", "a.npy", saved(ARRAY)[:50], "corrupted"),
    ("huge claim", "a.npy", claiming((2**40, 2**40)), "truncated"),
    ("negative size", "a.npy", claiming((-1, 3)), "no entries"),
    ("huge header", "a.npy", b"\x93NUMPY\x02\x00" + saved(ARRAY)[8:], "declares a header of 662,372,470 bytes"),
    ("version 9", "a.npy", b"\x93NUMPY\x09\x00" + saved(ARRAY)[8:], "version 9.0"),
    ("code in the header", "a.npy", claiming("__import__('os').getcwd()"), "corrupted"),
    ("npz: not a zip", "a.npz", b"not a zip archive", "corrupted"),
    ("npz: nothing in it", "a.npz", zipped({}), "contains no array"),
    ("npz: several", "a.npz", zipped({"x.npy": saved(ARRAY), "y.npy": saved(ARRAY)}), r"2 arrays \(x, y\); select one"),
    ("npz: not an array", "a.npz", zipped({"x.txt": b"hello, world"}), "corrupted"),
    ("npz: objects", "a.npz", zipped({"x.npy": saved(np.array([None]), allow_pickle=True)}), "Python objects"),
    ("npz: bomb", "a.npz", zipped({"x.npy": claiming((2**40,))}), "exceeds the limit"),
    ("npz: claims more than it has", "a.npz", zipped({"x.npy": claiming((9,))}), "truncated"),
    ("npz: trailing bytes", "a.npz", zipped({"x.npy": saved(ARRAY) + b"x"}), "extra bytes after the last entry"),
    ("npz: odd compression", "a.npz", zipped({"x.npy": saved(ARRAY)}, zipfile.ZIP_BZIP2), "unsupported compression"),
    ("npz: truncated", "a.npz", zipped({"x.npy": saved(ARRAY)})[:-30], "corrupted"),
    ("image: bomb", "a.png", huge_png(50_000, 50_000), "bomb"),
    ("image: large", "a.png", huge_png(9_000, 8_000), "9000x8000 pixels"),
    ("image: damaged", "a.png", huge_png(4, 4)[:40], "corrupted|not a readable image"),
    ("image: only by its name", "a.jpg", b"hello", "not a readable image"),
]


@pytest.mark.parametrize(("name", "content", "message"), [r[1:] for r in BAD_FILES], ids=[r[0] for r in BAD_FILES])
def test_bad_files_raise(tmp_path, name, content, message):
    (tmp_path / name).write_bytes(content)
    with pytest.raises(InputError, match=message) as caught:
        read_array(tmp_path / name)
    assert "\n" not in str(caught.value)
    assert str(tmp_path / name) in str(caught.value)


def test_pickles_are_never_loaded(tmp_path):
    class Trap:
        def __reduce__(self):
            return (open, (str(tmp_path / "sprung"), "w"))

    np.save(tmp_path / "trap.npy", np.array([Trap()]), allow_pickle=True)
    with pytest.raises(InputError):
        read_array(tmp_path / "trap.npy")
    assert not (tmp_path / "sprung").exists()


def test_the_error_for_a_missing_key_lists_the_keys(tmp_path):
    np.savez(tmp_path / "a.npz", x=ARRAY)
    with pytest.raises(InputError, match="no array 'y', only x"):
        read_array(f"{tmp_path / 'a.npz'}:y")


def test_images_of_different_sizes_raise(tmp_path):
    with pytest.raises(InputError, match="contains no images"):
        read_array(tmp_path)
    image(tmp_path / "a.png")
    image(tmp_path / "b.png", size=(5, 3))
    with pytest.raises(InputError, match=r"b\.png is 5x3 and a\.png is 4x3"):
        read_array(tmp_path)
    with pytest.raises(InputError, match="exceed the limit of 20 bytes"):
        read_array(tmp_path, largest=20)


# -- what is written --------------------------------------------------------------------------------


def test_npy_files_are_replaced_only_with_force(tmp_path):
    path = tmp_path / "out.npy"
    write_output(path, ARRAY)
    np.testing.assert_array_equal(np.load(path), ARRAY)
    with pytest.raises(InputError, match="use force=True to replace it"):
        write_output(path, ARRAY + 1)
    np.testing.assert_array_equal(np.load(path), ARRAY)
    write_output(path, ARRAY + 1, force=True)
    np.testing.assert_array_equal(np.load(path), ARRAY + 1)
    assert [entry.name for entry in tmp_path.iterdir()] == ["out.npy"]


@pytest.mark.parametrize("suffix", [".png", ".jpg", ".bmp", ".tif", ".gif", ".webp", ".pgm"])
def test_images_are_written_as_a_contact_sheet(tmp_path, suffix):
    path = write_output(tmp_path / f"sheet{suffix}", np.ones((5, 6, 4), np.float32))
    with Image.open(path) as sheet:
        assert sheet.size == (20 * (3 * 5 - 1), 20 * (2 * 7 - 1))


def test_contact_sheet_values():
    values = np.array([[[-1.0, 0.0, 0.5, 1.0, 3.0]]])
    assert contact_sheet(values).tolist() == [[0, 0, 128, 255, 255]]
    assert contact_sheet(values, stretch=True).tolist() == [[0, 64, 96, 128, 255]]
    assert contact_sheet(np.zeros((1, 1, 2)), stretch=True).tolist() == [[0, 0]]
    assert contact_sheet(np.array([[[7, 200]]], np.uint8)).tolist() == [[7, 200]]
    assert contact_sheet(np.ones((3, 4))).tolist() == contact_sheet(np.ones((3, 2, 2))).tolist()
    with pytest.raises(InputError, match="not images"):
        contact_sheet(np.ones((3, 5)))
    with pytest.raises(InputError, match="at least one column, got columns=0"):
        contact_sheet(np.ones((3, 5, 2)), columns=0)
    with pytest.raises(InputError, match="not images"):
        contact_sheet(np.ones((3, 5, 2, 2)))


@pytest.mark.parametrize(
    ("columns", "rows_of_tiles"),
    [(1, [[1], [2], [3]]), (2, [[1, 2], [3]]), (3, [[1, 2, 3]]), (9, [[1, 2, 3]]), (None, [[1, 2], [3]])],
)
def test_a_contact_sheet_has_the_given_number_of_columns(columns, rows_of_tiles):
    sheet = contact_sheet(np.array([[[1]], [[2]], [[3]]], np.uint8), columns=columns)
    width = len(rows_of_tiles[0])
    assert sheet[::2, ::2].tolist() == [row + [128] * (width - len(row)) for row in rows_of_tiles]


def test_a_failed_write_keeps_the_old_file(tmp_path, monkeypatch):
    path = write_output(tmp_path / "out.npy", ARRAY)
    monkeypatch.setattr(os, "fsync", _no_space)
    for target, array in [(path, ARRAY + 1), (tmp_path / "sheet.png", ARRAY)]:
        with pytest.raises(InputError, match="No space left on device"):
            write_output(target, array, force=True)
    monkeypatch.undo()
    assert [entry.name for entry in tmp_path.iterdir()] == ["out.npy"]
    np.testing.assert_array_equal(np.load(path), ARRAY)


def _no_space(descriptor):
    raise OSError(28, "No space left on device")
