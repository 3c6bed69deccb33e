"""Programs that tests start have the seeds and the C code of the test run."""

import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

import mvrbm
from environment import fixed_seeds, with_startup
from mvrbm import compiled

CODE = """
import json, sys
import mvrbm
assert "torch" not in sys.modules
import numpy as np
import torch
from mvrbm import RandomSource, compiled
code = compiled.library()
numbers = [np.random.default_rng(1).random(), np.random.RandomState(1).random(), torch.manual_seed(1).initial_seed()]
numbers += [RandomSource(1).uniform((2,), torch.ones(1, dtype=torch.float64)).sum().item()]
json.dump([numbers, None if code is None else code.processors()], sys.stdout)
"""


def run(**settings):
    paths = [str(Path(mvrbm.__file__).parents[1]), os.environ.get("PYTHONPATH", "")]
    environment = {**os.environ, "PYTHONPATH": with_startup(os.pathsep.join(paths)), **settings}
    return json.loads(
        subprocess.run([sys.executable, "-c", CODE], capture_output=True, check=True, env=environment).stdout
    )


@pytest.mark.slow
@pytest.mark.parametrize("offset", [0, 2])
def test_programs_have_the_offset_of_the_seeds(offset):
    shifted = 1 + 1_000_003 * offset
    numbers, _ = run(MVRBM_TEST_SEED=str(offset))
    with fixed_seeds():
        numpy_numbers = [np.random.default_rng(shifted).random(), np.random.RandomState(shifted).random()]
        source = mvrbm.RandomSource(shifted).uniform((2,), torch.ones(1, dtype=torch.float64)).sum().item()
    assert numbers == [*numpy_numbers, shifted, source]


@pytest.mark.slow
def test_programs_have_the_c_code_of_the_test_run():
    assert run(MVRBM_TEST_PROCESSOR="none")[1] is None
    if compiled.library() is not None:
        assert run(MVRBM_TEST_PROCESSOR="")[1] is not None


def test_programs_within_fixed_seeds_have_no_offset():
    with fixed_seeds():
        assert os.environ["MVRBM_TEST_SEED"] == "0"
