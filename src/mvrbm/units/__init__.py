"""What the entries of one layer are. A unit knows its own distribution and nothing about other layers.

A new unit is one file here, one line below, and one row in ``tests/tables.py``.
"""

from mvrbm.units.base import Unit
from mvrbm.units.bernoulli import Bernoulli
from mvrbm.units.categorical import Categorical
from mvrbm.units.gaussian import Gaussian
from mvrbm.units.rectified import Rectified

#: Every unit by its name in files and on the command line.
UNITS: dict[str, type[Unit]] = {unit.name: unit for unit in (Bernoulli, Categorical, Gaussian, Rectified)}

__all__ = ["UNITS", "Bernoulli", "Categorical", "Gaussian", "Rectified", "Unit"]
