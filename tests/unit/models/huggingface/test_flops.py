"""The count of operations against torch's own counter of real passes, and against hand counts."""

import sys
from dataclasses import replace

import pytest
import torch
from architectures import random_model
from peft import LoraConfig, get_peft_model
from recurrent_models import recurrent_model
from torch import nn
from torch.utils.flop_counter import FlopCounterMode
from transformers import AutoConfig

from nemo_rl.models.huggingface.sizes import PEAK_BF16_TFLOPS, _attention, _multiplied, model_flops, peak_tflops

ROWS, T = 2, 12
WIDE = {"sliding_window": 64, "attn_implementation": "eager"}
"""No window shorter than the rows: attention over all pairs, whose matrix products torch counts one by one."""


def counted(model: torch.nn.Module, *, backward: bool) -> int:
    ids = torch.randint(0, 60, (ROWS, T))
    with FlopCounterMode(display=False) as counter:
        logits = model(input_ids=ids, use_cache=False).logits
        if backward:
            logits.sum().backward()
    return counter.get_total_flops()


@pytest.mark.parametrize(
    "model_type",
    [
        "qwen2",
        "qwen3",
        "llama",
        "mistral",
        "gemma3_text",
        "qwen2_moe",
        "qwen3_moe",
        "mixtral",
        "deepseek_v3",
        "gpt_oss",
    ],
)
@pytest.mark.parametrize("tied", [False, True])
def test_a_forward_pass_has_the_operations_that_torch_counts(model_type: str, tied: bool) -> None:
    model = random_model(model_type, tie_word_embeddings=tied, experts_implementation="eager", **WIDE)
    assert model_flops(model.config).forward({T: ROWS}) == counted(model, backward=False)


def test_training_has_three_times_the_operations_of_a_forward_pass() -> None:
    model = random_model("qwen3", **WIDE)
    assert model_flops(model.config).training({T: ROWS}) == counted(model, backward=True)


def test_frozen_weights_need_no_gradients_of_their_own() -> None:
    model = random_model("qwen3", **WIDE)
    inputs = model.config.hidden_size * sum(
        model.get_submodule(f"model.layers.0.self_attn.{name}").out_features for name in ("q_proj", "k_proj", "v_proj")
    )
    names = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
    flops = model_flops(model.config, adapters=4, adapted=lambda linears: linears)
    adapted = get_peft_model(model, LoraConfig(r=4, target_modules=names)).train()
    # Nothing needs the gradient of the first layer's input: its three base products and three of A stay forward only.
    unneeded = 2 * ROWS * T * (inputs + 3 * 4 * model.config.hidden_size)
    assert flops.training({T: ROWS}) - unneeded == counted(adapted, backward=True)


def test_a_scalar_head_takes_the_place_of_the_vocabulary() -> None:
    config = random_model("qwen2").config
    with_head, scalar = (model_flops(config, scores=scores).forward({1: 1}) for scores in (False, True))
    assert with_head - scalar == 2 * config.hidden_size * (config.vocab_size - 1)


def test_a_window_bounds_the_tokens_that_a_token_sees() -> None:
    config = random_model("gemma3_text").config
    assert config.layer_types == ["sliding_attention", "full_attention"] and config.sliding_window == 5
    flops = model_flops(config)
    width = config.num_attention_heads * 2 * config.head_dim
    attention = flops.forward({3: 1, T: 1}) - 2 * flops.trained * (3 + T)
    assert attention == 2 * width * ((3 * 3 + T * 5) + (3 * 3 + T * T))


def test_the_rule_of_thumb_holds_for_a_dense_model() -> None:
    """6 N + 12 L H Q T of PaLM, appendix B."""
    config = random_model("llama", tie_word_embeddings=True).config
    flops = model_flops(config)
    layers, heads, head = config.num_hidden_layers, config.num_attention_heads, config.head_dim
    assert flops.training({T: 1}) == T * (6 * flops.trained + 12 * layers * heads * head * T)


@pytest.mark.parametrize(
    ("name", "peak"),
    [
        ("NVIDIA GB300", 2500.0),
        ("NVIDIA GB200", 2500.0),
        ("NVIDIA B300 SXM6 AC", 2250.0),
        ("NVIDIA B200", 2250.0),
        ("NVIDIA GH200 480GB", 989.4),
        ("NVIDIA H200", 989.4),
        ("NVIDIA H200 NVL", 835.0),
        ("NVIDIA H100 80GB HBM3", 989.4),
        ("NVIDIA H100 PCIe", 756.0),
        ("NVIDIA H100 NVL", 835.0),
        ("NVIDIA H800", 989.4),
        ("NVIDIA H800 PCIe", 756.0),
        ("NVIDIA H20", 148.0),
        ("NVIDIA A100-SXM4-80GB", 312.0),
        ("NVIDIA A800-SXM4-80GB", 312.0),
        ("NVIDIA L40S", 362.0),
        ("NVIDIA L40", 181.0),
        ("NVIDIA L4", 121.0),
        ("NVIDIA A10", 125.0),
        ("NVIDIA A10G", 70.0),
        ("NVIDIA GeForce RTX 4090", 165.2),
        ("NVIDIA RTX A6000", 154.8),
        ("NVIDIA RTX A1000", None),
        ("NVIDIA A100-SXM4-40GB MIG 1g.5gb", None),
        ("NVIDIA GeForce RTX 4090 Laptop GPU", None),
        ("Other", None),
    ],
)
def test_peak_rates_are_found_by_device_name(name: str, peak: float | None) -> None:
    assert peak_tflops(name) == peak


def test_all_listed_devices_are_tested() -> None:
    [mark] = [m for m in test_peak_rates_are_found_by_device_name.pytestmark if m.name == "parametrize"]  # type: ignore[attr-defined]
    names = [name.replace("-", " ") for name, _ in mark.args[1]]
    assert all(any(words in name for name in names) for words in PEAK_BF16_TFLOPS)


def test_towers_for_images_do_not_count() -> None:
    text = random_model("gemma3_text").config
    vision = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2}
    config = AutoConfig.for_model("gemma3", text_config=text.to_dict(), vision_config=vision)
    assert model_flops(config) == model_flops(text)


def test_layers_that_cannot_be_counted_are_refused() -> None:
    config = random_model("gemma3_text").config
    config.layer_types = ["full_attention", "new_attention"]
    with pytest.raises(ValueError, match="layers of the kind new_attention cannot be counted"):
        _attention(config)
    config.layer_types = ["full_attention", "linear_attention"]
    assert [layers for _, _, layers in _attention(config)] == [1]


def recurrent_steps(kind: str, heads: int, rows: int, columns: int) -> None:
    """Compute one token of a recurrent layer's heads by matrix products, as the papers write it."""
    state = torch.zeros(heads, rows, columns)
    key, value, query = torch.ones(heads, rows, 1), torch.ones(heads, 1, columns), torch.ones(heads, 1, rows)
    if kind == "delta":
        value = value - torch.bmm(key.transpose(1, 2), state)
    state = state + torch.bmm(key, value)
    torch.bmm(query, state)


@pytest.mark.parametrize(
    ("model_type", "kind", "heads", "rows", "columns", "layers"),
    [
        ("mamba2", "ssm", 8, 16, 16, 4),
        ("nemotron_h", "ssm", 8, 16, 16, 2),
        ("falcon_h1", "ssm", 8, 16, 16, 4),
        ("mamba", "ssm", 96, 16, 1, 4),
        ("qwen3_next", "delta", 4, 16, 16, 2),
        ("qwen3_5_text", "delta", 4, 16, 16, 2),
        ("olmo_hybrid", "delta", 4, 16, 16, 2),
        ("kimi_linear", "delta", 4, 16, 16, 2),
    ],
)
def test_states_of_recurrent_layers_count_in_their_recurrent_form(
    model_type: str, kind: str, heads: int, rows: int, columns: int, layers: int
) -> None:
    flops = model_flops(recurrent_model(model_type).config)
    with FlopCounterMode(display=False) as counter:
        recurrent_steps(kind, heads, rows, columns)
    assert 2 * flops.states == layers * counter.get_total_flops()
    without = replace(flops, states=0.0)
    assert flops.training({T: ROWS}) - without.training({T: ROWS}) == 3 * T * ROWS * 2 * flops.states


@pytest.mark.parametrize("model_type", ["nemotron_h", "falcon_h1", "qwen3_next", "olmo_hybrid"])
def test_all_other_products_of_hybrid_models_are_counted(model_type: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Torch counts a pass in which the functions of recurrent states make no products."""
    model = recurrent_model(model_type, experts_implementation="eager", attn_implementation="eager")
    file = sys.modules[type(model).__module__]
    monkeypatch.setattr(file, "mamba2_chunk_scan", lambda hidden_states, *_, **__: hidden_states, raising=False)
    delta = lambda query, key, value, **_: (value, None)  # noqa: E731
    monkeypatch.setattr(file, "torch_chunk_gated_delta_rule", delta, raising=False)
    monkeypatch.setattr(file, "causal_conv1d_fn", lambda hidden_states, *_, **__: hidden_states, raising=False)
    flops = replace(model_flops(model.config), states=0.0)
    assert flops.forward({T: ROWS}) == counted(model, backward=False)


def test_layers_that_share_weights_are_refused() -> None:
    with pytest.raises(ValueError, match="the layers of Zamba2ForCausalLM share weights"):
        model_flops(recurrent_model("zamba2").config)


def test_experts_without_a_known_number_are_refused() -> None:
    experts = nn.Module()
    experts.down = nn.Parameter(torch.zeros(4, 2, 3))
    with pytest.raises(ValueError, match=r"the weight down of Module is of experts.*num_experts_per_tok"):
        list(_multiplied([experts], None))
    assert list(_multiplied([experts], 1)) == [6.0]


def test_values_may_be_narrower_than_keys() -> None:
    config = random_model("qwen3").config
    [(width, _, _)] = _attention(config)
    config.v_head_dim = config.head_dim // 2
    [(narrower, _, _)] = _attention(config)
    assert narrower == width * 3 / 4


def test_operations_equal_a_hand_count() -> None:
    """Qwen2.5-1.5B, by the sizes of its matrices."""
    sizes = {"hidden_size": 1536, "intermediate_size": 8960, "num_hidden_layers": 28, "num_attention_heads": 12}
    config = AutoConfig.for_model("qwen2", vocab_size=151936, num_key_value_heads=2, tie_word_embeddings=True, **sizes)
    layer = 1536 * 1536 * 2 + 2 * 1536 * 256 + 3 * 1536 * 8960
    multiplied = 28 * layer + 151936 * 1536
    flops = model_flops(config)
    assert flops.training({1024: 1}) == 1024 * (6 * multiplied + 12 * 28 * 12 * 128 * 1024)
    assert flops.forward({1024: 1}) == flops.training({1024: 1}) / 3
