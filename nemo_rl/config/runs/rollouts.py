"""Define the master configurations of training on rollouts: their base, GRPO, PPO and on-policy distillation."""

from collections.abc import Iterator, Mapping, Sequence
from itertools import chain
from typing import ClassVar, override

from pydantic import Field

from nemo_rl.config.rules.broken_rules import Findings, check_named_parts
from nemo_rl.config.rules.data import check_data, named_entries
from nemo_rl.config.rules.files import PathKey, environment_paths, tokenizer_paths
from nemo_rl.config.rules.megatron import unknown_families
from nemo_rl.config.rules.models import (
    Judges,
    check_images,
    check_judges,
    check_placements,
    check_second_models,
    left_by_judges,
)
from nemo_rl.config.rules.overlap import check_one_overlap, check_overlap, check_rollout_runners, check_stale_mismatch
from nemo_rl.config.rules.rewards import (
    check_agents,
    check_effort_levels,
    check_http_server,
    check_nemo_gym,
    check_ppo,
    check_reward_penalties,
    check_step_credit,
    check_value,
    left_by_gym,
    unused_environments,
)
from nemo_rl.config.rules.teachers import (
    check_distillation_loss,
    check_other_tokenizers,
    check_routes,
    check_source_of_distillation,
    check_teacher,
    check_teachers,
)
from nemo_rl.config.rules.topology import Role, check_venvs, divide_cluster
from nemo_rl.config.rules.trackers import check_records
from nemo_rl.config.rules.training import (
    check_advantages,
    check_batches,
    check_early_stop,
    check_generation,
    check_grpo,
    check_lengths,
    check_loss,
    check_ranking_metric,
    check_rewards,
    check_validation,
)
from nemo_rl.config.runs.run import INHERITED, RunConfig
from nemo_rl.config.schema.algorithms.distillation import (
    DistillationConfig,
    DistillationLossConfig,
    TeacherConfig,
)
from nemo_rl.config.schema.algorithms.grpo import GRPOConfig
from nemo_rl.config.schema.algorithms.loss_fn import ClippedPGLossConfig
from nemo_rl.config.schema.algorithms.overlap import AsyncRLConfig
from nemo_rl.config.schema.algorithms.ppo import MseValueLossConfig, PPOConfig, ValueConfig
from nemo_rl.config.schema.algorithms.reward_penalties import EffortLevelConfig, RewardPenaltyConfig
from nemo_rl.config.schema.algorithms.rollout_training import RewardedTrainingConfig, RolloutTrainingConfig
from nemo_rl.config.schema.algorithms.teachers import OnPolicyDistillationConfig
from nemo_rl.config.schema.checkpointing import CheckpointingConfig
from nemo_rl.config.schema.cluster import ClusterConfig, DataPlaneConfig
from nemo_rl.config.schema.data import DataConfig
from nemo_rl.config.schema.env import EnvironmentMap
from nemo_rl.config.schema.judges import JudgeEngineConfig, LLMJudgeConfig, RewardModelEnvironmentConfig
from nemo_rl.config.schema.logger import LoggerConfig
from nemo_rl.config.schema.model.policy import PolicyConfig
from nemo_rl.config.schema.named_part import NamedPartConfig

_PENALTIES = "reward_penalties"
_REWARD_MODEL, _JUDGE = "env.reward_model", "env.llm_judge.engine"


class MasterConfig(RunConfig):
    """Base of the configurations of all training algorithms, with their common sections."""

    cpu_config: ClassVar[str] = "examples/configs/grpo_math_cpu.yaml"

    reads_images: ClassVar[bool] = False
    """Whether rows of the algorithm may have images."""
    ignored: ClassVar[dict[str, str]] = {"sif_dir": "NeMo RL does not read it either"}
    later: ClassVar[dict[str, str]] = {
        "on_policy_distillation": "advantages of teachers in an algorithm other than GRPO",
        _PENALTIES: "reward penalties of an algorithm other than GRPO",
    }

    policy: PolicyConfig
    """The model that is trained."""
    data: DataConfig = Field(default_factory=DataConfig)
    """Data sets."""
    checkpointing: CheckpointingConfig = Field(default_factory=CheckpointingConfig)
    """Saving and resuming."""
    logger: LoggerConfig = Field(default_factory=LoggerConfig)
    """Metrics and files."""
    cluster: ClusterConfig = Field(default_factory=ClusterConfig)
    """Machines."""
    data_plane: DataPlaneConfig = Field(default_factory=DataPlaneConfig)
    """NeMo RL's section for moving rows without the driver."""

    @property
    def models(self) -> dict[str, Role]:
        """Return the models of the run by name, policy first.

        Each section of type `PolicyConfig` is a model, and each entry of the section `teachers`.
        """
        sections = {name: section for name, section in self.items() if isinstance(section, PolicyConfig)}
        sections |= {f"teachers.{name}": teacher for name, teacher in self.get("teachers", {}).items()}
        keeps = {"policy": self.keeps_reference}
        return {name: Role(section, section.trains, keeps.get(name, False)) for name, section in sections.items()}

    @property
    def policy_cluster(self) -> ClusterConfig:
        """Return the part of the cluster for policy and generation, or all of it if a model is misplaced."""
        cluster = self.model_cluster
        misplaced = any(check_placements(self.models, cluster))
        return cluster if misplaced else divide_cluster(cluster, self.models)["policy"]

    @property
    def worker_kinds(self) -> list[str]:
        """Return the names that `cluster.venvs` may contain."""
        return ["policy", *(["generation"] if self.policy.generation is not None else ())]

    @override
    def path_keys(self) -> Iterator[PathKey]:
        for name, role in self.models.items():
            yield PathKey(name, role.section, "model_name")
            yield from tokenizer_paths(f"{name}.tokenizer", role.section.tokenizer)
        for place, entry in (*named_entries(self.data), (INHERITED, self.data.default)):
            yield from (PathKey(place, entry, key) for key in ("data_path", "prompt_file", "system_prompt_file"))

    @override
    def notes(self) -> Iterator[str]:
        for name, role in self.models.items():
            yield from unknown_families(name, role.section)

    @override
    def findings(self) -> Findings:
        return chain(
            check_named_parts(self.named_parts),
            check_second_models(self.models, self.model_cluster),
            check_images(self.models, algorithm_reads_images=self.reads_images),
            check_venvs(self.cluster, self.worker_kinds),
            check_records(self.logger, self.recorded_algorithm, self.policy, self.cluster),
        )

    @property
    def recorded_algorithm(self) -> RolloutTrainingConfig | None:
        """Return the algorithm's section if its steps can be recorded and replayed, or None."""
        return None


class RolloutMasterConfig(MasterConfig):
    """Base of the configurations whose policy is trained on its own answers."""

    samples: ClassVar[bool] = True

    env: EnvironmentMap = Field(default_factory=dict)
    """Environments by name. Data entries choose one by env_name."""

    @property
    def reward_model(self) -> RewardModelEnvironmentConfig | None:
        """Return the reward model's section, or None if the data does not name the environment reward_model."""
        section = self.env.get("reward_model")
        is_used = any(name == "reward_model" for _, name in self.env_entries())
        return section if is_used and isinstance(section, RewardModelEnvironmentConfig) else None

    @property
    def llm_judge(self) -> LLMJudgeConfig | None:
        """Return the section of the judge on the run's engines. None if no data names it or it is at an endpoint."""
        section = self.env.get("llm_judge")
        is_used = any(name == "llm_judge" for _, name in self.env_entries())
        return section if is_used and isinstance(section, LLMJudgeConfig) and section.engine else None

    @property
    def judges(self) -> Judges:
        """Return the sections of models that reward answers on their own devices."""
        judges: dict[str, RewardModelEnvironmentConfig | JudgeEngineConfig] = {}
        if self.reward_model is not None:
            judges[_REWARD_MODEL] = self.reward_model
        if self.llm_judge is not None and self.llm_judge.engine is not None:
            judges[_JUDGE] = self.llm_judge.engine
        return judges

    @property
    def model_cluster(self) -> ClusterConfig:
        """Return the cluster without the machines of judges and NeMo Gym."""
        return left_by_judges(left_by_gym(self.cluster, self.env), self.judges)

    @override
    def model_keys(self) -> Iterator[tuple[str, str, PolicyConfig]]:
        yield from super().model_keys()
        sections: dict[str, RewardModelEnvironmentConfig | LLMJudgeConfig | None] = {
            _REWARD_MODEL: self.reward_model,
            _JUDGE: self.llm_judge,
        }
        for place, section in sections.items():
            if section is not None:
                yield f"{place}.model_name", f"{place}.tokenizer.name", section.as_policy()

    def unused(self) -> Iterator[tuple[str, Sequence[str], str]]:
        """Yield unused environments, an endpoint that no program calls, and keys of a validation that never runs."""
        if not self.data.has_user_data:
            names = [f"{place}.env_name" for place, _ in self.env_entries()]
            yield from unused_environments(self.env, self._used_environments, [*names, f"{INHERITED}.env_name"])
        algorithm = self.algorithm
        name = next(name for name, section in self.items() if section is algorithm)
        switches = [key for key in ("val_period", "val_at_start", "val_at_end") if key in algorithm]
        if all(getattr(algorithm, key) <= 0 for key in switches):
            for key in ("val_batch_size", "max_val_samples", "val_num_generations_per_prompt", "val_start_at"):
                yield f"{name}.{key}", [f"{name}.{each}" for each in switches], "nothing is validated"

    @override
    def path_keys(self) -> Iterator[PathKey]:
        yield from super().path_keys()
        for place, judge in self.judges.items():
            yield PathKey(place, judge, "model_name")
            yield from tokenizer_paths(f"{place}.tokenizer", judge.tokenizer)
        if self.reward_model is not None:
            yield PathKey(_REWARD_MODEL, self.reward_model, "checkpoint_path")
        yield from environment_paths(self.env)

    @override
    def findings(self) -> Findings:
        yield from super().findings()
        yield from check_judges(self.judges, self.cluster)
        if not self.data.has_user_data:  # environments of user data are unknown
            used, generation = self._used_environments, self.policy.generation
            yield from check_nemo_gym(self.env, used, self.cluster)
            yield from check_http_server(self.generation_key, generation, self.env, used)

    @property
    def _used_environments(self) -> set[str | None]:
        """Return the names of the environments of the data."""
        return {name for _, name in self.env_entries()}

    @property
    @override
    def worker_kinds(self) -> list[str]:
        return [*super().worker_kinds, *self.env]

    @override
    def env_entries(self) -> Iterator[tuple[str, str | None]]:
        return ((name, entry.env_name) for name, entry in named_entries(self.data))

    @property
    def algorithm(self) -> RolloutTrainingConfig:
        """Return the section of the algorithm."""
        raise NotImplementedError


class PolicyGradientMasterConfig(RolloutMasterConfig):
    """Base of the configurations whose policy learns from rewards of its answers."""

    loss_fn: ClippedPGLossConfig = Field(default_factory=ClippedPGLossConfig)
    """The policy-gradient loss."""

    @property
    def algorithm(self) -> RewardedTrainingConfig:
        """Return the section of the algorithm."""
        raise NotImplementedError

    @property
    def num_epochs(self) -> int:
        """Return the number of passes over the samples of a step."""
        return 1

    @property
    def updates_per_step(self) -> int:
        """Return the number of optimizer updates of the policy in a step."""
        samples = self.algorithm.num_prompts_per_step * self.algorithm.num_generations_per_prompt
        return self.num_epochs * -(-samples // self.policy.train_global_batch_size)

    @property
    def keeps_reference(self) -> bool:
        """Return True if loss or reward has a penalty for the distance from the initial policy."""
        return self.loss_fn.reference_policy_kl_penalty != 0

    def policy_gradient_findings(self, section: str) -> Findings:
        """Yield errors of keys that all algorithms with a policy-gradient loss have.

        Args:
            section: name of the algorithm's section.
        """
        algorithm = self.algorithm
        return chain(
            check_batches(section, algorithm, self.policy, self.policy_cluster),
            check_lengths(self.policy, self.data),
            check_overlap(section, algorithm, self.policy, self.cluster),
            check_stale_mismatch(section, algorithm, self.loss_fn),
            check_rollout_runners(algorithm, self.policy, self.cluster),
            check_early_stop(section, algorithm),
            check_ranking_metric(section, algorithm, self.checkpointing, self.data),
            check_loss(section, algorithm, self.policy, self.loss_fn, self.num_epochs),
            check_generation(self.policy, self.policy_cluster),
            check_data(self.data, self.env),
            check_validation(section, algorithm, self.data),
        )


class GRPOMasterConfig(PolicyGradientMasterConfig):
    """Configuration of `examples/run_grpo.py`."""

    reads_images: ClassVar[bool] = True
    later: ClassVar[dict[str, str]] = {}

    grpo: GRPOConfig = Field(default_factory=GRPOConfig)
    """The algorithm."""
    async_rl: AsyncRLConfig | None = None
    """NeMo RL's newer section for overlap. Unless it is null, it fills in grpo.overlap."""
    reward_penalties: RewardPenaltyConfig = Field(default_factory=RewardPenaltyConfig)
    """Penalties on the form of answers."""
    effort_levels: dict[str, EffortLevelConfig] = Field(default_factory=dict)
    """Levels of effort by name. Each prompt has one level. By default, there are none."""
    on_policy_distillation: OnPolicyDistillationConfig = Field(default_factory=OnPolicyDistillationConfig)
    """Teachers whose log-probabilities give advantages, and the samples that each of them scores."""
    teachers: dict[str, TeacherConfig] = Field(default_factory=dict)
    """Teachers with all keys of a model, by name. on_policy_distillation adds a teacher for each of its models."""

    @property
    def algorithm(self) -> GRPOConfig:
        """The section `grpo`."""
        return self.grpo

    @property
    def has_teachers(self) -> bool:
        """Return True if teachers give advantages."""
        given = self.on_policy_distillation
        return bool(self.teachers) or given.learns_from_itself or given.asks_endpoints

    @property
    @override
    def keeps_reference(self) -> bool:
        given = self.on_policy_distillation
        return super().keeps_reference or (given.learns_from_itself and given.self_distillation.weights == "initial")

    @property
    @override
    def recorded_algorithm(self) -> GRPOConfig:
        return self.grpo

    @property
    @override
    def named_parts(self) -> Mapping[str, NamedPartConfig]:
        grpo = self.grpo
        return {
            "loss_fn": self.loss_fn,
            "grpo.adv_estimator": grpo.adv_estimator,
            "grpo.rollout_source": grpo.rollout_source,
        }

    @override
    def findings(self) -> Findings:
        return chain(
            super().findings(),
            self.policy_gradient_findings("grpo"),
            check_grpo(self.grpo),
            check_one_overlap(self.grpo, self.async_rl),
            check_advantages(self.grpo, self.loss_fn),
            check_agents(self.env, self.grpo, self.cluster),
            () if self.data.has_user_data else self._environment_findings(),
            check_reward_penalties(self.reward_penalties),
            check_effort_levels(self.effort_levels, self.grpo),
            check_teachers(self.on_policy_distillation, self.teachers, self.grpo, self.policy),
        )

    def _environment_findings(self) -> Findings:
        """Check what environments of the data give, and who scores their samples."""
        yield from check_step_credit(self.env, self._used_environments, self.grpo)
        if self.grpo.adv_estimator.name == "opd" and not self.on_policy_distillation.learns_from_itself:
            trained = {entry.env_name for place, entry in named_entries(self.data) if place.startswith("data.train")}
            yield from check_routes(self.on_policy_distillation, self.teachers, trained)


class PPOCheckpointingConfig(CheckpointingConfig):
    """Saving and keeping checkpoints. A run that is started again resumes from the newest one."""

    checkpoint_dir: str = "results/ppo"
    """Folder of the checkpoints, each in a folder step_<N>."""


class PPOMasterConfig(PolicyGradientMasterConfig):
    """Configuration of `examples/run_ppo.py`."""

    cpu_config: ClassVar[str] = "examples/configs/ppo_math_cpu.yaml"

    ppo: PPOConfig = Field(default_factory=PPOConfig)
    """The algorithm."""
    value: ValueConfig
    """The critic: the model that predicts rewards."""
    value_loss_fn: MseValueLossConfig = Field(default_factory=MseValueLossConfig)
    """The loss of the critic."""
    checkpointing: PPOCheckpointingConfig = Field(default_factory=PPOCheckpointingConfig)
    """Saving and resuming."""

    @property
    def algorithm(self) -> PPOConfig:
        """The section `ppo`."""
        return self.ppo

    @property
    @override
    def num_epochs(self) -> int:
        return self.ppo.ppo_epochs

    @property
    @override
    def named_parts(self) -> Mapping[str, NamedPartConfig]:
        return {"loss_fn": self.loss_fn, "ppo.rollout_source": self.ppo.rollout_source}

    @override
    def findings(self) -> Findings:
        return chain(
            super().findings(),
            self.policy_gradient_findings("ppo"),
            check_rewards("ppo", self.ppo),
            check_ppo(self.ppo, self.loss_fn),
            check_value(self.ppo, self.value),
        )


class DistillationCheckpointingConfig(CheckpointingConfig):
    """Saving and keeping checkpoints. A run that is started again resumes from the newest one."""

    checkpoint_dir: str = "results/distillation"
    """Folder of the checkpoints, each in a folder step_<N>."""


class DistillationMasterConfig(RolloutMasterConfig):
    """Configuration of `examples/run_distillation.py`."""

    cpu_config: ClassVar[str] = "examples/configs/distillation_math_cpu.yaml"

    distillation: DistillationConfig = Field(default_factory=DistillationConfig)
    """The algorithm."""
    loss_fn: DistillationLossConfig = Field(default_factory=DistillationLossConfig)
    """The divergence between teacher and student."""
    policy: PolicyConfig
    """The student: the model that is trained."""
    teacher: TeacherConfig
    """The teacher: the model that the student learns from."""
    teachers: dict[str, TeacherConfig] = Field(default_factory=dict)
    """Further teachers, by the environment (env_name) whose samples they score instead of teacher."""
    checkpointing: DistillationCheckpointingConfig = Field(default_factory=DistillationCheckpointingConfig)
    """Saving and resuming."""

    @property
    def algorithm(self) -> DistillationConfig:
        """The section `distillation`."""
        return self.distillation

    @property
    def sections_of_teachers(self) -> dict[str, TeacherConfig]:
        """Return the sections of all teachers by the names of their models in the run."""
        return {"teacher": self.teacher, **{f"teachers.{name}": each for name, each in self.teachers.items()}}

    @property
    @override
    def named_parts(self) -> Mapping[str, NamedPartConfig]:
        return {"loss_fn": self.loss_fn, "distillation.rollout_source": self.distillation.rollout_source}

    @override
    def findings(self) -> Findings:
        return chain(
            super().findings(),
            check_source_of_distillation(self.distillation.rollout_source),
            check_overlap("distillation", self.distillation, self.policy, self.cluster),
            check_rollout_runners(self.distillation, self.policy, self.cluster),
            check_teacher("teacher", self.teacher),
            *(check_teacher(f"teachers.{name}", teacher) for name, teacher in self.teachers.items()),
            check_batches("distillation", self.distillation, self.policy, self.policy_cluster),
            check_lengths(self.policy, self.data),
            check_generation(self.policy, self.policy_cluster),
            check_distillation_loss(self.loss_fn),
            check_other_tokenizers(self.loss_fn, self.sections_of_teachers, self.policy),
            check_early_stop("distillation", self.distillation),
            check_ranking_metric("distillation", self.distillation, self.checkpointing, self.data),
            check_data(self.data, self.env),
            check_validation("distillation", self.distillation, self.data),
        )
