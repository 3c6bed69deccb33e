"""The plan: the machines, the data that they are trained on, and what is measured."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from mvrbm.training import RECIPES, Recipe
from studies.generative.run import (
    baselines,
    build,
    conditional,
    evaluate,
    judge,
    samples,
    train,
    train_rbms,
    train_shared,
)
from studies.runs import Run, with_dependencies

__all__ = ["GROUPS", "SCALES", "Model", "Scale", "chosen_model", "plan"]


@dataclass(frozen=True)
class Model:
    """A machine and its training.

    Parameters
    ----------
    coupling : str
        ``"kronecker:8"``, ``"cp:40"``, ``"mpo:14"`` or ``"dense"``.
    hidden : str
        Shape of the hidden layer, such as ``"25x25"``.
    updates : int
        Number of updates, rounded up to whole epochs.
    visible : str
        Shape of the visible layer, to which digits are reshaped. At order 2 a matrix product operator is a sum of
        Kronecker products, so it needs a higher order.
    recipe : mapping
        Settings that differ from the recipe `generative`, in the form of :meth:`Recipe.config`.
    unit : {"bernoulli", "gaussian"}
        Visible units.
    labels : bool
        Whether the label is a second visible layer.
    """

    coupling: str
    hidden: str
    updates: int
    visible: str = "28x28"
    recipe: Mapping[str, Any] = field(default_factory=dict)
    unit: str = "bernoulli"
    labels: bool = False

    @property
    def key(self) -> str:
        """Part of the names of runs."""
        label = "-labels" if self.labels else ""
        order = "" if self.visible == "28x28" else f"-{self.visible}"
        return f"{self.coupling.replace(':', '')}{order}-{self.hidden}{label}-u{self.updates}"

    @property
    def title(self) -> str:
        """Name in tables."""
        kind, _, rank = self.coupling.partition(":")
        name = {"kronecker": "Kronecker", "cp": "CP", "mpo": "MPO", "dense": "Dense"}[kind]
        return f"{name}({rank}), {self.hidden}" if rank else f"{name}, {self.hidden}"

    def settings(self, data: str, seed: int, device: str | None) -> dict[str, Any]:
        """Return the settings of a training run.

        The recipe is given by its differences from the default one. So the run changes if a number of the recipe
        changes, but not if recipes gain a setting.
        """
        default = Recipe().config()
        chosen = {**RECIPES["generative"].config(), **self.recipe}
        del chosen["n_epochs"]  # follows from the number of updates
        return {
            "data": data,
            "coupling": self.coupling,
            "visible": _shape(self.visible),
            "hidden": _shape(self.hidden),
            "unit": self.unit,
            "labels": self.labels,
            "updates": self.updates,
            "recipe": {key: value for key, value in chosen.items() if value != default.get(key)},
            "seed": seed,
            "device": device,
        }

    @property
    def parameters(self) -> int:
        """Number of parameters."""
        return build(self.settings("", 0, None)).n_parameters


def _shape(text: str) -> list[int]:
    return [int(size) for size in text.split("x")]


@dataclass(frozen=True)
class Scale:
    """The size of the study."""

    data: tuple[str, ...]  # sets of binarized digits; the first one has labels
    gray: str  # digits to train the judge on
    seeds: int
    models: tuple[Model, ...]  # machines of the main table, for all seeds and data
    others: tuple[Model, ...]  # further machines of the main table, for one seed and the first data
    sampled: tuple[Model, ...]  # machines to sample from; chains of the first one also start from noise
    candidates: tuple[Model, ...]  # machines to compare on validation digits
    timed: tuple[Model, ...]  # machines for nats against seconds, one seed
    timed_cpu: tuple[Model, ...]  # the same on the CPU
    rbms: tuple[Mapping[str, Any], ...]  # settings of the package rbms; the first also runs on the CPU
    rbms_hidden: int
    conditional: tuple[Model, ...]
    real: Mapping[str, tuple[Model, ...]]  # machines for real-valued data, by data set
    shared: Model  # trained on the CPU by one process and by two
    annealing: Mapping[str, int]
    samples: Mapping[str, int]
    conditional_samples: Mapping[str, Any]
    judge_epochs: int
    components: tuple[int, ...]
    choose: str = "choose"


def _pcd(chains: int, batch_size: int) -> dict[str, Any]:
    return {"negative": {"kind": "PCD", "n_chains": chains, "steps": 1}, "batch_size": batch_size}


# Recipe of long training runs: more samples per update and more chains allow a larger rate.
_LONG = {"rate_factor": 16.0, **_pcd(400, 200)}
_DENSE = {"centering": "full", "weight_decay": 0.0001, **_LONG}

_SMALLEST = Model("kronecker:1", "22x24", 400_000, recipe=_LONG)
_MIDDLE = Model("kronecker:6", "33x33", 400_000, recipe=_LONG)
_BEST = Model("kronecker:8", "30x30", 400_000, recipe=_LONG)
_WIDE = Model("kronecker:5", "45x45", 400_000, recipe=_LONG)
_LARGE = Model("kronecker:16", "60x60", 300_000, recipe={**_LONG, "rate_factor": 32.0})
_CLASSIC = Model("dense", "500", 50_000, recipe=_DENSE)
_CONDITIONAL = Model("kronecker:8", "30x30", 400_000, recipe=_LONG, labels=True)
_ORDER_4 = "4x7x4x7"
_PATCHES = (
    Model("kronecker:8", "12x12", 1_000_000, "8x8", unit="gaussian"),
    Model("dense", "144", 400_000, "8x8", unit="gaussian"),
)

_PAPER = Scale(
    data=("random", "fixed"),
    gray="mnist",
    seeds=3,
    models=(_LARGE, _WIDE, _BEST, _MIDDLE, _SMALLEST, _CLASSIC),
    others=(
        Model("kronecker:2", "28x28", 200_000, recipe=_LONG),
        Model("kronecker:8", "25x25", 400_000, recipe=_LONG),
        Model("kronecker:20", "48x48", 200_000, recipe={**_LONG, "rate_factor": 32.0}),
        Model("dense", "16", 100_000, recipe=_DENSE),
        Model("dense", "64", 100_000, recipe=_DENSE),
        Model("cp:46", "200", 50_000, recipe=_LONG),
        Model("cp:69", "784", 50_000, recipe=_LONG),
        Model("mpo:14", "5x5x5x5", 50_000, _ORDER_4, _LONG),
        Model("mpo:32", "5x5x5x5", 50_000, _ORDER_4, _LONG),
    ),
    sampled=(_WIDE, _BEST, _LARGE, _CLASSIC),
    candidates=(
        *(Model("kronecker:8", "25x25", 100_000, recipe={**_LONG, "rate_factor": rate}) for rate in (4.0, 8.0, 16.0)),
        *(replace(model, updates=100_000) for model in (_MIDDLE, _BEST, _WIDE, _LARGE)),
        *(Model(f"kronecker:{rank}", hidden, 100_000, recipe=_LONG) for rank, hidden in ((7, "30x28"), (25, "40x40"))),
        *(Model("dense", "500", 50_000, recipe=recipe) for recipe in (_LONG, _DENSE)),
    ),
    timed=(
        *(Model("kronecker:8", "25x25", updates) for updates in (6000, 24_000, 96_000, 384_000)),
        *(replace(_CLASSIC, updates=updates) for updates in (6000, 24_000, 96_000)),
    ),
    timed_cpu=tuple(Model("kronecker:8", "25x25", updates) for updates in (6000, 24_000)),
    rbms_hidden=500,
    rbms=(
        *(
            {"updates": updates, "batch_size": 200, "chains": 400, "gibbs_steps": 1, "learning_rate": rate}
            for rate in (0.05, 0.01)
            for updates in (6000, 24_000)
        ),
        {"updates": 2000, "batch_size": 2000, "chains": 2000, "gibbs_steps": 100, "learning_rate": 0.01},  # defaults
    ),
    conditional=(_CONDITIONAL,),
    real={
        "faces": (
            Model("kronecker:8", "20x20", 1_000_000, "28x20", unit="gaussian"),
            Model("dense", "400", 200_000, "28x20", unit="gaussian"),
        ),
        "patches": _PATCHES,
        "white": _PATCHES,
    },
    shared=Model("kronecker:8", "25x25", 12_000),
    annealing={"chains": 256, "steps": 30_000, "seed": 0},
    samples={"n": 10_000, "steps": 5000, "seed": 0},
    conditional_samples={"each": 1000, "steps": [100, 1000, 5000], "seed": 0},
    judge_epochs=30,
    components=(5, 10, 20, 40, 60, 80, 120, 160, 240),
)

# For tests, too small to mean anything, on data that comes with packages.
_SMALL = Model("kronecker:2", "8x8", 200)
_TINY = Scale(
    data=("small",),
    gray="mnist-5k",
    seeds=1,
    models=(_SMALL, Model("dense", "30", 200)),
    others=(Model("kronecker:4", "12x12", 200), Model("cp:8", "30", 200), Model("mpo:3", "2x4x2x4", 200, _ORDER_4)),
    sampled=(_SMALL, Model("dense", "30", 200)),
    candidates=(replace(_SMALL, updates=100),),
    timed=tuple(replace(_SMALL, updates=updates) for updates in (40, 400)),
    timed_cpu=(replace(_SMALL, updates=100),),
    rbms_hidden=30,
    rbms=({"updates": 50, "batch_size": 100, "chains": 100, "gibbs_steps": 1, "learning_rate": 0.05},),
    conditional=(replace(_SMALL, labels=True),),
    real={"white": (Model("kronecker:2", "4x4", 600, "8x8", unit="gaussian"),)},
    shared=replace(_SMALL, updates=40),
    annealing={"chains": 32, "steps": 200, "seed": 0},
    samples={"n": 200, "steps": 50, "seed": 0},
    conditional_samples={"each": 10, "steps": [10, 50], "seed": 0},
    judge_epochs=2,
    components=(2, 8, 32),
    choose="small",
)

SCALES: dict[str, Scale] = {"paper": _PAPER, "tiny": _TINY}


# -- runs ------------------------------------------------------------------------------------------


def _trained(group: str, model: Model, data: str, seed: int, device: str | None = None) -> Run:
    name = f"train-{model.key}-{data}-s{seed}" + (f"-{device}" if device else "")
    return Run(name, group, train, model.settings(data, seed, device), alone=device is not None)


def _evaluated(scale: Scale, trained: Run) -> Run:
    settings = {"model": trained.name, "data": trained.settings["data"], **scale.annealing}
    name = trained.name.replace("train-", "nats-", 1)
    # Runs that measure time come after all others, and so must the runs that read them.
    return Run(name, trained.group, evaluate, settings, (trained,), trained.needs, trained.alone)


def _with_nats(scale: Scale, trained: Run) -> Iterator[Run]:
    yield trained
    yield _evaluated(scale, trained)


def _seeds(scale: Scale) -> range:
    return range(1, 1 + scale.seeds)  # seed 0 is for choosing settings


def _choose(scale: Scale) -> Iterator[Run]:
    yield from chosen_runs(scale, scale.candidates, scale.choose, 0)


def _likelihood(scale: Scale) -> Iterator[Run]:
    for data in scale.data:
        for seed in _seeds(scale) if data == scale.data[0] else (1,):
            for model in scale.models:
                yield from _with_nats(scale, _trained("likelihood", model, data, seed))
        if data == scale.data[0]:
            for model in scale.others:
                yield from _with_nats(scale, _trained("likelihood", model, data, 1))


def _rbms(scale: Scale, options: Mapping[str, Any], device: str | None = None) -> Run:
    settings = {"data": scale.data[0], "hidden": scale.rbms_hidden, "seed": 1, "device": device, **options}
    about = {"u": "updates", "k": "gibbs_steps", "b": "batch_size", "r": "learning_rate"}
    name = "-".join(["train-rbms", str(scale.rbms_hidden), *(f"{key}{options[name]}" for key, name in about.items())])
    name += f"-{device}" if device else ""
    return Run(name, "seconds", train_rbms, settings, needs=("rbms",), alone=device is not None)


def _seconds(scale: Scale) -> Iterator[Run]:
    for model in scale.timed:
        yield from _with_nats(scale, _trained("seconds", model, scale.data[0], 1))
    for options in scale.rbms:
        yield from _with_nats(scale, _rbms(scale, options))
    for model in scale.timed_cpu:
        yield from _with_nats(scale, _trained("seconds", model, scale.data[0], 1, "cpu"))
    yield from _with_nats(scale, _rbms(scale, scale.rbms[0], "cpu"))


def _judge(scale: Scale) -> Run:
    settings = {"gray": scale.gray, "data": scale.data[0], "epochs": scale.judge_epochs, "seed": 0}
    return Run("judge", "samples", judge, settings)


def _sampled(scale: Scale, trained: Run, start: str) -> Run:
    settings = {"model": trained.name, "judge": "judge", "data": scale.data[0], "start": start, **scale.samples}
    name = trained.name.replace("train-", f"samples-{start}-", 1)
    return Run(name, "samples", samples, settings, (trained, _judge(scale)), trained.needs)


def _samples(scale: Scale) -> Iterator[Run]:
    yield _judge(scale)
    trained = [_trained("likelihood", model, scale.data[0], 1) for model in scale.sampled]
    for run in trained:
        yield _sampled(scale, run, "chains")
    yield _sampled(scale, trained[0], "noise")
    for options in scale.rbms[-2:]:
        yield _sampled(scale, _rbms(scale, options), "chains")


def _conditional(scale: Scale) -> Iterator[Run]:
    for model in scale.conditional:
        trained = _trained("conditional", model, scale.data[0], 1)
        yield trained
        settings = {"model": trained.name, "judge": "judge", **scale.conditional_samples}
        name = trained.name.replace("train-", "given-label-", 1)
        yield Run(name, "conditional", conditional, settings, (trained, _judge(scale)))


def _real(scale: Scale) -> Iterator[Run]:
    for data, models in scale.real.items():
        # Neighboring frames of a film are almost equal, so they are held out in blocks.
        settings = {"data": data, "components": list(scale.components), "block": 40 if data == "faces" else 1}
        yield Run(f"gaussians-{data}", "real", baselines, settings)
        for model in models:
            yield from _with_nats(scale, _trained("real", model, data, 1))


def _processes(scale: Scale) -> Iterator[Run]:
    one = _trained("processes", scale.shared, scale.data[0], 1, "cpu")
    yield from _with_nats(scale, one)
    settings = {**one.settings, "processes": 2}
    shared = Run(f"{one.name}-shared", "processes", train_shared, settings, alone=True)
    yield from _with_nats(scale, shared)


#: Groups of runs in the order of computation.
GROUPS = {
    "choose": _choose,
    "likelihood": _likelihood,
    "seconds": _seconds,
    "samples": _samples,
    "conditional": _conditional,
    "real": _real,
    "processes": _processes,
}


def plan(scale: Scale, groups: Sequence[str]) -> list[Run]:
    """Return the runs of some groups, and the runs that they read, in the order of computation."""
    return with_dependencies(run for group, make in GROUPS.items() if group in groups for run in make(scale))


def chosen_model(text: str, updates: int, changes: Mapping[str, Any]) -> Model:
    """Return the model that a user describes, such as ``kronecker:8@25x25``."""
    coupling, _, hidden = text.partition("@")
    visible = _ORDER_4 if hidden.count("x") == 3 else "28x28"
    return Model(coupling, hidden, updates, visible, changes)


def chosen_runs(scale: Scale, models: Sequence[Model], data: str, seed: int) -> list[Run]:
    """Return runs for a user's own models. Their names describe the models and recipes."""
    found = []
    for model in models:
        trained = _trained("choose", model, data, seed)
        about = "".join(f"-{key}-{value}" for key, value in sorted(model.recipe.items()))
        name = trained.name + "".join(letter if letter.isalnum() or letter in "-." else "" for letter in about)
        found += list(_with_nats(scale, replace(trained, name=name)))
    return found
