"""The table of backends, and the rule that chooses among them."""

import dataclasses

import pytest
import torch

from mvrbm import BoltzmannMachine
from mvrbm.backends.choose import BACKENDS, choose_backend, fastest_backend, kernel_backend, unsupported_reasons
from mvrbm.backends.cpu.gemm import GemmBackend
from mvrbm.backends.reference import ReferenceBackend
from mvrbm.couplings import CP, Kronecker
from mvrbm.data.sources import as_source
from mvrbm.training import Trainer
from mvrbm.units import Bernoulli
from mvrbm.updates import update
from mvrbm.updates.gradient import contrast_by_autograd


def prepared(link=None, **how):
    machine = BoltzmannMachine(Bernoulli((6, 5)), Bernoulli((4, 7) if link is None else 7), link or Kronecker(2))
    trainer = Trainer(machine, **how)
    source = trainer.prepare(torch.rand(20, 6, 5), initialize=True)
    return [trainer.update_settings()], [trainer.state], [source]


def test_every_backend_says_why_it_cannot_compute_a_training_run():
    (settings,), (state,), (source,) = prepared()
    reasons = unsupported_reasons(settings, state, source)
    assert reasons.keys() == BACKENDS.keys()
    assert reasons["gemm"] is None
    assert reasons["reference"] is None
    assert reasons["autograd"] is None
    for name in ("tensor", "per_sample", "full_matrix", "graph"):
        assert "cpu" in reasons[name]


def test_the_fastest_backend_is_chosen_unless_one_is_named():
    run = prepared()
    assert not isinstance(choose_backend(*run, 1), ReferenceBackend)
    assert isinstance(choose_backend(*run, 1, name="reference"), ReferenceBackend)
    assert isinstance(choose_backend(*run, 1, name="gemm"), GemmBackend)
    assert isinstance(choose_backend(*prepared(CP(3)), 1), ReferenceBackend)
    assert isinstance(choose_backend(*prepared(backend="autograd"), 1), ReferenceBackend)


@pytest.mark.parametrize("name", ["reference", "autograd"])
def test_only_autograd_differentiates_free_energies(monkeypatch, name):
    differentiated = []

    def counted(*arguments):
        differentiated.append(name)
        return contrast_by_autograd(*arguments)

    monkeypatch.setattr(update, "contrast_by_autograd", counted)
    machine = BoltzmannMachine(Bernoulli((6, 5)), Bernoulli((4, 7)), Kronecker(2))
    trainer = Trainer(machine, backend=name).fit(torch.rand(20, 6, 5), 1)
    batch = next(as_source(torch.rand(5, 6, 5), machine).head(5))
    trainer.train_on(batch)
    assert trainer.update == 2
    assert differentiated == [name] * (2 if name == "autograd" else 0)
    settings, states, sources = prepared()
    assert choose_backend(settings, states, sources, 1, name=name).settings.by_autograd == (name == "autograd")


def test_a_named_backend_that_cannot_compute_the_run_is_an_error():
    with pytest.raises(ValueError, match="backend 'graph' does not support this training run: the machine is on cpu"):
        choose_backend(*prepared(), 1, name="graph")
    with pytest.raises(ValueError, match="backend must be one of"):
        choose_backend(*prepared(), 1, name="fast")


@pytest.mark.usefixtures("interpreted")
def test_machines_train_together_by_kernels_alone():
    settings, states, sources = prepared()
    with pytest.raises(ValueError, match="cannot train 2 machines together"):
        choose_backend(settings * 2, states * 2, sources * 2, 1, name="gemm")


def test_without_kernels_no_backend_trains_groups():
    (settings,), (state,), (source,) = prepared()
    assert kernel_backend(settings, state, source, 2) is None


@pytest.mark.parametrize("name", ["gemm", "reference", "autograd"])
def test_trainers_use_the_backend_that_the_user_names(monkeypatch, name):
    entry = BACKENDS[name]
    built = []

    def build(*run):
        built.append(name)
        return entry.build(*run)

    monkeypatch.setitem(BACKENDS, name, dataclasses.replace(entry, build=build))
    machine = BoltzmannMachine(Bernoulli((6, 5)), Bernoulli((4, 7)), Kronecker(2))
    Trainer(machine, backend=name).fit(torch.rand(20, 6, 5), 1)
    assert built == [name]


def test_trainers_raise_if_the_named_backend_cannot_compute_the_run():
    trainer = Trainer(BoltzmannMachine(Bernoulli((6, 5)), Bernoulli((4, 7)), Kronecker(2)), backend="graph")
    with pytest.raises(ValueError, match="backend 'graph' does not support this training run: the machine is on cpu"):
        trainer.fit(torch.rand(20, 6, 5), 1)
    assert trainer.failed


def test_machines_with_a_named_cpu_backend_train_one_by_one():
    (settings,), (state,), (source,) = prepared()
    assert kernel_backend(settings, state, source, 2, name="gemm") is None
    assert kernel_backend(settings, state, source, 2, name="per_sample") == "per_sample"


def test_the_automatic_choice_asks_backends_in_order_and_no_gpu_backend_on_a_cpu(monkeypatch):
    asked = []

    def recorded(name, entry):
        def unsupported_reason(*run):
            asked.append(name)
            return entry.unsupported_reason(*run)

        return dataclasses.replace(entry, unsupported_reason=unsupported_reason)

    for name, entry in BACKENDS.items():
        monkeypatch.setitem(BACKENDS, name, recorded(name, entry))
    (settings,), (state,), (source,) = prepared()
    chosen = fastest_backend(settings, state, source)
    assert asked == ["one_hot", "native"] + (["gemm"] if chosen == "gemm" else [])


def test_a_slower_backend_is_skipped_unless_it_is_requested(monkeypatch):
    run = prepared()
    for name in ("native", "gemm"):
        entry = dataclasses.replace(BACKENDS[name], slower_reason=lambda *run: "for this test")
        monkeypatch.setitem(BACKENDS, name, entry)
    assert isinstance(choose_backend(*run, 1), ReferenceBackend)
    assert isinstance(choose_backend(*run, 1, name="gemm"), GemmBackend)
