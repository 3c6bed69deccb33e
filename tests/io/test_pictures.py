import contextlib
import errno
import io
import os
import re
import struct
import zlib
from pathlib import Path

import numpy as np
import pytest
from PIL import Image, ImageCms, ImageOps

from mvrbm.errors import InputError
from mvrbm.io.pictures import FORMATS, Picture, check_format, read_picture, write_picture

RANDOM = np.random.default_rng(0)
GRAY, RGB, RGBA = (RANDOM.integers(0, 256, (5, 7, *channels), dtype=np.uint8) for channels in ((), (3,), (4,)))
DEEP = {channels: RANDOM.integers(0, 65536, (5, 7, *channels), dtype=np.uint16) for channels in ((), (3,), (4,))}
PROFILE = ImageCms.ImageCmsProfile(ImageCms.createProfile("sRGB")).tobytes()


@pytest.fixture(autouse=True)
def place(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    return tmp_path


def there(folder):
    return {path.name: path.is_file() and path.read_bytes() for path in folder.iterdir()}


def png(array, color_type, depth=16, size=None):
    """Encode a PNG by hand, as its specification says, with each of the five filters in turn."""

    def chunk(kind, content):
        return struct.pack(">I", len(content)) + kind + content + struct.pack(">I", zlib.crc32(kind + content))

    height, width = array.shape[:2]
    raw = array.astype(">u2" if depth == 16 else np.uint8).reshape(height, -1).view(np.uint8).astype(int)
    step = depth // 8 * (array.shape[2] if array.ndim == 3 else 1)
    rows = []
    for y, row in enumerate(raw):
        above = raw[y - 1] if y else np.zeros_like(row)
        left = np.concatenate([np.zeros(step, int), row[:-step]])
        corner = np.concatenate([np.zeros(step, int), above[:-step]])
        base = left + above - corner
        distances = np.abs(np.stack([left, above, corner]) - base)
        paeth = np.choose(distances.argmin(0), [left, above, corner])
        predicted = [np.zeros_like(row), left, above, (left + above) // 2, paeth][y % 5]
        rows.append(bytes([y % 5]) + ((row - predicted) % 256).astype(np.uint8).tobytes())
    head = struct.pack(">IIBBBBB", *(size or (width, height)), depth, color_type, 0, 0, 0)
    parts = chunk(b"IHDR", head) + chunk(b"IDAT", zlib.compress(b"".join(rows))) + chunk(b"IEND", b"")
    return b"\x89PNG\r\n\x1a\n" + parts


# -- reading ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("pixels", [GRAY, RGB, RGBA], ids=["gray", "RGB", "RGBA"])
@pytest.mark.parametrize("kind", ["png", "tiff", "webp"])
def test_bytes_are_read_unchanged(pixels, kind):
    Image.fromarray(pixels).save(f"x.{kind}", **({"lossless": True, "exact": True} if kind == "webp" else {}))
    found = read_picture(f"x.{kind}")
    expected = np.repeat(pixels[..., None], 3, 2) if kind == "webp" and pixels.ndim == 2 else pixels
    np.testing.assert_array_equal(found.pixels, expected)
    assert (found.exif, found.profile, found.notes) == (b"", b"", ())


@pytest.mark.parametrize(("channels", "color_type"), [((), 0), ((3,), 2), ((4,), 6)])
def test_all_16_bits_of_a_png_are_read(channels, color_type):
    Path("x.png").write_bytes(png(DEEP[channels], color_type))
    np.testing.assert_array_equal(read_picture("x.png").pixels, DEEP[channels])


@pytest.mark.parametrize("channels", [(), (3,), (4,)])
@pytest.mark.parametrize("byteorder", ["<", ">"])
@pytest.mark.parametrize("compression", [None, "zlib"])
def test_all_16_bits_of_a_tiff_are_read(channels, byteorder, compression):
    tifffile = pytest.importorskip("tifffile")
    kind = "rgb" if channels else "minisblack"
    tifffile.imwrite("x.tif", DEEP[channels], photometric=kind, byteorder=byteorder, compression=compression)
    np.testing.assert_array_equal(read_picture("x.tif").pixels, DEEP[channels])


def palette(transparent):
    def save():
        image = Image.new("P", (7, 5), 1)
        image.putpalette([0, 0, 0, 10, 20, 30, 200, 100, 50])
        image.putpixel((2, 3), 2)
        image.save("x.png", **({"transparency": 2} if transparent else {}))

    return save


def cmyk(**options):
    def save():
        Image.new("CMYK", (7, 5), (0, 255, 255, 0)).save("x.tif", **options)

    return save


def gray_with_alpha():
    Image.fromarray(np.stack([GRAY, GRAY.T.reshape(5, 7)], -1), "LA").save("x.png")


# Contents of the file, function that writes it, shape, pixel in row 3 and column 2, tolerance.
OTHERS = [
    ("palette", palette(False), (5, 7, 3), (200, 100, 50), 0),
    ("palette with a transparent color", palette(True), (5, 7, 4), (200, 100, 50, 0), 0),
    ("one bit", lambda: Image.fromarray(GRAY > 99).save("x.png"), (5, 7), 255 * (GRAY[3, 2] > 99), 0),
    ("gray with alpha", gray_with_alpha, (5, 7, 4), (*[GRAY[3, 2]] * 3, GRAY.T.reshape(5, 7)[3, 2]), 0),
    ("CMYK", cmyk(), (5, 7, 3), (255, 0, 0), 0),
    ("CMYK, damaged profile", cmyk(icc_profile=b"no profile at all"), (5, 7, 3), (255, 0, 0), 0),
    ("a still GIF", lambda: Image.new("RGB", (7, 5), (9, 99, 199)).save("x.gif"), (5, 7, 3), (9, 99, 199), 0),
    ("YCbCr", lambda: Image.new("YCbCr", (7, 5), (100, 128, 128)).save("x.tif"), (5, 7, 3), (100,) * 3, 1),
    ("one pixel", lambda: Image.new("L", (1, 1), 77).save("x.png"), (1, 1), None, 0),
]


@pytest.mark.parametrize(("save", "shape", "pixel", "off"), [o[1:] for o in OTHERS], ids=[o[0] for o in OTHERS])
def test_other_modes_are_converted_to_gray_or_color(place, save, shape, pixel, off):
    save()
    (path,) = place.iterdir()
    found = read_picture(path)
    assert found.pixels.shape == shape
    assert found.pixels.dtype == np.uint8
    if pixel is not None:
        assert np.abs(found.pixels[3, 2].astype(int) - pixel).max() <= off
    assert (found.notes == ("CMYK was converted to RGB",)) == ("CMYK" in str(save.__qualname__).upper())


def test_the_first_picture_of_a_jpeg_with_several_is_read():
    first, second = (Image.new("RGB", (16, 16), color) for color in ("red", "blue"))
    first.save("x.jpg", "MPO", save_all=True, append_images=[second])
    with Image.open("x.jpg") as image:
        assert image.n_frames == 2
    assert read_picture("x.jpg").pixels[8, 8].tolist() == pytest.approx([254, 0, 0], abs=2)


@pytest.mark.parametrize("orientation", range(1, 9))
@pytest.mark.parametrize("kind", ["jpg", "png", "tiff", "webp"])
def test_pictures_are_rotated_upright(orientation, kind):
    exif = Image.Exif()
    exif[0x0112], exif[0x010F] = orientation, "a camera"
    pixels = np.zeros((24, 40, 3), np.uint8)
    pixels[:8, :8], pixels[:8, -8:], pixels[-8:, :8] = (255, 0, 0), (0, 255, 0), (0, 0, 255)
    Image.fromarray(pixels).save(f"x.{kind}", exif=exif)
    with Image.open(f"x.{kind}") as image:
        expected = np.asarray(ImageOps.exif_transpose(image).convert("RGB"))
    found = read_picture(f"x.{kind}")
    np.testing.assert_array_equal(found.pixels, expected)
    write_picture(f"y.{kind}", found)
    with Image.open(f"y.{kind}") as image:
        again = np.asarray(ImageOps.exif_transpose(image).convert("RGB"))
        assert image.getexif().get(0x0112, 1) == 1
        assert image.getexif()[0x010F] == "a camera"
    assert again.shape == expected.shape
    assert np.abs(again.astype(int) - expected).max() <= 60  # tolerance for lossy formats
    for corner in ((4, 4), (4, -4), (-4, 4), (-4, -4)):
        assert (again[corner] > 128).tolist() == (expected[corner] > 128).tolist()


SMALL = io.BytesIO()
Image.fromarray(RANDOM.integers(0, 256, (60, 60, 3), dtype=np.uint8)).save(SMALL, "PNG")
SMALL = SMALL.getvalue()
JPEG = io.BytesIO()
Image.fromarray(RANDOM.integers(0, 256, (60, 60, 3), dtype=np.uint8)).save(JPEG, "JPEG")


def animation(kind, **options):
    target = io.BytesIO()
    frames = [Image.new("RGB", (8, 8), color) for color in ("red", "blue", "green")]
    frames[0].save(target, kind, save_all=True, append_images=frames[1:], **options)
    return target.getvalue()


def of_mode(mode, kind):
    target = io.BytesIO()
    Image.new(mode, (3, 3), 70_000).save(target, kind)
    return target.getvalue()


# Problem, contents of the file, pattern of the error message.
UNREADABLE = [
    ("text", b"once upon a time", "x.png is not a readable image"),
    ("nothing", b"", "x.png is empty"),
    ("a truncated PNG", SMALL[:3000], "x.png is corrupted: .*truncated"),
    ("a truncated JPEG", JPEG.getvalue()[:1500], "x.png is corrupted: .*truncated"),
    ("a PNG of which bytes are wrong", SMALL[:2000] + b"wrong" + SMALL[2005:], "x.png is corrupted: "),
    ("an animated GIF", animation("GIF"), "x.png has 3 frames or pages; split it"),
    ("an animated PNG", animation("PNG"), "x.png has 3 frames or pages; split it"),
    ("an animated WebP", animation("WEBP"), "x.png has 3 frames or pages; split it"),
    ("a TIFF of three pages", animation("TIFF"), "x.png has 3 frames or pages; split it"),
    ("a bomb", png(GRAY, 0, 8, size=(60_000, 60_000)), "x.png declares .* may be a decompression bomb"),
    (
        "a small bomb",
        png(GRAY, 0, 8, size=(9_000, 9_000)),
        "has 9000x9000 pixels, but only 1 to 67,108,864 are supported",
    ),
    ("no columns", png(GRAY, 0, 8, size=(0, 5)), "x.png is not a readable image"),
    ("no rows", b"P5 5 0 255\n", "x.png is not a readable image"),
    ("floats", of_mode("F", "TIFF"), "x.png has pixels of mode F, but 8-bit or 16-bit grayscale or color is required"),
    (
        "32 bits",
        of_mode("I", "TIFF"),
        "x.png has values from 70000 to 70000, but 8-bit or 16-bit grayscale is required",
    ),
]


@pytest.mark.parametrize(("content", "says"), [u[1:] for u in UNREADABLE], ids=[u[0] for u in UNREADABLE])
def test_unreadable_files_raise_an_error_of_one_line(content, says):
    Path("x.png").write_bytes(content)
    with pytest.raises(InputError, match=says) as error:
        read_picture("x.png")
    assert "\n" not in str(error.value)


def test_missing_files_and_folders_raise(place):
    with pytest.raises(InputError, match=r"gone\.png: no such file"):
        read_picture("gone.png")
    with pytest.raises(InputError, match="is a folder; specify a regular file"):
        read_picture(place)


def sample(kind, **options):
    target = io.BytesIO()
    exif = Image.Exif()
    exif[0x0112], exif[0x010F] = 6, "a camera"
    exif.get_ifd(0x8769)[0x829A] = 0.5
    Image.fromarray(RGB).save(target, kind, exif=exif, icc_profile=PROFILE, **options)
    return target.getvalue()


@pytest.mark.parametrize("kind", ["PNG", "JPEG", "TIFF", "WEBP"])
def test_damaged_files_are_read_or_raise_input_error(kind):
    """Bytes are changed, removed and inserted at random."""
    whole, random = sample(kind), np.random.default_rng(1)
    read = 0
    for _ in range(60):
        damaged = bytearray(whole)
        for _ in range(random.integers(1, 4)):
            at, length = int(random.integers(len(damaged))), int(random.integers(1, 9))
            damaged[at : at + length] = random.integers(0, 256, random.integers(0, 9), dtype=np.uint8).tobytes()
        Path("x").write_bytes(damaged)
        with contextlib.suppress(InputError):
            write_picture("y.png", read_picture("x"), force=True)
            read += 1
    assert read < 60
    assert read > 0 or kind == "PNG"  # PNG has checksums, which detect all damage.


def test_a_damaged_exif_is_ignored():
    whole = sample("JPEG")
    place = whole.index(b"Exif\0\0") + 6
    Path("x.jpg").write_bytes(whole[: place + 4] + b"\xff\xff\xff\x7f" + whole[place + 8 :])
    found = read_picture("x.jpg")
    assert (found.exif, found.profile, found.pixels.shape) == (b"", PROFILE, (5, 7, 3))


def test_a_profile_for_another_color_space_is_ignored():
    gray = PROFILE[:16] + b"GRAY" + PROFILE[20:]
    for pixels, profile, kept in ((RGB, gray, False), (GRAY, gray, True), (GRAY, PROFILE, False), (RGB, PROFILE, True)):
        Image.fromarray(pixels).save("x.png", icc_profile=profile)
        assert read_picture("x.png").profile == (profile if kept else b"")


# -- writing ----------------------------------------------------------------------------------------


LOSSLESS = [(kind, pixels) for kind in ("png", "tif") for pixels in (GRAY, RGB, RGBA, DEEP[()])]
LOSSLESS += [("tif", DEEP[3,]), ("tif", DEEP[4,])]


@pytest.mark.parametrize(("kind", "pixels"), LOSSLESS, ids=[f"{k} {p.dtype}{p.shape}" for k, p in LOSSLESS])
def test_lossless_formats_round_trip(kind, pixels):
    if kind == "tif":
        pytest.importorskip("tifffile")
    profile = PROFILE if pixels.ndim == 3 else PROFILE[:16] + b"GRAY" + PROFILE[20:]
    write_picture(f"x.{kind}", Picture(pixels, profile=profile))
    found = read_picture(f"x.{kind}")
    np.testing.assert_array_equal(found.pixels, pixels)
    assert found.pixels.dtype == pixels.dtype
    assert found.profile == profile


def test_scikit_image_reads_our_16_bit_png():
    imread = pytest.importorskip("skimage.io").imread
    write_picture("x.png", Picture(DEEP[()]))
    np.testing.assert_array_equal(imread("x.png"), DEEP[()])


@pytest.mark.parametrize("channels", [(3,), (4,)])
def test_a_png_in_color_has_8_bits_and_a_note_says_so(channels):
    picture = Picture(DEEP[channels])
    assert check_format("x.png", picture) == (
        "color PNG is written with 8 bits, so the lower 8 of 16 bits are lost; use .tif to keep them",
    )
    write_picture("x.png", picture)
    found = read_picture("x.png").pixels
    assert found.dtype == np.uint8
    assert np.abs(found - DEEP[channels] / 257).max() <= 0.5


@pytest.mark.parametrize("suffix", [".png", ".jpg", ".tiff", ".webp"])
@pytest.mark.parametrize("deep", [False, True], ids=["8 bits", "16 bits"])
def test_exif_and_profile_are_kept(suffix, deep):
    exif = Image.Exif()
    exif[0x010F], exif[0x8298], exif[0x0112] = "a camera", "me", 1
    exif.get_ifd(0x8769)[0x829A] = 0.5  # exposure
    exif.get_ifd(0x8769)[0xA002] = 7  # width
    exif.get_ifd(0x8825)[1] = "N"
    Image.fromarray(RGB).save("x.png", exif=exif, icc_profile=PROFILE)
    picture = read_picture("x.png")
    assert picture.profile == PROFILE
    if deep:
        picture = picture.with_pixels(DEEP[3,])
    write_picture(f"y{suffix}", picture)
    with Image.open(f"y{suffix}") as image:
        assert image.info["icc_profile"] == PROFILE
        if deep and suffix == ".tiff":
            return  # tifffile writes the profile, but no EXIF.
        found = image.getexif()
        assert (found[0x010F], found[0x8298]) == ("a camera", "me")
        assert 0x0112 not in found
        assert found.get_ifd(0x8769) == {0x829A: 0.5}
        assert found.get_ifd(0x8825) == {1: "N"}


@pytest.mark.parametrize("suffix", [".jpg", ".webp", ".bmp"])
def test_16_bits_are_rounded_to_8_if_the_format_has_no_more(suffix):
    ramp = np.repeat(np.linspace(0, 65535, 64).astype(np.uint16)[None], 64, 0)
    lost = check_format(f"x{suffix}", Picture(ramp))
    assert any("lower 8 of 16 bits are lost" in line for line in lost)
    write_picture(f"x{suffix}", Picture(ramp))
    found = read_picture(f"x{suffix}").pixels
    gray = found if found.ndim == 2 else found[..., 1]
    assert np.abs(gray - ramp / 257).max() <= (0.5 if suffix == ".bmp" else 6)


def test_transparency_raises_for_formats_without_it():
    message = r"x\.jpg: the image has transparency, which JPEG does not support; save it as a \.png"
    with pytest.raises(InputError, match=message):
        write_picture("x.jpg", Picture(RGBA))
    opaque = np.dstack([RGB, np.full((5, 7), 255, np.uint8)])
    write_picture("x.bmp", Picture(opaque))
    np.testing.assert_array_equal(read_picture("x.bmp").pixels, RGB)
    assert set(there(Path())) == {"x.bmp"}


@pytest.mark.parametrize(("suffix", "side", "most"), [(".webp", 8192, "16,383"), (".jpg", 32_768, "65,500")])
def test_pictures_too_large_for_a_format_raise(suffix, side, most):
    picture = Picture(np.zeros((2, side), np.uint8))
    with pytest.raises(InputError, match=f"at most {most} pixels per side, but .* would have {2 * side:,}"):
        check_format(f"x{suffix}", picture, scale=2)
    assert check_format(f"x{suffix}", picture) == ()


def test_a_note_says_that_bmp_loses_metadata():
    assert check_format("x.bmp", Picture(RGB, profile=PROFILE)) == (
        "BMP does not support EXIF metadata or ICC profiles, so they are lost",
    )


def test_files_are_replaced_only_with_force_and_atomically(place, monkeypatch):
    write_picture("x.png", Picture(GRAY))
    with pytest.raises(InputError, match=r"x\.png already exists; use force=True to replace it"):
        write_picture("x.png", Picture(RGB))
    with pytest.raises(InputError, match=r"x\.xcf must end in \.png, \.jpg"):
        write_picture("x.xcf", Picture(RGB))
    former = there(place)

    def no_space(descriptor):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "fsync", no_space)
    for picture in (Picture(GRAY), Picture(DEEP[3,])):
        with pytest.raises(InputError, match=r"x\.png cannot be written: No space left on device"):
            write_picture("x.png", picture, force=True)
        assert there(place) == former


def test_pillow_supports_all_formats():
    known = Image.registered_extensions()
    assert {suffix: known[suffix] for suffix in FORMATS} == {suffix: form.name for suffix, form in FORMATS.items()}
    assert not re.search("[A-Z]", "".join(FORMATS))


@pytest.mark.parametrize(("mode", "key"), [("RGB", (255, 0, 255)), ("L", 7)])
def test_a_transparent_color_becomes_an_alpha_channel(tmp_path, mode, key):
    image = Image.new(mode, (3, 2), key)
    image.putpixel((1, 1), (1, 2, 3) if mode == "RGB" else 200)
    image.save(tmp_path / "keyed.png", transparency=key)
    pixels = read_picture(tmp_path / "keyed.png").pixels
    assert pixels.shape == (2, 3, 4)
    assert pixels[0, 0, 3] == 0
    assert pixels[1, 1, 3] == 255
