"""A process that is forked after training with several threads can train too: it does not wait for lost threads."""

import os
import signal
import subprocess
import sys
import time

import numpy as np
import pytest
import torch

from mvrbm import MVRBM, RBM

pytestmark = pytest.mark.skipif(not hasattr(os, "fork"), reason="a system without fork")


def succeeds_in_fork(function):
    """Call a function in a forked process, and return whether it ended without an error within a minute."""
    child = os.fork()
    if child == 0:
        status = 1
        try:
            function()
            status = 0
        finally:
            os._exit(status)
    end = time.monotonic() + 60
    while (ended := os.waitpid(child, os.WNOHANG))[0] == 0 and time.monotonic() < end:
        time.sleep(0.02)
    if ended[0] == 0:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
    return ended == (child, 0)


@pytest.mark.parametrize(
    ("model", "shape"), [(RBM(500, n_epochs=1, random_state=0), (400,)), (MVRBM((20, 20), n_epochs=1), (20, 20))]
)
def test_forked_process_does_not_wait_for_threads_of_its_parent(model, shape):
    X = (np.random.default_rng(0).random((300, *shape)) < 0.3).astype(np.float32)

    def use():
        model.fit(X).transform(X)
        model.score_samples(X)

    former = torch.get_num_threads()
    torch.set_num_threads(4)
    try:
        use()
        # A product of PyTorch itself, by as many threads as there are, must not have to wait either.
        assert succeeds_in_fork(lambda: torch.ones(1000, 1000).matmul(torch.ones(1000, 1000)).sum())
        assert succeeds_in_fork(use)
    finally:
        torch.set_num_threads(former)


IMPORTED = """
import os, sys, torch
import mvrbm.devices, mvrbm.training
torch.set_num_threads(3)
child = os.fork()
if child == 0:
    os._exit(torch.get_num_threads())
sys.exit(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
"""


def test_importing_the_package_does_not_change_forked_processes():
    assert subprocess.run([sys.executable, "-W", "ignore", "-c", IMPORTED], check=False, timeout=100).returncode == 3
