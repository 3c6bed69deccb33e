"""Super-resolution by a multimodal MVRBM.

`estimator` is the public face. `features` is the model's view of a low-resolution image, `training_data` cuts samples
out of images, `inference` runs mean field over whole images, `back_projection` makes results consistent with the
low-resolution image, and `fine_tuning` has the losses for backpropagation.
"""

from mvrbm.vision.superres.estimator import SuperResolver

__all__ = ["SuperResolver"]
