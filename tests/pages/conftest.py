"""A browser for the tests that are marked `browser`.

They run if MVRBM_BROWSER is set: to 1, or to `required`, which makes a missing browser a failure.
"""

import os
import shutil
from pathlib import Path

import numpy as np
import pytest

PROGRAMS = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable", "chrome", "msedge")
WANTED = os.environ.get("MVRBM_BROWSER", "")


def _unavailable(reason):
    (pytest.fail if WANTED == "required" else pytest.skip)(reason)


@pytest.fixture(scope="session")
def unavailable():
    """Skip a test for a reason, or fail where nothing may be skipped."""
    return _unavailable


@pytest.fixture(scope="session")
def browser():
    """A Chromium without a window."""
    if not WANTED:
        pytest.skip("tests in a browser run with `make browser-test`")
    program = next((found for name in PROGRAMS if (found := shutil.which(name))), None)
    if program is None:
        _unavailable("no Chrome or Chromium was found: apt-get install -y chromium")
    try:
        from playwright.sync_api import sync_playwright
    except ModuleNotFoundError:
        _unavailable("the package playwright is missing: pip install 'mvrbm[browser]'")
    with sync_playwright() as playwright:
        # A container has no user namespaces for the sandbox; the pages are our own.
        chromium = playwright.chromium.launch(executable_path=program, args=["--no-sandbox"])
        yield chromium
        chromium.close()


class Visit:
    """One page in a browser, with everything that it asked for and complained about."""

    def __init__(self, browser, path, *, width=1280, scheme="light", motion="reduce", **options):
        self.folder = Path(path).parent
        self.context = browser.new_context(
            viewport={"width": width, "height": 900}, color_scheme=scheme, reduced_motion=motion, **options
        )
        self.errors, self.outside = [], []
        self.page = self.context.new_page()
        self.page.on("console", lambda message: self.errors.append(message.text) if message.type == "error" else None)
        self.page.on("pageerror", lambda error: self.errors.append(str(error)))
        self.page.route("**/*", self._allow_files)
        self.page.goto(Path(path).as_uri())

    def _allow_files(self, route):
        """Let files through, and record and stop everything else."""
        if route.request.url.startswith(("file:", "data:", "blob:")):
            route.continue_()
        else:
            self.outside.append(route.request.url)
            route.abort()

    def check_looks(self, scheme):
        """Nothing is wider than the screen, and the background has the brightness of the scheme."""
        self.page.wait_for_timeout(100)
        assert self.page.evaluate("document.documentElement.scrollWidth - innerWidth") <= 0
        background = self.page.evaluate("getComputedStyle(document.body).backgroundColor")
        brightness = np.mean([int(part) for part in background.strip("rgb()").split(", ")])
        assert brightness > 200 if scheme == "light" else brightness < 60

    def check(self):
        assert self.errors == []
        assert self.outside == []


@pytest.fixture
def visit(browser):
    """Open pages; afterwards, no one may have complained, or asked for anything outside."""
    visits = []

    def open_page(path, **options):
        visits.append(Visit(browser, path, **options))
        return visits[-1]

    yield open_page
    for each in visits:
        each.check()
        each.context.close()
