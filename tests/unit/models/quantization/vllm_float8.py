"""Run in a process of its own: what vLLM says about float8 tensors, and how its CPU engine computes; prints JSON.

The arguments are the folder of a model with float8 layers, and the file for the meeting of one process.
"""

import json
import sys
from dataclasses import replace
from types import SimpleNamespace
from typing import Any
from unittest.mock import MagicMock

import torch
from vllm.config import set_current_vllm_config
from vllm.distributed import init_distributed_environment, initialize_model_parallel
from vllm.engine.arg_utils import EngineArgs
from vllm.model_executor.layers.quantization import modelopt
from vllm.model_executor.layers.quantization.utils.mxfp8_utils import _mxfp8_e4m3_quantize_torch
from vllm.model_executor.model_loader.utils import initialize_model
from vllm.utils.deep_gemm import per_block_cast_to_fp8

from nemo_rl.models.generation.interfaces import EngineSettings, GenerationRequest, SamplingParams
from nemo_rl.models.generation.stepped import Finished
from nemo_rl.models.generation.vllm.arguments import quantization_config, unquantized_layers
from nemo_rl.models.generation.vllm.cpu_build import round_activations
from nemo_rl.models.generation.vllm.engine import VllmEngine
from nemo_rl.models.generation.vllm.running_model import without_cache_scales
from nemo_rl.models.huggingface.load import load_causal_lm, load_model_config
from nemo_rl.models.quantization import (
    FP8_ACTIVATIONS,
    FP8_WEIGHTS,
    MXFP8,
    BlockFormat,
    Quantized,
    WeightQuantization,
    dequantize,
    quantize,
    rounded,
)

POWERS = BlockFormat(128, 128, "power_of_two")
NO_KERNEL = MagicMock(**{"input_quant_key.return_value": None})
"""In place of a kernel for MXFP8, of which the CPU build has none."""


def equal(got: Quantized, want: tuple[torch.Tensor, torch.Tensor]) -> bool:
    """Return whether values and scales are the same, bit for bit."""
    values, scales = want
    return got.values.view(torch.uint8).equal(values.view(torch.uint8)) and got.scales.equal(scales)


def quantizers() -> dict[str, bool]:
    """Compare quantized matrices with those of vLLM's own functions; blocks do not divide the first one."""
    found = {}
    for shape in ((300, 200), (256, 384)):
        for dtype in (torch.float32, torch.bfloat16):
            matrix = (torch.randn(shape, generator=torch.Generator().manual_seed(1)) * 0.02).to(dtype)
            name = f"{shape} {dtype}"
            found[f"exact {name}"] = equal(quantize(matrix, FP8_WEIGHTS), per_block_cast_to_fp8(matrix))
            powers = per_block_cast_to_fp8(matrix, use_ue8m0=True)
            found[f"powers {name}"] = equal(quantize(matrix, POWERS), powers)
            if shape[1] % 32 == 0:
                found[f"mx {name}"] = equal(quantize(matrix, MXFP8), _mxfp8_e4m3_quantize_torch(matrix))
    return found


def loaded(folder: str, meeting: str, block_format: BlockFormat) -> dict[str, Any]:
    """Load sent tensors with vLLM's loaders; return the largest relative error of each weight, and its dtype.

    vLLM's CPU build wants a kernel with AMX when it makes a float8 layer, so the processor is said to have it, and
    it has no kernel for MXFP8, so none is made; nothing is computed.
    """
    config, model = load_model_config(folder), load_causal_lm(folder)
    quantization = WeightQuantization(block_format, config.num_hidden_layers, last_layers=1)
    described = quantization_config(quantization, unquantized_layers(config, quantization))
    arguments = EngineArgs(
        model=folder, dtype="bfloat16", load_format="dummy", hf_overrides={"quantization_config": described}
    )
    vllm_config = arguments.create_engine_config()
    sent = [
        (name, part)
        for key, weight in model.state_dict().items()
        for (name, _, _), part in zip(
            quantization.described(key, "bfloat16", tuple(weight.shape)),
            quantization.encode(key, weight.bfloat16()),
            strict=True,
        )
    ]
    with set_current_vllm_config(vllm_config), torch.no_grad():
        if not torch.distributed.is_initialized():
            init_distributed_environment(1, 0, f"file://{meeting}", 0, "gloo")
            initialize_model_parallel(1, 1)
        target = initialize_model(vllm_config)
        named = dict(target.named_parameters())
        reported = target.load_weights(iter(sent))
    joined = {
        "model.layers.0.self_attn.qkv_proj": [f"model.layers.0.self_attn.{name}_proj.weight" for name in "qkv"],
        "model.layers.0.mlp.gate_up_proj": [f"model.layers.0.mlp.{name}_proj.weight" for name in ("gate", "up")],
        "model.layers.0.mlp.down_proj": ["model.layers.0.mlp.down_proj.weight"],
        "model.layers.1.mlp.down_proj": ["model.layers.1.mlp.down_proj.weight"],
    }
    state, errors = model.state_dict(), {}
    for layer, parts in joined.items():
        values, want = named[f"{layer}.weight"], torch.cat([state[part] for part in parts])
        if values.dtype == torch.float8_e4m3fn:
            scales = named[layer + ".weight" + quantization.scale_suffix]
            values = dequantize(Quantized(values.data, scales.data), block_format)
        errors[layer] = float((values.float() - want).abs().max() / want.abs().max())
    dtypes = {name: str(value.dtype) for name, value in named.items() if name.startswith("model.layers.")}
    missing = sorted(without_cache_scales(set(named) - set(reported)))
    return {"errors": errors, "dtypes": dtypes, "missing": missing}


def computed(folder: str) -> dict[str, float]:
    """Compare an engine's log-probabilities with Hugging Face, with the inputs of linear layers rounded and without."""
    quantization = WeightQuantization(FP8_WEIGHTS, 2, last_layers=1, simulated=True)
    common: dict[str, Any] = {"kv_cache_bytes": 8 << 20, "load_weights": True, "enforce_eager": True}
    settings = EngineSettings("vllm", folder, folder, "cpu", "float32", 128, quantization=quantization, **common)
    prompt, model = list(range(20, 60)), load_causal_lm(folder)
    token_ids, logprobs = answer(VllmEngine(settings), prompt)
    without = errors(model, prompt, token_ids, logprobs)
    layers = [
        module
        for name, module in model.named_modules()
        if isinstance(module, torch.nn.Linear) and quantization.takes(f"{name}.weight", tuple(module.weight.shape))
    ]
    for layer in layers:
        layer.register_forward_pre_hook(lambda _, inputs: (rounded(inputs[0][0], FP8_ACTIVATIONS)[None],))
    found = {"error": errors(model, prompt, token_ids, logprobs), "error_without": without}
    engine = VllmEngine(replace(settings, engine_kwargs={"kv_cache_dtype": "fp8"}))
    found["error_of_cache"] = errors(model, prompt, *answer(engine, prompt))
    worker: Any = SimpleNamespace(model_runner=SimpleNamespace(get_model=lambda: model_of(engine)))
    return found | {"layers": round_activations(worker, quantization)}


def model_of(engine: Any) -> torch.nn.Module:
    """Return vLLM's model in an engine."""
    return engine._engine.model_executor.driver_worker.model_runner.get_model()


def answer(engine: VllmEngine, prompt: list[int]) -> tuple[list[int], list[float]]:
    """Return sampled tokens and their log-probabilities."""
    engine.add_request("answer", GenerationRequest(prompt, SamplingParams(max_new_tokens=16), seed=3))
    finished: list[Finished] = []
    while not finished:
        finished = engine.step()
    return finished[0].token_ids, finished[0].logprobs


@torch.no_grad()
def errors(model: Any, prompt: list[int], token_ids: list[int], logprobs: list[float]) -> float:
    """Return the largest difference of log-probabilities from those of a model."""
    scores = model(torch.tensor([prompt + token_ids])).logits[0, len(prompt) - 1 : -1].log_softmax(-1)
    return float((scores.gather(1, torch.tensor(token_ids)[:, None])[:, 0] - torch.tensor(logprobs)).abs().max())


def main() -> None:
    """Print all findings."""
    folder, meeting = sys.argv[1:]
    found: dict[str, Any] = {"engine": computed(folder), "quantizers": quantizers()}
    torch.cpu._is_amx_tile_supported = lambda: True
    modelopt.init_mxfp8_linear_kernel = lambda *_, **__: NO_KERNEL
    for name, block_format in (("fp8", FP8_WEIGHTS), ("mxfp8", MXFP8)):
        found[name] = loaded(folder, meeting, block_format)
    print(json.dumps(found))


if __name__ == "__main__":
    main()
