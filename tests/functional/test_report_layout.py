"""The report in Chromium, as wide as a phone, a laptop and a large screen: nothing overflows, and colours agree.

It needs Chromium and a group: `uv run --extra cpu --group test --group browser pytest -m long` with this file.
"""

import json
import math
from collections.abc import Callable
from functools import cache
from importlib import resources
from pathlib import Path
from typing import Any

import pytest
from report_chromium import IN_CHROMIUM, TABS, browser, errors_of
from stored_run import grey_png, row, write_run

from nemo_rl.__main__ import main

__all__ = ["browser"]
pytestmark = [pytest.mark.long, *IN_CHROMIUM]
WIDTHS = (390, 1280, 1366, 1920)
CHARTS = """[...document.querySelectorAll('.plot')].filter((plot) => plot.clientWidth).map((plot) => {
  const canvas = plot.querySelector('canvas'), inside = plot.getBoundingClientRect();
  const drawn = canvas ? canvas.getBoundingClientRect() : {width: 0, right: 0};
  const over = drawn.right - inside.right;
  return {name: plot.parentElement.dataset.metric, room: inside.width, width: drawn.width, over};
})"""
COLORS = """[...document.querySelectorAll('section[data-metric]')].map((card) => {
  const canvas = card.querySelector('canvas'), all = canvas.getContext('2d');
  const pixels = all.getImageData(0, 0, canvas.width, canvas.height).data;
  const found = new Map();
  for (let at = 0; at < pixels.length; at += 4) {
    if (pixels[at + 3] !== 255) continue;
    const color = `rgb(${pixels[at]}, ${pixels[at + 1]}, ${pixels[at + 2]})`;
    found.set(color, (found.get(color) || 0) + 1);
  }
  const colorOfValue = (value) => {
    const swatch = value.querySelector('.swatch');
    return swatch ? getComputedStyle(swatch).backgroundColor : null;
  };
  const series = DRAWN.get(card.querySelector('.plot')).series.slice(1);
  const labels = [...card.querySelectorAll('.value')].map((one) => [one.title, colorOfValue(one)]);
  return {name: card.dataset.metric, labels,
    strokes: series.map((one) => [one.label, one.stroke()]), pixels: Object.fromEntries(found)};
})"""
TABLE = """[...document.querySelectorAll('table.runs tr[data-run]')].map((row) =>
  [row.dataset.run, getComputedStyle(row.querySelector('.swatch')).backgroundColor])"""


def lr(value: float, seed: int = 1) -> dict[str, Any]:
    """Return sections of a configuration with a learning rate."""
    policy = {"model_name": "tiny", "optimizer": {"kwargs": {"lr": value}}}
    return {"policy": policy, "grpo": {"max_num_steps": 30, "seed": seed}}


def curve(steps: int, height: float) -> list[float]:
    return [height * (1 - math.exp(-step / 8)) + 0.05 * math.sin(3 * step * height) for step in range(steps)]


def one(folder: Path) -> None:
    write_run(folder, steps=30, loss=curve(30, 0.5), grad_norm=curve(30, 0.9))


def three(folder: Path) -> None:
    for name, value, seed, number in (("lr_1e-4", 1e-4, 1, 1), ("lr_1e-4", 1e-4, 2, 2), ("lr_3e-4", 3e-4, 1, 1)):
        height = 0.6 + 0.1 * seed + (0.2 if number == 1 and value > 2e-4 else 0.0)
        write_run(
            folder / name, 30, number=number, config=lr(value, seed), reward=curve(30, height), loss=curve(30, -height)
        )


def twelve(folder: Path) -> None:
    for number in range(1, 13):
        height = 0.3 + 0.05 * number
        write_run(
            folder, 30, number=number, config=lr(1e-5 * number), reward=curve(30, height), loss=curve(30, -height)
        )


def resumed(folder: Path) -> None:
    saving = lr(1e-4) | {"checkpointing": {"enabled": True, "checkpoint_dir": "results/x"}}
    write_run(folder, 12, config=saving, record={"status": "interrupted"}, loss=curve(12, 0.5))
    write_run(
        folder, 30, number=2, first=9, config=saving, record={"started": 5000.0, "ended": 5200.0}, loss=curve(22, 0.6)
    )


def failed(folder: Path) -> None:
    worker = "Worker lm_policy-0-0 (rank 0, node 127.0.0.1, pid 7)"
    error = f"WorkerFailedError: {worker} failed during 'train': RuntimeError: sizes"
    written = write_run(folder, 0, record={"status": "failed", "error": error})
    (written / "traceback.txt").write_text(
        'Traceback (most recent call last):\n  File "/env/site-packages/nemo_rl/a.py", line 5, in train\n'
        '    loss = self.loss(x)\n  File "/home/me/my_loss.py", line 22, in __call__\n    return weights * logprobs\n'
        '  File "/env/site-packages/torch/b.py", line 9, in mul\nRuntimeError: sizes\n'
    )


def agent(folder: Path) -> None:
    written = write_run(folder, 4)
    turns = [("user", "open the file"), ("assistant", "<tool_call>ls</tool_call>"), ("tool", "a.py " * 200)]
    talk = [{"role": role, "content": text} for role, text in [*turns, ("assistant", "done")]]
    rows = [row(5, group, 0, "", branch=0, content=talk, turn_rewards=[0.0, 1.0]) for group in range(2)]
    (written / "train_data_step4.jsonl").write_text("".join(json.dumps(each) + "\n" for each in rows))


def pictures(folder: Path) -> None:
    """Write samples with two images, of which one has a picture that is large on the page."""
    written = write_run(folder, 4)
    sizes = [[28, 28], [2000, 300]]
    images = [
        {"digest": f"{n:064x}", "source": "/data/" + "a" * 90 * n, "size": size, "tokens": [n, n + 1]}
        for n, size in enumerate(sizes)
    ]
    talk = [{"role": "user", "content": "<image><image>How many?"}, {"role": "assistant", "content": "3"}]
    rows = [row(5, group, 0, "", content=talk, images=images) for group in range(2)]
    (written / "train_data_step4.jsonl").write_text("".join(json.dumps(each) + "\n" for each in rows))
    (written / "images").mkdir()
    (written / f"images/{1:064x}.png").write_bytes(grey_png(3))


CASES: dict[str, Callable[[Path], None]] = {
    each.__name__: each for each in (one, three, twelve, resumed, failed, agent, pictures)
}


@pytest.fixture(scope="module")
def report(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    @cache
    def written(case: str) -> Path:
        folder = tmp_path_factory.mktemp(case)
        CASES[case](folder / "logs")
        assert main(["report", str(folder / "logs"), "--samples", "16"]) == 0
        return folder / "logs/report.html"

    return written


def opened(browser: Any, file: Path, width: int, scheme: str = "light") -> tuple[Any, list[str]]:
    """Open a page and return it with the list of its errors."""
    page = browser.new_page(viewport={"width": width, "height": 900}, color_scheme=scheme, bypass_csp=True)
    errors = errors_of(page)
    page.goto(f"file://{file}")
    return page, errors


def check_widths(page: Any, where: object) -> None:
    """Nothing is wider than the page, and each chart is as wide as its card has room."""
    page.wait_for_timeout(50)
    assert page.evaluate("document.documentElement.scrollWidth - document.documentElement.clientWidth") <= 0, where
    for chart in page.evaluate(CHARTS):
        assert chart["over"] <= 0.5 and chart["room"] - chart["width"] <= 1.5, (where, chart)


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("case", CASES)
def test_nothing_overflows_and_axe_finds_nothing(case: str, scheme: str, browser: Any, report: Any) -> None:
    axe = resources.files("axe_playwright_python").joinpath("axe.min.js").read_text(encoding="utf-8")
    for width in WIDTHS:
        page, errors = opened(browser, report(case), width, scheme)
        page.evaluate(axe)
        for tab in TABS:
            page.click(f"#tab-{tab}")
            if tab == "rollouts" and case != "failed":
                page.locator("tr.choice button").first.click()
                page.wait_for_selector("article .message")
            check_widths(page, (width, tab))
            if width in WIDTHS[:2]:
                found = page.evaluate(
                    "axe.run().then((found) => found.violations.map((one) => [one.id, one.nodes[0].html]))"
                )
                assert found == [], (width, tab)
        assert errors == []
        page.close()


def test_charts_follow_the_width_of_the_window(browser: Any, report: Any) -> None:
    page, errors = opened(browser, report("three"), 1280)
    for width in (*range(850, 874, 2), *range(1678, 1702, 2), 390, 1280):
        page.set_viewport_size({"width": width, "height": 900})
        check_widths(page, width)
    page.click("#tab-curves")
    page.fill("input[type=search]", "train/reward")
    page.set_viewport_size({"width": 1280, "height": 400})
    check_widths(page, "a scroll bar")
    page.click("text=⤢")
    check_widths(page, "a large chart")
    assert page.evaluate("document.querySelector('.wide .plot').clientHeight") > 300 and errors == []


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize(("case", "groups"), [("three", 2), ("twelve", 12)])
def test_a_run_has_one_colour_in_table_legend_and_line(
    case: str, groups: int, scheme: str, browser: Any, report: Any
) -> None:
    page, _ = opened(browser, report(case), 1280, scheme)
    check_widths(page, case)
    table = dict(page.evaluate(TABLE))
    assert len(table) == groups == len(set(table.values()))
    for drawn in page.evaluate(COLORS):
        labels = dict(drawn["labels"])
        assert labels and labels.items() <= table.items(), drawn["name"]
        for label, stroke in drawn["strokes"]:
            exact = ", ".join(str(int(stroke[at : at + 2], 16)) for at in (1, 3, 5))
            assert labels[label] == f"rgb({exact})", (drawn["name"], label)
        if drawn["name"] == "train/reward":
            assert all(drawn["pixels"].get(color, 0) > 20 for color in labels.values()), drawn["pixels"]
    page.click("#tab-curves")
    legend = page.evaluate("[...document.querySelectorAll('.legend span[data-run]')].map((one) => one.dataset.run)")
    assert sorted(legend) == sorted(table)


def test_what_the_pages_say(browser: Any, report: Any) -> None:
    page, _ = opened(browser, report("three"), 1280)
    assert (
        page.locator("tr[data-run='lr_1e-4 (2 seeds)']").count() == 1
        and page.locator("tr[data-run='lr_3e-4']").count() == 1
    )
    page.click("text=join runs that differ")
    assert page.locator("tr[data-run]").count() == 3
    page.click("th button:has-text('train/reward, last')")
    page.click("th button:has-text('train/reward, last')")
    assert page.locator("tr[data-run]").first.get_attribute("data-run") == "lr_3e-4"
    page.click("#tab-curves")
    count = len(page.evaluate("namesOf(DATA.runs)"))
    assert page.locator("p[aria-live]").inner_text() == f"{count} metrics"
    assert page.locator("details[data-prefix='main'] section").count() >= 2
    page, _ = opened(browser, report("failed"), 390)
    text = page.locator("#panel").inner_text()
    assert (
        "failed before the end of its first step" in text
        and "in worker lm_policy-0-0" in text
        and "during train" in text
    )
    assert "/home/me/my_loss.py:22 in __call__" in text and "return weights * logprobs" in text
    page.click("#tab-rollouts")
    page.wait_for_selector("text=The run ended before its first step")
    page, _ = opened(browser, report("resumed"), 1280)
    assert "went on from exp_001 (interrupted)" in page.locator("#panel").inner_text()
    assert page.evaluate("DATA.runs.map((run) => run.curves['train/loss'].steps.length)") == [30]


def test_one_value_is_a_number_and_few_points_are_not_smoothed(browser: Any, tmp_path: Path) -> None:
    written = write_run(tmp_path, 30, loss=curve(30, 0.5))
    with (written / "metrics.jsonl").open("a") as file:
        for prefix, steps in (("validation", range(30)), ("new", range(30, 31))):
            for step in steps:
                line = {"step": step, "prefix": prefix, "metrics": {"accuracy": float(step % 2)}, "time": 2000.0}
                file.write(json.dumps(line) + "\n")
    assert main(["report", str(tmp_path)]) == 0
    page, _ = opened(browser, tmp_path / "report.html", 1280)
    check_widths(page, "overview")
    lines = {drawn["name"]: len(drawn["strokes"]) for drawn in page.evaluate(COLORS)}
    assert lines["train/loss"] == 2 and lines["validation/accuracy"] == 1, "smoothed values have a second, pale line"
    page.click("#tab-curves")
    page.fill("input[type=search]", "new/")
    assert page.locator("tr[data-metric='new/accuracy'] td.number").inner_text() == "0"
