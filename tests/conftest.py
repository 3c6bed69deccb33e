import functools
import importlib
import importlib.util
import os
import re
import signal

import numpy as np
import pytest
import torch
from hypothesis import core, settings

from environment import Seeds, apply_settings, fixed_seeds

apply_settings()

settings.register_profile("repeatable", derandomize=not Seeds.offset, deadline=None, max_examples=20, database=None)
settings.load_profile("repeatable")
core.global_force_seed = Seeds.offset or None  # as `pytest --hypothesis-seed`

if signal.getsignal(signal.SIGINT) == signal.SIG_IGN:
    # A shell ignores Ctrl-C in its background jobs, and their children inherit that.
    signal.signal(signal.SIGINT, signal.default_int_handler)

if importlib.util.find_spec("triton") is not None and not torch.cuda.is_available():
    # Triton compiles or interprets a function according to this variable at the time of its definition. It is removed
    # afterwards, so that trainers do not choose the kernels.
    os.environ["TRITON_INTERPRET"] = "1"
    importlib.import_module("mvrbm.backends.cuda.per_sample_kernels")
    importlib.import_module("mvrbm.backends.cuda.graph_step")
    importlib.import_module("mvrbm.sampling.tempered_kernels")
    importlib.import_module("mvrbm.couplings.norm_kernels")
    del os.environ["TRITON_INTERPRET"]
    from triton.runtime import interpreter

    # The launch of a kernel patches the language. Every call of a function within it would do so again, which takes a
    # third of the time; once is enough for functions of other modules.
    patch_language = functools.cache(interpreter._patch_lang)

    def call(function, *args, **kwargs):
        patch_language(function.fn)
        return function.rewrite()(*args, **kwargs)

    interpreter.InterpretedFunction.__call__ = call


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item):
    """Run a test marked `fixed_seed`, and the fixtures that it is the first to need, without an offset of the seeds."""
    with fixed_seeds(item.get_closest_marker("fixed_seed") is not None):
        return (yield)


@pytest.fixture
def interpreted(monkeypatch):
    """Run the Triton kernels in their interpreter where there is no GPU."""
    if torch.cuda.is_available():
        yield
        return
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    # NumPy computes in place of the GPU, which overflows and divides by zero without a warning.
    with np.errstate(over="ignore", invalid="ignore", divide="ignore"):
        yield


@pytest.fixture
def mvrbm(place, capfd):
    """Run the command line in the folder that a test module has as `place`; return exit code, output and errors."""
    from mvrbm import cli

    def run(command="", *more):
        capfd.readouterr()
        code = cli.main([*command.split(), *map(str, more)])
        out, err = capfd.readouterr()
        return code, out, err

    return run


@pytest.fixture(scope="module")
@fixed_seeds()
def stripes():
    """A model of striped binary images, with one hidden unit per row, and such images."""
    from mvrbm import MVRBM

    random = np.random.default_rng(0)
    images = np.broadcast_to(random.random((100, 8, 1)) < 0.5, (100, 8, 8)).astype(np.float32)
    model = MVRBM((8, 1), n_epochs=0, random_state=0, device="cpu").fit(images)
    with torch.no_grad():
        down, across = model.machine_.links["visible"].parameters()  # (1, 8, 8) and (1, 1, 8)
        down.copy_(torch.eye(8)[None] * 10)
        across.fill_(1)
        model.machine_.layers["visible"].bias.fill_(-5)
        model.machine_.hidden.bias.fill_(-40)
    return model, images


def _there(folder):
    """Everything under a folder, with the contents of files."""
    return {path.relative_to(folder): path.is_file() and path.read_bytes() for path in folder.rglob("*")}


@pytest.fixture
def mistake(mvrbm, place):
    """Make a mistake on the command line, and check that it is one clear line and leaves nothing behind."""

    def make(before, command, code, says):
        if before is not None:
            before()
        former = _there(place)
        gave, out, err = mvrbm(command)
        assert gave == code, err
        assert out == ""
        assert err.startswith("error: ")
        assert err.count("\n") == 1
        assert err.endswith("\n")
        assert re.search(says, err), err
        assert "Traceback" not in err
        assert _there(place) == former

    return make
