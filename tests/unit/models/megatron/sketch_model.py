"""Small GPTModels with Hugging Face's weights, for tests of what runs them.

Stands in for `models.megatron.build` and `models.megatron.conversion`.
"""

import dataclasses
import math
import re
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from megatron.core import parallel_state as ps
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_decoder_block_spec
from megatron.core.transformer.identity_op import IdentityOp
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor


class PlainRMSNorm(torch.nn.Module):
    def __init__(self, config: Any, hidden_size: int, eps: float = 1e-5, **kw: Any) -> None:
        super().__init__()
        self.eps = eps
        self.weight = torch.nn.Parameter(torch.ones(hidden_size, dtype=config.params_dtype))
        self.weight.sequence_parallel = config.sequence_parallel

    def forward(self, x: Tensor) -> Tensor:
        wide = x.to(torch.promote_types(x.dtype, torch.float32))
        return self.weight * (wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + self.eps)).to(x.dtype)


class _GatherSeq(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: Any) -> Tensor:
        ctx.group = group
        out = [torch.empty_like(x) for _ in range(group.size())]
        dist.all_gather(out, x.contiguous(), group=group)
        return torch.stack(out, 0)

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> tuple[Any, ...]:
        g = g.contiguous()
        dist.all_reduce(g, group=ctx.group)
        return g[ctx.group.rank()], None


def zigzag(length: int, ranks: int, rank: int) -> Tensor:
    c = length // (2 * ranks)
    return torch.cat([torch.arange(rank * c, (rank + 1) * c), torch.arange(length - (rank + 1) * c, length - rank * c)])


class PortableAttention(MegatronModule):
    def __init__(
        self, config: Any, softmax_scale: Any = None, k_channels: Any = None, pg_collection: Any = None, **kw: Any
    ):
        super().__init__(config=config)
        self.cp = pg_collection.cp
        self.scale = softmax_scale or 1 / math.sqrt(config.kv_channels)

    def forward(self, query: Tensor, key: Tensor, value: Tensor, *args: Any, packed_seq_params: Any = None, **kw: Any):
        if packed_seq_params is None:
            out = self._attend(query, key, value)
            return out.reshape(out.shape[0], out.shape[1], -1)
        bounds, parts = packed_seq_params.cu_seqlens_q.tolist(), []
        for start, stop in zip(bounds, bounds[1:], strict=False):
            a, b = start // self.cp.size(), stop // self.cp.size()
            parts.append(self._attend(*(x[a:b, None] for x in (query, key, value)))[:, 0])
        return torch.cat(parts).flatten(1)

    def _attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        ranks, here = self.cp.size(), len(q)
        places = [zigzag(here * ranks, ranks, r) if ranks > 1 else torch.arange(here) for r in range(ranks)]
        if ranks > 1:
            k, v = (_GatherSeq.apply(x, self.cp).flatten(0, 1) for x in (k, v))
        hidden = places[self.cp.rank() if ranks > 1 else 0][:, None] < torch.cat(places)[None]
        q, k, v = (x.permute(1, 2, 0, 3) for x in (q, k, v))
        k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], 1) for x in (k, v))
        scores = (q @ k.transpose(-1, -2)) * self.scale
        return (scores.masked_fill(hidden, float("-inf")).softmax(-1) @ v).permute(2, 0, 1, 3)


def _spec(config: Any, vp_stage: int | None) -> Any:
    spec = get_gpt_decoder_block_spec(config, use_transformer_engine=False, normalization="RMSNorm", vp_stage=vp_stage)
    for layer in spec.layer_specs:
        parts = layer.submodules
        parts.input_layernorm = parts.pre_mlp_layernorm = PlainRMSNorm
        inner = parts.self_attention.submodules
        inner.core_attention = PortableAttention
        for name in ("q_layernorm", "k_layernorm"):
            if getattr(inner, name, None) not in (None, IdentityOp):
                setattr(inner, name, PlainRMSNorm)
    spec.layer_norm = PlainRMSNorm
    return spec


def _config(c: Any, options: Any, precision: torch.dtype) -> TransformerConfig:
    experts = getattr(c, "num_experts", 0) or 0
    fields: dict[str, Any] = {
        "num_layers": c.num_hidden_layers,
        "hidden_size": c.hidden_size,
        "ffn_hidden_size": c.intermediate_size,
        "num_attention_heads": c.num_attention_heads,
        "num_query_groups": c.num_key_value_heads,
        "kv_channels": getattr(c, "head_dim", None) or c.hidden_size // c.num_attention_heads,
        "normalization": "RMSNorm",
        "layernorm_epsilon": c.rms_norm_eps,
        "gated_linear_unit": True,
        "activation_func": F.silu,
        "add_bias_linear": False,
        "add_qkv_bias": c.model_type == "qwen2",
        "qk_layernorm": c.model_type in ("qwen3", "qwen3_moe"),
        "hidden_dropout": 0.0,
        "attention_dropout": 0.0,
        "persist_layer_norm": False,
        "bias_activation_fusion": False,
        "bias_dropout_fusion": False,
        "masked_softmax_fusion": False,
        "gradient_accumulation_fusion": False,
        "apply_rope_fusion": False,
        "use_cpu_initialization": True,
        "perform_initialization": False,
        "params_dtype": precision,
        "pipeline_dtype": precision,
        "bf16": precision is torch.bfloat16,
        "transformer_impl": "local",
        "tensor_model_parallel_size": options.tensor_model_parallel_size,
        "pipeline_model_parallel_size": options.pipeline_model_parallel_size,
        "virtual_pipeline_model_parallel_size": options.virtual_pipeline_model_parallel_size,
        "context_parallel_size": options.context_parallel_size,
        "sequence_parallel": options.sequence_parallel,
        "expert_model_parallel_size": options.expert_model_parallel_size,
    }
    if experts:
        fields |= {
            "num_moe_experts": experts,
            "moe_router_topk": c.num_experts_per_tok,
            "moe_ffn_hidden_size": c.moe_intermediate_size,
            "moe_router_load_balancing_type": options.moe_router_load_balancing_type,
            "moe_aux_loss_coeff": options.moe_aux_loss_coeff or 0.0,
            "moe_router_pre_softmax": False,
            "moe_token_dispatcher_type": options.moe_token_dispatcher_type,
            "moe_router_dtype": options.moe_router_dtype,
            "moe_router_score_function": "sigmoid" if options.moe_router_enable_expert_bias else "softmax",
            "moe_router_enable_expert_bias": bool(options.moe_router_enable_expert_bias),
            "expert_tensor_parallel_size": options.expert_tensor_parallel_size,
        }
    known = {field.name for field in dataclasses.fields(TransformerConfig)}
    return TransformerConfig(**{name: value for name, value in fields.items() if name in known})


def build_chunks(
    hf_config: Any, options: Any, *, precision: torch.dtype, device: torch.device, seed: int = 0
) -> list[GPTModel]:
    """As `models.megatron.build.build_chunks`."""
    config, virtual = _config(hf_config, options, precision), options.virtual_pipeline_model_parallel_size or 1
    rope = getattr(hf_config, "rope_parameters", None) or {}
    chunks = []
    for index in range(virtual):
        vp_stage = index if virtual > 1 else None
        model = GPTModel(
            config,
            _spec(config, vp_stage),
            vocab_size=hf_config.vocab_size,
            max_sequence_length=512,
            pre_process=ps.is_pipeline_first_stage(ignore_virtual=False, vp_stage=vp_stage),
            post_process=ps.is_pipeline_last_stage(ignore_virtual=False, vp_stage=vp_stage),
            parallel_output=True,
            share_embeddings_and_output_weights=hf_config.tie_word_embeddings,
            position_embedding_type="rope",
            rotary_base=int(rope.get("rope_theta", 10000)),
            vp_stage=vp_stage,
        )
        chunks.append(model.to(precision) if precision is torch.float64 else model)
    return chunks


def _in_megatron(c: Any, sd: dict[str, Tensor]) -> dict[str, Any]:
    """Whole tensors by their names in Megatron Core; `(gate, up)` for fc1."""
    heads, groups, width = c.num_attention_heads, c.num_key_value_heads, getattr(c, "head_dim", None)
    width = width or c.hidden_size // heads
    out: dict[str, Any] = {
        "embedding.word_embeddings.weight": sd["model.embed_tokens.weight"],
        "decoder.final_layernorm.weight": sd["model.norm.weight"],
        "output_layer.weight": sd.get("lm_head.weight", sd["model.embed_tokens.weight"]),
    }
    if "score.weight" in sd:
        out["output_layer.weight"] = sd["score.weight"]
    for number in range(c.num_hidden_layers):
        p, q = f"model.layers.{number}.", f"decoder.layers.{number}."
        out[q + "input_layernorm.weight"] = sd[p + "input_layernorm.weight"]
        out[q + "pre_mlp_layernorm.weight"] = sd[p + "post_attention_layernorm.weight"]
        a, b = p + "self_attn.", q + "self_attention."
        out[b + "linear_proj.weight"] = sd[a + "o_proj.weight"]
        for kind in ("weight", "bias"):
            if a + "q_proj." + kind in sd:
                parts = [sd[a + f"{x}_proj.{kind}"].unflatten(0, (groups, -1)) for x in "qkv"]
                out[b + "linear_qkv." + kind] = torch.cat(parts, 1).flatten(0, 1)
        for x in "qk":
            if a + f"{x}_norm.weight" in sd:
                out[b + f"{x}_layernorm.weight"] = sd[a + f"{x}_norm.weight"]
        m, w = p + "mlp.", q + "mlp."
        if m + "gate_proj.weight" in sd:
            out[w + "linear_fc1.weight"] = (sd[m + "gate_proj.weight"], sd[m + "up_proj.weight"])
            out[w + "linear_fc2.weight"] = sd[m + "down_proj.weight"]
            continue
        out[w + "router.weight"] = sd[m + "gate.weight"]
        for expert, (gate_up, down) in enumerate(
            zip(sd[m + "experts.gate_up_proj"], sd[m + "experts.down_proj"], strict=True)
        ):
            out[w + f"experts.{expert}.linear_fc1.weight"] = tuple(gate_up.chunk(2, 0))
            out[w + f"experts.{expert}.linear_fc2.weight"] = down
    return out


def global_name(name: str, model: Any) -> str:
    """The name of a parameter in the whole model."""
    layers = {i: layer.layer_number - 1 for i, layer in enumerate(model.decoder.layers)}
    name = re.sub(r"decoder\.layers\.(\d+)\.", lambda m: f"decoder.layers.{layers[int(m.group(1))]}.", name)
    first = ps.get_expert_model_parallel_rank() * (
        (model.config.num_moe_experts or 0) // ps.get_expert_model_parallel_world_size()
    )
    return re.sub(r"local_experts\.(\d+)\.", lambda m: f"{first + int(m.group(1))}.", name)


def own_part(name: str, parameter: Tensor, whole: dict[str, Any]) -> Tensor:
    """This rank's part of a whole tensor."""
    expert = ".experts." in name
    ranks = ps.get_expert_tensor_parallel_world_size() if expert else ps.get_tensor_model_parallel_world_size()
    rank = ps.get_expert_tensor_parallel_rank() if expert else ps.get_tensor_model_parallel_rank()
    divided = ranks > 1 and getattr(parameter, "tensor_model_parallel", False)

    def part(tensor: Tensor) -> Tensor:
        return tensor.chunk(ranks, parameter.partition_dim)[rank] if divided else tensor

    found = whole[name]
    return torch.cat([part(x) for x in found]) if isinstance(found, tuple) else part(found)


@torch.no_grad()
def load_weights(chunks: list[Any], hf: Any) -> None:
    """Hugging Face's weights into this rank's chunks, wrapped or not."""
    whole = _in_megatron(hf.config, hf.state_dict())
    for name, parameter, expected in expected_weights(chunks, whole):
        assert parameter.shape == expected.shape, (name, parameter.shape, expected.shape)
        parameter.copy_(expected)


def expected_weights(chunks: list[Any], whole: dict[str, Any]) -> list[tuple[str, Tensor, Tensor]]:
    models = [getattr(chunk, "module", chunk) for chunk in chunks]
    return [
        (global_name(name, model), parameter, own_part(global_name(name, model), parameter, whole))
        for model in models
        for name, parameter in model.named_parameters()
    ]


@torch.no_grad()
def largest_difference(chunks: list[Any], hf: Any) -> float:
    """Between this rank's weights and Hugging Face's."""
    whole = _in_megatron(hf.config, hf.state_dict())
    return max((p.double() - e.double()).abs().max().item() for _, p, e in expected_weights(chunks, whole))


@torch.no_grad()
def largest_gradient_difference(chunks: list[Any], hf: Any) -> float:
    """Between this rank's summed gradients and Hugging Face's, by the largest gradient of each tensor."""
    gradients = {name: parameter.grad for name, parameter in hf.named_parameters()}
    whole = _in_megatron(hf.config, gradients)
    worst = 0.0
    for _, parameter, expected in expected_weights(chunks, whole):
        error = (parameter.main_grad.double() - expected.double()).abs().max()
        worst = max(worst, (error / expected.double().abs().max().clamp(min=1e-12)).item())
    return worst
