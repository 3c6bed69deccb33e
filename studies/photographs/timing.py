"""Measure time and memory of enlarging in a process that imports nothing else.

``python -m studies.photographs.timing`` reads settings as JSON from standard input and prints the result as JSON.
"""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path

import numpy as np
import torch
from torch import nn

from mvrbm.vision import SuperResolver, luminance

__all__ = ["Fsrcnn", "measure"]


class Fsrcnn(nn.Sequential):
    """FSRCNN(56, 12, 4) with random weights, which take as long as trained ones."""

    def __init__(self, scale: int) -> None:
        shrunk = [nn.Conv2d(12, 12, 3, padding=1) for _ in range(4)]
        layers = [nn.Conv2d(1, 56, 5, padding=2), nn.Conv2d(56, 12, 1), *shrunk, nn.Conv2d(12, 56, 1)]
        active = [part for layer in layers for part in (layer, nn.PReLU(layer.out_channels))]
        super().__init__(*active, nn.ConvTranspose2d(56, 1, 9, scale, padding=4, output_padding=scale - 1))


@torch.no_grad()
def measure(method: str, size: tuple[int, int]) -> dict[str, float]:
    """Enlarge RGB by 2 on one thread, and return the time and the peak memory of this process."""
    torch.set_num_threads(1)
    image = np.random.default_rng(0).integers(0, 256, (*size, 3), dtype=np.uint8)
    used = time.process_time()
    began = time.perf_counter()
    if method == "stages":
        SuperResolver.pretrained(2, device="cpu").upscale(image)
    else:
        low = torch.from_numpy(luminance(image.astype(np.float32) / 255))[None, None]
        model = Fsrcnn(2)
        for first in range(0, size[0], 100):  # in strips, because whole images need gigabytes
            model(low[:, :, first : first + 100])
    # `resource` would include the peak of the parent process.
    status = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
    peak = int(status["VmHWM"].split()[0]) / 1024
    return {
        "seconds": round(time.perf_counter() - began, 2),
        "processor_seconds": round(time.process_time() - used, 2),
        "process_seconds": round(time.process_time(), 2),
        "peak_mib": round(peak),
    }


if __name__ == "__main__":
    given = json.load(sys.stdin)
    print(json.dumps(measure(given["method"], tuple(given["size"]))))
