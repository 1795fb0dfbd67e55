"""The page of the comparisons keeps cells that are not measured again."""

import sys
from types import ModuleType

import pytest
from tool_loading import TOOLS, load_tool

from nemo_rl.config import REPOSITORY_ROOT


@pytest.fixture
def parity_table(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(TOOLS))
    return load_tool("parity_table")


def test_cells_are_written_into_the_table_of_the_page(parity_table):
    page = (REPOSITORY_ROOT / "docs/reference/parity.md").read_text(encoding="utf-8")
    assert parity_table.page([], page) == page
    found = parity_table.Difference(0.0, 3e-2, "w", 0.0, 0.0)
    cells = [
        parity_table.Cell("llama", "cp2", True, "float32", 1e-5, found),
        parity_table.Cell("gpt-oss", "tp4+sp", False, "bfloat16", 1.0, None),
    ]
    changed = parity_table.page(cells, page)
    before, after = (parity_table.read_table(text, "float32") for text in (page, changed))
    assert after["cp2", "packed"].pop("llama") == "3e-02"
    before["cp2", "packed"].pop("llama")
    assert after == before
    assert parity_table.read_table(changed, "bfloat16")["tp4+sp", "padded"] == {"gpt-oss": "failed"}


def test_every_committed_cell_is_below_its_limit(parity_table):
    page = (REPOSITORY_ROOT / "docs/reference/parity.md").read_text(encoding="utf-8")
    exact, rounded = (parity_table.read_table(page, precision) for precision in parity_table.SHOWN)
    assert len(exact) >= 24 and rounded
    assert all(float(value) < parity_table.LIMIT for row in exact.values() for value in row.values())
    for (_, rows), row in rounded.items():
        for name, value in row.items():
            assert float(value) <= parity_table.BESIDE_ONE_RANK * float(rounded["1", rows][name])


def test_the_page_of_megatron_core_is_complete_and_below_its_limit(monkeypatch):
    monkeypatch.setattr(sys, "path", [str(TOOLS), *sys.path])
    tool = load_tool("megatron_parity_table")
    page = (REPOSITORY_ROOT / "docs/reference/parity-megatron.md").read_text(encoding="utf-8")
    assert tool.page({}, page) == page
    table = tool.read_table(page, tool.TITLE)
    for mesh in tool.MESHES:
        for rows in ("unpadded",) if mesh == tool.ROUNDING else tool.LAYOUTS:
            found = table[mesh, rows]
            assert found.keys() == {family for family in tool.FAMILIES if tool.applies(family, mesh)}
            for family, value in found.items():
                refused = bool(tool.refusals(family, mesh))
                assert (value == tool.REFUSED) == refused and (refused or float(value) < tool.LIMIT)
