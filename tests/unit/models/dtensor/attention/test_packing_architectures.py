"""An architecture gives equal results packed and padded, or is refused by name."""

import pytest
import torch
from architectures import PACKS, REFUSED_AT_LOAD, REFUSED_BY_PROBE, WAY_OUT, random_model
from policy_helpers import VOCAB
from torch import Tensor
from transformers import AttentionMaskInterface, PreTrainedModel

from nemo_rl.models.attention.registered import VARLEN_ATTENTION, register_varlen_attention
from nemo_rl.models.dtensor.attention import use_registered_attention, verify_division, verify_packing
from nemo_rl.models.huggingface.load import load_causal_lm
from nemo_rl.models.training.inputs import packed_model_inputs
from nemo_rl.utils.errors import ConfigError


def _packing(model: PreTrainedModel) -> PreTrainedModel:
    model.set_attn_implementation(register_varlen_attention())
    return model


def _logprobs(model: PreTrainedModel, inputs: dict) -> Tensor:
    with torch.no_grad():
        return model(**inputs, use_cache=False).logits.double().log_softmax(-1)


@pytest.mark.parametrize("model_type", PACKS)
def test_packed_rows_equal_the_models_own_attention_on_padded_rows(model_type) -> None:
    model = random_model(model_type)
    segments = list(((torch.arange(40) * 7 + 3) % VOCAB).split([23, 17]))
    model.set_attn_implementation("eager")
    padded = _logprobs(model, {"input_ids": torch.nn.utils.rnn.pad_sequence(segments, batch_first=True)})
    want = torch.cat([row[: len(segment)] for row, segment in zip(padded, segments, strict=True)])
    verify_packing(_packing(model))
    torch.testing.assert_close(_logprobs(model, packed_model_inputs(segments))[0], want, rtol=0, atol=1e-4)


@pytest.mark.parametrize("model_type", REFUSED_AT_LOAD)
def test_attention_that_cannot_be_replaced_is_refused_before_the_weights_are_read(model_type, tmp_path) -> None:
    random_model(model_type).config.save_pretrained(tmp_path)
    with pytest.raises(ConfigError, match=f"(?s){REFUSED_AT_LOAD[model_type]}.*{WAY_OUT}"):
        load_causal_lm(str(tmp_path), attn_implementation=register_varlen_attention())


@pytest.mark.parametrize("model_type", REFUSED_BY_PROBE)
def test_models_that_packing_would_change_are_refused(model_type) -> None:
    with pytest.raises(ConfigError, match=f"(?s){REFUSED_BY_PROBE[model_type]}.*{WAY_OUT}"):
        verify_packing(_packing(random_model(model_type)))


@pytest.mark.parametrize("model_type", ["minimax", "stablelm", "llama4_text", "doge"])
def test_attention_that_ranks_cannot_divide_is_refused(model_type) -> None:
    """Tokens that mix outside attention: linear attention, arguments that do not reach it, the model's own masks."""
    with pytest.raises(ConfigError, match=r"(?s)ForCausalLM.*context_parallel_size=1"):
        use_registered_attention(random_model(model_type), packed=False, divided=True)


def test_a_layer_that_reads_neighbouring_tokens_is_noticed() -> None:
    model = _packing(random_model("qwen3"))
    verify_division(model)
    layer = model.model.layers[0]
    plain = layer.forward

    def with_neighbour(hidden: Tensor, position_ids: Tensor, **kwargs) -> Tensor:
        """Add a convolution that knows where sequences start."""
        left = hidden.roll(1, dims=1) * (position_ids > 0)[..., None]
        return plain(hidden + 0.1 * left, position_ids=position_ids, **kwargs)

    layer.forward = with_neighbour
    verify_packing(model)
    with pytest.raises(ConfigError, match="mixes divided sequences"):
        verify_division(model)


@pytest.mark.parametrize("model_type", ["gemma2", "gpt_oss", "mistral", "deepseek_v3"])
def test_padded_rows_use_the_packed_attention_and_keep_the_gradients(model_type) -> None:
    ids = (torch.arange(40) * 7 + 3).view(2, 20) % VOCAB
    found = []
    for registered in (False, True):
        model = random_model(model_type)
        model.set_attn_implementation("eager")
        if registered:
            use_registered_attention(model, packed=False, divided=False)
            assert model.config._attn_implementation == VARLEN_ATTENTION
        model(input_ids=ids, use_cache=False).logits.double().log_softmax(-1)[..., 5].sum().backward()
        found.append({name: p.grad for name, p in model.named_parameters() if p.grad is not None})
    for name, want in found[0].items():
        torch.testing.assert_close(found[1][name], want, rtol=0, atol=3e-5 * want.abs().max().item())


@pytest.mark.parametrize("model_type", ["doge", "llama4_text", "falcon"])
def test_a_model_keeps_its_own_attention_if_nothing_needs_another(model_type, caplog) -> None:
    model = random_model(model_type)
    own = model.config._attn_implementation
    with caplog.at_level("INFO"):
        use_registered_attention(model, packed=False, divided=False)
    assert model.config._attn_implementation == own != VARLEN_ATTENTION
    assert "keeps its own attention" in caplog.text


@pytest.mark.parametrize("model_type", ["mistral", "qwen2_moe"])
def test_a_lost_attention_window_of_any_length_is_noticed(model_type, monkeypatch) -> None:
    model = _packing(random_model(model_type, sliding_window=4096))
    verify_packing(model)
    assert model.config.sliding_window == 4096, "the check leaves the model as it was"
    assert model.config._attn_implementation == VARLEN_ATTENTION
    monkeypatch.setitem(AttentionMaskInterface._global_mapping, VARLEN_ATTENTION, lambda **_: None)
    with pytest.raises(ConfigError, match="differ from those of the same sequences padded"):
        verify_packing(model)


SPARSE = {"layer_types": ["minimax_m3_sparse", "full_attention"], "head_dim": 16, "index_n_heads": 2}


def test_attention_that_chooses_keys_is_never_replaced_by_one_that_sees_all() -> None:
    """Its blocks of 128 tokens, of which 16 are chosen, are longer than the rows that are compared."""
    model = random_model("minimax_m3_vl_text", **SPARSE)
    with pytest.raises(ConfigError, match=f"(?s)MiniMaxM3VLAttention passes block_indices to its attention.*{WAY_OUT}"):
        verify_packing(_packing(model))
    use_registered_attention(model, packed=False, divided=False)
    assert model.config._attn_implementation == "eager"


@pytest.mark.parametrize("kind", ["indexed_attention", "compressed_sparse_attention", "minimax_m3_sparse"])
def test_layers_that_choose_keys_by_a_mask_are_refused_before_the_weights_are_read(kind, tmp_path) -> None:
    config = random_model("minimax_m3_vl_text", **SPARSE).config
    config.layer_types = [kind, "full_attention"]
    config.save_pretrained(tmp_path)
    with pytest.raises(ConfigError, match=rf"(?s)has layers that choose .* \({kind}\).*{WAY_OUT}.*parallel=false"):
        load_causal_lm(str(tmp_path), attn_implementation=register_varlen_attention())
