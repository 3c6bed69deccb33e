"""Machines with matrices, labels and recipes on which the backends are compared with the reference."""

import dataclasses

from backends.cuda.training_runs import DEFAULT, PAPER, spread
from mvrbm.couplings import Dense
from mvrbm.training import CD, PCD
from mvrbm.units import Bernoulli, Categorical, Gaussian

B = Bernoulli
G = Gaussian

#: Visible layers, hidden layer, couplings or their ranks, recipe.
CASES = {
    "bernoulli, paper": ({"x": lambda: B((6, 5))}, lambda: B((4, 7)), [1], PAPER),
    "bernoulli, default": ({"x": lambda: B((6, 5))}, lambda: B((4, 7)), [1], DEFAULT),
    "a rate that falls": (
        {"x": lambda: B((6, 5))}, lambda: B((4, 7)), [1],
        dataclasses.replace(DEFAULT, rate_decay=3, linear_decay=True, planned_updates=9),
    ),
    "gaussian data, default": ({"x": lambda: G((6, 5))}, lambda: B((4, 7)), [1], DEFAULT),
    "gaussian data, as in the paper": (
        {"x": lambda: G((6, 5))}, lambda: B((4, 7)), [1],
        dataclasses.replace(PAPER, bias_from_data=True, learning_rate=0.002),
    ),
    "gaussian hidden layer": ({"x": lambda: B((6, 5))}, lambda: G((4, 7)), [1], dataclasses.replace(DEFAULT, std=0.02)),
    "gaussian data of other variances": (
        {"x": lambda: spread((6, 5))}, lambda: B((4, 7)), [1], dataclasses.replace(PAPER, learning_rate=0.0005),
    ),
    "gaussian hidden layer of other variances": (
        {"x": lambda: B((6, 5))}, lambda: spread((4, 7)), [1], dataclasses.replace(PAPER, factor_std=0.1),
    ),
    "rank 3": ({"x": lambda: B((6, 5))}, lambda: B((4, 7)), [3], DEFAULT),
    "rank 6": ({"x": lambda: B((6, 5))}, lambda: B((4, 7)), [6], DEFAULT),
    "rank 6, PCD": (
        {"x": lambda: B((6, 5))}, lambda: B((4, 7)), [6], dataclasses.replace(DEFAULT, negative=PCD(5, 2)),
    ),
    "rank 2, gaussian data of other variances": (
        {"x": lambda: spread((6, 5))}, lambda: B((4, 7)), [2], dataclasses.replace(PAPER, learning_rate=0.0002),
    ),
    "rank 2, gaussian hidden layer of other variances": (
        {"x": lambda: B((6, 5))}, lambda: spread((4, 7)), [2], dataclasses.replace(PAPER, factor_std=0.1),
    ),
    "rank 3, tiles of two sizes": ({"x": lambda: B((5, 20))}, lambda: B((4, 18)), [3], DEFAULT),
    "rank 2, more chains than samples": (
        {"x": lambda: B((6, 5))}, lambda: B((4, 7)), [2], dataclasses.replace(DEFAULT, negative=PCD(11)),
    ),
    "CD-3": ({"x": lambda: B((6, 5))}, lambda: B((4, 7)), [1], dataclasses.replace(PAPER, negative=CD(3))),
    "PCD": ({"x": lambda: B((6, 5))}, lambda: B((4, 7)), [2], dataclasses.replace(DEFAULT, negative=PCD(5, 2))),
    "more chains than samples": (
        {"x": lambda: G((6, 5))}, lambda: B((4, 7)), [1], dataclasses.replace(DEFAULT, negative=PCD(11)),
    ),
    "label": (
        {"x": lambda: B((6, 5)), "label": lambda: Categorical(3)}, lambda: B((4, 7)), [2, Dense()],
        dataclasses.replace(DEFAULT, negative=PCD(11)),
    ),
    "label first, paper": (
        {"label": lambda: Categorical(3), "x": lambda: G((6, 5))}, lambda: B((4, 7)), [Dense(), 1],
        dataclasses.replace(PAPER, bias_from_data=True, learning_rate=0.002, negative=CD(2)),
    ),
    "label first, PCD": (
        {"label": lambda: Categorical(3), "x": lambda: B((6, 5))}, lambda: G((4, 7)), [Dense(), 1],
        dataclasses.replace(DEFAULT, negative=PCD(5, 2), std=0.02),
    ),
    "two layers": (
        {"x": lambda: B((6, 5)), "z": lambda: G((3, 8))}, lambda: B((4, 7)), [1, 2], DEFAULT,
    ),
    "two layers, PCD": (
        {"x": lambda: B((6, 5)), "z": lambda: G((3, 8))}, lambda: B((4, 7)), [2, 1],
        dataclasses.replace(DEFAULT, negative=PCD(9)),
    ),
    "more than a tile": (
        {"x": lambda: B((66, 3))}, lambda: B((4, 66)), [2], dataclasses.replace(PAPER, factor_std=0.1),
    ),
}  # fmt: skip
