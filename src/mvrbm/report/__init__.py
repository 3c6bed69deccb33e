"""Reports: one self-contained HTML page of text, tables and figures. Nothing here computes results."""

from mvrbm.report.drawing import as_picture, save, styled
from mvrbm.report.figures import Figure, curves, image_grid
from mvrbm.report.page import Page, Section, Table

__all__ = ["Figure", "Page", "Section", "Table", "as_picture", "curves", "image_grid", "save", "styled"]
