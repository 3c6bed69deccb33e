"""Log-likelihood against parameters, from results/generative/results.json."""

import matplotlib.pyplot as plt

from tools.measured import read

found = read("results/generative/results.json")
rows = [row for row in found["table"] if row["data"] == "random"]
named = {line["machine"] for line in found["lines"]}
fig, axis = plt.subplots(figsize=(7, 3.8), layout="constrained")
for kind, marker, name in (
    ("Kronecker", "o", "sums of Kronecker products"),
    ("Dense", "s", "classic RBM"),
):
    points = [
        (row["parameters"], row["median"], row["title"])
        for row in rows
        if row["kind"] == kind
    ]
    axis.plot(
        [p for p, _, _ in points],
        [nats for _, nats, _ in points],
        marker,
        label=name,
    )
    for parameters, nats, title in points:
        if title in named:
            below = title == "Kronecker(6), 33x33"  # next to another one
            place = {
                "xytext": (-6 if below else 0, -4 if below else 7),
                "textcoords": "offset points",
                "ha": "right" if below else "center",
            }
            axis.annotate(
                title.replace("Kronecker(", "rank ").replace(")", ""),
                (parameters, nats),
                fontsize=8,
                **place,
            )
axis.set(
    xscale="log",
    ylim=(-106, -79),
    xlabel="parameters",
    ylabel="nats per test digit",
)
axis.legend(loc="lower left")
axis.margins(x=0.12)
axis.grid(alpha=0.3)
