"""Encode arrays as JSON for scripts in HTML pages."""

import base64
from typing import Any

import numpy as np
from numpy.typing import ArrayLike


def encode(array: ArrayLike) -> dict[str, Any]:
    """Encode an array as a JSON-compatible dictionary with base64-encoded values.

    The script ``templates/decode.js`` decodes it. The values are stored as uint8 if this is lossless, as 16-bit
    floats if the array has dtype float16, and as 32-bit floats otherwise.
    """
    values = np.asarray(array)
    as_bytes = values.astype(np.uint8)
    as_floats = values.astype("<f2" if values.dtype == np.float16 else "<f4")
    stored = as_bytes if np.array_equal(as_bytes, values) else as_floats
    data = base64.b64encode(stored.tobytes()).decode()
    return {"shape": list(values.shape), "type": str(np.dtype(stored.dtype)), "data": data}
