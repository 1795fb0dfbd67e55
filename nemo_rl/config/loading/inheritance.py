"""Read YAML files that inherit from others by a `defaults:` key.

`read_layers` returns a configuration's layers, parents first. Invariants: a path in `defaults:` is relative to its
file, or names a base file of the library. Interpolations are not resolved, so a child file also changes dependent keys.
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from nemo_rl.config.base.names import OVERRIDE_MARKER
from nemo_rl.config.base.paths import find_path, library_file
from nemo_rl.files.regular_file import read_text, require_regular
from nemo_rl.utils.errors import ConfigError

_ODD_NUMBER = re.compile(r"[\s\[,:-][-+]?(?:\d[\d_]*(?::[0-5]?\d)+(?:\.\d*)?|0[0-7_]*[0-7])")
"""Pattern of a number that YAML reads in base 60 or 8, with the character before it."""

MOST_VALUES = 1_000_000
"""Largest number of values in a file after its anchors are expanded."""


@dataclass(frozen=True)
class Layer:
    """One file of a configuration."""

    path: Path
    content: DictConfig
    """The keys of the file except `defaults`, with unresolved interpolations."""


def read_layers(path: str | Path) -> list[Layer]:
    """Read a file and all files it inherits from.

    Args:
        path: absolute, or relative to the current folder or the repository root.

    Returns:
        The layers in the order in which they are merged: parents left to right, then the child.

    Raises:
        ConfigError: a file is missing, is not valid YAML or not a mapping, or inherits from itself.
    """
    found = find_path(path)
    if found is not None:
        _require_regular(found)
    if found is None:
        raise ConfigError(
            f"there is no config file {str(path)!r} (current folder: {Path.cwd()}). "
            "Give a path that exists, for example --config examples/configs/grpo_math_1B.yaml."
        )
    return _read(found, ())


def merge_layers(layers: Sequence[Layer]) -> DictConfig:
    """Merge layers from left to right. `_override_: true` replaces whole mappings."""
    merged = OmegaConf.create()
    for layer in layers:
        merged = merge_with_override(merged, layer.content)
    return merged


def load_config_with_inheritance(config_path: str | Path, base_dir: str | Path | None = None) -> DictConfig:
    """Read a file with its parents into one config, without resolving interpolations.

    Args:
        base_dir: folder for a relative `config_path`; if None, the current folder.
    """
    path = Path(config_path)
    if base_dir is not None and not path.is_absolute():
        path = resolve_path(Path(base_dir), str(path))
    return merge_layers(read_layers(path))


def resolve_path(base_path: Path, path: str) -> Path:
    """Return an absolute `path` unchanged, and a relative one below `base_path`."""
    return Path(path) if Path(path).is_absolute() else Path(base_path) / path


def merge_with_override(base_config: DictConfig, override_config: DictConfig) -> DictConfig:
    """Merge the second config into the first, with priority for the second.

    Mappings are merged key by key. Lists and single values are replaced. A mapping that contains `_override_: true`
    replaces the mapping below it as a whole.
    """
    base: Any = OmegaConf.to_container(base_config, resolve=False)
    child: Any = OmegaConf.to_container(override_config, resolve=False)
    _drop_replaced(base, child)
    return OmegaConf.merge(OmegaConf.create(base), OmegaConf.create(child))  # type: ignore[return-value]


def _drop_replaced(base: Any, child: Any) -> None:
    for key, value in child.items():
        below = base.get(key) if isinstance(base, dict) else None
        if isinstance(base, dict) and {type(below), type(value)} == {dict, list}:
            # OmegaConf cannot merge a mapping with a list or a single value.
            del base[key]
            below = None
        if not isinstance(value, dict):
            continue
        if value.pop(OVERRIDE_MARKER, False) is True and isinstance(base, dict):
            base.pop(key, None)
            below = None
        _drop_replaced(below, value)


def _read(path: Path, children: tuple[Path, ...]) -> list[Layer]:
    if path in children:
        chain = " -> ".join(str(p) for p in (*children, path))
        raise ConfigError(f"the config files inherit from each other in a circle: {chain}")
    content = _parse(path)
    parents = content.pop("defaults", None)
    layers = []
    for parent in _as_list(parents, path):
        relative = resolve_path(path.parent, parent).resolve()
        parent_path = relative if relative.exists() else library_file(parent) or relative
        _require_regular(parent_path)
        if not parent_path.exists():
            raise ConfigError(
                f"{path} inherits from {parent!r}, but there is no file {parent_path}. "
                "A path in `defaults:` is relative to the file that names it."
            )
        layers += _read(parent_path, (*children, path))
    return [*layers, Layer(path, content)]


def _require_regular(path: Path) -> None:
    """Refuse a config file that is a folder, a pipe or a device."""
    try:
        require_regular(path)
    except OSError as error:
        raise ConfigError(f"the config file {str(path)!r} cannot be read. {error.strerror}.") from error


def _refuse_surprises(path: Path) -> None:
    """Refuse a file with misleading values, before its anchors are expanded.

    A few lines can expand to more values than fit into memory, and YAML reads 1:30 as 90 and 010 as 8.
    """
    text = read_text(path)
    is_plain = "*" not in text and not _ODD_NUMBER.search(text)
    root = None if is_plain else yaml.compose(text, Loader=yaml.SafeLoader)
    if root is not None and (odd := _odd_number(root, set())) is not None:
        raise ConfigError(
            f"{path}, line {odd.start_mark.line + 1}: {odd.value} is a number with another base in YAML (1:30 is 90, "
            f"010 is 8). Write the number in decimal digits, or the text in quotes: '{odd.value}'."
        )
    if root is not None and _num_values(root, {}) > MOST_VALUES:
        raise ConfigError(
            f"{path} stands for more than {MOST_VALUES:,} values: its anchors (&name, *name) repeat each other, or "
            "themselves. Write the values out."
        )


def _odd_number(node: yaml.Node, seen: set[int]) -> yaml.ScalarNode | None:
    """Return the first number of a node that YAML reads in base 60 or 8. Nodes in `seen` are not visited again."""
    if isinstance(node, yaml.ScalarNode):
        is_number = node.tag in ("tag:yaml.org,2002:int", "tag:yaml.org,2002:float") and node.style is None
        return node if is_number and _ODD_NUMBER.fullmatch(f" {node.value}") else None
    if id(node) in seen:
        return None
    seen.add(id(node))
    children = [child for entry in node.value for child in (entry if isinstance(entry, tuple) else (entry,))]
    return next(filter(None, (_odd_number(child, seen) for child in children)), None)


def _num_values(node: yaml.Node, known: dict[int, int]) -> int:
    """Return the number of values in an expanded node, at most `MOST_VALUES + 1`. `known` is a cache by node."""
    if id(node) not in known:
        known[id(node)] = MOST_VALUES + 1  # for a node that contains itself
        children = node.value if isinstance(node, yaml.SequenceNode | yaml.MappingNode) else []
        below = [child for entry in children for child in (entry if isinstance(entry, tuple) else (entry,))]
        known[id(node)] = min(1 + sum(_num_values(child, known) for child in below), MOST_VALUES + 1)
    return known[id(node)]


def _as_list(parents: Any, path: Path) -> list[str]:
    listed = OmegaConf.to_container(parents) if OmegaConf.is_list(parents) else parents
    listed = [listed] if isinstance(listed, str) else listed or []
    if not isinstance(listed, list) or not all(isinstance(p, str) for p in listed):
        raise ConfigError(f"{path}: `defaults:` must be a path or a list of paths, got {listed!r}.")
    return listed


def _parse(path: Path) -> DictConfig:
    try:
        _refuse_surprises(path)
        content = OmegaConf.load(path)
    except ConfigError:
        raise
    except RecursionError:
        raise ConfigError(f"{path} nests mappings or lists too deeply. About a hundred levels work.") from None
    except (yaml.YAMLError, OmegaConfBaseException, ValueError) as error:
        raise ConfigError(f"{path} is not valid YAML: {error}") from None
    except OSError as error:
        raise ConfigError(f"{path} cannot be read: {error}") from None
    if not isinstance(content, DictConfig):
        raise ConfigError(f"{path} must hold keys with values (a mapping), not a list.")
    return content
