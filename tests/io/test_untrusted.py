"""Tests of untrusted files: pipes and devices, files that claim gigabytes, and parameters that are far too large."""

import io
import json
import os
import socket

import numpy as np
import pytest
import torch
from PIL import Image
from safetensors.torch import load_file, save_file

import mvrbm
from mvrbm import distributed
from mvrbm.errors import DistributedError, InputError, StorageError
from mvrbm.io import arrays, pictures, shards
from mvrbm.io.untrusted import ALLOWANCE, Budget, check_regular_file
from mvrbm.training import Trainer

DATA = np.random.default_rng(0).random((6, 3, 2)).astype(np.float32)
QUICK = {"n_epochs": 1, "random_state": 0, "device": "cpu"}
EPS = b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 9 9\n%%EndComments\nshowpage\n"


def changed(folder, change):
    config = json.loads((folder / "config.json").read_text())
    change(config)
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def with_tensor(folder, name, value):
    tensors = load_file(folder / "model.safetensors")
    tensors[name][...] = value
    save_file(tensors, folder / "model.safetensors")
    return folder


@pytest.fixture
def model(tmp_path):
    return mvrbm.MVRBM((2, 2), visible="gaussian", **QUICK).fit(DATA).save(tmp_path / "model")


READERS = {
    "array": arrays.read_samples,
    "labels": lambda path: arrays.read_labels(path.rename(path.with_suffix(".txt"))),
    "picture": pictures.read_picture,
    "shards": lambda path: shards.Shards(path.parent),
    "trainer": lambda path: Trainer(mvrbm.models.mvrbm((3, 2), (2, 2))).fit(path),
}


@pytest.mark.parametrize("reader", READERS)
@pytest.mark.parametrize("kind", ["pipe", "device"])
def test_data_files_that_are_not_regular_files_raise(tmp_path, reader, kind):
    path = tmp_path / "file.npy"
    os.mkfifo(path) if kind == "pipe" else path.symlink_to("/dev/zero")
    with pytest.raises(InputError, match="is a pipe, a socket or a device; specify a regular file"):
        READERS[reader](path)


@pytest.mark.parametrize("file", ["config.json", "model.safetensors"])
@pytest.mark.parametrize("kind", ["pipe", "device"])
def test_model_files_that_are_not_regular_files_raise(model, file, kind):
    (model / file).unlink()
    os.mkfifo(model / file) if kind == "pipe" else (model / file).symlink_to("/dev/zero")
    with pytest.raises(StorageError, match="specify a regular file"):
        mvrbm.load(model, "cpu")


def test_null_characters_in_names_raise_documented_errors(tmp_path):
    for read in (arrays.read_array, arrays.read_samples, pictures.read_picture, shards.Shards, check_regular_file):
        with pytest.raises(InputError):
            read("a\0b")
    with pytest.raises(InputError, match="is not a valid file name"):
        arrays.read_labels("a\0b.txt")
    with pytest.raises(StorageError):
        mvrbm.load("a\0b", "cpu")
    with pytest.raises(StorageError, match="is not a valid folder name"):
        mvrbm.save(mvrbm.models.rbm(2, 2), tmp_path / "a\0b")


def test_an_archive_with_the_suffix_npy_raises(tmp_path):
    np.savez(tmp_path / "a.npz", x=DATA)
    path = (tmp_path / "a.npz").rename(tmp_path / "a.npy")
    with pytest.raises(shards.ShardError, match="corrupted"):
        shards.Shards(tmp_path)
    with pytest.raises(InputError, match="corrupted"):
        Trainer(mvrbm.models.mvrbm((3, 2), (2, 2))).fit(str(path))


def test_no_program_is_started_for_a_picture(tmp_path, monkeypatch):
    program = tmp_path / "gs"
    program.write_text(f"#!/bin/sh\necho > {tmp_path}/started\n")
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    (tmp_path / "a.png").write_bytes(EPS)
    with pytest.raises(InputError, match="not a readable image"):
        pictures.read_picture(tmp_path / "a.png")
    assert not (tmp_path / "started").exists()


def test_a_small_picture_that_claims_many_pixels_raises_before_they_are_allocated(tmp_path):
    buffer = io.BytesIO()
    Image.new("L", (4, 4)).save(buffer, "BMP")
    content = bytearray(buffer.getvalue())
    content[18:26] = (8000).to_bytes(4, "little") * 2
    (tmp_path / "a.bmp").write_bytes(content)
    with pytest.raises(InputError, match="declares 8000x8000 pixels, but"):
        pictures.read_picture(tmp_path / "a.bmp")


def test_a_budget_adds_up_allocations(tmp_path):
    path = tmp_path / "file"
    path.write_bytes(b"x" * 100)
    budget = Budget(path)
    assert budget.n_bytes == ALLOWANCE + 400
    budget.spend(ALLOWANCE, "the first part")
    with pytest.raises(InputError, match="the second part requires 401 bytes, which exceeds the limit of 64 MiB"):
        budget.spend(401, "the second part")
    budget = Budget(path)
    budget.seconds = -1.0
    with pytest.raises(InputError, match="which is too long for a file of this size"):
        budget.spend(0, "nothing")


def test_json_that_takes_too_much_memory_raises_before_it_is_parsed(model):
    (model / "config.json").write_text('{"a": [' + "{}," * 2**20 + "0]}")
    with pytest.raises(StorageError, match="JSON requires"):
        mvrbm.load(model, "cpu")


def test_labels_of_a_huge_dtype_raise(tmp_path):
    folder = mvrbm.MVRBMClassifier((2, 2), **QUICK).fit(DATA, np.arange(6) % 2).save(tmp_path / "model")
    changed(folder, lambda c: c["estimator"].update(classes={"dtype": "<U500000000", "values": ["a", "b"]}))
    with pytest.raises(StorageError, match="labels of dtype <U500000000 exceed the limit of"):
        mvrbm.load(folder, "cpu")


def test_the_sizes_of_all_machines_of_a_stack_add_up(tmp_path):
    folder = mvrbm.DeepMVRBM([(2, 2)], **QUICK).fit(DATA).save(tmp_path / "model")

    def repeat(config):
        part = config["stack"][0]
        part["visible"]["visible"].update(shape=[100, 100], bias_shape=[100, 100])
        part["hidden"].update(shape=[100, 100], bias_shape=[100, 100])
        config["stack"] = [part] * 600

    weights = folder / "model.safetensors"
    weights.write_bytes(weights.read_bytes() + bytes(200_000))  # enough for one of them
    with pytest.raises(StorageError, match=r"describes 40,000 parameters \(320,000 bytes\)"):
        mvrbm.load(changed(folder, repeat), "cpu")


def test_gaussian_layers_that_are_too_large_to_check_raise(tmp_path):
    machine = mvrbm.BoltzmannMachine(mvrbm.Gaussian((3, 2), bias_shape=(1, 1)), mvrbm.Gaussian(4), mvrbm.CP())
    folder = mvrbm.save(machine, tmp_path / "model")
    weights = folder / "model.safetensors"
    weights.write_bytes(weights.read_bytes() + bytes(300_000))
    changed(folder, lambda c: c["visible"]["visible"].update(shape=[30_000, 30_000]))
    with pytest.raises(StorageError, match="to check that the energy of coupled Gaussian layers is bounded requires"):
        mvrbm.load(folder, "cpu")


@pytest.mark.parametrize(
    ("tensor", "value", "message"),
    [
        ("visible.visible.log_variance", 1e30, "standard deviation of layer 'visible' is too large"),
        ("visible.visible.log_variance", -200.0, "standard deviation of layer 'visible' is too large"),
        ("visible.visible.bias", 1e30, "bias in standard deviations of layer 'visible' is too large"),
        ("hidden.bias", -1e30, "bias of layer 'hidden' is too large"),
        ("couplings.visible.factors.0", 1e30, "coupling for layer 'visible' is too large"),
    ],
)
def test_parameters_that_are_too_large_raise(model, tensor, value, message):
    with pytest.raises(StorageError, match=message):
        mvrbm.load(with_tensor(model, tensor, value), "cpu")


@pytest.mark.parametrize(("visible", "hidden"), [(4, 3), (40, 1100)])  # by a matrix, and by Lanczos iteration
def test_an_unbounded_energy_raises(tmp_path, visible, hidden):
    machine = mvrbm.BoltzmannMachine(mvrbm.Gaussian(visible), mvrbm.Gaussian(hidden), mvrbm.Dense())
    folder = mvrbm.save(machine, tmp_path / "model")
    mvrbm.load(folder, "cpu")
    with pytest.raises(StorageError, match="the energy is unbounded"):
        mvrbm.load(with_tensor(folder, "couplings.visible.weight", 0.5), "cpu")


def test_lanczos_iteration_gives_the_norm_of_the_matrix():
    rng = torch.Generator().manual_seed(0)
    machine = mvrbm.BoltzmannMachine(mvrbm.Gaussian(40), mvrbm.Gaussian(1100), mvrbm.Dense())
    weight = machine.links["visible"].dense().detach()
    columns = torch.randn(1100, 40, generator=rng) * 0.01
    weight.copy_(columns - columns.mean(0))  # orthogonal to a vector of ones
    assert machine.gaussian_norm() == pytest.approx(float(torch.linalg.matrix_norm(weight, 2)), rel=1e-4)


def test_cycles_of_a_super_resolver_are_limited():
    with pytest.raises(ValueError, match="cycles must be a whole number from 1 to 1,000, got 2147483648"):
        mvrbm.vision.SuperResolver(symmetric=False, cycles=2**31).check()


def test_an_invalid_seed_raises(model):
    with pytest.raises(StorageError, match="random_state must be a whole number from 0 to"):
        mvrbm.load(changed(model, lambda c: c["estimator"]["params"].update(random_state=2**63)), "cpu")


@pytest.mark.parametrize("device", ["quantum", "meta"])
def test_a_sweep_over_invalid_devices_raises(device):
    with pytest.raises(ValueError, match="device"):
        mvrbm.Sweep(mvrbm.MVRBM((2, 2), **QUICK), {"device": [device]}).fit(DATA)


def test_a_port_in_use_raises_an_error_that_names_it(monkeypatch):
    with socket.socket() as other:
        other.bind(("", 0))
        other.listen()
        port = other.getsockname()[1]
        settings = {"RANK": 0, "WORLD_SIZE": 2, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
        for name, value in settings.items():
            monkeypatch.setenv(name, str(value))
        with pytest.raises(DistributedError, match=f"cannot connect to 127.0.0.1:{port}: .*in use"):
            distributed._join()
