import numpy as np
import pytest
from joblib import parallel_config
from scipy.ndimage import correlate1d
from scipy.signal import convolve2d
from sklearn.base import clone

from mvrbm.vision import enlarge_image, psnr_ssim, reduce_image
from studies.baselines.sparse_representation import (
    SparseRepresentation,
    _back_project,
    _codes,
    _derivatives,
    _learn_atoms,
    _unit,
)
from studies.baselines.ycbcr import to_ycbcr

RANDOM = np.random.default_rng(0)
SMALL = {"atoms": 48, "samples": 3000, "overlap": 2, "rounds": 5}


def natural(name, size=128):
    data = pytest.importorskip("skimage.data")
    return np.asarray(getattr(data, name)())[100 : 100 + size, 100 : 100 + size]


@pytest.fixture(scope="module")
def fitted():
    return SparseRepresentation(**SMALL).fit([natural("astronaut"), natural("coffee"), natural("chelsea")])


# -- parts ------------------------------------------------------------------------------------------


def test_codes_of_orthonormal_atoms_are_the_soft_threshold():
    atoms = np.linalg.qr(RANDOM.standard_normal((12, 12)))[0]
    features = _unit(RANDOM.standard_normal((40, 12)))
    along = features @ atoms.T
    expected = np.sign(along) * np.maximum(np.abs(along) - 0.15, 0)
    np.testing.assert_allclose(_codes(features, atoms, np.eye(12), 0.15), expected, atol=1e-12)


def test_codes_meet_the_conditions_of_the_optimum():
    """At the minimum an atom that is used pulls with exactly the penalty, and none with more."""
    atoms = _unit(RANDOM.standard_normal((80, 20)))
    features = _unit(RANDOM.standard_normal((30, 20)))
    codes = _codes(features, atoms, atoms @ atoms.T, 0.15)
    pull = (features - codes @ atoms) @ atoms.T
    assert 1 < (codes != 0).sum(1).mean() < 20
    assert np.abs(pull).max() <= 0.15 * 1.1
    used = codes != 0
    np.testing.assert_allclose(pull[used], 0.15 * np.sign(codes[used]), atol=0.02)


def test_derivatives_are_the_published_filters():
    image = RANDOM.standard_normal((9, 11))
    first, second = [-1, 0, 1], [1, 0, -2, 0, 1]
    expected = [correlate1d(image, taps, axis, mode="nearest") for taps in (first, second) for axis in (1, 0)]
    np.testing.assert_allclose(_derivatives(image), expected, atol=1e-14)


def test_back_projection_is_the_published_one():
    low, high = RANDOM.uniform(0, 255, (8, 9)), RANDOM.uniform(0, 255, (16, 18))
    bell = np.exp(-(np.add.outer(np.arange(-2.0, 3) ** 2, np.arange(-2.0, 3) ** 2)) / 2)  # fspecial('gaussian', 5, 1)
    bell = (bell / bell.sum()) ** 2
    missing = np.pad(enlarge_image(low - reduce_image(high, 2), 2), 2, mode="edge")
    expected = high + convolve2d(missing, bell / bell.sum(), "valid")
    np.testing.assert_allclose(_back_project(high, low, 2, 1), expected, atol=1e-10)


@pytest.mark.parametrize("scale", [2, 3, 4])
def test_back_projection_ends_in_agreement_with_the_small_image(scale):
    large = natural("camera", 48).astype(np.float64)
    low = reduce_image(large, scale)
    start = enlarge_image(low, scale)
    errors = [np.abs(reduce_image(_back_project(start, low, scale, n), scale) - low).mean() for n in (0, 5, 40)]
    assert errors[2] < errors[1] < errors[0]
    assert errors[2] < 0.1 * errors[0]


def test_atoms_that_made_the_patches_are_found():
    """Patches that are each a multiple of one of eight pairs of atoms: learning finds these eight."""
    high, low = (_unit(RANDOM.standard_normal((8, size))) for size in (4, 16))
    pairs = np.hstack([high, low])[np.arange(400) % 8] * RANDOM.choice([-1, 1], (400, 1))
    atoms = _learn_atoms(pairs, 16, 0.15, 5, np.random.default_rng(0))
    found = np.abs(_unit(atoms[:, 4:]) @ low.T).max(0)
    np.testing.assert_allclose(found, 1, atol=1e-3)
    which = np.abs(_unit(atoms[:, 4:]) @ low.T).argmax(0)
    partners = np.abs(np.sum(_unit(atoms[which, :4]) * high, 1))
    np.testing.assert_allclose(partners, 1, atol=1e-3)
    # Both halves were of norm 1 and count by the root of their number: sqrt(16) / sqrt(4).
    ratio = np.linalg.norm(atoms[which, 4:], axis=1) / np.linalg.norm(atoms[which, :4], axis=1)
    np.testing.assert_allclose(ratio, 2, rtol=1e-3)


# -- the whole --------------------------------------------------------------------------------------


def by_the_letter(model, low):
    """Yang et al., algorithm 1, patch by patch, with a lasso of our own (proximal gradient steps)."""
    p, step = model.patch, model.patch - model.overlap
    middle = enlarge_image(low, model.scale)
    padded = np.pad(middle, 2, mode="edge")
    rows, columns = middle.shape
    inner = slice(2, -2)
    maps = [
        padded[inner, 3:-1] - padded[inner, 1:-3],
        padded[3:-1, inner] - padded[1:-3, inner],
        padded[inner, 4:] - 2 * middle + padded[inner, :-4],
        padded[4:, inner] - 2 * middle + padded[:-4, inner],
    ]
    atoms, partners = model.low_.T, model.high_.T
    rate = 1 / np.linalg.norm(atoms, 2) ** 2
    total, count = np.zeros_like(middle), np.zeros_like(middle)
    for top in sorted({*range(0, rows - p + 1, step), rows - p}):
        for left in sorted({*range(0, columns - p + 1, step), columns - p}):
            here = (slice(top, top + p), slice(left, left + p))
            feature = np.concatenate([one[here].ravel() for one in maps])
            feature = feature / max(1, np.linalg.norm(feature))
            w = np.zeros(atoms.shape[1])
            for _ in range(1500):
                w = w - rate * atoms.T @ (atoms @ w - feature)
                w = np.sign(w) * np.maximum(np.abs(w) - rate * model.penalty, 0)
            patch = partners @ w
            pixels = middle[here].ravel()
            contrast = 1.2 * np.linalg.norm(pixels - pixels.mean())
            patch = patch * contrast / np.linalg.norm(patch) if patch.any() else patch
            total[here] += (patch + pixels.mean()).reshape(p, p)
            count[here] += 1
    return total / count


def test_an_image_is_enlarged_as_the_algorithm_says(fitted):
    low = reduce_image(natural("gravel", 24), 2)
    bare = clone(fitted).set_params(rounds=0)
    bare.low_, bare.high_ = fitted.low_, fitted.high_
    np.testing.assert_allclose(255 * bare._upscale_gray(low / 255), by_the_letter(bare, low.astype(float)), atol=0.2)


def test_it_is_better_than_bicubic_on_other_images(fitted):
    truth = natural("camera")
    low = reduce_image(truth, 2)
    gain = psnr_ssim(truth, fitted.upscale(low)).psnr - psnr_ssim(truth, enlarge_image(low, 2)).psnr
    assert gain > 0.5


def test_atoms_are_of_norm_one_and_counted(fitted):
    assert fitted.low_.shape == (48, 100)
    assert fitted.high_.shape == (48, 25)
    np.testing.assert_allclose(np.linalg.norm(fitted.low_, axis=1), 1)
    np.testing.assert_allclose(np.linalg.norm(fitted.high_, axis=1), 1)
    assert fitted.n_parameters_ == 48 * 125
    assert fitted.fit_seconds_ > 0


def test_the_same_seed_learns_the_same_and_another_seed_other_atoms():
    images = [natural("coffee", 64)]
    small = {**SMALL, "samples": 300, "atoms": 16}
    first, again, other = (SparseRepresentation(**small, random_state=seed).fit(images) for seed in (0, 0, 1))
    np.testing.assert_array_equal(first.high_, again.high_)
    assert not np.allclose(first.high_, other.high_)


@pytest.mark.parametrize("dtype", [np.uint8, np.uint16, np.float32])
def test_colors_keep_their_type_and_chroma_is_bicubic(fitted, dtype):
    top = np.iinfo(dtype).max if np.dtype(dtype).kind == "u" else 1
    image = (natural("coffee", 24) / 255 * 0.6 * top + 0.2 * top).astype(dtype)
    large = fitted.upscale(image)
    assert large.dtype == dtype
    assert large.shape == (48, 48, 3)
    chroma = enlarge_image(to_ycbcr(image), 2)[..., 1:]
    np.testing.assert_allclose(to_ycbcr(large)[..., 1:], chroma, atol=0.004)
    gray = fitted.upscale(np.ascontiguousarray(image[..., 1]))
    assert (gray.dtype, gray.shape) == (dtype, (48, 48))


@pytest.mark.parametrize("size", [(1, 1), (1, 7), (2, 3)])
def test_images_smaller_than_a_patch_are_enlarged_too(fitted, size):
    flat = np.full(size, 90, np.uint8)
    np.testing.assert_array_equal(fitted.upscale(flat), np.full((2 * size[0], 2 * size[1]), 90))


def test_those_who_share_the_work_do_not_change_it(fitted):
    low = reduce_image(natural("camera", 160), 2)
    shared = clone(fitted).set_params(n_jobs=2)
    shared.low_, shared.high_ = fitted.low_, fitted.high_
    with parallel_config("threading"):
        np.testing.assert_array_equal(shared.upscale(low), fitted.upscale(low))


MISTAKES = [
    ({"scale": 5}, r"scale must be one of \[2, 3, 4\], got 5"),
    ({"patch": 1}, "patch must be a whole number of at least 2, got 1"),
    ({"atoms": 0}, "atoms must be a whole number of at least 1, got 0"),
    ({"overlap": 5}, "overlap must be below patch, 5, got 5"),
    ({"penalty": 0}, "penalty must be positive, got 0"),
    ({"passes": 0.5}, "passes must be a whole number of at least 1, got 0.5"),
    ({"samples": 10, "atoms": 11}, "atoms must be at most the number of patches that are not flat, 10"),
]


@pytest.mark.parametrize(("changes", "message"), MISTAKES)
def test_mistakes_are_told(changes, message):
    with pytest.raises(ValueError, match=message):
        SparseRepresentation(**{**SMALL, **changes}).fit([RANDOM.integers(256, size=(40, 40)).astype(np.uint8)])


@pytest.mark.parametrize("images", [[], [np.zeros((4, 30), np.uint8)]])
def test_there_must_be_something_to_learn_from(images):
    with pytest.raises(ValueError, match="images must hold one of at least 5 x 5 pixels, got none"):
        SparseRepresentation(**SMALL).fit(images)
