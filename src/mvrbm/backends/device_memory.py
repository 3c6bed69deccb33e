"""Check whether the data for a training run fits into device memory."""

import math

import torch

from mvrbm.data.sources import Source

# Maximum fraction of the device memory that the data may occupy.
_SHARE_OF_MEMORY = 0.5


def too_large_reason(source: Source, device: torch.device) -> str | None:
    """Return the reason why the data does not fit into device memory, or None if it fits."""
    arrays, known = source.with_masks
    masks = known.values() if not source.nan_is_missing else arrays.values()  # one byte per entry
    size = sum(int(torch.as_tensor(array[:1]).nbytes) * len(array) for array in arrays.values())
    size += sum(math.prod(mask.shape) for mask in masks)
    # Compare with the total memory instead of the free memory, so that a training run always uses the same backend.
    if device.type == "cuda" and size > _SHARE_OF_MEMORY * torch.cuda.mem_get_info(device)[1]:
        return f"its data, {size / 1e9:.1f} GB, would take more than half of the device's memory"
    return None
