"""Commands about a saved model itself: info and export."""

from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any

import typer

from mvrbm.cli.options import AsJson, Force, ModelFolder, argument, show, table, times

ExportMethod = StrEnum("ExportMethod", ["TRANSFORM", "RECONSTRUCT", "PREDICT_PROBA"])


def info(model_folder: ModelFolder, as_json: AsJson = False) -> None:
    """Show the class, layers, shapes, parameters and files of a model."""
    import mvrbm
    from mvrbm.hub import find
    from mvrbm.saving import read_config
    from mvrbm.training.checkpoints import newest

    place = find(model_folder)
    folder = newest(place) or place  # of several checkpoints, the last
    loaded = mvrbm.load(folder, "cpu")
    model = getattr(loaded, "machine", loaded)  # a trainer has one
    config = read_config(folder)
    machines: list[dict[str, Any]] = config.get("stack") or [config]
    parameters = model.n_parameters if hasattr(model, "n_parameters") else model.n_parameters_
    files = {path.name: path.stat().st_size for path in sorted(folder.iterdir())}
    result = {"model": str(folder), "class": type(model).__name__, "parameters": parameters, "files": files}
    result |= {"stack": [{key: machine[key] for key in ("visible", "hidden", "couplings")} for machine in machines]}
    result |= {key: machines[0][key] for key in ("visible", "hidden", "couplings", "dtype")}
    rows = [("class", type(model).__name__)]
    for number, machine in enumerate(machines, 1):
        prefix = "" if len(machines) == 1 else f"{number}: "
        rows += [(f"{prefix}visible '{name}'", _in_words(part)) for name, part in machine["visible"].items()]
        rows += [(f"{prefix}hidden", _in_words(machine["hidden"]))]
        rows += [(f"{prefix}coupling '{name}'", _in_words(part)) for name, part in machine["couplings"].items()]
    rows += [("parameters", f"{parameters:,}"), ("dtype", machines[0]["dtype"])]
    show(result, as_json, table([*rows, *((f"file {name}", f"{size:,} bytes") for name, size in files.items())]))


def _in_words(part: dict[str, Any]) -> str:
    """Describe a unit or a coupling: its name, its shape, and its settings that are numbers or switched on."""
    words = [str(part.get("unit") or part["coupling"]), *([times(part["shape"])] if "shape" in part else [])]
    words += [f"{key} {value}" for key, value in part.items() if isinstance(value, int) and value is not False]
    return " ".join(words)


def export(
    model_folder: ModelFolder,
    out: Annotated[Path, argument("OUT", "A .onnx file.")],
    method: Annotated[ExportMethod, typer.Option(help="Method that the file computes.")] = ExportMethod.TRANSFORM,
    force: Force = False,
    as_json: AsJson = False,
) -> None:
    """Write a method of a model as an ONNX file, and compare the file with the model by onnxruntime."""
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
