"""The trainer: batches, missing entries, optimizers, interruptions and divergence, and that machines learn."""

import copy
import dataclasses
import itertools
import os
import signal
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from scipy import stats
from torch import optim
from torch.optim import lr_scheduler
from torch.utils.data import IterableDataset

from enumeration import Written, every_combination
from environment import fixed_seeds
from mvrbm import CP, MPO, Bernoulli, BoltzmannMachine, Categorical, Dense, Gaussian, Kronecker, RandomSource
from mvrbm.data.sources import as_source
from mvrbm.models import documents, mvrbm, rbm, replicated_softmax
from mvrbm.sampling import gibbs, mean_field
from mvrbm.saving import read_machine, read_tensors, write_machine
from mvrbm.training import (
    CD,
    PCD,
    RECIPES,
    Callback,
    Checkpoint,
    DivergenceError,
    Monitor,
    Recipe,
    TemperedPCD,
    Trainer,
)
from mvrbm.training import trainer as trainer_module
from mvrbm.updates.gradient import contrast_by_autograd

# Probability that a check of a correct sampler fails with a new seed. The seeds are fixed.
FALSE_ALARM = 1e-4


def patterns(n, shape, seed=0, kinds=4, flip=0.05):
    """Binary samples of a few patterns, with some flipped bits."""
    rng = np.random.default_rng(seed)
    kind = rng.random((kinds, *shape)) < 0.5
    return (kind[rng.integers(kinds, size=n)] ^ (rng.random((n, *shape)) < flip)).astype(np.float32)


def waves(n, shape, seed=0):
    """Real-valued samples that vary in a few directions, with location 3 and scale 2."""
    rng = np.random.default_rng(seed)
    basis = rng.standard_normal((4, *shape))
    noise = 0.3 * rng.standard_normal((n, *shape))
    return (3 + 2 * (np.tensordot(rng.standard_normal((n, 4)), basis, 1) / 2 + noise)).astype(np.float32)


def parameters(machine):
    return {name: p.detach().clone() for name, p in machine.named_parameters()}


def assert_equal(left, right):
    assert set(left) == set(right)
    different = [name for name in left if not torch.equal(left[name], right[name])]
    assert not different


def mixed(dtype=torch.float64):
    layers = {"image": Bernoulli((3, 3)), "signal": Gaussian((2, 2), learn_variance=True), "label": Categorical(3)}
    links = {"image": Kronecker(2), "signal": MPO(2), "label": Dense()}
    return BoltzmannMachine(layers, Bernoulli((2, 3)), links).to(dtype)


def mixed_data(n, seed=0):
    rng = np.random.default_rng(seed)
    label = rng.integers(3, size=n)
    return {
        "image": (rng.random((n, 3, 3)) < 0.2 + 0.3 * label[:, None, None]).astype(np.float32),
        "signal": (5 + label[:, None, None] + 2 * rng.standard_normal((n, 2, 2))).astype(np.float32),
        "label": np.eye(3, dtype=np.float32)[label],
    }


# -- a run is a function of its inputs and a seed ---------------------------------------------------------


@pytest.mark.parametrize("negative", [CD(2), PCD(7, 2), TemperedPCD(5, 3)])
def test_same_seed_gives_the_same_machine(negative):
    ends = []
    for seed in (4, 4, 5):
        machine = mixed(torch.float32)
        Trainer(machine, Recipe(batch_size=20, negative=negative), seed=seed).fit(mixed_data(50), 3, initialize=True)
        ends.append(parameters(machine))
    assert_equal(ends[0], ends[1])
    assert not torch.equal(ends[0]["hidden.bias"], ends[2]["hidden.bias"])


def test_global_generators_do_not_change():
    torch_state, numpy_state = torch.get_rng_state(), np.random.get_state()[1].copy()  # noqa: NPY002
    dataset = torch.utils.data.TensorDataset(torch.from_numpy(patterns(30, (2, 2))))
    for data in (patterns(30, (2, 2)), dataset):
        Trainer(mvrbm((2, 2), (2, 2)), Recipe(batch_size=10)).fit(data, 2, initialize=True)
    assert torch.equal(torch.get_rng_state(), torch_state)
    assert np.array_equal(np.random.get_state()[1], numpy_state)  # noqa: NPY002


@pytest.mark.parametrize("recipe", ["default", "paper", "tempered"])
def test_analytic_and_autograd_training_agree(recipe):
    recipe = Recipe(negative=TemperedPCD(6, 3)) if recipe == "tempered" else RECIPES[recipe]
    ends = []
    for backend in ("auto", "reference", "autograd"):
        machine = mixed()
        trainer = Trainer(machine, dataclasses.replace(recipe, batch_size=20), backend=backend)
        ends.append(parameters(trainer.fit(mixed_data(50), 5, initialize=True).machine))
    for name, value in ends[0].items():
        torch.testing.assert_close(value, ends[1][name], rtol=1e-9, atol=1e-9)


def test_invalid_settings_are_errors():
    machine = mvrbm((2, 2), (2, 2))
    with pytest.raises(ValueError, match=r"recipe must be one of .*'default', 'generative', 'paper'.* got 'papers'"):
        Trainer(machine, "papers")
    with pytest.raises(ValueError, match="backend must be"):
        Trainer(machine, backend="numeric")
    with pytest.raises(ValueError, match="missing_steps"):
        Trainer(machine, missing_steps=0)
    for wrong in [
        {"batch_size": 0},
        {"n_epochs": -1},
        {"learning_rate": 0.0},
        {"learning_rate": float("nan")},
        {"std": float("inf")},
        {"momentum": 1.0},
        {"weight_decay": -0.1},
        {"rate_decay": 0},
        {"rate_decay": 30.5},
        {"planned_updates": 1.5},
        {"linear_decay": "yes"},
        {"bias_from_data": 1},
        {"normalized": None},
        {"balance": "no"},
    ]:
        with pytest.raises(ValueError, match=next(iter(wrong))):
            Recipe(**wrong)
    for make in (lambda: CD(0), lambda: PCD(0), lambda: PCD(3, 0), lambda: TemperedPCD(3, 1)):
        with pytest.raises(ValueError, match="must be a whole number of at least"):
            make()


# -- optimizers and schedulers ----------------------------------------------------------------------------

OPTIMIZERS = {
    "Adam": lambda groups: optim.Adam(groups, lr=0.01),
    "AdamW": lambda groups: optim.AdamW(groups, lr=0.01),
    "RMSprop": lambda groups: optim.RMSprop(groups, lr=0.01, momentum=0.3),
    "Adagrad": lambda groups: optim.Adagrad(groups, lr=0.01),
    "NAdam": lambda groups: optim.NAdam(groups, lr=0.01),
    "SGD": lambda groups: optim.SGD(groups, lr=0.01, momentum=0.9, nesterov=True),
}


@pytest.mark.parametrize("kind", OPTIMIZERS)
def test_any_optimizer_is_given_the_gradient_and_no_more(kind):
    """The same updates by a plain loop: the same random numbers, autograd, and another optimizer."""
    recipe = Recipe(
        batch_size=10,
        weight_decay=0.02,
        centering="none",
        normalized=False,
        balance=False,
        std=0.3,
        bias_from_data=False,
    )
    x = torch.from_numpy(patterns(40, (3, 3))).double()
    machine = mvrbm((3, 3), (2, 2)).double()
    trainer = Trainer(machine, recipe, optimizer=OPTIMIZERS[kind], seed=3)
    trainer.fit(x, 0, initialize=True)
    other = mvrbm((3, 3), (2, 2)).double()
    other.load_state_dict(machine.state_dict())
    trainer.fit(x, 4, initialize=True)
    factors, biases = list(other.couplings.parameters()), [other.layers["visible"].bias, other.hidden.bias]
    optimizer = OPTIMIZERS[kind]([{"params": factors, "weight_decay": 0.02}, {"params": biases, "weight_decay": 0.0}])
    update = 0
    for epoch in range(4):
        for rows in trainer.order_rng.at_step(epoch).permutation(40).split(10):
            batch = {"visible": x[rows]}
            chain = gibbs(other, batch, 1, trainer.state.rng.at_step(update)).visible
            update += 1
            gradient = contrast_by_autograd(other, batch, chain)
            for name, parameter in other.named_parameters():
                parameter.grad = gradient[name]
            optimizer.step()
    for name, value in parameters(machine).items():
        # Adagrad magnifies gradients that are zero up to rounding.
        torch.testing.assert_close(value, parameters(other)[name], rtol=1e-9, atol=1e-8)


class Rates(Callback):
    def __init__(self):
        self.rates = []

    def on_epoch_end(self, trainer):
        self.rates.append(trainer.optimizer.param_groups[0]["lr"])


SCHEDULERS = [
    ("StepLR", lambda o: lr_scheduler.StepLR(o, 2, 0.1), [1, 1, 0.1, 0.1, 0.01]),
    ("MultiStepLR", lambda o: lr_scheduler.MultiStepLR(o, [1, 3], 0.5), [1, 0.5, 0.5, 0.25, 0.25]),
    (
        "CosineAnnealingLR",
        lambda o: lr_scheduler.CosineAnnealingLR(o, 5),
        [(1 + np.cos(np.pi * t / 5)) / 2 for t in range(5)],
    ),
    ("LambdaLR", lambda o: lr_scheduler.LambdaLR(o, lambda t: 1 / (1 + t)), [1, 1 / 2, 1 / 3, 1 / 4, 1 / 5]),
]


@pytest.mark.parametrize(("_", "scheduler", "expected"), SCHEDULERS)
def test_schedulers_step_after_every_epoch(_, scheduler, expected):
    rates = Rates()
    trainer = Trainer(
        mvrbm((2, 2), (2, 2)), Recipe(learning_rate=0.2, batch_size=10), scheduler=scheduler, callbacks=[rates]
    )
    x = patterns(25, (2, 2))
    trainer.fit(x, 2, initialize=True)
    trainer.fit(x, 5, initialize=True)
    np.testing.assert_allclose(rates.rates, 0.2 * np.array(expected), rtol=1e-12)


def test_plateau_scheduler_follows_the_monitor():
    class Scripted(Monitor):
        def measure(self, trainer):
            return {"reconstruction_error": [3.0, 2.0, 2.0, 2.0, 1.0, 1.0][trainer.epoch - 1]}

    rates, x = Rates(), patterns(20, (2, 2))

    def plateau(optimizer):
        return lr_scheduler.ReduceLROnPlateau(optimizer, factor=0.1, patience=0)

    trainer = Trainer(
        mvrbm((2, 2), (2, 2)), Recipe(learning_rate=0.1), scheduler=plateau, callbacks=[Scripted(x), rates]
    )
    trainer.fit(x, 6, initialize=True)
    np.testing.assert_allclose(rates.rates, [0.1, 0.1, 0.1, 0.01, 0.001, 0.001], rtol=1e-9)
    with pytest.raises(ValueError, match="requires the metric 'reconstruction_error'; add a Monitor"):
        Trainer(mvrbm((2, 2), (2, 2)), scheduler=plateau).fit(x, 2, initialize=True)


# -- batches ----------------------------------------------------------------------------------------------


class Spy(Trainer):
    """Records the arguments of every update."""

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self.seen = []

    def train_on(self, batch, weight=1.0):
        self.seen.append((batch, weight))
        super().train_on(batch, weight)


@pytest.mark.parametrize("source", ["array", "loader"])
@pytest.mark.parametrize(("n", "sizes"), [(60, [20, 20, 20]), (53, [20, 20, 13]), (7, [7])])
def test_every_sample_counts_once_and_equally_in_an_epoch(source, n, sizes):
    x = torch.arange(n, dtype=torch.float32)[:, None] / n
    data = x if source == "array" else torch.utils.data.DataLoader(x, batch_size=20, shuffle=True)
    trainer = Spy(rbm(1, 2), Recipe(batch_size=20))
    trainer.fit(data, 2, initialize=True)
    for first in (0, len(sizes)):
        seen = trainer.seen[first : first + len(sizes)]
        assert [len(batch) for batch, _ in seen] == sizes
        together = torch.cat([batch.visible["visible"] for batch, _ in seen])
        assert torch.equal(together.sort(0).values, x)
        shares = [weight / len(batch) for batch, weight in seen]
        np.testing.assert_allclose(shares, [1 / min(n, 20)] * len(sizes), rtol=1e-12)
    assert trainer.update == 2 * len(sizes)
    assert trainer.epoch == 2


def test_n_epochs_includes_the_epochs_of_earlier_calls():
    x = patterns(20, (2, 2))
    in_one, in_three = mvrbm((2, 2), (2, 2)), mvrbm((2, 2), (2, 2))
    Trainer(in_one, Recipe(batch_size=8)).fit(x, 4, initialize=True)
    trainer = Trainer(in_three, Recipe(batch_size=8))
    for n_epochs in (1, 3, 4, 2):
        trainer.fit(x, n_epochs, initialize=True)
    assert_equal(parameters(in_one), parameters(in_three))
    assert Trainer(mvrbm((2, 2), (2, 2)), Recipe(n_epochs=3)).fit(x, initialize=True).epoch == 3


def test_initialize_overrides_the_default():
    machine = mvrbm((3, 3), (2, 2), seed=9)
    start = parameters(machine)
    Trainer(machine).fit(patterns(20, (3, 3)), 0, initialize=False)
    assert_equal(parameters(machine), start)
    Trainer(machine).fit(patterns(20, (3, 3)), 0, initialize=True)
    assert not torch.equal(machine.layers["visible"].bias, start["visible.visible.bias"])


def trained(machine):
    return Trainer(machine).fit(patterns(20, (3, 3)), 1).machine


def loaded(machine):
    other = mvrbm((3, 3), (2, 2))
    other.load_state_dict(machine.state_dict())
    return other


def with_a_bias(machine):
    with torch.no_grad():
        machine.hidden.bias[1, 1] = 0.1
    return machine


def with_other_factors(machine):
    with torch.no_grad():
        machine.links["visible"].factors[0].mul_(2)
    return machine


def saved_and_read(machine, folder):
    write_machine(machine, folder)
    return read_machine(folder)


def with_the_opposite_factors(machine):
    with torch.no_grad():
        machine.links["visible"].factors[0].neg_()
    return machine


def with_reversed_factors(machine):
    with torch.no_grad():
        machine.links["visible"].factors[1].copy_(machine.links["visible"].factors[1].flip(1))
    return machine


def of_the_parts_of_another(machine):
    trained(machine)
    return BoltzmannMachine(machine.layers["visible"], machine.hidden, machine.links["visible"])


CHANGES = [
    trained, loaded, with_a_bias, with_other_factors, with_the_opposite_factors, with_reversed_factors,
    of_the_parts_of_another, saved_and_read,
]  # fmt: skip


@pytest.mark.parametrize("change", CHANGES)
def test_only_new_machines_are_initialized_by_default(tmp_path, change):
    x = patterns(20, (3, 3))
    machine = mvrbm((3, 3), (2, 2), seed=9)
    machine = change(machine, tmp_path) if change is saved_and_read else change(machine)
    assert not machine.is_new
    start = parameters(machine)
    Trainer(machine).fit(x, 0)
    assert_equal(parameters(machine), start)


@pytest.mark.parametrize("convert", [lambda m: m, lambda m: m.double(), copy.deepcopy])
def test_new_machines_are_initialized_by_default(convert):
    x = patterns(20, (3, 3))
    machine = convert(mvrbm((3, 3), (2, 2), seed=9))
    asked = convert(mvrbm((3, 3), (2, 2), seed=9))
    start = parameters(machine)
    Trainer(machine).fit(x, 0)
    Trainer(asked).fit(x, 0, initialize=True)
    assert_equal(parameters(machine), parameters(asked))
    assert not torch.equal(machine.layers["visible"].bias, start["visible.visible.bias"])


@pytest.mark.fixed_seed  # nothing is trained: the fields depend on the drawn patterns and factors alone
def test_default_starts_at_the_log_odds_with_small_hidden_fields():
    x = patterns(500, (6, 6), kinds=20, flip=0.2)
    machine = mvrbm((6, 6), (5, 5))
    Trainer(machine).fit(x, 0, initialize=True)
    mean = (x.sum(0) + 1) / (len(x) + 2)
    np.testing.assert_allclose(machine.layers["visible"].bias.detach(), np.log(mean / (1 - mean)), atol=1e-5)
    field = (machine.hidden_field({"visible": torch.from_numpy(x)}) + machine.hidden.bias).detach()
    assert float(field.mean().abs()) < 0.05
    assert 0.1 < float(field.std()) < 0.6


# -- divergence --------------------------------------------------------------------------------------------


@pytest.mark.fixed_seed  # with some seeds, every unit saturates instead
@pytest.mark.parametrize(("recipe", "rate"), [("paper", 1e20), ("paper", 1e38), ("default", 1e38)])
def test_divergence_leaves_a_finite_machine_and_good_checkpoints(tmp_path, recipe, rate):
    recipe = dataclasses.replace(RECIPES[recipe], learning_rate=rate, batch_size=10)
    x = patterns(100, (4, 4))
    machine = mvrbm((4, 4), (3, 3))
    trainer = Trainer(machine, recipe, callbacks=[Checkpoint(tmp_path, every=1, keep=100)], seed=1)
    with pytest.raises(DivergenceError) as caught:
        trainer.fit(x, 50, initialize=True)
    message = str(caught.value)
    names = [name for name, _ in machine.named_parameters()]
    assert f"update {trainer.update + 1}:" in message
    assert any(f"'{name}'" in message for name in names)
    assert "Lower the learning rate (now 1e+" in message
    assert "use the default recipe" in message
    assert all(bool(torch.isfinite(p).all()) for p in machine.parameters())
    assert trainer.failed
    written = sorted(tmp_path.iterdir())
    assert [path.name for path in written] == [f"update-{u:09d}" for u in range(1, trainer.update + 1)]
    # The checkpoints are complete, although parameters of that size cannot be loaded.
    stored = [read_tensors(path / "model.safetensors") for path in written]
    if stored:
        assert_equal({name: stored[-1][name] for name in names}, dict(machine.named_parameters()))


def test_checkpoint_is_written_at_the_end_of_a_fit_inside_an_error_handler(tmp_path):
    trainer = Trainer(mvrbm((2, 2), (2, 2)), callbacks=[Checkpoint(tmp_path, every=1000)])
    try:
        raise KeyError("something of the user's")
    except KeyError:
        trainer.fit(patterns(20, (2, 2)), 2, initialize=True)
    assert [path.name for path in tmp_path.iterdir()] == ["update-000000002"]


def test_gradient_that_is_not_finite_names_its_parameter():
    machine = mvrbm((3, 3), (2, 2))
    trainer = Trainer(machine, "paper")
    trainer.fit(patterns(30, (3, 3)), 2, initialize=True)
    before = parameters(machine)
    with torch.no_grad():
        machine.links["visible"].factors[1][0, 0, 0] = float("nan")
    with pytest.raises(DivergenceError, match=r"update 3: the gradient of '.*' is not finite"):
        trainer.fit(patterns(30, (3, 3)), 3, initialize=True)
    assert_equal(
        {n: p for n, p in parameters(machine).items() if "factors.1" not in n},
        {n: p for n, p in before.items() if "factors.1" not in n},
    )


def test_an_unbounded_energy_of_gaussian_layers_is_an_error():
    machine = BoltzmannMachine(Gaussian(4), Gaussian(3), Dense())
    recipe = Recipe(learning_rate=0.4, normalized=False, momentum=0.9, batch_size=5)
    with pytest.raises(DivergenceError, match=r"update \d+"):
        Trainer(machine, recipe).fit(waves(200, (4,)), 200, initialize=True)


# -- missing entries --------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Witness(CD):
    """CD that records its data, in which the missing entries have been drawn."""

    seen: list = dataclasses.field(default_factory=list, hash=False, compare=False)

    def draw(self, machine, batch, masks, field, rng, chains):
        self.seen.append({name: array.clone() for name, array in batch.items()})
        return super().draw(machine, batch, masks, field, rng, chains)


def completed(machine, data, missing_steps, **how):
    """The data after missing entries have been drawn, with a machine that hardly changes."""
    witness = Witness()
    recipe = Recipe(learning_rate=1e-12, bias_learning_rate=1e-12, batch_size=5000, negative=witness, balance=False)
    Trainer(machine, recipe, missing_steps=missing_steps, seed=1).fit(data, 1, **how)
    return {name: torch.cat([seen[name] for seen in witness.seen]) for name in machine.layers}


@fixed_seeds()  # the power of the tests depends on the machine
def strong(machine, seed):
    rng = RandomSource(seed)
    machine = machine.double()
    with torch.no_grad():
        for parameter in machine.parameters():
            parameter.copy_(1.2 * rng.normal(parameter.shape, parameter))
    return machine


def chi_square(found, states, log_weights):
    """The p-value of the hypothesis that rows are draws from states with these log-weights."""
    weights = torch.softmax(log_weights, 0).detach().numpy()
    counts = np.array([int((found == state).all(1).sum()) for state in states])
    assert counts.sum() == len(found)
    return stats.chisquare(counts, weights * len(found)).pvalue


@pytest.mark.fixed_seed  # the power depends on the draws
@pytest.mark.parametrize("marked", ["mask", "nan"])
def test_unknown_bits_are_drawn_given_the_known_ones(marked):
    machine = strong(mvrbm((2, 3), (2, 2)), 10)
    n = 4000
    x = np.zeros((n, 2, 3))
    x[:, 0, 0], x[:, 1, 2] = 1, 1
    known = np.zeros((n, 2, 3), dtype=bool)
    known[:, 0, :2], known[:, 1, 2] = True, True
    x[~known] = np.nan if marked == "nan" else 0.7
    how = {"nan_is_missing": True} if marked == "nan" else {"mask": known}
    found = completed(machine, x, 40, **how)["visible"].flatten(1)
    flat = torch.from_numpy(known[0].reshape(-1))
    kept = torch.from_numpy(np.where(known, x, 0)).flatten(1)
    assert torch.equal(found[:, flat], kept[:, flat])
    written = Written(machine)
    clamped = written.known(visible=False)
    clamped[:6] = flat
    terms = written.terms(torch.cat([kept[0], torch.zeros(4, dtype=torch.float64)]), clamped)
    states = every_combination((2,) * 3).double()
    logs = torch.stack(
        [torch.logsumexp(terms.logs[(terms.states[:, :6][:, ~flat] == state).all(1)], 0) for state in states]
    )
    assert chi_square(found[:, ~flat], states, logs) > FALSE_ALARM
    # The test has power: it rejects independent bits with the right means.
    means = found[:, ~flat].mean(0)
    apart = (torch.from_numpy(np.random.default_rng(0).random((n, 3))) < means).double()
    assert chi_square(apart, states, logs) < FALSE_ALARM


@pytest.mark.parametrize("marked", ["mask", "nan"])
def test_unknown_rows_of_categories_are_drawn_given_the_known_ones(marked):
    layers = {"words": Categorical((2, 3)), "bits": Bernoulli(2)}
    machine = strong(BoltzmannMachine(layers, Bernoulli(3), {"words": Dense(), "bits": Dense()}), 5)
    n = 4000
    words = np.zeros((n, 2, 3))
    words[:, 0, 2] = 1
    bits = np.tile([1.0, 0.0], (n, 1))
    known = np.zeros((n, 2, 3), dtype=bool)
    known[:, 0] = True
    if marked == "nan":
        words[~known] = np.nan
    # A layer without a mask is known throughout.
    how = {"nan_is_missing": True} if marked == "nan" else {"mask": {"words": known}}
    found = completed(machine, {"words": words, "bits": bits}, 40, **how)
    assert torch.equal(found["bits"], torch.from_numpy(bits))
    assert torch.equal(found["words"][:, 0], torch.from_numpy(words[:, 0]))
    assert bool(((found["words"] == 0) | (found["words"] == 1)).all())
    states = torch.eye(3, dtype=torch.float64)
    full = torch.stack([torch.stack([torch.from_numpy(words[0, 0]), state]) for state in states])
    energies = Written(machine).free_energy({"words": full, "bits": torch.from_numpy(bits[:3])})
    assert chi_square(found["words"][:, 1], states, -energies) > FALSE_ALARM


def test_unknown_reals_have_the_conditional_mean_and_variance():
    machine = strong(BoltzmannMachine(Gaussian(3), Gaussian(2), Dense()), 2)
    with torch.no_grad():
        machine.links["visible"].weight.mul_(0.7 / torch.linalg.matrix_norm(machine.links["visible"].weight, 2))
    n = 20_000
    x = np.tile([0.5, np.nan, -1.0], (n, 1))
    found = completed(machine, x, 60, nan_is_missing=True)["visible"][:, 1]
    written = Written(machine)
    known = torch.tensor([True, False, True, False, False])
    terms = written.terms(torch.tensor([0.5, 0, -1.0, 0, 0], dtype=torch.float64), known)
    mean, variance = float(terms.states[0, 1].detach()), float(terms.covariance[0, 0].detach())
    score = (found.numpy() - mean) / variance**0.5
    assert stats.kstest(score, "norm").pvalue > FALSE_ALARM


def test_nan_is_an_error_unless_it_marks_missing_entries():
    x = patterns(20, (2, 2))
    x[3, 1, 1] = np.nan
    with pytest.raises(ValueError, match="NaN"):
        Trainer(mvrbm((2, 2), (2, 2))).fit(x, 1, initialize=True)
    Trainer(mvrbm((2, 2), (2, 2))).fit(x, 1, nan_is_missing=True, initialize=True)
    rows = np.zeros((5, 2, 3))
    rows[:3, :, 0] = rows[3:, :, 2] = 1
    rows[0, 0, 1] = np.nan
    with pytest.raises(ValueError, match="must be the same for all entries in a one-hot row"):
        Trainer(BoltzmannMachine(Categorical((2, 3)), Bernoulli(2), Dense())).fit(
            rows, 1, nan_is_missing=True, initialize=True
        )


def test_entries_may_be_missing_in_every_sample():
    for unit, x in [
        (Bernoulli((3, 3)), patterns(50, (3, 3))),
        (Gaussian((3, 3), learn_variance=True), waves(50, (3, 3))),
    ]:
        x[:, 1] = np.nan
        machine = BoltzmannMachine(unit, Bernoulli((2, 2)), Kronecker())
        Trainer(machine, Recipe(batch_size=10)).fit(x, 5, nan_is_missing=True, initialize=True)
        assert all(bool(torch.isfinite(p).all()) for p in machine.parameters())


def pair_moments(machine):
    """Exact E[x_i x_j] of a machine of few bits."""
    states, weights = Written(machine).representatives()
    n = machine.layers["visible"].bias.numel()
    visible = states[:, :n].detach()
    return (visible.T * weights.detach()) @ visible


@pytest.mark.slow
def test_correlations_are_learned_from_incomplete_samples():
    """Six bits in pairs that agree with probability 0.9, with 40 % of the entries missing."""
    rng = np.random.default_rng(0)
    left = rng.random((2000, 3)) < [0.3, 0.5, 0.7]
    x = np.concatenate([left, left ^ (rng.random(left.shape) < 0.1)], 1).astype(np.float64)
    truth = x.T @ x / len(x)
    known = rng.random(x.shape) > 0.4

    def error(data, **how):
        machine = rbm(6, 6).double()
        # A rate that decreases to zero keeps the error of the last steps small.
        recipe = Recipe(
            negative=PCD(100), batch_size=100, learning_rate=0.5, centering="full", rate_decay=None, linear_decay=True
        )
        Trainer(machine, recipe, seed=2).fit(data, 40, **how, initialize=True)
        return np.abs(pair_moments(machine).numpy() - truth).mean()

    assert error(x, mask=known) < 0.05
    assert error(np.where(known, x, 0)) > 0.15


def test_padding_is_kept_in_training():
    rng = np.random.default_rng(0)
    topics = rng.dirichlet(np.full(6, 0.3), 2)
    counts = np.stack([rng.multinomial(rng.integers(1, 6), topics[i % 2]) for i in range(200)])
    words = documents(torch.from_numpy(counts), 5).numpy()
    machine = replicated_softmax(5, 6, 3)
    witness = Witness()
    trainer = Trainer(machine, Recipe(batch_size=50, negative=witness))
    trainer.fit(words, 1, initialize=True)
    start = float(machine.free_energy(torch.from_numpy(words)).mean().detach())
    trainer.fit(words, 20, initialize=True)
    assert all(bool(torch.isfinite(p).all()) for p in machine.parameters())
    assert np.isfinite(start)
    for seen in witness.seen:
        filled = seen["words"].sum(-1)
        assert bool(((filled == 0) | (filled == 1)).all())
    lengths = sorted(int(row.sum()) for seen in witness.seen[-4:] for row in seen["words"])
    assert lengths == sorted(counts.sum(1).tolist())
    for negative in (PCD(30), TemperedPCD(10, 3)):  # their chains would keep the lengths of the first batch
        with pytest.raises(ValueError, match="use CD"):
            Trainer(machine, Recipe(batch_size=50, negative=negative)).fit(words, 2, initialize=True)


def test_a_shared_bias_is_stable():
    x = 3 + np.random.default_rng(0).standard_normal((400, 12, 12)).astype(np.float32)
    unit = Gaussian((12, 12), bias_shape=(1, 1), learn_variance=True)
    Trainer(BoltzmannMachine(unit, Bernoulli((6, 6)), Kronecker())).fit(x, 30, initialize=True)
    assert abs(float(unit.bias.detach()) - 3) < 0.3
    assert 0.5 < float(unit.scale.detach()) < 2


def test_moments_of_large_values_do_not_cancel():
    x = 1e9 + np.random.default_rng(0).standard_normal((3000, 2, 2))
    machine = BoltzmannMachine(Gaussian((2, 2)), Bernoulli((2, 2)), Kronecker()).double()
    Trainer(machine).fit(x, 0, initialize=True)
    np.testing.assert_allclose(machine.layers["visible"].scale.detach(), x.std(0), rtol=1e-4)


def test_data_that_can_be_iterated_only_once_is_an_error():
    class Once(IterableDataset):
        def __init__(self):
            self.items = iter(np.float32(patterns(20, (2, 2))))

        def __iter__(self):
            return self.items

    with pytest.raises(ValueError, match="more than once"):
        Trainer(mvrbm((2, 2), (2, 2))).fit(Once(), 3, initialize=True)


# -- Ctrl-C -----------------------------------------------------------------------------------------------


class CtrlC(Callback):
    def __init__(self, at):
        self.at = at

    def on_batch_begin(self, trainer, batch):
        if trainer.update + 1 == self.at:
            os.kill(os.getpid(), signal.SIGINT)


@pytest.mark.parametrize("at", [1, 4, 5, 7])
def test_ctrl_c_finishes_the_batch_and_saves(tmp_path, at):
    x = patterns(50, (3, 3))

    def trainer(machine, *more):
        return Trainer(
            machine,
            Recipe(batch_size=10, negative=PCD(8)),
            scheduler=lambda o: lr_scheduler.StepLR(o, 1, 0.5),
            callbacks=[Checkpoint(tmp_path / f"{at}", every=1000), *more],
        )

    whole = mvrbm((3, 3), (2, 2))
    Trainer(whole, Recipe(batch_size=10, negative=PCD(8)), scheduler=lambda o: lr_scheduler.StepLR(o, 1, 0.5)).fit(
        x, 3, initialize=True
    )
    former = signal.getsignal(signal.SIGINT)
    machine = mvrbm((3, 3), (2, 2))
    interrupted = trainer(machine, CtrlC(at))
    assert interrupted.fit(x, 3, initialize=True) is interrupted
    assert interrupted.interrupted
    assert interrupted.update == at
    assert signal.getsignal(signal.SIGINT) is former
    assert (tmp_path / f"{at}" / f"update-{at:09d}").is_dir()
    # A new trainer resumes the checkpoint, and this one continues. Both end like an uninterrupted run.
    elsewhere = mvrbm((3, 3), (2, 2))
    resumed = Trainer(
        elsewhere, Recipe(batch_size=10, negative=PCD(8)), scheduler=lambda o: lr_scheduler.StepLR(o, 1, 0.5)
    )
    assert resumed.resume(tmp_path / f"{at}")
    resumed.fit(x, 3, initialize=True)
    interrupted.fit(x, 3, initialize=True)
    assert not interrupted.interrupted
    assert_equal(parameters(machine), parameters(whole))
    assert_equal(parameters(elsewhere), parameters(whole))


def test_second_ctrl_c_interrupts_at_once(tmp_path):
    class Twice(CtrlC):
        def on_batch_begin(self, trainer, batch):
            super().on_batch_begin(trainer, batch)
            super().on_batch_begin(trainer, batch)

    trainer = Trainer(mvrbm((2, 2), (2, 2)), Recipe(batch_size=5), callbacks=[Twice(2), Checkpoint(tmp_path)])
    with pytest.raises(KeyboardInterrupt):
        trainer.fit(patterns(20, (2, 2)), 2, initialize=True)
    assert trainer.update == 1
    assert list(tmp_path.iterdir()) == []


def test_ctrl_c_before_the_first_batch_leaves_a_folder_that_can_be_used(tmp_path):
    class Early(Callback):
        def on_train_begin(self, trainer):
            if trainer.update == 0 and not list(tmp_path.iterdir()) and not hasattr(self, "done"):
                self.done = True
                os.kill(os.getpid(), signal.SIGINT)

    trainer = Trainer(mvrbm((2, 2), (2, 2)), callbacks=[Early(), Checkpoint(tmp_path)])
    assert trainer.fit(patterns(20, (2, 2)), 2, initialize=True).update == 0
    assert trainer.interrupted
    assert trainer.fit(patterns(20, (2, 2)), 2, initialize=True).update == 2


# -- learning ---------------------------------------------------------------------------------------------

SHAPES = {1: ((64,), (24,)), 2: ((8, 8), (5, 5)), 3: ((4, 4, 4), (3, 3, 3)), 4: ((4, 4, 2, 2), (3, 2, 2, 2))}


def reconstruction(machine, x):
    x = torch.from_numpy(x)
    return float(((mean_field(machine, x, 1)["visible"] - x) ** 2).flatten(1).sum(1).mean().detach())


def spread(x):
    return float(((x - x.mean(0)) ** 2).reshape(len(x), -1).sum(1).mean())


@pytest.mark.parametrize("units", ["bernoulli", "gaussian"])
@pytest.mark.parametrize("order", SHAPES)
def test_learning_is_under_way_within_a_hundred_updates(order, units):
    visible, hidden = SHAPES[order]
    unit, data = (Bernoulli, patterns) if units == "bernoulli" else (Gaussian, waves)
    x = data(1000, visible)
    machine = BoltzmannMachine(unit(visible), Bernoulli(hidden), Kronecker(1 if order == 1 else 4))
    errors = []
    for seed in range(5):
        Trainer(machine, seed=seed).fit(x, 0, initialize=True)
        assert reconstruction(machine, x) > 0.95 * spread(x)
        Trainer(machine, seed=seed).fit(x, 10, initialize=True)
        errors.append(reconstruction(machine, x) / spread(x))
    # Over 20 seeds, bits of orders 3 and 4 have mean errors of 0.71 and 0.81, with standard deviations of 0.05 and
    # 0.06. The errors of the other cases are lower. The limits are at least three standard errors of five runs above.
    assert np.mean(errors) < (0.9 if order == 4 else 0.8)


class Norms(Callback):
    def __init__(self):
        self.norms = []

    def on_batch_end(self, trainer, batch):
        factors = trainer.machine.couplings.parameters()
        self.norms.append([float(torch.linalg.vector_norm(p.detach())) for p in factors])


GRID = [case for case in itertools.product(["bernoulli", "gaussian"], SHAPES, [1, 16]) if case[1:] != (1, 16)]


@pytest.mark.parametrize(("units", "order", "rank"), GRID)
def test_defaults_are_stable_over_units_orders_and_ranks(units, order, rank):
    visible, hidden = SHAPES[order]
    unit, data = (Bernoulli, patterns) if units == "bernoulli" else (Gaussian, waves)
    norms = Norms()
    machine = BoltzmannMachine(unit(visible), Bernoulli(hidden), Kronecker(rank))
    x = data(600, visible, seed=order)
    Trainer(machine, callbacks=[norms], seed=order).fit(x, 10, initialize=True)
    assert len(norms.norms) == 60
    path = np.array(norms.norms)
    assert np.isfinite(path).all()
    assert (path <= 2 * path[-1]).all()
    assert reconstruction(machine, x) < spread(x)


@pytest.mark.parametrize("coupling", [Dense, lambda: CP(8), lambda: MPO(4)])
def test_defaults_are_stable_for_the_other_couplings(coupling):
    x = patterns(600, (8, 8), seed=1)
    hidden = 25 if isinstance(coupling(), CP) else (5, 5)
    machine = BoltzmannMachine(Bernoulli((8, 8)), Bernoulli(hidden), coupling())
    norms = Norms()
    Trainer(machine, callbacks=[norms]).fit(x, 10, initialize=True)
    path = np.array(norms.norms)
    assert (path <= 2 * path[-1]).all()
    assert reconstruction(machine, x) < 0.9 * spread(x)


@pytest.mark.parametrize("backend", ["auto", "reference", "autograd"])
def test_steps_shrink_with_learned_variances(backend):
    """One hidden unit explains the data, so that variances fall far below those of the data. Fixed rates diverge."""
    rng = np.random.default_rng(0)
    signs = np.sign(rng.standard_normal((2000, 1)))
    x = signs @ rng.standard_normal((1, 64)) + 0.05 * rng.standard_normal((2000, 64))
    x = x.reshape(-1, 8, 8).astype(np.float32)
    machine = BoltzmannMachine(Gaussian((8, 8), learn_variance=True), Bernoulli(16), Dense())
    recipe = dataclasses.replace(RECIPES["generative"], n_epochs=60)
    Trainer(machine, recipe, seed=1, backend=backend).fit(x, 30, initialize=True)
    assert float(machine.layers["visible"].log_variance.detach().exp().sum()) < 0.1 * spread(x)


def test_gaussian_machine_learns_patches_in_raw_units():
    image = pytest.importorskip("skimage.data").camera()
    rng = np.random.default_rng(0)
    corners = rng.integers(0, np.array(image.shape) - 8, size=(2000, 2))
    x = np.stack([image[i : i + 8, j : j + 8] for i, j in corners])
    assert x.dtype == np.uint8
    machine = BoltzmannMachine(Gaussian((8, 8), learn_variance=True), Bernoulli((8, 8)), Kronecker(4))
    Trainer(machine).fit(x, 10, initialize=True)
    variance = machine.layers["visible"].log_variance.exp()
    assert bool((variance > 0).all())
    assert all(bool(torch.isfinite(p).all()) for p in machine.parameters())
    x = x.astype(np.float32)
    assert reconstruction(machine, x) < 0.5 * spread(x)


def bars_with_labels(n, seed=0):
    """3 x 3 images of one row or one column, with a label that says which."""
    rng = np.random.default_rng(seed)
    image, label = np.zeros((n, 3, 3), dtype=np.float64), np.zeros((n, 2), dtype=np.float64)
    for i, (kind, place) in enumerate(zip(rng.integers(2, size=n), rng.integers(3, size=n), strict=True)):
        image[(i, place) if kind == 0 else (i, slice(None), place)] = 1
        label[i, kind] = 1
    return {"image": image, "label": label}


@pytest.mark.slow
@pytest.mark.parametrize("negative", [CD(1), PCD(100), TemperedPCD(50, 5)])
def test_exact_likelihood_of_a_small_multimodal_problem_rises(negative):
    data = bars_with_labels(600)
    states = {name: torch.from_numpy(np.unique(array.reshape(600, -1), axis=0)) for name, array in data.items()}
    assert len(states["image"]) == 6
    machine = BoltzmannMachine(
        {"image": Bernoulli((3, 3)), "label": Categorical(2)},
        Bernoulli((2, 3)),
        {"image": Kronecker(4), "label": Dense()},
    ).double()
    kinds = {name: torch.from_numpy(array[:60]) for name, array in data.items()}

    def likelihood():
        written = Written(machine)
        with torch.no_grad():
            return float(-written.free_energy(kinds).mean() - written.log_partition())

    recipe = Recipe(batch_size=50, negative=negative, learning_rate=0.5, rate_decay=300, centering="full")
    trainer = Trainer(machine, recipe, seed=1)
    trainer.fit(data, 0, initialize=True)
    start = likelihood()
    trainer.fit(data, 60, initialize=True)
    # Independent entries come to about -6.5; the best possible is -log 6 = -1.8.
    assert start < -6
    assert likelihood() > start + 1.5


def test_updates_before_the_run_has_begun_are_an_error():
    machine = mvrbm((3, 3), (2, 2))
    trainer = Trainer(machine, Recipe(batch_size=4, bias_learning_rate=None))
    x = RandomSource(1).uniform((4, 3, 3), torch.empty(0)).round()
    batch = next(iter(as_source(x, machine).batches(4, RandomSource(0))))
    with pytest.raises(ValueError, match="has not started; call fit or prepare"):
        trainer.train_on(batch)
    assert trainer.update == 0
    trainer.prepare(x)
    trainer.train_on(batch)
    assert trainer.update == 1


@pytest.mark.parametrize("n_before", [20, 30])
def test_gpu_memory_that_will_not_be_reused_is_free_before_memory_is_checked(monkeypatch, n_before):
    x = patterns(20, (3, 3))
    first, second = (Trainer(mvrbm((3, 3), (2, 2))) for _ in range(2))
    of_first, of_second = (SimpleNamespace(n_samples=n_before) for _ in range(2))
    monkeypatch.setitem(trainer_module._kept_backend, first.state, of_first)
    monkeypatch.setitem(trainer_module._kept_backend, second.state, of_second)
    at_check = []
    monkeypatch.setattr(
        trainer_module, "check_training_memory", lambda *_: at_check.append([first.kept_backend, second.kept_backend])
    )
    second.prepare(x)
    assert at_check == [[None, of_second if n_before == 20 else None]]
