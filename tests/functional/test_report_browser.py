"""The report and the live page in Chromium, as a user moves through them.

It needs Chromium and a group: `uv run --extra cpu --group test --group browser pytest -m long` with this file.
"""

import re
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from report_chromium import IN_CHROMIUM, TABS, browser, errors_of
from stored_run import HOSTILE, add_step, write_run

from nemo_rl.__main__ import main

__all__ = ["browser"]
pytestmark = [pytest.mark.long, *IN_CHROMIUM]
WIDTHS = {"desktop": 1280, "phone": 390}


class Visitor:
    """A page of the browser, and what went wrong in it."""

    def __init__(self, browser: Any, width: int, address: str) -> None:
        self.page = browser.new_page(viewport={"width": width, "height": 900})
        self.page.set_default_timeout(10_000)
        self.errors = errors_of(self.page)
        self.page.goto(address)

    def open(self, tab: str) -> None:
        self.page.click(f"#tab-{tab}")

    def expect_count(self, text: str) -> None:
        """Wait until the table of samples says how many it shows."""
        self.expect("#panel p[aria-live]", text)

    def expect(self, selector: str, text: str) -> None:
        """Wait until the first of some elements begins with a text; the page's policy allows no functions."""
        self.page.locator(f":nth-match({selector}, 1)").filter(has_text=re.compile(f"^{re.escape(text)}")).wait_for()

    def overflow(self) -> int:
        return int(self.page.evaluate("document.documentElement.scrollWidth - window.innerWidth"))


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("run")
    odd = "\u202e\x00\x07\x1b[31m</script> \u0645\u0631\u062d\u0628\u0627 \U0001f600 "
    written = write_run(folder, steps=8, text=HOSTILE)
    add_step(written, 9, {"reward": 1.0}, (odd * 50_000)[:1_000_000])
    return folder


@pytest.mark.parametrize("width", WIDTHS)
def test_every_tab_of_a_hostile_run_is_drawn(width: str, browser: Any, run: Path, tmp_path: Path) -> None:
    file = tmp_path / "report.html"
    assert main(["report", str(run), "--output", str(file), "--samples", "36"]) == 0
    visitor = Visitor(browser, WIDTHS[width], f"file://{file}")
    for tab in TABS:
        visitor.open(tab)
        assert visitor.overflow() <= 0, tab
    visitor.open("rollouts")
    visitor.expect_count("36 of 36 samples")
    visitor.page.locator("th button", has_text="step").first.click()
    visitor.page.locator("th button", has_text="step").first.click()
    visitor.expect("tr.choice td:nth-child(2)", "9")
    visitor.page.locator("tr.choice button").first.click()
    visitor.page.wait_for_selector("article .message.assistant")
    assert visitor.overflow() <= 0
    visitor.page.click(r"text=/Show \d+ more characters/", timeout=60_000)
    visitor.page.locator("article .message.assistant .body", has_text="(cut off)").wait_for(timeout=60_000)
    assert visitor.page.title() != "owned" and visitor.errors == []


def test_samples_are_filtered_sorted_and_compared(browser: Any, run: Path, tmp_path: Path) -> None:
    file = tmp_path / "report.html"
    assert main(["report", str(run), "--output", str(file), "--samples", "8"]) == 0
    visitor = Visitor(browser, 1280, f"file://{file}")
    visitor.open("rollouts")
    visitor.expect_count("8 of 36 samples")
    visitor.page.click("text=only samples with their conversation")
    visitor.expect_count("36 of 36 samples")
    check_filters(visitor)
    assert visitor.errors == []


@contextmanager
def watched(run: Path) -> Iterator[str]:
    """Serve the live page of a run and give its address."""
    command = [sys.executable, "-m", "nemo_rl", "watch", str(run), "--port", "0"]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as server:
        assert server.stderr is not None
        try:
            line = next(line for line in server.stderr if "http://" in line)
            yield line[line.index("http://") :].split()[0]
        finally:
            server.terminate()


@pytest.fixture
def address(run: Path) -> Iterator[str]:
    """The address of the live page of the run."""
    with watched(run) as address:
        yield address


def test_the_live_page_answers_the_same_and_follows_the_run(browser: Any, run: Path, address: str) -> None:
    visitor = Visitor(browser, 1280, address)
    visitor.open("rollouts")
    visitor.expect_count("36 of 36 samples")
    check_filters(visitor)
    visitor.open("overview")
    add_step(run / "exp_001", 10, {"reward": 1.0}, "a new answer")
    visitor.page.locator(".card", has_text="after 10 steps").first.wait_for()
    visitor.open("rollouts")
    visitor.expect_count("40 of 40 samples")
    add_step(run / "exp_001", 11, {"reward": 1.0}, "a new answer")
    visitor.page.click("text=4 new samples")
    visitor.expect_count("44 of 44 samples")
    visitor.page.locator("button", has_text="new samples").wait_for(state="detached")
    assert visitor.errors == []


def zoom(page: Any, metric: str) -> None:
    """Drag from a quarter to the middle of a chart."""
    box = page.locator(f"section[data-metric='{metric}'] .u-over").first.bounding_box()
    page.mouse.move(box["x"] + box["width"] / 4, box["y"] + 20)
    page.mouse.down()
    page.mouse.move(box["x"] + box["width"] / 2, box["y"] + 60, steps=4)
    page.mouse.up()


def axis_of(page: Any, metric: str) -> list[float]:
    """Return the first and the last step that a chart shows."""
    card = f"document.querySelector(\"section[data-metric='{metric}'] .plot\")"
    return list(page.evaluate(f"(({{ min, max }}) => [min, max])(DRAWN.get({card}).scales.x)"))


def test_the_address_names_what_is_open(browser: Any, tmp_path: Path) -> None:
    for name in ("one", "two"):
        write_run(tmp_path / name, steps=8, loss=[0.5] * 8, own_metric=[1.0, 2.0] * 4)
    file = tmp_path / "report.html"
    assert main(["report", str(tmp_path), "--output", str(file)]) == 0
    visitor = Visitor(browser, 1280, f"file://{file}")
    page = visitor.page
    visitor.open("rollouts")
    assert page.url.endswith("#rollouts")
    page.locator("label:has-text('run') select").first.select_option("1")
    assert page.url.endswith("#rollouts&run=two/exp_001")
    visitor.open("curves")
    page.go_back()
    page.wait_for_selector("#tab-rollouts[aria-selected=true]")
    page.go_back()
    page.locator("label:has-text('run') select >> nth=0").wait_for()
    assert page.url.endswith("#rollouts") and page.locator("label:has-text('run') select").first.input_value() == "0"
    page.go_back()
    page.wait_for_selector("#tab-overview[aria-selected=true]")
    page.goto("about:blank")
    page.goto(f"file://{file}#curves&metric=train/own_metric&has=own")
    assert page.locator("input[type=search]").input_value() == "own"
    assert page.locator(".card.wide").get_attribute("data-metric") == "train/own_metric"
    page.click("button[aria-label='Enlarge train/own_metric']")
    assert page.url.endswith("#curves&has=own")
    page.go_back()
    page.wait_for_selector(".card.wide button[aria-pressed=true]")
    page.goto("about:blank")
    page.goto(f"file://{file}#other&run=<b>&zoom=x:2&metric=%E0%A4%A&has=%")
    page.wait_for_selector("#tab-overview[aria-selected=true]")
    assert visitor.errors == []


def test_a_zoom_stays_when_the_run_goes_on_and_when_the_page_is_read_again(browser: Any, tmp_path: Path) -> None:
    written = write_run(tmp_path, steps=8)
    with watched(tmp_path) as address:
        visitor = Visitor(browser, 1280, address)
        page = visitor.page
        page.wait_for_selector("section[data-metric='train/reward'] .u-over")
        assert axis_of(page, "train/reward") == [1, 8]
        zoom(page, "train/reward")
        chosen = axis_of(page, "train/reward")
        assert 2 < chosen[0] < 3.5 and 4 < chosen[1] < 5.5
        add_step(written, 9, {"reward": 1.0}, "an answer")
        page.locator(".card", has_text="after 9 steps").first.wait_for()
        page.wait_for_selector("section[data-metric='train/reward'] .u-over")
        assert axis_of(page, "train/reward") == chosen
        page.reload()
        page.wait_for_selector("section[data-metric='train/reward'] .u-over")
        assert axis_of(page, "train/reward") == pytest.approx(chosen, abs=1e-4)
        page.locator("section[data-metric='train/reward'] .u-over").dblclick()
        page.wait_for_timeout(100)
        assert axis_of(page, "train/reward") == [1, 9] and "zoom" not in page.url
        assert visitor.errors == []


def test_a_sample_whose_file_was_written_again_is_told_in_words(browser: Any, tmp_path: Path) -> None:
    written = write_run(tmp_path, steps=2, text="a" + "\U0001f600" * 20_000)
    with watched(tmp_path) as address:
        visitor = Visitor(browser, 1280, address)
        visitor.open("rollouts")
        visitor.expect_count("8 of 8 samples")
        visitor.page.locator("tr.choice").first.click()
        visitor.page.locator("article .message.assistant button", has_text="Show 30002 more").wait_for()
        samples = written / "train_data_step2.jsonl"
        lines = samples.read_text().splitlines(keepends=True)
        samples.write_text("".join([*lines, lines[0], "[]\n"]))
        visitor.page.locator("tr.choice").last.click()
        visitor.page.locator("article", has_text="This sample's file was written again.").wait_for()
        visitor.page.locator("button", has_text="1 new sample").wait_for()
        visitor.page.fill("input[type=search]", "\U0001f600")
        visitor.expect_count("9 of 9 samples; 1 lines could not be read")
        visitor.page.locator("tr.choice").last.click()
        visitor.page.locator("article .message.assistant button").wait_for()
        (written / "train_data_step1.jsonl").unlink()
        (written / "train_data_step1.jsonl").symlink_to("/proc/self/mem")
        visitor.page.locator("#footer", has_text="train_data_step1.jsonl cannot be read").wait_for()


def test_an_answer_that_comes_late_replaces_nothing(browser: Any, tmp_path: Path) -> None:
    write_run(tmp_path, steps=2)
    held: list[Any] = []
    asked: list[str] = []
    with watched(tmp_path) as address:
        visitor = Visitor(browser, 1280, address)
        page = visitor.page
        page.on("request", lambda request: asked.append(request.url))
        visitor.open("rollouts")
        visitor.expect_count("8 of 8 samples")
        page.route("**/samples?*limit=32*", lambda route: held.append(route))
        page.locator("tr.choice").first.click()
        page.wait_for_selector("article .message")
        page.click("text=Its whole group")
        page.locator("tr.choice").last.click()
        last = page.locator("article", has_text="step 2")
        last.wait_for()
        with page.expect_response("**/samples?*limit=32*"):
            held[0].continue_()
        page.wait_for_timeout(300)
        assert page.locator("article").count() == 1 and last.count() == 1
        before = len([url for url in asked if re.search(r"/samples/\d+$", url)])
        page.locator("label:has-text('colour') select").select_option("advantage")
        page.wait_for_selector("text=From 1 to 1")
        assert before == len([url for url in asked if re.search(r"/samples/\d+$", url)]) == 2
        assert visitor.errors == []


def check_filters(visitor: Visitor) -> None:
    """Use each control of the table; the run has 9 steps of 2 groups with 2 samples of 2 and 3 tokens."""
    page = visitor.page
    for label, least, most, expected in (
        ("step", "3", "4", "8"),
        ("reward", "1.5", "2", "0"),
        ("tokens", "3", "9", "18"),
    ):
        lower = page.locator(f"label:has-text('{label} from') input").first
        upper = page.locator(f"input[aria-label='{label} to']")
        lower.fill(least)
        upper.fill(most)
        visitor.expect_count(f"{expected} of 36 samples")
        lower.fill("")
        upper.fill("")
        visitor.expect_count("36 of 36 samples")
    page.fill("input[type=search]", "&AMP;")
    visitor.expect_count("32 of 36 samples")
    page.fill("input[type=search]", "")
    visitor.expect_count("36 of 36 samples")
    page.locator("label:has-text('phase') select").select_option("train")
    page.locator("th button", has_text="length").first.click()
    page.locator("th button", has_text="length").first.click()
    visitor.expect("tr.choice td:nth-child(10)", "3")
    page.click("text=Next")
    page.wait_for_selector("text=page 2 of 2")
    page.click("text=Previous")
    page.wait_for_selector("text=page 1 of 2")
    page.locator("tr.choice").first.click()
    page.wait_for_selector("h2:has-text('Sample')")
    page.click("text=Its whole group")
    page.wait_for_selector("h2:has-text('2 samples side by side')")
    page.click("text=The same prompt over time")
    page.wait_for_selector("h2:has-text('samples side by side')")
    page.locator("label:has-text('colour') select").select_option("advantage")
    page.wait_for_selector("text=From 1 to 1")
    page.locator("label:has-text('colour') select").select_option("value")
    page.wait_for_selector("text=From 0.5 to 0.75")
