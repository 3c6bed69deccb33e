"""Studies: the paper's experiments, the methods that it compares with, and our own studies. They are not installed.

The studies use the package `mvrbm` as any user would. They run as one program from the root of the repository, for
example ``python -m studies digits --scale quick --out runs/digits``.

A study has a plan (the list of its runs and their settings), a function that computes each kind of run, and a page that
shows the results. A large study is a folder with the modules `plan`, `run` and `page`; a small one is a single module.
All studies share the following modules:

- `arguments`: the command line
- `runs`: runs, and the stores of their results
- `runner`: computes the runs of a plan that are not stored yet
- `report`: numbers, figures, tables and pages
- `data`: the data sets
"""
