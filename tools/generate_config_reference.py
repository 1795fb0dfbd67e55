"""Write docs/reference/configuration.md from the configuration schema.

Run it after every change of `nemo_rl/config/`: `python tools/generate_config_reference.py`. A test checks that the
committed page is current. Invariant: everything on the page comes from the schema.
"""

import argparse
import ast
import inspect
from collections.abc import Iterator
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

DEFAULT_PAGE = REPOSITORY_ROOT / "docs" / "reference" / "configuration.md"
_HEAD = """# Configuration reference

Every key of `examples/run_grpo.py`, made from the schema in `nemo_rl/config/` by
`python tools/generate_config_reference.py`.

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
_OTHERS = """# Other algorithms

PPO, SFT, DPO, reward-model training and distillation have the sections `policy`, `data`, `checkpointing`, `logger` and
`cluster` that are described above, PPO and distillation also `env`, PPO also `loss_fn`, and the ones below. If a
section occurs twice, the table below applies. Parts of `teacher` and `value` that have no table here are those of
`policy`.
"""
_LATER = """## Accepted only while switched off

These keys of NeMo RL belong to features that do not exist here yet. `null`, `false`, `0`, an empty value,
`enabled: false` with any other keys, and the values of the last column are accepted; anything else is refused.

| key | feature | accepted too |
|---|---|---|
"""
_IGNORED = """## Accepted without effect

| key | why |
|---|---|
"""


@dataclass(frozen=True)
class _Block:
    """One section of the page: its dotted path and its class."""

    path: str
    section: type[BaseModel]


def reference_markdown(schema: type[BaseModel] = GRPOMasterConfig) -> str:
    """Return the page as Markdown.

    Args:
        schema: master config class to describe.
    """
    blocks = list(_blocks(schema, ""))
    tables = [_table(block) for block in blocks if block.path]
    later = [row for block in blocks for row in _extra_rows(block, "later")]
    ignored = [row for block in blocks for row in _extra_rows(block, "ignored")]
    others = _other_tables({(block.path, block.section) for block in blocks}) if schema is GRPOMasterConfig else []
    return "\n".join([_HEAD, *tables, *others, _LATER + "\n".join(later) + "\n", _IGNORED + "\n".join(ignored) + "\n"])


def _other_tables(shown: set[tuple[str, type[BaseModel]]]) -> list[str]:
    """Return the tables of the sections that only the other algorithms have."""
    tables = [_OTHERS]
    for script, schema in ALGORITHMS.items():
        for block in _blocks(schema, ""):
            if block.path and (block.path, block.section) not in shown and not _repeats_policy(block, shown):
                shown.add((block.path, block.section))
                tables.append(_table(block).replace("\n", f" (run_{script}.py)\n", 1))
    return tables


def _repeats_policy(block: _Block, shown: set[tuple[str, type[BaseModel]]]) -> bool:
    """Return whether this is a section of another model that the page has already described for the policy."""
    place = block.path.removeprefix("teacher.").removeprefix("value.")
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
    if not rows:
        return f"## {block.path}\n\n{intro} No keys of its own.\n"
    head = "| key | type | default | meaning |\n|---|---|---|---|"
    return f"## {block.path}\n\n{intro}\n\n{head}\n" + "\n".join(rows) + "\n"


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
    return str(value)


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
    """Write the page."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--output", type=Path, default=DEFAULT_PAGE, help="file to write")
    output: Path = parser.parse_args().output
    output.parent.mkdir(parents=True, exist_ok=True)
    output.write_text(reference_markdown(), encoding="utf-8")
    print(f"wrote {output}")


if __name__ == "__main__":
    main()
