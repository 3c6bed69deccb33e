"""Source of a module with a unit and a coupling of a user's own, for tests of plugins and of ``mvrbm --import``."""

SOURCE = """
from mvrbm.couplings import Dense
from mvrbm.units import Bernoulli


class Bit(Bernoulli):
    name = "bit"


class Full(Dense):
    name = "full"
"""
