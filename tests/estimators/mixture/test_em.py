"""Expectation maximization of whitened mixtures: statistics, updates, and the likelihood, which never decreases."""

from dataclasses import replace

import numpy as np
import pytest
import torch

from mvrbm import RandomSource
from mvrbm.estimators.mixture.em import Fitting, Prior, _clusters, gradient, maximization, n_blocks, revive, start
from mvrbm.estimators.mixture.posterior import expectation, moments
from mvrbm.units import WhitenedMixture
from tables import generator

KINDS = {
    "all": {},
    "level, shared": {"level": True, "means": "shared"},
    "no gate": {"gate": False},
    "cosines": {"whiten": False, "means": "one"},
}


def heavy_tails(n, shape=(3, 4)):
    """Samples from two separable Gaussians with random contrasts."""
    rng = generator("heavy tails")
    parts = []
    for _ in range(2):
        a, b = (np.linalg.qr(rng.standard_normal((size, size)))[0] * rng.gamma(2, 1, size) for size in shape)
        contrast = rng.gamma(3, 1, (n // 2, 1, 1)) + 0.5
        parts.append(contrast * np.einsum("ia,nab,jb->nij", a, rng.laplace(size=(n // 2, *shape)), b) + rng.normal())
    return torch.from_numpy(rng.permutation(np.concatenate(parts)))


def started(kind, n=600, n_components=2, shape=(3, 4)):
    x = heavy_tails(n, shape)
    unit = WhitenedMixture(shape, n_components=n_components, n_contrasts=2, **KINDS[kind]).double()
    unit.requires_grad_(False)
    unit.initialize_from(x.mean(0), x.var(0), n)
    u, weights = unit.rotate(x), torch.full((n,), 1 / n, dtype=torch.float64)
    start(unit, u, weights, RandomSource(0))
    return unit, u, weights


def log_likelihood(unit, u, weights):
    return float(weights @ torch.logsumexp(unit.joint_log_density(u).flatten(1), 1))


@pytest.mark.parametrize("kind", KINDS)
@torch.no_grad()
def test_statistics_are_sums_over_the_posterior(kind):
    unit, u, weights = started(kind, n=40)
    found = expectation(unit, u, weights)
    joint = unit.joint_log_density(u)
    np.testing.assert_allclose(found.log_likelihood, log_likelihood(unit, u, weights), rtol=1e-10)
    share = torch.softmax(joint.flatten(1), 1).reshape(joint.shape)
    torch.testing.assert_close(found.share, torch.tensordot(weights, share, 1))
    logs = unit.state_log_variances()
    z = unit.coefficients(u)[..., int(unit.level) :]  # (K, n, coefficients)
    variances = torch.exp(logs[..., None] - unit.log_precision[:, None, None])  # (K, C, G, coefficients)
    each = unit.log_gates()[:, None, None, :, None] - 0.5 * (z[:, :, None, None] ** 2 / variances[:, None])
    gates = torch.softmax(each - 0.5 * torch.log(variances)[:, None], 3)  # (K, n, C, G, coefficients)
    posterior = torch.einsum("n,nkc,kncgj->knkcgj".replace("knkcgj", "kncgj"), weights, share, gates)
    torch.testing.assert_close(found.gates, posterior.sum((1, 4)))
    torch.testing.assert_close(found.squares, torch.einsum("kncgj,knj->kcgj", posterior, z**2))
    precision = torch.einsum("kncgj,kcgj->knj", posterior, 1 / variances)
    torch.testing.assert_close(found.precision, precision.sum(1))
    torch.testing.assert_close(found.pull, (precision * z).sum(1))
    first = int(unit.level)
    for d in range(2 if unit.whiten else 0):
        q, w = (torch.nn.functional.pad(part, (first, 0)).reshape(*part.shape[:2], 3, 4) for part in (precision, z))
        terms = "knij,knaj,knbj->kiab" if d == 0 else "knij,knia,knib->kjab"
        expected = torch.einsum(terms, q, w, w)[:, first:, first:, first:]
        torch.testing.assert_close(found.curvature[d], expected)


@pytest.mark.parametrize("shrinkage", [0.0, 0.05])
@pytest.mark.parametrize("kind", KINDS)
def test_no_block_lowers_the_objective(kind, shrinkage):
    unit, u, weights = started(kind)
    prior = Prior.of(unit, u, weights, shrinkage)
    reached = log_likelihood(unit, u, weights) + prior.log_density(unit)
    for step in range(5 * n_blocks(unit)):
        maximization(unit, expectation(unit, u, weights), prior, step % n_blocks(unit))
        now = log_likelihood(unit, u, weights) + prior.log_density(unit)
        assert now > reached - 1e-9, (step, now - reached)
        reached = now


def test_a_whitening_is_at_the_maximum_of_its_bound():
    """After one mode is updated to convergence, the gradient of the likelihood with respect to it is zero."""
    unit, u, weights = started("all")
    prior = Prior.of(unit, u, weights, 0.0)
    for _ in range(300):
        maximization(unit, expectation(unit, u, weights), prior, 1)
    unit.whitening_0.requires_grad_()
    value = weights @ torch.logsumexp(unit.joint_log_density(u).flatten(1), 1)
    (gradient,) = torch.autograd.grad(value, unit.whitening_0)
    relative = gradient @ unit.whitening_0.mT  # with respect to the coordinates of the coefficients
    assert float(relative.detach().abs().max()) < 1e-4  # there is a ridge


def test_curvatures_are_summed_in_parts(monkeypatch):
    unit, u, weights = started("all")
    whole = expectation(unit, u, weights)
    monkeypatch.setattr("mvrbm.estimators.mixture.posterior._CHUNK", {"cpu": 2**12})
    monkeypatch.setattr("mvrbm.estimators.mixture.posterior._MOST_KEPT", 2**11)
    parts = expectation(unit, u, weights)
    for expected, found in zip(whole.curvature, parts.curvature, strict=True):
        torch.testing.assert_close(found, expected)


@pytest.mark.parametrize("kind", KINDS)
def test_full_epochs_never_lower_the_likelihood(kind):
    unit, u, weights = started(kind)
    fitting = Fitting(unit, weights, len(u), Prior.of(unit, u, weights, 0.0), RandomSource(0), exact=True)
    for _ in range(40):
        fitting.full_epoch(u)
    fitting.full_epoch(u, update=False)
    assert np.diff(fitting.history).min() >= 0
    np.testing.assert_allclose(fitting.history[-1], log_likelihood(unit, u, weights), rtol=1e-10)
    assert fitting.history[-1] > fitting.history[0] + 0.3


@pytest.mark.parametrize("shrinkage", [0.0, 0.05])
@pytest.mark.parametrize("kind", KINDS)
def test_gradients_are_those_of_autograd(kind, shrinkage):
    unit, u, weights = started(kind, n=50)
    prior = Prior.of(unit, u, weights, shrinkage)
    if not shrinkage:
        prior = replace(prior, noise=0.0)
    found = gradient(unit, moments(unit, u, weights), prior)
    unit.requires_grad_()
    value = weights @ torch.logsumexp(unit.joint_log_density(u).flatten(1), 1)
    names = list(found)
    expected = torch.autograd.grad(value, [unit.get_parameter(name) for name in names])
    for name, own in zip(names, expected, strict=True):
        parameter = unit.get_parameter(name)
        outer, direction = own, found[name]
        if name.startswith("whitening"):  # relative to the present whitening
            outer, direction = own @ parameter.detach().mT, found[name] @ parameter.detach()
        elif name == "offset":  # in units of the standard deviations of whitened coefficients
            scaled = found[name].clone().requires_grad_() * torch.exp(-0.5 * unit.log_precision.detach())
            direction = unit.synthesize(scaled[:, None])[:, 0, int(unit.level) :]
            (outer,) = torch.autograd.grad(direction, scaled, own)
            outer, direction = outer * torch.exp(-0.5 * unit.log_precision.detach()), direction.detach()
        if shrinkage:  # by differences along the gradient
            steps = []
            for size in (1e-5, -1e-5):
                with torch.no_grad():
                    parameter += size * direction
                    steps.append(log_likelihood(unit, u, weights) + prior.log_density(unit))
                    parameter -= size * direction
            np.testing.assert_allclose((steps[0] - steps[1]) / 2e-5, float((found[name] ** 2).sum()), rtol=1e-3)
        else:
            torch.testing.assert_close(found[name], outer, rtol=1e-7, atol=1e-9)


def test_batches_reach_the_likelihood_of_full_epochs():
    unit, u, weights = started("level, shared")
    fitting = Fitting(unit, weights, 600, Prior.of(unit, u, weights, 0.0), RandomSource(0), exact=True)
    for _ in range(60):
        fitting.full_epoch(u)
    full = log_likelihood(unit, u, weights)
    unit, u, weights = started("level, shared")
    fitting = Fitting(unit, weights, 100, Prior.of(unit, u, weights, 0.0), RandomSource(0), exact=True)
    for epoch in range(40):
        fitting.epoch_of_batches(u, 0.03 * (1 - epoch / 40), 0.03 * (1 - (epoch + 1) / 40))
    assert log_likelihood(unit, u, weights) > full - 0.3


def test_dead_components_copy_the_largest():
    unit, u, weights = started("all")
    unit.logits[1] = -50.0
    found = expectation(unit, u, weights)
    largest = int(found.share.sum(1).argmax())
    before = unit.log_weights().exp().sum(1)[largest]
    assert revive(unit, found, RandomSource(0)) == 1
    share = unit.log_weights().exp().sum(1)
    torch.testing.assert_close(share[1], before / 2)
    torch.testing.assert_close(share[largest], before / 2)
    assert torch.equal(unit.whitening_0[1], unit.whitening_0[largest])
    assert not torch.equal(unit.log_precision[1], unit.log_precision[largest])
    assert revive(unit, found, RandomSource(0)) == 0


def test_few_components_per_sample_are_enough():
    unit, u, weights = started("all", n=400, n_components=12)
    exact, fast = (expectation(unit, u, weights, exact=exact) for exact in (True, False))
    np.testing.assert_allclose(fast.log_likelihood, exact.log_likelihood, atol=0.02)
    torch.testing.assert_close(fast.share, exact.share, rtol=0, atol=0.01)


def blobs(n, number=0, count=5, size=6):
    rng = generator(f"blobs {number}")
    which = torch.from_numpy(rng.integers(count, size=n))
    centers = torch.from_numpy(6 * rng.standard_normal((count, size)))
    return centers[which] + torch.from_numpy(rng.standard_normal((n, size))), which


def agreement(which, nearest):
    """Share of pairs of samples that are in one cluster in both or in neither of two partitions."""
    return float(((which[:, None] == which) == (nearest[:, None] == nearest)).double().mean())


def test_initial_clusters_are_those_of_the_data():
    """The first four samples are outliers, which do not become clusters."""
    for number in range(5):
        x, which = blobs(300, number)
        x[:4] *= 5
        x = x - x.mean(0)
        nearest, centers = _clusters(x, torch.full((300,), 1 / 300, dtype=torch.float64), 5, RandomSource(number))
        assert agreement(which[4:], nearest[4:]) > 0.97
        assert centers.shape == (5, 6)


def test_initial_clusters_of_repeated_samples_are_those_of_weighted_samples():
    x, _ = blobs(60)
    weights = torch.from_numpy(generator("repeats").integers(1, 4, 60))
    repeated = x.repeat_interleave(weights, 0)[torch.randperm(int(weights.sum()), generator=torch.manual_seed(0))]
    each = torch.full((len(repeated),), 1 / len(repeated), dtype=torch.float64)
    _, expected = _clusters(repeated, each, 5, RandomSource(0))
    _, found = _clusters(x, weights.double() / weights.sum(), 5, RandomSource(0))
    torch.testing.assert_close(found, expected)
