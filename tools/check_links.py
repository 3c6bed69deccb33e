"""Check the built documentation: every link, picture and script inside of it exists, and nothing comes from elsewhere.

    python -m tools.check_links docs/_build/html

`make docs` runs it after the build. Prints `page: target: what is wrong`; the exit code is 1 if there is anything.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urlsplit

TEMPLATES = {"webpack-macros.html"}  # of the theme, not a page
FETCHED = {"img": "src", "script": "src", "link": "href", "source": "src", "iframe": "src", "video": "src"}


class Page(HTMLParser):
    """Collects the targets of links, the files that a browser fetches, and the places that links can point to."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.links: set[str] = set()
        self.fetched: set[str] = set()
        self.places: set[str] = set()
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        """Note the targets and the name of one element."""
        values = {key: value for key, value in attrs if value}
        self.places |= {values[key] for key in ("id", "name") if key in values}
        if tag == "a" and "href" in values:
            self.links.add(values["href"])
        if tag in FETCHED and FETCHED[tag] in values and values.get("rel") != "canonical":
            self.fetched.add(values[FETCHED[tag]])


def problems(folder: Path) -> Iterator[str]:
    """Yield one line for each target that does not exist, and each file that a page fetches from another place."""
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
                    yield f"{name}: {target}: is fetched from elsewhere"
                continue
            place = (path.parent / unquote(parts.path)).resolve() if parts.path else path
            if not place.exists():
                yield f"{name}: {target}: there is no such file"
            elif parts.fragment and place in pages and unquote(parts.fragment) not in pages[place].places:
                yield f"{name}: {target}: the page has no such place"


def main(arguments: list[str] | None = None) -> int:
    """Check a folder and print what is wrong."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("folder", type=Path, help="the built pages")
    folder = parser.parse_args(arguments).folder
    found = list(problems(folder))
    print("\n".join(found), end="\n" if found else "")
    print(f"links: {len(found)} to mend", file=sys.stderr)
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
