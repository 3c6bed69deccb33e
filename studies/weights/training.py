"""The cells that train: the paper's setting, the choice of settings, and models trained on T91.

Fine-tuned models start from CD-1, which the group `starts` trains once for all of them.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from numpy.typing import NDArray

import mvrbm
from mvrbm.vision import SuperResolver, TrainingStep
from studies.arguments import say
from studies.cells import Cell, Outcome, Place, Rows
from studies.superres.data import has_files, named_training_images, training_images
from studies.weights.images import Bicubic, lena, literature, paper_protocol, set5, split_t91

__all__ = ["SETTINGS", "cells", "load_start", "rows_of"]

Array = NDArray[Any]
Settings = Mapping[str, Any]

PATCHES = {"n_samples": 100_000, "n_epochs": 15, "batch_size": 512, "learning_rate": 3e-3}
CROPS = {"n_samples": 20_000, "n_epochs": 12, "batch_size": 16, "learning_rate": 1e-3, "averaging": 0.999}
FINAL = {**CROPS, "n_samples": 40_000}
SETTINGS: dict[str, dict[str, Any]] = {
    "p10 h24 R16": {"patch": 10, "hidden_shape": (24, 24), "rank": 16},
    "p10 h32 R16": {"patch": 10, "hidden_shape": (32, 32), "rank": 16},
    "p12 h32 R16": {"patch": 12, "hidden_shape": (32, 32), "rank": 16},
    "p8 h32 R16": {"patch": 8, "hidden_shape": (32, 32), "rank": 16},
    "p10 h32 R32": {"patch": 10, "hidden_shape": (32, 32), "rank": 32},
    "p14 h32 R16": {"patch": 14, "hidden_shape": (32, 32), "rank": 16},
    "p10 h24 R4": {"patch": 10, "hidden_shape": (24, 24), "rank": 4},
    "p10 h24 R1": {"patch": 10, "hidden_shape": (24, 24), "rank": 1},
}
#: The settings of the other scales: as many low-resolution pixels per patch.
LARGER: dict[int, dict[str, Any]] = {
    3: {"patch": 15, "hidden_shape": (32, 32), "rank": 16},
    4: {"patch": 20, "hidden_shape": (32, 32), "rank": 16},
}
MOST_RANK = 16  # weights of all scales together are to be less than a megabyte
_TINY = {"n_patches": 200, "n_epochs": 1}  # too little training to learn anything, to try the code
_TINY_TUNING = {"n_samples": 64, "n_epochs": 2, "batch_size": 16}


def rows_of(place: Place) -> Rows:
    """Return the store of a place, which has rows."""
    assert isinstance(place.store, Rows)
    return place.store


# -- the paper's setting ----------------------------------------------------------------------------


def paper(settings: Settings, place: Place) -> Outcome:
    """CD-1 alone, with and without back-projection."""
    patch, hidden = settings["patch"], settings["hidden"]
    few: dict[str, Any] = {"n_epochs": 30, **(_TINY if settings["tiny"] else {})}
    model = SuperResolver(patch=patch, hidden_shape=(hidden, hidden), symmetric=False, device=place.device, **few)
    model.fit(training_images("scsr69", place.data_dir))
    row = {"patch": patch, "hidden": hidden}
    for rounds in (20, 0):
        model.back_projection = rounds
        what = "back_projection" if rounds else "no_back_projection"
        row[f"lena_paper_{what}"] = paper_protocol(model, lena(place.data_dir))
        row[f"set5_{what}"] = literature(model, set5(place.data_dir))
    model.back_projection = 20
    return Outcome({**row, "parameters": model.machine_.n_parameters}, machine=model)


# -- CD-1 -------------------------------------------------------------------------------------------


def _images_of(kind: str, place: Place) -> list[Array]:
    """Return the training images of a start."""
    if kind == "T91":
        return list(named_training_images("t91", place.data_dir).values())
    return split_t91(place.data_dir)[0]


def load_start(name: str, place: Place) -> Any:
    """Return a stored model trained by CD-1, None if it is not stored."""
    folder = rows_of(place).model_folder("starts", name)
    return mvrbm.load(folder, device=place.device) if folder.is_dir() else None


def _start(
    name: str, scale: int, images: Sequence[Array], place: Place, *, tiny: bool, cd: int = 5, **settings: Any
) -> Any:
    """Return a model trained by CD-1, the stored one if there is one."""
    stored = load_start(name, place)
    if stored is not None:
        return stored
    few: dict[str, Any] = {"n_patches": 20_000, "n_epochs": cd, **settings, **(_TINY if tiny else {})}
    return SuperResolver(scale, symmetric=False, device=place.device, **few).fit(images)


def start(settings: Settings, place: Place) -> Outcome:
    """CD-1 of one setting."""
    described = {**settings["model"], "hidden_shape": tuple(settings["model"]["hidden_shape"])}
    images = _images_of(settings["images"], place)
    some = {"tiny": settings["tiny"], "cd": settings["cd"], **described}
    model = _start(settings["name"], settings["scale"], images, place, **some)
    return Outcome({"parameters": model.machine_.n_parameters}, machine=model)


# -- fine-tuning ------------------------------------------------------------------------------------


def _fine_tune(
    model: Any, images: Sequence[Array], settings: Settings, patches: Settings | None, crops: Settings | None
) -> dict[str, Any]:
    """Fine-tune on patches and then on crops, each with arguments of `fine_tune` or None; return losses and times."""
    row: dict[str, Any] = {}
    for objective, given in (("patches", patches), ("images", crops)):
        if given is None:
            continue
        given = {**given, **(_TINY_TUNING if settings["tiny"] else {})}
        began = time.perf_counter()
        model.fine_tune(images, TrainingStep(objective, **given))
        row[f"{objective}_loss"] = [round(1e6 * each["loss"], 3) for each in model.history_[-given["n_epochs"] :]]
        row[f"{objective}_seconds"] = round(time.perf_counter() - began, 1)
        say(f"  {objective}: {row[f'{objective}_seconds']} s, loss {row[f'{objective}_loss'][-1]}")
    return row


def choose(settings: Settings, place: Place) -> Outcome:
    """A candidate, judged by the held-out images of T91."""
    images, held_out = split_t91(place.data_dir)
    described = SETTINGS[settings["setting"]]
    model = _start(settings["start"], 2, images, place, tiny=settings["tiny"], cd=settings["cd"], **described)
    row: dict[str, Any] = {"held_out_cd": literature(model, held_out)}
    row |= _fine_tune(model, images, settings, settings["patches"], None)
    row["held_out_patches"] = literature(model, held_out)
    row |= _fine_tune(model, images, settings, None, settings["crops"])
    row |= {"held_out": literature(model, held_out), "parameters": model.machine_.n_parameters}
    return Outcome(row, machine=model)


def _best(rows: Mapping[str, Any], names: Sequence[str], otherwise: str) -> str:
    """Return the cell with the highest PSNR on its held-out images, `otherwise` where none is stored."""
    stored = [name for name in names if name in rows]
    return max(stored, key=lambda name: float(rows[name]["held_out"][0]), default=otherwise)


def chosen(place: Place) -> str:
    """Return the best setting whose weights are small enough."""
    names = [name for name, settings in SETTINGS.items() if settings["rank"] <= MOST_RANK]
    return _best(rows_of(place).rows("choose"), names, "p10 h32 R16")


def tested(model: Any, data_dir: str | None) -> dict[str, Any]:
    """Return all measures of a finished model."""
    if not has_files(data_dir):
        say("  Set5 and Lena are not on this machine: not measured")
        return {}
    images, first = set5(data_dir), lena(data_dir)
    row = {"set5": literature(model, images), "set5_ensemble": literature(model, images, self_ensemble=True)}
    row |= {"lena_paper": paper_protocol(model, first), "lena_literature": literature(model, [first])}
    rounds, model.back_projection = model.back_projection, 0
    row |= {
        "set5_no_back_projection": literature(model, images),
        "lena_paper_no_back_projection": paper_protocol(model, first),
    }
    model.back_projection = rounds
    return row


def t91(settings: Settings, place: Place) -> Outcome:
    """The chosen setting on all of T91, at one scale: CD-1, then fine-tuning."""
    scale, setting, images = settings["scale"], chosen(place), _images_of("T91", place)
    row: dict[str, Any] = {"setting": setting, "bicubic": literature(Bicubic(scale), set5(place.data_dir))}
    described = SETTINGS[setting] if scale == 2 else LARGER[scale]
    model = _start(f"x{scale} T91 {setting}", scale, images, place, tiny=settings["tiny"], **described)
    row["cd"] = tested(model, place.data_dir)
    row |= _fine_tune(model, images, settings, PATCHES, FINAL if scale == 2 else CROPS)
    row |= {**tested(model, place.data_dir), "parameters": model.machine_.n_parameters}
    return Outcome(row, machine=model)


# -- cells ------------------------------------------------------------------------------------------

# Differences from the plain candidate of a setting, by name.
_VARIANTS: dict[str, dict[str, Any]] = {
    **{name: {"setting": name} for name in SETTINGS},
    "p10 h24 R16, rate 3e-3": {"setting": "p10 h24 R16", "crops": {**CROPS, "learning_rate": 3e-3}},
    "p10 h24 R16, no patches": {"setting": "p10 h24 R16", "patches": None},
    "p10 h24 R16, no CD": {"setting": "p10 h24 R16", "start": "p10 h24 R16, no CD", "cd": 0},
    "p10 h24 R16, 4 times the crops": {"setting": "p10 h24 R16", "crops": {**CROPS, "n_samples": 80_000}},
}


def cells(place: Place, *, tiny: bool = False) -> Iterator[Cell]:
    """Return all cells that train.

    The group `starts` depends on the chosen setting.

    Parameters
    ----------
    place : Place
        Where they are computed.
    tiny : bool
        Whether to train too little to learn anything, to try the code.
    """
    setting = chosen(place)
    starts: list[tuple[str, int, str, dict[str, Any], int]]
    starts = [(name, 2, "T91, part", described, 5) for name, described in SETTINGS.items()]
    starts += [("p10 h24 R16, no CD", 2, "T91, part", SETTINGS["p10 h24 R16"], 0)]
    for scale, described in ({2: SETTINGS[setting]} | LARGER).items():
        starts.append((f"x{scale} T91 {setting}", scale, "T91", described, 5))
    for name, scale, kind, described, cd in starts:
        settings = {"name": name, "scale": scale, "images": kind, "model": described, "cd": cd, "tiny": tiny}
        yield Cell(name, "starts", start, settings)
    sizes = [(patch, 20) for patch in (15, 10, 20, 30, 35)] + [(15, hidden) for hidden in (5, 10, 15, 25, 30, 40)]
    for patch, hidden in sizes:
        settings = {"patch": patch, "hidden": hidden, "tiny": tiny}
        yield Cell(f"patch {patch}, hidden {hidden}", "paper", paper, settings)
    for name, changes in _VARIANTS.items():
        plain = {"start": changes["setting"], "cd": 5, "patches": PATCHES, "crops": CROPS, "tiny": tiny}
        yield Cell(name, "choose", choose, {**plain, **changes})
    for scale in (2, 3, 4):
        yield Cell(f"x{scale}", "t91", t91, {"scale": scale, "tiny": tiny})
