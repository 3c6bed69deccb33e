"""Share models on the Hugging Face Hub, write model cards, and locate the models included in this package.

The `huggingface_hub` package (extra ``hub``) uploads, downloads and caches files. It is not required for writing a
folder with a model card. Only the files that make up a model are downloaded. :mod:`mvrbm.saving` then reads and
validates the downloaded folder like any other model folder.
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
    CHAINS,
    CONFIG,
    ESTIMATOR,
    MODEL,
    STACK,
    read_config,
    replace_model,
    signed_card,
    write_machine,
)

__all__ = ["SHIPPED", "ModelCard", "download", "find", "is_hub_name", "push_to_hub", "save_pretrained", "write_card"]

#: Names of the trained models included in the package.
SHIPPED = ("digits", "labeled-digits")

_WEIGHTS = Path(__file__).parent / "weights"
# Files that make up a model. No other files are downloaded.
_FILES = (CONFIG, MODEL, CHAINS)
# Maximum size of a downloaded model in bytes.
_LARGEST_DOWNLOAD = 2**30
# Model name on the Hub: "user/name" or "user/name@revision".
_NAME = re.compile(r"[\w-][\w.-]*/[\w-][\w.-]*(@[\w./-]+)?", re.ASCII)
_NOT_STATED = "Not stated."


@dataclass(frozen=True, kw_only=True)
class ModelCard:
    """User-supplied information for a model card, which cannot be derived from the model itself.

    Parameters
    ----------
    name : str, optional
        Title of the card. Default: the model's name on the Hub, or its class name.
    description : str
        Purpose of the model.
    data : str
        Description of the training data.
    license : str, optional
        License for the weights, as a Hugging Face Hub identifier such as ``"bsd-3-clause"`` or ``"cc-by-4.0"``.
    figures : mapping of str to value
        Evaluation results, keyed by name (for example, ``{"test log-likelihood (nats)": -84.6}``). The names should
        state the evaluation data and the command that produced the results.

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


def save_pretrained(model: Any, folder: str | os.PathLike[str], *, overwrite: bool = False, **card: Any) -> Path:
    """Save a machine or an estimator with a model card, in the format used by the Hugging Face Hub.

    Parameters
    ----------
    model : BoltzmannMachine or estimator
        The model to save. See :func:`mvrbm.save`.
    folder : path
        Output folder.
    overwrite : bool
        Whether to replace a model in the folder. See :func:`mvrbm.save`. A model card that was edited is kept.
    **card
        Contents of the model card `README.md`: `name`, `description`, `data`, `license` and `figures`. See
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
    ...     folder = mvrbm.save_pretrained(
    ...         mvrbm.models.rbm(6, 3), f"{place}/model", name="Example"
    ...     )
    ...     sorted(path.name for path in folder.iterdir())
    ['README.md', 'config.json', 'model.safetensors']
    """
    if isinstance(model, BoltzmannMachine):
        with replace_model(folder, overwrite=overwrite) as staging:
            write_machine(model, staging)
            write_card(ModelCard(**card), staging)
    elif callable(getattr(model, "save_pretrained", None)):
        model.save_pretrained(folder, overwrite=overwrite, **card)
    else:
        raise StorageError(f"expected a machine or an estimator, but got an object of type {type(model).__name__}")
    return Path(folder)


def push_to_hub(model: Any, name: str, *, private: bool = False, message: str = "Upload model", **card: Any) -> str:
    """Upload a machine or an estimator with a model card to the Hugging Face Hub.

    Parameters
    ----------
    model : BoltzmannMachine or estimator
        The model to upload.
    name : str
        Repository name on the Hub, in the form ``"user/name"``. The repository is created if it does not exist. If it
        already contains a model, the model is replaced.
    private : bool
        Whether to create a private repository. Has no effect if the repository already exists.
    message : str
        Commit message.
    **card
        Contents of the model card. See :class:`ModelCard`.

    Returns
    -------
    str
        The URL of the commit.

    Notes
    -----
    To provide your access token, run ``hf auth login`` or set the environment variable ``HF_TOKEN``.
    """
    hub = require("huggingface_hub", "the Hugging Face Hub", "hub")
    with tempfile.TemporaryDirectory() as place:
        folder = save_pretrained(model, Path(place, "model"), **{"name": name, **card})
        api = hub.HfApi(library_name="mvrbm")
        try:
            api.create_repo(name, private=private, exist_ok=True)
            commit = api.upload_folder(
                repo_id=name,
                folder_path=folder,
                delete_patterns=list(_FILES),  # An earlier model may have files that this model does not have.
                commit_message=message,
            )
        except Exception as error:  # The exception types depend on the version of huggingface_hub.
            raise StorageError(f"'{name}' could not be uploaded to the Hugging Face Hub: {_reason(error)}") from error
    return str(commit.commit_url)


def find(model: str | os.PathLike[str]) -> Path:
    """Return the folder that contains a model.

    `model` is the path to a folder, a model name on the Hub, or the name of a model included in the package. A local
    folder takes precedence over an included model of the same name.
    """
    if model == "":
        raise StorageError("the model name is empty; specify a model folder or the name of a model")
    if is_hub_name(model):
        return download(str(model))
    folder = recover_folder(Path(model))
    if folder.exists():
        return folder
    if str(model) in SHIPPED:
        return _WEIGHTS / model
    raise StorageError(f"{folder} does not exist and is not the name of an included model ({', '.join(SHIPPED)})")


def is_hub_name(model: str | os.PathLike[str]) -> bool:
    """Return whether an argument to :func:`mvrbm.load` refers to a model on the Hub.

    A string ``"user/name"`` refers to a model on the Hub unless a folder ``user`` exists. The check for this folder
    prevents mistyped paths to local models from being looked up on the Hub.
    """
    return isinstance(model, str) and _NAME.fullmatch(model) is not None and not os.path.lexists(Path(model).parent)


def download(name: str) -> Path:
    """Download a model ``"user/name"`` or ``"user/name@revision"`` from the Hub and return its folder.

    The folder is in the Hugging Face cache. A cached model is downloaded again only if it has changed on the Hub. If
    the network is not available, the cached model is used.
    """
    hub = require("huggingface_hub", f"there is no folder '{name}', and the Hugging Face Hub", "hub")
    repository, _, revision = name.partition("@")
    try:
        _check_files(name, hub.HfApi(library_name="mvrbm"), repository, revision or None)
    except StorageError:
        raise
    except (hub.errors.HfHubHTTPError, ValueError) as error:  # The Hub rejects the request, or the name is invalid.
        raise _not_loaded(name, error) from error
    except Exception:  # Without a network connection, `snapshot_download` may still find the model in the cache.
        pass
    try:
        return Path(hub.snapshot_download(repository, revision=revision or None, allow_patterns=list(_FILES)))
    except Exception as error:
        raise _not_loaded(name, error) from error


def _check_files(name: str, api: Any, repository: str, revision: str | None) -> None:
    """Raise StorageError if a repository lacks a required model file, or if its model is too large to download."""
    found = api.model_info(repository, revision=revision, files_metadata=True)
    sizes = {file.rfilename: file.size or 0 for file in found.siblings or () if file.rfilename in _FILES}
    if not {CONFIG, MODEL} <= set(sizes):
        raise StorageError(f"'{name}' on the Hugging Face Hub is not an mvrbm model: {CONFIG} or {MODEL} is missing")
    total = sum(sizes.values())
    if total > _LARGEST_DOWNLOAD:
        raise StorageError(
            f"'{name}' on the Hugging Face Hub has {total:,} bytes, which exceeds the limit of {_LARGEST_DOWNLOAD:,}; "
            "if you trust the model, download it with 'hf download' and load the folder"
        )


def _not_loaded(name: str, error: Exception) -> StorageError:
    return StorageError(
        f"there is no folder '{name}', and it cannot be loaded from the Hugging Face Hub: {_reason(error)}"
    )


def _reason(error: Exception) -> str:
    return " ".join(str(error).split())[:300] or type(error).__name__


# -- model card ---------------------------------------------------------------------------------------


def write_card(card: ModelCard, folder: Path) -> None:
    """Write a model card, `README.md`, to a folder that contains a model."""
    config = read_config(folder)
    estimator = config.get(ESTIMATOR, {})
    kind = estimator.get("class", BoltzmannMachine.__name__)
    machines = config.get(STACK, [config])
    license_entry = f"license: {json.dumps(card.license)}\n" if card.license else ""
    sections = [
        f'---\nlibrary_name: mvrbm\n{license_entry}tags: ["boltzmann-machine", "energy-based-model"]\n---',
        f"# {card.name or kind}",
        card.description,
        "## Model",
        f"`{kind}` from the Python package mvrbm: {_n_parameters(folder):,} parameters, {machines[0]['dtype']}.",
        _table(("layer", "units", "shape", "coupling to the layer above"), _layers(machines)),
        _settings(estimator.get("params", {})),
        "## Data",
        card.data,
        "## License",
        card.license or _NOT_STATED,
        "## Evaluation results",
        _table(("figure", "value"), card.figures.items()) if card.figures else _NOT_STATED,
        "## How to load",
        f'```python\nimport mvrbm\n\nmodel = mvrbm.load("{_loadable_name(card)}")\n```',
        "This file was written by `save_pretrained`. Saving another model here replaces it unless you edit it.",
    ]
    text = "\n\n".join(section for section in sections if section)
    (folder / CARD).write_text(signed_card(text + "\n"), encoding="utf-8")


def _n_parameters(folder: Path) -> int:
    with safe_open(folder / MODEL, framework="pt") as file:
        return sum(math.prod(file.get_slice(key).get_shape()) for key in file.keys())  # noqa: SIM118


def _settings(params: Mapping[str, Any]) -> str:
    given = [f"`{key}={json.dumps(value)}`" for key, value in params.items() if value is not None]
    return f"Settings: {', '.join(given)}." if given else ""


def _loadable_name(card: ModelCard) -> str:
    """Return the title of the card if :func:`mvrbm.load` accepts it as a model name, and a placeholder otherwise."""
    if card.name is not None and (card.name in SHIPPED or _NAME.fullmatch(card.name)):
        return card.name
    return "path/to/this/folder"


def _layers(machines: Sequence[Mapping[str, Any]]) -> Iterator[Sequence[str]]:
    """Yield one table row per layer: first the visible layers of the bottom machine, then the hidden layers."""
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
    """Format rows as a Markdown table."""
    lines = (header, ["---"] * len(header), *rows)
    return "\n".join(f"| {' | '.join(_cell(value) for value in line)} |" for line in lines)


def _cell(value: Any) -> str:
    return " ".join(str(value).split()).replace("|", "\\|")
