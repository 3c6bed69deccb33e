"""Studies: the paper's experiments, the methods that it compares with, and our own studies. Not installed.

They use the package `mvrbm` as any user would, and run as one program from the project root: ``python -m studies digits
--scale quick --out runs/digits``. `arguments` has the command line, `runs` and `runner` compute long experiments in
small pieces, `report` makes numbers, figures and pages of the results.
"""
