"""The recipe `paper` is Algorithm 1: the same parameters as a plain NumPy transcription with the same random numbers.

The random numbers are transcribed in NumPy too, from the documentation of `mvrbm.random.philox`.
"""

import dataclasses

import numpy as np
import pytest
import torch

from mvrbm import Bernoulli, BoltzmannMachine, Dense
from mvrbm.models import mvrbm
from mvrbm.training import CD, RECIPES, Callback, Trainer
from mvrbm.updates.update import recipe_step


def sigmoid(m):
    return 1 / (1 + np.exp(-m))


def algorithm_1(X, U, V, T, orders, uniforms, *, alpha=0.05, beta=0.01, gamma=0.5, b=100, K=1):
    """Algorithm 1 line by line, one sample at a time, with (14) to (17) for the slopes.

    `orders` are the T random divisions of the data. `uniforms` are the numbers that states are drawn with: an array
    for all Y of a batch, then one for all X, and so on; a short batch uses the first numbers of each. Where b does not
    divide N, the slopes of the last batch are sums over fewer samples, still divided by b: each sample counts the same.
    """
    U, V = U.copy(), V.copy()
    B, C = np.zeros(X.shape[1:]), np.zeros((U.shape[0], V.shape[0]))
    dU, dV, dB, dC = np.zeros_like(U), np.zeros_like(V), np.zeros_like(B), np.zeros_like(C)
    orders, uniforms = iter(orders), iter(uniforms)
    for _ in range(T):
        order = next(orders)
        for start in range(0, len(X), b):
            batch = [X[n] for n in order[start : start + b]]
            Xk = list(batch)
            for _ in range(K):
                draws = next(uniforms)
                Yk = [(u < sigmoid(U @ x @ V.T + C)).astype(float) for u, x in zip(draws, Xk, strict=False)]
                draws = next(uniforms)
                Xk = [(u < sigmoid(U.T @ y @ V + B)).astype(float) for u, y in zip(draws, Yk, strict=False)]
            pairs = list(zip(batch, Xk, strict=True))
            sU = sum(-sigmoid(U @ x @ V.T + C) @ V @ x.T + sigmoid(U @ k @ V.T + C) @ V @ k.T for x, k in pairs)
            sV = sum(-sigmoid(U @ x @ V.T + C).T @ U @ x + sigmoid(U @ k @ V.T + C).T @ U @ k for x, k in pairs)
            sB = sum(-x + k for x, k in pairs)
            sC = sum(-sigmoid(U @ x @ V.T + C) + sigmoid(U @ k @ V.T + C) for x, k in pairs)
            dU = gamma * dU + alpha * (-sU / b - beta * U)
            dV = gamma * dV + alpha * (-sV / b - beta * V)
            dB = gamma * dB + alpha * (-sB / b)
            dC = gamma * dC + alpha * (-sC / b)
            U, V, B, C = U + dU, V + dV, B + dB, C + dC
    return U, V, B, C


def data(n, shape, seed=5):
    rng = np.random.default_rng(seed)
    patterns = rng.random((3, *shape)) < 0.5
    return (patterns[rng.integers(3, size=n)] ^ (rng.random((n, *shape)) < 0.1)).astype(float)


def philox(counter, key):
    """Philox 4x32 with ten rounds: four words per counter, from a key of 64 bits."""
    c0, c1, c2, c3 = (np.asarray(word, dtype=np.uint64) for word in np.broadcast_arrays(*counter))
    mask = np.uint64(0xFFFFFFFF)
    half = np.uint64(32)
    k0, k1 = key & 0xFFFFFFFF, key >> 32
    for _ in range(10):
        product0 = np.uint64(0xD2511F53) * c0
        product1 = np.uint64(0xCD9E8D57) * c2
        c0, c1, c2, c3 = (
            (product1 >> half) ^ c1 ^ np.uint64(k0),
            product1 & mask,
            (product0 >> half) ^ c3 ^ np.uint64(k1),
            product0 & mask,
        )
        k0 = (k0 + 0x9E3779B9) % 2**32
        k1 = (k1 + 0xBB67AE85) % 2**32
    return c0, c1, c2, c3


def uniforms(key, n, shape, update, draw):
    """Numbers of n samples (n, rows, columns): four neighbors share a counter, and an odd last column comes last."""
    rows, columns = shape
    sample, row, column = np.meshgrid(np.arange(n), np.arange(rows), np.arange(columns), indexing="ij")
    odd = columns % 2 if columns > 1 else 0
    last = column == columns - odd
    place = np.where(last, rows * (columns - odd) + row, row * (columns - odd) + column)
    words = np.stack(philox((place // 4, sample, update, draw), key))
    word = np.take_along_axis(words, (place % 4)[None], 0)[0]
    return ((word >> np.uint64(9)).astype(float) + 0.5) / 2**23


def order_of(key, n, epoch):
    """The order of n samples: they are sorted by keys of 40 bits."""
    high, low, _, _ = philox((np.arange(n), 0, epoch, 0), key)
    return np.argsort((high << np.uint64(8)) | (low >> np.uint64(24)), kind="stable")


def test_philox_has_the_published_numbers():
    """Known answers of the authors' implementation, Random123."""
    assert [int(word) for word in philox((0, 0, 0, 0), 0)] == [0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8]
    ones = 0xFFFFFFFF
    assert [int(word) for word in philox((ones, ones, ones, ones), 2**64 - 1)] == [
        0x408F276D,
        0x41C83B0E,
        0xA20BC7C6,
        0x6D5451FD,
    ]


CASES = [  # samples, size of a batch, steps of CD, standard deviation of the factors at the start
    ("batches divide the data, CD-1", 200, 100, 1, 0.01),
    ("a short batch at the end, CD-1", 250, 100, 1, 0.01),
    ("away from the saddle", 60, 20, 1, 0.5),
    ("away from the saddle, short batch, CD-3", 50, 20, 3, 0.5),
    ("fewer samples than a batch", 30, 100, 1, 0.5),
]


@pytest.mark.parametrize("backend", ["auto", "reference", "autograd"])
@pytest.mark.parametrize(("_", "n", "b", "K", "std"), CASES)
def test_preset_paper_makes_the_updates_of_algorithm_1(_, n, b, K, std, backend):
    X = data(n, (4, 5))
    rng = np.random.default_rng(3)
    U, V = std * rng.standard_normal((3, 4)), std * rng.standard_normal((2, 5))
    recipe = dataclasses.replace(RECIPES["paper"], batch_size=b, negative=CD(K))
    machine = mvrbm((4, 5), (3, 2)).double()
    with torch.no_grad():
        for factor, value in zip(machine.links["visible"].factors, (U, V), strict=True):
            factor.copy_(torch.from_numpy(value)[None])
    passes = 6
    trainer = Trainer(machine, recipe, seed=11, backend=backend).fit(X, passes)
    orders = [order_of(trainer.order_rng.key, n, epoch) for epoch in range(passes)]
    numbers = []
    for update in range(passes * -(-n // b)):
        for draw in range(2 * K):
            shape = (3, 2) if draw % 2 == 0 else (4, 5)  # those of Y, then those of X
            numbers.append(uniforms(trainer.state.rng.key, min(b, n), shape, update, draw))
    size = min(b, n)  # one batch that is not full is not a short one: nothing else is there to compare it with
    U, V, B, C = algorithm_1(X, U, V, passes, orders, numbers, b=size, K=K)
    factors = machine.links["visible"].factors
    for learned, expected in [(factors[0][0], U), (factors[1][0], V), (machine.layers["visible"].bias, B)]:
        np.testing.assert_allclose(learned.detach().numpy(), expected, rtol=0, atol=1e-12)
    np.testing.assert_allclose(machine.hidden.bias.detach().numpy(), C, rtol=0, atol=1e-12)
    assert np.abs(U).max() > 1e-3
    assert np.abs(B).max() > 1e-2


def test_order_is_new_in_every_epoch():
    class Rows(Callback):
        def __init__(self):
            self.orders = {}

        def on_batch_end(self, trainer, batch):
            self.orders.setdefault(trainer.epoch, []).extend(batch.visible["visible"].flatten().tolist())

    rows = Rows()
    x = np.arange(50)[:, None, None] / 64
    trainer = Trainer(mvrbm((1, 1), (2, 2)).double(), "paper", callbacks=[rows]).fit(x, 3)
    orders = [[int(64 * value) for value in order] for order in rows.orders.values()]
    assert all(sorted(order) == list(range(50)) for order in orders)
    assert len({tuple(order) for order in orders}) == 3
    assert orders == [order_of(trainer.order_rng.key, 50, epoch).tolist() for epoch in range(3)]


def test_preset_paper_holds_the_numbers_of_the_paper():
    recipe = RECIPES["paper"]
    assert recipe.n_epochs == 10_000
    assert recipe.learning_rate == 0.05
    assert recipe.weight_decay == 0.01
    assert recipe.momentum == 0.5
    assert recipe.batch_size == 100
    assert recipe.negative == CD(1)
    assert recipe.factor_std == 0.01
    assert not any([recipe.bias_from_data, recipe.normalized, recipe.balance])
    assert (recipe.centering, recipe.rate_decay) == ("none", None)


@pytest.mark.parametrize("coupled", ["kronecker", "dense"])
def test_preset_paper_starts_small_and_decays_the_factors_alone(coupled):
    dense = BoltzmannMachine(Bernoulli(40), Bernoulli(60), Dense())
    machine = mvrbm((40, 40), (30, 30)) if coupled == "kronecker" else dense
    trainer = Trainer(machine, "paper", seed=2)
    trainer.fit(data(100, machine.layers["visible"].shape), 0, initialize=True)
    factors = torch.cat([p.detach().flatten() for p in machine.links["visible"].parameters()])
    assert abs(float(factors.mean())) < 5 * 0.01 / len(factors) ** 0.5
    assert float(factors.std()) == pytest.approx(0.01, rel=5 / (2 * len(factors)) ** 0.5)
    for unit in (machine.layers["visible"], machine.hidden):
        assert not unit.bias.any()
    # Two steps with a gradient of zero at first, then of one: rate 0.05, momentum 0.5, decay 0.01 of the factors alone.
    before = {name: p.detach().clone() for name, p in machine.named_parameters()}
    for value in (0.0, 1.0):
        gradient = {name: torch.full_like(p, value) for name, p in machine.named_parameters()}
        recipe_step(trainer.state, gradient, trainer.recipe, 1.0, 0)
    for name, parameter in machine.named_parameters():
        decay = 0.01 if name.startswith("couplings.") else 0.0
        first = before[name] - 0.05 * decay * before[name]
        momentum = 0.5 * decay * before[name] + 1 + decay * first
        torch.testing.assert_close(parameter.detach(), first - 0.05 * momentum, rtol=1e-6, atol=1e-8)
    assert trainer.optimizer is None
