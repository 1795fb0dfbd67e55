"""Divide a batch into global batches, ranks and microbatches, and put results back in order.

`data.packing` plans the microbatches. Invariant: any number of rows works. If the rows cannot be divided evenly over
ranks and microbatches, filler rows are added. Filler rows do not count in the loss, and their scores are dropped.
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor

from nemo_rl.config import PolicyConfig, row_length_multiple
from nemo_rl.data.common_prefixes import Prefixes
from nemo_rl.data.model_rows import ROW_INPUTS
from nemo_rl.data.packing import (
    PROMPT_GROUPS,
    SHARED_PREFIXES,
    FixedSize,
    MicrobatchPlan,
    MicrobatchStrategy,
    OneByOne,
    Packed,
    TokenBudget,
    column_of,
    plan_microbatches,
    plan_prefixes,
)
from nemo_rl.data.routed_experts import ROUTED_EXPERTS
from nemo_rl.distributed.batched_data_dict import BatchedDataDict
from nemo_rl.models.batch_rows import BatchRows
from nemo_rl.utils.errors import ConfigError, DataError

SCORING_KEYS = ("input_ids", "input_lengths")
_OF_SCALAR_HEADS = ("score", "get_values")
"""Methods of `Policy` that need a scalar head."""
_MASKS = ("token_mask", "sample_mask")


@dataclass(frozen=True)
class ShardedBatch:
    """One batch, divided over the ranks."""

    data: list[BatchedDataDict[Any]]
    """Rows of each data-parallel rank, in microbatch order."""
    sizes: list[list[int]]
    """Number of rows of each microbatch, for each rank."""
    plan: MicrobatchPlan
    """Plan with the original position of each row."""
    num_rows: int
    """Number of rows of the batch, except filler rows."""
    num_shared_tokens: int = 0
    """Number of tokens that are not computed because another row of their microbatch starts with the same tokens."""

    def lengths(self) -> list[int]:
        """Return the number of tokens of each row, except filler rows."""
        found: list[int] = self.restore([rows["input_lengths"] for rows in self.data]).tolist()
        return found

    def restore(self, parts: Sequence[Tensor]) -> Tensor:
        """Concatenate the results `[b, ...]` of the ranks, in the order of the batch's rows."""
        return torch.cat(list(parts))[self.plan.restore_order[: self.num_rows]]


def training_strategy(
    config: PolicyConfig, micro_batch_size: int | None = None, group_size: int = 1
) -> MicrobatchStrategy:
    """Choose how training microbatches are formed.

    Args:
        config: The section `policy`. Its `train_micro_batch_size` counts groups.
        micro_batch_size: Number of rows of a microbatch. If None, it is configured.
        group_size: Number of rows that stay together: 2 for pairs.
    """
    size = config.train_micro_batch_size * group_size
    packing, dynamic = config.sequence_packing, config.dynamic_batching
    tokens = packing.train_mb_tokens if packing.enabled else dynamic.train_mb_tokens
    return _strategy(config, size, tokens, micro_batch_size)


def logprob_strategy(config: PolicyConfig, micro_batch_size: int | None = None) -> MicrobatchStrategy:
    """Choose how microbatches for log-probabilities are formed. Arguments are those of `training_strategy`."""
    size = config.logprob_batch_size
    packing, dynamic = config.sequence_packing, config.dynamic_batching
    tokens = packing.logprob_mb_tokens if packing.enabled else dynamic.logprob_mb_tokens
    return _strategy(config, size, tokens, micro_batch_size)


def shard_batch(
    data: BatchedDataDict[Any],
    num_shards: int,
    strategy: MicrobatchStrategy,
    group_size: int = 1,
    *,
    shares_prompts: bool = False,
) -> ShardedBatch:
    """Divide the rows over the ranks.

    Args:
        data: At least one row, with `input_lengths`. Shared prompts also need `input_ids` or stored rows.
        num_shards: Number of data-parallel ranks.
        strategy: How microbatches are formed.
        group_size: Number of consecutive rows that stay in one microbatch.
        shares_prompts: Whether a packed microbatch contains tokens that several rows share only once.

    Raises:
        DataError: The rows do not divide into groups, or a row is longer than a microbatch may be or has more patches.
    """
    num_rows = data.size
    multiple = num_shards * group_size
    if isinstance(strategy, FixedSize):
        rows_per_shard = -(-num_rows // multiple) * group_size
        strategy = FixedSize(min(strategy.size, rows_per_shard))
        multiple = num_shards * strategy.size
    filled = with_filler_rows(data, -num_rows % multiple)
    lengths = filled["input_lengths"].tolist()
    prefixes = BatchRows.of(filled).prefixes() if shares_prompts else Prefixes.alone(filled.size)
    limited = isinstance(strategy, TokenBudget | Packed) and strategy.max_patches is not None
    patches = BatchRows.of(filled).patches() if limited else None
    if group_size == 1 and isinstance(strategy, Packed):
        plan = plan_prefixes(prefixes, lengths, num_shards, strategy, patches)
    else:
        prefixes = prefixes.between_multiples(group_size)
        plan = plan_microbatches(lengths, num_shards, strategy, group_size, patches.totals if patches else None)
    shards = range(num_shards)
    sharded = ShardedBatch(
        data=[filled.select_indices(plan.shard_rows(shard)) for shard in shards],
        sizes=[[len(rows) for rows in plan.shards[shard]] for shard in shards],
        plan=plan,
        num_rows=num_rows,
    )
    for rows in sharded.data:
        rows.pop(PROMPT_GROUPS, None)  # ranks do not need it
    return sharded if prefixes.is_flat else _with_prefixes(sharded, prefixes)


def _with_prefixes(sharded: ShardedBatch, prefixes: Prefixes) -> ShardedBatch:
    """Add the prefixes that the rows of each microbatch share."""
    saved = 0
    for rows, microbatches in zip(sharded.data, sharded.plan.shards, strict=True):
        rows[SHARED_PREFIXES] = torch.cat([column_of(prefixes, microbatch) for microbatch in microbatches])
        saved += int(rows[SHARED_PREFIXES][:, 1].sum())
    return replace(sharded, num_shared_tokens=saved)


def with_filler_rows(data: BatchedDataDict[Any], count: int) -> BatchedDataDict[Any]:
    """Append `count` one-token copies of the first row, whose masks are 0."""
    if count == 0:
        return data
    fillers = data.select_indices([0] * count)
    fillers["input_lengths"] = torch.ones_like(fillers["input_lengths"])
    for name in _MASKS:
        if name in fillers:
            fillers[name] = torch.zeros_like(fillers[name])
    if PROMPT_GROUPS in fillers:
        fillers[PROMPT_GROUPS] = torch.full_like(fillers[PROMPT_GROUPS], -1)
    if ROW_INPUTS in fillers:
        # # The first row's tokens may represent items, such as images. A filler row has no items.
        fillers["input_ids"] = torch.zeros_like(fillers["input_ids"])
        fillers[ROW_INPUTS] = [inputs.without_items() for inputs in fillers[ROW_INPUTS]]
    return type(data).from_batches([data, fillers])


def global_batches(
    data: BatchedDataDict[Any], size: int | Sequence[int], *, allow_partial: bool
) -> Iterator[BatchedDataDict[Any]]:
    """Divide a batch into consecutive global batches, one for each optimizer update.

    Args:
        size: Number of rows of every global batch, or a list of the numbers of rows.
        allow_partial: Whether the last global batch may be shorter (evaluation), if `size` is a single number.

    Raises:
        DataError: The rows do not divide into global batches, or there are no rows.
    """
    rows = data.check_rows()
    if rows == 0:
        raise DataError("The batch has no rows.")
    if isinstance(size, int):
        _check_divides(rows, size, allow_partial)
        return (data.slice(start, min(start + size, rows)) for start in range(0, rows, size))
    if sum(size) != rows or min(size) < 1:
        raise DataError(f"gbs={list(size)} has to be at least one row for each update, {rows} rows in total.")
    return (data.slice(end - count, end) for count, end in zip(size, accumulate(size), strict=True))


def _check_divides(rows: int, size: int, allow_partial: bool) -> None:
    if rows % size and not allow_partial:
        below, above = rows // size * size, -(-rows // size) * size
        nearest = ", ".join(str(n) for n in (below, above) if n)
        raise DataError(
            f"{rows} rows do not divide into global batches of {size} rows (one optimizer update each). "
            f"Nearest numbers of rows: {nearest}; or set policy.train_global_batch_size to a divisor of {rows}."
        )


def count_valid(batch: BatchedDataDict[Any]) -> tuple[float, float]:
    """Count valid sequences and valid target tokens of a global batch, which are the denominators of losses."""
    weights_B = batch["sample_mask"].double()
    return weights_B.sum().item(), (BatchRows.of(batch).num_written() * weights_B).sum().item()


def require_keys(data: BatchedDataDict[Any], keys: Sequence[str], purpose: str) -> None:
    """Check that a batch has the keys that a call needs.

    Raises:
        DataError: Keys are missing. The message names the missing keys and the batch's keys.
    """
    missing = [key for key in keys if key not in data and key not in BatchRows.of(data).STORED]
    if missing:
        raise DataError(f"{purpose} needs the keys {missing}; the batch has {sorted(data)}.")


def scoring_rows(method: str, data: BatchedDataDict[Any], config: PolicyConfig) -> BatchedDataDict[Any]:
    """Check that a policy can score a batch, and return it with only the keys for scoring.

    Args:
        method: Name of the method of `Policy`, for messages.
        data: The batch.

    Raises:
        DataError: Keys are missing.
        ConfigError: The method needs another kind of head than the model has.
    """
    require_keys(data, SCORING_KEYS, f"Policy.{method}")
    has_scalar_head = config.reward_model_cfg.enabled
    if has_scalar_head and method not in _OF_SCALAR_HEADS:
        raise ConfigError(
            f"Policy.{method} needs a language model; this one has a scalar head (reward_model_cfg.enabled=true). "
            "Policy.score gives a number for each row, Policy.get_values one for each token."
        )
    if method in _OF_SCALAR_HEADS and not has_scalar_head:
        raise ConfigError(
            f"Policy.{method} needs a scalar head (reward_model_cfg.enabled=true); this is a language model."
        )
    replayed = (ROUTED_EXPERTS,) if config.router_replay.enabled else ()
    scored = (*BatchRows.of(data).SCORED, *replayed)
    wanted: BatchedDataDict[Any] = BatchedDataDict({key: data[key] for key in scored if key in data})
    wanted.check_rows()
    return wanted


def _strategy(config: PolicyConfig, size: int, tokens: int, micro_batch_size: int | None) -> MicrobatchStrategy:
    if config.invariant_gradients:
        return OneByOne()
    if micro_batch_size is not None:
        return FixedSize(micro_batch_size)
    round_to = row_length_multiple(config)
    if config.sequence_packing.enabled:
        packing = config.sequence_packing
        largest_first = packing.microbatch_order != "packer"
        most_keys, most_patches = packing.max_keys_per_token, packing.max_patches
        return Packed(tokens, packing.algorithm, round_to, most_keys, largest_first, most_patches)
    if config.dynamic_batching.enabled:
        most_patches = config.dynamic_batching.max_patches
        return TokenBudget(tokens, math.lcm(round_to, config.dynamic_batching.sequence_length_round), most_patches)
    return FixedSize(size)
