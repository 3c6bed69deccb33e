"""The ``mvrbm data`` commands, which list, locate and download the named datasets in :mod:`mvrbm.io.datasets`."""

import sys
from typing import Annotated

from mvrbm.cli.options import AsJson, DataDir, argument, show, table

SetName = Annotated[str, argument("NAME", "Name of a dataset, such as mnist.")]


def list_sets(data_dir: DataDir = None, as_json: AsJson = False) -> None:
    """List the named datasets and show whether each one is available on this machine."""
    from mvrbm.io import datasets

    sets = {}
    rows = []
    for name in datasets.NAMES:
        place = datasets.where(name, data_dir)
        description = datasets.describe(name)
        sets[name] = {"description": description, "path": None if place is None else str(place)}
        rows.append((name, f"{'missing' if place is None else 'found':<9}{description}"))
    show({"sets": sets}, as_json, table(rows))


def where(name: SetName, data_dir: DataDir = None, as_json: AsJson = False) -> None:
    """Print the path to a dataset on this machine."""
    from mvrbm.io import datasets

    place = datasets.where(name, data_dir)
    if place is None:
        raise datasets.DatasetError(
            f"'{name}' is not on this machine; run 'mvrbm data fetch {name}', or set MVRBM_DATA to a folder that "
            "contains it"
        )
    show({"name": name, "path": str(place)}, as_json, str(place))


def fetch(name: SetName, as_json: AsJson = False) -> None:
    """Download a dataset from a public mirror to the cache and verify the checksums of its files."""
    from mvrbm.io import datasets

    place = datasets.fetch(name, show_progress=sys.stderr.isatty())
    show({"name": name, "path": str(place)}, as_json, str(place))
