"""The one update rule, compared with `torch.optim` and with its formulas, and the errors of a run that went wrong."""

import copy
import dataclasses
import math

import pytest
import torch

from mvrbm import Bernoulli, BoltzmannMachine, Kronecker
from mvrbm.training import Callback, DivergenceError, EarlyStopping, Recipe, TensorBoard, Trainer
from mvrbm.updates.learning_rate import learning_rates
from mvrbm.updates.recipe import RECIPES
from mvrbm.updates.step import LARGEST_FACTOR, balance, check_size, gains_of, normalize, step

FACTORS, BIASES = {"U": (3, 4, 5), "V": (3, 6, 2)}, {"b": (5, 2), "c": (4, 6)}


def small_machine(std=0.01, seed=1):
    return BoltzmannMachine(Bernoulli((3, 4)), Bernoulli((2, 5)), Kronecker(1), std=std, seed=seed)


def numbers(seed):
    generator = torch.Generator().manual_seed(seed)
    return {n: torch.randn(s, generator=generator, dtype=torch.float64) for n, s in (FACTORS | BIASES).items()}


def by_the_rule(recipe, rates, n_steps):
    """Parameters and momenta after steps with random gradients, every parameter a move of its own."""
    parameters = numbers(0)
    momenta = {name: torch.zeros_like(p) for name, p in parameters.items()}
    rate, bias_rate = rates
    for number in range(n_steps):
        gradients = numbers(number + 1)
        moves = [(p, momenta[n], rate if n in FACTORS else bias_rate) for n, p in parameters.items()]
        factors = [(parameters[name], gradients[name]) for name in FACTORS]
        step(list(gradients.values()), list(momenta.values()), factors, moves, recipe)
    return parameters, momenta


@pytest.mark.parametrize("rates", [(0.1, 0.1), (0.1, 0.02)])
@pytest.mark.parametrize("weight_decay", [0.0, 0.03])
@pytest.mark.parametrize("momentum", [0.0, 0.5, 0.9])
def test_a_step_is_that_of_sgd_with_decay_of_the_factors_alone(momentum, weight_decay, rates):
    recipe = Recipe(momentum=momentum, weight_decay=weight_decay)
    found, momenta = by_the_rule(recipe, rates, 5)
    wanted = numbers(0)
    groups = [
        {"params": [wanted[name] for name in FACTORS], "lr": rates[0], "weight_decay": weight_decay},
        {"params": [wanted[name] for name in BIASES], "lr": rates[1], "weight_decay": 0.0},
    ]
    optimizer = torch.optim.SGD(groups, momentum=momentum)
    for number in range(5):
        for name, gradient in numbers(number + 1).items():
            wanted[name].grad = gradient
        optimizer.step()
    # PyTorch multiplies the momentum before it adds, the rule does both in one operation: the last bit may differ.
    for name, parameter in wanted.items():
        torch.testing.assert_close(found[name], parameter, rtol=1e-14, atol=1e-15)
        if momentum:
            torch.testing.assert_close(
                momenta[name], optimizer.state[parameter]["momentum_buffer"], rtol=1e-14, atol=1e-15
            )


@pytest.mark.parametrize("tensors", [False, True])
def test_flat_parameters_move_as_separate_ones_do(tensors):
    recipe, rate, bias_rate = Recipe(momentum=0.9, weight_decay=0.03), 0.1, 0.02
    found, momenta = by_the_rule(recipe, (rate, bias_rate), 5)
    sizes = [value.numel() for value in found.values()]
    flat = torch.cat([value.reshape(-1) for value in numbers(0).values()])
    momentum = torch.zeros_like(flat)
    for number in range(5):
        gradient = torch.cat([value.reshape(-1) for value in numbers(number + 1).values()])
        own, of_own, to_own = (
            dict(zip(found, whole.split(sizes), strict=True)) for whole in (flat, momentum, gradient)
        )
        rates = (rate - bias_rate, bias_rate)
        of_factors, of_all = map(torch.tensor, rates) if tensors else rates  # tensors: as CUDA graphs need them
        moves = [(flat, momentum, of_all), *((own[name], of_own[name], of_factors) for name in FACTORS)]
        step([gradient], [momentum], [(own[name], to_own[name]) for name in FACTORS], moves, recipe)
    tolerance = {"rtol": 1e-6, "atol": 1e-7} if tensors else {"rtol": 1e-13, "atol": 1e-14}  # a rate in float32
    torch.testing.assert_close(flat, torch.cat([value.reshape(-1) for value in found.values()]), **tolerance)
    torch.testing.assert_close(momentum, torch.cat([value.reshape(-1) for value in momenta.values()]), **tolerance)


@pytest.mark.parametrize("update", [0, 1, 30, 90, 10**6])
def test_rates_decay_with_the_root_of_the_updates(update):
    for bias_rate, decay in [(0.05, 30), (None, 30), (0.05, None)]:
        recipe = Recipe(learning_rate=0.2, bias_learning_rate=bias_rate, rate_decay=decay)
        left = 1.0 if decay is None else 1 / math.sqrt(1 + update / decay)
        wanted = 0.2 * left, (bias_rate or 0.2) * left
        assert learning_rates(recipe, update) == pytest.approx(wanted, rel=1e-15)
        on_device = learning_rates(recipe, torch.tensor(float(update), dtype=torch.float64))
        assert [float(rate) for rate in on_device] == pytest.approx(wanted, rel=1e-14)
    assert learning_rates(Recipe(learning_rate=0.2), 30)[0] == pytest.approx(0.2 / math.sqrt(2))


@pytest.mark.parametrize(("update", "left"), [(0, 1.0), (25, 0.75), (99, 0.01), (100, 0.0), (130, 0.0)])
def test_rates_fall_to_zero_over_the_planned_updates(update, left):
    recipe = Recipe(learning_rate=0.2, rate_decay=None, linear_decay=True, planned_updates=100)
    for found in (learning_rates(recipe, update), learning_rates(recipe, torch.tensor(float(update)))):
        assert [float(rate) for rate in found] == pytest.approx([0.2 * left, 0.05 * left], abs=1e-7)
    constant = dataclasses.replace(recipe, linear_decay=False)
    assert learning_rates(constant, update) == (0.2, 0.05)


@pytest.mark.parametrize(("planned_epochs", "planned"), [(None, 12), (5, 20), (0, None)])
def test_a_linear_decay_ends_with_the_epochs_of_fit(planned_epochs, planned):
    trainer = Trainer(small_machine(), Recipe(batch_size=10, linear_decay=True), seed=0)
    trainer.planned_epochs = planned_epochs
    trainer.fit(torch.rand(35, 3, 4), 3, initialize=True)
    assert trainer.update_settings().recipe.planned_updates == planned
    assert trainer.recipe.planned_updates is None


def test_normalized_steps_of_the_factors_do_not_depend_on_how_the_scale_is_divided_among_them():
    """The change of W by a step of one factor is the same after the other was multiplied by 8 and this one divided."""
    changes = []
    for scale in (1.0, 8.0):
        machine = small_machine(std=0.5, seed=1).double()
        link = machine.links["visible"]
        with torch.no_grad():
            for factor, by in zip(link.factors, (1 / scale, scale), strict=True):
                factor.mul_(by)
        x = torch.linspace(0, 1, 24, dtype=torch.float64).view(2, 3, 4)
        names, parameters = zip(*machine.named_parameters(), strict=True)
        free_energy = machine.free_energy({"visible": x}).mean()
        gradient = dict(zip(names, torch.autograd.grad(free_energy, parameters), strict=True))
        with torch.no_grad():
            normalize(gains_of(machine, gradient))
        U, V = (factor.detach() for factor in link.factors)
        changes.append(torch.einsum("rki,rlj->kilj", gradient["couplings.visible.factors.0"], V))
        changes.append(torch.einsum("rki,rlj->kilj", U, gradient["couplings.visible.factors.1"]))
    torch.testing.assert_close(changes[2:], changes[:2], rtol=1e-12, atol=1e-14)
    assert all(float(change.abs().max()) > 1e-3 for change in changes)


def test_balance_is_made_only_if_the_recipe_asks_for_it():
    machine = small_machine(std=0.5)
    with torch.no_grad():
        machine.links["visible"].factors[0].mul_(100)
    before = copy.deepcopy(machine.state_dict())
    balance(machine, Recipe(balance=False))
    assert all(torch.equal(value, before[key]) for key, value in machine.state_dict().items())
    balance(machine, Recipe(balance=True))
    first, second = (float(factor.detach().norm()) for factor in machine.links["visible"].factors)
    assert first == pytest.approx(second, rel=1e-5)


# -- divergence -------------------------------------------------------------------------------------


def test_factors_that_saturate_every_unit_are_an_error_and_large_ones_are_not():
    machine = small_machine(std=0.5)
    for value in (1.0, 100.0, -LARGEST_FACTOR):
        machine.links["visible"].factors[1].data[0, 0, 0] = value
        check_size(machine, Recipe(learning_rate=0.5), 7)
    for value in (1e8, -1e8):
        machine.links["visible"].factors[1].data[0, 0, 0] = value
        with pytest.raises(DivergenceError, match=r"update 7: .* layer 'visible' has factors of up to 1e\+08.*\(0.5\)"):
            check_size(machine, Recipe(learning_rate=0.5), 7)
    machine.links["visible"].factors[1].data[0, 0, 0] = 1.0
    machine.layers["visible"].bias.data.fill_(1e8)  # a bias saturates its own unit alone
    check_size(machine, Recipe(learning_rate=0.5), 7)


def bits(n=30):
    return (torch.rand((n, 3, 4), generator=torch.Generator().manual_seed(3)) < 0.4).float()


@pytest.mark.parametrize("backend", ["auto", "reference", "autograd"])
def test_training_with_a_huge_rate_is_an_error_even_where_all_numbers_are_finite(backend):
    class Ended(Callback):
        def on_train_end(self, trainer):
            self.failed = trainer.failed

    ended = Ended()
    recipe = Recipe(learning_rate=1e9, batch_size=10)
    trainer = Trainer(small_machine(), recipe, backend=backend, callbacks=[ended])
    with pytest.raises(DivergenceError, match=r"factors of up to .*Lower the learning rate \(1e\+09\)"):
        trainer.fit(bits(), 2, initialize=True)
    assert trainer.update == 6
    assert all(bool(torch.isfinite(p).all()) for p in trainer.machine.parameters())
    assert trainer.failed
    assert ended.failed
    fine = Trainer(small_machine(), Recipe(batch_size=10), backend=backend).fit(bits(), 2, initialize=True)
    assert not fine.failed


# -- the beginning ----------------------------------------------------------------------------------


@pytest.mark.parametrize("backend", ["auto", "reference", "autograd"])
@pytest.mark.parametrize("recipe", RECIPES)
def test_a_machine_is_not_changed_before_the_first_update(recipe, backend):
    machine = small_machine(std=0.5)
    with torch.no_grad():
        machine.hidden.bias.normal_(generator=torch.Generator().manual_seed(1))
    before = copy.deepcopy(machine.state_dict())
    trainer = Trainer(machine, recipe, backend=backend).fit(bits(), 0)
    assert trainer.update == 0
    assert all(torch.equal(value, before[key]) for key, value in machine.state_dict().items())
    seen = []

    class Seen(Callback):
        def on_epoch_begin(self, trainer):
            seen.append(copy.deepcopy(trainer.machine.state_dict()))

    trainer.callbacks = [Seen()]
    trainer.fit(bits(), 1)
    assert all(torch.equal(value, before[key]) for key, value in seen[0].items())
    assert not any(torch.equal(value, before[key]) for key, value in machine.state_dict().items())


def test_initialize_starts_anew_whatever_the_machine_was():
    ends = []
    for std in (0.5, 3.0):
        machine = small_machine(std=std)
        Trainer(machine, seed=4).fit(bits(), 0, initialize=True)
        assert not torch.equal(machine.links["visible"].factors[0], small_machine(std=std).links["visible"].factors[0])
        ends.append(machine.state_dict())
    assert all(torch.equal(value, ends[0][key]) for key, value in ends[1].items())


@pytest.mark.parametrize("build", [lambda folder: EarlyStopping("reconstruction_error"), TensorBoard])
def test_callbacks_that_follow_metrics_need_a_monitor(tmp_path, build):
    if build is TensorBoard:
        pytest.importorskip("tensorboard")
    callback = build(tmp_path)
    trainer = Trainer(small_machine(), callbacks=[callback])
    with pytest.raises(ValueError, match=f"{type(callback).__name__} requires logged metrics; add a Monitor callback"):
        trainer.fit(bits(), 1, initialize=True)
    assert trainer.update == 0


def test_a_recipe_without_a_rate_is_an_error_instead_of_a_rate_of_zero():
    with pytest.raises(ValueError, match="the recipe has no learning rate"):
        learning_rates(Recipe(bias_learning_rate=None), 0)
