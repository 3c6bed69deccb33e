"""Structured Boltzmann machines for array data.

Layers are arrays, couplings are structured linear maps: :class:`BoltzmannMachine` puts them together.
Units and couplings are in `mvrbm.units` and `mvrbm.couplings`, what one does with a machine in
`mvrbm.sampling` and `mvrbm.likelihood`, named models in `mvrbm.models`.
"""

from mvrbm.couplings import CP, MPO, Coupling, Dense, Kronecker
from mvrbm.machine import BoltzmannMachine
from mvrbm.noise import Noise, Recorder, Replay
from mvrbm.units import Bernoulli, Categorical, Gaussian, Unit

__version__ = "0.1.0"

__all__ = [
    "CP",
    "MPO",
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
]
