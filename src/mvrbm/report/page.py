"""The page: sections of text, tables and figures, written whole or not at all."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from mvrbm.report.figures import Figure


@dataclass(frozen=True)
class Table:
    """A table; the first column names the row."""

    header: Sequence[str]
    rows: Sequence[Sequence[str]]
    caption: str = ""


@dataclass(frozen=True)
class Section:
    """A heading, paragraphs, and what is shown under them."""

    title: str
    text: Sequence[str] = ()
    tables: Sequence[Table] = ()
    figures: Sequence[Figure] = ()


@dataclass(frozen=True)
class Page:
    """A report."""

    title: str
    lead: str
    sections: Sequence[Section] = field(default_factory=list)
    footer: str = ""

    def write(self, path: str | os.PathLike[str]) -> Path:
        """Write the page to a file, replacing what is there only once it is complete."""
        from jinja2 import Environment, PackageLoader, StrictUndefined

        templates = Environment(loader=PackageLoader("mvrbm.report"), autoescape=True, undefined=StrictUndefined)
        html = templates.get_template("page.html").render(page=self)
        target = Path(path)
        target.parent.mkdir(parents=True, exist_ok=True)
        descriptor, partial = tempfile.mkstemp(prefix=f".{target.name}-", dir=target.parent)
        try:
            with os.fdopen(descriptor, "w", encoding="utf-8") as file:
                file.write(html)
            os.chmod(partial, 0o644)
            os.replace(partial, target)
        except BaseException:
            os.unlink(partial)
            raise
        return target
