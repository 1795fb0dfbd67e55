"""Keys of `cluster.agent_endpoint`: the HTTP endpoint from which agent programs sample."""

from typing import Annotated

from pydantic import Field, PositiveFloat, PositiveInt

from nemo_rl.config.base.section import Section


class AgentEndpointConfig(Section):
    """The endpoint that the programs of agent environments call; it runs where rollouts are played."""

    host: str = "127.0.0.1"
    """Address to listen on. Programs on other machines need "0.0.0.0"; every request needs the key of a sample in any
    case."""
    port: Annotated[int, Field(ge=0, le=65535)] = 0
    """Port to listen on; 0: a free one. With cluster.rollout_runners it must be 0."""
    public_host: str | None = None
    """Host in the addresses that programs get; null: host, or the address of the machine for "0.0.0.0"."""
    max_request_mb: PositiveFloat = 16.0
    """Largest body of a request, in MiB; larger ones are answered with status 413."""
    max_concurrent_calls: PositiveInt = 64
    """Requests of one sample's program that are answered at the same time; further ones get status 429."""
    max_requests_per_minute: PositiveInt | None = None
    """Requests of one sample's program within a minute; further ones get status 429; null: no limit."""
