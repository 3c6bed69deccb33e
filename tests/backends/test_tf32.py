"""The TF32 switch."""

import pytest
import torch

from mvrbm.backends.tf32 import tensor_cores


def test_tensor_cores_are_allowed_inside_the_block_alone():
    matmul = torch.backends.cuda.matmul
    assert matmul.allow_tf32 is False
    with tensor_cores():
        assert matmul.allow_tf32 is True
    with pytest.raises(ZeroDivisionError), tensor_cores():
        raise ZeroDivisionError
    assert matmul.allow_tf32 is False
