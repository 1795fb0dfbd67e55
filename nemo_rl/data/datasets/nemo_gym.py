"""Read rows of NeMo Gym. Each row has the first request of an agent, and fields for the verifier.

The data set is chosen with `dataset_name: NemoGymDataset`. Invariant: the agent gets the row unchanged. The prompt that
is made from the row is used only for lengths and logs.
"""

from collections.abc import Iterator, Mapping
from typing import Any

from nemo_rl.config import DatasetConfig
from nemo_rl.data.bad_rows import RowError
from nemo_rl.data.datasets.arithmetic import TRAIN
from nemo_rl.data.datasets.hub import HubSource, load_table
from nemo_rl.data.datasets.raw_dataset import FormattedRows, RawDataset, Row
from nemo_rl.data.datasets.rows.values import kind_of, plain_text, text_of, value_of
from nemo_rl.data.interfaces import Message
from nemo_rl.data.processors import GYM_ROW, get_processor, nemo_gym_data_processor
from nemo_rl.utils.errors import DataError

_PARAMETERS = "responses_create_params"
_AGENT = "agent_ref"
_TEXTS = ("input_text", "output_text", "text")
_ROLES = {"system": "system", "developer": "system", "user": "user", "assistant": "assistant"}


class NemoGymDataset(RawDataset):
    """Rows of NeMo Gym from a JSONL file.

    Args:
        config: a data set of `data.train` or `data.validation`, whose `processor` must be `nemo_gym_data_processor`.
        role: "train" or "validation".

    Raises:
        DataError: the file cannot be read, or the processor does not fit.
    """

    def __init__(self, config: DatasetConfig, role: str = TRAIN) -> None:
        if get_processor(config.processor) is not nemo_gym_data_processor:
            raise DataError(
                f"dataset_name: NemoGymDataset has rows that processor: {config.processor} cannot read. Set "
                "data.default.processor=nemo_gym_data_processor."
            )
        table = load_table(config, role, HubSource(None))
        self.take_rows(table, GymRows(table, [_PARAMETERS, _AGENT], prompt_messages, config.env_name))


class GymRows(FormattedRows):
    """Formatted rows with `messages` and `tools` of the first request, and the whole row in `extra_env_info`."""

    def __getitem__(self, position: Any) -> Any:
        row = self.table.rows[int(self.indices[position])]
        return {
            "messages": prompt_messages(row),
            "tools": _tools(row[_PARAMETERS]),
            "extra_env_info": {GYM_ROW: dict(row)},
            "task_name": self._task_name,
        }


def prompt_messages(row: Row) -> list[Message]:
    """Return the messages of a row's first request.

    Raises:
        RowError: the row has no request or no agent, or has content that only other models can read, such as images.
    """
    parameters, agent = (_object(row, key) for key in (_PARAMETERS, _AGENT))
    text_of(agent, "name")
    _tools(parameters)
    given = value_of(parameters, "input")
    items = [{"role": "user", "content": given}] if isinstance(given, str) else given
    if not isinstance(items, list) or not all(isinstance(item, Mapping) for item in items):
        raise RowError(f"'input' is {kind_of(given)}, not a text or a list of items")
    told = parameters.get("instructions")
    instructions = [] if told is None else [{"role": "system", "content": plain_text(told, "'instructions'")}]
    return [*instructions, *_joined(items)]


def _object(row: Mapping[str, Any], key: str) -> Mapping[str, Any]:
    value = value_of(row, key)
    if not isinstance(value, Mapping):
        raise RowError(f"{key!r} is {kind_of(value)}, not an object")
    return value


def _joined(items: list[Mapping[str, Any]]) -> Iterator[Message]:
    """Yield the messages of items. Consecutive calls become one message, and reasoning is left out."""
    calls: list[Message] = []
    for item in items:
        kind = item.get("type") or "message"
        if kind == "function_call":
            calls.append({"name": text_of(item, "name"), "arguments": plain_text(item.get("arguments"), "'arguments'")})
            continue
        if kind == "reasoning":
            continue
        if calls:
            yield _answer(calls)
            calls = []
        yield _message(item, kind)
    if calls:
        yield _answer(calls)


def _answer(calls: list[Message]) -> Message:
    return {
        "role": "assistant",
        "content": "",
        "tool_calls": [{"type": "function", "function": call} for call in calls],
    }


def _message(item: Mapping[str, Any], kind: str) -> Message:
    if kind == "function_call_output":
        return {"role": "tool", "content": _content(value_of(item, "output"))}
    if kind != "message":
        raise RowError(f"'input' has an item of type {kind!r}, which cannot be rendered")
    role = _ROLES.get(str(item.get("role")))
    if role is None:
        raise RowError(f"'input' has a message of the unknown role {item.get('role')!r}")
    return {"role": role, "content": _content(value_of(item, "content"))}


def _content(content: Any) -> str:
    """Return a text, or the joined texts of a list of parts."""
    if not isinstance(content, list):
        return plain_text(content, "the content of a message")
    for part in content:
        if not isinstance(part, Mapping) or part.get("type") not in _TEXTS:
            kind = part.get("type") if isinstance(part, Mapping) else kind_of(part)
            raise RowError(f"a message has a part of type {kind!r}; only texts are supported")
    return "\n".join(plain_text(part.get("text"), "a part of a message") for part in content)


def _tools(parameters: Mapping[str, Any]) -> list[dict[str, Any]] | None:
    """Return the tools of a request in the form of chat templates."""
    tools = parameters.get("tools") or []
    if not isinstance(tools, list) or not all(isinstance(tool, Mapping) for tool in tools):
        raise RowError(f"'tools' is {kind_of(tools)}, not a list of tool descriptions")
    return [_tool(tool) for tool in tools] or None


def _tool(tool: Mapping[str, Any]) -> dict[str, Any]:
    if tool.get("type") != "function":
        raise RowError(f"'tools' has a tool of type {tool.get('type')!r}; only functions are supported")
    shown = {key: tool[key] for key in ("description", "parameters") if tool.get(key) is not None}
    return {"type": "function", "function": {"name": text_of(tool, "name"), **shown}}
