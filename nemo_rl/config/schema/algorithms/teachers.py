"""Define the keys of `on_policy_distillation`: the teachers of a GRPO run, and the samples that each of them scores.

`config.runs.teachers` makes the sections of the models from them, and `algorithms.teaching` scores the samples.
"""

from collections.abc import Mapping
from string import Formatter
from typing import Annotated, Any, ClassVar, Literal

from pydantic import BeforeValidator, Field

from nemo_rl.config.base.availability import OnlyWith
from nemo_rl.config.base.names import PartName
from nemo_rl.config.base.section import Section
from nemo_rl.config.base.value_types import Count, Factor, FactorOrZero, Workers
from nemo_rl.config.schema.model.endpoint import ModelEndpointConfig
from nemo_rl.config.schema.model.parallel import BackendSection
from nemo_rl.config.schema.named_part import NamedPartConfig

_PRECISIONS = {"bf16": "bfloat16", "fp16": "float16", "fp32": "float32"}


class TokenWeightsConfig(NamedPartConfig):
    """Factors of what the policy learns from a teacher at each token."""

    name: Annotated[str, PartName(("equal", "thinking"))] = "equal"
    """equal: 1 at all tokens; thinking: one factor for thinking and one for all other tokens; or the dotted path of a
    class."""
    thinking: Annotated[FactorOrZero, OnlyWith("name", ("thinking",))] = 1.0
    """Factor of the tokens between thinking_tags. 0: nothing is learned from them."""
    answer: Annotated[FactorOrZero, OnlyWith("name", ("thinking",))] = 1.0
    """Factor of all other tokens of the answer, including tags."""
    thinking_tags: Annotated[list[str], OnlyWith("name", ("thinking",))] = ["<think>", "</think>"]
    """Texts that open and close the thinking."""


class TeacherLayoutConfig(BackendSection):
    """Devices and parallel sizes of a teacher that does not share the policy's devices."""

    size_keys: ClassVar[Mapping[str, str]] = {
        "tp": "tensor_model_parallel_size",
        "pp": "pipeline_model_parallel_size",
        "cp": "context_parallel_size",
        "ep": "expert_model_parallel_size",
    }

    num_nodes: Count = 1
    """Number of machines of the teacher, if the cluster has several."""
    gpus_per_node: Workers = 8
    """Number of GPUs of each of these machines."""
    ranks_per_node: Workers | None = None
    """Number of processes on each machine on the CPU; null: 1."""
    tensor_model_parallel_size: Count = 1
    """Number of ranks that divide each layer."""
    pipeline_model_parallel_size: Count = 1
    """Number of stages, each with a part of the layers."""
    context_parallel_size: Count = 1
    """Number of ranks that divide each sequence."""
    expert_model_parallel_size: Count = 1
    """Number of ranks that divide the experts."""
    micro_batch_size: Count = 4
    """Number of samples of a rank's microbatch."""
    precision: Literal["bf16", "fp16", "fp32", "bfloat16", "float16", "float32"] | None = None
    """Number format of the forward pass; null: that of the policy."""
    megatron_cfg_overrides: dict[str, Any] | None = None
    """Further keys of megatron_cfg to change, with the Megatron Core backend."""

    @property
    def full_precision_name(self) -> str | None:
        """Return the precision as `policy.precision` names it, or None if it follows the policy."""
        return None if self.precision is None else _PRECISIONS.get(self.precision, self.precision)


class TeacherOverrideConfig(TeacherLayoutConfig):
    """Keys of default_teacher_cfg that differ for one teacher."""

    inherits: ClassVar[str] = "on_policy_distillation.non_colocated_teachers.default_teacher_cfg"


class SeparateTeachersConfig(Section):
    """Devices of teachers that do not share the policy's devices."""

    enabled: bool = False
    """Give each teacher devices of its own. false: teachers use the policy's devices in turns, and its layout."""
    default_teacher_cfg: TeacherLayoutConfig = Field(default_factory=TeacherLayoutConfig)
    """Devices and parallel sizes of a teacher."""
    teacher_overrides: dict[str, TeacherOverrideConfig] = Field(default_factory=dict)
    """Keys of default_teacher_cfg that differ for a teacher, by its name in teacher_model_by_agent_name."""

    def layout_of(self, name: str) -> TeacherLayoutConfig:
        """Return the layout of a teacher."""
        return self.teacher_overrides.get(name, self.default_teacher_cfg)


class TeacherEndpointConfig(ModelEndpointConfig):
    """A teacher at an OpenAI-compatible endpoint that returns log-probabilities of prompts, such as vLLM."""

    max_concurrent_requests: Count = 16
    """Number of concurrent requests, one for each sample."""
    max_tokens: Count | None = None
    """Number of tokens that the run sends at most since it was started or resumed; it then ends. null: no limit."""


class SelfDistillationConfig(Section):
    """The policy as its own teacher, with a prompt that tells it more."""

    enabled: bool = False
    """Score samples with the policy, which reads the context."""
    context: str | None = None
    """Text with fields of the row in braces, for example "The answer is {ground_truth}.". {solution} is a right answer
    to the prompt by another sample of the step; a sample without one learns nothing from its teacher. Required."""
    message: Literal["user", "system"] = "user"
    """Message at whose end the context stands: the last of the user, or that of the system."""
    weights: Literal["current", "initial"] = "current"
    """Weights of the teacher: those of the policy before the update, or those at the start of the run."""
    token_weights: TokenWeightsConfig = Field(default_factory=TokenWeightsConfig)
    """Factors of the advantages at each token."""

    @property
    def needs_solution(self) -> bool:
        """Return True if the context has the field {solution}."""
        return any(field == "solution" for _, field, _, _ in Formatter().parse(self.context or ""))


class OnPolicyDistillationConfig(Section):
    """Teachers whose log-probabilities of the sampled tokens give advantages (grpo.adv_estimator.name=opd)."""

    enabled: bool = False
    """Score samples with teachers."""
    teacher_model_by_agent_name: Annotated[
        dict[str, str], BeforeValidator(lambda given: {} if given is None else given)
    ] = Field(default_factory=dict)
    """Hub id, folder, or name of an entry of teachers, by the name of an environment (env_name), or of an agent of
    NeMo Gym, whose samples the teacher scores. Other names are only for default_teacher_alias."""
    default_teacher_alias: str | None = None
    """Name in teacher_model_by_agent_name of the teacher of all other samples; null: there must be no others."""
    strict_agent_name_match: bool = False
    """Raise an error if a sample's environment or agent has no teacher of its own, also with default_teacher_alias."""
    compares: Literal["tokens", "text"] = "tokens"
    """tokens: compare log-probabilities of single tokens, which needs teachers with the policy's vocabulary; text: with
    teachers that have another vocabulary, compare the shortest texts that end between two tokens of both."""
    deduplicate_shared_teacher_checkpoints: bool = True
    """Load a model that several names have only once."""
    teacher_weights: dict[str, Factor] = Field(default_factory=dict)
    """Factor of the advantages of a teacher, by its name in teacher_model_by_agent_name or endpoints; others have 1. An
    entry of teachers has its own weight."""
    non_colocated_teachers: SeparateTeachersConfig = Field(default_factory=SeparateTeachersConfig)
    """Devices of teachers that do not share the policy's devices."""
    endpoints: dict[str, TeacherEndpointConfig] = Field(default_factory=dict)
    """Teachers at endpoints, by the name of the environment or agent whose samples they score, or by a name that is a
    value of teacher_model_by_agent_name."""
    self_distillation: SelfDistillationConfig = Field(default_factory=SelfDistillationConfig)
    """The policy as its own teacher, in place of other models."""

    @property
    def learns_from_itself(self) -> bool:
        """Return True if the policy is its own teacher."""
        return self.enabled and self.self_distillation.enabled

    @property
    def asks_endpoints(self) -> bool:
        """Return True if endpoints score samples."""
        return self.enabled and bool(self.endpoints)

    def routes(self, own: Mapping[str, Any]) -> dict[str, str]:
        """Return the teacher of each environment or agent: an endpoint, a name in `own`, or the first name of a model.

        Args:
            own: the section `teachers`, whose entries are teachers of their own name.
        """
        own = {**own, **self.endpoints}
        found = {name: name for name in own}
        first: dict[str, str] = {}
        for name, model in self.teacher_model_by_agent_name.items():
            shares = self.deduplicate_shared_teacher_checkpoints
            found[name] = model if model in own else first.setdefault(model, name) if shares else name
        return found
