"""The Triton kernel of norms against its definition in PyTorch, interpreted or on a GPU."""

import pytest
import torch

from mvrbm.couplings.base import squared_norms

pytest.importorskip("triton")

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


@pytest.mark.parametrize("shape", [(1, 64, 128), (3, 128, 100), (2, 5, 7), (1, 70, 90), (2, 128, 128), (1, 1, 300)])
@pytest.mark.usefixtures("interpreted")
def test_norms_are_those_of_the_definition(shape):
    matrices = torch.randn(shape, generator=torch.Generator().manual_seed(1))
    expected = torch.linalg.svdvals(matrices.double()).pow(8).sum(-1).pow(1 / 4)
    with torch.no_grad():
        found = squared_norms(matrices.to(DEVICE))
        turned = squared_norms(matrices.to(DEVICE).mT)
    torch.testing.assert_close(found.cpu().double(), expected, rtol=1e-4, atol=0)
    torch.testing.assert_close(turned.cpu().double(), expected, rtol=1e-4, atol=0)


def test_wide_matrices_have_the_norms_of_the_definition():
    matrices = torch.randn(2, 130, 140, generator=torch.Generator().manual_seed(1))
    expected = torch.linalg.svdvals(matrices.double()).pow(8).sum(-1).pow(1 / 4)
    torch.testing.assert_close(squared_norms(matrices.to(DEVICE)).cpu().double(), expected, rtol=1e-4, atol=0)
