"""Pages of several versions lie next to each other, with a list of them and a way to the newest."""

import json
import subprocess

from tools.publish_docs import assemble, main, switcher


def build(folder, text):
    folder.mkdir(parents=True)
    (folder / "index.html").write_text(text)
    (folder / ".doctrees").mkdir()
    return folder


def test_versions_are_listed_newest_first():
    entries = switcher(["v0.9.0", "latest", "v0.10.0"], "https://x.org/mvrbm/")
    assert [entry["version"] for entry in entries] == ["latest", "v0.10.0", "v0.9.0"]
    assert [entry.get("preferred", False) for entry in entries] == [False, True, False]
    assert entries[0]["url"] == "https://x.org/mvrbm/latest/"


def test_a_version_replaces_its_own_folder_alone(tmp_path):
    site = tmp_path / "site"
    site.mkdir()
    for number, (version, text) in enumerate([("latest", "old"), ("v0.1.0", "one"), ("latest", "new")]):
        assemble(build(tmp_path / str(number), text), site, version, "https://x.org")
    assert (site / "latest" / "index.html").read_text() == "new"
    assert (site / "v0.1.0" / "index.html").read_text() == "one"
    assert not (site / "latest" / ".doctrees").exists()
    assert [entry["version"] for entry in json.loads((site / "switcher.json").read_text())] == ["latest", "v0.1.0"]
    assert "url=v0.1.0/" in (site / "index.html").read_text()


def test_pages_are_committed_to_their_branch(tmp_path, monkeypatch):
    def git(*arguments):
        return subprocess.run(["git", *arguments], cwd=tmp_path, check=True, capture_output=True, text=True).stdout

    git("init", "--quiet", "-b", "main")
    git("-c", "user.name=a", "-c", "user.email=a@b", "commit", "--allow-empty", "-qm", "first")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("MVRBM_DOCS_URL", "https://x.org")
    monkeypatch.setenv("MVRBM_DOCS_VERSION", "latest")
    main([str(build(tmp_path / "built", "page"))])
    assert git("show", "gh-pages:latest/index.html") == "page"
    assert "switcher.json" in git("ls-tree", "--name-only", "gh-pages")
