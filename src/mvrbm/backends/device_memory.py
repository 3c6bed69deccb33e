"""Check whether the data of a training run fits into the memory of a device."""

import math

import torch

from mvrbm.data.sources import Source

# Fraction of the device's memory that the data may take.
_SHARE_OF_MEMORY = 0.5


def too_large_reason(source: Source, device: torch.device) -> str | None:
    """Return an explanation if the data is too large for the memory of a device, otherwise None."""
    arrays, known = source.with_masks
    masks = known.values() if not source.nan_is_missing else arrays.values()  # one byte per entry
    size = sum(int(torch.as_tensor(array[:1]).nbytes) * len(array) for array in arrays.values())
    size += sum(math.prod(mask.shape) for mask in masks)
    # Compare with all memory, not the free memory: the same training run has to use the same backend every time.
    if device.type == "cuda" and size > _SHARE_OF_MEMORY * torch.cuda.mem_get_info(device)[1]:
        return f"its data, {size / 1e9:.1f} GB, would take more than half of the device's memory"
    return None
