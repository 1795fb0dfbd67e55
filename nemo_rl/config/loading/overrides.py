"""Apply command-line overrides in Hydra's grammar.

`a.b=c` sets a key that exists, `+a.b=c` adds one, `++a.b=c` does either, `~a.b` removes one; lists are replaced by
`a.l=[1,2]` and changed at an index by `a.l.0=9`. Invariants: an error quotes the override that cannot be applied, with
an example that works. A key of the schema exists, even if no file writes it.
"""

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from hydra._internal.config_loader_impl import ConfigLoaderImpl
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Override, OverrideType
from hydra.errors import HydraException
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException
from pydantic import BaseModel
from yaml import YAMLError

from nemo_rl.config.base.names import OVERRIDE_MARKER
from nemo_rl.config.base.structure import Slot, find_slot, known_keys, value_at
from nemo_rl.config.loading.key_errors import explain_unknown
from nemo_rl.config.loading.sources import Sources
from nemo_rl.config.schema.env import may_have_key
from nemo_rl.utils.errors import ConfigError, did_you_mean

DOT = "\x1f"
"""Text that replaces the dots of a name while an override is applied."""


def names_in(key: str, tree: Any) -> list[str]:
    """Return the names with dots in an override's key, longest first.

    Args:
        key: dotted key, for example `env.my_env.Env.key`.
        tree: the configuration as plain dicts and lists.
    """
    known = sorted({name for name in _dotted_keys(tree) if _place_of(name).search(key)}, key=len, reverse=True)
    return [name for i, name in enumerate(known) if not any(name in longer for longer in known[:i])]


def joined(key: str, names: list[str]) -> str:
    """Return the key with the dots of the given names replaced."""
    for name in names:
        key = _place_of(name).sub(name.replace(".", DOT), key)
    return key


def with_names(tree: Any, names: list[str]) -> Any:
    """Return the tree with the dots of the given keys replaced."""
    table = {name: name.replace(".", DOT) for name in names}
    return _renamed(tree, lambda key: table.get(key, key))


def with_dots(tree: Any) -> Any:
    """Return the tree with the dots restored."""
    return _renamed(tree, shown)


def shown(text: Any) -> Any:
    """Return a key or a message in the form in which users write it."""
    return text.replace(DOT, ".") if isinstance(text, str) else text


def _renamed(tree: Any, rename: Any) -> Any:
    if isinstance(tree, Mapping):
        return {rename(key): _renamed(value, rename) for key, value in tree.items()}
    return [_renamed(value, rename) for value in tree] if isinstance(tree, list) else tree


def _dotted_keys(tree: Any) -> Iterator[str]:
    """Yield each key that has a dot, and each `env_name` of a data entry that has a dot."""
    if isinstance(tree, Mapping):
        for key, value in tree.items():
            if isinstance(key, str) and "." in key:
                yield key
            if key == "env_name" and isinstance(value, str) and "." in value and "${" not in value:
                yield value
    children = tree.values() if isinstance(tree, Mapping) else tree if isinstance(tree, list) else ()
    for child in children:
        yield from _dotted_keys(child)


def _place_of(name: str) -> re.Pattern[str]:
    return re.compile(rf"(?<=\.){re.escape(name)}(?=\.|$)")


_EXAMPLES = (
    "Write key=value (grpo.num_prompts_per_step=8), +key=value to add a key, ++key=value to set or add, "
    "~key to remove one."
)
_ABSENT = object()


class OverridesError(ConfigError):
    """Error of a command-line override that is malformed or does not fit the configuration."""


def parse_hydra_overrides(cfg: DictConfig, overrides: Sequence[str]) -> DictConfig:
    """Apply overrides to a config without a schema. Only existing keys can be set.

    Args:
        cfg: changed in place and also returned.
        overrides: texts such as `a.b=5`, in the order in which they apply.

    Raises:
        OverridesError: an override is malformed, or names a key that `cfg` does not have.
    """
    OmegaConf.set_struct(cfg, True)
    for text in overrides:
        apply_override(cfg, parse_override(text))
    return cfg


def parse_override(text: str) -> Override:
    """Read one override.

    Raises:
        OverridesError: the text is not an override, or is a sweep over several values.
    """
    try:
        override = OverridesParser.create().parse_override(text)
    except HydraException as error:
        raise OverridesError(f"cannot read the override {text!r}. {_grammar_hint(text, error)}") from None
    except RecursionError:
        raise OverridesError(f"cannot read the override {text[:40]!r}...: it is nested too deeply.") from None
    if override.is_sweep_override():
        raise OverridesError(
            f"the override {text!r} is a sweep over several runs, which is not possible here. "
            f"For a list write {_list_example(override, text)}; for a text with commas put it in "
            f"quotes inside quotes: '{override.key_or_group}=\"a,b\"'."
        )
    return override


def apply_override(cfg: DictConfig, override: Override) -> None:
    """Apply one override to a struct config, in place.

    Raises:
        OverridesError: the key is missing (or, with +, present), or the value does not fit.
    """
    try:
        ConfigLoaderImpl._apply_overrides_to_config([override], cfg)
    except (HydraException, OmegaConfBaseException, TypeError, ValueError, AttributeError) as error:
        cause = error.__cause__
        detail = str(error).strip().replace("\n", " ")
        if isinstance(cause, Exception) and detail.startswith("Error merging"):
            detail = str(cause).strip().splitlines()[0]
        if detail.startswith("Could not override"):
            detail = f"there is no such key to change. To add it write '+{override.input_line}'."
        raise OverridesError(f"cannot apply the override {override.input_line!r}: {detail}") from None


def apply_to_schema(schema: type[BaseModel], cfg: DictConfig, override: Override, sources: Sources) -> None:
    """Apply one override to a config with all defaults of `schema`.

    For `key=value`, a key of the schema exists. For `+key=value`, it is absent until a file or an earlier override
    writes it.

    Raises:
        OverridesError: as in `apply_override`. If a key is unknown, the message names the nearest valid key.
    """
    path = override.key_or_group.split(".")
    _refuse_marker(path, override)
    tree: Any = OmegaConf.to_container(cfg, resolve=False)
    slot = find_slot(schema, path, tree)
    typed = slot is not None and (slot.annotation is not None or _is_dormant(schema, path, tree))
    absent = value_at(tree, path, _ABSENT) is _ABSENT
    if slot is None and not _below_list(tree, path):
        raise OverridesError(
            f"cannot apply the override {override.input_line!r}: {shown(explain_unknown(schema, path, tree))}"
        )
    _refuse_null_section(slot, override)
    _refuse_unknown_environment(path, tree, override)
    typed = typed or _is_of_named_functions(path, tree)
    if override.type == OverrideType.CHANGE and absent and typed:
        override.type = OverrideType.FORCE_ADD
    if override.type == OverrideType.ADD and typed and not absent and not sources.has(path):
        override.type = OverrideType.FORCE_ADD
    _clear_other_kind(cfg, override, value_at(tree, path))
    if slot is not None and not slot.sections and isinstance(value_at(tree, path), dict):
        OmegaConf.set_struct(cfg, False)  # free names may be new
    already_null = override.type == OverrideType.DEL and value_at(tree, path, _ABSENT) is None
    _suggest_near_argument(path, tree, override)
    if not already_null:
        apply_override(cfg, override)
    value = None if override.type == OverrideType.DEL else override.value()
    sources.overrides.append((shown(override.key_or_group), str(override.input_line), value))


def _refuse_marker(path: Sequence[str], override: Override) -> None:
    value = None if override.type == OverrideType.DEL else override.value()
    if OVERRIDE_MARKER in path or (isinstance(value, dict) and OVERRIDE_MARKER in value):
        raise OverridesError(
            f"cannot apply the override {override.input_line!r}: {OVERRIDE_MARKER} is for files, where it drops what a "
            "parent file has written in the same mapping. In an override remove single keys with ~key."
        )


def _refuse_null_section(slot: Slot | None, override: Override) -> None:
    if override.type != OverrideType.DEL and override.value() is None and slot is not None and slot.is_mapping:
        key = shown(override.key_or_group)
        raise OverridesError(
            f"cannot apply the override {override.input_line!r}: {key} is a section, which null does not switch off. "
            f"Set its keys, or remove what files write in it with ~{key}."
        )


def _refuse_unknown_environment(path: Sequence[str], tree: Any, override: Override) -> None:
    """Refuse an unknown environment, before Hydra's advice to add the key would make a new environment."""
    environments = tree.get("env") or {}
    if path[0] != "env" or len(path) < 3 or override.type != OverrideType.CHANGE or path[1] in environments:
        return
    if _is_of_named_functions(path, tree):
        return
    known = ", ".join(shown(name) for name in environments) or "none"
    raise OverridesError(
        f"cannot apply the override {override.input_line!r}: there is no environment {shown(path[1])!r}. "
        f"Environments in env: {known}. A dotted name is found if it is in env or the env_name of a data entry; write "
        f"env_name before its keys, and for a key that is not there yet +{override.input_line}."
    )


def _is_of_named_functions(path: Sequence[str], tree: Any) -> bool:
    """Return whether a path is a key of an environment that names functions, which can have any name."""
    return path[0] == "env" and len(path) > 2 and may_have_key(shown(path[1]), path[2], value_at(tree, path[:2]))


def _suggest_near_argument(path: Sequence[str], tree: Any, override: Override) -> None:
    """Refuse a new name that resembles a present one in a mapping with free names, before Hydra advises to add it."""
    present = value_at(tree, path[:-1])
    if override.type != OverrideType.CHANGE or not isinstance(present, dict) or path[-1] in present:
        return
    if near := did_you_mean(path[-1], present):
        raise OverridesError(
            f"cannot apply the override {override.input_line!r}: {shown('.'.join(path[:-1]))} has "
            f"{', '.join(present)}.{near} Write +{override.input_line} if you mean another argument."
        )


def _clear_other_kind(cfg: DictConfig, override: Override, current: Any) -> None:
    """Let a list replace a mapping or a mapping replace a list, which OmegaConf cannot merge."""
    value = None if override.type == OverrideType.DEL else override.value()
    if (isinstance(current, dict) and isinstance(value, list)) or (
        isinstance(current, list) and isinstance(value, dict)
    ):
        OmegaConf.update(cfg, override.key_or_group, None)


def _below_list(tree: Any, path: Sequence[str]) -> bool:
    return any(isinstance(value_at(tree, path[:n]), list) for n in range(len(path)))


def _is_dormant(schema: type[BaseModel], path: Sequence[str], tree: Any) -> bool:
    """Return whether the path leads to a key that is accepted but is not part of the schema."""
    for depth, key in enumerate(path):
        slot = find_slot(schema, path[:depth], tree)
        above = value_at(tree, path[:depth])
        section = slot.section_for(above if isinstance(above, dict) else ()) if slot else None
        if section is not None and key in known_keys(section) - set(section.model_fields):
            return True
    return False


def _grammar_hint(text: str, error: Exception) -> str:
    if text.startswith("-"):
        return f"Only --config is an option; everything else is key=value. {_EXAMPLES}"
    if "=" not in text:
        return f"It has no '='. {_EXAMPLES}"
    detail = str(error).strip().splitlines()[0]
    return f"{detail}. Quote a value with special characters: '{text.partition('=')[0]}=\"...\"'. {_EXAMPLES}"


def _list_example(override: Override, text: str) -> str:
    values = text.partition("=")[2]
    return f"'{override.key_or_group}=[{values}]'"


def dotlist_to_overrides(arguments: Sequence[str]) -> list[str]:
    """Convert the `key=value` arguments of a command line to overrides. Options are not changed.

    Args:
        arguments: for example `["--config", "a.yaml", "data.prompt_file=null"]`.

    Example:
        >>> dotlist_to_overrides(["generation.stop_strings=[a b, c]"])
        ['++generation.stop_strings=["a b","c"]']
    """
    return [
        _translate(text) if "=" in text and not text.startswith(("-", "+", "~")) and before != "--config" else text
        for before, text in zip(["", *arguments], arguments, strict=False)
    ]


def _translate(text: str) -> str:
    key, _, written = text.partition("=")
    try:
        parsed: Any = OmegaConf.to_container(OmegaConf.from_dotlist([f"value={written}"]), resolve=False)
        value = parsed["value"]
    except YAMLError:
        value = written
    return f"++{key}={_in_hydra_grammar(value)}"


def _in_hydra_grammar(value: Any) -> str:
    if isinstance(value, dict):
        return "{" + ",".join(f"{key}:{_in_hydra_grammar(below)}" for key, below in value.items()) + "}"
    if isinstance(value, list):
        return "[" + ",".join(map(_in_hydra_grammar, value)) + "]"
    if value is None or isinstance(value, bool | int | float):
        return json.dumps(value)
    # # Within quotes, only a quote is escaped, and the backslashes directly before it.
    escaped = re.sub(r'(\\+)(?="|$)', r"\1\1", str(value)).replace('"', '\\"')
    return f'"{escaped}"'
