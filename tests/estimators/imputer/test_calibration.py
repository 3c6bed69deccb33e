"""Calibration of standard deviations: coverage of errors, levels of difficulty, descriptions of all versions."""

import numpy as np
import pytest
import torch

from mvrbm.estimators.imputer.calibration import Calibration


def test_two_standard_deviations_cover_the_errors_of_each_level():
    rng = np.random.default_rng(0)
    hard = rng.random(8000) < 0.5
    deviations = np.where(hard, 2.0, 0.5) * rng.uniform(0.99, 1.01, size=8000)
    errors = deviations * np.where(hard, 0.7, 3.0) * rng.standard_t(4, size=8000)  # wrong in both directions
    arguments = [torch.from_numpy(each) for each in (errors, deviations, np.full(8000, 10.0))]
    calibration = Calibration.of(*arguments)
    assert list(calibration.levels) == sorted(calibration.levels)
    found = calibration.apply(arguments[1][None], arguments[2])[0].numpy()
    for part in (hard, ~hard):
        # Interpolation between levels changes the coverage of a level slightly.
        assert (np.abs(errors) <= 2 * found)[part].mean() == pytest.approx(0.9545, abs=0.01)


def test_a_calibration_without_errors_is_not_measured():
    nothing = torch.empty(0)
    assert not Calibration.of(nothing, nothing, nothing).is_measured
    assert Calibration.of(torch.ones(3), torch.ones(3), torch.ones(3)).is_measured


def test_few_errors_get_one_level():
    errors = torch.linspace(-3, 3, 101).double()
    calibration = Calibration.of(errors, torch.ones(101).double(), torch.ones(101).double())
    assert len(calibration.levels) == 1
    assert 2 * calibration.multiples[0] == pytest.approx(float(torch.quantile(errors.abs(), 0.9545)))


def test_descriptions_are_read_as_they_are_or_as_a_single_multiple():
    calibration = Calibration([0.1, 0.5], [2.0, 1.5])
    again = Calibration.from_description(calibration.describe())
    assert (list(again.levels), list(again.multiples)) == ([0.1, 0.5], [2.0, 1.5])
    former = Calibration.from_description(1.3)  # until version 0.2
    torch.testing.assert_close(former.apply(torch.tensor([[1.0, 2.0]]), torch.ones(2)), torch.tensor([[1.3, 2.6]]))
    with pytest.raises(ValueError, match="calibration"):
        Calibration.from_description([["a", 1]])
