"""The findings of experiments 1 and 2 as one plain object: the content of `results.json`, and of the report."""

from __future__ import annotations

from typing import Any

from studies.cells import Cell
from studies.digits import work
from studies.digits.claims import CLAIMS
from studies.digits.evidence import Evidence, targets
from studies.report import Numbers, measured, plain, summary

__all__ = ["results"]


def results(evidence: Evidence, scale_name: str) -> dict[str, Any]:
    """Return all findings as plain values."""
    scale = evidence.scale
    curve = {t: one for t in scale.curve_stops if (one := evidence.by_paper(scale.curve_n, t)) is not None}
    last = max(scale.stops)
    against_n = {n: one for n in scale.all_sizes if (one := evidence.by_paper(n, min(scale.stops))) is not None}
    return {
        "scale": scale_name,
        **summary(evidence, targets(evidence), CLAIMS, comparable=scale_name == "paper"),
        "against_t": {"n": scale.curve_n, "points": plain(curve)},
        "against_n": {"t": min(scale.stops), "points": plain(against_n)},
        "comparison": {"t": last, "methods": {title: plain(points) for title, points in evidence.curves().items()}},
        "methods": _methods(evidence),
        "reconstruction": {
            f"{model}, {recipe}": _reconstruction(evidence, model, recipe)
            for model in ("mvrbm", "rbm", "rbm-equal")
            for recipe in ("paper", "default")
        },
        "denoising": {
            f"{recipe}, {hidden[0]}x{hidden[1]}": plain(evidence.denoising(recipe, hidden))
            for hidden in scale.nines_hidden
            for recipe in ("paper", "default")
        },
        "filters": {recipe: plain(evidence.filters(recipe)) for recipe in ("paper", "default")},
        "growth": {model: {key: evidence.growth(model, key) for key in _GROWTH} for model in ("mvrbm", "rbm")},
    }


_GROWTH = ("parameters", "seconds_per_update", "seconds_per_pass", "error", "error_of_the_mean")


def _reconstruction(evidence: Evidence, model: str, recipe: str) -> dict[str, Any]:
    cells = evidence.found(work.reconstruct, model=model, recipe=recipe)
    if not cells:
        return {}
    keys = ("train_error", "test_error", "parameters", "training_seconds")
    measured = {key: evidence.reconstruction(model, recipe, key) for key in keys}
    return {
        "passes": cells[0][0].settings["epochs"],
        **{key: one.plain() for key, one in measured.items() if one is not None},
    }


def _methods(evidence: Evidence) -> list[dict[str, Any]]:
    """Parameters and training seconds of all methods that are compared, by N."""
    rows: dict[tuple[str, int], list[tuple[Cell, Numbers]]] = {}
    for kind in (work.classify, work.baseline, work.fine_tune):
        for cell, numbers in evidence.found(kind):
            if "diverged" not in numbers:
                rows.setdefault((_method(cell), cell.settings["n"]), []).append((cell, numbers))
    out = []
    for (name, n), found in sorted(rows.items()):
        seconds = measured(numbers.get("training_seconds") for _, numbers in found)
        out.append(
            {
                "method": name,
                "n": n,
                "parameters": found[0][1].get("parameters"),
                "training_seconds": None if seconds is None else seconds.mean,
                "seeds": len(found),
                "on": evidence.where(cell for cell, _ in found),
            }
        )
    return out


def _method(cell: Cell) -> str:
    if cell.work is work.fine_tune:
        return "mvrbm, fine-tuned"
    return cell.settings.get("baseline") or f"{cell.settings['model']}, {cell.settings['recipe']}"
