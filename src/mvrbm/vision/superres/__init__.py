"""Super-resolution by a multimodal MVRBM.

`estimator` is the public face. `features` is the model's view of a low-resolution image, `training_data` cuts samples
out of images, `inference` has mean field over whole images and the losses that fine-tune it, `back_projection` makes
results consistent with the low-resolution image.
"""

from mvrbm.vision.superres.estimator import SuperResolver

__all__ = ["SuperResolver"]
