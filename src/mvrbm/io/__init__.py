"""Files: atomic writes, binary formats, arrays, pictures, shards and named data sets. Nothing here depends on a model."""
