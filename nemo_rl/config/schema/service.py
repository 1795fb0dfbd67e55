"""Define the keys of `service`: the address of the training service, its files, and the limits of each user."""

import ipaddress
from typing import Annotated, Self

from pydantic import Field, model_validator
from pydantic_core import PydanticCustomError

from nemo_rl.config.base.section import Section
from nemo_rl.config.base.value_types import Amount, Count, Gibibytes, Host, Mebibytes, Seconds, Tokens


class ServiceConfig(Section):
    """The training service. Its clients use the official library of the Tinker API."""

    host: Host = "127.0.0.1"
    """Address to listen on. Any other address than this machine's own needs keys_file."""
    port: Annotated[int, Field(ge=0, le=65535)] = 8710
    """Port to listen on; 0: a free port."""
    public_url: str | None = None
    """Address of the service in the links that clients get, for example https://host/; null: the address that the
    client's request names."""
    keys_file: str | None = None
    """File with a line `tml-... NAME` for each user; null: every key that begins with tml- is a user of its own."""
    state_dir: str = "results/service"
    """Folder for sessions, models and checkpoints. A service that is started again on it continues."""
    log_dir: str | None = "logs/service"
    """Folder with the metrics of each model, a run for `nemo_rl report` and `nemo_rl watch`; null: none are written."""
    model_aliases: list[str] = Field(default_factory=list)
    """Further names under which clients may ask for the model, for example Qwen/Qwen3-8B."""
    tokenizer_id: str | None = None
    """Folder or hub id from which clients load the tokenizer; null: the name of the model that the client gave."""
    seed: Annotated[int, Field(ge=0, lt=2**63)] = 0
    """Seed of adapters whose client gives none."""
    max_models_per_key: Count = 16
    """Largest number of models that one user trains at the same time."""
    max_rank: Count = 64
    """Largest rank of an adapter."""
    max_request_mb: Annotated[float, Field(gt=0, le=1024)] = 64.0
    """Largest body of a request, in MiB, after decompression."""
    max_request_tokens: Tokens = 1048576
    """Largest number of tokens of one forward_backward."""
    max_queued_mb: Mebibytes = 256
    """MiB of one user's training requests that may wait; further ones are answered with status 429."""
    max_queued_samples: Count = 8192
    """Sequences of one user that may wait or be sampled; further requests are answered with status 429."""
    max_stored_gb: Gibibytes = 64.0
    """Size of one user's checkpoints at which further ones are refused."""
    max_resident_models: Count = 8
    """Largest number of models in memory. The one that was used longest ago is moved to the disk for another one."""
    fused_models: Count = 1
    """Number of models that are served at the same time. Their passes share the base if they have the same loss, so
    their last bits depend on each other. With 1, each model has the bits that it has alone."""
    max_resident_samplers: Count = 16
    """Largest number of samplers in memory. The one that was used longest ago is removed for another one."""
    max_concurrent_samples: Count = 256
    """Largest number of sequences that are sampled at the same time."""
    idle_s: Seconds = 600.0
    """Time in seconds after which an unused model is moved to the disk."""
    state_every: Amount = 10
    """Number of updates after which the state of a model is stored. After a crash, at most so many are repeated."""
    poll_hold_s: Annotated[float, Field(gt=0, le=40)] = 35.0
    """Time in seconds for which a request for a result waits. Clients ask again at once, and give up after 45."""
    keep_results_s: Seconds = 600.0
    """Time in seconds for which a result can be asked for again."""
    command_s: Seconds = 3600.0
    """Time limit in seconds for one training request, or for the sequences of one sampling request."""

    @model_validator(mode="after")
    def _holds_the_models_it_serves(self) -> Self:
        if self.fused_models > self.max_resident_models:
            raise PydanticCustomError(
                "service",
                "fused_models={fused} models are served at the same time, and max_resident_models={resident} are in "
                "memory. Set max_resident_models to at least fused_models",
                {"fused": self.fused_models, "resident": self.max_resident_models},
            )
        return self

    @model_validator(mode="after")
    def _is_open_with_keys_only(self) -> Self:
        if self.keys_file is None and not is_loopback(self.host):
            raise PydanticCustomError(
                "service",
                "host={host} can be reached from other machines, and without keys_file every key would be accepted. "
                "Set keys_file to a file with a line `tml-... NAME` for each user, or host to 127.0.0.1",
                {"host": self.host},
            )
        return self


def is_loopback(host: str) -> bool:
    """Return whether only this machine reaches an address.

    Example:
        >>> is_loopback("127.0.0.1"), is_loopback("localhost"), is_loopback("0.0.0.0")
        (True, True, False)
    """
    try:
        return ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return host == "localhost"
