"""Keys of `policy.generation.sglang_cfg`: the servers of SGLang, and the arguments that they are started with."""

from typing import Any, ClassVar, Literal

from pydantic import Field

from nemo_rl.config.base.addresses import Host
from nemo_rl.config.base.numbers import Count, Port, Seconds
from nemo_rl.config.base.section import Section


class SglangServerConfig(Section):
    """Keys of the library about its servers."""

    ignored: ClassVar[dict[str, str]] = {
        "num_gpus": "the devices of generation are those of the cluster",
        "num_gpus_per_engine": "a server that the library starts has one GPU; see sglang_cfg.tp_size",
    }

    needs_offload: bool = True
    """Servers free their memory while the policy computes on the same GPUs."""
    cpu_weight_backup: bool = True
    """Servers that free their memory keep the weights in host memory; false: each phase of generation begins with a
    transfer of the weights."""
    sglang_server_concurrency: Count = 1024
    """Most requests of an engine at its server at the same time; further ones wait."""
    pause_generation_mode: Literal["abort", "retract", "in_place"] = "retract"
    """Treatment of running requests in an update of the weights. retract: they wait at the server, which computes
    their keys and values again and reports which weights drew which token (releases since August 2026). abort: the
    server returns them and the engine sends the rest again, with every release. in_place: they keep their keys and
    values, as with weight_sync.recompute_kv_cache=false, which it needs."""


class SglangRouterConfig(Section):
    """A server, or a router before several, that runs already."""

    ignored: ClassVar[dict[str, str]] = {
        "router_policy": "the library distributes requests among the servers that it starts; a router of yours has its "
        "own policy",
        "use_distributed_post": "requests are sent by the engine's own process",
    }

    use_external_router: bool = False
    """Use the server or router at sglang_router_ip and sglang_router_port, and start none."""
    sglang_router_ip: Host | None = None
    """Its name or address."""
    sglang_router_port: Port | None = None
    """Its port."""
    sglang_router_request_timeout_secs: Seconds | None = None
    """Seconds for one answer; null: 600."""


class SglangConfig(Section):
    """Keys that only SGLang reads. A key that is not listed here is an argument of the server (`ServerArgs`)."""

    rest: ClassVar[str] = "server_args"

    tp_size: Count = 1
    """GPUs of a server. The library starts servers of one GPU; larger ones are started by hand
    (sglang_router_config)."""
    weight_folder: str | None = None
    """Folder that servers and engines see, for the files of an update; null: the folder of temporary files."""
    sglang_server_config: SglangServerConfig = Field(default_factory=SglangServerConfig)
    """Keys of the library about its servers."""
    sglang_router_config: SglangRouterConfig = Field(default_factory=SglangRouterConfig)
    """A server or router that runs already."""
    server_args: dict[str, Any] = Field(default_factory=dict)
    """Arguments of `python -m sglang.launch_server` by their names with underscores, passed on unchecked; null: left
    out. Each may be written in sglang_cfg too, as in NeMo RL."""
