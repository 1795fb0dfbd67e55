"""Check files and folders that keys name, if they can only be local.

Invariant: only the existence of paths is checked. Nothing is read.
"""

from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import NamedTuple

from nemo_rl.config.base.paths import FILES_ROOT, find_path, looks_local
from nemo_rl.config.base.section import Section
from nemo_rl.config.rules.broken_rules import Findings
from nemo_rl.config.schema.agents import PLUGIN_KEYS, AgentKeys
from nemo_rl.config.schema.kits import ToolEnvironmentConfig, ToolTokenizerConfig
from nemo_rl.config.schema.model.policy import TokenizerConfig
from nemo_rl.files.regular_file import require_regular, require_regular_files

_TEXTS = ("prompt_file", "system_prompt_file", "chat_template")
"""Keys that always name a text file. Other keys may also name a model or data set of the hub."""


class PathKey(NamedTuple):
    """A key that may name a file or folder to read: dotted name of its section, the section, and the key."""

    place: str
    section: Section
    key: str


def tokenizer_paths(place: str, tokenizer: TokenizerConfig | ToolTokenizerConfig) -> Iterator[PathKey]:
    """Yield the keys of a tokenizer, whose chat template may also be a text or the word `default`."""
    yield PathKey(place, tokenizer, "name")
    if (tokenizer.chat_template or "").endswith(".jinja"):
        yield PathKey(place, tokenizer, "chat_template")


def environment_paths(environments: Mapping[str, object]) -> Iterator[PathKey]:
    """Yield the keys that name files: plugins of agent environments, and tokenizers of environments with tools."""
    for name, section in environments.items():
        if isinstance(section, AgentKeys):
            yield from (PathKey(f"env.{name}", section, key) for key in PLUGIN_KEYS)
        if isinstance(section, ToolEnvironmentConfig):
            yield from tokenizer_paths(f"env.{name}.tokenizer", section.tokenizer)


def check_files(paths: Iterable[PathKey]) -> Findings:
    """Check that each file or folder exists. If several keys name a missing path, report it for the first key."""
    seen: set[str] = set()
    for place, section, key in paths:
        value = getattr(section, key)
        must_exist = value is not None and (key in _TEXTS or looks_local(value))
        if not must_exist or value in seen:
            continue
        seen.add(value)
        found = find_path(value)
        if found is None:
            yield (
                f"{place}.{key}={value!r} does not exist. Looked in {Path.cwd()} (current folder) and "
                f"{FILES_ROOT} (repository). Give a path that exists."
            )
        elif key in _TEXTS and not found.is_file():
            yield f"{place}.{key}={value!r} is not a file (a folder, a pipe or a device). Give a text file."
        elif reason := _irregular(found):
            yield f"{place}.{key}={value!r} cannot be read: {reason}."


def _irregular(path: Path) -> str | None:
    """Return the name of a file at or below a path that cannot be read, with the reason, or None if all can be read."""
    try:
        require_regular_files(path) if path.is_dir() else require_regular(path)
    except OSError as error:
        return f"{error.filename}: {error.strerror}"
    return None
