"""Read from the configuration which weights the engines of a run get in float8."""

from dataclasses import replace

from nemo_rl.config import ClusterConfig, PolicyConfig
from nemo_rl.models.draft.names import PREFIX
from nemo_rl.models.huggingface.load import load_model_config
from nemo_rl.models.quantization.blocks import FP8_ACTIVATIONS, FP8_WEIGHTS, MXFP8, BlockFormat
from nemo_rl.models.quantization.weights import WeightQuantization

FP8 = "fp8"
SIMULATED = (
    "policy.generation.vllm_cfg.precision=fp8 on CPUs is simulated: weights are rounded to float8 at each sync, and in "
    "vLLM the inputs of their layers too. All is computed in policy.precision, which takes longer than without fp8."
)


def weight_quantization(policy: PolicyConfig, cluster: ClusterConfig) -> WeightQuantization | None:
    """Return how the weights of engines are quantized; None if `policy.generation` does not ask for float8.

    vLLM's CPU build multiplies float8 matrices only on processors with AMX, so on CPUs float8 is simulated.
    """
    generation = policy.generation
    if generation is None or generation.engine.precision != FP8:
        return None
    wanted = generation.vllm_cfg
    weights, activations = MXFP8, MXFP8
    if not wanted.is_mx:
        weights = _with_scales(FP8_WEIGHTS, wanted.pow2_weight_scaling_factors)
        activations = _with_scales(FP8_ACTIVATIONS, wanted.pow2_activation_scaling_factors)
    model = load_model_config(policy.model_name, policy.hf_config_overrides).get_text_config()
    return WeightQuantization(
        block_format=weights,
        num_layers=model.num_hidden_layers,
        first_layers=wanted.num_first_layers_in_bf16,
        last_layers=wanted.num_last_layers_in_bf16,
        ignored=(*wanted.quantization_ignored_layer_kws, *((PREFIX,) if policy.draft.enabled else ())),
        activation_format=activations,
        simulated=not cluster.uses_gpu,
    )


def _with_scales(block_format: BlockFormat, powers_of_two: bool) -> BlockFormat:
    return replace(block_format, scales="power_of_two") if powers_of_two else block_format
