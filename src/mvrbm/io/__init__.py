"""Read and write arrays, tables, documents, images and named datasets. Nothing here depends on a model."""
