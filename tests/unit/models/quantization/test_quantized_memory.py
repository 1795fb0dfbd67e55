"""The forecast of an engine's weights in float8 against the tensors that a sync sends."""

from math import prod

import pytest
import torch
from architectures import random_model

from nemo_rl.config import PolicyConfig
from nemo_rl.models.capacity.memory import engine_memory
from nemo_rl.models.dtensor.checkpoints.model_files import weights_by_name
from nemo_rl.models.huggingface.checkpoint_names import in_checkpoint
from nemo_rl.models.quantization import FP8_WEIGHTS, MXFP8, BlockFormat, WeightQuantization


@pytest.mark.parametrize("block_format", [FP8_WEIGHTS, MXFP8], ids=["128 x 128", "MXFP8"])
@pytest.mark.parametrize("arch", ["qwen3", "qwen3_moe", "deepseek_v3"])
def test_weights_take_the_bytes_of_the_tensors_that_are_sent(arch: str, block_format: BlockFormat) -> None:
    wide = {} if arch == "qwen3" else {"moe_intermediate_size": 128}  # whole blocks of gate and of up
    model = random_model(arch, tie_word_embeddings=False, **wide)
    layers = model.config.num_hidden_layers
    quantization = WeightQuantization(block_format, layers, last_layers=1, ignored=("k_proj",))
    tensors = in_checkpoint(model, weights_by_name(model).items())
    sent = [
        prod(shape) * getattr(torch, dtype).itemsize
        for name, tensor in tensors
        for _, dtype, shape in quantization.described(name, "bfloat16", tuple(tensor.shape))
        if not name.endswith("e_score_correction_bias")  # a buffer
    ]
    generation = PolicyConfig.build(model_name="m", generation={"max_new_tokens": 8}).generation
    assert generation is not None
    assert engine_memory(model.config, generation, 2, quantization).weights == sum(sent)
    whole = 2 * sum(parameter.numel() for parameter in model.parameters())
    assert engine_memory(model.config, generation, 2).weights == whole
    assert sum(sent) < whole


def test_simulated_weights_keep_their_size() -> None:
    model = random_model("qwen3_moe")
    quantization = WeightQuantization(FP8_WEIGHTS, 2, simulated=True)
    generation = PolicyConfig.build(model_name="m", generation={"max_new_tokens": 8}).generation
    assert generation is not None
    found = engine_memory(model.config, generation, 4, quantization).weights
    assert found == 4 * sum(parameter.numel() for parameter in model.parameters())
