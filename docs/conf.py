"""Sphinx settings. Nothing here needs the network; MathJax is loaded by the reader's browser."""

import re
from importlib.metadata import version as _version

project = "mvrbm"
author = "the mvrbm developers"
copyright = "2026, the mvrbm developers"
version = release = _version("mvrbm")

extensions = ["sphinx.ext.autodoc", "sphinx.ext.autosummary", "sphinx.ext.mathjax", "numpydoc", "myst_parser"]
exclude_patterns = ["_build"]
nitpicky = False

myst_enable_extensions = ["amsmath", "colon_fence", "dollarmath"]
myst_heading_anchors = 3

autosummary_generate = True
# scikit-learn adds the set_*_request methods, with references that only its own documentation can resolve.
_REQUESTS = ("fit", "partial_fit", "predict", "predict_proba", "score", "transform", "inverse_transform")
autodoc_default_options = {
    "members": True,
    "show-inheritance": True,
    "exclude-members": ", ".join(f"set_{name}_request" for name in _REQUESTS),
}
autodoc_member_order = "bysource"
autodoc_typehints = "signature"
numpydoc_show_class_members = False  # autodoc lists them

html_theme = "furo"
html_title = "mvrbm"
html_static_path = ["_static"]

_SHAPE = re.compile(r"(?<![\\*\w])\*(?=\w+(?: shape)?[,)])")


def _escape_shapes(app, what, name, obj, options, lines):
    """Let docstrings say (n, *shape), which reads well in help() but would start an emphasis here."""
    lines[:] = [_SHAPE.sub(r"\\*", line) for line in lines]


def setup(app):
    app.connect("autodoc-process-docstring", _escape_shapes, priority=400)  # before numpydoc, at 500
