"""Sharing models: folders in the layout of the Hugging Face hub, with a model card, and the way to the hub and back.

It also finds the models that come with the package, which are such folders.
Uploads and downloads go through the package `huggingface_hub`, the extra ``hub``. Only the files of a model are
downloaded, and :mod:`mvrbm.saving` reads and checks them as it reads any other folder.
"""

import json
import math
import os
import re
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from safetensors import safe_open

from mvrbm.errors import StorageError
from mvrbm.extras import require
from mvrbm.io.atomic import recover_folder
from mvrbm.machine import BoltzmannMachine
from mvrbm.saving import (
    CARD,
    CARD_MARK,
    CHAINS,
    CONFIG,
    ESTIMATOR,
    MODEL,
    STACK,
    read_config,
    replace_model,
    write_machine,
)

__all__ = ["SHIPPED", "ModelCard", "download", "find", "is_hub_name", "push_to_hub", "save_pretrained", "write_card"]

#: Names of the trained models that come with the package.
SHIPPED = ("digits", "labeled-digits")

_WEIGHTS = Path(__file__).parent / "weights"
_FILES = (CONFIG, MODEL, CHAINS)
_LARGEST_DOWNLOAD = 2**30
_NAME = re.compile(r"[\w-][\w.-]*/[\w-][\w.-]*(@[\w./-]+)?", re.ASCII)  # user/name, user/name@revision
_NOT_STATED = "Not stated."


@dataclass(frozen=True, kw_only=True)
class ModelCard:
    """What a model card says about a model in addition to its layers and settings, which are read from the model.

    Parameters
    ----------
    name : str, optional
        The title. Default: the name on the hub, or the class of the model.
    description : str
        What the model is for.
    data : str
        The data that the model was trained on.
    license : str, optional
        License of the weights by its name on the hub, such as ``"bsd-3-clause"`` or ``"cc-by-4.0"``.
    figures : mapping of str to value
        Measured figures by name, such as ``{"test log-likelihood (nats)": -84.6}``. Name the data and the command.

    Examples
    --------
    >>> from mvrbm import ModelCard
    >>> ModelCard(name="Digits", license="bsd-3-clause").data
    'Not stated.'
    """

    name: str | None = None
    description: str = ""
    data: str = _NOT_STATED
    license: str | None = None
    figures: Mapping[str, Any] = field(default_factory=dict)


def save_pretrained(model: Any, folder: str | os.PathLike[str], **card: Any) -> Path:
    """Save a machine or an estimator with a model card, in the layout of the Hugging Face hub, and return the folder.

    Parameters
    ----------
    model : BoltzmannMachine or estimator
        What to save; see :func:`mvrbm.save`.
    folder : path
        The folder to write. A model in it is replaced, with its card.
    **card
        Contents of the card `README.md`: `name`, `description`, `data`, `license`, `figures`; see :class:`ModelCard`.

    Returns
    -------
    pathlib.Path
        The folder.

    Examples
    --------
    >>> import tempfile
    >>> import mvrbm
    >>> with tempfile.TemporaryDirectory() as place:
    ...     folder = mvrbm.save_pretrained(mvrbm.models.rbm(6, 3), f"{place}/model", name="Example")
    ...     sorted(path.name for path in folder.iterdir())
    ['README.md', 'config.json', 'model.safetensors']
    """
    if isinstance(model, BoltzmannMachine):
        with replace_model(folder) as staging:
            write_machine(model, staging)
            write_card(ModelCard(**card), staging)
    elif callable(getattr(model, "save_pretrained", None)):
        model.save_pretrained(folder, **card)
    else:
        raise StorageError(f"a {type(model).__name__} cannot be saved: it is neither a machine nor an estimator")
    return Path(folder)


def push_to_hub(model: Any, name: str, *, private: bool = False, message: str = "Upload model", **card: Any) -> str:
    """Upload a machine or an estimator with a model card to the Hugging Face hub, and return the address of the commit.

    Parameters
    ----------
    model : BoltzmannMachine or estimator
        What to upload.
    name : str
        Name on the hub, ``"user/name"``. The repository is created unless it exists; a model in it is replaced.
    private : bool
        Whether only you can see a repository that is created.
    message : str
        Message of the commit.
    **card
        Contents of the card; see :class:`ModelCard`.

    Returns
    -------
    str
        The address of the commit.

    Notes
    -----
    `huggingface_hub` takes your access token from ``hf auth login`` or from the environment variable ``HF_TOKEN``.
    """
    hub = require("huggingface_hub", "the Hugging Face hub", "hub")
    with tempfile.TemporaryDirectory() as place:
        folder = save_pretrained(model, Path(place, "model"), **{"name": name, **card})
        api = hub.HfApi(library_name="mvrbm")
        try:
            api.create_repo(name, private=private, exist_ok=True)
            # Files of an earlier model that this one does not have are deleted.
            commit = api.upload_folder(
                repo_id=name, folder_path=folder, delete_patterns=list(_FILES), commit_message=message
            )
        except Exception as error:  # those of the HTTP library, which depends on the version of huggingface_hub
            raise StorageError(f"'{name}' could not be uploaded to the Hugging Face hub: {_reason(error)}") from error
    return str(commit.commit_url)


def find(model: str | os.PathLike[str]) -> Path:
    """Return the folder of a model: a path, a name on the hub, or the name of a model that comes with the package.

    A folder here of that name comes first.
    """
    if model == "":
        raise StorageError("the name of the model is empty: give a folder, or the name of a model")
    if is_hub_name(model):
        return download(str(model))
    folder = recover_folder(Path(model))
    if folder.exists():
        return folder
    if str(model) in SHIPPED:
        return _WEIGHTS / model
    raise StorageError(f"{folder} is not a model folder: nothing is there; mvrbm has the models {', '.join(SHIPPED)}")


def is_hub_name(model: str | os.PathLike[str]) -> bool:
    """Return whether the argument of :func:`mvrbm.load` names a model on the hub.

    It does if it is a text of the form ``"user/name"``, and there is no folder ``user``: a mistyped path of a local
    model is not searched on the hub.
    """
    return isinstance(model, str) and _NAME.fullmatch(model) is not None and not os.path.lexists(Path(model).parent)


def download(name: str) -> Path:
    """Download a model ``"user/name"`` or ``"user/name@revision"`` into the cache of the hub, and return its folder.

    A model that is in the cache, and has not changed on the hub, is not downloaded again. Without a network, the model
    in the cache is taken.
    """
    hub = require("huggingface_hub", f"there is no folder '{name}', and the Hugging Face hub", "hub")
    repository, _, revision = name.partition("@")
    try:
        found = hub.HfApi(library_name="mvrbm").model_info(repository, revision=revision or None, files_metadata=True)
    except (hub.errors.HfHubHTTPError, ValueError) as error:  # the answer of the hub, or not a name
        raise _not_loaded(name, error) from error
    except (
        Exception
    ) as error:  # no answer; the HTTP library, which raises it, depends on the version of huggingface_hub
        try:
            return Path(hub.snapshot_download(repository, revision=revision or None, local_files_only=True))
        except FileNotFoundError:
            raise _not_loaded(name, error) from error
    sizes = {file.rfilename: file.size or 0 for file in found.siblings or () if file.rfilename in _FILES}
    if not {CONFIG, MODEL} <= set(sizes):
        raise StorageError(
            f"'{name}' on the Hugging Face hub is not a model of this package: it lacks {CONFIG} or {MODEL}"
        )
    if sum(sizes.values()) > _LARGEST_DOWNLOAD:
        raise StorageError(
            f"'{name}' on the Hugging Face hub has {sum(sizes.values()):,} bytes, beyond the limit of "
            f"{_LARGEST_DOWNLOAD:,}: if you trust it, download it with hf download, and load the folder"
        )
    try:
        return Path(hub.snapshot_download(repository, revision=found.sha, allow_patterns=list(sizes)))
    except Exception as error:  # as above
        raise _not_loaded(name, error) from error


def _not_loaded(name: str, error: Exception) -> StorageError:
    return StorageError(f"there is no folder '{name}', and the Hugging Face hub does not give it: {_reason(error)}")


def _reason(error: Exception) -> str:
    return " ".join(str(error).split())[:300] or type(error).__name__


# -- the card ---------------------------------------------------------------------------------------


def write_card(card: ModelCard, folder: Path) -> None:
    """Write the model card of a folder that holds a model."""
    (folder / CARD).write_text("\n".join(_lines(card, folder)) + "\n", encoding="utf-8")


def _lines(card: ModelCard, folder: Path) -> Iterator[str]:
    config = read_config(folder)
    described = config.get(ESTIMATOR, {})
    kind = described.get("class", BoltzmannMachine.__name__)
    with safe_open(folder / MODEL, framework="pt") as file:
        n_parameters = sum(math.prod(file.get_slice(key).get_shape()) for key in file.keys())  # noqa: SIM118
    machines = config.get(STACK, [config])
    yield from ("---", CARD_MARK, *([f"license: {json.dumps(card.license)}"] if card.license else []))
    yield from ('tags: ["boltzmann-machine", "energy-based-model"]', "---", "", f"# {card.name or kind}", "")
    yield from ([card.description, ""] if card.description else [])
    yield from (
        "## Model",
        "",
        f"`{kind}` of the Python package mvrbm: {n_parameters:,} parameters, {machines[0]['dtype']}.",
        "",
    )
    yield from _table(("layer", "units", "shape", "coupling to the layer above"), _layers(machines))
    settings = [
        f"`{key}={json.dumps(value)}`" for key, value in described.get("params", {}).items() if value is not None
    ]
    yield from (["", f"Settings: {', '.join(settings)}."] if settings else [])
    yield from ("", "## Data", "", card.data, "", "## License", "", card.license or _NOT_STATED)
    yield from ("", "## Measured figures", "")
    yield from _table(("figure", "value"), card.figures.items()) if card.figures else [_NOT_STATED]
    named = card.name is not None and (card.name in SHIPPED or _NAME.fullmatch(card.name))
    place = card.name if named else "path/of/this/folder"
    yield from ("", "## How to load", "", "```python", "import mvrbm", "", f'model = mvrbm.load("{place}")', "```", "")
    yield "This file was written by `save_pretrained`. Saving another model to this folder replaces it."


def _layers(machines: Sequence[Mapping[str, Any]]) -> Iterator[Sequence[Any]]:
    """Yield the rows of a table: the visible layers from below, each followed by the hidden layer above it."""
    for number, machine in enumerate(machines):
        for name, layer in machine["visible"].items() if number == 0 else ():
            yield name, layer["unit"], _shape(layer), _coupling(machine["couplings"][name])
        hidden = machine["hidden"]
        above = machines[number + 1 : number + 2]
        link = "; ".join(_coupling(link) for upper in above for link in upper["couplings"].values())
        yield f"hidden {number + 1}", hidden["unit"], _shape(hidden), link


def _shape(layer: Mapping[str, Any]) -> str:
    return "x".join(map(str, layer["shape"]))


def _coupling(link: Mapping[str, Any]) -> str:
    options = [f"{key} {value}" for key, value in link.items() if key != "coupling" and value]
    return ", ".join([link["coupling"], *options])


def _table(head: Sequence[str], rows: Any) -> Iterator[str]:
    for row in (head, ["---"] * len(head), *rows):
        yield "| " + " | ".join(" ".join(str(cell).split()).replace("|", "\\|") for cell in row) + " |"
