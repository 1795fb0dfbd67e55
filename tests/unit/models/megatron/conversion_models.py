"""Megatron Core models for the tests of conversion, made without the library's own builder: an independent witness.

Runs in ranks of its own; importing this module imports no megatron.
"""

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import AutoConfig, AutoModelForCausalLM, PretrainedConfig

_SIZES = {
    "vocab_size": 96,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "tie_word_embeddings": False,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
_EXPERTS = {"num_experts_per_tok": 2, "moe_intermediate_size": 48}
SPECIAL: dict[str, dict[str, Any]] = {
    "llama": {},
    "mistral": {"head_dim": 32},
    "qwen2": {"tie_word_embeddings": True},
    "qwen3": {"head_dim": 32, "tie_word_embeddings": True},
    "qwen3_moe": {**_EXPERTS, "head_dim": 32, "num_experts": 4, "norm_topk_prob": True, "mlp_only_layers": [0]},
    "deepseek_v3": {
        **_EXPERTS,
        "num_key_value_heads": 4,
        "q_lora_rank": 32,
        "kv_lora_rank": 32,
        "qk_rope_head_dim": 8,
        "qk_nope_head_dim": 16,
        "v_head_dim": 16,
        "n_routed_experts": 4,
        "n_shared_experts": 1,
        "first_k_dense_replace": 1,
        "n_group": 1,
        "topk_group": 1,
    },
    "gemma3_text": {
        "head_dim": 32,
        "tie_word_embeddings": True,
        "query_pre_attn_scalar": 32,
        "layer_types": ["sliding_attention", "full_attention"] * 2,
    },
    "gpt_oss": {
        "head_dim": 32,
        "num_local_experts": 4,
        "num_experts_per_tok": 2,
        "layer_types": ["sliding_attention", "full_attention"] * 2,
    },
}


def config_of(model_type: str, **overrides: Any) -> PretrainedConfig:
    return AutoConfig.for_model(model_type, **_SIZES | SPECIAL[model_type] | overrides)


def random_huggingface(config: PretrainedConfig, dtype: torch.dtype = torch.float32) -> Any:
    """A model in which no two values are equal by design: norms and biases are random too."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(3)
        model: Any = AutoModelForCausalLM.from_config(config, dtype=dtype, attn_implementation="eager")
        with torch.no_grad():
            for name, tensor in (*model.named_parameters(), *model.named_buffers()):
                if name.endswith("e_score_correction_bias"):
                    tensor.data = tensor.data.float()  # as in the hub's files, whatever the format of the weights
                if tensor.dim() == 1 and "inv_freq" not in name:
                    tensor.add_(0.1 * torch.randn_like(tensor))
                elif tensor.dim() > 1:
                    tensor.copy_(0.05 * torch.randn_like(tensor))
    return model.eval()


def save(model: nn.Module, folder: Path) -> Path:
    model.save_pretrained(folder)
    return folder


@contextlib.contextmanager
def parallel_state(rank: int, **sizes: int) -> Iterator[None]:
    """Megatron Core's groups, over the processes of the default group."""
    _pretend_cuda()
    from megatron.core import parallel_state as state
    from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed

    state.initialize_model_parallel(
        tensor_model_parallel_size=sizes.get("tp", 1),
        pipeline_model_parallel_size=sizes.get("pp", 1),
        virtual_pipeline_model_parallel_size=sizes.get("vpp"),
        expert_model_parallel_size=sizes.get("ep", 1),
        expert_tensor_parallel_size=sizes.get("etp", 1),
    )
    model_parallel_cuda_manual_seed(1, inference_rng_tracker=True)
    try:
        yield
    finally:
        state.destroy_model_parallel()


def chunks_of(config: PretrainedConfig, dtype: torch.dtype = torch.float32, vpp: int | None = None) -> list[Any]:
    """The virtual stages of this rank, their parameters not set."""
    from megatron.core import parallel_state as state
    from megatron.core.models.gpt import GPTModel
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_decoder_block_spec

    core = _core_config(config, dtype, vpp)
    chunks = []
    for stage in range(vpp or 1):
        vp_stage = stage if vpp else None
        spec = get_gpt_decoder_block_spec(
            core, use_transformer_engine=False, normalization="RMSNorm", vp_stage=vp_stage
        )
        _use_own_modules(spec, config)
        chunks.append(
            GPTModel(
                core,
                spec,
                vocab_size=config.vocab_size,
                max_sequence_length=64,
                pre_process=state.is_pipeline_first_stage(ignore_virtual=False, vp_stage=vp_stage),
                post_process=state.is_pipeline_last_stage(ignore_virtual=False, vp_stage=vp_stage),
                share_embeddings_and_output_weights=config.tie_word_embeddings,
                position_embedding_type="rope",
                rotary_base=int(config.rope_parameters.get("rope_theta", 10000)),
                vp_stage=vp_stage,
            )
        )
    for tensor in (tensor for chunk in chunks for tensor in (*chunk.parameters(), *chunk.buffers())):
        tensor.data.fill_(float("nan")) if tensor.is_floating_point() else None
    return chunks


def logits(chunk: Any, ids_BT: Tensor) -> Tensor:
    """`[B, T, V]` of a model in one piece."""
    T = ids_BT.shape[1]
    mask = torch.ones(T, T, dtype=torch.bool).triu(1)[None, None]
    positions = torch.arange(T)[None].expand_as(ids_BT)
    return chunk(ids_BT, positions, mask)


def _core_config(config: Any, dtype: torch.dtype, vpp: int | None) -> Any:
    from megatron.core import parallel_state as state
    from megatron.core.transformer.transformer_config import MLATransformerConfig, TransformerConfig

    kind = config.model_type
    values: dict[str, Any] = {
        "num_layers": config.num_hidden_layers,
        "hidden_size": config.hidden_size,
        "ffn_hidden_size": config.intermediate_size,
        "num_attention_heads": config.num_attention_heads,
        "num_query_groups": config.num_key_value_heads,
        "kv_channels": getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads,
        "normalization": "RMSNorm",
        "layernorm_epsilon": config.rms_norm_eps,
        "gated_linear_unit": True,
        "activation_func": F.silu,
        "add_bias_linear": kind == "gpt_oss",
        "add_qkv_bias": kind in ("qwen2", "gpt_oss"),
        "qk_layernorm": kind in ("qwen3", "qwen3_moe", "deepseek_v3", "gemma3_text"),
        "hidden_dropout": 0.0,
        "attention_dropout": 0.0,
        "bias_activation_fusion": False,
        "bias_dropout_fusion": False,
        "masked_softmax_fusion": False,
        "persist_layer_norm": False,
        "gradient_accumulation_fusion": False,
        "apply_rope_fusion": False,
        "use_cpu_initialization": True,
        "perform_initialization": False,
        "params_dtype": dtype,
        "pipeline_dtype": dtype,
        "transformer_impl": "local",
        "tensor_model_parallel_size": state.get_tensor_model_parallel_world_size(),
        "pipeline_model_parallel_size": state.get_pipeline_model_parallel_world_size(),
        "virtual_pipeline_model_parallel_size": vpp,
        "expert_model_parallel_size": state.get_expert_model_parallel_world_size(),
        "expert_tensor_parallel_size": state.get_expert_tensor_parallel_world_size(),
    }
    values["sequence_parallel"] = False
    if kind in ("qwen3_moe", "gpt_oss", "deepseek_v3"):
        values |= _expert_fields(config)
    if kind == "gpt_oss":
        values["softmax_type"] = "learnable"
    if kind != "deepseek_v3":
        return TransformerConfig(**values)
    del values["num_query_groups"]
    latent = {
        "multi_latent_attention": True,
        "q_lora_rank": config.q_lora_rank,
        "kv_lora_rank": config.kv_lora_rank,
        "qk_head_dim": config.qk_nope_head_dim,
        "qk_pos_emb_head_dim": config.qk_rope_head_dim,
        "v_head_dim": config.v_head_dim,
        "rope_type": "rope",
        "rotary_base": 10000,
    }
    return MLATransformerConfig(**values, **latent)


def _expert_fields(config: Any) -> dict[str, Any]:
    kind, layers = config.model_type, range(config.num_hidden_layers)
    num_experts = {"qwen3_moe": "num_experts", "gpt_oss": "num_local_experts", "deepseek_v3": "n_routed_experts"}
    fields: dict[str, Any] = {
        "num_moe_experts": getattr(config, num_experts[kind]),
        "moe_router_topk": config.num_experts_per_tok,
        "moe_ffn_hidden_size": getattr(config, "moe_intermediate_size", config.intermediate_size),
        "moe_router_load_balancing_type": "none",
        "moe_aux_loss_coeff": 0.0,
        "moe_token_dispatcher_type": "allgather",
        "moe_grouped_gemm": False,
        "moe_router_dtype": "fp32",
    }
    if kind == "qwen3_moe":
        fields["moe_layer_freq"] = [0 if number in config.mlp_only_layers else 1 for number in layers]
    if kind == "deepseek_v3":
        fields |= {
            "moe_layer_freq": [0 if number < config.first_k_dense_replace else 1 for number in layers],
            "moe_shared_expert_intermediate_size": config.moe_intermediate_size * config.n_shared_experts,
            "moe_router_score_function": "sigmoid",
            "moe_router_enable_expert_bias": True,
            "moe_router_topk_scaling_factor": config.routed_scaling_factor,
            "moe_router_pre_softmax": True,
        }
    return fields


class _Norm(nn.Module):
    def __init__(self, config: Any, hidden_size: int, eps: float = 1e-5, **rest: Any) -> None:
        super().__init__()
        self.eps = eps
        self.weight = nn.Parameter(torch.empty(hidden_size, dtype=config.params_dtype))

    def forward(self, x: Tensor) -> Tensor:
        scaled = x.float() * torch.rsqrt(x.float().pow(2).mean(-1, keepdim=True) + self.eps)
        return self.weight * scaled.to(x.dtype)


class _WholeLinear(nn.Module):
    def __init__(self, inputs: int, outputs: int, dtype: torch.dtype) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(outputs, inputs, dtype=dtype))

    def forward(self, x: Tensor) -> tuple[Tensor, None]:
        return F.linear(x, self.weight), None


def _use_own_modules(spec: Any, config: Any) -> None:
    """Norms in plain torch, MLA whose projections down are whole, attention with values of another width."""
    from megatron.core.transformer.identity_op import IdentityOp
    from megatron.core.transformer.module import MegatronModule
    from megatron.core.transformer.multi_latent_attention import MLASelfAttention
    from megatron.core.transformer.transformer_layer import TransformerLayer

    class Attention(MegatronModule):
        def __init__(self, config: Any, *args: Any, k_channels: int | None = None, **rest: Any) -> None:
            super().__init__(config=config)
            self.scale = (k_channels or config.kv_channels) ** -0.5
            if config.softmax_type == "learnable":
                heads = config.num_attention_heads // config.tensor_model_parallel_size
                self.softmax_offset = nn.Parameter(torch.empty(heads, dtype=config.params_dtype))

        def forward(self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor, **rest: Any) -> Tensor:
            times = q.shape[2] // k.shape[2]
            q, k, v = (x.permute(1, 2, 0, 3) for x in (q, k.repeat_interleave(times, 2), v.repeat_interleave(times, 2)))
            weights = (q @ k.mT * self.scale).masked_fill(mask, float("-inf")).softmax(-1)
            return (weights @ v).permute(2, 0, 1, 3).flatten(2)

    class LatentAttention(MLASelfAttention):
        def __init__(self, config: Any, *args: Any, **rest: Any) -> None:
            super().__init__(config, *args, **rest)
            hidden, dtype = config.hidden_size, config.params_dtype
            self.linear_q_down_proj = _WholeLinear(hidden, config.q_lora_rank, dtype)
            down = config.kv_lora_rank + config.qk_pos_emb_head_dim
            self.linear_kv_down_proj = _WholeLinear(hidden, down, dtype)

    class SandwichLayer(TransformerLayer):
        def __init__(self, config: Any, *args: Any, **rest: Any) -> None:
            super().__init__(config, *args, **rest)
            self.self_attention.linear_proj.post_layernorm = _Norm(config, config.hidden_size)
            self.mlp.linear_fc2.post_layernorm = _Norm(config, config.hidden_size)

    for layer in spec.layer_specs:
        parts, attention = layer.submodules, layer.submodules.self_attention
        parts.input_layernorm = parts.pre_mlp_layernorm = _Norm
        attention.submodules.core_attention = Attention
        if config.model_type == "deepseek_v3":
            attention.module = LatentAttention
        if config.model_type == "gemma3_text":
            layer.module = SandwichLayer
        for name in ("q_layernorm", "k_layernorm", "kv_layernorm"):
            if getattr(attention.submodules, name, IdentityOp) not in (None, IdentityOp):
                setattr(attention.submodules, name, _Norm)
    spec.layer_norm = _Norm


def _pretend_cuda() -> None:
    """What building and a plain forward pass of one process ask of CUDA."""

    class NoStream:
        def __getattr__(self, name: str) -> Any:
            return lambda *args, **kwargs: self

    stream = NoStream()
    cuda, tensor_class = cast(Any, torch.cuda), cast(Any, Tensor)
    tensor_class.cuda = lambda self, *args, **kwargs: self
    cuda.current_device = lambda: torch.device("cpu")
    cuda.current_stream = lambda *args: stream
    cuda.Stream = cuda.Event = lambda *args, **kwargs: stream
    cuda.stream = lambda stream: contextlib.nullcontext()
    import megatron.core.jit

    megatron.core.jit.disable_jit_fuser()
