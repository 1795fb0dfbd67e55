"""Check `policy.draft` before any worker starts."""

from nemo_rl.config import PolicyConfig
from nemo_rl.config.rules.broken_rules import Findings
from nemo_rl.models.draft.choice import shape_of
from nemo_rl.models.huggingface.load import load_model_config
from nemo_rl.utils.errors import ConfigError

_DIVIDED = ("pp", "cp")
"""Axes that leave a rank without the hidden states that the draft model reads."""


def check_draft(policy: PolicyConfig) -> Findings:
    """Find the reasons why a draft model cannot be trained with the policy; none if it is not asked for.

    Whether the engines can use it is checked with them (`generation.vllm.speculation.settings`).
    """
    if not policy.draft.enabled:
        return
    section = policy.backend_section
    for axis in _DIVIDED:
        if section.size(axis) > 1:
            key = f"policy.{policy.backend_key}.{section.size_keys[axis]}"
            yield (
                f"policy.draft.enabled=true with {key}={section.size(axis)} is not built yet: no rank computes all "
                "hidden states that the draft model reads. Set it to 1."
            )
    if policy.reward_model_cfg.enabled:
        yield "policy.draft.enabled=true needs a policy that writes text, but policy.reward_model_cfg.enabled=true."
    model = load_model_config(policy.model_name, policy.hf_config_overrides).get_text_config()
    try:
        shape = shape_of(policy)
    except ConfigError as error:
        yield str(error)
        return
    layers = int(model.num_hidden_layers)
    if not shape.tapped_layers or max(shape.tapped_layers) > layers:
        yield (
            f"policy.draft.aux_layer_indices={list(shape.tapped_layers)} must name hidden states by the number of "
            f"layers before them, from 0 to {layers}, the layers of {policy.model_name!r}."
        )
    sizes = {
        "hidden_size": (shape.target_hidden_size, model.hidden_size),
        "vocab_size": (shape.vocab_size, model.vocab_size),
    }
    for key, (own, wanted) in sizes.items():
        if own != wanted:
            yield (
                f"policy.draft.model_name={policy.draft.model_name!r} is for a model with {key}={own}, but "
                f"policy.model_name={policy.model_name!r} has {wanted}."
            )
    if shape.hidden_size != model.hidden_size:
        yield (
            f"policy.draft.model_name={policy.draft.model_name!r} has hidden_size={shape.hidden_size}, so it needs an "
            f"embedding of its own; only those that use the policy's (hidden_size={model.hidden_size}) can be trained."
        )
