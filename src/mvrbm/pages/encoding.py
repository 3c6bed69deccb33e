"""Arrays as JSON, for the scripts of a page."""

import base64
from typing import Any

import numpy as np
from numpy.typing import ArrayLike


def encode(array: ArrayLike) -> dict[str, Any]:
    """Return an array as JSON, its numbers in base64: as bytes if all of them are whole and fit, else as floats.

    Floats have 32 bits, and 16 if the array has. `templates/decode.js` reads all three.
    """
    values = np.asarray(array)
    as_bytes = values.astype(np.uint8)
    floats = values.astype("<f2" if values.dtype == np.float16 else "<f4")
    stored = as_bytes if np.array_equal(as_bytes, values) else floats
    data = base64.b64encode(stored.tobytes()).decode()
    return {"shape": list(values.shape), "type": str(np.dtype(stored.dtype)), "data": data}
