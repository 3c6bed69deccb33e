"""Training with several processes on the loopback address."""

import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from filelock import FileLock
from safetensors.torch import load_file

import mvrbm
from distributed_jobs import CASES, SAMPLES, bits, gray, long_training, swept, train_case
from mvrbm import load
from mvrbm.data.sources import Batch
from mvrbm.distributed import World
from mvrbm.training import CD, PCD, Recipe, TemperedPCD, Trainer
from mvrbm.updates.gradient import contrast_by_autograd

HERE = Path(__file__).parent
JOBS = str(HERE / "distributed_jobs.py")


def run(*command):
    """Run Python and wait for its end; a hang fails."""
    source = Path(mvrbm.__file__).parents[1]
    path = os.pathsep.join([str(HERE), str(HERE.parent), str(source), os.environ.get("PYTHONPATH", "")])
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "MVRBM_TIMEOUT": "60", "PYTHONPATH": path}
    done = subprocess.run([sys.executable, *command], capture_output=True, text=True, env=environment, timeout=150)
    assert done.returncode == 0, done.stderr[-3000:]
    return done


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """The files that several processes wrote, created once for all workers of pytest."""
    base = tmp_path_factory.getbasetemp()
    folder = (base.parent if "PYTEST_XDIST_WORKER" in os.environ else base) / "shared"
    with FileLock(f"{folder}.lock"):
        if not folder.exists():
            leave_behind(unfinished := tmp_path_factory.mktemp("unfinished"))
            unfinished.rename(folder)
    return folder


def leave_behind(folder):
    value = iter(np.arange(1000.0))
    for name, lengths in {"unequal": [5, 0, 31, 1], "two": [6, 9]}.items():
        (folder / name).mkdir()
        for number, length in enumerate(lengths):
            rows = np.array([next(value) for _ in range(length)]).reshape(-1, 1, 1) * np.ones((1, 2, 2))
            np.save(folder / name / f"{number}.npy", rows)
    np.save(folder / "gray.npy", gray(200, 6, 5).numpy())
    (folder / "unreadable").mkdir()
    np.save(folder / "unreadable" / "0.npy", np.zeros((5, 4, 4)))
    (folder / "unreadable" / "1.npy").write_bytes(b"\x93NUMPY nonsense")
    two = "2:equal,shards,loaders,tempered,sweep,corners,estimator,command"
    run(JOBS, two, "3:equal", "4:shards,loaders", "2:unreadable", "2:alone:2", str(folder))


@pytest.mark.slow
@pytest.mark.parametrize("size", [2, 3])
@pytest.mark.parametrize("name", CASES)
def test_several_learn_what_one_learns(folder, name, size):
    """Only the rounding of sums depends on the number of processes."""
    alone = train_case(name, World())
    shared = load_file(folder / f"equal-{size}.safetensors")
    moved = 0.0
    for key, value in alone.items():
        torch.testing.assert_close(shared[key], value, rtol=1e-10, atol=1e-12)
        moved = max(moved, float(value.abs().max()))
    assert moved > 0.1


@pytest.mark.slow
@pytest.mark.parametrize("size", [2, 4])
def test_every_sample_of_the_shards_occurs_once_per_epoch(folder, size):
    # The processes themselves check the samples.
    assert json.loads((folder / f"shards-{size}.json").read_text())["updates"] > 0


@pytest.mark.slow
def test_one_process_resumes_the_tempered_chains_of_two(folder):
    def new_trainer():
        recipe = Recipe(batch_size=20, negative=TemperedPCD(6, 3))
        return Trainer(bits().double(), recipe, seed=4)

    x = gray(SAMPLES, 6, 5)
    trainer = new_trainer()
    assert trainer.resume(folder / "tempered")
    trainer.fit(x, 2)  # both epochs are done
    assert trainer.update == 10
    assert trainer.state.chains["visible"].shape[:2] == (3, 6)
    trainer.fit(x, 3)
    assert trainer.update == 15
    alone = new_trainer().fit(x, 3)
    for name, value in alone.machine.state_dict().items():
        torch.testing.assert_close(trainer.machine.state_dict()[name], value, rtol=1e-10, atol=1e-12)


@pytest.mark.slow
def test_a_sweep_distributes_its_models(folder):
    found, alone = json.loads((folder / "sweep.json").read_text()), swept()
    assert found["best"] == alone.best_params_
    np.testing.assert_allclose(found["scores"], [candidate.score for candidate in alone.candidates_], rtol=1e-9)


@pytest.mark.slow
def test_processes_restart_after_one_is_killed(tmp_path):
    launch = ["-m", "torch.distributed.run", "--nnodes", "1", "--nproc-per-node", "2", "--max-restarts", "2"]
    launch += ["--rdzv-backend", "c10d", "--rdzv-endpoint", "127.0.0.1:0", "--monitor-interval", "0.2"]
    run(*launch, JOBS, "killed", str(tmp_path))
    assert json.loads((tmp_path / "killed.json").read_text()) == {"updates": 30, "attempt": 1}
    assert (tmp_path / "attempts-1").read_text() == "0\n1\n"
    killed, undisturbed = (load_file(tmp_path / f"{name}.safetensors") for name in ("killed", "undisturbed"))
    assert all(torch.equal(killed[key], value) for key, value in undisturbed.items())
    # One process continues from where two stopped, with all of the chains.
    trainer = long_training(tmp_path / "checkpoints", World())
    assert trainer.update == 30
    assert trainer.state.chains["visible"].shape[0] == 30
    for key, value in long_training(None, World()).machine.state_dict().items():
        torch.testing.assert_close(killed[key], value, rtol=1e-10, atol=1e-12)


@pytest.mark.slow
def test_a_process_does_not_wait_forever(folder):
    assert 1 < json.loads((folder / "alone.json").read_text())["seconds"] < 50  # patience: 2


def said(folder, name):
    """Exit codes, outputs and errors of the command line, by process."""
    return zip(*(json.loads((folder / f"{name}-{rank}.json").read_text()) for rank in range(2)), strict=True)


@pytest.mark.slow
def test_an_unreadable_shard_is_one_line_of_error(folder):
    codes, _, errors = said(folder, "unreadable")
    assert 0 not in codes
    (line,) = (line for line in "".join(errors).splitlines() if line.startswith("error:"))
    assert "1.npy has .npy version 32.110, but only 1.0 and 2.0 are supported" in line
    assert not (folder / "by-unreadable").exists()


@pytest.mark.slow
def test_estimators_and_the_command_line_only_need_torchrun(folder):
    codes, outputs, errors = said(folder, "command")
    assert codes == (0, 0)
    assert "".join(outputs).count("by-command: MVRBM") == 1
    assert "".join(errors).count("epoch 5 of 5") == 1
    for name in ("by-estimator", "by-command"):
        assert float(load(folder / name).machine_.links["visible"].factors[0].detach().norm()) > 0.1


@pytest.mark.parametrize("size", [2, 3, 4])
@pytest.mark.parametrize("n_chains", [0, 7, 12])
def test_gradients_of_all_processes_add_up_to_the_gradient_of_one(n_chains, size):
    machine = bits().double()
    data, chains = gray(11, 6, 5), gray(n_chains or 11, 6, 5, seed=1)
    trainer = Trainer(machine, Recipe(negative=PCD(n_chains) if n_chains else CD()), world=World())
    total = {name: torch.zeros_like(parameter) for name, parameter in machine.named_parameters()}
    for rank in range(size):
        trainer.world = world = World(rank, size)
        own, own_chains = world.part_of(len(data)), world.part_of(len(chains))
        share = trainer._share_of(Batch({"visible": data[own]}, {}, total=11, first=own.start))
        assert (share.first_sample, share.first_chain) == (own.start, own_chains.start)
        states = {"visible": data[own]}, {"visible": chains[own_chains]}
        for name, part in contrast_by_autograd(machine, *states, share).items():
            total[name] += part
    for name, whole in contrast_by_autograd(machine, {"visible": data}, {"visible": chains}).items():
        torch.testing.assert_close(total[name], whole, rtol=1e-10, atol=1e-12)


def test_fewer_chains_than_processes_are_an_error():
    with pytest.raises(ValueError, match="n_chains must be at least the number of processes \\(8\\), got 6"):
        TemperedPCD(6, 3).share(World(0, 8))


def test_logged_metrics_are_reduced_on_the_device_for_messages(monkeypatch):
    """With NCCL alone, tensors on a CPU cannot be reduced."""
    seen = []

    def all_reduce(tensor):
        seen.append(tensor.device.type)
        raise StopIteration

    monkeypatch.setattr("mvrbm.distributed._message_device", lambda: "meta")
    monkeypatch.setattr(torch.distributed, "all_reduce", all_reduce)
    trainer = Trainer(mvrbm.models.mvrbm((2, 2), (2, 2)), world=World())
    trainer.world = World(0, 2)
    with pytest.raises(StopIteration):
        trainer.log({"reconstruction_error": 1.0})
    assert seen == ["meta"]
