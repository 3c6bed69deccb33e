"""Feed damaged files to the readers of the library, and check that they raise only the documented errors.

    python -m tools.fuzz --seconds 600
    python -m tools.fuzz --count 2000000 --seed 1

`tools.fuzz_inputs` generates the inputs. Each is a damaged file or folder, and depends only on the seed, the reader and
its number. A finding is an undocumented error, a warning, a result that is not finite, or an input that takes more than
5 s of processor time, or more memory than 64 MiB plus four times its size. The inputs of findings are kept, and the
exit code is 1 if there are any. Each reader runs in a separate process, so that a crash does not end the others.
"""

from __future__ import annotations

import argparse
import collections
import contextlib
import functools
import os
import random
import resource
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import traceback
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np

from mvrbm.interrupt import replaced
from tools import fuzz_inputs as inputs

# Bytes that a reader may allocate for an input of any size.
ALLOWANCE = 64 * 2**20
# Seconds of processor time that a reader may take for one input.
SLOWEST = 5.0
# Seconds of wall-clock time for one input, in case a reader waits. Long, because the cores may be busy.
_STUCK = 600.0
# Number of inputs that are read under the limits of one, which is faster than to set the limits for each.
_BLOCK = 32
# Seconds between reports of progress.
_PROGRESS = 30.0

Read = Callable[[Path], Any]


class TooSlow(BaseException):
    """An input took longer than `SLOWEST`."""


class NotFiniteError(Exception):
    """A reader returned a model whose results are not finite."""


# -- readers ----------------------------------------------------------------------------------------


def read_idx(folder: Path) -> None:
    from mvrbm.io.formats import read_idx as read

    read(folder / "file")


def read_array(folder: Path) -> None:
    from mvrbm.io.arrays import read_array as read

    array = read(folder / "file")
    np.asarray(array).reshape(-1)[-1:].tolist()


def read_shards(folder: Path) -> None:
    from mvrbm.io.shards import Shards

    shards = Shards(folder)
    np.asarray(shards[:2]).tolist()


def read_image(folder: Path) -> None:
    from mvrbm.io.pictures import read_picture

    read_picture(folder / "file.png")


def read_table(folder: Path) -> None:
    """Read a table as a data frame, as labels, and as samples."""
    from mvrbm.errors import InputError
    from mvrbm.io import tables

    (path,) = folder.iterdir()
    frame = tables.read_table(path)
    with contextlib.suppress(InputError):  # Not every table holds labels.
        tables.table_labels(frame, path)
    tables.table_samples(frame, path)


def read_documents(folder: Path) -> None:
    from mvrbm.io.documents import read_documents as read

    (path,) = folder.iterdir()
    counts, words = read(path)
    if counts.shape != (counts.shape[0], len(words)) or not np.isfinite(counts.data).all():
        raise NotFiniteError(f"counts of {len(words)} words: {counts.data[:4]}")


def read_alignment(folder: Path) -> None:
    """Read an alignment, and convert it to strings and one-hot rows."""
    from mvrbm.errors import AlignmentWarning
    from mvrbm.io import alignments

    (path,) = folder.iterdir()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", AlignmentWarning)
        alignment = alignments.read_alignment(path, unknown=True)
    if alignments.as_alignment(alignment.sequences, alignment.alphabet, unknown=True).codes.tobytes() != (
        alignment.codes.tobytes()
    ):
        raise ValueError(f"the sequences are read differently: {alignment.sequences[:2]}")
    alignment.one_hot()


def read_model(folder: Path) -> None:
    """Load a model and use it once."""
    import torch

    import mvrbm

    model = mvrbm.load(folder, device="cpu")
    machine = getattr(model, "machine_", model)
    if isinstance(machine, mvrbm.BoltzmannMachine):
        zeros = {name: torch.zeros(1, *unit.shape, dtype=machine.like.dtype) for name, unit in machine.layers.items()}
        _check_finite(machine.hidden_mean(zeros, check=False).detach().numpy())
    shape = getattr(model, "visible_shape_", getattr(model, "n_features_in_", None))
    for method in ("transform", "predict_proba", "decision_function", "predict_words", "standard_deviation"):
        if hasattr(model, method) and shape is not None:
            unknown = hasattr(model, "standard_deviation")  # It is an imputer, which fills in missing entries.
            _check_finite(getattr(model, method)(np.full((1, *np.atleast_1d(shape)), np.nan if unknown else 0.0)))
    if (
        hasattr(model, "upscale") and model.cycles < 10 and model.back_projection < 100
    ):  # Larger values only take longer.
        model.upscale(np.zeros((4, 4), np.uint8))


def _check_finite(values: Any) -> None:
    values = np.asarray(values)
    if values.dtype.kind == "f" and not np.isfinite(values).all():
        raise NotFiniteError(f"the result is {values.ravel()[:4]}")


def read_checkpoint(folder: Path) -> None:
    """Load a checkpoint and resume the training run."""
    import mvrbm
    from mvrbm.models import mvrbm as machine_of
    from mvrbm.training import Trainer

    recipe = getattr(mvrbm.load(folder, device="cpu"), "requested_recipe", None)
    if recipe is not None:  # A folder without trainer.json is loaded as a model.
        trainer = Trainer(machine_of((3, 2), (2, 2)), recipe)
        trainer.resume_from(folder)
        trainer.fit(inputs.images(), n_epochs=1)


@functools.cache
def readers(name: str | None = None) -> dict[str, tuple[inputs.Make, Read]]:
    """Return the function that generates inputs and the function that reads them, for one reader or for all."""
    found: dict[str, tuple[inputs.Make, Read]] = {
        "idx": (inputs.idx_input, read_idx),
        "array": (inputs.npz_input, read_array),
        "shards": (inputs.shards_input, read_shards),
        "image": (inputs.image_input, read_image),
        "table": (inputs.table_input, read_table),
        "documents": (inputs.documents_input, read_documents),
        "alignment": (inputs.alignment_input, read_alignment),
    }
    for kind, write in inputs.FOLDERS.items():
        if name in (None, kind):
            found[kind] = inputs.Folders(write), read_checkpoint if kind == "checkpoint" else read_model
    return found


def _documented(reader: str) -> tuple[type[Exception], ...]:
    from mvrbm.errors import DivergenceError, InputError, StorageError

    if reader == "checkpoint":
        return StorageError, DivergenceError  # Training does not resume from very large parameters.
    return (StorageError,) if reader in inputs.FOLDERS else (InputError,)


# -- the loop ---------------------------------------------------------------------------------------


def run(
    reader: str,
    make: inputs.Make,
    read: Read,
    numbers: range,
    *,
    seed: int = 0,
    until: float | None = None,
    findings: Path | None = None,
) -> collections.Counter[str]:
    """Feed inputs to a reader, and count the outcomes: read, rejected, finding."""
    counts: collections.Counter[str] = collections.Counter()
    fast = "/dev/shm" if os.access("/dev/shm", os.W_OK) else None
    shown = time.monotonic()
    with tempfile.TemporaryDirectory(dir=fast) as scratch, warnings.catch_warnings(), _alarms():
        warnings.simplefilter("error")
        # Damage may add feature names to a model.
        warnings.filterwarnings("ignore", message="X does not have valid feature names")
        place = _Place(Path(scratch))
        _warm_up(make, read, place)
        for first in range(0, len(numbers), _BLOCK):
            now = time.monotonic()
            if until is not None and now > until:
                break
            if now > shown + _PROGRESS:
                shown = now
                print(f"{reader}: {sum(counts.values()):,} inputs, {counts['finding']:,} findings", flush=True)
            again = []
            with _limits():
                for number in numbers[first : first + _BLOCK]:
                    outcome, _ = _outcome(reader, make(random.Random(f"{seed} {reader} {number}")), read, place)
                    counts[outcome] += 1
                    if outcome == "finding":
                        again.append(number)
            # Earlier inputs of the block may have used up the limits, so read each finding again under separate limits.
            for number in again:
                files = make(random.Random(f"{seed} {reader} {number}"))
                with _limits(sum(len(content) for content in files.values())):
                    outcome, trace = _outcome(reader, files, read, place)
                counts["finding"] -= 1
                counts[outcome] += 1
                if outcome == "finding":
                    _keep(files, reader, number, findings, trace)
    return counts


def _outcome(reader: str, files: inputs.Files, read: Read, place: _Place) -> tuple[str, str]:
    """Feed one input to a reader. Return the outcome, and the traceback of a finding."""
    try:
        place.put(files)
        read(place.folder)
        return "read", ""
    except _documented(reader) as error:
        if str(error).strip() and not _was_memory(error):
            return "rejected", ""
        return "finding", traceback.format_exc(limit=-3)
    except (Exception, TooSlow):
        return "finding", traceback.format_exc(limit=-3)


def _warm_up(make: inputs.Make, read: Read, place: _Place) -> None:
    """Read some inputs without limits, so that imports and caches do not count as memory of the first input."""
    for files in [*getattr(make, "seeds", ()), *(make(random.Random(number)) for number in range(5))]:
        place.put(files)
        with contextlib.suppress(Exception):
            read(place.folder)


class _Place:
    """A folder for the files of the current input."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._there = inputs.Files()

    def put(self, files: inputs.Files) -> None:
        """Replace the contents of the folder by these files."""
        for name, content in self._there.items():
            if name not in files or isinstance(content, str) or isinstance(files[name], str):
                path = self.folder / name
                (path.rmdir if content == inputs.FOLDER else path.unlink)()
        for name, content in files.items():
            path = self.folder / name
            if isinstance(content, str):
                _SPECIAL[content](path)
            elif content is not self._there.get(name):
                path.write_bytes(content)
        self._there = files


_SPECIAL: dict[str, Callable[[Path], None]] = {
    inputs.PIPE: os.mkfifo,
    inputs.DEVICE: lambda path: path.symlink_to("/dev/zero"),
    inputs.FOLDER: Path.mkdir,
}


def _alarms() -> contextlib.AbstractContextManager[None]:
    def too_slow(number: int, frame: Any) -> None:
        raise TooSlow(f"more than {SLOWEST:g} s of processor time, or {_STUCK:g} s on the clock")

    return replaced({number: signal.getsignal(number) for number in (signal.SIGPROF, signal.SIGALRM)}, too_slow)


@contextlib.contextmanager
def _limits(n_bytes: int = 0) -> Iterator[None]:
    """Limit processor time and address space to the limits of one input of `n_bytes` bytes.

    The limit on address space also makes allocations of C code fail that are never used.
    """
    hard = resource.getrlimit(resource.RLIMIT_AS)[1]
    pages = int(Path("/proc/self/statm").read_bytes().split()[0])
    resource.setrlimit(resource.RLIMIT_AS, (pages * resource.getpagesize() + ALLOWANCE + 4 * n_bytes, hard))
    signal.setitimer(signal.ITIMER_PROF, SLOWEST)
    signal.setitimer(signal.ITIMER_REAL, _STUCK)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.setitimer(signal.ITIMER_PROF, 0)
        resource.setrlimit(resource.RLIMIT_AS, (hard, hard))


def _was_memory(error: BaseException | None) -> bool:
    """Return whether an error was caused by a failed allocation."""
    while error is not None:
        if isinstance(error, MemoryError) or "allocate memory" in str(error):
            return True
        error = error.__cause__ or error.__context__
    return False


def _keep(files: inputs.Files, reader: str, number: int, findings: Path | None, trace: str) -> None:
    print(f"finding: {reader} {number}: {trace}", file=sys.stderr, flush=True)
    if findings is not None:
        home = findings / f"{reader}-{number}"
        shutil.rmtree(home, ignore_errors=True)
        home.mkdir(parents=True)
        _Place(home).put(files)


# -- the command ------------------------------------------------------------------------------------

# Share of the inputs of each reader. Reading a model takes fifty times as long as reading an idx file.
SHARES = {
    "idx": 0.25, "array": 0.15, "shards": 0.1, "image": 0.12, "table": 0.03, "documents": 0.03, "alignment": 0.05,
}  # fmt: skip
SHARES |= dict.fromkeys(inputs.FOLDERS, 0.03)


def main(args: list[str] | None = None) -> int:
    """Parse the command line, feed the readers, and print the counts."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0] if __doc__ else None)
    parser.add_argument("--seconds", type=float, help="time limit, divided equally among the readers")
    parser.add_argument("--count", type=int, help="number of inputs, divided among the readers")
    parser.add_argument("--seed", type=int, default=0, help="random seed")
    parser.add_argument("--first", type=int, default=0, help="number of the first input")
    parser.add_argument("--reader", choices=list(SHARES), help="reader to test (default: all readers)")
    parser.add_argument(
        "--findings", type=Path, default=Path("fuzz-findings"), help="folder for the inputs of findings"
    )
    options = parser.parse_args(args)
    if options.seconds is None and options.count is None:
        options.seconds = 600.0
    if options.reader is None:
        return max(_in_a_process(name, options) for name in SHARES)
    import torch

    torch.set_num_threads(1)
    make, read = readers(options.reader)[options.reader]
    began = time.monotonic()
    until = None if options.seconds is None else began + options.seconds
    numbers = range(options.first, 2**62 if options.count is None else options.first + options.count)
    counts = run(options.reader, make, read, numbers, seed=options.seed, until=until, findings=options.findings)
    print(
        f"{options.reader}: {sum(counts.values()):,} inputs in {time.monotonic() - began:.0f} s: "
        f"{counts['read']:,} read, {counts['rejected']:,} rejected, {counts['finding']:,} findings",
        flush=True,
    )
    return 1 if counts["finding"] else 0


def _in_a_process(name: str, options: argparse.Namespace) -> int:
    """Test one reader in a separate process. A process that is ended by a signal is a finding."""
    how = ["--reader", name, "--seed", str(options.seed), "--first", str(options.first)]
    how += ["--findings", str(options.findings)]
    if options.seconds is not None:
        how += ["--seconds", str(options.seconds / len(SHARES))]
    if options.count is not None:
        how += ["--count", str(round(options.count * SHARES[name]))]
    code = subprocess.run([sys.executable, "-m", "tools.fuzz", *how], check=False).returncode
    if code < 0:
        print(f"finding: {name}: the process ended by signal {-code}", file=sys.stderr)
    return 1 if code else 0


if __name__ == "__main__":
    sys.exit(main())
