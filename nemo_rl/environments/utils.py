"""Environment names and their creation. Re-exports only."""

from nemo_rl.environments.registry import (
    ENV_REGISTRY,
    EnvRegistryEntry,
    create_env,
    env_class_path,
    register_env,
)

__all__ = ["ENV_REGISTRY", "EnvRegistryEntry", "create_env", "env_class_path", "register_env"]
