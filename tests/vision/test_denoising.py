"""Denoising: against enumeration on tiny machines, closed forms, and noise that was put in."""

import copy
import itertools

import numpy as np
import pytest
import torch
from scipy.optimize import minimize_scalar
from scipy.stats import norm

from environment import fixed_seeds
from mvrbm import CP, MMVRBM, Bernoulli, BoltzmannMachine, Gaussian, Kronecker, RandomSource
from mvrbm.vision import NOISES, add_noise, denoise, estimate_level
from mvrbm.vision.denoising import posterior_mean, robust_sigma
from mvrbm.vision.observations import (
    GaussianNoiseOnBinary,
    GaussianNoiseOnGray,
    GaussianNoiseOnReal,
    SaltAndPepper,
    SaltAndPepperOnGray,
    SaltAndPepperOnReal,
)
from mvrbm.vision.patches import PatchGrid


@fixed_seeds()  # how far mean field is from the exact posterior depends on the machine
def tiny(seed=0, std=1.5):
    """A 2x2 binary machine with strong weights, double precision."""
    machine = BoltzmannMachine(Bernoulli((2, 2)), Bernoulli((2, 2)), Kronecker(2), seed=seed, std=std).double()
    with torch.no_grad():
        machine.layers["visible"].bias.copy_(torch.tensor([[0.5, -1.0], [0.0, -0.5]]))
        machine.hidden.bias.copy_(torch.tensor([[0.2, -0.4], [-0.3, 0.1]]))
    return machine


STATES = torch.tensor(list(itertools.product([0.0, 1.0], repeat=4)), dtype=torch.float64).reshape(-1, 2, 2)


def salt_and_pepper_likelihood(y, x, rate):
    """p(y | x) of binary pixels, multiplied over pixels, from the definition: hit, black or white, or left alone."""
    return ((1 - rate) * (y == x).double() + rate / 2).prod(-1).prod(-1)


def gaussian_likelihood(y, x, sigma):
    return torch.exp(-0.5 * ((y - x) / sigma) ** 2).prod(-1).prod(-1)


NOISE_ON_BINARY = [
    ("salt and pepper", SaltAndPepper, salt_and_pepper_likelihood, 0.3, STATES),
    ("Gaussian", GaussianNoiseOnBinary, gaussian_likelihood, 0.6, STATES * 0.8 + 0.1),
]


def exact_posterior(machine, likelihood, level, y):
    """Mean of p(x | y) and log p(y), up to the likelihood's constant, for each y: by enumeration."""
    log_prior = -machine.free_energy(STATES)
    log_prior = log_prior - torch.logsumexp(log_prior, 0)
    weights = torch.stack([log_prior.exp() * likelihood(one, STATES, level) for one in y])  # (n, states)
    means = (weights[..., None, None] * STATES).sum(1) / weights.sum(1)[:, None, None]
    return means, weights.sum(1).log()


@pytest.mark.parametrize(("_", "kind", "likelihood", "level", "observed"), NOISE_ON_BINARY)
def test_gibbs_averages_to_the_exact_posterior_mean(_, kind, likelihood, level, observed):
    # 400 chains per observed image, each averaged by itself: their means are independent, so 64 differences (16
    # images of 4 pixels) each exceed 5 standard errors with probability below 1e-6: false alarms below 4e-5.
    machine, chains = tiny(), 400
    y = observed.repeat_interleave(chains, 0)
    observation = kind(machine.layers["visible"], level, 1.0, 0.1)
    means = posterior_mean(machine, observation, y, 60, burn_in=40, rng=RandomSource(1))
    means = means.reshape(len(observed), chains, 2, 2)
    exact, _ = exact_posterior(machine, likelihood, level, observed)
    error = means.std(1) / chains**0.5
    assert bool(((means.mean(1) - exact).abs() < 5 * error).all())
    # The test can fail: it detects the difference between mean field and the exact posterior.
    approximate = posterior_mean(machine, observation, observed, 50)
    assert bool(((approximate - exact).abs() > 5 * error).any())


def bound(machine, likelihood, level, y, x, h):
    """E_q[-E + log p(y | x)] + H(q), from independent probabilities x of pixels and h of hidden units."""

    def entropy(p):
        return -(torch.xlogy(p, p) + torch.xlogy(1 - p, 1 - p)).sum((-1, -2))

    def log_likelihood(value):
        one = torch.full((1, 1), value, dtype=torch.float64)
        return torch.stack([likelihood(pixel.reshape(1, 1), one, level).log() for pixel in y.reshape(-1)]).reshape(
            y.shape
        )

    fits = x * log_likelihood(1.0) + (1 - x) * log_likelihood(0.0)
    return -machine.energy(x, h) + fits.sum((-1, -2)) + entropy(x) + entropy(h)


@pytest.mark.parametrize(("_", "kind", "likelihood", "level", "observed"), NOISE_ON_BINARY)
@torch.no_grad()
def test_mean_field_raises_the_variational_bound_to_a_fixed_point_below_the_evidence(
    _, kind, likelihood, level, observed
):
    machine = tiny()
    observation = kind(machine.layers["visible"], level, 1.0, 0.1)
    bounds = []
    for rounds in (1, 2, 3, 4, 8, 200):
        x = posterior_mean(machine, observation, observed, rounds)
        bounds.append(bound(machine, likelihood, level, observed, x, machine.hidden_mean(x)))
    bounds = torch.stack(bounds)
    assert bool((bounds.diff(dim=0) > -1e-10).all())
    log_z = torch.logsumexp(-machine.free_energy(STATES), 0)
    _, evidence = exact_posterior(machine, likelihood, level, observed)
    assert bool((bounds[-1] - log_z < evidence).all())
    assert float((evidence - bounds[-1] + log_z).max()) < 1  # a bound that is worth something
    # At the fixed point each pixel's odds are the likelihood's times the machine's, in the mean field of the others.
    field = machine.visible_fields(machine.hidden_mean(x))["visible"]
    ones, zeros = (
        torch.stack([likelihood(p.reshape(1, 1), torch.full((1, 1), v).double(), level) for p in observed.reshape(-1)])
        for v in (1.0, 0.0)
    )
    odds = torch.log(ones / zeros).reshape(observed.shape) + machine.layers["visible"].bias + field
    torch.testing.assert_close(x, torch.sigmoid(odds), atol=1e-8, rtol=0)


def test_without_weights_denoising_is_bayes_rule_of_one_pixel():
    machine = tiny()
    with torch.no_grad():
        for parameter in machine.couplings.parameters():
            parameter.zero_()
    ink = torch.sigmoid(machine.layers["visible"].bias).detach().numpy()
    images = np.stack([np.zeros((2, 2)), np.ones((2, 2))])
    found = denoise(machine, images, level=0.2, values="binary")
    np.testing.assert_allclose(found[0], 0.1 * ink / (0.8 * (1 - ink) + 0.1), rtol=1e-6)
    np.testing.assert_allclose(found[1], 0.9 * ink / (0.8 * ink + 0.1), rtol=1e-6)


# -- gray pixels ------------------------------------------------------------------------------------


def gray_pixels(mean, black, white, random):
    """Pixels that are black with a0 (1 - mu)^k0, white with a1 mu^k1, and else gray with the mean that is left."""
    p0, p1 = black[0] * (1 - mean) ** black[1], white[0] * mean ** white[1]
    lot = random.random(mean.shape)
    gray = np.clip((mean - p1) / (1 - p0 - p1), 0.01, 0.99)
    return np.where(lot < p0, 0.0, np.where(lot < p0 + p1, 1.0, random.beta(3 * gray, 3 * (1 - gray))))


@pytest.fixture(scope="module")
def speckled():
    """Independent gray pixels of known means and known shape: a machine without weights describes them exactly."""
    random = np.random.default_rng(0)
    machine = BoltzmannMachine(Bernoulli((20, 20)), Bernoulli((2, 2)), Kronecker(), std=1e-6).double()
    mean = random.uniform(0.02, 0.98, (20, 20))
    with torch.no_grad():
        machine.layers["visible"].bias.copy_(torch.logit(torch.from_numpy(mean)))
    return machine, mean, gray_pixels(np.broadcast_to(mean, (100, 20, 20)), (0.9, 4), (0.1, 2), random)


def test_shape_of_gray_pixels_and_rate_are_found(speckled):
    machine, _, clean = speckled
    y = torch.from_numpy(add_noise(clean, level=0.15, seed=1))
    observation = SaltAndPepperOnGray(machine.layers["visible"], None, 1.0, 0.05)
    posterior_mean(machine, observation, y, 3, fit=True)
    # 40,000 pixels: the rate's standard error is about 0.003, the powers' about 0.1.
    assert observation.level == pytest.approx(0.15, abs=0.012)
    assert observation.pixels.parameters[0] == pytest.approx(0.9, abs=0.06)
    assert observation.pixels.parameters[1] == pytest.approx(4, abs=0.5)
    assert observation.pixels.parameters[2] == pytest.approx(0.1, abs=0.03)


def test_the_fitted_weights_are_those_that_the_noise_really_has(speckled):
    machine, mean, clean = speckled
    noisy = add_noise(clean, level=0.15, seed=1)
    found = denoise(machine, noisy, level=0.15)
    p0, p1 = 0.9 * (1 - mean) ** 4, 0.1 * mean**2
    best = np.where(
        noisy == 0,
        0.075 * mean / (0.85 * p0 + 0.075),
        np.where(noisy == 1, (0.85 * p1 + 0.075 * mean) / (0.85 * p1 + 0.075), noisy),
    )
    assert ((best - clean) ** 2).mean() < 0.6 * ((noisy - clean) ** 2).mean()
    assert ((found - clean) ** 2).mean() < 1.01 * ((best - clean) ** 2).mean()


@pytest.mark.parametrize("clipped", [False, True])
def test_gaussian_noise_on_gray_pixels_beats_both_the_prior_and_the_picture(speckled, clipped):
    machine, mean, clean = speckled
    noisy = add_noise(clean, "gaussian", 0.2, seed=1)
    noisy = np.clip(noisy, 0, 1) if clipped else noisy
    assert estimate_level(machine, noisy, noise="gaussian") == pytest.approx(0.2, abs=0.02)
    found = denoise(machine, noisy, noise="gaussian")
    linear = mean + np.var(clean - mean) / (np.var(clean - mean) + 0.04) * (noisy - mean)
    error = [((array - clean) ** 2).mean() for array in (found, linear, noisy, np.broadcast_to(mean, clean.shape))]
    assert error[0] < 0.95 * min(error[1:])


def test_tables_of_gaussian_noise_hold_bayes_rule(speckled):
    machine, _, _ = speckled
    unit = machine.layers["visible"]
    observation = GaussianNoiseOnGray(unit, 0.1, 1.0, 0.1)
    y = torch.full((1, 20, 20), 0.3, dtype=torch.float64)
    observation.first_guess(y)
    found = observation.mean(torch.zeros_like(y), y)[0]
    (a0, k0, a1, k1), concentration = observation.pixels.parameters, observation.pixels.concentration
    x = (np.arange(20000) + 0.5) / 20000
    for mean, value in zip(torch.sigmoid(unit.bias).flatten().tolist(), found.flatten().tolist(), strict=True):
        p0, p1 = a0 * (1 - mean) ** k0, a1 * mean**k1
        center = (mean - p1) / (1 - p0 - p1)
        density = x ** (center * concentration - 1) * (1 - x) ** ((1 - center) * concentration - 1)
        weight = (1 - p0 - p1) * density / density.sum() * norm.pdf(0.3, x, 0.1)
        ends = np.array([p0 * norm.pdf(0.3, 0, 0.1), p1 * norm.pdf(0.3, 1, 0.1)])
        assert value == pytest.approx(((weight * x).sum() + ends[1]) / (weight.sum() + ends.sum()), abs=0.02)


# -- Gaussian units ---------------------------------------------------------------------------------


def real_machine():
    unit = Gaussian((2, 3))
    machine = BoltzmannMachine(unit, Gaussian((2, 2)), Kronecker(), seed=3, std=0.1).double()
    with torch.no_grad():
        unit.bias.copy_(torch.linspace(0.1, 0.9, 6).reshape(2, 3))
        unit.log_variance.copy_(torch.linspace(-2, -1, 6).reshape(2, 3))
    return machine


def test_gaussian_machine_and_gaussian_noise_have_a_closed_form():
    # x and hidden y are jointly normal: precision [[1/s^2, -W'/s], [-W/s, 1]]; noise adds 1 / sigma^2 to the first.
    machine, sigma = real_machine(), 0.3
    unit = machine.layers["visible"]
    scale, bias = unit.scale.detach().reshape(-1), unit.bias.detach().reshape(-1)
    w = torch.as_tensor(machine.links["visible"].dense()).detach().reshape(4, 6)
    precision = torch.cat(
        [
            torch.cat([torch.diag(scale**-2), -w.T / scale[:, None]], 1),
            torch.cat([-w / scale, torch.eye(4).double()], 1),
        ]
    )
    precision[:6, :6] += torch.eye(6) / sigma**2
    y = torch.rand(5, 2, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    pull = torch.cat([bias / scale**2 + y.reshape(5, 6) / sigma**2, torch.zeros(5, 4).double()], 1)
    exact = torch.linalg.solve(precision, pull.T).T[:, :6].reshape(5, 2, 3)
    # Mean field has the exact mean of a normal posterior.
    found = denoise(machine, y.numpy(), noise="gaussian", level=sigma, rounds=200)
    np.testing.assert_allclose(found, exact.numpy(), atol=1e-10)
    # 300 chains per image, 30 means: all within 5 standard errors but for a chance below 2e-5.
    observation = GaussianNoiseOnReal(unit, sigma, 1.0, 0.1)
    means = posterior_mean(machine, observation, y.repeat_interleave(300, 0), 30, burn_in=20, rng=RandomSource(0))
    means = means.reshape(5, 300, 2, 3)
    assert bool(((means.mean(1) - exact).abs() < 5 * means.std(1) / 300**0.5).all())


def test_draws_of_gaussian_units_have_the_posterior_variance():
    machine, sigma = real_machine(), 0.3
    unit = machine.layers["visible"]
    y = torch.full((20_000, 2, 3), 0.5, dtype=torch.float64)
    drawn = GaussianNoiseOnReal(unit, sigma, 1.0, 0.1).sample(torch.zeros_like(y), y, RandomSource(0)).detach()
    exact = 1 / (1 / unit.scale.detach() ** 2 + 1 / sigma**2)
    # A variance of 20,000 draws has a relative standard error of 0.01: six means six in a thousand million.
    torch.testing.assert_close(drawn.var(0), exact, rtol=0.06, atol=0)


def test_salt_and_pepper_on_gaussian_units_weighs_the_tail_beyond_black():
    machine = real_machine()
    unit = machine.layers["visible"]
    y = torch.tensor([[[0.0, 1.0, 0.4], [1.0, 0.0, 0.0]]], dtype=torch.float64)
    field = torch.full_like(y, 0.2)
    found = SaltAndPepperOnReal(unit, 0.2, 1.0, 0.1).mean(field, y).detach()
    for place in itertools.product(range(2), range(3)):
        scale = float(unit.scale.detach()[place])
        mean, value = float(unit.mean(field)[0].detach()[place]), float(y[0][place])
        tail = {0.0: norm.cdf((1 / 510 - mean) / scale), 1.0: norm.sf((1 - 1 / 510 - mean) / scale)}
        trust = 1.0 if value == 0.4 else 0.8 * tail[value] / (0.8 * tail[value] + 0.1)
        assert float(found[0][place]) == pytest.approx(trust * value + (1 - trust) * mean)


# -- how much noise ---------------------------------------------------------------------------------


def most_likely(log_likelihood):
    """Return the noise level between 0 and 1 with the highest likelihood."""
    return minimize_scalar(lambda level: -log_likelihood(level), bounds=(1e-4, 1), options={"xatol": 1e-6}).x


@torch.no_grad()
def test_the_variance_of_gaussian_noise_on_binary_pixels_is_the_most_likely_one():
    random = np.random.default_rng(0)
    mean = random.uniform(0.1, 0.9, (40, 5, 5))
    y = (random.random(mean.shape) < mean) + 0.4 * random.normal(size=mean.shape)
    observation = GaussianNoiseOnBinary(Bernoulli((5, 5)).double(), None, 1.0, 0.3)
    for _ in range(10):
        observation.fit(torch.logit(torch.from_numpy(mean)), torch.from_numpy(y))
    exact = most_likely(lambda s: np.log(mean * norm.pdf(y, 1, s) + (1 - mean) * norm.pdf(y, 0, s)).sum())
    assert observation.level == pytest.approx(exact, rel=1e-4)


@torch.no_grad()
def test_the_rate_of_salt_and_pepper_on_gaussian_units_is_the_most_likely_one():
    unit = real_machine().layers["visible"]
    random = np.random.default_rng(0)
    y = torch.from_numpy(random.uniform(0.1, 0.9, (200, 2, 3)))
    y[torch.from_numpy(random.random(y.shape) < 0.2)] = 1.0
    field = torch.zeros_like(y)
    observation = SaltAndPepperOnReal(unit, None, 1.0, 0.1)
    for _ in range(10):
        observation.fit(field, y)
    white = norm.sf((1 - 1 / 510 - unit.mean(field).numpy()) / unit.scale.numpy())[y == 1]

    def log_likelihood(rate):  # with half a pseudo-count for each outcome
        gray = int((y < 1).sum())
        return np.log((1 - rate) * white + rate / 2).sum() + (gray + 0.5) * np.log1p(-rate) + 0.5 * np.log(rate)

    assert observation.level == pytest.approx(most_likely(log_likelihood), rel=1e-4)


@pytest.mark.parametrize(("level", "margin"), [(0.05, 0.035), (0.2, 0.055)])
def test_rate_of_salt_and_pepper_is_found_on_binary_images(stripes, level, margin):
    # The model itself explains a rate of 0.013. The rest of a margin is 5 standard errors, of 0.004 and 0.008.
    model, clean = stripes
    assert estimate_level(model, add_noise(clean, level=level, seed=5)) == pytest.approx(level, abs=margin)


@pytest.mark.parametrize("method", ["mean-field", "gibbs"])
@pytest.mark.parametrize("noise", NOISES)
def test_noise_is_removed(stripes, method, noise):
    model, clean = stripes
    noisy = add_noise(clean, noise, 0.3, seed=2)
    found = denoise(model, noisy, noise=noise, method=method, values="binary", steps=30, burn_in=10)
    assert ((found - clean) ** 2).mean() < 0.3 * ((noisy - clean) ** 2).mean()


@pytest.mark.parametrize("noise", NOISES)
def test_gibbs_follows_its_seed(noise):
    noisy = add_noise(STATES.numpy(), noise, 0.3, seed=2)
    first, again, other = (
        denoise(tiny(), noisy, noise=noise, level=0.3, method="gibbs", values="binary", steps=3, burn_in=0, seed=seed)
        for seed in (1, 1, 2)
    )
    assert np.array_equal(first, again)
    assert not np.array_equal(first, other)


def test_robust_sigma_sees_noise_and_not_the_picture():
    picture = np.add.outer(np.linspace(0, 1, 64), np.linspace(0, 1, 65))[None]
    assert robust_sigma(picture) < 1e-12
    assert robust_sigma(add_noise(picture, "gaussian", 0.1, seed=0)) == pytest.approx(0.1, rel=0.1)
    assert robust_sigma(np.ones((3, 1, 5))) == 0


def test_added_noise_is_what_it_says():
    gray = np.full((50, 20, 20), 100, np.uint8)
    noisy = add_noise(gray, "salt-and-pepper", 0.2, seed=0)
    # 20,000 pixels at rate 0.1: five standard errors are 0.011.
    assert (noisy == 0).mean() == pytest.approx(0.1, abs=0.011)
    assert (noisy == 255).mean() == pytest.approx(0.1, abs=0.011)
    assert set(np.unique(noisy)) == {0, 100, 255}
    spread = add_noise(gray / 255, "gaussian", 0.3, seed=0) - gray / 255
    assert spread.std() == pytest.approx(0.3, rel=0.03)
    assert add_noise(gray, "gaussian", 0.3, seed=0).dtype == np.uint8
    assert np.array_equal(noisy, add_noise(gray, "salt-and-pepper", 0.2, seed=0))
    assert not np.array_equal(noisy, add_noise(gray, "salt-and-pepper", 0.2, seed=1))
    assert np.array_equal(add_noise(gray, "salt-and-pepper", 0.0), gray)


# -- patches and types ------------------------------------------------------------------------------


@pytest.mark.parametrize("stride", [1, 2, 3])
@pytest.mark.parametrize("at_once", [1, 7, 1000])
def test_patches_put_back_are_the_image_exactly(stride, at_once):
    images = np.random.default_rng(0).random((3, 9, 11)).astype(np.float32)
    grid = PatchGrid(3, (9, 11), (3, 4), stride)
    pieces = (grid.cut(images, np.arange(i, min(i + at_once, len(grid)))) for i in range(0, len(grid), at_once))
    assert np.array_equal(grid.average(pieces).astype(np.float32), images)


def test_a_pixel_is_the_mean_of_the_patches_on_it():
    grid = PatchGrid(1, (1, 4), (1, 2), 1)  # three patches of two pixels
    pieces = [np.array([[[1.0, 2.0]], [[4.0, 8.0]], [[16.0, 32.0]]])]
    np.testing.assert_array_equal(grid.average(pieces), [[[1, 3, 12, 32]]])
    with pytest.raises(ValueError, match="all 3 patches, got 1"):
        grid.average([np.zeros((1, 1, 2))])


def test_large_images_are_denoised_patch_by_patch(stripes, monkeypatch):
    model, clean = stripes
    wide = np.concatenate([clean[:6], clean[:6]], 2)  # (6, 8, 16)
    noisy = add_noise(wide, level=0.2, seed=3)
    found = denoise(model, noisy, level=0.2, stride=2)
    assert ((found - wide) ** 2).mean() < 0.3 * ((noisy - wide) ** 2).mean()
    # Tiles without overlap are images of the model's size.
    tiles = denoise(model, noisy, level=0.2, stride=8)
    halves = np.concatenate([denoise(model, half, level=0.2) for half in (noisy[:, :, :8], noisy[:, :, 8:])], 2)
    np.testing.assert_allclose(tiles, halves, atol=1e-6)
    assert np.array_equal(
        denoise(model, noisy[0], level=0.2, stride=2), denoise(model, noisy[:1], level=0.2, stride=2)[0]
    )
    monkeypatch.setattr("mvrbm.vision.denoising._PIXELS_AT_ONCE", 200)
    monkeypatch.setattr("mvrbm.vision.denoising._PIXELS_PER_GROUP", 200)
    np.testing.assert_allclose(denoise(model, noisy, level=0.2, stride=2), found, atol=1e-6)


@pytest.mark.parametrize("noise", NOISES)
@pytest.mark.parametrize("dtype", [np.uint8, np.float32, np.float64])
def test_type_and_shape_come_back(speckled, noise, dtype):
    machine, _, clean = speckled
    given = (np.rint(clean[:3] * 255) if dtype is np.uint8 else clean[:3]).astype(dtype)
    noisy = add_noise(given, noise, 0.1, seed=0)
    before = noisy.copy()
    found = denoise(machine, noisy, noise=noise, level=0.1)
    assert (found.dtype, found.shape) == (dtype, (3, 20, 20))
    assert np.array_equal(noisy, before)
    floats = denoise(machine, noisy / 255, noise=noise, level=0.1) * 255 if dtype is np.uint8 else found
    assert np.abs(found - floats).max() <= 0.5 + 1e-3
    if noise == "salt-and-pepper":
        white = 255 if dtype is np.uint8 else 1
        gray = (noisy > 0) & (noisy < white)
        assert np.array_equal(found[gray], noisy[gray])


def test_bytes_count_as_in_training_for_gaussian_units():
    machine = real_machine()
    with torch.no_grad():  # a model of bytes: 255 times as large
        machine.layers["visible"].bias.mul_(255)
        machine.layers["visible"].log_variance.add_(2 * np.log(255))
    noisy = add_noise(np.random.default_rng(0).integers(60, 200, (4, 2, 3)).astype(np.uint8), "gaussian", 0.1)
    found = denoise(machine, noisy, noise="gaussian", level=0.1)
    floats = denoise(real_machine(), noisy / 255, noise="gaussian", level=0.1)
    np.testing.assert_allclose(found, np.clip(floats * 255, 0, 255), atol=0.501)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("noise", NOISES)
@pytest.mark.parametrize("level", [0.2, None])
def test_a_gpu_gives_what_the_cpu_gives(speckled, noise, level):
    machine, _, clean = speckled
    noisy = add_noise(clean, noise, 0.2, seed=0)
    on_gpu = copy.deepcopy(machine).cuda()
    expected = denoise(machine, noisy, noise=noise, level=level)
    np.testing.assert_allclose(denoise(on_gpu, noisy, noise=noise, level=level), expected, atol=1e-4)
    sampled = denoise(on_gpu, noisy, noise=noise, level=level, method="gibbs", steps=5, burn_in=1)
    assert ((sampled - clean) ** 2).mean() < ((noisy - clean) ** 2).mean()


# -- mistakes ---------------------------------------------------------------------------------------

GOOD = np.full((2, 4, 4), 0.5)
MACHINE = BoltzmannMachine(Bernoulli((4, 4)), Bernoulli((2, 2)), Kronecker())
TWO_LAYERS = BoltzmannMachine(
    {"a": Bernoulli((4, 4)), "b": Bernoulli((4, 4))}, Bernoulli((2, 2)), {"a": Kronecker(), "b": Kronecker()}
)
ORDER_3 = BoltzmannMachine(Bernoulli((4, 4, 2)), Bernoulli(5), CP(2))

MISTAKES = [
    ("model must be a BoltzmannMachine", {"model": "machine"}),
    ("model must be a BoltzmannMachine", {"model": MMVRBM()}),
    (r"model must have one visible layer, got \['a', 'b'\]", {"model": TWO_LAYERS}),
    (
        r"two-dimensional visible layer of Bernoulli or Gaussian units, got bernoulli of shape \(4, 4, 2\)",
        {"model": ORDER_3},
    ),
    ("images must have dtype uint8 or float", {"images": GOOD.astype(int)}),
    ("images must have shape", {"images": np.zeros((2, 4, 4, 3))}),
    ("images must have shape", {"images": np.zeros((0, 4, 4))}),
    ("images must be finite", {"images": np.full((4, 4), np.nan)}),
    (r"images must be at least as large as the visible layer \(4, 4\), got \(4, 3\)", {"images": np.zeros((4, 3))}),
    (r"noise must have values from 0 to 1, got 0 to 2", {"images": 2 * np.eye(4)}),
    (r"noise must be one of \['salt-and-pepper', 'gaussian'\], got 'pepper'", {"noise": "pepper"}),
    ("level must be positive and below 1", {"level": 0}),
    ("level must be positive and below 1", {"level": 1.0}),
    ("level must be positive, got -1", {"noise": "gaussian", "level": -1}),
    (r"method must be one of \['mean-field', 'gibbs'\], got 'median'", {"method": "median"}),
    ("rounds must be a whole number of at least 1", {"rounds": 0}),
    ("steps must be a whole number of at least 1", {"steps": 0}),
    ("burn_in must be a whole number of at least 0", {"burn_in": -1}),
    (r"stride must be at most 4 \(the shorter side of a patch\), got 5", {"stride": 5}),
    ("stride must be a whole number of at least 1, got 0", {"stride": 0}),
    (r"values must be one of \['auto', 'binary', 'gray'\], got 'color'", {"values": "color"}),
]  # fmt: skip


@pytest.mark.parametrize(("message", "wrong"), MISTAKES)
def test_mistakes_raise_with_the_name_of_the_argument(message, wrong):
    arguments = {"model": MACHINE, "images": GOOD, **wrong}
    with pytest.raises(ValueError, match=message):
        denoise(arguments.pop("model"), arguments.pop("images"), **arguments)


@pytest.mark.parametrize(
    ("message", "wrong"),
    [
        ("noise must be one of", {"noise": "snow"}),
        ("level must be at least 0 and at most 1", {"level": 1.5}),
        ("level must be at least 0", {"noise": "gaussian", "level": float("nan")}),
        ("images must have dtype uint8 or float", {"images": GOOD.astype(int)}),
    ],
)
def test_mistakes_in_making_noise(message, wrong):
    with pytest.raises(ValueError, match=message):
        add_noise(**{"images": GOOD, **wrong})


def test_patch_grids_have_to_cover_the_image():
    with pytest.raises(ValueError, match=r"stride must be between 1 and 3 \(the shorter side of a patch\), got 4"):
        PatchGrid(1, (9, 9), (3, 4), 4)
    with pytest.raises(ValueError, match="images must be at least as large as a patch"):
        PatchGrid(1, (2, 9), (3, 4), 1)


def test_bytes_are_divided_by_255_whatever_the_machine_was_trained_on():
    """Images are never bytes of 0 and 1, so the scale of the training data does not apply."""
    machine = BoltzmannMachine(Bernoulli((4, 4)), Bernoulli((3, 3)), Kronecker())
    noisy = add_noise(np.full((2, 8, 8), 128, np.uint8), "salt-and-pepper", 0.2, seed=0)
    expected = denoise(machine, noisy, level=0.2)
    machine.layers["visible"].byte_scale = 1.0
    np.testing.assert_array_equal(denoise(machine, noisy, level=0.2), expected)
