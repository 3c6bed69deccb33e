"""Files: atomic writes, binary formats, arrays, pictures, shards, named data sets. Nothing here depends on a model."""
