"""Names, rules and files of the conversion to Megatron Core; megatron is not needed."""

import inspect
import json
import logging
import re
from collections import Counter
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from small_models import hf_config, hf_model
from transformers import AutoConfig, GPT2Config, PretrainedConfig

from nemo_rl.models.huggingface.tensor_files import TensorFiles, weight_files
from nemo_rl.models.megatron.conversion import parts, rules
from nemo_rl.models.megatron.conversion import sources as sources_module
from nemo_rl.models.megatron.conversion.parts import (
    ByHeads,
    Grouped,
    HeadRows,
    Part,
    RowLayout,
    Stacked,
    blocks,
    global_name,
)
from nemo_rl.models.megatron.conversion.rules import FAMILIES, hub_tensors, rules_for
from nemo_rl.models.megatron.conversion.sources import DequantizedFiles, sources
from nemo_rl.models.megatron.model.families import text_part
from nemo_rl.utils.errors import CheckpointError, ConfigError

pytestmark = pytest.mark.fast

MODULES = [rules, parts, parts, parts, rules, sources_module]


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Save folders with random models, by family."""
    folder = tmp_path_factory.mktemp("models")
    for family in FAMILIES:
        hf_model(family).save_pretrained(folder / family)
    return folder


def _with(folder: Path, target: Path, *, without: tuple[str, ...] = (), **added: torch.Tensor) -> Path:
    """Copy a model's tensors with some added and some removed."""
    tensors = load_file(folder / "model.safetensors") | added
    target.mkdir()
    save_file({name: tensor for name, tensor in tensors.items() if name not in without}, target / "model.safetensors")
    return target


def _sources(config: PretrainedConfig, folder: Path, **options: Any) -> dict[str, tuple[Part, ...]]:
    return sources(rules_for(config, **options), TensorFiles(weight_files(folder)), folder)


@pytest.mark.parametrize("module", MODULES, ids=lambda module: module.__name__)
def test_rules_do_not_import_megatron(module) -> None:
    assert not re.search(r"^\s*(from|import) megatron", inspect.getsource(module), re.MULTILINE)


@pytest.mark.parametrize("family", FAMILIES)
def test_hub_names_are_those_that_hugging_face_saves(saved, family) -> None:
    config = hf_config(family)
    assert set(rules_for(config).hub_names()) == set(load_file(saved / family / "model.safetensors"))
    assert len(_sources(config, saved / family)) == len(rules_for(config).by_parameter)


def test_biases_follow_the_configuration() -> None:
    parts = rules_for(hf_config("llama", attention_bias=True, mlp_bias=True)).hub_names()
    biases = {name.removeprefix("model.layers.2.") for name in parts if "layers.2" in name and name.endswith(".bias")}
    attention = {f"self_attn.{name}_proj.bias" for name in "qkvo"}
    assert biases == attention | {f"mlp.{name}_proj.bias" for name in ("gate", "up", "down")}


def test_latent_attention_may_lack_a_query_bottleneck() -> None:
    by_parameter = rules_for(hf_config("deepseek_v3", q_lora_rank=None)).by_parameter
    rule = by_parameter["decoder.layers.0.self_attention.linear_q_proj.weight"]
    assert [part.name for part in rule.parts] == ["model.layers.0.self_attn.q_proj.weight"]
    assert not [name for name in by_parameter if "q_down" in name or "q_layernorm" in name]


def test_an_unknown_family_is_refused_with_the_known_ones() -> None:
    with pytest.raises(
        ConfigError, match="'gpt2' cannot be converted.*deepseek_v3, gemma3_text, glm4_moe, glm4_moe_lite"
    ):
        rules_for(GPT2Config())


LAYOUTS = [
    *(Stacked(), Stacked(2), Grouped(1, 3), Grouped(4, 3), Grouped(2, 4, gated=True), blocks(16, 24, 8)),
    ByHeads((HeadRows(0, 0, 1, 8, 4), HeadRows(0, 1, 3, 8, 4), HeadRows(1, 0, 2, 8, 2))),
]


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
@pytest.mark.parametrize("num_shards", [1, 2, 4, 8])
def test_shards_hold_every_row_of_every_part_once(layout: RowLayout, num_shards: int) -> None:
    num_rows = 2 * 144 if isinstance(layout, Grouped) else 48
    seen: Counter[tuple[int, int]] = Counter()
    for shard in range(num_shards):
        segments = list(layout.segments(num_rows // num_shards, shard, num_shards))
        assert sum(segment.num_rows for segment in segments) == num_rows // num_shards
        seen.update((one.part, row) for one in segments for row in range(one.start, one.stop))
    assert seen == Counter((part, row) for part, rows in enumerate(layout.part_rows(num_rows)) for row in range(rows))


def test_grouped_heads_have_the_layout_of_megatron_core() -> None:
    """By hand: 2 key heads of 1 row, 2 query heads for each: q0 q1 k0 v0 | q2 q3 k1 v1."""
    segments = list(Grouped(2, 1).segments(8, 0, 1))
    rows = [("qkv"[one.part], row) for one in segments for row in range(one.start, one.stop)]
    assert rows == [*zip("qqkv", (0, 1, 0, 0), strict=True), *zip("qqkv", (2, 3, 1, 1), strict=True)]


def test_gates_of_attention_have_the_layout_of_megatron_core() -> None:
    """By hand: query part q0 g0 q1 g1 q2 g2 q3 g3, parameter q0 q1 g0 g1 k0 v0 | q2 q3 g2 g3 k1 v1."""
    segments = list(Grouped(2, 1, gated=True).segments(12, 0, 1))
    rows = [("qkv"[one.part], row) for one in segments for row in range(one.start, one.stop)]
    assert rows[:6] == [*zip("qqqqkv", (0, 2, 1, 3, 0, 0), strict=True)]
    assert rows[6:] == [*zip("qqqqkv", (4, 6, 5, 7, 1, 1), strict=True)]


@pytest.mark.parametrize(
    "part",
    [
        Part("x"),
        Part("x", expert=1),
        Part("x", expert=2, share=(1, 2)),
        Part("x", expert=0, share=(1, 2), interleaved=True, transposed=True),
        Part("x", expert=2, share=(0, 2), interleaved=True, transposed=True),
    ],
    ids=str,
)
def test_a_part_is_read_from_where_it_was_written(part: Part) -> None:
    values = torch.arange(24.0).reshape(6, 4)
    whole = torch.zeros(part.tensor_shape(values.shape, 3))
    part.of(whole).copy_(values)
    assert part.shape_in(whole.shape) == (6, 4)
    source = SimpleNamespace(like=lambda name: whole, read=lambda name, block: block.of(whole))
    read = part.read(source, slice(1, 5), slice(2, 4))
    assert torch.equal(read, values[1:5, 2:4])
    assert whole.count_nonzero() == 23


@pytest.mark.parametrize(
    ("name", "known"),
    [
        ("decoder.layers.1.self_attention.linear_qkv.layer_norm_weight", "decoder.layers.7.input_layernorm.weight"),
        ("decoder.layers.0.mlp.linear_fc1.layer_norm_weight", "decoder.layers.3.pre_mlp_layernorm.weight"),
        (
            "decoder.layers.0.self_attention.linear_q_up_proj.layer_norm_weight",
            "decoder.layers.3.self_attention.q_layernorm.weight",
        ),
        (
            "decoder.layers.0.self_attention.linear_kv_up_proj.layer_norm_weight",
            "decoder.layers.3.self_attention.kv_layernorm.weight",
        ),
        (
            "decoder.layers.1.mlp.experts.linear_fc2.weight3",
            "decoder.layers.7.mlp.experts.local_experts.11.linear_fc2.weight",
        ),
        (
            "decoder.layers.1.mlp.experts.linear_fc1.bias0",
            "decoder.layers.7.mlp.experts.local_experts.8.linear_fc1.bias",
        ),
        (
            "decoder.layers.1.mlp.experts.local_experts.3.linear_fc1.weight",
            "decoder.layers.7.mlp.experts.local_experts.11.linear_fc1.weight",
        ),
        (
            "decoder.layers.0.mlp.shared_experts.linear_fc1.weight",
            "decoder.layers.3.mlp.shared_experts.linear_fc1.weight",
        ),
        ("embedding.word_embeddings.weight", "embedding.word_embeddings.weight"),
    ],
)
def test_names_of_transformer_engine_and_of_ranks_map_to_the_whole_model(name, known) -> None:
    assert global_name(name, layers=[3, 7], first_expert=8) == known


def test_missing_and_unknown_tensors_are_named(saved, tmp_path) -> None:
    lacking = "model.layers.2.mlp.experts.3.up_proj.weight"
    folder = _with(saved / "qwen3_moe", tmp_path / "model", without=(lacking,), more=torch.zeros(1))
    with pytest.raises(CheckpointError, match=rf"lack: {lacking}\. .*no parameter: more\."):
        _sources(hf_config("qwen3_moe"), folder)


def test_multi_token_prediction_heads_are_skipped_with_a_warning(saved, tmp_path, caplog) -> None:
    extra = {f"model.layers.4.{name}": torch.zeros(1) for name in ("eh_proj.weight", "enorm.weight")}
    folder = _with(saved / "deepseek_v3", tmp_path / "model", **extra)
    with caplog.at_level(logging.WARNING):
        _sources(hf_config("deepseek_v3"), folder)
    assert "2 tensors of layers for multi-token prediction" in caplog.text
    assert "model.layers.4.eh_proj.weight" in caplog.text


def test_derived_tensors_of_old_files_are_skipped(saved, tmp_path) -> None:
    extra = {"model.layers.0.self_attn.rotary_emb.inv_freq": torch.zeros(8)}
    assert _sources(hf_config("llama"), _with(saved / "llama", tmp_path / "model", **extra))


def test_a_tied_head_in_the_files_has_to_be_the_embedding(saved, tmp_path) -> None:
    config = hf_config("qwen2")
    embedding = load_file(saved / "qwen2/model.safetensors")["model.embed_tokens.weight"]
    assert _sources(config, _with(saved / "qwen2", tmp_path / "equal", **{"lm_head.weight": embedding}))
    with pytest.raises(CheckpointError, match="tie_word_embeddings=false"):
        _sources(config, _with(saved / "qwen2", tmp_path / "other", **{"lm_head.weight": embedding + 1}))


def test_a_scalar_head_is_read_if_present(saved, tmp_path) -> None:
    config, score = hf_config("llama"), {"score.weight": torch.ones(1, 64)}
    assert "output_layer.weight" not in _sources(config, saved / "llama", has_scalar_head=True)
    folder = _with(saved / "llama", tmp_path / "model", without=("lm_head.weight",), **score)
    parts = _sources(config, folder, has_scalar_head=True)["output_layer.weight"]
    assert [part.name for part in parts] == ["score.weight"]
    assert rules_for(config, has_scalar_head=True).hub_names()[-1] == "score.weight"


def test_the_text_model_of_a_checkpoint_for_images_is_read_alone(saved, tmp_path, caplog) -> None:
    """As in the files of Qwen3.5."""
    config, text = hf_config("qwen3_5_text"), load_file(saved / "qwen3_5_text/model.safetensors")
    stored = {name.replace("model.", "model.language_model.", 1): tensor for name, tensor in text.items()}
    others = {"model.visual.blocks.0.norm1.weight": torch.ones(3), "mtp.norm.weight": torch.ones(3)}
    (tmp_path / "model").mkdir()
    save_file(stored | others, tmp_path / "model/model.safetensors")
    with caplog.at_level(logging.INFO):
        files = DequantizedFiles(weight_files(tmp_path / "model"), config)
    found = sources(rules_for(config), files, tmp_path / "model")
    names = {part.name for parts in found.values() for part in parts}
    assert names == text.keys() and all(torch.equal(files.read(name), text[name]) for name in names)
    assert "1 tensors for images are left out" in caplog.text


def test_the_text_part_of_a_configuration_for_images_is_trained() -> None:
    whole = AutoConfig.for_model("qwen3_5_moe", text_config=hf_config("qwen3_5_moe_text").to_dict())
    text = text_part(whole)
    assert text.model_type == "qwen3_5_moe_text" and text.architectures == ["Qwen3_5MoeForCausalLM"]
    assert len(rules_for(text).by_parameter) == len(rules_for(hf_config("qwen3_5_moe_text")).by_parameter)
    other = AutoConfig.for_model("gemma3")
    assert text_part(other) is other


def test_only_files_of_the_index_are_read(saved, tmp_path) -> None:
    folder = _with(saved / "llama", tmp_path / "model")
    (folder / "model.safetensors").rename(folder / "model-1.safetensors")
    save_file({"other": torch.zeros(1)}, folder / "consolidated.safetensors")
    parts = load_file(folder / "model-1.safetensors")
    index = {"weight_map": dict.fromkeys(parts, "model-1.safetensors")}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    assert weight_files(folder) == [folder / "model-1.safetensors"]
    (folder / "model-1.safetensors").unlink()
    with pytest.raises(CheckpointError, match=r"has no model-1\.safetensors"):
        weight_files(folder)


@pytest.mark.parametrize("family", FAMILIES)
def test_whole_parameters_convert_to_the_hub_tensors(saved, family) -> None:
    """Parameters are joined row by row as the rules say, then split again."""
    config, stored = hf_config(family), load_file(saved / family / "model.safetensors")
    rules = rules_for(config)

    def whole(parameter: str) -> torch.Tensor:
        rule = rules.by_parameter[parameter]
        parts = [part.of(stored[part.name]) for part in rule.parts]
        rows = sum(len(part) for part in parts)
        return torch.cat([parts[one.part][one.start : one.stop] for one in rule.layout.segments(rows, 0, 1)])

    found = {name: tensor for name, tensor, _ in hub_tensors(rules, whole)}
    kept = {name for name, _, full_precision in hub_tensors(rules, whole) if full_precision}
    wide = ("e_score_correction_bias", ".A_log", ".D", ".dt_bias")
    assert kept == {name for name in stored if name.endswith(wide)}
    assert found.keys() == stored.keys()
    assert all(torch.equal(found[name], tensor) for name, tensor in stored.items())
