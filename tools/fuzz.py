"""Feed damaged files to the readers of the library, which may raise only the documented errors.

    python -m tools.fuzz --seconds 600
    python -m tools.fuzz --count 1000000

Each input is a valid file with simple damage: changed bits and bytes, cuts, splices, odd numbers in headers, odd
values in descriptions. It depends only on the seed, the reader and its number. An undocumented error, a warning, more
than a few seconds for one input, or too much memory is a finding: its input is kept, and the exit code is 1.
"""

from __future__ import annotations

import argparse
import collections
import gzip
import io
import json
import os
import random
import resource
import shutil
import signal
import struct
import sys
import tempfile
import time
import traceback
import warnings
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

LARGEST = 2**24  # bytes that a reader may allocate for one input's array
LARGEST_GROWTH = 2**29  # bytes by which the process may grow over all inputs
SLOWEST = 5.0  # seconds for one input

Files = dict[str, bytes]  # an input: contents by file name
Reader = Callable[[Path], Any]


class TooSlow(BaseException):
    """An input took longer than `SLOWEST`."""


# -- damage -----------------------------------------------------------------------------------------

_ODD_INTS = [0, 1, 2, 7, 8, 0x7F, 0x80, 0xFF, 0xFFFF, 0x7FFFFFFF, 0x80000000, 0xFFFFFFFF, 2**40, 2**63 - 1, 2**64 - 1]
_ODD_VALUES: list[Any] = [
    *(None, True, False, 0, 1, -1, 2, 0.5, 1e300, -0.0, 10**6, 2**31, 2**63, 10**30, "", "x", "visible", "é", "\0"),
    *([], {}, [0], [1], [-1], [2, 3], [10**9, 10**9], ["a"], [[1]], {"a": 1}, [1] * 70, float("nan"), float("inf")),
    *("bernoulli", "gaussian", "categorical", "kronecker", "dense", "cp", "mpo", "float64", "MVRBM", "TVRBM", "RBM"),
]


def damage(data: bytes, rng: random.Random, others: list[bytes]) -> bytes:
    """Return a copy of the data with one to four kinds of damage."""
    out = bytearray(data)
    for _ in range(rng.choice((1, 1, 1, 2, 4))):
        kind = rng.randrange(9)
        # Readers decide by the header, so it is damaged more often than its share of the bytes.
        end = len(out) if rng.random() < 0.4 else min(len(out), 160)
        at = rng.randrange(end) if end else 0
        if kind == 0 and out:
            out[at] ^= 1 << rng.randrange(8)
        elif kind == 1 and out:
            out[at] = rng.randrange(256)
        elif kind == 2:
            del out[at:]
        elif kind == 3:
            out[at:at] = rng.randbytes(rng.randrange(1, 17))
        elif kind == 4:
            del out[at : at + rng.randrange(1, 17)]
        elif kind == 5:
            other = rng.choice(others)
            cut = rng.randrange(len(other) + 1)
            out[at:] = other[cut:]
        elif kind == 6:
            width = rng.choice("HIQ")
            value = rng.choice(_ODD_INTS) % 2 ** (8 * struct.calcsize(width))
            packed = struct.pack(rng.choice("<>") + width, value)
            out[at : at + len(packed)] = packed
        elif kind == 7:
            out = bytearray(rng.randbytes(rng.randrange(64)))
        elif out:  # replaces a digit of a text header
            digits = [i for i, byte in enumerate(out[:end]) if 48 <= byte <= 57]
            if digits:
                where = rng.choice(digits)
                out[where : where + 1] = rng.choice((b"9" * 12, b"0", b"-1", b"1e9", b"()", b"'a'", b"None"))
    return bytes(out)


def damage_values(tree: Any, rng: random.Random) -> Any:
    """Return a copy of a JSON value with one entry changed, renamed or deleted."""
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
        kind = rng.randrange(4)
        if kind == 0:
            del node[key]
        elif kind == 1 and isinstance(node, dict):
            node[rng.choice(["x", "visible", "", "rank", "shape"])] = node.pop(key)
        else:
            node[key] = rng.choice(_ODD_VALUES)
        return tree


# -- inputs -----------------------------------------------------------------------------------------


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


class Models:
    """Makes damaged copies of valid model folders."""

    def __init__(self) -> None:
        from mvrbm import MVRBM, RBM, TVRBM

        data = np.random.default_rng(0).random((8, 3, 2)).astype(np.float32)
        fitted = [
            MVRBM((2, 2), rank=2, n_epochs=1, random_state=0, device="cpu").fit(data),
            RBM(3, visible="gaussian", n_epochs=1, random_state=0, device="cpu").fit(data.reshape(8, 6)),
            TVRBM((2, 2, 2), n_epochs=1, random_state=0, device="cpu").fit(data[..., None]),
        ]
        self.seeds: list[Files] = []
        with tempfile.TemporaryDirectory() as folder:
            for number, model in enumerate(fitted):
                place = model.save(Path(folder) / str(number))
                self.seeds.append({file.name: file.read_bytes() for file in place.iterdir()})
        self.configs = [seed["config.json"] for seed in self.seeds]
        self.weights = [seed["model.safetensors"] for seed in self.seeds]

    def __call__(self, rng: random.Random) -> Files:
        files = dict(rng.choice(self.seeds))
        kind = rng.randrange(5)
        if kind <= 1:
            tree = damage_values(json.loads(files["config.json"]), rng)
            files["config.json"] = json.dumps(tree).encode()
        elif kind == 2:
            files["config.json"] = damage(files["config.json"], rng, self.configs)
        elif kind == 3:
            files["model.safetensors"] = damage(files["model.safetensors"], rng, self.weights)
        else:
            weights = files["model.safetensors"]
            length = int.from_bytes(weights[:8], "little")
            head = json.dumps(damage_values(json.loads(weights[8 : 8 + length]), rng)).encode()
            files["model.safetensors"] = len(head).to_bytes(8, "little") + head + weights[8 + length :]
        return files


# -- readers ----------------------------------------------------------------------------------------


def read_idx(folder: Path) -> None:
    from mvrbm.io.formats import read_idx as read

    read(folder / "file", largest=LARGEST)


def read_npz(folder: Path) -> None:
    from mvrbm.io.arrays import read_array

    array = read_array(folder / "file", largest=LARGEST)
    np.asarray(array).reshape(-1)[-1:].tolist()


def read_model(folder: Path) -> None:
    import mvrbm

    model = mvrbm.load(folder, device="cpu")
    if hasattr(model, "transform"):
        model.transform(np.zeros((1, *model.visible_shape_), np.float32))


def _documented(reader: str) -> type[Exception]:
    from mvrbm.errors import InputError, StorageError

    return StorageError if reader == "model" else InputError


def readers() -> dict[str, tuple[Callable[[random.Random], Files], Reader]]:
    """Return the function that makes inputs and the one that reads them, for each reader."""
    return {"idx": (idx_input, read_idx), "npz": (npz_input, read_npz), "model": (Models(), read_model)}


# -- the loop ---------------------------------------------------------------------------------------


def run(
    reader: str,
    make: Callable[[random.Random], Files],
    read: Reader,
    numbers: range,
    *,
    seed: int = 0,
    until: float | None = None,
    findings: Path | None = None,
) -> collections.Counter[str]:
    """Feed inputs to a reader and count the outcomes: read, rejected, finding."""
    counts: collections.Counter[str] = collections.Counter()
    documented = _documented(reader)
    fast = "/dev/shm" if os.access("/dev/shm", os.W_OK) else None
    with tempfile.TemporaryDirectory(dir=fast) as scratch, warnings.catch_warnings():
        warnings.simplefilter("error")
        warnings.filterwarnings("ignore", message="X does not have valid feature names")  # the damage may add names
        folder = Path(scratch)
        former = signal.signal(signal.SIGALRM, _too_slow)
        try:
            for number in numbers:
                if until is not None and number % 64 == 0 and time.monotonic() > until:
                    break
                files = make(random.Random(f"{seed} {reader} {number}"))
                for name, content in files.items():
                    (folder / name).write_bytes(content)
                signal.setitimer(signal.ITIMER_REAL, SLOWEST)
                try:
                    read(folder)
                    counts["read"] += 1
                except documented as error:
                    counts["rejected" if str(error).strip() else "finding"] += 1
                except (Exception, TooSlow):
                    counts["finding"] += 1
                    _keep(files, reader, number, findings)
                finally:
                    signal.setitimer(signal.ITIMER_REAL, 0)
        finally:
            signal.signal(signal.SIGALRM, former)
    return counts


def _too_slow(number: int, frame: Any) -> None:
    raise TooSlow(f"more than {SLOWEST:g} s")


def _keep(files: Files, reader: str, number: int, findings: Path | None) -> None:
    print(f"finding: {reader} {number}: {traceback.format_exc(limit=-3)}", file=sys.stderr)
    if findings is not None:
        place = findings / f"{reader}-{number}"
        shutil.rmtree(place, ignore_errors=True)
        place.mkdir(parents=True)
        for name, content in files.items():
            (place / name).write_bytes(content)


# Share of the inputs for each reader: reading a model takes fifty times as long as reading an idx file.
_SHARES = {"idx": 0.5, "npz": 0.4, "model": 0.1}


def main(args: list[str] | None = None) -> int:
    """Parse the command line, feed all readers, and print the counts."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0] if __doc__ else None)
    parser.add_argument("--seconds", type=float, help="time limit, shared equally by the readers")
    parser.add_argument("--count", type=int, help="number of inputs, shared by the readers")
    parser.add_argument("--seed", type=int, default=0, help="random seed")
    parser.add_argument("--reader", choices=list(_SHARES), help="the only reader to test; default: all")
    parser.add_argument(
        "--findings", type=Path, default=Path("fuzz-findings"), help="folder for inputs that led to a finding"
    )
    options = parser.parse_args(args)
    if options.seconds is None and options.count is None:
        options.seconds = 600.0
    before = _peak()
    limit = 64 * 2**30  # of address space: torch alone maps several GiB; real memory is compared below
    resource.setrlimit(resource.RLIMIT_AS, (limit, resource.getrlimit(resource.RLIMIT_AS)[1]))
    total: collections.Counter[str] = collections.Counter()
    chosen = {name: pair for name, pair in readers().items() if options.reader in (None, name)}
    after_imports = max(before, _peak())
    for name, (make, read) in chosen.items():
        count = (
            2**62 if options.count is None else int(options.count * (_SHARES[name] if options.reader is None else 1))
        )
        began = time.monotonic()
        until = None if options.seconds is None else began + options.seconds / len(chosen)
        counts = run(name, make, read, range(count), seed=options.seed, until=until, findings=options.findings)
        took = time.monotonic() - began
        print(
            f"{name}: {sum(counts.values()):,} inputs in {took:.0f} s: {counts['read']:,} read, "
            f"{counts['rejected']:,} rejected, {counts['finding']:,} findings",
            flush=True,
        )
        total += counts
    growth = _peak() - after_imports
    print(
        f"all: {sum(total.values()):,} inputs, {total['finding']:,} findings, memory grew by {growth / 2**20:.0f} MiB"
    )
    if growth > LARGEST_GROWTH:
        print(f"finding: memory grew by more than {LARGEST_GROWTH / 2**20:.0f} MiB", file=sys.stderr)
    return 1 if total["finding"] or growth > LARGEST_GROWTH else 0


def _peak() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


if __name__ == "__main__":
    sys.exit(main())
