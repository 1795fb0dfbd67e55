"""The page of supported models is current, and its evidence is what the tests name."""

from collections.abc import Iterator
from types import ModuleType

import pytest
from tool_loading import TOOLS, load_tool


@pytest.fixture(scope="module")
def tool() -> Iterator[ModuleType]:
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(TOOLS))
        yield load_tool("model_support_table")


def test_the_page_is_current(tool: ModuleType) -> None:
    assert tool.DEFAULT_PAGE.read_text(encoding="utf-8") == tool.page(), "run python tools/model_support_table.py"


def test_evidence_comes_from_the_variables_of_a_test_and_not_from_its_neighbours(tool, tmp_path) -> None:
    file = tmp_path / "test_x.py"
    file.write_text(
        "MODELS = ('llama', 'qwen2')\nOTHERS = ('phi',)\n\n\ndef helper():\n    return 'gpt2'\n\n\n"
        "def test_one(model):\n    for name in MODELS:\n        helper()\n        assert name != 'bloom'\n"
    )
    assert tool.texts_of(file, "test_one") == {"llama", "qwen2", "bloom"}
    with pytest.raises(ValueError, match="has no test_two"):
        tool.texts_of(file, "test_two")


def test_axes_of_meshes_are_told_apart(tool: ModuleType) -> None:
    axes = {"tp", "cp", "pp", "ep"}
    meshes = {
        "1": set(),
        "dp2, distributed optimizer": set(),
        "dp2xtp2+sp": {"tp"},
        "cp2xtp2+sp": {"cp", "tp"},
        "pp2-interleaved": {"pp"},
        "pp2xvpp2": {"pp"},
        "tp2,ep2": {"tp", "ep"},
        "tp2+sp,ep2": {"tp", "ep"},
    }
    for mesh, wanted in meshes.items():
        assert {axis for axis in axes if tool._has(mesh, axis)} == wanted


def test_each_column_finds_architectures(tool: ModuleType) -> None:
    for column in tool.TESTS:
        assert {"llama", "qwen2"} & tool.proven(column), column
