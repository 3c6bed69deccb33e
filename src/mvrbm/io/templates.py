"""Render HTML pages from Jinja templates."""

import os
from pathlib import Path
from typing import Any

from mvrbm.extras import require
from mvrbm.io.atomic import replace_file


def write_html(package: str, template: str, path: str | os.PathLike[str], **values: Any) -> Path:
    """Render a template from `package`, write the page to a file atomically, and return the path of the file."""
    jinja = require("jinja2", "a page", "demo")
    loader = jinja.PackageLoader(package)
    templates = jinja.Environment(loader=loader, autoescape=True, undefined=jinja.StrictUndefined)
    html = templates.get_template(template).render(values)
    target = Path(path)
    target.parent.mkdir(parents=True, exist_ok=True)
    with replace_file(target) as file:
        file.write(html.encode())
    return target
