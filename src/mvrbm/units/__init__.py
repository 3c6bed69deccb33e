"""Units: what the entries of one layer are. A unit is the distribution of one layer, whatever the others are.

A new unit is one file in this folder, one line below and one row in ``tests/tables.py``. The class registers itself
under its `name`, so that estimators, the command line and saved models accept it.
"""

from mvrbm.units.base import UNITS as UNITS
from mvrbm.units.base import Unit as Unit
from mvrbm.units.base import make_unit as make_unit
from mvrbm.units.base import unit_names as unit_names
from mvrbm.units.bernoulli import Bernoulli as Bernoulli
from mvrbm.units.categorical import Categorical as Categorical
from mvrbm.units.counts import Counts as Counts
from mvrbm.units.gaussian import Gaussian as Gaussian
from mvrbm.units.poisson import Poisson as Poisson
from mvrbm.units.rectified import Rectified as Rectified
