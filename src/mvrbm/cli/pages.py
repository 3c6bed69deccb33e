"""Commands that write HTML pages: page and demo."""

from pathlib import Path
from typing import Annotated

import typer

from mvrbm.cli.options import AsJson, Device, Force, Seed, Where, argument, new, show

# Value of MODEL that selects the page for enlarging photographs.
_ENLARGE = "enlarge"
_SUFFIXES = (".html", ".htm")
_MODEL_HELP = (
    "Folder of a saved model, the name of a model that comes with mvrbm (digits, labeled-digits), or enlarge for a "
    "page that enlarges photographs."
)
_QUICK_HELP = "Train briefly on a few digits to try out the command in a few seconds."

PageOut = Annotated[Path, typer.Option("--out", help="HTML file to write.")]


def page(
    model_folder: Annotated[Path, argument("MODEL", _MODEL_HELP)],
    out: PageOut = Path("page.html"),
    title: Annotated[str | None, new("Heading of the page.", default="the name of the model")] = None,
    force: Force = False,
    as_json: AsJson = False,
) -> None:
    """Write an HTML file that runs a model in the browser.

    On the page, you can draw part of an image and watch the model complete it, or let the model draw samples. The model
    must have a single two-dimensional visible layer of Bernoulli or Gaussian units. It can also have a label layer.
    """
    import mvrbm
    from mvrbm.io.atomic import check_output
    from mvrbm.pages import write_enlarging_page, write_playground

    check_output(out, force, _SUFFIXES)
    if str(model_folder) == _ENLARGE and not model_folder.exists():
        write_enlarging_page(out)
        kind = "SuperResolver"
    else:
        model = mvrbm.load(model_folder, "cpu")
        write_playground(model, out, title=title or model_folder.name)
        kind = type(model).__name__
    size = out.stat().st_size
    result = {"out": str(out), "class": kind, "bytes": size}
    show(result, as_json, f"{out}: {kind}, {size:,} bytes; open it in a browser")


def demo(
    out: PageOut = Path("report.html"),
    quick: Annotated[bool, new(_QUICK_HELP, "--quick")] = False,
    seed: Seed = 0,
    device: Where = Device.AUTO,
    force: Force = False,
    as_json: AsJson = False,
) -> None:
    """Train models on 4,000 digits and write a report that shows what they can do.

    The command prints the path of the report. It also writes a playground for one of the models, and a page that
    enlarges photographs, to the same folder.
    """
    from mvrbm.extras import require
    from mvrbm.io.atomic import check_output

    for package in ("matplotlib", "jinja2", "mlxtend"):  # report a missing package before training
        require(package, "the demo", "demo")
    from mvrbm.pages.demo_report import enlarging_of, playground_of, run

    for path in (out, playground_of(out), enlarging_of(out)):
        check_output(path, force, _SUFFIXES)
    result = run(out, seed=seed, device=device.value, quick=quick)
    show(result, as_json, str(result["report"]))
