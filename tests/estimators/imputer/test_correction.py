"""The correction: one pass up two machines and back down, added to a first prediction."""

import pytest
import torch

from mvrbm import RandomSource
from mvrbm.estimators.imputer.correction import Correction


@pytest.mark.parametrize("filled", ["gaussian", "bernoulli"])
def test_a_correction_is_the_pass_up_two_machines_and_down_to_what_is_filled_in(filled):
    correction = Correction.new(5, "rectified", 20, filled, RandomSource(0), torch.empty(0))
    value, first = 0.1 + 0.8 * torch.rand(2, 3, 5, generator=torch.Generator().manual_seed(0))
    known = torch.rand(3, 5, generator=torch.Generator().manual_seed(1)) < 0.5
    found = correction(value, known, first)
    assert bool(((found - first).abs() < 0.1).all())  # almost nothing yet
    lower, upper = correction.children()
    weights = {name: link.weight for machine in (lower, upper) for name, link in machine.links.items()}
    below = torch.relu(value @ weights["value"].T + known.float() @ weights["known"].T)
    back = torch.relu(below @ weights["below"].T) @ weights["filled"]
    expected = first + back if filled == "gaussian" else torch.sigmoid(torch.logit(first) + back)
    torch.testing.assert_close(found, expected)
    assert correction.bounded == (filled == "bernoulli")
