"""ONNX files of what a fitted estimator computes: `transform`, `reconstruct`, `predict_proba`.

An estimator offers each method as a :class:`Graph`, a small torch module with a few samples; the rest is the same
for all. Those of our own estimators are made here; any other class offers its own by ``_onnx_graph(method)``.
Nothing here trains.
"""

from __future__ import annotations

import contextlib
import copy
import importlib
import importlib.util
import json
import logging
import math
import os
import re
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
from torch.overrides import TorchFunctionMode

import mvrbm
from mvrbm.errors import ExportError
from mvrbm.estimators.rbm import _SINGLE
from mvrbm.io.arrays import _replace, check_output
from mvrbm.machine import BoltzmannMachine
from mvrbm.units import Unit

__all__ = ["METHODS", "OPSET", "ExportError", "Graph", "compare_onnx", "to_onnx"]

Array = NDArray[Any]
Module = TypeVar("Module", bound=nn.Module)

#: What can be exported, where an estimator has it.
METHODS = ("transform", "reconstruct", "predict_proba")
#: Version of the ONNX operators that files use.
OPSET = 18

_TOLERANCE = 1e-5
_SAMPLES = 5  # of the check; tracing wants more than one, for 1 is a size of its own to it
_CONTRACTION = re.compile("n[^n,]*,[^n,]*->n[^n,]*")
_PACKAGES = ("onnx", "onnxscript", "onnxruntime")


@dataclass(frozen=True)
class Graph:
    r"""One method of an estimator, as a module.

    Parameters
    ----------
    module : nn.Module
        Takes a float32 tensor (n, \*shape) an input, in their order, and returns a tensor, or a tuple of
        tensors, with n along the first axis. It is on the CPU and must not depend on n but through shapes:
        `len` would fix it.
    inputs : dict of str to Tensor
        A few samples an input, two at least, such as the estimator takes.
    outputs : tuple of str
        Names of what comes out.
    metadata : dict of str to str
        What else the file is to say.
    """

    module: nn.Module
    inputs: dict[str, Tensor]
    outputs: tuple[str, ...]
    metadata: dict[str, str] = field(default_factory=dict)


# -- the face ---------------------------------------------------------------------------------------


def to_onnx(estimator: Any, path: str | os.PathLike[str], method: str = "transform", *, check: bool = True) -> Path:
    r"""Write one method of a fitted estimator as an ONNX file.

    The file has float32 inputs of shape (n, \*visible_shape), or (n, n_features) if the estimator was fitted on
    rows, for any n: ``X``, or one by the name of each modality. Bytes are to be divided by 255 for Bernoulli
    units first. Outputs are ``features``, ``reconstruction`` (``reconstruction_NAME`` a modality) or
    ``probabilities``.

    Parameters
    ----------
    estimator : estimator
        A fitted one.
    path : path
        The file, ending in ``.onnx``. It is replaced if it is there.
    method : {"transform", "reconstruct", "predict_proba"}
        What to export.
    check : bool
        Whether to run the file with onnxruntime, and to compare with the estimator in double precision, before it
        gets its name. Of a float32 estimator of data in raw units, large numbers that vary little, the rounding may
        be larger than that: it is the estimator's own, files work on deviations from the mean.

    Returns
    -------
    Path
        The file.

    Raises
    ------
    ExportError
        If the result differs from the estimator's by more than 1e-5, relative where it is above 1.
    ImportError
        If onnx, onnxscript or onnxruntime is missing.
    """
    path = check_output(path, True, (".onnx",))
    graph = graph_of(estimator, method)
    _require(_PACKAGES if check else _PACKAGES[:2])
    described = {"mvrbm_version": mvrbm.__version__, "class": type(estimator).__name__, "method": method}
    content = _encode(graph, {**described, **graph.metadata})
    if check:
        samples = {name: tensor.numpy() for name, tensor in graph.inputs.items()}
        one = {name: array[:1] for name, array in samples.items()}
        exact = in_double_precision(estimator)
        offs = [_difference(content, exact, part, method, relative=True) for part in (samples, one)]
        off = float(np.max(offs))  # NaN if any is
        if not off <= _TOLERANCE:
            raise ExportError(
                f"the ONNX form of {type(estimator).__name__}.{method} is off by {off:.3g}, more than {_TOLERANCE:g}: "
                f"{path} was not written"
            )
    _replace(path, lambda file: file.write(content))
    return path


def compare_onnx(path: str | os.PathLike[str], estimator: Any, X: Any, method: str = "transform") -> float:
    """Return the largest absolute difference between an ONNX file's result and the estimator's.

    Parameters
    ----------
    path : path
        A file that `to_onnx` wrote.
    estimator : estimator
        The fitted estimator.
    X : array, or mapping of str to array
        Data in the form in which the file takes it. It is made float32, for both.
    method : str
        The estimator's method to compare with.
    """
    _check_method(estimator, method)
    _require(("onnxruntime",))
    given = X if isinstance(X, Mapping) else {"X": X}
    samples = {name: np.asarray(part, np.float32) for name, part in given.items()}
    return _difference(Path(path).read_bytes(), estimator, samples, method)


def graph_of(estimator: Any, method: str) -> Graph:
    """Return the module, inputs and outputs of one method of a fitted estimator."""
    _check_method(estimator, method)
    check_is_fitted(estimator)
    if hasattr(estimator, "_onnx_graph"):
        graph: Graph = estimator._onnx_graph(method)
        return graph
    if method == "predict_proba":
        return _classifier_graph(estimator)
    machines = getattr(estimator, "machines_", None) or [getattr(estimator, "machine_", None)]
    if not all(isinstance(machine, BoltzmannMachine) for machine in machines):
        raise ValueError(f"{type(estimator).__name__} has no machine, and no _onnx_graph, that could be exported")
    return machine_graph(machines, method, rows=not getattr(estimator, "_as_arrays", True))


def _check_method(estimator: Any, method: str) -> None:
    offered = [name for name in METHODS if hasattr(estimator, name)]
    if method not in offered:
        raise ValueError(f"method must be one of {offered} for {type(estimator).__name__}, got {method!r}")


# -- machines, and stacks of them --------------------------------------------------------------------


def machine_graph(machines: Sequence[BoltzmannMachine], method: str, *, rows: bool = False) -> Graph:
    """Return `transform` or `reconstruct` of a machine, or of a stack of them.

    Parameters
    ----------
    machines : sequence of BoltzmannMachine
        One, or a stack, lowest first. They are copied.
    method : {"transform", "reconstruct"}
        Hidden means of the last as rows, or visible means of the first after one pass up and down.
    rows : bool
        Whether the one visible layer is given, and returned, as rows.
    """
    if method not in METHODS[:2]:
        raise ValueError(f"method of a machine must be one of {list(METHODS[:2])}, got {method!r}")
    inputs = {name: samples_of(unit) for name, unit in machines[0].layers.items()}
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
        self.machines = nn.ModuleList(centred(machine) for machine in machines)
        self.down = down
        self.rows = rows

    def forward(self, *inputs: Tensor) -> Tensor | tuple[Tensor, ...]:
        first, *others = (cast(BoltzmannMachine, machine) for machine in self.machines)
        pairs = zip(first.layers.items(), inputs, strict=True)
        layers = {name: x.reshape(-1, *unit.shape) if self.rows else x for (name, unit), x in pairs}
        hidden = up(first, layers)
        for machine in others:
            hidden = up(machine, {next(iter(machine.layers)): hidden})
        if not self.down:
            return hidden.flatten(1)
        for below, machine in zip([first, *others][-2::-1], others[::-1], strict=True):
            # Units that stand for the layer below may go beyond its bounds.
            hidden = down(machine, hidden)[0].clamp(*below.hidden.statistic_bounds())
        means = [mean.flatten(1) if self.rows else mean for mean in down(first, hidden)]
        return tuple(means) if len(means) > 1 else means[0]


def up(machine: BoltzmannMachine, layers: Mapping[str, Tensor]) -> Tensor:
    r"""Return hidden means (n, \*hidden shape) of a `centred` machine, without the checks, which would fix n."""
    return machine.hidden.mean(machine.hidden_field({name: _deviation(machine, name, x) for name, x in layers.items()}))


def centred(machine: BoltzmannMachine) -> BoltzmannMachine:
    """Return a `portable` copy whose hidden field is to be taken of deviations from the bias where zero is arbitrary.

    What the bias adds to the field goes into the hidden bias, in double precision. In raw units, thousands plus or
    minus some, it is large and cancels: float32 would leave an error of 1e-4 in hidden means.
    """
    copied = portable(machine)
    exact = copy.deepcopy(machine).to("cpu", torch.float64).requires_grad_(False)
    shifts = []
    for name, unit in exact.layers.items():
        if unit.arbitrary_zero:
            taken = copied.layers[name].bias.double()  # as rounded as what files take away
            shifts.append(exact.links[name].to_hidden(unit.statistic(taken.expand(1, *unit.shape)))[0])
    if shifts:
        bias = exact.hidden.bias + torch.stack(shifts).sum(0)
        copied.hidden.bias = nn.Parameter(bias.float(), requires_grad=False)
    return copied


def _deviation(machine: BoltzmannMachine, name: str, x: Tensor) -> Tensor:
    unit = machine.layers[name]
    return x - unit.bias if unit.arbitrary_zero else x


def down(machine: BoltzmannMachine, hidden: Tensor) -> list[Tensor]:
    r"""Return visible means, each (n, \*layer shape), in the order of the layers."""
    fields = machine.visible_fields(hidden)
    return [unit.mean(fields[name]) for name, unit in machine.layers.items()]


# -- classifiers ------------------------------------------------------------------------------------


def _classifier_graph(estimator: Any) -> Graph:
    from mvrbm.estimators.classifiers import _LABEL, ClassificationMVRBM, _FineTuned

    front = estimator._front if isinstance(estimator, (ClassificationMVRBM, _FineTuned)) else None
    if front is None:
        raise ValueError(f"{type(estimator).__name__} is none of our classifiers, and has no _onnx_graph")
    if isinstance(estimator, _FineTuned):
        unit = estimator.network_.stack[0].layers[_SINGLE]
        inner: nn.Module = _Softmax(estimator.network_)
    else:
        unit = estimator.machine_.layers[_SINGLE]
        inner = _LabelPosterior(estimator.machine_, _LABEL)
    given = samples_of(unit)
    module = inner if front._as_arrays else nn.Sequential(nn.Unflatten(1, unit.shape), inner)
    classes = json.dumps(estimator.classes_.tolist())
    inputs = {"X": given if front._as_arrays else given.flatten(1)}
    return Graph(module, inputs, ("probabilities",), {"classes": classes})


class _Softmax(nn.Module):
    """Probabilities from a network that gives logits."""

    def __init__(self, network: nn.Module) -> None:
        super().__init__()
        self.network = portable(network)

    def forward(self, x: Tensor) -> Tensor:
        return torch.softmax(self.network(x), 1)


class _LabelPosterior(nn.Module):
    """Exact probabilities of the labels of a machine that has them as a layer; `label_log_posterior` for any n."""

    def __init__(self, machine: BoltzmannMachine, label: str) -> None:
        super().__init__()
        self.machine = centred(machine)
        self.name = next(name for name in machine.layers if name != label)
        unit = self.machine.layers[label]
        every = torch.eye(unit.shape[-1])
        self.register_buffer("columns", self.machine.links[label].to_hidden(every))  # (labels, *hidden shape)
        self.register_buffer("own", -unit.energy(every))  # (labels,)

    def forward(self, x: Tensor) -> Tensor:
        unit, link, hidden = self.machine.layers[self.name], self.machine.links[self.name], self.machine.hidden
        columns, own = self.get_buffer("columns"), self.get_buffer("own")
        fields = link.to_hidden(unit.statistic(_deviation(self.machine, self.name, x))).unsqueeze(1) + columns
        sites = hidden.site_log_normaliser(fields.flatten(0, 1))
        return torch.softmax(sites.flatten(1).sum(1).reshape(-1, len(own)) + own, 1)


# -- parts ------------------------------------------------------------------------------------------


def portable(module: Module) -> Module:
    """Return a copy of a module as files have it: float32, on the CPU, not learning."""
    return copy.deepcopy(module).to("cpu", torch.float32).eval().requires_grad_(False)


def samples_of(unit: Unit, n: int = _SAMPLES) -> Tensor:
    r"""Draw samples (n, \*shape) such as a layer has: uniform, one-hot, or normal about its bias. Always the same."""
    draw = np.random.default_rng(0)
    if unit.gaussian:
        rng = torch.from_numpy(draw.standard_normal((n, *unit.shape)))
        return unit.mean(rng.to(unit.bias)).detach().cpu().float()
    if unit.entry_modes:
        rows = draw.integers(unit.shape[-1], size=(n, *unit.site_shape))
        return torch.nn.functional.one_hot(torch.from_numpy(rows), unit.shape[-1]).float()
    return torch.from_numpy(draw.random((n, *unit.shape), np.float32))


# -- writing ----------------------------------------------------------------------------------------


def _encode(graph: Graph, metadata: Mapping[str, str]) -> bytes:
    """Return the bytes of the file, the same for the same model."""
    onnx = importlib.import_module("onnx")
    ins = [f"in_{number}" for number in range(len(graph.inputs))]
    outs = [f"out_{number}" for number in range(len(graph.outputs))]
    tensors = tuple(graph.inputs.values())
    batch = torch.export.Dim("n")
    try:
        with _quiet():
            program = torch.onnx.export(
                _Plain(graph.module).eval(),
                tensors,
                dynamo=True,
                input_names=ins,
                output_names=outs,
                dynamic_shapes={"inputs": tuple({0: batch} for _ in tensors)},
                opset_version=OPSET,
                verbose=False,
            )
    except torch.onnx.OnnxExporterError as error:
        raise ExportError(f"PyTorch cannot write this as ONNX: {error.__cause__ or error}") from error
    assert program is not None
    model = program.model_proto
    _tidy(model, dict(zip([*ins, *outs], [*graph.inputs, *graph.outputs], strict=True)))
    model.producer_name, model.producer_version = "mvrbm", mvrbm.__version__
    for value in (*model.graph.input, *model.graph.output):
        if not value.type.tensor_type.shape.dim[0].dim_param:  # torch says nothing when it fixes a size
            raise ExportError(f"'{value.name}' has a fixed number of samples: the module must not ask for len(x)")
    onnx.helper.set_model_props(model, dict(metadata))
    onnx.checker.check_model(model, full_check=True)
    content: bytes = model.SerializeToString(deterministic=True)
    return content


def _tidy(model: Any, names: Mapping[str, str]) -> None:
    """Name inputs and outputs, and drop what torch notes of this machine's files."""

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


class _Plain(nn.Module):
    """A module in operators that every runtime has and is quick at: contractions with a factor are matrix products."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, *inputs: Tensor) -> Any:
        with _PlainOperators():
            return self.inner(*inputs)


class _PlainOperators(TorchFunctionMode):
    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.einsum and _CONTRACTION.fullmatch(args[0]):
            return contract(*args)
        if func is torch.special.ndtr:  # for which ONNX has no operator
            return 0.5 + 0.5 * torch.erf(math.sqrt(0.5) * args[0])
        return func(*args, **(kwargs or {}))


def contract(equation: str, state: Tensor, factor: Tensor) -> Tensor:
    """Compute an einsum of a state, whose first letter is the batch's, n, and a factor, without fixing n.

    Parameters
    ----------
    equation : str
        Such as ``"nrAi,rki->nrAk"``. What is summed over is in the factor.
    state : Tensor (n, ...)
    factor : Tensor
        It has no n.
    """
    operands, out = equation.split("->")
    ours, theirs = operands.split(",")
    for letter in ours[1:]:  # a bond of size 1 meets every one
        here = ours.index(letter)
        if letter in theirs and state.shape[here] == 1 and factor.shape[theirs.index(letter)] != 1:
            state, ours = state.squeeze(here), ours.replace(letter, "")
    for letter in theirs:
        if letter not in ours + out:
            factor, theirs = factor.sum(theirs.index(letter)), theirs.replace(letter, "")
    sizes = dict(zip(theirs, factor.shape, strict=True)) | dict(zip(ours[1:], state.shape[1:], strict=True))
    shared = "".join(letter for letter in ours[1:] if letter in theirs and letter in out)
    summed = "".join(letter for letter in ours[1:] if letter not in out)
    kept = "".join(letter for letter in ours[1:] if letter in out and letter not in theirs)
    new = "".join(letter for letter in theirs if letter not in ours)

    def size(letters: str) -> int:
        return math.prod(sizes[letter] for letter in letters)

    def arranged(letters: str, tensor: Tensor, wanted: str) -> Tensor:
        return tensor.permute([letters.index(letter) for letter in wanted])

    matrices = arranged(theirs, factor, shared + summed + new)
    rows = arranged(ours, state, "n" + shared + kept + summed)
    batches = (size(shared),) if shared else ()
    rows = rows.reshape(-1, *batches, size(kept), size(summed))
    product = rows @ matrices.reshape(*batches, size(summed), size(new))
    has = shared + kept + new
    return arranged("n" + has, product.reshape(-1, *(sizes[letter] for letter in has)), out)


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Keep torch's exporter from telling its users what only its authors can mend."""
    logger = logging.getLogger("torch.onnx")
    former = logger.level
    logger.setLevel(logging.ERROR)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        logger.setLevel(former)


# -- comparing --------------------------------------------------------------------------------------


def _difference(
    content: bytes, estimator: Any, samples: Mapping[str, Array], method: str, *, relative: bool = False
) -> float:
    """Return the largest difference from the estimator's result, divided by its size where that is above 1 if asked."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="X does not have valid feature names")
        result = getattr(estimator, method)(samples["X"] if set(samples) == {"X"} else dict(samples))
    wanted = list(result.values()) if isinstance(result, Mapping) else [result]
    given = _run(content, samples)
    off = 0.0
    for theirs, ours in zip(given, map(np.asarray, wanted), strict=True):
        if theirs.shape != ours.shape:
            raise ExportError(f"the ONNX form of {method} gives shape {theirs.shape}, the estimator {ours.shape}")
        scale = np.maximum(1, np.abs(ours)) if relative else 1
        off = max(off, float((np.abs(theirs - ours) / scale).max(initial=0)))
        if np.isnan(theirs).any():
            return math.nan
    return off


def in_double_precision(estimator: Any) -> Any:
    """Return a copy of a fitted estimator whose modules are in double precision; the rest is shared."""

    def double(value: Any) -> Any:
        if isinstance(value, nn.Module):
            return copy.deepcopy(value).double()
        return [double(part) for part in value] if isinstance(value, list) else value

    exact = copy.copy(estimator)
    exact.__dict__.update({name: double(value) for name, value in vars(estimator).items() if name.endswith("_")})
    return exact


def _run(content: bytes, samples: Mapping[str, Array]) -> list[Array]:
    onnxruntime = importlib.import_module("onnxruntime")
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = 1
    session = onnxruntime.InferenceSession(content, options, providers=["CPUExecutionProvider"])
    result: list[Array] = session.run(None, dict(samples))
    return result


def _require(packages: tuple[str, ...]) -> None:
    missing = [name for name in packages if importlib.util.find_spec(name) is None]
    if missing:
        raise ImportError(f"ONNX export needs {' and '.join(missing)}: pip install 'mvrbm[onnx]'", name=missing[0])
