"""Define the configuration of the training service."""

import os
from collections.abc import Iterator
from typing import ClassVar, override

from pydantic import Field

from nemo_rl.config.rules.broken_rules import Findings
from nemo_rl.config.rules.files import PathKey, tokenizer_paths
from nemo_rl.config.rules.topology import Role, check_venvs
from nemo_rl.config.runs.run import RunConfig
from nemo_rl.config.schema.cluster import ClusterConfig
from nemo_rl.config.schema.model.policy import PolicyConfig
from nemo_rl.config.schema.service import ServiceConfig


class ServiceMasterConfig(RunConfig):
    """Configuration of `nemo_rl serve`."""

    cpu_config: ClassVar[str] = "examples/configs/serve_cpu.yaml"

    policy: PolicyConfig
    """The base model, on which clients train adapters."""
    cluster: ClusterConfig = Field(default_factory=ClusterConfig)
    """Machines."""
    service: ServiceConfig = Field(default_factory=ServiceConfig)
    """The address of the service, its files, and the limits of each user."""

    @property
    @override
    def models(self) -> dict[str, Role]:
        return {"policy": Role(self.policy)}

    @property
    def served_names(self) -> list[str]:
        """Names of the base model that clients may use: the aliases, and its folder or hub id."""
        name = self.policy.model_name
        below = os.path.relpath(name) if os.path.isabs(name) else name
        names = [*self.service.model_aliases, name, *([] if below.startswith("..") else [below])]
        return list(dict.fromkeys(names))

    @override
    def path_keys(self) -> Iterator[PathKey]:
        yield PathKey("policy", self.policy, "model_name")
        yield from tokenizer_paths("policy.tokenizer", self.policy.tokenizer)

    @override
    def findings(self) -> Findings:
        kinds = ["policy", *(["generation"] if self.policy.generation is not None else ())]
        yield from check_venvs(self.cluster, kinds)
