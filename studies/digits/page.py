"""The page of experiments 1 and 2: sections, tables and figures, made from their findings."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from mvrbm import __version__
from mvrbm.pages import Page, Section, Table
from studies.digits import work
from studies.digits.evidence import Evidence
from studies.digits.figures import FIGURES
from studies.report import DASH, claims, draw_all, incomplete, mean, section, worse

__all__ = ["page_of"]


def page_of(found: Mapping[str, Any], evidence: Evidence, folder: Path) -> Page:
    """Return the page of experiments 1 and 2, and save its figures under a folder."""
    figures = draw_all(folder, FIGURES, evidence)
    lead = (
        "Denoising, reconstruction, filters and classification of handwritten digits (sections 4.1 and 4.2 of the "
        "paper): its numbers, ours, and the difference."
    )
    if not found["comparable_with_the_paper"]:
        lead += (
            " This is a quick run on few digits and few updates: it shows that everything works, and its numbers are"
            " not to be compared with the paper's, which are shown all the same."
        )
    sections = [
        Section("Numbers", worse(found), _numbers(found, evidence)),
        Section("Claims of the paper", claims(found)),
        section("Denoising", figures, ["denoising"], _denoising(found)),
        section("Filters", figures, ["filters"], _filters(found)),
        section("Reconstruction", figures, ["reconstructions"], _reconstruction(found)),
        section("Classification: error against N", figures, ["error-against-n"], []),
        section("Classification: error against T", figures, ["error-against-t"], []),
        section("Comparison", figures, ["comparison"], [*_comparison(found), *_costs(found)]),
        section("Growing images", figures, ["growth"], _growth(found)),
        Section("How this was made", _about(found, evidence)),
    ]
    return Page(
        title="Experiments 1 and 2: the paper's numbers and ours",
        lead=lead + incomplete(found),
        sections=[section for section in sections if section is not None],
        footer=f"mvrbm {__version__}. Digits: MNIST (LeCun and Cortes).",
    )


def _numbers(found: Mapping[str, Any], evidence: Evidence) -> list[Table]:
    where = evidence.where(cell for cell, _ in evidence.found(work.classify))
    timed = f" Training: seconds of one training run, on {where}." if where else ""
    captions = {
        "error": "Share of test digits, by the nearest neighbor in hidden probabilities. Means over random subsets ± "
        f"half the width of their 95 % interval (number of subsets). ✓ is no worse than the paper, or reached.{timed}",
        "reconstruction": "All pixels of an image together, after one pass up and down.",
        "denoising": "Test nines with 10 % salt and pepper: mean PSNR of our denoiser, and how far that is above the "
        "3x3 median filter's.",
    }
    titles = {"error": "error of 1-NN", "reconstruction": "squared error per image", "denoising": "denoising"}
    tables = []
    for kind, caption in captions.items():
        rows = [_number(row) for row in found["numbers"] if row["key"].startswith(kind)]
        header = [titles[kind], "paper", "ours", "difference", "raw pixels", "training", "wanted"]
        # Tables are narrow: empty columns are left out.
        kept = [i for i in range(len(header)) if i == 0 or any(row[i] != DASH for row in rows)]
        if rows:
            tables.append(Table([header[i] for i in kept], [[row[i] for i in kept] for row in rows], caption))
    return tables


def _number(row: Mapping[str, Any]) -> list[str]:
    decimals, unit = row["decimals"], f" {row['unit']}" if row["unit"] else ""
    raw, than_paper, reached = row["raw_pixels"], row.get("better_than_the_paper"), row.get("reached")
    sign = "≤" if row["lower_is_better"] else "≥"
    return [
        row["title"] if row["unit"] else row["title"].split(", ", 1)[1],  # the header says the rest
        DASH if row["paper"] is None else f"{row['paper']:.4f}",
        mean(row["ours"], decimals) + (unit if row["ours"] else ""),
        f"{row['difference']:+.{decimals}f}{_MARKS[than_paper]}" if "difference" in row else DASH,
        DASH if raw is None else f"{raw['mean']:.{decimals}f}",
        DASH if row["training_seconds"] is None else f"{row['training_seconds']:.1f} s",
        DASH if row["wanted"] is None else f"{sign} {row['wanted']:.{decimals}f}{unit}{_MARKS[reached]}",
    ]


_MARKS = {True: " ✓", False: " ✗", None: ""}


def _denoising(found: Mapping[str, Any]) -> list[Table]:
    runs = {name: numbers for name, numbers in found["denoising"].items() if numbers}
    if not runs:
        return []
    methods = {
        "noisy": "noisy",
        "one-pass": "paper's pass up and down",
        "mean-field": "our denoiser, mean field",
        "mean-field-estimated": "the same, noise level estimated",
        "gibbs": "our denoiser, Gibbs",
        "gibbs-estimated": "the same, noise level estimated",
        "median": "3x3 median filter",
        "total-variation": "total variation",
        "non-local-means": "non-local means",
    }
    rows = [
        [title, *(mean(numbers.get(f"psnr.{key}.psnr"), 2) for numbers in runs.values())]
        for key, title in methods.items()
    ]
    names = [name.replace("paper,", "paper's recipe,").replace("default,", "our recipe,") for name in runs]
    return [Table(["PSNR, dB", *names], rows, "Mean PSNR of all test nines; recipe and hidden size of the machine.")]


def _filters(found: Mapping[str, Any]) -> list[Table]:
    runs = {name: numbers for name, numbers in found["filters"].items() if numbers}
    if not runs:
        return []
    kinds = {"mean": "our filters", "scrambled": "as smooth, without edges", "white": "white noise", "dct": "cosines"}
    rows = [
        [title, *(mean(numbers.get(f"filters.{key}"), 3) for numbers in runs.values())] for key, title in kinds.items()
    ]
    names = {"paper": "paper's recipe", "default": "our recipe"}
    return [
        Table(
            ["Haar-likeness", *(names[name] for name in runs)], rows, "1 is a Haar function; the others are references."
        )
    ]


def _reconstruction(found: Mapping[str, Any]) -> list[Table]:
    rows = []
    for name, numbers in found["reconstruction"].items():
        if "test_error" not in numbers:
            continue
        model, recipe = name.split(", ")
        rows.append(
            [
                f"{_MODELS[model]}, {_RECIPES[recipe]}",
                f"{numbers['passes']:,}",
                mean(numbers["train_error"], 2),
                mean(numbers["test_error"], 2),
                f"{numbers['train_error']['mean'] / 784:.5f}",
                f"{numbers['parameters']['mean']:,.0f}",
                f"{numbers['training_seconds']['mean']:.1f} s",
            ]
        )
    if not rows:
        return []
    rows.insert(0, ["MVRBM, as the paper reports", "3,000", "10.8488", DASH, f"{10.8488 / 784:.5f}", "2,809", DASH])
    header = [
        "squared error per image",
        "epochs",
        "training digits",
        "test digits",
        "per pixel",
        "parameters",
        "training",
    ]
    return [Table(header, rows)]


_MODELS = {
    "mvrbm": "MVRBM",
    "rbm": "classic RBM, as many hidden units",
    "rbm-equal": "classic RBM, as many parameters",
    "tvrbm": "TvRBM, as many hidden units",
    "tvrbm-small": "TvRBM, a tenth of them",
}
_RECIPES = {"paper": "paper's recipe", "default": "our recipe", "fine-tuned": "with a softmax on top, fine-tuned"}


def _comparison(found: Mapping[str, Any]) -> list[Table]:
    methods = found["comparison"]["methods"]
    sizes = sorted({int(n) for points in methods.values() for n in points})
    if not sizes:
        return []
    rows = [[title, *(_percent(points.get(str(n))) for n in sizes)] for title, points in methods.items()]
    fewer: dict[str, list[str]] = {}
    for title, points in methods.items():
        for n, one in points.items():
            if one["seeds"] < found["seeds"]:
                fewer.setdefault(f"{one['seeds']} at N = {int(n):,}", []).append(title)
    caption = f"Means over {found['seeds']} random subsets"
    caption += "".join(f"; {count} ({_several(titles)})" for count, titles in fewer.items()) + "."
    return [Table(["error in %, by N", *(f"{n:,}" for n in sizes)], rows, caption)]


def _several(titles: Sequence[str]) -> str:
    return titles[0] if len(titles) == 1 else f"{len(titles)} methods"


def _percent(one: Mapping[str, Any] | None) -> str:
    return DASH if one is None else f"{100 * one['mean']:.2f}"


def _costs(found: Mapping[str, Any]) -> list[Table]:
    """Parameters and seconds, at the largest N that each method has."""
    last: dict[str, Mapping[str, Any]] = {}
    for row in found["methods"]:
        if row["method"] not in last or row["n"] > last[row["method"]]["n"]:
            last[row["method"]] = row
    rows = [
        [
            _method(name),
            f"{row['n']:,}",
            DASH if row["parameters"] is None else f"{row['parameters']:,}",
            DASH if row["training_seconds"] is None else f"{row['training_seconds']:.1f} s",
            row["on"],
        ]
        for name, row in last.items()
    ]
    caption = (
        "Training at the largest N of each. Cells that shared a machine would have been faster alone; times on "
        "different machines are not comparable."
    )
    return [Table(["method", "N", "parameters", "training", "measured on"], rows, caption)] if rows else []


def _method(name: str) -> str:
    from studies.baselines import BASELINES

    if name in BASELINES:
        return BASELINES[name].title
    model, recipe = name.split(", ")
    return f"{_MODELS[model]}, {_RECIPES[recipe]}"


def _growth(found: Mapping[str, Any]) -> list[Table]:
    ours, theirs = found["growth"]["mvrbm"], found["growth"]["rbm"]
    rows = []
    for side in ours["parameters"]:
        if side not in theirs["parameters"]:
            continue
        rows.append(
            [
                f"{side}x{side}",
                *(f"{model['parameters'][side]:,.0f}" for model in (ours, theirs)),
                *(f"{1e3 * model['seconds_per_update'][side]:.3g} ms" for model in (ours, theirs)),
                *(f"{model['error'][side]:.4f}" for model in (ours, theirs)),
            ]
        )
    header = ["image", "parameters", "RBM", "per update", "RBM", "error per pixel", "RBM"]
    caption = "The MVRBM, and in the next column the classic RBM. Timed alone, after a first epoch."
    return [Table(header, rows, caption)] if rows else []


def _about(found: Mapping[str, Any], evidence: Evidence) -> list[str]:
    scale = evidence.scale
    return [
        f"Scale {found['scale']}: {scale.data}, {found['seeds']} random subsets per point, beginning with number "
        f"{found['first_seed']}; fewer where training is long. {found['cells']['stored']} cells, "
        f"{found['seconds']:,.0f} s of work in total.",
        f"Machines: {'; '.join(found['machines'])}.",
        f"Command: python -m studies digits --scale {found['scale']} --seeds {found['seeds']} --out DIR. All numbers "
        "are in results.json, every figure as PNG and SVG in figures/, every cell in cells/.",
    ]
