"""Model cards: the file ``README.md`` that describes a saved model to people.

:mod:`mvrbm.hub` writes cards next to models, and :mod:`mvrbm.saving` keeps cards that were edited.
"""

import json
import math
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from safetensors import safe_open

from mvrbm.card_signature import signed_card
from mvrbm.machine import BoltzmannMachine
from mvrbm.saving import CARD, ESTIMATOR, MODEL, STACK, read_config

__all__ = ["HUB_NAME", "SHIPPED", "ModelCard", "write_card"]

#: Names of the trained models included in the package.
SHIPPED = ("digits", "labeled-digits")
#: Model name on the Hub: "user/name" or "user/name@revision".
HUB_NAME = re.compile(r"[\w-][\w.-]*/[\w-][\w.-]*(@[\w./-]+)?", re.ASCII)
_NOT_STATED = "Not stated."


@dataclass(frozen=True, kw_only=True)
class ModelCard:
    """User-supplied information for a model card, which cannot be derived from the model itself.

    Parameters
    ----------
    name : str, optional
        Title of the card. Default: the model's name on the Hub, or its class name.
    description : str
        Purpose of the model.
    data : str
        Description of the training data.
    license : str, optional
        License for the weights, as a Hugging Face Hub identifier such as ``"bsd-3-clause"`` or ``"cc-by-4.0"``.
    figures : mapping of str to value
        Evaluation results, keyed by name (for example, ``{"test log-likelihood (nats)": -84.6}``). The names should
        state the evaluation data and the command that produced the results.

    Examples
    --------
    >>> from mvrbm import ModelCard
    >>> ModelCard(name="Digits", license="bsd-3-clause").data
    'Not stated.'
    """

    name: str | None = None
    description: str = ""
    data: str = _NOT_STATED
    license: str | None = None
    figures: Mapping[str, Any] = field(default_factory=dict)


def write_card(card: ModelCard, folder: Path) -> None:
    """Write a model card, `README.md`, to a folder that contains a model."""
    config = read_config(folder)
    estimator = config.get(ESTIMATOR, {})
    kind = estimator.get("class", BoltzmannMachine.__name__)
    machines = config.get(STACK, [config])
    license_entry = f"license: {json.dumps(card.license)}\n" if card.license else ""
    sections = [
        f'---\nlibrary_name: mvrbm\n{license_entry}tags: ["boltzmann-machine", "energy-based-model"]\n---',
        f"# {card.name or kind}",
        card.description,
        "## Model",
        f"`{kind}` from the Python package mvrbm: {_n_parameters(folder):,} parameters, {machines[0]['dtype']}.",
        _table(("layer", "units", "shape", "coupling to the layer above"), _layers(machines)),
        _settings(estimator.get("params", {})),
        "## Data",
        card.data,
        "## License",
        card.license or _NOT_STATED,
        "## Evaluation results",
        _table(("figure", "value"), card.figures.items()) if card.figures else _NOT_STATED,
        "## How to load",
        f'```python\nimport mvrbm\n\nmodel = mvrbm.load("{_loadable_name(card)}")\n```',
        "This file was written by `save_pretrained`. Saving another model here replaces it unless you edit it.",
    ]
    text = "\n\n".join(section for section in sections if section)
    (folder / CARD).write_text(signed_card(text + "\n"), encoding="utf-8")


def _n_parameters(folder: Path) -> int:
    with safe_open(folder / MODEL, framework="pt") as file:
        return sum(math.prod(file.get_slice(key).get_shape()) for key in file.keys())  # noqa: SIM118


def _settings(params: Mapping[str, Any]) -> str:
    given = [f"`{key}={json.dumps(value)}`" for key, value in params.items() if value is not None]
    return f"Settings: {', '.join(given)}." if given else ""


def _loadable_name(card: ModelCard) -> str:
    """Return the title of the card if :func:`mvrbm.load` accepts it as a model name, and a placeholder otherwise."""
    if card.name is not None and (card.name in SHIPPED or HUB_NAME.fullmatch(card.name)):
        return card.name
    return "path/to/this/folder"


def _layers(machines: Sequence[Mapping[str, Any]]) -> Iterator[Sequence[str]]:
    """Yield one table row per layer: first the visible layers of the bottom machine, then the hidden layers."""
    bottom = machines[0]
    for name, layer in bottom["visible"].items():
        yield name, layer["unit"], _shape(layer), _coupling(bottom["couplings"][name])
    for number, machine in enumerate(machines, start=1):
        above = machines[number]["couplings"].values() if number < len(machines) else ()
        hidden = machine["hidden"]
        yield f"hidden {number}", hidden["unit"], _shape(hidden), "; ".join(_coupling(link) for link in above)


def _shape(layer: Mapping[str, Any]) -> str:
    return "x".join(map(str, layer["shape"]))


def _coupling(link: Mapping[str, Any]) -> str:
    options = [f"{key} {value}" for key, value in link.items() if key != "coupling" and value]
    return ", ".join([link["coupling"], *options])


def _table(header: Sequence[str], rows: Iterable[Sequence[Any]]) -> str:
    """Format rows as a Markdown table."""
    lines = (header, ["---"] * len(header), *rows)
    return "\n".join(f"| {' | '.join(_cell(value) for value in line)} |" for line in lines)


def _cell(value: Any) -> str:
    return " ".join(str(value).split()).replace("|", "\\|")
