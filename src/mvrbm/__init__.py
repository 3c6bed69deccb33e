"""Structured Boltzmann machines for array data.

Layers are arrays, couplings are structured linear maps: :class:`BoltzmannMachine` puts them together.
Units and couplings are in `mvrbm.units` and `mvrbm.couplings`, what one does with a machine in
`mvrbm.sampling` and `mvrbm.likelihood`, named models in `mvrbm.models`.
"""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from mvrbm.couplings import CP, MPO, Coupling, Dense, Kronecker
    from mvrbm.estimators.classifiers import ClassificationMVRBM, DeepMVRBMClassifier, MVRBMClassifier
    from mvrbm.estimators.deep import DeepMVRBM
    from mvrbm.estimators.rbm import MMVRBM, MVRBM, RBM, TVRBM
    from mvrbm.machine import BoltzmannMachine
    from mvrbm.random import RandomSource, Recorder, Replay
    from mvrbm.saving import from_pretrained, save_pretrained
    from mvrbm.units import Bernoulli, Categorical, Gaussian, Rectified, Unit

__version__ = "0.1.0"

# Imported when first asked for: what only needs a version or a help text need not wait for PyTorch.
_HOMES = {
    "mvrbm.couplings": ("CP", "MPO", "Coupling", "Dense", "Kronecker"),
    "mvrbm.estimators": (
        "ClassificationMVRBM",
        "DeepMVRBM",
        "DeepMVRBMClassifier",
        "MMVRBM",
        "MVRBM",
        "MVRBMClassifier",
        "RBM",
        "Sweep",
        "TVRBM",
    ),
    "mvrbm.machine": ("BoltzmannMachine",),
    "mvrbm.random": ("RandomSource", "Recorder", "Replay"),
    "mvrbm.saving": ("from_pretrained", "save_pretrained"),
    "mvrbm.units": ("Bernoulli", "Categorical", "Gaussian", "Rectified", "Unit"),
}
_HOME_OF = {name: home for home, names in _HOMES.items() for name in names}


_SUBMODULES = (
    "couplings",
    "estimators",
    "export",
    "io",
    "learning",
    "likelihood",
    "models",
    "random",
    "sampling",
    "saving",
    "units",
    "vision",
)


def __getattr__(name: str) -> Any:
    import importlib

    if name in _SUBMODULES:
        return importlib.import_module(f"mvrbm.{name}")
    if name not in _HOME_OF:
        raise AttributeError(f"module 'mvrbm' has no attribute '{name}'")
    return getattr(importlib.import_module(_HOME_OF[name]), name)


def __dir__() -> list[str]:
    return sorted([*globals(), *__all__])


__all__ = [
    "CP",
    "MMVRBM",
    "MPO",
    "MVRBM",
    "RBM",
    "TVRBM",
    "Bernoulli",
    "BoltzmannMachine",
    "Categorical",
    "ClassificationMVRBM",
    "Coupling",
    "DeepMVRBM",
    "DeepMVRBMClassifier",
    "Dense",
    "Gaussian",
    "Kronecker",
    "MVRBMClassifier",
    "RandomSource",
    "Recorder",
    "Rectified",
    "Replay",
    "Unit",
    "from_pretrained",
    "save_pretrained",
]
