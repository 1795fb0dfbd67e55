"""Makes a training batch from conversations in a notebook, in one call.

`messages.conversations` renders and tokenises, `collate_fn` joins; a run's data sets are processed in the same way.
Invariant: the tokens that count are those that SFT would train on.
"""

from collections.abc import Iterable
from typing import Any

from nemo_rl.data.collate_fn import sft_collate_fn
from nemo_rl.data.interfaces import Message, TaskDataSpec, TokenizerType
from nemo_rl.data.messages.conversations import sft_processor
from nemo_rl.distributed.batched_data_dict import BatchedDataDict
from nemo_rl.utils.errors import DataError


def chat_batch(
    tokenizer: TokenizerType,
    conversations: Iterable[list[Message]],
    *,
    only_last: bool = False,
    max_length: int | None = None,
) -> BatchedDataDict[Any]:
    """Make a batch of B conversations in which the assistant's tokens count.

    If a loss needs more inputs, add them under new names: tensors with first axis B, per token `[B, T]`.

    Args:
        tokenizer: its chat template renders, its pad token fills rows.
        conversations: each a list of messages with `role` and `content`; the last one is the assistant's.
        only_last: only the last assistant turn counts, instead of all of them.
        max_length: longest conversation in tokens.

    Returns:
        `input_ids [B, T]` int64, right padded, `input_lengths [B]` int64, `token_mask [B, T]` float32,
        `sample_mask [B]` float32, `idx` (list).

    Raises:
        DataError: there is no conversation, one is too long, or the chat template refuses it.

    Example:
        >>> chat_batch(tokenizer, [[{"role": "user", "content": "2+2="}, {"role": "assistant", "content": "4"}]])
    """
    spec = TaskDataSpec()
    data = [
        sft_processor({"messages": messages}, spec, tokenizer, None, idx, add_generation_prompt=True)
        for idx, messages in enumerate(conversations)
    ]
    if not data:
        raise DataError("chat_batch was given no conversation.")
    too_long = [(datum["idx"], datum["length"]) for datum in data if max_length and datum["length"] > max_length]
    if too_long:
        idx, length = too_long[0]
        raise DataError(
            f"{len(too_long)} of {len(data)} conversations are longer than max_length={max_length} tokens, the first "
            f"is number {idx} with {length}."
        )
    batch = sft_collate_fn(data, tokenizer, 1, only_unmask_final=only_last)
    del batch["loss_multiplier"]
    return batch
