"""
Density of image patches
========================

:class:`~mvrbm.MatrixMixture` is an exact density for real-valued arrays. This example fits small patches of
photographs, compares the likelihood with models of scikit-learn, and fills in missing pixels.
"""

import matplotlib.pyplot as plt
import numpy as np
from skimage import color, data
from sklearn.mixture import GaussianMixture

from mvrbm import MatrixMixture

random = np.random.default_rng(0)


def patches(pictures, number):
    """Cut random patches of 8 x 8 pixels, with gray values from 0 to 1."""
    found = []
    for picture in pictures:
        gray = (
            color.rgb2gray(picture) if picture.ndim == 3 else picture / 255
        )
        rows = random.integers(0, gray.shape[0] - 8, number)
        columns = random.integers(0, gray.shape[1] - 8, number)
        found += [
            gray[row : row + 8, column : column + 8]
            for row, column in zip(rows, columns, strict=True)
        ]
    # undo the rounding to bytes
    return np.stack(found) + random.uniform(0, 1 / 256, (len(found), 8, 8))


train = patches(
    [
        data.astronaut(),
        data.chelsea(),
        data.coffee(),
        data.brick(),
        data.grass(),
    ],
    1000,
)
test = patches([data.rocket(), data.camera()], 1500)

# %%
# Each component has one matrix for the rows and one for the columns, so it needs far fewer parameters than a full
# covariance. ``level=True`` models the brightness of a patch separately. The likelihood of both models is exact.

model = MatrixMixture(
    16, gate=True, level=True, n_epochs=20, random_state=0
).fit(train)
rows, test_rows = train.reshape(-1, 64), test.reshape(-1, 64)
single = GaussianMixture(1, random_state=0).fit(rows)
mixture = GaussianMixture(16, reg_covar=1e-5, random_state=0).fit(rows)


def free_parameters(gaussians):
    return (
        gaussians.n_components * (64 + 64 * 65 // 2)
        + gaussians.n_components
        - 1
    )


found = {
    "one Gaussian": (single.score(test_rows), free_parameters(single)),
    "mixture of 16 Gaussians": (
        mixture.score(test_rows),
        free_parameters(mixture),
    ),
    "MatrixMixture": (model.score(test), model.n_parameters_),
}
for name, (nats, parameters) in found.items():
    print(
        f"{name:24s}{nats:8.1f} nats per patch,{parameters:7,d} parameters"
    )

# %%
# The upper rows show real patches, and the lower rows show patches drawn from the model. The draws are exact and
# independent.

drawn, _ = model.sample(24)
fig, axes = plt.subplots(4, 12, figsize=(10, 3.5), layout="constrained")
for axis, patch in zip(
    axes.flat, [*test[::125][:24], *drawn], strict=True
):
    axis.imshow(
        patch,
        cmap="gray",
        vmin=patch.mean() - 0.15,
        vmax=patch.mean() + 0.15,
    )
    axis.axis("off")
axes[0, 0].set_title("photographs", loc="left")
axes[2, 0].set_title("drawn", loc="left")
plt.show()

# %%
# For some components, the figure shows the test-image patches that belong to them most clearly. Each component has a
# fixed shape, such as edges of one orientation, but its contrast can vary.

probabilities = model.predict_proba(test)
frequent = np.argsort(-probabilities.sum(0))[:6]
fig, axes = plt.subplots(6, 12, figsize=(10, 5.2), layout="constrained")
for line, component in zip(axes, frequent, strict=True):
    best = np.argsort(-probabilities[:, component])[:12]
    for axis, patch in zip(line, test[best], strict=True):
        axis.imshow(patch, cmap="gray")
        axis.axis("off")
plt.show()

# %%
# :meth:`~mvrbm.MatrixMixture.inpaint` returns the means of missing pixels given the known pixels.

known = random.random((100, 8, 8)) < 0.4
truth = test[random.choice(len(test), 100, replace=False)]
holes = np.where(known, truth, np.nan)
filled = model.inpaint(holes)
fig, axes = plt.subplots(3, 8, figsize=(8, 3.2), layout="constrained")
for line, pictures in zip(axes, [holes, filled, truth], strict=True):
    for axis, patch, whole in zip(line, pictures, truth, strict=False):
        axis.imshow(patch, cmap="gray", vmin=whole.min(), vmax=whole.max())
        axis.axis("off")
plt.show()

error = np.sqrt(np.mean((filled - truth)[~known] ** 2))
constant = np.sqrt(
    np.mean(
        (np.nanmean(holes, (1, 2), keepdims=True) - truth)[~known] ** 2
    )
)
print(f"root mean squared error {error:.4f}")
print(f"with the mean of the known pixels {constant:.4f}")
