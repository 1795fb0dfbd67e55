"""Read from the configuration which weights the engines of a run get in float8."""

from nemo_rl.config import ClusterConfig, PolicyConfig
from nemo_rl.models.huggingface.load import load_model_config
from nemo_rl.models.quantization.blocks import FP8_WEIGHTS, MXFP8, BlockFormat
from nemo_rl.models.quantization.weights import WeightQuantization

FP8 = "fp8"
SIMULATED = (
    "policy.generation.vllm_cfg.precision=fp8 on CPUs: weights are rounded to float8 at each sync, and the engines "
    "compute with the rounded values in policy.precision. Activations are not rounded, as they are on GPUs."
)


def weight_quantization(policy: PolicyConfig, cluster: ClusterConfig) -> WeightQuantization | None:
    """Return how the weights of engines are quantized; None if `policy.generation` does not ask for float8.

    vLLM's CPU build multiplies float8 matrices only on processors with AMX, so on CPUs float8 is simulated.
    """
    generation = policy.generation
    if generation is None or generation.engine.precision != FP8:
        return None
    wanted = generation.vllm_cfg
    model = load_model_config(policy.model_name, policy.hf_config_overrides).get_text_config()
    return WeightQuantization(
        block_format=_block_format(is_mx=wanted.is_mx, powers_of_two=wanted.pow2_weight_scaling_factors),
        num_layers=model.num_hidden_layers,
        first_layers=wanted.num_first_layers_in_bf16,
        last_layers=wanted.num_last_layers_in_bf16,
        ignored=tuple(wanted.quantization_ignored_layer_kws),
        simulated=not cluster.uses_gpu,
    )


def _block_format(*, is_mx: bool, powers_of_two: bool) -> BlockFormat:
    if is_mx:
        return MXFP8
    return BlockFormat(FP8_WEIGHTS.rows, FP8_WEIGHTS.columns, "power_of_two") if powers_of_two else FP8_WEIGHTS
