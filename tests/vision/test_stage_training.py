"""Objectives of stages, written out: layers of random patches, and errors after each stage."""

import math

import numpy as np
import pytest
import torch

from mvrbm.random import RandomSource
from mvrbm.vision import PhotoDenoiser, SuperResolver, TrainingStep
from mvrbm.vision.degradation import SimulatedNoise, SimulatedSalt
from mvrbm.vision.stage_training import cut_crops, divergence_patches, image_loss
from mvrbm.vision.stages import StageSequence, SymmetricStage


def random_stage(**settings):
    stage = SymmetricStage(1, 4, 2, (2, 3), 2, floor=0.02, **settings)
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in stage.parameters():
            parameter.copy_(0.3 * torch.randn(parameter.shape, generator=generator))
    return stage


@pytest.mark.parametrize("coded", [False, True])
@torch.no_grad()
def test_layers_of_a_patch_are_the_missing_part_and_four_derivatives(coded):
    stage = random_stage(coded=coded)
    image, goal = torch.rand(2, 3, 1, 6, 8, generator=torch.Generator().manual_seed(1))
    level = torch.tensor([0.1, 0.3, 0.5])
    found = divergence_patches(stage, image, goal, level, 40, RandomSource(2)).numpy()
    # Patches start every second pixel, two pixels before the image, and end at most two pixels after it.
    numbers = (RandomSource(2).uniform((40,), image).numpy() * 3 * 4 * 5).astype(int)
    for number, layers in zip(numbers, found, strict=True):
        which, row, column = np.unravel_index(number, (3, 4, 5))
        top, left = 2 * row - 2, 2 * column - 2

        def pixel(i, j, which=which, top=top, left=left):
            """Pixels of the patch, moved by i rows and j columns. Pixels at the edge of the image are repeated."""
            rows = np.clip(np.arange(top + i, top + i + 4), 0, 5)
            columns = np.clip(np.arange(left + j, left + j + 4), 0, 7)
            return image[which, 0].numpy()[np.ix_(rows, columns)]

        slopes = [pixel(0, 1) - pixel(0, -1), pixel(1, 0) - pixel(-1, 0)]
        bends = [pixel(0, 2) - 2 * pixel(0, 0) + pixel(0, -2), pixel(2, 0) - 2 * pixel(0, 0) + pixel(-2, 0)]
        derivatives = np.stack([*slopes, *bends])
        r = np.sqrt((derivatives**2).mean()) + 0.02
        share = (float(level[which]) / r) ** 2
        unit = r * math.sqrt(share / (share + 0.25)) if coded else r
        missing = np.zeros((4, 4))  # nothing is missing outside of the image
        for i, j in np.ndindex(4, 4):
            if 0 <= top + i < 6 and 0 <= left + j < 8:
                missing[i, j] = (goal - image)[which, 0, top + i, left + j] / unit
        np.testing.assert_allclose(layers[0].reshape(4, 4), missing, atol=1e-5)
        np.testing.assert_allclose(layers[1:].reshape(4, 4, 4), derivatives / r, atol=1e-5)


def test_all_positions_in_all_images_are_equally_likely_for_a_crop():
    images = [np.zeros((40, 40), np.uint8), np.full((8, 8), 255, np.uint8), np.full((7, 90), 128, np.uint8)]
    crops = cut_crops(images, 8, 500, color=False, augment=False, seed=0)
    # A crop has 33 * 33 positions in the first image, 1 in the second one, and none in the last one. On average,
    # 0.46 crops come from the second image. More than 10 would have a probability of less than 1e-10.
    white = int((crops == 255).all(3).all(2).sum())
    assert white <= 10
    assert int((crops == 0).all(3).all(2).sum()) == 500 - white


@pytest.mark.parametrize("simulation", [SimulatedNoise(), SimulatedSalt()], ids=["noise", "salt"])
@torch.no_grad()
def test_the_loss_of_images_counts_the_last_stage_most_and_errors_by_level(simulation):
    salt = isinstance(simulation, SimulatedSalt)
    stages = [random_stage(coded=not salt, mask=salt) for _ in range(2)]
    stages[1].bias.add_(0.5)  # two different stages
    images = [np.random.default_rng(0).integers(0, 256, (40, 40), dtype=np.uint8)]
    crops = cut_crops(images, 32, 3, color=False, augment=False, seed=0)
    loss, weights = image_loss(StageSequence(stages), simulation, crops, RandomSource(3))
    given = simulation(crops / 255, RandomSource(3))
    expected = 0.0
    for which in range(3):
        level = float(given.level[which])
        mask = given.mask[which] if salt else None
        for count, weight in ((1, 0.2), (2, 1.0)):
            # One image at a time, by the pass for single images.
            found = StageSequence(stages[:count]).run(given.images[which], level=None if salt else level, mask=mask)
            error = (found - crops[which] / 255)[:, 8:-8, 8:-8]
            expected += 100 * weight * float((error**2).mean()) / (level + 0.004)
    assert float(loss(torch.arange(3))) == pytest.approx(expected, rel=1e-4)
    assert weights.tolist() == [1, 1, 1]


@pytest.mark.parametrize(
    "make",
    [
        lambda **settings: SuperResolver(2, 4, (2, 2), 1, **settings),
        lambda **settings: SuperResolver(2, 4, (2, 2), 1, symmetric=False, n_patches=50, n_epochs=1, **settings),
        lambda **settings: PhotoDenoiser("gray", patch=(4,), stride=(2,), hidden_shape=(2, 2), rank=1, **settings),
    ],
    ids=["symmetric", "plain", "denoiser"],
)
def test_a_second_fit_starts_anew_and_follows_the_seed(make):
    images = np.random.default_rng(0).integers(0, 256, (2, 40, 40), dtype=np.uint8)
    steps = [TrainingStep("images", n_samples=4, n_epochs=2, batch_size=2)] * 2

    def fitted(seed, *sets):
        model = make(steps=steps, random_state=seed, device="cpu")
        for each in sets:
            model.fit([each])
        return model.history_, torch.cat([p.detach().flatten() for p in model.stages_.parameters()])

    once, again, other = fitted(1, images[1]), fitted(1, images[0], images[1]), fitted(2, images[1])
    assert len(once[0]) == 4  # two steps of two epochs
    assert again[0] == once[0]
    assert torch.equal(again[1], once[1])
    assert not torch.equal(other[1], once[1])
