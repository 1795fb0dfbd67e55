"""Define the keys of `policy.megatron_cfg` for training with Megatron Core.

Names, meanings and defaults are those of NeMo RL. Invariant: a fusion or kernel of Transformer Engine is used if
Transformer Engine is installed. Otherwise, plain PyTorch computes the same numbers.
"""

from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Literal

from pydantic import BeforeValidator, Field

from nemo_rl.config.base.availability import Only, OnlyWith
from nemo_rl.config.base.section import Section, derived
from nemo_rl.config.base.value_types import (
    Amount,
    AmountOrZero,
    Count,
    CountOrZero,
    Factor,
    FactorOrZero,
    LearningRate,
    LearningRateOrZero,
)
from nemo_rl.config.schema.cluster import EnvVars
from nemo_rl.config.schema.model.parallel import NO_SUCH_PART, AdapterConfig, BackendSection, FreezeConfig

_DEEPEP = "the DeepEP and HybridEP dispatchers"
_GENERATION = "belongs to Megatron Core's dynamic inference engine, which is not used"
_GRAPHS = "CUDA graphs"
_OFFLOADING = "offloading of activations"
_BY_PRECISION = "follows policy.precision; the weights that the optimizer moves are float32"
_FSDP = "Megatron's own FSDP"


MUON = ("muon", "dist_muon")
"""Values of `optimizer.optimizer` with which Muon updates matrices of hidden layers."""
_WITH_ADAM = ("adam", *MUON)


class MegatronOptimizerConfig(Section):
    """The optimizer of Megatron Core, used instead of `policy.optimizer`."""

    later: ClassVar[dict[str, str]] = {"fp16": "float16 training"}
    ignored: ClassVar[dict[str, str]] = {"bf16": _BY_PRECISION, "params_dtype": _BY_PRECISION}

    optimizer: Literal["adam", "sgd", "muon", "dist_muon"] = "adam"
    """The optimizer: Adam with decoupled weight decay, SGD, or Muon for matrices of hidden layers with Adam for other
    parameters. dist_muon is another name of muon."""
    lr: LearningRate = 5.0e-6
    """Highest learning rate."""
    min_lr: LearningRateOrZero = 5.0e-7
    """Learning rate at the end of a decay."""
    weight_decay: FactorOrZero = 0.01
    """Default of scheduler.start_weight_decay and end_weight_decay. Only these two keys are used."""
    adam_beta1: Annotated[float, OnlyWith("optimizer", _WITH_ADAM)] = Field(default=0.9, ge=0.0, lt=1.0)
    """Decay rate of Adam's mean of gradients."""
    adam_beta2: Annotated[float, OnlyWith("optimizer", _WITH_ADAM)] = Field(default=0.999, ge=0.0, lt=1.0)
    """Decay rate of Adam's mean of squared gradients."""
    adam_eps: Annotated[Factor, OnlyWith("optimizer", _WITH_ADAM)] = 1e-8
    """Value added to Adam's denominator."""
    sgd_momentum: Annotated[float, OnlyWith("optimizer", ("sgd",))] = Field(default=0.9, ge=0.0, lt=1.0)
    """Momentum of SGD."""
    muon_momentum: Annotated[float, OnlyWith("optimizer", MUON)] = Field(default=0.95, ge=0.0, lt=1.0)
    """Share of the earlier momentum of Muon."""
    muon_nesterov: Annotated[bool, OnlyWith("optimizer", MUON)] = False
    """Use Nesterov momentum."""
    muon_num_ns_steps: Annotated[Count, OnlyWith("optimizer", MUON)] = 5
    """Number of Newton-Schulz steps, which make the momentum of a matrix orthogonal."""
    muon_coefficient_type: Annotated[
        Literal["simple", "quintic", "polar_express", "cans", "aol", "deepseekv4"], OnlyWith("optimizer", MUON)
    ] = "quintic"
    """Coefficients of the steps; simple: those of torch.optim.Muon."""
    muon_fp32_matmul_prec: Annotated[Literal["medium", "high", "highest"], OnlyWith("optimizer", MUON)] = "medium"
    """Precision of the steps: bfloat16, TensorFloat-32 or float32."""
    muon_scale_mode: Annotated[Literal["spectral", "unit_rms_norm", "shape_scaling"], OnlyWith("optimizer", MUON)] = (
        "spectral"
    )
    """Factor of the learning rate for a matrix of m rows and n columns: sqrt(max(m, n)), sqrt(m / n), or
    sqrt(max(1, m / n))."""
    muon_extra_scale_factor: Annotated[Factor, OnlyWith("optimizer", MUON)] = 1.0
    """Further factor of the learning rate for all matrices; with spectral, 0.2 gives updates as large as Adam's."""
    muon_split_qkv: Annotated[bool, OnlyWith("optimizer", MUON)] = True
    """Treat queries, keys and values of linear_qkv as three matrices, as in Hugging Face's models."""
    muon_tp_mode: Annotated[Literal["duplicated", "distributed", "blockwise"], OnlyWith("optimizer", MUON)] = (
        "duplicated"
    )
    """Computation for a matrix that tensor-parallel ranks divide: on every rank, by all ranks together, or for each
    rank's block as if it were a matrix, so that the result depends on the number of ranks."""
    use_distributed_optimizer: bool = True
    """Divide float32 weights and moments among data-parallel ranks (ZeRO-1)."""
    use_precision_aware_optimizer: bool = True
    """Use Transformer Engine's Adam, which stores its own state. Without Transformer Engine, torch's Adam is used."""
    optimizer_cpu_offload: bool = False
    """On GPUs: keep the optimizer state in host memory and update it there."""
    optimizer_offload_fraction: Annotated[float, OnlyWith("optimizer_cpu_offload")] = Field(default=0.0, ge=0.0, le=1.0)
    """Share of the optimizer state that optimizer_cpu_offload moves."""
    overlap_cpu_optimizer_d2h_h2d: Annotated[bool, OnlyWith("optimizer_cpu_offload")] = False
    """With optimizer_cpu_offload: copy between GPU and host during the update."""
    clip_grad: FactorOrZero | None = derived("${...max_grad_norm}")
    """Norm to which the whole gradient is clipped; 0 or null: no clipping."""

    @property
    def is_muon(self) -> bool:
        """Return whether matrices of hidden layers are updated by Muon, and other parameters by Adam."""
        return self.optimizer in MUON


class MegatronSchedulerConfig(Section):
    """Learning rate and weight decay by training step, used instead of `policy.scheduler`."""

    ignored: ClassVar[dict[str, str]] = {"override_opt_param_scheduler": "NeMo RL does not read it either"}

    lr_decay_style: Annotated[
        Literal["constant", "linear", "cosine", "inverse-square-root", "WSD"],
        Only(("constant", "linear", "cosine", "inverse-square-root"), "warmup-stable-decay schedules"),
    ] = "constant"
    """Shape of the learning-rate decay after the warm-up."""
    lr_decay_iters: Amount | None = 1000
    """Number of steps until the learning rate is optimizer.min_lr; null only with constant."""
    lr_warmup_iters: AmountOrZero = 13
    """Number of steps of the linear rise to optimizer.lr."""
    lr_warmup_init: LearningRateOrZero = 5.0e-7
    """Learning rate at the start of the rise."""
    start_weight_decay: FactorOrZero = derived("${..optimizer.weight_decay}")
    """Weight decay of the first step."""
    end_weight_decay: FactorOrZero = derived("${..optimizer.weight_decay}")
    """Weight decay after lr_decay_iters."""
    weight_decay_incr_style: Literal["constant", "linear", "cosine"] = "constant"
    """Shape of the rise of the weight decay."""


class MegatronDDPConfig(Section):
    """Sums of gradients and gathering of weights over data-parallel ranks."""

    later: ClassVar[dict[str, str]] = {"use_custom_fsdp": _FSDP}
    ignored: ClassVar[dict[str, str]] = {
        "average_in_collective": "gradients are sums: losses are divided by the counts of the whole batch",
        "data_parallel_sharding_strategy": f"belongs to {_FSDP}",
    }

    grad_reduce_in_fp32: bool = True
    """Store and sum gradients in float32, as in the other backend; false: use half the memory, but lose small gradients
    in updates with many microbatches."""
    overlap_grad_reduce: bool = True
    """Sum gradients during the backward pass of the last microbatch."""
    overlap_param_gather: bool = True
    """Gather updated weights during the forward pass. This requires the distributed optimizer."""


MEGATRON_LINEAR_LAYERS = (
    "linear_qkv",
    "linear_proj",
    "linear_fc1",
    "linear_fc2",
    "linear_q_proj",
    "linear_q_down_proj",
    "linear_q_up_proj",
    "linear_kv_down_proj",
    "linear_kv_up_proj",
    "in_proj",
    "out_proj",
)
"""Last parts of the names of Megatron Core's linear layers. Those of latent attention follow `linear_fc2`, and the last
two belong to layers with states."""


class MegatronPeftConfig(AdapterConfig):
    """Training of low-rank adapters instead of the model's weights."""

    ignored: ClassVar[dict[str, str]] = {
        "a2a_experimental": "adapters exchange products of their rank's width, never whole activations"
    }

    target_modules: list[str] = Field(default_factory=list)
    """Layers to adapt, as last parts of Megatron Core's names (linear_qkv, linear_proj, linear_fc1, linear_fc2, the
    layers of latent attention, in_proj and out_proj of layers with states), longer names or wildcards; an empty list:
    all layers but exclude_modules. Routed experts and the output head have no adapters."""
    lora_A_init_method: Literal["xavier", "uniform"] = "xavier"
    """Initial values of A: Glorot's normal distribution, or uniform within 1 / sqrt(inputs)."""
    lora_B_init_method: Annotated[
        Literal["zero", "xavier", "uniform"], Only(("zero",), "adapters that change the model before it is trained")
    ] = "zero"
    """Initial values of B. With zero, a new adapter has no effect."""
    lora_dtype: Annotated[
        Literal["bfloat16", "float32"] | None,
        BeforeValidator(lambda name: None if name == "None" else name),  # as NeMo RL's own files write null
    ] = None
    """Number format of adapters and of their products; null: policy.precision."""


class MegatronFp8Config(Section):
    """Training with float8 matrix products, by Transformer Engine on GPUs, but with unchanged weights and gradients.

    Rows are padded to a multiple of the length that the recipe's kernels require.
    """

    enabled: bool = False
    """Train in float8."""
    fp8: Literal["e4m3", "hybrid"] = "e4m3"
    """Float8 format: e4m3, or hybrid with e5m2 for gradients."""
    fp8_recipe: Literal["tensorwise", "delayed", "blockwise", "mxfp8"] = "blockwise"
    """Granularity of scales. tensorwise: one per tensor; delayed: one per tensor, from earlier steps; blockwise: one
    per block of 128 x 128 weights or 1 x 128 activations; mxfp8: one per 32 values, on Blackwell GPUs."""
    fp8_param: Annotated[bool, Only((False,), "weights of training that are held in float8")] = False
    """Also store the weights in float8."""
    force_clear_fp8_caches: bool = False
    """Free Transformer Engine's float8 copies of weights before weights are sent to engines."""


class MegatronCheckpointConfig(Section):
    """Writing of checkpoints. The section `checkpointing` sets times and places."""

    ignored: ClassVar[dict[str, str]] = dict.fromkeys(
        (
            *("ckpt_assume_constant_structure", "ckpt_fully_parallel_load_exchange_algo"),
            *("ckpt_fully_parallel_load_process_group", "ckpt_fully_parallel_save_process_group"),
        ),
        "every rank writes and reads its own part",
    )

    async_save: bool = False
    """Same as checkpointing.is_async. Either of the two enables it."""


class MegatronConfig(BackendSection):
    """The Megatron Core training backend."""

    size_keys: ClassVar[Mapping[str, str]] = {
        "pp": "pipeline_model_parallel_size",
        "cp": "context_parallel_size",
        "tp": "tensor_model_parallel_size",
        "ep": "expert_model_parallel_size",
        "etp": "expert_tensor_parallel_size",
        "virtual": "virtual_pipeline_model_parallel_size",
    }
    later: ClassVar[dict[str, str]] = {
        "cuda_graph_impl": _GRAPHS,
        "cuda_graph_modules": _GRAPHS,
        "fine_grained_activation_offloading": _OFFLOADING,
        "hybridep_num_ranks_per_nvlink_domain": _DEEPEP,
        "hybridep_use_mnnvl": _DEEPEP,
        "moe_enable_deepep": _DEEPEP,
        "moe_flex_dispatcher_backend": _DEEPEP,
        "moe_hybridep_num_sms": _DEEPEP,
        "offload_modules": _OFFLOADING,
    }
    neutral: ClassVar[dict[str, tuple[Any, ...]]] = {"cuda_graph_impl": ("none",)}
    ignored: ClassVar[dict[str, str]] = {
        "clear_memory_caches_before_refit": "cached GPU memory is freed between phases",
        "converter_type": "the model's type chooses its converter",
        "cuda_graph_warmup_steps": f"belongs to {_GRAPHS}",
        "defer_fp32_logits": "logits become float32 chunk by chunk, see policy.logprob_chunk_size",
        "freeze_sound_encoder": NO_SUCH_PART,
        "freeze_sound_projection": NO_SUCH_PART,
        "freeze_vision_model": NO_SUCH_PART,
        "freeze_vision_projection": NO_SUCH_PART,
        "force_reconvert_from_hf": "every start reads the Hugging Face files themselves; no converted copy is kept",
        "fused_linear_logprobs_chunk_size": "see policy.logprob_chunk_size",
        "inference_grouped_gemm_backend": _GENERATION,
        "inference_moe_token_dispatcher_type": _GENERATION,
        "moe_pad_experts_for_cuda_graph_inference": _GENERATION,
        "pipeline_dtype": "activations pass between stages in policy.precision",
        "radio_force_cpe_eval_mode": NO_SUCH_PART,
        "track_moe_metrics": "NeMo RL does not read it either; see moe_per_layer_logging",
        "train_iters": "the algorithm's section sets the number of steps, in NeMo RL too",
        "use_fused_linear_logprobs": "log-probs are always computed chunk by chunk, see policy.logprob_chunk_size",
        "use_fused_weighted_squared_relu": "computed without a fused kernel, with the same numbers",
        "use_gloo_process_groups": "process groups for checkpoints are made where they are needed",
    }

    @classmethod
    def without_effect(cls, values: Mapping[str, Any]) -> Mapping[str, str]:
        """Report keys without effect, such as options of recomputation that is off or the rate of an absent bias."""
        off = not values.get("activation_checkpointing")
        options = ("recompute_granularity", "recompute_modules")
        told = {key: "activation_checkpointing is false" for key in options if off}
        if not values.get("mtp_num_layers"):
            others = ("mtp_loss_scaling_factor", "mtp_use_repeated_layer", "mtp_detach_heads")
            told |= {key: "mtp_num_layers is 0" for key in others if values.get(key)}
        if values.get("moe_router_enable_expert_bias") is False and values.get("moe_router_bias_update_rate"):
            told["moe_router_bias_update_rate"] = "moe_router_enable_expert_bias is false"
        return {**super().without_effect(values), **told}

    @property
    def num_mtp_modules(self) -> int:
        """Return the number of multi-token-prediction layers with their own weights."""
        return min(self.mtp_num_layers, 1) if self.mtp_use_repeated_layer else self.mtp_num_layers

    @property
    def trains_mtp(self) -> bool:
        """Return True if the multi-token-prediction layers have a loss."""
        return self.mtp_num_layers > 0 and self.mtp_loss_scaling_factor > 0

    enabled: bool = False
    """Train with this backend. Set dtensor_cfg.enabled to false."""
    tensor_model_parallel_size: Count = 1
    """Number of ranks that divide each layer."""
    sequence_parallel: bool = False
    """Divide norms and dropout along the sequence between tensor-parallel ranks. Required to train mixtures of experts
    with tensor parallelism."""
    context_parallel_size: Count = 1
    """Number of ranks that divide each sequence."""
    pipeline_model_parallel_size: Count = 1
    """Number of stages into which the layers are divided."""
    virtual_pipeline_model_parallel_size: Count | None = None
    """Number of chunks of layers of each stage; above 1, the schedule is interleaved; null: 1."""
    num_layers_in_first_pipeline_stage: Count | None = None
    """Number of layers of the first stage; null: the same number as in the other stages."""
    num_layers_in_last_pipeline_stage: Count | None = None
    """Number of layers of the last stage; null: the same number as in the other stages."""
    expert_model_parallel_size: Count = 1
    """Number of ranks that divide the experts of a layer. They are taken from the data, context and tensor axes."""
    expert_tensor_parallel_size: Count = 1
    """Number of ranks that divide each single expert. They are also taken from the data, context and tensor axes."""
    activation_checkpointing: bool = False
    """Recompute activations in the backward pass to save memory."""
    recompute_granularity: Literal["full", "selective"] = "full"
    """With activation_checkpointing: recompute whole layers, or only the modules of recompute_modules."""
    recompute_modules: (
        list[Literal["core_attn", "layernorm", "mla_up_proj", "mlp", "moe", "moe_act", "shared_experts"]] | None
    ) = None
    """With selective: the modules to recompute; null: [core_attn]."""
    freeze_moe_router: bool = True
    """Do not train the routers of mixtures of experts."""
    moe_router_dtype: Literal["fp32", "fp64"] | None = "fp64"
    """Number format of routing; null: policy.precision."""
    moe_router_load_balancing_type: Literal["none", "aux_loss", "seq_aux_loss", "global_aux_loss"] = "none"
    """Loss that distributes tokens evenly over experts, if any. It is computed over the tokens of a microbatch, of each
    sequence, or of all ranks."""
    moe_aux_loss_coeff: FactorOrZero | None = None
    """Factor of the loss that distributes tokens; null: router_aux_loss_coef of the model's configuration, or 0."""
    moe_router_enable_expert_bias: bool | None = None
    """Add a bias per expert in the choice of experts; null: as in the model."""
    moe_router_bias_update_rate: FactorOrZero = 0.0
    """Change of an expert's bias per update, in favour of experts with few tokens."""
    moe_router_num_groups: Count | None = None
    """Number of groups into which the experts are divided; null: as in the model."""
    moe_router_group_topk: Count | None = None
    """Number of groups from which the experts of a token are chosen; null: as in the model."""
    moe_token_dispatcher_type: Annotated[
        Literal["alltoall", "allgather", "flex"], Only(("alltoall", "allgather"), _DEEPEP)
    ] = "alltoall"
    """Method by which tokens are sent to the ranks of their experts."""
    mtp_num_layers: CountOrZero = 0
    """Number of multi-token-prediction layers of the model (DeepSeek-V3), which are loaded, saved and sent to
    engines."""
    mtp_loss_scaling_factor: Annotated[FactorOrZero, OnlyWith("mtp_num_layers")] = 0.0
    """Factor of the loss of these layers, the cross-entropy with the trained tokens; 0: their weights do not change."""
    mtp_use_repeated_layer: bool = False
    """Apply the first of these layers mtp_num_layers times, instead of different layers."""
    mtp_detach_heads: bool = False
    """Let the multi-token-prediction loss change only its own layers, whose gradients are clipped separately."""
    moe_per_layer_logging: bool = False
    """Also report the load of experts of each layer, as moe/layer_<n>/load_max and so on."""
    moe_grouped_gemm: bool | None = None
    """Compute all experts of a rank in one product, with Transformer Engine; null: if it is installed."""
    moe_permute_fusion: bool = True
    """Sort tokens by expert in one kernel, with Transformer Engine."""
    moe_shared_expert_overlap: bool = False
    """Compute shared experts while tokens are exchanged. This requires alltoall."""
    apply_rope_fusion: bool = True
    """Apply rotary position embeddings in one fused kernel, with Transformer Engine."""
    bias_activation_fusion: bool = True
    """Apply the bias and the activation function of a layer in one kernel, on GPUs."""
    gradient_accumulation_fusion: bool = False
    """Add a weight's gradient to the sum in the matrix product that computes it, on GPUs with Transformer Engine."""
    transformer_impl: Literal["local", "transformer_engine"] | None = None
    """Use layers of PyTorch (local) or of Transformer Engine; null: Transformer Engine if it is installed."""
    zero_train_gen_mismatch: bool = False
    """Compute log-probabilities with the same bits in engine and trainer (policy.zero_mismatch)."""
    attention_backend: Literal["flash", "fused", "unfused", "local", "auto"] | None = None
    """Attention kernels of Transformer Engine; null: Transformer Engine chooses."""
    empty_unused_memory_level: Literal[0, 1, 2] = 1
    """When to free cached GPU memory: never (0), after each update (1), or also before it (2)."""
    model_overrides: dict[str, Any] = Field(default_factory=dict)
    """Fields of Megatron Core's TransformerConfig to change, which override all other settings."""
    freeze_config: FreezeConfig = Field(default_factory=FreezeConfig)
    """Parts of a model that are not trained, in NeMo RL."""
    checkpoint: MegatronCheckpointConfig = Field(default_factory=MegatronCheckpointConfig)
    """Writing of this backend's checkpoints."""
    fp8_cfg: MegatronFp8Config = Field(default_factory=MegatronFp8Config)
    """Training in float8."""
    peft: MegatronPeftConfig = Field(default_factory=MegatronPeftConfig)
    """Low-rank adapters."""
    distributed_data_parallel_config: MegatronDDPConfig = Field(default_factory=MegatronDDPConfig)
    """Sums of gradients and gathering of weights over data-parallel ranks."""
    optimizer: MegatronOptimizerConfig = Field(default_factory=MegatronOptimizerConfig)
    """The optimizer."""
    scheduler: MegatronSchedulerConfig = Field(default_factory=MegatronSchedulerConfig)
    """Learning rate and weight decay by step."""
    env_vars: EnvVars | None = None
    """Environment variables of the policy's processes."""
