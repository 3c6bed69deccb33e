"""
Ten minutes with mvrbm
======================

Train a small probabilistic model of pictures and use it for five tasks: sampling, filling in, features, likelihood and
finding unusual pictures. The outputs were printed when the page was built.

You can run everything on this page on your own computer: install the package with matplotlib
(``pip install '.[demo]'`` in a clone of the repository), then download the notebook or the program at the end of the
page. You do not need to download any data, because the pictures come with scikit-learn.

The model
---------

A restricted Boltzmann machine (RBM) is a joint probability distribution of a picture :math:`X` and a layer of hidden
units :math:`Y`. It learns from examples without labels. A classic RBM has one weight for every pair of a pixel and a
hidden unit. A *matrix-variate* RBM (MVRBM) arranges the hidden units in a matrix too, and couples rows to rows and
columns to columns:

.. math::

   p(Y = 1 \\mid X) &= \\sigma(U X V^\\top + C)

   p(X = 1 \\mid Y) &= \\sigma(U^\\top Y V + B)

The model needs only the weights of two small matrices, instead of one large matrix with a weight for every pair of a
pixel and a hidden unit. A sum of several such terms is more flexible. The number of terms is called the *rank*.

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
# ``recipe="generative"`` trains the model for sampling and filling in missing values. The default recipe trains it for
# features, in a tenth of the time. ``random_state`` makes the result reproducible.

model = MVRBM((16, 16), rank=8, recipe="generative", random_state=0)
model.fit(train)
print(model)
print(f"{model.machine_.n_parameters:,} parameters")
print(f"{64 * 256 + 64 + 256:,} parameters of a classic RBM")

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
# The probabilities of the hidden units are features of a picture. Features help most when there are few labels: the
# model has learned from 1,500 pictures without labels, and a classifier then learns from 20, 50 or 100 labeled
# pictures. Here, the same classifier learns from the pixels and from the features. Accuracies are means over 20 random
# choices of the labeled pictures.

from sklearn.linear_model import LogisticRegression

labels = digits.target
inputs = {"pixels": X.reshape(len(X), -1), "features": model.transform(X)}


def accuracy(x, n, seed):
    """Train on n labeled pictures, and classify the test digits."""
    order = np.random.default_rng(seed).permutation(1500)
    chosen = [order[labels[order] == k][: n // 10] for k in range(10)]
    chosen = np.concatenate(chosen)
    classifier = LogisticRegression(max_iter=500)
    classifier.fit(x[chosen], labels[chosen])
    return classifier.score(x[1500:], labels[1500:])


numbers = [20, 50, 100]
_, axis = plt.subplots(figsize=(6, 3), layout="constrained")
for name, x in inputs.items():
    means = [
        np.mean([accuracy(x, n, seed) for seed in range(20)])
        for n in numbers
    ]
    axis.plot(numbers, means, "o-", label=name)
    print(f"{name:9s}", *(f"{mean:.3f}" for mean in means))
axis.set(xlabel="labels", ylabel="accuracy", xticks=numbers)
axis.legend()
plt.show()

# %%
# The difference shrinks as the number of labels grows: with all 1,500 labels, use a classifier that learns from them
# directly, such as :class:`~mvrbm.MVRBMClassifier`. It can also learn from unlabeled pictures; see
# :doc:`/gallery/plot_10_few_labels`. The model is a scikit-learn transformer, so you can use it in a pipeline.
# :doc:`/gallery/plot_01_features` shows features of larger pictures.

from mvrbm import MVRBMClassifier

everything = LogisticRegression(max_iter=500)
everything.fit(inputs["pixels"][:1500], labels[:1500])
classifier = MVRBMClassifier(n_epochs=50, random_state=0)
classifier.fit(train, labels[:1500])
shares = {
    "logistic regression": everything.score(
        inputs["pixels"][1500:], labels[1500:]
    ),
    "MVRBMClassifier": classifier.score(test, labels[1500:]),
}
for name, share in shares.items():
    print(f"{name} of pixels, all labels: {share:.3f}")

# %%
# Likelihood and unusual pictures
# -------------------------------
#
# ``log_likelihood`` estimates the mean log-likelihood of new digits, with an interval. The free energy of a picture is
# its negative log-probability up to a constant, so it can be used to rank pictures.

print("test digits:", model.log_likelihood(test, n_steps=200))
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
# * :doc:`/choosing` helps you choose a model for your data, and explains when to use another tool.
# * The :doc:`gallery </gallery/index>` contains examples of each task.
# * :doc:`/hyperparameters` explains the rank, the hidden shape and the recipe.
# * :doc:`/bernoulli-rbm` is for users of scikit-learn's ``BernoulliRBM``.
