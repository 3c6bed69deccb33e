"""The extras of the installation: without them everything else works, and what needs one says how to install it."""

import re
import subprocess
import sys
import tomllib
from pathlib import Path

import numpy as np
import pytest

import own_module
from mvrbm import MVRBM, load
from mvrbm.couplings import COUPLINGS
from mvrbm.errors import MissingPackageError, PluginError
from mvrbm.extras import import_plugins, require
from mvrbm.units import UNITS, make_unit

# Runs in a process of its own, in which packages of the extras cannot be found, whether they are installed or not.
WITHOUT_EXTRAS = """
import importlib, pkgutil, sys

class Hidden:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in sys.argv[1].split(","):
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)

sys.meta_path.insert(0, Hidden())

import numpy as np
import mvrbm

for module in pkgutil.walk_packages(mvrbm.__path__, "mvrbm."):
    needs_triton = module.name.startswith("mvrbm.backends.") or module.name.endswith("_kernels")  # it is no extra
    if not needs_triton and module.name != "mvrbm.__main__":
        importlib.import_module(module.name)

model = mvrbm.MVRBM((2, 2), n_epochs=1, random_state=0).fit(np.eye(8).reshape(8, 2, 4))
folder = model.save(sys.argv[2] + "/model")
assert len(mvrbm.load(folder).transform(np.zeros((1, 2, 4)))) == 1

from mvrbm.cli import main
from mvrbm.io import datasets
from mvrbm.training import Monitor, TensorBoard, Trainer
from mvrbm.pages import Page, curves
from mvrbm.sequences import plot_logo
from mvrbm.vision import psnr_ssim

data, image = np.zeros((8, 2, 4), np.float32), np.zeros((30, 30), np.uint8)
CALLS = {
    "data mnist-5k": lambda: datasets.load("mnist-5k"),
    "data natural-images": lambda: datasets.fetch("natural-images"),
    "data mnist": lambda: datasets.fetch("mnist", show_progress=False),
    "data ssim": lambda: psnr_ssim(image, image + 1),
    "demo page": lambda: Page("title", "lead").write(sys.argv[2] + "/page.html"),
    "demo logo": lambda: plot_logo(np.ones((2, 2)), "AC"),
    "demo curves": lambda: curves({}, "", "", x_label="", y_label=""),
    "logging": lambda: Trainer(model.machine_, callbacks=[Monitor(data), TensorBoard(sys.argv[2])]).fit(data),
    "hub push": lambda: model.push_to_hub("user/name"),
    "hub load": lambda: mvrbm.load("no-such-user/name"),
    "pyod": lambda: mvrbm.estimators.pyod.PyODDetector(),
    "onnx": lambda: mvrbm.export.to_onnx(model, sys.argv[2] + "/model.onnx"),
}
for name, call in CALLS.items():
    try:
        call()
    except mvrbm.errors.MissingPackageError as error:
        print(f"{name}: {error}")
for words in (["demo", "--out", sys.argv[2] + "/demo.html"], ["export", str(folder), sys.argv[2] + "/model.onnx"]):
    assert main(words) == 1  # prints one line on standard error
"""


def name_of(requirement):
    return re.match(r"[\w-]+", requirement)[0]


PROJECT = tomllib.loads(Path(__file__).parents[1].joinpath("pyproject.toml").read_text(encoding="utf-8"))["project"]
FOR_DEVELOPERS = {"bench", "docs", "test", "dev"}
EXTRAS = {  # modules
    {"scikit-image": "skimage"}.get(name_of(requirement), name_of(requirement))
    for extra, requirements in PROJECT["optional-dependencies"].items()
    for requirement in requirements
    if extra not in FOR_DEVELOPERS and name_of(requirement) != "mvrbm"
}


@pytest.mark.slow
def test_the_library_works_without_the_extras_and_each_missing_one_comes_with_its_command(tmp_path):
    run = subprocess.run(
        [sys.executable, "-c", WITHOUT_EXTRAS, ",".join(EXTRAS), str(tmp_path)],
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert run.returncode == 0, run.stderr
    for line in run.stdout.splitlines():
        extra = line.split()[0].rstrip(":")
        assert re.search(rf"requires the package \w+, which is not installed: pip install 'mvrbm\[{extra}\]'$", line), (
            line
        )
        assert extra in PROJECT["optional-dependencies"]
    assert len(run.stdout.splitlines()) == WITHOUT_EXTRAS.count("lambda")
    demo, export = run.stderr.splitlines()
    assert demo.startswith("error: the demo requires the package")
    assert export.startswith("error: ONNX export requires the package")


def test_few_packages_are_installed_with_the_library():
    names = {name_of(requirement) for requirement in PROJECT["dependencies"]}
    assert names == {"torch", "numpy", "scipy", "scikit-learn", "safetensors", "tqdm", "pillow", "typer"}


def test_an_import_error_inside_an_installed_package_is_not_reported_as_a_missing_package(tmp_path, monkeypatch):
    (tmp_path / "broken_package.py").write_text("from os import no_such_name\n")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(ImportError, match="no_such_name") as caught:
        require("broken_package", "a test", "data")
    assert not isinstance(caught.value, MissingPackageError)


@pytest.fixture
def plugin(tmp_path, monkeypatch):
    """An installed package with a unit and a coupling. Returns the path of its only module."""
    monkeypatch.syspath_prepend(tmp_path)
    installed = tmp_path / "bits-1.0.dist-info"
    installed.mkdir()
    (installed / "METADATA").write_text("Metadata-Version: 2.1\nName: bits\nVersion: 1.0\n")
    (installed / "entry_points.txt").write_text("[mvrbm.plugins]\nbits = my_bits\n")
    (tmp_path / "my_bits.py").write_text(own_module.SOURCE)
    import_plugins.cache_clear()
    yield tmp_path / "my_bits.py"
    import_plugins.cache_clear()
    for registry, name in ((UNITS, "bit"), (COUPLINGS, "full"), (sys.modules, "my_bits")):
        registry.pop(name, None)


def test_plugins_are_imported_if_a_name_is_unknown(plugin):
    make_unit("bernoulli", 3)
    assert "my_bits" not in sys.modules
    model = MVRBM((2, 2), visible="bit", coupling="full", n_epochs=1, device="cpu")
    model.fit(np.eye(8).reshape(8, 2, 4))
    assert type(model.machine_.layers["visible"]).__name__ == "Bit"
    assert type(model.machine_.links["visible"]).__name__ == "Full"


def test_plugins_are_imported_if_a_saved_model_needs_them(plugin, tmp_path):
    folder = MVRBM((2, 2), visible="bit", n_epochs=1).fit(np.eye(8).reshape(8, 2, 4)).save(tmp_path / "model")
    del UNITS["bit"], sys.modules["my_bits"]
    import_plugins.cache_clear()
    assert load(folder, device="cpu").machine_.layers["visible"].name == "bit"


def test_a_plugin_that_cannot_be_imported_is_named(plugin):
    plugin.write_text("import no_such_module")
    with pytest.raises(PluginError, match="the plugin 'my_bits' cannot be imported: No module named 'no_such_module'"):
        make_unit("bit", 3)
