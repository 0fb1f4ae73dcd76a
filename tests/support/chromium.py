"""A browser for the tests that need one. They are marked `browser` (see conftest.py)."""

import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

NAMES = ("chromium", "chromium-browser", "google-chrome")
CHROMIUM = next((found for name in NAMES if (found := shutil.which(name))), None)
FLAGS = ["--no-sandbox", "--disable-gpu", "--disable-background-networking", "--no-first-run"]
PATIENCE = 200_000
"""Milliseconds that a page may take for one step: below the limit of a test, far above need."""


@contextmanager
def opened() -> Iterator[Any]:
    """A browser whose pages wait long: a busy machine fails no test."""
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=FLAGS, timeout=PATIENCE)
        browser.new_page = _patient(browser.new_page)
        browser.new_context = _patient(browser.new_context)
        yield browser
        browser.close()


def _patient(make: Callable[..., Any]) -> Callable[..., Any]:
    def made(**options: Any) -> Any:
        page = make(**options)
        page.set_default_timeout(PATIENCE)
        return page

    return made
