"""Packing a trained machine as a model of the package: the same parameters and chains, and a card of its runs."""

import numpy as np
import torch

import mvrbm
from studies.generative.plan import SCALES, plan
from studies.generative.run import build
from studies.generative.ship import digits
from studies.runs import Outcome, Store

NAME = "kronecker5-45x45-u400000-random-s1"


def test_the_model_is_that_of_the_cell(tmp_path):
    store = Store(tmp_path / "runs")
    runs = {run.name: run for run in plan(SCALES["paper"], ["likelihood", "samples"])}
    machine = build(runs[f"train-{NAME}"].settings)
    chains = torch.from_numpy(np.random.default_rng(0).integers(0, 2, (400, 28, 28), np.uint8))
    judged = {"confident": 0.7974, "agreement": 0.996}
    outcomes = {
        f"train-{NAME}": Outcome(
            {"epochs": 1334, "updates": 400_200, "training_seconds": 115.5}, {"chains.image": chains}, machine
        ),
        f"nats-{NAME}": Outcome({"test": -84.609, "train": -84.953, "interval": [-84.842, -84.376]}),
        f"samples-chains-{NAME}": Outcome({"means": judged}),
        "judge": Outcome({"gray": judged}),
    }
    for name, outcome in outcomes.items():
        store.write(runs[name], outcome, {"on": {"device": "NVIDIA H200"}})
    model, card = digits(store)
    folder = model.save_pretrained(tmp_path / "model", **card)
    again = mvrbm.load(folder, "cpu")
    assert (again.n_epochs_, again.n_updates_, again.random_state) == (1334, 400_200, None)
    assert np.array_equal(again.chains_["visible"].numpy(), chains.numpy()[:100])
    x = chains.numpy()[:3].astype(np.float32)
    assert np.array_equal(again.free_energy(x), machine.free_energy({"image": torch.from_numpy(x)}).detach().numpy())
    text = (folder / "README.md").read_text(encoding="utf-8")
    for part in ("-84.61", "-84.84 to -84.38", "79.7%", f"--only train-{NAME}", "in 116 s"):
        assert part in text
