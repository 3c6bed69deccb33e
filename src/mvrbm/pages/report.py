"""Write reports with text, tables and figures to a single HTML file."""

import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from mvrbm.io.templates import write_html
from mvrbm.pages.figures import Figure

__all__ = ["Page", "Section", "Table"]


@dataclass(frozen=True)
class Table:
    """Table whose first column contains the row names."""

    header: Sequence[str]
    rows: Sequence[Sequence[str]]
    caption: str = ""


@dataclass(frozen=True)
class Section:
    """Section of a report: a heading, paragraphs, links, code, tables and figures.

    Each link is a (text, URL) pair.
    """

    title: str
    text: Sequence[str] = ()
    tables: Sequence[Table] = ()
    figures: Sequence[Figure] = ()
    links: Sequence[tuple[str, str]] = ()
    code: str = ""


@dataclass(frozen=True)
class Page:
    """Report with a title, an introduction, sections and a footer."""

    title: str
    lead: str
    sections: Sequence[Section] = ()
    footer: str = ""

    def write(self, path: str | os.PathLike[str]) -> Path:
        """Write the report to an HTML file. An existing file is replaced only after the new file is complete."""
        return write_html("mvrbm.pages", "report.html", path, page=self)
