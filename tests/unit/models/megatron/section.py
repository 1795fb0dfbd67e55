"""The section `policy.megatron_cfg` with settings for small runs on CPUs."""

from types import SimpleNamespace
from typing import Any


def megatron_section(**values: Any) -> Any:
    """Keys of the section; `optimizer`, `scheduler` and `distributed_data_parallel_config` may be changed in part."""
    parts: dict[str, dict[str, Any]] = {
        "optimizer": {
            "optimizer": "adam",
            "lr": 1e-3,
            "min_lr": 0.0,
            "weight_decay": 0.1,
            "adam_beta1": 0.9,
            "adam_beta2": 0.999,
            "adam_eps": 1e-5,
            "sgd_momentum": 0.9,
            "use_distributed_optimizer": False,
            "use_precision_aware_optimizer": True,
            "clip_grad": 1.0,
        },
        "scheduler": {
            "lr_decay_style": "constant",
            "lr_decay_iters": None,
            "lr_warmup_iters": 0,
            "lr_warmup_init": 0.0,
            "start_weight_decay": 0.1,
            "end_weight_decay": 0.1,
            "weight_decay_incr_style": "constant",
        },
        "peft": {"enabled": False},
        "distributed_data_parallel_config": {
            "grad_reduce_in_fp32": False,
            "overlap_grad_reduce": False,
            "overlap_param_gather": False,
        },
    }
    flat: dict[str, Any] = {
        "tensor_model_parallel_size": 1,
        "pipeline_model_parallel_size": 1,
        "virtual_pipeline_model_parallel_size": None,
        "context_parallel_size": 1,
        "expert_model_parallel_size": 1,
        "expert_tensor_parallel_size": 1,
        "sequence_parallel": False,
        "freeze_moe_router": False,
        "moe_router_dtype": "fp64",
        "moe_router_load_balancing_type": "none",
        "moe_aux_loss_coeff": None,
        "moe_router_enable_expert_bias": None,
        "moe_router_bias_update_rate": 0.0,
        "moe_token_dispatcher_type": "alltoall",
        "empty_unused_memory_level": 1,
    }
    made = {name: SimpleNamespace(**{**part, **values.pop(name, {})}) for name, part in parts.items()}
    return SimpleNamespace(**made, **{**flat, **values})
