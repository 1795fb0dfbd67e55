"""Read data sets of whole conversations for supervised training.

`response_datasets` registers these data sets. Invariant: a usable conversation ends with an assistant message. Tool
calls have OpenAI's form and the arguments of the row, which are a mapping or valid JSON text.
"""

import math
from collections.abc import Collection, Mapping, Sequence
from glob import glob
from pathlib import Path
from typing import Any

from nemo_rl.config import DatasetConfig
from nemo_rl.config.base.names import PLAIN_TEXT
from nemo_rl.data.bad_rows import RowError
from nemo_rl.data.datasets.arithmetic import TRAIN
from nemo_rl.data.datasets.hub import HubSource, load_table
from nemo_rl.data.datasets.raw_dataset import FormattedRow, FormattedRows, RawDataset, Row
from nemo_rl.data.datasets.rows.images import content_parts, has_media
from nemo_rl.data.datasets.rows.readers import RowTable, read_file
from nemo_rl.data.datasets.rows.values import kind_of, plain_text, text_of, value_of
from nemo_rl.data.messages.content import content_text
from nemo_rl.data.messages.conversations import ENDS
from nemo_rl.data.messages.template_form import ROLES, is_excluded, parsed_json, tools_of
from nemo_rl.utils.errors import DataError

ASSISTANT = "assistant"
_CALLS = ("tool_calls", "function_call")
"""Keys of a message for its tool calls. The second key is OpenAI's older key for a single call."""


class MessagesDataset(RawDataset):
    """Rows with a list of messages.

    Args:
        config: A data set of `data.train` or `data.validation`, whose `chat_key` names the column.
        role: "train" or "validation", which determines the default split.
        source: Location of a named data set, or None for any file or hub id.

    Raises:
        DataError: There is nothing to read, or it cannot be read.
    """

    def __init__(self, config: DatasetConfig, role: str = TRAIN, source: HubSource | None = None) -> None:
        self.config = config
        self.chat_key = config.chat_key or "messages"
        table = load_table(config, role, source or HubSource(None))
        self.take_rows(table, self.format_rows(table))

    def format_rows(self, table: RowTable) -> FormattedRows:
        """Check the rows and keep the usable ones."""
        return FormattedRows(table, self.columns(), self.to_messages, self.config.env_name)

    def columns(self) -> list[str]:
        """Return the columns that `to_messages` reads."""
        return [self.chat_key]

    def to_messages(self, row: Row) -> list[dict[str, Any]]:
        """Return the conversation of a raw row.

        Raises:
            RowError: The row cannot be used. The message gives the reason.
        """
        return checked_messages(value_of(row, self.chat_key), self.chat_key)


class OpenAIFormatDataset(MessagesDataset):
    """Conversations in OpenAI's format, with tool calls, answers and descriptions.

    `system_key` names a column with a system message, and `system_prompt` is the system message of rows without one.
    `tool_key` names the column of tool descriptions, which are a list or its JSON text.
    """

    def __init__(self, config: DatasetConfig, role: str = TRAIN) -> None:
        self.tool_key = config.tool_key or "tools"
        super().__init__(config, role)

    def format_rows(self, table: RowTable) -> FormattedRows:
        """Check the rows and keep the usable ones, with their tools."""
        return ToolRows(table, self.columns(), self.to_messages, self.config.env_name, tool_key=self.tool_key)

    def columns(self) -> list[str]:
        """Return the columns of messages, system message and tools."""
        return [key for key in (self.chat_key, self.config.system_key, self.tool_key) if key]

    def to_messages(self, row: Row) -> list[dict[str, Any]]:
        """Return the conversation, starting with its system message."""
        tools_of(row, self.tool_key)
        messages = super().to_messages(row)
        system = self.config.system_prompt
        if self.config.system_key and row.get(self.config.system_key):
            system = text_of(row, self.config.system_key)
        if system and messages[0]["role"] != "system":
            messages.insert(0, {"role": "system", "content": system})
        return messages


class ToolRows(FormattedRows):
    """Formatted rows with their tool descriptions as mappings under the key `tools`."""

    def __init__(self, *args: Any, tool_key: str) -> None:
        super().__init__(*args)
        self._tool_key = tool_key

    def __getitem__(self, position: Any) -> Any:
        row = super().__getitem__(position)
        return {**row, "tools": tools_of(row, self._tool_key)}


class OpenAssistantDataset(MessagesDataset):
    """OpenAssistant's conversation trees. Each tree yields its best-ranked path that ends with an answer."""

    _ROLES = {"prompter": "user", "assistant": ASSISTANT}

    def columns(self) -> list[str]:
        """Return the column of the root of the tree."""
        return ["prompt"]

    def to_messages(self, row: Row) -> list[dict[str, Any]]:
        """Follow the best-ranked reply of each message through the tree, and return the messages."""
        node = value_of(row, "prompt")
        messages: list[dict[str, Any]] = []
        while isinstance(node, Mapping):
            role = self._ROLES.get(str(node.get("role")))
            if role is None:
                raise RowError(f"unknown role {node.get('role')!r}")
            messages.append({"role": role, "content": text_of(node, "text")})
            replies = node.get("replies") or []
            if not isinstance(replies, list) or not all(isinstance(reply, Mapping) for reply in replies):
                raise RowError("'replies' is not a list of messages")
            node = min((reply for reply in replies if not reply.get("deleted")), key=_rank, default=None)
        if messages and messages[-1]["role"] != ASSISTANT:
            messages.pop()
        return checked_messages(messages, "prompt")


def _rank(reply: Mapping[str, Any]) -> float:
    rank = reply.get("rank")
    if rank is None:
        return math.inf
    if not isinstance(rank, int | float):
        raise RowError(f"'rank' is {kind_of(rank)}, not a number")
    return rank


def checked_messages(messages: Any, key: str) -> list[dict[str, Any]]:
    """Check messages and return them in the form of the chat template.

    Raises:
        RowError: The messages are not a conversation that ends with an assistant message with text or tool calls.
    """
    checked = message_list(messages, key)
    if not checked or checked[-1]["role"] != ASSISTANT:
        raise RowError("the last message is not an assistant's")
    if all(is_excluded(message) for message in checked if message["role"] == ASSISTANT):
        raise RowError("no assistant message counts in the loss (weight 0)")
    return checked


def message_list(messages: Any, key: str, known_roles: Collection[str] | None = ROLES) -> list[dict[str, Any]]:
    """Check that messages have a role from `known_roles` and text as content, and return them.

    Args:
        messages: A value of a row.
        key: Column of the value, for errors.
        known_roles: Roles that are allowed, or None to allow any text.

    Raises:
        RowError: A message has an unknown role or no text, or the messages are not a list.
    """
    if not isinstance(messages, list):
        raise RowError(f"{key!r} is {kind_of(messages)}, not a list of messages")
    return [_message(message, number, known_roles) for number, message in enumerate(messages)]


def _message(message: Any, number: int, known_roles: Collection[str] | None) -> dict[str, Any]:
    if not isinstance(message, Mapping):
        raise RowError(f"message {number} is {kind_of(message)}, not an object")
    role = text_of(message, "role") if known_roles is None else message.get("role")
    if known_roles is not None and role not in known_roles:
        raise RowError(f"message {number} has the unknown role {role!r}")
    kept = {key: value for key, value in message.items() if value is not None and key not in _CALLS}
    old = message.get("function_call")
    listed = message.get("tool_calls") or ([] if not old else [old])
    if not isinstance(listed, list):
        raise RowError(f"the tool calls of message {number} are {kind_of(listed)}, not a list")
    calls = [_tool_call(call, number) for call in listed]
    if calls:
        kept["tool_calls"] = calls
        kept.setdefault("content", "")
    kept["content"] = _content(kept.get("content"), number, str(role))
    if not calls and role == ASSISTANT:
        text_of(kept, "content")
    _check_flags(kept)
    return kept


def _check_flags(message: Mapping[str, Any]) -> None:
    try:
        is_excluded(message)
    except DataError as error:
        raise RowError(str(error)) from None


def _content(content: Any, number: int, role: str) -> str | list[dict[str, Any]]:
    """Return the text of a message, which may be given as a list of typed parts, or its parts if there are images.

    Raises:
        RowError: The content is neither a text nor a list of parts, or one of the parts is neither text nor an image.
    """
    what = f"the content of message {number}"
    if content is None:
        raise RowError(f"message {number} has no content")
    if isinstance(content, list) and has_media(content):
        if role == ASSISTANT:
            raise RowError(f"message {number} of the assistant has an image or other media, which a model cannot write")
        return content_parts(content, what)
    if isinstance(content, list):
        try:
            content = content_text(content, what)
        except DataError as error:
            raise RowError(str(error)) from None
    return plain_text(content, what)


def _tool_call(call: Any, number: int) -> dict[str, Any]:
    function = call.get("function", call) if isinstance(call, Mapping) else None
    name = function.get("name") if isinstance(function, Mapping) else None
    if function is None or not isinstance(name, str) or not name:
        raise RowError(f"message {number} has a tool call without a name")
    arguments = function.get("arguments") or {}
    if isinstance(arguments, str):
        parsed_json(arguments, f"the tool arguments of message {number}")
    made = {**_without_nulls(function), "name": name, "arguments": arguments}
    around = _without_nulls(call) if "function" in call else {key: made.pop(key) for key in ("id",) if key in made}
    return {**around, "type": "function", "function": {key: made[key] for key in made if key != "type"}}


def _without_nulls(value: Mapping[str, Any]) -> dict[str, Any]:
    return {key: below for key, below in value.items() if below is not None}


class PlainTextDataset(RawDataset):
    """Rows of plain text. All tokens count in the loss, and no chat template is used.

    Args:
        config: A data set of `data.train` or `data.validation`. Its keys `data_path` or `data_files`, `text_key` and
            `characters_per_sample` are used.
        role: "train" or "validation", which determines the default split.

    Raises:
        DataError: There is nothing to read, or it cannot be read.
    """

    def __init__(self, config: DatasetConfig, role: str = TRAIN) -> None:
        self._key = config.text_key or "text"
        tables = (
            [load_table(config, role, HubSource(None))] if config.data_files is None else _tables(config.data_files)
        )
        parts = [FormattedRows(table, [self._key], self._text, config.env_name, key=PLAIN_TEXT) for table in tables]
        self.take_rows(tables[0], parts[0])
        self.dataset = TextSamples(parts, config.characters_per_sample)
        self.bad_rows = [bad for part in parts for bad in part.bad_rows]
        self.num_rows = sum(table.num_rows for table in tables)

    def _text(self, row: Row) -> str:
        text = text_of(row, self._key)
        if not text.strip():
            raise RowError(f"{self._key} is empty")
        return text


class TextSamples(Sequence[FormattedRow]):
    """Samples of the texts of several files. Each text is divided into consecutive samples.

    Args:
        parts: The rows of each file; a row has its text under `PLAIN_TEXT`.
        longest: Largest number of characters of a sample, or None if each text is one sample.
    """

    def __init__(self, parts: Sequence[FormattedRows], longest: int | None) -> None:
        self._parts, self._longest = parts, longest
        self._places: list[tuple[int, int, int]] = []
        for number, part in enumerate(parts):
            for position in range(len(part)):
                size = len(part[position][PLAIN_TEXT]) if longest else 1
                self._places += [(number, position, start) for start in range(0, size, longest or 1)]

    def __len__(self) -> int:
        return len(self._places)

    def __getitem__(self, index: Any) -> Any:
        number, position, start = self._places[index]
        row = self._parts[number][position]
        end = len(row[PLAIN_TEXT]) if self._longest is None else start + self._longest
        return {
            PLAIN_TEXT: row[PLAIN_TEXT][start:end],
            ENDS: end >= len(row[PLAIN_TEXT]),
            "task_name": row["task_name"],
        }

    def place(self, position: int) -> tuple[str, int]:
        """Return the file and line of a sample."""
        number, row, _ = self._places[position]
        return self._parts[number].place(row)


def _tables(patterns: list[str] | str) -> list[RowTable]:
    """Read the files that match the patterns, ordered by file name."""
    tables = []
    for pattern in [patterns] if isinstance(patterns, str) else patterns:
        found = sorted(glob(str(Path(pattern).expanduser()), recursive=True))
        if not found:
            raise DataError(f"data_files={pattern!r} matches no file. Give local files; for the hub set data_path.")
        tables += [read_file(path) for path in found]
    return tables
