"""Models on disk: what comes back is what was written, whole or not at all, and damage is named."""

import importlib
import json
import os
import pickle
import signal
import struct
import threading

import numpy as np
import pandas as pd
import pytest
import torch
from safetensors.torch import load_file, save_file
from sklearn.exceptions import NotFittedError

import mvrbm
from mvrbm import (
    MVRBM,
    Bernoulli,
    BoltzmannMachine,
    DeepMVRBM,
    Dense,
    Gaussian,
    Kronecker,
    MVRBMClassifier,
    MVRBMImputer,
    saving,
)
from mvrbm.errors import MVRBMError, StorageError
from mvrbm.io import atomic
from mvrbm.models import mvrbm as machine_of
from mvrbm.units import UNITS
from tables import MACHINES, generator, machine_named, random_states


@pytest.fixture(autouse=True)
def _without_waiting_for_the_disk(monkeypatch):
    monkeypatch.setattr("mvrbm.io.atomic.os.fsync", lambda descriptor: None)


def same_state(left, right):
    left, right = left.state_dict(), right.state_dict()
    return set(left) == set(right) and all(torch.equal(left[name], right[name]) for name in left)


# -- round trip -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("name", MACHINES)
def test_what_comes_back_is_what_was_written(tmp_path, name, dtype):
    machine = machine_named(name).to(dtype)
    mvrbm.save(machine, tmp_path / "model")
    back = mvrbm.load(tmp_path / "model")
    assert same_state(machine, back)
    assert str(back) == str(machine)
    assert back.like.dtype == dtype
    for one, other in zip(machine.named_parameters(), back.named_parameters(), strict=True):
        assert (one[0], one[1].requires_grad) == (other[0], other[1].requires_grad)
    states = random_states(machine, 5, generator(name), padding=True)
    with torch.no_grad():
        assert torch.equal(machine.free_energy(states), back.free_energy(states))
        means = machine.hidden_mean(states), back.hidden_mean(states)
        assert torch.equal(*means)
        for one, other in zip(*(m.visible_mean(means[0]).values() for m in (machine, back)), strict=True):
            assert torch.equal(one, other)


def test_folder_is_readable_by_anyone_and_says_what_it_is(tmp_path):
    assert mvrbm.save(machine_of((3, 4), (2, 2), 2), tmp_path / "deep" / "model") == tmp_path / "deep" / "model"
    folder = tmp_path / "deep" / "model"
    assert sorted(path.name for path in folder.iterdir()) == ["config.json", "model.safetensors"]
    assert folder.stat().st_mode & 0o777 == atomic.usual_mode(0o777)
    assert json.loads((folder / "config.json").read_text()) == {
        "format": "mvrbm",
        "format_version": 1,
        "dtype": "float32",
        "visible": {"visible": {"unit": "bernoulli", "shape": [3, 4], "bias_shape": [3, 4]}},
        "hidden": {"unit": "bernoulli", "shape": [2, 2], "bias_shape": [2, 2]},
        "couplings": {"visible": {"coupling": "kronecker", "rank": 2, "summed_modes": []}},
    }
    tensors = load_file(folder / "model.safetensors")
    assert {name: tuple(tensor.shape) for name, tensor in tensors.items()} == {
        "visible.visible.bias": (3, 4),
        "hidden.bias": (2, 2),
        "couplings.visible.factors.0": (2, 2, 3),
        "couplings.visible.factors.1": (2, 2, 4),
    }


@pytest.mark.parametrize("kind", ["machine", "estimator", "with a card"])
def test_a_model_is_replaced_only_with_overwrite(tmp_path, kind):
    folder = tmp_path / "model"
    mvrbm.save(old := machine_of((3, 3), (2, 2), seed=1), folder)
    fitted = MVRBM((2, 2), n_epochs=1, random_state=0).fit(np.eye(9).reshape(9, 3, 3))
    saved = {
        "machine": lambda **how: mvrbm.save(fitted.machine_, folder, **how),
        "estimator": lambda **how: fitted.save(folder, **how),
        "with a card": lambda **how: mvrbm.save_pretrained(fitted, folder, **how),
    }[kind]
    with pytest.raises(StorageError, match=r"model already contains a model; pass overwrite=True to replace it$"):
        saved()
    assert same_state(mvrbm.load(folder), old)
    saved(overwrite=True)
    loaded = mvrbm.load(folder)
    assert torch.equal(getattr(loaded, "machine_", loaded).hidden.bias.cpu(), fitted.machine_.hidden.bias.cpu())


def test_strongly_coupled_reals_come_back(tmp_path):
    """Reading draws nothing that could be out of bounds, however large the layers."""
    machine = BoltzmannMachine(Gaussian(10_000), Gaussian(20), Dense(), std=0.001)
    mvrbm.save(machine, tmp_path / "model")
    assert same_state(mvrbm.load(tmp_path / "model"), machine)


def test_model_is_replaced_by_a_new_one(tmp_path):
    for seed in (1, 2):
        machine = machine_of((3, 3), (2, 2), seed=seed)
        mvrbm.save(machine, tmp_path / "model", overwrite=True)
        assert same_state(mvrbm.load(tmp_path / "model"), machine)
    (tmp_path / "empty").mkdir()
    mvrbm.save(machine, tmp_path / "empty")
    assert same_state(mvrbm.load(tmp_path / "empty"), machine)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["empty", "model"]


# -- whole or not at all ----------------------------------------------------------------------------------


def no_space(*args, **kwargs):
    raise OSError(28, "No space left on device")


def fail_after_config(machine, folder, extra=None):
    (folder / "config.json").write_text("{")
    raise RuntimeError("the power went off")


FAILURES = [
    ("no space for the weights", saving, "write_tensors", no_space, StorageError),
    ("half written", saving, "write_machine", fail_after_config, RuntimeError),
    ("not on the disk", atomic, "finish_folder", no_space, StorageError),
]


@pytest.mark.parametrize("there", [False, True])
@pytest.mark.parametrize(("_", "module", "broken", "how", "error"), FAILURES, ids=[row[0] for row in FAILURES])
def test_failure_leaves_the_old_model_and_nothing_else(tmp_path, monkeypatch, _, module, broken, how, error, there):
    old = machine_of((3, 3), (2, 2), seed=1)
    if there:
        mvrbm.save(old, tmp_path / "model")
    monkeypatch.setattr(module, broken, how)
    with pytest.raises(error, match=r"No space left|power went off"):
        mvrbm.save(machine_of((3, 3), (2, 2), seed=2), tmp_path / "model", overwrite=True)
    assert [path.name for path in tmp_path.iterdir()] == (["model"] if there else [])
    if there:
        assert same_state(mvrbm.load(tmp_path / "model"), old)


@pytest.mark.parametrize("failing", [1, 2])
def test_failure_while_changing_places_puts_the_old_model_back(tmp_path, monkeypatch, failing):
    old = machine_of((3, 3), (2, 2), seed=1)
    mvrbm.save(old, tmp_path / "model")
    rename, calls = atomic.Path.rename, []

    def sometimes(self, target):
        calls.append(self)
        if len(calls) == failing:
            raise OSError(5, "Input/output error")
        return rename(self, target)

    monkeypatch.setattr(atomic.Path, "rename", sometimes)
    with pytest.raises(StorageError, match="cannot be written"):
        mvrbm.save(machine_of((3, 3), (2, 2), seed=2), tmp_path / "model", overwrite=True)
    assert [path.name for path in tmp_path.iterdir()] == ["model"]
    assert same_state(mvrbm.load(tmp_path / "model"), old)


def at_the_change(monkeypatch, act):
    """Let something happen right after the old model has left its place."""
    rename = atomic.Path.rename

    def changed(self, target):
        result = rename(self, target)
        if target.name == ".model.former":
            act()
        return result

    monkeypatch.setattr(atomic.Path, "rename", changed)


def test_ctrl_c_while_changing_places_loses_no_model(tmp_path, monkeypatch):
    new = machine_of((3, 3), (2, 2), seed=2)
    mvrbm.save(machine_of((3, 3), (2, 2), seed=1), tmp_path / "model")
    at_the_change(monkeypatch, lambda: signal.raise_signal(signal.SIGINT))
    with pytest.raises(KeyboardInterrupt):
        mvrbm.save(new, tmp_path / "model", overwrite=True)
    assert [path.name for path in tmp_path.iterdir()] == ["model"]
    assert same_state(mvrbm.load(tmp_path / "model"), new)


@pytest.mark.parametrize("then", ["load", "save"])
def test_a_kill_while_changing_places_loses_no_model(tmp_path, monkeypatch, then):
    machines = [machine_of((3, 3), (2, 2), seed=seed) for seed in (1, 2, 3)]
    mvrbm.save(machines[0], tmp_path / "model")
    child = os.fork()
    if child == 0:
        at_the_change(monkeypatch, lambda: os.kill(os.getpid(), signal.SIGKILL))
        mvrbm.save(machines[1], tmp_path / "model", overwrite=True)
    assert os.waitpid(child, 0)[1] == signal.SIGKILL
    monkeypatch.setattr(atomic, "_REPLACING", 0.05)
    if then == "load":
        assert same_state(mvrbm.load(tmp_path / "model"), machines[0])
    assert any(path.name.startswith(".model") for path in tmp_path.iterdir())
    mvrbm.save(machines[2], tmp_path / "model", overwrite=True)
    assert [path.name for path in tmp_path.iterdir()] == ["model"]
    assert same_state(mvrbm.load(tmp_path / "model"), machines[2])


def test_a_model_that_is_loaded_while_it_changes_places_is_the_new_one(tmp_path, monkeypatch):
    new = machine_of((3, 3), (2, 2), seed=2)
    mvrbm.save(machine_of((3, 3), (2, 2), seed=1), tmp_path / "model")
    found = []
    reader = threading.Thread(target=lambda: found.append(mvrbm.load(tmp_path / "model")))

    def read():
        reader.start()
        reader.join(0.05)

    at_the_change(monkeypatch, read)
    mvrbm.save(new, tmp_path / "model", overwrite=True)
    reader.join()
    assert same_state(found[0], new)


def test_a_folder_that_is_being_written_is_no_leftover(tmp_path):
    machine = machine_of((3, 3), (2, 2))
    with saving.replace_model(tmp_path / "model", overwrite=True) as staging:
        mvrbm.save(machine, tmp_path / "model")
        saving.write_machine(machine, staging)
    assert [path.name for path in tmp_path.iterdir()] == ["model"]


@pytest.mark.parametrize("there", [True, False])
def test_a_symbolic_link_stays(tmp_path, there):
    old, new = (machine_of((3, 3), (2, 2), seed=seed) for seed in (1, 2))
    if there:
        mvrbm.save(old, tmp_path / "models" / "first")
    (tmp_path / "latest").symlink_to("models/first")
    mvrbm.save(new, tmp_path / "latest", overwrite=True)
    assert (tmp_path / "latest").is_symlink()
    assert same_state(mvrbm.load(tmp_path / "models" / "first"), new)
    assert [path.name for path in (tmp_path / "models").iterdir()] == ["first"]


def write(path, text):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)


OCCUPIED = [
    ("a file", lambda folder: write(folder, "notes"), "is a file; specify a folder instead"),
    ("other files", lambda folder: write(folder / "thesis.tex", "..."), "contains files that are not part of a model"),
    (
        "another program's model",
        lambda folder: write(folder / "config.json", '{"model_type": "bert"}'),
        "contains files that are not part of a model",
    ),
    (
        "notes next to the model",
        lambda folder: (mvrbm.save(machine_of((3, 3), (2, 2)), folder), write(folder / "notes.txt", "...")),
        "contains files that are not part of a model",
    ),
]


@pytest.mark.parametrize(("_", "occupy", "message"), OCCUPIED, ids=[row[0] for row in OCCUPIED])
def test_what_is_not_a_model_is_never_overwritten(tmp_path, _, occupy, message):
    folder = tmp_path / "place"
    occupy(folder)

    def contents():
        return {str(path): path.read_bytes() for path in sorted(tmp_path.rglob("*")) if path.is_file()}

    before = contents()
    with pytest.raises(StorageError, match=message):
        mvrbm.save(machine_of((3, 3), (2, 2), seed=5), folder, overwrite=True)
    assert contents() == before


def test_place_that_cannot_be_written_is_an_error(tmp_path):
    (tmp_path / "file").write_text("x")
    with pytest.raises(StorageError, match="cannot be written"):
        mvrbm.save(machine_of((2, 2), (2, 2)), tmp_path / "file" / "model")


# -- damage -----------------------------------------------------------------------------------------------


def config(change):
    def damage(folder):
        content = json.loads((folder / "config.json").read_text())
        replaced = change(content)
        (folder / "config.json").write_text(json.dumps(content if replaced is None else replaced))

    return damage


def tensors(change):
    def damage(folder):
        content = load_file(folder / "model.safetensors")
        change(content)
        save_file(content, folder / "model.safetensors")

    return damage


def put(*path, value):
    """Set an entry deep in the config."""

    def change(content):
        for key in path[:-1]:
            content = content[key]
        content[path[-1]] = value

    return config(change)


def drop(*path):
    def change(content):
        for key in path[:-1]:
            content = content[key]
        del content[path[-1]]

    return config(change)


def pickled(folder):
    (folder / "model.safetensors").write_bytes(pickle.dumps({"hidden.bias": np.zeros(4)}))


def torch_saved(folder):
    torch.save({"hidden.bias": torch.zeros(2, 2)}, folder / "model.safetensors")


def lying_header(folder):
    """A file whose header promises far more than it has."""
    header = b'{"hidden.bias":{"dtype":"F32","shape":[1000000000000],"data_offsets":[0,4000000000000]}}'
    (folder / "model.safetensors").write_bytes(struct.pack("<Q", len(header)) + header)


def as_folder(folder):
    (folder / "model.safetensors").unlink()
    (folder / "model.safetensors").mkdir()


def nothing(folder):
    for path in folder.iterdir():
        path.unlink()
    folder.rmdir()


def a_file(folder):
    nothing(folder)
    folder.write_text("a model")


def test_an_empty_name_is_named():
    with pytest.raises(StorageError, match="the model name is empty"):
        mvrbm.load("")


FACTOR, BIAS = "couplings.visible.factors.0", "hidden.bias"
DAMAGE = [
    ("no folder", nothing, "does not exist"),
    ("a file instead", a_file, "is not a model folder because it is a file"),
    ("no config", lambda f: (f / "config.json").unlink(), "is not a model folder: config.json is missing"),
    ("no weights", lambda f: (f / "model.safetensors").unlink(), "model.safetensors: no such file"),
    ("weights are a folder", as_folder, "model.safetensors is a folder"),
    ("empty config", lambda f: (f / "config.json").write_text(""), "not valid JSON"),
    ("truncated config", lambda f: os.truncate(f / "config.json", 100), "not valid JSON"),
    ("config of bytes", lambda f: (f / "config.json").write_bytes(b"\xff\xfe\x00"), "not valid JSON"),
    ("deep config", lambda f: (f / "config.json").write_text("[" * 100_000), "not valid JSON"),
    ("huge config", lambda f: os.truncate(f / "config.json", 10**9), "too large for a config file"),
    ("config is a list", config(lambda c: [c]), "does not contain a JSON object"),
    ("other format", put("format", value="transformers"), "does not describe an mvrbm model"),
    ("no format", drop("format"), "does not describe an mvrbm model"),
    ("later version", put("format_version", value=2), "format version 2, but this version of mvrbm reads version 1"),
    ("no version", drop("format_version"), "format version None"),
    ("version as text", put("format_version", value="1"), "format version '1'"),
    ("no hidden layer", drop("hidden"), "'hidden' is missing or unknown"),
    ("no dtype", drop("dtype"), "'dtype' is missing or unknown"),
    ("unknown dtype", put("dtype", value="int8"), "'int8' is missing or unknown"),
    ("dtype is a list", put("dtype", value=[1]), "not a valid model description"),
    ("unknown unit", put("hidden", "unit", value="logistic"), "unit must be one of .*got 'logistic'"),
    ("unknown coupling", put("couplings", "visible", "coupling", value="svd"), "coupling must be one of .*got 'svd'"),
    ("unknown argument", put("hidden", "color", value=3), "not a valid model description: .*'color'"),
    ("shape is text", put("hidden", "shape", value="wide"), "not a valid model description"),
    ("shape is empty", put("hidden", "shape", value=[]), "not a valid model description"),
    ("size of zero", put("hidden", "shape", value=[0, 2]), "not a valid model description"),
    ("layers are a list", put("visible", value=[1, 2]), "not a valid model description"),
    ("no layers", put("visible", value={}), "not a valid model description"),
    ("coupling of nothing", put("couplings", value={}), "not a valid model description"),
    ("rank of zero", put("couplings", "visible", "rank", value=0), "rank must be a whole number of at least 1"),
    ("layers of other orders", put("hidden", "shape", value=[4]), "not a valid model description"),
    (
        "another shape",
        put("hidden", "bias_shape", value=[1, 2]),
        r"'hidden.bias' in .* should have shape \(1, 2\), but has shape \(2, 2\)",
    ),
    ("another dtype", put("dtype", value="float64"), "model.safetensors"),
    ("empty weights", lambda f: (f / "model.safetensors").write_bytes(b""), "model.safetensors"),
    ("truncated weights", lambda f: os.truncate(f / "model.safetensors", 300), "model.safetensors"),
    ("random weights", lambda f: (f / "model.safetensors").write_bytes(os.urandom(2000)), "not a safetensors file"),
    ("a pickle", pickled, "not a safetensors file"),
    ("a torch file", torch_saved, "not a safetensors file"),
    ("a header that lies", lying_header, "model.safetensors"),
    ("missing tensor", tensors(lambda t: t.pop(BIAS)), r"lacks tensors \['hidden.bias'\]"),
    ("extra tensor", tensors(lambda t: t.update(more=torch.zeros(3))), r"contains unknown tensors \['more'\]"),
    (
        "renamed tensor",
        tensors(lambda t: t.update(offset=t.pop(BIAS))),
        r"lacks tensors \['hidden.bias'\] and contains unknown tensors \['offset'\]",
    ),
    (
        "wrong shape",
        tensors(lambda t: t.update({FACTOR: torch.zeros(1, 3, 2)})),
        r"should have shape \(1, 2, 3\), but has shape \(1, 3, 2\)",
    ),
    (
        "wrong dtype",
        tensors(lambda t: t.update({BIAS: torch.zeros(2, 2).double()})),
        "should have dtype torch.float32, but has dtype torch.float64",
    ),
    (
        "NaN",
        tensors(lambda t: t[FACTOR].fill_(float("nan"))),
        "'couplings.visible.factors.0' in .* contains values that are not finite",
    ),
    (
        "infinite",
        tensors(lambda t: t[BIAS][0].fill_(float("inf"))),
        "'hidden.bias' in .* contains values that are not finite",
    ),
]


@pytest.mark.parametrize(("_", "damage", "message"), DAMAGE, ids=[row[0] for row in DAMAGE])
def test_damage_is_named(tmp_path, _, damage, message):
    folder = mvrbm.save(machine_of((3, 3), (2, 2)), tmp_path / "model")
    damage(folder)
    with pytest.raises(StorageError, match=message) as caught:
        mvrbm.load(folder)
    assert "model" in str(caught.value)


def gigantic(visible, hidden, coupling):
    def change(content):
        content["visible"] = {"visible": visible}
        content["hidden"] = hidden
        content["couplings"] = {"visible": coupling}

    return config(change)


SMALL = {"unit": "bernoulli", "shape": [2, 2]}
GIGANTIC = [
    ("rank", gigantic(SMALL, SMALL, {"coupling": "kronecker", "rank": 10**9})),
    ("rank beyond counting", gigantic(SMALL, SMALL, {"coupling": "kronecker", "rank": 10**30})),
    ("bond", gigantic(SMALL, SMALL, {"coupling": "mpo", "bond": 10**9})),
    ("cp rank", gigantic(SMALL, {"unit": "bernoulli", "shape": [2]}, {"coupling": "cp", "rank": 10**10})),
    (
        "full matrix",
        gigantic(
            {"unit": "bernoulli", "shape": [40_000]}, {"unit": "bernoulli", "shape": [40_000]}, {"coupling": "dense"}
        ),
    ),
    ("visible layer", gigantic({"unit": "gaussian", "shape": [2_000_000_000, 1]}, SMALL, {"coupling": "kronecker"})),
    ("hidden layer", gigantic(SMALL, {"unit": "bernoulli", "shape": [10**6, 10**5]}, {"coupling": "kronecker"})),
    (
        "layer with a tied bias",
        gigantic({"unit": "bernoulli", "shape": [10**12, 2], "bias_shape": [1, 2]}, SMALL, {"coupling": "kronecker"}),
    ),
    ("layer beyond counting", gigantic({"unit": "bernoulli", "shape": [2**40, 2**40]}, SMALL, {"coupling": "dense"})),
]


@pytest.mark.parametrize(("_", "damage"), GIGANTIC, ids=[row[0] for row in GIGANTIC])
def test_gigantic_models_are_refused_before_they_are_built(tmp_path, monkeypatch, _, damage):
    folder = mvrbm.save(machine_of((3, 3), (2, 2)), tmp_path / "model")
    damage(folder)
    with torch.device("meta"):  # at its first use torch notes which functions it is for: not the guards below
        torch.empty(0)
    zeros, ones = torch.zeros, torch.ones

    def guarded(make):
        def made(*size, **kwargs):
            result = make(*size, **kwargs)
            assert result.is_meta or result.numel() < 10**6, "allocated"
            return result

        return made

    monkeypatch.setattr(torch, "zeros", guarded(zeros))
    monkeypatch.setattr(torch, "ones", guarded(ones))
    with pytest.raises(StorageError, match=r"describes .* parameters|not a valid model description"):
        mvrbm.load(folder)


def rewrite(folder, **changed):
    tensors = load_file(folder / "model.safetensors")
    assert set(changed) <= set(tensors)
    save_file({**tensors, **changed}, folder / "model.safetensors")


def test_numbers_that_grow_too_large_along_a_stack_are_refused(tmp_path):
    data = np.random.default_rng(0).random((8, 3, 2)).astype(np.float32)
    folder = DeepMVRBM([(2, 2)] * 3, hidden="rectified", n_epochs=1, random_state=0).fit(data).save(tmp_path / "stack")
    prefix = "machines.{}.couplings.visible.factors"
    huge = {f"{prefix.format(k)}.0": torch.full((1, 2, 3 if k == 0 else 2), 1e9) for k in range(3)}
    positive = {f"{prefix.format(k)}.1": torch.full((1, 2, 2), 0.1) for k in range(3)}  # rectified units stay active
    rewrite(folder, **positive, **{name: huge[name] for name in list(huge)[:1]})
    mvrbm.load(folder)
    rewrite(folder, **huge)  # none of these machines is refused by itself
    with pytest.raises(
        StorageError, match=r"hidden activations of .* cannot be computed: the activations become too large"
    ):
        mvrbm.load(folder)


def test_further_tensors_that_are_too_large_are_refused(tmp_path):
    data = np.random.default_rng(0).random((8, 3, 2)).astype(np.float32)
    folder = MVRBMClassifier((2, 2), n_epochs=1).fit(data, np.arange(8) % 2).save(tmp_path / "classifier")
    rewrite(folder, **{"top.weight": torch.full((2, 4), 1e38)})
    with pytest.raises(StorageError, match=r"'top.weight' contains a value of magnitude 1e\+38"):
        mvrbm.load(folder)


@pytest.fixture(scope="module")
def table():
    """A table with a column without any value, one with a single category, and one with two."""
    rng = np.random.default_rng(0)
    numbers = pd.DataFrame(rng.normal(size=(20, 3)), columns=list("abc")).assign(empty=np.nan)
    return numbers.assign(one=["x"] * 19 + [None], two=["y", "z"] * 9 + [None, "y"])


@pytest.fixture(scope="module")
def imputer(table):
    with pytest.warns(UserWarning, match=r"columns \['empty'\] are dropped because they have no known entries"):
        return MVRBMImputer("rectified", n_hidden=2, n_factors=1, n_epochs=1, random_state=0).fit(table)


def test_tables_are_filled_in_the_same_by_a_loaded_imputer(imputer, table, tmp_path):
    again = mvrbm.load(imputer.save(tmp_path / "model"), device="cpu")
    pd.testing.assert_frame_equal(again.transform(table), imputer.transform(table))
    np.testing.assert_array_equal(again.standard_deviation(table), imputer.standard_deviation(table))


DAMAGED_IMPUTERS = [
    (
        "shape",
        {"low": torch.zeros(5, dtype=torch.float64)},
        r"'low' in .* should have shape \(6,\), but has shape \(5,\)",
    ),
    (
        "dtype",
        {"centre": torch.zeros(6)},
        "'centre' in .* should have dtype torch.float64, but has dtype torch.float32",
    ),
    (
        "not finite",
        {"high": torch.full((6,), torch.inf, dtype=torch.float64)},
        "'high' in .* contains values that are not finite",
    ),
    ("too large", {"centre": torch.full((6,), 1e200, dtype=torch.float64)}, "'centre' contains a value of magnitude"),
    ("negative", {"scale": torch.full((6,), -1.0, dtype=torch.float64)}, "'center' and 'scale' in .* do not match"),
    ("tiny", {"scale": torch.full((6,), 1e-320, dtype=torch.float64)}, "'center' and 'scale' in .* do not match"),
]


@pytest.mark.parametrize(("_", "changed", "message"), DAMAGED_IMPUTERS, ids=[row[0] for row in DAMAGED_IMPUTERS])
def test_tensors_of_imputers_are_checked(imputer, tmp_path, _, changed, message):
    rewrite(imputer.save(tmp_path / "model"), **changed)
    with pytest.raises(StorageError, match=message):
        mvrbm.load(tmp_path / "model", device="cpu")


@pytest.mark.parametrize(
    ("old", "new"),
    [('"sample_axes": 1', '"sample_axes": 2'), ('"two"', '"two", "three"'), ('"kept": [', '"kept": [true, ')],
)
def test_descriptions_of_imputers_are_checked(imputer, tmp_path, old, new):
    path = imputer.save(tmp_path / "model") / "config.json"
    config = json.dumps(json.loads(path.read_text()))
    assert old in config
    path.write_text(config.replace(old, new))
    with pytest.raises(StorageError):
        mvrbm.load(tmp_path / "model", device="cpu")


def test_nothing_is_unpickled(tmp_path):
    class Trap:
        def __reduce__(self):
            return (os.mkdir, (str(tmp_path / "sprung"),))

    folder = mvrbm.save(BoltzmannMachine(Bernoulli((3, 3)), Bernoulli((2, 2)), Kronecker()), tmp_path / "model")
    (folder / "model.safetensors").write_bytes(pickle.dumps([Trap()] * 100))
    with pytest.raises(StorageError):
        mvrbm.load(folder)
    (folder / "config.json").write_bytes(pickle.dumps(Trap()))
    with pytest.raises(StorageError):
        mvrbm.load(folder)
    assert not (tmp_path / "sprung").exists()


# -- the registry -----------------------------------------------------------------------------------------


def test_an_unknown_class_is_named(tmp_path):
    folder = mvrbm.save(machine_of((3, 3), (2, 2)), tmp_path / "model")
    put("estimator", value={"class": "MVRBM2", "params": {}})(folder)
    with pytest.raises(
        StorageError, match=r"contains 'MVRBM2', which this version cannot load. Supported classes: .*MVRBM, .*RBM"
    ):
        mvrbm.load(folder)
    for damaged in (3, {}, {"class": ["MVRBM"]}):
        put("estimator", value=damaged)(folder)
        with pytest.raises(StorageError, match="does not contain the estimator's class name"):
            mvrbm.load(folder)
    for params in ({"color": 3}, {"visible": "logistic"}, {"visible": "gaussian"}, 3):
        put("estimator", value={"class": "MVRBM", "params": params, "as_arrays": True, "feature_names": None})(folder)
        with pytest.raises(StorageError, match=r"description in .* is corrupted"):
            mvrbm.load(folder)


def test_what_cannot_be_saved_is_an_error(tmp_path):
    with pytest.raises(StorageError, match="dict objects cannot be saved"):
        mvrbm.save({}, tmp_path / "model")
    with pytest.raises(NotFittedError):
        mvrbm.save(MVRBM(), tmp_path / "model")
    assert issubclass(StorageError, MVRBMError)


def test_new_classes_register_their_loader(tmp_path, monkeypatch):
    monkeypatch.setattr(saving, "_LOADERS", dict(saving._LOADERS))

    @saving.register("Pair")
    def load_pair(folder, config, device):
        return (saving.read_machine(folder), config["estimator"]["note"], device)

    with saving.replace_model(tmp_path / "pair") as staging:
        saving.write_machine(machine_of((3, 3), (2, 2)), staging, {"estimator": {"class": "Pair", "note": "hello"}})
    machine, note, device = mvrbm.load(tmp_path / "pair", device="cpu")
    assert (machine.hidden.shape, note, device) == ((2, 2), "hello", "cpu")


def test_a_unit_of_another_module_that_is_not_imported_is_named(tmp_path, monkeypatch):
    module = "from mvrbm.units import Bernoulli\nclass Mine(Bernoulli):\n    name = 'mine'\n"
    (tmp_path / "my_units.py").write_text(module)
    monkeypatch.syspath_prepend(tmp_path)
    importlib.import_module("my_units")
    model = MVRBM((2, 2), visible="mine", n_epochs=1).fit(np.random.default_rng(0).random((5, 3, 3)))
    folder = model.save(tmp_path / "model")
    assert mvrbm.load(folder).visible == "mine"
    monkeypatch.delitem(UNITS, "mine")
    with pytest.raises(StorageError, match="uses the unit 'mine' from the module 'my_units'; import it"):
        mvrbm.load(folder)
