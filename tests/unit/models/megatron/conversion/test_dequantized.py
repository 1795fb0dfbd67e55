"""Weights in 8 and 4 bits are read as transformers dequantizes them, whole and in parts."""

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from small_models import hf_config, hf_model
from transformers.integrations.finegrained_fp8 import Fp8Dequantize
from transformers.integrations.mxfp4 import _convert_moe_packed_tensors

from nemo_rl.distributed.ranks.tensor_block import TensorBlock
from nemo_rl.models.huggingface.tensor_files import weight_files
from nemo_rl.models.megatron.conversion.rules import rules_for
from nemo_rl.models.megatron.conversion.sources import DequantizedFiles, sources

BLOCKS = [TensorBlock((0, 0), (200, 300)), TensorBlock((120, 5), (20, 245)), TensorBlock((130, 256), (70, 44))]
STACKED_BLOCKS = [
    TensorBlock((0, 0, 0), (2, 96, 10)),
    TensorBlock((1, 10, 4), (1, 60, 6)),
    TensorBlock((0, 64, 0), (1, 1, 1)),
]


@pytest.fixture
def generator() -> torch.Generator:
    return torch.Generator().manual_seed(4)


@pytest.mark.parametrize("block", BLOCKS, ids=str)
def test_float8_with_block_scales_is_dequantized(block, generator, tmp_path) -> None:
    values = torch.randn(200, 300, generator=generator).to(torch.float8_e4m3fn)
    factors = torch.rand(2, 3, generator=generator)
    save_file({"w.weight": values, "w.weight_scale_inv": factors}, tmp_path / "model.safetensors")
    files = DequantizedFiles(weight_files(tmp_path), hf_config("deepseek_v3"))
    assert list(files) == ["w.weight"]
    padded = torch.zeros(256, 384, dtype=torch.float8_e4m3fn)
    padded[:200, :300] = values
    want = Fp8Dequantize(None)._dequantize_one(padded, factors, torch.float32)[:200, :300]
    assert files.like("w.weight").shape == (200, 300)
    assert torch.equal(files.read("w.weight", block), block.of(want))


@pytest.mark.parametrize("block", STACKED_BLOCKS, ids=str)
def test_experts_in_mxfp4_are_dequantized(block, generator, tmp_path) -> None:
    blocks = torch.randint(0, 256, (2, 10, 3, 16), generator=generator, dtype=torch.uint8)
    exponents = torch.randint(120, 134, (2, 10, 3), generator=generator, dtype=torch.uint8)
    save_file({"w_blocks": blocks, "w_scales": exponents}, tmp_path / "model.safetensors")
    files = DequantizedFiles(weight_files(tmp_path), hf_config("gpt_oss"))
    want = _convert_moe_packed_tensors(blocks, exponents, dtype=torch.float32)
    assert list(files) == ["w"]
    assert files.like("w").shape == want.shape == (2, 96, 10)
    assert torch.equal(files.read("w", block), block.of(want))


def _quantized(folder: Path, family: str) -> Path:
    hf_model(family).save_pretrained(folder)
    stored = load_file(folder / "model.safetensors")
    for name, tensor in list(stored.items()):
        if family == "deepseek_v3" and "_proj" in name:
            stored[name] = tensor.to(torch.float8_e4m3fn)
            stored[f"{name}_scale_inv"] = torch.ones(-(-len(tensor) // 128), -(-tensor.shape[1] // 128))
        elif name.endswith(("experts.gate_up_proj", "experts.down_proj")):
            experts, columns, rows = stored.pop(name).shape
            stored[f"{name}_blocks"] = torch.zeros(experts, rows, columns // 32, 16, dtype=torch.uint8)
            stored[f"{name}_scales"] = torch.zeros(experts, rows, columns // 32, dtype=torch.uint8)
    save_file(stored, folder / "model.safetensors")
    return folder


@pytest.mark.parametrize("family", ["deepseek_v3", "gpt_oss"])
def test_every_tensor_of_quantized_files_is_accounted_for(family, tmp_path) -> None:
    config, folder = hf_config(family), _quantized(tmp_path, family)
    files, rules = DequantizedFiles(weight_files(folder), config), rules_for(config)
    found = sources(rules, files, folder)
    assert found.keys() == rules.by_parameter.keys()
    shapes = {part.name: tuple(files.like(part.name).shape) for parts in found.values() for part in parts}
    want = {name: tuple(tensor.shape) for name, tensor in hf_model(family).state_dict().items()}
    assert all(shapes[name] == want[name] for name in shapes.keys() & want.keys())
