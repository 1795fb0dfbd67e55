"""The attention function for training, which serves padded rows, packed rows and rows divided over ranks.

`function` holds the function that transformers calls (computed by `models.attention`), `probe` compares it with the
model's own attention at load, and `choice` decides which attention a policy section needs.
"""

from nemo_rl.models.dtensor.attention.choice import attention_to_load, can_share_prompts, choose_attention
from nemo_rl.models.dtensor.attention.function import VARLEN_ATTENTION, register_varlen_attention, varlen_attention
from nemo_rl.models.dtensor.attention.probe import use_registered_attention, verify_division, verify_packing

__all__ = [
    "VARLEN_ATTENTION",
    "attention_to_load",
    "can_share_prompts",
    "choose_attention",
    "register_varlen_attention",
    "use_registered_attention",
    "varlen_attention",
    "verify_division",
    "verify_packing",
]
