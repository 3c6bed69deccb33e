import os
import signal
import tempfile

import pytest

from mvrbm.errors import InputError
from mvrbm.io.atomic import check_folder, check_output, replace_file, replace_folder


def test_invalid_output_files_raise(tmp_path):
    (tmp_path / "file").write_text("x")
    for path, message in [
        (tmp_path / "file" / "out.npy", "is a file"),
        (tmp_path / "nowhere" / "out.npy", "does not exist"),
        (tmp_path / "out.csv", "must end in"),
        (tmp_path, "is a folder"),
        (tmp_path / ("x" * 300 + ".npy"), "cannot be written"),
    ]:
        with pytest.raises(InputError, match=message):
            check_output(path, suffixes=() if path == tmp_path else (".npy",))


def test_invalid_output_folders_raise(tmp_path):
    (tmp_path / "file").write_text("x")
    for path in (tmp_path / "file", tmp_path / "file" / "folder"):
        with pytest.raises(InputError, match="is a file"):
            check_folder(path)
    assert check_folder(tmp_path / "a" / "b") == tmp_path / "a" / "b"
    assert not (tmp_path / "a").exists()


def test_a_file_is_replaced_only_by_a_complete_one(tmp_path):
    path = tmp_path / "file"
    with replace_file(path) as file:
        file.write(b"first")
    with pytest.raises(ZeroDivisionError), replace_file(path) as file:
        file.write(b"half" * (1 // 0))
    assert path.read_bytes() == b"first"
    assert os.listdir(tmp_path) == ["file"]
    with pytest.raises(InputError, match="cannot be written: No such file"), replace_file(tmp_path / "no" / "file"):
        pass


def test_replacing_follows_symbolic_links_and_rejects_pipes(tmp_path):
    (tmp_path / "link").symlink_to("file")
    with replace_file(tmp_path / "link") as file:
        file.write(b"x")
    assert (tmp_path / "link").is_symlink()
    assert (tmp_path / "file").read_bytes() == b"x"
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(InputError, match="it is not a regular file"), replace_file(tmp_path / "pipe"):
        pass


@pytest.mark.parametrize(
    ("creates", "replace"),
    [("mkstemp", replace_file), ("mkdtemp", lambda path: replace_folder(path, lambda folder: True))],
)
def test_an_interrupt_right_after_creating_a_temporary_file_leaves_nothing(tmp_path, monkeypatch, creates, replace):
    create = getattr(tempfile, creates)

    def interrupted(**how):
        created = create(**how)
        signal.raise_signal(signal.SIGINT)
        return created

    monkeypatch.setattr(tempfile, creates, interrupted)
    with pytest.raises(KeyboardInterrupt), replace(tmp_path / "out"):
        pass
    assert not list(tmp_path.iterdir())
