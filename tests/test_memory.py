"""A machine whose full W would have a billion weights stays small."""

import subprocess
import sys
from pathlib import Path

import pytest

from mvrbm.models import mvrbm

STEP = """
import torch
import mvrbm.models
from mvrbm import RandomSource
from mvrbm.sampling import gibbs, independent_sample

def peak():  # of this process alone, in MB
    with open("/proc/self/status") as status:
        return next(int(line.split()[1]) for line in status if line.startswith("VmHWM")) / 1024

before = peak()
machine = mvrbm.models.mvrbm((256, 256), (128, 128))
noise = RandomSource(0)
data = independent_sample(machine, 8, noise)
chain = gibbs(machine, data, 1, noise).visible
with torch.no_grad():
    positive, negative = machine.free_energy_gradient(data), machine.free_energy_gradient(chain)
    for name, parameter in machine.named_parameters():
        parameter.sub_(0.01 * (positive[name] - negative[name]))
assert all(bool(torch.isfinite(parameter).all()) for parameter in machine.parameters())
print(peak() - before)
"""


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="reads the peak memory from /proc")
def test_a_large_machine_takes_a_step_in_little_memory():
    done = subprocess.run([sys.executable, "-c", STEP], capture_output=True, text=True, timeout=200)
    assert done.returncode == 0, done.stderr
    assert float(done.stdout) < 300  # MB; W alone would take 4000


def test_a_large_machine_has_the_parameters_the_paper_counts():
    i, j, k, l = 256, 250, 128, 120  # noqa: E741
    assert mvrbm((i, j), (k, l)).n_parameters == i * k + j * l + i * j + k * l
