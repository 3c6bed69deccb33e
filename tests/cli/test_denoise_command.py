"""`mvrbm denoise`, `mvrbm denoise-train` and `mvrbm repair`."""

import json
import re

import numpy as np
import pytest
from PIL import Image

import mvrbm
from mvrbm import cli
from mvrbm.vision import add_noise, denoise, denoise_photograph, repair_photograph


@pytest.fixture
def command(stripes, tmp_path, monkeypatch, capfd):
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("MVRBM_DEBUG", raising=False)
    stripes[0].save("model")
    np.save("noisy.npy", add_noise(stripes[1], level=0.2, seed=0))

    def run(*words):
        capfd.readouterr()
        code = cli.main(["denoise", *map(str, words)])
        return code, *capfd.readouterr()

    return run


def test_command_writes_what_the_function_returns(command, stripes):
    code, out, _ = command("noisy.npy", "clean.npy", "--model", "model", "--level", 0.2, "--device", "cpu")
    assert (code, out) == (0, "clean.npy: 100x8x8 float32, salt-and-pepper of level 0.2 (given)\n")
    np.testing.assert_allclose(np.load("clean.npy"), denoise(stripes[0], np.load("noisy.npy"), level=0.2), atol=1e-6)
    assert command("noisy.npy", "clean.npy", "--model", "model")[0] == 1  # it is there
    code, out, _ = command("noisy.npy", "clean.npy", "--model", "model", "--force", "--json")
    assert code == 0
    assert json.loads(out)["level"] == pytest.approx(0.2, abs=0.03)
    gibbs = ("--method", "gibbs", "--steps", 5, "--burn-in", 0, "--noise", "gaussian", "--level", 0.3)
    assert command("noisy.npy", "sheet.png", "--model", "model", *gibbs)[0] == 0


def test_command_denoises_a_picture_larger_than_the_model(command, stripes):
    picture = np.kron(stripes[1][:2], np.ones((1, 1, 2)))[0]
    noisy = add_noise((np.tile(picture, (2, 1)) * 255).astype(np.uint8), level=0.2, seed=1)  # (16, 16)
    Image.fromarray(noisy).save("noisy.png")
    code, out, _ = command("noisy.png", "clean.png", "--model", "model", "--stride", 2)
    assert code == 0
    assert out.startswith("clean.png: 1x16x16 uint8, salt-and-pepper of level")
    assert np.asarray(Image.open("clean.png")).shape == (16, 16)
    np.save("one.npy", noisy)
    assert command("one.npy", "one-clean.npy", "--model", "model", "--stride", 2)[0] == 0
    assert np.load("one-clean.npy").shape == (16, 16)
    assert command("one.npy", "one-clean.png", "--model", "model", "--stride", 2)[0] == 0


@pytest.mark.parametrize("channels", [3, 4])
def test_a_picture_in_color_stays_in_color(command, stripes, channels):
    noisy = np.random.default_rng(0).integers(0, 256, (16, 20, channels), dtype=np.uint8)
    Image.fromarray(noisy).save("noisy.png")
    how = ("--model", "model", "--noise", "gaussian", "--level", 0.1, "--stride", 2, "--device", "cpu")
    code, out, err = command("noisy.png", "clean.png", *how)
    assert (code, err) == (0, "")
    assert out == "clean.png: 20x16 uint8, gaussian of level 0.1 (given)\n"
    clean = np.asarray(Image.open("clean.png"))
    by_channel = denoise(stripes[0], noisy[..., :3].transpose(2, 0, 1), noise="gaussian", level=0.1, stride=2)
    np.testing.assert_array_equal(clean[..., :3], by_channel.transpose(1, 2, 0))
    np.testing.assert_array_equal(clean[..., 3:], noisy[..., 3:])
    assert command("noisy.png", "clean.npy", *how)[0] == 0
    np.testing.assert_array_equal(np.load("clean.npy"), clean)


@pytest.mark.parametrize(
    ("words", "code", "message"),
    [
        (("absent.npy", "o.npy", "--model", "model"), 1, "no such file"),
        (("noisy.npy", "o.npy", "--model", "absent"), 1, "absent"),
        (("noisy.npy", "o.txt", "--model", "model"), 1, "must end in"),
        (("noisy.npy", "o.npy"), 1, "(H, W, 4), but noisy.npy has shape (100, 8, 8); use --model"),
        (("wrong.npy", "o.png"), 1, "float images must have values from 0 to 1, got 0 to 255"),
        (
            ("noisy.npy", "o.npy", "--stride", "2"),
            2,
            "Invalid value for '--stride': has no effect without --model; omit it",
        ),
        (("noisy.npy", "o.npy", "--burn-in", "0"), 2, "'--burn-in': has no effect without --model"),
        (("noisy.npy", "o.npy", "--method", "gibbs"), 2, "'--method': has no effect without --model"),
        (("noisy.npy", "o.npy", "-n", "2"), 2, "'--rows': has no effect without --model"),
        (("noisy.npy", "o.npy", "--level", "-3"), 2, "'--level'"),
        (("noisy.npy", "o.npy", "--level", "0"), 1, "--level must be greater than 0; omit it"),
        (("noisy.npy", "o.npy", "--model", "model", "--level", "2"), 1, "level must be positive and below 1"),
        (("noisy.npy", "o.npy", "--model", "model", "--noise", "snow"), 2, "--noise"),
        (("noisy.npy", "o.npy", "--model", "model", "--stride", "9"), 1, "stride must be"),
        (("small.npy", "o.npy", "--model", "model"), 1, "images must be at least as large as the visible layer"),
    ],
)
def test_mistakes_at_the_command_line_are_one_line(command, words, code, message):
    np.save("small.npy", np.zeros((2, 4, 4), np.float32))
    np.save("wrong.npy", np.array([[0.0, 255.0]]))
    given, out, err = command(*words)
    assert (given, out) == (code, "")
    assert err.startswith("error: ")
    assert message in err
    assert err.count("\n") == 1


def test_salt_and_pepper_on_a_photograph_is_noticed(command):
    gray = np.tile(np.linspace(60, 200, 64), (64, 1)).astype(np.uint8)
    for name, pixels in (("salty", add_noise(gray, "salt-and-pepper", 0.1, seed=0)), ("clean", gray)):
        Image.fromarray(pixels).save(f"{name}.png")
    code, out, err = command("salty.png", "out.png", "--device", "cpu")
    assert (code, err) == (0, "")
    assert re.fullmatch(r"out.png: 64x64 uint8, salt-and-pepper of level 0\.(09|10)\d* \(estimated\)\n", out)
    assert np.abs(np.asarray(Image.open("out.png")).astype(int) - gray).max() <= 5
    code, out, err = command("clean.png", "same.png", "--device", "cpu")
    assert (code, err, out) == (0, "", "same.png: 64x64 uint8, gaussian of level 0 (estimated)\n")
    np.testing.assert_array_equal(np.asarray(Image.open("same.png")), gray)


@pytest.mark.parametrize("channels", [1, 3])
def test_a_photograph_is_denoised_without_a_model(command, channels):
    noisy = np.clip(np.random.default_rng(0).normal(120, 20, (40, 50, channels)), 0, 255).astype(np.uint8).squeeze()
    Image.fromarray(noisy).save("noisy.png")
    code, out, err = command("noisy.png", "clean.png", "--device", "cpu", "--json")
    assert (code, err) == (0, "")
    found = json.loads(out)
    assert found["noise"] == "gaussian"
    assert found["level"] == pytest.approx(20 / 255, rel=0.15)
    clean = np.asarray(Image.open("clean.png"))
    np.testing.assert_array_equal(clean, denoise_photograph(noisy, device="cpu"))
    code, out, _ = command("noisy.png", "salt.png", "--device", "cpu", "--noise", "salt-and-pepper")
    assert (code, out.strip().endswith("uint8, salt-and-pepper of level 0 (estimated)")) == (0, True)


@pytest.mark.parametrize("shape", [(20, 30), (20, 30, 3), (20, 30, 4)])
@pytest.mark.parametrize("dtype", [np.uint8, np.float32])
def test_a_photograph_can_be_an_array(command, shape, dtype):
    noisy = np.clip(np.random.default_rng(0).normal(120, 20, shape), 0, 255).astype(np.uint8)
    noisy = noisy if dtype == np.uint8 else (noisy / 255).astype(dtype)
    np.save("noisy.npy", noisy)
    code, out, err = command("noisy.npy", "clean.npy", "--device", "cpu")
    assert (code, err) == (0, "")
    assert out.startswith(f"clean.npy: {'x'.join(map(str, shape))} {np.dtype(dtype).name}, gaussian of level 0.0")
    np.testing.assert_array_equal(np.load("clean.npy"), denoise_photograph(noisy, device="cpu"))
    code, out, _ = command("noisy.npy", "clean.png", "--device", "cpu")
    assert (code, out[:26]) == (0, "clean.png: 30x20 uint8, ga")
    shown = np.asarray(Image.open("clean.png"))
    np.testing.assert_allclose(shown / 255, np.load("clean.npy") / (255 if dtype == np.uint8 else 1), atol=0.005)


def test_scratches_are_filled(command, capfd):
    photo = np.random.default_rng(0).integers(0, 256, (20, 30, 4), dtype=np.uint8)
    Image.fromarray(photo).save("photo.png")
    mask = np.zeros((20, 30, 3), np.uint8)
    mask[5:7] = 255
    Image.fromarray(mask).save("mask.png")
    assert cli.main(["repair", "photo.png", "whole.png", "--damage", "mask.png", "--device", "cpu"]) == 0
    assert capfd.readouterr().out == "whole.png: 30x20, 10.00% filled\n"
    np.testing.assert_array_equal(
        np.asarray(Image.open("whole.png")), repair_photograph(photo, mask[..., 0], device="cpu")
    )


@pytest.mark.fixed_seed  # the message states the share of gray pixels
def test_damage_must_be_marked_in_black_and_white(command, capfd):
    photo = np.random.default_rng(0).integers(0, 256, (20, 30), dtype=np.uint8)
    Image.fromarray(photo).save("photo.png")
    Image.new("L", (30, 20), 100).save("gray.png")
    Image.new("L", (30, 20)).save("black.png")
    for damage, message in (
        ("photo", "error: --damage must be black and white, but 50% of its pixels are gray\n"),
        ("gray", "error: --damage gray.png marks no pixels; it must be white where pixels should be filled in\n"),
        ("black", "error: --damage black.png marks no pixels; it must be white where pixels should be filled in\n"),
    ):
        assert cli.main(["repair", "photo.png", "whole.png", "--damage", f"{damage}.png", "--device", "cpu"]) == 1
        assert capfd.readouterr().err == message


def test_repair_says_what_has_replaced_its_option_mask(capfd):
    assert cli.main(["repair", "photo.png", "whole.png", "--mask", "mask.png"]) == 2
    assert "use --damage mask.png to mark the pixels to fill in" in capfd.readouterr().err
    assert cli.main(["repair", "--help"]) == 0
    assert "--mask" not in capfd.readouterr().out


@pytest.mark.parametrize("kind", ["color", "gray", "salt", "jpeg"])
def test_a_denoiser_is_trained_on_a_folder_and_used(command, kind, tmp_path, capfd):
    rng = np.random.default_rng(0)
    folder = tmp_path / "photos"
    folder.mkdir()
    pixels = np.asarray(Image.fromarray(rng.integers(0, 256, (12, 15, 3), dtype=np.uint8)).resize((60, 48)))
    Image.fromarray(pixels).save(folder / "a.png")
    Image.fromarray(pixels).save("photo.jpg", quality=40)
    how = ["--kind", kind, "--tuning-crops", "4", "--tuning-epochs", "1", "--device", "cpu", "--json"]
    assert cli.main(["denoise-train", str(folder), "--out", "denoiser", *how]) == 0
    result = json.loads(capfd.readouterr().out)
    assert (result["kind"], result["images"]) == (kind, 1)
    code, out, err = command("photo.jpg", "clean.png", "--model", "denoiser", "--device", "cpu", "--json")
    assert (code, err) == (0, "")
    found = json.loads(out)
    assert found["noise"] == kind
    expected = mvrbm.load("denoiser", "cpu").denoise(np.asarray(Image.open("photo.jpg")), level=found["level"] or None)
    np.testing.assert_array_equal(np.asarray(Image.open("clean.png")), expected)
    code, _, err = command("photo.jpg", "other.png", "--model", "denoiser", "--stride", 2)
    assert code == 2
    assert "'--stride': has no effect with a photo denoiser" in err
