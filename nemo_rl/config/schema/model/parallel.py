"""Define the keys of `policy` for training backends, parallelism, batching and packing.

Invariant: these keys change speed and memory but not results. Only `lora_cfg` changes what is trained.
"""

from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Literal, Self

from pydantic import BeforeValidator, Field, model_validator
from pydantic_core import PydanticCustomError

from nemo_rl.config.base.availability import OnlyWith
from nemo_rl.config.base.names import PartName
from nemo_rl.config.base.section import Section, derived
from nemo_rl.config.base.value_types import Count, FactorOrZero, Tokens
from nemo_rl.config.schema.cluster import EnvVars


class BackendSection(Section):
    """Base of the sections of training backends, with the sizes of parallel axes under the backend's own keys."""

    size_keys: ClassVar[Mapping[str, str]] = {}
    """Key of the size of an axis (`parallel_layout.AXES`, `ep`, `etp`, `virtual`). An axis without a key has size 1."""

    def size(self, axis: str) -> int:
        """Return the configured size of an axis."""
        return getattr(self, self.size_keys[axis]) or 1 if axis in self.size_keys else 1


_TRAIN_TOKENS = "${mul:${..max_total_sequence_length},${..train_micro_batch_size}}"
_LOGPROB_TOKENS = "${mul:${..max_total_sequence_length},${..logprob_batch_size}}"


class AdapterConfig(Section):
    """Base of the sections of adapters."""

    enabled: bool = False
    """Freeze the model, and train adapters on its linear layers."""
    dim: Count = 8
    """Rank of the adapters."""
    alpha: Count = 32
    """Scale of the adapters. The product of their two matrices is multiplied by alpha / dim."""
    dropout: float = Field(default=0.0, ge=0.0, lt=1.0)
    """Dropout probability in the adapters."""
    dropout_position: Literal["pre", "post"] = "post"
    """Dropout on the adapter's input (pre) or on its output (post)."""
    exclude_modules: list[str] = Field(default_factory=list)
    """Layers without adapters, named as in target_modules."""


class LoraConfig(AdapterConfig):
    """Training of low-rank adapters instead of the model's weights."""

    ignored: ClassVar[dict[str, str]] = {"use_triton": "adapters are plain matrix products"}

    match_all_linear: bool = True
    """Adapt every linear layer except the output head."""
    target_modules: list[str] = Field(default_factory=list)
    """Layers to adapt with match_all_linear: false, as full names, last parts (q_proj) or wildcards; an empty list: all
    layers but exclude_modules."""
    lora_A_init: Literal["xavier", "uniform"] = "xavier"
    """Initial values of A: Glorot's normal distribution, or uniform within 1 / sqrt(inputs)."""

    @model_validator(mode="after")
    def _names_layers_once(self) -> Self:
        named = self.target_modules or (self.exclude_modules and not self.match_all_linear)
        if self.enabled and self.match_all_linear == bool(named):
            raise PydanticCustomError(
                "lora_targets",
                "{finding}",
                {
                    "finding": "match_all_linear=true adapts every linear layer, but target_modules names some; set "
                    "match_all_linear=false to adapt only those"
                    if self.match_all_linear
                    else "match_all_linear=false needs target_modules, for example [q_proj, v_proj], or exclude_modules"
                },
            )
        return self


NO_SUCH_PART = "models here have no such part"


class FreezeConfig(Section):
    """Parts of a model that reads images that are not trained."""

    renamed: ClassVar[dict[str, str]] = {"freeze_vision_model": "freeze_vision_tower"}
    ignored: ClassVar[dict[str, str]] = dict.fromkeys(
        ("freeze_audio_tower", "freeze_sound_encoder", "freeze_sound_projection"), NO_SUCH_PART
    )

    freeze_vision_tower: bool = False
    """Do not train the tower that reads images."""
    freeze_vision_projection: bool = False
    """Do not train the layers between the tower and the text model."""
    freeze_language_model: bool = False
    """Do not train the text model and its head."""


class AutomodelConfig(Section):
    """Options of NeMo RL's Automodel library for loading a model."""

    ignored: ClassVar[dict[str, str]] = {
        "backend": "it chooses kernels of the Automodel library; models are built from their Hugging Face class",
        "use_liger_kernel": "layers are those of the Hugging Face class, which compute the same",
        "attn_implementation": "attention follows sequence packing and the device; all of them compute the same",
        "use_sdpa_patching": "attention follows sequence packing and the device",
    }
    idle: ClassVar[dict[str, str]] = {"force_hf": "models are always built from their Hugging Face class"}

    force_hf: bool = True
    """No effect: models are always built from their Hugging Face class."""
    freeze_config: FreezeConfig = Field(default_factory=FreezeConfig)
    """Parts of a model that are not trained."""


class MoeParallelizerConfig(Section):
    """Sharding of experts that are divided among ranks."""

    idle: ClassVar[dict[str, str]] = {
        "ignore_router_for_ac": "a recomputed router decides as it did before",
    }
    ignored: ClassVar[dict[str, str]] = {
        "lm_head_precision": "log-probs are computed in float32 from the head's product",
        "wrap_outer_model": "embedding and head are always sharded",
    }

    ignore_router_for_ac: bool = False
    """No effect: routers are recomputed with their layer."""
    reshard_after_forward: bool | None = None
    """With expert_parallel_size above 1: free a layer's gathered experts between forward and backward pass; null:
    true."""


_OF_AN_AXIS = {
    "sequence_parallel": ("tensor_parallel_size", False),
    "custom_parallel_plan": ("tensor_parallel_size", None),
    "context_parallel_method": ("context_parallel_size", "all_gather"),
    "virtual_pipeline_size": ("pipeline_parallel_size", 1),
}
"""Options of a parallel axis, with the key of the axis's size and the option's default."""


_SIZE_KEYS = {
    "pp": "pipeline_parallel_size",
    "dp_replicate": "dp_replicate_size",
    "cp": "context_parallel_size",
    "tp": "tensor_parallel_size",
    "ep": "expert_parallel_size",
}


class DTensorConfig(BackendSection):
    """The PyTorch-native training backend (FSDP2)."""

    size_keys: ClassVar[Mapping[str, str]] = {**_SIZE_KEYS, "virtual": "virtual_pipeline_size"}
    ignored: ClassVar[dict[str, str]] = {
        "defer_fsdp_grad_sync": "it moves when gradients are summed over ranks, not their sum",
        "_v2": "there is one DTensor worker",
        "clear_cache_every_n_steps": "cached GPU memory is freed between phases",
    }

    @classmethod
    def without_effect(cls, values: Mapping[str, Any]) -> Mapping[str, str]:
        """Report the options of an axis with one rank."""
        told = {
            key: f"{axis} is 1"
            for key, (axis, default) in _OF_AN_AXIS.items()
            if str(values.get(axis, 1)) == "1" and values.get(key, default) != default
        }
        return {**super().without_effect(values), **told}

    enabled: bool = True
    """Train with this backend."""
    cpu_offload: bool = False
    """Keep parameters and optimizer state in host memory between uses."""
    activation_checkpointing: bool | Literal["selective"] = False
    """Recompute activations in the backward pass to save memory. true recomputes all of a decoder layer, selective all
    except the outputs of matrix products and attention."""
    keep_gathered: bool = False
    """Gather parameters (and cast them to the precision) once for all microbatches of an update, and free them at its
    end. This saves communication and memory traffic, and needs memory for the whole model in this precision. Pipeline
    stages always do this. It has no effect on a single rank that computes in float32."""
    compile_layers: bool | None = None
    """Compile decoder layers (torch.compile), so that elementwise operations between matrix products are fused: fewer
    kernels and less memory traffic, but up to some minutes of compilation in the first steps. Attention is not
    compiled. Not for models with experts, not with tensor parallelism, activation_checkpointing=selective and
    logger.record_modules. null: false, as long as no GPU has shown that it is faster."""
    flash_attention_version: Literal[2, 3] = 2
    """Version of flash attention for packed rows on GPUs: 2 is torch's own; 3 is that of the package
    flash_attn_interface, which is faster on GPUs of compute capability 9.0 (Hopper) and runs on no others."""
    dp_replicate_size: Count = 1
    """Number of copies of the sharded model (HSDP). Parameters are gathered only within a copy."""
    tensor_parallel_size: Count = 1
    """Number of ranks that divide each layer."""
    sequence_parallel: bool = False
    """Divide norms and dropout along the sequence between tensor-parallel ranks."""
    context_parallel_size: Count = 1
    """Number of ranks that divide each sequence."""
    context_parallel_method: Literal["all_gather", "ulysses"] = "all_gather"
    """Method by which attention gets the whole sequence: keys and values are gathered, or tokens are exchanged for
    heads (Ulysses)."""
    pipeline_parallel_size: Count = 1
    """Number of stages into which the layers are divided."""
    virtual_pipeline_size: Count = 1
    """Number of chunks of layers of each stage; above 1, the schedule is interleaved."""
    expert_parallel_size: Count = 1
    """Number of ranks that divide the experts of a layer."""
    moe_parallelizer: MoeParallelizerConfig = Field(default_factory=MoeParallelizerConfig)
    """Sharding of experts that are divided among ranks."""
    moe_aux_loss_coeff: FactorOrZero | None = None
    """Factor of the loss that distributes tokens evenly over experts, which needs one more forward pass; null:
    router_aux_loss_coef of the model's configuration if it sets output_router_logits, otherwise 0."""
    freeze_moe_router: bool = False
    """Do not train the routers of mixtures of experts."""
    custom_parallel_plan: str | None = None
    """Dotted path of a tensor-parallel plan, for models without one."""
    automodel_kwargs: AutomodelConfig = Field(default_factory=AutomodelConfig)
    """Loading of the model in NeMo RL."""
    lora_cfg: LoraConfig = Field(default_factory=LoraConfig)
    """Low-rank adapters."""
    env_vars: EnvVars | None = None
    """Environment variables of the policy's processes."""

    @model_validator(mode="after")
    def _compiles_what_it_can(self) -> Self:
        if not self.compile_layers:
            return self
        if self.activation_checkpointing == "selective":
            finding = (
                "compile_layers=true cannot keep selected outputs; set activation_checkpointing=false (a compiled "
                "layer already recomputes cheap operations) or true"
            )
        elif self.tensor_parallel_size > 1 or self.expert_parallel_size > 1:
            finding = (
                "compile_layers=true needs tensor_parallel_size=1 and expert_parallel_size=1: divided layers would be "
                "compiled one by one; set compile_layers=false or shard the model by data parallelism alone"
            )
        else:
            return self
        raise PydanticCustomError("compiled_layers", "{finding}", {"finding": finding})


class TrainingBackendConfig(BackendSection):
    """A user-defined training backend, used instead of a built-in one."""

    size_keys: ClassVar[Mapping[str, str]] = _SIZE_KEYS

    name: Annotated[str, PartName(())]
    """Dotted path of a class, derived from nemo_rl.models.training.backends.TrainingBackend."""
    kwargs: dict[str, Any] = Field(default_factory=dict)
    """Options for the backend."""
    pipeline_parallel_size: Count = 1
    """Number of stages into which the layers are divided."""
    dp_replicate_size: Count = 1
    """Number of copies of the sharded model."""
    context_parallel_size: Count = 1
    """Number of ranks that divide each sequence."""
    tensor_parallel_size: Count = 1
    """Number of ranks that divide each layer."""
    expert_parallel_size: Count = 1
    """Number of ranks that divide the experts of a layer."""
    env_vars: EnvVars | None = None
    """Environment variables of the policy's processes."""


class DynamicBatchingConfig(Section):
    """Microbatches with a token budget instead of a fixed number of samples."""

    enabled: bool = False
    """Fill microbatches up to a number of padded tokens."""
    train_mb_tokens: Tokens = derived(_TRAIN_TOKENS)
    """Number of padded tokens of a training microbatch."""
    logprob_mb_tokens: Tokens = derived(_LOGPROB_TOKENS)
    """Number of padded tokens of a microbatch for log-probabilities."""
    sequence_length_round: Tokens = 64
    """Microbatch lengths are rounded up to a multiple of this number of tokens."""
    max_patches: Tokens | None = None
    """Largest number of patches of images in a microbatch, for a policy that reads images; null: no limit."""


_ANOTHER_NAME = {"modified_ffd": "modified_first_fit_decreasing"}
"""Name of a packing algorithm that NeMo RL's configuration files use, although NeMo RL has no such algorithm."""


class SequencePackingConfig(Section):
    """Packing of several sequences into one row, without attention across their boundaries."""

    ignored: ClassVar[dict[str, str]] = {"fuse_loss": "the loss of a packed row is always one call"}

    @classmethod
    def without_effect(cls, values: Mapping[str, Any]) -> Mapping[str, str]:
        """Report an algorithm name that means the default."""
        name = values.get("algorithm")
        other = isinstance(name, str) and name in _ANOTHER_NAME
        told = {"algorithm": f"{values['algorithm']} is read as the default"} if other else {}
        return {**super().without_effect(values), **told}

    enabled: bool = True
    """Pack sequences instead of padding them."""
    train_mb_tokens: Tokens = derived(_TRAIN_TOKENS)
    """Number of tokens of a packed row in training."""
    logprob_mb_tokens: Tokens = derived(_LOGPROB_TOKENS)
    """Number of tokens of a packed row for log-probabilities."""
    algorithm: Annotated[
        Literal["concatenative", "first_fit_decreasing", "first_fit_shuffle", "modified_first_fit_decreasing"],
        BeforeValidator(lambda name: _ANOTHER_NAME.get(name, name) if isinstance(name, str) else name),
    ] = "modified_first_fit_decreasing"
    """Algorithm that assigns sequences to rows."""
    share_prompts: bool = True
    """Compute tokens once with which several packed sequences begin: a prompt, a system prompt, the earlier turns of a
    session with branches. Scores and gradients are the same up to rounding. Only with the DTensor backend, without
    context and pipeline parallelism, for models in which only attention and recurrent layers other than Mamba-1 connect
    tokens, and experts are not trained."""
    max_keys_per_token: Annotated[int, OnlyWith("share_prompts")] = Field(default=4, ge=2, le=10**6)
    """With share_prompts: largest number of keys and values of attention in a packed row, as a multiple of its token
    budget. Keys and values of shared tokens are repeated before each of their sequences and kept for the backward pass.
    Above this limit, another row is started. Memory predictions include them."""
    max_patches: Tokens | None = None
    """Largest number of patches of images in a packed row, for a policy that reads images; null: no limit. The vision
    tower keeps the activations of each patch, so rows of equal numbers of tokens need different amounts of memory."""
    sequence_length_round: Tokens | None = None
    """Packed rows are padded to a multiple of this number of tokens, so that kernels get fewer different lengths; null:
    only to a multiple of make_sequence_length_divisible_by."""
    microbatch_order: Literal["packer", "largest_first"] | None = "largest_first"
    """Order in which a rank computes its packed rows: largest first, so that peak memory is reached early, or in the
    order of the algorithm; null: largest_first."""


class SchedulerConfig(Section):
    """One learning-rate schedule."""

    name: str
    """Dotted class, e.g. torch.optim.lr_scheduler.LinearLR."""
    kwargs: dict[str, Any] = Field(default_factory=dict)
    """Arguments of the class."""


class SchedulerMilestones(Section):
    """Steps at which a list of schedules switches from one to the next."""

    milestones: list[Count]
    """Steps at which the next schedule of the list begins."""


_MUON = ("torch.optim.Muon", "nemo_rl.models.training.muon.Muon")


class OptimizerConfig(Section):
    """The optimizer."""

    name: str = "torch.optim.AdamW"
    """Dotted class of the optimizer."""
    kwargs: dict[str, Any] = Field(
        default_factory=lambda: {
            "lr": 5.0e-6,
            "weight_decay": 0.01,
            "betas": [0.9, 0.999],
            "eps": 1e-8,
        }
    )
    """Arguments of the class. A mapping in a file replaces this whole default. With torch.optim.Muon, `adamw` has the
    arguments of torch.optim.AdamW, which updates the parameters that are no matrices of hidden layers."""

    @property
    def is_muon(self) -> bool:
        """Return whether matrices of hidden layers are updated by Muon, and other parameters by AdamW."""
        return self.name in _MUON
