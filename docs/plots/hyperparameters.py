"""What each setting buys, from results/hyperparameters/results.json."""

import matplotlib.pyplot as plt

from tools.measured import read

found = read("results/hyperparameters/results.json")
start, rows = found["start"], found["rows"]
AXES = {
    "rank": "rank",
    "hidden": "side of the hidden layer",
    "n_epochs": "epochs",
    "n_chains": "chains",
}
AXES |= {"recipe": "recipe", "centering": "centering"}

fig, panels = plt.subplots(2, 3, figsize=(9, 5.2), layout="constrained")
for panel, (key, name) in zip(panels.ravel(), AXES.items(), strict=True):
    points = [
        row
        for row in rows
        if all(
            row[other] == start[other] for other in start if other != key
        )
    ]
    points.sort(key=lambda row: row[key])
    labels = [str(row[key]) for row in points]
    nats = [row["nats"] for row in points]
    errors = [
        [row["nats"] - row["interval"][0] for row in points],
        [row["interval"][1] - row["nats"] for row in points],
    ]
    panel.errorbar(
        labels,
        nats,
        errors,
        fmt="o" if isinstance(start[key], str) else "o-",
        capsize=3,
    )
    panel.set(xlabel=name)
    panel.margins(x=0.25)
    panel.grid(alpha=0.3)
for panel in panels[:, 0]:
    panel.set_ylabel("nats per held-out digit")
