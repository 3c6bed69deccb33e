"""Sources of training batches, and moments of the data. File formats are implemented in :mod:`mvrbm.io`."""
