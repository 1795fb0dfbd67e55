"""Add the products of adapters to the outputs of vLLM's layers on CPUs.

vLLM's own functions for CPUs (`vllm.lora.punica_wrapper.punica_cpu`) index the slots with -1 for tokens without an
adapter. Such tokens get the adapter of the last slot as soon as all slots are in use, which is the adapter of another
user. They also copy the matrices of its adapter for each token, in float32.

Here the rows of a batch are grouped by adapter, and each group is one product of matrices. Invariant: rows without an
adapter are not touched, and a row is changed by the adapter of its request only.
"""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, override

import torch
from torch import Tensor
from torch.nn.functional import linear
from vllm.lora.layers import LoRAMapping
from vllm.lora.punica_wrapper.punica_base import PunicaWrapperBase


class AdapterRows(NamedTuple):
    """The rows of a batch that have the same adapter."""

    slot: int
    """Place of the adapter in stacked matrices."""
    rank: int | None
    """Rank of the adapter. If None, that of the slots."""
    rows: slice | Tensor
    """Places of the rows."""

    def add(self, y: Tensor, x: Tensor, a: Tensor, b: Tensor) -> None:
        """Add `x A^T B^T` to the rows of y in place.

        Args:
            y: `[rows, out]`.
            x: `[rows, in]`.
            a: `[slots, 1, rank of slots, in]`.
            b: `[slots, 1, out, rank of slots]`.
        """
        inner = linear(x[self.rows], a[self.slot, 0, : self.rank])
        y[self.rows] += linear(inner.to(b.dtype), b[self.slot, 0, :, : self.rank]).to(y.dtype)


class AdapterProducts(PunicaWrapperBase):
    """The adapters of the batch that is computed."""

    def __init__(self, max_num_batched_tokens: int, max_batches: int, device: torch.device | str, **others: Any):
        super().__init__(max_num_batched_tokens, max_batches, device, **others)
        self.ranks: dict[int, int] = {}
        """Ranks of adapters by vLLM's ids."""
        self._of_tokens: list[AdapterRows] = []
        self._of_samples: list[AdapterRows] = []
        self._num_samples = 0

    @override
    def update_metadata(
        self, mapping: LoRAMapping, lora_index_to_id: list[int | None], max_loras: int, vocab_size: int, **others: Any
    ) -> None:
        slots = {adapter: slot for slot, adapter in enumerate(lora_index_to_id) if adapter is not None}
        self._of_tokens = grouped(mapping.index_mapping, slots, self.ranks)
        self._of_samples = grouped(mapping.prompt_mapping, slots, self.ranks)
        self._num_samples = len(mapping.prompt_mapping)

    @override
    def add_lora_linear(
        self,
        y: Tensor,
        x: Tensor,
        lora_a_stacked: tuple[Tensor, ...],
        lora_b_stacked: tuple[Tensor, ...],
        scale: float,
        output_slices: tuple[int, ...],
        **others: Any,
    ) -> None:
        """Add products to the output of a linear layer, which consists of one part for each pair of matrices."""
        assert scale == 1.0, "the scale is in B"
        inputs = x.view(-1, x.shape[-1])
        parts = y.view(-1, y.shape[-1]).split(output_slices, dim=-1)
        for group in self._of_tokens:
            for part, a, b in zip(parts, lora_a_stacked, lora_b_stacked, strict=True):
                group.add(part, inputs, a, b)

    @override
    def add_lora_logits(
        self,
        y: Tensor,
        x: Tensor,
        lora_a_stacked: Tensor,
        lora_b_stacked: Tensor,
        scale: float,
        **others: Any,
    ) -> None:
        """Add products to the logits of the positions that are sampled."""
        assert scale == 1.0, "the scale is in B"
        if self._of_samples and len(x) != self._num_samples:
            raise RuntimeError("vLLM cannot compute logits of a prompt whose output head is adapted.")
        for group in self._of_samples:
            group.add(y[:, : lora_b_stacked.shape[2]], x, lora_a_stacked, lora_b_stacked)

    @override
    def add_shrink(self, *args: Any, **others: Any) -> None:
        raise NotImplementedError("Adapters that are divided over ranks are not computed on CPUs.")

    add_expand = add_lora_embedding = apply_lora_full_linear = add_shrink


def grouped(adapters: Sequence[int], slots: Mapping[int, int], ranks: Mapping[int, int]) -> list[AdapterRows]:
    """Group rows by adapter.

    Args:
        adapters: vLLM's id of the adapter of each row, 0 for none.
        slots: slot of each id.
        ranks: ranks of ids, if they are known.
    """
    places: dict[int, list[int]] = {}
    for place, adapter in enumerate(adapters):
        if adapter:
            places.setdefault(adapter, []).append(place)
    return [AdapterRows(slots[adapter], ranks.get(adapter), _compact(rows)) for adapter, rows in places.items()]


def _compact(rows: list[int]) -> slice | Tensor:
    """Return neighbouring rows as a slice, which is not copied."""
    is_whole = rows[-1] - rows[0] == len(rows) - 1
    return slice(rows[0], rows[-1] + 1) if is_whole else torch.tensor(rows)


def compute_own_products() -> None:
    """Let vLLM compute adapters with `AdapterProducts` in this process. On CPUs, call this before vLLM starts."""
    from vllm.platforms.cpu import CpuPlatform  # vLLM also imports it on CPUs only

    platform: Any = CpuPlatform
    path = f"{AdapterProducts.__module__}.{AdapterProducts.__qualname__}"
    platform.get_punica_wrapper = classmethod(lambda cls: path)
