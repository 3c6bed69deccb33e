"""Arrays as JSON, for the scripts of a page."""

import base64
from typing import Any

import numpy as np
from numpy.typing import ArrayLike


def encode(array: ArrayLike) -> dict[str, Any]:
    """Return an array as JSON, its numbers in base64: as bytes if all of them are whole and fit, else as float32."""
    values = np.asarray(array)
    as_bytes = values.astype(np.uint8)
    stored = as_bytes if np.array_equal(as_bytes, values) else values.astype("<f4")
    data = base64.b64encode(stored.tobytes()).decode()
    return {"shape": list(values.shape), "type": str(np.dtype(stored.dtype)), "data": data}
