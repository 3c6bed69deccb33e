"""Sources of training batches, and moments of the data. :mod:`mvrbm.io` implements the file formats."""
