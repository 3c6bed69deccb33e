"""
Protein sequences: contacts, mutations and new sequences
========================================================

Learn a family of protein sequences. Predict which sites are in contact in the folded protein, and which mutations are
harmful. Draw new sequences and compare them with natural ones.

The family consists of lattice proteins, which are chains of 27 amino acids that fold into a cube of 3 x 3 x 3 points.
Their structure is known exactly. For your own alignment, pass the name of a FASTA or Stockholm file to ``fit``.
"""

import matplotlib.pyplot as plt
import numpy as np

from mvrbm import SequenceRBM, sequences

alignment, distances = sequences.load_lattice_proteins()
train, test = alignment.sequences[:1600], alignment.sequences[1600:]
print(train[0], train[1])

model = SequenceRBM((20, 10), rank=4, n_epochs=300, random_state=0).fit(
    train
)
print(f"{model.n_parameters_:,} parameters")

# %%
# Contacts
# --------
# Pairs of sites that a model couples strongly are likely to be in contact. The contact map shows all scores below the
# diagonal, and the pairs with the highest scores above it. Sites that are close along the chain are excluded, because
# their contacts are trivial.

scores = sequences.contact_map(model, train)
sequences.plot_contact_map(scores, distances, threshold=1.1, n_pairs=20)
plt.show()

precision = sequences.contact_precision(scores, distances, threshold=1.1)
for n in (10, 20):
    print(f"{precision[n - 1]:.2f} of the first {n} pairs are contacts")

# %%
# Mutations
# ---------
# The change in the log-likelihood predicts which mutations of a sequence are tolerated (red) and which are harmful
# (blue). Dots mark the letters of the original sequence.

scan = sequences.mutation_scan(model, test[0])
sequences.plot_mutations(scan, test[0], model.alphabet_.letters)
plt.show()

# %%
# Features
# --------
# A hidden unit is a pattern of letters. The figure shows the units with the largest weights as sequence logos. Letters
# above the axis switch the unit on, and letters below it switch it off.

weights = sequences.hidden_weights(model).reshape(
    -1, model.n_sites_, len(model.alphabet_)
)
strongest = np.argsort(-np.linalg.norm(weights, axis=(1, 2)))[:3]
fig, axes = plt.subplots(
    3, 1, figsize=(8, 6), layout="constrained", sharex=True
)
for axis, unit in zip(axes, strongest, strict=True):
    sequences.plot_logo(weights[unit], model.alphabet_.letters, ax=axis)
plt.show()

# %%
# New sequences
# -------------
# Are new sequences like natural ones? They should fall in the same regions of the principal components, and have the
# same correlations between pairs of sites. The test sequences show how closely such a small number of sequences can
# match.

new = model.sample(400)
places = sequences.project(train, test, new)
fig, axes = plt.subplots(1, 3, figsize=(11, 3.6), layout="constrained")
sequences.plot_projection(places[1], places[2], ax=axes[0])
sequences.plot_correlations(
    *sequences.correlations(train, new), ax=axes[1]
)
sequences.plot_correlations(
    *sequences.correlations(train, test), ax=axes[2]
)
axes[2].set_ylabel("test")
plt.show()

# %%
# Nearest neighbors should not distinguish new from natural sequences: the adversarial accuracy (AATS) should be 0.5.
# New sequences should not be copies either. They should differ from the nearest natural sequence as much as test
# sequences do.

accuracy = sequences.adversarial_accuracy(test, new)
print(f"adversarial accuracy {accuracy.score:.2f}")
for name, rows in {"new": new, "test": test}.items():
    differing = sequences.nearest_distances(rows, train).mean()
    print(f"{name}: {differing:.1f} sites differ on average")
