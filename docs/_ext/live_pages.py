"""Sphinx: pages in which the models of the package run, written into the built documentation under ``live/``.

The directive {live-page} shows one of them in a frame, with a link to open it alone.
"""

from pathlib import Path

from docutils import nodes
from sphinx.util.docutils import SphinxDirective

import mvrbm
from mvrbm.pages import write_enlarging_page, write_playground

FOLDER = "live"
PAGES = {  # title, and height of the frame until the page in it has reported its own
    "labeled-digits": ("Handwritten digits and their labels", "60rem"),
    "digits": ("Handwritten digits", "60rem"),
    "enlarge": ("Enlarge a photograph", "46rem"),
}


class LivePage(SphinxDirective):
    required_arguments = 1

    def run(self):
        name = self.arguments[0]
        if name not in PAGES:
            raise self.error(
                f"no page {name!r}: there are {', '.join(PAGES)}"
            )
        address = (
            f"{'../' * self.env.docname.count('/')}{FOLDER}/{name}.html"
        )
        title, height = PAGES[name]
        style = f"width: 100%; height: {height}; border: 1px solid var(--pst-color-border); border-radius: .5rem"
        attributes = f'id="live-{name}" class="live" src="{address}" title="{title}" style="{style}"'
        frame = f'<iframe {attributes} loading="lazy"></iframe>'
        link = f'<p><a href="{address}">Open this page alone</a></p>'
        return [nodes.raw("", frame + link, format="html")]


def write_pages(app, error):
    if error is None and app.builder.format == "html":
        folder = Path(app.outdir, FOLDER)
        for name in ("labeled-digits", "digits"):
            write_playground(
                mvrbm.load(name, "cpu"),
                folder / f"{name}.html",
                title=PAGES[name][0],
            )
        write_enlarging_page(folder / "enlarge.html")


def setup(app):
    app.add_directive("live-page", LivePage)
    app.add_js_file("live.js")  # in docs/_static
    app.connect("build-finished", write_pages)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
