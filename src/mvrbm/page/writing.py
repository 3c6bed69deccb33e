"""Writing a page: the model is described, and put into the template that runs such models."""

import os
from pathlib import Path
from typing import Any

from mvrbm.extras import require
from mvrbm.io.atomic import replace_file
from mvrbm.page.playground import playground

__all__ = ["write_page"]


def write_page(model: Any, path: str | os.PathLike[str], *, title: str | None = None) -> Path:
    """Write one HTML file in which a model runs in the browser, without a network.

    Parameters
    ----------
    model : BoltzmannMachine or estimator
        A model with one visible layer of two axes, of Bernoulli or Gaussian units, and at most one layer of labels.
    path : path
        The file. An existing file is replaced when the new one is complete.
    title : str, optional
        Heading of the page. Default: the class of the model.

    Returns
    -------
    Path
        The file.

    Raises
    ------
    ValueError
        If the model has other layers.

    Examples
    --------
    >>> import mvrbm
    >>> from mvrbm.page import write_page
    >>> write_page(mvrbm.load("digits"), "page.html").name  # doctest: +SKIP
    'page.html'
    """
    jinja = require("jinja2", "a page", "demo")
    loader = jinja.PackageLoader("mvrbm.page")
    templates = jinja.Environment(loader=loader, autoescape=True, undefined=jinja.StrictUndefined)
    values = playground(model, title or type(model).__name__)
    html = templates.get_template("playground.html").render(values)
    target = Path(path)
    target.parent.mkdir(parents=True, exist_ok=True)
    with replace_file(target) as file:
        file.write(html.encode())
    return target
