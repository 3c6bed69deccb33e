"""Pages of models: what they contain, and which models they cannot run. test_in_browser.py runs them."""

import base64
import json
import re

import numpy as np
import pytest
import torch

import mvrbm
from mvrbm import MVRBM, Bernoulli, BoltzmannMachine, Categorical, Dense, Gaussian, Kronecker, Rectified, cli
from mvrbm.pages import write_playground


def model_of(path):
    return json.loads(re.search(r'id="model">(.*?)</script>', path.read_text(encoding="utf-8"), re.DOTALL)[1])


def decoded(tensor):
    array = np.frombuffer(base64.b64decode(tensor["data"]), tensor["type"])
    return array.reshape(tensor["shape"])


@pytest.mark.parametrize("name", ["digits", "labeled-digits"])
def test_a_page_is_one_small_file_with_the_factors_of_the_model(tmp_path, name):
    model = mvrbm.load(name, "cpu")
    path = write_playground(model, tmp_path / "page.html", title="<b>")
    text = path.read_text(encoding="utf-8")
    assert path.stat().st_size < 400_000
    assert "<b>" not in text  # titles are escaped
    assert not re.search(r"""(src|href)=["'](?!data:)|url\(|@import|https?://""", text)  # nothing is fetched
    stored = model_of(path)
    factors = [decoded(step["factor"]) for step in stored["visible"]["steps"]]
    for factor, own in zip(factors, model.machine_.links["visible"].factors, strict=True):
        np.testing.assert_array_equal(factor, own.detach())
    assert stored["visible"]["steps"][0]["factor"]["type"] == "float32"
    assert (stored["label"] is not None) == (name == "labeled-digits")
    assert len(set(stored["starts"]["labels"])) == (10 if stored["label"] else 1)  # every digit has a start


def test_whole_numbers_are_stored_as_bytes(tmp_path):
    model = mvrbm.load("digits", "cpu")
    starts = model_of(write_playground(model, tmp_path / "page.html"))["starts"]["visible"]
    assert starts["type"] == "uint8"
    np.testing.assert_array_equal(decoded(starts), model.chains_["visible"][: len(decoded(starts))])


def flat():
    return BoltzmannMachine(Bernoulli(6), Bernoulli(3), Dense())


def two_pictures():
    layers = {"left": Gaussian((2, 3)), "right": Gaussian((2, 3))}
    return BoltzmannMachine(layers, Bernoulli((2, 2)), {name: Kronecker() for name in layers})


def two_labels():
    layers = {"picture": Bernoulli((2, 3)), "a": Categorical(2), "b": Categorical(2)}
    return BoltzmannMachine(layers, Bernoulli(3), {name: Dense() for name in layers})


def rectified():
    return BoltzmannMachine(Bernoulli((2, 3)), Rectified((2, 2)), Kronecker())


def stack():
    data = np.zeros((4, 4, 4), np.float32)
    return mvrbm.DeepMVRBM([(2, 2), (2, 1)], n_epochs=0, device="cpu").fit(data)


CANNOT = [
    (flat, r"requires one two-dimensional visible layer.*got BoltzmannMachine with 'visible': bernoulli \(6,\)"),
    (two_pictures, r"'left': gaussian \(2, 3\), 'right': gaussian \(2, 3\)"),
    (two_labels, "at most one categorical label layer.*'b': categorical"),
    (rectified, "bernoulli or gaussian hidden units.*rectified hidden units"),
    (stack, "one Boltzmann machine, such as .*, but got DeepMVRBM, a stack of 2 machines"),
    (object, "such as an MVRBM or a ClassificationMVRBM, but got object$"),
]


@pytest.mark.filterwarnings("ignore::mvrbm.errors.ConstantDataWarning")
@pytest.mark.parametrize(("make", "says"), CANNOT, ids=[make.__name__ for make, _ in CANNOT])
def test_models_that_a_page_cannot_run_are_named(tmp_path, make, says):
    with pytest.raises(ValueError, match=says):
        write_playground(make(), tmp_path / "page.html")
    assert list(tmp_path.iterdir()) == []


def test_the_range_of_gaussian_pictures_is_that_of_chains_or_of_two_standard_deviations(tmp_path):
    data = np.random.default_rng(0).normal(50, 3, (200, 4, 5)).astype(np.float32)
    model = MVRBM((2, 2), visible="gaussian", n_epochs=0, device="cpu").fit(data)
    low, high = model_of(write_playground(model, tmp_path / "page.html"))["visible"]["range"]
    assert 41 < low < 46 < 54 < high < 59
    model = MVRBM((2, 2), visible="gaussian", recipe="generative", n_epochs=1, device="cpu").fit(data)
    low, high = model_of(write_playground(model, tmp_path / "page.html"))["visible"]["range"]
    assert (low, high) == pytest.approx(np.quantile(model.chains_["visible"], [0.005, 0.995]))


def test_the_title_is_the_class_unless_given(tmp_path):
    machine = BoltzmannMachine(Bernoulli((2, 3)), Gaussian((2, 2)), Kronecker())
    with torch.no_grad():
        html = write_playground(machine, tmp_path / "page.html").read_text(encoding="utf-8")
    assert "<h1>BoltzmannMachine: a model to play with</h1>" in html


def test_the_command_writes_a_page_that_enlarges(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert cli.main(["page", "enlarge", "--out", "enlarge.html"]) == 0
    assert "enlarge.html: SuperResolver" in capsys.readouterr().out
    text = (tmp_path / "enlarge.html").read_text(encoding="utf-8")
    models = json.loads(re.search(r'id="models">(.*?)</script>', text, re.DOTALL)[1])
    assert [model["scale"] for model in models] == [2, 3, 4]
    assert models[0]["stages"][0]["left"]["type"] == "float16"
    assert len(text) < 1_000_000
    assert not re.search(r"""(src|href)=["'](?!data:)|url\(|@import|https?://""", text)
