"""Couplings: structured linear maps from a visible array to the hidden array, and their adjoints. No probability here.

A new coupling is one file in this folder, one line below and one row in ``tests/tables.py``. The class registers
itself under its `name`, so that estimators, the command line and saved models accept it.
"""

from mvrbm.couplings.base import COUPLINGS as COUPLINGS
from mvrbm.couplings.base import Coupling as Coupling
from mvrbm.couplings.base import make_coupling as make_coupling
from mvrbm.couplings.cp import CP as CP
from mvrbm.couplings.dense import Dense as Dense
from mvrbm.couplings.kronecker import Kronecker as Kronecker
from mvrbm.couplings.mpo import MPO as MPO
from mvrbm.couplings.tucker import Tucker as Tucker
