"""Re-exports of the names of environments and of what starts them."""

from nemo_rl.environments.registry import (
    ENV_REGISTRY,
    EnvRegistryEntry,
    create_env,
    env_class_path,
    register_env,
)

__all__ = ["ENV_REGISTRY", "EnvRegistryEntry", "create_env", "env_class_path", "register_env"]
