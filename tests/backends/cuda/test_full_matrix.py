"""The backend that forms full matrices against the reference, with the same random numbers, and the choice of kernels.

The Triton kernels run in the interpreter, or on a GPU where there is one.
"""

import dataclasses
import importlib.util

import pytest
import torch

from mvrbm import BoltzmannMachine
from mvrbm.couplings import CP, Dense, Kronecker
from mvrbm.data.sources import as_source
from mvrbm.training import CD, PCD, TemperedPCD, Trainer, fit_together
from mvrbm.units import Bernoulli, Categorical, Gaussian

if importlib.util.find_spec("triton") is None:
    pytest.skip("the kernels need triton", allow_module_level=True)
from backends.cuda.training_runs import (
    DEFAULT,
    DEVICE,
    FULL,
    PAPER,
    N,
    assert_same_result,
    by_kernels,
    by_reference,
    data_for,
    everything,
    learning,
    machine_of,
    masks_for,
    never,
    prepared,
    relative_distance,
    spread,
    with_chains,
)
from mvrbm.backends.choose import kernel_backend
from mvrbm.backends.cuda.full_buffers import tile_of
from mvrbm.backends.cuda.full_matrix import FullMatrixBackend, unsupported_reason
from mvrbm.backends.cuda.per_sample import slower_reason
from mvrbm.backends.layout import Layout

MOVING = dataclasses.replace(DEFAULT, momentum=0.5, weight_decay=0.01, negative=CD(2))


def picture():
    return Bernoulli((6, 5))


def hidden():
    return Bernoulli((4, 7))


# Visible layers, hidden layer, couplings, recipe.
CASES = {
    "rank 3": ([picture], hidden, [Kronecker(3)], DEFAULT),
    "a rate that falls": (
        [picture], hidden, [Kronecker(3)],
        dataclasses.replace(DEFAULT, rate_decay=3, linear_decay=True, planned_updates=5),
    ),
    "as in the paper": ([picture], hidden, [Kronecker(2)], PAPER),
    "persistent chains, two steps": ([picture], hidden, [Kronecker(2)], with_chains(DEFAULT, 5, 2)),
    "more chains than samples, centered": ([picture], hidden, [Kronecker(2)], with_chains(FULL, 11)),
    "dense": ([picture], hidden, [Dense()], with_chains(DEFAULT, 9)),
    "dense, centered": ([picture], hidden, [Dense()], FULL),
    "gaussian data": ([lambda: Gaussian((6, 5))], hidden, [Kronecker(2)], DEFAULT),
    "gaussian data of other variances": (
        [lambda: spread((6, 5))], hidden, [Kronecker(2)], dataclasses.replace(PAPER, learning_rate=0.0005),
    ),
    "gaussian hidden layer": (
        [picture], lambda: spread((4, 7)), [Kronecker(2)], dataclasses.replace(PAPER, factor_std=0.1),
    ),
    "label": ([picture, lambda: Categorical(3)], hidden, [Kronecker(2), Dense()], with_chains(DEFAULT, 9)),
    "rows of categories, centered": (
        [picture, lambda: Categorical((2, 3))], hidden, [Kronecker(2), Kronecker(1)],
        dataclasses.replace(FULL, negative=CD(2)),
    ),
    "two layers": ([picture, lambda: Gaussian((3, 8))], hidden, [Kronecker(1), Kronecker(2)], DEFAULT),
    "more than a tile": (
        [lambda: Bernoulli((13, 11))], lambda: Bernoulli((10, 9)), [Kronecker(2)],
        dataclasses.replace(PAPER, factor_std=0.1),
    ),
    "vectors": ([lambda: Bernoulli(64)], lambda: Bernoulli(64), [Dense()], DEFAULT),
    "tempered": ([picture], hidden, [Kronecker(2)], with_chains(DEFAULT, 9, 3, kind=TemperedPCD)),
    "two temperatures": ([picture], hidden, [Kronecker(2)], with_chains(DEFAULT, 9, 2, 3, kind=TemperedPCD)),
    "tempered, centered": ([picture], hidden, [Dense()], with_chains(FULL, 5, 4, 3, kind=TemperedPCD)),
    "tempered label, two steps": (
        [picture, lambda: Categorical(3)], hidden, [Kronecker(2), Dense()],
        with_chains(DEFAULT, 11, 5, 2, kind=TemperedPCD),
    ),
    "tempered, more than a tile": (
        [lambda: Bernoulli((13, 11))], lambda: Bernoulli((10, 9)), [Kronecker(2)],
        with_chains(dataclasses.replace(PAPER, factor_std=0.1), 30, 5, kind=TemperedPCD),
    ),
}  # fmt: skip


VARYING = {
    "Kronecker": ([lambda: learning((6, 5))], hidden, [Kronecker(2)], with_chains(DEFAULT, 9)),
    "dense": ([picture, lambda: learning((3, 8))], hidden, [Kronecker(1), Dense()], MOVING),
    "dense alone": ([lambda: learning(9)], lambda: Bernoulli(7), [Dense()], with_chains(DEFAULT, 9)),
}


#: Machines whose data has missing entries.
MASKED = {
    "CD": ([picture], hidden, [Kronecker(2)], dataclasses.replace(DEFAULT, negative=CD(2))),
    "more chains than samples, centered": ([picture], hidden, [Dense()], with_chains(FULL, 11)),
    "fewer chains than samples": ([lambda: Gaussian((6, 5))], hidden, [Kronecker(2)], with_chains(DEFAULT, 5)),
    "label, centered": (
        [picture, lambda: Categorical(3)], hidden, [Kronecker(2), Dense()], dataclasses.replace(FULL, negative=CD(1)),
    ),
    "variances": ([lambda: learning((6, 5))], hidden, [Kronecker(2)], with_chains(DEFAULT, 9)),
    "many categories": ([picture, lambda: Categorical(40)], hidden, [Kronecker(1), Dense()], DEFAULT),
    "tempered": ([picture], hidden, [Kronecker(2)], with_chains(FULL, 9, 3, kind=TemperedPCD)),
}  # fmt: skip


# Parameters have two buffers: a series of one update ends in the other buffer.
@pytest.mark.parametrize(
    ("name", "series"), [*((name, None) for name in CASES), ("rank 3", 1), ("dense, centered", 1), ("tempered", 1)]
)
@pytest.mark.usefixtures("interpreted")
def test_full_matrices_train_as_the_reference_does(name, series):
    reference, start = by_reference(CASES[name])
    assert_same_result(reference, by_kernels(CASES[name], FullMatrixBackend, series=series), start)


@pytest.mark.parametrize("name", MASKED)
@pytest.mark.usefixtures("interpreted")
def test_missing_entries_are_drawn_as_the_reference_draws_them(name):
    reference, start = by_reference(MASKED[name], masked=True)
    assert_same_result(reference, by_kernels(MASKED[name], FullMatrixBackend, masked=True), start)


@pytest.mark.usefixtures("interpreted")
def test_entries_that_are_nan_are_missing_as_those_that_a_mask_leaves_out():
    def trained(**how):
        trainer = Trainer(machine_of(*case[:3]), case[3], seed=5)
        source = as_source({"x0": how.pop("data")}, trainer.machine, **how)
        trainer.prepare(source, initialize=True)
        backend = FullMatrixBackend([trainer.update_settings()], [trainer.state], [source])
        backend.epoch([trainer.state], torch.arange(N, device=DEVICE)[None], never)
        backend.store([trainer.state])
        return everything(trainer)

    case = MASKED["fewer chains than samples"]
    machine = machine_of(*case[:3])
    x, known = data_for(machine, N)["x0"], masks_for(machine, N)["x0"]
    by_mask = trained(data=x, mask={"x0": known})
    by_nan = trained(data=torch.where(known, x, torch.nan), nan_is_missing=True)
    for key, value in by_mask.items():
        torch.testing.assert_close(by_nan[key], value, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("name", VARYING)
@pytest.mark.usefixtures("interpreted")
def test_learned_variances_train_as_the_reference_does(name):
    """Variances are far from where they began; the power of the data is 5, so that steps are shorter."""

    def change(machine):
        for unit in machine.layers.values():
            if unit.learns_statistic:
                unit.log_variance.data.sub_(torch.linspace(1, 2, unit.bias.numel(), device=DEVICE).view(unit.shape))

    reference, start = by_reference(VARYING[name], change=change)
    assert_same_result(reference, by_kernels(VARYING[name], FullMatrixBackend, change=change), start)
    expected = everything(reference)
    moved = [float((expected[key] - value).abs().max()) for key, value in start.items() if "variance" in key]
    assert max(moved) > 5e-3


@pytest.mark.parametrize("name", ["rank 3", "dense", "label", "more chains than samples, centered", "tempered"])
@pytest.mark.usefixtures("interpreted")
def test_operands_of_sixteen_bits_change_the_result_by_their_rounding(name):
    reference, start = by_reference(CASES[name], torch.float32)
    # A rounded field may lie on the other side of its random number: then one state of hundreds differs.
    assert 1e-6 < relative_distance(reference, by_kernels(CASES[name], FullMatrixBackend, "fp16"), start) < 0.08


@pytest.mark.parametrize(
    ("name", "masked"),
    [
        ("label", False),
        ("label", True),
        ("gaussian data of other variances", False),
        ("dense, centered", False),
        ("tempered, centered", False),
        ("tempered, centered", True),
    ],
)
@pytest.mark.usefixtures("interpreted")
def test_machines_that_train_together_train_as_by_themselves(name, masked):
    def trained(seeds):
        pairs = [prepared(CASES[name], seed, masked=masked) for seed in seeds]
        states, sources = [trainer.state for trainer, _ in pairs], [source for _, source in pairs]
        backend = FullMatrixBackend([trainer.update_settings() for trainer, _ in pairs], states, sources)
        assert backend.epoch(states, torch.arange(N, device=DEVICE).expand(len(seeds), -1), never) == 2
        assert backend.store(states) == [False] * len(seeds)
        return [everything(trainer) for trainer, _ in pairs]

    for mine, alone in zip(trained([0, 1]), trained([0]) + trained([1]), strict=True):
        for key, value in alone.items():
            torch.testing.assert_close(mine[key], value, rtol=1e-4, atol=1e-5)


@pytest.mark.usefixtures("interpreted")
def test_labels_are_drawn_with_their_probabilities():
    # No weights and no rate: chains are independent draws from the biases.
    case = [[lambda: Categorical((3, 5))], hidden, [Dense()], dataclasses.replace(DEFAULT, negative=PCD(400))]
    recipe = dataclasses.replace(case[3], learning_rate=1e-9, bias_learning_rate=1e-9, std=1e-9)
    trainer, source = prepared(case, recipe=recipe, n=8)  # one update per epoch
    unit = trainer.machine.layers["x0"]
    unit.bias.data.copy_(torch.randn(3, 5, generator=torch.Generator().manual_seed(0)))
    backend = FullMatrixBackend([trainer.update_settings()], [trainer.state], [source])
    counts = torch.zeros(3, 5)
    for _ in range(2):
        backend.epoch([trainer.state], torch.arange(8, device=DEVICE)[None], never)
        backend.store([trainer.state])
        counts += trainer.state.chains["x0"].sum(0).cpu()
    expected = 800 * torch.softmax(unit.bias.detach().cpu(), -1)
    chi_square = float(((counts - expected) ** 2 / expected).sum())
    assert chi_square < 32.9  # 12 degrees of freedom, p = 0.001
    assert torch.equal(counts.sum(-1), torch.full((3,), 800.0))


@pytest.mark.usefixtures("interpreted")
@pytest.mark.parametrize(("units", "centering"), [("fixed and learned", "location"), ("learned", "full")])
def test_machines_that_no_kernel_can_train_together_are_trained_one_by_one(units, centering):
    recipe = dataclasses.replace(DEFAULT, centering=centering, n_epochs=1)
    kinds = [lambda: Gaussian(9), lambda: learning(9)] if units == "fixed and learned" else [lambda: learning(9)] * 2
    x = data_for(machine_of(kinds[:1], lambda: Bernoulli(7), [Dense()]), N)

    def trainers():
        return [Trainer(machine_of([kind], lambda: Bernoulli(7), [Dense()]), recipe, seed=1) for kind in kinds]

    together, alone = trainers(), trainers()
    fit_together(together, [x, x])
    for mine, other in zip(together, alone, strict=True):
        other.fit(x, initialize=True)
        assert mine.update == other.update == 2
        for key, value in other.machine.state_dict().items():
            torch.testing.assert_close(mine.machine.state_dict()[key], value, rtol=1e-4, atol=1e-5)


@pytest.mark.usefixtures("interpreted")
@pytest.mark.parametrize("name", ["more chains than samples, centered", "label", "tempered, centered"])
def test_a_backend_continues_with_other_data(name):
    kind = FullMatrixBackend
    tempered = len(CASES[name][3].negative.chain_shape) > 1
    first, second = (prepared(CASES[name], n=8)[0] for _ in range(2))
    sources = [as_source(data_for(first.machine, 8, seed), first.machine) for seed in (3, 4)]
    backend = kind([first.update_settings()], [first.state], sources[:1])
    order = torch.arange(8, device=DEVICE)[None]
    backend.epoch([first.state], order, never)
    backend.store([first.state])
    assert first.recipe.negative.turn(first.state.chains) == int(tempered)  # after three steps
    other = kind([second.update_settings()], [second.state], sources[:1])
    other.epoch([second.state], order, never)
    other.store([second.state])
    assert backend.continues_with([first.update_settings()], [first.state], sources[1:])
    backend.epoch([first.state], order, never)
    backend.store([first.state])
    new = kind([second.update_settings()], [second.state], sources[1:])
    new.epoch([second.state], order, never)
    new.store([second.state])
    for key, value in everything(second).items():
        torch.testing.assert_close(everything(first)[key], value, rtol=1e-4, atol=1e-5)
    longer = as_source(data_for(first.machine, 28), first.machine)
    assert not backend.continues_with([first.update_settings()], [first.state], [longer])


@pytest.mark.usefixtures("interpreted")
def test_what_tempered_kernels_are_not_for():
    def reason(visible, layer, link, *chains):
        recipe = with_chains(DEFAULT, *chains, kind=TemperedPCD) if chains else DEFAULT
        trainer, source = prepared([[visible], layer, [link], recipe])
        return unsupported_reason(trainer.update_settings(), trainer.state, source)

    assert reason(picture, hidden, Kronecker(3), 4) is None
    assert reason(picture, hidden, Kronecker(3)) is None
    assert "40 or more steps" in reason(picture, hidden, Kronecker(3), 4, 3, 40)
    assert "a layer is Gaussian" in reason(lambda: Gaussian((6, 5)), hidden, Kronecker(3), 4)
    assert "a layer is Gaussian" in reason(picture, lambda: Gaussian((4, 7)), Kronecker(3), 4)
    # 2**20 entries, and 2**16 products with factors: 2**12 chains take 2**32.
    square = lambda: Bernoulli((32, 32))  # noqa: E731
    assert reason(square, square, Kronecker(1), 512, 8) is None
    assert "many more products" in reason(square, square, Kronecker(1), 513, 8)
    assert reason(square, square, Kronecker(8), 513, 8) is None
    assert reason(square, square, Dense(), 513, 8) is None


@pytest.mark.usefixtures("interpreted")
def test_a_resumed_run_with_tempered_chains_continues_as_planned(tmp_path):
    case = CASES["tempered"]

    def trainer():
        return Trainer(machine_of(*case[:3]), case[3], seed=5)

    data = data_for(machine_of(*case[:3]), 8)  # one update per epoch: the second begins with the other turn
    planned = trainer().fit(data, 3, initialize=True)
    first = trainer().fit(data, 1, initialize=True)
    first.save(tmp_path)
    second = trainer()
    assert second.resume(tmp_path)
    second.fit(data, 3)
    assert isinstance(second.kept_backend, FullMatrixBackend)
    for key, value in everything(planned).items():
        torch.testing.assert_close(everything(second)[key], value, rtol=1e-4, atol=1e-5)


@pytest.mark.usefixtures("interpreted")
def test_what_full_matrices_are_not_for():
    def reason(visible, links, recipe=DEFAULT, layer=hidden, **how):
        trainer = Trainer(machine_of(visible, layer, links), recipe, **how)
        source = as_source(data_for(trainer.machine, 20), trainer.machine)
        trainer.prepare(source, initialize=True)
        return unsupported_reason(trainer.update_settings(), trainer.state, source)

    assert reason([picture], [Kronecker(3)]) is None
    cube = {"visible": [lambda: Bernoulli((3, 2, 4))], "layer": lambda: Bernoulli((2, 2, 3))}
    assert "two learned matrices" in reason(links=[Kronecker(2)], **cube)
    assert "Kronecker" in reason([picture], [CP(2)], layer=lambda: Bernoulli(9))

    class Other(CD):
        """Another way to draw."""

    assert "Other" in reason([picture], [Kronecker(3)], dataclasses.replace(DEFAULT, negative=Other()))
    assert reason([lambda: learning((6, 5))], [Kronecker(3)]) is None
    assert "not normalized" in reason([lambda: learning((6, 5))], [Kronecker(3)], PAPER)
    assert "centered" in reason([lambda: learning((6, 5))], [Kronecker(3)], FULL)
    assert "more than 8192 variances" in reason([lambda: learning(8193)], [Dense()])
    assert "categories" in reason([lambda: Categorical((2, 65))], [Dense()])
    assert "one bias per entry" in reason([lambda: Bernoulli((6, 5), bias_shape=(1, 5))], [Kronecker(3)])
    assert "padded" in reason([lambda: Categorical((2, 3), padded=True)], [Dense()])
    assert "wider than 64" in reason([lambda: Bernoulli((65, 3))], [Kronecker(2)])
    assert "autograd" in reason([picture], [Kronecker(3)], backend="autograd")
    assert "optimizer" in reason([picture], [Kronecker(3)], optimizer=torch.optim.SGD)
    frozen = machine_of([picture], hidden, [Kronecker(3)])
    frozen.hidden.bias.requires_grad_(False)
    trainer = Trainer(frozen, DEFAULT)
    source = as_source(data_for(frozen, 20), frozen)
    trainer.prepare(source, initialize=True)
    assert "frozen" in unsupported_reason(trainer.update_settings(), trainer.state, source)


@pytest.mark.parametrize(
    ("shape", "hidden_shape", "rank", "rows", "models", "by_sample"),
    [
        ((28, 28), (25, 25), 1, 100, 1, True),
        ((28, 28), (25, 25), 1, 400, 64, True),
        ((28, 28), (25, 25), 4, 100, 1, True),
        ((28, 28), (30, 30), 4, 400, 1, True),
        ((28, 28), (25, 25), 4, 800, 1, True),
        ((28, 28), (25, 25), 8, 264, 1, True),
        ((28, 28), (25, 25), 8, 265, 1, False),  # a program after the first two on some processor
        ((28, 28), (30, 30), 8, 400, 1, False),
        ((64, 64), (50, 50), 1, 100, 1, True),
        ((64, 64), (50, 50), 6, 100, 1, True),
        ((64, 64), (50, 50), 8, 100, 1, False),  # the full matrix has 10 million entries, the products 2.9
    ],
)
def test_one_program_per_sample_or_products_of_batches(shape, hidden_shape, rank, rows, models, by_sample):
    machine = BoltzmannMachine({"x": Bernoulli(shape)}, Bernoulli(hidden_shape), {"x": Kronecker(rank)})
    assert (slower_reason(Layout.of(machine), rows, models, processors=132) is None) is by_sample


@pytest.mark.usefixtures("interpreted")
def test_the_rule_that_chooses_kernels():
    def chosen(links, negative=DEFAULT.negative, visible=(picture,)):
        case = [visible, hidden, links, dataclasses.replace(DEFAULT, negative=negative)]
        trainer, source = prepared(case)
        return kernel_backend(trainer.update_settings(), trainer.state, source, 1)

    assert chosen([Kronecker(2)]) == "per_sample"
    assert chosen([Kronecker(9)]) == "full_matrix"
    assert chosen([Kronecker(12)]) == "full_matrix"
    assert chosen([Kronecker(8)], PCD(400)) == "full_matrix"
    assert chosen([Dense()]) == "full_matrix"
    assert chosen([Kronecker(2)], TemperedPCD(4)) == "full_matrix"
    label = (picture, lambda: Categorical(3))
    assert chosen([Kronecker(1), Dense()], visible=label) == "per_sample"
    assert chosen([Kronecker(9), Dense()], visible=label) == "full_matrix"
    assert chosen([Kronecker(2), Dense()], visible=(picture, lambda: Categorical(17))) == "full_matrix"
    assert chosen([Kronecker(2), Dense()], visible=(picture, lambda: Categorical((2, 3)))) == "full_matrix"
    assert chosen([Dense()], visible=label[1:]) == "full_matrix"


def test_tiles_are_large_where_there_are_enough_of_them():
    assert tile_of(400, 960, 1, 132) == (64, 64)
    assert tile_of(200, 960, 1, 132) == (64, 32)
    assert tile_of(100, 640, 1, 132) == (32, 32)
    assert tile_of(100, 640, 64, 132) == (64, 64)


@pytest.mark.usefixtures("interpreted")
def test_machines_of_a_group_draw_missing_entries_in_their_own_number_of_steps():
    case = MASKED["CD"]
    recipe = dataclasses.replace(case[3], n_epochs=1)

    def trainers():
        return [Trainer(machine_of(*case[:3]), recipe, seed=1, missing_steps=steps) for steps in (1, 2)]

    together, alone = trainers(), trainers()
    machine = together[0].machine
    source = as_source(data_for(machine, N), machine, mask=masks_for(machine, N))
    fit_together(together, [source, source])
    for mine, other in zip(together, alone, strict=True):
        other.fit(source, initialize=True)
        for key, value in other.machine.state_dict().items():
            torch.testing.assert_close(mine.machine.state_dict()[key], value, rtol=1e-4, atol=1e-5)
    assert not torch.equal(together[0].machine.hidden.bias, together[1].machine.hidden.bias)


@pytest.mark.usefixtures("interpreted")
def test_groups_of_machines_use_full_matrices_too():
    recipe = dataclasses.replace(CASES["label"][3], n_epochs=1)
    trainers = [Trainer(machine_of(*CASES["label"][:3]), recipe, seed=seed) for seed in (1, 2)]
    data = data_for(trainers[0].machine, 20)
    outcome = fit_together(trainers, [data, data])
    assert [diverged for diverged, _ in outcome] == [False, False]
    first, second = (everything(trainer) for trainer in trainers)
    assert not torch.equal(first["hidden.bias"], second["hidden.bias"])
