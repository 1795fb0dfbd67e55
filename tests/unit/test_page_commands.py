"""Commands, Python blocks and named tests of the pages on operation, and of the use cases, without running a program.

`tests/functional/test_documented_commands.py` and `test_use_cases_cpu.py` run the commands.
"""

import argparse
import ast
import contextlib
import io
import re
import shlex
from pathlib import Path

import pytest

from nemo_rl.__main__ import COMMANDS
from nemo_rl.config import load_config
from nemo_rl.config.loading.algorithms import ALGORITHMS, algorithm_of
from nemo_rl.config.loading.overrides import dotlist_to_overrides

ROOT = Path(__file__).resolve().parents[2]
PAGES = [
    ROOT / "docs/environments/environments.md",
    ROOT / "docs/machines/sizing.md",
    ROOT / "docs/reference/model-support.md",
    *sorted((ROOT / "docs/operations").glob("*.md")),
    *sorted((ROOT / "docs/use-cases").glob("*.md")),
]
FILE_KEYS = r"(?:data_path|dataset_name|model_name|checkpoint_path)(?:=|: )([\w./-]+/[\w./-]+)"
PREFIX = re.compile(r"^(?:\w+=\S+ )*uv run (?:--extra \w+ )*")


def block_texts(page: Path, language: str) -> list[str]:
    text = page.read_text(encoding="utf-8")
    return re.findall(rf"^```{language}\n(.*?)^```", text, flags=re.DOTALL | re.MULTILINE)


def commands(page: Path) -> list[str]:
    """The commands of the `sh` blocks; those in a loop of the shell without the loop."""
    found = []
    for block in block_texts(page, "sh"):
        joined = re.sub(r" *\\\n *", " ", block)
        joined = re.sub(r"for \w+ in [^;]*; do |; done", "", joined).replace("$seed", "1")
        found += [line for line in joined.splitlines() if PREFIX.match(line)]
    return [PREFIX.sub("", command) for command in found]


EVERY = [pytest.param(text, id=f"{page.stem}-{n}") for page in PAGES for n, text in enumerate(commands(page))]
RUNS = [param for param in EVERY if re.match(r"python examples/run_\w+\.py|nemo_rl doctor", str(param.values[0]))]


@pytest.fixture
def of_a_reader(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder in which files that a command reads exist, as earlier commands of the page have written them."""
    (tmp_path / "examples").symlink_to(ROOT / "examples")
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.mark.parametrize("command", RUNS)
def test_each_run_is_a_valid_configuration(command: str, of_a_reader: Path) -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--config", type=Path, required=True)
    known, overrides = parser.parse_known_args(shlex.split(command)[2:])
    overrides = [text for text in overrides if not text.startswith("--")]
    for name in re.findall(FILE_KEYS, f"{known.config.read_text()} {command}"):
        if not Path(name).exists():
            (Path(name) if Path(name).suffix else Path(name) / "unused").parent.mkdir(parents=True, exist_ok=True)
            if Path(name).suffix:
                Path(name).touch()
    schema = ALGORITHMS[algorithm_of(known.config)]
    overrides = dotlist_to_overrides(overrides) if "run_eval" in command else overrides
    config = load_config(known.config, overrides, schema=schema)
    assert config.cluster.device == "cpu"


def test_commands_are_found() -> None:
    assert len(RUNS) > 30
    assert {page.stem for page in PAGES if not commands(page)} <= {"model-support"}


@pytest.mark.parametrize("command", EVERY)
def test_programs_exist(command: str) -> None:
    words = shlex.split(command)
    if words[0] == "python" and words[1].endswith(".py"):
        assert (ROOT / words[1]).exists()
    elif words[:2] == ["python", "-c"]:
        ast.parse(words[2])
    else:
        assert words[0] == "nemo_rl" and words[1] in {command.NAME for command in COMMANDS}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_python_blocks_print_what_the_page_shows(page: Path) -> None:
    shown = re.findall(
        r"^```python\n(.*?)^```\n\n(?:```text\n(.*?)^```)?", page.read_text(), flags=re.DOTALL | re.MULTILINE
    )
    for block, wanted in shown:
        printed = io.StringIO()
        with contextlib.redirect_stdout(printed):
            exec(compile(block, str(page), "exec"), {"__name__": "shown"})
        assert printed.getvalue() == wanted


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_named_tests_exist(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    for file, name in re.findall(r"`(?:tests/unit/models/)?([\w/]+\.py)::(test_\w+)`", text):
        path = ROOT / file if file.startswith("tests/") else ROOT / "tests/unit/models" / file
        defined = {node.name for node in ast.parse(path.read_text()).body if isinstance(node, ast.FunctionDef)}
        assert name in defined, f"{file}::{name}"


def test_each_anchor_is_a_heading() -> None:
    """A link to a part of a page leads to a heading, by GitHub's rule for their names."""
    missing = []
    for page in PAGES:
        prose = re.sub(r"^```.*?^```", "", page.read_text(encoding="utf-8"), flags=re.DOTALL | re.MULTILINE)
        for target, anchor in re.findall(r"\]\(([\w./-]*)#([\w-]+)\)", prose):
            there = page if not target else page.parent / target
            headings = re.findall(r"^#+ (.*)$", there.read_text(encoding="utf-8"), flags=re.MULTILINE)
            slugs = {re.sub(r"[^\w -]", "", heading.lower()).replace(" ", "-") for heading in headings}
            missing += [f"{page.name}: {target}#{anchor}"] if anchor not in slugs else []
    assert missing == []
