"""Couplings: structured linear maps from a visible layer to the hidden layer, and their adjoints.

Couplings do not depend on the distributions of the units. To add a coupling, write one file in this folder, import it
below and add a row to ``tests/tables.py``. The class registers itself under its `name`, which makes it available to
estimators, the command line and saved models.
"""

from mvrbm.couplings.base import COUPLINGS as COUPLINGS
from mvrbm.couplings.base import Coupling as Coupling
from mvrbm.couplings.base import make_coupling as make_coupling
from mvrbm.couplings.cp import CP as CP
from mvrbm.couplings.dense import Dense as Dense
from mvrbm.couplings.kronecker import Kronecker as Kronecker
from mvrbm.couplings.mpo import MPO as MPO
from mvrbm.couplings.tucker import Tucker as Tucker
