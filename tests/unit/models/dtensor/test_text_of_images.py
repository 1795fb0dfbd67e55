"""A text policy on a checkpoint that also reads images: its text model is trained, and the rest stays as it is.

The folder has a tiny Gemma 3 with its vision tower. The reference is the whole model of transformers.
"""

import importlib.util
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from policy_helpers import WeightedNLL, hf_logprobs, policy_config, random_batch, run_ranks
from safetensors.torch import load_file
from transformers import (
    AutoModelForCausalLM,
    Gemma3Config,
    Gemma3ForConditionalGeneration,
    Idefics2Config,
)

from nemo_rl.config import ClusterConfig, PolicyConfig
from nemo_rl.distributed.ranks.placements import whole
from nemo_rl.files.manifest import write_manifest
from nemo_rl.models.adapters.slots import linear_names
from nemo_rl.models.dtensor.backend import DTensorBackend
from nemo_rl.models.dtensor.training_backend import DTensorTraining
from nemo_rl.models.generation.factory import check_engine_model
from nemo_rl.models.huggingface.layers import body, decoder_layers, parts_without_text
from nemo_rl.models.policy.batching import count_valid, logprob_strategy, shard_batch, training_strategy
from nemo_rl.models.policy.workers.rank import PolicyWorker
from nemo_rl.utils.errors import ConfigError

CPU = torch.device("cpu")
DATA = random_batch()
LAYERS = ["sliding_attention", "full_attention"]
HEADS = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16, "initializer_range": 0.1}
SIZES = {"vocab_size": 264, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, **HEADS}
TOWER = {"hidden_size": 16, "intermediate_size": 32, "num_attention_heads": 2, "image_size": 28, "patch_size": 14}
IMAGE_TOKENS = {"mm_tokens_per_image": 4, "image_token_index": 263, "boi_token_index": 261, "eoi_token_index": 262}
OTHERS = ("vision_tower.", "multi_modal_projector.")
"""Beginnings of the names of what does not read text, in the files."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    torch.manual_seed(3)
    text = {**SIZES, "layer_types": LAYERS, "sliding_window": 5, "query_pre_attn_scalar": 16, "eos_token_id": 2}
    model = Gemma3ForConditionalGeneration(
        Gemma3Config(text_config=text, vision_config={**TOWER, "num_hidden_layers": 1}, **IMAGE_TOKENS)
    )
    path = tmp_path_factory.mktemp("gemma3")
    model.save_pretrained(path)
    return path


def trained(rank: int, world_size: int, name: str, out: str, values: dict[str, Any]) -> dict[str, Any]:
    """Make two updates, and save a checkpoint; return the scores before them."""
    config = policy_config(name, **values)
    worker = PolicyWorker(DTensorBackend(config, CPU, init_reference_model=False), config)
    shards = world_size // config.dtensor_cfg.tensor_parallel_size
    rank = rank % shards
    batch = shard_batch(DATA, shards, training_strategy(config), shares_prompts=False)
    scored = shard_batch(DATA, shards, logprob_strategy(config), shares_prompts=False)
    scores = worker.get_logprobs(scored.data[rank], scored.sizes[rank])
    for _ in range(2):
        worker.train(batch.data[rank], batch.sizes[rank], WeightedNLL(), count_valid(DATA))
    worker.save_checkpoint(f"{out}/policy/weights", f"{out}/policy/optimizer")
    parameters = dict(worker.backend.model.hf.named_parameters())
    return {
        "scores": scored.restore([scores]) if shards == 1 else None,
        "weights": {key: whole(value.detach()).clone() for key, value in parameters.items()},
        "frozen": {key for key, value in parameters.items() if not value.requires_grad},
    }


PACKED = {"sequence_packing": {"enabled": True, "train_mb_tokens": 64, "logprob_mb_tokens": 64}}


@pytest.mark.parametrize(
    ("ranks", "values"),
    [
        (1, {}),
        (1, {**PACKED, "dtensor_cfg": {"activation_checkpointing": True}}),
        (2, {"precision": "bfloat16"}),
        (2, {**PACKED, "dtensor_cfg": {"tensor_parallel_size": 2}}),
    ],
    ids=["one rank", "packed and recomputed", "sharded, bfloat16", "tensor parallel"],
)
def test_text_is_trained_and_the_rest_keeps_its_bits(folder, tmp_path, ranks, values) -> None:
    before = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    results = run_ranks(trained, ranks, str(folder), str(tmp_path), values)
    result = results[0]
    if result["scores"] is not None:
        torch.testing.assert_close(result["scores"].double(), hf_logprobs(before, DATA).detach(), rtol=0, atol=2e-6)
    frozen = {name for name, _ in before.named_parameters() if any(part in name for part in OTHERS)}
    assert result["frozen"] == frozen
    assert len(frozen) > 20
    changed = {name for name, value in before.named_parameters() if not torch.equal(value, result["weights"][name])}
    assert changed == set(result["weights"]) - frozen


def test_the_export_is_the_whole_model_with_its_old_tower(folder, tmp_path) -> None:
    step = tmp_path / "step_1"
    (result,) = run_ranks(trained, 1, str(folder), str(step), {})
    write_manifest(step)
    backend = DTensorTraining()
    weights = backend.find_weights(step)
    backend.export(weights, tmp_path / "hf", str(folder))
    old, new = load_file(folder / "model.safetensors"), load_file(next((tmp_path / "hf").glob("*.safetensors")))
    assert old.keys() == new.keys()
    same = {name for name in old if torch.equal(old[name], new[name])}
    assert same == {name for name in old if name.startswith(OTHERS)}
    described = [json.loads((each / "config.json").read_text()) for each in (folder, tmp_path / "hf")]
    assert [each["architectures"] for each in described] == [["Gemma3ForConditionalGeneration"]] * 2
    towers = [each["vision_config"] | {"dtype": "float32"} for each in described]
    assert towers[0] == towers[1]
    exported = AutoModelForCausalLM.from_pretrained(tmp_path / "hf", dtype=torch.float32)
    for name, value in exported.named_parameters():
        assert torch.equal(value, result["weights"][name]), name


def test_the_parts_of_a_model_with_a_tower(folder) -> None:
    model = AutoModelForCausalLM.from_pretrained(folder)
    assert body(model) is model.model.language_model
    assert decoder_layers(model) == [*model.model.language_model.layers]
    assert parts_without_text(model) == [model.model.vision_tower, model.model.multi_modal_projector]
    names = linear_names(model)
    assert len(names) == 14  # four of attention and three of the feed-forward network, in two layers
    assert all(name.startswith("model.language_model.layers.") for name in names)


def test_a_checkpoint_without_a_language_model_is_refused_before_any_worker(tmp_path) -> None:
    Idefics2Config().save_pretrained(tmp_path)
    config = PolicyConfig.build(model_name=str(tmp_path), generation={"backend": "hf"})
    with pytest.raises(ConfigError, match=r"\(idefics2\) reads more than text, and transformers has no language model"):
        check_engine_model(config, ClusterConfig.build(device="cpu"))


def test_vllm_for_cpus_needs_the_packages_of_the_image_processor(folder, monkeypatch) -> None:
    config = PolicyConfig.build(model_name=str(folder), generation={"backend": "vllm"})
    found = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "torchvision" else found(name))
    with pytest.raises(ConfigError, match=r"vLLM needs torchvision .* Set policy\.generation\.backend=hf"):
        check_engine_model(config, ClusterConfig.build(device="cpu"))
    config = PolicyConfig.build(model_name=str(folder), generation={"backend": "hf"})
    check_engine_model(config, ClusterConfig.build(device="cpu"))
