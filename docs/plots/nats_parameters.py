"""Log-likelihood against parameters, from results/generative/results.json."""

import matplotlib.pyplot as plt

from tools.measured import read

rows = [row for row in read("results/generative/results.json")["table"] if row["data"] == "random"]
fig, axis = plt.subplots(figsize=(7, 3.8), layout="constrained")
for kind, marker, name in (("Kronecker", "o", "sums of Kronecker products"), ("Dense", "s", "classic RBM")):
    points = sorted((row["parameters"], row["median"], row["title"]) for row in rows if row["kind"] == kind)
    axis.plot([p for p, _, _ in points], [nats for _, nats, _ in points], marker, label=name)
    for parameters, nats, title in points:
        if nats > -96:
            axis.annotate(
                title.removeprefix("Kronecker"),
                (parameters, nats),
                xytext=(4, -9),
                textcoords="offset points",
                fontsize=7,
            )
axis.set(xscale="log", ylim=(-106, -81), xlabel="parameters", ylabel="nats per test digit")
axis.legend(loc="lower right")
axis.grid(alpha=0.3)
