"""How fast it is, beside what people use instead and beside what the machine could do at best.

`problems` says what is learned from what, `contestants` who learns it, `floors` what it takes at least, `measure`
how time and memory are taken, `run` puts them together, and `show` makes tables and plots of it. Nothing here is
needed for using the models. A new contestant is one class in `contestants`.
"""

from benchmarks.problems import Problem
from benchmarks.run import QUICK, Settings, run
from benchmarks.show import plot, tables, write

__all__ = ["QUICK", "Problem", "Settings", "plot", "run", "tables", "write"]
