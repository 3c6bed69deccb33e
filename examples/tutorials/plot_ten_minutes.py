"""
Ten minutes with mvrbm
======================

Train a small probabilistic model of pictures and use it for five tasks: sampling, filling in, features, likelihood and
finding unusual pictures. After ``pip install '.[demo]'``, which also installs matplotlib, you can run everything on
this page. The outputs were printed when the page was built.

The model
---------

A restricted Boltzmann machine (RBM) is a joint probability distribution of a picture :math:`X` and a layer of hidden
units :math:`Y`. It learns from examples without labels. A classic RBM has one weight for every pair of a pixel and a
hidden unit. A *matrix-variate* RBM (MVRBM) arranges the hidden units in a matrix too, and couples rows to rows and
columns to columns:

.. math:: p(Y = 1 \\mid X) = \\sigma(U X V^\\top + C), \\qquad p(X = 1 \\mid Y) = \\sigma(U^\\top Y V + B).

An MVRBM has hundreds of weights where a classic RBM has thousands. A sum of several such terms is more flexible; their
number is the *rank*.

Data
----

The first axis of an array indexes samples. The default units are binary and accept values from 0 to 1.
"""

import matplotlib.pyplot as plt
import numpy as np
from sklearn.datasets import load_digits

import mvrbm
from mvrbm import MVRBM

digits = load_digits()
X = (digits.images > 7).astype(np.float32)  # (1797, 8, 8), zeros and ones
train, test = X[:1500], X[1500:]
print(train.shape, test.shape)

# %%
# Train
# -----
#
# ``recipe="generative"`` trains the model for sampling and filling in. The default recipe trains it for features, in a
# tenth of the time. ``random_state`` makes the result reproducible.

model = MVRBM((10, 10), rank=4, recipe="generative", random_state=0)
model.fit(train)
print(model)
print(model.machine_.n_parameters, "parameters")
print(64 * 100 + 64 + 100, "parameters of a classic RBM")

# %%
# Samples
# -------
#
# Draw new digits from the model. ``mean=True`` returns the probability of each pixel instead of zeros and ones.


def show(rows, names):
    size = (8, 0.9 * len(rows))
    _, axes = plt.subplots(
        len(rows), len(rows[0]), figsize=size, layout="constrained"
    )
    for line, pictures, name in zip(axes, rows, names, strict=True):
        line[0].set_ylabel(name, rotation=0, ha="right", va="center")
        for axis, picture in zip(line, pictures, strict=True):
            axis.imshow(picture, cmap="gray", vmin=0, vmax=1)
            axis.set(xticks=[], yticks=[])
    plt.show()


samples = model.sample(24, mean=True)
rows = [samples[:12], samples[12:], test[:12]]
show(rows, ["samples", "samples", "data"])

# %%
# Fill in
# -------
#
# A mask is True where a value is known. Here, the left half of each test digit is known.

known = np.tile(np.arange(8) < 4, (8, 1))
filled = model.inpaint(test[:12], known)
rows = [np.where(known, test[:12], 0.4), filled, test[:12]]
show(rows, ["known", "filled in", "truth"])

# %%
# Alternatively, mark unknown values with NaN and leave out the mask:

broken = test[:1].copy()
broken[0, 2:5, 2:5] = np.nan
print(np.round(model.inpaint(broken)[0], 1))

# %%
# Features
# --------
#
# The probabilities of the hidden units are features of a picture. The model is a scikit-learn transformer, so you can
# use it in a pipeline. ``visible_shape`` turns rows of 64 values into pictures.

from sklearn.linear_model import LogisticRegression
from sklearn.pipeline import make_pipeline

rows, labels = digits.data / 16, digits.target
features = MVRBM(
    (16, 16), rank=4, visible_shape=(8, 8), n_epochs=40, random_state=0
)
linear = LogisticRegression(C=10, max_iter=1000)
pipeline = make_pipeline(features, linear).fit(rows[:1500], labels[:1500])
accuracy = pipeline.score(rows[1500:], labels[1500:])
print(f"accuracy on test digits: {accuracy:.3f}")

# %%
# Are these features better than pixels? Not for such small pictures, which a linear classifier separates well. For
# larger pictures they are; see :doc:`/gallery/plot_01_features`. If you have labels, :class:`~mvrbm.MVRBMClassifier`
# learns from them directly.

from mvrbm import MVRBMClassifier

images = digits.images / 16
linear.fit(rows[:1500], labels[:1500])
classifier = MVRBMClassifier(n_epochs=50, random_state=0)
classifier.fit(images[:1500], labels[:1500])
accuracy = linear.score(rows[1500:], labels[1500:])
print(f"logistic regression on pixels: {accuracy:.3f}")
accuracy = classifier.score(images[1500:], labels[1500:])
print(f"MVRBMClassifier: {accuracy:.3f}")

# %%
# Likelihood and unusual pictures
# -------------------------------
#
# ``log_likelihood`` estimates the mean log-likelihood of new digits, with an interval. The free energy of a picture is
# its negative log-probability up to a constant, so it ranks pictures.

print("test digits:", model.log_likelihood(test, n_steps=500))
random = np.random.default_rng(0).random(test.shape)
noise = (random < test.mean()).astype(np.float32)
for name, pictures in {"digits": test, "noise": noise}.items():
    print(
        f"free energy of {name}: {model.free_energy(pictures).mean():.1f}"
    )

order = np.argsort(model.free_energy(test))
rows = [test[order[:12]], test[order[-12:]]]
show(rows, ["most likely", "least likely"])

# %%
# Save and load
# -------------
#
# ``save`` writes a folder with two or three small files. None of them uses pickle.

import tempfile

with tempfile.TemporaryDirectory() as place:
    folder = model.save(f"{place}/digits-model")
    print(sorted(path.name for path in folder.iterdir()))
    again = mvrbm.load(folder)
assert np.array_equal(again.transform(test), model.transform(test))

# %%
# Next steps
# ----------
#
# * :doc:`/choosing` helps you choose a model for your data, and tells when to use something else.
# * The :doc:`gallery </gallery/index>` has examples of each task.
# * :doc:`/hyperparameters` explains rank, hidden shape and recipe.
# * :doc:`/bernoulli-rbm` is for users of scikit-learn's ``BernoulliRBM``.
