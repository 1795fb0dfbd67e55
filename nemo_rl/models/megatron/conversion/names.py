"""Map names of parameters in one rank's part of a model to names in the whole model.

Does not import megatron. Invariant: a parameter has the same name on every mesh, in Transformer Engine's modules and
in Megatron Core's own.
"""

import re
from collections.abc import Sequence

_LAYER = re.compile(r"^decoder\.layers\.(\d+)\.")
_EXPERT = re.compile(r"\.local_experts\.(\d+)\.")

_TRANSFORMER_ENGINE = (
    (r"self_attention\.linear_qkv\.layer_norm_", "input_layernorm."),
    (r"self_attention\.linear_q_up_proj\.layer_norm_", "self_attention.q_layernorm."),
    (r"self_attention\.linear_kv_up_proj\.layer_norm_", "self_attention.kv_layernorm."),
    (r"mlp\.linear_fc1\.layer_norm_", "pre_mlp_layernorm."),
    (r"mlp\.experts\.(linear_fc[12])\.(weight|bias)(\d+)$", r"mlp.experts.local_experts.\3.\1.\2"),
)
"""Names in Transformer Engine's modules, which combine a norm and the following layer, or several experts."""


def own_name(name: str) -> str:
    """Return the name of a parameter in Megatron Core's own modules."""
    for pattern, replacement in _TRANSFORMER_ENGINE:
        name = re.sub(rf"(?<=\.){pattern}", replacement, name)
    return name


def global_name(name: str, layers: Sequence[int], first_expert: int) -> str:
    """Return the name of a parameter in the whole model.

    Args:
        name: name in one chunk of the model, without the wrappers' prefixes.
        layers: numbers of the chunk's layers in the whole model, from 0.
        first_expert: number of the rank's first expert.
    """
    name = _LAYER.sub(lambda found: f"decoder.layers.{layers[int(found[1])]}.", own_name(name))
    return _EXPERT.sub(lambda found: f".local_experts.{first_expert + int(found[1])}.", name)
