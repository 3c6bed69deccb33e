"""A short, fixed part of `tools/fuzz.py`: damaged files lead to the documented errors and to nothing else."""

import random

import pytest

from tools import fuzz


@pytest.mark.parametrize(("reader", "count"), [("idx", 3000), ("npz", 3000), ("model", 1000)])
def test_damaged_files_give_only_the_documented_errors(reader, count):
    make, read = fuzz.readers()[reader]
    counts = fuzz.run(reader, make, read, range(count))
    assert counts["finding"] == 0
    assert counts["read"] + counts["rejected"] == count
    assert counts["read"] >= count // 100  # the damage is slight enough to reach the end sometimes
    assert counts["rejected"] >= count // 2


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
    assert fuzz.run("idx", lambda rng: {"file": b""}, read, range(1)) == {"finding": 1}
    assert "TooSlow" in capsys.readouterr().err


def test_inputs_depend_on_their_number_alone():
    make = fuzz.readers()["npz"][0]
    again = [make(random.Random(f"0 npz {number}")) for number in range(20)]
    assert again == [make(random.Random(f"0 npz {number}")) for number in range(20)]
