"""The enlarging page: photographs are enlarged by the stages that come with the package."""

import base64
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from mvrbm import __version__
from mvrbm.io.templates import write_html
from mvrbm.page.encoding import encode
from mvrbm.validation import choice
from mvrbm.vision.resampling import SCALES
from mvrbm.vision.shipped import shipped_stages
from mvrbm.vision.stages import SymmetricStage
from mvrbm.vision.super_resolution import SuperResolver

_EXAMPLE = Path(__file__).parent / "templates" / "example.png"


def write_enlarging_page(path: str | os.PathLike[str], *, scales: Sequence[int] = SCALES) -> Path:
    """Write one HTML file that enlarges photographs in the browser, without a network.

    Photographs are enlarged as by :meth:`mvrbm.vision.SuperResolver.pretrained`, without transparency.

    Parameters
    ----------
    path : path
        The file. An existing file is replaced when the new one is complete.
    scales : sequence of {2, 3, 4}
        Side lengths, in pixels, of the square that one pixel becomes, to choose from.

    Returns
    -------
    Path
        The file.
    """
    cpu = torch.device("cpu")
    stages = {scale: shipped_stages(f"x{choice(scale, 'scale', SCALES)}", cpu).symmetric for scale in scales}
    rounds = SuperResolver.back_projection
    return write_html("mvrbm.page", "enlarge.html", path, **enlarging(stages, rounds))


def enlarging(stages: Mapping[int, Sequence[SymmetricStage]], rounds: int) -> dict[str, Any]:
    """Return what the template needs: the stages for each scale, and the rounds of back-projection after each stage."""
    models = [
        {"scale": scale, "rounds": rounds, "stages": [_describe(stage) for stage in some]}
        for scale, some in stages.items()
    ]
    parameters = sum(p.numel() for some in stages.values() for stage in some for p in stage.parameters())
    example = base64.b64encode(_EXAMPLE.read_bytes()).decode()
    return {"models": models, "parameters": f"{parameters:,}", "example": example, "version": __version__}


def _describe(stage: SymmetricStage) -> dict[str, Any]:
    """Return a stage for luminance, with the weights of 16 bits that it is stored with."""
    described: dict[str, Any] = {name: getattr(stage, name) for name in ("patch", "stride", "floor")}
    for name in ("left", "right", "bias", "visible_bias"):
        described[name] = encode(getattr(stage, name).detach().cpu().half().numpy())
    return described
