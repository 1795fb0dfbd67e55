"""Hugging Face -> Megatron Core -> Hugging Face on real models and meshes, and against Hugging Face's own logits."""

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from rank_backend import CPU, exported, start_groups
from rank_host import needs_megatron
from safetensors.torch import load_file, save_file
from small_models import hf_model
from transformers import AutoConfig
from witness import compare

from nemo_rl.models.megatron.conversion.parts import Grouped, Segment
from nemo_rl.models.megatron.conversion.rules import FAMILIES
from nemo_rl.utils.errors import CheckpointError

pytestmark = needs_megatron
RANKS = 4
MESHES: dict[str, dict[str, int]] = {
    "single": {},
    "tp2": {"tp": 2},
    "pp2": {"pp": 2},
    "pp2_vpp2": {"pp": 2, "vpp": 2},
    "ep2": {"ep": 2},
    "tp2_ep2": {"tp": 2, "ep": 2},
    "tp2_ep2_etp2": {"tp": 2, "ep": 2, "etp": 2},
    "tp2_pp2_ep2": {"tp": 2, "pp": 2, "ep": 2},
    "tp4": {"tp": 4},  # more ranks than key heads
}
MIXTURES = (
    *("qwen3_moe", "qwen3_next", "qwen3_5_moe_text"),
    *("deepseek_v3", "glm4_moe", "glm4_moe_lite", "minimax_m2", "nemotron_h", "gpt_oss"),
)
"""Families that expert parallelism divides."""
UNDIVIDED_EXPERTS = ("gpt_oss",)
"""Megatron Core refuses expert-tensor parallelism for experts with biases."""
CASES = [
    (mesh, family)
    for mesh, sizes in MESHES.items()
    for family in FAMILIES
    if not ("ep" in sizes and family not in MIXTURES) and not ("etp" in sizes and family in UNDIVIDED_EXPERTS)
]


def _same(got: dict[str, torch.Tensor], want: dict[str, torch.Tensor]) -> str:
    """Return the names of tensors that differ by presence, dtype or any bit."""
    names = got.keys() | want.keys()
    both = got.keys() & want.keys()
    differ = {name for name in both if got[name].dtype != want[name].dtype or not torch.equal(got[name], want[name])}
    return ", ".join(sorted(names - both | differ))


def _round_trips(rank: int, world_size: int, folder: Path) -> dict[str, Any]:
    """Return `{mesh/family: differences}`, and the results that the other tests need."""
    results: dict[str, Any] = {}
    for mesh, family in CASES:
        results[f"{mesh}/{family}"] = _round_trip(folder / family, MESHES[mesh])
    return results | _with_heads_swapped(folder) | _divided(folder, MESHES["tp2_pp2_ep2"])


def _chunks_of(config: Any, dtype: torch.dtype = torch.float32, **sizes: int) -> list[Any]:
    """Return this rank's models without values, on new groups."""
    from nemo_rl.models.megatron.model.build import build_chunks

    section = start_groups(sp=sizes.get("tp", 1) > 1, **sizes)
    chunks = build_chunks(config, section, precision=dtype, device=CPU)
    for tensor in (tensor for chunk in chunks for tensor in chunk.parameters()):
        tensor.data.fill_(float("nan"))
    return list(chunks)


def _round_trip(folder: Path, sizes: dict[str, int]) -> str:
    from nemo_rl.models.megatron.conversion.importer import load_huggingface

    config, want = AutoConfig.from_pretrained(folder), load_file(folder / "model.safetensors")
    chunks = _chunks_of(config, want["lm_head.weight"].dtype if "lm_head.weight" in want else torch.float32, **sizes)
    load_huggingface(chunks, config, folder)
    return _same({name: tensor.clone() for name, tensor in exported(chunks, config)}, want)


def _with_heads_swapped(folder: Path) -> dict[str, Any]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Grouped, "segments", _two_query_heads_swapped(Grouped.segments))
        return {
            "swapped/round trip": _round_trip(folder / "llama", {}),
            "swapped/logits": compare("llama", packed=False)[0],
        }


def _two_query_heads_swapped(segments: Any) -> Any:
    """Return a layout that swaps heads 0 and 1, in both directions."""

    def swapped(self: Grouped, *args: int) -> Iterator[Segment]:
        first, *rest = segments(self, *args)
        middle = first.start + self.head_dim
        yield replace(first, start=middle)
        yield replace(first, stop=middle)
        yield from rest

    return swapped


def _divided(folder: Path, sizes: dict[str, int]) -> dict[str, Any]:
    """Check what shows only if a model is divided in every way."""
    from nemo_rl.models.megatron.conversion.importer import load_huggingface

    results: dict[str, Any] = {"bfloat16": _round_trip(folder / "bfloat16", sizes)}
    config = AutoConfig.from_pretrained(folder / "deepseek_v3")
    chunks = _chunks_of(config, **sizes)
    load_huggingface(chunks, config, folder / "deepseek_v3")
    want = load_file(folder / "deepseek_v3/model.safetensors")
    sent = {name: t.clone() for name, t in exported(chunks, config, torch.bfloat16)}
    kept = "e_score_correction_bias"
    results["sent in bfloat16"] = _same(sent, {n: t if kept in n else t.bfloat16() for n, t in want.items()})
    results["order"] = list(sent)
    results["stacks"] = _stacks_as_in_memory(folder, sizes)
    results["another model"] = _refusal(folder, sizes)
    return results


def _stacks_as_in_memory(folder: Path, sizes: dict[str, int]) -> str:
    """Check that files with transformers' names in memory, one tensor for all experts, fill the same parameters."""
    from nemo_rl.models.megatron.conversion.importer import load_huggingface

    config = AutoConfig.from_pretrained(folder / "qwen3_moe")
    filled = []
    for name in ("qwen3_moe", "qwen3_moe_stacks"):
        chunks = _chunks_of(config, **sizes)
        load_huggingface(chunks, config, folder / name)
        filled.append(dict(chunks[0].named_parameters()))
    return _same(*filled)


def _refusal(folder: Path, sizes: dict[str, int]) -> str:
    """Check that every rank refuses a model without a dense layer's weights, which its second stage does not need."""
    from nemo_rl.models.megatron.conversion.importer import load_huggingface

    config = AutoConfig.from_pretrained(folder / "qwen3_moe")
    config.mlp_only_layers = []
    chunks = _chunks_of(config, **sizes)
    with pytest.raises(CheckpointError) as caught:
        load_huggingface(chunks, AutoConfig.from_pretrained(folder / "qwen3_moe"), folder / "qwen3_moe")
    return str(caught.value)


@pytest.fixture(scope="module")
def results(host, tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """Return the results of each rank."""
    folder = tmp_path_factory.mktemp("models")
    for family in FAMILIES:
        hf_model(family, num_hidden_layers=4).save_pretrained(folder / family)
    hf_model("deepseek_v3", dtype=torch.bfloat16, num_hidden_layers=4).save_pretrained(folder / "bfloat16")
    (folder / "qwen3_moe_stacks").mkdir()
    stacked = hf_model("qwen3_moe", num_hidden_layers=4).state_dict()
    save_file(stacked, folder / "qwen3_moe_stacks/model.safetensors")
    return host.run(_round_trips, RANKS, folder)


@pytest.mark.parametrize(("mesh", "family"), CASES)
def test_a_round_trip_gives_every_tensor_back_bit_for_bit_on_every_rank(results, mesh, family) -> None:
    assert [rank[f"{mesh}/{family}"] for rank in results] == [""] * RANKS


def test_comparing_logits_finds_two_swapped_heads_that_a_round_trip_misses(results) -> None:
    assert results[0]["swapped/round trip"] == ""
    assert results[0]["swapped/logits"] > 1e-3


def test_bfloat16_stays_bfloat16(results) -> None:
    assert [rank["bfloat16"] for rank in results] == [""] * RANKS


def test_weights_except_correction_biases_are_sent_in_the_dtype_of_the_receiver(results) -> None:
    assert [rank["sent in bfloat16"] for rank in results] == [""] * RANKS


def test_all_ranks_send_in_the_same_order(results) -> None:
    assert all(rank["order"] == results[0]["order"] for rank in results)


def test_files_with_all_experts_in_one_tensor_fill_the_same_parameters(results) -> None:
    assert [rank["stacks"] for rank in results] == [""] * RANKS


def test_a_model_that_its_configuration_does_not_describe_is_refused_by_name_on_every_rank(results) -> None:
    for rank in results:
        assert (
            "no Hugging Face name: decoder.layers.0.mlp.experts.local_experts.0.linear_fc1.weight"
            in rank["another model"]
        )
        assert "lacks: decoder.layers.0.mlp.linear_fc1.weight" in rank["another model"]
