"""Each family on Megatron Core computes what Hugging Face computes: logits, and the gradient of every parameter."""

import json
import re
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
from rank_host import needs_megatron
from small_models import MODELS, hf_config
from transformers import AutoConfig
from witness import compare

from nemo_rl.models.huggingface.load import load_model_config
from nemo_rl.models.megatron.conversion import rules
from nemo_rl.models.megatron.model import families
from nemo_rl.models.megatron.model.families import FAMILIES, MODEL_TYPES, family_of
from nemo_rl.models.megatron.model.model_check import check_expressible
from nemo_rl.utils.errors import ConfigError

TOLERANCE = 1e-5
"""Relative to the largest entry of a tensor; float32 on both sides."""
_DENSE = ("mistral", "qwen2", "qwen3", "qwen3_5_text", "gemma3_text")
EXPERT_MODELS = [name for name in MODELS if name not in ("llama", "llama3_rope", *_DENSE)]
MESHES: dict[str, tuple[dict[str, Any], list[str]]] = {
    "single": ({}, list(MODELS)),
    "tp2_sp": ({"tp": 2, "sp": True}, list(MODELS)),
    "tp2": ({"tp": 2}, ["llama", "qwen3", "gemma3_text", "nemotron_h_dense", "qwen3_next_dense", "qwen3_5_text"]),
    "tp2_ep2": ({"tp": 2, "ep": 2, "sp": True}, EXPERT_MODELS),
    "etp2": ({"tp": 2, "etp": 2, "sp": True}, ["qwen3_moe", "deepseek_v3"]),
    "cp2": ({"cp": 2}, list(MODELS)),
    "ep2": ({"ep": 2}, EXPERT_MODELS),
}
CASES = [(mesh, name, packed) for mesh, (_, names) in MESHES.items() for name in names for packed in (False, True)]
VARIANTS = (
    "llama3_rope",
    "qwen3_moe_sparse",
    "deepseek_v3_yarn",
    "kimi_k2",
    "glm4_moe_air",
    "nemotron_h_dense",
    "qwen3_next_dense",
)
"""Of families that have another model as well: how they differ shows without a mesh."""


def _is_quick(mesh: str, name: str, packed: bool) -> bool:
    """Return whether the case runs by default: packed or padded alternate over meshes; variants only on one rank."""
    if name in VARIANTS:
        return mesh == "single" and not packed or mesh == "tp2" and packed
    return packed == bool((list(MESHES).index(mesh) + list(MODELS).index(name)) % 2)


QUICK = [case for case in CASES if _is_quick(*case)]
FURTHER = [case for case in CASES if not _is_quick(*case)]


Differences = dict[tuple[str, str, bool], tuple[float, float, str]]


def _compare_all(rank: int, world_size: int, cases: list[tuple[str, str, bool]]) -> Differences:
    return {(mesh, name, packed): compare(name, packed=packed, **MESHES[mesh][0]) for mesh, name, packed in cases}


@pytest.fixture(scope="module")
def differences(host) -> list[Differences]:
    """Return the differences by rank."""
    return host.run(_compare_all, 2, QUICK)


@needs_megatron
@pytest.mark.parametrize(("mesh", "name", "packed"), QUICK, ids=lambda value: str(value))
def test_logits_and_gradients_equal_hugging_face(differences, mesh, name, packed):
    for of_rank in differences:
        logits, gradients, worst = of_rank[mesh, name, packed]
        assert logits < TOLERANCE
        assert gradients < TOLERANCE, worst


@needs_megatron
@pytest.mark.long
def test_further_layouts_equal_hugging_face_too(host):
    for of_rank in host.run(_compare_all, 2, FURTHER):
        assert {case: found for case, found in of_rank.items() if not max(found[:2]) < TOLERANCE} == {}


REFUSED = [
    ("llama", {"attention_bias": True}, "attention_bias=True"),
    ("llama", {"hidden_act": "gelu"}, "hidden_act='gelu'"),
    ("llama", {"rope_parameters": {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}}, "rope_type=dynamic"),
    ("mistral", {"hidden_act": "gelu"}, "hidden_act='gelu'"),
    ("qwen2", {"hidden_act": "gelu"}, "hidden_act='gelu'"),
    ("qwen3", {"attention_bias": True}, "attention_bias=True"),
    ("qwen3_moe", {"attention_bias": True}, "attention_bias=True"),
    ("qwen3_moe", {"mlp_only_layers": [0, 1, 2]}, "mlp_only_layers=[0, 1, 2]"),
    ("deepseek_v3", {"num_experts_per_tok": 2, "topk_group": 2}, "num_experts_per_tok // topk_group = 1"),
    ("deepseek_v3", {"num_experts_per_tok": 6, "topk_group": 2}, "num_experts_per_tok // topk_group = 3"),
    ("deepseek_v3", {"q_lora_rank": None}, "q_lora_rank"),
    ("deepseek_v3", {"norm_topk_prob": False}, "norm_topk_prob=False"),
    ("deepseek_v3", {"rope_interleave": False}, "rope_interleave=False"),
    ("glm4_moe", {"norm_topk_prob": False}, "norm_topk_prob=False"),
    ("glm4_moe", {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.1}},
     "3 numbers of a head"),
    ("glm4_moe_lite", {"rope_interleave": False}, "rope_interleave=False"),
    ("minimax_m2", {"router_jitter_noise": 0.1}, "router_jitter_noise=0.1"),
    ("minimax_m2", {"num_experts_per_tok": 1}, "num_experts_per_tok=1"),
    ("nemotron_h", {"moe_latent_size": 32}, "moe_latent_size=32"),
    ("nemotron_h", {"mlp_hidden_act": "silu"}, "mlp_hidden_act='silu'"),
    ("nemotron_h", {"n_groups": 3}, "n_groups=3"),
    ("nemotron_h", {"use_conv_bias": False}, "use_conv_bias=False"),
    ("qwen3_next", {"attention_bias": True}, "attention_bias=True"),
    ("qwen3_next", {"linear_num_value_heads": 6}, "linear_num_value_heads=6"),
    ("qwen3_next", {"mlp_only_layers": [0, 1, 2]}, "mlp_only_layers=[0, 1, 2]"),
    ("qwen3_5_moe_text", {"num_experts_per_tok": 1}, "num_experts_per_tok=1"),
    ("qwen3_5_moe_text", {"shared_expert_intermediate_size": 0}, "shared_expert_intermediate_size=0"),
    ("gemma3_text", {"use_bidirectional_attention": True}, "use_bidirectional_attention=True"),
    ("gemma3_text", {"final_logit_softcapping": 30.0}, "final_logit_softcapping=30.0"),
    ("gpt_oss", {"attention_bias": False}, "attention_bias=False"),
    ("gpt_oss", {"swiglu_alpha": 1.0}, "swiglu_alpha=1.0"),
]  # fmt: skip


@pytest.mark.parametrize(("name", "values", "message"), REFUSED)
def test_what_megatron_core_cannot_express_is_refused_by_name(name, values, message):
    config = hf_config(name, **values)
    family = family_of(config)
    with pytest.raises(ConfigError) as raised:
        family.transformer_fields(config)
        family.rotary(config)
    assert message in str(raised.value)


def test_a_single_expert_group_sets_no_router_groups():
    """Moonlight and Kimi have one group, which is always chosen."""
    config = hf_config("deepseek_v3", n_group=1, topk_group=1, num_experts_per_tok=3)
    assert "moe_router_num_groups" not in family_of(config).transformer_fields(config)


@pytest.mark.parametrize(("method", "refused"), [("fp8", False), ("mxfp4", False), ("compressed-tensors", True)])
def test_files_with_weights_that_are_not_read_are_refused(method, refused):
    config = hf_config("kimi_k2")
    config.quantization_config = {"quant_method": method}
    with pytest.raises(ConfigError, match="quantized by compressed-tensors") if refused else nullcontext():
        check_expressible(config)


def test_kimi_k2_has_the_configuration_of_deepseek_v3(tmp_path):
    given = hf_config("kimi_k2").to_dict()
    written = given | {"model_type": "kimi_k2", "auto_map": {"AutoConfig": "configuration_deepseek.DeepseekV3Config"}}
    (tmp_path / "config.json").write_text(json.dumps(written))
    loaded = load_model_config(str(tmp_path))
    assert type(loaded) is type(hf_config("kimi_k2"))
    assert {key: value for key, value in loaded.to_dict().items() if given[key] != value} == {}


@pytest.mark.parametrize("kind", ["gemma4_text", "kimi_k25", "deepseek_v32"])
def test_families_that_are_not_built_are_refused_with_the_backend_that_trains_them(kind):
    with pytest.raises(ConfigError, match=f"model_type={kind}; it knows .* with policy.dtensor_cfg.enabled=true"):
        check_expressible(AutoConfig.for_model(kind))


def test_an_unknown_family_is_refused_with_the_known_ones():
    with pytest.raises(ConfigError, match="model_type=gpt2; it knows deepseek_v3, gemma3_text, glm4_moe"):
        family_of(AutoConfig.for_model("gpt2"))


def test_every_family_is_compared():
    assert {name for family in FAMILIES for name in family.model_types} == {kind for kind, _ in MODELS.values()}


def test_every_family_has_a_converter():
    assert set(MODEL_TYPES) == set(rules.FAMILIES)


def test_families_do_not_import_megatron():
    """The controller imports them before the start."""
    text = Path(families.__file__).read_text()
    assert not re.search(r"^\s*(from|import) megatron", text, re.M)
