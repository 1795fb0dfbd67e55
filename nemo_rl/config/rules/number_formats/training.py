"""Checks `policy.megatron_cfg.fp8_cfg`, and tells which row lengths its kernels accept."""

from nemo_rl.config.rules.broken_rules import Findings
from nemo_rl.config.schema.cluster import ClusterConfig
from nemo_rl.config.schema.model.policy import PolicyConfig

_TOKENS = {"tensorwise": 16, "delayed": 16, "mxfp8": 32, "blockwise": 128}
"""Tokens of which a matrix product in each recipe takes a multiple: dimensions of float8 products are multiples of 16,
and whole blocks where a scale belongs to one."""


def fp8_row_multiple(policy: PolicyConfig) -> int:
    """Return the tokens of which each rank's part of a row has to be a multiple; 1 without training in float8."""
    megatron = policy.megatron_cfg
    return _TOKENS[megatron.fp8_cfg.fp8_recipe] if megatron.enabled and megatron.fp8_cfg.enabled else 1


def check_fp8_training(section: str, policy: PolicyConfig, cluster: ClusterConfig) -> Findings:
    """Check that training in float8 has devices and layers that can compute it.

    Args:
        section: name of the model's section.
        policy: the section.
        cluster: cluster where the model is trained.
    """
    megatron = policy.megatron_cfg
    if not (megatron.enabled and megatron.fp8_cfg.enabled):
        return
    keys = f"{section}.megatron_cfg"
    if not cluster.uses_gpu:
        yield (
            f"{keys}.fp8_cfg.enabled=true needs NVIDIA GPUs and the package transformer-engine; on CPUs the layers "
            f"would silently compute in {section}.precision. Set {keys}.fp8_cfg.enabled=false, and keep fp8 for "
            "machines with GPUs."
        )
    if megatron.transformer_impl == "local":
        yield (
            f"{keys}.fp8_cfg.enabled=true needs the layers of Transformer Engine, and {keys}.transformer_impl=local "
            "uses PyTorch's. Leave transformer_impl out."
        )
    if policy.precision != "bfloat16":
        yield (
            f"{keys}.fp8_cfg.enabled=true with {section}.precision={policy.precision}: everything but the float8 "
            f"products is computed in bfloat16. Set {section}.precision=bfloat16."
        )
