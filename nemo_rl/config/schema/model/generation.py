"""Define the keys of `policy.generation`: sampling, the engine, and the transfer of weights to it.

Invariant: lengths and precision follow the policy unless they are set here.
"""

from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field

from nemo_rl.config.base.availability import OnlyWith
from nemo_rl.config.base.names import PartName
from nemo_rl.config.base.section import Section, derived
from nemo_rl.config.base.value_types import (
    Count,
    CountOrMinusOne,
    CountOrZero,
    FactorOrZero,
    Host,
    Mebibytes,
    Port,
    Seconds,
    TokenId,
    Tokens,
    Workers,
)
from nemo_rl.config.schema.cluster import EnvVars


class SglangServerConfig(Section):
    """Keys of this library for SGLang's servers."""

    ignored: ClassVar[dict[str, str]] = {
        "num_gpus": "the devices of generation are those of the cluster",
        "num_gpus_per_engine": "a server that the library starts has one GPU; see sglang_cfg.tp_size",
    }

    needs_offload: bool = True
    """Servers free their memory while the policy computes on the same GPUs."""
    cpu_weight_backup: bool = True
    """Servers that free their memory keep the weights in host memory; false: each generation phase begins with a weight
    sync."""
    sglang_server_concurrency: Count = 1024
    """Largest number of concurrent requests of an engine at its server; further requests wait."""
    pause_generation_mode: Literal["abort", "retract", "in_place"] = "retract"
    """Treatment of running requests in a weight update. retract: they wait at the server, which computes their keys and
    values again and reports which weights drew which token (releases since August 2026). abort: the server returns them
    and the engine sends the rest again; this works with every release. in_place: they keep their keys and values; this
    requires weight_sync.recompute_kv_cache=false."""


class SglangRouterConfig(Section):
    """A server that runs already, or a router in front of several servers."""

    ignored: ClassVar[dict[str, str]] = {
        "router_policy": "the library distributes requests among the servers that it starts; a router of yours has its "
        "own policy",
        "use_distributed_post": "requests are sent by the engine's own process",
    }

    use_external_router: bool = False
    """Use the server or router at sglang_router_ip and sglang_router_port, without starting one."""
    sglang_router_ip: Host | None = None
    """Host name or address of the server or router."""
    sglang_router_port: Port | None = None
    """Port of the server or router."""
    sglang_router_request_timeout_secs: Seconds | None = None
    """Time limit of one answer in seconds; null: 600."""


class SglangConfig(Section):
    """Keys that only SGLang reads. A key that is not listed here is an argument of the server (`ServerArgs`)."""

    rest: ClassVar[str] = "server_args"

    tp_size: Count = 1
    """Number of GPUs of a server. The library starts servers with one GPU. Larger servers are started by hand
    (sglang_router_config)."""
    weight_folder: str | None = None
    """Folder for the files of an update, which servers and engines can access; null: the folder for temporary files."""
    sglang_server_config: SglangServerConfig = Field(default_factory=SglangServerConfig)
    """Keys of this library for SGLang's servers."""
    sglang_router_config: SglangRouterConfig = Field(default_factory=SglangRouterConfig)
    """A server or router that runs already."""
    server_args: dict[str, Any] = Field(default_factory=dict)
    """Arguments of `python -m sglang.launch_server` by their names with underscores, passed on without checks; null:
    left out. They may also be written in sglang_cfg, as in NeMo RL."""


TopK = CountOrMinusOne
TopP = Annotated[float, Field(gt=0, le=1)]
EnginePrecision = Literal["auto", "bfloat16", "float16", "float32", "fp8"]

_NO_ENGINES = {name: f"the generation backend {name}" for name in ("trtllm", "dynamo")}
EngineName = Annotated[str, PartName(("vllm", "hf", "megatron", "sglang"), _NO_ENGINES)]


_FP8 = OnlyWith(".engine.precision", ("fp8",))

_VLLM = OnlyWith("backend", ("vllm",))

_MEGATRON = OnlyWith("backend", ("megatron",))


class ColocatedResourcesConfig(Section):
    """Devices of generation if it does not share the policy's devices."""

    gpus_per_node: Workers | None = None
    """Number of GPUs of each generation machine; required if not colocated on GPUs."""
    num_nodes: Count | None = None
    """Number of machines for generation only; null with one machine, whose devices are divided, and on the CPU, where
    engines run on the policy's machines."""
    ranks_per_node: Workers | None = None
    """Number of engine ranks on each machine if not colocated on the CPU; null: one engine."""


class ColocatedConfig(Section):
    """Sharing of devices between engines and policy."""

    enabled: bool = True
    """Engines and policy use the same devices in turns."""
    resources: ColocatedResourcesConfig = Field(default_factory=ColocatedResourcesConfig)
    """Devices of separate engines."""


class WeightSyncConfig(Section):
    """Transfer of the policy's weights to the engines."""

    transport: Literal["auto", "shared_memory", "collective", "cuda_ipc"] = "auto"
    """Transport of the weights; auto: shared_memory on CPUs of one machine, cuda_ipc if colocated on GPUs, otherwise
    collective."""
    bucket_size_mb: Mebibytes = 256
    """Mebibytes of weights that are sent at a time, which limits the additional memory."""
    verify: bool = True
    """Compare version, tensor count and checksum on both sides of every sync."""
    send_parts: bool = True
    """For engines of several ranks: send each rank only the parts of tensors that it reads, as its first sync has
    shown; collective only."""

    recompute_kv_cache: bool = True
    """With overlap.in_flight_weight_updates: compute the keys and values of running answers again with the new weights.
    false: running answers continue with keys and values of older weights, which takes no time; their log-probabilities
    then depend on both versions, and later answers never read these keys and values. vllm only."""

    max_mult_prob_error: Annotated[float, Field(ge=1, le=1e9)] | None = 1.05
    """Largest mean ratio of probabilities between trainer and engine (token_mult_prob_error) in the first batch of a
    run. Above it, the run stops before its first update. null: no comparison."""


class EngineConfig(Section):
    """Keys that every engine reads. They may also be written under `vllm_cfg`, as in NeMo RL."""

    max_model_len: Tokens = derived("${...max_total_sequence_length}")
    """Context length of the engine in tokens, including prompt and answer."""
    precision: EnginePrecision = derived("${...precision}")
    """Number format of weights and activations in the engine. fp8: matrices of the layers are float8 in scaled blocks,
    and everything else is in policy.precision; simulated on CPUs."""
    gpu_memory_utilization: Annotated[float, Field(gt=0, le=1)] | None = None
    """Share of a GPU's memory that the engine may take; null: 0.6 next to a policy (colocated), 0.9 on GPUs of its own.
    """
    kv_cache_memory_mb: Mebibytes | None = None
    """Mebibytes of an engine's key-value cache; null: determined by gpu_memory_utilization on GPUs; on the CPU, the
    size for 256 sequences, but at most 256."""
    kv_cache_dtype: Literal["auto", "fp8", "fp8_e4m3", "fp8_e5m2"] = "auto"
    """Number format of the KV cache; auto: that of the engine's activations; fp8: e4m3 with scale 1. vllm only."""
    enforce_eager: bool = False
    """Run without compilation and CUDA graphs, as always on the CPU."""
    tensor_parallel_size: Count = 1
    """Number of ranks that divide each layer of an engine; vllm and megatron."""
    pipeline_parallel_size: Count = 1
    """Number of stages that divide the layers of an engine, each with tensor_parallel_size ranks; vllm and megatron."""
    expert_parallel_size: Count = 1
    """Number of ranks that divide the experts of a layer: a multiple of tensor_parallel_size, which adds replicas of
    the other layers; or 1: each expert is divided over the ranks of a stage. vllm, and megatron without replicas."""
    env_vars: EnvVars | None = None
    """Environment variables of the engine's process."""


class ServingChatConfig(Section):
    """Keys of NeMo RL's HTTP server. They apply to environments with agents that name no parser."""

    ignored: ClassVar[dict[str, str]] = {
        "enable_auto_tools": "calls are read wherever a request has tools",
        "exclude_tools_when_tool_choice_none": "the chat template gets the tools of each request",
        "request_logger": "requests are not logged",
    }

    tool_parser: str | None = None
    """Same as env.agent.tool_parser."""
    reasoning_parser: str | None = None
    """Same as env.agent.reasoning_parser."""
    default_chat_template_kwargs: dict[str, Any] | None = None
    """Variables of the chat template for requests of agents. Variables of a request override them. null: only
    policy.tokenizer.chat_template_kwargs."""


class VllmConfig(Section):
    """Keys that only vLLM reads. Keys of `engine` may also be written here."""

    later: ClassVar[dict[str, str]] = {
        "http_refit_api_key_env_var": "weight transfer over HTTP",
        "http_refit_server_port": "weight transfer over HTTP",
        "zmq_refit_server_port": "weight transfer over ZMQ",
        "video": "models that see videos",
    }
    ignored: ClassVar[dict[str, str]] = {
        "cap_max_tokens_to_context": "answers always end at the context length",
        "distributed_executor_backend": "the adapter chooses it",
        "enable_expert_parallel": "NeMo RL does not read it either; see expert_parallel_size",
        "enable_return_routed_experts": "engines report experts if policy.router_replay.enabled is true",
        "enable_thinking": "NeMo RL does not read it either; see policy.tokenizer.chat_template_kwargs",
        "enforce_monotonicity": "NeMo RL does not read it either",
        "limit_mm_per_prompt": "see vllm_kwargs.limit_mm_per_prompt",
        "load_format": "the adapter chooses it",
        "reset_encoder_cache_after_weight_update": "features of images are always forgotten after an update",
        "max_num_seqs": "NeMo RL does not read it either; see vllm_kwargs.max_num_seqs",
        "skip_tokenizer_init": "the adapter chooses it",
        "use_tqdm": "engines show no progress bar",
    }

    idle: ClassVar[dict[str, str]] = {
        "async_engine": "prompts always reach the engine one by one, and answers come back as they end",
        "expose_http_server": "the endpoint of docs/environments/agents.md serves all engines",
    }

    logprobs_mode: Literal["processed_logprobs", "raw_logprobs"] = "processed_logprobs"
    """Log-probabilities that the engine reports. processed: those of the sampled distribution; raw: those of the model
    without temperature, top_k, top_p and bad_words. Training accepts raw ones only if both are equal, because
    importance ratios would otherwise be wrong."""
    enable_prefix_caching: bool | None = None
    """Reuse the key-value cache of common prompt prefixes; results change by rounding only. null: vLLM decides."""
    sleep_level: Literal[1, 2] = 1
    """On GPUs shared with the policy: 1 keeps the weights in host memory while engines sleep; 2 drops them, which saves
    two copies and the host memory, but each generation phase then begins with a weight sync, even if the weights have
    not changed."""
    use_deep_gemm: Annotated[bool, _FP8] = False
    """With precision fp8 on GPUs: multiply with DeepGEMM's kernels."""
    num_first_layers_in_bf16: Annotated[CountOrZero, _FP8] = 0
    """With precision fp8: number of layers at the start of the model that stay in policy.precision."""
    num_last_layers_in_bf16: Annotated[CountOrZero, _FP8] = 0
    """With precision fp8: number of layers at the end of the model that stay in policy.precision."""
    quantization_ignored_layer_kws: Annotated[list[Annotated[str, Field(min_length=1)]], _FP8] = Field(
        default_factory=list
    )
    """With precision fp8: weights whose name contains one of these texts stay in policy.precision."""
    pow2_weight_scaling_factors: Annotated[bool, _FP8] = False
    """With precision fp8: scales of weights are powers of two, at least as large as the exact scales."""
    pow2_activation_scaling_factors: Annotated[bool, _FP8] = False
    """With precision fp8: scales of activations are powers of two; on GPUs only with use_deep_gemm."""
    is_mx: Annotated[bool, _FP8] = False
    """With precision fp8: use MXFP8, blocks of 1 x 32 values with scales in e8m0, instead of blocks of 128 x 128."""
    enable_vllm_metrics_logger: bool = False
    """Report the open requests of each engine during a step, under generation/engine.<i>."""
    vllm_metrics_logger_interval: Annotated[Seconds, OnlyWith("enable_vllm_metrics_logger")] = 0.5
    """Seconds between two counts of open requests, with enable_vllm_metrics_logger."""
    async_engine: bool = False
    """No effect: prompts are sent to the engine one by one, and answers return as they finish."""
    expose_http_server: bool = False
    """No effect: the endpoint of environments with agents serves all engines. true requires such an environment."""
    http_server_serving_chat_kwargs: ServingChatConfig | None = None
    """Parsers for environments with agents that do not name any."""
    tool_parser_plugin: str | None = None
    """Plugin for environments with agents that do not name one; see env.agent.tool_parser_plugin."""
    reasoning_parser_plugin: str | None = None
    """Plugin for environments with agents that do not name one; see env.agent.reasoning_parser_plugin."""


class McoreGenerationConfig(Section):
    """NeMo RL's section for Megatron Core's engine. Only max_model_len has an effect, as other keys are in `engine`."""

    later: ClassVar[dict[str, str]] = {
        "expose_http_server": "an HTTP server on the engines",
        "parsers": "an HTTP server on the engines",
    }
    ignored: ClassVar[dict[str, str]] = {
        "buffer_size_gb": "see policy.generation.engine.kv_cache_memory_mb",
        **dict.fromkeys(("buffer_guaranteed_fraction", "unified_memory_level"), "NeMo RL does not read it either"),
        "refit_backend": "weights move as policy.generation.weight_sync says",
        **dict.fromkeys(
            (
                *("block_size_tokens", "cuda_graph_impl", "enable_chunked_prefill", "enable_prefix_caching"),
                *("inference_cuda_graph_scope", "kv_cache_management_mode", "logging_step_interval"),
                *("mamba_inference_conv_states_dtype", "mamba_inference_ssm_states_dtype"),
                *("materialize_only_last_token_logits", "max_tokens", "num_cuda_graphs", "num_speculative_tokens"),
                "use_cuda_graphs_for_non_decode_steps",
            ),
            "it belongs to Megatron Core's dynamic inference engine, which is not used",
        ),
    }

    max_model_len: Tokens | None = None
    """With backend megatron: the context length in tokens, instead of engine.max_model_len."""


class GenerationConfig(Section):
    """Sampling of answers."""

    later: ClassVar[dict[str, str]] = {
        "quant_cfg": "quantised generation",
        "real_quant": "quantised generation",
        "real_quant_ignore": "quantised generation",
        "refit_transport": "another weight transport (see policy.generation.weight_sync)",
    }
    ignored: ClassVar[dict[str, str]] = {
        "_debug_payload_metrics": "sizes of messages are not reported",
        "_mtp_weights_from_refit": "layers for multi-token prediction get their weights with every sync",
        "_pad_token_id": "it comes from the tokenizer",
        "dynamo_cfg": "it belongs to another backend",
        "model_name": "engines always serve policy.model_name",
        "pad_token_id": "it comes from the tokenizer",
        "port_range_high": "engines open no ports of their own",
        "port_range_low": "engines open no ports of their own",
        "real_quant_export_cpu_offload": "it belongs to quantised generation",
        "refit_cfg": "weights move as policy.generation.weight_sync says",
        "trtllm_cfg": "it belongs to another backend",
        "trtllm_kwargs": "it belongs to another backend",
        "use_async_rollouts": "rollouts are always asynchronous",
    }

    written_in: ClassVar[dict[str, str]] = {"vllm_cfg": "engine"}

    backend: EngineName = "vllm"
    """The engine. vllm; hf: a plain Hugging Face model without further dependencies; megatron: a Megatron Core model on
    any number of ranks; sglang: servers of SGLang; or the dotted path of a class."""
    temperature: FactorOrZero = 1.0
    """Sampling temperature; 0 takes the most likely token (not for training)."""
    top_p: TopP = 1.0
    """Sample from the smallest set of tokens whose probabilities sum to at least this value."""
    top_k: TopK | None = None
    """Sample from the k most likely tokens; null or -1: from all tokens."""
    max_new_tokens: Tokens = derived("${..max_total_sequence_length}")
    """Largest number of tokens of an answer. Prompt and answer together end at max_model_len."""
    stop_strings: list[str] | None = None
    """Texts that end an answer."""
    bad_words: list[Annotated[str, Field(min_length=1)]] | None = None
    """Texts that are never sampled, as their tokens with or without a preceding space. The trainer ignores this key, so
    the model's probability of these texts counts as mismatch with the engine."""
    stop_token_ids: list[TokenId] | None = None
    """Additional tokens that end an answer, besides the tokenizer's end-of-sequence token and those of the model's
    generation_config."""
    val_temperature: FactorOrZero = derived("${.temperature}")
    """Sampling temperature in validation."""
    val_top_p: TopP = derived("${.top_p}")
    """top_p in validation."""
    val_top_k: TopK | None = derived("${.top_k}")
    """top_k in validation."""
    colocated: ColocatedConfig = Field(default_factory=ColocatedConfig)
    """Sharing of devices with the policy."""
    num_engines_file: str | None = None
    """File with the number of engines to run, from 1 to the number for which the run has devices. It is read before
    each weight sync: engines leave when they have answered their requests, and join with the current weights. null, or
    no such file: all engines."""
    weight_sync: WeightSyncConfig = Field(default_factory=WeightSyncConfig)
    """Transfer of weights to the engines."""
    lora_refit_mode: Literal["merged", "adapter"] = "merged"
    """Weights that a sync sends if adapters are trained. merged: all weights, with the adapter added; adapter: the
    adapter's matrices only. Engines then read the base weights of policy.model_name at their start, and compute base
    and adapter. adapter needs policy.dtensor_cfg.lora_cfg.enabled=true, and backend=vllm or hf."""
    engine: EngineConfig = Field(default_factory=EngineConfig)
    """Keys that every engine reads."""
    vllm_cfg: Annotated[VllmConfig, _VLLM] = Field(default_factory=VllmConfig)
    """Keys that only vLLM reads."""
    vllm_kwargs: Annotated[dict[str, Any], _VLLM] = Field(default_factory=dict)
    """Additional arguments of vLLM's engine, passed on without checks except for speculative_config."""
    engine_kwargs: dict[str, Any] = Field(default_factory=dict)
    """Arguments of an engine named by its dotted path. It gets them as EngineSettings.engine_kwargs."""
    sglang_cfg: Annotated[SglangConfig, OnlyWith("backend", ("sglang",))] = Field(default_factory=SglangConfig)
    """Keys that only SGLang reads."""
    mcore_generation_config: Annotated[McoreGenerationConfig, _MEGATRON] = Field(default_factory=McoreGenerationConfig)
    """NeMo RL's keys of Megatron Core's engine."""

    @property
    def memory_share(self) -> float:
        """Return the share of a GPU's memory for an engine: as configured, or the default with or without a policy."""
        given = self.engine.gpu_memory_utilization
        return given if given is not None else (0.6 if self.colocated.enabled else 0.9)

    @property
    def greedy_choice(self) -> str | None:
        """Return the setting that makes all answers to a prompt equal, or None if answers differ."""
        if self.temperature == 0:
            return "temperature=0"
        return "top_k=1" if self.top_k == 1 else None
