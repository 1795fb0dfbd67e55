"""Check, before any worker starts, that there is a server or the package that starts one."""

from importlib.util import find_spec

from nemo_rl.config import ClusterConfig, PolicyConfig
from nemo_rl.utils.errors import ConfigError


def check_model(policy: PolicyConfig, cluster: ClusterConfig) -> None:
    """See `registry.EngineKind.check`.

    Raises:
        ConfigError: SGLang is not installed, and no server is named.
    """
    assert policy.generation is not None
    router = "policy.generation.sglang_cfg.sglang_router_config"
    if policy.generation.sglang_cfg.sglang_router_config.use_external_router or "generation" in cluster.venvs:
        return
    if find_spec("sglang") is None:
        raise ConfigError(
            "policy.generation.backend=sglang starts servers of the package sglang, which is not installed. Give the "
            'engines a Python that has it (cluster.venvs.generation.packages=["sglang[all]"]), or start a server by '
            f"hand and name it: {router}.use_external_router=true with sglang_router_ip and sglang_router_port there."
        )
