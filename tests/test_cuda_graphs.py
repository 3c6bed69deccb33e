"""CUDA graphs: repeated steps are counted, replays continue the streams, a failed capture leaves them as they were."""

import pytest
import torch

from mvrbm import cuda_graphs
from mvrbm.cuda_graphs import capture, repeat
from mvrbm.likelihood import log_partition, log_partition_interval
from mvrbm.models import mvrbm
from mvrbm.random import RandomSource
from mvrbm.sampling import sample

needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")


class FakeGraph:
    def __init__(self, work):
        self.replay = work


@pytest.mark.parametrize("captured", [True, False])
@pytest.mark.parametrize("count", [0, 1, 19, 39, 40, 41, 60, 61, 1000])
def test_repeated_steps_are_counted_with_and_without_a_graph(monkeypatch, count, captured):
    taken, graphs = [], []

    def fake(work, *, what):
        assert len(taken) >= 2, "both kinds of steps must have run before they are recorded"
        graphs.append(FakeGraph(work))
        return graphs[-1] if captured else None

    monkeypatch.setattr(cuda_graphs, "capture", fake)
    monkeypatch.setattr(RandomSource, "step_on", lambda self, device: None)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: torch.Stream("cpu"))
    repeat(lambda rng: taken.append(len(taken) % 2), count, RandomSource(0), torch.device("cuda"))
    assert taken == [i % 2 for i in range(count)]
    assert len(graphs) == (count >= 40)
    repeat(lambda rng: taken.append(0), count, RandomSource(0), torch.device("cpu"))
    assert len(taken) == 2 * count
    assert len(graphs) == (count >= 40)


@needs_gpu
def test_annealing_with_a_graph_agrees_with_enumeration():
    machine = mvrbm((3, 3), (3, 3), rank=2)
    for link in machine.links.values():
        link.initialize(RandomSource(1), 0.5)
    exact, rng = float(log_partition(machine)), RandomSource(0)
    machine = machine.cuda()
    start = sample(machine, 300, 100, rng).visible
    for init in (None, start):
        both = log_partition_interval(machine, rng, n_chains=500, n_steps=500, burn_in=100, init=init)
        for found in (both.forward, both.reverse):
            assert abs(found.log_z - exact) < 4 * found.standard_error + 1e-3


@needs_gpu
def test_replays_advance_the_step_as_calls_do():
    out, source = torch.zeros(100, device="cuda"), RandomSource(3).at_step(0)
    source.step_on(out.device)

    def work():
        out.copy_(source.uniform((100,), out))
        source.next_step()

    work()
    assert torch.equal(out, RandomSource(3).at_step(0).uniform((100,), out))
    graph = capture(work)
    for step in range(1, 4):
        graph.replay()
        assert torch.equal(out, RandomSource(3).at_step(step).uniform((100,), out))


@needs_gpu
def test_long_chains_are_the_same_on_every_device():
    machine = mvrbm((3, 3), (3, 3), rank=2).double()
    here, there = (sample(machine.to(device), 5, 100, RandomSource(1)).visible for device in ("cpu", "cuda"))
    assert torch.equal(here["visible"], there["visible"].cpu())


@needs_gpu
def test_work_that_reads_a_number_back_gives_a_warning():
    out = torch.zeros(100, device="cuda")
    with pytest.warns(RuntimeWarning, match="this test runs without CUDA graphs"):
        assert capture(lambda: float(out.sum()), what="this test") is None
