"""Write the playground, an HTML page on which visitors draw, and a model centers, completes and classifies drawings."""

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from mvrbm import __version__
from mvrbm.couplings import Coupling
from mvrbm.io.templates import write_html
from mvrbm.machine import BoltzmannMachine
from mvrbm.pages.encoding import encode
from mvrbm.units import Unit

# Unit types for images and labels that templates/machine.js implements.
_PICTURE_UNITS = ("bernoulli", "gaussian")
_LABEL_UNITS = ("categorical",)
# Maximum number of training chains to include as initial images. 40 binary images of 28x28 pixels take 42 kB.
_MAX_STARTS = 40
# Images are centered if the standard deviation of their centers of mass is below this number of pixels on both axes.
_CENTERED = 1.0
# Share of the training chains in which a pixel is ink, above which it belongs to the frame to draw in.
_OFTEN = 0.1

Array = NDArray[Any]


def write_playground(model: Any, path: str | os.PathLike[str], *, title: str | None = None) -> Path:
    """Write an HTML page that runs a model in the browser. The page works without a network connection.

    Parameters
    ----------
    model : BoltzmannMachine or estimator
        Model with a single two-dimensional visible layer of Bernoulli or Gaussian units, and at most one label layer.
    path : path
        File to write. An existing file is replaced only after the new file is complete.
    title : str, optional
        Heading of the page. Default: the class name of the model.

    Returns
    -------
    Path
        Path to the HTML file.

    Raises
    ------
    ValueError
        If the layers of the model are not supported.

    Examples
    --------
    >>> import mvrbm
    >>> from mvrbm.pages import write_playground
    >>> write_playground(mvrbm.load("digits"), "page.html").name  # doctest: +SKIP
    'page.html'
    """
    values = _template_values(model, title or type(model).__name__)
    return write_html("mvrbm.pages", "playground.html", path, **values)


def _template_values(model: Any, title: str) -> dict[str, Any]:
    """Return the template values for a model, or raise ValueError if the page cannot run the model."""
    machine = _machine_of(model)
    picture, label = _layers_of(machine, type(model).__name__)
    visible = machine.layers[picture]
    hidden = machine.hidden
    chains = getattr(model, "chains_", {})
    rows, columns = visible.shape
    hidden_shape = " × ".join(map(str, hidden.shape))
    described: dict[str, Any] = {
        "visible": {**_describe(visible, machine.links[picture]), "range": _gray_range(visible, chains.get(picture))},
        "hidden": _describe(hidden),
        "label": None,
        "starts": _starts(chains, picture, label),
        "center": None,
        "frame": None,
    }
    if picture in chains and visible.name == "bernoulli":
        images = chains[picture].cpu().numpy()
        described |= {"center": _center(images), "frame": _frame(images)}
    if label is not None:
        unit = machine.layers[label]
        classes = _classes(model, label, unit.shape[0])
        described["label"] = {**_describe(unit, machine.links[label]), "classes": classes}
    return {
        "title": title,
        "model": described,
        "binary": visible.name == "bernoulli",
        "rows": rows,
        "columns": columns,
        "hidden": f"{hidden.n_sites:,}",
        "sizes": f"{rows} × {columns} pixels, {hidden_shape} hidden units and {machine.n_parameters:,} parameters",
        "summary": f"{type(model).__name__}, {visible.name} pixels, {machine.links[picture].name} coupling",
        "version": __version__,
    }


def _machine_of(model: Any) -> BoltzmannMachine:
    machines = getattr(model, "machines_", None) or [getattr(model, "machine_", getattr(model, "machine", model))]
    if len(machines) > 1 or not isinstance(machines[0], BoltzmannMachine):
        got = type(model).__name__
        if len(machines) > 1:
            got += f", a stack of {len(machines)} machines"
        raise ValueError(
            "a playground requires a model with one Boltzmann machine, such as an MVRBM or a ClassificationMVRBM, "
            f"but got {got}"
        )
    return machines[0]


def _layers_of(machine: BoltzmannMachine, kind: str) -> tuple[str, str | None]:
    """Return the names of the image layer and the label layer (None if there is no label layer)."""
    layers = machine.layers
    pictures = [name for name, unit in layers.items() if unit.name in _PICTURE_UNITS and len(unit.shape) == 2]
    labels = [name for name, unit in layers.items() if unit.name in _LABEL_UNITS and len(unit.shape) == 1]
    others = len(layers) - len(pictures) - len(labels)
    hidden = machine.hidden.name
    if len(pictures) != 1 or len(labels) > 1 or others or hidden not in _PICTURE_UNITS:
        given = [f"'{name}': {unit.name} {unit.shape}" for name, unit in layers.items()]
        raise ValueError(
            "a playground requires one two-dimensional visible layer of bernoulli or gaussian units, at most one "
            f"categorical label layer, and bernoulli or gaussian hidden units, but got {kind} with {', '.join(given)} "
            f"and {hidden} hidden units"
        )
    return pictures[0], labels[0] if labels else None


def _describe(unit: Unit, link: Coupling | None = None) -> dict[str, Any]:
    """Return the parameters of a layer and, if `link` is given, the factors of its coupling."""
    with torch.no_grad():
        described = {
            "kind": unit.name,
            "shape": list(unit.shape),
            "bias": _encode(unit.bias.expand(unit.shape)),
            "scale": _encode(1 / unit.inverse_scale),
        }
        if link is not None:
            steps = link.contractions()
            described["steps"] = [{"equation": equation, "factor": _encode(factor)} for equation, factor in steps]
    return described


def _encode(tensor: Tensor) -> dict[str, Any]:
    return encode(tensor.detach().cpu().numpy())


def _gray_range(unit: Unit, chains: Tensor | None) -> list[float]:
    """Return the values to display as black and white.

    For bounded units, these are the bounds. For unbounded units, they are the ends of a range that contains most
    pixels.
    """
    if np.isfinite(unit.data_range).all():
        return list(unit.data_range)
    if chains is not None:
        return [float(end) for end in np.quantile(chains.cpu().numpy(), [0.005, 0.995])]
    bias = unit.bias.detach().cpu()
    scale = 1 / unit.inverse_scale.cpu()
    return [float((bias - 2 * scale).min()), float((bias + 2 * scale).max())]


def _starts(chains: Mapping[str, Tensor], picture: str, label: str | None) -> dict[str, Any] | None:
    """Select training chains with balanced labels as initial states. Return None if the model has no chains."""
    if not chains:
        return None
    labels = np.zeros(len(chains[picture]), int) if label is None else chains[label].argmax(-1).cpu().numpy()
    # Position of each chain among the chains with the same label. Sorting by position cycles through the labels.
    positions = [np.count_nonzero(labels[:row] == labels[row]) for row in range(len(labels))]
    rows = np.argsort(positions, kind="stable")[:_MAX_STARTS]
    return {"visible": _encode(chains[picture][rows]), "labels": labels[rows].tolist()}


def _center(images: Array) -> list[float] | None:
    """Return the center of mass (row, column) of binary images, or None if the images are not centered."""
    ink = images.sum((1, 2))
    images, ink = images[ink > 0], ink[ink > 0]
    places = np.indices(images.shape[1:])
    centers = np.array([(images * axis).sum((1, 2)) / ink for axis in places])  # (2, n)
    if len(images) == 0 or (centers.std(1) > _CENTERED).any():
        return None
    return [float(center) for center in centers.mean(1)]


def _frame(images: Array) -> list[int] | None:
    """Return the edges (top, left, bottom, right) of the pixels that are often ink, or None if no pixel is."""
    often = images.mean(0) > _OFTEN
    if not often.any():
        return None
    ends = [(int(np.flatnonzero(line)[0]), int(np.flatnonzero(line)[-1]) + 1) for line in (often.any(1), often.any(0))]
    (top, bottom), (left, right) = ends
    return [top, left, bottom, right]


def _classes(model: Any, label: str, count: int) -> list[str]:
    """Return the class names, or consecutive numbers if the model does not store class names."""
    classes = getattr(model, "classes_", range(count))
    if isinstance(classes, dict):
        classes = classes.get(label, range(count))
    return [str(value) for value in classes]
