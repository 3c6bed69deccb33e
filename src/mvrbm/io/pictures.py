"""Pictures from files and to files, with what people keep in them: 8 or 16 bits, transparency, EXIF, ICC profile.

What is read, and as what (:class:`Picture`):

=============================  ======================================================================
file                           pixels
=============================  ======================================================================
grey, RGB, RGBA, 8 bits        as they are
grey, 16 bits                  as they are
RGB, RGBA, 16 bits             as they are, from PNG and TIFF; Pillow alone would drop the low bytes
grey with alpha                RGBA, 8 bits
1 bit                          grey, 8 bits
palette                        RGB, or RGBA if it has transparent colours
CMYK                           RGB, by the profile in the file if there is one
YCbCr                          RGB
several pictures in a JPEG     the first one (phones hide previews and depth there)
=============================  ======================================================================

Refused, each in one line: what is no image, truncated, empty, animated or of many pages, of floats or of more than
`LARGEST` pixels. A damaged EXIF, and a profile of other colours than the picture's, are left out. Pictures are turned
upright as the EXIF orientation says, and the tag goes: what is written looks the same everywhere. Files are written
whole or not at all.
"""

from __future__ import annotations

import contextlib
import io
import os
import struct
import sys
import warnings
import zlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from mvrbm.io.arrays import InputError, _first_line, _images_in, _replace, check_output
from mvrbm.vision.colour import to_dtype, white

if TYPE_CHECKING:
    from PIL.Image import Exif, Image

__all__ = ["FORMATS", "LARGEST", "Picture", "check_format", "read_picture", "read_pictures", "write_picture"]

Array = NDArray[Any]

#: Pixels that a picture may have.
LARGEST = 2**26

_ORIENTATION = 0x0112
_EXIF, _GPS = 0x8769, 0x8825
_SIZES = (0xA002, 0xA003)  # of the former image, in pixels
# Who, when and with what; the rest of the first directory describes how the old file was laid out.
_KEPT = (0x010E, 0x010F, 0x0110, 0x0131, 0x0132, 0x013B, 0x8298)

# What the pixels have to be done to, by EXIF orientation, to stand upright.
_UPRIGHT: dict[int, Callable[[Array], Array]] = {
    2: lambda a: a[:, ::-1],
    3: lambda a: a[::-1, ::-1],
    4: lambda a: a[::-1],
    5: lambda a: a.swapaxes(0, 1),
    6: lambda a: np.rot90(a, -1),
    7: lambda a: a[::-1, ::-1].swapaxes(0, 1),
    8: lambda a: np.rot90(a, 1),
}

# Pillow's mode, and what it is turned into.
_AS = {
    **{mode: mode for mode in ("L", "RGB", "RGBA")},
    **dict.fromkeys(("LA", "La", "PA", "RGBa"), "RGBA"),
    **dict.fromkeys(("CMYK", "YCbCr", "RGBX"), "RGB"),
    "1": "L",
    "P": "RGB",
}


@dataclass(frozen=True)
class Picture:
    """An upright picture.

    Parameters
    ----------
    pixels : array (H, W), (H, W, 3) or (H, W, 4)
        Grey, RGB or RGBA, in bytes or 16-bit numbers.
    exif : bytes
        EXIF without orientation, sizes and preview; empty if there is none.
    profile : bytes
        ICC profile of the pixels; empty if there is none.
    notes : tuple of str
        What was lost in reading or would surprise.
    """

    pixels: Array
    exif: bytes = b""
    profile: bytes = b""
    notes: tuple[str, ...] = ()

    @property
    def size(self) -> str:
        """Width and height, as people write them."""
        return _size(self.pixels)

    def with_pixels(self, pixels: Array) -> Picture:
        """Return the picture with other pixels: larger ones, say."""
        return replace(self, pixels=pixels)


# -- reading ----------------------------------------------------------------------------------------


def read_picture(path: str | os.PathLike[str], *, largest: int = LARGEST) -> Picture:
    """Read a picture from a file.

    Parameters
    ----------
    path : path
        Any format that Pillow reads.
    largest : int
        Pixels that it may have.

    Returns
    -------
    Picture
        See the head of this module.

    Raises
    ------
    InputError
        If there is no such file, or it holds no picture that can be read. The message says why.
    """
    path = Path(path)
    with _troubles_of(path), _opened(path) as image:
        if image.width * image.height > largest:
            raise InputError(f"{path} has {image.width}x{image.height} pixels: {largest:,} are read at most")
        if 0 in image.size:
            raise InputError(f"{path} is empty: it has {image.width}x{image.height} pixels")
        frames = 1 if image.format == "MPO" else getattr(image, "n_frames", 1)
        if frames > 1:
            raise InputError(f"{path} has {frames} frames or pages: split it, one picture is wanted")
        low = _low_bytes(path, image)
        image.load()
        pixels, notes = _pixels(path, image)
        if low is not None:
            pixels = pixels.astype(np.uint16) << 8 | low
        orientation, exif = _exif(image)  # after the pixels: TIFFs are turned upright on the way
    turn = _UPRIGHT.get(orientation)
    upright = pixels if turn is None else np.ascontiguousarray(turn(pixels))
    # Of the colours that the pixels have now: CMYK's is used up, and a damaged one is of none.
    profile = image.info.get("icc_profile") or b""
    fits = profile[16:20] == (b"GRAY" if pixels.ndim == 2 else b"RGB ")
    return Picture(upright, exif, profile if fits else b"", notes)


def read_pictures(folder: str | os.PathLike[str]) -> list[Picture]:
    """Read all pictures of a folder, sorted by name; files with other endings than images have are left out.

    Parameters
    ----------
    folder : path
        Where they are.
    """
    folder = Path(folder)
    if not folder.is_dir():
        raise InputError(f"{folder} is not a folder of images" if folder.exists() else f"{folder}: no such folder")
    return [read_picture(path) for path in _images_in(folder)]


@contextlib.contextmanager
def _opened(path: Path) -> Iterator[Image]:
    from PIL import Image

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        with Image.open(path) as image:
            yield image


@contextlib.contextmanager
def _troubles_of(path: Path) -> Iterator[None]:
    from PIL import Image, UnidentifiedImageError

    try:
        yield
    except InputError:
        raise
    except FileNotFoundError:
        raise InputError(f"{path}: no such file") from None
    except IsADirectoryError:
        raise InputError(f"{path} is a folder: name an image") from None
    except PermissionError as error:
        raise InputError(f"{path} cannot be read: {error.strerror}") from error
    except Image.DecompressionBombError:
        raise InputError(f"{path} claims far more than {LARGEST:,} pixels: a decompression bomb?") from None
    except UnidentifiedImageError:
        what = "is empty" if path.stat().st_size == 0 else "is not an image that can be read"
        raise InputError(f"{path} {what}") from None
    except MemoryError:
        raise
    except Exception as error:  # Pillow's readers raise nearly anything for a damaged file
        raise InputError(f"{path} is damaged: {_first_line(error)}") from error


def _pixels(path: Path, image: Image) -> tuple[Array, tuple[str, ...]]:
    """Pixels of a loaded image, and what is to be told."""
    if image.mode.startswith("I"):
        return _sixteen_bits(path, image), ()
    if image.mode not in _AS:
        raise InputError(f"{path} has pixels of mode {image.mode}: grey or colour with 8 or 16 bits is wanted")
    if image.mode == "CMYK":
        return np.asarray(_from_cmyk(image)), ("CMYK was turned into RGB",)
    transparent = image.mode in ("1", "L", "P", "RGB") and "transparency" in image.info  # a palette's, or a colour key
    converted = image.convert("RGBA" if transparent else _AS[image.mode])
    return np.asarray(converted), ()


def _sixteen_bits(path: Path, image: Image) -> NDArray[np.uint16]:
    values = np.asarray(image)
    low, high = values.min(), values.max()
    if low < 0 or high > 65535:
        raise InputError(f"{path} has values from {low} to {high}: grey with 8 or 16 bits is wanted")
    return values.astype(np.uint16)


def _from_cmyk(image: Image) -> Image:
    from PIL import ImageCms

    profile = image.info.get("icc_profile")
    if profile:
        with contextlib.suppress(ImageCms.PyCMSError, OSError):  # a damaged profile is none
            source = ImageCms.ImageCmsProfile(io.BytesIO(profile))
            turned = ImageCms.profileToProfile(image, source, ImageCms.createProfile("sRGB"), outputMode="RGB")
            if turned is not None:
                return turned
    return image.convert("RGB")


def _low_bytes(path: Path, image: Image) -> Array | None:
    """Low bytes of colour with 16 bits, None for other images.

    Pillow keeps the high byte of each number. Told that the other byte is the high one, it keeps that.
    """
    swapped = {"16B": "16L", "16L": "16B", "16N": "16B" if sys.byteorder == "little" else "16L"}
    kinds = [_packing(tile) for tile in getattr(image, "tile", ())]
    if not kinds or any(kind[:-3] not in ("RGB;", "RGBA;") or kind[-3:] not in swapped for kind in kinds):
        return None
    with _opened(path) as again:
        tiles: list[Any] = []
        for tile, kind in zip(getattr(again, "tile", ()), kinds, strict=True):
            other = kind[:-3] + swapped[kind[-3:]]
            args = other if isinstance(tile[3], str) else (other, *tile[3][1:])
            tiles.append(tile._replace(args=args) if hasattr(tile, "_replace") else (*tile[:3], args))
        again.tile = tiles  # type: ignore[attr-defined]
        return np.asarray(again)


def _packing(tile: Any) -> str:
    """How the pixels of a tile are packed; empty where its decoder is told otherwise."""
    args = tile[3]
    first = args[0] if isinstance(args, tuple) and args else args
    return first if isinstance(first, str) else ""


def _exif(image: Image) -> tuple[int, bytes]:
    """Orientation, and EXIF without it and without what was true of the old file only."""
    try:
        exif = image.getexif()
        return exif.get(_ORIENTATION, 1), _without_layout(exif)
    except Exception:  # whatever is wrong in it, the picture is not
        return 1, b""


def _without_layout(exif: Exif) -> bytes:
    from PIL import Image

    kept = Image.Exif()
    for tag in _KEPT:
        if tag in exif:
            kept[tag] = exif[tag]
    for directory in (_EXIF, _GPS):
        entries = {tag: value for tag, value in exif.get_ifd(directory).items() if tag not in _SIZES}
        if entries:
            kept.get_ifd(directory).update(entries)
            kept[directory] = entries
    return kept.tobytes() if len(kept) else b""


# -- writing ----------------------------------------------------------------------------------------


class Format(NamedTuple):
    """What a file format can hold, and how Pillow writes it."""

    name: str
    options: dict[str, Any]
    depths: tuple[int, ...] = (8,)
    alpha: bool = True
    metadata: bool = True
    longest: int = 2**31 - 1


_JPEG = Format("JPEG", {"quality": 95, "subsampling": 0}, alpha=False, longest=65_500)
_TIFF = Format("TIFF", {"compression": "tiff_adobe_deflate"}, depths=(8, 16))

#: Formats that pictures are written in, by the ending of the name.
FORMATS: dict[str, Format] = {
    ".png": Format("PNG", {"compress_level": 6}, depths=(8, 16)),
    ".jpg": _JPEG,
    ".jpeg": _JPEG,
    ".tif": _TIFF,
    ".tiff": _TIFF,
    ".webp": Format("WEBP", {"quality": 95}, longest=16_383),
    ".bmp": Format("BMP", {}, alpha=False, metadata=False),
}


def check_format(path: str | os.PathLike[str], picture: Picture, scale: int = 1) -> tuple[str, ...]:
    """Say early, before the work, whether a file's format can hold a picture.

    Parameters
    ----------
    path : path
        Where to; its ending says what.
    picture : Picture
        What is to be written, or will be enlarged before.
    scale : int
        By how much it will be enlarged.

    Returns
    -------
    tuple of str
        What will be lost.
    """
    path, pixels = Path(path), picture.pixels
    form = FORMATS[path.suffix.lower()]
    if not form.alpha and _has_alpha(pixels) and bool((pixels[..., 3] < white(pixels.dtype)).any()):
        raise InputError(f"{path}: {form.name} has no transparency, and the picture has some: write a .png")
    longest = scale * max(pixels.shape[:2])
    if longest > form.longest:
        raise InputError(f"{path}: {form.name} has {form.longest:,} pixels a side at most, not {longest:,}")
    lost = []
    if pixels.dtype == np.uint16 and 16 not in form.depths:
        lost.append(f"{form.name} has 8 bits: the lower 8 of 16 are lost")
    if _is_deep_tiff(pixels, form):
        _tifffile(path)
        if picture.exif:
            lost.append("TIFF in colour with 16 bits is written without EXIF: it is lost")
    if not form.metadata and (picture.exif or picture.profile):
        lost.append(f"{form.name} holds no EXIF and no ICC profile: they are lost")
    return tuple(lost)


def write_picture(path: str | os.PathLike[str], picture: Picture, force: bool = False) -> Path:
    """Write a picture to a file, whole or not at all.

    Parameters
    ----------
    path : path
        Where to; its ending, one of `FORMATS`, says what. JPEG and WebP are written at quality 95.
    picture : Picture
        What to write. 16-bit numbers become bytes where the format has no more; see :func:`check_format`.
    force : bool
        Whether a file that is there may be replaced.
    """
    path = check_output(path, force, tuple(FORMATS))
    check_format(path, picture)
    form = FORMATS[path.suffix.lower()]
    pixels = picture.pixels
    if _has_alpha(pixels) and not form.alpha:
        pixels = pixels[..., :3]
    if pixels.dtype == np.uint16 and 16 not in form.depths:
        pixels = to_dtype(pixels.astype(np.float32) / np.float32(65535), np.uint8)
    picture = picture.with_pixels(np.ascontiguousarray(pixels))
    _replace(path, lambda file: _encode(file, path, picture, form))
    return path


def _encode(file: IO[bytes], path: Path, picture: Picture, form: Format) -> None:
    if picture.pixels.dtype == np.uint16 and form.name == "PNG":
        _write_png(file, picture)
        return
    encoded = io.BytesIO()  # for encoders that go back and forth, and to tell their errors from the disk's
    try:
        (_write_deep_tiff if _is_deep_tiff(picture.pixels, form) else _write_by_pillow)(encoded, path, picture, form)
    except (OSError, ValueError, RuntimeError) as error:
        raise InputError(f"{path}: {_first_line(error)}") from error
    file.write(encoded.getbuffer())


def _write_by_pillow(encoded: IO[bytes], path: Path, picture: Picture, form: Format) -> None:
    from PIL import Image

    metadata = {"exif": picture.exif, "icc_profile": picture.profile} if form.metadata else {}
    options = {**form.options, **{key: value for key, value in metadata.items() if value}}
    if form is _TIFF and picture.exif:
        del options["compression"]  # libtiff, which packs, cannot write EXIF's inner directories
    Image.fromarray(picture.pixels).save(encoded, form.name, **options)


def _is_deep_tiff(pixels: Array, form: Format) -> bool:
    """Whether this is colour with 16 bits, of which Pillow cannot make a TIFF."""
    return form is _TIFF and pixels.dtype == np.uint16 and pixels.ndim == 3


def _write_deep_tiff(encoded: IO[bytes], path: Path, picture: Picture, form: Format) -> None:
    pixels = picture.pixels
    samples = ["unassalpha"] if _has_alpha(pixels) else None
    profile = picture.profile or None
    _tifffile(path).imwrite(encoded, pixels, photometric="rgb", extrasamples=samples, iccprofile=profile)


def _tifffile(path: Path) -> Any:
    try:
        import tifffile
    except ImportError:
        raise InputError(
            f"{path}: TIFF in colour with 16 bits needs tifffile (pip install tifffile): or write a .png"
        ) from None
    return tifffile


def _write_png(file: IO[bytes], picture: Picture) -> None:
    """Write a PNG of 16 bits, which Pillow can do for grey only."""
    pixels = picture.pixels
    height, width = pixels.shape[:2]
    kind = {2: 0, 3: 2, 4: 6}[pixels.ndim if pixels.ndim == 2 else pixels.shape[2]]

    def chunk(name: bytes, content: bytes) -> None:
        file.write(struct.pack(">I", len(content)) + name + content)
        file.write(struct.pack(">I", zlib.crc32(name + content)))

    file.write(b"\x89PNG\r\n\x1a\n")
    chunk(b"IHDR", struct.pack(">IIBBBBB", width, height, 16, kind, 0, 0, 0))
    if picture.profile:
        chunk(b"iCCP", b"ICC profile\0\0" + zlib.compress(picture.profile))
    if picture.exif:
        chunk(b"eXIf", picture.exif.removeprefix(b"Exif\0\0"))
    packer, former = zlib.compressobj(6), np.zeros(0, np.uint8)
    for row in pixels:
        line = row.astype(">u2").view(np.uint8).reshape(-1)
        packed = packer.compress(b"\2" + (line - former if len(former) else line).tobytes())  # 2: minus the row above
        former = line
        if packed:
            chunk(b"IDAT", packed)
    chunk(b"IDAT", packer.flush())
    chunk(b"IEND", b"")


def _has_alpha(pixels: Array) -> bool:
    return pixels.ndim == 3 and pixels.shape[2] == 4


def _size(pixels: Array) -> str:
    return f"{pixels.shape[1]}x{pixels.shape[0]}"
