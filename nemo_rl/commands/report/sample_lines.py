"""Read lines of the files in which a run stores its samples."""

import json
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from nemo_rl.commands.report.run_files import finite, read_json

Scalar = str | int | float | None

_FILE = re.compile(r"(train|val)_data_step([0-9]{1,18})\.jsonl")
_PREVIEW_CHARS = 100
_MAX_TEXT_CHARS = 200_000
"""Characters of one message that a page shows."""
COLUMNS = (
    "phase",
    "step",
    "group",
    "sample",
    "branch",
    "idx",
    "task",
    "reward",
    "outcome",
    "length",
    "turns",
    "preview",
)
"""Names of the values of a summary."""
_NUMBERS = ("generation_logprobs", "prev_logprobs", "advantages", "values", "returns")
_DECIMALS = 4
_LARGEST = 2**63
"""Whole numbers of a table are smaller; files whose steps are larger have other names."""


def sample_files(folder: Path) -> list[tuple[int, str, Path]]:
    """Return step, phase and path of each file of samples, in the order of the steps."""
    named = ((_FILE.fullmatch(path.name), path) for path in folder.glob("*_data_step*.jsonl"))
    return sorted((int(name[2]), "train" if name[1] == "train" else "validation", path) for name, path in named if name)


def training_file(step: int) -> str:
    """Return the name of the file with the samples of a training step."""
    return f"train_data_step{step}.jsonl"


def summary_of(line: bytes, phase: str, step: int) -> list[Scalar] | None:
    """Return the values of `COLUMNS` of a sample; None if the line is no sample.

    Args:
        line: a line of a file.
        phase: phase of the file, "train" or "validation".
        step: step of the file.
    """
    row = read_json(line)
    if not _is_sample(row):
        return None
    turns = [message for message in row["content"] if message.get("role") == "assistant"]
    last = str(turns[-1].get("content", "")) if turns else ""
    reward, length = finite(row.get("rewards")), row.get("response_length")
    length = length if isinstance(length, int) and abs(length) < _LARGEST else 0
    place = [_scalar(row.get(name)) for name in ("group", "sample", "branch", "idx")]
    names = [_scalar(str(row.get(name, ""))) for name in ("task_name", "outcome")]
    return [phase, step, *place, names[0], reward, names[1], length, len(turns), _scalar(last[-_PREVIEW_CHARS:])]


def _scalar(value: Any) -> Scalar:
    """Return a value that a table can store: text without unpaired surrogates, other objects as JSON."""
    if isinstance(value, float):
        return finite(value)
    if value is None or (isinstance(value, int) and abs(value) < _LARGEST):
        return value
    text = value if isinstance(value, str) else json.dumps(value)
    return text.encode("utf-8", "replace").decode()


def _is_sample(row: Any) -> bool:
    content = row.get("content") if isinstance(row, dict) else None
    return isinstance(content, list) and all(isinstance(message, dict) for message in content)


def detail_of(line: bytes) -> dict[str, Any]:
    """Return what the page shows of one sample, with its conversation and tokens.

    Raises:
        ValueError: the line is no sample.
    """
    row = read_json(line)
    if not _is_sample(row):
        raise ValueError("the line is no sample")
    messages = [
        {
            "role": str(message.get("role", "")),
            "content": str(message.get("content", ""))[:_MAX_TEXT_CHARS],
            "is_cut": len(str(message.get("content", ""))) > _MAX_TEXT_CHARS,
        }
        for message in row["content"]
    ]
    return {
        "messages": messages,
        **{name: _scalar(row.get(name)) for name in ("branch", "effort", "ended_by", "error", "answer")},
        "turn_rewards": [finite(value) for value in _list(row, "turn_rewards")],
        "reward_components": {name: finite(value) for name, value in _mapping(row, "reward_components").items()},
        "penalties": {name: turns for name, turns in _mapping(row, "penalties").items() if isinstance(turns, list)},
        "tokens": dict(_tokens(row)),
    }


def _tokens(row: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    """Yield the columns of tokens; nothing if the sample has none, or numbers that are no tokens."""
    ids = _list(row, "token_ids")
    if not ids or not all(type(token) is int and token >= 0 for token in ids):
        return
    yield "ids", ids
    yield "mask", _list(row, "token_loss_mask")
    versions = _list(row, "weight_versions")
    yield "versions", versions if all(map(_is_version, versions)) else []
    for name in _NUMBERS:
        if isinstance(row.get(name), list):
            numbers = map(finite, row[name])
            yield name, [None if number is None else round(number, _DECIMALS) for number in numbers]


def _is_version(value: Any) -> bool:
    """Return whether a value is the first token of a version of the weights, and the version."""
    return isinstance(value, list) and len(value) == 2 and all(type(number) is int for number in value)


def _list(row: Mapping[str, Any], name: str) -> list[Any]:
    value = row.get(name)
    return value if isinstance(value, list) else []


def _mapping(row: Mapping[str, Any], name: str) -> dict[str, Any]:
    value = row.get(name)
    return value if isinstance(value, dict) else {}
