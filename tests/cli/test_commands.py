import errno
import gzip
import json
import math
import os
import re
import resource
import shutil
import signal
import struct
import subprocess
import sys
import zlib
from pathlib import Path

import numpy as np
import pytest
from PIL import Image
from safetensors.torch import load_file
from scipy import sparse

import mvrbm as package
from mvrbm import MMVRBM, MVRBM, RBM, DeepMVRBM, MVRBMClassifier, saving
from mvrbm.errors import InputError
from mvrbm.io import arrays
from mvrbm.likelihood import log_likelihood
from mvrbm.training import Trainer

# Every command for arrays, and which of --seed and --device it has.
COMMANDS = {
    **dict.fromkeys(
        [
            "train",
            "sample",
            "inpaint",
            "denoise",
            "superres-train",
            "demo",
            "likelihood",
            "topics",
            "impute",
            "outliers",
        ],
        ("--seed", "--device"),
    ),
    **dict.fromkeys(["transform", "score", "predict", "reconstruct", "superres"], ("--device",)),
    **dict.fromkeys(["info", "export", "page", "data list", "data where", "data fetch"], ()),
}
STRIPES = np.repeat((np.arange(60)[:, None] % 2 == np.arange(6) % 2)[:, None, :], 4, 1)  # (60, 4, 6), boolean
DATA = STRIPES.astype(np.float32)


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """A small model folder, made once."""
    folder = tmp_path_factory.mktemp("trained")
    model = MVRBM((3, 2), n_epochs=5, batch_size=10, recipe="generative", random_state=0, device="cpu")
    model.fit(DATA).save(folder / "model")
    return folder / "model"


@pytest.fixture
def place(tmp_path, monkeypatch, trained):
    """A working folder with data and a model in it, and no data sets around."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("MVRBM_DATA", raising=False)
    monkeypatch.delenv("MVRBM_DEBUG", raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setenv("COLUMNS", "100")
    shutil.copytree(trained, tmp_path / "model")
    np.save("data.npy", DATA)
    return tmp_path


def there(folder):
    """Everything under a folder, with the contents of files."""
    return {path.relative_to(folder): path.is_file() and path.read_bytes() for path in folder.rglob("*")}


# -- mistakes ---------------------------------------------------------------------------------------


def png(width, height):
    def chunk(kind, content):
        return struct.pack(">I", len(content)) + kind + content + struct.pack(">I", zlib.crc32(kind + content))

    head = struct.pack(">IIBBBBB", width, height, 8, 0, 0, 0, 0)
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", head) + chunk(b"IDAT", zlib.compress(b"")) + chunk(b"IEND", b"")


def write(name, content):
    Path(name).parent.mkdir(parents=True, exist_ok=True)
    Path(name).write_bytes(content)


def array(values):
    return lambda: np.save("x.npy", values)


def image_sizes():
    Path("folder").mkdir()
    Image.new("L", (6, 4)).save("folder/a.png")
    Image.new("L", (6, 5)).save("folder/b.png")


def change_config(**changes):
    def change():
        path = Path("model/config.json")
        path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))

    return change


def change_visible():
    path = Path("model/config.json")
    config = json.loads(path.read_text())
    config["estimator"]["params"]["visible"] = "gaussian"
    path.write_text(json.dumps(config))


def cut_weights(length):
    def change():
        weights = Path("model/model.safetensors").read_bytes()
        Path("model/model.safetensors").write_bytes(weights[:length])

    return change


def several_modalities():
    shutil.rmtree("model")
    MMVRBM((2, 2), n_epochs=1, device="cpu").fit({"a": DATA, "b": DATA}).save("model")


def machine_alone():
    package.save(MVRBM((3, 2), n_epochs=1, device="cpu").fit(DATA).machine_, "model", overwrite=True)


IDX = bytes([0, 0, 8, 3]) + struct.pack(">3I", 60, 4, 6) + bytes(1440)
TRAIN = "train {} --hidden 3x2 --epochs 1 --out new --quiet"
TRAIN_X = TRAIN.format("x.npy")
RECONSTRUCT_X = "reconstruct model x.npy out.npy"

# what is wrong; what is done before; the command; exit code; what the line says
MISTAKES = [
    ("missing file", None, TRAIN.format("gone.npy"), 1, "gone.npy: no such file"),
    ("empty file", lambda: write("x.npy", b""), TRAIN_X, 1, "x.npy is empty"),
    ("a text file", lambda: write("x.text", b"1,2\n"), TRAIN.format("x.text"), 1, "x.text is not a .npy"),
    ("a table of words", lambda: write("x.csv", b"a,b\n1,x\n"), TRAIN.format("x.csv"), 1, "column 'b'.*x.csv:-b"),
    ("no rows", None, "transform model data.npy o.npy -n 70:", 1, "-n selects none of the 60 samples in data.npy"),
    (
        "rows that are no slice",
        None,
        "transform model data.npy o.npy -n first",
        2,
        "'first' is neither a number of samples",
    ),
    ("truncated idx", lambda: write("x.idx", IDX[:-1]), TRAIN.format("x.idx"), 1, "truncated"),
    ("truncated idx.gz", lambda: write("x.gz", gzip.compress(IDX)[:-5]), TRAIN.format("x.gz"), 1, "truncated"),
    (
        "idx of wrong magic",
        lambda: write("x-idx3-ubyte", b"\1" + IDX[1:]),
        TRAIN.format("x-idx3-ubyte"),
        1,
        "not an idx file",
    ),
    (
        "idx with bytes after it",
        lambda: write("x.idx", IDX + b"x"),
        TRAIN.format("x.idx"),
        1,
        "extra bytes after the last entry",
    ),
    ("image bomb", lambda: write("f/x.png", png(60_000, 60_000)), TRAIN.format("f"), 1, "bomb"),
    ("damaged image", lambda: write("f/x.png", b"\x89PNG\r\n"), TRAIN.format("f"), 1, "not a readable image"),
    ("folder without images", lambda: write("f/x.txt", b""), TRAIN.format("f"), 1, "contains no images"),
    ("images of two sizes", image_sizes, TRAIN.format("folder"), 1, "b.png is 6x5 and a.png is 6x4"),
    ("infinity to reconstruct", array(np.where(DATA > 0, np.inf, 0)), RECONSTRUCT_X, 1, "infinite .*; replace"),
    ("infinity among missing", array(np.where(DATA > 0, np.inf, np.nan)), TRAIN_X, 1, "x.npy .* 720 infinite"),
    (
        "NaN in a sweep",
        array(np.where(DATA > 0, np.nan, 0)),
        f"{TRAIN_X} --sweep rank=1,2",
        1,
        "--sweep requires complete samples, but x.npy contains NaN",
    ),
    ("nothing known", array(DATA * np.nan), TRAIN_X + " --missing-nan", 1, "no entries are known"),
    ("objects", lambda: np.save("x.npy", np.array([None]), allow_pickle=True), TRAIN_X, 1, "Python objects"),
    ("complex numbers", array(DATA * 1j), TRAIN_X, 1, "complex64"),
    ("words", array(np.array(["a", "b"])), TRAIN_X, 1, "booleans, integers or floats"),
    ("one dimension", array(np.ones(5)), TRAIN_X, 1, r"shape \(5,\)"),
    ("no samples", array(np.ones((0, 4, 6))), TRAIN_X, 1, "no entries"),
    ("npz of two, no key", lambda: np.savez("x.npz", a=DATA, b=DATA), TRAIN.format("x.npz"), 1, r"2 arrays \(a, b\)"),
    ("npz, wrong key", lambda: np.savez("x.npz", a=DATA), TRAIN.format("x.npz:b"), 1, "no array 'b', only a"),
    ("damaged npz", lambda: write("x.npz", b"PK\3\4 and more"), TRAIN.format("x.npz"), 1, "corrupted"),
    ("below 0", array(DATA - 1), TRAIN_X, 1, "from 0 to 1, got -1 to 0.*Gaussian"),
    ("above 1", array(DATA * 255), TRAIN_X, 1, "from 0 to 1, got 0 to 255.*Gaussian"),
    ("rows that are not squares", array(DATA.reshape(60, 24)), TRAIN_X, 1, "2 axes.*24 entries.*--shape"),
    (
        "a shape that does not fit",
        None,
        TRAIN.format("data.npy") + " --shape 5x5",
        1,
        "25 entries, but samples have 24",
    ),
    (
        "more modes than data",
        None,
        "train data.npy --hidden 2x2x2 --out new",
        1,
        "3 axes, but samples have 2 .4x6.; pass --shape",
    ),
    (
        "a hidden shape in no form",
        None,
        "train data.npy --hidden 25y25 --out new",
        2,
        "expected a shape such as 25x25, got '25y25'",
    ),
    (
        "an enormous hidden shape",
        None,
        "train data.npy --hidden 99999x99999 --out new",
        2,
        "exceeds the limit of 2,147,483,648",
    ),
    ("rank 0", None, TRAIN.format("data.npy") + " --rank 0", 2, "--rank.*1"),
    ("rank of full weights", None, "train data.npy --hidden 9 --rank 2 --out new", 2, "--rank 2 has no.*omit it"),
    ("negative epochs", None, TRAIN.format("data.npy") + " --epochs -1", 2, "--epochs.*1, got '-1'"),
    ("a rate below 0", None, TRAIN.format("data.npy") + " --learning-rate -1", 1, "learning_rate must be positive"),
    (
        "a rate far too high",
        None,
        TRAIN.format("data.npy") + " --recipe paper --learning-rate 3e38 --batch-size 3",
        1,
        r"not finite. Lower the learning rate \(now 3e\+38\) or use the default recipe$",
    ),
    ("an empty sweep", None, TRAIN.format("data.npy") + " --sweep ;", 2, "--sweep.*';' does not contain any parameter"),
    (
        "a sweep without values",
        None,
        TRAIN.format("data.npy") + " --sweep rank",
        2,
        "'rank' does not have the form NAME=VALUE,VALUE",
    ),
    (
        "a sweep that repeats a value",
        None,
        TRAIN.format("data.npy") + " --sweep batch_size=5;rank=1,2,1",
        2,
        "--sweep.*'rank=1,2,1' contains a value more than once",
    ),
    (
        "a sweep that repeats a parameter",
        None,
        TRAIN.format("data.npy") + " --sweep rank=1;rank=2",
        2,
        "--sweep.* names the parameter 'rank' more than once",
    ),
    (
        "a sweep of nothing",
        None,
        TRAIN.format("data.npy") + " --sweep x=1",
        1,
        "parameter 'x', but MVRBM has only back",
    ),
    ("a sweep with a log", None, TRAIN.format("data.npy") + " --sweep rank=1 --log a.csv", 2, "--sweep .* with --log"),
    ("more axes than hidden", array(DATA.reshape(60, 2, 2, 6)), TRAIN_X, 1, "2 axes, but samples have 3 .2x2x6."),
    ("unknown visible unit", None, TRAIN.format("data.npy") + " --visible fish", 1, "one of .*gaussian.*'fish'"),
    ("unknown hidden unit", None, TRAIN.format("data.npy") + " --hidden-unit fish", 1, "one of .*'fish'"),
    ("unknown coupling", None, TRAIN.format("data.npy") + " --coupling fish:2", 1, "fish"),
    ("a coupling in no form", None, TRAIN.format("data.npy") + " --coupling cp:x", 1, "as in kronecker:8"),
    (
        "rank and coupling",
        None,
        TRAIN.format("data.npy") + " --rank 2 --coupling dense",
        2,
        "--rank 2 .* --coupling dense",
    ),
    ("a shape and a model to continue", None, TRAIN.format("data.npy") + " --init model", 2, "--init .* with --hidden"),
    ("no model to continue", None, "train data.npy --init gone --out new", 1, "gone does not exist"),
    ("chains of cd", None, TRAIN.format("data.npy") + " --negative cd --chains 9", 1, "--chains .*--negative pcd or"),
    ("no hidden shape", None, "train data.npy --out new", 2, "--hidden SHAPE .* or --init MODEL"),
    ("unknown option", None, "info model --color red", 2, "--color"),
    ("unknown command", None, "trian data.npy", 2, "No such command 'trian'"),
    ("no sub-command", None, "data", 2, "Missing command"),
    ("a model is there", None, "train data.npy --hidden 3x2 --out model", 1, "model already exists; use --force"),
    (
        "force is for models",
        lambda: write("model/x", b""),
        "train data.npy --hidden 2 --out model --force",
        1,
        "not part of a model",
    ),
    (
        "other files first",
        lambda: write("model/x", b""),
        "train data.npy --hidden 2 --out model",
        1,
        "not part of a model",
    ),
    ("model folder is a file", None, "train data.npy --hidden 3x2 --out data.npy", 1, "data.npy is a file"),
    ("model folder below a file", None, "train data.npy --hidden 3x2 --out data.npy/m", 1, "data.npy is a file"),
    (
        "log is there",
        lambda: write("l.csv", b"x"),
        TRAIN.format("data.npy") + " --log l.csv",
        1,
        "l.csv already exists",
    ),
    ("log nowhere", None, TRAIN.format("data.npy") + " --log no/l.csv", 1, "no does not exist"),
    ("checkpoints in a file", None, TRAIN.format("data.npy") + " --checkpoints data.npy", 1, "data.npy is a file"),
    ("wrong shape for the model", array(np.ones((5, 6, 4))), RECONSTRUCT_X, 1, r"shape \(4, 6\), got \(6, 4\)"),
    ("wrong rows for the model", array(np.ones((5, 7))), "transform model x.npy o.npy", 1, "7 features.* 24 features"),
    ("wrong values for the model", array(DATA * 9), RECONSTRUCT_X, 1, "from 0 to 1"),
    ("output is there", array(DATA), "reconstruct model data.npy x.npy", 1, "x.npy already exists; use --force"),
    ("output is a folder", None, "sample model model", 1, "must end in"),
    ("output below a file", None, "sample model data.npy/out.npy", 1, "data.npy is a file"),
    ("output nowhere", None, "sample model no/out.npy", 1, "no does not exist"),
    ("output of unknown kind", None, "sample model out.xls", 1, "must end in .npy, .png"),
    ("images of features", None, "transform model data.npy out.png", 1, "must end in .npy"),
    ("no model", None, "info gone", 1, "gone does not exist"),
    ("a file as model", None, "info data.npy", 1, "data.npy is not a model folder"),
    ("a folder that is no model", lambda: Path("f").mkdir(), "sample f out.npy", 1, "f is not a model folder: con"),
    ("a model of the future", change_config(format_version=99), "info model", 1, "format version 99"),
    ("a foreign config", change_config(format="other"), "sample model o.npy", 1, "does not describe"),
    ("damaged config", lambda: write("model/config.json", b"{"), "info model", 1, "not valid JSON"),
    ("damaged description", change_config(estimator={"class": "MVRBM"}), "sample model o.npy", 1, "corrupted"),
    (
        "description of other units",
        change_visible,
        "sample model o.npy",
        1,
        "'gaussian', but the saved model has bernoulli units",
    ),
    ("unknown class", change_config(estimator={"class": "X"}), "sample model o.npy", 1, "'X'"),
    ("truncated weights", cut_weights(200), "info model", 1, "truncated"),
    ("damaged weights", lambda: write("model/model.safetensors", bytes(2000)), "info model", 1, "corrupted"),
    ("weights gone", lambda: Path("model/model.safetensors").unlink(), "info model", 1, "error: model/model.s"),
    ("several modalities", several_modalities, "sample model o.npy", 1, "MMVRBM.*use the Python interface"),
    ("a machine alone", machine_alone, "sample model o.npy", 1, "BoltzmannMachine, which has no method 'sample'"),
    ("classes of no classifier", None, "predict model data.npy o.npy", 1, "MVRBM, which has no method 'predict'"),
    (
        "mask of wrong shape",
        array(np.ones((6, 4, 1), bool)[:5]),
        "inpaint model data.npy o.npy --mask x.npy",
        1,
        r"\(4, 6\)",
    ),
    ("mask of gray values", array(DATA[0] / 3), "inpaint model data.npy o.npy --mask x.npy", 1, "is not a mask"),
    ("two masks", None, "inpaint model data.npy o.npy --mask x.npy --hide left", 2, "got --mask and --hide"),
    ("no mask", None, "inpaint model data.npy o.npy", 2, "one of --mask, --hide and --missing-nan"),
    ("nothing to fill in", None, "inpaint model data.npy o.npy --missing-nan", 1, "contains no NaN"),
    ("no samples wanted", None, "sample model o.npy -n 0", 2, "--number.*1"),
    ("seed below 0", None, "sample model o.npy --seed -1", 2, "--seed"),
    ("unknown device", None, "sample model o.npy --device tpu", 2, "tpu"),
    ("unknown set", None, "data where mnits", 1, "unknown dataset 'mnits'"),
    ("unknown set to fetch", None, "data fetch mnits", 1, "unknown dataset"),
    ("set that is not here", None, "data where mnist", 1, "mvrbm data fetch mnist"),
    ("set to train on is not here", None, TRAIN.format("mnist"), 1, "mnist-5k"),
    ("part that a set has not", None, TRAIN.format("digits:test"), 1, "no test split"),
    ("report is there", lambda: write("r.html", b"x"), "demo --out r.html --quick", 1, "r.html already exists"),
    ("report nowhere", None, "demo --out no/r.html --quick", 1, "no does not exist"),
]


@pytest.mark.parametrize(("before", "command", "code", "says"), [m[1:] for m in MISTAKES], ids=[m[0] for m in MISTAKES])
def test_a_mistake_is_one_clear_line_and_leaves_nothing_behind(mistake, before, command, code, says):
    mistake(before, command, code, says)


def test_there_are_twenty_kinds_of_mistakes_and_more():
    assert len({name for name, *_ in MISTAKES}) == len(MISTAKES) >= 20


WRITERS = [
    ("transform", "transform model data.npy out.npy"),
    ("reconstruct", "reconstruct model data.npy out.png"),
    ("sample", "sample model out.npy -n 2 --steps 1"),
    ("inpaint", "inpaint model data.npy out.npy --hide left --steps 1 --burn-in 0"),
    ("page", "page model --out out.html"),
    ("train", "train data.npy --hidden 2x2 --epochs 1 --out out --quiet"),
]


@pytest.mark.parametrize("command", [w[1] for w in WRITERS], ids=[w[0] for w in WRITERS])
def test_no_space_left(mvrbm, place, monkeypatch, command):
    def no_space(descriptor):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    former = there(place)
    monkeypatch.setattr(os, "fsync", no_space)
    code, out, err = mvrbm(command)
    assert (code, out) == (1, "")
    assert err.count("\n") == 1
    assert "No space left on device" in err
    assert there(place) == former


@pytest.mark.slow
def test_a_disk_that_really_takes_no_more(place):
    """The system itself ends a write in the middle: here by a limit on the size of files."""
    former = there(place)
    small = 4096
    result = subprocess.run(
        [sys.executable, "-m", "mvrbm", "sample", "model", "out.npy", "-n", "200", "--steps", "1", "--device", "cpu"],
        capture_output=True,
        text=True,
        preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (small, small)),
    )
    assert result.returncode == 1
    assert result.stderr == "error: out.npy cannot be written: File too large\n"
    assert there(place) == former


@pytest.mark.parametrize("command", ["sample model o.npy", TRAIN.format("data.npy"), "demo --quick"])
def test_no_gpu(mvrbm, place, monkeypatch, command):
    import torch

    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    former = there(place)
    code, out, err = mvrbm(command, "--device", "cuda")
    assert (code, out) == (1, "")
    assert re.fullmatch("error: device is 'cuda', but PyTorch found no GPU; .*", err.splitlines()[-1])
    assert there(place) == former


@pytest.mark.parametrize(
    ("error", "says"),
    [
        (MemoryError(), "out of memory"),
        (RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to allocate 9 bytes"), "out of memory"),
        (PermissionError(errno.EACCES, "Permission denied", "data.npy"), "data.npy: Permission denied"),
        (ValueError("two\nlines"), "two lines"),
    ],
)
def test_errors_of_files_and_memory_are_one_line(mvrbm, monkeypatch, error, says):
    def fail(*args, **kwargs):
        raise error

    monkeypatch.setattr(arrays, "read_array", fail)
    code, out, err = mvrbm("transform", "model", "data.npy", "o.npy")
    assert (code, out) == (1, "")
    assert err == f"error: {says}; use a smaller model, batch or input\n" if "memory" in says else f"error: {says}\n"


def test_our_own_mistakes_keep_their_traceback(mvrbm, monkeypatch):
    monkeypatch.setattr(arrays, "read_array", lambda *args, **kwargs: 1 // 0)
    with pytest.raises(ZeroDivisionError):
        mvrbm("transform", "model", "data.npy", "o.npy")


def test_debugging_shows_where_a_mistake_came_from(mvrbm, monkeypatch):
    monkeypatch.setenv("MVRBM_DEBUG", "1")
    with pytest.raises(InputError):
        mvrbm("transform", "model", "gone.npy", "o.npy")


def test_ctrl_c_before_training_is_told(mvrbm, monkeypatch):
    def interrupt(*args, **kwargs):
        raise KeyboardInterrupt

    monkeypatch.setattr(arrays, "read_array", interrupt)
    assert mvrbm("transform", "model", "data.npy", "o.npy") == (130, "", "error: interrupted\n")


# -- help -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("command", COMMANDS)
def test_help_lists_common_options(mvrbm, command):
    code, out, err = mvrbm(command, "--help")
    assert (code, err) == (0, "")
    assert "--json" in out
    assert [option for option in ("--seed", "--device") if option in out] == list(COMMANDS[command])


def test_help_comes_for_nothing_at_all(mvrbm):
    code, out, _ = mvrbm()
    assert code == 0
    assert all(command.split()[0] in out for command in COMMANDS)
    assert mvrbm("--help")[1] == out


# -- the commands -----------------------------------------------------------------------------------


def ok(result):
    code, out, err = result
    assert code == 0, err
    return out


TRAININGS = [
    ("24", "data.npy", "RBM", [4, 6]),
    ("3x2", "data.npy", "MVRBM", [4, 6]),
    ("2x2", "squares.npy", "MVRBM", [5, 5]),
    ("3x2", "squares.npy --shape 1x25", "MVRBM", [1, 25]),
    ("2x2x2", "data.npy --shape 2x2x6", "TVRBM", [2, 2, 6]),
    ("3x2", "data.npy --rank 2 --negative pcd --gibbs-steps 2", "MVRBM", [4, 6]),
    ("3x2", "data.npy --recipe paper", "MVRBM", [4, 6]),
    ("3x2", "data.npy --recipe generative", "MVRBM", [4, 6]),
    ("3x2", "real.npy --recipe generative --visible gaussian", "MVRBM", [4, 6]),
    ("3x2", "real.npy --recipe generative --visible gaussian-learned", "MVRBM", [4, 6]),
    ("3x2", "real.npy --recipe generative --visible gaussian-axes", "MVRBM", [4, 6]),
    ("3x2", "counts.npy --recipe generative --visible poisson", "MVRBM", [4, 6]),
    ("3x2", "one-hot.npy --recipe generative --visible categorical", "MVRBM", [4, 6]),
    ("3x2", "data.npy --labels labels.npy", "ClassificationMVRBM", [4, 6]),
    ("24", "data.npy --labels labels.txt", "ClassificationMVRBM", [4, 6]),
    ("3x2", "data.npy --negative tempered --chains 8", "MVRBM", [4, 6]),
    ("3x2", "real.npy --visible gaussian", "MVRBM", [4, 6]),
    ("3x2", "real.npy --visible gaussian-learned --hidden-unit bernoulli", "MVRBM", [4, 6]),
    ("3x2", "data.npy --coupling kronecker:2", "MVRBM", [4, 6]),
    ("3x2", "data.npy --coupling mpo:2", "MVRBM", [4, 6]),
    ("3x2", "data.npy --coupling tucker:2x2", "MVRBM", [4, 6]),
    ("3x2", "data.npy --coupling dense", "MVRBM", [4, 6]),
    ("5", "data.npy --coupling cp:2", "RBM", [4, 6]),
    ("3x2", "counts.npy --visible poisson", "MVRBM", [4, 6]),
    ("3x2", "images", "MVRBM", [4, 6]),
]


@pytest.mark.parametrize(("hidden", "source", "kind", "shape"), TRAININGS)
def test_train(mvrbm, hidden, source, kind, shape):
    np.save("squares.npy", np.random.default_rng(0).random((30, 25)) < 0.5)
    np.save("real.npy", np.random.default_rng(0).normal(5, 3, DATA.shape))
    np.save("counts.npy", np.random.default_rng(0).poisson(2, DATA.shape))
    np.save("one-hot.npy", np.eye(6)[np.random.default_rng(0).integers(6, size=DATA.shape[:2])])
    np.save("labels.npy", np.arange(60) % 2)
    Path("labels.txt").write_text("left\nright\n" * 30)
    Path("images").mkdir()
    for number, sample in enumerate(STRIPES[:12]):
        Image.fromarray(np.uint8(255) * sample).save(f"images/{number}.png")
    out = ok(mvrbm("train", *source.split(), "--hidden", hidden, "--epochs", 2, "--out", "new/model", "--json"))
    result = json.loads(out)
    assert result["class"] == kind
    assert result["visible_shape"] == shape
    assert result["epochs"] == 2
    files = {path.name for path in Path("new").rglob("*.*")}
    assert files - {"chains.safetensors"} == {"config.json", "model.safetensors"}
    described = json.loads(ok(mvrbm("info", "new/model", "--json")))
    assert described["class"] == kind
    assert described["visible"]["visible"]["shape"] == shape
    assert described["parameters"] == result["parameters"]


def test_training_learns(mvrbm):
    ok(mvrbm("train", "data.npy", "--hidden", "4x4", "--epochs", 200, "--batch-size", 10, "--out", "new"))
    ok(mvrbm("reconstruct", "new", "data.npy", "back.npy"))
    assert np.abs(np.load("back.npy") - DATA).mean() < 0.1


def test_training_shows_progress_on_standard_error(mvrbm):
    code, out, err = mvrbm("train", "data.npy", "--hidden", "2x2", "--epochs", 3, "--out", "new")
    assert code == 0
    assert out.startswith("new: MVRBM 4x6 -> 2x2, ")
    assert out.count("\n") == 1
    assert [line.split(",")[0] for line in err.splitlines()] == [f"epoch {n} of 3" for n in (1, 2, 3)]
    assert mvrbm("train", "data.npy", "--hidden", "2x2", "--epochs", 1, "--out", "n", "--quiet")[2] == ""


def test_the_same_seed_gives_the_same_model(mvrbm):
    for out, seed in [("a", 1), ("b", 1), ("c", 2)]:
        ok(mvrbm("train", "data.npy", "--hidden", "3x2", "--epochs", 2, "--out", out, "--seed", seed))
    a, b, c = ((Path(name) / "model.safetensors").read_bytes() for name in "abc")
    assert a == b != c


def test_force_replaces_a_model(mvrbm):
    ok(mvrbm("train", "data.npy", "--hidden", "5x5", "--epochs", 1, "--out", "model", "--force"))
    assert json.loads(ok(mvrbm("info", "model", "--json")))["hidden"]["shape"] == [5, 5]


def test_log_checkpoints_and_resuming(mvrbm):
    train = "train data.npy --hidden 3x2 --batch-size 10 --seed 3 --json --quiet"
    ok(mvrbm(train, "--epochs", 4, "--out", "whole", "--log", "whole.csv"))
    half = train + " --out half --log half.csv --checkpoints points"
    first = json.loads(ok(mvrbm(half, "--epochs", 2)))
    assert (first["epochs"], first["updates"], first["resumed"]) == (2, 12, False)
    second = json.loads(ok(mvrbm(half, "--epochs", 4, "--resume")))
    assert (second["epochs"], second["updates"], second["resumed"]) == (4, 24, True)
    assert Path("half/model.safetensors").read_bytes() == Path("whole/model.safetensors").read_bytes()
    rows = [[line.split(",")[:4] for line in Path(name).read_text().splitlines()] for name in ("whole.csv", "half.csv")]
    assert rows[0] == rows[1]
    assert len(rows[0]) == 5


def test_resuming_a_longer_run_is_noted(mvrbm):
    command = "train data.npy --hidden 2x2 --out new --quiet --checkpoints run"
    assert ok(mvrbm(f"{command} --epochs 3"))
    code, _, err = mvrbm(f"{command} --epochs 2 --resume")
    assert (code, err) == (0, "note: --epochs 2 has no effect because the run was already trained for 3 epochs\n")
    assert mvrbm(f"{command} --epochs 4 --resume")[2] == ""


def test_checkpoints_of_another_machine_raise(mvrbm):
    train = "train data.npy --epochs 1 --checkpoints points"
    ok(mvrbm(train, "--hidden", "3x2", "--out", "a"))
    code, _, err = mvrbm(train, "--hidden", "2x2", "--out", "b", "--resume", "--ignore-mismatch")
    assert code == 1
    assert "another machine" in err
    assert not Path("b").exists()


TRAIN = "train data.npy --hidden 3x2 --epochs 2 --batch-size 10 --seed 3 --quiet"
TRAINING = {
    "train": f"{TRAIN} --out new",
    "labels": f"{TRAIN} --labels labels.npy --out new",
    "sweep": f"{TRAIN} --sweep rank=1,2 --out new",
    "stack": "train data.npy --init stack --epochs 2 --batch-size 10 --quiet --out new",
    "topics": "topics counts.npz --topics 3 --epochs 2 --quiet --save new",
}


def resumable_inputs():
    np.save("labels.npy", np.arange(len(DATA)) % 2)
    DeepMVRBM(((3, 2), (2, 2)), n_epochs=1, random_state=0, device="cpu").fit(DATA).save("stack")
    counts = np.random.default_rng(0).poisson(1.0, (40, 12))
    sparse.save_npz("counts.npz", sparse.csr_matrix(counts))
    sparse.save_npz("other.npz", sparse.csr_matrix(counts[::-1]))
    np.save("other.npy", 1 - DATA)


@pytest.mark.parametrize("kind", TRAINING)
def test_earlier_checkpoints_are_resumed_or_replaced_only_on_request(mvrbm, kind):
    """The commands must not resume on other data by accident, and must not lose a model or a checkpoint."""
    resumable_inputs()
    command = f"{TRAINING[kind]} --checkpoints points"
    ok(mvrbm(command))
    stored = content("points")
    model = Path("new/model.safetensors").read_bytes()

    code, _, err = mvrbm(command.replace("new", "another"))
    assert (code, err.count("\n")) == (1, 1)
    assert "points contains checkpoints of an earlier run; use --resume to continue that run, or --force" in err

    other = command.replace("data.npy", "other.npy").replace("counts.npz", "other.npz")
    code, _, err = mvrbm(other, "--resume")
    assert (code, err.count("\n")) == (1, 1)
    assert "the data has different values (use --ignore-mismatch" in err
    assert (Path("new/model.safetensors").read_bytes(), content("points")) == (model, stored)

    ok(mvrbm(command, "--resume"))  # nothing is left to train
    assert Path("new/model.safetensors").read_bytes() == model

    code, _, err = mvrbm(other, "--resume", "--ignore-mismatch")
    assert code == 0
    assert "the data has different values. Training resumes anyway" in err

    ok(mvrbm(command, "--force"))  # starts again
    assert Path("new/model.safetensors").read_bytes() == model
    assert {path.name for path in Path("points").iterdir()} == {path.split("/")[1] for path in stored}


def content(folder):
    return {str(path): path.read_bytes() for path in Path(folder).rglob("*") if path.is_file()}


@pytest.mark.parametrize("kind", TRAINING)
def test_a_run_that_cannot_start_keeps_earlier_checkpoints(mvrbm, kind, monkeypatch):
    resumable_inputs()
    command = f"{TRAINING[kind]} --checkpoints points"
    ok(mvrbm(command))
    stored = content("points")
    wrong = "--sweep rank=0,1" if kind == "sweep" else "--learning-rate -1"
    if kind != "topics":
        assert mvrbm(f"{command} --force {wrong}")[0] == 1
        assert content("points") == stored
    with monkeypatch.context() as patch:
        patch.setattr(Trainer, "prepare", lambda *args, **options: np.zeros(2).reshape(3))  # a ValueError
        assert mvrbm(f"{command.replace('new', 'another')} --force")[0] == 1
        assert mvrbm(f"{command.replace(' points', ' unused')} --force")[0] == 1
    assert content("points") == stored
    assert not Path("unused").exists()
    ok(mvrbm(command, "--resume"))


def test_resuming_replaces_only_the_outputs_of_the_same_run(mvrbm):
    command = f"{TRAIN} --checkpoints points"
    ok(mvrbm(command, "--out", "own", "--log", "own.csv"))
    shutil.copytree("model", "mine")
    before = content("mine")
    Path("mine.csv").write_text("notes")
    code, _, err = mvrbm(command, "--out", "mine", "--resume")
    assert (code, content("mine")) == (1, before)
    assert "mine already exists; use --force" in err
    code, _, err = mvrbm(command, "--out", "own", "--log", "mine.csv", "--resume")
    assert (code, Path("mine.csv").read_text()) == (1, "notes")
    assert "mine.csv already exists; use --force" in err
    ok(mvrbm(command, "--out", "own", "--log", "own.csv", "--resume"))
    ok(mvrbm(command, "--out", "mine", "--resume", "--force"))  # resumes, and replaces the model
    assert Path("mine/model.safetensors").read_bytes() == Path("own/model.safetensors").read_bytes()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ("--resume", "--resume requires --checkpoints"),
        ("--checkpoints points --ignore-mismatch", "--ignore-mismatch requires --resume"),
    ],
)
@pytest.mark.parametrize("kind", ["train", "topics"])
def test_options_of_resuming_require_each_other(mvrbm, kind, options, message):
    resumable_inputs()
    code, _, err = mvrbm(f"{TRAINING[kind]} {options}")
    assert code == 2
    assert message in err
    assert not Path("new").exists()


def test_resuming_without_checkpoints_starts_from_the_beginning(mvrbm):
    code, _, err = mvrbm(f"{TRAIN} --out new --checkpoints points --resume")
    assert code == 0
    assert "points contains no checkpoints, so training starts from the beginning" in err


def test_a_run_restarted_by_torchrun_resumes(mvrbm, monkeypatch):
    command = f"{TRAIN} --out new --checkpoints points --json"
    ok(mvrbm(command.replace("--epochs 2", "--epochs 1")))
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", "1")
    assert json.loads(ok(mvrbm(command)))["resumed"]


def test_missing_entries(mvrbm):
    broken = DATA.copy()
    broken[::3, :2] = np.nan  # of both kinds of stripes
    np.save("broken.npy", broken)
    command = "train broken.npy --hidden 4x4 --epochs 60 --batch-size 10 --quiet"
    code, _, err = mvrbm(f"{command} --out new")
    assert (code, err) == (
        0,
        f"note: {np.isnan(broken).sum()} of {broken.size:,} entries are NaN, which is treated as missing\n",
    )
    ok(mvrbm(f"{command} --out same --missing-nan"))
    assert Path("same/model.safetensors").read_bytes() == Path("new/model.safetensors").read_bytes()
    ok(mvrbm("inpaint new broken.npy filled.npy --missing-nan"))
    filled = np.load("filled.npy")
    np.testing.assert_array_equal(filled[~np.isnan(broken)], DATA[~np.isnan(broken)])
    assert np.abs(filled - DATA)[np.isnan(broken)].mean() < 0.1
    np.save("all.npy", np.where(np.arange(6) == 0, np.nan, DATA))
    code, _, err = mvrbm("train all.npy --hidden 4x4 --out x --missing-nan --log l.csv")
    assert code == 1
    assert "without missing entries" in err


def test_bytes_that_are_0_and_1_are_not_scaled(mvrbm):
    np.save("bits.npy", STRIPES.astype(np.uint8))
    code, _, err = mvrbm("train", "bits.npy", "--hidden", "2x2", "--epochs", 1, "--out", "new", "--quiet")
    assert (code, err) == (0, "")
    ok(mvrbm("transform", "new", "bits.npy", "bits-features.npy"))
    np.save("floats.npy", STRIPES.astype(np.float32))
    ok(mvrbm("transform", "new", "floats.npy", "features.npy"))
    np.testing.assert_array_equal(np.load("bits-features.npy"), np.load("features.npy"))


def test_transform(mvrbm, trained):
    result = json.loads(ok(mvrbm("transform", "model", "data.npy", "features.npy", "--json")))
    assert result == {"out": "features.npy", "shape": [60, 6], "dtype": "float32"}
    expected = package.load(trained, "cpu").transform(DATA)
    np.testing.assert_allclose(np.load("features.npy"), expected, rtol=1e-6)
    np.save("rows.npy", DATA.reshape(60, 24))
    ok(mvrbm("transform", "model", "rows.npy", "features.npy", "--force"))
    np.testing.assert_allclose(np.load("features.npy"), expected, rtol=1e-6)


def test_a_half_and_its_mask_give_the_same(mvrbm):
    np.save("masks.npy", np.broadcast_to(np.arange(4)[:, None] >= 2, DATA.shape))
    ok(mvrbm("inpaint model data.npy c.npy --hide top --steps 5 --burn-in 0"))
    ok(mvrbm("inpaint model data.npy d.npy --mask masks.npy --steps 5 --burn-in 0"))
    np.testing.assert_array_equal(np.load("c.npy"), np.load("d.npy"))


def test_score(mvrbm, trained):
    ok(mvrbm("score", "model", "data.npy", "scores.npy"))
    np.testing.assert_allclose(np.load("scores.npy"), package.load(trained, "cpu").score_samples(DATA), rtol=1e-6)


def test_likelihood(mvrbm, trained):
    machine = package.load(trained, "cpu").machine_
    exact = float(log_likelihood(machine, machine.as_layers(DATA)).mean())  # 2^6 hidden states
    found = json.loads(ok(mvrbm("likelihood model data.npy --chains 200 --temperatures 300 --json")))
    assert found["lower"] < exact < found["upper"]
    assert found["upper"] - found["lower"] < 3
    line = ok(mvrbm("likelihood model data.npy --chains 200 --temperatures 300"))
    assert f"{found['mean']:.2f} nats, interval {found['lower']:.2f} to {found['upper']:.2f}" in line


def test_commands_work_for_stacks_and_classifiers(mvrbm):
    labels = np.arange(60) % 2
    deep = DeepMVRBM([(3, 4), (2, 2)], n_epochs=1, device="cpu", random_state=0).fit(DATA)
    deep.save("deep")
    classifier = MVRBMClassifier((3, 3), n_epochs=2, device="cpu", random_state=0).fit(DATA, labels)
    classifier.save("classifier")
    assert ok(mvrbm("transform deep data.npy features.npy")) == "features.npy: 60x4 float32\n"
    np.testing.assert_allclose(np.load("features.npy"), deep.transform(DATA), rtol=1e-5)
    assert ok(mvrbm("sample deep samples.npy -n 3 --steps 2")).startswith("samples.npy: 3x4x6")
    ok(mvrbm("predict classifier data.npy labels.npy"))
    np.testing.assert_array_equal(np.load("labels.npy"), classifier.predict(DATA))
    for name, shape in [("deep", "1: hidden .*3x4\n.*2: visible"), ("classifier", "hidden .*3x3")]:
        assert re.search(shape, ok(mvrbm("info", name)), re.DOTALL)
    code, _, err = mvrbm("sample classifier o.npy")
    assert (code, err) == (
        1,
        "error: classifier contains a model of class MVRBMClassifier, which has no method 'sample' because it is a "
        "model with labels; use mvrbm predict\n",
    )


def test_init_continues_from_a_saved_model(mvrbm):
    ok(mvrbm("train data.npy --hidden 4x4 --epochs 60 --batch-size 10 --out first --quiet"))
    first = json.loads(ok(mvrbm("train data.npy --init first --epochs 1 --batch-size 10 --out second --quiet --json")))
    fresh = json.loads(ok(mvrbm("train data.npy --hidden 4x4 --epochs 1 --batch-size 10 --out new --quiet --json")))
    assert (first["class"], first["hidden_shape"]) == ("MVRBM", [4, 4])
    assert first["metrics"]["reconstruction_error"] < 0.5 * fresh["metrics"]["reconstruction_error"]
    rows = DATA.reshape(len(DATA), -1)
    np.save("rows.npy", rows)
    again = json.loads(ok(mvrbm("train rows.npy --init first --epochs 1 --out rows --quiet --json")))
    assert again["visible_shape"] == first["visible_shape"]
    DeepMVRBM([(3, 4), (2, 3)], n_epochs=1, device="cpu").fit(DATA).save("deep")
    assert (
        json.loads(ok(mvrbm("train data.npy --init deep --epochs 2 --out third --quiet --json")))["class"]
        == "DeepMVRBM"
    )


def test_reconstruct(mvrbm, trained):
    ok(mvrbm("reconstruct", "model", "data.npy", "back.npy", "--steps", 2))
    expected = package.load(trained, "cpu").reconstruct(DATA, steps=2)
    np.testing.assert_allclose(np.load("back.npy"), expected, rtol=1e-6)
    out = ok(mvrbm("reconstruct", "model", "data.npy", "back.png"))
    assert out == "back.png: 60x4x6 float32\n"
    with Image.open("back.png") as sheet:
        assert sheet.size == (6 * (8 * 7 - 1), 6 * (8 * 5 - 1))


def test_sample(mvrbm):
    for name, seed in [("a", 1), ("b", 1), ("c", 2)]:
        ok(mvrbm("sample", "model", f"{name}.npy", "-n", 10, "--steps", 5, "--seed", seed))
    a, b, c = (np.load(f"{name}.npy") for name in "abc")
    assert a.shape == (10, 4, 6)
    assert set(np.unique(a)) <= {0, 1}
    np.testing.assert_array_equal(a, b)
    assert not np.array_equal(a, c)
    ok(mvrbm("sample", "model", "sheet.png", "-n", 10, "--steps", 5, "--seed", 1, "--draws"))
    with Image.open("sheet.png") as sheet:
        assert sheet.size == (11 * (4 * 7 - 1), 11 * (3 * 5 - 1))
        assert np.asarray(sheet)[::11, ::11][:4, :6].tolist() == (a[0] * 255).tolist()


HALVES = {"left": np.s_[:, :3], "right": np.s_[:, 3:], "top": np.s_[:2], "bottom": np.s_[2:]}


@pytest.mark.parametrize("half", HALVES)
def test_inpaint(mvrbm, half):
    known = np.ones((4, 6), bool)
    known[HALVES[half]] = False
    steps = ["--steps", 3, "--burn-in", 0, "--seed", 5]
    ok(mvrbm("inpaint", "model", "data.npy", "half.npy", "--hide", half, *steps))
    filled = np.load("half.npy")
    np.testing.assert_array_equal(filled[:, known], DATA[:, known])
    assert not np.array_equal(filled[:, ~known], DATA[:, ~known])
    Image.fromarray(np.uint8(255) * known).save("mask.png")
    np.save("mask.npy", known.astype(np.int64))
    for mask in ("mask.png", "mask.npy"):
        ok(mvrbm("inpaint", "model", "data.npy", "mine.npy", "--mask", mask, *steps, "--force"))
        np.testing.assert_array_equal(np.load("mine.npy"), filled)


def test_vectors_have_no_half(mvrbm):
    RBM(2, n_epochs=1, device="cpu").fit(DATA.reshape(60, 24)).save("flat")
    np.save("rows.npy", DATA.reshape(60, 24))
    code, _, err = mvrbm("inpaint", "flat", "rows.npy", "o.npy", "--hide", "left")
    assert code == 1
    assert "has no left half" in err


def test_info(mvrbm):
    out = ok(mvrbm("info", "model"))
    for words in ("MVRBM", "bernoulli 4x6", "bernoulli 3x2", "kronecker rank 1", "float32", "model.safetensors"):
        assert words in out
    assert [line.split()[-1] for line in out.splitlines() if line.startswith("parameters")] == [str(24 + 6 + 12 + 12)]


FITTED = {
    "RBM": (package.RBM(3), ()),
    "MVRBM": (package.MVRBM((3, 2)), ()),
    "TVRBM": (package.TVRBM((3, 2)), ()),
    "MMVRBM": (package.MMVRBM((3, 2)), ()),
    "DeepMVRBM": (package.DeepMVRBM([(3, 2)]), ()),
    "MVRBMClassifier": (package.MVRBMClassifier((3, 2)), (np.arange(60) % 2,)),
    "DeepMVRBMClassifier": (package.DeepMVRBMClassifier([(3, 2)]), (np.arange(60) % 2,)),
    "ClassificationMVRBM": (package.ClassificationMVRBM((3, 2)), (np.arange(60) % 2,)),
    "MVRBMOutlierDetector": (package.MVRBMOutlierDetector((3, 2)), ()),
    "MVRBMImputer": (package.MVRBMImputer(n_factors=1), ()),
    "MatrixMixture": (package.MatrixMixture(2), ()),
    "SequenceRBM": (package.SequenceRBM(4), ()),
    "ReplicatedSoftmax": (package.ReplicatedSoftmax(2), ()),
    "SuperResolver": (package.vision.SuperResolver(2, 4, (2, 2), symmetric=False, n_patches=20), ()),
    "PhotoDenoiser": (package.vision.PhotoDenoiser("gray", steps=[package.vision.TrainingStep(n_samples=8)]), ()),
}


def test_every_estimator_that_can_be_saved_is_here():
    assert set(FITTED) == set(saving._LOADERS) - {saving.CHECKPOINT}


@pytest.mark.parametrize("name", FITTED)
def test_info_describes_every_estimator(mvrbm, name):
    model, labels = FITTED[name]
    data = {
        "MMVRBM": {"a": DATA},
        "RBM": DATA.reshape(60, 24),
        "ReplicatedSoftmax": DATA.reshape(60, 24),
        "SequenceRBM": ["ACDEF", "ACDEG", "ACCEF", "WYDEF"] * 3,
        "SuperResolver": list(np.random.default_rng(0).random((2, 16, 16))),
        "PhotoDenoiser": list(np.random.default_rng(0).random((2, 36, 36))),
    }.get(name, DATA)
    epochs = {"n_epochs": 1} if hasattr(model, "n_epochs") else {}
    model.set_params(**epochs, device="cpu", random_state=0).fit(data, *labels).save("saved")
    out = ok(mvrbm("info", "saved"))
    assert f" {name}\n" in out
    assert re.search(rf"^parameters +{model.n_parameters_:,}$", out, re.MULTILINE)
    assert re.search(r"^(1: )?visible '.*' +\w+ \d+", out, re.MULTILINE)
    stored = sum(math.prod(part.shape) for part in load_file("saved/model.safetensors").values())
    assert 0 < model.n_parameters_ <= stored


def test_models_of_columns_with_names_are_used_without_a_word(mvrbm):
    pd = pytest.importorskip("pandas")
    frame = pd.DataFrame(DATA.reshape(60, 24), columns=[f"x{n}" for n in range(24)])
    RBM(2, n_epochs=1, device="cpu").fit(frame).save("named")
    np.save("rows.npy", DATA.reshape(60, 24))
    assert mvrbm("transform", "named", "rows.npy", "o.npy") == (0, "o.npy: 60x2 float32\n", "")


def test_data(mvrbm, place):
    out = ok(mvrbm("data", "list"))
    assert [line.split()[0] for line in out.splitlines()][:3] == ["mnist-5k", "mnist", "fashion-mnist"]
    sets = json.loads(ok(mvrbm("data", "list", "--json")))["sets"]
    assert sets["mnist"]["path"] is None
    assert ok(mvrbm("data", "where", "digits")).strip() == sets["digits"]["path"]
    assert json.loads(ok(mvrbm("data", "fetch", "digits", "--json")))["path"] == sets["digits"]["path"]
    assert not (place / "cache").exists()


def test_named_sets_from_a_folder(mvrbm):
    for name, content in [("train-images-idx3", IDX), ("t10k-images-idx3", IDX)]:
        write(f"sets/mnist/{name}-ubyte", content)
    labels = bytes([0, 0, 8, 1]) + struct.pack(">I", 60) + bytes(60)
    for name in ("train-labels-idx1", "t10k-labels-idx1"):
        write(f"sets/mnist/{name}-ubyte", labels)
    assert ok(mvrbm("data", "where", "mnist", "--data-dir", "sets")) == "sets/mnist\n"
    ok(mvrbm("transform", "model", "mnist:test", "o.npy", "--data-dir", "sets"))
    assert np.load("o.npy").shape == (60, 6)


def test_fetch_without_a_network(mvrbm, monkeypatch, place):
    from mvrbm.io import datasets

    entry = datasets._SETS["mnist"]
    nobody = datasets._Files(entry.description, ("http://127.0.0.1:9/",), entry.checksums, entry.first_test_labels)
    monkeypatch.setitem(datasets._SETS, "mnist", nobody)
    code, out, err = mvrbm("data", "fetch", "mnist")
    assert (code, out) == (1, "")
    assert err.count("\n") == 1
    assert "Check the network connection" in err
    assert "mnist-5k" in err
    assert not [path for path in (place / "cache").rglob("*") if path.is_file()]


def test_demo(mvrbm, monkeypatch):
    asked = {}

    def run(out, **how):
        asked.update(how)
        print("working", file=sys.stderr)
        out.write_text("a page")
        return {"report": str(out), "seconds_total": 1.0}

    monkeypatch.setattr("mvrbm.pages.demo_report.run", run)
    code, out, err = mvrbm("demo", "--out", "r.html", "--quick", "--seed", 4, "--device", "cpu")
    assert (code, out, err) == (0, "r.html\n", "working\n")
    assert asked == {"seed": 4, "device": "cpu", "quick": True}
    assert json.loads(ok(mvrbm("demo", "--out", "r.html", "--force", "--json")))["report"] == "r.html"


# -- as a process -----------------------------------------------------------------------------------


def test_python_m_mvrbm(place):
    result = subprocess.run([sys.executable, "-m", "mvrbm", "info", "gone"], capture_output=True, text=True)
    assert (result.returncode, result.stdout) == (1, "")
    assert result.stderr == (
        "error: gone does not exist and is not the name of an included model (digits, labeled-digits)\n"
    )


@pytest.mark.slow
def test_a_reader_that_goes_away_is_no_error(place):
    process = subprocess.Popen(
        [sys.executable, "-m", "mvrbm", "info", "model"], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    process.stdout.close()
    err = process.stderr.read()
    process.wait(timeout=60)
    process.stderr.close()
    assert err == ""
    assert process.returncode in (0, 1)


def interrupted(command, number, sign):
    """Run a command, send a signal after the line `sign` on standard error, and return the code and the output."""
    process = subprocess.Popen(
        [sys.executable, "-m", "mvrbm", *command.split()], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    while not process.stderr.readline().startswith(sign):
        assert process.poll() is None
    process.send_signal(number)
    out, err = process.communicate(timeout=60)
    return process.returncode, out, err


@pytest.mark.slow
@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_interrupted_topics_are_shown_and_saved(place, number, code):
    resumable_inputs()
    command = "topics counts.npz --topics 3 --epochs 1000000 --device cpu"
    found, out, err = interrupted(f"{command} --save new --checkpoints points", number, "epoch 1 of")
    assert found == code
    assert len(out.splitlines()) == 3
    last = err.splitlines()[-1]
    assert re.match(r"error: interrupted after .* epochs: the partially trained model was saved to new", last)
    assert last.endswith("run the same command with --resume to continue")
    assert package.load("new", "cpu").n_epochs_ > 0
    found, _, err = interrupted(command, number, "epoch 1 of")
    assert found == code
    assert "no model was saved" in err.splitlines()[-1]


@pytest.mark.slow
def test_an_interrupted_sweep_says_that_nothing_was_saved(place):
    command = "train data.npy --hidden 3x2 --epochs 1000000 --sweep rank=1,2 --out new --checkpoints points"
    process = subprocess.Popen([sys.executable, "-m", "mvrbm", *command.split()], stderr=subprocess.PIPE, text=True)
    while not list(Path("points").glob("candidate-0/update-*")):
        assert process.poll() is None
    process.send_signal(signal.SIGTERM)
    _, err = process.communicate(timeout=60)
    assert process.returncode == 143
    assert "interrupted: no model was saved; run the same command with --resume to continue" in err
    assert not Path("new").exists()


@pytest.mark.slow
def test_ctrl_c_ends_the_batch_and_saves(place):
    command = "train data.npy --hidden 3x2 --epochs 1000000 --out new --checkpoints points --device cpu"
    code, out, err = interrupted(command, signal.SIGINT, "epoch 1 of")
    assert code == 130
    assert out.startswith("new: MVRBM")
    last = err.splitlines()[-1]
    assert last.startswith("error: interrupted after")
    assert "run the same command with --resume to continue" in last
    assert "Traceback" not in err
    assert isinstance(package.load("new", "cpu"), MVRBM)
    assert any(Path("points").iterdir())
