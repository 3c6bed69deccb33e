"""Runs that version 0.1.0 computed at the paper's scale are found: their names and keys have not changed."""

import hashlib
import json

import pytest

from studies.digits import plan as digits
from studies.superres import plan as superres

# Hashes of the names and keys of all runs in version 0.1.0, with the current names of settings, by group.
DIGESTS = {
    "against-t": "679dbde4df55",
    "points": "4caf04932613",
    "reconstruction": "e49f32f232a9",
    "denoise": "012acc804f2f",
    "raw": "804ecb76eecf",
    "defaults": "9f888cf90624",
    "against-n": "7334503c33c9",
    "filters": "c41e9f68761e",
    "reconstruction-rbm": "2cb3f4e371a9",
    "tvrbm": "888d4f14a1ee",
    "baselines": "d927697f7c7e",
    "fine-tuned-digits": "219e7630af9e",
    "classic": "42aeb1787c20",
    "growth": "60aeea956786",
    "reconstruction-rbm-paper": "1a3651613b20",
    "patch-size": "15b639d01fb1",
    "fine-tuned": "4a98d37ed5dc",
    "set5": "c276069d99e2",
    "sparse": "1e3c66062083",
    "hidden-size": "99ac789e2495",
    "comparison": "1e5b08f51c33",
}


def digest(runs):
    keys = sorted(([run.name, run.key] for run in runs), key=lambda pair: pair[0])
    return hashlib.sha1(json.dumps(keys, sort_keys=True).encode()).hexdigest()[:12]


@pytest.mark.parametrize("experiment", [digits, superres], ids=["digits", "superres"])
def test_runs_have_the_keys_of_version_0_1_0(experiment):
    found = {}
    for run in experiment.plan(experiment.SCALES["paper"], list(experiment.GROUPS)):
        found.setdefault(run.group, []).append(run)
    assert {group: digest(runs) for group, runs in found.items()} == {
        group: DIGESTS[group] for group in experiment.GROUPS
    }
