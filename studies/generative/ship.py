"""Pack two trained machines of digits as the models that come with the package, with their model cards.

``python -m studies.generative.ship`` reads the runs that ``python -m studies generative`` has computed, and writes
`src/mvrbm/weights`.
"""

from __future__ import annotations

import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch

import mvrbm
from mvrbm import BoltzmannMachine
from mvrbm.estimators.initial_states import MOST_CHAINS, write_chains
from mvrbm.estimators.inputs import LABEL, VISIBLE
from mvrbm.estimators.labels import describe_classes
from mvrbm.sampling import match_label_shares
from mvrbm.saving import ESTIMATOR, write_machine
from mvrbm.training import Recipe
from studies.arguments import say
from studies.data import parts
from studies.generative.plan import SCALES, plan
from studies.generative.run import IMAGE
from studies.runs import Store

Card = dict[str, Any]

_WORK = Path("runs/generative-paper")
_OUT = Path("src/mvrbm/weights")
# Samples, and Gibbs steps of each, to match how often the model draws each label.
_MATCHED = 3000
_STEPS = 300
_DATA = (
    "The 60,000 training digits of MNIST, 28 x 28 pixels, each pixel 1 with a probability equal to its gray level, "
    "drawn once{labels}. Yann LeCun and Corinna Cortes hold the copyright of MNIST, a derivative work of data sets of "
    "NIST, which is available under the license CC BY-SA 3.0. The chains next to the weights are samples of the model, "
    "not data."
)
_MADE = """

Trained on an {device} in {seconds:.0f} s, in a checkout of mvrbm, with MNIST in the folder that `MVRBM_DATA` names:

    python -m studies generative {group} --only {run} --device cuda
    python -m studies.generative.ship"""


def digits(store: Store) -> tuple[Any, Card]:
    """Return the model of digits, an `MVRBM`, and its card."""
    model, key, card = _packed(store, "likelihood", "kronecker5-45x45", "MVRBM")
    nats, judged = (_numbers(store, f"{kind}-{key}") for kind in ("nats", "samples-chains"))
    figures = {
        "log-likelihood of 10,000 test digits, binarized alike, by forward annealing (nats)": f"{nats['test']:.2f}",
        "interval by forward and reverse annealing, 256 chains, 30,000 steps": "{:.2f} to {:.2f}".format(
            *nats["interval"]
        ),
        "log-likelihood of the training digits (nats)": f"{nats['train']:.2f}",
        **_confident(store, judged["means"], "10,000 means after 5,000 Gibbs steps from the chains"),
    }
    what = "Draws handwritten digits, fills in missing pixels, and has the likelihood of digits."
    return model, card | {"name": "digits", "description": what + card["description"], "figures": figures}


def labeled_digits(store: Store) -> tuple[Any, Card]:
    """Return the model of digits and their labels, a `ClassificationMVRBM`, and its card."""
    model, key, card = _packed(store, "conditional", "kronecker8-30x30", "ClassificationMVRBM", mode="generative")
    judged = _numbers(store, f"given-label-{key}")["by_steps"]
    data = parts("random", None)
    _match_labels(model, data.train_labels)
    accuracy = model.score(data.test / np.float32(255), data.test_labels)
    found = {steps: _percent(judged[steps]["means"]["agreement"]) for steps in judged}
    figures = {
        "10,000 means after 5,000 Gibbs steps from noise: the judge finds the requested digit": found["5000"],
        "the same after 1,000 Gibbs steps": found["1000"],
        **_confident(store, judged["5000"]["means"], "the same after 5,000 Gibbs steps"),
        "accuracy of p(label given digit) on 10,000 test digits, binarized alike": _percent(accuracy),
    }
    what = "Draws handwritten digits of a given label, and classifies digits."
    return model, card | {"name": "labeled-digits", "description": what + card["description"], "figures": figures}


def _packed(store: Store, group: str, name: str, kind: str, **params: Any) -> tuple[Any, str, Card]:
    """Return a trained machine as an estimator, the common part of the names of its runs, and parts of its card."""
    run = next(one for one in plan(SCALES["paper"], [group]) if one.name.startswith(f"train-{name}"))
    record = store.record(run)
    settings = run.settings
    if record is None:
        raise SystemExit(
            f"{store.folder} does not hold the run {run.name}: compute it with python -m studies generative {group}"
        )
    numbers = record["numbers"]
    machine = store.machine(run)
    recipe = {**Recipe().config(), **settings["recipe"], "n_epochs": numbers["epochs"]}
    params |= {
        "hidden_shape": settings["hidden"],
        "rank": int(settings["coupling"].partition(":")[2]),
        "recipe": recipe,
    }
    described = {"class": kind, "params": params, "n_epochs": numbers["epochs"], "n_updates": numbers["updates"]}
    described |= {"as_arrays": True, "feature_names": None, "classes": describe_classes(np.arange(10))}
    chains = {layer: store.arrays(run)[f"chains.{layer}"][:MOST_CHAINS] for layer in machine.layers}
    with tempfile.TemporaryDirectory() as folder:
        write_machine(
            BoltzmannMachine(_renamed(machine.layers), machine.hidden, _renamed(machine.links)),
            Path(folder),
            {ESTIMATOR: described},
        )
        write_chains(_renamed(chains), Path(folder))
        model = mvrbm.load(folder, "cpu")
    facts = {"device": record["on"]["device"], "seconds": numbers["training_seconds"], "group": group}
    labels = ", with their labels" if settings["labels"] else ""
    made = _MADE.format(run=run.name, **facts)
    card = {"description": made, "data": _DATA.format(labels=labels), "license": "bsd-3-clause"}
    return model, run.name.removeprefix("train-"), card


def _renamed(layers: Mapping[str, Any]) -> dict[str, Any]:
    """Rename layers as estimators name them."""
    return {VISIBLE if name == IMAGE else name: layer for name, layer in layers.items()}


def _numbers(store: Store, name: str) -> dict[str, Any]:
    run = next(one for one in plan(SCALES["paper"], ["likelihood", "samples", "conditional"]) if one.name == name)
    return store.numbers(run)


def _percent(share: float) -> str:
    return f"{100 * share:.1f}%"


def _confident(store: Store, verdicts: Mapping[str, Any], what: str) -> dict[str, str]:
    real = _numbers(store, "judge")["gray"]
    judge = "the judge, a convolutional network"
    return {
        f"{what}: confidence of the judge above 0.9": _percent(verdicts["confident"]),
        f"{judge}: accuracy on the 10,000 test digits": _percent(real["agreement"]),
        f"{judge}: confidence above 0.9 on the test digits": _percent(real["confident"]),
    }


@torch.no_grad()
def _match_labels(model: Any, labels: Any) -> None:
    """Make the model draw each label as often as it occurs in the data. Samples of a given label do not change."""
    stratified = np.sort(labels)[:: len(labels) // _MATCHED]
    drawn, _ = model.set_params(random_state=0).sample(label=stratified, steps=_STEPS)
    shares = torch.from_numpy(np.bincount(labels) / np.float32(len(labels)))
    match_label_shares(model.machine_, {VISIBLE: torch.from_numpy(drawn)}, LABEL, shares.float())
    model.set_params(random_state=None)


if __name__ == "__main__":
    for make in (digits, labeled_digits):
        model, card = make(Store.within(_WORK))
        folder = model.save_pretrained(_OUT / card["name"], overwrite=True, **card)
        say(f"{folder}: {sum(path.stat().st_size for path in folder.iterdir()):,} bytes")
