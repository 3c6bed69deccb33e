"""A process that was forked after training with several threads can train too: it does not wait for lost threads."""

import os
import signal
import time

import numpy as np
import pytest
import torch

from mvrbm import RBM


@pytest.mark.skipif(not hasattr(os, "fork"), reason="a system without fork")
def test_forked_process_does_not_wait_for_threads_of_its_parent():
    X = (np.random.default_rng(0).random((300, 400)) < 0.3).astype(np.float32)
    former = torch.get_num_threads()
    torch.set_num_threads(4)
    try:
        RBM(500, n_epochs=1, random_state=0).fit(X)
        child = os.fork()
        if child == 0:
            RBM(500, n_epochs=1, random_state=0).fit(X)
            os._exit(0)
    finally:
        torch.set_num_threads(former)
    end = time.monotonic() + 60
    while (ended := os.waitpid(child, os.WNOHANG))[0] == 0 and time.monotonic() < end:
        time.sleep(0.02)
    if ended[0] == 0:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
    assert ended == (child, 0)
