"""Join data into batches for the data loader, and mark the tokens that count in the loss.

Invariant: row i of every value belongs to datum i, and its token ids are those of the datum's messages, in order.

B is the number of conversations and T the number of tokens of a row.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from nemo_rl.data.interfaces import (
    DatumSpec,
    FeedbackDatumSpec,
    FlatMessagesType,
    LabelledStepsDatumSpec,
    LLMMessageLogType,
    PreferenceDatumSpec,
    ScoredDatumSpec,
    TokenizerType,
)
from nemo_rl.data.model_rows import ROW_INPUTS, row_inputs_of
from nemo_rl.distributed.batched_data_dict import BatchedDataDict
from nemo_rl.utils.errors import DataError


def rl_collate_fn(data_batch: list[DatumSpec]) -> BatchedDataDict[Any]:
    """Make a batch of B prompts for rollouts.

    Returns:
        `message_log` (list), `length` [B] int64, `loss_multiplier` [B] float32, `extra_env_info` (list), `task_name`
        (list, None where a datum has none), `idx` (list), `batch_max_length` [B] int64 (the largest length, B times),
        `stop_strings`, `chat` and `effort` (lists, None where absent). If a datum has `row_inputs`, the batch has them
        too, as a list (`data.model_rows`). The same holds for the functions below.
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
        effort=[datum.get("effort") for datum in data_batch],
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
        data_batch: Conversations whose last message is the assistant's.
        tokenizer: Tokenizer whose pad token fills rows.
        make_sequence_length_divisible_by: T is a multiple of this.
        only_unmask_final: Whether only the last turn counts in the loss, instead of all assistant turns.

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
            f"A row has {batch[ROW_INPUTS][0]}, but KTO puts answers after the prompts of other rows and accepts "
            "token ids only. Train on such rows with SFT, DPO, GRPO or PPO."
        )
    batch["desirable"] = torch.tensor([datum["desirable"] for datum in data_batch], dtype=torch.float32)
    return batch


def scored_collate_fn(
    data_batch: list[ScoredDatumSpec],
    tokenizer: TokenizerType,
    make_sequence_length_divisible_by: int,
) -> BatchedDataDict[Any]:
    """Make a batch of B answers with scores of N attributes.

    Returns:
        The batch of `sft_collate_fn` with `only_unmask_final`, and `target_scores` and `score_mask` [B, N] float32,
        both 0 where a row has no score.
    """
    batch = sft_collate_fn([*data_batch], tokenizer, make_sequence_length_divisible_by, only_unmask_final=True)
    scores = [datum["scores"] for datum in data_batch]
    batch["target_scores"] = torch.tensor([[score or 0.0 for score in row] for row in scores], dtype=torch.float32)
    batch["score_mask"] = torch.tensor([[score is not None for score in row] for row in scores], dtype=torch.float32)
    return batch


def labelled_steps_collate_fn(
    data_batch: list[LabelledStepsDatumSpec],
    tokenizer: TokenizerType,
    make_sequence_length_divisible_by: int,
) -> BatchedDataDict[Any]:
    """Make a batch of B answers whose steps are labelled.

    Returns:
        The batch of `sft_collate_fn`, but with `token_mask` [B, T] 1 on the tokens that follow the last token of a
        step, and `step_labels` [B, T] float32, 1 on those that follow a right step.
    """
    batch = sft_collate_fn([*data_batch], tokenizer, make_sequence_length_divisible_by)
    mask, labels = torch.zeros_like(batch["token_mask"]), torch.zeros_like(batch["token_mask"])
    for row, datum in enumerate(data_batch):
        if datum["loss_multiplier"]:  # the tokens of other rows are cut
            mask[row, datum["step_ends"]] = 1.0
            labels[row, datum["step_ends"]] = torch.tensor(datum["step_labels"], dtype=torch.float32)
    batch["token_mask"], batch["step_labels"] = mask, labels
    return batch


def preference_collate_fn(
    data_batch: list[PreferenceDatumSpec],
    tokenizer: TokenizerType,
    make_sequence_length_divisible_by: int,
    add_loss_mask: bool,
) -> BatchedDataDict[Any]:
    """Make a batch of B preference pairs as 2B rows: row 2i is chosen, row 2i + 1 rejected.

    Returns:
        `input_ids` [2B, T] int64, `input_lengths` [2B] int64, `sample_mask` and `loss_multiplier` [2B] float32, `idx`
        (list of 2B), with `add_loss_mask` also `token_mask` [2B, T] float32, 1 on the tokens of the completion's
        assistant turns, and, if any datum has a margin, `margin` [2B] float32, which is 0 for data without one.
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
    """Add `fault` if any datum has a fault, as a list with None for usable rows. The loader reports and removes it."""
    if any("fault" in datum for datum in data):
        batch["fault"] = [datum.get("fault") for datum in data]
    return batch


def add_loss_mask_to_message_log(
    batch_message_log: Sequence[LLMMessageLogType],
    roles_to_train_on: Sequence[str] = ("assistant",),
    only_unmask_final: bool = False,
) -> None:
    """Set `token_loss_mask` on every message, in place.

    The mask is 1-D int64 and as long as `token_ids`. It is 1 for the roles to train on, and 0 for other roles.

    Args:
        batch_message_log: The logs to mark.
        roles_to_train_on: Roles whose tokens count in the loss.
        only_unmask_final: Whether only the last message of a log counts, for any role. If messages of a log have
            `counts`, this key decides instead.
    """
    for message_log in batch_message_log:
        chosen = any(message.get("counts") for message in message_log)
        for position, message in enumerate(message_log):
            final = position == len(message_log) - 1
            usual = (final and not chosen) if only_unmask_final else message["role"] in roles_to_train_on
            counts = message.get("counts", usual)
            message["token_loss_mask"] = torch.full_like(message["token_ids"], int(counts))


def batched_message_log_to_flat_message(
    message_log_batch: Sequence[LLMMessageLogType],
    pad_value_dict: Mapping[str, int | float] | None = None,
    make_sequence_length_divisible_by: int = 1,
) -> tuple[BatchedDataDict[Any], torch.Tensor]:
    """Flatten and right-pad a batch of logs.

    Args:
        pad_value_dict: Padding value of each tensor key, which is 0 for keys that are left out.
        make_sequence_length_divisible_by: Round the padded length T up to a multiple of this.

    Returns:
        A batch whose tensor keys are [B, T] and whose other keys are lists of B lists (`role`,
        `content`), and the unpadded lengths [B] int64.

    Raises:
        DataError: The batch is empty, or a tensor key is absent from some of the logs.
    """
    if not message_log_batch:
        raise DataError("a batch of message logs needs at least one log, got none.")
    rows = [message_log_to_flat_messages(message_log) for message_log in message_log_batch]
    lengths = torch.tensor([len(row["token_ids"]) for row in rows], dtype=torch.int64)
    step = make_sequence_length_divisible_by
    width = -(-int(lengths.max()) // step) * step
    pad_values = pad_value_dict or {}
    batch: BatchedDataDict[Any] = BatchedDataDict()
    for key in dict.fromkeys(key for row in rows for key in row):
        column = [row.get(key) for row in rows]
        if any(isinstance(value, torch.Tensor) for value in column):
            batch[key] = _pad_column(key, column, width, pad_values.get(key, 0))
        else:
            batch[key] = column
    return batch, lengths


def _pad_column(key: str, column: list[Any], width: int, pad_value: int | float) -> torch.Tensor:
    missing = [row for row, value in enumerate(column) if not isinstance(value, torch.Tensor)]
    if missing:
        raise DataError(
            f"{len(missing)} of {len(column)} message logs have no tensor {key!r} "
            f"(first: log {missing[0]}), which the others have."
        )
    width = max(width, *(len(value) for value in column))
    padded = column[0].new_full((len(column), width, *column[0].shape[1:]), pad_value)
    for row, value in enumerate(column):
        padded[row, : len(value)] = value
    return padded


def message_log_to_flat_messages(message_log: LLMMessageLogType) -> FlatMessagesType:
    """Join the values of all messages for each key.

    Tensors are concatenated along axis 0. Other values become a list with one item for each message. If a message lacks
    a per-token tensor (one that is as long as `token_ids`), such as `generation_logprobs` in a user turn, zeros take
    its place.

    Raises:
        DataError: A tensor key is absent from a message and is not per token.
    """
    keys = dict.fromkeys(key for message in message_log for key in message)
    flat: FlatMessagesType = {}
    for key in keys:
        values = [message.get(key) for message in message_log]
        if any(isinstance(value, torch.Tensor) for value in values):
            flat[key] = torch.cat(_with_zeros(key, message_log))
        else:
            flat[key] = values  # type: ignore[assignment]
    return flat


def _with_zeros(key: str, message_log: LLMMessageLogType) -> list[torch.Tensor]:
    present = next(m[key] for m in message_log if isinstance(m.get(key), torch.Tensor))
    per_token = present.dim() == 1 and all(
        len(m[key]) == len(m["token_ids"])
        for m in message_log
        if isinstance(m.get(key), torch.Tensor) and "token_ids" in m
    )
    tensors = []
    for position, message in enumerate(message_log):
        value = message.get(key)
        if not isinstance(value, torch.Tensor):
            if not per_token or "token_ids" not in message:
                raise DataError(
                    f"message {position} (role {message.get('role')!r}) has no tensor {key!r}, "
                    "which other messages of the log have; add it, or drop it everywhere."
                )
            value = torch.zeros(len(message["token_ids"]), dtype=present.dtype)
        tensors.append(value)
    return tensors
