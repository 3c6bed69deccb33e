"""`Enlarger`: what all super-resolution has in common, but for luminance; `StagedEnlarger`: the stages of the package.

Luminance and alpha are enlarged by a model, chroma by bicubic interpolation.
"""

from abc import ABC, abstractmethod
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from mvrbm.devices import resolve_device
from mvrbm.vision.color import LUMINANCE_GAIN, luminance
from mvrbm.vision.images import Array, check_image, to_dtype, turned, turned_back, white
from mvrbm.vision.resampling import enlarge_rows
from mvrbm.vision.shipped import ShippedStages
from mvrbm.vision.stages import Progress
from mvrbm.vision.superres.back_projection import back_project

_ROWS_AT_ONCE = 256  # rows of an enlarged image whose colors are computed together
#: Rounds of back-projection after each stage, in training too.
BACK_PROJECTION = 20


class Enlarger(ABC):
    """Enlarges images by `scale`."""

    scale: int
    _orientations = 8  # flips and turns of an image that give other results

    def upscale(self, image: Any, *, self_ensemble: bool = False, progress: Progress | None = None) -> Array:
        """Enlarge an image.

        Parameters
        ----------
        image : array (H, W), (H, W, 3) or (H, W, 4)
            Gray, RGB or RGBA, in bytes, 16-bit numbers or floats from 0 to 1. Luminance and alpha are enlarged by the
            model, chroma by bicubic interpolation. Colors of transparent pixels do not count.
        self_ensemble : bool
            Whether to average over the eight flips and turns of the image, which takes eight times as long.
        progress : callable, optional
            Called after each tile with the number of finished tiles and their total.

        Returns
        -------
        array (H * scale, W * scale, ...)
            Of the same type.
        """
        image = check_image(image, unit_range=True)
        if image.ndim == 3 and image.shape[2] not in (3, 4):
            raise ValueError(f"image must be gray, RGB or RGBA, got {image.shape[2]} channels")
        top = np.float32(white(image.dtype))
        if image.ndim == 3 and image.shape[2] == 4:
            return self._upscale_transparent(image, self_ensemble, progress)
        blocks = (image[first : first + _ROWS_AT_ONCE] for first in range(0, len(image), _ROWS_AT_ONCE))
        low = np.concatenate([luminance(block.astype(np.float32) / top) for block in blocks])
        high = self.upscale_luminance(low, self_ensemble=self_ensemble, progress=progress)
        if image.ndim == 2:
            return to_dtype(high, image.dtype)
        out = np.empty((*high.shape, 3), image.dtype)
        for first in range(0, len(out), _ROWS_AT_ONCE):
            rows = slice(first, min(first + _ROWS_AT_ONCE, len(out)))
            block = enlarge_rows(image, self.scale, rows) / top
            # Luminance adds to R, G and B alike: replacing that of the bicubic colors keeps their chroma.
            block += np.float32(LUMINANCE_GAIN) * (high[rows] - luminance(block))[..., None]
            out[rows] = to_dtype(block, image.dtype)
        return out

    def _upscale_transparent(self, image: Array, self_ensemble: bool, progress: Progress | None) -> Array:
        """Enlarge an RGBA image so that, laid on white, it equals the enlargement of the image laid on white."""
        top = np.float32(white(image.dtype))
        alpha = image[..., 3].astype(np.float32) / top
        on_white = 1 - alpha[..., None] * (1 - image[..., :3].astype(np.float32) / top)
        parts = [on_white] if alpha.min() == 1 else [on_white, alpha]
        large = []
        for which, part in enumerate(parts):

            def in_all(done: int, total: int, which: int = which) -> None:
                if progress is not None:
                    progress(which * total + done, len(parts) * total)

            large.append(self.upscale(part, self_ensemble=self_ensemble, progress=in_all))
        colors = large[0]
        # Alpha is large enough for the picture on white.
        least = 1 - colors.min(2, keepdims=True)
        shown = np.ones_like(colors[..., :1]) if len(parts) == 1 else np.maximum(large[1][..., None], least)
        colors -= 1
        np.divide(colors, shown, out=colors, where=shown > 0)
        return to_dtype(np.concatenate([colors + 1, shown], 2), image.dtype)

    def upscale_luminance(
        self, low: Array, *, self_ensemble: bool = False, progress: Progress | None = None
    ) -> NDArray[np.float32]:
        """Enlarge luminance (h, w), with white at 1, without rounding or clipping."""
        turns = self._orientations if self_ensemble else 1
        height, width = low.shape
        total = np.zeros((height * self.scale, width * self.scale), np.float32)
        for turn in range(turns):

            def in_all(done: int, parts: int, turn: int = turn) -> None:
                if progress is not None:
                    progress(turn * parts + done, turns * parts)

            total += turned_back(self._enlarged(np.ascontiguousarray(turned(low, turn), np.float32), in_all), turn)
        total /= np.float32(turns)
        return total

    @abstractmethod
    def _enlarged(self, low: NDArray[np.float32], progress: Progress) -> NDArray[np.float32]:
        """Enlarge luminance (h, w), with white at 1, without self-ensemble."""


class StagedEnlarger(Enlarger):
    """Enlarges photographs by the stages that come with the package, without training.

    Parameters
    ----------
    scale : {2, 3, 4}
        Side length, in pixels, of the square that one pixel becomes.
    device : str
        ``"auto"`` is a GPU if there is one.
    """

    _orientations = 1  # the stages see all of them

    def __init__(self, scale: int = 2, device: Any = "auto") -> None:
        self.scale, self._stages = scale, ShippedStages(f"x{scale}", resolve_device(device))

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.scale})"

    @property
    def n_parameters(self) -> int:
        """Number of parameters of all stages."""
        return self._stages.n_parameters

    def _enlarged(self, low: NDArray[np.float32], progress: Progress) -> NDArray[np.float32]:
        small = torch.from_numpy(low).to(self._stages.device)
        bicubic = small.new_empty(len(low) * self.scale, low.shape[1] * self.scale)
        for first in range(0, len(bicubic), _ROWS_AT_ONCE):
            rows = slice(first, min(first + _ROWS_AT_ONCE, len(bicubic)))
            bicubic[rows] = torch.from_numpy(np.ascontiguousarray(enlarge_rows(low, self.scale, rows)))

        def consistent(image: torch.Tensor) -> torch.Tensor:
            return back_project(small, image[0], self.scale, BACK_PROJECTION)[None]

        found: NDArray[np.float32] = self._stages.run(bicubic[None], consistent, progress=progress)[0].cpu().numpy()
        return found
