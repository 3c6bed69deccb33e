"""Label layers (a single one-hot row per sample) and their exact distribution given the other visible layers.

A plain Gibbs step samples the label given the hidden layer. The hidden layer still encodes the previous label, so
labels rarely change. This module therefore samples labels from their exact distribution, with the hidden layer
marginalized out, just before it samples the hidden layer. Together, these two steps sample the label and the hidden
layer jointly.
"""

from __future__ import annotations

import functools
import math
import operator
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from mvrbm.machine import BoltzmannMachine
from mvrbm.random import RandomSource

# Maximum number of classes to sum over one at a time. More classes would take longer than the rest of a Gibbs step.
_MOST_CLASSES = 64
# Number of fixed-point iterations for the label bias.
_MATCHING_STEPS = 1000


def label_log_posterior(machine: BoltzmannMachine, visible: Mapping[str, Tensor], label: str = "label") -> Tensor:
    r"""Compute the exact :math:`\log p(\text{label} = k \mid X)` in a machine with a label layer.

    Given `X`, the free energies of the labels differ only in the label bias and in the contribution of the label to the
    hidden field,

    .. math:: \log p(k \mid X) = b_k + A_h\Big(\sum_m W_m T_m(X_m) + D_k\Big) - \log \sum_{k'} \exp(\dots).

    The field of the other layers is computed only once, and :math:`D_k`, the column for label `k`, is added to it.
    `label` is the name of a Categorical layer with one row. `visible` contains the other layers, each of shape
    (n, \*layer shape), and is not validated. The result has shape (n, n_labels).
    """
    return torch.log_softmax(label_scores(machine, visible, label), 1)


def label_scores(machine: BoltzmannMachine, visible: Mapping[str, Tensor], label: str = "label") -> Tensor:
    """Compute the negative free energy of each sample combined with each label.

    The result has shape (n, n_labels). The energy of the other visible units is omitted, because it does not depend on
    the label.
    """
    return _label_fields(machine, visible, label) - machine.layers[label].energy(_every(machine, label))


def _label_fields(machine: BoltzmannMachine, visible: Mapping[str, Tensor], label: str) -> Tensor:
    """Compute the log-normalizer of the hidden layer for each sample and label. The result has shape (n, n_labels)."""
    hidden, parts = (
        machine.hidden,
        [
            link.to_hidden(machine.layers[name].statistic(visible[name]))
            for name, link in machine.links.items()
            if name != label
        ],
    )
    field = functools.reduce(operator.add, parts)  # (n, *hidden shape)
    columns = machine.links[label].to_hidden(_every(machine, label))  # (labels, *hidden shape)
    joint = (field[:, None] + columns).reshape(-1, *hidden.shape)
    return hidden.log_normalizer(joint).reshape(len(field), len(columns))


def _every(machine: BoltzmannMachine, label: str) -> Tensor:
    shape = machine.layers[label].shape
    return torch.eye(shape[-1], dtype=machine.like.dtype, device=machine.like.device).reshape(-1, *shape)


def loose_labels(machine: BoltzmannMachine, masks: Mapping[str, Tensor | None]) -> list[str]:
    """Return the names of the label layers that have unknown labels and few enough classes for :func:`draw_labels`."""
    if not machine.hidden.has_energy or len(machine.layers) < 2:
        return []
    one_row = {name: unit for name, unit in machine.layers.items() if unit.entry_modes == 1 == len(unit.shape)}
    labels = [name for name, unit in one_row.items() if unit.levels == unit.shape[0]]  # exclude word counts
    few = {name: masks[name] for name in labels if machine.layers[name].shape[0] <= _MOST_CLASSES}
    return [name for name, known in few.items() if known is None or not bool(known.all())]


@torch.no_grad()
def draw_labels(
    machine: BoltzmannMachine,
    visible: Mapping[str, Tensor],
    labels: Sequence[str],
    rng: RandomSource,
    masks: Mapping[str, Tensor | None],
) -> dict[str, Tensor]:
    """Sample the unknown labels given the other visible layers, one label layer at a time, and return all layers."""
    states = dict(visible)
    for name in labels:
        drawn, known = machine.layers[name].sample(_label_fields(machine, states, name), rng), masks[name]
        states[name] = drawn if known is None else torch.where(known, states[name], drawn)
    return states


@torch.no_grad()
def match_label_shares(machine: BoltzmannMachine, visible: Mapping[str, Tensor], label: str, shares: Tensor) -> None:
    r"""Set the bias of a label layer so that the model's marginal label probabilities equal `shares`.

    `shares` has shape (n_labels,). `visible` contains model samples of the other layers, each drawn given a label,
    where the labels occur in these proportions. The distribution of such samples does not depend on the bias, so the
    bias at which the mean posterior equals `shares` is the maximum-likelihood bias. This is equivalent to estimating
    the partition function of each class with the multistate Bennett acceptance ratio of Shirts and Chodera.
    """
    unit, fields = machine.layers[label], _label_fields(machine, visible, label)
    target = shares.clamp(min=1e-6).log()
    bias = unit.bias.expand(unit.shape).clone()
    for _ in range(_MATCHING_STEPS):
        bias += target - torch.log_softmax(fields + bias, 1).logsumexp(0) + math.log(len(fields))
    unit.bias.copy_(bias)
