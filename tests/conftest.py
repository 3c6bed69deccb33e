import importlib
import importlib.util
import os
import signal

import numpy as np
import pytest
import torch
from hypothesis import settings

settings.register_profile("repeatable", derandomize=True, deadline=None, max_examples=20, database=None)
settings.load_profile("repeatable")

if signal.getsignal(signal.SIGINT) == signal.SIG_IGN:
    # A shell starts what it runs in the background with Ctrl-C ignored, and children inherit that.
    signal.signal(signal.SIGINT, signal.default_int_handler)

if importlib.util.find_spec("triton") is not None and not torch.cuda.is_available():
    # Whether Triton's functions are compiled or interpreted is settled when they are defined, so before anything
    # else imports them. Then the variable goes away: trainers are not to choose the kernels by themselves.
    os.environ["TRITON_INTERPRET"] = "1"
    importlib.import_module("mvrbm.learning.paths.triton_kernels")
    del os.environ["TRITON_INTERPRET"]


@pytest.fixture
def interpreted(monkeypatch):
    """Let Triton's kernels run without a GPU."""
    if torch.cuda.is_available():
        yield
        return
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    # NumPy stands in for the GPU, which overflows and divides by zero in silence.
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
