"""Write docs/reference/configuration.md and the pages in docs/reference/configuration/ from the configuration schema.

Run it after every change of `nemo_rl/config/`: `python tools/generate_config_reference.py`. A test checks that the
committed pages are current. The first page lists the sections; their tables are on the other pages. Invariant: all keys
come from the schema.
"""

import argparse
import ast
import inspect
import json
import re
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import cache
from itertools import pairwise
from pathlib import Path
from typing import Any

from pydantic import BaseModel
from pydantic.fields import FieldInfo
from pydantic_core import PydanticUndefined

from nemo_rl.config.base.paths import REPOSITORY_ROOT
from nemo_rl.config.base.structure import Slot, type_text
from nemo_rl.config.loading.algorithms import ALGORITHMS
from nemo_rl.config.runs.rollouts import GRPOMasterConfig
from nemo_rl.config.runs.service import ServiceMasterConfig

DEFAULT_FOLDER = REPOSITORY_ROOT / "docs" / "reference"
INDEX = "configuration.md"
"""The page that lists the sections."""

_HEAD = """# Configuration reference

Every key, made from the schema in `nemo_rl/config/` by `python tools/generate_config_reference.py`. The keys are on one
page for each row of [the table of sections](#sections).

- A default `${.key}` follows the key next to it, `${..key}` a key one section up, `${a.b}` the key with that
  full name. The arithmetic `${mul:a,b}`, `${div:a,b}`, `${add:a,b}` and `${max:a,b}` may be used in files.
- `required` means that the key has no default.
- A file inherits from others with `defaults: other.yaml` or a list of files, relative to the file that
  names them. Mappings merge key by key, lists are replaced, and a mapping with `_override_: true` replaces
  the inherited one as a whole. A section without keys inherits all.
- Command-line overrides: `key=value` sets, `+key=value` adds, `++key=value` does either, `~key` returns to
  the default; `key=[1,2]` replaces a list and `key.0=9` changes one element.
- A relative path means the current folder first, then the repository root. Outputs
  (`logger.log_dir`, `checkpointing.checkpoint_dir`) are relative to the current folder.
- A key that is not listed here is refused, with the nearest valid key.
"""
_SECTIONS = """## Sections

GRPO (`examples/run_grpo.py`) has the sections without the name of a script. The other algorithms have the same
sections `policy`, `data`, `checkpointing`, `logger` and `cluster`, PPO and distillation also `env`, PPO also `loss_fn`.
A section that is marked with their script replaces one of the same name. Parts of `teacher`, `teachers.<name>` and
`value` that have no table are those of `policy`.

| page | sections |
|---|---|
"""
_ABOUT = """The [configuration reference](../configuration.md) explains defaults such as `${.key}`, files and overrides.
"""
_LATER = """# Keys of NeMo RL without effect

## Accepted only while switched off

These keys of NeMo RL belong to features that do not exist here yet. `null`, `false`, `0`, an empty value,
`enabled: false` with any other keys, and the values of the last column are accepted; anything else is refused.

| key | feature | accepted too |
|---|---|---|
"""
_ACCEPTED_ROW = (
    "| [Keys of NeMo RL without effect](configuration/accepted.md) | "
    "[accepted only while switched off](configuration/accepted.md#accepted-only-while-switched-off), "
    "[accepted without effect](configuration/accepted.md#accepted-without-effect) |\n"
)
_IGNORED = """## Accepted without effect

| key | why |
|---|---|
"""


@dataclass(frozen=True)
class _Page:
    """A page with tables of sections."""

    file: str
    """Name without suffix."""
    title: str
    """Heading of the page."""
    places: tuple[str, ...]
    """The sections of GRPO with these names, and the sections in them that no other page has."""
    scripts: tuple[str, ...] = ()
    """Algorithms whose own sections are here."""


_PAGES = (
    _Page("policy", "The policy", ("policy",)),
    _Page("dtensor", "The PyTorch backend", ("policy.dtensor_cfg",)),
    _Page("megatron", "The Megatron Core backend", ("policy.megatron_cfg",)),
    _Page("generation", "Generation", ("policy.generation",)),
    _Page("data", "Data", ("data",)),
    _Page("checkpointing", "Checkpoints", ("checkpointing",)),
    _Page("logger", "Logs and trackers", ("logger",)),
    _Page("cluster", "Machines and processes", ("cluster", "data_plane")),
    _Page("env", "Environments", ("env",)),
    _Page("judges", "Reward models and judges", ("env.reward_model", "env.llm_judge")),
    _Page(
        "grpo",
        "GRPO",
        ("loss_fn", "grpo", "async_rl", "reward_penalties", "effort_levels", "on_policy_distillation", "teachers"),
    ),
    _Page("ppo", "PPO", (), ("ppo",)),
    _Page("supervised", "SFT, DPO and reward models", (), ("sft", "dpo", "rm")),
    _Page("distillation", "Distillation", (), ("distillation",)),
    _Page("eval", "Evaluation", (), ("eval",)),
    _Page("service", "The training service", (), ("serve",)),
)


@dataclass(frozen=True)
class _Block:
    """One section of a page: its dotted path and its class."""

    path: str
    section: type[BaseModel]
    script: str = ""
    """The algorithm that has it in place of GRPO's section, or alone; "" if GRPO has it."""

    @property
    def heading(self) -> str:
        """The heading of its table."""
        if self.script == "serve":
            return f"{self.path} (nemo_rl serve)"
        return f"{self.path} (run_{self.script}.py)" if self.script else self.path

    @property
    def anchor(self) -> str:
        """The anchor of its heading, as GitHub and MyST make it."""
        return re.sub(r"[^\w\- ]", "", self.heading.lower()).replace(" ", "-")

    @property
    def page(self) -> _Page:
        """The page of its table."""
        if self.script:
            return next(page for page in _PAGES if self.script in page.scripts)
        above = re.split(r"[.\[]", self.path)
        names = {".".join(above[:count]) for count in range(1, len(above) + 1)}
        return max(_PAGES, key=lambda page: max((len(place) for place in page.places if place in names), default=0))


def reference_pages() -> dict[str, str]:
    """Return the Markdown of each page by its path in docs/reference/."""
    given = _without_repetitions(_blocks(GRPOMasterConfig, ""))
    blocks = [block for block in given if block.path]
    blocks += _other_blocks({(block.path, block.section) for block in given})
    pages = {INDEX: _HEAD + "\n" + _SECTIONS}
    for page in _PAGES:
        here = [block for block in blocks if block.page is page]
        tables = [_table(block) for block in here]
        pages[f"configuration/{page.file}.md"] = f"# {page.title}\n\n{_ABOUT}\n" + "\n".join(tables)
        again = Counter[str]()
        entries = [_entry(block, again) for block in here]
        pages[INDEX] += f"| [{page.title}](configuration/{page.file}.md) | {', '.join(entries)} |\n"
    later = [row for block in given for row in _extra_rows(block, "later")]
    ignored = [row for block in given for row in _extra_rows(block, "ignored")]
    pages["configuration/accepted.md"] = _LATER + "\n".join(later) + "\n\n" + _IGNORED + "\n".join(ignored) + "\n"
    pages[INDEX] += _ACCEPTED_ROW
    return pages


def _entry(block: _Block, before: Counter[str]) -> str:
    """Return a link to a section, at the anchors that its table had when all tables were on one page.

    Args:
        before: how often each anchor occurs above on the page; it is counted on.
    """
    anchor = f"{block.anchor}-{before[block.anchor]}" if before[block.anchor] else block.anchor
    before[block.anchor] += 1
    in_the_site = re.sub(r"(<[^>]*>|[^a-z0-9])+", "-", block.heading.lower()).strip("-")
    old = [anchor] if anchor != block.anchor else dict.fromkeys([anchor, in_the_site])
    anchors = "".join(f'<a id="{each}"></a>' for each in old)
    return f"{anchors}[`{block.heading}`](configuration/{block.page.file}.md#{anchor})"


def _other_blocks(shown: set[tuple[str, type[BaseModel]]]) -> list[_Block]:
    """Return the sections that only the other algorithms have."""
    found = []
    for script, schema in {**ALGORITHMS, "serve": ServiceMasterConfig}.items():
        for block in _blocks(schema, ""):
            if block.path and (block.path, block.section) not in shown and not _repeats_policy(block, shown):
                shown.add((block.path, block.section))
                found.append(_Block(block.path, block.section, script))
    return found


def _without_repetitions(blocks: Iterable[_Block]) -> list[_Block]:
    """Return the sections except those of other models that repeat sections of the policy."""
    given = list(blocks)
    shown = {(block.path, block.section) for block in given}
    return [block for block in given if not _repeats_policy(block, shown)]


def _repeats_policy(block: _Block, shown: set[tuple[str, type[BaseModel]]]) -> bool:
    """Return whether this is a section of another model that the page has already described for the policy."""
    place = re.sub(r"^(teacher|value|teachers\.<name>)\.", "", block.path)
    return place != block.path and (f"policy.{place}", block.section) in shown


def _blocks(section: type[BaseModel], path: str) -> Iterator[_Block]:
    """Yield the section and all sections below it, each class once per path."""
    yield _Block(path, section)
    for name, field in section.model_fields.items():
        slot = Slot.of(field.annotation, field.metadata)
        place = f"{path}.{name}" if path else name
        for below in dict.fromkeys(slot.sections):
            yield from _blocks(below, place)
        if slot.item is not None:
            for below in dict.fromkeys(slot.item.sections):
                if below not in slot.sections:
                    yield from _blocks(below, f"{place}[]")
        if slot.values is not None:
            yield from _blocks(slot.values.sections[0], f"{place}.<name>")
        if slot.named is not None:
            for key, below in slot.named.sections.items():
                yield from _blocks(below, f"{place}.{key}")


def _table(block: _Block) -> str:
    rows = [
        f"| `{name}` | {_cell(type_text(field.annotation, field.metadata))} | {_default(block.section, name, field)} "
        f"| {_cell(_sentence(block.section, name))} |"
        for name, field in block.section.model_fields.items()
    ]
    intro = (block.section.__doc__ or "").strip()
    heading = block.heading.replace("<", "\\<")
    if not rows:
        return f"## {heading}\n\n{intro} No keys of its own.\n"
    head = "| key | type | default | meaning |\n|---|---|---|---|"
    return f"## {heading}\n\n{intro}\n\n{head}\n" + "\n".join(rows) + "\n"


def _sentence(section: type[BaseModel], name: str) -> str:
    """Return the text below a key in the source of its section; pydantic's own reading of it would cost every start."""
    given = section.model_fields[name].description
    declared = next(kind for kind in section.__mro__ if name in vars(kind).get("__annotations__", {}))
    return given or _texts(declared).get(name, "")


@cache
def _texts(section: type) -> dict[str, str]:
    """Return the text below each key that a class declares."""
    (found,) = (node for node in _tree(inspect.getfile(section)).body if getattr(node, "name", "") == section.__name__)
    body = found.body if isinstance(found, ast.ClassDef) else []
    return {
        key.target.id: " ".join(text.value.value.split())
        for key, text in pairwise(body)
        if isinstance(key, ast.AnnAssign)
        and isinstance(key.target, ast.Name)
        and isinstance(text, ast.Expr)
        and isinstance(text.value, ast.Constant)
        and isinstance(text.value.value, str)
    }


@cache
def _tree(file: str) -> ast.Module:
    return ast.parse(Path(file).read_text(encoding="utf-8"))


def _default(section: type[BaseModel], name: str, field: FieldInfo) -> str:
    inherits = getattr(section, "inherits", "")
    if inherits:
        return f"`${{{inherits}.{name}}}`"
    if field.default_factory is not None:
        factory: Any = field.default_factory
        is_section = isinstance(factory, type) and issubclass(factory, BaseModel)
        return "see below" if is_section else f"`{_yaml(factory())}`"
    if field.default is PydanticUndefined:
        return "required"
    return _code(_yaml(field.default))


def _yaml(value: Any) -> str:
    if value is None:
        return "null"
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, dict):
        return "{" + ", ".join(f"{key}: {_yaml(below)}" for key, below in value.items()) + "}"
    return json.dumps(value) if isinstance(value, str) and "\n" in value else str(value)


def _extra_rows(block: _Block, kind: str) -> list[str]:
    extra: dict[str, str] = getattr(block.section, kind, {})
    prefix = f"{block.path}." if block.path else ""
    neutral: dict[str, tuple[Any, ...]] = getattr(block.section, "neutral", {}) if kind == "later" else {}
    last = [f" {', '.join(f'`{value}`' for value in neutral.get(key, ())) or '-'} |" for key in sorted(extra)]
    rows = [f"| `{prefix}{key}` | {_cell(text)} |" for key, text in sorted(extra.items())]
    return [row + end for row, end in zip(rows, last, strict=True)] if kind == "later" else rows


def _cell(text: str) -> str:
    return text.replace("|", "\\|")


def _code(text: str) -> str:
    """Return a text as code in a cell; one with a backtick stands between two."""
    return _cell(f"`` {text} ``" if "`" in text else f"`{text}`")


def main() -> None:
    """Write the pages, and remove those that no longer exist."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--output", type=Path, default=DEFAULT_FOLDER, help="folder to write to")
    output: Path = parser.parse_args().output
    pages = reference_pages()
    (output / "configuration").mkdir(parents=True, exist_ok=True)
    for name, text in pages.items():
        (output / name).write_text(text, encoding="utf-8")
    for old in (output / "configuration").glob("*.md"):
        if f"configuration/{old.name}" not in pages:
            old.unlink()
    print(f"wrote {len(pages)} pages to {output}")


if __name__ == "__main__":
    main()
