"""Every backend on every workload that it can compute: the table that justifies which backends there are.

Each row is a workload of :mod:`benchmarks.workloads`, each column a backend. Backends are forced, not chosen: the table
also shows how much slower the other backends are.
"""

from __future__ import annotations

import gc
import statistics
from collections.abc import Mapping
from typing import Any

import torch

from benchmarks import workloads
from benchmarks.show import grid, three_digits
from mvrbm.backends.choose import BACKENDS, fastest_backend, unsupported_reasons
from mvrbm.devices import resolve_device

__all__ = ["measure", "table"]


def measure(*, only: str = "", device: str = "auto") -> dict[str, Any]:
    """Time every backend on every workload, and return the results as plain values.

    Parameters
    ----------
    only : str
        Time only the workloads whose name contains this text.
    device : {"auto", "cpu", "cuda"}
        Device to train on.

    Returns
    -------
    dict
        For every workload the backend that a trainer chooses, and for every backend either the microseconds per update
        (`median`, `low`, `high`) or the reason why it cannot compute the workload (`unsupported`). If the automatic
        choice skips a backend because another one is faster, `slower` is the reason.
    """
    kind = resolve_device(device).type
    rows: dict[str, Any] = {}
    for name, workload in workloads.WORKLOADS.items():
        if only in name and not workload.annealing and not workload.peer:
            rows[name] = _row(workload, kind)
    about = torch.cuda.get_device_name() if kind == "cuda" else kind
    return {"device": about, "torch": torch.__version__, "workloads": rows}


def _row(workload: workloads.Workload, device: str) -> dict[str, Any]:
    trainers, source = workloads.prepared(workload, device)
    settings = trainers[0].update_settings()
    run = settings, trainers[0].state, source
    reasons = unsupported_reasons(*run)
    chosen = fastest_backend(*run, workload.models)
    supported = [name for name, reason in reasons.items() if reason is None]
    slower = {name: BACKENDS[name].slower_reason(*run, workload.models) for name in supported}
    del trainers, source, run
    cells = {name: _cell(workload, device, name, reason) for name, reason in reasons.items()}
    for name in supported:
        if slower[name] is not None and "median" in cells[name]:
            cells[name]["slower"] = slower[name]
    return {"chosen": chosen, "backends": cells}


def _cell(workload: workloads.Workload, device: str, name: str, reason: str | None) -> dict[str, Any]:
    if reason is None and workload.models > 1 and not BACKENDS[name].trains_groups:
        reason = "it trains one machine at a time"
    if reason is not None:
        return {"unsupported": reason}
    gc.collect()  # frees the previous backend's memory on the device
    epoch, _ = workloads.epochs(workload, device, name)
    times = [1e6 * seconds for seconds in workloads.seconds_per_update(epoch, device)]
    return {"median": statistics.median(times), "low": min(times), "high": max(times)}


def table(result: Mapping[str, Any]) -> str:
    """Return the results as one table in Markdown, in microseconds per update.

    A star marks the chosen backend. Times in parentheses belong to backends that the automatic choice considers slower.
    """
    body = []
    for name, row in result["workloads"].items():
        cells = []
        for backend, cell in row["backends"].items():
            text = three_digits(cell["median"]) if "median" in cell else "-"
            text = f"({text})" if "slower" in cell else text
            cells.append(f"{text} *" if backend == row["chosen"] else text)
        body.append([name, *cells])
    return f"{result['device']}, torch {result['torch']}\n\n{grid(['workload', *BACKENDS], body)}"
