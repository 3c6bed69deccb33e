"""Check that training runs lose nothing, and resume bit for bit, after signals and when the disk is full.

    python tools/kills.py                          # at least sixty kills, and other disturbances, of all kinds
    python tools/kills.py --kills 3 --others 1 --kinds estimator,train_labels --seed 5

`KINDS` lists the kinds of training: estimators, commands, and saving itself. Every run starts with an older model at
the path of its result. It is disturbed, resumed after each disturbance, and finally runs to its end. The disturbances:

- SIGKILL, SIGTERM and SIGINT (Ctrl-C), either at a random time or just before a random file operation, such as the
  renaming of a folder. The exit code must be that of the signal.
- A limit on the size of files, which acts like a full disk. The run must end with an exception of this package.

After each disturbance, the model at the path must load, and be the older model or the result, or, if a command was
interrupted, the partially trained model. Every checkpoint must be readable. An estimator that cannot resume must be the
same as before training. At the end, all files except for the checkpoints must have the same bits as those of a run
without disturbances, and there must be no temporary files. Prints a table. The exit code is 1 after a failure. Set
TMPDIR=/dev/shm to avoid waiting for the disk.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import multiprocessing
import os
import random
import resource
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

# Processes are forked below, so this must be set before PyTorch is imported.
os.environ["OMP_NUM_THREADS"] = "1"

import numpy as np
import torch
from PIL import Image
from torch.optim.lr_scheduler import CosineAnnealingLR

import mvrbm
from mvrbm import (
    MMVRBM,
    MVRBM,
    RBM,
    TVRBM,
    Bernoulli,
    BoltzmannMachine,
    ClassificationMVRBM,
    DeepMVRBM,
    DeepMVRBMClassifier,
    Gaussian,
    Kronecker,
    MVRBMClassifier,
    MVRBMImputer,
    MVRBMOutlierDetector,
    ReplicatedSoftmax,
    Sweep,
    cli,
)
from mvrbm.errors import MVRBMError
from mvrbm.interrupt import INTERRUPTS, Terminated, exit_code, terminate_in_order
from mvrbm.saving import read_json, read_machine, read_tensors, save
from mvrbm.training import PCD, Checkpoint, EarlyStopping, Monitor, Recipe, Trainer
from mvrbm.vision import PhotoDenoiser, SuperResolver, TrainingStep

# Exit code after an exception of this package because of a full disk. Python itself uses 1 after other exceptions.
_FULL = 3
# Disturbances, and the exit codes that they may cause. SIGTERM ends a process if no handler is installed yet.
_CODES = {"SIGKILL": {-9}, "SIGTERM": {143, -15}, "SIGINT": {130}, "full disk": {_FULL}}
# Audit events of Python before operations that change files. Opening a file counts if it is opened for writing.
_OPERATIONS = {"os.rename", "os.remove", "os.rmdir", "os.mkdir", "os.chmod", "shutil.rmtree"}
# Number of kills per run.
_PER_RUN = 3
_RNG = np.random.default_rng(0)
BITS = (_RNG.random((200, 8, 8)) < 0.3).astype(np.float32)
FLAT = BITS.reshape(len(BITS), -1)
LABELS = _RNG.integers(0, 3, 200)
REAL = _RNG.standard_normal(BITS.shape).cumsum(2).astype(np.float32)
MISSING = np.where(BITS > 0, np.nan, REAL)
IMAGE = _RNG.integers(0, 256, (60, 60), dtype=np.uint8)
SETTINGS: dict[str, Any] = {"batch_size": 10, "random_state": 0, "device": "cpu"}
OLDER = RBM(3, n_epochs=0, random_state=1, device="cpu").fit(FLAT[:9])
NEWER = RBM(9, n_epochs=0, random_state=2, device="cpu").fit(FLAT[:9])


def write_inputs() -> None:
    """Write the inputs of the commands to the current folder."""
    np.save("data.npy", BITS)
    np.save("labels.npy", LABELS)
    np.save("missing.npy", MISSING)
    words = np.array([f"{first}{second}word" for first in "abcde" for second in "abcde"])
    Path("documents.txt").write_text("\n".join(" ".join(_RNG.choice(words, 20)) for _ in range(100)))
    Path("photos").mkdir()
    Image.fromarray(IMAGE[:20, :20]).save("photos/photo.png")


# -- kinds of training: each resumes from the checkpoints in a folder and saves a model ------------------

Work = Callable[[Path, Path], None]


def callbacks(model: Any, data: Any, *others: Any, every: int | None = None) -> Work:
    """Train an estimator whose `fit` has the parameters `callbacks` and `resume`."""

    def work(folder: Path, out: Path) -> None:
        model.fit(data, callbacks=[Checkpoint(folder, every=every), *others], resume=folder).save(out, overwrite=True)

    return work


def checkpoints(model: Any, *data: Any) -> Work:
    """Train an estimator whose `fit` has the parameter `checkpoints`."""

    def work(folder: Path, out: Path) -> None:
        fitted = model.fit(*data, checkpoints=folder)
        getattr(fitted, "best_estimator_", fitted).save(out, overwrite=True)

    return work


def refit(model: Any, data: Any, use: str) -> Work:
    """Fit an estimator without checkpoints twice. If the second time fails, the method `use` must give the same."""

    def work(folder: Path, out: Path) -> None:
        before = getattr(model.fit(data[:10]), use)(data[:10])
        try:
            model.fit(data)
        except (*INTERRUPTS, MVRBMError) as error:
            if not np.array_equal(getattr(model, use)(data[:10]), before):
                raise RuntimeError("the estimator is not the same as before fit") from error
            raise
        model.save(out, overwrite=True)

    return work


def command(text: str, *, resumes: bool = True) -> Work:
    """Run a command. A command that resumes needs `--force` only for the older model: it replaces its own outputs."""

    def work(folder: Path, out: Path) -> None:
        words = [*text.replace("OUT", str(out)).split(), "--device", "cpu"]
        words += ["--checkpoints", str(folder), "--resume"] if resumes else []
        words += [] if (folder / "outputs.json").exists() else ["--force"]
        errors = io.StringIO()
        with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(errors):
            code = cli.main(words)
        if code in (130, 143):
            raise KeyboardInterrupt if code == 130 else Terminated
        if code:
            raise MVRBMError(errors.getvalue())

    return work


def trainer(folder: Path, out: Path) -> None:
    """Train on real-valued data with missing entries, with a scheduler and a checkpoint after every update."""
    machine = BoltzmannMachine(Gaussian((8, 8), learn_variance=True), Bernoulli((5, 5)), Kronecker(2))
    run = Trainer(
        machine,
        Recipe(batch_size=10, negative=PCD(20)),
        optimizer=lambda groups: torch.optim.Adam(groups, lr=0.003),
        scheduler=lambda optimizer: CosineAnnealingLR(optimizer, 8),
        callbacks=[Checkpoint(folder, every=1), Monitor(np.nan_to_num(MISSING[:20]), every=20, pseudo_sites=0)],
    )
    run.resume(folder)
    run.fit(MISSING, 8, nan_is_missing=True, initialize=True)
    run.raise_if_interrupted()
    save(machine, out, overwrite=True)


def saving(folder: Path, out: Path) -> None:
    """Save two models again and again over each other."""
    for _ in range(40):
        OLDER.save(out, overwrite=True)
        NEWER.save(out, overwrite=True)


_STEPS = [TrainingStep("patches", n_samples=2000, n_epochs=12, batch_size=512, learning_rate=3e-3)]
_CROPS = [TrainingStep("divergence", 16), TrainingStep("images", 16, 6)]
_SWEPT: dict[str, Any] = {"learning_rate": [0.05, 0.1], "random_state": [0, 1, 2]}
# The error is largest early in training, so a resumed run needs the best parameters that its checkpoint contains.
_STOP = (
    Monitor(BITS[:80], validation=BITS[80:100], pseudo_sites=0),
    EarlyStopping(patience=40, larger_is_better=True, restore_best=True),
)
_FEW: dict[str, Any] = {"n_patches": 1000, "n_epochs": 20, "symmetric": False, "steps": _STEPS, "device": "cpu"}
_TINY: dict[str, Any] = {"patch": (4,), "stride": (2,), "hidden_shape": (4, 4), "rank": 1, "device": "cpu"}
COMMANDS = {
    "train": command("train data.npy --hidden 5x5 --epochs 60 --batch-size 10 --quiet --out OUT --log OUT.csv"),
    "train_labels": command("train data.npy --labels labels.npy --hidden 5x5 --epochs 50 --quiet --out OUT"),
    "train_sweep": command("train data.npy --hidden 5x5 --epochs 15 --sweep rank=1,2;batch_size=10,20 --out OUT"),
    "topics": command("topics documents.txt --topics 5 --epochs 60 --quiet --save OUT"),
    "superres": command(
        "superres-train photos --patch 6 --hidden 5x5 --rank 1 --tuning-patches 500 --tuning-crops 8 --tuning-epochs 8 "
        "--quiet --out OUT"
    ),
    "impute": command("impute missing.npy OUT.npy --epochs 80 --quiet --save OUT", resumes=False),
    "outliers": command("outliers data.npy OUT.npy --epochs 60 --quiet --save OUT", resumes=False),
    "denoise": command("denoise-train photos --kind salt --tuning-crops 8 --tuning-epochs 3 --out OUT"),
}
KINDS = {
    "trainer": trainer,
    "estimator": callbacks(MVRBM((6, 6), rank=2, negative="pcd", n_chains=20, n_epochs=60, **SETTINGS), BITS),
    "tensors": callbacks(TVRBM((3, 3, 3), n_epochs=40, **SETTINGS), BITS.reshape(-1, 4, 4, 4)),
    "stopping": callbacks(MVRBM((6, 6), n_epochs=60, **SETTINGS), BITS[:80], *_STOP),
    "multimodal": callbacks(MMVRBM((6, 6), n_epochs=40, **SETTINGS), {"image": BITS, "label": LABELS}),
    "documents": callbacks(ReplicatedSoftmax(5, n_epochs=60, **SETTINGS), _RNG.poisson(1.0, (200, 30))),
    "deep": callbacks(DeepMVRBM(((6, 6), (4, 4)), feed="sample", n_epochs=25, **SETTINGS), BITS, every=3),
    "classifier": checkpoints(
        MVRBMClassifier((6, 6), pretraining=15, n_epochs=12, averaging=0.99, **SETTINGS), BITS, LABELS
    ),
    "deep_classifier": checkpoints(
        DeepMVRBMClassifier(((6, 6), (4, 4)), pretraining=8, n_epochs=12, early_stopping=True, **SETTINGS), BITS, LABELS
    ),
    "generative": checkpoints(ClassificationMVRBM((6, 6), mode="generative", n_epochs=50, **SETTINGS), BITS, LABELS),
    "discriminative": checkpoints(ClassificationMVRBM((6, 6), n_epochs=30, **SETTINGS), BITS, LABELS),
    "hybrid": checkpoints(ClassificationMVRBM((6, 6), mode="hybrid", n_epochs=30, **SETTINGS), BITS, LABELS),
    "super_resolver": checkpoints(SuperResolver(2, 6, (5, 5), **_FEW), [IMAGE]),
    "photo_denoiser": checkpoints(PhotoDenoiser("gray", steps=_CROPS, **_TINY), [IMAGE]),
    "sweep": checkpoints(Sweep(RBM(20, n_epochs=12, **SETTINGS), _SWEPT), FLAT),
    "imputer": refit(MVRBMImputer(n_epochs=80, random_state=0, device="cpu"), MISSING, "transform"),
    "detector": refit(MVRBMOutlierDetector((4, 4), n_epochs=100, **SETTINGS), REAL, "score_samples"),
    "saving": saving,
    **COMMANDS,
}
TWO_RANKS = "two_ranks"


# -- processes --------------------------------------------------------------------------------------------


class Disturbance(NamedTuple):
    """A disturbance of a run."""

    #: A key of `_CODES`, or "" for no disturbance.
    kind: str = ""
    #: When to send the signal: seconds after the start.
    seconds: float = 0.0
    #: When to send the signal: before this file operation, counted from 1. If 0, `seconds` is used.
    operation: int = 0
    #: Largest size of a file in bytes, for a full disk.
    size: int = 0


def _watch(what: Disturbance, count: Any) -> None:
    """Count the file operations of this process, and send it a signal before one of them."""

    def hook(event: str, arguments: tuple[Any, ...]) -> None:
        writes = event == "open" and (arguments[2] or 0) & (os.O_WRONLY | os.O_RDWR)
        if event in _OPERATIONS or writes:
            count.value += 1
            if count.value == what.operation:
                os.kill(os.getpid(), signal.Signals[what.kind])

    sys.addaudithook(hook)


def _work(kind: str, folder: Path, out: Path, what: Disturbance, started: Any, count: Any) -> None:
    if what.size:
        resource.setrlimit(resource.RLIMIT_FSIZE, (what.size, what.size))  # Python ignores SIGXFSZ.
    _watch(what, count)
    try:
        with terminate_in_order():
            started.set()
            KINDS[kind](folder, out)
            os._exit(0)
    except INTERRUPTS as error:
        os._exit(exit_code(error))
    except MVRBMError as error:
        if "cannot be written" not in str(error):
            raise
        os._exit(_FULL)


def _fork(kind: str, folder: Path, out: Path, what: Disturbance) -> tuple[int, int]:
    """Run one process, disturb it, and return its exit code and its number of file operations.

    The exit code is negative if a signal ended the process.
    """
    context = multiprocessing.get_context("fork")
    started, count = context.Event(), context.RawValue("i", 0)
    process = context.Process(target=_work, args=(kind, folder, out, what, started, count))
    process.start()
    if what.seconds:
        started.wait()
        process.join(what.seconds)
        if process.is_alive():
            os.kill(process.pid or 0, signal.Signals[what.kind])
    process.join()
    return int(process.exitcode or 0), count.value


def _torchrun(kind: str, folder: Path, out: Path, what: Disturbance) -> tuple[int, int]:
    """Train with two processes, disturb them, and return the exit code of their launcher and 0."""
    launch = [sys.executable, "-m", "torch.distributed.run", "--nnodes", "1", "--nproc-per-node", "2"]
    launch += ["--rdzv-backend", "c10d", "--rdzv-endpoint", "127.0.0.1:0", "--monitor-interval", "0.1"]
    command = "-m mvrbm train data.npy --hidden 5x5 --epochs 100 --batch-size 10 --device cpu --quiet --force --resume"
    command += f" --out {out} --checkpoints {folder}"
    source = str(Path(mvrbm.__file__).parents[1])
    path = os.pathsep.join([source, os.environ.get("PYTHONPATH", "")])
    process = subprocess.Popen(
        [*launch, *command.split()],
        env={**os.environ, "PYTHONPATH": path},
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
    )
    if what.kind:
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(what.seconds)
        if process.poll() is None:
            # On the other signals, the launcher ends its processes, as under a job scheduler. If it is killed, its
            # processes keep running in their own sessions, so they are killed first.
            for number in _descendants(process.pid) if what.kind == "SIGKILL" else []:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(number, signal.SIGKILL)
            process.send_signal(signal.Signals[what.kind])
    return process.wait(), 0


def _descendants(parent: int) -> list[int]:
    """Return the IDs of all processes that a process has started, directly or indirectly."""
    own = [int(number) for number in Path(f"/proc/{parent}/task/{parent}/children").read_text().split()]
    return own + [further for child in own for further in _descendants(child)]


# -- checks ------------------------------------------------------------------------------------------------


def unreadable(folder: Path) -> list[str]:
    """Return an error message for each unreadable checkpoint under a folder."""
    bad = []
    for path in [*folder.rglob("update-*/trainer.json"), *folder.rglob("descent.json")]:
        if path.parent.name.startswith(".") or path.parent.parent.name.startswith("."):
            continue
        try:
            read_json(path, largest=None)
            read_tensors(path.with_suffix(".safetensors"))
            if path.name == "trainer.json":
                read_machine(path.parent)
        except MVRBMError as error:
            bad.append(str(error))
    return bad


def files_of(model: Path) -> dict[str, bytes]:
    """Load a saved model, and return the contents of its files."""
    mvrbm.load(model, "cpu")
    return {path.name: path.read_bytes() for path in model.iterdir()}


class Checks:
    """Runs of one kind of training, and their failures."""

    def __init__(self, kind: str, home: Path) -> None:
        self.kind = kind
        self.home = home
        self.launch: Callable[..., tuple[int, int]] = _torchrun if kind == TWO_RANKS else _fork
        self.failures: list[str] = []
        self.counts: Counter[str] = Counter()
        place = self._new_run("undisturbed")
        began = time.perf_counter()
        code, self.operations = self.launch(kind, place / "checkpoints", place / "model", Disturbance())
        self.seconds = time.perf_counter() - began
        if code != 0:
            raise SystemExit(f"{kind}: a run without disturbance failed")
        self.expected = files_of(place / "model")
        self.outputs = _outputs(place)
        self.largest = max(path.stat().st_size for path in place.rglob("*.safetensors"))

    def _new_run(self, name: str) -> Path:
        """Create the folder of a run, with an older model."""
        place = self.home / name
        OLDER.save(place / "model")
        return place

    def run(self, name: str, disturbances: list[Disturbance]) -> None:
        """Run one training run with disturbances, and check its files after each of them and at the end."""
        place = self._new_run(name)
        folder, out = place / "checkpoints", place / "model"
        before = files_of(out)
        for what in disturbances:
            code, operations = self.launch(self.kind, folder, out, what)
            self.counts[what.kind if code else "too late"] += 1
            if code not in _CODES[what.kind] | {0} and self.kind != TWO_RANKS:  # torchrun has its own exit codes.
                self.failures.append(f"{name}: exit code {code} after {what}")
            if not code and 0 < what.operation <= operations:
                self.failures.append(f"{name}: {what} was ignored")
            if code and what.kind != "SIGKILL":
                self.failures += [f"{name}: {path} was not removed after {what}" for path in place.rglob(".*")]
            self.failures += unreadable(folder)
            self.failures += [f"{name}: after {what}, {text}" for text in self._damage(place, what, before)]
        if self.launch(self.kind, folder, out, Disturbance())[0] != 0:
            self.failures.append(f"{name}: the run cannot be resumed after {disturbances}")
        elif _outputs(place) != self.outputs:
            self.failures.append(f"{name}: the files differ from those without disturbances after {disturbances}")
        self.failures += [f"{name}: {path} was not removed at the end" for path in place.rglob(".*")]

    def _damage(self, place: Path, what: Disturbance, before: dict[str, bytes]) -> list[str]:
        """Return what is wrong with the outputs of a run after a disturbance. `before` is the older model."""
        arrays = [path for path in place.glob("*.npy") if path.read_bytes() != self.outputs[path.name]]
        found = [f"{path} is not complete" for path in arrays]
        saves_partial = self.kind == TWO_RANKS or (self.kind in COMMANDS and what.kind in ("SIGINT", "SIGTERM"))
        try:
            if files_of(place / "model") not in (before, self.expected) and not saves_partial:
                found.append("the model is neither the older model nor the result")
        except MVRBMError as error:
            found.append(f"the model cannot be loaded: {error}")
        return found


def _outputs(place: Path) -> dict[str, Any]:
    """Return the contents of all files of a run, without checkpoints, and without the last column of logs: the time."""
    found: dict[str, Any] = {}
    for path in place.rglob("*"):
        if path.suffix == ".csv":
            found[path.name] = [line.rpartition(",")[0] for line in path.read_text().splitlines()]
        elif path.is_file() and place / "checkpoints" not in path.parents:
            found[str(path.relative_to(place))] = path.read_bytes()
    return found


def disturb(checks: Checks, kills: int, others: int, rng: random.Random) -> None:
    """Disturb runs with a number of kills, and with a number of disturbances of each other kind."""

    def moment(kind: str, low: float, high: float) -> Disturbance:
        part = rng.uniform(low, high)
        if checks.operations and rng.random() < 0.5:
            return Disturbance(kind, operation=1 + int(part * checks.operations))
        return Disturbance(kind, seconds=part * checks.seconds)

    number = 0
    while checks.counts["SIGKILL"] < kills and number < 20 * _PER_RUN:
        number += 1
        here = min(_PER_RUN, kills - checks.counts["SIGKILL"])
        checks.run(f"killed-{number}", [moment("SIGKILL", 0, 1 / here) for _ in range(here)])
    for number in range(others):
        checks.run(f"terminated-{number}", [moment("SIGTERM", 0, 0.9)])
        checks.run(f"interrupted-{number}", [moment("SIGINT", 0, 0.9)])
        if checks.kind != TWO_RANKS:
            size = int(rng.uniform(0.05, 0.95) * checks.largest)
            checks.run(f"full-{number}", [Disturbance("full disk", size=size)])


def main() -> int:
    """Disturb and resume training runs, print a table, and return the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=60, help="number of kills, of all kinds of training together")
    parser.add_argument("--others", type=int, default=1, help="number of each other disturbance per kind of training")
    parser.add_argument("--kinds", default=",".join([*KINDS, TWO_RANKS]), help="kinds of training, separated by commas")
    parser.add_argument("--seed", type=int, default=0, help="random seed of the disturbances")
    arguments = parser.parse_args()
    rng, kinds = random.Random(arguments.seed), arguments.kinds.split(",")
    # A shell makes programs in the background ignore Ctrl-C. All processes below inherit this handler.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    torch.optim.SGD([torch.zeros(1)])  # Imports the rest of PyTorch once instead of in every process.
    columns = [*_CODES, "too late"]
    print(f"{'kind':15} {'seconds':>7}", *(f"{name:>9}" for name in columns), " failures", flush=True)
    failures, total = 0, Counter[str]()
    with tempfile.TemporaryDirectory() as home, contextlib.chdir(home):
        write_inputs()
        for index, kind in enumerate(kinds):
            checks = Checks(kind, Path(kind))
            disturb(checks, (arguments.kills + index) // len(kinds), arguments.others, rng)
            numbers = [f"{checks.counts[name]:9}" for name in columns]
            print(f"{kind:15} {checks.seconds:7.1f}", *numbers, f" {'; '.join(checks.failures) or 'none'}", flush=True)
            failures, total = failures + len(checks.failures), total + checks.counts
    print(", ".join(f"{total[name]} {name}" for name in columns) + f": {failures} failures")
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
