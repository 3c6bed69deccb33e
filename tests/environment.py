"""Settings of a test run from environment variables: other seeds, and the C code for another processor.

`tests/conftest.py` applies them. Python programs that tests start apply them too, by `tests/startup/sitecustomize.py`.
"""

import contextlib
import os
import sys
from pathlib import Path

import numpy as np
import torch

# Added to every seed, once per unit of MVRBM_TEST_SEED. Larger than the differences of seeds within a test.
_STRIDE = 1_000_003

_SEED = "MVRBM_TEST_SEED"
_PROCESSOR = "MVRBM_TEST_PROCESSOR"
# Folder with the module that Python programs import when they start.
_STARTUP = str(Path(__file__).parent / "startup")

_real_default_rng = np.random.default_rng
_real_seed_sequence = np.random.SeedSequence
_RealRandomState = np.random.RandomState
_RealGenerator = torch.Generator
_real_manual_seed = torch.manual_seed


class Seeds:
    """The offset of all seeds, and whether it applies."""

    offset = int(os.environ.get(_SEED, "0"))
    shifted = True

    @classmethod
    def shift(cls, seed):
        """Return another seed for an integer, a list that starts with another seed, and anything else unchanged."""
        if isinstance(seed, list | tuple):
            return [cls.shift(seed[0]), *seed[1:]]
        if not cls.shifted or not isinstance(seed, int | np.integer):
            return seed
        return (int(seed) + _STRIDE * cls.offset) % 2**32 if 0 <= seed < 2**32 else seed


@contextlib.contextmanager
def fixed_seeds(fixed=True):
    """Apply no offset in a block or function, such as one that makes the data of a test.

    Random numbers are the same on every processor; only what is computed from them differs. A test may therefore choose
    its data or its model by a seed, and requires a margin for training and sampling only.
    """
    before = Seeds.shifted
    Seeds.shifted = not fixed
    os.environ[_SEED] = str(Seeds.offset * Seeds.shifted)  # for programs that start meanwhile
    try:
        yield
    finally:
        Seeds.shifted = before
        os.environ[_SEED] = str(Seeds.offset * Seeds.shifted)


class _ShiftedRandomState(type):
    """Make RandomState objects with another seed, and recognize all of them."""

    def __call__(cls, seed=None):
        return _RealRandomState(Seeds.shift(seed))

    def __instancecheck__(cls, instance):
        return isinstance(instance, _RealRandomState)


class _RandomState(metaclass=_ShiftedRandomState):
    pass


class _Generator(_RealGenerator):
    def manual_seed(self, seed):
        super().manual_seed(Seeds.shift(seed))
        return self


def _shift_seeds():
    """Add the offset wherever an integer becomes a generator. `RandomSource` makes its key with SeedSequence."""
    np.random.default_rng = lambda seed=None: _real_default_rng(Seeds.shift(seed))
    np.random.SeedSequence = lambda entropy=None, **rest: _real_seed_sequence(Seeds.shift(entropy), **rest)
    np.random.RandomState = _RandomState
    torch.Generator = _Generator
    torch.manual_seed = torch.random.manual_seed = lambda seed: _real_manual_seed(Seeds.shift(seed))


def choose_processor():
    """Use the C code for the processor that MVRBM_TEST_PROCESSOR names, none at all ("none"), or the best."""
    name = os.environ.get(_PROCESSOR, "")
    if name == "none":
        sys.modules |= dict.fromkeys(f"mvrbm.compiled.{name}" for name in ("_native", "_pseudo", "_identity"))
    else:
        from mvrbm import compiled

        code = compiled.library()
        if code is not None:
            code.use(name or code.processors()[-1])


def apply_settings():
    """Apply the settings to this program, and to the Python programs that it starts."""
    if Seeds.offset:
        _shift_seeds()
    choose_processor()
    if Seeds.offset or os.environ.get(_PROCESSOR):
        os.environ["PYTHONPATH"] = with_startup(os.environ.get("PYTHONPATH", ""))


def with_startup(path):
    """Return a PYTHONPATH that includes the folder with `sitecustomize.py`."""
    folders = [folder for folder in path.split(os.pathsep) if folder not in ("", _STARTUP)]
    return os.pathsep.join([_STARTUP, *folders])
