"""The command ``mvrbm page``, which writes a page in which a model runs in the browser."""

from pathlib import Path
from typing import Annotated

import typer

from mvrbm.cli.options import AsJson, Force, argument, new, show

_MODEL_HELP = (
    "Folder of a saved model, a model that comes with mvrbm (digits, labeled-digits), or enlarge, for a page that "
    "enlarges photographs."
)


def page(
    model_folder: Annotated[Path, argument("MODEL", _MODEL_HELP)],
    out: Annotated[Path, typer.Option(help="Output file, an HTML page.")] = Path("page.html"),
    title: Annotated[str | None, new("Heading of the page. Default: the name of the model.")] = None,
    force: Force = False,
    as_json: AsJson = False,
) -> None:
    """Write one HTML file in which a model runs in the browser: draw and watch it fill in the rest, or let it sample.

    It takes models with one visible layer of two axes, of Bernoulli or Gaussian units, and at most one layer of labels.
    """
    import mvrbm
    from mvrbm.io.atomic import check_output
    from mvrbm.pages import write_enlarging_page, write_playground

    check_output(out, force, (".html", ".htm"))
    if str(model_folder) == "enlarge" and not model_folder.exists():
        write_enlarging_page(out)
        kind = "SuperResolver"
    else:
        model = mvrbm.load(model_folder, "cpu")
        write_playground(model, out, title=title or model_folder.name)
        kind = type(model).__name__
    size = out.stat().st_size
    result = {"out": str(out), "class": kind, "bytes": size}
    show(result, as_json, f"{out}: {kind}, {size:,} bytes; open it in a browser")
