"""The measured values and tables of README and documentation, read from JSON files in `results/` and `benchmarks/`.

    python -m tools.measured               # print all values and the names of all tables
    python -m tools.measured --write       # update the table in README.md, and results/README.md

Pages of the documentation refer to a value or table by name (`docs/_ext/measured_figures.py`), so they follow new
results automatically. `README.md` and `results/README.md` are read without a build: `--write` updates the block between
two comments in the first and all of the second, and a test checks that they are current. Every table names its file and
the command that measures it.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import json
import re
import statistics
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any, NamedTuple

from safetensors.numpy import load_file

ROOT = Path(__file__).resolve().parent.parent
# Shown for a missing value.
DASH = "–"
# The part of README.md that `--write` replaces.
BLOCK = re.compile(r"(?<=<!-- measured: begin -->\n).*?(?=<!-- measured: end -->)", re.DOTALL)


class Table(NamedTuple):
    """A table with the JSON file that has its numbers, and the command that measures them.

    `note` states the machine and whether settings were chosen on test data, where a column of the table does not.
    """

    header: Sequence[str]
    rows: Sequence[Sequence[str]]
    source: str
    command: str
    note: str = ""

    def plain(self) -> str:
        """Return the table in Markdown, without its source and command."""
        numbers = [
            all(re.fullmatch(r"[-–\d.,%± ()]*( (dB|ms|us|s))?", cell) for cell in column)
            for column in zip(*self.rows, strict=True)
        ]
        lines = [self.header, ["---:" if right else "---" for right in numbers], *self.rows]
        return "\n".join(f"| {' | '.join(line)} |" for line in lines) + "\n"

    def markdown(self) -> str:
        """Return the table in Markdown, with its source and command."""
        if not self.command:
            return self.plain()
        about = f"Produced by `{self.command}` and stored in `{self.source}`."
        return f"{self.plain()}\n{' '.join([about, *([self.note] if self.note else [])])}\n"


@functools.cache
def read(path: str) -> Any:
    """Return the contents of a JSON file in the repository."""
    return json.loads((ROOT / path).read_text(encoding="utf-8"))


# -- generative models ------------------------------------------------------------------------------

_GENERATIVE = "results/generative/results.json"
_VALIDATED = "Settings were chosen on validation digits."


def _machine(title: str) -> Any:
    rows = [row for row in read(_GENERATIVE)["table"] if row["title"] == title and row["data"] == "random"]
    return rows[0]


def _nats(title: str, decimals: int = 1) -> str:
    return f"{_machine(title)['median']:.{decimals}f}"


def _classic() -> Any:
    """Return the training run of the dense machine with the highest test log-likelihood, over all training lengths."""
    rows = [row for row in read(_GENERATIVE)["seconds_table"] if row["title"] == "Dense, 500"]
    median = _machine("Dense, 500")
    return max([{**median, "test": median["median"]}, *rows], key=lambda row: float(row["test"]))


def _conditional(steps: int) -> Any:
    return next(row for row in read(_GENERATIVE)["conditional"] if row["steps"] == steps)


def _confident(title: str) -> float:
    rows = read(_GENERATIVE)["samples"]
    return float(next(row for row in rows if row["title"] == title and row["start"] == "chains")["means"]["confident"])


def _lines() -> Table:
    rows = [
        [
            line["machine"],
            f"{line['parameters']:,}",
            f"{_machine(line['machine'])['updates']:,}",
            f"{line['median']:.2f}",
            str(line["seeds"]),
            f"{line['widest_interval']:.2f}",
        ]
        for line in read(_GENERATIVE)["lines"]
        if line["median"] is not None
    ]
    header = ["machine", "parameters", "updates", "nats per test digit", "seeds", "widest interval"]
    command = "python -m studies generative likelihood --scale paper"
    return Table(header, rows, _GENERATIVE, command, f"The machines were trained on an NVIDIA H200. {_VALIDATED}")


def _schedule() -> Table:
    rows = [
        [row["title"], f"{row['updates']:,}", row["on"], f"{row['training_seconds']:.1f}", f"{row['test']:.1f}"]
        for row in read(_GENERATIVE)["seconds_table"]
    ]
    header = ["machine", "updates", "trained on", "seconds", "nats per test digit"]
    command = "python -m studies generative seconds --scale paper"
    return Table(header, rows, _GENERATIVE, command, f"Each machine was trained with one seed. {_VALIDATED}")


def _real() -> Table:
    rows = [
        [f"{data}: {row['title']}", f"{row['parameters']:,}", f"{row['test']:.1f}", f"{row['train']:.1f}"]
        for data, found in read(_GENERATIVE)["real"].items()
        for row in found
    ]
    header = ["data: model", "parameters", "nats, held-out data", "nats, training data"]
    return Table(header, rows, _GENERATIVE, "python -m studies generative real --scale paper")


# -- sequences --------------------------------------------------------------------------------------


def _sequences() -> Table:
    source = "results/sequences/results.json"
    found = read(source)
    return Table(found["header"], found["table"], source, "python -m studies sequences")


def _pf00072(model: str) -> str:
    """Return the test log-likelihood of a sequence model of PF00072, in nats per site."""
    rows = read("results/sequences/results.json")["rows"]
    return f"{next(row['nats'] for row in rows if (row['family'], row['model']) == ('PF00072', model)):.3f}"


# -- densities of real-valued arrays ----------------------------------------------------------------


def _densities() -> Table:
    """Return the likelihoods of held-out samples by data set and tool. The best of each set is bold."""
    source = "results/densities/results.json"
    found = read(source)["sets"]
    tools = list(dict.fromkeys(tool for of in found.values() for tool in of))
    rows = []
    for name, of in found.items():
        best = max(of, key=lambda tool: of[tool]["nats"])
        cells = [f"{of[tool]['nats']:.3f}" if tool in of else DASH for tool in tools]
        cells = [f"**{cell}**" if tool == best else cell for tool, cell in zip(tools, cells, strict=True)]
        rows.append([name, *cells, f"{of['MatrixMixture']['parameters']:,}"])
    return Table(
        ["test nats per entry", *tools, "parameters of MatrixMixture"],
        rows,
        source,
        "python -m studies densities",
        "Run with one seed. MatrixMixture has its default settings. Settings of the other tools were chosen on "
        "validation samples.",
    )


def _natural_patches() -> Table:
    source = "results/natural-patches/results.json"
    rows = [
        [row["density"], f"{row['parameters']:,}", f"{row['nats']:.2f}", f"{len(row['all'])}", f"{row['seconds']:.0f}"]
        for row in read(source)["rows"]
    ]
    return Table(
        ["density", "parameters", "nats per test patch", "seeds", "CPU seconds"],
        rows,
        source,
        "python -m studies natural-patches",
        "Run on one thread of an AMD EPYC processor that other programs used at the same time. The number of passes "
        "over the data was chosen on patches of training photographs.",
    )


# -- applications -----------------------------------------------------------------------------------

_APPLICATIONS = "results/applications/results.json"
_OURS = "mvrbm"
_TOOLS = {
    _OURS: "mvrbm",
    "5-nearest": "5 nearest",
    "pca-error": "PCA error",
    "mahalanobis": "Mahalanobis, shrunk",
    "isolation-forest": "isolation forest",
    "one-class-svm": "one-class SVM",
    "lof": "LOF",
    "lda": "LDA",
    "nmf": "NMF",
    "nmf-kl": "NMF, Kullback-Leibler",
    "pca-ridge": "PCA, ridge",
    "soft-impute": "SoftImpute",
    "tensorly-cp": "TensorLy, CP",
    "unigram": "frequencies of words",
    "ppca": "probabilistic PCA",
    "mean": "mean",
}
_DATA = {
    "frey": "Frey faces",
    "patches": "patches of photographs",
    "digits": "digits, 8x8",
    "kinetic": "Kinetic",
    "covid19": "COVID19",
    "indian-pines": "Indian Pines",
    "mnist": "MNIST",
    "20news": "20 Newsgroups",
    "motions": "motion sensors",
    "italy": "power demand",
    "lfw": "LFW faces",
    "waves": "mixed waves",
    "elnino": "El Niño",
    "boston": "Boston",
    "autompg": "Auto MPG",
    "il2": "IL-2 responses",
    "vowels": "Japanese vowels",
    "leaves": "leaves",
    "coffee": "coffee spectra",
    "tissue": "tissue in color",
}
_MISSING = {
    "20": "20% missing",
    "50": "50% missing",
    "block": "a block missing",
    "gap": "a gap",
    "channel": "a channel missing",
}
# Data sets of the `subsets` part that were not used to design the imputer.
_UNTOUCHED = ("elnino", "boston", "autompg", "il2", "vowels", "leaves", "coffee", "tissue")
# How settings of mvrbm were chosen, and the machine where it matters.
_CHOSEN = {
    "imputation": "We had seen results on the missing entries of some of these data sets when we designed the imputer, "
    "so its results on them may be optimistic.",
    "filling": "Run on two CPU cores, before the imputer modeled correlated residuals. The first version of the "
    "imputer was designed after looking at results on MNIST test digits and Frey faces test frames, so these results "
    "are not fully independent of its design.",
    "subsets": "Run on an AMD EPYC processor with one CPU thread and one seed. We had seen results on the missing "
    "entries of most of these data sets when we designed the imputer, so its results on them may be optimistic. Data "
    "sets marked with a star were not used in the design.",
    "outliers": "Run on two CPU cores. The detector was designed on other splits of these families of data.",
    "unseen": "Run on an AMD EPYC processor with one CPU thread and one split. These families were not used to design "
    "the detector.",
    "alarms": "Run on two CPU cores. The rule for the threshold was designed on these families of data.",
    "topics": "Run on a CPU; the numbers are means over three seeds. Settings were chosen on held-out training "
    "documents.",
}


def _task(name: str, part: str = "") -> str:
    data, *rest = name.split(", ")
    star = r"\* " if part == "subsets" and data in _UNTOUCHED else ""
    return star + ", ".join([_DATA.get(data, data), *(_MISSING.get(word, word) for word in rest)])


def _rounded(number: float, digits: int) -> str:
    return f"{float(f'{number:.{digits}g}'):,.10g}"


def _application(part: str, digits: int) -> Table:
    found = {task: of for task, of in read(_APPLICATIONS)[part].items() if ", after " not in task}
    tools = list(dict.fromkeys(tool for task in found.values() for tool in task))
    tools.sort(key=lambda tool: tool != _OURS)
    rows = [
        [_task(task, part), *(DASH if (number := of.get(tool)) is None else _rounded(number, digits) for tool in tools)]
        for task, of in found.items()
    ]
    return Table(
        ["task", *(_TOOLS.get(tool, tool) for tool in tools)],
        rows,
        _APPLICATIONS,
        f"python -m studies applications {part}",
        _CHOSEN[part],
    )


def _imputer_time() -> Table:
    """Return errors, coverage and CPU seconds of the imputer and of its linear part, and the best other tool."""
    path = "results/applications/subsets.json"
    cases: dict[str, dict[str, list[dict[str, Any]]]] = {}
    for name, numbers in read(path).items():
        data, kind, tool = re.findall(r"subsets-(.*?)-(20|50|block|gap|channel)-(.*)-\d+", name)[0]
        cases.setdefault(f"{data}, {kind}", {}).setdefault(tool, []).append(numbers)
    rows = []
    for task in read(_APPLICATIONS)["subsets"]:
        tools = cases[task]
        if _OURS not in tools or f"{_OURS}-linear" not in tools:
            continue
        means = {
            tool: {
                key: statistics.fmean(numbers[key] for numbers in of)
                for key in ("rmse", "cpu_seconds", "coverage")
                if of[0].get(key) is not None
            }
            for tool, of in tools.items()
        }
        others = {tool: of["rmse"] for tool, of in means.items() if not tool.startswith(_OURS) and "rmse" in of}
        best = min(others, key=others.__getitem__)
        ours, linear = means[_OURS], means[f"{_OURS}-linear"]
        errors = [_rounded(of["rmse"], 3) for of in (ours, linear)]
        seconds = [f"{of['cpu_seconds']:.1f}" for of in (ours, linear)]
        other = f"{_rounded(others[best], 3)} ({_TOOLS.get(best, best)})"
        rows.append([_task(task, "subsets"), *errors, other, f"{ours['coverage']:.3f}", *seconds])
    header = ["task", "mvrbm", "linear part", "best other tool", "coverage", "CPU seconds", "linear part, CPU seconds"]
    return Table(header, rows, path, "python -m studies applications subsets", _CHOSEN["subsets"])


def _filling_epochs() -> Table:
    """Return the errors for faces by the number of training epochs."""
    found = read(_APPLICATIONS)["filling"]
    cases = [task.split(", after ") for task in found if ", after " in task]
    parts = list(dict.fromkeys(task for task, _ in cases))
    rows = [
        [time, *(f"{found[f'{part}, after {time}'][_OURS]:.3g}" for part in parts)]
        for time in dict.fromkeys(time for _, time in cases)
    ]
    rows.append(["default", *(f"{found[part][_OURS]:.3g}" for part in parts)])
    header = ["training", *(_task(part) for part in parts)]
    return Table(header, rows, _APPLICATIONS, "python -m studies applications filling", _CHOSEN["filling"])


def _application_value(part: str, task: str, tool: str, form: str) -> str:
    return format(read(_APPLICATIONS)[part][task][tool], form)


# -- images -----------------------------------------------------------------------------------------

_STAGES = "results/superres/enlarging.json"
_PHOTOGRAPHS = "python -m studies photographs"
_METHODS = {
    "stages": "mvrbm",
    "stages, estimated": "mvrbm, level estimated",
    "not cleaned": "mvrbm `--no-cleanup`",
    "bm3d": "BM3D",
    "median": "median filter",
    "telea": "Telea",
    "missing": "fraction missing",
    "better": "pictures better than bicubic",
    "images": "of",
    "processor_seconds": "CPU seconds",
    "process_seconds": "CPU seconds with start",
    "peak_mib": "peak memory in MiB",
}
_CASES = {
    r"\bx(\d)\b": r"×\1",
    r"\bbytes\b": "rounded to bytes",
    r"\bfloats\b": "floating point",
    r"\bmirrored\b": "floating point, mirrored",
    r"\bjpeg (\d+)": r"JPEG quality \1",
    r"^(gray|color), (\d+)": r"\1, Gaussian noise of \2",
    r"^salt (0\.\d+)": r"gray, salt and pepper, \1",
    r"^scratches of (\d)": r"scratches of width \1",
    r"\bstages\b": "mvrbm",
}


def _case(name: str) -> str:
    """Return the words for a case that a study names with an abbreviation, such as "x2, bytes"."""
    for pattern, words in _CASES.items():
        name = re.sub(pattern, words, name)
    return name


def _set5(method: str) -> float:
    """Return the PSNR on Set5 at scale 2, where the small pictures are rounded to bytes."""
    return float(read(_STAGES)["x2, bytes"][method]["psnr"])


def _nines(method: str) -> list[float]:
    """Return the PSNR of denoised nines of MNIST for each recipe and hidden layer, in increasing order."""
    found = read("results/digits/results.json")["denoising"].values()
    return sorted(float(of[f"psnr.{method}.psnr"]["mean"]) for of in found)


def _parameters(name: str) -> int:
    """Return the number of parameters of weights for photographs."""
    return sum(tensor.size for tensor in load_file(ROOT / "src/mvrbm/vision/weights" / f"{name}.safetensors").values())


def _enlarging() -> Table:
    methods = ("bicubic", "stages")
    measures = {"psnr": ("PSNR in dB", 2), "ssim": ("SSIM", 4)}
    rows = [
        [_case(name), *(f"{row[method][key]:.{measures[key][1]}f}" for key in measures for method in methods)]
        for name, row in read(_STAGES).items()
    ]
    names = [_METHODS.get(method, method) for method in methods]
    header = ["Set5", *(f"{method}: {measure}" for measure, _ in measures.values() for method in names)]
    note = "Set5 was not used to choose the weights, but early prototypes had been measured on it."
    return Table(header, rows, _STAGES, f"{_PHOTOGRAPHS} enlarging", note)


def _photographs(part: str, folder: str, *, by_picture: bool = False) -> Table:
    """Return a table with one row per name, or means over pictures if names are "picture, case" (`by_picture`)."""
    source = f"results/{folder}/{part}.json"
    cases: dict[str, list[Any]] = {}
    for name, row in read(source).items():
        cases.setdefault(name.split(", ", 1)[1] if by_picture else name, []).append(row)
    found = [key for of in cases.values() for key, value in of[0].items() if _is_number(value) and key != "seconds"]
    columns = list(dict.fromkeys(found))
    rows = []
    for case, of in cases.items():
        means = [statistics.mean(row[key] for row in of) if all(key in row for row in of) else None for key in columns]
        cells = [DASH if mean is None else f"{mean:.4g}" for mean in means]
        rows.append([_case(case), *cells, *([str(len(of))] if by_picture else [])])
    header = ["pictures" if part == "degraded" else "case", *(_METHODS.get(column, column) for column in columns)]
    header += ["pictures"] if by_picture else []
    return Table(header, rows, source, f"{_PHOTOGRAPHS} {part}")


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _papers(source: str, part: str | None, command: str) -> Table:
    found = read(source)[part] if part else read(source)
    rows = []
    for number in found["numbers"]:
        form = f"{{:.{number['decimals']}f}}{' ' + number['unit'] if number['unit'] else ''}"
        ours, theirs = number["ours"], number["paper"]
        if ours is None:
            continue
        mean = ours["mean"] if isinstance(ours, dict) else ours
        rows.append([number["title"], *(DASH if x is None else form.format(x) for x in (theirs, mean))])
    return Table(["", "paper", "ours"], rows, source, command)


def _claims(source: str, part: str | None, command: str) -> Table:
    found = read(source)[part] if part else read(source)
    rows = [
        [
            claim["paper_says"],
            "yes" if claim["holds"] else "no" if claim["holds"] is not None else DASH,
            claim["by"] or DASH,
        ]
        for claim in found["claims"]
    ]
    return Table(["the paper says", "holds", "measured"], rows, source, command)


_DIGITS = "python -m studies digits --scale paper --out runs/digits --device cuda --jobs 12"
#: File, entry and command of the numbers of both experiments of the paper.
_PAPERS = {
    "digits": ("results/digits/results.json", None, _DIGITS),
    "superres": (
        "results/superres/results.json",
        "superres",
        "python -m studies superres --scale paper --out runs/superres",
    ),
}


def _against_n() -> Table:
    methods = read("results/digits/results.json")["comparison"]["methods"]
    sizes = sorted({int(n) for found in methods.values() for n in found})
    rows = [
        [name, *(f"{found[str(n)]['mean']:.4f}" if str(n) in found else DASH for n in sizes)]
        for name, found in methods.items()
    ]
    return Table(["test error", *(f"N = {n:,}" for n in sizes)], rows, "results/digits/results.json", _DIGITS)


# -- classifiers ------------------------------------------------------------------------------------


def _errors(rows: Iterable[Any], of: str = "test_error") -> str:
    values = [row[of] for row in rows]
    spread = f" ± {statistics.stdev(values):.4f}" if len(values) > 1 else ""
    return f"{statistics.mean(values):.4f}{spread} ({len(values)})"


def _few() -> Table:
    found = {**read("results/deep/few.json"), **read("results/deep/baselines.json")}
    names = list(dict.fromkeys(key.rsplit(" n", 1)[0] for key in found if " n" in key))
    rows = []
    for name in names:
        of = {n: [row for key, row in found.items() if key.startswith(f"{name} n{n} ")] for n in (100, 600, 1000)}
        one = next(row for rows in of.values() for row in rows)
        rows.append([name, f"{one['parameters']:,}", *(_errors(of[n]) if of[n] else DASH for n in of)])
    header = ["test error (subsets)", "parameters", "100 labels", "600 labels", "1,000 labels"]
    return Table(header, rows, "results/deep/few.json", "python -m studies deep few baselines")


def _full() -> Table:
    found = read("results/deep/full.json")
    rows = []
    for name in dict.fromkeys(key.rsplit(" s", 1)[0] for key in found):
        runs = [row for key, row in found.items() if key.rsplit(" s", 1)[0] == name and "test_error" in row]
        if not runs:
            continue
        rows.append([f"{name}: {runs[0]['settings']}", f"{runs[0]['parameters']:,}", _errors(runs)])
    return Table(
        ["60,000 labels", "parameters", "test error (seeds)"],
        rows,
        "results/deep/full.json",
        "python -m studies deep full",
    )


def _full_error(name: str) -> float:
    runs = [row for key, row in read("results/deep/full.json").items() if key.rsplit(" s", 1)[0] == name]
    return float(statistics.fmean(row["test_error"] for row in runs))


def _without_arguments() -> Table:
    found = read("results/deep/defaults.json")
    rows = []
    for n in (10_000, 60_000):
        runs = [row for key, row in found.items() if key.startswith(f"n{n} ")]
        seconds = f"{statistics.mean(row['seconds'] for row in runs):.0f} s"
        rows.append([f"{n:,}", f"{runs[0]['parameters']:,}", _errors(runs), seconds, runs[0]["device"]])
    header = ["labels", "parameters", "test error (subsets)", "time", "computed on"]
    return Table(header, rows, "results/deep/defaults.json", "python -m studies deep defaults")


# -- default settings -------------------------------------------------------------------------------


def _of_defaults(part: str) -> Table:
    source = "results/defaults/results.json"
    found = read(source)["tables"][part]
    return Table(found["header"], found["rows"], source, f"python -m studies defaults {part}")


# -- learning ---------------------------------------------------------------------------------------


_DEFAULTS = ["subset", "raw pixels", "10 epochs", "100 epochs"]
_PAPER = ["subset", "epochs", "recipe `paper`", "raw pixels"]
_GRID = ["unit", "visible", "hidden", "rank", "seed", "error at 100", "error at 400"]


def _learning(part: str, columns: Sequence[str], form: str = "{:.4g}") -> Table:
    source = f"results/learning/{part}.json"

    def text(value: Any) -> str:
        if isinstance(value, list):
            return "x".join(map(str, value))
        return form.format(value) if isinstance(value, float) else str(value)

    rows = [[text(value) for value, _ in zip(row.values(), columns, strict=False)] for row in read(source)["rows"]]
    return Table(columns, rows, source, f"python -m studies learning {part}")


def _hyperparameters() -> Table:
    source = "results/hyperparameters/results.json"
    rows = [
        [
            *(str(row[key]) for key in ("rank", "hidden", "recipe", "n_epochs", "n_chains", "centering")),
            f"{row['parameters']:,}",
            f"{row['nats']:.1f}",
            f"{row['interval'][0]:.1f} to {row['interval'][1]:.1f}",
            f"{row['error']:.3f}",
        ]
        for row in read(source)["rows"]
    ]
    header = [
        "rank",
        "hidden side",
        "recipe",
        "epochs",
        "chains",
        "centering",
        "parameters",
        "nats",
        "interval",
        "1-NN error",
    ]
    return Table(header, rows, source, "python -m studies hyperparameters")


def _negative() -> Table:
    source = "results/learning/likelihood.json"
    found = read(source)
    marks = ["1", "1000", "2000", "5000", "10000"]
    names = list(dict.fromkeys(row["negative"] for row in found["rows"]))
    rows = [
        [
            name,
            *(
                f"{statistics.mean(row[mark] for row in found['rows'] if row['negative'] == name):.2f}"
                for mark in marks
            ),
        ]
        for name in names
    ]
    header = ["nats per sample", *(f"update {int(mark):,}" for mark in marks)]
    return Table(header, rows, source, "python -m studies learning likelihood")


def _pines() -> Table:
    source = "results/indian-pines/results.json"
    found = read(source)["summary"]
    measures = ["overall", "average", "kappa"]
    rows = []
    for classifier, of in found.items():
        for features, numbers in of.items():
            cells = (f"{numbers[m]['mean']:.3f} ± {numbers[m]['deviation']:.3f}" for m in measures)
            rows.append([f"{classifier}: {features}", *cells])
    return Table(["classifier: features", *measures], rows, source, "python -m studies indian-pines")


# -- speed ------------------------------------------------------------------------------------------


def _seconds(value: float) -> str:
    for unit, size in (("s", 1.0), ("ms", 1e-3), ("us", 1e-6)):
        if value >= size:
            return f"{value / size:.3g} {unit}"
    return f"{value / 1e-6:.2g} us"


def _bench(device: str) -> Table:
    from benchmarks.run import Settings  # Imported here because it imports PyTorch.

    source = f"benchmarks/{device}/bench.json"
    rows = [
        [
            row["problem"],
            row["title"],
            f"{row['phase'].upper()}-1",
            _seconds(row["update"]["median"]),
            f"{row['parameters']:,}",
        ]
        for row in read(source)["rows"]
        if row["skipped"] is None
    ]
    given = read(source)["settings"]
    usual = asdict(Settings())
    words = ["python -m benchmarks", f"--device {given['device']}"]
    for name, default in usual.items():
        value = tuple(given[name]) if isinstance(default, tuple) else given[name]
        if value != default and name not in ("device", "threads", "memory_limit"):  # These depend on the machine.
            text = ",".join(map(str, value)) if isinstance(value, tuple) else value
            words.append(f"--{name.replace('_', '-')} {text}")
    command = " ".join([*words, f"--out benchmarks/{device}"])
    return Table(["layers", "program", "", "one update", "parameters"], rows, source, command)


def _workloads() -> Table:
    source = "benchmarks/gpu/workloads.json"
    rows = [
        [
            name,
            f"{row['microseconds']['median']:.1f}",
            f"{row['floor']:.1f}" if row.get("floor") else DASH,
            row["path"] or DASH,
        ]
        for name, row in read(source)["workloads"].items()
        if "missing" not in row
    ]
    header = ["workload, H200", "microseconds per update", "floor of the hardware", "path"]
    return Table(header, rows, source, f"python -m benchmarks workloads --out {source}")


def _update(contestant: str, problem: str = "28x28 -> 25x25", phase: str = "pcd") -> float:
    for row in read("benchmarks/cpu/bench.json")["rows"]:
        if (row["contestant"], row["problem"], row["phase"]) == (contestant, problem, phase):
            return float(row["update"]["median"])
    raise KeyError(f"benchmarks/cpu/bench.json has no {contestant} {problem} {phase}")


def _speed_up() -> Table:
    source = "results/distributed/curve.json"
    found = read(source)
    rows = [
        [workload, f"{int(batch):,}", *(f"{number:.3g}" for number in numbers)]
        for workload, parts in found["workloads"].items()
        for batch, numbers in parts["speed_up_loopback"].items()
    ]
    return Table(["workload", "batch", *map(str, found["processes"])], rows, source, "python -m studies distributed")


# -- README -----------------------------------------------------------------------------------------


def _front() -> Table:
    """Return the table at the top of the README: one row per application, with other tools and the conditions."""
    ours, classic = _machine("Kronecker(5), 45x45"), _classic()
    filled = read(_APPLICATIONS)["filling"]["mnist, right half"]
    network = read("results/digits/results.json")["comparison"]["methods"]["convolutional network"]["50000"]
    rows = [
        [
            "likelihood of binarized MNIST digits (nats, higher is better)",
            f"**{ours['median']:.1f}** with {ours['parameters']:,} parameters",
            f"classic RBM with {classic['parameters']:,} parameters: {classic['test']:.1f}",
            f"{ours['updates']:,} updates (median of {len(ours['seeds'])} seeds), classic RBM {classic['updates']:,} "
            f"(one seed); H200; {_VALIDATED[0].lower()}"
            f"{_VALIDATED[1:-1]}",
        ],
        [
            "right halves of MNIST digits filled in (mean squared error, lower is better)",
            f"**{filled['mvrbm']:.4f}**",
            f"5 nearest neighbors: {filled['5-nearest']:.4f}, PCA with ridge: {filled['pca-ridge']:.4f}",
            "two CPU cores; former version of the imputer, designed after results on test digits had been seen",
        ],
        [
            "topics of 20 Newsgroups (perplexity, lower is better)",
            f"**{value('topics.ours')}**",
            f"LDA: {value('topics.lda')}, NMF: {value('topics.nmf')}",
            "50 topics each; CPU; settings were chosen on training documents",
        ],
        [
            "unusual samples of nine kinds (mean area under the ROC curve, higher is better)",
            f"**{value('outliers.ours')}**",
            f"Mahalanobis: {value('outliers.mahalanobis')}, 5 nearest: {value('outliers.nearest')}",
            "two CPU cores; settings were chosen on other splits of these kinds of data",
        ],
        [
            "photographs enlarged twice (Set5, PSNR in dB, higher is better)",
            f"{value('enlarge.ours')} with {value('enlarge.parameters')} parameters",
            f"bicubic: {value('enlarge.bicubic')}; as published, FSRCNN (12,464 parameters): 36.9, **VDSR** (665,000): "
            "**37.5**",
            "early prototypes had been measured on Set5",
        ],
        [
            "MNIST digits classified (test error, lower is better)",
            f"{value('classified.ours')} with 60,000 labels",
            f"convolutional network with 50,000 labels: **{100 * network['mean']:.2f}%**",
            "H200; settings were chosen on validation digits",
        ],
    ]
    return Table(["job", "mvrbm", "other tools", "conditions"], rows, "results/", "")


VALUES: dict[str, Callable[[], str]] = {
    "digits.parameters": lambda: f"{_machine('Kronecker(5), 45x45')['parameters']:,}",
    "digits.nats": lambda: _nats("Kronecker(5), 45x45"),
    "digits.confident": lambda: f"{100 * _confident('Kronecker(5), 45x45'):.0f}%",
    "largest.parameters": lambda: f"{_machine('Kronecker(16), 60x60')['parameters']:,}",
    "largest.nats": lambda: _nats("Kronecker(16), 60x60"),
    "largest.confident": lambda: f"{100 * _confident('Kronecker(16), 60x60'):.0f}%",
    "smallest.parameters": lambda: f"{_machine('Kronecker(1), 22x24')['parameters']:,}",
    "smallest.nats": lambda: _nats("Kronecker(1), 22x24"),
    "digits.updates": lambda: f"{_machine('Kronecker(5), 45x45')['updates']:,}",
    "classic.parameters": lambda: f"{_classic()['parameters']:,}",
    "classic.nats": lambda: f"{_classic()['test']:.1f}",
    "classic.updates": lambda: f"{_classic()['updates']:,}",
    "classified.ours": lambda: f"{100 * _full_error('deep'):.2f}%",
    "labeled.parameters": lambda: f"{_conditional(5000)['parameters']:,}",
    "labeled.agreement": lambda: f"{100 * _conditional(5000)['means']['agreement']:.1f}%",
    "labeled.confident": lambda: f"{100 * _conditional(5000)['means']['confident']:.0f}%",
    "judge.accuracy": lambda: f"{100 * read(_GENERATIVE)['judge']['gray']['agreement']:.1f}%",
    "judge.confident": lambda: f"{100 * read(_GENERATIVE)['judge']['gray']['confident']:.0f}%",
    "topics.ours": lambda: _application_value("topics", "20news", "mvrbm", ".0f"),
    "topics.lda": lambda: _application_value("topics", "20news", "lda", ".0f"),
    "topics.nmf": lambda: _application_value("topics", "20news", "nmf-kl", ".0f"),
    "outliers.ours": lambda: _application_value("outliers", "mean of the families", "mvrbm", ".3f"),
    "outliers.mahalanobis": lambda: _application_value("outliers", "mean of the families", "mahalanobis", ".3f"),
    "outliers.nearest": lambda: _application_value("outliers", "mean of the families", "5-nearest", ".3f"),
    "enlarge.ours": lambda: f"{_set5('stages'):.1f}",
    "enlarge.bicubic": lambda: f"{_set5('bicubic'):.1f}",
    "enlarge.parameters": lambda: f"{_parameters('x2'):,}",
    "nines.median": lambda: f"{_nines('median')[0]:.1f}",
    "nines.switching": lambda: f"{_nines('switching-median')[0]:.1f}",
    "nines.worst": lambda: f"{_nines('mean-field')[0]:.1f}",
    "nines.best": lambda: f"{_nines('mean-field')[-1]:.1f}",
    "pf00072.drelu": lambda: _pf00072("half, dReLU"),
    "pf00072.half": lambda: _pf00072("half"),
    "pf00072.dense": lambda: _pf00072("dense"),
    "update.mvrbm": lambda: _seconds(_update("mvrbm")),
    "update.sklearn": lambda: _seconds(_update("sklearn")),
    "update.ratio": lambda: f"{_update('sklearn') / _update('mvrbm'):.1f}",
    "update.dense-ratio": lambda: f"{_update('sklearn') / _update('rbm'):.1f}",
    "grid.runs": lambda: str(read("results/learning/grid.json")["summary"]["trainings"]),
    "grid.diverged": lambda: str(read("results/learning/grid.json")["summary"]["diverged"]),
    "memory.growth": lambda: f"{read('results/learning/memory.json')['summary']['growth, MB']:.0f} MB",
    "memory.file": lambda: f"{read('results/learning/memory.json')['rows'][0]['file, MB']:.0f} MB",
}

TABLES: dict[str, Callable[[], Table]] = {
    "front": _front,
    "generative": _lines,
    "schedule": _schedule,
    "real": _real,
    "sequences": _sequences,
    "densities": _densities,
    "natural-patches": _natural_patches,
    "imputation": lambda: _application("imputation", 3),
    "subsets": lambda: _application("subsets", 3),
    "imputer-time": _imputer_time,
    "filling": lambda: _application("filling", 3),
    "filling-epochs": _filling_epochs,
    "outliers": lambda: _application("outliers", 3),
    "unseen": lambda: _application("unseen", 3),
    "alarms": lambda: _application("alarms", 2),
    "topics": lambda: _application("topics", 4),
    "enlarging": _enlarging,
    "degraded": lambda: _photographs("degraded", "superres"),
    "time": lambda: _photographs("time", "superres"),
    "denoising": lambda: _photographs("denoising", "denoising", by_picture=True),
    "restoring": lambda: _photographs("restoring", "denoising", by_picture=True),
    "paper-digits": lambda: _papers(*_PAPERS["digits"]),
    "paper-claims": lambda: _claims(*_PAPERS["digits"]),
    "paper-superres": lambda: _papers(*_PAPERS["superres"]),
    "paper-superres-claims": lambda: _claims(*_PAPERS["superres"]),
    "paper-comparison": _against_n,
    "few-labels": _few,
    "all-labels": _full,
    "without-arguments": _without_arguments,
    "defaults": lambda: _learning("defaults", _DEFAULTS),
    "grid": lambda: _learning("grid", _GRID, "{:.2g}"),
    "paper-recipe": lambda: _learning("paper", _PAPER),
    "more-epochs": lambda: _of_defaults("epochs"),
    "layers": lambda: _of_defaults("layers"),
    "classes": lambda: _of_defaults("classes"),
    "negative": _negative,
    "hyperparameters": _hyperparameters,
    "indian-pines": _pines,
    "bench-cpu": lambda: _bench("cpu"),
    "bench-gpu": lambda: _bench("gpu"),
    "workloads": _workloads,
    "processes": _speed_up,
}


def value(name: str) -> str:
    """Return one measured value, formatted for use in a text."""
    return VALUES[name]()


def table(name: str) -> Table:
    """Return one table. Raises FileNotFoundError if it has not been measured yet."""
    return TABLES[name]()


def readme(text: str) -> str:
    """Return the text of the README with an updated table."""
    return BLOCK.sub(lambda _: table("front").plain(), text)


def results() -> str:
    """Return the page with all tables."""
    parts = []
    for name in TABLES:
        with contextlib.suppress(FileNotFoundError):  # The table has not been measured yet.
            parts += [f"## {name.replace('-', ' ')}\n\n{table(name).markdown()}"] if name != "front" else []
    about = "Written by `python -m tools.measured --write` from the JSON files in this folder and in `benchmarks/`.\n"
    about += "The page Results of the documentation (`docs/results.md`) explains the tables.\n"
    return "\n".join(["# Results\n", about, *parts])


PAGES: dict[str, Callable[[str], str]] = {"README.md": readme, "results/README.md": lambda _: results()}


def main(arguments: list[str] | None = None) -> None:
    """Print all values and the names of tables, or write the pages."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--write", action="store_true", help="update the table in README.md, and results/README.md")
    if parser.parse_args(arguments).write:
        for name, page in PAGES.items():
            path = ROOT / name
            path.write_text(page(path.read_text(encoding="utf-8") if path.exists() else ""), encoding="utf-8")
        return
    for name in VALUES:
        print(f"{name}: {value(name)}")
    for name in TABLES:
        with contextlib.suppress(FileNotFoundError):
            print(f"table {name}: {len(table(name).rows)} rows of {table(name).source}")


if __name__ == "__main__":
    main()
