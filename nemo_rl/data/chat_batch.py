"""Make a training batch from conversations in one call, for example in a notebook.

`messages.conversations` renders and tokenises the conversations, and `collate_fn` joins them, as for the data sets of a
run. Invariant: the tokens that count in the loss are the same as in SFT.
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
    """Make a batch of B conversations in which the assistant's tokens count in the loss.

    Callers can add further inputs of a loss under new names, as tensors with the first axis B, or `[B, T]` per token.

    Args:
        tokenizer: tokenizer whose chat template renders conversations and whose pad token fills rows.
        conversations: lists of messages with `role` and `content`, of which the last message is the assistant's.
        only_last: whether only the last assistant turn counts, instead of all assistant turns.
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
