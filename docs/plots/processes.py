"""Predicted speedup by the number of processes, from results/distributed/curve.json."""

import matplotlib.pyplot as plt

from tools.measured import read

found = read("results/distributed/curve.json")
processes = [n for n in found["processes"] if n <= 64]
fig, panels = plt.subplots(
    1, 2, figsize=(8, 3), layout="constrained", sharey=True
)
for panel, (name, parts) in zip(
    panels, found["workloads"].items(), strict=True
):
    panel.plot(
        processes, processes, ":", color="gray", label="ideal speedup"
    )
    for batch, numbers in parts["speed_up_loopback"].items():
        panel.plot(
            processes,
            numbers[: len(processes)],
            "o-",
            label=f"batches of {int(batch):,}",
        )
    panel.set(xscale="log", yscale="log", title=name, xlabel="processes")
    panel.set_xticks(processes, [str(n) for n in processes])
    panel.minorticks_off()
    panel.grid(alpha=0.3)
panels[0].set_yticks(processes, [str(n) for n in processes])
panels[0].set_ylabel("speedup of one update")
panels[0].legend(fontsize=8)
