"""Gibbs steps of whitened mixtures, compared with dense precision matrices."""

import numpy as np
import pytest
import torch

from mvrbm import RandomSource
from mvrbm.estimators.mixture import conditional
from mvrbm.estimators.mixture.conditional import Conditional, Patterns
from mvrbm.units import WhitenedMixture
from tables import generator


def random_unit(**options):
    unit, rng = WhitenedMixture((3, 4), n_components=2, n_contrasts=2, **options).double(), generator("conditional")
    unit.requires_grad_(False)
    for name, parameter in unit.named_parameters():
        eye = torch.eye(parameter.shape[-1]) if "whitening" in name else 0
        parameter.copy_(0.3 * torch.from_numpy(rng.standard_normal(parameter.shape)) + eye)
    return unit


class Ones(RandomSource):
    """Random source whose normal numbers are 1."""

    def normal(self, shape, like):
        return torch.ones(shape).to(like)


@pytest.mark.parametrize("most_numbers", [2**22, 1000])
@pytest.mark.parametrize("options", [{"gate": False}, {"gate": False, "level": True}, {"gate": True, "level": True}])
@torch.no_grad()
def test_gibbs_steps_draw_from_the_dense_conditional_distribution(monkeypatch, options, most_numbers):
    unit, rng = random_unit(**options), generator("steps")
    masks = rng.random((6, 12)) < np.array([[0.1], [0.5], [0.5], [0.9], [0.7], [0.0]])
    masks[:, 3] = False
    known = torch.from_numpy(masks[rng.integers(6, size=60)])
    samples = torch.from_numpy(rng.standard_normal((60, 12)))
    law, states = Conditional(unit), []

    def draw_states(*arguments):
        states.append(Conditional._draw_states(law, *arguments))
        return states[-1]

    monkeypatch.setattr(law, "_draw_states", draw_states)
    monkeypatch.setattr(conditional, "_MOST_NUMBERS", most_numbers)
    drawn, means = law.gibbs_step(samples, Patterns.of(known), Ones())
    matrices = [matrix @ basis for matrix, basis in zip(unit.whitenings(), unit.bases(), strict=True)]
    for i, (state, logs) in enumerate(zip(*states[0], strict=True)):
        k, own = int(state) // 2, ~known[i]
        variances = torch.exp(logs - unit.log_precision[k])
        if unit.level:
            variances = torch.cat([unit.level_log_variance.exp(), variances])
        whitening = torch.kron(*(matrix[k] for matrix in matrices))
        precision = (whitening.T / variances) @ whitening
        inner = precision[own][:, own]
        shift = torch.linalg.solve(inner, precision[own][:, ~own] @ (samples[i] - law.means[k])[~own])
        torch.testing.assert_close(means[i, own], law.means[k, own] - shift)
        noise = (drawn - means)[i, own]  # its scaled square is that of the normal numbers
        torch.testing.assert_close(noise @ inner @ noise, torch.tensor(float(own.sum()), dtype=torch.float64))
        assert torch.equal(drawn[i, ~own], samples[i, ~own])
        assert torch.equal(means[i, ~own], samples[i, ~own])


@pytest.mark.parametrize(("group", "n_unknown"), [([3, 1, 3, 3, 2, 1], [2, 5, 2, 2, 5, 5]), ([0], [1])])
def test_batches_contain_each_sample_once(group, n_unknown):
    found = list(conditional._batches(torch.tensor(group), torch.tensor(n_unknown), 0))
    rows = torch.cat([batch.flatten() for batch in found]).tolist() if found else []
    assert sorted(row for row in rows if row >= 0) == list(range(len(group)))
    for batch in found:
        for members in batch:
            assert len({group[row] for row in members if row >= 0}) == 1
