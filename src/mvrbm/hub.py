"""Share models on the Hugging Face Hub, and locate the models included in this package.

The `huggingface_hub` package (extra ``hub``) uploads, downloads and caches files. It is not required for writing a
folder with a model card. Only the files that make up a model are downloaded. :mod:`mvrbm.saving` then reads and
validates the downloaded folder like any other model folder.
"""

import os
import tempfile
import warnings
from pathlib import Path
from typing import Any

from mvrbm.card_signature import is_unedited_card
from mvrbm.errors import StorageError
from mvrbm.extras import require
from mvrbm.io.atomic import recover_folder
from mvrbm.machine import BoltzmannMachine
from mvrbm.model_card import HUB_NAME, SHIPPED, ModelCard, write_card
from mvrbm.saving import CARD, CHAINS, CONFIG, MODEL, replace_model, write_machine

__all__ = ["download", "find", "is_hub_name", "push_to_hub", "save_pretrained"]

_WEIGHTS = Path(__file__).parent / "weights"
# Files that make up a model. No other files are downloaded.
_FILES = (CONFIG, MODEL, CHAINS)
# Maximum size of a downloaded model in bytes.
_LARGEST_DOWNLOAD = 2**30


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
        already contains a model, the model is replaced. A model card that was edited is kept.
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
            edited = _has_edited_card(api, name)
            commit = api.upload_folder(
                repo_id=name,
                folder_path=folder,
                delete_patterns=list(_FILES),  # An earlier model may have files that this model does not have.
                ignore_patterns=[CARD] if edited else None,
                commit_message=message,
            )
        except Exception as error:  # The exception types depend on the version of huggingface_hub.
            raise StorageError(f"'{name}' could not be uploaded to the Hugging Face Hub: {_reason(error)}") from error
    if edited:
        warnings.warn(f"{CARD} of '{name}' was edited, so it is kept; remove it to have it replaced", stacklevel=2)
    return str(commit.commit_url)


def _has_edited_card(api: Any, name: str) -> bool:
    """Return whether a repository on the Hub has a model card that was edited."""
    if not api.file_exists(name, CARD):
        return False
    return not is_unedited_card(Path(api.hf_hub_download(name, CARD)).read_text(encoding="utf-8", errors="replace"))


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
    return isinstance(model, str) and HUB_NAME.fullmatch(model) is not None and not os.path.lexists(Path(model).parent)


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
