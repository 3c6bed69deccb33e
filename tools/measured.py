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

ROOT = Path(__file__).resolve().parent.parent
# Shown for a missing value.
DASH = "–"
# The part of README.md that `--write` replaces.
BLOCK = re.compile(r"(?<=<!-- measured: begin -->\n).*?(?=<!-- measured: end -->)", re.DOTALL)


class Table(NamedTuple):
    """A table with the JSON file that has its numbers, and the command that measures them."""

    header: Sequence[str]
    rows: Sequence[Sequence[str]]
    source: str
    command: str

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
        return f"{self.plain()}\n`{self.command}`, stored in `{self.source}`.\n" if self.command else self.plain()


@functools.cache
def read(path: str) -> Any:
    """Return the contents of a JSON file in the repository."""
    return json.loads((ROOT / path).read_text(encoding="utf-8"))


# -- generative models ------------------------------------------------------------------------------

_GENERATIVE = "results/generative/results.json"


def _machine(title: str) -> Any:
    rows = [row for row in read(_GENERATIVE)["table"] if row["title"] == title and row["data"] == "random"]
    return rows[0]


def _nats(title: str, decimals: int = 1) -> str:
    return f"{_machine(title)['median']:.{decimals}f}"


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
            f"{line['median']:.2f}",
            str(line["seeds"]),
            f"{line['widest_interval']:.2f}",
        ]
        for line in read(_GENERATIVE)["lines"]
        if line["median"] is not None
    ]
    header = ["machine", "parameters", "nats per test digit", "seeds", "widest interval"]
    return Table(header, rows, _GENERATIVE, "python -m studies generative likelihood --scale paper")


def _schedule() -> Table:
    rows = [
        [row["title"], f"{row['updates']:,}", f"{row['training_seconds']:.1f}", f"{row['test']:.1f}"]
        for row in read(_GENERATIVE)["seconds_table"]
    ]
    header = ["machine", "updates", "seconds on an H200", "nats per test digit"]
    return Table(header, rows, _GENERATIVE, "python -m studies generative seconds --scale paper")


def _real() -> Table:
    rows = [
        [f"{data}: {row['title']}", f"{row['parameters']:,}", f"{row['test']:.1f}", f"{row['train']:.1f}"]
        for data, found in read(_GENERATIVE)["real"].items()
        for row in found
    ]
    header = ["data: model", "parameters", "nats, held-out data", "nats, training data"]
    return Table(header, rows, _GENERATIVE, "python -m studies generative real --scale paper")


# -- applications -----------------------------------------------------------------------------------

_APPLICATIONS = "results/applications/results.json"
_TOOLS = {
    "mvrbm": "mvrbm",
    "5-nearest": "5 nearest",
    "pca-error": "PCA error",
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
}


def _application(part: str, digits: int) -> Table:
    found = read(_APPLICATIONS)[part]
    tools = list(dict.fromkeys(tool for task in found.values() for tool in task))
    tools.sort(key=lambda tool: tool != "mvrbm")
    rows = [
        [task, *(DASH if (number := of.get(tool)) is None else f"{number:.{digits}g}" for tool in tools)]
        for task, of in found.items()
    ]
    return Table(
        ["task", *(_TOOLS.get(tool, tool) for tool in tools)],
        rows,
        _APPLICATIONS,
        f"python -m studies applications {part}",
    )


def _application_value(part: str, task: str, tool: str, form: str) -> str:
    return format(read(_APPLICATIONS)[part][task][tool], form)


# -- images -----------------------------------------------------------------------------------------

_STAGES = "results/superres/enlarging.json"
_PHOTOGRAPHS = "python -m studies photographs"


def _set5(method: str) -> float:
    """Return the PSNR on Set5 at scale 2, where the small pictures are rounded to bytes."""
    return float(read(_STAGES)["x2, bytes"][method]["psnr"])


def _enlarging() -> Table:
    methods = ("bicubic", "stages")
    measures = {"psnr": ("PSNR in dB", 2), "ssim": ("SSIM", 4)}
    rows = [
        [name, *(f"{row[method][key]:.{measures[key][1]}f}" for key in measures for method in methods)]
        for name, row in read(_STAGES).items()
    ]
    header = ["Set5", *(f"{method}: {name}" for name, _ in measures.values() for method in methods)]
    return Table(header, rows, _STAGES, f"{_PHOTOGRAPHS} enlarging")


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
        rows.append([case, *cells, *([str(len(of))] if by_picture else [])])
    header = [part, *columns, *(["pictures"] if by_picture else [])]
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


def _without_arguments() -> Table:
    found = read("results/deep/defaults.json")
    rows = []
    for n in (10_000, 60_000):
        runs = [row for key, row in found.items() if key.startswith(f"n{n} ")]
        seconds = f"{statistics.mean(row['seconds'] for row in runs):.0f} s"
        rows.append([f"{n:,}", f"{runs[0]['parameters']:,}", _errors(runs), seconds, runs[0]["device"]])
    header = ["labels", "parameters", "test error (subsets)", "time", "computed on"]
    return Table(header, rows, "results/deep/defaults.json", "python -m studies deep defaults")


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
    """Return the table at the top of the README: one row per application, with the methods that people usually use."""
    ours = _machine("Kronecker(5), 45x45")
    classic = _machine("Dense, 500")
    speed = _update("sklearn") / _update("mvrbm")
    filled = read(_APPLICATIONS)["filling"]["mnist, right half"]
    rows = [
        [
            "likelihood of handwritten digits (MNIST, binarized; nats, higher is better)",
            f"**{ours['median']:.1f}** with {ours['parameters']:,} parameters",
            f"classic RBM, trained alike: {classic['median']:.1f} with {classic['parameters']:,}",
        ],
        [
            "one training update, 28x28 to 25x25 (two CPU cores, batch of 100)",
            f"**{_seconds(_update('mvrbm'))}**",
            f"scikit-learn's `BernoulliRBM`: {_seconds(_update('sklearn'))} ({speed:.1f} times as long)",
        ],
        [
            "right halves of digits filled in (MNIST, mean squared error, lower is better)",
            f"**{filled['mvrbm']:.4f}**",
            f"5 nearest neighbors: {filled['5-nearest']:.4f}, PCA with ridge: {filled['pca-ridge']:.4f}",
        ],
        [
            "topics of 20 Newsgroups (perplexity, lower is better)",
            f"**{value('topics.ours')}**",
            f"LDA: {value('topics.lda')}, NMF: {value('topics.nmf')}",
        ],
        [
            "unusual digits (area under the curve, higher is better)",
            f"{value('outliers.ours')}",
            f"LOF: {value('outliers.lof')}, isolation forest: {value('outliers.forest')}",
        ],
        [
            "photographs enlarged twice (Set5, dB, higher is better)",
            f"**{value('enlarge.ours')}**",
            f"bicubic: {value('enlarge.bicubic')}",
        ],
    ]
    return Table(["job", "mvrbm", "what people use"], rows, "results/", "")


VALUES: dict[str, Callable[[], str]] = {
    "digits.parameters": lambda: f"{_machine('Kronecker(5), 45x45')['parameters']:,}",
    "digits.nats": lambda: _nats("Kronecker(5), 45x45"),
    "digits.confident": lambda: f"{100 * _confident('Kronecker(5), 45x45'):.0f} %",
    "largest.parameters": lambda: f"{_machine('Kronecker(16), 60x60')['parameters']:,}",
    "largest.nats": lambda: _nats("Kronecker(16), 60x60"),
    "largest.confident": lambda: f"{100 * _confident('Kronecker(16), 60x60'):.0f} %",
    "smallest.parameters": lambda: f"{_machine('Kronecker(1), 22x24')['parameters']:,}",
    "smallest.nats": lambda: _nats("Kronecker(1), 22x24"),
    "classic.parameters": lambda: f"{_machine('Dense, 500')['parameters']:,}",
    "classic.nats": lambda: _nats("Dense, 500"),
    "labeled.parameters": lambda: f"{_conditional(5000)['parameters']:,}",
    "labeled.agreement": lambda: f"{100 * _conditional(5000)['means']['agreement']:.1f} %",
    "labeled.confident": lambda: f"{100 * _conditional(5000)['means']['confident']:.0f} %",
    "judge.accuracy": lambda: f"{100 * read(_GENERATIVE)['judge']['gray']['agreement']:.1f} %",
    "judge.confident": lambda: f"{100 * read(_GENERATIVE)['judge']['gray']['confident']:.0f} %",
    "topics.ours": lambda: _application_value("topics", "20news", "mvrbm", ".0f"),
    "topics.lda": lambda: _application_value("topics", "20news", "lda", ".0f"),
    "topics.nmf": lambda: _application_value("topics", "20news", "nmf-kl", ".0f"),
    "outliers.ours": lambda: _application_value("outliers", "mnist", "mvrbm", ".3f"),
    "outliers.lof": lambda: _application_value("outliers", "mnist", "lof", ".3f"),
    "outliers.forest": lambda: _application_value("outliers", "mnist", "isolation-forest", ".3f"),
    "enlarge.ours": lambda: f"{_set5('stages'):.1f}",
    "enlarge.bicubic": lambda: f"{_set5('bicubic'):.1f}",
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
    "imputation": lambda: _application("imputation", 3),
    "subsets": lambda: _application("subsets", 3),
    "filling": lambda: _application("filling", 3),
    "outliers": lambda: _application("outliers", 4),
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
