"""Read and write picture files with their bit depth, transparency, EXIF and ICC profile.

A file is read into a :class:`Picture` as follows:

=============================  ======================================================================
file                           pixels
=============================  ======================================================================
gray, RGB, RGBA                unchanged, with 8 or 16 bits (16 bits in color from PNG and TIFF only)
gray with alpha                RGBA, 8 bits
1 bit                          gray, 8 bits
palette                        RGB, or RGBA if it has transparent colors
CMYK, YCbCr                    RGB; CMYK is converted with the profile in the file if there is one
several pictures in a JPEG     the first one (phones add previews and depth maps)
=============================  ======================================================================

Reading raises :class:`~mvrbm.errors.InputError` for files in formats other than `READ`, for truncated or empty files,
for animations and files with several pages, for floating-point pixels, for pictures with more than `LARGEST` pixels,
and for pipes and devices. A damaged EXIF block is ignored, and so is a profile that does not match the picture's color
space. Pictures are rotated upright according to their EXIF orientation, which is then removed, so that a written
picture looks the same in every viewer.

Pillow writes all files except TIFF in color with 16 bits, which tifffile writes. No library that we depend on writes
PNG in color with 16 bits, so such a picture loses its lower 8 bits in a ``.png`` file (:func:`check_format` says so).
Write a ``.tif`` file to keep them. Files are written atomically.
"""

from __future__ import annotations

import contextlib
import io
import os
import sys
import warnings
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray
from PIL import Image, ImageCms, UnidentifiedImageError

from mvrbm.errors import InputError
from mvrbm.extras import require
from mvrbm.io.atomic import check_output, replace_file
from mvrbm.io.formats import BEST_COMPRESSION, first_line, images_in
from mvrbm.io.untrusted import ALLOWANCE, check_regular_file

__all__ = ["FORMATS", "LARGEST", "Picture", "check_format", "read_picture", "read_pictures", "write_picture"]

Array = NDArray[Any]

#: Largest number of pixels of a picture.
LARGEST = 2**26
#: Pillow's names of the formats that are read. Some of its other readers start programs, such as Ghostscript for EPS.
READ = ("PNG", "JPEG", "TIFF", "WEBP", "BMP", "GIF", "PPM")
# Upper bound on the memory per pixel, in bytes, that reading takes, including all copies.
_BYTES_PER_PIXEL = 16

# EXIF tag of the orientation.
_ORIENTATION = 0x0112
# EXIF tag of the directory with camera settings.
_EXIF = 0x8769
# EXIF tag of the directory with the position.
_GPS = 0x8825
# EXIF tags of the width and height of the original picture.
_SIZES = (0xA002, 0xA003)
# EXIF tags of author, date and camera. Other tags of the first directory describe the layout of the original file.
_KEPT = (0x010E, 0x010F, 0x0110, 0x0131, 0x0132, 0x013B, 0x8298)

# Maps each of Pillow's modes that are read to the mode that it is converted to.
_CONVERTED = {
    **{mode: mode for mode in ("L", "RGB", "RGBA")},
    **dict.fromkeys(("LA", "La", "PA", "RGBa"), "RGBA"),
    **dict.fromkeys(("CMYK", "YCbCr", "RGBX", "P"), "RGB"),
    "1": "L",
}


@dataclass(frozen=True)
class Picture:
    """An upright picture."""

    #: Gray (H, W), RGB (H, W, 3) or RGBA (H, W, 4), of dtype uint8 or uint16.
    pixels: Array
    #: EXIF without orientation, sizes and preview. Empty if there is none.
    exif: bytes = b""
    #: ICC profile of the pixels. Empty if there is none.
    profile: bytes = b""
    #: Messages for the user about conversions that were made while reading.
    notes: tuple[str, ...] = ()

    @property
    def size(self) -> str:
        """Width and height, as in ``"640x480"``."""
        return f"{self.pixels.shape[1]}x{self.pixels.shape[0]}"

    @property
    def has_alpha(self) -> bool:
        """Whether the picture has an alpha channel."""
        return self.pixels.ndim == 3 and self.pixels.shape[2] == 4

    def with_pixels(self, pixels: Array) -> Picture:
        """Return a copy with other pixels, such as enlarged ones."""
        return replace(self, pixels=pixels)


def read_picture(path: str | os.PathLike[str], *, largest: int = LARGEST) -> Picture:
    """Read a picture of up to `largest` pixels from a file. See the top of this module for what raises InputError."""
    path = Path(path)
    content = _content(path)
    with _as_input_errors(path), _opened(content) as image:
        if not 0 < image.width * image.height <= largest:
            raise InputError(f"{path} has {image.width}x{image.height} pixels: 1 to {largest:,} are supported")
        pixels_at_most = (ALLOWANCE + 4 * BEST_COMPRESSION * len(content)) // _BYTES_PER_PIXEL
        if image.width * image.height > pixels_at_most:  # Pillow would allocate them before it finds out.
            raise InputError(f"{path} claims {image.width}x{image.height} pixels in {len(content):,} bytes: truncated?")
        frames = 1 if image.format == "MPO" else getattr(image, "n_frames", 1)
        if frames > 1:
            raise InputError(f"{path} has {frames} frames or pages: split it into single pictures")
        low = _low_bytes(content, image)
        image.load()
        pixels, notes = _pixels(path, image)
        if low is not None:
            pixels = pixels.astype(np.uint16) << 8 | low
        # Read EXIF after the pixels: Pillow rotates TIFFs upright, and removes their orientation, when it loads them.
        orientation, exif = _exif(image)
    # Drop a profile for another color space: a CMYK profile was applied already, and others can be damaged.
    profile = image.info.get("icc_profile") or b""
    fits = profile[16:20] == (b"GRAY" if pixels.ndim == 2 else b"RGB ")
    return Picture(_upright(pixels, orientation), exif, profile if fits else b"", notes)


def read_pictures(folder: str | os.PathLike[str]) -> list[Picture]:
    """Read all pictures in a folder, sorted by name. Files without an image suffix are skipped."""
    folder = Path(folder)
    if not folder.is_dir():
        raise InputError(f"{folder} is not a folder of images" if folder.exists() else f"{folder}: no such folder")
    return [read_picture(path) for path in images_in(folder)]


def _upright(pixels: Array, orientation: int) -> Array:
    """Rotate and flip pixels upright, given their EXIF orientation."""
    if orientation in (5, 6, 7, 8):
        pixels = pixels.swapaxes(0, 1)
    if orientation in (3, 4, 7, 8):
        pixels = pixels[::-1]
    if orientation in (2, 3, 6, 7):
        pixels = pixels[:, ::-1]
    return np.ascontiguousarray(pixels)


def _content(path: Path) -> bytes:
    """Return the bytes of a file.

    Pillow reads these instead of the file, from which it would request as many bytes as the header claims.
    """
    size = check_regular_file(path)
    if not 0 < size <= _BYTES_PER_PIXEL * LARGEST:
        raise InputError(f"{path} is {'too large for a picture' if size else 'empty'}: it has {size:,} bytes")
    try:
        return path.read_bytes()
    except OSError as error:
        raise InputError(f"{path} cannot be read: {error.strerror or error}") from error


@contextlib.contextmanager
def _opened(content: bytes) -> Iterator[Image.Image]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        with Image.open(io.BytesIO(content), formats=READ) as image:
            yield image


@contextlib.contextmanager
def _as_input_errors(path: Path) -> Iterator[None]:
    """Convert every error while a picture is read to an InputError."""
    try:
        yield
    except (InputError, MemoryError):
        raise
    except Exception as error:  # Pillow raises almost anything for a damaged file.
        known: dict[type[Exception], str] = {
            Image.DecompressionBombError: f" claims far more than {LARGEST:,} pixels: a decompression bomb?",
            UnidentifiedImageError: " is not an image that can be read",
        }
        raise InputError(f"{path}{known.get(type(error), f' is damaged: {first_line(error)}')}") from error


def _pixels(path: Path, image: Image.Image) -> tuple[Array, tuple[str, ...]]:
    """Return the pixels of a loaded image, and notes for the user."""
    if image.mode.startswith("I"):
        values = np.asarray(image)
        low, high = values.min(), values.max()
        if low < 0 or high > 65535:
            raise InputError(f"{path} has values from {low} to {high}: gray with 8 or 16 bits is required")
        return values.astype(np.uint16), ()
    if image.mode not in _CONVERTED:
        raise InputError(f"{path} has pixels of mode {image.mode}: gray or color with 8 or 16 bits is required")
    if image.mode == "CMYK":
        return np.asarray(_from_cmyk(image)), ("CMYK was turned into RGB",)
    # A palette can have transparent colors, and other modes one color that stands for transparent.
    transparent = image.mode in ("1", "L", "P", "RGB") and "transparency" in image.info
    return np.asarray(image.convert("RGBA" if transparent else _CONVERTED[image.mode])), ()


def _from_cmyk(image: Image.Image) -> Image.Image:
    with contextlib.suppress(ImageCms.PyCMSError, OSError, KeyError):  # The profile is missing or damaged.
        source = ImageCms.ImageCmsProfile(io.BytesIO(image.info["icc_profile"]))
        turned = ImageCms.profileToProfile(image, source, ImageCms.createProfile("sRGB"), outputMode="RGB")
        if turned is not None:
            return turned
    return image.convert("RGB")


def _low_bytes(content: bytes, image: Image.Image) -> Array | None:
    """Return the low byte of each color value with 16 bits. Return None for other images.

    Pillow reads only the high byte of such values. If it is told the opposite byte order, it reads the low byte.
    """
    swapped = {"16B": "16L", "16L": "16B", "16N": "16B" if sys.byteorder == "little" else "16L"}
    # The last entry of a tile holds the arguments of its decoder: the pixel layout, alone or first in a tuple.
    packed = [tile[3][0] if isinstance(tile[3], tuple) and tile[3] else tile[3] for tile in getattr(image, "tile", ())]
    kinds = [kind if isinstance(kind, str) else "" for kind in packed]
    if not kinds or any(kind[:-3] not in ("RGB;", "RGBA;") or kind[-3:] not in swapped for kind in kinds):
        return None
    with _opened(content) as again:
        tiles: list[Any] = []
        for tile, kind in zip(getattr(again, "tile", ()), kinds, strict=True):
            other = kind[:-3] + swapped[kind[-3:]]
            args = other if isinstance(tile[3], str) else (other, *tile[3][1:])
            tiles.append(tile._replace(args=args) if hasattr(tile, "_replace") else (*tile[:3], args))
        again.tile = tiles  # type: ignore[attr-defined]
        return np.asarray(again)


def _exif(image: Image.Image) -> tuple[int, bytes]:
    """Return the orientation, and the EXIF block without it and without the layout of the original file."""
    kept = Image.Exif()
    try:
        exif = image.getexif()
        for tag in _KEPT:
            if tag in exif:
                kept[tag] = exif[tag]
        for directory in (_EXIF, _GPS):
            entries = {tag: value for tag, value in exif.get_ifd(directory).items() if tag not in _SIZES}
            if entries:
                kept.get_ifd(directory).update(entries)
                kept[directory] = entries
        return exif.get(_ORIENTATION, 1), kept.tobytes() if len(kept) else b""
    except Exception:  # The pixels are readable even if EXIF is damaged.
        return 1, b""


class Format(NamedTuple):
    """Capabilities of a file format as we write it, and the options that Pillow writes it with."""

    #: Pillow's name of the format.
    name: str
    #: Options of Pillow's `save`.
    options: dict[str, Any]
    #: Whether gray pictures can have 16 bits.
    deep_gray: bool = False
    #: Whether color pictures can have 16 bits.
    deep_color: bool = False
    #: Whether pictures can have an alpha channel.
    alpha: bool = True
    #: Whether files can have EXIF and an ICC profile.
    metadata: bool = True
    #: Largest width and height, in pixels.
    longest: int = 2**31 - 1


# Level 4 takes half the time of level 6, and files are 3 % larger.
_PNG = Format("PNG", {"compress_level": 4}, deep_gray=True)
_JPEG = Format("JPEG", {"quality": 95, "subsampling": 0}, alpha=False, longest=65_500)
_TIFF = Format("TIFF", {"compression": "tiff_adobe_deflate"}, deep_gray=True, deep_color=True)
_WEBP = Format("WEBP", {"quality": 95}, longest=16_383)
_BMP = Format("BMP", {}, alpha=False, metadata=False)

#: Formats that pictures are written in, by file name suffix.
FORMATS: dict[str, Format] = {
    ".png": _PNG,
    ".jpg": _JPEG,
    ".jpeg": _JPEG,
    ".tif": _TIFF,
    ".tiff": _TIFF,
    ".webp": _WEBP,
    ".bmp": _BMP,
}


def check_format(path: str | os.PathLike[str], picture: Picture, scale: int = 1) -> tuple[str, ...]:
    """Check whether the format of a file can hold a picture that will be enlarged by `scale`.

    Returns one message for each property of the picture that would be lost. Raises InputError if the format cannot hold
    the picture at all.
    """
    path = Path(path)
    pixels = picture.pixels
    form = FORMATS[path.suffix.lower()]
    if not form.alpha and picture.has_alpha and bool((pixels[..., 3] < np.iinfo(pixels.dtype).max).any()):
        raise InputError(f"{path}: {form.name} has no transparency, but the picture has: write a .png")
    longest = scale * max(pixels.shape[:2])
    if longest > form.longest:
        raise InputError(f"{path}: {form.name} has at most {form.longest:,} pixels per side, not {longest:,}")
    lost = []
    if pixels.dtype == np.uint16 and not _keeps_depth(picture, form):
        if form.deep_gray:
            lost.append(f"{form.name} in color is written with 8 bits: the lower 8 of 16 are lost (write a .tif)")
        else:
            lost.append(f"{form.name} has 8 bits: the lower 8 of 16 are lost")
    if _is_deep_tiff(picture, form):
        require("tifffile", f"{path}: TIFF in color with 16 bits", "data")
        if picture.exif:
            lost.append("TIFF in color with 16 bits is written without EXIF: it is lost")
    if not form.metadata and (picture.exif or picture.profile):
        lost.append(f"{form.name} holds no EXIF and no ICC profile: they are lost")
    return tuple(lost)


def write_picture(path: str | os.PathLike[str], picture: Picture, force: bool = False) -> Path:
    """Write a picture to a file atomically.

    The suffix of `path`, one of `FORMATS`, selects the format. If the format cannot hold 16 bits, values are
    rounded to 8 bits. An existing file is replaced only if `force` is true.
    """
    path = check_output(path, force, tuple(FORMATS))
    check_format(path, picture)
    form = FORMATS[path.suffix.lower()]
    pixels = picture.pixels
    if picture.has_alpha and not form.alpha:
        pixels = pixels[..., :3]  # `check_format` has checked that the picture is opaque.
    if pixels.dtype == np.uint16 and not _keeps_depth(picture, form):
        pixels = ((pixels.astype(np.uint32) + 128) // 257).astype(np.uint8)  # 65535 = 257 * 255
    encoded = _encoded(path, picture.with_pixels(np.ascontiguousarray(pixels)), form)
    with replace_file(path) as file:
        file.write(encoded)
    return path


def _encoded(path: Path, picture: Picture, form: Format) -> memoryview:
    """Encode a picture in memory, because some encoders seek, and to tell their errors from those of the disk."""
    encoded = io.BytesIO()
    try:
        if _is_deep_tiff(picture, form):
            tifffile = require("tifffile", "TIFF in color with 16 bits", "data")
            tifffile.imwrite(
                encoded,
                picture.pixels,
                photometric="rgb",
                extrasamples=["unassalpha"] if picture.has_alpha else None,
                iccprofile=picture.profile or None,
                software=False,
                metadata=None,
            )
        else:
            metadata = {"exif": picture.exif, "icc_profile": picture.profile} if form.metadata else {}
            options = {**form.options, **{key: value for key, value in metadata.items() if value}}
            if form.name == "TIFF" and picture.exif:
                del options["compression"]  # libtiff, which compresses, cannot write EXIF's inner directories.
            Image.fromarray(picture.pixels).save(encoded, form.name, **options)
    except (OSError, ValueError, RuntimeError) as error:
        raise InputError(f"{path}: {first_line(error)}") from error
    return encoded.getbuffer()


def _keeps_depth(picture: Picture, form: Format) -> bool:
    """Return whether a format can hold the picture with 16 bits."""
    return form.deep_gray if picture.pixels.ndim == 2 else form.deep_color


def _is_deep_tiff(picture: Picture, form: Format) -> bool:
    """Return whether the file is a TIFF in color with 16 bits, which Pillow cannot write."""
    return form.name == "TIFF" and picture.pixels.dtype == np.uint16 and picture.pixels.ndim == 3
