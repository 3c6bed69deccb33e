"""Read and write image files, preserving bit depth, transparency, EXIF metadata and the ICC profile.

Files are converted to a :class:`Picture` as follows:

=============================  ======================================================================
file                           pixels
=============================  ======================================================================
grayscale, RGB, RGBA           unchanged, with 8 or 16 bits (16 bits in color from PNG and TIFF only)
grayscale with alpha           RGBA, 8 bits
1 bit                          grayscale, 8 bits
palette                        RGB, or RGBA if it has transparent colors
CMYK, YCbCr                    RGB (CMYK is converted with the profile in the file, if any)
several images in a JPEG       the first image (phones add previews and depth maps)
=============================  ======================================================================

Reading raises :class:`~mvrbm.errors.InputError` for unsupported formats (see `READ`), truncated or empty files,
animations and multi-page files, floating-point pixels, images with more than `LARGEST` pixels, pipes and devices.
Corrupted EXIF blocks are ignored, as are ICC profiles that do not match the image's color space. Images are rotated
upright according to their EXIF orientation. The orientation tag is then removed so that a written image looks the same
in every viewer.

tifffile writes 16-bit color TIFF files, and Pillow writes all other files. Neither can write 16-bit color PNG files, so
16-bit color images lose their lower 8 bits in ``.png`` files, and :func:`check_format` returns a message about this.
Write a ``.tif`` file to keep all 16 bits. Files are written atomically.
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

__all__ = [
    "FORMATS",
    "LARGEST",
    "Picture",
    "as_bytes",
    "as_gray",
    "check_format",
    "read_picture",
    "read_pictures",
    "write_picture",
]

Array = NDArray[Any]

#: Maximum number of pixels in an image.
LARGEST = 2**26
#: Pillow's names for the supported input formats. Some of Pillow's other readers run external programs, such as
#: Ghostscript for EPS.
READ = ("PNG", "JPEG", "TIFF", "WEBP", "BMP", "GIF", "PPM")
# Upper bound on the memory in bytes used per pixel when reading an image, including all copies.
_BYTES_PER_PIXEL = 16

# EXIF tag for the orientation.
_ORIENTATION = 0x0112
# EXIF tag for the directory of camera settings.
_EXIF = 0x8769
# EXIF tag for the GPS directory.
_GPS = 0x8825
# EXIF tags for the width and height of the original image.
_SIZES = (0xA002, 0xA003)
# EXIF tags for author, date and camera. Other tags in the first directory describe the layout of the original file.
_KEPT = (0x010E, 0x010F, 0x0110, 0x0131, 0x0132, 0x013B, 0x8298)

# Mapping from supported Pillow modes to the modes that images are converted to.
_CONVERTED = {
    **{mode: mode for mode in ("L", "RGB", "RGBA")},
    **dict.fromkeys(("LA", "La", "PA", "RGBa"), "RGBA"),
    **dict.fromkeys(("CMYK", "YCbCr", "RGBX", "P"), "RGB"),
    "1": "L",
}


@dataclass(frozen=True)
class Picture:
    """An image in upright orientation, with its metadata."""

    #: Grayscale (H, W), RGB (H, W, 3) or RGBA (H, W, 4) pixels, of dtype uint8 or uint16.
    pixels: Array
    #: EXIF metadata without orientation, sizes and preview. Empty if there is no metadata.
    exif: bytes = b""
    #: ICC profile for the pixels. Empty if there is no profile.
    profile: bytes = b""
    #: Messages for the user about conversions made while reading.
    notes: tuple[str, ...] = ()

    @property
    def size(self) -> str:
        """Width and height, for example ``"640x480"``."""
        return f"{self.pixels.shape[1]}x{self.pixels.shape[0]}"

    @property
    def has_alpha(self) -> bool:
        """Whether the image has an alpha channel."""
        return self.pixels.ndim == 3 and self.pixels.shape[2] == 4

    def with_pixels(self, pixels: Array) -> Picture:
        """Return a copy of the picture with different pixels, for example after enlarging it."""
        return replace(self, pixels=pixels)


def read_picture(path: str | os.PathLike[str], *, largest: int = LARGEST) -> Picture:
    """Read an image with at most `largest` pixels, or raise InputError as described in the module docstring."""
    path = Path(path)
    content = _content(path)
    with _as_input_errors(path), _opened(content) as image:
        if not 0 < image.width * image.height <= largest:
            raise InputError(f"{path} has {image.width}x{image.height} pixels, but only 1 to {largest:,} are supported")
        pixels_at_most = (ALLOWANCE + 4 * BEST_COMPRESSION * len(content)) // _BYTES_PER_PIXEL
        if image.width * image.height > pixels_at_most:  # Pillow would allocate all pixels before detecting the error.
            raise InputError(
                f"{path} declares {image.width}x{image.height} pixels, but has only {len(content):,} bytes; it may be "
                "truncated"
            )
        frames = 1 if image.format == "MPO" else getattr(image, "n_frames", 1)
        if frames > 1:
            raise InputError(f"{path} has {frames} frames or pages; split it into separate images")
        low = _low_bytes(content, image)
        image.load()
        pixels, notes = _pixels(path, image)
        if low is not None:
            pixels = pixels.astype(np.uint16) << 8 | low
        # Read EXIF after the pixels, because Pillow rotates TIFFs and removes their orientation when loading them.
        orientation, exif = _exif(image)
    # Drop a profile for another color space. CMYK profiles have already been applied, and others may be corrupted.
    profile = image.info.get("icc_profile") or b""
    fits = profile[16:20] == (b"GRAY" if pixels.ndim == 2 else b"RGB ")
    return Picture(_upright(pixels, orientation), exif, profile if fits else b"", notes)


def read_pictures(folder: str | os.PathLike[str]) -> list[Picture]:
    """Read all images in a folder, sorted by name. Files without an image suffix are skipped."""
    folder = Path(folder)
    if not folder.is_dir():
        raise InputError(f"{folder} is not a folder of images" if folder.exists() else f"{folder} does not exist")
    return [read_picture(path) for path in images_in(folder)]


def as_bytes(pixels: Array) -> NDArray[np.uint8]:
    """Round 16-bit pixels to 8 bits, so that 65535 becomes 255. 8-bit pixels are returned unchanged."""
    if pixels.dtype == np.uint16:
        pixels = (pixels.astype(np.uint32) + 128) // 257  # 65535 = 257 * 255
    return pixels.astype(np.uint8, copy=False)


def as_gray(pixels: Array) -> NDArray[np.uint8]:
    """Convert pixels to grayscale with 8 bits. Transparent pixels are shown on a white background."""
    pixels = as_bytes(pixels)
    if pixels.ndim == 2:
        return pixels
    gray = np.asarray(Image.fromarray(np.ascontiguousarray(pixels[..., :3])).convert("L"))
    if pixels.shape[2] == 4:
        opacity = pixels[..., 3] / 255
        gray = np.rint(255 + (gray - 255.0) * opacity).astype(np.uint8)
    return gray


def _upright(pixels: Array, orientation: int) -> Array:
    """Rotate and flip pixels so that an image with the given EXIF orientation is upright."""
    if orientation in (5, 6, 7, 8):
        pixels = pixels.swapaxes(0, 1)
    if orientation in (3, 4, 7, 8):
        pixels = pixels[::-1]
    if orientation in (2, 3, 6, 7):
        pixels = pixels[:, ::-1]
    return np.ascontiguousarray(pixels)


def _content(path: Path) -> bytes:
    """Return the contents of a file.

    Images are decoded in memory because Pillow would otherwise request as many bytes as the file header declares.
    """
    size = check_regular_file(path)
    if not 0 < size <= _BYTES_PER_PIXEL * LARGEST:
        raise InputError(f"{path} is too large for an image ({size:,} bytes)" if size else f"{path} is empty")
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
    """Context manager that converts errors raised while reading an image to an InputError with the file name."""
    try:
        yield
    except (InputError, MemoryError):
        raise
    except Exception as error:  # Pillow raises many exception types for corrupted files.
        known: dict[type[Exception], str] = {
            Image.DecompressionBombError: f" declares far more than {LARGEST:,} pixels and may be a decompression bomb",
            UnidentifiedImageError: " is not a readable image",
        }
        raise InputError(f"{path}{known.get(type(error), f' is corrupted: {first_line(error)}')}") from error


def _pixels(path: Path, image: Image.Image) -> tuple[Array, tuple[str, ...]]:
    """Return the pixels of a loaded image and notes to show to the user."""
    if image.mode.startswith("I"):
        values = np.asarray(image)
        low, high = values.min(), values.max()
        if low < 0 or high > 65535:
            raise InputError(f"{path} has values from {low} to {high}, but 8-bit or 16-bit grayscale is required")
        return values.astype(np.uint16), ()
    if image.mode not in _CONVERTED:
        raise InputError(f"{path} has pixels of mode {image.mode}, but 8-bit or 16-bit grayscale or color is required")
    if image.mode == "CMYK":
        return np.asarray(_from_cmyk(image)), ("CMYK was converted to RGB",)
    # A palette can have transparent colors, and in other modes one color can mark transparent pixels.
    transparent = image.mode in ("1", "L", "P", "RGB") and "transparency" in image.info
    return np.asarray(image.convert("RGBA" if transparent else _CONVERTED[image.mode])), ()


def _from_cmyk(image: Image.Image) -> Image.Image:
    with contextlib.suppress(ImageCms.PyCMSError, OSError, KeyError):  # The profile is missing or corrupted.
        source = ImageCms.ImageCmsProfile(io.BytesIO(image.info["icc_profile"]))
        turned = ImageCms.profileToProfile(image, source, ImageCms.createProfile("sRGB"), outputMode="RGB")
        if turned is not None:
            return turned
    return image.convert("RGB")


def _low_bytes(content: bytes, image: Image.Image) -> Array | None:
    """Return the low byte of each value in a 16-bit color image, or None for other images.

    Pillow reads only the high byte of each value. Decoding again with swapped byte order gives the low byte.
    """
    swapped = {"16B": "16L", "16L": "16B", "16N": "16B" if sys.byteorder == "little" else "16L"}
    # The last field of a tile contains the decoder arguments: the pixel layout, or a tuple that starts with it.
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
    """Return the orientation and the EXIF data without the tags for orientation and file layout."""
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
    except Exception:  # The pixels are readable even if the EXIF block is damaged.
        return 1, b""


class Format(NamedTuple):
    """Capabilities of an output file format, and the options passed to Pillow when writing it."""

    #: Pillow's name for the format.
    name: str
    #: Options for Pillow's `save`.
    options: dict[str, Any]
    #: Whether grayscale images can have 16 bits.
    deep_gray: bool = False
    #: Whether color images can have 16 bits.
    deep_color: bool = False
    #: Whether images can have an alpha channel.
    alpha: bool = True
    #: Whether files can contain EXIF metadata and an ICC profile.
    metadata: bool = True
    #: Maximum width and height in pixels.
    longest: int = 2**31 - 1


# Compression level 4 takes half as long as level 6, and files are 3% larger.
_PNG = Format("PNG", {"compress_level": 4}, deep_gray=True)
_JPEG = Format("JPEG", {"quality": 95, "subsampling": 0}, alpha=False, longest=65_500)
_TIFF = Format("TIFF", {"compression": "tiff_adobe_deflate"}, deep_gray=True, deep_color=True)
_WEBP = Format("WEBP", {"quality": 95}, longest=16_383)
_BMP = Format("BMP", {}, alpha=False, metadata=False)

#: Output formats by file name suffix.
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
    """Check whether the format of the file `path` can store an image after it is enlarged by a factor of `scale`.

    Return one message for each property of the image that would be lost. Raise InputError if the format cannot store
    the image at all.
    """
    path = Path(path)
    pixels = picture.pixels
    form = FORMATS[path.suffix.lower()]
    if not form.alpha and picture.has_alpha and bool((pixels[..., 3] < np.iinfo(pixels.dtype).max).any()):
        raise InputError(
            f"{path}: the image has transparency, which {form.name} does not support; save it as a .png file instead"
        )
    longest = scale * max(pixels.shape[:2])
    if longest > form.longest:
        raise InputError(
            f"{form.name} supports at most {form.longest:,} pixels per side, but {path} would have {longest:,}"
        )
    lost = []
    if pixels.dtype == np.uint16 and not _keeps_depth(picture, form):
        if form.deep_gray:
            lost.append(
                f"color {form.name} is written with 8 bits, so the lower 8 of 16 bits are lost; use .tif to keep them"
            )
        else:
            lost.append(f"{form.name} supports only 8 bits, so the lower 8 of 16 bits are lost")
    if _is_deep_tiff(picture, form):
        require("tifffile", f"{path}: writing 16-bit color TIFF", "data")
        if picture.exif:
            lost.append("16-bit color TIFF is written without EXIF metadata")
    if not form.metadata and (picture.exif or picture.profile):
        lost.append(f"{form.name} does not support EXIF metadata or ICC profiles, so they are lost")
    return tuple(lost)


def write_picture(path: str | os.PathLike[str], picture: Picture, force: bool = False) -> Path:
    """Write an image to a file atomically and return the path.

    The suffix of `path`, one of `FORMATS`, determines the format. If the format does not support 16 bits, values are
    rounded to 8 bits. An existing file is replaced only if `force` is True.
    """
    path = check_output(path, force, tuple(FORMATS))
    check_format(path, picture)
    form = FORMATS[path.suffix.lower()]
    pixels = picture.pixels
    if picture.has_alpha and not form.alpha:
        pixels = pixels[..., :3]  # `check_format` has verified that the image is opaque.
    if pixels.dtype == np.uint16 and not _keeps_depth(picture, form):
        pixels = as_bytes(pixels)
    encoded = _encoded(path, picture.with_pixels(np.ascontiguousarray(pixels)), form)
    with replace_file(path) as file:
        file.write(encoded)
    return path


def _encoded(path: Path, picture: Picture, form: Format) -> memoryview:
    """Encode an image in memory.

    Some encoders require a seekable file, and encoding in memory separates encoder errors from disk errors.
    """
    encoded = io.BytesIO()
    try:
        if _is_deep_tiff(picture, form):
            tifffile = require("tifffile", "writing 16-bit color TIFF", "data")
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
                del options["compression"]  # Pillow compresses with libtiff, which cannot write EXIF subdirectories.
            Image.fromarray(picture.pixels).save(encoded, form.name, **options)
    except (OSError, ValueError, RuntimeError) as error:
        raise InputError(f"{path} cannot be written: {first_line(error)}") from error
    return encoded.getbuffer()


def _keeps_depth(picture: Picture, form: Format) -> bool:
    """Return whether a format can store the image with 16 bits."""
    return form.deep_gray if picture.pixels.ndim == 2 else form.deep_color


def _is_deep_tiff(picture: Picture, form: Format) -> bool:
    """Return whether the output is a 16-bit color TIFF, which Pillow cannot write."""
    return form.name == "TIFF" and picture.pixels.dtype == np.uint16 and picture.pixels.ndim == 3
