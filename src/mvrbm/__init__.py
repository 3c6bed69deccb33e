"""Structured Boltzmann machines for array data.

Layers are arrays, couplings are structured linear maps: :class:`BoltzmannMachine` puts them together. Units and
couplings are in `mvrbm.units` and `mvrbm.couplings`, sampling and likelihoods in `mvrbm.sampling` and
`mvrbm.likelihood`, training in `mvrbm.training`, scikit-learn estimators in `mvrbm.estimators`. This module only
re-exports their public names, and loads models.
"""

import importlib
import os
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch

    from mvrbm.couplings import *  # noqa: F403
    from mvrbm.estimators import *  # noqa: F403
    from mvrbm.hub import ModelCard as ModelCard
    from mvrbm.hub import push_to_hub as push_to_hub
    from mvrbm.hub import save_pretrained as save_pretrained
    from mvrbm.machine import BoltzmannMachine as BoltzmannMachine
    from mvrbm.random import RandomSource as RandomSource
    from mvrbm.saving import save as save
    from mvrbm.units import *  # noqa: F403

__version__ = "0.2.0"

# Names are imported when they are first used: a version or a help text does not need PyTorch.
_HOMES = {
    "mvrbm.estimators": (
        "MMVRBM", "MVRBM", "RBM", "TVRBM", "ClassificationMVRBM", "DeepMVRBM", "DeepMVRBMClassifier",
        "MVRBMClassifier", "MVRBMImputer", "MVRBMOutlierDetector", "ReplicatedSoftmax", "Sweep",
    ),
    "mvrbm.hub": ("ModelCard", "push_to_hub", "save_pretrained"),
    "mvrbm.machine": ("BoltzmannMachine",),
    "mvrbm.random": ("RandomSource",),
    "mvrbm.saving": ("save",),
}  # fmt: skip
_HOME_OF = {name: home for home, names in _HOMES.items() for name in names}
_CLASSES_IN = ("mvrbm.units", "mvrbm.couplings")  # all classes that these packages export
_WITH_LOADERS = ("mvrbm.estimators", "mvrbm.training", "mvrbm.vision.super_resolution", "mvrbm.vision.photo_denoising")
_SUBMODULES = (
    "backends", "couplings", "data", "devices", "distributed", "errors", "estimators", "export", "hub", "io",
    "likelihood", "machine", "models", "pages", "random", "sampling", "saving", "training", "units", "updates",
    "vision",
)  # fmt: skip


def load(folder: str | os.PathLike[str], device: "str | torch.device" = "auto") -> Any:
    """Load whatever was saved in a folder, comes with this package, or is on the Hugging Face hub.

    Parameters
    ----------
    folder : path or str
        A folder written by :func:`mvrbm.save`, by the `save` method of an estimator, or by checkpoints. If there is no
        folder `user`, the text ``"user/name"`` or ``"user/name@revision"`` names a model on the Hugging Face hub, which
        is downloaded; this needs ``pip install 'mvrbm[hub]'``. If there is no such folder, ``"digits"`` and
        ``"labeled-digits"`` are trained models of handwritten digits that come with this package.
    device : str or torch.device
        The device of the model: ``"auto"`` (a GPU if there is one), ``"cpu"``, ``"cuda"``, ...

    Returns
    -------
    BoltzmannMachine, estimator, or Trainer
        A machine, estimator, classifier, stack or super-resolver of the class that was saved. For a checkpoint, or a
        folder of checkpoints (the newest is taken), a :class:`~mvrbm.training.Trainer` that can continue.

    Raises
    ------
    StorageError
        If the folder does not hold a model that this version can read. The message says why.

    Examples
    --------
    >>> import mvrbm
    >>> mvrbm.load("digits", device="cpu").sample(2, steps=1).shape
    (2, 28, 28)
    """
    for home in _WITH_LOADERS:  # their classes register themselves
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
