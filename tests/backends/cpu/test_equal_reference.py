"""Every CPU backend against the reference, gradients by autograd in float64, each with its own random numbers.

Whether a unit is 0 or 1 depends on which side of a random number its probability lies. Rounding could change that; with
the seeds of these tests it does not, and all backends draw the same states.
"""

import dataclasses
import functools
import itertools
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from backend_runs import DEFAULT, PAPER, Case, assert_equal_states, everything_in, samples, start, train, with_negative
from mvrbm import Bernoulli, Categorical, Dense, Gaussian, compiled
from mvrbm.backends.choose import choose_backend
from mvrbm.backends.cpu import flat_backend, gemm, native
from mvrbm.backends.layout import not_flat_reason
from mvrbm.backends.reference import ReferenceBackend
from mvrbm.data.sources import Batch, as_source
from mvrbm.updates.gradient import Centering, Share
from mvrbm.updates.negative import CD, PCD

B = Bernoulli
C = Categorical
G = Gaussian
PERSISTENT = with_negative(DEFAULT, PCD(9, 2))
DEEP = with_negative(DEFAULT, CD(3))
CENTERED = with_negative(DEFAULT, PCD(9, 2), centering="full")

needs_compiled_code = pytest.mark.skipif(compiled.library() is None, reason="there is no compiled code")


def learning(shape):
    """Gaussian units that learn their variances, which differ."""
    return _with_variances(G(shape, learn_variance=True))


def sharing(shape, how):
    """Gaussian units that share learned variances."""
    return _with_variances(G(shape, learn_variance=how))


def spread(shape):
    """Gaussian units with different variances."""
    return _with_variances(G(shape))


def _with_variances(unit):
    for name, parameter in unit.named_parameters():
        if name.startswith("log_variance"):
            parameter.data.copy_(torch.linspace(-0.5, 0.9, parameter.numel()).view(parameter.shape))
    return unit


# -- all combinations -------------------------------------------------------------------------------

VISIBLE = {"bernoulli": B, "gaussian": G, "categorical": C, "learned variances": learning}
HIDDEN = {"bernoulli": B, "gaussian": G}
COUPLINGS = {"rank 1": 1, "rank 3": 3, "dense": Dense()}
NEGATIVES = {"CD-1": CD(1), "CD-3": CD(3), "PCD": PCD(11, 2)}
CENTERING = ("none", "location", "full")


def combination(visible, hidden, coupling, negative, centering):
    # Gaussian data has large values, and the hidden fields must stay below 20: there, PyTorch's softplus, which the
    # reference differentiates, becomes linear. The energy of two Gaussian layers is bounded for small weights alone.
    of_real_numbers = visible in ("gaussian", "learned variances")
    std = 0.02 if hidden == "gaussian" else 0.05 if of_real_numbers else 0.3
    rate = 0.002 if centering == "none" and of_real_numbers else 0.02
    recipe = with_negative(DEFAULT, NEGATIVES[negative], centering=centering, std=std, learning_rate=rate)
    layers = {"x": lambda: VISIBLE[visible]((6, 5))}
    return Case(layers, lambda: HIDDEN[hidden]((4, 7)), [COUPLINGS[coupling]], recipe)


COMBINATIONS = list(itertools.product(VISIBLE, HIDDEN, COUPLINGS, NEGATIVES, CENTERING))


@pytest.mark.parametrize(("visible", "hidden", "coupling", "negative", "centering"), COMBINATIONS)
def test_every_combination_of_units_couplings_phases_and_offsets(visible, hidden, coupling, negative, centering):
    case = combination(visible, hidden, coupling, negative, centering)
    check(case, "statistics", torch.float64)
    check(case, "gemm", torch.float64)
    check(case, "gemm", torch.float32)
    if coupling != "dense" and compiled.library() is not None:
        check(case, "native", torch.float32)
    if visible == "categorical" and hidden == "bernoulli":
        check(case, "one_hot", torch.float64)
        check(case, "one_hot", torch.float32)


# -- other machines, and other numbers of samples ------------------------------------------------------

#: Machines that the C code can compute: matrices, and dense layers next to them.
OF_MATRICES = {
    "paper": Case({"x": lambda: B((6, 5))}, lambda: B((4, 7)), [1], PAPER),
    "paper, gaussian data": Case(
        {"x": lambda: G((6, 5))}, lambda: B((4, 7)), [1],
        dataclasses.replace(PAPER, bias_from_data=True, learning_rate=0.002, factor_std=0.1),
    ),
    "paper, several variances": Case(
        {"x": lambda: spread((6, 5))}, lambda: B((4, 7)), [2], dataclasses.replace(PAPER, learning_rate=0.0002),
    ),
    "paper, several hidden variances": Case(
        {"x": lambda: B((6, 5))}, lambda: spread((4, 7)), [2], dataclasses.replace(PAPER, factor_std=0.1),
    ),
    "paper, learned variances": Case(
        {"x": lambda: learning((6, 5))}, lambda: B((4, 7)), [1],
        dataclasses.replace(PAPER, learning_rate=0.0005, factor_std=0.1),
    ),
    "paper, centered": Case(
        {"x": lambda: B((6, 5))}, lambda: B((4, 7)), [1], dataclasses.replace(PAPER, centering="full"),
    ),
    "falling rate": Case(
        {"x": lambda: B((6, 5))}, lambda: B((4, 7)), [1],
        dataclasses.replace(DEFAULT, rate_decay=3, linear_decay=True, planned_updates=9),
    ),
    "one entry": Case({"x": lambda: B((1, 1))}, lambda: B((1, 1)), [1]),
    "one sample": Case({"x": lambda: B((6, 5))}, lambda: B((4, 7)), [1], DEFAULT, (1, 1)),
    "no sample": Case(
        {"x": lambda: B((6, 5)), "y": lambda: C(3)}, lambda: B((4, 7)), [1, Dense()], PERSISTENT, (0, 0),
    ),
    "row and column": Case({"x": lambda: B((1, 40))}, lambda: B((40, 1)), [2]),
    "28 x 28": Case({"x": lambda: B((28, 28))}, lambda: B((25, 25)), [1], DEFAULT, (30, 30)),
    "whole vectors": Case({"x": lambda: B((16, 32))}, lambda: B((32, 16)), [1], DEFAULT, (70,)),
    "one more than whole vectors": Case({"x": lambda: B((17, 33))}, lambda: B((33, 17)), [3], DEFAULT, (20,)),
    "one less than whole vectors": Case({"x": lambda: B((15, 31))}, lambda: B((31, 47)), [1], DEEP, (20,)),
    "wide gaussian hidden layer": Case(
        {"x": lambda: B((6, 5))}, lambda: G((9, 18)), [1], dataclasses.replace(DEFAULT, std=0.02),
    ),
    "more chains than samples": Case(
        {"x": lambda: B((6, 5))}, lambda: B((4, 7)), [1], with_negative(DEFAULT, PCD(11)), (3, 3, 2),
    ),
    "layers": Case(
        {"x": lambda: B((6, 5)), "z": lambda: G((3, 18)), "y": lambda: G((21, 2))}, lambda: B((4, 17)), [1, 2, 3],
        PERSISTENT,
    ),
    "layers, CD": Case({"x": lambda: G((11, 5)), "z": lambda: B((3, 18))}, lambda: B((9, 4)), [3, 1], DEEP, (40,)),
    "labels": Case({"x": lambda: B((6, 5)), "y": lambda: C(10)}, lambda: B((4, 7)), [2, Dense()], PERSISTENT),
    "labels first": Case({"y": lambda: C(3), "x": lambda: B((6, 5))}, lambda: B((4, 7)), [Dense(), 1], DEEP),
    "one label": Case({"y": lambda: C(1), "x": lambda: B((1, 1))}, lambda: B((1, 1)), [Dense(), 1], PERSISTENT),
    "wide categories": Case({"x": lambda: C((6, 19))}, lambda: B((4, 7)), [2], DEEP),
    "dense layers": Case(
        {"u": lambda: C((5, 7)), "x": lambda: B((9, 8)), "v": lambda: G((2, 3, 3)), "w": lambda: B(17)},
        lambda: B((9, 18)), [Dense(), 1, Dense(), Dense()], DEEP,
    ),
    "learned variances, chains": Case(
        {"x": lambda: learning((6, 5)), "y": lambda: learning(4)}, lambda: B((4, 7)), [2, Dense()], PERSISTENT,
    ),
    "shared variances": Case(
        {"x": lambda: sharing((6, 5), "axes"), "y": lambda: sharing((3, 4), "one")}, lambda: B((4, 7)), [2, 1],
        PERSISTENT,
    ),
    "shared variances, CD": Case({"x": lambda: sharing((6, 5), "axes")}, lambda: B((4, 7)), [1], DEEP),
    "shared variances, gaussian hidden layer": Case(
        {"x": lambda: sharing((6, 5), "one")}, lambda: G((4, 7)), [1], dataclasses.replace(DEFAULT, std=0.02),
    ),
    "paper, variances per axis": Case(
        {"x": lambda: sharing((6, 5), "axes")}, lambda: B((4, 7)), [1],
        dataclasses.replace(PAPER, learning_rate=0.0001),
    ),
    "centered, one variance": Case({"x": lambda: sharing((16, 16), "one")}, lambda: B((4, 7)), [2], CENTERED),
    "centered": Case(
        {"x": lambda: B((6, 5)), "y": lambda: C((2, 10))}, lambda: B((4, 7)), [2, Dense()], CENTERED,
    ),
    "centered, learned variances": Case({"x": lambda: learning((16, 16))}, lambda: B((4, 7)), [2], CENTERED),
    "everything": Case(
        {"x": lambda: learning((6, 5)), "y": lambda: C((2, 3)), "z": lambda: B((3, 8)), "w": lambda: learning(4)},
        lambda: B((4, 7)), [2, Dense(), 1, Dense()], CENTERED,
    ),
    "several groups of samples": Case({"x": lambda: B((40, 40))}, lambda: B((30, 30)), [6], DEFAULT, (60,)),
}  # fmt: skip

#: Machines that the C code can compute, but for which matrix products are faster.
SLOWER_IN_C = {
    "one column": Case({"x": lambda: B((300, 1))}, lambda: B((200, 1)), [1]),
    "one row": Case({"x": lambda: B((1, 600))}, lambda: B((1, 400)), [1]),
    "narrow": Case({"x": lambda: B((400, 4))}, lambda: B((40, 3)), [1], PERSISTENT),
    "few hidden columns": Case({"x": lambda: G((28, 28))}, lambda: B((100, 2)), [1]),
    "many dense weights": Case(
        {"x": lambda: B((28, 28)), "y": lambda: C(100)}, lambda: B((25, 25)), [1, Dense()], DEEP,
    ),
}  # fmt: skip

#: Machines that only the matrix products of PyTorch can compute.
OTHERS = {
    "dense, shared variances": Case({"x": lambda: sharing((2, 3, 4), "axes")}, lambda: B(17), [Dense()], PERSISTENT),
    "order 3, variances per axis": Case(
        {"x": lambda: sharing((3, 4, 5), "axes")}, lambda: B((2, 4, 3)), [2], PERSISTENT,
    ),
    "dense": Case({"x": lambda: B((6, 5))}, lambda: B((4, 7)), [Dense()]),
    "dense, paper": Case({"x": lambda: B(11)}, lambda: B(7), [Dense()], PAPER),
    "dense, several orders": Case({"x": lambda: G((3, 2, 4))}, lambda: B((5, 2)), [Dense()], PERSISTENT),
    "dense, labels": Case({"x": lambda: B(37), "y": lambda: C(10)}, lambda: B(17), [Dense(), Dense()], PERSISTENT),
    "dense, no sample": Case({"x": lambda: B(37)}, lambda: B(17), [Dense()], PERSISTENT, (0, 0)),
    "dense, centered": Case({"x": lambda: B(37), "y": lambda: G(3)}, lambda: B(17), [Dense(), Dense()], CENTERED),
    "dense, large": Case({"x": lambda: B(401)}, lambda: B(199), [Dense()], PERSISTENT, (90,)),
    "order 1": Case({"x": lambda: B(6)}, lambda: B(4), [1], PAPER),
    "order 3": Case({"x": lambda: B((3, 4, 5))}, lambda: B((4, 2, 3)), [1]),
    "order 3, rank 2": Case({"x": lambda: G((3, 4, 5))}, lambda: B((2, 4, 3)), [2], PERSISTENT),
    "order 4": Case({"x": lambda: B((3, 2, 1, 3))}, lambda: B((2, 3, 2, 1)), [3], PAPER),
    "several orders": Case(
        {"x": lambda: B((3, 4, 5)), "y": lambda: C((2, 3)), "z": lambda: B(4)}, lambda: B((4, 2, 3)),
        [2, Dense(), Dense()], PERSISTENT,
    ),
}  # fmt: skip


#: Machines of categorical layers.
OF_CATEGORIES = {
    "one-hot, wide": OF_MATRICES["wide categories"],
    "one-hot, paper": Case({"x": lambda: C((6, 5))}, lambda: B((4, 7)), [3], PAPER),
    "one-hot, vectors": Case({"x": lambda: C((9, 4))}, lambda: B((5, 1)), [2], PERSISTENT),
    "one-hot, layers": Case(
        {"x": lambda: C((6, 5)), "y": lambda: C(3), "z": lambda: C((2, 3, 4))}, lambda: B((4, 7)),
        [2, Dense(), Dense()], CENTERED,
    ),
    "one-hot, no sample": Case({"x": lambda: C((6, 5))}, lambda: B((4, 7)), [1], PERSISTENT, (0, 0)),
    "one-hot, one category": Case({"x": lambda: C((6, 1)), "y": lambda: C(3)}, lambda: B(4), [Dense(), Dense()]),
}  # fmt: skip


@pytest.mark.parametrize("name", OF_CATEGORIES)
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_sums_of_rows_train_as_the_reference_does(name, dtype):
    check(OF_CATEGORIES[name], "one_hot", dtype)


@pytest.mark.parametrize("name", [*OF_MATRICES, *OTHERS])
@pytest.mark.parametrize(
    ("backend", "dtype"), [("statistics", torch.float64), ("gemm", torch.float64), ("gemm", torch.float32)]
)
def test_products_train_as_the_reference_does(name, backend, dtype):
    check((OF_MATRICES | OTHERS)[name], backend, dtype)


@needs_compiled_code
@pytest.mark.parametrize("name", OF_MATRICES)
def test_compiled_code_trains_as_the_reference_does(name, processor):
    check(OF_MATRICES[name], "native", torch.float32)


@needs_compiled_code
@pytest.mark.parametrize("name", SLOWER_IN_C)
def test_compiled_code_trains_as_the_reference_does_where_it_is_slower(name):
    run = start(SLOWER_IN_C[name])
    assert native.slower_reason(run.settings, run.state) is not None
    check(SLOWER_IN_C[name], "native", torch.float32)


@pytest.mark.parametrize("name", ["dense", "dense, labels"])
def test_matrix_products_can_be_requested_where_they_are_slower(name):
    run = start(OTHERS[name])
    assert gemm.slower_reason(run.state) is not None
    assert isinstance(make("gemm", run), gemm.GemmBackend)  # compared with the reference above


def check(case, backend, dtype):
    """Train a machine by a backend and by the reference, and compare parameters, momenta and chains."""
    exact = start(case, dtype=torch.float64, by_autograd=sum(case.sizes) > 0)
    before = {name: value.clone() for name, value in everything_in(exact.state).items()}
    expected = train(ReferenceBackend(exact.settings), exact)
    run = start(case, dtype=dtype)
    compare(train(make(backend, run), run), expected, dtype)
    after = everything_in(expected)
    moved = max(float((after[name] - value).abs().max()) for name, value in before.items())
    assert moved > 1e-3, "the reference has hardly learned: the comparison shows nothing"


def compare(found, expected, dtype):
    """Compare two states up to rounding."""
    if dtype == torch.float64:
        assert_equal_states(found, expected, rtol=1e-9, atol=1e-11)
    else:
        assert_equal_states(found, expected, rtol=1e-4, atol=2e-5)


def make(backend, run, threads=2):
    """Return a backend for a run."""
    if backend == "reference":
        return ReferenceBackend(run.settings)
    if backend == "statistics":
        return ReferenceBackend(run.settings)
    source = as_source(samples(run.state.machine, 1), run.state.machine)
    return choose_backend([run.settings], [run.state], [source], threads, name=backend)


# -- several processes ----------------------------------------------------------------------------------

IN_PARTS = {
    "labels": OF_MATRICES["labels"],
    "layers": OF_MATRICES["layers"],
    "centered": OF_MATRICES["centered"],
    "everything": OF_MATRICES["everything"],
    "dense, labels": OTHERS["dense, labels"],
    "several orders": OTHERS["several orders"],
}
#: Samples and chains of the two parts: 3 and 5 of 8 samples, 4 and 5 of 9 chains.
PARTS = (Share(3 / 8, 4 / 9, 0, 0), Share(5 / 8, 5 / 9, 3, 4))


@pytest.mark.parametrize(
    ("backend", "name"),
    [
        *[("statistics", name) for name in IN_PARTS],
        *[("gemm", name) for name in IN_PARTS],
        ("one_hot", "one-hot, layers"),
        *[pytest.param("native", name, marks=needs_compiled_code) for name in IN_PARTS if name in OF_MATRICES],
    ],
)
def test_two_parts_of_an_update_are_those_of_the_reference(name, backend):
    case = (IN_PARTS | OF_CATEGORIES)[name]._replace(sizes=(8, 8))
    dtype = torch.float32 if backend == "native" else torch.float64
    for found, expected in zip(in_parts(case, backend, dtype), in_parts(case, "reference", torch.float64), strict=True):
        compare(found, expected, dtype)


def in_parts(case, backend, dtype):
    """Train by two threads that stand for two processes, and return both states."""
    meet = threading.Barrier(len(PARTS), timeout=60)
    messages = [None] * len(PARTS)

    def sum_of_all(number, flat):
        messages[number] = flat.clone()
        meet.wait()
        total = sum(messages)
        meet.wait()
        flat.copy_(total)

    def work(number):
        share = PARTS[number]
        run = start(case, dtype=dtype, by_autograd=backend == "reference")
        reduce = functools.partial(sum_of_all, number)
        own = dataclasses.replace(case.recipe.negative, n_chains=round(9 * share.chains))
        run = run._replace(
            settings=dataclasses.replace(run.settings, negative=own, n_processes=len(PARTS), all_reduce=reduce),
            batches=[
                {name: array[share.first_sample :][: round(8 * share.data)] for name, array in batch.items()}
                for batch in run.batches
            ],
        )
        if run.state.centering is not None:
            center = run.state.centering
            run.state.centering = Centering(
                center.machine, center.center, follow_hidden=center.follow_hidden, all_reduce=reduce
            )
        return train(make(backend, run), run, share=share)

    with ThreadPoolExecutor(len(PARTS)) as pool:
        return list(pool.map(work, range(len(PARTS))))


# -- missing entries ------------------------------------------------------------------------------------


@pytest.mark.parametrize("backend", ["gemm", pytest.param("native", marks=needs_compiled_code)])
@pytest.mark.parametrize(
    "name", ["paper", "28 x 28", "labels", "layers", "wide categories", "dense layers", "centered", "everything"]
)
def test_missing_entries_are_drawn_as_the_reference_does(name, backend):
    exact = start(OF_MATRICES[name], dtype=torch.float64, by_autograd=True)
    run = start(OF_MATRICES[name])
    share = Share(first_sample=4)
    reference = ReferenceBackend(exact.settings)
    fast = make(backend, run)
    for number, data in enumerate(run.batches):
        data, known = hidden_entries(run.state.machine, data, seed=number)
        batch = Batch(data, known, len(next(iter(data.values()))))
        doubled = Batch({key: array.double() for key, array in data.items()}, known, batch.total)
        expected = reference.draw_missing(exact.state, doubled, 3, share)
        drawn = fast.draw_missing(run.state, batch, 3, share)
        for key, array in expected.items():
            torch.testing.assert_close(drawn[key].double(), array, rtol=1e-4, atol=1e-4)
        for key, mask in known.items():
            assert torch.equal(drawn[key][mask], data[key][mask])
            assert data[key].isnan().any(), "the batch itself must not change"
        reference.update(exact.state, expected, 1.0, share)
        fast.update(run.state, drawn, 1.0, share)
    assert_equal_states(fast.store(run.state), exact.state, rtol=1e-4, atol=2e-5)


def hidden_entries(machine, data, seed):
    """Return data with NaN at half of the sites of every layer except the last of several, and the known entries."""
    generator = torch.Generator().manual_seed(seed)
    complete = list(data)[-1] if len(data) > 1 else None
    data = {name: array.clone() for name, array in data.items()}
    known = {}
    for name, unit in machine.layers.items():
        if name == complete:
            continue
        sites = torch.rand((len(data[name]), *unit.site_shape), generator=generator) < 0.5
        known[name] = (sites[..., None] if unit.entry_modes else sites).expand(data[name].shape)
        data[name][~known[name]] = float("nan")
    return data, known


# -- what the backends do not support ---------------------------------------------------------------------


def test_autograd_is_not_replaced_where_it_was_requested():
    run = start(OF_MATRICES["paper"], by_autograd=True)
    assert flat_backend.unsupported_reason(run.settings, run.state) == "gradients by autograd were requested"


@needs_compiled_code
def test_compiled_code_computes_in_single_precision_alone():
    run = start(OF_MATRICES["paper"], dtype=torch.float64)
    assert "float64" in native.unsupported_reason(run.settings, run.state)


@needs_compiled_code
@pytest.mark.parametrize("how", ["axes", "one"])
def test_shared_variances_are_computed_by_c_code_and_not_by_kernels(how):
    run = start(Case({"x": lambda: sharing((6, 5), how)}, lambda: B((4, 7)), [1]))
    assert native.unsupported_reason(run.settings, run.state) is None
    assert not_flat_reason(run.settings, run.state) == "it learns variances that several entries share"
