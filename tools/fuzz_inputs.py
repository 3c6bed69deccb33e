"""Damaged inputs for `tools.fuzz`: valid files of every kind, and functions that damage their bytes and descriptions.

An input maps file names to contents. Instead of contents, a name can map to something that is not a regular file: a
pipe, a device or a folder.
"""

from __future__ import annotations

import functools
import gzip
import io
import json
import random
import struct
import tempfile
import warnings
import zipfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np

# Stand-ins for contents: the fuzzer creates these instead of a file.
PIPE = "a pipe"
DEVICE = "a device"
FOLDER = "a folder"

Files = dict[str, bytes | str]
Make = Callable[[random.Random], Files]

_ODD_INTS = [0, 1, 2, 7, 8, 0x7F, 0x80, 0xFF, 0xFFFF, 0x7FFFFFFF, 0x80000000, 0xFFFFFFFF, 2**40, 2**63 - 1, 2**64 - 1]
_ODD_FLOATS = [0.0, -0.0, 1e-40, 1.0, -1.0, 90.0, -90.0, 1e4, 1e10, 1e19, -1e30, 1e38, float("inf"), float("nan")]
_ODD_VALUES: list[Any] = [
    *(None, True, False, 0, 1, -1, 2, 0.5, 1e300, -0.0, 10**6, 2**31, 2**63, 10**30, "", "x", "visible", "é", "\0"),
    *([], {}, [0], [1], [-1], [2, 3], [10**9, 10**9], ["a"], [[1]], {"a": 1}, [1] * 70, float("nan"), float("inf")),
    *("bernoulli", "gaussian", "categorical", "kronecker", "dense", "cp", "mpo", "float64", "MVRBM", "TVRBM", "RBM"),
    *("gaussian-learned", "poisson", "rectified", "tucker", "<U500000000", "|O", [30000, 30000], [1, 1], [1] * 30),
]
_ODD_KEYS = ["x", "visible", "", "rank", "shape", "bias_shape", "classes", "stack", "estimator"]
_ODD_DIGITS = (b"9" * 12, b"0", b"-1", b"1e9", b"()", b"'a'", b"None")


def _flip_bit(out: bytearray, at: int, end: int, rng: random.Random, others: list[bytes]) -> None:
    if out:
        out[at] ^= 1 << rng.randrange(8)


def _set_byte(out: bytearray, at: int, end: int, rng: random.Random, others: list[bytes]) -> None:
    if out:
        out[at] = rng.randrange(256)


def _truncate(out: bytearray, at: int, end: int, rng: random.Random, others: list[bytes]) -> None:
    del out[at:]


def _insert_bytes(out: bytearray, at: int, end: int, rng: random.Random, others: list[bytes]) -> None:
    out[at:at] = rng.randbytes(rng.randrange(1, 17))


def _delete_bytes(out: bytearray, at: int, end: int, rng: random.Random, others: list[bytes]) -> None:
    del out[at : at + rng.randrange(1, 17)]


def _append_other_file(out: bytearray, at: int, end: int, rng: random.Random, others: list[bytes]) -> None:
    other = rng.choice(others)
    cut = rng.randrange(len(other) + 1)
    out[at:] = other[cut:]


def _set_odd_integer(out: bytearray, at: int, end: int, rng: random.Random, others: list[bytes]) -> None:
    width = rng.choice("HIQ")
    value = rng.choice(_ODD_INTS) % 2 ** (8 * struct.calcsize(width))
    packed = struct.pack(rng.choice("<>") + width, value)
    out[at : at + len(packed)] = packed


def _replace_all(out: bytearray, at: int, end: int, rng: random.Random, others: list[bytes]) -> None:
    out[:] = rng.randbytes(rng.randrange(64))


def _replace_digit(out: bytearray, at: int, end: int, rng: random.Random, others: list[bytes]) -> None:
    digits = [i for i, byte in enumerate(out[:end]) if 48 <= byte <= 57]
    if digits:
        where = rng.choice(digits)
        out[where : where + 1] = rng.choice(_ODD_DIGITS)


# Each function changes `out` in place, at the position `at` or before `end`.
_DAMAGES = (
    _flip_bit,
    _set_byte,
    _truncate,
    _insert_bytes,
    _delete_bytes,
    _append_other_file,
    _set_odd_integer,
    _replace_all,
    _replace_digit,
)
# Share of damage that can be anywhere. The rest is in the header, because readers decide by it.
_ANYWHERE = 0.4
# Bytes that count as header.
_HEADER = 160


def damage(data: bytes, rng: random.Random, others: list[bytes]) -> bytes:
    """Return a copy of `data` that is damaged in one to four ways. `others` are valid files of the same format."""
    out = bytearray(data)
    for _ in range(rng.choice((1, 1, 1, 2, 4))):
        apply = _DAMAGES[rng.randrange(len(_DAMAGES))]
        end = len(out) if rng.random() < _ANYWHERE else min(len(out), _HEADER)
        at = rng.randrange(end) if end else 0
        apply(out, at, end, rng, others)
    return bytes(out)


def damage_values(tree: Any, rng: random.Random) -> Any:
    """Return a copy of a JSON value with one entry changed, renamed, repeated or deleted."""
    tree = json.loads(json.dumps(tree))
    node = tree
    while True:
        keys = list(node) if isinstance(node, dict) else list(range(len(node)))
        if not keys:
            return tree
        key = rng.choice(keys)
        child = node[key]
        if isinstance(child, dict | list) and child and rng.random() < 0.8:
            node = child
            continue
        kind = rng.randrange(5)
        if kind == 0:
            del node[key]
        elif kind == 1 and isinstance(node, dict):
            node[rng.choice(_ODD_KEYS)] = node.pop(key)
        elif kind == 2 and isinstance(node, list):
            node.extend([child] * rng.choice((1, 10, 300)))
        else:
            node[key] = rng.choice(_ODD_VALUES)
        return tree


def damage_json(text: bytes, rng: random.Random) -> bytes:
    """Return a JSON text in which one to three entries are damaged."""
    tree = json.loads(text)
    for _ in range(rng.choice((1, 1, 2, 3))):
        tree = damage_values(tree, rng)
    return json.dumps(tree).encode()


def damage_tensors(weights: bytes, rng: random.Random) -> bytes:
    """Return a safetensors file with a damaged header, or with odd numbers in its tensors."""
    length = int.from_bytes(weights[:8], "little")
    head, body = weights[8 : 8 + length], bytearray(weights[8 + length :])
    if rng.random() < 0.5:
        head = damage_json(head, rng)
    else:
        for _ in range(rng.choice((1, 2, 8))):
            at = rng.randrange(max(1, len(body) // 4)) * 4
            body[at : at + 4] = struct.pack("<f", rng.choice(_ODD_FLOATS))
    return len(head).to_bytes(8, "little") + head + bytes(body)


# -- arrays and images ------------------------------------------------------------------------------


def _idx(array: Any, code: int) -> bytes:
    sizes = b"".join(size.to_bytes(4, "big") for size in array.shape)
    return bytes([0, 0, code, array.ndim]) + sizes + bytes(array.tobytes())


def _npy(array: Any) -> bytes:
    buffer = io.BytesIO()
    np.save(buffer, array)
    return buffer.getvalue()


def _zip(members: dict[str, bytes], how: int = zipfile.ZIP_STORED) -> bytes:
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w", how) as archive:
        for name, content in members.items():
            archive.writestr(name, content)
    return buffer.getvalue()


_ARRAYS = [
    np.arange(24, dtype=np.uint8).reshape(2, 3, 4),
    np.linspace(0, 1, 10, dtype=np.float32).reshape(2, 5),
    np.asfortranarray(np.ones((3, 4))),
    np.zeros((4, 2, 2), np.int64),
    np.array([[True, False]]),
]
_IDX = [
    _idx(np.arange(24, dtype=np.uint8).reshape(2, 3, 4), 0x08),
    _idx(np.arange(6, dtype=">i2").reshape(2, 3), 0x0B),
    _idx(np.ones((2, 2), ">f8"), 0x0E),
    _idx(np.arange(9, dtype=np.uint8), 0x08),
]
_NPY = [_npy(array) for array in _ARRAYS]
_NPZ = [
    _zip({"data.npy": _NPY[0]}),
    _zip({"data.npy": _NPY[1]}, zipfile.ZIP_DEFLATED),
    _zip({"a.npy": _NPY[2], "b.npy": _NPY[3]}, zipfile.ZIP_DEFLATED),
]
_SHARDS = [_npy(np.full((n, 3, 2), n, dtype)) for dtype in (np.uint8, np.float32, np.float64) for n in (0, 2, 3)]


def idx_input(rng: random.Random) -> Files:
    inner = rng.choice(_IDX)
    kind = rng.randrange(3)
    if kind == 0:
        return {"file": damage(inner, rng, _IDX)}
    if kind == 1:
        return {"file": gzip.compress(damage(inner, rng, _IDX), 1)}
    return {"file": damage(gzip.compress(inner, 1), rng, _IDX)}


def npz_input(rng: random.Random) -> Files:
    kind = rng.randrange(3)
    if kind == 0:
        return {"file": damage(rng.choice(_NPY), rng, _NPY)}
    if kind == 1:
        how = rng.choice((zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED))
        return {"file": _zip({"data.npy": damage(rng.choice(_NPY), rng, _NPY)}, how)}
    return {"file": damage(rng.choice(_NPZ), rng, _NPZ)}


def shards_input(rng: random.Random) -> Files:
    start = rng.randrange(3) * 3  # Most shards of an input have the same dtype.
    files: Files = {f"{part}.npy": _SHARDS[start + rng.randrange(1, 3)] for part in range(rng.randrange(1, 4))}
    name = rng.choice(list(files))
    kind = rng.randrange(4)
    content = rng.choice(_SHARDS)
    files[name] = content if kind == 0 else rng.choice(_NPZ) if kind == 1 else damage(content, rng, _SHARDS)
    return files


_TABLES = [
    b"a,b,c\n1,2.5,x\n3,,y\n-4,1e3,x\n",
    b"0;1;2\n10;20;255\n0;3;4\n",
    b'1\t2\n3\t"4"\nnan\t-inf\n',
    '\ufeffname,größe\n"a\nb",1\nc,2\n'.encode(),
]
_DOCUMENTS = {
    "file.txt": [b"some words about topics\nmore words about models\n", "über größe words\nwords größe\n".encode()],
    "file.csv": [b'text,label\nsome words here,1\n"words,\nmore words",2\n', b"text\nwords words\nother words\n"],
    "file.svm": [b"0 1:2 3:1\n1 2:1 # words\n", b"+1 0:1.5 7:2\n-1 7:1\n"],
}
_ALIGNMENTS = [
    b">one first\nMK-\nAC\n\n>two\nMKWAC\n>three\n-KWXE\n",
    b">one\nMK-AC\n>two\nMKklWAC\n>three\n.-KW?E\n",
    b"# STOCKHOLM 1.0\n#=GF ID x\none MK-\ntwo AC.\n\none AC\ntwo DE\n//\n",
    b">a\r\nACGU\r\n>b\r\nNNGU\r\n",
]


@functools.cache
def _parquet() -> list[bytes]:
    try:
        import pyarrow as pa  # type: ignore[import-untyped, unused-ignore]
        from pyarrow import parquet
    except ImportError:
        return []
    found = []
    for compression in ("none", "zstd"):
        buffer = io.BytesIO()
        table = pa.table({"a": [1, 2, 3, None], "b": [0.5, 1.5, 2.5, 3.5], "c": ["x", "y", "x", None]})
        parquet.write_table(table, buffer, compression=compression)
        found.append(buffer.getvalue())
    return found


def table_input(rng: random.Random) -> Files:
    kind, text = rng.randrange(4), damage(rng.choice(_TABLES), rng, _TABLES)
    if kind == 0 and _parquet():
        return {"file.parquet": damage(rng.choice(_parquet()), rng, _parquet())}
    if kind == 1:
        return {"file.csv.gz": gzip.compress(text, 1)}
    if kind == 2:
        return {"file.csv.gz": damage(gzip.compress(text, 1), rng, _TABLES)}
    return {"file.csv": text}


@functools.cache
def _sparse_counts() -> list[bytes]:
    from scipy import sparse

    found = []
    for compressed in (True, False):
        buffer = io.BytesIO()
        sparse.save_npz(buffer, sparse.csr_matrix([[1.0, 0, 2], [0, 3, 0]]), compressed=compressed)
        found.append(buffer.getvalue())
    return found


def documents_input(rng: random.Random) -> Files:
    kinds = {**_DOCUMENTS, "file.npz": _sparse_counts()}
    name = rng.choice(list(kinds))
    if name == "file.npz" and rng.random() < 0.7:  # Damage the arrays before their checksums are computed.
        with zipfile.ZipFile(io.BytesIO(rng.choice(kinds[name]))) as archive:
            members = {entry: archive.read(entry) for entry in archive.namelist()}
        entry = rng.choice(list(members))
        members[entry] = damage(members[entry], rng, list(members.values()))
        return {name: _zip(members, rng.choice((zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED)))}
    return {name: damage(rng.choice(kinds[name]), rng, kinds[name])}


def alignment_input(rng: random.Random) -> Files:
    """Generate an alignment, of which half are compressed before or after the damage."""
    text = rng.choice(_ALIGNMENTS)
    how = rng.randrange(4)
    if how == 0:
        return {"file.fasta.gz": gzip.compress(damage(text, rng, _ALIGNMENTS), 1)}
    if how == 1:
        return {"file.fasta.gz": damage(gzip.compress(text, 1), rng, _ALIGNMENTS)}
    return {"file.fasta": damage(text, rng, _ALIGNMENTS)}


@functools.cache
def _pictures() -> list[tuple[str, bytes]]:
    from PIL import Image

    values = np.random.default_rng(0).integers(0, 256, (6, 5, 4), dtype=np.uint8)
    exif = Image.Exif()
    exif[0x0112] = 6
    found = []
    for kind in ("PNG", "JPEG", "TIFF", "WEBP", "BMP", "GIF", "PPM"):
        for mode in ("L", "RGB", "RGBA", "P", "1", "CMYK", "I;16"):
            buffer = io.BytesIO()
            image = Image.fromarray(values).convert("RGB").convert("L" if mode == "I;16" else mode)
            image = Image.fromarray(np.asarray(image).astype(np.uint16) << 8) if mode == "I;16" else image
            try:
                image.save(buffer, kind, exif=exif)
            except (OSError, ValueError, KeyError):
                continue  # The format does not support this mode.
            found.append((kind, buffer.getvalue()))
    eps = b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 9 9\n%%EndComments\nshowpage\n"
    return [*found, ("EPS", eps)]


def image_input(rng: random.Random) -> Files:
    pictures = _pictures()
    kind, content = rng.choice(pictures)
    return {"file.png": damage(content, rng, [other for name, other in pictures if name == kind])}


# -- models -----------------------------------------------------------------------------------------


class Folders:
    """Returns damaged copies of model folders and checkpoints.

    Parameters
    ----------
    write : callable
        Writes valid folders into a given folder, each under a different name.
    """

    def __init__(self, write: Callable[[Path], None]) -> None:
        with tempfile.TemporaryDirectory() as home:
            write(Path(home))
            found = [place for place in sorted(Path(home).rglob("*")) if (place / "config.json").is_file()]
            self.seeds = [{file.name: file.read_bytes() for file in sorted(place.iterdir())} for place in found]
        self.by_name: dict[str, list[bytes]] = {}
        for seed in self.seeds:
            for name, content in seed.items():
                self.by_name.setdefault(name, []).append(content)

    def __call__(self, rng: random.Random) -> Files:
        files: Files = dict(rng.choice(self.seeds))
        name = rng.choice(list(files))
        content, kind = files[name], rng.randrange(100)
        assert isinstance(content, bytes)
        if kind == 0:
            files[name] = rng.choice((PIPE, DEVICE, FOLDER))
        elif kind == 1:
            del files[name]
        elif kind < 30:
            files[name] = damage(content, rng, self.by_name[name])
        else:
            files[name] = (damage_json if name.endswith(".json") else damage_tensors)(content, rng)
        return files


def images() -> Any:
    """Return the samples that models are fitted to."""
    return np.random.default_rng(0).random((8, 3, 2)).astype(np.float32)


_QUICK: dict[str, Any] = {"n_epochs": 1, "random_state": 0, "device": "cpu"}


def write_models(home: Path) -> None:
    from mvrbm import MMVRBM, MVRBM, RBM, TVRBM, BoltzmannMachine, Dense, Gaussian, Kronecker, save

    data = images()
    MVRBM((2, 2), rank=2, **_QUICK).fit(data).save(home / "1")
    RBM(3, visible="gaussian", **_QUICK).fit(data.reshape(8, 6)).save(home / "2")
    TVRBM((2, 2, 2), **_QUICK).fit(data[..., None]).save(home / "3")
    MMVRBM((2, 2), **_QUICK).fit({"a": data, "b": data}).save(home / "4")
    save(BoltzmannMachine(Gaussian((3, 2)), Gaussian((2, 2)), Kronecker()), home / "5")
    save(BoltzmannMachine(Gaussian((3, 2), learn_variance=True), Gaussian(4), Dense()).double(), home / "6")


def write_stacks(home: Path) -> None:
    from mvrbm import DeepMVRBM, DeepMVRBMClassifier

    data, labels = images(), np.array(["a", "bc"] * 4)
    DeepMVRBM([(2, 2), (2, 1)], **_QUICK).fit(data).save(home / "1")
    DeepMVRBM([(2, 2)] * 3, visible="gaussian", **_QUICK).fit(data).save(home / "2")
    DeepMVRBMClassifier([(2, 2), (2, 1)], **_QUICK).fit(data, labels).save(home / "3")


def write_classifiers(home: Path) -> None:
    from mvrbm import ClassificationMVRBM, MVRBMClassifier

    data, labels = images(), np.array(["a", "bc"] * 4)
    MVRBMClassifier((2, 2), **_QUICK).fit(data, labels).save(home / "1")
    ClassificationMVRBM((2, 2), **_QUICK).fit(data, np.arange(8) % 3).save(home / "2")


def write_sweeps(home: Path) -> None:
    from mvrbm import MVRBM, Sweep
    from mvrbm.training import Recipe

    settings: list[dict[str, Any]] = [{"recipe": Recipe(learning_rate=0.05)}, {"negative": "pcd", "n_chains": 3}]
    for number, options in enumerate(settings):
        sweep = Sweep(MVRBM((2, 2), **_QUICK, **options), {"rank": [1, 2]}).fit(images())
        sweep.best_estimator_.save(home / str(number))


def write_super_resolvers(home: Path) -> None:
    from mvrbm.vision import SuperResolver

    image = np.random.default_rng(0).integers(0, 256, (20, 20), dtype=np.uint8)
    for scale in (2, 3):
        size: dict[str, Any] = {"patch": 3, "hidden_shape": (2, 2), "symmetric": False}
        model = SuperResolver(scale, **size, n_patches=20, n_epochs=1, device="cpu")
        model.fit([image]).save(home / str(scale))


def write_imputers(home: Path) -> None:
    import pandas as pd  # type: ignore[import-untyped, unused-ignore]

    from mvrbm import MVRBMImputer

    rng = np.random.default_rng(0)
    table, arrays = rng.normal(size=(9, 4)), rng.normal(size=(3, 4, 3))
    table[rng.random(table.shape) < 0.2] = np.nan
    table[:, 3] = np.nan  # No value of this column is known.
    arrays[0, 0, 0] = np.nan
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "columns .* have no known entries")
        MVRBMImputer(random_state=0, device="cpu", n_factors=2).fit(table).save(home / "1")
    MVRBMImputer("rectified", n_hidden=3, sample_axes=2, n_factors=1, **_QUICK).fit(arrays).save(home / "2")
    frame = pd.DataFrame({"number": [1.5, 2.5, None, 4.0], "kind": ["a", "b", None, "a"], "one": ["c"] * 4})
    MVRBMImputer("bernoulli", n_hidden=2, n_factors=1, **_QUICK).fit(frame).save(home / "3")


def write_detectors(home: Path) -> None:
    from mvrbm import MVRBMOutlierDetector

    MVRBMOutlierDetector(**_QUICK).fit(images()).save(home / "1")
    MVRBMOutlierDetector((2, 2), block_shape=(1, 2), n_masks=2, **_QUICK).fit(images() * 3).save(home / "2")
    MVRBMOutlierDetector(3, contamination=0.2, **_QUICK).fit(images().reshape(8, 6)).save(home / "3")
    MVRBMOutlierDetector(device="cpu").fit(images()).save(home / "4")


def write_topics(home: Path) -> None:
    from mvrbm import ReplicatedSoftmax

    counts = np.random.default_rng(0).poisson(1.0, (8, 6))
    for number in (1, 3):
        ReplicatedSoftmax(number, **_QUICK).fit(counts).save(home / str(number))


def write_checkpoints(home: Path) -> None:
    from mvrbm.models import mvrbm
    from mvrbm.training import RECIPES, Trainer

    for number, name in enumerate(("default", "generative")):
        trainer = Trainer(mvrbm((3, 2), (2, 2)), RECIPES[name]).fit(images(), n_epochs=1)
        trainer.save(home / str(number))


FOLDERS: Mapping[str, Callable[[Path], None]] = {
    "model": write_models,
    "stack": write_stacks,
    "classifier": write_classifiers,
    "sweep": write_sweeps,
    "super-resolver": write_super_resolvers,
    "imputer": write_imputers,
    "detector": write_detectors,
    "topics": write_topics,
    "checkpoint": write_checkpoints,
}
