"""How a visible array meets the hidden array: structured linear maps and their adjoints. No probability here.

A new coupling is one file here, one line below, and one row in ``tests/tables.py``.
"""

from mvrbm.couplings.base import Coupling
from mvrbm.couplings.cp import CP
from mvrbm.couplings.dense import Dense
from mvrbm.couplings.kronecker import Kronecker
from mvrbm.couplings.mpo import MPO

#: Every coupling by its name in files and on the command line.
COUPLINGS: dict[str, type[Coupling]] = {kind.name: kind for kind in (CP, MPO, Dense, Kronecker)}

__all__ = ["COUPLINGS", "CP", "MPO", "Coupling", "Dense", "Kronecker"]
