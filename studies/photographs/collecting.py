"""Collect photographs with free licenses from Debian packages into a small archive of crops to train with.

``python -m studies.photographs.collecting PACKAGES OUT`` reads a folder of .deb files (``apt-get download`` of the
names in `PHOTOGRAPHS`), and adds the open images of scikit-image and scikit-learn. Photographs are reduced, which makes
them sharp and removes noise and JPEG artifacts, and cut into squares. The squares with the most detail are stored as
lossless WebP files until the archive has the requested size. No photograph is part of Set5, Set14, BSD100, Urban100 or
T91, or is Lena.
"""

from __future__ import annotations

import argparse
import io
import subprocess
import tempfile
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from mvrbm.vision import luminance
from studies.photographs.images import LICENSES, open_images

__all__ = ["HELD_OUT", "PHOTOGRAPHS", "main"]

Array = NDArray[Any]

_LOMIRI = "usr/share/backgrounds/{}.jpg"
_MATE = "usr/share/backgrounds/mate/nature/{}.jpg"
_PLASMA = "usr/share/wallpapers/{}/contents/images/2560x1600.jpg"
_LXQT = "usr/share/lxqt/wallpapers/{}"

#: Debian 12 packages, with the location of their photographs and the license and author of each. The licenses are from
#: the copyright file of the package, except in plasma-workspace-wallpapers (metadata of each wallpaper) and lxqt-themes
#: (a file named License). Drawings and renderings are left out.
PHOTOGRAPHS: dict[str, tuple[str, dict[str, str]]] = {
    "lomiri-wallpapers-16.04": (
        _LOMIRI,
        {
            "Bridge_by_Sander_Klootwijk": "CC-BY-SA-4.0, Sander Klootwijk",
            "Dragonfly_by_Bolly": "CC-BY-SA-4.0, Bolly",
            "Picture_0B_by_freespace": "CC-BY-4.0, Trevor Freespace",
            "Picture_1A_by_freespace": "CC-BY-4.0, Trevor Freespace",
            "Wine_by_Jakkub_Mede": "CC-BY-4.0, Jakub Mede",
            "aitzgorri_by_Aitzol_Berasategi": "CC-BY-4.0, Aitzol Berasategi",
            "free_by_Peter_Nerlich": "CC-BY-SA-4.0, Peter Nerlich",
            "friends_by_Aitzol_Berasategi": "CC-BY-4.0, Aitzol Berasategi",
            "greentock_by_Peter_Nerlich": "CC-BY-SA-4.0, Peter Nerlich",
            "life_by_Aitzol_Berasategi": "CC-BY-4.0, Aitzol Berasategi",
            "picosdeeuropa_by_Aitzol_Berasategi": "CC-BY-4.0, Aitzol Berasategi",
            "seeding_by_Clements_Engelhardt": "CC0-1.0, Clemens Engelhardt",
            "sunset_by_Aitzol_Berasategi": "CC-BY-4.0, Aitzol Berasategi",
        },
    ),
    "lomiri-wallpapers-20.04": (_LOMIRI, {"Kleiber_by_Lukas_Baubkus": "CC-BY-SA-3.0, Lukas Baubkus"}),
    "mate-backgrounds": (
        _MATE,
        {
            "Aqua": "GPL-2+, Charles Barbin",
            "Blinds": "GPL-2+, Lennart Poettering",
            "Dune": "GPL-2+, Marco Cogoni",
            "Garden": "GPL-2+, Charles Barbin",
            "GreenMeadow": "GPL-2+, Timothy Schellhase",
            "LadyBird": "GPL-2+, Charles Barbin",
            "RainDrops": "GPL-2+, blackcombwhistler07",
            "Storm": "GPL-2+, Sergey Nazarov",
            "TwoWings": "GPL-2+, Charles Barbin",
            "Wood": "GPL-2+, Jean-François Fortin Tam",
            "YellowFlower": "GPL-2+, Charles Barbin",
        },
    ),
    "plasma-workspace-wallpapers": (
        _PLASMA,
        {
            "BytheWater": "LGPL-3, Maciej Wiklo",
            "ColdRipple": "LGPL-3, Risto Saukonpää",
            "ColorfulCups": "LGPL-3, Dmitri Popov",
            "EveningGlow": "LGPL-3, Ian Hex",
            "FallenLeaf": "LGPL-3, Martin Klapetek",
            "Gray": "LGPL-3, Sigi Sagi",
            "Kite": "LGPL-3, Risto Saukonpää",
            "OneStandsOut": "LGPL-3, Risto Saukonpää",
            "Path": "LGPL-3, Risto Saukonpää",
        },
    ),
    "lxqt-themes": (
        _LXQT,
        {
            "after-the-rain.jpg": "CC-BY-SA-3.0, stefonarch",
            "appleflower.png": "CC-BY-SA-3.0, stefonarch",
            "beam.png": "CC-BY-SA-3.0, stefonarch",
            "butterfly.png": "CC-BY-SA-3.0, stefonarch",
            "drop.png": "CC-BY-SA-3.0, stefonarch",
            "flowers.png": "CC-BY-SA-3.0, stefonarch",
            "fog.jpg": "CC-BY-SA-3.0, stefonarch",
            "this-is-not-windows.jpg": "CC-BY-SA-3.0, stefonarch",
        },
    ),
}
#: Photographs whose crops are used only for validation.
HELD_OUT = (
    "Picture_1A_by_freespace",
    "picosdeeuropa_by_Aitzol_Berasategi",
    "LadyBird",
    "EveningGlow",
    "chelsea",
    "china",
)

# Photographs with at least this side are also used at a quarter of their size.
_LARGE = 1600
# Side of a crop in pixels.
_SIDE = 192
# Crops per validation photograph.
_HELD_OUT_CROPS = 4
# Minimum detail of a crop: mean square root of its Laplacian in gray levels.
_LEAST_DETAIL = 1.0


def photographs(packages: Path) -> Iterator[tuple[str, str, Array]]:
    """Yield the name, the license and the pixels of each photograph, once per size."""
    for package, (pattern, licenses) in PHOTOGRAPHS.items():
        (archive,) = packages.glob(f"{package}_*.deb")
        with tempfile.TemporaryDirectory() as folder:
            subprocess.run(["dpkg-deb", "-x", str(archive), folder], check=True)
            for name, license in licenses.items():
                with Image.open(Path(folder) / pattern.format(name)) as image:
                    whole = image.convert("RGB")
                # At full size, camera pictures are blurred by the lens and by the interpolation of colors.
                for factor in (2, 4) if min(whole.size) >= _LARGE else (2,):
                    size = (whole.width // factor, whole.height // factor)
                    yield name, f"{package}; {license}", np.asarray(whole.resize(size, Image.Resampling.BICUBIC))
    for name, pixels in open_images().items():
        yield name, LICENSES[name], np.stack([pixels] * 3, 2) if pixels.ndim == 2 else pixels


def crops(image: Array) -> list[tuple[float, Array]]:
    """Return the squares of an image with their amount of detail, sorted by decreasing detail."""
    found = []
    for top in range(0, image.shape[0] - _SIDE + 1, _SIDE):
        for left in range(0, image.shape[1] - _SIDE + 1, _SIDE):
            piece = image[top : top + _SIDE, left : left + _SIDE]
            gray = luminance(piece).astype(np.float32)
            detail = np.abs(gray[1:-1, 1:-1] * 4 - gray[2:, 1:-1] - gray[:-2, 1:-1] - gray[1:-1, 2:] - gray[1:-1, :-2])
            found.append((float(np.sqrt(detail).mean()), piece))
    return sorted(found, key=lambda pair: -pair[0])


def _encoded(pixels: Array) -> bytes:
    file = io.BytesIO()
    Image.fromarray(pixels).save(file, "WEBP", lossless=True, quality=60, method=4)
    return file.getvalue()


def main() -> None:
    """Write the archive: a ZIP file with the folders `color`, `gray` and `valid`, and a list of licenses."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("packages", type=Path, help="folder of .deb files")
    parser.add_argument("out", type=Path, help="ZIP file to write")
    parser.add_argument("--megabytes", type=float, default=26.0, help="size of the archive")
    parser.add_argument(
        "--color", type=float, default=0.35, help="fraction of crops in color; the others are luminance"
    )
    options = parser.parse_args()
    queue: list[tuple[float, str, Array]] = []
    licenses: dict[str, str] = {}
    with zipfile.ZipFile(options.out, "w") as archive:
        for number, (name, license, image) in enumerate(photographs(options.packages)):
            licenses[name] = license
            pieces = crops(image)
            if name in HELD_OUT:
                for index, (_, piece) in enumerate(pieces[:_HELD_OUT_CROPS]):
                    archive.writestr(f"valid/{name}-{number}-{index}.webp", _encoded(piece))
                continue
            # Photographs take turns: the n-th best crop of every photograph precedes the next best crop of any.
            for index, (detail, piece) in enumerate(pieces):
                if detail > _LEAST_DETAIL:
                    queue.append((index / len(pieces), f"{name}-{number}-{index}", piece))
            print(f"{name}: {image.shape}, {len(pieces)} crops", flush=True)
        queue.sort(key=lambda entry: entry[0])
        sizes = {"color": 0, "gray": 0}
        for _, name, piece in queue:
            kind = "color" if sizes["color"] < options.color * sum(sizes.values()) + 1 else "gray"
            content = _encoded(piece if kind == "color" else luminance(piece))
            if sum(sizes.values()) + len(content) > options.megabytes * 1e6:
                break
            sizes[kind] += len(content)
            archive.writestr(f"{kind}/{name}.webp", content)
        archive.writestr("LICENSES.txt", "".join(f"{name}: {license}\n" for name, license in licenses.items()))
        counts = {kind: sum(n.startswith(kind) for n in archive.namelist()) for kind in ("color", "gray", "valid")}
    print(f"{options.out}: {counts} crops of {_SIDE}x{_SIDE}, bytes {sizes}")


if __name__ == "__main__":
    main()
