"""The reference page of all keys is generated from the schema, and it is current."""

from types import ModuleType

import pytest
from tool_loading import load_tool

pytestmark = pytest.mark.fast


@pytest.fixture(scope="module")
def generator() -> ModuleType:
    return load_tool("generate_config_reference")


def test_the_reference_page_is_current(generator):
    page = generator.DEFAULT_PAGE.read_text(encoding="utf-8")
    assert page == generator.reference_markdown(), "run python tools/generate_config_reference.py"


def test_every_key_has_a_sentence(generator):
    rows = [row for row in generator.reference_markdown().splitlines() if row.startswith("| `")]
    assert len(rows) > 200
    assert [row for row in rows if row.rstrip().endswith("|  |")] == []
