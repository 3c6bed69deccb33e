"""Reports: self-contained HTML pages of text, tables and figures. Nothing here computes results."""

from mvrbm.report.figures import Figure, as_picture, curves, image_grid, save, styled
from mvrbm.report.page import Page, Section, Table

__all__ = ["Figure", "Page", "Section", "Table", "as_picture", "curves", "image_grid", "save", "styled"]
