"""Families of data with normal samples and outliers, for the application `outliers`.

A task has normal samples to train on, other normal samples, and outliers: samples of other classes, or normal samples
with a planted defect.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from mvrbm.io import datasets
from studies.data import data_file

__all__ = ["FAMILIES", "NORMAL", "Task", "normal_samples", "plant", "shuffle_columns", "split"]

Array = NDArray[Any]
Rng = np.random.Generator

# Maximum numbers of training samples, and of test samples of each kind.
_MOST_TRAINING = 1000
_MOST_TEST = 400


class Task(NamedTuple):
    """Samples of a task."""

    train: Array
    normal: Array
    outliers: Array


def split(normal: Array, others: Array, rng: Rng, n_train: int | None = None) -> Task:
    """Divide normal samples into halves, or training samples and the rest, and choose outliers."""
    order = rng.permutation(len(normal))
    n_train = min(len(normal) // 2 if n_train is None else n_train, _MOST_TRAINING)
    chosen = rng.permutation(len(others))[:_MOST_TEST]
    return Task(normal[order[:n_train]], normal[order[n_train:]][:_MOST_TEST], others[chosen])


def plant(samples: Array, change: Callable[[Array, Rng], None], rng: Rng, n_train: int) -> Task:
    """Divide samples into training samples, normal samples and samples in which `change` changes something."""
    order = rng.permutation(len(samples))
    n_test = min(_MOST_TEST, (len(samples) - n_train) // 2)
    changed = samples[order[n_train + n_test :]][:n_test].copy()
    for sample in changed:
        change(sample, rng)
    return Task(samples[order[:n_train]], samples[order[n_train:]][:n_test], changed)


# -- pictures ---------------------------------------------------------------------------------------


@functools.cache
def _mnist_images(data_dir: str | None) -> tuple[Array, Array]:
    found = datasets.load("mnist", data_dir=data_dir)
    return (found.arrays / 255).astype(np.float32), found.labels


def _mnist(normal: int, rng: Rng, data_dir: str | None) -> Task:
    images, labels = _mnist_images(data_dir)
    return split(images[labels == normal], images[labels != normal], rng)


def _digits(normal: int, rng: Rng, _: str | None) -> Task:
    from sklearn.datasets import load_digits

    found = load_digits()
    images = (found.images / 16).astype(np.float32)
    return split(images[found.target == normal], images[found.target != normal], rng)


@functools.cache
def _letter_images() -> tuple[Array, Array]:
    """Return pictures of capital letters, 24x24, in random fonts, sizes, positions and directions, and the letters."""
    import matplotlib
    from PIL import Image, ImageDraw, ImageFont

    folder = Path(matplotlib.get_data_path(), "fonts", "ttf")
    starts = ("DejaVuSans", "DejaVuSerif", "STIXGeneral", "cmr", "cmss", "cmtt", "cmb")
    paths = sorted(path for path in folder.iterdir() if path.name.startswith(starts) and "Display" not in path.name)
    rng = np.random.default_rng(0)
    names = np.array(list("ABCDEFGHIJKLMNOPQRSTUVWXYZ"))
    letters = np.tile(names, 400)
    images = []
    for letter in letters:
        font = ImageFont.truetype(paths[rng.integers(len(paths))], int(rng.integers(32, 44)))
        large = Image.new("L", (48, 48))
        x, y = rng.uniform(20, 28, 2)
        ImageDraw.Draw(large).text((x, y), str(letter), fill=255, font=font, anchor="mm")
        turned = large.rotate(rng.uniform(-10, 10), Image.Resampling.BICUBIC)
        images.append(np.asarray(turned.resize((24, 24), Image.Resampling.BOX), dtype=np.float32) / 255)
    return np.stack(images), letters


def _invert_square(image: Array, rng: Rng) -> None:
    """Invert a 4x4 square around a pixel of the stroke."""
    row, column = (int(at) for at in rng.permutation(np.argwhere(image[2:-2, 2:-2] > 0.5))[0])
    square = image[row : row + 4, column : column + 4]
    square[:] = 1 - square


def _letters(kind: str, rng: Rng, _: str | None) -> Task:
    images, letters = _letter_images()
    if kind == "squares inverted":
        return plant(images, _invert_square, rng, 1000)
    return split(images[letters == kind], images[letters != kind], rng)


def _patches(picture: Array, n: int, rng: Rng, size: int = 16) -> Array:
    rows, columns = (rng.integers(0, length - size, n) for length in picture.shape)
    return np.stack([picture[i : i + size, j : j + size] for i, j in zip(rows, columns, strict=True)])


def _texture(name: str) -> Array:
    from skimage import data

    picture: Array = getattr(data, name)()
    return (picture / 255).astype(np.float32)


def _textures(normal: str, rng: Rng, _: str | None) -> Task:
    picture = _texture(normal)
    half = len(picture) // 2
    others = [_patches(_texture(name), 200, rng) for name in ("brick", "grass", "gravel") if name != normal]
    return Task(_patches(picture[:half], 1000, rng), _patches(picture[half:], 400, rng), np.concatenate(others))


def _flip(image: Array, rng: Rng) -> None:
    image[:] = image[::-1].copy()


def _mirror(image: Array, rng: Rng) -> None:
    image[:] = image[:, ::-1].copy()


def _shade(image: Array, rng: Rng) -> None:
    """Make a 5x5 square brighter or darker."""
    row, column = (rng.integers(2, size - 7) for size in image.shape)
    square = image[row : row + 5, column : column + 5]
    square[:] = (square + rng.choice([-0.25, 0.25])).clip(0, 1)


def _move_block(image: Array, rng: Rng) -> None:
    """Copy a 6x6 block to another place, upside down."""
    rows, columns = (rng.integers(2, size - 8, 2) for size in image.shape)
    source = image[rows[0] : rows[0] + 6, columns[0] : columns[0] + 6].copy()
    image[rows[1] : rows[1] + 6, columns[1] : columns[1] + 6] = source[::-1]


def _swap_halves(samples: Array, rng: Rng) -> Array:
    """Return samples with the lower halves of other samples."""
    half = samples.shape[1] // 2
    return np.concatenate([samples[:, :half], np.roll(samples, 1, axis=0)[:, half:]], axis=1)


_PICTURE_DEFECTS = {"upside down": _flip, "mirrored": _mirror, "shaded": _shade, "moved": _move_block}


def _lfw(kind: str, rng: Rng, _: str | None) -> Task:
    from skimage.data import lfw_subset

    images = lfw_subset().astype(np.float32)
    if kind == "no faces":
        return split(images[:100], images[100:], rng, 60)
    return plant(images[:100], _PICTURE_DEFECTS[kind], rng, 60)


def _frey(kind: str, rng: Rng, data_dir: str | None) -> Task:
    faces = np.load(data_file("freyfaces/freyfaces.npy", data_dir), allow_pickle=False)
    images = (faces.reshape(-1, 28, 20) / 255).astype(np.float32)
    if kind == "other halves":
        task = plant(images, lambda image, rng: None, rng, 1000)
        return task._replace(outliers=_swap_halves(task.outliers, rng))
    return plant(images, _PICTURE_DEFECTS[kind], rng, 1000)


# -- series and spectrograms ------------------------------------------------------------------------


def _eeg_like(n: int, rng: Rng, n_channels: int = 16, n_times: int = 64) -> Array:
    """Return six autoregressive processes, mixed into channels, with noise: (n, channels, times)."""
    frequencies = np.array([0.05, 0.1, 0.2, 0.12, 0.3, 0.08])
    mixing = np.random.default_rng(0).normal(size=(n_channels, len(frequencies)))
    z = rng.normal(size=(n, len(frequencies), n_times + 50))
    for t in range(2, z.shape[2]):
        z[..., t] += 1.9 * np.cos(2 * np.pi * frequencies) * z[..., t - 1] - 0.9025 * z[..., t - 2]
    z = z[..., 50:]
    z *= np.exp(0.3 * rng.normal(size=(n, len(frequencies), 1))) / z.std((0, 2), keepdims=True)
    return (mixing @ z + 0.3 * rng.normal(size=(n, n_channels, n_times))).astype(np.float32)


def _kill_channel(series: Array, rng: Rng) -> None:
    series[rng.integers(len(series))] = 0.05 * rng.normal(size=series.shape[1])


def _add_noise(series: Array, rng: Rng) -> None:
    series[rng.integers(len(series))] += 1.5 * rng.normal(size=series.shape[1])


def _swap_channels(series: Array, rng: Rng) -> None:
    first, second = rng.permutation(len(series))[:2]
    series[[first, second]] = series[[second, first]]


def _add_burst(series: Array, rng: Rng) -> None:
    start = rng.integers(series.shape[1] - 8)
    series[rng.integers(len(series)), start : start + 8] += 3 * np.sin(1.5 * np.arange(8))


_SERIES_DEFECTS = {
    "dead channel": _kill_channel,
    "noisy channel": _add_noise,
    "swapped channels": _swap_channels,
    "burst": _add_burst,
}


def _eeg(kind: str, rng: Rng, _: str | None) -> Task:
    return plant(_eeg_like(1200, rng), _SERIES_DEFECTS[kind], rng, 400)


def _sounds(n: int, rng: Rng) -> Array:
    """Return logarithmic spectrograms of gliding tones with harmonics, onset, decay and noise: (n, 24, 24)."""
    frequencies, times = np.arange(24)[:, None], np.arange(24)
    found = []
    for _ in range(n):
        tone = rng.uniform(3, 6) * (1 + rng.uniform(-0.3, 0.3) * times / 24)
        since = times - rng.integers(6)
        envelope = np.exp(-since.clip(0) / rng.uniform(8, 30)) * (since >= 0)
        harmonics = sum(np.exp(-(((frequencies - h * tone) / 0.7) ** 2) / 2 - 0.35 * h) for h in range(1, 6))
        noise = 0.01 * (1 + rng.chisquare(2, size=(24, 24)))
        found.append(np.log(rng.uniform(0.5, 2) * harmonics * envelope + noise))
    return np.array(found, dtype=np.float32)


def _kill_band(sound: Array, rng: Rng) -> None:
    band = rng.integers(2, 20)
    sound[band : band + 2] = np.log(0.01)


def _swap_bands(sound: Array, rng: Rng) -> None:
    first = int(rng.integers(2, 15))
    rows, others = [first, first + 1], [first + 5, first + 6]
    sound[rows + others] = sound[others + rows]


def _add_click(sound: Array, rng: Rng) -> None:
    time = rng.integers(2, 20)
    sound[:, time] = np.logaddexp(sound[:, time], np.log(0.1) + 0.3 * rng.normal(size=24))


_SOUND_DEFECTS = {"dead band": _kill_band, "swapped bands": _swap_bands, "click": _add_click, "backward": _mirror}


def _spectrograms(kind: str, rng: Rng, _: str | None) -> Task:
    return plant(_sounds(1400, rng), _SOUND_DEFECTS[kind], rng, 600)


# -- tables -----------------------------------------------------------------------------------------


def shuffle_columns(table: Array, rng: Rng) -> Array:
    """Return rows in which three random columns have the values of other rows."""
    changed = table.copy()
    for row in changed:
        columns = rng.permutation(table.shape[1])[:3]
        row[columns] = table[rng.integers(len(table)), columns]
    return changed


def _tables(kind: str, rng: Rng, _: str | None) -> Task:
    from sklearn import datasets as tables

    name, *rest = kind.split()
    found = getattr(tables, f"load_{name}")()
    if name == "diabetes":
        task = plant(found.data, lambda row, rng: None, rng, 200)
        return task._replace(outliers=shuffle_columns(task.outliers, rng))
    normal = int(rest[0])
    return split(found.data[found.target == normal], found.data[found.target != normal], rng)


#: Tasks of each family, and the function that returns the samples of a task: (task, rng, data_dir) -> Task.
FAMILIES: dict[str, tuple[Sequence[Any], Callable[[Any, Rng, str | None], Task]]] = {
    "mnist": (range(10), _mnist),
    "digits": (range(10), _digits),
    "letters": (["A", "E", "G", "M", "S", "squares inverted"], _letters),
    "textures": (["brick", "grass", "gravel"], _textures),
    "lfw": (["no faces", "upside down", "moved"], _lfw),
    "frey": (["upside down", "mirrored", "other halves", "shaded"], _frey),
    "eeg-like": (list(_SERIES_DEFECTS), _eeg),
    "spectrograms": (list(_SOUND_DEFECTS), _spectrograms),
    "tables": (["breast_cancer 1", "wine 0", "wine 1", "wine 2", "diabetes", "digits 2", "digits 8"], _tables),
}


# -- normal samples ---------------------------------------------------------------------------------


def _some(samples: Array, n: int, rng: Rng) -> Array:
    return samples[rng.permutation(len(samples))[:n]]


#: Data for measuring false alarms: functions that return independent normal samples, (n, rng, data_dir) -> samples.
NORMAL: dict[str, Callable[[int, Rng, str | None], Array]] = {
    "mnist": lambda n, rng, data_dir: _some(_mnist_images(data_dir)[0], n, rng),
    "letters": lambda n, rng, _: _some(_letter_images()[0], n, rng),
    "textures": lambda n, rng, _: _patches(_texture("grass"), n, rng),
    "eeg-like": lambda n, rng, _: _eeg_like(n, rng),
    "spectrograms": lambda n, rng, _: _sounds(n, rng),
}


def normal_samples(family: str, n: int, seed: int, data_dir: str | None) -> Array:
    """Return `n` independent normal samples of a family."""
    return NORMAL[family](n, np.random.default_rng(seed), data_dir)
