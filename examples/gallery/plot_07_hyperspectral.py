"""
Missing values in a hyperspectral cube
======================================

A hyperspectral picture has a spectrum at each pixel. Here, 90% of the values of such a data cube are missing, and
:class:`~mvrbm.MVRBMImputer` estimates them with their standard deviations.
"""

import matplotlib.pyplot as plt
import numpy as np
from sklearn.impute import KNNImputer, SimpleImputer

from mvrbm import MVRBMImputer
from mvrbm.io.datasets import load

# 145 x 145 pixels, 200 bands, from TensorLy
scene = load("indian-pines").arrays
# 72 x 72 pixels, every fifth band
cube = scene[40:112, 40:112, ::5].astype(float)
pixels = cube.reshape(-1, cube.shape[-1])  # one spectrum per sample
hidden = np.random.default_rng(0).random(pixels.shape) < 0.9
holes = np.where(hidden, np.nan, pixels)

# the linear part alone, which takes seconds
imputer = MVRBMImputer(correction="none", random_state=0).fit(holes)
filled = imputer.transform(holes)
spread = imputer.standard_deviation(holes)

# %%
# This figure shows one band: the known values, two estimates, and the true values.

band = 20
shape = cube.shape[:2]
pictures = {
    "known (10%)": holes[:, band],
    "mean of the band": SimpleImputer().fit_transform(holes)[:, band],
    "MVRBMImputer": filled[:, band],
    "truth": pixels[:, band],
}
low, high = np.percentile(pixels[:, band], [1, 99])
fig, axes = plt.subplots(1, 4, figsize=(10, 2.9), layout="constrained")
for axis, (name, values) in zip(axes, pictures.items(), strict=True):
    axis.imshow(values.reshape(shape), cmap="viridis", vmin=low, vmax=high)
    axis.set_title(name)
    axis.axis("off")
plt.show()

# %%
# This figure shows one spectrum. The shaded range of two standard deviations should contain about 95% of the
# missing values.

pixel = 2000
bands = np.arange(cube.shape[-1])
plt.figure(figsize=(8, 3.2), layout="constrained")
plt.fill_between(
    bands,
    (filled - 2 * spread)[pixel],
    (filled + 2 * spread)[pixel],
    alpha=0.3,
    label="two deviations",
)
plt.plot(bands, pixels[pixel], color="black", linewidth=1, label="truth")
plt.plot(bands, filled[pixel], label="estimate")
plt.plot(bands, holes[pixel], "o", color="tab:red", label="known")
plt.xlabel("band")
plt.ylabel("radiance")
plt.legend()
plt.show()

inside = (np.abs(filled - pixels)[hidden] < 2 * spread[hidden]).mean()
print(f"missing values within two standard deviations: {inside:.1%}")
for name, values in {
    "mean of the band": SimpleImputer().fit_transform(holes),
    "5 nearest neighbors": KNNImputer(n_neighbors=5).fit_transform(holes),
    "MVRBMImputer": filled,
}.items():
    error = np.sqrt(np.mean((values - pixels)[hidden] ** 2))
    print(f"{name:20s} root mean squared error {error:.0f}")
