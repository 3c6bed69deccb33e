"""Export the methods `transform`, `reconstruct` and `predict_proba` of fitted estimators to ONNX.

Each exported method becomes a :class:`Graph`, which consists of a PyTorch module and example inputs. This module builds
graphs for machines, stacks of machines and classifiers. Any other estimator can define a method ``onnx_graph(method)``
that returns a graph.
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

#: Estimator methods that can be exported.
METHODS = ("transform", "reconstruct", "predict_proba")
#: Version of the ONNX operator set used in exported files.
OPSET = 18

# Methods that can be exported for a machine without a label layer.
_MACHINE_METHODS = ("transform", "reconstruct")
# Maximum difference between the results of the exported model and the estimator, relative for results above 1.
_TOLERANCE = 1e-5
# Number of example inputs. It must be larger than 1, because tracing treats an axis of size 1 as constant.
_N_EXAMPLES = 5


@dataclass(frozen=True)
class Graph:
    r"""One method of an estimator as a PyTorch module on the CPU, with example inputs.

    The module takes one float32 tensor of shape (n, \*shape) per input. It returns a tensor or a tuple of tensors whose
    first axis has n entries. It must not call `len` on a tensor, because tracing would make n constant. Each example
    input must contain at least two samples.
    """

    module: nn.Module
    inputs: dict[str, Tensor]
    outputs: tuple[str, ...]
    metadata: dict[str, str] = field(default_factory=dict)


def to_onnx(estimator: Any, path: str | os.PathLike[str], method: str = "transform", *, check: bool = True) -> Path:
    r"""Export one method of a fitted estimator to an ONNX file.

    The exported model has one input named ``X``, or one input per modality, named after the modality. Inputs are
    float32 and have shape (n, \*visible_shape), or (n, n_features) if the estimator was fitted on flattened samples.
    The number of samples n can vary. For Bernoulli units, divide uint8 values by 255. The output is ``features``,
    ``reconstruction`` or ``probabilities``. With several modalities, there is one output ``reconstruction_NAME`` per
    modality.

    Parameters
    ----------
    estimator : estimator
        A fitted estimator.
    path : path
        File to write. Its name must end in ``.onnx``. An existing file is replaced.
    method : {"transform", "reconstruct", "predict_proba"}
        The method to export.
    check : bool
        Whether to run the exported model with onnxruntime before writing the file, and to compare its results with
        those of the estimator in double precision. If the mean of the data is large compared with its variation, a
        float32 estimator can have larger rounding errors than the exported model, which subtracts the visible bias
        first.

    Returns
    -------
    Path
        Path of the file.

    Raises
    ------
    ExportError
        If the results of the exported model and the estimator differ by more than 1e-5. For results above 1, the
        difference is relative.
    MissingPackageError
        If onnx, onnxscript or onnxruntime is not installed.
    """
    path = check_output(path, True, (".onnx",))
    graph = graph_of(estimator, method)
    packages = ["onnx", "onnxscript"]
    if check:
        packages.append("onnxruntime")
    for package in packages:
        _require(package)
    described = {"mvrbm_version": mvrbm.__version__, "class": type(estimator).__name__, "method": method}
    content = _encode(graph, {**described, **graph.metadata})
    if check:
        difference = _difference_on_examples(content, graph, estimator, method)
        if not difference <= _TOLERANCE:
            raise ExportError(
                f"the ONNX model of {type(estimator).__name__}.{method} differs from the estimator by "
                f"{difference:.3g}, more than {_TOLERANCE:g}; {path} was not written"
            )
    with replace_file(path) as file:
        file.write(content)
    return path


def compare_onnx(path: str | os.PathLike[str], estimator: Any, X: Any, method: str = "transform") -> float:
    """Return the largest absolute difference between the results of an ONNX model and a fitted estimator.

    Parameters
    ----------
    path : path
        ONNX file.
    estimator : estimator
        The fitted estimator.
    X : array or mapping from modalities to arrays
        Input data for both the ONNX model and the estimator. The data is converted to float32.
    method : {"transform", "reconstruct", "predict_proba"}
        The exported method.

    Returns
    -------
    float
        The largest difference, or NaN if the ONNX model returns NaN.
    """
    choice(method, "method", [name for name in METHODS if hasattr(estimator, name)])
    _require("onnxruntime")
    given = X if isinstance(X, Mapping) else {"X": X}
    samples = {name: np.asarray(part, np.float32) for name, part in given.items()}
    return _difference(Path(path).read_bytes(), estimator, samples, method)


def graph_of(estimator: Any, method: str) -> Graph:
    """Return the graph for one method of a fitted estimator."""
    choice(method, f"method of {type(estimator).__name__}", [name for name in METHODS if hasattr(estimator, name)])
    check_is_fitted(estimator)
    if hasattr(estimator, "onnx_graph"):
        return cast(Graph, estimator.onnx_graph(method))
    if method == "predict_proba":
        return _classifier_graph(estimator)
    machines = getattr(estimator, "machines_", None) or [getattr(estimator, "machine_", None)]
    if not all(isinstance(machine, BoltzmannMachine) for machine in machines):
        raise ValueError(f"{type(estimator).__name__} has neither a machine nor an onnx_graph method")
    return machine_graph(machines, method, rows=not getattr(estimator, "takes_arrays", True))


# -- machines and stacks of machines ----------------------------------------------------------------


def machine_graph(machines: Sequence[BoltzmannMachine], method: str, *, rows: bool = False) -> Graph:
    """Return the graph for a machine, or for a stack of machines ordered from bottom to top.

    `transform` computes the hidden means of the top machine, flattened to one row per sample. `reconstruct` computes
    the visible means of the bottom machine after one pass up and down. `rows` specifies whether the inputs are
    flattened to one row per sample.
    """
    choice(method, "method of a machine", _MACHINE_METHODS)
    inputs = {name: _examples(machines[0], name) for name in machines[0].layers}
    if len(inputs) == 1:
        inputs = {"X": next(iter(inputs.values()))}
    if rows:
        inputs = {name: tensor.flatten(1) for name, tensor in inputs.items()}
    outputs = ["features"]
    if method == "reconstruct":
        outputs = ["reconstruction"] if len(inputs) == 1 else [f"reconstruction_{name}" for name in inputs]
    while set(outputs) & set(inputs):  # a modality may have the same name as an output
        outputs = [f"{name}_" for name in outputs]
    return Graph(_MachineModule(machines, method == "reconstruct", rows), inputs, tuple(outputs))


class _MachineModule(nn.Module):
    """Module that passes means up through a stack of machines, and back down if `down` is True."""

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
            # The visible means of a machine can exceed the bounds of the hidden units below it.
            means = machine.visible_mean(hidden, check=False)
            hidden = next(iter(means.values())).clamp(*below.hidden.statistic_bounds)
        visible = first.visible_mean(hidden, check=False).values()
        outputs = tuple(mean.flatten(1) if self.rows else mean for mean in visible)
        return outputs if len(outputs) > 1 else outputs[0]


def _up(machine: BoltzmannMachine, layers: Mapping[str, Tensor]) -> Tensor:
    r"""Return the hidden means of a centered machine.

    The result has shape (n, \*hidden shape). The inputs are not validated, because validation would make n constant.
    """
    deviations = {name: _deviation(machine, name, x) for name, x in layers.items()}
    return machine.hidden.mean(machine.hidden_field(deviations))


def _centered(machine: BoltzmannMachine) -> BoltzmannMachine:
    """Return a float32 copy of a machine on the CPU that takes deviations from the visible bias as inputs.

    Only layers whose zero point is arbitrary (`Unit.arbitrary_zero`) are centered. The field due to their visible bias
    is added to the hidden bias in double precision. For data far from zero, this field is large and mostly cancels. In
    float32, the cancellation would cause errors of 1e-4 in the hidden means.
    """
    copied = _portable(machine)
    exact = copy.deepcopy(machine).to("cpu", torch.float64).requires_grad_(False)
    shifts = []
    for name, unit in exact.layers.items():
        if unit.arbitrary_zero:
            rounded = copied.layers[name].bias.double()  # the float32 bias, which the exported model subtracts
            shifts.append(exact.links[name].to_hidden(unit.statistic(rounded.expand(1, *unit.shape)))[0])
    if shifts:
        bias = exact.hidden.bias + torch.stack(shifts).sum(0)
        copied.hidden.bias = nn.Parameter(bias.float(), requires_grad=False)
    return copied


def _deviation(machine: BoltzmannMachine, name: str, x: Tensor) -> Tensor:
    unit = machine.layers[name]
    return x - unit.bias if unit.arbitrary_zero else x


def _portable(module: Module) -> Module:
    """Return a float32 copy of a module on the CPU, with gradients disabled."""
    return copy.deepcopy(module).to("cpu", torch.float32).eval().requires_grad_(False)


def _examples(machine: BoltzmannMachine, name: str) -> Tensor:
    r"""Return valid example data of shape (n, \*shape) for a layer. Every call returns the same data."""
    return _portable(machine.layers[name]).example(_N_EXAMPLES, RandomSource(0))


# -- classifiers ------------------------------------------------------------------------------------


def _classifier_graph(estimator: Any) -> Graph:
    network = getattr(estimator, "network_", None)
    machine: Any = getattr(estimator, "machine_", None) if network is None else network.stack[0]
    if network is None and LABEL not in getattr(machine, "layers", {}):
        raise ValueError(
            f"{type(estimator).__name__} cannot be exported because it has no network, label layer or onnx_graph method"
        )
    module = _LabelPosterior(machine) if network is None else nn.Sequential(_portable(network), nn.Softmax(1))
    examples = _examples(machine, VISIBLE)
    if not estimator.takes_arrays:
        module = nn.Sequential(nn.Unflatten(1, examples.shape[1:]), module)
        examples = examples.flatten(1)
    classes = json.dumps(estimator.classes_.tolist())
    return Graph(module, {"X": examples}, ("probabilities",), {"classes": classes})


class _LabelPosterior(nn.Module):
    """Module that computes exact label probabilities for a machine with a label layer."""

    def __init__(self, machine: BoltzmannMachine) -> None:
        super().__init__()
        self.machine = _centered(machine)
        unit = self.machine.layers[LABEL]
        labels = torch.eye(unit.shape[-1])  # all labels, one-hot
        self.register_buffer("label_fields", self.machine.links[LABEL].to_hidden(labels))  # (labels, *hidden shape)
        self.register_buffer("label_logits", -unit.energy(labels))  # (labels,)

    def forward(self, x: Tensor) -> Tensor:
        unit = self.machine.layers[VISIBLE]
        field = self.machine.links[VISIBLE].to_hidden(unit.statistic(_deviation(self.machine, VISIBLE, x)))
        fields = field.unsqueeze(1) + self.get_buffer("label_fields")  # (n, labels, *hidden shape)
        label_logits = self.get_buffer("label_logits")
        normalizers = self.machine.hidden.log_normalizer(fields.flatten(0, 1)).reshape(-1, len(label_logits))
        return torch.softmax(normalizers + label_logits, 1)


# -- writing ----------------------------------------------------------------------------------------


def _encode(graph: Graph, metadata: Mapping[str, str]) -> bytes:
    """Return the contents of the ONNX file for a graph. The encoding is deterministic."""
    onnx = _require("onnx")
    # PyTorch only accepts identifiers as input and output names, but a modality may have any name.
    inputs = [f"in_{number}" for number in range(len(graph.inputs))]
    outputs = [f"out_{number}" for number in range(len(graph.outputs))]
    model = _trace(graph, inputs, outputs)
    _tidy(model, dict(zip([*inputs, *outputs], [*graph.inputs, *graph.outputs], strict=True)))
    model.producer_name = "mvrbm"
    model.producer_version = mvrbm.__version__
    for value in (*model.graph.input, *model.graph.output):
        axis = value.type.tensor_type.shape.dim[0]
        if not axis.dim_param:
            raise ExportError(f"'{value.name}' has a fixed number of samples; the module must not call len on a tensor")
        axis.dim_param = "n"
    onnx.helper.set_model_props(model, dict(metadata))
    onnx.checker.check_model(model, full_check=True)
    return cast(bytes, model.SerializeToString(deterministic=True))


def _trace(graph: Graph, input_names: list[str], output_names: list[str]) -> Any:
    """Trace the graph's module with a dynamic number of samples and return the ONNX model."""
    examples = tuple(graph.inputs.values())
    n = torch.export.Dim("n")
    shapes: Any = torch.export.ShapesCollection()
    for example in examples:
        shapes[example] = {0: n}
    try:
        with _quiet():
            traced = torch.export.export(graph.module.eval(), examples, dynamic_shapes=shapes)
            program = torch.onnx.export(
                # Decompose einsum, and functions that ONNX lacks, into operators that all runtimes support.
                traced.run_decompositions(),
                dynamo=True,
                input_names=input_names,
                output_names=output_names,
                opset_version=OPSET,
                verbose=False,
            )
    except Exception as error:  # PyTorch does not document which errors it raises
        if "specialized" in str(error):
            reason = "the number of samples must not be constant"
        else:
            reason = str(error).partition("\n")[0]
        raise ExportError(f"PyTorch cannot export this model to ONNX: {reason}") from error
    assert program is not None
    return program.model_proto


def _tidy(model: Any, names: Mapping[str, str]) -> None:
    """Rename inputs and outputs, and remove the source file paths that PyTorch adds."""

    def renamed(name: str) -> str:
        return names.get(name, f"mvrbm/{name}") if name else ""

    graph = model.graph
    graph.name = "mvrbm"
    del graph.metadata_props[:], graph.value_info[:]
    for number, node in enumerate(graph.node):
        node.name = f"{number}/{node.op_type}"
        node.doc_string = ""
        del node.metadata_props[:]
        node.input[:] = map(renamed, node.input)
        node.output[:] = map(renamed, node.output)
    for value in (*graph.input, *graph.output, *graph.initializer):
        value.name = renamed(value.name)
        value.doc_string = ""
        del value.metadata_props[:]


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Context manager that suppresses warnings from PyTorch's exporter that users cannot act on."""
    logger = logging.getLogger("torch.onnx")
    level = logger.level
    logger.setLevel(logging.ERROR)
    try:
        with warnings.catch_warnings(action="ignore"):
            yield
    finally:
        logger.setLevel(level)


# -- comparing --------------------------------------------------------------------------------------


def _difference_on_examples(content: bytes, graph: Graph, estimator: Any, method: str) -> float:
    """Return the largest difference between an ONNX model and the estimator on example inputs.

    The results are compared for a batch of all example inputs and for a batch with a single example. For results above
    1, the difference is relative.
    """
    examples = {name: tensor.numpy() for name, tensor in graph.inputs.items()}
    single = {name: array[:1] for name, array in examples.items()}
    exact = in_double_precision(estimator)
    differences = [_difference(content, exact, samples, method, relative=True) for samples in (examples, single)]
    return float(np.max(differences))  # unlike max, this propagates NaN


def _difference(
    content: bytes, estimator: Any, samples: Mapping[str, Array], method: str, *, relative: bool = False
) -> float:
    """Return the largest difference between an ONNX model and the estimator, or NaN if the ONNX model returns NaN.

    If `relative` is True, the difference is relative for results above 1.
    """
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="X does not have valid feature names")
        result = getattr(estimator, method)(samples["X"] if set(samples) == {"X"} else dict(samples))
    expected = [np.asarray(part) for part in (result.values() if isinstance(result, Mapping) else [result])]
    largest = 0.0
    for found, wanted in zip(_run(content, samples), expected, strict=True):
        if found.shape != wanted.shape:
            raise ExportError(f"{method} returns shape {found.shape} in ONNX, but {wanted.shape} in the estimator")
        if np.isnan(found).any():
            return math.nan
        scale = np.maximum(1, np.abs(wanted)) if relative else 1
        largest = max(largest, float((np.abs(found - wanted) / scale).max(initial=0)))
    return largest


def _run(content: bytes, samples: Mapping[str, Array]) -> list[Array]:
    """Run an ONNX model with onnxruntime and return its outputs."""
    onnxruntime = _require("onnxruntime")
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = 1
    session = onnxruntime.InferenceSession(content, options, providers=["CPUExecutionProvider"])
    return cast("list[Array]", session.run(None, dict(samples)))


def in_double_precision(estimator: Any) -> Any:
    """Return a shallow copy of a fitted estimator with its modules converted to double precision."""

    def double(value: Any) -> Any:
        if isinstance(value, nn.Module):
            return copy.deepcopy(value).double()
        return [double(part) for part in value] if isinstance(value, list) else value

    exact = copy.copy(estimator)
    exact.__dict__.update({name: double(value) for name, value in vars(estimator).items() if name.endswith("_")})
    return exact


def _require(package: str) -> Any:
    return require(package, "ONNX export", "onnx")
