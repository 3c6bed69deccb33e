"""The plan of experiment 3: the runs, their settings at each scale, and their order."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from mvrbm.training import RECIPES
from studies.data import PACKAGED, check_there
from studies.runs import Run, seeded_plan
from studies.superres.run import compare, fine_tune, learn, learn_dictionaries, published_protocol

__all__ = ["EXPERIMENTS", "GROUPS", "SCALES", "Scale", "check_data", "plan"]

# Packages that all runs need, to read images and to measure their quality.
_NEEDS = ("PIL", "skimage")


@dataclass(frozen=True)
class Scale:
    """The size of the experiment."""

    train: str  # training images of CD-1 and of sparse representation
    tuned_train: str  # training images of fine-tuning
    compared: tuple[str, str]  # test images in the place of the paper's Lena and Bird
    published: tuple[str, ...]  # test images in the literature's protocol
    seeds: int
    fewer_seeds: Mapping[str, int]  # largest number of seeds, by group
    patch: int  # side of the patches in the comparisons
    hidden: int
    patches: tuple[int, ...]
    hiddens: tuple[int, ...]
    n_patches: int
    sparse: Mapping[str, Any]
    tuned: Mapping[str, Any]  # parameters of the fine-tuned resolver
    tuning: tuple[Mapping[str, Any], ...]  # arguments of successive calls of `fine_tune`
    learning: Mapping[str, Any] = field(default_factory=dict)  # further parameters of resolvers trained by CD-1
    scale: int = 2


# Crops of photographs that come with scikit-image.
_PACKAGED_IMAGES: dict[str, Any] = {
    "train": PACKAGED,
    "tuned_train": PACKAGED,
    "compared": ("astronaut", "chelsea"),
    "published": ("astronaut", "chelsea"),
    "seeds": 2,
    "fewer_seeds": {},
}

SCALES: dict[str, Scale] = {
    "paper": Scale(
        train="scsr69",
        tuned_train="t91",
        compared=("lena", "bird"),
        published=("baby", "bird", "butterfly", "head", "woman"),
        seeds=5,
        fewer_seeds={"patch-size": 3, "hidden-size": 3, "sparse": 1, "fine-tuned": 1, "comparison": 1, "set5": 1},
        patch=15,
        hidden=20,
        patches=(10, 15, 20, 30, 35),
        hiddens=(5, 10, 15, 20, 25, 30, 40),
        n_patches=10_000,
        sparse={},
        learning={"n_epochs": 30},
        tuned={"patch": 10, "hidden_shape": (32, 32), "rank": 16, "n_patches": 20_000, "n_epochs": 5},
        tuning=(
            {"objective": "patches", "n_samples": 100_000, "n_epochs": 15, "batch_size": 512, "learning_rate": 3e-3},
            {
                "objective": "images",
                "n_samples": 20_000,
                "n_epochs": 12,
                "batch_size": 16,
                "learning_rate": 1e-3,
                "averaging": 0.999,
            },
        ),
    ),
    "quick": Scale(
        **_PACKAGED_IMAGES,
        patch=15,
        hidden=20,
        patches=(10, 15, 20),
        hiddens=(10, 20, 30),
        n_patches=3000,
        sparse={"atoms": 128, "samples": 6000, "overlap": 2},
        tuned={"patch": 10, "hidden_shape": (16, 16), "rank": 4},
        tuning=({"objective": "patches", "n_samples": 10_000, "n_epochs": 8},),
    ),
    # For tests, too small to mean anything.
    "tiny": Scale(
        **_PACKAGED_IMAGES,
        patch=6,
        hidden=4,
        patches=(4, 6),
        hiddens=(3, 4),
        n_patches=200,
        learning={"n_epochs": 1},
        sparse={"atoms": 16, "samples": 300, "overlap": 0, "rounds": 2},
        tuned={"patch": 5, "hidden_shape": (4, 4), "rank": 2, "n_epochs": 1},
        tuning=(
            {"objective": "patches", "n_samples": 200, "n_epochs": 1},
            {"objective": "images", "n_samples": 8, "n_epochs": 1, "batch_size": 4},
        ),
    ),
}


def check_data(scale: Scale, data_dir: str | None) -> None:
    """Raise `DatasetError` if the images of a scale are not on this machine."""
    for name in {scale.train, scale.tuned_train}:
        check_there(name, data_dir)


# -- groups -----------------------------------------------------------------------------------------


def _recipe() -> dict[str, Any]:
    # The numbers are part of the key: a recipe with other numbers makes another run.
    return RECIPES["default"].config()


def _learned(group: str, scale: Scale, patch: int, hidden: int, seed: int) -> Run:
    model = {
        "scale": scale.scale,
        "patch": patch,
        "hidden_shape": (hidden, hidden),
        "n_patches": scale.n_patches,
        **scale.learning,
    }
    settings = {"train": scale.train, "image": scale.compared[0], "model": model, "recipe": _recipe(), "seed": seed}
    return Run(f"superres-cd-p{patch:02d}-h{hidden:02d}-s{seed}", group, learn, settings, needs=_NEEDS)


def _patch_size(scale: Scale, seed: int) -> Iterator[Run]:
    for patch in scale.patches:
        yield _learned("patch-size", scale, patch, scale.hidden, seed)


def _hidden_size(scale: Scale, seed: int) -> Iterator[Run]:
    for hidden in scale.hiddens:
        yield _learned("hidden-size", scale, scale.patch, hidden, seed)


def _sparse(scale: Scale, seed: int) -> Iterator[Run]:
    settings = {"train": scale.train, "sparse": {"scale": scale.scale, **scale.sparse}, "seed": seed}
    yield Run(f"superres-sparse-s{seed}", "sparse", learn_dictionaries, settings, needs=_NEEDS)


def _fine_tuned(scale: Scale, seed: int) -> Iterator[Run]:
    settings = {
        "train": scale.tuned_train,
        "others": scale.published,
        "model": {"scale": scale.scale, "n_patches": scale.n_patches, **scale.tuned},
        "recipe": _recipe(),
        "tuning": [dict(step) for step in scale.tuning],
        "seed": seed,
    }
    yield Run(f"superres-tuned-s{seed}", "fine-tuned", fine_tune, settings, needs=_NEEDS)


def _models(scale: Scale, seed: int) -> dict[str, Run]:
    (tuned,) = _fine_tuned(scale, seed)
    (sparse,) = _sparse(scale, seed)
    return {"cd": _learned("patch-size", scale, scale.patch, scale.hidden, seed), "tuned": tuned, "sparse": sparse}


def _described(runs: Mapping[str, Run]) -> dict[str, dict[str, Any]]:
    return {
        # Stored keys have "cell" for the name of a run.
        name: {"cell": run.name, **{key: run.settings[key] for key in ("model", "sparse") if key in run.settings}}
        for name, run in runs.items()
    }


def _comparison(scale: Scale, seed: int) -> Iterator[Run]:
    models = _models(scale, seed)
    for image in scale.compared:
        settings = {"image": image, "models": _described(models), "seed": seed}
        name = f"superres-compare-{image}-s{seed}"
        after = tuple(models.values())
        yield Run(name, "comparison", compare, settings, after, _NEEDS, alone=True)


def _set5(scale: Scale, seed: int) -> Iterator[Run]:
    models = {name: run for name, run in _models(scale, seed).items() if name != "sparse"}
    settings = {"images": scale.published, "models": _described(models), "seed": seed}
    after = tuple(models.values())
    yield Run(f"superres-set5-s{seed}", "set5", published_protocol, settings, after, _NEEDS)


_Maker = Callable[[Scale, int], Iterator[Run]]

#: Groups of runs in the order of computation.
GROUPS: dict[str, _Maker] = {
    "patch-size": _patch_size,
    "fine-tuned": _fine_tuned,
    "set5": _set5,
    "sparse": _sparse,
    "hidden-size": _hidden_size,
    "comparison": _comparison,
}

#: Groups by experiment.
EXPERIMENTS: dict[str, tuple[str, ...]] = {"superres": tuple(GROUPS)}


def plan(scale: Scale, groups: Sequence[str], *, seeds: int | None = None, first_seed: int = 0) -> list[Run]:
    """Return the runs of some groups; see :func:`studies.runs.seeded_plan`.

    `seeds` is the number of random choices of patches (default: the scale's), `first_seed` the number of the first one.
    The limits in `Scale.fewer_seeds` always apply.
    """
    asked = scale.seeds if seeds is None else seeds
    return seeded_plan(GROUPS, scale, groups, asked, first_seed, lambda run: scale.fewer_seeds.get(run.group, asked))
