"""Give each prompt a random level of effort, and render it again with the level's texts.

This supports all environments, and all processors whose data has `DatumSpec.chat`. Invariant: a prompt's level depends
only on run seed, phase and row, so it is the same for all answers, processes, resumed runs and `nemo_rl regrade`.
"""

import inspect
import re
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from transformers import PreTrainedTokenizerBase

from nemo_rl.config import DataConfig, EffortLevelConfig
from nemo_rl.data.datasets.processed_dataset import MixedDataset, RowsWithPlace
from nemo_rl.data.datasets.setup import RunData
from nemo_rl.data.interfaces import Chat, DatumSpec, Message, TokenizerType
from nemo_rl.data.messages.content import TextRules, content_text, text_rules
from nemo_rl.data.messages.conversations import cut_to_stub
from nemo_rl.data.processors import opening_entry
from nemo_rl.utils.errors import ConfigError, DataError
from nemo_rl.utils.seed import derive_seed

_SEEDS = 2**63
"""Number of different values that `derive_seed` returns."""


def drawn_level(levels: Mapping[str, EffortLevelConfig], run_seed: int, phase: str, row: int) -> str:
    """Draw the level of a prompt, with probabilities proportional to the levels' weights.

    Args:
        levels: the section `effort_levels`, which must not be empty.
        phase: "train", "validation", or the name of another validation set.
        row: index of the prompt's row.
    """
    names = list(levels)
    rest = derive_seed(run_seed, "effort", phase, row) / _SEEDS * sum(level.weight for level in levels.values())
    for name in names:
        rest -= levels[name].weight
        if rest < 0:
            return name
    return names[-1]


class EffortRows:
    """Prompts with their levels of effort, as a part of a `MixedDataset`.

    Args:
        phase: argument of `drawn_level`.
        max_seq_length: largest number of tokens of a prompt, or None for no limit.
        rules: argument of `prompt_entry`.
        first_row: number of the first prompt among the rows of all parts.

    Raises:
        DataError: the first prompt cannot be rendered with a level.
    """

    def __init__(
        self,
        rows: RowsWithPlace,
        levels: Mapping[str, EffortLevelConfig],
        run_seed: int,
        phase: str,
        tokenizer: TokenizerType,
        max_seq_length: int | None = None,
        rules: TextRules | None = None,
        first_row: int = 0,
    ) -> None:
        self._rows = rows
        self._levels = levels
        self._run_seed = run_seed
        self._phase = phase
        self._tokenizer = tokenizer
        self._max_seq_length = max_seq_length
        self._rules = rules
        self._first_row = first_row
        for name in levels if len(rows) else ():
            self._with_level(rows[0], name)

    def __len__(self) -> int:
        return len(self._rows)

    def __getitem__(self, idx: int) -> DatumSpec:
        """Process row `idx`.

        Raises:
            DataError: the prompt cannot be rendered with its level.
        """
        level = drawn_level(self._levels, self._run_seed, self._phase, self._first_row + idx)
        return self._with_level(self._rows[idx], level)

    def place(self, idx: int) -> tuple[str, int]:
        """Return the file (or data set) and line of a row."""
        return self._rows.place(idx)

    def source(self, idx: int) -> Any:
        """Return a row before its processor, or None for a data set that a program passes as an object."""
        source = getattr(self._rows, "source", None)
        return None if source is None else source(idx)

    def _with_level(self, datum: DatumSpec, name: str) -> DatumSpec:
        datum["effort"] = name
        level = self._levels[name]
        if level.is_plain or not datum["loss_multiplier"]:
            return datum
        if "chat" not in datum or "row_inputs" in datum:
            problem = "has inputs next to its tokens" if "row_inputs" in datum else "has no `chat`"
            raise DataError(
                f"effort_levels.{name} changes the prompt, but row {datum['idx']} {problem}, so it cannot be rendered "
                "again. Let the data processor set `chat`, a dict with `messages` and `tools`, or leave out the levels."
            )
        chat = leveled(datum["chat"], level)
        entry = opening_entry(chat, self._tokenizer, self._max_seq_length, self._rules)
        changed: DatumSpec = {**datum, "message_log": [entry], "length": len(entry["token_ids"]), "chat": chat}
        if self._max_seq_length is not None and changed["length"] > self._max_seq_length:
            cut_to_stub(changed, self._max_seq_length)
            del changed["chat"]
        return changed


def leveled(chat: Chat, level: EffortLevelConfig) -> Chat:
    """Return a copy of a chat with the system prompt and the chat template variables of a level."""
    messages: list[Message] = list(chat["messages"])
    if level.system_prompt is not None:
        is_first = bool(messages) and messages[0]["role"] == "system"
        said = f"{content_text(messages[0]['content'])}\n\n" if is_first else ""
        system = {"role": "system", "content": said + level.system_prompt}
        messages = [system, *(messages[1:] if is_first else messages)]
    variables = {**chat.get("template_kwargs", {}), **level.chat_template_kwargs}
    return Chat(messages=messages, tools=chat["tools"], template_kwargs=variables)


def with_effort_levels(
    data: RunData,
    levels: Mapping[str, EffortLevelConfig],
    run_seed: int,
    tokenizer: TokenizerType,
    config: DataConfig,
) -> RunData:
    """Give the prompts of a run their levels. Return the data unchanged if there are no levels.

    Raises:
        ConfigError: the chat template does not read a variable of a level.
        DataError: a prompt cannot be rendered with a level.
    """
    if not levels:
        return data
    for name, level in levels.items():
        _check_variables(f"effort_levels.{name}.chat_template_kwargs", level, tokenizer)

    def rows(phase: str, inner: MixedDataset) -> MixedDataset:
        longest, rules, start, parts = config.max_input_seq_length, text_rules(config), 0, []
        for part in inner.parts:
            parts.append(EffortRows(part, levels, run_seed, phase, tokenizer, longest, rules, start))
            start += len(part)
        return MixedDataset(parts, inner.names)

    return replace(
        data,
        train=rows("train", data.train),
        validation=None if data.validation is None else rows("validation", data.validation),
        named_validation={name: rows(name, inner) for name, inner in data.named_validation.items()},
    )


def _check_variables(key: str, level: EffortLevelConfig, tokenizer: TokenizerType) -> None:
    """Refuse variables that the chat template does not read, because all levels would then have the same prompt."""
    taken = set(inspect.signature(PreTrainedTokenizerBase.apply_chat_template).parameters) | {"messages"}
    template = str(tokenizer.chat_template or "")
    for variable in level.chat_template_kwargs:
        if variable in taken:
            raise ConfigError(f"{key}.{variable} is set by the library. Name a variable of the chat template.")
        if not re.search(rf"\b{re.escape(variable)}\b", template):
            raise ConfigError(
                f"{key}.{variable}: the chat template of tokenizer {tokenizer.name_or_path!r} does not read "
                f"{variable!r}, so the prompt would not change. Check the spelling, or use system_prompt."
            )
