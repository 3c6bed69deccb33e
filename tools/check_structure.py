"""Check the structure of the project: module docstrings, private names, the tree of tests, and the wheel.

    python -m tools.check_structure           # check the sources, which takes seconds
    python -m tools.check_structure --wheel   # also build wheels, with and without a C compiler, and check their files

The layers of the library are contracts of import-linter in `pyproject.toml`; ruff limits the complexity of functions.
Prints `file:line: problem` for each problem. The exit code is 1 if there are any.
"""

from __future__ import annotations

import argparse
import ast
import os
import re
import shutil
import subprocess
import sys
import tempfile
import tomllib
import zipfile
from collections.abc import Iterable, Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
# Folders of code whose modules are checked.
PACKAGES = ("src/mvrbm", "studies", "benchmarks", "tools")
# Fewest words of a module docstring.
FEWEST_WORDS = 4
# A heading of a docstring's section on the same line as its underline.
JOINED_SECTION = re.compile(r" +[A-Z][A-Za-z ]+ -{4,}( |$)")

# Expressions, or their ends, that use a private name because there is no public one.
ALLOWED = (
    # scikit-learn's own estimators check sample weights with this function.
    "from sklearn.utils.validation import _check_sample_weight",
    "os._exit",
    # PyTorch's optimizers use these functions, which update many tensors in one launch.
    *(f"torch._foreach_{name}" for name in ("add_", "clamp_min", "copy_", "lerp_", "mul", "mul_", "norm", "sub_")),
    # PyTorch's schedulers warn unless this attribute is set.
    "optimizer._opt_called",
    # One update of BernoulliRBM, which a benchmark times.
    "self.model._fit",
    # The free energy of BernoulliRBM.
    "model._free_energy",
)
# Attributes of named tuples that the documentation of Python makes public.
NAMED_TUPLE = {"_replace", "_asdict", "_fields", "_make", "_field_defaults"}


def modules(root: Path, folder: str) -> list[Path]:
    """Return the Python files under a folder of the project."""
    return sorted(path for path in (root / folder).rglob("*.py") if "__pycache__" not in path.parts)


# -- docstrings -------------------------------------------------------------------------------------


def check_docstrings(root: Path) -> Iterator[str]:
    """Yield modules whose docstring is missing or not a sentence, and sections that were joined with their headings."""
    for folder in PACKAGES:
        for path in modules(root, folder):
            source = path.read_text(encoding="utf-8")
            text = " ".join((ast.get_docstring(ast.parse(source)) or "").split())
            if len(text.split()) < FEWEST_WORDS or "." not in text:
                yield f"{path.relative_to(root)}:1: the module docstring is not a sentence: {text!r}"
            for number, line in enumerate(source.splitlines(), start=1):
                if JOINED_SECTION.match(line):
                    yield f"{path.relative_to(root)}:{number}: the heading of a section requires a line of its own"


# -- private names ----------------------------------------------------------------------------------


def private(name: str) -> bool:
    """Return whether a name is private: it has one leading underscore and is not only underscores."""
    return name.startswith("_") and not name.startswith("__") and name.strip("_") != ""


class PrivateNames(ast.NodeVisitor):
    """Collects uses of private names of other modules and of objects whose class is defined elsewhere.

    `from module import _name` and `module._name` use the names of another module. `object._name` counts unless the same
    file defines that name, because methods may read private attributes of other objects of the same class, as in
    `other._rank == self._rank`. Objects created by `cls(...)` or `type(self)(...)` are treated like `self`.
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


# -- tests ------------------------------------------------------------------------------------------


def check_tests(root: Path) -> Iterator[str]:
    """Yield folders of tests that have no counterpart in `src/mvrbm` or next to `src`."""
    tests = root / "tests"
    for path in sorted({path.parent for path in tests.rglob("test_*.py")} - {tests}):
        inside = path.relative_to(tests)
        if not any((place / inside).is_dir() for place in (root / "src" / "mvrbm", root)):
            yield f"{path.relative_to(root)}: there is no folder {inside} in src/mvrbm, nor next to src"


def check_test_imports(root: Path) -> Iterator[str]:
    """Yield imports of test modules by modules of the tests. Shared helpers belong in modules without `test_`."""
    for path in modules(root, "tests"):
        shown = path.relative_to(root).as_posix()
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if not isinstance(node, ast.Import | ast.ImportFrom):
                continue
            package = f"{node.module or ''}." if isinstance(node, ast.ImportFrom) else ""
            for alias in node.names:
                name = package + alias.name
                if any(_is_test_module(root, parts) for parts in _prefixes(name)):
                    yield f"{shown}:{node.lineno}: imports a test module: {name}"


def _prefixes(name: str) -> Iterator[list[str]]:
    """Yield the parts of a dotted name, and of each package that contains it."""
    parts = name.strip(".").split(".")
    for length in range(1, len(parts) + 1):
        yield parts[:length]


def _is_test_module(root: Path, parts: list[str]) -> bool:
    if not parts[-1].startswith("test_"):
        return False
    inside = parts[1:] if parts[0] == "tests" else parts
    return any((root / "tests").rglob("/".join(inside) + ".py"))


# -- the wheel --------------------------------------------------------------------------------------


def check_packages(root: Path) -> Iterator[str]:
    """Yield a problem if anything besides `mvrbm` would be installed."""
    settings = tomllib.loads((root / "pyproject.toml").read_text(encoding="utf-8"))["tool"]["setuptools"]
    if (where := settings["packages"]["find"].get("where")) != ["src"]:
        yield f"pyproject.toml:1: packages are installed from {where}, not from src alone"
    if found := sorted({path.name for path in (root / "src").iterdir() if (path / "__init__.py").exists()} - {"mvrbm"}):
        yield f"src:1: would be installed next to mvrbm: {', '.join(found)}"


def check_wheel(names: Iterable[str]) -> Iterator[str]:
    """Yield files in a wheel that do not belong to the library."""
    strangers = {"studies", "benchmarks", "tests", "tools", "docs", "results", "conftest.py"}
    for name in names:
        parts = Path(name).parts
        if not parts[0].startswith("mvrbm") or strangers & set(parts) or Path(name).name.startswith("test_"):
            yield f"wheel: {name} is not part of the library"


def check_data(names: Iterable[str], root: Path) -> Iterator[str]:
    """Yield modules and data files of the library that are missing from a wheel."""
    installed = set(names)
    for path in sorted((root / "src" / "mvrbm").rglob("*")):
        name = path.relative_to(root / "src").as_posix()
        sources = path.suffix in (".c", ".h", ".so", ".pyc") or path.is_dir()
        if not sources and name not in installed:
            yield f"wheel: {name} is missing"


def check_tag(wheel: str, names: Iterable[str]) -> Iterator[str]:
    """Yield a wheel with the wrong tag: the stable ABI of Python 3.11 for compiled code, otherwise pure Python."""
    wanted = "-cp311-abi3-" if any(name.endswith(".abi3.so") for name in names) else "-py3-none-any."
    if wanted not in wheel:
        yield f"wheel: {wheel} should be tagged {wanted.strip('-.')}"


def build_wheel(root: Path, compiler: str | None = None) -> tuple[str, list[str]]:
    """Build a wheel from a copy of the sources, so that files of earlier builds do not get into it.

    Returns the name of the wheel and the names of its files. `compiler` replaces the C compiler.
    """
    with tempfile.TemporaryDirectory() as folder:
        copy = Path(folder, "copy")
        leave_out = shutil.ignore_patterns("__pycache__", "*.egg-info", "*.so")
        shutil.copytree(root / "src", copy / "src", ignore=leave_out)
        for name in ("pyproject.toml", "setup.py", "MANIFEST.in", "README.md", "LICENSE"):
            shutil.copy(root / name, copy)
        # Setuptools would install these folders too if its settings were wrong.
        for other in ("studies", "benchmarks", "tests", "tools"):
            shutil.copytree(root / other, copy / other, ignore=leave_out)
        options = ["--no-deps", "--no-build-isolation", "--disable-pip-version-check", "-w", folder]
        environment = os.environ | ({} if compiler is None else {"CC": compiler})
        subprocess.run([sys.executable, "-m", "pip", "-q", "wheel", *options, str(copy)], check=True, env=environment)
        (wheel,) = Path(folder).glob("*.whl")
        with zipfile.ZipFile(wheel) as archive:
            return wheel.name, archive.namelist()


def main(arguments: list[str] | None = None) -> int:
    """Run the checks and print the problems."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--wheel", action="store_true", help="also build wheels and check their files")
    options = parser.parse_args(arguments)
    found = [
        *check_docstrings(ROOT),
        *check_private(ROOT),
        *check_tests(ROOT),
        *check_test_imports(ROOT),
        *check_packages(ROOT),
    ]
    if options.wheel:
        for compiler in (None, "false"):  # `false` is a compiler that always fails.
            wheel, names = build_wheel(ROOT, compiler)
            found += [*check_wheel(names), *check_data(names, ROOT), *check_tag(wheel, names)]
    print("".join(f"{line}\n" for line in found), end="")
    print(f"structure: {len(found)} problems", file=sys.stderr)
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
