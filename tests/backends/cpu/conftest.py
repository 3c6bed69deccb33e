"""Fixtures for tests of the C code."""

import pytest

from environment import choose_processor
from mvrbm import compiled

CODE = compiled.library()


@pytest.fixture(params=[] if CODE is None else CODE.processors())
def processor(request):
    """Use the C code for each kind of processor that this machine can run."""
    CODE.use(request.param)
    yield request.param
    choose_processor()
