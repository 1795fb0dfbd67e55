"""The whole configuration of a run, one class per algorithm.

`load_config(..., schema=...)` takes one of these classes. `check` runs before Ray starts and looks at several keys at
once; single keys are checked by types.
"""

from collections.abc import Mapping, Sequence
from itertools import chain
from typing import ClassVar

from pydantic import Field

from nemo_rl.config.base.section import Section
from nemo_rl.config.rules.broken_rules import Findings, report_findings
from nemo_rl.config.rules.data import check_data, check_data_files, check_model_files
from nemo_rl.config.rules.loss import check_loss
from nemo_rl.config.rules.named_parts import check_named_parts
from nemo_rl.config.rules.training import (
    check_advantages,
    check_batches,
    check_early_stop,
    check_generation,
    check_grpo,
    check_lengths,
    check_validation,
)
from nemo_rl.config.rules.venvs import check_venvs
from nemo_rl.config.schema.algorithms.grpo import GRPOConfig
from nemo_rl.config.schema.algorithms.loss_fn import ClippedPGLossConfig
from nemo_rl.config.schema.algorithms.rollout_training import RolloutTrainingConfig
from nemo_rl.config.schema.checkpointing import CheckpointingConfig
from nemo_rl.config.schema.cluster import ClusterConfig
from nemo_rl.config.schema.data import DataConfig
from nemo_rl.config.schema.env import EnvironmentMap
from nemo_rl.config.schema.logger import LoggerConfig
from nemo_rl.config.schema.model.policy import PolicyConfig
from nemo_rl.config.schema.named_part import NamedPartConfig


class MasterConfig(Section):
    """Base of the configurations of all algorithms: the parts that every run has.

    Attributes:
        cpu_config: the example that runs on a CPU, named when a GPU is missing.
    """

    cpu_config: ClassVar[str] = "examples/configs/grpo_math_cpu.yaml"

    later: ClassVar[dict[str, str]] = {
        "async_rl": "asynchronous training",
        "data_plane": "a separate data plane",
        "on_policy_distillation": "multi-teacher on-policy distillation",
        "reward_penalties": "reward penalties",
        **dict.fromkeys(("ppo", "value", "value_loss_fn"), "PPO with a value model"),
    }

    policy: PolicyConfig = Field(description="The model that is trained.")
    data: DataConfig = Field(default_factory=DataConfig, description="Data sets.")
    checkpointing: CheckpointingConfig = Field(default_factory=CheckpointingConfig, description="Saving and resuming.")
    logger: LoggerConfig = Field(default_factory=LoggerConfig, description="Metrics and files.")
    cluster: ClusterConfig = Field(default_factory=ClusterConfig, description="Machines.")

    @property
    def models(self) -> Sequence[PolicyConfig]:
        """The sections that name a model."""
        return (self.policy,)

    @property
    def named_parts(self) -> Mapping[str, NamedPartConfig]:
        """Sections of parts that are chosen by name and constructed in the controller, by their dotted keys."""
        return {}

    @property
    def worker_kinds(self) -> list[str]:
        """Names that `cluster.venvs` may have."""
        return ["policy", *(["generation"] if self.policy.generation is not None else ())]

    @property
    def keeps_reference(self) -> bool:
        """Whether the policy's initial weights are kept, for log-probabilities to compare with."""
        return False

    @property
    def saving(self) -> CheckpointingConfig:
        """The section `checkpointing`, with what the policy's backend says about it."""
        megatron = self.policy.megatron_cfg
        asks = self.policy.backend_section is megatron and megatron.checkpoint.async_save
        return self.checkpointing.model_copy(update={"is_async": True}) if asks else self.checkpointing

    def findings(self) -> Findings:
        """What is wrong with keys that are right by themselves."""
        return iter(())

    def missing_files(self) -> Findings:
        """What is wrong with the files and folders that keys name, where these can only be local."""
        for name, section in self.items():
            if isinstance(section, PolicyConfig):
                yield from check_model_files(name, section)
        yield from check_data_files(self.data)

    def check(self) -> None:
        """Check keys against each other, and that the files they name exist.

        Raises:
            ConfigError: some keys contradict each other; the message lists all findings.
        """
        venvs = check_venvs(self.cluster, self.worker_kinds)
        report_findings(chain(self.findings(), venvs, self.missing_files()))


class RolloutMasterConfig(MasterConfig):
    """Base of the configurations whose policy writes what it learns from."""

    env: EnvironmentMap = Field(
        default_factory=dict, description="Environments by name; data entries choose by env_name."
    )

    @property
    def worker_kinds(self) -> list[str]:
        """See `MasterConfig.worker_kinds`."""
        return [*super().worker_kinds, *self.env]

    @property
    def algorithm(self) -> RolloutTrainingConfig:
        """The section of the algorithm."""
        raise NotImplementedError


class GRPOMasterConfig(RolloutMasterConfig):
    """Configuration of `examples/run_grpo.py`."""

    grpo: GRPOConfig = Field(default_factory=GRPOConfig, description="The algorithm.")
    loss_fn: ClippedPGLossConfig = Field(default_factory=ClippedPGLossConfig, description="The policy-gradient loss.")

    @property
    def algorithm(self) -> GRPOConfig:
        """The section `grpo`."""
        return self.grpo

    @property
    def keeps_reference(self) -> bool:
        """Whether the loss or the reward has a penalty for leaving the initial policy."""
        return self.loss_fn.reference_policy_kl_penalty != 0

    @property
    def named_parts(self) -> Mapping[str, NamedPartConfig]:
        """See `MasterConfig.named_parts`."""
        grpo = self.grpo
        return {
            "loss_fn": self.loss_fn,
            "grpo.adv_estimator": grpo.adv_estimator,
            "grpo.rollout_source": grpo.rollout_source,
        }

    def findings(self) -> Findings:
        """See `MasterConfig.findings`."""
        return chain(
            check_named_parts(self.named_parts),
            check_batches("grpo", self.grpo, self.policy, self.cluster),
            check_lengths(self.policy, self.data),
            check_grpo(self.grpo),
            check_advantages(self.grpo, self.loss_fn),
            check_early_stop("grpo", self.grpo),
            check_loss(self.grpo, self.policy, self.loss_fn),
            check_generation(self.policy, self.cluster),
            check_data(self.data, self.env),
            check_validation("grpo", self.grpo, self.data),
        )
