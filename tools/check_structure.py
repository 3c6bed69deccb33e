"""Check the shape of the code: sizes, docstrings, private names, import cycles, the places of tests, the wheel.

    python -m tools.check_structure           # everything that reads the sources, in seconds
    python -m tools.check_structure --wheel   # builds wheels too, with and without a C compiler, and checks their files

The layers of the library are contracts of import-linter, in `pyproject.toml`; ruff and mypy check single lines. Prints
`file:line: what is wrong`; the exit code is 1 if there is anything.
"""

from __future__ import annotations

import argparse
import ast
import os
import shutil
import subprocess
import sys
import tempfile
import tomllib
import zipfile
from collections.abc import Iterable, Iterator
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PACKAGES = ("src/mvrbm", "studies", "benchmarks", "tools")  # folders of code, and the roots of the tree of tests
MOST_LINES = 500  # of one module of the library
# Of the library: 16,000 when it was separated from the laboratory, 20,000 with the kernels, more with the jobs, and 450
# for labels, missing entries and tempered chains in kernels.
MOST_LINES_INSTALLED = 27_950

FEWEST_WORDS = 4  # of a module's docstring

# Ends of expressions: names with an underscore that are public, and private names of other packages that have no public
# counterpart.
ALLOWED = (
    "from sklearn.utils.validation import _check_sample_weight",  # how scikit-learn's own estimators check weights
    "os._exit",
    # One launch for many tensors: the optimizers of torch use nothing else.
    *(f"torch._foreach_{name}" for name in ("add_", "clamp_min", "copy_", "lerp_", "mul", "mul_", "norm", "sub_")),
    "optimizer._opt_called",  # torch's schedulers warn without it
    "self.model._fit",  # one update of BernoulliRBM, which the benchmark times
    "model._free_energy",  # of BernoulliRBM
)
NAMED_TUPLE = {"_replace", "_asdict", "_fields", "_make", "_field_defaults"}  # public by the documentation of Python


def modules(root: Path, folder: str) -> list[Path]:
    """Return the Python files under a folder of the project."""
    return sorted(path for path in (root / folder).rglob("*.py") if "__pycache__" not in path.parts)


# -- sizes and docstrings ---------------------------------------------------------------------------


def check_sizes(root: Path) -> Iterator[str]:
    """Yield modules of the library that are too long, and the library if it is."""
    total = 0
    for path in modules(root, "src"):
        lines = len(path.read_text(encoding="utf-8").splitlines())
        total += lines
        if lines > MOST_LINES:
            yield f"{path.relative_to(root)}:1: {lines} lines, at most {MOST_LINES}"
    if total > MOST_LINES_INSTALLED:
        yield f"src:1: {total:,} lines of Python in all, at most {MOST_LINES_INSTALLED:,}"


def check_docstrings(root: Path) -> Iterator[str]:
    """Yield modules that do not open with a sentence."""
    for folder in PACKAGES:
        for path in modules(root, folder):
            text = " ".join((ast.get_docstring(ast.parse(path.read_text(encoding="utf-8"))) or "").split())
            if len(text.split()) < FEWEST_WORDS or "." not in text:
                yield f"{path.relative_to(root)}:1: the module docstring is not a sentence: {text!r}"


# -- private names ----------------------------------------------------------------------------------


def private(name: str) -> bool:
    """Return whether a name is private: one underscore in front, and not the name of a discarded value."""
    return name.startswith("_") and not name.startswith("__") and name.strip("_") != ""


class PrivateNames(ast.NodeVisitor):
    """Collects uses of private names that belong to another module or to another object.

    `from module import _name` and `module._name` are uses of another module's names. `object._name` is one unless the
    same file gives something that name: methods may read private attributes of other objects of their own file's
    classes, as in `other._rank == self._rank`. An object made by `cls(...)` or `type(self)(...)` is like self.
    """

    def __init__(self, tree: ast.AST) -> None:
        self.found: list[tuple[int, str]] = []
        self.imported: set[str] = set()
        self.own: set[str] = set()
        self.selves = {"self", "cls"}
        for node in ast.walk(tree):
            if isinstance(node, ast.Import | ast.ImportFrom):
                self.imported |= {(alias.asname or alias.name).split(".")[0] for alias in node.names}
            elif isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
                self.own.add(node.name)
            elif isinstance(node, ast.Attribute) and self._is_self(node.value) and isinstance(node.ctx, ast.Store):
                self.own.add(node.attr)
            elif isinstance(node, ast.Assign) and ast.unparse(node.value).startswith(("cls(", "type(self)(")):
                self.selves |= {target.id for target in node.targets if isinstance(target, ast.Name)}
        for scope in (node for node in ast.walk(tree) if isinstance(node, ast.ClassDef)):
            for node in scope.body:
                targets = node.targets if isinstance(node, ast.Assign) else [getattr(node, "target", None)]
                self.own |= {target.id for target in targets if isinstance(target, ast.Name)}
        self.visit(tree)

    def visit_ImportFrom(self, node: ast.ImportFrom) -> None:
        for alias in node.names:
            if private(alias.name):
                self.found.append((node.lineno, f"from {node.module} import {alias.name}"))

    def visit_Attribute(self, node: ast.Attribute) -> None:
        if private(node.attr) and not self._is_self(node.value):
            of_module = isinstance(node.value, ast.Name) and node.value.id in self.imported
            if of_module or node.attr not in self.own | NAMED_TUPLE:
                self.found.append((node.lineno, ast.unparse(node)))
        self.generic_visit(node)

    def _is_self(self, node: ast.expr) -> bool:
        """Return whether an expression is the object or class of the method, or super()."""
        if isinstance(node, ast.Call):
            return isinstance(node.func, ast.Name) and node.func.id == "super"
        return isinstance(node, ast.Name) and node.id in self.selves


def check_private(root: Path) -> Iterator[str]:
    """Yield uses of private names of other modules and objects."""
    for folder in PACKAGES:
        for path in modules(root, folder):
            shown = path.relative_to(root).as_posix()
            for line, name in PrivateNames(ast.parse(path.read_text(encoding="utf-8"))).found:
                if not name.endswith(ALLOWED):
                    yield f"{shown}:{line}: private name of another module: {name}"


# -- imports ----------------------------------------------------------------------------------------


def check_cycles(graph: dict[str, set[str]]) -> Iterator[str]:
    """Yield one cycle of a graph of imports, if it has any."""
    try:
        TopologicalSorter(graph).prepare()
    except CycleError as error:
        yield "import cycle: " + " <- ".join(error.args[1])


def imports_of_package(package: str) -> dict[str, set[str]]:
    """Return what each module of a package imports from the package, imports for type checking included."""
    import grimp

    graph = grimp.build_graph(package, exclude_type_checking_imports=False, cache_dir=None)
    return {module: set(graph.find_modules_directly_imported_by(module)) for module in graph.modules}


# -- tests ------------------------------------------------------------------------------------------


def check_tests(root: Path) -> Iterator[str]:
    """Yield folders of tests to which no folder of code belongs."""
    tests = root / "tests"
    for path in sorted({path.parent for path in tests.rglob("test_*.py")} - {tests}):
        inside = path.relative_to(tests)
        if not any((place / inside).is_dir() for place in (root / "src" / "mvrbm", root)):
            yield f"{path.relative_to(root)}: there is no folder {inside} in src/mvrbm, nor next to src"


# -- the wheel --------------------------------------------------------------------------------------


def check_packages(root: Path) -> Iterator[str]:
    """Yield what is wrong with the place where packages to install are searched."""
    settings = tomllib.loads((root / "pyproject.toml").read_text(encoding="utf-8"))["tool"]["setuptools"]
    if (where := settings["packages"]["find"].get("where")) != ["src"]:
        yield f"pyproject.toml:1: packages are installed from {where}, not from src alone"
    if found := sorted({path.name for path in (root / "src").iterdir() if (path / "__init__.py").exists()} - {"mvrbm"}):
        yield f"src:1: would be installed next to mvrbm: {', '.join(found)}"


def check_wheel(names: Iterable[str]) -> Iterator[str]:
    """Yield files of a wheel that do not belong to the library."""
    strangers = {"studies", "benchmarks", "tests", "tools", "docs", "results", "conftest.py"}
    for name in names:
        parts = Path(name).parts
        if not parts[0].startswith("mvrbm") or strangers & set(parts) or Path(name).name.startswith("test_"):
            yield f"wheel: {name} is not part of the library"


def check_data(names: Iterable[str], root: Path) -> Iterator[str]:
    """Yield data files and modules of the library that a wheel lacks."""
    installed = set(names)
    for path in sorted((root / "src" / "mvrbm").rglob("*")):
        name = path.relative_to(root / "src").as_posix()
        sources = path.suffix in (".c", ".h", ".so", ".pyc") or path.is_dir()
        if not sources and name not in installed:
            yield f"wheel: {name} is missing"


def check_tag(wheel: str, names: Iterable[str]) -> Iterator[str]:
    """Yield a wheel with the wrong name: compiled code is for any Python from 3.11, a wheel without is pure Python."""
    wanted = "-cp311-abi3-" if any(name.endswith(".abi3.so") for name in names) else "-py3-none-any."
    if wanted not in wheel:
        yield f"wheel: {wheel} should be tagged {wanted.strip('-.')}"


def build_wheel(root: Path, compiler: str | None = None) -> tuple[str, list[str]]:
    """Build the wheel from a copy of the sources, where no earlier build has left files.

    Returns the name of the wheel and the names of its files. `compiler` replaces the C compiler.
    """
    with tempfile.TemporaryDirectory() as folder:
        copy = Path(folder, "copy")
        leave_out = shutil.ignore_patterns("__pycache__", "*.egg-info", "*.so")
        shutil.copytree(root / "src", copy / "src", ignore=leave_out)
        for name in ("pyproject.toml", "setup.py", "MANIFEST.in", "README.md", "LICENSE"):
            shutil.copy(root / name, copy)
        for other in ("studies", "benchmarks", "tests", "tools"):  # would be found if the settings were wrong
            shutil.copytree(root / other, copy / other, ignore=leave_out)
        options = ["--no-deps", "--no-build-isolation", "--disable-pip-version-check", "-w", folder]
        environment = os.environ | ({} if compiler is None else {"CC": compiler})
        subprocess.run([sys.executable, "-m", "pip", "-q", "wheel", *options, str(copy)], check=True, env=environment)
        (wheel,) = Path(folder).glob("*.whl")
        with zipfile.ZipFile(wheel) as archive:
            return wheel.name, archive.namelist()


def main(arguments: list[str] | None = None) -> int:
    """Run the checks and print what is wrong."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--wheel", action="store_true", help="build wheels and check their files too")
    options = parser.parse_args(arguments)
    found = [
        *check_sizes(ROOT),
        *check_docstrings(ROOT),
        *check_private(ROOT),
        *check_tests(ROOT),
        *check_packages(ROOT),
        *(line for package in ("mvrbm", "studies", "benchmarks") for line in check_cycles(imports_of_package(package))),
    ]
    if options.wheel:
        for compiler in (None, "false"):  # a program that fails
            wheel, names = build_wheel(ROOT, compiler)
            found += [*check_wheel(names), *check_data(names, ROOT), *check_tag(wheel, names)]
    print("".join(f"{line}\n" for line in found), end="")
    print(f"structure: {len(found)} to change", file=sys.stderr)
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
