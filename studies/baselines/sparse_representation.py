r"""Super-resolution by sparse representation (Yang, Wright, Huang and Ma, 2010), the baseline of super-resolution.

Two dictionaries share their codes: an atom of the low-resolution one holds derivatives of the enlarged image, its
partner in the high-resolution one the corresponding pixels. A patch with features f is coded by

.. math:: \min_w \tfrac12 \| D_l w - f / \|f\| \|^2 + \lambda \|w\|_1,

its pixels are :math:`D_h w`, brought to 1.2 times the contrast of the enlarged patch, plus that patch's mean.
Overlapping patches are averaged, and back-projection makes the image consistent with its input. Dictionary
learning and the lasso are scikit-learn's; sizes, weights and the constants below are those of the authors' code.
"""

from __future__ import annotations

import math
import time
import warnings
from collections.abc import Iterator, Sequence
from typing import Any, Self

import numpy as np
from numpy.typing import NDArray
from sklearn.base import BaseEstimator
from sklearn.utils.validation import check_is_fitted

from mvrbm.validation import choice, number, whole_number
from mvrbm.vision import enlarge_image, reduce_image
from mvrbm.vision.images import check_image, to_dtype, white
from mvrbm.vision.patches import PatchGrid
from mvrbm.vision.resampling import SCALES
from mvrbm.vision.stage_training import image_pair
from studies.baselines.ycbcr import from_ycbcr, to_ycbcr

__all__ = ["SparseRepresentation"]

Array = NDArray[Any]

# Value of white in bytes. The next two constants are for pixels in bytes.
_BYTE = 255.0
# Smallest variance of a training patch.
_LEAST_VARIANCE = 10.0
# Features with a smaller norm are not scaled up.
_LEAST_NORM = 1.0
# Ratio of the contrast of a patch to the contrast of the enlarged patch.
_CONTRAST = 1.2
# Patches per update of the dictionaries.
_BATCH = 1000
# Sweeps of coordinate descent in training.
_SWEEPS = 30
# Duality gap at which the lasso stops, relative to the energy of the features.
_TOLERANCE = 1e-3
_PATCHES_AT_ONCE = 4000


class SparseRepresentation(BaseEstimator):
    r"""Super-resolution by coupled dictionaries of low-resolution and high-resolution patches.

    Parameters
    ----------
    scale : {2, 3, 4}
        Factor by which each side is enlarged.
    patch : int
        Side of a patch, in pixels of the large image.
    atoms : int
        Size of the dictionaries.
    penalty : float
        Weight :math:`\lambda` of the codes' sum of magnitudes.
    overlap : int
        Pixels by which neighboring patches overlap.
    samples : int
        Number of training patches; fewer where the images have fewer that are not flat.
    passes : int
        Number of epochs.
    rounds : int
        Rounds of back-projection.
    n_jobs : int, optional
        Number of processes that code patches.
    random_state : int
        Random seed of the choice of patches and of the initial dictionaries.

    Attributes
    ----------
    low_ : array (atoms, 4 * patch**2)
        Atoms of features, each of norm 1.
    high_ : array (atoms, patch**2)
        Their partners, of pixels, each of norm 1.
    n_parameters_ : int
        Number of entries of both.
    fit_seconds_ : float
        Seconds of `fit`.
    """

    low_: Array
    high_: Array
    n_parameters_: int
    fit_seconds_: float

    def __init__(
        self,
        scale: int = 2,
        *,
        patch: int = 5,
        atoms: int = 1024,
        penalty: float = 0.15,
        overlap: int = 4,
        samples: int = 100_000,
        passes: int = 1,
        rounds: int = 20,
        n_jobs: int | None = None,
        random_state: int = 0,
    ) -> None:
        self.scale = scale
        self.patch = patch
        self.atoms = atoms
        self.penalty = penalty
        self.overlap = overlap
        self.samples = samples
        self.passes = passes
        self.rounds = rounds
        self.n_jobs = n_jobs
        self.random_state = random_state

    # -- learning ---------------------------------------------------------------------------------

    def fit(self, images: Sequence[Any]) -> Self:
        """Learn both dictionaries.

        Parameters
        ----------
        images : sequence of arrays (H, W) or (H, W, 3)
            High-resolution images: bytes, 16-bit numbers, or floats from 0 to 1.
        """
        self._check()
        began = time.perf_counter()
        random = np.random.default_rng(self.random_state)
        pairs = self._pairs(images, random)  # (n, 5 p p)
        if len(pairs) < self.atoms:
            raise ValueError(f"atoms must be at most the number of patches that are not flat, {len(pairs)}")
        atoms = _learn_atoms(pairs, self.atoms, self.penalty, self.passes, random)
        high, low = np.split(atoms, [self.patch**2], axis=1)
        norms = [np.linalg.norm(part, axis=1, keepdims=True) for part in (high, low)]
        used = (norms[0] * norms[1])[:, 0] > 0
        self.high_, self.low_ = high[used] / norms[0][used], low[used] / norms[1][used]
        self.n_parameters_ = self.high_.size + self.low_.size
        self.fit_seconds_ = time.perf_counter() - began
        return self

    def _check(self) -> None:
        choice(self.scale, "scale", SCALES)
        least = {"patch": 2, "atoms": 1, "overlap": 0, "samples": 1, "passes": 1, "rounds": 0}
        for name, value in least.items():
            whole_number(getattr(self, name), name, value)
        if self.overlap >= self.patch:
            raise ValueError(f"overlap must be below patch, {self.patch}, got {self.overlap}")
        number(self.penalty, "penalty", exclude_low=True)

    def _pairs(self, images: Sequence[Any], random: np.random.Generator) -> Array:
        """Return centered pixels and features of patches that are not flat, both of norm 1, (n, p p + 4 p p)."""
        sources = [image_pair(image, self.scale) for image in images]
        if not any(min(high.shape) >= self.patch for _, high in sources):
            raise ValueError(f"images must hold one of at least {self.patch} x {self.patch} pixels, got none")
        area = sum(high.size for _, high in sources)
        found = []
        for low, high in sources:
            if min(high.shape) < self.patch:
                continue
            grid = self._grid(high.shape, 1)
            which = random.permutation(len(grid))[: math.ceil(2 * self.samples * high.size / area)]
            pixels = grid.cut(_BYTE * high[None].astype(np.float64), which).reshape(len(which), -1)
            busy = pixels.var(1) > _LEAST_VARIANCE
            features = _features(grid, _derivatives(_BYTE * enlarge_image(low.astype(np.float64), self.scale)), which)
            found.append(np.hstack([_unit(pixels - pixels.mean(1, keepdims=True)), _unit(features)])[busy])
        pairs = np.concatenate(found)
        return pairs[random.permutation(len(pairs))[: self.samples]]

    def _grid(self, size: Sequence[int], stride: int) -> PatchGrid:
        return PatchGrid(1, (size[0], size[1]), (self.patch, self.patch), stride)

    # -- images -----------------------------------------------------------------------------------

    def upscale(self, image: Any) -> Array:
        """Enlarge an image. Chroma is enlarged by bicubic interpolation.

        Parameters
        ----------
        image : array (H, W) or (H, W, 3)
            Gray or RGB: bytes, 16-bit numbers, or floats from 0 to 1.

        Returns
        -------
        array (H * scale, W * scale) or (H * scale, W * scale, 3)
            Of the same type.
        """
        check_is_fitted(self)
        self._check()
        image = check_image(image)
        if image.ndim == 2:
            gray = self._upscale_gray(image / white(image.dtype))
            return to_dtype(gray, image.dtype)
        colors = to_ycbcr(image).astype(np.float64)
        large = enlarge_image(colors, self.scale)
        large[..., 0] = self._upscale_gray(colors[..., 0])
        return from_ycbcr(large, image.dtype)

    def _upscale_gray(self, low: Array) -> Array:
        """Enlarge luminance (h, w), with white at 1, to (h * scale, w * scale)."""
        low = _BYTE * np.asarray(low, np.float64)
        middle = enlarge_image(low, self.scale)
        # A small image is padded with its edge pixels to at least one patch.
        short = [max(0, self.patch - size) for size in middle.shape]
        padded = np.pad(middle, [(0, short[0]), (0, short[1])], mode="edge")
        grid = self._grid(padded.shape, self.patch - self.overlap)
        high = grid.average(self._patches(grid, padded))[0, : middle.shape[0], : middle.shape[1]]
        return _back_project(high, low, self.scale, self.rounds) / _BYTE

    def _patches(self, grid: PatchGrid, middle: Array) -> Iterator[Array]:
        """Yield the high-resolution patches of an enlarged image in order, some (m, p, p) at a time."""
        from sklearn.utils.parallel import Parallel, delayed

        slopes = _derivatives(middle)
        gram = self.low_ @ self.low_.T

        def inputs() -> Iterator[tuple[Array, Array]]:
            for first in range(0, len(grid), _PATCHES_AT_ONCE):
                which = np.arange(first, min(first + _PATCHES_AT_ONCE, len(grid)))
                yield _features(grid, slopes, which), grid.cut(middle[None], which).reshape(len(which), -1)

        work = (
            delayed(_high_patches)(features, pixels, self.high_, self.low_, gram, self.penalty)
            for features, pixels in inputs()
        )
        for part in Parallel(n_jobs=self.n_jobs, return_as="generator")(work):
            yield part.reshape(-1, self.patch, self.patch)


def _derivatives(image: Array) -> Array:
    """Return first and second differences along x and y, with edge padding: (H, W) -> (4, H, W)."""
    wide, tall = np.pad(image, [(0, 0), (2, 2)], mode="edge"), np.pad(image, [(2, 2), (0, 0)], mode="edge")
    return np.stack(
        [
            wide[:, 3:-1] - wide[:, 1:-3],
            tall[3:-1] - tall[1:-3],
            wide[:, 4:] - 2 * image + wide[:, :-4],
            tall[4:] - 2 * image + tall[:-4],
        ]
    )


def _features(grid: PatchGrid, derivatives: Array, which: Array) -> Array:
    """Return the patches of all derivatives, (m, 4 p p)."""
    return np.hstack([grid.cut(one[None], which).reshape(len(which), -1) for one in derivatives])


def _unit(rows: Array) -> Array:
    norms = np.linalg.norm(rows, axis=1, keepdims=True)
    return np.asarray(rows / np.where(norms > 0, norms, 1))


def _learn_atoms(pairs: Array, atoms: int, penalty: float, passes: int, random: np.random.Generator) -> Array:
    """Learn joint atoms (atoms, p p + 4 p p) of pixels and features, each divided by the root of its number."""
    from sklearn.decomposition import MiniBatchDictionaryLearning
    from sklearn.exceptions import ConvergenceWarning

    n_high = pairs.shape[1] // 5
    weights = np.repeat(np.sqrt([n_high, 4 * n_high]), [n_high, 4 * n_high])
    joint = _unit(pairs * weights)
    learner = MiniBatchDictionaryLearning(
        atoms,
        alpha=penalty,
        fit_algorithm="cd",
        batch_size=min(_BATCH, len(joint)),
        max_iter=passes,
        max_no_improvement=None,
        tol=0,
        dict_init=joint[:atoms],
        transform_max_iter=_SWEEPS,
        random_state=int(random.integers(2**31)),
    )
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ConvergenceWarning)  # approximate codes are enough for an update
        return np.asarray(learner.fit(joint).components_)


def _high_patches(features: Array, pixels: Array, high: Array, low: Array, gram: Array, penalty: float) -> Array:
    """Return high-resolution patches, given features (m, 4 p p) and pixels (m, p p) of enlarged ones: (m, p p)."""
    norms = np.linalg.norm(features, axis=1, keepdims=True)
    patches = _codes(features / np.maximum(norms, _LEAST_NORM), low, gram, penalty) @ high
    means = pixels.mean(1, keepdims=True)
    return np.asarray(_unit(patches) * _CONTRAST * np.linalg.norm(pixels - means, axis=1, keepdims=True) + means)


def _codes(features: Array, atoms: Array, gram: Array, penalty: float) -> Array:
    """Solve the lasso for every row: features (m, d), atoms (k, d) -> (m, k)."""
    from sklearn.linear_model import Lasso

    lasso = Lasso(penalty / atoms.shape[1], fit_intercept=False, precompute=gram, tol=_TOLERANCE, max_iter=10_000)
    codes: Array = lasso.fit(atoms.T, features.T).coef_
    return codes.reshape(len(features), len(atoms))


def _back_project(high: Array, low: Array, scale: int, rounds: int) -> Array:
    """Add the enlarged and smoothed difference from the low-resolution image, for some rounds."""
    from scipy.ndimage import correlate1d

    bell = np.exp(-(np.arange(-2.0, 3.0) ** 2))  # a Gaussian of 1 pixel, squared
    for _ in range(rounds):
        missing = enlarge_image(low - reduce_image(high, scale), scale)
        for axis in (0, 1):
            missing = correlate1d(missing, bell / bell.sum(), axis, mode="nearest")
        high = high + missing
    return high
