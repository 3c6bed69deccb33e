"""Devices by name, and threads for small products."""

import pytest
import torch

from mvrbm.devices import resolve_device, sensible_threads
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
