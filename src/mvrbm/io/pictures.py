"""Pictures in files, with all that people keep in them: 8 or 16 bits, transparency, EXIF, ICC profile.

How files are read (:class:`Picture`):

=============================  ======================================================================
file                           pixels
=============================  ======================================================================
gray, RGB, RGBA                unchanged: 8 bits, or 16 bits (color from PNG and TIFF only)
gray with alpha                RGBA, 8 bits
1 bit                          gray, 8 bits
palette                        RGB, or RGBA if it has transparent colors
CMYK, YCbCr                    RGB, CMYK by the profile in the file if there is one
several pictures in a JPEG     the first one (phones hide previews and depth there)
=============================  ======================================================================

These raise :class:`~mvrbm.errors.InputError`: files that are not images in one of the formats `READ`, truncated, empty,
animated or of several pages, of floats, or of more than `LARGEST` pixels; pipes and devices. A damaged EXIF, and a
profile for other colors than the picture's, are ignored. Pictures are turned upright according to the EXIF
orientation, which is then removed, so that a written picture looks the same everywhere. Files are written whole or not
at all.
"""

from __future__ import annotations

import contextlib
import io
import os
import struct
import sys
import warnings
import zlib
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import IO, Any, NamedTuple

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
_BYTES_PER_PIXEL = 16  # that reading takes at once, with all copies

_ORIENTATION = 0x0112
_EXIF, _GPS = 0x8769, 0x8825
_SIZES = (0xA002, 0xA003)  # of the original image, in pixels
# Author, date and camera; the other tags of the first directory describe the layout of the original file.
_KEPT = (0x010E, 0x010F, 0x0110, 0x0131, 0x0132, 0x013B, 0x8298)

# The mode that each of Pillow's modes is converted to.
_CONVERTED = {
    **{mode: mode for mode in ("L", "RGB", "RGBA")},
    **dict.fromkeys(("LA", "La", "PA", "RGBa"), "RGBA"),
    **dict.fromkeys(("CMYK", "YCbCr", "RGBX", "P"), "RGB"),
    "1": "L",
}


@dataclass(frozen=True)
class Picture:
    """An upright picture."""

    pixels: Array  # (H, W), (H, W, 3) or (H, W, 4): gray, RGB or RGBA, in bytes or 16-bit numbers
    exif: bytes = b""  # EXIF without orientation, sizes and preview; empty if there is none
    profile: bytes = b""  # ICC profile of the pixels; empty if there is none
    notes: tuple[str, ...] = ()  # losses and surprises in reading

    @property
    def size(self) -> str:
        """Width and height, as in ``"640x480"``."""
        return f"{self.pixels.shape[1]}x{self.pixels.shape[0]}"

    @property
    def has_alpha(self) -> bool:
        """Whether there is an alpha channel."""
        return self.pixels.ndim == 3 and self.pixels.shape[2] == 4

    def with_pixels(self, pixels: Array) -> Picture:
        """Return the picture with other pixels, such as enlarged ones."""
        return replace(self, pixels=pixels)


def read_picture(path: str | os.PathLike[str], *, largest: int = LARGEST) -> Picture:
    """Read a picture of up to `largest` pixels from a file, or raise InputError, as the top of this module says."""
    path = Path(path)
    content = _content(path)
    with _as_input_errors(path), _opened(content) as image:
        if not 0 < image.width * image.height <= largest:
            raise InputError(f"{path} has {image.width}x{image.height} pixels: 1 to {largest:,} are supported")
        pixels_at_most = (ALLOWANCE + 4 * BEST_COMPRESSION * len(content)) // _BYTES_PER_PIXEL
        if image.width * image.height > pixels_at_most:  # before memory is allocated for them
            raise InputError(f"{path} claims {image.width}x{image.height} pixels in {len(content):,} bytes: truncated?")
        frames = 1 if image.format == "MPO" else getattr(image, "n_frames", 1)
        if frames > 1:
            raise InputError(f"{path} has {frames} frames or pages: split it into single pictures")
        low = _low_bytes(content, image)
        image.load()
        pixels, notes = _pixels(path, image)
        if low is not None:
            pixels = pixels.astype(np.uint16) << 8 | low
        orientation, exif = _exif(image)  # after the pixels: Pillow turns TIFFs upright when it loads them
    # The profile must be for the colors of the pixels: that of CMYK was applied already, and one can be damaged.
    profile = image.info.get("icc_profile") or b""
    fits = profile[16:20] == (b"GRAY" if pixels.ndim == 2 else b"RGB ")
    return Picture(_upright(pixels, orientation), exif, profile if fits else b"", notes)


def read_pictures(folder: str | os.PathLike[str]) -> list[Picture]:
    """Read all pictures in a folder, sorted by name. Files without the suffix of an image are left out."""
    folder = Path(folder)
    if not folder.is_dir():
        raise InputError(f"{folder} is not a folder of images" if folder.exists() else f"{folder}: no such folder")
    return [read_picture(path) for path in images_in(folder)]


def _upright(pixels: Array, orientation: int) -> Array:
    """Turn and flip pixels so that they are upright, given their EXIF orientation."""
    if orientation in (5, 6, 7, 8):
        pixels = pixels.swapaxes(0, 1)
    down, across = (-1 if orientation in flipped else 1 for flipped in ((3, 4, 7, 8), (2, 3, 6, 7)))
    return np.ascontiguousarray(pixels[::down, ::across])


def _content(path: Path) -> bytes:
    """Return the bytes of a file. Pillow's readers get these: they ask a file for as many as it claims to have."""
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
    """Turn whatever goes wrong while a picture is read into an InputError."""
    try:
        yield
    except (InputError, MemoryError):
        raise
    except Exception as error:  # Pillow's readers raise nearly anything for a damaged file
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
    transparent = image.mode in ("1", "L", "P", "RGB") and "transparency" in image.info  # a palette's, or a color key
    return np.asarray(image.convert("RGBA" if transparent else _CONVERTED[image.mode])), ()


def _from_cmyk(image: Image.Image) -> Image.Image:
    with contextlib.suppress(ImageCms.PyCMSError, OSError, KeyError):  # a missing or damaged profile is ignored
        source = ImageCms.ImageCmsProfile(io.BytesIO(image.info["icc_profile"]))
        turned = ImageCms.profileToProfile(image, source, ImageCms.createProfile("sRGB"), outputMode="RGB")
        if turned is not None:
            return turned
    return image.convert("RGB")


def _low_bytes(content: bytes, image: Image.Image) -> Array | None:
    """Return the low bytes of color with 16 bits, None for other images.

    Pillow keeps the high byte of each number. With the byte order swapped, it keeps the low one.
    """
    swapped = {"16B": "16L", "16L": "16B", "16N": "16B" if sys.byteorder == "little" else "16L"}
    # A tile's last entry holds its decoder's arguments: how pixels are packed, alone or first of several.
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
    """Return the orientation, and EXIF without it and without the layout of the original file."""
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
    except Exception:  # a damaged EXIF does not make the pixels unreadable
        return 1, b""


class Format(NamedTuple):
    """What a file format can hold, and how Pillow writes it."""

    name: str
    options: dict[str, Any]
    depths: tuple[int, ...] = (8,)
    alpha: bool = True
    metadata: bool = True
    longest: int = 2**31 - 1


_PNG_LEVEL = 4  # of compression: half the time of 6 for 3 % more bytes

#: Formats that pictures are written in, by the suffix of the file name.
FORMATS: dict[str, Format] = {
    ".png": Format("PNG", {"compress_level": _PNG_LEVEL}, depths=(8, 16)),
    **dict.fromkeys((".jpg", ".jpeg"), Format("JPEG", {"quality": 95, "subsampling": 0}, alpha=False, longest=65_500)),
    **dict.fromkeys((".tif", ".tiff"), Format("TIFF", {"compression": "tiff_adobe_deflate"}, depths=(8, 16))),
    ".webp": Format("WEBP", {"quality": 95}, longest=16_383),
    ".bmp": Format("BMP", {}, alpha=False, metadata=False),
}


def check_format(path: str | os.PathLike[str], picture: Picture, scale: int = 1) -> tuple[str, ...]:
    """Return what the format of a file will lose of a picture enlarged by `scale`; InputError if it cannot hold it."""
    path, pixels = Path(path), picture.pixels
    form = FORMATS[path.suffix.lower()]
    if not form.alpha and picture.has_alpha and bool((pixels[..., 3] < np.iinfo(pixels.dtype).max).any()):
        raise InputError(f"{path}: {form.name} has no transparency, but the picture has: write a .png")
    longest = scale * max(pixels.shape[:2])
    if longest > form.longest:
        raise InputError(f"{path}: {form.name} has at most {form.longest:,} pixels per side, not {longest:,}")
    lost = []
    if pixels.dtype == np.uint16 and 16 not in form.depths:
        lost.append(f"{form.name} has 8 bits: the lower 8 of 16 are lost")
    if _is_deep_tiff(picture, form):
        require("tifffile", f"{path}: TIFF in color with 16 bits", "data")
        if picture.exif:
            lost.append("TIFF in color with 16 bits is written without EXIF: it is lost")
    if not form.metadata and (picture.exif or picture.profile):
        lost.append(f"{form.name} holds no EXIF and no ICC profile: they are lost")
    return tuple(lost)


def write_picture(path: str | os.PathLike[str], picture: Picture, force: bool = False) -> Path:
    """Write a picture to a file, whole or not at all. With `force`, an existing file is replaced.

    The suffix, one of `FORMATS`, gives the format; 16-bit numbers become bytes if it has no more.
    """
    path = check_output(path, force, tuple(FORMATS))
    check_format(path, picture)
    form = FORMATS[path.suffix.lower()]
    pixels = picture.pixels
    if picture.has_alpha and not form.alpha:
        pixels = pixels[..., :3]  # fully opaque: checked above
    if pixels.dtype == np.uint16 and 16 not in form.depths:
        pixels = ((pixels.astype(np.uint32) + 128) // 257).astype(np.uint8)  # 65535 = 257 * 255
    picture = picture.with_pixels(np.ascontiguousarray(pixels))
    with replace_file(path) as file:
        if picture.pixels.dtype == np.uint16 and form.name == "PNG":
            _write_png(file, picture)
        else:
            file.write(_encoded(path, picture, form))
    return path


def _encoded(path: Path, picture: Picture, form: Format) -> memoryview:
    """Encode in memory: some encoders seek, and their errors must not be taken for those of the disk."""
    encoded = io.BytesIO()
    try:
        if _is_deep_tiff(picture, form):
            alpha = ["unassalpha"] if picture.has_alpha else None
            profile = picture.profile or None
            require("tifffile", "TIFF in color with 16 bits", "data").imwrite(
                encoded, picture.pixels, photometric="rgb", extrasamples=alpha, iccprofile=profile
            )
        else:
            metadata = {"exif": picture.exif, "icc_profile": picture.profile} if form.metadata else {}
            options = {**form.options, **{key: value for key, value in metadata.items() if value}}
            if form.name == "TIFF" and picture.exif:
                del options["compression"]  # libtiff, which compresses, cannot write EXIF's inner directories
            Image.fromarray(picture.pixels).save(encoded, form.name, **options)
    except (OSError, ValueError, RuntimeError) as error:
        raise InputError(f"{path}: {first_line(error)}") from error
    return encoded.getbuffer()


def _is_deep_tiff(picture: Picture, form: Format) -> bool:
    """Return whether this is a TIFF in color with 16 bits, which Pillow cannot write."""
    return form.name == "TIFF" and picture.pixels.dtype == np.uint16 and picture.pixels.ndim == 3


def _write_png(file: IO[bytes], picture: Picture) -> None:
    """Write a PNG of 16 bits, which Pillow can only do for gray."""
    pixels = picture.pixels
    height, width = pixels.shape[:2]
    kind = 0 if pixels.ndim == 2 else {3: 2, 4: 6}[pixels.shape[2]]

    def chunk(name: bytes, content: bytes) -> None:
        file.write(struct.pack(">I", len(content)) + name + content)
        file.write(struct.pack(">I", zlib.crc32(name + content)))

    file.write(b"\x89PNG\r\n\x1a\n")
    chunk(b"IHDR", struct.pack(">IIBBBBB", width, height, 16, kind, 0, 0, 0))
    if picture.profile:
        chunk(b"iCCP", b"ICC profile\0\0" + zlib.compress(picture.profile))
    if picture.exif:
        chunk(b"eXIf", picture.exif.removeprefix(b"Exif\0\0"))
    packer, former = zlib.compressobj(_PNG_LEVEL), np.uint8(0)
    for row in pixels:
        line = row.astype(">u2").view(np.uint8).reshape(-1)
        packed, former = packer.compress(b"\2" + (line - former).tobytes()), line  # 2: minus the row above
        if packed:
            chunk(b"IDAT", packed)
    chunk(b"IDAT", packer.flush())
    chunk(b"IEND", b"")
