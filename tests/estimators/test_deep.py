"""Stacks of machines: against definitions, enumeration and a deep belief network by hand."""

import signal

import numpy as np
import pandas as pd
import pytest
import torch
from sklearn.base import clone
from sklearn.datasets import load_digits
from sklearn.linear_model import LogisticRegression
from sklearn.pipeline import make_pipeline

import mvrbm
from enumeration import Written, every_visible_state
from mvrbm import MPO, MVRBM, Bernoulli, BoltzmannMachine, DeepMVRBM, Dense, Kronecker, RandomSource
from mvrbm.errors import StorageError
from mvrbm.estimators import Layer
from mvrbm.saving import read_machine, read_stack
from mvrbm.training import Callback, Checkpoint, Recipe, Trainer
from tables import generator, randomize


@pytest.fixture(scope="module")
def digits():
    return (load_digits().images[:600] / 16).astype(np.float32)  # (600, 8, 8)


@pytest.fixture(scope="module")
def stack(digits):
    layers = ((6, 6), Layer((4, 3), MPO(bond=2)), Layer(7, Dense()))
    return DeepMVRBM(layers, rank=2, n_epochs=4, random_state=0).fit(digits)


def sigmoid(x):
    return 1 / (1 + np.exp(-x))


# -- stacks -----------------------------------------------------------------------------------------------


def test_one_layer_is_the_machine_itself(digits):
    settings = {"rank": 2, "n_epochs": 2, "random_state": 3}
    deep, single = DeepMVRBM(((5, 4),), **settings).fit(digits), MVRBM((5, 4), **settings).fit(digits)
    np.testing.assert_array_equal(deep.transform(digits), single.transform(digits))
    np.testing.assert_array_equal(deep.reconstruct(digits, steps=2), single.reconstruct(digits, steps=2))
    np.testing.assert_array_equal(deep.components(), single.components())
    np.testing.assert_array_equal(deep.sample(4, steps=3), single.sample(4, steps=3))
    mask = np.arange(8)[:, None] + np.zeros(8) < 5
    mine, theirs = (m.inpaint(digits[:3], mask, steps=4, burn_in=2) for m in (deep, single))
    np.testing.assert_array_equal(mine[:, mask], theirs[:, mask])


def dense_network(rng):
    """A dense stack with random parameters, and the parameters."""
    X = rng.random((6, 5))
    deep = DeepMVRBM((Layer(4, Dense()), Layer(3, Dense())), n_epochs=0, random_state=0).fit(X)
    parameters = []
    with torch.no_grad():
        for machine in deep.machines_:
            for parameter in machine.parameters():
                parameter.copy_(torch.from_numpy(rng.standard_normal(parameter.shape)))
            W = machine.links["visible"].weight.numpy()
            parameters.append((W, machine.layers["visible"].bias.numpy(), machine.hidden.bias.numpy()))
    return deep, X, parameters


def test_a_dense_stack_is_a_deep_belief_network():
    deep, X, ((W1, b1, c1), (W2, b2, c2)) = dense_network(generator("dbn"))
    h1 = sigmoid(X @ W1.T + c1)
    h2 = sigmoid(h1 @ W2.T + c2)
    np.testing.assert_allclose(deep.transform(X, layer=0), h1)
    np.testing.assert_allclose(deep.transform(X, layer=1), h2)
    np.testing.assert_array_equal(deep.transform(X), deep.transform(X, layer=-1))
    down = sigmoid(h2 @ W2 + b2)
    np.testing.assert_allclose(deep.inverse_transform(h2), sigmoid(down @ W1 + b1))
    np.testing.assert_allclose(deep.reconstruct(X), sigmoid(down @ W1 + b1))
    np.testing.assert_allclose(deep.reconstruct(X, layer=0), sigmoid(h1 @ W1 + b1))
    np.testing.assert_allclose(deep.components(), W2 @ W1)
    p = sigmoid(down @ W1 + b1)
    np.testing.assert_allclose(deep.score_samples(X), (X * np.log(p) + (1 - X) * np.log(1 - p)).sum(1))


def test_samples_follow_the_network_from_the_top_down():
    """Exact p(X) = sum over Y_1 of p_top(Y_1) p(X | Y_1), enumerated; 40,000 draws are within 0.02 of it."""
    rng = generator("ancestral")
    deep = DeepMVRBM(((1, 2), (2, 1)), n_epochs=0, random_state=0).fit(rng.random((4, 1, 3)))
    for machine in deep.machines_:
        randomize(machine, rng, size=1.5)
    bottom, top = deep.machines_
    y = every_visible_state(top)["visible"]
    log_prior = -Written(top).free_energy({"visible": y}).detach()
    prior = torch.softmax(log_prior, 0)
    x = every_visible_state(bottom)["visible"].flatten(1)
    W = bottom.links["visible"].dense().reshape(2, 3).detach()
    ones = torch.sigmoid(y.flatten(1) @ W + bottom.layers["visible"].bias.flatten().detach())
    given = torch.where(x[None].bool(), ones[:, None], 1 - ones[:, None]).prod(2)  # (y, x)
    exact = prior @ given
    drawn = torch.from_numpy(deep.sample(40_000, steps=30)).flatten(1)
    counts = (drawn[:, None] == x[None]).all(2).double().mean(0)
    assert float(exact.max() - exact.min()) > 0.1  # otherwise the test would show nothing
    assert float((counts - exact).abs().sum() / 2) < 0.02


@pytest.mark.parametrize("feed", ["mean", "sample"])
def test_each_machine_is_trained_on_the_layer_below(digits, feed):
    X = digits[:300]
    deep = DeepMVRBM(((5, 5), (4, 4)), feed=feed, n_epochs=2, random_state=5).fit(X)
    seeds = np.random.RandomState(5).randint(2**31 - 1, size=2)
    below = MVRBM((5, 5), n_epochs=2, random_state=5).fit(X)
    np.testing.assert_array_equal(below.transform(X), deep.transform(X, layer=0))
    fed = deep._training_data({"visible": X}, 1, RandomSource(0))
    if feed == "mean":
        np.testing.assert_array_equal(fed, below.hidden_maps(X))
        machine = BoltzmannMachine(Bernoulli((5, 5)), Bernoulli((4, 4)), Kronecker())
        Trainer(machine, Recipe(n_epochs=2), seed=int(seeds[1])).fit(fed, initialize=True)
        for name, parameter in machine.named_parameters():
            assert torch.equal(parameter, deep.machines_[1].get_parameter(name)), name
    else:
        assert set(np.unique(fed)) == {0.0, 1.0}
        np.testing.assert_allclose(fed.mean(0), below.hidden_maps(X).mean(0), atol=0.15)
        assert deep.trainers_[1].epoch == 2


def test_orders_and_couplings_mix(stack, digits):
    assert [stack.transform(digits[:5], layer=k).shape for k in range(3)] == [(5, 36), (5, 12), (5, 7)]
    assert stack.hidden_maps(digits[:5], layer=1).shape == (5, 4, 3)
    assert stack.sample(2, steps=2).shape == (2, 8, 8)
    assert [m.links["visible"].name for m in stack.machines_] == ["kronecker", "mpo", "dense"]
    assert stack.n_parameters_ == sum(p.numel() for m in stack.machines_ for p in m.parameters())


def test_partial_fit_goes_on_with_every_machine(digits):
    whole = DeepMVRBM(((5, 5), (4, 4)), n_epochs=1, random_state=0).fit(digits)
    parts = DeepMVRBM(((5, 5), (4, 4)), n_epochs=1, random_state=0).partial_fit(digits)
    np.testing.assert_array_equal(whole.transform(digits), parts.transform(digits))
    before = [m.links["visible"].dense().detach().clone() for m in parts.machines_]
    parts.partial_fit(digits[:200])
    assert [t.epoch for t in parts.trainers_] == [2, 2]
    assert all(not torch.equal(old, m.links["visible"].dense()) for old, m in zip(before, parts.machines_, strict=True))


@pytest.mark.parametrize(("visible", "limit"), [("bernoulli", 1.0), ("gaussian", 0.7)])
def test_rectified_stacks_learn(digits, visible, limit):
    deep = DeepMVRBM(((10, 10), (8, 8)), rank=4, hidden="rectified", visible=visible, n_epochs=20, random_state=0)
    deep.fit(digits)
    assert [m.layers["visible"].name for m in deep.machines_] == [visible, "gaussian"]
    error = ((deep.reconstruct(digits) - digits) ** 2).sum()
    assert error < limit * ((digits.mean(0) - digits) ** 2).sum()  # before training: 1.2
    assert deep.sample(3, steps=5).shape == (3, 8, 8)
    assert float(deep.transform(digits).min()) >= 0


def test_filling_in_keeps_what_is_known_and_finds_the_rest():
    """Stripes: a column is all ones or all zeros, so that the other four rows determine two of them."""
    columns = (generator("stripes").random((600, 1, 6)) < 0.5).astype(np.float32)
    stripes = np.repeat(columns, 6, axis=1)
    deep = DeepMVRBM((Layer(24, Dense()), Layer(24, Dense())), n_epochs=40, random_state=0).fit(stripes)
    X, mask = stripes[:50].copy(), np.ones((6, 6), bool)
    mask[2:4] = False
    X[:, ~mask] = np.nan
    filled = deep.inpaint(X, mask, steps=20, burn_in=10)
    np.testing.assert_array_equal(filled[:, mask], stripes[:50][:, mask])
    assert np.abs(filled - stripes[:50])[:, ~mask].mean() < 0.2  # 0.5 by chance


def test_saved_and_loaded_it_is_the_same(stack, digits, tmp_path):
    stack.save(tmp_path / "stack")
    again = mvrbm.load(tmp_path / "stack")
    np.testing.assert_array_equal(again.transform(digits), stack.transform(digits))
    np.testing.assert_array_equal(again.reconstruct(digits[:9]), stack.reconstruct(digits[:9]))
    assert again.get_params()["rank"] == 2
    assert again.layers[1].coupling.config() == {"bond": 2} or again.layers[1].coupling.config()["bond"] == [2]
    again.partial_fit(digits[:100])
    clone(again).fit(digits[:50])
    frame = pd.DataFrame(digits[:50].reshape(50, -1), columns=[f"p{k}" for k in range(64)])
    named = DeepMVRBM((6, 3), n_epochs=1, random_state=0).fit(frame)
    named.save(tmp_path / "named")
    assert mvrbm.load(tmp_path / "named").transform(frame).shape == (50, 3)


def test_what_is_no_stack_is_refused(stack, digits, tmp_path):
    folder = tmp_path / "model"
    MVRBM((4, 4), n_epochs=1).fit(digits[:20]).save(folder)
    with pytest.raises(StorageError, match="does not contain a list of machines"):
        read_stack(folder)
    stack.save(folder, overwrite=True)
    with pytest.raises(StorageError):
        read_machine(folder)
    config = (folder / "config.json").read_text()
    for old, new in [('"bond"', '"bonds"'), ('"dtype": "float32"', '"dtype": "float64"'), ('"as_arrays"', '"as"')]:
        (folder / "config.json").write_text(config.replace(old, new))
        with pytest.raises(StorageError):
            mvrbm.load(folder)


def test_training_continues_with_warm_start(stack, digits, tmp_path):
    whole = DeepMVRBM(((5, 5), (4, 4)), n_epochs=2, random_state=0, warm_start=True).fit(digits)
    before = [machine.links["visible"].dense().detach().clone() for machine in whole.machines_]
    machines = list(whole.machines_)
    whole.set_params(n_epochs=1).fit(digits)
    assert all(one is other for one, other in zip(whole.machines_, machines, strict=True))
    assert (whole.n_epochs_, whole.n_updates_) == (3, 36)
    loaded = mvrbm.load(whole.save(tmp_path / "stack")).fit(digits[:200])
    assert loaded.n_epochs_ == 4
    for old, new, last in zip(before, whole.machines_, loaded.machines_, strict=True):
        assert 0 < float((old - new.links["visible"].dense()).detach().abs().max()) < 0.5
        assert 0 < float((last.links["visible"].dense() - new.links["visible"].dense()).detach().abs().max()) < 0.5
    with pytest.raises(ValueError, match="training cannot continue"):
        loaded.set_params(layers=((5, 5),)).fit(digits)


def test_weights_and_biases_as_of_bernoulli_rbm(stack):
    np.testing.assert_allclose(stack.components_, stack.components().reshape(7, -1), rtol=1e-4, atol=1e-6)
    assert (stack.intercept_visible_.shape, stack.intercept_hidden_.shape) == ((64,), (7,))


def test_it_is_a_step_of_a_pipeline(digits):
    y = load_digits().target[:600]
    rows = digits.reshape(len(digits), -1)
    deep = DeepMVRBM(((7, 7), (6, 6)), rank=2, visible_shape=(8, 8), n_epochs=5, random_state=0)
    pipeline = make_pipeline(deep, LogisticRegression(max_iter=2000)).fit(rows[:400], y[:400])
    features = clone(deep).fit(digits[:400])
    by_hand = LogisticRegression(max_iter=2000).fit(features.transform(digits[:400]), y[:400])
    np.testing.assert_array_equal(pipeline.predict(rows), by_hand.predict(features.transform(digits)))
    names = pipeline[:-1].get_feature_names_out()
    assert (len(names), names[0]) == (36, "deepmvrbm0")
    assert deep.set_output(transform="pandas").transform(rows[:3]).shape == (3, 36)


MISTAKES = [
    ({"layers": ()}, "layers must be a nonempty sequence"),
    ({"layers": 5}, "layers must be a nonempty sequence"),
    ({"layers": ((4, 4), 3)}, "layer 1: Kronecker couplings require the same number of hidden"),
    ({"layers": (Layer((4, 4), 3),)}, "coupling of layer 0 must be a coupling such as Dense"),
    ({"layers": (Layer((4, 4), hidden="logistic"),)}, "hidden units of layer 0 must be one of"),
    (
        {"layers": (Layer((4, 4), hidden="categorical"), (4, 4))},
        "layer 1 cannot be stacked on a layer of categorical units",
    ),
    ({"feed": "noise"}, "feed must be one of"),
    ({"backend": "fast"}, "backend must be"),
    ({"visible": "categorial"}, "visible must be one of"),
]


@pytest.mark.parametrize(("settings", "message"), MISTAKES)
def test_mistakes_are_named(settings, message, digits):
    with pytest.raises(ValueError, match=message):
        DeepMVRBM(**{"n_epochs": 1, **settings}).fit(digits[:9])


def test_what_stacks_do_not_do_is_refused(stack, digits):
    X = digits[:5]
    for call in (
        lambda: stack.fit(X, mask=X > 0),
        lambda: stack.fit(np.where(X > 0, X, np.nan)),
        lambda: stack.partial_fit(X, mask=X > 0),
        lambda: stack.sample(5, init=X, mask=X > 0),
        lambda: stack.sample(5, init=np.where(X > 0, X, np.nan)),
    ):
        with pytest.raises(
            ValueError, match=r"^mask must be None|so mask must be None and|^X must not contain unknown entries"
        ):
            call()
    with pytest.raises(ValueError, match=r"layer must be in the range -3 to 2, got 3"):
        stack.transform(X, layer=3)
    with pytest.raises(ValueError, match="hidden values"):
        stack.inverse_transform(np.zeros((2, 5)))
    with pytest.raises(ValueError, match=r"indices in 'which' must be from 0 to 6"):
        stack.components([7])


@pytest.mark.parametrize("feed", ["mean", "sample"])
@pytest.mark.parametrize("at", [2, 5, 6, 9])  # of 6 updates per machine
def test_an_interrupted_stack_is_resumed_bit_for_bit(tmp_path, feed, at):
    class Killed(Callback):
        updates = 0

        def on_batch_end(self, trainer, batch):
            self.updates += 1
            if self.updates == at:
                raise ZeroDivisionError

    X = (np.random.default_rng(0).random((20, 4, 4)) < 0.4).astype(np.float32)

    def fit(**settings):
        return DeepMVRBM(((3, 3), (2, 2)), n_epochs=3, batch_size=10, feed=feed, random_state=0).fit(X, **settings)

    with pytest.raises(ZeroDivisionError):
        fit(callbacks=[Killed(), Checkpoint(tmp_path, every=1)])
    resumed, whole = fit(callbacks=[Checkpoint(tmp_path, every=1)], resume=tmp_path), fit()
    assert all(np.array_equal(resumed.components(layer=n), whole.components(layer=n)) for n in (0, 1))
    assert (resumed.n_epochs_, resumed.n_updates_) == (whole.n_epochs_, whole.n_updates_)


@pytest.mark.parametrize(("at", "epochs"), [(2, [2, 0]), (5, [3, 2])])
def test_epochs_of_an_interrupted_stack_are_those_of_its_last_machine(at, epochs):
    class Interrupt(Callback):
        ended = 0

        def on_epoch_end(self, trainer):
            self.ended += 1
            if self.ended == at:
                signal.raise_signal(signal.SIGINT)

        def for_layer(self, number):
            return self

    X = (np.random.default_rng(0).random((20, 4, 4)) < 0.4).astype(np.float32)
    model = DeepMVRBM(((3, 3), (2, 2)), n_epochs=3, batch_size=10, random_state=0)
    with pytest.raises(KeyboardInterrupt):
        model.fit(X, callbacks=[Interrupt()])
    assert [trainer.epoch for trainer in model.trainers_] == epochs
    assert model.n_epochs_ == epochs[-1]


def test_nan_is_filled_in_like_a_masked_entry(stack, digits):
    known = np.random.default_rng(0).random(digits[:5].shape) < 0.7
    filled = stack.inpaint(np.where(known, digits[:5], np.nan))
    np.testing.assert_array_equal(filled, stack.inpaint(digits[:5], known))
    np.testing.assert_array_equal(filled[known], digits[:5][known])
    np.testing.assert_array_equal(stack.inpaint(digits[:5]), digits[:5])
