"""Convert YAML files and overrides to a typed, checked configuration.

Programs call `load_config`. Order: read files (inheritance.py), refuse unknown keys (key_errors.py) unless an override
removes them or interpolations read them, merge, fill in the schema's defaults (base/defaults.py), apply overrides
(overrides.py), resolve interpolations, validate types, fill in keys that follow from typed values
(runs/dependent_keys.py), check keys against each other. Invariant: every error in a configuration is a `ConfigError`
raised here, before anything starts.
"""

import logging
import re
from collections.abc import Collection, Mapping, Sequence
from functools import reduce
from pathlib import Path
from typing import Any

import yaml
from hydra.core.override_parser.types import Override, OverrideType
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import MissingMandatoryValue, OmegaConfBaseException
from pydantic import BaseModel, ValidationError
from pydantic_core import ErrorDetails

from nemo_rl.config.base.defaults import fill_defaults, plain_values, register_omegaconf_resolvers
from nemo_rl.config.base.hidden_values import hidden_in, hidden_values, places_still_hidden, public_values
from nemo_rl.config.base.section import Section
from nemo_rl.config.base.spellings import in_own_section, unified
from nemo_rl.config.base.structure import Slot, has_key, known_keys, mappings_in, value_at
from nemo_rl.config.loading.idle_keys import idle_keys
from nemo_rl.config.loading.inheritance import Layer, merge_layers, read_layers
from nemo_rl.config.loading.key_errors import (
    keep_sections,
    problem_lines,
    refuse_unknown_keys,
    short,
    unknown_keys,
    unusable_values,
    without_followers,
)
from nemo_rl.config.loading.overrides import (
    apply_override,
    apply_to_schema,
    joined,
    names_in,
    parse_override,
    with_dots,
    with_names,
)
from nemo_rl.config.loading.sources import Sources, dotted_path
from nemo_rl.config.runs.dependent_keys import fill_dependent_keys
from nemo_rl.config.runs.rollouts import GRPOMasterConfig
from nemo_rl.config.runs.run import RunConfig
from nemo_rl.utils.errors import ConfigError

logger = logging.getLogger(__name__)


def load_config[Config: Section](
    path: str | Path,
    overrides: Sequence[str] = (),
    schema: type[Config] = GRPOMasterConfig,  # type: ignore[assignment]
    *,
    check: bool = True,
    program_keys: Mapping[str, Any] | None = None,
) -> Config:
    """Load a configuration.

    Args:
        path: YAML file, relative to the current folder or the repository root.
        overrides: texts in Hydra's grammar, e.g. `["grpo.seed=1", "+policy.optimizer.kwargs.amsgrad=true"]`.
        schema: the master config class of the algorithm.
        check: also check keys against each other and check that their files exist.
        program_keys: keys that a program sets, which act like a file that inherits from `path`.

    Returns:
        The configuration with plain values. Existing paths are absolute.

    Raises:
        ConfigError: a file, key, value, override or combination is wrong.
    """
    layers = read_layers(path)
    if program_keys is not None:
        layers.append(_layer_of(program_keys))
    return _loaded(schema, layers_of(schema, layers), overrides, check)


def config_of[Config: Section](
    tree: Mapping[str, Any] | DictConfig, schema: type[Config], *, overrides: Sequence[str] = (), check: bool = True
) -> Config:
    """Make a configuration from a program's dict or OmegaConf config.

    Args:
        schema: the master config class of the algorithm.
        overrides: as in `load_config`.
        check: as in `load_config`.

    Raises:
        ConfigError: as in `load_config`.
    """
    return _loaded(schema, layers_of(schema, [_layer_of(tree)]), overrides, check)


def _layer_of(tree: Mapping[str, Any] | DictConfig) -> Layer:
    """Return a program's keys and values as a layer, as for a file."""
    try:
        content = tree if isinstance(tree, DictConfig) else OmegaConf.create(plain_values(tree))
    except OmegaConfBaseException as error:
        raise ConfigError(f"the configuration given: {str(error).splitlines()[0]}") from None
    return Layer(Path("the configuration given"), content)


def _loaded[Config: Section](
    schema: type[Config], layers: Sequence[Layer], overrides: Sequence[str], check: bool
) -> Config:
    try:
        layers, overrides = without_removed(schema, layers, overrides)
        variables = variables_in(schema, layers)
        for layer in layers:
            refuse_unknown_keys(schema, OmegaConf.to_container(layer.content), str(layer.path), variables)
        tree, sources = merged(schema, layers, overrides)
        config, values = validated(schema, tree, sources)
    except RecursionError:
        files = ", ".join(str(layer.path) for layer in layers)
        raise ConfigError(f"mappings or lists are nested too deeply, in one of {files} or an override.") from None
    if isinstance(config, RunConfig):
        if check:
            config.check()
        for note in config.notes():
            logger.warning("%s", note)
    told = [f"{dotted_path(path)} ({reason})" for path, reason, _ in idle_keys(config, values, sources)]
    if told:
        logger.info("Keys without effect: %s", ", ".join(told))
    return config


def without_removed(
    schema: type[Section], layers: Sequence[Layer], overrides: Sequence[str]
) -> tuple[list[Layer], list[str]]:
    """Remove the unknown keys of files that an override `~key` names, so that they are not refused.

    Returns:
        The files without these keys, and the remaining overrides.
    """
    if not any(text.startswith("~") for text in overrides):
        return list(layers), list(overrides)
    contents: list[Any] = [OmegaConf.to_container(layer.content) for layer in layers]
    kept = []
    for text in overrides:
        override = parse_override(text) if text.startswith("~") else None
        path = tuple(in_own_section(schema, override.key_or_group).split(".")) if override else ()
        unknown = [content for content in contents if path in dict(unknown_keys(schema, content))]
        for content in unknown:
            del value_at(content, path[:-1])[path[-1]]
        if not unknown:
            kept.append(text)
    return [Layer(layer.path, OmegaConf.create(content)) for layer, content in zip(layers, contents, strict=True)], kept


def variables_in(schema: type[Section], layers: Sequence[Layer]) -> set[str]:
    """Return the top-level keys that are neither sections nor in the schema, but that interpolations read."""
    values = {str(key): value for layer in layers for key, value in layer.content.items_ex(resolve=False)}
    keys = {key for key, value in values.items() if not isinstance(value, DictConfig)} - known_keys(schema)
    text = "\n".join(OmegaConf.to_yaml(layer.content) for layer in layers) if keys else ""
    return {key for key in keys if re.search(rf"\$\{{{re.escape(key)}[.}}]", text)}


def merged(schema: type[Section], layers: Sequence[Layer], overrides: Sequence[str]) -> tuple[DictConfig, Sources]:
    """Merge files, overrides and the schema's defaults. Return the unresolved tree and the source of each value.

    Raises:
        ConfigError: an override is wrong.
    """
    sources, variables = Sources.of_layers(layers), variables_in(schema, layers)
    filled, _ = fill_defaults(schema, OmegaConf.to_container(merge_layers(layers)))  # type: ignore[arg-type]
    tree = OmegaConf.create(filled)
    for text in overrides:
        override = parse_override(text)
        if override.key_or_group in variables:
            apply_override(tree, override)
            continue
        names = names_in(override.key_or_group, OmegaConf.to_container(tree))
        if names:
            tree = OmegaConf.create(with_names(OmegaConf.to_container(tree), names))
        override.key_or_group = in_own_section(schema, joined(override.key_or_group, names))
        OmegaConf.set_struct(tree, not _names_elsewhere(schema, override))
        apply_to_schema(schema, tree, override, sources)
        written: Any = with_dots(OmegaConf.to_container(tree))
        plain: Any = unified(schema, written, newer_wins=True)
        refuse_unknown_keys(schema, plain, f"the override {text!r}", variables)
        filled, _ = fill_defaults(schema, plain)
        if names or filled != written:
            tree = OmegaConf.create(filled)
    return tree, sources


def save_resolved(config: BaseModel, path: str | Path) -> None:
    """Save all values of a configuration, except secrets, as YAML that `load_config` reads back as an equal one."""
    target = Path(path)
    target.parent.mkdir(parents=True, exist_ok=True)
    kept = frozenset(hidden_in(config).values())
    text = yaml.safe_dump(_escaped(public_values(config), kept), sort_keys=False, allow_unicode=True)
    target.write_text(text, encoding="utf-8")


def layers_of(schema: type[Section], files: Sequence[Layer]) -> list[Layer]:
    """Return the layers with each key in its own section, and with empty mappings for `section:` without keys."""
    return [_in_own_sections(schema, layer) for layer in files]


def _in_own_sections(schema: type[Section], layer: Layer) -> Layer:
    try:
        content = unified(schema, OmegaConf.to_container(layer.content))
        return Layer(layer.path, OmegaConf.create(keep_sections(schema, content)))
    except ConfigError as error:
        raise ConfigError(f"{layer.path}: {error}") from None


def _names_elsewhere(schema: type[Section], override: Override) -> bool:
    """Return whether the mapping of an override has keys that move to another section."""
    value = None if override.type == OverrideType.DEL else override.value()
    if not isinstance(value, dict):
        return False
    tree = reduce(lambda below, key: {key: below}, reversed(override.key_or_group.split(".")), value)
    return bool(unified(schema, tree) != tree)


def validated[Config: Section](
    schema: type[Config], tree: DictConfig, sources: Sources
) -> tuple[Config, dict[str, Any]]:
    """Return the typed configuration and its plain values.

    A wrong value is reported for the key in which it is written, and not for keys that refer to it.

    Raises:
        ConfigError: with a line for each wrong value and each key of a feature that does not exist yet.
    """
    register_omegaconf_resolvers()
    unresolved: Any = OmegaConf.to_container(tree, resolve=False)
    failure: ConfigError | None = None
    if issubclass(schema, RunConfig) and schema.read_by_defaults:
        tree = OmegaConf.create({**schema.read_by_defaults, **unresolved})
    try:
        values: Any = OmegaConf.to_container(tree, resolve=True, throw_on_missing=True)
    except OmegaConfBaseException as error:
        values, failure = unresolved, _unresolvable(error, sources)
    known = known_keys(schema)
    values = {key: value for key, value in values.items() if has_key(known, key)}  # without variables of interpolations
    lines = [*_take_out_not_built(schema, values, sources), *unusable_values(schema, values, unresolved, sources)]
    try:
        config = schema.model_validate(values)
    except ValidationError as error:
        details = _details_of(error)
        written = without_followers(details, values, unresolved)
        if written or failure is None:
            lines += problem_lines(schema, written or details, values, sources)
    lines += [
        f"{dotted_path(place)} is hidden in {sources.of(place)}. Give it again, for example as {dotted_path(place)}="
        f"'${{oc.env:NAME}}'."
        for place in places_still_hidden(values)
    ]
    if lines:
        raise ConfigError("\n  ".join(lines))
    if failure is not None:
        raise failure
    if isinstance(config, RunConfig):
        config.hide(hidden_values(unresolved, values))
        fill_dependent_keys(config)
    return config, values


def _details_of(error: ValidationError) -> list[ErrorDetails]:
    """Return pydantic's errors. Return none if a text is not UTF-8, because `unusable_values` reports such a text."""
    try:
        return error.errors()
    except UnicodeEncodeError:
        return []


def _take_out_not_built(schema: type[Section], values: Any, sources: Sources) -> list[str]:
    """Delete keys that switch on features that do not exist yet. Return a line for each."""
    lines = []
    for slot, below, path in list(mappings_in(Slot.of_section(schema), values)):
        for key, refusal in list(slot.later_for(below).switched_on(below)):
            place = (*path, key)
            lines.append(f"{dotted_path(place)}={short(below[key])} (set by {sources.of(place)}): {refusal}.")
            del value_at(values, path)[key]
    return lines


def _unresolvable(error: OmegaConfBaseException, sources: Sources) -> ConfigError:
    key = error.full_key or ""
    path = key.split(".")
    source = sources.of(path)
    if isinstance(error, MissingMandatoryValue):
        opener = f" ({source} leaves it open)" if sources.has(path) else ""
        return ConfigError(f"{key} has no value{opener}. Write it in the config file or add the override {key}=...")
    return ConfigError(f"{key} (set by {source}) cannot be worked out: {str(error).splitlines()[0]}.")


def _escaped(value: Any, kept: Collection[str]) -> Any:
    """Escape `${` in texts except in interpolations to keep, so that reading the texts back resolves nothing."""
    if isinstance(value, dict):
        return {key: _escaped(below, kept) for key, below in value.items()}
    if isinstance(value, list):
        return [_escaped(below, kept) for below in value]
    return value.replace("${", "\\${") if isinstance(value, str) and value not in kept else value
