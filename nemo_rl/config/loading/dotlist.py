"""Rewrite overrides in OmegaConf's dotlist grammar, which `run_eval.py` of NeMo RL takes, to Hydra's grammar.

In a dotlist everything after the first `=` is one YAML value, and a missing key is added. Invariant: an override that
is already in Hydra's grammar (`+key=value`, `~key`) passes unchanged.
"""

import json
import re
from collections.abc import Sequence
from typing import Any

from omegaconf import OmegaConf
from yaml import YAMLError


def dotlist_to_overrides(arguments: Sequence[str]) -> list[str]:
    """Rewrite the `key=value` arguments of a command line; options stay as they are.

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
    # Within quotes only a quote is escaped, and backslashes directly before one.
    escaped = re.sub(r'(\\+)(?="|$)', r"\1\1", str(value)).replace('"', '\\"')
    return f'"{escaped}"'
