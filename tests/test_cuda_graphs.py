"""Capture of CUDA graphs: replays continue the random streams, and a failed capture leaves them as they were."""

import pytest
import torch

from mvrbm.cuda_graphs import capture
from mvrbm.random import RandomSource

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")


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


def test_work_that_reads_a_number_back_gives_a_warning_and_leaves_the_stream():
    out, source, plain = torch.zeros(100, device="cuda"), RandomSource(3, device="cuda"), RandomSource(3, device="cuda")

    def work():
        float(source.uniform((100,), out).sum())

    with pytest.warns(RuntimeWarning, match="this test runs without CUDA graphs"):
        assert capture(work, [source], what="this test") is None
    assert torch.equal(source.uniform((100,), out), plain.uniform((100,), out))
