"""Send something else in place of weights, such as float8 values and scales, made where a bucket is packed.

Only whole tensors are encoded, so lanes of parts do not go with it. Invariant: fingerprints are those of the encoded
bytes, which are the bytes that arrive.
"""

from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Protocol

import torch

from nemo_rl.utils.errors import WeightSyncError
from nemo_rl.weight_sync.buckets import Piece, TensorSlot, plan_slots, view_of
from nemo_rl.weight_sync.exchange import Blocks, fill
from nemo_rl.weight_sync.moves import Layout


class Encoding(Protocol):
    """Decides what is sent for each weight."""

    def takes(self, name: str, shape: tuple[int, ...]) -> bool:
        """Return whether something else is sent for a weight."""

    def described(self, name: str, dtype: str, shape: tuple[int, ...]) -> list[tuple[str, str, tuple[int, ...]]]:
        """Return name, dtype (without its prefix) and shape of each tensor that is sent for a weight."""

    def encode(self, name: str, tensor: torch.Tensor) -> list[torch.Tensor]:
        """Return the tensors of `described`, in its order."""


def check_used(encoding: Encoding, weights: Iterable[TensorSlot]) -> None:
    """Refuse an encoding that takes no weight of a model.

    Raises:
        WeightSyncError: it takes none.
    """
    slots = list(weights)
    if not any(encoding.takes(slot.name, slot.shape) for slot in slots):
        raise WeightSyncError(
            "policy.generation.vllm_cfg.precision=fp8, but no weight of the model would be in float8: it has "
            f"{', '.join(slot.name for slot in slots[:4])} and others. Quantized are matrices of decoder layers "
            "(model.layers.0.mlp.up_proj.weight), but not those that num_first_layers_in_bf16, "
            "num_last_layers_in_bf16 and quantization_ignored_layer_kws exclude. Set the precision to bfloat16."
        )


def encoded_layout(layout: Layout, encoding: Encoding) -> Layout:
    """Return the layout of the bucket that is sent in place of one of whole weights."""
    pieces = [
        Piece(name, torch.empty(shape, dtype=getattr(torch, dtype), device="meta"))
        for slot in layout.slots
        for name, dtype, shape in encoding.described(slot.name, slot.dtype, slot.shape)
    ]
    return Layout(*plan_slots(pieces))


def fill_encoded(
    flat: torch.Tensor, sent: Layout, layout: Layout, blocks: Mapping[str, Blocks], encoding: Encoding
) -> None:
    """Encode weights, one after another, into the slots of the bucket that is sent.

    Args:
        flat: uint8, the bucket's bytes.
        sent: its layout.
        layout: the layout of the weights.
        blocks: by name of the weight; together they cover all slots of `layout`.
        encoding: what is sent in place of each weight.
    """
    targets = iter(sent.slots)
    for slot in layout.slots:
        held = blocks.get(slot.name)
        device = held[0][1].device if held else flat.device
        whole = torch.empty(slot.num_bytes, dtype=torch.uint8, device=device)
        alone = replace(slot, offset=0)
        fill(whole, Layout([alone], slot.num_bytes), blocks)
        for tensor in encoding.encode(slot.name, view_of(whole, alone)):
            view_of(flat, next(targets)).copy_(tensor)
