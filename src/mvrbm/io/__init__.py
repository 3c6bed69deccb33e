"""Read and write files: arrays, tables, documents, pictures and named data sets. Nothing here depends on a model."""
