"""The notebook page: its code is that of the example, and all of it runs."""

import re
import subprocess
import sys
from pathlib import Path

import pytest
from example_runs import REPOSITORY, run_environment
from transformers import AutoModelForCausalLM

PAGE = REPOSITORY / "docs/start/notebook.md"
EXAMPLE = REPOSITORY / "examples/own_loss.py"


def blocks() -> list[str]:
    return re.findall(r"^```python\n(.*?)^```", PAGE.read_text(encoding="utf-8"), flags=re.DOTALL | re.MULTILINE)


def cells() -> list[str]:
    """Return the code of the example's cells, without their titles."""
    parts = re.split(r"^# %%.*\n", EXAMPLE.read_text(encoding="utf-8"), flags=re.MULTILINE)
    return [part.strip() for part in parts[1:]]


def test_the_page_shows_the_example_cell_by_cell() -> None:
    assert [block.strip() for block in blocks()[: len(cells())]] == cells()
    assert len(cells()) == 5


def test_the_example_is_notebook_sized() -> None:
    assert len(EXAMPLE.read_text(encoding="utf-8").splitlines()) <= 60


@pytest.mark.ray
@pytest.mark.timeout(180)
def test_the_code_of_the_page_runs_and_the_loss_falls(tmp_path: Path) -> None:
    """All blocks run in order, in a separate script in another folder, as for a reader."""
    (tmp_path / "page.py").write_text("\n\n".join(blocks()), encoding="utf-8")
    done = subprocess.run(
        [sys.executable, "page.py"], cwd=tmp_path, env=run_environment(), capture_output=True, text=True, timeout=170
    )
    assert done.returncode == 0, done.stderr[-3000:]
    losses = [float(value) for value in re.findall(r"^step \d  loss=([\d.]+)", done.stdout, flags=re.MULTILINE)]
    assert len(losses) == 3
    assert losses[0] > losses[1] > losses[2]
    assert "nll_max" in done.stdout
    AutoModelForCausalLM.from_pretrained(tmp_path / "results/own_loss/model")
