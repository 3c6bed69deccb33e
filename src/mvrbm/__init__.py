"""Structured Boltzmann machines for array data.

Layers are arrays, couplings are structured linear maps: :class:`BoltzmannMachine` puts them together.
Units and couplings are in `mvrbm.units` and `mvrbm.couplings`, what one does with a machine in
`mvrbm.sampling` and `mvrbm.likelihood`, named models in `mvrbm.models`.
"""

from typing import TYPE_CHECKING, Any

from mvrbm.couplings import CP, MPO, Coupling, Dense, Kronecker
from mvrbm.machine import BoltzmannMachine
from mvrbm.noise import Noise, Recorder, Replay
from mvrbm.units import Bernoulli, Categorical, Gaussian, Unit

if TYPE_CHECKING:
    from mvrbm.estimators import MMVRBM, MVRBM, RBM, TVRBM
    from mvrbm.storage import from_pretrained, save_pretrained

__version__ = "0.1.0"

# Found when first asked for: scikit-learn alone would take longer to import than the rest together.
_LATER = {
    "MMVRBM": "mvrbm.estimators",
    "MVRBM": "mvrbm.estimators",
    "RBM": "mvrbm.estimators",
    "TVRBM": "mvrbm.estimators",
    "from_pretrained": "mvrbm.storage",
    "save_pretrained": "mvrbm.storage",
}


def __getattr__(name: str) -> Any:
    if name in _LATER:
        import importlib

        return getattr(importlib.import_module(_LATER[name]), name)
    raise AttributeError(f"module 'mvrbm' has no attribute '{name}'")


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
    "Coupling",
    "Dense",
    "Gaussian",
    "Kronecker",
    "Noise",
    "Recorder",
    "Replay",
    "Unit",
    "from_pretrained",
    "save_pretrained",
]
