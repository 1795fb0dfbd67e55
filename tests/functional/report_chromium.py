"""Chromium for the tests of the report's page, and what these tests have in common."""

import shutil
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "unit/report"))  # for `stored_run`

sync_api = pytest.importorskip("playwright.sync_api", reason="needs the group `browser`")
CHROMIUM = shutil.which("chromium") or shutil.which("google-chrome")
IN_CHROMIUM = [pytest.mark.timeout(280), pytest.mark.skipif(CHROMIUM is None, reason="needs Chromium")]
"""Marks of each test file that opens a page, besides `long`, which the tables of tests read in the file itself."""
TABS = ("overview", "curves", "time", "rollouts", "config")


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    with sync_api.sync_playwright() as playwright:
        chromium = playwright.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        yield chromium
        chromium.close()


def errors_of(page: Any) -> list[str]:
    """Return a list that gets the errors and warnings of a page."""
    errors: list[str] = []
    page.on("console", lambda message: errors.append(message.text) if message.type in ("error", "warning") else None)
    page.on("pageerror", lambda error: errors.append(str(error)))
    return errors
