"""Reports: one self-contained HTML page of text, tables and figures. Nothing here computes results."""

from mvrbm.report.figures import Figure, curves, image_grid
from mvrbm.report.page import Page, Section, Table

__all__ = ["Figure", "Page", "Section", "Table", "curves", "image_grid"]
