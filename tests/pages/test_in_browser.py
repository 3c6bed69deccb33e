"""Pages as people see them: in a real browser, by mouse and keyboard, with the values that Python computes."""

import itertools
from pathlib import Path

import numpy as np
import pytest
import torch

import mvrbm.pages.demo_report
from handwriting import HANDWRITINGS, strokes
from mvrbm import CP, MPO, Bernoulli, BoltzmannMachine, Categorical, Dense, Gaussian, Kronecker
from mvrbm.couplings import Tucker
from mvrbm.pages import write_enlarging_page, write_playground
from tables import generator, randomize

pytestmark = pytest.mark.browser

# -- values -----------------------------------------------------------------------------------------


def machine_of(visible, hidden, coupling, label=False):
    layers, links = {"picture": visible}, {"picture": coupling}
    if label:
        layers["label"], links["label"] = Categorical(3), Dense()
    return BoltzmannMachine(layers, hidden, links)


MACHINES = {
    "kronecker": lambda: machine_of(Bernoulli((5, 4)), Bernoulli((3, 6)), Kronecker(rank=3), label=True),
    "one term": lambda: machine_of(Gaussian((4, 5), learn_variance=True), Bernoulli((6, 3)), Kronecker()),
    "dense": lambda: machine_of(Bernoulli((3, 4), bias_shape=(1, 4)), Gaussian(7), Dense()),
    "cp": lambda: machine_of(Gaussian((4, 3)), Bernoulli(7), CP(rank=3), label=True),
    "tucker": lambda: machine_of(Bernoulli((4, 5)), Bernoulli((2, 3)), Tucker(rank=(2, 3))),
    "mpo": lambda: machine_of(Bernoulli((4, 5)), Bernoulli((3, 2)), MPO(bond=3)),
}


def single(machine):
    """The machine as a page stores it: in single precision, and computed in double precision."""
    return machine.float().double()


@torch.no_grad()
@pytest.mark.parametrize("name", [*MACHINES, "digits", "labeled-digits"])
def test_passes_equal_those_of_python(visit, tmp_path, name):
    rng = generator(name)
    if name in MACHINES:
        model = machine = single(randomize(MACHINES[name](), rng))
    else:
        model = mvrbm.load(name, "cpu")
        machine = model.machine_.double()
    page = visit(write_playground(model, tmp_path / "page.html")).page
    picture = next(iter(machine.layers))
    x = machine.layers[picture].example(1, mvrbm.RandomSource(1)).double()
    y = torch.from_numpy(rng.random((1, *machine.hidden.shape)))
    given = {"x": x.flatten().tolist(), "y": y.flatten().tolist()}
    passes = """({x, y}) => {
        const [picture, hidden] = [Float64Array.from(x), Float64Array.from(y)];
        const label = machine.label && oneHot(1, machine.label.size);
        return {
            hidden: [...machine.hiddenMean(picture, label)],
            visible: [...machine.visibleMean(hidden)],
            energy: [machine.freeEnergy(picture, label)],
            filter: [...machine.filter(2)],
            labels: machine.label ? [...machine.labelProbabilities(picture)] : [],
            label: machine.label ? [...machine.labelMean(hidden)] : [],
            total: [machine.freeEnergy(picture)],
        };
    }"""
    found = page.evaluate(passes, given)
    layers, labels = {picture: x}, []
    if len(machine.layers) > 1:
        size = machine.layers["label"].shape[0]
        every = {picture: x.expand(size, *x.shape[1:]), "label": torch.eye(size).double()}
        labels = -machine.free_energy(every)
        layers["label"] = torch.eye(size).double()[1:2]
    means = machine.visible_mean(y)
    one = torch.zeros(machine.hidden.shape).double().flatten()
    one[2] = 1
    expected = {
        "hidden": machine.hidden_mean(layers),
        "visible": means[picture],
        "energy": machine.free_energy(layers),
        "filter": machine.links[picture].to_visible(one.reshape(1, *machine.hidden.shape)),
        "labels": torch.softmax(labels, 0) if len(labels) else torch.zeros(0),
        "label": means.get("label", torch.zeros(0)),
        "total": -torch.logsumexp(labels, 0, keepdim=True) if len(labels) else machine.free_energy(layers),
    }
    for key, value in expected.items():
        np.testing.assert_allclose(found[key], value.flatten(), rtol=1e-5, atol=1e-12, err_msg=key)


@torch.no_grad()
@pytest.mark.parametrize("temperature", [1.0, 1.6])
def test_samples_given_a_pixel_and_a_class_have_the_exact_probabilities(visit, tmp_path, temperature):
    machine = single(
        randomize(machine_of(Bernoulli((2, 2)), Bernoulli((2, 1)), Kronecker(rank=2), True), generator("a"))
    )
    page = visit(write_playground(machine, tmp_path / "page.html")).page
    run = """({beta, steps}) => {
        const [state, counts] = [machine.start(), new Float64Array(16)];
        state.x[1] = 1;
        for (let n = 0; n < steps; n++) {
            machine.step(state, {known: [0, 1, 0, 0], heldLabel: 2, beta});
            counts[state.x.reduce((code, bit) => 2 * code + bit, 0)] += 1 / steps;
        }
        return [...counts];
    }"""
    found = page.evaluate(run, {"beta": 1 / temperature, "steps": 200_000})
    every = torch.tensor([*itertools.product([0.0, 1.0], repeat=4)]).double().reshape(16, 2, 2)
    weights = torch.zeros(16).double()
    for hidden in itertools.product([0.0, 1.0], repeat=2):
        layers = {"picture": every, "label": torch.eye(3).double()[2].expand(16, 3)}
        state = torch.tensor(hidden).double().reshape(1, 2, 1).expand(16, 2, 1)
        weights += torch.exp(-machine.energy(layers, state) / temperature)
    weights[every.reshape(16, 4)[:, 1] == 0] = 0
    np.testing.assert_allclose(found, weights / weights.sum(), atol=0.008)


def test_samples_of_gaussian_pixels_have_the_variance_of_the_temperature(visit, tmp_path):
    machine = machine_of(Gaussian((2, 2), learn_variance=True), Bernoulli((1, 1)), Kronecker())
    with torch.no_grad():
        machine.layers["picture"].bias.fill_(3)
        machine.layers["picture"].log_variance.fill_(np.log(4))
        machine.links["picture"].factors[0].zero_()
    page = visit(write_playground(machine, tmp_path / "page.html")).page
    run = """() => {
        const [state, values] = [machine.start(), []];
        for (let n = 0; n < 20000; n++) {
            machine.step(state, {known: [0, 0, 0, 0], beta: 0.5});
            values.push(...state.x);
        }
        return values;
    }"""
    values = np.array(page.evaluate(run))
    assert values.mean() == pytest.approx(3, abs=0.05)
    assert values.var() == pytest.approx(8, rel=0.03)  # variance 4 at temperature 2


# -- use --------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def digits(tmp_path_factory):
    return write_playground(mvrbm.load("labeled-digits", "cpu"), tmp_path_factory.mktemp("page") / "page.html")


PICTURE = "[...(byId('probabilities').checked ? state.mean : state.x)]"


def center_of(page, row, column):
    box = page.locator("#picture").bounding_box()
    return box["x"] + (column + 0.5) * box["width"] / 28, box["y"] + (row + 0.5) * box["height"] / 28


def stroke(page, *points):
    page.locator("#picture").scroll_into_view_if_needed()
    page.mouse.move(*center_of(page, *points[0]))
    page.mouse.down()
    for point in points[1:]:
        page.mouse.move(*center_of(page, *point), steps=5)
    page.mouse.up()


def new_sample(page):
    """An image of the model's own, with its settings in view."""
    page.locator("summary", has_text="Sampling and settings").click()
    page.get_by_role("button", name="New sample").click()


def shares_of(page):
    """The percentages at the bars."""
    return [int(text.rstrip("%")) for text in page.locator("#labels small").all_inner_texts()]


def test_digits_that_a_person_draws_are_read(visit, digits):
    page = visit(digits).page
    wrong = []
    for handwriting, digit in itertools.product(HANDWRITINGS, range(10)):
        page.get_by_role("button", name="Clear").click()
        assert page.locator("#reading").inner_text() == "Nothing is drawn."
        for points in strokes(handwriting, digit):
            stroke(page, *points)
        # Nothing is sampled: the bars are there at once, and at most 3 seconds after the last stroke.
        page.locator("#reading b").wait_for(timeout=3000)
        if page.locator("#reading b").inner_text() != str(digit):
            wrong.append((handwriting, digit))
    assert len(wrong) <= 3, wrong


@torch.no_grad()
def test_bars_show_the_exact_probabilities_of_the_drawing_in_the_center(visit, digits):
    page = visit(digits).page
    stroke(page, (2, 3), (2, 9), (14, 6))
    drawn = np.array(page.evaluate("[...state.x]")).reshape(28, 28)
    assert (np.array(page.evaluate("[...known]")).reshape(28, 28) == np.where(drawn, 1, 2)).all()
    row, column = (np.average(axis, weights=drawn) for axis in np.indices(drawn.shape))
    model = mvrbm.load("labeled-digits", "cpu")
    chains = model.chains_["visible"].numpy()
    mass = chains.sum((1, 2))
    center = [np.mean((chains * axis).sum((1, 2)) / mass) for axis in np.indices(drawn.shape)]
    moved = np.roll(drawn, (round(center[0] - row), round(center[1] - column)), (0, 1)).astype(np.float32)
    expected = model.predict_proba(moved[None])[0]
    np.testing.assert_allclose(np.array(shares_of(page)) / 100, expected, atol=0.0051)
    found = page.evaluate("[...machine.labelProbabilities(centered(state.x))]")
    np.testing.assert_allclose(found, expected, rtol=1e-4, atol=1e-7)


def test_a_drawing_is_kept_until_it_is_completed(visit, digits):
    page = visit(digits).page
    complete = page.get_by_role("button", name="Complete my drawing")
    complete.click()
    assert page.locator("#status").inner_text() == "Draw something first."
    stroke(page, (5, 9), (5, 18), (14, 13))
    drawn = np.array(page.evaluate("[...state.x]"))
    page.wait_for_timeout(200)
    assert page.evaluate("[...state.x]") == drawn.tolist()  # nothing runs, in spite of the stroke
    stroke(page, (14, 13), (22, 13))
    page.get_by_label("Blank", exact=True).check()
    stroke(page, (14, 13), (22, 13))
    erased = np.array(page.evaluate("[...state.x]"))
    assert (erased <= drawn).all()  # a second stroke that is erased leaves the canvas
    complete.click()
    page.wait_for_timeout(300)
    page.evaluate("setRunning(false)")
    known = np.array(page.evaluate("[...known]"), bool)
    assert (known == (erased > 0)).all()  # all that is blank is free
    after = np.array(page.evaluate("[...state.x]"))
    assert (after[known] == 1).all()
    assert after[~known].any()  # the model draws
    page.get_by_role("button", name="Clear").click()
    assert not page.evaluate("state.x.some(Boolean)")
    assert page.evaluate("known.every((who) => who === CANVAS)")


def test_drawing_changes_what_the_model_fills_in(visit, digits):
    page = visit(digits).page
    new_sample(page)
    page.get_by_label("Mean field", exact=True).check()
    for _ in range(3):
        page.get_by_role("button", name="One step").click()
    before = np.array(page.evaluate(PICTURE))
    stroke(page, (4, 8), (4, 19))
    page.get_by_role("button", name="Pause").click()
    known = np.array(page.evaluate("[...known]"), bool)
    after = np.array(page.evaluate(PICTURE))
    assert 20 <= known.sum() <= 30  # a brush of two pixels
    assert (after[known] == 1).all()
    assert np.abs(after - before)[~known].sum() > 5  # the rest has changed
    page.get_by_label("Blank", exact=True).check()
    stroke(page, (4, 8), (4, 19))
    assert (np.array(page.evaluate(PICTURE))[known] == 0).all()
    page.get_by_label("Free", exact=True).check()
    stroke(page, (4, 8), (4, 19))
    assert not page.evaluate("known.some(Boolean)")


def test_a_part_of_a_kept_picture_is_filled_in_again(visit, digits):
    page = visit(digits).page
    new_sample(page)
    page.get_by_role("button", name="Keep all").click()
    kept = np.array(page.evaluate("[...state.x]"))
    page.locator("#width").fill("4")
    for column in range(16, 28, 3):
        stroke(page, (0, column), (27, column))
    page.wait_for_timeout(200)
    known = np.array(page.evaluate("[...known]"), bool).reshape(28, 28)
    after = np.array(page.evaluate("[...state.x]"))
    assert known[:, :13].all()
    assert not known[:, 15:].any()
    assert (after == kept)[known.flatten()].all()


def test_the_keyboard_can_do_everything(visit, digits):
    page = visit(digits).page
    new_sample(page)
    page.locator("#picture").focus()
    for key in ("ArrowUp", "ArrowLeft", "Space", "Shift+ArrowRight", "Shift+ArrowRight"):
        page.keyboard.press(key)
    known = np.array(page.evaluate("[...known]")).reshape(28, 28)
    assert (known.sum(), known[12:14, 12:16].sum()) == (8, 8)  # two pixels wide, four long
    assert page.locator("#status").inner_text() == "The model keeps 8 pixels and draws the other 776."
    reached = set()
    for _ in range(40):
        page.keyboard.press("Tab")
        reached.add(page.evaluate("document.activeElement.id || document.activeElement.name"))
    wanted = "complete clear keep run step new width speed temperature probabilities hidden method"
    assert set(wanted.split()) <= reached
    page.locator("#hidden").focus()
    page.keyboard.press("ArrowDown")
    unit = page.locator("#unit").inner_text().partition(", with activity")[0]
    assert unit in page.locator("#status").inner_text()
    nameless = """() => [...document.querySelectorAll("button, input, canvas")].filter(
        (each) => !(each.ariaLabel || each.textContent || each.labels?.length || each.closest("button")?.ariaLabel)
    ).length"""
    assert page.evaluate(nameless) == 0


def test_a_class_on_request_is_drawn(visit, digits):
    page = visit(digits, motion="no-preference").page
    page.locator("#labels button", has_text="7").first.click()
    page.wait_for_timeout(1500)
    assert page.locator("#labels button[aria-pressed=true]").count() == 1
    page.evaluate("setRunning(false)")
    shares = page.evaluate("[...machine.labelProbabilities(state.x)]")
    assert np.argmax(shares) == 7
    assert page.locator("#labels button").nth(7).locator("small").inner_text() == f"{100 * shares[7]:.0f}%"


def test_runs_steps_and_pauses(visit, digits):
    page = visit(digits).page
    page.locator("summary", has_text="Sampling and settings").click()
    assert page.get_by_role("button", name="Run").is_disabled()  # everything is known
    assert page.get_by_role("button", name="One step").is_disabled()
    page.get_by_role("button", name="New sample").click()
    state = page.evaluate("[...state.x]")
    page.wait_for_timeout(150)
    assert page.evaluate("[...state.x]") == state  # nothing moves by itself
    page.get_by_role("button", name="One step").click()
    assert page.evaluate("[...state.x]") != state
    energy = page.evaluate("machine.freeEnergy(state.x)")
    assert page.locator("#energy").inner_text().replace("−", "-") == f"{energy:.1f}"
    page.get_by_role("button", name="Run").click()
    page.wait_for_timeout(600)
    page.get_by_role("button", name="Pause").click()
    assert page.evaluate("energies.length") > 5
    page.locator("#temperature").fill("0.3")
    assert page.locator("#temperature + output").inner_text() == "0.30"
    page.get_by_role("button", name="New sample").click()
    assert page.evaluate("energies.length") == 1


@pytest.mark.parametrize("name", ["playground", "enlarge"])
def test_a_framed_page_takes_the_theme_and_the_room_of_the_page_around_it(visit, digits, tmp_path, name):
    if name == "playground":
        (tmp_path / "page.html").write_text(digits.read_text(encoding="utf-8"), encoding="utf-8")
    else:
        write_enlarging_page(tmp_path / "page.html", scales=[2])
    script = (Path(__file__).parents[2] / "docs" / "_static" / "live.js").read_text(encoding="utf-8")
    frame = '<iframe class="live" src="page.html" style="width: 100%; height: 20rem; border: 1px solid"></iframe>'
    around = f'<!doctype html><html data-theme="dark"><link rel="icon" href="data:,">{frame}<script>{script}</script>'
    (tmp_path / "around.html").write_text(around, encoding="utf-8")
    page = visit(tmp_path / "around.html", width=390, scheme="light").page
    inside = page.frames[1]
    inside.wait_for_function("getComputedStyle(document.body).backgroundColor === 'rgb(20, 23, 28)'")
    page.evaluate("document.documentElement.dataset.theme = 'light'")
    inside.wait_for_function("getComputedStyle(document.body).backgroundColor === 'rgb(243, 245, 248)'")
    page.emulate_media(color_scheme="dark")  # the page around it decides
    page.wait_for_timeout(200)
    assert inside.evaluate("document.documentElement.dataset.theme") == "light"
    # Neither way is there anything to scroll inside, also after the content has changed.
    if name == "playground":
        inside.locator("summary", has_text="Sampling and settings").click()
        page.wait_for_timeout(200)
    overflow = (
        "[document.documentElement.scrollHeight - innerHeight, document.documentElement.scrollWidth - innerWidth]"
    )
    assert max(inside.evaluate(overflow)) <= 0
    assert inside.evaluate("innerHeight") > 400


def test_a_finger_draws_instead_of_scrolling(visit, digits):
    page = visit(digits, width=390, has_touch=True).page
    x, y = center_of(page, 10, 10)
    page.touchscreen.tap(x, y)
    assert page.evaluate("known.includes(DRAWN)")
    assert page.evaluate("getComputedStyle(byId('picture')).touchAction") == "none"


# -- looks ------------------------------------------------------------------------------------------

SCREENS = [*itertools.product([390, 1280], ["light", "dark"])]


DOCUMENTATION = Path(__file__).parents[2] / "docs" / "_build" / "html"
MAIN_PAGES = (
    *("index", "installation", "how-to", "playground", "gallery/index", "explanation", "results", "reference"),
    *("outliers", "estimators", "tutorials/plot_ten_minutes", "changelog"),
)


@pytest.fixture(scope="module")
def report(tmp_path_factory):
    path = tmp_path_factory.mktemp("demo") / "report.html"
    mvrbm.pages.demo_report.run(path, device="cpu", quick=True)
    return path


@pytest.fixture(scope="module")
def pages(digits, report, tmp_path_factory):
    folder = tmp_path_factory.mktemp("pages")
    gaussian = single(randomize(MACHINES["one term"](), generator("gaussian")))
    return {
        "labeled digits": digits,
        "digits": write_playground(mvrbm.load("digits", "cpu"), folder / "digits.html"),
        "gaussian": write_playground(gaussian, folder / "gaussian.html", title="A" * 100),
        "report": report,
        "playground of the report": mvrbm.pages.demo_report.playground_of(report),
    }


@pytest.mark.parametrize("name", ["labeled digits", "digits", "gaussian", "report", "playground of the report"])
@pytest.mark.parametrize(("width", "scheme"), SCREENS)
def test_pages_fit_the_screen_in_light_and_dark(visit, pages, name, width, scheme):
    visit(pages[name], width=width, scheme=scheme, motion="no-preference").check_looks(scheme)


@pytest.mark.parametrize("name", MAIN_PAGES)
@pytest.mark.parametrize(("width", "scheme"), SCREENS)
def test_documentation_fits_the_screen_in_light_and_dark(visit, unavailable, name, width, scheme):
    path = DOCUMENTATION / f"{name}.html"
    if not path.exists():
        unavailable(f"{path} is missing: make docs")
    visit(path, width=width, scheme=scheme).check_looks(scheme)


def test_the_report_leads_to_its_playground(visit, report):
    page = visit(report).page
    page.get_by_role("link", name="Open the playground").click()
    assert page.evaluate("machine.label.size") == 10


def test_the_documentation_shows_models_that_run(visit, unavailable):
    path = DOCUMENTATION / "playground.html"
    if not path.exists():
        unavailable(f"{path} is missing: make docs")
    page = visit(path).page
    frame = page.frame_locator("iframe#live-labeled-digits")
    frame.locator("#labels button").first.click()
    assert frame.locator("#energy").inner_text().startswith("−")
    page.locator("iframe#live-enlarge").scroll_into_view_if_needed()
    frame = page.frame_locator("iframe#live-enlarge")
    frame.locator("#status", has_text="192 × 192 pixels in").wait_for()
