"""Factor analysis as a machine: the same distribution, exact conditional means, EM steps that raise the likelihood."""

import itertools

import pytest
import torch

from mvrbm import RandomSource
from mvrbm.estimators.imputer.factor_analysis import Factors, fit_factors, moments
from mvrbm.sampling import conditional_mean


def some_factors():
    rng = torch.Generator().manual_seed(0)
    draw = lambda *shape: torch.randn(*shape, generator=rng, dtype=torch.float64)  # noqa: E731
    return Factors(draw(6), draw(6, 2), draw(6) ** 2 + 0.2)


def covariance_of(factors):
    return factors.loadings @ factors.loadings.T + torch.diag(factors.noise)


def test_the_machine_has_the_same_distribution():
    factors = some_factors()
    machine = factors.machine((2, 3))
    x = torch.randn(5, 2, 3, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    normal = torch.distributions.MultivariateNormal(factors.mean, covariance_of(factors))
    differences = -machine.free_energy(x) - normal.log_prob(x.flatten(1))
    torch.testing.assert_close(differences, differences[:1].expand(5))  # log Z
    again = Factors.of(machine)
    torch.testing.assert_close(again.mean, factors.mean)
    torch.testing.assert_close(covariance_of(again), covariance_of(factors))


def test_conditional_means_and_deviations_are_exact():
    factors = some_factors()
    s, known = covariance_of(factors), torch.tensor([True, True, False, True, False, True])
    x = torch.randn(4, 6, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    line = torch.linalg.solve(s[known][:, known], s[known][:, ~known])
    mean = factors.mean[~known] + (x - factors.mean)[:, known] @ line
    masks = known.repeat(4, 1)
    torch.testing.assert_close(factors.conditional_mean(x, masks)[:, ~known], mean)
    variance = torch.diag(s[~known][:, ~known] - s[~known][:, known] @ line)
    torch.testing.assert_close(factors.deviation(x, masks)[0, ~known], variance.sqrt())
    other = torch.cat([masks[:2], torch.ones(2, 6, dtype=torch.bool)])  # several patterns at once
    torch.testing.assert_close(factors.conditional_mean(x, other)[:2, ~known], mean[:2])


@pytest.mark.parametrize(
    ("n_patterns", "rows_each"), [(40, 1), (20, 3), (4, 10)]
)  # own masks, many and few shared ones
def test_rows_may_share_masks_or_not(n_patterns, rows_each):
    factors, rng = some_factors(), torch.Generator().manual_seed(1)
    numbers = torch.randperm(64, generator=rng)[:n_patterns].repeat(rows_each)  # six bits, all different
    known = (numbers[:, None] >> torch.arange(6)) % 2 == 1
    x = torch.randn(len(known), 6, generator=rng, dtype=torch.float64)
    one_by_one = torch.cat([factors.conditional_mean(x[i : i + 1], known[i : i + 1]) for i in range(len(x))])
    torch.testing.assert_close(factors.conditional_mean(x, known), one_by_one)


def test_complete_data_has_one_system_for_all_entries():
    x = torch.randn(9, 6, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    known = torch.ones(9, 6, dtype=torch.bool)
    padded = torch.cat([x, torch.zeros(1, 6, dtype=torch.float64)])  # a row without any known entry changes nothing
    with_empty = torch.cat([known, torch.zeros(1, 6, dtype=torch.bool)])
    found, general = (fit_factors(*data, 2, 5) for data in ((x, known), (padded, with_empty)))
    torch.testing.assert_close(
        covariance_of(found), covariance_of(general), rtol=0.02, atol=0.02
    )  # starts differ a bit


def test_draws_have_the_exact_moments_and_chains_agree():
    factors = some_factors()
    known = torch.tensor([True, True, False, True, False, True]).repeat(4000, 1)
    x = torch.zeros(4000, 6, dtype=torch.float64)
    drawn = factors.draw(x, known, RandomSource(0))[:, 2]
    # Five standard errors.
    assert float(drawn.mean()) == pytest.approx(float(factors.conditional_mean(x, known)[0, 2]), abs=0.13)
    assert float(drawn.std()) == pytest.approx(float(factors.deviation(x, known)[0, 2]), rel=0.05)
    few = {"visible": x[:200].reshape(-1, 2, 3)}
    chains = conditional_mean(factors.machine((2, 3)), few, {"visible": known[:200].reshape(-1, 2, 3)}, RandomSource(0))
    mean = chains["visible"].flatten(1)[:, 2].mean()
    assert float(mean) == pytest.approx(float(factors.conditional_mean(x, known)[0, 2]), abs=0.1)


@pytest.mark.parametrize("share", [1.0, 0.7])
def test_every_step_raises_the_likelihood(share):
    truth = some_factors()
    x = truth.draw(torch.zeros(100, 6).double(), torch.zeros(100, 6, dtype=torch.bool), RandomSource(0))
    known = torch.rand(100, 6, generator=torch.Generator().manual_seed(2)) < share

    def log_likelihood(factors):
        s, total = covariance_of(factors), 0.0
        for row, mask in zip(x, known, strict=True):
            if mask.any():
                normal = torch.distributions.MultivariateNormal(factors.mean[mask], s[mask][:, mask])
                total += float(normal.log_prob(row[mask]))
        return total

    found = [log_likelihood(fit_factors(torch.where(known, x, 0.0), known, 2, steps)) for steps in (1, 4, 16)]
    assert all(later > earlier - 0.5 for earlier, later in itertools.pairwise(found))  # a prior counts one sample
    assert found[-1] > log_likelihood(truth) - 20  # as likely as the truth, which it does not know


def test_variances_of_constant_and_almost_constant_entries_are_replaced():
    x = torch.zeros(400, 5).double()
    x[:, :3] = torch.randn(400, 3, generator=torch.Generator().manual_seed(0))
    x[0, 3] = 1.0  # in one of 400 samples
    x[:, 4] = 0.1  # its variance is a rounding error
    variances = moments(x, torch.ones(x.shape, dtype=torch.bool))[1]
    torch.testing.assert_close(variances[:3], x[:, :3].var(0, correction=0))
    assert float(variances[4]) in variances[:3].tolist()  # the median variance
    assert float(variances[3]) == pytest.approx(0.1 * float(variances[4]))
