"""Check that the tests catch one-line errors: apply each error of a table to a copy of the code, and run the tests.

    python tools/mutants.py              # all errors
    python tools/mutants.py gaussian     # errors whose file or description contains a word
    python tools/mutants.py --jobs 2

Prints which test caught each error. The exit code is 1 if an error survived or could not be applied.
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parent.parent
LEAVE_OUT = shutil.ignore_patterns(".*", "__pycache__", "_build", "build", "dist", "data", "*.egg-info")

# Cheap folders and files first, so that most errors are found in seconds; the others come in between.
FIRST = ["units", "couplings", "test_machine.py", "test_machine_equivalences.py", "test_random.py"]
LAST = ["test_sampling.py", "test_likelihood_annealing.py", "test_likelihood_interval.py", "vision", "cli"]
# Not run: the examples of the documentation, which do not check numbers, and code that is not mutated.
NEVER = ["test_docs.py", "tools", "studies", "benchmarks"]


class Mutant(NamedTuple):
    """One deliberate error: a text that occurs exactly once in a file, and its replacement."""

    file: str
    old: str
    new: str
    what: str


MUTANTS = [
    # units
    Mutant("units/bernoulli.py", "return -self.bias * x", "return self.bias * x", "Bernoulli energy: sign"),
    Mutant(
        "units/bernoulli.py",
        "return torch.sigmoid(self.bias + field)",
        "return torch.sigmoid(field)",
        "Bernoulli mean: bias missing",
    ),
    Mutant("units/bernoulli.py", ".lt_(mean.detach())", ".gt_(mean.detach())", "Bernoulli sample: comparison reversed"),
    Mutant(
        "units/bernoulli.py",
        "rng.uniform(mean.shape, mean).lt_",
        "torch.full_like(mean, 0.5).lt_",
        "Bernoulli sample: random numbers dropped",
    ),
    Mutant(
        "units/gaussian.py",
        "return mean + self.scale * rng.normal(mean.shape, mean)",
        "return mean + 0 * self.scale * rng.normal(mean.shape, mean)",
        "Gaussian sample: random numbers dropped",
    ),
    Mutant(
        "units/gaussian.py",
        "return mean + self.scale * rng.normal(mean.shape, mean)",
        "return mean + self.scale**2 * rng.normal(mean.shape, mean)",
        "Gaussian sample: scale squared",
    ),
    Mutant(
        "units/gaussian.py",
        "return self.bias + self.scale * field",
        "return self.bias + field",
        "Gaussian mean: scale missing",
    ),
    Mutant(
        "units/gaussian.py",
        "0.5 * (math.log(2 * math.pi) + self._log_variance())",
        "0.5 * (math.log(math.pi) + self._log_variance())",
        "Gaussian log-normalizer: wrong constant",
    ),
    Mutant(
        "units/gaussian.py",
        "each = x / scale * field - deviation**2",
        "each = x / scale * field + deviation**2",
        "Gaussian variance gradient: sign",
    ),
    Mutant(
        "units/categorical.py",
        "return torch.softmax(self.bias + field, dim=-1)",
        "return torch.softmax(self.bias + field, dim=1)",
        "Categorical mean: softmax over the wrong axis",
    ),
    Mutant(
        "units/categorical.py",
        "return torch.logsumexp(self.bias + field, dim=-1)",
        "return torch.logsumexp(field, dim=-1)",
        "Categorical log-normalizer: bias missing",
    ),
    Mutant(
        "units/counts.py",
        "return (torch.lgamma(x + 1) - self.bias * x).sum(-1) - torch.lgamma(x.sum(-1) + 1)",
        "return (torch.lgamma(x + 1) - self.bias * x).sum(-1)",
        "Counts energy: the orders of the words are not counted",
    ),
    Mutant(
        "units/counts.py",
        "return self._draw(field, n_words, rng) * (lengths / n_words.clamp(min=1))[..., None]",
        "return self._draw(field, n_words.flip(0), rng)",
        "Counts in Gibbs steps: documents exchange their lengths",
    ),
    Mutant(
        "estimators/topics.py",
        "joint = (field[:, None] + columns).flatten(0, 1)",
        "joint = field[:, None].expand(-1, n_words, -1).flatten(0, 1)",
        "topics: the next word does not depend on the known ones",
    ),
    Mutant(
        "units/base.py",
        "return batch_mean.sum_to_size(self.bias_shape)",
        "return batch_mean.sum_to_size(self.bias_shape) * (math.prod(self.bias_shape) / math.prod(self.shape))",
        "tied gradient: averaged, not summed",
    ),
    Mutant(
        "units/poisson.py",
        "return torch.lgamma(x + 1) - self.bias * x",
        "return -self.bias * x",
        "Poisson energy: log x! missing",
    ),
    Mutant(
        "units/poisson.py",
        "return torch.where(below > level, count - 1, count)",
        "return count",
        "Poisson sample: rounded up always",
    ),
    # couplings
    Mutant(
        "couplings/dense.py",
        'return {"weight": (y.flatten(1) / -len(x)).T @ x.flatten(1)}',
        'return {"weight": (-y.flatten(1)).T @ x.flatten(1)}',
        "Dense statistics: not divided by n",
    ),
    Mutant(
        "couplings/dense.py",
        'return {"weight": (y.flatten(1) / -len(x)).T @ x.flatten(1)}',
        'return {"weight": (y.flatten(1) / len(x)).T @ x.flatten(1)}',
        "Dense statistics: sign",
    ),
    Mutant(
        "couplings/dense.py",
        "(y.flatten(1) @ self.weight).reshape(-1, *self.visible_shape)",
        "(y.flatten(1) @ self.weight.flip(0)).reshape(-1, *self.visible_shape)",
        "Dense to_visible: not the adjoint",
    ),
    Mutant(
        "couplings/base.py",
        'gradients[f"factors.{mode}"] = (product / -len(x)).expand_as(factor)',
        'gradients[f"factors.{mode}"] = (-product).expand_as(factor)',
        "Chain statistics: not divided by n",
    ),
    Mutant(
        "couplings/base.py",
        'return self._walk(y, self._order[::-1], "ki", self._bonds[::-1])[-1].squeeze(1)',
        'return self._walk(y, self._order[::-1], "ki", self._bonds)[-1].squeeze(1)',
        "Chain to_visible: bonds in the wrong order (MPO)",
    ),
    Mutant(
        "couplings/base.py",
        "scale = torch.where(torch.isfinite(target), torch.exp(target - log), torch.ones_like(log))",
        "scale = torch.where(torch.isfinite(target), torch.exp(-log), torch.ones_like(log))",
        "balance: changes the product",
    ),
    Mutant(
        "couplings/kronecker.py",
        ": Tensor = (first.T @ last)",
        ": Tensor = (first[:1].T @ last[:1])",
        "Kronecker dense: rank terms missing",
    ),
    Mutant(
        "couplings/kronecker.py",
        "float((std / math.sqrt(self.rank)) ** (1 / free))",
        "float((std / self.rank) ** (1 / free))",
        "Kronecker start: wrong standard deviation",
    ),
    Mutant(
        "couplings/mpo.py",
        '(list(range(order))[::-1], ("c", "b"))]',
        '(list(range(order))[::-1], ("b", "c"))]',
        "MPO going back: bonds in the wrong order",
    ),
    Mutant(
        "couplings/cp.py",
        "return self._project(x, skip=None) @ self.hidden_factor.T",
        "return self._project(x, skip=None) @ self.hidden_factor.T.abs()",
        "CP to_hidden: sign of the weights lost",
    ),
    Mutant(
        "couplings/cp.py",
        "weights = y @ self.hidden_factor / -len(x)",
        "weights = y @ self.hidden_factor / len(x)",
        "CP statistics: sign",
    ),
    Mutant(
        "couplings/tucker.py",
        "core = self.core.statistics(self.compression.to_hidden(x), y)",
        "core = self.core.statistics(self.compression.to_hidden(x).abs(), y)",
        "Tucker statistics of the core: signs lost",
    ),
    # machine
    Mutant(
        "machine.py",
        "return self.own_energy(layers) + self.hidden.energy(y) - interaction",
        "return self.own_energy(layers) + self.hidden.energy(y) + interaction",
        "energy: sign of the interaction",
    ),
    Mutant(
        "machine.py",
        "return self.own_energy(layers) + self.hidden.energy(y) - interaction",
        "return self.own_energy(layers) - interaction",
        "energy: hidden bias missing",
    ),
    Mutant(
        "machine.py",
        "return self.own_energy(layers) - self.hidden.log_normalizer(self.hidden_field(layers))",
        "return self.own_energy(layers) + self.hidden.log_normalizer(self.hidden_field(layers))",
        "free energy: sign",
    ),
    Mutant(
        "machine.py",
        "coupling.to_hidden(units[name].statistic(visible[name])) for name",
        "coupling.to_hidden(visible[name]) for name",
        "hidden field: statistic forgotten",
    ),
    Mutant(
        "machine.py", "return known if absent is None else known | absent", "return known", "mask: padding is not held"
    ),
    # sampling and likelihood
    Mutant(
        "sampling/chains.py",
        "torch.where(masks[name], known[name], array)",
        "torch.where(masks[name], array, known[name])",
        "mask inverted",
    ),
    Mutant(
        "sampling/labels.py",
        "sample(_label_fields(machine, states, name), rng)",
        "sample(label_scores(machine, states, name), rng)",
        "labels: bias counted twice",
    ),
    Mutant(
        "sampling/labels.py", "joint = (field[:, None] + columns)", "joint = (field[:, None] - columns)", "labels: sign"
    ),
    Mutant(
        "sampling/tempering.py",
        "return torch.lerp(base, field, beta.reshape(*beta.shape, *([1] * (base.ndim - 1))))",
        "return base + field * beta.reshape(*beta.shape, *([1] * (base.ndim - 1)))",
        "tempering: (1 - beta) dropped from the fields",
    ),
    Mutant(
        "sampling/tempering.py",
        "return (betas - 1) * pull - sums",
        "return -pull - sums",
        "tempering: (1 - beta) dropped from the free energy",
    ),
    Mutant("sampling/tempering.py", "< stay - move", "< move - stay", "exchange: Metropolis rule reversed"),
    Mutant(
        "sampling/chains.py",
        "{name: value / steps for name, value in total.items()}",
        "{name: value / (steps + burn_in) for name, value in total.items()}",
        "conditional mean: divided by the wrong number",
    ),
    Mutant(
        "likelihood/annealing.py",
        "log_z = self.log_z_base + sign * log_mean",
        "log_z = sign * log_mean",
        "annealing: log Z of the base missing",
    ),
    Mutant(
        "likelihood/annealing.py",
        "log_ratios.add_(here - there)",
        "log_ratios.add_(there - here)",
        "annealing: sign of the weights",
    ),
    Mutant(
        "likelihood/annealing.py",
        "error, effective = ratios.std() / math.sqrt(n_chains)",
        "error, effective = ratios.std() / n_chains",
        "annealing: standard error too small",
    ),
    Mutant("likelihood/annealing.py", "self.betas.flip(0)", "self.betas", "reverse annealing runs forward"),
    Mutant(
        "likelihood/annealing.py",
        "repeat(step, steps, rng, self.betas.device)",
        "repeat(step, 0, rng, self.betas.device)",
        "reverse annealing: no burning in",
    ),
    Mutant(
        "likelihood/interval.py",
        "return middle - shift",
        "return middle",
        "log Z from both sides: numbers of chains forgotten",
    ),
    Mutant(
        "likelihood/of_data.py",
        "found.upper, found.lower, *reversed(found.bounds)",
        "found.lower, found.upper, *found.bounds",
        "likelihood interval: ends exchanged",
    ),
    Mutant(
        "sampling/tempering.py",
        "masks = self.machine.as_masks(self._known, flat)",
        "masks = self.machine.as_masks(None, flat)",
        "tempering: known entries change",
    ),
    Mutant(
        "random.py",
        "return [self._at((*self._key, child)) for child in range(first, self._children)]",
        "return [self._at((*self._key, 0)) for child in range(first, self._children)]",
        "random source: split streams are all the same",
    ),
    # the update rule
    Mutant(
        "updates/step.py",
        "torch._foreach_add_(parts, parameters, alpha=recipe.weight_decay)",
        "torch._foreach_sub_(parts, parameters, alpha=recipe.weight_decay)",
        "step: sign of the weight decay",
    ),
    Mutant(
        "updates/step.py",
        "torch._foreach_mul_(momenta, recipe.momentum)",
        "torch._foreach_mul_(momenta, 1 - recipe.momentum)",
        "step: wrong fraction of the momentum",
    ),
    Mutant(
        "updates/step.py",
        "return rate * decay, bias_rate * decay",
        "return rate, bias_rate * decay",
        "step: learning rate of the factors does not decay",
    ),
]


def ordered_tests(tree: Path, ignored: list[str]) -> list[str]:
    """Return the folders and files of tests of a tree, cheap ones first."""
    found = {path.name for path in (tree / "tests").iterdir() if path.is_dir() or path.match("test_*.py")}
    rank = {name: place - len(FIRST) for place, name in enumerate(FIRST)}
    rank.update({name: place + 1 for place, name in enumerate(LAST)})
    chosen = found - {*NEVER, *ignored, "__pycache__"}
    return [f"tests/{name}" for name in sorted(chosen, key=lambda name: (rank.get(name, 0), name))]


def python(tree: Path, *arguments: str, limit: float) -> subprocess.CompletedProcess[str]:
    """Run Python in a tree, with the package of that tree."""
    environment = {**os.environ, "PYTHONPATH": str(tree / "src"), "PYTHONDONTWRITEBYTECODE": "1"}
    environment.setdefault("OMP_NUM_THREADS", "1")
    command = [sys.executable, *arguments]
    return subprocess.run(command, cwd=tree, env=environment, capture_output=True, text=True, timeout=limit)


def check_import(tree: Path) -> None:
    """Check that Python imports the package of the copy, not the installed one."""
    shown = python(tree, "-c", "import mvrbm; print(mvrbm.__file__)", limit=120)
    expected = tree / "src" / "mvrbm" / "__init__.py"
    if shown.returncode != 0:
        raise SystemExit(f"the package does not import:\n{shown.stderr}")
    if Path(shown.stdout.strip()).resolve() != expected.resolve():
        raise SystemExit(f"tests would run {shown.stdout.strip()}, not the copy {expected}")


def run_tests(tree: Path, ignored: list[str], limit: float) -> tuple[int, str]:
    """Run the fast tests until one fails; return the exit code, and the failed test or the end of the output."""
    options = ["-x", "-q", "-p", "no:cacheprovider", "-m", "not slow", "--tb=no"]
    try:
        done = python(tree, "-m", "pytest", *options, *ordered_tests(tree, ignored), limit=limit)
    except subprocess.TimeoutExpired:
        return 1, f"not finished after {limit:.0f} s"
    blamed = re.search(r"^(?:FAILED|ERROR) (?:tests/)?(.+?)(?: - .*)?$", done.stdout, re.MULTILINE)
    return done.returncode, blamed.group(1) if blamed else (done.stdout + done.stderr)[-2000:]


def copy_of(root: Path, folder: str) -> Path:
    return Path(shutil.copytree(root, Path(folder) / "tree", ignore=LEAVE_OUT))


def apply(mutant: Mutant, tree: Path) -> None:
    path = tree / "src" / "mvrbm" / mutant.file
    text = path.read_text()
    if (times := text.count(mutant.old)) != 1:
        raise SystemExit(f"{mutant.what}: {mutant.old!r} occurs {times} times in {mutant.file}, not once")
    path.write_text(text.replace(mutant.old, mutant.new))


def judge(mutant: Mutant, root: Path, ignored: list[str], limit: float) -> tuple[bool, str]:
    """Return whether the tests caught a mutant, and a line for the table."""
    started = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="mutant-") as folder:
        tree = copy_of(root, folder)
        apply(mutant, tree)
        check_import(tree)
        code, where = run_tests(tree, ignored, limit)
    if code not in (0, 1, 2):  # 2: an error during collection, where tests build machines
        raise SystemExit(f"{mutant.what}: pytest ended with code {code}\n{where}")
    verdict = "SURVIVED" if code == 0 else "caught"
    seconds = time.monotonic() - started
    place = "" if code == 0 else where
    return code != 0, f"{verdict:<9} {mutant.file:<23} {mutant.what:<52} {seconds:4.0f} s  {place}"


def main() -> int:
    """Test all chosen mutants and print a table."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument(
        "word", nargs="?", default="", help="test only mutants whose file or description contains this word"
    )
    parser.add_argument("--jobs", type=int, default=1, help="number of mutants to test in parallel")
    parser.add_argument("--root", type=Path, default=ROOT, help="repository to copy")
    parser.add_argument(
        "--ignore", action="append", default=[], help="file or folder of tests to skip, such as test_x.py"
    )
    parser.add_argument(
        "--limit",
        type=float,
        default=600,
        help="time limit of one run in seconds; a run that exceeds it counts as failed",
    )
    arguments = parser.parse_args()
    chosen = [m for m in MUTANTS if arguments.word.lower() in f"{m.file} {m.what}".lower()]
    caught = 0
    with tempfile.TemporaryDirectory(prefix="mutant-") as folder, ThreadPoolExecutor(arguments.jobs) as pool:
        # Every mutant is made from this copy, on which the tests pass. Edits of the repository during the run must
        # not look like an error that was caught.
        tree = copy_of(arguments.root, folder)
        for mutant in chosen:  # report a table that does not match the code before anything runs
            text = (tree / "src" / "mvrbm" / mutant.file).read_text()
            if text.count(mutant.old) != 1:
                raise SystemExit(f"{mutant.what}: its text occurs {text.count(mutant.old)} times in {mutant.file}")
        check_import(tree)
        code, where = run_tests(tree, arguments.ignore, arguments.limit)
        if code != 0:
            raise SystemExit(f"the tests must pass without errors: {where}")
        print(f"{len(chosen)} mutants; the tests pass without them", flush=True)
        for found, line in pool.map(lambda m: judge(m, tree, arguments.ignore, arguments.limit), chosen):
            caught += found
            print(line, flush=True)
    print(f"{caught} of {len(chosen)} caught, {len(chosen) - caught} survived")
    return 0 if caught == len(chosen) else 1


if __name__ == "__main__":
    sys.exit(main())
