"""Compute vLLM's attention on CPUs with the trainer's kernel, over vLLM's paged cache.

`TrainerAttentionBackend` replaces vLLM's backend `CPU_ATTN`. vLLM chooses blocks of the cache and gives each sequence a
table of blocks, as for its own kernel. A step finds the cache positions of each sequence's tokens in their order, and
`models.attention.cached_pass.SeenTokens` computes the attention to them with the trainer's bits.

Blocks have another layout than with vLLM's kernel: `[tokens of a block, key or value, heads, size]`. Only this module
reads and writes them. Invariant: a token sees the tokens of its own sequence up to itself, within the layer's window.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from vllm.v1.attention.backends.cpu_attn import (
    CPUAttentionBackend,
    CPUAttentionBackendImpl,
    CPUAttentionMetadata,
    CPUAttentionMetadataBuilder,
)

from nemo_rl.models.attention.cached_pass import SeenTokens
from nemo_rl.models.attention.plan import AttentionPlan, Piece, Scoring


@dataclass
class PagedStep(CPUAttentionMetadata):
    """The tokens of one step. All layers with the same blocks share it."""

    seen: SeenTokens | None = None
    """The cache positions that each new token sees."""


class PagedStepBuilder(CPUAttentionMetadataBuilder):
    """Describe each step by cache positions."""

    def build(self, common_prefix_len: int, common_attn_metadata: Any, fast_build: bool = False) -> PagedStep:
        """Describe a step (`AttentionMetadataBuilder.build`)."""
        step, blocks = common_attn_metadata, common_attn_metadata.block_table_tensor
        starts, lengths = step.query_start_loc.tolist(), step.seq_lens.tolist()
        places = [positions_of(own, length, self.block_size) for own, length in zip(blocks, lengths, strict=False)]
        return PagedStep(
            num_actual_tokens=step.num_actual_tokens,
            max_query_len=step.max_query_len,
            query_start_loc=step.query_start_loc,
            max_seq_len=step.max_seq_len,
            seq_lens=step.seq_lens,
            block_table=blocks,
            slot_mapping=step.slot_mapping,
            scheduler_metadata=None,  # for vLLM's kernel
            seen=SeenTokens(torch.cat(places), plan_of(starts, lengths)),
        )


def positions_of(blocks: Tensor, length: int, block_size: int) -> Tensor:
    """Return the cache positions `[length]` int64 of the first tokens of a sequence.

    Args:
        blocks: `[n]` numbers of the blocks of the sequence.
    """
    of_blocks = blocks[: -(-length // block_size)].long()[:, None] * block_size + torch.arange(block_size)
    return of_blocks.flatten()[:length]


def plan_of(starts: Sequence[int], lengths: Sequence[int]) -> AttentionPlan:
    """Return the plan of a step.

    Args:
        starts: Index of the first new token of each sequence, and the number of new tokens.
        lengths: Number of tokens of each sequence.
    """
    pieces, first_key = [], 0
    for start, stop, length in zip(starts, starts[1:], lengths, strict=False):
        pieces.append(Piece(start, stop, first_key, first_key + length))
        first_key += length
    return AttentionPlan(pieces)


class TrainerAttention(CPUAttentionBackendImpl):
    """Attention of one layer."""

    def forward(
        self,
        layer: Any,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        kv_cache: Tensor,
        attn_metadata: CPUAttentionMetadata | None,
        output: Tensor,
        output_scale: Tensor | None = None,
        output_block_scale: Tensor | None = None,
    ) -> Tensor:
        """Compute the attention of the new tokens, whose keys and values are already in the cache.

        Args:
            query: `[T, H, D]`.
            kv_cache: `[blocks, H_kv, tokens of a block, 2 * D]`.
            output: `[T, H * D]` or `[T, H, D]`, where the result is written.
        """
        if attn_metadata is None:  # vLLM measures memory
            return output
        assert isinstance(attn_metadata, PagedStep) and attn_metadata.seen is not None
        count = attn_metadata.num_actual_tokens
        keys, values = by_token(kv_cache).unbind(1)
        out = attn_metadata.seen.attend(query[:count], keys, values, self._scoring)
        output[:count].copy_(out.reshape_as(output[:count]))
        return output

    def do_kv_cache_update(
        self, layer: torch.nn.Module, key: Tensor, value: Tensor, kv_cache: Tensor, slot_mapping: Tensor
    ) -> None:
        """Store keys and values `[T, H_kv, D]` of new tokens at their positions in the cache."""
        places = slot_mapping.long()
        by_token(kv_cache).index_copy_(0, places, torch.stack([key[: len(places)], value[: len(places)]], dim=1))

    @property
    def _scoring(self) -> Scoring:
        return Scoring(
            scaling=self.scale,
            window=None if self.sliding_window < 0 else self.sliding_window,
            softcap=self.logits_soft_cap or None,
            sinks=self.sinks,
        )


def by_token(kv_cache: Tensor) -> Tensor:
    """Return a view `[positions, 2, H_kv, D]` of a layer's cache `[blocks, H_kv, tokens of a block, 2 * D]`."""
    blocks, heads, tokens, width = kv_cache.shape
    return kv_cache.view(blocks * tokens, 2, heads, width // 2)


class TrainerAttentionBackend(CPUAttentionBackend):
    """vLLM's backend for CPUs with the trainer's attention."""

    @staticmethod
    def get_impl_cls() -> type[TrainerAttention]:
        """Return the class that computes attention."""
        return TrainerAttention

    @staticmethod
    def get_builder_cls() -> type[PagedStepBuilder]:
        """Return the class that describes steps."""
        return PagedStepBuilder
