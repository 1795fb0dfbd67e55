"""Build the GPTModels of one rank, one for each virtual pipeline stage.

`families` provides the fields that the architecture determines, the section `policy.megatron_cfg` the user's choices,
and Megatron Core's parallel state this rank's part of the model. Invariant: settings of fusions and kernels that are
not installed are ignored, so that a section works with and without Transformer Engine. An option that changes numeric
results is never ignored.
"""

import dataclasses
from functools import partial
from importlib.util import find_spec
from typing import Any

import torch
import torch.nn.functional as F
from megatron.core import parallel_state
from megatron.core.models.gpt import GPTModel
from megatron.core.transformer.attention import Attention
from megatron.core.transformer.enums import AttnBackend
from megatron.core.transformer.transformer_config import MLATransformerConfig, TransformerConfig
from torch import Tensor, nn
from transformers import PretrainedConfig

from nemo_rl.config import report_findings
from nemo_rl.config.schema.model.megatron import MegatronConfig
from nemo_rl.models.megatron.model.families import Family, Rotary, family_of
from nemo_rl.models.megatron.model.layer_spec import HAVE_TE, choose_spec, mtp_spec
from nemo_rl.models.megatron.model.layers import set_latent_eps
from nemo_rl.models.megatron.model.model_check import check_overrides
from nemo_rl.models.megatron.model.mtp import MTPModel
from nemo_rl.models.megatron.release import FUSED_GRADIENTS, MISSING_FUSED_GRADIENTS
from nemo_rl.models.megatron.routers import routers
from nemo_rl.utils.errors import ConfigError


def require_packed_attention(chosen: str | None, capability: tuple[int, int], *, has_flash_attn: bool) -> None:
    """Refuse packed rows on a GPU without an attention kernel of Transformer Engine for them.

    Its fused kernels (cuDNN) support packed rows from compute capability 9.0 on, but not on 12.x. Its unfused kernels
    do not support packed rows. FlashAttention 2 supports packed rows from compute capability 8.0 on.

    Args:
        chosen: `policy.megatron_cfg.attention_backend`.
        has_flash_attn: whether the package flash-attn can be imported.

    Raises:
        ConfigError: no installed and permitted kernel supports packed rows.
    """
    able = {"fused": capability >= (9, 0) and capability[0] != 12, "flash": has_flash_attn and capability >= (8, 0)}
    wanted = [chosen] if chosen in ("fused", "flash", "unfused") else [*able]
    if chosen == "local" or any(able.get(each, False) for each in wanted):
        return
    number = ".".join(map(str, capability))
    raise ConfigError(
        f"policy.sequence_packing.enabled=true, but on GPUs of compute capability {number} Transformer Engine has no "
        f"attention kernel for packed rows (policy.megatron_cfg.attention_backend={chosen or 'null'}). Install "
        "flash-attn (uv sync --extra flash-attn) and leave attention_backend out, or set "
        "policy.sequence_packing.enabled=false."
    )


def uses_transformer_engine(options: MegatronConfig, device: torch.device) -> bool:
    """Return whether the model is built from Transformer Engine's layers."""
    return device.type == "cuda" and HAVE_TE and options.transformer_impl != "local"


def build_chunks(
    hf_config: PretrainedConfig,
    options: MegatronConfig,
    *,
    precision: torch.dtype,
    device: torch.device,
    seed: int = 0,
    trains: bool = True,
) -> list[GPTModel]:
    """Build this rank's part of the model, after Megatron Core's parallel state is initialized.

    Args:
        options: the section `policy.megatron_cfg`.
        precision: dtype of the weights.
        device: device of the weights. A GPU must be the current one.
        seed: seed of the weights. They are initialized if `model_overrides.perform_initialization` is set.
        trains: whether to refuse options that lead to wrong gradients.

    Returns:
        One unwrapped model for each virtual stage, in order.

    Raises:
        ConfigError: Megatron Core cannot express the model, or refuses the combination of options.
    """
    family = family_of(hf_config)
    config = transformer_config(family, hf_config, options, precision, device)
    if trains:
        _refuse_wrong_gradients(config)
    virtual = parallel_state.get_virtual_pipeline_model_parallel_world_size()
    stages = [None] if virtual is None else range(virtual)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        chunks = [
            _build(family, hf_config, config, stage, separate_norms=options.peft.enabled).to(device) for stage in stages
        ]
    frozen = routers(chunks, with_mtp=True) if options.freeze_moe_router else []
    if not options.mtp_loss_scaling_factor:
        frozen += [chunk.mtp for chunk in chunks if chunk.mtp_process]
    for module in frozen:
        module.requires_grad_(False)
    return chunks


def unwrap(chunk: nn.Module) -> GPTModel:
    """Return the model inside Megatron Core's wrappers, such as its DistributedDataParallel."""
    inner: Any = chunk
    while not isinstance(inner, GPTModel):
        inner = inner.module
    return inner


def transformer_config(
    family: Family, hf_config: PretrainedConfig, options: MegatronConfig, precision: torch.dtype, device: torch.device
) -> TransformerConfig:
    """Build Megatron Core's configuration of a model (`build_chunks`)."""
    fields = family.transformer_fields(hf_config)
    fields |= _sharding(options) | _precision(precision) | _recomputation(options)
    if "num_moe_experts" in fields:
        fields |= _routing(hf_config, options)
    fields |= _kernels(options, device, fields, family.rotary(hf_config))
    fields |= _float8(options, fields["transformer_impl"]) | _further_layers(options)
    kind = MLATransformerConfig if fields.get("multi_latent_attention") else TransformerConfig
    fields |= _checked_overrides(options.model_overrides, kind)
    try:
        return kind(**fields)
    except (ValueError, AssertionError) as error:
        raise ConfigError(f"Megatron Core refuses policy.megatron_cfg for this model: {error}") from error


def _sharding(options: MegatronConfig) -> dict[str, Any]:
    """Return the fields of the mesh: the sizes of the parallel state, and options of communication."""
    tp = parallel_state.get_tensor_model_parallel_world_size()
    pp = parallel_state.get_pipeline_model_parallel_world_size()
    virtual = parallel_state.get_virtual_pipeline_model_parallel_world_size()
    return {
        "tensor_model_parallel_size": tp,
        "sequence_parallel": options.sequence_parallel and tp > 1,
        "pipeline_model_parallel_size": pp,
        "virtual_pipeline_model_parallel_size": virtual,
        "num_layers_in_first_pipeline_stage": options.num_layers_in_first_pipeline_stage,
        "num_layers_in_last_pipeline_stage": options.num_layers_in_last_pipeline_stage,
        "context_parallel_size": parallel_state.get_context_parallel_world_size(),
        "expert_model_parallel_size": parallel_state.get_expert_model_parallel_world_size(),
        "expert_tensor_parallel_size": parallel_state.get_expert_tensor_parallel_world_size(),
        "variable_seq_lengths": pp > 1,  # the allgather dispatcher does not accept True
        # # Megatron Core's default dispatcher does not accept variable lengths, even for a model without experts.
        "moe_token_dispatcher_type": "alltoall",
        # # Batched messages are matched by their order. With two interleaved stages, the previous and the next stage
        # are the same rank, so a rank could mistake hidden states for gradients.
        "batch_p2p_comm": False,
    }


def _precision(precision: torch.dtype) -> dict[str, Any]:
    return {
        "params_dtype": precision,
        "pipeline_dtype": precision,
        "bf16": precision is torch.bfloat16,
        "fp16": precision is torch.float16,
        "attention_softmax_in_fp32": True,
        "calculate_per_token_loss": True,  # losses are already divided by global counts
    }


def _recomputation(options: MegatronConfig) -> dict[str, Any]:
    if not options.activation_checkpointing:
        return {}
    if options.recompute_granularity == "selective":
        return {"recompute_granularity": "selective", "recompute_modules": options.recompute_modules}
    return {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}


def _kernels(
    options: MegatronConfig, device: torch.device, fields: dict[str, Any], rotary: Rotary | None
) -> dict[str, Any]:
    """Return the fields of fused kernels that are installed and configured, and of the initialization."""
    on_gpu = device.type == "cuda"
    engine = uses_transformer_engine(options, device)
    if options.transformer_impl == "transformer_engine" and not engine:
        raise ConfigError(
            "policy.megatron_cfg.transformer_impl=transformer_engine needs a GPU and the package transformer-engine. "
            "Install it (uv sync --extra transformer-engine), or leave the key out for the layers that need neither."
        )
    # # Transformer Engine's fused rotation supports no factor on sine and cosine. The rotation of latent attention
    # supports only YaRN.
    fused_rotary = fields.get("rope_type") == "yarn" if rotary is None else rotary.scaling == 1.0
    kernels = {
        "transformer_impl": "transformer_engine" if engine else "local",
        "apply_rope_fusion": engine and options.apply_rope_fusion and fused_rotary,
        "bias_activation_fusion": on_gpu and options.bias_activation_fusion and fields["activation_func"] is F.silu,
        "bias_dropout_fusion": on_gpu,
        "gradient_accumulation_fusion": bool(engine and options.gradient_accumulation_fusion)
        and _has_fused_gradients(),
        "use_cpu_initialization": not on_gpu,
        "perform_initialization": False,
    }
    if "num_moe_experts" in fields:
        kernels["moe_permute_fusion"] = engine and options.moe_permute_fusion
        kernels["moe_grouped_gemm"] = engine and options.moe_grouped_gemm is not False
    if options.attention_backend is not None:
        kernels["attention_backend"] = AttnBackend[options.attention_backend]
    return kernels


def _float8(options: MegatronConfig, layers: str) -> dict[str, Any]:
    """Return the fields of training in float8."""
    asked = options.fp8_cfg
    if not asked.enabled:
        return {}
    if layers != "transformer_engine":
        raise ConfigError(
            "policy.megatron_cfg.fp8_cfg.enabled=true needs a GPU and the package transformer-engine. Install it "
            "(uv sync --extra transformer-engine), or set it to false."
        )
    return {"fp8": asked.fp8, "fp8_recipe": asked.fp8_recipe, "fp8_param": asked.fp8_param}


def _further_layers(options: MegatronConfig) -> dict[str, Any]:
    """Return the fields of multi-token prediction."""
    if not options.mtp_num_layers:
        return {}
    return {
        "mtp_num_layers": options.mtp_num_layers,
        "mtp_use_repeated_layer": options.mtp_use_repeated_layer,
        "mtp_detach_heads": options.mtp_detach_heads,
        "mtp_loss_scaling_factor": options.mtp_loss_scaling_factor,
    }


def _has_fused_gradients() -> bool:
    """Return True if APEX's extension for fused gradients is installed. Otherwise raise an error."""
    if find_spec(FUSED_GRADIENTS) is None:
        raise ConfigError(MISSING_FUSED_GRADIENTS.format(keys="policy.megatron_cfg"))
    return True


def _routing(hf_config: PretrainedConfig, options: MegatronConfig) -> dict[str, Any]:
    """Return the configured routing fields. For other fields, the family's or Megatron Core's value is used."""
    coefficient = options.moe_aux_loss_coeff
    asked = {
        "moe_router_dtype": options.moe_router_dtype,
        "moe_router_load_balancing_type": options.moe_router_load_balancing_type,
        "moe_aux_loss_coeff": getattr(hf_config, "router_aux_loss_coef", None) if coefficient is None else coefficient,
        "moe_router_bias_update_rate": options.moe_router_bias_update_rate,
        "moe_router_enable_expert_bias": options.moe_router_enable_expert_bias,
        "moe_router_num_groups": options.moe_router_num_groups,
        "moe_router_group_topk": options.moe_router_group_topk,
        "moe_token_dispatcher_type": options.moe_token_dispatcher_type,
        "moe_shared_expert_overlap": options.moe_shared_expert_overlap,
    }
    return {field: value for field, value in asked.items() if value is not None}


def _checked_overrides(overrides: dict[str, Any], kind: type[TransformerConfig]) -> dict[str, Any]:
    known = [field.name for field in dataclasses.fields(kind)]
    report_findings(check_overrides("policy.megatron_cfg", overrides, known, kind.__name__))
    return overrides


def _refuse_wrong_gradients(config: TransformerConfig) -> None:
    """Refuse options that Megatron Core would silently train with wrong gradients."""
    tp = config.tensor_model_parallel_size
    if config.multi_latent_attention and tp > 1 and not config.sequence_parallel:
        raise ConfigError(
            f"latent attention with tensor_model_parallel_size={tp} needs policy.megatron_cfg.sequence_parallel=true: "
            "without it the gradients of its down projections and of its norms are wrong."
        )


def _build(
    family: Family,
    hf_config: PretrainedConfig,
    config: TransformerConfig,
    stage: int | None,
    *,
    separate_norms: bool,
) -> GPTModel:
    """Build the model of one stage."""
    kind = MTPModel if config.mtp_num_layers else GPTModel
    hybrid = family.hybrid(hf_config)
    layers = choose_spec(config, family.traits, stage, hybrid=hybrid, separate_norms=separate_norms)
    model = kind(
        config,
        layers,
        mtp_block_spec=mtp_spec(config, family.traits, layers, stage, hybrid=hybrid is not None),
        pre_process=parallel_state.is_pipeline_first_stage(ignore_virtual=False, vp_stage=stage),
        post_process=parallel_state.is_pipeline_last_stage(ignore_virtual=False, vp_stage=stage),
        parallel_output=True,
        vp_stage=stage,
        **family.model_arguments(hf_config),
    )
    rotary, scale = family.rotary(hf_config), family.embedding_scale(hf_config)
    if rotary is not None:
        _set_rotary(model, rotary)
    if family.traits.latent_eps is not None:
        set_latent_eps(model, family.traits.latent_eps)
    _reduce_experts_once(model)
    if scale is not None and model.pre_process:
        # # The factor is rounded as in transformers, which multiplies by a tensor of the weights' dtype.
        rounded = torch.tensor(scale).to(config.params_dtype).item()
        model.embedding.register_forward_hook(partial(_scaled, rounded))
    return model


def _set_rotary(model: GPTModel, rotary: Rotary) -> None:
    model.rotary_pos_emb.inv_freq = rotary.frequencies.to(model.rotary_pos_emb.inv_freq.device)
    for module in model.modules():
        if isinstance(module, Attention):
            module._yarn_concentration_factor = rotary.scaling


def _reduce_experts_once(model: GPTModel) -> None:
    """Exclude gradients of experts from the sum over tensor-parallel ranks in sequence parallelism.

    Megatron Core marks the biases of experts for this sum, although their gradients are already summed over the ranks
    of the same experts.
    """
    for name, parameter in model.named_parameters():
        if ".mlp.experts." in name:
            parameter.sequence_parallel = False


def _scaled(factor: float, module: nn.Module, inputs: tuple[Any, ...], output: Tensor) -> Tensor:
    return output * factor
