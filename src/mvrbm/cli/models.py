"""Commands that describe or export a saved model: info and export."""

from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any

import typer

from mvrbm.cli.options import AsJson, Force, ModelFolder, argument, show, table, times

ExportMethod = StrEnum("ExportMethod", ["TRANSFORM", "RECONSTRUCT", "PREDICT_PROBA"])

_METHOD_HELP = "Method to export."
# Parts of a machine's config to include in the JSON result.
_PARTS = ("visible", "hidden", "couplings")


def info(model_folder: ModelFolder, as_json: AsJson = False) -> None:
    """Show the class, layers, parameters and files of a saved model."""
    import mvrbm
    from mvrbm.hub import find
    from mvrbm.saving import read_config
    from mvrbm.training.checkpoints import newest

    place = find(model_folder)
    folder = newest(place) or place  # the most recent checkpoint, if the folder contains checkpoints
    loaded = mvrbm.load(folder, "cpu")
    model = getattr(loaded, "machine", loaded)  # a checkpoint loads as a trainer, which has a machine
    kind = type(model).__name__
    parameters = model.n_parameters if hasattr(model, "n_parameters") else model.n_parameters_
    config = read_config(folder)
    machines: list[dict[str, Any]] = config.get("stack") or [config]
    files = {path.name: path.stat().st_size for path in sorted(folder.iterdir())}
    result = {
        "model": str(folder),
        "class": kind,
        "parameters": parameters,
        "files": files,
        "stack": [{part: machine[part] for part in _PARTS} for machine in machines],
        **{key: machines[0][key] for key in (*_PARTS, "dtype")},
    }
    rows = [
        ("class", kind),
        *_layer_rows(machines),
        ("parameters", f"{parameters:,}"),
        ("dtype", machines[0]["dtype"]),
        *((f"file {name}", f"{size:,} bytes") for name, size in files.items()),
    ]
    show(result, as_json, table(rows))


def _layer_rows(machines: list[dict[str, Any]]) -> list[tuple[str, str]]:
    """Return one table row per layer and coupling. The machines in a stack are numbered."""
    rows = []
    for number, machine in enumerate(machines, 1):
        prefix = "" if len(machines) == 1 else f"{number}: "
        rows += [(f"{prefix}visible '{name}'", _in_words(part)) for name, part in machine["visible"].items()]
        rows.append((f"{prefix}hidden", _in_words(machine["hidden"])))
        rows += [(f"{prefix}coupling '{name}'", _in_words(part)) for name, part in machine["couplings"].items()]
    return rows


def _in_words(part: dict[str, Any]) -> str:
    """Describe a unit or a coupling by its name, shape, integer settings and enabled flags."""
    words = [str(part.get("unit") or part["coupling"])]
    if "shape" in part:
        words.append(times(part["shape"]))
    words += [f"{key} {value}" for key, value in part.items() if isinstance(value, int) and value is not False]
    return " ".join(words)


def export(
    model_folder: ModelFolder,
    out: Annotated[Path, argument("OUT", "A .onnx file.")],
    method: Annotated[ExportMethod, typer.Option(help=_METHOD_HELP)] = ExportMethod.TRANSFORM,
    force: Force = False,
    as_json: AsJson = False,
) -> None:
    """Export one method of a model to an ONNX file.

    Before writing the file, the command runs the exported model with onnxruntime and compares its output with the
    output of the original model.
    """
    import mvrbm
    from mvrbm.export import OPSET, to_onnx
    from mvrbm.io.atomic import check_output

    check_output(out, force, (".onnx",))
    model = mvrbm.load(model_folder, "cpu")
    kind = type(model).__name__
    to_onnx(model, out, method.value)
    size = out.stat().st_size
    result = {"out": str(out), "class": kind, "method": method.value, "opset": OPSET, "bytes": size}
    show(result, as_json, f"{out}: {kind}.{method.value}, ONNX opset {OPSET}, {size:,} bytes")
