"""Encode arrays as JSON for scripts in HTML pages."""

import base64
from typing import Any

import numpy as np
from numpy.typing import ArrayLike


def encode(array: ArrayLike) -> dict[str, Any]:
    """Encode an array as a JSON-compatible dictionary with base64-encoded values.

    The script ``templates/decode.js`` converts the dictionary back to an array. Values are stored as uint8 if the
    conversion is lossless, as float16 if the array has this dtype, and as float32 otherwise.
    """
    values = np.asarray(array)
    as_bytes = values.astype(np.uint8)
    as_floats = values.astype("<f2" if values.dtype == np.float16 else "<f4")
    stored = as_bytes if np.array_equal(as_bytes, values) else as_floats
    data = base64.b64encode(stored.tobytes()).decode()
    return {"shape": list(values.shape), "type": str(np.dtype(stored.dtype)), "data": data}
