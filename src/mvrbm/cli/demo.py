"""The command ``mvrbm demo``, which runs :mod:`mvrbm.pages.demo`."""

from pathlib import Path
from typing import Annotated

import typer

from mvrbm.cli.options import AsJson, Device, Force, Seed, Where, new, show


def demo(
    out: Annotated[Path, typer.Option(help="Output file, an HTML page.")] = Path("report.html"),
    quick: Annotated[bool, new("Use little data and few epochs: a trial of a few seconds.", "--quick")] = False,
    seed: Seed = 0,
    device: Where = Device.AUTO,
    force: Force = False,
    as_json: AsJson = False,
) -> None:
    """Train on 5,000 digits and write a report that shows what the model can do. Prints the path of the report.

    A page in which the model runs is written next to the report.
    """
    from mvrbm.pages.demo import playground_of, run
    from mvrbm.extras import require
    from mvrbm.io.atomic import check_output

    for path in (out, playground_of(out)):
        check_output(path, force, (".html", ".htm"))
    for package in ("matplotlib", "jinja2", "mlxtend"):  # before training, not after it
        require(package, "the demo", "demo")
    result = run(out, seed=seed, device=device.value, quick=quick)
    show(result, as_json, str(result["report"]))
