"""Meshes are proven on a small model before a run starts: which pass, which are refused, and no leftovers."""

import os
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from architectures import PACKS, random_model
from policy_helpers import policy_config
from processes_for_tests import wait_until_gone
from recurrent_models import recurrent_model
from transformers import AutoConfig, PretrainedConfig

from nemo_rl.config import PolicyConfig
from nemo_rl.distributed.parallel_layout import ParallelLayout
from nemo_rl.models.dtensor import mesh_check, tensor_parallel
from nemo_rl.models.dtensor.backend import DTensorBackend
from nemo_rl.models.dtensor.pipeline import stand_ins
from nemo_rl.models.dtensor.proof import mesh_proof, prove_mesh
from nemo_rl.models.dtensor.proof.children import Failure, answers
from nemo_rl.models.dtensor.proof.small import SmallMesh, small_model, small_policy
from nemo_rl.utils.errors import ConfigError, DeadlineExceededError

TP2 = {"tensor_parallel_size": 2}
PP2 = {"pipeline_parallel_size": 2}


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    torch.set_num_threads(1)
    return tmp_path / "cache"


def prove(model_type: str, mesh: dict[str, Any], *, fields: dict[str, Any] | None = None, **values: Any) -> None:
    policy = policy_config("unused", dtensor_cfg=mesh, **values)
    prove_mesh(policy, layout_of(policy), random_model(model_type, **fields or {}).config)


def layout_of(policy: PolicyConfig) -> ParallelLayout:
    return ParallelLayout(**{axis: policy.dtensor_cfg.size(axis) for axis in ("pp", "cp", "tp", "ep")})


@pytest.fixture
def never_asked(monkeypatch) -> None:
    def asked(*args: Any, **kwargs: Any) -> None:
        raise AssertionError("a proof was made")

    monkeypatch.setattr(mesh_proof, "answers", asked)


def test_a_mesh_without_model_parallelism_needs_no_proof(never_asked) -> None:
    policy = policy_config("unused")
    prove_mesh(policy, ParallelLayout(dp_shard=4, dp_replicate=2), random_model("llama").config)


def test_packed_rows_of_layers_that_are_no_plain_attention_are_proven_on_one_rank(cache) -> None:
    packed = {"sequence_packing": {"enabled": True}}
    prove("qwen3", {}, **packed)
    assert not (cache / "nemo_rl" / "proven_meshes").exists()
    policy = policy_config("unused", **packed)
    prove_mesh(policy, layout_of(policy), recurrent_model("lfm2").config)
    assert len([*(cache / "nemo_rl" / "proven_meshes").iterdir()]) == 1
    with pytest.raises(ConfigError, match=r"^policy: StableLmForCausalLM: outputs for packed sequences differ"):
        prove("stablelm", {}, **packed)
    with pytest.raises(ConfigError, match=r"^policy: Llama4ForCausalLM uses chunked attention.*enabled=false"):
        prove("llama4_text", {}, **packed)


def test_types_whose_packed_rows_are_not_proven_are_those_of_the_tests() -> None:
    assert {*mesh_check._PACKED_BY_TESTS} == {*PACKS}


def test_a_proven_mesh_is_remembered(cache, monkeypatch) -> None:
    prove("llama", TP2)
    (proof,) = (cache / "nemo_rl" / "proven_meshes").iterdir()
    assert proof.stat().st_size == 0
    monkeypatch.setattr(mesh_proof, "answers", lambda *args, **kwargs: Failure("it was asked again"))
    prove("llama", TP2)
    prove("llama", {"tensor_parallel_size": 4})  # an equal small mesh
    for changed in ({"mesh": TP2 | {"sequence_parallel": True}}, {"mesh": TP2, "fields": {"hidden_size": 32}}):
        with pytest.raises(ConfigError, match="it was asked again"):
            prove("llama", **changed)
    monkeypatch.setattr(mesh_proof, "_code", lambda: "other code")
    with pytest.raises(ConfigError, match="it was asked again"):
        prove("llama", TP2)


def test_a_read_only_folder_is_no_error(cache, monkeypatch) -> None:
    cache.write_text("a file where a folder should be")
    monkeypatch.setattr(mesh_proof, "answers", lambda *args, **kwargs: [None])
    prove("llama", TP2)


def test_a_shared_expert_that_every_rank_adds_is_refused_by_name(monkeypatch) -> None:
    monkeypatch.setattr(tensor_parallel, "shared_experts", lambda *args: {})
    with pytest.raises(ConfigError) as refused:
        prove("qwen2_moe", TP2)
    message = str(refused.value)
    assert message.startswith("policy.dtensor_cfg: tensor_parallel_size=2 is not right for qwen2_moe")
    assert "the loss differs by" in message and "the gradient of model.layers." in message
    assert message.endswith("Set tensor_parallel_size=1.")


def test_the_error_names_a_setting_that_works(monkeypatch) -> None:
    monkeypatch.setattr(tensor_parallel, "_mixers", lambda *args: [])
    with pytest.raises(ConfigError, match=r"Set sequence_parallel=false or tensor_parallel_size=1\."):
        prove("minimax", TP2 | {"sequence_parallel": True})


def test_stages_that_repeat_what_comes_before_the_layers_are_refused(monkeypatch) -> None:
    """A body may multiply embeddings; arriving hidden states would then be multiplied again."""

    def given(self: Any, hidden_states: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        output = self._layer[0](hidden_states, *args, **kwargs)
        self.left = stand_ins.first_tensor(output)
        return output

    monkeypatch.setattr(stand_ins.Through, "forward", given)
    with pytest.raises(ConfigError, match="GraniteForCausalLM cannot be divided into pipeline stages"):
        prove("granite", PP2, fields={"embedding_multiplier": 3.0})
    monkeypatch.setattr("nemo_rl.models.dtensor.build.try_division", lambda probe_model: None)
    with pytest.raises(ConfigError, match=r"pipeline_parallel_size=2 is not right for granite: .* the loss differs"):
        prove("granite", PP2, fields={"embedding_multiplier": 3.0})


def test_a_mesh_whose_rank_aborts_is_refused(monkeypatch) -> None:
    monkeypatch.setattr(DTensorBackend, "run", lambda *args, **kwargs: os.abort())
    message = r"a rank failed \(its process was ended by SIGABRT\)\. Set tensor_parallel_size=1"
    with pytest.raises(ConfigError, match=message):
        prove("llama", TP2)


def test_a_mesh_whose_ranks_hang_is_refused(monkeypatch) -> None:
    monkeypatch.setattr(DTensorBackend, "run", lambda *args, **kwargs: time.sleep(60))
    monkeypatch.setattr(mesh_proof, "_RANKS_S", 3.0)
    monkeypatch.setattr(mesh_proof._ProofQuestion, "_way_out", lambda self: "")
    began = time.monotonic()
    with pytest.raises(ConfigError, match="its ranks gave no answer within 3 s"):
        prove("llama", TP2)
    assert time.monotonic() - began < 40


@pytest.mark.parametrize(
    ("model_type", "mesh", "values"),
    [
        ("llama", TP2, {"dtensor_cfg": {"lora_cfg": {"enabled": True, "dropout": 0.5}}}),
        ("qwen3", TP2 | {"sequence_parallel": True}, {"reward_model_cfg": {"enabled": True}}),
        ("qwen2", PP2, {"reward_model_cfg": {"enabled": True}}),
        (
            "qwen3",
            {"context_parallel_size": 2, "context_parallel_method": "ulysses"},
            {"sequence_packing": {"enabled": True, "train_mb_tokens": 64, "logprob_mb_tokens": 64}},
        ),
        (
            "llama",
            TP2,
            {
                "sequence_packing": {
                    "enabled": True,
                    "train_mb_tokens": 64,
                    "logprob_mb_tokens": 64,
                    "share_prompts": True,
                }
            },
        ),
        ("gemma3_text", PP2 | {"virtual_pipeline_size": 2}, {"dtensor_cfg": {"activation_checkpointing": True}}),
    ],
    ids=["adapters", "reward model", "reward model in stages", "ulysses packed", "shared prompts", "interleaved"],
)
def test_options_of_the_section_are_part_of_the_proof(model_type, mesh, values) -> None:
    values = dict(values)
    fields = {"num_hidden_layers": 4, "layer_types": ["sliding_attention", "full_attention"] * 2}
    prove(
        model_type,
        mesh | values.pop("dtensor_cfg", {}),
        fields=fields if mesh.get("virtual_pipeline_size") else {"pad_token_id": 0},
        **values,
    )


@pytest.mark.parametrize("mesh", [TP2, {}], ids=["tp2", "one rank"])
def test_dynamic_rotary_frequencies_are_refused_here_too(mesh) -> None:
    fields = {"rope_parameters": {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 1e4}}
    with pytest.raises(ConfigError, match=r"changes its rotary frequencies \(dynamic\) with the longest row"):
        prove("llama", mesh, fields=fields | {"max_position_embeddings": 32})


@pytest.mark.parametrize(
    ("sizes", "small"),
    [
        ({"tp": 8}, ParallelLayout(tp=2)),
        ({"tp": 3}, ParallelLayout(tp=3)),
        ({"pp": 4, "cp": 9}, ParallelLayout(pp=2, cp=3)),
        ({"dp_shard": 8, "ep": 8}, ParallelLayout(dp_shard=2, ep=2)),
        ({"dp_replicate": 2, "tp": 4, "ep": 4}, ParallelLayout(tp=2, ep=2)),
    ],
)
def test_the_mesh_is_shrunk_for_the_proof(sizes, small) -> None:
    assert SmallMesh.of(policy_config("unused"), ParallelLayout(**sizes)).layout == small


def _small(config: PretrainedConfig, **mesh: int) -> Any:
    policy = policy_config("unused", dtensor_cfg=mesh)
    asked = SmallMesh.of(policy, layout_of(policy))
    return small_model(config, small_policy(policy, asked), asked)


def test_a_large_model_is_shrunk_to_the_same_layer_pattern() -> None:
    config = AutoConfig.for_model(
        "qwen2", hidden_size=3584, num_attention_heads=28, num_key_value_heads=4, num_hidden_layers=28
    )
    small = _small(config, tensor_parallel_size=4)
    assert (small.config.num_attention_heads, small.config.num_key_value_heads) == (12, 4), "an odd number for each key"
    assert len(small.base_model.layers) == 2
    assert sum(parameter.numel() for parameter in small.parameters()) < 15e6


SHAPES: dict[str, dict[str, Any]] = {
    "llama": {"hidden_size": 576, "head_dim": 64, "num_attention_heads": 9, "num_key_value_heads": 3},
    "qwen2": {"hidden_size": 1152, "num_attention_heads": 36, "num_key_value_heads": 12},
    "qwen3_moe": {"hidden_size": 1024, "num_experts": 12, "num_experts_per_tok": 2},
}


def _shape(model_type: str) -> PretrainedConfig:
    sizes = {"num_hidden_layers": 2, "intermediate_size": 1536, "moe_intermediate_size": 768, "vocab_size": 49152}
    config: PretrainedConfig = AutoConfig.for_model(model_type, tie_word_embeddings=True, **sizes | SHAPES[model_type])
    return config


@pytest.mark.parametrize("model_type", SHAPES)
def test_three_ranks_divide_the_shrunk_model(model_type: str) -> None:
    """With few heads of a size of their own, with few heads of the width, and with few experts."""
    mesh = "expert" if model_type == "qwen3_moe" else "tensor"
    small = _small(_shape(model_type), **{f"{mesh}_parallel_size": 3}).config
    assert small.hidden_size < SHAPES[model_type]["hidden_size"]
    divided = ("num_experts",) if mesh == "expert" else ("num_key_value_heads", "intermediate_size", "vocab_size")
    assert [name for name in divided if getattr(small, name) % 3] == []


def test_nine_heads_are_proven_on_three_ranks() -> None:
    policy = policy_config("unused", dtensor_cfg={"tensor_parallel_size": 3})
    prove_mesh(policy, layout_of(policy), _shape("llama"))


def test_the_shrunk_model_has_every_kind_of_layer() -> None:
    config = AutoConfig.for_model("gemma3_text", hidden_size=1152, num_hidden_layers=26, num_attention_heads=4)
    small = _small(config, tensor_parallel_size=2)
    assert small.config.layer_types == ["sliding_attention", "full_attention"]
    assert small.config.sliding_window == 5
    config = AutoConfig.for_model("deepseek_v3", num_hidden_layers=12, first_k_dense_replace=3)
    mlps = [type(layer.mlp).__name__ for layer in _small(config, tensor_parallel_size=2).base_model.layers]
    assert mlps == ["DeepseekV3MLP", "DeepseekV3MoE"]


def test_no_process_remains_after_a_proof(tmp_path) -> None:
    pids = tmp_path / "pids"

    def nested(index: int) -> int:
        with pids.open("a") as file:
            file.write(f"{os.getpid()} ")
        if index == 0:
            answers(nested_again, 2, 60)
        raise KeyError("the second one ends the first")

    def nested_again(index: int) -> None:
        with pids.open("a") as file:
            file.write(f"{os.getpid()} ")
        time.sleep(60)

    def second_late(index: int) -> int:
        if index:
            while not (pids.exists() and len(pids.read_text().split()) == 3):
                time.sleep(0.05)
            raise KeyError("the second one ends the first")
        return nested(index)

    found = answers(second_late, 2, 60, own_group=True)
    assert found == Failure("KeyError: 'the second one ends the first'", raised=True)
    assert wait_until_gone([int(pid) for pid in pids.read_text().split()]) == []


def test_answers_arrive_in_order_before_the_deadline() -> None:
    assert answers(lambda index: index * index, 3, 60) == [0, 1, 4]
    with pytest.raises(DeadlineExceededError, match="1 of 1 processes gave no answer in 0.5 s"):
        answers(lambda index: time.sleep(60), 1, 0.5)


def test_weights_that_a_class_leaves_uninitialized_are_defined(monkeypatch) -> None:
    """ERNIE's router is one: its values must not depend on uninitialized memory."""
    empty_like = torch.empty_like

    def dirty(*args: Any, **kwargs: Any) -> torch.Tensor:
        memory = empty_like(*args, **kwargs)
        return memory.fill_(float("nan")) if memory.is_floating_point() else memory

    monkeypatch.setattr(torch, "empty_like", dirty)
    config = AutoConfig.for_model(
        "ernie4_5_moe", hidden_size=64, intermediate_size=64, moe_intermediate_size=32, num_hidden_layers=3,
        num_attention_heads=4, num_key_value_heads=2, vocab_size=128, moe_num_experts=4, moe_k=2,
    )  # fmt: skip
    policy = policy_config("unused", dtensor_cfg=TP2)
    model = small_model(config, policy, SmallMesh.of(policy, layout_of(policy)))
    monkeypatch.undo()
    assert all(bool(tensor.isfinite().all()) for tensor in (*model.parameters(), *model.buffers()))
