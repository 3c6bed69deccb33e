"""ONNX files of the methods of fitted estimators: `transform`, `reconstruct`, `predict_proba`.

Each method is exported as a :class:`Graph`, a small torch module with example inputs. The graphs of machines, stacks
and classifiers are built here; any other class can provide its own by a method ``onnx_graph(method)``.
"""

import contextlib
import copy
import json
import logging
import math
import os
import warnings
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar, cast

import numpy as np
import torch
from numpy.typing import NDArray
from sklearn.utils.validation import check_is_fitted
from torch import Tensor, nn

import mvrbm
from mvrbm.errors import ExportError
from mvrbm.estimators.inputs import LABEL, VISIBLE
from mvrbm.extras import require
from mvrbm.io.atomic import check_output, replace_file
from mvrbm.machine import BoltzmannMachine
from mvrbm.random import RandomSource
from mvrbm.validation import choice

__all__ = ["METHODS", "OPSET", "ExportError", "Graph", "compare_onnx", "to_onnx"]

Array = NDArray[Any]
Module = TypeVar("Module", bound=nn.Module)

#: The methods that can be exported, if an estimator has them.
METHODS = ("transform", "reconstruct", "predict_proba")
#: Version of the ONNX operators in the files.
OPSET = 18

_TOLERANCE = 1e-5
_SAMPLES = 5  # of the examples; tracing needs more than one, because it treats the size 1 as constant


@dataclass(frozen=True)
class Graph:
    r"""One method of an estimator, as a module on the CPU, with examples of its inputs (at least two samples each).

    The module takes one float32 tensor (n, \*shape) per input and returns a tensor, or a tuple of tensors, with n along
    the first axis. It may use n only through shapes: `len` would make n constant.
    """

    module: nn.Module
    inputs: dict[str, Tensor]
    outputs: tuple[str, ...]
    metadata: dict[str, str] = field(default_factory=dict)


def to_onnx(estimator: Any, path: str | os.PathLike[str], method: str = "transform", *, check: bool = True) -> Path:
    r"""Write one method of a fitted estimator as an ONNX file.

    The file has float32 inputs of shape (n, \*visible_shape), or (n, n_features) if the estimator was fitted on rows,
    for any n: ``X``, or one per modality under its name. Divide bytes by 255 for Bernoulli units. The outputs are
    ``features``, ``reconstruction`` (``reconstruction_NAME`` for each of several modalities) or ``probabilities``.

    Parameters
    ----------
    estimator : estimator
        A fitted estimator.
    path : path
        The file, which ends in ``.onnx``. An existing file is replaced.
    method : {"transform", "reconstruct", "predict_proba"}
        The method to export.
    check : bool
        Whether to run the file with onnxruntime before it is written, and to compare it with the estimator in double
        precision. If data is in raw units, with values that are large compared with their variation, a float32
        estimator itself can have larger rounding errors; files compute with deviations from the mean.

    Returns
    -------
    Path
        The file.

    Raises
    ------
    ExportError
        If a result differs from that of the estimator by more than 1e-5, relative for results above 1.
    MissingPackageError
        If onnx, onnxscript or onnxruntime is missing.
    """
    path = check_output(path, True, (".onnx",))
    graph = graph_of(estimator, method)
    for package in ("onnx", "onnxscript", *(["onnxruntime"] if check else [])):
        _require(package)
    described = {"mvrbm_version": mvrbm.__version__, "class": type(estimator).__name__, "method": method}
    content = _encode(graph, {**described, **graph.metadata})
    if check:
        samples = {name: tensor.numpy() for name, tensor in graph.inputs.items()}
        one = {name: array[:1] for name, array in samples.items()}
        exact = in_double_precision(estimator)
        # NaN if any difference is
        off = float(np.max([_difference(content, exact, part, method, relative=True) for part in (samples, one)]))
        if not off <= _TOLERANCE:
            raise ExportError(
                f"the ONNX form of {type(estimator).__name__}.{method} is off by {off:.3g}, more than {_TOLERANCE:g}: "
                f"{path} was not written"
            )
    with replace_file(path) as file:
        file.write(content)
    return path


def compare_onnx(path: str | os.PathLike[str], estimator: Any, X: Any, method: str = "transform") -> float:
    """Return the largest absolute difference between the results of an ONNX file and of the fitted estimator.

    `X` is an array, or a mapping from modalities to arrays, as the file takes it. It is converted to float32, for both.
    """
    choice(method, "method", [name for name in METHODS if hasattr(estimator, name)])
    _require("onnxruntime")
    given = X if isinstance(X, Mapping) else {"X": X}
    samples = {name: np.asarray(part, np.float32) for name, part in given.items()}
    return _difference(Path(path).read_bytes(), estimator, samples, method)


def graph_of(estimator: Any, method: str) -> Graph:
    """Return the graph of one method of a fitted estimator."""
    choice(method, f"method of {type(estimator).__name__}", [name for name in METHODS if hasattr(estimator, name)])
    check_is_fitted(estimator)
    if hasattr(estimator, "onnx_graph"):
        return cast(Graph, estimator.onnx_graph(method))
    if method == "predict_proba":
        return _classifier_graph(estimator)
    machines = getattr(estimator, "machines_", None) or [getattr(estimator, "machine_", None)]
    if not all(isinstance(machine, BoltzmannMachine) for machine in machines):
        raise ValueError(f"{type(estimator).__name__} has neither a machine nor a method onnx_graph to export")
    return machine_graph(machines, method, rows=not getattr(estimator, "takes_arrays", True))


# -- machines, and stacks of them --------------------------------------------------------------------


def machine_graph(machines: Sequence[BoltzmannMachine], method: str, *, rows: bool = False) -> Graph:
    """Return the graph of a machine, or of a stack of machines, lowest first.

    `transform` computes the hidden means of the last machine as rows, `reconstruct` the visible means of the first
    after one pass up and down. `rows` is whether samples of the visible layer are rows.
    """
    choice(method, "method of a machine", METHODS[:2])
    inputs = {name: _examples(machines[0], name) for name in machines[0].layers}
    if len(inputs) == 1:
        inputs = {"X": next(iter(inputs.values()))}
    if rows:
        inputs = {name: tensor.flatten(1) for name, tensor in inputs.items()}
    outputs = ["features"]
    if method == "reconstruct":
        outputs = ["reconstruction"] if len(inputs) == 1 else [f"reconstruction_{name}" for name in inputs]
    while set(outputs) & set(inputs):  # a modality may have any name
        outputs = [f"{name}_" for name in outputs]
    return Graph(_MachineModule(machines, method == "reconstruct", rows), inputs, tuple(outputs))


class _MachineModule(nn.Module):
    """Means passed up through machines, and down again."""

    def __init__(self, machines: Sequence[BoltzmannMachine], down: bool, rows: bool) -> None:
        super().__init__()
        self.machines = nn.ModuleList(_centered(machine) for machine in machines)
        self.down = down
        self.rows = rows

    def forward(self, *inputs: Tensor) -> Tensor | tuple[Tensor, ...]:
        first, *others = (cast(BoltzmannMachine, machine) for machine in self.machines)
        pairs = zip(first.layers.items(), inputs, strict=True)
        hidden = _up(first, {name: x.reshape(-1, *unit.shape) if self.rows else x for (name, unit), x in pairs})
        for machine in others:
            hidden = _up(machine, {next(iter(machine.layers)): hidden})
        if not self.down:
            return hidden.flatten(1)
        for below, machine in zip([first, *others][-2::-1], others[::-1], strict=True):
            # The units that stand for the layer below can exceed its bounds.
            means = machine.visible_mean(hidden, check=False)
            hidden = next(iter(means.values())).clamp(*below.hidden.statistic_bounds())
        visible = first.visible_mean(hidden, check=False).values()
        outputs = tuple(mean.flatten(1) if self.rows else mean for mean in visible)
        return outputs if len(outputs) > 1 else outputs[0]


def _up(machine: BoltzmannMachine, layers: Mapping[str, Tensor]) -> Tensor:
    r"""Return hidden means (n, \*hidden shape) of a centered machine, without checks, which would make n constant."""
    return machine.hidden.mean(machine.hidden_field({name: _deviation(machine, name, x) for name, x in layers.items()}))


def _centered(machine: BoltzmannMachine) -> BoltzmannMachine:
    """Return a portable copy that takes deviations from the bias of layers whose zero is arbitrary.

    The field of the bias itself is added to the hidden bias, in double precision. If the data is in raw units, it is
    large and cancels: in float32 it would leave errors of 1e-4 in hidden means.
    """
    copied = _portable(machine)
    exact = copy.deepcopy(machine).to("cpu", torch.float64).requires_grad_(False)
    shifts = []
    for name, unit in exact.layers.items():
        if unit.arbitrary_zero:
            rounded = copied.layers[name].bias.double()  # as the file subtracts it
            shifts.append(exact.links[name].to_hidden(unit.statistic(rounded.expand(1, *unit.shape)))[0])
    if shifts:
        bias = exact.hidden.bias + torch.stack(shifts).sum(0)
        copied.hidden.bias = nn.Parameter(bias.float(), requires_grad=False)
    return copied


def _deviation(machine: BoltzmannMachine, name: str, x: Tensor) -> Tensor:
    unit = machine.layers[name]
    return x - unit.bias if unit.arbitrary_zero else x


def _portable(module: Module) -> Module:
    """Return a copy of a module in float32, on the CPU, without gradients."""
    return copy.deepcopy(module).to("cpu", torch.float32).eval().requires_grad_(False)


def _examples(machine: BoltzmannMachine, name: str) -> Tensor:
    r"""Return the same few valid samples (n, \*shape) of a layer at every call."""
    return _portable(machine.layers[name]).example(_SAMPLES, RandomSource(0))


# -- classifiers ------------------------------------------------------------------------------------


def _classifier_graph(estimator: Any) -> Graph:
    network = getattr(estimator, "network_", None)
    machine: Any = getattr(estimator, "machine_", None) if network is None else network.stack[0]
    if network is None and LABEL not in getattr(machine, "layers", {}):
        raise ValueError(f"{type(estimator).__name__} has neither a network, nor a layer of labels, nor onnx_graph")
    module = _LabelPosterior(machine) if network is None else nn.Sequential(_portable(network), nn.Softmax(1))
    given = _examples(machine, VISIBLE)
    if not estimator.takes_arrays:
        module = nn.Sequential(nn.Unflatten(1, given.shape[1:]), module)
        given = given.flatten(1)
    return Graph(module, {"X": given}, ("probabilities",), {"classes": json.dumps(estimator.classes_.tolist())})


class _LabelPosterior(nn.Module):
    """Exact probabilities of the labels of a machine that has them as a layer, for any n."""

    def __init__(self, machine: BoltzmannMachine) -> None:
        super().__init__()
        self.machine = _centered(machine)
        unit = self.machine.layers[LABEL]
        every = torch.eye(unit.shape[-1])
        self.register_buffer("columns", self.machine.links[LABEL].to_hidden(every))  # (labels, *hidden shape)
        self.register_buffer("own", -unit.energy(every))  # (labels,)

    def forward(self, x: Tensor) -> Tensor:
        unit, link, hidden = self.machine.layers[VISIBLE], self.machine.links[VISIBLE], self.machine.hidden
        columns, own = self.get_buffer("columns"), self.get_buffer("own")
        fields = link.to_hidden(unit.statistic(_deviation(self.machine, VISIBLE, x))).unsqueeze(1) + columns
        return torch.softmax(hidden.log_normalizer(fields.flatten(0, 1)).reshape(-1, len(own)) + own, 1)


# -- writing ----------------------------------------------------------------------------------------


def _encode(graph: Graph, metadata: Mapping[str, str]) -> bytes:
    """Return the bytes of the file, which are the same for the same model."""
    onnx = _require("onnx")
    ins = [f"in_{number}" for number in range(len(graph.inputs))]
    outs = [f"out_{number}" for number in range(len(graph.outputs))]
    tensors, batch = tuple(graph.inputs.values()), torch.export.Dim("n")
    shapes: Any = torch.export.ShapesCollection()
    for tensor in tensors:
        shapes[tensor] = {0: batch}
    try:
        with _quiet():
            # Decompositions replace einsum, and functions that ONNX lacks, by operators that all runtimes have.
            traced = torch.export.export(graph.module.eval(), tensors, dynamic_shapes=shapes)
            program = torch.onnx.export(
                traced.run_decompositions(),
                dynamo=True,
                input_names=ins,
                output_names=outs,
                opset_version=OPSET,
                verbose=False,
            )
    except Exception as error:  # of many kinds, which PyTorch does not document
        fixed = "specialized" in str(error)
        reason = "the number of samples must not be constant" if fixed else str(error).partition("\n")[0]
        raise ExportError(f"PyTorch cannot write this as ONNX: {reason}") from error
    assert program is not None
    model = program.model_proto
    _tidy(model, dict(zip([*ins, *outs], [*graph.inputs, *graph.outputs], strict=True)))
    model.producer_name, model.producer_version = "mvrbm", mvrbm.__version__
    for value in (*model.graph.input, *model.graph.output):
        samples = value.type.tensor_type.shape.dim[0]
        if not samples.dim_param:
            raise ExportError(f"'{value.name}' has a fixed number of samples: the module must not use len(x)")
        samples.dim_param = "n"
    onnx.helper.set_model_props(model, dict(metadata))
    onnx.checker.check_model(model, full_check=True)
    return cast(bytes, model.SerializeToString(deterministic=True))


def _tidy(model: Any, names: Mapping[str, str]) -> None:
    """Name inputs and outputs, and remove the paths of source files that PyTorch adds."""

    def renamed(name: str) -> str:
        return names.get(name, f"mvrbm/{name}") if name else ""

    graph = model.graph
    graph.name = "mvrbm"
    del graph.metadata_props[:], graph.value_info[:]
    for number, node in enumerate(graph.node):
        node.name = f"{number}/{node.op_type}"
        node.doc_string = ""
        del node.metadata_props[:]
        node.input[:], node.output[:] = map(renamed, node.input), map(renamed, node.output)
    for value in (*graph.input, *graph.output, *graph.initializer):
        value.name = renamed(value.name)
        value.doc_string = ""
        del value.metadata_props[:]


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Suppress warnings of PyTorch's exporter that users cannot act on."""
    logger = logging.getLogger("torch.onnx")
    former = logger.level
    logger.setLevel(logging.ERROR)
    try:
        with warnings.catch_warnings(action="ignore"):
            yield
    finally:
        logger.setLevel(former)


# -- comparing --------------------------------------------------------------------------------------


def _difference(
    content: bytes, estimator: Any, samples: Mapping[str, Array], method: str, *, relative: bool = False
) -> float:
    """Return the largest difference from the estimator's result; if relative, divided by results above 1."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="X does not have valid feature names")
        result = getattr(estimator, method)(samples["X"] if set(samples) == {"X"} else dict(samples))
    wanted = list(result.values()) if isinstance(result, Mapping) else [result]
    onnxruntime = _require("onnxruntime")
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = 1
    session = onnxruntime.InferenceSession(content, options, providers=["CPUExecutionProvider"])
    off = 0.0
    for theirs, ours in zip(session.run(None, dict(samples)), map(np.asarray, wanted), strict=True):
        if theirs.shape != ours.shape:
            raise ExportError(f"the ONNX form of {method} gives shape {theirs.shape}, the estimator {ours.shape}")
        scale = np.maximum(1, np.abs(ours)) if relative else 1
        off = max(off, float((np.abs(theirs - ours) / scale).max(initial=0)))
        if np.isnan(theirs).any():
            return math.nan
    return off


def in_double_precision(estimator: Any) -> Any:
    """Return a copy of a fitted estimator with its modules in double precision; all else is shared."""

    def double(value: Any) -> Any:
        if isinstance(value, nn.Module):
            return copy.deepcopy(value).double()
        return [double(part) for part in value] if isinstance(value, list) else value

    exact = copy.copy(estimator)
    exact.__dict__.update({name: double(value) for name, value in vars(estimator).items() if name.endswith("_")})
    return exact


def _require(package: str) -> Any:
    return require(package, "ONNX export", "onnx")
