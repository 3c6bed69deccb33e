"""How a visible array meets the hidden array: structured linear maps and their adjoints. No probability here.

A new coupling is one file here, one line below, and one row in ``tests/tables.py``.
"""

from mvrbm.couplings.base import Coupling
from mvrbm.couplings.cp import CP
from mvrbm.couplings.dense import Dense
from mvrbm.couplings.kronecker import Kronecker
from mvrbm.couplings.mpo import MPO

__all__ = ["CP", "MPO", "Coupling", "Dense", "Kronecker"]
