"""Undo the changes that a failed training run made to an estimator."""

import contextlib
from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import nn

# Attributes that contain a trainer, a list of trainers or None.
_TRAINERS = frozenset(["trainer_", "trainers_"])
# Attribute that contains the chains of an estimator without trainers.
_CHAINS = "_saved_chains"


@contextlib.contextmanager
def undo_on_error(estimator: Any, trained_in_place: Iterable[nn.Module] = ()) -> Iterator[None]:
    """Context manager that restores all attributes of an estimator if an exception occurs, including KeyboardInterrupt.

    A new estimator then remains unfitted, and a fitted estimator returns to its previous state. If the context trains
    existing modules in place, pass them as `trained_in_place`, so that their parameters are restored too. Trainers that
    have trained them in the context are discarded, because their state belongs to the discarded parameters. The
    estimator then keeps a copy of their chains.

    The context manager also restores PyTorch's grad mode. If Ctrl-C arrives while ``torch.no_grad`` is being entered or
    exited, gradients would otherwise stay disabled, and every later `fit` in the same session would fail.
    """
    grad_enabled = torch.is_grad_enabled()
    attributes = dict(vars(estimator))
    tensors = [tensor for module in trained_in_place for tensor in (*module.parameters(), *module.buffers())]
    values = [tensor.detach().clone() for tensor in tensors]
    n_updates = [trainer.update for trainer in _trainers_of(estimator)]
    has_chains = bool(tensors) and _CHAINS in attributes
    chains = {name: chain.clone() for name, chain in estimator.chains_.items()} if has_chains else {}
    try:
        yield
    except BaseException:
        torch.set_grad_enabled(grad_enabled)
        vars(estimator).clear()
        vars(estimator).update(attributes)
        with torch.no_grad():
            for tensor, value in zip(tensors, values, strict=True):
                tensor.copy_(value)
        if n_updates != [trainer.update for trainer in _trainers_of(estimator)]:
            vars(estimator).update(dict.fromkeys(_TRAINERS & attributes.keys()))
            if has_chains:
                vars(estimator)[_CHAINS] = chains
        raise


def _trainers_of(estimator: Any) -> list[Any]:
    found = [vars(estimator).get(name) or [] for name in _TRAINERS]
    return [trainer for part in found for trainer in (part if isinstance(part, list) else [part])]
