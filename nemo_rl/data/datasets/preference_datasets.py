"""Read data sets of pairs of answers, and of single answers that are labelled good or bad."""

import math
import re
from collections.abc import Mapping
from functools import partial
from typing import Any

import numpy as np

from nemo_rl.config import DatasetConfig
from nemo_rl.data.bad_rows import RowError
from nemo_rl.data.datasets.arithmetic import TRAIN, WorkedPairsDataset
from nemo_rl.data.datasets.conversation_datasets import ASSISTANT, checked_messages, message_list
from nemo_rl.data.datasets.hub import HubSource, load_table
from nemo_rl.data.datasets.raw_dataset import FormattedRows, RawDataset, Row, RowView
from nemo_rl.data.datasets.registry import DatasetFactory, DatasetKind
from nemo_rl.data.datasets.rows.values import kind_of, text_of, value_of
from nemo_rl.data.messages.template_form import tools_of

Pair = dict[str, Any]
Messages = list[dict[str, Any]]

_TURNS = re.compile(r"\n\n(Human|Assistant):")
_PREFERENCE = "overall_preference"
SAME = "chosen and rejected are the same"
_SPEAKERS = {"Human": "user", "Assistant": ASSISTANT}


class PairDataset(RawDataset):
    """Base class for pairs from a local file, a mirror or the hub. A subclass reads the rows.

    Args:
        config: A data set of `data.train` or `data.validation`.
        role: "train" or "validation", which determines the default split.
        source: Location of a named data set, or None for any file or hub id.

    Raises:
        DataError: There is nothing to read, or it cannot be read.
    """

    def __init__(self, config: DatasetConfig, role: str = TRAIN, source: HubSource | None = None) -> None:
        self.config = config
        self.tool_key = config.tool_key or "tools"
        table = load_table(config, role, source or HubSource(None))
        more = [key for key in (config.margin_key, self.tool_key) if key]
        columns = [*self.columns(), *more]
        rows = FormattedRows(table, columns, self._whole_pair, config.env_name, "pair", _keys_of_completions)
        self.take_rows(table, rows)

    def columns(self) -> list[str]:
        """Return the columns that `to_pair` reads."""
        raise NotImplementedError

    def to_pair(self, row: Row) -> Pair:
        """Return the pair of a raw row.

        Raises:
            RowError: The row cannot be used. The message gives the reason.
        """
        raise NotImplementedError

    def margin_of(self, row: Row, key: str) -> float:
        """Return the number in a column.

        Raises:
            RowError: The column has no number, or a negative one.
        """
        value = value_of(row, key)
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise RowError(f"{key!r} is {kind_of(value)}, not a number")
        if not 0 <= value < math.inf:
            raise RowError(f"{key!r} is {value}, not a finite number from 0 up")
        return float(value)

    def _whole_pair(self, row: Row) -> Pair:
        pair = with_tools(self.to_pair(row), row, self.tool_key)
        if self.config.margin_key:
            pair["margin"] = self.margin_of(row, self.config.margin_key)
        return pair


class PreferenceDataset(PairDataset):
    """Rows `{context: messages, completions: [{rank, completion: messages}, ...]}`.

    The pair consists of the best and the worst of the completions.
    """

    def columns(self) -> list[str]:
        """Return the columns of context and completions."""
        return ["context", "completions"]

    def to_pair(self, row: Row) -> Pair:
        """Return the pair of the completions with the lowest and the highest rank."""
        return ranked_pair(row)


class BinaryPreferenceDataset(PairDataset):
    r"""Rows with a prompt, a preferred and a rejected answer (`prompt_key`, `chosen_key`, `rejected_key`).

    The prompt is a text or a list of messages. Without a prompt column, chosen and rejected are whole
    conversations with the same beginning: lists of messages, or texts written as
    "\n\nHuman: ...\n\nAssistant: ..." (the format of hh-rlhf).
    """

    def columns(self) -> list[str]:
        """Return the columns of prompt, chosen and rejected."""
        return [self.config.prompt_key or "prompt", *self._answer_keys()]

    def to_pair(self, row: Row) -> Pair:
        """Make a pair from prompt and answers, or from two conversations with a common start."""
        prompt_key = self.config.prompt_key or "prompt"
        chosen, rejected = (value_of(row, key) for key in self._answer_keys())
        keys = self._answer_keys()
        if prompt_key in row or self.config.prompt_key is not None:
            context = prompt_messages(value_of(row, prompt_key), prompt_key)
            return pair_after(context, *(answer_messages(row, key) for key in keys))
        best, worst = (whole_conversation(value, key) for value, key in zip((chosen, rejected), keys, strict=True))
        return _split_shared(best, worst)

    def _answer_keys(self) -> tuple[str, str]:
        return self.config.chosen_key or "chosen", self.config.rejected_key or "rejected"


class HelpSteer3Dataset(PairDataset):
    """The data set HelpSteer3. If `overall_preference` is negative, the first response is preferred, else the second.

    If `margin_key` is `overall_preference`, the absolute value of this column is the margin.
    """

    def columns(self) -> list[str]:
        """Return the columns of context, responses and the preference."""
        return ["context", "response1", "response2", _PREFERENCE]

    def to_pair(self, row: Row) -> Pair:
        """Make a pair of the preferred response, by the sign of `overall_preference`, and the other response."""
        preference = value_of(row, _PREFERENCE)
        if not _is_number(preference) or preference == 0:
            raise RowError("'overall_preference' prefers neither response")
        keys = ("response1", "response2") if preference < 0 else ("response2", "response1")
        return pair_after(
            prompt_messages(value_of(row, "context"), "context"), *(answer_messages(row, key) for key in keys)
        )

    def margin_of(self, row: Row, key: str) -> float:
        """Return the number in a column. For `overall_preference`, return its absolute value."""
        return abs(row[_PREFERENCE]) if key == _PREFERENCE else super().margin_of(row, key)


def _keys_of_completions(row: Row) -> list[str]:
    """Return the unused keys of completions as `completions.<key>`."""
    completions = row.get("completions")
    listed = [each for each in completions if isinstance(each, Mapping)] if isinstance(completions, list) else []
    return [f"completions.{key}" for each in listed for key in each if key not in ("rank", "completion")]


def ranked_pair(row: Row) -> Pair:
    """Make a pair of the best and the worst of a row's `completions`.

    Raises:
        RowError: There are no two different ranks, or a message cannot be used.
    """
    completions = value_of(row, "completions")
    if not isinstance(completions, list) or not all(isinstance(c, Mapping) for c in completions):
        raise RowError(f"'completions' is {kind_of(completions)}, not a list of objects")
    if not all(_is_number(c.get("rank")) for c in completions):
        raise RowError("a completion has no 'rank'")
    ranked = sorted(completions, key=lambda c: c["rank"])
    if len(ranked) < 2 or ranked[0]["rank"] == ranked[-1]["rank"]:
        raise RowError("'completions' has no two ranks to compare")
    context = prompt_messages(value_of(row, "context"), "context")
    answers = (checked_messages(c.get("completion"), "completion") for c in (ranked[0], ranked[-1]))
    return with_tools(pair_after(context, *answers), row)


def with_tools(pair: Pair, row: Row, key: str = "tools") -> Pair:
    """Add the tool descriptions of a row, if there are any, to its pair.

    Raises:
        RowError: The tool descriptions are not a list of objects.
    """
    tools = tools_of(row, key)
    return pair if tools is None else {**pair, "tools": tools}


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not math.isnan(value)


def make_pair(context: Messages, chosen: Messages, rejected: Messages) -> Pair:
    """Return a formatted pair.

    Raises:
        RowError: The two answers are the same.
    """
    if chosen == rejected:
        raise RowError(SAME)
    return {
        "context": context,
        "completions": [{"rank": 0, "completion": chosen}, {"rank": 1, "completion": rejected}],
    }


def parse_transcript(text: str, key: str) -> Messages:
    r"""Return the messages of a text written as "\n\nHuman: ...\n\nAssistant: ...".

    Raises:
        RowError: The text has another form, or does not end with a non-empty answer.
    """
    parts = _TURNS.split(text)
    if parts[0].strip() or len(parts) < 3:
        raise RowError(f"{key!r} is not written as '\\n\\nHuman: ... \\n\\nAssistant: ...'")
    messages: Messages = []
    for speaker, said in zip(parts[1::2], parts[2::2], strict=True):
        messages.append({"role": _SPEAKERS[speaker], "content": said.strip()})
    return checked_messages(messages, key)


def whole_conversation(value: Any, key: str) -> Messages:
    """Return a conversation that ends with an answer, from a list of messages or a text for `parse_transcript`.

    Raises:
        RowError: The value is neither a list nor a text, or cannot be used.
    """
    return parse_transcript(value, key) if isinstance(value, str) else checked_messages(value, key)


def _split_shared(chosen: Messages, rejected: Messages) -> Pair:
    """Split two whole conversations into their common beginning and the rest, from the first different answer on."""
    pairs = zip(chosen, rejected, strict=False)
    shared = next((number for number, (one, other) in enumerate(pairs) if one != other), None)
    if shared is None:
        if len(chosen) == len(rejected):
            raise RowError(SAME)
        raise RowError("one of chosen and rejected is the beginning of the other")
    if any(messages[shared]["role"] != ASSISTANT for messages in (chosen, rejected)):
        raise RowError("chosen and rejected differ before their first assistant message that differs")
    if not shared:
        raise RowError("chosen and rejected have no prompt")
    return make_pair(chosen[:shared], chosen[shared:], rejected[shared:])


def prompt_messages(value: Any, key: str) -> Messages:
    """Return the messages of a prompt that is a text or a list of messages. The last message may have any role.

    Raises:
        RowError: The value is neither a text nor a list of messages.
    """
    if isinstance(value, str):
        return [{"role": "user", "content": text_of({key: value}, key)}]
    if not isinstance(value, list):
        raise RowError(f"{key!r} is {kind_of(value)}, neither text nor a list of messages")
    return message_list(value, key)


def pair_after(context: Messages, chosen: Messages, rejected: Messages) -> Pair:
    """Make a pair of two answers to a prompt, or of two conversations that begin with the prompt.

    Raises:
        RowError: The answers are the same, or an answer begins with another prompt.
    """
    if all(messages[0]["role"] == ASSISTANT for messages in (chosen, rejected)):
        return make_pair(context, chosen, rejected)
    for messages in (chosen, rejected):
        after_prompt(context, messages)
    return _split_shared(chosen, rejected)


def after_prompt(context: Messages, messages: Messages) -> int:
    """Return the index of the message after the prompt, which other messages may precede, in a conversation.

    Raises:
        RowError: No assistant message follows the prompt in the conversation.
    """
    said, asked = ([(message["role"], message["content"]) for message in each] for each in (messages, context))
    for end in range(len(asked), len(said)):
        if said[end - len(asked) : end] == asked and said[end][0] == ASSISTANT:
            return end
    raise RowError(f"an answer begins with a message of the role {said[0][0]!r} and does not repeat the prompt")


def answer_messages(row: Row, key: str) -> Messages:
    """Return the messages of an answer that is a text or a list of messages.

    Raises:
        RowError: The value is neither a text nor a list of messages, or is empty.
    """
    value = value_of(row, key)
    if isinstance(value, list):
        return checked_messages(value, key)
    return [{"role": ASSISTANT, "content": text_of(row, key)}]


DATASET_REGISTRY: dict[str, DatasetFactory] = {
    "HelpSteer3": partial(HelpSteer3Dataset, source=HubSource("nvidia/HelpSteer3", validation_split="validation")),
    "Tulu3Preference": partial(
        BinaryPreferenceDataset, source=HubSource("allenai/llama-3.1-tulu-3-8b-preference-mixture")
    ),
    "BinaryPreferenceDataset": BinaryPreferenceDataset,
    "PreferenceDataset": PreferenceDataset,
    "arithmetic_preference": WorkedPairsDataset,
}


PAIRS = DatasetKind("BinaryPreferenceDataset", DATASET_REGISTRY, "pair", ranked_pair)


def load_preference_dataset(config: DatasetConfig | Mapping[str, Any], role: str = TRAIN) -> RawDataset:
    """Load a configured data set (`DatasetKind.load`)."""
    return PAIRS.load(config, role)


KEY = "feedback"
BINARY_FEEDBACK = "BinaryFeedbackDataset"


class BinaryFeedbackDataset(RawDataset):
    """Rows with prompt (`prompt_key`), answer (`output_key`) and label (`label_key`, true or false).

    Prompt and answer are texts or lists of messages. Without a prompt column, `output_key` is a whole conversation
    that ends with the answer, as messages or in the format of hh-rlhf.

    Args:
        config: A data set of `data.train` or `data.validation`.
        role: "train" or "validation".

    Raises:
        DataError: There is nothing to read, or it cannot be read.
    """

    def __init__(self, config: DatasetConfig, role: str = TRAIN) -> None:
        table = load_table(config, role, HubSource(None))
        self._keys = (config.prompt_key or "prompt", config.output_key or "completion", config.label_key or "label")
        self._needs_prompt = config.prompt_key is not None
        self._tool_key = config.tool_key or "tools"
        columns = [*self._keys, self._tool_key]
        self.take_rows(table, FormattedRows(table, columns, self._feedback, config.env_name, key=KEY))

    def _feedback(self, row: Row) -> dict[str, Any]:
        prompt_key, answer_key, label_key = self._keys
        label = value_of(row, label_key)
        if label not in (0, 1):
            raise RowError(f"{label_key!r} is {kind_of(label)}, neither true nor false")
        if self._needs_prompt or prompt_key in row:
            context = prompt_messages(value_of(row, prompt_key), prompt_key)
            completion = answer_messages(row, answer_key)
            if completion[0]["role"] != ASSISTANT:
                prompt_end = after_prompt(context, completion)
                context, completion = completion[:prompt_end], completion[prompt_end:]
        else:
            messages = whole_conversation(value_of(row, answer_key), answer_key)
            context, completion = messages[:-1], messages[-1:]
            if not context:
                raise RowError(f"{answer_key!r} has no prompt")
        feedback = {"context": context, "completion": completion, "desirable": bool(label)}
        return with_tools(feedback, row, self._tool_key)


class AnswersOfPairs(RowView):
    """Each answer of a pair as a separate row. Row 2i is the preferred answer of pair i, row 2i + 1 the other one."""

    def __init__(self, pairs: Any) -> None:
        super().__init__(pairs, np.arange(2 * len(pairs)) // 2)

    def __getitem__(self, position: Any) -> Any:
        row = super().__getitem__(position)
        pair = row["pair"]
        ranked = sorted(pair["completions"], key=lambda completion: completion["rank"])
        desirable = position % 2 == 0
        completion = ranked[0 if desirable else -1]["completion"]
        tools = {"tools": pair["tools"]} if "tools" in pair else {}
        feedback = {"context": pair["context"], "completion": completion, "desirable": desirable, **tools}
        return {KEY: feedback, "task_name": row["task_name"]}


LABELLED = DatasetKind(BINARY_FEEDBACK, {BINARY_FEEDBACK: BinaryFeedbackDataset}, KEY)


def load_feedback_dataset(config: DatasetConfig, role: str = TRAIN) -> RawDataset:
    """Load a configured data set, and split it if this is configured.

    Args:
        config: A data set of `data.train` or `data.validation` with labelled answers, or with any pairs that
            `load_preference_dataset` reads. Both answers of a pair are on the same side of a split.
        role: "train" or "validation".

    Raises:
        DataError: The name is unknown, or the data cannot be read.
    """
    if config.dataset_name in LABELLED.named:
        return LABELLED.load(config, role)
    raw = load_preference_dataset(config, role)
    raw.dataset = AnswersOfPairs(raw.dataset)
    if raw.val_dataset is not None:
        raw.val_dataset = AnswersOfPairs(raw.val_dataset)
    return raw
