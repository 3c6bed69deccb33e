"""Devices by name, and threads for small products."""

import os
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from mvrbm.devices import one_thread, resolve_device, sensible_threads
from mvrbm.models import mvrbm


def test_devices_without_a_gpu(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert resolve_device() == resolve_device("cpu") == resolve_device(torch.device("cpu")) == torch.device("cpu")
    for device in ("cuda", "cuda:1", torch.device("cuda")):
        with pytest.raises(ValueError, match="PyTorch found no GPU; use 'cpu' or 'auto'"):
            resolve_device(device)


@pytest.mark.parametrize("device", ["gpu", "", 3.5, None])
def test_unknown_devices_are_errors(device):
    with pytest.raises(ValueError, match="device must be 'auto', 'cpu', 'cuda' or another PyTorch device"):
        resolve_device(device)


def test_each_process_of_torchrun_has_its_own_gpu(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    assert resolve_device("auto") == torch.device("cuda", 0)
    assert resolve_device("cuda:1") == torch.device("cuda", 1)
    monkeypatch.setenv("LOCAL_RANK", "3")
    assert resolve_device("auto") == resolve_device("cuda") == torch.device("cuda", 1)


def test_unusable_devices_are_errors():
    with pytest.raises(ValueError, match="device 'meta' is not supported by this PyTorch installation"):
        resolve_device("meta")


def test_small_products_use_one_thread():
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        with sensible_threads(mvrbm((3, 3), (2, 2)), 10) as threads:
            assert (torch.get_num_threads(), threads) == (1, 2)
        with sensible_threads(mvrbm((300, 300), (200, 200)), 100):
            assert torch.get_num_threads() == 2
        with sensible_threads(mvrbm((300, 300), (200, 200)), 100, needed=False) as threads:
            assert (torch.get_num_threads(), threads) == (1, 2)
        assert torch.get_num_threads() == 2
    finally:
        torch.set_num_threads(before)


@pytest.fixture
def two_threads():
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(before)


def in_a_thread(work):
    """Return the result of a function that runs in a new thread."""
    with ThreadPoolExecutor(1) as pool:
        return pool.submit(work).result()


@pytest.mark.usefixtures("two_threads")
def test_overlapping_contexts_restore_the_number_of_threads():
    entered = threading.Event()
    left = threading.Event()

    def other():
        with one_thread() as outside:
            entered.set()
            left.wait()
            inside = torch.get_num_threads()
        return outside, inside, torch.get_num_threads()

    with ThreadPoolExecutor(1) as pool:
        with one_thread() as outside:
            job = pool.submit(other)
            entered.wait()
        assert (outside, torch.get_num_threads()) == (2, 2)
        left.set()
        assert job.result() == (2, 1, 2)
    assert torch.get_num_threads() == 2
    assert in_a_thread(torch.get_num_threads) == 2


@pytest.mark.usefixtures("two_threads")
def test_contexts_in_each_other():
    with one_thread() as outer:
        with one_thread() as inner:
            assert (outer, inner, torch.get_num_threads()) == (2, 1, 1)
        assert torch.get_num_threads() == 1
        assert in_a_thread(torch.get_num_threads) == 1
    assert torch.get_num_threads() == 2


@pytest.mark.skipif(not hasattr(os, "fork"), reason="forks")
def test_a_forked_process_keeps_one_thread():
    code = (
        "import os, torch\n"
        "from mvrbm.devices import one_thread\n"
        "torch.set_num_threads(2)\n"
        "with one_thread():\n"
        "    child = os.fork()\n"
        "if not child:\n"
        "    with one_thread() as outside:\n"
        "        pass\n"
        "    os._exit(10 * outside + torch.get_num_threads())\n"
        "assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 11\n"
        "assert torch.get_num_threads() == 2\n"
    )
    done = subprocess.run([sys.executable, "-W", "ignore", "-c", code], capture_output=True, text=True, timeout=100)
    assert done.returncode == 0, done.stderr
