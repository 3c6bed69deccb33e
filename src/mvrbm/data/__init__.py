"""Sources of batches for training, and their moments. File formats are in :mod:`mvrbm.io`."""
