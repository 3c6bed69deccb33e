"""The page of experiment 3: sections, tables and figures, made from its findings."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from mvrbm import __version__
from mvrbm.pages import Page, Section, Table
from studies.report import DASH, claims, draw_all, incomplete, mean, section, verdict, worse
from studies.superres.data import PACKAGED
from studies.superres.figures import FIGURES
from studies.superres.findings import METHODS, PAPER, PUBLISHED, TABLE1, Evidence

__all__ = ["page_of"]


def page_of(found: Mapping[str, Any], evidence: Evidence, folder: Path, scale_name: str) -> Page:
    """Return the page of experiment 3, and save its figures under a folder."""
    scale, figures = evidence.scale, draw_all(folder, FIGURES, evidence)
    first, second = (name.capitalize() for name in scale.compared)
    lead = "Super-resolution of photographs by a factor of two (section 4.3 of the paper): its numbers and ours."
    if not found["comparable_with_the_paper"]:
        lead += (
            f" This is a quick run on crops of other photographs ({first}, {second}): it shows that everything works,"
            " and its numbers are not to be compared with the paper's, which are shown all the same."
        )
    sections = [
        Section("Numbers", worse(found), [_numbers(found)]),
        Section("Claims of the paper", claims(found)),
        section("Patches and filters", figures, ["superres-patches"], []),
        section("Sizes", figures, ["superres-sizes"], [*_by_patch(evidence), *_by_hidden(evidence)]),
        section(first, figures, ["superres-lena"], _compared(evidence, 0)),
        section(second, figures, ["superres-bird"], _compared(evidence, 1)),
        section("In the literature's protocol", figures, [], _published(evidence)),
        section("Effect of fine-tuning on the model of patches", figures, [], _tuning(evidence)),
        Section("How this was made", _about(found, scale_name)),
    ]
    return Page(
        title="Experiment 3: the paper's numbers and ours",
        lead=lead + incomplete(found),
        sections=[section for section in sections if section is not None],
        footer=f"mvrbm {__version__}.",
    )


def _numbers(found: Mapping[str, Any]) -> Table:
    rows = []
    for row in found["numbers"]:
        decimals, unit = row["decimals"], f" {row['unit']}" if row["unit"] else ""
        sign = "at most" if row["lower_is_better"] else "at least"
        rows.append(
            [
                row["title"],
                DASH if row["paper"] is None else f"{row['paper']:.{min(4, decimals + 1)}f}",
                mean(row["ours"], decimals) + (unit if row["ours"] else ""),
                f"{row['difference']:+.{decimals}f}" if "difference" in row else DASH,
                DASH if row["wanted"] is None else f"{sign} {row['wanted']:g}{unit}",
                verdict(row),
            ]
        )
    caption = (
        "Means over random choices of patches ± half the width of their 95 % interval (number of choices). In the "
        "paper's protocol RGB is reduced and enlarged, and luminance compared up to the border; in the "
        "literature's luminance alone is reduced and enlarged, and the border shaved."
    )
    return Table(["", "paper", "ours", "difference", "wanted", "verdict"], rows, caption)


def _sizes(found: Mapping[int, Mapping[str, Any]], header: str, paper: Mapping[int, float]) -> list[Table]:
    rows = [
        [
            f"{size} x {size}",
            *([f"{paper[size]:.4f}" if size in paper else DASH] if paper else []),
            *(mean(numbers[f"{key}.psnr"].plain(), 3) for key in ("with", "without")),
            f"{numbers['parameters'].mean:,.0f}",
            f"{numbers['training_seconds'].mean:.1f} s",
            f"{numbers['seconds'].mean:.2f} s",
        ]
        for size, numbers in found.items()
    ]
    columns = [header, *(["paper"] if paper else []), "with back-projection", "without"]
    columns += ["parameters", "training", "enlarging"]
    return [Table(columns, rows, "PSNR in dB, the paper's protocol, CD-1 alone.")] if rows else []


def _by_patch(evidence: Evidence) -> list[Table]:
    return _sizes(evidence.by_patch, "patch", TABLE1)


def _by_hidden(evidence: Evidence) -> list[Table]:
    return _sizes(evidence.by_hidden, "hidden layer", {})


def _compared(evidence: Evidence, which: int) -> list[Table]:
    """Error and seconds of every method on one image, next to the paper's."""
    image, role = evidence.scale.compared[which], ("lena", "bird")[which]
    numbers, paper, rows = evidence.compared(image), PAPER[role], []
    for key, title in METHODS.items():
        if f"{key}.psnr" not in numbers:
            continue
        theirs = paper.get(key, {})
        rows.append(
            [
                title,
                *(_number(theirs.get(name), 4) for name in ("rmse", "psnr")),
                _number(theirs.get("seconds"), 1),
                *(f"{numbers[f'{key}.{name}'].mean:.{digits}f}" for name, digits in _SHOWN.items()),
            ]
        )
    header = ["", "paper: RMSE", "PSNR", "seconds", "ours: RMSE", "PSNR", "SSIM", "seconds"]
    caption = "The paper's protocol. All methods in one run on one machine, with equally many threads or processes."
    if image != "lena":
        caption += f" {image.capitalize()} is not the paper's image: its numbers are not comparable with the paper's."
    if evidence.scale.train == PACKAGED:
        caption += " The shipped weights were trained on this photograph, among others."
    return [Table(header, rows, caption)] if rows else []


_SHOWN = {"rmse": 4, "psnr": 4, "ssim": 4, "seconds": 2}


def _number(value: float | None, decimals: int) -> str:
    return DASH if value is None else f"{value:.{decimals}f}"


def _published(evidence: Evidence) -> list[Table]:
    numbers, images = evidence.published(), evidence.scale.published
    rows = [
        [
            title,
            *(f"{numbers[f'{key}.images.{image}.psnr'].mean:.2f}" for image in images),
            f"{numbers[f'{key}.psnr'].mean:.3f}",
            f"{numbers[f'{key}.ssim'].mean:.4f}",
        ]
        for key, title in METHODS.items()
        if f"{key}.psnr" in numbers
    ]
    if rows and evidence.is_set5:
        rows += [[f"{name}, as published", *[DASH] * 5, f"{psnr:.2f}", DASH] for name, psnr in PUBLISHED.items()]
    header = ["PSNR, dB", *images, "mean", "mean SSIM"]
    which = "Set5" if evidence.is_set5 else "The same photographs"
    return [Table(header, rows, f"{which}; luminance alone, border of two pixels shaved.")] if rows else []


def _tuning(evidence: Evidence) -> list[Table]:
    """The machine as a generative model, before and after fine-tuning."""
    numbers = evidence.tuned()
    if not numbers:
        return []
    rows = [
        [title, *(f"{numbers[f'{when}.{key}'].mean:.{digits}f}" for when in ("before", "after"))]
        for key, (title, digits) in _GENERATIVE.items()
    ]
    caption = (
        "Patches of photographs that were not used for training; chains of 200 Gibbs steps start at them. In these "
        f"patches X has a standard deviation of {numbers['after.layers.X.data.std'].mean:.3f}, Z1 of "
        f"{numbers['after.layers.Z1.data.std'].mean:.3f}."
    )
    return [Table(["", "CD-1 alone", "fine-tuned"], rows, caption)]


_GENERATIVE = {
    "free_energy_gap": ("free energy of unseen patches minus that of seen ones, nats", 2),
    "mismatch_gap": ("its growth when X is taken from another patch, nats", 2),
    "matched": ("share of patches for which it grows", 3),
    "inferred_correlation": ("correlation of X with its mean given Z", 3),
    "layers.X.chains.std": ("standard deviation of X in the chains", 3),
    "layers.Z1.chains.std": ("standard deviation of Z1 in the chains", 3),
    "layers.X.chains.neighbors": ("correlation of neighbors of X in the chains", 3),
}


def _about(found: Mapping[str, Any], scale_name: str) -> list[str]:
    return [
        f"Scale {scale_name}: {found['cells']['stored']} cells, {found['seconds']:,.0f} s of work in total.",
        f"Machines: {'; '.join(found['machines'])}.",
        f"Command: python -m studies superres --scale {scale_name} --seeds {found['seeds']} --out DIR. All numbers are "
        "in results.json, every figure as PNG and SVG in figures/, every cell in cells/.",
    ]
