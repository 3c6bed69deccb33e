"""Add the built documentation to the branch gh-pages, in the folder of its version, and list all versions there.

    MVRBM_DOCS_URL=... MVRBM_DOCS_VERSION=latest python -m tools.publish_docs docs/_build/html

Commits to the local branch, which is created if the remote has none; pushing is up to the caller. The version switcher
of the theme reads `switcher.json`, and `index.html` leads to the newest version.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shutil
import subprocess
import tempfile
from pathlib import Path

BRANCH = "gh-pages"
_WHO = ("-c", "user.name=docs", "-c", "user.email=docs@localhost")
REDIRECT = '<!doctype html><meta charset="utf-8"><title>mvrbm</title><meta http-equiv="refresh" content="0; url={}/">\n'


def _order(version: str) -> tuple[bool, list[int]]:
    """Return a key by which `latest` comes first and v0.10.0 before v0.9.0."""
    return version == "latest", [int(number) for number in re.findall(r"\d+", version)]


def switcher(versions: list[str], address: str) -> list[dict[str, str | bool]]:
    """Return the entries of the version switcher, newest first; the newest release is the preferred one."""
    ordered = sorted(versions, key=_order, reverse=True)
    released = [version for version in ordered if version != "latest"]
    entries: list[dict[str, str | bool]] = []
    for version in ordered:
        entry: dict[str, str | bool] = {"version": version, "url": f"{address.rstrip('/')}/{version}/"}
        if released and version == released[0]:
            entry |= {"name": f"{version} (stable)", "preferred": True}
        entries.append(entry)
    return entries


def assemble(built: Path, site: Path, version: str, address: str) -> None:
    """Put the pages of one version into the folder of the site, and write the list and the redirection again."""
    shutil.rmtree(site / version, ignore_errors=True)
    shutil.copytree(built, site / version, ignore=shutil.ignore_patterns(".doctrees", ".buildinfo"))
    versions = [path.name for path in site.iterdir() if (path / "index.html").is_file()]
    (site / "switcher.json").write_text(json.dumps(switcher(versions, address), indent=1) + "\n", encoding="utf-8")
    newest = next((v for v in sorted(versions, key=_order, reverse=True) if v != "latest"), "latest")
    (site / "index.html").write_text(REDIRECT.format(newest), encoding="utf-8")
    (site / ".nojekyll").touch()  # folders with an underscore are pages


def _git(*arguments: str, folder: Path | None = None) -> str:
    return subprocess.run(["git", *_WHO, *arguments], cwd=folder, check=True, stdout=subprocess.PIPE, text=True).stdout


def _branch() -> None:
    """Create the local branch from the remote one, or from an empty commit."""
    try:
        _git("fetch", "--depth=1", "origin", f"{BRANCH}:{BRANCH}")
    except subprocess.CalledProcessError:
        tree = _git("hash-object", "-w", "-t", "tree", "/dev/null").strip()
        _git("branch", BRANCH, _git("commit-tree", "-m", "Documentation", tree).strip())


def main(arguments: list[str] | None = None) -> None:
    """Commit the built pages to the branch."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("built", type=Path, help="the built pages")
    options = parser.parse_args(arguments)
    version, address = os.environ["MVRBM_DOCS_VERSION"], os.environ["MVRBM_DOCS_URL"]
    with tempfile.TemporaryDirectory() as place:
        site = Path(place) / "site"
        _branch()
        _git("worktree", "add", str(site), BRANCH)
        assemble(options.built, site, version, address)
        _git("add", "--all", folder=site)
        _git("commit", "--quiet", "--allow-empty", "-m", f"Documentation of {version}", folder=site)
        _git("worktree", "remove", "--force", str(site))


if __name__ == "__main__":
    main()
