"""Joins data into batches, for the data loader.

Invariant: row i of every value belongs to datum i.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from nemo_rl.data.interfaces import DatumSpec, FeedbackDatumSpec, PreferenceDatumSpec, TokenizerType
from nemo_rl.data.llm_message_utils import (
    add_loss_mask_to_message_log,
    batched_message_log_to_flat_message,
)
from nemo_rl.data.model_rows import ROW_INPUTS, row_inputs_of
from nemo_rl.distributed.batched_data_dict import BatchedDataDict
from nemo_rl.utils.errors import DataError


def rl_collate_fn(data_batch: list[DatumSpec]) -> BatchedDataDict[Any]:
    """Make a batch of B prompts for rollouts.

    Returns:
        `message_log` (list), `length` [B] int64, `loss_multiplier` [B] float32, `extra_env_info`
        (list), `task_name` (list, None where a datum has none), `idx` (list), `batch_max_length`
        [B] int64 (the largest length, B times), `stop_strings` and `chat` (lists, None where absent). If a datum has
        them, `row_inputs` (list), see `data.model_rows`; so do the functions below.
    """
    length = torch.tensor([datum["length"] for datum in data_batch], dtype=torch.int64)
    batch: BatchedDataDict[Any] = BatchedDataDict(
        message_log=[datum["message_log"] for datum in data_batch],
        length=length,
        loss_multiplier=torch.tensor([datum["loss_multiplier"] for datum in data_batch], dtype=torch.float32),
        extra_env_info=[datum["extra_env_info"] for datum in data_batch],
        task_name=[datum.get("task_name") for datum in data_batch],
        idx=[datum["idx"] for datum in data_batch],
        batch_max_length=length.max().expand(len(data_batch)).clone(),
        stop_strings=[datum.get("stop_strings") for datum in data_batch],
        chat=[datum.get("chat") for datum in data_batch],
        **row_inputs_of(data_batch),
    )
    return _with_faults(batch, data_batch)


def eval_collate_fn(data_batch: list[DatumSpec]) -> BatchedDataDict[Any]:
    """Make a batch of prompts for evaluation: `message_log`, `extra_env_info`, `idx` (lists)."""
    return BatchedDataDict(
        message_log=[datum["message_log"] for datum in data_batch],
        extra_env_info=[datum["extra_env_info"] for datum in data_batch],
        idx=[datum["idx"] for datum in data_batch],
    )


def sft_collate_fn(
    data_batch: list[DatumSpec],
    tokenizer: TokenizerType,
    make_sequence_length_divisible_by: int,
    only_unmask_final: bool = False,
) -> BatchedDataDict[Any]:
    """Make a batch of B conversations for supervised training.

    Args:
        data_batch: Conversations whose last message is an assistant's.
        tokenizer: Its pad token fills rows.
        make_sequence_length_divisible_by: T is a multiple of this.
        only_unmask_final: Only the last turn counts in the loss, instead of all assistant turns.

    Returns:
        `input_ids` [B, T] int64, `input_lengths` [B] int64, `token_mask` [B, T] float32, 1 on the
        tokens of the turns that count, `sample_mask` and `loss_multiplier` [B] float32, `idx` (list).
    """
    logs = [datum["message_log"] for datum in data_batch]
    add_loss_mask_to_message_log(logs, only_unmask_final=only_unmask_final)
    flat, lengths = batched_message_log_to_flat_message(
        logs, {"token_ids": tokenizer.pad_token_id}, make_sequence_length_divisible_by
    )
    multipliers = torch.tensor([datum["loss_multiplier"] for datum in data_batch], dtype=torch.float32)
    batch: BatchedDataDict[Any] = BatchedDataDict(
        input_ids=flat["token_ids"],
        input_lengths=lengths,
        token_mask=flat["token_loss_mask"].float(),
        sample_mask=multipliers,
        loss_multiplier=multipliers.clone(),
        idx=[datum["idx"] for datum in data_batch],
        **row_inputs_of(data_batch),
    )
    return _with_faults(batch, data_batch)


def feedback_collate_fn(
    data_batch: list[FeedbackDatumSpec],
    tokenizer: TokenizerType,
    make_sequence_length_divisible_by: int,
) -> BatchedDataDict[Any]:
    """Make a batch of B labelled answers.

    Returns:
        The batch of `sft_collate_fn` with `only_unmask_final`, and `desirable` [B] float32, 1 or 0.
    """
    batch = sft_collate_fn([*data_batch], tokenizer, make_sequence_length_divisible_by, only_unmask_final=True)
    if ROW_INPUTS in batch:
        raise DataError(
            f"A row has {batch[ROW_INPUTS][0]}, but KTO puts answers after the prompts of other rows and accepts token "
            "ids only. Train on such rows with SFT, DPO or GRPO."
        )
    batch["desirable"] = torch.tensor([datum["desirable"] for datum in data_batch], dtype=torch.float32)
    return batch


def preference_collate_fn(
    data_batch: list[PreferenceDatumSpec],
    tokenizer: TokenizerType,
    make_sequence_length_divisible_by: int,
    add_loss_mask: bool,
) -> BatchedDataDict[Any]:
    """Make a batch of B preference pairs as 2B rows: row 2i is chosen, row 2i + 1 rejected.

    Returns:
        `input_ids` [2B, T] int64, `input_lengths` [2B] int64, `sample_mask` and `loss_multiplier`
        [2B] float32, `idx` (list of 2B), with `add_loss_mask` also `token_mask` [2B, T] float32, 1 on the
        tokens of the last message, and where a datum has a margin `margin` [2B] float32, 0 for the others.
    """
    logs = []
    multipliers = []
    sides: list[dict[str, Any]] = []
    for datum in data_batch:
        sides += [{ROW_INPUTS: datum.get(f"{ROW_INPUTS}_{side}")} for side in ("chosen", "rejected")]
        logs += [datum["message_log_chosen"], datum["message_log_rejected"]]
        multipliers += [datum["loss_multiplier"]] * 2
    if add_loss_mask:
        add_loss_mask_to_message_log(logs, only_unmask_final=True)
    flat, lengths = batched_message_log_to_flat_message(
        logs, {"token_ids": tokenizer.pad_token_id}, make_sequence_length_divisible_by
    )
    batch: BatchedDataDict[Any] = BatchedDataDict(
        input_ids=flat["token_ids"],
        input_lengths=lengths,
        sample_mask=torch.tensor(multipliers, dtype=torch.float32),
        loss_multiplier=torch.tensor(multipliers, dtype=torch.float32),
        idx=[datum["idx"] for datum in data_batch for _ in range(2)],
        **row_inputs_of(sides),
    )
    if add_loss_mask:
        batch["token_mask"] = flat["token_loss_mask"].float()
    if any("margin" in datum for datum in data_batch):
        batch["margin"] = torch.tensor([datum.get("margin", 0.0) for datum in data_batch]).repeat_interleave(2)
    return _with_faults(batch, [datum for datum in data_batch for _ in range(2)])


def _with_faults(batch: BatchedDataDict[Any], data: Sequence[Mapping[str, Any]]) -> BatchedDataDict[Any]:
    """Add `fault` (list, None for usable rows) if a datum has one; the loader reports and removes it."""
    if any("fault" in datum for datum in data):
        batch["fault"] = [datum.get("fault") for datum in data]
    return batch
