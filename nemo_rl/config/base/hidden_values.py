"""Find the secrets of a configuration, which files and trackers must not show.

A text that is read from the environment (`${oc.env:NAME}`, also through other keys) is written as its interpolation. A
text with the name of a secret, such as API_KEY or password, and the login in a URL are written as `***`. Invariant:
`public_values` is the only way in which a configuration leaves the processes of a run.
"""

import re
from collections.abc import Iterator, Mapping
from typing import Any, Literal

from pydantic import BaseModel

from nemo_rl.config.base.structure import value_at

type Place = tuple[str | int, ...]
"""Path of a value in a configuration."""

HIDDEN = "***"
"""Text that replaces a secret that is written literally in the configuration."""

_FROM_ENVIRONMENT = "${oc.env:"
_REFERENCE = re.compile(r"\$\{(\.*)([^${}:,]*)\}")
_VARIABLE = re.compile(r"[A-Z0-9_]*(KEY|TOKEN|SECRET|PASSW|CREDENTIAL|AUTH)[A-Z0-9_]*")
"""Pattern of names of environment variables with secrets."""
_KEY = re.compile(
    r"(.*_)?(api_?key|secret|secret_key|passw(or)?d|credentials?|(access|auth|hf|api)_token|authorization|bearer)"
)
"""Pattern of names of keys with secrets."""
_LOGIN = re.compile(r"(?<=://)[^/@\s]+@")
"""Pattern of the login in a URL."""
_ABSENT = object()


def hidden_values(unresolved: Mapping[str, Any], values: Mapping[str, Any]) -> dict[Place, str]:
    """Return the text that is written instead of each secret, by the path of the secret.

    Args:
        unresolved: plain dicts and lists, with interpolations.
        values: the same values with interpolations resolved.
    """
    texts = dict(_texts(unresolved, ()))
    found = {place: text for place, text in texts.items() if _FROM_ENVIRONMENT in text}
    plain = {place: without_secret(str(place[-1]), text) for place, text in texts.items() if "${" not in text}
    found |= {place: shown for place, shown in plain.items() if shown != texts[place]}
    before = -1
    while before < len(found):  # until no more keys refer to found places
        before = len(found)
        for place, text in texts.items():
            if place not in found:
                found |= _copies(place, text, found)
    return {place: text for place, text in found.items() if isinstance(value_at(values, place), str)}


def _copies(place: Place, text: str, found: Mapping[Place, str]) -> dict[Place, str]:
    """Return the places to which a text's interpolations copy hidden values, with the text to write there."""
    copies: dict[Place, str] = {}
    for dots, name in _REFERENCE.findall(text):
        target: Place = (*(place[: -len(dots)] if dots else ()), *(_part(each) for each in name.split(".") if each))
        if target in found:
            copies[place] = text
        for other, written in found.items():
            if len(other) > len(target) and other[: len(target)] == target:
                copies[(*place, *other[len(target) :])] = written
    return copies


def _part(text: str) -> str | int:
    return int(text) if text.isdigit() else text


def without_secret(name: str, text: str) -> str:
    """Return a text with its secrets replaced by `***`. `name` is the key or the variable of the text."""
    is_secret = _VARIABLE.fullmatch(name) if name.isupper() else _KEY.fullmatch(name.lower())
    return HIDDEN if is_secret and text else _LOGIN.sub(f"{HIDDEN}@", text)


def _texts(tree: Any, place: Place) -> Iterator[tuple[Place, str]]:
    if isinstance(tree, Mapping):
        for key, value in tree.items():
            yield from _texts(value, (*place, key))
    elif isinstance(tree, list):
        for index, value in enumerate(tree):
            yield from _texts(value, (*place, index))
    elif isinstance(tree, str):
        yield place, tree


def places_still_hidden(values: Any) -> list[Place]:
    """Return the places where a run's file has `***` instead of a secret, which the user must give again."""
    return [
        place
        for place, text in _texts(values, ())
        if f"://{HIDDEN}@" in text or (text == HIDDEN == without_secret(str(place[-1]), "a secret"))
    ]


def public_values(config: BaseModel, mode: Literal["json", "python"] = "json") -> dict[str, Any]:
    """Return the values of a configuration in the form that files and trackers may show.

    Args:
        mode: `json` yields only values that JSON can represent, `python` those of pydantic's `model_dump`.
    """
    values = config.model_dump(mode=mode)
    for place, text in hidden_in(config).items():
        for moved in _where(place, values):
            value_at(values, moved[:-1])[moved[-1]] = text
    return values


def hidden_in(config: BaseModel) -> Mapping[Place, str]:
    """Return the result of `hidden_values` for a configuration that was loaded, or none if it was built in code."""
    found: Mapping[Place, str] = getattr(config, "hidden_places", {})
    return found


def public_text(text: str, config: BaseModel) -> str:
    """Return a text, for example a command line, with the secrets of a configuration replaced.

    A secret of fewer than 3 characters (8 if only the environment makes it one) stays, as other words may contain it.
    """
    values = config.model_dump()
    for place, shown in hidden_in(config).items():
        for moved in _where(place, values):
            secret = value_at(values, moved)
            if isinstance(secret, str) and len(secret) >= (3 if HIDDEN in shown else 8):
                text = text.replace(secret, shown)
    return text


def _where(place: Place, values: Mapping[str, Any]) -> Iterator[Place]:
    """Yield the places at which a configuration has a file's value of `place`: there, or in `Section.rest`."""
    if value_at(values, place, _ABSENT) is not _ABSENT:
        yield place
        return
    for depth in range(1, len(place)):
        above = value_at(values, place[:depth])
        for key in above if isinstance(above, Mapping) else ():
            moved = (*place[:depth], key, *place[depth:])
            if value_at(above, moved[depth:], _ABSENT) is not _ABSENT:
                yield moved
