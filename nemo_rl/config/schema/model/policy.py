"""Define the keys of `policy`: the model, its tokenizer, batches, optimizer and generation.

A teacher or reward model may reuse `PolicyConfig` under another name. Invariant: derived defaults refer to other keys
by relative paths, so the section can be at any place of a file.
"""

from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Literal

from pydantic import AfterValidator, BeforeValidator, Field
from pydantic_core import PydanticCustomError

from nemo_rl.config.base.availability import Only, OnlyWith
from nemo_rl.config.base.section import Section, derived
from nemo_rl.config.base.value_types import Count, CountOrZero, Factor, Tokens, Workers
from nemo_rl.config.schema.model.generation import GenerationConfig
from nemo_rl.config.schema.model.megatron import MegatronConfig
from nemo_rl.config.schema.model.parallel import (
    DTensorConfig,
    DynamicBatchingConfig,
    OptimizerConfig,
    SchedulerConfig,
    SchedulerMilestones,
    SequencePackingConfig,
    TrainingBackendConfig,
)

SchedulerList = list[SchedulerConfig | SchedulerMilestones]

_SCHEDULER_SHAPE = (
    "a list of schedulers is [{name, kwargs}, {name, kwargs}, ..., {milestones: [step, ...]}] "
    "with one milestone fewer than schedulers, in rising order"
)


def _ends_with_milestones(entries: SchedulerList) -> SchedulerList:
    schedulers = [e for e in entries if isinstance(e, SchedulerConfig)]
    last = entries[-1] if entries else None
    points = last.milestones if isinstance(last, SchedulerMilestones) else []
    shaped = len(schedulers) >= 1 and len(entries) - len(schedulers) == isinstance(last, SchedulerMilestones)
    if not shaped or len(points) != len(schedulers) - 1 or points != sorted(set(points)):
        raise PydanticCustomError(
            "scheduler",
            "{shape}; got {schedulers} schedulers and {milestones} milestones",
            {"shape": _SCHEDULER_SHAPE, "schedulers": len(schedulers), "milestones": len(points)},
        )
    return entries


class TokenizerConfig(Section):
    """The tokenizer and its chat template."""

    later: ClassVar[dict[str, str]] = {
        "audio": "models that hear sound",
        "video": "models that see videos",
    }
    ignored: ClassVar[dict[str, str]] = {"use_fastokens": "the tokenizer of transformers gives the same tokens"}

    name: str = derived("${..model_name}")
    """Hub id or folder of the tokenizer."""
    chat_template: str | None = "default"
    """default: the tokenizer's own; null: unchanged message texts; a .jinja file; or a template text."""
    chat_template_kwargs: dict[str, Any] | None = None
    """Additional arguments for the chat template."""
    use_processor: bool = False
    """Read images with the image processor of this folder, which needs the extra `vision`."""
    processor_kwargs: Annotated[dict[str, Any] | None, OnlyWith("use_processor")] = None
    """Settings of the image processor to change, such as size; null: those of its folder."""


RewardModelType = Literal["bradley_terry", "regression", "process"]
AttributeName = Annotated[str, Field(pattern=r"^[A-Za-z][\w-]*$")]
"""Name of a score, which is part of the names of metrics."""


class RewardModelConfig(Section):
    """A head for scores instead of an output head for the vocabulary."""

    enabled: bool = False
    """Give the model a head for scores (reward models)."""
    reward_model_type: RewardModelType = "bradley_terry"
    """Meaning of the scores. bradley_terry: one score of an answer, the log-odds of being preferred; regression: a
    score of an answer for each of attributes, in the unit of the data; process: a score of each step of an answer, the
    log-odds of being right."""
    attributes: list[AttributeName] = Field(default_factory=list)
    """Names of the scores of reward_model_type=regression, in the order of the head's outputs, for example helpfulness
    and correctness. They are the labels in the config.json of checkpoints."""


class OwnDevicesConfig(Section):
    """The devices of a model that does not share devices."""

    gpus_per_node: Workers | None = None
    """Number of GPUs of each of the model's machines; required if not colocated on GPUs."""
    num_nodes: Count | None = None
    """Number of machines for only this model; null with one machine, whose devices are divided."""
    ranks_per_node: Workers | None = None
    """Number of processes on each machine if not colocated on the CPU; null: 1."""


class PlacementConfig(Section):
    """Devices of a model: its own, or those of another model."""

    enabled: bool = True
    """Whether the two models use the same devices in turns."""
    with_model: str = "policy"
    """Name of the model whose devices are shared."""
    resources: OwnDevicesConfig = Field(default_factory=OwnDevicesConfig)
    """Devices of a model that does not share devices."""

    @property
    def shares_with(self) -> str | None:
        """Return the name of the model whose devices are shared, or None if the model has its own."""
        return self.with_model if self.enabled else None


class RouterReplayConfig(Section):
    """Replay of the engine's choice of experts, for mixtures of experts."""

    enabled: bool = False
    """The trainer uses, for each token, the experts that the engine chose during sampling, in training and in passes
    for log-probabilities (including the reference). Weights and gradients of experts are the trainer's own. This
    requires an engine that reports experts (vllm), and a model whose routers can be replayed."""


class DraftConfig(Section):
    """Training of a draft model for speculative decoding, which is an EAGLE-3 head."""

    enabled: bool = False
    """Train a draft model with the policy and send it to the engines. Their vllm_kwargs.speculative_config.method must
    be eagle3."""
    model_name: str | None = None
    """Hub id or folder of an initial EAGLE-3 head; null: new weights."""
    loss_weight: Factor = 0.1
    """Factor of the draft model's loss. Its gradient is separate from that of the policy."""
    num_layers: Count | None = None
    """Number of decoder layers of a new draft model; null: 1."""
    aux_layer_indices: list[CountOrZero] | None = None
    """Hidden states of the policy that a new draft model reads, by the number of decoder layers before them; null:
    after two layers, in the middle, and before the last three layers."""


class PolicyConfig(Section):
    """The model that is trained."""

    trains: ClassVar[bool] = True
    """Whether the model has an optimizer and is saved in checkpoints. A frozen model is only used for inference."""

    renamed: ClassVar[dict[str, str]] = {"automodel_cfg": "dtensor_cfg"}
    later: ClassVar[dict[str, str]] = {
        "activation_checkpointing_enabled": "the old FSDP1 worker (use policy.dtensor_cfg.activation_checkpointing)",
        "disable_modelopt_layer_spec": "quantised training",
        "dequantize_base_checkpoint": "fp8 checkpoints",
        "fsdp_offload_enabled": "the old FSDP1 worker (use policy.dtensor_cfg.cpu_offload)",
        "pretrained_checkpoint": "starting from a Megatron checkpoint (policy.model_name names a Hugging Face model)",
        "quant_batch_size": "quantised training",
        "quant_calib_data": "quantised training",
        "quant_calib_size": "quantised training",
        "quant_cfg": "quantised training",
        "quant_sequence_length": "quantised training",
    }
    ignored: ClassVar[dict[str, str]] = {
        "generation_batch_size": "NeMo RL does not read it either",
        "refit_buffer_size_gb": "see policy.generation.weight_sync.bucket_size_mb",
    }

    @classmethod
    def without_effect(cls, values: Mapping[str, Any]) -> Mapping[str, str]:
        """Report optimizer and schedule if Megatron Core has its own."""
        told = super().without_effect(values)
        section = values.get("megatron_cfg")
        if not (isinstance(section, Mapping) and section.get("enabled") is True):
            return told
        elsewhere = {
            key: f"see megatron_cfg.{key}" for key in ("optimizer", "scheduler") if values.get(key) is not None
        }
        return {**elsewhere, **told}

    model_name: str
    """Hub id or folder of the model."""
    is_vlm: bool = derived("${.tokenizer.use_processor}")
    """Read images, and train the parts of the model that read them; always the same as tokenizer.use_processor. false:
    a model that also reads images is trained on text, and these parts stay as they are."""
    tokenizer: TokenizerConfig = Field(default_factory=TokenizerConfig)
    """Tokenizer and chat template."""
    precision: Annotated[
        Literal["bfloat16", "float16", "float32", "fp8"],
        Only(("bfloat16", "float16", "float32"), "fp8 training"),
    ] = "bfloat16"
    """Number format of the forward and backward pass. float16 is only for models that are not trained."""
    max_total_sequence_length: Annotated[int, Field(ge=2, lt=2**31)] = 512
    """Largest number of tokens of a prompt and its answer together."""
    train_global_batch_size: Count = 512
    """Number of samples of one optimizer update, over all ranks."""
    train_micro_batch_size: Count = 4
    """Number of samples of a rank's microbatch in training."""
    logprob_batch_size: Count = derived("${.train_micro_batch_size}")
    """Number of samples of a rank's microbatch for log-probabilities."""
    logprob_chunk_size: Tokens | None = None
    """Number of tokens whose logits are in memory at a time for log-probabilities. It does not change results. null:
    512 on CPUs, 2048 on GPUs."""
    make_sequence_length_divisible_by: Tokens = derived("${.dtensor_cfg.tensor_parallel_size}")
    """Sequence lengths are padded to a multiple of this many tokens, and of the number of ranks that share them."""
    max_grad_norm: Factor | None = 1.0
    """Norm to which the whole gradient is clipped; null: no clipping."""
    offload_optimizer_for_logprob: bool = False
    """On GPUs: move the optimizer state to host memory before log-prob passes, and back before the next update."""
    optimizer: OptimizerConfig | None = Field(default_factory=OptimizerConfig)
    """The optimizer, unless megatron_cfg contains it; null: the model is not trained."""
    scheduler: Annotated[SchedulerList, AfterValidator(_ends_with_milestones)] | SchedulerConfig | None = None
    """Learning-rate schedule, unless megatron_cfg has it: one, or a list that ends with milestones; null: constant."""
    hf_config_overrides: dict[str, Any] | None = Field(default_factory=dict)
    """Fields of the Hugging Face model config to change."""
    trust_remote_code: bool = False
    """Run the Python code in the folders of model and tokenizer, on every machine and with your rights. Both names must
    be local folders, or have the full commit: owner/name@COMMIT."""
    dtensor_cfg: DTensorConfig = Field(default_factory=DTensorConfig)
    """The PyTorch-native training backend."""
    megatron_cfg: MegatronConfig = Field(default_factory=MegatronConfig)
    """The Megatron Core training backend."""
    training_backend: TrainingBackendConfig | None = None
    """A user-defined training backend. The two others must be disabled."""
    dynamic_batching: DynamicBatchingConfig = Field(default_factory=DynamicBatchingConfig)
    """Microbatches by token budget."""
    sequence_packing: SequencePackingConfig = Field(default_factory=SequencePackingConfig)
    """Packing of sequences."""
    reward_model_cfg: RewardModelConfig = Field(default_factory=RewardModelConfig)
    """A scalar head, for reward models."""
    zero_mismatch: bool = derived("${.megatron_cfg.zero_train_gen_mismatch}")
    """Compute log-probabilities with the same bits in engine and trainer, on CPUs, with policy.generation.backend=hf,
    vllm or megatron. The first batch after the start is compared, and a single other bit ends the run."""
    invariant_gradients: bool = False
    """Compute updates whose bits do not depend on microbatches and on the number of data-parallel ranks, on CPUs with
    dtensor_cfg. Each row is a microbatch, and gradients are added in the order of rows. Keys of microbatches have no
    effect, and a rank has one thread unless cluster.threads_per_rank is set."""
    router_replay: RouterReplayConfig = Field(default_factory=RouterReplayConfig)
    """Replay of the engine's choice of experts."""
    draft: Annotated[DraftConfig, BeforeValidator(lambda section: {} if section is None else section)] = Field(
        default_factory=DraftConfig
    )
    """Training of a draft model."""
    generation: GenerationConfig | None = Field(default_factory=GenerationConfig)
    """Sampling; null: the policy does not sample."""

    @property
    def placement(self) -> PlacementConfig:
        """Return the model's devices. They are the policy's unless the section names others."""
        return PlacementConfig()

    @property
    def sampling(self) -> GenerationConfig:
        """Return the section `generation` of a run that samples. The checks require the section in such a run."""
        assert self.generation is not None, "the policy does not sample"
        return self.generation

    @property
    def mixes_weights(self) -> bool:
        """Return True if running answers continue with keys and values of older weights after a weight sync."""
        return self.generation is not None and not self.generation.weight_sync.recompute_kv_cache

    @property
    def backend_section(self) -> DTensorConfig | MegatronConfig | TrainingBackendConfig:
        """Return the section of the training backend, with parallel sizes and processes."""
        return self.training_backend or (self.megatron_cfg if self.megatron_cfg.enabled else self.dtensor_cfg)

    @property
    def backend_key(self) -> str:
        """Return the name of the training backend's section."""
        own = "training_backend" if self.training_backend else None
        return own or ("megatron_cfg" if self.megatron_cfg.enabled else "dtensor_cfg")

    @property
    def adapter_keys(self) -> list[str]:
        """Return the sections that add adapters to the model."""
        asked = {
            "dtensor_cfg.lora_cfg": self.dtensor_cfg.lora_cfg.enabled,
            "megatron_cfg.peft": self.megatron_cfg.enabled and self.megatron_cfg.peft.enabled,
        }
        return [key for key, enabled in asked.items() if enabled]

    @property
    def sends_adapters(self) -> bool:
        """Return whether a weight sync sends the adapter only, to engines that have the base weights."""
        return self.generation is not None and self.generation.lora_refit_mode == "adapter"
