"""Choose the draft model of a policy section, and check `policy.draft` before any worker starts."""

import json
from pathlib import Path

from nemo_rl.config import PolicyConfig
from nemo_rl.config.base.paths import looks_local
from nemo_rl.config.rules.broken_rules import Findings
from nemo_rl.files.hub_download import download
from nemo_rl.files.regular_file import read_text
from nemo_rl.models.draft.shape import DraftShape
from nemo_rl.models.huggingface.load import load_model_config
from nemo_rl.utils.errors import ConfigError

_FILES = ("config.json", "*.safetensors", "*.safetensors.index.json")


def shape_of(policy: PolicyConfig) -> DraftShape:
    """Return the sizes of the draft model of a policy section.

    Raises:
        ConfigError: `policy.draft.model_name` has no `config.json`, or its model cannot be trained.
    """
    draft = policy.draft
    model = load_model_config(policy.model_name, policy.hf_config_overrides).get_text_config()
    if draft.model_name is None:
        return DraftShape.for_model(model, draft.num_layers or 1, draft.aux_layer_indices)
    file = draft_folder(draft.model_name) / "config.json"
    try:
        values = json.loads(read_text(file))
    except (OSError, ValueError) as error:
        named = f"policy.draft.model_name={draft.model_name!r}"
        raise ConfigError(f"{named} has no readable config.json: {error}.") from error
    return DraftShape.read(values, draft.model_name, model)


def draft_folder(name: str) -> Path:
    """Return the folder of a draft model. A hub id is downloaded if it is not in the cache.

    Raises:
        ConfigError: the name is a path that does not exist.
        DownloadError: the files cannot be downloaded.
    """
    path = Path(name).expanduser()
    if not path.is_dir() and looks_local(name):
        raise ConfigError(
            f"policy.draft.model_name={name!r} does not exist. Give a folder with a draft model, or null."
        )
    return path if path.is_dir() else download(name, _FILES)


_DIVIDED = ("pp", "cp")
"""Mesh axes with which no rank has all hidden states that the draft model reads."""


def check_draft(policy: PolicyConfig) -> Findings:
    """Yield reasons why the configured draft model, if any, cannot be trained with the policy.

    `generation.vllm.speculation.settings` checks whether the engines can use the draft model.
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
