"""The recipe `paper` is Algorithm 1: the same numbers as a plain-NumPy transcription that is fed the same draws."""

import dataclasses

import numpy as np
import pytest
import torch

from mvrbm import Bernoulli, BoltzmannMachine, Dense, Recorder
from mvrbm.backends.reference import own_step
from mvrbm.models import mvrbm
from mvrbm.training import CD, RECIPES, Trainer


def sigmoid(m):
    return 1 / (1 + np.exp(-m))


def algorithm_1(X, U, V, T, orders, uniforms, *, alpha=0.05, beta=0.01, gamma=0.5, b=100, K=1):
    """Algorithm 1 line by line, one sample at a time, with (14) to (17) for the slopes.

    `orders` are the T random divisions of the data, `uniforms` the numbers that states are drawn with: first
    those of all Y of a batch, then those of all X, and so on. Where b does not divide N, the slopes of the
    last batch are sums over fewer samples, still divided by b: each sample counts the same.
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
                Yk = [(u < sigmoid(U @ x @ V.T + C)).astype(float) for u, x in zip(draws, Xk, strict=True)]
                draws = next(uniforms)
                Xk = [(u < sigmoid(U.T @ y @ V + B)).astype(float) for u, y in zip(draws, Yk, strict=True)]
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


def recorded(machine, recipe, n_epochs, X, start=None, **kwargs):
    """Train, and return the trainer with all that it drew."""
    trainer = Trainer(machine, recipe, seed=11, **kwargs)
    trainer.state.rng, trainer.order_rng = Recorder(trainer.state.rng), Recorder(trainer.order_rng)
    if start is not None:
        with torch.no_grad():
            for factor, value in zip(machine.links["visible"].factors, start, strict=True):
                factor.copy_(torch.from_numpy(value)[None])
    trainer.fit(X, n_epochs, initialize=start is None)
    orders = [draw.numpy() for draw in trainer.order_rng.draws]
    return orders, [draw.numpy() for draw in trainer.state.rng.draws]


CASES = [  # samples, size of a batch, steps of CD, standard deviation of the factors at the start
    ("batches divide the data, CD-1", 200, 100, 1, 0.01),
    ("a short batch at the end, CD-1", 250, 100, 1, 0.01),
    ("away from the saddle", 60, 20, 1, 0.5),
    ("away from the saddle, short batch, CD-3", 50, 20, 3, 0.5),
    ("fewer samples than a batch", 30, 100, 1, 0.5),
]


@pytest.mark.parametrize("backend", ["auto", "reference"])
@pytest.mark.parametrize(("_", "n", "b", "K", "std"), CASES)
def test_preset_paper_makes_the_updates_of_algorithm_1(_, n, b, K, std, backend):
    X = data(n, (4, 5))
    rng = np.random.default_rng(3)
    U, V = std * rng.standard_normal((3, 4)), std * rng.standard_normal((2, 5))
    recipe = dataclasses.replace(RECIPES["paper"], batch_size=b, negative=CD(K))
    machine = mvrbm((4, 5), (3, 2)).double()
    passes = 6
    orders, uniforms = recorded(machine, recipe, passes, X, start=(U, V), backend=backend)
    assert len(orders) == passes
    assert len(uniforms) == passes * -(-n // b) * 2 * K
    size = min(b, n)  # one batch that is not full is not a short one: nothing else is there to compare it with
    U, V, B, C = algorithm_1(X, U, V, passes, orders, uniforms, b=size, K=K)
    factors = machine.links["visible"].factors
    for learned, expected in [(factors[0][0], U), (factors[1][0], V), (machine.layers["visible"].bias, B)]:
        np.testing.assert_allclose(learned.detach().numpy(), expected, rtol=0, atol=1e-12)
    np.testing.assert_allclose(machine.hidden.bias.detach().numpy(), C, rtol=0, atol=1e-12)
    assert np.abs(U).max() > 1e-3
    assert np.abs(B).max() > 1e-2


def test_order_is_drawn_anew_for_every_pass():
    machine = mvrbm((2, 2), (2, 2)).double()
    orders, _ = recorded(machine, RECIPES["paper"], 3, data(50, (2, 2)))
    assert all(sorted(order) == list(range(50)) for order in orders)
    assert len({tuple(order) for order in orders}) == 3


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
        own_step(trainer.state, gradient, trainer.task(), 1.0, 0)
    for name, parameter in machine.named_parameters():
        decay = 0.01 if name.startswith("couplings.") else 0.0
        first = before[name] - 0.05 * decay * before[name]
        momentum = 0.5 * decay * before[name] + 1 + decay * first
        torch.testing.assert_close(parameter.detach(), first - 0.05 * momentum, rtol=1e-6, atol=1e-8)
    assert trainer.optimizer is None
