"""Compare the configuration of a run with that of the replay.

Invariant: a key is a difference only if a step reads it and nothing else of the comparison shows its effect.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from nemo_rl.commands.replay.findings import Difference, Stage
from nemo_rl.commands.replay.tolerances import DIVISION, WITHOUT_INFLUENCE
from nemo_rl.config.rules.resume import ChangedKey

_PLACES = (".model_name", ".tokenizer.name", ".data_path", ".prompt_file", ".system_prompt_file")
"""Ends of keys that name files, which have other places on another machine; weights and prompts are compared."""
_SHOWN = 20


def configuration(changed: Sequence[ChangedKey], before: Mapping[str, Any], now: Mapping[str, Any]) -> Stage:
    """Compare the keys that the numbers of a step depend on.

    Args:
        changed: keys that differ.
        before: the whole configuration of the run.
        now: that of the replay.
    """
    found = [
        Difference(key.key, f"configuration key {key.key} differs: {key.before} in the run, {key.now} now")
        for key in changed
        if _is_compared(key)
    ]
    on_both = _values(before).keys() & _values(now).keys()
    compared = [key for key in on_both if _is_compared(ChangedKey(key, None, None, _is_of_model(key, before)))]
    return Stage("configuration", len({*compared, *(each.name for each in found)}), differences=found)


def configuration_notes(
    changed: Sequence[ChangedKey], before: Mapping[str, Any], now: Mapping[str, Any]
) -> Iterator[str]:
    """Yield what is told of keys and is no difference by itself; arguments as in `configuration`."""
    idle = [key.key for key in changed if _is_no_difference(key)]
    if idle:
        yield f"keys that are no difference by themselves have changed: {_listed(idle)}"
    known = tuple(f"{key.key}." for key in changed)

    def lacks(keys: Iterable[str], others: Mapping[str, Any]) -> list[str]:
        return [key for key in keys if key not in others and not f"{key}.".startswith(known)]

    old, new = _values(before), _values(now)
    if only_then := lacks(old, new):
        yield f"keys that only the version of the run has: {_listed(only_then)}"
    if only_now := lacks(new, old):
        yield f"keys that only this version has: {_listed(only_now)}"


def _is_compared(key: ChangedKey) -> bool:
    return key.about != DIVISION and not _is_no_difference(key)


def _is_no_difference(key: ChangedKey) -> bool:
    """Return whether a step reads only what is compared anyway: recorded rewards, or the content of files."""
    return key.about in WITHOUT_INFLUENCE or key.key.startswith("env.") or key.key.endswith(_PLACES)


def _is_of_model(key: str, config: Mapping[str, Any]) -> bool:
    section = config.get(key.partition(".")[0])
    return isinstance(section, Mapping) and "model_name" in section


def _values(section: Mapping[str, Any], path: str = "") -> dict[str, Any]:
    """Return the values of a configuration by dotted path; a list is one value."""
    found: dict[str, Any] = {}
    for name, value in section.items():
        found |= _values(value, f"{path}{name}.") if isinstance(value, Mapping) else {f"{path}{name}": value}
    return found


def _listed(names: Sequence[str]) -> str:
    more = f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
    return f"{', '.join(names[:_SHOWN])}{more}"
