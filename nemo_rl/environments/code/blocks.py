"""Find code in the text of a response."""

import re

OPENING, CLOSING = "<code>", "</code>"
_TAGGED = re.compile(rf"{OPENING}(.*?)(?:{CLOSING}|\Z)", re.DOTALL)
_FENCED = re.compile(
    r"^[ \t]*```[ \t]*(?:python3?|py)?[ \t]*\r?\n(.*?)^[ \t]*```", re.DOTALL | re.MULTILINE | re.IGNORECASE
)


def code_to_run(text: str) -> str | None:
    """Return the last block between `<code>` and `</code>`; None if there is none.

    The end of the text closes a block, because a stop string may have been left out of it. A fence inside of the tags
    is taken off.
    """
    found = _TAGGED.findall(text)
    return _without_fence(found[-1]) if found else None


def final_code(text: str) -> str | None:
    """Return the last block in a fence of three backticks, outside of `<code>`; None if there is none."""
    found = _FENCED.findall(_TAGGED.sub("", text))
    return found[-1] if found else None


def _without_fence(block: str) -> str:
    found = _FENCED.findall(block)
    return found[-1] if found else block.strip("\r\n")
