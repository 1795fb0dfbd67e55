"""Re-export the names of environments and the functions that start environments."""

from nemo_rl.environments.registry import (
    ENV_REGISTRY,
    EnvRegistryEntry,
    create_env,
    env_class_path,
    register_env,
)

__all__ = ["ENV_REGISTRY", "EnvRegistryEntry", "create_env", "env_class_path", "register_env"]
