"""Configuration functions under NeMo RL's path, mostly re-exports.

`load_config` here reads a file and its parents into a plain OmegaConf config. For the typed and checked configuration
use `nemo_rl.config.load_config`.
"""

from pathlib import Path

from omegaconf import DictConfig

from nemo_rl.config.base.defaults import register_omegaconf_resolvers
from nemo_rl.config.loading.inheritance import (
    load_config_with_inheritance,
    merge_with_override,
    resolve_path,
)
from nemo_rl.config.loading.overrides import OverridesError, parse_hydra_overrides


def load_config(config_path: str | Path) -> DictConfig:
    """Read a YAML file with the files it inherits from, without resolving interpolations."""
    return load_config_with_inheritance(config_path)


__all__ = [
    "OverridesError",
    "load_config",
    "load_config_with_inheritance",
    "merge_with_override",
    "parse_hydra_overrides",
    "register_omegaconf_resolvers",
    "resolve_path",
]
