"""Choose the draft model of a policy section: a published one, or a new one for the policy's model."""

import json
from pathlib import Path

from nemo_rl.config import PolicyConfig
from nemo_rl.config.base.paths import looks_local
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
    """Return the folder of a draft model; a hub id is downloaded if it is not in the cache.

    Raises:
        ConfigError: there is no such folder.
        DownloadError: the files do not arrive.
    """
    path = Path(name).expanduser()
    if not path.is_dir() and looks_local(name):
        raise ConfigError(
            f"policy.draft.model_name={name!r} does not exist. Give a folder with a draft model, or null."
        )
    return path if path.is_dir() else download(name, _FILES)
