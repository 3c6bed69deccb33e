"""Sphinx: what a page of the reference lists, and the types that its functions return.

The template of a class asks `documented_members` for the members to document. Docstrings without a section Returns get
one with the annotated type. Links from source code lead to the names that users import.
"""

import importlib
import inspect
import re

from sphinx.util.inspect import safe_getattr

import mvrbm
from mvrbm.couplings import Coupling
from mvrbm.units import Unit

# Members that other modules of the package call, and users do not need.
INTERNAL = {
    "as_layers",
    "as_masks",
    "bytes_to_check",
    "check_bounded",
    "check_parameters",
    "extra_repr",
    "free_energy_gradient",
    "gaussian_norm",
    "largest_order",
    "learns_from_incomplete",
    "like",
    "limit_norm",
    "own_energy",
    "prepare",
    "takes_arrays",
    "unit_gradient",
}
# Methods of scikit-learn that are the same for all estimators.
SCIKIT_LEARN = re.compile(
    r"(get|set)_(params|metadata_routing|output|\w+_request)$"
)
# Units and couplings have the members that these classes document.
BASES = (Unit, Coupling)
SECTION = re.compile(r"^(Returns|Yields)\n-+$", re.MULTILINE)
ALIASES = {
    "Array": "ndarray",
    "Self": "self",
    "Any": None,
    "None": None,
    "object": None,
}


def documented_members(cls):
    """Return the names of the public methods, and of the other public members, that the package defines for a class."""
    names = {}
    for base in reversed(cls.__mro__):
        if base.__module__.startswith(mvrbm.__name__):
            names |= dict.fromkeys(
                [*vars(base), *vars(base).get("__annotations__", {})]
            )
    of_base = {
        name
        for base in BASES
        if issubclass(cls, base) and cls is not base
        for name in dir(base)
    }
    found = [
        name
        for name in names
        if not name.startswith("_")
        and name not in INTERNAL | of_base
        and not SCIKIT_LEARN.match(name)
    ]
    methods = [
        name
        for name in found
        if inspect.isroutine(safe_getattr(cls, name, None))
    ]
    return sorted(methods), [name for name in found if name not in methods]


class Members(dict):
    """`documented_members` of classes by their full names, for templates. Sphinx stores it as an empty dictionary."""

    def __missing__(self, name):
        module, _, cls = name.rpartition(".")
        return documented_members(
            getattr(importlib.import_module(module), cls)
        )


def add_returns(app, what, name, obj, options, lines):
    """Add a section Returns with the annotated type to a docstring that has none."""
    if (
        what not in ("function", "method")
        or not any(lines)
        or SECTION.search("\n".join(lines))
    ):
        return
    annotation = getattr(inspect.unwrap(obj), "__annotations__", {}).get(
        "return"
    )
    text = (
        annotation
        if isinstance(annotation, str)
        else getattr(annotation, "__name__", None)
    )
    text = ALIASES.get(text, text)
    if text:
        at = next(
            (
                i
                for i in range(1, len(lines))
                if re.fullmatch(r"-{3,}", lines[i])
                and follows(lines[i - 1])
            ),
            None,
        )
        at = len(lines) if at is None else at - 1
        lines[at:at] = [
            "",
            "Returns",
            "-------",
            re.sub(r"\bArray\b", "ndarray", text),
            "",
        ]


def follows(title):
    """Return whether a section comes after Returns in the order of numpydoc."""
    return title in {
        "Raises",
        "Warns",
        "See Also",
        "Notes",
        "References",
        "Examples",
    }


# A link from the source of an object to its page, whose name contains the name that users import.
BACK = re.compile(
    r'(generated/([\w.]*?(\w+))\.html#)[\w.]+\.\3((?:\.\w+)*)"'
)


def correct_links(app, page, template, context, doctree):
    """Correct links from source code to the reference: viewcode takes one import path for all objects of a module."""
    if page.startswith("_modules/"):
        context["body"] = BACK.sub(r'\1\2\4"', context["body"])


def setup(app):
    app.connect(
        "autodoc-process-docstring", add_returns, priority=450
    )  # before numpydoc, at 500
    app.connect("html-page-context", correct_links)
    app.config.autosummary_context = {"documented": Members()}
    return {"parallel_read_safe": True}
