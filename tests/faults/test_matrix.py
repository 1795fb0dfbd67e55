"""The table of faults is whole, and the documentation shows it."""

import re
from pathlib import Path

import pytest
from matrix import CELLS, IN_CI, MODES, PHASES, ROWS, SIGNALS, VICTIMS, Promise, table

ROOT = Path(__file__).resolve().parents[2]
pytestmark = pytest.mark.fast


def test_every_cell_has_a_promise() -> None:
    assert ROWS.keys() == {(victim, signal) for victim in VICTIMS for signal in SIGNALS}
    in_turns = {(cell.victim, cell.phase, cell.signal) for cell in CELLS if cell.mode in ("none", "runner")}
    assert len(in_turns) == len(VICTIMS) * len(PHASES) * len(SIGNALS)
    assert len(CELLS) == len(set(CELLS))
    assert {cell.mode for cell in CELLS} == set(MODES)
    assert {cell.row.promise for cell in CELLS} == set(Promise)
    assert set(IN_CI) < set(CELLS)
    for row in ROWS.values():
        re.compile(row.evidence)


def test_the_page_shows_the_table_of_the_tests() -> None:
    page = (ROOT / "docs/reference/faults.md").read_text(encoding="utf-8")
    assert table() in page, f"docs/reference/faults.md needs this table:\n{table()}"
