"""Find the sequences of a packed row for layers with states, which compute each sequence from an empty state.

Invariant: the boundaries of a row are read from the device once, not in each layer.
"""

from megatron.core.packed_seq_params import PackedSeqParams
from torch import Tensor
from torch.utils.weak import WeakTensorKeyDictionary

from nemo_rl.models.huggingface.recurrent import SequenceGroups

_GROUPS: WeakTensorKeyDictionary = WeakTensorKeyDictionary()
"""Cache of `SequenceGroups` by the tensor of their boundaries."""


def bounds_of(packed: PackedSeqParams) -> Tensor:
    """Return the start of each sequence in the whole row, and the end of the last sequence, `[S + 1]` int32."""
    bounds: Tensor = packed.cu_seqlens_q if packed.cu_seqlens_q_padded is None else packed.cu_seqlens_q_padded
    return bounds


def sequence_groups(bounds: Tensor) -> SequenceGroups | None:
    """Return the sequences between boundaries in groups of similar lengths. None if there is only one sequence."""
    if bounds not in _GROUPS:
        _GROUPS[bounds] = SequenceGroups.of(bounds)
    groups: SequenceGroups | None = _GROUPS[bounds]
    return groups
