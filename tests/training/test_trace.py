"""The path of one update through the package stays short enough to follow."""

import sys
from pathlib import Path

import numpy as np
import pytest

import mvrbm
from mvrbm import MVRBM, compiled
from mvrbm.models import mvrbm as machine_of
from mvrbm.training import Trainer

PACKAGE = Path(mvrbm.__file__).parent
pytestmark = pytest.mark.skipif(compiled.library() is None, reason="counts the files of the compiled backend")


def files_called(work):
    """Return the files of the package whose functions a callable calls, relative to the package."""
    found = set()

    def record(frame, event, argument):
        path = Path(frame.f_code.co_filename)
        if event == "call" and path.is_relative_to(PACKAGE):
            found.add(path.relative_to(PACKAGE).as_posix())

    sys.setprofile(record)
    try:
        work()
    finally:
        sys.setprofile(None)
    return found


def test_an_epoch_of_one_update_passes_through_few_files():
    x = (np.random.default_rng(0).random((100, 28, 28)) < 0.5).astype(np.float32)
    Trainer(machine_of((28, 28), (25, 25))).fit(x, 1)  # loads the compiled code, which happens once per process
    trainer = Trainer(machine_of((28, 28), (25, 25)))
    first = files_called(lambda: trainer.fit(x, 1))
    again = files_called(lambda: trainer.fit(x, 2))
    assert trainer.update == 2
    # The first call also initializes the machine from the moments of the data.
    assert len(first) <= 34, sorted(first)
    assert len(again) <= 29, sorted(again)


def test_an_estimator_passes_through_few_files():
    x = (np.random.default_rng(0).random((50, 6, 6)) < 0.5).astype(np.float32)
    MVRBM((4, 4), n_epochs=1).fit(x)  # loads the compiled code
    model = MVRBM((4, 4), n_epochs=1)
    files = files_called(lambda: model.fit(x))
    assert len(files) <= 44, sorted(files)
    assert not any(path.startswith("backends/cuda/") for path in files), sorted(files)


def test_one_update_passes_through_few_files(monkeypatch):
    x = (np.random.default_rng(0).random((200, 28, 28)) < 0.5).astype(np.float32)
    updates = []
    train_on = Trainer.train_on
    monkeypatch.setattr(
        Trainer, "train_on", lambda *args, **how: updates.append(files_called(lambda: train_on(*args, **how)))
    )
    Trainer(machine_of((28, 28), (25, 25))).fit(x, 1)
    assert len(updates) == 2
    assert len(updates[-1]) <= 20, sorted(updates[-1])
