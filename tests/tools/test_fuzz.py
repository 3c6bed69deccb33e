"""Tests of the fuzzer, and a short run of it with a fixed seed."""

import random

import numpy as np
import pytest

from mvrbm.errors import InputError
from tools import fuzz, fuzz_inputs

COUNTS = {"idx": 600, "array": 600, "shards": 300, "image": 300, "table": 60, "documents": 300, "alignment": 300}
COUNTS |= dict.fromkeys(fuzz_inputs.FOLDERS, 60)


@pytest.mark.slow
@pytest.mark.parametrize(("reader", "count"), COUNTS.items())
def test_damaged_files_raise_only_documented_errors(reader, count):
    make, read = fuzz.readers(reader)[reader]
    counts = fuzz.run(reader, make, read, range(count))
    assert counts["finding"] == 0
    assert counts["read"] + counts["rejected"] == count
    assert counts["read"] >= 1  # Some damage does not matter.
    assert counts["rejected"] >= count // 3


def test_an_undocumented_error_is_a_finding_and_its_input_is_kept(tmp_path, capsys):
    def read(folder):
        raise KeyError((folder / "file").read_bytes())

    counts = fuzz.run("idx", lambda rng: {"file": b"abc"}, read, range(2), findings=tmp_path)
    assert counts == {"finding": 2}
    assert (tmp_path / "idx-1" / "file").read_bytes() == b"abc"
    assert "KeyError" in capsys.readouterr().err


def test_an_input_that_takes_too_long_is_a_finding(monkeypatch, capsys):
    def read(folder):
        while True:
            pass

    monkeypatch.setattr(fuzz, "SLOWEST", 0.05)
    monkeypatch.setattr(fuzz, "_warm_up", lambda *_: None)
    assert fuzz.run("idx", lambda rng: {"file": b""}, read, range(1)) == {"finding": 1}
    assert "TooSlow" in capsys.readouterr().err


def test_inputs_are_reproducible():
    make = fuzz.readers("array")["array"][0]
    again = [make(random.Random(f"0 array {number}")) for number in range(20)]
    assert again == [make(random.Random(f"0 array {number}")) for number in range(20)]


def test_allocating_beyond_the_limit_is_a_finding_even_if_the_error_is_documented(capsys):
    def read(folder):
        try:
            np.empty(2**30, np.uint8)
        except MemoryError as error:
            raise InputError("too large") from error

    assert fuzz.run("idx", lambda rng: {"file": b""}, read, range(1)) == {"finding": 1}
    assert "too large" in capsys.readouterr().err


@pytest.mark.parametrize("kind", [fuzz_inputs.PIPE, fuzz_inputs.DEVICE, fuzz_inputs.FOLDER])
@pytest.mark.parametrize("reader", list(fuzz.SHARES))
def test_readers_do_not_wait_for_pipes_and_devices(reader, kind, monkeypatch):
    monkeypatch.setattr(fuzz, "_STUCK", 2.0)
    make, read = fuzz.readers(reader)[reader]
    (valid,) = {frozenset(make(random.Random(0)))}
    for name in valid:
        files = dict.fromkeys(valid, b"") | {name: kind}
        assert fuzz.run(reader, lambda rng, files=files: files, read, range(1)) == {"rejected": 1}
