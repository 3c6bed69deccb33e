"""Read and write arrays, tables, documents, images and named datasets. This package does not depend on models."""
