"""Reads data sets of single answers that are labelled good or bad.

Pairs of `preference_datasets` work too: the preferred answer of a pair is desirable, the other one undesirable.
Invariant: a formatted row has `feedback`: `context` and `completion` (messages) and `desirable`; `tools`, if the row
has any.
"""

from typing import Any

import numpy as np

from nemo_rl.config import DatasetConfig
from nemo_rl.data.bad_rows import RowError
from nemo_rl.data.datasets.arithmetic.problems import TRAIN
from nemo_rl.data.datasets.conversation_datasets import ASSISTANT
from nemo_rl.data.datasets.hub import HubSource, load_table
from nemo_rl.data.datasets.preference_datasets import (
    after_prompt,
    answer_messages,
    load_preference_dataset,
    prompt_messages,
    whole_conversation,
    with_tools,
)
from nemo_rl.data.datasets.raw_dataset import FormattedRows, RawDataset, Row, RowView
from nemo_rl.data.datasets.registry import DatasetKind
from nemo_rl.data.datasets.rows.values import kind_of, value_of

KEY = "feedback"
BINARY_FEEDBACK = "BinaryFeedbackDataset"


class BinaryFeedbackDataset(RawDataset):
    """Rows with an answer and a label: `prompt_key`, `output_key` (completion) and `label_key`, true or false.

    Prompt and answer are texts or lists of messages. Without a prompt column, `output_key` is a whole conversation
    that ends with the answer, as messages or in the format of hh-rlhf.

    Args:
        config: The entry of `data.train` or `data.validation`.
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
    """Each answer of a pair as a separate row: row 2i is the preferred answer of pair i, row 2i + 1 the other."""

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
    """Load the data set of one config entry, and split it if the entry says so.

    Args:
        config: An entry of `data.train` or `data.validation`: labelled answers, or anything that
            `load_preference_dataset` knows. Both answers of a pair are on the same side of a split.
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
