"""The playground: a page with one picture, to draw on, to sample, to fill in, with its label and hidden units."""

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from mvrbm import __version__
from mvrbm.couplings import Coupling
from mvrbm.io.templates import write_html
from mvrbm.machine import BoltzmannMachine
from mvrbm.pages.encoding import encode
from mvrbm.units import Unit

# Units that templates/machine.js has.
_PICTURES = ("bernoulli", "gaussian")
_LABELS = ("categorical",)
_STARTS = 40  # chains to start from; of 28x28 bits, 40 take 42 kB


def write_playground(model: Any, path: str | os.PathLike[str], *, title: str | None = None) -> Path:
    """Write one HTML file in which a model runs in the browser, without a network.

    Parameters
    ----------
    model : BoltzmannMachine or estimator
        A model with one visible layer of two axes, of Bernoulli or Gaussian units, and at most one layer of labels.
    path : path
        The file. An existing file is replaced when the new one is complete.
    title : str, optional
        Heading of the page. Default: the class of the model.

    Returns
    -------
    Path
        The file.

    Raises
    ------
    ValueError
        If the model has other layers.

    Examples
    --------
    >>> import mvrbm
    >>> from mvrbm.pages import write_playground
    >>> write_playground(mvrbm.load("digits"), "page.html").name  # doctest: +SKIP
    'page.html'
    """
    return write_html("mvrbm.pages", "playground.html", path, **_playground(model, title or type(model).__name__))


def _playground(model: Any, title: str) -> dict[str, Any]:
    """Return what the template shows of a model, or raise ValueError if it cannot run it."""
    machine = _machine_of(model)
    picture, label = _layers_of(machine, type(model).__name__)
    visible, hidden, chains = machine.layers[picture], machine.hidden, getattr(model, "chains_", {})
    rows, columns = visible.shape
    described = {
        "visible": {**_describe(visible, machine.links[picture]), "range": _range(visible, chains.get(picture))},
        "hidden": _describe(hidden),
        "label": None,
        "starts": _starts(chains, picture, label),
    }
    if label is not None:
        unit = machine.layers[label]
        classes = _classes(model, label, unit.shape[0])
        described["label"] = {**_describe(unit, machine.links[label]), "classes": classes}
    units = " × ".join(map(str, hidden.shape))
    return {
        "title": title,
        "model": described,
        "binary": visible.name == "bernoulli",
        "rows": rows,
        "columns": columns,
        "hidden": f"{hidden.n_sites:,}",
        "sizes": f"{rows} × {columns} pixels, {units} hidden units and {machine.n_parameters:,} learned numbers",
        "summary": f"{type(model).__name__}, {visible.name} pixels, {machine.links[picture].name} coupling",
        "version": __version__,
    }


def _machine_of(model: Any) -> BoltzmannMachine:
    machines = getattr(model, "machines_", None) or [getattr(model, "machine_", getattr(model, "machine", model))]
    if len(machines) > 1 or not isinstance(machines[0], BoltzmannMachine):
        what = f", a stack of {len(machines)} machines" if len(machines) > 1 else ""
        wanted = "a page needs a model with one Boltzmann machine, such as an MVRBM or a ClassificationMVRBM"
        raise ValueError(f"{wanted}, got {type(model).__name__}{what}")
    return machines[0]


def _layers_of(machine: BoltzmannMachine, kind: str) -> tuple[str, str | None]:
    """Return the names of the layer of the picture, and of that of the label if there is one."""
    layers = machine.layers
    pictures = [name for name, unit in layers.items() if unit.name in _PICTURES and len(unit.shape) == 2]
    labels = [name for name, unit in layers.items() if unit.name in _LABELS and len(unit.shape) == 1]
    if len(pictures) != 1 or len(labels) > 1 or len(layers) > 1 + len(labels) or machine.hidden.name not in _PICTURES:
        given = [f"'{name}': {unit.name} {unit.shape}" for name, unit in layers.items()]
        raise ValueError(
            "a page needs one visible layer with two axes, of bernoulli or gaussian units, at most one categorical "
            f"layer of labels, and bernoulli or gaussian hidden units, got {kind} with {', '.join(given)} and hidden "
            f"{machine.hidden.name} units"
        )
    return pictures[0], labels[0] if labels else None


def _describe(unit: Unit, link: Coupling | None = None) -> dict[str, Any]:
    with torch.no_grad():
        described = {"kind": unit.name, "shape": list(unit.shape), "bias": _encode(unit.bias.expand(unit.shape))}
        described["scale"] = _encode(1 / unit.inverse_scale())
        if link is not None:
            steps = link.contractions()
            described["steps"] = [{"equation": equation, "factor": _encode(factor)} for equation, factor in steps]
    return described


def _encode(tensor: Tensor) -> dict[str, Any]:
    return encode(tensor.detach().cpu().numpy())


def _range(unit: Unit, chains: Tensor | None) -> list[float]:
    """Return the darkest and the lightest value to show: all that there are, else those of most pixels."""
    if np.isfinite(unit.data_range).all():
        return list(unit.data_range)
    if chains is not None:
        return [float(end) for end in np.quantile(chains.cpu().numpy(), [0.005, 0.995])]
    bias, scale = unit.bias.detach().cpu(), 1 / unit.inverse_scale().cpu()
    return [float((bias - 2 * scale).min()), float((bias + 2 * scale).max())]


def _starts(chains: Mapping[str, Tensor], picture: str, label: str | None) -> dict[str, Any] | None:
    """Return persistent chains of training, as many of each label as there are; None if the model has none."""
    if not chains:
        return None
    labels = np.zeros(len(chains[picture]), int) if label is None else chains[label].argmax(-1).cpu().numpy()
    rank = [np.count_nonzero(labels[:row] == labels[row]) for row in range(len(labels))]
    rows = np.argsort(rank, kind="stable")[:_STARTS]  # the first of every label, the second of every label, ...
    return {"visible": _encode(chains[picture][rows]), "labels": labels[rows].tolist()}


def _classes(model: Any, label: str, count: int) -> list[str]:
    classes = getattr(model, "classes_", range(count))
    if isinstance(classes, dict):
        classes = classes.get(label, range(count))
    return [str(value) for value in classes]
