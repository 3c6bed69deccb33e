"""Super-resolution by a multimodal MVRBM.

`estimator` is the public face. `features` is the model's view of a low-resolution image, `training_data` cuts samples
out of images, `inference` has mean field over whole images and the losses that fine-tune it, `back_projection` makes
results consistent with the low-resolution image.
"""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from mvrbm.vision.superres.estimator import SuperResolver

__all__ = ["SuperResolver"]


def __getattr__(name: str) -> Any:
    # Imported when it is first used: enlarging with what comes with the package does not need scikit-learn.
    if name == "SuperResolver":
        from mvrbm.vision.superres.estimator import SuperResolver

        return SuperResolver
    raise AttributeError(f"module '{__name__}' has no attribute '{name}'")
