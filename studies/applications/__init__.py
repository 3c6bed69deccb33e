"""Applications of trained models, each compared with the tools that people use for it.

Each application is one module, with its plan, the function that computes a run, and the table of its results:
`imputation`, `subsets` (imputers on small parts of data sets), `filling`, `outliers`, `alarms` (false alarms of outlier
detectors) and `topics`. `outlier_families` has the data of `outliers` and `alarms`. `page` makes the page of all of
them.
"""
