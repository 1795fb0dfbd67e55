"""Keys of `policy.generation`: sampling, the engine, and the transfer of weights to it.

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
    """Keys of this library about SGLang's servers."""

    ignored: ClassVar[dict[str, str]] = {
        "num_gpus": "the devices of generation are those of the cluster",
        "num_gpus_per_engine": "a server that the library starts has one GPU; see sglang_cfg.tp_size",
    }

    needs_offload: bool = True
    """Servers free their memory while the policy computes on the same GPUs."""
    cpu_weight_backup: bool = True
    """Servers that free their memory keep the weights in host memory; false: each phase of generation begins with a
    transfer of the weights."""
    sglang_server_concurrency: Count = 1024
    """Most requests of an engine at its server at the same time; further ones wait."""
    pause_generation_mode: Literal["abort", "retract", "in_place"] = "retract"
    """Treatment of running requests in an update of the weights. retract: they wait at the server, which computes
    their keys and values again and reports which weights drew which token (releases since August 2026). abort: the
    server returns them and the engine sends the rest again, with every release. in_place: they keep their keys and
    values, as with weight_sync.recompute_kv_cache=false, which it needs."""


class SglangRouterConfig(Section):
    """A server that runs already, or a router in front of several servers."""

    ignored: ClassVar[dict[str, str]] = {
        "router_policy": "the library distributes requests among the servers that it starts; a router of yours has its "
        "own policy",
        "use_distributed_post": "requests are sent by the engine's own process",
    }

    use_external_router: bool = False
    """Use the server or router at sglang_router_ip and sglang_router_port, and start none."""
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
    """GPUs of a server. The library starts servers of one GPU; larger ones are started by hand
    (sglang_router_config)."""
    weight_folder: str | None = None
    """Folder that servers and engines see, for the files of an update; null: the folder of temporary files."""
    sglang_server_config: SglangServerConfig = Field(default_factory=SglangServerConfig)
    """Keys of this library about SGLang's servers."""
    sglang_router_config: SglangRouterConfig = Field(default_factory=SglangRouterConfig)
    """A server or router that runs already."""
    server_args: dict[str, Any] = Field(default_factory=dict)
    """Arguments of `python -m sglang.launch_server` by their names with underscores, passed on unchecked; null: left
    out. Each may be written in sglang_cfg too, as in NeMo RL."""


TopK = CountOrMinusOne
TopP = Annotated[float, Field(gt=0, le=1)]
EnginePrecision = Literal["auto", "bfloat16", "float16", "float32", "fp8"]

_NO_ENGINES = {name: f"the generation backend {name}" for name in ("trtllm", "dynamo")}
EngineName = Annotated[str, PartName(("vllm", "hf", "megatron", "sglang"), _NO_ENGINES)]


_FP8 = OnlyWith(".engine.precision", ("fp8",))

_VLLM = OnlyWith("backend", ("vllm",))

_MEGATRON = OnlyWith("backend", ("megatron",))


class ColocatedResourcesConfig(Section):
    """Devices of generation when it does not share the policy's devices."""

    gpus_per_node: Workers | None = None
    """GPUs of each generation machine; needed when not colocated on GPUs."""
    num_nodes: Count | None = None
    """Machines for generation only; null with one machine, whose devices are divided, and on the CPU, where engines
    then run on the policy's machines."""
    ranks_per_node: Workers | None = None
    """Engine ranks on each machine when not colocated on the CPU; null: one engine."""


class ColocatedConfig(Section):
    """Sharing of devices between engines and policy."""

    enabled: bool = True
    """Engines and policy take turns on the same devices."""
    resources: ColocatedResourcesConfig = Field(default_factory=ColocatedResourcesConfig)
    """Devices of separate engines."""


class WeightSyncConfig(Section):
    """Transfer of the policy's weights to the engines."""

    transport: Literal["auto", "shared_memory", "collective", "cuda_ipc"] = "auto"
    """Transport of the weights; auto: shared_memory on CPUs of one machine, cuda_ipc when colocated on GPUs, else
    collective."""
    bucket_size_mb: Mebibytes = 256
    """Mebibytes of weights moved at a time; bounds the extra memory."""
    verify: bool = True
    """Compare version, tensor count and checksum on both sides of every sync."""
    send_parts: bool = True
    """Send each rank of an engine of several ranks only the parts of the tensors that it reads, as its first sync has
    shown; collective only."""

    recompute_kv_cache: bool = True
    """With overlap.in_flight_weight_updates, compute the keys and values of running answers again with the new weights.
    false: running answers continue with keys and values of older weights, which costs no time, and their
    log-probabilities are those of this mixture; later answers never read these keys and values. vllm only."""

    max_mult_prob_error: Annotated[float, Field(ge=1, le=1e9)] | None = 1.05
    """Largest mean ratio of probabilities between trainer and engine (token_mult_prob_error) in the first batch of a
    run; above it the run stops before its first update. null: not compared."""


class EngineConfig(Section):
    """Keys that every engine reads. Each key may be written under `vllm_cfg` too, as in NeMo RL."""

    max_model_len: Tokens = derived("${...max_total_sequence_length}")
    """Context length of the engine in tokens, prompt and answer together."""
    precision: EnginePrecision = derived("${...precision}")
    """Number format of weights and activations in the engine. fp8: matrices of the layers are float8 in scaled blocks,
    everything else is in policy.precision; simulated on CPUs."""
    gpu_memory_utilization: Annotated[float, Field(gt=0, le=1)] | None = None
    """Share of a GPU's memory that the engine may take; null: 0.6 next to a policy (colocated), 0.9 on GPUs of its own.
    """
    kv_cache_memory_mb: Mebibytes | None = None
    """Mebibytes of KV cache of an engine; null: on GPUs from gpu_memory_utilization, on the CPU what 256 sequences
    take, but at most 256."""
    kv_cache_dtype: Literal["auto", "fp8", "fp8_e4m3", "fp8_e5m2"] = "auto"
    """Number format of the KV cache; auto: that of the engine's activations; fp8: e4m3 with scale 1. vllm only."""
    enforce_eager: bool = False
    """Run without compilation and CUDA graphs; the CPU always does."""
    tensor_parallel_size: Count = 1
    """Ranks that divide each layer of one engine; vllm and megatron."""
    pipeline_parallel_size: Count = 1
    """Stages that divide the layers of one engine, each of tensor_parallel_size ranks; vllm and megatron."""
    expert_parallel_size: Count = 1
    """Ranks that divide the experts of a layer among them: 1 or a multiple of tensor_parallel_size, which adds replicas
    of the other layers; 1: each expert is divided over the ranks of a stage. vllm, and megatron without replicas."""
    env_vars: EnvVars | None = None
    """Environment variables of the engine's process."""


class ServingChatConfig(Section):
    """Keys of NeMo RL's HTTP server that environments with agents take over where they name no parser."""

    ignored: ClassVar[dict[str, str]] = {
        "enable_auto_tools": "calls are read wherever a request has tools",
        "exclude_tools_when_tool_choice_none": "the chat template gets the tools of each request",
        "request_logger": "requests are not logged",
    }

    tool_parser: str | None = None
    """As env.agent.tool_parser."""
    reasoning_parser: str | None = None
    """As env.agent.reasoning_parser."""
    default_chat_template_kwargs: dict[str, Any] | None = None
    """Variables of the chat template for requests of agents; variables of a request override them. null: none besides
    those of policy.tokenizer.chat_template_kwargs."""


class VllmConfig(Section):
    """Keys that only vLLM reads. The keys of `engine` may be written here too."""

    later: ClassVar[dict[str, str]] = {
        "http_refit_api_key_env_var": "weight transfer over HTTP",
        "http_refit_server_port": "weight transfer over HTTP",
        "zmq_refit_server_port": "weight transfer over ZMQ",
        "limit_mm_per_prompt": "multimodal generation",
        "reset_encoder_cache_after_weight_update": "multimodal generation",
        "video": "multimodal generation",
    }
    ignored: ClassVar[dict[str, str]] = {
        "cap_max_tokens_to_context": "answers always end at the context length",
        "distributed_executor_backend": "the adapter chooses it",
        "enable_expert_parallel": "NeMo RL does not read it either; see expert_parallel_size",
        "enable_return_routed_experts": "engines report experts if policy.router_replay.enabled is true",
        "enable_thinking": "NeMo RL does not read it either; see policy.tokenizer.chat_template_kwargs",
        "enforce_monotonicity": "NeMo RL does not read it either",
        "load_format": "the adapter chooses it",
        "max_num_seqs": "NeMo RL does not read it either; see vllm_kwargs.max_num_seqs",
        "skip_tokenizer_init": "the adapter chooses it",
        "use_tqdm": "engines show no progress bar",
    }

    idle: ClassVar[dict[str, str]] = {
        "async_engine": "prompts always reach the engine one by one, and answers come back as they end",
        "expose_http_server": "the endpoint of docs/environments/agents.md serves all engines",
    }

    logprobs_mode: Literal["processed_logprobs", "raw_logprobs"] = "processed_logprobs"
    """Log-probs that the engine reports: those of the distribution it samples from (processed), or of the model without
    temperature, top_k, top_p and bad_words (raw). Training accepts raw ones only where both are the same, since its
    importance ratios are wrong otherwise."""
    enable_prefix_caching: bool | None = None
    """Reuse the key-value cache of common prompt prefixes; results change by rounding only. null: vLLM decides."""
    sleep_level: Literal[1, 2] = 1
    """On GPUs that engines share with the policy: keep the weights in host memory while engines sleep (1), or drop them
    (2), which saves two copies and the host memory; each phase of generation then begins with a sync, also where the
    weights have not changed."""
    use_deep_gemm: Annotated[bool, _FP8] = False
    """With precision fp8 on GPUs: multiply with DeepGEMM's kernels."""
    num_first_layers_in_bf16: Annotated[CountOrZero, _FP8] = 0
    """With precision fp8: layers at the beginning of the model that stay in policy.precision."""
    num_last_layers_in_bf16: Annotated[CountOrZero, _FP8] = 0
    """With precision fp8: layers at the end of the model that stay in policy.precision."""
    quantization_ignored_layer_kws: Annotated[list[Annotated[str, Field(min_length=1)]], _FP8] = Field(
        default_factory=list
    )
    """With precision fp8: weights whose name contains one of these texts stay in policy.precision."""
    pow2_weight_scaling_factors: Annotated[bool, _FP8] = False
    """With precision fp8: scales of weights are powers of two, at least as large as the exact ones."""
    pow2_activation_scaling_factors: Annotated[bool, _FP8] = False
    """With precision fp8: scales of activations are powers of two; on GPUs with use_deep_gemm only."""
    is_mx: Annotated[bool, _FP8] = False
    """With precision fp8: MXFP8, blocks of 1 x 32 values with scales in e8m0, in place of blocks of 128 x 128."""
    enable_vllm_metrics_logger: bool = False
    """Report the open requests of each engine over a step, under generation/engine.<i>."""
    vllm_metrics_logger_interval: Annotated[Seconds, OnlyWith("enable_vllm_metrics_logger")] = 0.5
    """Seconds between two counts of open requests, with enable_vllm_metrics_logger."""
    async_engine: bool = False
    """No effect: prompts reach the engine one by one, and answers come back as they end."""
    expose_http_server: bool = False
    """No effect: the endpoint of environments with agents serves all engines. true demands such an environment."""
    http_server_serving_chat_kwargs: ServingChatConfig | None = None
    """Parsers for environments with agents that name none."""
    tool_parser_plugin: str | None = None
    """Plugin for environments with agents that name none; see env.agent.tool_parser_plugin."""
    reasoning_parser_plugin: str | None = None
    """Plugin for environments with agents that name none; see env.agent.reasoning_parser_plugin."""


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
    """With backend: megatron, the context length in tokens, in place of engine.max_model_len."""


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
    """Engine: vllm; hf, a plain Hugging Face model without further dependencies; megatron, a Megatron Core model on
    any number of ranks; sglang, servers of SGLang; or the dotted path of a class."""
    temperature: FactorOrZero = 1.0
    """Sampling temperature; 0 takes the most likely token (not for training)."""
    top_p: TopP = 1.0
    """Sample from the smallest set of tokens whose probabilities add up to this."""
    top_k: TopK | None = None
    """Sample from the k most likely tokens; null or -1: from all."""
    max_new_tokens: Tokens = derived("${..max_total_sequence_length}")
    """Most tokens of one answer; prompt and answer together end at max_model_len."""
    stop_strings: list[str] | None = None
    """Texts that end an answer."""
    bad_words: list[Annotated[str, Field(min_length=1)]] | None = None
    """Texts that are never sampled, each as its tokens, with or without a space before it. The trainer ignores this
    key: the probability that the model gives to these texts counts as mismatch with the engine."""
    stop_token_ids: list[TokenId] | None = None
    """More tokens that end an answer, besides the tokenizer's end-of-sequence token and those of the model's
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
    """File with the number of engines that shall run, from 1 to the number that the run has room for. It is read before
    each transfer of weights: engines leave when they have answered their requests, and join with the current weights.
    null, or no such file: all engines."""
    weight_sync: WeightSyncConfig = Field(default_factory=WeightSyncConfig)
    """Transfer of weights to the engines."""
    engine: EngineConfig = Field(default_factory=EngineConfig)
    """Keys that every engine reads."""
    vllm_cfg: Annotated[VllmConfig, _VLLM] = Field(default_factory=VllmConfig)
    """Keys that only vLLM reads."""
    vllm_kwargs: Annotated[dict[str, Any], _VLLM] = Field(default_factory=dict)
    """More arguments for vLLM's engine, passed on unchecked, except for speculative_config, which is checked."""
    engine_kwargs: dict[str, Any] = Field(default_factory=dict)
    """Arguments of an engine named by its dotted path, which gets them as EngineSettings.engine_kwargs."""
    sglang_cfg: Annotated[SglangConfig, OnlyWith("backend", ("sglang",))] = Field(default_factory=SglangConfig)
    """Keys that only SGLang reads."""
    mcore_generation_config: Annotated[McoreGenerationConfig, _MEGATRON] = Field(default_factory=McoreGenerationConfig)
    """Keys of Megatron Core's engine in NeMo RL."""

    @property
    def memory_share(self) -> float:
        """Share of a GPU's memory for an engine: as configured, or what fits next to a policy, or alone."""
        given = self.engine.gpu_memory_utilization
        return given if given is not None else (0.6 if self.colocated.enabled else 0.9)

    @property
    def greedy_choice(self) -> str | None:
        """The setting that makes all answers to a prompt the same, or None where answers differ."""
        if self.temperature == 0:
            return "temperature=0"
        return "top_k=1" if self.top_k == 1 else None
