"""Data of every kind gives the same training, bytes are scaled batch by batch, and nothing is copied whole."""

import os
import subprocess
import sys

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader, Dataset, IterableDataset, TensorDataset

from mvrbm import Bernoulli, BoltzmannMachine, Categorical, Dense, Gaussian, Kronecker, RandomSource
from mvrbm.data.sources import as_source
from mvrbm.io.shards import DatasetRows
from mvrbm.models import mvrbm
from mvrbm.training import Callback, Recipe, Trainer

RECIPE = Recipe(batch_size=16)


def bits(n=50, shape=(3, 4), seed=0):
    return (np.random.default_rng(seed).random((n, *shape)) < 0.3).astype(np.float32)


class Items(Dataset):
    """Arrays one by one, as an item of another form each."""

    def __init__(self, array, form):
        self.array, self.form = array, form

    def __len__(self):
        return len(self.array)

    def __getitem__(self, i):
        return self.form(self.array[i])


class Stream(IterableDataset):
    def __init__(self, array):
        self.array = array

    def __iter__(self):
        return iter(self.array)


def saved(x, folder):
    np.save(folder / "x.npy", x)
    return folder / "x.npy"


def mapped(x, folder):
    memory = np.memmap(folder / "x.bin", dtype=x.dtype, mode="w+", shape=x.shape)
    memory[:] = x
    memory.flush()
    return np.memmap(folder / "x.bin", dtype=x.dtype, mode="r", shape=x.shape)


FORMS = {
    "array": lambda x, folder: x,
    "float64": lambda x, folder: x.astype(np.float64),
    "integers": lambda x, folder: x.astype(np.int64),
    "booleans": lambda x, folder: x.astype(bool),
    "bytes": lambda x, folder: (255 * x).astype(np.uint8),
    "not contiguous": lambda x, folder: np.asfortranarray(x),
    "nested lists": lambda x, folder: x.tolist(),
    "tensor": lambda x, folder: torch.from_numpy(x),
    "memmap": mapped,
    "path": saved,
    "path as text": lambda x, folder: str(saved(x, folder)),
    "mapping": lambda x, folder: {"visible": x},
    "mapping of a path": lambda x, folder: {"visible": saved(x, folder)},
    "mapping with more": lambda x, folder: {"visible": x, "label": np.zeros(len(x))},
    "TensorDataset": lambda x, folder: TensorDataset(torch.from_numpy(x), torch.zeros(len(x))),
    "dataset of arrays": lambda x, folder: Items(x, lambda item: item),
    "dataset of pairs": lambda x, folder: Items(x, lambda item: (item, 7)),
    "dataset of mappings": lambda x, folder: Items(x, lambda item: {"visible": item, "label": 7}),
    "dataset of bytes": lambda x, folder: Items((255 * x).astype(np.uint8), lambda item: item),
}


def trained(data, n_epochs=3, **how):
    machine = mvrbm((3, 4), (2, 3))
    Trainer(machine, RECIPE, seed=5).fit(data, n_epochs, **how, initialize=True)
    return machine.state_dict()


@pytest.mark.parametrize("form", FORMS)
def test_every_form_of_the_data_gives_the_same_training(tmp_path, form):
    x = bits()
    expected, found = trained(x), trained(FORMS[form](x, tmp_path))
    assert all(torch.equal(found[name], value) for name, value in expected.items())


def test_layers_by_name_give_the_same_training(tmp_path):
    rng = np.random.default_rng(1)
    x, z = bits(), rng.integers(0, 256, (50, 2), dtype=np.uint8)
    np.save(tmp_path / "x.npy", x)

    def run(data):
        layers = {"image": Bernoulli((3, 4)), "gray": Gaussian(2)}
        machine = BoltzmannMachine(layers, Bernoulli((2, 3)), {"image": Kronecker(), "gray": Dense()})
        Trainer(machine, RECIPE, seed=5).fit(data, 3, initialize=True)
        return machine.state_dict()

    class Pairs(Dataset):
        def __len__(self):
            return len(x)

        def __getitem__(self, i):
            return {"gray": z[i], "image": x[i]}

    expected = run({"image": x, "gray": z})
    for data in ({"gray": torch.from_numpy(z), "image": str(tmp_path / "x.npy")}, Pairs()):
        assert all(torch.equal(run(data)[name], value) for name, value in expected.items())


def test_mask_may_come_in_every_form_too(tmp_path):
    x = bits()
    known = np.random.default_rng(2).random(x.shape) < 0.8
    expected = trained(x, mask=known)
    gaps = np.where(known, x, np.nan).astype(np.float32)
    for form in (torch.from_numpy(known), saved(known, tmp_path), {"visible": known}, known.tolist()):
        found = trained(x, mask=form)
        assert all(torch.equal(found[name], value) for name, value in expected.items())
    found = trained(gaps, nan_is_missing=True)
    assert all(torch.equal(found[name], value) for name, value in expected.items())
    dataset = trained(Items(gaps, lambda item: item), nan_is_missing=True)
    assert all(torch.equal(dataset[name], value) for name, value in expected.items())


class Sizes(Callback):
    def __init__(self):
        self.sizes, self.firsts = [], []

    def on_batch_end(self, trainer, batch):
        self.sizes.append(len(batch))
        self.firsts.append(batch.visible["visible"].clone())


def test_loader_keeps_its_own_order_and_batches():
    x = bits()
    sizes = Sizes()
    trainer = Trainer(mvrbm((3, 4), (2, 3)), RECIPE, callbacks=[sizes])
    trainer.fit(DataLoader(TensorDataset(torch.from_numpy(x)), batch_size=20), 2, initialize=True)
    assert sizes.sizes == [20, 20, 10, 20, 20, 10]
    assert torch.equal(torch.cat(sizes.firsts[:3]), torch.from_numpy(x))
    assert trainer.batches_per_epoch == 3
    assert (trainer.epoch, trainer.update) == (2, 6)


@pytest.mark.parametrize("wrapped", [False, True])
def test_stream_is_cut_into_batches(wrapped):
    x = bits()
    sizes = Sizes()
    trainer = Trainer(mvrbm((3, 4), (2, 3)), RECIPE, callbacks=[sizes])
    stream = Stream(torch.from_numpy(x))
    trainer.fit(DataLoader(stream, batch_size=16) if wrapped else stream, 2, initialize=True)
    assert sizes.sizes == [16, 16, 16, 2] * 2
    assert trainer.batches_per_epoch is None
    assert trainer.epoch == 2


def test_shards_are_read_in_another_order_in_every_epoch(tmp_path):
    np.save(tmp_path / "part.npy", np.arange(20, dtype=np.float32)[:, None, None])
    source = as_source(tmp_path, BoltzmannMachine(Gaussian((1, 1)), Bernoulli(2), Dense()))
    rng = RandomSource(3)
    orders = []
    for epoch in range(3):
        batches = source.batches(8, rng.at_step(epoch))
        orders.append(tuple(torch.cat([batch.visible["visible"].flatten() for batch in batches]).tolist()))
    assert len(set(orders)) == 3
    assert all(sorted(order) == list(range(20)) for order in orders)


def test_bytes_are_scaled_for_bits_and_kept_for_reals():
    x = np.random.default_rng(0).integers(0, 256, (64, 6), dtype=np.uint8)
    for unit, scale in [(Bernoulli(6), 1 / 255), (Gaussian(6), 1.0)]:
        sizes = Sizes()
        machine = BoltzmannMachine(unit, Bernoulli(3), Dense())
        Trainer(machine, Recipe(batch_size=64), callbacks=[sizes]).fit(x, 1, initialize=True)
        seen, given = sizes.firsts[0].numpy(), (x * np.float32(scale)).astype(np.float32)
        np.testing.assert_allclose(np.sort(seen, 0), np.sort(given, 0), rtol=1e-6)
    start = BoltzmannMachine(Gaussian(6), Bernoulli(3), Dense())
    Trainer(start).fit(x, 0, initialize=True)
    np.testing.assert_allclose(start.layers["visible"].bias.detach(), x.mean(0), rtol=1e-5)
    np.testing.assert_allclose(start.layers["visible"].log_variance.exp().detach(), x.var(0), rtol=1e-4)


def test_starting_moments_are_those_of_the_known_entries():
    rng = np.random.default_rng(0)
    x = 40 + 3 * rng.standard_normal((400, 5))
    known = rng.random(x.shape) < 0.5
    machine = BoltzmannMachine(Gaussian(5), Bernoulli(3), Dense()).double()
    Trainer(machine).fit(np.where(known, x, 1e6), 0, mask=known, initialize=True)
    exact = np.ma.masked_array(x, ~known)
    np.testing.assert_allclose(machine.layers["visible"].bias.detach(), exact.mean(0), rtol=1e-9)
    np.testing.assert_allclose(machine.layers["visible"].log_variance.exp().detach(), exact.var(0), rtol=1e-7)


LARGE = """
import sys
import numpy as np
from mvrbm import Bernoulli, BoltzmannMachine, Kronecker
from mvrbm.training import Callback, Recipe, Trainer

def anonymous():
    with open("/proc/self/status") as status:
        return next(int(line.split()[1]) for line in status if line.startswith("RssAnon")) * 1024

class Watch(Callback):
    most = 0
    def on_batch_end(self, trainer, batch):
        self.most = max(self.most, anonymous())

def run(data):
    machine, watch = BoltzmannMachine(Bernoulli((32, 32)), Bernoulli((4, 4)), Kronecker()), Watch()
    trainer = Trainer(machine, Recipe(batch_size=250), callbacks=[watch])
    trainer.fit(data, 1)
    return trainer.update, watch.most

run(np.zeros((5000, 32, 32), dtype=np.uint8))
before = anonymous()
updates, most = run(sys.argv[1])
print(updates, most - before)
"""


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="RssAnon is Linux's")
def test_file_larger_than_what_may_be_used_is_never_copied_whole(tmp_path):
    """100 MB of bytes on disk, 400 MB as floats: training takes far less than either."""
    path = tmp_path / "large.npy"
    n = 100_000
    np.lib.format.open_memmap(path, mode="w+", dtype=np.uint8, shape=(n, 32, 32)).flush()  # sparse: nothing is written
    # What is in use counts, not what the C library keeps for later: it is to give blocks of batches back at once.
    frugal = {**os.environ, "MALLOC_MMAP_THRESHOLD_": "65536"}
    command = [sys.executable, "-c", LARGE, str(path)]
    done = subprocess.run(command, capture_output=True, text=True, check=True, env=frugal)
    updates, grown = map(int, done.stdout.split())
    assert updates == n // 250
    assert grown < 50e6


# -- errors -----------------------------------------------------------------------------------------------


def two_layers():
    layers = {"image": Bernoulli((3, 4)), "label": Categorical(3)}
    return BoltzmannMachine(layers, Bernoulli((2, 3)), {"image": Kronecker(), "label": Dense()})


LABELS = np.eye(3, dtype=np.float32)[np.arange(50) % 3]

ONE_LAYER_ERRORS = [
    ("empty", bits(0), {}, "data is empty, but at least one sample"),
    ("empty dataset", Items(bits(0), lambda item: item), {}, "data is empty"),
    ("empty loader", DataLoader(Items(bits(0), lambda item: item), batch_size=4), {}, "data is empty"),
    ("empty stream", Stream([]), {}, "data is empty"),
    ("one mode too few", bits(shape=(12,)), {}, r"expects arrays of shape \(n, 3, 4\)"),
    ("mode of another size", bits(shape=(3, 5)), {}, "mode 2 has 5 entries instead of 4"),
    ("shape in a dataset", Items(bits(shape=(4, 3)), lambda item: item), {}, "mode 1 has 4 entries instead of 3"),
    ("values of reals", 3 * bits(), {}, "require values from 0 to 1, got 0 to 3"),
    ("infinite", np.full((5, 3, 4), np.inf), {}, r"contains infinite values"),
    ("name", {"image": bits()}, {}, r"contains layers \['image'\] but lacks layers \['visible'\]"),
    (
        "mask of another shape",
        bits(),
        {"mask": np.ones((50, 3), dtype=bool)},
        r"must have the data's shape \(50, 3, 4\)",
    ),
    ("mask without samples", bits(), {"mask": np.ones((3, 4), dtype=bool)}, r"must have the data's shape \(50, 3, 4\)"),
    ("mask of numbers", bits(), {"mask": np.ones((50, 3, 4))}, "masks must be boolean"),
    ("mask of a foreign layer", bits(), {"mask": {"label": np.ones((50, 3, 4), dtype=bool)}}, r"\['label'\]"),
    ("list of arrays", [bits(20), bits(30)], {}, "the data is a list of 2 arrays, but one array with samples"),
    ("array and labels", (bits(), np.zeros(50)), {}, "the data is a tuple of 2 arrays.*leave out labels"),
    ("list of masks", bits(), {"mask": [np.ones((50, 3, 4), dtype=bool)]}, "the mask is a list of 1 arrays"),
    (
        "mask with a dataset",
        Items(bits(), lambda i: i),
        {"mask": np.ones((50, 3, 4), dtype=bool)},
        "use NaN for missing entries",
    ),
]


@pytest.mark.parametrize(("_", "data", "how", "message"), ONE_LAYER_ERRORS, ids=[row[0] for row in ONE_LAYER_ERRORS])
def test_wrong_data_is_refused(_, data, how, message):
    machine = mvrbm((3, 4), (2, 3))
    before = {name: value.clone() for name, value in machine.state_dict().items()}
    with pytest.raises(ValueError, match=message):
        Trainer(machine).fit(data, 1, **how, initialize=True)
    assert all(torch.equal(machine.state_dict()[name], value) for name, value in before.items())


TWO_LAYER_ERRORS = [
    ("array alone", bits(), {}, r"pass a mapping from \['image', 'label'\] to arrays"),
    ("lengths", {"image": bits(40), "label": LABELS}, {}, "same number of samples, got {'image': 40, 'label': 50}"),
    ("lacking layer", {"image": bits()}, {}, r"lacks layers \['label'\]"),
    ("not one-hot", {"image": bits(), "label": 0.5 * LABELS}, {}, "expects one-hot rows"),
    ("mask alone", {"image": bits(), "label": LABELS}, {"mask": np.ones((50, 3, 4), dtype=bool)}, "pass a mapping"),
]


@pytest.mark.parametrize(("_", "data", "how", "message"), TWO_LAYER_ERRORS, ids=[row[0] for row in TWO_LAYER_ERRORS])
def test_wrong_data_of_several_layers_is_refused(_, data, how, message):
    with pytest.raises(ValueError, match=message):
        Trainer(two_layers()).fit(data, 1, **how, initialize=True)


def test_wrong_values_late_in_the_data_are_found_in_the_first_pass():
    x = bits(40_000, (2, 2))
    x[-2] = 5  # beyond the samples that the start looks at
    with pytest.raises(ValueError, match="got 0 to 5"):
        Trainer(mvrbm((2, 2), (2, 2)), Recipe(batch_size=5000)).fit(x, 1, initialize=True)


class BadLater(Dataset):
    """Samples that are valid when they are read once or twice, as after a random augmentation with an error."""

    def __init__(self, value, reads=120):
        self.value, self.reads, self.x = value, reads, bits()

    def __len__(self):
        return len(self.x)

    def __getitem__(self, i):
        self.reads -= 1
        return self.x[i] if self.reads > 0 else np.full_like(self.x[i], self.value)


class BadStream(IterableDataset):
    def __init__(self, value):
        self.items = BadLater(value, reads=150)

    def __iter__(self):
        return (torch.from_numpy(self.items[i]) for i in range(50))


LATER = {
    "dataset": lambda value: BadLater(value),
    "loader": lambda value: DataLoader(BadLater(value, reads=150), batch_size=10),
    "stream": BadStream,
    "rows": lambda value: DatasetRows(BadLater(value)),
}


@pytest.mark.parametrize("kind", LATER)
@pytest.mark.parametrize("value", [9.0, np.nan])
def test_wrong_values_in_a_later_epoch_are_found(kind, value):
    trainer = Trainer(mvrbm((3, 4), (2, 3)), RECIPE)
    message = "contains NaN .*; fill in missing entries first" if np.isnan(value) else "require values from 0 to 1"
    with pytest.raises(ValueError, match=message):
        trainer.fit(LATER[kind](value), 6)
    assert trainer.epoch >= 1


def test_wrong_values_in_samples_with_small_weights_are_found(monkeypatch):
    monkeypatch.setattr("mvrbm.data.sources.MOMENT_SAMPLES", 10)
    x = bits(100)
    x[50] = 9
    trainer = Trainer(mvrbm((3, 4), (2, 3)), RECIPE)
    trainer.sample_weight = np.where(np.arange(100) == 50, 0.1, 1)  # drawn in one of ten epochs
    with pytest.raises(ValueError, match="require values from 0 to 1"):
        trainer.fit(x, 60)
    assert trainer.epoch >= 1


def test_wrong_values_before_the_resumed_batch_are_found(monkeypatch):
    monkeypatch.setattr("mvrbm.data.sources.MOMENT_SAMPLES", 4)
    x = bits(64)
    order = Trainer(mvrbm((3, 4), (2, 3)), seed=5).order_rng.at_step(0).permutation(64)
    first = next(int(row) for row in order[:16] if row % 21)  # not among rows 0, 21, 42 and 63
    x[first] = 9  # in the first batch, which the next trainer skips
    trainer = Trainer(mvrbm((3, 4), (2, 3)), RECIPE, seed=5)
    trainer.state.batch = 1
    with pytest.raises(ValueError, match="require values from 0 to 1"):
        trainer.fit(x, 3)
    assert trainer.epoch == 1


@pytest.mark.parametrize("how", [{"mask": np.ones((50, 3, 4), dtype=bool)}, {"nan_is_missing": True}])
def test_arguments_that_a_source_would_ignore_are_errors(how):
    machine = mvrbm((3, 4), (2, 3))
    with pytest.raises(ValueError, match="have no effect on a source"):
        Trainer(machine).fit(as_source(bits(), machine), 1, **how)


OTHER_MACHINES = {
    "unit": lambda: BoltzmannMachine(Gaussian((3, 4)), Bernoulli((2, 3)), Kronecker()),
    "name": lambda: BoltzmannMachine({"image": Bernoulli((3, 4))}, Bernoulli((2, 3)), {"image": Kronecker()}),
    "dtype": lambda: mvrbm((3, 4), (2, 3)).double(),
}


@pytest.mark.parametrize("change", OTHER_MACHINES)
def test_a_source_for_other_layers_is_an_error(change):
    source = as_source(bits(), mvrbm((3, 4), (2, 3)))
    with pytest.raises(ValueError, match="the source was created for another machine"):
        Trainer(OTHER_MACHINES[change]()).fit(source, 1)
    assert Trainer(mvrbm((3, 4), (4, 4))).fit(source, 1).epoch == 1  # the hidden layer may differ


def test_pickled_arrays_are_not_opened(tmp_path):
    np.save(tmp_path / "objects.npy", np.array([{"a": 1}], dtype=object), allow_pickle=True)
    with pytest.raises(ValueError, match="Python objects"):
        Trainer(mvrbm((3, 4), (2, 3))).fit(tmp_path / "objects.npy", 1, initialize=True)


def test_a_mask_in_which_nothing_is_known_is_an_error():
    with pytest.raises(ValueError, match="no entries are known"):
        as_source(np.zeros((4, 2, 2)), mvrbm((2, 2), (2, 2)), mask=np.zeros((4, 2, 2), bool))


@pytest.mark.parametrize("shards", [False, True])
def test_a_mapped_file_that_is_truncated_is_an_error_not_the_end_of_the_process(tmp_path, shards):
    class Truncate(Callback):
        def on_batch_end(self, trainer, batch):
            if trainer.update == 20:
                os.truncate(tmp_path / "data" / "part.npy", 5000)

    (tmp_path / "data").mkdir()
    np.save(tmp_path / "data" / "part.npy", np.zeros((5000, 2, 2), np.float32))
    trainer = Trainer(mvrbm((2, 2), (2, 2)), Recipe(batch_size=100), callbacks=[Truncate()])
    with pytest.raises(ValueError, match=r"part.npy.* has been truncated from 80,128 to 5,000 bytes"):
        trainer.fit(tmp_path / "data" if shards else tmp_path / "data" / "part.npy", 3, initialize=False)
    assert trainer.failed
