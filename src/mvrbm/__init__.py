"""Structured Boltzmann machines for array data.

Layers are arrays of units, and couplings are structured linear maps between layers. :class:`BoltzmannMachine` combines
both into a model. Units and couplings are in `mvrbm.units` and `mvrbm.couplings`, sampling and likelihoods in
`mvrbm.sampling` and `mvrbm.likelihood`, training in `mvrbm.training`, and scikit-learn estimators in
`mvrbm.estimators`. This module re-exports the public names of these subpackages and defines :func:`load`.
"""

import importlib
import os
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch

    from mvrbm.couplings import *  # noqa: F403
    from mvrbm.estimators import *  # noqa: F403
    from mvrbm.hub import push_to_hub as push_to_hub
    from mvrbm.hub import save_pretrained as save_pretrained
    from mvrbm.machine import BoltzmannMachine as BoltzmannMachine
    from mvrbm.model_card import ModelCard as ModelCard
    from mvrbm.random import RandomSource as RandomSource
    from mvrbm.saving import save as save
    from mvrbm.units import *  # noqa: F403

__version__ = "0.2.0"

# Public names in each module. They are imported on first use, so that printing the version or a help text does not
# import PyTorch.
_HOMES = {
    "mvrbm.estimators": (
        "MMVRBM", "MVRBM", "RBM", "TVRBM", "ClassificationMVRBM", "DeepMVRBM", "DeepMVRBMClassifier",
        "MVRBMClassifier", "MVRBMImputer", "MVRBMOutlierDetector", "MatrixMixture", "ReplicatedSoftmax",
        "SequenceRBM", "Sweep",
    ),
    "mvrbm.hub": ("push_to_hub", "save_pretrained"),
    "mvrbm.machine": ("BoltzmannMachine",),
    "mvrbm.model_card": ("ModelCard",),
    "mvrbm.random": ("RandomSource",),
    "mvrbm.saving": ("save",),
}  # fmt: skip
_HOME_OF = {name: home for home, names in _HOMES.items() for name in names}
# Packages whose classes are all re-exported.
_CLASSES_IN = ("mvrbm.units", "mvrbm.couplings")
# Modules that register loaders for saved models when they are imported.
_WITH_LOADERS = ("mvrbm.estimators", "mvrbm.training", "mvrbm.vision.super_resolution", "mvrbm.vision.photo_denoising")
_SUBMODULES = (
    "backends", "couplings", "data", "devices", "distributed", "errors", "estimators", "export", "hub", "io",
    "likelihood", "machine", "model_card", "models", "pages", "random", "sampling", "saving", "training", "units",
    "updates", "vision",
)  # fmt: skip


def load(folder: str | os.PathLike[str], device: "str | torch.device" = "auto") -> Any:
    """Load a saved model, a pretrained model, or a model from the Hugging Face Hub.

    Parameters
    ----------
    folder : path or str
        Folder written by :func:`mvrbm.save`, by an estimator's `save` method, or by a checkpoint callback.
        ``"digits"`` and ``"labeled-digits"`` load the pretrained models included in this package, unless a folder with
        that name exists. ``"user/name"`` and ``"user/name@revision"`` download a model from the Hugging Face Hub,
        unless a folder named `user` exists. Downloading requires ``pip install 'mvrbm[hub]'``.
    device : str or torch.device
        Device to load the model on, such as ``"cpu"`` or ``"cuda"``. ``"auto"`` selects a GPU if one is available, and
        the CPU otherwise.

    Returns
    -------
    BoltzmannMachine, estimator, or Trainer
        Object of the class that was saved. For a checkpoint, this is a :class:`~mvrbm.training.Trainer` that can
        resume training. If the folder contains several checkpoints, the most recent one is loaded.

    Notes
    -----
    A loaded estimator has the parameters, the machines, up to 100 persistent chains, and the names of columns and
    classes. The trainer, `history_`, `device`, `verbose` and a `random_state` that is not an integer are not saved, so
    further training does not continue exactly. A trainer loaded from a checkpoint has the recipe, the seed and the
    state, and its `fit` resumes exactly if it gets the same data, number of epochs and callbacks. A checkpoint of a run
    with an optimizer or a scheduler raises `StorageError`; create the same trainer and call its `resume` method.

    Raises
    ------
    StorageError
        If the folder does not contain a model that this version can read. The message says why.

    Examples
    --------
    >>> import mvrbm
    >>> mvrbm.load("digits", device="cpu").sample(2, steps=1).shape
    (2, 28, 28)
    """
    for home in _WITH_LOADERS:  # importing these modules registers their classes
        importlib.import_module(home)
    local = importlib.import_module("mvrbm.hub").find(folder)
    return importlib.import_module("mvrbm.saving").load(local, device)


def __getattr__(name: str) -> Any:
    if name == "__all__":
        return sorted([*_HOME_OF, *_exported_classes(), "load"])
    if name in _SUBMODULES:
        return importlib.import_module(f"mvrbm.{name}")
    if name in _HOME_OF:
        return getattr(importlib.import_module(_HOME_OF[name]), name)
    if name[0].isupper() and name in (classes := _exported_classes()):
        return classes[name]
    raise AttributeError(f"module 'mvrbm' has no attribute '{name}'")


def _exported_classes() -> dict[str, type]:
    entries = {key: value for home in _CLASSES_IN for key, value in vars(importlib.import_module(home)).items()}
    return {name: value for name, value in entries.items() if isinstance(value, type)}


def __dir__() -> list[str]:
    return sorted({*globals(), *_SUBMODULES, *__getattr__("__all__")})
