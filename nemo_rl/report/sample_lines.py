"""Read lines of the files in which a run stores its samples."""

import json
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from nemo_rl.report.run_files import read_json

Scalar = str | int | float | None

_FILE = re.compile(r"(train|val)_data_step(\d+)\.jsonl")
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
_NUMBERS = ("generation_logprobs", "prev_logprobs", "advantages")
_DECIMALS = 4
_LARGEST = 2**63


def sample_files(folder: Path) -> list[tuple[int, str, Path]]:
    """Return step, phase and path of each file of samples, in the order of the steps."""
    named = ((_FILE.fullmatch(path.name), path) for path in folder.glob("*_data_step*.jsonl"))
    return sorted((int(name[2]), "train" if name[1] == "train" else "validation", path) for name, path in named if name)


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
    reward, length = row.get("rewards"), row.get("response_length")
    number = float(reward) if isinstance(reward, int | float) else None
    length = length if isinstance(length, int) else 0
    place = [_scalar(row.get(name)) for name in ("group", "sample", "branch", "idx")]
    names = [_scalar(str(row.get(name, ""))) for name in ("task_name", "outcome")]
    return [phase, step, *place, names[0], number, names[1], length, len(turns), _scalar(last[-_PREVIEW_CHARS:])]


def _scalar(value: Any) -> Scalar:
    """Return a value that a table can store: text without unpaired surrogates, other objects as JSON."""
    if value is None or isinstance(value, float) or (isinstance(value, int) and abs(value) < _LARGEST):
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
    about = ("branch", "turn_rewards", "reward_components", "penalties", "effort", "ended_by", "error", "answer")
    tokens = dict(_tokens(row)) if isinstance(row.get("token_ids"), list) else {}
    return {"messages": messages, **{name: row.get(name) for name in about}, "tokens": tokens}


def _tokens(row: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    yield "ids", row["token_ids"]
    yield "mask", row.get("token_loss_mask", [])
    yield "versions", row.get("weight_versions", [])
    for name in _NUMBERS:
        if isinstance(row.get(name), list):
            yield name, [None if value is None else round(value, _DECIMALS) for value in row[name]]
