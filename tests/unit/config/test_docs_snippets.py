"""Every YAML block of the guides is a working difference to the CPU configuration."""

import re
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml
from pydantic import Field

from nemo_rl.config import GRPOMasterConfig, PPOMasterConfig, SecondModelConfig, load_config

ROOT = Path(__file__).resolve().parents[3]
BASE = ROOT / "examples/configs/grpo_math_cpu.yaml"
PPO_BASE = ROOT / "examples/configs/ppo_math_cpu.yaml"
PAGES = [
    "docs/algorithms/grpo.md",
    "docs/algorithms/lora.md",
    "docs/algorithms/ppo.md",
    "README.md",
    "docs/development/adding-things.md",
    "docs/development/configuration.md",
    "docs/environments/environments.md",
    "docs/operations/network.md",
]
FILE_KEYS = ("data_path", "prompt_file", "system_prompt_file")


class WithCritic(GRPOMasterConfig):
    """The class that `adding-things.md` defines for the section `critic`."""

    critic: SecondModelConfig = Field(description="A second trained model.")


def blocks(page: str) -> list[str]:
    text = (ROOT / page).read_text(encoding="utf-8")
    return re.findall(r"^```yaml\n(.*?)^```", text, flags=re.DOTALL | re.MULTILINE)


def files_named_in(tree: object) -> Iterator[str]:
    if isinstance(tree, list):
        for below in tree:
            yield from files_named_in(below)
    elif isinstance(tree, dict):
        for key, below in tree.items():
            if key in FILE_KEYS and isinstance(below, str):
                yield below
            yield from files_named_in(below)


SNIPPETS = [pytest.param(text, id=f"{page}-{n}") for page in PAGES for n, text in enumerate(blocks(page))]


@pytest.mark.parametrize("snippet", SNIPPETS)
def test_each_snippet_of_the_docs_loads_and_passes_all_checks(snippet, tmp_path, monkeypatch):
    """Files of a reader exist as empty ones; everything else has to match the page."""
    tree = yaml.safe_load(snippet)
    monkeypatch.chdir(tmp_path)
    for name in files_named_in(tree):
        if not (ROOT / name).exists():
            (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
            (tmp_path / name).touch()
    schema = WithCritic if "critic" in tree else PPOMasterConfig if "ppo" in tree else GRPOMasterConfig
    inherits = "" if "defaults" in tree else f"defaults: {PPO_BASE if schema is PPOMasterConfig else BASE}\n"
    file = tmp_path / "snippet.yaml"
    file.write_text(inherits + snippet.replace("defaults: examples/", f"defaults: {ROOT}/examples/"))
    assert load_config(file, schema=schema).policy.model_name


def test_the_guide_has_all_variants():
    assert len(blocks("docs/algorithms/grpo.md")) > 30
