import io
import json
import re
import shutil
import struct
import subprocess
import sys
import time
import zlib
from pathlib import Path

import numpy as np
import pytest
from PIL import Image, ImageCms

from mvrbm import MVRBM, cli
from mvrbm.io.pictures import Picture, read_picture, write_picture
from mvrbm.vision import Degradation, SuperResolver, clean_photograph

RANDOM = np.random.default_rng(0)
COARSE = RANDOM.integers(0, 256, (20, 25, 4), dtype=np.uint8)
SMOOTH = np.asarray(Image.fromarray(COARSE).resize((100, 80), Image.Resampling.BICUBIC)).copy()  # (80, 100, 4)
RGB, GRAY = SMOOTH[..., :3], SMOOTH[..., 0]
PROFILE = ImageCms.ImageCmsProfile(ImageCms.createProfile("sRGB")).tobytes()


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    """Small models, made once: for scales 2 and 3, and one of another kind."""
    folder = tmp_path_factory.mktemp("models")
    for scale in (2, 3):
        small = {"symmetric": False, "n_patches": 200, "n_epochs": 1}
        model = SuperResolver(scale, 6, (4, 4), **small, device="cpu").fit([RGB])
        model.save(folder / f"x{scale}")
    MVRBM((2, 2), n_epochs=1, device="cpu").fit(RANDOM.random((9, 3, 3))).save(folder / "mvrbm")
    return folder


@pytest.fixture
def place(tmp_path, monkeypatch, models):
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("MVRBM_DEBUG", raising=False)
    monkeypatch.setenv("COLUMNS", "100")
    shutil.copytree(models, tmp_path / "models")
    Image.fromarray(RGB).save("photo.png")
    Path("photos").mkdir()
    Image.fromarray(RGB).save("photos/a.png")
    Image.fromarray(SMOOTH).save("photos/b.png")
    Image.fromarray(GRAY).save("photos/c.png")
    return tmp_path


# -- mistakes ---------------------------------------------------------------------------------------


def write(name, content):
    Path(name).parent.mkdir(parents=True, exist_ok=True)
    Path(name).write_bytes(content)


def bomb(width, height):
    def chunk(kind, content):
        return struct.pack(">I", len(content)) + kind + content + struct.pack(">I", zlib.crc32(kind + content))

    head = struct.pack(">IIBBBBB", width, height, 8, 0, 0, 0, 0)
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", head) + chunk(b"IDAT", zlib.compress(b"")) + chunk(b"IEND", b"")


def truncated():
    write("x.png", Path("photo.png").read_bytes()[:2000])


def animated():
    frames = [Image.new("L", (8, 8), gray) for gray in (10, 200)]
    frames[0].save("x.png", "GIF", save_all=True, append_images=frames[1:])


def wide():
    Image.new("L", (8192, 1)).save("x.png")


def see_through():
    Image.fromarray(SMOOTH).save("x.png")


def damaged_model():
    Path("models/x2/model.safetensors").write_bytes(b"nothing")


def small_images():
    Image.new("L", (5, 5)).save("x.png")
    shutil.rmtree("photos")
    Path("photos").mkdir()
    shutil.move("x.png", "photos/x.png")


def flat_images():
    shutil.rmtree("photos")
    Path("photos").mkdir()
    Image.new("RGB", (60, 60), (9, 9, 9)).save("photos/x.png")


X = "superres x.png out.png --model models/x2"
PHOTO = "superres photo.png out.png --model models/x2"
SMALL = "superres-train photos --out new --patch 6 --hidden 3x3 --rank 1 --quiet --device cpu"
TRAIN = f"{SMALL} --configuration paper --patches 50 --epochs 1"
STAGES = f"{SMALL} --tuning-patches 60 --tuning-crops 4 --tuning-epochs 2"

# what is wrong; what is done before; the command; exit code; what the line says
MISTAKES = [
    ("no such file", None, "superres gone.png out.png", 1, "gone.png: no such file"),
    ("a folder as input", None, "superres photos out.png", 1, "photos is a folder; specify a regular file"),
    ("not an image", lambda: write("x.png", b"once upon a time"), X, 1, "x.png is not a readable image"),
    ("an empty file", lambda: write("x.png", b""), X, 1, "x.png is empty"),
    ("truncated", truncated, X, 1, "x.png is corrupted: .*truncated"),
    ("animated", animated, X, 1, "x.png has 2 frames or pages; split it"),
    ("a bomb", lambda: write("x.png", bomb(60_000, 60_000)), X, 1, "bomb"),
    ("zero rows", lambda: write("x.png", bomb(5, 0)), X, 1, "x.png is not a readable image"),
    ("floats", lambda: Image.new("F", (9, 9)).save("x.png", "TIFF"), X, 1, "pixels of mode F"),
    ("scale 5", None, "superres photo.png out.png --scale 5", 2, "'--scale': '5' is not one of '2', '3', '4'"),
    ("scale 1", None, "superres photo.png out.png --scale 1", 2, "'--scale': '1' is not one of '2', '3', '4'"),
    (
        "a model for another scale",
        None,
        PHOTO + " --scale 4",
        1,
        "models/x2 contains a model for scale 2, but scale 4 was requested",
    ),
    ("no model there", None, "superres photo.png out.png --model gone", 1, "gone is not a model folder"),
    ("a model of another kind", None, PHOTO.replace("x2", "mvrbm"), 1, "models/mvrbm does not contain a SuperResolver"),
    ("a damaged model", damaged_model, PHOTO, 1, "model.safetensors"),
    ("output is there", None, "superres photo.png photo.png", 1, "photo.png already exists; use --force to replace it"),
    ("output of unknown kind", None, "superres photo.png out.gif", 1, "out.gif must end in .png, .jpg"),
    (
        "--self-ensemble for nothing",
        None,
        "superres photo.png out.png --self-ensemble",
        2,
        "'--self-ensemble': has no effect",
    ),
    (
        "--strength for nothing",
        None,
        PHOTO + " --no-cleanup --strength 2",
        2,
        "'--strength': has no effect with --no-cleanup",
    ),
    (
        "--patches for stages",
        None,
        SMALL + " --patches 50",
        2,
        "'--patches': has no effect with --configuration stages",
    ),
    ("output nowhere", None, "superres photo.png no/out.png", 1, "no does not exist"),
    (
        "transparency as JPEG",
        see_through,
        X.replace("out.png", "out.jpg"),
        1,
        "transparency, which JPEG does not support; save it as a .png",
    ),
    ("too wide for WebP", wide, X.replace("out.png", "out.webp"), 1, "16,383 pixels.*16,384"),
    ("unknown device", None, "superres photo.png out.png --device tpu", 2, "tpu"),
    ("no folder to learn from", None, "superres-train gone --out new", 1, "gone does not exist"),
    ("a file to learn from", None, "superres-train photo.png --out new", 1, "photo.png is not a folder of images"),
    ("a folder without images", None, "superres-train models --out new", 1, "models contains no images"),
    (
        "a damaged image to learn from",
        lambda: write("photos/d.png", b"no"),
        TRAIN,
        1,
        "photos/d.png is not a readable image",
    ),
    ("images smaller than a patch", small_images, TRAIN, 1, "at least one image must be as large as a patch"),
    ("nothing but flat images", flat_images, TRAIN, 1, "flat"),
    ("a hidden layer of three modes", None, TRAIN.replace("3x3", "3x3x3"), 2, "3x3x3 has 3 axes, but 2 are required"),
    ("a model is there", None, TRAIN.replace("new", "models/x2"), 1, "models/x2 already exists; use --force"),
    ("a scale of 5 to learn", None, TRAIN + " --scale 5", 2, "'--scale': '5' is not one of '2', '3', '4'"),
]


@pytest.mark.parametrize(("before", "command", "code", "says"), [m[1:] for m in MISTAKES], ids=[m[0] for m in MISTAKES])
def test_a_mistake_is_one_clear_line_and_leaves_nothing_behind(mistake, before, command, code, says):
    mistake(before, command, code, says)


# -- what is done -----------------------------------------------------------------------------------


def palette():
    image = Image.fromarray(RGB).quantize(8)
    image.save("x.png", transparency=3)
    return 4


def cmyk():
    Image.fromarray(RGB).convert("CMYK").save("x.tif")
    shutil.move("x.tif", "x.png")
    return 3


def one_pixel():
    Image.new("RGB", (1, 1), (10, 20, 30)).save("x.png")
    return 3


def sixteen_bits():
    write_picture("x.tif", Picture(RGB.astype(np.uint16) * 257))
    shutil.move("x.tif", "x.png")
    return 3


KINDS = [
    ("gray", lambda: Image.fromarray(GRAY).save("x.png"), np.uint8),
    ("RGB", lambda: Image.fromarray(RGB).save("x.png") or 3, np.uint8),
    ("RGBA", lambda: Image.fromarray(SMOOTH).save("x.png") or 4, np.uint8),
    ("one bit", lambda: Image.fromarray(GRAY > 128).save("x.png"), np.uint8),
    ("palette", palette, np.uint8),
    ("CMYK", cmyk, np.uint8),
    ("one pixel", one_pixel, np.uint8),
    ("16 bits, gray", lambda: Image.fromarray(GRAY.astype(np.uint16) * 257).save("x.png"), np.uint16),
    ("16 bits, RGB", sixteen_bits, np.uint16),
]


@pytest.mark.parametrize(("save", "dtype"), [k[1:] for k in KINDS], ids=[k[0] for k in KINDS])
def test_every_kind_of_image_is_enlarged_as_in_python(mvrbm, save, dtype):
    channels = save()
    target = "out.tif" if dtype == np.uint16 else "out.png"
    code, out, err = mvrbm(f"superres x.png {target} --no-cleanup --model models/x2 --device cpu --json")
    assert code == 0, err
    assert err in ("", "note: CMYK was converted to RGB\n")
    small, large = read_picture("x.png").pixels, read_picture(target).pixels
    expected = SuperResolver.pretrained(folder="models/x2", device="cpu").upscale(small)
    np.testing.assert_array_equal(large, expected)
    assert large.dtype == dtype
    assert large.shape == (2 * small.shape[0], 2 * small.shape[1], *([channels] if channels else []))
    result = json.loads(out)
    assert (result["shape"], result["dtype"], result["scale"]) == (list(large.shape), str(large.dtype), 2)


@pytest.mark.parametrize("suffix", [".png", ".jpg", ".tif", ".webp"])
def test_the_result_is_upright_and_keeps_exif_and_profile(mvrbm, suffix):
    exif = Image.Exif()
    exif[0x0112], exif[0x010F] = 6, "a camera"
    Image.fromarray(RGB).save("turned.jpg", quality=95, exif=exif, icc_profile=PROFILE)
    code, out, err = mvrbm(
        "superres turned.jpg --no-cleanup", f"out{suffix}", "--model", "models/x2", "--device", "cpu"
    )
    assert (code, err) == (0, "")
    assert re.fullmatch(rf"out\{suffix}: 80x100 -> 160x200 in \d+\.\d s\n", out)
    with Image.open(f"out{suffix}") as image:
        assert image.size == (160, 200)
        assert image.getexif().get(0x0112, 1) == 1
        assert image.getexif()[0x010F] == "a camera"
        assert image.info["icc_profile"] == PROFILE
        small = np.asarray(image.convert("RGB").resize((80, 100), Image.Resampling.BOX)).astype(int)
    assert np.abs(small - np.rot90(RGB, -1)).mean() < 15 < np.abs(small - np.rot90(RGB, 1)).mean()


def test_self_ensemble_and_force(mvrbm):
    assert mvrbm("superres photo.png out.png --model models/x2 --device cpu")[0] == 0
    once = read_picture("out.png").pixels
    assert (
        mvrbm("superres photo.png out.png --model models/x2 --device cpu --no-cleanup --self-ensemble --force")[0] == 0
    )
    np.testing.assert_array_equal(
        read_picture("out.png").pixels,
        SuperResolver.pretrained(folder="models/x2", device="cpu").upscale(RGB, self_ensemble=True),
    )
    assert not np.array_equal(read_picture("out.png").pixels, once)


def test_sixteen_bits_that_a_jpeg_cannot_hold_are_noted(mvrbm):
    sixteen_bits()
    code, _, err = mvrbm("superres x.png out.jpg --model models/x2 --device cpu")
    assert (code, err) == (0, "note: JPEG supports only 8 bits, so the lower 8 of 16 bits are lost\n")
    assert read_picture("out.jpg").pixels.dtype == np.uint8


@pytest.mark.parametrize(("terminal", "seconds", "shown"), [(True, 0.6, True), (True, 0, False), (False, 0.6, False)])
def test_progress_is_shown_on_a_terminal_if_it_takes_a_while(place, monkeypatch, terminal, seconds, shown):
    def slowly(model, image, *, progress, **options):
        for tile in (1, 2):
            time.sleep(seconds / 2)
            progress(tile, 2)
        return np.repeat(np.repeat(image, 2, 0), 2, 1)

    monkeypatch.setattr(SuperResolver, "upscale", slowly)
    screen = io.StringIO()
    screen.isatty = lambda: terminal
    monkeypatch.setattr(sys, "stderr", screen)
    assert cli.main(["superres", "photo.png", "out.png", "--model", "models/x2", "--device", "cpu"]) == 0
    assert bool(re.search("superres: 100%.*2/2", screen.getvalue())) == shown
    assert shown or screen.getvalue() == ""


def test_it_works_at_once_with_the_weights_in_the_package(place):
    """In a process of its own, which has no network and no folder to look into."""
    guard = (
        "import socket\n"
        "def forbid(*a, **k): raise AssertionError('network')\n"
        "socket.socket.connect = socket.create_connection = socket.getaddrinfo = forbid\n"
        "from mvrbm import cli\n"
        "for scale in '234':\n"
        "    assert cli.main(['superres', 'photo.png', f'{scale}.png', '--scale', scale, '--device', 'cpu']) == 0\n"
    )
    environment = {"HOME": "/nowhere", "OMP_NUM_THREADS": "1"}
    done = subprocess.run([sys.executable, "-c", guard], capture_output=True, text=True, env=environment)
    assert (done.returncode, done.stderr) == (0, "")
    for scale in (2, 3, 4):
        assert read_picture(f"{scale}.png").pixels.shape == (80 * scale, 100 * scale, 3)


# -- training ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("command", "objectives"),
    [
        (TRAIN, []),
        (f"{TRAIN} --tuning-patches 60 --tuning-epochs 2", ["patches"]),
        (f"{TRAIN.replace('paper', 'fine-tuned')} --tuning-patches 60 --tuning-crops 4", ["patches", "images"]),
        (STAGES, ["divergence", "patches", "images"]),
        (f"{STAGES} --tuning-patches 0", ["divergence", "images"]),
    ],
)
def test_a_folder_of_images_becomes_a_model(mvrbm, command, objectives):
    code, out, err = mvrbm(f"{command} --scale 3 --json")
    assert code == 0, err
    result = json.loads(out)
    assert (result["images"], result["scale"]) == (3, 3)
    assert result["configuration"] in command or result["configuration"] == "stages"
    model = SuperResolver.pretrained(folder="new", device="cpu")
    assert (model.scale, model.patch, model.hidden_shape, model.rank) == (3, 6, (3, 3), 1)
    assert [step.objective for step in model.training_steps] == objectives
    assert model.symmetric == (result["configuration"] == "stages")
    assert result["parameters"] == model.n_parameters_
    code, _, err = mvrbm("superres photo.png out.png --model new --scale 3 --device cpu")
    assert code == 0, err
    assert read_picture("out.png").pixels.shape == (240, 300, 3)


@pytest.mark.parametrize("command", [f"{TRAIN} --tuning-patches 60 --tuning-epochs 2", STAGES])
def test_the_same_command_makes_the_same_model(mvrbm, command):
    for name in ("one", "two"):
        assert mvrbm(command.replace("new", name))[0] == 0
    assert Path("one/model.safetensors").read_bytes() == Path("two/model.safetensors").read_bytes()


@pytest.mark.parametrize("command", ["superres", "superres-train"])
def test_help_has_an_example(mvrbm, command):
    code, out, err = mvrbm(command, "--help")
    assert (code, err) == (0, "")
    assert f"Example:\n  mvrbm {command} " in out.replace("    mvrbm", "  mvrbm")


def test_traces_of_jpeg_and_noise_are_removed_and_reported(place, mvrbm):
    Image.fromarray(RGB).save("photo.jpg", quality=40)
    small = np.asarray(Image.open("photo.jpg"))
    how = "--device cpu --json --force"
    found = json.loads(mvrbm(f"superres photo.jpg out.png {how}")[1])
    assert (found["jpeg"], found["strength"]) == (40, 1)
    expected = clean_photograph(small, Degradation(40, found["noise"]), device="cpu")
    large = SuperResolver.pretrained(device="cpu").upscale(expected)
    np.testing.assert_array_equal(np.asarray(Image.open("out.png")), large)
    assert json.loads(mvrbm(f"superres photo.jpg out.png --no-cleanup {how}")[1])["jpeg"] is None
    assert json.loads(mvrbm(f"superres photo.png out.png --jpeg 30 {how}")[1])["jpeg"] == 30
    assert json.loads(mvrbm(f"superres photo.jpg out.png --strength 0 {how}")[1])["jpeg"] is None
    out = mvrbm("superres photo.jpg other.png --device cpu")[1]
    assert "s, removed JPEG artifacts (quality 40)" in out
