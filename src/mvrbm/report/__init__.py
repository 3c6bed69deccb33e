"""Reports: self-contained HTML pages of text, tables and figures. Nothing here computes results."""

from mvrbm.report.figures import Figure, curves, image_grid, styled
from mvrbm.report.page import Page, Section, Table

__all__ = ["Figure", "Page", "Section", "Table", "curves", "image_grid", "styled"]
