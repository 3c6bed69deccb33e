"""CUDA graphs: repeated steps are counted, replays continue the streams, a failed capture leaves them as they were."""

import pytest
import torch

from mvrbm import cuda_graphs
from mvrbm.cuda_graphs import capture, repeat
from mvrbm.likelihood import log_partition, log_partition_interval
from mvrbm.models import mvrbm
from mvrbm.random import RandomSource, Recorder
from mvrbm.sampling import sample

needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")


class FakeGraph:
    def __init__(self, work):
        self.replay = work


@pytest.mark.parametrize("captured", [True, False])
@pytest.mark.parametrize("count", [0, 1, 19, 39, 40, 41, 60, 61, 1000])
def test_repeated_steps_are_counted_with_and_without_a_graph(monkeypatch, count, captured):
    taken, graphs = [], []

    def fake(work, sources, *, what):
        assert len(taken) >= 2, "both kinds of steps must have run before they are recorded"
        graphs.append(FakeGraph(work))
        return graphs[-1] if captured else None

    class OnGPU(RandomSource):
        capturable = True

    monkeypatch.setattr(cuda_graphs, "capture", fake)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: torch.Stream("cpu"))
    repeat(lambda: taken.append(len(taken) % 2), count, OnGPU(0), torch.device("cuda"))
    assert taken == [i % 2 for i in range(count)]
    assert len(graphs) == (count >= 40)
    repeat(lambda: taken.append(0), count, Recorder(RandomSource(0)), torch.device("cuda"))
    assert len(taken) == 2 * count
    assert len(graphs) == (count >= 40)


@needs_gpu
def test_annealing_with_a_graph_agrees_with_enumeration():
    machine = mvrbm((3, 3), (3, 3), rank=2)
    for link in machine.links.values():
        link.initialize(RandomSource(1), 0.5)
    exact, rng = float(log_partition(machine)), RandomSource(0, device="cuda")
    machine = machine.cuda()
    start = sample(machine, 300, 100, rng).visible
    for init in (None, start):
        both = log_partition_interval(machine, rng, n_chains=500, n_steps=500, burn_in=100, init=init)
        for found in (both.forward, both.reverse):
            assert abs(found.log_z - exact) < 4 * found.standard_error + 1e-3


@needs_gpu
def test_replays_continue_the_stream_as_calls_do():
    out, source, plain = torch.zeros(100, device="cuda"), RandomSource(3, device="cuda"), RandomSource(3, device="cuda")

    def work():
        out.copy_(source.uniform((100,), out))

    work()
    assert torch.equal(out, plain.uniform((100,), out))
    graph = capture(work, [source])
    for _ in range(3):
        graph.replay()
        assert torch.equal(out, plain.uniform((100,), out))


@needs_gpu
def test_work_that_reads_a_number_back_gives_a_warning_and_leaves_the_stream():
    out, source, plain = torch.zeros(100, device="cuda"), RandomSource(3, device="cuda"), RandomSource(3, device="cuda")

    def work():
        float(source.uniform((100,), out).sum())

    with pytest.warns(RuntimeWarning, match="this test runs without CUDA graphs"):
        assert capture(work, [source], what="this test") is None
    assert torch.equal(source.uniform((100,), out), plain.uniform((100,), out))
