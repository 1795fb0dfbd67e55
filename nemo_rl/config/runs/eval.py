"""Define the master configuration of an evaluation."""

from collections.abc import Iterator, Mapping, Sequence
from functools import cached_property
from itertools import chain
from typing import Any, ClassVar, override

from pydantic import Field

from nemo_rl.config.rules.broken_rules import Findings
from nemo_rl.config.rules.engines import check_engines
from nemo_rl.config.rules.evaluation import (
    check_answer_bits,
    check_endpoint_keys,
    check_eval_data,
    check_lengths,
    check_sampling,
    is_local_dataset,
)
from nemo_rl.config.rules.files import PathKey, environment_paths, tokenizer_paths
from nemo_rl.config.rules.overlap import check_rollout_runners
from nemo_rl.config.rules.rewards import check_http_server, check_nemo_gym, unused_environments
from nemo_rl.config.rules.topology import check_venvs
from nemo_rl.config.runs.run import RunConfig
from nemo_rl.config.schema.algorithms.evaluation import (
    EvalConfig,
    EvalDataConfig,
    EvalGenerationConfig,
    EvalTokenizerConfig,
)
from nemo_rl.config.schema.cluster import ClusterConfig
from nemo_rl.config.schema.env import EnvironmentMap
from nemo_rl.config.schema.model.policy import PolicyConfig


class EvalMasterConfig(RunConfig):
    """Configuration of `examples/run_eval.py`."""

    cpu_config: ClassVar[str] = "examples/configs/evals/eval_cpu.yaml"
    samples: ClassVar[bool] = True
    generation_key: ClassVar[str] = "generation"
    read_by_defaults: ClassVar[Mapping[str, Any]] = {"policy": {"tokenizer": "${tokenizer}"}}

    generation: EvalGenerationConfig = Field(default_factory=EvalGenerationConfig)
    """The model and its sampling."""
    tokenizer: EvalTokenizerConfig = Field(default_factory=EvalTokenizerConfig)
    """The tokenizer."""
    eval: EvalConfig = Field(default_factory=EvalConfig)
    """The metric, and the folder of the answers."""
    data: EvalDataConfig = Field(default_factory=EvalDataConfig)
    """The problems."""
    env: EnvironmentMap = Field(default_factory=dict)
    """Environments by name; data.env_name chooses one."""
    cluster: ClusterConfig = Field(default_factory=ClusterConfig)
    """Machines."""

    @cached_property
    def policy(self) -> PolicyConfig:
        """The model as a `policy` section, for code that starts engines, with `generation` null for an endpoint."""
        own = {"num_prompts_per_step", "model_name", "trust_remote_code", "endpoint", "zero_mismatch"}
        sampling: dict[str, Any] = self.generation.model_dump(exclude=own)
        return PolicyConfig.build(
            model_name=self.generation.model_name,
            trust_remote_code=self.generation.trust_remote_code,
            tokenizer=self.tokenizer.model_dump(),
            precision=self.generation.engine.precision,
            zero_mismatch=self.generation.zero_mismatch,
            max_total_sequence_length=self.generation.engine.max_model_len,
            generation=sampling if self.generation.endpoint is None else None,
        )

    @override
    def model_keys(self) -> Iterator[tuple[str, str, PolicyConfig]]:
        if self.generation.endpoint is None:
            yield "generation.model_name", "tokenizer.name", self.policy

    @override
    def env_entries(self) -> Iterator[tuple[str, str | None]]:
        yield "data", self.data.env_name

    def unused(self) -> Iterator[tuple[str, Sequence[str], str]]:
        """Yield the environments that the data does not name (`RunConfig.unused`)."""
        yield from unused_environments(self.env, {self.data.env_name}, ["data.env_name"])

    @override
    def path_keys(self) -> Iterator[PathKey]:
        if self.generation.endpoint is None:
            yield PathKey("generation", self.generation, "model_name")
            yield from tokenizer_paths("tokenizer", self.tokenizer)
        yield from (PathKey("data", self.data, key) for key in ("data_path", "prompt_file", "system_prompt_file"))
        if is_local_dataset(self.data.dataset_name or ""):
            yield PathKey("data", self.data, "dataset_name")
        yield from environment_paths(self.env)

    @override
    def findings(self) -> Findings:
        ranks, key = self.cluster.policy_ranks_per_node, "gpus_per_node" if self.cluster.uses_gpu else "ranks_per_node"
        counts = [ranks] * self.cluster.num_nodes
        engines = check_engines("generation", self.generation, counts, f"cluster.{key}, cluster.num_nodes")
        return chain(
            engines if self.generation.endpoint is None else check_endpoint_keys(self.generation, self.tokenizer),
            check_sampling(self.eval, self.generation),
            check_answer_bits(self.generation, self.cluster),
            check_lengths(self.generation, self.data),
            check_eval_data(self.data, self.env),
            check_nemo_gym(self.env, {self.data.env_name}, self.cluster),
            check_http_server(self.generation_key, self.generation, self.env, {self.data.env_name}),
            check_rollout_runners(None, None, self.cluster),
            check_venvs(self.cluster, {"generation", self.data.env_name, *self.env}),
        )
