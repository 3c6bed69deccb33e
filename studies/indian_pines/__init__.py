"""Order 3: features of hyperspectral patches, and whether they tell crops apart.

9x9x200 patches of the scene Indian Pines; a `TVRBM` learns features from them without labels, and is compared with raw
spectra, raw patches and principal components, all under the same classifiers. Training pixels lie in small blocks, and
no patch of a test pixel shares a pixel with theirs: patches of neighbors overlap, so that a random choice of pixels
would test on training data.

`blocks` divides the scene, `classifiers` choose and predict, `comparison` makes one draw, `study` all of them.
"""

from studies.indian_pines.blocks import Split, divide, held_out, patches, whitened
from studies.indian_pines.settings import CLASSES, Candidate, Settings

__all__ = ["CLASSES", "Candidate", "Settings", "Split", "divide", "held_out", "patches", "whitened"]
