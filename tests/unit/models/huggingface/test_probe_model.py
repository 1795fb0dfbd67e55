"""The small copy of a model has its kinds of layers, described by a configuration that fits them."""

import torch
from transformers import FalconH1Config, FalconH1ForCausalLM, MllamaForCausalLM
from transformers.models.mllama.configuration_mllama import MllamaTextConfig

from nemo_rl.models.huggingface.probe_model import filled, of_few_layers

TOKENS = torch.arange(3, 15)[None]


def test_a_list_of_another_length_than_the_layers_keeps_all_values() -> None:
    """Falcon-H1 has five factors of channels, also in a model with five layers."""
    factors = [0.5, 1.2, 0.8, 1.1, 0.9]
    sizes = {"hidden_size": 64, "intermediate_size": 96, "num_attention_heads": 4, "num_key_value_heads": 2}
    mamba = {"mamba_d_ssm": 128, "mamba_n_heads": 8, "mamba_d_head": 16, "mamba_d_state": 8}
    config = FalconH1Config(vocab_size=128, num_hidden_layers=5, ssm_multipliers=factors, **sizes, **mamba)
    small = filled(of_few_layers(FalconH1ForCausalLM, config))
    assert small.config.num_hidden_layers == len(small.model.layers) == 1
    assert small.config.ssm_multipliers == factors
    assert small(input_ids=TOKENS).logits.isfinite().all()


def test_numbers_of_layers_follow_the_layers_that_are_kept() -> None:
    """Without images a model of Llama 3.2 Vision skips the layers whose numbers its configuration lists."""
    config = MllamaTextConfig(
        vocab_size=128,
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=6,
        num_attention_heads=4,
        num_key_value_heads=2,
        cross_attention_layers=[2, 4],
        pad_token_id=0,
    )
    small = filled(of_few_layers(MllamaForCausalLM, config))
    assert [type(layer).__name__ for layer in small.model.layers] == [
        "MllamaSelfAttentionDecoderLayer",
        "MllamaCrossAttentionDecoderLayer",
    ]
    assert small.config.cross_attention_layers == [1]
    assert small(input_ids=TOKENS, use_cache=False).logits.isfinite().all()
