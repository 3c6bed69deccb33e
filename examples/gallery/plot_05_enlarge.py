"""
Enlarge a photograph
====================

:class:`~mvrbm.vision.SuperResolver` enlarges photographs with weights that are part of the package. The photograph in
this example was not in the training data.
"""

import matplotlib.pyplot as plt
from skimage import data

from mvrbm.vision import (
    SuperResolver,
    enlarge_image,
    psnr_ssim,
    reduce_image,
)

truth = data.rocket()[:420, 100:520]
small = reduce_image(truth, 2)

model = SuperResolver.pretrained(2)
results = {
    "small": small,
    "bicubic": enlarge_image(small, 2),
    "mvrbm": model.upscale(small),
    "truth": truth,
}

fig, axes = plt.subplots(2, 4, figsize=(10, 5.2), layout="constrained")
for column, (name, picture) in enumerate(results.items()):
    size = picture.shape[0] / 420
    rows = slice(int(300 * size), int(390 * size))
    columns = slice(int(170 * size), int(260 * size))
    axes[0, column].imshow(picture)
    axes[0, column].set_title(
        f"{name}, {picture.shape[0]} x {picture.shape[1]}"
    )
    axes[1, column].imshow(picture[rows, columns], interpolation="nearest")
    for axis in axes[:, column]:
        axis.axis("off")
plt.show()

# %%
# Compare both enlarged pictures with the true one:

for name in ("bicubic", "mvrbm"):
    quality = psnr_ssim(truth, results[name])
    print(f"{name:8s}  {quality.psnr:.2f} dB  SSIM {quality.ssim:.4f}")
