"""The named models have the size and the parts that they are named for."""

import numpy as np
import pytest
import torch

from mvrbm import Bernoulli, Gaussian, RandomSource
from mvrbm.models import cp_rbm, documents, multimodal_mvrbm, mvrbm, rbm, replicated_softmax

SIZES = [
    ("rbm", rbm(7, 5), 7 * 5 + 7 + 5),
    ("mvrbm", mvrbm((28, 28), (25, 25)), 28 * 25 * 2 + 28 * 28 + 25 * 25),
    ("mvrbm of rank 3", mvrbm((4, 5), (6, 7), rank=3), 3 * (4 * 6 + 5 * 7) + 20 + 42),
    ("tensor", mvrbm((4, 5, 6), (3, 2, 2)), 12 + 10 + 12 + 120 + 12),
    ("cp", cp_rbm((4, 5, 6), 7, rank=2), 2 * (4 + 5 + 6 + 7) + 120 + 7),
    (
        "two modalities",
        multimodal_mvrbm({"a": Gaussian((4, 5)), "b": Bernoulli((2, 3))}, (3, 3)),
        12 + 15 + 6 + 9 + 20 + 6 + 9,
    ),
    ("documents", replicated_softmax(9, 20, 5), 20 * 5 + 20 + 5),
]


@pytest.mark.parametrize(("_", "machine", "count"), SIZES)
def test_number_of_parameters(_, machine, count):
    assert machine.n_parameters == count
    assert sum(p.numel() for p in machine.parameters() if p.requires_grad) == count


def test_seed_or_stream_of_ones_own():
    same = [mvrbm((3, 4), (2, 2), seed=seed).couplings.visible.dense() for seed in (4, RandomSource(4))]
    assert torch.equal(*same)
    assert not torch.equal(same[0], mvrbm((3, 4), (2, 2), seed=5).couplings.visible.dense())


def test_modalities_start_from_different_numbers():
    machine = multimodal_mvrbm({"a": Bernoulli((3, 4)), "b": Bernoulli((3, 4))}, (2, 2))
    assert not torch.equal(machine.couplings.a.dense(), machine.couplings.b.dense())


# -- documents --------------------------------------------------------------------------------------------


def test_documents_spell_out_counts():
    counts = torch.tensor([[2, 0, 1], [0, 1, 0], [0, 0, 0]])
    rows = documents(counts)
    spelled = [[0, 0, 2], [1], []]
    assert rows.shape == (3, 3, 3)
    for document, words in zip(rows, spelled, strict=True):
        for row, content in enumerate(document):
            expected = torch.eye(3)[words[row]] if row < len(words) else torch.zeros(3)
            assert torch.equal(content, expected)


def test_documents_keep_their_counts():
    counts = torch.from_numpy(np.random.default_rng(0).integers(0, 5, size=(20, 6)))
    rows = documents(counts, n_rows=40)
    assert rows.shape == (20, 40, 6)
    torch.testing.assert_close(rows.sum(1), counts.to(rows.dtype))
    present = rows.sum(2)
    assert bool(((present == 0) | (present == 1)).all())
    assert bool((present.diff(dim=1) <= 0).all())  # padding is at the end


def test_documents_take_floats_and_empty_ones():
    assert documents(torch.tensor([[0.0, 2.0]])).tolist() == [[[0.0, 1.0], [0.0, 1.0]]]
    assert documents(torch.zeros(2, 3)).shape == (2, 1, 3)
    assert documents(np.array([[1, 1]])).tolist() == [[[1.0, 0.0], [0.0, 1.0]]]


def test_a_document_machine_takes_padded_rows():
    machine = replicated_softmax(4, 3, 2)
    x = documents(torch.tensor([[1, 0, 2], [0, 1, 0]]), n_rows=4)
    assert machine.hidden_mean({"words": x}).shape == (2, 1, 2)
    assert bool((machine.couplings.words.factors[0] == 1).all())
