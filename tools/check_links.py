"""Check that all internal links of the built documentation work, and that no page loads files from other sites.

    python -m tools.check_links docs/_build/html

`make docs` runs this after the build. Prints `page: target: problem` for each problem. The exit code is 1 if there are
any.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urlsplit

# Templates of the theme, which are not pages.
TEMPLATES = {"webpack-macros.html"}
# Attributes with the address of a file that a browser loads, by element.
FETCHED = {"img": "src", "script": "src", "link": "href", "source": "src", "iframe": "src", "video": "src"}


class Page(HTMLParser):
    """Collects the targets of links, the files that a browser loads, and the anchors of a page."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.links: set[str] = set()
        self.fetched: set[str] = set()
        self.anchors: set[str] = set()
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        """Collect the targets and the anchor of one element."""
        values = {key: value for key, value in attrs if value}
        self.anchors |= {values[key] for key in ("id", "name") if key in values}
        if tag == "a" and "href" in values:
            self.links.add(values["href"])
        if tag in FETCHED and FETCHED[tag] in values and values.get("rel") != "canonical":
            self.fetched.add(values[FETCHED[tag]])


def problems(folder: Path) -> Iterator[str]:
    """Yield one line for each target that does not exist, and for each file that a page loads from another site."""
    pages = {
        path.resolve(): Page(path.read_text(encoding="utf-8"))
        for path in sorted(folder.rglob("*.html"))
        if path.name not in TEMPLATES
    }
    for path, page in pages.items():
        name = path.relative_to(folder.resolve())
        for target in sorted(page.links | page.fetched):
            parts = urlsplit(target)
            if parts.scheme or parts.netloc:
                if target in page.fetched and parts.scheme != "data":
                    yield f"{name}: {target}: is loaded from another site"
                continue
            place = (path.parent / unquote(parts.path)).resolve() if parts.path else path
            if not place.exists():
                yield f"{name}: {target}: there is no such file"
            elif parts.fragment and place in pages and unquote(parts.fragment) not in pages[place].anchors:
                yield f"{name}: {target}: the page has no such anchor"


def main(arguments: list[str] | None = None) -> int:
    """Check a folder and print the problems."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("folder", type=Path, help="folder of the built pages")
    folder = parser.parse_args(arguments).folder
    found = list(problems(folder))
    print("\n".join(found), end="\n" if found else "")
    print(f"links: {len(found)} problems", file=sys.stderr)
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
