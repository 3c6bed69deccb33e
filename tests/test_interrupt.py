"""SIGTERM ends the work like Ctrl-C: after the current batch, with everything saved, and with exit code 143."""

import os
import pickle
import signal
import threading

import numpy as np
import pytest
from PIL import Image

import mvrbm
from mvrbm import MVRBM, ClassificationMVRBM, MVRBMClassifier, Sweep
from mvrbm.backends.cpu import native
from mvrbm.cli import main
from mvrbm.interrupt import Terminated, exit_code, finish_on_interrupt, hold_signals, terminate_in_order
from mvrbm.training import Callback, Trainer, backprop
from mvrbm.vision import SuperResolver

X = (np.random.default_rng(0).random((40, 4, 4)) < 0.3).astype(np.float32)
LABELS = np.arange(40) % 2
IMAGE = np.random.default_rng(0).integers(0, 256, (40, 40), dtype=np.uint8)
SIGNALS = [(signal.SIGINT, KeyboardInterrupt, 130), (signal.SIGTERM, Terminated, 143)]


def send(number):
    signal.raise_signal(number)


class After(Callback):
    def __init__(self, number, updates=3):
        self.number, self.updates = number, updates

    def on_batch_end(self, trainer, batch):
        if trainer.update == self.updates:
            send(self.number)


def rbm(callbacks):
    return MVRBM((2, 2), n_epochs=4, batch_size=10, random_state=0).fit(X, callbacks=callbacks)


def generative(callbacks):
    model = ClassificationMVRBM((2, 2), mode="generative", n_epochs=4, batch_size=10, random_state=0)
    return model.fit(X, LABELS, callbacks=callbacks)


def super_resolver(callbacks):
    model = SuperResolver(2, 6, (2, 2), symmetric=False, n_patches=400, n_epochs=4, device="cpu")
    return model.fit([IMAGE], callbacks=callbacks)


@pytest.mark.parametrize(("number", "error", "code"), SIGNALS)
@pytest.mark.parametrize("fit", [rbm, generative, super_resolver])
def test_training_ends_after_the_batch_with_its_own_error(fit, number, error, code):
    callback, seen = After(number), []
    callback.on_train_end = lambda trainer: seen.append(trainer.update)
    former = signal.getsignal(number)
    with pytest.raises(error) as raised:
        fit([callback])
    assert seen == [3]
    assert exit_code(raised.value) == code
    assert signal.getsignal(number) is former


@pytest.mark.parametrize(("number", "error", "code"), SIGNALS)
def test_a_sweep_and_a_descent_end_too(monkeypatch, number, error, code):
    train_on, count = Trainer.train_on, []

    def third(self, *args, **settings):
        count.append(1)
        if len(count) == 3:
            send(number)
        return train_on(self, *args, **settings)

    monkeypatch.setattr(Trainer, "train_on", third)
    with pytest.raises(error):
        Sweep(MVRBM((2, 2), n_epochs=4, batch_size=10, backend="reference"), {"random_state": [0, 1]}).fit(X)
    assert len(count) == 3
    softmax, count = backprop.torch.optim.AdamW.step, []

    def second(self, *args):
        count.append(1)
        if len(count) == 2:
            send(number)
        return softmax(self, *args)

    monkeypatch.setattr(backprop.torch.optim.AdamW, "step", second)
    classifier = MVRBMClassifier((2, 2), n_epochs=4, batch_size=10, random_state=0)
    with pytest.raises(error):
        classifier.fit(X, LABELS)
    assert len(count) == 2
    assert classifier.predict(X).shape == (40,)


TRAIN = "train data.npy --hidden 2x2 --epochs 4 --batch-size 10 --checkpoints points"
SUPERRES = "superres-train photos --configuration paper --hidden 2x2 --patch 6 --patches 400 --rank 1 --epochs 4"
RBM_SWEEP = "train data.npy --hidden 2x2 --epochs 4 --sweep random_state=0,1"


@pytest.mark.parametrize(
    ("command", "at", "saved"), [(TRAIN, 3, True), (SUPERRES, 3, True), (SUPERRES, -1, False), (RBM_SWEEP, 3, False)]
)
def test_commands_save_and_exit_with_143(tmp_path, monkeypatch, capsys, command, at, saved):
    monkeypatch.chdir(tmp_path)
    np.save("data.npy", X)
    os.mkdir("photos")
    Image.fromarray(IMAGE).save("photos/one.png")
    train_on = Trainer.train_on

    def sends(self, *args, **settings):
        train_on(self, *args, **settings)
        if self.update == at:
            send(signal.SIGTERM)

    monkeypatch.setattr(Trainer, "train_on", sends)
    monkeypatch.setattr(native, "unsupported_reason", lambda *args: "so that updates are made one by one")
    if at < 0:
        monkeypatch.setattr(SuperResolver, "fit", lambda *args, **settings: send(signal.SIGTERM))
    assert main([*command.split(), "--out", "model", "--device", "cpu"]) == 143
    error = capsys.readouterr().err.splitlines()[-1]
    assert error.startswith("error: interrupted")
    assert ("the partially trained model was saved to model" in error) == saved
    if saved:
        mvrbm.load("model")
    assert len(list(tmp_path.glob("points/update-000000003"))) == (command == TRAIN)
    assert not list(tmp_path.glob(".*"))


def test_a_second_sigterm_changes_nothing():
    """A scheduler may send one to all processes, and a launcher another one."""
    seen = []
    with terminate_in_order():
        with finish_on_interrupt(seen.append):
            send(signal.SIGTERM)
            send(signal.SIGTERM)
        send(signal.SIGTERM)  # while the program saves
    assert seen == [Terminated, Terminated]


def test_commands_end_at_sigterm_where_nothing_is_to_be_finished():
    with pytest.raises(Terminated) as raised, terminate_in_order():
        send(signal.SIGTERM)
    assert pickle.loads(pickle.dumps(raised.value)).code == 143
    assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL


def test_a_program_keeps_its_own_handling_of_sigterm():
    own = []
    former = signal.signal(signal.SIGTERM, lambda number, frame: own.append(number))
    try:
        model = rbm([After(signal.SIGTERM)])
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        rbm([After(signal.SIGTERM)])
    finally:
        signal.signal(signal.SIGTERM, former)
    assert own == [signal.SIGTERM]
    assert not model.interrupted_
    assert model.n_epochs_ == 4


def test_signals_wait_until_the_context_ends():
    done = []

    def hold():
        with hold_signals():
            send(signal.SIGINT)
            done.append(1)

    with pytest.raises(KeyboardInterrupt):
        hold()
    assert done == [1]
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_threads_have_no_signals():
    def work():
        with finish_on_interrupt(lambda reason: None), hold_signals(), terminate_in_order():
            done.append(os.getpid())

    done = []
    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert done
