"""Models that do not fit into memory are an error with numbers, before anything is allocated."""

import numpy as np
import pytest
import torch

from mvrbm import MVRBM, RBM, Bernoulli, Dense, memory
from mvrbm.cli import main
from mvrbm.errors import MemoryLimitError

X = (np.random.default_rng(0).random((20, 6, 6)) < 0.3).astype(np.float32)


@pytest.fixture(autouse=True)
def _one_gibibyte(monkeypatch):
    monkeypatch.setattr(memory, "available_memory", lambda device: 2**30)


LARGE = [
    (
        lambda: MVRBM((40_000, 40_000)).fit(X),
        r"training a hidden layer of shape \(40000, 40000\) .* requires 238.4 GiB",
    ),
    (lambda: Bernoulli((40_000, 40_000)), r"a layer of shape \(40000, 40000\) requires 6.0 GiB of memory, .* 1.0 GiB"),
    (
        lambda: MVRBM((6000, 6000)).fit(X),
        r"training a hidden layer of shape \(6000, 6000\) with batches of 20 requires",
    ),
    (lambda: Dense().allocate((36,), (10**8,)), "a dense coupling from .36,. to .100000000,. requires 13.4 GiB"),
]


@pytest.mark.parametrize(("fit", "message"), LARGE)
def test_needs_are_compared_with_what_there_is(fit, message):
    with pytest.raises(MemoryLimitError, match=message):
        fit()


def test_a_batch_is_no_larger_than_the_data():
    MVRBM((2, 2), batch_size=10**12, n_epochs=1).fit(X)


def test_the_command_says_so_in_one_line(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    np.save("data.npy", X)
    assert main(["train", "data.npy", "--hidden", "40000x40000", "--out", "model"]) == 1
    error = capsys.readouterr().err
    assert error.startswith(
        "error: training a hidden layer of shape (40000, 40000) with batches of 20 requires 238.4 GiB"
    )
    assert error.endswith(" of memory, but only 1.0 GiB is available\n")
    assert error.count("\n") == 1


def test_hidden_layers_that_cannot_be_trained_are_not_even_made(monkeypatch):
    monkeypatch.setattr("mvrbm.estimators.parameters.unit_named", pytest.fail)
    with pytest.raises(MemoryLimitError):
        RBM(10**8).fit(X.reshape(20, -1))


def test_shapes_alone_need_no_memory():
    with torch.device("meta"):
        Dense().allocate(Bernoulli((40_000, 40_000)).shape, (1000, 1000))


def test_there_is_memory(monkeypatch):
    monkeypatch.undo()
    assert 2**20 < memory.available_memory("cpu") < 2**50


def test_memory_that_pytorch_has_reserved_on_a_gpu_is_available(monkeypatch):
    monkeypatch.undo()
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (2**30, 2**36))
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda device: 5 * 2**30)
    monkeypatch.setattr(torch.cuda, "memory_allocated", lambda device: 2 * 2**30)
    assert memory.available_memory("cuda") == 4 * 2**30
