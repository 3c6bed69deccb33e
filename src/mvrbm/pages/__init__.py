"""HTML pages: reports, a playground for models, a page that enlarges photographs, and the report of the demo.

Every page is one self-contained file that opens without a network connection. The templates contain the HTML, CSS and
JavaScript code, and the modules fill in the values. Only :mod:`mvrbm.pages.demo_report` trains models.
"""

from mvrbm.pages.enlarging import write_enlarging_page
from mvrbm.pages.figures import Figure, curves, image_grid, styled
from mvrbm.pages.playground import write_playground
from mvrbm.pages.report import Page, Section, Table

__all__ = [
    "Figure",
    "Page",
    "Section",
    "Table",
    "curves",
    "image_grid",
    "styled",
    "write_enlarging_page",
    "write_playground",
]
