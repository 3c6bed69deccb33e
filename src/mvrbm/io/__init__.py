"""Files: atomic writes, arrays, pictures, shards and named data sets. Nothing here knows a model."""
