"""Stages: their pass is mean field of a Boltzmann machine, commutes with flips and turns, and is the same when fast."""

import numpy as np
import pytest
import torch

from mvrbm import Bernoulli, BoltzmannMachine, Dense, Gaussian
from mvrbm.errors import StorageError
from mvrbm.random import RandomSource
from mvrbm.vision import pretrained
from mvrbm.vision.pretrained import read_stages, shipped_stages, write_stages
from mvrbm.vision.stage_training import contrastive_divergence, divergence_patches
from mvrbm.vision.stages import CODES, Pass, StageSequence, SymmetricStage, _Seen, code

KINDS = {
    "x2": ((1, 10, 2), {}),
    "x3": ((1, 15, 3), {}),  # windows of odd size
    "gray": ((1, 16, 4), {"coded": True}),
    "color": ((3, 12, 3), {"coded": True}),
    "salt": ((1, 8, 2), {"mask": True}),
}


@pytest.fixture(params=KINDS)
def stage(request):
    torch.manual_seed(0)
    arguments, options = KINDS[request.param]
    found = SymmetricStage(*arguments, (2, 3), 3, **options)
    for parameter in found.parameters():
        torch.nn.init.normal_(parameter, 0, 0.3)
    return found


def _given(stage, height, width):
    image = torch.rand(stage.channels, height, width)
    return image, 0.1, (torch.rand(1, height, width) < 0.3).float() if stage.mask else None


def _missing(stage, image, level, mask):
    return stage(image[None], torch.tensor([level]), None if mask is None else mask[None])[0]


def test_fast_pass_agrees_with_the_plain_one(stage):
    given = _given(stage, 24, 36)
    torch.testing.assert_close(Pass(stage)(*given), _missing(stage, *given), atol=1e-6, rtol=0)


@pytest.mark.parametrize("size", [(1, 1), (5, 23)])
def test_any_size_is_as_if_its_edge_pixels_went_on(stage, size):
    image, level, mask = _given(stage, *size)
    beyond = (0, -size[1] % stage.stride, 0, -size[0] % stage.stride)
    whole = torch.nn.functional.pad(image[None], beyond, mode="replicate")[0]
    mask_there = None if mask is None else torch.nn.functional.pad(mask, beyond)
    expected = _missing(stage, whole, level, mask_there)[:, : size[0], : size[1]]
    torch.testing.assert_close(Pass(stage)(image, level, mask), expected, atol=1e-6, rtol=0)


def test_a_flipped_image_gives_the_flipped_result(stage):
    image, level, mask = _given(stage, 24, 24)
    found = _missing(stage, image, level, mask)
    for turn in (lambda x: x.flip(-1), lambda x: x.rot90(1, (-2, -1)), lambda x: x.mT):
        turned = _missing(stage, turn(image), level, None if mask is None else turn(mask))
        torch.testing.assert_close(turned, turn(found), atol=1e-5, rtol=0)


def test_a_new_stage_changes_nothing():
    stage = SymmetricStage(1, 8, 2, (2, 3), 3)
    stage.initialize(RandomSource(0))
    assert stage.left.any()
    assert not stage(torch.rand(2, 1, 16, 16)).any()


def test_pass_is_mean_field_of_a_boltzmann_machine():
    """One patch: the hidden layer given the derivatives and X = 0, and then the mean of X."""
    torch.manual_seed(1)
    stage = SymmetricStage(1, 4, 4, (2, 3), 2)
    for parameter in stage.parameters():
        torch.nn.init.normal_(parameter, 0, 0.3)
    weights = stage.all_weights().detach()  # (48, 5 * 16)
    names = ("X", "Z1", "Z2", "Z3", "Z4")
    machine = BoltzmannMachine({n: Gaussian((4, 4)) for n in names}, Bernoulli((48,)), {n: Dense() for n in names})
    image = torch.rand(1, 1, 4, 4)
    windows, r = stage.windows(image)
    derivatives = (stage.features @ windows[0, 0] / r).reshape(4, 1, 4, 4)
    with torch.no_grad():
        for number, (name, link) in enumerate(machine.links.items()):
            link.weight.copy_(weights[:, 16 * number : 16 * number + 16].reshape(link.weight.shape))
            machine.layers[name].bias.copy_(-0.5 * weights[:, 16 * number : 16 * number + 16].sum(0).reshape(4, 4))
        machine.layers["X"].bias.add_(stage.visible_bias)
        machine.hidden.bias.copy_(stage.bias.repeat(8))
        given = {"X": torch.zeros(1, 4, 4), **dict(zip(names[1:], derivatives, strict=True))}
        hidden = machine.hidden.mean(machine.hidden_field(given))
        mean = machine.layers["X"].mean(machine.visible_fields(hidden)["X"])
        torch.testing.assert_close(mean * r[0, 0], stage(image)[0], atol=1e-5, rtol=1e-5)


class Halves:
    """A random source whose uniform numbers are 1/2 and whose normal numbers are 0."""

    def uniform(self, shape, like):
        return torch.full(tuple(shape), 0.5)

    def normal(self, shape, like):
        return torch.zeros(tuple(shape))


def test_contrastive_divergence_is_the_difference_of_free_energies_of_such_a_machine():
    torch.manual_seed(0)
    stage = SymmetricStage(1, 4, 2, (2, 3), 2)
    for parameter in stage.parameters():
        torch.nn.init.normal_(parameter, 0, 0.3)
    image = torch.rand(2, 1, 8, 8)
    v = divergence_patches(stage, image, torch.rand(2, 1, 8, 8), None, 5, RandomSource(0))
    assert v.shape == (5, 5, 16)
    w, bias, flat = stage.all_weights(), stage.bias.repeat(8), v.flatten(1)
    other = ((flat @ w.mT + bias > 0).float() - 0.5) @ w

    def free_energy(each):  # -log of the sum over hidden units, one at a time
        visible = each.square().sum(1) / 2 + 0.5 * (each @ w.T).sum(1)
        return visible - torch.log1p(torch.exp(each @ w.T + bias)).sum(1)

    expected = (free_energy(flat) - free_energy(other)).mean()
    torch.testing.assert_close(contrastive_divergence(stage, v, Halves()), expected, atol=1e-3, rtol=1e-4)


def test_gradient_of_what_is_seen():
    torch.manual_seed(0)
    windows = torch.rand(2, 1, 9, 3, dtype=torch.float64, requires_grad=True)
    r = (torch.rand(2, 3, dtype=torch.float64) + 0.5).requires_grad_()
    others = torch.rand(2, 2, 3, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(lambda *given: _Seen.apply(*given, torch.float64), (windows, r, others))


def test_code_of_sizes():
    assert code(torch.zeros(1)).shape == (1, CODES)
    assert not code(torch.zeros(1)).any()
    torch.testing.assert_close(code(torch.tensor([0.02, 1e3])).argmax(-1), torch.tensor([0, CODES - 1]))


def test_patch_must_be_a_multiple_of_the_stride():
    with pytest.raises(ValueError, match=r"patch must be a multiple of the stride \(3\), got 8"):
        SymmetricStage(1, 8, 3, (2, 2), 1)


def test_stored_stages_are_those_that_were_written(stage, tmp_path):
    write_stages([stage], tmp_path / "stages.safetensors")
    image, level, mask = _given(stage, 20, 26)
    found = read_stages(tmp_path / "stages.safetensors")
    assert found.n_parameters == sum(p.numel() for p in stage.parameters())
    missing = Pass(stage)(image, level, mask)
    expected = image + (missing if mask is None else missing * mask)
    torch.testing.assert_close(found.run(image, level=level, mask=mask), expected, atol=2e-3, rtol=0)


def test_a_file_that_holds_no_stages_is_an_error(tmp_path):
    (tmp_path / "broken.safetensors").write_bytes(b"nothing")
    for name in ("broken", "missing"):
        with pytest.raises(StorageError, match=f"{name}.safetensors does not contain valid stages"):
            read_stages(tmp_path / f"{name}.safetensors")


def test_shipped_weights_keep_to_their_sizes():
    sizes = {path.stem: path.stat().st_size for path in pretrained.WEIGHTS.glob("*.safetensors")}
    assert sum(sizes[name] for name in ("x2", "x3", "x4", "jpeg")) <= 1_000_000
    assert sum(sizes[name] for name in ("gray", "color", "salt")) <= 500_000
    for name in ("x2", "x3", "x4"):
        assert shipped_stages(name, torch.device("cpu")).n_parameters <= 110_000


@pytest.mark.parametrize("masked", [False, True])
@torch.no_grad()
def test_mirrored_images_are_mirrored_at_the_middle_of_their_edge_pixels(masked):
    stages = [SymmetricStage(1, 4, 2, (2, 3), 2, mask=masked) for _ in range(2)]
    generator = torch.Generator().manual_seed(0)
    for parameter in StageSequence(stages).parameters():
        parameter.copy_(0.3 * torch.randn(parameter.shape, generator=generator))
    image, mask = torch.rand(1, 20, 22, generator=generator), torch.rand(1, 20, 22, generator=generator).round()
    holes = mask if masked else None
    found = StageSequence(stages).run_mirrored(image, mask=holes)
    large, around = (torch.nn.functional.pad(each, (16, 16, 16, 16), mode="reflect")[None] for each in (image, mask))
    for stage in stages:
        large = large + stage(large, None, around if masked else None) * (around if masked else 1)
    torch.testing.assert_close(found, large[0, :, 16:-16, 16:-16], atol=1e-5, rtol=1e-4)
    assert bool((found != image)[:, mask[0] > 0].any())
    assert bool((found == image)[:, mask[0] == 0].all()) == masked


def test_progress_counts_all_stages():
    seen = []
    stages = StageSequence([SymmetricStage(1, 4, 2, (2, 2), 1) for _ in range(2)])
    stages.run(torch.rand(1, 8, 8), progress=lambda done, total: seen.append((done, total)))
    assert seen[-1][0] == seen[-1][1]
    assert np.all(np.diff([done for done, _ in seen]) > 0)
