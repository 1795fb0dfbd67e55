"""Reads the tool descriptions of a row for chat templates."""

import json
from collections.abc import Mapping
from typing import Any

from nemo_rl.data.bad_rows import RowError


def tools_of(row: Mapping[str, Any], key: str = "tools") -> list[dict[str, Any]] | None:
    """Return the tool descriptions of a row, given as a list or its JSON text; None without any.

    Raises:
        RowError: The descriptions are not a list of objects.
    """
    tools = row.get(key)
    if isinstance(tools, str) and tools.strip():
        tools = parsed_json(tools, repr(key))
    if not tools:
        return None
    if not isinstance(tools, list) or not all(isinstance(tool, Mapping) for tool in tools):
        raise RowError(f"{key!r} is not a list of tool descriptions")
    return [dict(tool) for tool in tools]


def parsed_json(text: str, what: str) -> Any:
    """Return the value of a JSON text.

    Raises:
        RowError: The text is not valid JSON.
    """
    try:
        return json.loads(text)
    except (ValueError, RecursionError):  # `int` refuses thousands of digits by a ValueError
        raise RowError(f"{what} is not valid JSON") from None
