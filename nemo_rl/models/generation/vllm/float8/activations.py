"""Round the inputs of vLLM's linear layers to float8 on CPUs, where vLLM's kernels do not.

On GPUs the kernels quantize the inputs of float8 products, in blocks of 1 x 128 values (DeepSeek-V3). These functions
run inside vLLM's worker. Experts are computed in one kernel, so their inputs stay as they are.
"""

from functools import partial
from typing import Any

from torch import Tensor, nn
from vllm.model_executor.layers.linear import LinearBase

from nemo_rl.models.quantization.blocks import BlockFormat, rounded
from nemo_rl.models.quantization.weights import WeightQuantization


def round_activations(worker: Any, quantization: WeightQuantization) -> int:
    """Round the inputs of all linear layers with quantized weights from now on; return their number."""
    model: nn.Module = worker.model_runner.get_model()
    found = 0
    for name, module in model.named_modules():
        if isinstance(module, LinearBase) and quantization.takes(f"{name}.weight", (1, 1)):
            module.register_forward_pre_hook(partial(_rounded_input, quantization.activation_format))
            found += 1
    return found


def _rounded_input(block_format: BlockFormat, module: nn.Module, inputs: tuple[Any, ...]) -> tuple[Any, ...]:
    values: Tensor = inputs[0]
    flat = values.reshape(-1, values.shape[-1])
    return rounded(flat, block_format).view_as(values), *inputs[1:]
