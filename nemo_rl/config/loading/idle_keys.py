"""Find the written keys that have no effect in the run, with the reason.

There are four kinds: keys that never have an effect (`Section.idle`, `Section.ignored`), keys of a disabled section,
keys that depend on certain values of another key (`OnlyWith`), and sections that the run does not use
(`RunConfig.unused`). Invariant: a key that was written before the key that makes it idle is not reported, so a user who
disables a feature gets no report about keys of an inherited file.
"""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from nemo_rl.config.base.availability import OnlyWith, is_off
from nemo_rl.config.base.section import Section
from nemo_rl.config.base.structure import Slot, has_key, mappings_in, value_at
from nemo_rl.config.loading.sources import Sources
from nemo_rl.config.runs.run import RunConfig

type Path = tuple[str | int, ...]

_SWITCH = "enabled"


class IdleKey(NamedTuple):
    """A key that has no effect."""

    path: Path
    """Path of the key."""
    reason: str
    """Reason why the key has no effect."""
    deciders: Sequence[Path] = ()
    """Paths of the keys whose values make this key idle."""


def idle_keys(config: Section, values: Mapping[str, Any], sources: Sources) -> list[IdleKey]:
    """Return the written keys without effect. If a whole section has no effect, return only the section.

    Args:
        config: the typed configuration.
        values: the configuration as plain dicts and lists.
        sources: the file or override that wrote each key.
    """
    found = list(_unused(config))
    off = {key.path for key in found}
    for slot, tree, path in mappings_in(Slot.of_section(type(config)), values):
        if any(path[:depth] in off for depth in range(1, len(path) + 1)):
            continue
        if tree.get(_SWITCH) is False:
            off.add(path)
            found += _below_switch(tree, path, sources)
            continue
        section = slot.section_for(tree)
        if section is not None and issubclass(section, Section):
            here = [*_by_section(section, tree, path), *_by_other_keys(section, tree, path, values)]
            off |= {key.path for key in here}
            found += here
    return [key for key in found if _is_told(key, sources)]


def _unused(config: Section) -> Iterator[IdleKey]:
    """Yield the keys that the run does not use."""
    if isinstance(config, RunConfig):
        for key, deciders, reason in config.unused():
            yield IdleKey(_path(key), reason, [_path(each) for each in deciders])


def _below_switch(tree: Mapping[str, Any], path: Path, sources: Sources) -> Iterator[IdleKey]:
    """Yield the keys of a disabled section that were written after its switch."""
    switch = (*path, _SWITCH)
    for key, value in tree.items():
        place = (*path, key)
        if key != _SWITCH and not is_off(value) and sources.rank(place) > sources.rank(switch):
            yield IdleKey(place, f"{'.'.join(map(str, path))}.{_SWITCH}=false")


def _by_section(section: type[Section], tree: Mapping[str, Any], path: Path) -> Iterator[IdleKey]:
    """Yield the keys that the section itself declares as idle."""
    deciders = [(*path, section.decided_by)] if section.decided_by else []
    reasons = section.without_effect(tree)
    for key in tree:
        reason = next((reason for name, reason in reasons.items() if has_key([name], str(key))), None)
        if reason is not None:
            yield IdleKey((*path, key), reason, deciders)


def _by_other_keys(
    section: type[Section], tree: Mapping[str, Any], path: Path, values: Mapping[str, Any]
) -> Iterator[IdleKey]:
    """Yield the keys whose condition (`OnlyWith`) is false."""
    for key, field in section.model_fields.items():
        for condition in field.metadata:
            if not isinstance(condition, OnlyWith) or is_off(tree.get(key)):
                continue
            decider = condition.path_from(path)
            if not condition.holds(value_at(values, decider)):
                yield IdleKey((*path, key), condition.reason, [decider])


def _is_told(key: IdleKey, sources: Sources) -> bool:
    rank = sources.rank(key.path)
    return rank >= 0 and all(rank >= sources.rank(decider) for decider in key.deciders)


def _path(dotted: str) -> Path:
    return tuple(dotted.split("."))
