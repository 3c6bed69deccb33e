"""HTML page that enlarges photographs in the browser with the pretrained models."""

import base64
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from mvrbm import __version__
from mvrbm.io.templates import write_html
from mvrbm.pages.encoding import encode
from mvrbm.validation import choice
from mvrbm.vision.pretrained import shipped_stages
from mvrbm.vision.resampling import SCALES
from mvrbm.vision.stages import SymmetricStage
from mvrbm.vision.super_resolution import SuperResolver

# Photograph that the page enlarges first: part of a NASA portrait of Eileen Collins, in the public domain.
EXAMPLE = Path(__file__).parent / "templates" / "example.png"
# Scalar settings of a stage that the page uses.
_SETTINGS = ("patch", "stride", "floor")
# Arrays of a stage that the page uses.
_ARRAYS = ("left", "right", "bias", "visible_bias")


def write_enlarging_page(path: str | os.PathLike[str], *, scales: Sequence[int] = SCALES) -> Path:
    """Write an HTML page that enlarges photographs in the browser. The page works without a network connection.

    The page uses the same models as :meth:`mvrbm.vision.SuperResolver.pretrained`, but ignores transparency.

    Parameters
    ----------
    path : path
        File to write. An existing file is replaced only after the new file is complete.
    scales : sequence of {2, 3, 4}
        Scale factors to choose from on the page.

    Returns
    -------
    Path
        Path to the HTML file.
    """
    cpu = torch.device("cpu")
    stages = {scale: shipped_stages(f"x{choice(scale, 'scale', SCALES)}", cpu).symmetric for scale in scales}
    rounds = SuperResolver.back_projection
    return write_html("mvrbm.pages", "enlarge.html", path, **template_values(stages, rounds))


def template_values(stages: Mapping[int, Sequence[SymmetricStage]], rounds: int) -> dict[str, Any]:
    """Return the template values for the page.

    `stages` maps each scale factor to its stages. `rounds` is the number of back-projection rounds.
    """
    models = [
        {"scale": scale, "rounds": rounds, "stages": [_describe(stage) for stage in of_scale]}
        for scale, of_scale in stages.items()
    ]
    parameters = sum(p.numel() for of_scale in stages.values() for stage in of_scale for p in stage.parameters())
    example = base64.b64encode(EXAMPLE.read_bytes()).decode()
    return {"models": models, "parameters": f"{parameters:,}", "example": example, "version": __version__}


def _describe(stage: SymmetricStage) -> dict[str, Any]:
    """Return the settings and weights of a stage. Weights have half precision, as in the pretrained model files."""
    described: dict[str, Any] = {name: getattr(stage, name) for name in _SETTINGS}
    for name in _ARRAYS:
        described[name] = encode(getattr(stage, name).detach().cpu().half().numpy())
    return described
