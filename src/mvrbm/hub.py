"""Share models on the Hugging Face hub, write model cards, and find the models that ship with the package.

The package `huggingface_hub` (the extra ``hub``) uploads, downloads and caches files. Writing a folder with a model
card does not need it. Only the files of a model are downloaded, and :mod:`mvrbm.saving` reads and checks them like any
other model folder.
"""

import json
import math
import os
import re
import tempfile
from collections.abc import Iterable, Iterator, Mapping, Sequence
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

#: Names of the trained models that ship with the package.
SHIPPED = ("digits", "labeled-digits")

_WEIGHTS = Path(__file__).parent / "weights"
# Files of a model, the only ones that are downloaded.
_FILES = (CONFIG, MODEL, CHAINS)
# Largest model, in bytes, that is downloaded.
_LARGEST_DOWNLOAD = 2**30
# Names on the hub: "user/name" or "user/name@revision".
_NAME = re.compile(r"[\w-][\w.-]*/[\w-][\w.-]*(@[\w./-]+)?", re.ASCII)
_NOT_STATED = "Not stated."


@dataclass(frozen=True, kw_only=True)
class ModelCard:
    """Information for a model card that cannot be read from the model itself.

    Parameters
    ----------
    name : str, optional
        Title of the card. Default: the name on the hub, or the class of the model.
    description : str
        Purpose of the model.
    data : str
        Description of the training data.
    license : str, optional
        License of the weights, as the hub spells it, such as ``"bsd-3-clause"`` or ``"cc-by-4.0"``.
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
    """Save a machine or an estimator with a model card, in the layout of the Hugging Face hub.

    Parameters
    ----------
    model : BoltzmannMachine or estimator
        The model to save; see :func:`mvrbm.save`.
    folder : path
        The folder to write. A model that it holds is replaced together with its card.
    **card
        Contents of the card `README.md`: `name`, `description`, `data`, `license` and `figures`; see
        :class:`ModelCard`.

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
    """Upload a machine or an estimator with a model card to the Hugging Face hub.

    Parameters
    ----------
    model : BoltzmannMachine or estimator
        The model to upload.
    name : str
        Name on the hub, ``"user/name"``. The repository is created if it does not exist. A model in it is replaced.
    private : bool
        Whether to create a private repository. Has no effect on a repository that exists.
    message : str
        Commit message.
    **card
        Contents of the card; see :class:`ModelCard`.

    Returns
    -------
    str
        The URL of the commit.

    Notes
    -----
    Run ``hf auth login``, or set the environment variable ``HF_TOKEN``, to provide your access token.
    """
    hub = require("huggingface_hub", "the Hugging Face hub", "hub")
    with tempfile.TemporaryDirectory() as place:
        folder = save_pretrained(model, Path(place, "model"), **{"name": name, **card})
        api = hub.HfApi(library_name="mvrbm")
        try:
            api.create_repo(name, private=private, exist_ok=True)
            commit = api.upload_folder(
                repo_id=name,
                folder_path=folder,
                delete_patterns=list(_FILES),  # An earlier model may have files that this one does not have.
                commit_message=message,
            )
        except Exception as error:  # The HTTP library, whose errors these are, depends on the huggingface_hub version.
            raise StorageError(f"'{name}' could not be uploaded to the Hugging Face hub: {_reason(error)}") from error
    return str(commit.commit_url)


def find(model: str | os.PathLike[str]) -> Path:
    """Return the folder of a model.

    `model` is the path of a folder, a name on the hub, or the name of a model that ships with the package. A folder of
    the same name takes precedence over a shipped model.
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

    A string ``"user/name"`` names a model on the hub unless there is a folder ``user``. This way, mistyped paths of
    local models are not looked up on the hub.
    """
    return isinstance(model, str) and _NAME.fullmatch(model) is not None and not os.path.lexists(Path(model).parent)


def download(name: str) -> Path:
    """Download a model ``"user/name"`` or ``"user/name@revision"`` from the hub, and return its folder.

    The folder is in the cache of the hub. A cached model is downloaded again only if it has changed on the hub, and is
    used unchanged if there is no network.
    """
    hub = require("huggingface_hub", f"there is no folder '{name}', and the Hugging Face hub", "hub")
    repository, _, revision = name.partition("@")
    try:
        _check_files(name, hub.HfApi(library_name="mvrbm"), repository, revision or None)
    except StorageError:
        raise
    except (hub.errors.HfHubHTTPError, ValueError) as error:  # The hub refuses, or the name is not valid.
        raise _not_loaded(name, error) from error
    except Exception:  # There is no network, but `snapshot_download` may find the model in the cache.
        pass
    try:
        return Path(hub.snapshot_download(repository, revision=revision or None, allow_patterns=list(_FILES)))
    except Exception as error:
        raise _not_loaded(name, error) from error


def _check_files(name: str, api: Any, repository: str, revision: str | None) -> None:
    """Raise StorageError if a repository lacks a file of a model, or if its model is too large to download."""
    found = api.model_info(repository, revision=revision, files_metadata=True)
    sizes = {file.rfilename: file.size or 0 for file in found.siblings or () if file.rfilename in _FILES}
    if not {CONFIG, MODEL} <= set(sizes):
        raise StorageError(
            f"'{name}' on the Hugging Face hub is not a model of this package: it lacks {CONFIG} or {MODEL}"
        )
    total = sum(sizes.values())
    if total > _LARGEST_DOWNLOAD:
        raise StorageError(
            f"'{name}' on the Hugging Face hub has {total:,} bytes, beyond the limit of {_LARGEST_DOWNLOAD:,}: if you "
            "trust it, download it with hf download, and load the folder"
        )


def _not_loaded(name: str, error: Exception) -> StorageError:
    return StorageError(f"there is no folder '{name}', and the Hugging Face hub does not give it: {_reason(error)}")


def _reason(error: Exception) -> str:
    return " ".join(str(error).split())[:300] or type(error).__name__


# -- the card ---------------------------------------------------------------------------------------


def write_card(card: ModelCard, folder: Path) -> None:
    """Write the model card of a folder that holds a model."""
    config = read_config(folder)
    estimator = config.get(ESTIMATOR, {})
    kind = estimator.get("class", BoltzmannMachine.__name__)
    machines = config.get(STACK, [config])
    license_entry = f"license: {json.dumps(card.license)}\n" if card.license else ""
    sections = [
        f'---\n{CARD_MARK}\n{license_entry}tags: ["boltzmann-machine", "energy-based-model"]\n---',
        f"# {card.name or kind}",
        card.description,
        "## Model",
        f"`{kind}` of the Python package mvrbm: {_n_parameters(folder):,} parameters, {machines[0]['dtype']}.",
        _table(("layer", "units", "shape", "coupling to the layer above"), _layers(machines)),
        _settings(estimator.get("params", {})),
        "## Data",
        card.data,
        "## License",
        card.license or _NOT_STATED,
        "## Measured figures",
        _table(("figure", "value"), card.figures.items()) if card.figures else _NOT_STATED,
        "## How to load",
        f'```python\nimport mvrbm\n\nmodel = mvrbm.load("{_loadable_name(card)}")\n```',
        "This file was written by `save_pretrained`. Saving another model to this folder replaces it.",
    ]
    text = "\n\n".join(section for section in sections if section)
    (folder / CARD).write_text(text + "\n", encoding="utf-8")


def _n_parameters(folder: Path) -> int:
    with safe_open(folder / MODEL, framework="pt") as file:
        return sum(math.prod(file.get_slice(key).get_shape()) for key in file.keys())  # noqa: SIM118


def _settings(params: Mapping[str, Any]) -> str:
    given = [f"`{key}={json.dumps(value)}`" for key, value in params.items() if value is not None]
    return f"Settings: {', '.join(given)}." if given else ""


def _loadable_name(card: ModelCard) -> str:
    """Return the title of the card if :func:`mvrbm.load` accepts it, otherwise a placeholder."""
    if card.name is not None and (card.name in SHIPPED or _NAME.fullmatch(card.name)):
        return card.name
    return "path/of/this/folder"


def _layers(machines: Sequence[Mapping[str, Any]]) -> Iterator[Sequence[str]]:
    """Yield one row per layer: the visible layers of the bottom machine, then the hidden layer of each machine."""
    bottom = machines[0]
    for name, layer in bottom["visible"].items():
        yield name, layer["unit"], _shape(layer), _coupling(bottom["couplings"][name])
    for number, machine in enumerate(machines, start=1):
        above = machines[number]["couplings"].values() if number < len(machines) else ()
        hidden = machine["hidden"]
        yield f"hidden {number}", hidden["unit"], _shape(hidden), "; ".join(_coupling(link) for link in above)


def _shape(layer: Mapping[str, Any]) -> str:
    return "x".join(map(str, layer["shape"]))


def _coupling(link: Mapping[str, Any]) -> str:
    options = [f"{key} {value}" for key, value in link.items() if key != "coupling" and value]
    return ", ".join([link["coupling"], *options])


def _table(header: Sequence[str], rows: Iterable[Sequence[Any]]) -> str:
    """Format a table in Markdown."""
    lines = (header, ["---"] * len(header), *rows)
    return "\n".join(f"| {' | '.join(_cell(value) for value in line)} |" for line in lines)


def _cell(value: Any) -> str:
    return " ".join(str(value).split()).replace("|", "\\|")
