"""Units: distributions of the entries in a layer, given the field from the other layers.

To add a unit, write one file in this folder, import it below and add a row to ``tests/tables.py``. The class registers
itself under its `name`, which makes it available to estimators, the command line and saved models.
"""

from mvrbm.units.base import UNITS as UNITS
from mvrbm.units.base import Unit as Unit
from mvrbm.units.base import make_unit as make_unit
from mvrbm.units.base import unit_names as unit_names
from mvrbm.units.bernoulli import Bernoulli as Bernoulli
from mvrbm.units.categorical import Categorical as Categorical
from mvrbm.units.counts import Counts as Counts
from mvrbm.units.double_rectified import DoubleRectified as DoubleRectified
from mvrbm.units.gaussian import Gaussian as Gaussian
from mvrbm.units.poisson import Poisson as Poisson
from mvrbm.units.rectified import Rectified as Rectified
from mvrbm.units.whitened import WhitenedMixture as WhitenedMixture
