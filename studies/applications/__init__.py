"""Applications of trained models, each compared with the tools that people use for it.

Each application is one module, with its plan, the function that computes a run, and the table of its results:
`imputation`, `subsets`, `filling`, `outliers` and `topics`. `page` makes the page of all of them.
"""
