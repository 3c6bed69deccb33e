"""The named recipes: what `generative` reaches on data with an exact likelihood, and that it needs no tuning."""

import dataclasses
import itertools
import json

import numpy as np
import pytest
import torch

from mvrbm import RBM, RandomSource
from mvrbm.couplings import Dense, Kronecker
from mvrbm.likelihood import log_likelihood
from mvrbm.machine import BoltzmannMachine
from mvrbm.training import CD, PCD, Checkpoint, Recipe, Trainer
from mvrbm.units import Bernoulli, DoubleRectified, Gaussian, make_unit
from mvrbm.updates.initialization import offsets
from mvrbm.updates.learning_rate import safe_rates
from mvrbm.updates.recipe import RECIPES, as_recipe


def bars_and_stripes(size=3):
    """All pictures of full rows or full columns: 14 of them for 3 x 3."""
    lines = torch.tensor(list(itertools.product([0.0, 1.0], repeat=size)))
    pictures = torch.cat([lines[:, :, None].expand(-1, size, size), lines[:, None, :].expand(-1, size, size)])
    return torch.unique(pictures, dim=0)


def trained(recipe, n_epochs, seed, link=None):
    data = bars_and_stripes().repeat(30, 1, 1)
    machine = BoltzmannMachine(Bernoulli((3, 3)), Bernoulli((4, 4)), link or Kronecker(4), seed=seed)
    Trainer(machine, dataclasses.replace(RECIPES[recipe], batch_size=42), seed=seed).fit(
        data, n_epochs, initialize=True
    )
    return float(log_likelihood(machine, bars_and_stripes()).mean())


@pytest.mark.slow
@pytest.mark.parametrize(("link", "reached"), [(Kronecker(4), -4.0), (Dense(), -3.2)], ids=["kronecker", "dense"])
def test_the_generative_recipe_learns_a_distribution_and_more_training_does_not_hurt(link, reached):
    # Independent units have -9 log 2 = -6.2 nats, the data itself -log 14 = -2.64.
    short, double, fourfold = (
        sum(trained("generative", n_epochs, seed, link.copy_without_shapes()) for seed in range(2)) / 2
        for n_epochs in (50, 100, 200)
    )
    assert -5.8 < short < double < fourfold
    assert fourfold > reached


@pytest.mark.parametrize("hidden", ["bernoulli", "gaussian"])
@pytest.mark.parametrize("name", ["bernoulli", "gaussian", "gaussian-learned", "categorical", "poisson"])
def test_the_generative_recipe_is_stable_for_every_unit(name, hidden):
    unit = make_unit(name, (4, 3))
    if unit.unsupported_reason(make_unit(hidden, (3, 3))) is not None:
        pytest.skip("no machine couples these layers")
    machine = BoltzmannMachine(unit, make_unit(hidden, (3, 3)), Kronecker(2))
    data = unit.example(200, RandomSource(1))
    trainer = Trainer(machine, dataclasses.replace(RECIPES["generative"], batch_size=50), seed=0)
    trainer.fit({"visible": data}, 100, initialize=True)
    assert trainer.update == 400


def test_a_computed_rate_is_multiplied_only_where_units_saturate():
    rates = {}
    for name in ("bernoulli", "gaussian"):
        machine = BoltzmannMachine(make_unit(name, (16, 15)), Bernoulli((14, 14)), Kronecker(1))
        data = machine.layers["visible"].example(50, RandomSource(0))
        for factor in (1.0, 4.0):
            trainer = Trainer(machine, Recipe(rate_factor=factor), seed=0)
            moments = trainer.prepare(data, initialize=True).moments()
            center = offsets(machine, trainer.recipe, moments)
            assert trainer.recipe.learning_rate == safe_rates(machine, trainer.recipe, moments, center)["visible"]
            rates[name, factor] = trainer.recipe.learning_rate
    assert rates["bernoulli", 4.0] == pytest.approx(4 * rates["bernoulli", 1.0])
    assert rates["gaussian", 4.0] == rates["gaussian", 1.0]


def mixed_layers():
    layers = {"image": Bernoulli((4, 3)), "vector": Gaussian(5)}
    machine = BoltzmannMachine(layers, Bernoulli((3, 3)), {"image": Kronecker(2), "vector": Dense()})
    return machine, {name: unit.example(50, RandomSource(1)) for name, unit in layers.items()}


def test_a_gaussian_layer_does_not_limit_the_rate_of_other_layers():
    machine, data = mixed_layers()
    recipe = dataclasses.replace(RECIPES["generative"], rate_factor=0.4)
    trainer = Trainer(machine, recipe, seed=0)
    trainer.prepare(data, initialize=True)
    image, vector = data["image"], data["vector"]
    power = float((image**2).mean(0).sum() + (vector.var(0, correction=0) / machine.layers["vector"].scale ** 2).sum())
    expected = {"image": 0.6 / (power / 4 + 9 / 16), "vector": 1 / (power / 4 + 9)}
    assert trainer.state.learning_rate == pytest.approx(expected["image"], rel=1e-5)
    assert trainer.state.relative_rates == {"vector": pytest.approx(expected["vector"] / expected["image"], rel=1e-5)}


def test_an_update_moves_each_coupling_by_its_own_rate():
    steps = {}
    for rate in (1.0, 0.25):
        machine, data = mixed_layers()
        trainer = Trainer(machine, Recipe(learning_rate=0.1), seed=0, backend="autograd")
        (batch,) = trainer.prepare(data, initialize=True).batches(50, trainer.order_rng)
        before = {name: p.detach().clone() for name, p in machine.named_parameters()}
        trainer.state.relative_rates = {"vector": rate}
        trainer.train_on(batch)
        steps[rate] = {name: p.detach() - before[name] for name, p in machine.named_parameters()}
    for name, step in steps[1.0].items():
        # The hidden bias follows the centered vector.
        if name != "hidden.bias":
            share = 0.25 if name.startswith("couplings.vector.") else 1.0
            torch.testing.assert_close(steps[0.25][name], share * step, rtol=1e-3, atol=1e-7)


def test_checkpoints_keep_the_rates_of_layers(tmp_path):
    machine, data = mixed_layers()
    recipe = dataclasses.replace(RECIPES["generative"], n_epochs=2, batch_size=10)
    Trainer(machine, recipe, seed=0, callbacks=[Checkpoint(tmp_path)]).fit(data, initialize=True)
    path = max(tmp_path.glob("*/trainer.json"))
    plain = json.loads(path.read_text())
    assert plain["relative_rates"].keys() == {"vector"}
    for stored, expected in ((0.125, {"vector": 0.125}), (None, {})):
        rates = {} if stored is None else {"relative_rates": {"vector": stored}}
        path.write_text(json.dumps({**{k: v for k, v in plain.items() if k != "relative_rates"}, **rates}))
        trainer = Trainer(mixed_layers()[0], recipe, seed=0)
        trainer.resume(tmp_path)
        trainer.prepare(data)
        assert trainer.state.relative_rates == expected  # earlier versions had one rate


@pytest.mark.parametrize("n_features", [2, 10])
def test_few_gaussian_features_and_many_hidden_units_do_not_diverge(n_features):
    data = np.random.default_rng(0).normal(size=(1000, n_features)).astype(np.float32)
    model = RBM(256, visible="gaussian", n_epochs=20, random_state=0).fit(data)
    assert np.abs(model.components_).max() < 10


def test_a_rate_that_does_not_decay_stays_within_the_bound_where_units_are_unbounded():
    machine = BoltzmannMachine(Gaussian(60), Bernoulli(40), Dense())
    data = machine.layers["visible"].example(50, RandomSource(0))
    rates = []
    for decay in (30.0, None):
        trainer = Trainer(machine, Recipe(rate_decay=decay), seed=0)
        trainer.prepare(data, initialize=True)
        rates.append(trainer.recipe.learning_rate)
    assert rates[0] == pytest.approx(3 * rates[1])


def test_what_divides_the_steps_of_learned_variances_does_not_divide_the_rate_as_well():
    data = 10 + Gaussian(60).example(50, RandomSource(0))
    rates = []
    for learn in (False, True):
        machine = BoltzmannMachine(Gaussian(60, learn_variance=learn), Bernoulli(40), Dense())
        trainer = Trainer(machine, Recipe(centering="none"), seed=0)
        trainer.prepare(data, initialize=True)
        rates.append(trainer.recipe.learning_rate)
    assert rates[0] < 0.1 * rates[1]  # the mean square is about 100 instead of 1
    assert rates[1] == pytest.approx(3 / (60 / 4 + 40 / 4), rel=1e-3)


@pytest.mark.parametrize("sample_weight", [None, [1.0, 3.0] * 10])
@pytest.mark.parametrize("optimizer", [None, torch.optim.SGD])
def test_a_prior_is_weight_decay_that_decreases_with_the_number_of_samples(sample_weight, optimizer):
    # The effective number of samples is (sum of weights)^2 / (sum of squared weights) = 40^2 / 100 = 16.
    n = 20 if sample_weight is None else 16
    weights = {}
    for recipe in (Recipe(prior_precision=6, weight_decay=0.1), Recipe(weight_decay=0.1 + 6 / n), Recipe()):
        machine = BoltzmannMachine(Bernoulli((4, 3)), Bernoulli((3, 3)), Kronecker(2))
        make = None if optimizer is None else lambda groups: torch.optim.SGD(groups, lr=0.1)
        trainer = Trainer(machine, dataclasses.replace(recipe, learning_rate=0.1), optimizer=make, seed=0)
        trainer.sample_weight = sample_weight
        data = Bernoulli((4, 3)).example(20, RandomSource(1))
        trainer.fit(data, 3, initialize=True)
        weights[recipe] = machine.links["visible"].dense().detach()
    prior, decay, neither = weights.values()
    torch.testing.assert_close(prior, decay, rtol=1e-6, atol=0)
    assert (prior - neither).abs().max() > 0.01


def test_data_of_unknown_length_has_no_prior():
    machines = []
    for precision in (0.0, 100.0):
        machine = BoltzmannMachine(Bernoulli((4, 3)), Bernoulli((3, 3)), Kronecker(2))
        trainer = Trainer(machine, Recipe(prior_precision=precision, learning_rate=0.1), seed=0)
        trainer.fit(Stream(), 1, initialize=True)
        machines.append(machine)
    torch.testing.assert_close(*(machine.links["visible"].dense() for machine in machines))


class Stream(torch.utils.data.IterableDataset):
    """Twenty samples of a stream, whose number is unknown until an epoch ends."""

    def __iter__(self):
        yield from Bernoulli((4, 3)).example(20, RandomSource(1))


def test_recipes_by_name():
    generative = as_recipe("generative")
    assert isinstance(generative.negative, PCD)
    assert generative.linear_decay
    assert as_recipe("default").negative == CD(1)
    with pytest.raises(ValueError, match="recipe must be one of"):
        as_recipe("discriminative")
    assert Recipe.from_config(generative.config()) == generative
    with pytest.raises(ValueError, match="rate_factor"):
        Recipe(rate_factor=0)
    with pytest.raises(ValueError, match="planned_updates"):
        Recipe(planned_updates=0)


@pytest.mark.parametrize("recipe", ["default", "generative"])
@pytest.mark.parametrize("unit", ["gaussian", "gaussian-learned"])
@pytest.mark.parametrize("seed", range(3))
def test_coupled_gaussian_layers_stay_bounded_on_strongly_correlated_data(unit, recipe, seed):
    # The largest eigenvalue of the correlations is close to the number of entries, so the best norm is close to 1.
    rng = RandomSource(seed)
    like = torch.empty(0)
    data = rng.normal((300, 1, 1), like) + 0.1 * rng.normal((300, 12, 12), like)
    for link in (Dense(), Kronecker(2)):
        machine = BoltzmannMachine(make_unit(unit, (12, 12)), Gaussian((5, 5)), link)
        Trainer(machine, recipe, seed=seed).fit({"visible": data}, 10, initialize=True)
        assert 0.3 < machine.gaussian_norm() < 1


@pytest.mark.parametrize("recipe", ["default", "generative"])
@pytest.mark.parametrize("visible", [Gaussian, DoubleRectified])
def test_double_rectified_hidden_units_stay_bounded_on_strongly_correlated_data(visible, recipe):
    like = torch.empty(0)
    data = RandomSource(0).normal((500, 1), like) + 0.1 * RandomSource(1).normal((500, 8), like)
    machine = BoltzmannMachine(visible(8), DoubleRectified(6), Dense())
    assert machine.may_be_unbounded
    Trainer(machine, recipe, seed=0).fit(data, 5)
    assert 0.3 < machine.gaussian_norm() < 1


@pytest.mark.parametrize(
    ("visible", "hidden", "expected"),
    [
        (Gaussian, Gaussian, True),
        (Gaussian, DoubleRectified, True),
        (DoubleRectified, Gaussian, True),
        (Gaussian, Bernoulli, False),
        (Bernoulli, Gaussian, False),
        (Bernoulli, DoubleRectified, False),
    ],
)
def test_only_machines_with_quadratic_energies_on_both_sides_may_be_unbounded(visible, hidden, expected):
    layers, links = {"bits": Bernoulli(2), "other": visible(3)}, {"bits": Dense(), "other": Dense()}
    machine = BoltzmannMachine(layers, hidden(2), links)
    assert machine.may_be_unbounded is expected
    assert bool(machine.bytes_to_check) is expected
