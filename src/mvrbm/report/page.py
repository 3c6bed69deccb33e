"""The page: sections of text, tables and figures, written as one HTML file."""

import os
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from mvrbm.extras import require
from mvrbm.io.atomic import replace_file
from mvrbm.report.figures import Figure

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
        jinja = require("jinja2", "a report", "demo")
        loader = jinja.PackageLoader("mvrbm.report")
        templates = jinja.Environment(loader=loader, autoescape=True, undefined=jinja.StrictUndefined)
        html = templates.get_template("page.html").render(page=self)
        target = Path(path)
        target.parent.mkdir(parents=True, exist_ok=True)
        with replace_file(target) as file:
            file.write(html.encode())
        return target
