"""Sphinx settings. Neither the build nor the built pages need a network."""

import os
import re
import shutil
import sys
from importlib import metadata
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "docs" / "_ext")]

project = "mvrbm"
author = "the mvrbm developers"
copyright = "2026, the mvrbm developers"
version = release = metadata.version("mvrbm")

extensions = [
    "sphinx.ext.autodoc",
    "sphinx.ext.autosummary",
    "sphinx.ext.mathjax",
    "sphinx.ext.viewcode",
    "numpydoc",
    "myst_parser",
    "sphinx_copybutton",
    "sphinx_design",
    "sphinx_gallery.gen_gallery",
    "matplotlib.sphinxext.plot_directive",
    "api_pages",
    "measured_figures",
    "live_pages",
]
exclude_patterns = [
    "_build",
    "_ext",
    "_templates",
    "plots",
    "**/sg_execution_times.rst",
    "sg_execution_times.rst",
]
templates_path = ["_templates"]
nitpicky = True
nitpick_ignore_regex = [
    (
        "py:.*",
        r"(sklearn|torch|numpy|abc)\..*",
    ),  # documented elsewhere, which only a network reaches
    (
        "py:.*",
        "posterior_mean|StagedEnlarger",
    ),  # not part of the reference
]

myst_enable_extensions = ["amsmath", "colon_fence", "dollarmath"]
myst_heading_anchors = 3

# One page per class and function of the reference. Types are those of the numpydoc sections.
autosummary_generate = True
autodoc_typehints = "none"
autodoc_member_order = "bysource"
numpydoc_show_class_members = False
numpydoc_xref_param_type = False
add_module_names = False
toc_object_entries_show_parents = "hide"

# Copies commands without their prompts and their output.
copybutton_prompt_text = r">>> |\.\.\. |\$ "
copybutton_prompt_is_regexp = True

# Formulas: one file of MathJax that draws them as SVG, without fonts or other files.
_MATHJAX = next(
    file
    for file in metadata.files("sphinx-mathjax-offline") or []
    if file.name == "tex-svg.js"
)
mathjax_path = _MATHJAX.name

html_theme = "pydata_sphinx_theme"
html_title = "mvrbm"
html_static_path = ["_static", str(_MATHJAX.locate())]
html_css_files = ["custom.css"]
html_show_sourcelink = False
html_context = {
    "default_mode": "auto"
}  # without it, the theme logs an error at the first visit
html_theme_options = {
    "logo": {"text": "mvrbm"},
    "show_toc_level": 2,
    "navigation_with_keys": False,
    "show_prev_next": False,
    "navbar_align": "left",
    "header_links_before_dropdown": 6,
    "navbar_end": ["theme-switcher"],
    "navbar_persistent": ["search-button"],
    "footer_start": ["copyright"],
    "footer_end": [],
    "back_to_top_button": False,
    "pygments_light_style": "a11y-high-contrast-light",
    "pygments_dark_style": "a11y-high-contrast-dark",
}
# Published pages have a version switcher, whose list is in a folder next to the folders of all versions.
if _PUBLISHED := os.environ.get("MVRBM_DOCS_URL"):
    html_theme_options |= {
        "navbar_end": ["version-switcher", "theme-switcher"],
        "switcher": {
            "json_url": f"{_PUBLISHED.rstrip('/')}/versions/switcher.json",
            "version_match": os.environ.get("MVRBM_DOCS_VERSION", version),
        },
        "check_switcher": False,  # The workflow writes the file after the build.
    }

plot_include_source = plot_html_show_source_link = (
    plot_html_show_formats
) = False
plot_formats = [("png", 160)]

sphinx_gallery_conf = {
    "examples_dirs": [
        str(ROOT / "examples" / "gallery"),
        str(ROOT / "examples" / "tutorials"),
    ],
    "gallery_dirs": ["gallery", "tutorials"],
    "filename_pattern": r"\.py$",  # all are executed
    "within_subsection_order": "FileNameSortKey",
    "show_memory": False,
    "show_signature": False,
    "download_all_examples": False,
    "first_notebook_cell": (
        "# This notebook needs the package mvrbm with its extras. To install them from a checkout of the\n"
        "# repository, remove the # of the next line, and replace the path by that of the checkout.\n"
        "# %pip install '/path/to/mvrbm[all]'"
    ),
    "remove_config_comments": True,
    "image_srcset": ["2x"],
    "backreferences_dir": "generated/backreferences",
    "doc_module": ("mvrbm",),
    "reference_url": {"mvrbm": None},
}

_SHAPE = re.compile(r"(?<![\\*\w])\*(?=\w+(?: shape)?[,)])")


def _escape_shapes(app, what, name, obj, options, lines):
    """Let docstrings say (n, *shape), which reads well in help() but would start an emphasis here."""
    lines[:] = [_SHAPE.sub(r"\\*", line) for line in lines]


def _draw_again(app):
    """Remove plots of an earlier build: their numbers may be new."""
    shutil.rmtree(Path(app.outdir) / "plot_directive", ignore_errors=True)


def setup(app):
    app.connect("builder-inited", _draw_again)
    app.connect(
        "autodoc-process-docstring", _escape_shapes, priority=400
    )  # before numpydoc, at 500
