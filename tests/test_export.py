"""ONNX files compute what estimators compute, to 1e-5, for batches of any size."""

import importlib.util
import json
import random
import subprocess
import sys

import numpy as np
import pytest
import torch
from sklearn.base import BaseEstimator
from sklearn.datasets import load_digits
from sklearn.exceptions import NotFittedError

from mvrbm import CP, MMVRBM, MPO, MVRBM, RBM, TVRBM, Bernoulli, BoltzmannMachine, Categorical, Dense, Kronecker
from mvrbm.cli import main
from mvrbm.estimators import ClassificationMVRBM, DeepMVRBMClassifier, MVRBMClassifier
from mvrbm.estimators.deep import DeepMVRBM, Layer
from mvrbm.export import OPSET, ExportError, Graph, compare_onnx, graph_of, in_double_precision, machine_graph, to_onnx

MISSING = [name for name in ("onnx", "onnxscript", "onnxruntime") if importlib.util.find_spec(name) is None]
needs_onnx = pytest.mark.skipif(bool(MISSING), reason=f"not installed: {', '.join(MISSING)} (extra 'onnx')")

BATCHES = (1, 2, 7, 1000)
SHAPES = {1: ((7,), (4,)), 2: ((6, 5), (4, 3)), 3: ((4, 3, 5), (2, 3, 4)), 4: ((3, 2, 4, 2), (2, 2, 3, 2))}
# Each order, and each rank with either unit and either method: an export takes seconds.
CASES = [
    (1, 1, "bernoulli", "reconstruct"),
    (2, 3, "bernoulli", "transform"),
    (3, 3, "gaussian", "reconstruct"),
    (4, 1, "gaussian", "transform"),
]


def data(shape, visible="bernoulli", n=60, seed=0):
    draw = np.random.default_rng(seed)
    if visible == "bernoulli":
        return draw.random((n, *shape), dtype=np.float32)
    return draw.normal(1, 3, (n, *shape)).astype(np.float32)


@pytest.fixture(scope="module")
def digits():
    """Fitted on real images, so that the features say something, and the images."""
    images = (load_digits().images / 16).astype(np.float32)
    return MVRBM((6, 6), rank=2, n_epochs=10, random_state=0).fit(images), images


@pytest.fixture(scope="module")
def files(digits, tmp_path_factory):
    """Its files, by method. Exporting must leave the model and all random numbers alone."""
    model, images = digits
    folder = tmp_path_factory.mktemp("files")
    before = model.transform(images)
    states = torch.get_rng_state(), repr(random.getstate()), repr(np.random.get_state())  # noqa: NPY002
    paths = {method: to_onnx(model, folder / f"{method}.onnx", method) for method in ("transform", "reconstruct")}
    assert torch.equal(states[0], torch.get_rng_state())
    assert states[1:] == (repr(random.getstate()), repr(np.random.get_state()))  # noqa: NPY002
    assert np.array_equal(before, model.transform(images))
    assert all(parameter.requires_grad for parameter in model.machine_.couplings.parameters())
    return paths


def differences(path, model, X, method):
    return [compare_onnx(path, model, np.resize(X, (n, *X.shape[1:])), method) for n in BATCHES]


# -- equality ---------------------------------------------------------------------------------------


@pytest.mark.slow
@needs_onnx
@pytest.mark.parametrize(("order", "rank", "visible", "method"), CASES)
def test_arrays_of_every_order(order, rank, visible, method, tmp_path):
    shape, hidden_shape = SHAPES[order]
    X = data(shape, visible)
    model = TVRBM(hidden_shape, rank=rank, visible=visible, n_epochs=10, random_state=0).fit(X)
    path = to_onnx(model, tmp_path / "model.onnx", method, check=False)
    assert max(differences(path, model, data(shape, visible, 1000, seed=1), method)) < 1e-5


@pytest.mark.slow
@needs_onnx
@pytest.mark.parametrize("method", ["transform", "reconstruct"])
def test_real_images(digits, files, method):
    model, images = digits
    assert compare_onnx(files[method], model, images, method) < 1e-5
    assert max(differences(files[method], model, images, method)) < 1e-5


@needs_onnx
def test_rows_a_full_matrix_and_double_precision(tmp_path):
    rows = data((30,)).astype(np.float64)
    model = RBM((4, 2), visible_shape=(6, 5), n_epochs=2, random_state=0).fit(rows)
    path = to_onnx(model, tmp_path / "rows.onnx", "reconstruct")
    assert max(differences(path, model, rows, "reconstruct")) < 1e-5


@pytest.mark.slow
@needs_onnx
@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_raw_units_do_not_drown_in_rounding(dtype, tmp_path):
    """Thousands plus or minus some: the terms that cancel in the field exceed the precision of float32."""
    draw = np.random.default_rng(0)
    X = (5000 + 300 * draw.normal(size=(60, 1, 1, 1)) + 100 * draw.normal(size=(60, 9, 9, 20))).astype(dtype)
    model = TVRBM((2, 2, 6), visible="gaussian", n_epochs=5, random_state=0).fit(X)
    path = to_onnx(model, tmp_path / "raw.onnx")  # compares in double precision
    assert max(differences(path, in_double_precision(model), X.astype(np.float32), "transform")) < 1e-5


@pytest.mark.slow
@needs_onnx
def test_modalities_are_inputs_by_their_names(tmp_path):
    import onnx

    names = ["features", "reconstruction_0"]  # as unlucky as names can be
    parts = {names[0]: data((4, 5)), names[1]: data((3, 6), "gaussian")}
    kinds = dict(zip(names, ("bernoulli", "gaussian"), strict=True))
    model = MMVRBM((3, 4), rank=2, visible=kinds, n_epochs=5, random_state=0).fit(parts)
    path = to_onnx(model, tmp_path / "both.onnx", "reconstruct")
    for n in BATCHES:
        some = {name: np.resize(part, (n, *part.shape[1:])) for name, part in parts.items()}
        assert compare_onnx(path, model, some, "reconstruct") < 1e-5
    graph = onnx.load(path).graph
    assert [value.name for value in graph.input] == names
    assert [value.name for value in graph.output] == [f"reconstruction_{name}" for name in names]
    assert graph_of(model, "transform").outputs == ("features_",)


@pytest.mark.slow
@needs_onnx
def test_stacks(tmp_path):
    X = data((6, 5))
    layers = ((4, 4), Layer((3, 3), Kronecker(2), "rectified"), Layer(5, Dense()))
    model = DeepMVRBM(layers, n_epochs=3, random_state=0).fit(X)
    path = to_onnx(model, tmp_path / "deep.onnx", "reconstruct")  # up through all of them, and down
    assert max(differences(path, model, X, "reconstruct")) < 1e-5


@pytest.mark.slow
@needs_onnx
@pytest.mark.parametrize(
    ("model", "as_rows"),
    [
        (MVRBMClassifier((6, 6), rank=2, hidden="bernoulli", pretraining=1, n_epochs=2, random_state=0), False),
        (
            DeepMVRBMClassifier(
                ((6, 6), Layer(10, Dense())),
                hidden="rectified",
                visible="gaussian",
                visible_shape=(8, 8),
                pretraining=0,
                n_epochs=2,
                random_state=0,
            ),
            True,
        ),
        (ClassificationMVRBM((6, 6), mode="discriminative", n_epochs=2, random_state=0), False),
    ],
    ids=lambda value: type(value).__name__,
)
def test_classifiers(model, as_rows, digits, tmp_path):
    import onnx

    images, names = digits[1], np.array(list("abcdefghij"))[load_digits().target]
    X = images.reshape(-1, 64) if as_rows else images
    path = to_onnx(model.fit(X[:500], names[:500]), tmp_path / "classes.onnx", "predict_proba")
    assert max(differences(path, model, X, "predict_proba")) < 1e-5
    described = {entry.key: entry.value for entry in onnx.load(path).metadata_props}
    assert json.loads(described["classes"]) == list("abcdefghij")


@pytest.mark.slow
@needs_onnx
@pytest.mark.parametrize(
    "machine",
    [
        BoltzmannMachine(Bernoulli((4, 3, 5)), Bernoulli((2, 3, 4)), MPO((2, 3)), std=0.3),
        BoltzmannMachine(Categorical((4, 3)), Bernoulli((5,)), CP(3), std=0.3),
    ],
    ids=["MPO", "CP with categories"],
)
def test_couplings_that_no_estimator_has(machine, tmp_path):
    class Offers(BaseEstimator):
        def __init__(self):
            self.machine_ = machine

        def fit(self):
            """Be an estimator."""

        def reconstruct(self, X):
            means = machine.visible_mean(machine.hidden_mean(X, check=False), check=False)
            return means["visible"].detach().numpy()

        def onnx_graph(self, method):
            return machine_graph([machine], method)

    to_onnx(Offers(), tmp_path / "machine.onnx", "reconstruct")  # which compares


# -- the file ---------------------------------------------------------------------------------------


@needs_onnx
def test_a_file_says_what_it_is_and_tells_nothing_of_this_machine(files):
    import onnx

    import mvrbm

    content, file = files["transform"].read_bytes(), onnx.load(files["transform"])
    described = {entry.key: entry.value for entry in file.metadata_props}
    assert described == {"mvrbm_version": mvrbm.__version__, "class": "MVRBM", "method": "transform"}
    assert [(entry.domain, entry.version) for entry in file.opset_import] == [("", OPSET)]
    (given,) = file.graph.input
    assert given.name == "X"
    assert given.type.tensor_type.elem_type == onnx.TensorProto.FLOAT
    dims = given.type.tensor_type.shape.dim
    assert (dims[0].dim_param, [dim.dim_value for dim in dims[1:]]) == ("n", [8, 8])
    plain = {"Transpose", "Reshape", "MatMul", "Add", "Sigmoid", "Squeeze", "Unsqueeze"}
    assert {node.op_type for node in file.graph.node} <= plain
    for secret in (b".py", b"site-packages", str(files["transform"].parent).encode()):
        assert secret not in content


@needs_onnx
def test_it_runs_without_this_package(digits, files, tmp_path):
    model, images = digits
    np.save(tmp_path / "images.npy", images[:20])
    code = f"""
import sys
sys.modules["mvrbm"] = sys.modules["torch"] = None  # importing either fails
import numpy, onnxruntime
session = onnxruntime.InferenceSession({str(files["transform"])!r}, providers=["CPUExecutionProvider"])
(features,) = session.run(["features"], {{"X": numpy.load("images.npy")}})
numpy.save("features.npy", features)
"""
    subprocess.run([sys.executable, "-c", code], cwd=tmp_path, check=True)
    np.testing.assert_allclose(np.load(tmp_path / "features.npy"), model.transform(images[:20]), atol=1e-5)


# -- what goes wrong --------------------------------------------------------------------------------


class Offering(BaseEstimator):
    """An estimator whose offered graph can be made wrong."""

    def __init__(self, module):
        self.module, self.fitted_ = module, True

    def fit(self):
        """Be an estimator."""

    def transform(self, X):
        return 2 * np.asarray(X)

    def onnx_graph(self, method):
        return Graph(self.module.eval(), {"X": torch.ones(3, 3)}, ("features",))


class Times(torch.nn.Module):
    def __init__(self, number):
        super().__init__()
        self.number = number

    def forward(self, X):
        return self.number * X


class FixesTheBatch(torch.nn.Module):
    def forward(self, X):
        return X * len(X)


class Unwritable(torch.nn.Module):
    def forward(self, X):
        return X if float(X.sum()) > 0 else -X


@pytest.mark.slow
@needs_onnx
def test_a_class_may_offer_its_own_graph_and_a_wrong_one_is_caught(tmp_path):
    path = tmp_path / "model.onnx"
    to_onnx(Offering(Times(2.0)), path)
    good = path.read_bytes()
    message = r"Offering.transform differs from the estimator by 0\.0001, more than 1e-05.*not written"
    with pytest.raises(ExportError, match=message):
        to_onnx(Offering(Times(2.0002)), path)
    with pytest.raises(ExportError, match="differs from the estimator by nan"):
        to_onnx(Offering(Times(float("nan"))), path)
    assert path.read_bytes() == good
    assert [file.name for file in tmp_path.iterdir()] == ["model.onnx"]
    assert compare_onnx(path, Offering(Times(0.0)), np.ones((4, 3)), "transform") == 0


@needs_onnx
def test_another_model_is_told_from_the_right_one(digits, files):
    model, images = digits
    other = MVRBM((6, 6), rank=2, n_epochs=1, random_state=1).fit(images[:100])
    assert compare_onnx(files["transform"], other, images[:50]) > 0.01
    with pytest.raises(ExportError, match=r"returns shape \(50, 36\) in ONNX, but \(50, 8, 8\) in the estimator"):
        compare_onnx(files["transform"], model, images[:50], "reconstruct")


@needs_onnx
def test_graphs_that_cannot_be_are_refused_and_nothing_is_written(tmp_path):
    with pytest.raises(ExportError, match="number of samples must not be constant"):
        to_onnx(Offering(FixesTheBatch()), tmp_path / "model.onnx", check=False)
    with pytest.raises(ExportError, match="PyTorch cannot export this model to ONNX"):
        to_onnx(Offering(Unwritable()), tmp_path / "model.onnx")
    assert not list(tmp_path.iterdir())


@needs_onnx
def test_nothing_is_left_when_writing_fails(tmp_path, monkeypatch):
    def fail(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("os.fsync", fail)
    with pytest.raises(ValueError, match="No space left on device"):
        to_onnx(Offering(Times(2.0)), tmp_path / "model.onnx", check=False)
    assert not list(tmp_path.iterdir())


def test_bad_arguments(digits, tmp_path):
    model, _ = digits
    with pytest.raises(
        ValueError, match=r"method of MVRBM must be one of \['transform', 'reconstruct'\], got 'predict_proba'"
    ):
        to_onnx(model, tmp_path / "model.onnx", "predict_proba")
    with pytest.raises(ValueError, match=r"must end in \.onnx"):
        to_onnx(model, tmp_path / "model.pt")
    with pytest.raises(ValueError, match=r"cannot be written because .* does not exist"):
        to_onnx(model, tmp_path / "absent" / "model.onnx")
    with pytest.raises(NotFittedError):
        to_onnx(MVRBM((3, 3)), tmp_path / "model.onnx")
    with pytest.raises(ValueError, match="method of object must be one of"):
        graph_of(object(), "transform")
    assert not list(tmp_path.iterdir())


# -- the command ------------------------------------------------------------------------------------


@needs_onnx
def test_the_command(digits, files, tmp_path, capsys):
    model, _ = digits
    folder, out = model.save(tmp_path / "model"), tmp_path / "model.onnx"
    assert main(["export", str(folder), str(out), "--method", "reconstruct", "--json"]) == 0
    result = json.loads(capsys.readouterr().out)
    assert result == {
        "out": str(out),
        "class": "MVRBM",
        "method": "reconstruct",
        "opset": OPSET,
        "bytes": out.stat().st_size,
    }
    assert out.read_bytes() == files["reconstruct"].read_bytes()  # the same model, the same bytes


def test_the_command_refuses_in_one_line(digits, tmp_path, capsys):
    model, _ = digits
    folder, out = model.save(tmp_path / "model"), tmp_path / "model.onnx"
    out.write_bytes(b"here before")
    refused = [
        ([str(folder), str(out)], 1, "use --force to replace it"),
        ([str(folder), str(tmp_path / "model.txt")], 1, "must end in .onnx"),
        ([str(tmp_path / "none"), str(tmp_path / "new.onnx")], 1, "none"),
        ([str(folder), str(tmp_path / "new.onnx"), "--method", "predict_proba"], 1, "method of MVRBM must be one of"),
        ([str(folder), str(tmp_path / "new.onnx"), "--method", "sample"], 2, "'sample' is not one of"),
    ]
    for arguments, code, reason in refused:
        assert main(["export", *arguments]) == code
        said = capsys.readouterr().err
        assert reason in said
        assert said.count("\n") == 1
    assert out.read_bytes() == b"here before"
    assert not (tmp_path / "new.onnx").exists()
