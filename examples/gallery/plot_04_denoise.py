"""
Remove noise
============

Salt-and-pepper noise sets random pixels to black or white. The model is a prior over clean pictures. Pixels that are
neither black nor white cannot be noise, so they do not change. For all other pixels, the model estimates whether
they are noise.
"""

import matplotlib.pyplot as plt
import numpy as np
from skimage.filters import median

from mvrbm import MVRBM
from mvrbm.io.datasets import load
from mvrbm.vision import add_noise, denoise, psnr

digits = load("mnist-5k").arrays / 255
clean = digits[::250]  # hold out 20 digits
train = np.delete(digits, np.s_[::250], axis=0)

model = MVRBM(
    hidden_shape=(25, 25), rank=2, n_epochs=20, random_state=0
).fit(train)
noisy = add_noise(clean, "salt-and-pepper", 0.2, seed=0)

restored = denoise(model, noisy)  # estimates the noise level
filtered = np.stack([median(picture) for picture in noisy])

# %%
# The rows show, from top to bottom, clean digits, noisy digits, and the results of a 3x3 median filter and of the
# model.

rows = {
    "clean": clean,
    "noisy": noisy,
    "median filter": filtered,
    "model": restored,
}
fig, axes = plt.subplots(
    len(rows), 10, figsize=(8, 3.6), layout="constrained"
)
for line, (name, pictures) in zip(axes, rows.items(), strict=True):
    line[0].set_ylabel(name, rotation=0, ha="right", va="center")
    for axis, picture in zip(line, pictures[::2], strict=True):
        axis.imshow(picture, cmap="gray", vmin=0, vmax=1)
        axis.set(xticks=[], yticks=[])
plt.show()

for name, pictures in rows.items():
    if name != "clean":
        pairs = zip(clean, pictures, strict=True)
        mean = np.mean([psnr(*pair) for pair in pairs])
        print(f"{name:13s}  {mean:.1f} dB")
