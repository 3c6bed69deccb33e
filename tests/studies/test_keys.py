"""Cells that version 0.1.0 computed at the paper's scale are found: their names and keys have not changed."""

import hashlib
import json

import pytest

from studies.digits import plan as digits
from studies.superres import plan as superres

# By group, of the names and keys of its cells in version 0.1.0, with today's names of settings.
DIGESTS = {
    "against-t": "147c387fff0a",
    "points": "771b9da1ee37",
    "reconstruction": "26d1c9df6053",
    "denoise": "f8d5e8efd0fb",
    "raw": "804ecb76eecf",
    "defaults": "feab6c941e00",
    "against-n": "73779a074c25",
    "filters": "684f7d84a28f",
    "reconstruction-rbm": "11320069b0c9",
    "tvrbm": "a80105148c35",
    "baselines": "d927697f7c7e",
    "fine-tuned-digits": "a80b127335a9",
    "classic": "b3a80d7901af",
    "growth": "29da0844f56d",
    "reconstruction-rbm-paper": "b2fe700c42bf",
    "patch-size": "5f3e2cb18afb",
    "fine-tuned": "1e9b8e0771db",
    "set5": "1988d7637e65",
    "sparse": "1e3c66062083",
    "hidden-size": "5e6e2c9d894e",
    "comparison": "e37cc6886659",
}


def digest(cells):
    keys = sorted(([cell.name, cell.key] for cell in cells), key=lambda pair: pair[0])
    return hashlib.sha1(json.dumps(keys, sort_keys=True).encode()).hexdigest()[:12]


@pytest.mark.parametrize("experiment", [digits, superres], ids=["digits", "superres"])
def test_cells_have_the_keys_of_version_0_1_0(experiment):
    found = {}
    for cell in experiment.plan(experiment.SCALES["paper"], list(experiment.GROUPS)):
        found.setdefault(cell.group, []).append(cell)
    assert {group: digest(cells) for group, cells in found.items()} == {
        group: DIGESTS[group] for group in experiment.GROUPS
    }
