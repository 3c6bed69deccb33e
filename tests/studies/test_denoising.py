"""The comparison of denoisers: all methods get the same noise, and filters have their best settings."""

import copy

import numpy as np
import pytest
import torch

from mvrbm.vision import add_noise
from studies import denoising as experiment

METHODS = "noisy one-pass mean-field mean-field-estimated gibbs gibbs-estimated median switching-median total-variation"
METHODS += " non-local-means"


@pytest.mark.fixed_seed  # of 12 images, one may have no noise, or be restored by the median; its PSNR is infinite
def test_comparison_measures_every_method_on_the_same_noise(stripes):
    pytest.importorskip("skimage")
    model, clean = stripes
    clean = clean[:12]
    result = experiment.compare(model.machine_, clean, level=0.2, seed=4, shown=3)
    assert set(result["psnr"]) == set(METHODS.split())
    assert set(result["images"]) == {"clean", *METHODS.split()}
    assert all(images.shape == (3, 8, 8) and images.dtype == np.float32 for images in result["images"].values())
    noisy = add_noise(clean, "salt-and-pepper", 0.2, 4)
    values = [-10 * np.log10(((a.astype(float) - b) ** 2).mean()) for a, b in zip(noisy, clean, strict=True)]
    assert result["psnr"]["noisy"]["psnr"] == pytest.approx(np.mean(values))
    assert result["psnr"]["noisy"]["standard_error"] == pytest.approx(np.std(values, ddof=1) / 12**0.5)
    assert result["psnr"]["mean-field"]["psnr"] > result["psnr"]["noisy"]["psnr"] + 10
    # Half of the pixels that noise replaces have their value already.
    assert result["estimated_level"] == pytest.approx(2 * (noisy != clean).mean(), abs=0.05)
    difference = result["psnr"]["mean-field"]["psnr"] - result["psnr"]["median"]["psnr"]
    assert result["above_median"]["psnr"] == pytest.approx(difference)


def test_filters_are_chosen_where_they_do_best(stripes):
    pytest.importorskip("skimage")
    _, clean = stripes
    chosen = experiment.choose_filters(clean[:4], level=0.2, seed=1)
    noisy = add_noise(clean[:4], level=0.2, seed=1)

    def score(settings):
        by = experiment.filters(settings)["total-variation"]
        return experiment.summary(np.stack([by(image) for image in noisy]), clean[:4])["psnr"]

    others = [score({**chosen, "total-variation": {"weight": weight}}) for weight in (0.05, 0.3, 1.0)]
    assert score(chosen) >= max(others)


def test_psnr_of_known_errors():
    clean = np.zeros((2, 4, 4))
    found = experiment.summary(np.stack([clean[0] + 0.1, clean[0] + 0.01]), clean)
    assert found["psnr"] == pytest.approx(30)  # of 20 and 40
    assert found["standard_error"] == pytest.approx(10)
    assert experiment.summary(clean[:1], clean[:1])["psnr"] == np.inf


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")
def test_one_pass_on_a_gpu_is_that_on_the_cpu(stripes):
    machine, clean = stripes[0].machine_, stripes[1]
    on_gpu = copy.deepcopy(machine).cuda()
    np.testing.assert_allclose(experiment.one_pass(on_gpu, clean), experiment.one_pass(machine, clean), atol=1e-6)
