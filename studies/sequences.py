"""Sequence models of two protein families: likelihood, contacts and speed, next to `rbms` and `adabmDCA`.

The families are lattice proteins, whose last 10,000 sequences are the test set of published results, and response
regulators (PF00072), which come with a test set that was split off by identity. Settings were chosen on the last
training sequences: 5,000 of lattice proteins, and 4,000 of PF00072. Log-likelihoods are in nats per site. Their
intervals come from annealing in both directions. Times are processor time, which other programs on the machine affect
less than wall-clock time.
"""

from __future__ import annotations

import argparse
import functools
import importlib
import time
import warnings
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any, cast

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from mvrbm import BoltzmannMachine, SequenceRBM
from mvrbm.couplings import Dense
from mvrbm.devices import resolve_device
from mvrbm.estimators.inputs import VISIBLE
from mvrbm.io.alignments import Alignment, read_alignment, write_fasta
from mvrbm.io.distances import read_distances
from mvrbm.likelihood import log_likelihood_interval, pseudo_log_likelihood
from mvrbm.random import RandomSource
from mvrbm.sequences import contact_map, contact_precision
from mvrbm.training import Callback
from mvrbm.units import Bernoulli, Categorical
from mvrbm.updates.recipe import RECIPES
from studies.arguments import Command, Options, add_parts, add_study_options, count
from studies.data import data_file
from studies.report import DASH, markdown_table, read_results
from studies.runner import run_parts
from studies.runs import Outcome, Place, Run, Store, write_json

__all__ = ["COMMANDS", "MODELS", "PARTS"]

Array = NDArray[Any]
SEEDS = 3

#: Settings of SequenceRBM by family and name of the machine. `prior_precision` is a setting of its recipe. The numbers
#: of epochs suit a few minutes on one core. Learning rates are 48 divided by the bound on the curvature in
#: `mvrbm.updates.learning_rate.safe_rates`, 2.5 times as much for lattice proteins, and half for 99 units. The recipe
#: has the same factor, but limits the rate to 1, which is also safe for families with a few short sequences. dReLU
#: units, whose values are unbounded, have the default rate.
MODELS: dict[str, dict[str, dict[str, Any]]] = {
    "lattice": {
        "at most 7,000": {
            "hidden_shape": (20, 10), "rank": 8, "n_epochs": 150, "learning_rate": 6.56, "prior_precision": 1.0,
        },
        "at most 60,000": {
            "hidden_shape": (30, 12), "rank": 24, "n_epochs": 80, "learning_rate": 4.24, "prior_precision": 1.0,
        },
    },
    "PF00072": {
        "half": {"hidden_shape": 99, "n_epochs": 30, "learning_rate": 0.9},
        "shared letters": {"rank": 10, "n_epochs": 30, "learning_rate": 2.92},
        "sites and letters": {"hidden_shape": (40, 10), "rank": 20, "n_epochs": 30, "learning_rate": 1.06},
        "dense": {"n_epochs": 30, "learning_rate": 1.46},
        "half, dReLU": {"hidden_shape": 99, "hidden": "drelu", "n_epochs": 60},
    },
}  # fmt: skip
# Sequences of the training set on which settings are chosen.
_VALIDATION = {"lattice": 5_000, "PF00072": 4_000}
# Number of annealed chains, of temperatures, and of Gibbs steps of the chains before reverse annealing.
_ANNEALING = {"lattice": (500, 2000, 200), "PF00072": (150, 800, 100)}
# Test sequences for the curves of pseudo-likelihoods.
_CURVE_SEQUENCES = 200


# -- data -------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Family:
    """Training and test sequences, and distances between sites in a known structure if there is one."""

    train: Alignment
    test: Alignment
    distances: Array | None = None


@functools.lru_cache(maxsize=1)
def load(name: str, data_dir: str | None, *, validate: bool) -> Family:
    """Return a family. If `validate` is True, the test set is the last part of the training set."""

    def read(file: str) -> Alignment:
        return read_alignment(data_file(f"sequences/{file}", data_dir))

    distances = None
    if name == "lattice":
        train, test = _split(read("lattice_proteins.fasta.gz"), 10_000)
    else:
        train, test = (read(f"PF00072_{part}.fasta.gz") for part in ("train", "test"))
        distances = read_distances(data_file("sequences/PF00072_distances.txt", data_dir), train.codes.shape[1])
    if validate:
        train, test = _split(train, _VALIDATION[name])
    return Family(train, test, distances)


def _split(alignment: Alignment, last: int) -> tuple[Alignment, Alignment]:
    return alignment[:-last], alignment[-last:]


def one_hot(alignment: Alignment) -> Tensor:
    """Return sequences as states of the visible layer."""
    return torch.from_numpy(alignment.one_hot()).float()


# -- measurements -----------------------------------------------------------------------------------


class Curve(Callback):
    """Measures the pseudo-likelihood of test sequences against the processor time of training."""

    def __init__(self, family: Family) -> None:
        self.states = one_hot(family.test)[:_CURVE_SEQUENCES]
        self.points: list[list[float]] = []
        #: Processor time of training so far.
        self.seconds = 0.0
        self._next, self._since = 1, time.process_time()

    def on_train_begin(self, trainer: Any) -> None:
        self._since = time.process_time()

    def on_epoch_end(self, trainer: Any) -> None:
        self.measure(trainer.epoch, trainer.machine)

    def measure(self, step: int, machine: BoltzmannMachine) -> None:
        """Measure after 1, 2, 4, 8, ... steps. The time that this takes does not count."""
        self.seconds += time.process_time() - self._since
        if step >= self._next:
            self.points.append([self.seconds, pseudo_likelihood(machine, self.states)])
            self._next *= 2
        self._since = time.process_time()


def pseudo_likelihood(machine: BoltzmannMachine, states: Tensor) -> float:
    """Return the mean log-probability of a letter given all others, in nats per site."""
    exact = pseudo_log_likelihood(machine, states.to(machine.like), n_sites=None, check=False).values
    return float(exact.mean()) / states.shape[1]


def measure(machine: BoltzmannMachine, family: Family, name: str, seed: int) -> dict[str, Any]:
    """Return the likelihood of test sequences, with its interval, and the precision of contacts."""
    chains, temperatures, burn_in = _ANNEALING[name]
    train, test = (one_hot(part).to(machine.like) for part in (family.train, family.test))
    rows = np.random.default_rng(seed).permutation(len(train))[:chains]
    center = {VISIBLE: train.mean(0, keepdim=True)}
    found = log_likelihood_interval(
        machine, test, RandomSource(seed), n_chains=chains, n_steps=temperatures, burn_in=burn_in, init=train[rows],
        center=center,
    )  # fmt: skip
    sites = test.shape[1]
    numbers: dict[str, Any] = {
        "nats": found.mean / sites,
        "interval": [found.lower / sites, found.upper / sites],
        "pseudo": pseudo_likelihood(machine, test[:_CURVE_SEQUENCES]),
    }
    if family.distances is not None:
        numbers["contacts"] = contacts(contact_map(machine, family.train.codes), family.distances)
    return numbers


def contacts(scores: Array, distances: Array) -> list[float]:
    """Return the precision of contacts at L / 2, L and 2 L."""
    sites = len(scores)
    precision = contact_precision(scores, distances)
    return [float(precision[rank - 1]) for rank in (sites // 2, sites, 2 * sites)]


# -- runs -------------------------------------------------------------------------------------------


def ours(settings: Mapping[str, Any], place: Place) -> Outcome:
    """Fit and score `SequenceRBM`."""
    family = load(settings["family"], place.data_dir, validate=settings["validate"])
    options = dict(settings["options"])
    if isinstance(options.get("hidden_shape"), list):
        options["hidden_shape"] = tuple(options["hidden_shape"])
    if "prior_precision" in options:
        options["recipe"] = replace(RECIPES["sequences"], prior_precision=options.pop("prior_precision"))
    # Test sequences have no weights, so training sequences have none either.
    model = SequenceRBM(identity=None, **options, random_state=settings["seed"], device=place.device)
    curve = Curve(family)
    model.fit(family.train, callbacks=[curve])
    about = {"parameters": model.n_parameters_, "epochs": model.n_epochs_, "updates": model.n_updates_}
    numbers = {**about, "seconds": curve.seconds, "curve": curve.points}
    return Outcome(numbers | measure(model.machine_, family, settings["family"], settings["seed"]))


@torch.no_grad()
def rbms(settings: Mapping[str, Any], place: Place) -> Outcome:
    """Train a dense RBM by the loop of the package `rbms`, for a given processor time."""
    family = load(settings["family"], place.data_dir, validate=settings["validate"])
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # it uses torch.jit, which is deprecated
        step = importlib.import_module("rbms.training.pcd").fit_batch_pcd
        model = importlib.import_module("rbms.potts_bernoulli.classes").PBRBM
        dataset = importlib.import_module("rbms.dataset.dataset_class").RBMDataset
    torch.manual_seed(settings["seed"])
    codes = family.train.codes
    n, size = len(codes), settings["batch_size"]
    weights, names = np.ones(n, np.float32), np.arange(n).astype(str)
    kept = dataset(codes.astype(np.float32), np.zeros(n, np.int32), weights, names, "family", False, "cpu")
    params = model.init_parameters(settings["hidden"], kept, torch.device("cpu"), torch.float32)
    params.init_grad()
    chains = params.init_chains(size)
    optimizer = torch.optim.SGD(params.parameters(), lr=settings["learning_rate"], maximize=True)
    curve = Curve(family)
    updates, machine = 0, None
    while curve.seconds < settings["seconds"]:
        chosen = torch.randperm(n)[:size]
        optimizer.zero_grad(set_to_none=False)
        batch = kept.data[chosen], kept.weights[chosen]
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            chains, _ = step(batch, chains, params, gibbs_steps=settings["gibbs_steps"], beta=1.0)
        optimizer.step()
        updates += 1
        machine = from_rbms(params)
        curve.measure(updates, machine)
    assert machine is not None
    numbers = {"parameters": machine.n_parameters, "seconds": curve.seconds, "updates": updates}
    found = measure(machine, family, settings["family"], settings["seed"])
    return Outcome({**numbers, "curve": curve.points, **found})


def from_rbms(params: Any) -> BoltzmannMachine:
    """Convert parameters of `rbms`, whose weights have shape (sites, letters, hidden), to a machine."""
    sites, letters, hidden = params.weight_matrix.shape
    machine = BoltzmannMachine({VISIBLE: Categorical((sites, letters))}, Bernoulli(hidden), {VISIBLE: Dense()})
    cast(Tensor, machine.links[VISIBLE].weight).copy_(params.weight_matrix.reshape(-1, hidden).T)
    machine.layers[VISIBLE].bias.copy_(params.vbias)
    machine.hidden.bias.copy_(params.hbias)
    return machine


@torch.no_grad()
def adabmdca(settings: Mapping[str, Any], place: Place) -> Outcome:
    """Train a Potts model by `adabmDCA` with its default settings, for a given number of gradient steps."""
    family = load(settings["family"], place.data_dir, validate=settings["validate"])
    train = importlib.import_module("adabmDCA.api.training").train_model
    predict = importlib.import_module("adabmDCA.api.contacts").predict_contacts
    path = write_fasta(place.work / f"{settings['family']}.fasta", family.train.sequences, force=True)
    began = time.process_time()
    found = train(str(path), device="cpu", seed=settings["seed"], max_gradient_steps=settings["steps"])
    seconds = time.process_time() - began
    couplings, bias = found.model.params["coupling_matrix"], found.model.params["bias"]
    numbers: dict[str, Any] = {
        "parameters": bias.numel() + couplings.numel() // 2,
        "seconds": seconds,
        "updates": found.gradient_steps,
        "pearson": float(found.history["Pearson"][-1]),
        "pseudo": potts_pseudo_likelihood(bias, couplings, one_hot(family.test)[:_CURVE_SEQUENCES]),
    }
    if family.distances is not None:
        numbers["contacts"] = contacts(np.asarray(predict(model=found.model).scores), family.distances)
    return Outcome(numbers)


def potts_pseudo_likelihood(bias: Tensor, couplings: Tensor, states: Tensor) -> float:
    """Return the mean log-probability of a letter given all others under a Potts model, in nats per site.

    `bias` has shape (sites, letters), and `couplings` has shape (sites, letters, sites, letters).
    """
    fields = bias + torch.tensordot(states, couplings, dims=2)
    return float((torch.log_softmax(fields, -1) * states).sum(-1).mean())


PARTS = ("ours", "rbms", "adabmdca")

# `rbms` with its default settings, apart from the number of updates, and with settings like ours.
_RBMS: dict[str, dict[str, Any]] = {
    "default": {"hidden": 100, "batch_size": 2000, "gibbs_steps": 100, "learning_rate": 0.01},
    "alike": {"hidden": 100, "batch_size": 100, "gibbs_steps": 1, "learning_rate": 0.1},
}
# Processor time of `rbms`, and gradient steps of `adabmDCA`, which take about as long.
_SECONDS = {"lattice": 40.0, "PF00072": 40.0}
_STEPS = {"PF00072": 3}


def plan(*, seeds: int, epochs: int | None, validate: bool) -> Iterator[Run]:
    """Return one run per family, machine and seed, and one run per family and other tool."""

    def run(name: str, part: str, compute: Callable[..., Outcome], settings: dict[str, Any], seed: int = 0) -> Run:
        needs = () if part == "ours" else ({"rbms": "rbms", "adabmdca": "adabmDCA"}[part],)
        settings = {**settings, "seed": seed, "validate": validate}
        return Run(f"{name}-seed{seed}", part, compute, settings, needs=needs, alone=True)

    for family, models in MODELS.items():
        for seed in range(seeds if family == "lattice" else 1):
            for index, (model, options) in enumerate(models.items()):
                given = options if epochs is None else {**options, "n_epochs": epochs}
                settings: dict[str, Any] = {"family": family, "model": model, "options": given}
                yield run(f"{family}-{index}", "ours", ours, settings, seed)
    for family, seconds in _SECONDS.items():
        for name, options in _RBMS.items():
            settings = {"family": family, "model": f"rbms, {name}", "seconds": seconds}
            yield run(f"{family}-rbms-{name}", "rbms", rbms, settings | options)
    for family, steps in _STEPS.items():
        settings = {"family": family, "model": "adabmDCA", "steps": steps}
        yield run(f"{family}-adabmdca", "adabmdca", adabmdca, settings)


# -- the command ------------------------------------------------------------------------------------


def _rows(store: Store, runs: list[Run]) -> list[dict[str, Any]]:
    """Return one row per family and machine: the run with the median likelihood over seeds, and all likelihoods."""
    found: dict[tuple[str, str], list[dict[str, Any]]] = {}
    for run in runs:
        if store.has(run):
            found.setdefault((run.settings["family"], run.settings["model"]), []).append(store.numbers(run))
    rows = []
    for (family, model), numbers in found.items():
        middle = sorted(numbers, key=lambda each: each.get("nats", 0))[(len(numbers) - 1) // 2]
        every = [each["nats"] for each in numbers if "nats" in each]
        rows.append({"family": family, "model": model, **middle, "all": every})
    return rows


_HEADER = ["family: machine", "parameters", "nats per site", "interval", "contacts at L/2, L, 2L", "processor seconds"]


def _lines(rows: list[dict[str, Any]]) -> list[list[str]]:
    """Return the cells of the table, one line per machine."""
    lines = []
    for row in rows:
        low, high = row.get("interval", (None, None))
        lines.append(
            [
                f"{row['family']}: {row['model']}",
                f"{row['parameters']:,}",
                f"{row['nats']:.4f}" if "nats" in row else DASH,
                DASH if low is None else f"{low:.4f} to {high:.4f}",
                ", ".join(f"{value:.2f}" for value in row["contacts"]) if "contacts" in row else DASH,
                f"{row['seconds']:.0f}",
            ]
        )
    return lines


def _add(parser: argparse.ArgumentParser) -> None:
    add_parts(parser, PARTS)
    add_study_options(parser, "sequences", "--only", "--device", "--data-dir")
    parser.add_argument("--seeds", type=count, default=SEEDS, help=f"Number of seeds. Default: {SEEDS}.")
    parser.add_argument("--epochs", type=count, help="Number of epochs. Default: that of each machine.")
    parser.add_argument("--validate", action="store_true", help="Score validation sequences instead of the test set.")


def _run(options: Options) -> tuple[Mapping[str, Any], str]:
    path = options.out / ("validation.json" if options.validate else "results.json")
    if not options.report_only:
        store = Store.within(options.work)
        runs = list(plan(seeds=options.seeds, epochs=options.epochs, validate=options.validate))
        place = Place(store, resolve_device(options.device).type, options.data_dir, options.work)
        try:
            run_parts(runs, options.parts or list(PARTS), place, only=options.only)
        finally:
            options.out.mkdir(parents=True, exist_ok=True)
            rows = _rows(store, runs)
            write_json(path, {"rows": rows, "table": _lines(rows), "header": _HEADER, "device": place.device})
    found = read_results(path)
    return found, markdown_table(found["header"], found["table"])


COMMANDS = {
    "sequences": Command(
        "The likelihood of protein sequences, contacts and speed, next to other tools.",
        _add,
        _run,
        "ours --only lattice-0 --validate",
    )
}
