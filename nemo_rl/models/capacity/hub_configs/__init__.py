"""Hold configurations of published models, for size estimates without access to the hub.

`AutoConfig` can read `<owner>/<name>/config.json` in this folder. The values are those that were published, and a test
compares the resulting number of parameters with the published number. Invariant: these files are not used to load or
train a model. A run reads the model's own configuration.
"""

from copy import deepcopy
from pathlib import Path

from nemo_rl.config import PolicyConfig, RunConfig
from nemo_rl.config.base.paths import library_model_hint
from nemo_rl.files.hub_download import cached_file
from nemo_rl.utils.errors import ConfigError

FOLDER = Path(__file__).parent


def known_models() -> list[str]:
    """Return the hub ids of the models in this folder."""
    return sorted(file.parent.relative_to(FOLDER).as_posix() for file in FOLDER.glob("*/*/config.json"))


def with_local_configs[ConfigT: RunConfig](config: ConfigT) -> ConfigT:
    """Return a copy of a configuration whose models are local configurations, for size estimates only.

    Raises:
        ConfigError: a model is neither a folder, nor in the hub's cache, nor in this folder.
    """
    local = deepcopy(config)
    for _, _, model in local.model_keys():
        _make_local(model)
    return local


def _make_local(model: PolicyConfig) -> None:
    name = model.model_name
    if Path(name).is_dir() or cached_file(name, "config.json") is not None:
        return
    if name not in known_models():
        raise ConfigError(
            f"The configuration of the model {name!r} is not here: it is not a folder, not in the cache of the hub, "
            f"and none of the models whose sizes are known ({', '.join(known_models())}). Download its config.json "
            f"(`hf download {name} config.json`), or give a folder that contains it.{library_model_hint(name)}"
        )
    model.model_name = str(FOLDER / name)
