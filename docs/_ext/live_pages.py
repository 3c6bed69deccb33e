"""Sphinx: pages in which the models of the package run, written into the built documentation under ``live/``.

The directive {live-page} shows one of them in a frame, with a link to open it alone.
"""

from pathlib import Path

from docutils import nodes
from sphinx.util.docutils import SphinxDirective

import mvrbm
from mvrbm.page import write_page

FOLDER = "live"
PAGES = {name: name for name in ("digits", "labelled-digits")}  # file: model


class LivePage(SphinxDirective):
    required_arguments = 1

    def run(self):
        name = self.arguments[0]
        if name not in PAGES:
            raise self.error(f"no page {name!r}: there are {', '.join(PAGES)}")
        up = "../" * self.env.docname.count("/")
        address = f"{up}{FOLDER}/{name}.html"
        frame = f'<iframe class="live-page" src="{address}" title="{name}, running in this page" loading="lazy"></iframe>'
        link = f'<p><a href="{address}">Open {name} alone</a></p>'
        return [nodes.raw("", frame + link, format="html")]


def write_pages(app, error):
    if error is None and app.builder.format == "html":
        for name, model in PAGES.items():
            write_page(mvrbm.load(model, "cpu"), Path(app.outdir, FOLDER, f"{name}.html"), title=name)


def setup(app):
    app.add_directive("live-page", LivePage)
    app.connect("build-finished", write_pages)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
