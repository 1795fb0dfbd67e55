"""The reference pages of all keys are generated from the schema, and they are current."""

import re
from types import ModuleType

import pytest
from tool_loading import load_tool

pytestmark = pytest.mark.fast


@pytest.fixture(scope="module")
def generator() -> ModuleType:
    return load_tool("generate_config_reference")


def test_the_reference_pages_are_current(generator):
    folder = generator.DEFAULT_FOLDER
    files = [folder / generator.INDEX, *(folder / "configuration").glob("*.md")]
    written = {path.relative_to(folder).as_posix(): path.read_text(encoding="utf-8") for path in files}
    assert written == generator.reference_pages(), "run python tools/generate_config_reference.py"


def test_every_key_has_a_sentence(generator):
    rows = [row for page in generator.reference_pages().values() for row in page.splitlines() if row.startswith("| `")]
    assert len(rows) > 200
    assert [row for row in rows if row.rstrip().endswith("|  |")] == []


def test_each_section_is_on_one_page_and_in_the_table_of_sections(generator):
    pages = generator.reference_pages()
    index = pages.pop(generator.INDEX)
    tables = [
        heading
        for page in pages.values()
        for heading in re.findall(r"^## ([a-z].*)$", page.replace("\\<", "<"), flags=re.MULTILINE)
    ]
    assert len(tables) == len(set(tables)) > 100
    assert sorted(re.findall(r"\[`([^`]+)`\]\(configuration/", index)) == sorted(tables)


@pytest.mark.parametrize(
    ("section", "page"),
    [
        ("policy.optimizer", "policy"),
        ("policy.dtensor_cfg.lora_cfg", "dtensor"),
        ("policy.generation.vllm_cfg", "generation"),
        ("env.math", "env"),
        ("env.llm_judge.engine", "judges"),
        ("reward_penalties.own.<name>", "grpo"),
        ("loss_fn (run_dpo.py)", "supervised"),
    ],
)
def test_a_section_is_on_the_page_of_the_nearest_section_that_has_one(generator, section, page):
    assert f"\n## {section}\n" in generator.reference_pages()[f"configuration/{page}.md"].replace("\\<", "<")


@pytest.mark.parametrize(
    "anchor", ["checkpointing", "policymegatron_cfg", "policy-megatron-cfg", "envmath", "loss_fn-run_sftpy"]
)
def test_links_to_a_section_of_the_former_single_page_lead_to_its_row(generator, anchor):
    assert generator.reference_pages()[generator.INDEX].count(f'<a id="{anchor}"></a>') == 1
