"""Benchmarks: speed and memory of training, next to other packages and to the least possible time. Not installed.

`problems` defines what is trained on what, `contestants` who trains it, `floors` the least time, `measure` how time and
memory are measured; `run` puts them together, and `show` makes tables and plots of the results. `workloads` times
updates of generative models next to their floors, and `kernels` the GPU kernels by themselves. The command line, the
runner and the report kit are those of `studies`. A new contestant is one class in `contestants`.
"""

from benchmarks.problems import Problem
from benchmarks.run import QUICK, Settings, run
from benchmarks.show import plot, tables, write

__all__ = ["QUICK", "Problem", "Settings", "plot", "run", "tables", "write"]
