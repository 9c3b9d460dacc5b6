# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""The system's Chromium without a window, which opens a file and keeps account of what the page does."""

import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

EXECUTABLES = ("chromium", "chromium-browser", "google-chrome")
_VIEWPORT = {"width": 1400, "height": 900}
_MOST_MS = 60_000


class OpenPage:
    """A page that has been sampled.

    Attributes:
        page: Playwright's page.
        problems: Errors and warnings of the console, and exceptions.
        requests: Addresses that were asked for, but for the file itself.
        dialogs: What scripts of the page have shown, such as an alert.
    """

    def __init__(self, page: Any, path: Path, state: str):
        self.page = page
        self.problems: list[str] = []
        self.requests: list[str] = []
        self.dialogs: list[str] = []
        page.on("console", self._hear)
        page.on("pageerror", lambda error: self.problems.append(str(error)))
        page.on("dialog", self._dismiss)
        page.route("**/*", lambda route: self._refuse(route, path.as_uri()))
        page.goto(path.as_uri())
        page.wait_for_selector("html[data-state]", timeout=_MOST_MS)
        assert page.evaluate("document.documentElement.dataset.state") == state, self.problems

    def plot(self, selector: str) -> list[dict[str, Any]]:
        """Return the traces of a chart, as plain values."""
        script = """(place) => place.data.map((trace) => JSON.parse(JSON.stringify(trace, (key, value) =>
            ArrayBuffer.isView(value) ? Array.from(value) : value)))"""
        traces: list[dict[str, Any]] = self.page.locator(selector).evaluate(script)
        return traces

    def _hear(self, message: Any) -> None:
        if message.type in ("error", "warning"):
            self.problems.append(message.text)

    def _dismiss(self, dialog: Any) -> None:
        self.dialogs.append(dialog.message)
        dialog.dismiss()

    def _refuse(self, route: Any, own: str) -> None:
        if route.request.url == own:
            route.continue_()
            return
        self.requests.append(route.request.url)
        route.abort()


@contextmanager
def running_browser() -> Iterator[Any]:
    """Chromium; the test is skipped where there is none, or no Playwright to drive it."""
    driver = pytest.importorskip("playwright.sync_api", reason="needs playwright: pip install -e '.[test]'")
    executable = next(filter(None, map(shutil.which, EXECUTABLES)), None)
    if executable is None:
        pytest.skip("needs Chromium: apt-get install chromium")
    with driver.sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=executable)
        yield browser
        browser.close()


def open_page(browser: Any, path: Path, state: str = "ready", **options: Any) -> OpenPage:
    """Open a report and waits until it is sampled: `ready`, or `incomplete` where a part of it cannot be."""
    return OpenPage(browser.new_page(viewport=_VIEWPORT, **options), path, state)
