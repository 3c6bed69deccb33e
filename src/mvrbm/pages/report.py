"""The page: sections of text, tables and figures, written as one HTML file."""

import os
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from mvrbm.io.templates import write_html
from mvrbm.pages.figures import Figure

__all__ = ["Page", "Section", "Table"]


@dataclass(frozen=True)
class Table:
    """A table; the first column names the row."""

    header: Sequence[str]
    rows: Sequence[Sequence[str]]
    caption: str = ""


@dataclass(frozen=True)
class Section:
    """A heading, and the paragraphs, tables, figures and links under it. A link has a text and an address."""

    title: str
    text: Sequence[str] = ()
    tables: Sequence[Table] = ()
    figures: Sequence[Figure] = ()
    links: Sequence[tuple[str, str]] = ()


@dataclass(frozen=True)
class Page:
    """A report."""

    title: str
    lead: str
    sections: Sequence[Section] = field(default_factory=list)
    footer: str = ""

    def write(self, path: str | os.PathLike[str]) -> Path:
        """Write the page to a file, which replaces an older one only when it is complete."""
        return write_html("mvrbm.pages", "report.html", path, page=self)
